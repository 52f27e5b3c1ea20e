"""Data modules on small files, set up as by a Trainer, and what their batches hold."""

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_liger.data import PreferenceDataModule, TextDataModule

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
TOKENIZER, TEMPLATE = EXAMPLES / "tokenizer", EXAMPLES / "chat_template.jinja"
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
END = "<|endoftext|>"


def write_lines(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_corpus(folder: Path) -> Path:
    """A file of 100 documents, each with another first word."""
    generator = random.Random(0)
    texts = [f"document{index} " + " ".join(generator.choices(WORDS, k=60)) for index in range(100)]
    return write_lines(folder / "corpus.jsonl", [{"text": text} for text in texts])


def build(folder: Path, cls: Any = PreferenceDataModule, path: Any = None, **settings: Any) -> Any:
    """A data module with its cache in ``folder``; ``path`` may be the name of a shipped file, or records."""
    if isinstance(path, list):
        path = write_lines(folder / f"{len(list(folder.iterdir()))}.jsonl", path)
    defaults: dict[str, Any] = {"cache_dir": folder / "cache", "batch_size": 4}
    if cls is TextDataModule:
        defaults |= {"path": path or write_corpus(folder), "vocab_size": 400, "block_size": 16}
    else:
        defaults |= {"path": EXAMPLES / (path or "preference.jsonl"), "tokenizer": TOKENIZER}
    return cls(**defaults | settings)


def ready(data: Any, num_replicas: int = 1, rank: int = 0, stage: str = "fit") -> Any:
    """Prepared and set up as by a Trainer on this rank."""
    sampler_kwargs = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler_kwargs, predicting=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.prepare_data()
        data.setup(stage)
    return data


def rows(batches: Any) -> list[tuple[int, ...]]:
    """The tokens of each sequence of padded batches, without padding."""
    found = []
    for batch in batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        found += [tuple(row[mask > 0].tolist()) for row, mask in zip(batch["input_ids"], masks, strict=True)]
    return found


def all_rows(data: Any, split: str = "train") -> list[tuple[int, ...]]:
    """Those of all examples of a split in the order of the data."""
    return rows(DataLoader(getattr(data, f"{split}_data"), collate_fn=data._collator("train")))


def only_batch(data: Any) -> dict[str, Any]:
    (batch,) = data.train_dataloader()
    return batch
