"""The environments of the clients in clients.toml, and how a test runs something in one.

    python -m tests.clients.environments [NAME ...]    # makes those that are missing or have other versions

A test's function runs in the Python of a client, an exported function of a .mjs file in its Node; arguments and result
are JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "clients"
LIMIT_S = 500  # within that of a test
MARK = "the result is on the next line"
OTHERS = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "GPTSERVE_")
"""The beginnings of variables that would change what a client does."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}


@dataclass(frozen=True)
class Environment:
    """What is installed for one client."""

    name: str
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    borrows: bool = False

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def is_made(self) -> bool:
        """Whether it exists and has these versions."""
        made = self.folder / "made"
        return made.exists() and made.read_text() == repr(self)

    def make(self) -> None:
        """Install it anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.npm:
            install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", self.folder]
            subprocess.run([*install, *self.npm], check=True)
        if self.pip:
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            if self.borrows:
                [packages] = self.folder.glob("lib/python*/site-packages")
                (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
            install = [self.folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
            subprocess.run([*install, *self.pip], check=True)
        (self.folder / "made").write_text(repr(self))

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function that uses nothing outside itself in this Python, and return its result."""
        source = textwrap.dedent(inspect.getsource(function))
        call = f"{function.__name__}(*json.loads({json.dumps(arguments)!r}))"
        program = "from __future__ import annotations\nimport json\n" + source
        program += f"\nprint({MARK!r}, json.dumps({call}), sep='\\n')"
        return result_of(self.run("python", "-", given=program))

    def call_js(self, file: str, function: str, *arguments: object) -> Any:
        """Run an exported function of a file beside this one in Node, and return its result."""
        call = f"await {function}(...{json.dumps(arguments)})"
        program = f"{(HERE / file).read_text()}\nconsole.log({MARK!r} + '\\n' + JSON.stringify({call}));\n"
        return result_of(self.run("node", "--input-type=module", "-", given=program))

    def run(self, command: str, *arguments: str, given: str = "", **variables: str) -> str:
        """Run a command of this environment to its end, in its folder, and return what it said on stdout."""
        program = command if self.npm else str(self.folder / "bin" / command)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        process = subprocess.Popen(
            [program, *arguments],
            cwd=self.folder,
            env=clean | OFFLINE | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, complained = process.communicate(given, timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        assert process.returncode == 0, f"{command} ended with {process.returncode}\n{said}\n{complained}"
        return said


def result_of(said: str) -> Any:
    return json.loads(said.rpartition(f"{MARK}\n")[2])


def environments() -> dict[str, Environment]:
    """Return the environments of clients.toml by name."""
    clients = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    return {
        name: Environment(
            name, **{key: tuple(value) if isinstance(value, list) else value for key, value in of.items()}
        )
        for name, of in clients.items()
    }


if __name__ == "__main__":
    for environment in environments().values():
        if not environment.is_made and environment.name in (sys.argv[1:] or environments()):
            environment.make()
