"""Write docs/configuration.md from the declarations of the settings: `make docs`.

`tests/server/core/test_settings.py` checks that the page in the tree is this one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gptserve.server.cli.flags import add_flags
from gptserve.server.core.settings import Option, as_text, server_options

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

These are all settings of `gptserve serve`, written by `make docs`.

Set each by its flag, its variable, or the flag without its first dashes in the TOML file of `--config`; the first of
these wins. Unknown names are errors.

```toml
# gptserve.toml
model = "openai-community/gpt2"
port = 9000
api-key-file = "/run/secrets/keys"
```

```sh
gptserve serve --config gptserve.toml    # the settings of the file
gptserve config --config gptserve.toml   # check them and print each with its source; loads nothing
gptserve doctor --config gptserve.toml   # also serve the model for a moment and report
gptserve health --config gptserve.toml   # ask the server with these settings for its health; status 0 or 1
```

A switch is `--playground` or `--no-playground`, and `true` or `false` in variables and files. Sizes are bytes: `4096`,
`512MiB`, `2GiB`. Settings that end in `timeout`, `interval`, `ttl` or `time` are seconds. A setting that can be given
several times is a list in the file; a variable gives one value.

The log shows what was set and where; with `--log-level debug` all values. Neither the log nor
`gptserve config` shows keys. A wrong setting ends the start with status 2, any other failure with status 1.
"""
HEAD = """
## {title}

| Flag, variable | Default | Meaning |
|---|---|---|
"""
OTHERS = """
## Other variables

| Variable | Read by | Meaning |
|---|---|---|
| `GPTSERVE_CLUSTER_KEY` | `gptserve serve` with `--nnodes` | a secret, 16 characters or more |
| `GPTSERVE_URL` | `gptserve chat`, `complete` | URLs to ask, with commas (default: this machine at `GPTSERVE_PORT`) |
| `HF_HUB_OFFLINE` | the hub's library | 1: use only models that are in the cache |
| `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME` and others | OpenTelemetry | keys, names and sampling of traces |
| `SSL_CERT_FILE` | `gptserve chat`, `complete` | certificates to trust |
| `TRITON_CACHE_DIR` | Triton, on a GPU | folder for compiled kernels (default: `~/.triton`) |

Variables that Kubernetes makes for a Service called `gptserve` or `gptserve-…` are passed over.
"""


def page() -> str:
    """Return the page: a table for each group of `gptserve serve --help`."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    options = {option.name: option for option in server_options()}
    lines = [INTRODUCTION]
    for group in parser._action_groups:
        names = [action.dest for action in group._group_actions]
        if names:
            title = str(group.title)
            lines.append(
                f"\n## {title[0].upper()}{title[1:]}\n\n| Flag, variable | Default | Meaning |\n|---|---|---|\n"
            )
            lines += [row(options[name]) for name in names]
    return "".join([*lines, OTHERS])


def row(option: Option) -> str:
    """Return the row of one setting."""
    meaning = option.help[0].upper() + option.help[1:].replace("*", "\\*")
    if option.choices:
        meaning += "; one of " + ", ".join(f"`{choice}`" for choice in option.choices)
    return f"| `--{option.name}`<br>`{option.variable}` | {default_of(option)} | {meaning} |\n"


def default_of(option: Option) -> str:
    """Return the default as a user writes it."""
    if option.default is None or option.default == ():
        return ""
    if option.name.endswith("-bytes") and isinstance(option.default, int):
        return f"`{option.default / 2**20:g}MiB`"
    is_number = isinstance(option.default, float)
    return f"`{option.default:g}`" if is_number else f"`{as_text(option.default)}`"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
