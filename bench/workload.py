"""The requests of one load: prompts, lengths and moments of arrival.

It knows neither servers nor clocks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

PromptKind = Literal["ids", "words"]

_TOKEN_IDS = range(100, 1000)  # most vocabularies are larger and have their special tokens at their ends
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
"""

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class Workload:
    """What the requests of a load are like; lengths are in tokens.

    A spread s draws each length evenly from [1 - s, 1 + s] times the given one. The first `shared_prefix` tokens are
    the same in all prompts. Lengths and arrivals depend on the seed alone. The content of prompts is new each time, so
    that no prefix cache knows it from an earlier run.
    """

    prompt_tokens: int = 128
    max_tokens: int = 128
    spread: float = 0.0
    shared_prefix: int = 0
    prompts: PromptKind = "ids"
    temperature: float = 0.0
    seed: int = 0

    def bodies(self, number: int) -> list[Body]:
        """Return so many requests, without the name of the model."""
        lengths = random.Random(f"lengths {self.seed}")
        tokens = _TOKEN_IDS if self.prompts == "ids" else _WORDS.split()
        shared = _draw(tokens, self.shared_prefix)
        bodies: list[Body] = []
        for _ in range(number):
            num_prompt, max_tokens = (
                max(1, round(length * lengths.uniform(1 - self.spread, 1 + self.spread)))
                for length in (self.prompt_tokens, self.max_tokens)
            )
            prompt = shared + _draw(tokens, max(1, num_prompt - len(shared)))
            sampling = {"temperature": self.temperature, "ignore_eos": True}
            text = prompt if self.prompts == "ids" else " ".join(map(str, prompt))
            bodies.append({"prompt": text, "max_tokens": max_tokens, **sampling})
        return bodies

    def arrivals(self, rate: float) -> Iterator[float]:
        """Yield the moments of a Poisson process in seconds: `rate` a second on average, the first at 0."""
        gaps = random.Random(f"arrivals {self.seed}")
        return itertools.accumulate((gaps.expovariate(rate) for _ in itertools.count()), initial=0.0)


def _draw(tokens: Sequence[str | int], number: int) -> list[str | int]:
    return random.SystemRandom().choices(tokens, k=number)
