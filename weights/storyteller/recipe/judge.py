"""Judge a story from its text alone: does the main character keep the name, do the pronouns agree?

It knows the grammar's names, kinds and vocabulary, but neither model nor tokens, and applies the same rules to stories
of the generator (which all pass; a test says so) and of the model. `evaluate.py` and the tests call it.
"""

import re
from functools import cache

from gptserve.weights.storyteller.recipe.generator import lexicon, names, stories

CAPITALIZED = re.compile(r"\b[A-Z][A-Za-z]*\b")
KIND_NEARBY = 80  # characters around a friend's first mention in which the grammar always says what the friend is
VOCABULARY_STORIES = 6000


def name_fault(text: str, given: str | None = None) -> str | None:
    """Say how the main character's name went wrong, or return None when it was kept.

    The main character is `given`, the name in the prompt, or else the first name in the text. The name is kept when
    1. it stands in the first paragraph, before any other name, and in the last paragraph;
    2. at most one other name occurs, and where it first occurs a kind ("shy girl", "brave fox", ...) stands near it: it
       is introduced as someone, it does not slip in;
    3. every capitalized word is a known name or one that the generator capitalizes: no name is invented or garbled;
    4. the main character is not introduced a second time ("named Tom").
    """
    cast = list(dict.fromkeys(word for word in CAPITALIZED.findall(text) if word in names()))
    if not cast:
        return "nobody is named"
    hero, others = cast[0], cast[1:]
    paragraphs = text.split("\n\n")
    if given is not None and hero != given:
        return f"{given} became {hero}"
    if hero not in CAPITALIZED.findall(paragraphs[0]):
        return f"{hero} is not in the first paragraph"
    if hero not in CAPITALIZED.findall(paragraphs[-1]):
        return f"{hero} is not in the last paragraph"
    if len(others) > 1:
        return f"too many names: {', '.join(cast)}"
    if others and not introduced(text, others[0]):
        return f"{others[0]} is not introduced"
    if invented := set(CAPITALIZED.findall(text)) - names() - capitalized_words():
        return f"unknown name: {', '.join(sorted(invented))}"
    if len(re.findall(rf"\bnamed {hero}\b", text)) > 1:
        return "introduced twice"
    return None


def introduced(text: str, name: str) -> bool:
    """Tell whether the kind of `name` (a girl, a fox) is said near its first mention, in the same paragraph."""
    paragraph = next(paragraph for paragraph in text.split("\n\n") if re.search(rf"\b{name}\b", paragraph))
    first = paragraph.index(name)
    nearby = paragraph[max(0, first - KIND_NEARBY) : first + len(name) + KIND_NEARBY]
    return re.search(rf"\b(?:{'|'.join(lexicon()['words']['small'])}) (?:{'|'.join(kinds())})\b", nearby) is not None


def pronoun_fault(text: str) -> bool:
    """Tell whether the first paragraph, when it names the main character alone, uses the wrong pronoun."""
    opening = text.split("\n\n")[0]
    cast = [word for word in CAPITALIZED.findall(opening) if word in names()]
    if len(set(cast)) != 1:
        return False
    wrong = {"he", "him", "his"} if cast[0] in lexicon()["names"]["she"] else {"she", "her"}
    return bool(wrong & set(re.findall(r"[a-z]+", opening.lower())))


def kinds() -> list[str]:
    return ["girl", "boy", *lexicon()["animals"]]


@cache
def capitalized_words() -> frozenset[str]:
    """Return the words that the generator writes with a capital letter, names left out."""
    texts = (story.text for story in stories("train", VOCABULARY_STORIES))
    return frozenset(word for text in texts for word in CAPITALIZED.findall(text)) - names()
