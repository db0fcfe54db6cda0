"""Models whose layers keep a state: a request gets what it gets alone, whatever else is served and however."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from gptserve.engine.backends.cpu import native
from gptserve.engine.engine import Engine
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.request import Request
from gptserve.engine.runner.state_memory import check_states, plan_states, state_bytes
from gptserve.weights.errors import WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.source import resolve_model
from tests.engine.runs import make_config, make_engine, make_request, run, token_ids
from tests.engine.test_coded import logprobs
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.gguf.written import write_gguf
from tests.weights.quantized.formats import FORMATS
from tests.weights.quantized.packers import Packer, write_quantized

NUM = 12
HYBRID = "Granite 4-H with experts, groups and limits of steps"
NO_ATTENTION = {
    "linear_attention": "^config.json: no layer attends to tokens, and states alone are not computed$",
    "conv": r"^config.json: layer_types must be a list with a full_attention, got \['conv', 'conv', ",
}


@pytest.fixture(scope="module", params=["Qwen3.5", "LFM2", "Qwen3.5 in GGUF", HYBRID, "Falcon-H1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, (name, *in_gguf) = tmp_path_factory.mktemp("model"), request.param.split(" in ")
    write_model(folder, *SHAPES[name])
    if in_gguf:  # value heads take key heads in turn, and products are of codes
        write_gguf(folder, folder / "model.gguf", GGMLQuantizationType.Q8_0)
        return resolve_model(str(folder / "model.gguf"))
    return folder


def requests() -> list[Request]:
    """Return requests whose prompts begin alike and part at any place."""
    draw = random.Random(1)
    text = [draw.randrange(90) for _ in range(70)]
    found = []
    for number in range(NUM):
        prompt = [
            *text[: draw.choice([3, 17, 33, 48, 49, 64])],
            *(draw.randrange(90) for _ in range(draw.choice([1, 5, 20]))),
        ]
        temperature = draw.choice([0.0, 1.0])
        found.append(make_request(f"{number}", prompt, seed=number, max_tokens=14, temperature=temperature))
    return found


def served(engine: Engine, every: int) -> dict[str, list[int]]:
    """Return what the requests get that come one after so many steps."""
    found: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    coming, num_steps = requests(), 0
    while coming or engine.has_work:
        if coming and num_steps >= every * (NUM - len(coming)):
            engine.add(coming.pop(0))
        for output in engine.step():
            found[output.request_id] += output.token_ids
        num_steps += 1
    return found


def alone(folder: Path, **options: object) -> dict[str, list[int]]:
    found = dict[str, list[int]]()
    engine = make_engine(folder, enable_prefix_caching=False, **options)
    for request in requests():
        found[request.request_id] = token_ids(run(engine, [request])[request.request_id])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_a_request_gets_what_it_gets_alone(folder: Path, options: dict[str, object]) -> None:
    expected = alone(folder, **options)
    assert len({tuple(ids) for ids in expected.values()}) == NUM
    for every, others in ((0, {}), (3, {"max_num_batched_tokens": 16, "max_num_seqs": 4}), (2, {"num_blocks": 9})):
        engine = make_engine(folder, **options, **others)
        assert served(engine, every) == expected
        hits, preemptions = engine.stats.num_prefix_hit_tokens, engine.stats.num_preemptions
        assert hits > 0 or every == 0
        assert preemptions > 0 or "num_blocks" not in others
        assert engine.stats.num_used_blocks == 0


def test_without_the_library_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    expected = alone(folder)
    assert served(make_engine(folder, max_num_batched_tokens=16, max_num_seqs=4), 3) == expected


def test_the_state_at_the_end_of_a_prompt_is_found_again(folder: Path) -> None:
    engine = make_engine(folder)
    first = make_request("0", range(40), max_tokens=4, temperature=0.0)
    answer = token_ids(run(engine, [first])["0"])
    again = run(engine, [make_request("1", [*range(40), *answer, 5, 6], max_tokens=1, temperature=0.0)])["1"]
    block_size = engine.info.block_size
    assert again[-1].num_cached_tokens == 39 // block_size * block_size > 0


def test_choices_of_one_prompt_compute_it_once(folder: Path) -> None:
    engine = make_engine(folder)
    found = run(engine, [make_request(f"{i}", range(40), seed=i, max_tokens=6, temperature=1.0) for i in range(4)])
    assert [outputs[-1].num_cached_tokens for outputs in found.values()] == [0, 32, 32, 32]
    assert len({tuple(token_ids(outputs)) for outputs in found.values()}) > 1


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "product"), [("packed", "native_coded"), ("awq", "native_coded"), ("fp8", "native")])
@pytest.mark.parametrize("shape", ["Qwen3.5", "Qwen3.5 with experts", "Qwen3-Next", HYBRID, "Falcon-H1"])
def test_quantized_folders_give_nearly_what_they_are_unpacked_to(
    shape: str, name: str, product: str, tmp_path: Path
) -> None:
    form, folder = FORMATS[name], tmp_path / "model"

    def packer_of(module: str) -> Packer | None:
        is_left = module.endswith(("in_proj_a", "in_proj_b", "in_proj_ba", "gate", "router.layer"))
        return None if is_left else form.of(module)

    of_delta = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = {HYBRID: {"mamba_n_heads": 8}, "Falcon-H1": {"mamba_n_heads": 8, "mamba_d_ssm": 128}}.get(shape, of_delta)
    sizes = {"hidden_size": 64, **sizes}
    if shape not in ("Qwen3.5", "Falcon-H1"):
        sizes["num_experts_per_tok"] = 5  # all: rounded rows may choose others
    write_model(folder, SHAPES[shape][0], SHAPES[shape][1] | sizes)
    plain = write_quantized(folder, form.section, packer_of)
    stored, unpacked = make_engine(folder, dtype="float32"), make_engine(folder, dtype="float32", quantization="none")
    assert stored.info.product == product
    found, expected = logprobs(stored), logprobs(unpacked)
    assert torch.equal(expected, logprobs(make_engine(plain, dtype="float32")))
    assert torch.equal(found, expected) is (product == "native")
    assert (found - expected).std() < 0.04 * expected.std()


def test_drafts_are_not_made(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt = [1, 2, 3, 4] * 8
    plain, drafting = (make_engine(folder, speculative_ngram=ngram) for ngram in (0, 2))
    asked: Sequence[Request] = [make_request("0", prompt, max_tokens=20, temperature=0.0)]
    assert token_ids(run(drafting, asked)["0"]) == token_ids(run(plain, asked)["0"])
    assert drafting.stats.num_draft_tokens == 0
    assert "speculative_ngram 2 is not used: this model keeps states" in caplog.messages


def test_memory_for_states_is_planned(folder: Path) -> None:
    model, config = load_config(folder), make_config(folder, max_num_seqs=5)
    size = state_bytes(model)
    expected = {  # layers, and their numbers
        "qwen3_5_text": 3 * (3 * (2 * 64 + 96) + 4 * 32 * 24),
        "lfm2": 2 * 2 * 64,
        "falcon_h1": 2 * (3 * (2 * 48 + 96) + 6 * 24 * 16),
        "granitemoehybrid": 2 * (2 * 48 + 128) + 4 * 24 * 32,
    }
    assert size == 4 * expected[model.model_type]
    assert plan_states(config, model, 2 * 100 * size) == 11
    assert plan_states(config, model, 2 * 7 * size) == 7
    assert make_engine(folder, max_num_seqs=5).info.states_bytes == 11 * size
    with pytest.raises(InvalidConfigurationError) as error:
        plan_states(config, model, 4 * size)
    assert str(error.value) == (
        f"the states of a sequence take {size:,} bytes, and half of the {4 * size:,} bytes for caches must hold 3 of "
        "them: free some memory"
    )


def test_no_gpu_computes_states(folder: Path) -> None:
    with pytest.raises(InvalidConfigurationError) as error:
        check_states(model := load_config(folder), "cuda")
    assert str(error.value) == (
        f"device is cuda, but a {model.model_type} has layers that keep a state, which only a CPU computes so far: set "
        "device to cpu"
    )


def test_a_model_without_attention_is_refused(folder: Path, tmp_path: Path) -> None:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if fields["model_type"] == "falcon_h1":
        pytest.skip("all its layers attend")
    (stateful,) = set(fields["layer_types"]) - {"full_attention"}
    fields["layer_types"] = [stateful] * len(fields["layer_types"])
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(WeightsError, match=NO_ATTENTION[stateful]):
        load_config(tmp_path)
