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

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BW__)
#define HAS_TILES 1 /* see tiles.h */
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

/* The larger of each lane; NaN where `b` is. */
INLINE vec maximum(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(LANE_MULTIPLY)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    ivec larger = a > b;
    return (vec)(((ivec)a & larger) | ((ivec)b & ~larger));
#endif
}

#if LANES >= 8
INLINE __m128 fold(vec value) {
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)value),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)value), 1)));
#else
    __m256 half = (__m256)value;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

/* The sums of four vectors' lanes, each by the same tree as the others. */
INLINE void sums_of_four(vec a, vec b, vec c, vec d, float *sums) {
#if LANES >= 8
    _mm_storeu_ps(sums, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
#elif defined(LANE_MULTIPLY)
    float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    vst1q_f32(sums, vpaddq_f32(ab, cd));
#else
    vec each[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) sums[i] = (each[i][0] + each[i][1]) + (each[i][2] + each[i][3]);
#endif
}

INLINE float sum_lanes(vec value) {
    float sums[4];
    sums_of_four(value, value, value, value, sums);
    return sums[0];
}

INLINE float largest_lane(vec value) {
#if LANES >= 8
#if LANES == 16
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)value),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)value), 1)));
#else
    __m256 half = (__m256)value;
#endif
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#elif defined(LANE_MULTIPLY)
    return vmaxvq_f32((float32x4_t)value);
#else
    float largest = value[0];
    for (int i = 1; i < LANES; i++) largest = value[i] > largest ? value[i] : largest;
    return largest;
#endif
}

#define AT_ONCE 4 /* vectors: enough independent work to keep the pipes full */
#define EACH UNROLL for (int i = 0; i < count; i++)

/* x = e^x for `count` <= AT_ONCE vectors, within 2 units of the last place; exactly 0 below -88, exactly 1 at 0, at most e^88,
 * NaN for NaN. Each lane is computed alike whatever the count, and whether it is known that none is above 0. */
INLINE void exponentials(const int count, const int at_most_0, vec *x) {
    const vec round = splat(12582912.0f); /* adding it leaves the nearest integer in the low bits */
    vec shifted[AT_ONCE], rest[AT_ONCE], sum[AT_ONCE];
    EACH x[i] = maximum(splat(-88.02f), x[i]);
    if (!at_most_0) EACH x[i] = -maximum(splat(-88.0f), -x[i]);
    EACH shifted[i] = multiply_add(x[i], splat(1.44269504088896341f), round);
    EACH sum[i] = shifted[i] - round;
    EACH rest[i] = multiply_add(sum[i], splat(-0.693145751953125f), x[i]);
    EACH rest[i] = multiply_add(sum[i], splat(-1.42860682030941723e-6f), rest[i]);
    EACH sum[i] = multiply_add(splat(1.9875691500e-4f), rest[i], splat(1.3981999507e-3f));
    EACH sum[i] = multiply_add(sum[i], rest[i], splat(8.3334519073e-3f));
    EACH sum[i] = multiply_add(sum[i], rest[i], splat(4.1665795894e-2f));
    EACH sum[i] = multiply_add(sum[i], rest[i], splat(1.6666665459e-1f));
    EACH sum[i] = multiply_add(sum[i], rest[i], splat(5.0000001201e-1f));
    EACH sum[i] = multiply_add(sum[i], rest[i] * rest[i], rest[i] + 1.0f);
    EACH x[i] = sum[i] * (vec)(((ivec)shifted[i] + 127) << 23); /* 2^power; 0 for the power -127, which -88.02 gives */
}

INLINE float exponential(float x) {
    vec value = splat(x);
    exponentials(1, 0, &value);
    return value[0];
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
