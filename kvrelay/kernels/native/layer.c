/* A whole decoder layer in one call: the steps that the model would call one by one, without the way back to Python between
 * them, and with gates multiplied where they were computed. Bits are the same either way, but for the bulk of prompts (bulk.c). */
#include <stdint.h>
#include <string.h>

#include "common.h"
#include "lora.h"
#include "weights.h"

void linear_before(const float *x, const struct Weights *weights, struct Next after, float *out, long rows, int bulk, int threads);
long gate_panels(const struct Weights *weights, long rows, int threads);
void gated_linear(const float *x, const struct Weights *weights, struct Next after, float *out, float *gated, long rows,
                  int threads);
EXPORT void rms_norm(const float *x, float *residual, const float *weight, float *out, long rows, long width, float eps, int threads);
EXPORT void silu_mul(const float *gate_up, float *out, long rows, long width, int threads);
EXPORT void rope_and_store(const float *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                    const float *q_norm, const float *k_norm, float *keys, float *values, float *q, long tokens, long heads,
                    long kv_heads, long dim, float eps, int threads);
EXPORT int attention(const float *q, const float *keys, const float *values, const int32_t *query_start, const int32_t *context_lens,
              const int32_t *tables, float *out, long rows, long table_stride, long block_size, long heads, long kv_heads,
              long dim, float scale, int threads);

enum { NO_MEMORY = 1, RANK_ENDED = 2 }; /* the latter is in layer.py, too */

/* What a layer is made of. Filled once, by layer.py, field by field. */
struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    const struct Weights *qkv, *output, *gate_up, *down;
    long index, heads, kv_heads, dim;
    float eps, scale;
    int (*add_up)(void *ranks, float *x, int64_t count); /* NULL where the layer is whole */
    void *ranks;
};

/* Tokens of a pass that lie in several places. */
struct Runs {
    const struct {
        int64_t begin, end;
    } *run;
    long count, tokens;
};

/* What a pass is about, the same for all layers. */
struct Pass {
    const float *cos_sin;
    const int64_t *positions, *slots;
    const int32_t *query_start, *context_lens, *tables;
    const struct LoraSpan *spans;
    long tokens, rows, table_stride, block_size, num_spans;
    struct Runs runs[2]; /* of tokens: the bulk of prompts is the second */
    int threads;
};

/* Rows of `runs`, which lie behind each other in `gathered`, from there or to there. */
static void copy_runs(const struct Runs *runs, float *rows, long width, float *gathered, int back) {
    for (long i = 0; i < runs->count; i++) {
        float *run = rows + runs->run[i].begin * width;
        long count = (runs->run[i].end - runs->run[i].begin) * width;
        memcpy(back ? run : gathered, back ? gathered : run, (size_t)count * sizeof(float));
        gathered += count;
    }
}

/* out = linear(x) for the bulk tokens of a pass, or for the others. */
static void linear_of(const struct Pass *pass, int bulk, const float *x, const struct Weights *weights, struct Next after, float *out,
                      float *room) {
    const struct Runs *of = &pass->runs[bulk];
    long inputs = weights->in_features, outputs = weights->out_features;
    if (of->count == 1) {
        long begin = of->run->begin;
        linear_before(x + begin * inputs, weights, after, out + begin * outputs, of->tokens, bulk, pass->threads);
    } else if (of->count > 1) {
        float *result = room + of->tokens * inputs;
        copy_runs(of, (float *)x, inputs, room, 0);
        linear_before(room, weights, after, result, of->tokens, bulk, pass->threads);
        copy_runs(of, out, outputs, result, 1);
    }
}

/* out = linear(x), and what the adapters of its rows add to it. */
static void adapted_linear(const struct Layer *layer, const struct Pass *pass, const float *x, const struct Weights *weights,
                           struct Next after, float *out, float *room, int which) {
    struct Next again = all_of(weights);
    linear_of(pass, 1, x, weights, pass->runs[0].count ? again : after, out, room);
    linear_of(pass, 0, x, weights, after, out, room);
    if (pass->num_spans)
        add_lora(x, out, pass->spans, pass->num_spans, layer->index, which, weights->in_features, weights->out_features,
                 pass->threads);
}

/* out, of which this rank has computed its share, becomes the sum of all ranks'. */
static int of_all(const struct Layer *layer, float *out, long count) {
    return layer->add_up ? layer->add_up(layer->ranks, out, count) : 0;
}

/* x (NULL before anything was added) and residual [tokens, hidden] -> x. `scratch` has room for all that is between. */
EXPORT int decoder_layer(const struct Layer *layer, const struct Pass *pass, const float *x, float *residual, float *keys,
                         float *values, float *scratch, float *out) {
    long tokens = pass->tokens, hidden = layer->qkv->in_features, width = layer->down->in_features;
    long q_width = layer->heads * layer->dim, qkv_width = layer->qkv->out_features;
    int threads = pass->threads;
    /* Adapters add to gates before they are multiplied, and those of a prompt's bulk are not computed with the others. */
    long gates = pass->num_spans || pass->runs[1].count ? 0 : gate_panels(layer->gate_up, tokens, threads);
    struct Next gate_up_next = gates ? (struct Next){layer->gate_up, gates} : all_of(layer->gate_up);
    float *normed = scratch, *qkv = normed + tokens * hidden, *q = qkv + tokens * qkv_width, *attended = q + tokens * q_width;
    float *gate_up = attended + tokens * q_width, *active = gate_up + tokens * 2 * width;
    float *room = active + tokens * width;

    rms_norm(x ? x : residual, x ? residual : 0, layer->input_norm, normed, tokens, hidden, layer->eps, threads);
    adapted_linear(layer, pass, normed, layer->qkv, all_of(layer->output), qkv, room, LORA_QKV);
    rope_and_store(qkv, pass->cos_sin, pass->positions, pass->slots, layer->q_norm, layer->k_norm, keys, values, q, tokens,
                   layer->heads, layer->kv_heads, layer->dim, layer->eps, threads);
    int status = attention(q, keys, values, pass->query_start, pass->context_lens, pass->tables, attended, pass->rows,
                           pass->table_stride, pass->block_size, layer->heads, layer->kv_heads, layer->dim, layer->scale, threads);
    if (status != 0) return NO_MEMORY;
    adapted_linear(layer, pass, attended, layer->output, gate_up_next, out, room, LORA_OUTPUT);
    if (of_all(layer, out, tokens * hidden)) return RANK_ENDED;
    rms_norm(out, residual, layer->post_norm, normed, tokens, hidden, layer->eps, threads);
    if (gates) {
        gated_linear(normed, layer->gate_up, all_of(layer->down), gate_up, active, tokens, threads);
    } else {
        adapted_linear(layer, pass, normed, layer->gate_up, all_of(layer->down), gate_up, room, LORA_GATE_UP);
        silu_mul(gate_up, active, tokens, width, threads);
    }
    adapted_linear(layer, pass, active, layer->down, (struct Next){NULL, 0}, out, room, LORA_DOWN);
    return of_all(layer, out, tokens * hidden) ? RANK_ENDED : 0;
}
