"""Bad inputs of ``shift_labels``, ``split_sequence`` and ``ContextParallel``."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_liger import ContextParallel, shift_labels, split_sequence
from tests.bad_inputs import BadInput

IDS = torch.zeros(2, 6, dtype=torch.int64)
STATES = torch.zeros(2, 6, 4)
KINDS: dict[str, tuple[Any, str]] = {
    "list": ([[1, 2]], "got [[1, 2]]"),
    "text": ("abc", "got 'abc'"),
    "number": (3, "got 3"),
    "floats": (STATES[..., 0], "got a tensor of shape (2, 6), torch.float32"),
    "bools": (IDS.bool(), "got a tensor of shape (2, 6), torch.bool"),
    "complex": (IDS.to(torch.complex64), "got a tensor of shape (2, 6), torch.complex64"),
    "unsigned": (IDS.to(torch.uint8), "got a tensor of shape (2, 6), torch.uint8"),  # has no -100
}
INTEGERS = "a tensor of signed integers"
SHAPES = {"short": IDS[:, 1:], "long": IDS.repeat(1, 2), "rows": IDS.repeat(2, 1), "dimensions": IDS[None]}
NUMBERS = (0.5, True, "1", None, [1], float("nan"), torch.tensor([1, 2]))
BATCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "none": (None, ("batch must be a dict of tensors", "got None")),
    "tensor": (IDS, ("batch must be a dict of tensors", "got a tensor of shape (2, 6)")),
    "list": ([IDS], ("batch must be a dict of tensors", "got [tensor")),
    "empty": ({}, ("batch must have 'input_ids' or 'inputs_embeds'", "got []")),
    "no_tokens": ({"labels": IDS}, ("batch must have 'input_ids' or 'inputs_embeds'", "got ['labels']")),
    "ids_of_none": ({"input_ids": None}, ("batch must have 'input_ids' or 'inputs_embeds'", "['input_ids']")),
    "two_inputs": ({"input_ids": IDS, "inputs_embeds": STATES}, ("both 'input_ids' and 'inputs_embeds'", "one of")),
    "two_labels": (
        {"input_ids": IDS, "labels": IDS, "shift_labels": IDS},
        ("both 'labels' and 'shift_labels'", "one of"),
    ),
    "mask": ({"input_ids": IDS, "attention_mask": IDS}, ("['attention_mask']", "cannot be split", "expected only")),
    "spelling": ({"input_ids": IDS, "label": IDS}, ("['label']", "cannot be split", "expected only")),
    "number_as_key": ({"input_ids": IDS, 1: IDS}, ("[1]", "cannot be split", "expected only")),
    "whole_embeddings": ({"inputs_embeds": IDS}, ("batch['inputs_embeds']", "floating-point", "torch.int64")),
    "flat_embeddings": ({"inputs_embeds": STATES[0]}, ("batch['inputs_embeds']", "hidden_size]", "(6, 4)")),
    "flat_ids": ({"input_ids": IDS[0]}, ("batch['input_ids']", "[batch_size, seq_len]", "(6,)")),
    "scalar_ids": ({"input_ids": IDS[0, 0]}, ("batch['input_ids']", "seq_len]", "()")),
    "deep_ids": ({"input_ids": IDS[None]}, ("batch['input_ids']", "[batch_size, seq_len]", "(1, 2, 6)")),
    "flat_labels": ({"input_ids": IDS, "labels": IDS[0]}, ("batch['labels']", "[batch_size, seq_len]", "(6,)")),
    "meta_positions": (
        {"input_ids": IDS, "position_ids": IDS.to("meta")},
        ("position_ids", "must be on cpu", "got meta"),
    ),
    "row_of_labels": ({"input_ids": IDS, "shift_labels": IDS[:1]}, ("shift_labels", "in 2 rows", "(1, 6)")),
    "uneven": ({"input_ids": IDS[:, :5]}, ("size=2 must divide", "5 tokens")),
}


def context() -> ContextParallel:
    """A group of one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ContextParallel(1)


MODEL_CALLS: dict[str, Callable[[Any], Any]] = {
    "apply": lambda model: context().apply(model),
    "undo": ContextParallel.undo,
}

BAD_INPUTS = [
    *(
        BadInput(
            f"shift_labels-labels-{kind}", functools.partial(shift_labels, value), (f"labels must be {INTEGERS}", text)
        )
        for kind, (value, text) in (KINDS | {"none": (None, "got None")}).items()
    ),
    *(
        BadInput(
            f"shift_labels-position_ids-{kind}",
            functools.partial(shift_labels, IDS, value),
            (f"position_ids must be {INTEGERS}", text),
        )
        for kind, (value, text) in KINDS.items()
    ),
    BadInput("shift_labels-labels-scalar", lambda: shift_labels(IDS[0, 0]), ("labels must be", "seq_len", "shape ()")),
    BadInput(
        "shift_labels-position_ids-meta",
        lambda: shift_labels(IDS, IDS.to("meta")),
        ("position_ids must be on cpu", "got meta"),
    ),
    *(
        BadInput(
            f"shift_labels-position_ids-{kind}",
            functools.partial(shift_labels, IDS, value),
            ("position_ids must hold one position for each of (2, 6) tokens", f"got shape {tuple(value.shape)}"),
        )
        for kind, value in SHAPES.items()
    ),
    *(
        BadInput(f"split_sequence-batch-{kind}", functools.partial(split_sequence, batch, 0, 2), mentions)
        for kind, (batch, mentions) in BATCHES.items()
    ),
    *(
        BadInput(
            f"split_sequence-{key}-{kind}",
            functools.partial(split_sequence, {"input_ids": IDS, key: value}, 0, 2),
            (f"batch['{key}'] must be", text),
        )
        for key in ("input_ids", "labels", "shift_labels", "position_ids")
        for kind, (value, text) in KINDS.items()
    ),
    *(
        BadInput(
            f"split_sequence-{name}-{index}",
            functools.partial(split_sequence, {"input_ids": IDS}, **({"rank": 0, "size": 1} | {name: value})),
            (f"{name} must be an integer", f"got {'a tensor of shape (2,)' if index == 6 else repr(value)}"),
        )
        for name in ("rank", "size")
        for index, value in enumerate(NUMBERS)
    ),
    *(
        BadInput(
            f"split_sequence-rank-{rank}-of-{size}",
            functools.partial(split_sequence, {"input_ids": IDS}, rank, size),
            ("rank must be at least 0 and below size", f"rank={rank} and size={size}"),
        )
        for rank, size in ((-1, 2), (2, 2), (0, 0), (0, -1))
    ),
    *(
        BadInput(
            f"ContextParallel-size-{index}",
            functools.partial(ContextParallel, value),
            ("context_parallel_size must be an integer of at least 1", "got"),
        )
        for index, value in enumerate((*NUMBERS, 0, -2))
    ),
    BadInput(
        "ContextParallel-not_initialized",
        functools.partial(ContextParallel, 2),
        ("ContextParallel needs torch.distributed", "fabric.launch()"),
        error=RuntimeError,
    ),
    BadInput(
        "ContextParallel-size-processes",
        lambda: (context(), ContextParallel(2)),
        ("context_parallel_size=2", "must divide the number of processes, which is 1"),
    ),
    *(
        BadInput(
            f"ContextParallel-{name}-{kind}", functools.partial(call, value), ("model must be a torch.nn.Module", text)
        )
        for name, call in MODEL_CALLS.items()
        for kind, value, text in (
            ("none", None, "got None"),
            ("name", "gpt2", "got 'gpt2'"),
            ("class", nn.Linear, "got <class 'torch.nn.modules.linear.Linear'>"),
        )
    ),
    BadInput(
        "ContextParallel-apply-no_model",
        lambda: context().apply(nn.Linear(2, 2)),
        ("context parallelism needs a Hugging Face model", "Linear holds none"),
    ),
    BadInput(
        "ContextParallel-split-batch",
        lambda: context().split([IDS]),
        ("batch must be a dict of tensors", "got [tensor"),
    ),
]
