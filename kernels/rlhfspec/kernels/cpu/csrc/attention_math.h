// What attention.cpp is made of: dot products of a few queries with gathered keys, softmax, weighted sums of values.
//
// "Lanes" are (query row, head) pairs that share each loaded key or value. Sharing decides which sums run side by side,
// never the order within one:
//   score    16 lanes over the head dimension, then rs_hsum's tree;
//   softmax  16 lanes over positions counted from the first visible one of a split, then the same tree;
//   values   one chain of fused multiply-adds per output number and split, in ascending position;
//   splits   one after the other, in ascending position, by `merge`.
#pragma once

#include <math.h>
#include <string.h>

#include "simd.h"

namespace {

#ifdef __AVX512F__
constexpr int kScores = 16;  // scores that fit in registers at once
#else
constexpr int kScores = 4;
#endif

// ---- storage types -------------------------------------------------------------------------------------------------

RS_INLINE f32x16 load16(const float* p) { return rs_load(p); }
RS_INLINE f32x16 load16(const uint16_t* p) { return rs_load_bf16(p); }
RS_INLINE f32x16 load_some(const float* p, int count) { return rs_load_n(p, count); }
RS_INLINE f32x16 load_some(const uint16_t* p, int count) {
    uint16_t whole[16] = {0};
    memcpy(whole, p, count * sizeof(uint16_t));
    return rs_load_bf16(whole);
}

RS_INLINE void copy_row(float* to, const float* from, int64_t dim) { memcpy(to, from, dim * sizeof(float)); }
RS_INLINE void copy_row(uint16_t* to, const float* from, int64_t dim) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) rs_store_bf16(to + d, rs_load(from + d));
    for (; d < dim; d++) to[d] = rs_bf16_of_float(from[d]);
}

// ---- scores --------------------------------------------------------------------------------------------------------

// Sums each accumulator by rs_hsum's tree; accumulator reduced_at(i) becomes number i of the result.
#ifdef __AVX512F__
constexpr int reduced_at(int i) { return 4 * (i % 4) + i / 4; }

RS_INLINE void reduce(const f32x16* acc, float* out) {
    __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 a = acc[2 * i].v, b = acc[2 * i + 1].v;
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 a = four[2 * i], b = four[2 * i + 1];
        two[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    __m512 even = _mm512_shuffle_ps(two[0], two[1], 0x88), odd = _mm512_shuffle_ps(two[0], two[1], 0xdd);
    _mm512_storeu_ps(out, _mm512_add_ps(even, odd));
}
#else
constexpr int reduced_at(int i) { return i; }

RS_INLINE void reduce(const f32x16* acc, float* out) {
    __m256 eight[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) eight[i] = _mm256_add_ps(acc[i].lo, acc[i].hi);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    __m256 two = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44), _mm256_shuffle_ps(four[0], four[1], 0xee));
    __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}
#endif

// Rows [next, last) to be fetched into the cache while other work goes on.
struct Ahead {
    const char* rows;
    const int64_t* offsets;
    int64_t next, last;
    int64_t element, row_bytes;

    inline __attribute__((always_inline)) void fetch(int64_t count) {
        for (; count > 0 && next < last; count--, next++) {
            const char* row = rows + offsets[next] * element;
            for (int64_t byte = 0; byte < row_bytes; byte += 64) _mm_prefetch(row + byte, _MM_HINT_T0);
        }
    }
    int64_t per_step(int64_t steps) const { return next < last ? (last - next + steps - 1) / steps : 0; }
};

RS_INLINE void add_product(f32x16& sum, f32x16 a, f32x16 b) { sum = rs_fma(a, b, sum); }

// scores[lane][p] = query[lane] . key at offsets[p], for p in [first, last). Writes up to kPad numbers past `last`;
// `offsets` must be readable (and valid) as far.
template <int Lanes, class T>
void score(const float* queries, int64_t padded_dim, const T* keys, const int64_t* offsets, int64_t first, int64_t last,
           int64_t dim, float* scores, int64_t row_length, Ahead ahead) {
    constexpr int kKeys = kScores / Lanes;
    const int64_t whole = dim / 16 * 16, steps = (last - first + kKeys - 1) / kKeys;
    const int64_t fetches = ahead.per_step(steps);
    const int tail = (int)(dim - whole);
    for (int64_t p = first; p < last; p += kKeys) {
        const T* key[kKeys];
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; k++) key[k] = keys + offsets[p + k];
        ahead.fetch(fetches);
        f32x16 acc[kScores];
#pragma GCC unroll 16
        for (int i = 0; i < kScores; i++) acc[i] = rs_zero();
        for (int64_t d = 0; d < whole; d += 16) {
            f32x16 q[Lanes];
#pragma GCC unroll 4
            for (int l = 0; l < Lanes; l++) q[l] = rs_load(queries + l * padded_dim + d);
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; k++) {
                f32x16 loaded = load16(key[k] + d);
#pragma GCC unroll 4
                for (int l = 0; l < Lanes; l++) add_product(acc[reduced_at(l * kKeys + k)], q[l], loaded);
            }
        }
        if (tail) {
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; k++) {
                f32x16 loaded = load_some(key[k] + whole, tail);
#pragma GCC unroll 4
                for (int l = 0; l < Lanes; l++)
                    add_product(acc[reduced_at(l * kKeys + k)], rs_load(queries + l * padded_dim + whole), loaded);
            }
        }
        float reduced[kScores];
        reduce(acc, reduced);
#pragma GCC unroll 4
        for (int l = 0; l < Lanes; l++) memcpy(scores + l * row_length + p, reduced + l * kKeys, kKeys * sizeof(float));
    }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// tanh to a few ulp: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would lose its digits.
RS_INLINE f32x16 tanh16(f32x16 x) {
    f32x16 size = rs_abs(x), z = rs_mul(x, x);
    f32x16 p = rs_set1(-5.70498872745e-3f);
    p = rs_fma(p, z, rs_set1(2.06390887954e-2f));
    p = rs_fma(p, z, rs_set1(-5.37397155531e-2f));
    p = rs_fma(p, z, rs_set1(1.33314422036e-1f));
    p = rs_fma(p, z, rs_set1(-3.33332819422e-1f));
    f32x16 small = rs_fma(rs_mul(x, z), p, x);
    f32x16 e = rs_exp(rs_add(size, size));
    f32x16 large = rs_sub(rs_set1(1.0f), rs_div(rs_set1(2.0f), rs_add(e, rs_set1(1.0f))));
    return rs_select_less(size, rs_set1(0.625f), small, rs_copysign(large, x));
}

// score = softcap * tanh(scale * dot product / softcap)
void cap_scores(float* scores, int64_t count, float scale, float softcap) {
    const f32x16 factor = rs_set1(scale), cap = rs_set1(softcap);
    for (int64_t i = 0; i < count; i += 16)
        rs_store(scores + i, rs_mul(tanh16(rs_div(rs_mul(rs_load(scores + i), factor), cap)), cap));
}

// Of a softmax: the largest score and the sum of exp(score - largest).
struct Weights {
    float largest, sum;

    static Weights none() { return {-INFINITY, 0.0f}; }
};

// Turns `count` dot products into exp(score - largest), in place. The rest of the last vector comes out 0.
Weights exponentials(float* scores, int64_t count, float scale, float softcap) {
    if (softcap > 0.0f) cap_scores(scores, count, scale, softcap);
    const f32x16 factor = rs_set1(softcap > 0.0f ? 1.0f : scale);
    rs_store(scores + count, rs_set1(-INFINITY));
    f32x16 largest16 = rs_set1(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 score = rs_mul(rs_load(scores + i), factor);
        rs_store(scores + i, score);
        largest16 = rs_max(score, largest16);  // whatever this does with a NaN, its exponential keeps it
    }
    const float largest = rs_hmax(largest16);
    const f32x16 shift = rs_set1(largest);
    f32x16 sum = rs_zero();
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 e = rs_exp(rs_sub(rs_load(scores + i), shift));
        rs_store(scores + i, e);
        sum = rs_add(sum, e);
    }
    return {largest, rs_hsum(sum)};
}

// ---- values --------------------------------------------------------------------------------------------------------

// sums[lane][0:16*Vectors] += weight[lane][p] * value at offsets[p], p ascending in [first, last).
// Some: a single vector of which only `some` columns exist.
template <int Lanes, int Vectors, bool Some, class T>
RS_INLINE void weigh_columns(const float* weights, int64_t row_length, const T* values, const int64_t* offsets,
                             int64_t first, int64_t last, float* sums, int64_t padded_dim, int some, Ahead& ahead) {
    const int64_t fetches = ahead.per_step(last - first);
    f32x16 acc[Lanes * Vectors];
#pragma GCC unroll 16
    for (int i = 0; i < Lanes * Vectors; i++) acc[i] = rs_load(sums + (i / Vectors) * padded_dim + (i % Vectors) * 16);
    for (int64_t p = first; p < last; p++) {
        const T* value = values + offsets[p];
        ahead.fetch(fetches);
        f32x16 loaded[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) loaded[v] = Some ? load_some(value, some) : load16(value + 16 * v);
#pragma GCC unroll 4
        for (int l = 0; l < Lanes; l++) {
            f32x16 weight = rs_set1(weights[l * row_length + p]);
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) acc[l * Vectors + v] = rs_fma(weight, loaded[v], acc[l * Vectors + v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Lanes * Vectors; i++) rs_store(sums + (i / Vectors) * padded_dim + (i % Vectors) * 16, acc[i]);
}

// The same for all columns. Not inlined: its registers would depend on what surrounds it.
template <int Lanes, class T>
__attribute__((noinline)) void weigh(const float* weights, int64_t row_length, const T* values, const int64_t* offsets, int64_t first,
           int64_t last, float* sums, int64_t padded_dim, int64_t dim, Ahead ahead) {
    if (first >= last) return;
    constexpr int kWide = kScores / Lanes < 8 ? kScores / Lanes : 8;  // vectors whose sums fit in registers
    int64_t d = 0;
    for (; d + 16 * kWide <= dim; d += 16 * kWide)
        weigh_columns<Lanes, kWide, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim,
                                           0, ahead);
    if constexpr (kWide > 4)
        for (; d + 64 <= dim; d += 64)
            weigh_columns<Lanes, 4, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim,
                                           0, ahead);
    for (; d + 16 <= dim; d += 16)
        weigh_columns<Lanes, 1, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim, 0,
                                       ahead);
    if (d < dim)
        weigh_columns<Lanes, 1, true>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim,
                                      (int)(dim - d), ahead);
}

// ---- splits --------------------------------------------------------------------------------------------------------

// Adds a split to those before it: their weights and weighted sums [dim] of values, both on the scale of the larger
// maximum. A split of which nothing is seen has weights of 0 and changes nothing.
void merge(Weights& weights, float* sums, const Weights& split, const float* split_sums, int64_t dim) {
    if (split.sum == 0.0f) return;
    if (weights.sum == 0.0f) {
        weights = split;
        memcpy(sums, split_sums, dim * sizeof(float));
        return;
    }
    const float largest = split.largest > weights.largest ? split.largest : weights.largest;
    const float before = rs_exp_scalar(weights.largest - largest), after = rs_exp_scalar(split.largest - largest);
    weights = {largest, weights.sum * before + split.sum * after};
    const f32x16 before16 = rs_set1(before), after16 = rs_set1(after);
    for (int64_t d = 0; d < dim; d += 16) {
        const int count = dim - d < 16 ? (int)(dim - d) : 16;
        f32x16 sum = rs_mul(rs_load_n(sums + d, count), before16);
        rs_store_n(sums + d, rs_fma(rs_load_n(split_sums + d, count), after16, sum), count);
    }
}

// The result when all splits are there: zeros where nothing is seen. A vast sink is infinite here: all weights vanish.
void finish_softmax(const Weights& weights, const float* sums, const float* sink, int64_t dim, float* out) {
    const float total = sink == nullptr ? weights.sum : weights.sum + rs_exp_scalar(*sink - weights.largest);
    const bool nothing = weights.sum == 0.0f;
    for (int64_t d = 0; d < dim; d++) out[d] = nothing ? 0.0f : sums[d] / total;
}

}  // namespace
