"""The command line: a yaml file is a whole program, and mistakes in it are named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_liger import LigerCausalLM, LigerStrategy, TrainingSummary, cli
from lightning_liger.callbacks.predictions import PredictionPrinter
from lightning_liger.cli import LigerCLI, main
from lightning_liger.data import TextDataModule
from tests.lightning_liger.strategies.workers.distributed import python_path

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
    monkeypatch.setattr(cli.os, "cpu_count", lambda: 16)


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
    assert {TrainingSummary, PredictionPrinter} <= kinds
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
    monkeypatch.setattr(cli.os, "cpu_count", lambda: 1)
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


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("--model.init_args.learning_speed=1", "learning_speed"),
        ("--trainer.max_stepz=1", "max_stepz"),
        ("--summary.skip_steps=many", "skip_steps"),
    ],
)
def test_unknown_or_mistyped_option_ends_the_command_and_is_named(capsys, argument, part):
    with pytest.raises(SystemExit) as ended:
        LigerCLI(args=[f"--config={TINY}", *ON_ONE_CPU, argument], run=False)
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


def test_unknown_layer_in_a_yaml_ends_fit_with_its_name(tiny_arguments):
    arguments = ["--trainer.strategy=lightning_liger.LigerStrategy", "--trainer.strategy.auto_wrap_policy=[GPT2Block]"]
    with pytest.raises(ValueError, match="auto_wrap_policy names the layer class 'GPT2Block'"):
        main(["fit", *tiny_arguments, *arguments, "--trainer.callbacks=null"])


def test_module_is_a_command_with_help():
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "lightning_liger", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(subcommand in done.stdout for subcommand in ("fit", "validate", "test", "predict"))


def test_help_of_fit_has_the_options_of_trainer_summary_and_checkpoint(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    options = ("--trainer.strategy", "--trainer.precision", "--summary.skip_steps", "--model", "--data", "--ckpt_path")
    assert [option for option in options if option not in printed] == []


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


def test_every_module_and_data_module_can_be_named():
    arguments = [f"--model={BoringModel.__module__}.BoringModel", f"--data={BoringModel.__module__}.BoringDataModule"]
    made = LigerCLI(args=[*arguments, *ON_ONE_CPU], run=False)
    assert type(made.model) is BoringModel
    assert type(made.datamodule) is BoringDataModule
