"""Bad arguments of ``LigerCausalLM``, batches for the steps of the mixin, and arguments of ``lm_loss``."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_liger import LigerCausalLM, LigerLMMixin
from tests.bad_inputs import BadInput
from tests.lightning_liger.tiny import TINY_CONFIG, VOCAB_SIZE, tiny_batch, tiny_llama

NUMBER, INTEGER = "a finite number", "an integer"
_ABOVE_0 = [
    ("zero", 0, "0", "above 0"),
    ("negative", -1.0, "-1.0", "above 0"),
    ("nan", math.nan, "nan", NUMBER),
    ("infinite", math.inf, "inf", NUMBER),
    ("text", "fast", "'fast'", NUMBER),
    ("bool", True, "True", NUMBER),
    ("tensor", torch.tensor(0.1), "a tensor of shape ()", NUMBER),
    ("none", None, "None", NUMBER),
]
_AT_LEAST_0 = [
    ("negative", -1, "-1", "at least 0"),
    ("nan", math.nan, "nan", NUMBER),
    ("text", "0.1", "'0.1'", NUMBER),
    ("list", [0.1], "[0.1]", NUMBER),
    ("none", None, "None", NUMBER),
]
_COUNT = [
    ("negative", -1, "-1", "at least"),
    ("fraction", 1.5, "1.5", INTEGER),
    ("text", "3", "'3'", INTEGER),
    ("bool", True, "True", INTEGER),
]
_CONSTRUCTOR: dict[str, list[tuple[str, Any, str, str]]] = {
    "learning_rate": _AT_LEAST_0,
    "embedding_lr_scale": _ABOVE_0,
    "weight_decay": _AT_LEAST_0,
    "temperature": _AT_LEAST_0,
    "min_lr_ratio": [*_AT_LEAST_0, ("large", 1.5, "1.5", "at most 1")],
    "warmup_steps": [*_COUNT, ("none", None, "None", INTEGER)],
    "max_new_tokens": [*_COUNT, ("zero", 0, "0", "at least 1")],
    "num_training_steps": [*_COUNT, ("zero", 0, "0", "at least 1")],
    "betas": [
        ("large", (0.9, 1.5), "1.5", "below 1"),
        ("negative", (-0.1, 0.9), "-0.1", "at least 0"),
        ("nan", (math.nan, 0.9), "nan", NUMBER),
        ("text", ("a", 0.9), "'a'", NUMBER),
        ("one", (0.9,), "(0.9,)", "two numbers"),
        ("three", (0.9, 0.9, 0.9), "(0.9, 0.9, 0.9)", "two numbers"),
        ("number", 0.9, "0.9", "two numbers"),
        ("none", None, "None", "two numbers"),
    ],
    "lora": [
        ("text", "r=4", "'r=4'", "a dict"),
        ("keys", {4: 4}, "{4: 4}", "a dict"),
        ("unknown", {"rank": 4}, "{'rank': 4}", "LoraConfig"),
        ("zero", {"r": 0}, "0", "at least 1"),
        ("twice", {"alpha": 4, "lora_alpha": 4}, "'alpha'", "'lora_alpha'"),
    ],
    "loss_type": [("unknown", "mse", "'mse'", "'dft'"), ("none", None, "None", "'nll'")],
    "loss_normalization": [
        ("unknown", "mean", "'mean'", "'micro_batch'"),
        ("none", None, "None", "'tokens'"),
        ("list", ["tokens"], "['tokens']", "'tokens'"),
    ],
    "attn_implementation": [("number", 5, "5", "a name"), ("empty", "", "''", "a name")],
    "model_type": [
        ("unknown", "no_such_model", "'no_such_model'", "transformers knows"),
        ("typo", "lama", "'lama'", "did you mean 'llama'"),
        ("no_language_model", "vit", "'vit'", "causal language model"),
        ("number", 5, "5", "the name of an architecture"),
        ("none", None, "None", "the name of an architecture"),
    ],
    "pretrained": [
        ("missing", "no/such/folder", "'no/such/folder'", "config.json"),
        ("empty", "", "''", "config.json"),
        ("number", 5, "5", "the path"),
        ("list", ["folder"], "['folder']", "the path"),
    ],
    "config": [
        ("number", 5, "5", "a dict"),
        ("text", "hidden_size=32", "'hidden_size=32'", "a dict"),
        ("list", [("hidden_size", 32)], "[('hidden_size', 32)]", "a dict"),
        ("key_of_no_text", {1: 2}, "{1: 2}", "names of settings"),
        ("unknown_key", {"hiden_size": 64}, "'hiden_size': 64", "did you mean 'hidden_size'"),
        ("key_of_others", {"output_router_logits": True}, "'output_router_logits': True", "settings of 'llama'"),
        ("text_for_number", {"hidden_size": "big"}, "'big'", INTEGER),
        ("negative_size", {"hidden_size": -1}, "-1", "hidden_size"),
        ("no_vocabulary", {"vocab_size": 0}, "0", "vocab_size"),
        ("fraction_of_a_layer", {"num_hidden_layers": 1.5}, "1.5", "num_hidden_layers"),
        ("no_heads", {"num_attention_heads": 0}, "'num_attention_heads': 0", "'llama' takes"),
        ("heads_do_not_divide", {"hidden_size": 33}, "33", "multiple"),
        ("nan", {"attention_dropout": math.nan}, "nan", "attention_dropout"),
    ],
}


def _constructor_rows() -> Iterator[BadInput]:
    for argument, cases in _CONSTRUCTOR.items():
        for case, value, shown, expected in cases:
            kwargs = {"config": TINY_CONFIG, argument: value}
            yield BadInput(
                f"LigerCausalLM-{argument}-{case}",
                functools.partial(LigerCausalLM, **kwargs),
                (argument, shown, expected),
                FileNotFoundError if "config.json" in expected else (TypeError, ValueError),
            )
    yield BadInput(
        "LigerCausalLM-num_training_steps-below_warmup",
        lambda: LigerCausalLM(warmup_steps=10, num_training_steps=5),
        ("num_training_steps", "5", "warmup_steps=10"),
    )
    yield BadInput(
        "LigerCausalLM-attn_implementation-unknown",
        lambda: LigerCausalLM(config=TINY_CONFIG, attn_implementation="sdpaa").configure_model(),
        ("attn_implementation", "sdpaa", "eager"),
    )
    contents = {"no_json": "{", "empty": "{}", "list": "[]", "unknown": '{"model_type": "nope"}'}
    for case, content in contents.items():
        yield BadInput(
            f"LigerCausalLM-pretrained-config_{case}", functools.partial(_broken, content), ("pretrained", "broken")
        )


def _broken(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(content, encoding="utf-8")
    LigerCausalLM(pretrained=str(folder))


class _LM(LigerLMMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()


@functools.cache
def _module() -> _LM:
    return _LM()


def _sums() -> Any:
    return str(_module().rank_state_dict())


TOKENS = tiny_batch()["input_ids"]
LABELS = tiny_batch()["labels"]
SHAPE = str(tuple(TOKENS.shape))


def _with(tensor: torch.Tensor, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 5] = value
    return changed


# What a good batch is changed by: (its id, the keys that are set, what the message mentions).
_BATCHES: list[tuple[str, dict[Any, Any], tuple[str, ...]]] = [
    ("labels-missing", {"labels": None}, ("batch", "'labels'", "input_ids")),
    ("labels-both_kinds", {"shift_labels": LABELS}, ("batch", "one of the keys", "shift_labels")),
    ("labels-list", {"labels": LABELS.tolist()}, ("batch['labels']", "a tensor", "[[")),
    ("labels-float", {"labels": LABELS.float()}, ("batch['labels']", "torch.int64", "torch.float32")),
    ("labels-int32", {"labels": LABELS.int()}, ("batch['labels']", "torch.int64", "torch.int32")),
    ("labels-bool", {"labels": LABELS > 5}, ("batch['labels']", "torch.int64", "torch.bool")),
    ("labels-short", {"labels": LABELS[:, 1:]}, ("batch['labels']", SHAPE, "(2, 10)")),
    ("labels-one_row", {"labels": LABELS[0]}, ("batch['labels']", SHAPE, "(11,)")),
    ("labels-transposed", {"labels": LABELS.T}, ("batch['labels']", SHAPE, "(11, 2)")),
    ("shift_labels-float", {"labels": None, "shift_labels": LABELS.float()}, ("shift_labels", "int64", "float32")),
    ("shift_labels-short", {"labels": None, "shift_labels": LABELS[:, 1:]}, ("shift_labels", SHAPE, "(2, 10)")),
    ("labels-large", {"labels": _with(LABELS, VOCAB_SIZE)}, ("labels", "vocab_size - 1 = 130", "131")),
    ("labels-negative", {"labels": _with(LABELS, -1)}, ("labels", "vocab_size - 1 = 130", "-1")),
    ("input_ids-missing", {"input_ids": None}, ("'input_ids' or 'inputs_embeds'", "labels")),
    ("input_ids-list", {"input_ids": TOKENS.tolist()}, ("batch['input_ids']", "a tensor", "[[")),
    ("input_ids-float", {"input_ids": TOKENS.float()}, ("batch['input_ids']", "torch.int64", "torch.float32")),
    ("input_ids-text", {"input_ids": "Hello"}, ("batch['input_ids']", "a tensor", "'Hello'")),
    ("input_ids-row", {"input_ids": TOKENS[0], "labels": LABELS[0]}, ("batch['input_ids']", "seq_len", "(11,)")),
    ("input_ids-large", {"input_ids": _with(TOKENS, 500)}, ("batch['input_ids']", "vocab_size - 1 = 130", "500")),
    ("input_ids-negative", {"input_ids": _with(TOKENS, -100)}, ("batch['input_ids']", "between 0", "-100")),
    ("inputs_embeds-integer", {"input_ids": None, "inputs_embeds": TOKENS}, ("inputs_embeds", "floating", "int64")),
    ("inputs_embeds-list", {"input_ids": None, "inputs_embeds": [1.0]}, ("inputs_embeds", "floating", "[1.0]")),
    ("inputs_embeds-and_ids", {"inputs_embeds": torch.ones(2, 11, 32)}, ("input_ids", "inputs_embeds")),
    ("attention_mask-short", {"attention_mask": TOKENS[:, 1:]}, ("batch['attention_mask']", SHAPE, "(2, 10)")),
    ("attention_mask-list", {"attention_mask": [1]}, ("batch['attention_mask']", "a tensor", "[1]")),
    ("position_ids-list", {"position_ids": [0, 1]}, ("batch['position_ids']", "a tensor", "[0, 1]")),
    ("position_ids-float", {"position_ids": TOKENS.float()}, ("batch['position_ids']", "int64", "float32")),
    ("position_ids-short", {"position_ids": TOKENS[:, 1:]}, ("batch['position_ids']", SHAPE, "(2, 10)")),
    ("unknown-typo", {"atention_mask": TOKENS}, ("'atention_mask'", "unknown", "did you mean 'attention_mask'")),
    ("unknown-key", {"text": ["a", "b"]}, ("'text'", "unknown", "LlamaForCausalLM")),
    ("unknown-other_models", {"token_type_ids": TOKENS}, ("'token_type_ids'", "unknown", "LlamaForCausalLM")),
    ("unknown-counted_here", {"num_items_in_batch": 3}, ("'num_items_in_batch'", "unknown", "LlamaForCausalLM")),
    ("unknown-no_text", {3: TOKENS}, ("unknown key 3", "LlamaForCausalLM")),
]
_NO_MAPPINGS: dict[str, Any] = {
    "none": None,
    "list": [TOKENS],
    "tuple": (TOKENS, LABELS),
    "text": "a",
    "tensor": TOKENS,
}


def _batch_rows() -> Iterator[BadInput]:
    def step(batch: Any, name: str = "training_step") -> Any:
        return getattr(_module(), name)(batch, 0)

    for case, changes, mentions in _BATCHES:
        batch: dict[Any, Any] = {**tiny_batch(), **changes}
        yield BadInput(f"training_step-{case}", functools.partial(step, batch), mentions, unchanged=_sums)
    for stage in ("train", "validation", "test"):
        for case, value in _NO_MAPPINGS.items():
            call: Callable[[], Any] = functools.partial(
                step, value, "training_step" if stage == "train" else f"{stage}_step"
            )
            yield BadInput(f"{stage}-batch-{case}", call, ("batch must be a mapping", type(value).__name__))
    for case, value in _NO_MAPPINGS.items():
        yield BadInput(
            f"predict-batch-{case}", functools.partial(_predict, value), ("'input_ids'", type(value).__name__)
        )
    prompts: list[tuple[str, Any, str, str]] = [
        ("list", [[1, 2]], "[[1, 2]]", "a tensor"),
        ("float", TOKENS.float(), "torch.float32", "int64"),
        ("row", TOKENS[0], "(11,)", "seq_len"),
        ("empty", TOKENS[:, :0], "(2, 0)", "with tokens"),
    ]
    for case, value, shown, expected in prompts:
        mentions = ("batch['input_ids']", shown, expected)
        yield BadInput(f"predict-input_ids-{case}", functools.partial(_predict, {"input_ids": value}), mentions)


@functools.cache
def _causal_lm() -> LigerCausalLM:
    module = LigerCausalLM(config=TINY_CONFIG)
    module.configure_model()
    return module


def _predict(batch: Any) -> Any:
    return _causal_lm().predict_step(batch, 0)


def _loss_rows() -> Iterator[BadInput]:
    logits = torch.randn(2, 11, VOCAB_SIZE)
    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("logits-none", {"logits": None}, ("logits", "floating-point tensor", "None")),
        ("logits-list", {"logits": [1.0]}, ("logits", "floating-point tensor", "[1.0]")),
        ("logits-integer", {"logits": logits.long()}, ("logits", "floating-point tensor", "torch.int64")),
        ("logits-complex", {"logits": logits.cfloat()}, ("logits", "floating-point tensor", "torch.complex64")),
        ("labels-none", {"labels": None}, ("labels", "a tensor", "None")),
        ("labels-list", {"labels": [1, 2]}, ("labels", "a tensor", "[1, 2]")),
        ("labels-float", {"labels": LABELS.float()}, ("labels", "torch.int64", "torch.float32")),
        ("labels-int32", {"labels": LABELS.int()}, ("labels", "torch.int64", "torch.int32")),
        ("labels-short", {"labels": LABELS[:, 1:]}, ("labels", "(2, 11)", "(2, 10)")),
        ("labels-large", {"labels": _with(LABELS, 131)}, ("labels", "vocab_size - 1 = 130", "131")),
        ("labels-negative", {"labels": _with(LABELS, -5)}, ("labels", "vocab_size - 1 = 130", "-5")),
        ("labels-scalar", {"labels": LABELS[0, 0], "logits": logits[0, 0]}, ("labels", "seq_len", "shape ()")),
        ("labels-device", {"labels": LABELS.to("meta")}, ("labels", "the device of the logits, cpu", "on meta")),
        ("position_ids-list", {"position_ids": [0, 1]}, ("position_ids", "a tensor", "[0, 1]")),
        ("position_ids-short", {"position_ids": LABELS[:, 1:]}, ("position_ids", "(2, 11)", "(2, 10)")),
        ("shifted-text", {"shifted": "no"}, ("shifted", "True or False", "'no'")),
        ("shifted-number", {"shifted": 1}, ("shifted", "True or False", "1")),
    ]
    for case, changes, mentions in cases:
        arguments = {"logits": logits, "labels": LABELS, **changes}
        yield BadInput(f"lm_loss-{case}", functools.partial(_loss, arguments), mentions)


def _loss(arguments: dict[str, Any]) -> Any:
    return _module().lm_loss(**arguments)


BAD_INPUTS: list[BadInput] = [
    *_constructor_rows(),
    *_batch_rows(),
    *_loss_rows(),
    BadInput(
        "LigerLMMixin-order",
        lambda: type("Wrong", (L.LightningModule, LigerLMMixin), {}),
        ("Wrong", "before LightningModule", "class Wrong(LigerLMMixin, L.LightningModule)"),
    ),
    BadInput(
        "LigerLMMixin-loss_normalization",
        lambda: type("Wrong", (_LM,), {"loss_normalization": "sum"})(),
        ("loss_normalization", "'tokens'", "'sum'"),
    ),
]
