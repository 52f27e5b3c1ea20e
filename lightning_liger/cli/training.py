"""Lightning's command line for our modules: the subcommands that train a model, or take one from a yaml file."""

import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

import lightning as L
import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from liger_ops.arguments import shown, wrong_value
from lightning_liger.callbacks.predictions import PredictionPrinter
from lightning_liger.callbacks.summary import Summary
from lightning_liger.cli.help import SUBCOMMANDS, Formatter
from lightning_liger.cli.messages import PROGRAM, closest, message_of
from lightning_liger.cli.mistakes import refuse
from lightning_liger.hub import is_hub_name
from lightning_liger.post_training.teacher import prepare_frozen, store_teacher_topk
from lightning_liger.training.causal_lm import LigerCausalLM
from lightning_liger.weights.export import contents, export_pretrained

MAX_CPU_PROCESSES = 2
"""Processes of ``devices: auto`` without a GPU: enough to shard, and each has some cores."""

_WITHOUT_TRAINER = ("export", "teacher_topk")
"""Subcommands that use no settings of the Trainer."""


class _Trainer(L.Trainer):
    """Trainer of Lightning, with ``export`` and ``teacher_topk``."""

    def export(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        *,
        ckpt_path: str,
        output: str,
        max_shard_size: str = "5GB",
        weights_only: bool = True,
        push_to_hub: str | None = None,
        private: bool = False,
    ) -> None:
        """Write a checkpoint's weights to a Hugging Face folder, and to the Hub.

        Args:
            model: A module with a Hugging Face model.
            datamodule: If it has a tokenizer, the checkpoint's is saved too; data.tokenizer must be the same, if given.
            ckpt_path: A checkpoint file, or the folder of a sharded checkpoint.
            output: The folder to write to.
            max_shard_size: The maximum size of a file.
            weights_only: Whether the checkpoint may hold tensors and plain Python objects only.
            push_to_hub: owner/name of a repository on the Hub that gets the files too.
            private: Whether only its owner may see it.
        """
        options: dict[str, Any] = {"max_shard_size": max_shard_size, "weights_only": weights_only}
        options |= {"push_to_hub": push_to_hub, "private": private}
        options["data"] = datamodule
        if datamodule is not None and hasattr(datamodule, "text_tokenizer"):
            if state := contents(Path(ckpt_path), weights_only).get(type(datamodule).__qualname__):
                datamodule.load_state_dict(state)
            else:
                rank_zero_warn(f"{ckpt_path} contains no tokenizer: writing that of the data settings.")
                datamodule.prepare_data()
                datamodule.setup("predict")
            options["tokenizer"] = datamodule.text_tokenizer
        export_pretrained(model, ckpt_path, output, **options)

    def teacher_topk(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule,
        *,
        output: str,
        top_k: int = 64,
        temperature: float = 1.0,
        num_samples: int | None = None,
        proposal_temperature: float = 1.0,
        dtype: Literal["float32", "float16"] = "float32",
    ) -> None:
        """Write the top-k tokens of a pretrained teacher, for each token of the training data, to a file.

        Args:
            model: The teacher, a LigerCausalLM with ``pretrained``.
            datamodule: Its training batches are read once, on one device.
            output: The file to write; its name ends in .safetensors.
            top_k: How many ids are kept per token.
            temperature: Divides the logits.
            num_samples: Keeps ids from this many samples, with repetition, instead of the top-k.
            proposal_temperature: Of the distribution that is sampled from.
            dtype: Of the log-probabilities in the file.
        """
        if not isinstance(model, LigerCausalLM) or model.hparams["pretrained"] is None:
            expected = "a LigerCausalLM whose pretrained is a folder with weights or a name on the Hub"
            raise wrong_value("model", expected, model)
        datamodule.prepare_data()
        datamodule.setup("fit")
        model.configure_model()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        store_teacher_topk(
            prepare_frozen(model.model, device), datamodule, output, top_k=top_k, temperature=temperature,
            num_samples=num_samples, proposal_temperature=proposal_temperature, dtype=dtype,
        )  # fmt: skip


class _Guard(L.Callback):
    """Refuses to predict with random weights, and ends processes that would wait for this one."""

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _require_weights(pl_module, trainer.ckpt_path)  # it is None also for "last" without a checkpoint

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Of the processes that this one launched, each would print that its connection was closed.
        if trainer.strategy.launcher is not None and message_of(exception) is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)


def _require_weights(model: L.LightningModule, ckpt_path: Any) -> None:
    if ckpt_path is None and isinstance(model, LigerCausalLM) and model.hparams["pretrained"] is None:
        expected = "a checkpoint to predict with, unless model.pretrained is a folder with weights or a name on the Hub"
        raise wrong_value("ckpt_path", expected, ckpt_path)


_TITLES = {
    "trainer": "Trainer: devices, strategy, precision, how long to train, callbacks, logging",
    "model": "Model: options of a class are listed by --model.help CLASS, such as LigerCausalLM",
    "data": "Data: options of a class are listed by --data.help CLASS, such as TextDataModule",
    "summary": "Summary at the end of training",
    "optimizer": "Optimizer, instead of the module's own",
    "lr_scheduler": "Schedule of the learning rate, instead of the module's own",
}
"""The groups of options in the help."""


def _described(subcommand: str) -> dict[str, Any]:
    (text,) = (names[subcommand] for names in SUBCOMMANDS.values() if subcommand in names)
    usage = f"{PROGRAM} {subcommand} --config FILE [--config FILE ...] [options]"
    text += " Later files and options override earlier ones."
    return {"description": text, "usage": usage, "exit_on_error": False}


class LigerCLI(LightningCLI):
    """:class:`~lightning.pytorch.cli.LightningCLI` for any LightningModule and data module, named in the yaml.

    Adds :class:`~lightning_liger.LigerMonitor` without a page (``--summary.*``), unless the settings have one.
    ``trainer.devices: auto`` means all GPUs or, without any, two CPU processes; with ``predict`` and the strategy
    ``liger`` it means one device. ``export`` writes a checkpoint to a Hugging Face folder, on any machine, and
    ``teacher_topk`` a teacher's top-k tokens to a file.
    """

    trainer_type = _Trainer

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        self.given: Any = sys.argv[1:] if args is None else args
        first = next(iter(self.given), "")
        named = {name: skip for name, skip in self.subcommands().items() if name == first}
        if named:  # each parser takes a second
            self.subcommands = lambda: named  # type: ignore[method-assign]
        kwargs |= {"trainer_class": self.trainer_type, "subclass_mode_model": True, "subclass_mode_data": True}
        kwargs |= {"seed_everything_default": 42, "save_config_kwargs": {"overwrite": True}}
        kwargs["parser_kwargs"] = {"exit_on_error": False, **{name: _described(name) for name in self.subcommands()}}
        super().__init__(L.LightningModule, L.LightningDataModule, args=args, **kwargs)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(**{"prog": PROGRAM, "formatter_class": Formatter, **kwargs})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.options = parser
        parser.add_lightning_class_args(Summary, "summary")
        parser.add_lightning_class_args(PredictionPrinter, "prediction_printer")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            hints = {f"trainer.{name}": hint for name, hint in get_type_hints(L.Trainer.__init__).items()}
            method = getattr(self.trainer_type, str(next(iter(self.given), "")), None)
            hints |= get_type_hints(method) if method else {}
            refuse(self.options, self.given, hints, error)
        self._ckpt_path = None
        if self.config.get("subcommand"):  # not there yet for Lightning, which would take all settings from it
            config = self.config[self.config.subcommand]
            self._ckpt_path = config.get("ckpt_path")
            _check_checkpoint(config)
            if self._ckpt_path is not None:
                config.ckpt_path = None

    @staticmethod
    @override
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        LightningCLI.link_optimizers_and_lr_schedulers(parser)
        for key, title in _TITLES.items():  # all groups are there now
            cast(Any, parser.groups)[key].title = title

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in _WITHOUT_TRAINER}}

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self.subcommand in _WITHOUT_TRAINER:  # needs no accelerator, whichever the model was trained on
            return self.trainer_class(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer = super().instantiate_trainer(**kwargs)
        cast(Any, trainer).callbacks.append(_Guard())  # set by a part of Lightning that is not typed
        return trainer

    def before_predict(self) -> None:
        _require_weights(self.model, self.config.predict.ckpt_path)

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        if self._ckpt_path is not None:
            config.ckpt_path = self._ckpt_path
        _take_tokenizer_of_pretrained(config)
        trainer = config.trainer
        _check_engine(trainer)
        if trainer.devices != "auto" or self.subcommand in _WITHOUT_TRAINER:
            return
        strategy = getattr(trainer.strategy, "class_path", trainer.strategy)
        if self.subcommand == "predict" or strategy == "liger" or strategy.endswith(".LigerSingleDeviceStrategy"):
            trainer.devices = 1
            if trainer.strategy == "liger_fsdp":  # one process has nothing to shard
                trainer.strategy = "auto"
        elif trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not torch.cuda.is_available()):
            trainer.accelerator = "cpu"
            trainer.devices = min(MAX_CPU_PROCESSES, os.cpu_count() or 1)
            rank_zero_info(f"No GPU is used: training on {trainer.devices} CPU processes over gloo.")


def _check_checkpoint(config: Namespace) -> None:
    """Checks the checkpoint before the model is built, and takes the model's architecture from it."""
    if (path := config.get("ckpt_path")) is None:
        return
    path = str(path)
    if path in ("best", "last", "hpc") or path.startswith("registry") or "://" in path:  # which Lightning looks for
        return
    if not path or not Path(path).exists():
        raise wrong_value("ckpt_path", "the path of a checkpoint that exists", path)
    saved = contents(Path(path), config.get("weights_only")).get("hyper_parameters", {})
    is_causal_lm = (config.model.get("class_path") or "").endswith(".LigerCausalLM")
    given = config.model.get("init_args")
    if not is_causal_lm or given is None or given.pretrained is not None:
        return
    for name in ("pretrained", "revision", "model_type", "config", "lora"):
        if name in saved and saved[name] != given[name]:
            values = f"{shown(saved[name])} instead of {shown(given[name])}"
            rank_zero_warn(f"model.{name} is taken from the checkpoint: {values}")
            given[name] = saved[name]


def _take_tokenizer_of_pretrained(config: Namespace) -> None:
    """Pretrained weights know their own tokenizer only; one trained on the text would be noise to them."""
    model, data = ((config.get(key) or Namespace()).get("init_args") or Namespace() for key in ("model", "data"))
    pretrained = model.get("pretrained")
    if not isinstance(pretrained, str) or "tokenizer" not in data or data.tokenizer is not None:
        return
    is_on_hub, files = is_hub_name(pretrained), ("tokenizer.json", "tokenizer_config.json")
    if is_on_hub or any((Path(pretrained) / name).is_file() for name in files):
        rank_zero_info(f"data.tokenizer is that of model.pretrained={pretrained!r}.")
        data.tokenizer = pretrained
        if is_on_hub and "tokenizer_revision" in data:
            data.tokenizer_revision = model.get("revision")


def _check_engine(trainer: Namespace) -> None:
    """Refuses a strategy and an accelerator that are not there, before anything is made."""
    names, strategy = ["auto", *StrategyRegistry.available_strategies()], trainer.strategy
    if isinstance(strategy, str) and strategy not in names:
        ours = ", ".join(name for name in names if name.startswith("liger"))
        expected = f"auto, one of {ours}, or a name or class of Lightning"
        raise ValueError(f"trainer.strategy must be {expected}, got {strategy!r}{closest(strategy, names)}")
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available() and not MPSAccelerator.is_available():
        raise ValueError(
            f"trainer.accelerator is {trainer.accelerator!r}, and PyTorch finds no GPU: `{PROGRAM} doctor` says why, "
            "and --trainer.accelerator=cpu trains without one"
        )
