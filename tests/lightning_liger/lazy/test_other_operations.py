"""Operations that materialize lazy logits: once, with real values and gradients, and a warning that says where."""

import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger.lazy.logits import lazy_logits
from tests.lightning_liger.lazy.twin import BATCH_SIZE, LABELS, MASK, SEQ_LEN, VOCAB_SIZE, Logits, Twin, token_loss


def overwritten_rows(x: Logits) -> Tensor:
    x[MASK] = 0.5
    return F.cross_entropy(x.flatten(0, 1), LABELS.flatten())


def gradient_of_logits(x: Logits) -> Tensor:
    x.retain_grad()
    F.cross_entropy(x[:, 1:].flatten(0, 1), LABELS[:, 1:].flatten()).backward(retain_graph=True)
    return x.grad


def loss_over_the_second_dimension(x: Logits) -> Tensor:
    """PyTorch's classes are in dimension 1: here the sequence, as far as ``F.cross_entropy`` knows."""
    return F.cross_entropy(x, torch.arange(VOCAB_SIZE).repeat(BATCH_SIZE, 1) % SEQ_LEN)


TEACHER = torch.rand(BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).softmax(-1)

OPERATIONS: dict[str, tuple[str, Callable[[Logits], Any]]] = {
    "log_softmax_over_tokens": ("log_softmax", lambda x: F.log_softmax(x, dim=1)),
    "divergence": ("kl_div", lambda x: F.kl_div((2 * x).log_softmax(-1), TEACHER, reduction="sum")),
    "log_softmax_of_a_part": ("getitem", lambda x: x.log_softmax(-1)[..., 3:]),
    "gather_of_some_tokens": ("gather", lambda x: x.gather(-1, LABELS[:, :2, None])),
    "times_tensor": ("mul", lambda x: x * torch.full((VOCAB_SIZE,), 2.0)),
    "new_axis_behind_the_vocabulary_of_one": ("squeeze", lambda x: x[..., :1].squeeze(-1)),
    "mask_behind_the_vocabulary": ("getitem", lambda x: x.mT[:, :, MASK[0]]),
    "split_of_the_vocabulary": ("split", lambda x: x.split(20, -1)[1]),
    "cross_entropy_over_tokens": ("cross_entropy", loss_over_the_second_dimension),
    "class_probabilities": ("cross_entropy", lambda x: F.cross_entropy(x.mT, TEACHER.mT)),
    "overwritten_rows": ("setitem", overwritten_rows),
    "gradient_of_logits": ("retain_grad", gradient_of_logits),
}


@pytest.mark.parametrize(("name", "operation"), OPERATIONS.values(), ids=OPERATIONS)
def test_other_operation_computes_real_logits_once_and_says_where(
    name: str, operation: Callable[[Logits], Any]
) -> None:
    twin = Twin()
    lines, first_line = inspect.getsourcelines(operation)
    with pytest.warns(UserWarning, match=" on an LM head's output") as warned:
        lazy = operation(twin.lazy)
    assert len(warned) == 1
    found = re.match(r"(\w+) on an LM head's output \((.*):(\d+)\) materializes the logits: \(", str(warned[0].message))
    assert found is not None
    assert (found[1], found[2]) == (name.strip("_"), __file__)
    assert first_line <= int(found[3]) < first_line + len(lines)
    real = operation(twin.real)
    assert isinstance(lazy, Tensor)
    torch.testing.assert_close(lazy, real, rtol=1e-5, atol=1e-5)
    assert (twin.counters.num_losses, twin.counters.num_materialized) == (0, 1)
    if real.requires_grad and real.abs().max() > 0:
        twin.assert_same_gradients(lazy, real)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation(twin.lazy)


@pytest.mark.parametrize("operation", [operation for name, operation in OPERATIONS.values() if name != "retain_grad"])
def test_other_operation_does_not_warn_without_gradients(operation: Callable[[Logits], Any]) -> None:
    twin = Twin()
    with torch.no_grad(), lazy_logits(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(operation(twin.lazy), operation(twin.real), rtol=1e-5, atol=1e-5)
    assert twin.counters.num_materialized == 0


def test_model_code_is_named_before_the_code_that_called_it() -> None:
    with pytest.warns(UserWarning, match=rf"softmax on an LM head's output \({__file__}:\d+\)"):
        nn.Sequential(nn.Softmax(1))(Twin().lazy)


def test_write_below_autograd_is_refused_with_what_to_call() -> None:
    logits = Twin().lazy
    with pytest.raises(RuntimeError, match=r"set_.* writes to .*materialize\(logits\)"):
        logits.set_(torch.zeros(logits.shape))


def sum_of_squares(head: nn.Module, x: Tensor) -> Tensor:
    return head(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad_of_parameters": lambda head, x: torch.func.grad(
        lambda parameters: torch.func.functional_call(head, parameters, (x,)).square().sum()
    )({name: parameter.detach() for name, parameter in head.named_parameters()})["weight"],
    "per_sample": lambda head, x: torch.vmap(torch.func.grad(partial(sum_of_squares, head)))(x),
    "hessian": lambda head, x: torch.func.hessian(partial(sum_of_squares, head))(x),
    "loss": lambda head, x: torch.func.grad(lambda x: token_loss(head(x)))(x),
    "logit_loss": lambda head, x: torch.func.grad(token_loss)(head(x)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_transforms_of_a_head_are_those_of_a_linear_layer(transform: Callable[[nn.Module, Tensor], Any]) -> None:
    twin = Twin()
    x = twin.real_input.detach()
    torch.testing.assert_close(transform(twin.lazy_head, x), transform(twin.real_head, x))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.vmap(lambda number: x[0, 0] * number)(torch.ones(4)),
        lambda x: torch.func.jvp(lambda y: y * 2, (x,), (torch.ones(x.shape),)),
    ],
)
def test_lazy_logits_of_outside_a_transform_are_refused_in_it(transform: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func.*materialize\(logits\)"):
        transform(Twin().lazy)
