// Weights that become codes of 4, 5, 6 or 8 bits in groups while a model loads, in their packed layout (groups.h). The
// kernel, which says how, is rounding_kernel.h's.

#include "code_rows.h"
#include "scratch.h"
#include "team.h"

constexpr float MAX_HALF = 65504, MAX_WEIGHT = 2e9f;  // no weight is above 127 * 256 * MAX_HALF
constexpr float LARGEST = 127;                        // the largest integer of a group
constexpr float TINY = 1e-30f;                        // no scale, square or spread that matters is less
constexpr float HALF_SPLIT = (1 << 13) + 1;           // as fp32 has 13 bits more than fp16 (Veltkamp's split)
constexpr float MAX_SHORT = 32767, MAX_SHARE = 4095;
constexpr float STEP_FACTOR = 256 * 32768.0 / 32767;  // two steps in 7 bits, for the upper halves of products
constexpr int NUM_SCALES = 16, ROUNDS = 2, NUM_STARTS = 3;
constexpr float STARTS[NUM_STARTS] = {1, 0, -1}, ZERO_STARTS[NUM_STARTS] = {0, -2, 2};

struct Rounding {
    int64_t num_in;
    CodeFormat format;
    const float* shares;  // [num_in]: what an error of a weight of this input counts; null: the nearest codes
    const int32_t* pairs;  // [num_in / 2]: the same in 12 bits of the largest of a group, each with the next above it
};

// Return the nearest number in fp16, ties to even, of up to MAX_HALF.
static inline uint16_t narrowed_half(float value) {
    uint32_t bits, sign;
    __builtin_memcpy(&bits, &value, sizeof bits);
    sign = bits >> 31 << 15;
    bits &= 0x7fffffff;
    if (bits >= 0x38800000) return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
    const float shifted = (value < 0 ? -value : value) + 0.5f;  // its last bit is 2^-24, as of a subnormal number
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    return sign | (bits - 0x3f000000);
}

namespace generic {

#include "floats_generic.h"
#include "ints_generic.h"
#include "rounding_kernel.h"

}  // namespace generic

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {

#include "floats_avx2.h"
#include "ints_avx2.h"
#include "rounding_kernel.h"

}  // namespace avx2
END_INSTRUCTIONS

BEGIN_INSTRUCTIONS(WITH_AVX512 ",avx512vnni")
namespace avx512 {

#include "floats_avx512.h"
#include "ints_avx512.h"
#include "rounding_kernel.h"

}  // namespace avx512
END_INSTRUCTIONS

#endif

namespace {

template <class Element>
auto round_outputs_by([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant >= INT8_VNNI) return avx512::round_outputs<Element>;
    if (variant >= INT8_AVX2) return avx2::round_outputs<Element>;
#endif
    return generic::round_outputs<Element>;
}

template <class Element>
void round_rows(const Rounding& r, const Element* rows, int64_t num_out, int variant, uint8_t* packed) {
    const auto round_outputs = round_outputs_by<Element>(variant);
    constexpr int AT_ONCE = 16;
    for (int64_t i = 0; i < quotient(num_out, COLUMNS) * COLUMNS; i += AT_ONCE) {
        const int64_t num = max_of(0, min_of(AT_ONCE, num_out - i));
        uint8_t* panel = packed + i / COLUMNS * r.format.panel_bytes(r.num_in);
        round_outputs(r, rows + i * r.num_in, num, i % COLUMNS, panel);
    }
}

// Return what Rounding has as pairs. They are valid until the calling thread asks for others.
const int32_t* pairs_of(const float* shares, int64_t num_in) {
    thread_local Scratch scratch;
    auto* pairs = (int32_t*)scratch.take(num_in * 2);
    for (int64_t k = 0; k < num_in; k += GROUP) {
        float most = 0;
        for (int i = 0; i < GROUP; i++) most = shares[k + i] > most ? shares[k + i] : most;
        const float unit = MAX_SHARE / most;
        for (int i = 0; i < GROUP; i += 2)
            pairs[(k + i) / 2] = (int32_t)(shares[k + i] * unit + 0.5f) |
                                 (int32_t)(shares[k + i + 1] * unit + 0.5f) << 16;
    }
    return pairs;
}

}  // namespace

// Round and pack weights [num_out][num_in], in fp32 or bf16, in the calling thread. `shares` [num_in] or null says what an
// error of a weight of each input counts. The scale of a group that is not finite is NaN.
EXPORT void native_round_groups(const void* rows, bool wide, const float* shares, int64_t num_in, int64_t num_out,
                                int64_t format, int variant, uint8_t* packed) {
    const Rounding r = {num_in, CODE_FORMATS[format], shares, shares ? pairs_of(shares, num_in) : nullptr};
    if (wide) round_rows(r, (const float*)rows, num_out, variant, packed);
    else round_rows(r, (const bf16*)rows, num_out, variant, packed);
}
