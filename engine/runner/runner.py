"""Runs the model: a StepInput in, sampled tokens and prompt logprobs out.

`launch` has the device begin; what it returns waits for the results. So the host may plan the next step in between.

It owns everything with tensors (weights, KV cache, attention backend). hardware.py and memory.py choose what
EngineConfig left open: device, dtype, threads, context and cache size. It knows no sequences, nor why they were
scheduled. Steps calls it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.decoder import native_decoder
from gptserve.engine.backends.gpu.selfcheck.sampler import choose_sampler
from gptserve.engine.backends.reference.draw import Choose
from gptserve.engine.config import EngineConfig
from gptserve.engine.info import EngineInfo
from gptserve.engine.model.batch import known_token_ids, model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.group import OtherRanks, StartRanks
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.batch_invariance import check_model
from gptserve.engine.runner.description import describe
from gptserve.engine.runner.fingerprint import fingerprint, numeric_causes, sample_numbers
from gptserve.engine.runner.hardware import set_num_threads
from gptserve.engine.runner.input_squares import linears_of
from gptserve.engine.runner.pooling import pool_all
from gptserve.engine.runner.products import Product, product_of
from gptserve.engine.runner.program_steps import program_steps
from gptserve.engine.runner.prompt_logprobs import prompt_logprobs
from gptserve.engine.runner.sampler import SampledTokens, begin_sampling
from gptserve.engine.runner.setup import set_up
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.runner.step_memory import make_cache, max_sampled_rows
from gptserve.engine.runner.step_threads import StepWork, num_step_threads
from gptserve.engine.staging import begin_wait
from gptserve.weights.loading_threads import loading_threads
from gptserve.weights.sharding import Share
from gptserve.weights.torch_threads import torch_threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a forward pass.

    `sampled` has the rows of StepInput.positions. prompt_logprobs maps the index of a sequence to (position, entry) of
    the prompt tokens that it predicted, `vectors` to what pooling.py has of the sequence so far.
    """

    sampled: SampledTokens
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]]
    vectors: dict[int, array[float]] = field(default_factory=dict)


Progress = Callable[[int, int], None]
"""Is told how many bytes of the weights are loaded, and of how many, while they load."""
Collect = Callable[[], StepResult]
"""Waits for a step and returns its results; called once. What a step raises comes from here or from its launch."""
RowsOf = Callable[[slice], Tensor]
_Start = Callable[[torch.device], OtherRanks]


class ModelRunner:
    """A loaded model on its device, with its KV cache.

    Raises WeightsError if the model is unusable, InvalidConfigurationError if a setting is.
    `warnings` are those that are logged while this is made: ranks do not repeat them. `start_ranks` starts the others
    where tensor_parallel_size is above 1.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        warnings: Collection[str] = (),
        start_ranks: StartRanks | None = None,
    ) -> None:
        num_threads, start = set_num_threads(config), None
        if config.tensor_parallel_size > 1:
            assert start_ranks is not None
            start = partial(start_ranks, config, warnings=warnings)
        with loading_threads(num_threads):
            self._load(config, num_threads, progress, start)
        _log_model(self.info)

    def _load(self, config: EngineConfig, num_threads: int, progress: Progress | None, start: _Start | None) -> None:
        share = Share(0, config.tensor_parallel_size)
        setup = set_up(config, share, num_threads)
        self.device, self._model, whole = setup.device, setup.model, setup.checkpoint.config
        backend, operations, products = setup.backend, setup.operations, setup.products
        sampler = choose_sampler(whole.vocab_size, max_sampled_rows(config), self.device)
        self._ranks = None if start is None else start(self.device)
        with torch.inference_mode():
            group = None if self._ranks is None else self._ranks.group
            linears, trial = linears_of(config, setup)
            self._decoder = Decoder(
                self._model, setup.stream(progress), backend, linears, group, operations, native_decoder, trial
            )
            self._cache, self.graphs, num_blocks, max_model_len = make_cache(
                config, self._model, self._decoder, backend, setup.dtype, self.device, num_threads, self._ranks, sampler
            )
        self._programs = program_steps(self._decoder, self._cache)
        self._chosen: Callable[[], Tensor] = partial(torch.empty, 0, dtype=torch.int64, device=self.device)
        """What the latest step chose."""
        self._step_work = StepWork(self._model)
        product: Product = (
            "native_coded" if setup.codes else product_of(self.device, setup.dtype, config.requantization)
        )
        self._in_team = product.startswith("native")
        self.choose_threads: Callable[[int], int] = partial(num_step_threads, max_threads=num_threads)
        """From the work of a step to the number of its threads."""
        self.choose: Choose | None = None if sampler is None else sampler.choose
        """What chooses the tokens; None: the fastest there is."""
        logits_of, sample = self._logits_of, ""
        if products.are_invariant:
            if self.device.type != "cpu":
                check_model(logits_of, config, whole.vocab_size, num_blocks, max_model_len)
            sample = sample_numbers(logits_of, whole.vocab_size, max_model_len, config.block_size)
        numbers = (self.device, setup.dtype, config, product, backend, operations, products, share.size)
        draws = "torch" if sampler is None else sampler.build
        causes = numeric_causes(setup.checkpoint.digest, whole, *numbers, self.graphs is not None, draws)
        sizes = self._cache, num_blocks, max_model_len
        self.info = describe(config, setup, share.size, product, *sizes, fingerprint(causes, sample))
        self._is_cpu = self.device.type == "cpu"

    @property
    def waits_in_launch(self) -> bool:
        """Whether `launch` waits for the device, in each layer, because the host starts the experts."""
        return self._decoder.host_starts_experts

    @property
    def host_counts(self) -> bool:
        """Whether the host counts tokens for penalties, so that it must know them all before a step is launched."""
        return self.choose is None

    def launch(self, step: StepInput) -> Collect:
        """Begin to compute the step's tokens, store their keys and values, and sample where it says so.

        A GPU computes steps in the order of their launches. Only the step that is launched next may have foreseen
        tokens of this one, and a step with prompt_logprobs or vectors is collected before the next launch. A CPU
        computes at once.
        """
        # Those of a pool would spin in the team's way, and in that of what starts a GPU's kernels.
        num_torch_threads = 1
        if self._is_cpu:
            num_threads = self.choose_threads(self._step_work.of(step))
            native.set_num_threads(num_threads)
            if self._programs is not None and self.choose is None and self.graphs is None:
                chosen, sampled, scores, vectors = self._programs.compute(step, self.info, self._chosen_ids)
                self._chosen = partial(torch.tensor, chosen, dtype=torch.int64)
                return partial(StepResult, sampled, scores, vectors)
            num_torch_threads = 1 if self._in_team else num_threads
        with torch_threads(num_torch_threads):  # the process may compute something else between steps
            collect = self._launch(step)
            if not self._is_cpu:
                return collect
            result = collect()
            return lambda: result

    @torch.inference_mode()
    def _launch(self, step: StepInput) -> Collect:
        pool: Callable[[], dict[int, array[float]]] = dict
        choose, scores = self.choose, dict[int, Callable[[], list[tuple[int, TokenLogprobs]]]]()
        if self.graphs is not None and step.decodes:
            logits: Tensor | None = self.graphs.logits(step.arrays, self._chosen())
            choose = self.graphs.choose or choose
        else:
            logits, logits_of, states_of = self._compute(step.arrays)
            scores = {prompt.sequence: partial(prompt_logprobs, logits_of, prompt) for prompt in step.prompts}
            if step.pooled:
                pool = partial(pool_all, states_of, step.pooled)
        sample = self._begin_sampling(logits, step, choose)
        return lambda: StepResult(sample(), {sequence: score() for sequence, score in scores.items()}, pool())

    def _compute(self, arrays: StepArrays) -> tuple[Tensor | None, RowsOf, RowsOf]:
        """Compute a step by all ranks; return the logits of its sampled rows, if any, and what gives those of any.

        The last of the three gives the states of any rows.
        """
        if self._programs is not None and self.graphs is None:
            return self._programs.logits(arrays, self._chosen_ids)
        on_host = arrays.as_numpy()
        with nullcontext() if self._ranks is None else self._ranks.step(on_host):
            inputs = model_input(on_host, self.device, arrays.states)
            token_ids_T = inputs.token_ids_T
            if on_host[0].min() < 0:
                token_ids_T = known_token_ids(token_ids_T, self._chosen())
            of_step = token_ids_T, inputs.positions_T, self._cache, inputs.metadata, inputs.sampled_R
            hidden, logits = self._decoder.step(*of_step)
        states = self._decoder.states
        return logits, lambda rows: self._decoder.logits(hidden[rows]), lambda rows: states(hidden[rows])

    def _chosen_ids(self) -> list[int]:
        """Wait for the tokens that the latest step chose."""
        token_ids: list[int] = self._chosen().tolist()
        return token_ids

    @torch.inference_mode()
    def _logits_of(self, arrays: StepArrays, rows: slice) -> Tensor:
        """Return the logits of these rows of a step."""
        return self._compute(arrays)[1](rows)

    def _begin_sampling(
        self, logits: Tensor | None, step: StepInput, choose: Choose | None
    ) -> Callable[[], SampledTokens]:
        """Have the device choose the tokens; what this returns waits for them."""
        if logits is None:
            return _no_tokens(self.device)
        chosen_R, finish = begin_sampling(logits, step.masked_positions(), self.info.eos_token_ids, choose)
        self._chosen = lambda: chosen_R
        return finish


def _no_tokens(device: torch.device) -> Callable[[], SampledTokens]:
    """Return what waits for a step that samples nothing, such as a part of a prompt.

    Without the wait the step would seem to take no time, and the host would run ahead of the device by a whole prompt.
    """
    wait = begin_wait(device)

    def finish() -> SampledTokens:
        wait()
        return SampledTokens((), ())

    return finish


def _log_model(info: EngineInfo) -> None:
    logger.debug(
        "model: dtype=%s device=%s attention=%s batch_invariant=%s fingerprint=%s",
        *(info.dtype, info.device, info.attention_backend, "yes" if info.batch_invariant else "no", info.fingerprint),
    )
