"""The most memory that the server takes while a large file is uploaded, and its batch is checked and begins.

    python -m bench.batch_memory [--file-bytes 1073741824] [--line-bytes 12000 1000000] [--lines-done 200]

For each size of lines a server of the embedded model gets a file of that many bytes. The peaks are those of the
server's process without its engine (VmHWM, set back before each phase), in MiB beyond what it holds when it is ready.
Linux only. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.machine import tell, versions
from bench.server import running_server

URL = "/v1/completions"
LIMIT_S = 600.0
PHASES = ("upload", "check", "begin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-bytes", type=int, default=2**30)
    parser.add_argument("--line-bytes", type=int, nargs="+", default=[12_000, 1_000_000])
    parser.add_argument("--lines-done", type=int, default=200)
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    rows = []
    print(f"{'bytes a line':>12}{'ready, MiB':>12}" + "".join(f"{name + ', MiB':>14}" for name in PHASES))
    for line_bytes in args.line_bytes:
        row = measure(args.file_bytes, line_bytes, args.lines_done)
        rows.append({"line_bytes": line_bytes, **row})
        print(f"{line_bytes:>12}{row['ready']:>12.1f}" + "".join(f"{'+' + format(row[n], '.1f'):>14}" for n in PHASES))
    options = {"file_bytes": args.file_bytes, "lines_done": args.lines_done}
    tell({"benchmark": "batch_memory", **options, **versions("cpu"), "rows": rows}, args.output)


def measure(file_bytes: int, line_bytes: int, num_done: int) -> dict[str, float]:
    """Return the memory of a server that is ready, and how much more each phase takes at most, in MiB."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "in.jsonl")
        write_lines(path, file_bytes, line_bytes)
        flags = ("--max-file-bytes", str(2 * file_bytes), "--state-dir", str(Path(name, "state")))
        with (
            running_server(*flags) as (process, port),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client,
        ):
            batch_id = ""

            def upload() -> None:
                nonlocal batch_id
                with path.open("rb") as file:
                    sent = client.post("/v1/files", files={"file": ("in.jsonl", file)}, data={"purpose": "batch"})
                body = {"input_file_id": sent.raise_for_status().json()["id"], "endpoint": URL}
                begun = client.post("/v1/batches", json={**body, "completion_window": "24h"}).raise_for_status()
                batch_id = begun.json()["id"]

            def wait(until: Callable[[dict[str, Any]], bool]) -> None:
                while not until(batch := client.get(f"/v1/batches/{batch_id}").raise_for_status().json()):
                    assert batch["status"] in ("validating", "in_progress", "finalizing", "completed"), batch
                    time.sleep(0.05)

            ready = memory(process.pid, "VmRSS")
            phases: tuple[Callable[[], None], ...] = (
                upload,
                lambda: wait(lambda batch: batch["status"] != "validating"),
                lambda: wait(lambda batch: batch["request_counts"]["completed"] >= num_done),
            )
            peaks = {}
            for phase_name, phase in zip(PHASES, phases, strict=True):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # sets VmHWM back: proc(5)
                phase()
                peaks[phase_name] = memory(process.pid, "VmHWM") - ready
            return {"ready": ready, **peaks}


def write_lines(path: Path, file_bytes: int, line_bytes: int) -> None:
    """Write lines of so many bytes, whose requests have a few tokens and a field that is let through."""
    with path.open("w") as file:
        for i in range(file_bytes // line_bytes):
            body = {"prompt": "Once", "max_tokens": 4, "padding": "x" * (line_bytes - 150)}
            line = json.dumps({"custom_id": str(i), "method": "POST", "url": URL, "body": body})
            file.write(f"{line:<{line_bytes - 1}}\n")


def memory(pid: int, name: str) -> float:
    """Return a number of /proc/PID/status, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[name].split()[0]) / 1024


if __name__ == "__main__":
    main()
