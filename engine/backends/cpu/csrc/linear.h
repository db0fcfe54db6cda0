// Products with packed weights, y = act(x W^T + b) + residual, in fp32, bf16 or codes in groups: what all share.
//
// Packed weights are read from start to end, once for up to ROW_BYTES of x: [panels of 32 outputs][words of a row] [32
// outputs][4 bytes]. A word, 4 bytes, is one fp32 or two bf16 numbers that follow each other in a row of W.
// Vectors multiply a word of each output with one of x. A tile of AMX is 16 words deep and 16 outputs wide, loaded with
// a stride of WORDS. Outputs and depth are padded with zeros.
//
// linear.cpp cuts products into chunks and exports them; float_products.cpp and groups.cpp compute chunks.
// groups.h says how weights lie that are codes in groups.

#pragma once

#include <stdint.h>

#include "vectors.h"

constexpr int COLUMNS = 32;               // outputs of a panel
constexpr int ROW_MULTIPLE = 32;          // rows of x are padded with zeros to a multiple of this many elements
constexpr int LINE = 64;                  // bytes of 16 words: of 16 outputs, or of a row
constexpr int PIECE = 4 * LINE;           // bytes of a row in fp32 that are summed from 0: a longer sum rounds off more
constexpr int WORDS = COLUMNS * 4;        // bytes of a panel for a word of a row: one of each output
constexpr int STEP = 16 * WORDS;           // and for LINE bytes of it

// In fp32 there are only the first three; Int8Variants are those of codes in groups.
enum FloatVariant { GENERIC = 1, AVX2 = 2, AVX512 = 3, AVX512_BF16 = 4, AMX = 5 };
enum Int8Variant { INT8_GENERIC = 1, INT8_AVX2 = 2, INT8_AVX_VNNI = 3, INT8_VNNI = 4 };

enum Activation { IDENTITY, GELU, GELU_TANH, GELU_SIGMOID, RELU, RELU2, SILU, TANH, NUM_ACTIVATIONS };

// Rows of a weight as codes, from a panel on to the next part's.
struct CodedRows {
    const uint8_t* weight;  // packed as groups.h says
    int64_t panel;
    int64_t format;  // the place in CODE_FORMATS
};

// A packed weight with what belongs to it; mirrored by native.py.
struct Linear {
    const uint8_t* weight;  // packed
    const float* bias;      // [outputs, padded to whole panels], or null
    int64_t num_in, num_out;
    int32_t activation, variant, element_bits;
    int32_t num_parts;
    const CodedRows* parts;  // [num_parts]: if any, the weight is codes in groups; of the rest bias alone is there
};

// One call of a Linear.
struct Product {
    const Linear& linear;
    const uint8_t* x;        // [rows][row_bytes]
    const void* residual;    // [rows][num_out], fp32 if wide_residual, else bf16; or null
    void* out;               // [rows][num_out], fp32 if wide, else bf16
    bool wide, wide_residual;
    int64_t rows, row_bytes, panel_bytes, panels;  // panel_bytes of weights
    int64_t rows_a_pass, rows_a_chunk, row_chunks, panels_a_chunk, chunks_a_pass;
    const struct Remainder* remainders;  // codes: [rows][num_remainders]
    int64_t num_remainders;
};

enum Width { WIDE_OUT = 1, WIDE_X = 2, WIDE_RESIDUAL = 4 };

static constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }  // rounded up
static inline int64_t padded(int64_t size, int64_t multiple) { return quotient(size, multiple) * multiple; }

// Bytes of a row of x as it is multiplied, in fp32 or bf16.
static inline int64_t row_bytes_of(int64_t num_in, int64_t element_bits) {
    return padded(padded(num_in, ROW_MULTIPLE) * element_bits / 8, LINE);
}

static inline int64_t panel_bytes_of(int64_t num_in, int64_t element_bits) {
    return row_bytes_of(num_in, element_bits) * COLUMNS;
}

// Where a row of a weight that is packed in fp32 or bf16 begins. Its words lie WORDS bytes apart.
static inline const uint8_t* packed_row(const uint8_t* packed, int64_t num_in, int64_t element_bits, int64_t row) {
    return packed + row / COLUMNS * panel_bytes_of(num_in, element_bits) + row % COLUMNS * 4;
}

// Copy bytes [start, start + num_bytes) of such a row; start is a multiple of 4.
static inline void unpack(const uint8_t* row, int64_t start, int64_t num_bytes, void* to) {
    const uint8_t* word = row + start / 4 * WORDS;
    int64_t i = 0;
    for (; i + 4 <= num_bytes; i += 4, word += WORDS) __builtin_memcpy((uint8_t*)to + i, word, 4);
    __builtin_memcpy((uint8_t*)to + i, word, num_bytes - i);
}

// Compute the outputs of panels [panel, last) for rows [from, to), in fp32 and bf16.
void compute_floats(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last);

// The last FloatVariant that the CPU has for elements of 32 or 16 bits, which has those before, and the fastest of them.
int last_float_variant(int64_t element_bits);
int fastest_float_variant(int64_t element_bits);

// Whether the CPU has an Int8Variant.
bool has_int8_variant(int variant);

// Whether the CPU multiplies tiles and the system lets this process use them.
bool has_amx();

extern "C" void native_multiply(const Linear* linear, const void* x, const void* residual, void* out, int64_t rows,
                                int width);
