"""The picture of the loads: its lines have the measured figures, and what `gptserve bench --plot` refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gptserve.server.cli.bench.plot import draw
from gptserve.server.cli.bench.report import Measured, Objective, summarize
from gptserve.server.cli.bench.stream import Outcome
from tests.server.cli.bench.stand_in import DONE, token, usage
from tests.server.cli.conftest import StandIn

pytestmark = pytest.mark.slow
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def _close_fonts() -> Iterator[None]:
    """Let go of the files of fonts, which matplotlib keeps open."""
    yield
    font_manager._get_font.cache_clear()  # type: ignore[attr-defined]


def load(number: float, *answers: tuple[float, ...], failed: int = 0, kind: str = "at a time") -> Measured:
    """Return a load of 10 s whose answers have a token at each of these moments."""
    outcomes = [Outcome(0.0, len(arrivals), 0.0, list(arrivals), len(arrivals), 10) for arrivals in answers]
    outcomes += [Outcome(0.0, 1, arrivals=[99.0, 199.0], failure="cut short")] * failed
    return Measured(number, summarize(f"{number:g} {kind}", outcomes, 10.0, 0.1, Objective()), outcomes)


ONE = load(1, (0.01, 0.02, 0.04), (0.03, 0.04))
FOUR = load(4, (0.05, 0.08), (0.06, 0.16), (0.07, 0.27), failed=2)
RATE = load(2.5, (0.02, 0.03), (0.04, 0.06), kind="a second")


def picture(figure: Figure) -> bytes:
    """Draw it, which sets the limits of its axes; any warning of matplotlib fails the test."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in axes.lines]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def descriptions(figure: Figure) -> list[str]:
    legend = figure.axes[3].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_the_upper_row_has_the_figures_of_the_reports_over_the_loads() -> None:
    figure = draw("teller", [ONE, FOUR], [])
    picture(figure)
    tokens, ttft, itl = figure.axes[:3]

    assert lines(tokens) == [([0, 1], [0.5, 0.6])]
    assert lines(ttft) == [([0, 1], pytest.approx(ms)) for ms in ([10, 60], [30, 70], [30, 70])]
    assert lines(itl) == [([0, 1], pytest.approx(ms)) for ms in ([10, 100], [20, 200], [20, 200])]
    for axes in (tokens, ttft, itl):
        assert (ticks(axes), axes.get_xlabel()) == (["1", "4"], "clients at a time")
        low, high = axes.get_ylim()
        assert low == 0
        assert high > max(max(values) for _, values in lines(axes))
    assert (tokens.get_ylabel(), ttft.get_ylabel(), itl.get_ylabel()) == ("tokens/s", "ttft, ms", "itl, ms")
    assert [text.get_text() for text in ttft.get_legend().get_texts()] == ["p50", "p90", "p99"]  # type: ignore[union-attr]


def test_the_lower_row_has_the_distribution_of_each_load_and_no_failed_answer() -> None:
    figure = draw("teller", [ONE, FOUR], [])
    ttft, itl = figure.axes[4:]

    third = pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert lines(ttft) == [
        (pytest.approx([10, 10, 30]), [0, 0.5, 1]),
        (pytest.approx([50, 50, 60, 70]), third),
    ]
    assert lines(itl) == [
        (pytest.approx([10, 10, 10, 20]), third),
        (pytest.approx([30, 30, 100, 200]), third),
    ]
    assert (ttft.get_xlabel(), itl.get_xlabel()) == ("ttft, ms", "itl, ms")
    assert descriptions(figure) == ["1 at a time: 2 requests", "4 at a time: 5 requests, 2 failed"]


def test_loads_are_in_ascending_order_and_no_line_joins_clients_and_rates() -> None:
    figure = draw("teller", [FOUR, ONE], [RATE])
    tokens, ttft = figure.axes[:2]

    assert ticks(tokens) == ["1", "4", "2.5/s"]
    assert tokens.get_xlabel() == "clients at a time, requests a second"
    assert lines(tokens) == [([0, 1], [0.5, 0.6]), ([2], [0.4])]
    assert len(ttft.get_legend().get_texts()) == 3  # type: ignore[union-attr]
    assert [line.get_linestyle() for line in figure.axes[4].lines] == ["-", "-", "--"]
    assert [text.partition(":")[0] for text in descriptions(figure)] == ["1 at a time", "4 at a time", "2.5 a second"]


def test_a_rate_alone_is_a_number_of_requests_a_second() -> None:
    tokens = draw("teller", [], [RATE]).axes[0]

    assert (ticks(tokens), tokens.get_xlabel(), lines(tokens)) == (["2.5"], "requests a second", [([0], [0.4])])


@pytest.mark.parametrize(
    "loads",
    [
        [load(1, (0.01, 0.02))],
        [load(1, (0.01,))],
        [load(1, (0.0, 0.0, 0.0))],
        [load(1, (0.01, 0.01, 0.02), (0.0001, 90.0))],
        [load(1, failed=3)],
        [load(1, failed=3), ONE],
        [load(number, (0.01, 0.02)) for number in range(1, 21)],
    ],
    ids=["one load", "one token", "no time", "from 0 to a minute", "failures alone", "a load that failed", "many"],
)
def test_any_load_can_be_drawn(loads: list[Measured]) -> None:
    figure = draw("teller", loads, [])

    assert picture(figure).startswith(PNG)
    assert len(descriptions(figure)) == len(loads)


@pytest.mark.parametrize("name", ["$x_^$", "模型", "a\x1bb", "\ud800"])
def test_a_model_may_have_any_name(name: str) -> None:
    figure = draw(f"{name}\nprompts", [ONE], [])
    picture(figure)

    shown = {"$x_^$": "$x_^$", "模型": "\\u6a21\\u578b", "a\x1bb": "a\\x1bb", "\ud800": "\\ud800"}[name]
    assert figure.get_suptitle() == f"{shown}\nprompts"


def test_a_long_title_has_lines_that_fit() -> None:
    figure = draw("folder/" * 40 + "\nprompts", [ONE], [])
    picture(figure)

    title = figure.texts[0].get_window_extent()
    assert title.x0 > 0
    assert title.x1 < figure.bbox.width
    assert figure.get_suptitle().replace("\n", "") == "folder/" * 40 + "prompts"


@pytest.fixture
def bench(run: Any, server: StandIn) -> Any:
    """Run `gptserve bench` on a stand-in."""
    server.answer = (200, token() + token() + usage(128, 2) + DONE)
    return lambda *flags: run("bench", "--url", server.url, "--num-requests", "3", *flags)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures, save = [], Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **keywords: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_a_run_draws_what_it_reports(bench: Any, drawn: list[Figure], tmp_path: Path) -> None:
    path = tmp_path / "loads.png"
    loads = ("--concurrency", "2,1", "--rate", "1e6", "--prompt-tokens", "20", "--max-tokens", "2")
    status, out, err = bench(*loads, "--json", "--plot", str(path))
    two, one, rate = json.loads(out)["loads"]

    assert (status, err) == (0, "")
    assert path.read_bytes().startswith(PNG)
    [figure] = drawn
    assert figure.get_suptitle().splitlines()[0].startswith("teller at http://127.0.0.1:")
    assert figure.get_suptitle().splitlines()[1] == "prompts of 20 tokens, answers of 2"
    tokens, ttft, itl = figure.axes[:3]
    assert ticks(tokens) == ["1", "2", "1e+06/s"]
    name = "output_tokens_per_s"
    assert lines(tokens) == [([0, 1], [one[name], two[name]]), ([2], [rate[name]])]
    for axes, name in ((ttft, "ttft_ms"), (itl, "itl_ms")):
        percentiles = [[load[name][p] for load in (one, two, rate)] for p in ("p50", "p90", "p99")]
        assert lines(axes) == [line for ms in percentiles for line in (([0, 1], ms[:2]), ([2], ms[2:]))]
    assert [len(line.get_xdata()) for line in figure.axes[4].lines] == [1 + 3] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_extension_is_the_format(suffix: str, begin: bytes, bench: Any, tmp_path: Path) -> None:
    path = tmp_path / f"loads{suffix}"

    assert bench("--concurrency", "1", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize("is_old", [False, True])
def test_without_matplotlib_only_a_picture_is_refused(
    is_old: bool, bench: Any, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old:
        monkeypatch.delattr(Axes, "ecdf")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "gptserve.server.cli.bench.plot")
    refused = bench("--concurrency", "1", "--plot", str(tmp_path / "loads.png"))
    asked = len(server.asked)

    assert refused == (2, "", "gptserve bench: --plot needs matplotlib: pip install 'gptserve[plots]'\n")
    assert asked == 0
    assert bench("--concurrency", "1")[0] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/loads.png", "No such file or directory"),
        ("file/loads.png", "Not a directory"),
        ("folder.png", "Is a directory"),
        ("pipe.png", "Is a pipe"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_loads(
    name: str, why: str, bench: Any, server: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    path = str(tmp_path / name)

    error = f"--plot must be a file that can be written, got {path!r}: {why}"
    assert bench("--plot", path) == (2, "", f"gptserve bench: {error}\n")
    assert server.asked == []


@pytest.mark.parametrize("name", ["loads.jpg", "loads", ".png", "png", ""])
def test_another_extension_is_refused(name: str, bench: Any, server: StandIn) -> None:
    error = f"argument --plot: must be a file.png, .svg or .pdf, got {name!r}"
    status, out, err = bench("--plot", name)

    assert (status, out) == (2, "")
    assert err.startswith(f"gptserve bench: {error}")
    assert server.asked == []


def test_a_run_that_fails_leaves_the_file_as_it_was(bench: Any, server: StandIn, tmp_path: Path) -> None:
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"old")
    server.answer = (400, "")

    assert [bench("--plot", str(path))[0] for path in (old, new)] == [1, 1]
    assert old.read_bytes() == b"old"
    assert not new.exists()


def test_a_disk_that_is_full_is_one_sentence_after_the_table(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "loads.png"
    path.symlink_to("/dev/full")
    status, out, err = bench("--concurrency", "1", "--plot", str(path))

    assert (status, err) == (1, f"gptserve: cannot write the plot to {path}: No space left on device\n")
    assert "1 at a time" in out


def test_the_help_names_the_flag_and_the_extra(run: Any) -> None:
    status, out, _ = run("bench", "--help")

    assert status == 0
    assert "--plot FILE" in out
    assert "pip install 'gptserve[plots]'" in " ".join(out.split())
