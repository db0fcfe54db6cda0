// The operations of a program that compute row by row: embedding, norms, rotary, gates, sums, the rows that are taken,
// and parts of mixtures.
//
// Each computes in fp32. In bf16 it rounds where engine/model/layers.py does, but not on the way to a wide buffer.
// Else the two differ only by the order of sums: here lane j of 16 sums every 16th element in ascending order, and the
// lanes are folded in halves. A row has the same bits by AVX2 and by AVX-512; by the instructions of any CPU they may
// differ.

#include "code_rows.h"
#include "program.h"

namespace generic {
#include "floats_generic.h"
#include "activation.h"
#include "rows_kernel.h"
}  // namespace generic

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {
#include "floats_avx2.h"
#include "activation.h"
#include "rows_kernel.h"
}  // namespace avx2
END_INSTRUCTIONS

BEGIN_INSTRUCTIONS(WITH_AVX512)
namespace avx512 {
#include "floats_avx512.h"
#include "activation.h"
#include "rows_kernel.h"
}  // namespace avx512
END_INSTRUCTIONS

#endif

const RowOperation* row_operations(const Program& program) {
    const bool is_fp32 = program.element_bytes == 4;
#if defined(__x86_64__)
    if (program.variant >= AVX512) return is_fp32 ? avx512::FP32_OPERATIONS : avx512::BF16_OPERATIONS;
    if (program.variant == AVX2) return is_fp32 ? avx2::FP32_OPERATIONS : avx2::BF16_OPERATIONS;
#endif
    return is_fp32 ? generic::FP32_OPERATIONS : generic::BF16_OPERATIONS;
}
