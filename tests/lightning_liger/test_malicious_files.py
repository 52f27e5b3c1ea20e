"""No entry point runs code of a file that it loads."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_liger as liger
from lightning_liger import LigerCausalLM, export_pretrained, load_pretrained
from lightning_liger.cli import main
from lightning_liger.data.tokenizer import load_tokenizer
from tests.lightning_liger.malicious import Payload, with_metadata, write_deepspeed, write_sharded
from tests.lightning_liger.strategies.workers.distributed import make_trainer
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch

REFUSED = "is incomplete, or loading it could run code"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


@pytest.fixture
def marker(tmp_path):
    """Where code that must not run would make a folder."""
    marker = tmp_path / "code was run"
    yield marker
    assert not marker.exists()


def file(path: Path, marker: Path) -> Path:
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {}, "callbacks": Payload(marker)}, path)
    return path


def metadata(path: Path, marker: Path) -> Path:
    return with_metadata(path, Payload(marker))


ENGINES = {"Single": (), "DDP": (), "FSDP": (metadata,), "ModelParallel": (metadata,)}


@pytest.mark.parametrize("prefix", ["", "Fabric"], ids=["trainer", "fabric"])
@pytest.mark.parametrize("fault_tolerance", [True, False])
@pytest.mark.parametrize(("name", "write"), [(name, write) for name in ENGINES for write in (file, *ENGINES[name])])
def test_strategies_refuse_a_checkpoint_before_they_read_it(tmp_path, marker, name, prefix, fault_tolerance, write):
    suffix = "Device" if name == "Single" else ""
    strategy = getattr(liger, f"{prefix}Liger{name}{suffix}Strategy")(fault_tolerance=fault_tolerance)
    path = write(tmp_path / "evil", marker)
    with pytest.raises(pickle.UnpicklingError, match=f"{path}.* {REFUSED}"):
        strategy.load_checkpoint(path)


@pytest.mark.parametrize("prefix", ["", "Fabric"], ids=["trainer", "fabric"])
def test_files_that_deepspeed_reads_are_refused(tmp_path, marker, prefix):
    engine = pytest.importorskip("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine").TorchCheckpointEngine()
    strategy = getattr(liger, f"{prefix}LigerDeepSpeedStrategy")()
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").LossScaler(1.0)
    path = write_deepspeed(tmp_path / "evil", {"loss_scaler": scaler}, {"loss_scaler": Payload(marker)})
    honest, evil = sorted((path / "checkpoint").iterdir())
    for weights_only in (None, True):
        strategy._checkpoints.load("path", path, weights_only, lambda _: engine.load(honest))
        with pytest.raises(pickle.UnpicklingError, match=f"{path} {REFUSED}"):
            strategy._checkpoints.load("path", path, weights_only, lambda _: engine.load(evil))


@pytest.mark.parametrize("strategy", ["liger_fsdp", "liger_model_parallel"])
def test_shards_of_another_model_are_an_error_that_names_the_folder(tmp_path, strategy):
    path = write_sharded(tmp_path / "other")
    trainer = make_trainer(root=tmp_path, strategy=strategy, max_steps=1)
    loader = DataLoader([tiny_batch()] * 2, batch_size=None)
    with pytest.raises(ValueError, match=rf"^{path} is incomplete, or does not fit the model: .*Missing key"):
        trainer.fit(LigerCausalLM(config=TINY_CONFIG), loader, ckpt_path=path)


@pytest.mark.parametrize("write", [file, metadata])
def test_export_refuses_a_checkpoint(tmp_path, marker, monkeypatch, capsys, write):
    path = write(tmp_path / "evil", marker)
    with pytest.raises(pickle.UnpicklingError, match=f"{path}.*{REFUSED}"):
        export_pretrained(LigerCausalLM(config=TINY_CONFIG), path, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    model = ["--model=LigerCausalLM", f"--model.config={json.dumps(TINY_CONFIG)}"]
    model += ["--data=lightning.pytorch.demos.boring_classes.BoringDataModule"]
    with pytest.raises(SystemExit):
        main(["export", *model, f"--ckpt_path={path}", f"--output={tmp_path / 'out'}"])
    assert "could run code" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_weights_in_pickled_files_run_no_code(tmp_path, marker):
    torch.save({"weight": Payload(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match=rf"pytorch_model\.bin {REFUSED}"):
        load_pretrained(nn.Linear(2, 2), tmp_path)


def own_code(folder: Path, marker: Path, **config: Any) -> Path:
    """A folder with a model and a tokenizer that bring their own code."""
    (folder / "evil.py").parent.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"auto_map": classes, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes, "tokenizer_class": "T"}))
    return folder


def test_code_in_a_models_folder_is_not_run(tmp_path, marker):
    unknown = own_code(tmp_path / "unknown", marker, model_type="evil")
    with pytest.raises(ValueError, match="trust_remote_code"):
        LigerCausalLM(pretrained=str(unknown))
    folder = own_code(tmp_path / "llama", marker, **TINY_CONFIG, model_type="llama")
    LigerCausalLM(pretrained=str(folder))
    with pytest.raises(ValueError, match="could not be loaded by AutoTokenizer"):
        load_tokenizer(folder)
    # Neither do hyperparameters of a checkpoint trust a folder.
    trusting = {"pretrained": str(unknown), "config": {"trust_remote_code": True}}
    content = {"pytorch-lightning_version": "2.6.0", "state_dict": {}, "hyper_parameters": trusting}
    torch.save(content, tmp_path / "evil.ckpt")
    for make in (lambda: LigerCausalLM(**trusting), lambda: LigerCausalLM.load_from_checkpoint(tmp_path / "evil.ckpt")):
        with pytest.raises(ValueError, match="config must not have trust_remote_code"):
            make()
