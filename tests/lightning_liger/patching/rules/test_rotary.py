"""Rotary functions are found by what they compute; calls that the fused one does not cover stay as they were."""

import copy
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched, rotary
from tests.lightning_liger.patching.rules.comparing import assert_kept, assert_replaced, assert_same

HEAD_DIM, SEQ_LEN = 16, 6


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def half_of_queries_named_otherwise(query_states, key_states, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:
        cos, sin = cos[:, position_ids], sin[:, position_ids]
    return half(query_states, key_states, cos, sin, unsqueeze_dim)


def half_without_unsqueeze_dim(q, k, cos, sin):
    return half(q, k, cos, sin, 2)


def half_cast_back(q, k, cos, sin, unsqueeze_dim=1):
    rotated = half(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def half_of_first_columns(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1]
    q_rotated, k_rotated = half(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((q_rotated, q[..., width:]), dim=-1), torch.cat((k_rotated, k[..., width:]), dim=-1)


def half_of_last_columns(q, k, cos, sin, unsqueeze_dim=1):
    rest = q.shape[-1] - cos.shape[-1]
    q_rotated, k_rotated = half(q[..., rest:], k[..., rest:], cos, sin, unsqueeze_dim)
    return torch.cat((q[..., :rest], q_rotated), dim=-1), torch.cat((k[..., :rest], k_rotated), dim=-1)


def half_with_an_optional_key(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    if k is not None:
        return half(q, k, cos, sin, unsqueeze_dim)
    return half(q, q, cos, sin, unsqueeze_dim)[0]


def half_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, -sin, unsqueeze_dim)


def half_of_one_tensor(x, cos, sin, unsqueeze_dim=1):
    return half(x, x, cos, sin, unsqueeze_dim)[0]


def half_of_half_tables(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1), unsqueeze_dim)


def neighbours(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def neighbours_from_first_half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return neighbours(q, k, cos, sin, unsqueeze_dim)


def neighbours_of_half_tables(q, k, cos, sin, unsqueeze_dim=1):
    return neighbours(q, k, cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1), unsqueeze_dim)


def neighbours_of_one_tensor(tensor, sin, cos):
    sin, cos = (table[:, :, None, :].repeat_interleave(2, 3) for table in (sin, cos))
    return tensor * cos + rotate_neighbours(tensor) * sin


def neighbours_parted(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    q1, q2, k1, k2 = q[..., ::2], q[..., 1::2], k[..., ::2], k[..., 1::2]
    return (
        torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), dim=-1),
        torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), dim=-1),
    )


def complex_numbers(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


def complex_numbers_of_the_negative_angle(xq, xk, freqs_cis):
    return complex_numbers(xq, xk, freqs_cis.conj())


def complex_numbers_scaled(xq, xk, freqs_cis):
    return complex_numbers(xq, xk, 1.5 * freqs_cis)


def without_sine(q, k, cos, sin, unsqueeze_dim=1):
    return q * cos.unsqueeze(unsqueeze_dim), k * cos.unsqueeze(unsqueeze_dim)


def key_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q, k, cos, sin, unsqueeze_dim)
    return q, k * 1.01


def key_detached(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q, k, cos, sin, unsqueeze_dim)
    return q, k.detach() + 0 * k


def with_values(q, k, v, cos, sin, unsqueeze_dim=1):
    return (*half(q, k, cos, sin, unsqueeze_dim), v)


def attention(function: FunctionType, call: str = "rotate(q, k, cos, sin)") -> nn.Module:
    """A module whose method finds ``function`` as the global ``rotate``."""
    scope = {"nn": nn, "rotate": function}
    source = f"""
class Attention(nn.Module):
    def forward(self, q, k, cos, sin, position_ids=None):
        return {call}
"""
    exec(source, scope)
    return scope["Attention"]()


def inputs(heads_dim: int = 1, table_dim: int = HEAD_DIM, batch_size: int = 2) -> list[Tensor]:
    """Queries, keys, cosines and sines; the tables differ in all their columns, and between rows of the batch."""
    q, k = (torch.randn(2, SEQ_LEN, num_heads, HEAD_DIM) for num_heads in (4, 2))
    if heads_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q, k, torch.randn(batch_size, SEQ_LEN, table_dim), torch.randn(batch_size, SEQ_LEN, table_dim)]


@pytest.fixture
def num_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the fused function was called since the last time that this was asked."""
    calls: list[None] = []
    apply_rotary = rotary.apply_rotary
    monkeypatch.setattr(rotary, "apply_rotary", lambda *args, **kw: calls.append(None) or apply_rotary(*args, **kw))

    def count() -> int:
        number = len(calls)
        calls.clear()
        return number

    return count


HALVES, NEIGHBOURS = "apply_rotary", "apply_rotary (interleaved)"
FORMS: dict[str, tuple[FunctionType, str, dict[str, Any], str]] = {
    "half": (half, "rotate(q, k, cos, sin)", {}, HALVES),
    "keyword": (half, "rotate(q, k, cos, sin, unsqueeze_dim=1)", {}, HALVES),
    "positional_2": (half, "rotate(q, k, cos, sin, 2)", {"heads_dim": 2}, HALVES),
    "other_names": (half_of_queries_named_otherwise, "rotate(q, k, cos, sin)", {}, HALVES),
    "no_unsqueeze_dim": (half_without_unsqueeze_dim, "rotate(q, k, cos, sin)", {"heads_dim": 2}, HALVES),
    "cast_back": (half_cast_back, "rotate(q, k, cos, sin)", {}, HALVES),
    "first_columns": (half_of_first_columns, "rotate(q, k, cos, sin)", {"table_dim": 8}, HALVES),
    "optional_key": (half_with_an_optional_key, "rotate(q, k, cos=cos, sin=sin)", {}, HALVES),
    "backwards": (half_backwards, "rotate(q, k, cos, sin)", {}, HALVES),
    "one_tensor": (half_of_one_tensor, "(rotate(q, cos, sin), rotate(k, cos, sin))", {}, HALVES),
    "one_tensor_2": (
        half_of_one_tensor,
        "(rotate(q, cos, sin, unsqueeze_dim=2), rotate(k, cos, sin, 2))",
        {"heads_dim": 2},
        "apply_rotary",
    ),
    "half_tables": (half_of_half_tables, "rotate(q, k, cos, sin)", {"table_dim": 8}, HALVES),
    "neighbours": (neighbours, "rotate(q, k, cos, sin)", {}, NEIGHBOURS),
    "neighbours_from_first_half": (neighbours_from_first_half, "rotate(q, k, cos, sin)", {}, NEIGHBOURS),
    "neighbours_of_half_tables": (
        neighbours_of_half_tables,
        "rotate(q, k, cos, sin, 2)",
        {"table_dim": 8, "heads_dim": 2},
        NEIGHBOURS,
    ),
    "sine_first": (
        neighbours_of_one_tensor,
        "(rotate(q, sin, cos), rotate(k, sin, cos))",
        {"table_dim": 8, "heads_dim": 2},
        NEIGHBOURS,
    ),
    "complex": (
        complex_numbers,
        "rotate(q, k, cos.float() + 1j * sin.float())",
        {"table_dim": 8, "heads_dim": 2},
        NEIGHBOURS,
    ),
    "complex_backwards": (
        complex_numbers_of_the_negative_angle,
        "rotate(q, k, freqs_cis=cos.float() + 1j * sin.float())",
        {"table_dim": 8, "heads_dim": 2},
        NEIGHBOURS,
    ),
    "parted": (neighbours_parted, "rotate(q, k, cos, sin)", {}, NEIGHBOURS),
    "parted_2": (neighbours_parted, "rotate(q, k, cos, sin, unsqueeze_dim=2)", {"heads_dim": 2}, NEIGHBOURS),
}
every_form = pytest.mark.parametrize(("function", "call", "options", "description"), FORMS.values(), ids=FORMS)


@every_form
def test_rotary_function_of_any_form_is_replaced_and_stays_the_same(
    function: FunctionType, call: str, options: dict[str, Any], description: str, num_fused: Callable[[], int]
) -> None:
    module = attention(function, call)
    twin = assert_replaced(module, description)
    num_fused()
    q, k, cos, sin = inputs(**options)
    assert_same(module, twin, q, k, cos, sin)
    assert num_fused() == call.count("rotate(")
    for dtype, table_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        assert_same(module, twin, q.to(dtype), k.to(dtype), cos.to(table_dtype), sin.to(table_dtype))


LOOK_ALIKES: dict[str, tuple[FunctionType, str]] = {
    "last_columns": (half_of_last_columns, "rotate is not apply_rotary: output differs by"),
    "without_sine": (without_sine, "rotate is not apply_rotary: output differs by"),
    "key_scaled": (key_scaled, "rotate is not apply_rotary: output differs by"),
    "key_detached": (key_detached, "rotate is not apply_rotary: gradient differs by"),
    "complex_scaled": (complex_numbers_scaled, "rotate is not apply_rotary: output differs by"),
    "with_values": (with_values, "rotate is not apply_rotary: "),
}


@pytest.mark.parametrize(("function", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alike_is_kept_with_a_reason(function: FunctionType, reason: str) -> None:
    assert_kept(attention(function), reason)


def test_method_without_a_rotary_function_is_not_reported() -> None:
    assert apply_liger_kernels(attention(rotate_half, "rotate(q)")).entries == []


NOT_COVERED: dict[str, tuple[FunctionType, str]] = {
    "tables_of_2_dims": (half, "rotate(q.transpose(1, 2), k.transpose(1, 2), cos[0], sin[0])"),
    "tables_of_4_dims": (half, "rotate(q, k, cos[:1, None], sin[:1, None])"),
    "queries_of_5_dims": (half, "rotate(q[None], k[None], cos[None], sin[None], 2)"),
    "first_dim": (half, "rotate(q, k, cos[0], sin[0], 0)"),
    "negative_dim": (half, "rotate(q, k, cos, sin, -3)"),
    "one_position_for_all": (half, "rotate(q, k, cos[:, :1], sin[:, :1])"),
    "larger_batch_of_tables": (half, "rotate(q[:1], k[:1], cos, sin)"),
    "sine_of_one_row": (half, "rotate(q, k, cos, sin[:1])"),
    "positions": (half_of_queries_named_otherwise, "rotate(q, k, cos, sin, position_ids)"),
    "positions_by_name": (half_of_queries_named_otherwise, "rotate(q, k, cos, sin, position_ids=position_ids)"),
    "no_key": (half_with_an_optional_key, "rotate(q, cos=cos, sin=sin)"),
}


@pytest.mark.parametrize(("function", "call"), NOT_COVERED.values(), ids=NOT_COVERED)
def test_call_that_is_not_covered_reaches_the_original(
    function: FunctionType, call: str, num_fused: Callable[[], int]
) -> None:
    module = attention(function, call)
    twin = assert_replaced(module, "apply_rotary")
    num_fused()
    assert_same(module, twin, *inputs(), position_ids=torch.arange(SEQ_LEN).flip(0))
    assert num_fused() == 0


def test_wrong_call_fails_as_the_original_does() -> None:
    for call in ("rotate(q, k, cos)", "rotate(q, k, cos, sin, 1, 2)", "rotate(q, k, cos, sin, unknown=1)"):
        module = attention(half, call)
        twin = assert_replaced(module, "apply_rotary")
        for each in (module, twin):
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
        '''Says what it does.'''
        q, k = super().forward(q, k, cos, sin)
        return self.rotate(q * scale + shift, k, cos, sin, scale=2.0)
"""
    exec(source, scope)
    names, classes = dict(scope), [scope["Base"], scope["Attention"]]
    before = [dict(vars(each)) for each in classes]
    module, sibling = scope["Attention"](), scope["Attention"]()
    report = apply_liger_kernels(module)
    assert report.num_replaced == 1
    assert (module.forward.__name__, module.forward.__doc__) == ("forward", "Says what it does.")
    arguments = inputs()
    for each, number in ((sibling, 0), (module, 1)):
        num_fused()
        each(*arguments)
        assert num_fused() == number
    # Also defaults, closures, and the keyword-only default of an inherited method.
    assert_same(sibling, module, *arguments)
    assert_same(sibling, module, *arguments, 2.0, shift=1.0)
    assert scope == names
    assert [dict(vars(each)) for each in classes] == before
    report.undo()
    num_fused()
    module(*arguments)
    assert num_fused() == 0


def test_two_functions_of_one_method_are_both_replaced(num_fused: Callable[[], int]) -> None:
    scope: dict[str, Any] = {"nn": nn, "half": half, "neighbours": neighbours, "odd": without_sine}
    source = """
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        q, k = half(q, k, cos, sin)
        q, k = neighbours(q, k, cos, sin)
        return odd(q, k, cos, sin)
"""
    exec(source, scope)
    module = scope["Attention"]()
    twin = assert_replaced(module, "apply_rotary, apply_rotary (interleaved)")
    num_fused()
    assert_same(module, twin, *inputs())
    assert num_fused() == 2


@pytest.mark.parametrize("head_dim", [2, 24, 80])
def test_module_is_verified_at_its_own_head_dim(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(half)
    module.head_dim = head_dim
    widths: set[int] = set()
    apply_rotary = rotary.apply_rotary

    def watched(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        widths.add(q.shape[-1])
        return apply_rotary(q, *args, **kwargs)

    monkeypatch.setattr(rotary, "apply_rotary", watched)
    assert isinstance(assert_replaced(copy.deepcopy(module), "apply_rotary"), Patched)
    assert head_dim in widths
