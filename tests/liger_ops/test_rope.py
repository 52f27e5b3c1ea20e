"""Rotary embedding: kernel against the reference in float64, with Hugging Face's formula as the yardstick."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from liger_ops.rope import RotaryOptions, apply_rotary, apply_rotary_reference, choose_launch
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """Inputs of one call, and the upstream gradients of its outputs."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    grad_q: Tensor
    grad_k: Tensor


def make_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads_dim: int = 1,
    batch_size: int = 2,
    seq_len: int = 3,
) -> Case:
    """Projections viewed as heads, as attention layers make them; cos and sin are random, so their halves differ."""

    def heads(count: int) -> Tensor:
        projection = torch.randn(batch_size, seq_len, count * head_dim, device=device).to(dtype)
        x = projection.view(batch_size, seq_len, count, head_dim)
        return x.transpose(1, 2) if heads_dim == 1 else x

    cos, sin = (torch.randn(batch_size, seq_len, head_dim, device=device).to(dtype) for _ in range(2))
    return Case(heads(num_heads), heads(num_kv_heads), cos, sin, heads(num_heads), heads(num_kv_heads))


def eager_apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """Hugging Face's ``apply_rotary_pos_emb``."""
    cos, sin = cos.unsqueeze(heads_dim - 4), sin.unsqueeze(heads_dim - 4)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)

    return rotate(q), rotate(k)


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    dtype: torch.dtype | None,
    heads_dim: int,
    **options: Any,
) -> list[Tensor]:
    """Outputs and gradients of q and k."""
    q, k, cos, sin = (tensor.detach().to(dtype or tensor.dtype) for tensor in case[:4])
    leaves = q.requires_grad_(), k.requires_grad_()
    outputs = function(*leaves, cos, sin, heads_dim=heads_dim, **options)
    upstream = case.grad_q.to(outputs[0].dtype), case.grad_k.to(outputs[1].dtype)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def assert_matches_reference(
    case: Case, heads_dim: int = 1, eager: Callable[..., tuple[Tensor, Tensor]] = eager_apply_rotary, **options: Any
) -> None:
    """Compares both outputs and both gradients, and their memory layouts with those of q and k."""
    actual, yardstick = run(apply_rotary, case, None, heads_dim, **options), run(eager, case, None, heads_dim)
    truth = run(eager, case, torch.float64, heads_dim)
    inputs = (case.q, case.k, case.q, case.k)
    for name, x, *results in zip(("q", "k", "grad_q", "grad_k"), inputs, actual, yardstick, truth, strict=True):
        assert results[0].dtype == results[1].dtype
        assert results[0].stride() == torch.empty_like(x).stride(), name
        assert_as_accurate(name, *results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        pytest.param(1, 1, 2, id="smallest"),
        pytest.param(7, 1, 80, id="odd head counts, half not a power of two"),
        pytest.param(4, 2, 64, id="grouped queries"),
        pytest.param(17, 3, 256, id="more heads than one tile"),
    ],
)
def test_apply_rotary_matches_reference(
    triton_device: torch.device, dtype: torch.dtype, heads_dim: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_case(num_heads, num_kv_heads, head_dim, dtype, triton_device, heads_dim=heads_dim)
    assert_matches_reference(case, heads_dim)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_apply_rotary_takes_common_head_sizes(triton_device: torch.device, head_dim: int) -> None:
    assert_matches_reference(make_case(3, 2, head_dim, torch.bfloat16, triton_device))


@pytest.mark.parametrize("shape", ["[1, seq_len, head_dim]", "[seq_len, head_dim]", "expanded", "column stride 2"])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_apply_rotary_takes_every_table_shape(triton_device: torch.device, shape: str, heads_dim: int) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device, heads_dim=heads_dim)
    view = {
        "[1, seq_len, head_dim]": lambda table: table[:1],
        "[seq_len, head_dim]": lambda table: table[1],
        "expanded": lambda table: table[:1].expand(2, 3, 8),
        "column stride 2": lambda table: torch.stack((table, table), dim=-1)[..., 0],
    }[shape]
    assert_matches_reference(case._replace(cos=view(case.cos), sin=view(case.sin)), heads_dim)


def test_apply_rotary_promotes_to_the_tables_dtype(triton_device: torch.device) -> None:
    case = make_case(3, 2, 8, torch.bfloat16, triton_device)
    assert_matches_reference(case._replace(cos=case.cos.float(), sin=case.sin.float()))
    assert_matches_reference(case._replace(k=case.k.float()))
    assert_matches_reference(case._replace(q=case.q.double()))


def test_apply_rotary_takes_any_memory_layout(triton_device: torch.device) -> None:
    case = make_case(4, 2, 8, torch.float32, triton_device)
    heads_outside = case._replace(q=case.q.contiguous(), k=case.k.contiguous())
    assert_matches_reference(heads_outside)
    assert_matches_reference(heads_outside._replace(k=case.k, grad_q=case.grad_q.contiguous()))
    qkv = torch.randn(2, 3, 8 * 8, device=triton_device).view(2, 3, 8, 8).transpose(1, 2)  # slices leave gaps
    assert_matches_reference(case._replace(q=qkv[:, :4], k=qkv[:, 4:6]))
    assert_matches_reference(case._replace(grad_q=case.grad_q.mT.contiguous().mT))


def test_apply_rotary_output_joins_heads_without_a_copy(triton_device: torch.device) -> None:
    case = make_case(4, 2, 8, torch.float32, triton_device)
    for result in run(apply_rotary, case, None, 1):
        assert result.transpose(1, 2).is_contiguous()


def test_apply_rotary_takes_an_expanded_upstream_gradient(triton_device: torch.device) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    scalar = torch.tensor(0.7, device=triton_device)
    assert_matches_reference(case._replace(grad_q=scalar.expand(2, 3, 3, 8)))
    assert_matches_reference(case._replace(grad_q=torch.randn(8, device=triton_device).expand(2, 3, 3, 8)))


@pytest.mark.parametrize(("batch_size", "seq_len"), [(0, 3), (2, 0), (1, 1)])
def test_apply_rotary_of_no_token_and_of_one(triton_device: torch.device, batch_size: int, seq_len: int) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device, batch_size=batch_size, seq_len=seq_len)
    assert_matches_reference(case)


@pytest.mark.parametrize("wanted", [0, 1], ids=["q", "k"])
def test_apply_rotary_computes_only_the_gradient_asked_for(triton_device: torch.device, wanted: int) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    expected = run(apply_rotary, case, None, 1)[2 + wanted]
    inputs = [case.q.clone(), case.k.clone()]
    inputs[wanted].requires_grad_()
    torch.autograd.backward(apply_rotary(*inputs, case.cos, case.sin)[wanted], (case.grad_q, case.grad_k)[wanted])
    assert inputs[1 - wanted].grad is None
    torch.testing.assert_close(inputs[wanted].grad, expected)


def test_apply_rotary_backward_when_one_output_is_unused(triton_device: torch.device) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    leaves = case.q.clone().requires_grad_(), case.k.clone().requires_grad_()
    apply_rotary(*leaves, case.cos, case.sin)[0].backward(case.grad_q)
    torch.testing.assert_close(leaves[0].grad, run(apply_rotary, case, None, 1)[2])
    assert torch.equal(leaves[1].grad, torch.zeros_like(case.k))


def test_apply_rotary_differentiates_tables_that_ask_for_it(triton_device: torch.device) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    cos = case.cos.clone().requires_grad_()
    q, k = apply_rotary(case.q, case.k, cos, case.sin)
    (q.sum() + k.sum()).backward()
    torch.testing.assert_close(cos.grad, case.q.sum(1) + case.k.sum(1))


def test_apply_rotary_backward_twice_and_inputs_unchanged(triton_device: torch.device) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    before = [tensor.clone() for tensor in case]
    leaves = case.q.requires_grad_(), case.k.requires_grad_()
    outputs = apply_rotary(*leaves, case.cos, case.sin)
    first = torch.autograd.grad(outputs, leaves, (case.grad_q, case.grad_k), retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, (2 * case.grad_q, 2 * case.grad_k))
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice)
    for old, new in zip(before, case, strict=True):
        assert torch.equal(old, new)


def rotary_table(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def test_apply_rotary_keeps_norms(triton_device: torch.device) -> None:
    case = make_case(3, 2, 16, torch.float32, triton_device)
    q, _ = apply_rotary(case.q, case.k, *rotary_table(torch.arange(3, device=triton_device), 16))
    torch.testing.assert_close(q.norm(dim=-1), case.q.norm(dim=-1))


def test_attention_scores_depend_on_relative_position(triton_device: torch.device) -> None:
    case = make_case(2, 2, 16, torch.float32, triton_device)
    positions = torch.arange(3, device=triton_device)

    def scores(shift: int) -> Tensor:
        q, k = apply_rotary(case.q, case.k, *rotary_table(positions + shift, 16))
        return q @ k.mT

    torch.testing.assert_close(scores(0), scores(50), atol=1e-4, rtol=1e-4)
    assert (scores(0) - case.q @ case.k.mT).abs().max() > 0.1


def eager_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """The rotation of Hugging Face's GPT-J and Cohere, on the first columns."""
    cos, sin = cos.unsqueeze(heads_dim - 4), sin.unsqueeze(heads_dim - 4)

    def rotate(x: Tensor) -> Tensor:
        rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        swapped = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((rotary * cos + swapped * sin, rest), dim=-1)

    return rotate(q), rotate(k)


def eager_partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """The rotation of Hugging Face's GPT-NeoX and Phi."""
    rotary_dim = cos.shape[-1]
    rotated = eager_apply_rotary(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, heads_dim)
    q, k = (torch.cat((y, x[..., rotary_dim:]), dim=-1) for y, x in zip(rotated, (q, k), strict=True))
    return q, k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 20])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_partial_and_interleaved_rotation(
    triton_device: torch.device, dtype: torch.dtype, heads_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    case = make_case(5, 2, 20, dtype, triton_device, heads_dim=heads_dim)
    case = case._replace(cos=case.cos[..., :rotary_dim], sin=case.sin[..., :rotary_dim])
    eager = eager_interleaved if interleaved else eager_partial
    assert_matches_reference(case, heads_dim, eager, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)], ids=str)
def test_position_ids_choose_the_row_of_a_table(
    triton_device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    table_cos, table_sin = torch.randn(2, 11, 8, device=triton_device)
    position_ids = torch.randint(11, shape, device=triton_device, dtype=dtype)
    chosen = case._replace(cos=table_cos[position_ids.long()], sin=table_sin[position_ids.long()])
    expected = run(apply_rotary, chosen, None, 1, interleaved=interleaved)
    tables = case._replace(cos=table_cos, sin=table_sin)
    actual = run(apply_rotary, tables, None, 1, interleaved=interleaved, position_ids=position_ids)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sections", [(1, 2, 1), (0, 0, 4), (2, 0, 2)], ids=str)
def test_multimodal_sections_choose_the_table_of_a_column(
    triton_device: torch.device, sections: tuple[int, ...], batch: int, heads_dim: int
) -> None:
    case = make_case(3, 2, 10, torch.float32, triton_device, heads_dim=heads_dim)
    cos, sin = torch.randn(2, 3, batch, 3, 8, device=triton_device)
    # As Hugging Face's Qwen2-VL picks them.
    chosen = (
        torch.cat([part[i % 3] for i, part in enumerate(table.split(list(sections) * 2, dim=-1))], dim=-1)
        for table in (cos, sin)
    )
    expected = run(apply_rotary, case._replace(cos=next(chosen), sin=next(chosen)), None, heads_dim)
    actual = run(apply_rotary, case._replace(cos=cos, sin=sin), None, heads_dim, mrope_sections=sections)
    torch.testing.assert_close(actual, expected)


def test_reference_takes_every_option_too() -> None:
    case = make_case(3, 2, 10, torch.float64, torch.device("cpu"))
    cos, sin = torch.randn(2, 3, 1, 3, 8)
    torch.testing.assert_close(
        apply_rotary(case.q, case.k, cos, sin, mrope_sections=[4, 0, 0], interleaved=True),
        eager_interleaved(case.q, case.k, cos[0], sin[0], 1),
    )
    position_ids = torch.tensor([[2, 0, 1]])
    torch.testing.assert_close(
        apply_rotary(case.q, case.k, cos[0, 0], sin[0, 0], position_ids=position_ids),
        eager_partial(case.q, case.k, cos[0, 0][position_ids], sin[0, 0][position_ids], 1),
    )


@pytest.mark.gpu
def test_position_out_of_range_gives_nan_on_the_gpu() -> None:
    case = make_case(3, 2, 8, torch.float32, torch.device("cuda"))
    tables = torch.randn(2, 11, 8, device="cuda")
    q, k = apply_rotary(case.q, case.k, *tables, position_ids=torch.tensor([3, 11, -1], device="cuda"))
    for x in (q, k):
        assert x[:, :, 0].isfinite().all()
        assert x[:, :, 1:].isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.tensor([0, 11, 1])}, "between 0 and cos' max_positions - 1 = 10, got 0 to 11"),
        (
            {"position_ids": torch.tensor([0.0, 1.0, 2.0])},
            "position_ids must be a tensor of int64 or int32, got .* torch.float32",
        ),
        ({"position_ids": torch.tensor([0, 1])}, r"position_ids must be \[seq_len\].* got a tensor of shape \(2,\)"),
        ({"mrope_sections": [1, 2, 1]}, r"cos must be \[3, batch_size or 1, seq_len, rotary_dim\]"),
        ({"mrope_sections": [1, 2, 1], "position_ids": torch.tensor([0, 1, 2])}, "position_ids must be None"),
    ],
    ids=["out of range", "float positions", "too few", "tables without sections", "both"],
)
def test_options_that_do_not_fit_raise(options: dict[str, Any], message: str) -> None:
    case = make_case(3, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        apply_rotary(case.q, case.k, *torch.randn(2, 11, 8), **options)


def test_sections_must_add_up_to_half_of_the_columns() -> None:
    case = make_case(3, 2, 8, torch.float32, torch.device("cpu"))
    tables = torch.randn(2, 3, 2, 3, 8)
    for sections in ([1, 2], [1, 2, 2], [5, -2, 1]):
        with pytest.raises(ValueError, match="mrope_sections must be three numbers that add up to rotary_dim / 2 = 4"):
            apply_rotary(case.q, case.k, *tables, mrope_sections=sections)


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_reference_gradients_are_right(heads_dim: int) -> None:
    case = make_case(3, 2, 4, torch.float64, torch.device("cpu"), heads_dim=heads_dim)
    inputs = [tensor.requires_grad_() for tensor in case[:4]]
    for interleaved in (False, True):
        options = RotaryOptions(heads_dim, interleaved, [])
        assert torch.autograd.gradcheck(lambda *x, options=options: apply_rotary_reference(*x, None, options), inputs)


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotary_ops_are_well_formed(triton_device: torch.device, heads_dim: int) -> None:
    case = make_case(3, 2, 8, torch.bfloat16, triton_device, heads_dim=heads_dim)
    checks = ("test_schema", "test_faketensor")
    forward, backward = torch.ops.liger_ops.rotary_forward.default, torch.ops.liger_ops.rotary_backward.default
    options = (None, heads_dim, False, [])
    arguments = (case.q, case.k, case.cos.float(), case.sin, *options)
    torch.library.opcheck(forward, arguments, test_utils=checks)
    strides = (list(output.stride()) for output in forward(*arguments))
    gradients = (case.grad_q.contiguous(), case.grad_k)
    arguments = (*gradients, case.cos, case.sin, *options, *strides, torch.bfloat16, torch.float32)
    torch.library.opcheck(backward, arguments, test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_apply_rotary_compiles_to_one_graph(triton_device: torch.device, dynamic: bool) -> None:
    case = make_case(3, 2, 8, torch.float32, triton_device)
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for actual, expected in zip(run(compiled, case, None, 1), run(apply_rotary, case, None, 1), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


def test_apply_rotary_off_cuda_is_the_reference() -> None:
    q, k, cos, sin, *_ = make_case(3, 2, 8, torch.bfloat16, torch.device("cpu"))
    for actual, expected in zip(
        apply_rotary(q, k, cos, sin),
        apply_rotary_reference(q, k, cos, sin, None, RotaryOptions(1, False, [])),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("shapes", "heads_dim", "message"),
    [
        pytest.param({}, 3, r"heads_dim must be an integer of at least 1 and at most 2, got 3", id="heads_dim"),
        pytest.param(
            {"cos": (2, 5, 7)},
            1,
            r"rotary_dim, is even and at most .* 8, got .* shape \(2, 5, 7\)",
            id="odd rotary_dim",
        ),
        pytest.param(
            {"q": (3, 5, 8)}, 1, r"q must be a tensor of 4 dimensions.* got .* shape \(3, 5, 8\)", id="q not 4-D"
        ),
        pytest.param({"k": (2, 1, 4, 8)}, 1, r"k must be .* q's shape \(2, 3, 5, 8\).* got .* \(2, 1, 4, 8\)", id="k"),
        pytest.param({"k": (2, 5, 8)}, 1, r"k must be .* q's shape .* got .* \(2, 5, 8\)", id="k not 4-D"),
        pytest.param({"cos": (3, 5, 8)}, 1, r"cos must .* \(2, 3, 5, 8\).* got .* \(3, 5, 8\)", id="cos batch"),
        pytest.param(
            {"cos": (2, 5, 10)},
            1,
            r"cos must .* at most head_dim = 8, got .* shape \(2, 5, 10\)",
            id="cos past head_dim",
        ),
        pytest.param({}, 2, r"cos must .* heads_dim=2, got .* \(2, 5, 8\)", id="heads_dim of another layout"),
        pytest.param({"sin": (1, 5, 8)}, 1, r"sin must be .* shape \(2, 5, 8\) \(cos'\), got .* \(1, 5, 8\)", id="sin"),
    ],
)
def test_apply_rotary_rejects(shapes: dict[str, tuple[int, ...]], heads_dim: int, message: str) -> None:
    fitting = {"q": (2, 3, 5, 8), "k": (2, 3, 5, 8), "cos": (2, 5, 8), "sin": (2, 5, 8)}
    tensors = {name: torch.ones(shape) for name, shape in (fitting | shapes).items()}
    with pytest.raises(ValueError, match=message):
        apply_rotary(**tensors, heads_dim=heads_dim)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256, 1024])
def test_choose_launch_covers_a_head_in_a_bounded_tile(head_dim: int) -> None:
    for num_heads in (1, 14, 64):
        launch = choose_launch(num_heads, head_dim)
        assert launch.block_half >= head_dim // 2
        assert launch.block_heads * launch.block_half <= 1024
        assert launch.num_warps in (1, 2, 4)
