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

// 16 rows x 32 outputs. Tiles 0-1: sums, 4: activations, 6-7: weights.
template <class Side>
RS_INLINE void one_by_two(const uint16_t* a, const uint16_t* w, long steps, float* out, long out_stride, bool carry,
                          Side& side) {
    long bytes = out_stride * (long)sizeof(float);
    if (carry) {
        _tile_loadd(0, out, bytes);
        _tile_loadd(1, out + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (long s = 0; s < steps; ++s, a += kTile, w += 2 * kTile) {
        side.step();
        _tile_loadd(4, a, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
}

// 32 rows x 32 outputs. Tiles 0-3: sums, 4-5: activations, 6-7: weights.
template <class Side>
RS_INLINE void two_by_two(const uint16_t* a, long stride, const uint16_t* w, long steps, float* out, long out_stride,
                          bool carry, Side& side) {
    long bytes = out_stride * (long)sizeof(float);
    float* below = out + 16 * out_stride;
    if (carry) {
        _tile_loadd(0, out, bytes);
        _tile_loadd(1, out + 16, bytes);
        _tile_loadd(2, below, bytes);
        _tile_loadd(3, below + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long s = 0; s < steps; ++s, a += kTile, w += 2 * kTile) {
        side.step();
        _tile_loadd(4, a, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + 16, bytes);
}

struct Amx : Bf16Activations {
    static constexpr long kRowBlock = 32;

    // Not once per thread: other libraries in this process use the tiles, too.
    static void begin() {
        TileConfig config;
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }
    static long steps(long rows, long k) { return round_up(rows, 32) / 32 * (round_up(k, 32) / 32); }
    template <class Side>
    __attribute__((noinline)) static void block(const uint16_t* a, long stride, const uint16_t* w, long k, int rows,
                                                float* out, long out_stride, bool carry, Side& side) {
        long k_steps = round_up(k, 32) / 32;
        if (rows > 16) two_by_two(a, stride, w, k_steps, out, out_stride, carry, side);
        else one_by_two(a, w, k_steps, out, out_stride, carry, side);
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear, gated_mlp, Amx)
