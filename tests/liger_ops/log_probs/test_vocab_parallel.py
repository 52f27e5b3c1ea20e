"""Scores under a head that is spread over ranks against whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.liger_ops.log_probs.cases import (
    linear_log_probs_reference,
    linear_token_loss_reference,
    loss_and_gradients,
    scores_and_gradients,
)
from tests.liger_ops.log_probs.workers.vocab_parallel import RUNS, make_head, whole
from tests.lightning_liger.strategies.workers.distributed import launch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, of which the second has fewer classes."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(request.param, folder, worker="tests.liger_ops.log_probs.workers.vocab_parallel", num_ranks=2)


@pytest.mark.parametrize("name", RUNS)
def test_scores_losses_and_gradients_are_those_of_the_whole_head(ranks: list[dict[str, Any]], name: str) -> None:
    run, head = RUNS[name], make_head(name, "cpu")
    results = [result[name] for result in ranks]
    is_double = run.path == "reference"
    close = {"rtol": 1e-9, "atol": 1e-12} if is_double else {"rtol": 1e-4, "atol": 1e-4}
    double = head.to(torch.float64)

    scores, gradients = scores_and_gradients(linear_log_probs_reference, double, run.case.frozen)
    for result in results:
        for score, expected in zip(result["scores"], scores, strict=True):
            assert (score is None) == (expected is None)
            if score is not None:
                torch.testing.assert_close(score.cpu(), expected.detach(), check_dtype=is_double, **close)
    actual = whole(name, [result["gradients"] for result in results])
    torch.testing.assert_close(actual, gradients, check_dtype=is_double, **close)

    loss, _, gradients = loss_and_gradients(linear_token_loss_reference, double, run.case.frozen)
    for result in results:
        torch.testing.assert_close(result["loss"][0].cpu(), loss, check_dtype=is_double, **close)
        assert all(
            torch.equal(one.cpu(), two.cpu())
            for one, two in zip(result["loss"][1], result["scores"], strict=True)
            if one is not None
        )
    actual = whole(name, [result["loss"][2] for result in results])
    torch.testing.assert_close(actual, gradients, check_dtype=is_double, **close)
