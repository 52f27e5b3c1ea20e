"""Every plan for the layers trains alike, on Trainer and Fabric; budgets are planned and kept to."""

import logging
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_liger import (
    FabricLigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.strategies.parts import activations
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Losses,
    build_model,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import fit_with_fabric

NUM_STEPS = 5
CLASSES = {each.name: each for each in REGISTRATIONS}
NAMES = ["liger", "liger_ddp", "liger_fsdp"]
PLANS = {
    "default": (None, ["cheap", "cheap"]),
    "full": ("full", ["recompute", "recompute"]),
    "number": (1, ["recompute", "cheap"]),
    "zero": (0, ["cheap", "cheap"]),
    "classes": ({LlamaDecoderLayer}, ["recompute", "recompute"]),
    "parts of layers": (["LlamaMLP"], ["recompute", "recompute"]),
}


def dropping_model() -> nn.Module:
    """With dropout in the attention and between layers."""
    model = build_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.3))
    return model


class DroppingLM(LM):
    """Counts how often the MLP of each layer runs."""

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = dropping_model()
            self.num_runs = [0, 0]
            for index, layer in enumerate(self.model.model.layers):
                layer.mlp[0].gate_proj.register_forward_pre_hook(partial(self._count, index))

    def _count(self, index: int, *_: object) -> None:
        self.num_runs[index] += 1


def fit(root, strategy, num_steps=NUM_STEPS, module=None, **options):
    """The module, its losses, and the Trainer."""
    torch.manual_seed(1)
    module, recorder = module or DroppingLM(), Losses()
    trainer = make_trainer(recorder, root=root, strategy=strategy, **options)
    trainer.fit(module, make_loader(0, num_steps))
    return module, recorder.losses, trainer


def modes_of(strategy) -> list[str]:
    (controlled,) = strategy._activations.controlled
    return controlled.modes


@pytest.mark.parametrize(("value", "modes"), PLANS.values(), ids=PLANS)
def test_every_plan_trains_alike_with_the_trainer(tmp_path, value, modes):
    plain, expected, _ = fit(tmp_path, LigerSingleDeviceStrategy(activation_checkpointing="none"))
    module, found, trainer = fit(tmp_path, LigerSingleDeviceStrategy(activation_checkpointing=value))
    assert found == expected
    assert modes_of(trainer.strategy) == modes
    assert module.num_runs == [NUM_STEPS * (2 if mode == "recompute" else 1) for mode in modes]
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_trains_alike_with_fabric(name):
    def train(value):
        torch.manual_seed(1)
        strategy = CLASSES[name].fabric(activation_checkpointing=value)
        run = {"accelerator": "cpu", "size": 1}
        found = fit_with_fabric(run, strategy, dropping_model(), make_batches(0, NUM_STEPS))
        return found["losses"], modes_of(strategy)

    expected, modes = train(None)
    assert modes == ["cheap", "cheap"]
    for value in (1, ["LlamaDecoderLayer"]):
        losses, modes = train(value)
        assert losses == expected
        assert modes[0] == "recompute"


def test_later_stages_and_models_keep_the_plan(tmp_path):
    strategy = LigerFSDPStrategy(activation_checkpointing=1)
    module, _, trainer = fit(tmp_path, strategy, 2)
    (before,) = strategy._activations.controlled
    trainer.validate(module, make_loader(1, 1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(0, 2))
    assert set(strategy._activations.controlled) == {before}
    second = DroppingLM()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(second, make_loader(0, 2))
    assert second.num_runs == [4, 2]


def test_layers_are_left_alone_without_kernels_and_plans(tmp_path):
    strategy = LigerSingleDeviceStrategy(kernels="none")
    module, _, _ = fit(tmp_path, strategy, 1)
    assert not strategy._activations.controlled
    assert type(module.model.model.layers[0]) is LlamaDecoderLayer


class WithoutLayers(LM):
    def __init__(self) -> None:
        super().__init__(build=lambda module: nn.Linear(2, 2))

    def training_step(self, batch, batch_idx):
        return self.model(torch.ones(2)).sum()


@pytest.mark.parametrize(
    ("options", "model", "mentions"),
    [
        ({"activation_checkpointing": 3}, LM, ["at most 2", "LM", "got 3"]),
        ({"activation_checkpointing": ["NoLayer"]}, LM, ["NoLayer", "LlamaDecoderLayer"]),
        ({"activation_checkpointing": {nn.Conv2d}}, LM, ["Conv2d", "no layer", "LM"]),
        ({"memory_budget": 0.5}, LM, ["memory_budget=0.5", "GPU", "cpu"]),
        ({"activation_checkpointing": "full"}, WithoutLayers, ["activation_checkpointing='full' needs a model with"]),
        ({"activation_checkpointing": 2}, WithoutLayers, ["activation_checkpointing=2 needs a model with repeated"]),
    ],
    ids=str,
)
def test_plans_that_the_model_or_its_device_cannot_follow_are_refused_at_set_up(tmp_path, options, model, mentions):
    with pytest.raises(ValueError, match=mentions[0]) as refused:
        fit(tmp_path, LigerSingleDeviceStrategy(**options), module=model())
    assert [text for text in mentions if text not in str(refused.value)] == []


def test_budget_above_the_memory_of_the_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(activations, "memory_of", lambda device: FakeMemory(80 * 2**30))
    activations.ActivationControl(budget=80).control(dropping_model(), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"memory_budget must be at most 80\.0 GiB, the memory of the GPU, got 90"):
        activations.ActivationControl(budget=90).control(dropping_model(), torch.device("cpu"))


def test_model_that_recomputes_its_layers_itself_is_refused():
    model = build_model()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"memory_budget='auto' needs layers.*gradient_checkpointing_disable"):
        activations.ActivationControl(budget="auto").control(model, torch.device("cpu"))
    activations.ActivationControl().control(model, torch.device("cpu"))


def test_argument_without_effect_is_told(recwarn):
    control, model = activations.ActivationControl("full"), dropping_model()
    control.control(model, torch.device("cpu"))
    tokens = torch.tensor([[1, 2, 3]])
    torch.compile(model, backend="eager")(input_ids=tokens).logits.sum().backward()
    control.step_ends()
    assert any("activation_checkpointing='full' has no effect" in str(warning.message) for warning in recwarn)
    recwarn.clear()
    model(input_ids=tokens)
    control.step_ends()
    assert not len(recwarn)


def test_model_without_layers_trains_where_none_need_be_recomputed(tmp_path):
    for options in ({"activation_checkpointing": "none"}, {"memory_budget": "auto"}):
        fit(tmp_path, LigerSingleDeviceStrategy(kernels="none", **options), 1, module=WithoutLayers())


# Budgets


@pytest.fixture
def memory(monkeypatch):
    """Counters that stay at 0 in the place of the GPU's."""
    fake = FakeMemory(2**30)
    fake.highest_peak = 5
    monkeypatch.setattr(activations, "memory_of", lambda device: fake)
    return fake


@pytest.mark.parametrize(("name", "num_accumulated"), [("liger", 1), ("liger", 2), ("liger_ddp", 2), ("liger_fsdp", 1)])
def test_budget_is_planned_after_two_steps(tmp_path, memory, caplog, name, num_accumulated):
    caplog.set_level(logging.INFO)
    _, expected, _ = fit(tmp_path, CLASSES[name].trainer(kernels="none"), 8, accumulate_grad_batches=num_accumulated)
    strategy = CLASSES[name].trainer(kernels="none", memory_budget=0.5)
    logger = CSVLogger(tmp_path)
    module, found, _ = fit(tmp_path, strategy, 8, logger=logger, accumulate_grad_batches=num_accumulated)
    assert found == expected
    assert module.num_runs == [8 + 2 * num_accumulated] * 2
    assert modes_of(strategy) == ["store", "store"]
    lines = [record.message for record in caplog.records if "memory_budget" in record.message]
    assert lines == [f"lightning-liger: memory_budget=0.5: {strategy.activation_plan}"]
    assert strategy.activation_plan == "all 2 layers stored; predicted peak 0.0 GiB of 0.5 GiB (26 tokens)"
    assert "activations/store" in logger.experiment.metrics_keys
    assert strategy.peak_before_resets == 5


def test_fabric_plans_at_the_steps_of_its_optimizer(memory):
    fabric = L.Fabric(strategy=FabricLigerSingleDeviceStrategy(memory_budget="auto"), accelerator="cpu", devices=1)
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    modes = []
    for batch in make_batches(0, 6):
        fabric.backward(model(**batch).loss)
        modes.append(list(modes_of(fabric.strategy)))
        if len(modes) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert modes == [["recompute"] * 2] * 4 + [["store"] * 2] * 2


def test_budget_of_a_run_that_goes_on_is_planned_anew(tmp_path, memory):
    strategy = LigerSingleDeviceStrategy(memory_budget=0.5)
    module, _, trainer = fit(tmp_path, strategy, 3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(0, 3))
    assert module.num_runs == [2 * (3 + 2)] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy_class", [LigerSingleDeviceStrategy, LigerDDPStrategy])
def test_step_that_runs_out_of_memory_fails_with_the_plan(tmp_path, memory, where, strategy_class):
    class RunsOut(DroppingLM):
        def on_train_batch_start(self, batch, batch_idx):
            def fail(*_):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

            layer = self.model.model.layers[0]
            if batch_idx == 4:
                (layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook)(fail)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(tmp_path, strategy_class(kernels="none", memory_budget=0.5), 6, RunsOut())
    message = str(raised.value)
    assert message.startswith("with memory_budget=0.5 and this plan: all 2 layers stored")
    assert all(text in message for text in ("fewer", "Tried to allocate"))
    assert message.count("plan:") == 1
