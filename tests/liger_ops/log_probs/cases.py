"""Heads, labels and losses that the tests of scores share, and the same computed through whole logits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenScores
from liger_ops.log_probs.linear_token_loss import TokenLoss
from liger_ops.log_probs.scores import scores_reference
from liger_ops.loss.options import IGNORE_INDEX, TokenLossOptions
from liger_ops.loss.rows import transform_logits

HIDDEN, VOCAB, TOKENS, ROWS = 8, 61, 14, 3
"""Sizes that no block, group or chunk divides, and the tokens of a chunk."""
ALL = TokenScores._fields
DIFFERENTIABLE = ALL[:4]


class Case(NamedTuple):
    """One head, and what is asked of it."""

    outputs: tuple[str, ...] = ("log_probs",)
    frozen: bool = False
    """Whether only the hidden states (and the adapter's) need gradients."""
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float | str = 1.0
    """Or "tokens" for one for each token."""
    bias: bool = False
    adapter: bool = False
    detach: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = zip(self._fields, self, Case(), strict=True)
        changed = {name: value for name, value, usual in pairs if value != usual}
        texts = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        return ",".join(f"{name}={text}" for name, text in texts.items()).replace("+".join(ALL), "all") or "plain"


CASES = [
    Case(outputs, frozen, **options)
    for frozen in (False, True)
    for outputs, options in (
        (("log_probs",), {}),
        (("log_probs",), {"softcap": 2.0, "temperature": 0.7, "bias": True}),
        (("log_probs", "lse", "mean_logit"), {"temperature": 1.3, "adapter": True, "logit_scale": 0.5}),
        (("log_probs", "entropy"), {"temperature": "tokens", "bias": True, "adapter": True}),
        (("entropy",), {"softcap": 2.0, "adapter": True}),
        (("lse",), {"temperature": "tokens", "logit_scale": 0.5}),
        (("mean_logit",), {"temperature": 0.7}),
        (ALL, {"softcap": 2.0, "temperature": "tokens", "logit_scale": 0.5, "bias": True, "adapter": True}),
        (ALL, {"temperature": "tokens", "logit_scale": 0.5, "bias": True, "adapter": True}),
        (ALL, {"detach": ("entropy", "lse")}),
    )
]


class Head(NamedTuple):
    """The arguments of a case."""

    tensors: dict[str, Tensor]
    """By names of ``linear_log_probs``' arguments; the adapter's are ``adapter_input`` and ``adapter_weight``."""
    target: Tensor
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Head:
        return self._replace(tensors={name: tensor.to(dtype) for name, tensor in self.tensors.items()})


def make(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    sizes: tuple[int, int, int] = (HIDDEN, VOCAB, TOKENS),
) -> Head:
    """The tensors of a case, of which two tokens of seven are ignored."""
    hidden_size, vocab_size, num_tokens = sizes
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    shapes = {"input": (2, num_tokens // 2, hidden_size), "linear_weight": (vocab_size, hidden_size)}
    if case.bias:
        shapes["linear_bias"] = (vocab_size,)
    if case.adapter:
        shapes |= {"adapter_input": (2, num_tokens // 2, 3), "adapter_weight": (vocab_size, 3)}
    tensors = {
        name: torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for name, shape in shapes.items()
    }
    target = torch.randint(vocab_size, (2, num_tokens // 2), generator=generator)
    target[0, 0] = vocab_size - 1
    target[:, 2] = -100
    target[1, 4] = -100
    temperature: Any = case.temperature
    if temperature == "tokens":
        temperature = 0.5 + torch.rand(target.shape, generator=generator)
        temperature[:, 2] = 0.0  # of ignored tokens
        temperature = temperature.to(device)
    options = {"temperature": temperature, "softcap": case.softcap, "logit_scale": case.logit_scale}
    return Head(tensors, target.to(device), options | {"outputs": case.outputs, "detach": case.detach})


def leaves_of(head: Head, frozen: bool) -> dict[str, Tensor]:
    """The tensors as leaves of which the right ones need gradients."""
    per_token = ("input", "adapter_input")
    return {
        name: tensor.detach().requires_grad_(not frozen or name in per_token) for name, tensor in head.tensors.items()
    }


def call(function: Callable[..., Any], leaves: dict[str, Tensor], head: Head, *more: Any, **options: Any) -> Any:
    """``function`` of the head."""
    adapter = (leaves["adapter_input"], leaves["adapter_weight"]) if "adapter_input" in leaves else None
    return function(
        leaves["input"], leaves["linear_weight"], head.target, *more, linear_bias=leaves.get("linear_bias"),
        adapter=adapter, **head.options, **options,
    )  # fmt: skip


def make_upstream(scores: TokenScores) -> dict[str, Tensor]:
    """Upstream gradients of the differentiable scores, half of which are zero."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name in DIFFERENTIABLE:
        score = getattr(scores, name)
        if score is not None and score.requires_grad:
            upstream = torch.randn(score.shape, generator=generator)
            upstream[0, ::2] = 0.0
            upstream[1, 3] = 0.0
            found[name] = upstream.to(score)
    return found


def scores_and_gradients(
    function: Callable[..., TokenScores], head: Head, frozen: bool, **options: Any
) -> tuple[TokenScores, list[Tensor]]:
    leaves = leaves_of(head, frozen)
    scores = call(function, leaves, head, **options)
    upstream = make_upstream(scores)
    outputs = [getattr(scores, name) for name in upstream]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return scores, list(torch.autograd.grad(outputs, wanted, list(upstream.values())))


def chunk_of(rows: int, head: Head) -> dict[str, int]:
    """The budget that makes chunks of so many tokens."""
    weight = head.tensors["linear_weight"]
    return {"chunk_bytes": rows * weight.shape[0] * weight.element_size()}


def make_loss(advantages: Tensor) -> Callable[[TokenScores, Tensor], Tensor]:
    """A loss of everything differentiable that it gets, by the tokens' advantages."""

    def token_loss(scores: TokenScores, index: Tensor) -> Tensor:
        losses = torch.zeros_like(advantages[index])
        if scores.log_probs is not None:
            losses = losses - advantages[index] * scores.log_probs.exp().clamp(max=0.3) * scores.log_probs
        if scores.entropy is not None:
            losses = losses - 0.1 * scores.entropy**2
        if scores.lse is not None:
            losses = losses + 0.01 * scores.lse**2
        if scores.mean_logit is not None:
            losses = losses + scores.mean_logit.sin()
        return losses

    return token_loss


def loss_and_gradients(
    function: Callable[..., Any], head: Head, frozen: bool, **options: Any
) -> tuple[Tensor, TokenScores, list[Tensor]]:
    leaves = leaves_of(head, frozen)
    generator = torch.Generator().manual_seed(3)
    dtype = torch.promote_types(leaves["input"].dtype, torch.float32)
    advantages = torch.randn(head.target.numel(), generator=generator).to(head.target.device, dtype)
    loss, scores = call(function, leaves, head, make_loss(advantages), **options)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return loss.detach(), scores, list(torch.autograd.grad(3 * loss, wanted))


def linear_log_probs_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    temperature: float | Tensor = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    **options: Any,
) -> TokenScores:
    """Materializes the logits; arguments as for :func:`~liger_ops.linear_log_probs`."""
    logits = F.linear(input, linear_weight, linear_bias)
    logits = logits if adapter is None else logits + F.linear(*adapter)
    z = transform_logits(logits, TokenLossOptions(**options))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(z.dtype).where(target != IGNORE_INDEX, 1.0)[..., None]
    scores = scores_reference((z / temperature).flatten(0, -2), target.reshape(-1), IGNORE_INDEX, outputs)._asdict()
    shaped = {name: score.view(target.shape) for name, score in scores.items() if score is not None}
    return TokenScores(**{name: score.detach() if name in detach else score for name, score in shaped.items()})


def linear_token_loss_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, token_loss: TokenLoss, **options: Any
) -> tuple[Tensor, TokenScores]:
    """Materializes the logits; arguments as for :func:`~liger_ops.linear_token_loss`."""
    scores = linear_log_probs_reference(input, linear_weight, target, **options)
    index = (target.reshape(-1) != IGNORE_INDEX).nonzero()[:, 0]
    chosen = TokenScores(*(None if score is None else score.reshape(-1)[index] for score in scores))
    detached = TokenScores(*(None if score is None else score.detach() for score in scores))
    return token_loss(chosen, index).sum(), detached
