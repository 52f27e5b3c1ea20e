"""The model card says what was trained, on which part of which data, and with which teacher."""

import pytest
import yaml
from huggingface_hub import ModelCard

from lightning_liger import LigerCausalLM
from lightning_liger.data import ImageTextDataModule, PreferenceDataModule, TeacherTopKDataModule
from lightning_liger.weights.card import model_card
from tests.lightning_liger.test_hub import EXAMPLES
from tests.lightning_liger.tiny import TINY_CONFIG

RECORDS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4


def card_of(data, settings=None, **model) -> ModelCard:
    module = LigerCausalLM(**({"config": TINY_CONFIG} | model))
    module.configure_model()
    checkpoint = {"hyper_parameters": settings or {}, "global_step": 1200, "callbacks": {"monitor": {"totals": {}}}}
    return model_card(module, checkpoint, data)


def test_stored_teachers_and_parts_of_data_are_named():
    data = TeacherTopKDataModule(path=EXAMPLES / "teacher_topk.safetensors")
    settings = {"pretrained": "someone/small", "teacher": "someone/large", "teacher_revision": "v2"}
    card = card_of(data, settings)
    assert "- Teacher: someone/large (revision v2)" in card.text
    assert "teacher_topk.safetensors (stored predictions of a teacher, TeacherTopKDataModule)" in card.text
    assert "- Optimizer steps: 1,200" in card.text
    assert "Tokens" not in card.text
    metadata = (card.data.pipeline_tag, card.data.base_model, card.data.datasets)
    assert metadata == ("text-generation", "someone/small", None)
    data = PreferenceDataModule(path=RECORDS, tokenizer=EXAMPLES / "tokenizer", max_records=3)
    assert "- Data: records in memory, max_records 3 (PreferenceDataModule)" in card_of(data).text
    assert "- Data: a.txt\n" in card_of("a.txt").text
    assert "Data" not in card_of(None).text


def test_models_of_images_are_of_another_task():
    pytest.importorskip("PIL")
    example = yaml.safe_load((EXAMPLES.parent / "vision_language.yaml").read_text(encoding="utf-8"))
    model, settings = (example[name]["init_args"] for name in ("model", "data"))
    processor = settings["processor"] | {"tokenizer": str(EXAMPLES / "tokenizer")}
    data = ImageTextDataModule(path=EXAMPLES / "images", processor=processor)
    card = card_of(data, model_type=model["model_type"], config=model["config"])
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "data/images (images with text, ImageTextDataModule)" in card.text
