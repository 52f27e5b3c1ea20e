"""Lazy logits against the real logits of the same head: attributes, dtypes, copies, chunks and how engines see them."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from transformers.modeling_outputs import CausalLMOutputWithPast

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
            assert loss_wanted.get()
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


@pytest.mark.parametrize(
    "convert",
    [_apply_to_tensors, lambda function, data: apply_to_collection(data, dtype=Tensor, function=function)],
    ids=["fsdp", "lightning"],
)
def test_engines_that_convert_outputs_leave_logits_lazy(convert: Callable[..., Any]) -> None:
    twin = Twin()
    converted = convert(lambda tensor: tensor.float() * 0.5, {"output": CausalLMOutputWithPast(logits=twin.lazy)})
    logits = converted["output"].logits
    assert isinstance(logits, LazyLogits)
    twin.assert_same_gradients(token_loss(logits), token_loss(twin.real * 0.5))


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
