"""Frozen models next to the one that is trained, and files of a teacher's top-k for students that train without it."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedConfig

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_integer, check_number, wrong_type, wrong_value
from liger_ops.loss.chunked_loss import choose_chunk_size
from lightning_liger.data.teacher_topk import write_teacher_topk
from lightning_liger.lazy.chunks import over_chunks
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.scores import logit_rows
from lightning_liger.losses.distillation import sample_support
from lightning_liger.patching import apply_liger_kernels
from lightning_liger.patching.rules.base import Patched
from lightning_liger.post_training.base import LigerPostTrainingMixin
from lightning_liger.post_training.reference import evaluating
from lightning_liger.post_training.rows import read_tokens
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.training.language_model import LanguageModel
from lightning_liger.weights.meta_device import has_meta_tensors, initialize
from lightning_liger.weights.pretrained import load_pretrained

_CHUNK_BYTES, _BYTES_PER_LOGIT = 2**29, 16


def build_frozen(config: PreTrainedConfig, folder: Path | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with the weights of a folder, or with random ones that are the same on all ranks."""
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    with device:
        if folder is not None and device.type != "meta":
            return AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True, **settings)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, **settings)
    if folder is not None:
        load_pretrained(model, folder)
    return model


def prepare_frozen(
    model: nn.Module, device: torch.device, *, context: ContextParallel | None = None, is_sharded: bool = False
) -> nn.Module:
    """Makes ``model`` ready for forward passes without gradients on ``device``, under any engine of the other model.

    It is frozen, in evaluation mode, and patched with all kernels that fit. With ``is_sharded`` all ranks share its
    parameters, by FSDP2: each layer is whole only while it runs. A model on the meta device gets its values last.
    """
    model.requires_grad_(False).eval()
    if not any(isinstance(module, Patched) for module in model.modules()):
        apply_liger_kernels(model)
    if context is not None:
        context.apply(model)
    if is_sharded and dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
        for unit in (*layers, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model)
        initialize(model, device, layers)
    elif has_meta_tensors(model):
        initialize(model, device)
    return model.to(device)


class LigerTeacherMixin(LigerPostTrainingMixin):
    """A frozen model next to the one that trains, which no engine, no checkpoint and no optimizer sees."""

    shard_teacher = False
    _teacher: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
    _teacher_hook = "configure_teacher"  # which makes it

    @property
    def teacher(self) -> nn.Module | None:
        """The frozen teacher; None if there is none, or if no stage has begun."""
        return self._teacher[0] if self._teacher else None

    def _prepare_stage(self) -> None:
        super()._prepare_stage()
        self._prepare_teacher()

    def _prepare_teacher(self) -> None:
        if self._teacher or (teacher := getattr(self, self._teacher_hook)()) is None:
            return
        if not isinstance(teacher, nn.Module):
            raise wrong_type(f"{self._teacher_hook}()", "a module or None", teacher)
        self._teacher = (prepare_frozen(teacher, self.device, context=self.context, is_sharded=self.shard_teacher),)


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
        top_k: How many ids are kept, at most the vocabulary's size.
        temperature: Divides the logits.
        num_samples: Keeps ids from this many samples, with repetition, instead of the top-k; their
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
