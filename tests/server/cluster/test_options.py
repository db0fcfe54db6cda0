"""What a Serve configuration may say of gptserve's options."""

from __future__ import annotations

import pytest

from gptserve.server.cluster.options import cluster_settings
from gptserve.server.core.settings_checks import SettingsError


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("port", "9000", "--port: on Ray Serve its own configuration says this"),
        ("state-dir", "/state", "--state-dir: servers on Ray share no folder; use state-url"),
    ],
)
def test_what_ray_decides_is_refused(option: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        cluster_settings({option: value}, {})
    assert str(refused.value) == message


def test_variables_of_a_node_count_and_all_hosts_are_answered_to() -> None:
    settings = cluster_settings({"block-size": "32"}, {"GPTSERVE_MAX_NUM_SEQS": "7"})
    assert (settings.engine.max_num_seqs, settings.engine.block_size, settings.hosts) == (7, 32, ("*",))
