"""Data modules: batches for each process, and data that is tokenized once and then read from a cache."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import check_integer, check_number, check_path, check_text, shown, wrong_type, wrong_value
from lightning_liger.data.sources import fingerprints
from lightning_liger.data.tokenizer import (
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    atomic_folder,
    load_tokenizer,
    same_tokenizer,
    tokenizer_files,
    tokenizer_from_content,
)
from lightning_liger.resuming.dataloader import resumable

Split = Literal["train", "validation"]
_T = TypeVar("_T")

_MAX_SEED = 2**63 - 1  # the epoch is added, and the sum must fit torch's 64 bits


class BatchesDataModule(L.LightningDataModule):
    """Rows of data sets as batches: training rows shuffled and divided over processes, validation rows in order.

    Subclasses set ``train_data`` and ``validation_data`` in ``setup``.
    """

    def __init__(self, *, batch_size: int, seed: int, num_workers: int) -> None:
        super().__init__()
        check_integer("data.batch_size", batch_size, at_least=1)
        check_integer("data.seed", seed, at_least=0, at_most=_MAX_SEED)
        check_integer("data.num_workers", num_workers, at_least=0)
        self.batch_size, self.seed, self.num_workers = batch_size, int(seed), num_workers
        self.train_data: Dataset[Any] | None = None
        self.validation_data: Dataset[Any] | None = None

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning keeps a DistributedSampler and sets its epoch. The sampler that it would add itself takes its seed
        # from the environment.
        train_data = self._after_setup(self.train_data)
        sampler: DistributedSampler[Any] = DistributedSampler(
            train_data, **self._shard(), shuffle=True, seed=self.seed, drop_last=True
        )
        return resumable(self._dataloader(train_data, sampler=sampler, drop_last=True))

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """All validation rows in order; the last batch may be smaller. An empty list without validation data.

        Lightning divides the rows over several processes, and repeats a few of them if they do not divide evenly.
        """
        return [] if self.validation_data is None else self._dataloader(self.validation_data)

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """The validation data."""
        return self.val_dataloader()

    def _collator(self) -> Callable[..., Any] | None:
        """Makes a batch of a list of rows; None for torch's default."""
        return None

    def _dataloader(self, rows: Dataset[Any], **options: Any) -> DataLoader[Any]:
        defaults = {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": torch.cuda.is_available(),  # copies from pageable memory would wait for the device
            "collate_fn": self._collator(),
        }
        return DataLoader(rows, batch_size=self.batch_size, **{**defaults, **options})

    def _shard(self) -> dict[str, int]:
        """Arguments of DistributedSampler: the number of shards (tensor-parallel ranks share one), and this rank's."""
        from_strategy = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        if from_strategy is not None:
            return from_strategy
        if dist.is_available() and dist.is_initialized():  # Fabric, which has no trainer
            return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
        return {"num_replicas": 1, "rank": 0}

    def _after_setup(self, value: _T | None) -> _T:
        if value is None:
            raise RuntimeError(
                f"{type(self).__name__} has no data before setup(): call prepare_data() and setup() first."
            )
        return value


class TokenizedDataModule(BatchesDataModule):
    """Data that is tokenized once and then read from a cache, with the tokenizer that checkpoints hold.

    After ``setup`` the tokenizer is ``text_tokenizer``. ``predict`` continues a prompt with the tokenizer of the
    checkpoint and reads no data.

    Subclasses name their data (``_corpus``), list all that the cache depends on (``_content_settings``), write the
    cache (``_write_cache``) and read it (``_read_cache``).
    """

    def __init__(
        self,
        *,
        tokenizer: str | Path | None,
        vocab_size: int,
        batch_size: int,
        validation_fraction: float,
        seed: int,
        num_workers: int,
        cache_dir: str | Path | None,
        prompt: str | None,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_integer("data.vocab_size", vocab_size, at_least=MIN_VOCAB_SIZE, at_most=MAX_VOCAB_SIZE)
        check_number("data.validation_fraction", validation_fraction, at_least=0, below=1)
        _check_cache_dir(cache_dir)
        _check_prompt(prompt)
        if tokenizer is not None:
            tokenizer_files(tokenizer)  # raises if it is not a tokenizer's folder
        self.tokenizer, self.vocab_size, self.prompt = tokenizer, int(vocab_size), prompt
        self.validation_fraction = float(validation_fraction)
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.text_tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_state: dict[str, Any] = {}
        self._loaded_state: dict[str, Any] = {}

    @property
    def _corpus(self) -> str:
        """The data as messages name it."""
        raise NotImplementedError

    def _content_settings(self) -> dict[str, Any]:
        """Everything that determines the content of the cache folder."""
        raise NotImplementedError

    def _tokenizer_settings(self) -> Any:
        """The part of them that is about the tokenizer."""
        return self.vocab_size if self.tokenizer is None else fingerprints(tokenizer_files(self.tokenizer))

    def _write_cache(self, folder: Path) -> dict[str, Any]:
        """Writes the tokenizer (``folder / "tokenizer"``) and the data; returns what ``_read_cache`` has to know."""
        raise NotImplementedError

    def _read_cache(self, folder: Path, metadata: dict[str, Any], stage: str | None) -> None:
        """Sets ``train_data`` and ``validation_data``."""
        raise NotImplementedError

    @property
    def cache_folder(self) -> Path:
        """The folder for this corpus and these settings; its name is a hash of all that determines its content."""
        return self.cache_dir / hashlib.sha256(json.dumps(self._content_settings()).encode()).hexdigest()[:20]

    @override
    def prepare_data(self) -> None:
        if not self._predicts:
            self._prepare_cache()

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._predicts:  # the checkpoint, which is loaded later, may have the tokenizer
            self._require_prompt()
            return
        folder, metadata = self._take_tokenizer()
        self._read_cache(folder, metadata, stage)

    @override
    def teardown(self, stage: str) -> None:
        self._loaded_state = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        """The tokenizer: the content of its files by name, and where it comes from. Empty before ``setup``."""
        return dict(self._tokenizer_state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the tokenizer of a checkpoint, to predict or before ``setup``; else compares it with this one.

        Raises:
            ValueError: If it is not the tokenizer of this data module.
        """
        if not isinstance(state_dict, dict):
            raise wrong_type("state_dict", "a dict, as state_dict() returns", state_dict)
        if not state_dict:
            return
        self._loaded_state = state_dict
        if self.text_tokenizer is None or self._predicts:
            loaded = tokenizer_from_content(state_dict.get("tokenizer"), "the checkpoint's tokenizer")
            if self.tokenizer is not None:
                self._compare_tokenizers(load_tokenizer(self.tokenizer), loaded)
            self.text_tokenizer, self._tokenizer_state = loaded, state_dict
        else:
            self._compare_with_loaded(self.text_tokenizer)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """``prompt`` as one row, encoded by the checkpoint's tokenizer.

        Without a checkpoint, and with one that holds no tokenizer, by that of ``tokenizer`` or the corpus.

        Raises:
            ValueError: If there is no prompt, or it has no tokens.
        """
        prompt = self._require_prompt()
        if self._predicts and self.text_tokenizer is None:
            self._prepare_cache()
            self._take_tokenizer()
        if self.trainer is not None and self.trainer.ckpt_path and not self._loaded_state:
            rank_zero_warn(
                f"{self.trainer.ckpt_path} holds no tokenizer: the prompt is encoded with {self._tokenizer_source}."
            )
        tokenizer = self._after_setup(self.text_tokenizer)
        input_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not input_ids:
            raise wrong_value("data.prompt", "a text that has tokens", prompt)
        prompts: Any = [{"input_ids": torch.tensor(input_ids)}]  # a list is a map-style dataset
        return DataLoader(prompts, batch_size=1)

    def _require_prompt(self) -> str:
        if not self.prompt:
            raise wrong_value("data.prompt", "the text that predict continues", self.prompt)
        return self.prompt

    @property
    def _predicts(self) -> bool:
        """Whether a Trainer runs ``predict``, which needs a tokenizer but no corpus."""
        return self.trainer is not None and self.trainer.predicting

    def _prepare_cache(self) -> None:
        destination = self.cache_folder
        if (problem := _problem_of_cache(destination)) is None:
            return
        if os.path.lexists(destination):
            rank_zero_warn(f"{destination} is damaged and made again: {problem}")
            shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
        rank_zero_info(f"Tokenizing {self._corpus} into {destination}")
        with atomic_folder(destination) as folder:
            metadata = self._write_cache(folder)
            metadata |= {"file_sizes": _file_sizes(folder), "settings": self._content_settings()}
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")

    def _take_tokenizer(self) -> tuple[Path, dict[str, Any]]:
        """Loads the tokenizer of the cache; returns the cache folder and its metadata."""
        folder = self.cache_folder
        if (problem := _problem_of_cache(folder)) is not None:
            raise RuntimeError(f"{problem}: call prepare_data() first, and do not change the corpus.")
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        tokenizer = load_tokenizer(folder / "tokenizer", self._tokenizer_source)
        if self._loaded_state:
            self._compare_with_loaded(tokenizer)
        self.text_tokenizer = tokenizer
        content = {file.name: file.read_bytes() for file in tokenizer_files(folder / "tokenizer")}
        self._tokenizer_state = {"tokenizer": content, "source": self._tokenizer_source}
        return folder, metadata

    @property
    def _tokenizer_source(self) -> str:
        if self.tokenizer is not None:
            return f"data.tokenizer={str(self.tokenizer)!r}"
        return f"a tokenizer trained on {self._corpus}"

    def _compare_with_loaded(self, own: PreTrainedTokenizerBase) -> None:
        loaded = tokenizer_from_content(self._loaded_state.get("tokenizer"), "the checkpoint's tokenizer")
        self._compare_tokenizers(own, loaded)

    def _compare_tokenizers(self, own: PreTrainedTokenizerBase, loaded: PreTrainedTokenizerBase) -> None:
        if not same_tokenizer(own, loaded):
            raise ValueError(
                f"{self._tokenizer_source} ({len(own)} tokens) is not the checkpoint's tokenizer, "
                f"{self._loaded_state.get('source')} ({len(loaded)} tokens): give the data settings that the model was "
                "trained with, or as data.tokenizer the folder to which the checkpoint was exported."
            )


def default_cache_dir() -> Path:
    """The folder ``lightning-liger`` in ``$XDG_CACHE_HOME``, or in ``~/.cache`` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning-liger")


def _check_cache_dir(cache_dir: Any) -> None:
    check_path("data.cache_dir", cache_dir, optional=True)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    try:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    except OSError as error:
        raise ValueError(f"data.cache_dir must be a folder, got {shown(str(cache_dir))}: {error}") from error
    if file is not None:
        raise wrong_value("data.cache_dir", f"a folder, and {str(file)!r} is a file", str(folder))


def _check_prompt(prompt: Any) -> None:
    if prompt == "":
        return  # predict says what it needs
    check_text("data.prompt", prompt, optional=True)
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:  # such as bytes on the command line that are not UTF-8
        raise wrong_value("data.prompt", "valid Unicode", prompt) from error


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _problem_of_cache(folder: Path) -> str | None:
    """Why the folder cannot be read; None if it is complete."""
    if not folder.is_dir():
        return f"{folder} does not exist" if not os.path.lexists(folder) else f"{folder} is not a folder"
    try:
        expected = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["file_sizes"]
        found = _file_sizes(folder)
        wrong = [name for name, size in expected.items() if found.get(name) != size]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return f"{folder / 'metadata.json'} cannot be read"
    return f"{folder / wrong[0]} is missing or has another size than it was written with" if wrong else None


def num_held_out(total: int, fraction: float) -> int:
    """How many of ``total`` are held out: at least one unless ``fraction`` is 0, and never all."""
    return min(max(1, round(total * fraction)), total - 1) if fraction else 0


def held_out_places(total: int, fraction: float, seed: int) -> set[int]:
    """Which of ``total`` are held out."""
    return set(random.Random(seed).sample(range(total), num_held_out(total, fraction)))
