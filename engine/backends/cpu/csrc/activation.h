// The activations of `activate` in engine/model/activation.py, of 16 floats.
//
// Sources include this file where they have chosen the instructions, after their Floats.

// Return e^x within 2 ulp: x = n ln(2) + r with |r| < 0.35, and the Taylor series of e^r, whose first term left out is
// below 6e-9. Beyond the range of fp32 it is 0 or infinity; NaN stays NaN.
static inline Floats exp_of(Floats x) {
    x = min(broadcast(89.f), max(broadcast(-104.f), x));
    const Floats n = whole(x * broadcast(1.44269504f));
    Floats r = fnma(n, broadcast(0.693359375f), x);
    r = fnma(n, broadcast(-2.12194440e-4f), r);
    Floats y = broadcast(1.f / 5040);
    y = fma(y, r, broadcast(1.f / 720));
    y = fma(y, r, broadcast(1.f / 120));
    y = fma(y, r, broadcast(1.f / 24));
    y = fma(y, r, broadcast(1.f / 6));
    y = fma(y, r, broadcast(0.5f));
    y = fma(y, r, broadcast(1.f));
    y = fma(y, r, broadcast(1.f));
    return times_power(y, n);
}

// Return e^m - 1 - x for m <= 0, near x or equal to it: near 0 by the Taylor series of e^m, whose first term left out is
// below 5e-8 of the sum, as the difference would cancel.
static inline Floats expm1_minus(Floats m, Floats x) {
    Floats y = broadcast(1.f / 40320);
    y = fma(y, m, broadcast(1.f / 5040));
    y = fma(y, m, broadcast(1.f / 720));
    y = fma(y, m, broadcast(1.f / 120));
    y = fma(y, m, broadcast(1.f / 24));
    y = fma(y, m, broadcast(1.f / 6));
    y = fma(y, m, broadcast(0.5f));
    const Floats far = exp_of(m) - broadcast(1.f) - x;
    return where_above(m, broadcast(-0.5f), fma(m * m, y, m - x), far);
}

// Return x / (1 + e^-s).
static inline Floats times_sigmoid(Floats x, Floats s) { return x / (broadcast(1.f) + exp_of(broadcast(0.f) - s)); }

// Return ln(1 + e^x), which is max(x, 0) + ln(1 + t) for t = e^-|x|, within 4 ulp: ln(1 + t) = 2 artanh(t / (2 + t)) by
// its Taylor series, whose first term left out is below 2e-9 of it.
static inline Floats softplus(Floats x) {
    const Floats t = exp_of(broadcast(0.f) - magnitude(x)), s = t / (broadcast(2.f) + t), square = s * s;
    Floats y = broadcast(1.f / 15);
    y = fma(y, square, broadcast(1.f / 13));
    y = fma(y, square, broadcast(1.f / 11));
    y = fma(y, square, broadcast(1.f / 9));
    y = fma(y, square, broadcast(1.f / 7));
    y = fma(y, square, broadcast(1.f / 5));
    y = fma(y, square, broadcast(1.f / 3));
    y = fma(y, square, broadcast(1.f));
    return fma(s + s, y, max(broadcast(0.f), x));  // NaN, the second operand, stays NaN
}

// Return erfc(z) for z >= 0 within 2e-7 of its value, up to the rounding of z^2 (Press et al., Numerical Recipes in C,
// 2nd edition, section 6.2).
static inline Floats erfc_of(Floats z) {
    const float coefficients[] = {-0.82215223f, 1.48851587f,  -1.13520398f, 0.27886807f, -0.18628806f,
                                  0.09678418f,  0.37409196f,  1.00002368f,  -1.26551223f};
    const Floats one = broadcast(1.f);
    const Floats t = one / fma(z, broadcast(0.5f), one);
    Floats y = broadcast(0.17087277f);
    UNROLL for (int i = 0; i < 9; i++) y = fma(y, t, broadcast(coefficients[i]));
    return t * exp_of(fnma(z, z, y));
}

template <int ACTIVATION>
static inline Floats activate(Floats x) {
    const Floats zero = broadcast(0.f), one = broadcast(1.f);
    if constexpr (ACTIVATION == GELU) {
        const Floats tail = broadcast(0.5f) * erfc_of(magnitude(x) * broadcast(0.70710678f));
        return x * where_above(x, zero, one - tail, tail);
    } else if constexpr (ACTIVATION == GELU_TANH) {  // 1 + tanh(u) = 2 / (1 + e^-2u)
        const Floats u = fma(x * (x * x), broadcast(0.044715f), x);
        return times_sigmoid(x, u * broadcast(1.59576912f));
    } else if constexpr (ACTIVATION == GELU_SIGMOID) {
        return times_sigmoid(x, x * broadcast(1.702f));
    } else if constexpr (ACTIVATION == RELU) {
        return max(zero, x);
    } else if constexpr (ACTIVATION == RELU2) {
        const Floats y = max(zero, x);
        return y * y;
    } else if constexpr (ACTIVATION == SILU) {
        return times_sigmoid(x, x);
    } else if constexpr (ACTIVATION == TANH) {  // near 0 the difference would cancel: there its series
        const Floats square = x * x, far = one - broadcast(2.f) / (one + exp_of(x + x));
        Floats y = fma(square, broadcast(-17.f / 315), broadcast(2.f / 15));
        y = fma(y, square, broadcast(-1.f / 3));
        return where_above(broadcast(0.1f), magnitude(x), fma(y * square, x, x), far);
    } else {
        return x;
    }
}
