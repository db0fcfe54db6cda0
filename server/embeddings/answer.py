"""The answer to a request for embeddings: vectors of the length and in the encoding that it asks for."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence

from gptserve.server.embeddings.run import PooledPlan
from gptserve.server.schemas.embeddings import EmbeddingRequest


def embedding_answer(body: EmbeddingRequest, vectors: Sequence[array[float]], plan: PooledPlan) -> Mapping[str, object]:
    """Return the answer of the route, in its JSON shape."""
    width, normalizes = body.dimensions, plan.model.text_vector.normalizes
    is_text = body.encoding_format == "base64"
    fit = [fitted(vector, width, normalizes=normalizes) for vector in vectors]
    data = [
        {"object": "embedding", "index": i, "embedding": in_base64(its) if is_text else its.tolist()}
        for i, its in enumerate(fit)
    ]
    return {"object": "list", "model": plan.model.name, "data": data, "usage": plan.usage}


def fitted(vector: array[float], width: int | None, *, normalizes: bool) -> array[float]:
    """Return the first `width` numbers of a vector, None for all, in fp32, and of the length 1 if it normalizes.

    A vector of zeros stays one.
    """
    kept = vector[:width]
    length = math.sqrt(math.fsum(number * number for number in kept)) if normalizes else 1.0
    return array("f", [number / length for number in kept]) if length else kept


def in_base64(vector: array[float]) -> str:
    """Return the base64 of a vector, the lowest byte of each number first."""
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector).decode("ascii")
