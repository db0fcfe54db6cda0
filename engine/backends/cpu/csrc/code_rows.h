// Rows of a weight that is packed as codes in groups (groups.h): those of an embedding that is the head, too.

#pragma once

#include "groups.h"

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

// A row of a weight of one part, where it is packed.
struct CodedRow {
    const uint8_t* panel;
    CodeFormat format;
    int64_t column;  // of the panel
};

static inline CodedRow coded_row(const CodedRows& rows, int64_t num_in, int64_t row) {
    const CodeFormat& f = CODE_FORMATS[rows.format];
    return {rows.weight + row / COLUMNS * f.panel_bytes(num_in), f, row % COLUMNS};
}

// Write the elements [start, start + 16) of a row in fp32, bit for bit as CodedWeight.values() has them; start is a
// multiple of 16.
static inline void unpack_codes(const CodedRow& row, int64_t start, float* values) noexcept {
    const CodeFormat& f = row.format;
    const int64_t group = start / GROUP;
    const int first = start % GROUP / 4, integers = f.sub_group ? GROUP / f.sub_group : 1;
    const uint8_t* head = row.panel + group / f.num_groups() * f.super_bytes();
    const uint8_t* numbers = head + f.head_bytes() + group % f.num_groups() * f.group_bytes();
    const uint8_t *upper = numbers + f.numbers_bytes() + row.column * 4, *lower = upper + f.upper_bytes();
    auto number = [&](int which, int integer) {
        uint16_t half;
        __builtin_memcpy(&half, (f.sub_group ? head : numbers) + (which * COLUMNS + row.column) * 2, sizeof half);
        return widened_half(half) * (f.sub_group ? (int8_t)numbers[integer * COLUMNS + row.column] : 1);
    };
    const float scale = number(0, f.sub_group == 16 ? start % GROUP / 16 : 0);
    const float other = f.num_others() ? number(1, integers) : 0;
    const int zero = f.has_table ? 128 : f.grouping == SCALES ? 1 << f.log_zero() : 0;
    const int codes_a_word = 8 / f.lower_bits(), upper_bits = f.upper_bits();
    for (int i = 0; i < 16; i++) {
        const int part = first + i / 4, byte = i % 4;
        int code = lower[part / codes_a_word * WORDS + byte];
        if (codes_a_word == 2) code = code >> part % 2 * 4 & 15;
        if (upper_bits) {
            const int bits = upper[part * upper_bits / 8 * WORDS + byte] >> part * upper_bits % 8;
            code |= (bits & ((1 << upper_bits) - 1)) << 4;
        }
        if (f.has_table) code = TABLE[code];
        if (f.grouping == SCALES_AND_ZEROS) values[i] = (code - other) * scale;
        else values[i] = (code - zero) * scale;
        if (f.grouping == SCALES_AND_LEAST) values[i] += other;
    }
}
