"""The step's tensors: every row's token, position and slot."""

from __future__ import annotations

import torch

from gptserve.engine.model.batch import ModelInput, known_token_ids, model_input
from gptserve.engine.model.layout import Span, lay_out


def inputs_of(*spans: Span) -> ModelInput:
    return model_input(lay_out(spans, 2).as_numpy(), torch.device("cpu"))


def test_rows_are_the_tokens_of_each_sequence() -> None:
    inputs = inputs_of(Span([11, 12, 13], 1, [7, 2, 5]), Span([22], 2, [9, 4], 1))
    assert inputs.token_ids_T.tolist() == [11, 12, 13, 22]
    assert inputs.positions_T.tolist() == [1, 2, 3, 2]
    assert inputs.sampled_R.tolist() == [3]
    metadata = inputs.metadata
    assert metadata.slots_T.tolist() == [15, 4, 5, 8]
    assert metadata.query_starts == (0, 3, 4)
    assert metadata.kv_lens == (4, 3)
    assert metadata.query_starts_S1.tolist() == [0, 3, 4]
    assert metadata.kv_lens_S.tolist() == [4, 3]
    assert metadata.block_tables_SN.tolist() == [[7, 2, 5], [9, 4, 0]]


def test_the_last_tokens_of_a_sequence_are_sampled() -> None:
    inputs = inputs_of(Span([12, 30, 31], 2, [7, 2, 5], 3), Span([20, 21], 0, [9], 1))
    assert inputs.token_ids_T.tolist() == [12, 30, 31, 20, 21]
    assert inputs.positions_T.tolist() == [2, 3, 4, 0, 1]
    assert inputs.sampled_R.tolist() == [0, 1, 2, 4]
    assert inputs.metadata.slots_T.tolist() == [4, 5, 10, 18, 19]
    assert inputs.metadata.kv_lens == (5, 2)


def test_a_single_token_is_a_single_row() -> None:
    inputs = inputs_of(Span([4], 1, [0], 1))
    assert inputs.token_ids_T.tolist() == [4]
    assert inputs.sampled_R.tolist() == [0]
    assert inputs.metadata.slots_T.tolist() == [1]
    assert inputs.metadata.query_starts == (0, 1)


def test_a_foreseen_token_is_the_one_that_its_row_of_the_step_before_chose() -> None:
    inputs = inputs_of(Span([~2], 1, [7], 1), Span([20, 21], 0, [9], 1), Span([~1], 1, [3], 1))
    found = known_token_ids(inputs.token_ids_T, torch.tensor([40, -1, 42, 43]))
    assert found.tolist() == [42, 20, 21, 0], "a row without a token gives one that counts for nothing"
