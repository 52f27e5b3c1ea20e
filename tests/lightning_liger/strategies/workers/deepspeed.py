"""The worker that trains under DeepSpeed on two processes in every way that ``test_deepspeed.py`` compares.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning as L
import peft
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
    NUM_RANKS,
    AddsToLoss,
    Batch,
    KindsOfLogits,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
    outside_loss,
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

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied)
        self.model = build_model(tied)


class AddsToLossWholeAtFirst(AddsToLoss, WholeAtFirst):
    pass


class PartitionedAtOnce(LM):
    """Makes its parameters where ZeRO-3 partitions each module's at once, and copies known values into them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied)
        stock = build_model(tied)
        self.config, self.values = stock.config, stock.state_dict()

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.get_default_dtype())
        for name, parameter in self.model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(self.values[name])


class Frozen(WholeAtFirst):
    """Trains all but one child of the model."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        getattr(self.model, frozen).requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Adapted(Frozen):
    """Trains low-rank adapters of the head and of attention."""

    def __init__(self, tied: bool = False) -> None:
        LM.__init__(self, tied)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
            self.model = peft.get_peft_model(build_model(tied), config)


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


# What one rank does


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().cpu().float().clone() for name, parameter in parameters}


def _trainer(run: dict[str, Any], strategy: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    strategy = LigerDeepSpeedStrategy(config=CONFIGS[strategy]) if strategy in CONFIGS else strategy
    return make_trainer(
        *callbacks, root=run["folder"], strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS, **options
    )


def _loader(run: dict[str, Any], make: Callable[..., list[Batch]] = make_batches, num: int = NUM_STEPS) -> Any:
    return DataLoader(make(run["rank"], num), batch_size=None)


def _fit(
    run: dict[str, Any],
    strategy: Any,
    module: LM | LigerCausalLM,
    *callbacks: L.Callback,
    make: Callable[..., list[Batch]] = make_batches,
    num_batches: int = NUM_STEPS,
    save_as: str | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    recorder = Losses()
    trainer = _trainer(run, strategy, recorder, *callbacks, **options)
    trainer.fit(module, _loader(run, make, num_batches), ckpt_path=ckpt_path)
    if save_as is not None:
        trainer.save_checkpoint(run["folder"] / save_as)
    return {
        "losses": recorder.losses,
        "num_replaced": trainer.strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(module),
        "plan": trainer.strategy.activation_plan,
        "loss_scale": trainer.strategy.deepspeed_engine.optimizer.loss_scale,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "whole": _whole(module.model),
        "buffer_dtypes": {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()},
    }


def _without_kernels(stage: int) -> LigerDeepSpeedStrategy:
    return LigerDeepSpeedStrategy(kernels="none", config=CONFIGS[stage])


def _loss_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _loss_of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return outside_loss(model(batch["input_ids"]).logits, batch["labels"])


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


def _fabric(
    run: dict[str, Any], stage: int, tied: bool, loss_of: Callable[[nn.Module, Batch], Tensor]
) -> dict[str, Any]:
    # Its timers fail if the engine does not know when backward starts.
    strategy = FabricLigerDeepSpeedStrategy(config=CONFIGS[stage] | {"wall_clock_breakdown": True})
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    inner = build_model(tied)
    model, optimizer = fabric.setup(inner, make_optimizer(inner.parameters()))
    losses, head_gradients = [], []
    for batch in make_batches(run["rank"], NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, {name: tensor.to(fabric.device) for name, tensor in batch.items()})
        fabric.backward(loss)
        head_gradients.append(safe_get_full_grad(inner.lm_head.weight).cpu().clone())
        optimizer.step()
        losses.append(loss.item())
    state = {"model": model, "optimizer": optimizer, "step": NUM_STEPS}
    fabric.save(run["folder"] / f"fabric-{stage}.ckpt", state)
    trained = _whole(inner)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(inner.parameters()), modifier_rank=0):
        for parameter in inner.parameters():
            parameter.zero_()
    state["step"] = 0
    fabric.load(run["folder"] / f"fabric-{stage}.ckpt", state)
    return {
        "losses": losses,
        "num_replaced": strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(inner),
        "head_gradients": head_gradients,
        "whole": trained,
        "loaded": _whole(inner),
        "loaded_step": state["step"],
    }


def _stages(run: dict[str, Any], stage: int) -> dict[str, Any]:
    module = KindsOfLogits()
    trainer = _trainer(run, stage)
    trainer.fit(module, _loader(run, num=2), _loader(run, num=2))
    trainer.test(module, _loader(run, num=2), verbose=False)
    trainer.predict(module, _loader(run, num=2))
    return {"kinds": module.kinds, "logit_counts": logit_counts(module)}


def _run_stage(run: dict[str, Any], stage: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for head, tied in HEADS.items():
        results[head] = _fit(run, stage, WholeAtFirst(tied))
        results[f"fabric-labels-{head}"] = _fabric(run, stage, tied, _loss_of_labels)
        results[f"fabric-logits-{head}"] = _fabric(run, stage, tied, _loss_of_logits)
        results[f"fabric-scores-{head}"] = _fabric(run, stage, tied, _loss_of_scores)
    results["by-name"] = _fit(run, f"liger_deepspeed_stage_{stage}", WholeAtFirst())
    results["uneven"] = _fit(run, stage, AddsToLossWholeAtFirst(), make=make_uneven_batches, accumulate_grad_batches=2)
    results["clipped"] = _fit(run, stage, WholeAtFirst(), accumulate_grad_batches=2, gradient_clip_val=MAX_NORM)
    recompute = LigerDeepSpeedStrategy(config=CONFIGS[stage], activation_checkpointing="full")
    results["recomputed"] = _fit(run, recompute, WholeAtFirst())
    activations.memory_of = lambda device: FakeMemory(2**30)
    budget = LigerDeepSpeedStrategy(config=CONFIGS[stage], memory_budget=0.5)
    results["planned"] = _fit(run, budget, WholeAtFirst(), make=make_uneven_batches, accumulate_grad_batches=2)
    results["stages"] = _stages(run, stage)
    results["precisions"] = [precision for precision in PRECISIONS[stage] if _is_supported(precision)]
    for precision in results["precisions"]:
        results[precision] = _fit(run, stage, WholeAtFirst(), num_batches=12, precision=precision)
    # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
    saved = f"stage-{stage}.ckpt"
    results["two-epochs"] = _fit(run, stage, WholeAtFirst(), num_batches=2, max_epochs=2)
    results["first-epoch"] = _fit(run, stage, WholeAtFirst(), num_batches=2, save_as=saved)
    results["second-epoch"] = _fit(
        run, stage, WholeAtFirst(), num_batches=2, max_epochs=2, ckpt_path=run["folder"] / saved
    )
    return results


def _run_unfinished(run: dict[str, Any]) -> dict[str, Any]:
    """Epochs of an odd number of micro-batches: DeepSpeed's optimizer steps after the first one of the next."""
    return _fit(run, 2, WholeAtFirst(), num_batches=NUM_STEPS // 2, max_epochs=2, accumulate_grad_batches=2)


def _run_partitioned(run: dict[str, Any]) -> dict[str, Any]:
    """What is special about parameters that are partitioned."""
    results: dict[str, Any] = {}
    for head, tied in HEADS.items():
        results[f"partitioned-{head}"] = _fit(run, 3, PartitionedAtOnce(tied))
    config = build_model().config.to_diff_dict()
    modules = {
        "from-config": LigerCausalLM(model_type=config.pop("model_type"), config=config),
        "from-pretrained": LigerCausalLM(pretrained=str(run["folder"] / PRETRAINED)),
    }
    for name, module in modules.items():
        results[name] = _fit(run, 3, module, limit_train_batches=0)
    released = HeadsWeight()
    results["own-step"] = _fit(run, 3, OwnStep(), released) | {"is_free": released.is_free}
    others: dict[str, Callable[[], LM]] = {
        "frozen-backbone": lambda: Frozen("model"),
        "frozen-head": lambda: Frozen("lm_head"),
        "adapted-untied": Adapted,
        "adapted-tied": lambda: Adapted(True),
        "whole-logits": NeedsWholeLogits,
    }
    for name, make in others.items():
        results[name] = _fit(run, 3, make(), num_batches=4)
        results[f"stock-{name}"] = _fit(run, _without_kernels(3), make(), num_batches=4)
    return results


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    # DeepSpeed would compile it with the C++ compiler that it finds, for over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": {"cuda": "gpu"}.get(device, device)}
    results: dict[str, Any] = {stage: _run_stage(run, stage) for stage in STAGES}
    results[2]["unfinished"] = _run_unfinished(run)
    results["partitioned"] = _run_partitioned(run)
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
