"""Checks that the grammar of a request compiles, in a worker process within limits, before the request is admitted.

The engine compiles the grammar again for itself, in a process where nothing could stop it. Knows no HTTP; `plan.py` and
`chat.py` call it.
"""

from __future__ import annotations

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.server.completions.service import Service
from gptserve.server.schemas.grammar import GrammarFields, asked_grammar


async def check_grammar(body: GrammarFields, service: Service) -> Grammar | None:
    """Return the body's grammar; None without any. Raises InvalidRequestError unless it compiles."""
    name, grammar = asked_grammar(body, service.options.settings.unnamed_properties)
    if grammar is not None:
        await check_compiles(name, grammar, service)
    return grammar


async def check_compiles(name: str, grammar: Grammar, service: Service) -> None:
    """Raise InvalidRequestError unless the grammar that the field `name` asks for compiles."""
    if not service.model.engine.info.eos_token_ids:
        message = f"{name} may not be given: this model has no end of text, by which the answer would end"
        raise InvalidRequestError(message, param=name)
    checker = service.model.grammar_checker
    if checker is None or checker.is_known(grammar):
        return
    fault = await service.in_worker(checker.fault_of, grammar)
    if fault:
        raise InvalidRequestError(f"{name} cannot be compiled: {fault}", param=name)
