"""``configure_model`` must keep the model that earlier stages trained, and the mixin notices where it does not."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_liger import LigerCallback, LigerCausalLM, LigerLMMixin
from tests.lightning_liger.post_training.training import Recorded, loader
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_batch, tiny_llama

REFUSED = r"configure_model must keep self\.model"
DATA = loader([tiny_batch()])


class Unguarded(LigerLMMixin, Recorded):
    def configure_model(self) -> None:
        self.model = tiny_llama()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits


class Guarded(Unguarded):
    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            super().configure_model()


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = model

    def forward(self, input_ids: Tensor) -> Any:
        return self.whole(input_ids)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_stage_after_fit_on_a_new_model_is_refused_and_the_trained_one_kept(
    tmp_path: Path, stage: str, patched: bool
) -> None:
    module = Unguarded()
    callbacks = [LigerCallback()] if patched else []
    quiet_trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks).fit(module, DATA)
    trained = module.model
    with pytest.raises(RuntimeError, match=rf"Unguarded\.{REFUSED}, got a new LlamaForCausalLM"):
        getattr(quiet_trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks), stage)(module, DATA)
    assert module.model is trained


def test_weights_of_a_checkpoint_may_go_into_a_new_model(tmp_path: Path) -> None:
    module, trainer = Unguarded(), quiet_trainer(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(module, DATA)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    weight = module.model.lm_head.weight.detach().clone()
    trainer.validate(module, DATA, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert torch.equal(module.model.lm_head.weight, weight)


def test_models_that_their_user_swaps_are_no_mistake(tmp_path: Path) -> None:
    module, trainer = Guarded(), quiet_trainer(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(module, DATA)
    module.model = other = tiny_llama()
    trainer.validate(module, DATA, verbose=False)
    assert module.model is other
    module.model = None
    trainer.fit(module, DATA)
    unguarded = Unguarded()
    trainer.fit(unguarded, DATA)
    unguarded.model = None  # a fresh start is what its user wants
    trainer.fit(unguarded, DATA)


def test_model_may_be_wrapped_later(tmp_path: Path) -> None:
    module, trainer = Guarded(), quiet_trainer(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(module, DATA)
    module.configure_model = lambda: setattr(module, "model", Wrapper(module.model))
    trainer.validate(module, DATA, verbose=False)
    assert isinstance(module.model, Wrapper)


@pytest.mark.parametrize(
    "use", [lambda lm: lm.model, lambda lm: lm(**tiny_batch()), lambda lm: lm.training_step(tiny_batch(), 0)]
)
def test_missing_model_is_an_error_that_says_where_to_set_it(use: Any) -> None:
    class Empty(LigerLMMixin, L.LightningModule):
        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs)

    for module in (Empty(), LigerCausalLM(config=TINY_CONFIG)):
        assert not hasattr(module, "model")
        with pytest.raises(AttributeError, match=r"has no self.model yet: set it in __init__, or in configure_model"):
            use(module)
    wrong = Empty()
    wrong.model = None
    with pytest.raises(TypeError, match=r"self.model must be a torch.nn.Module, got None"):
        wrong.training_step(tiny_batch(), 0)
