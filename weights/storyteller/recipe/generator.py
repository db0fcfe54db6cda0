"""Write short children's stories from a grammar, the same story for the same split and index.

A story is a plot of beats; each beat picks one sentence form out of `lexicon.json`, and each form has alternatives
(`[a|b]`), words (`<name>`, no word twice while others are left) and roles (`{hero.he}`, cast once and kept). Every
choice is uniform and its log-probability is added up, so a story knows an upper bound of its own entropy in nats.
No sentence begins with a name told before: a small model often names the wrong one of two characters there.
It knows no tokens and no model. `data.py` trains on its "train" split; `evaluate.py` and the tests use "held_out";
`order.py` tells stories that somebody asked for.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Split = Literal["train", "held_out"]

CHOICE = re.compile(r"\[([^\[\]]*)\]|<(\w+)>")
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
FORMS_OF_PRONOUN = ("he", "him", "his")  # the spelling used in the lexicon for subject, object and possessive


@dataclass(frozen=True, slots=True)
class Story:
    """A finished story; `nats` is minus the log-probability of the choices that led to it."""

    text: str
    hero: str
    friend: str | None
    pronoun: str
    plot: str
    nats: float


class Role:
    """A word or name with its inflected forms; a form asked for with a capital letter is capitalized."""

    def __init__(self, text: str, **forms: str) -> None:
        self._text = text
        self._forms = forms

    def __str__(self) -> str:
        return self._text

    def __getattr__(self, form: str) -> str:
        found = self._forms[form.lower()]
        return found if form[0].islower() else capitalize(found)


class Cast(dict[str, Role]):
    """The roles of one story, each cast when a sentence first names it."""

    def __init__(self, teller: "Teller") -> None:
        super().__init__()
        self._teller = teller

    def __missing__(self, name: str) -> Role:
        self[name] = self._teller.cast_role(name)
        return self[name]


class Teller:
    """Tells one story; holds the random stream, what is left of each list, and the sum of log-probabilities."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lexicon = lexicon()
        self._left: dict[str, list[Any]] = {}
        self._cast = Cast(self)
        self.nats = 0.0

    def tell(self) -> Story:
        plot = self._draw("plots", sorted(self._lexicon["plots"]))
        paragraphs = [self._paragraph(beats) for beats in self._lexicon["plots"][plot]]
        hero = self._cast["hero"]
        friend = str(self._cast["friend"]) if "friend" in self._cast else None
        return Story("\n\n".join(paragraphs), str(hero), friend, hero.he, plot, self.nats)

    def cast_role(self, name: str) -> Role:
        """Draw the person, thing or place that plays `name` in this story."""
        if name in ("hero", "friend"):
            return self._character()
        if name in ("elder", "kin"):
            return self._grown_up(family_only=name == "kin")
        if name in ("place", "far"):
            preposition, noun = self._draw("places")
            return Role(noun, at=f"{preposition} the {noun}", to=f"to the {noun}")
        if name == "trap":
            where, verb = self._draw("traps")
            return Role(where, at=where, verb=verb)
        if name == "spot":
            return Role(self._draw("spot", self._lexicon["words"]["spot"]))
        if name == "thing":
            look, noun = self._draw("looks"), self._draw("things")
            return Role(noun, look=look, full=f"{look} {noun}", a=f"a {look} {noun}")
        noun = self._draw(name + "s")
        return Role(noun, a=f"a {noun}", the=f"the {noun}")

    def _character(self) -> Role:
        she, he = self._lexicon["names"]["she"], self._lexicon["names"]["he"]
        name, pronoun = self._draw("names", [(n, "she") for n in she] + [(n, "he") for n in he])
        child = self._choose(("child", "animal")) == "child"
        kind = {"she": "girl", "he": "boy"}[pronoun] if child else self._draw("animals")
        return Role(name, kind=kind, **pronouns(pronoun))

    def _grown_up(self, family_only: bool) -> Role:
        group = "family" if family_only else self._choose(("family", "folk"))
        people = [(noun, pronoun) for pronoun in ("she", "he") for noun in self._lexicon[group][pronoun]]
        noun, pronoun = self._draw(group, people)
        if group == "folk":
            return Role(noun, a=f"a {noun}", the=f"the {noun}", **pronouns(pronoun))
        own = f"{self._cast['hero'].his} {noun}"
        return Role(noun, a=own, the=own, **pronouns(pronoun))

    def _paragraph(self, beats: Sequence[str]) -> str:
        told = [beat.rstrip("?") for beat in beats if not beat.endswith("?") or self._is_told(beat.rstrip("?"))]
        return " ".join(self._sentence(self._choose(self._forms(beat))) for beat in told)

    def _is_told(self, optional_beat: str) -> bool:
        return self._choose((True, False))

    def _forms(self, beat: str) -> Sequence[str]:
        forms: Sequence[str] = self._lexicon["forms"][beat]
        return forms

    def _sentence(self, form: str) -> str:
        while found := CHOICE.search(form):
            options, word = found.groups()
            chosen = self._choose(options.split("|")) if word is None else self._word(word)
            form = form[: found.start()] + chosen + form[found.end() :]
        text = form.format_map(self._cast).replace("“", '"').replace("”", '"')
        return capitalize(re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text))

    def _word(self, name: str) -> str:
        word: str = self._draw(name.lower(), self._lexicon["words"][name.lower()])
        return word if name[0].islower() else capitalize(word)

    def _choose(self, options: Sequence[T]) -> T:
        self.nats += math.log(len(options))
        return options[self._rng.randrange(len(options))]

    def _draw(self, name: str, options: Sequence[Any] | None = None) -> Any:
        """Take one out of the list `name` for good, so that a story does not repeat itself."""
        left = self._left.setdefault(name, [])
        if not left:
            left.extend(self._lexicon[name] if options is None else options)
        chosen = self._pick(name, left)
        left.remove(chosen)
        return chosen

    def _pick(self, name: str, left: Sequence[Any]) -> Any:
        return self._choose(left)


def story(split: Split, index: int) -> Story:
    """Tell story number `index` of a split; the two splits share no random stream."""
    return Teller(random.Random(f"storyteller:{split}:{index}")).tell()


def stories(split: Split, count: int, first: int = 0) -> Iterator[Story]:
    return (story(split, index) for index in range(first, first + count))


def names() -> frozenset[str]:
    """Return every name a character can have."""
    return frozenset(lexicon()["names"]["she"]) | frozenset(lexicon()["names"]["he"])


@cache
def lexicon() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("lexicon.json").read_text(encoding="utf-8"))
    return loaded


def pronouns(pronoun: str) -> dict[str, str]:
    return dict(zip(FORMS_OF_PRONOUN, PRONOUNS[pronoun], strict=True))


def capitalize(text: str) -> str:
    """Raise the first letter, which an opening quotation mark may precede."""
    start = 1 if text.startswith('"') else 0
    return text[:start] + text[start : start + 1].upper() + text[start + 1 :]
