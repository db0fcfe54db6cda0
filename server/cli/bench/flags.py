"""The flags of `gptserve bench`, in groups. Those of requests have the names of Workload's fields."""

from __future__ import annotations

import argparse

from gptserve.server.cli.arguments import COUNT, COUNTS, NATURAL, NUMBER, PICTURE, POSITIVE, RATES, SHARE
from gptserve.server.cli.flags import add_server_flags

DESCRIPTION = """\
Send streamed completions to a server and measure how long clients wait, in ms:
for the first token (ttft), between tokens (itl), and for the whole answer
(e2e). A percentile is the least value that so many percent do not exceed.
good/s counts the requests within the objectives (--slo-...), client is the CPU
time of this command as a share of one core. Any server of OpenAI's API will do.
"""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    server = parser.add_argument_group("server")
    add_server_flags(server)
    server.add_argument("MODEL", nargs="?", help="start a server of this model, with the variables that `serve` reads")

    load = parser.add_argument_group("load")
    add = load.add_argument
    clients = "clients that each send one request after the other (default: 1,8,32 without --rate)"
    add("--concurrency", type=COUNTS, default=(), metavar="N,N", help=clients)
    moments = "requests a second at random moments (Poisson); latencies count from these, even if it is sent late"
    add("--rate", type=RATES, default=(), metavar="R,R", help=moments)
    add("--num-requests", type=COUNT, metavar="N", help="requests of each load (default: 4 a client, 64 at a rate)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and moments; prompts are new in every run")

    add = parser.add_argument_group("requests").add_argument
    add("--prompt-tokens", type=COUNT, default=128, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--max-tokens", type=COUNT, default=128, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--spread", type=SHARE, default=0.0, metavar="S", help="draw both lengths from 1 - S to 1 + S times as many")
    add("--shared-prefix", type=NATURAL, default=0, metavar="N", help="tokens with which all prompts begin")
    add("--prompts", choices=("ids", "words"), default="ids", help="token ids, or words for servers that refuse those")
    add("--temperature", type=NUMBER, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")

    add = parser.add_argument_group("report").add_argument
    add("--slo-ttft-ms", type=POSITIVE, metavar="MS", help="longest time to the first token of a good request")
    add("--slo-itl-ms", type=POSITIVE, metavar="MS", help="longest mean time between the tokens of a good request")
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    picture = "draw the loads into FILE.png, .svg or .pdf; needs pip install 'gptserve[plots]'"
    add("--plot", type=PICTURE, metavar="FILE", help=picture)
