// Merges splits of attention that tree_attention left unmerged, in one process or in several, to the bits of one call.
#include "attention_math.h"

namespace {

// Splits of rows, as tree_attention left them; mirrors MERGE in attention_splits.py.
struct MergeCall {
    const float* partials;  // [rows, heads, splits, 2 + dim]: largest score, sum of weights, weighted sum of values
    const float* sinks;     // null: none
    float* out;             // [rows, heads, dim]
    int64_t num_rows, num_heads, num_splits, dim;
};

}  // namespace

RS_EXPORT void RS_NAME(merge_partials)(const MergeCall* call) {
    const int64_t dim = call->dim;
    for (int64_t place = 0; place < call->num_rows * call->num_heads; place++) {
        const float* split = call->partials + place * call->num_splits * (2 + dim);
        float* out = call->out + place * dim;
        Weights weights = Weights::none();
        for (int64_t i = 0; i < call->num_splits; i++, split += 2 + dim)
            merge(weights, out, {split[0], split[1]}, split + 2, dim);
        const float* sink = call->sinks == nullptr ? nullptr : call->sinks + place % call->num_heads;
        finish_softmax(weights, out, sink, dim, out);
    }
}

// What Python fills in must be as long as what is read here.
RS_EXPORT void RS_NAME(attention_splits_sizes)(long* sizes) { sizes[0] = sizeof(MergeCall); }
