"""Host time of recording operations, as the number of Python and C functions called, which does not vary with load."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
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
        pytest.param(lambda x: x.float(), id="cast"),
        pytest.param(lambda x: x * 0.5, id="times"),
        pytest.param(lambda x: x.tanh(), id="tanh"),
        pytest.param(lambda x: x.log_softmax(-1), id="log_softmax"),
        pytest.param(lambda x: x[:, :-1], id="slice"),
        pytest.param(lambda x: x.view(-1, VOCAB_SIZE), id="view"),
        pytest.param(lambda x: x.transpose(1, 2), id="transpose"),
        pytest.param(lambda x: x + torch.zeros(VOCAB_SIZE, dtype=torch.bfloat16), id="bias"),
    ],
)
def test_recording_an_operation_takes_few_calls(operation: Callable[[Logits], Logits]) -> None:
    logits = Twin(torch.bfloat16).lazy
    operation(logits)  # names and signatures are looked up once
    assert num_calls(lambda: operation(logits)) <= MAX_CALLS


def test_loss_of_hugging_face_records_two_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def spy(self: LazyTensor, twin: Tensor, **changes: Any) -> Any:
        recorded.append(changes)
        return original(self, twin, **changes)

    original = LazyTensor.recorded
    monkeypatch.setattr(LazyTensor, "recorded", spy)
    twin = Twin(torch.bfloat16)
    ForCausalLMLoss(twin.lazy, LABELS, VOCAB_SIZE).backward()
    assert len(recorded) == 2
    assert twin.counters.num_materialized == 0
