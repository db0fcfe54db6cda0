"""EngineInfo: what a running engine tells its clients of itself. `ModelRunner` makes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gptserve.weights.pooling import Task


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A description of a running engine, for its clients."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    attention_backend: str
    product: str
    """What multiplies with the weights: a name of engine/model/linear.py."""
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    """Of all ranks."""
    max_num_seqs: int
    max_num_queued_reqs: int
    fingerprint: str
    batch_invariant: bool
    """Whether the bits of a request's numbers do not depend on the other requests in a batch."""
    process_id: int = field(default_factory=os.getpid, compare=False)
    """The process that computes."""
    task: Task = "generate"
    vector_size: int = 0
    """The width of a prompt's vector, or how many labels have a logit in it."""
    kv_cache_dtype: str = "float32"
    """The type of its elements, "int8" for codes."""
    num_states: int = 0
    """Slots for the states of sequences; 0 if no layer keeps one."""
    states_bytes: int = 0
    """Of all of them."""
