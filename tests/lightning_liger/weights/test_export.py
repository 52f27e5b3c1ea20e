"""Checkpoints become Hugging Face folders, and folders become models again."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import LigerCausalLM, export_pretrained
from tests.lightning_liger.architectures import tiny_config
from tests.lightning_liger.strategies.workers.distributed import make_trainer
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch

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
