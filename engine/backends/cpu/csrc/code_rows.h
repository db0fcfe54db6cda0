// Rows of a weight that is packed as codes of 8 bits with scales (groups.h): those of an embedding that is the head, too.

#pragma once

#include "linear.h"

constexpr int CODES_OF_SCALE = 32;
constexpr int64_t CODED_BYTES = COLUMNS * (2 + CODES_OF_SCALE);  // of a group of a panel

// A number in fp16.
static inline float widened_half(uint16_t half) {
    uint32_t bits = (half & 0x7fff) << 13;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;  // its exponent is 112 less
    if (bits >= 0x7c00 << 13) bits |= 0x7f800000;  // not finite
    else __builtin_memcpy(&bits, &value, sizeof bits);
    bits |= (half & 0x8000u) << 16;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Where the panel of a row begins.
static inline const uint8_t* coded_panel(const uint8_t* packed, int64_t num_in, int64_t row) {
    return packed + row / COLUMNS * (num_in / CODES_OF_SCALE) * CODED_BYTES;
}

// Write the elements [start, start + 16) of a row, which is `column` of its panel; start is a multiple of 16.
static inline void unpack_codes(const uint8_t* panel, int64_t column, int64_t start, float* values) {
    const uint8_t* group = panel + start / CODES_OF_SCALE * CODED_BYTES;
    uint16_t half;
    __builtin_memcpy(&half, group + column * 2, sizeof half);
    const float scale = widened_half(half);
    const uint8_t* word = group + COLUMNS * 2 + start % CODES_OF_SCALE / 4 * WORDS + column * 4;
    for (int i = 0; i < 16; i++) values[i] = ((int)word[i / 4 * WORDS + i % 4] - 128) * scale;
}
