// Weights as codes in groups: how they lie packed, and rows of x as they are multiplied with them.
//
// A code is an unsigned number of 4 or 8 bits. GROUP of them that follow each other in a row of W share a scale in fp16
// and, by the Grouping, a least value or a zero in fp16:
//   SCALES            w = scale * (code - zero), with the zero 2^(bits - 1) for all
//   SCALES_AND_LEAST  w = scale * code + least
//   SCALES_AND_ZEROS  w = scale * (code - zero)
// Packed: [panels of 32 outputs][groups][32 scales, 32 least values or zeros if any, words][4 bytes a word and output].
// A word of 8 bits is 4 codes that follow each other. One of 4 bits is 8 codes: the first four in the lower halves of its
// bytes, the next four in the upper ones.
//
// groups.cpp computes with them and packs them; linear.cpp cuts their products into chunks.

#pragma once

#include "linear.h"

constexpr int GROUP = 32;

enum Grouping { NO_GROUPS, SCALES, SCALES_AND_LEAST, SCALES_AND_ZEROS };

// A group of a row of x: scale * codes.
struct RowGroup {
    int8_t codes[GROUP];
    float scale;     // NaN if an element is not finite
    int32_t offset;  // - the zero of all weights * the sum of the codes
    float sum;       // the same sum
    float scaled_sum;  // times the scale
};

constexpr int64_t group_bytes_of(int bits, int grouping) {
    return COLUMNS * (grouping == SCALES ? 2 : 4) + COLUMNS * GROUP * bits / 8;
}

static inline int64_t grouped_panel_bytes(int64_t num_in, int bits, int grouping) {
    return num_in / GROUP * group_bytes_of(bits, grouping);
}

static inline int64_t grouped_row_bytes(int64_t num_in) { return num_in / GROUP * sizeof(RowGroup); }

// Make x of a product from its rows [rows][num_in], in fp32 or bf16. It is valid until the calling thread quantizes
// others.
void quantize_groups(Product& p, const void* x, bool wide);

void compute_groups(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last);
