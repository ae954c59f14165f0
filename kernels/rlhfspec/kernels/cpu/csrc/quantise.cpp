// Packed weights into 8 bits (int8.h).
#include "int8.h"

#include "pool.h"
#include "simd.h"

namespace {

enum Layout { kFp32, kBf16, kTiles };  // as in pack.cpp

// 16 outputs of one k, from a group of 16 packed outputs.
f32x16 weights_at(const void* packed, int layout, long group, long k, long num_k) {
    if (layout == kFp32)
        return rs_load((const float*)packed + (group / 4 * num_k + k) * 64 + group % 4 * kLanes);
    f32x16 first, second;
    if (layout == kBf16) {  // groups in pairs
        rs_load_bf16_pairs((const uint16_t*)packed + (group / 4 * num_k + k) * 64 + group % 4 / 2 * 32, &first,
                           &second);
        return group % 2 ? second : first;
    }
    long steps = (num_k + 31) / 32;  // k in pairs
    rs_load_bf16_pairs((const uint16_t*)packed + ((group / 2 * steps + k / 32) * 2 + group % 2) * 512 + k % 32 / 2 * 32,
                       &first, &second);
    return k % 2 ? second : first;
}

// A group of k of 16 outputs: scales that make the largest weight 127, and the nearest whole numbers.
void quantise_group(const f32x16* weights, uint16_t* scales, char* out, bool fours) {
    f32x16 largest = rs_zero();
    for (long k = 0; k < kInt8Group; ++k) largest = rs_max(largest, rs_abs(weights[k]));
    rs_store_bf16(scales, rs_max(rs_mul(largest, rs_set1(1.0f / 126.5f)), rs_set1(1e-30f)));  // rounded, at least / 127
    f32x16 inverse = rs_div(rs_set1(1.0f), rs_load_bf16(scales));
    for (long k = 0; k < kInt8Group; ++k) {
        alignas(64) float numbers[kLanes];
        rs_store(numbers, rs_round(rs_mul(weights[k], inverse)));
        for (long lane = 0; lane < kLanes; ++lane) {
            if (fours) out[k / 4 * 256 + lane * 4 + k % 4] = (char)((int)numbers[lane] + 128);
            else out[k * 64 + lane] = (char)numbers[lane];
        }
    }
}

}  // namespace

// packed: a matrix of padded outputs and k inputs, gate and up as one
RS_EXPORT void RS_NAME(quantise)(const void* packed, int layout, char* out, long padded_outputs, long k, int fours,
                                 int num_threads) {
    long num_groups = (k + kInt8Group - 1) / kInt8Group;
    rs_parallel_for(padded_outputs / 64, num_threads, [=](long panel) {
        for (long group = 0; group < num_groups; ++group) {
            char* to = out + (panel * num_groups + group) * kInt8Bytes;
            for (long vector = 0; vector < 4; ++vector) {
                f32x16 weights[kInt8Group];
                for (long i = 0; i < kInt8Group; ++i) {
                    long at = group * kInt8Group + i;
                    weights[i] = at < k ? weights_at(packed, layout, panel * 4 + vector, at, k) : rs_zero();
                }
                quantise_group(weights, (uint16_t*)to + vector * kLanes, to + 128 + vector * kLanes * (fours ? 4 : 1), fours);
            }
        }
    });
}
