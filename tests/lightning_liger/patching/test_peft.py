"""Adapters of the package peft: on what is patched, in it, and on the LM head."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_liger import LazyLogits, LigerLMMixin, apply_liger_kernels, divergence, lazy_logits, token_scores
from tests.lightning_liger.tiny import TensorSizes, tiny_batch, tiny_model

peft = pytest.importorskip("peft")

EVERYWHERE = ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "backbone": ("llama", {"target_modules": ["q_proj", "gate_proj"]}),
    "everywhere": ("llama", {"target_modules": EVERYWHERE}),
    "head_saved_whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "packed": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj", "lm_head"]}),
    "scaled_logits": ("granite", {"target_modules": EVERYWHERE}),
    "capped_logits": ("gemma2", {"target_modules": ["q_proj", "lm_head"]}),
}


def with_adapters(model_type: str, settings: dict[str, Any], **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 10, "lora_dropout": 0.0} | settings))
    model = peft.get_peft_model(tiny_model(model_type, **overrides), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # the second factor starts as zeros, which would hide it
            nn.init.normal_(parameter, std=0.3)
    return model


def head_counters(model: nn.Module) -> list[Any]:
    return [vars(module)["fusion_counters"] for module in model.modules() if "fusion_counters" in vars(module)]


def assert_same_gradients(model: nn.Module, patched: nn.Module) -> None:
    for (name, want), got in zip(model.named_parameters(), patched.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        if want.grad is not None:
            tolerance = 1e-5 * want.grad.abs().max().item()
            torch.testing.assert_close(
                got.grad, want.grad, rtol=1e-5, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_adapted_model_computes_the_same_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(*CONFIGS[name])
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    assert {"rms_norm", "rope", "linear_cross_entropy"} <= {e.kernel for e in report.entries if e.replacement}
    batch = tiny_batch(batch_size=4, seq_len=23)  # more tokens than any tensor has columns
    loss = model(**batch).loss
    loss.backward()
    with TensorSizes(monkeypatch) as sizes:
        fused_loss = patched(**batch).loss
        fused_loss.backward()
    torch.testing.assert_close(fused_loss, loss, rtol=1e-5, atol=0)
    assert_same_gradients(model, patched)
    assert sum(counters.num_losses for counters in head_counters(patched)) == 1
    assert sum(counters.num_materialized for counters in head_counters(patched)) == 0
    assert sizes.largest < batch["labels"].numel() * model.get_base_model().config.vocab_size
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"]}
        torch.testing.assert_close(patched(**inputs).logits, model(**inputs).logits)


def test_disabled_and_merged_adapters_are_left_out() -> None:
    model = with_adapters(*CONFIGS["everywhere"])
    expected = model(**tiny_batch()).loss
    with model.disable_adapter():
        without = model(**tiny_batch()).loss
    apply_liger_kernels(model)
    torch.testing.assert_close(model(**tiny_batch()).loss, expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(**tiny_batch()).loss, without)
    torch.testing.assert_close(model.merge_and_unload()(**tiny_batch()).loss, expected)


def test_weight_norms_of_dora_need_whole_logits_and_stay_right() -> None:
    model = with_adapters("llama", {"target_modules": ["lm_head"], "use_dora": True})
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    loss = model(**tiny_batch()).loss
    with pytest.warns(UserWarning, match="materializes the logits"):
        fused_loss = patched(**tiny_batch()).loss
    torch.testing.assert_close(fused_loss, loss)


class QuantisedLinear(nn.Module):
    """Stands for a layer of another package: it projects, but is no torch.nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.register_buffer("codes", linear.weight.detach().mul(64).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.codes.to(x.dtype) / 64).t()


def test_quantised_layers_stay_and_are_reported() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, QuantisedLinear(getattr(layer.mlp, name)))
    model.lm_head = QuantisedLinear(model.lm_head)
    plain = copy.deepcopy(model)
    report = apply_liger_kernels(model)
    (head,) = [entry for entry in report.entries if entry.kernel == "linear_cross_entropy"]
    assert (head.replacement, head.reason) == (None, "the head is QuantisedLinear, not torch.nn.Linear")
    assert [entry.count for entry in report.entries if entry.kernel == "silu_mul" and entry.replacement] == [2]
    torch.testing.assert_close(model(**tiny_batch()).loss, plain(**tiny_batch()).loss)


def test_frozen_head_gets_no_gradient_and_lazy_logits_without_any_are_real() -> None:
    model = with_adapters("llama", {"target_modules": ["q_proj"]})
    apply_liger_kernels(model)
    output = model(**tiny_batch())
    assert isinstance(output.logits, LazyLogits)
    output.loss.backward()
    assert model.get_base_model().lm_head.weight.grad is None
    module = type("Module", (LigerLMMixin, nn.Module), {})()
    torch.testing.assert_close(
        module.lm_loss(model(input_ids=tiny_batch()["input_ids"]).logits, tiny_batch()["labels"]), output.loss.detach()
    )


@pytest.mark.parametrize("name", ["everywhere", "head_saved_whole", "scaled_logits", "capped_logits", "two_active"])
def test_scores_and_divergences_are_those_of_the_adapted_head_and_of_the_base_model(name: str) -> None:
    model = with_adapters(*CONFIGS["everywhere" if name == "two_active" else name])
    if name == "two_active":
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"]))
        model.base_model.set_adapter(["default", "second"])
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.shape[0] != 2)
        nn.init.normal_(model.base_model.model.lm_head.lora_B["second"].weight, std=0.3)
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    batch = tiny_batch()
    results = []
    for each in (model, patched):
        logits = each(input_ids=batch["input_ids"]).logits
        with torch.no_grad(), lazy_logits(), each.disable_adapter():
            reference = each(input_ids=batch["input_ids"]).logits
        assert isinstance(logits, LazyLogits) == isinstance(reference, LazyLogits) == (each is patched)
        scores = token_scores(logits, batch["labels"], outputs=("log_probs", "entropy"), temperature=0.8)
        before = token_scores(reference, batch["labels"]).log_probs
        ratio = torch.exp(scores.log_probs - before)
        loss = ratio.mean() - scores.entropy.mean() + divergence(logits, reference, kind="reverse_kl")
        loss.backward()
        results.append(loss.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)
    assert_same_gradients(model, patched)
    assert sum(counters.num_materialized for counters in head_counters(patched)) == 0


def resized(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 8)


def with_lora_of_the_head(model: Any) -> None:
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2))


@pytest.mark.parametrize("change", [resized, with_lora_of_the_head])
def test_head_that_comes_after_the_kernels_is_warned_of(change: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    apply_liger_kernels(model)
    change(model)
    batch = tiny_batch()
    with pytest.warns(UserWarning, match=r"head of LlamaForCausalLM was replaced .*apply_liger_kernels\(model\) again"):
        model(**batch)
    apply_liger_kernels(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model(**batch).logits, LazyLogits)
