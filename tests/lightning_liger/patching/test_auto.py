"""Auto classes that load patched models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_liger import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText
from tests.lightning_liger.architectures import tiny_image_text_model
from tests.lightning_liger.tiny import tiny_batch, tiny_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def test_pretrained_model_is_patched_and_computes_the_same(checkpoint: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoLigerModelForCausalLM.from_pretrained(checkpoint)
    assert model.liger_report.num_replaced == 2 + 2 + 5 + 1
    batch = tiny_batch()
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    assert model.get_output_embeddings().fusion_counters.num_losses == 1
    model.save_pretrained(checkpoint / "saved")
    saved = AutoModelForCausalLM.from_pretrained(checkpoint / "saved")
    assert saved.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(saved(**batch).loss, plain(**batch).loss)


def test_from_config_takes_the_auto_class_arguments() -> None:
    model = AutoLigerModelForCausalLM.from_config(tiny_llama().config, dtype=torch.bfloat16, kernels="none")
    assert model.dtype == torch.bfloat16
    assert model.liger_report.num_replaced == 0


def test_image_text_model_computes_its_text_loss_fused() -> None:
    model = AutoLigerModelForImageTextToText.from_config(tiny_image_text_model("qwen2_vl").config)
    assert model(**tiny_batch()).loss.isfinite()
    counters = model.get_output_embeddings().fusion_counters
    assert (counters.num_losses, counters.num_materialized) == (1, 0)
