"""Copies through the ring arrive whole, however late the device fetches them.

No GPU is needed: a lane stands in that fetches as late as it may. It shows a buffer that is filled too early.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptserve.weights import checkpoint
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.pinned_ring import CudaLane, DirectCopy, PinnedRing
from gptserve.weights.quantized.mxfp4 import MXFP4
from gptserve.weights.sharding import WHOLE, Share
from tests.parity.models import pack_experts, write_model
from tests.parity.shapes import SHAPES


class LateLane:
    """Fetches a buffer only when the host waits for it, or at the end of the test."""

    def __init__(self) -> None:
        self.under_way = list[tuple[Tensor, Tensor]]()
        self.num_sent = self.num_joined = self.num_bytes = 0

    def buffer(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        self.under_way.append((target, staged))
        self.num_sent += 1
        number = self.num_sent

        def wait() -> None:
            self.fetch_until(number)

        return wait

    def join(self) -> None:
        self.num_joined = self.num_sent

    def fetch_until(self, number: int) -> None:
        while self.under_way and self.num_sent - len(self.under_way) < number:
            target, staged = self.under_way.pop(0)
            target.copy_(staged)


class ForgetfulLane(LateLane):
    """Says at once that a buffer was fetched."""

    def send(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        super().send(target, staged)
        return lambda: None


def loaded(
    folder: Path, dtype: torch.dtype, share: Share = WHOLE, lane: LateLane | None = None, in_mxfp4: bool = False
) -> dict[str, Tensor]:
    tensors = {}
    opened = Checkpoint(folder, load_config(folder), share)
    for name, tensor in opened.stream(dtype=dtype, device="cpu", keeps=[MXFP4] if in_mxfp4 else []):
        tensors[name] = tensor
        if lane is not None:
            assert lane.num_joined == lane.num_sent, f"{name} is given out before the device waits for it"
    if lane is not None:
        lane.fetch_until(lane.num_sent)
    return tensors


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("shape", "share", "in_mxfp4"),
    [
        *(("GPT-2", WHOLE, False), ("GPT-J", WHOLE, False), ("BLOOM", Share(1, 2), False)),
        *(("gpt-oss, past its window", WHOLE, False), ("gpt-oss, past its window", WHOLE, True)),
    ],
)
def test_weights_arrive_whole_however_late_the_device_fetches_them(
    shape: str, share: Share, in_mxfp4: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts, transposed, put in another order, split among ranks, in another type than stored, and packed."""
    write_model(tmp_path, *SHAPES[shape])
    if in_mxfp4:
        pack_experts(tmp_path)
    expected = loaded(tmp_path, torch.bfloat16, share, in_mxfp4=in_mxfp4)
    for make_lane in (LateLane, ForgetfulLane):
        lane = make_lane()
        monkeypatch.setattr(checkpoint, "copier", lambda device, lane=lane: PinnedRing(lane, 1000, num_buffers=3))
        found = loaded(tmp_path, torch.bfloat16, share, lane, in_mxfp4)
        differing = {name for name in expected if not torch.equal(found[name], expected[name])}
        assert list(found) == list(expected)
        assert bool(differing) == (make_lane is ForgetfulLane)
        assert lane.num_bytes == 3 * 1000
        assert lane.num_sent > 2 * len(expected)
        monkeypatch.undo()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1100, 7), (7, 1100), (1024, 1), (1, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_values_are_rounded_as_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.randn(shape[::-1]).t()
    target = torch.full(shape, torch.nan, dtype=dtype)
    DirectCopy().copy(target, values)

    assert torch.equal(target, values.contiguous().to(dtype))


def test_only_as_much_is_under_way_as_the_buffers_hold() -> None:
    lane, seen = LateLane(), list[int]()
    ring = PinnedRing(lane, buffer_bytes=64, num_buffers=2)
    send = lane.send

    def counting(target: Tensor, staged: Tensor) -> Callable[[], None]:
        seen.append(len(lane.under_way))
        return send(target, staged)

    lane.send = counting  # type: ignore[method-assign]
    target = torch.zeros(7, 5)
    ring.copy(target, torch.arange(35.0).view(5, 7).t())
    assert seen == [0, 1, 1]  # three rows of 20 bytes fit into a buffer
    lane.fetch_until(lane.num_sent)
    assert torch.equal(target, torch.arange(35.0).view(5, 7).t())


def test_a_row_larger_than_a_buffer_is_refused() -> None:
    with pytest.raises(AssertionError, match="a row must fit"):
        PinnedRing(LateLane(), buffer_bytes=64).copy(torch.empty(2, 17), torch.empty(2, 17))


class Recorder:
    """Stands in for torch.cuda: streams and events that note what they are told."""

    def __init__(self) -> None:
        self.told = list[str]()
        self.main, self.side = self.Stream("main", self.told), self.Stream("side", self.told)

    class Stream:
        def __init__(self, name: str, told: list[str]) -> None:
            self.name, self.told = name, told

        def wait_stream(self, other: Any) -> None:
            self.told.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> Any:
            self.told.append(f"event on {self.name}")
            return self

        def synchronize(self) -> None:
            self.told.append(f"host waits for {self.name}")

        def __enter__(self) -> None:
            self.told.append(f"on {self.name}")

        def __exit__(self, *error: object) -> None:
            self.told.append(f"off {self.name}")


def test_cudas_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls alone; that CUDA then does so takes a GPU."""
    cuda = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    lane, target = CudaLane(torch.device("cuda")), torch.zeros(3)
    wait = lane.send(target, torch.ones(3))
    lane.join()
    wait()
    assert target.tolist() == [1, 1, 1]
    assert cuda.told == [
        *("side waits for main", "on side", "event on side", "off side"),
        *("main waits for side", "host waits for side"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_on_a_gpu_as_on_a_cpu(storyteller: Path, dtype: torch.dtype) -> None:
    expected = loaded(storyteller, dtype)
    sizes = torch.cuda.memory_allocated(), sum(tensor.nbytes for tensor in expected.values())
    torch.cuda.reset_peak_memory_stats()
    stream = Checkpoint(storyteller, load_config(storyteller)).stream(dtype=dtype, device="cuda")
    found = dict(stream)
    assert torch.cuda.max_memory_allocated() < sum(sizes) + 512 * (len(found) + 1), "weights lie there twice"
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())
