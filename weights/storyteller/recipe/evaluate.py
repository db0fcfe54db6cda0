"""Measure the storyteller: `python -m gptserve.weights.storyteller.recipe.evaluate`.

Samples 200 stories at temperature 0.8 and counts how many keep their main character's name (`judge.name_fault` is the
definition) and end with the end-of-text token; below 95 % of both together the exit status is 1. Also prints the loss
on held-out stories beside the generator's own entropy bound. It reads the shipped files with `transformers`, and knows
nothing of the engine that serves them. Nobody imports it but its test.
"""

# It reports to its user, on standard output.
# ruff: noqa: T201

import argparse
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from gptserve.weights.storyteller.recipe.data import END_ID, END_OF_TEXT
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.storyteller.recipe.judge import name_fault, pronoun_fault

FOLDER = Path(__file__).parents[1]
BAR = 0.95
LONGEST = 400  # tokens; the generator's stories stay well below


@dataclass(frozen=True, slots=True)
class Prompt:
    """The start of a story; `hero` is the main character that it names, if any."""

    text: str
    hero: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled story with its opening; `ended` when the model closed it with the end-of-text token."""

    prompt: Prompt
    text: str
    ended: bool


def prompts(count: int) -> list[Prompt]:
    """Return equally many bare starts, "Once upon a time"s, and held-out openings up to the main character's name."""
    chosen = [Prompt(END_OF_TEXT, None) if i % 2 else Prompt("Once upon a time", None) for i in range(count * 2 // 3)]
    return chosen + [
        Prompt(story.text[: story.text.index(story.hero) + len(story.hero)], story.hero)
        for story in stories("held_out", count - len(chosen))
    ]


def sample(
    model: GPT2LMHeadModel, tokenizer: Tokenizer, starts: list[Prompt], temperature: float, seed: int
) -> list[Sample]:
    """Continue prompts together."""
    ids = [list(tokenizer.encode(start.text).ids) for start in starts]
    told = continued(model, ids, {END_ID}, temperature, seed, LONGEST)
    return [
        Sample(
            start, tokenizer.decode(given + more, skip_special_tokens=False).replace(END_OF_TEXT, ""), END_ID in more
        )
        for start, given, more in zip(starts, ids, told, strict=True)
    ]


@torch.inference_mode()
def continued(
    model: GPT2LMHeadModel, prompts: list[list[int]], ends: set[int], temperature: float, seed: int, longest: int
) -> list[list[int]]:
    """Return what follows each prompt, up to and with one of `ends`, in `longest` tokens with the longest prompt.

    Each has its own stream of random numbers. Padding stands before the shorter prompts, and nothing attends to it.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    width, cache = max(map(len, prompts)), None
    inputs = torch.tensor([[END_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    told: list[list[int]] = [[] for _ in prompts]
    while not all(ends & set(row) for row in told) and mask.shape[1] < longest:
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        output = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=places,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.cache
        odds = torch.softmax(output.logits[:, -1].float() / temperature, dim=-1)
        drawn = [int(torch.multinomial(row, 1, generator=g)) for row, g in zip(odds, generators, strict=True)]
        for row, token in zip(told, drawn, strict=True):
            row.append(token)
        inputs = torch.tensor(drawn)[:, None]
        mask = torch.cat([mask, torch.ones_like(inputs)], dim=1)
    return [until_end(row, ends) for row in told]


def until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Cut behind the first of `ends`."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


@torch.inference_mode()
def held_out_loss(model: GPT2LMHeadModel, tokenizer: Tokenizer, count: int) -> tuple[float, float, int]:
    """Return nats a token of the model, of the generator's own choices (an upper bound), and the number of tokens.

    Each story stands alone after an end-of-text token; its own tokens and its closing end-of-text token count.
    """
    model_nats, own_nats, tokens = 0.0, 0.0, 0
    for story in stories("held_out", count):
        ids = torch.tensor([[END_ID, *tokenizer.encode(story.text).ids, END_ID]])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        model_nats += cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        own_nats += story.nats
        tokens += ids.shape[1] - 1
    return model_nats / tokens, own_nats / tokens, tokens


def report(samples: list[Sample]) -> bool:
    """Print the counts and the faults; return whether the bar is met."""
    faults = [name_fault(found.text, found.prompt.hero) for found in samples]
    passed = sum(fault is None and found.ended for fault, found in zip(faults, samples, strict=True))
    total = len(samples)
    print(f"name kept:          {faults.count(None)}/{total}")
    print(f"ended:              {sum(found.ended for found in samples)}/{total}")
    print(f"both:               {passed}/{total} = {passed / total:.1%} (the bar is {BAR:.0%})")
    print(f"pronouns agree:     {sum(not pronoun_fault(found.text) for found in samples)}/{total} (no bar)")
    print(f"distinct stories:   {len({found.text for found in samples})}/{total} (no bar)")
    print(f"copied from data:   {copied(samples)}/{total} of the first 50,000 training stories")
    for fault, times in Counter(fault for fault in faults if fault is not None).items():
        print(f"  fault: {fault} (x{times})")
    return passed >= BAR * total


def copied(samples: list[Sample]) -> int:
    texts = {found.text for found in samples}
    return sum(story.text in texts for story in stories("train", 50_000))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the storyteller's stories that keep the name and end.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--held-out", type=int, default=1000, help="held-out stories for the loss")
    parser.add_argument("--show", type=int, default=0, help="print so many of the stories of each start")
    arguments = parser.parse_args()
    model = GPT2LMHeadModel.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    loss, own, tokens = held_out_loss(model, tokenizer, arguments.held_out)
    print(f"held-out loss:      {loss:.4f} nats a token, perplexity {math.exp(loss):.3f} ({tokens} tokens)")
    print(f"generator's choices:{own:7.4f} nats a token, perplexity {math.exp(own):.3f} (upper bound of its entropy)")
    samples = sample(model, tokenizer, prompts(arguments.stories), arguments.temperature, seed=0)
    met = report(samples)
    for prompt in dict.fromkeys(found.prompt.text for found in samples):
        for found in [s for s in samples if s.prompt.text == prompt][: arguments.show]:
            print(f"\n--- {prompt!r}\n{found.text}{END_OF_TEXT if found.ended else ''}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
