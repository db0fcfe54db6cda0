"""The flags of `gptserve serve`, in groups, from the options that core/settings.py reads, and those of its clients.

`main.py` calls it.
"""

from __future__ import annotations

import argparse
from typing import Any

from gptserve.server.cli.arguments import TEXT
from gptserve.server.core.settings import as_text, server_options

GROUPS = {
    "model": "model",
    "host": "address",
    "api-key": "authentication and limits",
    "ssl-keyfile": "TLS",
    "max-body-bytes": "connections and shutdown",
    "state-dir": "background completions",
    "max-engine-restarts": "engine restarts",
    "log-format": "logging, debugging and configuration",
    "device": "computing",
    "block-size": "KV cache",
    "max-num-seqs": "batches and the queue",
}
"""The title of each group, by its first option."""

EPILOG = """\
Every option is also a variable (GPTSERVE_PORT for --port) and a key of the
--config file (port). The command line wins over the environment, the
environment over the file.

examples:
  gptserve serve                                      the embedded model
  gptserve serve openai-community/gpt2 --port 9000    a model from the hub
  gptserve serve ./my-model --served-model-name mine  a folder
  GPTSERVE_API_KEY=... gptserve serve --host 0.0.0.0  for other machines
  gptserve serve --state-dir ./state                  background completions
                                                      survive a restart
"""


NAMES_FLAG = "served-model-name"
SEVERAL_NAMES = "several names"
"""In a namespace: the names after one NAMES_FLAG, if there are several; the last may have been meant as the MODEL."""


class _Names(argparse.Action):
    """Several names after one flag, as in vLLM, and the flag more than once."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])
        if len(values) > 1:
            setattr(namespace, SEVERAL_NAMES, values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag of every option. A flag that is not given is not in the namespace."""
    for option in server_options():
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        no_default = option.default is None or option.default == ()
        default = as_text(option.default)
        if option.name.endswith("-bytes") and isinstance(option.default, int):
            default = f"{option.default / 2**20:g}MiB"
        text = option.help if no_default else f"{option.help} (default: {default})"
        keywords: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if isinstance(option.default, bool):
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords["action"] = "append" if isinstance(option.default, tuple) else "store"
            if option.name == NAMES_FLAG:
                keywords |= {"action": _Names, "nargs": "+"}
            keywords["metavar"] = "|".join(option.choices) or option.name.split("-")[-1].upper()
        group.add_argument(f"--{option.name}", **keywords)


def add_server_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of all commands that ask a server."""
    parser.add_argument(
        "--url",
        type=TEXT,
        action="append",
        help="URL of the server (default: the variable GPTSERVE_URL, else this machine at port GPTSERVE_PORT or 8000); "
        "repeat it for servers with the same model, and an answer goes on at the next one when its server is lost",
    )
    parser.add_argument("--api-key", help="API key to send (default: the variable GPTSERVE_API_KEY)")
