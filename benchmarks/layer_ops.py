"""Ops of layers that are other than a transformer's: multi-token attention and hyper-connections."""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Contender, Inputs, Maker, Op, liger_kernel, ours

EPS = 1e-6


def _attention_inputs(make: Maker, batch_size: int, num_heads: int, seq_len: int, kernel_size: int) -> Inputs:
    shape = batch_size, num_heads, seq_len, seq_len
    return Inputs((make.leaf(*shape), make.leaf(num_heads, 1, kernel_size, kernel_size)), (make.normal(*shape),))


def _coefficients_inputs(make: Maker, num_tokens: int, n: int, num_channels: int) -> Inputs:
    phi = (make.normal(n * num_channels, n * (n + 2)) * 0.02).requires_grad_()
    b, *alphas = (make.normal(*shape).float().requires_grad_() for shape in ((n * (n + 2),), (), (), ()))
    upstream = tuple(make.normal(num_tokens, *shape).float() for shape in ((n,), (n,), (n, n)))
    return Inputs((make.leaf(num_tokens, n, num_channels), phi, b, *alphas), upstream)


def _streams_inputs(make: Maker, num_tokens: int, n: int, num_channels: int, *, is_pre: bool) -> Inputs:
    x, *matrices = (make.leaf(num_tokens, *shape) for shape in ((n, num_channels), (n,), (n, n)))
    h_one, h_res = (matrix.detach().float().requires_grad_() for matrix in matrices)
    f_out, upstream = make.leaf(num_tokens, num_channels), make.normal(*x.shape)
    return (
        Inputs((x, h_one), (upstream[:, 0].contiguous(),)) if is_pre else Inputs((x, f_out, h_one, h_res), (upstream,))
    )


def _eager_attention(scores: Tensor, weight: Tensor) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = F.softmax(scores.masked_fill(later, -math.inf), dim=-1)
    return _convolve(F.conv2d, probabilities, weight).masked_fill(later, 0.0)


def _convolve(f: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """One kernel for each head."""
    return f(x, weight, None, 1, weight.shape[-1] // 2, 1, weight.shape[0])


def _eager_coefficients(x: Tensor, phi: Tensor, b: Tensor, *alphas: Tensor) -> tuple[Tensor, ...]:
    n, rows = x.shape[-2], x.flatten(-2).to(b.dtype)
    mix = (rows @ phi.to(b.dtype)) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    sizes = [n, n, n * n]
    parts = zip(mix.split(sizes, -1), b.split(sizes), alphas, strict=True)
    pre, post, res = (part * alpha + bias for part, bias, alpha in parts)
    matrix = res.unflatten(-1, (n, n)).softmax(-1) + EPS
    for dim in (-2, *19 * (-1, -2)):
        matrix = matrix / (matrix.sum(dim, keepdim=True) + EPS)
    return pre.sigmoid(), 2 * post.sigmoid(), matrix


def _eager_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def _eager_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return (h_res @ x.to(h_res.dtype) + h_post.unsqueeze(-1) * f_out.unsqueeze(-2)).to(x.dtype)


LAYER_OPS = (
    Op(
        name="multi_token_attention",
        title="Multi-token attention",
        inputs=_attention_inputs,
        exact=_eager_attention,
        contenders={
            "ours": ours("multi_token_attention", _convolve),
            "eager": Contender(_eager_attention),
            "liger": liger_kernel("liger_multi_token_attention", _convolve),
        },
        shapes=((2, 16, 2048, 3),),
        small=(1, 4, 256, 3),
        tiny=(1, 2, 16, 3),
        amount=lambda scores, weight: scores.nbytes,
        passes={"forward": 2, "backward": 3, "both": 5},  # scores -> y; probabilities, grad_y -> grad_scores
    ),
    *(
        Op(
            name=name,
            title=title,
            inputs=inputs,
            exact=eager,
            contenders={"ours": ours(name), "eager": Contender(eager), "liger": liger_kernel(f"liger_{name}")},
            shapes=((8192, 4, 4096),),
            small=(256, 4, 1024),
            tiny=(16, 4, 64),
            amount=lambda x, *others: x.nbytes // x.shape[-2],  # of one stream
            passes={"forward": forward, "backward": backward, "both": forward + backward},
        )
        for name, title, inputs, eager, forward, backward in (
            ("mhc_coeffs", "Coefficients of hyper-connections", _coefficients_inputs, _eager_coefficients, 4, 8),
            ("mhc_pre", "Streams to a layer", functools.partial(_streams_inputs, is_pre=True), _eager_pre, 5, 9),
            (
                "mhc_post_res",
                "Streams after a layer",
                functools.partial(_streams_inputs, is_pre=False),
                _eager_post_res,
                9,
                14,
            ),
        )
    ),
)
