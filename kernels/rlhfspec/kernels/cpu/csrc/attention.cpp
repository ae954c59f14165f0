// Paged tree attention on the CPU: one loop per (query row, head) over its slots in ascending position.
//
// The promise: the bits of an output row depend on its query, its keys and values in order of position, and nothing
// else; not on other rows, the slots' places, threads, the instruction set, or whether a key came from the table or from
// `extra`. Three rules keep it:
//   score    16 lanes over the head dimension, then one fixed tree;
//   softmax  16 lanes over positions counted from the first visible one, then the same tree;
//   values   one chain of fused multiply-adds per output number, in ascending position.
// Query rows of one sequence, and query heads of one kv head, share each loaded key ("lanes" of a tile). That changes
// which sums run side by side, never the order within one.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

namespace {

constexpr int kMaxLanes = 4;   // (query row, head) pairs that share each key
constexpr int kPad = 16;       // room behind every list of positions, for whole vectors
constexpr int kMaxRows = 16;   // query rows of one work item; more would leave threads without work
constexpr int64_t kSmall = 1 << 19;  // multiply-adds below which a second thread costs more than it brings
constexpr int kKeysAhead = 24;   // positions prefetched ahead of the scores
constexpr int kValuesAhead = 16;  // and of the values
#ifdef __AVX512F__
constexpr int kScores = 16;  // scores that fit in registers at once
#else
constexpr int kScores = 4;
#endif

// What one forward pass shares between its layers; mirrors NativeBatch in tree_attention.py.
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
};

// One layer of the cache, and what the model asks of it.
struct Layer {
    Strided query, key, value;
    void* kv;  // first byte of this layer in block 0
    int64_t block_stride, plane_stride, block_shift;
    int64_t num_heads, num_kv_heads, dim;
    float scale, softcap;
    int64_t window;
    const float* sinks;
    float* out;
};

// ---- memory of one thread ------------------------------------------------------------------------------------------

struct Scratch {
    float* scores;         // [kMaxLanes][row_length]
    float* sums;           // [kMaxLanes][padded dim]
    float* queries;        // [kMaxLanes][padded dim]
    int64_t* context;      // [row_length] element offset of each context position
    int64_t* extra;        // [row_length] and of each extra
    int64_t row_length, padded_dim;
};

Scratch scratch_for(int64_t longest, int64_t dim) {
    static thread_local char* memory = nullptr;
    static thread_local size_t capacity = 0;
    Scratch s;
    s.row_length = (longest + 2 * kPad + 15) / 16 * 16;
    s.padded_dim = (dim + 15) / 16 * 16;
    size_t floats = kMaxLanes * (s.row_length + 2 * s.padded_dim);
    size_t bytes = floats * sizeof(float) + 2 * s.row_length * sizeof(int64_t);
    if (bytes > capacity) {
        free(memory);
        capacity = (2 * bytes + 63) / 64 * 64;
        memory = (char*)aligned_alloc(64, capacity);
        if (memory == nullptr) abort();
    }
    s.scores = (float*)memory;
    s.sums = s.scores + kMaxLanes * s.row_length;
    s.queries = s.sums + kMaxLanes * s.padded_dim;
    s.context = (int64_t*)(memory + floats * sizeof(float));
    s.extra = s.context + s.row_length;
    return s;
}

// ---- storage types -------------------------------------------------------------------------------------------------

RS_INLINE f32x16 load16(const float* p) { return rs_load(p); }
RS_INLINE f32x16 load16(const uint16_t* p) { return rs_load_bf16(p); }
RS_INLINE f32x16 load_some(const float* p, int count) { return rs_load_n(p, count); }
RS_INLINE f32x16 load_some(const uint16_t* p, int count) {
    uint16_t whole[16] = {0};
    memcpy(whole, p, count * sizeof(uint16_t));
    return rs_load_bf16(whole);
}

RS_INLINE void copy_row(float* to, const float* from, int64_t dim) { memcpy(to, from, dim * sizeof(float)); }
RS_INLINE void copy_row(uint16_t* to, const float* from, int64_t dim) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) rs_store_bf16(to + d, rs_load(from + d));
    for (; d < dim; d++) to[d] = rs_bf16_of_float(from[d]);
}

template <class T>
RS_INLINE void prefetch_row(const T* p, int64_t dim) {
    for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) _mm_prefetch((const char*)p + byte, _MM_HINT_T0);
}

// ---- scores --------------------------------------------------------------------------------------------------------

// Sums each accumulator by rs_hsum's tree; accumulator reduced_at(i) becomes number i of the result.
#ifdef __AVX512F__
constexpr int reduced_at(int i) { return 4 * (i % 4) + i / 4; }

RS_INLINE void reduce(const f32x16* acc, float* out) {
    __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 a = acc[2 * i].v, b = acc[2 * i + 1].v;
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 a = four[2 * i], b = four[2 * i + 1];
        two[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd)));
}
#else
constexpr int reduced_at(int i) { return i; }

RS_INLINE void reduce(const f32x16* acc, float* out) {
    __m256 eight[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) eight[i] = _mm256_add_ps(acc[i].lo, acc[i].hi);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    __m256 two = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44), _mm256_shuffle_ps(four[0], four[1], 0xee));
    __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}
#endif

// scores[lane][p] = query[lane] . key at offsets[p], for p in [first, last). Writes up to kPad numbers past `last`;
// `offsets` must be readable (and valid) as far.
template <int Lanes, class T>
void score(const float* queries, int64_t padded_dim, const T* keys, const int64_t* offsets, int64_t first, int64_t last,
           int64_t dim, float* scores, int64_t row_length) {
    constexpr int kKeys = kScores / Lanes;
    const int64_t whole = dim / 16 * 16;
    const int tail = (int)(dim - whole);
    for (int64_t p = first; p < last; p += kKeys) {
        const T* key[kKeys];
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; k++) key[k] = keys + offsets[p + k];
        if (p + kKeysAhead + kKeys <= last)
            for (int k = 0; k < kKeys; k++) prefetch_row(keys + offsets[p + kKeysAhead + k], dim);
        f32x16 acc[kScores];
#pragma GCC unroll 16
        for (int i = 0; i < kScores; i++) acc[i] = rs_zero();
        for (int64_t d = 0; d < whole; d += 16) {
            f32x16 q[Lanes];
#pragma GCC unroll 4
            for (int l = 0; l < Lanes; l++) q[l] = rs_load(queries + l * padded_dim + d);
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; k++) {
                f32x16 loaded = load16(key[k] + d);
#pragma GCC unroll 4
                for (int l = 0; l < Lanes; l++) {
                    f32x16& a = acc[reduced_at(l * kKeys + k)];
                    a = rs_fma(q[l], loaded, a);
                }
            }
        }
        if (tail) {
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; k++) {
                f32x16 loaded = load_some(key[k] + whole, tail);
#pragma GCC unroll 4
                for (int l = 0; l < Lanes; l++) {
                    f32x16& a = acc[reduced_at(l * kKeys + k)];
                    a = rs_fma(rs_load(queries + l * padded_dim + whole), loaded, a);
                }
            }
        }
        float reduced[kScores];
        reduce(acc, reduced);
#pragma GCC unroll 4
        for (int l = 0; l < Lanes; l++) memcpy(scores + l * row_length + p, reduced + l * kKeys, kKeys * sizeof(float));
    }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// tanh to a few ulp: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would lose its digits.
RS_INLINE f32x16 tanh16(f32x16 x) {
    f32x16 size = rs_abs(x), z = rs_mul(x, x);
    f32x16 p = rs_set1(-5.70498872745e-3f);
    p = rs_fma(p, z, rs_set1(2.06390887954e-2f));
    p = rs_fma(p, z, rs_set1(-5.37397155531e-2f));
    p = rs_fma(p, z, rs_set1(1.33314422036e-1f));
    p = rs_fma(p, z, rs_set1(-3.33332819422e-1f));
    f32x16 small = rs_fma(rs_mul(x, z), p, x);
    f32x16 e = rs_exp(rs_add(size, size));
    f32x16 large = rs_sub(rs_set1(1.0f), rs_div(rs_set1(2.0f), rs_add(e, rs_set1(1.0f))));
    return rs_select_less(size, rs_set1(0.625f), small, rs_copysign(large, x));
}

// Turns `count` dot products into exp(score - largest), in place, and returns their sum (with the sink's share).
// The rest of the last vector comes out 0.
float exponentials(float* scores, int64_t count, const Layer& layer, int64_t head) {
    const f32x16 scale = rs_set1(layer.scale);
    f32x16 largest16 = rs_set1(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 s = rs_mul(rs_load(scores + i), scale);
        if (layer.softcap > 0.0f) {
            f32x16 cap = rs_set1(layer.softcap);
            s = rs_mul(tanh16(rs_div(s, cap)), cap);
        }
        rs_store(scores + i, s);
        if (count - i < 16)
            for (int64_t j = count; j < i + 16; j++) scores[j] = -INFINITY;
        largest16 = rs_max(rs_load(scores + i), largest16);  // this order steps over a NaN; the exponential keeps it
    }
    float largest = rs_hmax(largest16);
    if (layer.sinks != nullptr && layer.sinks[head] > largest) largest = layer.sinks[head];
    const f32x16 shift = rs_set1(largest);
    f32x16 sum = rs_zero();
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 e = rs_exp(rs_sub(rs_load(scores + i), shift));
        rs_store(scores + i, e);
        sum = rs_add(sum, e);
    }
    float total = rs_hsum(sum);
    if (layer.sinks != nullptr) total += rs_exp_scalar(layer.sinks[head] - largest);
    return total;
}

// ---- values --------------------------------------------------------------------------------------------------------

// sums[lane][0:16*Vectors] += weight[lane][p] * value at offsets[p], p ascending in [first, last).
// Some: a single vector of which only `some` columns exist.
template <int Lanes, int Vectors, bool Some, class T>
RS_INLINE void weigh_columns(const float* weights, int64_t row_length, const T* values, const int64_t* offsets,
                             int64_t first, int64_t last, float* sums, int64_t padded_dim, int some, bool prefetch) {
    f32x16 acc[Lanes * Vectors];
#pragma GCC unroll 16
    for (int i = 0; i < Lanes * Vectors; i++) acc[i] = rs_load(sums + (i / Vectors) * padded_dim + (i % Vectors) * 16);
    for (int64_t p = first; p < last; p++) {
        const T* value = values + offsets[p];
        if (prefetch && p + kValuesAhead < last) prefetch_row(values + offsets[p + kValuesAhead], 16 * Vectors);
        f32x16 loaded[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) loaded[v] = Some ? load_some(value, some) : load16(value + 16 * v);
#pragma GCC unroll 4
        for (int l = 0; l < Lanes; l++) {
            f32x16 weight = rs_set1(weights[l * row_length + p]);
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) acc[l * Vectors + v] = rs_fma(weight, loaded[v], acc[l * Vectors + v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Lanes * Vectors; i++) rs_store(sums + (i / Vectors) * padded_dim + (i % Vectors) * 16, acc[i]);
}

template <int Lanes, class T>
void weigh(const float* weights, int64_t row_length, const T* values, const int64_t* offsets, int64_t first, int64_t last,
           float* sums, int64_t padded_dim, int64_t dim) {
    if (first >= last) return;
    constexpr int kWide = kScores / Lanes < 8 ? kScores / Lanes : 8;  // vectors whose sums fit in registers
    int64_t d = 0;
    for (; d + 16 * kWide <= dim; d += 16 * kWide)
        weigh_columns<Lanes, kWide, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim, 16, true);
    if constexpr (kWide > 4)
        for (; d + 64 <= dim; d += 64)
            weigh_columns<Lanes, 4, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim, 16, true);
    for (; d + 16 <= dim; d += 16)
        weigh_columns<Lanes, 1, false>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim, 16, true);
    if (d < dim)
        weigh_columns<Lanes, 1, true>(weights, row_length, values + d, offsets, first, last, sums + d, padded_dim,
                                      (int)(dim - d), false);
}

// ---- a tile: lanes that share keys ---------------------------------------------------------------------------------

struct Lane {
    int64_t row, head;
    int64_t begin;    // first visible position
    int64_t context;  // positions below are in the table, the others in `extra`
    int64_t total;
};

Lane lane_of(const Batch& batch, const Layer& layer, int64_t row, int64_t head) {
    Lane lane = {row, head, 0, batch.context_lens[row], batch.context_lens[row] + batch.extra_lens[row]};
    if (layer.window > 0 && lane.total > layer.window) lane.begin = lane.total - layer.window;
    return lane;
}

RS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
RS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

RS_INLINE int64_t offset_of(const Layer& layer, int64_t slot) {
    int64_t in_block = slot & (((int64_t)1 << layer.block_shift) - 1);
    return (slot >> layer.block_shift) * layer.block_stride + in_block * layer.num_kv_heads * layer.dim;
}

// Offsets of slots[first:last), the last one repeated behind them.
void locate(const Layer& layer, const int32_t* slots, int64_t first, int64_t last, int64_t* offsets) {
    for (int64_t p = first; p < last; p++) offsets[p] = offset_of(layer, slots[p]);
    if (first < last)
        for (int64_t p = last; p < last + kPad; p++) offsets[p] = offsets[last - 1];
}

// Softmax attention of `Lanes` lanes whose rows use the same row of the slot table (offsets in s.context).
template <int Lanes, class T>
void attend(const Batch& batch, const Layer& layer, const Scratch& s, const Lane* lanes, const T* keys) {
    const int64_t length = s.row_length, padded = s.padded_dim, dim = layer.dim;
    const T* values = keys + layer.plane_stride;
    int64_t low = INT64_MAX, high = 0;                // union of the lanes' context ranges
    int64_t shared_low = 0, shared_high = INT64_MAX;  // and what all of them see
    for (int l = 0; l < Lanes; l++) {
        const Lane& lane = lanes[l];
        memset(s.queries + l * padded, 0, padded * sizeof(float));
        memset(s.sums + l * padded, 0, padded * sizeof(float));
        copy_row(s.queries + l * padded, layer.query.data + lane.row * layer.query.row + lane.head * layer.query.head, dim);
        low = min64(low, min64(lane.begin, lane.context));
        high = max64(high, lane.context);
        shared_low = max64(shared_low, min64(lane.begin, lane.context));
        shared_high = min64(shared_high, lane.context);
    }
    shared_high = max64(shared_low, shared_high);
    score<Lanes>(s.queries, padded, keys, s.context, low, high, dim, s.scores, length);
    float total[Lanes];
    for (int l = 0; l < Lanes; l++) {
        const Lane& lane = lanes[l];
        float* scores = s.scores + l * length;
        int64_t first_extra = max64(lane.begin - lane.context, 0), num_extra = lane.total - lane.context;
        locate(layer, batch.extra + lane.row * batch.extra_width, first_extra, num_extra, s.extra);
        score<1>(s.queries + l * padded, padded, keys, s.extra, first_extra, num_extra, dim, scores + lane.context, length);
        total[l] = exponentials(scores + lane.begin, lane.total - lane.begin, layer, lane.head);
        weigh<1>(scores, length, values, s.context, lane.begin, min64(shared_low, lane.context), s.sums + l * padded, padded, dim);
    }
    weigh<Lanes>(s.scores, length, values, s.context, shared_low, shared_high, s.sums, padded, dim);
    for (int l = 0; l < Lanes; l++) {
        const Lane& lane = lanes[l];
        const float* weights = s.scores + l * length;
        float* sums = s.sums + l * padded;
        int64_t first_extra = max64(lane.begin - lane.context, 0), num_extra = lane.total - lane.context;
        weigh<1>(weights, length, values, s.context, max64(shared_high, lane.begin), lane.context, sums, padded, dim);
        locate(layer, batch.extra + lane.row * batch.extra_width, first_extra, num_extra, s.extra);
        weigh<1>(weights + lane.context, length, values, s.extra, first_extra, num_extra, sums, padded, dim);
        float* out = layer.out + (lane.row * layer.num_heads + lane.head) * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = lane.begin < lane.total ? sums[d] / total[l] : 0.0f;
    }
}

// All query heads of one kv head, for a run of rows of one sequence.
template <class T>
void attend_group(const Batch& batch, const Layer& layer, int64_t group, int64_t kv_head) {
    const Scratch s = scratch_for(batch.longest, layer.dim);
    const int64_t first_row = batch.groups[group], last_row = batch.groups[group + 1];
    const int64_t heads = layer.num_heads / layer.num_kv_heads, num_lanes = (last_row - first_row) * heads;
    const T* keys = (const T*)layer.kv + kv_head * layer.dim;
    int64_t low = INT64_MAX, high = 0;
    for (int64_t row = first_row; row < last_row; row++) {
        Lane lane = lane_of(batch, layer, row, 0);
        low = min64(low, min64(lane.begin, lane.context));
        high = max64(high, lane.context);
    }
    locate(layer, batch.slot_table + batch.table_rows[first_row] * batch.table_stride, low, high, s.context);
    Lane lanes[kMaxLanes];
    for (int64_t done = 0; done < num_lanes;) {
        int64_t left = num_lanes - done, count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t l = 0; l < count; l++)
            lanes[l] = lane_of(batch, layer, first_row + (done + l) / heads, kv_head * heads + (done + l) % heads);
        if (count == 4) attend<4, T>(batch, layer, s, lanes, keys);
        else if (count == 2) attend<2, T>(batch, layer, s, lanes, keys);
        else attend<1, T>(batch, layer, s, lanes, keys);
        done += count;
    }
}

template <class T>
void write_row(const Batch& batch, const Layer& layer, int64_t row) {
    if (batch.slots[row] < 0) return;
    T* keys = (T*)layer.kv + offset_of(layer, batch.slots[row]);
    for (int64_t head = 0; head < layer.num_kv_heads; head++) {
        copy_row(keys + head * layer.dim, layer.key.data + row * layer.key.row + head * layer.key.head, layer.dim);
        copy_row(keys + layer.plane_stride + head * layer.dim, layer.value.data + row * layer.value.row + head * layer.value.head,
                 layer.dim);
    }
}

template <class T>
void run(const Batch& batch, const Layer& layer, int threads) {
    const int64_t items = batch.num_groups * layer.num_kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < batch.num_rows; row++) write_row<T>(batch, layer, row);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items; item++)
            attend_group<T>(batch, layer, item / layer.num_kv_heads, item % layer.num_kv_heads);
    }
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
    while (count < batch.extra_width && extra[count] >= 0) batch.highest_slot = max64(batch.highest_slot, extra[count++]);
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
        if (!same || row - batch.groups[batch.num_groups - 1] == kMaxRows) batch.groups[batch.num_groups++] = (int32_t)row;
    }
    batch.groups[batch.num_groups] = (int32_t)batch.num_rows;
}

}  // namespace

// Checks every index of a forward pass and groups its rows into work items.
RS_EXPORT void RS_NAME(tree_attention_plan)(Batch* batch) { plan(*batch); }

// Writes the rows' keys and values (float32 or bfloat16 storage), then attends. `kv` points at the layer in block 0;
// strides count elements. window 0, softcap 0 and sinks null mean: none.
RS_EXPORT void RS_NAME(tree_attention)(const Batch* batch, const float* query, int64_t query_row, int64_t query_head,
                                       const float* key, int64_t key_row, int64_t key_head, const float* value,
                                       int64_t value_row, int64_t value_head, void* kv, int64_t kv_is_bf16,
                                       int64_t block_stride, int64_t plane_stride, int64_t block_size, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t dim, float scale, float softcap, int64_t window,
                                       const float* sinks, float* out, int64_t threads) {
    const Layer layer = {{query, query_row, query_head}, {key, key_row, key_head}, {value, value_row, value_head}, kv,
                         block_stride, plane_stride, __builtin_ctzll((unsigned long long)block_size), num_heads, num_kv_heads,
                         dim, scale, softcap, window, sinks, out};
    if (batch->num_keys * num_heads * dim < kSmall) threads = 1;
    if (kv_is_bf16) run<uint16_t>(*batch, layer, (int)threads);
    else run<float>(*batch, layer, (int)threads);
}
