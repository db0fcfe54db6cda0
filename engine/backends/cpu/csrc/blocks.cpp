// Weights in the blocks of GGUF's types, which become the packed codes of groups.h: they are read once, where the file is
// mapped, and nothing is made in between.
//
// weights/gguf/codes.py says the same of each type in torch; ggml's ggml-quants.c is the source. A block has the codes of
// a group of an output, or of a super group.

#include "groups.h"
#include "team.h"

namespace {

constexpr uint32_t NIBBLES = 0x0f0f0f0f;
constexpr uint16_t SIGN = 0x8000, EXPONENT = 0x7c00;  // of fp16
constexpr int PARTS = GROUP / 4;                      // words of a group with four codes, a byte each

uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return word;
}

uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return half;
}

// Put the lowest four bits into the bits 4 of four bytes.
uint32_t fifth_bits(uint32_t bits) { return ((bits & 15) * 0x00204081 & 0x01010101) << 4; }

// Take the codes of 16 bytes: first those of the lower halves, then those of the upper ones.
void take_nibbles(const uint8_t* from, uint32_t* parts) {
    for (int i = 0; i < PARTS / 2; i++) {
        parts[i] = word_at(from + 4 * i) & NIBBLES;
        parts[PARTS / 2 + i] = word_at(from + 4 * i) >> 4 & NIBBLES;
    }
}

// A type has the CodeFormat and the bytes of its blocks, their scales and other numbers in fp16, the integers of a group,
// as they lie packed, and its codes.
template <int FORMAT, int NUM_BYTES>
struct Type {
    static constexpr CodeFormat format = CODE_FORMATS[FORMAT];
    static constexpr int num_bytes = NUM_BYTES;
    static uint16_t scale(const uint8_t* block) { return half_at(block); }
    static uint16_t other(const uint8_t* block) { return half_at(block + 2); }
    static void take_integers(const uint8_t*, int, uint8_t*) {}
};

struct Q4_0 : Type<0, 18> {
    static void take(const uint8_t* block, int, uint32_t* parts) { take_nibbles(block + 2, parts); }
};

struct Q4_1 : Type<1, 20> {
    static void take(const uint8_t* block, int, uint32_t* parts) { take_nibbles(block + 4, parts); }
};

void take_five_bits(const uint8_t* bits, uint32_t* parts) {
    take_nibbles(bits + 4, parts);
    for (int i = 0; i < PARTS; i++) parts[i] |= fifth_bits(word_at(bits) >> 4 * i);
}

struct Q5_0 : Type<6, 22> {
    static void take(const uint8_t* block, int, uint32_t* parts) { take_five_bits(block + 2, parts); }
};

struct Q5_1 : Type<7, 24> {
    static void take(const uint8_t* block, int, uint32_t* parts) { take_five_bits(block + 4, parts); }
};

struct Q8_0 : Type<3, 34> {
    static void take(const uint8_t* block, int, uint32_t* parts) {
        for (int i = 0; i < PARTS; i++) parts[i] = word_at(block + 2 + 4 * i) ^ 0x80808080;
    }
};

// Eight scales and eight least values of six bits lie in 12 bytes; the least values are subtracted.
template <int FORMAT, int NUM_BYTES, int CODES>
struct Q4_or_Q5_K : Type<FORMAT, NUM_BYTES> {
    static uint16_t other(const uint8_t* block) { return half_at(block + 2) ^ SIGN; }

    static void take_integers(const uint8_t* block, int group, uint8_t* integers) {
        const uint8_t *d = block + 4 + group % 4, *m = d + 4, *both = d + 8;
        integers[0] = group < 4 ? *d & 63 : (*both & 15) | (*d >> 2 & 48);
        integers[1] = group < 4 ? *m & 63 : *both >> 4 | (*m >> 2 & 48);
    }

    static void take(const uint8_t* block, int group, uint32_t* parts) {
        const uint8_t* from = block + CODES + group / 2 * GROUP;
        for (int i = 0; i < PARTS; i++) parts[i] = word_at(from + 4 * i) >> group % 2 * 4 & NIBBLES;
        if (CODES == 16) return;
        for (int i = 0; i < PARTS; i++) parts[i] |= (word_at(block + 16 + 4 * i) >> group & 0x01010101) << 4;
    }
};

using Q4_K = Q4_or_Q5_K<8, 144, 16>;
using Q5_K = Q4_or_Q5_K<9, 176, 48>;

struct Q6_K : Type<10, 210> {
    static uint16_t scale(const uint8_t* block) { return half_at(block + 208); }

    static void take_integers(const uint8_t* block, int group, uint8_t* integers) {
        __builtin_memcpy(integers, block + 192 + 2 * group, 2);
    }

    static void take(const uint8_t* block, int group, uint32_t* parts) {
        const int half = group / 4, place = group % 4;
        const uint8_t *low = block + 64 * half + place % 2 * GROUP, *high = block + 128 + GROUP * half;
        for (int i = 0; i < PARTS; i++) {
            parts[i] = word_at(low + 4 * i) >> place / 2 * 4 & NIBBLES;
            parts[i] |= (word_at(high + 4 * i) >> 2 * place & 0x03030303) << 4;
        }
    }
};

struct IQ4_NL : Type<11, 18> {
    static void take(const uint8_t* block, int, uint32_t* parts) { take_nibbles(block + 2, parts); }
};

struct IQ4_XS : Type<12, 136> {
    static void take_integers(const uint8_t* block, int group, uint8_t* integers) {
        const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = block[2 + group / 4] >> group % 4 * 2 & 3;
        integers[0] = (low | high << 4) - 32;
    }

    static void take(const uint8_t* block, int group, uint32_t* parts) { take_nibbles(block + 8 + 16 * group, parts); }
};

// Put the codes of a group of an output into their words: `to` is where those of upper bits begin, or else the others.
template <class Its>
void put_codes(const uint32_t* parts, uint8_t* to) {
    constexpr CodeFormat f = Its::format;
    constexpr int upper_bits = f.upper_bits(), num = upper_bits ? PARTS / upper_bits : 0;  // parts of an upper word
    constexpr int codes_a_byte = 8 / f.lower_bits();
    for (int i = 0; i < upper_bits; i++, to += WORDS) {
        uint32_t word = 0;
        for (int k = 0; k < num; k++) word |= (parts[i * num + k] >> 4 & NIBBLES) << k * upper_bits;
        __builtin_memcpy(to, &word, sizeof word);
    }
    for (int i = 0; i < PARTS; i += codes_a_byte, to += WORDS) {
        const uint32_t word = codes_a_byte == 1 ? parts[i] : (parts[i] & NIBBLES) | (parts[i + 1] & NIBBLES) << 4;
        __builtin_memcpy(to, &word, sizeof word);
    }
}

struct BlockPacking {
    const uint8_t* const* rows;  // [num_out]
    uint8_t* packed;
    int64_t num_in, num_out;
    bool is_finite;
};

// Pack a block of an output to the place of its column in a super group; return whether its numbers in fp16 are finite.
template <class Its>
bool pack_block(const uint8_t* block, int64_t column, uint8_t* to) {
    constexpr CodeFormat f = Its::format;
    constexpr int num_integers = f.sub_group ? GROUP / f.sub_group + f.num_others() : 0;
    const uint16_t scale = Its::scale(block), other = f.num_others() ? Its::other(block) : 0;
    __builtin_memcpy(to + column * 2, &scale, sizeof scale);
    if (f.num_others()) __builtin_memcpy(to + (COLUMNS + column) * 2, &other, sizeof other);
    to += f.head_bytes();
    for (int group = 0; group < f.num_groups(); group++, to += f.group_bytes()) {
        uint8_t integers[3];
        Its::take_integers(block, group, integers);
        for (int i = 0; i < num_integers; i++) to[i * COLUMNS + column] = integers[i];
        uint32_t parts[PARTS];
        Its::take(block, group, parts);
        put_codes<Its>(parts, to + f.numbers_bytes() + column * 4);
    }
    return (scale & EXPONENT) != EXPONENT && (other & EXPONENT) != EXPONENT;
}

template <class Its>
void pack_panel(void* job, int64_t panel) {
    BlockPacking& p = *(BlockPacking*)job;
    constexpr CodeFormat f = Its::format;
    const int64_t first = panel * COLUMNS, outputs = min_of(COLUMNS, p.num_out - first);
    const int64_t num_blocks = p.num_in / GROUP / f.num_groups();
    uint8_t* to = p.packed + panel * f.panel_bytes(p.num_in);
    if (outputs < COLUMNS) __builtin_memset(to, 0, f.panel_bytes(p.num_in));
    bool is_finite = true;
    for (int64_t i = 0; i < num_blocks; i++, to += f.super_bytes())
        for (int64_t column = 0; column < outputs; column++)
            is_finite &= pack_block<Its>(p.rows[first + column] + i * Its::num_bytes, column, to);
    if (!is_finite) __atomic_store_n(&p.is_finite, false, __ATOMIC_RELAXED);
}

struct Packer {
    void (*pack_panel)(void* job, int64_t panel);
    CodeFormat format;
};

template <class Its>
constexpr Packer packer() {
    return {pack_panel<Its>, Its::format};
}

// In the order of native.py.
constexpr Packer PACKERS[] = {packer<Q4_0>(), packer<Q4_1>(), packer<Q5_0>(), packer<Q5_1>(),   packer<Q8_0>(),
                              packer<Q4_K>(), packer<Q5_K>(), packer<Q6_K>(), packer<IQ4_NL>(), packer<IQ4_XS>()};

}  // namespace

// Pack the blocks of rows [num_out], each of num_in weights and at an address of its own, in the team; return whether all
// their numbers in fp16 are finite.
EXPORT bool native_pack_blocks(const uint8_t* const* rows, int64_t num_in, int64_t num_out, int64_t type,
                               uint8_t* packed) {
    const Packer& its = PACKERS[type];
    bool is_finite = true;
    for (int64_t start = 0; start < num_out; start += MAX_CHUNKS * COLUMNS) {
        const int64_t num = min_of(num_out - start, MAX_CHUNKS * COLUMNS);
        BlockPacking p = {rows + start, packed + start / COLUMNS * its.format.panel_bytes(num_in), num_in, num, true};
        run_chunks(its.pack_panel, &p, quotient(num, COLUMNS), num_threads());
        is_finite &= p.is_finite;
    }
    return is_finite;
}
