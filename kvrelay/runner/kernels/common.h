/* What all kernels share: vectors, exact arithmetic on them, and the thread pool.
 *
 * Every result is a function of its own row alone: fused multiply-adds are spelled out (the compiler may contract nothing by
 * itself), sums run in an order fixed by the data's place in the row, and threads only share out whole results. So a row gives
 * the same bits alone, in any batch and on any number of threads. */
#ifndef KVRELAY_COMMON_H
#define KVRELAY_COMMON_H

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#define LANE_MULTIPLY 1 /* has a multiply-add by one lane of a register */
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")
#define MAX_HEAD_DIM 256
#define MINIMUM(a, b) ((a) < (b) ? (a) : (b))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec_anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const vec_anywhere *)from; }
INLINE void store(float *to, vec value) { *(vec_anywhere *)to = value; }
INLINE vec splat(float value) { return value - (vec){0}; }

/* a * b + c, rounded once where the processor can. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(LANE_MULTIPLY)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec where(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec maximum(vec a, vec b) { return where(a > b, a, b); }

/* The sum of all lanes, by halves. */
INLINE float sum_lanes(vec value) {
    float lane[LANES];
    store(lane, value);
    UNROLL for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

INLINE float largest_lane(vec value) {
    float largest = value[0];
    for (int i = 1; i < LANES; i++) largest = value[i] > largest ? value[i] : largest;
    return largest;
}

/* e^x within 2 units of the last place; 0 below -87.3, capped at 2^127 above 88. exp(0) is exactly 1, exp(NaN) is NaN. */
INLINE vec exponential(vec x) {
    const vec lowest = splat(-87.3f), highest = splat(88.02f), round = splat(12582912.0f);
    ivec vanishes = x < lowest;
    vec bounded = where(vanishes, lowest, x);
    bounded = where(bounded > highest, highest, bounded);
    vec shifted = multiply_add(bounded, splat(1.44269504088896341f), round); /* the nearest integer, in the low bits */
    vec power = shifted - round;
    vec rest = multiply_add(power, splat(-0.693145751953125f), bounded);
    rest = multiply_add(power, splat(-1.42860682030941723e-6f), rest);
    vec sum = splat(1.9875691500e-4f);
    sum = multiply_add(sum, rest, splat(1.3981999507e-3f));
    sum = multiply_add(sum, rest, splat(8.3334519073e-3f));
    sum = multiply_add(sum, rest, splat(4.1665795894e-2f));
    sum = multiply_add(sum, rest, splat(1.6666665459e-1f));
    sum = multiply_add(sum, rest, splat(5.0000001201e-1f));
    sum = multiply_add(sum, rest * rest, rest + 1.0f);
    vec scale = (vec)(((ivec)shifted - (ivec)round + 127) << 23);
    return where(vanishes, splat(0.0f), sum * scale);
}

/* The OpenMP runtime that the process has loaded already, so that there is one pool of threads; see `use_openmp`. */
typedef void (*Body)(void *arguments);
struct OpenMP {
    void (*parallel)(Body, void *arguments, unsigned threads, unsigned flags);
    int (*thread)(void);
    int (*threads)(void);
};
extern struct OpenMP openmp;

/* Runs `body` on every thread; it asks `my_share` for its part of the work. */
INLINE void on_threads(int threads, Body body, void *arguments) {
    if (threads > 1)
        openmp.parallel(body, arguments, (unsigned)threads, 0);
    else
        body(arguments);
}

struct Share {
    long begin, end;
};

INLINE struct Share my_share(long count) {
    long thread = openmp.thread(), threads = openmp.threads();
    return (struct Share){count * thread / threads, count * (thread + 1) / threads};
}

#endif
