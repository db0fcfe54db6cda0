// Weights as codes in groups: how they lie packed, and rows of x as they are multiplied with them.
//
// A code is an unsigned number of 4, 5, 6 or 8 bits, or the place of a value in a table of 16. GROUP of them that follow
// each other in a row of W share a scale and, by the Grouping, a least value or a zero:
//   SCALES            w = scale * (code - zero), with the zero 2^(bits - 1), or 0 with a table, for all
//   SCALES_AND_LEAST  w = scale * code + least
//   SCALES_AND_ZEROS  w = scale * (code - zero)
// They are in fp16, or, with sub-scales, integers of 8 bits times a number in fp16 that SUPER_GROUP codes share; then a
// half of a group may have a scale of its own.
// Packed: [panels of 32 outputs][super groups][32 scales in fp16, 32 least values in fp16 if any][groups], and a group is
// [32 scales, 32 others if any, or as many integers][words of upper bits][words][4 bytes a word and output]; without
// sub-scales a super group is one group and has no numbers of its own.
// A word of 8 bits is 4 codes that follow each other. Else it has the lower 4 bits of 8 codes: of the first four in the
// lower halves of its bytes, of the next four in the upper ones. A word of upper bits has one or two bits of each of 32 or
// 16 codes: a byte has those of every fourth code, from its lowest bits on.
//
// groups.cpp computes with them and packs them; linear.cpp cuts their products into chunks. code_rows.h reads single rows.

#pragma once

#include "linear.h"

constexpr int GROUP = 32, SUPER_GROUP = 256;

enum Grouping { SCALES, SCALES_AND_LEAST, SCALES_AND_ZEROS };

// How codes are stored.
struct CodeFormat {
    int bits, grouping;
    int sub_group = 0;  // codes that share an integer; 0: scales are in fp16
    bool has_table = false;

    constexpr int num_others() const { return grouping != SCALES; }
    constexpr int num_groups() const { return sub_group ? SUPER_GROUP / GROUP : 1; }  // of a super group
    constexpr int head_bytes() const { return sub_group ? COLUMNS * 2 * (1 + num_others()) : 0; }
    constexpr int numbers_bytes() const {
        return COLUMNS * (sub_group ? GROUP / sub_group + num_others() : 2 * (1 + num_others()));
    }
    constexpr int lower_bits() const { return bits == 8 ? 8 : 4; }
    constexpr int upper_bits() const { return bits - lower_bits(); }
    constexpr int upper_bytes() const { return COLUMNS * GROUP * upper_bits() / 8; }
    constexpr int group_bytes() const { return numbers_bytes() + COLUMNS * GROUP * bits / 8; }
    constexpr int super_bytes() const { return head_bytes() + num_groups() * group_bytes(); }
    constexpr int log_zero() const { return bits - 1; }
    constexpr int dot_bits() const { return has_table ? 8 : bits; }
    constexpr bool has_remainders() const { return bits == 8 && grouping == SCALES; }
    constexpr int64_t panel_bytes(int64_t num_in) const { return num_in / GROUP / num_groups() * super_bytes(); }
};

// In the order of native.py.
constexpr CodeFormat CODE_FORMATS[] = {
    {4, SCALES},          {4, SCALES_AND_LEAST},     {4, SCALES_AND_ZEROS},     {8, SCALES},     {8, SCALES_AND_LEAST},
    {8, SCALES_AND_ZEROS}, {5, SCALES},              {5, SCALES_AND_LEAST},     {4, SCALES_AND_LEAST, 32},
    {5, SCALES_AND_LEAST, 32}, {6, SCALES, 16},      {4, SCALES, 0, true},      {4, SCALES, 32, true},
};
constexpr int NUM_CODE_FORMATS = sizeof CODE_FORMATS / sizeof *CODE_FORMATS;

// The values of codes with a table, plus 128.
constexpr uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The numbers of a weight [num_out][num_in] before it is packed; those that a format has not are null. Mirrored by
// native.py.
struct NumbersOfCodes {
    const uint8_t* codes;              // a byte each
    const uint16_t *scales, *others;   // [num_out][groups, or super groups] in fp16; least values or zeros, alike
    const int8_t *sub_scales, *sub_leasts;  // [num_out][num_in / sub_group], [num_out][groups]
};

// A group of a row of x: scale * codes.
struct RowGroup {
    int8_t codes[GROUP];
    float scale;                 // NaN if an element is not finite
    int32_t sum, first_sum;      // of the codes, and of the first half of them
    float scaled_sum;            // the sum times the scale
};

// What rounding to codes left of a group of a row: scale * codes.
struct Remainder {
    RowGroup group;
    int32_t place;  // of the group in the row
    int32_t most;   // the bits of its largest magnitude
};

// Rows that are multiplied with codes of 8 bits and scales have the remainders of as many of their groups as this, those
// with the largest scales: in few groups is most of what rounding loses.
static inline int64_t remainders_of(int64_t num_in) { return quotient(num_in / GROUP, 16); }

static inline int64_t grouped_row_bytes(int64_t num_in) { return num_in / GROUP * sizeof(RowGroup); }

// Make x and remainders of a product from its rows [rows][num_in], in fp32 or bf16. They are valid until the calling thread
// quantizes others.
void quantize_groups(Product& p, const void* x, bool wide);

// Bytes of a panel, on average.
int64_t grouped_panel_bytes(const Linear& linear);

void compute_groups(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last);
