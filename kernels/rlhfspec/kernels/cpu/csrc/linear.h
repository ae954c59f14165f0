// Linear layers and gated MLPs whose every output is a fixed function of its own row.
//
// The order of summation, for all arithmetics, all numbers of rows, threads and both of the layers below:
//     out[r, n] = ((segment_0 + segment_1) + segment_2) + ... + bias[n]
// where a segment is one chain over its k in ascending order, starting from zero, and the length of a segment depends
// on K alone (segment_length). Segments are what lets threads share a layer with few outputs and a long K.
//
// The arithmetic is a policy P (see linear.cpp, linear_amx.cpp, linear_avx512bf16.cpp):
//     P::Weight, P::Activation     stored types
//     P::kPanel                    outputs per panel of packed weights
//     P::kBytes                    bytes of a panel's weights of one k
//     P::kRowTile                  rows come in multiples of this; buffers are padded to it
//     P::kRowBlock                 rows per call of block()
//     P::kPadK                     k is padded with zeros to a multiple of this
//     P::begin(), P::end()         around each thread's work
//     P::at(acts, stride, row, k)  address of an activation; P::stride(k) for a matrix of k columns
//     P::pack(...)                 float rows -> activations
//     P::put(acts, stride, row, k, vector)   16 activations
//     P::block(..., carry, side)   out[rows, kPanel] = the chain over k of one panel, begun at zero or, carrying on, at
//                                  what out holds; calls side.step() as it goes, P::steps(rows, k) times in all
// Weights are panels of kPanel outputs: panel p, position k begins at byte (p * padded K + k) * kBytes. Outputs are
// padded to a multiple of 64.
#pragma once

#include "activation.h"
#include "pool.h"
#include "scratch.h"

namespace {

constexpr long kPadOutputs = 64;
constexpr long kRowChunk = 256;          // rows whose activations are held at once
constexpr long kHiddenBlock = 512;       // columns of an MLP's intermediate layer that a thread holds at once
constexpr long kMaxPartials = 8L << 20;  // floats: partial sums of a split K may take 32 MB

RS_INLINE long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }
RS_INLINE long smaller(long a, long b) { return a < b ? a : b; }

// A function of K alone: it is part of the law.
RS_INLINE long segment_length(long k) {
    long length = round_up((k + 15) / 16, 64);
    return length < 256 ? 256 : length;
}
RS_INLINE long num_segments(long k) { return (k + segment_length(k) - 1) / segment_length(k); }

// Waking a thread costs some microseconds: how many are worth it for this many rows and weights.
RS_INLINE int useful_threads(long rows, long num_weights, int num_threads) {
    return num_weights < (1 << 17) && rows * num_weights < (1 << 21) ? 1 : num_threads;
}

// Weights needed next, fetched into the cache a few lines at a time while the present ones are multiplied.
struct Prefetch {
    const char* at = nullptr;
    const char* end = nullptr;
    long lines_per_step = 0;

    Prefetch over(long steps) const { return {at, end, (end - at + steps * 64 - 1) / (steps * 64)}; }
    RS_ALWAYS void step() {
        for (long i = 0; i < lines_per_step && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class P>
struct Weights {
    const char* data;
    long k;         // inputs
    long padded_k;  // rows of a panel

    Weights(const void* packed, long num_inputs)
        : data((const char*)packed), k(num_inputs), padded_k(round_up(num_inputs, P::kPadK)) {}
    const typename P::Weight* at(long panel, long start) const {
        return (const typename P::Weight*)(data + (panel * padded_k + start) * P::kBytes);
    }
    Prefetch ahead(long panel, long start, long length) const {
        const char* from = (const char*)at(panel, start);
        return {from, from + length * P::kBytes, 0};
    }
};

// out[rows, count] (+)= in[rows, width]
RS_INLINE void add_block(const float* in, long width, float* out, long out_stride, long rows, long count, bool first) {
    for (long r = 0; r < rows; ++r, in += width, out += out_stride) {
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
    rs_parallel_for(rows, num_threads, [=](long r) {
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
    });
}

// ---- one linear layer on packed activations ------------------------------------------------------------------------

// Few outputs, long K: threads share the segments.
template <class P>
void linear_split(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias, float* out,
                  long rows, long n, int num_threads) {
    static thread_local Scratch scratch;
    long length = segment_length(w.k), segments = num_segments(w.k), panels = round_up(n, P::kPanel) / P::kPanel;
    long padded_rows = round_up(rows, P::kRowTile), width = panels * P::kPanel;
    float* partials = scratch.get<float>(segments * padded_rows * width);
    rs_parallel(segments * panels, num_threads, [=](RsItems& items) {
        P::begin();
        for (long item; (item = items.take()) >= 0;) {
            long s = item / panels, p = item % panels, k = smaller(length, w.k - s * length);
            Prefetch next;
            if (p + 1 < panels) next = w.ahead(p + 1, s * length, k).over(P::steps(rows, k));
            for (long row = 0; row < rows; row += P::kRowBlock)
                P::block(P::at(acts, stride, row, s * length), stride, w.at(p, s * length), k,
                         (int)smaller(P::kRowBlock, rows - row),
                         partials + (s * padded_rows + row) * width + p * P::kPanel, width, false, next);
        }
        P::end();
    });
    sum_partials(partials, segments, padded_rows, width, bias, out, rows, n, num_threads);
}

// Many outputs: threads share the panels and each sums its segments in place.
template <class P>
void linear_by_panels(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias,
                      float* out, long rows, long n, int num_threads) {
    long length = segment_length(w.k), panels = round_up(n, P::kPanel) / P::kPanel;
    // Enough panels: a thread takes all rows of one, so that its weights are read once. Else share the rows as well.
    long group = panels >= 4 * num_threads ? kRowChunk : P::kRowBlock, groups = (rows + group - 1) / group;
    rs_parallel(panels * groups, num_threads, [=](RsItems& items) {
        P::begin();
        alignas(64) float sums[P::kRowBlock * P::kPanel];
        for (long item; (item = items.take()) >= 0;) {
            long p = item / groups, column = p * P::kPanel, count = smaller(P::kPanel, n - column);
            long begin = item % groups * group, end = smaller(rows, begin + group);
            for (long k0 = 0; k0 < w.k; k0 += length) {
                long k = smaller(length, w.k - k0);
                Prefetch next;  // what follows in memory: the next segment, or the next panel's first
                if (p + 1 < panels || k0 + k < w.k)
                    next = w.ahead(p, k0 + k, smaller(length, w.padded_k)).over(P::steps(end - begin, k));
                for (long row = begin; row < end; row += P::kRowBlock) {
                    long block_rows = smaller(P::kRowBlock, end - row);
                    P::block(P::at(acts, stride, row, k0), stride, w.at(p, k0), k, (int)block_rows, sums, P::kPanel,
                             false, next);
                    add_block(sums, P::kPanel, out + row * n + column, n, block_rows, count, k0 == 0);
                }
            }
            add_bias(bias ? bias + column : nullptr, out + begin * n + column, n, end - begin, count);
        }
        P::end();
    });
}

template <class P>
void linear_packed(const typename P::Activation* acts, long stride, const Weights<P>& w, const float* bias, float* out,
                   long rows, long n, int num_threads) {
    long blocks = (n + P::kPanel - 1) / P::kPanel * ((rows + P::kRowBlock - 1) / P::kRowBlock);
    bool split = num_threads > 1 && num_segments(w.k) > 1 && blocks < 4 * num_threads;
    (split ? linear_split<P> : linear_by_panels<P>)(acts, stride, w, bias, out, rows, n, num_threads);
}

// out[rows, n] = x[rows, k] @ weights[n, k]^T + bias
template <class P>
void linear(const float* x, const void* packed, const float* bias, float* out, long rows, long k, long n,
            int num_threads) {
    static thread_local Scratch scratch;
    Weights<P> w(packed, k);
    num_threads = useful_threads(rows, k * n, num_threads);
    for (long row = 0; row < rows; row += kRowChunk) {
        long chunk = smaller(kRowChunk, rows - row);
        const typename P::Activation* acts = P::pack(scratch, x + row * k, chunk, k, num_threads);
        linear_packed<P>(acts, P::stride(k), w, bias, out + row * n, chunk, n, num_threads);
    }
}

}  // namespace
