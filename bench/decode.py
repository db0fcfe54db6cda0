"""Decode throughput of the engine compared with other engines and with the floor, in one run on one machine.

    python -m bench.decode [--shape gpt2] [--batch 1 8 32] [--kinds greedy temperature top_p] [--alone] [--repeats 3]
    python -m bench.decode --alone --peers openvino llama.cpp --peer-python ~/peers/bin/python

The weights are random, of the real shape. Each request has its own random prompt, so that no prefix is shared. All
sides produce exactly max_tokens tokens per sequence, ours and transformers in the same dtype; a run is prefill and
decode together. They take turns, and the medians are compared. `--alone` leaves transformers' generate out.
`--quantization none int8` measures two engines of ours. bench/peers.py says what the peers' environment needs.
`--prompt-len 1000 --max-tokens 1` measures the time to the first token of all sequences, in ms, and the prompt tokens
per second in it. `--prefill 1000` measures that after the rest, for as many prompts of `--batch` as one step takes.

Each turn also measures how fast memory is read. The floor of a step is the time to read the weights, and the
keys and values of all sequences at the middle of their answers. It is compared with the mean step of the engine while
all sequences decode and none was preempted. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.engines import timing
from bench.floor import Reader, step_bytes
from bench.machine import tell, versions
from bench.models import SHAPES, served_model
from bench.peers import PEERS, Compute, Work, started
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.process.garbage import collect_seldom
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import load_config

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
ENGINES: dict[str, dict[str, Any]] = {"none": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
"""What the configuration of each engine has besides; their rows stand below each other."""
PAUSE_S = 0.05  # torch's threads spin for a while after their work, in the way of what comes next

Row = dict[str, Any]


class Lengths(NamedTuple):
    """Of each sequence, in tokens."""

    prompt_len: int
    max_tokens: int


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers and folders go, too
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(args.threads)
    with served_model(args.shape, args.models) as folder:
        model = load_config(folder)
        config = EngineConfig(
            model_dir=folder,
            device=device.type,
            dtype=args.dtype,
            enable_prefix_caching=False,
            kv_cache_bytes=args.kv_cache_bytes,
            max_num_seqs=max(args.batch),
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_threads=args.threads,
            enforce_eager=args.enforce_eager,
            batch_invariant=args.batch_invariant,
        )
        engines = {name: Engine(replace(config, **ENGINES[name])) for name in args.quantization}
        with ExitStack() as stack:
            others = {
                name: stack.enter_context(started(python, name, folder, args.threads))
                for name, python in zip(args.peers, itertools.cycle(args.peer_python), strict=False)
            }
            if not args.alone:
                others["transformers"] = partial(time_transformers, load_reference(folder, device, args.dtype))
            collect_seldom()  # as the engine's process does: else some steps look for garbage among all modules
            turns = Turns(engines, others, model, args)
            rows = measure_all(turns, args.batch, args.kinds, Lengths(args.prompt_len, args.max_tokens))
            if args.prefill:
                batches = [batch for batch in args.batch if batch * args.prefill <= args.max_num_batched_tokens]
                rows += measure_all(turns, batches, args.kinds, Lengths(args.prefill, 1))
    tell({"benchmark": "decode", **describe(engines, device, args), "rows": rows}, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=["greedy"])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="also measure prompts of so many tokens alone")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of a step; 512 or the largest batch by default")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30, help="engines must fit side by side")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models written")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    parser.add_argument("--enforce-eager", action="store_true", help="decode without CUDA graphs")
    parser.add_argument("--batch-invariant", action="store_true", help="keep a row's bits the same in any batch")
    parser.add_argument("--alone", action="store_true", help="leave transformers out")
    parser.add_argument("--quantization", choices=ENGINES, nargs="+", default=["none"])
    parser.add_argument("--peers", choices=PEERS, nargs="+", default=[])
    parser.add_argument(
        "--peer-python", type=Path, nargs="+", default=[Path(sys.executable)], help="one for all, or each"
    )
    args = parser.parse_args()
    if len(args.peer_python) not in (1, len(args.peers)):
        parser.error("--peer-python takes one Python, or one for each of --peers")
    args.max_num_batched_tokens = args.max_num_batched_tokens or max(512, *args.batch)
    if args.prefill and args.prefill * min(args.batch) > args.max_num_batched_tokens:
        parser.error("--prefill takes prompts that fit into one step: raise --max-num-batched-tokens")
    return args


class Turns:
    """Engines, others with the same weights and the memory, which take turns."""

    def __init__(
        self, engines: dict[str, Engine], others: dict[str, Compute], model: ModelConfig, args: argparse.Namespace
    ) -> None:
        self._engines = engines
        self._others = others
        self._model = model
        self._repeats: int = args.repeats
        self._dtype: torch.dtype = getattr(torch, args.dtype)
        device = torch.device(next(iter(engines.values())).info.device)
        self._reader = Reader(step_bytes(model, self._dtype, batch=0, context=0), device)

    @property
    def others(self) -> list[str]:
        return [*self._others]

    def measure(self, batch: int, kind: str, lengths: Lengths) -> list[Row]:
        """Return a row of medians for each engine."""
        turns = [self._turn(seed, batch, KINDS[kind], lengths) for seed in range(1 + self._repeats)][1:]  # one warms up
        return [
            {"batch": batch, "kind": kind, "quantization": name, **lengths._asdict()}
            | {key: _median([turn[name][key] for turn in turns]) for key in turns[0][name]}
            for name in self._engines
        ]

    def _turn(
        self, seed: int, batch: int, params: dict[str, float], lengths: Lengths
    ) -> dict[str, dict[str, float | None]]:
        """Return the figures of each engine; those of a step are None if there was none in which all decode."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(self._model.vocab_size, (batch, lengths.prompt_len), generator=generator)
        work = Work(prompts.tolist(), lengths.max_tokens, **params)
        found: dict[str, dict[str, float | None]] = {}
        step_seconds: dict[str, float | None] = {}
        for name, engine in self._engines.items():
            time.sleep(PAUSE_S)
            its = timing(engine, work.prompts, work.max_tokens, **params)
            found[name] = {measure_of(work.max_tokens): figure(work, its.seconds)}
            if work.max_tokens == 1:
                found[name]["prompt_tokens_per_s"] = prompts.numel() / its.seconds
            found[name]["num_preemptions"] = its.num_preemptions
            step_seconds[name] = its.step_seconds
        for name, compute in self._others.items():
            time.sleep(PAUSE_S)
            theirs = figure(work, compute(work))
            for row in found.values():
                row[name] = theirs
        if work.max_tokens == 1:
            return found  # no step only decodes
        bandwidth, context = self._reader.bytes_per_second(), lengths.prompt_len + lengths.max_tokens // 2
        for name, row in found.items():
            quantization = ENGINES[name].get("quantization")
            floor_ms = step_bytes(self._model, self._dtype, batch, context, quantization) / bandwidth * 1e3
            seconds = step_seconds[name]
            step_ms = None if seconds is None else seconds * 1e3
            row |= {"step_ms": step_ms, "floor_ms": floor_ms, "of_floor": step_ms and floor_ms / step_ms}
            row["read_gb_per_s"] = bandwidth / 1e9
        return found


def _median(figures: list[float | None]) -> float | None:
    """Return that of the turns which have one."""
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def measure_of(max_tokens: int) -> str:
    """Return the name of what is compared."""
    return "first_token_ms" if max_tokens == 1 else "tokens_per_s"


def figure(work: Work, seconds: float) -> float:
    """Return it for work that took so long."""
    return seconds * 1e3 if work.max_tokens == 1 else len(work.prompts) * work.max_tokens / seconds


def load_reference(folder: Path, device: torch.device, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)


def time_transformers(model: Any, work: Work) -> float:
    prompts = torch.tensor(work.prompts, device=model.device)
    sampling = {"do_sample": True, "top_k": 0, "temperature": work.temperature, "top_p": work.top_p}
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.max_tokens,
            min_new_tokens=work.max_tokens,
            pad_token_id=0,
            **(sampling if work.temperature else {"do_sample": False}),
        )
    assert output.cpu().shape[1] == prompts.shape[1] + work.max_tokens
    return time.perf_counter() - start


def measure_all(turns: Turns, batches: list[int], kinds: list[str], lengths: Lengths) -> list[Row]:
    """Print and return the rows."""
    ours = ["prompt_tokens_per_s"] if lengths.max_tokens == 1 else ["step_ms", "floor_ms", "of_floor"]
    columns, rows = [measure_of(lengths.max_tokens), *turns.others, *ours], []
    print(f"{'batch':>5} {'kind':12} {'quantization':14}" + "".join(f"{name:>21}" for name in columns))
    for batch, kind in itertools.product(batches, kinds):
        for row in turns.measure(batch, kind, lengths):
            rows.append(row)
            figures = "".join(f"{'-' if row[column] is None else format(row[column], '.2f'):>21}" for column in columns)
            print(f"{row['batch']:>5} {row['kind']:12} {row['quantization']:14}{figures}", flush=True)
    return rows


def describe(engines: dict[str, Engine], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    info = next(iter(engines.values())).info
    return {
        **{name: value for name, value in vars(args).items() if name not in ("output", "models", "peer_python")},
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
        "products": {name: engine.info.product for name, engine in engines.items()},
        "transformers": transformers.__version__,
        **versions(device.type),
    }


if __name__ == "__main__":
    main()
