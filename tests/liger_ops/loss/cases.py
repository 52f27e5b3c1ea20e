"""Batches and options of cross entropy, and the same in plain PyTorch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import TokenStats, cross_entropy
from tests.liger_ops.accuracy import assert_as_accurate

EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 8.0, "logit_scale": 0.5, "z_loss_weight": 1e-2}
"""Options that are numbers and change the loss."""


def make_batch(
    num_tokens: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Logits of spread 4 and labels that hold the first class, the last class and, from 4 tokens on, ignored ones."""
    logits = (4 * torch.randn(num_tokens, vocab_size)).to(device, dtype)
    return logits, draw_labels(num_tokens, vocab_size, "some", ignore_index).to(device)


def make_case(
    name: str, num_tokens: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits, labels and, if the name is not "plain", options with weights of tokens."""
    options = {} if name == "plain" else {**EVERYTHING, **draw_weights(num_tokens, vocab_size, "token", device)}
    return *make_batch(num_tokens, vocab_size, dtype=dtype, device=device), options


def plain_transform(logits: Tensor, softcap: float | None = None, logit_scale: float = 1.0) -> Tensor:
    """Half precision logits are widened first, as Hugging Face's loss does."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def plain_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss in plain PyTorch; class weights do not apply to the z-loss."""
    z = plain_transform(logits, softcap, logit_scale)
    kept = labels != ignore_index
    weight = z.new_ones(z.shape[-1]) if weight is None else weight.to(z)
    token_weight = z.new_ones(labels.shape) if token_weight is None else token_weight.to(z)
    losses = F.cross_entropy(
        z, labels, weight, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    losses = token_weight * (losses + z_loss_weight * (torch.logsumexp(z, -1) ** 2).where(kept, 0.0))
    if reduction == "none":
        return losses
    return losses.sum() / ((weight[labels.where(kept, 0)] * token_weight)[kept].sum() if reduction == "mean" else 1)


def plain_stats(logits: Tensor, labels: Tensor, **options: Any) -> TokenStats:
    """The stats in plain PyTorch."""
    ignore_index = options.get("ignore_index", -100)
    kept = labels != ignore_index
    z = plain_transform(logits, options.get("softcap"), options.get("logit_scale", 1.0))
    is_largest = z == z.amax(-1, keepdim=True)
    predictions = torch.arange(z.shape[-1], device=z.device).where(is_largest, z.shape[-1]).amin(-1)
    label_logits = z.gather(-1, labels.where(kept, 0)[:, None])[:, 0]
    return TokenStats(
        losses=plain_cross_entropy(logits, labels, reduction="none", **options),
        log_probs=(label_logits - z.logsumexp(-1)).where(kept, 0.0),
        lse=z.logsumexp(-1).where(kept, 0.0),
        entropy=torch.special.entr(z.softmax(-1)).sum(-1).where(kept, 0.0),
        predictions=predictions.where(kept, ignore_index),
        correct=(predictions == labels) & kept,
    )


def assert_stats_match_plain(stats: TokenStats, logits: Tensor, labels: Tensor, **options: Any) -> None:
    """Compares flat stats field by field."""
    assert isinstance(stats, TokenStats)
    assert not any(stat.requires_grad for stat in stats)
    eager, truth = (plain_stats(some_logits, labels, **options) for some_logits in (logits, logits.double()))
    # Differences of lse and a logit, each rounded at its size; smoothed losses are of sums over all classes.
    size = 1.0 + plain_transform(logits, options.get("softcap"), options.get("logit_scale", 1.0)).abs().amax().item()
    for field in TokenStats._fields[:4]:
        actual = getattr(stats, field)
        assert actual.dtype == torch.float32
        factor, magnitude = 2.0, size
        if field == "entropy":
            # Plain PyTorch adds up what each class has to say; we take two sums from each other, without a second pass,
            # and round exponents of half precision logits at their size.
            factor, magnitude = 4.0, 3.0 * (1.0 + math.log(logits.shape[-1]))
            magnitude += 0.0 if logits.dtype == torch.float32 else size
        assert_as_accurate(
            field, actual, getattr(eager, field), getattr(truth, field), factor=factor, magnitude=magnitude
        )
    assert (stats.entropy >= 0).all()
    assert torch.equal(stats.predictions, truth.predictions)
    assert torch.equal(stats.correct, truth.correct)


def loss_and_gradient(
    function: Callable[..., Tensor], logits: Tensor, labels: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, None if upstream is None else upstream.to(loss))
    return loss, gradient


def assert_matches_plain(logits: Tensor, labels: Tensor, upstream: Tensor | None = None, **options: Any) -> None:
    truth = loss_and_gradient(plain_cross_entropy, logits.double(), labels, upstream, **options)
    eager = loss_and_gradient(plain_cross_entropy, logits, labels, upstream, **options)
    actual = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    assert (actual[0].dtype, actual[1].dtype) == (torch.float32, logits.dtype)
    assert_as_accurate("loss", actual[0], eager[0], truth[0])
    assert_as_accurate("gradient", actual[1], eager[1], truth[1])


LOSS_OPTIONS = st.fixed_dictionaries(
    {
        "ignore_index": st.sampled_from([-100, -1, 0]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "softcap": st.sampled_from([None, None, 3.0]),
        "logit_scale": st.sampled_from([1.0, 0.25]),
        "z_loss_weight": st.sampled_from([0.0, 1e-2]),
    }
)
"""Options of a loss that are numbers; weights depend on sizes."""


def draw_weights(num_tokens: int, vocab_size: int, which: str, device: torch.device | str) -> dict[str, Tensor]:
    """Random class weights, token weights or both; one of the latter is zero."""
    weights = {}
    if "class" in which:
        weights["weight"] = torch.rand(vocab_size, device=device) + 0.5
    if "token" in which:
        weights["token_weight"] = 2 * torch.rand(num_tokens, device=device)
        weights["token_weight"][1:2] = 0.0
    return weights


def has_mean(labels: Tensor, options: dict[str, Any]) -> bool:
    """Whether tokens that count have weight, and no class weights give the z-loss another divisor."""
    token_weight = options.get("token_weight", torch.ones(len(labels), device=labels.device))
    has_weight = bool(token_weight[labels != options["ignore_index"]].sum() > 0)
    return has_weight and not ("weight" in options and options["z_loss_weight"])


def draw_labels(num_tokens: int, vocab_size: int, ignored: str, ignore_index: int) -> Tensor:
    """Labels with the first and the last class, of which ``some``, ``all`` or ``none`` are ignored."""
    labels = torch.randint(vocab_size, (num_tokens,))
    labels[:1], labels[2:3] = vocab_size - 1, 0
    labels[{"none": slice(0, 0), "some": slice(3, None, 4), "all": slice(None)}[ignored]] = ignore_index
    return labels


def draw_upstream(shape: tuple[int, ...], kind: str, device: torch.device | str) -> Tensor:
    """An upstream gradient: of one number or many, strided, expanded or zeros."""
    if kind == "expanded" or not shape:
        return torch.tensor({"zeros": 0.0, "ones": 1.0}.get(kind, -2.5), device=device).expand(shape)
    upstream = torch.linspace(-2, 3, 2 * shape[0], device=device)[::2]
    return {"zeros": torch.zeros_like(upstream), "ones": torch.ones_like(upstream)}.get(kind, upstream)


UPSTREAM = st.sampled_from(["many", "expanded", "zeros", "ones"])


# On GPUs.


@contextmanager
def no_waits() -> Iterator[None]:
    """A context in which the host may not wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Callable[[], Any], warm_up: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """A function that replays the CUDA graph of a step, and returns its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warm_up or step)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> Any:
        graph.replay()
        return results

    return replay
