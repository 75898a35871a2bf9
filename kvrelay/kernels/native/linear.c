/* Linear layers on packed weights.
 *
 * Weights are held as panels (weights.h), so that they stream through the core in one sequence whatever the batch, and one copy
 * serves every number of rows. A tile is a few rows of x times one panel, held in registers; every output (but those of bulk.c) is one chain of
 * multiply-adds over the inputs in order, and cutting the chain into blocks of inputs changes no bit. Quantised panels become
 * floats in the first-level cache, some inputs at a time, and then go the same way: so they give the bits that the dequantised
 * weights would. How rows, panels and inputs are cut into tiles that suit the processor is in linear_wide.h (AVX2, AVX-512) and
 * linear_narrow.h (all others). */
#include <string.h>

#include "linear.h"

void silu_columns(const float *gate, const float *up, float *out, long width); /* of elementwise.c */

/* The panels that a thread computes for a block of rows: some, or the same ones of both halves. */
struct Panels {
    struct Share share[2];
    long shares;
};

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

/* Where this thread begins to read the weights that come next. */
INLINE const uint8_t *what_follows(const struct Linear *job) {
    const struct Next *after = &job->after;
    return after->weights ? inputs_at(after->weights, my_share(after->panels).begin, 0) : job->weights->panels;
}

static void add_biases(const struct Linear *job, long first, long rows, struct Share panels) {
    long column = panels.begin * PANEL, width = MINIMUM(panels.end * PANEL, job->out_features) - column;
    add_bias(job->out + first * job->out_features + column, job->out_features, job->weights->bias + column, rows, width);
}

/* Some panels of a block of rows. `then` is what is read after them. */
static void some_panels(const struct Linear *job, long first, long rows, const struct Panels *panels, const uint8_t *then) {
    int few = job->weights->format != FLOAT32 && rows <= FEW_ROWS && !job->bulk;
#ifdef HAS_TILES
    if (job->bulk) bulk_block(job, first, rows, panels->share[0], then);
#endif
    if (!few && !job->bulk) linear_block(job, first, rows, panels, then);
    for (long s = 0; s < panels->shares; s++) {
        if (few) few_rows_block(job, first, rows, panels->share[s]);
        if (job->weights->bias) add_biases(job, first, rows, panels->share[s]);
    }
}

/* A thread's share is some panels of a block of rows, then all panels of the next ones, then some panels of the last. */
static void linear_share(void *arguments) {
    const struct Linear *job = arguments;
    long panels = num_panels(job->weights), most = job->bulk ? BULK_ROWS : ROW_BLOCK, blocks = (job->rows + most - 1) / most;
    struct Share share = my_share(panels * blocks);
    for (long task = share.begin, taken; task < share.end; task += taken) {
        long block = task / panels, first_panel = task % panels;
        taken = MINIMUM(panels - first_panel, share.end - task);
        long first = job->rows * block / blocks, rows = job->rows * (block + 1) / blocks - first;
        struct Panels some = {{{first_panel, first_panel + taken}}, 1};
        some_panels(job, first, rows, &some, task + taken == share.end ? what_follows(job) : job->weights->panels);
    }
}

void linear_before(const float *x, const struct Weights *weights, struct Next after, float *out, long rows, int bulk, int threads) {
    struct Linear job = {weights, after, x, out, NULL, rows, weights->in_features, weights->out_features, bulk};
    on_threads(threads, linear_share, &job);
}

EXPORT void linear(const float *x, const struct Weights *weights, float *out, long rows, int bulk, int threads) {
    linear_before(x, weights, (struct Next){NULL, 0}, out, rows, bulk, threads);
}

/* A thread has the same panels of both halves, so that what it multiplies is still in its cache. */
static void gated_share(void *arguments) {
    const struct Linear *job = arguments;
    long width = job->out_features / 2, half = width / PANEL;
    struct Share share = my_share(half);
    struct Panels both = {{share, {share.begin + half, share.end + half}}, 2};
    long column = share.begin * PANEL, columns = (share.end - share.begin) * PANEL;
    some_panels(job, 0, job->rows, &both, what_follows(job));
    for (long r = 0; r < job->rows; r++) {
        const float *gate = job->out + r * job->out_features + column;
        silu_columns(gate, gate + width, job->gated + r * width + column, columns);
    }
}

/* How many panels of [gate | up] are shared out, each with its own of the other half; 0 where gates have to be multiplied later. */
long gate_panels(const struct Weights *weights, long rows, int threads) {
    long half = weights->out_features / 2 / PANEL;
    int halves = weights->out_features == 2 * half * PANEL;
    return halves && half >= threads && rows > 0 && rows <= ROW_BLOCK ? half : 0;
}

/* gated = silu(gate) * up of linear(x) = [gate | up], where there are `gate_panels`. */
void gated_linear(const float *x, const struct Weights *weights, struct Next after, float *out, float *gated, long rows,
                  int threads) {
    struct Linear job = {weights, after, x, out, gated, rows, weights->in_features, weights->out_features, 0};
    on_threads(threads, gated_share, &job);
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
