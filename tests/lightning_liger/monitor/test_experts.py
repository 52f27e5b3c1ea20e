"""Experts in FLOPs, in active parameters and in what ``LigerMonitor`` logs of their tokens, against counts by hand."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_ops.nn
from lightning_liger import LigerMonitor, LigerSingleDeviceStrategy
from lightning_liger.monitor.experts import ExpertLoads, find_experts, num_active_parameters
from lightning_liger.monitor.flops import count_flops, model_flops
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.post_training.training import LM, fit
from tests.lightning_liger.tiny import tiny_batch, tiny_model

# Which weights are experts', and the share of them that a token uses. A half of longcat_flash's choices return the
# token, and so do those rows of gate_up_proj that no expert has. Jetmoe's attention has its router among its experts.
SHARES: dict[str, dict[str, float]] = {
    "mixtral": {r"experts\.(gate_up|down)_proj": 2 / 4},
    "dbrx": {r"\.(w1|v1|w2)$": 2 / 4},
    "llama4_text": {r"experts\.(gate_up|down)_proj": 2 / 4},
    "longcat_flash": {r"experts\.gate_up_proj": 2 / 8 / 2, r"experts\.down_proj": 2 / 8},
    "jetmoe": {r"\.(in|out)put_linear\.weight": 2 / 4, r"attention\.experts\.": 2 / 4},
}


@pytest.mark.parametrize("name", SHARES)
def test_of_experts_those_count_that_a_token_is_sent_to(name: str) -> None:
    model = tiny_causal_lm(name)
    used = {
        each: weight.numel() * next((share for part, share in SHARES[name].items() if re.search(part, each)), 1.0)
        for each, weight in model.named_parameters()
    }
    assert num_active_parameters(model) == sum(used.values()) < model.num_parameters()
    head = model.get_output_embeddings().weight
    others = {id(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    products = head.numel() + sum(
        used[each] for each, w in model.named_parameters() if w.ndim > 1 and id(w) not in others
    )
    flops = model_flops(model)
    assert flops.per_token == pytest.approx(6 * products, rel=1e-3)
    assert flops.is_traced == bool(flops.attention) == (name != "jetmoe")  # which asks for numbers of tokens


class Own(nn.Module):
    """A mixture outside of Hugging Face, with a router of its own next to weights without one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixture = nn.Embedding(30, 16), liger_ops.nn.SparseMoE(16, 8, 6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.mixture(self.embedding(tokens))
        return output


def test_modules_and_functions_of_this_package_count_as_transformers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Own()
    expected = 6 * (16 * 6 + 2 * 3 * 16 * 8)
    assert model_flops(model).per_token == expected
    assert num_active_parameters(model) == 30 * 16 + 16 * 6 + 2 * 3 * 16 * 8
    monkeypatch.setattr("lightning_liger.monitor.flops.find_experts", lambda model: {})
    assert model_flops(model).per_token == expected  # the op's own
    model.mixture.experts.requires_grad_(False)
    assert count_flops(model, 1) == 6 * 16 * 6 + 4 * 2 * 3 * 16 * 8


def loads_of(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """The tokens of each expert of each layer in batches, ``[num_layers, num_experts]``, from the router's logits."""
    top_k, counts = model.config.num_experts_per_tok, []
    for batch in batches:
        logits = torch.stack(model(**batch, output_router_logits=True).router_logits)
        chosen = logits.topk(top_k, -1).indices.flatten(1)
        counts.append(torch.stack([torch.bincount(each, minlength=logits.shape[-1]) for each in chosen]))
    return torch.stack(counts).sum(0)


class Still(LM):
    """Its weights stay as they are."""

    learning_rate = 0.0


@pytest.fixture(autouse=True)
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_liger.monitor.callback.measure_matmul_flops", lambda device, dtype: 1e12)


@pytest.mark.parametrize(
    ("kernels", "checkpointing"), [("auto", "none"), ("auto", "full"), ("none", "own"), ("none", "reentrant")]
)
def test_tokens_of_experts_are_those_of_the_last_step(
    kernels: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, imbalance = [], ExpertLoads.imbalance
    monkeypatch.setattr(ExpertLoads, "imbalance", lambda self, all_: counts.append(all_) or imbalance(self, all_))
    model = tiny_model("qwen3_moe", num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16, use_cache=False)
    stock = copy.deepcopy(model).eval()
    if checkpointing in ("own", "reentrant"):
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    batches = [tiny_batch(1, length, 1, seed) for seed, length in enumerate((5, 9, 3, 4, 6, 8, 2, 7))]
    monitor = LigerMonitor(every_n_steps=2, page=None)
    ours = None if checkpointing in ("own", "reentrant") else checkpointing
    strategy = LigerSingleDeviceStrategy(kernels=kernels, activation_checkpointing=ours)
    fit(Still(model), batches, batches[:3], strategy=strategy, callbacks=[monitor], accumulate_grad_batches=2)
    assert len(monitor.points) == 2
    for point, step, counted in zip(monitor.points, (batches[2:4], batches[6:8]), counts, strict=True):
        loads = loads_of(stock, step)
        assert counted.view_as(loads).tolist() == loads.tolist()
        assert point["expert_imbalance"] == pytest.approx(float((loads.amax(1) * 12 / loads.sum(1)).max()))
        assert point["idle_experts_share"] == pytest.approx(float((loads == 0).double().mean()))
    assert monitor.points[0]["expert_imbalance"] != monitor.points[1]["expert_imbalance"]
    assert "times the mean, " in monitor.rows()["Busiest expert"]
    assert not any(each._forward_pre_hooks for each in find_experts(model))


def test_models_without_experts_have_no_numbers_of_them() -> None:
    monitor = LigerMonitor(every_n_steps=1, page=None)
    fit(LM(), [tiny_batch()], callbacks=[monitor])
    assert not {"expert_imbalance", "idle_experts_share"} & monitor.points[0].keys()
    assert "Busiest expert" not in monitor.rows()
