"""The command `gptserve`: serve a model, complete or score a text, chat, answer a file, inspect or convert a model.

A wrong command line or setting ends with status 2, any other failure with 1, and one sentence on stderr. Each command
imports its heavy modules itself.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import gptserve
from gptserve.engine.errors import EngineError
from gptserve.server.cli.arguments import COUNT, NUMBER, SIZE, TEXT, WHOLE
from gptserve.server.cli.batch import add_batch_flags, run_batch
from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.flags import EPILOG, NAMES_FLAG, SEVERAL_NAMES, add_flags, add_server_flags
from gptserve.server.cli.input_text import STDIN, read_question, read_text
from gptserve.server.cli.remote import Remote
from gptserve.server.cli.replicas import Replicas
from gptserve.server.cli.scoring import add_score_flags
from gptserve.server.cli.state import URL_VARIABLE, add_state_command, move_state
from gptserve.server.cli.terminal import is_terminal, print_text, visible
from gptserve.server.core.keys import KEY_RULE, is_key
from gptserve.server.core.settings import ServerSettings, server_options
from gptserve.server.core.settings_checks import SettingsError
from gptserve.server.core.settings_sources import client_urls, load_settings, suggestion
from gptserve.weights.errors import TokenizerError, WeightsError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper) and is_terminal(sys.stdout):
        sys.stdout.reconfigure(errors="backslashreplace")  # shows what the terminal's encoding lacks
    try:
        status = _run(arguments)
    except (CommandError, EngineError, WeightsError) as error:
        print(f"gptserve: {visible(str(error))}", file=sys.stderr)
        status = EXIT_FAILURE
    except BrokenPipeError:
        status = EXIT_FAILURE
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    sys.exit(status)


def _run(arguments: Sequence[str] | None) -> int:
    """Run the command line and return its status. Exits by itself if the command line or a setting is wrong."""
    options, unknown = _build_parser().parse_known_args(arguments)
    command: CommandParser = options.parser
    if unknown:
        flags = re.findall(r"--[\w-]+", command.format_help())
        name = unknown[0].partition("=")[0]  # the rest may be a key, which no log may hold
        command.error(f"unknown argument {name}{suggestion(name, flags)}")
    try:
        status: int = options.run(options)
    except SettingsError as error:
        command.error(str(error))
    return status


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviated flags; its errors are one sentence."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Exit with EXIT_USAGE."""
        message = message.replace("ignored explicit argument", "takes no value, got")
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="gptserve",
        description="An exact, small inference server for GPT-style language models.",
        epilog="`gptserve COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"gptserve {gptserve.__version__}")
    parser.set_defaults(parser=parser, run=_help)
    commands = parser.add_subparsers(metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="answer HTTP requests",
        usage="gptserve serve [MODEL] [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("MODEL", nargs="?", help="folder, GGUF file or hub id of the model, as with --model")
    add_flags(serve)
    serve.set_defaults(parser=serve, run=_serve)

    for name, run, text in (
        ("health", _health, "check whether the server with these settings is healthy"),
        ("doctor", _doctor, "check machine, settings and model by serving it for a moment"),
        ("config", _config, "check these settings of serve and show them, with where they are from"),
    ):
        command = commands.add_parser(
            name, help=text, usage=f"gptserve {name} [MODEL] [options of serve]", description=f"{text.capitalize()}."
        )
        command.add_argument("MODEL", nargs="?", help=argparse.SUPPRESS)
        add_flags(command)
        command.set_defaults(parser=command, run=run)

    complete = commands.add_parser(
        "complete",
        help="complete a text, printing tokens as they come",
        description="Ask a running server to complete a text, or load a model with --local. Tokens are printed as they "
        "come.",
    )
    complete.add_argument("text", type=TEXT, metavar="TEXT", help="text to complete; - reads it from stdin")
    complete.add_argument("--local", nargs="?", const="", metavar="MODEL", help="run this model without a server")
    _add_request_flags(complete)
    complete.add_argument(
        "--max-tokens", type=WHOLE, default=200, help="tokens to generate (default: %(default)s; the API's is 16)"
    )
    complete.set_defaults(parser=complete, run=_complete)

    chat = commands.add_parser(
        "chat",
        help="talk with a served model",
        description="Talk with a served model: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves. If "
        "input or output is no terminal, all of stdin is one message, and only the answer is printed.",
    )
    chat.add_argument("--system", type=TEXT, help="system prompt")
    _add_request_flags(chat)
    chat.add_argument("--max-tokens", type=WHOLE, help="tokens of an answer (default: what the context has left)")
    chat.set_defaults(parser=chat, run=_chat)

    _add_model_commands(commands)
    return parser


def _add_model_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the commands that need no server."""
    score = commands.add_parser(
        "score",
        help="say how well a model predicts a text: its perplexity and bits per byte",
        usage="gptserve score FILE [MODEL] [options] [options of serve]",
        description="Load a model as `serve` would with these options, and print how well it predicts a text.",
    )
    add_score_flags(score)
    score.set_defaults(parser=score, run=_score)

    batch = commands.add_parser(
        "batch",
        help="answer the requests in a file, without a server",
        usage="gptserve batch -i FILE -o FILE [MODEL] [options of serve]",
        description="Load a model as `serve` would with these options, and answer the requests in a file, in the "
        "format of OpenAI's batches. Run it again to go on where it stopped.",
    )
    add_batch_flags(batch)
    batch.set_defaults(parser=batch, run=_batch)

    inspect = commands.add_parser("inspect", help="show a model's size, what is stored and computed with")
    inspect.add_argument("MODEL", nargs="?", help="folder, GGUF file or hub id (default: the embedded storyteller)")
    inspect.add_argument("--revision", help="branch, tag or commit of a hub model")
    inspect.add_argument(
        "--memory", type=SIZE, help="memory of a rank to fit it into, such as 8GiB (default: the free memory)"
    )
    inspect.add_argument("--block-size", type=COUNT, default=16, help="tokens in a block (default: %(default)s)")
    inspect.add_argument(
        "--tensor-parallel-size", type=COUNT, default=1, help="show one rank of so many (default: %(default)s)"
    )
    inspect.add_argument("--strict-config", action="store_true", help="refuse any key of config.json that is not known")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(parser=inspect, run=_inspect)

    convert = commands.add_parser("convert", help="convert pickled torch weights into a folder to serve")
    convert.add_argument("SOURCE", type=Path, help="torch file, such as nanoGPT's ckpt.pt, or a folder of such files")
    convert.add_argument("TARGET", type=Path, help="folder to create")
    convert.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="folder to copy tokenizer files from")
    convert.set_defaults(parser=convert, run=_convert)

    state = add_state_command(commands)
    state.set_defaults(parser=state, run=_state)


def _help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 0


def _add_request_flags(parser: CommandParser) -> None:
    """Add the flags of the commands that ask for one answer; a field that is not given is not sent."""
    add_server_flags(parser)
    parser.add_argument("--temperature", type=NUMBER, help="0 is greedy (default: the model's own)")
    parser.add_argument("--top-p", type=NUMBER, help="nucleus sampling; 1 is off (default: the model's own)")
    parser.add_argument("--seed", type=WHOLE, help="seed; the same seed repeats an answer")
    parser.add_argument("--stop", type=TEXT, action="append", help="text at which to stop; repeatable")


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
    print_text([f"{options.TARGET} can be served: gptserve serve {options.TARGET}"])
    return 0


def _settings(options: argparse.Namespace) -> ServerSettings:
    """Return the settings of `serve` from the command line, the environment and a file. Raises SettingsError."""
    given = vars(options)
    flags = {option.name: given[option.name] for option in server_options() if option.name in given}
    if options.MODEL is not None:
        if "model" in flags:
            raise SettingsError("the model must be given once, got both MODEL and --model")
        flags["model"] = options.MODEL
    elif "model" not in flags and (names := getattr(options, SEVERAL_NAMES, ())):
        raise SettingsError(
            f"--{NAMES_FLAG} takes {' and '.join(map(repr, names))} as names of the model: put MODEL before it, use "
            f"--model, or repeat the flag for each name"
        )
    return load_settings(flags, os.environ)


def _health(options: argparse.Namespace) -> int:
    from gptserve.server.cli.health import ask_health

    try:
        print_text([ask_health(_settings(options))])
    except SettingsError as error:
        raise CommandError(str(error)) from error  # a health check knows the status 0 and 1
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from gptserve.server.cli.doctor import examine

    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPTSERVE_")}
    settings, status = _settings(options), 0
    if settings.engine.nnodes > 1:
        raise SettingsError(f"doctor examines one machine, got nnodes {settings.engine.nnodes}")
    for verdict, text in examine(settings, environment):
        print_text([f"{verdict:4}  {text}"])
        status = EXIT_FAILURE if verdict == "fail" else status
    return status


def _config(options: argparse.Namespace) -> int:
    from gptserve.server.cli.health import show_settings

    print_text([show_settings(_settings(options))])
    return 0


def _serve(options: argparse.Namespace) -> int:
    from gptserve.server.cli.serving import serve_with

    return serve_with(_settings(options), os.environ)


def _score(options: argparse.Namespace) -> int:
    from gptserve.server.cli.scoring import score_text

    settings, text = _settings(options), read_text(options.FILE)
    print_text([score_text(settings, text, options.window, options.stride, as_json=options.json)])
    return 0


def _batch(options: argparse.Namespace) -> int:
    num_lines, num_failed = run_batch(_settings(options), options.input_file, options.output_file)
    print_text([f"{num_lines} lines have their results, {num_failed} of them failed"])
    return 0


def _state(options: argparse.Namespace) -> int:
    print_text([move_state(options.DIRECTION, options.FOLDER, options.state_url or os.environ.get(URL_VARIABLE))])
    return 0


def _complete(options: argparse.Namespace) -> int:
    from gptserve.server.cli.completion import ask_server, compute_here

    if options.local is not None and (options.url is not None or options.api_key is not None):
        raise SettingsError("--url and --api-key are for a server, and --local asks none")
    prompt, asked = read_text(STDIN) if options.text == STDIN else options.text, _given(options)
    here = options.local is not None
    print_text(compute_here(options.local, prompt, asked) if here else ask_server(_remote(options), prompt, asked))
    return 0


def _chat(options: argparse.Namespace) -> int:
    from gptserve.server.cli.chat import Chat, converse

    remote = _remote(options)
    chat = Chat(remote, _given(options), options.system)
    if is_terminal(sys.stdin) and is_terminal(sys.stdout):
        print(f"{visible(remote.model_name())} at {remote.url}; /help lists the commands, Ctrl-D leaves")
        converse(chat)
    else:
        print_text(piece.text for piece in chat.ask(read_question()))
    return 0


def _remote(options: argparse.Namespace) -> Remote | Replicas:
    """Return the server that the flags or the environment name, or all of them."""
    key = os.environ.get("GPTSERVE_API_KEY") or None if options.api_key is None else options.api_key
    if key is not None and not is_key(key):
        raise SettingsError(f"the API key must be {KEY_RULE}, got ***")
    urls = options.url or client_urls(os.environ)
    for url in urls:
        if not re.match("https?://[^/]", url):
            raise SettingsError(f"the URL of the server must begin with http:// or https:// and a host, got {url!r}")
    return Remote(urls[0], key) if len(urls) == 1 else Replicas(urls, key)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that were given."""
    fields = ("max_tokens", "temperature", "top_p", "seed", "stop")
    return {name: value for name in fields if (value := getattr(options, name)) is not None}


def _inspect(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from gptserve.server.cli.inspection import inspect_folder, render

    report = inspect_folder(
        options.MODEL,
        options.revision,
        options.memory,
        options.block_size,
        options.tensor_parallel_size,
        strict=options.strict_config,
    )
    print_text([json.dumps(asdict(report), indent=2) if options.json else render(report)])
    return 0
