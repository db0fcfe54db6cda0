"""What a load showed: percentiles, rates and failures, and their table. `command.py` prints it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gptserve.server.cli.bench.stream import Outcome

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "itl", "e2e")
HEADING = (
    "load           requests failed tokens/s  good/s"
    + "".join(f"{name + ' p' + str(p):>9}" for name in LATENCIES for p in PERCENTILES)
    + "  client"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """The most milliseconds that a good request takes: to its first token, and on average for each later one."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def holds(self, outcome: Outcome) -> bool:
        """Whether an answer that did not fail was fast enough."""
        times = ((outcome.ttft, self.ttft_ms), (outcome.mean_itl, self.itl_ms))
        return all(limit_ms is None or seconds * 1e3 <= limit_ms for seconds, limit_ms in times)


@dataclass(frozen=True, slots=True)
class Report:
    """A load in numbers. Latencies are percentiles of answers that did not fail; rates are over the whole time."""

    load: str
    num_requests: int
    failures: dict[str, int]
    """How many there were of each kind."""
    failure_message: str
    """What was said of the first one."""
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the server had in its prefix cache, if it says so."""
    num_output_tokens: int
    num_events: int
    """Events with tokens, of answers that did not fail."""
    num_short: int
    """Answers with fewer tokens than were asked for."""
    num_without_usage: int
    """Answers whose tokens are counted by their events."""
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    """Requests that met the objective; without one, all that did not fail."""
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    send_delay_ms: float
    """The longest time from the moment a request was due until it was sent, the connection included."""
    client_cpu: float
    """CPU time of this client, as a share of one core."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A load and what it showed."""

    number: float
    """Of clients, or of requests a second."""
    report: Report
    outcomes: list[Outcome]


def summarize(load: str, outcomes: Sequence[Outcome], seconds: float, cpu_seconds: float, slo: Objective) -> Report:
    """Return the report of a load that took so many seconds."""
    ended = [outcome for outcome in outcomes if outcome.failure is None]
    counts = [len(outcome.arrivals) if outcome.num_tokens is None else outcome.num_tokens for outcome in ended]
    return Report(
        load=load,
        num_requests=len(outcomes),
        failures=dict(Counter(outcome.failure for outcome in outcomes if outcome.failure is not None).most_common()),
        failure_message=next((outcome.message for outcome in outcomes if outcome.message), ""),
        seconds=seconds,
        num_prompt_tokens=sum(outcome.num_prompt_tokens for outcome in ended),
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in ended),
        num_output_tokens=sum(counts),
        num_events=sum(len(outcome.arrivals) for outcome in ended),
        num_short=sum(count < outcome.num_asked for count, outcome in zip(counts, ended, strict=True)),
        num_without_usage=sum(outcome.num_tokens is None for outcome in ended),
        output_tokens_per_s=sum(counts) / seconds,
        requests_per_s=len(ended) / seconds,
        goodput_per_s=sum(map(slo.holds, ended)) / seconds,
        ttft_ms=percentiles(outcome.ttft for outcome in ended),
        itl_ms=percentiles(gap for outcome in ended for gap in outcome.itl),
        e2e_ms=percentiles(outcome.e2e for outcome in ended),
        send_delay_ms=max((outcome.sent - outcome.due for outcome in ended), default=0.0) * 1e3,
        client_cpu=cpu_seconds / seconds,
    )


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds by nearest rank: p99 is the least value that 99 % of all do not exceed."""
    ranked = sorted(seconds)
    return {f"p{p}": ranked[-(-p * len(ranked) // 100) - 1] * 1e3 for p in PERCENTILES if ranked}


def render(report: Report) -> str:
    """Return a row below HEADING, and below it what the columns do not say."""
    latencies = (getattr(report, f"{name}_ms").get(f"p{p}", math.nan) for name in LATENCIES for p in PERCENTILES)
    num_failed = sum(report.failures.values())
    row = (
        f"{report.load:<15}{report.num_requests:>8}{num_failed:>7}{report.output_tokens_per_s:>9.1f}"
        f"{report.goodput_per_s:>8.2f}{''.join(f'{ms:>9.1f}' for ms in latencies)}{report.client_cpu:>8.0%}"
    )
    return "\n".join([row, *(f"  {note}" for note in _notes(report))])


def _notes(report: Report) -> Iterator[str]:
    for kind, number in report.failures.items():
        yield f"{number} failed: {kind}"
    if report.failure_message:
        yield f"the first failure: {report.failure_message}"
    if report.num_short:
        yield f"{report.num_short} answers are shorter than asked"
    if report.num_without_usage:
        yield f"{report.num_without_usage} answers have no usage: their tokens are counted by their events"
    if report.num_events < 0.9 * report.num_output_tokens:
        yield f"{report.num_output_tokens} tokens came in {report.num_events} events, and itl is between events"
    if report.num_cached_tokens:
        yield f"{report.num_cached_tokens / report.num_prompt_tokens:.0%} of the prompt tokens were cached"
