// The operations of a program that compute row by row: embedding, norms, rotary, gates, sums.
//
// Each computes in fp32 and rounds to bf16 where engine/model/layers.py does, so that the two differ only by the order
// of sums: here lane j of 16 sums every 16th element in ascending order, and the lanes are folded in halves. A row has
// the same bits by AVX2 and by AVX-512.

#include "program.h"

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

const RowOperation* row_operations(int variant) {
    return variant == AVX2 ? avx2::ROW_OPERATIONS : avx512::ROW_OPERATIONS;
}

#else

const RowOperation* row_operations(int) { return nullptr; }

#endif
