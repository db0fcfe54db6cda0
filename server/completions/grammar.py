"""Checks that the grammar of a request compiles, in a worker process within limits, before the request is admitted.

The engine compiles the grammar again for itself, in a process where nothing could stop it. Knows no HTTP; `plan.py` and
`chat.py` call it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.server.completions.service import Service
from gptserve.server.schemas.grammar import GrammarFields, asked_grammar
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


async def check_grammar(body: GrammarFields, service: Service) -> Grammar | None:
    """Return the body's grammar; None without any. Raises InvalidRequestError unless it compiles."""
    name, grammar = asked_grammar(body, service.options.settings.unnamed_properties)
    if grammar is not None:
        await check_compiles(name, grammar, service)
    return grammar


async def check_compiles(name: str, grammar: Grammar, service: Service) -> None:
    """Raise InvalidRequestError unless the grammar that the field `name` asks for compiles."""
    if not service.engine.info.eos_token_ids:
        message = f"{name} may not be given: this model has no end of text, by which the answer would end"
        raise InvalidRequestError(message, param=name)
    checker = service.options.grammar_checker
    if checker is None or checker.is_known(grammar):
        return
    fault = await service.in_worker(checker.fault_of, grammar)
    if fault:
        raise InvalidRequestError(f"{name} cannot be compiled: {fault}", param=name)
