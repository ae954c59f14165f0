// Activations rounded to bf16, for AMX tiles and for bf16 dot products: both read the same layout.
//
// A tile is 16 rows x 32 k, 1 KB: activations [row tile][k step][16 rows][32 k], weights
// [panel][k step][4 column groups][16 pairs of k][16 columns][2].
#pragma once

#include "linear.h"

namespace {

constexpr long kTile = 512;  // elements

struct Bf16Activations {
    using Weight = uint16_t;
    using Activation = uint16_t;
    static constexpr long kRowTile = 16, kPadK = 32;

    static long stride(long k) { return round_up(k, 32) * 16; }  // from one row tile to the next
    static uint16_t* at(uint16_t* acts, long stride, long row, long k) {
        return acts + row / 16 * stride + k / 32 * kTile + row % 16 * 32 + k % 32;
    }
    static const uint16_t* at(const uint16_t* acts, long stride, long row, long k) {
        return at((uint16_t*)acts, stride, row, k);
    }
    static void put(uint16_t* acts, long stride, long row, long k, f32x16 value) {
        rs_store_bf16(at(acts, stride, row, k), value);
    }

    // Rows beyond the last are left as they are: a row's sums never touch another's.
    static const uint16_t* pack(Scratch& scratch, const float* x, long rows, long k, int num_threads) {
        long row_stride = stride(k);
        uint16_t* acts = scratch.get<uint16_t>(round_up(rows, 16) / 16 * row_stride);
        if (rows * k < 65536) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (long r = 0; r < rows; ++r) {
            const float* from = x + r * k;
            for (long i = 0; i < round_up(k, 32); i += kLanes) {
                int lanes = (int)(k - i);
                f32x16 value = lanes >= kLanes ? rs_load(from + i) : lanes > 0 ? rs_load_n(from + i, lanes) : rs_zero();
                put(acts, row_stride, r, i, value);
            }
        }
        return acts;
    }
};

}  // namespace
