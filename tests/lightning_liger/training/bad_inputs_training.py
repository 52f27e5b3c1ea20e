"""Wrong settings of ``LigerCausalLM``, batches for the steps of the mixin, and arguments of ``lm_loss``."""

from __future__ import annotations

import functools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_liger import LigerCausalLM, LigerLMMixin
from tests.bad_inputs import row
from tests.lightning_liger.post_training.training import LM
from tests.lightning_liger.tiny import TINY_CONFIG, VOCAB_SIZE, tiny_batch

TOKENS, LABELS = tiny_batch()["input_ids"], tiny_batch()["labels"]
SHAPE, LOGITS = str(tuple(TOKENS.shape)), torch.randn(2, 11, VOCAB_SIZE)


def with_one(tensor: torch.Tensor, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 5] = value
    return changed


@functools.cache
def module() -> LM:
    return LM()


@functools.cache
def causal_lm() -> LigerCausalLM:
    made = LigerCausalLM(config=TINY_CONFIG)
    made.configure_model()
    return made


def sums() -> Any:
    return str(module().rank_state_dict())


def broken(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    LigerCausalLM(pretrained=str(tmp_path))


# Arguments of LigerCausalLM, and what messages say.
SETTINGS: list[tuple[Any, ...]] = [
    ({"betas": (0.9, 1.5)}, "betas", "1.5", "below 1"),
    ({"num_training_steps": 5, "warmup_steps": 10}, "num_training_steps", "5", "at least warmup_steps=10"),
    ({"lora": {"rank": 4}}, "lora", "{'rank': 4}", "LoraConfig"),
    ({"lora": {"alpha": 4, "lora_alpha": 4}}, "'alpha'", "'lora_alpha'"),
    ({"quantization": {"load_in_4bit": True}}, "quantization", "'load_in_4bit'", "without lora"),
    ({"model_type": "vit", "config": {}}, "model_type", "'vit'", "causal language model"),
    ({"config": {"hiden_size": 64}}, "'hiden_size': 64", "did you mean 'hidden_size'"),
    ({"config": {"output_router_logits": True}}, "'output_router_logits': True", "settings of 'llama'"),
    ({"config": {"hidden_size": "big"}}, "hidden_size", "'big'", "an integer"),
    ({"config": {"num_attention_heads": 0}}, "'num_attention_heads': 0", "'llama' takes"),
    ({"config": {"hidden_size": 33}}, "33", "multiple"),
    ({"config": {"attention_dropout": math.nan}}, "attention_dropout", "nan"),
]
# Changes of a right batch of training_step, and what messages say; None drops a key.
BATCHES: list[tuple[Any, ...]] = [
    ({"labels": None}, "batch", "'labels'", "input_ids"),
    ({"shift_labels": LABELS}, "batch", "one of the keys", "shift_labels"),
    ({"labels": LABELS.tolist()}, "batch['labels']", "a tensor", "[["),
    ({"labels": LABELS.int()}, "batch['labels']", "torch.int64", "torch.int32"),
    ({"labels": LABELS.T}, "batch['labels']", SHAPE, "(11, 2)"),
    ({"labels": None, "shift_labels": LABELS.float()}, "shift_labels", "int64", "float32"),
    ({"labels": with_one(LABELS, VOCAB_SIZE)}, "labels", "vocab_size - 1 = 130", "131"),
    ({"labels": with_one(LABELS, -1)}, "labels", "vocab_size - 1 = 130", "-1"),
    ({"input_ids": None}, "'input_ids' or 'inputs_embeds'", "labels"),
    ({"input_ids": "Hello"}, "batch['input_ids']", "a tensor", "'Hello'"),
    ({"input_ids": TOKENS[0], "labels": LABELS[0]}, "batch['input_ids']", "seq_len", "(11,)"),
    ({"input_ids": with_one(TOKENS, 500)}, "batch['input_ids']", "vocab_size - 1 = 130", "500"),
    ({"input_ids": with_one(TOKENS, -100)}, "batch['input_ids']", "between 0", "-100"),
    ({"input_ids": None, "inputs_embeds": TOKENS}, "inputs_embeds", "floating", "int64"),
    ({"inputs_embeds": torch.ones(2, 11, 32)}, "input_ids", "inputs_embeds"),
    ({"attention_mask": TOKENS[:, 1:]}, "batch['attention_mask']", SHAPE, "(2, 10)"),
    ({"position_ids": TOKENS[:, 1:]}, "batch['position_ids']", SHAPE, "(2, 10)"),
    ({"attention_mask": with_one(torch.ones_like(TOKENS), 0), "position_ids": torch.arange(11)[None] % 8},
     "batch['attention_mask']", "0 only where no token"),
    ({"atention_mask": TOKENS}, "'atention_mask'", "unknown", "did you mean 'attention_mask'"),
    ({3: TOKENS}, "unknown key 3", "LlamaForCausalLM"),
]  # fmt: skip
# Changes of right arguments of lm_loss, and what messages say.
LOSSES: list[tuple[Any, ...]] = [
    ({"logits": [1.0]}, "logits", "floating-point tensor", "[1.0]"),
    ({"labels": None}, "labels", "a tensor", "None"),
    ({"labels": LABELS[:, 1:]}, "labels", "(2, 11)", "(2, 10)"),
    ({"labels": with_one(LABELS, 131)}, "labels", "vocab_size - 1 = 130", "131"),
    ({"labels": LABELS[0, 0], "logits": LOGITS[0, 0]}, "labels", "seq_len", "shape ()"),
    ({"labels": LABELS.to("meta")}, "labels", "the device of the logits, cpu", "on meta"),
    ({"position_ids": LABELS[:, 1:]}, "position_ids", "(2, 11)", "(2, 10)"),
    ({"shifted": 1}, "shifted", "True or False", "1"),
]
PROMPTS: list[tuple[Any, ...]] = [
    ([[1, 2]], "a tensor", "[[1, 2]]"),
    (TOKENS.float(), "int64", "torch.float32"),
    (TOKENS[0], "seq_len", "(11,)"),
    (TOKENS[:, :0], "with tokens", "(2, 0)"),
]

BAD_INPUTS = [
    *(row(partial(LigerCausalLM, **{"config": TINY_CONFIG, **each}), *mentions) for each, *mentions in SETTINGS),
    *(
        row(partial(broken, content), "pretrained", "config.json")
        for content in ("{", "[1]", json.dumps({"model_type": "no_such"}), json.dumps({}))
    ),
    *(
        row(lambda each=each: module().training_step({**tiny_batch(), **each}, 0), *mentions, unchanged=sums)
        for each, *mentions in BATCHES
    ),
    *(
        row(lambda value=value, step=step: getattr(module(), step)(value, 0), "a mapping", type(value).__name__)
        for step in ("training_step", "validation_step", "test_step")
        for value in (None, [TOKENS], "a", TOKENS)
    ),
    *(
        row(lambda value=value: causal_lm().predict_step({"input_ids": value}, 0), "batch['input_ids']", *mentions)
        for value, *mentions in PROMPTS
    ),
    *(
        row(lambda each=each: module().lm_loss(**{"logits": LOGITS, "labels": LABELS, **each}), *mentions)
        for each, *mentions in LOSSES
    ),
    row(
        lambda: LigerCausalLM(config=TINY_CONFIG, attn_implementation="sdpaa").configure_model(),
        *("attn_implementation", "sdpaa"),
    ),
    row(lambda: causal_lm().predict_step([TOKENS], 0), "'input_ids'", "list"),
    row(
        lambda: type("Wrong", (L.LightningModule, LigerLMMixin), {}),
        *("Wrong", "before LightningModule", "class Wrong(LigerLMMixin, L.LightningModule)"),
    ),
    row(lambda: type("Wrong", (LM,), {"loss_normalization": "sum"})(), "loss_normalization", "'tokens'", "'sum'"),
]
