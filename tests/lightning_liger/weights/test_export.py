"""Checkpoints become Hugging Face folders, by function and by command, and folders become models again."""

import json
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_liger import LigerCausalLM, export_pretrained
from lightning_liger.cli import main
from tests.lightning_liger.architectures import tiny_config
from tests.lightning_liger.strategies.workers.distributed import make_trainer
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch

TINY_YAML = Path(__file__).parents[3] / "examples" / "tiny.yaml"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


def train(folder: Path, module: LigerCausalLM, **options) -> tuple[nn.Module, Path]:
    """The trained model and its checkpoint."""
    trainer = make_trainer(root=folder, **{"max_steps": 2, **options})
    trainer.fit(module, DataLoader([tiny_batch()] * 3, batch_size=None))
    trainer.save_checkpoint(folder / "trained.ckpt")
    return module.model, folder / "trained.ckpt"


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tiny_batch()["input_ids"]).logits.float()


@pytest.mark.parametrize(
    ("strategy", "tied", "precision"),
    [
        ("auto", False, "32-true"),
        ("liger", True, "32-true"),
        ("liger", False, "bf16-true"),
        ("auto", True, "bf16-true"),
    ],
)
def test_folder_has_the_trained_model_and_training_goes_on_from_it(tmp_path, strategy, tied, precision):
    config = TINY_CONFIG | {"tie_word_embeddings": tied}
    model, checkpoint = train(tmp_path, LigerCausalLM(config=config), strategy=strategy, precision=precision)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    export_pretrained(LigerCausalLM(config=config), checkpoint, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == model.dtype
    assert loaded.config.use_cache
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert {name for name, _ in loaded.named_parameters()} == weights.keys()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    if precision == "32-true":  # otherwise Lightning rounds the frequencies of rotary embeddings, too
        assert torch.equal(logits_of(loaded), logits_of(model))
    again = LigerCausalLM(pretrained=str(tmp_path / "out"), learning_rate=0.0)
    train(tmp_path, again, strategy=strategy, precision=precision, max_steps=1)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in again.model.named_parameters())


def test_module_whose_model_was_built_is_exported_in_several_files(tmp_path):
    model, checkpoint = train(tmp_path, LigerCausalLM(config=TINY_CONFIG))
    module = LigerCausalLM(config=TINY_CONFIG)
    module.configure_model()
    assert not torch.equal(module.model.lm_head.weight, model.lm_head.weight)
    export_pretrained(module, checkpoint, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits_of(model))


def test_experts_are_saved_as_their_architecture_has_them(tmp_path):
    config = tiny_config("mixtral").to_diff_dict()
    config.pop("model_type")
    model, checkpoint = train(tmp_path, LigerCausalLM(model_type="mixtral", config=config))
    export_pretrained(LigerCausalLM(model_type="mixtral", config=config), checkpoint, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_module_without_a_model_is_refused(tmp_path):
    class NoModel(L.LightningModule):
        pass

    torch.save({"state_dict": {}}, tmp_path / "some.ckpt")
    with pytest.raises(TypeError, match=r"NoModel\.model must be a Hugging Face model, got NoneType"):
        export_pretrained(NoModel(), tmp_path / "some.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_writes_model_and_tokenizer_whatever_the_trainer_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {index}: the quick brown fox" for index in range(400)), encoding="utf-8")
    arguments = [
        f"--config={TINY_YAML}",
        f"--trainer.default_root_dir={tmp_path}",
        f"--data.path={text}",
        f"--data.cache_dir={tmp_path / 'cache'}",
        "--data.vocab_size=300",
        "--data.block_size=32",
        "--data.batch_size=2",
        "--model.config=" + json.dumps(TINY_CONFIG | {"vocab_size": 300}),
    ]
    saving = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(tmp_path), "save_last": True}}
    limits = ["--trainer.max_steps=1", "--trainer.val_check_interval=1", "--trainer.limit_val_batches=0"]
    on_one_cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    main(["fit", *arguments, *limits, *on_one_cpu, f"--trainer.callbacks={json.dumps([saving])}"])
    capsys.readouterr()
    checkpoint = tmp_path / "last.ckpt"
    main(["export", *arguments, "--trainer.devices=8", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'out'}"])
    assert "CPU processes" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(parameter, weights[f"model.{name}"]) for name, parameter in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("the quick brown fox")["input_ids"]) == "the quick brown fox"
