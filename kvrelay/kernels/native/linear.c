/* Linear layers on packed weights.
 *
 * A weight [out, in] is held as panels [out / PANEL][in][PANEL]: all of a panel's outputs side by side for each input, the last
 * panel filled up with zeros. So weights stream through the core in one sequence whatever the batch, and one copy serves every
 * number of rows. A tile is a few rows of x times one panel, held in registers; every output is one chain of multiply-adds over
 * the inputs in order, and cutting the chain into blocks of inputs (so that a panel's block stays in the first-level cache
 * while the rows go by) changes no bit. */
#include <string.h>

#include "common.h"

#if LANES == 16
#define VECTORS 2 /* per panel */
#define TILE_ROWS 12
#elif LANES == 8
#define VECTORS 2
#define TILE_ROWS 6
#else
#define VECTORS 4
#define TILE_ROWS 5
#endif
#define PANEL (VECTORS * LANES)
#define DEPTH_BLOCK 640 /* inputs whose part of a panel stays in the first-level cache */
#define ROW_BLOCK 160   /* rows that stay in the second-level cache while the panels go by */
/* Floats: how far weights are fetched ahead of their use. A row or two wait for memory alone, which the processor's own
 * prefetcher feeds best; with more, arithmetic takes as long, and a fetch some pages ahead also hides the page walks. */
#define AHEAD(rows) ((rows) <= 2 ? 128 : 3072)

EXPORT long panel_width(void) { return PANEL; }

struct Linear {
    const float *x, *panels, *bias;
    float *out;
    long rows, in_features, out_features;
};

/* out[rows][PANEL] (+)= x[rows][depth] * panel[depth][PANEL] */
INLINE void tile(const int rows, const float *x, long x_stride, const float *panel, long depth, float *out, long out_stride,
                 int resume) {
    vec sum[TILE_ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = resume ? load(out + r * out_stride + v * LANES) : splat(0.0f);
    long k = 0;
#ifdef LANE_MULTIPLY /* in assembly, because GCC copies accumulators around, which costs a fifth of the multiply-adds */
#define STEP(lane)                                                                                                            \
    UNROLL for (int v = 0; v < VECTORS; v++) weight[v] = load(panel + (k + lane) * PANEL + v * LANES);                        \
    UNROLL for (int v = 0; v < VECTORS; v++)                                                                                  \
        UNROLL for (int r = 0; r < rows; r++)                                                                                 \
            __asm__("fmla %0.4s, %1.4s, %2.s[" #lane "]" : "+w"(sum[r][v]) : "w"(weight[v]), "w"(input[r]));
    for (; k + 4 <= depth; k += 4) {
        vec input[TILE_ROWS], weight[VECTORS];
        UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(panel + (k + i) * PANEL + AHEAD(rows));
        UNROLL for (int r = 0; r < rows; r++) input[r] = load(x + r * x_stride + k);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
#undef STEP
#endif
    for (; k < depth; k++) {
        vec weight[VECTORS];
        __builtin_prefetch(panel + k * PANEL + AHEAD(rows));
        if (PANEL > 16) __builtin_prefetch(panel + k * PANEL + AHEAD(rows) + 16);
        UNROLL for (int v = 0; v < VECTORS; v++) weight[v] = load(panel + k * PANEL + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec input = splat(x[r * x_stride + k]);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = multiply_add(weight[v], input, sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + v * LANES, sum[r][v]);
}

/* One function per number of rows, so that each has the registers to itself. */
typedef void (*Tile)(const float *x, long x_stride, const float *panel, long depth, float *out, long out_stride, int resume);
#define TILE(rows)                                                                                                            \
    static __attribute__((noinline)) void tile_##rows(const float *x, long x_stride, const float *panel, long depth,          \
                                                      float *out, long out_stride, int resume) {                              \
        tile(rows, x, x_stride, panel, depth, out, out_stride, resume);                                                       \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5)
#if TILE_ROWS >= 6
TILE(6)
#endif
#if TILE_ROWS >= 12
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
static const Tile TILES[] = {
    NULL, tile_1, tile_2, tile_3, tile_4, tile_5,
#if TILE_ROWS >= 6
    tile_6,
#endif
#if TILE_ROWS >= 12
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

/* One panel for a block of rows. `out` has room for a whole panel. */
static void panel_rows(const struct Linear *job, long rows, const float *x, const float *panel, float *out, long out_stride) {
    long depth = job->in_features, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    long blocks = tiles > 1 ? (depth + DEPTH_BLOCK - 1) / DEPTH_BLOCK : 1;
    for (long block = 0; block < blocks; block++) {
        long begin = depth * block / blocks & ~3L, end = block + 1 < blocks ? depth * (block + 1) / blocks & ~3L : depth;
        for (long t = 0; t < tiles; t++) {
            long first = rows * t / tiles, last = rows * (t + 1) / tiles;
            TILES[last - first](x + first * depth + begin, depth, panel + begin * PANEL, end - begin, out + first * out_stride,
                                out_stride, block > 0);
        }
    }
}

static void add_bias(float *out, long out_stride, const float *bias, long rows, long width) {
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < width; n++) out[r * out_stride + n] += bias[n];
}

static void linear_share(void *arguments) {
    const struct Linear *job = arguments;
    long panels = (job->out_features + PANEL - 1) / PANEL, blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct Share share = my_share(panels * blocks);
    for (long task = share.begin; task < share.end; task++) {
        long column = task % panels * PANEL, width = MINIMUM(PANEL, job->out_features - column);
        long first = job->rows * (task / panels) / blocks, rows = job->rows * (task / panels + 1) / blocks - first;
        const float *x = job->x + first * job->in_features, *panel = job->panels + column * job->in_features;
        float *out = job->out + first * job->out_features + column;
        if (width == PANEL) {
            panel_rows(job, rows, x, panel, out, job->out_features);
        } else { /* the last panel, whose outputs beyond the weight's are dropped */
            float whole[ROW_BLOCK * PANEL];
            panel_rows(job, rows, x, panel, whole, PANEL);
            for (long r = 0; r < rows; r++)
                memcpy(out + r * job->out_features, whole + r * PANEL, (size_t)width * sizeof(float));
        }
        if (job->bias) add_bias(out, job->out_features, job->bias + column, rows, width);
    }
}

EXPORT void linear(const float *x, const float *panels, const float *bias, float *out, long rows, long in_features,
                   long out_features, int threads) {
    struct Linear job = {x, panels, bias, out, rows, in_features, out_features};
    on_threads(threads, linear_share, &job);
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
