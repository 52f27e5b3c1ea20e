"""The row kernels alone, with blocks so small that short rows cross their borders.

The loss kernel takes every test twice: with the row in registers, and block by block.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.backend import Hardware, RowLaunch
from liger_ops.log_probs.scores import DIFFERENTIABLE, scores_reference
from liger_ops.loss import launch as launch_module
from liger_ops.loss.launch import (
    ROW_OUTPUTS,
    choose_block_launch,
    choose_gradient_launch,
    choose_whole_row_launch,
    launch_gradient,
    launch_loss,
)
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.rows import TokenRows, gradient_in_place, transform_logits
from tests.liger_ops.accuracy import assert_as_accurate, few
from tests.liger_ops.loss.cases import (
    LOSS_OPTIONS,
    draw_labels,
    draw_weights,
    loss_and_gradient,
    make_case,
    plain_cross_entropy,
)

BLOCK = 32
PROGRAMS = 2  # fewer than rows, so that each takes several
ROWS, CLASSES = 4, 75  # one row is ignored; two blocks and some
# One class, one block but for a class, one block, one more, several, several and some, a power of two past the blocks.
SIZES = st.sampled_from([1, 2, 31, 32, 33, 64, 75, 128])


@pytest.fixture
def device(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels are launched with small blocks and few programs."""

    def whole_row(*arguments: Any) -> RowLaunch:
        return dataclasses.replace(choose_whole_row_launch(*arguments), max_programs=PROGRAMS)

    def blocks(*arguments: Any) -> RowLaunch:
        launch = choose_block_launch(*arguments)
        return dataclasses.replace(launch, block_size=BLOCK, num_warps=2, max_programs=PROGRAMS)

    def gradient(vocab_size: int) -> RowLaunch:
        return dataclasses.replace(choose_gradient_launch(vocab_size), block_size=BLOCK, num_warps=2)

    monkeypatch.setattr(launch_module, "choose_whole_row_launch", whole_row)
    monkeypatch.setattr(launch_module, "choose_block_launch", blocks)
    monkeypatch.setattr(launch_module, "choose_gradient_launch", gradient)
    return triton_device


@pytest.fixture(params=["whole_row", "blockwise"])
def loss_kernel(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way the loss kernel takes for rows of any size."""
    monkeypatch.setattr(launch_module, "MAX_ROW_IN_REGISTERS", 2**20 if request.param == "whole_row" else 0)
    return request.param


def unwritten(labels: Tensor) -> dict[str, Tensor]:
    """Output buffers for everything, of 77 (or True) where nothing is written."""
    dtypes = {"predictions": torch.int64, "correct": torch.bool}
    return {name: torch.full_like(labels, 77, dtype=dtypes.get(name, torch.float32)) for name in ROW_OUTPUTS}


def padded(logits: Tensor, padding: int, value: float) -> tuple[Tensor, Tensor]:
    """A buffer of ``value``, and a view of it with the logits, whose rows are ``padding`` columns apart."""
    buffer = torch.full((len(logits) + 2, logits.shape[1] + padding), value, dtype=logits.dtype, device=logits.device)
    rows = buffer[1:-1, padding // 2 : logits.shape[1] + padding // 2]
    return buffer, rows.copy_(logits)


def plain(
    logits: Tensor, labels: Tensor, options: TokenLossOptions, temperature: Tensor | None, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """All outputs in plain PyTorch, in float64 for float64 logits."""
    z = transform_logits(logits, options, None if temperature is None else temperature.to(logits.dtype))
    found = scores_reference(z, labels, options.ignore_index, [*ROW_OUTPUTS])._asdict()
    found["losses"] = plain_cross_entropy(
        z, labels, reduction="none", ignore_index=options.ignore_index, label_smoothing=options.label_smoothing,
        z_loss_weight=options.z_loss_weight, **weights,
    )  # fmt: skip
    if "weight" in weights:
        weighted = (z * weights["weight"].to(z.dtype)).mean(-1)
        found["mean_logit"] = weighted.where(labels != options.ignore_index, 0.0)
    return found


@given(
    draw=st.builds(
        SimpleNamespace,
        vocab_size=SIZES,
        spread=st.sampled_from([0.1, 4.0, 100.0]),
        offset=st.sampled_from([0.0, 0.0, 4096.0, -4096.0]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        padding=st.sampled_from([0, 3, 5, 16]),
        weights=st.sampled_from(["", "class", "class and token"]),
        options=LOSS_OPTIONS,
        is_tempered=st.booleans(),
        is_indexed=st.booleans(),
        in_place=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
@few(50)
def test_outputs_are_as_accurate_as_plain_pytorchs(draw: Any, loss_kernel: str, device: torch.device) -> None:
    spread = draw.spread
    offset = draw.offset if draw.dtype == torch.float32 else 0.0  # which half precision does not hold
    torch.manual_seed(draw.seed)
    token_options = TokenLossOptions(**draw.options)
    if draw.options["softcap"]:
        spread, offset = min(spread, 4.0), 0.0
    labels = draw_labels(7, draw.vocab_size, "some", token_options.ignore_index).to(device)
    drawn = draw_weights(7, draw.vocab_size, draw.weights, device)
    temperature = (0.5 + torch.rand(7)).to(device) if draw.is_tempered else None
    index = torch.tensor([6, 0, 3, 2], device=device) if draw.is_indexed else torch.arange(7, device=device)
    grad_scale = torch.linspace(-1, 2, 7, device=device)
    logits = (offset + spread * torch.randn(len(index), draw.vocab_size)).to(device, draw.dtype)
    row_options = {name: x[index] if name == "token_weight" else x for name, x in drawn.items()}
    rows_temperature = None if temperature is None else temperature[index]
    results = []
    for some in (logits, logits.double()):
        leaf = some.clone().requires_grad_()
        found = plain(leaf, labels[index], token_options, rows_temperature, row_options)
        found["gradient"] = torch.autograd.grad((found["losses"] * grad_scale[index]).sum(), leaf)[0]
        results.append(found)
    eager, truth = results

    buffer, rows = padded(logits, draw.padding, 7.0)
    gradient_buffer, gradient = (buffer, rows) if draw.in_place else padded(logits, draw.padding, 7.0)
    outputs, targets = unwritten(labels), Targets(labels, drawn.get("weight"), drawn.get("token_weight"))
    launch_loss(
        rows, targets, token_options, outputs, grad_scale=grad_scale, temperature=temperature, grad_logits=gradient,
        token_index=index if draw.is_indexed else None,
    )  # fmt: skip
    size = truth["lse"].abs().max().item()
    for name, output in outputs.items():
        if name in ("predictions", "correct"):
            assert torch.equal(output[index], truth[name])
        elif name != "lse_error":
            assert_as_accurate(name, output[index], eager[name], truth[name], factor=4.0, magnitude=2.0 + size)
        untouched = torch.ones(7, dtype=torch.bool, device=device).index_fill(0, index, False)
        assert (output[untouched] == (1 if name == "correct" else 77)).all(), name
    exact = outputs["lse"].double() + outputs["lse_error"].double()
    if temperature is None and not token_options.softcap:  # whose own rounding is larger
        # Sums and logarithms of normalizers are rounded at their size, not at that of lse.
        assert ((exact[index] - truth["lse"]).abs() <= 16 * torch.finfo(torch.float32).eps * (1 + spread / 16)).all()
    # Where a cap saturates, its derivative is a difference of numbers near 1. Division by a temperature rounds a logit
    # at its size in float32, which changes probabilities by as much.
    close = {"magnitude": 2.0 if draw.options["softcap"] else 1.0}
    if draw.is_tempered:
        largest = max(1.0, truth["gradient"].abs().max().item())
        close["magnitude"] += largest * size * torch.finfo(torch.float32).eps / torch.finfo(draw.dtype).eps
    assert_as_accurate("gradient", gradient, eager["gradient"], truth["gradient"], **close)
    gradient_of_loss = gradient.clone()
    for part, whole in ((rows, buffer), (gradient, gradient_buffer)):
        part.fill_(7.0)
        assert (whole == 7.0).all()

    # The gradient of logits whose lse is known, by weights and by factors.
    known = outputs["lse"], outputs["lse_error"]
    if temperature is None:
        _, rows = padded(logits, draw.padding, 7.0)
        launch_gradient(
            rows, rows, token_options, class_weight=targets.class_weight, token_weight=targets.token_weight,
            grad_scale=grad_scale, token_index=index if draw.is_indexed else None, labels=labels, lse=known[0],
            lse_error=known[1],
        )  # fmt: skip
        assert_as_accurate("gradient by weights", rows, eager["gradient"], truth["gradient"], **close)
    tokens = TokenRows(targets, token_options, {}, temperature)
    factors = tokens.gradient_rows(*known, {"losses": grad_scale}, draw.vocab_size)
    _, rows = padded(logits, draw.padding, 7.0)
    gradient_in_place(rows, factors, token_options, targets.class_weight, index)
    assert_as_accurate("gradient by factors", rows, eager["gradient"], truth["gradient"], **close)
    torch.testing.assert_close(rows, gradient_of_loss, rtol=0.02, atol=1e-4 * close["magnitude"])


@given(
    draw=st.builds(
        SimpleNamespace,
        vocab_size=SIZES,
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        padding=st.sampled_from([0, 3, 16]),
        softcap=st.sampled_from([None, 5.0]),
        is_tempered=st.booleans(),
        wanted=st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1),
        seed=st.integers(0, 2**16),
    )
)
@few(40)
def test_gradient_of_every_score_matches_plain_pytorch(draw: Any, device: torch.device) -> None:
    wanted = draw.wanted
    torch.manual_seed(draw.seed)
    options = TokenLossOptions(softcap=draw.softcap, logit_scale=0.7)
    _, logits = padded((3 * torch.randn(5, draw.vocab_size)).to(device, draw.dtype), draw.padding, torch.nan)
    if draw.vocab_size > 2 and draw.softcap is None:
        logits[1, 1::2] = -torch.inf
    labels = torch.randint(draw.vocab_size, (5,), device=device)
    labels[1], labels[2] = 0, -100
    temperature = (0.5 + torch.rand(5)).to(device) if draw.is_tempered else None
    leaf = logits.double().requires_grad_()
    z = transform_logits(leaf, options, None if temperature is None else temperature.double())
    expected = scores_reference(z, labels, -100, DIFFERENTIABLE)
    wanted -= {"mean_logit"} if not z.isfinite().all() else set()
    upstream = {name: torch.randn(5, device=device) for name in sorted(wanted)}
    for each in upstream.values():
        each[4] = 0.0
    if not upstream:
        return
    outputs = [getattr(expected, name) for name in upstream]
    (gradient,) = torch.autograd.grad(outputs, leaf, [each.double() for each in upstream.values()])
    rows = TokenRows.allocate(
        Targets(labels, None, None), options, ["lse", "lse_error", "entropy"], torch.float32, temperature
    )
    rows.write(logits, None)
    rows.to_gradient(logits, None, upstream)
    eps = max(torch.finfo(draw.dtype).eps, 1e-4)
    torch.testing.assert_close(logits.double(), gradient.nan_to_num(0.0), rtol=eps, atol=1e-4)


def run(logits: Tensor, labels: Tensor, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    outputs, gradient = unwritten(labels), torch.full_like(logits, torch.nan)
    launch_loss(logits, Targets(labels, None, None), TokenLossOptions(), outputs, grad_logits=gradient, **options)
    return outputs, gradient


# Neighbors of one thread, of two threads, the same place of two blocks, a border, the last and incomplete block.
@pytest.mark.parametrize("columns", [(3, 5), (7, 8), (37, 69), (12, 40), (40, 44), (31, 32), (97, 106), (0, 106)])
def test_prediction_is_the_first_of_equal_logits(
    columns: tuple[int, int], loss_kernel: str, device: torch.device
) -> None:
    logits = torch.zeros(2, 107, device=device)
    logits[0, list(columns)] = 2.0
    logits[1] = -torch.inf
    logits[1, list(columns)] = -5.0
    outputs, _ = run(logits, torch.tensor(columns, device=device))
    assert outputs["predictions"].tolist() == [columns[0]] * 2
    assert outputs["correct"].tolist() == [True, False]


# The start of the first block, the second, all but the first, the end of the last, one class.
@pytest.mark.parametrize("allowed", [slice(0, 20), slice(32, 64), slice(40, None), slice(70, None), slice(50, 51)])
def test_classes_masked_with_minus_infinity_take_no_part(
    allowed: slice, loss_kernel: str, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels, _ = make_case("plain", 3, CLASSES, device, dtype)
        is_masked = torch.ones(CLASSES, dtype=torch.bool, device=device)
        is_masked[allowed] = False
        logits[:, is_masked] = -torch.inf
        labels.copy_((~is_masked).nonzero()[:, 0][torch.tensor([0, -1, 0], device=device)])
        outputs, gradient = run(logits, labels)
        truth = plain(logits.double(), labels, TokenLossOptions(), None, {})
        for name in ("losses", "lse", "entropy", "log_sum_sq_probs"):
            torch.testing.assert_close(outputs[name].double(), truth[name], rtol=1e-5, atol=1e-5)
        expected = loss_and_gradient(F.cross_entropy, logits.double(), labels, reduction="sum")[1]
        torch.testing.assert_close(gradient.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert not gradient[:, is_masked].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, "all -inf", "label"], ids=str)
def test_logits_that_say_nothing_show_in_their_rows_unless_ignored(
    value: float | str, loss_kernel: str, device: torch.device
) -> None:
    logits, labels, _ = make_case("plain", ROWS, CLASSES, device)
    expected, expected_gradient = run(logits, labels)
    for row in (1, 3):  # kept, ignored
        if value == "all -inf":
            logits[row] = -torch.inf
        else:
            logits[row, labels[1] if value == "label" else 40] = -torch.inf if value == "label" else value
    outputs, gradient = run(logits, labels)
    others = [0, 2, 3]
    assert torch.equal(gradient[others], expected_gradient[others])
    for name, output in outputs.items():
        assert torch.equal(output[others], expected[name][others])
    if value == "label":  # an impossible one, which is pushed up
        assert outputs["losses"][1] == torch.inf
        assert gradient[1].isfinite().all()
        return
    assert outputs["losses"][1].isnan()
    assert gradient[1].isnan().all()
    launch_gradient(
        logits, gradient, TokenLossOptions(), labels=labels, lse=outputs["lse"], lse_error=outputs["lse_error"],
        grad_scale=torch.ones(ROWS, device=device),
    )  # fmt: skip
    assert gradient[1].isnan().all()
    torch.testing.assert_close(gradient[others], expected_gradient[others])


@pytest.mark.parametrize("vocab_size", [1, 123, 128, 4096, 4097, 32768, 50257, 262144, 2**20])
@pytest.mark.parametrize(("threads", "cache_bytes"), [(2048, 50 * 2**20), (1536, 6 * 2**20)])
def test_launches_fit_rows_and_kernels(vocab_size: int, threads: int, cache_bytes: int) -> None:
    row_size = min(vocab_size, launch_module.MAX_ROW_IN_REGISTERS // 2)
    hardware = Hardware(132, threads, 96 * 1024, cache_bytes)
    whole_row = choose_whole_row_launch(row_size, hardware, 2 * row_size)
    blockwise = choose_block_launch(vocab_size, hardware, 2)
    gradient = choose_gradient_launch(vocab_size)
    for launch in (whole_row, blockwise, gradient):
        assert launch.block_size.bit_count() == launch.num_warps.bit_count() == 1  # powers of two
        assert launch.num_warps <= 32
        assert launch.num_stages >= 1
        assert all(1 <= launch.num_programs(num_rows) <= num_rows for num_rows in (1, 131, 10_000))
    assert whole_row.block_size >= row_size
    assert (whole_row.num_stages - 1) * 2 * row_size <= 80 * 1024 or row_size <= 8192  # rows loaded ahead fit
    assert 2 * (blockwise.num_stages - 1) * 2 * blockwise.block_size <= 80 * 1024  # of two programs
    assert gradient.num_programs(1000) == 1000  # each program takes one
    for launch in (whole_row, blockwise):  # all programs run at once
        assert launch.max_programs * launch.num_warps * 32 <= 132 * threads
    if blockwise.num_stages > 1:
        assert blockwise.max_programs * vocab_size * 2 <= 0.72 * cache_bytes
