"""What ranks tell each other arrives as it was sent, without pickles."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest

from gptserve.engine.parallel.messages import (
    Cache,
    Failed,
    Finding,
    Loaded,
    Memory,
    Message,
    Step,
    decode,
    encode,
    receive,
    send,
)


@pytest.mark.parametrize(
    "message",
    [
        Loaded(("slow", "è"), "abc"),
        Loaded(()),
        Memory(2**40, 0),
        Cache(7, 1024, has_graphs=True),
        Finding(None),
        Finding("no graphs"),
        Failed("why"),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        send(ours, message)
        assert receive(theirs) == message


def test_arrays_keep_their_types_shapes_and_bits_and_can_be_written_to() -> None:
    arrays = (
        np.arange(5, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(3, 2)[:, 1:],
        np.zeros((0, 4), np.float32),
        np.array(np.nan, np.float32),
        np.array([True, False, True]),
    )
    step = decode(encode(Step(arrays, None, 3, 2)))

    assert isinstance(step, Step)
    assert (step.graph_size, step.num_torch_threads, step.num_threads) == (None, 3, 2)
    for got, sent in zip(step.arrays, arrays, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
        assert got.flags.writeable
        assert got.flags.aligned


def test_a_pickle_is_not_read() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whichever part of it is no JSON
        decode(pickle.dumps(Finding(None)))
