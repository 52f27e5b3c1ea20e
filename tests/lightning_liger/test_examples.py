"""Every yaml in ``examples/`` trains as the command at its top says, on a model and text of test size."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from examples import fabric_loop, plain_module
from tests.lightning_liger.plain_scores import IGNORED, logits_of, scores_of, targets_of
from tests.lightning_liger.strategies.workers.distributed import launch, logit_counts, torchrun_environment
from tests.lightning_liger.workers.example_runs import (
    EXAMPLES,
    NUM_STEPS,
    OF_DEEPSPEED,
    OF_ONE_PROCESS,
    OF_SEVERAL_PROCESSES,
    OF_THE_HUB,
    ON_TWO_NODES,
    OTHERS,
    PROGRAMS,
    LastStep,
    run_alone,
    write_text,
)

WORKER = "tests.lightning_liger.workers.example_runs"
CLASSES = {
    "liger": "LigerSingleDeviceStrategy",
    "liger_ddp": "LigerDDPStrategy",
    "liger_deepspeed_stage_2": "LigerDeepSpeedStrategy",
    "liger_deepspeed_stage_3": "LigerDeepSpeedStrategy",
    "liger_model_parallel": "LigerModelParallelStrategy",
}
"""Of examples that do not train under FSDP."""
OWN = ("distill", "dpo", "grpo", "kto")
"""Examples whose loss is compared with the module's own on whole logits, and in ``post_training`` with its definition.
Of others it is compared with its definition here."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def ranks(request, tmp_path_factory):
    """What every rank got out of every example for several processes: two on CPUs, else as many as there are GPUs.

    Those of the examples for several nodes run in processes that see only the GPUs of their node.
    """
    num_ranks = 2 if request.param == "cpu" else torch.cuda.device_count()
    folders = [tmp_path_factory.mktemp("one") / "ranks", tmp_path_factory.mktemp("several") / "nodes"]
    for folder in folders:
        folder.mkdir()
        write_text(folder)
    together = launch(request.param, folders[0], worker=WORKER, num_ranks=num_ranks)
    apart = launch(request.param, folders[1], worker=WORKER, environment_of=torchrun_environment)
    return {**dict.fromkeys(OF_SEVERAL_PROCESSES, together), **dict.fromkeys(ON_TWO_NODES, apart)}


def assert_trained(result, example):
    assert result["strategy"] == CLASSES.get(Path(example).stem, "LigerFSDPStrategy")
    assert result["steps"] == NUM_STEPS
    assert all(0 < loss < result["log_vocab_size"] + 1 for loss in result["losses"])
    assert result["num_replaced"] >= 10
    num_losses, num_materialized = result["logit_counts"]
    assert num_losses > result["num_batches"]  # and those of validation
    assert num_materialized == 0
    assert result["saved"]


@pytest.mark.parametrize("example", OF_SEVERAL_PROCESSES + ON_TWO_NODES)
def test_example_trains_on_several_processes(ranks, example):
    for result in ranks[example]:
        assert_trained(result[example], example)
        assert result[example]["losses"] == ranks[example][0][example]["losses"]  # they are means over all ranks


# The loss of each example in eager PyTorch


def sum_and_number(example: str, module: Any, batch: Any) -> tuple[Tensor, Tensor | int]:
    """A sum over a batch, and the number of what it is summed over: a step divides sums over its batches."""
    if example.startswith(OWN):
        return module.training_step(batch, 0), 1
    if example == "ranking/ranking.yaml":
        labels, numbers, ids = batch
        clicks, id_logits = module.model(numbers.double(), ids)
        loss = F.binary_cross_entropy_with_logits(clicks, labels.double())
        id_loss = -id_logits[labels == 1].log_softmax(-1).gather(-1, ids[labels == 1, :1]).mean()
        return loss + 0.1 * id_loss, 1
    targets = targets_of(batch)
    if example == "medusa.yaml":  # head k, from 1, looks k further tokens ahead
        hidden = module.model.model(batch["input_ids"], batch.get("attention_mask")).last_hidden_state
        total = -scores_of(module.model.lm_head(hidden), targets).sum()
        for k, (block, head) in enumerate(module.medusa_heads, start=1):
            ahead = F.pad(targets[:, k:], (0, k), value=IGNORED)
            total = total - 0.2 * 0.8**k * scores_of(head(hidden + F.silu(block.linear(hidden))), ahead).sum()
        return total, (targets != IGNORED).sum()
    return -scores_of(logits_of(module.model, batch), targets).sum(), (targets != IGNORED).sum()


def loss_and_gradients(example: str, module: Any, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a step of these batches, with respect to all parameters that are trained."""
    sums, numbers = zip(*(sum_and_number(example, module, batch) for batch in batches), strict=True)
    loss = sum(sums) / sum(numbers)
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("example", PROGRAMS + OTHERS + OF_ONE_PROCESS)
def test_example_trains_by_the_definition_of_its_loss(example, accelerator, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)  # the command at the top of the yaml names files relative to it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path)
    cli = run_alone(example, tmp_path, f"--trainer.accelerator={accelerator}", "--trainer.precision=32-true")
    metrics = cli.trainer.callback_metrics
    assert cli.trainer.global_step == NUM_STEPS
    assert example not in OF_ONE_PROCESS or type(cli.trainer.strategy).__name__ == CLASSES["liger"]
    assert cli.trainer.strategy.patch_report.num_replaced >= 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert any(name.startswith("val_") for name in metrics)
    columns = next(tmp_path.glob("logs/csv/*/metrics.csv")).read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {name for name in metrics if name.startswith("val_")} <= set(columns)
    assert list(tmp_path.glob("logs/tensorboard/*/events.out.tfevents.*"))
    assert logit_counts(cli.model)[1] == 0
    assert (tmp_path / example / "last.ckpt").exists()

    (step,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, LastStep))
    twin = type(cli.model)(**{name: value for name, value in cli.model.hparams.items() if not name.startswith("_")})
    if "ranking" in example:  # whose model depends on the data
        twin.trainer = cli.trainer
    twin.configure_model()
    twin.double()
    if getattr(cli.model, "_teacher", ()):  # whose random weights depend on the device
        weights = {name: value.cpu() for name, value in cli.model._teacher[0].state_dict().items()}
        teacher = twin.configure_teacher()
        teacher.load_state_dict(weights)
        twin.configure_teacher = lambda: teacher
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(step.weights[name])
    loss, gradients = loss_and_gradients(example, twin, move_data_to_device(step.batches, "cpu"))
    torch.testing.assert_close(step.loss.cpu(), loss, check_dtype=False, rtol=1e-4, atol=1e-6)
    assert gradients.keys() == {name for name, each in step.gradients.items() if each.any()}
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = (step.gradients[name].cpu() - gradient).norm()
        assert error < 1e-3 * gradient.norm() + 1e-6 * largest, (name, float(error), float(gradient.norm()))


def test_module_in_plain_pytorch_gets_all_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trainer = plain_module.main(max_steps=NUM_STEPS, accelerator="cpu")
    replaced = {entry.kernel for entry in trainer.strategy.patch_report.entries if entry.replacement is not None}
    assert replaced == {"rms_norm", "rope", "silu_mul", "linear_cross_entropy"}
    assert logit_counts(trainer.lightning_module)[1] == 0
    assert trainer.global_step == NUM_STEPS


def test_fabric_loop_trains_and_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    losses, val_loss = fabric_loop.main(
        ["--steps=6", "--accelerator=cpu", f"--checkpoint={tmp_path / 'last.ckpt'}", "--strategy=liger"]
    )
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert 0 < val_loss < losses[0]
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.multi_gpu
def test_examples_of_deepspeed_train_on_several_gpus(tmp_path):
    pytest.importorskip("deepspeed")
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    write_text(folder)
    for result in launch("cuda", folder, worker=WORKER, num_ranks=torch.cuda.device_count()):
        for example in OF_DEEPSPEED:
            assert_trained(result[example], example)


def test_every_yaml_is_run_and_every_name_of_a_strategy_has_one():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.y*ml")}
    found -= {*OF_THE_HUB, "next_item/large.yaml", "ranking/large.yaml"}  # settings that differ, for GPUs
    assert found - set(OTHERS) == set(OF_SEVERAL_PROCESSES + ON_TWO_NODES + OF_ONE_PROCESS + OF_DEEPSPEED)
    assert {f"strategies/{name}.yaml" for name in (*CLASSES, "liger_fsdp", "liger_fsdp_cpu_offload")} <= found
