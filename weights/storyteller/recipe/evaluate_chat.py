"""Measure how the storyteller chats: `python -m gptserve.weights.storyteller.recipe.evaluate_chat --model FOLDER`.

Types requests in held-out wordings, for pairs of name and animal that were never trained on, and counts how much of
what they ask for is in the answers, sampled at temperature 0.8. Below 95 % the exit status is 1. Asks further, too, and
for what the model cannot do. It reads a folder with `transformers`, and knows nothing of the engine that
serves them. Nobody imports it but its test.
"""

# It reports to its user, on standard output.
# ruff: noqa: T201

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from gptserve.weights.storyteller.recipe.chat import HONEST, Asker, Message, Request
from gptserve.weights.storyteller.recipe.data import END_ID, TURN_END, encoded_prompt
from gptserve.weights.storyteller.recipe.evaluate import BAR, continued
from gptserve.weights.storyteller.recipe.generator import names
from gptserve.weights.storyteller.recipe.judge import CAPITALIZED
from gptserve.weights.storyteller.recipe.order import Element


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended`: with the token that ends a turn."""

    text: str
    ended: bool

    @property
    def is_story(self) -> bool:
        return "\n\n" in self.text and HONEST not in self.text

    @property
    def is_honest(self) -> bool:
        return "\n\n" not in self.text and HONEST in self.text and self.ended


class Chatter:
    """Answers conversations; each answer depends on its place in the list."""

    def __init__(self, folder: Path, temperature: float) -> None:
        self._model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._temperature = temperature

    def answers(self, conversations: Sequence[Sequence[Message]]) -> list[Answer]:
        prompts = [encoded_prompt(self._tokenizer, conversation) for conversation in conversations]
        [end] = self._tokenizer.encode(TURN_END).ids
        longest = self._model.config.n_positions
        told = continued(self._model, prompts, {end, END_ID}, self._temperature, seed=0, longest=longest)
        return [Answer(self._tokenizer.decode(row), row[-1] == end) for row in told]

    def chat(self, requests: Sequence[str]) -> list[Answer]:
        return self.answers([[Message("user", request)] for request in requests])


def main_character(story: str) -> str:
    """Return the first name in a story, or nothing."""
    return next((word for word in CAPITALIZED.findall(story) if word in names()), "")


def keeps(name: str, story: str) -> bool:
    """Tell whether the name is in the first and in the last paragraph."""
    paragraphs = story.split("\n\n")
    return all(name in CAPITALIZED.findall(paragraph) for paragraph in (paragraphs[0], paragraphs[-1]))


def report(what: str, good: Sequence[bool]) -> float:
    """Print a figure and return it."""
    print(f"{what + ':':<56}{sum(good)}/{len(good)} = {sum(good) / len(good):.1%}")
    return sum(good) / len(good)


def measure_stories(chatter: Chatter, asker: Asker, count: int) -> tuple[float, list[tuple[Request, Answer]]]:
    """Ask for stories; return the share of what was asked for that is in them, and the exchanges."""
    requests = [asker.story() for _ in range(count)]
    told = list(zip(requests, chatter.chat([request.text for request in requests]), strict=True))
    found = [[element.is_in(answer.text) for element in request.order.elements] for request, answer in told]
    share = report("what a request asks for is in the story", [one for each in found for one in each])
    report("... all of it", [all(each) for each in found])
    report("... the answer is a story", [answer.is_story for _, answer in told])
    report("... and ends its turn", [answer.ended for _, answer in told])
    return share, told


def measure_sequels(chatter: Chatter, asker: Asker, told: Sequence[tuple[Request, Answer]]) -> None:
    """Ask for more of the stories."""
    stories = [(request.text, answer.text) for request, answer in told if answer.is_story]
    conversations = [
        [Message("user", request), Message("assistant", story), Message("user", asker.go_on(main_character(story)))]
        for request, story in stories
    ]
    more = chatter.answers(conversations)
    kept = [keeps(main_character(story), answer.text) for (_, story), answer in zip(stories, more, strict=True)]
    report('"and then?": the main character keeps the name', kept)
    report("... and the answer ends its turn", [answer.ended for answer in more])


def measure_names(chatter: Chatter, asker: Asker, count: int) -> None:
    """Ask for stories about somebody whose name was in no training story."""
    asked = [asker.story() for _ in range(count)]
    requests = [one for one in asked if Element("{hero", one.order.hero.name) in one.order.elements]
    answers = chatter.chat([request.text for request in requests])
    kept = [keeps(request.order.hero.name, answer.text) for request, answer in zip(requests, answers, strict=True)]
    report("a name that was in no training story is kept", kept)


def measure_lines(chatter: Chatter, asker: Asker, count: int) -> list[tuple[str, Answer]]:
    """Ask for what the model cannot do; return the exchanges."""
    requests = asker.every_off_topic()
    lines = chatter.chat(requests)
    report("other requests: an honest line", [line.is_honest for line in lines])
    unknown = [asker.unknown() for _ in range(count)]
    refused = chatter.chat(unknown)
    report("stories about what it does not know: an honest line", [line.is_honest for line in refused])
    return list(zip([*requests, *unknown], [*lines, *refused], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count how much of what is asked for the storyteller tells.")
    parser.add_argument("--model", type=Path, required=True, help="folder that the second stage wrote")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--show", type=int, default=0, help="print so many of the answers of each kind")
    arguments = parser.parse_args()
    chatter = Chatter(arguments.model, arguments.temperature)
    asker = Asker(random.Random("storyteller:evaluate"), "held_out", more_names=0)
    share, told = measure_stories(chatter, asker, arguments.requests)
    measure_sequels(chatter, asker, told)
    measure_names(chatter, Asker(random.Random("storyteller:names"), "held_out", more_names=1), arguments.requests)
    lines = measure_lines(chatter, asker, arguments.requests // 2)
    shown = [(request.text, answer) for request, answer in told[: arguments.show]] + lines[: arguments.show]
    for text, answer in shown:
        print(f"\n--- {text}\n{answer.text}")
    print(f"\nThe bar: {BAR:.0%} of what the requests ask for, {share:.1%} found.")
    sys.exit(0 if share >= BAR else 1)


if __name__ == "__main__":
    main()
