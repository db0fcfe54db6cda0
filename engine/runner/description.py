"""What a running engine says of itself. ModelRunner calls it once all is made."""

from __future__ import annotations

from gptserve.engine.config import EngineConfig
from gptserve.engine.info import EngineInfo
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.setup import Setup
from gptserve.engine.runner.state_memory import state_bytes


def describe(
    config: EngineConfig,
    setup: Setup,
    num_ranks: int,
    product: str,
    cache: KVCache,
    num_blocks: int,
    max_model_len: int,
    fingerprint: str,
) -> EngineInfo:
    """Return what clients are told. `cache` and the model of `setup` are those of one of num_ranks."""
    return EngineInfo(
        vocab_size=setup.model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=setup.model.eos_token_ids,
        device=str(setup.device),
        dtype=str(setup.dtype).removeprefix("torch."),
        attention_backend=setup.backend.name,
        product=product,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=cache.num_bytes * num_ranks,
        kv_cache_dtype=str(cache.dtype).removeprefix("torch."),
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        fingerprint=fingerprint,
        batch_invariant=setup.products.are_invariant,
        task=config.task,
        vector_size=setup.checkpoint.config.vector_size,
        num_states=cache.num_states,
        states_bytes=cache.num_states * state_bytes(setup.model),
    )
