"""The table of the formats in which models write calls of tools: this package's, and those of other distributions.

A distribution names a ToolFormat by an entry point of the group `gptserve.tool_formats`; its name is the format's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from gptserve.server.tools.cohere import COHERE, COMMAND_R
from gptserve.server.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_1, DEEPSEEK_V3_2, DEEPSEEK_V4
from gptserve.server.tools.format import ToolFormat
from gptserve.server.tools.gemma import GEMMA_4
from gptserve.server.tools.glm import GLM
from gptserve.server.tools.hermes import HERMES
from gptserve.server.tools.json_list import APRIEL, GRANITE_3, NEMOTRON_2
from gptserve.server.tools.kimi import KIMI_K2
from gptserve.server.tools.llama import LLAMA
from gptserve.server.tools.minimax import MINIMAX_M1, MINIMAX_M2
from gptserve.server.tools.mistral import MISTRAL, MISTRAL_V11
from gptserve.server.tools.pythonic import LFM, OLMO, PYTHONIC
from gptserve.server.tools.qwen_coder import QWEN_CODER, SEED
from gptserve.weights.errors import ChatTemplateError

GROUP = "gptserve.tool_formats"
OWN_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "deepseek-v4": DEEPSEEK_V4,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "kimi-k2": KIMI_K2,
    "cohere": COHERE,
    "command-r": COMMAND_R,
    "minimax-m1": MINIMAX_M1,
    "minimax-m2": MINIMAX_M2,
    "apriel": APRIEL,
    "nemotron-2": NEMOTRON_2,
    "granite-3": GRANITE_3,
    "seed": SEED,
    "qwen-coder": QWEN_CODER,
    "glm": GLM,
    "pythonic": PYTHONIC,
    "llama": LLAMA,
    "mistral-v11": MISTRAL_V11,
    "mistral": MISTRAL,
    "hermes": HERMES,
    "lfm": LFM,
    "olmo": OLMO,
    "gemma-4": GEMMA_4,
}
"""The first that a chat template has all signs of is its format. gpt-oss has its own, `harmony.py`."""

FOREIGN = ("<function=", "<arg_key", "<invoke", "<tool_calls")
"""Signs of formats that resemble one of these and are none."""


@cache
def formats() -> Mapping[str, ToolFormat]:
    """Return all formats, those of other distributions first. Raises ChatTemplateError if one of them is not valid."""
    found: dict[str, ToolFormat] = {}
    for entry in entry_points(group=GROUP):
        where = f"the entry point {entry.name} of {GROUP}, {entry.value},"
        if entry.name in OWN_FORMATS or entry.name in found:
            raise ChatTemplateError(f"{where} has the name of another format")
        try:
            form = entry.load()
        except Exception as fault:
            raise ChatTemplateError(f"{where} cannot be loaded: {type(fault).__name__}: {fault}") from fault
        if not isinstance(form, ToolFormat):
            raise ChatTemplateError(f"{where} must be a ToolFormat, got {type(form).__name__}")
        found[entry.name] = form
    return {**found, **OWN_FORMATS}


def format_named(name: str) -> ToolFormat:
    """Return the format of a name. Raises ChatTemplateError."""
    known = formats()
    if name not in known:
        raise ChatTemplateError(f"tool_call_format must be one of {', '.join(sorted(known))}, got {name!r}")
    return known[name]


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks for; None for one that is not in the table."""
    own = [form for form in formats().values() if all(sign in template for sign in form.signs)]
    resembles = any(sign in template for sign in FOREIGN)
    return next((form for form in own if not (form is HERMES and resembles)), None)
