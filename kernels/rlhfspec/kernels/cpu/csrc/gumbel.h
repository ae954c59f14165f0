#pragma once

#include "simd.h"

// tokens, scores [rows, k], the best first, of logits [rows, vocab_size] at `stride`. Returns 0, or, having done nothing,
// which parameter has a value out of range: 1 temperature.
RS_EXPORT int RS_NAME(gumbel_candidates)(const float* logits, long stride, long rows, long vocab_size, long k,
                                         const uint64_t* seeds, const int32_t* positions, const float* temperatures,
                                         int32_t* tokens, float* scores, int num_threads);
