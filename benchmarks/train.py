"""Trains one yaml under several strategies, one after another, and compares speed and memory.

    python -m benchmarks.train --config examples/llama3_8b.yaml --out benchmarks/results/train_llama3_8b.json

The arms: ``liger_fsdp`` runs the yaml as it is; ``fsdp`` runs it with Lightning's own FSDPStrategy, the same layers
wrapped and checkpointed, and plain Hugging Face code; ``liger_kernel`` is ``fsdp`` with the patches and the loss of the
liger-kernel package; ``liger_model_parallel`` runs the yaml under FSDP2, with the same layers sharded and checkpointed.

With ``--devices 1,2,4`` every arm is trained on each number of GPUs, with the same number of tokens per GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy

from benchmarks.environment import environment
from lightning_liger import LigerCausalLM, LigerModelParallelStrategy, TrainingSummary
from lightning_liger.cli import LigerCLI
from lightning_liger.strategies.parts.policies import decoder_layer_classes

ARMS = ("fsdp", "liger_kernel", "liger_fsdp", "liger_model_parallel")


class PlainFSDPStrategy(FSDPStrategy):
    """Lightning's strategy, wrapping and checkpointing the layers that LigerFSDPStrategy chooses by default."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        from lightning.fabric.strategies.fsdp import _activation_checkpointing_kwargs, _auto_wrap_policy_kwargs

        layers = decoder_layer_classes(model)
        self.kwargs = _auto_wrap_policy_kwargs(layers, self.kwargs)
        self._activation_checkpointing_kwargs = _activation_checkpointing_kwargs(None, layers)
        return super()._setup_model(model)


class HuggingFaceLossLM(LigerCausalLM):
    """The same model, trained on the loss that its forward returns, which liger-kernel patches."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss


class ArmCLI(LigerCLI):
    arm: str

    @property
    def is_ours(self) -> bool:
        return self.arm in ("liger_fsdp", "liger_model_parallel")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.arm == "liger_model_parallel":
            layers = self.config.trainer.strategy.init_args.activation_checkpointing_policy
            kwargs["strategy"] = LigerModelParallelStrategy(activation_checkpointing_policy=layers)
        elif not self.is_ours:
            kwargs["strategy"] = PlainFSDPStrategy()
        return super().instantiate_trainer(**kwargs)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if self.arm == "liger_kernel":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        if not self.is_ours:
            self.model.__class__ = HuggingFaceLossLM


def run_arm(arm: str, config: str, steps: int, out: Path, overrides: list[str]) -> None:
    """Trains in this process (and those that Lightning starts) and writes the results."""
    ArmCLI.arm = arm
    args = [
        f"--config={config}",
        f"--trainer.max_steps={steps}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_checkpointing=false",
        "--trainer.callbacks=null",
        "--trainer.enable_progress_bar=false",
        "--summary.skip_steps=5",
        *overrides,
    ]
    cli = ArmCLI(args=args, run=False, save_config_callback=None)
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].detach())

    cli.trainer.callbacks.append(Losses())
    cli.trainer.fit(cli.model, cli.datamodule)
    if cli.trainer.is_global_zero:
        summary = next(c for c in cli.trainer.callbacks if isinstance(c, TrainingSummary))
        report = cli.trainer.strategy.patch_report.as_dict() if cli.is_ours else None
        result = {"arm": arm, **summary.results, "step_losses": torch.stack(losses).tolist(), "replaced": report}
        out.write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the yaml to train")
    parser.add_argument("--arms", default="fsdp,liger_kernel,liger_fsdp", help=f"comma separated, out of {ARMS}")
    parser.add_argument("--devices", default="auto", help="numbers of devices, comma separated; the yaml's by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--run-arm", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.run_arm:
        run_arm(options.run_arm, options.config, options.steps, options.out, overrides)
        return
    arms = options.arms.split(",")
    if not set(arms) <= set(ARMS):
        parser.error(f"--arms takes {ARMS}, got {options.arms!r}")
    results = []
    for devices in options.devices.split(","):
        for arm in arms:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "arm.json"
                own = [f"--config={options.config}", f"--steps={options.steps}", f"--out={out}", f"--run-arm={arm}"]
                where = [] if devices == "auto" else [f"--trainer.devices={devices}"]
                code = subprocess.call([sys.executable, "-m", "benchmarks.train", *own, *where, *overrides])
                if code or not out.exists():
                    print(f"{arm} on {devices}: failed with exit code {code}", file=sys.stderr)
                    continue
                results.append(json.loads(out.read_text()))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(
                json.dumps({"environment": environment(), "config": options.config, "arms": results}, indent=1)
            )
    _print_table(results)


def _print_table(results: list[dict[str, Any]]) -> None:
    """Prints a table of the arms.

    Speed and memory are relative to the first arm on as many devices, scaling to the first run of the same arm.
    """
    print(f"{'arm':22}{'devices':>8}{'tokens/s/device':>16}{'peak GiB':>10}", end="")
    print(f"{'speed':>8}{'memory':>8}{'scaling':>8}{'loss':>8}")
    for result in results:
        peer = next(other for other in results if other["processes"] == result["processes"])
        first = next(other for other in results if other["arm"] == result["arm"])
        speed = _speed_of_device(result)
        print(
            f"{result['arm']:22}{result['processes']:8}{speed:16.0f}{result['peak_memory_bytes'] / 2**30:10.2f}"
            f"{speed / _speed_of_device(peer):7.3f}x{result['peak_memory_bytes'] / peer['peak_memory_bytes']:7.3f}x"
            f"{speed / _speed_of_device(first):8.3f}{result['step_losses'][-1]:8.3f}"
        )


def _speed_of_device(result: dict[str, Any]) -> float:
    return result["tokens_per_second"] / result["processes"]


if __name__ == "__main__":
    main()
