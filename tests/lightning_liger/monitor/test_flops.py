"""Model FLOPs counted from the architecture, against formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.demos.boring_classes import BoringModel
from packaging.version import Version
from torch import nn

from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import control_layers
from lightning_liger.monitor.flops import ModelFlops, count_flops, model_flops
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama, tiny_model

HIDDEN, MLP, VOCAB = (TINY_CONFIG[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
LAYERS, HEADS, KV_HEADS = (
    TINY_CONFIG[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
)
HEAD_DIM = TINY_CONFIG["head_dim"]
ATTENTION_WEIGHTS = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
WEIGHTS = LAYERS * (ATTENTION_WEIGHTS + 3 * HIDDEN * MLP) + HIDDEN * VOCAB
PER_PAIR = 12 * LAYERS * HEADS * HEAD_DIM
"""Of PaLM, appendix B: 12 L H Q T for each token."""


def about(flops: float) -> Any:
    """Exactly so many, but for rotary embeddings, which transformers makes by a product before 5.19."""
    return pytest.approx(flops, rel=3e-4) if Version(transformers.__version__) < Version("5.19") else flops


class Plain(nn.Module):
    """A transformer without Hugging Face, whose positional embeddings end."""

    def __init__(self, recurrent: bool = False, decides: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.register_buffer("positions", torch.zeros(40, 16))
        self.recurrent = nn.LSTM(16, 16, batch_first=True) if recurrent else None
        self.qkv, self.head, self.decides = nn.Linear(16, 48, bias=False), nn.Linear(16, 50), decides

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        if self.recurrent is not None:
            return self.head(self.recurrent(hidden)[0])
        if self.decides:
            hidden = hidden[hidden.sum(-1).nonzero(as_tuple=True)][None]
        q, k, v = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0])


def test_flops_of_a_llama_are_those_of_the_formula():
    model = tiny_llama()
    for seq_len, batch_size in ((10, 1), (1000, 2)):
        expected = batch_size * (6 * WEIGHTS * seq_len + PER_PAIR * seq_len**2)
        assert count_flops(model, seq_len, batch_size) == about(expected)
    assert model_flops(model) == ModelFlops(about(6 * WEIGHTS), ((PER_PAIR, None),))
    assert count_flops(tiny_llama(tie_word_embeddings=True), 10) == about(6 * WEIGHTS * 10 + PER_PAIR * 100)


def test_kernels_and_controlled_layers_cost_the_same_and_the_model_is_left_as_it_is():
    model = tiny_llama()
    apply_liger_kernels(model)
    control_layers(model)
    classes = list(map(type, model.modules()))
    assert model_flops(model) == ModelFlops(about(6 * WEIGHTS), ((PER_PAIR, None),))
    assert list(map(type, model.modules())) == classes
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in model.parameters())
    model(**tiny_batch()).loss.backward()
    with torch.inference_mode():  # as in a validation
        assert model_flops(model.half()) == ModelFlops(about(6 * WEIGHTS), ((PER_PAIR, None),))


def test_frozen_weights_and_adapters_cost_less():
    model = tiny_llama().requires_grad_(False)
    assert model_flops(model) == ModelFlops(about(2 * WEIGHTS), ((PER_PAIR // 3, None),))
    model.lm_head.requires_grad_(True)  # no gradient has to go further back
    assert model_flops(model) == ModelFlops(about(2 * WEIGHTS + 2 * HIDDEN * VOCAB), ((PER_PAIR // 3, None),))

    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["v_proj"]))
    out = KV_HEADS * HEAD_DIM
    adapters = LAYERS * 2 * (HIDDEN + out)
    # The first layer's adapters pass no gradient on to its input, nor do its projections.
    no_input_gradient = ATTENTION_WEIGHTS - HIDDEN * HIDDEN + 2 * HIDDEN
    found = model_flops(adapted)
    assert found.per_token == about(4 * WEIGHTS + 6 * adapters - 2 * no_input_gradient)
    # In the first layer, only the values of attention have a gradient.
    assert found.attention[0][0] < PER_PAIR


def test_a_sliding_window_counts_with_its_width():
    model = tiny_model("gemma3_text", sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    flops = model_flops(model)
    assert sorted(flops.attention, key=str) == [(PER_PAIR / 2, 5), (PER_PAIR / 2, None)]
    assert flops.of(40, [(20, 2)]) == flops.per_token * 40 + PER_PAIR / 2 * (2 * 20 * 5 + 2 * 20 * 20)
    assert flops.of(40, [(3, 1)]) == flops.per_token * 40 + PER_PAIR * 9


def test_any_module_that_takes_token_ids_is_counted():
    module = BoringModel()
    module.model = Plain()
    for each in (Plain(), torch.compile(Plain()), module):
        assert model_flops(each) == ModelFlops(6 * (16 * 48 + 16 * 50), ((12 * 16, None),))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (lambda: Plain(decides=True), 6 * (16 * 48 + 16 * 50)),
        (lambda: Plain(recurrent=True), 6 * (16 * 48 + 2 * 16 * 64 + 16 * 50)),
        (lambda: Plain(decides=True).requires_grad_(False), 2 * (16 * 48 + 16 * 50)),
        (lambda: torch.jit.script(nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 8, bias=False))), 6 * 4 * 8 + 6 * 64),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(3)), 6 * 4 * 8),
    ],
)
def test_weights_are_counted_where_the_model_does_not_run_on_meta(module, expected):
    assert model_flops(module()) == ModelFlops(expected, is_traced=False)
