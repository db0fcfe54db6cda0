"""What a rank computes with, chosen from EngineConfig, the folder and the device before weights are loaded.

The first rank (runner.py) and each other one (parallel/worker.py) call `set_up`, so that they cannot choose apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch

from gptserve.engine.backends.gpu.selfcheck.operations import choose_operations
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.attention import AttentionBackend
from gptserve.engine.model.attention_specs import layer_specs
from gptserve.engine.model.loading import Stream
from gptserve.engine.model.operations import Operations
from gptserve.engine.runner.attention_choice import choose_backend
from gptserve.engine.runner.batch_invariance import Products, choose_products, set_up_device
from gptserve.engine.runner.hardware import choose_device, choose_dtype
from gptserve.engine.runner.memory import check_max_model_len, weights_quantized
from gptserve.engine.runner.products import check_quantization, choose_codes
from gptserve.engine.runner.state_memory import check_states
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.classes import load_classifier
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import load_config
from gptserve.weights.sharding import Share


@dataclass(frozen=True, slots=True)
class Setup:
    """A rank's device, what computes there, and the weights to load."""

    device: torch.device
    dtype: torch.dtype
    """Of weights, activations and cache."""
    checkpoint: Checkpoint
    model: ModelConfig
    """The rank's share of the checkpoint's."""
    backend: AttentionBackend
    operations: Operations
    products: Products
    codes: Collection[str]
    """The canonical names of the weights that stay codes, as they are stored."""
    unread: Collection[str]
    """Of those that become codes while they are read."""

    def stream(self, progress: Callable[[int, int], None] | None = None) -> Stream:
        """Read the rank's weights, as Checkpoint.stream does. Nothing else may hold the tensors that come."""
        stream = partial(self.checkpoint.stream, dtype=self.dtype, device=self.device, progress=progress)
        return stream(keeps=self.operations.keeps, coded=self.codes, unread=self.unread)


def set_up(config: EngineConfig, share: Share, num_threads: int) -> Setup:
    """Choose what a rank with up to num_threads computes with.

    Raises WeightsError if the model is unusable, InvalidConfigurationError if a setting is.
    """
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(share.rank % config.num_local_ranks)  # which "cuda" means from here on
    set_up_device(config, device)
    dtype = choose_dtype(config, device)
    whole = load_config(config.model_dir, "refuse" if config.strict_config else "warn")
    whole = replace(whole, classifier=load_classifier(config.model_dir, config.task))
    check_states(whole, device.type)
    check_max_model_len(config, whole.max_position)
    check_quantization(config, whole, device)
    specs = layer_specs(share.of_config(whole), device)
    backend = choose_backend(config, device, dtype, specs, whole.max_position)
    checkpoint = Checkpoint(config.model_dir, whole, share, needs_head=config.task == "generate")
    model = share.of_config(checkpoint.config)
    # After the checkpoint has shown the sizes to be true: these two multiply matrices of them.
    operations = choose_operations(model, device, dtype, checkpoint.stored_types)
    if share.rank == 0 or device.type != "cpu":
        products = choose_products(config, model, device, dtype, backend, num_threads)
    else:
        products = Products(are_invariant=False)  # on a CPU the first rank finds out for all
    codes = choose_codes(config, model, checkpoint.code_formats, device, dtype)
    unread = () if config.requantization is None else weights_quantized(model)
    return Setup(device, dtype, checkpoint, model, backend, operations, products, codes, unread)
