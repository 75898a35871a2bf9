/* From a checkpoint's weights to panels (weights.h), and the memory for them. */
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "weights.h"

/* Asks for memory whose pages are 2 MiB: reading weights once then takes a page walk for 2 MiB instead of 4 KiB. */
EXPORT void prefer_huge_pages(void *memory, long size_bytes) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)size_bytes, MADV_HUGEPAGE);
#endif
}

#define HUGE_PAGE (1L << 21)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Maps a file that processes share to where huge pages can begin. NULL if that cannot be. */
EXPORT void *map_shared(int descriptor, long size_bytes, int writable) {
    const size_t size = (size_t)size_bytes, whole = size + HUGE_PAGE;
    char *space = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return NULL;
    const size_t before = -(size_t)space % HUGE_PAGE;
    if (before) munmap(space, before);
    const size_t used = (size + 4095) / 4096 * 4096;
    if (whole - before > used) munmap(space + before + used, whole - before - used);
    const int access = PROT_READ | (writable ? PROT_WRITE : 0);
    void *memory = mmap(space + before, size, access, MAP_SHARED | MAP_FIXED, descriptor, 0);
    if (memory == MAP_FAILED) {
        munmap(space + before, used);
        return NULL;
    }
    prefer_huge_pages(memory, size_bytes);
    return memory;
}

/* What was written to memory that processes share is moved to huge pages, where the kernel can, and not written to again. */
EXPORT void settle_shared(void *memory, long size_bytes) {
    madvise(memory, (size_t)size_bytes, MADV_COLLAPSE);
    mprotect(memory, (size_t)size_bytes, PROT_READ);
}

EXPORT void unmap_shared(void *memory, long size_bytes) {
    munmap(memory, (size_t)size_bytes);
}

EXPORT long packed_bytes(long in_features, long out_features, long format) {
    const struct Group group = GROUPS[format];
    return (out_features + PANEL - 1) / PANEL * (in_features / group.inputs) * group.bytes;
}

struct Pack {
    const uint8_t *weight; /* [out_features][in_features], of quantised weights in GGUF's blocks */
    uint8_t *panels;
    long in_features, out_features, format;
};

static void pack_floats(const float *from, float *to, long depth, long width) {
    for (long k = 0; k < depth; k++)
        for (long n = 0; n < width; n++) to[k * PANEL + n] = from[n * depth + k];
}

static uint8_t *put_half(const uint8_t *block, uint8_t *to, long n) {
    memcpy(to + 2 * n, block, 2);
    return to + HALVES;
}

/* The quants of 32 inputs, 4 bits each, from the low or the high halves of the bytes. */
static void put_nibbles(const uint8_t *low, const uint8_t *high, int high_shift, int low_shift, uint8_t *to, long n) {
    for (int eight = 0; eight < 4; eight++) {
        uint32_t word = 0;
        for (int k = 0; k < 8; k++) {
            int at = 8 * eight + k;
            uint32_t quant = at < 16 ? low[at] >> low_shift & 15 : high[at - 16] >> high_shift & 15;
            word |= quant << 4 * k;
        }
        memcpy(to + (eight * PANEL + n) * 4, &word, 4);
    }
}

/* Eight scales and eight minima of 6 bits in 12 bytes. */
static uint8_t scale_of(const uint8_t *packed, int i) {
    return i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
}
static uint8_t minimum_of(const uint8_t *packed, int i) {
    return i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4;
}

static void put_q4_k(const uint8_t *block, uint8_t *to, long n) {
    to = put_half(block + 2, put_half(block, to, n), n);
    const uint8_t *scales = block + 4, *quants = block + 16;
    for (int part = 0; part < 8; part++, to += 2 * PANEL + QUANTS_4(32)) {
        const uint8_t *from = quants + part / 2 * 32;
        to[n] = scale_of(scales, part);
        to[PANEL + n] = minimum_of(scales, part);
        put_nibbles(from, from + 16, part % 2 * 4, part % 2 * 4, to + 2 * PANEL, n);
    }
}

static void put_q6_k(const uint8_t *block, uint8_t *to, long n) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    to = put_half(block + 208, to, n);
    for (int k = 0; k < 256; k++) {
        int half = k / 128, run = k % 128 / 32, i = k % 32;
        int quant = low[half * 64 + run % 2 * 32 + i] >> run / 2 * 4 & 15;
        quant |= (high[half * 32 + i] >> 2 * run & 3) << 4;
        uint8_t *part = to + k / 16 * (PANEL + QUANTS_8(16));
        part[n] = scales[k / 16];
        part[PANEL + k % 16 * PANEL + n] = (uint8_t)(quant - 32);
    }
}

/* One block of one output into its group. */
static void put_block(long format, const uint8_t *block, uint8_t *to, long n) {
    switch (format) {
    case Q4_0:
        to = put_half(block, to, n);
        put_nibbles(block + 2, block + 2, 4, 0, to, n);
        break;
    case Q4_1:
        to = put_half(block + 2, put_half(block, to, n), n);
        put_nibbles(block + 4, block + 4, 4, 0, to, n);
        break;
    case Q8_0:
        to = put_half(block, to, n);
        for (int k = 0; k < 32; k++) to[k * PANEL + n] = block[2 + k];
        break;
    case Q4_K:
        put_q4_k(block, to, n);
        break;
    case Q6_K:
        put_q6_k(block, to, n);
        break;
    }
}

static void pack_share(void *arguments) {
    const struct Pack *job = arguments;
    const struct Group group = GROUPS[job->format];
    long blocks = job->in_features / group.inputs, row_bytes = blocks * group.block_bytes;
    struct Share share = my_share((job->out_features + PANEL - 1) / PANEL);
    for (long p = share.begin; p < share.end; p++) {
        const uint8_t *from = job->weight + p * PANEL * row_bytes;
        uint8_t *to = job->panels + p * blocks * group.bytes;
        long width = MINIMUM(PANEL, job->out_features - p * PANEL);
        if (width < PANEL) memset(to, 0, (size_t)(blocks * group.bytes));
        if (job->format == FLOAT32) {
            pack_floats((const float *)from, (float *)to, job->in_features, width);
            continue;
        }
        for (long n = 0; n < width; n++)
            for (long b = 0; b < blocks; b++)
                put_block(job->format, from + n * row_bytes + b * group.block_bytes, to + b * group.bytes, n);
    }
}

EXPORT void pack_weights(const void *weight, void *panels, long in_features, long out_features, long format, int threads) {
    struct Pack job = {weight, panels, in_features, out_features, format};
    on_threads(threads, pack_share, &job);
}
