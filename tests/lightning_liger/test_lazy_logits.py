"""Lazy logits against the real logits of the same head: values, gradients, and what is and is not computed."""

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_liger import LazyLogits
from lightning_liger.lazy_logits import is_loss_wanted, lazy_logits
from lightning_liger.patching.rules import HeadRule

BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE, VOCAB_SIZE = 2, 5, 16, 37
MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
LABELS = torch.arange(BATCH_SIZE * SEQ_LEN).view(BATCH_SIZE, SEQ_LEN) * 3 % VOCAB_SIZE

Logits = LazyLogits | Tensor


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lightning_liger.lazy_logits")
    monkeypatch.setattr(module, "_warned_operations", set())


class Twin:
    """One head's lazy and real logits, from leaves of their own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.real_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, dtype=dtype)
        with torch.no_grad():
            for parameter in self.real_head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        hidden_states = torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE, generator=generator)
        self.real_input = hidden_states.to(dtype).requires_grad_()
        self.lazy_input = self.real_input.detach().clone().requires_grad_()
        self.lazy_head = copy.deepcopy(self.real_head)
        self.lazy_head.__class__ = HeadRule().patched_class(nn.Linear)

    @property
    def lazy(self) -> LazyLogits:
        logits = self.lazy_head(self.lazy_input)
        assert isinstance(logits, LazyLogits)
        return logits

    @property
    def real(self) -> Tensor:
        return self.real_head(self.real_input)

    @property
    def ledger(self) -> Any:
        return self.lazy_head.logits_ledger

    def assert_same_gradients(self, lazy_loss: Tensor, real_loss: Tensor) -> None:
        upstream = torch.rand(real_loss.shape, generator=torch.Generator().manual_seed(1)).to(real_loss.dtype)
        lazy_leaves = [self.lazy_input, *self.lazy_head.parameters()]
        real_leaves = [self.real_input, *self.real_head.parameters()]
        gradients = torch.autograd.grad(lazy_loss, lazy_leaves, upstream)
        for got, want in zip(gradients, torch.autograd.grad(real_loss, real_leaves, upstream), strict=True):
            assert want.abs().max() > 0
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def token_loss(logits: Logits, **kwargs: Any) -> Tensor:
    labels = LABELS.flatten()[: logits.numel() // logits.shape[-1]] % logits.shape[-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, **kwargs)


def test_lazy_logits_describe_themselves_as_the_real_logits_would() -> None:
    twin = Twin()
    lazy, real = twin.lazy, twin.real
    assert (lazy.shape, lazy.dtype, lazy.device) == (real.shape, real.dtype, real.device)
    assert (lazy.ndim, lazy.dim(), lazy.numel(), len(lazy)) == (real.ndim, real.dim(), real.numel(), len(real))
    assert (lazy.size(), lazy.size(-1), lazy.size(0)) == (real.size(), real.size(-1), real.size(0))
    assert (lazy.is_cuda, lazy.is_floating_point()) == (False, True)
    assert lazy.requires_grad
    assert not lazy.detach().requires_grad
    assert not isinstance(lazy, Tensor)
    assert twin.ledger.num_materialized == 0


@pytest.mark.parametrize("frozen", ["hidden_states", "weight"])
def test_lazy_logits_require_a_gradient_when_one_factor_does(frozen: str) -> None:
    twin = Twin()
    leaf = twin.lazy_input if frozen == "hidden_states" else twin.lazy_head.weight
    leaf.requires_grad_(False)
    assert twin.lazy.requires_grad
    token_loss(twin.lazy).backward()
    assert leaf.grad is None


FOLDS: dict[str, Callable[[Logits], Logits]] = {
    "nothing": lambda x: x,
    "times": lambda x: x * 0.3,
    "number_times": lambda x: 3 * x,
    "divided": lambda x: x / 7,
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
    "two_index_tensors": lambda x: x[torch.tensor([0, 1]), torch.tensor([4, 2])],
    "new_axis": lambda x: x[None],
    "new_axis_inside": lambda x: x[:, None, :, :],
    "trailing_ellipsis": lambda x: x[0, ...],
    "whole_vocabulary": lambda x: x[..., :],
    "part_of_the_vocabulary": lambda x: x[..., :29],
    "part_of_the_vocabulary_and_tokens": lambda x: x[MASK, 4:29],
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
    assert (twin.ledger.num_losses, twin.ledger.num_materialized) == (1, 0)
    with torch.no_grad():
        torch.testing.assert_close(lazy.materialize(), real, rtol=1e-5, atol=1e-5)


def test_upcast_of_bfloat16_logits_is_folded() -> None:
    twin = Twin(torch.bfloat16)
    lazy, real = twin.lazy.float(), twin.real.float()
    assert (lazy.dtype, twin.lazy.dtype) == (torch.float32, torch.bfloat16)
    # A rounding of the largest logit, which both round, in an order that may differ.
    torch.testing.assert_close(token_loss(lazy), token_loss(real), rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    assert token_loss(lazy).dtype == torch.float32
    assert twin.ledger.num_materialized == 0


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
    assert (twin.ledger.num_losses, twin.ledger.num_materialized) == (1, 0)


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
    assert (twin.ledger.num_losses, twin.ledger.num_materialized) == (1, 0)


def test_cross_entropy_method_returns_predictions_and_token_losses() -> None:
    twin = Twin()
    labels = LABELS.clone()
    labels[0, :2] = -100
    loss, stats = twin.lazy.cross_entropy(labels, return_stats=True)
    real = twin.real
    torch.testing.assert_close(loss, F.cross_entropy(real.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=0)
    kept = labels != -100
    assert torch.equal(stats.predictions[kept], real.argmax(-1)[kept])


def test_ledger_counts_the_bytes_that_were_not_needed() -> None:
    twin = Twin()
    token_loss(twin.lazy)
    token_loss(twin.lazy * 2.0)
    num_tokens, element_size = BATCH_SIZE * SEQ_LEN, 4
    assert twin.ledger.num_losses == 2
    # Two chunks of half of the tokens, one of them at a time.
    assert twin.ledger.bytes_avoided == 2 * (num_tokens // 2) * VOCAB_SIZE * element_size


def loss_over_the_second_dimension(x: Logits) -> Tensor:
    """PyTorch's classes are in dimension 1: here the sequence, as far as ``F.cross_entropy`` knows."""
    return F.cross_entropy(x, torch.arange(VOCAB_SIZE).repeat(BATCH_SIZE, 1) % SEQ_LEN)


OPERATIONS: dict[str, tuple[str, Callable[[Logits], Any]]] = {
    "argmax": ("argmax", lambda x: x.argmax(-1)),
    "torch_argmax": ("argmax", lambda x: torch.argmax(x, -1)),
    "softmax": ("softmax", lambda x: x.softmax(-1)),
    "functional_softmax": ("softmax", lambda x: F.softmax(x, dim=-1)),
    "log_softmax": ("log_softmax", lambda x: F.log_softmax(x, dim=-1)),
    "sum": ("sum", lambda x: x.sum()),
    "times_tensor": ("multiplication", lambda x: x * torch.full((VOCAB_SIZE,), 2.0)),
    "tensor_times": ("mul", lambda x: torch.full((VOCAB_SIZE,), 2.0) * x),
    "divided_by_tensor": ("division", lambda x: x / torch.tensor(2.0)),
    "times_itself": ("mul", lambda x: torch.mul(x, x)),
    "number_divided": ("rtruediv", lambda x: 1.0 / x),
    "rounded_division": ("div", lambda x: torch.div(x, 2.0, rounding_mode="floor")),
    "plus": ("add", lambda x: x + 1.0),
    "minus": ("rsub", lambda x: 1.0 - x),
    "negated": ("neg", lambda x: -x),
    "greater": ("gt", lambda x: x > 0.5),
    "equal": ("eq", lambda x: x == 0.0),
    "matrix_product": ("matmul", lambda x: x @ torch.ones(VOCAB_SIZE, 2)),
    "iteration": ("iter", lambda x: torch.stack(list(x))),
    "stack": ("stack", lambda x: torch.stack([x, x])),
    "max": ("max", lambda x: x.max(dim=-1).values),
    "gather": ("gather", lambda x: x.gather(-1, LABELS[..., None])),
    "transpose": ("transpose", lambda x: x.transpose(1, 2)),
    "second_tanh": ("a second tanh", lambda x: x.tanh().tanh()),
    "tokens_that_are_gathered_with_classes": ("indexing the vocabulary", lambda x: x[..., 3]),
    "new_axis_behind_the_vocabulary": ("indexing the vocabulary", lambda x: x[..., None]),
    "whole_mask": ("indexing the vocabulary", lambda x: x[torch.ones(x.shape, dtype=torch.bool)]),
    "reshape_of_the_vocabulary": ("reshape", lambda x: x.reshape(BATCH_SIZE, -1)),
    "flatten_of_the_vocabulary": ("flatten", lambda x: x.flatten()),
    "double": ("double", lambda x: x.double()),
    "to_integer": ("to", lambda x: x.to(torch.int64)),
    "to_another_tensor": ("to", lambda x: x.to(torch.zeros(1, dtype=torch.float64))),
    "cross_entropy_of_three_dimensions": ("cross_entropy over another", loss_over_the_second_dimension),
    "class_probabilities": (
        "cross_entropy over another",
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((BATCH_SIZE * SEQ_LEN, VOCAB_SIZE), 1 / VOCAB_SIZE)),
    ),
}


@pytest.mark.parametrize(("name", "operation"), OPERATIONS.values(), ids=OPERATIONS)
def test_other_operation_computes_real_logits_and_warns_once(name: str, operation: Callable[[Logits], Any]) -> None:
    twin = Twin()
    with pytest.warns(UserWarning, match=rf"^{name}.* needs whole logits: \(2, 5, 37\)|^{name}.*\(10, 37\)"):
        lazy = operation(twin.lazy)
    real = operation(twin.real)
    assert isinstance(lazy, Tensor)
    torch.testing.assert_close(lazy, real, rtol=1e-5, atol=1e-5)
    assert twin.ledger.num_materialized >= 1
    if real.requires_grad and real.abs().max() > 0:
        weights = torch.rand(real.shape, dtype=real.dtype)
        gradients = [
            torch.autograd.grad((result * weights).sum(), leaf)[0]
            for result, leaf in ((lazy, twin.lazy_input), (real, twin.real_input))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation(twin.lazy)


@pytest.mark.parametrize(("name", "operation"), OPERATIONS.values(), ids=OPERATIONS)
def test_other_operation_does_not_warn_without_gradients(name: str, operation: Callable[[Logits], Any]) -> None:
    twin = Twin()
    with torch.no_grad(), lazy_logits(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(operation(twin.lazy), operation(twin.real), rtol=1e-5, atol=1e-5)
    assert twin.ledger.num_materialized == 0


def test_numpy_gets_real_logits() -> None:
    twin = Twin()
    want = twin.real.detach().numpy()
    np.testing.assert_allclose(twin.lazy.detach().numpy(), want, rtol=1e-5)
    with torch.no_grad(), lazy_logits():
        np.testing.assert_allclose(np.asarray(twin.lazy), want, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:pickling on an LM head's output")
def test_pickle_holds_real_logits() -> None:
    twin = Twin()
    restored = pickle.loads(pickle.dumps(twin.lazy))
    assert isinstance(restored, Tensor)
    torch.testing.assert_close(restored.detach(), twin.real.detach())


def test_deepcopy_stays_lazy_and_in_the_graph() -> None:
    twin = Twin()
    duplicate = copy.deepcopy({"logits": twin.lazy * 0.5})["logits"]
    assert isinstance(duplicate, LazyLogits)
    twin.assert_same_gradients(token_loss(duplicate), token_loss(twin.real * 0.5))
    assert twin.ledger.num_materialized == 0


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_real_logits_are_computed_once() -> None:
    logits = Twin().lazy
    assert logits.materialize() is logits.materialize()


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_real_logits_seen_without_gradients_do_not_cut_the_graph_later(context: Callable[[], Any]) -> None:
    twin = Twin()
    lazy, real = twin.lazy, twin.real
    with context():
        lazy.argmax(-1)
    twin.assert_same_gradients(lazy.log_softmax(-1)[..., 0].sum(), real.log_softmax(-1)[..., 0].sum())


@pytest.mark.parametrize("name", ["nonsense", "__cuda_array_interface__", "_private"])
def test_unknown_attribute_raises_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(Twin().lazy, name)


def test_head_without_gradients_is_lazy_only_where_a_loss_is_wanted() -> None:
    twin = Twin()
    with torch.no_grad():
        outside = twin.lazy_head(twin.lazy_input)
        assert isinstance(outside, Tensor)
        assert torch.equal(outside, twin.real)
        with lazy_logits():
            assert isinstance(twin.lazy_head(twin.lazy_input), LazyLogits)
            with lazy_logits(enabled=False):
                assert isinstance(twin.lazy_head(twin.lazy_input), Tensor)
            assert is_loss_wanted()
        assert isinstance(twin.lazy_head(twin.lazy_input), Tensor)


def test_loss_without_gradients_equals_the_real_one() -> None:
    twin = Twin()
    with torch.no_grad(), lazy_logits():
        loss = token_loss(twin.lazy)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, token_loss(twin.real), rtol=1e-5, atol=0)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtype_of_the_real_head(input_dtype: torch.dtype) -> None:
    twin = Twin()
    with torch.autocast("cpu", torch.bfloat16):
        lazy = twin.lazy_head(twin.lazy_input.to(input_dtype))
        real = twin.real_head(twin.real_input.to(input_dtype))
        lazy_loss, real_loss = token_loss(lazy.float()), token_loss(real.float())
    assert lazy.dtype == real.dtype == torch.bfloat16
    assert lazy_loss.dtype == real_loss.dtype == torch.float32
    torch.testing.assert_close(lazy_loss, real_loss, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    # Outside of autocast too: the head has decided.
    assert torch.equal(lazy.detach().materialize(), real.detach())
    lazy_loss.backward()
    assert twin.lazy_head.weight.grad.dtype == twin.lazy_input.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "convert",
    [_apply_to_tensors, lambda function, data: apply_to_collection(data, dtype=Tensor, function=function)],
    ids=["fsdp", "lightning"],
)
def test_engines_that_convert_outputs_see_the_hidden_states_only(convert: Callable[..., Any]) -> None:
    twin = Twin()
    seen: list[Tensor] = []

    def halve(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor * 0.5

    converted = convert(halve, {"output": CausalLMOutputWithPast(logits=twin.lazy)})["output"].logits
    assert len(seen) == 1
    assert seen[0] is twin.lazy_input
    assert isinstance(converted, LazyLogits)
    twin.assert_same_gradients(token_loss(converted), token_loss(twin.real_head(twin.real_input * 0.5)))
    assert twin.ledger.num_materialized == 0
