// 16 floats with AVX-512: conversions from and to bf16, and the activations of `activate` in engine/model/activation.py.
//
// Sources include this file where they have chosen the instructions.

#pragma once

enum Activation { IDENTITY, GELU, GELU_TANH, GELU_SIGMOID, RELU, RELU2, SILU, TANH, NUM_ACTIVATIONS };

static inline __m512 widened(__m256i narrow) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Round to the nearest bf16, ties to even; NaN stays NaN. AVX512-BF16 has an instruction for it, AVX-512 has not.
static inline __m256i narrowed(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}

// Return e^x within 2 ulp: x = n ln(2) + r with |r| < 0.35, and the Taylor series of e^r, whose first term left out is
// below 6e-9. Beyond the range of fp32 it is 0 or infinity; NaN stays NaN.
static inline __m512 exp_of(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(89.f), _mm512_max_ps(_mm512_set1_ps(-104.f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.f / 5040);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 720));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(y, n);
}

// Return x / (1 + e^-s).
static inline __m512 times_sigmoid(__m512 x, __m512 s) {
    const __m512 one = _mm512_set1_ps(1.f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_sub_ps(_mm512_setzero_ps(), s))));
}

// Return erfc(z) for z >= 0 within 2e-7 of its value, up to the rounding of z^2 (Press et al., Numerical Recipes in C,
// 2nd edition, section 6.2).
static inline __m512 erfc_of(__m512 z) {
    const float coefficients[] = {-0.82215223f, 1.48851587f,  -1.13520398f, 0.27886807f, -0.18628806f,
                                  0.09678418f,  0.37409196f,  1.00002368f,  -1.26551223f};
    const __m512 one = _mm512_set1_ps(1.f);
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.5f), one));
    __m512 y = _mm512_set1_ps(0.17087277f);
    UNROLL for (int i = 0; i < 9; i++) y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(coefficients[i]));
    return _mm512_mul_ps(t, exp_of(_mm512_fnmadd_ps(z, z, y)));
}

template <int ACTIVATION>
static inline __m512 activate(__m512 x) {
    const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.f);
    if constexpr (ACTIVATION == GELU) {
        const __m512 half = _mm512_set1_ps(0.5f);
        const __m512 tail = _mm512_mul_ps(half, erfc_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f))));
        const __mmask16 positive = _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ);
        return _mm512_mul_ps(x, _mm512_mask_sub_ps(tail, positive, one, tail));
    } else if constexpr (ACTIVATION == GELU_TANH) {  // 1 + tanh(u) = 2 / (1 + e^-2u)
        const __m512 cube = _mm512_mul_ps(x, _mm512_mul_ps(x, x));
        const __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
        return times_sigmoid(x, _mm512_mul_ps(u, _mm512_set1_ps(1.59576912f)));
    } else if constexpr (ACTIVATION == GELU_SIGMOID) {
        return times_sigmoid(x, _mm512_mul_ps(x, _mm512_set1_ps(1.702f)));
    } else if constexpr (ACTIVATION == RELU) {
        return _mm512_max_ps(zero, x);
    } else if constexpr (ACTIVATION == RELU2) {
        const __m512 y = _mm512_max_ps(zero, x);
        return _mm512_mul_ps(y, y);
    } else if constexpr (ACTIVATION == SILU) {
        return times_sigmoid(x, x);
    } else if constexpr (ACTIVATION == TANH) {  // near 0 the difference would cancel: there its series
        const __m512 two = _mm512_set1_ps(2.f), square = _mm512_mul_ps(x, x);
        const __m512 far = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(one, exp_of(_mm512_add_ps(x, x)))));
        __m512 y = _mm512_fmadd_ps(square, _mm512_set1_ps(-17.f / 315), _mm512_set1_ps(2.f / 15));
        y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(-1.f / 3));
        y = _mm512_fmadd_ps(_mm512_mul_ps(y, square), x, x);
        const __mmask16 is_near = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.1f), _CMP_LT_OQ);
        return _mm512_mask_mov_ps(far, is_near, y);
    } else {
        return x;
    }
}
