"""The kernels of logits that are stored by columns, with tiles so small that few tokens and classes cross borders."""

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops.loss import column_launch
from liger_ops.loss.column_launch import choose_column_launch, launch_column_loss
from liger_ops.loss.options import TokenStats
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.loss.test_cross_entropy import (
    assert_stats_match_plain,
    loss_and_gradient,
    make_case,
    plain_cross_entropy,
)
from tests.liger_ops.loss.test_row_kernels import run_loss, split_options, unwritten_stats

ROWS, CLASSES = 21, 75  # two tiles; several ranges, each of whole blocks but the last


@pytest.fixture(params=["many_ranges", "one_range"])
def device(
    request: pytest.FixtureRequest, triton_device: torch.device, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> torch.device:
    """Where kernels are launched with small tiles."""
    monkeypatch.setattr(column_launch, "_MAX_RANGES", 5 if request.param == "many_ranges" else 1)
    return triton_device


def by_columns(logits: Tensor, fill: float = torch.nan) -> Tensor:
    """``logits`` inside a longer buffer ``[vocab_size, more than num_rows]``."""
    num_rows, vocab_size = logits.shape
    buffer = torch.full((vocab_size, num_rows + 27), fill, dtype=logits.dtype, device=logits.device)
    buffer[:, :num_rows] = logits.t()
    return buffer[:, :num_rows].t()


def run(
    logits: Tensor,
    labels: Tensor,
    options: dict[str, Any],
    grad_scale: Tensor | None = None,
    *,
    grad_logits: Tensor | None = None,
    with_stats: bool = True,
    token_index: Tensor | None = None,
) -> TokenStats:
    stats = unwritten_stats(labels)
    targets, token_options = split_options(options, labels)
    launch_column_loss(
        logits, targets, grad_scale, token_options, losses=stats.losses, stats=stats if with_stats else None,
        grad_logits=grad_logits, token_index=token_index,
    )  # fmt: skip
    return stats


def assert_run_matches_plain(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> None:
    grad_scale = torch.linspace(-1, 2, len(labels), device=labels.device)
    columns = by_columns(logits)
    stats = run(columns, labels, options, grad_scale, grad_logits=columns)
    assert_stats_match_plain(stats, logits, labels, **options)
    eager, truth = (
        loss_and_gradient(plain_cross_entropy, some, labels, grad_scale, reduction="none", **options)[1]
        for some in (logits, logits.double())
    )
    assert_as_accurate("gradient", columns, eager, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing", "softcap", "everything"])
def test_stats_and_gradient_match_plain_pytorch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_run_matches_plain(*make_case(name, ROWS, CLASSES, device, dtype))


# One class, part of a block, one block, one more, a range, a range and some; one token, a tile, one more.
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(3, 1), (3, 7), (16, 8), (17, 9), (3, 16), (16, 41), (33, 120)], ids=str
)
def test_every_border_matches_plain_pytorch(num_rows: int, vocab_size: int, device: torch.device) -> None:
    name = "everything" if vocab_size > 1 else "plain"
    assert_run_matches_plain(*make_case(name, num_rows, vocab_size, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_rows(dtype: torch.dtype, device: torch.device) -> None:
    logits, labels, options = make_case("everything", ROWS, CLASSES, device, dtype)
    columns, gradient = by_columns(logits), torch.empty_like(logits)
    actual = run(columns, labels, options, grad_logits=columns)
    expected, _ = run_loss(logits, labels, options, grad_logits=gradient)
    torch.testing.assert_close((*actual, columns), (*expected, gradient))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_what_else_is_wanted_does_not_change_a_result(name: str, device: torch.device) -> None:
    logits, labels, options = make_case(name, ROWS, CLASSES, device)
    logits = by_columns(logits)
    gradients = by_columns(torch.zeros_like(logits)), by_columns(torch.zeros_like(logits))
    everything = run(logits, labels, options, grad_logits=gradients[0])
    without_stats = run(logits, labels, options, grad_logits=gradients[1], with_stats=False)
    assert torch.equal(without_stats.losses, everything.losses)
    assert torch.equal(gradients[1], gradients[0])
    assert (without_stats.entropy == 77).all()
    without_gradient = run(logits, labels, options)
    assert all(torch.equal(one, two) for one, two in zip(without_gradient, everything, strict=True))


def test_gradient_overwrites_the_logits_and_nothing_else(device: torch.device) -> None:
    logits, labels, options = make_case("everything", ROWS, CLASSES, device)
    columns, separate = by_columns(logits, 7.0), by_columns(torch.zeros_like(logits), 7.0)
    source = columns.clone()
    expected = run(columns, labels, options, grad_logits=separate)
    assert torch.equal(columns, source)
    actual = run(columns, labels, options, grad_logits=columns)
    assert all(torch.equal(one, two) for one, two in zip(actual, expected, strict=True))
    assert torch.equal(columns, separate)
    for each in (columns, separate):
        assert each._base is not None
        assert (each._base[:, ROWS:] == 7.0).all()


def test_rows_are_the_tokens_that_the_index_names(device: torch.device) -> None:
    logits, labels, options = make_case("everything", 7, CLASSES, device)
    index, others = torch.tensor([6, 0, 3, 2], device=device), torch.tensor([1, 4, 5], device=device)
    grad_scale = torch.linspace(-1, 2, 7, device=device)
    of_all, of_some = by_columns(logits), by_columns(logits[index])
    expected = run(of_all, labels, options, grad_scale, grad_logits=of_all)
    stats = run(of_some, labels, options, grad_scale, grad_logits=of_some, token_index=index)
    assert torch.equal(of_some, of_all[index])
    for field, actual, whole in zip(TokenStats._fields, stats, expected, strict=True):
        assert torch.equal(actual[index], whole[index]), field
        assert (actual[others] == (1 if field == "correct" else 77)).all(), field


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e30])
def test_logits_without_a_probability_are_those_of_rows(value: float, device: torch.device) -> None:
    logits, labels, options = make_case("plain", ROWS, CLASSES, device)
    logits[1], logits[2, 5], logits[3, :40] = value, value, value
    labels[1:4] = torch.tensor([3, 5, 60])
    columns, gradient = by_columns(logits), torch.empty_like(logits)
    actual = run(columns, labels, options, grad_logits=columns)
    expected, _ = run_loss(logits, labels, options, grad_logits=gradient)
    torch.testing.assert_close((*actual[:4], columns), (*expected[:4], gradient), equal_nan=True)


@pytest.mark.parametrize("label", [-1, CLASSES, 2**40])
def test_labels_out_of_range_give_nan(label: int, device: torch.device) -> None:
    logits, labels, options = make_case("plain", ROWS, CLASSES, device)
    labels[4] = label
    columns = by_columns(logits)
    stats = run(columns, labels, options, grad_logits=columns)
    assert stats.losses[4].isnan()
    assert columns[4].isnan().all()
    assert not columns[5].isnan().any()
    assert not stats.losses[5].isnan()


@pytest.mark.parametrize("num_tiles", [1, 7, 64, 128])
@pytest.mark.parametrize("vocab_size", [1, 127, 128, 32000, 50257, 262208])
def test_ranges_cover_the_vocabulary_once(num_tiles: int, vocab_size: int) -> None:
    launch = choose_column_launch(num_tiles, vocab_size, 132)
    assert launch.num_tiles == num_tiles
    assert 0 < launch.num_ranges <= 64
    assert (launch.num_ranges - 1) * launch.range_size < vocab_size <= launch.num_ranges * launch.range_size
