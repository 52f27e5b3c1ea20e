"""Options, targets, statistics and argument checks that all losses over class indices share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_floating,
    check_integer,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    shown,
    wrong_type,
)

KEPT, IGNORED = 0, -1
"""Labels of tokens that count and of those that do not, where there are no classes to label."""
IGNORE_INDEX = -100
REDUCTIONS = ("none", "mean", "sum")


class TokenLossOptions(NamedTuple):
    """Options of the loss of one token, as ops take them; see :mod:`liger_ops.loss.cross_entropy` for the formula."""

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss_weight: float = 0.0

    @classmethod
    def checked(cls, *values: Any) -> "TokenLossOptions":
        """The options of a caller.

        Raises:
            TypeError: If an option is no number.
            ValueError: If an option is out of its range, infinite or NaN.
        """
        options = cls(*values)
        if isinstance(options.logit_scale, Tensor):
            raise TypeError(
                f"logit_scale must be a number, got {shown(options.logit_scale)}: its gradient would be lost; multiply"
                " the hidden states (or the logits) by the tensor instead"
            )
        check_integer("ignore_index", options.ignore_index)
        check_number("label_smoothing", options.label_smoothing, at_least=0, at_most=1)
        check_number("softcap", options.softcap, above=0, optional=True)
        check_number("logit_scale", options.logit_scale)
        check_number("z_loss_weight", options.z_loss_weight, at_least=0)
        numbers = [None if each is None else float(each) for each in options[1:]]
        return cls(int(options.ignore_index), *numbers)  # type: ignore[arg-type]  # only softcap may be None


class Targets(NamedTuple):
    """Labels, and the weights of classes and tokens."""

    labels: Tensor  # [num_tokens], int64: class indices, or ignore_index
    class_weight: Tensor | None  # [vocab_size] or None
    token_weight: Tensor | None  # [num_tokens] or None


class TokenStats(NamedTuple):
    """Quantities of each token that the loss computes anyway, without gradients; zero or False for ignored tokens."""

    losses: Tensor
    """``[num_tokens]``, float32: each token's loss before reduction, weights included."""
    log_probs: Tensor
    """``[num_tokens]``, float32: log-probability of the label, without weights, smoothing or z-loss."""
    lse: Tensor
    """``[num_tokens]``, float32: log-sum-exp of the token's scaled and capped logits."""
    entropy: Tensor
    """``[num_tokens]``, float32: entropy of the predicted distribution, in nats."""
    predictions: Tensor
    """``[num_tokens]``, int64: the class with the largest logit (the first of equals), ``ignore_index`` at ignored
    tokens."""
    correct: Tensor
    """``[num_tokens]``, bool: whether the prediction is the label."""


def check_tensors(input: Tensor, target: Any, weight: Any, token_weight: Any) -> None:
    """Raises for targets and weights that are no tensors, of dtypes that no loss takes, or not on input's device."""
    check_tensor("target", target)
    if not target.is_floating_point():
        _check_index_dtype("target", target)
    check_floating("weight", weight, optional=True)
    check_tensor("token_weight", token_weight, optional=True)
    if token_weight is not None and token_weight.is_complex():
        raise wrong_type("token_weight", "a tensor of real numbers", token_weight)
    check_same_device("input", input, target=target, weight=weight, token_weight=token_weight)


def _check_index_dtype(name: str, labels: Tensor) -> None:
    if labels.dtype != torch.int64:
        raise ValueError(f"{name} must hold class indices of dtype torch.int64, got {labels.dtype}")


def check_labels(name: str, labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises a ValueError for labels of another dtype than int64, and on the CPU for labels out of range."""
    _check_index_dtype(name, labels)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"{name} must be between 0 and vocab_size - 1 = {vocab_size - 1}, or ignore_index = {ignore_index};"
                f" got {wrong[0].item()} ({wrong.numel()} of {labels.numel()} labels are out of range)"
            )


def check_weights(
    weight: Tensor | None,
    token_weight: Tensor | None,
    target: Tensor,
    vocab_size: int,
    options: TokenLossOptions,
    reduction: str,
) -> None:
    """Raises a ValueError for weights of wrong shapes, those that would lose their gradient, and NaN on the CPU."""
    if weight is not None and reduction == "mean" and options.z_loss_weight:
        raise ValueError(
            f"z_loss_weight must be 0 with class weights in a mean, got {options.z_loss_weight}: the two terms have"
            " different divisors; take a mean of each term, or reduction='sum'"
        )
    check_shape("weight", weight, (vocab_size,), "vocab_size")
    check_shape("token_weight", token_weight, target.shape, "target's")
    for name, tensor in (("weight", weight), ("token_weight", token_weight)):
        if tensor is not None and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = tensor.isnan() if tensor is weight else tensor.isnan() & (target != options.ignore_index)
            if wrong.any():
                raise ValueError(f"{name} must have no NaN except at ignored tokens, got {int(wrong.sum())} of them")
        check_constant(name, tensor, "the loss has", ", or multiply the losses of reduction='none' by it")


def check_constant(name: str, tensor: Tensor | None, of: str, instead: str = "") -> None:
    """Raises a ValueError for a tensor that requires a gradient, which ``of`` none for it."""
    if backend.needs_graph(tensor):
        raise ValueError(
            f"{name} must not require a gradient, since {of} none for it, got {shown(tensor)} that requires one; pass"
            f" {name}.detach(){instead}"
        )


def check_tokens(mask: Any, token_weight: Any, like: Tensor, shape: torch.Size, tokens_of: str) -> None:
    """Raises for masks and weights that are not one value for each token; ``tokens_of`` names what has the tokens."""
    check_tensor("mask", mask, optional=True)
    check_tensor("token_weight", token_weight, optional=True)
    check_same_device(tokens_of, like, mask=mask, token_weight=token_weight)
    if mask is not None and mask.dtype != torch.bool:
        raise wrong_type("mask", "a bool tensor, True at tokens that count, or None", mask)
    if token_weight is not None and token_weight.is_complex():
        raise wrong_type("token_weight", "a tensor of real numbers", token_weight)
    for name, tensor in {"mask": mask, "token_weight": token_weight}.items():
        check_shape(name, tensor, shape, f"{tokens_of}'s without its last dimension")
    instead = ", or multiply the divergences of reduction='none' by it"
    check_constant("token_weight", token_weight, "the divergence has", instead)


def flat_tokens(mask: Tensor | None, token_weight: Tensor | None, like: Tensor, num_tokens: int) -> tuple[Tensor, Any]:
    """The labels of the tokens, ``KEPT`` or ``IGNORED``, and their weights or None, ``[num_tokens]`` each."""
    if mask is None:
        labels = torch.full((num_tokens,), KEPT, dtype=torch.int64, device=like.device)
    else:
        labels = mask.reshape(-1).long() + IGNORED
    return labels, None if token_weight is None else token_weight.detach().reshape(-1).contiguous()


def flat_targets(target: Tensor, weight: Tensor | None, token_weight: Tensor | None, dtype: torch.dtype) -> Targets:
    """Labels and weights in one dimension, contiguous and detached; in float64 only for logits of this ``dtype``."""
    weights = [
        each if each is None or each.dtype != torch.float64 or dtype == torch.float64 else each.float()
        for each in (weight, token_weight)
    ]
    return Targets(
        target.reshape(-1).contiguous(),
        *(None if each is None else each.detach().reshape(-1).contiguous() for each in weights),
    )
