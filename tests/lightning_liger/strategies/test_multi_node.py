"""Two nodes with half of the ranks each train as one process with the whole batch, under torchrun and under SLURM."""

import pytest
import torch

from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    launch,
    make_uneven_batches,
    reference_training,
)
from tests.lightning_liger.strategies.workers.multi_node import (
    NUM_DEVICES,
    NUM_STEPS,
    STRATEGIES,
    of_slurm,
    of_torchrun,
)

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]


def train(device, tmp_path_factory, environment_of):
    worker = "tests.lightning_liger.strategies.workers.multi_node"
    return launch(device, tmp_path_factory.mktemp("ranks"), worker=worker, environment_of=environment_of)


@pytest.fixture(scope="module", params=DEVICES)
def under_torchrun(request, tmp_path_factory):
    return request.param, train(request.param, tmp_path_factory, of_torchrun)


@pytest.fixture(scope="module", params=DEVICES)
def under_slurm(request, tmp_path_factory):
    return request.param, train(request.param, tmp_path_factory, of_slurm)


def assert_trained_as_one_process(device, results, environment):
    reference = reference_training(False, device, True, lambda rank: make_uneven_batches(rank, NUM_STEPS))
    for rank, result in enumerate(results):
        assert result["environment"] == environment
        assert result["place"] == (NUM_RANKS, rank, *divmod(rank, NUM_DEVICES))
        assert result["sampler"] == {"num_replicas": NUM_RANKS, "rank": rank}
        assert result["num_replaced"] == 10
        assert result["logit_counts"] == (NUM_STEPS, 0)
        torch.testing.assert_close(result["losses"], reference.losses[rank], rtol=TOLERANCE[device], atol=1e-7)
        assert result["whole"].keys() == reference.parameters.keys()
        for name, parameter in result["whole"].items():
            torch.testing.assert_close(parameter, reference.parameters[name], rtol=0.0, atol=10 * TOLERANCE[device])


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_nodes_under_torchrun_train_as_one_process(under_torchrun, name):
    device, results = under_torchrun
    assert_trained_as_one_process(device, [result[name] for result in results], "TorchElasticEnvironment")


def test_shards_within_nodes_train_as_one_process_and_not_with_one_rank_a_node(under_torchrun):
    device, results = under_torchrun
    runs = [result["hybrid"] for result in results]
    if NUM_DEVICES > 1:
        assert_trained_as_one_process(device, runs, "TorchElasticEnvironment")
    else:  # PyTorch would average no gradients
        assert all("sharding_strategy=HYBRID_SHARD shards over groups of one process" in run for run in runs)


def test_two_nodes_under_slurm_train_as_one_process(under_slurm):
    device, results = under_slurm
    assert_trained_as_one_process(device, [result["fsdp"] for result in results], "SLURMEnvironment")
