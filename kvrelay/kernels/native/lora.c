/* What LoRA adapters add to a product: out[row] += x[row] a^T b for each row that has an adapter.
 *
 * Few rows share an adapter when many requests decode, and then all time goes into reading it; a prompt's rows share one, and go
 * through it some at a time. Every number is one chain of multiply-adds whose order its place alone decides, so that a row gives
 * the same bits in any company. */
#include "common.h"
#include "lora.h"

#define ROWS 4   /* that go through an adapter together */
#define RANKS 64 /* inner products that are held at once */

struct Adding {
    const float *x;
    float *out;
    const struct LoraSpan *spans;
    long num_spans, layer, in_features, out_features;
    int which;
};

/* inner[r][0..3] = x[r] * a[0..3], of which `ranks` exist */
INLINE void four_products(const int rows, const float *x, long depth, const float *a, long ranks, float inner[][RANKS]) {
    const float *of[4];
    UNROLL for (int j = 0; j < 4; j++) of[j] = a + MINIMUM(j, ranks - 1) * depth;
    vec sum[ROWS][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 4; j++) sum[r][j] = splat(0.0f);
    long k = 0;
    for (; k + LANES <= depth; k += LANES) {
        vec weight[4];
        UNROLL for (int j = 0; j < 4; j++) weight[j] = load(of[j] + k);
        UNROLL for (int r = 0; r < rows; r++) {
            vec input = load(x + r * depth + k);
            UNROLL for (int j = 0; j < 4; j++) sum[r][j] = multiply_add(weight[j], input, sum[r][j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float sums[4];
        sums_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3], sums);
        for (long last = k; last < depth; last++)
            for (int j = 0; j < 4; j++) sums[j] += of[j][last] * x[r * depth + last];
        for (int j = 0; j < ranks && j < 4; j++) inner[r][j] = sums[j];
    }
}

INLINE void add_part(const int rows, const float *x, long depth, const struct LoraPart *part, float *out, long out_stride) {
    float inner[ROWS][RANKS];
    out += part->first;
    for (long begin = 0; begin < part->rank; begin += RANKS) {
        long ranks = MINIMUM(RANKS, part->rank - begin), n = 0;
        const float *a = part->a + begin * depth, *b = part->b + begin * part->width;
        for (long j = 0; j < ranks; j += 4)
            four_products(rows, x, depth, a + j * depth, ranks - j, (float(*)[RANKS])&inner[0][j]);
        for (; n + LANES <= part->width; n += LANES) {
            vec sum[ROWS];
            UNROLL for (int r = 0; r < rows; r++) sum[r] = load(out + r * out_stride + n);
            for (long j = 0; j < ranks; j++) {
                vec weight = load(b + j * part->width + n);
                UNROLL for (int r = 0; r < rows; r++) sum[r] = multiply_add(weight, splat(inner[r][j]), sum[r]);
            }
            UNROLL for (int r = 0; r < rows; r++) store(out + r * out_stride + n, sum[r]);
        }
        for (; n < part->width; n++)
            for (int r = 0; r < rows; r++)
                for (long j = 0; j < ranks; j++) out[r * out_stride + n] += b[j * part->width + n] * inner[r][j];
    }
}

static __attribute__((noinline)) void add_to_one(const float *x, long depth, const struct LoraPart *part, float *out, long stride) {
    add_part(1, x, depth, part, out, stride);
}

static __attribute__((noinline)) void add_to_many(const float *x, long depth, const struct LoraPart *part, float *out, long stride) {
    add_part(ROWS, x, depth, part, out, stride);
}

static void add_share(void *arguments) {
    const struct Adding *job = arguments;
    long depth = job->in_features, stride = job->out_features, total = 0, before = 0;
    for (long s = 0; s < job->num_spans; s++) total += job->spans[s].end - job->spans[s].begin;
    struct Share share = my_share(total);
    for (long s = 0; s < job->num_spans; s++) {
        const struct LoraSpan *span = &job->spans[s];
        const struct LoraLinear *linear = &span->layers[job->layer].linears[job->which];
        long count = span->end - span->begin, row = share.begin > before ? share.begin - before : 0;
        long end = MINIMUM(count, share.end - before);
        before += count;
        while (row < end) {
            int together = end - row >= ROWS;
            const float *x = job->x + (span->begin + row) * depth;
            float *out = job->out + (span->begin + row) * stride;
            for (long p = 0; p < linear->num_parts; p++)
                (together ? add_to_many : add_to_one)(x, depth, &linear->parts[p], out, stride);
            row += together ? ROWS : 1;
        }
    }
}

EXPORT void add_lora(const float *x, float *out, const struct LoraSpan *spans, long num_spans, long layer, int which,
                     long in_features, long out_features, int threads) {
    struct Adding job = {x, out, spans, num_spans, layer, in_features, out_features, which};
    on_threads(threads, add_share, &job);
}
