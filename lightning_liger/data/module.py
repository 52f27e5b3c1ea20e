"""Data modules: batches for each process, and data that is tokenized once and then read from a cache."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning as L
import tokenizers
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import check_integer, check_number, check_path, check_text, shown, wrong_type, wrong_value
from lightning_liger.data.sources import fingerprints
from lightning_liger.data.tokenizer import (
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    keep_tokenizer,
    load_tokenizer,
    same_tokenizer,
    tokenizer_files,
    tokenizer_from_content,
    train_bpe_tokenizer,
)
from lightning_liger.resuming.dataloader import resumable

if TYPE_CHECKING:
    import datasets  # slow to import, so functions import it

Split = Literal["train", "validation"]
_T = TypeVar("_T")
_UNPREPARED = "call prepare_data() first, and do not change the corpus."

_MAX_SEED = 2**63 - 1  # the epoch is added, and the sum must fit torch's 64 bits


class BatchesDataModule(L.LightningDataModule):
    """Rows of data sets as batches: training rows shuffled and divided over processes, validation rows in order.

    The order of training rows depends on ``seed`` and the epoch only. Subclasses set ``train_data`` and
    ``validation_data`` in ``setup``.

    Args:
        batch_size: Rows, examples or groups per batch of each process.
        validation_fraction: Fraction of them that is held out for validation, at least one. 0 means none.
        seed: Determines which are held out, and the order of the others in training.
        num_workers: Worker processes per training process that load batches. 0 loads them in the training process.
    """

    def __init__(
        self, *, batch_size: int = 8, validation_fraction: float = 0.02, seed: int = 42, num_workers: int = 0
    ) -> None:
        super().__init__()
        check_integer("data.batch_size", batch_size, at_least=1)
        check_integer("data.seed", seed, at_least=0, at_most=_MAX_SEED)
        check_integer("data.num_workers", num_workers, at_least=0)
        check_number("data.validation_fraction", validation_fraction, at_least=0, below=1)
        self.batch_size, self.seed, self.num_workers = batch_size, int(seed), num_workers
        self.validation_fraction = float(validation_fraction)
        self.train_data: Any = None
        self.validation_data: Any = None

    @property
    def _rows_name(self) -> str:
        """The rows as messages name them."""
        return "rows"

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

    def _collator(self) -> Callable[..., Any]:
        """Makes a batch of a list of rows."""
        raise NotImplementedError

    def _dataloader(self, rows: Any, **options: Any) -> DataLoader[Any]:
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

    def _check_enough_to_train(self, source: str, stage: str | None) -> None:
        """Raises ValueError unless each process gets a batch."""
        num_shards = self._shard()["num_replicas"]
        needed = self.batch_size * num_shards
        if stage in (None, "fit") and len(self.train_data) < needed:
            raise ValueError(
                f"{source} has {len(self.train_data)} train {self._rows_name}, but {needed} are needed: one batch of"
                f" data.batch_size={self.batch_size} for each of {num_shards} processes."
            )


class FilesDataModule(BatchesDataModule):
    """Rows that are read from files in ``setup``.

    Other arguments are those of :class:`BatchesDataModule`.

    Args:
        path: A file, or a folder with such files.
        validation_path: The same for validation. By default ``validation_fraction`` of the rows of ``path``.
    """

    def __init__(self, *, path: str | Path, validation_path: str | Path | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._files("data.path", path)
        if validation_path is not None:
            self._files("data.validation_path", validation_path)
        self.path, self.validation_path = path, validation_path

    def _files(self, setting: str, path: Any) -> list[Path]:
        """The files at ``path``; raises if there are none."""
        raise NotImplementedError

    def _read(self, setting: str, files: list[Path]) -> Any:
        """The rows of files."""
        raise NotImplementedError

    @override
    def setup(self, stage: str | None = None) -> None:
        rows = self._read("data.path", self._files("data.path", self.path))
        self.train_data, self.validation_data = held_out(rows, self.validation_fraction, self.seed)
        if (path := self.validation_path) is not None:
            self.train_data = rows
            self.validation_data = self._read("data.validation_path", self._files("data.validation_path", path))
        self._check_enough_to_train(f"data.path={str(self.path)!r}", stage)


class TokenizedDataModule(BatchesDataModule):
    """Data that is tokenized once and then read from a cache, with the tokenizer that checkpoints hold.

    After ``setup`` the tokenizer is ``text_tokenizer``. ``predict`` continues a prompt with the tokenizer of the
    checkpoint and reads no data.

    Other arguments are those of :class:`BatchesDataModule`.

    Args:
        tokenizer: A folder with a Hugging Face tokenizer that has an eos_token. By default a byte-level BPE is trained
            on the data for training.
        vocab_size: The maximum number of tokens of a trained tokenizer. Not used with ``tokenizer``.
        cache_dir: Where tokens are kept. By default lightning-liger in $XDG_CACHE_HOME or in ~/.cache.
        prompt: Text for ``predict`` to continue.
    """

    def __init__(
        self,
        *,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        cache_dir: str | Path | None = None,
        prompt: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_integer("data.vocab_size", vocab_size, at_least=MIN_VOCAB_SIZE, at_most=MAX_VOCAB_SIZE)
        _check_cache_dir(cache_dir)
        check_text("data.prompt", prompt or None, optional=True)  # predict says that it needs one
        if tokenizer is not None:
            tokenizer_files(tokenizer)  # raises if it is not a tokenizer's folder
        self.tokenizer, self.vocab_size, self.prompt = tokenizer, int(vocab_size), prompt
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.text_tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_state: dict[str, Any] = {}
        self._loaded: PreTrainedTokenizerBase | None = None  # of the checkpoint
        self._loaded_source: Any = None

    # What subclasses define: the data as messages name it, all that the cache depends on, the documents or records, and
    # of some of them the texts that a tokenizer is trained on and the rows of the cache.

    @property
    def _corpus(self) -> str:
        raise NotImplementedError

    def _content_settings(self) -> dict[str, Any]:
        return {
            "tokenizers": tokenizers.__version__,
            "tokenizer": self.vocab_size if self.tokenizer is None else fingerprints(tokenizer_files(self.tokenizer)),
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
        }

    def _all_items(self) -> Iterator[Any]:
        raise NotImplementedError

    def _texts(self, items: Iterator[Any]) -> Iterator[str]:
        raise NotImplementedError

    def _rows(self, items: Iterator[Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _items(self, split: Split) -> Iterator[Any]:
        """The documents or records of a split."""
        held_out = held_out_places(sum(1 for _ in self._all_items()), self.validation_fraction, self.seed)
        return (item for place, item in enumerate(self._all_items()) if (place in held_out) == (split == "validation"))

    def _make_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        return train_bpe_tokenizer(self._texts(self._items("train")), self.vocab_size)

    @property
    def _validation_setting(self) -> str | None:
        """The setting that asks for validation data."""
        return "validation_fraction" if self.validation_fraction else None

    @property
    def cache_folder(self) -> Path:
        """The folder for this corpus and these settings; its name is a hash of all that determines its content."""
        return self.cache_dir / hashlib.sha256(json.dumps(self._content_settings()).encode()).hexdigest()[:20]

    @override
    def prepare_data(self) -> None:
        if self._predicts:
            return
        folder = self.cache_folder
        if not folder.exists():
            rank_zero_info(f"Tokenizing {self._corpus} into {folder}")
        keep_tokenizer(folder / "tokenizer", self._make_tokenizer)
        tokenizer = load_tokenizer(folder / "tokenizer", self._tokenizer_source)
        self._cached("train", tokenizer)
        if self._validation_setting is not None:
            self._cached("validation", tokenizer)

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._predicts:  # the checkpoint, which is loaded later, may have the tokenizer
            self._require_prompt()
            return
        self._take_tokenizer()
        self.train_data = self._usable("train", self._cached("train"))
        self._check_enough_to_train(self._corpus, stage)
        if self._validation_setting is not None:
            self.validation_data = self._usable("validation", self._cached("validation"))

    def _usable(self, split: Split, rows: "datasets.Dataset") -> Any:
        """The rows that batches are made of."""
        return rows

    def _cached(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> "datasets.Dataset":
        """The rows in the cache; with a tokenizer they are made first if they are not there."""
        import datasets
        from datasets.exceptions import DatasetGenerationError

        folder = self.cache_folder

        def generate() -> Iterator[dict[str, Any]]:
            if tokenizer is None:
                raise RuntimeError(f"{folder} is not complete: {_UNPREPARED}")
            row = None
            for row in self._rows(self._items(split), tokenizer):
                yield row
            if row is None:
                setting = self._validation_setting if split == "validation" else None
                reason = "" if setting is None else f": data.{setting}={shown(getattr(self, setting))}"
                raise ValueError(f"{self._corpus} has no {split} {self._rows_name}, and one is needed{reason}.")

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
            raise RuntimeError(f"{folder} cannot be used ({error}): remove it, and it is made again.") from error
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
        """Takes the tokenizer of a checkpoint, to predict or before ``setup``; else compares it with this one.

        Raises:
            ValueError: If it is not the tokenizer of this data module.
        """
        if not isinstance(state_dict, dict):
            raise wrong_type("state_dict", "a dict, as state_dict() returns", state_dict)
        if not state_dict:
            return
        self._loaded = tokenizer_from_content(state_dict.get("tokenizer"), "the checkpoint's tokenizer")
        self._loaded_source = state_dict.get("source")
        if self.text_tokenizer is not None and not self._predicts:
            self._compare_with_loaded(self.text_tokenizer)
            return
        if self.tokenizer is not None:
            self._compare_with_loaded(load_tokenizer(self.tokenizer))
        self.text_tokenizer, self._tokenizer_state = self._loaded, state_dict

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """``prompt`` as one row, encoded by the checkpoint's tokenizer.

        Without a checkpoint, and with one that holds no tokenizer, by that of ``tokenizer`` or the corpus.

        Raises:
            ValueError: If there is no prompt, or it has no tokens.
        """
        prompt = self._require_prompt()
        if self._predicts and self.text_tokenizer is None:
            keep_tokenizer(self.cache_folder / "tokenizer", self._make_tokenizer)
            self._take_tokenizer()
        if self.trainer is not None and self.trainer.ckpt_path and self._loaded is None:
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

    def _take_tokenizer(self) -> None:
        """Loads the tokenizer of the cache, and keeps what checkpoints hold of it."""
        folder = self.cache_folder / "tokenizer"
        if not folder.is_dir():
            raise RuntimeError(f"{folder} does not exist: {_UNPREPARED}")
        tokenizer = load_tokenizer(folder, self._tokenizer_source)
        self._compare_with_loaded(tokenizer)
        self.text_tokenizer = tokenizer
        content = {file.name: file.read_bytes() for file in tokenizer_files(folder)}
        self._tokenizer_state = {"tokenizer": content, "source": self._tokenizer_source}

    @property
    def _tokenizer_source(self) -> str:
        if self.tokenizer is not None:
            return f"data.tokenizer={str(self.tokenizer)!r}"
        return f"a tokenizer trained on {self._corpus}"

    def _compare_with_loaded(self, own: PreTrainedTokenizerBase) -> None:
        if self._loaded is not None and not same_tokenizer(own, self._loaded):
            raise ValueError(
                f"{self._tokenizer_source} ({len(own)} tokens) is not the checkpoint's tokenizer, {self._loaded_source}"
                f" ({len(self._loaded)} tokens): give the data settings that the model was trained with, or as"
                " data.tokenizer the folder to which the checkpoint was exported."
            )


def default_cache_dir() -> Path:
    """The folder ``lightning-liger`` in ``$XDG_CACHE_HOME``, or in ``~/.cache`` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning-liger")


def _check_cache_dir(cache_dir: Any) -> None:
    check_path("data.cache_dir", cache_dir, optional=True)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise wrong_value("data.cache_dir", f"a folder, and {str(file)!r} is a file", str(folder))


def num_held_out(total: int, fraction: float) -> int:
    """How many of ``total`` are held out: at least one unless ``fraction`` is 0, and never all."""
    return min(max(1, round(total * fraction)), total - 1) if fraction and total else 0


def held_out_places(total: int, fraction: float, seed: int) -> set[int]:
    """Which of ``total`` are held out."""
    return set(random.Random(seed).sample(range(total), num_held_out(total, fraction)))


def held_out(rows: Dataset[Any], fraction: float, seed: int) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """The rows for training, and those for validation in their order, None if there are none."""
    places = held_out_places(total := len(rows), fraction, seed)  # type: ignore[arg-type]  # it has a length
    train = Subset(rows, [place for place in range(total) if place not in places])
    return train, Subset(rows, sorted(places)) if places else None
