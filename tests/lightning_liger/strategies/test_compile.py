"""``compile=``: training with compiled layers or models is that without, under each engine."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.patching.float8 import Float8Recipe, fp8_share
from lightning_liger.strategies.parts.compilation import Compilation
from tests.lightning_liger.strategies.workers.distributed import LM, build_model, make_batches
from tests.lightning_liger.strategies.workers.trainings import (
    assert_same_parameters,
    fit,
    fit_with_fabric,
    rank_main,
)
from tests.lightning_liger.tiny import tiny_batch, tiny_llama

LAYERS = {"scope": "layers", "backend": "aot_eager", "dynamic": False}  # on CPUs tests of Inductor would take minutes
MODEL = {"scope": "model", "backend": "aot_eager"}
NUM_STEPS = 6
# Each engine once, and each scope with the Trainer and with Fabric; one device has the other pairs.
ENGINES = {
    "ddp": (LigerDDPStrategy, {"compile": LAYERS}),
    "fsdp, recomputed": (LigerFSDPStrategy, {"compile": LAYERS, "activation_checkpointing": "full"}),
    "model_parallel": (LigerModelParallelStrategy, {"compile": LAYERS, "activation_checkpointing": 1}),
    "fabric ddp": (FabricLigerDDPStrategy, {"compile": MODEL}),
    "fabric model_parallel": (FabricLigerModelParallelStrategy, {"compile": LAYERS}),
}


def one(run: dict[str, Any], strategy: Any, name: str) -> dict[str, Any]:
    batches = make_batches(run["rank"], NUM_STEPS)
    if name.startswith("fabric"):
        return fit_with_fabric(run, strategy, build_model(), batches)
    plans: list[str] = []
    module = LM()
    module.on_train_end = lambda: plans.append(strategy.activation_plan)  # type: ignore[method-assign]
    return fit(run, strategy, module, batches, accumulate_grad_batches=2, gradient_clip_val=0.5) | {"plan": plans[0]}


def results(run: dict[str, Any]) -> dict[str, Any]:
    """What a rank saw under each engine, compiled and not."""
    found = {}
    for name, (strategy_class, options) in ENGINES.items():
        torch.compiler.reset()
        found[name] = one(run, strategy_class(**options), name)
        found[f"{name}, eager"] = one(run, strategy_class(**options | {"compile": False}), name)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name in ("losses", "norms"):
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)
    assert_same_parameters(found["whole"], expected["whole"], 10 * tolerance)


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_train_as_eager_ones(ranks: Any, name: str) -> None:
    for found, expected in zip(ranks.of(name), ranks.of(f"{name}, eager"), strict=True):
        assert_same(found, expected, 2e-4 if ranks.device == "cuda" else 1e-5)
        if not name.startswith("fabric"):
            assert "compile={'scope': " in found["plan"]  # on GPUs after what it says of cheap tensors
            assert found["plan"].endswith(" times in it and 0 times later")
            assert "compile" not in expected["plan"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "options",
    [
        {"compile": LAYERS},
        {"compile": MODEL},
        {"compile": LAYERS, "activation_checkpointing": 1},
        {"compile": LAYERS, "kernels": "none"},
        pytest.param({"compile": True}, marks=pytest.mark.gpu),
        pytest.param({"compile": "model"}, marks=pytest.mark.gpu),
        pytest.param({"compile": "layers", "memory_budget": 0.5}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_one_device_trains_resumes_and_validates_as_eager(
    one_process: Any, device: str, options: dict[str, Any]
) -> None:
    if "memory_budget" in options and device == "cpu":
        pytest.skip("a budget needs a GPU")
    torch.compiler.reset()
    outcomes, keys = [], []
    for compiles in (False, True):
        chosen = options | ({} if compiles else {"compile": False})
        name = f"{compiles}.ckpt"
        fit(one_process, LigerSingleDeviceStrategy(**chosen), LM(), make_batches(0, 3), save_as=name)
        keys.append(torch.load(one_process["folder"] / name, weights_only=False)["state_dict"].keys())
        # Each goes on from the checkpoint of the other.
        module = LM()
        strategy = LigerSingleDeviceStrategy(**chosen)
        path = one_process["folder"] / "False.ckpt"
        outcomes.append(fit(one_process, strategy, module, make_batches(0, NUM_STEPS), ckpt_path=path, max_epochs=2))
    assert keys[0] == keys[1]
    assert_same(outcomes[1], outcomes[0], {"cpu": 1e-5, "cuda": 2e-3}[device])


def test_layers_are_one_graph_and_copies_are_not_compiled(one_process: Any) -> None:
    torch.compiler.reset()
    strategy = FabricLigerSingleDeviceStrategy(compile=LAYERS | {"fullgraph": True})
    fit_with_fabric(one_process, strategy, build_model(), make_batches(0, 2))
    assert strategy._activations.compilation._num_traces == 1
    other = type(strategy._activations.compilation)(LAYERS)
    assert other.summary == ""


def test_gradients_of_float8_are_as_near_when_compiled() -> None:
    found, shares = [], []
    recipe = Float8Recipe(filter=["*"], min_tokens=1)
    for options in ({}, {"fp8": recipe}, {"fp8": recipe, "compile": LAYERS}):
        torch.compiler.reset()
        model = tiny_llama(use_cache=False, hidden_size=64, head_dim=16, intermediate_size=96).train()
        strategy = FabricLigerSingleDeviceStrategy(**options)
        fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1, precision="bf16-mixed")
        fabric.backward(fabric.setup_module(model)(**tiny_batch()).loss)
        found.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
        shares.append(fp8_share(model))
    wide, eager, compiled = found
    assert shares == [None, 1.0, 1.0]
    assert 0.01 < (eager - wide).norm() / wide.norm() < 0.5  # it does multiply in float8
    assert (compiled - wide).norm() < 1.2 * (eager - wide).norm()


@pytest.mark.parametrize(
    ("strategy_class", "options", "message"),
    [
        (LigerFSDPStrategy, {"compile": "model"}, "compile='model' is for 'liger' and 'liger_ddp', got LigerFSDPStrat"),
        (LigerDDPStrategy, {"compile": "model", "activation_checkpointing": 2}, "activation_checkpointing=2 cannot be"),
        (LigerDDPStrategy, {"compile": "layers", "cuda_graphs": True}, "compile='layers' cannot be combined with cuda"),
        (FabricLigerDDPStrategy, {"compile": "layer"}, r"compile must be .*'layers' or 'model'.*, got 'layer'"),
        (
            LigerDDPStrategy,
            {"compile": {"scope": "models"}},
            r"compile must be .*as 'scope', got \{'scope': 'models'\}",
        ),
        (LigerDeepSpeedStrategy, {"compile": True}, "compile=True is not supported under DeepSpeed"),
        (
            LigerModelParallelStrategy,
            {"compile": True, "tensor_parallel_size": 2},
            "needs tensor_parallel_size=1, got 2",
        ),
        (LigerDDPStrategy, {"compile": {"dynamics": True}}, r"torch.compile, got 'dynamics' \(did you mean 'dynamic'"),
    ],
    ids=str,
)
def test_wrong_choices_are_refused_when_the_strategy_is_made(
    strategy_class: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_class(**options)


def test_wrong_types_and_models_are_refused_and_yaml_chooses(one_process: Any, made_by_yaml: Any) -> None:
    with pytest.raises(TypeError, match="compile must be a bool, 'layers', 'model' or a dict, got 3"):
        LigerDDPStrategy(compile=3)  # type: ignore[arg-type]
    without = LM(build=lambda module: nn.Linear(2, 2))
    with pytest.raises(ValueError, match="compile='layers' needs a model with repeated layers, got LM"):
        fit(one_process, LigerSingleDeviceStrategy(compile="layers"), without, make_batches(0, 1))
    with pytest.raises(ValueError, match="compile='model' needs a Hugging Face model, got LM without one"):
        fit(one_process, LigerSingleDeviceStrategy(compile="model"), without, make_batches(0, 1))
    for value, scope in ((False, None), ("model", "model"), ({"scope": "layers", "dynamic": True}, "layers")):
        options = {"class_path": "lightning_liger.LigerSingleDeviceStrategy", "init_args": {"compile": value}}
        found: Compilation = made_by_yaml(options)._activations.compilation
        assert found.scope == scope
        assert found.options == ({"dynamic": True} if isinstance(value, dict) else {})


if __name__ == "__main__":
    rank_main(results)
