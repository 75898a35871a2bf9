/* How weights lie in memory.
 *
 * A weight [out, in] is held as panels of PANEL outputs, the last one filled up with zeros. A panel of floats is [in][PANEL]: all
 * of its outputs side by side for each input. A panel of a quantised weight is made of groups of 32 inputs (of 256 in the K
 * formats), each with what GGUF's block has for every output of the panel:
 *
 *     Q4_0   d half[PANEL]                       quants of 32 inputs, 4 bits each
 *     Q4_1   d half[PANEL], m half[PANEL]        quants of 32 inputs, 4 bits each
 *     Q8_0   d half[PANEL]                       quants of 32 inputs, 8 bits each
 *     Q4_K   d half[PANEL], dmin half[PANEL]     8 times: scale byte[PANEL], minimum byte[PANEL], quants of 32 inputs, 4 bits each
 *     Q6_K   d half[PANEL]                       16 times: scale byte[PANEL], quants of 16 inputs, 8 bits each
 *
 * Quants of 4 bits are words [inputs / 8][PANEL] with the first input in the lowest bits; quants of 8 bits are bytes
 * [inputs][PANEL]. A weight is dequantised to exactly the float that the checkpoint's conversion gives: d times a quant has at
 * most 24 bits, so the only rounding is that of the sum with the minimum. */
#ifndef KVRELAY_WEIGHTS_H
#define KVRELAY_WEIGHTS_H

#include "common.h"

#if LANES >= 8
#define VECTORS 2 /* per panel */
#else
#define VECTORS 4
#endif
#define PANEL (VECTORS * LANES)

enum Format { FLOAT32, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, FORMATS };

#define HALVES (2 * PANEL) /* bytes of a half for each output */
#define QUANTS_4(inputs) ((inputs) / 2 * PANEL)
#define QUANTS_8(inputs) ((inputs) * PANEL)

struct Group {
    long inputs, bytes, block_bytes; /* of a panel's group, and of the block in a GGUF file */
};
static const struct Group GROUPS[FORMATS] = {
    [FLOAT32] = {1, 4 * PANEL, 4},
    [Q4_0] = {32, HALVES + QUANTS_4(32), 18},
    [Q4_1] = {32, 2 * HALVES + QUANTS_4(32), 20},
    [Q8_0] = {32, HALVES + QUANTS_8(32), 34},
    [Q4_K] = {256, 2 * HALVES + 8 * (2 * PANEL + QUANTS_4(32)), 144},
    [Q6_K] = {256, HALVES + 16 * (PANEL + QUANTS_8(16)), 210},
};

/* A linear layer's weights. */
struct Weights {
    const void *panels;
    const float *bias;
    long in_features, out_features, format;
};

INLINE long num_panels(const struct Weights *weights) { return (weights->out_features + PANEL - 1) / PANEL; }

/* The weights that are read next (NULL: nobody knows), and how many of their panels are shared out to the threads. */
struct Next {
    const struct Weights *weights;
    long panels;
};

INLINE struct Next all_of(const struct Weights *weights) { return (struct Next){weights, num_panels(weights)}; }

#endif
