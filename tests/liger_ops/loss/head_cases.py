"""A linear head's batches, and its loss in plain PyTorch."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.liger_ops.loss.cases import draw_labels, plain_cross_entropy

HIDDEN = 16
WHOLE = 1000  # stands for as many rows as there are, in one chunk


def make_batch(
    num_tokens: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Hidden states, a head whose logits spread by about 2, its bias, and labels of which every fourth is ignored."""
    shapes = ((num_tokens, HIDDEN), (vocab_size, HIDDEN), (vocab_size,))
    tensors = tuple(torch.randn(shape).to(device, dtype) for shape in shapes)
    tensors[1].mul_(0.5)
    return tensors, draw_labels(num_tokens, vocab_size, "some", ignore_index).to(device)


def plain_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    labels: Tensor,
    *,
    linear_bias: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    logits = F.linear(input, linear_weight, linear_bias)
    return plain_cross_entropy(logits if adapter is None else logits + F.linear(*adapter), labels, **options)


def loss_and_gradients(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    labels: Tensor,
    upstream: Tensor | None = None,
    *,
    needed: Sequence[bool] = (True, True, True),
    **options: Any,
) -> tuple[Tensor, ...]:
    """The loss, and the gradients of the tensors that are needed: of the head, its bias, and perhaps its adapter."""
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needed, strict=True)
    ]
    if len(leaves) > 3:
        options["adapter"] = tuple(leaves[3:])
    result = function(leaves[0], leaves[1], labels, linear_bias=leaves[2], **options)
    loss = result[0] if isinstance(result, tuple) else result
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return loss, *torch.autograd.grad(loss, wanted, None if upstream is None else upstream.to(loss))


def chunks_of(num_rows: int, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    """The option that makes chunks hold ``num_rows`` rows at most, or one chunk hold all of them if they are WHOLE."""
    if num_rows == WHOLE:
        return {"options": SimpleNamespace(batch_chunk_size=WHOLE)}
    return {"chunk_bytes": num_rows * tensors[1].shape[0] * tensors[1].element_size()}
