// A whole decoder in one call.
#pragma once

#include "attention.h"

// tokens, positions [rows]; wanted [num_wanted] rows whose logits are written to `logits` [num_wanted, vocab].
RS_EXPORT void RS_NAME(decoder_forward)(const void* decoder, const Batch* batch, const long* tokens,
                                        const long* positions, long rows, const long* wanted, long num_wanted,
                                        float* logits, float* tapped, int threads);
