"""The LM head of lazy logits: its parameters, the operations on its logits, and counters of its losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from liger_ops import VocabShard
from liger_ops.backend import without_autocast


@dataclass
class FusionCounters:
    """Counts of a head's fused losses and of logits that were materialized; kept on the head, read by reports."""

    num_losses: int = 0
    """Losses computed without materializing the logits."""
    num_materialized: int = 0
    """Times that the logits were materialized with gradients enabled."""
    bytes_avoided: int = 0
    """Bytes of the logits minus those of one chunk, over all losses."""
    is_gathered: bool = False
    """Whether an engine gathers the parameters for each use, so that they change without a change of their version."""


@dataclass(kw_only=True, eq=False)
class HeadParameters:
    """The linear head whose projection lazy logits postpone."""

    weight: Tensor
    """``[vocab_size, hidden_size]``."""
    bias: Tensor | None
    """``[vocab_size]`` or None."""
    adapter: Tensor | None = None
    """``[vocab_size, rank]``, the second factor of a low-rank update, or None. The hidden states then have ``rank``
    additional last columns, the input of the update."""
    compute_dtype: torch.dtype
    """Dtype of the projection: the weight's, or autocast's where it was enabled."""
    counters: FusionCounters
    """Where the head's losses are counted."""
    options: Mapping[str, Any]
    """``chunk_bytes``, ``accumulate_dtype`` and ``saved_logits_bytes`` of :func:`liger_ops.linear_cross_entropy`."""
    shard: VocabShard | None = None
    """Which rows of the vocabulary the tensors are, None if they are all, so that they can be sliced along it."""

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors().values())

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = {"weight": self.weight, "bias": self.bias, "adapter": self.adapter}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same head with ``function`` applied to its tensors."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def cast(self) -> Self:
        """The same head with its parameters in ``compute_dtype``."""
        return self.map(lambda parameter: parameter.to(self.compute_dtype))

    def factors(self, hidden_states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Inputs in ``compute_dtype`` and weights, whose products add up to the logits; the adapter's come last."""
        hidden_states = hidden_states.to(self.compute_dtype)
        if self.adapter is None:
            return [(hidden_states, self.weight)]
        hidden_states, low_rank = hidden_states.split((self.weight.shape[1], self.adapter.shape[1]), dim=-1)
        return [(hidden_states, self.weight), (low_rank, self.adapter)]

    def arguments(self, hidden_states: Tensor, transform: LogitTransform) -> dict[str, Any]:
        """The arguments of functions of ``liger_ops`` that say how logits are computed, in ``compute_dtype``."""
        head = self.cast()
        (input, weight), *adapters = head.factors(hidden_states)
        named = {"input": input, "linear_weight": weight, "linear_bias": head.bias}
        return {**named, "adapter": adapters[0] if adapters else None, **transform.loss_options()}

    def project(self, hidden_states: Tensor) -> Tensor:
        """The real logits, ``[..., vocab_size]`` in ``compute_dtype``."""
        head = self.cast()
        # The dtype was decided when the head was called; autocast may have been switched since.
        with without_autocast(hidden_states.device.type):
            (input, weight), *adapters = head.factors(hidden_states)
            logits = F.linear(input, weight, head.bias)
            for input, weight in adapters:
                logits = logits + F.linear(input, weight)
            return logits

    def project_to(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """One real logit per token, that of its label: ``[...]`` in ``compute_dtype``."""
        head = self.cast()
        with without_autocast(hidden_states.device.type):
            logits = torch.zeros((), dtype=head.compute_dtype, device=labels.device)
            for input, weight in head.factors(hidden_states):
                logits = logits + torch.einsum("...h,...h->...", input, F.embedding(labels, weight))
            return logits if head.bias is None else logits + F.embedding(labels, head.bias[:, None]).squeeze(-1)


class LogitTransform(NamedTuple):
    """The elementwise operations and the log-softmax that were applied to the logits.

    ``scale * logits``, or after a tanh ``scale * tanh(tanh_scale * logits)``; then a log-softmax if ``normalized``.
    """

    dtype: torch.dtype
    scale: float = 1.0
    tanh_scale: float | None = None
    normalized: bool = False

    def apply(self, logits: Tensor) -> Tensor:
        """Applies them to real logits, ``[..., vocab_size]``."""
        logits = self.apply_elementwise(logits)
        return torch.log_softmax(logits, -1) if self.normalized else logits

    def apply_elementwise(self, logits: Tensor) -> Tensor:
        """Applies all but the log-softmax to any part of the logits."""
        logits = logits.to(self.dtype)
        if self.tanh_scale is not None:
            logits = torch.tanh(logits * self.tanh_scale)
        return logits if self.scale == 1.0 else logits * self.scale

    def loss_options(self) -> dict[str, Any]:
        """The same as arguments of ``linear_cross_entropy``: ``softcap * tanh(logit_scale * logits / softcap)``.

        A log-softmax changes nothing for a loss that starts with one.
        """
        if self.tanh_scale is None:
            return {"logit_scale": self.scale, "softcap": None}
        return {"logit_scale": self.scale * self.tanh_scale, "softcap": abs(self.scale)}
