"""``lightning-liger fit --config examples/tiny.yaml``: a yaml file as a whole program."""

import os
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_liger.callbacks import TrainingSummary
from lightning_liger.callbacks.predictions import PredictionPrinter
from lightning_liger.weights.export import export_pretrained

MAX_CPU_PROCESSES = 2
"""Processes of ``devices: auto`` without an accelerator: enough to shard, and each keeps some cores."""


class _Trainer(L.Trainer):
    """Lightning's, with what the command line can do beside training."""

    def export(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        *,
        ckpt_path: str,
        output: str,
        max_shard_size: str = "5GB",
        weights_only: bool = True,
    ) -> None:
        """Write a checkpoint's weights to a Hugging Face folder.

        Args:
            model: With a Hugging Face model.
            datamodule: Whose tokenizer is saved along, if it has one.
            ckpt_path: A checkpoint file, or the folder of a sharded checkpoint.
            output: The folder to write to.
            max_shard_size: The size of the largest file.
            weights_only: Whether the checkpoint may hold tensors and plain Python objects only.
        """
        tokenizer = None
        if hasattr(datamodule, "text_tokenizer"):
            datamodule.prepare_data()
            datamodule.setup("predict")
            tokenizer = datamodule.text_tokenizer
        export_pretrained(
            model, ckpt_path, output, tokenizer=tokenizer, max_shard_size=max_shard_size, weights_only=weights_only
        )


class LigerCLI(LightningCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` for any LightningModule and data module, named in the yaml.

    Adds :class:`~lightning_liger.TrainingSummary` (``--summary.*``) and lets ``trainer.devices: auto`` mean all GPUs
    or, without any, two CPU processes; ``predict`` and the strategy ``liger`` take one device unless told otherwise.
    ``export`` writes a checkpoint to a Hugging Face folder, on any machine.
    """

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=_Trainer,
            seed_everything_default=42,
            save_config_kwargs={"overwrite": True},
            args=args,
            **kwargs,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(TrainingSummary, "summary")
        parser.add_lightning_class_args(PredictionPrinter, "prediction_printer")

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "export": {"model", "datamodule"}}

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.subcommand == "export":  # whatever the model was trained on
            return self.trainer_class(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        return super().instantiate_trainer(**kwargs)

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        trainer = config.trainer
        if trainer.devices != "auto" or self.subcommand == "export":
            return
        if self.subcommand == "predict" or _is_for_one_device(trainer.strategy):
            trainer.devices = 1
            if trainer.strategy == "liger_fsdp":  # one process has nothing to shard
                trainer.strategy = "auto"
        elif trainer.accelerator in ("auto", "cpu") and not _has_accelerator(trainer.accelerator):
            trainer.accelerator = "cpu"
            trainer.devices = min(MAX_CPU_PROCESSES, os.cpu_count() or 1)
            rank_zero_info(f"No GPU is used: training on {trainer.devices} CPU processes over gloo.")


def _is_for_one_device(strategy: Any) -> bool:
    return strategy == "liger" or getattr(strategy, "class_path", "").endswith(".LigerSingleDeviceStrategy")


def _has_accelerator(flag: str) -> bool:
    return flag == "auto" and (torch.cuda.is_available() or torch.backends.mps.is_available())


def main(args: ArgsType = None) -> None:
    """Entry point of the ``lightning-liger`` command and of ``python -m lightning_liger``."""
    # Lightning 2.6's own, and nothing a user can act on.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    LigerCLI(args=args)
