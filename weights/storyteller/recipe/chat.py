"""Write conversations: requests in many wordings, and answers, which are stories to order or an honest line.

The phrases are in `requests.json`: `[a|b]` are alternatives, `{kind}` is filled in. Each split has lists of its own, so
that held-out wordings, words and pairs of a name and an animal are never trained on. Knows no tokens and no model.
`data.py` trains on the conversations; `evaluate_chat.py` and the tests use the requests.
"""

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gptserve.weights.storyteller.recipe.generator import Split, capitalize, lexicon, names
from gptserve.weights.storyteller.recipe.order import Character, Element, Order, Span, phrases, tell

Kind = Literal["drill", "talk"]

ASKED = "kind name place thing kind name place thing kind name small friend mood food pet season weather fear theme"
"""What a request may ask for; the more often it stands here, the likelier."""
HOW_MANY_ASKED = (0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4)
MORE_NAMES = 0.15  # so many of the characters have a name that is not in the lexicon
LISTED = ("place", "thing", "pet", "food", "fear")
SIZES = ("little", "small", "young")  # of a character; a little story is something else
HONEST = "short stories"  # in every honest line, and in no story
STRANGE = 0.3  # of the training requests for a story have a word that nobody knows, so that it learns to read past one
NONSENSE = 0.35  # of the training requests for what it does not know have a word that means nothing in its place
SEVERAL_TURNS = 0.5
MOST_TURNS = 4
GO_ON = 0.55  # of the turns after a story
SHORTENED = 0.6  # of the stories at the end of a talk are cut off once they have all that was asked for
WEIGHT_OF_FIRST = 10.0  # of an answer's first word, in the loss
MORE_LETTERS = 20  # of a story that is cut off
OFF_TOPIC = 0.3  # of the requests


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `weighty`: the spans of an answer that the request decides.

    `is_whole` is False for an answer that was cut off: its end is nothing to learn.
    """

    role: str
    content: str
    weighty: Sequence[Span] = ()
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a story as typed, and the story that it means."""

    text: str
    order: Order


class Asker:
    """Types requests out of one random stream; `more_names`: the share of names that are not in the lexicon."""

    def __init__(self, rng: random.Random, split: Split, more_names: float = MORE_NAMES) -> None:
        self._rng = rng
        self._split = split
        self._more_names = more_names

    def story(self) -> Request:
        ways = self._rng.sample(ASKED.split(), len(ASKED.split()))
        asked = list(dict.fromkeys(ways))[: self._rng.choice(HOW_MANY_ASKED)]
        if not {"kind", "name"} & set(asked):
            asked = [name for name in asked if name != "friend"]
        hero = self.character(self._more_names if "name" in asked else 0)
        friend = self.character(self._more_names if "friend" in asked else 0, beside=hero)
        values = {"kind": hero.kind, "kinds": plural(hero.kind), "name": hero.name}
        values |= {"friend_kind": friend.kind, "friend": friend.name}
        elements = [Element("{hero", values[name]) for name in asked if name in ("kind", "name")]
        draws = self._draws(asked, values, elements)
        about = self._phrase(asked, values)
        if "friend" in asked:  # the phrase has the name, or the kind, or both
            named, known = Element("{friend", friend.name), lexicon()["names"][friend.pronoun]
            if not named.is_in(about):  # a name that is not in the lexicon is only told when asked for
                friend = replace(friend, name=self._rng.choice([name for name in known if name != hero.name]))
            elements += [element for element in (named, Element("{friend", friend.kind)) if element.is_in(about)]
        if "looks" in draws and (looked_at := Element("{thing.a", f"{draws['looks']} {values['thing']}")).is_in(about):
            elements.append(looked_at)
        text = self._typed(self._framed(about, values))
        for who in (hero, friend):
            if who.name not in names():  # nobody could know that it is a name without its capital
                text = re.sub(rf"\b{who.name}\b", who.name, text, flags=re.IGNORECASE)
        return Request(text, Order(hero, friend, tuple(elements), draws))

    def go_on(self, name: str) -> str:
        return self._typed(self._filled(self._rng.choice(phrases()["go_on"][self._split]), {"name": name}))

    def off_topic(self) -> tuple[str, str]:
        """Return a request that is not for a story of this lexicon, and the honest answer."""
        topic = self._rng.choice((*("hello", "who", "thanks"), *["unknown"] * 3, *["other"] * 4))
        if topic == "unknown":
            return self.unknown(), self.line(topic)
        form = self._rng.choice(phrases()["off_topic"][topic][self._split])
        return self._typed(self._filled(form, {})), self.line(topic)

    def every_off_topic(self) -> list[str]:
        """Return each request of the split's lists that is not for a story once."""
        topics = phrases()["off_topic"].values()
        return [self._typed(self._filled(form, {})) for topic in topics for form in topic.get(self._split, ())]

    def unknown(self) -> str:
        """Return a request for a story about something that is not in the lexicon."""
        is_nonsense = self._split == "train" and self._rng.random() < NONSENSE
        values = {"unknown": self._noise(self._rng.randint(1, 3))} if is_nonsense else {}
        about = self._filled(self._rng.choice(phrases()["unknown"]["forms"]), values)
        return self._typed(self._framed(about, {}))

    def line(self, topic: str) -> str:
        return self._filled(self._rng.choice(phrases()["off_topic"][topic]["answers"]), {})

    def character(self, more_names: float = 0, beside: Character | None = None) -> Character:
        """Draw a character whose pair of name and kind belongs to the split, and who shares neither with another."""
        known, more = lexicon()["names"], phrases()["more_names"]
        while True:
            pronoun = self._rng.choice(("she", "he"))
            name = self._rng.choice(known[pronoun])
            if self._rng.random() < more_names:
                name = self._rng.choice(more[pronoun if self._split == "train" else "held_out"])
            kind = {"she": "girl", "he": "boy"}[pronoun]
            if self._rng.random() < 0.7:
                kind = self._rng.choice(lexicon()["animals"])
            is_held_out = zlib.crc32(f"{name} {kind}".encode()) % 10 == 0
            if is_held_out == (self._split == "held_out") and (
                beside is None or (name != beside.name and kind != beside.kind)
            ):
                return Character(name, pronoun, kind)

    def _draws(self, asked: Sequence[str], values: dict[str, str], elements: list[Element]) -> dict[str, Any]:
        """Choose what is asked for beside the characters: add its words and elements, return what the story draws."""
        draws: dict[str, Any] = {}
        for name in asked:
            if name in LISTED:
                entry = draws[name + "s"] = self._rng.choice(lexicon()[name + "s"])
                noun = entry if isinstance(entry, str) else entry[1]
                values |= {name: noun, f"a_{name}": f"a {noun}"}
                elements.append(Element("{" + name, noun.split(" ")[-1] if name == "food" else noun))
                if name == "place":
                    values["at"] = f"{entry[0]} the {noun}"
                if name == "thing" and self._rng.random() < 0.4:
                    draws["looks"] = self._rng.choice(lexicon()["looks"])
                    values["a_thing"] = f"a {draws['looks']} {noun}"
            elif name == "theme":
                word = self._rng.choice(sorted(phrases()["themes"]))
                values[name] = self._rng.choice(phrases()["themes"][word])
                elements.append(Element(word, word))
            elif name in ("small", "season", "weather", "mood"):
                word = self._rng.choice(("sad", "happy") if name == "mood" else lexicon()["words"][name])
                words = word if name == "mood" else name  # the lexicon has a list of words for each mood
                values[name] = draws[words] = word
                elements.append(Element(f"<{words}>", word))
        return draws

    def _phrase(self, asked: Sequence[str], values: dict[str, str]) -> str:
        """Return what the story is to be about, such as "a fox with a kite", or nothing; a mood goes to the "story"."""
        if "small" in asked and not {"kind", "name", "mood"} & set(asked) and values["small"] not in SIZES:
            values["mood"], asked = values["small"], [name for name in asked if name != "small"]
        if "mood" in values:
            values["story"] = f"{values['mood']} {self._rng.choice(phrases()['story'])}"
        subject = " ".join(name for name in ("kind", "name", "small") if name in asked)
        rest = [name for name in asked if name not in ("kind", "name", "small", "mood")]
        if rest + subject.split() and self._rng.random() < 0.07:  # words alone, such as "fox, kite"
            return self._rng.choice((", ", " ", " and ")).join(
                values["friend_kind" if name == "friend" else name] for name in (*subject.split(), *rest)
            )
        forms = [self._rng.choice(phrases()["subjects"][subject])] if subject else []
        for name in rest:
            forms.append(self._rng.choice(phrases()["after" if forms else "alone"][name]))
        return self._filled(" ".join(forms), values)

    def _framed(self, about: str, values: dict[str, str]) -> str:
        group = "frames" if about else "plain_frames"
        if not about and "mood" in values and self._rng.random() < 0.5:
            group = "mood_frames"
        frame = self._chosen(self._rng.choice(phrases()[group][self._split]))
        while "mood" in values and "{story}" not in frame and "{mood}" not in frame:
            frame = self._chosen(self._rng.choice(phrases()[group][self._split]))
        return self._filled(self._mistyped(frame), {**values, "x": about})

    def _chosen(self, form: str) -> str:
        """Settle the alternatives of a form."""
        while found := re.search(r"\[([^\[\]]*)\]", form):
            form = form[: found.start()] + self._rng.choice(found[1].split("|")) + form[found.end() :]
        return form

    def _filled(self, form: str, values: Mapping[str, str]) -> str:
        """Settle the alternatives and fill in the words, those that are not given at random."""
        text = re.sub(r"{(\w+)}", lambda slot: values.get(slot[1]) or self._word(slot[1]), self._chosen(form))
        return re.sub(r" +", " ", re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text))

    def _word(self, slot: str) -> str:
        choose, known = self._rng.choice, lexicon()
        if slot == "noise":
            return " ".join(self._noise(self._rng.randint(0, 3)) for _ in range(choose((1, 1, 2, 3, 5))))
        if slot in ("kind", "kinds"):
            kind = choose(known["animals"])
            return kind if slot == "kind" else plural(kind)
        if slot in ("place", "at"):
            preposition, noun = choose(known["places"])
            return str(noun) if slot == "place" else f"{preposition} the {noun}"
        lists = {
            "name": known["names"][choose(("she", "he"))],
            "thing": known["things"],
            "a_thing": [f"a {noun}" for noun in known["things"]],
            "small": known["words"]["small"],
            "n": phrases()["numbers"],
            "noun": phrases()["unknown"]["train"],
            "unknown": phrases()["unknown"][self._split],
        }
        return str(choose(lists.get(slot) or phrases()[slot]))

    def _noise(self, syllables: int) -> str:
        """Return a word that means nothing, with 0 syllables random letters."""
        if syllables == 0:
            return "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=self._rng.randint(2, 9)))
        starts, ends = self._rng.choices("bdfghjklmnprstvwz", k=syllables), ("", "", "n", "r", "st")
        return "".join(start + self._rng.choice("aeiou") + self._rng.choice(ends) for start in starts)

    def _mistyped(self, frame: str) -> str:
        """Now and then replace a word, or drop or double a letter of one, never of one that is filled in."""
        if self._split == "train" and "{story}" in frame and self._rng.random() < STRANGE:
            word = self._rng.choice(re.findall(r"(?<![{\w])[A-Za-z]{2,}", frame) or [""])
            frame = re.sub(rf"(?<![{{\w]){word}\b", lambda _: self._noise(self._rng.randint(0, 3)), frame, count=1)
        words = [found.start() for found in re.finditer(r"(?<![{\w])[A-Za-z]{4,}", frame)]
        if not words or self._rng.random() > 0.06:
            return frame
        at = self._rng.choice(words) + self._rng.randint(1, 3)
        return frame[:at] + frame[at] * self._rng.choice((0, 2)) + frame[at + 1 :]

    def _typed(self, text: str) -> str:
        """Return the text as somebody would type it: with or without capitals and a mark at the end."""
        way = self._rng.random()
        bare = text.rstrip("?")
        mark = "?" if bare != text else self._rng.choice((".", ".", ".", "!", "", "", ", please."))
        if way < 0.45:
            return capitalize(bare + mark)
        if way < 0.8:
            return bare.lower() + self._rng.choice(("", "", "", "", " please", " pls", "!", "..."))
        if way < 0.9:
            return capitalize(bare)
        return text.upper() if way > 0.98 else (bare + mark).lower()


def conversation(split: Split, index: int, kind: Kind = "talk") -> list[Message]:
    """Return conversation number `index` of a split and kind, which ends with an answer or the beginning of one.

    A drill is a single request, and the beginning of a story that has all that was asked for, or an honest line.
    """
    talk = Talk(random.Random(f"storyteller:{kind}:{split}:{index}"), split)
    return talk.messages() if kind == "talk" else talk.drill()


class Talk:
    """One conversation as it grows; it remembers the main character of the latest story."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._asker = Asker(rng, split)
        self._split = split
        self._hero: Character | None = None
        self._messages: list[Message] = []

    def messages(self) -> list[Message]:
        if self._rng.random() < 0.2:
            role = self._rng.choice(("system", "system", "system", "developer"))
            self._messages.append(Message(role, self._rng.choice(phrases()["systems"][self._split])))
        for _ in range(MOST_TURNS):
            self._turn()
            if self._rng.random() > SEVERAL_TURNS:
                break
        if self._rng.random() < SHORTENED:
            self._shorten()
        return self._messages

    def drill(self) -> list[Message]:
        self._turn()
        self._shorten()
        return self._messages

    def _shorten(self) -> None:
        """Cut off a story at the end, so that more of what is learned depends on the request."""
        last = self._messages[-1]
        end = last.content.find(" ", max((end for _, end, _ in last.weighty), default=0) + MORE_LETTERS)
        if "\n\n" in last.content and end > 0:
            self._messages[-1] = replace(last, content=last.content[:end], is_whole=False)

    def _turn(self) -> None:
        way = self._rng.random()
        if self._hero is not None and way < GO_ON:
            self._go_on(self._hero)
        elif self._hero is None and way < 0.03:
            self._say(self._asker.go_on("the hero"), self._asker.line("too_early"))
        elif way < 1 - OFF_TOPIC:
            self._tell()
        else:
            self._say(*self._asker.off_topic())

    def _tell(self) -> None:
        story = None
        while story is None:
            request = self._asker.story()
            story = tell(self._rng, request.order)
        self._hero = request.order.hero
        self._say(request.text, story.text, request.order.weighty_spans(story.text))

    def _go_on(self, hero: Character) -> None:
        """Let the main character have another adventure, or finish a story that was cut off."""
        said, asked = self._messages[-1], self._asker.go_on(hero.name)
        words = said.content.split(" ")
        none_was_cut = all(message.is_whole for message in self._messages)
        if none_was_cut and "\n\n" in said.content and self._rng.random() < 0.15:
            at = self._rng.randrange(20, len(words) - 5)
            self._messages[-1] = replace(said, content=" ".join(words[:at]), is_whole=False)
            self._say(asked, " ".join(words[at:]))
            return
        named = (Element("{hero", hero.name),)
        order = Order(hero, self._asker.character(beside=hero), named, is_sequel=True)
        story = tell(self._rng, order)
        assert story is not None, "every story names its main character"
        self._say(asked, story.text, order.weighty_spans(story.text))

    def _say(self, request: str, answer: str, weighty: Sequence[Span] = ()) -> None:
        first = (0, 1, WEIGHT_OF_FIRST)  # the first word decides between a story and a line
        self._messages += [Message("user", request), Message("assistant", answer, (first, *weighty))]


def plural(kind: str) -> str:
    irregular: dict[str, str] = phrases()["plurals"]
    return irregular.get(kind, kind + "s")
