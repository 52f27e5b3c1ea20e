"""Lazy logits against the real logits of the same head: attributes, dtypes, copies, chunks and how engines see them."""

import copy
import pickle
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_liger import LazyLogits, materialize
from lightning_liger.lazy.logits import lazy_logits, loss_wanted
from tests.lightning_liger.lazy.twin import TOKENS, VOCAB_SIZE, Saving, Twin, token_loss
from tests.lightning_liger.tiny import TensorSizes


def test_lazy_logits_describe_themselves_as_the_real_logits_would(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin()
    for lazy, real in ((twin.lazy, twin.real), (twin.lazy.mT, twin.real.mT)):
        with TensorSizes(monkeypatch) as sizes:
            for name in ["shape", "dtype", "device", "layout", "ndim", "is_cpu", "requires_grad", "itemsize"]:
                assert getattr(lazy, name) == getattr(real, name)
            for method in ["stride", "is_contiguous", "numel", "element_size", "storage_offset", "type", "get_device"]:
                assert getattr(lazy, method)() == getattr(real, method)()
            assert (len(lazy), lazy.dim(), lazy.size(-1)) == (len(real), real.dim(), real.size(-1))
            assert lazy.new_zeros(3).dtype == torch.float32
        assert sizes.largest < TOKENS * VOCAB_SIZE
        assert torch.ones(3).type_as(lazy).dtype == torch.result_type(lazy, 2.0) == torch.float32
        assert torch.zeros_like(lazy).stride() == torch.zeros_like(real).stride()
    assert isinstance(twin.lazy, Tensor)
    assert repr(twin.lazy) == "LazyLogits(shape=(2, 5, 37), dtype=torch.float32, device='cpu', requires_grad=True)"
    assert not twin.lazy.detach().requires_grad
    assert twin.counters.num_materialized == 0


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
    assert twin.counters.num_materialized == 0


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_materialized_logits_are_a_real_tensor_in_the_same_place() -> None:
    twin = Twin()
    logits = twin.lazy
    scaled = logits * 0.5
    assert materialize(logits) is logits
    assert type(logits) is type(scaled) is Tensor
    assert materialize(logits) is logits
    twin.assert_same_gradients(token_loss(scaled), token_loss(twin.real * 0.5))


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_real_logits_seen_in_inference_mode_do_not_cut_the_graph_later() -> None:
    twin = Twin()
    lazy, real = twin.lazy, twin.real
    with torch.inference_mode():
        lazy.argmax(-1)
    twin.assert_same_gradients(lazy.log_softmax(-1)[..., 0].sum(), real.log_softmax(-1)[..., 0].sum())


@pytest.mark.parametrize("name", ["nonsense", "__cuda_array_interface__"])
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
            assert loss_wanted.value
        assert isinstance(twin.lazy_head(twin.lazy_input), Tensor)


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


def test_function_over_chunks_follows_the_chunk_bytes_of_the_head() -> None:
    twin = Twin(chunk_bytes=3 * VOCAB_SIZE * 4)
    seen: list[int] = []

    def logsumexp(values: Tensor) -> Tensor:
        seen.append(len(values))
        return values.logsumexp(-1, keepdim=True)

    with torch.no_grad(), lazy_logits():
        got = twin.lazy.over_chunks(logsumexp)
        torch.testing.assert_close(got, twin.real.logsumexp(-1, keepdim=True), rtol=1e-5, atol=0)
    assert seen == [3, 3, 3, 1]


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
@pytest.mark.parametrize("name", ["weight", "bias", "hidden states"])
@pytest.mark.parametrize("read", ["softmax", "cross_entropy", "zero_", "materialize()"])
def test_late_read_is_refused_after_a_write_to_what_the_logits_are_computed_from(name: str, read: str) -> None:
    twin = Twin()
    logits = twin.lazy.detach() if read != "zero_" else twin.lazy
    written = {"hidden states": twin.lazy_input, **dict(twin.lazy_head.named_parameters())}[name]
    with torch.no_grad():
        written.add_(1.0)
    reads: dict[str, Callable[[Tensor], Any]] = {
        "softmax": lambda x: x.softmax(-1),
        "cross_entropy": token_loss,
        "zero_": lambda x: x.zero_(),
        "materialize()": materialize,
    }
    with pytest.raises(RuntimeError, match=rf"the head's {name} was modified in place.*materialize\(logits\)"):
        reads[read](logits)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_backward_of_a_reduction_is_refused_after_a_change_of_the_weight(is_replaced: bool) -> None:
    twin = Twin()
    result = twin.lazy.amax(-1).sum()
    weight = twin.lazy_head.weight
    with torch.no_grad():
        if is_replaced:
            weight.data = torch.zeros_like(weight)
        else:
            weight.add_(1.0)
    reason = "the memory of the head's weight was replaced" if is_replaced else "the head's weight was modified"
    with pytest.raises(RuntimeError, match=rf"{reason} .*materialize\(logits\)"):
        result.backward()


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
@pytest.mark.parametrize("name", ["register_hook", "retain_grad", "torch.autograd.grad"])
@pytest.mark.parametrize("realized", [False, True])
def test_gradient_of_logits_is_refused_after_a_loss_that_does_not_pass_them(name: str, realized: bool) -> None:
    logits = Twin().lazy
    loss = token_loss(logits)
    if realized:
        materialize(logits)
    watch: dict[str, Callable[[], Any]] = {
        "register_hook": lambda: logits.register_hook(print),
        "retain_grad": lambda: logits.retain_grad(),
        "torch.autograd.grad": lambda: torch.autograd.grad(loss, logits, allow_unused=True),
    }
    with pytest.raises(RuntimeError, match=rf"{name} of .* comes after a fused loss.*materialize\(logits\)"):
        watch[name]()


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
@pytest.mark.parametrize("share", [copy.copy, lambda logits: logits.detach().numpy(), lambda logits: logits.data])
def test_write_to_what_shares_memory_is_seen(share: Callable[[Tensor], Any]) -> None:
    twin = Twin()
    for logits in (lazy := twin.lazy, real := twin.real):
        shared = share(logits)
        with torch.no_grad():
            shared[...] = 2.0
        assert (logits == 2.0).all()
    torch.testing.assert_close(token_loss(lazy), token_loss(real))


@pytest.mark.filterwarnings("ignore:.* on an LM head's output")
def test_gradient_of_an_earlier_function_is_not_missed_silently() -> None:
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.shape = tuple(x.shape)
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.expand(ctx.shape)

    logits = Twin().lazy
    result = Constant.apply(logits)
    logits.retain_grad()
    with pytest.raises(RuntimeError, match=r"retain_grad came after a function .*materialize\(logits\)"):
        result.backward()


@pytest.mark.parametrize("refers", ["weakly", "in a graph"])
def test_write_is_refused_where_the_object_cannot_be_exchanged(refers: str) -> None:
    logits = Twin().lazy
    held = weakref.ref(logits) if refers == "weakly" else Saving.apply(logits)
    with pytest.raises(RuntimeError, match=r"zero_ .*materialize\(logits\)"):
        logits.zero_()
    assert held is not None
    assert isinstance(logits, LazyLogits)
    assert isinstance(token_loss(logits), Tensor)


SIZES = (3, 17, 64)
NUM_CLASSES = 211
SOME_TOKENS = 4 * NUM_CLASSES * 10

RECORDED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "float": lambda x: x.float(),
    "slice": lambda x: x[:, :-1],
    "flat": lambda x: x[:, 1:].flatten(0, 1),
    "scaled": lambda x: x / 0.7,
    "capped": lambda x: torch.tanh(x / 5) * 5,
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "detached": lambda x: x.detach(),
    "part": lambda x: x[..., 3:200],
}
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, gold: x.gather(-1, gold),
    "take_along_dim": lambda x, gold: torch.take_along_dim(x, gold, -1),
    "max": lambda x, gold: x.max(-1, keepdim=True).values,
    "amin": lambda x, gold: x.amin(-1, keepdim=True),
    "topk": lambda x, gold: x.topk(3).values[..., -1:],
    "of_argmax": lambda x, gold: x.gather(-1, x.argmax(-1, keepdim=True)),
}


def lazy_head(dtype: torch.dtype, chunk_bytes: int | None) -> Any:
    bias = random.random() < 0.5
    return Twin(dtype, NUM_CLASSES, bias=bias, chunk_bytes=chunk_bytes, hidden_size=SIZES[-1]).lazy_head


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_values_that_were_read_are_found_again(mode: Callable[[], AbstractContextManager[None]]) -> None:
    for seed in range(100):
        random.seed(seed)
        torch.manual_seed(seed)
        head = lazy_head(
            random.choice([torch.float32, torch.float32, torch.bfloat16]), random.choice([None, SOME_TOKENS])
        )
        with mode(), lazy_logits():
            logits = head(torch.randn(*SIZES, dtype=head.weight.dtype))
            assert isinstance(logits, LazyLogits)
            names = random.choice(list(RECORDED)), random.choice(list(READ))
            x = RECORDED[names[0]](logits)
            if mode is torch.enable_grad:
                x = x.detach()
            gold = torch.randint(0, x.shape[-1], (*x.shape[:-1], 1))
            read = READ[names[1]]
            value = read(x, gold)
            equal, above, below = ((x == value).sum(-1), (x > value).sum(-1), (x < value).sum(-1))
            assert (equal > 0).all(), names
            assert (above + below + equal == x.shape[-1]).all(), names
            if names[1] == "topk":
                assert ((above < 3) & (above + equal >= 3)).all(), names
            real = materialize(x)
            assert type(real) is Tensor
            if mode is not torch.enable_grad and not head.liger_replacement.options and names[0] != "softmax":
                assert torch.equal(value, read(real, gold)), names


@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_comparison_with_what_a_read_with_gradients_became_is_refused() -> None:
    head = lazy_head(torch.float32, None)
    logits = head(torch.randn(*SIZES))
    gold = logits.gather(-1, torch.zeros(*SIZES[:2], 1, dtype=torch.int64))
    for other in (gold.detach(), gold.double(), gold * 1, torch.zeros_like(gold)):
        with pytest.raises(RuntimeError, match=r"gt compares .* after gather .*materialize\(logits\)"):
            logits > other  # noqa: B015  raises
    assert (logits > 0).any()
    exact = logits.detach().gather(-1, torch.zeros(*SIZES[:2], 1, dtype=torch.int64))
    assert not (logits > exact)[..., 0].any()


def test_what_was_read_keeps_no_hidden_states() -> None:
    head = lazy_head(torch.float32, None)
    hidden_states = torch.randn(*SIZES)
    gold = torch.zeros(*SIZES[:2], 1, dtype=torch.int64)
    logits = head(hidden_states)
    read = [logits.gather(-1, gold), logits.detach().gather(-1, gold)]
    read[0].sum().backward()
    alive = weakref.ref(hidden_states)
    del logits, hidden_states
    assert alive() is None
    assert len(read) == 2
