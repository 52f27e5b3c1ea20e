"""Trainings under DeepSpeed that ``test_deepspeed.py`` compares with one process."""

import weakref
from collections.abc import Callable
from typing import Any

import deepspeed
import lightning as L
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import (
    FabricLigerDeepSpeedStrategy,
    LigerCausalLM,
    LigerDeepSpeedStrategy,
    divergence,
    lazy_logits,
    token_loss,
    token_scores,
)
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    AddsToLoss,
    Batch,
    KindsOfLogits,
    build_model,
    logit_counts,
    make_batches,
    make_uneven_batches,
    outside_loss,
)
from tests.lightning_liger.strategies.workers.engines import CHANGES, with_adapters
from tests.lightning_liger.strategies.workers.trainings import (
    drop_objects,
    fit,
    fit_with_fabric,
    loss_of_labels,
    loss_of_logits,
    rank_main,
    whole_parameters,
)

NUM_STEPS = 6
MAX_NORM = 0.5
"""Below the norm in every step of the tests."""
PRETRAINED = "pretrained"
"""The folder of a checkpoint of the stock model."""

STAGES = (2, 3)
CONFIGS: dict[int, dict[str, Any]] = {
    # With DeepSpeed's own threshold no parameter of a tiny model is ever freed.
    stage: {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage, **own}}
    for stage, own in ((2, {}), (3, {"stage3_param_persistence_threshold": 0}))
}
PRECISIONS = {2: ("bf16-mixed", "16-mixed"), 3: ("bf16-mixed", "bf16-true")}


def _is_supported(precision: str) -> bool:
    """DeepSpeed trains in float16 on some processors only."""
    from deepspeed.accelerator import get_accelerator

    return not precision.startswith("16") or bool(get_accelerator().is_fp16_supported())


class WholeAtFirst(LM):
    """Has its parameters before DeepSpeed can partition them as they are made."""

    def __init__(self, tied: bool = False, build: Callable[[Any], nn.Module] | None = None) -> None:
        super().__init__(tied, build)
        self.model = self.build(self)


class AddsToLossWholeAtFirst(AddsToLoss, WholeAtFirst):
    pass


def _partitioned_at_once(tied: bool) -> LM:
    """Makes its parameters where ZeRO-3 partitions each module's at once, and copies known values into them."""
    stock = build_model(tied)

    def build(module: LM) -> nn.Module:
        model = AutoModelForCausalLM.from_config(stock.config, dtype=torch.get_default_dtype())
        for name, parameter in model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(stock.get_parameter(name))
        return model

    return LM(build=build)


class NeedsWholeLogits(WholeAtFirst):
    """A loss that is not fused."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return outside_loss(self.model(batch["input_ids"]).logits.sigmoid(), batch["labels"])


class OwnStep(WholeAtFirst):
    """A step that goes through the module's own forward."""

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])
        self.weight_in_loss = weakref.ref(logits.head.weight)
        return outside_loss(logits, batch["labels"])


class HeadsWeight(L.Callback):
    """Notes after each step whether what the loss had of the head's weight is still there."""

    def __init__(self) -> None:
        self.is_free: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        status = getattr(pl_module.model.lm_head.weight, "ds_status", ZeroParamStatus.NOT_AVAILABLE)
        self.is_free.append(status == ZeroParamStatus.NOT_AVAILABLE and pl_module.weight_in_loss() is None)


def _fit(run: dict[str, Any], strategy: Any, module: Any, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
    strategy = LigerDeepSpeedStrategy(config=CONFIGS[strategy]) if strategy in CONFIGS else strategy
    batches = options.pop("make", make_batches)(run["rank"], options.pop("num_batches", NUM_STEPS))
    result = fit(run, strategy, module, batches, *callbacks, **options)
    strategy = result["trainer"].strategy
    return result | {"plan": strategy.activation_plan, "loss_scale": strategy.deepspeed_engine.optimizer.loss_scale}


def _loss_of_scores(model: nn.Module, batch: Batch) -> Tensor:
    """The same loss out of scores and log-probabilities, and a divergence of the model from itself, which is 0."""
    with torch.no_grad(), lazy_logits():
        before = model(batch["input_ids"]).logits
    logits = model(batch["input_ids"]).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    kept = labels != -100
    scores = token_scores(logits, labels).log_probs
    total, _ = token_loss(logits, labels, lambda scores, index: -scores.log_probs)
    gathered = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][kept]
    return (total - scores.sum() - gathered.sum()) / (3 * kept.sum()) + divergence(logits, before, kind="jsd")


FABRIC_RUNS: dict[str, tuple[bool, Callable[[nn.Module, Batch], Tensor], int]] = {
    "fabric-labels": (False, loss_of_labels, 1),
    "fabric-logits": (True, loss_of_logits, 1),
    "fabric-scores": (False, _loss_of_scores, 3),
}
"""Whether the head is tied, the loss, and how many fused losses it has."""


def _fabric(run: dict[str, Any], stage: int, tied: bool, loss_of: Callable[..., Tensor]) -> dict[str, Any]:
    inner, gradients = build_model(tied), []

    def keep_gradient(fabric: Any, model: nn.Module, optimizer: Any) -> None:
        gradients.append(safe_get_full_grad(inner.lm_head.weight).cpu().clone())

    # Its timers fail if the engine does not know when backward starts.
    strategy = FabricLigerDeepSpeedStrategy(config=CONFIGS[stage] | {"wall_clock_breakdown": True})
    result = fit_with_fabric(run, strategy, inner, make_batches(run["rank"], NUM_STEPS), loss_of, keep_gradient)
    fabric, path = result["fabric"], run["folder"] / f"fabric-{stage}.ckpt"
    state = {"model": result["model"], "optimizer": result["optimizer"], "step": NUM_STEPS}
    fabric.save(path, state)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(inner.parameters()), modifier_rank=0):
        for parameter in inner.parameters():
            parameter.zero_()
    state["step"] = 0
    fabric.load(path, state)
    loaded = {"loaded": whole_parameters(inner, inner), "loaded_step": state["step"]}
    return result | {"head_gradients": gradients} | loaded


def _stages(run: dict[str, Any], stage: int) -> dict[str, Any]:
    module = KindsOfLogits()
    loader = DataLoader(make_batches(run["rank"], 2), batch_size=None)
    trainer = _fit(run, stage, module, num_batches=2)["trainer"]
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    trainer.predict(module, loader)
    return {"kinds": module.kinds, "logit_counts": logit_counts(module)}


def _run_stage(run: dict[str, Any], stage: int) -> dict[str, Any]:
    found = {name: _fabric(run, stage, tied, loss_of) for name, (tied, loss_of, _) in FABRIC_RUNS.items()}

    def train(name: str, strategy: Any = stage, module: Any = None, **options: Any) -> None:
        found[name] = _fit(run, strategy, module or WholeAtFirst(), **options)

    accumulated = {"accumulate_grad_batches": 2}
    train("untied")
    train("tied", module=WholeAtFirst(tied=True))
    train("uneven", module=AddsToLossWholeAtFirst(), make=make_uneven_batches, **accumulated)
    train("clipped", gradient_clip_val=MAX_NORM, **accumulated)
    found["stages"] = _stages(run, stage)
    found["precisions"] = [precision for precision in PRECISIONS[stage] if _is_supported(precision)]
    for precision in found["precisions"]:
        train(precision, num_batches=12, precision=precision)
    # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
    saved = f"stage-{stage}.ckpt"
    train("two-epochs", num_batches=2, max_epochs=2)
    train("first-epoch", num_batches=2, save_as=saved)
    train("second-epoch", num_batches=2, max_epochs=2, ckpt_path=run["folder"] / saved)
    if stage == 3:
        train("by-name", "liger_deepspeed_stage_3")
        train("recomputed", LigerDeepSpeedStrategy(config=CONFIGS[3], activation_checkpointing="full"))
        activations.memory_of = lambda device: FakeMemory(2**30)  # type: ignore[assignment]
        budget = LigerDeepSpeedStrategy(config=CONFIGS[3], memory_budget=0.5)
        train("planned", budget, make=make_uneven_batches, **accumulated)
    else:  # epochs of an odd number of micro-batches: the optimizer steps after the first one of the next
        train("unfinished", num_batches=NUM_STEPS // 2, max_epochs=2, **accumulated)
    return found


def _run_partitioned(run: dict[str, Any]) -> dict[str, Any]:
    """What is special about parameters that are partitioned."""
    found = {f"partitioned-{head}": _fit(run, 3, _partitioned_at_once(tied)) for head, tied in HEADS.items()}
    config = build_model().config.to_diff_dict()
    modules = {
        "from-config": LigerCausalLM(model_type=config.pop("model_type"), config=config),
        "from-pretrained": LigerCausalLM(pretrained=str(run["folder"] / PRETRAINED)),
    }
    for name, module in modules.items():
        found[name] = _fit(run, 3, module, limit_train_batches=0)
    released = HeadsWeight()
    found["own-step"] = _fit(run, 3, OwnStep(), released) | {"is_free": released.is_free}
    for name, make in OTHERS.items():
        found[name] = _fit(run, 3, make(), num_batches=4)
        plain = LigerDeepSpeedStrategy(kernels="none", config=CONFIGS[3])
        found[f"stock-{name}"] = _fit(run, plain, make(), num_batches=4)
    return found


OTHERS: dict[str, Callable[[], LM]] = {
    "frozen-head": lambda: WholeAtFirst(build=lambda module: CHANGES["without-head"]()),
    "adapted-tied": lambda: WholeAtFirst(
        build=lambda module: with_adapters("q_proj", "lm_head", model=build_model(tied=True))
    ),
    "whole-logits": NeedsWholeLogits,
}
"""What is trained with and without kernels under ZeRO-3."""


def results(run: dict[str, Any]) -> dict[Any, Any]:
    # DeepSpeed would compile it with the C++ compiler that it finds, for over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: dict[Any, Any] = {stage: _run_stage(run, stage) for stage in STAGES}
    found["partitioned"] = _run_partitioned(run)
    for runs in found.values():
        for result in runs.values():
            drop_objects(result)
    return found


if __name__ == "__main__":
    rank_main(results)
