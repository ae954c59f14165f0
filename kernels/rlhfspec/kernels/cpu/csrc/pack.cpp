// Weights into panels of 64 outputs. Each source is a [outputs, inputs] matrix of bf16 or fp32, already rounded.
#include "simd.h"

namespace {

constexpr long kPanel = 64, kTile = 512;

struct Panels {
    long n, k;    // outputs and inputs of the source
    long every;   // a packed panel is the source's panel / every (gate and up alternate: every = 2)
    long offset;  // ... in packed panels of this remainder
};

template <class T, class Place>
void pack(const T* source, T* packed, Panels shape, long padded_k, int num_threads, Place place) {
    long panels = (shape.n + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (long p = 0; p < panels; ++p) {
        T* panel = packed + (p * shape.every + shape.offset) * padded_k * kPanel;
        for (long c = 0; c < kPanel; ++c) {
            long n = p * kPanel + c;
            const T* row = source + n * shape.k;
            for (long k = 0; k < padded_k; ++k) panel[place(k, c)] = n < shape.n && k < shape.k ? row[k] : T(0);
        }
    }
}

}  // namespace

// [panel][k][64] fp32
RS_EXPORT void RS_NAME(pack_fp32)(const float* source, float* packed, long n, long k, long every, long offset,
                                  int num_threads) {
    pack(source, packed, {n, k, every, offset}, k, num_threads, [](long i, long c) { return i * kPanel + c; });
}

// [panel][k][64] bf16, columns c and c + 16 of each 32 side by side
RS_EXPORT void RS_NAME(pack_bf16)(const uint16_t* source, uint16_t* packed, long n, long k, long every, long offset,
                                  int num_threads) {
    pack(source, packed, {n, k, every, offset}, k, num_threads,
         [](long i, long c) { return i * kPanel + c / 32 * 32 + c % 16 * 2 + c % 32 / 16; });
}

// [panel][k / 32][4 column groups][16 pairs of k][16 columns][2] bf16, k padded with zeros
RS_EXPORT void RS_NAME(pack_tiles)(const uint16_t* source, uint16_t* packed, long n, long k, long every, long offset,
                                   int num_threads) {
    pack(source, packed, {n, k, every, offset}, (k + 31) / 32 * 32, num_threads, [](long i, long c) {
        return i / 32 * 4 * kTile + c / 16 * kTile + i % 32 / 2 * 32 + c % 16 * 2 + i % 2;
    });
}
