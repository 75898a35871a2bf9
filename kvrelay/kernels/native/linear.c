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

struct Linear {
    const struct Weights *weights;
    const float *x;
    float *out;
    long rows, in_features, out_features;
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

/* A thread's share is some panels of a block of rows, then all panels of the next ones, then some panels of the last. */
static void linear_share(void *arguments) {
    const struct Linear *job = arguments;
    long panels = (job->out_features + PANEL - 1) / PANEL, blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct Share share = my_share(panels * blocks);
    for (long task = share.begin, taken; task < share.end; task += taken) {
        long block = task / panels, first_panel = task % panels;
        taken = MINIMUM(panels - first_panel, share.end - task);
        long first = job->rows * block / blocks, rows = job->rows * (block + 1) / blocks - first;
        int few = job->weights->format != FLOAT32 && rows <= FEW_ROWS;
        (few ? few_rows_block : linear_block)(job, first, rows, (struct Share){first_panel, first_panel + taken});
        long column = first_panel * PANEL, width = MINIMUM(taken * PANEL, job->out_features - column);
        float *out = job->out + first * job->out_features + column;
        if (job->weights->bias) add_bias(out, job->out_features, job->weights->bias + column, rows, width);
    }
}

EXPORT void linear(const float *x, const struct Weights *weights, float *out, long rows, int threads) {
    struct Linear job = {weights, x, out, rows, weights->in_features, weights->out_features};
    on_threads(threads, linear_share, &job);
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
