"""A small head with its lazy and its real logits, that tests compare."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LazyLogits
from lightning_liger.patching.rules.head import HeadReplacement

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 5, 37
TOKENS = BATCH_SIZE * SEQ_LEN
MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
LABELS = torch.arange(BATCH_SIZE * SEQ_LEN).view(BATCH_SIZE, SEQ_LEN) * 3 % VOCAB_SIZE

Logits = LazyLogits | Tensor


class Twin:
    """One head's lazy and real logits, computed from separate leaf tensors."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        vocab_size: int = VOCAB_SIZE,
        bias: bool = True,
        chunk_bytes: int | None = None,
        hidden_size: int = 4,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.real_head = nn.Linear(hidden_size, vocab_size, bias, dtype=dtype)
        with torch.no_grad():
            for parameter in self.real_head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        hidden_states = torch.randn(BATCH_SIZE, SEQ_LEN, hidden_size, generator=generator)
        self.real_input = hidden_states.to(dtype).requires_grad_()
        self.lazy_input = self.real_input.detach().clone().requires_grad_()
        self.lazy_head = copy.deepcopy(self.real_head)
        options = () if chunk_bytes is None else (("chunk_bytes", chunk_bytes),)
        self.lazy_head.__class__ = HeadReplacement(options).patched_class(nn.Linear)

    @property
    def lazy(self) -> LazyLogits:
        logits = self.lazy_head(self.lazy_input)
        assert isinstance(logits, LazyLogits)
        return logits

    @property
    def real(self) -> Tensor:
        return self.real_head(self.real_input)

    @property
    def counters(self) -> Any:
        return self.lazy_head.fusion_counters

    def assert_same_gradients(
        self, lazy_loss: Tensor, real_loss: Tensor, watch: AbstractContextManager[Any] | None = None
    ) -> None:
        upstream = torch.rand(real_loss.shape, generator=torch.Generator().manual_seed(1)).to(real_loss.dtype)
        lazy_leaves = [self.lazy_input, *self.lazy_head.parameters()]
        real_leaves = [self.real_input, *self.real_head.parameters()]
        with watch or nullcontext():
            gradients = torch.autograd.grad(lazy_loss, lazy_leaves, upstream)
        for got, want in zip(gradients, torch.autograd.grad(real_loss, real_leaves, upstream), strict=True):
            assert want.abs().max() > 0
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def token_loss(logits: Logits, **kwargs: Any) -> Tensor:
    num_tokens = logits.numel() // logits.shape[-1]
    labels = LABELS.flatten()[torch.arange(num_tokens) % TOKENS] % logits.shape[-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, **kwargs)


class Saving(torch.autograd.Function):
    """A function of no effect that refers to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 0
