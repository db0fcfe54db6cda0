// The operations of a program that keep a state of each sequence: a convolution over time, and linear attention.
//
// engine/model/linear_attention.py and convolution.py say what they compute. Each computes in fp32, the tokens of a sequence one
// after the other, so that its bits depend neither on the steps in which they come nor on other sequences. AVX2 and
// AVX-512 give the same bits; the instructions of any CPU may give others.

#include "program.h"

namespace {

constexpr int64_t COLUMNS_AT_ONCE = 32;     // of a head that are computed at once: their part of its memory stays in a cache
constexpr int64_t CHANNELS = 256;   // of a chunk
constexpr int64_t MANY_ROWS = 32;   // with so many tokens of a sequence a chunk has only the columns above

struct StateOperations {
    void (*convolve)(const Operation&, const Program&, const Step&, int64_t sequence, int64_t first, int64_t count);
    void (*recur)(const Operation&, const Program&, const Step&, int64_t sequence, int64_t head, int64_t first,
                  int64_t count);
};

namespace generic {
#include "floats_generic.h"
#include "activation.h"
#include "states_kernel.h"
}  // namespace generic

#if defined(__x86_64__)

BEGIN_INSTRUCTIONS(WITH_AVX2)
namespace avx2 {
#include "floats_avx2.h"
#include "activation.h"
#include "states_kernel.h"
}  // namespace avx2
END_INSTRUCTIONS

BEGIN_INSTRUCTIONS(WITH_AVX512)
namespace avx512 {
#include "floats_avx512.h"
#include "activation.h"
#include "states_kernel.h"
}  // namespace avx512
END_INSTRUCTIONS

#endif

const StateOperations* state_operations(const Program& program) {
    const bool is_fp32 = program.element_bytes == 4;
#if defined(__x86_64__)
    if (program.variant >= AVX512) return is_fp32 ? avx512::FP32_OPERATIONS : avx512::BF16_OPERATIONS;
    if (program.variant == AVX2) return is_fp32 ? avx2::FP32_OPERATIONS : avx2::BF16_OPERATIONS;
#endif
    return is_fp32 ? generic::FP32_OPERATIONS : generic::BF16_OPERATIONS;
}

struct StateJob {
    const Program& program;
    const Step& step;
    const Operation& op;
    const StateOperations* operations;
    int64_t num_parts, part_size, width;  // of the channels of a sequence, or of the columns of a head
    int64_t num, per_chunk;               // parts of all sequences and heads, in order, and how many a chunk has
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void convolve_parts(void* shared, int64_t chunk) {
    const StateJob& job = *(const StateJob*)shared;
    for (int64_t i = chunk * job.per_chunk; i < least(job.num, (chunk + 1) * job.per_chunk); i++) {
        const int64_t from = i % job.num_parts * job.part_size, end = least(job.width, from + job.part_size);
        for (int64_t first = from; first < end; first += 16)
            job.operations->convolve(job.op, job.program, job.step, i / job.num_parts, first, least(16, end - first));
    }
}

void recur_parts(void* shared, int64_t chunk) {
    const StateJob& job = *(const StateJob*)shared;
    const int64_t num_heads = ((const Recur*)job.op.data)->num_value_heads;
    for (int64_t i = chunk * job.per_chunk; i < least(job.num, (chunk + 1) * job.per_chunk); i++) {
        const int64_t from = i % job.num_parts * job.part_size, end = least(job.width, from + job.part_size);
        const int64_t number = i / job.num_parts;
        for (int64_t first = from; first < end; first += COLUMNS_AT_ONCE)
            job.operations->recur(job.op, job.program, job.step, number / num_heads, number % num_heads, first,
                                  least(COLUMNS_AT_ONCE, end - first));
    }
}

void run_parts(void (*compute)(void*, int64_t), StateJob& job) {
    job.per_chunk = job.num / MAX_CHUNKS + 1;
    run_chunks(compute, &job, (job.num + job.per_chunk - 1) / job.per_chunk, num_threads());
}

}  // namespace

void convolve(const Program& program, const Step& step, const Operation& op) {
    const int64_t width = program.buffers[op.out].width, num_parts = (width + CHANNELS - 1) / CHANNELS;
    StateJob job = {program, step, op, state_operations(program), num_parts, CHANNELS, width,
                    step.batch->num_seqs * num_parts, 1};
    run_parts(convolve_parts, job);
}

void recur(const Program& program, const Step& step, const Operation& op) {
    const Recur& d = *(const Recur*)op.data;
    const int64_t size = step.num_rows < MANY_ROWS * step.batch->num_seqs ? d.value_size : COLUMNS_AT_ONCE;
    const int64_t num_parts = (d.value_size + size - 1) / size;
    StateJob job = {program, step, op, state_operations(program), num_parts, size, d.value_size,
                    step.batch->num_seqs * d.num_value_heads * num_parts, 1};
    run_parts(recur_parts, job);
}
