"""GrammarChecker: compiles grammars in a worker process within limits, so that none can stop the engine.

`grammar.py` asks it before a request is admitted; a `Model` has one. Knows no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

from gptserve.engine.grammar.grammar import Grammar
from gptserve.weights.workers import ForeignCodeError, Limits, Workers

LIMITS = Limits(cpu_s=2, memory_bytes=2**28, open_cpu_s=60, open_memory_bytes=2**31)
MAX_REMEMBERED = 128  # at most 64 KB each


class GrammarChecker:
    """Tells whether grammars compile for a model. Threads may share it; the first call starts a worker."""

    def __init__(self, folder: Path) -> None:
        self._workers = Workers("gptserve.engine.grammar.compiler:open_checker", str(folder), LIMITS, readable=[folder])
        self.close = self._workers.close
        self._good: OrderedDict[Grammar, None] = OrderedDict()

    def is_known(self, grammar: Grammar) -> bool:
        """Whether it has compiled before."""
        return grammar in self._good

    def fault_of(self, grammar: Grammar) -> str:
        """Return why a grammar does not compile, "" if it does. May take seconds."""
        try:
            reason = self._workers.call(**asdict(grammar))
        except ForeignCodeError as fault:
            return str(fault)
        assert isinstance(reason, str), "open_checker returns texts"
        if not reason:
            self._good[grammar] = None
            if len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)
        return reason
