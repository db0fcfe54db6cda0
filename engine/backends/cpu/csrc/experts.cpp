// A mixture of experts: its rows choose, are gathered by expert, and go through the experts that they chose.
//
// The products are those of native_multiply, one expert after the other; all else computes row by row (rows_kernel.h), so
// a row's bits do not depend on what others chose. The sorting alone is done by one thread: it takes some ns a pair.

#include "program.h"

namespace {

// Find the places of all pairs: by expert, those of one expert in the order of the rows.
void place_pairs(const Experts& experts, const Program& program, int64_t num_rows) {
    const int64_t num_experts = experts.num + experts.num_shared, num_per_row = experts_per_row(experts);
    for (int64_t e = 0; e < num_experts; e++) experts.ends[e] = 0;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t k = 0; k < num_per_row; k++) experts.ends[routes_of(experts, program, row).experts[k]]++;
    int32_t start = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        const int32_t count = experts.ends[e];
        experts.ends[e] = start;
        start += count;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        const Routes routes = routes_of(experts, program, row);
        for (int64_t k = 0; k < num_per_row; k++) routes.places[k] = experts.ends[routes.experts[k]]++;
    }
}

// Multiply each pair with its expert's weight.
void multiply_pairs(const Experts& experts, const Program& program, const Linear* const* linears, Buffer in,
                    Buffer out) {
    const int64_t in_bytes = in.width / experts_per_row(experts) * program.element_bytes;
    const int64_t out_bytes = out.width / experts_per_row(experts) * program.element_bytes;
    int64_t first = 0;
    for (int64_t e = 0; e < experts.num + experts.num_shared; e++) {
        const int64_t num_pairs = experts.ends[e] - first;
        multiply(linears[e], in, nullptr, out, num_pairs);
        in.data = (uint8_t*)in.data + num_pairs * in_bytes;
        out.data = (uint8_t*)out.data + num_pairs * out_bytes;
        first = experts.ends[e];
    }
}

// Apply the gate to each pair, as a program of its own whose rows are the pairs.
void gate(const Experts& experts, const Program& program, int64_t num_pairs) {
    const Buffer &up = program.buffers[experts.up], &gated = program.buffers[experts.gated];
    const int64_t num_per_row = experts_per_row(experts);
    const Buffer buffers[] = {{up.data, up.width / num_per_row, up.wide},
                              {gated.data, gated.width / num_per_row, gated.wide}};
    const Operation op = {GATE, 0, 1, -1, experts.gate};
    const Program of_pairs = {&op, 1, buffers, program.variant, program.element_bytes};
    run_rows(of_pairs, {num_pairs, nullptr, nullptr, nullptr, nullptr}, &op, 1);
}

}  // namespace

void mix_experts(const Program& program, const Step& step, const Operation& op) {
    const Experts& experts = *(const Experts*)op.data;
    const Buffer &pairs = program.buffers[experts.pairs], &up = program.buffers[experts.up];
    const Operation choose = {CHOOSE, experts.scores, experts.routes, -1, &experts};
    const Operation gather = {GATHER, op.in, experts.pairs, -1, &experts};
    const Operation mix = {MIX, experts.pairs, op.out, op.residual, &experts};
    run_rows(program, step, &choose, 1);
    place_pairs(experts, program, step.num_rows);
    run_rows(program, step, &gather, 1);
    multiply_pairs(experts, program, experts.ups, pairs, up);
    if (experts.gate) gate(experts, program, step.num_rows * experts_per_row(experts));
    multiply_pairs(experts, program, experts.downs, experts.gate ? program.buffers[experts.gated] : up, pairs);
    run_rows(program, step, &mix, 1);
}
