"""Models of images and text: the loss over their text is fused, and the same."""

import copy
import warnings

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lightning_liger import apply_liger_kernels
from tests.lightning_liger.architectures import IMAGE_TEXT_TYPES, tiny_image_text_model
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients


@pytest.mark.parametrize("model_type", IMAGE_TEXT_TYPES)
def test_text_loss_is_fused_and_the_same(model_type: str) -> None:
    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        pytest.skip("this version of transformers does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_image_text_model(model_type)
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    assert report.num_replaced > 1
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 60, (2, 13), generator=generator)
    labels = input_ids.clone()
    labels[0, :3] = -100
    losses = [each(input_ids=input_ids, labels=labels).loss for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)
    counters = patched.get_output_embeddings().fusion_counters
    assert (counters.num_losses, counters.num_materialized) == (1, 0)
