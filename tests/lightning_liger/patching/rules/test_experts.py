"""Experts are found by what they compute, in any layout and with any gate; what resembles them is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_liger.patching.rules import experts
from lightning_liger.patching.rules.base import Patched
from tests.liger_ops.accuracy import few
from tests.lightning_liger.patching.rules.comparing import assert_kept, assert_replaced, assert_same, fill, patched_twin

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "scaled silu": lambda x: x * torch.sigmoid(Experts.alpha * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
}
DRAW = {
    "num_experts": st.sampled_from([3, 6]),
    "hidden_size": st.sampled_from([8, 20]),
    "width": st.sampled_from([8, 12]),
    "names": st.permutations(["b_in", "a_out"]),
    "activation": st.sampled_from(list(ACTIVATIONS)),
    "gate": st.sampled_from(["alone", "halves", "interleaved"]),
    "limit": st.sampled_from([None, 0.75]),
    "limits_output": st.booleans(),
    "up_offset": st.sampled_from([0.0, 1.0]),
    "transposed": st.booleans(),
    "bias": st.booleans(),
    "num_others": st.sampled_from([0, 2]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


class Experts(nn.Module):
    """Experts one after another, as a user writes them."""

    alpha = 2.5

    def __init__(self, draw: dict[str, Any]) -> None:
        super().__init__()
        self.alpha = Experts.alpha
        self.kind, self.count = draw["gate"], draw["num_experts"]
        self.cap = 0.0 if draw["limit"] is None else draw["limit"]
        self.settings = draw
        parts = 1 if self.kind == "alone" else 2
        inner, outer = (parts * draw["width"], draw["hidden_size"]), (draw["hidden_size"], draw["width"])
        for name in draw["names"]:
            size = inner if name == "b_in" else outer
            count = self.count + (draw["num_others"] if name == "b_in" else 0)
            setattr(self, name, nn.Parameter(torch.empty(count, *(size[::-1] if draw["transposed"] else size))))
            if draw["bias"]:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(self.count, size[0])))

    def forward(self, states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        result = torch.zeros_like(states)
        for expert in range(self.count + self.settings["num_others"]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            x = states[token]
            if expert < self.count:
                x = self.project("a_out", expert, self.gate(self.project("b_in", expert, x)))
            result = result.index_add(0, token, (x * scores[token, slot, None]).to(x.dtype))
        return result

    def project(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.settings["bias"] else None
        return F.linear(x, weight.mT if self.settings["transposed"] else weight, bias)

    def gate(self, z: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.settings["activation"]]
        if self.kind == "alone":
            return activation(z)
        gate, up = (z[:, ::2], z[:, 1::2]) if self.kind == "interleaved" else z.chunk(2, dim=1)
        if not self.cap:
            return activation(gate) * up
        limited = activation(gate).clamp(max=self.cap)
        value = limited if self.settings["limits_output"] else activation(gate.clamp(max=self.cap))
        return value * (up.clamp(-self.cap, self.cap) + self.settings["up_offset"])


def routed(num_experts: int, num_tokens: int = 9) -> tuple[Tensor, Tensor]:
    scores, index = torch.rand(num_tokens, num_experts).topk(2)
    return index, scores


@given(st.fixed_dictionaries(DRAW))
@few(12)
def test_experts_of_any_layout_and_gate_compute_the_same(draw: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original = fill(Experts(draw)).to(draw["dtype"])
    twin, entry = patched_twin(original)
    assert isinstance(twin, Patched), entry
    if draw["limit"] is None or draw["dtype"] == torch.float32:  # where rounding does not decide about a derivative
        index, scores = routed(draw["num_experts"] + draw["num_others"])
        x = torch.randn(9, draw["hidden_size"], dtype=draw["dtype"])
        assert_same(original, twin, x, index, scores.to(x))


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4}


def mixtral(implementation: str = "grouped_mm", **overrides: Any) -> Any:
    config = MixtralConfig(**SIZES, **overrides)
    config._experts_implementation = implementation
    return fill(MixtralExperts(config))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers_are_replaced_under_any_implementation(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mixtral(implementation)
    twin: Any = assert_replaced(original, "moe_experts, silu")
    calls: list[Any] = []
    run = experts.moe_experts
    monkeypatch.setattr(experts, "moe_experts", lambda *args, **kwargs: calls.append("") or run(*args, **kwargs))
    index, scores = routed(4)
    assert_same(original, twin, torch.randn(9, 16), index, scores)
    assert_same(original, twin, hidden_states=torch.randn(9, 16), top_k_index=index, top_k_weights=scores)
    assert_same(original, twin, torch.randn(9, 16), top_k_weights=scores, top_k_index=index)
    assert len(calls) == 3
    assert original.config._experts_implementation == implementation


def test_gpt_oss_and_quick_gelu() -> None:
    config = GptOssConfig(**SIZES)
    config._experts_implementation = "eager"
    original = fill(GptOssExperts(config))
    twin = assert_replaced(original, "moe_experts, silu, transposed, interleaved, limit 7")
    index, scores = routed(4)
    assert_same(original, twin, 9 * torch.randn(9, 16), index, scores)
    assert_replaced(mixtral(hidden_act="quick_gelu"), "moe_experts, silu, alpha 1.702")


class AllTokens(nn.Module):
    """Experts that each get all tokens, as Llama 4's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4, 16, 48))
        self.second = nn.Parameter(torch.empty(4, 24, 16))

    def forward(self, rows: Tensor) -> Tensor:
        num_experts, hidden_size, _ = self.first.shape
        gate, up = torch.bmm(rows.view(num_experts, -1, hidden_size), self.first).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.second).view(-1, hidden_size)


def test_experts_that_get_all_tokens_compute_those_that_are_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fill(AllTokens())
    twin = assert_replaced(original, "moe_experts, silu, transposed, tokens that are not 0")
    used: list[Tensor] = []
    run = experts.moe_experts
    monkeypatch.setattr(experts, "moe_experts", lambda *args, **kwargs: used.append(args[3]) or run(*args, **kwargs))
    rows = torch.randn(4 * 7, 16) * (torch.rand(4 * 7, 1) < 0.3)
    assert_same(original, twin, rows)
    assert torch.equal(used[0][:, 0] >= 0, rows.any(-1))
    assert torch.equal(used[0][:, 0].clamp(min=0), torch.arange(4).repeat_interleave(7) * rows.any(-1))
    with pytest.raises(RuntimeError, match="invalid for input of size"):  # the original's error
        twin(torch.randn(7, 16))


def test_what_is_no_gated_mlp_is_kept_with_a_reason() -> None:
    reason = "moe_experts, silu is not equivalent: output differs by"
    assert_kept(mixtral(hidden_act="tanh"), reason)
    other = mixtral()
    other.scale = nn.Parameter(torch.ones(3))
    assert_kept(other, "it has parameters other than weights and biases")
    other = mixtral()
    other.down_proj = nn.Parameter(torch.randn(4, 16, 25))
    assert_kept(other, "the shapes of its weights are inconsistent")
    other = fill(AllTokens())
    other.bias = nn.Parameter(torch.ones(4, 48))
    assert_kept(other, "its experts get all tokens, and have biases")


def test_hooks_of_the_activation_of_experts_run() -> None:
    original = mixtral()
    calls: list[Any] = []
    original.act_fn.register_forward_hook(lambda *_: calls.append("called"))
    twin: Any = assert_replaced(original, "moe_experts, silu")
    assert calls == []
    twin.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    index, scores = routed(4)
    assert not twin(torch.ones(9, 16), index, scores).any()
    assert calls


def test_large_experts_are_verified_on_a_small_copy() -> None:
    with torch.device("meta"):
        config = MixtralConfig(hidden_size=4096, intermediate_size=14336, num_local_experts=128)
        config._experts_implementation = "grouped_mm"
        original = MixtralExperts(config)
    _, entry = patched_twin(original)
    assert entry.replacement == "moe_experts, silu"
