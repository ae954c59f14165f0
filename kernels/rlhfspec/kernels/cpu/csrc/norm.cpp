// Root-mean-square normalisation of rows.
#include "norm.h"

#include "pool.h"

namespace {

// Sum of squares of one row: lane l adds x[l], x[l+16], ... in order, then one fixed tree over the lanes.
RS_INLINE float sum_of_squares(const float* x, long width) {
    f32x16 sum = rs_zero();
    long i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        f32x16 value = rs_load(x + i);
        sum = rs_fma(value, value, sum);
    }
    if (i < width) {
        f32x16 value = rs_load_n(x + i, (int)(width - i));
        sum = rs_fma(value, value, sum);
    }
    return rs_hsum(sum);
}

RS_INLINE f32x16 scaled(f32x16 x, f32x16 scale, f32x16 weight, bool add_one) {
    if (add_one) weight = rs_add(weight, rs_set1(1.0f));
    return rs_mul(rs_mul(x, scale), weight);
}

}  // namespace

RS_EXPORT void RS_NAME(rms_norm)(const float* x, const float* weight, float* out, long num_rows, long width, float eps,
                                 int add_one, int num_threads) {
    if (num_rows * width < 65536) num_threads = 1;  // waking a thread costs more than this much work
    rs_parallel_for(num_rows, num_threads, [=](long row) {
        const float* from = x + row * width;
        float* to = out + row * width;
        float mean = sum_of_squares(from, width) / (float)width;
        f32x16 scale = rs_set1(1.0f / __builtin_sqrtf(mean + eps));
        long i = 0;
        for (; i + kLanes <= width; i += kLanes)
            rs_store(to + i, scaled(rs_load(from + i), scale, rs_load(weight + i), add_one));
        if (i < width) {
            int rest = (int)(width - i);
            rs_store_n(to + i, scaled(rs_load_n(from + i, rest), scale, rs_load_n(weight + i, rest), add_one), rest);
        }
    });
}
