"""A teacher's top-k, or samples from it, for files that students learn from without the teacher.

The teacher's logits are computed for one chunk of tokens at a time, so memory does not grow with the vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_integer, check_number, wrong_type, wrong_value
from liger_ops.loss.chunked_loss import choose_chunk_size
from lightning_liger.data.teacher_topk import write_teacher_topk
from lightning_liger.lazy.chunks import over_chunks
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.scores import logit_rows
from lightning_liger.losses.distillation import sample_support
from lightning_liger.post_training.reference import evaluating
from lightning_liger.post_training.rows import read_tokens
from lightning_liger.training.language_model import LanguageModel

_CHUNK_BYTES, _BYTES_PER_LOGIT = 2**29, 16


def teacher_topk_rows(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    top_k: int = 64,
    temperature: float = 1.0,
    num_samples: int | None = None,
    proposal_temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Runs a teacher over batches, and yields rows for :func:`lightning_liger.data.write_teacher_topk`.

    Padding (by ``attention_mask``) and rows without labels are left out. Packed documents (by ``position_ids``) become
    separate rows.

    Args:
        model: The teacher, whose head is patched if its logits should not be materialized. Its mode is restored.
        batches: ``input_ids`` and one of ``labels`` (unshifted) and ``completion_mask``, ``[batch_size, seq_len]``, and
            what else the model takes.
        top_k: How many of the likeliest ids are kept, at most the vocabulary's size.
        temperature: Divides the logits.
        num_samples: Keeps ids that are sampled this often, with repetition, in place of the likeliest ones; their
            log-probabilities are those of the estimate that students learn from with ``support_mode="zero"``
            (arXiv:2503.16870).
        proposal_temperature: Of the distribution that is sampled from; weights correct for it.
        generator: Source of randomness of the samples, on the model's device.

    Returns:
        For each row ``input_ids`` and ``labels`` ``[L]``, ``teacher_topk_ids`` (int64) and ``teacher_topk_log_probs``
        (float32) ``[L, K]``, on the CPU.

    Raises:
        TypeError: For arguments and batches of a wrong type.
        ValueError: For arguments out of their range, and batches that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    check_integer("top_k", top_k, at_least=1)
    check_number("temperature", temperature, above=0)
    check_integer("num_samples", num_samples, at_least=1, optional=True)
    check_number("proposal_temperature", proposal_temperature, above=0)

    def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = (logits.float() / temperature).log_softmax(-1)
        if num_samples is not None:
            ids, log_probs = sample_support(
                log_probs, num_samples, proposal_temperature=proposal_temperature, generator=generator
            )
            return log_probs, ids
        top = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
        return top.values, top.indices

    def rows() -> Iterator[dict[str, Tensor]]:
        seen, device = LanguageModel(model), next(model.parameters()).device
        with evaluating(model):
            for batch in batches:
                if not isinstance(batch, Mapping):
                    raise wrong_value("batch", "a mapping of names to tensors", batch)
                moved = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in batch.items()}
                yield from _documents(seen, moved, chosen)

    return rows()


@torch.no_grad()
def _documents(seen: LanguageModel, batch: Mapping[str, Any], chosen: Any) -> Iterator[dict[str, Tensor]]:
    """The documents of a batch that have a label."""
    rows = read_tokens("teacher", batch, seen, prefixes=("teacher_",))
    input_ids = rows.inputs.get("input_ids")
    if input_ids is None:
        raise ValueError(f"batch must have 'input_ids', got {sorted(map(str, batch))}")
    with lazy_logits():
        logits = seen(rows.inputs, rows.labels)[0].logits
    chunk_size = choose_chunk_size(input_ids.numel(), logits.shape[-1], _BYTES_PER_LOGIT, _CHUNK_BYTES)
    log_probs, ids = over_chunks(chosen, [logit_rows(logits)], [], chunk_size)
    columns = {
        "input_ids": input_ids,
        "labels": F.pad(rows.labels[:, :-1], (1, 0), value=IGNORE_INDEX),  # at the token that they are about
        "teacher_topk_ids": ids.view(*input_ids.shape, -1),
        "teacher_topk_log_probs": log_probs.view(*input_ids.shape, -1),
    }
    columns = {name: column.cpu() for name, column in columns.items()}
    mask, positions = rows.inputs.get("attention_mask"), rows.positions
    kept = torch.ones_like(columns["input_ids"], dtype=torch.bool) if mask is None else mask.cpu().bool()
    for index, is_kept in enumerate(kept):
        row = {name: column[index][is_kept] for name, column in columns.items()}
        starts: list[int] = []
        if positions is not None:
            own = positions[index if len(positions) > 1 else 0].cpu()[is_kept]
            starts = (own.diff() != 1).nonzero()[:, 0].add(1).tolist()
        for start, end in pairwise((0, *starts, len(row["input_ids"]))):
            if (row["labels"][start:end] >= 0).any():
                yield {name: column[start:end] for name, column in row.items()}


def store_teacher_topk(
    model: nn.Module,
    data: Iterable[Mapping[str, Any]] | L.LightningDataModule,
    path: str | Path,
    *,
    dtype: Literal["float32", "float16"] = "float32",
    temperature: float = 1.0,
    **options: Any,
) -> None:
    """Runs a teacher over batches, or over the training batches of a data module, and writes its top-k to a file.

    Students read it with :class:`lightning_liger.data.TeacherTopKDataModule`, in any order. The command
    ``lightning-liger teacher_topk`` does the same for a yaml file.

    Args:
        model: See :func:`teacher_topk_rows`.
        data: Batches, or a data module that has been set up.
        path: The file to write; its name ends in .safetensors.
        dtype: Of the log-probabilities in the file.
        temperature: Divides the logits.
        **options: See :func:`teacher_topk_rows`.

    Raises:
        FileNotFoundError: If the folder of ``path`` does not exist.
        TypeError: As :func:`teacher_topk_rows`.
        ValueError: As :func:`teacher_topk_rows` and :func:`lightning_liger.data.write_teacher_topk`.
    """
    tokenizer, batches = getattr(data, "text_tokenizer", None), cast(Any, data)
    if isinstance(data, L.LightningDataModule):
        batches = data.train_dataloader()
        # In order, and with the last rows, which the loader might leave out.
        if isinstance(batches, DataLoader) and batches.batch_size and not isinstance(batches.dataset, IterableDataset):
            batches = DataLoader(
                batches.dataset, batches.batch_size, collate_fn=batches.collate_fn, num_workers=batches.num_workers
            )
    rows = teacher_topk_rows(model, batches, temperature=temperature, **options)
    write_teacher_topk(path, rows, tokenizer=tokenizer, temperature=temperature, dtype=dtype)
