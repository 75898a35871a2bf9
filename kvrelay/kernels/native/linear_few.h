/* Quantised weights times few rows: weights are dequantised in registers, on their way to the multiply-adds. With more rows it is
 * faster to dequantise into the first-level cache and go through the tiles. */

#if LANES == 16
#define FEW_ROWS 8
#define FEW_PAIR_ROWS 2 /* that leave registers for a second panel */
#else
#define FEW_ROWS 2
#define FEW_PAIR_ROWS 1
#endif
#define FEW_AHEAD 2048 /* bytes: how far weights are fetched ahead of their use */

/* out[rows][panels * PANEL] = x[rows][in_features] * panel[in_features][panels * PANEL] */
INLINE void few_rows(const int format, const int rows, const int panels, const struct Weights *weights, long panel, const float *x,
                     float *out, long out_stride) {
    const struct Group group = GROUPS[format];
    const long depth = weights->in_features;
    const uint8_t *first = inputs_at(weights, panel, 0);
    long panel_stride = inputs_bytes(weights, depth);
    vec sum[FEW_ROWS][2 * VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = splat(0.0f);
    for (long at = 0; at < depth; at += RUN(format)) {
        struct Run run[2];
        UNROLL for (int p = 0; p < panels; p++) {
            const uint8_t *of = first + p * panel_stride + at / group.inputs * group.bytes;
            read_run(format, of, at % group.inputs, &run[p]);
            for (long line = 0; line < group.bytes * RUN(format) / group.inputs; line += 64)
                __builtin_prefetch(run[p].quants + FEW_AHEAD + line);
        }
        for (int eight = 0; eight < RUN(format) / 8; eight++, x += 8) {
            uvec words[2 * VECTORS];
            UNROLL for (int v = 0; v < panels * VECTORS; v++)
                words[v] = eight_quants(format, &run[v / VECTORS], eight, v % VECTORS);
            UNROLL for (int k = 0; k < 8; k++)
                UNROLL for (int v = 0; v < panels * VECTORS; v++) {
                    vec weight = run_weights(format, &run[v / VECTORS], words[v], eight, k, v % VECTORS);
                    UNROLL for (int r = 0; r < rows; r++)
                        sum[r][v] = multiply_add(weight, splat(x[r * depth + k]), sum[r][v]);
                }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < panels * VECTORS; v++) store(out + r * out_stride + v * LANES, sum[r][v]);
}

typedef void (*FewRows)(const struct Weights *weights, long panel, const float *x, float *out, long out_stride);
#define FEW(name, format, rows, panels)                                                                                       \
    static __attribute__((noinline)) void name##rows(const struct Weights *weights, long panel, const float *x, float *out,   \
                                                     long out_stride) {                                                       \
        few_rows(format, rows, panels, weights, panel, x, out, out_stride);                                                   \
    }
#if LANES == 16
#define FEW_OF(name, format)                                                                                                  \
    FEW(name##_alone_, format, 1, 1) FEW(name##_alone_, format, 2, 1) FEW(name##_alone_, format, 3, 1)                        \
    FEW(name##_alone_, format, 4, 1) FEW(name##_alone_, format, 5, 1) FEW(name##_alone_, format, 6, 1)                        \
    FEW(name##_alone_, format, 7, 1) FEW(name##_alone_, format, 8, 1)                                                         \
    FEW(name##_pair_, format, 1, 2) FEW(name##_pair_, format, 2, 2)
#define LIST_FEW(name)                                                                                                        \
    {{NULL, name##_alone_1, name##_alone_2, name##_alone_3, name##_alone_4, name##_alone_5, name##_alone_6, name##_alone_7,   \
      name##_alone_8},                                                                                                        \
     {NULL, name##_pair_1, name##_pair_2}}
#else
#define FEW_OF(name, format)                                                                                                  \
    FEW(name##_alone_, format, 1, 1) FEW(name##_alone_, format, 2, 1) FEW(name##_pair_, format, 1, 2)
#define LIST_FEW(name) {{NULL, name##_alone_1, name##_alone_2}, {NULL, name##_pair_1}}
#endif
FEW_OF(q4_0, Q4_0) FEW_OF(q4_1, Q4_1) FEW_OF(q8_0, Q8_0) FEW_OF(q4_k, Q4_K) FEW_OF(q6_k, Q6_K)
static const FewRows FEW_FUNCTIONS[FORMATS][2][FEW_ROWS + 1] = {{{NULL}},       LIST_FEW(q4_0), LIST_FEW(q4_1),
                                                                LIST_FEW(q8_0), LIST_FEW(q4_k), LIST_FEW(q6_k)};

/* Some panels for a block of at most FEW_ROWS rows. */
static void few_rows_block(const struct Linear *job, long first, long rows, struct Share panels) {
    const FewRows(*functions)[FEW_ROWS + 1] = FEW_FUNCTIONS[job->weights->format];
    const float *x = job->x + first * job->in_features;
    float *out = job->out + first * job->out_features;
    for (long p = panels.begin, step; p < panels.end; p += step) {
        int pair = rows <= FEW_PAIR_ROWS && p + 2 <= panels.end && (p + 2) * PANEL <= job->out_features;
        step = pair ? 2 : 1;
        long column = p * PANEL, rest = job->out_features - column;
        if (rest >= PANEL) {
            functions[pair][rows](job->weights, p, x, out + column, job->out_features);
            continue;
        }
        float last_out[FEW_ROWS * PANEL]; /* whose outputs beyond the weight's are dropped */
        functions[0][rows](job->weights, p, x, last_out, PANEL);
        for (long r = 0; r < rows; r++)
            memcpy(out + r * job->out_features + column, last_out + r * PANEL, (size_t)rest * sizeof(float));
    }
}
