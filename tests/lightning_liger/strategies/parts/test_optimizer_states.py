"""Checkpoints of optimizers that have no state: before their first step, or of plain SGD; and of moments in codes."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from liger_ops.optim import AdamW
from lightning_liger import (
    FabricLigerFSDPStrategy,
    FabricLigerModelParallelStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Losses,
    build_model,
    launched_fabric,
    make_batches,
    make_loader,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import rank_main

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
OF_TRAINER = {
    "fsdp-full": lambda: LigerFSDPStrategy(),
    "fsdp-sharded": lambda: LigerFSDPStrategy(state_dict_type="sharded"),
    "model-parallel-full": lambda: LigerModelParallelStrategy(save_distributed_checkpoint=False),
    "model-parallel-sharded": lambda: LigerModelParallelStrategy(),
}
OF_FABRIC = {
    "fsdp-sharded": lambda: FabricLigerFSDPStrategy(),
    "model-parallel-full": lambda: FabricLigerModelParallelStrategy(save_distributed_checkpoint=False),
    "model-parallel-sharded": lambda: FabricLigerModelParallelStrategy(),
}
NUM_BATCHES = 3


class Tuned(LM):
    def __init__(self, optimizer: str, save_as=None) -> None:
        super().__init__()
        self.optimizer, self.lr, self.save_as = optimizer, 3e-3, save_as

    def on_train_start(self):
        if self.save_as is not None:
            self.trainer.save_checkpoint(self.save_as)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=self.lr)


def fit(root, strategy, optimizer, save_as=None, ckpt_path=None):
    recorder = Losses()
    trainer = make_trainer(recorder, root=root, strategy=strategy)
    trainer.fit(Tuned(optimizer, save_as), make_loader(0, NUM_BATCHES), ckpt_path=ckpt_path)
    return recorder.losses


@pytest.mark.parametrize(
    ("engine", "optimizer"), [*((engine, "adamw") for engine in OF_TRAINER), ("model-parallel-full", "sgd")]
)
def test_trainer_resumes_from_before_the_first_step_and_saving_changes_nothing(tmp_path, engine, optimizer):
    path = tmp_path / "first.ckpt"
    saved = fit(tmp_path, OF_TRAINER[engine](), optimizer, path)
    assert saved == fit(tmp_path, OF_TRAINER[engine](), optimizer)
    assert saved == fit(tmp_path, OF_TRAINER[engine](), optimizer, ckpt_path=path)


@pytest.mark.parametrize("engine", ["fsdp-full", "model-parallel-sharded"])
def test_learning_rate_finder_leaves_the_model_as_it_was(tmp_path, engine):
    trainer, module = make_trainer(root=tmp_path, strategy=OF_TRAINER[engine](), max_steps=NUM_BATCHES), Tuned("adamw")
    found = Tuner(trainer).lr_find(module, make_loader(0, 8), num_training=8, update_attr=False)
    assert len(found.results["loss"]) == 8
    recorder = Losses()
    trainer.callbacks.append(recorder)
    trainer.fit(module, make_loader(0, NUM_BATCHES))
    assert recorder.losses == fit(tmp_path, OF_TRAINER[engine](), "adamw")


@pytest.mark.parametrize(
    ("engine", "optimizer"), [*((engine, "adamw") for engine in OF_FABRIC), ("fsdp-sharded", "sgd")]
)
def test_fabric_loads_what_was_saved_before_the_first_step(tmp_path, engine, optimizer):
    fabric = launched_fabric(OF_FABRIC[engine]())
    model = fabric.setup_module(build_model())
    made = fabric.setup_optimizers(OPTIMIZERS[optimizer](model.parameters(), lr=3e-3))
    state = {"model": model, "optimizer": made, "step": 0}
    fabric.save(tmp_path / "first.ckpt", state)
    assert not made.optimizer.state

    def train() -> list[float]:
        losses = []
        for batch in make_batches(0, NUM_BATCHES):
            loss = model(**batch).loss
            fabric.backward(loss)
            made.step()
            made.zero_grad()
            losses.append(loss.item())
        return losses

    first = train()
    state["step"] = NUM_BATCHES
    assert fabric.load(tmp_path / "first.ckpt", state) == {}
    assert state["step"] == 0
    assert train() == first


def test_checkpoint_without_the_optimizer_is_refused(tmp_path):
    fabric = launched_fabric(FabricLigerFSDPStrategy())
    model = fabric.setup_module(build_model())
    made = fabric.setup_optimizers(torch.optim.SGD(model.parameters()))
    fabric.save(tmp_path / "model.ckpt", {"model": model})
    with pytest.raises(ValueError, match="has no state of the optimizer 'optimizer'"):
        fabric.load(tmp_path / "model.ckpt", {"model": model, "optimizer": made})


def of_moments(ranks: dict[str, Any], engine: str) -> dict[str, Any]:
    """Losses of two steps after a checkpoint of codes, and after it was loaded into other optimizers, and back."""

    def make(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = (
            torch.nn.Linear(264, 300),
            torch.nn.Tanh(),
            torch.nn.Linear(300, 41),
        )  # shards of uneven numbers of rows
        model = fabric.setup_module(torch.nn.Sequential(*layers))
        return model, fabric.setup_optimizers(kind(model.parameters(), lr=1e-2, **options))

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            loss = model(inputs).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fabric = L.Fabric(strategy=OF_FABRIC[engine](), accelerator=ranks["accelerator"], devices=ranks["size"])
    fabric.launch()
    inputs = torch.randn(8, 264, generator=torch.Generator().manual_seed(ranks["rank"])).to(fabric.device)
    first = make(AdamW, state_dtype="8bit", seed=3)
    train(*first, 2)
    paths = [ranks["folder"] / f"{engine}-{name}.ckpt" for name in ("codes", "numbers")]
    fabric.save(paths[0], dict(zip(("model", "optimizer"), first, strict=True)))
    found = {"codes": [list(state) for state in first[1].optimizer.state.values()], "expected": train(*first, 2)}
    for name, kind, options in (("8bit", AdamW, {"state_dtype": "8bit"}), ("plain", torch.optim.AdamW, {})):
        other = make(kind, **options)
        fabric.load(paths[0], dict(zip(("model", "optimizer"), other, strict=True)))
        found[name] = train(*other, 2)
    fabric.save(paths[1], dict(zip(("model", "optimizer"), other, strict=True)))
    fabric.load(paths[1], dict(zip(("model", "optimizer"), first, strict=True)))
    return found | {"back": train(*first, 1), "went on": train(*other, 1)}


def results(ranks: dict[str, Any]) -> dict[str, Any]:
    return {engine: of_moments(ranks, engine) for engine in OF_FABRIC}


@pytest.mark.parametrize("engine", OF_FABRIC)
def test_moments_in_codes_are_saved_and_loaded_by_all_strategies(ranks, engine):
    for found in ranks.of(engine):
        assert any("exp_avg_codes" in names for names in found["codes"])
        assert found["8bit"] == found["expected"]
        assert found["plain"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["back"] == found["went on"]


if __name__ == "__main__":
    rank_main(results)
