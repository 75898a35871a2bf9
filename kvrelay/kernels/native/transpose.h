/* Rows to columns, LANES rows at a time. Loading quarters of rows into the quarters of a vector leaves two of the four
 * exchanges to be done between vectors. */
#ifndef KVRELAY_TRANSPOSE_H
#define KVRELAY_TRANSPOSE_H

#include "common.h"

#if LANES >= 8

/* Four floats of every fourth row. */
INLINE __m128 four(const float *from) { return _mm_loadu_ps(from); }
INLINE vec fours(const float *const *row, long k) {
#if LANES == 16
    __m512 low = _mm512_insertf32x4(_mm512_castps128_ps512(four(row[0] + k)), four(row[4] + k), 1);
    return (vec)_mm512_insertf32x4(_mm512_insertf32x4(low, four(row[8] + k), 2), four(row[12] + k), 3);
#else
    return (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(four(row[0] + k)), four(row[4] + k), 1);
#endif
}

#if LANES == 16
#define EXCHANGE(which, a, b) (vec)_mm512_castpd_ps(_mm512_unpack##which##_pd((__m512d)(a), (__m512d)(b)))
#define EXCHANGE_FLOATS(which, a, b) (vec)_mm512_unpack##which##_ps((__m512)(a), (__m512)(b))
#else
#define EXCHANGE(which, a, b) (vec)_mm256_castpd_ps(_mm256_unpack##which##_pd((__m256d)(a), (__m256d)(b)))
#define EXCHANGE_FLOATS(which, a, b) (vec)_mm256_unpack##which##_ps((__m256)(a), (__m256)(b))
#endif

/* column[i][0..LANES] = row[0..LANES][k + i] */
INLINE void four_columns(const float *const *row, long k, vec *column) {
    vec a = fours(row, k), b = fours(row + 1, k), c = fours(row + 2, k), d = fours(row + 3, k);
    vec low_ab = EXCHANGE_FLOATS(lo, a, b), low_cd = EXCHANGE_FLOATS(lo, c, d);
    vec high_ab = EXCHANGE_FLOATS(hi, a, b), high_cd = EXCHANGE_FLOATS(hi, c, d);
    column[0] = EXCHANGE(lo, low_ab, low_cd), column[1] = EXCHANGE(hi, low_ab, low_cd);
    column[2] = EXCHANGE(lo, high_ab, high_cd), column[3] = EXCHANGE(hi, high_ab, high_cd);
}

/* to[k][0..LANES] = row[0..LANES][k]. Each store is LANES wide whatever the stride, in the order of k: with a smaller stride the
 * rows beyond it are overwritten by the next, and the last one needs room behind it. */
INLINE void transpose(const float *const *row, long depth, float *to, long stride) {
    long k = 0;
    for (; k + 4 <= depth; k += 4, to += 4 * stride) {
        vec column[4];
        four_columns(row, k, column);
        UNROLL for (int i = 0; i < 4; i++) store(to + i * stride, column[i]);
    }
    for (; k < depth; k++, to += stride)
        for (int r = 0; r < LANES; r++) to[r] = row[r][k];
}

#endif
#endif
