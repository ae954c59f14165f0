// Linear layers by bf16 dot products (VDPBF16PS), for CPUs that have them at full rate and no AMX.
#include "linear_bf16.h"

namespace {

// kRows x 64 outputs; 24 accumulators of 32 registers at most.
template <int kRows>
RS_INLINE void dot_tile(const uint16_t* a, const uint16_t* w, long k_steps, float* out, long out_stride,
                        Prefetch& next) {
    __m512 sums[kRows][4];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_setzero_ps();
    for (long s = 0; s < k_steps; ++s, a += kTile, w += 4 * kTile) {
        next.step();
        for (int pair = 0; pair < 16; ++pair) {
            __m512bh weights[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) weights[c] = (__m512bh)_mm512_loadu_si512(w + c * kTile + pair * 32);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                int32_t two;
                __builtin_memcpy(&two, a + r * 32 + pair * 2, sizeof two);
                __m512bh value = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], value, weights[c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) _mm512_storeu_ps(out + r * out_stride + c * kLanes, sums[r][c]);
}

struct DotBf16 : Bf16Activations {
    static constexpr long kRowBlock = 48;

    static void begin() {}
    static void end() {}
    static long steps(long rows, long k) {  // a row tile of 16 goes as 6 + 6 + 4 rows
        return (rows / 16 * 3 + (rows % 16 + 5) / 6) * (round_up(k, 32) / 32);
    }
    __attribute__((noinline)) static void block(const uint16_t* a, long stride, const uint16_t* w, long k, int rows,
                                                float* out, long out_stride, Prefetch& next) {
        long k_steps = round_up(k, 32) / 32;
        for (int row = 0; row < rows;) {
            int in_tile = 16 - row % 16, left = rows - row, tile = in_tile < 6 ? in_tile : 6;
            tile = left < tile ? left : tile;
            const uint16_t* from = at(a, stride, row, 0);
            float* to = out + row * out_stride;
            switch (tile) {
                case 1: dot_tile<1>(from, w, k_steps, to, out_stride, next); break;
                case 2: dot_tile<2>(from, w, k_steps, to, out_stride, next); break;
                case 3: dot_tile<3>(from, w, k_steps, to, out_stride, next); break;
                case 4: dot_tile<4>(from, w, k_steps, to, out_stride, next); break;
                case 5: dot_tile<5>(from, w, k_steps, to, out_stride, next); break;
                case 6: dot_tile<6>(from, w, k_steps, to, out_stride, next); break;
            }
            row += tile;
        }
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear, gated_mlp, DotBf16)
