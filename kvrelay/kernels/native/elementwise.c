/* Norms, rotary embedding, activation: one pass over each row. A few rows are faster done at once than shared out, for waking
 * the other threads takes longer than the work. */
#include <math.h>
#include <string.h>

#include "common.h"

#define WORTH_SHARING 8192 /* floats */

INLINE int threads_for(int threads, long floats) { return floats >= WORTH_SHARING ? threads : 1; }

/* 1 / root mean square */
INLINE float inverse_rms(const float *x, long width, float eps) {
    vec sum[2] = {splat(0.0f), splat(0.0f)};
    long i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        vec low = load(x + i), high = load(x + i + LANES);
        sum[0] = multiply_add(low, low, sum[0]);
        sum[1] = multiply_add(high, high, sum[1]);
    }
    float total = sum_lanes(sum[0] + sum[1]);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

INLINE void normalise(const float *x, const float *weight, float *out, long width, float eps) {
    float scale = inverse_rms(x, width, eps);
    for (long i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

struct Norm {
    const float *x;
    float *residual;
    const float *weight;
    float *out;
    long rows, width;
    float eps;
};

static void norm_share(void *arguments) {
    const struct Norm *job = arguments;
    struct Share share = my_share(job->rows);
    for (long r = share.begin; r < share.end; r++) {
        const float *row = job->x + r * job->width;
        if (job->residual) {
            float *sum = job->residual + r * job->width;
            for (long i = 0; i < job->width; i++) sum[i] += row[i];
            row = sum;
        }
        normalise(row, job->weight, job->out + r * job->width, job->width, job->eps);
    }
}

/* out = norm(x); with a residual: residual += x, out = norm(residual). */
EXPORT void rms_norm(const float *x, float *residual, const float *weight, float *out, long rows, long width, float eps,
                     int threads) {
    struct Norm job = {x, residual, weight, out, rows, width, eps};
    on_threads(threads_for(threads, rows * width), norm_share, &job);
}

struct Silu {
    const float *gate_up;
    float *out;
    long rows, width;
};

#define STRIDE (AT_ONCE * LANES)

INLINE void silu_stride(const float *gate, const float *up, float *out) {
    const int count = AT_ONCE;
    vec weight[AT_ONCE];
    EACH weight[i] = -load(gate + i * LANES);
    exponentials(AT_ONCE, 0, weight);
    EACH store(out + i * LANES, load(gate + i * LANES) / (1.0f + weight[i]) * load(up + i * LANES));
}

void silu_columns(const float *gate, const float *up, float *out, long width) {
    long i = 0;
    for (; i + STRIDE <= width; i += STRIDE) silu_stride(gate + i, up + i, out + i);
    if (i < width) {
        float rest[3][STRIDE] = {{0}};
        memcpy(rest[0], gate + i, (size_t)(width - i) * sizeof(float));
        memcpy(rest[1], up + i, (size_t)(width - i) * sizeof(float));
        silu_stride(rest[0], rest[1], rest[2]);
        memcpy(out + i, rest[2], (size_t)(width - i) * sizeof(float));
    }
}

/* Shared out in pieces of columns, so that even one row keeps all threads busy. */
#define PIECE 512

static void silu_share(void *arguments) {
    const struct Silu *job = arguments;
    long pieces = (job->width + PIECE - 1) / PIECE;
    struct Share share = my_share(job->rows * pieces);
    for (long task = share.begin; task < share.end; task++) {
        long r = task / pieces, column = task % pieces * PIECE;
        const float *gate = job->gate_up + r * 2 * job->width + column;
        silu_columns(gate, gate + job->width, job->out + r * job->width + column, MINIMUM(PIECE, job->width - column));
    }
}

EXPORT void silu_mul(const float *gate_up, float *out, long rows, long width, int threads) {
    struct Silu job = {gate_up, out, rows, width};
    on_threads(threads_for(threads, rows * width * 4), silu_share, &job);
}

struct Rope {
    const float *qkv, *cos_sin;
    const int64_t *positions, *slots;
    const float *q_norm, *k_norm;
    float *keys, *values, *q;
    long tokens, heads, kv_heads, dim;
    float eps;
};

INLINE void rotate(const float *restrict x, const float *restrict cos_sin, float *restrict out, long half) {
    for (long i = 0; i < half; i++) {
        float low = x[i], high = x[i + half], cosine = cos_sin[i], sine = cos_sin[i + half];
        out[i] = low * cosine - high * sine;
        out[i + half] = high * cosine + low * sine;
    }
}

INLINE void norm_and_rotate(const float *x, const float *norm, float eps, const float *cos_sin, float *out, long dim) {
    if (norm) {
        float scale = inverse_rms(x, dim, eps), normed[MAX_HEAD_DIM];
        for (long i = 0; i < dim; i++) normed[i] = x[i] * scale * norm[i];
        rotate(normed, cos_sin, out, dim / 2);
    } else {
        rotate(x, cos_sin, out, dim / 2);
    }
}

static void rope_share(void *arguments) {
    const struct Rope *job = arguments;
    long dim = job->dim, kv_width = job->kv_heads * dim, q_width = job->heads * dim;
    struct Share share = my_share(job->tokens);
    for (long t = share.begin; t < share.end; t++) {
        const float *row = job->qkv + t * (q_width + 2 * kv_width), *cos_sin = job->cos_sin + job->positions[t] * dim;
        float *key = job->keys + job->slots[t] * kv_width;
        for (long h = 0; h < job->heads; h++)
            norm_and_rotate(row + h * dim, job->q_norm, job->eps, cos_sin, job->q + t * q_width + h * dim, dim);
        for (long h = 0; h < job->kv_heads; h++)
            norm_and_rotate(row + q_width + h * dim, job->k_norm, job->eps, cos_sin, key + h * dim, dim);
        memcpy(job->values + job->slots[t] * kv_width, row + q_width + kv_width, (size_t)kv_width * sizeof(float));
    }
}

EXPORT void rope_and_store(const float *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                           const float *q_norm, const float *k_norm, float *keys, float *values, float *q, long tokens,
                           long heads, long kv_heads, long dim, float eps, int threads) {
    struct Rope job = {qkv, cos_sin, positions, slots, q_norm, k_norm, keys, values, q, tokens, heads, kv_heads, dim, eps};
    on_threads(threads_for(threads, tokens * heads * dim), rope_share, &job);
}
