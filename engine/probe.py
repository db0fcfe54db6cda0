"""What a loaded engine tries before it is called ready: whether it decodes, and whether its steps may overlap.

Engine calls it. The steps are made by hand, without the scheduler.
"""

from __future__ import annotations

import logging

from gptserve.engine.config import EngineConfig
from gptserve.engine.device_loss import end_if_lost
from gptserve.engine.errors import EngineStartError
from gptserve.engine.model.runner import Collect, ModelRunner
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState

logger = logging.getLogger(__name__)

NOT_FINITE = "the model's logits for this request were not finite (NaN or infinity)"
NOT_DECODING = f"the model cannot decode: {NOT_FINITE}"


def warm_up(runner: ModelRunner, pool: BlockPool) -> None:
    """Decode one token, so that only an engine that can is called ready. Raises what the step raises."""
    block_ids = pool.allocate(1)
    assert block_ids is not None, "a new engine has free blocks, and so has one whose suspect has just ended"
    try:
        result = runner.launch(_step([0], 0, block_ids))()
    finally:
        pool.free(block_ids)
    if result.sampled[0].token_ids == (None,):
        raise EngineStartError(NOT_DECODING)


def may_overlap(config: EngineConfig, runner: ModelRunner) -> bool:
    """Whether steps are to overlap: on a GPU, unless a warning says why they do not.

    Call it before any sequence owns a block, and `warm_up` after it: what fails here may have broken the device.
    """
    if runner.info.device == "cpu" or not config.overlap:
        return False
    obstacle = _obstacle(runner)
    if obstacle is not None:
        logger.warning(
            "steps: one after the other, which is slower, are used instead of overlapping ones: %s", obstacle
        )
    return obstacle is None


def _obstacle(runner: ModelRunner) -> str | None:
    """Return why steps cannot overlap; None if they can."""
    if runner.waits_in_launch:
        return "the host waits for the experts of each layer"
    try:
        return disagreement(runner)
    except Exception as error:  # of a driver or a library that no test has seen: steps that wait need none of it
        end_if_lost("steps that overlap", error, "overlap False")
        return f"they failed with {type(error).__name__}: {error}"


def disagreement(runner: ModelRunner) -> str | None:
    """Return how two steps that overlap differ from two that do not, or None.

    Call it before any sequence owns a block.
    """
    block_size = runner.info.block_size
    first = runner.launch(_probe(block_size, 0))
    ahead = runner.launch(_probe(block_size, 0, ~0))
    overlapping = _only_token(first), _only_token(ahead)
    token_id = _only_token(runner.launch(_probe(block_size, 0)))
    apart = token_id, _only_token(runner.launch(_probe(block_size, 0, token_id)))
    return None if overlapping == apart else f"they gave the tokens {overlapping} instead of {apart}"


def _probe(block_size: int, *token_ids: int) -> ScheduledBatch:
    """Return a step that computes the last of these tokens."""
    num_computed = len(token_ids) - 1
    return _step(list(token_ids), num_computed, list(range(num_computed // block_size + 1)))


def _step(token_ids: list[int], num_computed: int, block_ids: list[int]) -> ScheduledBatch:
    request = Request("probe", (0,), SamplingParams(temperature=0.0), seed=0)
    sequence = SequenceState(request, 0, token_ids, num_computed=num_computed, block_ids=block_ids)
    return ScheduledBatch((ScheduledSequence(sequence, 1),))


def _only_token(collect: Collect) -> int:
    token_id = collect().sampled[0].token_ids[0]
    if token_id is None:
        raise EngineStartError(NOT_DECODING)
    return token_id
