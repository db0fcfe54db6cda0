"""Compiles grammars in a thread, for an engine that goes on with its steps. scheduling/grammar_queue.py calls it.

No thread can be killed. One that takes too long is left to itself, and a fresh one goes on with the next grammar.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gptserve.engine.errors import EngineError
from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher

MAX_COMPILED = 64
"""Compiled grammars that are kept for the next request with the same one. Most take some 100 KB."""

LIMIT_S = 60.0
"""For a grammar that took at most 2 s of CPU time before, in the server's check, on however busy a machine."""

MAX_STUCK = 2
"""Threads that are left to themselves; each keeps a core busy. Only a new engine is rid of them."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread, and what it compiles since when."""

    future: Future[Matcher] | None = None
    began_at: float = 0.0


class CompilingThread:
    """Compiles one grammar after the other. Grammars are kept by their content.

    The first one opens the tokens, so that other starts need not. llguidance holds the interpreter's lock meanwhile:
    0.13 s for 50,000 tokens and 0.65 s for 200,000 on 2 cores of an Intel Xeon. There is a thread only while there are
    grammars to compile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._jobs: deque[tuple[Grammar, Future[Matcher]]] = deque()
        self._worker: _Worker | None = None
        self._num_stuck = 0
        self._lock = threading.Lock()  # of the fields above

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._folder)

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """Begin to compile. The future raises what `Compiler` raises."""
        future = Future[Matcher]()
        with self._lock:
            self._jobs.append((grammar, future))
            if self._worker is None:
                self._start()
        return future

    def replace_if_stuck(self) -> None:
        """Fail the grammar that takes longer than LIMIT_S, and go on with the next one in another thread.

        Raises EngineError when too many threads are stuck.
        """
        with self._lock:
            if self._num_stuck > MAX_STUCK:
                raise EngineError(f"{self._num_stuck} threads are stuck in grammars that never compile")
            worker = self._worker
            if worker is None or worker.future is None or time.monotonic() - worker.began_at < LIMIT_S:
                return
            self._num_stuck += 1
            future = worker.future
            self._start()
        future.set_exception(GrammarError(f"it took more than {LIMIT_S:g} s"))

    def _start(self) -> None:
        self._worker = _Worker() if self._jobs else None
        if self._worker is not None:
            threading.Thread(target=self._work, args=[self._worker], name="gptserve-grammar", daemon=True).start()

    def _work(self, worker: _Worker) -> None:
        while (job := self._next(worker)) is not None:
            grammar, future = job
            try:
                kept = self._compiled.get(grammar)
                compiled = kept if kept is not None and kept.works() else self._compiler.compile(grammar)
                matcher = compiled.copy()
            except BaseException as fault:  # a panic in Rust is no Exception
                if self._is_in_time(worker):
                    future.set_exception(fault)
            else:
                if self._is_in_time(worker):
                    self._keep(grammar, compiled)
                    future.set_result(matcher)

    def _next(self, worker: _Worker) -> tuple[Grammar, Future[Matcher]] | None:
        """Return the next grammar for a thread; None if the thread is to end."""
        with self._lock:
            if self._worker is not worker:
                self._num_stuck -= 1
                return None
            while self._jobs:
                grammar, future = self._jobs.popleft()
                if future.set_running_or_notify_cancel():
                    worker.future, worker.began_at = future, time.monotonic()
                    return grammar, future
            self._worker = None
            return None

    def _is_in_time(self, worker: _Worker) -> bool:
        """Return whether a thread has not been replaced; from then on it will not be."""
        with self._lock:
            worker.future = None
            return self._worker is worker

    def _keep(self, grammar: Grammar, compiled: Matcher) -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
