"""The LM head and its loss, forward and backward.

Its bound is three matrix products over the tokens that are not ignored; ``products`` is the time of cuBLAS for them,
with all tokens in one chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Contender, Inputs, Maker, Op, liger_kernel, ours, pytorch

MIB = 2**20
SMALL_MEMORY = 1.095
"""Peak memory of the setting that saves memory, as a multiple of liger-kernel's."""


def _inputs(make: Maker, num_tokens: int, hidden_size: int, vocab_size: int, percent_ignored: int) -> Inputs:
    weight = make.normal(vocab_size, hidden_size).div_(hidden_size**0.5).requires_grad_()
    return Inputs((make.leaf(num_tokens, hidden_size), weight, make.labels(num_tokens, vocab_size, percent_ignored)))


def _exact(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_states, weight), labels)


def _eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


def _num_valid_tokens(labels: Tensor) -> int:
    return int((labels != -100).sum())


def small_budget(hidden_states: Tensor, weight: Tensor) -> int:
    """Bytes of one chunk of logits in the setting that saves memory, whose peak is ``SMALL_MEMORY`` of liger-kernel's.

    liger-kernel 0.8.5 holds the gradients of the hidden states and the head and, of all tokens divided by
    ``vocab_size / hidden_size`` rounded up to a power of two, the logits; we also hold the chunk's hidden states, and
    sum their gradient in float32 if the vocabulary is unaligned.
    """
    num_tokens, (vocab_size, hidden_size) = hidden_states.shape[0], weight.shape
    gradients = (num_tokens + vocab_size) * hidden_size
    its_rows = 1 << (math.ceil(num_tokens / math.ceil(vocab_size / hidden_size)) - 1).bit_length()
    ours = vocab_size + hidden_size * (3 if vocab_size % 8 else 1)
    rows = (SMALL_MEMORY * (gradients + its_rows * vocab_size) - gradients) // ours
    return int(rows) * vocab_size * weight.itemsize


@torch.no_grad()
def _products(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The three products, with the logits as a stand-in for their gradient, which has the same size."""
    valid = hidden_states[: _num_valid_tokens(labels)]
    logits = F.linear(valid, weight)
    return logits @ weight, logits.t() @ valid


def _label(num_tokens: int, hidden_size: int, vocab_size: int, percent_ignored: int) -> str:
    ignored = f", {percent_ignored}% ignored" if percent_ignored else ""
    return f"M{num_tokens} H{hidden_size} V{vocab_size}{ignored}"


LOSS = Op(
    name="linear_cross_entropy",
    title="LM head and loss",
    inputs=_inputs,
    exact=_exact,
    contenders={
        "ours": ours("linear_cross_entropy"),
        "ours, small budget": ours(
            "linear_cross_entropy",
            lambda f, x, weight, labels: f(
                x, weight, labels, chunk_bytes=small_budget(x, weight), accumulate_dtype=torch.bfloat16
            ),
        ),
        "products": Contender(_products, has_gradient=False),
        "eager": Contender(_eager),
        "torch": pytorch("linear_cross_entropy"),
        "liger": liger_kernel("liger_fused_linear_cross_entropy"),
    },
    shapes=(
        (8192, 4096, 128256, 0),
        (8192, 2304, 256000, 0),
        (4096, 896, 151936, 0),
        (32768, 4096, 128256, 0),
        (8192, 4096, 128256, 60),
    ),
    small=(256, 1024, 4096, 0),
    error_shape=(4096, 512, 32000, 0),  # several chunks of logits
    tiny=(32, 16, 64, 0),
    rate="matrix",
    amount=lambda x, weight, labels: 2 * _num_valid_tokens(labels) * weight.numel(),
    passes={"both": 3},
    label=_label,
    split=False,
)
