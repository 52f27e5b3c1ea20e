"""Sizes and tensors of a problem."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Maker


@dataclass(frozen=True)
class Sizes:
    """Sequences of one length with a head.

    Attributes:
        num_sequences: For preference problems, the first half is chosen and the second half rejected.
    """

    num_sequences: int
    seq_len: int
    hidden_size: int
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_len

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.seq_len}, H {self.hidden_size}, V {self.vocab_size}"


@dataclass(frozen=True)
class Data:
    """Tensors of a problem; those that it does not need are None.

    Attributes:
        hidden_states: ``[num_tokens, hidden_size]``, takes a gradient.
        weight: ``[vocab_size, hidden_size]``, takes a gradient if the head is trained.
        labels: ``[num_tokens]``.
        coefficients: ``[num_tokens]``, upstream gradients of the log-probabilities.
        other_hidden_states, other_weight: Of the reference model or the teacher.
        old_log_probs: ``[num_tokens]``, of the policy that sampled.
        advantages: ``[num_sequences]``.
        ids: ``[num_tokens, k]``, the classes of a sparse teacher.
        id_coefficients: ``[num_tokens, k]``, upstream gradients of their log-probabilities.
    """

    sizes: Sizes
    hidden_states: Tensor
    weight: Tensor
    labels: Tensor
    coefficients: Tensor | None = None
    other_hidden_states: Tensor | None = None
    other_weight: Tensor | None = None
    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    ids: Tensor | None = None
    id_coefficients: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.hidden_states, self.weight) if tensor.requires_grad)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def float(self) -> "Data":
        """The same values in float32."""
        changed = {
            name: tensor.detach().float().requires_grad_(tensor.requires_grad)
            for name, tensor in self.tensors()
            if tensor.dtype is torch.bfloat16
        }
        return dataclasses.replace(self, **changed)


def _weight(make: Maker, sizes: Sizes) -> Tensor:
    return make.normal(sizes.vocab_size, sizes.hidden_size).div_(sizes.hidden_size**0.5)


def plain(make: Maker, sizes: Sizes, trained: bool) -> Data:
    """Hidden states, a head and labels."""
    hidden_states = make.leaf(sizes.num_tokens, sizes.hidden_size)
    return Data(
        sizes,
        hidden_states,
        _weight(make, sizes).requires_grad_(trained),
        make.labels(sizes.num_tokens, sizes.vocab_size),
    )


def with_coefficients(make: Maker, sizes: Sizes, trained: bool) -> Data:
    """With upstream gradients of one sign, so that the loss is no difference of large sums."""
    coefficients = make.normal(sizes.num_tokens).float().abs()
    return dataclasses.replace(plain(make, sizes, trained), coefficients=coefficients)


def with_reference(make: Maker, sizes: Sizes, trained: bool) -> Data:
    """With a reference model that is close to the policy."""
    data = plain(make, sizes, trained)
    noise = make.normal(sizes.num_tokens, sizes.hidden_size)
    other = torch.lerp(data.hidden_states.detach(), noise, 0.05)
    return dataclasses.replace(data, other_hidden_states=other, other_weight=data.weight.detach().clone())


def with_teacher(make: Maker, sizes: Sizes, trained: bool) -> Data:
    """With a teacher that knows nothing of the student."""
    data = plain(make, sizes, trained)
    other = make.normal(sizes.num_tokens, sizes.hidden_size)
    return dataclasses.replace(data, other_hidden_states=other, other_weight=_weight(make, sizes))


def with_rollouts(make: Maker, sizes: Sizes, trained: bool) -> Data:
    """With advantages, and log-probabilities of the old policy: a quarter of the tokens is far outside the clip range.

    No ratio is close to a bound of the range, where rounding decides whether a token has a gradient.
    """
    data = plain(make, sizes, trained)
    noise = torch.empty_like(data.labels, dtype=torch.float32).copy_(make.normal(sizes.num_tokens))
    inside = noise.clamp(-1, 1) * 0.05
    outside = torch.where(noise > 0, 0.6, -0.6)
    is_outside = torch.arange(sizes.num_tokens, device=noise.device) % 4 == 0
    with torch.no_grad():
        log_probs = torch.cat(
            [
                -F.cross_entropy(F.linear(hidden_states, data.weight).float(), labels, reduction="none")
                for hidden_states, labels in zip(data.hidden_states.split(1024), data.labels.split(1024), strict=True)
            ]
        )
    signs = torch.arange(sizes.num_sequences, device=noise.device) % 2 * 2 - 1
    return dataclasses.replace(
        data,
        old_log_probs=log_probs + torch.where(is_outside, outside, inside),
        advantages=signs * (make.normal(sizes.num_sequences).float().abs() + 0.5),
    )


def with_ids(make: Maker, sizes: Sizes, trained: bool, k: int) -> Data:
    """With ``k`` different classes for each token and upstream gradients of their log-probabilities."""
    data = plain(make, sizes, trained)
    steps = torch.arange(k, device=data.labels.device) * (sizes.vocab_size // k)
    ids = (data.labels[:, None] + steps) % sizes.vocab_size
    coefficients = make.normal(sizes.num_tokens, k).float().abs()
    return dataclasses.replace(data, ids=ids, id_coefficients=coefficients)
