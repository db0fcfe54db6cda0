"""The step's tensors: every row's token, position and slot."""

from __future__ import annotations

import torch

from gptserve.engine.model.batch import known_token_ids, model_input
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.layout import build_arrays
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState


def scheduled(tokens: list[int], num_computed: int, num_tokens: int, block_ids: list[int]) -> ScheduledSequence:
    request = Request("r", tuple(tokens), SamplingParams(), seed=0)
    sequence = SequenceState(
        request=request, arrival=0, token_ids=tokens, num_computed=num_computed, block_ids=block_ids
    )
    return ScheduledSequence(sequence, num_tokens)


def test_rows_are_the_scheduled_tokens_of_each_sequence() -> None:
    batch = ScheduledBatch((scheduled([10, 11, 12, 13, 14], 1, 3, [7, 2, 5]), scheduled([20, 21, 22], 2, 1, [9, 4])))
    inputs = model_input(build_arrays(batch, 2), torch.device("cpu"))
    assert inputs.token_ids_T.tolist() == [11, 12, 13, 22]
    assert inputs.positions_T.tolist() == [1, 2, 3, 2]
    metadata = inputs.metadata
    assert metadata.slots_T.tolist() == [15, 4, 5, 8]
    assert metadata.query_starts == (0, 3, 4)
    assert metadata.kv_lens == (4, 3)
    assert metadata.query_starts_S1.tolist() == [0, 3, 4]
    assert metadata.kv_lens_S.tolist() == [4, 3]
    assert metadata.block_tables_SN.tolist() == [[7, 2, 5], [9, 4, 0]]


def test_a_draft_comes_after_the_known_tokens() -> None:
    drafted = ScheduledSequence(scheduled([10, 11, 12], 2, 1, [7, 2, 5]).sequence, 3, draft=(30, 31))
    inputs = model_input(
        build_arrays(ScheduledBatch((drafted, scheduled([20, 21], 0, 2, [9]))), 2), torch.device("cpu")
    )
    assert inputs.token_ids_T.tolist() == [12, 30, 31, 20, 21]
    assert inputs.positions_T.tolist() == [2, 3, 4, 0, 1]
    assert inputs.metadata.slots_T.tolist() == [4, 5, 10, 18, 19]
    assert inputs.metadata.kv_lens == (5, 2)


def test_a_single_token_is_a_single_row() -> None:
    inputs = model_input(build_arrays(ScheduledBatch((scheduled([3, 4], 1, 1, [0]),)), 2), torch.device("cpu"))
    assert inputs.token_ids_T.tolist() == [4]
    assert inputs.sampled_R.tolist() == [0]
    assert inputs.metadata.slots_T.tolist() == [1]
    assert inputs.metadata.query_starts == (0, 1)


def test_a_foreseen_token_is_the_one_that_its_row_of_the_step_before_chose() -> None:
    batch = ScheduledBatch(
        (scheduled([10, ~2], 1, 1, [7]), scheduled([20, 21], 0, 2, [9]), scheduled([5, ~1], 1, 1, [3]))
    )
    inputs = model_input(build_arrays(batch, 2), torch.device("cpu"))
    found = known_token_ids(inputs.token_ids_T, torch.tensor([40, -1, 42, 43]))
    assert found.tolist() == [42, 20, 21, 0], "a row without a token gives one that counts for nothing"
