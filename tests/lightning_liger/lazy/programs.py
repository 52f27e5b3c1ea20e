"""Random programs on the logits of a patched head and of a stock one, in lockstep.

A program is a number: its seed decides which operations are applied to which variables. Both heads run the same one,
and everything that a user could see is compared: layout, values, gradients of leaves and of intermediate results, what
hooks saw, and which operations PyTorch refuses. Lazy logits may refuse what PyTorch does not; the message names the
operation and :func:`~lightning_liger.materialize`.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.patching.rules.head import HeadReplacement

BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE, VOCAB_SIZE = 2, 3, 4, 7
ATOL = 1e-5

Operation = Callable[[random.Random, Tensor], Callable[["Side", Tensor], Any]]


class Refused(Exception):
    """Lazy logits refused an operation that a stock model does not."""


class Ended(Exception):
    """PyTorch refused an operation on one of the heads, so that the programs go separate ways."""


class Difference(AssertionError):
    """A program behaves differently on a patched head."""


class Side:
    """The variables of a program on one of the two heads."""

    def __init__(self, seed: int, lazy: bool, bias: bool, frozen: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if lazy:
            self.head.__class__ = HeadReplacement().patched_class(nn.Linear)
        shape = (BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE)
        self.input = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        self.extra = torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        self.hidden_states = self.input * 1.0
        if frozen == "head":
            self.head.requires_grad_(False)
        if frozen == "trunk":
            self.hidden_states = self.hidden_states.detach()
        self.variables: list[Tensor] = [self.head(self.hidden_states)]
        self.losses: list[Tensor] = []
        self.retained: list[Tensor] = []
        self.seen: list[Tensor] = []

    @property
    def leaves(self) -> list[Tensor]:
        return [self.input, self.extra, *self.head.parameters()]


# Operations get the random numbers and the stock variable, and return what is done to the variable of either side.


def _number(rng: random.Random) -> float:
    return rng.choice([0.5, -2.0, 3.0, 1.0, 0.0])


def _dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(-x.ndim, x.ndim)


def _slice(rng: random.Random, size: int) -> slice:
    return rng.choice([slice(None), slice(1, None), slice(None, -1), slice(size // 2), slice(None, None, 2)])


def _view(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    d, e = _dim(rng, x), _dim(rng, x)
    size = x.shape[d]
    part = _slice(rng, size)
    index = [_slice(rng, n) for n in x.shape[: rng.randrange(1, x.ndim + 1)]]
    element = rng.randrange(max(size, 1))
    last = x.shape[-1]
    return rng.choice(
        [
            lambda s, x: x.view(-1, last),
            lambda s, x: x.reshape(-1, last),
            lambda s, x: x.view(x.shape),
            lambda s, x: x.reshape(-1),
            lambda s, x: x.ravel(),
            lambda s, x: x.flatten(0, max(x.ndim - 2, 0)),
            lambda s, x: x[tuple(index)],
            lambda s, x: x[..., part] if part.step is None else x[part],
            lambda s, x: x[..., :],
            lambda s, x: x[:, None],
            lambda s, x: x[element % x.shape[0]],
            lambda s, x: x.select(d, element),
            lambda s, x: x.narrow(d, 0, max(size - 1, 1)),
            lambda s, x: x.transpose(d, e),
            lambda s, x: x.mT,
            lambda s, x: x.movedim(d, e),
            lambda s, x: x.unsqueeze(d),
            lambda s, x: x.squeeze(),
            lambda s, x: x.expand(2, *x.shape),
            lambda s, x: x.expand_as(x),
            lambda s, x: x.view_as(x),
            lambda s, x: x.unfold(d, 1, 1),
            lambda s, x: x.diagonal(),
            lambda s, x: x.unbind(d)[0],
            lambda s, x: x.split(max(size // 2, 1), d)[0],
            lambda s, x: torch.chunk(x, 2, d)[-1],
            lambda s, x: x.detach(),
            lambda s, x: x.detach(),
            lambda s, x: x.contiguous(),
            lambda s, x: x.to(torch.float64),
            lambda s, x: F.dropout(x, 0.5, training=False),
            lambda s, x: x.as_strided(x.shape, x.stride(), x.storage_offset()),
            lambda s, x: x.swapaxes(d, e)[..., part],
            lambda s, x: next(iter(x)),
        ]
    )


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _PassedThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 + 0 * ctx.saved_tensors[0]


def _new(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    c, d, last = _number(rng), _dim(rng, x), x.shape[-1]
    rows = torch.tensor([rng.randrange(x.shape[d]) for _ in range(3)]) if x.shape[d] else torch.zeros(0).long()
    mask = torch.tensor([rng.random() < 0.6 for _ in range(x.shape[0])])
    return rng.choice(
        [
            lambda s, x: x * c,
            lambda s, x: c * x,
            lambda s, x: x / 3,
            lambda s, x: torch.Tensor.mul(x, 2),
            lambda s, x: torch.tanh(x / 5) * 5,
            lambda s, x: x + c,
            lambda s, x: 1 - x,
            lambda s, x: -x,
            lambda s, x: 2 // (x + 10),
            lambda s, x: 2 % (x + 10),
            lambda s, x: x + (s.extra if x.shape[-1] == VOCAB_SIZE else 1),
            lambda s, x: (s.extra.detach() if x.shape[-1] == VOCAB_SIZE else 1) + x,
            lambda s, x: x.clone(),
            lambda s, x: x.log_softmax(-1),
            lambda s, x: x.softmax(d),
            lambda s, x: x.log_softmax(d),
            lambda s, x: x.float(),
            lambda s, x: x.relu(),
            lambda s, x: F.relu(x),
            lambda s, x: F.pad(x, (0, 1)),
            lambda s, x: torch.where(x > 0, x, c),
            lambda s, x: torch.cat([x, x], d),
            lambda s, x: torch.stack([x, x * 2]),
            lambda s, x: x.masked_fill(x > 1, c),
            lambda s, x: x.clamp(-1, 1),
            lambda s, x: x[mask],
            lambda s, x: x.index_select(d, rows),
            lambda s, x: x[..., [0, 0, last - 1]],
            lambda s, x: x.cumsum(d),
            lambda s, x: x @ x.mT,
            lambda s, x: x - x.logsumexp(-1, keepdim=True),
            lambda s, x: x.abs().sqrt(),
            lambda s, x: x.detach().clone(),
            lambda s, x: Doubled.apply(x),
            lambda s, x: _PassedThrough.apply(x),
            lambda s, x: torch.zeros_like(x) + 1,
            lambda s, x: x.new_ones(x.shape),
            lambda s, x: x.double(),
            lambda s, x: x.softmax(-1) * x.log_softmax(-1),
            lambda s, x: x.log_softmax(-1) * c,
            lambda s, x: x.log_softmax(-1).exp(),
            lambda s, x: -x.log_softmax(-1),
            lambda s, x: x.log_softmax(-1) - x[..., :1],
            lambda s, x: x - x.amax(-1, keepdim=True),
            lambda s, x: torch.logaddexp(x.log_softmax(-1), x.softmax(-1)),
            lambda s, x: torch.stack([x.softmax(-1), x.log_softmax(-1)]),
            lambda s, x: torch.stack([x.log_softmax(-1), x.softmax(-1)]).logsumexp(0),
            lambda s, x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="none")[mask],
            lambda s, x: x.softmax(-1) * (s.extra if x.shape[-1] == VOCAB_SIZE else 2),
            lambda s, x: x.softmax(-1).clamp(min=0.2).log(),
        ]
    )


def _write(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    c, d, e = _number(rng), _dim(rng, x), _dim(rng, x)
    index = tuple(_slice(rng, n) for n in x.shape[: rng.randrange(1, x.ndim + 1)])
    source = rng.randrange(100)

    def set_items(s: Side, x: Tensor) -> None:
        x[index] = c

    def multiply(s: Side, x: Tensor) -> None:
        x *= c

    def add_other(s: Side, x: Tensor) -> None:
        other = s.variables[source % len(s.variables)]
        x += other if other.shape == x.shape else 1

    def write_array(s: Side, x: Tensor) -> None:
        if not s.losses:  # whose gradient PyTorch would compute from the values of now, since it does not notice
            x.detach().numpy()[...] = c

    return rng.choice(
        [
            set_items,
            multiply,
            add_other,
            write_array,
            lambda s, x: x.mul_(0.5),
            lambda s, x: x.div_(5).tanh_(),
            lambda s, x: x.masked_fill_(x > 0, c),
            lambda s, x: x.clamp_(-1, 1),
            lambda s, x: x.zero_(),
            lambda s, x: x.add_(c),
            lambda s, x: x.fill_(c),
            lambda s, x: x[..., -1:].fill_(c),
            lambda s, x: x.view(-1).mul_(2),
            lambda s, x: x.unsqueeze_(d),
            lambda s, x: x.transpose_(d, e),
            lambda s, x: x.squeeze_(),
            lambda s, x: x.copy_(x.detach() * 2),
            lambda s, x: F.relu(x, inplace=True),
            lambda s, x: F.relu_(x),
            lambda s, x: torch.mul(x.detach(), 2, out=x.detach()),
            lambda s, x: torch.clamp_(x, max=1.0),
            lambda s, x: x.detach_(),
            lambda s, x: x.index_fill_(d, torch.tensor([0]), c),
        ]
    )


def _watch(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    def retain(s: Side, x: Tensor) -> None:
        if x.requires_grad:
            x.retain_grad()
            s.retained.append(x)

    def hook(s: Side, x: Tensor) -> None:
        node = x.grad_fn  # torch 2.13 crashes where it is made anew in register_hook  # noqa: F841
        if x.requires_grad:
            x.register_hook(lambda gradient: s.seen.append(gradient.clone()))

    def scale(s: Side, x: Tensor) -> None:
        node = x.grad_fn  # noqa: F841  as above
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)

    def require(s: Side, x: Tensor) -> None:
        if x.is_leaf and torch.is_grad_enabled():
            x.requires_grad_()

    return rng.choice([retain, hook, scale, require])


def _loss(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    last = x.shape[-1]
    labels = torch.tensor([rng.randrange(max(last, 1)) for _ in range(x.numel() // max(last, 1))])
    reduction = rng.choice(["mean", "sum"])
    other = rng.randrange(100)

    def divergence(s: Side, x: Tensor) -> Tensor:
        y = s.variables[other % len(s.variables)]
        y = y.detach() if y.shape == x.shape else torch.zeros_like(x)
        return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="sum")

    def wanted(s: Side, x: Tensor) -> Tensor:
        loss = F.cross_entropy(x.reshape(-1, last), labels, reduction=reduction)
        if loss.requires_grad and x.requires_grad:
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
            s.seen.append(torch.zeros(()) if gradient is None else gradient)
        return loss

    return rng.choice(
        [
            lambda s, x: F.cross_entropy(x.reshape(-1, last), labels, reduction=reduction),
            lambda s, x: F.cross_entropy(x.flatten(0, -2), labels, reduction=reduction),
            lambda s, x: F.nll_loss(x.reshape(-1, last).log_softmax(-1), labels, reduction=reduction),
            lambda s, x: x.log_softmax(-1).gather(-1, labels.view(*x.shape[:-1], 1)).sum(),
            lambda s, x: x.logsumexp(-1).sum(),
            lambda s, x: x.max(-1).values.sum(),
            lambda s, x: x.topk(1).values.sum(),
            lambda s, x: x.sum(),
            lambda s, x: x.square().mean(),
            lambda s, x: x.mean(-1).square().sum(),
            lambda s, x: x.mean(),
            lambda s, x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).square().sum(),
            lambda s, x: (x.softmax(-1) * x).sum(),
            lambda s, x: Categorical(logits=x, validate_args=False).entropy().sum(),
            divergence,
            wanted,
        ]
    )


def _source(rng: random.Random, x: Tensor) -> Callable[[Side, Tensor], Any]:
    def step(s: Side, x: Tensor) -> None:
        with torch.no_grad():
            s.head.weight.add_(0.1)

    def zero(s: Side, x: Tensor) -> None:
        with torch.no_grad():
            s.hidden_states.zero_()

    def again(s: Side, x: Tensor) -> Tensor:
        return s.head(s.hidden_states)

    def backward(s: Side, x: Tensor) -> None:
        losses = [loss for loss in s.losses if loss.requires_grad]
        if losses:
            losses[-1].backward(retain_graph=True)

    def duplicate(s: Side, x: Tensor) -> Tensor:
        return copy.deepcopy(x.detach())

    return rng.choice([step, zero, again, again, backward, backward, duplicate])


_KINDS = ((_view, 10), (_new, 6), (_write, 5), (_watch, 2), (_loss, 4), (_source, 1))


def run_program(seed: int) -> str:
    """Runs one program on both heads.

    Returns:
        ``"same"``, or ``"refused"`` if lazy logits raised an error that says what to do.

    Raises:
        Difference: If they differ in any other way.
    """
    rng = random.Random(seed)
    bias, frozen = rng.random() < 0.5, rng.choice(["none", "none", "none", "head", "trunk"])
    graded = rng.random() < 0.85
    trace: list[str] = []
    with warnings.catch_warnings(), torch.set_grad_enabled(graded), lazy_logits():
        warnings.simplefilter("ignore")
        lazy, real = (Side(seed, is_lazy, bias, frozen) for is_lazy in (True, False))
        try:
            for _ in range(rng.randrange(3, 12)):
                _step(rng, lazy, real, trace)
            _compare_ends(lazy, real)
        except Refused:
            return "refused"
        except Ended:
            return "same"
        except Difference as error:
            raise Difference(f"program {seed}: {error}\nafter:\n" + "\n".join(trace)) from error
    return "same"


def _step(rng: random.Random, lazy: Side, real: Side, trace: list[str]) -> None:
    position = rng.randrange(len(real.variables))
    if real.variables[position].ndim == 0 or real.variables[position].numel() == 0:
        return
    kinds, weights = zip(*_KINDS, strict=True)
    kind = rng.choices(kinds, weights)[0]
    operation = kind(rng, real.variables[position])
    code = operation.__code__
    trace.append(f"  {kind.__name__} line {code.co_firstlineno} {code.co_name} of variable {position}")
    # A view made under no_grad says that it requires a gradient, although none passes it; a lazy one does not.
    graded = torch.is_grad_enabled() and (kind is _view or rng.random() < 0.9)
    context = torch.enable_grad if graded else torch.no_grad
    with context():
        (got, got_error), (want, want_error) = (
            _attempt(partial(operation, side), side.variables[position]) for side in (lazy, real)
        )
    _compare_errors(got_error, want_error)
    if want_error is not None:
        return
    if kind in (_write, _watch):
        _compare_layouts(lazy.variables[position], real.variables[position])
    elif isinstance(want, Tensor):
        _compare_layouts(got, want)
        is_loss = kind is _loss
        (lazy.losses if is_loss else lazy.variables).append(got)
        (real.losses if is_loss else real.variables).append(want)
        trace[-1] += "" if is_loss else f" -> {len(real.variables) - 1} {tuple(want.shape)}"


def _attempt(function: Callable[[Any], Any], x: Any) -> tuple[Any, Exception | None]:
    try:
        return function(x), None
    except Exception as error:  # compared with the other side's
        return None, error


_OWN_REFUSALS = (
    *("modified by an inplace operation", "detached in-place", "Can't detach views in-place"),
    "its base or another view of its base has been modified inplace",
)
"""What PyTorch refuses because of what it saved or because a tensor is a view, which depends on how it was computed."""


def _compare_errors(got: Exception | None, want: Exception | None) -> None:
    if want is None and isinstance(got, RuntimeError) and "materialize(logits)" in str(got):
        raise Refused
    if (got is None) != (want is None):
        error = got or want
        if any(text in str(error) for text in _OWN_REFUSALS):
            raise Ended
        raise Difference(f"patched raises {got!r}, stock {want!r}") from error


def _compare_layouts(got: Tensor, want: Tensor) -> None:
    errors = [_attempt(lambda x: x.grad_fn, x)[1] for x in (got, want)]
    if errors != [None, None]:  # a view that PyTorch no longer allows
        _compare_errors(*errors)
        return
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim"):
        if getattr(got, name) != getattr(want, name):
            raise Difference(f"{name}: patched {getattr(got, name)}, stock {getattr(want, name)}")
    strides = [
        [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]
        for x in (got, want)
    ]
    if strides[0] != strides[1] or got.is_contiguous() != want.is_contiguous():
        raise Difference(f"stride of {tuple(want.shape)}: patched {got.stride()}, stock {want.stride()}")


def _compare_values(what: str, got: Tensor | None, want: Tensor | None) -> None:
    if (got is None) != (want is None):
        raise Difference(f"{what}: patched {got}, stock {want}")
    if got is not None and want is not None:
        try:
            torch.testing.assert_close(
                got.detach() + 0, want.detach() + 0, rtol=ATOL, atol=ATOL, equal_nan=True, check_dtype=False
            )
        except AssertionError as error:
            raise Difference(f"{what}: {error}") from error


def _compare_ends(lazy: Side, real: Side) -> None:
    for position, (got, want) in enumerate(zip(lazy.losses, real.losses, strict=True)):
        _compare_values(f"loss {position}", got, want)

    def backward(losses: list[Tensor]) -> None:
        if losses := [loss.double() for loss in losses if loss.requires_grad]:
            torch.stack(losses).sum().backward()

    errors = [_attempt(backward, side.losses)[1] for side in (lazy, real)]
    _compare_errors(*errors)
    if errors == [None, None]:
        for name, got, want in zip(("input", "extra", "weight", "bias"), lazy.leaves, real.leaves, strict=False):
            _compare_values(f"gradient of {name}", got.grad, want.grad)
        for got, want in zip(lazy.retained, real.retained, strict=True):
            _compare_values("retained gradient", got.grad, want.grad)
        if len(lazy.seen) != len(real.seen):
            raise Difference(f"hooks ran {len(lazy.seen)} times, stock {len(real.seen)} times")
        for got, want in zip(lazy.seen, real.seen, strict=True):
            _compare_values("gradient seen by a hook", got, want)
    for position, pair in enumerate(zip(lazy.variables, real.variables, strict=True)):
        (got, got_error), (want, want_error) = (_attempt(lambda x: x.detach() + 0, x) for x in pair)
        _compare_errors(got_error, want_error)
        _compare_values(f"variable {position}", got, want)
