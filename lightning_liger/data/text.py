"""Text as rows of tokens: documents, each followed by an end-of-text token, end to end, cut into equal blocks."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from liger_ops.arguments import check_bool, check_choice, check_integer, check_text
from lightning_liger.data.module import Split, TokenizedDataModule, num_held_out
from lightning_liger.data.sources import TEXT_SUFFIXES, files_at, python_library_files, read_documents
from lightning_liger.data.tables import DataPath
from lightning_liger.data.tokenizer import packed_documents, token_blocks


@dataclass(frozen=True)
class _Blocks:
    """Makes batches of rows of equally many tokens, in which ``last_token``, if it is given, ends each document."""

    last_token: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        input_ids = torch.from_numpy(np.stack([row["input_ids"] for row in rows]).astype(np.int64))
        batch = {"input_ids": input_ids, "labels": input_ids.clone()}
        if self.last_token is not None:
            places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            begins = F.pad(input_ids[:, :-1] == self.last_token, (1, 0))
            batch["position_ids"] = places - torch.where(begins, places, 0).cummax(dim=1).values
        return batch


class TextDataModule(TokenizedDataModule):
    """Text files as batches for a causal language model, tokenized once and then read from a cache.

    Batches are ``{"input_ids": [batch_size, block_size], "labels": [batch_size, block_size]}`` in int64, with labels
    equal to the inputs (the model's loss shifts them) and no padding. Rows are documents, each with the end-of-sequence
    token, end to end. Validation holds out documents, or the end of the text if there is only one document. Checkpoints
    hold the tokenizer: ``predict`` continues prompts with it and reads no corpus, all else that loads a checkpoint must
    have the same one. Other arguments and errors are those of :class:`~lightning_liger.data.module.TokenizedDataModule`
    and :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        path: A text file (one document), a .jsonl, .parquet or .csv file (one document per record) or a folder with
            such files (.txt, .md, .rst, .py, .jsonl, .parquet; hidden ones are skipped); ``owner/name`` of a data set
            on the Hub; a ``datasets.Dataset`` or a list of records. By default the sources of Python's standard
            library.
        block_size: Tokens per row.
        text_field: The key of the text in records.
        separate_documents: Whether batches also have ``position_ids``, ``[batch_size, block_size]`` in int64, that
            restart in each document: then attention does not cross documents, and last tokens predict nothing.
        packing_strategy: "wrapped" cuts documents where rows end. "bfd_split" packs them, separated, by best-fit
            decreasing, and cuts those longer than a row only; end-of-sequence tokens, unlearned, fill rows up.
        max_documents: The maximum number of documents to read from ``path``. By default all.
    """

    _settings_of_tokens = (
        *TokenizedDataModule._settings_of_tokens,
        "text_field",
        "block_size",
        "max_documents",
        "packing_strategy",
    )

    def __init__(
        self,
        *,
        path: DataPath | None = None,
        block_size: int = 1024,
        text_field: str = "text",
        separate_documents: bool = False,
        packing_strategy: Literal["wrapped", "bfd_split"] = "wrapped",
        max_documents: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(path=path, **settings)
        check_integer("data.block_size", block_size, at_least=2)  # a token and the next one
        check_text("data.text_field", text_field)
        check_bool("data.separate_documents", separate_documents)
        check_choice("data.packing_strategy", packing_strategy, ("wrapped", "bfd_split"))
        check_integer("data.max_documents", max_documents, at_least=1, at_most=sys.maxsize, optional=True)
        self.block_size, self.text_field = block_size, text_field
        self.separate_documents = separate_documents or packing_strategy == "bfd_split"
        self.max_documents, self.packing_strategy = max_documents, packing_strategy
        self._rows_name = f"rows of data.block_size={block_size} tokens"

    @override
    def _corpus(self, split: Split = "train") -> str:
        is_library = self._place(split)[1] is None
        return "the source code of Python's standard library" if is_library else super()._corpus(split)

    @override
    def _files(self, split: Split) -> list[Path]:
        setting, path = self._place(split)
        if path is None:
            return python_library_files()
        return files_at(setting, path, TEXT_SUFFIXES, other_files=True, or_on_hub=True)

    @override
    def _read(self, split: Split) -> Iterator[str]:
        if (table := self._table(split)) is None:
            documents = read_documents(self._place(split)[0], self._files(split), self.text_field)
        else:
            documents = filter(str.strip, (record.text(self.text_field) for record in table.records()))
        return islice(documents, self.max_documents if split == "train" else None)

    @override
    def _items(self, split: Split) -> Iterable[str]:
        match list(islice(self._read("train"), 2)):
            case []:
                raise ValueError(f"{self._corpus()} holds no text: every document in it is empty.")
            case [document] if self.validation_path is None:
                cut = len(document) - num_held_out(len(document), self.validation_fraction)
                return [document[:cut] if split == "train" else document[cut:]]
        return super()._items(split)

    @override
    def _rows(self, items: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
        rows = token_blocks if self.packing_strategy == "wrapped" else packed_documents
        return rows(items, tokenizer, self.block_size)

    @override
    def _collator(self, split: Split) -> _Blocks:
        return _Blocks(self._after_setup(self.text_tokenizer).eos_token_id if self.separate_documents else None)
