#pragma once

#include "simd.h"

// out[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * (weight + add_one)
RS_EXPORT void RS_NAME(rms_norm)(const float* x, const float* weight, float* out, long num_rows, long width, float eps,
                                 int add_one, int num_threads);
