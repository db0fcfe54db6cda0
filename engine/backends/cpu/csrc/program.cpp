// Running a program: one operation after the other, each shared out to the team. A C ABI for program.py.
//
// Between two operations the caller waits only for chunks under way (team.h). Neighbouring operations that compute row
// by row are one job: a chunk takes some rows through all of them. TAKE begins a job, as it reads rows of other chunks.

#include "program.h"

#include "team.h"

constexpr int64_t ROW_CHUNK = 1 << 15;  // elements of a chunk: some 2 us a norm, longer than it takes to share it out

namespace {

struct RowJob {
    const Program& program;
    const Step& step;
    const Operation* first;
    int64_t num_operations, rows_a_chunk;
    const RowOperation* compute;
};

void compute_rows(void* shared, int64_t chunk) {
    const RowJob& job = *(const RowJob*)shared;
    const int64_t from = chunk * job.rows_a_chunk, end = from + job.rows_a_chunk;
    for (int64_t row = from; row < end && row < job.step.num_rows; row++)
        for (const Operation* op = job.first; op < job.first + job.num_operations; op++)
            job.compute[op->kind](*op, job.program, job.step, row);
}

}  // namespace

void run_rows(const Program& program, const Step& step, const Operation* first, int64_t num_operations) {
    int64_t widest = 1;
    for (int64_t i = 0; i < num_operations; i++) {
        const int64_t in = program.buffers[first[i].in].width, out = program.buffers[first[i].out].width;
        widest = in > widest ? in : widest;
        widest = out > widest ? out : widest;
    }
    int64_t rows_a_chunk = ROW_CHUNK / (widest * num_operations) + 1;
    if (rows_a_chunk < step.num_rows / MAX_CHUNKS + 1) rows_a_chunk = step.num_rows / MAX_CHUNKS + 1;
    RowJob job = {program, step, first, num_operations, rows_a_chunk, row_operations(program)};
    run_chunks(compute_rows, &job, (step.num_rows + rows_a_chunk - 1) / rows_a_chunk, num_threads());
}

namespace {

void attend(const Program& program, const Step& step, const Operation& op) {
    const Attend& a = *(const Attend*)op.data;
    const Buffer& in = program.buffers[op.in];
    const uint8_t* qkv = (const uint8_t*)in.data;
    const AttentionCache* cache = step.caches[a.layer];
    const int64_t size = program.element_bytes;
    if (a.writes) native_write(step.batch, cache, qkv + a.key * size, qkv + a.value * size, in.width, size);
    native_attend(step.batch, cache, qkv, in.width, program.buffers[op.out].data, size, a.num_heads, a.scale, a.window,
                  a.slopes, a.sinks, a.softcap, a.instructions);
}

}  // namespace

// Compute the rows of a step; buffers have room for them. Of the step, only what the operations need must be there.
EXPORT void native_run(const Program* program, const Step* whole) {
    Step step = *whole;
    const Operation* end = program->operations + program->num_operations;
    for (const Operation* op = program->operations; op < end;) {
        const Operation* first = op++;
        if (first->kind == LINEAR) {
            const Buffer* buffers = program->buffers;
            multiply((const Linear*)first->data, buffers[first->in],
                     first->residual < 0 ? nullptr : &buffers[first->residual], buffers[first->out], step.num_rows);
        } else if (first->kind == ATTEND) {
            attend(*program, step, *first);
        } else if (first->kind == EXPERTS) {
            mix_experts(*program, step, *first);
        } else if (first->kind == CONVOLVE) {
            convolve(*program, step, *first);
        } else if (first->kind == RECUR) {
            recur(*program, step, *first);
        } else {
            if (first->kind == TAKE) step.num_rows = step.num_taken;
            if (step.num_rows == 0) return;
            while (op < end && op->kind > TAKE) op++;
            run_rows(*program, step, first, op - first);
        }
    }
}
