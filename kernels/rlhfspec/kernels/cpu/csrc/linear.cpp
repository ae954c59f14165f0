// Linear layers by fused multiply-add: fp32 activations, weights stored as fp32, bf16 or 8 bits. Every CPU with AVX2 has
// it, and AVX2 and AVX-512 give the same bits.
#include "gated_mlp.h"
#include "int8.h"

namespace {

constexpr long kColumns = 64;  // of a panel
constexpr long kStep = 16;     // k between two calls of side.step()
constexpr long kUnpack = 64;   // k unpacked at once: 16 KB

// How weights are stored: kBytes a k of a panel, and a reader of kVectors of its vectors from `part` on, k after k.
// `step` is called before every kStep of k.
struct Fp32 {
    static constexpr long kBytes = 4 * kColumns, kPadK = 1;
    template <int kVectors>
    struct Reader {
        const float* at;
        RS_ALWAYS Reader(const void* w, int part) : at((const float*)w + part * kLanes) {}
        RS_ALWAYS void step() {}
        RS_ALWAYS void read(f32x16* weights) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) weights[v] = rs_load(at + v * kLanes);
            at += kColumns;
        }
    };
};

// bf16 panels hold columns c and c + 16 side by side, so that a shift and a mask unpack them.
struct Bf16 {
    static constexpr long kBytes = 2 * kColumns, kPadK = 1;
    template <int kVectors>
    struct Reader {
        const uint16_t* at;
        RS_ALWAYS Reader(const void* w, int part) : at((const uint16_t*)w + part * kLanes) {}
        RS_ALWAYS void step() {}
        RS_ALWAYS void read(f32x16* weights) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v += 2) rs_load_bf16_pairs(at + v * kLanes, weights + v, weights + v + 1);
            at += kColumns;
        }
    };
};

// 8 bits (int8.h): a weight is its whole number times the scale of its group.
struct Int8 {
    static constexpr long kBytes = kInt8Bytes / kInt8Group, kPadK = kInt8Group;
    template <int kVectors>
    struct Reader {
        const char* at;
        const int part;
        long until_next = 0;  // of group, in steps
        f32x16 scales[kVectors];
        RS_ALWAYS Reader(const void* w, int part) : at((const char*)w), part(part) {}
        RS_ALWAYS void step() {
            if (until_next == 0) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) scales[v] = rs_load_bf16((const uint16_t*)at + (part + v) * kLanes);
                at += 2 * kColumns;
                until_next = kInt8Group / kStep;
            }
            --until_next;
        }
        RS_ALWAYS void read(f32x16* weights) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                weights[v] = rs_mul(rs_load_int8((const int8_t*)at + (part + v) * kLanes), scales[v]);
            at += kColumns;
        }
    };
};

#ifdef __AVX512F__
constexpr int kMaxTileRows = 6, kTileVectors = 4;  // 24 accumulators of 32 registers
#else
constexpr int kMaxTileRows = 3, kTileVectors = 2;  // 12 accumulators of 16 registers
#endif

template <class Stored, int kRows, class Side>
RS_INLINE void fma_tile(const float* x, long stride, const void* w, long k, float* out, long out_stride, bool carry, Side& side) {
    for (int part = 0; part < 4; part += kTileVectors) {
        f32x16 sums[kRows][kTileVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v)
                sums[r][v] = carry ? rs_load(out + r * out_stride + (part + v) * kLanes) : rs_zero();
        typename Stored::template Reader<kTileVectors> reader(w, part);
        for (long i = 0; i < k;) {
            side.step();
            reader.step();
            for (long end = smaller(k, i + kStep); i < end; ++i) {
                f32x16 weights[kTileVectors];
                reader.read(weights);
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
RS_INLINE void fma_rows(const float* x, long stride, const void* w, long k, int rows, float* out, long out_stride, bool carry, Side& side) {
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
    using Weight = char;
    using Activation = float;
    static constexpr long kPanel = kColumns, kBytes = Stored::kBytes, kPadK = Stored::kPadK;
    static constexpr long kRowTile = 1, kRowBlock = 48;

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
        if (kBytes == Fp32::kBytes || rows <= 2 * kMaxTileRows) {
            fma_rows<Stored>(x, stride, w, k, rows, out, out_stride, carry, side);
            return;
        }
        alignas(64) float unpacked[kUnpack * kColumns];  // many rows: unpack the weights once for all of them
        for (long start = 0; start < k; start += kUnpack) {
            long count = smaller(kUnpack, k - start);
            unpack(w + start * kBytes, unpacked, count);
            fma_rows<Fp32>(x + start, stride, unpacked, count, rows, out, out_stride, carry || start > 0, side);
        }
    }
    static RS_ALWAYS void unpack(const Weight* w, float* unpacked, long k) {
        typename Stored::template Reader<4> reader(w, 0);
        for (long i = 0; i < k; ++i, unpacked += kColumns) {
            if (i % kStep == 0) reader.step();
            f32x16 weights[4];
            reader.read(weights);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) rs_store(unpacked + v * kLanes, weights[v]);
        }
    }
};

}  // namespace

RS_EXPORT_LINEAR(linear_bf16, gated_mlp_bf16, Fma<Bf16>)
RS_EXPORT_LINEAR(linear_fp32, gated_mlp_fp32, Fma<Fp32>)
RS_EXPORT_LINEAR(linear_int8, gated_mlp_int8, Fma<Int8>)
