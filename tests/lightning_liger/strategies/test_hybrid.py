"""Sharding within groups of processes trains as sharding over all of them does."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from lightning_liger import FabricLigerStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import LM, launch, make_loader, make_trainer
from tests.lightning_liger.strategies.workers.hybrid import HYBRID, NUM_RANKS, NUM_STEPS

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
"""After 50 steps of AdamW; GPUs do not add in the same order each time."""


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason=f"needs {NUM_RANKS} CUDA GPUs"),
            ],
        ),
    ],
)
def ranks(request, tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    worker = "tests.lightning_liger.strategies.workers.hybrid"
    return request.param, launch(request.param, folder, worker=worker, num_ranks=NUM_RANKS)


@pytest.mark.parametrize("way", HYBRID)
def test_two_groups_of_two_train_as_four_that_share_all(ranks, way):
    device, results = ranks
    for result in results:
        found, expected = result[way], result["full"]
        num_steps = NUM_STEPS[way]
        assert found["logit_counts"] == (num_steps, 0)
        for key in ("losses", "norms"):
            assert len(found[key]) == num_steps
            torch.testing.assert_close(found[key], expected[key][:num_steps], rtol=TOLERANCE[device], atol=0.0)
        if num_steps == NUM_STEPS["full"]:
            assert found["losses"][-1] < found["losses"][0] - 1.0
            for name, parameter in found["whole"].items():
                torch.testing.assert_close(parameter, expected["whole"][name], rtol=0.0, atol=10 * TOLERANCE[device])


@pytest.mark.parametrize("way", HYBRID)
def test_groups_hold_the_same_halves(ranks, way):
    shards = [result[way]["shards"] for result in ranks[1]]
    for first, second, third, fourth in zip(*shards, strict=True):
        assert first.equal(third)
        assert second.equal(fourth)
        assert not first.equal(second)
    wholes = [result["full"]["shards"] for result in ranks[1]]
    for half, quarter in zip(shards[0], wholes[0], strict=True):
        assert half.numel() in range(2 * quarter.numel() - 3, 2 * quarter.numel() + 1)


def test_fabric_trains_and_clips_in_groups_as_it_does_without(ranks):
    device, results = ranks
    for result in results:
        found, expected = result["fabric-mesh"], result["fabric-full"]
        for key in ("losses", "norms"):
            torch.testing.assert_close(found[key], expected[key], rtol=TOLERANCE[device], atol=0.0)
        for name, parameter in found["whole"].items():
            torch.testing.assert_close(parameter, expected["whole"][name], rtol=0.0, atol=10 * TOLERANCE[device])


def test_mesh_of_another_size_than_the_processes_is_refused(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy=LigerStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)))
    with pytest.raises(ValueError, match=r"device_mesh=\(2, 2\): the product of the sizes must be world_size = 1"):
        trainer.fit(LM(), make_loader(0, 1))


@pytest.mark.parametrize("strategy", [LigerStrategy, FabricLigerStrategy])
def test_sharding_strategy_is_a_name_or_one_of_pytorchs(strategy):
    for wanted in ShardingStrategy:
        assert strategy(sharding_strategy=wanted).sharding_strategy is wanted
        assert strategy(sharding_strategy=wanted.name.lower()).sharding_strategy is wanted
    for unknown in ("HALF_SHARD", 3):
        with pytest.raises(ValueError, match=rf"sharding_strategy must be one of \['FULL_SHARD'.*, got {unknown!r}"):
            strategy(sharding_strategy=unknown)
