"""Ops that are one differentiable function each: kernels against float64 at all sizes, layouts and options."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
from liger_ops.softmax import softmax_reference
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few, lay_out

EPS = 1e-5
Shape = tuple[int, ...]


class Sized(NamedTuple):
    """An op with its options, and sizes at which its kernels change."""

    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    parameters: Callable[[Shape], list[Shape]]  # shapes of all tensors but the first; the last may be None
    shapes: list[Shape]
    options: dict[str, list[Any]] = {}
    num_inputs: int = 1  # that have the first one's dtype


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor | None, *, groups: int, **options: Any) -> Tensor:
    return liger_ops.gated_rms_norm(x, gate, weight, EPS, group_size=x.shape[-1] // groups, **options)


def plain_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    names = "groups", "norm_before_gate", "activation", "casting"
    groups, norm_before_gate, activation, casting = (options[name] for name in names)
    factor = getattr(torch, activation, F.silu)(wide(gate))
    z = wide(x) if norm_before_gate else wide(x) * factor
    y = normalized(z.unflatten(-1, (groups, -1))).flatten(-2)
    y = wide(y.to(x.dtype)) if casting == "llama" else y
    y = y if weight is None else y * wide(weight)
    y = y * factor if norm_before_gate else y
    return y.to(x.dtype if weight is None or casting == "gemma" else torch.promote_types(x.dtype, weight.dtype))


def plain_modulated_rms_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    y = normalized(wide(x)) * wide(weight) * (1 + wide(scale)[:, None])
    return (y if shift is None else y + wide(shift)[:, None]).to(x.dtype)


def plain_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    y = wide(gamma) * torch.tanh(wide(alpha) * wide(x))
    return (y if beta is None else y + wide(beta)).to(x.dtype)


def plain_poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    first, second, third = (wide(weight)[2 - k] * normalized(wide(x) ** (k + 1)) for k in range(3))
    y = first + second + third
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def attend(
    op: Callable[..., Tensor], scores: Tensor, weight: Tensor, bias: Tensor | None, spread: int, **options: Any
) -> Tensor:
    return op(scores, weight, bias, 1, (spread, 2 * spread), spread, scores.shape[1] // weight.shape[1], **options)


def plain_attention(scores: Tensor, weight: Tensor, bias: Tensor | None, *options: Any, sparse: bool) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    y = softmax_reference(scores.masked_fill(later, -torch.inf), sparse)
    parameters = weight.to(y.dtype), None if bias is None else bias.to(y.dtype)
    return F.conv2d(y, *parameters, *options).masked_fill(later, 0.0)


def num_columns(streams: Shape) -> int:
    return streams[-2] * (streams[-2] + 2)


def hyper_connection(
    ops: SimpleNamespace, x: Tensor, phi: Tensor, b: Tensor, *alphas: Tensor | None, **options: Any
) -> Tensor:
    """A layer ``tanh``; without the last factor it is 1."""
    factors = [b.new_ones(1) if alpha is None else alpha for alpha in alphas]
    h_pre, h_post, h_res = ops.mhc_coeffs(x, phi * phi.shape[0] ** -0.5, b, *factors, **options)
    return ops.mhc_post_res(x, ops.mhc_pre(x, h_pre).tanh(), h_post, h_res)


def plain_coeffs(x: Tensor, phi: Tensor, b: Tensor, *alphas: Tensor, **options: Any) -> tuple[Tensor, ...]:
    n, rows = x.shape[-2], wide(x).flatten(-2)
    mix = rows @ wide(phi) / (rows.square().mean(-1, keepdim=True) + options["rms_eps"]).sqrt()
    parts = zip(mix.split([n, n, n * n], -1), wide(b).split([n, n, n * n]), alphas, strict=True)
    pre, post, res = (part * wide(alpha) + bias for part, bias, alpha in parts)
    matrix = res.unflatten(-1, (n, n)).softmax(-1) + options["sinkhorn_eps"]
    for dim in (-2, *(options["tmax"] - 1) * (-1, -2)):
        matrix = matrix / (matrix.sum(dim, keepdim=True) + options["sinkhorn_eps"])
    return pre.sigmoid() + options["pre_eps"], options["post_mult"] * post.sigmoid(), matrix


PLAIN_HYPER_CONNECTION = SimpleNamespace(
    mhc_coeffs=plain_coeffs,
    mhc_pre=lambda x, h_pre: (h_pre.unsqueeze(-1) * wide(x)).sum(-2).to(x.dtype),
    mhc_post_res=lambda x, f, h_post, h_res: (h_res @ wide(x) + h_post.unsqueeze(-1) * wide(f).unsqueeze(-2)).to(
        x.dtype
    ),
)
ROWS = [(1, 1), (2, 3, 123), (9, 1031), (200, 64), (3, 5000), (2, 16384)]
# Short rows share a tile; three tiles and more are walked over by the interpreter's few programs.
SIZED = {
    "gated_rms_norm": Sized(
        gated_rms_norm,
        plain_gated_rms_norm,
        lambda shape: [shape, shape[-1:]],
        [(1, 12), (2, 3, 124), (9, 1032), (200, 64), (3, 5000), (2, 16384)],
        {
            "groups": [1, 2, 4], "norm_before_gate": [False, True], "activation": ["silu", "sigmoid"],
            "casting": ["gemma", "llama"],
        },
        num_inputs=2,
    ),
    "modulated_rms_norm": Sized(
        lambda *tensors: liger_ops.modulated_rms_norm(*tensors, EPS),
        plain_modulated_rms_norm,
        lambda shape: [shape[-1:], shape[::2], shape[::2]],
        [(1, 1, 12), (2, 3, 123), (3, 9, 1032), (2, 150, 64), (7, 1, 507), (2, 3, 5000), (1, 2, 16384)],
    ),
    "dyt": Sized(liger_ops.dyt, plain_dyt, lambda shape: [(1,), shape[-1:], shape[-1:]], ROWS),
    "poly_norm": Sized(
        lambda x, weight, bias: liger_ops.poly_norm(x, weight, x.new_zeros(1) if bias is None else bias, EPS),
        plain_poly_norm,
        lambda shape: [(3,), (1,)],
        [(1, 12), *ROWS[1:]],
    ),
    **{
        name: Sized(op, functools.partial(softmax_reference, is_sparse=name == "sparsemax"), lambda shape: [], ROWS)
        for name, op in (("softmax", liger_ops.softmax), ("sparsemax", liger_ops.sparsemax))
    },
    "multi_token_attention": Sized(
        functools.partial(attend, liger_ops.multi_token_attention),
        functools.partial(attend, plain_attention),
        lambda shape: [(shape[1], max(1, shape[1] // 2), 3, 5), shape[1:2]],
        [(1, 1, 1, 1), (2, 4, 5, 5), (1, 2, 33, 33), (3, 2, 64, 64), (1, 2, 130, 130)],
        {"spread": [1, 2], "sparse": [False, True]},
    ),
    "hyper_connection": Sized(
        functools.partial(hyper_connection, liger_ops),
        functools.partial(hyper_connection, PLAIN_HYPER_CONNECTION),
        lambda shape: [(math.prod(shape[-2:]), num_columns(shape)), (num_columns(shape),), *3 * [(1,)]],
        [(1, 1, 1), (2, 3, 4, 16), (3, 2, 123), (70, 4, 64), (5, 3, 31), (2, 15, 40), (1, 4, 5000)],
        {
            "tmax": [1, 2, 20], "rms_eps": [EPS], "pre_eps": [0.0, 0.25], "sinkhorn_eps": [0.0, 1e-6],
            "post_mult": [2.0, 0.5],
        },
    ),
}  # fmt: skip


@st.composite
def draws(draw: st.DrawFn) -> SimpleNamespace:
    op = SIZED[draw(st.sampled_from([*SIZED]))]
    return SimpleNamespace(
        op=op,
        shape=draw(st.sampled_from(op.shapes)),
        options=draw(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in op.options.items()})),
        dtype=draw(st.sampled_from(DTYPES)),
        parameter_dtype=draw(st.sampled_from([None, torch.float32])),
        has_last=draw(st.booleans()),
        layouts=draw(st.tuples(*2 * [st.sampled_from(["contiguous", "sliced", "transposed"])])),
        wanted=draw(st.sets(st.integers(0, 3))),
        seed=draw(st.integers(0, 2**16)),
    )


@given(draw=draws())
@few(200)
def test_no_less_accurate_than_plain_pytorch(draw: Any, triton_device: torch.device) -> None:
    """With all tensors and without the last, and with gradients of some of them."""
    torch.manual_seed(draw.seed)
    op, dtype = draw.op, draw.dtype
    shapes = [draw.shape, *op.parameters(draw.shape)]
    dtypes = [dtype if index < op.num_inputs else draw.parameter_dtype or dtype for index in range(len(shapes))]
    inputs = [
        lay_out(torch.randn(shape).to(triton_device, each), draw.layouts[0])
        for shape, each in zip(shapes, dtypes, strict=True)
    ]
    absent = 0 if draw.has_last or len(inputs) == 1 else 1
    inputs = inputs[: len(inputs) - absent]
    needs = [index in draw.wanted or not draw.wanted & {*range(len(inputs))} for index in range(len(inputs))]
    upstream = lay_out(torch.randn(draw.shape, device=triton_device).to(dtype), draw.layouts[1])

    def run(function: Callable[..., Tensor], in_dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [each.detach().to(in_dtype or each.dtype) for each in inputs]
        asked = [leaf.requires_grad_() for leaf, need in zip(leaves, needs, strict=True) if need]
        y = function(*leaves, *[None] * absent, **draw.options)
        return [y, *torch.autograd.grad(y, asked, upstream.to(y))]

    # Triton's interpreter rounds to bfloat16 toward zero, which doubles the error that float32 results carry along, and
    # takes sums over rows one by one.
    is_mixed = torch.bfloat16 in dtypes and torch.float32 in dtypes
    results = run(op.fused, None), run(op.plain, None), run(op.plain, torch.float64)
    for index, (ours, theirs, true) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        factor = 4.0 if is_mixed or index > op.num_inputs else 2.0
        # The gradient of one number is a sum of both signs over all others.
        magnitude = inputs[0].numel() ** 0.5 if index and ours.shape == (1,) else 0.0
        assert_as_accurate(f"result {index}", ours, theirs, true, factor=factor, magnitude=magnitude)
