/* A LoRA adapter as lora.py lays it out. */
#ifndef KVRELAY_LORA_H
#define KVRELAY_LORA_H

#include "common.h"

struct LoraPart {
    const float *a, *b; /* [rank, inputs], [rank, width] */
    long rank, first, width;
};

struct LoraLinear {
    const struct LoraPart *parts;
    long num_parts;
};

enum { LORA_QKV, LORA_OUTPUT, LORA_GATE_UP, LORA_DOWN, LORA_LINEARS };

struct LoraLayer {
    struct LoraLinear linears[LORA_LINEARS];
};

/* Rows begin..end have the adapter with these layers. */
struct LoraSpan {
    long begin, end;
    const struct LoraLayer *layers;
};

EXPORT void add_lora(const float *x, float *out, const struct LoraSpan *spans, long num_spans, long layer, int which,
                     long in_features, long out_features, int threads);

#endif
