"""The engine: requests in, one `step` at a time, token outputs out.

It joins Scheduler (what to compute), BlockPool (in which blocks) and ModelRunner (computes it), and turns their results
into TokenOutputs. On a GPU steps overlap: while one runs, the next one is planned and launched (overlap.py). It knows
no text, HTTP or processes. loop.py and LLM drive it.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from gptserve.engine.config import EngineConfig
from gptserve.engine.info import EngineInfo
from gptserve.engine.parallel.kept_warnings import KeptWarnings
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.pooling import AnyRequest, PoolingRequest
from gptserve.engine.request import MASKS, MAX_SCORES_PER_OUTPUT, FinishReason, TokenLogprobs, TokenOutput
from gptserve.engine.runner.overlap import RunningStep, Steps
from gptserve.engine.runner.probe import NOT_FINITE, may_overlap, warm_up
from gptserve.engine.runner.runner import ModelRunner
from gptserve.engine.scheduling.block_map import BlockMap, draw_block_map
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.choose_drafter import choose_drafter
from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.grammar_queue import GrammarQueue
from gptserve.engine.scheduling.prompt_pace import GPU_MIN_CHUNK_TOKENS, MIN_CHUNK_TOKENS, Pace, PromptPace
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import Progress, ScheduledBatch, SequenceState
from gptserve.engine.scheduling.state_pool import StatePool
from gptserve.engine.stats import EngineStats

logger = logging.getLogger(__name__)

_NONE_LEFT = f"{', '.join(MASKS[:-1])} and {MASKS[-1]} left no token, or {NOT_FINITE}"


class Engine:
    """A loaded model that answers requests. Not thread-safe: use it from one thread.

    Raises WeightsError or EngineError, with one sentence, if the model cannot be served as configured.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        *,
        runner: ModelRunner | None = None,
        drafter: Drafter | None = None,
        pace: Pace | None = None,
        overlap: bool | None = None,
    ) -> None:
        """Load the model and decode one token. `runner`, `drafter` and `pace` replace those that `config` asks for.

        Steps overlap if `overlap` says so; None: where the configuration wants it and the device can.
        """
        self._grammar_queue = GrammarQueue(config.model_dir, config.max_queue_time_s)
        with KeptWarnings() as warnings:
            self._runner = ModelRunner(config, progress, warnings.messages, Ranks) if runner is None else runner
        self.info: EngineInfo = self._runner.info
        self._pool = BlockPool(self.info.num_blocks, self.info.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.info.max_model_len,
            eos_token_ids=self.info.eos_token_ids,
            drafter=drafter or choose_drafter(config.speculative_ngram, has_states=self.info.num_states > 0),
            pace=pace or PromptPace(MIN_CHUNK_TOKENS if self.info.device == "cpu" else GPU_MIN_CHUNK_TOKENS),
            max_queue_time_s=config.max_queue_time_s,
            states=StatePool(self.info.num_states) if self.info.num_states else None,
        )
        self._never_admitted = f"the request was not admitted within {config.max_queue_time_s} s"
        overlap = may_overlap(config, self._runner) if overlap is None else overlap
        warm_up(self._runner, self._pool)
        self._steps = Steps(self._runner, self._scheduler, overlap=overlap)
        self._is_doubted = False  # a step failed for unknown reason, and none has succeeded since

    @property
    def has_requests(self) -> bool:
        """Whether a request is live."""
        return self._scheduler.has_work or self._grammar_queue.num_waiting > 0

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or a step is to show that the engine still can decode."""
        return self.has_requests or self._is_doubted

    @property
    def stats(self) -> EngineStats:
        """The counters of this moment."""
        return replace(
            self._scheduler.stats,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + self._grammar_queue.num_waiting,
            num_used_blocks=self._pool.num_used,
            num_cached_blocks=self._pool.num_cached,
        )

    def add(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequestError if this model cannot compute it."""
        request.check(self.info)
        if isinstance(request, PoolingRequest) or request.params.grammar is None:
            self._scheduler.add(request)
        else:
            self._grammar_queue.add(request)
        self._scheduler.stats.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; one that has ended or is unknown is ignored."""
        self._grammar_queue.abort(request_id)
        self._scheduler.abort(request_id)

    def draw_blocks(self) -> BlockMap:
        """Return a map of the blocks of the KV cache."""
        return draw_block_map(self._pool.num_references, self._pool.findable)

    def step(self) -> list[TokenOutput]:
        """Compute one batch; return an output for each request that got tokens or prompt logprobs, or ended.

        If steps overlap, the next one is launched before this one is awaited, and runs when this returns.
        """
        outputs = self._grammar_queue.let_in(self._scheduler)
        if self._is_doubted and not self._scheduler.has_work:
            self._is_doubted = False
            warm_up(self._runner, self._pool)
        for step in self._steps.due(partial(self._schedule, outputs)):
            outputs += self._collect(step)
        return outputs

    def _schedule(self, outputs: list[TokenOutput]) -> ScheduledBatch:
        """Schedule a step; add the outputs of requests that waited too long."""
        batch = self._scheduler.schedule()
        expired = [sequence.request.request_id for sequence in self._scheduler.expire_waiting()]
        outputs += [_failed(request_id, self._never_admitted, FinishReason.QUEUE_TIMEOUT) for request_id in expired]
        return batch

    def _collect(self, step: RunningStep) -> list[TokenOutput]:
        """Wait for a step and return its outputs."""
        batch = step.batch
        try:
            result = step.collect()
        except BaseException as error:
            return self._recover(batch, error)
        self._is_doubted = False
        outputs: list[TokenOutput] = []
        self._scheduler.stats.count_step(batch.num_tokens)
        for index, entries in result.prompt_logprobs.items():
            sequence = batch.items[index].sequence
            if sequence.is_running:  # not aborted meanwhile
                outputs += self._score_prompt(sequence, entries)
        sampling = [item for item in batch.items if item.needs_sampling]
        rows = list(result.sampled.split([1 + len(item.draft) for item in sampling]))
        sampled = dict(zip([item.sequence for item in sampling], rows, strict=True))
        progressed = self._scheduler.update(batch, [its.token_ids for its in rows])
        self._scheduler.stats.num_generated_tokens += sum([len(progress.token_ids) for progress in progressed])
        outputs += [self._output(p, sampled[p.sequence].logprobs) for p in progressed]
        for index, vector in result.vectors.items():
            sequence = batch.items[index].sequence
            if sequence.is_running:
                outputs += self._pool_prompt(sequence, vector)
        return outputs

    def _pool_prompt(self, sequence: SequenceState, vector: array[float]) -> list[TokenOutput]:
        """Keep what has come of the vector of a sequence; return its output, which ends it, if that is all."""
        request_id, pooled = sequence.request.request_id, sequence.pooled
        assert pooled is not None
        pooled.vector = vector
        if sequence.num_uncomputed:
            return []
        if not all(map(math.isfinite, vector)):
            self._scheduler.fail(sequence)
            return [_failed(request_id, NOT_FINITE)]
        waits = self._scheduler.waits(sequence)
        self._scheduler.complete(sequence)
        cached = sequence.num_cached_tokens
        reason = FinishReason.STOP
        return [TokenOutput(request_id, (), (), None, reason, None, cached, None, waits, vector)]

    def _score_prompt(self, sequence: SequenceState, entries: Iterable[tuple[int, TokenLogprobs]]) -> list[TokenOutput]:
        """Return the next entries of prompt_logprobs; end the request if one of them is NaN.

        `entries` are of consecutive positions. After a preemption some of them were sent before.
        """
        request_id, first = sequence.request.request_id, sequence.num_scored
        scores: list[TokenLogprobs | None] = [None] if first == 0 else []
        scores += [entry for position, entry in entries if position >= first]
        if any(entry is not None and math.isnan(entry.logprob) for entry in scores):
            self._scheduler.fail(sequence)
            return [_failed(request_id, NOT_FINITE)]
        sequence.num_scored += len(scores)
        return [
            TokenOutput(request_id, (), prompt_logprobs=tuple(scores[start : start + MAX_SCORES_PER_OUTPUT]))
            for start in range(0, len(scores), MAX_SCORES_PER_OUTPUT)
        ]

    def _output(self, progress: Progress, logprobs: tuple[TokenLogprobs | None, ...]) -> TokenOutput:
        sequence, token_ids, reason, stop_token_id = progress
        params, num_cached, error = sequence.sampling.params, sequence.num_cached_tokens, None
        if reason is FinishReason.ERROR:
            error = _NONE_LEFT if any(getattr(params, name) for name in MASKS) else NOT_FINITE
            if sequence.matcher is not None and sequence.matcher.fault:
                error = f"the grammar: {sequence.matcher.fault}"
        reported = () if params.logprobs is None else tuple(filter(None, logprobs[: len(token_ids)]))
        waits = self._scheduler.waits(sequence) if 0 < sequence.num_generated <= len(token_ids) else None
        # In order: with names it takes half as long again, and each row of a step makes one.
        return TokenOutput(
            sequence.request.request_id, token_ids, reported, None, reason, stop_token_id, num_cached, error, waits
        )

    def _recover(self, batch: ScheduledBatch, error: BaseException) -> list[TokenOutput]:
        """Requeue the sequences of a step that raised; return the ERROR output of the convicted one, if there is one.

        Raises `error` again if it is no failure of the step (Ctrl-C), or if the engine cannot decode anything else.
        """
        convicted = self._steps.abandon(batch)
        if not isinstance(error, Exception):
            raise error
        logger.error("a step of %d sequences failed", len(batch.items), exc_info=error)
        if convicted is None:
            self._is_doubted = True
            return []
        try:
            warm_up(self._runner, self._pool)
        except Exception:
            raise error from None
        return [_failed(convicted.request.request_id, f"the step that computed this request failed: {error}")]


def _failed(request_id: str, error: str, reason: FinishReason = FinishReason.ERROR) -> TokenOutput:
    """Return the last output of a request that the scheduler has ended without a token."""
    return TokenOutput(request_id, (), finish_reason=reason, error=error)
