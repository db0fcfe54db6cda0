"""Every transition of the table in engine/blame.py."""

from __future__ import annotations

import pytest

from gptserve.engine.blame import CLEARING_STEPS, NO_BLAME, Blame

CLEAN = [NO_BLAME, Blame(1)]
SUSPECT = [Blame(2), Blame(5), Blame(3, 1)]


def test_a_second_failure_makes_a_suspect_whatever_it_was() -> None:
    assert not NO_BLAME.step_raised(alone=True).is_suspect
    assert NO_BLAME.step_raised(alone=True).step_raised(alone=False).is_suspect
    assert NO_BLAME.engine_died(on_trial=False).step_raised(alone=False).is_suspect
    assert NO_BLAME.engine_died(on_trial=False).engine_died(on_trial=False).is_suspect


@pytest.mark.parametrize("blame", [*CLEAN, *SUSPECT])
def test_a_failure_in_company_convicts_nobody(blame: Blame) -> None:
    assert not blame.step_raised(alone=False).is_convicted
    assert not blame.engine_died(on_trial=False).is_convicted


@pytest.mark.parametrize("blame", CLEAN)
def test_a_step_that_raises_convicts_nobody_who_is_clean_though_alone(blame: Blame) -> None:
    assert not blame.step_raised(alone=True).is_convicted


@pytest.mark.parametrize("blame", SUSPECT)
def test_a_step_that_raises_convicts_the_one_on_trial(blame: Blame) -> None:
    assert blame.step_raised(alone=True).is_convicted


def test_the_second_death_of_an_engine_convicts_the_one_on_trial() -> None:
    once = Blame(2).engine_died(on_trial=True)
    assert not once.is_convicted
    assert once.is_suspect
    assert once.engine_died(on_trial=True).is_convicted
    assert once.engine_died_elsewhere().engine_died(on_trial=True).is_convicted


@pytest.mark.parametrize("blame", [*CLEAN, *SUSPECT])
def test_steps_with_a_token_clear_a_request(blame: Blame) -> None:
    before = blame
    for _ in range(CLEARING_STEPS - 1):
        blame = blame.step_gave_token()
        assert blame.is_suspect == before.is_suspect
    assert blame.step_gave_token() == NO_BLAME


@pytest.mark.parametrize("blame", SUSPECT)
def test_only_steps_of_one_engine_without_a_failure_clear(blame: Blame) -> None:
    begun = blame.step_gave_token()
    for failed in (begun.engine_died(on_trial=False), begun.engine_died_elsewhere(), begun.step_raised(alone=False)):
        assert failed.step_gave_token().is_suspect
