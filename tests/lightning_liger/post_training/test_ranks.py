"""Modules of post-training on two ranks with unequal micro-batches train as in one process, under each strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from tests.lightning_liger.post_training.workers.ranks import DPO, RUNS, SFT, SHARES_BATCHES, Run, train
from tests.lightning_liger.strategies.workers.distributed import launch
from tests.lightning_liger.tiny import tiny_llama, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    tiny_llama().save_pretrained(folder / "model")
    tiny_model("qwen2", hidden_size=48).save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    worker = "tests.lightning_liger.post_training.workers.ranks"
    return launch("cpu", folder, worker=worker, num_ranks=2, environment_of=lambda _: {"DS_ACCELERATOR": "cpu"})


@pytest.mark.parametrize(("strategy", "name"), [(strategy, name) for strategy, runs in RUNS.items() for name in runs])
def test_two_ranks_train_as_one_process(ranks: list[dict[str, Any]], folder: Path, strategy: str, name: str) -> None:
    expected = in_one_process(folder, RUNS[strategy][name], [0] if strategy in SHARES_BATCHES else [0, 1])
    for rank in ranks:
        found = rank[strategy][name]
        # Accuracies are of ties in the first step; DeepSpeed has no norm of gradients.
        names = {"train_loss"} | (found["metrics"].keys() & expected["metrics"].keys()) - {"train_rewards/accuracies"}
        pair = [{name: metrics[name] for name in names} for metrics in (found["metrics"], expected["metrics"])]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4, abs=1e-5, nan_ok=True)
        state = {key: value for key, value in found["state"].items() if "metric" not in key}
        assert state.keys() == {key for key in expected["state"] if "metric" not in key}  # no reference, no teacher
        for key, value in state.items():
            torch.testing.assert_close(value, expected["state"][key], rtol=1e-3, atol=2e-5, msg=lambda m, k=key: k + m)


ALONE: dict[str, dict[str, Any]] = {}


def in_one_process(folder: Path, run: Run, ranks: list[int]) -> dict[str, Any]:
    """What one process gets out of a run, which several strategies may have."""
    key = f"{run} {ranks}"
    if key not in ALONE:
        ALONE[key] = train(run, "liger", ranks, folder)
    return ALONE[key]


class HalfDefault(Precision):
    """New tensors are in bfloat16 in each step, as with bf16-true; weights stay in float32."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)


IN_ONE_PROCESS: dict[str, Run] = {name: run for runs in RUNS.values() for name, run in runs.items()}
IN_ONE_PROCESS["precomputed"] = DPO[0], SFT | {"precompute_ref_log_probs": True}, DPO[2]
IN_ONE_PROCESS["desensitized"] = DPO[0], {"ld_alpha": 0.3}, DPO[2]


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_losses_do_not_depend_on_the_default_dtype(folder: Path, name: str) -> None:
    plain = in_one_process(folder, IN_ONE_PROCESS[name], [0])
    half = train(IN_ONE_PROCESS[name], "liger", [0], folder, plugins=[HalfDefault()])
    assert half["metrics"] == pytest.approx(plain["metrics"], rel=0, abs=0, nan_ok=True)
    assert all(torch.equal(each, plain["state"][key]) for key, each in half["state"].items())
