// Products in int8 in vectors of 8 lanes (AVX2) and of 4 (any CPU), by pairs of 16 bits.
//
// int8.cpp includes this file after a file of Floats and one of Ints.

#include "activation.h"
#include "linear_vectors.h"
#include "linear_words.h"
#include "int8_kernel.h"

struct Int8 {
    static constexpr int MAX_ROWS = 6, PARTS = 2;
    static constexpr bool IN_PIECES = false;
    typedef Words Sum;
    static constexpr auto part_of_x = pairs_of_x, part_of_weights = pairs_of_weights;
    static constexpr auto add_product = add_pairs;
    template <int R>
    static constexpr auto sum = sum_words<Int8, R>;
    static constexpr auto finish_sums = finish_int8;
};
