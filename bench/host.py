"""The host's time of a decode step, which is to be less than the GPU's: a GPU that waits for it is idle.

    python -m bench.host [--batch 1 32 128 256] [--context 100 8000] [--steps 200] [--temperature 0.8]

The engine is whole but for what a GPU computes: its two graphs do nothing, and each token is the same. Steps overlap as
on a GPU, and the outputs go to another process. Copies to the device and what few kernels are started one by one are
those of torch on the CPU: `operations` counts them.
Prints the median microseconds of a step and of its parts as a table, and one JSON line. They are those of the CPU's
clock of the engine's thread, which stops while another program has the core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.machine import tell, versions
from gptserve.engine.backends.gpu.graphs import DecodeGraphs
from gptserve.engine.backends.gpu.recorded_steps import RecordedStep, Replay
from gptserve.engine.backends.gpu.sampler import PIECE, TritonSampler
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.info import EngineInfo
from gptserve.engine.process.garbage import collect_seldom
from gptserve.engine.process.loop import Stepped
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.runner import overlap, runner
from gptserve.engine.runner.runner import Collect, ModelRunner
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.runner.step_memory import max_sampled_rows
from gptserve.engine.scheduling.prompt_pace import Pace
from gptserve.engine.scheduling.scheduler import Scheduler

DEVICE = torch.device("cpu")
VOCAB_SIZE, BLOCK_SIZE = 50257, 16
NUM_WARM_UP = 20  # steps that decode, of each batch
PARTS: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "foresee", "schedule"),
    (overlap, "step_input", "build"),
    (RecordedStep, "fill", "stage"),
    (runner, "begin_sampling", "choices"),
    (TritonSampler, "choose", "table"),
    (Engine, "_collect", "outputs"),
    (Scheduler, "update", "update"),
    (Connection, "send", "send"),
]
"""A function and the part that it belongs to; what a part calls of another one counts there."""
COLUMNS = [*dict.fromkeys(part for *_, part in PARTS), "rest"]


class NoModel:
    """Stands in for a Decoder."""

    host_starts_experts = False

    def hidden_states(self, token_ids_T: Tensor, *_: object) -> Tensor:
        return torch.empty(len(token_ids_T), 1, device=DEVICE)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.empty(len(hidden), VOCAB_SIZE, device=DEVICE)

    def states(self, hidden: Tensor) -> Tensor:
        return hidden.to(torch.float32)

    def step(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        return self.hidden_states(*inputs[:-1]), self.logits(inputs[-1]) if len(inputs[-1]) else None


class NoKernels:
    """Stands in for a module of Triton kernels."""

    def __getattr__(self, kernel: str) -> NoKernels:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


class HostRunner(ModelRunner):
    """A ModelRunner whose device computes nothing."""

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        choose: Any = object.__new__(TritonSampler)
        choose._kernels = NoKernels()
        choose._allocate(VOCAB_SIZE, max_sampled_rows(config), DEVICE, PIECE)
        model: Any = NoModel()
        cache: Any = None
        self.device, self._decoder, self._cache, self._ranks = DEVICE, model, cache, None
        self._programs = None
        self._chosen = partial(torch.empty, 0, dtype=torch.int64, device=DEVICE)
        self.graphs = DecodeGraphs(model, cache, config, max_model_len, DEVICE, choose)
        self.graphs.record(_record)
        self.choose = choose.choose
        self.info = EngineInfo(
            *(VOCAB_SIZE, max_model_len, (), "cpu", "bfloat16", "none", "torch", BLOCK_SIZE, num_blocks, 0),
            *(config.max_num_seqs, config.max_num_seqs, "", False),
        )

    def launch(self, step: StepInput) -> Collect:
        return self._launch(step)


def _record(compute: Callable[[], Tensor]) -> Replay:
    """Stand in for CudaCapture."""
    out = compute()
    return lambda: out


class Clock:
    """Counts the seconds of parts while it is `on`."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    @contextmanager
    def on(self) -> Iterator[None]:
        originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in PARTS]
        for owner, name, part in PARTS:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, own in originals:
                delattr(owner, name) if own is None else setattr(owner, name, own)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.thread_time() - start
                self.seconds[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return timed


class Operations(TorchDispatchMode):
    """Counts torch's operations but for views, which start nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view and "empty" not in str(func)
        return result


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    collect_seldom()  # as the engine's process does
    print(f"{'context':>7} {'batch':>5} {'step us':>8}" + "".join(f"{name:>9}" for name in COLUMNS) + "  operations")
    rows = []
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read, args=(theirs,), daemon=True)
    reader.start()
    for context in args.context:
        for batch in args.batch:
            row = measure(batch, context, args.steps, args.temperature, ours)
            rows.append(row)
            figures = "".join(f"{row['parts_us'][name]:>9.0f}" for name in COLUMNS)
            print(f"{context:>7} {batch:>5} {row['step_us']:>8.0f}{figures}{row['operations']:>12}", flush=True)
    ours.close()
    reader.kill()
    tell({"benchmark": "host", "temperature": args.temperature, **versions(), "rows": rows}, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 8000], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    return parser.parse_args()


def measure(batch: int, context: int, num_steps: int, temperature: float, channel: Connection) -> dict[str, Any]:
    """Return the medians of a batch: of steps that only decode, all sequences in each."""
    max_model_len = context + 3 * num_steps + 2 * NUM_WARM_UP
    num_blocks = batch * (-(-max_model_len // BLOCK_SIZE) + 1)
    config = EngineConfig(Path(), max_num_seqs=batch, max_num_batched_tokens=8192)
    engine = Engine(config, runner=HostRunner(config, num_blocks, max_model_len), pace=Pace(), overlap=True)
    params = SamplingParams(max_tokens=max_model_len - context, ignore_eos=True, temperature=temperature)
    for i in range(batch):
        engine.add(Request(str(i), tuple((31 * i + j) % VOCAB_SIZE for j in range(context)), params, seed=i))

    def step() -> int:
        outputs = engine.step()
        channel.send(Stepped(tuple(outputs), engine.stats))
        return len(outputs)

    num_decoded = 0
    while num_decoded < NUM_WARM_UP:
        num_decoded += step() == batch
    whole, clock, parts = list[float](), Clock(), {name: list[float]() for name in COLUMNS}
    for _ in range(num_steps):
        start = time.thread_time()
        step()
        whole.append(time.thread_time() - start)
        clock.seconds.clear()
        with clock.on():
            start = time.thread_time()
            step()
            clock.seconds["rest"] = time.thread_time() - start - clock.seconds.total()
        for name, seconds in parts.items():
            seconds.append(clock.seconds[name])
    with Operations() as operations:
        step()
    parts_us = {name: 1e6 * statistics.median(seconds) for name, seconds in parts.items()}
    step_us = 1e6 * statistics.median(whole)
    return {
        "context": context,
        "batch": batch,
        "step_us": step_us,
        "parts_us": parts_us,
        "operations": operations.count,
    }


def _read(channel: Connection) -> None:
    while True:
        channel.recv_bytes()


if __name__ == "__main__":
    main()
