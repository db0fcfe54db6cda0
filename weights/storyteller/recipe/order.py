"""Tell stories to order: with the characters, the place, the thing or the mood that somebody asked for.

What is asked for is drawn first, and told as early as the plot has a sentence for it, so that a small model learns to
do the same; a story that lacks any of it is told again. Knows requests as data only. `chat.py` calls it.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gptserve.weights.storyteller.recipe.generator import Role, Story, Teller, pronouns

ROLES = ("place", "thing", "food", "pet", "fear")  # those that can be asked for, each drawn from the list of its plural
CENTRAL = ("{thing", "{pet")  # a story about these mentions them more than once
ATTEMPTS = 40


@dataclass(frozen=True, slots=True)
class Character:
    name: str
    pronoun: str
    kind: str


@dataclass(frozen=True, slots=True)
class Element:
    """Something asked for: `slot` is how a form of the lexicon mentions it, `word` what the story must then hold."""

    slot: str
    word: str

    def is_in(self, text: str, times: int = 1) -> bool:
        return len(re.findall(rf"\b{re.escape(self.word)}\b", text)) >= times


@dataclass(frozen=True, slots=True)
class Order:
    """What a story is to have; `draws` are the entries that it takes first out of lists of the lexicon."""

    hero: Character
    friend: Character
    elements: tuple[Element, ...] = ()
    draws: Mapping[str, Any] = field(default_factory=dict)
    is_sequel: bool = False

    def end_in(self, text: str) -> int:
        """Return the place in the text of a story by which everything ordered has been told."""
        return max((text.index(element.word) + len(element.word) for element in self.elements), default=0)

    def is_fulfilled_by(self, text: str) -> bool:
        return all(element.is_in(text, 1 + (element.slot in CENTRAL)) for element in self.elements)


class OrderTeller(Teller):
    """Tells one story that has what an order asks for, if its plot has room for it."""

    def __init__(self, rng: random.Random, order: Order) -> None:
        super().__init__(rng)
        self._order = order
        self._draws = dict(order.draws)
        self._told = ""
        for role, who in (("hero", order.hero), ("friend", order.friend)):
            self._cast[role] = Role(who.name, kind=who.kind, **pronouns(who.pronoun))
        for role in ROLES:
            if role + "s" in order.draws:
                self._cast[role] = self.cast_role(role)

    def _is_told(self, optional_beat: str) -> bool:
        return super()._is_told(optional_beat) or bool(self._helpful(optional_beat))

    def _forms(self, beat: str) -> Sequence[str]:
        return self._helpful(beat) or self._all_forms(beat)

    def _helpful(self, beat: str) -> Sequence[str]:
        """Return the forms that mention something asked for and not yet told."""
        untold = [element.slot for element in self._order.elements if not element.is_in(self._told)]
        return [form for form in self._all_forms(beat) if any(slot in form.lower() for slot in untold)]

    def _all_forms(self, beat: str) -> Sequence[str]:
        is_start_of_sequel = self._order.is_sequel and beat == "opening"
        return phrases()["sequel"] if is_start_of_sequel else super()._forms(beat)

    def _sentence(self, form: str) -> str:
        text = super()._sentence(form)
        self._told += text + " "
        return text

    def _pick(self, name: str, left: Sequence[Any]) -> Any:
        wanted = self._draws.pop(name, None)
        return wanted if wanted in left else super()._pick(name, left)


def tell(rng: random.Random, order: Order) -> Story | None:
    """Return a story that has all that was ordered, or None if no plot seems to have room for it."""
    for _ in range(ATTEMPTS):
        story = OrderTeller(rng, order).tell()
        if order.is_fulfilled_by(story.text):
            return story
    return None


@cache
def phrases() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("requests.json").read_text(encoding="utf-8"))
    return loaded
