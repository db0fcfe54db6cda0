"""Make the storyteller from nothing: `python -m gptserve.weights.storyteller.recipe.train`.

The first stage trains the tokenizer, then a GPT-2 on stories. The second, `--chat-from` a folder that the first wrote,
adds two tokens and trains it on conversations and stories. Both compute in fp32 with bf16 autocast (1.7 times as fast
as fp32 where it was made), and write a Hugging Face folder, rounded to bf16. Progress goes to standard output: step,
loss, tokens a second, time left.
It knows `transformers` for the model only; the loop is below. Nobody imports it but its test.
"""

# It reports to its user, on standard output.
# ruff: noqa: T201

import argparse
import copy
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from gptserve.weights.storyteller.recipe.chat import Kind
from gptserve.weights.storyteller.recipe.data import (
    END_ID,
    FIRST_STORY_BESIDE_CHAT,
    TURN_END,
    Packer,
    Token,
    add_chat_tokens,
    encoded_conversations,
    encoded_stories,
    of_like_length,
    save_tokenizer,
    train_tokenizer,
    write_text,
)

FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a stage that affect its result."""

    steps: int = 3600
    vocab_size: int = 2048
    tokenizer_stories: int = 20_000
    context_length: int = 1024
    width: int = 192
    layers: int = 4
    heads: int = 6
    rows: int = 12
    row_length: int = 384
    long_every: int = 8  # one batch in long_every has rows of the whole context, so that every position is learned
    peak_rate: float = 4e-3
    warm_up: int = 200
    cool_down: int = 1200
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1
    log_every: int = 50
    save_every: int = 250


STORIES = Recipe()
CHAT = Recipe(steps=6000, rows=8, peak_rate=3e-3, warm_up=100, cool_down=3000)
CHAT_BATCHES = ("drill", "story", "drill", "talk")  # and again


@dataclass(slots=True)
class Progress:
    """The figures of the progress line; tokens are those that are learned."""

    started: float
    tokens: int = 0
    loss: float = math.nan

    def line(self, step: int, steps: int, rate: float) -> str:
        spent = time.monotonic() - self.started
        left = spent / step * (steps - step)
        return (
            f"step {step:5d}/{steps}  loss {self.loss:.4f}  rate {rate:.2e}  {self.tokens / spent:6.0f} tokens/s  "
            f"{self.tokens / 1e6:.2f}M tokens  {spent / 60:.1f} min, {left / 60:.1f} min left"
        )


def new_model(recipe: Recipe, vocab_size: int) -> GPT2LMHeadModel:
    torch.manual_seed(recipe.seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=recipe.context_length,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        activation_function="gelu_pytorch_tanh",  # the same function as GPT-2's gelu_new, in one kernel
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return GPT2LMHeadModel(config)


def batch(rows: list[list[Token]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad rows to inputs, next-token targets and their weights, each [rows, longest row - 1]; padding weighs 0."""
    length = max(map(len, rows))
    padded = torch.tensor([row + [(END_ID, 0.0)] * (length - len(row)) for row in rows], dtype=torch.float64)
    ids, weights = padded[..., 0].long(), padded[..., 1].float()
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]


def total_weight(rows: list[list[Token]]) -> float:
    return sum(weight for row in rows for _, weight in row[1:])


def weighted_loss(model: GPT2LMHeadModel, rows: list[list[Token]]) -> torch.Tensor:
    """Return the sum of the next tokens' cross-entropies times their weights, in nats, in fp32."""
    inputs, targets, weights = batch(rows)
    learned = weights > 0
    logits = model.lm_head(model.transformer(input_ids=inputs, use_cache=False).last_hidden_state[learned])
    losses = cross_entropy(logits.float(), targets[learned], reduction="none")
    return (losses * weights[learned]).sum()  # not a product of vectors, which autocast would take in bf16


class Workers:
    """Two threads that each compute the gradients of half a batch on one core, meeting once a step.

    Splitting the batch instead of every operation keeps both cores busy on a machine that is shared, and makes the
    sums, and so the model, independent of how many cores there are. While it is open, torch itself uses one thread.
    The twins share the model's storage, not its gradients.
    """

    def __init__(self, model: GPT2LMHeadModel) -> None:
        self._twins = [model, copy.deepcopy(model)]
        for parameter, shared in zip(self._twins[1].parameters(), model.parameters(), strict=True):
            parameter.data = shared.data
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(len(self._twins), initializer=torch.set_num_threads, initargs=(1,))

    def close(self) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._threads_before)

    def gradients(self, rows: list[list[Token]]) -> float:
        """Leave the gradients of the weighted mean loss in the model; return that loss."""
        total = total_weight(rows)
        jobs = [
            self._pool.submit(self._half, twin, rows[i :: len(self._twins)], total)
            for i, twin in enumerate(self._twins)
        ]
        loss = sum(job.result() for job in jobs)
        for mine, other in zip(*(twin.parameters() for twin in self._twins), strict=True):
            mine.grad += other.grad
        self._twins[1].zero_grad()
        return loss

    def clip(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._twins[0].parameters(), norm)

    @staticmethod
    def _half(twin: GPT2LMHeadModel, rows: list[list[Token]], total: float) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = weighted_loss(twin, rows) / total
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 1..steps: a straight warm-up, the peak, and half a cosine down to a hundredth of it."""
    if step <= recipe.warm_up:
        return recipe.peak_rate * step / recipe.warm_up
    done = max(0.0, 1 - (recipe.steps - step) / recipe.cool_down)
    return recipe.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def new_optimizers(recipe: Recipe, model: GPT2LMHeadModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for embeddings, biases and norms.

    Muon (Jordan 2024, with the update size of Liu et al. 2025, section 2.2) needs far fewer tokens than AdamW alone.
    """
    blocks = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": tables, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(blocks, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True),
    ]


def train(recipe: Recipe, folder: Path) -> list[float]:
    """Write a trained model and its tokenizer into `folder`; return the loss of every step."""
    tokenizer: Tokenizer = train_tokenizer(recipe.vocab_size, recipe.tokenizer_stories)
    model = new_model(recipe, tokenizer.get_vocab_size())
    return fit(recipe, model, tokenizer, story_batches(recipe, encoded_stories(tokenizer)), folder)


def train_chat(recipe: Recipe, stories: Path, folder: Path) -> list[float]:
    """Teach the model in the folder `stories` to chat; write it into `folder`; return the loss of every step."""
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    add_chat_tokens(tokenizer)
    model = new_model(recipe, tokenizer.get_vocab_size())
    state = GPT2LMHeadModel.from_pretrained(stories, dtype=torch.float32).state_dict()
    table = state["transformer.wte.weight"]
    new = table.mean(dim=0, keepdim=True).expand(tokenizer.get_vocab_size() - len(table), -1)
    state["transformer.wte.weight"] = state["lm_head.weight"] = torch.cat([table, new])
    model.load_state_dict(state)
    return fit(recipe, model, tokenizer, chat_batches(recipe, tokenizer), folder)


def story_batches(recipe: Recipe, source: Iterator[list[Token]]) -> Iterator[list[list[Token]]]:
    """Yield batches of packed rows."""
    packer = Packer(source, recipe.seed)
    for step in itertools.count(1):
        length, rows = recipe.row_length, recipe.rows
        if step % recipe.long_every == 0:
            rows = max(2, rows * length // recipe.context_length)  # one for each worker at least
            length = recipe.context_length
        yield packer.rows(rows, length)


def chat_batches(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[list[list[Token]]]:
    """Yield batches of drills, of talks, and of stories, so that they are not forgotten."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    batches = {"story": story_batches(recipe, encoded_stories(tokenizer, FIRST_STORY_BESIDE_CHAT))}
    for kind in kinds:
        conversations = encoded_conversations(tokenizer, recipe.context_length, kind)
        batches[kind] = of_like_length(conversations, recipe.rows * recipe.row_length, recipe.seed)
    return (next(batches[name]) for name in itertools.cycle(CHAT_BATCHES))


def fit(
    recipe: Recipe, model: GPT2LMHeadModel, tokenizer: Tokenizer, batches: Iterator[list[list[Token]]], folder: Path
) -> list[float]:
    """Train the model, and write it with its tokenizer into `folder` now and then; return the loss of every step."""
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    optimizers = new_optimizers(recipe, model)
    losses: list[float] = []
    progress = Progress(time.monotonic())
    with closing(Workers(model)) as workers:
        for step, rows in zip(range(1, recipe.steps + 1), batches, strict=False):
            losses.append(train_step(recipe, workers, optimizers, rows, step))
            progress.tokens += sum(weight > 0 for row in rows for _, weight in row[1:])
            if step % recipe.log_every == 0 or step == recipe.steps:
                recent = losses[-recipe.log_every :]
                progress.loss = sum(recent) / len(recent)
                print(progress.line(step, recipe.steps, learning_rate(recipe, step)), flush=True)
            if step % recipe.save_every == 0 or step == recipe.steps:
                save_tokenizer(tokenizer, folder, recipe.context_length)
                save_model(model, folder, [END_ID, tokenizer.token_to_id(TURN_END)])
    return losses


def train_step(
    recipe: Recipe,
    workers: Workers,
    optimizers: list[torch.optim.Optimizer],
    rows: list[list[Token]],
    step: int,
) -> float:
    """Update the model with one batch; return its loss."""
    loss = workers.gradients(rows)
    workers.clip(recipe.clip)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def save_model(model: GPT2LMHeadModel, folder: Path, ends: list[int | None]) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16, tied head left out).

    `ends` are the ids of the tokens that end a text, None for one that the tokenizer lacks.
    """
    config = model.config.to_diff_dict()
    config |= {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    ends = [end for end in ends if end is not None]
    eos = ends if len(ends) > 1 else END_ID
    generation = {"bos_token_id": END_ID, "eos_token_id": eos, "do_sample": True, "temperature": 0.8}
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_text(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = folder / "model.safetensors.partial"
    partial.write_bytes(save(weights, metadata={"format": "pt"}))
    os.replace(partial, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the storyteller from nothing.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (default: the shipped model's)")
    parser.add_argument("--chat-from", type=Path, help="folder that the first stage wrote: run the second")
    arguments = parser.parse_args()
    if arguments.chat_from is None:
        train(STORIES, arguments.out)
    else:
        train_chat(CHAT, arguments.chat_from, arguments.out)


if __name__ == "__main__":
    main()
