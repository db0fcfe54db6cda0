// Products with packed weights, y = act(x W^T + b) + residual: how they are cut into chunks, how weights are packed, and
// the C ABI for native.py.
//
// It knows no torch; the caller passes pointers. float_products.cpp and groups.cpp compute the chunks, with instructions
// that are chosen at run time.

#include "linear.h"

#include "code_rows.h"
#include "groups.h"
#include "team.h"

constexpr int64_t ROW_BYTES = 3 << 18; // of x that go with one pass over the weights: they stay in a CPU's own cache
constexpr int64_t CHUNK_NS = 40000, MAX_CHUNK_NS = 90000;

static void compute_chunk(void* job, int64_t i) {
    const Product& p = *(const Product*)job;
    const int64_t start = i / p.chunks_a_pass * p.rows_a_pass, of_pass = i % p.chunks_a_pass;
    const int64_t from = start + of_pass % p.row_chunks * p.rows_a_chunk;
    const int64_t to = min_of(from + p.rows_a_chunk, min_of(start + p.rows_a_pass, p.rows));
    const int64_t panel = of_pass / p.row_chunks * p.panels_a_chunk;
    const int64_t last = min_of(panel + p.panels_a_chunk, p.panels);
    (p.linear.num_parts ? compute_groups : compute_floats)(p, from, to, panel, last);
}

static bool uses_tiles(const Product& p) { return !p.linear.num_parts && p.linear.variant == AMX; }

// Cut a product into chunks that take some CHUNK_NS, or less so that each thread has several; a panel times many rows
// takes up to MAX_CHUNK_NS, or as long as the fewest rows that are multiplied well. A pass multiplies some rows with all
// panels, and those of its chunks that read the same panels follow each other, so that memory is read once a pass.
static int64_t cut(Product& p) {
    const int64_t bytes = p.row_bytes * COLUMNS, fewest = uses_tiles(p) ? 32 : 24;
    const int64_t bytes_a_ns = uses_tiles(p) ? 1000 : p.linear.element_bits == 32 ? 300 : 150;  // times a row of x
    p.rows_a_pass = min_of(p.rows, max_of(fewest, ROW_BYTES / p.row_bytes / fewest * fewest));
    p.rows_a_chunk = min_of(p.rows_a_pass, max_of(fewest, MAX_CHUNK_NS * bytes_a_ns / bytes / fewest * fewest));
    p.row_chunks = quotient(p.rows_a_pass, p.rows_a_chunk);
    const int64_t times = quotient(p.rows, p.rows_a_pass) * p.row_chunks;  // that a panel is multiplied
    const int64_t panel_ns = p.panel_bytes / 10 + bytes * p.rows_a_chunk / bytes_a_ns;
    const int64_t few = max_of(1, p.panels * times / (4 * num_threads()));
    const int64_t fewest_panels = quotient(p.panels, max_of(1, MAX_CHUNKS / times));
    p.panels_a_chunk = max_of(fewest_panels, min_of(few, CHUNK_NS / (panel_ns + 1)));
    p.chunks_a_pass = quotient(p.panels, p.panels_a_chunk) * p.row_chunks;
    return quotient(p.rows, p.rows_a_pass) * p.chunks_a_pass;
}

static int64_t panels_of(int64_t num_out) { return quotient(num_out, COLUMNS); }

struct Packing {
    const uint8_t* weight;
    uint8_t* packed;
    int64_t num_in, num_out, element_bits;
};

// Take LINE bytes of each row of W in turn, so that what they are spread over stays in the first cache.
static void pack_panel(void* job, int64_t panel) {
    const Packing& p = *(const Packing*)job;
    const int64_t row_bytes = p.num_in * p.element_bits / 8, panel_bytes = panel_bytes_of(p.num_in, p.element_bits);
    const int64_t whole_bytes = row_bytes / 4 * 4;
    uint8_t* to = p.packed + panel * panel_bytes;
    __builtin_memset(to, 0, panel_bytes);
    for (int64_t start = 0; start < row_bytes; start += LINE)
        for (int64_t column = 0; column < min_of(COLUMNS, p.num_out - panel * COLUMNS); column++) {
            const uint8_t* row = p.weight + (panel * COLUMNS + column) * row_bytes;
            uint8_t* lane = to + start / 4 * WORDS + column * 4;
            for (int64_t i = start; i < min_of(start + LINE, whole_bytes); i += 4, lane += WORDS) {
                uint32_t word;
                __builtin_memcpy(&word, row + i, 4);
                __builtin_memcpy(lane, &word, 4);
            }
            if (start + LINE >= row_bytes)
                for (int64_t i = whole_bytes; i < row_bytes; i++) *lane++ = row[i];
        }
}

// Raise it with every change of the exported functions, of Linear or of program.h, so that a stale library is refused.
EXPORT int native_abi() { return 38; }

// Whether the CPU has this variant of products in fp32 or bf16, by the bits of an element; 4 stands for codes in groups,
// of 8 bits, too.
EXPORT bool native_has_variant(int64_t element_bits, int variant) {
    if (element_bits >= 16) return variant <= last_float_variant(element_bits);
    return has_int8_variant(variant);
}

// The fastest that the CPU has, or 0.
EXPORT int native_fastest_variant(int64_t element_bits) {
    if (element_bits >= 16) return fastest_float_variant(element_bits);
    int variant = INT8_VNNI;
    while (variant > 0 && !native_has_variant(element_bits, variant)) variant--;
    return variant;
}

// Bytes that a weight [num_out][num_in] takes packed.
EXPORT int64_t native_packed_size(int64_t num_in, int64_t num_out, int64_t element_bits) {
    return panel_bytes_of(num_in, element_bits) * panels_of(num_out);
}

// Have the system populate a page: write to it without a change, as others may write there meanwhile. Compilers drop
// such a write unless it is volatile, and ThreadSanitizer takes it for a race with theirs.
__attribute__((no_sanitize("thread"))) static void touch(volatile uint8_t* memory) {
    __atomic_fetch_or(memory, 0, __ATOMIC_RELAXED);
}

constexpr int64_t SMALLEST_PAGE = 4096;

// Populate all pages in the calling thread.
EXPORT void native_populate(uint8_t* memory, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += SMALLEST_PAGE) touch(memory + i);
}

struct Arrays {
    uint8_t* memory;
    int64_t stride;
};

static void touch_array(void* job, int64_t array) {
    const Arrays& arrays = *(const Arrays*)job;
    touch(arrays.memory + array * arrays.stride);
}

// Populate the first page of each array, in the team. A chunk takes as long as the system needs for a page: up to 9 ms.
EXPORT void native_populate_first(uint8_t* memory, int64_t num_arrays, int64_t stride) {
    Arrays arrays = {memory, stride};
    run_chunks(touch_array, &arrays, min_of(MAX_CHUNKS, num_arrays), num_threads());
}

// The weight is [num_out][num_in], in fp32 or bf16.
EXPORT void native_pack(const uint8_t* weight, int64_t num_in, int64_t num_out, int64_t element_bits, uint8_t* packed) {
    const int64_t unpacked_bytes = COLUMNS * num_in * element_bits / 8;
    for (int64_t panel = 0; panel < panels_of(num_out); panel += MAX_CHUNKS) {
        Packing p = {weight + panel * unpacked_bytes, packed + panel * panel_bytes_of(num_in, element_bits), num_in,
                     num_out - panel * COLUMNS, element_bits};
        const int64_t num_panels = min_of(MAX_CHUNKS, panels_of(p.num_out));
        run_chunks(pack_panel, &p, num_panels, num_threads());
    }
}

// Write rows of a weight [..][num_in] that is packed in fp32 or bf16, by their numbers [num_rows].
EXPORT void native_unpack(const uint8_t* packed, int64_t num_in, int64_t element_bits, const int64_t* numbers,
                          int64_t num_rows, uint8_t* rows) {
    const int64_t row_bytes = num_in * element_bits / 8;
    for (int64_t i = 0; i < num_rows; i++)
        unpack(packed_row(packed, num_in, element_bits, numbers[i]), 0, row_bytes, rows + i * row_bytes);
}

// The same of one that is codes in groups, of one part, in fp32.
EXPORT void native_unpack_codes(const CodedRows* packed, int64_t num_in, const int64_t* numbers, int64_t num_rows,
                                float* rows) {
    for (int64_t i = 0; i < num_rows; i++, rows += num_in) {
        const CodedRow row = coded_row(*packed, num_in, numbers[i]);
        for (int64_t start = 0; start < num_in; start += 16) unpack_codes(row, start, rows + start);
    }
}

// x is [rows][num_in, padded with zeros to a multiple of 32], residual null or [rows][num_out], out [rows][num_out]; all
// are contiguous. `width` says which of them are in fp32; the others are in bf16. x has the type of weights in fp32 or
// bf16; with codes in groups it may have either.
EXPORT void native_multiply(const Linear* linear, const void* x, const void* residual, void* out, int64_t rows,
                            int width) {
    const int64_t num_in = linear->num_in, bits = linear->element_bits;
    const bool grouped = linear->num_parts;
    Product p = {*linear, (const uint8_t*)x, residual, out, (width & WIDE_OUT) != 0,
                 (width & WIDE_RESIDUAL) != 0, rows, grouped ? grouped_row_bytes(num_in) : row_bytes_of(num_in, bits),
                 grouped ? grouped_panel_bytes(*linear) : panel_bytes_of(num_in, bits),
                 panels_of(linear->num_out), 0, 0, 0, 0, 0, nullptr, 0};
    if (rows <= 0) return;
    if (grouped) quantize_groups(p, x, width & WIDE_X);
    run_chunks(compute_chunk, &p, cut(p), num_threads());
}
