// A whole decoder in one call: the same kernels that the layers call one by one, without Python between them.
//
// It knows one shape of layer: norm, q/k/v, (norm of q and k), rotary by halves, attention, o, residual, norm, gated MLP,
// residual. Python recognises the shape and compares the bits with the layers' own before using it. The arithmetic
// (fma, amx, ...) comes in as function pointers.
#include "decoder.h"

#include "norm.h"
#include "scratch.h"

namespace {

using LinearFn = void (*)(const float*, const void*, const float*, float*, long, long, long, int);
using GatedMlpFn = void (*)(const float*, const void*, const float*, const float*, const void*, const float*, float*, long,
                            long, long, long, int, int);

struct Linear {
    LinearFn multiply;
    const void* packed;
    const float* bias;
    long inputs, outputs;
};

struct Norm {
    const float* weight;  // null: no such norm
    float eps;
    int add_one;
};

struct GatedMlp {
    GatedMlpFn run;
    const void* gate_up;
    const float *gate_bias, *up_bias;
    const void* down;
    const float* down_bias;
    long hidden, intermediate, outputs, activation;
};

struct Layer {
    Norm input_norm, query_norm, key_norm, mlp_norm;
    Linear query, key, value, output;
    GatedMlp mlp;
    long sliding_window;
};

// Mirrors _DecoderStruct of decoder.py.
struct Decoder {
    const Layer* layers;
    const float* embedding;      // [V, hidden]
    const float *cosine, *sine;  // [positions, head_dim]
    Norm final_norm;
    Linear head;
    char* kv;
    const long* taps;  // numbers of the layers, ascending, whose input is told
    long num_taps;
    long num_layers, kv_layers, hidden, num_heads, num_kv_heads, head_dim, block_size, kv_is_bf16, split;
    float scale;
};

void copy_row(const float* from, float* to, long width) {
    __builtin_memcpy(to, from, (size_t)width * sizeof(float));
}

// x += y, as the residual of a layer.
void add_to(float* x, const float* y, long count) {
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) rs_store(x + i, rs_add(rs_load(x + i), rs_load(y + i)));
    for (; i < count; i++) x[i] = x[i] + y[i];
}

// q * cos + rotate_half(q) * sin, in the order of operations of Hugging Face: two products, one sum, no fma.
void rotate(float* x, long heads, long dim, const float* cosine, const float* sine) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim) {
        for (long i = 0; i < half; i++) {
            float low = x[i], high = x[i + half];
            x[i] = low * cosine[i] + (-high) * sine[i];
            x[i + half] = high * cosine[i + half] + low * sine[i + half];
        }
    }
}

void apply(const Linear& layer, const float* x, float* out, long rows, int threads) {
    layer.multiply(x, layer.packed, layer.bias, out, rows, layer.inputs, layer.outputs, threads);
}

void apply(const Norm& norm, const float* x, float* out, long rows, long width, int threads) {
    RS_NAME(rms_norm)(x, norm.weight, out, rows, width, norm.eps, norm.add_one, threads);
}

struct Activations {
    float *hidden, *normed, *query, *key, *value, *attended, *update;
};

void attend(const Decoder& d, const Layer& layer, long number, const Batch* batch, const long* positions,
            const Activations& a, long rows, int threads) {
    const long dim = d.head_dim, query_width = d.num_heads * dim, key_width = d.num_kv_heads * dim;
    apply(layer.query, a.normed, a.query, rows, threads);
    apply(layer.key, a.normed, a.key, rows, threads);
    apply(layer.value, a.normed, a.value, rows, threads);
    if (layer.query_norm.weight) apply(layer.query_norm, a.query, a.query, rows * d.num_heads, dim, threads);
    if (layer.key_norm.weight) apply(layer.key_norm, a.key, a.key, rows * d.num_kv_heads, dim, threads);
    for (long r = 0; r < rows; r++) {
        const float *cosine = d.cosine + positions[r] * dim, *sine = d.sine + positions[r] * dim;
        rotate(a.query + r * query_width, d.num_heads, dim, cosine, sine);
        rotate(a.key + r * key_width, d.num_kv_heads, dim, cosine, sine);
    }
    const long plane = d.block_size * key_width;
    char* kv = d.kv + number * 2 * plane * (d.kv_is_bf16 ? 2 : 4);
    AttentionCall call{batch, {a.query, query_width, dim}, {a.key, key_width, dim}, {a.value, key_width, dim}, kv,
                       d.kv_is_bf16, d.kv_layers * 2 * plane, plane, d.block_size, d.num_heads, d.num_kv_heads, dim,
                       layer.sliding_window, 0, d.split, nullptr, a.attended, threads, d.scale, 0.0f};
    RS_NAME(tree_attention)(&call);
    apply(layer.output, a.attended, a.update, rows, threads);
}

}  // namespace

RS_EXPORT void RS_NAME(decoder_forward)(const void* decoder, const Batch* batch, const long* tokens,
                                        const long* positions, long rows, const long* wanted, long num_wanted,
                                        float* logits, float* tapped, int threads) {
    const Decoder& d = *(const Decoder*)decoder;
    const long query_width = d.num_heads * d.head_dim, key_width = d.num_kv_heads * d.head_dim, width = d.hidden;
    static thread_local Scratch scratch;
    float* next = scratch.get<float>(rows * (3 * width + 2 * query_width + 2 * key_width) + 7 * kLanes);
    auto take = [&](long per_row) {
        float* start = next;
        next += (rows * per_row + kLanes - 1) / kLanes * kLanes;
        return start;
    };
    Activations a{take(width), take(width), take(query_width), take(key_width), take(key_width), take(query_width),
                  take(width)};
    for (long r = 0; r < rows; r++) copy_row(d.embedding + tokens[r] * width, a.hidden + r * width, width);
    for (long number = 0; number < d.num_layers; number++) {
        const Layer& layer = d.layers[number];
        for (long t = 0; t < d.num_taps; t++) {  // tapped [rows, num_taps, hidden]
            if (d.taps[t] != number) continue;
            for (long r = 0; r < rows; r++) copy_row(a.hidden + r * width, tapped + (r * d.num_taps + t) * width, width);
        }
        apply(layer.input_norm, a.hidden, a.normed, rows, width, threads);
        attend(d, layer, number, batch, positions, a, rows, threads);
        add_to(a.hidden, a.update, rows * width);
        apply(layer.mlp_norm, a.hidden, a.normed, rows, width, threads);
        const GatedMlp& m = layer.mlp;
        m.run(a.normed, m.gate_up, m.gate_bias, m.up_bias, m.down, m.down_bias, a.update, rows, m.hidden, m.intermediate,
              m.outputs, (int)m.activation, threads);
        add_to(a.hidden, a.update, rows * width);
    }
    for (long i = 0; i < num_wanted; i++) copy_row(a.hidden + wanted[i] * width, a.update + i * width, width);
    apply(d.final_norm, a.update, a.normed, num_wanted, width, threads);
    apply(d.head, a.normed, logits, num_wanted, threads);
}

// What Python fills in must be as long as what is read here.
RS_EXPORT void RS_NAME(decoder_sizes)(long* sizes) {
    long here[] = {sizeof(Decoder), sizeof(Layer)};
    sizes[0] = here[0], sizes[1] = here[1];
}
