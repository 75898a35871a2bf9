/* Linear layers on packed weights.
 *
 * A weight [out, in] is held as panels [out / PANEL][in][PANEL]: all of a panel's outputs side by side for each input, the last
 * panel filled up with zeros. So weights stream through the core in one sequence whatever the batch, and one copy serves every
 * number of rows. A tile is a few rows of x times one panel, held in registers; every output is one chain of multiply-adds over
 * the inputs in order, and cutting the chain into blocks of inputs changes no bit. How rows, panels and inputs are cut into tiles
 * that suit the processor is in linear_wide.h (AVX2, AVX-512) and linear_narrow.h (all others). */
#include <string.h>
#include <sys/mman.h>

#include "common.h"

struct Linear {
    const float *x, *panels, *bias;
    float *out;
    long rows, in_features, out_features;
};

#if LANES >= 8
#include "linear_wide.h"
#else
#include "linear_narrow.h"
#endif

EXPORT long panel_width(void) { return PANEL; }

static void add_bias(float *out, long out_stride, const float *bias, long rows, long width) {
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < width; n++) out[r * out_stride + n] += bias[n];
}

/* A thread's share is some panels of a block of rows, then all panels of the next ones, then some panels of the last. */
static void linear_share(void *arguments) {
    const struct Linear *job = arguments;
    long panels = (job->out_features + PANEL - 1) / PANEL, blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct Share share = my_share(panels * blocks);
    for (long task = share.begin, taken; task < share.end; task += taken) {
        long block = task / panels, first_panel = task % panels;
        taken = MINIMUM(panels - first_panel, share.end - task);
        long first = job->rows * block / blocks, rows = job->rows * (block + 1) / blocks - first;
        linear_block(job, first, rows, (struct Share){first_panel, first_panel + taken});
        long column = first_panel * PANEL, width = MINIMUM(taken * PANEL, job->out_features - column);
        float *out = job->out + first * job->out_features + column;
        if (job->bias) add_bias(out, job->out_features, job->bias + column, rows, width);
    }
}

EXPORT void linear(const float *x, const float *panels, const float *bias, float *out, long rows, long in_features,
                   long out_features, int threads) {
    struct Linear job = {x, panels, bias, out, rows, in_features, out_features};
    on_threads(threads, linear_share, &job);
}

/* Asks for memory whose pages are 2 MiB: reading weights once then takes a page walk for 2 MiB instead of 4 KiB. */
EXPORT void prefer_huge_pages(void *memory, long size_bytes) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)size_bytes, MADV_HUGEPAGE);
#endif
}

struct Pack {
    const float *weight;
    float *panels;
    long in_features, out_features;
};

static void pack_share(void *arguments) {
    const struct Pack *job = arguments;
    long depth = job->in_features;
    struct Share share = my_share((job->out_features + PANEL - 1) / PANEL);
    for (long p = share.begin; p < share.end; p++) {
        const float *from = job->weight + p * PANEL * depth;
        float *to = job->panels + p * PANEL * depth;
        long width = MINIMUM(PANEL, job->out_features - p * PANEL);
        if (width < PANEL) memset(to, 0, (size_t)(PANEL * depth) * sizeof(float));
        for (long k = 0; k < depth; k++)
            for (long n = 0; n < width; n++) to[k * PANEL + n] = from[n * depth + k];
    }
}

EXPORT void pack_linear(const float *weight, float *panels, long in_features, long out_features, int threads) {
    struct Pack job = {weight, panels, in_features, out_features};
    on_threads(threads, pack_share, &job);
}

struct Gather {
    const int64_t *ids;
    const float *panels;
    float *out;
    long rows, in_features;
};

static void gather_share(void *arguments) {
    const struct Gather *job = arguments;
    long depth = job->in_features;
    struct Share share = my_share(job->rows);
    for (long r = share.begin; r < share.end; r++) {
        const float *from = job->panels + job->ids[r] / PANEL * PANEL * depth + job->ids[r] % PANEL;
        for (long k = 0; k < depth; k++) job->out[r * depth + k] = from[k * PANEL];
    }
}

/* Rows of the weight by number: the embedding of a model whose head shares it. Returns `rows`, or the place of the first number
 * that the weight does not have. */
EXPORT int gather_rows(const int64_t *ids, const float *panels, float *out, long rows, long in_features, long out_features,
                       int threads) {
    for (long r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= out_features) return (int)r;
    struct Gather job = {ids, panels, out, rows, in_features};
    on_threads(rows > 1 ? threads : 1, gather_share, &job);
    return (int)rows;
}
