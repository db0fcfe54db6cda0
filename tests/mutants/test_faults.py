"""The seeded faults still apply to the code, without seeding any."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_old_text_occurs_once_and_the_targets_exist(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    assert [target for target in fault.targets if not (ROOT / target).exists()] == []


def test_there_are_forty_of_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
