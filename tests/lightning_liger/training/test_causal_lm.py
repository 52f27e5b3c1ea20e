"""``LigerCausalLM``: its arguments, its optimizer and schedule, and where its model comes from."""

import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from liger_ops.optim import AdamW
from lightning_liger import LigerCausalLM, LigerDeepSpeedStrategy, apply_liger_kernels
from tests.lightning_liger.architectures import tiny_causal_lm, tiny_config
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_batch, tiny_llama


def make_module(strategy: str = "auto", **kwargs: Any) -> LigerCausalLM:
    """A module with its model built, as a Trainer would."""
    module = LigerCausalLM(**({"config": TINY_CONFIG, "warmup_steps": 1} | kwargs))
    module.trainer = quiet_trainer(strategy=strategy)
    module.configure_model()
    return module


class Watch(L.Callback):
    """Keeps the learning rate of each step, of at most 8."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 8


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_norms_and_biases_do_not_decay_and_embeddings_learn_at_their_own_rate(patched: bool, tied: bool) -> None:
    config = TINY_CONFIG | {"tie_word_embeddings": tied}
    options = {"weight_decay": 0.3, "learning_rate": 0.01, "embedding_lr_scale": 30.0}
    module = make_module(config=config, model_type="qwen2", **options)
    if patched:
        apply_liger_kernels(module)
    frozen = module.model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = module.configure_optimizers()["optimizer"]
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups: dict[float, list[str]] = {0.3: [], 0.0: []}
    for group in optimizer.param_groups:
        groups[group["weight_decay"]] += [names[each] for each in group["params"]]
        is_embedding = [names[each] for each in group["params"]] == ["model.model.embed_tokens.weight"]
        assert group["initial_lr"] == pytest.approx(0.3 if is_embedding else 0.01)
    assert all("norm" in name or name.endswith("bias") for name in groups[0.0])
    assert not any("norm" in name or name.endswith("bias") for name in groups[0.3])
    assert "model.model.embed_tokens.weight" in groups[0.3]
    together = groups[0.0] + groups[0.3]
    assert len(together) == len(set(together)) == len(names) - 1
    assert names[frozen] not in together
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_optimizer_is_ours_unless_deepspeed_wants_its_own_kind() -> None:
    module = make_module()
    assert type(module.configure_optimizers()["optimizer"]) is AdamW
    module.trainer = quiet_trainer(strategy=LigerDeepSpeedStrategy(config={"zero_optimization": {"stage": 2}}))
    assert type(module.configure_optimizers()["optimizer"]) is torch.optim.AdamW
    assert module.trainer.strategy.config["zero_allow_untested_optimizer"]


def test_moments_in_8_bits_train_as_float32_to_within_a_hundredth() -> None:
    config = TINY_CONFIG | {"hidden_size": 256, "num_hidden_layers": 1}  # embeddings have float32 in any case
    batches = DataLoader([tiny_batch(seed=seed) for seed in range(4)], batch_size=None)
    ends = {}
    for state_dtype in (None, "8bit"):
        torch.manual_seed(0)
        module = LigerCausalLM(config=config, learning_rate=3e-4, state_dtype=state_dtype, warmup_steps=5)
        trainer = quiet_trainer(max_steps=100)
        trainer.fit(module, batches)
        ends[state_dtype] = trainer.callback_metrics["train_loss"].item()
        states = trainer.optimizers[0].state
        coded = {name for name, each in module.model.named_parameters() if "exp_avg_codes" in states[each]}
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert coded == {"lm_head.weight", *(f"model.layers.0.{kind}.weight" for kind in kinds)}
    assert ends["8bit"] == pytest.approx(ends[None], rel=0.01)


def test_moments_are_deepspeeds_own_and_wrong_ones_are_refused() -> None:
    for changed in ({"state_dtype": "8bit"}, {"stochastic_rounding": True}):
        module = make_module(**changed)
        module.trainer = quiet_trainer(strategy=LigerDeepSpeedStrategy(config={"zero_optimization": {"stage": 2}}))
        with pytest.raises(ValueError, match=f"{next(iter(changed))} must be unset with DeepSpeed"):
            module.configure_optimizers()


@pytest.mark.parametrize(
    ("warmup_steps", "min_lr_ratio"), [(3, 0.1), (0, 0.0), (2, 1.0)], ids=["warmup", "none", "constant"]
)
def test_learning_rate_rises_then_falls_along_a_cosine(warmup_steps: int, min_lr_ratio: float) -> None:
    max_steps, peak, watch = 8, 0.01, Watch()
    module = LigerCausalLM(config=TINY_CONFIG, learning_rate=peak, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
    quiet_trainer(max_steps=max_steps, callbacks=[watch]).fit(module, DataLoader([tiny_batch()] * 3, batch_size=None))
    warmup = [peak * (step + 1) / (warmup_steps + 1) for step in range(warmup_steps)]
    num_decaying = max_steps - warmup_steps
    decay = [
        peak * (min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * step / num_decaying)) / 2)
        for step in range(num_decaying)
    ]
    assert watch.rates == pytest.approx(warmup + decay)
    assert watch.rates[warmup_steps] == peak
    # Past the end it stays at the floor.
    assert module._learning_rate_factor(max_steps + 5, warmup_steps) == pytest.approx(min_lr_ratio)


class Endless(IterableDataset[dict[str, Tensor]]):
    """Data without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return itertools.repeat(tiny_batch())


@pytest.mark.parametrize(
    "limits",
    [{"max_epochs": 1}, {"max_epochs": -1}, {"max_epochs": -1, "limit_train_batches": 2}],
    ids=["no_length", "no_end", "no_last_epoch"],
)
@pytest.mark.parametrize("num_training_steps", [None, 4])
def test_learning_rate_of_unknown_steps_stays_at_its_peak_unless_their_number_is_given(
    limits: dict[str, Any], num_training_steps: int | None
) -> None:
    watch, peak = Watch(), 0.01
    options = {"learning_rate": peak, "warmup_steps": 2, "num_training_steps": num_training_steps}
    module = LigerCausalLM(config=TINY_CONFIG, **options)
    trainer = quiet_trainer(callbacks=[watch], **limits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(Endless(), batch_size=None))
    factors = [1 / 3, 2 / 3, *([1.0] * 6 if num_training_steps is None else [1.0, 0.55, *[0.1] * 4])]
    assert watch.rates == pytest.approx([peak * factor for factor in factors])
    found = [str(each.message) for each in caught if "num_training_steps" in str(each.message)]
    assert len(found) == (num_training_steps is None)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "gpt_oss", "zamba"])
@pytest.mark.parametrize("on_meta", [False, True], ids=["cpu", "meta"])
def test_weight_decay_leaves_vectors_and_state_spaces_of_any_architecture(model_type: str, on_meta: bool) -> None:
    config = tiny_config(model_type).to_diff_dict()
    config.pop("model_type")
    strategy = "liger_fsdp" if on_meta else "auto"
    module = make_module(strategy, model_type=model_type, config=config, weight_decay=0.3)
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    decayed = {names[each]: each for group in groups if group["weight_decay"] for each in group["params"]}
    assert len(decayed) > 5
    assert all(parameter.ndim > 1 for parameter in decayed.values())
    assert not [name for name in decayed if name.endswith(("A_log", ".D", "bias")) or "norm" in name]
    assert set(names.values()) - decayed.keys()


def test_setting_that_has_no_effect_in_a_checkpoint_is_refused(checkpoint_folder: Path) -> None:
    """rope_parameters in the folder's config.json win over the former name."""
    with pytest.raises(ValueError, match=r"config must be settings of 'llama', got 'rope_theta': 5000\.0"):
        LigerCausalLM(pretrained=str(checkpoint_folder), config={"rope_theta": 5000.0})
    assert LigerCausalLM(config={"rope_theta": 5000.0}).config.rope_parameters["rope_theta"] == 5000.0


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_is_built_in_the_dtype_of_the_precision_plugin(checkpoint_folder: Path, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)  # what bf16-true does around configure_model; restored by a fixture
    for source in ({}, {"pretrained": str(checkpoint_folder), "config": None}):
        module = make_module(**source)
        assert {parameter.dtype for parameter in module.model.parameters()} == {dtype}
        assert module.model.training


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_predict_step_continues_prompts(temperature: float) -> None:
    config = TINY_CONFIG | {"eos_token_id": None}
    module = make_module(config=config, max_new_tokens=5, temperature=temperature).eval()
    apply_liger_kernels(module)
    prompts = tiny_batch(num_ignored=0)["input_ids"]
    draws: list[Tensor] = [module.predict_step({"input_ids": prompts}, 0) for _ in range(3)]
    assert all(draw.shape == (2, 11 + 5) and torch.equal(draw[:, :11], prompts) for draw in draws)
    is_greedy = all(torch.equal(draw, draws[0]) for draw in draws)
    assert is_greedy == (temperature == 0.0)


@pytest.mark.parametrize("strategy", ["liger", "liger_fsdp", "liger_model_parallel"])
def test_strategies_that_shard_build_the_model_on_the_meta_device(checkpoint_folder: Path, strategy: str) -> None:
    for source in ({}, {"pretrained": str(checkpoint_folder), "config": None}):
        module = make_module(strategy, **source)
        assert {parameter.is_meta for parameter in module.model.parameters()} == {strategy != "liger"}
        assert not module.model.config.use_cache


def test_architecture_that_does_not_heed_the_meta_device_is_refused_without_weights(tmp_path: Path) -> None:
    config = tiny_config("xlnet").to_diff_dict()
    config.pop("model_type")
    with pytest.raises(ValueError, match="model_type='xlnet' cannot be built on the meta device with random weights"):
        make_module("liger_fsdp", model_type="xlnet", config=config, attn_implementation="eager")
    tiny_causal_lm("xlnet").save_pretrained(tmp_path)
    make_module("liger_fsdp", config=None, pretrained=str(tmp_path), attn_implementation="eager")
