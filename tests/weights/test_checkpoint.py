"""Good checkpoints of every layout stream the right tensors; any other ends in one sentence."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from gptserve.engine.runner.memory import weight_bytes
from gptserve.weights import safetensors_files
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidCheckpointError, ModelNotFoundError, UnsafeCheckpointError, WeightsError
from gptserve.weights.families import FAMILIES, load_config
from gptserve.weights.families.family import Family, Source
from gptserve.weights.quantized import mxfp4
from gptserve.weights.quantized.mxfp4 import MXFP4, packed_shapes
from gptserve.weights.sharding import WHOLE, Share
from tests.parity.models import pack_experts, write_model
from tests.parity.shapes import SHAPES

TINY = {"vocab_size": 12, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2}
SETTINGS = settings(
    max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, load_config(folder))


def stream(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dict(open_checkpoint(folder).stream(dtype=dtype, device="cpu"))


@pytest.fixture
def tiny(make_gpt2: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(make_gpt2(**TINY), tmp_path / "tiny"))


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def test_tensors_have_canonical_names_shapes_and_order(tiny: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in stream(tiny).items()}
    assert list(shapes.items()) == [
        ("embed.weight", (12, 4)),
        ("position.weight", (6, 4)),
        *((f"blocks.0.attn_norm.{part}", (4,)) for part in ("weight", "bias")),
        ("blocks.0.qkv.weight", (12, 4)),
        ("blocks.0.qkv.bias", (12,)),
        ("blocks.0.attn_out.weight", (4, 4)),
        ("blocks.0.attn_out.bias", (4,)),
        *((f"blocks.0.ffn_norm.{part}", (4,)) for part in ("weight", "bias")),
        ("blocks.0.ffn_up.weight", (16, 4)),
        ("blocks.0.ffn_up.bias", (16,)),
        ("blocks.0.ffn_down.weight", (4, 16)),
        ("blocks.0.ffn_down.bias", (4,)),
        *((f"final_norm.{part}", (4,)) for part in ("weight", "bias")),
    ]


def test_conv1d_weights_are_transposed_and_the_rest_is_not(tiny: Path) -> None:
    stored, tensors = stored_tensors(tiny), stream(tiny)
    assert torch.equal(tensors["embed.weight"], stored["transformer.wte.weight"])
    assert torch.equal(tensors["blocks.0.qkv.weight"], stored["transformer.h.0.attn.c_attn.weight"].t())
    assert torch.equal(tensors["blocks.0.attn_out.weight"], stored["transformer.h.0.attn.c_proj.weight"].t())
    assert torch.equal(tensors["blocks.0.ffn_down.bias"], stored["transformer.h.0.mlp.c_proj.bias"])
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_untied_head_is_streamed_last(make_gpt2: Callable[..., Path]) -> None:
    folder = make_gpt2(**TINY, tie_word_embeddings=False)
    tensors = stream(folder)
    assert list(tensors)[-1] == "head.weight"
    assert torch.equal(tensors["head.weight"], stored_tensors(folder)["lm_head.weight"])


def test_every_layout_holds_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    """Sharded, without the prefix, under another file's name, and with the masks and the second head of old files."""
    expected, digest = stream(tiny), open_checkpoint(tiny).digest
    tensors = stored_tensors(tiny)
    for layout in ("shards", "bare", "other_name", "old"):
        shutil.copytree(tiny, tmp_path / layout, ignore=shutil.ignore_patterns("*.safetensors"))
    GPT2LMHeadModel.from_pretrained(tiny).save_pretrained(tmp_path / "shards", max_shard_size=500)
    save_file({k.removeprefix("transformer."): v for k, v in tensors.items()}, tmp_path / "bare/model.safetensors")
    save_file(tensors, tmp_path / "other_name/weights.safetensors")
    masks = {"h.0.attn.bias": torch.ones(1, 1, 6, 6, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    head = {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
    save_file(tensors | masks | head, tmp_path / "old/model.safetensors")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for layout in ("shards", "bare", "other_name", "old"):
        found = stream(tmp_path / layout)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert open_checkpoint(tmp_path / layout).digest == digest


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_any_float_type_becomes_the_one_asked_for(tiny: Path, stored: torch.dtype, target: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in stored_tensors(tiny).items()}
    save_file(tensors, tiny / "model.safetensors")
    found = stream(tiny, target)
    assert {tensor.dtype for tensor in found.values()} == {target}
    assert torch.equal(found["blocks.0.ffn_up.weight"], tensors["transformer.h.0.mlp.c_fc.weight"].t().to(target))


def test_progress_ends_at_the_bytes_of_the_model(tiny: Path) -> None:
    checkpoint, seen = open_checkpoint(tiny), []
    for _ in checkpoint.stream(dtype=torch.bfloat16, device="cpu", progress=lambda *numbers: seen.append(numbers)):
        pass
    assert [total for _, total in seen] == [checkpoint.num_bytes] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == checkpoint.num_bytes == sum(t.numel() * 4 for t in stored_tensors(tiny).values())


def test_digest_changes_with_a_weight_and_only_then(tiny: Path) -> None:
    digest = open_checkpoint(tiny).digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    tensors = stored_tensors(tiny)
    save_file(tensors, tiny / "model.safetensors", metadata={"note": "another header, the same weights"})
    assert open_checkpoint(tiny).digest == digest
    for name in tensors:
        changed = tensors[name].clone()
        changed.view(-1)[-1] += 1
        save_file(tensors | {name: changed}, tiny / "model.safetensors")
        assert open_checkpoint(tiny).digest != digest


def split_family(row_order: tuple[int, ...]) -> Family:
    """GPT-2 whose projection is stored as query, key and value, and its rows are in another order in the file."""
    gpt2 = FAMILIES["gpt2"]

    def sources(config: ModelConfig) -> dict[str, Source]:
        parts = tuple((f"h.0.attn.{part}.weight", (4, 4)) for part in "qkv")
        return gpt2.sources(config) | {"blocks.0.qkv.weight": Source(parts, row_order=row_order)}

    return Family("split", gpt2.read_config, sources, gpt2.prefixes, gpt2.ignored, models="")


def test_split_and_interleaved_projections_are_joined_and_put_in_order(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stream(tiny)
    order = tuple((row * 5) % 12 for row in range(12))
    tensors = stored_tensors(tiny)
    joined = torch.empty(12, 4)
    joined[list(order)] = tensors.pop("transformer.h.0.attn.c_attn.weight").t()
    parts = {
        f"transformer.h.0.attn.{part}.weight": rows.clone() for part, rows in zip("qkv", joined.split(4), strict=True)
    }
    save_file(tensors | parts, tiny / "model.safetensors")
    monkeypatch.setattr("gptserve.weights.families.gpt2.GPT2", split_family(order))
    found = stream(tiny)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- what does not fit


def refused(folder: Path, error: type[WeightsError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        stream(folder)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.0.ln_1.bias"), r"1 missing \(h\.0\.ln_1\.bias\)$"),
        (lambda t: [t.pop(name) for name in list(t)[:5]], r"5 missing \(\S+; \S+; \S+; \.\.\.\)$"),
        (lambda t: t.update({"new\nline": torch.ones(1)}), r"1 unexpected \('new\\nline'\)$"),
        (lambda t: t.update({"x" * 500: torch.ones(1)}), r"1 unexpected \('x{76}\.\.\.\)$"),
        (
            lambda t: t.update({"transformer.wte.weight": torch.ones(13, 4)}),
            r"1 misshapen \(wte\.weight is \[13, 4\], expected \[12, 4\]\)$",
        ),
        (
            lambda t: t.update({"transformer.wte.weight": torch.ones(12, 4, dtype=torch.float64)}),
            r"1 mistyped \(wte\.weight is F64, expected one of BF16, F16, F32\)$",
        ),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(4, dtype=torch.int8)}), r"ln_f\.bias is I8"),
        (lambda t: t.update({"wte.weight": torch.ones(12, 4)}), "must be stored once, but is in model.safetensors too"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tiny: Path
) -> None:
    tensors = stored_tensors(tiny)
    change(tensors)
    save_file(tensors, tiny / "model.safetensors")
    refused(tiny, InvalidCheckpointError, message)


def test_config_of_another_size_is_refused_before_any_tensor_is_read(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31 - 1, "n_layer": 3}))
    refused(
        tiny,
        InvalidCheckpointError,
        r"24 missing \(.*1 misshapen \(wte\.weight is \[12, 4\], expected \[2147483647, 4\]\)",
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickle_is_refused_with_the_way_to_convert_it(tiny: Path, name: str) -> None:
    (tiny / "model.safetensors").rename(tiny / name)
    refused(tiny, UnsafeCheckpointError, rf"pickle only \('{name}'\).*run: gptserve convert FOLDER TARGET$")


def test_folder_without_weights_or_with_several_is_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "a.safetensors")
    shutil.copy(tiny / "a.safetensors", tiny / "b.safetensors")
    refused(tiny, InvalidCheckpointError, r"got 2 \(a\.safetensors, b\.safetensors\)$")
    (tiny / "a.safetensors").unlink()
    (tiny / "b.safetensors").unlink()
    refused(tiny, ModelNotFoundError, r"holds no \*\.safetensors file$")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "must be a .* of the same folder, got '../model.safetensors'"),
        ({"a": "/etc/x.safetensors"}, "of the same folder, got '/etc/x.safetensors'"),
        ({"a": "sub/x.safetensors"}, "of the same folder, got 'sub/x.safetensors'"),
        ({"a": "..\\x.safetensors"}, "of the same folder"),
        ({"a": ".."}, "of the same folder, got '..'"),
        ({"a": "model.bin"}, "of the same folder, got 'model.bin'"),
        ({"a": 7}, "of the same folder, got '7'"),
        ({"a": "nul\0.safetensors"}, "shard 'nul.x00.safetensors' is named in .* but missing"),
        ({"a": "gone.safetensors"}, "shard 'gone.safetensors' is named in .* but missing"),
        ({}, r"weight_map must be an object of tensors, got \{\}"),
        (["a"], r"weight_map must be an object of tensors, got \['a'\]"),
        ({"a": "part.safetensors"}, "do not fit its config.json"),
    ],
)
def test_index_that_lies_is_refused(tiny: Path, weight_map: object, message: str) -> None:
    (tiny.parent / "model.safetensors").symlink_to(tiny / "part.safetensors")
    tensors = stored_tensors(tiny)
    tensors.pop("transformer.wpe.weight")
    save_file(tensors, tiny / "part.safetensors")
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tiny, InvalidCheckpointError, message)


# --- hostile files


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_safetensors(folder: Path, header: bytes | dict[str, Any], data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(prefix + text + data)


A = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({}, b"", 2**63),
        ({}, b"", 2**64 - 1),
        ({}, b"", 3),
        (b"{nope", b"", None),
        (b"[" * 100_000, b"", None),
        (b'{"\xff": 1}', b"", None),
        ({"a": 3}, b"", None),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"\0" * 6, None),
        ({"a": entry("F32", [1], 0, 4)}, b"\0" * 3, None),
        ({"a": entry("F32", [1], 0, 4)}, b"\0" * 5, None),
        ({"a": entry("F32", [1], 4, 8)}, b"\0" * 8, None),
        ({"a": entry("F32", [1], 4, 0)}, b"\0" * 4, None),
        ({"a": entry("F16", [1], 0, 4)}, b"\0" * 4, None),
        ({"a": entry("F99", [1], 0, 4)}, b"\0" * 4, None),
        ({"a": entry("F32", [-1], 0, 4)}, b"\0" * 4, None),
        ({"a": entry("F32", [2**40, 2**40], 0, 4)}, b"\0" * 4, None),
        ({"a": entry("F32", [0, 2**63], 0, 0)}, b"", None),
        (b"{" + A + b"," + A + b"}", b"\0" * 4, None),
        (b"\x80\x04\x95pickle.", b"", None),
        (b"", b"", None),
    ],
)
def test_hostile_header_is_one_sentence(
    tiny: Path, header: bytes | dict[str, Any], data: bytes, length: int | None
) -> None:
    write_safetensors(tiny, header, data, length)
    refused(tiny, InvalidCheckpointError, "safetensors|do not fit")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("num_tensors", "padding", "message"),
    [
        (700_000, 0, "its header must have at most 33554432 bytes, got"),
        (300_000, 0, "its header must list at most 262144 tensors, got more"),
        (1, 34_000_000, "its header must have at most 33554432 bytes, got"),
    ],
)
def test_enormous_header_is_refused_before_anything_is_built_of_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, num_tensors: int, padding: int, message: str
) -> None:
    monkeypatch.delattr(safetensors_files, "safe_open")
    header = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}' % n for n in range(num_tensors))
    write_safetensors(tiny, header + b" " * padding + b"}", b"\0")
    refused(tiny, InvalidCheckpointError, message)


def test_a_header_of_many_numbers_is_refused_before_anything_is_built_of_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(safetensors_files, "safe_open")
    write_safetensors(tiny, {"a": entry("U8", [1] * (2**22 - 1), 0, 1)}, b"\0")
    refused(tiny, InvalidCheckpointError, "its header must have at most 4194304 commas, got more")


@pytest.mark.slow
def test_a_quantized_mixture_of_experts_is_not_too_many_tensors(tiny: Path) -> None:
    """What it is refused for here are its names."""
    kinds = [f"{linear}.{kind}" for linear in ("gate_proj", "up_proj", "down_proj") for kind in ("a", "b", "c", "d")]
    names = [f"layers.{n}.mlp.experts.{e}.{kind}" for n in range(48) for e in range(128) for kind in kinds]
    shards = [f"model-0000{number + 1}-of-00004.safetensors" for number in range(4)]
    (tiny / "model.safetensors").unlink()
    for number, shard in enumerate(shards):
        header = {name: entry("I32", [0], 0, 0) for name in names[number::4]}
        header["__metadata__"] = {"format": "pt"}
        text = json.dumps(header).encode()
        (tiny / shard).write_bytes(struct.pack("<Q", len(text)) + text)
    weight_map = {name: shards[i % 4] for i, name in enumerate(names)}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=2))

    refused(tiny, InvalidCheckpointError, r"missing .*, 73728 unexpected \(")


def test_many_tensors_in_many_files_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "MAX_TENSORS", 3)
    refused(tiny, InvalidCheckpointError, "its header must list at most 3 tensors, got more")
    (tiny / "model.safetensors").unlink()
    for number in range(3):
        tensors = {f"{number}{name}": torch.zeros(1) for name in "ab"}
        save_file(tensors, tiny / f"{number}.safetensors")
    names = {str(number): f"{number}.safetensors" for number in range(3)}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(tiny, InvalidCheckpointError, "must hold at most 3 tensors, got 4 or more")


def test_twice_named_tensor_is_refused(tiny: Path) -> None:
    """The control is in the format's own reader, which takes the last of the two."""
    write_safetensors(tiny, b"{" + A + b"," + A + b"}", b"\0" * 4)
    assert list(load_file(tiny / "model.safetensors")) == ["a"]
    refused(tiny, InvalidCheckpointError, "a name occurs twice in its header")


def test_file_that_is_empty_or_a_web_page_is_refused(tiny: Path) -> None:
    for content in (b"", b"<!DOCTYPE html><html>not found</html>", b"version https://git-lfs.github.com/spec/v1\n"):
        (tiny / "model.safetensors").write_bytes(content)
        refused(tiny, InvalidCheckpointError, r"model\.safetensors is not a readable safetensors file")


@SETTINGS
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_file_cut_anywhere_is_refused(make_gpt2: Callable[..., Path], tmp_path: Path, fraction: float) -> None:
    folder = shutil.copytree(make_gpt2(**TINY), tmp_path, dirs_exist_ok=True)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(len(whole) * fraction)])
    refused(folder, InvalidCheckpointError, r"model\.safetensors is not a readable safetensors file")


@SETTINGS
@given(data=st.data())
def test_file_changed_anywhere_is_read_or_refused(
    make_gpt2: Callable[..., Path], tmp_path: Path, data: st.DataObject
) -> None:
    folder = shutil.copytree(make_gpt2(**TINY), tmp_path, dirs_exist_ok=True)
    content = bytearray((folder / "model.safetensors").read_bytes())
    (header_length,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + header_length))] = data.draw(
            st.integers(0, 255) | st.sampled_from(b'0129[]{},:"')
        )
    (folder / "model.safetensors").write_bytes(content)
    try:
        stream(folder)
    except WeightsError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most changes are refused, but not all


# --- memory

MEASURE = """
import re, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from tests.parity.models import write_model
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def growth(load):
    Path("/proc/self/clear_refs").write_text("5")
    before, kept = memory("VmRSS"), load()
    return memory("VmHWM") - before

def stream(folder):
    checkpoint = Checkpoint(folder, load_config(folder))
    return list(checkpoint.stream(dtype=torch.float32, device="cpu"))

small, large = map(Path, sys.argv[1:])
stream(small)
def at_once():
    whole = load_file(large / "model.safetensors")
    return whole, [tensor.clone() for tensor in whole.values()]
print(growth(lambda: stream(large)), growth(at_once))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_peaks_below_the_model_and_its_largest_tensor(make_gpt2: Callable[..., Path], tiny: Path) -> None:
    large = make_gpt2(vocab_size=8192, n_embd=512, n_layer=6, n_head=4)
    checkpoint = open_checkpoint(large)
    largest = 8192 * 512 * 4
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, tiny, large], capture_output=True, text=True, check=True, timeout=100
    )
    streamed, at_once = map(int, run.stdout.split())
    assert checkpoint.num_bytes < streamed < checkpoint.num_bytes + largest < at_once


def test_experts_stored_as_mxfp4_equal_those_stored_plain(tmp_path: Path) -> None:
    folder, packed = tmp_path / "plain", tmp_path / "packed"
    fields = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20}
    write_model(folder, "gpt_oss", {**fields, "head_dim": 8, "layer_types": None})
    tensors = stored_tensors(folder)
    replaced: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        shapes = packed_shapes(tuple(tensors[name].shape))
        blocks, scales = (torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8) for shape in shapes)
        replaced |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = mxfp4.unpack(blocks, scales, torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")
    shutil.copytree(folder, packed)
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in replaced}
    save_file(kept | replaced, packed / "model.safetensors")

    plain, unpacked = stream(folder), stream(packed)
    assert plain.keys() == unpacked.keys()
    assert all(torch.equal(plain[name], unpacked[name]) for name in plain)
    assert open_checkpoint(packed).num_bytes < open_checkpoint(folder).num_bytes / 2

    name = "model.layers.0.mlp.experts.down_proj"
    save_file(kept | replaced | {f"{name}_scales": replaced[f"{name}_scales"][:2]}, packed / "model.safetensors")
    refused(
        packed,
        InvalidCheckpointError,
        rf"1 misshapen \({name}_scales is \[2, 64, 1\], expected \[3, 64, 1\]\)".replace(".", r"\."),
    )
    save_file(kept | replaced | {f"{name}_scales": torch.zeros(3, 64, 1)}, packed / "model.safetensors")
    refused(packed, InvalidCheckpointError, r"1 mistyped \(.*_scales is F32, expected one of U8\)")
    norm, byte = "model.norm.weight", torch.zeros(1, dtype=torch.uint8)
    others = {name: tensor for name, tensor in kept.items() if name != norm}
    save_file(others | replaced | {f"{norm}_blocks": byte, f"{norm}_scales": byte + 1}, packed / "model.safetensors")
    takes = "is in MXFP4, which takes a multiple of 32 inputs, expected"
    refused(packed, InvalidCheckpointError, rf"1 misshapen \(norm\.weight {takes} \[64\]\)")
    (packed / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    save_file(kept | replaced, packed / "model.safetensors")
    refused(packed, InvalidCheckpointError, "8 misshapen")  # three tensors of gate_up_proj and down_proj, twice
    (packed / "config.json").write_text(json.dumps(config))
    del replaced[f"{name}_scales"]
    save_file(kept | replaced, packed / "model.safetensors")
    refused(packed, InvalidCheckpointError, rf"config\.json: 1 missing \({name.removeprefix('model.')}_scales\)$")


@pytest.mark.some(2)
@pytest.mark.parametrize("share", [WHOLE, Share(0, 2), Share(1, 2), Share(3, 4)], ids=str)
def test_experts_in_mxfp4_are_given_out_as_they_are_stored_and_counted(share: Share, tmp_path: Path) -> None:
    """Those of a rank, too, whose inputs may begin within a group."""
    write_model(tmp_path, *SHAPES["gpt-oss, past its window"])
    pack_experts(tmp_path)
    opened, config = Checkpoint(tmp_path, load_config(tmp_path), share), load_config(tmp_path)
    plain = dict(opened.stream(dtype=torch.bfloat16, device="cpu"))
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"progress": lambda *done: seen.append(done), "keeps": [MXFP4]}
    held = dict(opened.stream(dtype=torch.bfloat16, device="cpu", **options))

    assert sum(tensor.nbytes for tensor in held.values()) == sum(
        weight_bytes(config, 2, share=share, kept=MXFP4).values()
    )
    assert seen[-1] == (opened.num_bytes, opened.num_bytes)
    scales = {name: held.pop(name) for name in list(held) if name.endswith(".scales")}
    assert list(held) == list(plain)
    assert len(scales) == 2 * 4 * 2  # two weights of four experts of two layers
    for name, tensor in plain.items():
        packed = scales.get(f"{name.removesuffix('weight')}scales") if name.endswith(".weight") else None
        its_values = held[name] if packed is None else mxfp4.unpack(held[name], packed, torch.bfloat16).mT
        assert torch.equal(its_values, tensor)


def test_an_expert_whose_inputs_would_be_cut_within_a_byte_is_unpacked(tmp_path: Path) -> None:
    model_type, fields = SHAPES["gpt-oss, past its window"]
    write_model(tmp_path, model_type, {**fields, "num_attention_heads": 32, "num_key_value_heads": 32})
    pack_experts(tmp_path)
    config, share = load_config(tmp_path), Share(31, 32)
    tensors = dict(Checkpoint(tmp_path, config, share).stream(dtype=torch.bfloat16, device="cpu", keeps=[MXFP4]))

    down = "blocks.0.experts.0.ffn_down"
    assert (tensors[f"{down}.weight"].dtype, tensors[f"{down}.weight"].shape) == (torch.bfloat16, (64, 3))
    assert f"{down}.scales" not in tensors
    assert sum(tensor.nbytes for tensor in tensors.values()) == sum(
        weight_bytes(config, 2, share=share, kept=MXFP4).values()
    )
