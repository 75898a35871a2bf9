/* Blocks of a linear layer for AVX2 and AVX-512.
 *
 * A block of rows is first copied, tile by tile, to [inputs][rows of the tile]: so a tile reads one short run of floats for each
 * input, and the copy stays in the second-level cache while the panels go by. While a panel's tiles are computed, all of them
 * fetch an even share of the panel that comes next, in this layer or the next one, so that reading hides behind arithmetic.
 * Few rows wait for memory alone: they go through two panels at a time, for the processor's own prefetcher reads two streams
 * faster than one. */
#include "dequantise.h"
#include "transpose.h"

#if LANES == 16   /* and 32 registers */
#define TILE_ROWS 14
#define PAIR_ROWS 7
#else /* 16 registers */
#define TILE_ROWS 6
#define PAIR_ROWS 3
#endif
#define ROW_BLOCK (98 / TILE_ROWS * TILE_ROWS)
#define COPY_FLOATS (1L << 16) /* a quarter of a second-level cache of 1 MiB */
#define DEPTH_BLOCK 1024       /* inputs whose part of a panel stays there too */
#define AHEAD 1024             /* floats: how far a panel that only one tile reads is fetched ahead of its use */
#define LINE 16                /* floats of a cache line */
#define UNPACK_DEPTH 128       /* inputs of a quantised panel that are floats at once: half a first-level cache */

/* What a tile is computed from: x[depth][rows], and panels that are `panel_stride` apart. */
struct Operands {
    const float *x, *panel;
    const char *fetch;
    long depth, panel_stride, fetch_step; /* in floats; in bytes */
};

/* out[rows][panels * PANEL] (+)= x[depth][rows] * panel[depth][panels * PANEL]. A tile that is alone fetches the weights that it
 * comes to soon, one of several its share of the next panel. */
INLINE void tile(const int rows, const int panels, const int alone, const struct Operands *from, float *out, long out_stride,
                 int resume) {
    const float *x = from->x, *panel = from->panel;
    const char *fetch = from->fetch;
    const long panel_stride = from->panel_stride, fetch_step = from->fetch_step;
    vec sum[TILE_ROWS][2 * VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < panels * VECTORS; v++)
            sum[r][v] = resume ? load(out + r * out_stride + v * LANES) : splat(0.0f);
    for (long k = from->depth; k > 0; k--) {
        vec weight[2 * VECTORS];
        UNROLL for (int p = 0; alone && p < panels; p++)
            UNROLL for (int line = 0; line < PANEL; line += LINE)
                __builtin_prefetch(panel + p * panel_stride + AHEAD + line);
        if (!alone) __builtin_prefetch(fetch, 0, 2), fetch += fetch_step;
        UNROLL for (int v = 0; v < panels * VECTORS; v++)
            weight[v] = load(panel + v / VECTORS * panel_stride + v % VECTORS * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec input = splat(x[r]);
            UNROLL for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = multiply_add(weight[v], input, sum[r][v]);
        }
        x += rows, panel += PANEL;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < panels * VECTORS; v++) store(out + r * out_stride + v * LANES, sum[r][v]);
}

/* One function per size, so that each has the registers to itself. */
typedef void (*Tile)(const struct Operands *from, float *out, long out_stride, int resume);
#define TILE(name, rows, panels, alone)                                                                                       \
    static __attribute__((noinline)) void name##rows(const struct Operands *from, float *out, long out_stride, int resume) {  \
        tile(rows, panels, alone, from, out, out_stride, resume);                                                             \
    }
#define TILES(rows) TILE(alone_, rows, 1, 1) TILE(one_of_, rows, 1, 0)
#define PAIR(rows) TILE(pair_, rows, 2, 1)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) PAIR(1) PAIR(2) PAIR(3)
#if LANES == 16
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12) TILES(13) TILES(14) PAIR(4) PAIR(5) PAIR(6) PAIR(7)
#define LIST_PAIRS {NULL, pair_1, pair_2, pair_3, pair_4, pair_5, pair_6, pair_7}
#define LIST(name)                                                                                                            \
    {NULL,     name##1, name##2, name##3,  name##4,  name##5,  name##6, name##7,                                              \
     name##8, name##9, name##10, name##11, name##12, name##13, name##14}
#else
#define LIST_PAIRS {NULL, pair_1, pair_2, pair_3}
#define LIST(name) {NULL, name##1, name##2, name##3, name##4, name##5, name##6}
#endif
static const Tile ALONE[] = LIST(alone_), ONE_OF[] = LIST(one_of_), PAIRS[] = LIST_PAIRS;

/* x[rows][depth] -> copy[depth][rows]; writes a little behind it, too. */
static void copy_tile(const float *x, long x_stride, long rows, long depth, float *copy) {
    const float *row[LANES];
    for (long r = 0; r < LANES; r++) row[r] = x + MINIMUM(r, rows - 1) * x_stride;
    transpose(row, depth, copy, rows);
}

#define MOST_TILES (ROW_BLOCK / TILE_ROWS)

/* A block of rows: its inputs, its outputs, those of the last panel, some of which are beyond the weight's and dropped, the rows
 * with which its tiles begin, and what is read after its panels. */
struct Block {
    const float *x;
    float *out, *last_out;
    long rows, tiles, first[MOST_TILES + 1];
    const uint8_t *then;
};

/* Some inputs of some panels, from the block's copy of them. */
static void some_inputs(const struct Linear *job, const struct Block *block, struct Share panels, long begin, long depth,
                        const float *copy, const uint8_t *then) {
    float room[UNPACK_DEPTH * PANEL] __attribute__((aligned(64)));
    const struct Weights *weights = job->weights;
    int quantised = weights->format != FLOAT32;
    long rows = block->rows, tiles = block->tiles, panel_stride = job->in_features * PANEL;
    for (long p = panels.begin, step; p < panels.end; p += step) {
        int whole = (p + 1) * PANEL <= job->out_features, pair = p + 2 <= panels.end && (p + 2) * PANEL <= job->out_features;
        step = pair && rows <= PAIR_ROWS && !quantised ? 2 : 1;
        float *out = whole ? block->out + p * PANEL : block->last_out;
        long stride = whole ? job->out_features : PANEL, most = quantised ? UNPACK_DEPTH : depth;
        const Tile *functions = step == 2 ? PAIRS : tiles == 1 && !quantised ? ALONE : ONE_OF;
        for (long at = 0; at < depth; at += most) {
            long count = MINIMUM(most, depth - at), part = inputs_bytes(weights, count) / tiles;
            const float *panel = panel_floats(weights, p, begin + at, count, room);
            const uint8_t *next = quantised ? inputs_at(weights, p, begin + at + count) : (const uint8_t *)(panel + panel_stride);
            if (p + step == panels.end && at + count == depth) next = then;
            struct Operands from = {NULL, panel, NULL, count, panel_stride, part / count};
            for (long t = 0; t < tiles; t++, next += part) {
                long first = block->first[t], tile_rows = block->first[t + 1] - first;
                from.x = copy + first * depth + at * tile_rows, from.fetch = (const char *)next;
                functions[tile_rows](&from, out + first * stride, stride, begin + at > 0);
            }
        }
    }
}

/* Some inputs of a block's panels. */
static void block_inputs(const struct Linear *job, const struct Block *block, const struct Panels *panels, long begin,
                         long depth) {
    float room[COPY_FLOATS + LANES] __attribute__((aligned(64)));
    const float *x = block->x + begin, *copy = block->rows > 1 ? room : x;
    for (long t = 0; t < block->tiles && block->rows > 1; t++) {
        long first = block->first[t];
        copy_tile(x + first * job->in_features, job->in_features, block->first[t + 1] - first, depth, room + first * depth);
    }
    for (long s = 0; s < panels->shares; s++) {
        int last = s + 1 == panels->shares;
        some_inputs(job, block, panels->share[s], begin, depth, copy,
                    last ? block->then : inputs_at(job->weights, panels->share[s + 1].begin, begin));
    }
}

static void linear_block(const struct Linear *job, long first, long rows, const struct Panels *panels, const uint8_t *then) {
    float last_out[ROW_BLOCK * PANEL];
    struct Block block = {job->x + first * job->in_features, job->out + first * job->out_features, last_out, rows,
                          (rows + TILE_ROWS - 1) / TILE_ROWS, {0}, NULL};
    for (long t = 1; t <= block.tiles; t++) block.first[t] = rows * t / block.tiles;
    long inputs = job->in_features, room = COPY_FLOATS / rows - 31, most = rows > TILE_ROWS ? MINIMUM(room, DEPTH_BLOCK) : room;
    long blocks = rows > 1 ? (inputs + most - 1) / most : 1;
    for (long b = 0; b < blocks; b++) {
        long begin = inputs_begin(inputs, b, blocks), end = inputs_begin(inputs, b + 1, blocks);
        block.then = b + 1 < blocks ? inputs_at(job->weights, panels->share[0].begin, end) : then;
        block_inputs(job, &block, panels, begin, end - begin);
    }
    long rest = job->out_features % PANEL;
    if (rest && panels->share[panels->shares - 1].end * PANEL > job->out_features)
        for (long r = 0; r < rows; r++)
            memcpy(block.out + (r + 1) * job->out_features - rest, last_out + r * PANEL, (size_t)rest * sizeof(float));
}
