// The building blocks of simd.h by themselves, for the tests: every kernel rests on them.
#include "simd.h"

// out[i] = e^x[i]; count is a multiple of 16, as below.
RS_EXPORT void RS_NAME(probe_exp)(const float* x, float* out, long count) {
    for (long i = 0; i < count; i += kLanes) rs_store(out + i, rs_exp(rs_load(x + i)));
}

RS_EXPORT void RS_NAME(probe_bf16)(const float* x, uint16_t* vector, uint16_t* scalar, float* back, long count) {
    for (long i = 0; i < count; i += kLanes) {
        rs_store_bf16(vector + i, rs_load(x + i));
        rs_store(back + i, rs_load_bf16(vector + i));
        for (long j = i; j < i + kLanes; ++j) scalar[j] = rs_bf16_of_float(x[j]);
    }
}

// Per 16: the sum and the largest.
RS_EXPORT void RS_NAME(probe_reduce)(const float* x, float* sums, float* largest, long count) {
    for (long i = 0; i < count; i += kLanes) {
        sums[i / kLanes] = rs_hsum(rs_load(x + i));
        largest[i / kLanes] = rs_hmax(rs_load(x + i));
    }
}
