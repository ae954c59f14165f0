// Gated MLPs: out = (act(x @ gate^T) * (x @ up^T)) @ down^T, with the bits of the three linear layers by themselves.
//
// Gate and up are packed as one matrix in which 16 outputs of each take turns, so that one block holds both.
#pragma once

#include "linear.h"

namespace {

struct GatedMlp {
    const float* gate_bias;  // or null
    const float* up_bias;    // or null
    const float* down_bias;  // or null
    long hidden;             // inputs
    long intermediate;
    long n;  // outputs
};

// act(gate) * up for one block, done a few vectors at a time while the next block is multiplied: the tile unit and the
// vector units then work at once.
template <class P, int kind>
struct GateEpilogue {
    static constexpr long kGroups = P::kPanel / 32;  // of 16 columns per row

    Prefetch next;
    const GatedMlp* mlp = nullptr;
    const float* block = nullptr;  // [rows, kPanel]: 16 of gate, 16 of up, ...
    typename P::Activation* hidden = nullptr;
    long stride = 0, row = 0, position = 0, column = 0;
    long done = 0, total = 0, per_step = 0;

    RS_ALWAYS void step() {
        next.step();
        for (long i = 0; i < per_step && done < total; ++i) unit();
    }
    void finish() {
        while (done < total) unit();
    }
    RS_ALWAYS void unit() {
        long r = done / kGroups, c = done % kGroups * kLanes;
        f32x16 gate = rs_load(block + done * 32), up = rs_load(block + done * 32 + kLanes);
        if (__builtin_expect(mlp->gate_bias != nullptr, 0))
            gate = rs_add(gate, bias(mlp->gate_bias, c)), up = rs_add(up, bias(mlp->up_bias, c));
        f32x16 value = rs_mul(rs_activate<kind>(gate), up);
        if (__builtin_expect(column + c + kLanes > mlp->intermediate, 0)) value = without_padding(value, c);
        P::put(hidden, stride, row + r, position + c, value);
        ++done;
    }
    int lanes_at(long c) const {
        long left = mlp->intermediate - column - c;
        return (int)(left < 0 ? 0 : left > kLanes ? kLanes : left);
    }
    f32x16 bias(const float* values, long c) const { return rs_load_n(values + column + c, lanes_at(c)); }
    // Padding stays zero even if the row holds infinities.
    f32x16 without_padding(f32x16 value, long c) const {
        alignas(64) float lanes[kLanes] = {};
        rs_store_n(lanes, value, lanes_at(c));
        return rs_load(lanes);
    }
};

// One panel for one block of rows, all segments of k summed.
template <class P, class Side>
RS_INLINE void whole_block(const typename P::Activation* acts, const Weights<P>& w, long panel, long row, long rows,
                           float* out, Side& side) {
    long segment = segment_length(w.k), stride = P::stride(w.k);
    P::block(P::at(acts, stride, row, 0), stride, w.at(panel, 0), smaller(segment, w.k), (int)rows, out, P::kPanel,
             false, side);
    for (long k = segment; k < w.k; k += segment) {
        alignas(64) float sums[P::kRowBlock * P::kPanel];
        P::block(P::at(acts, stride, row, k), stride, w.at(panel, k), smaller(segment, w.k - k), (int)rows, sums,
                 P::kPanel, false, side);
        add_block(sums, P::kPanel, out, P::kPanel, rows, P::kPanel, false);
    }
}

// Columns [start, start + length) of the intermediate layer, written from `position` of `hidden`; meanwhile `after` is
// fetched, which the caller needs next.
template <class P, int kind>
void gate_columns(const typename P::Activation* acts, const Weights<P>& w, const GatedMlp& mlp, long rows, long start,
                  long length, typename P::Activation* hidden, long hidden_stride, long position, Prefetch after) {
    constexpr long kColumns = P::kPanel / 2;  // of the intermediate layer per panel
    alignas(64) float scratch[2][P::kRowBlock * P::kPanel];  // two blocks take turns
    GateEpilogue<P, kind> side;
    side.mlp = &mlp, side.hidden = hidden, side.stride = hidden_stride;
    int turn = 0;
    for (long column = start; column < start + length; column += kColumns) {
        long panel = column / kColumns;
        bool last = column + kColumns >= start + length;
        side.next = (last ? after : w.ahead(panel + 1, 0, w.padded_k)).over(P::steps(rows, w.k));
        for (long row = 0; row < rows; row += P::kRowBlock, turn ^= 1) {
            long block_rows = smaller(P::kRowBlock, rows - row), steps = P::steps(block_rows, w.k);
            side.per_step = (side.total + steps - 1) / steps;
            whole_block<P>(acts, w, panel, row, block_rows, scratch[turn], side);
            side.finish();
            side.block = scratch[turn], side.row = row, side.column = column;
            side.position = position + column - start;
            side.done = 0, side.total = block_rows * GateEpilogue<P, kind>::kGroups;
        }
    }
    side.finish();
}

// A thread takes a segment of the intermediate layer, computes it piece by piece and at once its share of every output:
// the intermediate activations never leave its cache, and there is no barrier in between.
template <class P, int kind>
void gated_mlp_split(const typename P::Activation* acts, const Weights<P>& gate_up, const Weights<P>& down,
                     const GatedMlp& mlp, float* out, long rows, int num_threads) {
    static thread_local Scratch scratch;
    long length = segment_length(down.k), segments = num_segments(down.k);
    long panels = round_up(mlp.n, P::kPanel) / P::kPanel, width = panels * P::kPanel;
    long padded_rows = round_up(rows, P::kRowTile), stride = P::stride(kHiddenBlock);
    float* partials = scratch.get<float>(segments * padded_rows * width);
    rs_parallel(segments, num_threads, [=](RsItems& items) {
        static thread_local Scratch own;
        typename P::Activation* hidden = own.get<typename P::Activation>(padded_rows / P::kRowTile * stride);
        P::begin();
        for (long s; (s = items.take()) >= 0;) {
            float* sums = partials + s * padded_rows * width;
            long end = smaller(down.k, (s + 1) * length);
            for (long start = s * length; start < end; start += kHiddenBlock) {
                long k = smaller(kHiddenBlock, end - start), padded_k = round_up(k, kPadOutputs);
                gate_columns<P, kind>(acts, gate_up, mlp, rows, start, padded_k, hidden, stride, 0,
                                      down.ahead(0, start, k));
                for (long p = 0; p < panels; ++p) {
                    Prefetch next;
                    if (p + 1 < panels) next = down.ahead(p + 1, start, k);
                    else if (start + k < down.k) next = gate_up.ahead(2 * (start + k) / P::kPanel, 0, gate_up.padded_k);
                    next = next.over(P::steps(rows, k));
                    for (long row = 0; row < rows; row += P::kRowBlock)
                        P::block(P::at(hidden, stride, row, 0), stride, down.at(p, start), k,
                                 (int)smaller(P::kRowBlock, rows - row), sums + row * width + p * P::kPanel, width,
                                 start > s * length, next);
                }
            }
        }
        P::end();
    });
    sum_partials(partials, segments, padded_rows, width, mlp.down_bias, out, rows, mlp.n, num_threads);
}

// Partial sums would be too large: the whole intermediate layer first, then the second projection. Same bits.
template <class P, int kind>
void gated_mlp_whole(const typename P::Activation* acts, const Weights<P>& gate_up, const Weights<P>& down,
                     const GatedMlp& mlp, float* out, long rows, int num_threads) {
    static thread_local Scratch scratch;
    long padded_k = round_up(down.k, kPadOutputs), stride = P::stride(padded_k);
    typename P::Activation* hidden = scratch.get<typename P::Activation>(round_up(rows, P::kRowTile) / P::kRowTile * stride);
    rs_parallel(padded_k / kPadOutputs, num_threads, [=](RsItems& items) {
        P::begin();
        for (long item; (item = items.take()) >= 0;) {
            long column = item * kPadOutputs;
            gate_columns<P, kind>(acts, gate_up, mlp, rows, column, kPadOutputs, hidden, stride, column, Prefetch{});
        }
        P::end();
    });
    linear_packed<P>(hidden, stride, down, mlp.down_bias, out, rows, mlp.n, num_threads);
}

template <class P, int kind>
void gated_mlp_kind(const float* x, const void* gate_up, const void* down, const GatedMlp& mlp, float* out, long rows,
                    int num_threads) {
    static thread_local Scratch scratch;
    Weights<P> first(gate_up, mlp.hidden), second(down, mlp.intermediate);
    num_threads = useful_threads(rows, mlp.intermediate * (2 * mlp.hidden + mlp.n), num_threads);
    for (long row = 0; row < rows; row += kRowChunk) {
        long chunk = smaller(kRowChunk, rows - row);
        const typename P::Activation* acts = P::pack(scratch, x + row * mlp.hidden, chunk, mlp.hidden, num_threads);
        bool small = num_segments(mlp.intermediate) * chunk * mlp.n <= kMaxPartials;
        auto run = small ? gated_mlp_split<P, kind> : gated_mlp_whole<P, kind>;
        run(acts, first, second, mlp, out + row * mlp.n, chunk, num_threads);
    }
}

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
