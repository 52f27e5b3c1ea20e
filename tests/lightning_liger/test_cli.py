"""The command line: a yaml file is a whole program, and mistakes in it are named."""

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
import yaml
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lightning_liger import LigerCausalLM, LigerStrategy
from lightning_liger.callbacks.predictions import PredictionPrinter
from lightning_liger.cli import LigerCLI, main
from lightning_liger.cli.training import Summary, _Guard
from lightning_liger.data import TextDataModule
from lightning_liger.data.sources import python_library_files
from lightning_liger.data.tokenizer import train_bpe_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.yaml"
LLAMA = ROOT / "examples" / "llama3_8b.yaml"
ON_ONE_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]


class DryCLI(LigerCLI):
    """Instantiates everything and stops before the Trainer starts."""

    def _run_subcommand(self, subcommand: str) -> None:
        return None


@pytest.fixture(autouse=True)
def _in_an_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])  # LightningCLI warns if both args and argv are given


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU and with many cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.fixture
def tiny_arguments(tmp_path) -> list[str]:
    """``examples/tiny.yaml`` with a model, a text and a number of steps that fit a test."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {index}: the quick brown fox" for index in range(400)), encoding="utf-8")
    return [
        f"--config={TINY}",
        *ON_ONE_CPU,
        f"--trainer.default_root_dir={tmp_path / 'run'}",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1",
        "--trainer.log_every_n_steps=1",
        f"--data.path={text}",
        f"--data.cache_dir={tmp_path / 'cache'}",
        "--data.vocab_size=300",
        "--data.block_size=32",
        "--data.batch_size=2",
        "--model.config="
        + json.dumps(
            {
                "vocab_size": 300,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 128,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "pad_token_id": 0,
            }
        ),
    ]


def test_tiny_yaml_instantiates():
    made = LigerCLI(args=[f"--config={TINY}", *ON_ONE_CPU], run=False)
    assert isinstance(made.model, LigerCausalLM)
    assert isinstance(made.datamodule, TextDataModule)
    assert type(made.trainer.strategy) is LigerStrategy
    kinds = {type(callback) for callback in made.trainer.callbacks}
    assert {Summary, PredictionPrinter} <= kinds
    assert made.trainer.num_devices == 1


def test_llama_yaml_instantiates_without_building_the_model():
    made = LigerCLI(args=[f"--config={LLAMA}", *ON_ONE_CPU], run=False)
    assert made.trainer.precision == "bf16-true"
    assert made.trainer.strategy._state_dict_type == "sharded"
    assert made.model.config.num_hidden_layers == 32
    assert list(made.model.parameters()) == []


@pytest.mark.parametrize("subcommand_devices", [("fit", 2), ("validate", 2), ("test", 2), ("predict", 1)], ids=str)
@pytest.mark.usefixtures("no_gpu")
def test_devices_auto_without_a_gpu_is_two_cpu_processes_and_one_to_predict(subcommand_devices):
    subcommand, num_devices = subcommand_devices
    made = DryCLI(args=[subcommand, f"--config={TINY}"])
    assert made.config[subcommand].trainer.devices == made.trainer.num_devices == num_devices
    assert made.trainer.strategy.root_device.type == "cpu"


@pytest.mark.usefixtures("no_gpu")
def test_devices_auto_on_one_core_is_one_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert DryCLI(args=["fit", f"--config={TINY}"]).trainer.num_devices == 1


@pytest.mark.parametrize("subcommand", ["fit", "predict"])
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.usefixtures("no_gpu")
def test_given_devices_are_left_alone(subcommand, num_devices):
    made = DryCLI(
        args=[subcommand, f"--config={TINY}", "--trainer.accelerator=cpu", f"--trainer.devices={num_devices}"]
    )
    assert made.trainer.num_devices == num_devices


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--trainer.strategy.auto_wrap_policy=[foo.Bar]"], ["auto_wrap_policy", "foo.Bar"], id="layer"),
        pytest.param(
            ["--trainer.strategy.activation_checkpointing_policy=[torch.nn.NoLayer]"],
            ["activation_checkpointing_policy", "torch.nn.NoLayer"],
            id="checkpointed layer",
        ),
        pytest.param(["--trainer.strategy.kernels=[foo]"], ["foo", "rms_norm", "linear_cross_entropy"], id="kernels"),
        pytest.param(["--data.path=/no/such/text.txt"], ["data.path", "/no/such/text.txt"], id="data path"),
        pytest.param(["--model.pretrained=/no/such/model"], ["pretrained", "/no/such/model"], id="checkpoint"),
    ],
)
def test_mistake_in_a_yaml_is_named(tmp_path, arguments, expected):
    config = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    config["trainer"] |= {"accelerator": "cpu", "devices": 1}
    config["trainer"]["strategy"] = {"class_path": "lightning_liger.LigerStrategy"}
    (tmp_path / "mistaken.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        LigerCLI(args=[f"--config={tmp_path / 'mistaken.yaml'}", *arguments], run=False)
    assert all(part in str(refused.value) for part in expected)


def refused(capsys, *arguments: str) -> str:
    """What the command prints to stderr when it ends with the exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed.partition("lightning-liger: error: ")[2]


def test_unknown_layer_in_a_yaml_ends_fit_with_its_name(tiny_arguments, capsys):
    arguments = ["--trainer.strategy=lightning_liger.LigerStrategy", "--trainer.strategy.auto_wrap_policy=[GPT2Block]"]
    message = refused(capsys, "fit", *tiny_arguments, *arguments, "--trainer.callbacks=null")
    assert message.startswith("auto_wrap_policy names the layer class 'GPT2Block'")


def test_message_stands_alone_and_has_no_other_settings(tiny_arguments, capsys):
    message = refused(capsys, "fit", *tiny_arguments, "--data.batch_size=0")
    assert message == "data.batch_size must be an integer of at least 1, got 0\n"
    message = refused(capsys, "fit", *tiny_arguments, "--data.batch_size=many")
    assert message == "data.batch_size must be int, got 'many'\nOptions: lightning-liger fit --help\n"


def bug():
    return None + 1


def misuse():
    raise ValueError("not about settings")


@pytest.mark.parametrize("cause", [bug, misuse])
def test_bugs_and_errors_of_user_code_keep_their_traceback(tiny_arguments, monkeypatch, cause):
    monkeypatch.setattr(LigerCausalLM, "training_step", lambda self, batch, batch_idx: cause())
    with pytest.raises((TypeError, ValueError)):
        main(["fit", *tiny_arguments, "--trainer.callbacks=null"])


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


def test_model_with_fewer_embeddings_than_tokens_is_refused_before_training(tiny_arguments, capsys):
    message = refused(capsys, "fit", *tiny_arguments, "--model.config.vocab_size=270", "--trainer.callbacks=null")
    assert message.startswith(
        "config['vocab_size'] must be at least 300, the number of tokens of the tokenizer, got 270"
    )


def test_fit_writes_a_checkpoint_that_predict_continues_from(tmp_path, capsys, tiny_arguments):
    folder = tmp_path / "checkpoints"
    callbacks = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(folder), "save_last": True},
    }
    main(["fit", *tiny_arguments, f"--trainer.callbacks={json.dumps([callbacks])}"])
    checkpoint = torch.load(folder / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 2
    assert "model.model.layers.0.self_attn.q_proj.weight" in checkpoint["state_dict"]
    printed = capsys.readouterr().out
    assert "fused kernels" in printed
    assert "Training summary" in printed
    assert (tmp_path / "run" / "config.yaml").is_file()
    main(
        [
            "predict",
            *tiny_arguments,
            "--trainer.callbacks=null",
            f"--ckpt_path={folder / 'last.ckpt'}",
            "--data.prompt=line 7",
            "--model.max_new_tokens=3",
        ]
    )
    assert "line 7" in capsys.readouterr().out


@pytest.fixture
def trained(tmp_path, tiny_arguments, capsys) -> tuple[Path, list[str]]:
    """A checkpoint of ``fit``, and the arguments that make the same model without a corpus."""
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    settings = {"dirpath": str(checkpoint.parent), "save_last": True}
    callbacks = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": settings}]
    main(["fit", *tiny_arguments, f"--trainer.callbacks={json.dumps(callbacks)}"])
    capsys.readouterr()
    elsewhere = [each for each in tiny_arguments if "--data.path" not in each and "--data.cache_dir" not in each]
    return checkpoint, [*elsewhere, "--trainer.callbacks=null", f"--data.cache_dir={tmp_path / 'other'}"]


def test_predict_and_export_use_the_tokenizer_of_the_checkpoint_and_read_no_corpus(trained, tmp_path, capsys):
    checkpoint, arguments = trained
    arguments = [*arguments, f"--ckpt_path={checkpoint}"]
    main(["predict", *arguments, "--data.prompt=quick brown fox", "--model.max_new_tokens=1"])
    assert "quick brown fox" in capsys.readouterr().out
    main(["export", *arguments, f"--output={tmp_path / 'exported'}"])
    assert not (tmp_path / "other").exists()
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    content = torch.load(checkpoint, weights_only=True)["TextDataModule"]["tokenizer"]
    assert exported.backend_tokenizer.to_str() == Tokenizer.from_str(content["tokenizer.json"].decode()).to_str()


def test_another_tokenizer_than_the_checkpoints_is_refused(trained, tmp_path, capsys):
    checkpoint, arguments = trained
    arguments = [*arguments, f"--ckpt_path={checkpoint}"]
    (tmp_path / "else.txt").write_text("something else altogether, again and again " * 2000, encoding="utf-8")
    train_bpe_tokenizer(["something else"], 280).save_pretrained(tmp_path / "tokenizer")
    for subcommand in ("fit", "validate"):
        message = refused(capsys, subcommand, *arguments, f"--data.path={tmp_path / 'else.txt'}")
        assert "else.txt" in message
        assert "text.txt" in message
        assert "is not the checkpoint's tokenizer" in message
    for subcommand, *others in (("predict", "--data.prompt=a"), ("export", f"--output={tmp_path / 'exported'}")):
        message = refused(capsys, subcommand, *arguments, *others, f"--data.tokenizer={tmp_path / 'tokenizer'}")
        assert f"data.tokenizer='{tmp_path / 'tokenizer'}'" in message
        assert "text.txt" in message
    assert not (tmp_path / "exported").exists()


def test_checkpoint_without_a_tokenizer_is_used_with_a_warning(trained, tmp_path, capsys, tiny_arguments):
    checkpoint, _ = trained
    contents = torch.load(checkpoint, weights_only=True)
    del contents["TextDataModule"]
    torch.save(contents, checkpoint)
    arguments = [*tiny_arguments, "--trainer.callbacks=null", f"--ckpt_path={checkpoint}"]
    with pytest.warns(
        UserWarning, match=r"no tokenizer: the prompt is encoded with a tokenizer trained on .*text\.txt"
    ):
        main(["predict", *arguments, "--data.prompt=fox", "--model.max_new_tokens=1"])
    with pytest.warns(UserWarning, match="holds no tokenizer: that of the data settings is written"):
        main(["export", *arguments, f"--output={tmp_path / 'exported'}"])
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_export_reads_the_tokenizer_of_a_sharded_checkpoint(trained, tmp_path):
    checkpoint, arguments = trained
    contents = torch.load(checkpoint, weights_only=True)
    folder = tmp_path / "sharded"
    weights = {f"model.{name}": tensor for name, tensor in contents.pop("state_dict").items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, checkpoint_id=folder, no_dist=True)
    torch.save(contents, folder / "meta.pt")
    main(["export", *arguments, f"--ckpt_path={folder}", f"--output={tmp_path / 'exported'}"])
    assert not (tmp_path / "other").exists()
    expected = contents["TextDataModule"]["tokenizer"]["tokenizer.json"].decode()
    assert (
        Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json")).to_str()
        == Tokenizer.from_str(expected).to_str()
    )


def test_settings_win_over_those_of_a_checkpoint_but_for_the_architecture(trained):
    checkpoint, arguments = trained
    arguments = [*arguments, f"--ckpt_path={checkpoint}", "--model.max_new_tokens=3", "--model.config.hidden_size=64"]
    with pytest.warns(UserWarning, match=r"model\.config is taken from the checkpoint: .*hidden_size"):
        made = DryCLI(args=["predict", *arguments])
    assert made.model.hparams.max_new_tokens == 3
    assert made.model.config.hidden_size == 32


def test_checkpoint_of_a_module_made_in_python_is_exported(trained, tmp_path):
    checkpoint, arguments = trained
    contents = torch.load(checkpoint, weights_only=True)
    contents["hyper_parameters"] = {key: contents["hyper_parameters"][key] for key in ("config", "model_type")}
    torch.save(contents, checkpoint)
    main(["export", *arguments, f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'exported'}"])
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.parametrize("num_bytes", [0, 10, 5000])
def test_incomplete_checkpoint_is_named(trained, capsys, num_bytes):
    checkpoint, arguments = trained
    checkpoint.write_bytes(checkpoint.read_bytes()[:num_bytes])
    for subcommand, *others in (("predict", "--data.prompt=a"), ("export", "--output=folder"), ("fit",)):
        message = refused(capsys, subcommand, *arguments, f"--ckpt_path={checkpoint}", *others)
        assert str(checkpoint) in message
        assert "incomplete" in message


def test_predict_with_random_weights_is_refused(tiny_arguments, capsys):
    arguments = ["predict", *tiny_arguments, "--trainer.callbacks=null", "--data.prompt=a"]
    for last in ([], ["--ckpt_path=last"]):  # Lightning goes on without a last checkpoint
        message = refused(capsys, *arguments, *last)
        assert message.startswith("ckpt_path must be a checkpoint to predict with")
        assert "got None" in message


def test_pretrained_weights_bring_their_tokenizer(trained, tmp_path):
    checkpoint, arguments = trained
    folder = tmp_path / "exported"
    main(["export", *arguments, f"--ckpt_path={checkpoint}", f"--output={folder}"])
    made = LigerCLI(
        args=[f"--config={TINY}", *ON_ONE_CPU, f"--model.pretrained={folder}", "--model.config=null"], run=False
    )
    assert made.datamodule.tokenizer == str(folder)


def test_every_module_and_data_module_can_be_named():
    arguments = [f"--model={BoringModel.__module__}.BoringModel", f"--data={BoringModel.__module__}.BoringDataModule"]
    made = LigerCLI(args=[*arguments, *ON_ONE_CPU], run=False)
    assert type(made.model) is BoringModel
    assert type(made.datamodule) is BoringDataModule
