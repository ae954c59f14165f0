// What the law of sampling needs beyond simd.h, for AVX2 and AVX-512 alike: doubles, Philox, prefix masks.
//
// Same promise as simd.h: both give the same bits. (The one exception is no exception: how often a bound is computed.)
#pragma once

#include "simd.h"

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kGroup = 32;  // tokens of one call of Philox here: 8 counters x 4 words

// A mask keeps a prefix of the order (logit descending, id ascending), so its last token describes it.
struct Cut {
    float logit = -kInfinity;
    int32_t id = INT32_MAX;
    bool keeps_all() const { return logit == -kInfinity; }
    // Of the tokens it keeps, those with logits >= least.
    Cut above(float least) const { return least > logit ? Cut{least, INT32_MAX} : *this; }
};

// Philox4x32-10 for one (seed, position): the round keys, and what is the same for every token.
struct NoiseKey {
    uint64_t position;
    uint64_t low[10], high[10];
    NoiseKey(uint64_t seed, uint32_t t) : position(t) {
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) low[round] = k0, high[round] = k1;
    }
};

#ifdef __AVX512F__

constexpr int kDoubles = 8;
using Doubles = __m512d;
RS_INLINE Doubles set_double(double x) { return _mm512_set1_pd(x); }
RS_INLINE Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
RS_INLINE Doubles sub(Doubles a, Doubles b) { return _mm512_sub_pd(a, b); }
RS_INLINE Doubles mul(Doubles a, Doubles b) { return _mm512_mul_pd(a, b); }
RS_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
RS_INLINE Doubles fms(Doubles a, Doubles b, Doubles c) { return _mm512_fmsub_pd(a, b, c); }
RS_INLINE Doubles max(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
RS_INLINE void store_doubles(double* p, Doubles a) { _mm512_storeu_pd(p, a); }
// a * 2^n, where n sits in the low bits of the mantissa of `whole`.
RS_INLINE Doubles scale(Doubles a, Doubles whole) {
    __m512i exponent = _mm512_slli_epi64(_mm512_castpd_si512(whole), 52);
    return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(a), exponent));
}
RS_INLINE void widen(f32x16 x, Doubles* out) {
    out[0] = _mm512_cvtps_pd(rs_low(x));
    out[1] = _mm512_cvtps_pd(rs_high(x));
}

RS_INLINE unsigned at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
RS_INLINE unsigned greater(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
RS_INLINE unsigned unordered(f32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
// The 16 tokens from id v on; those that the cut drops read -inf.
RS_INLINE f32x16 apply_cut(f32x16 x, int32_t v, const Cut& cut) {
    __m512 logit = _mm512_set1_ps(cut.logit);
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i id = _mm512_add_epi32(_mm512_set1_epi32(v), lane);
    __mmask16 equal = _mm512_cmp_ps_mask(x.v, logit, _CMP_EQ_OQ);
    __mmask16 ties = _mm512_mask_cmple_epi32_mask(equal, id, _mm512_set1_epi32(cut.id));
    __mmask16 kept = _mm512_cmp_ps_mask(x.v, logit, _CMP_GT_OQ) | ties;
    return {_mm512_mask_blend_ps(kept, _mm512_set1_ps(-kInfinity), x.v)};
}

// 64-bit lanes whose low halves are the words; what is in the high halves does not matter.
using Words = __m512i;
constexpr int kChains = 1;  // calls of Philox for one group
// In this order the unpacking below gives the tokens in theirs.
RS_INLINE Words counters() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
RS_INLINE Words set_word(uint64_t x) { return _mm512_set1_epi64((long long)x); }
RS_INLINE Words plus(Words a, Words b) { return _mm512_add_epi64(a, b); }
RS_INLINE Words product(Words a, Words b) { return _mm512_mul_epu32(a, b); }
RS_INLINE Words high_xor(Words wide, Words b, Words key) {
    return _mm512_ternarylogic_epi64(_mm512_srli_epi64(wide, 32), b, key, 0x96);
}
RS_INLINE Words join(Words even, Words odd) { return _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)); }
// The float nearest below (word / 256), its bits read as a number: 2^23 (127 + an estimate of log2 from below).
RS_INLINE __m512 bits_below(Words words) {
    return _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srli_epi32(words, 8))));
}
RS_INLINE void unpack_group(const Words* state, uint32_t* words, f32x16* bits) {
    Words first = join(state[0], state[1]), second = join(state[2], state[3]);
    Words low = _mm512_unpacklo_epi64(first, second), high = _mm512_unpackhi_epi64(first, second);
    _mm512_storeu_si512(words, low);
    _mm512_storeu_si512(words + 16, high);
    bits[0].v = bits_below(low);
    bits[1].v = bits_below(high);
}

#else  // AVX2

constexpr int kDoubles = 4;
using Doubles = __m256d;
RS_INLINE Doubles set_double(double x) { return _mm256_set1_pd(x); }
RS_INLINE Doubles add(Doubles a, Doubles b) { return _mm256_add_pd(a, b); }
RS_INLINE Doubles sub(Doubles a, Doubles b) { return _mm256_sub_pd(a, b); }
RS_INLINE Doubles mul(Doubles a, Doubles b) { return _mm256_mul_pd(a, b); }
RS_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
RS_INLINE Doubles fms(Doubles a, Doubles b, Doubles c) { return _mm256_fmsub_pd(a, b, c); }
RS_INLINE Doubles max(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
RS_INLINE void store_doubles(double* p, Doubles a) { _mm256_storeu_pd(p, a); }
// a * 2^n, where n sits in the low bits of the mantissa of `whole`.
RS_INLINE Doubles scale(Doubles a, Doubles whole) {
    __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(whole), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(a), exponent));
}
RS_INLINE void widen(f32x16 x, Doubles* out) {
    out[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(x.lo));
    out[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(x.lo, 1));
    out[2] = _mm256_cvtps_pd(_mm256_castps256_ps128(x.hi));
    out[3] = _mm256_cvtps_pd(_mm256_extractf128_ps(x.hi, 1));
}

RS_INLINE unsigned movemask(__m256 lo, __m256 hi) {
    return (unsigned)_mm256_movemask_ps(lo) | (unsigned)_mm256_movemask_ps(hi) << 8;
}
RS_INLINE unsigned at_least(f32x16 a, f32x16 b) {
    return movemask(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
RS_INLINE unsigned greater(f32x16 a, f32x16 b) {
    return movemask(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
RS_INLINE unsigned unordered(f32x16 a) {
    return movemask(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}
RS_INLINE __m256 apply_cut_half(__m256 x, int32_t v, const Cut& cut) {
    __m256 logit = _mm256_set1_ps(cut.logit);
    __m256i id = _mm256_add_epi32(_mm256_set1_epi32(v), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256 later = _mm256_castsi256_ps(_mm256_cmpgt_epi32(id, _mm256_set1_epi32(cut.id)));
    __m256 ties = _mm256_andnot_ps(later, _mm256_cmp_ps(x, logit, _CMP_EQ_OQ));
    __m256 kept = _mm256_or_ps(ties, _mm256_cmp_ps(x, logit, _CMP_GT_OQ));
    return _mm256_blendv_ps(_mm256_set1_ps(-kInfinity), x, kept);
}
// The 16 tokens from id v on; those that the cut drops read -inf.
RS_INLINE f32x16 apply_cut(f32x16 x, int32_t v, const Cut& cut) {
    return {apply_cut_half(x.lo, v, cut), apply_cut_half(x.hi, v + 8, cut)};
}

// 64-bit lanes whose low halves are the words; what is in the high halves does not matter.
using Words = __m256i;
constexpr int kChains = 2;  // calls of Philox for one group
// In this order the unpacking below gives the tokens in theirs.
RS_INLINE Words counters() { return _mm256_setr_epi64x(0, 2, 1, 3); }
RS_INLINE Words set_word(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
RS_INLINE Words plus(Words a, Words b) { return _mm256_add_epi64(a, b); }
RS_INLINE Words product(Words a, Words b) { return _mm256_mul_epu32(a, b); }
RS_INLINE Words high_xor(Words wide, Words b, Words key) {
    return _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(wide, 32), b), key);
}
RS_INLINE Words join(Words even, Words odd) { return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa); }
// The float nearest below (word / 256), its bits read as a number: 2^23 (127 + an estimate of log2 from below).
RS_INLINE __m256 bits_below(Words words) {
    return _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8))));
}
RS_INLINE void unpack_group(const Words* state, uint32_t* words, f32x16* bits) {
    for (int chain = 0; chain < 2; ++chain, state += 4) {
        Words first = join(state[0], state[1]), second = join(state[2], state[3]);
        Words low = _mm256_unpacklo_epi64(first, second), high = _mm256_unpackhi_epi64(first, second);
        _mm256_storeu_si256((__m256i*)(words + 16 * chain), low);
        _mm256_storeu_si256((__m256i*)(words + 16 * chain + 8), high);
        bits[chain] = {bits_below(low), bits_below(high)};
    }
}

#endif

// ---- built from the above, hence the same in both ------------------------------------------------------------------

constexpr int kParts = 16 / kDoubles;

// e^x for x <= 0, within 1e-13 of itself; below -700 it stays at e^-700, which is nothing beside a sum >= 1.
RS_INLINE Doubles exp_of_negative(Doubles x) {
    const Doubles log2e = set_double(1.4426950408889634), magic = set_double(0x1.8p52);
    x = max(x, set_double(-700.0));
    Doubles shifted = fma(x, log2e, magic);  // rounds to a whole number in the low bits of the mantissa
    Doubles f = fms(x, log2e, sub(shifted, magic));  // in [-1/2, 1/2]
    // 2^f, minimax with the constant term fixed at 1, so that e^0 is exactly 1
    Doubles p = set_double(0x1.b63880a30e9ffp-24);
    p = fma(p, f, set_double(0x1.63d136366db24p-20));
    p = fma(p, f, set_double(0x1.ffcb9515a8016p-17));
    p = fma(p, f, set_double(0x1.4308ac85aa947p-13));
    p = fma(p, f, set_double(0x1.5d87fe86fe88ep-10));
    p = fma(p, f, set_double(0x1.3b2ab7181b755p-7));
    p = fma(p, f, set_double(0x1.c6b08d7047e52p-5));
    p = fma(p, f, set_double(0x1.ebfbdff823cedp-3));
    p = fma(p, f, set_double(0x1.62e42fefa39efp-1));
    p = fma(p, f, set_double(1.0));
    return scale(p, shifted);
}

// The words of the 32 tokens from 4 * block on, and their estimates (bits_below).
RS_INLINE void random_group(uint32_t block, const NoiseKey& key, uint32_t* words, f32x16* bits) {
    const Words m0 = set_word(0xD2511F53u), m1 = set_word(0xCD9E8D57u);
    Words c[4 * kChains];
    for (int chain = 0; chain < kChains; ++chain) {
        c[4 * chain] = plus(set_word(block + 4 * chain), counters());
        c[4 * chain + 1] = set_word(key.position);
        c[4 * chain + 2] = c[4 * chain + 3] = set_word(0);
    }
    for (int round = 0; round < 10; ++round) {
        const Words k0 = set_word(key.low[round]), k1 = set_word(key.high[round]);
        for (Words* w = c; w < c + 4 * kChains; w += 4) {
            Words wide0 = product(m0, w[0]), wide1 = product(m1, w[2]);
            w[0] = high_xor(wide1, w[1], k0);
            w[1] = wide1;
            w[2] = high_xor(wide0, w[3], k1);
            w[3] = wide0;
        }
    }
    unpack_group(c, words, bits);
}

}  // namespace
