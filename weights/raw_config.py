"""RawConfig: the fields of a JSON configuration, each read with its rule. Torch-free.

Knows no key. Families and the readers of quantized weights take what they compute with from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TypeGuard, TypeVar

from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown

MAX_SIZE = 2**31 - 1
MAX_WIDTH, MAX_LAYERS = 2**20, 4096
"""Far above any model. They keep a wrong file from filling memory before its checkpoint is compared."""

T = TypeVar("T")


class RawConfig:
    """The fields of a JSON configuration; null means absent. Readers raise InvalidConfigError naming the field.

    It remembers the fields that were read: any other may change the results.
    """

    def __init__(self, values: Mapping[str, object], file_name: str = "config.json") -> None:
        self._values = dict(values)
        self.file_name = file_name
        self._read: set[str] = set()
        self._sections: dict[str, RawConfig] = {}
        self._left_out: list[str] = []

    def unread(self) -> dict[str, object]:
        """Return the fields that were not read, by name; those inside a section as "section: name"."""
        fields = {name: value for name, value in self._values.items() if name not in self._read}
        for section_name, section in self._sections.items():
            fields |= {f"{section_name}: {name}": value for name, value in section.unread().items()}
        return fields

    def left_out(self) -> list[str]:
        """Return what `token_ids` left out, each as "file: name has ids"."""
        return [*self._left_out, *(text for section in self._sections.values() for text in section.left_out())]

    def names(self) -> tuple[str, ...]:
        """Return the names of all fields that are not null."""
        return tuple(name for name in self._values if name in self)

    def default(self, *, replaces_null: bool = False, **values: object) -> None:
        """Take these values for fields that the file does not name, as transformers' class does.

        A field that is null there stays null, unless `replaces_null`.
        """
        for name, value in values.items():
            if name not in self._values or (replaces_null and self._values[name] is None):
                self._values[name] = value

    def skip(self, *names: str) -> None:
        """Count fields as read that have no effect, given the values of others."""
        self._read.update(names)

    def size(self, name: str, *, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return an integer in [1, limit]."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(name, f"an integer in [1, {limit}]")
        return value

    def sizes(self, name: str, *, length: int, limit: int = MAX_SIZE) -> tuple[int, ...]:
        """Return `length` integers in [1, limit]: a list of so many, or one that stands for all."""
        value = self.value(name)
        values = value if isinstance(value, list) else [value] * length
        if len(values) != length or not all(type(its) is int and 1 <= its <= limit for its in values):
            raise self.error(name, f"an integer in [1, {limit}], or a list of {length}")
        return tuple(values)

    def count(self, name: str, *, default: int = 0, limit: int = MAX_SIZE) -> int:
        """Return an integer in [0, limit]."""
        value = self.value(name, default)
        if type(value) is not int or not 0 <= value <= limit:
            raise self.error(name, f"an integer in [0, {limit}]")
        return value

    def positive(self, name: str, *, default: float) -> float:
        """Return a finite number above 0."""
        value = self.value(name, default)
        if not _is_positive(value):
            raise self.error(name, "a finite number above 0")
        return float(value)

    def share(self, name: str, divisor: str) -> int:
        """Return the width `name` divided by the size `divisor`, which must divide it."""
        size, num = self.size(name, limit=MAX_WIDTH), self.size(divisor)
        if size % num:
            raise self.error(name, f"a multiple of {divisor} ({num})")
        return size // num

    def kv_heads(self, num_heads: int) -> int:
        """Return num_key_value_heads, a divisor of num_heads and by default the same."""
        num_kv_heads = self.size("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        return num_kv_heads

    def number(self, name: str) -> float | None:
        """Return a finite number above 0, or None where it is absent."""
        return None if self.value(name) is None else self.positive(name, default=1.0)

    def value(self, name: str, default: object = None) -> object:
        """Return the value, or `default` where it is absent."""
        self._read.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def section(self, name: str) -> RawConfig:
        """Return the fields of an object inside this one; none where it is absent."""
        value = self.value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return self._sections.setdefault(name, RawConfig(value, f"{self.file_name}: {name}"))

    def strings(self, name: str, choices: Iterable[str], *, length: int) -> tuple[str, ...] | None:
        """Return a list of `length` strings out of `choices`, or None where it is absent."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(entry in choices for entry in value):
            raise self.error(name, f"a list of {length}, each one of {', '.join(choices)}")
        return tuple(value)

    def numbers(self, name: str, *, length: int) -> tuple[float, ...]:
        """Return a list of `length` finite numbers above 0."""
        value = self.value(name)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self.error(name, f"a list of {length} finite numbers above 0")
        return tuple(map(float, value))

    def fractions(self, name: str, *, length: int) -> tuple[float, ...]:
        """Return a list of `length` numbers from 0 to below 1."""
        value = self.value(name)
        of_list = [its for its in value if _is_fraction(its)] if isinstance(value, list) else []
        if not isinstance(value, list) or not len(of_list) == len(value) == length:
            raise self.error(name, f"a list of {length} numbers in [0, 1)")
        return tuple(map(float, of_list))

    def forbid(self, name: str, default: object, why: str) -> None:
        """Raise UnsupportedModelError unless the field is absent or has the value given."""
        value = self.value(name)
        if value is not None and value != default:
            raise UnsupportedModelError(
                f"{self.file_name}: {name} must be {json.dumps(default)}, got {shown(value)}: {why}"
            )

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def choice(self, name: str, choices: Mapping[str, T], *, default: str) -> T:
        """Return the entry of `choices` for the string."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return choices[value]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids in [0, vocab_size): none, one, or a list. No text has any other: see `left_out`."""
        ids = self.integers(name)
        if outside := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
            self._left_out.append(f"{self.file_name}: {name} has {shown(outside)[1:-1]}")
        return tuple(token_id for token_id in ids if token_id not in outside)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return none, one, or a list of integers."""
        value = self.value(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise self.error(name, "an integer or a list of integers")
        return tuple(ids)

    def error(self, name: str, rule: str) -> InvalidConfigError:
        """Return the error for a field that must be `rule`."""
        found = f"got {shown(self._values[name])}" if name in self._values else "but is missing"
        return InvalidConfigError(f"{self.file_name}: {name} must be {rule}, {found}")


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_fraction(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
