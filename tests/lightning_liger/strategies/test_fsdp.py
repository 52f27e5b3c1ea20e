"""``liger_fsdp`` on one process: what it wraps, what it refuses, and gradients that FSDP brings to the CPU."""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_liger import FabricLigerStrategy, LigerStrategy
from lightning_liger.strategies.fsdp import BackwardRepair
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Losses,
    build_model,
    launched_fabric,
    make_batches,
    make_loader,
    make_trainer,
    outside_loss,
)
from tests.lightning_liger.strategies.workers.trainings import reference_training


@pytest.mark.parametrize(
    ("tied", "policy", "kernels", "message"),
    [
        (False, ["Linear"], "auto", "LM head 'model.lm_head' is in a separate FSDP unit"),
        (True, ["Embedding"], "auto", "'model.model.embed_tokens' and 'model.lm_head', which share their weight"),
        (True, ["LlamaModel"], "none", "'model.model.embed_tokens' and 'model.lm_head', which share their weight"),
        (False, ["Linear"], "none", None),
        (True, ["LlamaMLP"], "auto", None),
    ],
)
def test_policy_that_takes_the_heads_weight_away_is_refused_and_others_train(tmp_path, tied, policy, kernels, message):
    recorder, module = Losses(), LM(tied)
    strategy = LigerStrategy(auto_wrap_policy=policy, kernels=kernels)
    trainer = make_trainer(recorder, root=tmp_path, strategy=strategy)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, make_loader(0, 1))
        return
    trainer.fit(module, make_loader(0, 2))
    reference = reference_training(build_model(tied), [make_batches(0, 2)])
    torch.testing.assert_close(recorder.losses, reference.losses[0], rtol=1e-5, atol=0.0)


class Manual(LM):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.model(**batch).loss
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def test_manual_optimization_trains_only_where_fsdp_is_inside_the_module(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy=LigerStrategy())
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*'liger_model_parallel'"):
        trainer.fit(Manual(), make_loader(0, 1))
    options, recorder = {"device_id": torch.device("cpu"), "use_orig_params": True}, Losses()
    module = Manual(build=lambda module: FullyShardedDataParallel(build_model(), **options))
    make_trainer(recorder, root=tmp_path, strategy=LigerStrategy()).fit(module, make_loader(0, 3))
    reference = reference_training(build_model(), [make_batches(0, 3)])
    assert recorder.losses == pytest.approx(reference.losses[0], rel=1e-5)


def test_mesh_of_another_size_than_the_processes_is_refused(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy=LigerStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)))
    with pytest.raises(ValueError, match=r"device_mesh=\(2, 2\): the product of the sizes must be world_size = 1"):
        trainer.fit(LM(), make_loader(0, 1))


def test_whole_checkpoints_of_fabric_on_cpus_are_refused(tmp_path):
    fabric = launched_fabric(FabricLigerStrategy(state_dict_type="full"))
    with pytest.raises(ValueError, match=r"state_dict_type='full' is not supported on CPUs.*expected .*'sharded'"):
        fabric.save(tmp_path / "model.ckpt", {"model": fabric.setup_module(build_model())})


class BroughtToTheCPU(torch.nn.Module):
    """Treats gradients as FSDP does on their way to the CPU: each over the last, which forward shows again."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        self.gradient: torch.Tensor | None = None

    def forward(self, factor):
        self.used.grad = self.gradient
        return (factor * self.used).sum()

    def backward(self, loss):
        (gradient,) = torch.autograd.grad(loss, self.used)
        self.gradient = gradient if self.gradient is None else self.gradient.copy_(gradient)
        self.used.grad = self.gradient


@pytest.mark.parametrize("cleared", ["before forward", "after forward"])
def test_micro_batches_add_up_where_each_gradient_is_brought_over_the_last(cleared):
    model, repair = BroughtToTheCPU(), BackwardRepair()
    model.register_forward_pre_hook(repair.note_gradients)
    model.unused.grad = torch.full((3,), 5.0)
    for _ in range(2):
        for step, factor in enumerate((1.0, 2.0, 4.0)):
            if step == 0 and cleared == "before forward":
                model.used.grad = None
            loss = model(factor)
            if step == 0 and cleared == "after forward":
                model.used.grad = None
            with torch.no_grad():
                if step == 1:
                    model(8.0)  # of an evaluation
            with repair.context():
                model.backward(loss)
        assert model.used.grad.tolist() == [7.0] * 3
        assert model.unused.grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_one_process_of_fabric_has_losses_after_forward(precision):
    """FSDP does not shard within one process, and frees what it cast at the end of each module's forward."""
    losses: dict[str, list[float]] = {}
    for strategy in ("liger", "liger_fsdp"):
        model, fabric = build_model(), launched_fabric(strategy, precision=precision)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses[strategy] = []
        for batches in zip(make_batches(0, 4), make_batches(1, 4), strict=True):
            loss = sum(outside_loss(wrapped(batch["input_ids"]).logits, batch["labels"]) for batch in batches)
            with torch.no_grad():  # between forward and backward
                losses[strategy].append(wrapped(**batches[0]).loss.item())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert losses["liger"][-1] < losses["liger"][0]
    assert losses["liger_fsdp"] == pytest.approx(losses["liger"], rel=1e-5 if precision == "32-true" else 5e-3)
