"""The table of the formats in which models write calls of tools."""

from __future__ import annotations

from gptserve.server.core.settings import ToolFormatName
from gptserve.server.tools.format import ToolFormat
from gptserve.server.tools.hermes import HERMES
from gptserve.server.tools.llama import LLAMA
from gptserve.server.tools.mistral import MISTRAL, MISTRAL_V11

FORMATS: dict[ToolFormatName, ToolFormat] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral-v11": MISTRAL_V11,
    "mistral": MISTRAL,
}
"""The first that a chat template has all signs of is its format. gpt-oss has its own, `harmony.py`."""

FOREIGN = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")
"""Signs of formats that resemble one of these: Qwen3-Coder, GLM and MiniMax put no JSON between <tool_call>, Hunyuan
has <tool_calls> around."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks for; None for one that is not in the table."""
    if any(sign in template for sign in FOREIGN):
        return None
    return next((form for form in FORMATS.values() if all(sign in template for sign in form.signs)), None)
