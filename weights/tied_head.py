"""Whether a model's head is its embedding: config.json says so with `tie_word_embeddings`, and the files may differ.

The rule is that of transformers: a head in the files is used if it differs from the embedding, and where the embedding
is missing, the head in the files is both. Torch-free. Called by checkpoint.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from gptserve.weights.config import Classifier, ModelConfig
from gptserve.weights.families.family import Family, Source
from gptserve.weights.parts import stored_as
from gptserve.weights.quantized.stored_type import Found, StoredType, UnfitError
from gptserve.weights.stored_tensor import StoredTensor

OWN_WEIGHT = "score.weight"
"""The name of a classifier's own weight, [labels, width], in the files of all families."""

logger = logging.getLogger(__name__)


def resolve_head(
    family: Family,
    config: ModelConfig,
    files: dict[str, StoredTensor],
    types: Sequence[StoredType],
    *,
    needs_head: bool = True,
) -> tuple[ModelConfig, dict[str, Source]]:
    """Return the configuration and the sources of the model in these files.

    The configuration is `config`, unless that ties a head which the files have and which differs from the embedding: a
    warning says so. A copy of the embedding is taken out of `files`. Unless needs_head, a head that the files lack is
    the embedding: they are of a base model. A classifier takes the place of the head, which is then the embedding, too.
    Raises InvalidCheckpointError if a tensor cannot be read.
    """
    if config.classifier is not None:
        return _resolve_classifier(family, config, config.classifier, files, types)
    sources = family.sources(config)
    if not config.tied_head:
        if needs_head or _tensors_of(sources["head.weight"], files, types):
            return config, sources
        config = replace(config, tied_head=True, head_bias=False)
        return config, family.sources(config)
    untied = replace(config, tied_head=False)
    own_head = family.sources(untied)["head.weight"]
    embed, head = (_tensors_of(source, files, types) for source in (sources["embed.weight"], own_head))
    if not head:
        return config, sources
    if not embed:
        return config, sources | {"embed.weight": own_head}
    if len(embed) == len(head) and all(map(StoredTensor.equals, embed.values(), head.values())):
        for name in head:
            del files[name]
        return config, sources
    logger.warning(
        "config.json ties the head to the embedding, but the files have %s, which differs from %s; using both",
        *(next(iter(tensors.values())).name for tensors in (head, embed)),
    )
    return untied, family.sources(untied)


def _resolve_classifier(
    family: Family,
    config: ModelConfig,
    classifier: Classifier,
    files: dict[str, StoredTensor],
    types: Sequence[StoredType],
) -> tuple[ModelConfig, dict[str, Source]]:
    """Return what resolve_head returns, with the tensors of the classifier, in fp32."""
    plain, ids = replace(config, classifier=None), classifier.token_ids
    resolved, sources = resolve_head(family, plain, files, types, needs_head=bool(ids))
    own: dict[str, Source] = {}
    if not ids:
        shape = (classifier.num_labels, config.embed_size or config.hidden_size)
        own["weight"] = Source(((OWN_WEIGHT, shape),), is_wide=True)
    else:
        own["weight"] = replace(sources.get("head.weight", sources["embed.weight"]), row_order=ids, is_wide=True)
        if resolved.head_bias:
            own["bias"] = replace(sources["head.bias"], row_order=ids, is_wide=True)
    tied = replace(resolved, tied_head=True, head_bias=False)
    held = family.sources(tied) | {"embed.weight": sources["embed.weight"]}
    of_classifier = {f"classifier.{kind}": source for kind, source in own.items()}
    return replace(tied, classifier=replace(classifier, has_bias="bias" in own)), held | of_classifier


def _tensors_of(source: Source, files: dict[str, StoredTensor], types: Sequence[StoredType]) -> dict[str, StoredTensor]:
    """Return the tensors of the files that hold a source of one part, by their names."""
    ((weight, shape),) = source.parts
    stored, its_shape = stored_as(source, weight, shape, files, types)
    found = Found.of(weight, files)
    try:
        expected = stored.tensors(its_shape, found)
    except UnfitError:  # which find_parts says
        return {}
    return {found.base + ending: found[ending] for ending in expected if ending in found}
