"""Operations of lazy logits against those of real logits: values, gradients, and what is and is not computed."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_liger import LazyLogits
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.tensor import LazyTensor
from tests.lightning_liger.lazy.twin import (
    BATCH_SIZE,
    LABELS,
    MASK,
    SEQ_LEN,
    TOKENS,
    VOCAB_SIZE,
    Logits,
    Twin,
    token_loss,
)
from tests.lightning_liger.tiny import TensorSizes

LONG = torch.arange(VOCAB_SIZE) % SEQ_LEN

FOLDS: dict[str, Callable[[Logits], Logits]] = {
    "times": lambda x: x * 0.3,
    "tensor_of_no_dimension_times": lambda x: torch.tensor(0.3, dtype=torch.float64) * x,
    "times_in_place": lambda x: x.mul_(0.3),
    "softcap_in_place": lambda x: x.div_(5).tanh_() * 5,
    "softcap_of_scaled_then_scaled": lambda x: torch.tanh(x * 1.5 / 5.0) * 5.0 / 0.7,
    "softcap_turned_over": lambda x: torch.tanh(x / 5.0) * -5.0,
    "to_another_tensor": lambda x: x.to(torch.zeros(1)),
    "to_a_copy": lambda x: x.to(torch.float32, non_blocking=True, copy=True),
    "clone": lambda x: x.clone(),
    "log_softmax_of_log_softmax": lambda x: F.log_softmax(x.log_softmax(-1).log_softmax(2), dim=-1),
    "view_with_the_vocabulary_inferred": lambda x: x.view(BATCH_SIZE * SEQ_LEN, -1),
    "view_as": lambda x: x.view_as(torch.empty(5, 2, VOCAB_SIZE)),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (5, 2)),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(dim=-2),
    "squeeze_all": lambda x: x[:1, None].squeeze(),
    "permute": lambda x: x.permute(1, 0, 2),
    "reshape_behind": lambda x: x.transpose(1, 2).unflatten(2, (5, 1)).reshape(2, VOCAB_SIZE, 5).transpose(1, 2),
    "index_behind": lambda x: x.transpose(1, 2)[1, :, None, 1:].movedim(0, -1),
    "narrow_names": lambda x: torch.narrow(x, dim=1, start=1, length=3),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([3, 0, 3])),
    "split_method": lambda x: x.split(split_size=3, dim=1)[1],
    "iteration": lambda x: list(x)[1],
    "reshape_of_as_many_tokens_as_classes": lambda x: x[:, LONG].view(2, VOCAB_SIZE, VOCAB_SIZE),
    "contiguous": lambda x: x[..., :-1, :].contiguous(),
    "part_of_the_vocabulary_and_tokens": lambda x: x[MASK, 4:29],
    "part_of_the_vocabulary_behind": lambda x: x.transpose(1, 2)[:, 4:29].transpose(1, 2),
    "part_of_the_vocabulary_in_steps": lambda x: x[:, 1, ::3],
    "classes": lambda x: x[..., [3, 4, 9]],
    "classes_of_a_row": lambda x: x[0, :, torch.tensor([3, -1])],
    "everything_at_once": lambda x: torch.tanh(x[..., :29].float()[:, :-1] / 4 / 5).flatten(0, 1) * 5,
}


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_folded_operation_gives_the_loss_and_gradients_of_real_logits(fold: Callable[[Logits], Logits]) -> None:
    twin = Twin()
    lazy, real = fold(twin.lazy), fold(twin.real)
    assert isinstance(lazy, LazyLogits)
    assert (lazy.shape, lazy.dtype) == (real.shape, real.dtype)
    lazy_loss, real_loss = token_loss(lazy), token_loss(real)
    torch.testing.assert_close(lazy_loss, real_loss, rtol=1e-5, atol=0)
    twin.assert_same_gradients(lazy_loss, real_loss)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (1, 0)
    with torch.no_grad():
        torch.testing.assert_close(lazy.materialize(), real, rtol=1e-5, atol=1e-5)


CASTS: dict[str, tuple[torch.dtype, Callable[[Logits], Logits]]] = {
    "upcast": (torch.bfloat16, lambda x: x.float()),
    "rounding_is_left_out": (torch.float32, lambda x: x.half().float()),
    "to_half": (torch.float32, lambda x: x.type(torch.half)),
    "of_float64": (torch.float64, lambda x: x.float()),
    "none": (torch.float64, lambda x: x),
}


@pytest.mark.parametrize(("dtype", "cast"), CASTS.values(), ids=CASTS)
def test_cast_is_folded(dtype: torch.dtype, cast: Callable[[Logits], Logits]) -> None:
    twin = Twin(dtype)
    lazy, real = cast(twin.lazy), cast(twin.real)
    assert lazy.dtype == real.dtype
    loss = token_loss(lazy)
    assert loss.dtype == torch.promote_types(lazy.dtype, torch.float32)
    # A rounding of the largest logit, which both round, in an order that may differ.
    torch.testing.assert_close(
        loss, token_loss(twin.real), rtol=max(torch.finfo(dtype).eps, 1e-5), atol=0, check_dtype=False
    )
    assert twin.counters.num_materialized == 0


CLASS_WEIGHT = torch.linspace(0.5, 2.0, VOCAB_SIZE)
CLASS_TARGETS = LABELS.clone()
CLASS_TARGETS[0, 1] = -100
TWO_CLASSES = torch.stack([LABELS, LABELS.flip(1)], -1)

LOSSES: dict[str, Callable[[Logits], Tensor]] = {
    "some_ignored": partial(token_loss, ignore_index=3),
    "weighted": partial(token_loss, weight=CLASS_WEIGHT, label_smoothing=0.2, ignore_index=9),
    "not_reduced": partial(token_loss, reduction="none"),
    "size_average": partial(token_loss, size_average=False),
    "reduce": partial(token_loss, reduce=False),
    "keywords": lambda x: F.cross_entropy(input=x.flatten(0, 1), target=LABELS.flatten()),
    "module": lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), LABELS.flatten()),
    "classes_second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "classes_second_of_four": lambda x: F.cross_entropy(x[:, None].movedim(-1, 1), LABELS[:, None], reduction="sum"),
    "classes_second_weighted": lambda x: nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=3)(x.mT, LABELS),
    "classes_only": lambda x: F.cross_entropy(x[0, 1], LABELS[0, 1]),
    "nll_functional": lambda x: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, VOCAB_SIZE), CLASS_TARGETS.view(-1)),
    "nll_modules": lambda x: nn.NLLLoss(reduction="sum")(nn.LogSoftmax(-1)(x).transpose(1, 2), CLASS_TARGETS),
    "cross_entropy_of_log_softmax": lambda x: F.cross_entropy(x.log_softmax(2).flatten(0, 1), LABELS.flatten()),
}

WITHOUT_LOSS: dict[str, Callable[[Logits], Any]] = {
    "log_probabilities": lambda x: x.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1),
    "log_probabilities_of_more": lambda x: x.log_softmax(-1).gather(-1, TWO_CLASSES),
    "log_probabilities_indexed": lambda x: x.log_softmax(-1).flatten(0, 1)[torch.arange(TOKENS), LABELS.flatten()],
    "logits_of_labels_capped": lambda x: (5 * torch.tanh(x * 0.3 / 5)).gather(-1, LABELS.unsqueeze(-1)),
    "logits_of_more_labels": lambda x: x.gather(-1, TWO_CLASSES),
    "logits_indexed": lambda x: x[torch.arange(2)[:, None], torch.arange(5), LABELS - VOCAB_SIZE],
    "selected_minus_logsumexp": lambda x: x.gather(-1, LABELS[..., None]).squeeze(-1) - torch.logsumexp(x, dim=-1),
    "logsumexp_keepdim": lambda x: torch.logsumexp(x, (2,), keepdim=True),
    "logsumexp_behind": lambda x: torch.special.logsumexp(x.transpose(1, 2), 1, True),
    "z_loss": lambda x: torch.logsumexp(x.float(), dim=-1).pow(2).mean(),
    "argmax_torch": lambda x: torch.argmax(x, dim=-1, keepdim=True),
    "argmax_of_equals": lambda x: x[..., [3, 3, 9, 9]].argmax(-1),
    "max": lambda x: tuple(x.max(dim=-1)),
    "min": lambda x: tuple(torch.min(x * -1, dim=2)),
    "amax": lambda x: x.amax(-1),
    "topk_behind": lambda x: tuple(torch.topk(x.mT, 2, dim=1, largest=False)),
    "sum": lambda x: x.sum(),
    "sum_of_a_part": lambda x: x[:, 1:, 4:29].sum((0, 2), keepdim=True),
    "mean_behind": lambda x: x.mT.mean(dim=1, dtype=torch.float64),
    "mean_of_log_probabilities": lambda x: x.log_softmax(-1).mean(-1, keepdim=True),
    "numel": lambda x: torch.tensor([torch.numel(x), x.is_floating_point(), torch.is_complex(x)]),
}


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("name", [*LOSSES, *WITHOUT_LOSS])
def test_function_of_logits_is_computed_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function: Callable[[Logits], Any] = {**LOSSES, **WITHOUT_LOSS}[name]
    twin = Twin(bias=len(name) % 2 == 0)
    real = function(twin.real)
    sizes = TensorSizes(monkeypatch)
    with warnings.catch_warnings(), sizes:
        warnings.filterwarnings("error", message=".*on an LM head's output")
        lazy = function(twin.lazy)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (int(name in LOSSES), 0)
    for got, want in zip(tensors_of(lazy), tensors_of(real), strict=True):
        assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, want.requires_grad)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if want.requires_grad:
            twin.assert_same_gradients(got, want, watch=sizes)
    assert 0 < sizes.largest < TOKENS * VOCAB_SIZE
    with torch.no_grad(), lazy_logits():
        torch.testing.assert_close(function(twin.lazy), function(twin.real), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", WITHOUT_LOSS.values(), ids=WITHOUT_LOSS)
def test_function_of_bfloat16_logits_has_the_dtype_of_the_real_one(function: Callable[[Logits], Any]) -> None:
    twin = Twin(torch.bfloat16)
    for got, want in zip(tensors_of(function(twin.lazy)), tensors_of(function(twin.real)), strict=True):
        assert got.dtype == want.dtype
        if want.is_floating_point():  # a rounding of logits, which both round, in an order that may differ
            torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["z_loss", "amax", "log_probabilities_of_more"])
def test_function_of_logits_keeps_none_of_them_for_backward(name: str) -> None:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    twin = Twin()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        WITHOUT_LOSS[name](twin.lazy)
    for parameter in twin.lazy_head.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < TOKENS * VOCAB_SIZE // 2


@pytest.mark.parametrize("label", [-100, -1, VOCAB_SIZE])
@pytest.mark.parametrize("normalize", [True, False])
def test_label_out_of_range_is_an_error_of_gather(label: int, normalize: bool) -> None:
    logits = Twin().lazy.log_softmax(-1) if normalize else Twin().lazy
    with pytest.raises((ValueError, IndexError), match="out of range"):
        logits.gather(-1, torch.full((BATCH_SIZE, SEQ_LEN, 1), label))


@pytest.mark.parametrize(
    "index",
    [
        (np.array([1, 0, 1]),),
        (np.array([], dtype=np.int64),),
        (slice(None), np.array([True, False, True, True, False])),
        (np.int64(1), slice(1, None)),
        (..., np.arange(3)),
        (range(1), range(2)),
        (torch.tensor(1),),
        (torch.tensor(0), 2),
        (slice(None), torch.tensor(-1)),
    ],
    ids=str,
)
def test_any_kind_of_index_gives_the_rows_of_real_logits(index: Any) -> None:
    twin = Twin()
    lazy, real = twin.lazy[index], twin.real[index]
    assert isinstance(lazy, LazyLogits)
    assert lazy.shape == real.shape
    torch.testing.assert_close(lazy.detach().materialize(), real.detach(), rtol=1e-5, atol=1e-5)


MAX_CALLS = 200
"""Of Python and C functions, whose number does not vary with load: about 30 us. Operations that PyTorch computes on the
meta device in Python take hundreds to thousands."""


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
        lambda x: x.log_softmax(-1),
        lambda x: x[:, :-1],
        lambda x: x.view(-1, VOCAB_SIZE),
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
