"""A plugin of pytest for tests on a GPU: a test that breaks the context of its process fails, and ends that process.

CUDA tells of a wrong address at some later call, and from then on every call of the process fails: the tests that
follow in it would fail, too. bench/gpu_tests.py has each of its processes load this plugin.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Context())


class _Context:
    is_lost = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Wait for all that the test has started on the device; raise what it raises."""
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except torch.AcceleratorError:
                self.is_lost = True
                raise

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """End the process after the test's reports; pytest-xdist starts another one."""
        if self.is_lost:
            os._exit(1)
