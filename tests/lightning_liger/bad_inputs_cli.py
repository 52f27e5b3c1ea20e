"""Wrong command lines: the message alone is printed, and the exit code is 2."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_liger.cli import LigerCLI, main
from tests.bad_inputs import BadInput

TINY = str(Path(__file__).parents[2] / "examples" / "tiny.yaml")
BASE = (f"--config={TINY}", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.callbacks=null")
TEXT = f"--data.path={__file__}"


def row(id: str, arguments: tuple[str, ...], *mentions: str, prepare: Callable[[Path], Any] | None = None) -> BadInput:
    """``{tmp}`` in the arguments is a folder that ``prepare`` fills, in which the command runs."""

    def call(tmp_path: Path) -> None:
        if prepare is not None:
            prepare(tmp_path)
        filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
        # The parsers of all subcommands would take most of the time.
        skipped = {name: skip for name, skip in LigerCLI.subcommands().items() if name in filled[:1]}
        fewer = mock.patch.object(LigerCLI, "subcommands", staticmethod(lambda: skipped)) if skipped else nullcontext()
        with fewer, mock.patch.object(sys, "argv", ["lightning-liger"]):  # Lightning warns if both are given
            main(filled)

    return BadInput(id, call, ("lightning-liger: error: ", *mentions), SystemExit)


def fit(option: str, *mentions: str, prepare: Callable[[Path], Any] | None = None) -> BadInput:
    root = "--trainer.default_root_dir={tmp}"
    return row(f"fit-{option}", ("fit", *BASE, TEXT, root, option), *mentions, prepare=prepare)


def config(expected: str, **settings: Any) -> BadInput:
    return fit(f"--model.config={json.dumps(settings)}", "config", *settings, expected)


def damaged(num_bytes: int | None) -> Callable[[Path], None]:
    """A checkpoint of which the first bytes are left; None for one that is no checkpoint."""

    def prepare(tmp_path: Path) -> None:
        torch.save({"state_dict": {}} if num_bytes is not None else [1], tmp_path / "a.ckpt")
        content = (tmp_path / "a.ckpt").read_bytes()
        (tmp_path / "a.ckpt").write_bytes(content[:num_bytes])

    return prepare


def yaml_of(content: str) -> Callable[[Path], Any]:
    return lambda tmp_path: (tmp_path / "a.yaml").write_text(content, encoding="utf-8")


command = [
    row("no subcommand", (), "subcommand", "fit, validate, test, predict, export"),
    row("unknown subcommand", ("train",), "subcommand", "'train'", "'fit'"),
    row("unknown option", ("fit", *BASE, "--trainer.max_stepz=1"), "unrecognized", "--trainer.max_stepz=1"),
    row("config that does not exist", ("fit", "--config=no.yaml"), "config", "no.yaml", "does not exist"),
    row("config that is a folder", ("fit", "--config={tmp}"), "config", "not"),
    row(
        "config that is no yaml",
        ("fit", "--config={tmp}/a.yaml"),
        "parsing config",
        "line 2",
        prepare=yaml_of("a: [b\n"),
    ),
    row(
        "unknown key", ("fit", *BASE, "--config={tmp}/a.yaml"), "accept", "trainr", prepare=yaml_of("trainr: {a: 1}\n")
    ),
    row("no model", ("fit", "--data=lightning_liger.data.TextDataModule"), "model", "required"),
    row("no data", ("fit", "--model=lightning_liger.LigerCausalLM"), "data", "required"),
    row("export without a checkpoint", ("export", *BASE), "ckpt_path", "output", "required"),
]

options = [
    fit("--model=NoSuchModel", "model", "NoSuchModel"),
    fit("--model=lightning_liger.NoSuchModel", "model", "NoSuchModel"),
    fit("--model=torch.nn.Linear", "model", "torch.nn.Linear", "LightningModule"),
    fit("--model.learning_speed=1", "learning_speed", "not accepted"),
    fit("--model.learning_rate=fast", "learning_rate", "fast", "float"),
    fit("--model.betas=5", "betas", "5", "tuple"),
    fit("--model.warmup_steps=1.5", "warmup_steps", "1.5", "int"),
    fit("--data=NoSuchData", "data", "NoSuchData"),
    fit("--data.batch_sizes=1", "batch_sizes", "not accepted"),
    fit("--data.batch_size=two", "batch_size", "two", "int"),
    fit("--data.block_size=8.5", "block_size", "8.5", "int"),
    fit("--data.validation_fraction=half", "validation_fraction", "half", "float"),
    fit("--data.separate_documents=maybe", "separate_documents", "maybe", "bool"),
    fit("--data.path=[1]", "path", "[1]"),
    fit("--summary.skip_steps=many", "summary.skip_steps", "many", "int"),
    fit("--seed_everything=lucky", "seed_everything", "lucky"),
    fit("--trainer.max_steps=1e3", "trainer.max_steps", "1000.0", "int"),
    fit("--trainer.strategy=NoSuchStrategy", "strategy", "NoSuchStrategy"),
    fit("--trainer.devices=0", "devices", "0"),
    fit("--trainer.devices=1.5", "devices", "> 0"),
    fit("--trainer.accelerator=abacus", "accelerator", "abacus"),
    fit("--trainer.precision=3", "precision", "3"),
    fit("--trainer.callbacks=NoSuchCallback", "trainer.callbacks", "NoSuchCallback"),
    fit("--weights_only=maybe", "weights_only", "maybe"),
]

values = [
    fit("--data.batch_size=0", "data.batch_size", "0", "an integer of at least 1"),
    fit("--data.block_size=1", "data.block_size", "1", "an integer of at least 2"),
    fit("--data.num_workers=-1", "data.num_workers", "-1", "an integer of at least 0"),
    fit("--data.seed=-1", "data.seed", "-1", "an integer of at least 0"),
    fit("--data.vocab_size=10", "data.vocab_size", "10", "an integer of at least 257"),
    fit("--data.validation_fraction=1.0", "data.validation_fraction", "1.0", "below 1"),
    fit("--data.validation_fraction=.nan", "data.validation_fraction", "nan", "finite"),
    fit("--data.max_documents=0", "data.max_documents", "0", "at least 1"),
    fit("--data.path=", "data.path", "''", "not empty"),
    fit("--data.path=/no/such/text", "data.path", "/no/such/text", "does not exist"),
    fit("--data.path={tmp}", "data.path", "without text files"),
    fit("--data.text_field=", "data.text_field", "''", "not empty"),
    fit("--data.tokenizer=/no/such/folder", "data.tokenizer", "/no/such/folder", "tokenizer.json"),
    fit("--data.cache_dir=", "data.cache_dir", "''", "not empty"),
    fit("--model.pretrained=/no/such/folder", "pretrained", "/no/such/folder", "config.json"),
    fit("--model.model_type=lama", "model_type", "'lama'", "'llama'"),
    fit("--model.model_type=vit", "model_type", "'vit'", "causal"),
    fit("--model.learning_rate=-1", "learning_rate", "-1", "at least 0"),
    fit("--model.temperature=-1", "temperature", "-1", "at least 0"),
    fit("--model.loss_normalization=words", "loss_normalization", "words", "tokens"),
    fit("--model.config=[1]", "config", "[1]", "dict"),
    config("'hidden_size'", hiden_size=32),
    config("settings of 'llama'", temperature=0.5),
    config("an integer of at least 1", vocab_size=0),
    config("an integer of at least 1", hidden_size=-32),
    config("int", num_hidden_layers="two"),
    config("'llama'", num_attention_heads=0),
    config("multiple", hidden_size=33, **dict.fromkeys(("num_attention_heads",), 2)),
    config("never run", trust_remote_code=True),
]

checkpoints = [
    row("predict-no checkpoint", ("predict", *BASE, TEXT, "--data.prompt=a"), "ckpt_path", "None", "model.pretrained"),
    *(
        row(
            f"{subcommand}-ckpt_path-{kind}",
            (subcommand, *BASE, TEXT, "--ckpt_path={tmp}/a.ckpt", *others),
            "a.ckpt",
            expected,
            prepare=prepare,
        )
        for subcommand, *others in (("fit",), ("validate",), ("test",), ("predict",), ("export", "--output={tmp}/out"))
        for kind, expected, prepare in (
            ("absent", "exists", None),
            ("empty", "incomplete", damaged(0)),
            ("truncated", "incomplete", damaged(300)),
        )
    ),
    row("fit-ckpt_path-no path", ("fit", *BASE, TEXT, "--ckpt_path="), "ckpt_path", "''", "exists"),
    row(
        "export-ckpt_path-no checkpoint",
        ("export", *BASE, TEXT, "--ckpt_path={tmp}/a.ckpt", "--output={tmp}/out"),
        "a.ckpt",
        "'state_dict'",
        prepare=damaged(None),
    ),
    row(
        "export-ckpt_path-folder",
        ("export", *BASE, TEXT, "--ckpt_path={tmp}", "--output={tmp}/out", "--data.cache_dir={tmp}/c"),
        "ckpt_path",
        "the folder of a sharded one",
    ),
]

BAD_INPUTS = [*command, *options, *values, *checkpoints]
