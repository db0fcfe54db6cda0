"""lm-evaluation-harness over HTTP against its own backend `hf`, on the embedded model in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.storyteller.recipe.generator import stories as held_out
from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "lm-eval"
pytestmark = pytest.mark.clients
NUM_STORIES = 12
TOLERANCE = 1e-4
KINDS = ["choices", "rolling", "text"]


@pytest.fixture(scope="module")
def documents(stories: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beginnings of stories, each with three ways to go on: its own, the likeliest, another story's."""
    texts = [story.text for story in held_out("held_out", NUM_STORIES)]
    file = tmp_path_factory.mktemp("documents") / "stories.jsonl"
    with file.open("w") as lines:
        for i, text in enumerate(texts):
            words = text.split(" ")
            context = " ".join(words[:12])
            likeliest = text_of(stories, prompt=context, max_tokens=3, temperature=0)
            others = texts[i - 1].split(" ")[12:17]
            choices = [" " + " ".join(words[12:17]), likeliest, " " + " ".join(others)]
            lines.write(json.dumps({"context": context, "choices": choices, "text": " ".join(words[:60])}) + "\n")
    return file


def evaluate(backend: str, model_args: dict[str, Any], file: str, kinds: list[str], is_chat: bool) -> dict[str, Any]:
    import lm_eval

    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}, "test_split": "test"}
    tasks = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "text": {
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 20, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    chosen = [{"task": kind, **common, **tasks[kind]} for kind in kinds]
    results = lm_eval.simple_evaluate(
        model=backend, model_args=model_args, tasks=chosen, bootstrap_iters=0, apply_chat_template=is_chat
    )
    return {kind: [sample["resps"] for sample in results["samples"][kind]] for kind in kinds}


@pytest.fixture(scope="module")
def theirs(client: Environment, storyteller: Path, documents: Path) -> dict[str, Any]:
    """What the harness computes itself."""
    local = {"pretrained": str(storyteller), "dtype": "float32", "device": "cpu"}
    found: dict[str, Any] = client.call(evaluate, "hf", local, str(documents), KINDS, False)
    return found


@pytest.mark.parametrize("whose", ["its own tokenizer", "the server's tokenizer"])
def test_every_number_is_that_of_the_backend_hf(
    client: Environment, stories: str, storyteller: Path, documents: Path, theirs: dict[str, Any], whose: str
) -> None:
    tokenizer = {"tokenizer": str(storyteller)} if whose == "its own tokenizer" else {"tokenizer_backend": "remote"}
    served = {"model": "storyteller", "base_url": f"{stories}/completions", "num_concurrent": 4, **tokenizer}

    ours = client.call(evaluate, "local-completions", served, str(documents), KINDS, False)

    pairs = [
        (own, other)
        for all_of_ours, all_of_theirs in zip(ours["choices"], theirs["choices"], strict=True)
        for [own], [other] in zip(all_of_ours, all_of_theirs, strict=True)
    ]
    assert len(pairs) == 3 * NUM_STORIES
    assert max(abs(float(own[0]) - float(other[0])) for own, other in pairs) < TOLERANCE
    assert [own[1] for own, _ in pairs] == [other[1] for _, other in pairs]
    assert len({own[1] for own, _ in pairs}) == 2
    rolling = zip(ours["rolling"], theirs["rolling"], strict=True)
    assert max(abs(float(own) - float(other)) for [[own]], [[other]] in rolling) < TOLERANCE
    assert ours["text"] == theirs["text"]


def test_chats_are_answered(client: Environment, chats: str, documents: Path) -> None:
    served = {"model": "tiny", "base_url": f"{chats}/chat/completions"}

    found = client.call(evaluate, "local-chat-completions", served, str(documents), ["text"], True)

    asked = [json.loads(line)["context"] for line in documents.read_text().splitlines()]
    fields = {"max_tokens": 20, "temperature": 0, "stop": ["."]}
    expected = [text_of(chats, messages=[{"role": "user", "content": text}], **fields) for text in asked]
    assert [text for [[text]] in found["text"]] == expected
