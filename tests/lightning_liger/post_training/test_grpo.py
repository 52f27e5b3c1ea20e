"""``LigerGRPO``: its reference models, its arguments in yaml, and the options that reach the loss."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from lightning_liger import LigerGRPO, LigerPolicyMixin, PolicyOptions
from tests.lightning_liger.post_training.completion_batches import (
    Policy,
    apart,
    assert_same_weights,
    expected_model,
    fit,
    sequences,
    stock_scores,
)
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_llama

OPTIONS: dict[str, Any] = {"loss_type": "dapo", "beta": 0.5}
OLD = ("old_per_token_logps",)


def with_reference(model: nn.Module, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with torch.no_grad():
        log_probs, _ = stock_scores(model, examples)
    rows = zip(examples, log_probs, strict=True)
    return [each | {"ref_per_token_logps": row[: len(each["completion_ids"])].float()} for each, row in rows]


def grpo(**changes: Any) -> LigerGRPO:
    config = {key: value for key, value in TINY_CONFIG.items() if key != "head_dim"}
    settings: dict[str, Any] = {"config": config, "temperature": 1.3, "learning_rate": 0.01, "min_lr_ratio": 1.0}
    return LigerGRPO(**(settings | OPTIONS | changes))


def test_reference_is_a_frozen_model_in_evaluation_mode_that_no_checkpoint_holds() -> None:
    examples = sequences(6, columns=OLD)
    expected, losses = expected_model([with_reference(tiny_llama(), examples)] * 3, PolicyOptions(**OPTIONS))

    class WithReference(Policy):
        def configure_model(self) -> None:
            super().configure_model()
            self.ref_model = tiny_llama(attention_dropout=0.5)

    module = WithReference(PolicyOptions(**OPTIONS))
    fit(module, [apart(examples)] * 3)
    assert [step["train_loss_step"] for step in module.steps] == pytest.approx(losses, rel=1e-4)
    assert_same_weights(module.model, expected)
    assert module.ref_model is not None
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in module.ref_model.parameters())
    assert not [name for name in module.state_dict() if name.startswith("ref_model")]
    assert module.steps[-1]["train_kl_step"] > 1e-4


def test_finished_module_trains_against_a_copy_of_its_first_weights() -> None:
    batch = apart(sequences(6, columns=OLD))
    module = grpo()
    fit(module, [batch] * 2)
    assert module.ref_model is not None
    first, last = (dict(model.named_parameters()) for model in (module.ref_model, module.model))
    assert all(not torch.equal(first[name], parameter) for name, parameter in last.items())
    assert float(module.trainer.callback_metrics["train_kl"]) > 0
    stored = with_reference(module.ref_model, sequences(6, columns=OLD))
    by_column = grpo(reference="columns")
    by_column.model = module.model
    expected = float(module.step_loss("val", batch).terms[0].total.detach())
    assert float(by_column.step_loss("val", apart(stored)).terms[0].total.detach()) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        by_column.step_loss("val", batch)
    assert grpo(beta=0.0).needs_reference is False


def test_reference_of_adapters_is_the_model_without_them() -> None:
    pytest.importorskip("peft")
    batch = apart(sequences(6, columns=OLD))
    module = grpo(lora={"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False})
    fit(module, [batch])
    assert module.ref_model is None
    trained = [name for name, parameter in module.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert float(module.trainer.callback_metrics["train_kl"]) > 0  # adapters start different from zero


def test_every_option_is_an_argument_with_the_same_default_and_reaches_the_loss() -> None:
    parameters = inspect.signature(LigerGRPO.__init__).parameters
    options = [each for each in fields(PolicyOptions) if each.init]
    assert {each.name: each.default for each in options} == {
        each.name: parameters[each.name].default for each in options
    }
    for each in options:
        assert f"    {each.name}: " in (LigerGRPO.__init__.__doc__ or "")
    module = grpo(loss_type="rloo", beta=0.0, entropy_coef=0.5, steps_per_generation=3)
    assert module.policy_options == PolicyOptions(loss_type="rloo", entropy_coef=0.5)
    assert (module.temperature, module.steps_per_generation, module.disable_dropout) == (1.3, 3, False)
    assert module.hparams["loss_type"] == "rloo"
    assert isinstance(module, LigerPolicyMixin)
