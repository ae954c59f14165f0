// Linear layers on AMX tiles: activations rounded to bf16 (nearest even) here, bf16 weights, fp32 sums.
//
// An output's chain is TDPBF16PS over its 32-k steps in ascending order. It does not depend on where in a tile its row
// stands, nor on how many rows or columns are multiplied together.
#include "linear_bf16.h"

namespace {

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

RS_INLINE void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// 16 rows x 64 outputs. Tiles 0-3: sums, 4: activations, 5-7: weights.
RS_INLINE void one_by_four(const uint16_t* a, const uint16_t* w, long steps, float* out, long out_bytes,
                           Prefetch& next) {
    zero_tiles();
    for (long s = 0; s < steps; ++s, a += kTile, w += 4 * kTile) {
        next.step();
        _tile_loadd(4, a, 64);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + kTile, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * kTile, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * kTile, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 32, out_bytes);
    _tile_stored(3, out + 48, out_bytes);
}

// 32 rows x 32 outputs. Tiles 0-3: sums, 4-5: activations, 6-7: weights.
RS_INLINE void two_by_two(const uint16_t* a, long stride, const uint16_t* w, long steps, float* out, long out_stride,
                          Prefetch& next) {
    zero_tiles();
    for (long s = 0; s < steps; ++s, a += kTile, w += 4 * kTile) {
        next.step();
        _tile_loadd(4, a, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    long bytes = out_stride * (long)sizeof(float);
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
    _tile_stored(2, out + 16 * out_stride, bytes);
    _tile_stored(3, out + 16 * out_stride + 16, bytes);
}

struct Amx : Bf16Activations {
    static constexpr long kRowBlock = 64;

    // Not once per thread: other libraries in this process use the tiles, too.
    static void begin() {
        TileConfig config;
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }
    static long steps(long rows, long k) { return round_up(rows, 16) / 16 * (round_up(k, 32) / 32); }
    __attribute__((noinline)) static void block(const uint16_t* a, long stride, const uint16_t* w, long k, int rows,
                                                float* out, long out_stride, Prefetch& next) {
        long k_steps = round_up(k, 32) / 32, tiles = (rows + 15) / 16, pairs = tiles / 2;
        for (int half = 0; half < 2 && pairs; ++half)
            for (long pair = 0; pair < pairs; ++pair)
                two_by_two(a + 2 * pair * stride, stride, w + 2 * half * kTile, k_steps,
                           out + 32 * pair * out_stride + 32 * half, out_stride, next);
        if (tiles % 2)
            one_by_four(a + 2 * pairs * stride, w, k_steps, out + 32 * pairs * out_stride,
                        out_stride * (long)sizeof(float), next);
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear, gated_mlp, Amx)
