"""Rotary embedding: kernel against Hugging Face's formulas in float64, with the tested dtype's as the yardstick."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import rope
from liger_ops.rope import apply_rotary, choose_launch
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few

# Heads, heads of keys, columns, rotated columns: the smallest, a half that is no power of two, grouped queries, more
# heads than one tile, partial rotation, common sizes.
SIZES = [(1, 1, 2, 2), (7, 1, 80, 80), (4, 2, 64, 64), (17, 3, 256, 256), (5, 2, 20, 6), (5, 2, 20, 16), (3, 2, 96, 96)]


class Case(NamedTuple):
    """Inputs of one call, and the upstream gradients of its outputs."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    grad_q: Tensor
    grad_k: Tensor


def make_case(
    num_heads: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    rotary_dim: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    heads_dim: int = 1,
) -> Case:
    """Projections viewed as heads, as attention layers make them; cos and sin are random, so their halves differ."""

    def heads(count: int) -> Tensor:
        x = torch.randn(2, 3, count * head_dim, device=device).to(dtype).view(2, 3, count, head_dim)
        return x.transpose(1, 2) if heads_dim == 1 else x

    cos, sin = (torch.randn(2, 3, rotary_dim, device=device).to(dtype) for _ in range(2))
    return Case(heads(num_heads), heads(num_kv_heads), cos, sin, heads(num_heads), heads(num_kv_heads))


def plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int = 1, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The rotation of Hugging Face's Llama, Phi (partial) and GPT-J (interleaved)."""
    cos, sin = cos.unsqueeze(heads_dim - 4), sin.unsqueeze(heads_dim - 4)

    def rotate(x: Tensor) -> Tensor:
        rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if interleaved:
            swapped = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = rotary.chunk(2, dim=-1)
            swapped = torch.cat((-second, first), dim=-1)
        return torch.cat((rotary * cos + swapped * sin, rest), dim=-1)

    return rotate(q), rotate(k)


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    dtype: torch.dtype | None = None,
    wanted: tuple[bool, bool] = (True, True),
    **options: Any,
) -> list[Tensor]:
    """Outputs, and the gradients of q and k that are wanted."""
    q, k, cos, sin = (tensor.detach().to(dtype or tensor.dtype) for tensor in case[:4])
    leaves = [x.requires_grad_() for x, is_wanted in zip((q, k), wanted, strict=True) if is_wanted]
    outputs = function(q, k, cos, sin, **options)
    pairs = [(y, grad.to(y)) for y, grad in zip(outputs, case[4:], strict=True) if y.requires_grad]
    ys, upstream = zip(*pairs, strict=True) if pairs else ((), ())
    return [*outputs, *(torch.autograd.grad(ys, leaves, upstream) if pairs else ())]


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "[batch_size, seq_len, rotary_dim]": lambda table: table,
    "[1, seq_len, rotary_dim]": lambda table: table[:1],
    "[seq_len, rotary_dim]": lambda table: table[1],
    "expanded": lambda table: table[:1].expand(table.shape),
    "column stride 2": lambda table: torch.stack((table, table), dim=-1)[..., 0],
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as projected": lambda x: x,
    "contiguous": lambda x: x.contiguous(),
    "sliced": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
    "column stride": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1, :1, :1].expand(x.shape),
}


@given(
    draw=st.builds(
        SimpleNamespace,
        sizes=st.sampled_from(SIZES),
        dtypes=st.tuples(*3 * [st.sampled_from(DTYPES)]),
        is_mixed=st.booleans(),
        heads_dim=st.sampled_from([1, 2]),
        interleaved=st.booleans(),
        table=st.sampled_from([*TABLES]),
        layouts=st.tuples(*2 * [st.sampled_from([*LAYOUTS])]),
        wanted=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
        seed=st.integers(0, 2**16),
    )
)
@few(60)
def test_no_less_accurate_than_plain_pytorch(draw: Any, triton_device: torch.device) -> None:
    """With the gradients of q and k, laid out as they came and with gaps closed."""
    torch.manual_seed(draw.seed)
    dtypes = draw.dtypes if draw.is_mixed else draw.dtypes[:1] * 3
    input_layout, upstream_layout = (LAYOUTS[name] for name in draw.layouts)
    tensors = make_case(*draw.sizes, dtype=dtypes[0], device=triton_device, heads_dim=draw.heads_dim)
    case = Case(
        input_layout(tensors.q), input_layout(tensors.k.to(dtypes[1])),
        *(TABLES[draw.table](each.to(dtypes[2])) for each in tensors[2:4]), *map(upstream_layout, tensors[4:]),
    )  # fmt: skip
    options: Any = {"wanted": draw.wanted, "heads_dim": draw.heads_dim, "interleaved": draw.interleaved}
    actual, eager, truth = (
        run(apply_rotary, case, **options),
        run(plain, case, **options),
        run(plain, case, torch.float64, **options),
    )
    asked = [x for x, is_wanted in zip(case, draw.wanted, strict=False) if is_wanted]
    for index, (x, *results) in enumerate(zip([case.q, case.k, *asked], actual, eager, truth, strict=True)):
        assert results[0].dtype == results[1].dtype
        if draw.layouts[0] != "column stride":  # without one, memory is laid out as before
            assert results[0].stride() == torch.empty_like(x).stride(), index
        assert_as_accurate(f"result {index}", *results)


def test_tables_that_ask_for_a_gradient_get_one(triton_device: torch.device) -> None:
    case = make_case(device=triton_device)
    cos = case.cos.clone().requires_grad_()
    q, k = apply_rotary(case.q, case.k, cos, case.sin)
    (q.sum() + k.sum()).backward()
    torch.testing.assert_close(cos.grad, case.q.sum(1) + case.k.sum(1))


def test_an_output_that_is_not_used(triton_device: torch.device) -> None:
    case = make_case(device=triton_device)
    leaves = case.q.clone().requires_grad_(), case.k.clone().requires_grad_()
    apply_rotary(*leaves, case.cos, case.sin)[0].backward(case.grad_q)
    torch.testing.assert_close(leaves[0].grad, run(apply_rotary, case)[2])
    assert torch.equal(leaves[1].grad, torch.zeros_like(case.k))


def test_keep_dtype(triton_device: torch.device) -> None:
    case = make_case(device=triton_device)
    half = case._replace(q=case.q.half(), grad_q=case.grad_q.half())
    results = run(apply_rotary, half, keep_dtype=True)
    assert [each.dtype for each in results] == [torch.float16, torch.float32] * 2
    assert torch.equal(results[0], run(apply_rotary, half)[0].half())


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)], ids=str)
def test_position_ids_choose_the_row_of_a_table(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    case = make_case(device=device)
    table_cos, table_sin = torch.randn(2, 11, 8, device=device)
    position_ids = torch.randint(11, shape, device=device, dtype=dtype)
    chosen = case._replace(cos=table_cos[position_ids.long()], sin=table_sin[position_ids.long()])
    tables = case._replace(cos=table_cos, sin=table_sin)
    actual = run(apply_rotary, tables, interleaved=interleaved, position_ids=position_ids)
    torch.testing.assert_close(actual, run(plain, chosen, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sections", [(1, 2, 1), (0, 0, 4), (2, 0, 2)], ids=str)
def test_multimodal_sections_choose_the_table_of_a_column(
    device: torch.device, sections: tuple[int, ...], batch: int, heads_dim: int, interleaved: bool
) -> None:
    case = make_case(head_dim=10, device=device, heads_dim=heads_dim)
    cos, sin = torch.randn(2, 3, batch, 3, 8, device=device)
    table_of_pair = [index for index, size in enumerate(sections) for _ in range(size)]
    table_of_column = [table_of_pair[column // 2] for column in range(8)] if interleaved else 2 * table_of_pair
    chosen = (torch.stack([table[i, ..., c] for c, i in enumerate(table_of_column)], dim=-1) for table in (cos, sin))
    options: Any = {"heads_dim": heads_dim, "interleaved": interleaved}
    expected = run(plain, case._replace(cos=next(chosen), sin=next(chosen)), **options)
    actual = run(apply_rotary, case._replace(cos=cos, sin=sin), mrope_sections=sections, **options)
    torch.testing.assert_close(actual, expected)


def test_position_out_of_range_gives_nan_on_the_gpu(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "_check_positions", lambda *_: None)  # which raises on a CPU
    case = make_case(device=triton_device)
    tables = torch.randn(2, 11, 8, device=triton_device)
    q, k = apply_rotary(case.q, case.k, *tables, position_ids=torch.tensor([3, 11, -1], device=triton_device))
    for x in (q, k):
        assert x[:, :, 0].isfinite().all()
        assert x[:, :, 1:].isnan().all()


def test_dynamic_shapes_compile_to_one_graph(triton_device: torch.device) -> None:
    case = make_case(device=triton_device)
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager", dynamic=True)
    for actual, expected in zip(run(compiled, case), run(apply_rotary, case), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256, 1024])
def test_launch_covers_a_head_in_a_bounded_tile(head_dim: int) -> None:
    for num_heads in (1, 14, 64):
        block_heads, block_half, num_warps = choose_launch(num_heads, head_dim)
        assert block_half >= head_dim // 2
        assert block_heads * block_half <= 1024
        assert num_warps in (1, 2, 4)
