// KV on a journey: bytes of scattered slots side by side, and back. kv is [blocks, planes, block_size] runs of `run`
// bytes (a plane: keys or values of one layer), packed [n, planes] runs.
#include "pool.h"
#include "simd.h"

RS_EXPORT void RS_NAME(kv_copy)(char* kv, char* packed, const int32_t* slots, long n, long planes, long block_size,
                                long run, int is_pack, int num_threads) {
    constexpr long kPiece = 64;  // positions
    rs_parallel_for((n + kPiece - 1) / kPiece, num_threads, [=](long piece) {
        long end = (piece + 1) * kPiece < n ? (piece + 1) * kPiece : n;
        for (long i = piece * kPiece; i < end; ++i) {
            char* inside = kv + (slots[i] / block_size * planes * block_size + slots[i] % block_size) * run;
            char* outside = packed + i * planes * run;
            for (long plane = 0; plane < planes; ++plane, inside += block_size * run, outside += run) {
                if (is_pack) __builtin_memcpy(outside, inside, (size_t)run);
                else __builtin_memcpy(inside, outside, (size_t)run);
            }
        }
    });
}
