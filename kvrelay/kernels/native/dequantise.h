/* From panels of a quantised weight (weights.h) to panels of floats, some inputs at a time. */
#include <string.h>

#include "weights.h"

typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec_anywhere __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef int8_t bytes_vec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t ubytes_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE float from_half(uint16_t half) {
    union {
        uint32_t bits;
        float value;
    } rest = {(uint32_t)(half & 0x7fff) << 13}, sign = {(uint32_t)(half >> 15) << 31};
    rest.value *= 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) rest.bits |= 0x7f800000; /* infinite, or no number */
    rest.bits |= sign.bits;
    return rest.value;
}

INLINE vec halves(const uint8_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(LANE_MULTIPLY)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    uint16_t each[LANES];
    memcpy(each, from, sizeof(each));
    vec values;
    UNROLL for (int i = 0; i < LANES; i++) values[i] = from_half(each[i]);
    return values;
#endif
}

INLINE vec signed_bytes(const uint8_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes_vec *)from, ivec), vec);
#endif
}

INLINE vec unsigned_bytes(const uint8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(*(const ubytes_vec *)from, ivec), vec);
}

/* The lowest four bits of each word. */
INLINE vec nibbles(uvec words) {
#if LANES == 16 /* a permutation looks at no other bits */
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return (vec)_mm512_permutexvar_ps((__m512i)words, table);
#else
    return __builtin_convertvector((ivec)(words & 15), vec);
#endif
}

/* A run of inputs whose quants have one scale and one minimum for each output of a panel. */
#define RUN(format) ((format) == Q6_K ? 16 : 32)
struct Run {
    const uint8_t *quants;
    vec scale[VECTORS], minimum[VECTORS];
};

#define EACH_VECTOR UNROLL for (int v = 0; v < VECTORS; v++)

/* The run from input `first` of a group on. */
INLINE void read_run(const int format, const uint8_t *group, long first, struct Run *run) {
    const uint8_t *part = group + HALVES;
    EACH_VECTOR run->scale[v] = halves(group + 2 * v * LANES);
    switch (format) {
    case Q4_0:
        EACH_VECTOR run->minimum[v] = run->scale[v] * -8.0f;
        break;
    case Q4_1:
        EACH_VECTOR run->minimum[v] = halves(part + 2 * v * LANES);
        part += HALVES;
        break;
    case Q4_K:
        EACH_VECTOR run->minimum[v] = halves(part + 2 * v * LANES);
        part += HALVES + first / 32 * (2 * PANEL + QUANTS_4(32));
        EACH_VECTOR run->scale[v] *= unsigned_bytes(part + v * LANES);
        EACH_VECTOR run->minimum[v] *= -unsigned_bytes(part + PANEL + v * LANES);
        part += 2 * PANEL;
        break;
    case Q6_K:
        part += first / 16 * (PANEL + QUANTS_8(16));
        EACH_VECTOR run->scale[v] *= signed_bytes(part + v * LANES);
        part += PANEL;
        break;
    }
    run->quants = part;
}

/* The quants of eight inputs from input 8 * `eight` of a run on: words, each with eight quants of 4 bits, if they have so few. */
INLINE uvec eight_quants(const int format, const struct Run *run, int eight, int v) {
    if (format == Q8_0 || format == Q6_K) return (uvec){0};
    return *(const uvec_anywhere *)(run->quants + 4 * (eight * PANEL + v * LANES));
}

/* The weights of input k of eight. */
INLINE vec run_weights(const int format, const struct Run *run, uvec words, int eight, int k, int v) {
    if (format == Q8_0 || format == Q6_K) return signed_bytes(run->quants + (8 * eight + k) * PANEL + v * LANES) * run->scale[v];
    return multiply_add(nibbles(words >> 4 * k), run->scale[v], run->minimum[v]);
}

#define UNPACK(name, format)                                                                                                  \
    static __attribute__((noinline)) void name(const uint8_t *panel, long begin, long depth, float *to) {                     \
        const struct Group group = GROUPS[format];                                                                            \
        struct Run run;                                                                                                       \
        for (long at = begin; at < begin + depth; at += RUN(format)) {                                                        \
            read_run(format, panel + at / group.inputs * group.bytes, at % group.inputs, &run);                               \
            for (int eight = 0; eight < RUN(format) / 8; eight++, to += 8 * PANEL)                                            \
                EACH_VECTOR {                                                                                                 \
                    uvec words = eight_quants(format, &run, eight, v);                                                        \
                    UNROLL for (int k = 0; k < 8; k++)                                                                        \
                        store(to + k * PANEL + v * LANES, run_weights(format, &run, words, eight, k, v));                     \
                }                                                                                                             \
        }                                                                                                                     \
    }
UNPACK(unpack_q4_0, Q4_0) UNPACK(unpack_q4_1, Q4_1) UNPACK(unpack_q8_0, Q8_0) UNPACK(unpack_q4_k, Q4_K) UNPACK(unpack_q6_k, Q6_K)

typedef void (*Unpack)(const uint8_t *panel, long begin, long depth, float *to);
static const Unpack UNPACKS[FORMATS] = {NULL, unpack_q4_0, unpack_q4_1, unpack_q8_0, unpack_q4_k, unpack_q6_k};

/* Bytes of so many inputs of a panel. */
INLINE long inputs_bytes(const struct Weights *weights, long inputs) {
    const struct Group group = GROUPS[weights->format];
    return inputs * group.bytes / group.inputs;
}

/* Where a panel's inputs from `begin` on are, or the group that has them. */
INLINE const uint8_t *inputs_at(const struct Weights *weights, long panel, long begin) {
    const struct Group group = GROUPS[weights->format];
    const uint8_t *first = (const uint8_t *)weights->panels + panel * inputs_bytes(weights, weights->in_features);
    return first + begin / group.inputs * group.bytes;
}

/* The floats [depth][PANEL] of a panel from input `begin` on: where they are, or dequantised into `room`, for which both numbers
 * are whole 32s. */
INLINE const float *panel_floats(const struct Weights *weights, long panel, long begin, long depth, float *room) {
    if (weights->format == FLOAT32) return (const float *)inputs_at(weights, panel, begin);
    UNPACKS[weights->format](inputs_at(weights, panel, 0), begin, depth, room);
    return room;
}
