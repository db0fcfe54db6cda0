"""Counts what goes from the host to torch's meta device, and refuses what hides such copies.

That device has shapes but no numbers, so whatever waits for one fails: `item`, `tolist`, a condition, a boolean index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts the operations that read a tensor of the host for one of the device; a scalar is no copy.

    num_started counts all that a device would have to do, these among them.
    """

    count = num_started = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        is_of_device = any(x.is_meta for x in [*read, *tree_leaves(result)] if isinstance(x, Tensor))
        self.count += is_of_device and any(not x.is_meta and x.dim() for x in read)
        self.num_started += is_of_device and not func.is_view and "empty" not in str(func)
        return result


class Lists(TorchFunctionMode):
    """Refuses lists as indices of the device's tensors, and tensors made of lists on it: hidden copies, and waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(index, list) for index in indices), "a list as an index"
        assert func is not torch.tensor or (kwargs or {}).get("device") != DEVICE, "a tensor of a list"
        return func(*args, **(kwargs or {}))
