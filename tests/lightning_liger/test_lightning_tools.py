"""Lightning's own tools with the modules and strategies of this package, as docs/lightning_tools.md shows them."""

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_liger import LigerCausalLM
from lightning_liger.data import ConversationDataModule, PreferenceDataModule
from lightning_liger.post_training.modules import LigerDPO
from tests.lightning_liger.test_hub import EXAMPLES
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_llama

CONFIG = TINY_CONFIG | {"vocab_size": 320, "max_position_embeddings": 256}


@pytest.fixture(params=["liger", "liger_fsdp"])
def strategy(request):
    return request.param


def causal_lm(**settings) -> LigerCausalLM:
    return LigerCausalLM(config=CONFIG, **settings)


def conversations(tmp_path) -> ConversationDataModule:
    return ConversationDataModule(
        path=EXAMPLES / "conversations.jsonl", tokenizer=EXAMPLES / "tokenizer", max_length=128, batch_size=4,
        chat_template=EXAMPLES / "chat_template.jinja", validation_fraction=0.2, cache_dir=tmp_path / "cache",
    )  # fmt: skip


def test_early_stopping_ends_a_run_that_does_not_improve(tmp_path, strategy):
    stopping = EarlyStopping("val_loss", patience=1)
    module = causal_lm(learning_rate=0.0)
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=8, limit_train_batches=1, limit_val_batches=1, callbacks=[stopping],
        default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, conversations(tmp_path))
    assert (stopping.stopped_epoch, trainer.current_epoch) == (1, 2)
    assert float(stopping.best_score) == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_checkpoints_follow_the_metrics_of_a_loss(tmp_path, strategy):
    checkpoint = ModelCheckpoint(
        tmp_path / "best", "{step}", monitor="val_rewards/margins", mode="max", auto_insert_metric_name=False
    )
    stopping = EarlyStopping("val_rewards/accuracies", mode="max", patience=9)
    tiny_llama(**CONFIG).save_pretrained(tmp_path / "model")
    module = LigerDPO(pretrained=tmp_path / "model", learning_rate=1e-2)
    data = PreferenceDataModule(
        path=EXAMPLES / "preference.jsonl", tokenizer=EXAMPLES / "tokenizer", validation_fraction=0.2, batch_size=4,
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=3, limit_train_batches=2, limit_val_batches=2, callbacks=[checkpoint, stopping],
        default_root_dir=tmp_path, num_sanity_val_steps=0, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, data)
    (file,) = (tmp_path / "best").iterdir()
    assert checkpoint.best_model_path == str(file)
    best = trainer.validate(module, data, ckpt_path="best", verbose=False)[0]["val_rewards/margins"]
    assert best == pytest.approx(float(checkpoint.best_model_score), rel=1e-4)
    assert best > 0


class Weights(L.Callback):
    """Keeps the weights after each step, and those that validation uses."""

    def __init__(self) -> None:
        self.trained: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.trained.append(pl_module.model.lm_head.weight.detach().clone())

    def on_validation_batch_end(self, trainer, pl_module, *_) -> None:
        self.validated.append(pl_module.model.lm_head.weight.detach().clone())


def test_moving_average_of_weights_is_validated_and_saved(tmp_path):
    average, seen = EMAWeightAveraging(decay=0.5), Weights()
    trainer = quiet_trainer(
        strategy="liger", max_steps=4, val_check_interval=4, limit_val_batches=1, callbacks=[seen, average],
        default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    module = causal_lm(learning_rate=1e-2)
    trainer.fit(module, conversations(tmp_path))
    first, *others = seen.trained
    expected = first
    for weight in others:
        expected = 0.5 * expected + 0.5 * weight
    assert not torch.allclose(expected, others[-1], atol=1e-4)
    torch.testing.assert_close(seen.validated[-1], expected)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(saved["model.lm_head.weight"], expected)


@pytest.mark.parametrize("strategy", ["liger_fsdp", "liger_model_parallel"])
def test_averages_of_shards_are_refused(tmp_path, strategy):
    trainer = quiet_trainer(strategy=strategy, max_steps=1, callbacks=[EMAWeightAveraging(decay=0.5)])
    with pytest.raises(ValueError, match=r"callbacks must not have EMAWeightAveraging under Liger.*'liger_ddp'"):
        trainer.fit(causal_lm(), conversations(tmp_path))


def test_learning_rate_finder_sets_the_rate_and_restores_the_weights(tmp_path, strategy):
    module = causal_lm(learning_rate=1e-7, warmup_steps=0)
    trainer = quiet_trainer(strategy=strategy, max_steps=20, default_root_dir=tmp_path, enable_checkpointing=True)
    found = Tuner(trainer).lr_find(module, conversations(tmp_path), min_lr=1e-5, max_lr=1.0, num_training=20)
    rates, losses = found.results["lr"], found.results["loss"]
    assert len(rates) == len(losses) == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert rates[0] < 1e-4 < rates[-1]
    assert module.hparams["learning_rate"] == found.suggestion() > 1e-7
    trainer.fit(module, conversations(tmp_path))
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(found.suggestion())


def test_batch_size_finder_stops_where_memory_ends(tmp_path):
    class Limited(LigerCausalLM):
        def training_step(self, batch, batch_idx):
            if len(batch["input_ids"]) > 10:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    module, data = Limited(config=CONFIG), conversations(tmp_path)
    trainer = quiet_trainer(strategy="liger", max_steps=2, default_root_dir=tmp_path, enable_checkpointing=True)
    found = Tuner(trainer).scale_batch_size(module, datamodule=data, mode="binsearch", init_val=2, steps_per_trial=1)
    assert found == data.batch_size == 9  # less a margin of 5%
    trainer.fit(module, data)
    assert trainer.global_step == 2
