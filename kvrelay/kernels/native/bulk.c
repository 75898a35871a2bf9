/* Blocks of a linear layer for the bulk of a prompt (kernels/base.py), on processors with AMX.
 *
 * A block's rows are split into parts once, some inputs at a time, and stay in the second-level cache while the panels go by. A
 * panel's weights are split before they are used; what is read next is fetched between the products.
 *
 * Sums run over a block of inputs, then they are added to the outputs. Blocks are counted from the first input and do not depend
 * on the rows, so a row's bits do not either. */
#include "tiles.h"

#ifdef HAS_TILES
#include "dequantise.h"
#include "linear.h"

#define DEPTH_BLOCK 768  /* inputs: those of all rows take a little more than half of a second-level cache of 2 MiB */
#define UNPACK_DEPTH 128 /* inputs of a quantised panel that are floats at once */
#define MOST_TILES (BULK_ROWS / TILE)
#define MOST_STEPS (DEPTH_BLOCK / TILE_INPUTS + 1) /* products of tiles in a sum */
#define PANEL_TILES (PANEL / TILE)

/* Some inputs of a block of rows. */
struct Block {
    const struct Linear *job;
    long first, rows, tiles, tile_rows; /* the last tile may have fewer rows */
    long begin, depth, steps;
    struct Parts *left; /* [tiles][steps] */
};

static void split_rows(const struct Block *block) {
    long inputs = block->job->in_features;
    for (long row = 0; row < block->rows; row++) {
        const float *x = block->job->x + (block->first + row) * inputs + block->begin;
        struct Parts *to = block->left + row / block->tile_rows * block->steps;
        for (long k = 0; k < block->depth; k += TILE_INPUTS, to++) {
            uint32_t there = block->depth - k < TILE_INPUTS ? (1u << (block->depth - k)) - 1 : UINT32_MAX;
            split_row((vec)_mm512_maskz_loadu_ps((__mmask16)there, x + k),
                      (vec)_mm512_maskz_loadu_ps((__mmask16)(there >> LANES), x + k + LANES), to, row % block->tile_rows);
        }
    }
}

/* `count` inputs of a panel, zeros up to a whole step, as [steps][PANEL_TILES]. */
static void split_panel(const float *panel, long count, struct Parts *right) {
    for (long k = 0; k < count; k += TILE_INPUTS, right += PANEL_TILES)
        for (long pair = 0; pair < TILE; pair++, panel += 2 * PANEL)
            UNROLL for (int v = 0; v < PANEL_TILES; v++) {
                long left = count - k - 2 * pair;
                split_columns(left > 0 ? load(panel + v * LANES) : splat(0.0f),
                              left > 1 ? load(panel + PANEL + v * LANES) : splat(0.0f), right + v, pair);
            }
}

/* out[rows][width] (+)= sums[rows][TILE] */
static void put_tile(const float *sums, float *out, long out_stride, long rows, long width, int resume) {
    __mmask16 there = (__mmask16)(width >= TILE ? 0xffff : (1u << width) - 1);
    for (long r = 0; r < rows; r++, sums += TILE, out += out_stride) {
        __m512 sum = _mm512_load_ps(sums);
        if (resume) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, out));
        _mm512_mask_storeu_ps(out, there, sum);
    }
}

/* The sums of a row of tiles and a panel. */
static void put_panel(const struct Block *block, long tile, long panel, float (*sums)[TILE * TILE]) {
    long width = block->job->out_features, row = tile * block->tile_rows, rows = MINIMUM(block->tile_rows, block->rows - row);
    for (long column = panel * PANEL; column < MINIMUM((panel + 1) * PANEL, width); column += TILE, sums++)
        put_tile(*sums, block->job->out + (block->first + row) * width + column, width, rows, width - column, block->begin > 0);
}

/* `then` is what is read next. */
static void one_panel(const struct Block *block, long panel, const uint8_t *then) {
    float room[UNPACK_DEPTH * PANEL] __attribute__((aligned(64)));
    struct Parts right[MOST_STEPS * PANEL_TILES];
    float sums[4][TILE * TILE] __attribute__((aligned(64)));
    const struct Weights *weights = block->job->weights;
    long width = block->job->out_features, steps = block->steps, pieces = block->tiles / 2 * steps * PIECES;
    for (long at = 0, count; at < block->depth; at += count) {
        count = weights->format == FLOAT32 ? block->depth : MINIMUM(UNPACK_DEPTH, block->depth - at);
        split_panel(panel_floats(weights, panel, block->begin + at, count, room), count, right + at / TILE_INPUTS * PANEL_TILES);
    }
    struct Coming fetch = {(const char *)then, NULL, inputs_bytes(weights, block->depth) / (TILE_LINE * pieces) + 1, 0, 4 * width};
    for (long tile = 0; tile < block->tiles; tile += 2) {
        long row = tile * block->tile_rows;
        fetch.rows = (char *)(block->job->out + (block->first + row) * width + panel * PANEL);
        fetch.num_rows = MINIMUM(2 * block->tile_rows, block->rows - row);
        clear_sums();
        for (long step = 0; step < steps; step++)
            tile_square(block->left + tile * steps + step, steps, right + step * PANEL_TILES, &fetch);
        store_sums(sums);
        put_panel(block, tile, panel, sums), put_panel(block, tile + 1, panel, sums + PANEL_TILES);
    }
}

static void some_inputs(const struct Block *block, struct Share panels, const uint8_t *then) {
    for (long p = panels.begin; p < panels.end; p++)
        one_panel(block, p, p + 1 < panels.end ? inputs_at(block->job->weights, p + 1, block->begin) : then);
}

void bulk_block(const struct Linear *job, long first, long rows, struct Share panels, const uint8_t *then) {
    struct Parts left[MOST_TILES * MOST_STEPS];
    long tiles = (rows + 2 * TILE - 1) / (2 * TILE) * 2;
    struct Block block = {.job = job, .first = first, .rows = rows, .tiles = tiles, .tile_rows = (rows + tiles - 1) / tiles, .left = left};
    long inputs = job->in_features, blocks = (inputs + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
    begin_tiles(block.tile_rows);
    for (long b = 0; b < blocks; b++) {
        long end = inputs_begin(inputs, b + 1, blocks);
        block.begin = inputs_begin(inputs, b, blocks), block.depth = end - block.begin;
        block.steps = (block.depth + TILE_INPUTS - 1) / TILE_INPUTS;
        split_rows(&block);
        some_inputs(&block, panels, b + 1 < blocks ? inputs_at(job->weights, panels.begin, end) : then);
    }
    end_tiles();
}
#endif
