// One vector of 16 floats, written once and compiled for AVX2 (two registers) and AVX-512 (one register).
//
// Promise: the two builds give the same BITS. Every lane does the same operations in the same order, fused
// multiply-adds are explicit (the build forbids the compiler to make its own) and reductions follow one fixed tree.
//
// Rules for a kernel file: everything is `static` or inside an anonymous namespace, because the same names are
// compiled once per instruction set and linked together; no std:: templates for the same reason (the linker would keep
// one copy, perhaps the AVX-512 one). Exported functions: RS_EXPORT void RS_NAME(my_kernel)(...).
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define RS_JOIN_(name, isa) name##_##isa
#define RS_JOIN(name, isa) RS_JOIN_(name, isa)
#define RS_NAME(name) RS_JOIN(name, RS_ISA)
#define RS_EXPORT extern "C" __attribute__((visibility("default")))
#define RS_ALWAYS inline __attribute__((always_inline))  // for member functions
#define RS_INLINE static RS_ALWAYS

constexpr int kLanes = 16;

RS_INLINE float rs_float_of_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

RS_INLINE uint32_t rs_bits_of_float(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

// ---- scalar bf16 ---------------------------------------------------------------------------------------------------

RS_INLINE float rs_float_of_bf16(uint16_t value) { return rs_float_of_bits((uint32_t)value << 16); }

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
RS_INLINE uint16_t rs_bf16_of_float(float value) {
    uint32_t bits = rs_bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// ---- the vector ----------------------------------------------------------------------------------------------------

#ifdef __AVX512F__

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};

RS_INLINE __mmask16 rs_mask(int count) { return (__mmask16)((1u << count) - 1u); }

RS_INLINE f32x16 rs_zero() { return {_mm512_setzero_ps()}; }
RS_INLINE f32x16 rs_set1(float x) { return {_mm512_set1_ps(x)}; }
RS_INLINE f32x16 rs_load(const float* p) { return {_mm512_loadu_ps(p)}; }
RS_INLINE void rs_store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
// The first `count` (0..16) lanes; the others read as zero and are not written.
RS_INLINE f32x16 rs_load_n(const float* p, int count) { return {_mm512_maskz_loadu_ps(rs_mask(count), p)}; }
RS_INLINE void rs_store_n(float* p, f32x16 a, int count) { _mm512_mask_storeu_ps(p, rs_mask(count), a.v); }
RS_INLINE f32x16 rs_add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
RS_INLINE f32x16 rs_fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a*b + c
RS_INLINE f32x16 rs_fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a*b
// If either lane is NaN the result is b, as in the instruction.
RS_INLINE f32x16 rs_max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
RS_INLINE f32x16 rs_round(f32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
RS_INLINE f32x16 rs_abs(f32x16 a) {
    return {_mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}
// The magnitude of a with the sign of b.
RS_INLINE f32x16 rs_copysign(f32x16 a, f32x16 b) {
    __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    return {_mm512_castsi512_ps(_mm512_or_epi32(_mm512_andnot_epi32(sign, _mm512_castps_si512(a.v)),
                                                _mm512_and_epi32(sign, _mm512_castps_si512(b.v))))};
}
// Lane-wise (a < b) ? yes : no.
RS_INLINE f32x16 rs_select_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
RS_INLINE i32x16 rs_to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
// 2^n for -126 <= n <= 127.
RS_INLINE f32x16 rs_power_of_two(i32x16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
RS_INLINE i32x16 rs_half_int(i32x16 n) { return {_mm512_srai_epi32(n.v, 1)}; }
// a * 2^n, where n is in the low bits of shifted = 1.5 * 2^23 + n and the result is a normal number.
RS_INLINE f32x16 rs_scale_by_shifted(f32x16 a, f32x16 shifted) {
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), exponent))};
}
RS_INLINE i32x16 rs_sub_int(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }

// 16 values of 8 bits.
RS_INLINE f32x16 rs_load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// 16 bf16 values.
RS_INLINE f32x16 rs_load_bf16(const uint16_t* p) {
    __m256i raw = _mm256_loadu_si256((const __m256i*)p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
// 32 bf16 values packed as pairs: the even ones are the low halves of 32-bit words, the odd ones the high halves.
RS_INLINE void rs_load_bf16_pairs(const uint16_t* p, f32x16* even, f32x16* odd) {
    __m512i raw = _mm512_loadu_si512(p);
    even->v = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    odd->v = _mm512_castsi512_ps(_mm512_and_epi32(raw, _mm512_set1_epi32((int)0xffff0000u)));
}
RS_INLINE __m256i rs_bf16_bits(f32x16 a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_epi32(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

// Always this tree: 16 -> 8 -> 4 -> 2 -> 1, lower half plus upper half.
RS_INLINE __m256 rs_low(f32x16 a) { return _mm512_castps512_ps256(a.v); }
RS_INLINE __m256 rs_high(f32x16 a) { return _mm512_extractf32x8_ps(a.v, 1); }

#else  // AVX2

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};

// All ones in the first `count` (0..8) lanes.
RS_INLINE __m256i rs_mask8(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

RS_INLINE f32x16 rs_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
RS_INLINE f32x16 rs_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
RS_INLINE f32x16 rs_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RS_INLINE void rs_store(float* p, f32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
// The first `count` (0..16) lanes; the others read as zero and are not written.
RS_INLINE f32x16 rs_load_n(const float* p, int count) {
    return {_mm256_maskload_ps(p, rs_mask8(count)), _mm256_maskload_ps(p + 8, rs_mask8(count - 8))};
}
RS_INLINE void rs_store_n(float* p, f32x16 a, int count) {
    _mm256_maskstore_ps(p, rs_mask8(count), a.lo);
    _mm256_maskstore_ps(p + 8, rs_mask8(count - 8), a.hi);
}
RS_INLINE f32x16 rs_add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
RS_INLINE f32x16 rs_fma(f32x16 a, f32x16 b, f32x16 c) {  // a*b + c
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
RS_INLINE f32x16 rs_fnma(f32x16 a, f32x16 b, f32x16 c) {  // c - a*b
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// If either lane is NaN the result is b, as in the instruction.
RS_INLINE f32x16 rs_max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
RS_INLINE f32x16 rs_round(f32x16 a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
RS_INLINE f32x16 rs_abs(f32x16 a) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
// The magnitude of a with the sign of b.
RS_INLINE f32x16 rs_copysign(f32x16 a, f32x16 b) {
    __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32((int)0x80000000u));
    return {_mm256_or_ps(_mm256_andnot_ps(sign, a.lo), _mm256_and_ps(sign, b.lo)),
            _mm256_or_ps(_mm256_andnot_ps(sign, a.hi), _mm256_and_ps(sign, b.hi))};
}
// Lane-wise (a < b) ? yes : no.
RS_INLINE f32x16 rs_select_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
RS_INLINE i32x16 rs_to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
// 2^n for -126 <= n <= 127.
RS_INLINE f32x16 rs_power_of_two(i32x16 n) {
    __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
RS_INLINE i32x16 rs_half_int(i32x16 n) { return {_mm256_srai_epi32(n.lo, 1), _mm256_srai_epi32(n.hi, 1)}; }
// a * 2^n, where n is in the low bits of shifted = 1.5 * 2^23 + n and the result is a normal number.
RS_INLINE f32x16 rs_scale_by_shifted(f32x16 a, f32x16 shifted) {
    __m256i lo = _mm256_slli_epi32(_mm256_castps_si256(shifted.lo), 23);
    __m256i hi = _mm256_slli_epi32(_mm256_castps_si256(shifted.hi), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), lo)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), hi))};
}
RS_INLINE i32x16 rs_sub_int(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }

// 16 values of 8 bits.
RS_INLINE f32x16 rs_load_int8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
// 16 bf16 values.
RS_INLINE f32x16 rs_load_bf16(const uint16_t* p) {
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
// 32 bf16 values packed as pairs: the even ones are the low halves of 32-bit words, the odd ones the high halves.
RS_INLINE void rs_load_bf16_pairs(const uint16_t* p, f32x16* even, f32x16* odd) {
    __m256i lo = _mm256_loadu_si256((const __m256i*)p);
    __m256i hi = _mm256_loadu_si256((const __m256i*)(p + 16));
    __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
    even->lo = _mm256_castsi256_ps(_mm256_slli_epi32(lo, 16));
    even->hi = _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16));
    odd->lo = _mm256_castsi256_ps(_mm256_and_si256(lo, mask));
    odd->hi = _mm256_castsi256_ps(_mm256_and_si256(hi, mask));
}
RS_INLINE __m256i rs_bf16_words(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
RS_INLINE __m256i rs_bf16_bits(f32x16 a) {
    __m256i packed = _mm256_packus_epi32(rs_bf16_words(a.lo), rs_bf16_words(a.hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within 128-bit halves
}

RS_INLINE __m256 rs_low(f32x16 a) { return a.lo; }
RS_INLINE __m256 rs_high(f32x16 a) { return a.hi; }

#endif

// ---- built from the above, hence the same in both ------------------------------------------------------------------

// Rounds 16 floats to bf16, nearest even.
RS_INLINE void rs_store_bf16(uint16_t* p, f32x16 a) { _mm256_storeu_si256((__m256i*)p, rs_bf16_bits(a)); }

// Sum of the 16 lanes, always by this tree: lower half plus upper half, 16 -> 8 -> 4 -> 2 -> 1.
RS_INLINE float rs_hsum(f32x16 a) {
    __m256 eight = _mm256_add_ps(rs_low(a), rs_high(a));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Largest of the 16 lanes (of NaN-free input).
RS_INLINE float rs_hmax(f32x16 a) {
    __m256 eight = _mm256_max_ps(rs_low(a), rs_high(a));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x, at most 2 ulp off on the whole line: 0 below -104, infinity above 88.73, subnormals in between kept, NaN stays.
RS_INLINE f32x16 rs_exp(f32x16 x) {
    x = rs_max(rs_set1(-105.0f), x);  // the operand order keeps a NaN
    x = rs_min(rs_set1(89.0f), x);
    f32x16 n = rs_round(rs_mul(x, rs_set1(1.44269504088896341f)));
    f32x16 r = rs_fnma(n, rs_set1(0.693359375f), x);  // ln 2 in two parts: the first is short, so the product is exact
    r = rs_fnma(n, rs_set1(-2.12194440e-4f), r);
    f32x16 p = rs_set1(1.9875691500e-4f);
    p = rs_fma(p, r, rs_set1(1.3981999507e-3f));
    p = rs_fma(p, r, rs_set1(8.3334519073e-3f));
    p = rs_fma(p, r, rs_set1(4.1665795894e-2f));
    p = rs_fma(p, r, rs_set1(1.6666665459e-1f));
    p = rs_fma(p, r, rs_set1(5.0000001201e-1f));
    p = rs_add(rs_fma(rs_mul(r, r), p, r), rs_set1(1.0f));
    i32x16 whole = rs_to_int(n);
    i32x16 half = rs_half_int(whole);  // 2^n may be outside the floats where e^x is not, so scale in two steps
    return rs_mul(rs_mul(p, rs_power_of_two(half)), rs_power_of_two(rs_sub_int(whole, half)));
}

// The same function for one value, through the vector: one exp in the whole of the kernels.
RS_INLINE float rs_exp_scalar(float x) {
#ifdef __AVX512F__
    return _mm_cvtss_f32(_mm512_castps512_ps128(rs_exp(rs_set1(x)).v));
#else
    return _mm256_cvtss_f32(rs_exp(rs_set1(x)).lo);
#endif
}
