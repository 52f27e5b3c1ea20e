"""Mistakes of users end the command with one sentence that names the place, the value and the closest name."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_liger.cli import main

ROOT = Path(__file__).parents[3]
FIT = ("fit", f"--config={ROOT / 'examples' / 'sft.yaml'}", "--trainer.accelerator=cpu", "--trainer.callbacks=null")
TINY = ("--config=examples/tiny.yaml", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.callbacks=null")
FSDP = "lightning_liger.LigerFSDPStrategy"
CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"

COMMANDS = [
    (("fti",), "subcommand must be one of 'fit',", "got 'fti' (did you mean 'fit'?)"),
    (("fit",), "required: fit.data, fit.model; give a yaml file with --config"),
    (("fit", "--config"), "argument -c/--config: expected one argument"),
    (("fit", "--config", "no.yaml"), "File does not exist: ", "no.yaml"),
    ((*FIT, "more"), "unrecognized arguments: more"),
    (("predict", *TINY, "--data.prompt=a"), "ckpt_path must be a checkpoint to predict with", "got None"),
    (("predict", *TINY, "--data.prompt=a", "--ckpt_path=last"), "ckpt_path must be a checkpoint to predict with"),
    (("export", *TINY, "--ckpt_path=half.ckpt", "--output=a"), "half.ckpt is incomplete, or does not fit the model"),
    (("inspect",), "required: model"),
    (("init", "sft", "--outptu=a.yaml"), "outptu is not an option (did you mean 'output'?)"),
    (("bench", "--config=latin.yaml"), "parsing config latin.yaml: 'utf-8' codec can't decode"),
]
"""Arguments, and parts of the message."""

OPTIONS = {
    "trainer.max_stepz=1": ("trainer.max_stepz is not an option (did you mean 'trainer.max_steps'?)",),
    "modle.learning_rate=1": ("modle.learning_rate is not an option (did you mean 'model'?)",),
    "trainer.max_steps=ten": ("trainer.max_steps must be int, got 'ten'",),
    "trainer.accelerator=abacus": ("accelerator", "abacus"),
    "trainer.precision=bf17": ("'bf16-mixed'", "got 'bf17' (did you mean 'bf16'?)"),
    "trainer.strategy=liger_fdsp": ("trainer.strategy must be auto, one of liger, ", "mean 'liger_fsdp'?)"),
    "trainer.strategy=liger_fsdp --trainer.strategy.kernels=[]": ("must be a class if it has options", FSDP),
    f"trainer.strategy={FSDP} --trainer.strategy.memory_budge=2": ("(did you mean 'memory_budget'?)",),
    f"trainer.strategy={FSDP} --trainer.strategy.memory_budget=-1": ("memory_budget must be 'auto'", "got -1"),
    f"trainer.strategy={FSDP} --trainer.strategy.kernels=[foo]": ("kernels", "foo"),
    f"trainer.strategy={FSDP} --trainer.strategy.auto_wrap_policy=[foo.Bar]": ("auto_wrap_policy", "foo.Bar"),
    f"trainer.strategy={FSDP} --trainer.strategy.auto_wrap_policy=[GPT2Block]": (
        "error: auto_wrap_policy names the layer class 'GPT2Block'",
    ),
    "model.config.vocab_size=270": ("error: config['vocab_size'] must be at least 320, the number of tokens", "270"),
    "trainer.accelerator=gpu": ("trainer.accelerator is 'gpu', and PyTorch finds no GPU", "doctor` says why"),
    "trainer.callbacks=NoSuchCallback": ("trainer.callbacks", "NoSuchCallback"),
    "trainer.default_root_dir=latin.yaml/runs --trainer.logger=true": ("latin.yaml/runs",),
    "model=LigerCasualLM": ("got 'LigerCasualLM' (did you mean 'LigerCausalLM'?)",),
    "model=torch.nn.Linear": ("model", "does not correspond to a subclass of LightningModule", "torch.nn.Linear"),
    "model.learning_rat=1": ("model.learning_rat is not an option of LigerCausalLM (did you mean 'learning_rate'?)",),
    "model.learning_rate=fast": ("model.learning_rate must be float, got 'fast'",),
    "model.pretrained=/no/such/folder": ("pretrained", "/no/such/folder", "config.json"),
    "data.batch_siz=1": ("data.batch_siz is not an option of PromptCompletionDataModule (did you mean 'batch_size'?)",),
    "weights_only=maybe": ("weights_only must be bool, got 'maybe'",),
    "optimizer=Adamm": ("optimizer must be ", "got 'Adamm' (did you mean 'Adam'?)"),
    "print_config=all": ('Invalid option "all" for --print_config',),
    "ckpt_path=no.ckpt": ("ckpt_path must be the path of a checkpoint that exists, got 'no.ckpt'",),
    "ckpt_path=": ("ckpt_path must be the path of a checkpoint that exists, got ''",),
    "ckpt_path=list.ckpt": ("list.ckpt", "'state_dict'"),
    "ckpt_path=half.ckpt": ("half.ckpt is incomplete, or does not fit the model",),
}
"""Options of ``fit``, and parts of the message."""

FILES = {
    "seed_everything: 1\ntrainer: {a: [1\nmodel: 2\n": ("parsing config a.yaml, line 3, column 6: while parsing",),
    "trainer:\n\tmax_steps: 1\n": ("parsing config a.yaml, line 2, column 1: ", "cannot start any token"),
    "- 1\n": ("config must be a yaml file with settings such as `trainer:`, got a.yaml, which holds a list",),
    "trainer: 3\n": ("trainer must be settings such as `max_steps: 10`, got 3 in a.yaml",),
    "summary: [1]\n": ("summary must be settings such as `skip_steps: 2`, got [1] in a.yaml",),
    "model: &x [*x]\n": ("model", "Not a valid subclass of LightningModule", "[[...]]"),
    "": ("got a.yaml, which holds nothing: `lightning-liger init` writes one",),
    "trainer: {max_stepz: 1}": ("trainer.max_stepz is not an option (did you mean 'trainer.max_steps'?)",),
    "model: {init_args: {learning_rat: 1}}": (
        "model.learning_rat is not an option of LigerCausalLM",
        "'learning_rate'?)",
    ),
    "model: {class_path: no_such.Model}": ("model: no_such.Model: No module named 'no_such'",),
    f"trainer: {{callbacks: [{{class_path: {CHECKPOINT}, init_args: {{dirpat: a}}}}]}}": (
        "trainer.callbacks.dirpat is not an option of ModelCheckpoint (did you mean 'dirpath'?)",
    ),
    "trainer: {callbacks: [{class_path: EarlyStoping}]}": ("'EarlyStoping' (did you mean 'EarlyStopping'?)",),
    f"trainer: {{strategy: {{class_path: {FSDP}, init_args: {{activation_policy: [A]}}}}}}": (
        "trainer.strategy.activation_policy is not an option of LigerFSDPStrategy",
    ),
}
"""Contents of a second yaml file, and parts of the message."""


def test_mistakes_end_the_command_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    torch.save([1], tmp_path / "list.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "list.ckpt").read_bytes()[:500])
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    cases = [(arguments, "", parts) for arguments, *parts in COMMANDS]
    cases += [((*FIT, *f"--{options}".split()), "", parts) for options, parts in OPTIONS.items()]
    cases += [((*FIT, "--config=a.yaml"), content, parts) for content, parts in FILES.items()]
    for arguments, content, parts in cases:
        (tmp_path / "a.yaml").write_text(content, encoding="utf-8")
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = "".join(capsys.readouterr().err.partition("lightning-liger: error: ")[1:])
        assert ended.value.code == 2, arguments
        message, _, options = printed.partition("\nOptions: lightning-liger")
        assert message.startswith("lightning-liger: error: "), printed
        assert "\n" not in message.strip(), printed  # one paragraph, and the command that lists the options
        assert len(message) < 550, printed
        assert "NoneType" not in message, printed  # the reasons of other types are left out
        assert options == "" or options.endswith("--help\n"), printed
        for part in parts:
            assert part in message, f"{part!r} is not in {message!r}"
