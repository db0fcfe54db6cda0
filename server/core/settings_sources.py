"""Where the settings of `gptserve serve` come from: the command line, the environment and a file, in this order.

Unknown names are errors, except the variables that Kubernetes makes for a Service. `cli` calls it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.parallel.links import CLUSTER_KEY, cluster_key
from gptserve.server.core.keys import KeyFileError
from gptserve.server.core.settings import VARIABLE_PREFIX, Option, ServerSettings, server_options
from gptserve.server.core.settings_checks import SettingsError

CLIENT_VARIABLE = "GPTSERVE_URL"
"""No option of `serve`: the commands that ask a server read it."""
_NO_OPTIONS = (CLIENT_VARIABLE, CLUSTER_KEY)
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables, as NAME=VALUE. GPTSERVE_PORT
# is also a setting: only its value tells whether it is the address of a Service.
_INJECTED = re.compile(
    r"GPTSERVE_([A-Z0-9_]+_)?"
    r"((SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=|PORT=(tcp|udp|sctp)://)"
)


def client_urls(environment: Mapping[str, str]) -> list[str]:
    """Return where commands look for servers: GPTSERVE_URL, with commas between several, or this machine at
    GPTSERVE_PORT.

    Raises SettingsError.
    """
    if urls := [url for url in map(str.strip, environment.get(CLIENT_VARIABLE, "").split(",")) if url]:
        return urls
    [option] = [option for option in server_options() if option.name == "port"]
    port: object = option.default
    if option.variable in environment and option.variable not in injected_variables(environment):
        port = option.parse(environment[option.variable], option.variable)
    return [f"http://127.0.0.1:{port}"]


def load_settings(flags: Mapping[str, object], environment: Mapping[str, str]) -> ServerSettings:
    """Return the settings: from flags (text by option name), else variables, file, defaults.

    Raises SettingsError.
    """
    options = {option.name: option for option in server_options()}
    given = _from_environment(options, environment) | {name: (value, f"--{name}") for name, value in flags.items()}
    if "config" in given:
        given = _from_file(options, Path(str(given["config"][0]))) | given
    values = {name: options[name].parse(value, source) for name, (value, source) in given.items()}
    sources = {name: given[name][1] for name, value in values.items() if value != options[name].default}
    of_server = {options[name].field: value for name, value in values.items() if not options[name].of_engine}
    of_engine = {options[name].field: value for name, value in values.items() if options[name].of_engine}
    try:
        engine = EngineConfig(model_dir=Path(str(values.get("model", ""))), **of_engine)  # type: ignore[arg-type]
        if engine.nnodes > 1:
            cluster_key(environment)
        return ServerSettings(engine=engine, sources=sources, **of_server)  # type: ignore[arg-type]
    except (InvalidConfigurationError, KeyFileError) as error:
        raise SettingsError(str(error)) from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the nearest known name, or an empty string if none is near."""
    bare = {other.removeprefix(VARIABLE_PREFIX): other for other in known}
    nearest = difflib.get_close_matches(name.removeprefix(VARIABLE_PREFIX), bare, n=1)
    return f"; did you mean {bare[nearest[0]]}?" if nearest else ""


def injected_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that Kubernetes or a container link made for a Service called gptserve or gptserve-…."""
    return [variable for variable, value in environment.items() if _INJECTED.match(f"{variable}={value}")]


def _from_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Return value and source by option name."""
    names = {option.variable: option.name for option in options.values()}
    injected = injected_variables(environment)
    given: dict[str, tuple[object, str]] = {}
    for variable, value in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in injected or variable in _NO_OPTIONS:
            continue
        if variable not in names:
            raise SettingsError(f"unknown variable {variable}{suggestion(variable, names)}")
        given[names[variable]] = (value, variable)
    return given


def _from_file(options: Mapping[str, Option], path: Path) -> dict[str, tuple[object, str]]:
    """Return value and source by option name; a key may be written with dashes or underscores."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config must be a file that can be read, got {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config must be a TOML file, got {path}: {error}") from None
    known = [name for name in options if name != "config"]
    given: dict[str, tuple[object, str]] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            raise SettingsError(f"unknown key {key} in {path}{suggestion(name, known)}")
        is_list = isinstance(value, list) and not isinstance(options[name].default, tuple)
        if name in given or is_list or isinstance(value, dict):
            got = "two" if name in given else "a list" if is_list else "a table"
            raise SettingsError(f"{key} in {path} must be one plain value, got {got}")
        given[name] = (value, f"{key} in {path}")
    return given
