"""Makes the Model of a folder. `parts.py` and `gptserve batch` call it; everything else takes the Model as it is.

It imports the libraries of tokenizers, which the application itself can do without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptserve.engine.process.client import EngineClient
from gptserve.server.completions.grammar_checker import GrammarChecker
from gptserve.server.completions.model import Model
from gptserve.server.completions.pairs import pair_prompt
from gptserve.server.core.errors import show
from gptserve.server.core.settings import ServerSettings
from gptserve.server.tools.dialect import dialect_of
from gptserve.weights.chat.template import load_chat_template
from gptserve.weights.classes import load_classes
from gptserve.weights.pooling import TextVector, load_default_prompt, load_text_vector
from gptserve.weights.tokenizers.info import load_tokenizer_info
from gptserve.weights.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    engine: EngineClient,
    names: Sequence[str],
    settings: ServerSettings,
    sampling_defaults: Mapping[str, float],
    max_new_tokens: int | None,
) -> Model:
    """Return the model in a folder, which `engine` computes; start its worker processes. Raises WeightsError."""
    template = load_chat_template(folder, settings.chat_template)
    tokenizer, task = Tokenizer.of_model(folder), settings.engine.task
    classes = load_classes(folder, task) if task in ("classify", "score") else None
    default_prompt = None if task == "generate" else load_default_prompt(folder)
    if task == "embed" and default_prompt is not None:
        logger.warning(
            "texts are embedded without the folder's default prompt %s: clients add it", show(default_prompt)
        )
    return Model(
        tuple(names),
        engine,
        tokenizer,
        dialect_of(tokenizer, template, settings),
        chat_template=template,
        grammar_checker=GrammarChecker(folder),
        sampling_defaults=sampling_defaults,
        max_new_tokens=max_new_tokens,
        tokenizer_info=load_tokenizer_info(folder),
        name_patterns=settings.name_patterns,
        text_vector=load_text_vector(folder) if task == "embed" else TextVector(),
        text_classes=classes,
        pair_prompt=None if classes is None else pair_prompt(tokenizer, template, classes, default_prompt),
    )
