"""Tell stories to order: with the characters, the place, the thing or the mood that somebody asked for.

What is asked for is drawn first and told at once, so that a small model learns to do the same; a story that lacks any
of it is told again. Knows requests as data only. `chat.py` calls it.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gptserve.weights.storyteller.recipe.generator import Role, Story, Teller, lexicon, pronouns

ROLES = ("place", "thing", "food", "pet", "fear")  # those that can be asked for, each drawn from the list of its plural
CENTRAL = ("{thing", "{pet")  # a story about these mentions them more than once
WEIGHT_OF_ASKED = 30.0  # in the loss, where others have 1; with 1 copying is hardly learned
WEIGHT_OF_CHOICE = 5.0  # of words that lead to what was asked for
LEAST_FORMS = 5  # that mention them
ATTEMPTS = 20

Span = tuple[int, int, float]  # start and end in a text, weight in the loss


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
        return len(self.spans_in(text)) >= times

    def spans_in(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in re.finditer(rf"\b{re.escape(self.word)}\b", text)]


@dataclass(frozen=True, slots=True)
class Order:
    """What a story is to have; `draws` are the entries that it takes first out of lists of the lexicon."""

    hero: Character
    friend: Character
    elements: tuple[Element, ...] = ()
    draws: Mapping[str, Any] = field(default_factory=dict)
    is_sequel: bool = False

    def plots(self) -> list[str]:
        """Return the plots that have sentences for most of the elements."""
        fitting = {plot: self._num_told(plot) for plot in sorted(lexicon()["plots"])}
        return [plot for plot, count in fitting.items() if count == max(fitting.values())]

    def _num_told(self, plot: str) -> int:
        """Return for how many of the elements a plot has a sentence, or several if they are to be central."""
        forms = forms_of(plot)
        return sum(forms.count(each.slot) >= (LEAST_FORMS if each.slot in CENTRAL else 1) for each in self.elements)

    def weighty_spans(self, text: str) -> list[Span]:
        """Return where the text of a story first mentions each element, and the words that lead to it.

        In its first sentence they do not: that has room for an element however it begins.
        """
        spans: list[Span] = []
        for element in self.elements:
            start, end = element.spans_in(text)[0]
            sentence = text.rfind(". ", 0, start) + 2 if ". " in text[:start] else start
            spans += [(sentence, start, WEIGHT_OF_CHOICE), (start, end, WEIGHT_OF_ASKED)]
        return spans

    def is_fulfilled_by(self, text: str) -> bool:
        return all(element.is_in(text, 1 + (element.slot in CENTRAL)) for element in self.elements)


class OrderTeller(Teller):
    """Tells one story that has what an order asks for, most often.

    What the first sentence has no room for is told in the next ones, so that a small model need not plan.
    """

    def __init__(self, rng: random.Random, order: Order) -> None:
        super().__init__(rng)
        self._order = order
        self._draws = dict(order.draws)
        for role, who in (("hero", order.hero), ("friend", order.friend)):
            self._cast[role] = Role(who.name, kind=who.kind, **pronouns(who.pronoun))
        for role in ROLES:
            if role + "s" in order.draws:
                self._cast[role] = self.cast_role(role)

    def _paragraph(self, beats: Sequence[str]) -> str:
        if beats[0] != "opening":
            return super()._paragraph(beats)
        told = super()._paragraph(beats[:1])
        for element in self._order.elements:
            if not element.is_in(told):
                told += " " + self._sentence(self._choose(phrases()["asides"][element.slot]))
        return f"{told} {super()._paragraph(beats[1:])}".strip()

    def _forms(self, beat: str) -> Sequence[str]:
        is_start_of_sequel = self._order.is_sequel and beat == "opening"
        return phrases()["sequel"] if is_start_of_sequel else super()._forms(beat)

    def _pick(self, name: str, left: Sequence[Any]) -> Any:
        if name == "plots":
            return super()._pick(name, self._order.plots())
        wanted = self._draws.pop(name, None)
        return wanted if wanted in left else super()._pick(name, left)


def tell(rng: random.Random, order: Order) -> Story | None:
    """Return a story that has all that was ordered, or None if there seems to be no room for it."""
    for _ in range(ATTEMPTS):
        story = OrderTeller(rng, order).tell()
        if order.is_fulfilled_by(story.text):
            return story
    return None


@cache
def forms_of(plot: str) -> str:
    """Return all that the sentences of a plot may mention, in small letters."""
    known = lexicon()
    beats = [beat.rstrip("?") for paragraph in known["plots"][plot] for beat in paragraph]
    return " ".join(form.lower() for beat in beats for form in known["forms"][beat])


@cache
def phrases() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("requests.json").read_text(encoding="utf-8"))
    return loaded
