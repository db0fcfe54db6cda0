// Attention over the paged KV cache: what a step calls of attention.cpp.

#pragma once

#include <stdint.h>

#include "team.h"

// One step's batch; mirrored by attention.py.
struct AttentionBatch {
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* kv_lens;       // [num_seqs]
    const int32_t* block_tables;  // [num_seqs][table_stride]
    const int64_t* slots;         // [num_tokens]
    int64_t table_stride, num_seqs, num_tokens;
    float* scratch;               // [num_threads][scratch_stride], 64-byte aligned
    int64_t scratch_stride;
    int64_t max_kv_len;
    int64_t num_threads;
};

// The cache of one layer, [2][num_blocks][num_kv_heads][block_size] rows of head_size elements; mirrored by attention.py.
struct AttentionCache {
    void* data;
    int64_t num_blocks, num_kv_heads, block_size, head_size;
    int64_t element_size;  // 4: fp32, 2: bf16, 1: codes of -127 to 127, behind which each row has their scale in fp32
};

// key and value are [num_tokens][num_kv_heads][head_size] with token_stride elements from token to token, which have
// element_size bytes: 4 (fp32) or 2 (bf16), as in the cache unless that has codes.
EXPORT void native_write(const AttentionBatch* batch, const AttentionCache* cache, const void* key, const void* value,
                         int64_t token_stride, int64_t element_size);

// query is [num_tokens][num_heads][head_size] with query_stride elements from token to token; out is contiguous. Both
// have elements as keys and values have. slopes and sinks are [num_heads] or null; a window or a softcap of 0 is none.
EXPORT void native_attend(const AttentionBatch* batch, const AttentionCache* cache, const void* query,
                          int64_t query_stride, void* out, int64_t element_size, int64_t num_heads, float scale,
                          int64_t window, const float* slopes, const float* sinks, float softcap, int instructions);
