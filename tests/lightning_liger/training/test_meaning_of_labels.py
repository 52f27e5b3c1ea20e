"""Models whose labels are not next tokens train on their own loss, as a mean over labels, or are refused."""

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lightning_liger import LigerLMMixin
from lightning_liger.post_training.preference import LigerPreferenceMixin
from tests.lightning_liger.post_training.training import LM, Recorded, assert_same_parameters, fit
from tests.lightning_liger.tiny import TINY_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")
BERT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
T5 = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
SIZES = {"vocab_size": 61, "d_model": 16, "max_position_embeddings": 64}
BART = {f"{name}_{key}": n for name in ("encoder", "decoder") for key, n in (("layers", 1), ("attention_heads", 2))}
CLASSES = {"num_labels": 5}
MODELS = {
    "t5": (AutoModelForSeq2SeqLM, "t5", T5 | SIZES),
    "bart": (AutoModelForSeq2SeqLM, "bart", BART | SIZES),
    "bert": (AutoModelForMaskedLM, "bert", BERT),
    "bert classes": (AutoModelForTokenClassification, "bert", BERT | CLASSES),
    "llama classes": (AutoModelForTokenClassification, "llama", TINY_CONFIG | CLASSES),
    "llama sequences": (AutoModelForSequenceClassification, "llama", TINY_CONFIG | CLASSES),
}


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, model_type, settings = MODELS[kind]
    return cls.from_config(AutoConfig.for_model(model_type, **settings))


def batches(model: PreTrainedModel, rng: random.Random) -> list[dict[str, Tensor]]:
    num_labels = model.config.num_labels if "Classification" in type(model).__name__ else 61
    found = []
    for _ in range(2):
        rows, length = rng.randint(1, 3), rng.randint(3, 8)
        target_length = length + rng.randint(0, 2) * model.config.is_encoder_decoder
        labels = torch.randint(num_labels, (rows, target_length))
        labels[0, : rng.randint(0, target_length - 1)] = -100
        batch = {"input_ids": torch.randint(3, 61, (rows, length)), "labels": labels}
        found.append(batch | {"attention_mask": torch.ones_like(batch["input_ids"])})
    return found


@pytest.mark.parametrize("kind", ["t5", "bart", "bert", "bert classes", "llama classes"])
@pytest.mark.filterwarnings("error:the loss of")
def test_step_is_that_of_the_models_own_loss_over_all_labels(kind: str) -> None:
    for seed in range(4):
        model = make_model(kind)
        own, data = copy.deepcopy(model).eval(), batches(model, random.Random(seed))
        trainer = fit(LM(model.eval()), data, data, accumulate_grad_batches=2)
        counts = [(batch["labels"] != -100).sum() for batch in data]
        loss = sum(own(**batch).loss * count for batch, count in zip(data, counts, strict=True)) / sum(counts)
        loss.backward()
        torch.optim.SGD(own.parameters(), lr=0.1).step()
        assert trainer.callback_metrics["train_loss_step"].item() == pytest.approx(loss.item(), rel=1e-5)
        assert_same_parameters(model, own, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            after = sum(own(**batch).loss * count for batch, count in zip(data, counts, strict=True)) / sum(counts)
        assert trainer.callback_metrics["val_loss"].item() == pytest.approx(after.item(), rel=1e-4)


@pytest.mark.parametrize(("kind", "base"), [("llama sequences", LigerLMMixin), ("bert", LigerPreferenceMixin)])
def test_steps_with_another_meaning_of_labels_are_refused(kind: str, base: type) -> None:
    module = type("Module", (base, Recorded), {})(model=make_model(kind), ref_model=make_model(kind))
    batch = {key: torch.ones(2, 4, dtype=torch.int64) for key in ("input_ids", "attention_mask", "completion_mask")}
    with pytest.raises(ValueError, match=f"cannot train on the labels of {type(module.model).__name__}"):
        module.training_step(batch, 0)
