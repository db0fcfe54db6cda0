"""A hook of schemathesis: all completions run in the background, where links lead on from the answer.

Of the bodies that it makes of the whole schema hardly any begins a completion.
"""

from __future__ import annotations

from typing import Any

import schemathesis

BODIES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "The cat", "max_tokens": 5},
    "ChatRequest": {"messages": [{"role": "user", "content": "The cat"}], "max_tokens": 5},
    "ResponsesRequest": {"input": "The cat", "max_output_tokens": 5},
}


@schemathesis.hook
def before_load_schema(_context: schemathesis.HookContext, document: dict[str, Any]) -> None:
    """Leave one body to each route of completions."""
    for name, fields in BODIES.items():
        document["components"]["schemas"][name] = {"const": {**fields, "background": True}}
