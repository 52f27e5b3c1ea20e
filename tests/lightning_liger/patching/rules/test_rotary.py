"""Rotary functions are found by what they compute; calls that the fused one does not cover stay as they were."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import rotary
from tests.lightning_liger.patching.rules.comparing import assert_kept, assert_replaced, assert_same

HEAD_DIM, SEQ_LEN = 16, 6


def rotated(x: Tensor, cos: Tensor, sin: Tensor, neighbors: bool = False, parted: bool = False) -> Tensor:
    """The columns of ``x`` that ``cos`` has, in pairs of neighbors or of the two halves, rotated, then the others."""
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = (x[..., ::2], x[..., 1::2]) if neighbors else x.chunk(2, dim=-1)
    turned = torch.stack((-second, first), dim=-1).flatten(-2) if neighbors else torch.cat((-second, first), dim=-1)
    y = x * cos + turned * sin
    y = torch.cat((y[..., ::2], y[..., 1::2]), dim=-1) if parted else y
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotated(q, cos, sin), rotated(k, cos, sin)


@dataclass
class Form:
    """How somebody may have written a rotary function, and calls it."""

    neighbors: bool
    tables: str  # whole, half (one column for each pair), first half (of whole ones)
    heads_dim: int
    takes_dim: bool
    one_tensor: bool
    backwards: bool
    parted: bool
    casts: bool
    is_complex: bool
    names: tuple[str, str]

    @property
    def description(self) -> str:
        return "apply_rotary (interleaved)" if self.neighbors else "apply_rotary"

    @property
    def table_dim(self) -> int:
        return HEAD_DIM // 2 if self.tables == "half" else HEAD_DIM

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> Tensor:
        dtype, x = x.dtype, x.float() if self.casts else x
        cos, sin = (table.float() if self.casts else table for table in (cos, sin))
        if self.tables == "first half":
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        if self.tables != "whole":
            cos, sin = (
                each.repeat_interleave(2, dim=-1) if self.neighbors else torch.cat((each, each), dim=-1)
                for each in (cos, sin)
            )
        cos, sin = cos.unsqueeze(heads_dim), (-sin if self.backwards else sin).unsqueeze(heads_dim)
        y = rotated(x, cos, sin, self.neighbors, self.parted)
        return y.to(dtype) if self.casts else y

    def module(self) -> nn.Module:
        """An attention that calls the function."""
        first, second = self.names
        parameters = [first] if self.one_tensor else [first, second]
        tables = ["freqs_cis"] if self.is_complex else ["cos", "sin"]
        heads_dim = "unsqueeze_dim" if self.takes_dim else str(self.heads_dim)
        split = "freqs_cis.real, freqs_cis.imag" if self.is_complex else "cos, sin"
        results = ", ".join(f"compute({name}, {split}, {heads_dim})" for name in parameters)
        given = "cos.float() + 1j * sin.float()" if self.is_complex else "cos, sin"
        given += f", unsqueeze_dim={self.heads_dim}" * (self.takes_dim and self.heads_dim == 2)
        calls = f"(rotate(q, {given}), rotate(k, {given}))" if self.one_tensor else f"rotate(q, k, {given})"
        scope: dict[str, Any] = {"compute": self.compute}
        signature = ", ".join([*parameters, *tables, *["unsqueeze_dim=1"] * self.takes_dim])
        exec(f"def rotate({signature}):\n    return {results}", scope)
        return attention(scope["rotate"], calls)


def random_form(seed: int) -> Form:
    rng = random.Random(seed)
    is_complex = not rng.randrange(4)
    neighbors = is_complex or rng.random() < 0.5
    return Form(
        neighbors=neighbors,
        tables="half" if is_complex else rng.choice(["whole", "half", *["first half"] * neighbors]),
        heads_dim=rng.choice([1, 2]),
        takes_dim=rng.random() < 0.5,
        one_tensor=not rng.randrange(4),
        backwards=rng.random() < 0.3,
        parted=neighbors and rng.random() < 0.3,
        casts=is_complex or rng.random() < 0.5,
        is_complex=is_complex,
        names=rng.choice([("q", "k"), ("query_states", "key_states"), ("tensor", "other")]),
    )


def attention(function: FunctionType, call: str = "rotate(q, k, cos, sin)", **scope: Any) -> Any:
    """A module whose method finds ``function`` as the global ``rotate``."""
    scope |= {"nn": nn, "rotate": function}
    source = f"""
class Attention(nn.Module):
    def forward(self, q, k, cos, sin, position_ids=None):
        return {call}
"""
    exec(source, scope)
    return scope["Attention"]()


def inputs(heads_dim: int = 1, table_dim: int = HEAD_DIM) -> list[Tensor]:
    """Queries, keys, cosines and sines; the tables differ in all their columns, and between rows of the batch."""
    q, k = (torch.randn(2, SEQ_LEN, num_heads, HEAD_DIM) for num_heads in (4, 2))
    if heads_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q, k, torch.randn(2, SEQ_LEN, table_dim), torch.randn(2, SEQ_LEN, table_dim)]


@pytest.fixture
def num_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the fused function was called since the last time that this was asked."""
    spy = Mock(side_effect=rotary.apply_rotary)
    monkeypatch.setattr(rotary, "apply_rotary", spy)

    def count() -> int:
        number = spy.call_count
        spy.reset_mock()
        return number

    return count


@pytest.mark.parametrize("part", range(4))
def test_rotary_function_of_any_form_is_replaced_and_stays_the_same(part: int, num_fused: Callable[[], int]) -> None:
    for seed in range(12 * part, 12 * part + 12):
        form = random_form(seed)
        module = form.module()
        twin = assert_replaced(module, form.description)
        q, k, cos, sin = inputs(form.heads_dim, form.table_dim)
        num_fused()
        assert_same(module, twin, q, k, cos, sin)
        assert num_fused() == 1 + form.one_tensor, form
        for dtype, table_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
            assert_same(module, twin, q.to(dtype), k.to(dtype), cos.to(table_dtype), sin.to(table_dtype))


def positioned(query_states, key_states, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:
        cos, sin = cos[:, position_ids], sin[:, position_ids]
    return half(query_states, key_states, cos, sin, unsqueeze_dim)


def optional_key(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim) if k is not None else half(q, q, cos, sin, unsqueeze_dim)[0]


def last_columns(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q.flip(-1), k.flip(-1), cos, sin, unsqueeze_dim)
    return q.flip(-1), k.flip(-1)


CALLS: dict[str, tuple[FunctionType, str, bool]] = {
    "positional dim": (half, "rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)", True),
    "first columns": (half, "rotate(q, k, cos[..., :8], sin[..., :8])", True),
    "one table for all rows": (half, "rotate(q, k, cos[:1], sin[:1])", True),
    "no positions": (positioned, "rotate(q, k, cos, sin)", True),
    "tables of 2 dims": (half, "rotate(q.transpose(1, 2), k.transpose(1, 2), cos[0], sin[0])", False),
    "queries of 5 dims": (half, "rotate(q[None], k[None], cos[None], sin[None], 2)", False),
    "first dim": (half, "rotate(q, k, cos[0], sin[0], 0)", False),
    "one position for all": (half, "rotate(q, k, cos[:, :1], sin[:, :1])", False),
    "larger batch of tables": (half, "rotate(q[:1], k[:1], cos, sin)", False),
    "sine of one row": (half, "rotate(q, k, cos, sin[:1])", False),
    "positions": (positioned, "rotate(q, k, cos, sin, position_ids)", False),
    "no key": (optional_key, "rotate(q, cos=cos, sin=sin)", False),
}


@pytest.mark.parametrize(("function", "call", "is_covered"), CALLS.values(), ids=CALLS)
def test_call_that_is_not_covered_reaches_the_original(
    function: FunctionType, call: str, is_covered: bool, num_fused: Callable[[], int]
) -> None:
    module = attention(function, call)
    twin = assert_replaced(module, "apply_rotary")
    num_fused()
    assert_same(module, twin, *inputs(), position_ids=torch.arange(SEQ_LEN).flip(0))
    assert num_fused() == is_covered


def with_key(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def changed(q, k, cos, sin, unsqueeze_dim=1):
        q, k = half(q, k, cos, sin, unsqueeze_dim)
        return q, change(k)

    return changed


LOOK_ALIKES: dict[str, tuple[Callable[..., Any], str]] = {
    "last columns": (last_columns, "output differs by"),
    "without sine": (lambda q, k, cos, sin: (q * cos[:, None], k * cos[:, None]), "output differs by"),
    "key scaled": (with_key(lambda k: k * 1.01), "output differs by"),
    "key detached": (with_key(lambda k: k.detach() + 0 * k), "gradient differs by"),
    "with values": (lambda q, k, v, cos, sin: (*half(q, k, cos, sin), v), ""),
}


@pytest.mark.parametrize(("function", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alike_is_kept_with_a_reason(function: FunctionType, reason: str) -> None:
    assert_kept(attention(function), f"rotate is not apply_rotary: {reason}")


def test_method_without_a_rotary_function_is_not_reported() -> None:
    assert apply_liger_kernels(attention(lambda x: x, "rotate(q)")).entries == []


def test_wrong_call_fails_as_the_original_does() -> None:
    for call in ("rotate(q, k, cos)", "rotate(q, k, cos, sin, 1, 2)", "rotate(q, k, cos, sin, unknown=1)"):
        module = attention(half, call)
        for each in (module, assert_replaced(module, "apply_rotary")):
            with pytest.raises(TypeError):
                each(*inputs())


def test_only_the_instances_class_changes(num_fused: Callable[[], int]) -> None:
    scope: dict[str, Any] = {"nn": nn, "half": half}
    source = """
class Base(nn.Module):
    def rotate(self, q, k, cos, sin, *, scale=1.0):
        q, k = half(q, k, cos, sin)
        return q * scale, k * scale

    def forward(self, q, k, cos, sin):
        return half(q, k, cos, sin)

class Attention(Base):
    def forward(self, q, k, cos, sin, scale=0.5, *, shift=0.25):
        q, k = super().forward(q, k, cos, sin)
        return self.rotate(q * scale + shift, k, cos, sin, scale=2.0)
"""
    exec(source, scope)
    module, sibling = scope["Attention"](), scope["Attention"]()
    report = apply_liger_kernels(module)
    assert report.num_replaced == 1
    arguments = inputs()
    for each, number in ((sibling, 0), (module, 1)):
        num_fused()
        each(*arguments)
        assert num_fused() == number
    # Also defaults, closures, and the keyword-only default of an inherited method.
    assert_same(sibling, module, *arguments)
    assert_same(sibling, module, *arguments, 2.0, shift=1.0)


@pytest.mark.parametrize("num_decorators", [1, 2])
def test_method_with_decorators_calls_the_fused_function_within_them(
    num_decorators: int, num_fused: Callable[[], int]
) -> None:
    """As those that rename arguments of attention in transformers 5.24; one of another kind stays as it is."""

    def renames(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def renamed(self: nn.Module, *args: Any, factor: float = 1.0, **kwargs: Any) -> Any:
            return tuple(2.0 * factor * each for each in function(self, *args, **kwargs))

        return renamed

    class Hidden:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return functools.partial(self.function, instance)

    module = attention(half)
    forward = plain = type(module).forward
    for _ in range(num_decorators):
        forward = renames(forward)
    type(module).forward = forward
    twin = assert_replaced(module, "apply_rotary")
    num_fused()
    assert_same(module, twin, *inputs(), factor=0.5)
    assert num_fused() == 1
    assert type(module).forward is forward
    hidden = attention(half)
    type(hidden).forward = Hidden(plain)
    assert apply_liger_kernels(hidden).entries == []


def test_two_functions_of_one_method_are_both_replaced(num_fused: Callable[[], int]) -> None:
    flags = {"takes_dim": False, "one_tensor": False, "backwards": False, "parted": False, "is_complex": False}
    other: Any = replace(
        random_form(0), neighbors=True, tables="whole", heads_dim=1, names=("q", "k"), **flags
    ).module()
    scope = {"other": other.forward.__globals__["rotate"], "odd": LOOK_ALIKES["without sine"][0]}
    module = attention(half, "odd(*other(*rotate(q, k, cos, sin), cos, sin), cos, sin)", **scope)
    twin = assert_replaced(module, "apply_rotary (interleaved), apply_rotary")
    num_fused()
    assert_same(module, twin, *inputs())
    assert num_fused() == 2


@pytest.mark.parametrize("head_dim", [2, 80])
def test_module_is_verified_at_its_own_head_dim(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(half)
    module.head_dim = head_dim
    watched = Mock(side_effect=rotary.apply_rotary)
    monkeypatch.setattr(rotary, "apply_rotary", watched)
    assert_replaced(module, "apply_rotary")
    assert head_dim in {call.args[0].shape[-1] for call in watched.call_args_list}
