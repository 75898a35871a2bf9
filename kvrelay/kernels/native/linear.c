/* Linear layers on packed weights.
 *
 * Weights are held as panels (weights.h), so that they stream through the core in one sequence whatever the batch, and one copy
 * serves every number of rows. A tile is a few rows of x times one panel, held in registers; every output is one chain of
 * multiply-adds over the inputs in order, and cutting the chain into blocks of inputs changes no bit. Quantised panels become
 * floats in the first-level cache, some inputs at a time, and then go the same way: so they give the bits that the dequantised
 * weights would. How rows, panels and inputs are cut into tiles that suit the processor is in linear_wide.h (AVX2, AVX-512) and
 * linear_narrow.h (all others). */
#include <string.h>

#include "weights.h"

void silu_columns(const float *gate, const float *up, float *out, long width); /* of elementwise.c */

/* `after` are the weights that are read next, or NULL. Whose share has a panel has its twin, so many panels further, too. */
struct Linear {
    const struct Weights *weights, *after;
    const float *x;
    float *out, *gated;
    long rows, in_features, out_features, twin;
};

INLINE long num_panels(const struct Weights *weights) { return (weights->out_features + PANEL - 1) / PANEL; }

#if LANES >= 8
#include "linear_wide.h"
#else
#include "linear_narrow.h"
#endif
#include "linear_few.h"

static void add_bias(float *out, long out_stride, const float *bias, long rows, long width) {
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < width; n++) out[r * out_stride + n] += bias[n];
}

/* Where this thread begins to read weights that are shared out by panels. */
INLINE const uint8_t *my_panels(const struct Weights *weights) {
    return inputs_at(weights, my_share(num_panels(weights)).begin, 0);
}

static void add_biases(const struct Linear *job, long first, long rows, struct Share panels) {
    long column = panels.begin * PANEL, width = MINIMUM(panels.end * PANEL, job->out_features) - column;
    add_bias(job->out + first * job->out_features + column, job->out_features, job->weights->bias + column, rows, width);
}

/* Some panels of a block of rows, and their twins. `then` is what is read after them. */
static void some_panels(const struct Linear *job, long first, long rows, struct Share panels, const uint8_t *then) {
    struct Share twins = {panels.begin + job->twin, panels.end + job->twin};
    if (job->weights->format == FLOAT32 || rows > FEW_ROWS) {
        linear_block(job, first, rows, panels, then);
    } else {
        if (job->twin) few_rows_block(job, first, rows, panels);
        few_rows_block(job, first, rows, twins);
    }
    if (!job->weights->bias) return;
    if (job->twin) add_biases(job, first, rows, panels);
    add_biases(job, first, rows, twins);
}

/* A thread's share is some panels of a block of rows, then all panels of the next ones, then some panels of the last. */
static void linear_share(void *arguments) {
    const struct Linear *job = arguments;
    long panels = num_panels(job->weights), blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct Share share = my_share(panels * blocks);
    for (long task = share.begin, taken; task < share.end; task += taken) {
        long block = task / panels, first_panel = task % panels;
        taken = MINIMUM(panels - first_panel, share.end - task);
        long first = job->rows * block / blocks, rows = job->rows * (block + 1) / blocks - first;
        int last = task + taken == share.end && job->after;
        some_panels(job, first, rows, (struct Share){first_panel, first_panel + taken},
                    last ? my_panels(job->after) : inputs_at(job->weights, 0, 0));
    }
}

void linear_before(const float *x, const struct Weights *weights, const struct Weights *after, float *out, long rows,
                   int threads) {
    struct Linear job = {weights, after, x, out, NULL, rows, weights->in_features, weights->out_features, 0};
    on_threads(threads, linear_share, &job);
}

EXPORT void linear(const float *x, const struct Weights *weights, float *out, long rows, int threads) {
    linear_before(x, weights, NULL, out, rows, threads);
}

/* A thread has the same panels of both halves, so that what it multiplies is still in its cache. */
static void gated_share(void *arguments) {
    const struct Linear *job = arguments;
    long width = job->out_features / 2;
    struct Share share = my_share(job->twin);
    long column = share.begin * PANEL, columns = (share.end - share.begin) * PANEL;
    some_panels(job, 0, job->rows, share, my_panels(job->after));
    for (long r = 0; r < job->rows; r++) {
        const float *gate = job->out + r * job->out_features + column;
        silu_columns(gate, gate + width, job->gated + r * width + column, columns);
    }
}

/* gated = silu(gate) * up of linear(x) = [gate | up], in one go. Returns 0 where that cannot be: then nothing was computed. */
int gated_linear(const float *x, const struct Weights *weights, const struct Weights *after, float *out, float *gated, long rows,
                 int threads) {
    long twin = weights->out_features / 2 / PANEL;
    struct Linear job = {weights, after, x, out, gated, rows, weights->in_features, weights->out_features, twin};
    if (rows > ROW_BLOCK || weights->out_features != 2 * twin * PANEL) return 0;
    on_threads(threads, gated_share, &job);
    return 1;
}

struct Gather {
    const int64_t *ids;
    const struct Weights *weights;
    float *out;
    long rows;
};

static void gather_share(void *arguments) {
    const struct Gather *job = arguments;
    float room[UNPACK_DEPTH * PANEL];
    long depth = job->weights->in_features;
    struct Share share = my_share(job->rows);
    for (long r = share.begin; r < share.end; r++)
        for (long begin = 0; begin < depth; begin += UNPACK_DEPTH) {
            long count = MINIMUM(UNPACK_DEPTH, depth - begin);
            const float *from = panel_floats(job->weights, job->ids[r] / PANEL, begin, count, room) + job->ids[r] % PANEL;
            for (long k = 0; k < count; k++) job->out[r * depth + begin + k] = from[k * PANEL];
        }
}

/* Rows of the weight by number: the embedding of a model whose head shares it. Returns `rows`, or the place of the first number
 * that the weight does not have. */
EXPORT int gather_rows(const int64_t *ids, const struct Weights *weights, float *out, long rows, int threads) {
    for (long r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= weights->out_features) return (int)r;
    struct Gather job = {ids, weights, out, rows};
    on_threads(rows > 1 ? threads : 1, gather_share, &job);
    return (int)rows;
}
