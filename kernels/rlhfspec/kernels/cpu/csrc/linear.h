// Linear layers and gated MLPs whose every output is a fixed function of its own row.
//
// The order of summation, for all arithmetics, all numbers of rows, threads and both of the layers below:
//     out[r, n] = ((segment_0 + segment_1) + segment_2) + ... + bias[n]
// where a segment is one chain over its k in ascending order, starting from zero, and the length of a segment depends
// on K alone (segment_length). Segments are what lets threads share a layer with few outputs and a long K.
//
// The arithmetic is a policy P (see linear.cpp, linear_amx.cpp, linear_avx512bf16.cpp):
//     P::Weight, P::Activation     stored types
//     P::kRowTile                  rows come in multiples of this; buffers are padded to it
//     P::kRowBlock                 rows per call of block()
//     P::kPadK                     k is padded with zeros to a multiple of this
//     P::begin(), P::end()         around each thread's work
//     P::at(acts, stride, row, k)  address of an activation; P::stride(k) for a matrix of k columns
//     P::steps(rows, k)            times that the blocks of these rows call next.step()
//     P::pack(...)                 float rows -> activations
//     P::put(acts, stride, row, k, vector)   16 activations
//     P::block(...)                out[rows, 64] = the chain over k of one panel
// Weights are panels of 64 outputs: panel p, position k begins at (p * padded K + k) * 64.
#pragma once

#include <stdlib.h>

#include "activation.h"

namespace {

constexpr long kPanel = 64;       // outputs per panel
constexpr long kRowChunk = 256;   // rows whose activations are held at once
constexpr long kMaxPartials = 8L << 20;  // floats: partial sums of a split K may take 32 MB

RS_INLINE long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }
RS_INLINE long smaller(long a, long b) { return a < b ? a : b; }

// A function of K alone: it is part of the law.
RS_INLINE long segment_length(long k) {
    long length = round_up((k + 31) / 32, kPanel);
    return length < 256 ? 256 : length;
}
RS_INLINE long num_segments(long k) { return (k + segment_length(k) - 1) / segment_length(k); }

// Memory that a thread keeps from call to call.
struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    template <class T>
    T* get(long count) {
        size_t wanted = (size_t)count * sizeof(T) + 64;
        if (wanted > size) {
            free(data);
            if (posix_memalign(&data, 4096, wanted) != 0) abort();
            size = wanted;
        }
        return (T*)data;
    }
};

// Weights needed next, fetched into the cache a few lines at a time while the present ones are multiplied.
struct Prefetch {
    const char* at = nullptr;
    const char* end = nullptr;
    long lines_per_step = 0;

    Prefetch over(long steps) const { return {at, end, (end - at + steps * 64 - 1) / (steps * 64)}; }
    inline __attribute__((always_inline)) void step() {
        for (long i = 0; i < lines_per_step && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class P>
struct Weights {
    const typename P::Weight* data;
    long k;         // inputs
    long padded_k;  // rows of a panel

    Weights(const void* packed, long num_inputs)
        : data((const typename P::Weight*)packed), k(num_inputs), padded_k(round_up(num_inputs, P::kPadK)) {}
    const typename P::Weight* at(long panel, long start) const { return data + (panel * padded_k + start) * kPanel; }
    Prefetch ahead(long panel, long start, long length) const {
        const char* from = (const char*)at(panel, start);
        return {from, from + length * kPanel * (long)sizeof(typename P::Weight), 0};
    }
};

// out[rows, count] (+)= in[rows, 64]
RS_INLINE void add_block(const float* in, float* out, long out_stride, long rows, long count, bool first) {
    for (long r = 0; r < rows; ++r, in += kPanel, out += out_stride) {
        for (long n = 0; n < count; n += kLanes) {
            int lanes = (int)smaller(kLanes, count - n);
            f32x16 value = rs_load(in + n);
            if (lanes == kLanes) {
                rs_store(out + n, first ? value : rs_add(rs_load(out + n), value));
            } else {
                rs_store_n(out + n, first ? value : rs_add(rs_load_n(out + n, lanes), value), lanes);
            }
        }
    }
}

RS_INLINE void add_bias(const float* bias, float* out, long out_stride, long rows, long count) {
    if (bias == nullptr) return;
    for (long r = 0; r < rows; ++r, out += out_stride) {
        for (long n = 0; n < count; n += kLanes) {
            int lanes = (int)smaller(kLanes, count - n);
            if (lanes == kLanes) {
                rs_store(out + n, rs_add(rs_load(out + n), rs_load(bias + n)));
            } else {
                rs_store_n(out + n, rs_add(rs_load_n(out + n, lanes), rs_load_n(bias + n, lanes)), lanes);
            }
        }
    }
}

// out[rows, n] = partials summed over segments, ascending, plus bias. partials: [segments][padded_rows][padded_n]
static void sum_partials(const float* partials, long segments, long padded_rows, long padded_n, const float* bias,
                         float* out, long rows, long n, int num_threads) {
    if (segments * rows * n < 65536) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) schedule(static) collapse(2)
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < n; c += kLanes) {
            const float* from = partials + r * padded_n + c;
            f32x16 sum = rs_load(from);
            for (long s = 1; s < segments; ++s) sum = rs_add(sum, rs_load(from + s * padded_rows * padded_n));
            int lanes = (int)smaller(kLanes, n - c);
            if (lanes == kLanes) {
                if (bias) sum = rs_add(sum, rs_load(bias + c));
                rs_store(out + r * n + c, sum);
            } else {
                if (bias) sum = rs_add(sum, rs_load_n(bias + c, lanes));
                rs_store_n(out + r * n + c, sum, lanes);
            }
        }
    }
}

// ---- one linear layer on packed activations ------------------------------------------------------------------------

// Few outputs, long K: threads share the segments.
template <class P>
void linear_split(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias, float* out, long rows,
                  long n, int num_threads) {
    static thread_local Scratch scratch;
    long length = segment_length(w.k), segments = num_segments(w.k), panels = round_up(n, kPanel) / kPanel;
    long padded_rows = round_up(rows, P::kRowTile);
    float* partials = scratch.get<float>(segments * padded_rows * panels * kPanel);
#pragma omp parallel num_threads(num_threads)
    {
        P::begin();
#pragma omp for schedule(dynamic) collapse(2)
        for (long s = 0; s < segments; ++s) {
            for (long p = 0; p < panels; ++p) {
                long k = smaller(length, w.k - s * length);
                Prefetch next;
                if (p + 1 < panels) next = w.ahead(p + 1, s * length, k).over(P::steps(rows, k));
                for (long row = 0; row < rows; row += P::kRowBlock)
                    P::block(P::at(acts, stride, row, s * length), stride, w.at(p, s * length), k,
                             (int)smaller(P::kRowBlock, rows - row),
                             partials + ((s * padded_rows + row) * panels + p) * kPanel, panels * kPanel, next);
            }
        }
        P::end();
    }
    sum_partials(partials, segments, padded_rows, panels * kPanel, bias, out, rows, n, num_threads);
}

// Many outputs: threads share the panels and each sums its segments in place.
template <class P>
void linear_by_panels(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias, float* out, long rows,
                      long n, int num_threads) {
    long length = segment_length(w.k), panels = round_up(n, kPanel) / kPanel;
    // Enough panels: a thread takes all rows of one, so that its weights are read once. Else share the rows as well.
    long group = panels >= 4 * num_threads ? kRowChunk : P::kRowBlock, groups = (rows + group - 1) / group;
#pragma omp parallel num_threads(num_threads)
    {
        P::begin();
        alignas(64) float sums[P::kRowBlock * kPanel];
#pragma omp for schedule(dynamic) collapse(2)
        for (long p = 0; p < panels; ++p) {
            for (long g = 0; g < groups; ++g) {
                long count = smaller(kPanel, n - p * kPanel), end = smaller(rows, (g + 1) * group);
                for (long k0 = 0; k0 < w.k; k0 += length) {
                    long k = smaller(length, w.k - k0);
                    Prefetch next;  // what follows in memory: the next segment, or the next panel's first
                    if (p + 1 < panels || k0 + k < w.k)
                        next = w.ahead(p, k0 + k, smaller(length, w.padded_k)).over(P::steps(end - g * group, k));
                    for (long row = g * group; row < end; row += P::kRowBlock) {
                        long block_rows = smaller(P::kRowBlock, end - row);
                        P::block(P::at(acts, stride, row, k0), stride, w.at(p, k0), k, (int)block_rows, sums, kPanel,
                                 next);
                        add_block(sums, out + row * n + p * kPanel, n, block_rows, count, k0 == 0);
                    }
                }
                add_bias(bias ? bias + p * kPanel : nullptr, out + g * group * n + p * kPanel, n, end - g * group,
                         count);
            }
        }
        P::end();
    }
}

template <class P>
void linear_packed(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias, float* out, long rows,
                   long n, int num_threads) {
    long blocks = (n + kPanel - 1) / kPanel * ((rows + P::kRowBlock - 1) / P::kRowBlock);
    bool split = num_threads > 1 && num_segments(w.k) > 1 && blocks < 4 * num_threads;
    (split ? linear_split<P> : linear_by_panels<P>)(acts, stride, w, bias, out, rows, n, num_threads);
}

// out[rows, n] = x[rows, k] @ weights[n, k]^T + bias
template <class P>
void linear(const float* x, const void* packed, const float* bias, float* out, long rows, long k, long n,
            int num_threads) {
    static thread_local Scratch scratch;
    Weights<P> w(packed, k);
    for (long row = 0; row < rows; row += kRowChunk) {
        long chunk = smaller(kRowChunk, rows - row);
        const typename P::Activation* acts = P::pack(scratch, x + row * k, chunk, k, num_threads);
        linear_packed<P>(acts, P::stride(k), w, bias, out + row * n, chunk, n, num_threads);
    }
}

// ---- gated MLP -----------------------------------------------------------------------------------------------------

struct GatedMlp {
    const float* gate_bias;  // or null
    const float* up_bias;    // or null
    const float* down_bias;  // or null
    long hidden;             // inputs
    long intermediate;
    long n;  // outputs
};

// hidden = act(gate) * up for one block of rows and one panel of the intermediate layer.
template <class P, int kind>
RS_INLINE void gate_block(const float* gate, const float* up, const GatedMlp& mlp, long column, long rows,
                          typename P::Activation* hidden, long stride, long row, long position) {
    for (long v = 0; v < kPanel; v += kLanes) {
        int lanes = (int)(mlp.intermediate - column - v);
        lanes = lanes < 0 ? 0 : lanes > kLanes ? kLanes : lanes;
        f32x16 gate_bias = rs_zero(), up_bias = rs_zero();
        bool biased = mlp.gate_bias && lanes;
        if (biased) {
            alignas(64) float one[kLanes] = {}, two[kLanes] = {};
            for (int i = 0; i < lanes; ++i) one[i] = mlp.gate_bias[column + v + i], two[i] = mlp.up_bias[column + v + i];
            gate_bias = rs_load(one), up_bias = rs_load(two);
        }
        for (long r = 0; r < rows; ++r) {
            f32x16 g = rs_load(gate + r * kPanel + v), u = rs_load(up + r * kPanel + v);
            if (biased) g = rs_add(g, gate_bias), u = rs_add(u, up_bias);
            f32x16 value = lanes ? rs_mul(rs_activate<kind>(g), u) : rs_zero();
            if (lanes && lanes < kLanes) {  // padding stays zero even if the row holds infinities
                alignas(64) float kept[kLanes] = {};
                rs_store_n(kept, value, lanes);
                value = rs_load(kept);
            }
            P::put(hidden, stride, row + r, position + v, value);
        }
    }
}

// Columns [start, start + length) of the intermediate layer, written at positions from 0 of `hidden`.
template <class P, int kind>
RS_INLINE void gate_columns(const typename P::Activation* acts, const Weights<P>& w, const GatedMlp& mlp, long rows,
                            long start, long length, typename P::Activation* hidden, long hidden_stride,
                            long hidden_position, Prefetch after) {
    alignas(64) float gate[P::kRowBlock * kPanel], up[P::kRowBlock * kPanel];
    long segment = segment_length(w.k), stride = P::stride(w.k);
    bool one_segment = w.k <= segment;
    for (long column = start; column < start + length; column += kPanel) {
        long p = column / kPanel;
        Prefetch next = column + kPanel < start + length ? w.ahead(2 * p + 2, 0, 2 * w.padded_k) : after;
        next = next.over(2 * P::steps(rows, w.k));
        for (long row = 0; row < rows; row += P::kRowBlock) {
            long block_rows = smaller(P::kRowBlock, rows - row);
            for (int half = 0; half < 2; ++half) {
                float* out = half ? up : gate;
                if (one_segment) {
                    P::block(P::at(acts, stride, row, 0), stride, w.at(2 * p + half, 0), w.k, (int)block_rows, out,
                             kPanel, next);
                    continue;
                }
                alignas(64) float sums[P::kRowBlock * kPanel];
                for (long k0 = 0; k0 < w.k; k0 += segment) {
                    P::block(P::at(acts, stride, row, k0), stride, w.at(2 * p + half, k0), smaller(segment, w.k - k0),
                             (int)block_rows, sums, kPanel, next);
                    add_block(sums, out, kPanel, block_rows, kPanel, k0 == 0);
                }
            }
            gate_block<P, kind>(gate, up, mlp, column, block_rows, hidden, hidden_stride, row,
                                hidden_position + column - start);
        }
    }
}

// A thread takes a segment of the intermediate layer, computes it and at once its share of every output: the
// intermediate activations never leave its cache, and there is no barrier in between.
template <class P, int kind>
void gated_mlp_split(const typename P::Activation* acts, const Weights<P>& gate_up, const Weights<P>& down,
                     const GatedMlp& mlp, float* out, long rows, int num_threads) {
    static thread_local Scratch scratch;
    long length = segment_length(down.k), segments = num_segments(down.k), panels = round_up(mlp.n, kPanel) / kPanel;
    long padded_rows = round_up(rows, P::kRowTile), width = panels * kPanel, stride = P::stride(length);
    float* partials = scratch.get<float>(segments * padded_rows * width);
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local Scratch own;
        typename P::Activation* hidden = own.get<typename P::Activation>(padded_rows * length + kPanel * 64);
        P::begin();
#pragma omp for schedule(dynamic)
        for (long s = 0; s < segments; ++s) {
            long start = s * length, k = smaller(length, down.k - start);
            gate_columns<P, kind>(acts, gate_up, mlp, rows, start, k, hidden, stride, 0, down.ahead(0, start, k));
            for (long p = 0; p < panels; ++p) {
                Prefetch next = p + 1 < panels ? down.ahead(p + 1, start, k)
                                : s + 1 < segments ? gate_up.ahead(2 * (start + length) / kPanel, 0, 2 * gate_up.padded_k)
                                                   : Prefetch{};
                next = next.over(P::steps(rows, k));
                for (long row = 0; row < rows; row += P::kRowBlock)
                    P::block(P::at(hidden, stride, row, 0), stride, down.at(p, start), k,
                             (int)smaller(P::kRowBlock, rows - row),
                             partials + (s * padded_rows + row) * width + p * kPanel, width, next);
            }
        }
        P::end();
    }
    sum_partials(partials, segments, padded_rows, width, mlp.down_bias, out, rows, mlp.n, num_threads);
}

// Partial sums would be too large: the whole intermediate layer first, then the second projection. Same bits.
template <class P, int kind>
void gated_mlp_whole(const typename P::Activation* acts, const Weights<P>& gate_up, const Weights<P>& down,
                     const GatedMlp& mlp, float* out, long rows, int num_threads) {
    static thread_local Scratch scratch;
    long stride = P::stride(round_up(down.k, kPanel));
    typename P::Activation* hidden =
        scratch.get<typename P::Activation>(round_up(rows, P::kRowTile) * round_up(down.k, kPanel) + kPanel * 64);
#pragma omp parallel num_threads(num_threads)
    {
        P::begin();
#pragma omp for schedule(dynamic)
        for (long column = 0; column < mlp.intermediate; column += kPanel)
            gate_columns<P, kind>(acts, gate_up, mlp, rows, column, kPanel, hidden, stride, column, Prefetch{});
        P::end();
    }
    linear_packed<P>(hidden, stride, down, mlp.down_bias, out, rows, mlp.n, num_threads);
}

template <class P, int kind>
void gated_mlp_kind(const float* x, const void* gate_up, const void* down, const GatedMlp& mlp, float* out, long rows,
                    int num_threads) {
    static thread_local Scratch scratch;
    Weights<P> first(gate_up, mlp.hidden), second(down, mlp.intermediate);
    for (long row = 0; row < rows; row += kRowChunk) {
        long chunk = smaller(kRowChunk, rows - row);
        const typename P::Activation* acts = P::pack(scratch, x + row * mlp.hidden, chunk, mlp.hidden, num_threads);
        bool small = num_segments(mlp.intermediate) * chunk * mlp.n <= kMaxPartials;
        (small ? gated_mlp_split<P, kind> : gated_mlp_whole<P, kind>)(acts, first, second, mlp, out + row * mlp.n, chunk,
                                                                      num_threads);
    }
}

// out = (act(x @ gate^T) * (x @ up^T)) @ down^T; gate and up packed as alternating panels.
template <class P>
void gated_mlp(const float* x, const void* gate_up, const void* down, const GatedMlp& mlp, float* out, long rows,
               int activation, int num_threads) {
    switch (activation) {
        case kSilu: return gated_mlp_kind<P, kSilu>(x, gate_up, down, mlp, out, rows, num_threads);
        case kGeluTanh: return gated_mlp_kind<P, kGeluTanh>(x, gate_up, down, mlp, out, rows, num_threads);
        case kGelu: return gated_mlp_kind<P, kGelu>(x, gate_up, down, mlp, out, rows, num_threads);
        default: return gated_mlp_kind<P, kRelu>(x, gate_up, down, mlp, out, rows, num_threads);
    }
}

}  // namespace

#define RS_EXPORT_LINEAR(linear_name, mlp_name, POLICY)                                                               \
    RS_EXPORT void RS_NAME(linear_name)(const float* x, const void* packed, const float* bias, float* out, long rows, \
                                        long k, long n, int num_threads) {                                            \
        linear<POLICY>(x, packed, bias, out, rows, k, n, num_threads);                                                \
    }                                                                                                                 \
    RS_EXPORT void RS_NAME(mlp_name)(const float* x, const void* gate_up, const float* gate_bias,                     \
                                     const float* up_bias, const void* down, const float* down_bias, float* out,      \
                                     long rows, long hidden, long intermediate, long n, int activation,               \
                                     int num_threads) {                                                               \
        GatedMlp mlp{gate_bias, up_bias, down_bias, hidden, intermediate, n};                                         \
        gated_mlp<POLICY>(x, gate_up, down, mlp, out, rows, activation, num_threads);                                 \
    }
