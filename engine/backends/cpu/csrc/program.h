// A program: the operations of a step, as data, in the order in which they run. engine/backends/cpu/program.py mirrors it.
//
// An operation reads one buffer and writes one; a buffer has a row for each token of the step, from TAKE on for each row
// that is taken. The rows of an operation are independent and each is computed in one order, so a row's bits depend
// neither on the other rows nor on how the team shares them. Python builds programs from a model's configuration; nothing
// here knows a model or a family.

#pragma once

#include <stdint.h>

#include "attention.h"
#include "linear.h"

enum Kind {
    LINEAR,  // data: a Linear of linear.cpp
    ATTEND,  // data: Attend
    EXPERTS,  // data: Experts; in are the rows, out their mixtures plus residual
    CONVOLVE,  // data: Convolve; changes states
    RECUR,     // data: Recur; changes states
    // From here on an operation computes row by row: a RowOperation of rows.cpp.
    TAKE,          // out are the rows of in that the step names; later operations have only as many rows
    EMBED,         // data: Table; out is the row of the token
    ADD_POSITION,  // data: Table; out is in plus the row of the position
    NORM,          // data: Norm
    CLAMP,         // data: const float*; to [-limit, limit]
    SCALE,         // data: const float*, a factor; in place
    MULTIPLY,      // data: const int64_t*, where in the in the elements begin by which those of out are multiplied, in place
    ROTATE,        // data: Rotation; in place
    GATE,          // data: Gate; out is act(first half of in) * second half
    GATE_HEADS,    // data: const int32_t*, a HeadGate; out, heads, is multiplied by the gates in in, in place
    XIELU,         // data: Xielu; in place
    ADD,           // out is in plus residual
    COPY,          // out is in, in the type of out
    SCALE_EACH,    // data: Factors, of each element; in place
    CUT_GATE,      // data: const float*, LayerConfig.gate_cut of weights/config.py, for the first half; in place
    MATCH,         // out is multiplied by a number so that it is as long as in
    PREDICT,       // data: Mixing; in are the logits, out is the first of the streams, in place
    CORRECT,       // data: Mixing; in is what the layer computed, out is the first of the streams, in place
    // Parts of EXPERTS, which only experts.cpp writes; data: Experts.
    CHOOSE,  // in are the logits of the router
    GATHER,  // out are the pairs
    MIX,     // in are the pairs
    NUM_KINDS,
};

// In a program of bf16 a wide buffer may be the out or the residual of LINEAR and EXPERTS, the in of LINEAR with
// codes, both of GATE and XIELU, that of SCALE, and any of TAKE, EMBED, ADD_POSITION, NORM, ADD, COPY and those below it.
// program.py sees to that.
struct Buffer {
    void* data;     // [rows][width], of fp32 if wide, else of the program's elements
    int64_t width;
    int32_t wide;   // set in programs of fp32
};

struct Operation {
    int32_t kind;
    int32_t in, out, residual;  // indices of buffers; residual is -1 for none
    const void* data;
};

struct Program {
    const Operation* operations;
    int64_t num_operations;
    const Buffer* buffers;
    int32_t variant;  // a FloatVariant that the CPU has: its instructions compute the rows
    int32_t element_bytes;  // 4: fp32, 2: bf16
};

// Multiply rows of one buffer and add those of another one, if there is a residual.
static inline void multiply(const Linear* linear, const Buffer& in, const Buffer* residual, const Buffer& out,
                            int64_t num_rows) {
    const int wide_residual = residual && residual->wide ? WIDE_RESIDUAL : 0;
    native_multiply(linear, in.data, residual ? residual->data : nullptr, out.data, num_rows,
                    (in.wide ? WIDE_X : 0) | wide_residual | (out.wide ? WIDE_OUT : 0));
}

// Where the state of a sequence lies during a step: StatePlace of engine/model/layout.py.
struct StatePlace {
    int32_t slot, source, kept_row, kept_slot;
};

// The states of one layer, [slots] of each: State of engine/model/states.py.
struct StateCache {
    float* latest;  // [slots][size - 1][channels], inputs of a convolution
    float* memory;  // [slots][value heads][key_size][value_size]
};

// One call of a program.
struct Step {
    int64_t num_rows;
    const int64_t *token_ids, *positions;  // [num_rows]
    const AttentionBatch* batch;
    const AttentionCache* const* caches;   // of each layer
    int64_t num_taken;
    const int64_t* taken;  // [num_taken], the rows that TAKE takes; if there are none, the program ends there
    const StatePlace* states;  // of each sequence of the batch
    const StateCache* const* state_caches;  // of each layer, null where it has none
};

enum TableKind { ROWS, PACKED_ROWS, CODED_ROWS };

struct Table {
    const void* rows;  // of the program's elements; by `packed`, a packed weight or CodedRows
    float scale;
    int32_t packed;  // EMBED only: rows of a packed weight in fp32 or bf16 (linear.h), or of codes (code_rows.h)
    int64_t num_rows;  // EMBED only: tokens from this number on have the first row; 0: all have their own
};

struct Factors {
    const float* factors;  // [width]
};

constexpr int64_t MAX_STREAMS = 16;
constexpr float LEAST_SQUARE = 1e-5f;  // the least mean square by which MATCH divides

// What a layer's weights of a row, the hyperbolic tangents of its logits, are multiplied by: engine/model/stream_mixer.py
// has the formulas. A stream is a wide buffer; all are neighbours.
struct Mixing {
    const float* factors;  // PREDICT: [num][num][num], of stream, weight and stream; CORRECT: [num][num], of weight and stream
    int64_t num;           // of streams, at most MAX_STREAMS
    int32_t logits;        // the buffer of logits
};

// Of each row, `count` vectors of `width` elements from `first` on are normalised. The mean is taken off if `centred`.
struct Norm {
    const float *weight, *bias;  // [width], or null
    int64_t first, count, width;
    float eps;
    int32_t centred;
};

// The pair (x[i], x[i + num_pairs]) of each of the first num_heads heads turns by the angle of the row's position.
struct Rotation {
    const float* waves;  // [positions][cosines, sines][num_pairs]
    int64_t num_heads, head_size, num_pairs;
};

// With a limit the first half is at most that, and the second is clamped to [-limit, limit] before 1 is added to it.
struct Gate {
    float limit;  // in the type of the rows; 0 for none
    int32_t activation;
};

// The functions of `gate_heads` in engine/model/activation.py. A gate is of a head, or of an element of one: of as many
// elements as the width of out has times that of in.
enum HeadGate { SIGMOID, SOFTPLUS, OWN_SILU };

// The numbers of class Xielu in engine/model/activation.py, which says what they are.
struct Xielu {
    float alpha_p, alpha_n, beta, eps;
};

// How a mixture chooses and weighs experts: Router of weights/config.py has the meaning of each field.
struct Router {
    const float* correction;  // [num] of the experts that are chosen, or null
    const float* factors;     // [num] of their weights, or null
    int64_t num_groups, num_active_groups;
    float min_sum, sum_offset, scale;
    float shared_weight;  // of each shared expert without a gate
    int32_t plain;        // whether the choice is that of the highest logits, and a softmax gives all weights
    int32_t sigmoid;      // whether a score is the sigmoid of a logit, not of the softmax of all
    int32_t renormalised;
    int32_t shared_gate;  // whether the weight of shared experts is the sigmoid of the last logit
};

// A mixture of experts: the weighted sum of the outputs of the num_active experts with a row's highest scores, and of
// all those behind the first num, which are shared. Of equal scores the first ranks highest; a row with a score that is
// NaN gives NaN. A pair is a row and an expert that it has: buffers of pairs have as many times the width of one.
struct Experts {
    const Linear* const* ups;    // [num + num_shared]
    const Linear* const* downs;  // [num + num_shared]
    const Router* router;
    const Gate* gate;            // between them; null: ups have the activation
    int32_t* ends;               // [num + num_shared], scratch: where the pairs of an expert end, sorted by expert
    int64_t num, num_active, num_shared;
    int32_t scores;              // the buffer [rows][num or more] of the router's logits, which the operation reads, too
    int32_t routes;              // from here on buffers for scratch: of the rows' Routes
    int32_t pairs;               // of inputs, then outputs
    int32_t up, gated;           // of outputs of ups, and of the gate, if there is one
};

static inline int64_t experts_per_row(const Experts& experts) { return experts.num_active + experts.num_shared; }

// What a row has of its experts: the chosen ones, highest score first, and the shared ones.
struct Routes {
    int32_t* experts;  // [experts_per_row]
    float* weights;    // [experts_per_row]
    int32_t* places;   // [experts_per_row], of its pairs among all pairs
    float* scratch;    // [num] scores, [num] that rank them, [num_groups]; only unless the router is plain
};

static inline Routes routes_of(const Experts& experts, const Program& program, int64_t row) {
    const int64_t num = experts_per_row(experts);
    const int64_t num_scratch = experts.router->plain ? 0 : 2 * experts.num + experts.router->num_groups;
    int32_t* start = (int32_t*)program.buffers[experts.routes].data + row * (3 * num + num_scratch);
    return {start, (float*)(start + num), start + 2 * num, (float*)(start + 3 * num)};
}

// in is the fused queries, keys and values; without `writes` it is queries alone, and the cache has the others already.
struct Attend {
    const float *slopes, *sinks;
    int64_t layer, key, value, num_heads, window, writes;  // key and value: where they begin in a row
    float scale, softcap;
    int32_t instructions;
};

// A causal convolution over time of each channel alone, then SiLU; or if gated, with a third of in each for b, c and x,
// the convolution of b * x, then times c.
struct Convolve {
    const float* factors;  // [size][channels], those of the newest token last
    const float* bias;     // [channels], or null
    int64_t layer, size;
    int32_t gated;
};

constexpr int64_t MAX_KEY_SIZE = 1024;

// Linear attention by the gated delta rule or, with a skip, by a state space. in is the queries, keys and values; rates is
// the buffer of what each value head learns, then of what it forgets, or of its step. `group` value heads side by side
// have one key head, the next ones the next; behind the last one comes the first.
struct Recur {
    const float *decay, *step, *skip;  // [num_value_heads]; skip is null for the delta rule
    int64_t layer, num_key_heads, num_value_heads, key_size, value_size, group;
    float least_step, most_step;       // of a state space
    int32_t rates;
};

typedef void (*RowOperation)(const Operation&, const Program&, const Step&, int64_t row);

// Run neighbouring operations that compute row by row as one job of the team.
void run_rows(const Program& program, const Step& step, const Operation* first, int64_t num_operations);

// Run an operation of kind EXPERTS.
void mix_experts(const Program& program, const Step& step, const Operation& op);

// Run an operation of kind CONVOLVE, or RECUR.
void convolve(const Program& program, const Step& step, const Operation& op);
void recur(const Program& program, const Step& step, const Operation& op);

// By kind, for the elements and with the instructions of a program; null for those that do not compute row by row.
const RowOperation* row_operations(const Program& program);
