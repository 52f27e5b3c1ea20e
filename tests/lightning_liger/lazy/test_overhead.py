"""Host time of recording operations, as the number of Python and C functions called, which does not vary with load."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_liger.lazy.tensor import LazyTensor
from tests.lightning_liger.lazy.twin import LABELS, VOCAB_SIZE, Logits, Twin

MAX_CALLS = 200
"""About 30 us. Operations that PyTorch computes on the meta device in Python take hundreds to thousands of calls."""


def num_calls(function: Callable[[], Any]) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.float(),
        lambda x: x * 0.5,
        lambda x: x.tanh(),
        lambda x: x.log_softmax(-1),
        lambda x: x[:, :-1].view(-1, VOCAB_SIZE),
        lambda x: x + torch.zeros(VOCAB_SIZE, dtype=torch.bfloat16),
    ],
)
def test_recording_an_operation_takes_few_calls(operation: Callable[[Logits], Logits]) -> None:
    logits = Twin(torch.bfloat16).lazy
    operation(logits)  # names and signatures are looked up once
    assert num_calls(lambda: operation(logits)) <= MAX_CALLS


def test_loss_of_hugging_face_records_two_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=LazyTensor.recorded)
    monkeypatch.setattr(LazyTensor, "recorded", lambda *args, **kwargs: spy(*args, **kwargs))
    twin = Twin(torch.bfloat16)
    ForCausalLMLoss(twin.lazy, LABELS, VOCAB_SIZE).backward()
    assert (spy.call_count, twin.counters.num_materialized) == (2, 0)
