"""The labels of a classifier, where its weights lie, and what its logits mean: what a folder says. Torch-free.

A `…ForSequenceClassification` has weights of its own. Any other decoder scores texts by the logits of two tokens, "no"
and "yes", as Qwen3-Reranker does: config.json may name others in vLLM's `classifier_from_token`, and modules.json of
sentence-transformers in a LogitScore.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptserve.weights.config import Classifier
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.families import read_raw_config
from gptserve.weights.families.family import RawConfig
from gptserve.weights.json_file import read_json_object
from gptserve.weights.pooling import MODULES_FILE, Task, modules_of
from gptserve.weights.tokenizers.vocabulary import load_vocabulary

LabelActivation = Literal["softmax", "sigmoid", "none"]
"""From logits to what is told: a softmax of all, the sigmoid of each, or themselves."""

MAX_LABELS = 2**16
NO_AND_YES = ("no", "yes")
_DEFAULT_LABELS = 2  # of transformers, for a config.json that has neither id2label nor num_labels
_SUFFIX = "ForSequenceClassification"
_OF_TOKENS = "classifier_from_token"
_OF_PROBLEM: dict[str, LabelActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_CLASS: dict[str, LabelActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True, slots=True)
class TextClasses:
    """What a server gives of a text: one number for each label, by their order.

    They are read from the state of the last token that is not pad_token_id, as transformers does.
    """

    labels: tuple[str, ...]
    activation: LabelActivation
    token_ids: tuple[int, ...] = ()
    """The tokens whose logits these are; empty: those of weights of its own."""
    pad_token_id: int | None = None


def load_classifier(folder: Path, task: Task) -> Classifier | None:
    """Return the classifier that takes the place of the head; None for tasks that have none.

    Raises InvalidConfigError, TokenizerError, or UnsupportedModelError for a folder of another task.
    """
    if task in ("classify", "score"):
        classes = load_classes(folder, task)
        return Classifier(len(classes.labels), classes.token_ids)
    name = _architecture(read_raw_config(folder))
    if name is not None:
        message = f"config.json: architectures names {name}, a classifier, which --task {task} cannot use"
        raise UnsupportedModelError(f"{message}; use --task classify, or --task score for one of one label")
    return None


def load_classes(folder: Path, task: Task) -> TextClasses:
    """Return what the folder says, for classify or score. Raises what load_classifier does."""
    raw = read_raw_config(folder)
    name, tokens = _architecture(raw), _tokens(raw)
    if task == "score" and name is None:
        return _of_tokens(folder, tokens)
    if name is None:
        rule = f"architectures must name a …{_SUFFIX}, which has labels"
        message = f"config.json: {rule}, for --task classify, got {shown(raw.value('architectures'))}"
        raise UnsupportedModelError(f"{message}; --task score scores texts with other models")
    labels = _labels(raw)
    if task == "score" and len(labels) != 1:
        message = f"config.json: {name} must have one label for --task score, got {len(labels)}"
        raise UnsupportedModelError(f"{message}; use --task classify")
    pads = raw.value("pad_token_id")
    return TextClasses(labels, _activation(raw, len(labels)), pad_token_id=pads if isinstance(pads, int) else None)


def _architecture(raw: RawConfig) -> str | None:
    """Return the name of the architecture if its weights are a classifier's: others may have its name in vLLM."""
    names = raw.value("architectures")
    if not isinstance(names, list) or raw.value(_OF_TOKENS) is not None:
        return None
    return next((name for name in names if isinstance(name, str) and name.endswith(_SUFFIX)), None)


def _labels(raw: RawConfig) -> tuple[str, ...]:
    """Return the names of the labels in the order of their logits."""
    of_ids = raw.value("id2label")
    if of_ids is None:
        num = raw.size("num_labels", default=_DEFAULT_LABELS, limit=MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(num))
    numbers = [str(i) for i in range(len(of_ids))] if isinstance(of_ids, dict) else []
    if not isinstance(of_ids, dict) or not 1 <= len(of_ids) <= MAX_LABELS or set(of_ids) != set(numbers):
        raise raw.error("id2label", f"an object that names the labels 0, 1, … of 1 to {MAX_LABELS}")
    return tuple(str(of_ids[number]) for number in numbers)


def _activation(raw: RawConfig, num_labels: int) -> LabelActivation:
    """Return what becomes of the logits: as sentence-transformers' name in config.json says, or as the problem asks."""
    name = raw.section("sentence_transformers").value("activation_fn")
    name = raw.value("sbert_ce_default_activation_function") if name is None else name
    if name is not None:
        kind = _OF_CLASS.get(name.rpartition(".")[2]) if isinstance(name, str) else None
        if kind is None:
            raise UnsupportedModelError(
                f"config.json: the activation of scores must be one of {', '.join(_OF_CLASS)}, got {shown(name)}"
            )
        return kind
    problem = raw.value("problem_type")
    if problem is not None and (not isinstance(problem, str) or problem not in _OF_PROBLEM):
        raise raw.error("problem_type", f"one of {', '.join(_OF_PROBLEM)}")
    if num_labels == 1 and problem != "regression":
        return "sigmoid"  # a softmax of one logit is always 1
    return "softmax" if problem is None else _OF_PROBLEM[problem]


def _tokens(raw: RawConfig) -> tuple[str, str]:
    """Return the texts of the tokens that say no and yes."""
    tokens = raw.value(_OF_TOKENS)
    if tokens is None:
        return NO_AND_YES
    if (
        not isinstance(tokens, list)
        or len(tokens) != len(NO_AND_YES)
        or not all(isinstance(its, str) for its in tokens)
    ):
        raise raw.error(_OF_TOKENS, "a list of two texts, those of no and of yes")
    return tokens[0], tokens[1]


def _of_tokens(folder: Path, tokens: tuple[str, str]) -> TextClasses:
    token_ids = _logit_score(folder)
    if token_ids is None:
        of_bytes = {data: token_id for token_id, data in reversed(load_vocabulary(folder).token_bytes.items())}
        found = [of_bytes.get(text.encode()) for text in tokens]
        if None in found:
            missing = tokens[found.index(None)]
            message = f"the tokenizer must have {shown(missing)} as one token, by which --task score scores texts"
            raise UnsupportedModelError(message)
        token_ids = tuple(its for its in found if its is not None)
    labels = NO_AND_YES[-len(token_ids) :]
    return TextClasses(labels, "softmax" if len(labels) > 1 else "sigmoid", token_ids)


def _logit_score(folder: Path) -> tuple[int, ...] | None:
    """Return the ids of the tokens that a LogitScore names, that of no before that of yes; None without one."""
    path = folder / MODULES_FILE
    where = [its for kind, its in modules_of(path) if kind == "LogitScore"] if path.exists() else []
    if not where:
        return None
    config = read_json_object(folder / where[0] / "config.json", InvalidConfigError)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    limit, given = read_raw_config(folder).size("vocab_size"), (yes,) if no is None else (no, yes)
    ids = tuple(its for its in given if isinstance(its, int) and 0 <= its < limit)
    if len(ids) != len(given):
        rule = f"true_token_id and false_token_id must be ids in [0, {limit})"
        raise InvalidConfigError(f"{where[0]}/config.json: {rule}, got {shown([yes, no])}")
    return ids
