"""Ops that are one differentiable function each: kernels against float64 at all sizes, layouts and options."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
from liger_ops.backend import wide
from liger_ops.norm.row_norm import CASTINGS
from liger_ops.self_check import CASES
from liger_ops.softmax import softmax_reference
from tests.liger_ops.accuracy import DTYPES, LAYOUTS, assert_as_accurate, few, lay_out

EPS = 1e-5
Shape = tuple[int, ...]


class Sized(NamedTuple):
    """An op with its options, and sizes at which its kernels change."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    parameters: Callable[[Shape], list[Shape]]  # shapes of all tensors but the first
    shapes: list[Shape]
    options: dict[str, list[Any]] = {}
    num_inputs: int = 1  # that have the first one's dtype
    num_optional: int = 1  # of the last tensors, each of which may be None


def normalized(x: Tensor, dims: Any = -1) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + EPS)


def rms_norm(x: Tensor, weight: Tensor | None, *, offset: float, casting: Any) -> Tensor:
    offset = 0.0 if weight is None else offset
    return liger_ops.rms_norm(x, x.shape[-1:], weight, EPS, offset=offset, casting=casting)


def plain_rms_norm(x: Tensor, weight: Tensor | None, *, offset: float = 0.0, casting: str) -> Tensor:
    """The formulas of Hugging Face's Gemma and Llama layers, and of a layer without casts."""
    y = normalized(x if casting == "none" else wide(x))
    if casting != "gemma" or weight is None:
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (offset + (weight.to(y.dtype) if casting == "gemma" else weight))
    return y.to(x.dtype) if casting == "gemma" else y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, *, offset: float, casting: Any) -> Any:
    offset = 0.0 if weight is None else offset
    return liger_ops.add_rms_norm(x, residual, x.shape[-1:], weight, EPS, offset=offset, casting=casting)


def plain_group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int) -> Tensor:
    """Of so many channels in a group; those of dimension 1."""
    z = wide(x).unflatten(1, (-1, channels))
    dims = tuple(range(2, z.dim()))
    y = normalized(z - z.mean(dims, keepdim=True), dims).flatten(1, 2)
    shape = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * wide(weight).view(shape)
    return (y if bias is None else y + wide(bias).view(shape)).to(x.dtype)


def plain_layer_norm(x: Tensor, *parameters: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *(None if each is None else each.to(x.dtype) for each in parameters), EPS)


def plain_unit(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A gated unit; without up, the gate is packed."""

    def unit(gate: Tensor, up: Tensor | None) -> Tensor:
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return activation(gate) * up

    return unit


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
# Where tiles, masks and blocks of the row norms change; 17 rows of 1024 take three tiles on two programs.
NORM_ROWS = [(5, 4), (1, 6), (17, 1024), (2, 3, 507), (7, 4096), (3, 9000), (3, 12288), *ROWS[1:]]
UNITS = {
    "silu": (liger_ops.silu_mul, F.silu),
    "silu, scaled": (
        functools.partial(liger_ops.silu_mul, gate_multiplier=-0.375), lambda gate: F.silu(-0.375 * gate)
    ),
    "gelu": (liger_ops.gelu_mul, F.gelu),
    "gelu_tanh": (
        functools.partial(liger_ops.gelu_mul, approximate="tanh"), functools.partial(F.gelu, approximate="tanh")
    ),
    "relu_squared_mul": (liger_ops.relu_squared_mul, lambda gate: F.relu(gate).square()),
}  # fmt: skip
UNIT_SHAPES = [(4,), (0, 64), (3, 508), (1, 1024), (2, 3, 684)]  # the last: four blocks and some columns
CASTS = {"offset": [0.0, 1.0], "casting": [*CASTINGS]}
# Short rows share a tile; three tiles and more are walked over by the interpreter's few programs.
SIZED = {
    "rms_norm": Sized(rms_norm, plain_rms_norm, lambda shape: [shape[-1:]], NORM_ROWS, CASTS),
    "add_rms_norm": Sized(
        add_rms_norm,
        lambda x, residual, weight, **options: (plain_rms_norm(x + residual, weight, **options), x + residual),
        lambda shape: [shape, shape[-1:]],
        NORM_ROWS,
        CASTS,
    ),
    "layer_norm": Sized(
        lambda x, weight, bias: liger_ops.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        plain_layer_norm,
        lambda shape: 2 * [shape[-1:]],
        NORM_ROWS,
        num_optional=2,
    ),
    # Small, several blocks per group with channels together, several blocks per channel; instance norm too.
    "group_norm": Sized(
        lambda x, *parameters, channels: liger_ops.group_norm(x, x.shape[1] // channels, *parameters, EPS),
        plain_group_norm,
        lambda shape: 2 * [shape[1:2]],
        [(2, 6, 7), (3, 6, 5, 5), (2, 6, 33, 31), (1, 6, 4500), (1, 3, 2, 1025), (1, 3, 20000)],
        {"channels": [1, 3]},
        num_optional=2,
    ),
    **{
        name: Sized(function, plain_unit(activation), lambda shape: [shape], UNIT_SHAPES)
        for name, (function, activation) in UNITS.items()
    },
    "relu_squared": Sized(
        liger_ops.relu_squared, CASES["relu_squared"].plain, lambda shape: [], [(), *UNIT_SHAPES], num_optional=0
    ),
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
    "dyt": Sized(
        liger_ops.dyt,
        lambda x, *others: CASES["dyt"].plain(x, *(x.new_zeros(1) if each is None else each for each in others)),
        lambda shape: [(1,), shape[-1:], shape[-1:]],
        ROWS,
    ),
    "poly_norm": Sized(
        lambda *tensors: liger_ops.poly_norm(*tensors, EPS),
        CASES["poly_norm"].plain,
        lambda shape: [(3,), (1,)],
        [(1, 12), *ROWS[1:]],
        num_optional=0,
    ),
    **{
        name: Sized(
            getattr(liger_ops, name),
            functools.partial(softmax_reference, is_sparse=name == "sparsemax"),
            lambda shape: [],
            ROWS,
            num_optional=0,
        )
        for name in ("softmax", "sparsemax")
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
        [(1, 1, 1), (2, 3, 4, 16), (3, 2, 123), (70, 4, 20), (5, 3, 31), (2, 15, 40), (1, 4, 1030)],
        {
            "tmax": [1, 2, 20], "rms_eps": [EPS], "pre_eps": [0.0, 0.25], "sinkhorn_eps": [0.0, 1e-6],
            "post_mult": [2.0, 0.5],
        },
    ),
}  # fmt: skip


def draws(op: Sized) -> st.SearchStrategy[SimpleNamespace]:
    return st.builds(
        SimpleNamespace,
        shape=st.sampled_from(op.shapes),
        options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in op.options.items()}),
        dtype=st.sampled_from(DTYPES),
        parameter_dtype=st.sampled_from([None, torch.float32]),
        has=st.tuples(*op.num_optional * [st.booleans()]),
        layouts=st.tuples(*2 * [st.sampled_from(LAYOUTS)]),
        wanted=st.sets(st.integers(0, 3)),
        used=st.sampled_from([(True, True), (True, False), (False, True)]),
        seed=st.integers(0, 2**16),
    )


@given(data=st.data())
@few(40)
@pytest.mark.parametrize("name", SIZED)
def test_no_less_accurate_than_plain_pytorch(name: str, data: st.DataObject, triton_device: torch.device) -> None:
    """With all tensors and without some, and with gradients of some of them, of one output or both."""
    op = SIZED[name]
    draw = data.draw(draws(op))
    torch.manual_seed(draw.seed)
    dtype, shapes = draw.dtype, [draw.shape, *op.parameters(draw.shape)]
    is_there = [True] * (len(shapes) - op.num_optional) + [*draw.has]
    dtypes = [dtype if index < op.num_inputs else draw.parameter_dtype or dtype for index in range(len(shapes))]
    inputs = [
        lay_out(torch.randn(shape).to(triton_device, dtypes[place]), draw.layouts[place % 2]) if there else None
        for place, (shape, there) in enumerate(zip(shapes, is_there, strict=True))
    ]
    places = [place for place, there in enumerate(is_there) if there]
    places = [place for place in places if place in draw.wanted] or places

    def run(function: Callable[..., Any], in_dtype: torch.dtype | None) -> tuple[tuple[Tensor, ...], Any]:
        """The outputs and the gradients that are wanted, None where nothing that is used depends on a tensor."""
        leaves: list[Any] = [None if each is None else each.detach().to(in_dtype or each.dtype) for each in inputs]
        asked = [leaves[place].requires_grad_() for place in places]
        result = function(*leaves, **draw.options)
        outputs = result if isinstance(result, tuple) else (result,)
        generator = torch.Generator().manual_seed(draw.seed + 1)  # not that of x
        upstream = [torch.randn(y.shape, generator=generator).to(triton_device, dtype) for y in outputs]
        used = draw.used if len(outputs) > 1 else (True,)
        triples = zip(outputs, upstream, used, strict=True)
        pairs = [
            (y, lay_out(each, draw.layouts[1]).to(y)) for y, each, is_used in triples if is_used and y.requires_grad
        ]
        if not pairs:
            return outputs, ()
        ys, gradients = zip(*pairs, strict=True)
        return outputs, torch.autograd.grad(ys, asked, gradients, allow_unused=True)

    results = run(op.fused, None), run(op.plain, None), run(op.plain, torch.float64)
    is_mixed = torch.bfloat16 in dtypes and torch.float32 in dtypes
    # Triton's interpreter rounds to bfloat16 toward zero, whose error float32 results carry along.
    carried = 0.0
    if is_mixed and triton_device.type == "cpu":
        carried = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps / 2
    # A GPU's exponentials and quotients are off by some ulps, which float32 results show.
    usual = 8.0 if triton_device.type == "cuda" and dtype == torch.float32 else 2.0
    for ours, theirs, true in zip(*(outputs for outputs, _ in results), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        magnitude = carried * true.abs().max().item() if true.numel() else 0.0
        assert_as_accurate("output", ours, theirs, true, factor=4.0 if is_mixed else usual, magnitude=magnitude)
    for place, ours, theirs, true in zip(places, *(found for _, found in results), strict=False):
        assert (ours is None) == (theirs is None), place
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous() or not draw.used[0]  # the upstream gradient itself
            # Gradients are differences of terms of about 1, which may cancel where a row is all that there is.
            factor, magnitude = max(usual, 4.0 if is_mixed or place >= op.num_inputs else 2.0), 1.0
            if ours.shape == (1,):  # a sum of both signs over all others, and of errors that have one
                factor, magnitude = 16.0 if is_mixed else factor, inputs[0].numel() ** 0.5  # type: ignore[union-attr]
                # Its terms come from outputs in the inputs' dtype, all rounded to one side where rows repeat.
                magnitude *= max(1.0, torch.finfo(dtype).eps / torch.finfo(ours.dtype).eps / 2)
            magnitude = max(magnitude, carried)
            assert_as_accurate(f"gradient {place}", ours, theirs, true, factor=factor, magnitude=magnitude)
