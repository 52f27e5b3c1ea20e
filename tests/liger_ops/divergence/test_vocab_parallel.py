"""Divergences of heads that are spread over ranks against whole heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_ops.divergence.rows import RowSums, divergence_of, sum_logits
from liger_ops.divergence.vocab_parallel import _merge
from tests.liger_ops.divergence.test_linear_divergence import assert_same, leaves_of, with_gradients
from tests.liger_ops.divergence.workers.vocab_parallel import OF_VOCABULARY, RUNS, models_of, options_of
from tests.lightning_liger.strategies.workers.distributed import launch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, of which the second has fewer classes."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(request.param, folder, worker="tests.liger_ops.divergence.workers.vocab_parallel", num_ranks=2)


@pytest.mark.parametrize("name", RUNS)
def test_divergences_and_gradients_are_those_of_whole_heads(ranks: list[dict[str, Any]], name: str) -> None:
    run, models = RUNS[name], models_of(name)
    whole = models.to(torch.float64)
    expected = with_gradients(whole.run(**options_of(name, "cpu")), leaves_of(whole))
    results = [result[name] for result in ranks]
    tolerance = 2e-5 if run.by_kernels else 1e-10
    assert torch.equal(results[0][0], results[1][0])
    names = [each for each in type(models)._fields if each in run.trained]
    for place, parts in enumerate(zip(*results, strict=True)):
        is_cut = place > 0 and names[place - 1] in OF_VOCABULARY
        found = torch.cat(parts) if is_cut else parts[0]
        if not is_cut:
            assert torch.equal(*parts)
        assert_same([found], [expected[place]], (name, place), tolerance)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "mixed"])
def test_sums_of_shards_are_those_of_whole_rows(kind: str) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        student, teacher = (9 * torch.randn(2, 4, 24, generator=generator)).double()
        student[0, :8] = teacher[0, :8] = -torch.inf  # a shard of impossible classes
        teacher[1, 8:16] = -torch.inf
        student[2] += 40
        whole = sum_logits(student, teacher, kind)
        shards = [sum_logits(*each, kind) for each in zip(student.split(8, -1), teacher.split(8, -1), strict=True)]
        merged = _merge(RowSums(*(torch.stack(parts) for parts in zip(*shards, strict=True))), kind)
        for name in {"forward_kl": ["first"], "reverse_kl": ["second"]}.get(kind, RowSums._fields):
            torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
        values = [divergence_of(sums, kind, 0.3, 24) for sums in (merged, whole)]
        torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9, equal_nan=True)
