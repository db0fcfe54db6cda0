"""How many states of sequences there is memory for, where layers of the model keep one in place of keys and values.

Each running sequence has one, and as many again keep those after prefixes. Torch-free. make_cache asks.
"""

from __future__ import annotations

import math

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.scheduling.state_pool import NUM_RESERVED
from gptserve.weights.config import ModelConfig

_SHARE = 0.5
"""Of the memory for caches that states take at most."""
_MIN_STATES = NUM_RESERVED + 2
_FLOAT_BYTES = 4


def state_bytes(model: ModelConfig) -> int:
    """Return the bytes that a sequence keeps in all layers beside keys and values."""
    kept = (layer.recurrence for layer in model.layers if layer.recurrence is not None)
    return _FLOAT_BYTES * sum((its.conv_size - 1) * its.conv_width + math.prod(its.memory_shape) for its in kept)


def plan_states(config: EngineConfig, model: ModelConfig, budget_bytes: int) -> int:
    """Return how many states to make room for, 0 if no layer keeps any.

    They take up to half of budget_bytes. Raises InvalidConfigurationError if that is too little for one sequence.
    """
    size = state_bytes(model)
    if size == 0:
        return 0
    num = min(NUM_RESERVED + 2 * config.max_num_seqs, int(_SHARE * budget_bytes) // size)
    if num < _MIN_STATES:
        raise InvalidConfigurationError(
            f"the states of a sequence take {size:,} bytes, and "
            f"half of the {budget_bytes:,} bytes for caches must hold {_MIN_STATES} of them: free some memory"
        )
    return num


def check_states(model: ModelConfig, device_type: str) -> None:
    """Raise InvalidConfigurationError if layers keep a state and the device does not compute them."""
    if model.has_states and device_type != "cpu":
        raise InvalidConfigurationError(
            f"device is {device_type}, but a {model.model_type} has layers that keep a state, which only a CPU "
            "computes so far: set device to cpu"
        )
