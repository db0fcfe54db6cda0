"""The command `gptserve`: serve a model, complete a text, inspect a model.

A wrong command line or setting ends with status 2, any other failure with 1, and one sentence on stderr. The engine's
process imports this file again, so each command imports its heavy modules itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import gptserve
from gptserve.engine.errors import EngineError
from gptserve.server.operations.keys import KEY_RULE, is_key
from gptserve.server.settings import SettingsError, add_flags, injected_variables, load_settings, parse_size, suggestion
from gptserve.weights.errors import TokenizerError, WeightsError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
DEFAULT_URL = "http://127.0.0.1:8000"

PRECEDENCE = (
    "Every option is also a variable (GPTSERVE_PORT for --port) and a key of the --config file (port). The command "
    "line wins over the environment, the environment over the file."
)
Parsed = TypeVar("Parsed")

logger = logging.getLogger(__name__)


class CommandError(Exception):
    """A command failed; the message is the cause in one sentence."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    options, unknown = _build_parser().parse_known_args(arguments)
    command: CommandParser = options.parser
    if unknown:
        flags = re.findall(r"--[\w-]+", command.format_help())
        name = unknown[0].partition("=")[0]  # the rest may be a key, which no log may hold
        command.error(f"unknown argument {name}{suggestion(name, flags)}")
    try:
        sys.exit(options.run(options))
    except SettingsError as error:
        command.error(str(error))
    except (CommandError, EngineError, WeightsError) as error:
        command.exit(EXIT_FAILURE, f"gptserve: {error}\n")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes into the pipe again
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviated flags; its errors are one sentence."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Exit with EXIT_USAGE."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="gptserve", description="An exact, small inference server for GPT-style language models."
    )
    parser.add_argument("--version", action="version", version=f"gptserve {gptserve.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="answer HTTP requests", epilog=PRECEDENCE)
    serve.add_argument("MODEL", nargs="?", help="same as --model")
    add_flags(serve)
    serve.set_defaults(parser=serve, run=_serve)

    complete = commands.add_parser("complete", help="complete a text, printing tokens as they come")
    complete.add_argument("text", type=_TEXT, metavar="TEXT", help="text to complete; - reads it from stdin")
    complete.add_argument("--url", type=_TEXT, help=f"URL of the server (default: {DEFAULT_URL})")
    complete.add_argument("--api-key", help="API key to send (default: the variable GPTSERVE_API_KEY)")
    complete.add_argument("--local", nargs="?", const="", metavar="MODEL", help="load this model, ask no server")
    complete.add_argument("--max-tokens", type=int, default=200, help="tokens to generate (default: %(default)s)")
    complete.add_argument("--temperature", type=_NUMBER, default=1.0, help="0 is greedy (default: %(default)s)")
    complete.add_argument(
        "--top-p", type=_NUMBER, default=1.0, help="nucleus sampling; 1 is off (default: %(default)s)"
    )
    complete.add_argument("--seed", type=int, help="seed; the same seed repeats a completion")
    complete.add_argument("--stop", type=_TEXT, action="append", default=[], help="text at which to stop; repeatable")
    complete.set_defaults(parser=complete, run=_complete)

    inspect = commands.add_parser("inspect", help="show a model's size and memory needs, from its config.json alone")
    inspect.add_argument("MODEL", nargs="?", help="folder or hub id (default: the embedded storyteller)")
    inspect.add_argument("--revision", help="branch, tag or commit of a hub model")
    inspect.add_argument("--memory", type=_SIZE, help="memory to fit it into, such as 8GiB (default: the free memory)")
    inspect.add_argument("--block-size", type=_COUNT, default=16, help="tokens in a block (default: %(default)s)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(parser=inspect, run=_inspect)

    convert = commands.add_parser("convert", help="convert pickled torch weights into a folder to serve")
    convert.add_argument("SOURCE", type=Path, help="torch file, such as nanoGPT's ckpt.pt, or a folder of such files")
    convert.add_argument("TARGET", type=Path, help="folder to create")
    convert.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="folder to copy tokenizer files from")
    convert.set_defaults(parser=convert, run=_convert)
    return parser


def _convert(options: argparse.Namespace) -> int:
    from gptserve.weights.convert import convert
    from gptserve.weights.tokenizers.tokenizer import Tokenizer

    convert(options.SOURCE, options.TARGET, options.tokenizer)
    try:
        Tokenizer.of_model(options.TARGET)
    except TokenizerError as error:
        raise CommandError(
            f"{options.TARGET} is written, but cannot be served: {error}; copy the right tokenizer's files into it"
        ) from error
    print(f"{options.TARGET} can be served: gptserve serve {options.TARGET}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(options).items() if name not in ("MODEL", "parser", "run")}
    if options.MODEL is not None:
        if "model" in flags:
            raise SettingsError("the model must be given once, got both MODEL and --model")
        flags["model"] = options.MODEL
    settings = load_settings(flags, os.environ)

    from gptserve.server.operations.logs import configure_logging
    from gptserve.server.serve import StartError, serve

    configure_logging(settings.log_format, settings.log_level)
    logger.info("settings: %s", settings.describe())
    if injected := injected_variables(os.environ):
        logger.info("ignoring %d variables that Kubernetes made for a Service: %s", len(injected), ", ".join(injected))
    if not (settings.needs_key or settings.is_local):
        logger.warning("no API key is set: whoever can reach %s can use this server; see --api-key", settings.host)
    try:
        return serve(settings)
    except StartError as error:
        raise CommandError(str(error)) from error


def _complete(options: argparse.Namespace) -> int:
    if options.local is not None and (options.url is not None or options.api_key is not None):
        raise SettingsError("--url and --api-key are for a server, and --local asks none")
    try:  # the bytes of stdin, so that line ends stay as they are
        prompt = sys.stdin.buffer.read().decode() if options.text == "-" else options.text
    except UnicodeDecodeError as error:
        raise CommandError(f"the text on stdin must be UTF-8, got something else at byte {error.start}") from error
    for text in (_ask_server if options.local is None else _compute_here)(options, prompt):
        print(text, end="", flush=True)
    print()
    return 0


def _ask_server(options: argparse.Namespace, prompt: str) -> Iterator[str]:
    """Yield the text of a completion from a running server, as it streams."""
    import httpx

    fields = ("max_tokens", "temperature", "top_p", "seed", "stop")
    body = {"prompt": prompt, "stream": True} | {name: getattr(options, name) for name in fields}
    url = (DEFAULT_URL if options.url is None else options.url).rstrip("/")
    key = os.environ.get("GPTSERVE_API_KEY") or None if options.api_key is None else options.api_key
    if key is not None and not is_key(key):
        raise SettingsError(f"the API key must be {KEY_RULE}, got ***")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(10.0, read=None)  # a queued request may wait long for its first token
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                raise CommandError(_error_message(response.status_code, response.read()))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise CommandError(event["error"]["message"])
                    yield from (choice["text"] for choice in event["choices"])
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {url}: {error}; is `gptserve serve` running there?") from error
    raise CommandError("the stream ended in the middle of the completion")


def _error_message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status} and no message"


def _compute_here(options: argparse.Namespace, prompt: str) -> Iterator[str]:
    """Load a model into this process and yield the text of its completion."""
    from gptserve.engine.llm import LLM
    from gptserve.engine.request import SEED_LIMIT, Request, SamplingParams
    from gptserve.server.completions.output import ChoiceOutput, compile_stop

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p)
    seed = secrets.randbelow(SEED_LIMIT) if options.seed is None else options.seed
    llm = LLM(options.local or None)
    stop = [compile_stop(text) for text in options.stop]
    choice = ChoiceOutput(llm.tokenizer, stop=stop, skip=llm.tokenizer.special_ids)
    for output in llm.stream([Request("local", tuple(llm.tokenizer.encode_prompt(prompt)), params, seed)]):
        if output.error is not None:
            raise CommandError(output.error)
        yield choice.add(output).text
        if choice.finish_reason is not None:
            return


def _inspect(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from gptserve.server.cli.inspection import inspect_model, render
    from gptserve.weights.families import load_config
    from gptserve.weights.source import model_name, resolve_config

    config = load_config(resolve_config(options.MODEL, options.revision))
    report = inspect_model(model_name(options.MODEL), config, options.memory, options.block_size)
    print(json.dumps(asdict(report), indent=2) if options.json else render(report))
    return 0


def _argument(
    rule: str, parse: Callable[[str], Parsed], holds: Callable[[Parsed], bool] = lambda _: True
) -> Callable[[str], Parsed]:
    """Return a converter for argparse; its error has the `rule` that a text breaks where `parse` or `holds` fails."""

    def convert(text: str) -> Parsed:
        with contextlib.suppress(ValueError):
            if holds(value := parse(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")

    return convert


_TEXT = _argument("UTF-8", lambda text: text.encode().decode())  # surrogates stand for bytes that are not UTF-8
_NUMBER = _argument("a finite number", float, math.isfinite)
_COUNT = _argument("a whole number of at least 1", int, lambda number: number >= 1)
_SIZE = _argument("a number of bytes such as 8GiB", parse_size)
