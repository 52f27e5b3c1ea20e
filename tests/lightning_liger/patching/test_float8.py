"""``fp8=``: which linear layers multiply in float8, that grouped ones compute what single ones do, and the way back."""

import copy
import pickle
import re
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops.fp8.linear import scaled_linear
from liger_ops.fp8.products import Float8Options
from liger_ops.fp8.weights import Float8Shard, Float8Weight
from lightning_liger import Float8Recipe, apply_liger_kernels
from lightning_liger.patching.float8 import check_float8, converted_layers, fp8_share
from lightning_liger.patching.rules.linear import convert, gather_in_float8, layers_of, measure_error
from tests.liger_ops.accuracy import few
from tests.lightning_liger.tiny import tiny_batch, tiny_llama, tiny_model

EVERY = Float8Recipe(filter=["*"], min_tokens=1)
"""Of every layer that can be converted, in every call."""


def train_step(model: nn.Module, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**(batch or tiny_batch())).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The error of all gradients together, relative to their norm."""
    assert found.keys() == expected.keys()
    errors = sum((found[name] - each).float().square().sum() for name, each in expected.items())
    return float((errors / sum(each.float().square().sum() for each in expected.values())).sqrt())


def run_alone(layer: nn.Linear, options: Float8Options, x: Tensor) -> Tensor:
    return scaled_linear(x, [layer.weight], [layer.bias], options=options)[0]


def same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> bool:
    gradients = all(torch.equal(each, found[1][name]) for name, each in expected[1].items())
    return torch.equal(found[0], expected[0]) and gradients and found[1].keys() == expected[1].keys()


_SEPARATE = {"q_proj + k_proj + v_proj", "o_proj", "gate_proj + up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("model_type", "groups", "high_precision_wgrad"),
    [
        ("llama", _SEPARATE, False),
        ("llama", _SEPARATE, True),
        ("qwen2", _SEPARATE, False),
        ("gemma", _SEPARATE, False),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, False),
        ("nemotron", {"q_proj + k_proj + v_proj", "o_proj", "up_proj", "down_proj"}, False),
        ("gpt_neox", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}, False),
    ],
)
def test_models_train_close_to_the_stock_model(model_type: str, groups: set[str], high_precision_wgrad: bool) -> None:
    """As one whose layers each call the op: groups and fused MLPs change no output, and gradients by a rounding."""
    stock = tiny_model(model_type)
    model, single = copy.deepcopy(stock), copy.deepcopy(stock)
    apply_liger_kernels(single)
    for layer in single.modules():
        if isinstance(layer, nn.Linear) and layer is not single.get_output_embeddings():
            layer.forward = partial(run_alone, layer, Float8Options(high_precision_wgrad=high_precision_wgrad))
    recipe = Float8Recipe(filter=["*"], min_tokens=1, high_precision_wgrad=high_precision_wgrad)
    report = apply_liger_kernels(model, fp8=recipe)
    converted = {e.structure.removeprefix("Linear ") for e in report.entries if e.kernel == "fp8" and e.replacement}
    assert converted == groups
    found, alone, expected = train_step(model), train_step(single), train_step(stock)
    assert fp8_share(model) == 1.0
    assert torch.equal(found[0], alone[0])
    assert difference(found[1], alone[1]) < 0.06
    torch.testing.assert_close(found[0], expected[0], rtol=0.05, atol=0.0)
    assert not torch.equal(found[0], expected[0])


def test_a_copy_a_pickle_and_a_second_run_compute_the_same_and_undo_restores() -> None:
    model = tiny_llama()
    kernels_only = copy.deepcopy(model)
    apply_liger_kernels(kernels_only)
    keys = list(model.state_dict())
    report = apply_liger_kernels(model, fp8=EVERY)
    first = train_step(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(train_step(other), first)
        assert fp8_share(other) == 1.0
    assert list(model.state_dict()) == keys
    assert apply_liger_kernels(model, fp8=EVERY).num_replaced == 0
    copied = copy.deepcopy(model)
    members = layers_of(copied.model.layers[0].self_attn.q_proj).members
    assert members[1] is copied.model.layers[0].self_attn.k_proj
    report.undo()
    assert not any(layers_of(each) for each in model.modules())
    apply_liger_kernels(model)
    assert same(train_step(model), train_step(kernels_only))


def test_modes_and_small_calls_run_in_the_models_dtype() -> None:
    model, stock = tiny_llama(), tiny_llama()
    apply_liger_kernels(stock)
    apply_liger_kernels(model, fp8=Float8Recipe(filter=["*"], min_tokens=23))
    assert same(train_step(model), train_step(stock))  # of 22 tokens
    assert fp8_share(model) == 0.0
    longer = tiny_batch(seq_len=12)
    assert not same(train_step(model, **longer), train_step(stock, **longer))
    assert fp8_share(model) == pytest.approx(24 / 46)
    model.eval()
    stock.eval()
    assert same(train_step(model, **longer), train_step(stock, **longer))
    apply_liger_kernels(evaluated := tiny_llama().eval(), fp8=Float8Recipe(filter=["*"], min_tokens=1, evaluate=True))
    assert not same(train_step(evaluated, **longer), train_step(stock, **longer))


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_mixed_dtypes_are_treated_alike_in_calls_of_any_size(num_tokens: int) -> None:
    layer = nn.Linear(32, 32, dtype=torch.bfloat16)
    list(convert([layer], Float8Recipe(min_tokens=8)))
    x = torch.randn(num_tokens, 32)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == layer(x.bfloat16()).dtype == torch.bfloat16


class Projections(nn.Module):
    """Layers that may get one input, as queries, keys and values do."""

    def __init__(self, frozen: list[bool]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 48), nn.Linear(32, 16, bias=False), nn.Linear(32, 16)
        for layer, is_frozen in zip((self.q, self.k, self.v), frozen, strict=True):
            layer.weight.requires_grad_(not is_frozen)


@given(
    draw=st.builds(
        SimpleNamespace,
        frozen=st.lists(st.booleans(), min_size=3, max_size=3),
        calls=st.lists(
            st.tuples(st.sampled_from("qkv"), st.sampled_from("ab"), st.sampled_from(["", "no_grad", "write", "fail"])),
            min_size=1,
            max_size=9,
        ),
    )
)
@few(40)
def test_any_order_of_calls_computes_what_single_layers_do(draw: Any) -> None:
    """Of two inputs, with and without gradients, after writes to an input, and after calls that somebody ended."""
    torch.manual_seed(0)
    grouped = Projections(draw.frozen)
    single = copy.deepcopy(grouped)
    list(convert([grouped.q, grouped.k, grouped.v], EVERY))
    leaves = {name: torch.randn(5, 32, requires_grad=True) for name in "ab"}
    sums = []
    for model in (grouped, single):
        inputs = {name: leaf * 1.0 for name, leaf in leaves.items()}
        outputs = []
        for name, source, how in draw.calls:
            layer = getattr(model, name)
            if how == "write":
                inputs[source] = inputs[source].clone()
                with torch.no_grad():
                    inputs[source].mul_(2.0)
            with torch.set_grad_enabled(how != "no_grad"):
                if model is grouped:
                    output = layer(inputs[source])
                else:
                    (output,) = scaled_linear(inputs[source], [layer.weight], [layer.bias], options=Float8Options())
            if how != "fail":
                outputs.append(output)
        total = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in outputs)
        wanted = [*leaves.values(), *(p for p in model.parameters() if p.requires_grad)]
        gradients: Any = [None] * len(wanted)
        if isinstance(total, Tensor) and total.requires_grad:
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        sums.append((outputs, gradients))
    for found, expected in zip(sums[0][0], sums[1][0], strict=True):
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad
    for found, expected in zip(sums[0][1], sums[1][1], strict=True):
        # Gradients of one input are quantized together in a group.
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.5)


def test_layers_that_get_another_input_run_alone_from_then_on() -> None:
    model = Projections([False] * 3)
    list(convert([model.q, model.k, model.v], EVERY))
    layers = layers_of(model.q)
    x, other = torch.randn(5, 32), torch.randn(5, 32)
    for layer in (model.q, model.k, model.v):
        layer(x)
    assert layers.sharing == [model.q, model.k, model.v]
    assert layers._waiting is None
    model.q(x)
    model.k(other)
    assert layers.sharing == [model.k, model.v]
    assert layers._waiting is not None
    model.v(other)
    for layer in (model.q, model.k):
        assert layers._waiting is None
        layer(x)
    model.v(other)
    model.k(x)
    assert layers.sharing == [model.v]
    assert layers._waiting is None


def test_layers_that_are_not_called_with_the_others_leave() -> None:
    """As queries with too few tokens for float8, next to keys and values of an encoder."""
    model = Projections([False] * 3)
    list(convert([model.q, model.k, model.v], Float8Recipe(filter=["*"], min_tokens=6)))
    layers = layers_of(model.q)
    few, many = torch.randn(5, 32), torch.randn(9, 32, requires_grad=True)
    for _ in range(4):
        model.q(few)
        model.k(many)
        model.v(many)
    assert layers.sharing == [model.k, model.v]
    assert layers._waiting is None
    alone = copy.deepcopy(model.q)
    for _ in range(4):
        alone(many)
    assert all(each is not alone for each in layers_of(alone).sharing)
    expected = model.q(many)
    assert torch.equal(alone(many), expected)
    assert torch.equal(copy.copy(model.q)(many), expected)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_layers_without_a_gradient_are_an_error(hook: str) -> None:
    model = Projections([False] * 3)
    list(convert([model.q, model.k, model.v], EVERY))
    calls: list[Any] = []
    getattr(model.k.weight, hook)(calls.append)
    x = torch.randn(5, 32)
    (model.q(x).sum() + model.k(x).sum()).backward()
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="was not used, but that of a layer with the same input"):
        model.q(x).sum().backward()


def test_outputs_may_be_written_to() -> None:
    for names in ("q", "qkv"):
        plain = Projections([False] * 3)
        model = copy.deepcopy(plain)
        list(convert([getattr(model, name) for name in names], EVERY))
        x = torch.randn(5, 32, requires_grad=True)
        found, expected = (each.q(x).mul_(2).relu_() for each in (model, plain))
        assert (found - expected).norm() < 0.1 * expected.norm()
        found, expected = (torch.autograd.grad(each.sum(), x)[0] for each in (found, expected))
        assert (found - expected).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize(("names", "groups"), [(("q_head", "value_head"), 2), (("query", "key"), 1), (("k", "v"), 2)])
def test_layers_with_names_of_attention_share_where_there_are_queries_and_keys(names: Any, groups: int) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})
    apply_liger_kernels(model, "none", fp8=EVERY)
    assert len(converted_layers(model)) == groups


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_pytorch_changes_no_bit(use_reentrant: bool) -> None:
    model, recomputed = tiny_llama().train(), tiny_llama().train()
    recomputed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for each in (model, recomputed):
        apply_liger_kernels(each, fp8=EVERY)
    assert same(train_step(recomputed), train_step(model))


def test_layers_are_converted_without_gradients_and_under_another_default_device() -> None:
    measure_error.cache_clear()
    model = tiny_llama()
    with torch.no_grad(), torch.device("meta"):
        apply_liger_kernels(model, fp8=EVERY)
    train_step(model)
    assert fp8_share(model) == 1.0


@pytest.mark.parametrize(
    ("sizes", "recipe", "least"),
    [
        ((2048, 8192, 32, 8, 16), {}, 5961),  # Llama 3.2 1B: slower with 4096 tokens, faster with 8192
        ((4096, 14336, 32, 8, 32), {}, 2048),  # Llama 3 8B
        ((2048, 8192, 32, 8, 16), {"min_tokens": 77}, 77),
        ((2048, 8192, 32, 8, 16), {"filter": ["*mlp*"]}, 2048),
        ((64, 128, 4, 2, 2), {}, None),  # nothing is converted
    ],
)
def test_small_layers_need_more_tokens_by_default(sizes: Any, recipe: dict[str, Any], least: int | None) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(names, sizes, strict=True)))).bfloat16()
    if least is None:
        with pytest.warns(match="converted nothing"):
            apply_liger_kernels(model, fp8=Float8Recipe(**recipe))
        return
    report = apply_liger_kernels(model, fp8=Float8Recipe(**recipe))
    converted = converted_layers(model)
    assert {each.min_tokens for each in converted} == {least}
    lines = [each.replacement for each in report.entries if each.kernel == "fp8" and each.replacement]
    assert lines
    assert all(line.endswith(f", from {least:,} tokens on") for line in lines)
    layers = converted[0]
    for num_tokens in (least - 1, least):
        x = torch.empty(1, num_tokens, layers.members[0].in_features, dtype=torch.bfloat16, device="meta")
        assert layers.applies_to(x, layers.members) == (num_tokens == least)


def test_hooks_on_a_layer_are_run() -> None:
    model = tiny_llama()
    apply_liger_kernels(model, fp8=EVERY)
    seen = []
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: seen.append(name.rpartition(".")[2]))
    train_step(model)
    assert seen == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_the_report_says_why_layers_were_left_out() -> None:
    model = tiny_llama(intermediate_size=40)
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: None)
    report = apply_liger_kernels(
        model, fp8=Float8Recipe(filter=["*_proj", "lm_head"], skip_layers=(1, 0), min_tokens=1)
    )
    reasons = {
        (entry.structure, entry.reason): entry.count
        for entry in report.entries
        if entry.kernel == "fp8" and not entry.replacement
    }
    assert reasons == {
        ("Linear lm_head", "the fused loss computes its products"): 1,
        **{(f"Linear {name}_proj", "left out by skip_layers"): 1 for name in "qkvo"},
        ("Linear gate_proj", "40 x 32 are not multiples of 16"): 2,
        ("Linear up_proj", "40 x 32 are not multiples of 16"): 2,
        ("Linear down_proj", "32 x 40 are not multiples of 16"): 2,
        ("Linear o_proj", "it has hooks or parametrizations"): 1,
    }
    with pytest.warns(UserWarning, match="fp8=fp8 rowwise converted nothing in LlamaForCausalLM.*too small to benefit"):
        apply_liger_kernels(tiny_llama(), fp8=True)
    experts = tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    entries = apply_liger_kernels(experts, fp8=EVERY).entries
    assert not [each for each in entries if each.kernel == "fp8" and "gate" in each.structure and each.replacement]


@pytest.mark.parametrize(
    ("fp8", "error"),
    [
        ("rowwize", "fp8 must be one of .*, got 'rowwize'"),
        (3, "fp8 must be True, False, one of .*, got 3"),
        (Float8Recipe(filter=["*.q_projj"]), r"filter=\['\*.q_projj'\]: no linear layer of the model has the name"),
    ],
)
def test_wrong_choices_change_nothing(fp8: Any, error: str) -> None:
    model = tiny_llama()
    before = [type(each) for each in model.modules()]
    with pytest.raises((TypeError, ValueError), match=error):
        apply_liger_kernels(model, fp8=fp8)
    assert [type(each) for each in model.modules()] == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"scaling": "tensorwise"}, "scaling must be"),
        ({"save": "bf16"}, "save must be"),
        ({"fast_accum": (True, False)}, "fast_accum must be 3 values of type bool"),
        ({"skip_layers": (-1, 0)}, "skip_layers must be 2 values of type int, at least 0"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"filter": 3}, "filter must be 'auto'"),
        ({"hold_frozen": "never"}, "hold_frozen must be"),
        ({"evaluate": "yes"}, "evaluate must be"),
    ],
    ids=str,
)
def test_wrong_recipes(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Float8Recipe(**arguments)


def test_names_of_recipes() -> None:
    assert check_float8(None) is check_float8(False) is None
    assert check_float8(True) == check_float8("auto") == check_float8("rowwise") == Float8Recipe()
    assert check_float8("rowwise_with_gw_hp") == Float8Recipe(high_precision_wgrad=True)


@pytest.mark.parametrize("skip_layers", [(1, 0), (0, 2)], ids=str)
def test_layers_to_skip_that_are_not_found_are_told(skip_layers: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=re.escape(f"skip_layers={skip_layers}: no layers")):
        apply_liger_kernels(model, "none", Float8Recipe(filter=["*"], skip_layers=skip_layers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_weights_without_float8_products_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"fp8 needs weights of bfloat16 or float32, got {dtype} of 'model.layers.0"):
        apply_liger_kernels(tiny_llama().to(dtype), fp8=EVERY)


def test_compiled_code_counts_as_eager_code_and_is_not_compiled_again_for_that() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.out = nn.Linear(32, 48), nn.Linear(32, 16), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            whole = torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1)
            return self.out(whole[: len(x) // 2])  # of half as many tokens

    def backend(graph: Any, inputs: Any) -> Any:
        num_graphs.append(len(num_graphs))
        return graph.forward

    counts, num_graphs = [], list[int]()
    for compiles in (False, True):
        torch.compiler.reset()
        model = Projections()
        apply_liger_kernels(model, "none", fp8=Float8Recipe(filter=["*"], min_tokens=8))
        run = torch.compile(model, backend=backend, dynamic=False) if compiles else model
        counts.append([])
        for num_tokens in (16, 14, 6, 16, 14, 6):  # all in float8, all but the last layer, none
            run(torch.randn(num_tokens, 32))
            numbers = [list(layers.take_products()) for layers in converted_layers(model)]
            counts[-1].append((fp8_share(model), numbers))
            assert fp8_share(model) == counts[-1][-1][0]  # a call counts once
    assert counts[0] == counts[1]
    assert [share for share, _ in counts[0]] == [1.0, pytest.approx(1 - 7 * 64 / (30 * 64 + 15 * 64)), *[ANY] * 4]
    assert len(num_graphs) == 3


def test_frozen_weights_held_in_float8() -> None:
    """Their values stay what they were rounded to: in training, checkpoints, after undo and after loading."""
    model, rounded = tiny_llama(), tiny_llama()
    for each in (model, rounded):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("norm" in name)
    for module in rounded.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = Float8Weight.of(module.weight).dequantize()
    held = Float8Recipe(filter=["*"], min_tokens=1, hold_frozen=True)
    report = apply_liger_kernels(model, fp8=held)
    apply_liger_kernels(rounded, fp8=EVERY)
    weights = [each.weight for each in model.model.layers.modules() if isinstance(each, nn.Linear)]
    assert all(isinstance(each, Float8Weight) for each in weights)
    expected, first = train_step(rounded), train_step(model)
    assert torch.equal(first[0], expected[0])
    assert difference(first[1], expected[1]) < 0.02  # a row whose largest value was rounded down has another scale
    state = model.state_dict()
    assert all(type(each) is Tensor for each in state.values())
    assert all(torch.equal(each, state[name]) for name, each in rounded.state_dict().items())
    assert same(train_step(copy.deepcopy(model)), first)
    with pytest.raises(RuntimeError, match="held in float8, which only copy_ may"):
        weights[0].mul_(2.0)
    for each in weights:
        each.data.copy_(torch.zeros_like(each))
    assert not same(train_step(model), first)
    model.load_state_dict(tiny_llama().state_dict())  # the weights before they were rounded
    assert same(train_step(model), first)
    report.undo()
    assert all(torch.equal(each, rounded.state_dict()[name]) for name, each in model.state_dict().items())


def test_weights_that_ranks_cannot_share_evenly_are_not_gathered_in_float8() -> None:
    """FSDP2 takes only payloads as large on each rank, and fails on the others where they are not."""
    model = tiny_llama(intermediate_size=96)
    apply_liger_kernels(model, fp8=Float8Recipe(filter=["*"], min_tokens=1, all_gather=True))
    with pytest.warns(UserWarning, match=r"weights with \[16, 32\] rows .* because 3 ranks do not divide them"):
        gather_in_float8(model, num_ranks=3)
    layers = [each for each in model.model.layers.modules() if isinstance(each, nn.Linear)]
    assert {each.out_features for each in layers if isinstance(each.weight, Float8Shard)} == {96}
    assert {each.out_features for each in layers if not isinstance(each.weight, Float8Shard)} == {16, 32}


def test_adapters_merge_only_into_weights_that_are_not_held_in_float8() -> None:
    """Rounding to float8 would lose most of what adapters add."""
    model: Any = get_peft_model(
        tiny_llama(), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    report = apply_liger_kernels(model, fp8=Float8Recipe(filter=["*"], min_tokens=1, hold_frozen=True))
    model.eval()
    batch = tiny_batch()
    with torch.no_grad():
        expected = model(**batch).logits
        for merge in (model.merge_adapter, partial(model.merge_and_unload, safe_merge=True)):
            with pytest.raises(RuntimeError, match="merge adapters into it, call undo"):
                merge()
    assert torch.equal(model(**batch).logits, expected)
    report.undo()
    torch.testing.assert_close(model.merge_and_unload()(**batch).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("write", ["lerp_", "data", "load_state_dict", "exchanged"])
def test_outputs_of_layers_that_were_changed_since_are_computed_again(write: str) -> None:
    """As in momentum contrast, which updates the second layer after it called the first one."""
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q_proj", "k_proj")})
    apply_liger_kernels(module, fp8=EVERY)
    q, k, x = module["q_proj"], module["k_proj"], torch.randn(5, 32)
    q(x)
    with torch.no_grad():
        if write == "lerp_":
            k.weight.lerp_(q.weight, 0.5)
        elif write == "data":
            k.weight.data = q.weight * 2.0
        elif write == "load_state_dict":
            k.load_state_dict(q.state_dict())
        else:
            k.bias = nn.Parameter(q.bias + 1.0)
    assert torch.equal(k(x), run_alone(k, EVERY.options, x))


def train_some_steps(model: nn.Module, learning_rate: float, masked: float) -> Tensor:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=learning_rate)
    losses = []
    for step in range(4):
        batch = tiny_batch(4, 16, seed=step)
        hidden = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(step)) < masked
        loss = model(**(batch | {"labels": batch["labels"].masked_fill(hidden, -100)})).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float()


@given(
    st.fixed_dictionaries(
        {
            "learning_rate": st.sampled_from([1e-2, 4e-2]),
            "masked": st.sampled_from([0.0, 0.7, 1.0]),
            "outliers": st.sampled_from([1.0, 1000.0]),
            "frozen": st.sampled_from([0, 1, 2]),
        }
    )
)
@few(8)
def test_trainings_under_stress_stay_as_finite_as_in_bfloat16(draw: Any) -> None:
    """High rates, channels of large activations, batches of masked tokens and frozen halves."""
    stock = tiny_llama(num_hidden_layers=2, dtype=torch.bfloat16)
    for layer in stock.model.layers:
        layer.input_layernorm.weight.data[3] *= draw["outliers"]
        layer.post_attention_layernorm.weight.data[5] *= draw["outliers"]
    trained = list(stock.parameters())[:: 1 + draw["frozen"]]
    for parameter in stock.parameters():
        parameter.requires_grad_(any(parameter is each for each in trained))
    model = copy.deepcopy(stock)
    apply_liger_kernels(model, fp8=EVERY)
    losses = [train_some_steps(each, draw["learning_rate"], draw["masked"]) for each in (model, stock)]
    torch.testing.assert_close(*losses, rtol=0.2, atol=0.0, equal_nan=True)  # rates this high magnify rounding
