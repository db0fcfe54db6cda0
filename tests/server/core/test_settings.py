"""Settings: where each value comes from, and what is refused with which words."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.server.cli.flags import add_flags
from gptserve.server.core.settings import (
    ServerSettings,
    server_options,
)
from gptserve.server.core.settings_checks import DATABASE_RULE, SettingsError
from gptserve.server.core.settings_sources import client_urls, injected_variables, load_settings
from gptserve.server.core.sizes import parse_size
from tests import configuration_page

KEY_FILE = str(Path(__file__).parent / "api_keys.txt")
WRITTEN = {
    "model": "somewhere/else",
    "revision": "main",
    "chat-template": "plain",
    "served-model-name": "teller",
    "tool-call-format": "hermes",
    "unnamed-properties": "allow",
    "generation-config": "none",
    "overlong-max-tokens": "cap",
    "host": "0.0.0.0",
    "port": "9000",
    "api-key": "secret-1,secret-2",
    "api-key-file": KEY_FILE,
    "operator": "ops,on-call",
    "root-path": "/llm",
    "max-requests-per-key": "3",
    "metrics-prefix": "vllm",
    "max-tokens-per-minute-per-key": "1000",
    "log-prompts": "true",
    "protect-operations": "true",
    "priority-scheduling": "true",
    "playground": "false",
    "strict-fields": "true",
    "allowed-origins": "https://a.example,http://b.example:3000",
    "allowed-hosts": "llm.example.com,*.example.org,[::1]",
    "ssl-keyfile": __file__,
    "ssl-certfile": __file__,
    "max-body-bytes": "1MiB",
    "max-file-bytes": "1GiB",
    "max-files-bytes": "2GiB",
    "sse-keep-alive-interval": "0.5",
    "shutdown-timeout": "0",
    "max-connections": "7",
    "write-timeout": "9",
    "state-dir": "somewhere",
    "state-url": "postgresql://me:secret@db/x",
    "state-lease-ttl": "2.5",
    "state-sync": "full",
    "result-ttl": "1.5",
    "max-results": "5",
    "max-results-bytes": "1GiB",
    "max-engine-restarts": "0",
    "engine-stall-timeout": "0.5",
    "engine-load-timeout": "2.5",
    "log-format": "json",
    "log-level": "debug",
    "otlp-traces-endpoint": "https://collector.example/v1/traces",
    "in-process": "true",
    "device": "cpu",
    "dtype": "float32",
    "quantization": "int8",
    "attention-backend": "reference",
    "block-size": "32",
    "num-blocks": "100",
    "kv-cache-bytes": "2GiB",
    "kv-cache-dtype": "int8",
    "gpu-memory-utilization": "0.5",
    "max-model-len": "64",
    "max-num-seqs": "8",
    "max-num-batched-tokens": "128",
    "max-num-queued-reqs": "0",
    "max-queue-time": "2.5",
    "enable-prefix-caching": "false",
    "speculative-ngram": "3",
    "nnodes": "2",
    "node-rank": "1",
    "master-addr": "node-0",
    "master-port": "9999",
    "tensor-parallel-size": "2",
    "enforce-eager": "true",
    "overlap": "false",
    "batch-invariant": "true",
    "num-threads": "1",
    "strict-config": "true",
    "task": "embed",
}
"""Every option but --config with a value that is not its default."""

SWITCHES = {
    "in-process": "--in-process",
    "enable-prefix-caching": "--no-enable-prefix-caching",
    "protect-operations": "--protect-operations",
    "priority-scheduling": "--priority-scheduling",
    "playground": "--no-playground",
    "strict-fields": "--strict-fields",
    "log-prompts": "--log-prompts",
    "enforce-eager": "--enforce-eager",
    "overlap": "--no-overlap",
    "batch-invariant": "--batch-invariant",
    "strict-config": "--strict-config",
}
NODES = {
    "GPTSERVE_TENSOR_PARALLEL_SIZE": "4",
    "GPTSERVE_NNODES": "2",
    "GPTSERVE_MASTER_ADDR": "10.0.0.1",
    "GPTSERVE_CLUSTER_KEY": "0123456789abcdef",
}
COMPANIONS = {
    "ssl-keyfile": {"GPTSERVE_SSL_CERTFILE": __file__},
    "ssl-certfile": {"GPTSERVE_SSL_KEYFILE": __file__},
    "protect-operations": {"GPTSERVE_API_KEY": "secret"},
    "operator": {"GPTSERVE_API_KEY": "secret"},
    "max-requests-per-key": {"GPTSERVE_API_KEY": "secret"},
    "max-tokens-per-minute-per-key": {"GPTSERVE_API_KEY": "secret"},
    "state-lease-ttl": {"GPTSERVE_STATE_URL": "postgres://db"},
    **{
        name: {v: text for v, text in NODES.items() if v != f"GPTSERVE_{name.upper().replace('-', '_')}"}
        for name in ("nnodes", "node-rank", "master-addr", "master-port")
    },
}
"""What an option may be given with only."""


def flags(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return vars(parser.parse_args(words))


def settings_file(folder: Path, text: str) -> dict[str, object]:
    (folder / "gptserve.toml").write_text(text, encoding="utf-8")
    return flags("--config", str(folder / "gptserve.toml"))


def message(given: dict[str, object], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as raised:
        load_settings(given, environment or {})
    return str(raised.value)


def test_nothing_given_is_the_default_of_every_field() -> None:
    settings = load_settings({}, {"PATH": "/bin"})

    assert settings == ServerSettings(engine=EngineConfig(model_dir=Path("")))
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.sources == {}


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "port = 1\nmax-num-seqs = 1\nblock_size = 1")

    settings = load_settings(
        file | flags("--port", "3"), {"GPTSERVE_PORT": "2", "GPTSERVE_MAX_NUM_SEQS": "2", "GPTSERVE_NUM_THREADS": "2"}
    )

    assert (settings.port, settings.engine.max_num_seqs, settings.engine.block_size) == (3, 2, 1)
    assert settings.engine.num_threads == 2
    assert settings.engine.max_num_batched_tokens == EngineConfig(Path("")).max_num_batched_tokens
    assert settings.sources["port"] == "--port"
    assert settings.sources["max-num-seqs"] == "GPTSERVE_MAX_NUM_SEQS"
    assert settings.sources["block-size"] == f"block_size in {tmp_path / 'gptserve.toml'}"


def test_every_engine_setting_but_the_folder_is_an_option() -> None:
    of_engine = {option.field for option in server_options() if option.of_engine}

    assert of_engine == {f.name for f in fields(EngineConfig) if f.default is not MISSING}


def test_the_table_of_this_test_is_complete() -> None:
    assert set(WRITTEN) == {option.name for option in server_options()} - {"config"}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", WRITTEN)
def test_an_option_means_the_same_as_flag_variable_and_key(name: str, tmp_path: Path) -> None:
    option = next(option for option in server_options() if option.name == name)
    text = WRITTEN[name]
    other = COMPANIONS.get(name, {})

    by_flag = load_settings(flags(SWITCHES[name]) if name in SWITCHES else flags(f"--{name}", text), other)
    by_variable = load_settings({}, other | {option.variable: text})
    by_key = load_settings(settings_file(tmp_path, f'{name} = "{text}"'), other)

    values = [
        getattr(settings.engine if option.of_engine else settings, option.field)
        for settings in (by_flag, by_variable, by_key)
    ]
    assert values[0] == values[1] == values[2] != option.default


def _names(*names: str) -> dict[str, object]:
    return flags(*(word for name in names for word in ("--served-model-name", name)))


def test_served_names_are_names_or_patterns_with_one_star() -> None:
    settings = load_settings(_names("teller", "claude-*", "t"), {})
    assert (settings.own_names, settings.name_patterns) == (("teller", "t"), ("claude-*",))
    expected = "served-model-name may have one * at most, got 'a*b*'"
    assert message(_names("teller", "a*b*")) == expected


def test_toml_numbers_switches_and_lists_are_taken_as_they_are(tmp_path: Path) -> None:
    settings = load_settings(
        settings_file(tmp_path, 'port = 9000\nin-process = true\nshutdown-timeout = 2.5\napi-key = ["a", "b"]'), {}
    )

    assert (settings.port, settings.in_process, settings.shutdown_timeout_s) == (9000, True, 2.5)
    assert settings.api_keys == ("a", "b")


def test_an_api_key_is_one_key_commas_and_all(tmp_path: Path) -> None:
    listed = settings_file(tmp_path, 'api-key = ["a,b", "c"]')

    assert load_settings(flags("--api-key", "a,b"), {}).api_keys == ("a,b",)
    assert load_settings({}, {"GPTSERVE_API_KEY": "a,b"}).api_keys == ("a,b",)
    assert load_settings(flags("--api-key", "a,b", "--api-key", "c"), {}).api_keys == ("a,b", "c")
    assert load_settings(listed, {}).api_keys == ("a,b", "c")
    assert load_settings(settings_file(tmp_path, 'api-key = "a,b"'), {}).api_keys == ("a,b",)


@pytest.mark.parametrize("key", ["", "s3 cret", " s3cret", "s3cret\n", "s3crét", "s3cret\x00"])
def test_a_wrong_key_is_refused_and_not_shown(key: str) -> None:
    expected = "api-key must be one or more printable ASCII characters without a space, got ***"

    assert message({"api-key": [key]}) == message({}, {"GPTSERVE_API_KEY": key}) == expected
    assert message(flags("--api-key", "fine", "--api-key", key)) == expected


@pytest.mark.parametrize("value", ["7", "[7]", '["a", ["s3cret"]]', '[{a = "s3cret"}]'])
def test_keys_of_a_settings_file_are_texts(value: str, tmp_path: Path) -> None:
    file = settings_file(tmp_path, f"api-key = {value}")

    assert message(file) == f"api-key in {file['config']} must be text or a list of texts, got ***"


def test_a_broken_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice s3cret")

    text = message(flags("--api-key-file", str(tmp_path / "keys")))

    assert text.startswith(f"api-key-file: line 1 of {tmp_path / 'keys'} must be a # comment or NAME: KEY")
    assert "s3cret" not in text


def test_operations_are_protected_by_a_key_or_not_at_all() -> None:
    assert message(flags("--protect-operations")) == "protect-operations needs api-key or api-key-file, got neither"
    assert load_settings(flags("--protect-operations", "--api-key-file", KEY_FILE), {}).needs_key


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("", False),
        ("some.host", False),
    ],
)
def test_only_a_loopback_address_is_local(host: str, expected: bool) -> None:
    assert load_settings(flags("--host", host), {}).is_local is expected


def test_the_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = str(settings_file(tmp_path, "port = 9000")["config"])

    assert load_settings({}, {"GPTSERVE_CONFIG": path}).port == 9000


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("GPTSERVE_MAX_NUM_SEQ", "unknown variable GPTSERVE_MAX_NUM_SEQ; did you mean GPTSERVE_MAX_NUM_SEQS?"),
        ("GPTSERVE_XYZZY", "unknown variable GPTSERVE_XYZZY"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(variable: str, expected: str) -> None:
    assert message({}, {variable: "1"}) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"GPTSERVE_PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"GPTSERVE_PORT": "tcp://10.0.0.1:8000"}, "http://127.0.0.1:8000"),
        ({"GPTSERVE_PORT": "9000", "GPTSERVE_URL": "https://h/v1"}, "https://h/v1"),
        ({"GPTSERVE_PORT": "9000", "GPTSERVE_URL": ""}, "http://127.0.0.1:9000"),
        ({"GPTSERVE_URL": "https://h/v1, http://i:9,"}, "https://h/v1 http://i:9"),
    ],
)
def test_commands_find_servers_by_their_urls_or_a_port(environment: dict[str, str], expected: str) -> None:
    assert client_urls(environment) == expected.split()


def test_the_variable_of_the_commands_is_none_of_the_server() -> None:
    assert load_settings({}, {"GPTSERVE_URL": "https://h"}) == load_settings({}, {})


@pytest.mark.parametrize(
    ("key", "got"),
    [
        ({}, "none"),
        ({"GPTSERVE_CLUSTER_KEY": ""}, "none"),
        ({"GPTSERVE_CLUSTER_KEY": "15 bytes of text"[1:]}, "a shorter one"),
    ],
)
def test_nodes_need_a_key_in_the_environment(key: dict[str, str], got: str) -> None:
    nodes = {name: value for name, value in NODES.items() if "KEY" not in name}
    expected = f"nnodes above 1 needs the variable GPTSERVE_CLUSTER_KEY with a key of at least 16 characters, got {got}"

    assert message({}, nodes | key) == expected


def test_the_key_of_nodes_is_neither_an_option_nor_shown() -> None:
    settings = load_settings({}, NODES)

    assert NODES["GPTSERVE_CLUSTER_KEY"] not in repr(settings) + "".join(settings.describe())
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        flags("--cluster-key", "0123456789abcdef")


def test_nodes_need_an_engine_in_a_process_of_its_own() -> None:
    expected = "nnodes needs an engine in a process of its own, got in-process"
    assert message(flags("--in-process"), NODES) == expected


def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "max-model-length = 5")

    assert message(file) == f"unknown key max-model-length in {file['config']}; did you mean max-model-len?"


def test_a_file_names_no_further_file(tmp_path: Path) -> None:
    assert message(settings_file(tmp_path, 'config = "other.toml"')).startswith("unknown key config")


def of_service(name: str) -> dict[str, str]:
    """The variables that Kubernetes makes for a Service with a port called http and one for UDP."""
    return {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_SERVICE_PORT_METRICS_2": "8001",
        f"{name}_PORT": "tcp://10.0.0.1:8000",
        f"{name}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_ADDR": "10.0.0.1",
        f"{name}_PORT_53_UDP": "udp://10.0.0.1:53",
        f"{name}_PORT_53_UDP_PROTO": "udp",
        f"{name}_PORT_53_UDP_PORT": "53",
        f"{name}_PORT_53_UDP_ADDR": "10.0.0.1",
        f"{name}_PORT_99_SCTP": "sctp://10.0.0.1:99",
    }


@pytest.mark.parametrize("service", ["GPTSERVE", "GPTSERVE_ANYTHING", "GPTSERVE_CPU_2", "GPTSERVE_MAX_NUM_SEQS"])
def test_what_kubernetes_makes_for_a_service_is_passed_by(service: str) -> None:
    injected = of_service(service)

    settings = load_settings({}, {**injected, "GPTSERVE_MAX_NUM_SEQS": "3"})

    assert (settings.port, settings.engine.max_num_seqs) == (8000, 3)
    assert list(settings.sources) == ["max-num-seqs"]
    assert injected_variables({**injected, "GPTSERVE_MAX_NUM_SEQS": "3", "OTHER_PORT": "tcp://1"}) == list(injected)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPTSERVE_PROT", "tcp://10.0.0.1:8000"),
        ("GPTSERVE_HTTP_PORT", "8000"),
        ("GPTSERVE_SERVICE", "10.0.0.1"),
        ("GPTSERVE_SERVICE_HOSTS", "10.0.0.1"),
        ("GPTSERVE_PORT_HTTP", "8000"),
        ("GPTSERVE_PORT_8000", "8000"),
        ("GPTSERVE_PORT_8000_TCP_HOST", "10.0.0.1"),
        ("GPTSERVE_MAX_NUM_SEQ", "8"),
    ],
)
def test_a_variable_that_kubernetes_never_makes_is_unknown(variable: str, value: str) -> None:
    assert message({}, {**of_service("GPTSERVE"), variable: value}).startswith(f"unknown variable {variable}")


@pytest.mark.some(25)
@pytest.mark.parametrize("variable", [option.variable for option in server_options()])
def test_no_option_is_taken_for_a_variable_of_kubernetes(variable: str) -> None:
    for value in ("", "8000", "10.0.0.1", "tcp", "true"):
        assert injected_variables({variable: value}) == []
    is_taken = injected_variables({variable: "tcp://10.0.0.1:8000"}) == [variable]
    assert is_taken == (variable in ("GPTSERVE_PORT", "GPTSERVE_MASTER_PORT"))


def test_a_port_that_is_none_is_refused_where_it_is_no_address() -> None:
    assert message({}, {"GPTSERVE_PORT": "http://10.0.0.1"}) == (
        "GPTSERVE_PORT must be a whole number, got 'http://10.0.0.1'"
    )


@pytest.mark.some(16)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--port", "http"), "--port must be a whole number, got 'http'"),
        (("--port", "65536"), "port must be in [0, 65535], got 65536"),
        (("--device", "tpu"), "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (("--kv-cache-bytes", "2 gigs"), "--kv-cache-bytes must be a number of bytes such as 4096, 512MiB or 2GiB"),
        (("--shutdown-timeout", "nan"), "shutdown-timeout must be at least 0 seconds, got nan"),
        (("--sse-keep-alive-interval", "0"), "sse-keep-alive-interval must be over 0 seconds, got 0.0"),
        (("--result-ttl", "-1"), "result-ttl must be at least 0 seconds, got -1.0"),
        (("--result-ttl", "inf"), "result-ttl must be at least 0 seconds, got inf"),
        (("--max-connections", "0"), "max-connections must be at least 1, got 0"),
        (("--write-timeout", "0"), "write-timeout must be over 0 seconds, got 0.0"),
        (("--write-timeout", "inf"), "write-timeout must be over 0 seconds, got inf"),
        (("--max-results", "0"), "max-results must be at least 1, got 0"),
        (("--max-results-bytes", "0"), "max-results-bytes must be at least 1, got 0"),
        (("--state-sync", "extra"), "--state-sync must be one of normal, full, got 'extra'"),
        (
            ("--state-url", "postgresql://db/x", "--state-dir", "y"),
            "state-url and state-dir exclude each other, got both",
        ),
        *(
            (("--state-url", url), f"state-url must be {DATABASE_RULE}, got ***")
            for url in (
                "mysql://me:secret@db",
                "postgresql://me:an@secret@db/x",  # libpq takes the rest for the host, and would name it
                "postgresql://me:@secret@db/x",
                "postgresql://me:a/secret@db/x",
                "postgresql://me@db/x?password=a&secret",
                "postgresql://me:a secret@db/x",
            )
        ),
        *(
            (("--state-url", f"postgresql://me:{secret}@db/x"), "state-url must have %25 for a %, and no %00, got ***")
            for secret in ("secret%zz", "secret%0", "secret%00")
        ),
        (("--state-lease-ttl", "3"), "state-lease-ttl needs state-url"),
        (("--state-lease-ttl", "0.5"), "state-lease-ttl must be at least 1 second, got 0.5"),
        (("--operator", "ops"), "operator needs api-key or api-key-file, got neither"),
        *(
            (("--root-path", path), f"root-path must begin with a slash and not end with one, got {path!r}")
            for path in ("llm", "/", "/llm/", "/a//b", "/a?b")
        ),
        (("--max-requests-per-key", "2"), "max-requests-per-key needs api-key or api-key-file, got neither"),
        (("--max-requests-per-key", "0"), "max-requests-per-key must be at least 1, got 0"),
        (
            ("--max-tokens-per-minute-per-key", "9"),
            "max-tokens-per-minute-per-key needs api-key or api-key-file, got neither",
        ),
        (("--max-tokens-per-minute-per-key", "0"), "max-tokens-per-minute-per-key must be at least 1, got 0"),
        (("--max-queue-time", "0"), "max_queue_time_s must be a number of seconds over 0, got 0.0"),
        (("--max-engine-restarts", "-1"), "max-engine-restarts must be at least 0, got -1"),
        (("--engine-stall-timeout", "0"), "engine-stall-timeout must be over 0 seconds, got 0.0"),
        (("--engine-load-timeout", "inf"), "engine-load-timeout must be over 0 seconds, got inf"),
        (("--engine-load-timeout", "0"), "engine-load-timeout must be over 0 seconds, got 0.0"),
        (("--max-body-bytes", "0"), "max-body-bytes must be at least 1, got 0"),
        (("--max-file-bytes", "0"), "max-file-bytes must be at least 1, got 0"),
        (("--max-files-bytes", "0"), "max-files-bytes must be at least 1, got 0"),
        (("--max-num-seqs", "0"), "max_num_seqs must be an integer of at least 1, got 0"),
        *(
            ((f"--{name}", "3", "--in-process"), f"{name} needs an engine in a process of its own, got in-process")
            for name in ("max-engine-restarts", "engine-stall-timeout", "engine-load-timeout")
        ),
        (("--nnodes", "2"), "tensor_parallel_size must be a multiple of nnodes (2), got 1"),
        (("--api-key-file", "no"), "api-key-file must be a file that can be read, got no: No such file or directory"),
        (("--ssl-keyfile", __file__), "ssl-keyfile and ssl-certfile go together"),
        (("--ssl-keyfile", "no", "--ssl-certfile", __file__), "ssl-keyfile must be a file, got no"),
        (
            ("--allowed-origins", "https://a.example/"),
            "allowed-origins must be * or such as https://a.example,http://b.example:3000, got 'https://a.example/'",
        ),
        *(
            (
                ("--allowed-hosts", hosts),
                "allowed-hosts must be * or names and addresses without a port, such as "
                f"llm.example.com,*.example.org,[::1], got {hosts!r}",
            )
            for hosts in ("", "a:80", "a,", "a,,b", "*.*.a", "a.*", "::1", "http://a", "a/b", "[::1]:80", "*a", ".a")
        ),
        *(
            (
                ("--otlp-traces-endpoint", url),
                "otlp-traces-endpoint must be a URL with its path and without a password, such as "
                f"http://localhost:4318/v1/traces, got {shown}",
            )
            for url, shown in (
                ("localhost:4317", "'localhost:4317'"),
                ("http://localhost:4318", "'http://localhost:4318'"),
                ("http://me:secret@localhost/v1/traces", "***"),
            )
        ),
        (("--chat-template", "no"), "chat-template must be a file or 'plain', got 'no'"),
        (("--config", "no.toml"), "config must be a file that can be read, got no.toml: No such file"),
    ],
)
def test_a_wrong_value_is_refused_with_the_option_the_rule_and_the_value(words: tuple[str, ...], expected: str) -> None:
    assert message(flags(*words)).startswith(expected)


def test_traces_without_their_package_are_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.server.core.settings_checks._TRACES_PACKAGE", "no-such-package")
    given = flags("--otlp-traces-endpoint", "http://localhost:4318/v1/traces")
    assert message(given) == "otlp-traces-endpoint needs OpenTelemetry: pip install 'gptserve[otel]'"


def test_a_database_without_its_package_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.server.core.settings_checks._DATABASE_PACKAGE", "no-such-package")
    assert (
        message(flags("--state-url", "postgresql://x")) == "state-url needs psycopg: pip install 'gptserve[postgres]'"
    )


def test_a_wrong_variable_and_a_wrong_key_say_where_they_stand(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "in-process = 2")

    assert message({}, {"GPTSERVE_IN_PROCESS": "maybe"}) == "GPTSERVE_IN_PROCESS must be true or false, got 'maybe'"
    assert message(file) == f"in-process in {file['config']} must be true or false, got 2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = ", "config must be a TOML file"),
        ("[port]\nx = 1", "port in {path} must be one plain value, got a table"),
        ("host = ['::1']", "host in {path} must be one plain value, got a list"),
        ("log-level = 'info'\nlog_level = 'debug'", "log_level in {path} must be one plain value, got two"),
    ],
)
def test_a_wrong_file_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = settings_file(tmp_path, text)

    assert message(file).startswith(expected.format(path=file["config"]))


def test_the_description_holds_every_option_and_where_it_came_from_but_no_secret() -> None:
    settings = load_settings(flags("--api-key", "open-sesame", "--port", "9000"), {"GPTSERVE_HOST": "::1"})

    chosen, others = settings.describe()

    assert chosen == "host=::1 (GPTSERVE_HOST), api-key=*** (--api-key), port=9000 (--port)"
    assert others.startswith("model=- ")
    assert all(f" {option.name}=" in f" {chosen} {others}" for option in server_options())
    assert "open-sesame" not in chosen + others + repr(settings)


def test_a_value_equal_to_the_default_is_no_choice() -> None:
    assert load_settings(flags("--port", "8000"), {}).sources == {}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10B", 10),
        ("512MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        ("2 GiB", 2**31),
        ("3T", 3 * 10**12),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["1kB", "-1", "1iB", "GiB", "1e3", "", "1."])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_the_page_is_generated_from_the_settings() -> None:
    assert configuration_page.TARGET.read_text(encoding="utf-8") == configuration_page.page(), "run make docs"


def test_every_setting_has_a_row() -> None:
    page = configuration_page.page()

    assert [option.name for option in server_options() if page.count(configuration_page.row(option)) != 1] == []
