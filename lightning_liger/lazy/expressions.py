"""Functions of the logits of one or several heads, such as softmax(x) * log_softmax(x), that are not computed either.

An expression is a tensor of the logits' shape that PyTorch's functions made of lazy logits token by token. Its recipe
holds the recipes of its operands, and stands in the place of hidden states with the numbers of its tokens: operations
on dimensions, slices and masks change these. Reductions over the vocabulary compute a chunk of tokens after the other,
or lead to a fused op where :mod:`lightning_liger.lazy.patterns` recognises them; everything else computes the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from liger_ops.backend import autocast_dtype
from lightning_liger.lazy.chunks import Rows
from lightning_liger.lazy.head import HeadParameters, LogitTransform
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.recipe import Recipe
from lightning_liger.lazy.tensor import layout

Operand = Recipe | Tensor


class ExpressionHead(HeadParameters):
    """A function of other logits in the place of a head; it has no weight.

    Args:
        name: Of PyTorch's function.
        function: Gets the values of the operands for some tokens, ``[num_tokens, vocab_size]`` or, for tensors that are
            not logits, anything that broadcasts to that.
        operands: Recipes of logits, ``[*tokens, vocab_size]``; and tensors, ``[*tokens, 1 or vocab_size]``,
            ``[vocab_size]`` or of one element.
        shape: Of the operands' logits.
        dtype: Of the result.
        is_stack: Whether the operands are stacked along a new first dimension; ``function`` then chooses between them.
    """

    __slots__ = ("autocast", "function", "index", "is_stack", "name", "operands", "shape")

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        operands: tuple[Operand, ...],
        shape: Size,
        dtype: torch.dtype,
        is_stack: bool = False,
    ) -> None:
        first = next(operand for operand in operands if isinstance(operand, Recipe))
        self.bias = self.adapter = None
        self.compute_dtype = dtype
        self.counters = first.head.counters
        self.options = first.head.options
        self.name = name
        self.function = function
        self.operands = operands
        self.shape = shape
        self.is_stack = is_stack
        device = first.hidden_states.device
        self.autocast = device.type, autocast_dtype(device.type)
        sizes = (len(operands), *shape[:-1]) if is_stack else shape[:-1]
        # Two columns, since operations on dimensions would take one for a dimension of size 1.
        self.index = torch.arange(math.prod(sizes), device=device).view(*sizes, 1).expand(*sizes, 2)

    @property
    def recipes(self) -> list[Recipe]:
        return [operand for operand in self.operands if isinstance(operand, Recipe)]

    @property
    def requires_grad(self) -> bool:
        return any(operand.requires_grad for operand in self.operands)

    @property
    def vocab_size(self) -> int:
        return self.shape[-1]

    @property
    def is_expression(self) -> bool:
        return True

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def num_values(self) -> int:
        """How many tensors of the values' size are alive when a chunk is computed, about."""
        return 1 + sum(
            recipe.head.num_values if isinstance(recipe.head, ExpressionHead) else 1 for recipe in self.recipes
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of all operands, with names for errors; the same one may come twice."""
        for operand in self.operands:
            if isinstance(operand, Recipe):
                yield from operand.tensors().items()
            else:
                yield "operand", operand

    def map(self, function: Callable[[Tensor], Tensor]) -> ExpressionHead:
        return self.mapped(_once(function), {})

    def mapped(self, function: Callable[[Tensor], Tensor], heads: dict[int, HeadParameters]) -> ExpressionHead:
        """As :meth:`map`; ``heads`` has the results for heads that several operands share, by id."""

        def of_operand(operand: Operand) -> Operand:
            if isinstance(operand, Tensor):
                return function(operand)
            hidden_states, head = function(operand.hidden_states), operand.head
            if id(head) not in heads:
                heads[id(head)] = (
                    head.mapped(function, heads) if isinstance(head, ExpressionHead) else head.map(function)
                )
            if isinstance(operand, Expression) and operand.is_whole:
                hidden_states = operand.hidden_states
            return operand.changed(hidden_states=hidden_states, head=heads[id(head)])

        other = self._replaced()
        other.operands = tuple(map(of_operand, self.operands))
        return other

    def cast(self) -> ExpressionHead:
        return self

    def chunk_size(self, num_tokens: int, vocab_size: int, element_size: int, *options: Any, **named: Any) -> int:
        leaf: HeadParameters = self
        while isinstance(leaf, ExpressionHead):
            leaf = leaf.recipes[0].head
        return leaf.chunk_size(num_tokens, vocab_size, element_size * self.num_values, *options, **named)


@dataclass(frozen=True, eq=False)
class Expression(Recipe):
    """How to compute an expression.

    Attributes:
        hidden_states: The numbers of the expression's tokens among those of its operands, twice, in the place of the
            vocabulary.
    """

    head: ExpressionHead

    def tensors(self) -> dict[str, Tensor]:
        named = {"tokens": self.hidden_states}
        seen = {id(self.hidden_states)}
        for name, tensor in self.head.tensors():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[name if name not in named else f"{name} of operand {len(named)}"] = tensor
        return named

    def map(self, function: Callable[[Tensor], Tensor]) -> Expression:
        function = _once(function)
        hidden_states = function(self.hidden_states)
        head = self.head.mapped(function, {})
        return self.changed(hidden_states=head.index if self.is_whole else hidden_states, head=head)

    @property
    def is_stack(self) -> bool:
        """Whether it is the unchanged stack of its operands."""
        return self.head.is_stack and self.is_whole and self.transform == LogitTransform(self.head.compute_dtype)

    @property
    def is_whole(self) -> bool:
        """Whether it has the tokens of its operands, in their order."""
        return self.hidden_states is self.head.index

    def token_numbers(self) -> Tensor:
        """The number of each token among those of the operands, ``[num_tokens]``."""
        return self.tokens.select(-1, 0).reshape(-1)

    def rows(self) -> Rows:
        plan = _Plan()
        values = plan.values(self, None)
        return Rows(tuple(plan.tensors), lambda *rows: values(rows, {}), self.requires_grad)

    def _project(self) -> Tensor:
        rows = self.changed(transform=LogitTransform(self.head.compute_dtype)).rows()
        if not self._is_whole_product:
            return self._in_chunks(rows.tensors, rows.values)
        return rows.values(*rows.tensors).reshape(*self.tokens.shape[:-1], self.head.vocab_size)


def _once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, called once for each tensor, so that operands share afterwards what they shared before."""
    results: dict[int, Tensor] = {}

    def mapped(tensor: Tensor) -> Tensor:
        if id(tensor) not in results:
            results[id(tensor)] = function(tensor)
        return results[id(tensor)]

    return mapped


_Values = Callable[[tuple[Tensor, ...], dict[Any, Tensor]], Tensor]
"""From the rows of a plan's tensors, and what was computed from them already, to values."""


class _Plan:
    """Which rows of which tensors the values of an expression are computed from."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._known: dict[Any, tuple[Any, ...]] = {}

    def values(self, recipe: Recipe, index: Tensor | None) -> _Values:
        """Those of the tokens of ``index``, None for all."""
        project, key = self._projection(recipe, index)

        def compute(rows: tuple[Tensor, ...], computed: dict[Any, Tensor]) -> Tensor:
            recipe.check("backward of a function of logits")  # which calls this again
            if key not in computed:
                computed[key] = project(rows, computed)
            return recipe.transform.apply(computed[key])

        return compute

    def _projection(self, recipe: Recipe, index: Tensor | None) -> tuple[_Values, Any]:
        head = recipe.head
        key = id(head), id(recipe.hidden_states), id(index)
        if key in self._known:
            return self._known[key][0], key
        if isinstance(recipe, Expression) and isinstance(head, ExpressionHead):
            project = self._expression(recipe, head, index)
        else:
            position = self._position(recipe.hidden_states, recipe.tokens, index)
            project = partial(_projected, head.cast(), position)
        self._known[key] = project, head, recipe.hidden_states, index  # which keeps their ids from being used again
        return project, key

    def _expression(self, recipe: Expression, head: ExpressionHead, index: Tensor | None) -> _Values:
        if not recipe.is_whole or head.is_stack:
            numbers = recipe.token_numbers()
            index = numbers if index is None else numbers[index]
        chosen = []
        if head.is_stack:
            assert index is not None
            num_tokens = math.prod(head.shape[:-1])
            chosen = [self._position(index, (index // num_tokens)[:, None], None)]
            index = index % num_tokens
        parts = [self._operand(operand, head.shape, index) for operand in head.operands]
        device_type, dtype = head.autocast

        def project(rows: tuple[Tensor, ...], computed: dict[Any, Tensor]) -> Tensor:
            values = [part(rows, computed) for part in parts]
            autocast = nullcontext() if dtype is None else torch.autocast(device_type, dtype)
            with autocast:
                return head.function(*(rows[position] for position in chosen), *values)

        return project

    def _operand(self, operand: Operand, shape: Size, index: Tensor | None) -> _Values:
        if isinstance(operand, Recipe):
            return self.values(operand, index)
        if operand.ndim != len(shape) or operand.shape[:-1] != shape[:-1]:
            of_all_tokens = operand.reshape(-1) if operand.ndim else operand
            return lambda rows, computed: of_all_tokens
        position = self._position(operand, operand, index)
        return lambda rows, computed: rows[position]

    def _position(self, source: Tensor, tokens: Tensor, index: Tensor | None) -> int:
        """That of the rows of ``tokens``, a view of ``source``, in :attr:`tensors`."""
        key = id(source), id(index)
        if key not in self._known:
            rows = tokens.reshape(-1, tokens.shape[-1])
            self.tensors.append(rows if index is None else rows[index])
            self._known[key] = len(self.tensors) - 1, source, index
        position: int = self._known[key][0]
        return position


def _projected(head: HeadParameters, position: int, rows: tuple[Tensor, ...], computed: dict[Any, Tensor]) -> Tensor:
    return head.project(rows[position])


class LazyExpression(LazyLogits):
    """A function of lazy logits whose values are computed only where an operation needs them."""

    recipe: Expression

    @property
    def head(self) -> ExpressionHead:
        return self.recipe.head

    def materialized(self) -> Tensor:
        """A real tensor of the values."""
        return self.real_values("the output of a module")

    def part(self, operand: Operand) -> Tensor:
        """An operand as a tensor."""
        if isinstance(operand, Tensor):
            return operand
        return (LazyExpression if isinstance(operand, Expression) else LazyLogits).of(operand)

    def linear_sum(self, dtype: torch.dtype) -> None:
        return None

    def at_labels(self, labels: Tensor) -> Tensor:
        result = self.over_chunks(lambda values, rows: values.gather(-1, rows), labels.unsqueeze(-1))
        assert isinstance(result, Tensor)
        return result.squeeze(self.vocab_dim)

    def _fused(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        raise TypeError(f"{function.__name__} takes the logits of a head, not a function of them")


def record(name: str, function: Callable[..., Tensor], *operands: Tensor, is_stack: bool = False) -> Any:
    """The lazy result of a function of lazy logits, and perhaps other tensors, that treats each token separately.

    ``NotImplemented`` for operands of other shapes than :class:`ExpressionHead` takes.
    """
    lazy = [operand for operand in operands if isinstance(operand, LazyLogits)]
    shape, device = lazy[0].shape, lazy[0].device
    for logits in lazy:
        if not logits.is_local or logits.vocab_dim != -1 or logits.shape != shape or logits.device != device:
            return NotImplemented
    for operand in operands:
        if not isinstance(operand, LazyLogits) and not _fits(operand, shape, device):
            return NotImplemented
    # PyTorch says which dtype the result has, under autocast too, when asked with tensors of no tokens.
    none = [_of_no_token(operand, len(shape)) for operand in operands]
    dtype = (none[0] if is_stack else function(*none)).dtype
    for logits in lazy:
        logits.notice(name)
    sources = tuple(operand.recipe if isinstance(operand, LazyLogits) else operand for operand in operands)
    head = ExpressionHead(name, function, sources, shape, dtype, is_stack)
    recipe = Expression(head.index, head, LogitTransform(dtype))
    if not dtype.is_floating_point:
        recipe = recipe.map(Tensor.detach)
    if is_stack or all(logits.twin.is_contiguous() for logits in lazy):
        twin = layout(recipe.shape, dtype)
    else:
        twin = function(*(_twin(operand) for operand in operands)).to(dtype)
    result = LazyExpression.of(recipe, twin)
    for root in (logits.lineage.root for logits in lazy):
        if root.is_expression or any(read.is_apart and read.values() is operands[-1] for read in root.reads):
            result.lineage.rounded_by = result.lineage.rounded_by or root.rounded_by
    return result


def _fits(operand: Tensor, shape: Size, device: torch.device) -> bool:
    if type(operand) not in (Tensor, torch.nn.Parameter) or operand.is_complex():
        return False
    if operand.ndim == 0:
        return operand.device == device or operand.device.type == "cpu"
    if operand.device != device or operand.ndim > len(shape):
        return False
    if operand.numel() == 1 or operand.shape == shape[-1:]:
        return True
    return operand.shape[:-1] == shape[:-1] and operand.shape[-1] in (1, shape[-1])


def _of_no_token(operand: Tensor, ndim: int) -> Tensor:
    if isinstance(operand, LazyLogits):
        return torch.empty((0, 1), dtype=operand.dtype, device=operand.device)
    if operand.ndim == ndim and operand.numel() != 1:
        return operand.detach().new_empty((0, 1))
    return operand.detach().new_empty((1,) * min(operand.ndim, 2))


def _twin(operand: Tensor) -> Tensor:
    return operand.twin if isinstance(operand, LazyLogits) else operand.to("meta")
