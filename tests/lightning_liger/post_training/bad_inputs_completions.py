"""Bad batches for the steps of ``LigerPolicyMixin``, its settings, and arguments of ``LigerGRPO``."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch

from lightning_liger import LigerGRPO, LigerPolicyMixin, PolicyOptions
from lightning_liger.post_training.completions import read_completions
from tests.bad_inputs import BadInput


class Policy(LigerPolicyMixin, L.LightningModule):
    """Has no model: batches are checked before it is called."""

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)
        super().__init__()


def _apart(**changes: Any) -> dict[str, Any]:
    """Two prompts of three tokens with completions of four."""
    prompts, completions = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    batch: dict[str, Any] = {"prompt_ids": prompts, "prompt_mask": prompts}
    batch |= {"completion_ids": completions, "completion_mask": completions, "advantages": torch.zeros(2)}
    return {key: value for key, value in (batch | changes).items() if value is not None}


def _joined(**changes: Any) -> dict[str, Any]:
    ids = torch.ones(2, 7, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "completion_mask": ids, "advantages": torch.zeros(2)}
    return {key: value for key, value in (batch | changes).items() if value is not None}


def _step(batch: Any) -> Callable[[], Any]:
    return lambda: Policy().step_loss("train", batch)


def _rows() -> Iterator[BadInput]:
    yield BadInput("batch-list", _step([1, 2]), ("batch", "list", "'prompt_ids'"))
    yield BadInput("batch-labels", _step({"labels": torch.ones(2, 3)}), ("batch", "['labels']", "'input_ids'"))
    for key in ("prompt_mask", "completion_ids", "completion_mask", "advantages"):
        batch = _apart(**{key: None})
        call = functools.partial(read_completions, batch)
        if key != "completion_ids":
            yield BadInput(f"batch-{key}-missing", call, ("batch", repr(key), "prompt_ids"))
    wrong: list[tuple[str, str, Any, tuple[str, ...]]] = [
        ("prompt_ids", "floats", torch.ones(2, 3), ("float32", "torch.int64")),
        ("prompt_ids", "flat", torch.ones(3, dtype=torch.int64), ("(3,)", "[num_sequences, length]")),
        ("prompt_ids", "list", [[1, 2]], ("[[1, 2]]", "a tensor")),
        ("prompt_mask", "shape", torch.ones(2, 4), ("(2, 4)", "(2, 3)")),
        ("prompt_mask", "device", torch.ones(2, 3, device="meta"), ("meta", "cpu")),
        ("completion_mask", "shape", torch.ones(2, 3), ("(2, 3)", "(2, 4)")),
        ("advantages", "shape", torch.zeros(3), ("(3,)", "(2,)")),
        ("advantages", "of prompts", torch.zeros(2, 3), ("(2, 3)", "(2, 4)")),
        ("advantages", "integers", torch.zeros(2, dtype=torch.int64), ("int64", "floating")),
        ("advantages", "list", [0.1, 0.2], ("[0.1, 0.2]", "tensor")),
        ("tool_mask", "shape", torch.ones(2, 7), ("(2, 7)", "(2, 4)")),
        ("tool_mask", "list", [1], ("[1]", "a tensor")),
    ]
    for column in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        wrong.append((column, "shape", torch.zeros(2, 7), ("(2, 7)", "(2, 4)")))
        wrong.append((column, "summed", torch.zeros(2), ("(2,)", "(2, 4)")))
        wrong.append((column, "integers", torch.zeros(2, 4).long(), ("int64", "floating")))
        wrong.append((column, "device", torch.zeros(2, 4, device="meta"), ("meta", "cpu")))
    for key, kind, value, mentions in wrong:
        name = key if kind == "device" else f"batch[{key!r}]"
        yield BadInput(f"apart-{key}-{kind}", _step(_apart(**{key: value})), (name, *mentions))
    ids = torch.ones(3, 4, dtype=torch.int64)
    batch = _apart(completion_ids=ids, completion_mask=ids)
    yield BadInput("apart-completion_ids-rows", _step(batch), ("batch['completion_ids']", "(3, 4)", "2 prompts"))
    for key, kind, value, mentions in (
        ("input_ids", "floats", torch.ones(2, 7), ("float32", "torch.int64")),
        ("completion_mask", "shape", torch.ones(2, 6), ("(2, 6)", "(2, 7)")),
        ("old_per_token_logps", "of completions", torch.zeros(2, 4), ("(2, 4)", "(2, 7)")),
        ("advantages", "shape", torch.zeros(2, 4), ("(2, 4)", "(2, 7)")),
    ):
        yield BadInput(f"joined-{key}-{kind}", _step(_joined(**{key: value})), (f"batch[{key!r}]", *mentions))
    packed = _joined(sequence_ids=torch.zeros(2, 7, dtype=torch.int64), num_sequences=3)
    yield BadInput("packed-advantages", _step(packed), ("batch['advantages']", "(2,)", "(3,)"))
    for name, value, mentions in (
        ("policy_options", {"loss_type": "grpo"}, ("{'loss_type': 'grpo'}", "PolicyOptions")),
        ("policy_options", None, ("None", "PolicyOptions")),
        ("temperature", 0.0, ("0.0", "above 0")),
        ("temperature", "1", ("'1'", "a finite number")),
        ("steps_per_generation", 0, ("0", "at least 1")),
        ("steps_per_generation", 1.5, ("1.5", "an integer")),
        ("reference", "teacher", ("'teacher'", "'columns'")),
        ("disable_dropout", 1, ("1", "True or False")),
        ("loss_normalization", "mean", ("'mean'", "'tokens'")),
    ):
        yield BadInput(f"mixin-{name}-{value}", functools.partial(Policy, **{name: value}), (name, *mentions))
    for name, value, mentions in (
        ("loss_type", "nll", ("'nll'", "'dapo'")),
        ("beta", -0.1, ("-0.1", "at least 0")),
        ("temperature", 0.0, ("0.0", "above 0")),
        ("reference", "adapters", ("'adapters'", "without a reference")),
        ("lora", 8, ("8", "LoraConfig")),
        ("learning_rate", "fast", ("'fast'", "a finite number")),
    ):
        yield BadInput(f"grpo-{name}", functools.partial(LigerGRPO, **{name: value}), (name, *mentions))
    both = {"policy_options": PolicyOptions(beta=0.1)}
    yield BadInput(
        "mixin-reference-columns",
        lambda: Policy(reference="columns", **both).step_loss("train", _apart()),
        ("ref_per_token_logps", "'columns'", "batch"),
    )


BAD_INPUTS = list(_rows())
