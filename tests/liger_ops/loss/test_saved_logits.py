"""Logits that reduction="none" saves from forward for backward."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_ops import linear_cross_entropy
from liger_ops.loss import chunked_loss
from tests.liger_ops.loss.cases import make_options
from tests.liger_ops.loss.test_linear_cross_entropy import (
    WHOLE,
    assert_matches_plain,
    chunks_of,
    loss_and_gradients,
    make_batch,
)

TOKENS, VOCAB, CHUNK = 10, 57, 3
ROW = VOCAB * 4  # bytes in float32


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each chunk of logits that is computed."""
    project, rows = chunked_loss._project, []

    def logged(factors: Any, bias: Any, logits: Tensor, part: slice) -> None:
        rows.append(len(logits))
        project(factors, bias, logits, part)

    monkeypatch.setattr(chunked_loss, "_project", logged)
    return rows


def gradients(tensors: tuple[Tensor, ...], labels: Tensor, reduction: str = "none", **options: Any) -> list[Tensor]:
    upstream = torch.linspace(-1, 2, len(labels)) if reduction == "none" else None
    chunks = chunks_of(CHUNK, tensors)
    return [
        *loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction, **chunks, **options)
    ]


@pytest.mark.parametrize(
    ("saved_rows", "again"), [(None, [3, 3, 3, 1]), (2, [3, 3, 3, 1]), (3, [3, 3, 1]), (8, [3, 1]), (100, [])]
)
def test_saved_chunks_are_not_projected_again(saved_rows: int | None, again: list[int], projections: list[int]) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    labels.clamp_(min=0)
    expected = gradients(tensors, labels)
    projections.clear()
    budget = {} if saved_rows is None else {"saved_logits_bytes": saved_rows * ROW}
    torch.testing.assert_close(gradients(tensors, labels, **budget), expected)
    assert projections == [3, 3, 3, 1, *again]


def test_only_chunks_of_tokens_that_are_not_ignored_are_saved(projections: list[int]) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    labels[:] = -100
    labels[[1, 4, 6, 8]] = 5
    expected = gradients(tensors, labels)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x):
        actual = gradients(tensors, labels, saved_logits_bytes=100 * ROW)
    torch.testing.assert_close(actual, expected)
    assert [shape for shape in saved if shape[1:] == (VOCAB,)] == [(3, VOCAB), (1, VOCAB)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_save_no_logits(reduction: str) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x):
        gradients(tensors, labels, reduction, saved_logits_bytes=100 * ROW)
    assert saved
    assert all(shape[1:] != (VOCAB,) for shape in saved)


@pytest.mark.parametrize("rows", [CHUNK, WHOLE], ids=["chunks", "whole"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(itertools.product(["plain", "everything"], [torch.float32, torch.bfloat16, torch.float16])),
    ids=str,
)
def test_gradients_from_saved_logits_match_plain_pytorch(
    name: str, dtype: torch.dtype, rows: int, device: torch.device
) -> None:
    options = make_options(name, TOKENS, VOCAB, device) | {"reduction": "none", "saved_logits_bytes": 100 * ROW}
    ignore_index = options.get("ignore_index", -100)
    tensors, labels = make_batch(TOKENS, VOCAB, dtype=dtype, device=device, ignore_index=ignore_index)
    assert_matches_plain(tensors, labels, torch.linspace(-1, 2, TOKENS), rows=rows, **options)


def test_graph_that_is_kept_gives_the_same_gradients_again(device: torch.device) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB, device=device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss, stats = linear_cross_entropy(
        leaves[0], leaves[1], labels, linear_bias=leaves[2], reduction="none", return_stats=True,
        saved_logits_bytes=7 * ROW, **chunks_of(CHUNK, tensors),
    )  # fmt: skip
    stats.lse.zero_()  # belongs to the caller
    upstream = torch.randn(TOKENS, device=device)
    first, second, last = (
        torch.autograd.grad(loss, leaves, upstream, retain_graph=keep) for keep in (True, True, False)
    )
    assert all(
        torch.equal(one, two) and torch.equal(one, three) for one, two, three in zip(first, second, last, strict=True)
    )
    expected = gradients([tensor.detach() for tensor in tensors], labels)
    assert torch.equal(loss, expected[0])


def test_adapter_is_part_of_saved_logits(projections: list[int]) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    leaves = [x.requires_grad_() for x in (*tensors, torch.randn(TOKENS, 3), torch.randn(VOCAB, 3))]

    def run(**options: Any) -> tuple[Tensor, ...]:
        x, weight, bias, *adapter = leaves
        loss = linear_cross_entropy(
            x, weight, labels, linear_bias=bias, adapter=tuple(adapter), reduction="none", **options,
            **chunks_of(CHUNK, tensors),
        )  # fmt: skip
        return torch.autograd.grad(loss, leaves, torch.linspace(-1, 2, TOKENS))

    expected = run()
    projections.clear()
    torch.testing.assert_close(run(saved_logits_bytes=100 * ROW), expected)
    assert projections == [3, 3, 2]  # of 8 tokens that are not ignored


def test_recomputed_losses_save_logits_again(projections: list[int]) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    expected = gradients(tensors, labels)

    def fused(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return checkpoint(linear_cross_entropy, x, weight, labels, use_reentrant=False, **options)

    projections.clear()
    actual = loss_and_gradients(
        fused, tensors, labels, torch.linspace(-1, 2, TOKENS), reduction="none", saved_logits_bytes=100 * ROW,
        **chunks_of(CHUNK, tensors),
    )  # fmt: skip
    torch.testing.assert_close([*actual], expected)
    assert projections == [3, 3, 2] * 2


def test_compiled_loss_computes_its_logits_again(projections: list[int]) -> None:
    tensors, labels = make_batch(TOKENS, VOCAB)
    expected = gradients(tensors, labels)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    projections.clear()
    actual = loss_and_gradients(
        compiled, tensors, labels, torch.linspace(-1, 2, TOKENS), reduction="none", saved_logits_bytes=100 * ROW,
        **chunks_of(CHUNK, tensors),
    )  # fmt: skip
    torch.testing.assert_close([*actual], expected)
    assert projections == [3, 3, 2] * 2
