"""Operations of lazy logits against those of real logits: values, gradients, and what is and is not computed."""

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from lightning_liger import LazyLogits
from lightning_liger.lazy.logits import lazy_logits
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
    "nothing": lambda x: x,
    "times": lambda x: x * 0.3,
    "number_times": lambda x: 3 * x,
    "divided": lambda x: x / 7,
    "mul_method": lambda x: x.mul(0.3),
    "div_method": lambda x: x.div(7).multiply(2),
    "times_tensor_of_no_dimension": lambda x: x * torch.tensor(0.3),
    "tensor_of_no_dimension_times": lambda x: torch.tensor(0.3, dtype=torch.float64) * x,
    "divided_by_tensor_of_one_element": lambda x: x / torch.tensor([7]),
    "times_numpy_number": lambda x: np.float64(0.3) * x * np.float32(2),
    "times_in_place": lambda x: x.mul_(0.3),
    "operators_in_place": lambda x: operator.itruediv(operator.imul(x, 3), torch.tensor(0.7)),
    "softcap_in_place": lambda x: x.div_(5).tanh_() * 5,
    "softcap_module": lambda x: nn.Tanh()(x / 5.0) * 5.0,
    "softcap_functional": lambda x: F.tanh(x / 5.0).mul(5.0),
    "softcap_tensor": lambda x: torch.tensor(5.0) * torch.tanh(x / torch.tensor(5.0)),
    "times_twice": lambda x: x * 0.5 * 0.25,
    "torch_mul": lambda x: torch.mul(x, 0.3),
    "torch_div": lambda x: torch.div(x, 7.0),
    "softcap_method": lambda x: (x / 5.0).tanh() * 5.0,
    "softcap_function": lambda x: torch.tanh(x / 5.0) * 5.0,
    "softcap_function_by_keyword": lambda x: torch.tanh(input=x / 5.0) * 5.0,
    "softcap_number_first": lambda x: 5.0 * torch.tanh(torch.div(x, 5.0)),
    "softcap_of_scaled_then_scaled": lambda x: torch.tanh(x * 1.5 / 5.0) * 5.0 / 0.7,
    "softcap_turned_over": lambda x: torch.tanh(x / 5.0) * -5.0,
    "softcap_gemma2": lambda x: (torch.tanh(x[:, -3:, :] / 30.0) * 30.0).float(),
    "float": lambda x: x.float(),
    "to_dtype": lambda x: x.to(torch.float32),
    "to_dtype_by_keyword": lambda x: x.to(dtype=torch.float32),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
    "to_another_tensor": lambda x: x.to(torch.zeros(1)),
    "to_a_copy": lambda x: x.to(torch.float32, non_blocking=True, copy=True),
    "clone": lambda x: x.clone(),
    "log_softmax_of_log_softmax": lambda x: F.log_softmax(x.log_softmax(-1).log_softmax(2), dim=-1),
    "to_same_device": lambda x: x.to("cpu"),
    "to_same_device_and_dtype": lambda x: x.to(torch.device("cpu"), torch.float32),
    "view": lambda x: x.view(-1, VOCAB_SIZE),
    "view_of_a_tuple": lambda x: x.view((SEQ_LEN, BATCH_SIZE, VOCAB_SIZE)),
    "view_with_the_vocabulary_inferred": lambda x: x.view(BATCH_SIZE * SEQ_LEN, -1),
    "reshape": lambda x: x.reshape(-1, 1, VOCAB_SIZE),
    "torch_reshape": lambda x: torch.reshape(x, (-1, VOCAB_SIZE)),
    "torch_reshape_by_keyword": lambda x: torch.reshape(x, shape=(-1, VOCAB_SIZE)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten_to_minus_2": lambda x: x.flatten(0, -2),
    "torch_flatten": lambda x: torch.flatten(x, 0, 1),
    "view_as": lambda x: x.view_as(torch.empty(5, 2, VOCAB_SIZE)),
    "reshape_as": lambda x: x.reshape_as(torch.empty(10, VOCAB_SIZE)),
    "flatten_names": lambda x: torch.flatten(x, start_dim=0, end_dim=1),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (5, 2)),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(dim=-2),
    "unsqueeze_behind_and_back": lambda x: x.unsqueeze(-1).squeeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze_all": lambda x: x[:1, None].squeeze(),
    "squeeze_the_vocabulary": lambda x: x.squeeze(-1),
    "transpose_tokens": lambda x: x.transpose(0, 1),
    "transpose_there_and_back": lambda x: x.transpose(1, 2).contiguous().transpose(-1, -2),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "permute": lambda x: x.permute(1, 0, 2),
    "movedim": lambda x: torch.movedim(x, 0, 1),
    "matrix_transpose_twice": lambda x: x.mT.mT,
    "reshape_behind": lambda x: x.transpose(1, 2).unflatten(2, (5, 1)).reshape(2, VOCAB_SIZE, 5).transpose(1, 2),
    "index_behind": lambda x: x.transpose(1, 2)[1, :, None, 1:].movedim(0, -1),
    "select_behind": lambda x: x.transpose(1, 2).select(2, 3),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "narrow_names": lambda x: torch.narrow(x, dim=1, start=1, length=3),
    "select": lambda x: x.select(1, 2),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([3, 0, 3])),
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: torch.split(x, 3, dim=1)[1],
    "split_method": lambda x: x.split(split_size=3, dim=1)[1],
    "permute_of_a_tuple": lambda x: torch.permute(x, (1, 0, 2)),
    "split_sizes": lambda x: x.flatten(0, 1).split([3, 7])[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "tensor_split": lambda x: x.tensor_split(3, dim=1)[1],
    "iteration": lambda x: list(x)[1],
    "reshape_of_as_many_tokens_as_classes": lambda x: x[:, LONG].view(2, VOCAB_SIZE, VOCAB_SIZE),
    "contiguous": lambda x: x[..., :-1, :].contiguous(),
    "all_but_the_last_token": lambda x: x[..., :-1, :],
    "all_but_the_last_token_short": lambda x: x[:, :-1],
    "all_but_the_first_token": lambda x: x[..., 1:, :],
    "row": lambda x: x[1],
    "last_token": lambda x: x[:, -1],
    "last_token_with_the_vocabulary": lambda x: x[:, -1, :],
    "boolean_mask": lambda x: x[MASK],
    "boolean_mask_with_the_vocabulary": lambda x: x[MASK, :],
    "index_tensor": lambda x: x[:, torch.tensor([3, 0])],
    "index_list": lambda x: x[:, [3, 0]],
    "index_tuple": lambda x: x[(0, 1), 1:],
    "two_index_tensors": lambda x: x[torch.tensor([0, 1]), torch.tensor([4, 2])],
    "new_axis": lambda x: x[None],
    "new_axis_inside": lambda x: x[:, None, :, :],
    "trailing_ellipsis": lambda x: x[0, ...],
    "whole_vocabulary": lambda x: x[..., :],
    "part_of_the_vocabulary": lambda x: x[..., :29],
    "part_of_the_vocabulary_and_tokens": lambda x: x[MASK, 4:29],
    "part_of_the_vocabulary_narrow": lambda x: x.narrow(-1, 4, 25),
    "part_of_the_vocabulary_narrow_names": lambda x: x.narrow(dim=2, start=4, length=25),
    "part_of_the_vocabulary_behind": lambda x: x.transpose(1, 2)[:, 4:29].transpose(1, 2),
    "part_of_the_vocabulary_in_steps": lambda x: x[:, 1, ::3],
    "classes": lambda x: x[..., [3, 4, 9]],
    "classes_of_a_row": lambda x: x[0, :, torch.tensor([3, -1])],
    "classes_behind": lambda x: x.transpose(1, 2)[:, torch.arange(VOCAB_SIZE) > 9].mT,
    "index_select_classes": lambda x: x.index_select(-1, torch.tensor([3, 4, 9])),
    "true": lambda x: x[True],
    "numpy_mask": lambda x: x[MASK.numpy()],
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


def test_upcast_of_bfloat16_logits_is_folded() -> None:
    twin = Twin(torch.bfloat16)
    lazy, real = twin.lazy.float(), twin.real.float()
    assert (lazy.dtype, twin.lazy.dtype) == (torch.float32, torch.bfloat16)
    # A rounding of the largest logit, which both round, in an order that may differ.
    torch.testing.assert_close(token_loss(lazy), token_loss(real), rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    assert token_loss(lazy).dtype == torch.float32
    assert twin.counters.num_materialized == 0


@pytest.mark.parametrize(
    "cast",
    [lambda x: x.bfloat16(), lambda x: x.half().float(), lambda x: x.to(torch.bfloat16), lambda x: x.type(torch.half)],
)
def test_rounding_of_float32_logits_is_left_out(cast: Callable[[Logits], Logits]) -> None:
    twin = Twin()
    lazy, real = cast(twin.lazy), cast(twin.real)
    assert lazy.dtype == real.dtype
    torch.testing.assert_close(token_loss(lazy), token_loss(twin.real), rtol=1e-5, atol=0)
    assert twin.counters.num_materialized == 0


def test_loss_of_float64_logits_that_were_cast_is_float32() -> None:
    twin = Twin(torch.float64)
    lazy_loss, real_loss = token_loss(twin.lazy.float()), token_loss(twin.real.float())
    assert lazy_loss.dtype == real_loss.dtype == torch.float32
    assert token_loss(twin.lazy).dtype == torch.float64
    torch.testing.assert_close(lazy_loss, real_loss, rtol=1e-5, atol=0)


def test_softcap_is_folded_where_a_tensor_could_not_be_written_to() -> None:
    twin = Twin()
    lazy, real = twin.lazy, torch.tanh(twin.real / 5) * 5
    assert lazy.div_(5).tanh_().mul_(5) is lazy  # of real logits PyTorch's tanh has lost its own output here
    lazy_loss, real_loss = token_loss(lazy), token_loss(real)
    torch.testing.assert_close(lazy_loss, real_loss, rtol=1e-5, atol=0)
    twin.assert_same_gradients(lazy_loss, real_loss)
    assert twin.counters.num_materialized == 0


def test_detached_logits_have_the_loss_but_no_graph() -> None:
    twin = Twin()
    for detached in (twin.lazy.detach(), torch.detach(twin.lazy)):
        assert isinstance(detached, LazyLogits)
        loss = token_loss(detached)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, token_loss(twin.real).detach(), rtol=1e-5, atol=0)


CLASS_WEIGHT = torch.linspace(0.5, 2.0, VOCAB_SIZE)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"weight": CLASS_WEIGHT},
        {"weight": CLASS_WEIGHT, "label_smoothing": 0.2, "ignore_index": 9},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"size_average": False},
        {"reduce": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_cross_entropy_takes_the_arguments_of_the_real_one(kwargs: dict[str, Any]) -> None:
    twin = Twin()
    lazy_loss, real_loss = token_loss(twin.lazy, **kwargs), token_loss(twin.real, **kwargs)
    torch.testing.assert_close(lazy_loss, real_loss, rtol=1e-5, atol=1e-6)
    twin.assert_same_gradients(lazy_loss, real_loss)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (1, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: F.cross_entropy(input=x, target=y),
        lambda x, y: F.cross_entropy(x, target=y),
        lambda x, y: nn.CrossEntropyLoss()(x, y),
        lambda x, y: nn.functional.cross_entropy(x[0], y[0]),
    ],
    ids=["keywords", "target_keyword", "module", "one_token"],
)
def test_cross_entropy_is_fused_however_it_is_called(call: Callable[[Logits, Tensor], Tensor]) -> None:
    twin = Twin()
    labels = LABELS.flatten()
    lazy_loss, real_loss = call(twin.lazy.flatten(0, 1), labels), call(twin.real.flatten(0, 1), labels)
    torch.testing.assert_close(lazy_loss, real_loss, rtol=1e-5, atol=0)
    twin.assert_same_gradients(lazy_loss, real_loss)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (1, 0)


def test_cross_entropy_method_returns_predictions_and_token_losses() -> None:
    twin = Twin()
    labels = LABELS.clone()
    labels[0, :2] = -100
    loss, stats = twin.lazy.cross_entropy(labels, return_stats=True)
    real = twin.real
    torch.testing.assert_close(loss, F.cross_entropy(real.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=0)
    kept = labels != -100
    assert torch.equal(stats.predictions[kept], real.argmax(-1)[kept])


def test_counters_count_the_bytes_that_were_not_needed() -> None:
    twin = Twin()
    token_loss(twin.lazy)
    token_loss(twin.lazy * 2.0)
    num_tokens, element_size = BATCH_SIZE * SEQ_LEN, 4
    assert twin.counters.num_losses == 2
    # Two chunks of half of the tokens, one of them at a time.
    assert twin.counters.bytes_avoided == 2 * (num_tokens // 2) * VOCAB_SIZE * element_size


CLASS_TARGETS = LABELS.clone()
CLASS_TARGETS[0, 1] = -100
TWO_CLASSES = torch.stack([LABELS, LABELS.flip(1)], -1)


def z_loss(x: Logits) -> Tensor:
    return torch.logsumexp(x.float(), dim=-1).pow(2).mean()


def entropy(x: Logits) -> Tensor:
    log_probs = x.log_softmax(-1)
    return -(torch.exp(log_probs) * log_probs).sum(-1)


def smoothed_loss(x: Logits) -> Tensor:
    """The terms of transformers' ``LabelSmoother``."""
    log_probs = -F.log_softmax(x, dim=-1)
    nll_loss = log_probs.gather(dim=-1, index=LABELS.unsqueeze(-1))
    return 0.9 * nll_loss + 0.1 / VOCAB_SIZE * log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)


TEACHER = torch.rand(BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).softmax(-1)
ADVANTAGES = torch.linspace(-1.0, 1.0, TOKENS).view(BATCH_SIZE, SEQ_LEN, 1)


LOSSES: dict[str, Callable[[Logits], Tensor]] = {
    "classes_second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "classes_second_permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1).contiguous(), CLASS_TARGETS),
    "classes_second_matrix_transpose": lambda x: F.cross_entropy(x.mT, LABELS, reduction="none"),
    "classes_second_of_four": lambda x: F.cross_entropy(x[:, None].movedim(-1, 1), LABELS[:, None], reduction="sum"),
    "classes_second_weighted": lambda x: nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=3)(x.swapdims(1, 2), LABELS),
    "classes_only": lambda x: F.cross_entropy(x[0, 1], LABELS[0, 1]),
    "nll_functional": lambda x: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, VOCAB_SIZE), CLASS_TARGETS.view(-1)),
    "nll_method": lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(-1), LABELS.view(-1), CLASS_WEIGHT, ignore_index=3),
    "nll_torch": lambda x: F.nll_loss(torch.log_softmax(x, -1).mT, LABELS, reduction="none"),
    "nll_modules": lambda x: nn.NLLLoss(reduction="sum")(nn.LogSoftmax(-1)(x).transpose(1, 2), CLASS_TARGETS),
    "nll_dtype": lambda x: F.nll_loss(F.log_softmax(x[0], dim=1, dtype=torch.float32), LABELS[0]),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "entropy_of_log_softmax": lambda x: (lambda log: -(log.exp() * log).sum(-1))(F.log_softmax(x / 0.7, -1)),
    "entropy_of_logits": lambda x: torch.logsumexp(x, -1) - torch.sum(F.softmax(x, dim=-1) * x, dim=-1),
    "entropy_of_some_tokens": lambda x: (-x.softmax(-1) * x.log_softmax(-1))[MASK].sum(),
    "entropy_of_a_distribution": lambda x: Categorical(logits=x).entropy(),
    "cross_entropy_of_log_softmax": lambda x: F.cross_entropy(x.log_softmax(2).flatten(0, 1), LABELS.flatten()),
}

WITHOUT_LOSS: dict[str, Callable[[Logits], Any]] = {
    "log_probabilities": lambda x: x.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1),
    "log_probabilities_torch": lambda x: torch.gather(F.log_softmax(x * 0.5, -1), 2, LABELS[..., None]),
    "log_probabilities_along_dim": lambda x: torch.take_along_dim(x.log_softmax(-1), LABELS[..., None], dim=-1),
    "log_probabilities_behind": lambda x: x.mT.log_softmax(1).gather(1, LABELS.unsqueeze(1)),
    "log_probabilities_of_more": lambda x: x.log_softmax(-1).gather(-1, TWO_CLASSES),
    "log_probabilities_of_one_token": lambda x: x[0, 2].log_softmax(-1).gather(0, torch.tensor([5])),
    "log_probabilities_indexed": lambda x: x.log_softmax(-1).flatten(0, 1)[torch.arange(TOKENS), LABELS.flatten()],
    "logits_of_labels": lambda x: torch.gather(x, dim=-1, index=LABELS.unsqueeze(-1)),
    "logits_of_labels_capped": lambda x: (5 * torch.tanh(x * 0.3 / 5)).gather(-1, LABELS.unsqueeze(-1)),
    "logits_of_more_labels": lambda x: x.gather(-1, TWO_CLASSES),
    "logits_indexed": lambda x: x[torch.arange(2)[:, None], torch.arange(5), LABELS - VOCAB_SIZE],
    "selected_minus_logsumexp": lambda x: x.gather(-1, LABELS[..., None]).squeeze(-1) - torch.logsumexp(x, dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp_keepdim": lambda x: torch.logsumexp(x, (2,), keepdim=True),
    "logsumexp_behind": lambda x: torch.special.logsumexp(x.transpose(1, 2), 1, True),
    "logsumexp_capped": lambda x: torch.logsumexp(torch.tanh(x / 5) * 5, dim=-1),
    "logsumexp_of_a_part": lambda x: torch.logsumexp(x[:, 1:, :29], -1),
    "z_loss": z_loss,
    "argmax": lambda x: x.argmax(-1),
    "argmax_torch": lambda x: torch.argmax(x, dim=-1, keepdim=True),
    "argmax_behind": lambda x: x.mT.argmax(1),
    "argmax_of_equals": lambda x: x[..., [3, 3, 9, 9]].argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "max": lambda x: tuple(x.max(dim=-1)),
    "max_names": lambda x: (torch.max(x, -1).values, torch.max(x, -1, keepdim=True).indices),
    "min": lambda x: tuple(torch.min(x * -1, dim=2)),
    "amax": lambda x: x.amax(-1),
    "topk": lambda x: tuple(x.topk(3)),
    "topk_behind": lambda x: tuple(torch.topk(x.mT, 2, dim=1, largest=False)),
    "topk_names": lambda x: (x.topk(k=3, dim=-1).values, torch.topk(x, k=3).indices),
    "one_token": lambda x: x[0, -1].argmax(-1),
    "sum": lambda x: x.sum(),
    "sum_of_a_part": lambda x: x[:, 1:, 4:29].sum((0, 2), keepdim=True),
    "sum_capped": lambda x: (5 * torch.tanh(x / 5)).sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean_of_all": lambda x: (x * 0.5)[:1].mean(),
    "mean_behind": lambda x: x.mT.mean(dim=1, dtype=torch.float64),
    "mean_of_log_probabilities": lambda x: x.log_softmax(-1).mean(-1, keepdim=True),
    "label_smoothing_of_transformers": smoothed_loss,
    "softmax_squared": lambda x: (x.softmax(-1) * x.softmax(-1)).sum(-1),
    "softmax_squared_twice": lambda x: (lambda p: p * p)((x * 2).softmax(-1))[:, 1:].sum(),
    "softmax_of_labels": lambda x: F.softmax(x, dim=-1).gather(-1, LABELS[..., None]),
    "log_softmax_times_a_number": lambda x: (2.0 * x.log_softmax(-1) + 1.0).sum(-1) + (x.log_softmax(-1) / 3).sum(),
    "softmax_max": lambda x: torch.softmax(x, -1).max(-1).values,
    "softmax_topk": lambda x: tuple(x.softmax(-1, dtype=torch.float64).topk(2)),
    "softmax_logsumexp": lambda x: x.softmax(-1).logsumexp(-1),
    "softmax_log": lambda x: x.softmax(-1).log().flatten(0, 1)[torch.arange(TOKENS), LABELS.flatten()],
    "softmax_times_weights": lambda x: (CLASS_WEIGHT * x.softmax(-1) / 2)[MASK].sum(-1),
    "softmax_times_learned": lambda x: (x.softmax(-1) * torch.tensor([2.0]) + torch.ones(1, 1)).sum(-1),
    "softmax_times_advantages": lambda x: (x.log_softmax(-1) * ADVANTAGES).gather(-1, LABELS[..., None]),
    "nan_check": lambda x: (x == x).all(-1),
    "rows": lambda x: torch.stack([(row.exp() * row.exp()).sum(-1) for row in x.log_softmax(-1)]),
    "logaddexp": lambda x: torch.logaddexp(x.log_softmax(-1), (x * 2).log_softmax(-1)).sum(-1),
    "minus_maximum": lambda x: (x - x.detach().amax(-1, keepdim=True)).exp().log().sum(-1),
    "kl_div_of_one_model": lambda x: F.kl_div(x.log_softmax(-1), (x * 2).softmax(-1), reduction="sum"),
    "numel": lambda x: torch.tensor([torch.numel(x), x.is_floating_point(), torch.is_complex(x)]),
}


OTHERS: dict[str, Callable[[Logits], Any]] = {
    "entropy_in_chunks": lambda x: torch.cat([entropy(chunk) for chunk in x.reshape(-1, VOCAB_SIZE).split(3)]),
    "log_probabilities_of_a_distribution": lambda x: Categorical(logits=x).log_prob(LABELS),
    "softmax_minus_whole_tensor": lambda x: ((x.softmax(-1) - TEACHER) * (TEACHER - x.softmax(-1))).sum(-1),
    "kl_div_of_a_real_tensor": lambda x: F.kl_div(x.log_softmax(-1), TEACHER, reduction="batchmean"),
    "kl_div_to_a_real_tensor": lambda x: F.kl_div(TEACHER.log(), x.log_softmax(-1), log_target=True),
    "kl_div_to_real_probabilities": lambda x: F.kl_div(TEACHER.log(), x.softmax(-1), reduction="none")[MASK].sum(),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_function_of_several_losses_or_of_tensors_as_large_as_logits_materializes_none(
    function: Callable[[Logits], Tensor],
) -> None:
    twin = Twin()
    got, want = function(twin.lazy), function(twin.real)
    assert twin.counters.num_materialized == 0
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    twin.assert_same_gradients(got, want)


@pytest.mark.parametrize("name", ["entropy", "entropy_of_logits", "entropy_of_a_distribution"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_entropy_without_gradients_is_fused(name: str, mode: Callable[[], Any]) -> None:
    twin = Twin()
    lazy, real = twin.lazy, twin.real
    with mode():
        torch.testing.assert_close(LOSSES[name](lazy), LOSSES[name](real), rtol=1e-5, atol=1e-5)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (1, 0)


def constant_normalizer(x: Logits) -> Tensor:
    with torch.no_grad():
        normalizer = x.logsumexp(-1, keepdim=True)
    return (x - normalizer).gather(-1, LABELS[..., None])


def changed_normalizer(x: Logits) -> Tensor:
    normalizer = x.logsumexp(-1, keepdim=True).detach()
    normalizer += 1.0
    return (x - normalizer).exp().sum(-1)


GRADIENTS: dict[str, Callable[[Logits], Tensor]] = {
    "detached_probabilities": lambda x: -(x.softmax(-1).detach() * x.log_softmax(-1)).sum(-1),
    "detached_logarithms": lambda x: (x.softmax(-1) * x.detach().log_softmax(-1)).sum(-1),
    "detached_logits": lambda x: x.logsumexp(-1) - 2 * (x.detach().softmax(-1) * x).sum(-1),
    "detached_target": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1) + 1e-3, reduction="sum"),
    "divergence_from_detached": lambda x: F.kl_div((2 * x).log_softmax(-1), x.detach().softmax(-1), reduction="sum"),
    "divergence_to_detached": lambda x: F.kl_div((2 * x).detach().log_softmax(-1), x.softmax(-1), reduction="sum"),
    "constant_normalizer": constant_normalizer,
    "changed_normalizer": changed_normalizer,
    "other_scale": lambda x: (x.softmax(-1) * (x * 2).log_softmax(-1)).sum(-1),
    "other_tokens": lambda x: (x[:, 1:].softmax(-1) * x[:, :-1].log_softmax(-1)).sum(-1),
    "weights_that_do_not_add_up": lambda x: mixture_loss(x, 0.3, 0.6),
    "weights_of_other_shares": lambda x: mixture_loss(x, 0.7, 0.3),
    "weights_of_one_distribution": lambda x: mixture_loss(x, 0.3, 0.7, swapped=True),
}


def mixture_loss(x: Logits, first: float, second: float, swapped: bool = False) -> Tensor:
    """Nearly a Jensen-Shannon divergence."""
    student, teacher = x.log_softmax(-1), (0.3 * x.detach()).log_softmax(-1)
    other = student if swapped else teacher
    mixture = torch.logsumexp(torch.stack([student + math.log(0.7), other + torch.tensor(0.3).log()]), dim=0)
    losses = [F.kl_div(mixture, each, reduction="none", log_target=True) for each in (teacher, student)]
    return (torch.tensor(first) * losses[0] + torch.tensor(second) * losses[1])[MASK].sum()


@pytest.mark.parametrize("function", GRADIENTS.values(), ids=GRADIENTS)
def test_gradient_that_only_a_part_has_is_not_taken_for_that_of_a_loss(function: Callable[[Logits], Tensor]) -> None:
    twin = Twin()
    got, want = function(twin.lazy), function(twin.real)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    twin.assert_same_gradients(got, want)
    assert twin.counters.num_materialized == 0


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    ("num_losses", "function"),
    [
        *(pytest.param(1, function, id=name) for name, function in LOSSES.items()),
        *(pytest.param(0, function, id=name) for name, function in WITHOUT_LOSS.items()),
    ],
)
def test_function_of_logits_is_computed_without_them(
    num_losses: int, function: Callable[[Logits], Any], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What gets no gradient is read from the values of all tokens where these take no more memory than a chunk.
    is_detached = function is WITHOUT_LOSS["minus_maximum"]
    twin = Twin(bias=bias, chunk_bytes=4 * VOCAB_SIZE * TOKENS - 1 if is_detached else None)
    real = function(twin.real)
    sizes = TensorSizes(monkeypatch)
    with warnings.catch_warnings(), sizes:
        warnings.simplefilter("error")
        lazy = function(twin.lazy)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (num_losses, 0)
    for got, want in zip(tensors_of(lazy), tensors_of(real), strict=True):
        assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, want.requires_grad)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if want.requires_grad:
            twin.assert_same_gradients(got, want, watch=sizes)
    assert 0 < sizes.largest < TOKENS * VOCAB_SIZE
    with torch.no_grad(), lazy_logits():
        torch.testing.assert_close(function(twin.lazy), function(twin.real), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["z_loss", "amax", "log_probabilities_of_more", "max"])
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


@pytest.mark.parametrize("function", WITHOUT_LOSS.values(), ids=WITHOUT_LOSS)
def test_function_of_bfloat16_logits_has_the_dtype_of_the_real_one(function: Callable[[Logits], Any]) -> None:
    twin = Twin(torch.bfloat16)
    lazy, real = function(twin.lazy), function(twin.real)
    for got, want in zip(tensors_of(lazy), tensors_of(real), strict=True):
        assert got.dtype == want.dtype
        if want.is_floating_point():  # a rounding of logits, which both round, in an order that may differ
            torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * float(want.abs().max()))


@pytest.mark.parametrize("label", [-100, -1, VOCAB_SIZE])
@pytest.mark.parametrize("normalize", [True, False])
def test_label_out_of_range_is_an_error_of_gather(label: int, normalize: bool) -> None:
    logits = Twin().lazy.log_softmax(-1) if normalize else Twin().lazy
    with pytest.raises((ValueError, IndexError), match="out of range"):
        logits.gather(-1, torch.full((BATCH_SIZE, SEQ_LEN, 1), label))


@pytest.mark.parametrize(
    "index",
    [
        np.array([1, 0, 1]),
        np.array([], dtype=np.int64),
        (slice(None), np.array([True, False, True, True, False])),
        (np.int64(1), slice(1, None)),
        (..., np.arange(3)),
        (range(1), range(2)),
    ],
    ids=str,
)
def test_index_of_numpy_or_python_gives_the_rows_of_real_logits(index: Any) -> None:
    twin = Twin()
    lazy, real = twin.lazy[index], twin.real[index]
    assert isinstance(lazy, LazyLogits)
    assert lazy.shape == real.shape
    torch.testing.assert_close(lazy.detach().materialize(), real.detach(), rtol=1e-5, atol=1e-5)
