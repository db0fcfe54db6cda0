"""What a loaded engine tries before it is called ready: whether it decodes, and whether its steps may overlap.

Engine calls it. The steps are made without the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.device_loss import end_if_lost
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineStartError
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.request import SamplingParams
from gptserve.engine.runner.runner import Collect, ModelRunner
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.sampling.choice import SamplingPosition, SamplingState
from gptserve.engine.scheduling.block_pool import BlockPool

NOT_FINITE = "the model's logits for this request were not finite (NaN or infinity)"
NOT_DECODING = f"the model cannot decode: {NOT_FINITE}"
_NUM_PROBES = 3

_Drawn = tuple[int, float | None]
"""A token and its logprob."""


def warm_up(runner: ModelRunner, pool: BlockPool) -> None:
    """Decode one token, so that only an engine that can is called ready. Raises what the step raises."""
    block_ids = pool.allocate(1)
    assert block_ids is not None, "a new engine has free blocks, and so has one whose suspect has just ended"
    try:
        result = runner.launch(_step(runner, (0,), block_ids, SamplingParams(temperature=0.0)))()
    finally:
        pool.free(block_ids)
    if result.sampled.token_ids == (None,):
        raise EngineStartError(NOT_DECODING)


def may_overlap(config: EngineConfig, runner: ModelRunner) -> bool:
    """Whether steps are to overlap: on a GPU, unless a warning says why they do not.

    Call it before any sequence owns a block, and `warm_up` after it: what fails here may have broken the device.
    """
    if runner.info.device == "cpu" or not config.overlap:
        return False
    obstacle = _obstacle(runner)
    if obstacle is not None:
        warn_of_fallback("steps", "one after the other, which is slower, are", "overlapping ones", obstacle)
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
    """Return how steps that overlap differ from steps that do not, or None.

    The first one has a prompt, the second takes its token id from the first, and the third takes it from the second: a
    CUDA graph reads it from another, if there are graphs. The token of each is its number, so that neither an older id
    nor 0 passes for it, and the logprobs show which one the next step has read.

    Call it before any sequence owns a block.
    """
    last = min(_NUM_PROBES, runner.info.max_model_len) - 1
    running, overlapping = runner.launch(_probe(runner, 0)), list[_Drawn]()
    for number in range(1, last + 1):
        ahead = runner.launch(_probe(runner, *range(number), ~0))
        overlapping.append(_drawn(running))
        running = ahead
    overlapping.append(_drawn(running))
    apart = [_drawn(runner.launch(_probe(runner, *range(number + 1)))) for number in range(last + 1)]
    return None if overlapping == apart else f"they gave the tokens and logprobs {overlapping} instead of {apart}"


def _probe(runner: ModelRunner, *token_ids: int) -> StepInput:
    """Return a step that computes the last of these tokens and draws the one whose id is their number."""
    block_ids = list(range((len(token_ids) - 1) // runner.info.block_size + 1))
    params = SamplingParams(temperature=0.0, allowed_token_ids=(len(token_ids),), logprobs=0)
    return _step(runner, token_ids, block_ids, params)


def _step(runner: ModelRunner, token_ids: Sequence[int], block_ids: Sequence[int], params: SamplingParams) -> StepInput:
    """Return a step that computes the last token of a sequence that began with the first one."""
    span = Span(token_ids[-1:], len(token_ids) - 1, block_ids, num_sampled=1)
    position = SamplingPosition(SamplingState(params, seed=0, num_prompt_tokens=1), list(token_ids))
    return StepInput(lay_out([span], runner.info.block_size), [position])


def _drawn(collect: Collect) -> _Drawn:
    sampled = collect().sampled
    if sampled.token_ids[0] is None:
        raise EngineStartError(NOT_DECODING)
    scored = sampled.logprobs[0]
    return sampled.token_ids[0], None if scored is None else scored.logprob
