"""The settings of `gptserve serve`: what they are, and their rules.

The fields of ServerSettings and EngineConfig are the one table of options: each is a flag (--max-num-seqs), a variable
(GPTSERVE_MAX_NUM_SEQS) and a key of the --config file (max-num-seqs). `settings_sources.py` reads these. It imports
neither torch nor the web framework.
"""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from gptserve.engine.config import EngineConfig
from gptserve.engine.grammar.grammar import UnnamedProperties
from gptserve.server.core.keys import KEY_RULE, is_key, read_key_file
from gptserve.server.core.settings_checks import REDACTED, SettingsError, check_state_url, check_traces
from gptserve.server.core.settings_help import ENGINE_HELP
from gptserve.server.core.sizes import parse_size
from gptserve.weights.chat.template import PLAIN_NAME

GenerationConfig = Literal["auto", "none"]
LogFormat = Literal["text", "json"]
StateSync = Literal["normal", "full"]
LogLevel = Literal["debug", "info", "warning", "error"]

VARIABLE_PREFIX = "GPTSERVE_"
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+")  # as a browser sends it: no path, and no slash at its end
_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*|\[[0-9a-fA-F:.]+\]", re.ASCII)
_ROOT_PATH = re.compile(r"(/[^/\s?#]+)+")
# Field, check, and rule in words. NaN fails every check.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("port", lambda port: 0 <= port <= 65535, "in [0, 65535]"),
    ("max_body_bytes", lambda number: number >= 1, "at least 1"),
    ("max_file_bytes", lambda number: number >= 1, "at least 1"),
    ("max_files_bytes", lambda number: number >= 1, "at least 1"),
    ("max_connections", lambda number: number >= 1, "at least 1"),
    ("max_engine_restarts", lambda number: number >= 0, "at least 0"),
    ("max_results", lambda number: number >= 1, "at least 1"),
    ("max_results_bytes", lambda number: number >= 1, "at least 1"),
    ("max_requests_per_key", lambda number: number >= 1, "at least 1"),
    ("max_tokens_per_minute_per_key", lambda number: number >= 1, "at least 1"),
    ("write_timeout_s", lambda seconds: 0 < seconds < math.inf, "over 0 seconds"),
    ("engine_stall_timeout_s", lambda seconds: 0 < seconds < math.inf, "over 0 seconds"),
    ("engine_load_timeout_s", lambda seconds: 0 < seconds < math.inf, "over 0 seconds"),
    ("state_lease_ttl_s", lambda seconds: 1 <= seconds < math.inf, "at least 1 second"),
    ("sse_keep_alive_interval_s", lambda seconds: 0 < seconds < math.inf, "over 0 seconds"),
    ("shutdown_timeout_s", lambda seconds: 0 <= seconds < math.inf, "at least 0 seconds"),
    ("result_ttl_s", lambda seconds: 0 <= seconds < math.inf, "at least 0 seconds"),
)
_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# The rule in words and the converter of a text, by the type of a field.
_FORMATS: dict[type, tuple[str, Callable[[Any], object]]] = {
    str: ("text", str),
    int: ("a whole number", int),
    float: ("a number", float),
    bool: ("true or false", lambda text: _SWITCH[text.lower()]),
    Path: ("a path", Path),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The effective configuration. engine.model_dir is the model's name; `serve.py` replaces it by the folder.

    Every field with a default is an option, and its annotation is the help text. repr=False marks a secret. A tuple is
    a repeatable flag, named in the singular. `sources` gives the source of each value that is not the default, by
    option name. Raises SettingsError or KeyFileError.
    """

    engine: EngineConfig
    sources: Mapping[str, str] = field(default_factory=dict)

    model: Annotated[str | None, "folder, GGUF file or hub id of the model (default: the embedded storyteller)"] = None
    revision: Annotated[str | None, "branch, tag or commit of a hub model"] = None
    chat_template: Annotated[
        str | None,
        "Jinja file to use instead of the model's own chat template, or 'plain' for lines of \"User: ...\" and "
        '"Assistant: ..."',
    ] = None
    tool_call_format: Annotated[str | None, "name of the format of tool calls (default: by the chat template)"] = None
    unnamed_properties: Annotated[
        UnnamedProperties, "whether a JSON Schema that names properties and says nothing of others allows others"
    ] = "refuse"
    served_model_names: Annotated[
        tuple[str, ...],
        "names of the model, or patterns such as claude-*; answers give the first name (default: its own)",
    ] = ()
    generation_config: Annotated[
        GenerationConfig, "whether requests take sampling defaults from the model's generation_config.json"
    ] = "auto"
    overlong_max_tokens: Annotated[Literal["refuse", "cap"], "what to do with max_tokens beyond the context"] = "refuse"
    host: Annotated[str, "address to listen on; 0.0.0.0 is all addresses"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 8000
    root_path: Annotated[
        str | None, "path under which a proxy serves this server, such as /llm; requests may have it or not"
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        "API key to require; repeatable. Other users of this machine can read the command line: prefer the variable "
        "or api-key-file",
    ] = field(default=(), repr=False)
    api_key_file: Annotated[
        Path | None,
        "file of API keys to require, one 'NAME: KEY' a line, # for comments; read again when it changes",
    ] = None
    operators: Annotated[
        tuple[str, ...], "name of an API key that may list the background completions of all; repeatable"
    ] = ()
    max_requests_per_key: Annotated[
        int | None,
        "maximum requests of a key to run or queue; more get status 429 (default: half of all, if there are several "
        "keys)",
    ] = None
    max_tokens_per_minute_per_key: Annotated[
        int | None, "maximum tokens of a key in a minute, prompts and answers; then it gets status 429"
    ] = None
    metrics_prefix: Annotated[Literal["gptserve", "vllm"], "vllm adds vLLM's names to /metrics, for gateways"] = (
        "gptserve"
    )
    protect_operations: Annotated[bool, "also require an API key for /metrics, /version and /openapi.json"] = False
    priority_scheduling: Annotated[bool, "let requests set a priority other than 0"] = False
    allowed_origins: Annotated[
        str | None,
        "CORS: comma-separated origins allowed to call the API, such as https://a.example.com, or *",
    ] = None
    allowed_hosts: Annotated[
        str | None,
        "comma-separated hosts to answer to, such as llm.example.com,*.example.org, or * (default: localhost, "
        "127.0.0.1 and [::1] if only this machine can connect and no key is needed, else *)",
    ] = None
    playground: Annotated[bool, "serve a page to try the model on at /"] = True
    strict_fields: Annotated[bool, "reject requests with unknown fields"] = False
    ssl_keyfile: Annotated[Path | None, "private key for TLS, in PEM"] = None
    ssl_certfile: Annotated[Path | None, "certificate chain for TLS, in PEM"] = None
    max_body_bytes: Annotated[int, "maximum size of a request body; a larger one gets status 413"] = 2 * 2**20
    max_file_bytes: Annotated[int, "maximum size of a file; a larger one gets status 413"] = 512 * 2**20
    max_files_bytes: Annotated[int, "maximum size of all files to keep; more get status 429"] = 8 * 2**30
    # Three times the requests that are computed or queued by default.
    max_connections: Annotated[int, "maximum open connections, of which half may be idle; more get status 503"] = 1024
    # A mobile client that changes cells is without a network for less time.
    write_timeout_s: Annotated[float, "seconds after which to disconnect a client that does not read its answer"] = 30.0
    sse_keep_alive_interval_s: Annotated[float, "seconds between comments on a silent stream"] = 15.0
    shutdown_timeout_s: Annotated[float, "seconds to let running requests finish after SIGTERM"] = 30.0
    state_dir: Annotated[
        Path | None, "folder to store background completions, files and batches in, so that they survive a restart"
    ] = None
    state_url: Annotated[
        str | None,
        "PostgreSQL database that several servers share in place of state-dir: postgresql://user@host/database",
    ] = field(default=None, repr=False)
    state_lease_ttl_s: Annotated[
        float, "seconds after which other servers of state-url take over from one that no longer answers"
    ] = 10.0
    state_sync: Annotated[
        StateSync,
        "normal: a power failure may lose the last commits; full: none, with an fsync for each commit",
    ] = "normal"
    result_ttl_s: Annotated[float, "seconds to keep a background completion after its end"] = 3600.0
    max_results: Annotated[int, "maximum background completions to keep; new replace those that ended first"] = 1_000
    # A thousand answers with all 20 alternatives to each of 100 tokens.
    max_results_bytes: Annotated[
        int, "maximum size of the background completions to keep; new ones replace those that ended first"
    ] = 256 * 2**20
    max_engine_restarts: Annotated[int, "maximum engine deaths in a row without a token; then the server ends"] = 5
    # A step of 512 tokens takes a 7B model a minute on two cores.
    engine_stall_timeout_s: Annotated[float, "seconds without a step after which to replace a busy engine"] = 120.0
    # 140 GB, a 70B model in bf16, take 25 minutes at 100 MB/s.
    engine_load_timeout_s: Annotated[float, "maximum seconds for an engine to load, at the start and at restarts"] = (
        1800.0
    )
    log_format: Annotated[LogFormat, "format of log lines"] = "text"
    log_level: Annotated[LogLevel, "minimum severity to log"] = "info"
    log_prompts: Annotated[bool, "log the prompts of requests, which may be anything that people write"] = False
    otlp_traces_endpoint: Annotated[
        str | None, "URL of an OpenTelemetry collector to send traces to, such as http://localhost:4318/v1/traces"
    ] = None
    in_process: Annotated[bool, "run the engine in a thread of the server, for debugging"] = False
    config: Annotated[Path | None, "TOML file to read settings from"] = None

    def __post_init__(self) -> None:
        for name, holds, rule in _RULES:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise SettingsError(f"{_option_name(name)} must be {rule}, got {value}")
        if not all(map(is_key, self.api_keys)):
            raise SettingsError(f"api-key must be {KEY_RULE}, got {REDACTED}")
        if self.api_key_file is not None:
            read_key_file(self.api_key_file)
        for name, needs_key in (
            ("protect-operations", self.protect_operations),
            ("operator", self.operators),
            ("max-requests-per-key", self.max_requests_per_key),
            ("max-tokens-per-minute-per-key", self.max_tokens_per_minute_per_key),
        ):
            if needs_key and not self.needs_key:
                raise SettingsError(f"{name} needs api-key or api-key-file, got neither")
        for name in ("max-engine-restarts", "engine-stall-timeout", "engine-load-timeout", "nnodes"):
            if self.in_process and name in self.sources:
                raise SettingsError(f"{name} needs an engine in a process of its own, got in-process")
        if not all(self.served_model_names):
            raise SettingsError("served-model-name must not be empty, got ''")
        crowded = next((name for name in self.served_model_names if name.count("*") > 1), None)
        if crowded is not None:
            raise SettingsError(f"served-model-name may have one * at most, got {crowded!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise SettingsError("ssl-keyfile and ssl-certfile go together, got one without the other")
        if self.chat_template not in (None, PLAIN_NAME) and not Path(str(self.chat_template)).is_file():
            raise SettingsError(f"chat-template must be a file or {PLAIN_NAME!r}, got {self.chat_template!r}")
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise SettingsError(f"root-path must begin with a slash and not end with one, got {self.root_path!r}")
        if not all(map(_ORIGIN.fullmatch, self.origins)):
            raise SettingsError(
                f"allowed-origins must be * or such as https://a.example,http://b.example:3000, got "
                f"{self.allowed_origins!r}"
            )
        if not all(map(_HOST.fullmatch, self.hosts)):
            raise SettingsError(
                f"allowed-hosts must be * or names and addresses without a port, such as "
                f"llm.example.com,*.example.org,[::1], got {self.allowed_hosts!r}"
            )
        if self.state_url is not None:
            check_state_url(self.state_url, self.state_dir)
        elif "state-lease-ttl" in self.sources:
            raise SettingsError("state-lease-ttl needs state-url")
        if self.otlp_traces_endpoint is not None:
            check_traces(self.otlp_traces_endpoint)
        for name, path in (("ssl-keyfile", self.ssl_keyfile), ("ssl-certfile", self.ssl_certfile)):
            if path is not None and not path.is_file():
                raise SettingsError(f"{name} must be a file, got {path}")

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def own_names(self) -> tuple[str, ...]:
        """The served names that are no patterns."""
        return tuple(name for name in self.served_model_names if "*" not in name)

    @property
    def name_patterns(self) -> tuple[str, ...]:
        """The served names that are patterns."""
        return tuple(name for name in self.served_model_names if "*" in name)

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins, each apart."""
        return () if self.allowed_origins is None else tuple(map(str.strip, self.allowed_origins.split(",")))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts to answer to, each apart; * is all."""
        if self.allowed_hosts is not None:
            return tuple(map(str.strip, self.allowed_hosts.split(",")))
        if self.needs_key or not self.is_local:
            return ("*",)
        own = f"[{self.host}]" if ":" in self.host else self.host
        return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", own)))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect. Names other than localhost are not resolved, and count as remote."""
        if self.host.lower() == "localhost":
            return True
        try:  # short forms, too, such as 127.1
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return False
        address = ipaddress.ip_address(found[0][4][0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def describe(self) -> tuple[str, str]:
        """Return the options that were set, with their sources, and the others; secrets are redacted."""
        shown = {option.name: option.show(self) for option in server_options()}
        chosen = ", ".join(f"{shown.pop(name)} ({source})" for name, source in self.sources.items())
        return chosen, " ".join(shown.values())


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `name` is its key in a file and, after two dashes, its flag; `field` is the dataclass field.

    `convert` parses a text or raises ValueError or KeyError; for a tuple it also takes a list of texts. `rule`
    describes the texts that it accepts.
    """

    name: str
    field: str
    of_engine: bool
    default: object
    help: str
    secret: bool
    rule: str
    convert: Callable[[Any], object]
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The name of its variable."""
        return VARIABLE_PREFIX + self.name.upper().replace("-", "_")

    def parse(self, value: object, source: str) -> object:
        """Convert a text, or a value of argparse or TOML, to the field's type. Raises SettingsError."""
        try:
            return self.convert(value if isinstance(self.default, tuple) else as_text(value))
        except (ValueError, KeyError):
            given = REDACTED if self.secret else repr(value)
            raise SettingsError(f"{source} must be {self.rule}, got {given}") from None

    def show(self, settings: ServerSettings) -> str:
        """Return name=value from `settings`, with a dash for no value."""
        value = getattr(settings.engine if self.of_engine else settings, self.field)
        if value is None or value == ():
            return f"{self.name}=-"
        return f"{self.name}={REDACTED if self.secret else as_text(value)}"


def server_options() -> tuple[Option, ...]:
    """Return all options, the server's before the engine's."""
    options: list[Option] = []
    for owner in (ServerSettings, EngineConfig):
        hints = get_type_hints(owner, include_extras=True)
        options += [_option_of(f, hints[f.name]) for f in fields(owner) if f.default is not MISSING]
    return tuple(options)


def _option_of(f: Field[Any], hint: Any) -> Option:
    """Return the option of a field with this type hint; only those of ServerSettings are Annotated with their help."""
    of_engine = get_origin(hint) is not Annotated
    hint, text = (hint, ENGINE_HELP[f.name]) if of_engine else get_args(hint)
    kind = hint if get_origin(hint) is Literal else (*get_args(hint), hint)[0]  # of a union the one beside None
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    name = _option_name(f.name)
    convert: Callable[[Any], object]
    if choices:
        rule, convert = f"one of {', '.join(choices)}", dict(zip(choices, choices, strict=True)).__getitem__
    elif isinstance(f.default, tuple):
        name, rule, convert = name.removesuffix("s"), "text or a list of texts", _parse_texts
    elif name.endswith("-bytes"):
        rule, convert = "a number of bytes such as 4096, 512MiB or 2GiB", parse_size
    else:
        rule, convert = _FORMATS[kind]
    return Option(name, f.name, of_engine, f.default, text, not f.repr, rule, convert, choices)


def _option_name(field_name: str) -> str:
    """Return the option's name: the field's without the unit of seconds, with dashes."""
    return field_name.removesuffix("_s").replace("_", "-")


def _parse_texts(value: object) -> tuple[str, ...]:
    """Return a text or the texts of a list as a tuple; a comma has no meaning."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("not all are texts")
    return tuple(texts)


def as_text(value: object) -> str:
    """Return a value of an option in the form of a variable."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
