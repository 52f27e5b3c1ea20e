"""A patched Llama on the GPU, in bfloat16: no further from float64 than the same model unpatched."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_liger import apply_liger_kernels

pytestmark = pytest.mark.gpu


def _loss_and_gradients(model: LlamaForCausalLM, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    input_ids = labels.clamp(min=0)
    loss = model(input_ids=input_ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_patched_llama_in_bfloat16_is_no_further_from_float64_than_unpatched(tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 1031, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    labels = torch.randint(0, config.vocab_size, (4, 257), device="cuda")
    labels[:, :60] = -100
    truth_model = copy.deepcopy(model).double()
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    assert report.num_replaced == 3 + 3 + 7 + 1

    truth = _loss_and_gradients(truth_model, labels)
    eager = _loss_and_gradients(model, labels)
    fused = _loss_and_gradients(patched, labels)
    total = {"eager": 0.0, "fused": 0.0}
    for name, want in truth.items():
        scale = want.norm().item()
        error = {"eager": (eager[name].double() - want).norm().item() / scale}
        error["fused"] = (fused[name].double() - want).norm().item() / scale
        # One tensor's rounding is a matter of luck: a little slack for each, none for all of them together.
        assert error["fused"] <= 1.5 * error["eager"] + torch.finfo(torch.bfloat16).eps / 4, (name, error)
        for kind in total:
            total[kind] += error[kind] if name != "loss" else 0.0
    assert total["fused"] <= total["eager"], total
