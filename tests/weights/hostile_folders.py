"""Model folders that mean harm, made of good ones: each is a name and what it does to a copy of a tiny model.

`by_hand` gives kinds of harm times the places for it, `mutated` draws any number of others. `open_folder` does in a
worker process all that a server does with a folder, within limits, up to two tokens of an answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gptserve.weights.chat.template
from gptserve.weights.safetensors_files import MAX_HEADER_COMMAS, MAX_TENSORS
from gptserve.weights.workers import Limits, Workers

ROOT = Path(__file__).parents[2]
# Of all that a server does with a folder before it says that it is ready, and with the first request.
LIMITS = Limits(
    cpu_s=30, memory_bytes=3 * 2**29, open_cpu_s=120, open_memory_bytes=2**40, wait_s=500, starts_threads=True
)

Harm = Callable[[Path], object]

JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("model.safetensors.index.json", "hf_quant_config.json"),
)
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "an empty object": b"{}",
    "a cut object": b'{"model_type": "gp',
    "Latin-1": b'{"model_type": "\xff"}',
    "a null byte": b'{"model_type": "\0"}',
    "a lone surrogate": b'{"model_type": "\\ud800", "chat_template": "\\ud800", "bos_token": "\\udfff"}',
    "many digits": b'{"model_type": ' + b"9" * 5000 + b"}",
    "infinity": b'{"model_type": Infinity, "vocab_size": -Infinity, "n_embd": NaN, "temperature": 1e999}',
    "deep lists": b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deeper lists": b"[" * 10**6,
    "deep objects": b'{"model_type": ' * 900 + b"1" + b"}" * 900,
    "many values": b'{"model_type": [' + b"[]," * 2_500_000 + b"0]}",
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(600_000)) + b"}",
    "a long text": b'{"model_type": "' + b"a" * 8_000_000 + b'"}',
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 1e308, float("nan"), float("inf")),
    *(0.5, "", "a", "a" * 100_000, "\ud800", "(a+)+$", [], {}, [None], [[]], {"type": "Sequence"}, {"type": "NFC"}),
)
SIZES = (0, 2**20, 2**31 - 1, 2**63, "5", [5])
SETTINGS = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "layer_norm_epsilon", "eos_token_id")
A = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS: dict[str, bytes] = {
    "no header": b"",
    "400,000 tensors": b"{" + b",".join(b'"%d":{}' % number for number in range(400_000)) + b"}",
    "as many tensors as may be": b"{"
    + b"".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},' % number for number in range(MAX_TENSORS - 1))
    + b'"a":%b}' % json.dumps(A).encode(),
    "as many dimensions as may be": json.dumps({"wpe.weight": {**A, "shape": [1] * (MAX_HEADER_COMMAS - 3)}}).encode(),
    "more dimensions": b'{"a":{"dtype":"F32","shape":[%b1],"data_offsets":[0,4]}}' % (b"1," * MAX_HEADER_COMMAS),
    "a deep header": b'{"a":' * 5000,
    "a million dimensions": json.dumps({"a": {**A, "shape": [1] * 10**6}}).encode(),
    "an enormous shape": json.dumps({"a": {**A, "shape": [2**62, 2**62]}}).encode(),
    "an empty enormous shape": json.dumps(
        {"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}
    ).encode(),
    "offsets backwards": json.dumps({"a": {**A, "data_offsets": [4, 0]}}).encode(),
    "an unknown type": json.dumps({"a": {**A, "dtype": "F99"}}).encode(),
    "long names": json.dumps({"a" * 6_000_000: A}).encode(),
    "names alike": b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2),
    "metadata": json.dumps({"__metadata__": {str(number): "a" * 100 for number in range(20_000)}, "a": A}).encode(),
}
REGEX = {"type": "Split", "behavior": "Isolated", "invert": False}
AROUND = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
MANY = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0] * 10**4, "tokens": ["a"] * 10**4}}
PREPEND = {"type": "Prepend", "prepend": "a" * 100}
SPLIT = {**REGEX, "pattern": {"String": " "}}
GROWN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}
FILL = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
RULES: dict[str, dict[str, Any]] = {
    "an endless regex": {"pre_tokenizer": {**REGEX, "pattern": {"Regex": "(a+)+$|(T.+)+9"}}},
    "a regex that is none": {"pre_tokenizer": {**REGEX, "pattern": {"Regex": "(" * 500}}},
    "a large regex": {"pre_tokenizer": {**REGEX, "pattern": {"Regex": "(a{1,1000}){1,1000}"}}},
    "a splitter of nothing": {"pre_tokenizer": {**REGEX, "pattern": {"String": ""}}},
    "many splitters": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT] * 10**5}},
    "a million for one": {"normalizer": GROWN},
    "a million for one, twenty times": {"normalizer": {"type": "Sequence", "normalizers": [GROWN] * 20}},
    "a million for each": {"normalizer": {**GROWN, "pattern": {"Regex": ""}}},
    "many normalizers": {"normalizer": {"type": "Sequence", "normalizers": [PREPEND] * 10**5}},
    "a precompiled map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////" * 1000}},
    "a decoder that grows": {"decoder": GROWN},
    "many decoders": {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 10**6}},
    "many around": {
        "post_processor": {"type": "TemplateProcessing", "single": [AROUND] * 10**4, "pair": [], "special_tokens": MANY}
    },
    "a cutting length": {
        "truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}
    },
    "a filling length": {"padding": {**FILL, "strategy": {"Fixed": 2**40}}},
    "many added tokens": {"added_tokens": [{"id": 460 + n, "content": f"a{n}", "special": True} for n in range(10**5)]},
    "long added tokens": {"added_tokens": [{"id": 460 + n, "content": "a" * 10**4 + str(n)} for n in range(100)]},
}
TEMPLATES: dict[str, str] = {
    "a constant": "{{ 9 ** 99999999 }}",
    "ljust": "{{ messages[0].content.ljust(2000000000) }}",
    "indent": "{{ (messages[0].content ~ '\n') * 10000000 | indent(9999) }}",
    "sort": "{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "pprint": "{% for i in range(99999) %}{% set x = range(99999) | list | pprint %}{% endfor %}",
    "wordwrap": "{% set x = 'a b' * 999999 %}{% for i in range(99999) %}{% set y = x | wordwrap(1) %}{% endfor %}",
    "groupby": "{% for i in range(99999) %}{% set x = range(99999) | groupby('real') | list %}{% endfor %}",
    "format": "{{ '%999999999d' | format(1) }}",
    "filler": "{{ lipsum(n=100000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop in a loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 10**5,
    "many blocks": "{% if x %}" * 2000 + "{% endif %}" * 2000,
    "many names": "".join(f"{{% set a{number} = 1 %}}" for number in range(20_000)),
    "reaching out": "{{ messages.__class__.__base__.__subclasses__() }}",
    "reading files": "{% include '/etc/passwd' %}",
    "raising": "{{ raise_exception('a' * 10000000) }}",
    "output": "{{ 'a' * 400000000 }}",
    "tojson": "{% set n = namespace() %}{% for i in range(2000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "date": "{{ strftime_now('%Y' * 10000000) }}",
}


PLACES: dict[str, Harm] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a terabyte": lambda path: path.touch() or os.truncate(path, 2**40),
}


def by_hand() -> Iterator[tuple[str, Harm]]:
    """Yield the harms."""
    for file in JSON_FILES:
        for name, content in CONTENTS.items():
            yield f"{file}: {name}", partial(_replace, file=file, make=partial(Path.write_bytes, data=content))
        for name, make in PLACES.items():
            yield f"{file}: {name}", partial(_replace, file=file, make=make)
    for name, header in HEADERS.items():
        yield f"safetensors: {name}", partial(_write_header, header=header, length=len(header))
    for length in (2**63, 2**64 - 1, 10**8 + 1, 3):
        yield f"safetensors: a length of {length}", partial(_write_header, header=b"{}", length=length)
    for key, value in itertools.product(SETTINGS, SIZES):
        yield f"config.json: {key} is {value}", partial(_change, file="config.json", fields={key: value})
    for name, fields in RULES.items():
        yield f"tokenizer.json: {name}", partial(_change, file="tokenizer.json", fields=fields)
    for name, template in TEMPLATES.items():
        yield (
            f"template: {name}",
            partial(_replace, file="chat_template.jinja", make=partial(Path.write_text, data=template)),
        )


def mutated(seed: int) -> tuple[str, Harm]:
    """Return the harm of this number: values of a JSON file replaced, removed or moved, or bytes of a file."""
    draw = random.Random(seed)
    file = draw.choice([*JSON_FILES[:5], "tokenizer.json", "model.safetensors", "chat_template.jinja"])
    change = _mutate_bytes if draw.random() < 0.3 or file.endswith("jinja") else _mutate_values
    return f"{seed}: {file}", lambda folder: change(folder / file, draw)


def open_folder(folder: str) -> str:
    """Do what a server does with a folder; return what came of it. Called in a worker."""
    from gptserve.engine.errors import EngineError, InvalidRequestError
    from gptserve.engine.request import SamplingParams
    from gptserve.llm import LLM
    from gptserve.weights.chat.template import load_chat_template
    from gptserve.weights.errors import WeightsError
    from gptserve.weights.generation import load_sampling_defaults
    from gptserve.weights.tokenizers.info import load_tokenizer_info

    gptserve.weights.chat.template.LIMITS = Limits(cpu_s=1, open_cpu_s=1)
    try:
        template = load_chat_template(Path(folder))
        load_sampling_defaults(Path(folder))
        load_tokenizer_info(Path(folder))
        llm = LLM(folder, device="cpu", num_threads=1, num_blocks=64)
        text = "The cat, 12 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"
        if template is not None:
            text = template.render([{"role": "user", "content": text}], {})
        (completion,) = llm.generate([llm.tokenizer.encode_with_special(text)], SamplingParams(max_tokens=2), seed=1)
    except (WeightsError, EngineError, InvalidRequestError) as refusal:
        return f"refused: {refusal}"
    return f"served: {completion.text!r}"


def make_workers() -> Workers:
    """Return workers whose calls are those of `open_folder`."""
    module = f"__import__('importlib').import_module({__name__!r})"
    heavy = "__import__('torch'), __import__('gptserve.llm')"
    return Workers(
        "builtins:eval",
        f"__import__('sys').path.insert(0, {str(ROOT)!r}) or ({heavy}) and {module}.open_folder",
        LIMITS,
    )


def _replace(folder: Path, file: str, make: Harm) -> None:
    (folder / file).unlink(missing_ok=True)
    make(folder / file)


def _write_header(folder: Path, header: bytes, length: int) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + b"\0" * 4)


def _change(folder: Path, file: str, fields: dict[str, Any]) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _mutate_bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    reach = min(len(data), 4096)  # the header of a safetensors file; what follows are numbers
    for _ in range(draw.randint(1, 4)):
        at, end = draw.randrange(reach), draw.randrange(reach)
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[min(at, end) : max(at, end) + 1 - draw.randrange(2)]
            case 2:
                data[at:at] = data[min(at, end) : max(at, end)] * draw.choice([1, 1, 100])
            case 3:
                data[at:at] = draw.choice([b"{", b"}", b'"', b"[", b"{{", b"%}", b"\\", b"\xff", b"0", b"-", b"e99"])
        reach = max(1, min(reach, len(data)))
        data = data or bytearray(b" ")
    path.write_bytes(data)


def _mutate_values(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    root = json.loads(data[8:start] if path.suffix == ".safetensors" else data)
    for _ in range(draw.randint(1, 3)):
        place = root
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(place[key], dict | list) and draw.random() < 0.8:
                place = place[key]
                continue
            match draw.randrange(4):
                case 0:
                    del place[key]
                case 1:
                    place[key] = place[draw.choice(keys)]
                case _:
                    place[key] = draw.choice(VALUES)
            break
    text = json.dumps(root).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:] if path.suffix == ".safetensors" else text)
