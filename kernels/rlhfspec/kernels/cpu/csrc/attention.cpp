// Paged tree attention on the CPU: one loop per (query row, head) over its slots in ascending position.
//
// The promise: the bits of an output row depend on its query, its keys and values in order of position, and nothing
// else: not on other rows, the slots' places, threads, the instruction set, or whether a key came from the table or
// from `extra`. attention_math.h says how. Query rows of one sequence, and query heads of one kv head, share each key.
//
// Positions come in splits of a fixed length, each with a softmax of its own.
#include <stdlib.h>

#include "attention.h"
#include "attention_math.h"
#include "pool.h"

namespace {

constexpr int kTile = 4;       // (query row, head) pairs that share each key while it is in a register
constexpr int kMaxLanes = 32;  // and those that share it while it is in the second-level cache
constexpr int64_t kBlockBytes = 131072;  // of keys, then of values, that stay there
constexpr int kPad = 16;       // room behind every list of positions, for whole vectors
constexpr int kMaxRows = 16;   // query rows of one work item; more would leave threads without work
constexpr int kKeysAhead = 24, kValuesAhead = 16;  // how far a tile fetches ahead of itself
constexpr int64_t kSmall = 1 << 18;  // multiply-adds below which a second thread costs more than it brings
using Layer = AttentionCall;

RS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
RS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- memory of one thread ------------------------------------------------------------------------------------------

struct Scratch {
    float* scores;         // [kMaxLanes][row_length], of one split
    float* sums;           // [kMaxLanes][padded dim], of one split
    float* merged;         // [kMaxLanes][padded dim], of all splits before
    float* queries;        // [kMaxLanes][padded dim]
    int64_t* context;      // [longest + kPad] element offset of each context position
    int64_t* extra;        // [longest + kPad] and of each extra
    int64_t row_length, padded_dim;
};

Scratch scratch_for(int64_t longest, int64_t split, int64_t dim) {
    static thread_local char* memory = nullptr;
    static thread_local size_t capacity = 0;
    Scratch s;
    s.row_length = (min64(longest, split) + 2 * kPad + 15) / 16 * 16;
    s.padded_dim = (dim + 15) / 16 * 16;
    const size_t floats = kMaxLanes * (s.row_length + 3 * s.padded_dim);
    const size_t bytes = floats * sizeof(float) + 2 * (longest + kPad) * sizeof(int64_t);
    if (bytes > capacity) {
        free(memory);
        capacity = (2 * bytes + 63) / 64 * 64;
        memory = (char*)aligned_alloc(64, capacity);
        if (memory == nullptr) abort();
    }
    s.scores = (float*)memory;
    s.sums = s.scores + kMaxLanes * s.row_length;
    s.merged = s.sums + kMaxLanes * s.padded_dim;
    s.queries = s.merged + kMaxLanes * s.padded_dim;
    s.context = (int64_t*)(memory + floats * sizeof(float));
    s.extra = s.context + longest + kPad;
    return s;
}

// ---- lanes that share keys -----------------------------------------------------------------------------------------

struct Lane {
    int64_t row, head;
    int64_t begin;    // first visible position
    int64_t context;  // positions below are in the table, the others in `extra`
    int64_t total;
    int64_t extras;   // how many extras stand before `context`

    int64_t first_extra() const { return begin > context ? begin - context : 0; }

    // What it sees of positions [first, last), counted from `first`.
    Lane within(int64_t first, int64_t last) const {
        auto clip = [&](int64_t p) { return (p < first ? first : p > last ? last : p) - first; };
        return {row, head, clip(begin), clip(context), clip(total), context < first ? first - context : 0};
    }
};

template <int Lanes>
struct Tile {
    static constexpr int lanes = Lanes;
};

// Calls `work` for the widest tile of at most `left` lanes; returns its width.
template <class Work>
RS_INLINE int with_tile(int left, Work work) {
    if (left >= 4) return work(Tile<4>{}), 4;
    if (left >= 2) return work(Tile<2>{}), 2;
    return work(Tile<1>{}), 1;
}

Lane lane_of(const Batch& batch, const Layer& layer, int64_t row, int64_t head) {
    Lane lane = {row, head, 0, batch.context_lens[row], batch.context_lens[row] + batch.extra_lens[row], 0};
    if (layer.window > 0 && lane.total > layer.window) lane.begin = lane.total - layer.window;
    if (layer.chunk > 0 && lane.total > 0) lane.begin = (lane.total - 1) / layer.chunk * layer.chunk;
    return lane;
}

RS_INLINE int64_t offset_of(const Layer& layer, int64_t slot) {
    const int64_t shift = __builtin_ctzll((unsigned long long)layer.block_size);  // a power of two
    return (slot >> shift) * layer.block_stride + (slot & (layer.block_size - 1)) * layer.num_kv_heads * layer.dim;
}

// Offsets of slots[first:last), the last one repeated behind them.
void locate(const Layer& layer, const int32_t* slots, int64_t first, int64_t last, int64_t* offsets) {
    for (int64_t p = first; p < last; p++) offsets[p] = offset_of(layer, slots[p]);
    if (first < last)
        for (int64_t p = last; p < last + kPad; p++) offsets[p] = offsets[last - 1];
}

// Up to kMaxLanes lanes whose rows use the same row of the slot table; its offsets are in scratch.context.
template <class T>
struct Pass {
    const Batch& batch;
    const Layer& layer;
    const Scratch& s;
    const T* keys;
    const T* values;
    Lane whole[kMaxLanes];
    int count;
    Weights merged[kMaxLanes];
    // of the split at work, positions counted from its first
    Lane lanes[kMaxLanes];
    const int64_t* context;           // element offset of each context position
    int64_t low, high;                // union of the lanes' context ranges
    int64_t shared_low, shared_high;  // what all of them see
    int64_t block;                    // positions per block

    float* queries(int l) const { return s.queries + l * s.padded_dim; }
    float* sums(int l) const { return s.sums + l * s.padded_dim; }
    float* merged_sums(int l) const { return s.merged + l * s.padded_dim; }
    float* scores(int l) const { return s.scores + l * s.row_length; }

    void begin() {
        const int64_t dim = layer.dim, padding = (s.padded_dim - dim) * (int64_t)sizeof(float);
        for (int l = 0; l < count; l++) {
            copy_row(queries(l), layer.query.at(whole[l].row, whole[l].head), dim);
            memset(queries(l) + dim, 0, padding);
            merged[l] = Weights::none();
        }
        block = max64(kBlockBytes / (dim * (int64_t)sizeof(T)), 1);
    }

    void enter(int64_t split) {
        const int64_t first = split * layer.split;
        context = s.context + first;
        low = shared_high = INT64_MAX;
        high = shared_low = 0;
        for (int l = 0; l < count; l++) {
            lanes[l] = whole[l].within(first, first + layer.split);
            const Lane& lane = lanes[l];
            memset(sums(l), 0, s.padded_dim * sizeof(float));
            low = min64(low, min64(lane.begin, lane.context));
            high = max64(high, lane.context);
            shared_low = max64(shared_low, min64(lane.begin, lane.context));
            shared_high = min64(shared_high, lane.context);
        }
        shared_high = max64(shared_low, shared_high);
    }

    Ahead all(const T* rows, int64_t first, int64_t last) const {
        return {(const char*)rows, context, first, last, sizeof(T), layer.dim * (int64_t)sizeof(T)};
    }

    // The part of rows [first, last) that falls to the tile beginning with lane l > 0.
    Ahead share(const T* rows, int64_t first, int64_t last, int l) const {
        int64_t part = (last - first) * kTile / (count - kTile) + 1;
        int64_t from = min64(first + (l / kTile - 1) * part, last);
        return all(rows, from, min64(from + part, last));
    }

    // The first tile of a block brings it into the cache, a little ahead of itself; the others bring what comes next.
    void score_context() {
        const int64_t first_block_end = min64(shared_low + block, shared_high);
        for (int64_t first = low; first < high; first += block) {
            const int64_t last = min64(first + block, high);
            for (int l = 0; l < count;) {
                const Ahead fetch = l == 0 ? all(keys, first + kKeysAhead, last)
                                    : last < high ? share(keys, last, min64(last + block, high), l)
                                                  : share(values, shared_low, first_block_end, l);
                l += with_tile(count - l, [&](auto tile) {
                    score<tile.lanes>(queries(l), s.padded_dim, keys, context, first, last, layer.dim, scores(l),
                                      s.row_length, fetch);
                });
            }
        }
    }

    void weigh_shared() {
        for (int64_t first = shared_low; first < shared_high; first += block) {
            const int64_t last = min64(first + block, shared_high);
            for (int l = 0; l < count;) {
                const Ahead fetch = l == 0 ? all(values, first + kValuesAhead, last)
                                           : share(values, last, min64(last + block, shared_high), l);
                l += with_tile(count - l, [&](auto tile) {
                    weigh<tile.lanes>(scores(l), s.row_length, values, context, first, last, sums(l), s.padded_dim,
                                      layer.dim, fetch);
                });
            }
        }
    }

    void weigh_alone(int l, const float* weights, const int64_t* offsets, int64_t first, int64_t last) {
        weigh<1, T>(weights, s.row_length, values, offsets, first, last, sums(l), s.padded_dim, layer.dim, {});
    }

    // Scores of the extras, softmax, and the values before those that all lanes see.
    Weights soften(int l) {
        const Lane& lane = lanes[l];
        if (lane.begin == lane.total) return Weights::none();
        score<1, T>(queries(l), s.padded_dim, keys, s.extra, lane.first_extra(), find_extras(lane), layer.dim,
                    scores(l) + lane.context, s.row_length, {});
        const Weights weights =
            exponentials(scores(l) + lane.begin, lane.total - lane.begin, layer.scale, layer.softcap);
        weigh_alone(l, scores(l), context, lane.begin, min64(shared_low, lane.context));
        return weights;
    }

    // The values behind those that all lanes see.
    void weigh_rest(int l) {
        const Lane& lane = lanes[l];
        weigh_alone(l, scores(l), context, max64(shared_high, lane.begin), lane.context);
        weigh_alone(l, scores(l) + lane.context, s.extra, lane.first_extra(), find_extras(lane));
    }

    int64_t find_extras(const Lane& lane) {
        int64_t num_extra = lane.total - lane.context;
        const int32_t* slots = batch.extra + lane.row * batch.extra_width + lane.extras;
        locate(layer, slots, lane.first_extra(), num_extra, s.extra);
        return num_extra;
    }

    void attend_split(int64_t split, bool is_only) {
        Weights weights[kMaxLanes];
        enter(split);
        score_context();
        for (int l = 0; l < count; l++) weights[l] = soften(l);
        weigh_shared();
        for (int l = 0; l < count; l++) {
            weigh_rest(l);
            if (is_only) finish(l, weights[l], sums(l));
            else merge(merged[l], merged_sums(l), weights[l], sums(l), layer.dim);
        }
    }

    int64_t place(int l) const { return whole[l].row * layer.num_heads + whole[l].head; }

    void finish(int l, const Weights& weights, const float* sums) {
        const float* sink = layer.sinks == nullptr ? nullptr : layer.sinks + whole[l].head;
        finish_softmax(weights, sums, sink, layer.dim, layer.out + place(l) * layer.dim);
    }

    void attend(int64_t first_split, int64_t stop_split) {
        const bool is_only = stop_split - first_split == 1;
        begin();
        for (int64_t split = first_split; split < stop_split; split++) attend_split(split, is_only);
        for (int l = 0; !is_only && l < count; l++) finish(l, merged[l], merged_sums(l));
    }
};

// All query heads of one kv head, for a run of rows of one sequence.
template <class T>
void attend_group(const Batch& batch, const Layer& layer, int64_t group, int64_t kv_head) {
    const Scratch s = scratch_for(batch.longest, layer.split, layer.dim);
    const int64_t first_row = batch.groups[group], last_row = batch.groups[group + 1];
    const int64_t heads = layer.num_heads / layer.num_kv_heads, num_lanes = (last_row - first_row) * heads;
    const T* keys = (const T*)layer.kv + kv_head * layer.dim;
    int64_t low = INT64_MAX, high = 0, begin = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < last_row; row++) {
        Lane lane = lane_of(batch, layer, row, 0);
        low = min64(low, min64(lane.begin, lane.context));
        high = max64(high, lane.context);
        begin = min64(begin, lane.begin);
        end = max64(end, lane.total);
    }
    const int64_t first_split = begin / layer.split, stop_split = (end + layer.split - 1) / layer.split;
    locate(layer, batch.slot_table + batch.table_rows[first_row] * batch.table_stride, low, high, s.context);
    Pass<T> pass = {batch, layer, s, keys, keys + layer.plane_stride};
    for (int64_t done = 0; done < num_lanes; done += pass.count) {
        pass.count = (int)min64(num_lanes - done, kMaxLanes);
        for (int64_t l = 0; l < pass.count; l++)
            pass.whole[l] = lane_of(batch, layer, first_row + (done + l) / heads, kv_head * heads + (done + l) % heads);
        pass.attend(first_split, stop_split);
    }
}

template <class T>
void write_row(const Batch& batch, const Layer& layer, int64_t row) {
    if (batch.slots[row] < 0) return;
    T* keys = (T*)layer.kv + offset_of(layer, batch.slots[row]);
    T* values = keys + layer.plane_stride;
    for (int64_t head = 0; head < layer.num_kv_heads; head++) {
        copy_row(keys + head * layer.dim, layer.key.at(row, head), layer.dim);
        copy_row(values + head * layer.dim, layer.value.at(row, head), layer.dim);
    }
}

template <class T>
void run(const Batch& batch, const Layer& layer, int threads) {
    const int64_t items = batch.num_groups * layer.num_kv_heads;
    for (int64_t row = 0; row < batch.num_rows; row++) write_row<T>(batch, layer, row);
    rs_parallel_for(items, threads, [&](int64_t item) {
        attend_group<T>(batch, layer, item / layer.num_kv_heads, item % layer.num_kv_heads);
    });
}

// 0 or the number of a problem (see PROBLEMS in tree_attention.py) with one row.
int64_t problem_of(Batch& batch, int64_t row) {
    const int64_t context = batch.context_lens[row], table_row = batch.table_rows[row];
    if (table_row < 0 || table_row >= batch.table_height) return 1;
    if (context < 0 || context > batch.table_width) return 2;
    if (batch.slots[row] < -1) return 3;
    batch.highest_slot = max64(batch.highest_slot, batch.slots[row]);
    const int32_t* extra = batch.extra + row * batch.extra_width;
    int64_t count = 0;
    for (; count < batch.extra_width && extra[count] >= 0; count++)
        batch.highest_slot = max64(batch.highest_slot, extra[count]);
    for (int64_t e = count; e < batch.extra_width; e++)
        if (extra[e] != -1) return 4;
    batch.extra_lens[row] = (int32_t)count;
    batch.longest = max64(batch.longest, context + count);
    batch.num_keys += context + count;
    return 0;
}

// Looks at the table entries [first, last) of a table row.
int64_t problem_of_table(Batch& batch, int64_t table_row, int64_t first, int64_t last) {
    const int32_t* slots = batch.slot_table + table_row * batch.table_stride;
    int32_t lowest = 0, highest = -1;
    for (int64_t p = first; p < last; p++) {
        lowest = slots[p] < lowest ? slots[p] : lowest;
        highest = slots[p] > highest ? slots[p] : highest;
    }
    batch.highest_slot = max64(batch.highest_slot, highest);
    return lowest < 0 ? 5 : 0;
}

void plan(Batch& batch) {
    batch.num_groups = batch.longest = batch.num_keys = batch.problem = 0;
    batch.highest_slot = -1;
    int64_t seen = 0;  // table entries of the present table row that were looked at
    for (int64_t row = 0; row < batch.num_rows; row++) {
        batch.problem_row = row;
        batch.problem = problem_of(batch, row);
        if (batch.problem != 0) return;
        bool same = row > 0 && batch.table_rows[row] == batch.table_rows[row - 1];
        if (!same) seen = 0;
        if (batch.context_lens[row] > seen) {
            batch.problem = problem_of_table(batch, batch.table_rows[row], seen, batch.context_lens[row]);
            if (batch.problem != 0) return;
            seen = batch.context_lens[row];
        }
        if (!same || row - batch.groups[batch.num_groups - 1] == kMaxRows)
            batch.groups[batch.num_groups++] = (int32_t)row;
    }
    batch.groups[batch.num_groups] = (int32_t)batch.num_rows;
}

}  // namespace

RS_EXPORT void RS_NAME(tree_attention_plan)(Batch* batch) { plan(*batch); }

RS_EXPORT void RS_NAME(tree_attention)(const Layer* layer) {
    const Batch& batch = *layer->batch;
    const bool small = batch.num_keys * layer->num_heads * layer->dim < kSmall;
    const int threads = small ? 1 : (int)layer->threads;
    if (layer->kv_is_bf16) run<uint16_t>(batch, *layer, threads);
    else run<float>(batch, *layer, threads);
}

// What Python fills in must be as long as what is read here.
RS_EXPORT void RS_NAME(attention_sizes)(long* sizes) {
    long here[] = {sizeof(Batch), sizeof(AttentionCall)};
    sizes[0] = here[0], sizes[1] = here[1];
}
