"""The events of one message, as Anthropic's API streams them. Knows no HTTP; `api/messages.py` makes an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.core.error_responses import messages_error_body
from gptserve.server.core.errors import ServiceError
from gptserve.server.messages.plan import MessagePlan, usage_of
from gptserve.server.text.output import Delta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEncoder:
    """Renders the events of one stream. The first has the usage before any token, the last but one that of all."""

    keep_alive, num_entries = PING, 0

    def __init__(self, plan: MessagePlan) -> None:
        self._encode = PiecewiseEncoder(ensure_ascii=True).encode_short
        self._output = plan.new_output()
        counts = {"prompt_tokens": plan.num_prompt_tokens, "prompt_tokens_details": {"cached_tokens": 0}}
        usage = usage_of({**counts, "completion_tokens": 0}, self._output)
        self.opening = self._render([{"type": "message_start", "message": plan.message(self._output, usage)}])

    def chunk(self, _index: int, delta: Delta, _usage: Mapping[str, object] | None = None) -> str:
        """Return the events of a delta."""
        return self._render(self._output.add(delta))

    def end(self, usage: Mapping[str, object]) -> str:
        """Return what closes a stream that did not fail."""
        stopped = {"stop_reason": self._output.stop_reason, "stop_sequence": self._output.stop_sequence}
        told = {"type": "message_delta", "delta": stopped, "usage": usage_of(usage, self._output)}
        return self._render([told, {"type": "message_stop"}])

    def error(self, error: ServiceError) -> str:
        """Return the event that ends a failed stream."""
        return self._render([messages_error_body(error)])

    def _render(self, events: Iterable[Mapping[str, object]]) -> str:
        return "".join(f"event: {event['type']}\ndata: {self._encode(event)}\n\n" for event in events)
