"""The kernels of cross_entropy alone, with blocks so small that short rows cross their borders.

The loss kernel takes every test twice: with the row in registers, and block by block.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.loss import launch as launch_module
from liger_ops.loss.launch import (
    CrossEntropyLaunch,
    choose_block_launch,
    choose_gradient_launch,
    choose_whole_row_launch,
    launch_gradient,
    launch_loss,
)
from liger_ops.loss.options import Targets, TokenLossOptions, TokenStats
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.loss.cases import (
    assert_stats_match_plain,
    loss_and_gradient,
    make_case,
    plain_cross_entropy,
)

BLOCK = 32
PROGRAMS = 2  # fewer than rows, so that each takes several
ROWS, CLASSES = 4, 75  # one row is ignored; two blocks and some


def choose_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``launch_loss`` take the named kernel for rows of any size."""
    monkeypatch.setattr(launch_module, "MAX_ROW_IN_REGISTERS", 2**20 if name == "whole_row" else 0)


@pytest.fixture
def device(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels are launched with small blocks and few programs."""

    def whole_row(*arguments: int) -> CrossEntropyLaunch:
        return dataclasses.replace(choose_whole_row_launch(*arguments), max_programs=PROGRAMS)

    def blocks(*arguments: int) -> CrossEntropyLaunch:
        launch = choose_block_launch(*arguments)
        return dataclasses.replace(launch, block_size=BLOCK, num_warps=2, max_programs=PROGRAMS)

    def gradient(vocab_size: int) -> CrossEntropyLaunch:
        return dataclasses.replace(choose_gradient_launch(vocab_size), block_size=BLOCK, num_warps=2)

    monkeypatch.setattr(launch_module, "choose_whole_row_launch", whole_row)
    monkeypatch.setattr(launch_module, "choose_block_launch", blocks)
    monkeypatch.setattr(launch_module, "choose_gradient_launch", gradient)
    return triton_device


@pytest.fixture(params=["whole_row", "blockwise"])
def loss_kernel(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_kernel(request.param, monkeypatch)
    return request.param


def split_options(options: dict[str, Any], labels: Tensor) -> tuple[Targets, TokenLossOptions]:
    """cross_entropy's keyword arguments as the kernels take them."""
    others = {name: value for name, value in options.items() if name not in ("weight", "token_weight")}
    return Targets(labels, options.get("weight"), options.get("token_weight")), TokenLossOptions(**others)


def unwritten_stats(labels: Tensor) -> TokenStats:
    """Output buffers, of 77 where nothing is written."""
    buffer = torch.full(labels.shape, 77.0, device=labels.device)
    buffers = (buffer.clone() for _ in range(4))
    return TokenStats(*buffers, torch.full_like(labels, 77), torch.ones_like(labels, dtype=torch.bool))


def run_loss(
    logits: Tensor,
    labels: Tensor,
    options: dict[str, Any],
    grad_scale: Tensor | None = None,
    *,
    grad_logits: Tensor | None = None,
    with_stats: bool = True,
    token_index: Tensor | None = None,
    mean_scale: Tensor | None = None,
) -> tuple[TokenStats, Tensor]:
    """The stats (meaningless but for the losses without ``with_stats``) and the error of lse."""
    stats = unwritten_stats(labels)
    lse_error = stats.lse.clone()
    targets, token_options = split_options(options, labels)
    launch_loss(
        logits, targets, grad_scale, token_options, losses=stats.losses, lse_error=lse_error,
        stats=stats if with_stats else None, grad_logits=grad_logits, token_index=token_index, mean_scale=mean_scale,
    )  # fmt: skip
    return stats, lse_error


def assert_run_matches_plain(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> tuple[TokenStats, Tensor]:
    """Returns the stats and the gradient for more assertions."""
    grad_scale = torch.linspace(-1, 2, len(labels), device=labels.device)
    grad_logits = torch.full_like(logits, torch.nan)
    stats, _ = run_loss(logits, labels, options, grad_scale, grad_logits=grad_logits)
    assert_stats_match_plain(stats, logits, labels, **options)
    eager, truth = (
        loss_and_gradient(plain_cross_entropy, some, labels, grad_scale, reduction="none", **options)[1]
        for some in (logits, logits.double())
    )
    assert_as_accurate("gradient", grad_logits, eager, truth)
    return stats, grad_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing", "softcap", "everything"])
def test_stats_and_gradient_match_plain_pytorch(
    name: str, dtype: torch.dtype, loss_kernel: str, device: torch.device
) -> None:
    assert_run_matches_plain(*make_case(name, ROWS, CLASSES, device, dtype))


# One class, one block but for a class, one block, one more, several, several and some, a power of two past the blocks.
@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "plain"), *((vocab_size, "everything") for vocab_size in (31, 32, 33, 64, 75, 128))],
    ids=str,
)
def test_every_border_matches_plain_pytorch(vocab_size: int, name: str, loss_kernel: str, device: torch.device) -> None:
    assert_run_matches_plain(*make_case(name, 3, vocab_size, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_kernels_agree(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, options = make_case("everything", ROWS, CLASSES, device, dtype)
    results = []
    for kernel in ("whole_row", "blockwise"):
        choose_kernel(kernel, monkeypatch)
        gradient = torch.empty_like(logits)
        stats, _ = run_loss(logits, labels, options, grad_logits=gradient)
        results.append((*stats, gradient))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_what_else_is_wanted_does_not_change_a_result(name: str, loss_kernel: str, device: torch.device) -> None:
    logits, labels, options = make_case(name, ROWS, CLASSES, device)
    gradients = torch.empty_like(logits), torch.empty_like(logits)
    everything, lse_error = run_loss(logits, labels, options, grad_logits=gradients[0])
    without_stats, same_lse_error = run_loss(logits, labels, options, grad_logits=gradients[1], with_stats=False)
    assert torch.equal(without_stats.losses, everything.losses)
    assert torch.equal(same_lse_error, lse_error)
    assert torch.equal(gradients[1], gradients[0])
    assert (without_stats.entropy == 77).all()
    without_gradient, _ = run_loss(logits, labels, options)  # always block by block
    for actual, expected in zip(without_gradient, everything, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "padding",
    [
        pytest.param((2, 3, 1, 1), id="anywhere"),
        pytest.param((0, 3, 0, 1), id="from_multiples_of_2"),
        pytest.param((0, 5, 0, 1), id="from_multiples_of_8"),
        pytest.param((8, 8, 8, 1), id="a_multiple_of_8_apart"),
    ],
)
@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, torch.nan), (torch.bfloat16, 7.0)], ids=str)
def test_gradient_may_overwrite_the_logits_and_nothing_else(
    dtype: torch.dtype, value: float, padding: tuple[int, ...], loss_kernel: str, device: torch.device
) -> None:
    logits, labels, options = make_case("everything", ROWS, CLASSES, device, dtype)
    left, right, above, below = padding

    def pad() -> tuple[Tensor, Tensor]:
        buffer = F.pad(logits, padding, value=value)
        return buffer, buffer[above : len(buffer) - below, left : buffer.shape[1] - right]

    buffer, rows = pad()
    (gradient_buffer, gradient), (_, source) = pad(), pad()
    expected, _ = run_loss(source, labels, options, grad_logits=gradient)
    actual, _ = run_loss(rows, labels, options, grad_logits=rows)
    assert all(torch.equal(one, two) for one, two in zip(actual, expected, strict=True))
    assert torch.equal(rows, gradient)
    assert torch.equal(source, logits)
    truth_gradient = torch.empty_like(logits)
    truth, _ = run_loss(logits, labels, options, grad_logits=truth_gradient)
    torch.testing.assert_close((*actual, rows), (*truth, truth_gradient))
    for whole, part in ((buffer, rows), (gradient_buffer, gradient)):
        part.fill_(value)
        assert torch.equal(whole, torch.full_like(whole, value)) or whole.isnan().all()


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_mean_scale_is_written_down_and_scales_the_gradient(name: str, loss_kernel: str, device: torch.device) -> None:
    logits, labels, options = make_case(name, ROWS, CLASSES, device)
    kept = labels != options.get("ignore_index", -100)
    ones = torch.ones(max(ROWS, CLASSES), device=device)
    weights = options.get("weight", ones)[labels.where(kept, 0)] * options.get("token_weight", ones[:ROWS])
    gradients = torch.empty_like(logits), torch.empty_like(logits)
    grad_scale = torch.tensor(-0.7, device=device)
    expected, _ = run_loss(logits, labels, options, grad_scale, grad_logits=gradients[0])
    mean_scale = torch.full((), torch.nan, device=device)
    stats, _ = run_loss(logits, labels, options, grad_scale, grad_logits=gradients[1], mean_scale=mean_scale)
    torch.testing.assert_close(mean_scale, 1 / weights[kept].sum())
    torch.testing.assert_close(gradients[1], gradients[0] * mean_scale)
    assert all(torch.equal(one, two) for one, two in zip(stats, expected, strict=True))
    mean_scale.fill_(torch.nan)
    run_loss(logits, torch.full_like(labels, options.get("ignore_index", -100)), options, mean_scale=mean_scale)
    assert mean_scale == 0


def test_rows_are_the_tokens_that_the_index_names(loss_kernel: str, device: torch.device) -> None:
    logits, labels, options = make_case("everything", 7, CLASSES, device)
    padded = F.pad(logits, (0, -CLASSES % 8))  # rows that all start alike are reduced in the same order
    logits = padded[:, :CLASSES]
    index, others = torch.tensor([6, 0, 3, 2], device=device), torch.tensor([1, 4, 5], device=device)
    grad_scale = torch.linspace(-1, 2, 7, device=device)
    some, gradients = padded[index][:, :CLASSES], (torch.empty_like(padded), torch.empty_like(padded[index]))
    of_all, of_some = (gradient[:, :CLASSES] for gradient in gradients)
    expected, lse_error = run_loss(logits, labels, options, grad_scale, grad_logits=of_all)
    stats, _ = run_loss(some, labels, options, grad_scale, grad_logits=of_some, token_index=index)
    assert torch.equal(of_some, of_all[index])
    for field, actual, whole in zip(TokenStats._fields, stats, expected, strict=True):
        assert torch.equal(actual[index], whole[index]), field
        assert (actual[others] == (1 if field == "correct" else 77)).all(), field
    targets, token_options = split_options(options, labels)
    launch_gradient(
        some, targets, grad_scale, token_options, lse=stats.lse, lse_error=lse_error, grad_logits=of_some,
        token_index=index,
    )  # fmt: skip
    torch.testing.assert_close(of_some, of_all[index])


@pytest.mark.parametrize(
    ("grad_scale", "in_place"),
    [
        pytest.param(torch.tensor(-0.7), False, id="scalar"),
        pytest.param(torch.linspace(-1, 2, ROWS), True, id="per_token_in_place"),
        pytest.param(torch.linspace(-1, 2, 2 * ROWS)[::2], False, id="strided"),
        pytest.param(torch.tensor(0.3).expand(ROWS), True, id="expanded_in_place"),
    ],
)
@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.bfloat16), ("everything", torch.float32)], ids=str)
def test_separate_gradient_matches_the_one_that_comes_with_the_loss(
    name: str, dtype: torch.dtype, grad_scale: Tensor, in_place: bool, device: torch.device
) -> None:
    logits, labels, options = make_case(name, ROWS, CLASSES, device, dtype)
    grad_scale = grad_scale.to(device)
    expected = torch.empty_like(logits)
    stats, lse_error = run_loss(logits, labels, options, grad_scale, grad_logits=expected)
    gradient = logits if in_place else torch.full_like(logits, torch.nan)
    targets, token_options = split_options(options, labels)
    launch_gradient(
        logits, targets, grad_scale, token_options, lse=stats.lse, lse_error=lse_error, grad_logits=gradient
    )
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("offset", [0.0, 4096.0, -4096.0])
def test_error_of_lse_is_what_rounding_took_from_it(offset: float, loss_kernel: str, device: torch.device) -> None:
    logits, labels, options = make_case("plain", ROWS, CLASSES, device)
    logits += offset
    stats, lse_error = run_loss(logits, labels, options, grad_logits=torch.empty_like(logits))
    kept = labels >= 0
    exact = stats.lse.double() + lse_error.double()
    # The normaliser is between 1 and 75: its sum and its logarithm are rounded at that size, not the offset's.
    allowed = 16 * torch.finfo(torch.float32).eps
    assert ((exact - logits.double().logsumexp(-1))[kept].abs() <= allowed).all()
    assert not lse_error[~kept].any()


# Neighbours of one thread, of two threads, the same place of two blocks, a border, the last and incomplete block.
@pytest.mark.parametrize("columns", [(3, 5), (7, 8), (37, 69), (12, 40), (40, 44), (31, 32), (97, 106), (0, 106)])
def test_prediction_is_the_first_of_equal_logits(
    columns: tuple[int, int], loss_kernel: str, device: torch.device
) -> None:
    logits = torch.zeros(2, 107, device=device)
    logits[0, list(columns)] = 2.0
    logits[1] = -torch.inf
    logits[1, list(columns)] = -5.0
    labels = torch.tensor(columns, device=device)
    stats, _ = run_loss(logits, labels, {}, grad_logits=torch.empty_like(logits))
    assert stats.predictions.tolist() == [columns[0]] * 2
    assert stats.correct.tolist() == [True, False]


@pytest.mark.parametrize(
    ("allowed", "dtype"),
    [
        pytest.param(slice(0, 20), torch.float32, id="start_of_first_block"),
        pytest.param(slice(32, 64), torch.bfloat16, id="second_block"),
        pytest.param(slice(40, None), torch.float32, id="all_but_first_block"),
        pytest.param(slice(70, None), torch.bfloat16, id="end_of_last_block"),
        pytest.param(slice(50, 51), torch.float32, id="one_class"),
    ],
)
def test_classes_masked_with_minus_infinity_take_no_part(
    allowed: slice, dtype: torch.dtype, loss_kernel: str, device: torch.device
) -> None:
    logits, labels, _ = make_case("plain", 3, CLASSES, device, dtype)
    is_masked = torch.ones(CLASSES, dtype=torch.bool, device=device)
    is_masked[allowed] = False
    logits[:, is_masked] = -torch.inf
    labels.copy_((~is_masked).nonzero()[:, 0][torch.tensor([0, -1, 0], device=device)])
    stats, gradient = assert_run_matches_plain(logits, labels, {})
    assert stats.entropy.isfinite().all()
    assert not gradient[:, is_masked].any()


def test_label_that_is_masked_costs_infinity_and_is_pushed_up(loss_kernel: str, device: torch.device) -> None:
    logits, labels, _ = make_case("plain", 3, CLASSES, device)
    logits[torch.arange(3), labels] = -torch.inf
    gradient = torch.empty_like(logits)
    stats, _ = run_loss(logits, labels, {}, grad_logits=gradient)
    assert (stats.losses == torch.inf).all()
    assert (stats.log_probs == -torch.inf).all()
    _, expected = loss_and_gradient(F.cross_entropy, logits, labels, reduction="sum")
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, "all -inf"], ids=str)
def test_logits_that_say_nothing_give_nan_in_their_rows_unless_ignored(
    value: float | str, loss_kernel: str, device: torch.device
) -> None:
    logits, labels, options = make_case("plain", ROWS, CLASSES, device)
    expected_gradient = torch.empty_like(logits)
    expected, _ = run_loss(logits, labels, options, grad_logits=expected_gradient)
    for row in (1, 3):  # kept, ignored
        if value == "all -inf":
            logits[row] = -torch.inf
        else:
            logits[row, 40] = value
    gradient = torch.empty_like(logits)
    stats, lse_error = run_loss(logits, labels, options, grad_logits=gradient)
    assert stats.losses[1].isnan()
    assert gradient[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(gradient[others], expected_gradient[others])
    for actual, whole in zip(stats, expected, strict=True):
        assert torch.equal(actual[others], whole[others])
    targets, token_options = split_options(options, labels)
    launch_gradient(
        logits, targets, torch.ones(ROWS, device=device), token_options, lse=stats.lse, lse_error=lse_error,
        grad_logits=gradient,
    )  # fmt: skip
    assert gradient[1].isnan().all()
    torch.testing.assert_close(gradient[others], expected_gradient[others])


def test_no_rows_are_no_work(loss_kernel: str, device: torch.device) -> None:
    logits, labels, options = make_case("everything", 0, CLASSES, device)
    mean_scale = torch.full((), torch.nan, device=device)
    stats, _ = run_loss(logits, labels, options, grad_logits=torch.empty_like(logits), mean_scale=mean_scale)
    assert stats.losses.shape == (0,)
    assert mean_scale == 0
    targets, token_options = split_options(options, labels)
    launch_gradient(
        logits, targets, torch.ones((), device=device), token_options,
        lse=stats.lse, lse_error=stats.lse, grad_logits=torch.empty_like(logits),
    )  # fmt: skip
