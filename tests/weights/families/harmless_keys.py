"""Writes weights/families/harmless_keys.json: what transformers' class of each family defines beside what is computed.

    python -m tests.weights.families.harmless_keys

It is run again when a family is added or transformers is pinned anew. A field counts as read if its name is an
attribute or a string anywhere in the modeling file, in a method of the configuration or in the code that all models
share. That is more than what is computed with, so that no field is taken for harmless that is not.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from gptserve.weights.families import FAMILIES
from gptserve.weights.families.config_keys import HARMLESS_FILE, NAMES, PATTERN, is_neutral

SHARED = (
    *("activations", "cache_utils", "configuration_utils", "integrations.moe", "masking_utils", "modeling_layers"),
    *("modeling_rope_utils", "modeling_utils", "pytorch_utils"),
)
"""The modules of transformers that take a configuration from a modeling file, or change one when it is made."""


def of_family(model_type: str) -> dict[str, Any]:
    """Return the fields that transformers never reads, and the defaults of those that it reads and the family does not.

    Those are fields of the class, or of its class for the text of a model that also sees.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    classes = {type(config), type(config.get_text_config(decoder=True))}
    read = _names_read(*SHARED)
    unread, defaults = set(), dict[str, Any]()
    for of_class in classes:
        of_code = read | _names_read(of_class.__module__, modeling_of(of_class))
        for field in dataclasses.fields(of_class):
            if field.name not in of_code | NAMES:
                unread.add(field.name)
            elif isinstance(field.default, str | int | float) and not is_known_or_off(field.name, field.default):
                defaults[field.name] = field.default
    return {"unread": sorted(unread), "defaults": dict(sorted(defaults.items()))}


def modeling_of(of_class: type) -> str:
    """Return the module with the model, which may be that of another configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    module = of_class.__module__.replace(".configuration_", ".modeling_")
    is_there = importlib.util.find_spec(module) is not None
    return module if is_there else MODEL_FOR_CAUSAL_LM_MAPPING[of_class].__module__


def main() -> None:
    lines = (f"{json.dumps(model_type)}: {json.dumps(of_family(model_type))}" for model_type in of_transformers())
    HARMLESS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def of_transformers() -> list[str]:
    """Return the model types that transformers knows, too."""
    return sorted(FAMILIES.keys() - {"nanogpt"})


def is_known_or_off(name: str, value: object) -> bool:
    """Return whether the rule accepts the key without a class's default."""
    return name in NAMES or PATTERN.fullmatch(name) is not None or is_neutral(value)


def _names_read(*modules: str) -> set[str]:
    return set().union(*(_of_module(f"transformers.{name.removeprefix('transformers.')}") for name in modules))


@cache
def _of_module(name: str) -> frozenset[str]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return frozenset()
    return frozenset(_names(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


if __name__ == "__main__":
    main()
