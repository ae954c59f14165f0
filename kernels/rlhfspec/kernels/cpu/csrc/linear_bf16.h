// Activations rounded to bf16, for AMX tiles and for bf16 dot products: both read the same layout.
//
// A tile is 16 rows x 32 k, 1 KB: activations [row tile][k step][16 rows][32 k], weights
// [panel][k step][2 column groups][16 pairs of k][16 columns][2].
#pragma once

#include "gated_mlp.h"

namespace {

constexpr long kTile = 512;  // elements

struct Bf16Activations {
    using Weight = uint16_t;
    using Activation = uint16_t;
    static constexpr long kPanel = 32, kBytes = 64, kRowTile = 16, kPadK = 32;

    static long stride(long k) { return round_up(k, 32) * 16; }  // from one row tile to the next
    static uint16_t* at(uint16_t* acts, long stride, long row, long k) {
        return acts + row / 16 * stride + k / 32 * kTile + row % 16 * 32 + k % 32;
    }
    static const uint16_t* at(const uint16_t* acts, long stride, long row, long k) {
        return at((uint16_t*)acts, stride, row, k);
    }
    // 16 activations, rounded to nearest even; subnormals become zero, as they do in the products.
    static RS_ALWAYS void put(uint16_t* acts, long stride, long row, long k, f32x16 value) {
        _mm256_storeu_si256((__m256i*)at(acts, stride, row, k), (__m256i)_mm512_cvtneps_pbh(value.v));
    }
    static f32x16 load_some(const float* x, long lanes) {
        return lanes >= kLanes ? rs_load(x) : lanes > 0 ? rs_load_n(x, (int)lanes) : rs_zero();
    }

    // Rows beyond the last are left as they are: a row's sums never touch another's.
    static const uint16_t* pack(Scratch& scratch, const float* x, long rows, long k, int num_threads) {
        long row_stride = stride(k);
        uint16_t* acts = scratch.get<uint16_t>(round_up(rows, 16) / 16 * row_stride);
        if (rows * k < 65536) num_threads = 1;
        rs_parallel_for(rows, num_threads, [=](long r) {
            const float* from = x + r * k;
            for (long i = 0; i < round_up(k, 32); i += kLanes) put(acts, row_stride, r, i, load_some(from + i, k - i));
        });
        return acts;
    }
};

}  // namespace
