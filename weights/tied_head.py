"""Whether a model's head is its embedding: config.json says so with `tie_word_embeddings`, and the files may differ.

The rule is that of transformers: a head in the files is used if it differs from the embedding, and where the embedding
is missing, the head in the files is both. Torch-free. Called by checkpoint.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, Source
from gptserve.weights.stored_tensor import StoredTensor

logger = logging.getLogger(__name__)


def resolve_head(
    family: Family, config: ModelConfig, stored: dict[str, tuple[StoredTensor, ...]]
) -> tuple[ModelConfig, dict[str, Source]]:
    """Return the configuration and the sources of the model in these files.

    The configuration is `config`, unless that ties a head which the files have and which differs from the embedding: a
    warning says so. A copy of the embedding is taken out of `stored`. Raises InvalidCheckpointError if a tensor cannot
    be read.
    """
    sources = family.sources(config)
    if not config.tied_head:
        return config, sources
    untied = replace(config, tied_head=False)
    own_head = family.sources(untied)["head.weight"]
    embed, head = sources["embed.weight"].parts[0][0], own_head.parts[0][0]
    if head not in stored:
        return config, sources
    if embed not in stored:
        return config, sources | {"embed.weight": own_head}
    are_alike = len(stored[embed]) == len(stored[head])
    if are_alike and all(map(StoredTensor.equals, stored[embed], stored[head])):
        del stored[head]
        return config, sources
    logger.warning(
        "config.json ties the head to the embedding, but the files have %s, which differs from %s; using both",
        *(stored[head][0].name, stored[embed][0].name),
    )
    return untied, family.sources(untied)
