"""Model: what is served under a name: the engine, the text around it, and how its answers to chats are read.

`model_folder.py` makes one of a folder. Routes find it by the name in a request, in the `ModelRegistry`.
Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gptserve.engine.process.client import EngineClient
from gptserve.server.completions.grammar_checker import GrammarChecker
from gptserve.server.completions.pairs import PairPrompt
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.tools.dialect import Dialect
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.classes import TextClasses
from gptserve.weights.pooling import TextVector


@dataclass(frozen=True, slots=True)
class Model:
    """One model. Answers have the first of its `names`; requests may have any, or one that matches a pattern.

    A pattern is a name with a * for any characters, such as claude-*. Chats need a chat_template.

    sampling_defaults are the model's own values of sampling parameters, max_new_tokens is its own limit of an answer in
    a chat. Without a grammar_checker the engine alone finds out whether a grammar compiles. text_vector says which
    vector of a text is its embedding; text_classes, what the logits of a classifier mean, and pair_prompt how it is
    asked about two texts.
    """

    names: tuple[str, ...]
    engine: EngineClient
    tokenizer: Tokenizer
    dialect: Dialect
    chat_template: ChatTemplate | None = None
    grammar_checker: GrammarChecker | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    tokenizer_info: Mapping[str, object] = field(default_factory=lambda: {"tokenizer_class": "unknown"})
    name_patterns: tuple[str, ...] = ()
    text_vector: TextVector = field(default_factory=TextVector)
    text_classes: TextClasses | None = None
    pair_prompt: PairPrompt | None = None

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def close(self) -> None:
        """End the worker processes of the tokenizer, the template and the grammars; the engine goes on."""
        for holder in (self.tokenizer, self.chat_template, self.grammar_checker):
            if holder is not None:
                holder.close()


class ModelRegistry:
    """The models of a server by their names, at least one. The first answers requests that name none."""

    def __init__(self, *models: Model) -> None:
        self.default = models[0]
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        assert len(self._by_name) == sum(len(model.names) for model in models), "a name is of one model"

    def __iter__(self) -> Iterator[tuple[str, Model]]:
        """Iterate over the names, each with its model."""
        return iter(self._by_name.items())

    def find(self, name: str | None) -> Model:
        """Return the model of a name, and without one the default. Raises ServiceError."""
        if name is None:
            return self.default
        model = self._by_name.get(name) or self._matching(name)
        if model is None:
            message = f"model {show(name)} does not exist; this server has {', '.join(map(repr, self._by_name))}"
            raise ServiceError("model_not_found", message, param="model")
        return model

    def find_kept(self, name: str) -> Model:
        """Return the model for a completion that an earlier server began under a name.

        Where nothing has the name any more it is the default: its fingerprints say whether it is the same model.
        """
        return self._by_name.get(name, self.default)

    def _matching(self, name: str) -> Model | None:
        """Return the first model with a pattern that a name matches."""
        for model in self._models:
            for begin, _, end in (pattern.partition("*") for pattern in model.name_patterns):
                if len(name) >= len(begin) + len(end) and name.startswith(begin) and name.endswith(end):
                    return model
        return None
