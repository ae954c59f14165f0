// What a call of tree attention is given: by Python, by a whole decoder, by a draft's levels.
#pragma once

#include "simd.h"

namespace {

// What one forward pass shares between its layers; mirrors _BatchStruct in tree_attention.py.
struct Batch {
    const int32_t* slots;         // [rows] where each row's key and value go; -1: nowhere
    const int32_t* table_rows;    // [rows]
    const int32_t* context_lens;  // [rows]
    const int32_t* extra;         // [rows, extra_width], -1 padded
    const int32_t* slot_table;    // [table_height, table_width], rows table_stride apart
    int32_t* extra_lens;          // [rows], filled by the plan
    int32_t* groups;              // [rows + 1], filled by the plan: first row of every work item
    int64_t num_rows, extra_width, table_height, table_width, table_stride;
    int64_t num_groups, longest, num_keys, highest_slot;  // filled by the plan
    int64_t problem, problem_row;                         // filled by the plan; 0: all is well
};

struct Strided {
    const float* data;
    int64_t row, head;

    const float* at(int64_t i, int64_t h) const { return data + i * row + h * head; }
};

// One layer of the cache, and what the model asks of it; mirrors CALL in tree_attention.py. Strides count elements.
struct AttentionCall {
    const Batch* batch;
    Strided query, key, value;
    void* kv;            // first byte of this layer in block 0
    int64_t kv_is_bf16;  // else float32
    int64_t block_stride, plane_stride, block_size;
    int64_t num_heads, num_kv_heads, dim;
    int64_t window;      // 0: none
    int64_t chunk;       // 0: none
    int64_t split;       // positions [i split, (i + 1) split) are a softmax of their own
    const float* sinks;  // null: none
    float* out;          // [rows, heads, dim]
    int64_t threads;
    float scale, softcap;  // softcap 0: none
};

}  // namespace

// Checks every index of a forward pass and groups its rows into work items.
RS_EXPORT void RS_NAME(tree_attention_plan)(Batch* batch);

// Writes the rows' keys and values, then attends.
RS_EXPORT void RS_NAME(tree_attention)(const AttentionCall* call);
