"""Sums over the vocabulary of expressions that a fused op computes: entropies and divergences.

Recognised are, with p and q the softmax and log_softmax of one head's logits each, or their exp and log:

    sum(p * log(p))                 -entropy
    sum(p * x), x the logits        lse - entropy
    sum(kl_div(log(q), p))          the Kullback-Leibler divergence KL(p || q)
    sum(p * (log(p) - log(q)))      the same
    sum(b * kl_div(log(m), p) + (1 - b) * kl_div(log(m), q))  the generalised Jensen-Shannon divergence, where
        log(m) = logsumexp(stack(log(q) + log(1 - b), log(p) + log(b)), 0), as GKD computes it (arXiv:2306.13649)

A divergence is that of a student, which gets a gradient, from a teacher, which gets none. All others are computed from
the values of a chunk of tokens at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_liger.lazy.expressions import Expression, ExpressionHead
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.recipe import Recipe
from lightning_liger.lazy.scores import divergence

_NO_LABEL = -(2**62)


class _KL(NamedTuple):
    """KL(p || q) of the distributions of two heads."""

    p: Recipe
    q: Recipe


def fused_sum(x: LazyLogits, reduction: str) -> Tensor | None:
    """The sum over the vocabulary of each token, or over everything, where a fused op computes it; else None.

    Args:
        x: Any lazy logits.
        reduction: ``"none"`` or ``"sum"``.
    """
    root = x.recipe
    if not isinstance(root, Expression) or root.num_tokens == 0 or not _is_scaled(root):
        return None
    found = _entropy(root, reduction) if root.head.name == "mul" else None
    if found is None and (kl := _kl(root.head)) is not None:
        found = _divergence(root, kl.p, kl.q, reduction)
    if found is None and root.head.name == "add":
        found = _jensen_shannon(root, reduction)
    return None if found is None else found * root.transform.scale


def _is_scaled(recipe: Recipe) -> bool:
    """Whether nothing but a factor and a cast was applied to an expression."""
    return not recipe.transform.normalized and recipe.transform.tanh_scale is None


def _node(recipe: object, *names: str) -> Expression | None:
    """``recipe`` if it is the unchanged result of one of these functions, of all tokens of its operands."""
    if not isinstance(recipe, Expression) or recipe.head.name not in names or not recipe.is_whole:
        return None
    return recipe if _is_scaled(recipe) and recipe.transform.scale == 1.0 else None


def _log_softmax(recipe: object) -> Recipe | None:
    """The recipe if it is a log-softmax of a head's logits."""
    if isinstance(recipe, Recipe) and not isinstance(recipe, Expression) and recipe.transform.normalized:
        return recipe
    return None


def _softmax(recipe: object) -> Recipe | None:
    """The head's logits of which the recipe is the softmax, perhaps after a log-softmax."""
    if (node := _node(recipe, "softmax")) is not None:
        operand = node.head.operands[0]
        return operand if isinstance(operand, Recipe) and not isinstance(operand, Expression) else None
    if (node := _node(recipe, "exp")) is not None:
        return _log_softmax(node.head.operands[0])
    return None


def _are_of_one_output(first: Recipe, second: Recipe) -> bool:
    """Whether both are the same logits, but for a log-softmax and casts."""
    a, b = (recipe.transform._replace(normalized=False, dtype=torch.float32) for recipe in (first, second))
    return first.head is second.head and first.hidden_states is second.hidden_states and a == b


def _at_tokens(root: Expression, recipe: Recipe) -> LazyLogits:
    """The logits of an operand for the tokens of ``root``."""
    hidden_states = recipe.tokens
    if not root.is_whole:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])[root.token_numbers()]
        hidden_states = rows.reshape(*root.tokens.shape[:-1], rows.shape[-1])
    return LazyLogits.of(recipe.changed(hidden_states=hidden_states, vocab_dim=-1))


def _without_factor(recipe: object) -> tuple[object, float]:
    """What was scaled or negated, and the factor."""
    if isinstance(recipe, Expression) and _is_scaled(recipe) and recipe.is_whole and recipe.transform.scale != 1.0:
        unscaled, factor = _without_factor(recipe.changed(transform=recipe.transform._replace(scale=1.0)))
        return unscaled, factor * recipe.transform.scale
    if (node := _node(recipe, "neg")) is not None:
        negated, factor = _without_factor(node.head.operands[0])
        return negated, -factor
    return recipe, 1.0


def _entropy(root: Expression, reduction: str) -> Tensor | None:
    (first, of_first), (second, of_second) = map(_without_factor, root.head.operands)
    for p, x in ((first, second), (second, first)):
        while (clamp := _node(x, "clamp_lowest")) is not None:
            x = clamp.head.operands[0]
        source = _softmax(p)
        if source is None or not isinstance(x, Recipe) or isinstance(x, Expression):
            continue
        if not _are_of_one_output(source, x):
            continue
        logits = _at_tokens(root, x)
        outputs = ("entropy",) if x.transform.normalized else ("entropy", "lse")
        labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        scores = logits.token_scores(labels, outputs=outputs, ignore_index=_NO_LABEL)
        assert scores.entropy is not None
        found = -scores.entropy if scores.lse is None else scores.lse - scores.entropy
        found = found * (of_first * of_second)
        return found.sum() if reduction == "sum" else found
    return None


def _kl(head: ExpressionHead) -> _KL | None:
    """The distributions if the sum of the expression over the vocabulary is their Kullback-Leibler divergence."""
    p: Recipe | None
    if head.name == "kl_div of logs":
        q, p = _log_softmax(head.operands[0]), _log_softmax(head.operands[1])
    elif head.name == "kl_div":
        q, p = _log_softmax(head.operands[0]), _softmax(head.operands[1])
    elif head.name == "mul":
        return _kl_of_product(*head.operands) or _kl_of_product(*head.operands[::-1])
    else:
        return None
    return None if p is None or q is None else _KL(p, q)


def _kl_of_product(probabilities: object, difference: object) -> _KL | None:
    """KL(p || q) from p and log(p) - log(q)."""
    p, node = _softmax(probabilities), _node(difference, "sub")
    if p is None or node is None:
        return None
    log_p, log_q = map(_log_softmax, node.head.operands)
    if log_p is None or log_q is None or not _are_of_one_output(p, log_p):
        return None
    return _KL(p, log_q)


class _Term(NamedTuple):
    """A weight times the divergence of a mixture of distributions from one of them."""

    weights: list[float | Tensor]
    mixture: Expression
    distribution: Recipe

    def share(self) -> Tensor | None:
        """The logarithm of the distribution's share in the mixture, if it is one of its parts."""
        found = []
        for operand in self.mixture.head.operands:
            node = _node(operand, "add")
            if node is None:
                return None
            summand, constant = _log_softmax(node.head.operands[0]), _constant(node.head.operands[1])
            if summand is None or constant is None:
                return None
            if _are_of_one_output(summand, self.distribution):
                found.append(constant)
        return found[0] if len(found) == 1 else None


def _constant(operand: object) -> Tensor | None:
    is_constant = isinstance(operand, Tensor) and operand.numel() == 1 and not operand.requires_grad
    return operand if is_constant and isinstance(operand, Tensor) else None


def _term(recipe: object) -> _Term | None:
    recipe, scale = _without_factor(recipe)
    weights: list[float | Tensor] = [scale]
    if (node := _node(recipe, "mul")) is not None:
        recipe, weight = node.head.operands[0], _constant(node.head.operands[1])
        if weight is None:
            return None
        weights.append(weight)
    if (node := _node(recipe, "kl_div of logs")) is None:
        return None
    mixture, distribution = _node(node.head.operands[0], "logsumexp"), _log_softmax(node.head.operands[1])
    return None if mixture is None or distribution is None else _Term(weights, mixture, distribution)


def _jensen_shannon(root: Expression, reduction: str) -> Tensor | None:
    first, second = map(_term, root.head.operands)
    if first is None or second is None or first.mixture.head is not second.mixture.head:
        return None
    shares = first.share(), second.share()
    if len(first.mixture.head.operands) != 2 or _are_of_one_output(first.distribution, second.distribution):
        return None
    if shares[0] is None or shares[1] is None:
        return None
    weights = [
        torch.stack([torch.as_tensor(each, dtype=torch.float64).reshape(()).cpu() for each in term.weights]).prod()
        for term in (first, second)
    ]
    numbers = torch.stack([*weights, *(share.reshape(()).double().cpu() for share in shares if share is not None)])
    weight, other_weight, *logarithms = numbers.tolist()  # waits for a GPU, as masks do
    if not 0 < weight < 1 or not 0 < other_weight < 1:
        return None
    rounding = 2 * torch.finfo(shares[0].dtype).eps
    differences = math.log(weight) - logarithms[0], math.log(other_weight) - logarithms[1], weight + other_weight - 1
    if max(map(abs, differences)) > rounding * max(1.0, *map(abs, logarithms)):
        return None
    student, teacher, beta = first.distribution, second.distribution, other_weight
    if teacher.requires_grad:
        student, teacher, beta = teacher, student, weight
    if teacher.requires_grad:
        return None
    logits = _at_tokens(root, student), _at_tokens(root, teacher)
    return divergence(*logits, kind="jsd", beta=beta, reduction=reduction)


def _divergence(root: Expression, p: Recipe, q: Recipe, reduction: str) -> Tensor | None:
    if p.requires_grad and q.requires_grad:
        return None
    student, teacher, kind = (p, q, "reverse_kl") if p.requires_grad else (q, p, "forward_kl")
    return divergence(_at_tokens(root, student), _at_tokens(root, teacher), kind=kind, reduction=reduction)
