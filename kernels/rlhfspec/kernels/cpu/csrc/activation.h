// Activation functions of 16 lanes. The numbers are the contract with linear.py (ACTIVATIONS).
#pragma once

#include "simd.h"

namespace {

enum Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3 };

// x * sigmoid(z) = x / (1 + e^-z), to ~2 ulp. This is most of the time of a gated MLP's activation, so the exponential
// is a shorter one than rs_exp: 1 + e^-z needs no subnormals, and e^-z / 2 is finite until 1 + e^-z should not be.
RS_INLINE f32x16 rs_gated_by_sigmoid(f32x16 x, f32x16 z) {
    const f32x16 shift = rs_set1(12582911.0f);  // 1.5 * 2^23 - 1: adding it rounds, and leaves n - 1 in the low bits
    z = rs_max(rs_set1(-89.0f), z);             // the operand order keeps a NaN
    z = rs_min(rs_set1(60.0f), z);
    f32x16 shifted = rs_fma(z, rs_set1(-1.44269504088896341f), shift);
    f32x16 n = rs_sub(shifted, shift);
    f32x16 r = rs_fma(n, rs_set1(0.693147180559945f), z);  // e^-z = 2^n e^-r, |r| <= ln(2) / 2
    f32x16 p = rs_set1(1.383679358e-3f);
    p = rs_fma(p, r, rs_set1(-8.374857220e-3f));
    p = rs_fma(p, r, rs_set1(4.166822870e-2f));
    p = rs_fma(p, r, rs_set1(-1.666641968e-1f));
    p = rs_fma(p, r, rs_set1(4.999999206e-1f));
    p = rs_fma(p, r, rs_set1(-1.000000036f));
    p = rs_fma(p, r, rs_set1(1.000000001f));
    f32x16 half = rs_scale_by_shifted(p, shifted);
    return rs_div(x, rs_fma(half, rs_set1(2.0f), rs_set1(1.0f)));
}

// Error function, at most ~1 ulp off: a polynomial near zero, 1 - e^polynomial further out.
RS_INLINE f32x16 rs_erf(f32x16 x) {
    f32x16 t = rs_abs(x), s = rs_mul(x, x);
    f32x16 far = rs_fma(rs_set1(-1.72853470e-5f), t, rs_set1(3.83197126e-4f));
    far = rs_fma(far, s, rs_fma(rs_set1(-3.88396438e-3f), t, rs_set1(2.42546219e-2f)));
    far = rs_fma(far, t, rs_set1(-1.06777877e-1f));
    far = rs_fma(far, t, rs_set1(-6.34846687e-1f));
    far = rs_fma(far, t, rs_set1(-1.28717512e-1f));
    far = rs_fma(far, t, rs_sub(rs_zero(), t));
    far = rs_copysign(rs_sub(rs_set1(1.0f), rs_exp(far)), x);
    f32x16 near = rs_set1(-5.96761703e-4f);
    near = rs_fma(near, s, rs_set1(4.99119423e-3f));
    near = rs_fma(near, s, rs_set1(-2.67681349e-2f));
    near = rs_fma(near, s, rs_set1(1.12819925e-1f));
    near = rs_fma(near, s, rs_set1(-3.76125336e-1f));
    near = rs_fma(near, s, rs_set1(1.28379166e-1f));
    near = rs_fma(near, x, x);
    return rs_select_less(rs_set1(0.927734375f), t, far, near);
}

template <int kind>
RS_INLINE f32x16 rs_activate(f32x16 x) {
    if (kind == kSilu) return rs_gated_by_sigmoid(x, x);
    if (kind == kGeluTanh) {  // 0.5 x (1 + tanh y) = x sigmoid(2 y), y = sqrt(2/pi) (x + 0.044715 x^3)
        f32x16 cubic = rs_fma(rs_mul(rs_mul(x, x), x), rs_set1(0.044715f), x);
        return rs_gated_by_sigmoid(x, rs_mul(cubic, rs_set1(1.5957691216057308f)));
    }
    if (kind == kGelu) {
        f32x16 half = rs_mul(x, rs_set1(0.5f));
        return rs_fma(half, rs_erf(rs_mul(x, rs_set1(0.70710678118654752f))), half);
    }
    return rs_max(rs_zero(), x);  // the operand order keeps a NaN
}

}  // namespace
