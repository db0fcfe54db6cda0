"""The last lines of a start: the model, its device, kernels and memory, the address, and a request to try."""

from __future__ import annotations

import logging

from gptserve.server.completions.model import Model
from gptserve.server.core.settings import ServerSettings

_OF_TASK = {
    "embed": ("embeddings", '{"input": "Once upon a time"}'),
    "classify": ("classify", '{"input": "Once upon a time"}'),
    "score": ("rerank", '{"query": "What purrs?", "documents": ["a cat", "a fox"]}'),
}
"""Of each other task, a route and a body."""

logger = logging.getLogger("gptserve")  # a short name: these lines are read by people


def log_banner(model: Model, settings: ServerSettings, url: str) -> None:
    """Log the banner of a server that takes connections at `url`; the engine of its model has started."""
    info = model.engine.info
    names = " = ".join(model.names)
    num_tokens = info.num_blocks * info.block_size
    logger.info("model: %s, %s on %s, context of %d tokens", names, info.dtype, info.device, info.max_model_len)
    logger.info("kernels: attention %s, matrix products %s", info.attention_backend, info.product)
    logger.info(
        "memory: %.1f MiB %s for a KV cache of %d tokens; %d sequences of full length fit at once",
        info.kv_cache_bytes / 2**20,
        "reserved, and used as needed," if info.device == "cpu" else "used",
        *(num_tokens, num_tokens // info.max_model_len),
    )
    if info.num_states:
        logger.info("memory: %.1f MiB for %d states of sequences", info.states_bytes / 2**20, info.num_states)
    logger.info("%s is ready on %s", model.name, url)
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    if settings.playground and settings.engine.task == "generate":
        logger.info("playground: %s/ in a browser", here)
    logger.info("try: %s", _command(model, settings, here))


def _command(model: Model, settings: ServerSettings, here: str) -> str:
    """Return a line for a shell, for any version of curl."""
    key = ' -H "Authorization: Bearer $GPTSERVE_API_KEY"' if settings.needs_key else ""
    if settings.engine.task != "generate":
        route, asked = _OF_TASK[settings.engine.task]
        return f"curl {here}/v1/{route}{key} -d '{asked}'"
    path, asked = "completions", '"prompt": "Once upon a time"'
    if model.chat_template is not None:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Tell me a story about a fox."}]'
    return f'curl -N {here}/v1/{path}{key} -d \'{{{asked}, "max_tokens": 300, "stream": true}}\''
