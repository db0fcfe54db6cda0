"""Qwen3-Coder, Qwen3.5 and Nemotron 3: <tool_call>, then elements <function=…> and <parameter=…>. Seed-OSS, too."""

from __future__ import annotations

from dataclasses import replace

from gptserve.server.tools.elements import Elements

_ELEMENTS = Elements(
    begin="<tool_call>",
    end="</tool_call>",
    function=("<function=", ">"),
    function_end="</function>",
    parameter="<parameter=",
    text=">",
    json=">",
    value_end="</parameter>",
    value_line="\n",
)
QWEN_CODER = _ELEMENTS.form("<tool_call>", "<function=", "<parameter=")
_SEED = replace(_ELEMENTS, begin="<seed:tool_call>", end="</seed:tool_call>", value_line="")
SEED = _SEED.form(_SEED.begin, "<function=", "<parameter=")
