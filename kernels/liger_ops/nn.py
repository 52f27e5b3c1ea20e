"""``torch.nn`` modules over the ops of this package, for models that are composed by hand.

A module named like a class of ``torch.nn`` takes the same arguments in the same order, computes the same result, has
the same state dict, and adds keyword-only arguments. It is a subclass of its namesake, except
``LinearCrossEntropyLoss``, which older versions of PyTorch do not have. Every constructor raises a TypeError for
arguments of a wrong type and a ValueError for those that are out of range or do not fit together.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops.arguments import (
    as_integers,
    check_bool,
    check_choice,
    check_device,
    check_floating,
    check_floating_dtype,
    check_integer,
    check_number,
    check_same_device,
    check_shape,
    wrong_type,
    wrong_value,
)
from liger_ops.gated_linear_unit import APPROXIMATIONS, gelu_mul, silu_mul
from liger_ops.loss.cross_entropy import cross_entropy
from liger_ops.loss.linear_cross_entropy import linear_cross_entropy
from liger_ops.loss.options import IGNORE_INDEX, REDUCTIONS, TokenLossOptions, TokenStats
from liger_ops.mhc.streams import HyperConnection
from liger_ops.moe.experts import moe_experts
from liger_ops.moe.router import moe_router
from liger_ops.multi_token_attention import MultiTokenAttention
from liger_ops.norm.checks import as_num_groups, as_number
from liger_ops.norm.group_norm import group_norm
from liger_ops.norm.row_norm import Casting, check_options, layer_norm, rms_norm
from liger_ops.rope import apply_rotary, check_positions_shape

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "GroupNorm",
    "HyperConnection",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "MultiTokenAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SparseMoE",
    "SwiGLU",
]

Device = torch.device | str | int | None
Dtype = torch.dtype | None


_TOKEN_OPTIONS = ("reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss_weight")
_CHUNK_OPTIONS = ("options", "chunk_bytes", "accumulate_dtype", "saved_logits_bytes")


def _check_sizes(name: str, value: Any) -> None:
    sizes = (value,) if isinstance(value, numbers.Integral) else as_integers(name, value)
    if not sizes or min(sizes) < 1:
        raise wrong_value(name, "a positive integer or several", value)


_check_positive = functools.partial(check_integer, at_least=1)
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "normalized_shape": _check_sizes,
    **dict.fromkeys(("num_channels", "head_dim", "hidden_size", "intermediate_size"), _check_positive),
    **dict.fromkeys(("in_features", "num_classes", "num_experts", "top_k"), _check_positive),
    **dict.fromkeys(
        ("elementwise_affine", "affine", "bias", "interleaved", "inplace_backward", "norm_topk_prob"), check_bool
    ),
    **dict.fromkeys(("size_average", "reduce"), functools.partial(check_bool, optional=True)),
    "device": check_device,
    **dict.fromkeys(("dtype", "accumulate_dtype"), check_floating_dtype),
    "base": functools.partial(check_number, above=0),
    "activation": functools.partial(check_choice, choices=("silu", "gelu", "gelu_tanh")),
    "approximate": functools.partial(check_choice, choices=APPROXIMATIONS),
    "reduction": functools.partial(check_choice, choices=REDUCTIONS),
    "weight": functools.partial(check_floating, optional=True),
    "chunk_bytes": functools.partial(check_integer, at_least=1, optional=True),
    "saved_logits_bytes": functools.partial(check_integer, at_least=0, optional=True),
}
"""The check of each argument of a module that its own value decides about."""


def _check(arguments: Mapping[str, Any]) -> None:
    """Raises for the first argument that is wrong."""
    for name, value in arguments.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` of a norm of ``torch.nn``, whichever arguments this version has, after checks of them."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        _check(arguments)
        if "num_groups" in arguments:
            arguments["num_groups"] = as_num_groups(arguments["num_groups"], arguments["num_channels"])
        arguments["eps"] = as_number("eps", arguments["eps"], at_least=0)
        init(*bound.args, **bound.kwargs)

    return checked


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm`, ``[*, *normalized_shape]`` to the same shape, by :func:`liger_ops.rms_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: As in ``torch.nn.RMSNorm``.
        offset: Added to the weight, which starts at ``1 - offset``; 1 if weights are deviations from one (Gemma).
        casting: Where half precision is rounded, "gemma", "llama" or "none"; see :func:`liger_ops.rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: Dtype = None,
        *,
        offset: float = 0.0,
        casting: Casting = "gemma",
    ) -> None:
        _check(locals())
        eps, offset = check_options(eps, offset, casting, has_weight=elementwise_affine)
        self.offset = offset  # first, because the base class calls reset_parameters
        self.casting: Casting = casting
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, offset={self.offset}, casting={self.casting}"


class LayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm`, ``[*, *normalized_shape]`` to the same shape, by :func:`liger_ops.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: As in ``torch.nn.LayerNorm``.
    """

    __init__ = _checked(nn.LayerNorm.__init__)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(nn.GroupNorm):
    """:class:`torch.nn.GroupNorm`, ``[batch_size, num_channels, *]`` to the same, by :func:`liger_ops.group_norm`.

    Args:
        num_groups, num_channels, eps, affine, bias, device, dtype: As in ``torch.nn.GroupNorm``; older versions of
            PyTorch have no ``bias``.
    """

    __init__ = _checked(nn.GroupNorm.__init__)

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, by :func:`liger_ops.apply_rotary`.

    ``inv_freq`` is a buffer outside the state dict, and float32 whatever dtype the module is converted to: rounded
    frequencies would spoil far positions. Cosines and sines are computed in float32, then rounded to q's dtype.

    Args:
        head_dim: Size of a head.
        base: Frequencies go from 1 down to almost ``1 / base``.
        rotary_dim: How many of a head's columns are rotated, the first ones; by default all.
        interleaved: Whether pairs are neighboring columns, as GPT-J's; else the same columns of both halves.
        device: Of ``inv_freq``; call :meth:`reset_parameters` after ``to_empty`` on a module made on "meta".
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: Device = None,
    ) -> None:
        _check(locals())
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_integer("rotary_dim", rotary_dim)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise wrong_value("rotary_dim", f"even, positive and at most head_dim = {head_dim}", rotary_dim)
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        inv_freq = torch.empty(rotary_dim // 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Computes ``inv_freq`` anew, on the CPU so that every device gets the same."""
        exponents = torch.arange(0, self.rotary_dim, 2, device="cpu", dtype=torch.float32) / self.rotary_dim
        self.inv_freq.copy_(1.0 / self.base**exponents)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        inv_freq = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = inv_freq.to(self.inv_freq.device)
        return self

    def forward(
        self, q: Tensor, k: Tensor, position_ids: Tensor | None = None, *, heads_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns the rotated q and k, which are as :func:`liger_ops.apply_rotary` takes them and raises for others.

        Args:
            q, k, heads_dim: As for it.
            position_ids: ``[seq_len]`` or ``[batch_size or 1, seq_len]``, integers or floating-point numbers; by
                default 0, 1, 2, ...
        """
        check_floating("q", q)
        check_same_device("q", q, position_ids=position_ids, inv_freq=self.inv_freq)
        check_integer("heads_dim", heads_dim, at_least=1, at_most=2)
        if q.dim() != 4 or q.shape[-1] != self.head_dim:
            raise wrong_value("q", f"a tensor of 4 dimensions, the last head_dim = {self.head_dim}", q)
        if position_ids is None:
            position_ids = torch.arange(q.shape[3 - heads_dim], device=q.device)
        elif position_ids.dtype == torch.bool or position_ids.is_complex():
            raise wrong_type("position_ids", "a tensor of integers or floating-point numbers", position_ids)
        else:
            check_positions_shape(position_ids, q, heads_dim)
        # A product of elements, unlike one of matrices, stays float32 under autocast.
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return apply_rotary(q, k, cos, sin, heads_dim=heads_dim, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


def _check_input(input: Tensor, hidden_size: int) -> None:
    check_floating("input", input)
    if input.dim() == 0 or input.shape[-1] != hidden_size:
        raise wrong_value("input", f"a tensor whose last dimension is hidden_size = {hidden_size}", input)


class _GatedMLP(nn.Module):
    """The projections of a gated feed-forward layer, named as Hugging Face names them."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        _check(locals())
        super().__init__()
        self.hidden_size = hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def _unit(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up)

    def forward(self, input: Tensor) -> Tensor:
        _check_input(input, self.hidden_size)
        return self.down_proj(self._unit(self.gate_proj(input), self.up_proj(input)))


class SwiGLU(_GatedMLP):
    """Llama's feed-forward layer, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, ``[*, hidden_size]`` to the same.

    Args:
        hidden_size: Columns of input and output.
        intermediate_size: Columns in between.
        bias: Whether the three projections have biases.
        device, dtype: Of the parameters.
    """


class GeGLU(_GatedMLP):
    """Gemma's feed-forward layer, ``down_proj(gelu(gate_proj(x)) * up_proj(x))``, ``[*, hidden_size]`` to the same.

    Args:
        hidden_size, intermediate_size, bias, device, dtype: As in :class:`SwiGLU`.
        approximate: "none" for the error function, "tanh" for Gemma's approximation, as in ``F.gelu``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        approximate: str = "none",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        _check(locals())
        super().__init__(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.approximate = approximate

    def _unit(self, gate: Tensor, up: Tensor) -> Tensor:
        return gelu_mul(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SparseMoE(nn.Module):
    """A mixture of SwiGLU layers, of which each token goes through ``top_k``: ``[*, hidden_size]`` to the same.

    A linear router without bias gives each token a logit for each expert. The experts of the largest ones compute, and
    their outputs are added with the softmax's probabilities, in float32, as factors (Mixtral, arXiv:2401.04088; Qwen3).
    Weights are named and shaped as Hugging Face's: ``gate.weight``, ``experts.gate_up_proj``, ``experts.down_proj``.

    Args:
        hidden_size: Columns of input and output.
        intermediate_size: Columns inside of an expert.
        num_experts: How many there are.
        top_k: How many compute a token.
        norm_topk_prob: Whether the factors of a token are divided by their sum.
        activation: Of the gate, "silu", "gelu" or "gelu_tanh".
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = True,
        activation: str = "silu",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        _check(locals())
        if top_k > num_experts:
            raise wrong_value("top_k", f"at most num_experts = {num_experts}", top_k)
        super().__init__()
        self.hidden_size, self.top_k = hidden_size, top_k
        self.norm_topk_prob = norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, False, device, dtype)
        sizes = hidden_size, intermediate_size, num_experts
        self.experts = _Experts(*sizes, activation, device=device, dtype=dtype)

    def route(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of all experts, ``[*, num_experts]``, each token's experts, and their factors, ``[*, top_k]``."""
        logits = self.gate(input)
        return logits, *moe_router(logits, self.top_k, normalize=self.norm_topk_prob)

    def forward(self, input: Tensor) -> Tensor:
        _check_input(input, self.hidden_size)
        _, index, scores = self.route(input)
        output: Tensor = self.experts(input, index, scores)
        return output

    def extra_repr(self) -> str:
        return _shown(self, "top_k", "norm_topk_prob")


class _Experts(nn.Module):
    """All experts, called as transformers calls them."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, activation: str, **factory: Any
    ) -> None:
        super().__init__()
        self.activation = activation
        make = functools.partial(torch.empty, **factory)
        self.gate_up_proj = nn.Parameter(make(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(make(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As those of ``nn.Linear``."""
        for parameter in self.parameters():
            bound = parameter.shape[-1] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = self.gate_up_proj, self.down_proj
        return moe_experts(input, *weights, top_k_index, top_k_weights, activation=self.activation)

    def extra_repr(self) -> str:
        shapes = f"gate_up_proj={tuple(self.gate_up_proj.shape)}, down_proj={tuple(self.down_proj.shape)}"
        return f"{shapes}, activation={self.activation!r}"


def _options(module: nn.Module, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _shown(module: nn.Module, *names: str) -> str:
    return ", ".join(f"{name}={value}" for name, value in _options(module, *names).items())


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` by :func:`liger_ops.cross_entropy`, which explains shapes and extras.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: As in ``torch.nn.CrossEntropyLoss``.
        softcap, logit_scale, z_loss_weight, inplace_backward: As in :func:`liger_ops.cross_entropy`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss_weight: float = 0.0,
        inplace_backward: bool = False,
    ) -> None:
        _check(locals())
        TokenLossOptions.checked(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)  # raises
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss_weight = z_loss_weight
        self.inplace_backward = inplace_backward

    def forward(  # type: ignore[override]  # returns the stats too, but only on request
        self, input: Tensor, target: Tensor, *, token_weight: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """Returns the loss, with the stats on request; ``token_weight`` has target's shape."""
        options = _options(self, *_TOKEN_OPTIONS, "inplace_backward")
        return cross_entropy(
            input, target, self.weight, **options, token_weight=token_weight, return_stats=return_stats
        )

    def extra_repr(self) -> str:
        return _shown(self, *_TOKEN_OPTIONS)


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its loss: ``torch.nn.LinearCrossEntropyLoss`` by :func:`liger_ops.linear_cross_entropy`.

    Hidden states may also have any leading dimensions, ``[*, in_features]``; class indices are then ``[*]``.

    Args:
        in_features, num_classes, bias, device, dtype: Of the head, ``self.linear``.
        out_features, reduction, weight, ignore_index, label_smoothing: As in ``torch.nn.LinearCrossEntropyLoss``; with
            out_features, logits are materialized.
        options: PyTorch's ``LinearCrossEntropyOptions``; its ``batch_chunk_size`` and ``acc_dtype`` are followed.
        softcap, logit_scale, z_loss_weight, chunk_bytes, accumulate_dtype, saved_logits_bytes: As in
            :func:`liger_ops.linear_cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Device = None,
        dtype: Dtype = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss_weight: float = 0.0,
        chunk_bytes: int | None = None,
        accumulate_dtype: Dtype = None,
        saved_logits_bytes: int | None = None,
    ) -> None:
        _check(arguments := locals().copy())
        out_features = as_integers("out_features", out_features)
        if any(size < 1 for size in out_features):
            raise wrong_value("out_features", "positive integers", out_features)
        check_shape("weight", weight, (num_classes,), "num_classes")
        check_integer("ignore_index", ignore_index, optional=True)
        TokenLossOptions.checked(IGNORE_INDEX, label_smoothing, softcap, logit_scale, z_loss_weight)  # raises
        if options is not None and not hasattr(options, "batch_chunk_size"):
            raise wrong_type("options", "a torch.nn.LinearCrossEntropyOptions or None", options)
        super().__init__()
        self.register_buffer("weight", weight)
        self.num_classes = num_classes
        self.out_features = out_features
        self.linear = nn.Linear(in_features, math.prod(out_features, start=num_classes), bias, device, dtype)
        for name in (*_TOKEN_OPTIONS, *_CHUNK_OPTIONS):
            setattr(self, name, arguments[name])

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        max_valid_tokens: int | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """Returns the loss, with the stats on request; keywords as in :func:`liger_ops.linear_cross_entropy`."""
        classes, bias = (self.num_classes, *self.out_features), self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.view(*classes, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.view(classes),
            weight=self.weight,
            **_options(self, *_TOKEN_OPTIONS, *_CHUNK_OPTIONS),
            token_weight=token_weight,
            max_valid_tokens=max_valid_tokens,
            return_stats=return_stats,
        )

    def extra_repr(self) -> str:
        return _shown(self, "num_classes", "out_features", *_TOKEN_OPTIONS, *_CHUNK_OPTIONS)
