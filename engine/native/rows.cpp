// The operations of a program that compute row by row: embedding, norms, rotary, gates, sums, and parts of mixtures.
//
// Each computes in fp32 and rounds to bf16 where engine/model/layers.py does, so that the two differ only by the order
// of sums: here lane j of 16 sums every 16th element in ascending order, and the lanes are folded in halves. A row has
// the same bits by AVX2 and by AVX-512; by the instructions of any CPU they may differ.

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

const RowOperation* row_operations([[maybe_unused]] int variant) {
#if defined(__x86_64__)
    if (variant >= AVX512) return avx512::ROW_OPERATIONS;
    if (variant == AVX2) return avx2::ROW_OPERATIONS;
#endif
    return generic::ROW_OPERATIONS;
}
