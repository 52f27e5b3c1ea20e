"""Wrong batches of ``shift_labels``, ``split_sequence`` and ``ContextParallel``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_liger import ContextParallel, shift_labels, split_sequence
from tests.bad_inputs import row

IDS, STATES = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, 4)
NOT_INTEGERS: list[tuple[Any, str]] = [
    ([[1, 2]], "got [[1, 2]]"),
    (STATES[..., 0], "got a tensor of shape (2, 6), torch.float32"),
    (IDS.bool(), "got a tensor of shape (2, 6), torch.bool"),
    (IDS.to(torch.uint8), "got a tensor of shape (2, 6), torch.uint8"),  # has no -100
]
BATCHES: list[tuple[Any, ...]] = [
    ({}, "batch must have 'input_ids' or 'inputs_embeds'", "got []"),
    ({"input_ids": None}, "batch must have 'input_ids' or 'inputs_embeds'", "['input_ids']"),
    ({"input_ids": IDS, "inputs_embeds": STATES}, "both 'input_ids' and 'inputs_embeds'", "one of"),
    ({"input_ids": IDS, "labels": IDS, "shift_labels": IDS}, "both 'labels' and 'shift_labels'", "one of"),
    ({"input_ids": IDS, "attention_mask": IDS}, "['attention_mask']", "cannot be split", "expected only"),
    ({"inputs_embeds": IDS}, "batch['inputs_embeds']", "floating-point", "torch.int64"),
    ({"inputs_embeds": STATES[0]}, "batch['inputs_embeds']", "hidden_size]", "(6, 4)"),
    ({"input_ids": IDS[0]}, "batch['input_ids']", "[batch_size, seq_len]", "(6,)"),
    ({"input_ids": IDS, "position_ids": IDS.to("meta")}, "position_ids", "must be on cpu", "got meta"),
    ({"input_ids": IDS, "shift_labels": IDS[:1]}, "shift_labels", "in 2 rows", "(1, 6)"),
    ({"input_ids": IDS, "shift_labels": IDS[:, 1:]}, "shift_labels", "6 tokens per row", "(2, 5)"),
    ({"input_ids": IDS[:, :5]}, "size=2 must divide", "5 tokens"),
    *(({"input_ids": IDS, key: value}, f"batch['{key}'] must be", text)
      for key in ("labels", "position_ids") for value, text in NOT_INTEGERS),
]  # fmt: skip


def context() -> ContextParallel:
    """A group of one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ContextParallel(1)


BAD_INPUTS = [
    *(row(partial(split_sequence, batch, 0, 2), *mentions) for batch, *mentions in BATCHES),
    row(partial(split_sequence, {"input_ids": IDS}, 2, 2), "at least 0 and below size", "rank=2 and size=2"),
    row(partial(shift_labels, IDS[0, 0]), "labels must be", "seq_len", "shape ()"),
    row(partial(shift_labels, IDS, IDS[:, 1:]), "position_ids must hold one position for each of (2, 6)", "(2, 5)"),
    row(partial(ContextParallel, 2), "ContextParallel needs torch.distributed", "fabric.launch()", error=RuntimeError),
    row(lambda: (context(), ContextParallel(2)), "context_parallel_size=2", "must divide", "which is 1"),
    row(lambda: context().apply(None), "model must be a torch.nn.Module", "got None"),
    row(partial(ContextParallel.undo, "gpt2"), "model must be a torch.nn.Module", "got 'gpt2'"),
    row(lambda: context().apply(nn.Linear(2, 2)), "needs a Hugging Face model", "Linear holds none"),
    row(lambda: context().split([IDS]), "batch must be a dict of tensors", "got [tensor"),
]
