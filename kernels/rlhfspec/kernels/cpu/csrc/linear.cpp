// Linear layers by fused multiply-add: fp32 activations, weights stored as bf16 or fp32. Every CPU with AVX2 has it,
// and AVX2 and AVX-512 give the same bits.
#include "gated_mlp.h"

namespace {

// 64 outputs of one k. bf16 panels hold columns c and c + 16 side by side, so that a shift and a mask unpack them.
struct Fp32 {
    using Type = float;
    static RS_ALWAYS void load(const float* w, f32x16* v) {
        v[0] = rs_load(w);
        v[1] = rs_load(w + 16);
    }
};
struct Bf16 {
    using Type = uint16_t;
    static RS_ALWAYS void load(const uint16_t* w, f32x16* v) { rs_load_bf16_pairs(w, v, v + 1); }
};

constexpr long kColumns = 64;  // of a panel
constexpr long kStep = 16;     // k between two calls of side.step()
constexpr long kUnpack = 64;   // k unpacked at once: 16 KB

#ifdef __AVX512F__
constexpr int kMaxTileRows = 6, kTileVectors = 4;  // 24 accumulators of 32 registers
#else
constexpr int kMaxTileRows = 3, kTileVectors = 2;  // 12 accumulators of 16 registers
#endif

template <class Stored, int kRows, class Side>
RS_INLINE void fma_tile(const float* x, long stride, const typename Stored::Type* w, long k, float* out,
                        long out_stride, bool carry, Side& side) {
    for (int part = 0; part < 4; part += kTileVectors) {
        f32x16 sums[kRows][kTileVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v)
                sums[r][v] = carry ? rs_load(out + r * out_stride + (part + v) * kLanes) : rs_zero();
        const typename Stored::Type* column = w + part * kLanes;
        for (long i = 0; i < k;) {
            side.step();
            for (long end = smaller(k, i + kStep); i < end; ++i, column += kColumns) {
                f32x16 weights[kTileVectors];
#pragma GCC unroll 2
                for (int v = 0; v < kTileVectors; v += 2) Stored::load(column + v * kLanes, weights + v);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    f32x16 value = rs_set1(x[r * stride + i]);
#pragma GCC unroll 4
                    for (int v = 0; v < kTileVectors; ++v) sums[r][v] = rs_fma(value, weights[v], sums[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v) rs_store(out + r * out_stride + (part + v) * kLanes, sums[r][v]);
    }
}

template <class Stored, class Side>
RS_INLINE void fma_rows(const float* x, long stride, const typename Stored::Type* w, long k, int rows, float* out,
                        long out_stride, bool carry, Side& side) {
    while (rows > 0) {
        int tile = rows < kMaxTileRows ? rows : kMaxTileRows;
        switch (tile) {
            case 1: fma_tile<Stored, 1>(x, stride, w, k, out, out_stride, carry, side); break;
            case 2: fma_tile<Stored, 2>(x, stride, w, k, out, out_stride, carry, side); break;
            case 3: fma_tile<Stored, 3>(x, stride, w, k, out, out_stride, carry, side); break;
#ifdef __AVX512F__
            case 4: fma_tile<Stored, 4>(x, stride, w, k, out, out_stride, carry, side); break;
            case 5: fma_tile<Stored, 5>(x, stride, w, k, out, out_stride, carry, side); break;
            case 6: fma_tile<Stored, 6>(x, stride, w, k, out, out_stride, carry, side); break;
#endif
        }
        rows -= tile, x += tile * stride, out += tile * out_stride;
    }
}

template <class Stored>
struct Fma {
    using Weight = typename Stored::Type;
    using Activation = float;
    static constexpr long kPanel = kColumns, kRowTile = 1, kRowBlock = 48, kPadK = 1;

    static void begin() {}
    static void end() {}
    static long stride(long k) { return k; }
    static const float* at(const float* acts, long stride, long row, long k) { return acts + row * stride + k; }
    static const float* pack(Scratch&, const float* x, long, long, int) { return x; }
    static long steps(long rows, long k) {
        return (rows + kMaxTileRows - 1) / kMaxTileRows * (4 / kTileVectors) * ((k + kStep - 1) / kStep);
    }
    static RS_ALWAYS void put(float* acts, long stride, long row, long k, f32x16 value) {
        rs_store(acts + row * stride + k, value);
    }
    template <class Side>
    __attribute__((noinline)) static void block(const float* x, long stride, const Weight* w, long k, int rows,
                                                float* out, long out_stride, bool carry, Side& side) {
        if (sizeof(Weight) == sizeof(float) || rows <= 2 * kMaxTileRows) {
            fma_rows<Stored>(x, stride, w, k, rows, out, out_stride, carry, side);
            return;
        }
        alignas(64) float unpacked[kUnpack * kColumns];  // many rows: unpack the weights once for all of them
        for (long start = 0; start < k; start += kUnpack) {
            long count = smaller(kUnpack, k - start);
            unpack(w + start * kColumns, unpacked, count);
            fma_rows<Fp32>(x + start, stride, unpacked, count, rows, out, out_stride, carry || start > 0, side);
        }
    }
    static RS_ALWAYS void unpack(const Weight* w, float* unpacked, long k) {
        for (long i = 0; i < k * kColumns; i += 2 * kLanes) {
            f32x16 v[2];
            Stored::load(w + i, v);
            rs_store(unpacked + i, v[0]);
            rs_store(unpacked + i + kLanes, v[1]);
        }
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear_bf16, gated_mlp_bf16, Fma<Bf16>)
RS_EXPORT_LINEAR(linear_fp32, gated_mlp_fp32, Fma<Fp32>)
