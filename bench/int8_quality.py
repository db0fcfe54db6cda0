"""What int8 costs a trained model, and what other scales would cost: perplexity, KL from fp32, equal greedy tokens.

    python -m bench.int8_quality MODEL TEXT [TEXT ...] [--sides bf16 int8 q8_0 g32 g64.remainders]
        [--tokens-to TOKENS.json] [--logits Q8_0=LOGITS.npy]

`bf16`, `int8`, `int4`, `int8-kv`, which is bf16 with the KV cache in int8, and `stored`, with codes as the files hold
them, are the engine as it serves. All other sides are
simulated: weights and rows are rounded to what a kernel would read, and products of them are computed in fp32, with the
rest of the model and the KV cache in fp32, too.

A side `gN` has a scale in fp16 for each N weights of an output, g0 one for the whole output. Each N elements of a row
have a scale as well. Words behind it change that, in any order:
    squares     a scale of weights has the least squared error instead of the largest weight at 127
    remainders  what rounding leaves of some groups of a row is multiplied, too, as today
    wide        rows are not rounded: what weights alone cost
`q8_0` is llama.cpp's type of this name, its embedding included; `--logits` takes what llama.cpp itself returned, which
bench/llama_logits.py writes. A change of perplexity comes with its standard error, as few thousand positions leave it
uncertain; KL is far more certain. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.machine import tell, versions
from gptserve.engine.backends.cpu.int8 import REMAINDER_SHARE
from gptserve.engine.config import EngineConfig, WeightType
from gptserve.engine.engine import Engine
from gptserve.engine.model.activation import activate
from gptserve.engine.model.linear import Affine, Linear
from gptserve.engine.request import Request, SamplingParams, TokenLogprobs
from gptserve.engine.runner import products, prompt_logprobs
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.products import ProductOptions, make_linear
from gptserve.engine.runner.runner import ModelRunner
from gptserve.weights.config import Activation
from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.unread import UnreadWeight

Error = Literal["largest", "squares", "q8_0"]
WORDS = frozenset({"squares", "remainders", "wide"})
STEP = 127
"""The largest multiple of a scale."""
DIVISORS = tuple(STEP + k / 4 for k in range(-16, 9))
"""The least squared error is sought among scales that are the largest weight divided by these."""
ELEMENTS = 2**18
"""As many weights are rounded at once: they stay in a core's cache."""
WINDOW, WINDOWS = 512, 8
SIDES = ("bf16", "int8", "q8_0", "g32", *(f"g{n}.remainders" for n in (32, 64)))
AS_SERVED: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16", "quantization": "none"},
    "stored": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-kv": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a simulated side rounds. A group of 0 is a whole row of weights."""

    group: int
    error: Error = "largest"
    words: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, side: str) -> Recipe:
        """Return what a side such as `g64.squares.wide` means; raises ValueError."""
        if side == "q8_0":
            return cls(32, "q8_0")
        name, *words = side.split(".")
        if name[:1] != "g" or not name[1:].isdecimal() or not WORDS.issuperset(words):
            rule = f"bf16, int8, q8_0 or gN with any of .{', .'.join(sorted(WORDS))}"
            raise ValueError(f"a side must be {rule}, got {side!r}")
        error: Error = "squares" if "squares" in words else "largest"
        return cls(int(name[1:]), error, frozenset(words))


def fake_quantized(values: Tensor, group: int, error: Error = "largest") -> Tensor:
    """Return fp32 values [rows, in] as int8 with a scale in fp16 for each `group` of a row gives them back.

    Q8_0 divides by the scale before it is rounded to fp16, the others after that.
    """
    num_in = values.shape[1]
    group = group or num_in
    pieces = torch.split(values, max(1, ELEMENTS // num_in))
    done = [
        _fake_quantized(functional.pad(piece, (0, -num_in % group)).view(len(piece), -1, group), error)
        for piece in pieces
    ]
    return torch.cat([piece.flatten(1)[:, :num_in] for piece in done])


def _fake_quantized(groups: Tensor, error: Error) -> Tensor:
    largest = groups.abs().amax(-1, keepdim=True)
    if error == "q8_0":
        exact = largest / STEP
        return _multiples(groups, exact) * exact.half().float()
    scales = (largest / STEP).half().float()
    best = _multiples(groups, scales) * scales
    if error == "squares":
        least = (groups - best).square_().sum(-1, keepdim=True)
        for divisor in DIVISORS:
            multiples = _multiples(groups, largest / divisor)
            # The best scale of given multiples is their regression on the weights.
            squares = multiples.square().sum(-1, keepdim=True).clamp_(min=1)
            scales = ((groups * multiples).sum(-1, keepdim=True) / squares).half().float()
            other = multiples.mul_(scales)
            its_error = (groups - other).square_().sum(-1, keepdim=True)
            best = torch.where(its_error < least, other, best)
            least = torch.minimum(its_error, least)
    return best


def _multiples(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / torch.where(scales > 0, scales, 1.0)).round_().clamp_(-STEP, STEP)


def with_remainders(x: Tensor, rounded: Tensor, group: int) -> Tensor:
    """Return rounded fp32 rows [rows, in] with what rounding left of their groups with the largest scales, rounded."""
    left, largest = fake_quantized(x - rounded, group).split(group, 1), [t.abs().amax(1) for t in x.split(group, 1)]
    chosen = torch.stack(largest, 1).topk(-(-len(left) // REMAINDER_SHARE), dim=1).indices
    is_chosen = torch.zeros(len(x), len(left), dtype=torch.bool).scatter_(1, chosen, True)
    return rounded + torch.cat([part * its[:, None] for part, its in zip(left, is_chosen.T, strict=True)], 1)


class SimulatedLinear:
    """A product of rounded rows with rounded weights, in fp32."""

    def __init__(self, recipe: Recipe, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> None:
        self._recipe, self._bias, self._activation = recipe, bias, activation
        self._weight = fake_quantized(weight.float(), recipe.group, recipe.error)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(self._rounded(x), self._weight)
        y = activate(y if self._bias is None else y + self._bias, self._activation)
        return y if residual is None else y + residual

    def _rounded(self, x: Tensor) -> Tensor:
        if "wide" in self._recipe.words:
            return x
        # Rows come while the model runs, so their scales are not sought.
        group = self._recipe.group or x.shape[1]
        rounded = fake_quantized(x, group, "q8_0" if self._recipe.error == "q8_0" else "largest")
        return with_remainders(x, rounded, group) if "remainders" in self._recipe.words else rounded


@contextmanager
def simulated(recipe: Recipe) -> Iterator[None]:
    """Have models that load in int8 compute as the recipe says."""

    def make(affine: Affine, weight_type: WeightType | None, options: ProductOptions) -> Linear:
        if weight_type is None:
            return make_linear(affine, weight_type, options)
        weight = affine.weight.whole() if isinstance(affine.weight, UnreadWeight) else affine.weight
        assert isinstance(weight, Tensor)
        return SimulatedLinear(recipe, weight, affine.bias, affine.activation)

    with patch.object(products, "make_linear", make):
        yield


@dataclass
class Comparison:
    """Logits of a text's positions compared with those of fp32, in nats; `add` takes rows in the order of the text."""

    expected: Sequence[Tensor]
    """The fp32 logprobs [rows, vocab] of the reference, by pieces of as many rows as `add` gets."""
    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    num_pieces: int = 0

    def add(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Take fp32 logits [rows, vocab] and the tokens that come, int64 [rows]; return the logprobs of the logits."""
        logprobs = logits.float().log_softmax(1)
        reference = self.expected[self.num_pieces] if self.expected else logprobs
        self.num_pieces += 1
        self.losses += (-logprobs[torch.arange(len(targets)), targets]).tolist()
        self.divergences += divergence(reference, logprobs).tolist()
        self.equal += (reference.argmax(1) == logprobs.argmax(1)).tolist()
        return logprobs

    def figures(self, reference: Comparison) -> dict[str, float]:
        """Return means over all positions; `error` is the standard error of `change`, that of the perplexity."""
        num, perplexity = len(self.losses), math.exp(statistics.fmean(self.losses))
        changes = [its - expected for its, expected in zip(self.losses, reference.losses, strict=True)]
        return {
            "positions": num,
            "perplexity": perplexity,
            "change": math.expm1(statistics.fmean(changes)),
            "error": statistics.stdev(changes) / math.sqrt(num),
            "kl": math.fsum(self.divergences) / num,
            "greedy": sum(self.equal) / num,
        }


def divergence(reference: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(reference || other) in nats of each row of two tables of logprobs [rows, vocab], in fp64."""
    return functional.kl_div(logprobs.double(), reference.double(), reduction="none", log_target=True).sum(1)


def measure(
    folder: Path, side: str, windows: Sequence[Sequence[int]], expected: Sequence[Tensor]
) -> tuple[Comparison, list[Tensor]]:
    """Return a side's figures, and the logprobs by pieces if it is the reference, which is `fp32`."""
    found, pieces = Comparison(expected), list[Tensor]()

    def take(logits: Tensor, targets: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
        logprobs = found.add(logits, targets)
        if side == "fp32":
            pieces.append(logprobs)
        return top_logprobs(logits, targets, num_top)

    with ExitStack() as stack:
        options = AS_SERVED.get(side, {"dtype": "float32", "quantization": "none"})
        if side not in AS_SERVED and side != "fp32":
            stack.enter_context(simulated(Recipe.parse(side)))
            options = {**options, "quantization": "int8"}
        window = len(windows[0])
        config = EngineConfig(
            folder, device="cpu", max_model_len=window + 1, max_num_seqs=1, enable_prefix_caching=False, **options
        )
        runner = ModelRunner(config)
        if side == "q8_0":
            runner._decoder._embedding = fake_quantized(runner._decoder._embedding, 32, "q8_0")
        engine = Engine(config, runner=runner)
        stack.enter_context(patch.object(prompt_logprobs, "top_logprobs", take))
        for ids in windows:  # one after the other, so that their rows come in order
            engine.add(
                Request("", tuple(ids), SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1), seed=0)
            )
            while engine.has_work:
                engine.step()
    return found, pieces


def compare_logits(path: Path, windows: Sequence[Sequence[int]], expected: Sequence[Tensor]) -> Comparison:
    """Return the figures of logits [windows, window - 1, vocab] that another engine wrote for these tokens."""
    found, logits = Comparison(expected), np.load(path, mmap_mode="r")
    rows = torch.tensor([ids[1:] for ids in windows]).flatten()
    flat, start = logits.reshape(-1, logits.shape[-1]), 0
    for piece in expected:
        end = start + len(piece)
        found.add(torch.from_numpy(np.array(flat[start:end], dtype=np.float32)), rows[start:end])
        start = end
    return found


def cut(tokens: Sequence[int], window: int, num: int) -> list[list[int]]:
    """Return `num` windows of a text, spread evenly over it; raises ValueError if it has too few tokens."""
    if len(tokens) < window * num:
        raise ValueError(f"the text must have {num} windows of {window} tokens, got {len(tokens)} tokens")
    starts = [i * (len(tokens) - window) // max(1, num - 1) for i in range(num)]
    return [list(tokens[start : start + window]) for start in starts]


def main() -> None:
    args = parse_arguments()
    folder = resolve_model(args.model)
    tokens = Tokenizer.of_model(folder).encode("\n\n".join(path.read_text(encoding="utf-8") for path in args.text))
    windows = cut(tokens, args.window, args.windows)
    if args.tokens_to is not None:
        args.tokens_to.write_text(json.dumps(windows))
    rows, expected, reference = [], list[Tensor](), None
    print(f"{'':>24} {'perplexity':>10} {'change':>16} {'KL':>9} {'greedy':>7}")
    for side in ("fp32", *args.sides, *args.logits):
        start = time.perf_counter()
        name, _, path = side.partition("=")
        if path:
            found = compare_logits(Path(path), windows, expected)
        else:
            found, pieces = measure(folder, side, windows, expected)
            expected = expected or pieces
        reference = reference or found
        figures = found.figures(reference)
        rows.append({"side": name, **figures, "seconds": round(time.perf_counter() - start, 1)})
        change = f"{figures['change']:+.2%} ± {figures['error']:.2%}"
        kl, greedy = figures["kl"], figures["greedy"]
        print(f"{name:>24} {figures['perplexity']:>10.4f} {change:>16} {kl:>9.5f} {greedy:>7.2%}", flush=True)
        gc.collect()
    tell(
        {"benchmark": "int8_quality", "model": folder.name, "window": args.window, "rows": rows, **versions()},
        args.output,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("text", type=Path, nargs="+", help="UTF-8 files, read as one text")
    parser.add_argument("--sides", nargs="*", default=list(SIDES))
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--tokens-to", type=Path, help="write the windows here, for another engine")
    parser.add_argument(
        "--logits", nargs="*", default=[], metavar="NAME=FILE", help="what that engine returned for them"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    for side in args.sides:
        if side not in AS_SERVED:
            Recipe.parse(side)
    return args


if __name__ == "__main__":
    main()
