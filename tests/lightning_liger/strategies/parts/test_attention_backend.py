"""Strategies and the callback set the order of attention backends in the layers of models, and nowhere else."""

import pickle
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from lightning_liger import (
    FabricLigerModelParallelStrategy,
    LigerCallback,
    LigerDDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.cli import LigerCLI
from tests.lightning_liger.strategies.parts import test_activations
from tests.lightning_liger.strategies.parts.test_activations import WithoutLayers, fit
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    make_batches,
    make_loader,
    make_trainer,
)

MATH = SDPBackend.MATH.value
TRAINER = {**test_activations.TRAINER, "liger_model_parallel": LigerModelParallelStrategy}
FABRIC = {**test_activations.FABRIC, "liger_model_parallel": FabricLigerModelParallelStrategy}


def first() -> int:
    return torch._C._get_sdp_priority_order()[0]


def note_orders(model: nn.Module) -> dict[str, set[int]]:
    """The backends that are tried first in attention and in the head of a Llama, filled while it runs."""
    found: dict[str, set[int]] = {"attention": set(), "head": set()}
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda *_: found["attention"].add(first()))
    model.lm_head.register_forward_pre_hook(lambda *_: found["head"].add(first()))
    return found


class NotingLM(LM):
    orders: dict[str, set[int]]

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            super().configure_model()
            self.orders = note_orders(self.model)


@pytest.mark.parametrize(("name", "kernels"), [*((name, "auto") for name in TRAINER), ("liger", "none")])
def test_trainer_sets_the_order_in_layers(tmp_path, name, kernels):
    before, module = first(), NotingLM()
    strategy = TRAINER[name](kernels=kernels, attention_backend="math", activation_checkpointing=1)
    _, _, trainer = fit(tmp_path, strategy, 2, module)
    trainer.validate(module, make_loader(1, 1), verbose=False)
    assert before != MATH
    assert module.orders == {"attention": {MATH}, "head": {before}}
    assert first() == before


@pytest.mark.parametrize("name", FABRIC)
def test_fabric_sets_the_order_in_layers(name):
    before = first()
    fabric = L.Fabric(strategy=FABRIC[name](attention_backend="math"), accelerator="cpu", devices=1)
    fabric.launch()
    model = build_model()
    orders = note_orders(model)
    model = fabric.setup_module(model)
    (batch,) = make_batches(0, 1)
    fabric.backward(model(**batch).loss)
    assert orders == {"attention": {MATH}, "head": {before}}
    assert first() == before


@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_callback_sets_the_order_in_layers(tmp_path, kernels):
    before, module = first(), NotingLM()
    callback = LigerCallback(kernels=kernels, attention_backend="math")
    make_trainer(callback, root=tmp_path, strategy="auto").fit(module, make_loader(0, 1))
    assert module.orders == {"attention": {MATH}, "head": {before}}


@pytest.mark.parametrize("options", [{"attention_backend": None}, {"attention_backend": "auto"}, {}], ids=str)
def test_order_stays_where_none_is_better(tmp_path, options):
    module = NotingLM()
    fit(tmp_path, LigerSingleDeviceStrategy(**options), 1, module)
    assert module.orders == {"attention": {first()}, "head": {first()}}


def test_no_layer_asks_for_an_order_unless_one_is_wanted(tmp_path):
    strategy = LigerSingleDeviceStrategy()
    fit(tmp_path, strategy, 1, LM())
    (controlled,) = strategy._activations.controlled
    assert controlled.attention is None


@pytest.mark.parametrize("backend", ["math", "auto"])
def test_models_without_layers(tmp_path, backend):
    trainer = make_trainer(root=tmp_path, strategy=LigerSingleDeviceStrategy(kernels="none", attention_backend=backend))
    if backend == "auto":
        trainer.fit(WithoutLayers(), make_loader(0, 1))
        return
    with pytest.raises(ValueError, match=r"attention_backend='math' needs a model with repeated layers.*sdpa_kernel"):
        trainer.fit(WithoutLayers(), make_loader(0, 1))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_model_that_does_not_call_pytorchs_attention_is_warned_of(tmp_path, implementation):
    module = LM()
    module.configure_model()
    module.model.set_attn_implementation(implementation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, LigerSingleDeviceStrategy(attention_backend="math"), 1, module)
    found = [str(each.message) for each in caught if "attention_backend" in str(each.message)]
    assert len(found) == (implementation == "eager")
    assert all("attention_backend='math' has no effect" in text and "'eager'" in text for text in found)


def test_strategy_is_pickled_with_its_backend():
    strategy = pickle.loads(pickle.dumps(LigerDDPStrategy(attention_backend="cudnn")))
    assert strategy._activations.attention_backend == "cudnn"


@pytest.mark.parametrize("strategy", ["SingleDevice", "DDP", "FSDP", "ModelParallel", "DeepSpeed"])
def test_yaml_has_the_argument(tmp_path, monkeypatch, strategy):
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    (tmp_path / "config.yaml").write_text(
        f"trainer:\n  strategy:\n    class_path: lightning_liger.Liger{strategy}Strategy\n    init_args:\n"
        "      attention_backend: cudnn\n  devices: 1\n  accelerator: cpu\n  logger: false\n"
        "model: lightning.pytorch.demos.boring_classes.BoringModel\n"
        "data: lightning.pytorch.demos.boring_classes.BoringDataModule\n",
        encoding="utf-8",
    )
    made = LigerCLI(args=[f"--config={tmp_path / 'config.yaml'}"], run=False).trainer.strategy._activations
    assert made.attention_backend == "cudnn"
