/* What is shared out to threads of a linear layer. */
#ifndef KVRELAY_LINEAR_H
#define KVRELAY_LINEAR_H

#include "weights.h"

struct Linear {
    const struct Weights *weights;
    struct Next after;
    const float *x;
    float *out, *gated;
    long rows, in_features, out_features;
    int bulk; /* whether `bulk_block` computes it */
};

/* Where block b of inputs begins: on a whole 32, since quantised weights come in such groups. */
INLINE long inputs_begin(long inputs, long b, long blocks) { return b < blocks ? inputs * b / blocks & ~31L : inputs; }

#define BULK_ROWS 256 /* of a block */

/* Some panels for a block of rows; see bulk.c. `then` is what is read after them. */
void bulk_block(const struct Linear *job, long first, long rows, struct Share panels, const uint8_t *then);

#endif
