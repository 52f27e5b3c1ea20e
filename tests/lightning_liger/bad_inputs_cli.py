"""Wrong command lines: the message alone is printed, and the exit code is 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_liger.cli import LigerCLI, main
from tests.bad_inputs import BadInput, row

TINY = str(Path(__file__).parents[2] / "examples" / "tiny.yaml")
BASE = (f"--config={TINY}", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.callbacks=null")
TEXT = f"--data.path={Path(__file__).parents[2] / 'CHANGELOG.md'}"
FIT = ("fit", *BASE, TEXT, "--trainer.default_root_dir={tmp}")


def command(
    arguments: tuple[str, ...], *mentions: str, prepare: Callable[[Path], Any] = lambda folder: None
) -> BadInput:
    """``{tmp}`` in the arguments is a folder that ``prepare`` fills, in which the command runs."""

    def call(tmp_path: Path) -> None:
        prepare(tmp_path)
        filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
        # The parsers of all subcommands would take most of the time.
        skipped = {name: skip for name, skip in LigerCLI.subcommands().items() if name in filled[:1]}
        fewer = mock.patch.object(LigerCLI, "subcommands", staticmethod(lambda: skipped)) if skipped else nullcontext()
        with fewer, mock.patch.object(sys, "argv", ["lightning-liger"]):  # Lightning warns if both are given
            main(filled)

    return row(call, mentions[0], "lightning-liger: error: ", *mentions[1:], error=SystemExit)


def damaged(num_bytes: int | None) -> Callable[[Path], Any]:
    """A checkpoint of which the first bytes are left; None for one that is no checkpoint."""

    def prepare(tmp_path: Path) -> None:
        torch.save({"state_dict": {}} if num_bytes is not None else [1], tmp_path / "a.ckpt")
        content = (tmp_path / "a.ckpt").read_bytes()
        (tmp_path / "a.ckpt").write_bytes(content[:num_bytes])

    return prepare


def yaml_of(content: str) -> Callable[[Path], Any]:
    return lambda tmp_path: (tmp_path / "a.yaml").write_text(content, encoding="utf-8")


# An option of fit, and what the message says.
OPTIONS: list[tuple[str, ...]] = [
    ("--model=NoSuchModel", "model", "NoSuchModel"),
    ("--model=lightning_liger.NoSuchModel", "model", "NoSuchModel"),
    ("--model=torch.nn.Linear", "model", "torch.nn.Linear", "LightningModule"),
    ("--model.learning_speed=1", "learning_speed", "is no option of LigerCausalLM"),
    ("--model.learning_rate=fast", "learning_rate", "fast", "float"),
    ("--model.betas=5", "betas", "5", "tuple"),
    ("--model.warmup_steps=1.5", "warmup_steps", "1.5", "int"),
    ("--model.pretrained=/no/such/folder", "pretrained", "/no/such/folder", "config.json"),
    ("--model.model_type=lama", "model_type", "'lama'", "'llama'"),
    ("--model.learning_rate=-1", "learning_rate", "-1", "at least 0"),
    ("--model.loss_normalization=words", "loss_normalization", "words", "tokens"),
    ("--model.config=[1]", "config", "[1]", "dict"),
    ("--data=NoSuchData", "data", "NoSuchData"),
    ("--data.batch_sizes=1", "batch_sizes", "is no option of TextDataModule"),
    ("--data.batch_size=two", "batch_size", "two", "int"),
    ("--data.separate_documents=maybe", "separate_documents", "maybe", "bool"),
    ("--data.path=[1]", "path", "[1]"),
    ("--data.block_size=1", "data.block_size", "1", "an integer of at least 2"),
    ("--data.validation_fraction=.nan", "data.validation_fraction", "nan", "finite"),
    ("--data.path=", "data.path", "''", "not empty"),
    ("--data.path=/no/such/text", "data.path", "/no/such/text", "does not exist"),
    ("--data.path={tmp}", "data.path", "without"),
    ("--data.tokenizer=/no/such/folder", "data.tokenizer", "/no/such/folder", "tokenizer.json"),
    ("--seed_everything=lucky", "seed_everything", "lucky"),
    ("--trainer.max_steps=1e3", "trainer.max_steps", "1e3", "int"),
    ("--trainer.strategy=NoSuchStrategy", "strategy", "NoSuchStrategy"),
    ("--trainer.devices=0", "devices", "0"),
    ("--trainer.accelerator=abacus", "accelerator", "abacus"),
    ("--trainer.precision=3", "precision", "3"),
    ("--trainer.callbacks=NoSuchCallback", "trainer.callbacks", "NoSuchCallback"),
    ("--weights_only=maybe", "weights_only", "maybe"),
]
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hiden_size": 32}, "'hidden_size'"),
    ({"temperature": 0.5}, "settings of 'llama'"),
    ({"vocab_size": 0}, "an integer of at least 1"),
    ({"num_hidden_layers": "two"}, "int"),
    ({"hidden_size": 33, "num_attention_heads": 2}, "multiple"),
    ({"trust_remote_code": True}, "never run"),
]
DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("exists", lambda folder: None), ("incomplete", damaged(0)), ("incomplete", damaged(300))
]  # fmt: skip
CHECKPOINT = "--ckpt_path={tmp}/a.ckpt"

BAD_INPUTS = [
    command((), "subcommand", "fit, validate, test, predict, export"),
    command(("train",), "subcommand", "'train'", "'fit'"),
    command(("fit", *BASE, "--trainer.max_stepz=1"), "trainer.max_stepz is no option", "'trainer.max_steps'"),
    command(("fit", "--config=no.yaml"), "config", "no.yaml", "does not exist"),
    command(("fit", "--config={tmp}"), "config", "not"),
    command(("fit", "--config={tmp}/a.yaml"), "parsing config", "line 2", prepare=yaml_of("a: [b\n")),
    command(
        ("fit", *BASE, "--config={tmp}/a.yaml"),
        "trainr is no option",
        "did you mean 'trainer'?",
        prepare=yaml_of("trainr: {a: 1}\n"),
    ),
    command(("fit", "--data=lightning_liger.data.TextDataModule"), "model", "required"),
    command(("fit", "--model=lightning_liger.LigerCausalLM"), "data", "required"),
    command(("export", *BASE), "ckpt_path", "output", "required"),
    *(command((*FIT, option), *mentions) for option, *mentions in OPTIONS),
    *(command((*FIT, f"--model.config={json.dumps(each)}"), "config", *each, expected) for each, expected in CONFIGS),
    command(("predict", *BASE, TEXT, "--data.prompt=a"), "ckpt_path", "None", "model.pretrained"),
    command((*FIT, "--ckpt_path="), "ckpt_path", "''", "exists"),
    *(
        command((name, *BASE, TEXT, CHECKPOINT, *others), "a.ckpt", expected, prepare=prepare)
        for name, *others in (("fit",), ("validate",), ("test",), ("predict",), ("export", "--output={tmp}/out"))
        for expected, prepare in DAMAGES
    ),
    command(("export", *BASE, TEXT, CHECKPOINT, "--output={tmp}/out"), "a.ckpt", "'state_dict'", prepare=damaged(None)),
    command(
        (
            "export",
            *BASE,
            TEXT,
            "--ckpt_path={tmp}",
            "--output={tmp}/out",
            "--data.cache_dir={tmp}/c",
            "--data.validation_fraction=0",
        ),
        *("ckpt_path", "the folder of a sharded one"),
    ),
]
