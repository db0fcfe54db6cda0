"""Fixtures every test may use: tiny random GPT-2 checkpoints written by transformers, and the embedded model.

A test process that leaves anything behind fails.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests import sevenths
from tests.leaks import holdings, open_gpu, wait_until_gone
from tests.postgres_server import PostgresServer, find_programs
from tests.some import leave_some

# Here, before anything imports torch. A tiny model gains nothing by a second thread, and on a busy machine each of its
# many short parallel regions waits for the one that is not running. Child processes inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

# Hypothesis has a deadline for each example, and fails where they are made slowly: both depend on the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# Where no slow tests run, properties are tried with fewer examples: of some, numbers of their own follow these.
settings.register_profile("fast", settings.get_profile("any machine"), max_examples=25)

# Every new client would read all certificates of certifi again, which takes longer than most requests here.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]

MakeGPT2 = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seventh",
        type=int,
        choices=range(sevenths.NUM),
        help="of the slow tests that -m selects, run this seventh, and its property tests with all examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are imported, whose objects stay
    if "not slow" in config.option.markexpr:
        settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Choose the number of examples of a file, which its property tests take when it is imported."""
    seventh = collector.config.option.seventh
    if seventh is not None and isinstance(collector, pytest.Module):
        settings.load_profile("any machine" if sevenths.has(seventh, collector.nodeid) else "fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_some(items)
    seventh = config.option.seventh
    if seventh is None:
        return
    left_out = {item for item in items if item.get_closest_marker("slow") and not sevenths.has(seventh, item.nodeid)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if any(item.get_closest_marker("gpu") or item.get_closest_marker("triton") for item in request.session.items):
        open_gpu()
    before = holdings()
    gc.enable()
    gc.freeze()  # collections need not look at the 600,000 objects of modules and tests again
    yield
    for item in request.session.items:
        vars(item)["funcargs"] = None  # pytest lets go of the last test's arguments only after this
    left = wait_until_gone(before)
    assert not left, f"the tests of this process leave behind: {left}"


@pytest.fixture(scope="session")
def make_gpt2(tmp_path_factory: pytest.TempPathFactory) -> MakeGPT2:
    """Write a GPT-2 with random weights and the config fields given, once per set of fields; return its folder."""
    made: dict[tuple[tuple[str, Any], ...], Path] = {}

    def make(**fields: Any) -> Path:
        key = tuple(sorted(fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("gpt2")
            _write_gpt2(made[key], fields)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_gpt2(make_gpt2: MakeGPT2) -> Path:
    """The default tiny model: 2 layers of 4 heads, 96 tokens, a context of 128."""
    return make_gpt2()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of this process of tests. Skips where the machine has none."""
    if find_programs() is None:
        pytest.skip("no PostgreSQL here: install the package postgresql")
    server = PostgresServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of an empty database."""
    postgres.start()
    return postgres.empty_database()


@pytest.fixture(scope="session")
def storyteller() -> Path:
    return Path(__file__).parents[1] / "weights" / "storyteller"


def _write_gpt2(folder: Path, fields: dict[str, Any]) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    defaults = {"vocab_size": 96, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    # A spread of 0.2 instead of 0.02 gives logits that differ clearly, so that equal ids mean something.
    config = GPT2Config(**{**defaults, "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.2, **fields})
    model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
