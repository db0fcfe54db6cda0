"""Percentiles, rates and goodput of outcomes whose numbers are known, and the rows of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptserve.server.cli.bench.report import HEADING, Objective, percentiles, render, summarize
from gptserve.server.cli.bench.stream import Outcome

NO_SLO = Objective()


def outcome(*arrivals: float, due: float = 0.0, **more: object) -> Outcome:
    """Return an answer with a token at each of these moments."""
    return replace(Outcome(due, len(arrivals), due, list(arrivals), len(arrivals), 10), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], {}),
        ([2.0], {"p50": 2000, "p90": 2000, "p99": 2000}),
        ([3.0, 1.0], {"p50": 1000, "p90": 3000, "p99": 3000}),
        (range(10, 0, -1), {"p50": 5000, "p90": 9000, "p99": 10_000}),
        (range(1, 11 + 1), {"p50": 6000, "p90": 10_000, "p99": 11_000}),
        (range(1, 700 + 1), {"p50": 350_000, "p90": 630_000, "p99": 693_000}),
    ],
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(seconds: list[float], expected: object) -> None:
    assert percentiles(seconds) == expected


def test_a_report_has_the_latencies_of_good_answers_and_rates_over_the_whole_time() -> None:
    outcomes = [
        outcome(1.0, 1.5, 2.5),
        outcome(3.0, 4.0, due=1.0, sent=1.25, num_cached_tokens=4),
        outcome(9.0, due=1.0, sent=9.0, failure="cut short"),
    ]
    report = summarize("2 at a time", outcomes, 5.0, 1.0, NO_SLO)

    assert (report.num_requests, report.failures) == (3, {"cut short": 1})
    assert report.ttft_ms == {"p50": 1000, "p90": 2000, "p99": 2000}
    assert report.itl_ms == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert report.e2e_ms == {"p50": 2500, "p90": 3000, "p99": 3000}
    assert (report.output_tokens_per_s, report.requests_per_s, report.goodput_per_s) == (1.0, 0.4, 0.4)
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_output_tokens) == (20, 4, 5)
    assert (report.send_delay_ms, report.client_cpu) == (250, 0.2)


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (NO_SLO, 4),
        (Objective(ttft_ms=1000), 3),
        (Objective(ttft_ms=999), 0),
        (Objective(itl_ms=500), 3),
        (Objective(itl_ms=499), 1),
        (Objective(1000, 500), 2),
        (Objective(1000, 499), 1),
    ],
)
def test_goodput_counts_the_answers_within_the_objective(slo: Objective, num_good: int) -> None:
    outcomes = [
        outcome(1.0),  # no token after the first, so none is late
        outcome(1.0, 1.25, 2.0),  # on average 500 ms, one of them 750
        outcome(1.0, 3.0, due=-0.5, failure="cut short"),
        outcome(1.0, 2.0),
        outcome(2.0, 2.5, due=0.5),
    ]

    assert summarize("x", outcomes, 2.0, 0.0, slo).goodput_per_s == num_good / 2


def test_the_mean_time_of_a_token_counts_tokens_and_not_events() -> None:
    assert outcome(1.0, 3.0, num_tokens=5).mean_itl == 0.5


def test_a_row_stands_below_its_heading_with_what_the_columns_do_not_say() -> None:
    good = outcome(1.0, 1.5, num_asked=3, num_cached_tokens=5)
    outcomes = [
        good,
        replace(good, num_tokens=None),
        outcome(failure="status 429, queue_full", message="try later"),
        outcome(failure="cut short"),
        outcome(failure="status 429, queue_full", message="try again"),
    ]
    row, *notes = render(summarize("32 at a time", outcomes, 0.5, 0.05, NO_SLO)).splitlines()

    assert len(row) == len(HEADING)
    latencies = ["1000.0"] * 3 + ["500.0"] * 3 + ["1500.0"] * 3
    assert row.split() == ["32", "at", "a", "time", "5", "3", "8.0", "4.00", *latencies, "10%"]
    assert notes == [
        "  2 failed: status 429, queue_full",
        "  1 failed: cut short",
        "  the first failure: try later",
        "  2 answers are shorter than asked",
        "  1 answers have no usage: their tokens are counted by their events",
        "  50% of the prompt tokens were cached",
    ]


def test_a_row_says_that_several_tokens_came_in_one_event() -> None:
    report = summarize("x", [outcome(1.0, 2.0, num_tokens=4, num_asked=4)], 1.0, 0.0, NO_SLO)

    assert render(report).splitlines()[1:] == ["  4 tokens came in 2 events, and itl is between events"]


def test_a_load_that_fails_as_a_whole_has_a_row() -> None:
    report = summarize("x", [outcome(failure="cut short")], 1.0, 0.0, NO_SLO)

    assert (report.ttft_ms, report.output_tokens_per_s) == ({}, 0)
    assert render(report).splitlines()[0].split() == ["x", "1", "1", "0.0", "0.00", *["nan"] * 9, "0%"]
