/* Blocks of a linear layer for vectors of four floats: NEON, and whatever the compiler makes of them elsewhere. A panel's block of
 * inputs stays in the first-level cache while the rows go by. */
#include "dequantise.h"

#define TILE_ROWS 5
#define DEPTH_BLOCK 640 /* inputs whose part of a panel stays in the first-level cache */
#define UNPACK_DEPTH 320 /* inputs of a quantised panel that are floats at once */
#define ROW_BLOCK 160   /* rows that stay in the second-level cache while the panels go by */
/* Floats: how far weights are fetched ahead of their use. A row or two wait for memory alone, which the processor's own
 * prefetcher feeds best; with more, arithmetic takes as long, and a fetch some pages ahead also hides the page walks. */
#define AHEAD(rows) ((rows) <= 2 ? 128 : 3072)

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
static const Tile TILES[] = {NULL, tile_1, tile_2, tile_3, tile_4, tile_5};

/* One panel for a block of rows. `out` has room for a whole panel. */
static void panel_rows(const struct Linear *job, long rows, const float *x, long panel, float *out, long out_stride) {
    float room[UNPACK_DEPTH * PANEL];
    int quantised = job->weights->format != FLOAT32;
    long depth = job->in_features, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    long most = quantised ? UNPACK_DEPTH : tiles > 1 ? DEPTH_BLOCK : depth;
    for (long begin = 0; begin < depth; begin += most) {
        long count = MINIMUM(most, depth - begin);
        const float *floats = panel_floats(job->weights, panel, begin, count, room);
        for (long t = 0; t < tiles; t++) {
            long first = rows * t / tiles, last = rows * (t + 1) / tiles;
            TILES[last - first](x + first * depth + begin, depth, floats, count, out + first * out_stride, out_stride, begin > 0);
        }
    }
}

static void some_panels_rows(const struct Linear *job, long first, long rows, struct Share panels) {
    const float *x = job->x + first * job->in_features;
    for (long p = panels.begin; p < panels.end; p++) {
        long column = p * PANEL, width = MINIMUM(PANEL, job->out_features - column);
        float *out = job->out + first * job->out_features + column;
        if (width == PANEL) {
            panel_rows(job, rows, x, p, out, job->out_features);
        } else { /* the last panel, whose outputs beyond the weight's are dropped */
            float whole[ROW_BLOCK * PANEL];
            panel_rows(job, rows, x, p, whole, PANEL);
            for (long r = 0; r < rows; r++)
                memcpy(out + r * job->out_features, whole + r * PANEL, (size_t)width * sizeof(float));
        }
    }
}

/* What is read after a panel is fetched with it: nothing needs to know `then`. */
static void linear_block(const struct Linear *job, long first, long rows, const struct Panels *panels, const uint8_t *then) {
    (void)then;
    for (long s = 0; s < panels->shares; s++) some_panels_rows(job, first, rows, panels->share[s]);
}
