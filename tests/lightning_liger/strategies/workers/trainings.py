"""Trainings of the tiny model: with the Trainer and with Fabric on several ranks, and in one process as it is.

Workers make tables of them, of which tests compare the results; :func:`rank_main` is the program of a rank.
"""

import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    Batch,
    logit_counts,
    make_optimizer,
    make_trainer,
    outside_loss,
    wrapped_units,
)

TOLERANCE = {"cpu": 1e-5, "cuda": 2e-4}
"""In float32: AdamW multiplies rounding differences, and GPUs sum in other orders."""


class Recorder(L.Callback):
    """Keeps what a run is compared by: losses and their dtype, norms as they are logged, dtypes of gradients."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.loss_dtypes: set[torch.dtype] = set()
        self.gradient_dtypes: set[torch.dtype] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradients = (parameter.grad for parameter in pl_module.parameters())
        self.gradient_dtypes |= {gradient.dtype for gradient in gradients if gradient is not None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.loss_dtypes.add(outputs["loss"].dtype)
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.norms.append(float(trainer.callback_metrics.get("grad_norm", math.nan)))


def fit(
    run: dict[str, Any],
    strategy: Any,
    module: Any,
    batches: list[Batch] | None,
    *callbacks: L.Callback,
    save_as: str | None = None,
    ckpt_path: Any = None,
    may_fail: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What one rank saw of a training of ``module.model``, and the trained parameters, or the error."""
    recorder = Recorder()
    options = {"accelerator": run["accelerator"], "devices": run["size"], **options}
    strategy = strategy() if callable(strategy) else strategy
    trainer = make_trainer(recorder, *callbacks, root=run["folder"], strategy=strategy, **options)
    loader = None if batches is None else DataLoader(batches, batch_size=None)
    try:
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    except (RuntimeError, ValueError) as error:
        if not may_fail:
            raise
        return {"error": f"{type(error).__name__}: {error}", "norms": recorder.norms}
    states = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    ]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    result = {
        "error": None,
        "losses": recorder.losses,
        "norms": recorder.norms,
        "loss_dtypes": recorder.loss_dtypes,
        "gradient_dtypes": recorder.gradient_dtypes,
        "parameter_dtypes": {parameter.dtype for parameter in module.parameters()},
        "buffer_dtypes": {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()},
        "state_dtypes": {state.dtype for state in states},
        "devices": {tensor.device.type for tensor in (*module.parameters(), *states)},
        "scale": None if scaler is None else scaler.get_scale(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "trainer": trainer,
        **described(trainer.strategy, module.model, trainer.strategy.model),
    }
    if save_as is not None:
        trainer.save_checkpoint(run["folder"] / save_as)
        result["whole_after_saving"] = whole_parameters(module.model, trainer.strategy.model)
    return result


def loss_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def loss_of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return outside_loss(model(batch["input_ids"]).logits, batch["labels"])


def fit_with_fabric(
    run: dict[str, Any],
    strategy: Any,
    inner: nn.Module,
    batches: list[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor] = loss_of_labels,
    after_backward: Callable[[Any, nn.Module, Any], Any] = lambda fabric, model, optimizer: None,
) -> dict[str, Any]:
    """The same with Fabric; ``norms`` are what ``after_backward`` returned in each step, ``errors`` what it raised."""
    strategy = strategy() if callable(strategy) else strategy
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=run["size"])
    fabric.launch()
    if type(fabric.strategy).__name__ == "FabricLigerDeepSpeedStrategy":
        model, optimizer = fabric.setup(inner, make_optimizer(inner.parameters()))
    else:
        model = fabric.setup_module(inner)
        optimizer = fabric.setup_optimizers(make_optimizer([each for each in model.parameters() if each.requires_grad]))
    losses, norms, errors = [], [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, {name: tensor.to(fabric.device) for name, tensor in batch.items()})
        fabric.backward(loss)
        errors.append(error_of(lambda: norms.append(after_backward(fabric, model, optimizer))))
        if errors[-1] is None:
            optimizer.step()
        losses.append(loss.item())
    return {
        **{"losses": losses, "norms": [_number(norm) for norm in norms], "errors": errors},
        **{"fabric": fabric, "model": model, "optimizer": optimizer},
        **described(fabric.strategy, inner, model._forward_module),
    }


def freeze(model: nn.Module, *names: str) -> nn.Module:
    """Freezes the parameters whose names have one of ``names`` in them."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(each in name for each in names))
    return model


def with_adapters(*layers: str, model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(8)
        # With the usual zeros in one of its factors, the other would get no gradient in the first step.
        return get_peft_model(model, LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False))


def described(strategy: Any, model: nn.Module, wrapped: nn.Module) -> dict[str, Any]:
    """What this rank holds of a trained model, and the whole of it."""
    report = getattr(strategy, "patch_report", None)
    own = [each.to_local() if isinstance(each, DTensor) else each for each in wrapped.parameters()]
    return {
        "num_replaced": 0 if report is None else report.num_replaced,
        "logit_counts": logit_counts(model),
        "num_own": sum(each.numel() for each in own),
        "units": [type(each).__name__ for each in wrapped.modules() if isinstance(each, FSDPModule)]
        or list(wrapped_units(wrapped).values()),
        "whole": whole_parameters(model, wrapped),
    }


def whole_parameters(model: nn.Module, wrapped: nn.Module, buffers: bool = False) -> dict[str, Tensor]:
    """Names and unsharded copies of the parameters of ``model``, which the engine trained in ``wrapped``."""
    parameters = list(model.parameters())
    gathered: Any = nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters)
    with gathered, FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        named = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers()) if buffers else {}
        return {
            name.replace("_fsdp_wrapped_module.", ""): (
                (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
            )
            for name, tensor in named.items()
        }


def error_of(function: Callable[[], Any]) -> str | None:
    """The error that a call raised, with its type."""
    try:
        function()
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _number(norm: Any) -> float | None:
    return norm if norm is None else float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class Reference(NamedTuple):
    """The losses of each rank's batches, norms before clipping, parameters in the end, the mean loss of all tokens."""

    losses: list[list[float]]
    norms: list[float]
    parameters: dict[str, Tensor]
    mean: float


def reference_training(
    model: nn.Module,
    batches: list[list[Batch]],
    device: str = "cpu",
    *,
    per_token: bool = True,
    num_micro_batches: int = 1,
    max_norm: float = math.inf,
    max_value: float = math.inf,
    change: Callable[[Tensor], Tensor] = lambda loss: loss,
    optimized: Callable[[str], bool] = lambda name: True,
    num_fits: int = 1,
) -> Reference:
    """One process, a stock model, a plain loop over the batches of all ranks; each fit has a new optimizer.

    The mean of a step is over its tokens, or over the means of its batches. ``change`` is what a user makes of the loss
    of a micro-batch; ``optimized`` tells by the name of a trained parameter whether the optimizer gets it.
    """
    model.to(device)
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and optimized(name)]
    losses: list[list[float]] = [[] for _ in batches]
    norms, total, num_tokens = [], 0.0, 0
    for _ in range(num_fits):
        optimizer = make_optimizer(parameters)
        for start in range(0, len(batches[0]), num_micro_batches):
            optimizer.zero_grad()
            window = [
                (rank, batch) for rank, own in enumerate(batches) for batch in own[start : start + num_micro_batches]
            ]
            counts = [int((batch["labels"][:, 1:] != -100).sum()) for _, batch in window]
            for (rank, batch), count in zip(window, counts, strict=True):
                loss = change(model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss)
                losses[rank].append(loss.item() if count else 0.0)
                total, num_tokens = total + losses[rank][-1] * count, num_tokens + count
                if count:
                    (loss * (count / sum(counts) if per_token else 1 / len(window))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm).item())
            torch.nn.utils.clip_grad_value_(parameters, max_value)
            optimizer.step()
    whole = {name: each.detach().cpu() for name, each in model.named_parameters(remove_duplicate=False)}
    return Reference(losses, norms, whole, total / num_tokens)


def assert_trained_as(
    reference: Reference, runs: list[dict[str, Any]], device: str, *, ranks_per_loss: int = 1
) -> None:
    """Losses, norms where they were recorded, and parameters of each rank are those of the reference."""
    rtol = TOLERANCE[device]
    for rank, run in enumerate(runs):
        torch.testing.assert_close(run["losses"], reference.losses[rank // ranks_per_loss], rtol=rtol, atol=1e-7)
        if not any(norm is None or math.isnan(norm) for norm in run["norms"]):
            torch.testing.assert_close(run["norms"], reference.norms, rtol=10 * rtol, atol=0.0)
        assert_same_parameters(run["whole"], reference.parameters, 10 * rtol)


def assert_same_parameters(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    """But for those of unused layers: FSDP gives them gradients of zeros, with which AdamW lets them decay."""
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        if "unused" not in name:
            # AdamW moves a parameter by up to 3e-3 in a step, also where its gradient is hardly more than rounding.
            assert parameter.shape == expected[name].shape, name
            error = (parameter - expected[name]).abs().flatten()
            assert error.kthvalue(max(1, int(0.995 * error.numel()))).values <= atol, (name, error.topk(5).values)
            assert error.max() <= 10 * atol, (name, error.max())


def rank_main(results: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs one rank of :func:`~tests.lightning_liger.strategies.workers.distributed.launch`: saves its results."""
    torch.set_num_threads(1)
    device, folder = sys.argv[1], Path(sys.argv[2])
    run = {
        "rank": int(os.environ.get("RANK") or os.environ["SLURM_PROCID"]),
        "size": int(os.environ.get("WORLD_SIZE", NUM_RANKS)),
        "folder": folder,
        "device": device,
        "accelerator": {"cuda": "gpu"}.get(device, device),
    }
    found = results(run)
    for result in found.values():
        _drop_objects(result)
    torch.save(found, folder / f"rank{run['rank']}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _drop_objects(result: Any) -> None:
    """Drops what cannot be saved of a run."""
    if isinstance(result, dict):
        for name in ("trainer", "fabric", "model", "optimizer"):
            result.pop(name, None)
        for each in result.values():
            _drop_objects(each)
