"""Multi-token attention: mask(conv2d(softmax(mask(scores)))), whose convolution mixes nearby queries, keys and heads.

The first mask is that of the softmax's kernel, which reads no score of a later key; the convolution is PyTorch's, and
the second mask sets its output to 0 in place. Saved: the probabilities and the weight. Source: arXiv:2504.00927.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops import backend
from liger_ops.arguments import (
    as_integers,
    check_bool,
    check_device,
    check_floating,
    check_floating_dtype,
    check_floating_tensors,
    check_integer,
    check_shape,
    wrong_value,
)
from liger_ops.softmax import probabilities


def _as_pair(name: str, value: Any, at_least: int) -> tuple[int, ...]:
    """``value`` for queries and keys; raises unless it is an integer of at least so much, or two."""
    try:
        pair: tuple[int, ...] = 2 * (operator.index(value),)
    except TypeError:
        pair = as_integers(name, value)
    if isinstance(value, bool) or len(pair) != 2 or min(pair) < at_least or max(pair) > 2**31 - 1:
        raise wrong_value(name, f"an integer of at least {at_least} and at most 2**31 - 1, or two", value)
    return pair


def multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """Returns causal attention weights that are convolved over queries, keys and the heads of a group.

    With a padding of half the kernel, as is usual, the weights of a query depend on that many later queries too. With
    ``padding = dilation * (kernel_size - 1)``, the first ``seq_len`` rows and columns of the result are causal.

    Args:
        scores: ``[batch_size, in_channels, seq_len, seq_len]``, of each head's queries and keys. Those of later keys
            are not read.
        weight: ``[out_channels, in_channels / groups, *kernel_size]``, converted to scores' dtype, as bias is.
        bias: ``[out_channels]`` or None.
        stride, padding, dilation, groups: As in ``F.conv2d``; one integer, or two for queries and for keys.
        sparse: Whether probabilities are those of :func:`sparsemax` in place of :func:`softmax`.

    Returns:
        ``[batch_size, out_channels, size, size]`` in scores' dtype, the convolution's output, 0 above the diagonal.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or an option is of a wrong type.
        ValueError: If shapes or devices do not fit together, options are out of range, or the output is not square.
    """
    check_floating_tensors("scores", scores, weight=weight, bias=bias)
    check_floating("weight", weight)
    if scores.dim() != 4 or scores.shape[-1] != scores.shape[-2] or 0 in scores.shape[1:]:
        expected = "a tensor of shape [batch_size, in_channels, seq_len, seq_len], positive but for the first"
        raise wrong_value("scores", expected, scores)
    check_integer("groups", groups, at_least=1)
    _, in_channels, seq_len, _ = scores.shape
    if weight.dim() != 4 or 0 in weight.shape or weight.shape[1] * groups != in_channels or weight.shape[0] % groups:
        expected = f"[out_channels, {in_channels} / groups, *kernel_size], out_channels a multiple of groups = {groups}"
        raise wrong_value("weight", f"a tensor of shape {expected}", weight)
    check_shape("bias", bias, weight.shape[:1], "out_channels")
    check_bool("sparse", sparse)
    strides, paddings = _as_pair("stride", stride, 1), _as_pair("padding", padding, 0)
    dilations = _as_pair("dilation", dilation, 1)
    sizes = {
        (seq_len + 2 * pad - spread * (size - 1) - 1) // step + 1
        for size, step, pad, spread in zip(weight.shape[2:], strides, paddings, dilations, strict=True)
    }
    if len(sizes) > 1 or min(sizes) < 1:
        expected = "a kernel_size whose output is square and not empty with stride, padding and dilation"
        raise wrong_value("weight", expected, weight)
    chosen = probabilities(scores, (sparse, True))
    parameters = weight.to(scores.dtype), None if bias is None else bias.to(scores.dtype)
    with backend.without_autocast(scores.device.type):
        return F.conv2d(chosen, *parameters, strides, paddings, dilations, groups).tril_()


class MultiTokenAttention(nn.Conv2d):
    """A convolution of causal attention weights by :func:`liger_ops.multi_token_attention`, which explains shapes.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, device, dtype: As in
            ``torch.nn.Conv2d``; the bias begins at 0.
        sparse: Whether sparsemax takes the place of softmax.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}.items():
            check_integer(name, value, at_least=1)
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        sizes = {name: _as_pair(name, size, 1) for name, size in sizes.items()}
        sizes["padding"] = _as_pair("padding", padding, 0)
        check_bool("bias", bias)
        check_bool("sparse", sparse)
        check_device("device", device)
        check_floating_dtype("dtype", dtype)
        if in_channels % groups or out_channels % groups:
            raise wrong_value("groups", f"a divisor of in_channels = {in_channels} and {out_channels = }", groups)
        super().__init__(in_channels, out_channels, **sizes, groups=groups, bias=bias, device=device, dtype=dtype)
        self.sparse = sparse

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        options: Any = self.stride, self.padding, self.dilation, self.groups, self.sparse
        return multi_token_attention(input, self.weight, self.bias, *options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparse={self.sparse}"
