"""The command line: a yaml file is a whole program."""

import json
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.demos.boring_classes import BoringModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lightning_liger import LigerCausalLM
from lightning_liger.cli import LigerCLI, main
from lightning_liger.cli.training import _Guard
from lightning_liger.data.sources import python_library_files
from lightning_liger.data.tokenizer import train_bpe_tokenizer
from tests.lightning_liger.tiny import TINY_CONFIG

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
ON_ONE_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
CONFIG = TINY_CONFIG | {"vocab_size": 300, "num_hidden_layers": 1}


class DryCLI(LigerCLI):
    """Instantiates everything and stops before the Trainer starts."""

    def _run_subcommand(self, subcommand: str) -> None:
        return None


@pytest.fixture(autouse=True)
def _in_an_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])  # LightningCLI warns if both args and argv are given


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    """``examples/tiny.yaml`` with a model, a text and a number of steps that fit a test."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {index}: the quick brown fox" for index in range(400)), encoding="utf-8")
    trainer = {"default_root_dir": tmp_path / "run", "max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1}
    trainer |= {"log_every_n_steps": 1, "callbacks": "null"}
    data = {"path": text, "cache_dir": tmp_path / "cache", "vocab_size": 300, "block_size": 32, "batch_size": 2}
    given = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    given += [f"--data.{name}={value}" for name, value in data.items()]
    return [f"--config={TINY}", *ON_ONE_CPU, *given, f"--model.config={json.dumps(CONFIG)}"]


@pytest.fixture
def trained(tmp_path, arguments, capsys) -> tuple[Path, list[str]]:
    """A checkpoint of ``fit``, and the arguments that make the same model without a corpus."""
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    settings = {"dirpath": str(checkpoint.parent), "save_last": True}
    callbacks = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": settings}]
    main(["fit", *arguments, f"--trainer.callbacks={json.dumps(callbacks)}"])
    printed = capsys.readouterr().out
    assert "fused kernels" in printed
    assert "Training summary" in printed
    assert len(list(tmp_path.glob("runs/tiny/tensorboard/*/config.yaml"))) == 1
    elsewhere = [each for each in arguments if "--data.path" not in each and "--data.cache_dir" not in each]
    return checkpoint, [*elsewhere, f"--data.cache_dir={tmp_path / 'other'}", f"--ckpt_path={checkpoint}"]


@pytest.mark.parametrize(
    ("subcommand", "cores", "given", "expected"),
    [
        ("fit", 16, None, 2),
        ("validate", 16, None, 2),
        ("predict", 16, None, 1),
        ("fit", 1, None, 1),
        ("fit", 16, 1, 1),
        ("predict", 16, 3, 3),
    ],
)
def test_devices_auto_without_a_gpu_is_two_cpu_processes_and_one_to_predict(
    subcommand, cores, given, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    options = [] if given is None else ["--trainer.accelerator=cpu", f"--trainer.devices={given}"]
    made = DryCLI(args=[subcommand, f"--config={TINY}", *options])
    assert int(made.config[subcommand].trainer.devices) == made.trainer.num_devices == expected
    assert made.trainer.strategy.root_device.type == "cpu"


def bug():
    return None + 1


def misuse():
    raise ValueError("not about settings")


@pytest.mark.parametrize("cause", [bug, misuse])
def test_bugs_and_errors_of_user_code_keep_their_traceback(arguments, monkeypatch, cause):
    monkeypatch.setattr(LigerCausalLM, "training_step", lambda self, batch, batch_idx: cause())
    with pytest.raises((TypeError, ValueError)):
        main(["fit", *arguments])


@pytest.mark.parametrize(("cause", "num_signals"), [(bug, 0), (misuse, 0), (python_library_files, 1)])
def test_launched_processes_end_when_this_one_prints_a_message(monkeypatch, cause, num_signals):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/no/such/folder")  # python_library_files raises
    signals = []
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(kill=signals.append)))
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as raised:
        cause()
    error = raised.value.with_traceback(raised.tb.tb_next)  # without this test, which is no part of the package
    _Guard().on_exception(trainer, BoringModel(), error)
    assert len(signals) == num_signals


def test_checkpoints_bring_their_tokenizer_and_their_architecture(trained, tmp_path, capsys):
    checkpoint, arguments = trained
    contents = torch.load(checkpoint, weights_only=True)
    assert contents["global_step"] == 2
    main(["predict", *arguments, "--data.prompt=quick brown fox", "--model.max_new_tokens=1"])
    assert "quick brown fox" in capsys.readouterr().out

    folder = tmp_path / "sharded"
    others = {name: value for name, value in contents.items() if name != "state_dict"}
    weights = {f"model.{name}": tensor for name, tensor in contents["state_dict"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, checkpoint_id=folder, no_dist=True)
    torch.save(others, folder / "meta.pt")
    expected = Tokenizer.from_str(contents["TextDataModule"]["tokenizer"]["tokenizer.json"].decode()).to_str()
    for path in (checkpoint, folder):
        output = tmp_path / f"of_{path.stem}"
        main(["export", *arguments, "--trainer.devices=8", f"--ckpt_path={path}", f"--output={output}"])
        for name, weight in AutoModelForCausalLM.from_pretrained(output).named_parameters():
            assert torch.equal(weight, contents["state_dict"][f"model.{name}"]), name
        assert Tokenizer.from_file(str(output / "tokenizer.json")).to_str() == expected
    assert not (tmp_path / "other").exists()  # no corpus was read

    made = LigerCLI(
        args=[f"--config={TINY}", *ON_ONE_CPU, f"--model.pretrained={output}", "--model.config=null"], run=False
    )
    assert made.datamodule.tokenizer == str(output)

    with pytest.warns(UserWarning, match=r"model\.config is taken from the checkpoint: .*hidden_size"):
        made = DryCLI(args=["predict", *arguments, "--model.max_new_tokens=3", "--model.config.hidden_size=64"])
    assert (made.model.hparams.max_new_tokens, made.model.config.hidden_size) == (3, 32)
    assert made.config.predict.ckpt_path == str(checkpoint)


def test_another_tokenizer_than_the_checkpoints_is_refused(trained, tmp_path, capsys):
    _, arguments = trained
    (tmp_path / "else.txt").write_text("something else altogether, again and again " * 2000, encoding="utf-8")
    train_bpe_tokenizer(["something else"], 280).save_pretrained(tmp_path / "tokenizer")
    text, tokenizer = f"data.path={tmp_path / 'else.txt'}", f"data.tokenizer={tmp_path / 'tokenizer'}"
    predict, export = ("predict", "data.prompt=a"), ("export", f"output={tmp_path / 'exported'}")
    for subcommand, *options in (("fit", text), ("validate", text), (*predict, tokenizer), (*export, tokenizer)):
        with pytest.raises(SystemExit):
            main([subcommand, *arguments, *(f"--{option}" for option in options)])
        message = capsys.readouterr().err
        for part in (options[-1].partition("=")[2], "text.txt", "is not the checkpoint's tokenizer"):
            assert part in message
    assert not (tmp_path / "exported").exists()


def test_checkpoint_of_a_module_made_in_python_is_used_with_a_warning(trained, tmp_path, arguments):
    """It holds no tokenizer, and few settings."""
    checkpoint, _ = trained
    contents = torch.load(checkpoint, weights_only=True)
    del contents["TextDataModule"]
    contents["hyper_parameters"] = {key: contents["hyper_parameters"][key] for key in ("config", "model_type")}
    torch.save(contents, checkpoint)
    arguments = [*arguments, f"--ckpt_path={checkpoint}"]
    with pytest.warns(
        UserWarning, match=r"no tokenizer: the prompt is encoded with a tokenizer trained on .*text\.txt"
    ):
        main(["predict", *arguments, "--data.prompt=fox", "--model.max_new_tokens=1"])
    with pytest.warns(UserWarning, match="contains no tokenizer: writing that of the data settings"):
        main(["export", *arguments, f"--output={tmp_path / 'exported'}"])
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    assert (tmp_path / "exported" / "config.json").is_file()
