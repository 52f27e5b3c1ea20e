"""``torch.nn`` modules over the ops of this package, for models that are composed by hand.

A module named like a class of ``torch.nn`` takes the same arguments in the same order, computes the same result, has
the same state dict, and adds keyword-only arguments. It is a subclass of its namesake, except
``LinearCrossEntropyLoss``, which older versions of PyTorch do not have.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops.gated_linear_unit import gelu_mul, silu_mul
from liger_ops.loss.cross_entropy import cross_entropy
from liger_ops.loss.linear_cross_entropy import linear_cross_entropy
from liger_ops.loss.options import IGNORE_INDEX, TokenLossOptions, TokenStats, check_reduction
from liger_ops.norm.group_norm import group_norm
from liger_ops.norm.layer_norm import layer_norm
from liger_ops.norm.rms_norm import CASTINGS, Casting, rms_norm
from liger_ops.rope import apply_rotary

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]

Device = torch.device | str | int | None
Dtype = torch.dtype | None


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm`, ``[*, *normalized_shape]`` to the same shape, by :func:`liger_ops.rms_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: As in ``torch.nn.RMSNorm``.
        offset: Added to the weight, which starts at ``1 - offset``; 1 if weights are deviations from one (Gemma).
        casting: Where half precision is rounded, "gemma", "llama" or "none"; see :func:`liger_ops.rms_norm`.

    Raises:
        ValueError: If casting is unknown, or offset is given without a weight.
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
        if casting not in CASTINGS:
            raise ValueError(f"casting must be one of {', '.join(CASTINGS)}, got {casting!r}")
        if offset and not elementwise_affine:
            raise ValueError(f"offset is added to the weight, so it must be 0 without one, got {offset}")
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
    """:class:`torch.nn.LayerNorm`, ``[*, *normalized_shape]`` to the same shape, by :func:`liger_ops.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(nn.GroupNorm):
    """:class:`torch.nn.GroupNorm`, ``[batch_size, num_channels, *]`` to the same, by :func:`liger_ops.group_norm`."""

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
        interleaved: Whether pairs are neighbouring columns, as GPT-J's; else the same columns of both halves.
        device: Of ``inv_freq``; call :meth:`reset_parameters` after ``to_empty`` on a module made on "meta".

    Raises:
        ValueError: If base is not positive, or rotary_dim not even and between 2 and head_dim.
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
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim must be even, positive and at most head_dim = {head_dim}, got {rotary_dim}")
        if not base > 0.0:
            raise ValueError(f"base must be positive, got {base}")
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
        """Returns the rotated q and k.

        Args:
            q: ``[batch_size, num_heads, seq_len, head_dim]``, or ``[batch_size, seq_len, num_heads, head_dim]`` if
                ``heads_dim=2``.
            k: The same with ``num_kv_heads``.
            position_ids: ``[seq_len]`` or ``[batch_size or 1, seq_len]``; by default 0, 1, 2, ...
            heads_dim: The dimension of q and k that counts heads, 1 or 2.

        Raises:
            ValueError: If the shapes do not fit together, or heads_dim is neither 1 nor 2.
        """
        if q.dim() != 4 or q.shape[-1] != self.head_dim:
            raise ValueError(f"q must have 4 dimensions, the last head_dim = {self.head_dim}, got {tuple(q.shape)}")
        batch_size, seq_len = q.shape[0], q.shape[1 if heads_dim == 2 else 2]
        if position_ids is None:
            position_ids = torch.arange(seq_len, device=q.device)
        elif tuple(position_ids.shape) not in ((seq_len,), (1, seq_len), (batch_size, seq_len)):
            raise ValueError(
                f"position_ids must be [seq_len] or [batch_size or 1, seq_len] with batch_size = {batch_size} and"
                f" seq_len = {seq_len}, got shape {tuple(position_ids.shape)}"
            )
        # A product of elements, unlike one of matrices, stays float32 under autocast.
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return apply_rotary(q, k, cos, sin, heads_dim=heads_dim, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


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
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)


class SwiGLU(_GatedMLP):
    """Llama's feed-forward layer, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, ``[*, hidden_size]`` to the same.

    Args:
        hidden_size: Columns of input and output.
        intermediate_size: Columns in between.
        bias: Whether the three projections have biases.
        device, dtype: Of the parameters.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(input), self.up_proj(input)))


class GeGLU(_GatedMLP):
    """Gemma's feed-forward layer, ``down_proj(gelu(gate_proj(x)) * up_proj(x))``, ``[*, hidden_size]`` to the same.

    Args:
        hidden_size, intermediate_size, bias, device, dtype: As in :class:`SwiGLU`.
        approximate: "none" for the error function, "tanh" for Gemma's approximation, as in ``F.gelu``.

    Raises:
        ValueError: If approximate is unknown.
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
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        super().__init__(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return self.down_proj(gelu_mul(self.gate_proj(input), self.up_proj(input), approximate=self.approximate))

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` by :func:`liger_ops.cross_entropy`, which explains shapes and extras.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: As in ``torch.nn.CrossEntropyLoss``.
        softcap, logit_scale, z_loss_weight, inplace_backward: As in :func:`liger_ops.cross_entropy`.

    Raises:
        ValueError: If an option is out of its range.
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
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        check_reduction(self.reduction)
        TokenLossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)  # raises
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss_weight = z_loss_weight
        self.inplace_backward = inplace_backward

    def forward(  # type: ignore[override]  # returns the stats too, but only on request
        self, input: Tensor, target: Tensor, *, token_weight: Tensor | None = None, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, TokenStats]:
        """Returns the loss, with the stats on request; ``token_weight`` has target's shape."""
        return cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, token_weight=token_weight, softcap=self.softcap,
            logit_scale=self.logit_scale, z_loss_weight=self.z_loss_weight, inplace_backward=self.inplace_backward,
            return_stats=return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss_weight")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its loss: ``torch.nn.LinearCrossEntropyLoss`` by :func:`liger_ops.linear_cross_entropy`.

    Hidden states may also have any leading dimensions, ``[*, in_features]``; class indices are then ``[*]``.

    Args:
        in_features, num_classes, bias, device, dtype: Of the head, ``self.linear``.
        out_features, reduction, weight, ignore_index, label_smoothing: As in ``torch.nn.LinearCrossEntropyLoss``; with
            out_features, logits are materialized.
        options: PyTorch's ``LinearCrossEntropyOptions``; its ``batch_chunk_size`` and ``acc_dtype`` are followed.
        softcap, logit_scale, z_loss_weight, chunk_bytes, accumulate_dtype: As in
            :func:`liger_ops.linear_cross_entropy`.

    Raises:
        ValueError: If an option is out of its range, or weight not ``[num_classes]``.
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
    ) -> None:
        check_reduction(reduction)
        TokenLossOptions(IGNORE_INDEX, label_smoothing, softcap, logit_scale, z_loss_weight)  # raises
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(f"weight must have shape {(num_classes,)}, got {tuple(weight.shape)}")
        super().__init__()
        self.register_buffer("weight", weight)
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.linear = nn.Linear(in_features, math.prod(out_features, start=num_classes), bias, device, dtype)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.z_loss_weight = z_loss_weight
        self.chunk_bytes = chunk_bytes
        self.accumulate_dtype = accumulate_dtype

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
            input, self.linear.weight.view(*classes, self.linear.in_features), target,
            linear_bias=None if bias is None else bias.view(classes), weight=self.weight, reduction=self.reduction,
            ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, options=self.options,
            token_weight=token_weight, softcap=self.softcap, logit_scale=self.logit_scale,
            z_loss_weight=self.z_loss_weight, chunk_bytes=self.chunk_bytes, accumulate_dtype=self.accumulate_dtype,
            max_valid_tokens=max_valid_tokens, return_stats=return_stats,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("num_classes", "out_features", "reduction", "ignore_index", "label_smoothing", "options")
        extras = ("softcap", "logit_scale", "z_loss_weight", "chunk_bytes", "accumulate_dtype")
        return ", ".join(f"{name}={getattr(self, name)}" for name in (*names, *extras))
