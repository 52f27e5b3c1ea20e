"""Tiny language models and batches that tests share."""

import importlib
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from lightning_liger import LazyLogits

VOCAB_SIZE = 131
"""Odd, and larger than anything else in a tiny model: no other tensor is as large as its logits."""

TINY_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A tiny causal LM of one of transformers' architectures, with the same random weights at every call."""
    config = AutoConfig.for_model(model_type, **(TINY_CONFIG | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide mistakes
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:  # confident logits, so that labels matter
                nn.init.normal_(parameter, std=0.2)
    return model


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A tiny Llama whose configuration is ``TINY_CONFIG`` with ``overrides``."""
    return tiny_model("llama", **overrides)


def tiny_batch(batch_size: int = 2, seq_len: int = 11, num_ignored: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``labels``, of which the first row's first ``num_ignored`` are ignored."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB_SIZE, (batch_size, seq_len), generator=generator)
    labels = input_ids.clone()
    labels[0, :num_ignored] = -100
    return {"input_ids": input_ids, "labels": labels}


def quiet_trainer(**options: Any) -> L.Trainer:
    """A Trainer for one CPU that writes and shows nothing but what ``options`` ask for."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **options})


def has_memory(tensor: Tensor) -> bool:
    """Whether the values of a tensor are anywhere."""
    return not tensor.is_meta and not isinstance(tensor, LazyLogits)


class TensorSizes(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor with memory that any operation returns.

    A mode sees a custom op as one operation; the loop inside the fused loss is watched by entering it there again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.largest = 0
        self.largest_in_loss = 0
        module = importlib.import_module("liger_ops.loss.head_passes")
        driver = module.chunked_linear_loss

        def watched(*args: Any, **kwargs: Any) -> Any:
            outside, self.largest = self.largest, 0
            with self:
                result = driver(*args, **kwargs)
            self.largest_in_loss = self.largest
            self.largest = max(self.largest, outside)
            return result

        monkeypatch.setattr(module, "chunked_linear_loss", watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and has_memory(leaf))
        self.largest = max(self.largest, *sizes, 0)
        return result
