"""The picture of `gptserve bench --plot`: throughput and latencies of all loads.

The only file that imports matplotlib, which `pip install 'gptserve[plots]'` adds; `command.py` imports it if a picture
is asked for. It knows neither servers nor clocks. A Figure without pyplot has no window and shares no state; the format
of the file chooses the backend, Agg for PNG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, PercentFormatter

from gptserve.server.cli.bench.report import PERCENTILES, Measured, Report
from gptserve.server.cli.bench.stream import Outcome
from gptserve.server.cli.terminal import visible

if not hasattr(Axes, "ecdf"):
    raise ImportError("matplotlib is older than 3.8")

_INCHES = (15, 8)
_PIXELS_AN_INCH = 120
_CHARACTERS_A_LINE = 130
_COLORS = ("tab:green", "tab:orange", "tab:red")  # of PERCENTILES
_LIGHTEST = 0.85  # of the colors of the loads; beyond, they are hard to see on white


def draw(title: str, closed: Sequence[Measured], open_: Sequence[Measured]) -> Figure:
    """Return the picture of the loads by clients and of those by rate.

    The upper row has figures of the table over the loads, in ascending order and evenly spaced. The lower row has the
    distributions of each load's latencies. Latencies are of answers that did not fail; the legend counts the others.
    """
    figure = Figure(_INCHES, _PIXELS_AN_INCH, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    figure.suptitle(_plain(title), parse_math=False)
    (tokens, ttft, itl), (legend, ttft_shares, itl_shares) = figure.subplots(2, 3)
    runs = [sorted(loads, key=lambda load: load.number) for loads in (closed, open_)]

    _draw_over_loads(tokens, runs, lambda report: report.output_tokens_per_s, "tokens/s", "tab:blue")
    _name_loads(tokens, runs)
    tokens.set(title="Throughput", ylabel="tokens/s")
    for axes, name, full in ((ttft, "ttft", "Time to first token (ttft)"), (itl, "itl", "Inter-token latency (itl)")):
        for p, color in zip(PERCENTILES, _COLORS, strict=True):
            _draw_over_loads(axes, runs, _percentile(name, p), f"p{p}", color)
        _name_loads(axes, runs)
        axes.set(title=full, ylabel=f"{name}, ms")
        axes.legend()

    styled = _styled(runs)
    _draw_shares(ttft_shares, styled, lambda outcome: [outcome.ttft])
    ttft_shares.set(xlabel="ttft, ms", ylabel="requests with at most this ttft")
    _draw_shares(itl_shares, styled, lambda outcome: outcome.itl)
    itl_shares.set(xlabel="itl, ms", ylabel="tokens with at most this itl")

    legend.axis("off")
    lines = [Line2D([], [], **style, label=_described(load.report)) for load, style in styled]
    legend.legend(handles=lines, title="Loads", loc="center", ncols=1 + len(lines) // 16)
    return figure


def _draw_over_loads(
    axes: Axes, runs: Sequence[Sequence[Measured]], value: Callable[[Report], float], label: str, color: str
) -> None:
    """Draw a line for each run of loads: none joins clients and rates. One entry of the legend stands for both."""
    start = 0
    for loads in filter(None, runs):
        places = range(start, start + len(loads))
        values = [value(load.report) for load in loads]
        axes.plot(places, values, marker="o", color=color, label=label if start == 0 else None)
        start += len(loads)


def _name_loads(axes: Axes, runs: Sequence[Sequence[Measured]]) -> None:
    """Make the x axis that of `_draw_over_loads`, and let the y axis begin at 0; the lines must be drawn."""
    closed, open_ = runs
    per_second = "/s" if closed else ""
    labels = [f"{load.number:g}" for load in closed] + [f"{load.number:g}{per_second}" for load in open_]
    axes.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 10 else 0)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xlabel(", ".join(["clients at a time"] * bool(closed) + ["requests a second"] * bool(open_)))
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)


def _percentile(name: str, p: int) -> Callable[[Report], float]:
    """Return what takes a latency from a report, in ms; nan where all requests failed."""
    return lambda report: getattr(report, f"{name}_ms").get(f"p{p}", math.nan)


def _styled(runs: Sequence[Sequence[Measured]]) -> list[tuple[Measured, dict[str, Any]]]:
    """Return the loads with how their lines look: darker to lighter, dashed for rates."""
    last = max(1, sum(map(len, runs)) - 1)
    dashes = [(load, dash) for loads, dash in zip(runs, ("-", "--"), strict=True) for load in loads]
    color = colormaps["viridis"]
    return [
        (load, {"color": color(_LIGHTEST * place / last), "linestyle": dash})
        for place, (load, dash) in enumerate(dashes)
    ]


def _draw_shares(
    axes: Axes, styled: Sequence[tuple[Measured, dict[str, Any]]], seconds: Callable[[Outcome], list[float]]
) -> None:
    """Draw the empirical distribution function of each load's latencies."""
    longest = 0.0
    for load, style in styled:
        latencies_ms = [s * 1e3 for outcome in load.outcomes if outcome.failure is None for s in seconds(outcome)]
        if latencies_ms:
            axes.ecdf(latencies_ms, **style)
            longest = max(longest, *latencies_ms)
    if longest > 0:  # on a logarithmic axis latencies of 0 are left of it
        axes.set_xscale("log", nonpositive="clip")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 2000 * low else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)


def _described(report: Report) -> str:
    num_failed = sum(report.failures.values())
    return f"{report.load}: {report.num_requests} requests" + (f", {num_failed} failed" if num_failed else "")


def _plain(text: str) -> str:
    """Return the text in characters that matplotlib's font has, and in lines that are no wider than the picture."""
    plain = (visible(line).encode("ascii", "backslashreplace").decode() for line in text.split("\n"))
    return "\n".join(part for line in plain for part in wrap(line, _CHARACTERS_A_LINE))
