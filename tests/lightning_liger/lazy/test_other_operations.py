"""Operations that materialize lazy logits: once, with real values and gradients, and a warning that says where."""

import inspect
import operator
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def overwritten_rows(x: Logits) -> Tensor:
    x[MASK] = 0.5
    return F.cross_entropy(x.flatten(0, 1), LABELS.flatten())


def overwritten_view(x: Logits) -> Tensor:
    tokens = x.view(-1, VOCAB_SIZE)
    x[:, 1:].add_(1.0)[..., 3] *= 2.0
    return F.cross_entropy(tokens, LABELS.flatten())


def scaled_in_place_under_a_view(x: Logits) -> Tensor:
    tokens = x.view(-1, VOCAB_SIZE)
    x.mul_(0.3)
    return F.cross_entropy(tokens, LABELS.flatten())


def view_scaled_in_place(x: Logits) -> Tensor:
    tokens = x.narrow(1, 1, 3)
    tokens *= 0.3
    return F.cross_entropy(x.flatten(0, 1), LABELS.flatten()) + token_loss(tokens)


def overwritten_without_gradients(x: Logits) -> Tensor:
    with torch.no_grad():
        x.mul_(0.5)
    return F.cross_entropy(x.flatten(0, 1), LABELS.flatten())


def gradient_of_logits(x: Logits) -> Tensor:
    x.retain_grad()
    F.cross_entropy(x[:, 1:].flatten(0, 1), LABELS[:, 1:].flatten()).backward(retain_graph=True)
    return x.grad


def loss_over_the_second_dimension(x: Logits) -> Tensor:
    """PyTorch's classes are in dimension 1: here the sequence, as far as ``F.cross_entropy`` knows."""
    return F.cross_entropy(x, torch.arange(VOCAB_SIZE).repeat(BATCH_SIZE, 1) % SEQ_LEN)


LEARNED_SCALE = torch.tensor(2.0, requires_grad=True)
PROBABILITIES = torch.full((TOKENS, VOCAB_SIZE), 1 / VOCAB_SIZE)

OPERATIONS: dict[str, tuple[str, Callable[[Logits], Any]]] = {
    "softmax": ("cumsum", lambda x: x.softmax(-1).cumsum(-1)),
    "softmax_over_tokens": ("softmax", lambda x: F.softmax(x, dim=1)),
    "log_softmax_over_tokens": ("log_softmax", lambda x: F.log_softmax(x, dim=1)),
    "log_softmax_times": ("sort", lambda x: (x.log_softmax(-1) * 2.0).sort(-1).values),
    "log_softmax_times_tensor_of_tokens": ("mul", lambda x: x.log_softmax(-1) * torch.full((SEQ_LEN, 1), 2.0)),
    "log_softmax_tanh": ("tanh", lambda x: x.log_softmax(-1).tanh()),
    "log_softmax_of_a_part": ("getitem", lambda x: x.log_softmax(-1)[..., 3:]),
    "nll_loss_of_logits": ("nll_loss", lambda x: F.nll_loss(x.flatten(0, 1), LABELS.flatten())),
    "sum_over_tokens": ("sum", lambda x: x.sum(1)),
    "max_of_all": ("max", lambda x: x.max()),
    "argmax_over_tokens": ("argmax", lambda x: x.argmax(1)),
    "gather_over_tokens": ("gather", lambda x: x.gather(1, torch.zeros(2, 1, VOCAB_SIZE, dtype=torch.int64))),
    "gather_of_some_tokens": ("gather", lambda x: x.gather(-1, LABELS[:, :2, None])),
    "times_tensor": ("mul", lambda x: x * torch.full((VOCAB_SIZE,), 2.0)),
    "tensor_times": ("mul", lambda x: torch.full((VOCAB_SIZE,), 2.0) * x),
    "times_tensor_of_more_dimensions": ("mul", lambda x: x * torch.full((1, 1, 1, 1), 2.0)),
    "times_learned_scale": ("mul", lambda x: x * LEARNED_SCALE),
    "times_nothing": ("mul", lambda x: x * 0),
    "divided_by_tensor": ("div", lambda x: x / torch.rand(SEQ_LEN, 1, generator=torch.Generator().manual_seed(2))),
    "divided_by_nothing": ("div", lambda x: x.div(0).isinf()),
    "times_itself": ("mul", lambda x: torch.mul(x, x)),
    "number_divided": ("rdiv", lambda x: 1.0 / x),
    "rounded_division": ("div", lambda x: torch.div(x, 2.0, rounding_mode="floor").detach()),
    "plus": ("add", lambda x: x + 1.0),
    "minus": ("rsub", lambda x: 1.0 - x),
    "negated": ("neg", lambda x: -x),
    "greater": ("gt", lambda x: x > 0.5),
    "equal": ("eq", lambda x: x == 0.0),
    "matrix_product": ("matmul", lambda x: x @ torch.ones(VOCAB_SIZE, 2)),
    "stack": ("stack", lambda x: torch.stack([x, x])),
    "cat": ("cat", lambda x: torch.cat([x, x])),
    "second_tanh": ("tanh", lambda x: x.tanh().tanh()),
    "one_class": ("getitem", lambda x: x[..., 3]),
    "new_axis_behind_the_vocabulary_of_one": ("squeeze", lambda x: x[..., :1].squeeze(-1)),
    "whole_mask": ("getitem", lambda x: x[torch.ones(x.shape, dtype=torch.bool)]),
    "mask_behind_the_vocabulary": ("getitem", lambda x: x.mT[:, :, MASK[0]]),
    "reshape_of_the_vocabulary": ("reshape", lambda x: x.reshape(BATCH_SIZE, -1)),
    "view_as_another_dtype": ("view", lambda x: x.view(torch.int32)),
    "flatten_of_the_vocabulary": ("flatten", lambda x: x.flatten()),
    "unflatten_of_the_vocabulary": ("unflatten", lambda x: x.unflatten(-1, (VOCAB_SIZE, 1))),
    "split_of_the_vocabulary": ("split", lambda x: x.split(20, -1)[1]),
    "double": ("double", lambda x: x.double()),
    "to_integer": ("to", lambda x: x.to(torch.int64)),
    "to_double_tensor": ("to", lambda x: x.to(torch.zeros(1, dtype=torch.float64))),
    "cross_entropy_over_tokens": ("cross_entropy", loss_over_the_second_dimension),
    "class_probabilities": ("cross_entropy", lambda x: F.cross_entropy(x.flatten(0, 1), PROBABILITIES)),
    "overwritten_rows": ("setitem", overwritten_rows),
    "overwritten_view": ("add_", overwritten_view),
    "scaled_in_place_under_a_view": ("mul_", scaled_in_place_under_a_view),
    "view_scaled_in_place": ("mul", view_scaled_in_place),
    "overwritten_without_gradients": ("mul_", overwritten_without_gradients),
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


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_real_tensor_changed_in_place_by_lazy_logits_is_that_tensor() -> None:
    twin = Twin()
    for change in (operator.imul, Tensor.mul_, Tensor.add_):
        tensor = torch.full(twin.real.shape, 2.0)
        want = change(tensor.clone(), twin.real.detach())
        assert change(tensor, twin.lazy.detach()) is tensor
        torch.testing.assert_close(tensor, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_lazy_logits_deep_in_the_arguments_are_found() -> None:
    twin = Twin()
    torch.testing.assert_close(torch.stack((twin.lazy, twin.lazy * 2)), torch.stack((twin.real, twin.real * 2)))
    torch.testing.assert_close(torch.cat(tensors=[twin.lazy, twin.real]), torch.cat([twin.real, twin.real]))
    torch.testing.assert_close(
        torch.einsum("bsv,bsv->bs", twin.lazy, twin.lazy), torch.einsum("bsv,bsv->bs", twin.real, twin.real)
    )


@pytest.mark.parametrize(
    "index", [(torch.tensor(1),), (torch.tensor(0), 2), (slice(None), torch.tensor(-1)), (0, torch.tensor(3))]
)
def test_integer_tensor_without_dimensions_is_an_index_like_a_number(index: tuple[Any, ...]) -> None:
    twin = Twin()
    got, want = twin.lazy[index], twin.real[index]
    assert isinstance(got, LazyLogits)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["T", "H", "mT", "mH", "real"])
@pytest.mark.parametrize("write", [F.relu_, lambda x: x.mul_(2)])
@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_transposed_logits_see_writes_as_views_do(name: str, write: Callable[[Tensor], Any]) -> None:
    twin = Twin()
    lazy, real = twin.lazy[0], twin.real[0]
    views = getattr(lazy, name), getattr(real, name)
    assert views[0].shape == views[1].shape
    write(lazy), write(real)
    torch.testing.assert_close(lazy, real)
    torch.testing.assert_close(*views)


def test_write_below_autograd_is_refused_with_what_to_call() -> None:
    logits = Twin().lazy
    with pytest.raises(RuntimeError, match=r"set_.* writes to .*materialize\(logits\)"):
        logits.set_(torch.zeros(logits.shape))


def sum_of_squares(head: nn.Module, x: Tensor) -> Tensor:
    return head(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda head, x: torch.func.grad(partial(sum_of_squares, head))(x),
    "grad_of_parameters": lambda head, x: torch.func.grad(
        lambda parameters: torch.func.functional_call(head, parameters, (x,)).square().sum()
    )({name: parameter.detach() for name, parameter in head.named_parameters()})["weight"],
    "per_sample": lambda head, x: torch.vmap(torch.func.grad(partial(sum_of_squares, head)))(x),
    "vmap": lambda head, x: torch.vmap(head)(x),
    "jvp": lambda head, x: torch.func.jvp(head, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda head, x: torch.func.vjp(head, x)[0],
    "jacrev": lambda head, x: torch.func.jacrev(head)(x),
    "hessian": lambda head, x: torch.func.hessian(partial(sum_of_squares, head))(x),
    "loss": lambda head, x: torch.func.grad(lambda x: token_loss(head(x)))(x),
    "of_logits": lambda head, x: torch.func.grad(token_loss)(head(x)),
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
