// Products in vectors of any instructions, and what is done with their sums. linear.h says how weights lie.
//
// Sources include this file after activation.h, each with Numbers of its own:
//   MAX_ROWS               rows of x that are multiplied at once: their sums fit into the registers
//   sum<R>                 sum R rows of x times a panel
//   finish_sums            make fp32 of the sums [rows][COLUMNS] of a panel
// The bits of an element do not depend on the rows beside it, the chunk or the thread: each row has lanes of its own, and
// its sum takes the depth in ascending order, always in the same pieces.

// Make outputs of the sums [rows][COLUMNS] of a panel, for the rows from `row` on: in fp32 plus bias, activation, plus
// residual; one rounding to bf16 comes last, if any.
template <int ACTIVATION>
static void finish(const Product& p, int64_t row, int rows, int64_t panel, const float* sums) {
    for (int half = 0; half < COLUMNS; half += 16) {
        const int64_t column = panel * COLUMNS + half, left = p.linear.num_out - column;
        if (left <= 0) break;
        const Floats bias = p.linear.bias ? load(p.linear.bias + column, 16) : broadcast(0);
        for (int r = 0; r < rows; r++) {
            const int64_t at = (row + r) * p.linear.num_out + column;
            Floats y = activate<ACTIVATION>(load(sums + r * COLUMNS + half, 16) + bias);
            if (p.residual && p.wide_residual) y = y + load((const float*)p.residual + at, left);
            else if (p.residual) y = y + load((const bf16*)p.residual + at, left);
            if (p.wide) store((float*)p.out + at, left, y);
            else store((bf16*)p.out + at, left, y);
        }
    }
}

typedef void (*Finish)(const Product&, int64_t row, int rows, int64_t panel, const float* sums);
static const Finish FINISH[NUM_ACTIVATIONS] = {finish<IDENTITY>, finish<GELU>, finish<GELU_TANH>, finish<GELU_SIGMOID>,
                                               finish<RELU>,     finish<RELU2>, finish<SILU>,     finish<TANH>};

// Return where the weights lie that will be due soon, some 400 ns at 20 GB/s, or `at` if they lie beyond `end`.
static inline const uint8_t* soon(const uint8_t* at, const uint8_t* end) {
    constexpr int AHEAD = 4 * STEP;
    return end - at > AHEAD ? at + AHEAD : at;
}

// Fetch a word of each output into the second cache.
static inline void prefetch_words(const uint8_t* at) {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + LINE, 0, 2);
}

// Sum up to R rows of x times a panel.
template <class Numbers, int R>
static void sum_rows(int rows, const uint8_t* x, int64_t row_bytes, const uint8_t* panel, const uint8_t* end,
                     uint8_t* sums) {
    if (rows == R) Numbers::template sum<R>(x, row_bytes, panel, end, sums);
    else if constexpr (R > 1) sum_rows<Numbers, R - 1>(rows, x, row_bytes, panel, end, sums);
}

// Compute panels [panel, last) of a weight for rows [from, to).
template <class Numbers>
static void compute_panels(const Product& p, const uint8_t* weight, int64_t panel_bytes, int64_t from, int64_t to,
                           int64_t panel, int64_t last) {
    const uint8_t* end = weight + last * panel_bytes;
    float sums[Numbers::MAX_ROWS * COLUMNS];
    for (; panel < last; panel++) {
        for (int64_t row = from, rows; row < to; row += rows) {
            rows = quotient(to - row, quotient(to - row, Numbers::MAX_ROWS));  // calls differ by one row at most
            const uint8_t* weights = weight + panel * panel_bytes;
            sum_rows<Numbers, Numbers::MAX_ROWS>(rows, p.x + row * p.row_bytes, p.row_bytes, weights, end, (uint8_t*)sums);
            Numbers::finish_sums(p, row, rows, panel, sums);
            FINISH[p.linear.activation](p, row, rows, panel, sums);
        }
    }
}

template <class Numbers>
static void compute_vectors(const Product& p, int64_t from, int64_t to, int64_t panel, int64_t last) {
    compute_panels<Numbers>(p, p.linear.weight, p.panel_bytes, from, to, panel, last);
}
