"""Counts and gradient norms of ``LigerMonitor`` over two ranks."""

import pytest

from lightning_liger.monitor.flops import model_flops
from tests.lightning_liger.monitor.test_experts import loads_of
from tests.lightning_liger.monitor.workers import ranks
from tests.lightning_liger.strategies.workers.distributed import build_model, launch
from tests.lightning_liger.tiny import tiny_llama


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("cpu", tmp_path_factory.mktemp("ranks"), worker=ranks.__name__, num_ranks=2)


@pytest.mark.parametrize("name", ranks.RUNS)
def test_counts_are_exact_over_ranks_and_accumulated_batches(found, name):
    is_shared = name == "context-parallel"
    rows = ranks.SHARED if is_shared else sum(ranks.LENGTHS, ())
    model = tiny_llama() if is_shared else ranks.tiny_mixture() if name == "experts" else build_model()
    flops = model_flops(model)
    for rank in (0, 1):
        run = found[rank][name]
        results = run["results"]
        assert (results["steps"], results["tokens"], results["rows"]) == (2, sum(rows), len(rows))
        assert results["ignored_share"] == len(rows) / sum(rows)
        assert sum(run["lengths"]) == len(rows)
        step_tokens = (12, 30) if is_shared else (32, 56)
        assert [point["tokens"] for point in run["points"]] == list(step_tokens)
        assert run["traced"] == flops
        assert run["flops"] == pytest.approx(flops.of(sum(rows), [(length, 1) for length in rows]))
        assert results["tokens_per_second"] == pytest.approx(2 * results["tokens_per_second_per_device"])
        assert run["page"] or rank == 1  # which rank 0 writes

        # Clipping takes the norm too.
        assert run["norms"] == pytest.approx([point["gradient_norm"] for point in run["points"]], rel=1e-5)
        if name in ("fsdp", "fsdp2"):
            assert run["norms"] == pytest.approx(found[0]["ddp"]["norms"], rel=1e-4)


def test_tokens_of_experts_are_those_of_all_ranks_and_accumulated_batches(found):
    batches = [ranks.make_batch(length) for lengths in ranks.LENGTHS for length in lengths[:2]]
    loads = loads_of(ranks.tiny_mixture().eval(), batches)
    assert len(loads) == 2
    for rank in (0, 1):
        point = found[rank]["experts"]["points"][0]
        assert point["expert_imbalance"] == pytest.approx(float((loads.amax(1) * 20 / loads.sum(1)).max()))
        assert point["idle_experts_share"] == pytest.approx(float((loads == 0).double().mean()))
