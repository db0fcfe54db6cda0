"""What identifies a completion: the fields that are equal in its answer, in every chunk and for every reader.

`plan.py` and `chat.py` make one, `jobs/` keeps it. Knows no HTTP.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import Shape
from gptserve.server.schemas.completions import GenerationRequest
from gptserve.server.schemas.seed import choose_seed


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that identify a completion: equal in its answer, in every chunk and for every reader.

    owner is the name of the API key, and in no answer.
    """

    completion_id: str
    created: int
    seed: int
    model: str
    fingerprint: str
    batch_invariant: bool
    owner: str | None


def new_identity(shape: Shape, body: GenerationRequest, service: Service, owner: str | None) -> Identity:
    """Return the identity of a new completion; without a seed in the body, or for seed -1, draw one."""
    return Identity(
        completion_id=f"{shape.id_prefix}{uuid.uuid4().hex}",
        created=int(time.time()),
        seed=choose_seed(body.seed),
        model=service.model.name,
        fingerprint=service.model.engine.info.fingerprint,
        batch_invariant=service.model.engine.info.batch_invariant,
        owner=owner,
    )
