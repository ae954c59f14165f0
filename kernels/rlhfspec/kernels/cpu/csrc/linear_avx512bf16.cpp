// Linear layers by bf16 dot products (VDPBF16PS), for CPUs that have them at full rate and no AMX.
#include "linear_bf16.h"

namespace {

// kRows x 32 outputs.
template <int kRows, class Side>
RS_INLINE void dot_tile(const uint16_t* a, const uint16_t* w, long k_steps, float* out, long out_stride, bool carry,
                        Side& side) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c)
            sums[r][c] = carry ? _mm512_loadu_ps(out + r * out_stride + c * kLanes) : _mm512_setzero_ps();
    for (long s = 0; s < k_steps; ++s, a += kTile, w += 2 * kTile) {
        side.step();
        for (int pair = 0; pair < 16; ++pair) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(w + pair * 32);
            __m512bh right = (__m512bh)_mm512_loadu_si512(w + kTile + pair * 32);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                int32_t two;
                __builtin_memcpy(&two, a + r * 32 + pair * 2, sizeof two);
                __m512bh value = (__m512bh)_mm512_set1_epi32(two);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], value, left);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], value, right);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) _mm512_storeu_ps(out + r * out_stride + c * kLanes, sums[r][c]);
}

struct DotBf16 : Bf16Activations {
    static constexpr long kRowBlock = 32;

    static void begin() {}
    static void end() {}
    static long steps(long rows, long k) { return (rows + 7) / 8 * (round_up(k, 32) / 32); }
    template <class Side>
    __attribute__((noinline)) static void block(const uint16_t* a, long stride, const uint16_t* w, long k, int rows,
                                                float* out, long out_stride, bool carry, Side& side) {
        long k_steps = round_up(k, 32) / 32;
        for (int row = 0; row < rows; row += 8, out += 8 * out_stride) {
            const uint16_t* from = at(a, stride, row, 0);
            switch (rows - row) {
                case 1: dot_tile<1>(from, w, k_steps, out, out_stride, carry, side); break;
                case 2: dot_tile<2>(from, w, k_steps, out, out_stride, carry, side); break;
                case 3: dot_tile<3>(from, w, k_steps, out, out_stride, carry, side); break;
                case 4: dot_tile<4>(from, w, k_steps, out, out_stride, carry, side); break;
                case 5: dot_tile<5>(from, w, k_steps, out, out_stride, carry, side); break;
                case 6: dot_tile<6>(from, w, k_steps, out, out_stride, carry, side); break;
                case 7: dot_tile<7>(from, w, k_steps, out, out_stride, carry, side); break;
                default: dot_tile<8>(from, w, k_steps, out, out_stride, carry, side); break;
            }
        }
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear, gated_mlp, DotBf16)
