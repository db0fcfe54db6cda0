"""What a folder says of a classifier: labels, activation, tokens; and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.classes import TextClasses, load_classes, load_classifier
from gptserve.weights.config import Classifier
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.pooling import Task
from tests.weights.tiny_tokenizers import words

OF_HEAD = {"architectures": ["LlamaForSequenceClassification"]}
OF_TEXT = {"architectures": ["LlamaForCausalLM"]}


def write(folder: Path, *texts: str, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9, **config}))
    if texts:
        words(list(texts)).save(str(folder / "tokenizer.json"))
    return folder


def write_logit_score(folder: Path, **config: Any) -> None:
    (folder / "modules.json").write_text(json.dumps([{"type": "a.LogitScore", "path": "1_LogitScore"}]))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, (("LABEL_0",), "sigmoid")),
        ({"id2label": {"1": "good", "0": "bad"}}, (("bad", "good"), "softmax")),
        ({"problem_type": "multi_label_classification"}, (("LABEL_0", "LABEL_1"), "sigmoid")),
        ({"num_labels": 1, "problem_type": "regression"}, (("LABEL_0",), "none")),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, (("LABEL_0",), "sigmoid")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            (("LABEL_0",), "none"),
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            (("LABEL_0", "LABEL_1"), "sigmoid"),
        ),
    ],
)
def test_labels_and_their_activation_are_read(tmp_path: Path, config: dict[str, Any], expected: Any) -> None:
    folder = write(tmp_path, **OF_HEAD, **config, pad_token_id=3)
    assert load_classes(folder, "classify") == TextClasses(*expected, pad_token_id=3)
    assert load_classifier(folder, "classify") == Classifier(len(expected[0]))


def test_other_models_have_the_tokens_no_and_yes(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "yes", "no", **OF_TEXT)
    assert load_classes(folder, "score") == TextClasses(("no", "yes"), "softmax", (2, 1))
    write(folder, **OF_HEAD, classifier_from_token=["a", "yes"])
    assert load_classes(folder, "score") == TextClasses(("no", "yes"), "softmax", (0, 1))
    write_logit_score(folder, true_token_id=5, false_token_id=6)
    assert load_classes(folder, "score") == TextClasses(("no", "yes"), "softmax", (6, 5))
    write_logit_score(folder, true_token_id=5, false_token_id=None)
    assert load_classes(folder, "score") == TextClasses(("yes",), "sigmoid", (5,))


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_other_tasks_have_no_classifier(tmp_path: Path, task: Task) -> None:
    assert load_classifier(write(tmp_path, **OF_TEXT), task) is None
    assert load_classifier(write(tmp_path), task) is None


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (
            OF_TEXT,
            "classify",
            "config.json: architectures must name a …ForSequenceClassification, which has labels, for --task classify, "
            "got ['LlamaForCausalLM']; --task score scores texts with other models",
        ),
        (
            OF_HEAD,
            "score",
            "config.json: LlamaForSequenceClassification must have one label for --task score, got 2; "
            "use --task classify",
        ),
        (
            OF_HEAD,
            "embed",
            "config.json: architectures names LlamaForSequenceClassification, a classifier, which --task embed cannot "
            "use; use --task classify, or --task score for one of one label",
        ),
        (OF_TEXT, "score", "the tokenizer must have 'no' as one token, by which --task score scores texts"),
        (
            OF_HEAD | {"sentence_transformers": {"activation_fn": "x.Tanh"}},
            "classify",
            "config.json: the activation of scores must be one of Identity, Sigmoid, Softmax, got 'x.Tanh'",
        ),
    ],
)
def test_a_folder_of_another_task_is_refused(tmp_path: Path, config: Any, task: Task, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        load_classifier(write(tmp_path, "a", "yes", **config), task)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": ["a"]}, "id2label must be an object that names the labels 0, 1, … of 1 to 65536, got ['a']"),
        ({"id2label": {}}, "id2label must be an object that names the labels 0, 1, … of 1 to 65536, got {}"),
        (
            {"id2label": {"1": "a"}},
            "id2label must be an object that names the labels 0, 1, … of 1 to 65536, got {'1': 'a'}",
        ),
        ({"num_labels": 0}, "num_labels must be an integer in [1, 65536], got 0"),
        (
            {"problem_type": "x"},
            "problem_type must be one of regression, single_label_classification, multi_label_classification, got 'x'",
        ),
    ],
)
def test_a_field_that_breaks_a_rule_is_named(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load_classes(write(tmp_path, **OF_HEAD, **config), "classify")
    assert str(refused.value) == f"config.json: {message}"


def test_tokens_that_break_a_rule_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", **OF_TEXT, classifier_from_token=["a"])
    with pytest.raises(InvalidConfigError, match="classifier_from_token must be a list of two texts, those of no and"):
        load_classes(folder, "score")
    write(folder, **OF_TEXT)
    write_logit_score(folder, true_token_id=9)
    with pytest.raises(InvalidConfigError) as refused:
        load_classes(folder, "score")
    rule = "true_token_id and false_token_id must be ids in [0, 9)"
    assert str(refused.value) == f"1_LogitScore/config.json: {rule}, got [9, None]"
