"""How long a completion and its choices waited for what, for metrics, log and traces.

`CompletionRun` (run.py) calls it with every output. Knows neither text nor HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gptserve.engine.request import TokenOutput
from gptserve.server.core.metrics import Metrics


@dataclass(slots=True)
class ChoiceTimes:
    """Times are by time.perf_counter; waits is None until the first token, or if another server sent that.

    waits are the seconds in the queue and in prefill, as in TokenOutput.
    """

    waits: tuple[float, float] | None = None
    first_at: float | None = None
    latest_at: float = 0.0


class CompletionTimes:
    """The times of one completion, begun at started_at. Call `add` with each output, at last `close`."""

    def __init__(self, metrics: Metrics, started_at: float, num_choices: int) -> None:
        self.started_at = started_at
        self.choices = [ChoiceTimes() for _ in range(num_choices)]
        self._metrics = metrics
        self._shown: dict[str, float] = {}

    def add(self, index: int, output: TokenOutput) -> None:
        """Note an output of a choice."""
        if not output.token_ids:
            return
        now, choice = time.perf_counter(), self.choices[index]
        if choice.first_at is None:
            self._begin(choice, output.waits, now)
        else:
            self._metrics.inter_token_latency.observe(now - choice.latest_at)
        for _ in output.token_ids[1:]:
            self._metrics.inter_token_latency.observe(0.0)
        choice.latest_at = now

    def close(self) -> dict[str, float]:
        """Note the end of all choices; return the fields for the log."""
        metrics = self._metrics
        for choice in self.choices:
            if choice.waits is not None and choice.first_at is not None:
                decode_s = choice.latest_at - choice.first_at
                metrics.decode_time.observe(decode_s)
                metrics.inference_time.observe(choice.waits[1] + decode_s)
        metrics.request_latency.observe(time.perf_counter() - self.started_at)
        if self._shown:
            first_at = self.started_at + self._shown["ttft_s"]
            self._shown["decode_s"] = max(choice.latest_at for choice in self.choices) - first_at
        return {name: round(seconds, 6) for name, seconds in self._shown.items()}

    def _begin(self, choice: ChoiceTimes, waits: tuple[float, float] | None, now: float) -> None:
        choice.first_at, choice.waits = now, waits
        if waits is not None:
            self._metrics.queue_time.observe(waits[0])
            self._metrics.prefill_time.observe(waits[1])
        if not self._shown:  # the first token of all choices
            self._metrics.time_to_first_token.observe(now - self.started_at)
            self._shown["ttft_s"] = now - self.started_at
            if waits is not None:
                self._shown |= {"queue_s": waits[0], "prefill_s": waits[1]}
