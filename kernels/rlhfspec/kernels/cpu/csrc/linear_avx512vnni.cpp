// Linear layers in whole numbers (VPDPBUSD): weights of 8 bits (int8.h), activations of 8 bits with a scale for every 16.
//
// A weight is stored as its whole number plus 128, because the instruction wants one factor without a sign. What that adds
// to a sum depends on the activations alone, and is taken from it before they are multiplied.
#include "gated_mlp.h"
#include "int8.h"

namespace {

constexpr long kGroup = 16;  // activations that share a scale

struct Activations16 {
    float scale;
    int32_t start;  // -128 times the sum of the numbers
    int8_t numbers[kGroup];
};

// kRows x 64 outputs.
template <int kRows, class Side>
RS_INLINE void whole_tile(const Activations16* a, long stride, const char* w, long k, float* out, long out_stride, bool carry,
                          Side& side) {
    __m512 sums[kRows][4];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            sums[r][v] = carry ? _mm512_loadu_ps(out + r * out_stride + v * kLanes) : _mm512_setzero_ps();
    for (long i = 0; i < k; i += kInt8Group, w += kInt8Bytes) {
        const uint16_t* scales = (const uint16_t*)w;
        const char* numbers = w + 128;
        for (long part = 0; part < kInt8Group / kGroup; ++part, ++a) {
            side.step();
            __m512i products[kRows][4];
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) products[r][v] = _mm512_set1_epi32(a[r * stride].start);
#pragma GCC unroll 4
            for (int four = 0; four < kGroup / 4; ++four, numbers += 256) {
                __m512i weights[4];
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) weights[v] = _mm512_loadu_si512(numbers + v * 64);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    int32_t quad;
                    __builtin_memcpy(&quad, a[r * stride].numbers + four * 4, sizeof quad);
                    __m512i values = _mm512_set1_epi32(quad);
#pragma GCC unroll 4
                    for (int v = 0; v < 4; ++v) products[r][v] = _mm512_dpbusd_epi32(products[r][v], weights[v], values);
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                __m512 scale = rs_load_bf16(scales + v * kLanes).v;
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(a[r * stride].scale));
                    sums[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][v]), both, sums[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + r * out_stride + v * kLanes, sums[r][v]);
}

struct Vnni {
    using Weight = char;
    using Activation = Activations16;
    static constexpr long kPanel = 64, kBytes = kInt8Bytes / kInt8Group, kPadK = kInt8Group;
    static constexpr long kRowTile = 1, kRowBlock = 48, kTileRows = 3;

    static void begin() {}
    static void end() {}
    static long stride(long k) { return round_up(k, kInt8Group) / kGroup; }
    static const Activation* at(const Activation* acts, long stride, long row, long k) {
        return acts + row * stride + k / kGroup;
    }
    static long steps(long rows, long k) { return (rows + kTileRows - 1) / kTileRows * stride(k); }
    static RS_ALWAYS void put(Activation* acts, long stride, long row, long k, f32x16 value) {
        Activation& to = acts[row * stride + k / kGroup];
        to.scale = larger(_mm512_reduce_max_ps(rs_abs(value).v), 1e-30f) / 127.0f;
        __m512i numbers = _mm512_cvtps_epi32(_mm512_div_ps(value.v, _mm512_set1_ps(to.scale)));
        to.start = -128 * _mm512_reduce_add_epi32(numbers);
        _mm_storeu_si128((__m128i*)to.numbers, _mm512_cvtsepi32_epi8(numbers));
    }
    static const Activation* pack(Scratch& scratch, const float* x, long rows, long k, int num_threads) {
        long row_stride = stride(k);
        Activation* acts = scratch.get<Activation>(rows * row_stride);
        if (rows * k < 65536) num_threads = 1;
        rs_parallel_for(rows, num_threads, [=](long r) {
            for (long i = 0; i < round_up(k, kInt8Group); i += kLanes) {
                long lanes = smaller(k - i, kLanes);
                put(acts, row_stride, r, i, lanes > 0 ? rs_load_n(x + r * k + i, (int)lanes) : rs_zero());
            }
        });
        return acts;
    }
    template <class Side>
    __attribute__((noinline)) static void block(const Activation* a, long stride, const Weight* w, long k, int rows, float* out,
                                                long out_stride, bool carry, Side& side) {
        for (; rows > 0; rows -= kTileRows, a += kTileRows * stride, out += kTileRows * out_stride) {
            switch (rows) {
                case 1: whole_tile<1>(a, stride, w, k, out, out_stride, carry, side); break;
                case 2: whole_tile<2>(a, stride, w, k, out, out_stride, carry, side); break;
                default: whole_tile<3>(a, stride, w, k, out, out_stride, carry, side); break;
            }
        }
    }
    static float larger(float a, float b) { return a > b ? a : b; }
};

}  // namespace

RS_EXPORT_LINEAR(linear, gated_mlp, Vnni)
