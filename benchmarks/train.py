"""Trains one yaml under several strategies, one after another, and compares speed and memory.

    python -m benchmarks.train --config examples/llama3_8b.yaml --out benchmarks/results/train_llama3_8b.json

The arms: ``liger_fsdp`` runs the yaml as it is; ``fsdp`` runs it with Lightning's own FSDPStrategy, the same layers
wrapped and checkpointed, and plain Hugging Face code; ``liger_kernel`` is the latter with the published liger-kernel
package's patches and loss.
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
from lightning_liger import LigerCausalLM, LigerStrategy, TrainingSummary
from lightning_liger.cli import LigerCLI
from lightning_liger.strategies.policies import decoder_layer_classes

ARMS = ("fsdp", "liger_kernel", "liger_fsdp")


class PlainFSDPStrategy(FSDPStrategy):
    """Lightning's strategy with the layers to wrap and to checkpoint taken from the model, as LigerStrategy does."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        from lightning.fabric.strategies.fsdp import _activation_checkpointing_kwargs, _auto_wrap_policy_kwargs

        layers = decoder_layer_classes(model)
        self.kwargs = _auto_wrap_policy_kwargs(layers, self.kwargs)
        self._activation_checkpointing_kwargs = _activation_checkpointing_kwargs(None, layers)
        return super()._setup_model(model)


class HuggingFaceLossLM(LigerCausalLM):
    """The same model trained on the loss that its own forward returns, which liger-kernel patches."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss


class ArmCLI(LigerCLI):
    arm: str

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.arm != "liger_fsdp":
            kwargs["strategy"] = PlainFSDPStrategy()
        return super().instantiate_trainer(**kwargs)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if self.arm == "liger_kernel":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        if self.arm != "liger_fsdp":
            self.model.__class__ = HuggingFaceLossLM


def run_arm(arm: str, config: str, steps: int, out: Path, overrides: list[str]) -> None:
    """Trains in this process (and those that Lightning starts) and writes what it measured."""
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
        is_ours = isinstance(cli.trainer.strategy, LigerStrategy)
        report = cli.trainer.strategy.patch_report.as_dict() if is_ours else None
        result = {"arm": arm, **summary.results, "step_losses": torch.stack(losses).tolist(), "replaced": report}
        out.write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the yaml to train")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"comma separated, out of {ARMS}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--run-arm", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.run_arm:
        run_arm(options.run_arm, options.config, options.steps, options.out, overrides)
        return
    results = []
    for arm in options.arms.split(","):
        if arm not in ARMS:
            parser.error(f"--arms takes {ARMS}, got {arm!r}")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "arm.json"
            own = [f"--config={options.config}", f"--steps={options.steps}", f"--out={out}", f"--run-arm={arm}"]
            code = subprocess.call([sys.executable, "-m", "benchmarks.train", *own, *overrides])
            if code or not out.exists():
                print(f"{arm}: failed with exit code {code}", file=sys.stderr)
                continue
            results.append(json.loads(out.read_text()))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"environment": environment(), "config": options.config, "arms": results}, indent=1)
        )
    baseline = next((r for r in results if r["arm"] == "fsdp"), results[0] if results else None)
    print(f"{'arm':14}{'tokens/s/device':>16}{'peak GiB':>10}{'speed':>8}{'memory':>8}{'loss':>8}")
    for result in results:
        speed = result["tokens_per_second"] / result["processes"]
        memory = result["peak_memory_bytes"] / 2**30
        print(
            f"{result['arm']:14}{speed:16.0f}{memory:10.2f}"
            f"{result['tokens_per_second'] / baseline['tokens_per_second']:7.3f}x"
            f"{result['peak_memory_bytes'] / baseline['peak_memory_bytes']:7.3f}x{result['step_losses'][-1]:8.3f}"
        )


if __name__ == "__main__":
    main()
