// What draws and logprobs share: exponentials, and sums and maxima of a row in a fixed order, whatever the instructions.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 256;  // entries that share a sum

// exp(x) for x <= 0, to 1e-7 of its value, 0 where that is below the normal numbers (Cephes, expf).
INLINE float exp_of(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // n, rounded, is in the low bits
    const float n = shifted - 12582912.0f;
    const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    uint32_t bits;  // of 2^n; if x is NaN, of something
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    y *= scale;
    return x < -87.0f ? 0.0f : y;
}

// Return the sum of a block: every LANES-th entry first, then these sums.
INLINE double sum_of(const float* block) {
    double lanes[LANES] = {};
    for (int64_t i = 0; i < BLOCK; i += LANES)
        for (int64_t l = 0; l < LANES; l++) lanes[l] += block[i + l];
    double sum = 0;
    for (int64_t l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

// Return the largest entry, or NaN if any entry is NaN.
INLINE float max_of(const float* row, int64_t n) {
    constexpr int64_t WIDE = 4 * LANES;  // several registers, so that a comparison does not wait for the last one
    float best[WIDE], nans[WIDE];  // an entry of nans is NaN once its lane met one
    for (int64_t l = 0; l < WIDE; l++) best[l] = -INFINITY, nans[l] = 0;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        for (int64_t l = 0; l < WIDE; l++) {
            const float x = row[i + l];
            best[l] = x > best[l] ? x : best[l];
            nans[l] = x != x ? x : nans[l];
        }
    float max = -INFINITY;
    bool has_nan = false;
    for (int64_t l = 0; l < WIDE; l++) {
        max = best[l] > max ? best[l] : max;
        has_nan |= nans[l] != nans[l];
    }
    for (; i < n; i++) {
        max = row[i] > max ? row[i] : max;
        has_nan |= row[i] != row[i];
    }
    return has_nan ? NAN : max;
}
