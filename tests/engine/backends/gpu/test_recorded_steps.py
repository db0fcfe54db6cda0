"""Recordings that fail, by torch's own torch.cuda.graph; streams and what they record are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.recorded_steps import CudaCapture, failure
from tests.engine.backends.gpu.test_graphs import capture_for
from tests.engine.runs import make_engine


class FakeCuda:
    """The current stream, whether it records, and which part of a recording raises; "both" are its body and its end."""

    def __init__(self, fails: str) -> None:
        self.stream, self.is_recording, self.fails = "default", False, fails

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Graph:
            def capture_begin(self, *pool: object, **options: object) -> None:
                assert cuda.stream == "side"
                if cuda.fails == "begin":
                    raise RuntimeError("CUDA error: no begin")
                cuda.is_recording = True

            def capture_end(self) -> None:
                assert cuda.stream == "side"
                cuda.is_recording = False
                if cuda.fails in ("end", "both"):
                    raise RuntimeError("CUDA error: no end")

        class Stream:
            def __init__(self, name: str) -> None:
                self._name = name

            def __enter__(self) -> None:
                self._before, cuda.stream = cuda.stream, self._name

            def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
                cuda.stream = self._before

        for name, replacement in {
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda: cuda.stream,
            "stream": Stream,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", "side")


@pytest.mark.parametrize(
    ("fails", "message"),
    [("begin", "no begin"), ("body", "no body"), ("end", "no end"), ("both", "no end")],
)
def test_a_recording_that_fails_leaves_the_stream_as_it_was(
    fails: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(fails)
    cuda.put(monkeypatch)

    def compute() -> Tensor:
        assert cuda.is_recording
        if fails in ("body", "both"):
            raise RuntimeError("no body")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match=message):
        CudaCapture()(compute)
    assert (cuda.stream, cuda.is_recording) == ("default", False)


def test_what_failed_in_a_recording_is_told_with_the_failure_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda("both").put(monkeypatch)

    def compute() -> Tensor:
        raise ValueError("no body")

    with pytest.raises(RuntimeError) as failed:
        CudaCapture()(compute)
    assert failure(failed.value) == "they failed with RuntimeError: CUDA error: no end, after ValueError: no body"


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_steps_whose_recording_fails_start_their_kernels_one_by_one(
    fails: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, cuda = make_engine(tiny_gpt2), FakeCuda(fails)
    cuda.put(monkeypatch)
    assert capture_for(engine, CudaCapture(), max_num_seqs=4) is None
    assert caplog.messages == [
        "decoding: kernels started one by one, which is slower, are used instead of CUDA graphs: "
        f"they failed with RuntimeError: CUDA error: no {fails}"
    ]
    assert (cuda.stream, cuda.is_recording) == ("default", False)
