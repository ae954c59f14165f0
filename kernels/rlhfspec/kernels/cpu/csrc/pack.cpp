// Weights into panels. Each source is a [outputs, inputs] matrix of bf16 or fp32, already rounded.
#include "pool.h"
#include "simd.h"

namespace {

constexpr long kGroup = 16, kBlock = 64;

struct Source {
    long n, k;    // outputs and inputs
    long every;   // of the packed groups of 16 outputs, every so many are this source's (gate and up: every second)
    long offset;  // ... beginning with this one
};

// place(column, k): where an output's k-th weight goes; column counts packed outputs.
template <class T, class Place>
void pack(const T* source, T* packed, Source shape, long padded_k, int num_threads, Place place) {
    long padded_n = (shape.n + kBlock - 1) / kBlock * kBlock;
    rs_parallel_for(padded_n / kBlock, num_threads, [=](long block) {
        for (long n = block * kBlock; n < (block + 1) * kBlock; ++n) {
            long column = (n / kGroup * shape.every + shape.offset) * kGroup + n % kGroup;
            const T* row = source + n * shape.k;
            for (long k = 0; k < padded_k; ++k) packed[place(column, k)] = n < shape.n && k < shape.k ? row[k] : T(0);
        }
    });
}

}  // namespace

// [panel of 64][k][64] fp32
RS_EXPORT void RS_NAME(pack_fp32)(const float* source, float* packed, long n, long k, long every, long offset,
                                  int num_threads) {
    pack(source, packed, {n, k, every, offset}, k, num_threads,
         [k](long c, long i) { return (c / 64 * k + i) * 64 + c % 64; });
}

// [panel of 64][k][64] bf16, columns c and c + 16 of each 32 side by side
RS_EXPORT void RS_NAME(pack_bf16)(const uint16_t* source, uint16_t* packed, long n, long k, long every, long offset,
                                  int num_threads) {
    pack(source, packed, {n, k, every, offset}, k, num_threads,
         [k](long c, long i) { return (c / 64 * k + i) * 64 + c % 64 / 32 * 32 + c % 16 * 2 + c % 32 / 16; });
}

// [panel of 32][k / 32][2 column groups][16 pairs of k][16 columns][2] bf16, k padded with zeros
RS_EXPORT void RS_NAME(pack_tiles)(const uint16_t* source, uint16_t* packed, long n, long k, long every, long offset,
                                   int num_threads) {
    long steps = (k + 31) / 32;
    pack(source, packed, {n, k, every, offset}, steps * 32, num_threads, [steps](long c, long i) {
        return ((c / 32 * steps + i / 32) * 2 + c % 32 / 16) * 512 + i % 32 / 2 * 32 + c % 16 * 2 + i % 2;
    });
}
