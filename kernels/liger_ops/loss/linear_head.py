"""A linear head's tensors as the chunked ops take them: checked, flat, in the dtype of the products."""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_pair, check_shape, wrong_type, wrong_value
from liger_ops.loss.chunked_loss import choose_accumulate_dtype, choose_chunk_size, default_chunk_size
from liger_ops.loss.vocab_parallel import VocabShard


class LinearHead(NamedTuple):
    """Hidden states and the head that projects them."""

    input: Tensor  # [num_tokens, hidden_size], in dtype as all tensors
    weight: Tensor  # [vocab_size, hidden_size]
    bias: Tensor | None  # [vocab_size]
    adapter_input: Tensor | None  # [num_tokens, rank]
    adapter_weight: Tensor | None  # [vocab_size, rank]
    needs_gradient: list[bool]  # of each of these tensors, as the caller passed it
    dtype: torch.dtype
    vocab_size: int  # classes of all ranks
    num_columns: int  # classes of one rank; the mean, as ranks must cut the same chunks, whose collectives meet
    is_autocast: bool

    @property
    def tensors(self) -> list[Tensor | None]:
        """The first fields, which may get a gradient."""
        return list(self[:5])

    def chunks(self, chunk_bytes: int | None, element_size: int = 0) -> tuple[int, torch.dtype]:
        """Tokens per chunk of logits within a budget, by default chosen for the device, and the dtype of their sums.

        ``element_size`` is the number of bytes of a logit with all that is computed of it, by default its own.
        """
        num_tokens, hidden_size = self.input.shape
        sizes = num_tokens, self.num_columns, element_size or self.dtype.itemsize
        if chunk_bytes is not None:
            chunk_size = choose_chunk_size(*sizes, chunk_bytes)
        else:
            chunk_size = default_chunk_size(*sizes, self.input.device, hidden_size if self.needs_gradient[1] else 0)
        return chunk_size, choose_accumulate_dtype(self.dtype, -(-num_tokens // chunk_size))

    def products_dtype(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which products keep ``dtype``."""
        return backend.without_autocast(self.input.device.type) if self.is_autocast else contextlib.nullcontext()


HEAD_NAMES = ("input", "linear_weight", "linear_bias", "adapter")
"""What callers call the arguments of :func:`check_head`, for messages."""


def is_trained(needs_gradient: list[bool]) -> bool:
    """Whether a head's own tensors need a gradient, not only those that have a row for each token."""
    _, weight, bias, _, adapter_weight = needs_gradient
    return weight or bias or adapter_weight


def check_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    adapter: tuple[Tensor, Tensor] | None,
    vocab_shard: VocabShard | None,
    names: tuple[str, str, str, str] = HEAD_NAMES,
) -> LinearHead:
    """The head of arguments of these names; raises for tensors that do not fit together."""
    input_name, weight_name, bias_name, adapter_name = names
    if linear_weight.dim() != 2:
        raise ValueError(f"{weight_name} must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    own_size, hidden_size = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != hidden_size:
        raise wrong_value(input_name, f"[..., {weight_name}'s hidden_size = {hidden_size}]", input)
    if hidden_size == 0:
        raise ValueError(f"{weight_name} must have a hidden_size of at least 1, got shape {tuple(linear_weight.shape)}")
    check_shape("target", target, input.shape[:-1], "one label for each token of input")
    check_shape(bias_name, linear_bias, (own_size,), "vocab_size")
    vocab_size = num_columns = own_size
    if vocab_shard is not None:
        if not isinstance(vocab_shard, VocabShard):
            raise wrong_type("vocab_shard", "a VocabShard or None", vocab_shard)
        vocab_shard.check(own_size)
        vocab_size = vocab_shard.vocab_size
        num_columns = -(-vocab_size // vocab_shard.group.size())
    elif vocab_size == 0:
        raise ValueError(f"{weight_name} must have at least one class, got shape {tuple(linear_weight.shape)}")
    low_rank: tuple[Tensor | None, Tensor | None] = (None, None)
    if adapter is not None:
        check_pair(adapter_name, adapter, input_name, input)
        rank = adapter[0].shape[-1] if adapter[0].dim() else 0
        if adapter[0].shape[:-1] != input.shape[:-1] or adapter[1].shape != (own_size, rank):
            raise ValueError(
                f"{adapter_name} must be of shapes {(*input.shape[:-1], rank)} and {(own_size, rank)}, got"
                f" {tuple(adapter[0].shape)} and {tuple(adapter[1].shape)}"
            )
        low_rank = adapter[0].reshape(-1, adapter[0].shape[-1]), adapter[1]
    tensors: list[Any] = [input.reshape(-1, input.shape[-1]), linear_weight, linear_bias, *low_rank]
    needs_gradient = [backend.needs_graph(tensor) for tensor in tensors]
    # Which a linear layer would compute in; it leaves float64 alone.
    dtype = None if input.dtype == torch.float64 else backend.autocast_dtype(input.device.type)
    if dtype is not None:
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    else:
        others = weight_name, bias_name, f"{adapter_name}[0]", f"{adapter_name}[1]"
        for name, tensor in zip(others, tensors[1:], strict=True):
            if tensor is not None and tensor.dtype != input.dtype:
                raise ValueError(f"{name} must have {input_name}'s dtype {input.dtype}, got {tensor.dtype}")
    is_autocast = dtype is not None
    return LinearHead._make((*tensors, needs_gradient, dtype or input.dtype, vocab_size, num_columns, is_autocast))
