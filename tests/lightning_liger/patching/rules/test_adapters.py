"""Adapters of experts' weights: outputs and gradients of peft's own forward, from products of a low rank."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import experts
from lightning_liger.patching.rules.base import Patched
from tests.liger_ops.accuracy import few
from tests.lightning_liger.patching.rules.comparing import fill
from tests.lightning_liger.patching.rules.test_experts import AllTokens

peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4}
BOTH = ("gate_up_proj", "down_proj")
STATES = ("active", "both active", "other active", "none active", "disabled", "merged", "unfrozen")
DRAW = {
    "kind": st.sampled_from([(MixtralConfig, MixtralExperts), (GptOssConfig, GptOssExperts)]),
    "names": st.sampled_from([BOTH, BOTH[:1], BOTH[1:]]),
    "state": st.sampled_from(STATES),
    "r": st.integers(1, 16),
    "lora_alpha": st.sampled_from([1, 10]),
    "use_rslora": st.booleans(),
}
DEFAULT: dict[str, Any] = {
    "kind": (MixtralConfig, MixtralExperts), "names": BOTH, "state": "active", "r": 3, "lora_alpha": 10,
    "use_rslora": False,
}  # fmt: skip


def adapt(module: nn.Module, names: tuple[str, ...], adapter: str = "default", **settings: Any) -> Any:
    """Holds the module, or peft's around it."""
    holder = module if isinstance(module, nn.ModuleDict) else nn.ModuleDict({"experts": module})
    settings["target_parameters"] = [f"experts.{name}" for name in names]
    return peft.inject_adapter_in_model(peft.LoraConfig(init_lora_weights=False, **settings), holder, adapter)


def make(draw: dict[str, Any]) -> Any:
    """Experts in float64, with adapters."""
    torch.manual_seed(0)
    make_config, make_experts = draw["kind"]
    config = make_config(**SIZES)
    config._experts_implementation = "eager"
    holder = adapt(fill(make_experts(config)).double(), draw["names"], **{
        name: draw[name] for name in ("r", "lora_alpha", "use_rslora")
    })  # fmt: skip
    if "active" in draw["state"] and draw["state"] != "active":
        holder = adapt(holder, draw["names"], "other", r=2, lora_alpha=3)
    for wrapper in wrappers(holder):
        match draw["state"]:
            case "both active":
                wrapper.set_adapter(["default", "other"])
            case "other active":
                wrapper.set_adapter("other")
            case "none active":
                wrapper._active_adapter = []
            case "disabled":
                wrapper.enable_adapters(False)
            case "merged":
                wrapper.merge()
            case "unfrozen":
                wrapper.get_base_layer().requires_grad_()
    return holder


def wrappers(holder: nn.Module) -> list[Any]:
    return [each for each in holder.modules() if hasattr(each, "parameter_name")]


def results(holder: Any, *inputs: Tensor) -> tuple[list[Tensor], list[Any]]:
    """The output and all gradients; the adapters that ``moe_experts`` got."""
    inputs = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in inputs)
    calls: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs["gate_up_adapter"], kwargs["down_adapter"]))
        return run(*args, **kwargs)

    run = experts.moe_experts
    with mock.patch.object(experts, "moe_experts", watched):
        y = holder["experts"](*inputs)
    leaves = [each for each in (*inputs, *holder.parameters()) if each.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=generator).to(y), allow_unused=True)
    return [y.detach(), *(torch.zeros(1) if each is None else each for each in grads)], calls


def assert_same(holder: Any, twin: Any, *inputs: Tensor) -> list[Any]:
    """Compares with peft's own; returns the adapters that ``moe_experts`` got."""
    (expected, none), (actual, calls) = results(holder, *inputs), results(twin, *inputs)
    assert none == []
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10 * want.abs().max().item())
    return calls


def inputs_of(num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    scores, index = torch.rand(num_tokens, 4, dtype=torch.float64).topk(2)
    return torch.randn(num_tokens, 16, dtype=torch.float64), index, scores


def patched(holder: Any) -> tuple[Any, Any]:
    twin = copy.deepcopy(holder)
    return twin, apply_liger_kernels(twin)


@given(st.fixed_dictionaries(DRAW))
@few(14)
def test_updates_of_any_rank_and_state_are_those_of_peft(draw: dict[str, Any]) -> None:
    holder = make(draw)
    twin, report = patched(holder)
    (entry,) = [entry for entry in report.entries if entry.structure == "ParamWrapper"]
    assert entry.count == len(draw["names"])
    assert entry.replacement.endswith("low-rank update")
    (adapters,) = assert_same(holder, twin, *inputs_of())
    rank = {"both active": draw["r"] + 2, "other active": 2, "active": draw["r"], "unfrozen": draw["r"]}
    rank = rank.get(draw["state"], 0)
    shapes = [None if each is None else (each[0].shape[1], each[1].shape[2]) for each in adapters]
    assert shapes == [(rank, rank) if rank and name in draw["names"] else None for name in BOTH]
    report.undo()
    assert not any(isinstance(module, Patched) for module in twin.modules())
    assert results(twin, *inputs_of())[1] == []


def test_calls_that_experts_leave_to_the_original_have_peft_s_weights() -> None:
    holder = make(DEFAULT)
    twin, _ = patched(holder)
    for each in (holder, twin):
        each["experts"].get_base_layer().act_fn.register_forward_hook(lambda module, args, output: output * 2)
    assert assert_same(holder, twin, *inputs_of()) == []
    assert not hasattr(twin["experts"].get_base_layer(), "parametrizations")


def test_experts_that_were_patched_before_they_got_adapters() -> None:
    holder = make(DEFAULT)
    bare = fill(copy.deepcopy(holder["experts"].get_base_layer()))
    for each in (plain := nn.ModuleDict({"experts": bare}), early := copy.deepcopy(plain)):
        if each is early:
            apply_liger_kernels(each)
        torch.manual_seed(0)
        adapt(each, BOTH, r=3)
    (dense,) = results(early, *inputs_of())[1]  # peft's own way still
    assert dense == (None, None)
    apply_liger_kernels(early)
    ((gate_up, down),) = assert_same(plain, early, *inputs_of())
    assert gate_up is not None
    assert down is not None


def test_experts_that_get_all_tokens() -> None:
    holder = adapt(fill(AllTokens()).double(), ("first", "second"), r=3)
    twin, _ = patched(holder)
    rows = torch.randn(4 * 7, 16, dtype=torch.float64) * (torch.rand(4 * 7, 1) < 0.3)
    ((gate_up, down),) = assert_same(holder, twin, rows)
    assert gate_up is not None
    assert down is not None


def test_what_is_kept_has_a_reason() -> None:
    def reason_for(holder: nn.Module) -> str:
        twin, report = patched(holder)
        (entry,) = [entry for entry in report.entries if entry.structure == "ParamWrapper"]
        assert entry.replacement is None
        assert not any(isinstance(each, Patched) for each in wrappers(twin))
        return entry.reason

    config = MixtralConfig(**SIZES, hidden_act="tanh")
    config._experts_implementation = "eager"
    holder = adapt(fill(MixtralExperts(config)), BOTH, r=3)
    with pytest.warns(UserWarning, match="replaced nothing"):
        assert reason_for(holder).startswith("what it adapts is not replaced: moe_experts, silu is not equivalent")
    config = GptOssConfig(**SIZES)
    config._experts_implementation = "eager"
    assert reason_for(adapt(GptOssExperts(config), ("down_proj_bias",), r=3)) == "it adapts no weight of experts"
    with mock.patch("peft.tuners.lora.layer.ParamWrapper.get_delta_factors"):
        del peft.tuners.lora.layer.ParamWrapper.get_delta_factors
        assert "this version of peft" in reason_for(make(DEFAULT))
