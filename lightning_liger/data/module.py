"""Data modules: batches for each process, and data that is tokenized once and then read from a cache."""

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_path,
    check_text,
    wrong_type,
    wrong_value,
)
from lightning_liger.data.collate import Layout
from lightning_liger.data.packing import LengthSampler, PackedExamples, best_fit_decreasing, measured, rows_of
from lightning_liger.data.records import strings
from lightning_liger.data.sources import RECORD_SUFFIXES, files_at, fingerprints
from lightning_liger.data.tables import DataPath, Table, given_table, hub_table
from lightning_liger.data.tokenizer import (
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    keep_tokenizer,
    load_tokenizer,
    pretrained_folder,
    same_tokenizer,
    tokenizer_files,
    tokenizer_from_content,
    train_bpe_tokenizer,
)
from lightning_liger.hub import check_for_repository, is_hub_name
from lightning_liger.resuming.dataloader import resumable

if TYPE_CHECKING:
    import datasets  # slow to import, so functions import it

Split = Literal["train", "validation"]
_SPLITS = {"train": "split", "validation": "validation_split"}
_FORMAT_VERSION = 5  # part of the cache key: raise it when the files change for the same settings


class BatchesDataModule(L.LightningDataModule):
    """Rows of files as batches: training rows shuffled and divided over processes, validation rows in order.

    The order of training rows depends on ``seed`` and the epoch only.

    Args:
        path: A file, or a folder with such files.
        validation_path: The same for validation. By default ``validation_fraction`` of ``path``.
        batch_size: Rows, examples or groups per batch of each process.
        validation_fraction: Fraction of them that is held out for validation, at least one. 0 means none.
        seed: Determines which are held out, and the order of the others in training.
        num_workers: Worker processes per training process that load batches. 0 loads them in the training process.

    Raises:
        FileNotFoundError: If there is nothing to read at a path.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range; when data is read for a record that is wrong, with file and line.
    """

    _suffixes: tuple[str, ...] = RECORD_SUFFIXES
    """Of the files that are read."""
    _takes_hub_names = False
    """Whether a path may also be the name of a data set on the Hub."""
    _rows_name = "rows"
    """The rows as messages name them."""
    text_tokenizer: PreTrainedTokenizerBase | None = None
    """The tokenizer, after ``setup``."""

    def __init__(
        self,
        *,
        path: DataPath,
        validation_path: DataPath | None = None,
        batch_size: int = 8,
        validation_fraction: float = 0.02,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_integer("data.batch_size", batch_size, at_least=1)
        check_integer("data.seed", seed, at_least=0, at_most=2**63 - 1)  # with the epoch it must fit torch's 64 bits
        check_integer("data.num_workers", num_workers, at_least=0)
        check_number("data.validation_fraction", validation_fraction, at_least=0, below=1)
        self.path: DataPath | None = path
        self.validation_path = validation_path
        self._check_place("train")
        if self.validation_path is not None:
            self._check_place("validation")
        self.batch_size, self.seed, self.num_workers = batch_size, int(seed), num_workers
        self.validation_fraction = float(validation_fraction)
        self.train_data: Any = None
        self.validation_data: Any = None

    def _place(self, split: Split) -> tuple[str, Any]:
        """The setting of the files of a split, and its value."""
        if split == "validation" and self.validation_path is not None:
            return "data.validation_path", self.validation_path
        return "data.path", self.path

    def _corpus(self, split: Split = "train") -> str:
        """The data of a split as messages name it."""
        setting, path = self._place(split)
        return f"{setting}={str(path)!r}"

    def _check_place(self, split: Split) -> None:
        """Raises if there is nothing to read."""
        self._files(split)

    def _files(self, split: Split) -> list[Path]:
        return files_at(*self._place(split), self._suffixes, or_on_hub=self._takes_hub_names)

    def _read(self, split: Split) -> Any:
        """What is in these files: rows, or documents or records that rows are made of."""
        raise NotImplementedError

    def _collator(self, split: Split) -> Callable[..., Any]:
        """Makes a batch of a list of rows."""
        raise NotImplementedError

    @override
    def setup(self, stage: str | None = None) -> None:
        self.train_data = rows = self._read("train")
        if self.validation_path is not None:
            self.validation_data = self._read("validation")
        elif places := held_out_places(len(rows), self.validation_fraction, self.seed):
            self.train_data = Subset(rows, [place for place in range(len(rows)) if place not in places])
            self.validation_data = Subset(rows, sorted(places))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Training rows in an order of ``seed`` and the epoch; raises ValueError unless each process gets a batch."""
        rows = self._after_setup(self.train_data)
        sampler = self._sampler(rows)
        num_rows, num_shards = len(sampler.dataset), sampler.num_replicas
        if num_rows < (needed := self.batch_size * num_shards):
            name = self._rows_name if num_rows == len(rows) else "packed rows"
            raise ValueError(
                f"{self._corpus()} has {num_rows} train {name}, but {needed} are needed: one batch of"
                f" data.batch_size={self.batch_size} for each of {num_shards} processes."
            )
        return resumable(self._dataloader("train", rows, sampler=sampler, drop_last=True))

    def _sampler(self, rows: Any) -> Any:
        """Lightning keeps it and sets its epoch. The one that it would add itself has a seed of the environment."""
        return DistributedSampler(rows, **self._shard(), shuffle=True, seed=self.seed, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """All validation rows in order; the last batch may be smaller. An empty list without validation data."""
        return [] if self.validation_data is None else self._dataloader("validation", self.validation_data)

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self.val_dataloader()

    def _dataloader(self, split: Split, rows: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),  # copies from pageable memory would wait for the device
            collate_fn=self._collator(split),
            **options,
        )

    def _shard(self) -> dict[str, int]:
        """Arguments of DistributedSampler: the number of shards (tensor-parallel ranks share one), and this rank's."""
        found = getattr(self.trainer, "distributed_sampler_kwargs", None)
        if found is None and dist.is_available() and dist.is_initialized():  # Fabric, which has no trainer
            found = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
        return found or {"num_replicas": 1, "rank": 0}

    def _after_setup(self, value: Any) -> Any:
        if value is None:
            raise RuntimeError(f"{type(self).__name__} has no data before setup(): call setup() first.")
        return value


class SequencesDataModule(BatchesDataModule):
    """Sequences of different lengths, which are truncated, and padded, concatenated or packed.

    Args:
        max_length: The maximum number of tokens of a sequence. None keeps all.
        truncation: Which tokens of longer sequences stay: "keep_start" or "keep_end".
        packing: Whether examples are packed into rows of ``max_length`` tokens (for each sequence of an example: a pair
            has two), which ``batch_size`` counts; without padding, as with ``padding_free``.
        packing_strategy: "bfd", best-fit decreasing. None is the same with a warning: ``padding_free`` was ``packing``.
        padding_free: Whether the sequences of a batch are concatenated into one row without padding. Attention
            separates them by position_ids or cu_seq_lens.
        train_sampling_strategy: "random", or "group_by_length": examples or rows of a step have similar lengths.
        balance_ranks: What is divided about evenly over ranks in each training step: "tokens", or "squared_lengths", to
            which the time of attention is proportional. None deals examples or rows at random.
        pad_to_multiple_of: The number of tokens of a row is a multiple of this.
    """

    _collator_type: Callable[[Layout], Callable[..., Any]]

    def __init__(
        self,
        *,
        max_length: int | None = 1024,
        truncation: Literal["keep_start", "keep_end"] = "keep_start",
        packing: bool = False,
        packing_strategy: Literal["bfd"] | None = None,
        padding_free: bool = False,
        train_sampling_strategy: Literal["random", "group_by_length"] = "random",
        balance_ranks: Literal["tokens", "squared_lengths"] | None = "tokens",
        pad_to_multiple_of: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_bool("data.packing", packing)
        check_choice("data.packing_strategy", packing_strategy, ("bfd", None))
        check_choice("data.train_sampling_strategy", train_sampling_strategy, ("random", "group_by_length"))
        check_choice("data.balance_ranks", balance_ranks, ("tokens", "squared_lengths", None))
        self._layout = Layout(0, max_length, truncation, pad_to_multiple_of, packing or padding_free)
        if packing and max_length is None:
            raise wrong_value("data.max_length", "an integer with data.packing, the tokens of a row", max_length)
        if packing and packing_strategy is None:
            now = "data.packing makes rows of data.max_length tokens now, and data.batch_size counts them"
            warnings.warn(f"{now}: set data.packing_strategy='bfd', or data.padding_free", FutureWarning, stacklevel=2)
        self.packing, self.train_sampling_strategy, self.balance_ranks = packing, train_sampling_strategy, balance_ranks

    def _lengths(self, split: Split, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all sequences of these examples before truncation, and how many sequences each example has."""
        raise NotImplementedError

    def _sizes(self, split: Split, rows: Any) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokens of each example, the sum of its squared lengths, and the capacity of packed rows."""
        lengths, counts = self._lengths(split, rows)
        limit = self._layout.max_length or 2**31  # more than any has
        if self.packing and (num_cut := int((lengths > limit).sum())):
            cut = f"{num_cut} of {len(lengths)} {split} sequences of {self._corpus(split)} are truncated"
            rank_zero_warn(f"{cut} to data.max_length={limit} tokens ({self._layout.truncation}).")
        return *measured(lengths, counts, limit), limit * int(counts.max())

    @override
    def _sampler(self, rows: Any) -> Any:
        shard: dict[str, Any] = {"seed": self.seed, **self._shard()}
        balance = self.balance_ranks if shard["num_replicas"] > 1 else None
        is_grouped = self.train_sampling_strategy == "group_by_length"
        if not (self.packing or is_grouped or balance):
            return super()._sampler(rows)
        tokens, squares, capacity = self._sizes("train", rows)
        costs = {None: None, "tokens": tokens, "squared_lengths": squares}[balance]
        return LengthSampler(tokens, costs, self.batch_size, capacity if self.packing else None, is_grouped, **shard)

    @override
    def _dataloader(self, split: Split, rows: Any, **options: Any) -> DataLoader[Any]:
        if self.packing:
            data, rows = rows, PackedExamples(rows)
            if split == "validation":
                tokens, _, capacity = self._sizes(split, data)
                rows = Subset(rows, rows_of(best_fit_decreasing(tokens, capacity)))
        return super()._dataloader(split, rows, **options)

    @property
    def layout(self) -> Layout:
        """How collators truncate, pad and pack; after ``setup``, when the tokenizer is known."""
        tokenizer = self._after_setup(self.text_tokenizer)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return replace(self._layout, pad_token_id=pad)

    @override
    def _collator(self, split: Split) -> Callable[..., Any]:
        return self._collator_type(self.layout)


class TokenizedDataModule(BatchesDataModule):
    """Data that is tokenized once and then read from a cache, with the tokenizer that checkpoints hold.

    After ``setup`` the tokenizer is ``text_tokenizer``. ``predict`` continues a prompt with the tokenizer of the
    checkpoint and reads no data. Other arguments are those of :class:`BatchesDataModule`.

    Args:
        tokenizer: A folder with a Hugging Face tokenizer that has an eos_token, or ``owner/name`` of one on the Hub.
            By default a byte-level BPE is trained on the data for training.
        vocab_size: The maximum number of tokens of a trained tokenizer. Not used with ``tokenizer``.
        cache_dir: Where tokens are kept. By default lightning-liger in $XDG_CACHE_HOME or in ~/.cache.
        prompt: Text for ``predict`` to continue.
        tokenizer_revision: Branch, tag or commit of ``tokenizer`` on the Hub.
        split: Of a data set on the Hub: the split for training, by default "train". Slices such as "train[:10%]" work.
        validation_split: The split for validation. Without ``validation_path`` it is one of ``path``; with it, the
            default is "validation".
        subset: The configuration of the data set on the Hub, if it has several.
        revision: Branch, tag or commit of the data set on the Hub.
        streaming: Whether rows of a data set on the Hub are tokenized as they arrive, without a copy of the data set
            on disk. It is read once more to hold out ``validation_fraction``, and to train a tokenizer.

    Raises:
        ConnectionError: If a repository of the Hub is not in the local cache, and the Hub cannot be reached.
        FileNotFoundError: If there is no such path, repository or revision.
        PermissionError: If a repository is gated, and the user of the token may not read it.
    """

    _takes_hub_names = True
    _settings_of_tokens: tuple[str, ...] = ("validation_fraction", "seed")
    """The attributes that determine the rows of the cache."""

    def __init__(
        self,
        *,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        cache_dir: str | Path | None = None,
        prompt: str | None = None,
        tokenizer_revision: str | None = None,
        split: str | None = None,
        validation_split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        **settings: Any,
    ) -> None:
        check_bool("data.streaming", streaming)
        self.split, self.validation_split, self.subset, self.revision = split, validation_split, subset, revision
        self.streaming = streaming
        self._tables: dict[Split, Table] = {}
        super().__init__(**settings)
        check_integer("data.vocab_size", vocab_size, at_least=MIN_VOCAB_SIZE, at_most=MAX_VOCAB_SIZE)
        check_path("data.cache_dir", cache_dir, optional=True)
        check_text("data.prompt", prompt or None, optional=True)  # predict says that it needs one
        check_for_repository("data.tokenizer_revision", tokenizer_revision, tokenizer)
        self._tokenizer_folder = ""
        if tokenizer is not None:
            self._tokenizer_folder = pretrained_folder("data.tokenizer", tokenizer, tokenizer_revision)
            tokenizer_files(self._tokenizer_folder)  # raises if it is not a tokenizer's folder
        self.tokenizer, self.vocab_size, self.prompt = tokenizer, int(vocab_size), prompt
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._tokenizer_state: dict[str, Any] = {}
        self._loaded: tuple[PreTrainedTokenizerBase, Any] | None = None  # of a checkpoint, with its source

    @override
    def _check_place(self, split: Split) -> None:
        if self.validation_split is not None and self.validation_path is None:
            self.validation_path = self.path
        setting, path = self._place(split)
        named = self.split if split == "train" else self.validation_split
        if is_hub_name(path) and not path.endswith(RECORD_SUFFIXES):
            options: dict[str, Any] = {"subset": self.subset, "revision": self.revision, "streaming": self.streaming}
            self._tables[split] = hub_table(setting, path, named or split, **options)
            return
        for name, value in {_SPLITS[split]: named, "subset": self.subset, "revision": self.revision}.items():
            check_for_repository(f"data.{name}", value, path)
        if self.streaming:
            raise wrong_value("data.streaming", f"False, as {path!r} is not the owner/name of a repository", True)
        if path is not None and not isinstance(path, str | Path):
            self._tables[split] = given_table(setting, path)
        else:
            super()._check_place(split)

    def _table(self, split: Split) -> Table | None:
        """The rows of a split, None if they are in files."""
        return self._tables.get("train" if self.validation_path is None else split)

    @override
    def _corpus(self, split: Split = "train") -> str:
        table = self._table(split)
        return super()._corpus(split) if table is None else table.described

    def _key(self, split: Split) -> Sequence[Any]:
        """What determines the content of a split's data, without reading them."""
        table = self._table(split)
        return fingerprints(self._files(split)) if table is None else table.key

    def _rows(self, items: Iterable[Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _items(self, split: Split) -> Iterable[Any]:
        if self.validation_path is not None:
            return self._read(split)
        held_out = held_out_places(sum(1 for _ in self._read("train")), self.validation_fraction, self.seed)
        items = enumerate(self._read("train"))
        return (item for place, item in items if (place in held_out) == (split == "validation"))

    def _make_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is not None:
            return load_tokenizer(self._tokenizer_folder, self._tokenizer_source)
        return train_bpe_tokenizer(chain.from_iterable(map(strings, self._items("train"))), self.vocab_size)

    @property
    def _splits(self) -> list[Split]:
        return ["train", "validation"] if self.validation_path is not None or self.validation_fraction else ["train"]

    @property
    def cache_folder(self) -> Path:
        """The folder for this corpus and these settings; its name is a hash of all that determines its content."""
        settings = {
            "versions": (_FORMAT_VERSION, tokenizers.__version__, transformers.__version__),
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "tokenizer": self.vocab_size
            if self.tokenizer is None
            else fingerprints(tokenizer_files(self._tokenizer_folder)),
            "files": [(*self._place(split)[:1], *self._key(split)) for split in self._splits],
            **{name: getattr(self, name) for name in self._settings_of_tokens},
        }
        return self.cache_dir / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]

    @override
    def prepare_data(self) -> None:
        if not self._predicts:
            self._take_tokenizer()
            for split in self._splits:
                self._cached(split)

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._predicts:  # the checkpoint, which is loaded later, may have the tokenizer
            return
        self._take_tokenizer()
        for split in self._splits:
            setattr(self, f"{split}_data", self._usable(split, self._cached(split)))

    def _usable(self, split: Split, rows: "datasets.Dataset") -> Any:
        """The rows that batches are made of."""
        return rows

    def _cached(self, split: Split) -> "datasets.Dataset":
        """The rows in the cache, which are made by one of several processes if they are not there."""
        import datasets
        from datasets.exceptions import DatasetGenerationError

        folder = self.cache_folder

        def generate() -> Iterator[dict[str, Any]]:
            row = None
            for row in self._rows(self._items(split), self._after_setup(self.text_tokenizer)):
                yield row
            if row is None:
                held_out = f" with data.validation_fraction={self.validation_fraction}" if split != "train" else ""
                raise ValueError(f"{self._corpus(split)} has no {split} {self._rows_name}{held_out}: one is needed.")

        try:
            found = datasets.Dataset.from_generator(
                generate,
                cache_dir=str(folder),
                split=datasets.NamedSplit(split),
                fingerprint=f"{folder.name}-{split}",  # the same in each run
            )
            num_rows = found.info.splits[split].num_examples
            if len(found) != num_rows:
                raise ValueError(f"expected {num_rows} rows, got {len(found)}")
        except DatasetGenerationError as error:  # it hides what `generate` raised
            raise (error.__cause__ or error) from None
        except (OSError, ValueError, LookupError, TypeError) as error:  # pyarrow's are among them
            raise RuntimeError(f"{folder} is corrupt ({error}): remove it to rebuild it.") from error
        return found.with_format("numpy")

    @override
    def teardown(self, stage: str) -> None:
        self._loaded = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """The tokenizer: the content of its files by name, and where it comes from. Empty before ``setup``."""
        return dict(self._tokenizer_state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the tokenizer of a checkpoint, to predict or before ``setup``; else compares it with this one."""
        if not isinstance(state_dict, dict):
            raise wrong_type("state_dict", "a dict, as state_dict() returns", state_dict)
        if not state_dict:
            return
        loaded = tokenizer_from_content(state_dict.get("tokenizer"), "the checkpoint's tokenizer")
        self._loaded = loaded, state_dict.get("source")
        if self.text_tokenizer is not None and not self._predicts:
            self._compare_with_checkpoint(self.text_tokenizer)
            return
        if self.tokenizer is not None:
            self._compare_with_checkpoint(self._make_tokenizer())
        self.text_tokenizer, self._tokenizer_state = loaded, state_dict

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """``prompt`` as one row, encoded by the checkpoint's tokenizer, or else that of ``tokenizer`` or the corpus."""
        if not self.prompt:
            raise wrong_value("data.prompt", "the text that predict continues", self.prompt)
        if self._predicts and self.text_tokenizer is None:
            self._take_tokenizer()
        if self.trainer is not None and self.trainer.ckpt_path and self._loaded is None:
            rank_zero_warn(
                f"{self.trainer.ckpt_path} holds no tokenizer: the prompt is encoded with {self._tokenizer_source}."
            )
        input_ids = self._after_setup(self.text_tokenizer)(self.prompt, add_special_tokens=False)["input_ids"]
        if not input_ids:
            raise wrong_value("data.prompt", "a text that has tokens", self.prompt)
        prompts: Any = [{"input_ids": torch.tensor(input_ids)}]  # a list is a map-style dataset
        return DataLoader(prompts, batch_size=1)

    @property
    def _predicts(self) -> bool:
        """Whether a Trainer runs ``predict``, which needs a tokenizer but no corpus."""
        return self.trainer is not None and self.trainer.predicting

    def _take_tokenizer(self) -> None:
        """Loads the tokenizer of the cache, where it is made if it is not there, and keeps what checkpoints hold."""
        folder = self.cache_folder / "tokenizer"
        if not folder.exists():
            rank_zero_info(f"Tokenizing {self._corpus()} into {folder.parent}")
        keep_tokenizer(folder, self._make_tokenizer)
        tokenizer = load_tokenizer(folder, self._tokenizer_source)
        self._compare_with_checkpoint(tokenizer)
        self.text_tokenizer = tokenizer
        content = {file.name: file.read_bytes() for file in tokenizer_files(folder)}
        self._tokenizer_state = {"tokenizer": content, "source": self._tokenizer_source}

    @property
    def _tokenizer_source(self) -> str:
        trained = f"a tokenizer trained on {self._corpus()}"
        return trained if self.tokenizer is None else f"data.tokenizer={str(self.tokenizer)!r}"

    def _compare_with_checkpoint(self, own: PreTrainedTokenizerBase) -> None:
        if self._loaded is not None and not same_tokenizer(own, self._loaded[0]):
            loaded, source = self._loaded
            raise ValueError(
                f"{self._tokenizer_source} ({len(own)} tokens) is not the checkpoint's tokenizer, {source}"
                f" ({len(loaded)} tokens): give the data settings that the model was trained with, or as"
                " data.tokenizer the folder to which the checkpoint was exported."
            )


def default_cache_dir() -> Path:
    """The folder ``lightning-liger`` in ``$XDG_CACHE_HOME``, or in ``~/.cache`` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning-liger")


def num_held_out(total: int, fraction: float) -> int:
    """How many of ``total`` are held out: at least one unless ``fraction`` is 0, and never all."""
    return min(max(1, round(total * fraction)), total - 1) if fraction and total else 0


def held_out_places(total: int, fraction: float, seed: int) -> set[int]:
    return set(random.Random(seed).sample(range(total), num_held_out(total, fraction)))
