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
"""Processes of ``devices: auto`` without a GPU: enough to shard, and each has some cores."""


class _Trainer(L.Trainer):
    """Lightning's Trainer with the subcommand ``export``."""

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
            model: A module with a Hugging Face model.
            datamodule: If it has a tokenizer, that is saved too.
            ckpt_path: A checkpoint file, or the folder of a sharded checkpoint.
            output: The folder to write to.
            max_shard_size: The maximum size of a file.
            weights_only: Whether the checkpoint may hold tensors and plain Python objects only.
        """
        tokenizer = None
        if datamodule is not None and hasattr(datamodule, "text_tokenizer"):
            datamodule.prepare_data()
            datamodule.setup("predict")
            tokenizer = datamodule.text_tokenizer
        export_pretrained(
            model, ckpt_path, output, tokenizer=tokenizer, max_shard_size=max_shard_size, weights_only=weights_only
        )


class LigerCLI(LightningCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` for any LightningModule and data module, named in the yaml.

    Adds :class:`~lightning_liger.TrainingSummary` (``--summary.*``). ``trainer.devices: auto`` means all GPUs or,
    without any, two CPU processes; with ``predict`` and the strategy ``liger`` it means one device. ``export`` writes a
    checkpoint to a Hugging Face folder, on any machine.
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
        if self.subcommand == "export":  # needs no accelerator, whichever the model was trained on
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
        elif trainer.accelerator in ("auto", "cpu") and not _has_gpu(trainer.accelerator):
            trainer.accelerator = "cpu"
            trainer.devices = min(MAX_CPU_PROCESSES, os.cpu_count() or 1)
            rank_zero_info(f"No GPU is used: training on {trainer.devices} CPU processes over gloo.")


def _is_for_one_device(strategy: Any) -> bool:
    return strategy == "liger" or getattr(strategy, "class_path", "").endswith(".LigerSingleDeviceStrategy")


def _has_gpu(accelerator: str) -> bool:
    return accelerator == "auto" and torch.cuda.is_available()


def main(args: ArgsType = None) -> None:
    """Entry point of the ``lightning-liger`` command and of ``python -m lightning_liger``."""
    # Raised by Lightning 2.6 itself: users cannot act on it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    LigerCLI(args=args)
