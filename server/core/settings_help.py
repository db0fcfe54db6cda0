"""The help texts of the options that EngineConfig has; `settings.py` has those of the server beside its fields."""

from __future__ import annotations

ENGINE_HELP = {
    "device": "device to compute on",
    "task": "what to serve: completions of texts, their vectors (embed), labels (classify), or scores of pairs",
    "dtype": "data type of weights, activations and, unless it has its own, KV cache",
    "kv_cache_dtype": "data type of the KV cache; on a CPU int8 takes half of bf16's memory",
    "strict_config": "refuse a model whose config.json has any key that is not known, also one that is off",
    "quantization": "numbers that weights become at load: int8 takes half of bf16's memory, int4 a third; none unpacks",
    "attention_backend": "attention kernel to use",
    "block_size": "number of tokens in a block of the KV cache",
    "num_blocks": "number of blocks in the KV cache (default: two full contexts a sequence, or as many as fit)",
    "kv_cache_bytes": "size of the KV cache, such as 2GiB (default: two full contexts a sequence, but on a CPU at most "
    "40% of the free memory)",
    "gpu_memory_utilization": "share of the GPU's memory to use, including the weights",
    "max_model_len": "maximum tokens of a sequence, prompt and completion (default: the model's own, or what fits)",
    "max_num_seqs": "maximum sequences to compute at once",
    "max_num_batched_tokens": "maximum tokens to compute in one step",
    "max_num_queued_reqs": "maximum requests to queue; more get status 429",
    "max_queue_time_s": "maximum seconds for a request to wait in the queue; then it gets status 503",
    "enable_prefix_caching": "reuse the KV cache of prompts that begin with the same tokens",
    "speculative_ngram": "draft tokens by looking up the last N tokens in the text so far, N from 2 to 8; 0 is off",
    "tensor_parallel_size": "number of processes, each on a GPU of its own, that share the heads and widths of layers",
    "nnodes": "number of machines that share them evenly, with one GPTSERVE_CLUSTER_KEY",
    "node_rank": "number of this machine; 0 serves HTTP",
    "master_addr": "address of machine 0, which listens there, in a trusted network",
    "master_port": "its port for them",
    "enforce_eager": "start the kernels of decoding steps one by one, without CUDA graphs",
    "overlap": "plan and launch the next step on a GPU while one runs",
    "batch_invariant": "refuse to start where answers depend on the batch; a GPU needs slower products to avoid that",
    "num_threads": "maximum CPU threads of the engine (default: one a usable core); it uses fewer for small steps",
}
