"""The worker that computes with heads whose vocabulary is spread over two ranks, for ``test_vocab_parallel.py``.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``; the last two share the heads.
"""

import random
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_ops import VocabShard, backend, linear_cross_entropy, linear_log_probs, linear_token_loss
from tests.liger_ops.divergence import cases as divergences
from tests.liger_ops.divergence.test_linear_divergence import STUDENT, Models, make_models, make_tokens
from tests.liger_ops.interpreter import begin_rank
from tests.liger_ops.log_probs import cases as scores
from tests.liger_ops.loss.cases import EVERYTHING, draw_labels, draw_weights, plain_cross_entropy, plain_stats

HIDDEN, TOKENS = 16, 9
Tensors = dict[str, Tensor]


class Run(NamedTuple):
    """Something to compute with a head."""

    tensors: Tensors
    """By name; those that are trained require gradients."""
    compute: Callable[[Tensors, dict[str, Any] | None], list[Tensor]]
    """The results of the tensors: of the whole head, or by our ops with these options."""
    by_kernels: bool = False
    rows: int = 4
    """Tokens of a chunk."""
    sums_input_gradient: bool = True

    @property
    def weight(self) -> Tensor:
        return next(each for name, each in self.tensors.items() if "weight" in name)


def is_of_vocabulary(name: str) -> bool:
    return "weight" in name or "bias" in name


def device_of(tensors: Tensors) -> torch.device:
    return next(iter(tensors.values())).device


# Cross entropy.


def compute_losses(
    rows: int, labels: Tensor, options: Any, num_stats: int, tensors: Tensors, ours: Any
) -> list[Tensor]:
    x, weight, bias, *adapter = tensors.values()
    labels = labels.to(x.device)
    options = {name: each.to(x.device) if isinstance(each, Tensor) else each for name, each in options.items()}
    if ours is None:
        logits = F.linear(x, weight, bias) + (F.linear(*adapter) if adapter else 0.0)
        per_token = {name: each for name, each in options.items() if name != "reduction"}
        stats = plain_stats(logits, labels, **per_token)
        return [plain_cross_entropy(logits, labels, **options), *(each.detach() for each in stats[:num_stats])]
    ours = {**ours, "chunk_bytes": None, "options": SimpleNamespace(batch_chunk_size=rows)}
    loss, stats = linear_cross_entropy(
        x, weight, labels, linear_bias=bias, adapter=tuple(adapter) or None, return_stats=True, **options, **ours
    )
    return [loss, *stats[:num_stats]]


def loss_run(
    dtype: torch.dtype = torch.float64,
    vocab_size: int = 123,
    weights: str = "",
    special: str = "",
    adapter: bool = False,
    rows: int = 4,
    sums_input_gradient: bool = True,
    **options: Any,
) -> Run:
    """In float64 by plain PyTorch, in other dtypes by kernels.

    ``special`` is ``ties`` for equal logits, ``ignored`` for all labels, ``impossible`` for classes of one rank.
    """
    shapes = {"x": (TOKENS, HIDDEN), "weight": (vocab_size, HIDDEN), "bias": (vocab_size,)}
    if adapter:
        shapes |= {"adapter_x": (TOKENS, 3), "adapter_weight": (vocab_size, 3)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    ignore_index = options.get("ignore_index", -100)
    labels = draw_labels(TOKENS, vocab_size, "all" if special == "ignored" else "some", ignore_index)
    if special == "ties":  # among classes of one rank, and of two
        tensors["bias"].zero_()
        tensors["weight"][1:] = tensors["weight"][:1].round_()
        tensors["x"].round_()
    if special == "impossible":
        half = vocab_size // 2 + 1
        tensors["bias"][:half] = -torch.inf
        labels = labels.where(labels == ignore_index, labels.clamp(min=half))
    for each in tensors.values():
        each.requires_grad_()
    options |= draw_weights(TOKENS, vocab_size, weights, "cpu")
    num_stats = 6 if dtype.itemsize > 2 else 4  # rounded logits predict other classes
    compute = partial(compute_losses, rows, labels, options, num_stats)
    return Run(tensors, compute, dtype != torch.float64, rows, sums_input_gradient)


def random_loss_run(number: int) -> Run:
    choose = random.Random(number).choice
    weights, reduction = choose(["", "class", "token", "class and token"]), choose(["none", "sum", "mean"])
    has_z_loss = "class" not in weights or reduction != "mean"
    return loss_run(
        choose([torch.float64, torch.float64, torch.float32]), choose([2, 50, 123]), weights, adapter=choose([0, 1]),
        rows=choose([4, 100]), reduction=reduction, ignore_index=choose([-100, -1, 0]), softcap=choose([None, 3.0]),
        label_smoothing=choose([0.0, 0.1, 1.0]), logit_scale=choose([1.0, 0.25]), z_loss_weight=0.01 * has_z_loss,
    )  # fmt: skip


# Scores.


def compute_scores(head: Any, tensors: Tensors, ours: Any) -> list[Tensor]:
    """Scores, the loss that is made of them, and its scores."""
    device = device_of(tensors)
    temperature = head.options["temperature"]
    moved = temperature.to(device) if isinstance(temperature, Tensor) else temperature
    head = head._replace(target=head.target.to(device), options=head.options | {"temperature": moved})
    functions = (scores.linear_log_probs_reference, scores.linear_token_loss_reference)
    functions = functions if ours is None else (linear_log_probs, linear_token_loss)
    token_loss = scores.make_loss(torch.linspace(-1, 1, head.target.numel(), dtype=torch.float64, device=device))
    found = scores.call(functions[0], tensors, head, **(ours or {}))
    loss, loss_parts = scores.call(functions[1], tensors, head, token_loss, **(ours or {}))
    return [each for each in (*found, loss, *loss_parts) if each is not None]


def scores_run(
    case: Any, *, by_kernels: bool = False, vocab_size: int = 61, rows: int = scores.ROWS, special: str = ""
) -> Run:
    """``special`` is ``ignored`` for all labels, ``impossible`` for all classes of one rank."""
    dtype = torch.float32 if by_kernels else torch.float64
    head = scores.make(case, dtype, sizes=(8, vocab_size, 14))
    if special == "impossible":
        head.tensors["linear_bias"][: vocab_size // 2 + 1] = -torch.inf
        head.target[head.target != -100] = vocab_size - 1
    if special == "ignored":
        head.target.fill_(-100)
    return Run(scores.leaves_of(head, case.frozen), partial(compute_scores, head), by_kernels, rows)


# Divergences.


def compute_divergences(options: Any, tensors: Tensors, ours: Any) -> list[Tensor]:
    models, device = Models(**tensors), device_of(tensors)
    options = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in options.items()}
    return [models.run(**options, **(ours or {}))]


def divergence_run(
    kind: str,
    beta: float = 0.5,
    *,
    by_kernels: bool = False,
    classes: int = 37,
    trained: tuple[str, ...] = STUDENT,
    excluded: int = 0,
    **options: Any,
) -> Run:
    """So many first classes are ``excluded`` in both models."""
    models = make_models(trained=trained, classes=classes, teacher_classes=classes)
    models = models if by_kernels else models.to(torch.float64)
    for bias in (models.bias, models.teacher_bias):
        bias.detach()[:excluded] = -torch.inf
    compute = partial(compute_divergences, {"kind": kind, "beta": beta, **options})
    return Run(models._asdict(), compute, by_kernels, 4)


ALL, SOME = scores.Case(scores.ALL), ("log_probs", "entropy", "log_sum_sq_probs", "correct")
MASK = {"mask": make_tokens()["mask"]}
MAKERS: dict[str, Callable[[], Run]] = {
    **{f"random losses {number}": partial(random_loss_run, number) for number in range(24)},
    **{
        f"losses, {special}, {dtype}": partial(loss_run, dtype, special=special, reduction="sum")
        for special in ("ties", "ignored", "impossible")
        for dtype in (torch.float64, torch.float32)
    },
    **{
        f"losses in {dtype}": partial(loss_run, dtype, weights="token", **EVERYTHING)
        for dtype in (torch.bfloat16, torch.float16)
    },
    "many classes": partial(loss_run, torch.float32, 20003),
    "losses, gradient in parts": partial(loss_run, sums_input_gradient=False),
    **{f"scores, {case}": partial(scores_run, case) for case in scores.CASES},
    **{
        f"scores by kernels, {frozen}": partial(
            scores_run, scores.Case(scores.ALL, frozen, bias=True, adapter=True, temperature="tokens"), by_kernels=True
        )
        for frozen in (False, True)
    },
    "scores, fewer classes than ranks": partial(scores_run, ALL, vocab_size=1),
    "scores, one chunk": partial(scores_run, scores.Case(scores.ALL, softcap=2.0), rows=14),
    **{
        f"scores, impossible, {by_kernels}": partial(
            scores_run, scores.Case(SOME, bias=True), by_kernels=by_kernels, special="impossible"
        )
        for by_kernels in (False, True)
    },
    "scores, ignored": partial(scores_run, ALL, special="ignored"),
    **{
        f"{kind} {beta}": partial(
            divergence_run, kind, beta, reduction=("mean", "sum", "none")[place % 3],
            **(divergences.EVERYTHING if place % 2 else {}), **(make_tokens() if place % 4 < 2 else {}),
        )
        for place, (kind, beta) in enumerate(divergences.KINDS)
        if 0 < beta < 1
    },
    **{
        f"{kind} by kernels": partial(divergence_run, kind, 0.3, by_kernels=True, **MASK)
        for kind in dict(divergences.KINDS)
    },
    "divergence, fewer classes than ranks": partial(divergence_run, "jsd", classes=1),
    "divergence by kernels, fewer classes than ranks": partial(divergence_run, "mixed", by_kernels=True, classes=1),
    "jsd, impossible": partial(divergence_run, "jsd", excluded=19),
    "mixed, impossible": partial(divergence_run, "mixed", excluded=19),
    "forward_kl by kernels, impossible": partial(divergence_run, "forward_kl", by_kernels=True, excluded=19),
    "divergence, frozen": partial(divergence_run, "skew_kl", trained=("x", "adapter_x"), reduction="none"),
    "divergence, ignored": partial(divergence_run, "mixed", mask=torch.zeros(11, dtype=torch.bool)),
}  # fmt: skip


def make(name: str) -> Run:
    torch.manual_seed(zlib.crc32(name.encode()))
    return MAKERS[name]()


def with_gradients(results: list[Tensor], tensors: Tensors) -> tuple[list[Tensor], Tensors]:
    """Results, and the gradients of the tensors for upstream gradients of which some are zero."""
    outputs = [each for each in results if each.requires_grad]
    numbers = [torch.linspace(-1, 2, each.numel()) for each in outputs]
    upstream = [
        each.where(torch.arange(len(each)) % 3 != 1, 0.0).view(output.shape).to(output)
        for each, output in zip(numbers, outputs, strict=True)
    ]
    leaves = {name: each for name, each in tensors.items() if each.requires_grad}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return [each.detach().cpu() for each in results], {
        name: each.cpu() for name, each in zip(leaves, gradients, strict=True)
    }


def _run(name: str, device: str, group: dist.ProcessGroup) -> tuple[list[Tensor], Tensors]:
    run = make(name)
    vocab_size = run.weight.shape[0]
    per_rank = -(-vocab_size // group.size())  # as DTensor cuts: the last rank gets less, or nothing
    start = min(per_rank * dist.get_rank(group), vocab_size)
    own = {
        key: (each.detach()[start : start + per_rank] if is_of_vocabulary(key) else each.detach())
        .to(device)
        .requires_grad_(each.requires_grad)
        for key, each in run.tensors.items()
    }
    shard = VocabShard(group, start, vocab_size, run.sums_input_gradient)
    ours = {"vocab_shard": shard, "chunk_bytes": run.rows * per_rank * run.weight.element_size()}
    backend.use_triton = lambda tensor: run.by_kernels
    return with_gradients(run.compute(own, ours), own)


def _run_rank(device: str, folder: Path) -> None:
    rank, num_ranks = begin_rank(device), dist.get_world_size()
    group = dist.new_group([num_ranks - 2, num_ranks - 1])
    is_in_group = rank >= num_ranks - 2
    results = {name: _run(name, device, group) for name in MAKERS} if is_in_group else None
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
