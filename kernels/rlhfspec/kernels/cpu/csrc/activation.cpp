// Activations by themselves, for models that are not of the gated shape. Every lane is computed alike wherever it
// stands in its row, so a row's result does not depend on the width or on its neighbours.
#include "activation.h"
#include "pool.h"

namespace {

template <int kind>
void activate(const float* x, float* out, long count, int num_threads) {
    constexpr long kBlock = 4096;
    rs_parallel_for((count + kBlock - 1) / kBlock, num_threads, [=](long block) {
        long i = block * kBlock, end = i + kBlock < count ? i + kBlock : count;
        for (; i + kLanes <= end; i += kLanes) rs_store(out + i, rs_activate<kind>(rs_load(x + i)));
        if (i < end) rs_store_n(out + i, rs_activate<kind>(rs_load_n(x + i, (int)(end - i))), (int)(end - i));
    });
}

}  // namespace

RS_EXPORT void RS_NAME(activation)(const float* x, float* out, long count, int kind, int num_threads) {
    if (count < 32768) num_threads = 1;  // waking a thread costs more than this much work
    switch (kind) {
        case kSilu: return activate<kSilu>(x, out, count, num_threads);
        case kGeluTanh: return activate<kGeluTanh>(x, out, count, num_threads);
        case kGelu: return activate<kGelu>(x, out, count, num_threads);
        default: return activate<kRelu>(x, out, count, num_threads);
    }
}
