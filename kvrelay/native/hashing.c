#include <stdint.h>
#include <string.h>
#include <sys/types.h>

/* Of Python's C interface, which the process that loads this has; no header is needed. A list, and an integer of one digit (of
   30 bits), are read as they lie in memory, which costs a fraction of asking; hashing.py checks that it is so. */
struct List {
    ssize_t references;
    void *type;
    ssize_t size;
    void **items;
};
struct Integer {
    ssize_t references;
    void *type;
    uint64_t size; /* `plain` for a positive number of one digit: it depends on the version of Python */
    uint32_t digit;
};
extern char PyLong_Type;
extern long PyLong_AsLong(void *number);

static long value_of(const struct Integer *number, uint64_t plain) {
    if (number->type == &PyLong_Type && number->size == plain)
        return number->digit;
    return PyLong_AsLong((void *)number);
}
extern void *PyErr_Occurred(void);
extern void PyErr_Clear(void);

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908ULL, 0xbb67ae8584caa73bULL, 0x3c6ef372fe94f82bULL, 0xa54ff53a5f1d36f1ULL,
    0x510e527fade682d1ULL, 0x9b05688c2b3e6c1fULL, 0x1f83d9abfb41bd6bULL, 0x5be0cd19137e2179ULL};

#define ROUNDS \
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3) \
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4) \
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8) \
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13) \
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9) \
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11) \
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10) \
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5) \
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0) \
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)

#define ROTATE(x, n) (((x) >> (n)) | ((x) << (64 - (n))))
#define MIX(a, b, c, d, x, y)                            \
    a += b + (x); d = ROTATE(d ^ a, 32); c += d; b = ROTATE(b ^ c, 24); \
    a += b + (y); d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 63);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf)                 \
    MIX(v0, v4, v8, vc, m[s0], m[s1]) MIX(v1, v5, v9, vd, m[s2], m[s3])                       \
    MIX(v2, v6, va, ve, m[s4], m[s5]) MIX(v3, v7, vb, vf, m[s6], m[s7])                       \
    MIX(v0, v5, va, vf, m[s8], m[s9]) MIX(v1, v6, vb, vc, m[sa], m[sb])                       \
    MIX(v2, v7, v8, vd, m[sc], m[sd]) MIX(v3, v4, v9, ve, m[se], m[sf])

static void compress_by_one(uint64_t h[8], const uint64_t m[16], uint64_t length, int last) {
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = IV[0], v9 = IV[1], va = IV[2], vb = IV[3];
    uint64_t vc = IV[4] ^ length, vd = IV[5], ve = last ? ~IV[6] : IV[6], vf = IV[7];
    ROUNDS
    h[0] ^= v0 ^ v8; h[1] ^= v1 ^ v9; h[2] ^= v2 ^ va; h[3] ^= v3 ^ vb;
    h[4] ^= v4 ^ vc; h[5] ^= v5 ^ vd; h[6] ^= v6 ^ ve; h[7] ^= v7 ^ vf;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
/* The same, four columns or diagonals at a time, in half the time: where a vector can be rotated by one instruction. */
typedef uint64_t Four __attribute__((vector_size(32)));
#undef ROUND
#define MIX_FOUR(x, y)                                                  \
    a += b + (x); d = ROTATE(d ^ a, 32); c += d; b = ROTATE(b ^ c, 24); \
    a += b + (y); d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 63);
#define TURN(i, j, k) b = TURNED(b, i), c = TURNED(c, j), d = TURNED(d, k);
#define TURNED(x, by) __builtin_shuffle(x, (Four){(by) & 3, (1 + (by)) & 3, (2 + (by)) & 3, (3 + (by)) & 3})
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf)                                     \
    MIX_FOUR(((Four){m[s0], m[s2], m[s4], m[s6]}), ((Four){m[s1], m[s3], m[s5], m[s7]})) TURN(1, 2, 3)            \
    MIX_FOUR(((Four){m[s8], m[sa], m[sc], m[se]}), ((Four){m[s9], m[sb], m[sd], m[sf]})) TURN(3, 2, 1)

__attribute__((target("avx512f,avx512vl"))) static void compress_by_four(uint64_t h[8], const uint64_t m[16], uint64_t length,
                                                                         int last) {
    Four a = {h[0], h[1], h[2], h[3]}, b = {h[4], h[5], h[6], h[7]}, c = {IV[0], IV[1], IV[2], IV[3]};
    Four d = {IV[4] ^ length, IV[5], last ? ~IV[6] : IV[6], IV[7]};
    ROUNDS
    for (int i = 0; i < 4; i++) {
        h[i] ^= a[i] ^ c[i];
        h[4 + i] ^= b[i] ^ d[i];
    }
}
#define HAS_FOUR __builtin_cpu_supports("avx512vl")
#else
#define compress_by_four compress_by_one
#define HAS_FOUR 0
#endif

/* Hashes `count` blocks of `size` tokens, from tokens[first] on, into `out`; `parent` is the hash before them.
   Returns 0, or -1 if a token is no 32-bit integer (then an exception may be set). */
int kvrelay_hash_blocks(void *tokens, ssize_t first, ssize_t size, ssize_t count, const char *parent, char *out,
                        ssize_t plain) {
    void (*compress)(uint64_t *, const uint64_t *, uint64_t, int) = HAS_FOUR ? compress_by_four : compress_by_one;
    uint64_t m[16], h[8];
    void **items = ((const struct List *)tokens)->items;
    uint64_t total = 16 + 4 * (uint64_t)size;
    for (ssize_t block = 0; block < count; block++, first += size, parent = out, out += 16) {
        memcpy(h, IV, sizeof h);
        h[0] ^= 0x01010000 ^ 16; /* no key, 16 bytes out */
        int32_t *words = (int32_t *)m;
        memcpy(words, parent, 16);
        int filled = 4;
        uint64_t length = 0;
        for (ssize_t i = first; i < first + size; i++) {
            long token = value_of(items[i], (uint64_t)plain);
            if (token != (int32_t)token || (token == -1 && PyErr_Occurred()))
                return -1;
            if (filled == 32) { /* full, and more to come */
                compress(h, m, length += 128, 0);
                filled = 0;
            }
            words[filled++] = (int32_t)token;
        }
        memset(words + filled, 0, 4 * (32 - filled));
        compress(h, m, total, 1);
        memcpy(out, h, 16);
    }
    return 0;
}

/* Whether the tokens of a list are all from 0 to `limit` - 1. */
int kvrelay_tokens_below(const struct List *tokens, long limit, ssize_t plain) {
    for (ssize_t i = 0; i < tokens->size; i++) {
        long token = value_of(tokens->items[i], (uint64_t)plain);
        if (token < 0 || token >= limit) {
            PyErr_Clear(); /* of a number that is no long */
            return 0;
        }
    }
    return 1;
}
