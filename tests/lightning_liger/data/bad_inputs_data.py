"""Wrong arguments, text, tokenizers, caches and checkpoints of the data module."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_ops.arguments import shown
from lightning_liger.data import TextDataModule
from lightning_liger.data.sources import read_documents, source_files
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_files, tokenizer_from_content, train_bpe_tokenizer
from tests.bad_inputs import BadInput

TEXT = __file__
"""A path that is right, for rows about other arguments."""


def construct(argument: str, value: Any) -> Callable[[], Any]:
    return lambda: TextDataModule(**{"path": TEXT, argument: value})


INTEGERS = {
    "vocab_size": ([256, -1, 2**40], "an integer of at least 257"),
    "block_size": ([1, 0, -8, math.inf], "an integer of at least 2"),
    "batch_size": ([0, -2], "an integer of at least 1"),
    "seed": ([-1, 2**64], "an integer of at least 0"),
    "num_workers": ([-1], "an integer of at least 0"),
    "max_documents": ([0, -5, 2**70], "an integer of at least 1"),
}
OTHERS: dict[str, tuple[list[Any], str]] = {
    "validation_fraction": (
        [1, 1.5, -0.1, math.nan, math.inf, "0.1", None, True, [0.1]],
        "a finite number of at least 0",
    ),
    "text_field": (["", None, 5, ["text"]], "a string that is not empty"),
    "separate_documents": (["no", 0, None], "True or False"),
    "path": (["", 5, [TEXT], True], "a path or None"),
    "tokenizer": (["", 5, [TEXT], True], "a path"),
    "cache_dir": (["", 5, [TEXT], TEXT, f"{TEXT}/below"], "must be a"),
    "prompt": ([5, ["text"], True], "must be"),
}

tables = {
    **{name: ([*values, 8.5, "8", True, [8]], expected) for name, (values, expected) in INTEGERS.items()},
    **OTHERS,
}
arguments = [
    BadInput(
        f"TextDataModule-{argument}-{index}", construct(argument, value), (f"data.{argument}", shown(value), expected)
    )
    for argument, (values, expected) in tables.items()
    for index, value in enumerate(values)
]

paths = [
    BadInput(f"{name}-path-{kind}", lambda call=call, value=value: call(value), (mentioned, value[:20], expected))
    for name, call, mentioned in (
        ("source_files", source_files, "data.path"),
        ("read_documents", read_documents, "data.path"),
        ("tokenizer_files", tokenizer_files, "data.tokenizer"),
    )
    for kind, value, expected in (
        ("absent", "/no/such/place", "a"),
        ("too long", "x" * 5000, "can be read"),
        ("unknown home", "~no-such-user/text", "can be read"),
    )
]
paths = [row._replace(error=(ValueError, FileNotFoundError)) for row in paths]

TOKENIZER = train_bpe_tokenizer(["a"], 257)
objects = [
    BadInput("path-records", construct("path", [{"text": "a"}]), ("data.path", "{'text': 'a'}", "to a .jsonl file")),
    BadInput(
        "tokenizer-object", construct("tokenizer", TOKENIZER), ("data.tokenizer", "vocab_size=257", "save_pretrained")
    ),
]


def reads(content: bytes, name: str = "a.jsonl") -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        list(read_documents(tmp_path / name))

    return call


files = [
    BadInput(f"read_documents-file-{kind}", reads(*content), mentions)
    for kind, content, mentions in (
        ("nested too deeply", (b"[" * 200_000,), ("data.path", "a.jsonl, line 1", "not JSON")),
        ("no JSON", (b'{"text": "a"}\n{text',), ("data.path", "a.jsonl, line 2", "not JSON")),
        ("a list", (b"[1]",), ("line 1", "JSON list", "an object")),
        ("a number", (b"NaN",), ("line 1", "JSON float", "an object")),
        ("no such key", (b'{"body": "a"}',), ("line 1", "'text'", "is missing", "['body']")),
        ("a key that is no string", (b'{"text": ["a"]}',), ("line 1", "'text'", "must be a string")),
        ("Latin-1", ("é".encode("latin-1"), "a.txt"), ("a.txt", "not UTF-8")),
        ("an image", (b"\x89PNG\r\n\x1a\n\x00", "a.txt"), ("a.txt", "not UTF-8")),
        ("UTF-16", ("text".encode("utf-16-le"), "a.txt"), ("a.txt", "not UTF-8", "null character")),
    )
]


def loads(**contents: str) -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(content, encoding="utf-8")
        load_tokenizer(tmp_path)

    return call


def tokenizer(vocab_size: int) -> dict[str, bytes]:
    made = train_bpe_tokenizer(["a text, a text"], vocab_size)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": made.eos_token}
    return {
        "tokenizer.json": made.backend_tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def restores(state: Any) -> Callable[[], Any]:
    return lambda: TextDataModule(path=TEXT).load_state_dict(state)


def restores_another(tmp_path: Path) -> None:
    for name, content in tokenizer(258).items():
        (tmp_path / name).write_bytes(content)
    state = {"tokenizer": tokenizer(262), "source": "a tokenizer trained on data.path='before.txt'"}
    TextDataModule(path=TEXT, tokenizer=tmp_path).load_state_dict(state)


def predicts(prompt: str | None) -> Callable[[], Any]:
    def call() -> None:
        data = TextDataModule(path=TEXT, prompt=prompt)
        data.load_state_dict({"tokenizer": tokenizer(258), "source": "a test"})
        data.predict_dataloader()

    return call


tokenizers = [
    BadInput("load_tokenizer-file-no JSON", loads(tokenizer="{"), ("data.tokenizer", "could not be loaded")),
    BadInput("load_tokenizer-file-no model", loads(tokenizer="{}"), ("data.tokenizer", "could not be loaded")),
    BadInput("load_tokenizer-file-nested", loads(tokenizer="[" * 9999), ("data.tokenizer", "could not be loaded")),
    *(
        BadInput(
            f"train_bpe_tokenizer-vocab_size-{value!r}",
            lambda value=value: train_bpe_tokenizer(["text"], value),
            ("vocab_size", repr(value), "an integer of at least 257"),
        )
        for value in (0, 256, -1, 2**31, 300.5, "300", None, True)
    ),
    *(
        BadInput(
            f"tokenizer_from_content-{kind}",
            lambda content=content: tokenizer_from_content(content, "the checkpoint's tokenizer"),
            ("the checkpoint's tokenizer", expected),
        )
        for kind, content, expected in (
            ("none", None, "file names"),
            ("path", "/folder", "file names"),
            ("name in another folder", {"../tokenizer.json": b"{}"}, "file names"),
            ("absolute name", {"/tmp/tokenizer.json": b"{}"}, "file names"),
            ("name of the folder above", {"..": b"{}"}, "file names"),
            ("empty name", {"": b"{}"}, "file names"),
            ("no bytes", {"tokenizer.json": {}}, "file names"),
            ("no tokenizer", {"tokenizer.json": b"{}"}, "could not be loaded"),
        )
    ),
    BadInput(
        "load_state_dict-no tokenizer", restores({"step": 1}), ("the checkpoint's tokenizer", "None", "file names")
    ),
    BadInput("load_state_dict-a list", restores([1]), ("state_dict", "[1]", "a dict")),
    BadInput(
        "load_state_dict-another tokenizer",
        restores_another,
        ("data.tokenizer=", "258 tokens", "data.path='before.txt'", "262 tokens", "is not the checkpoint's tokenizer"),
    ),
    BadInput(
        "predict_dataloader-prompt-none", predicts(None), ("data.prompt", "None", "the text that predict continues")
    ),
    BadInput("predict_dataloader-prompt-empty", predicts(""), ("data.prompt", "''", "the text that predict continues")),
]


def needs(mentions: tuple[str, ...], **settings: Any) -> BadInput:
    def call(tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a text " * 400, encoding="utf-8")
        settings_of_row = {"path": tmp_path / "a.txt", "cache_dir": tmp_path / "cache", "vocab_size": 260} | settings
        data = TextDataModule(**settings_of_row)
        data.prepare_data()
        data.setup("fit")

    return BadInput(f"setup-{'-'.join(settings)}-too large for the text", call, mentions)


def sets_up_without_preparing(tmp_path: Path) -> None:
    TextDataModule(path=TEXT, cache_dir=tmp_path).setup("fit")


rows = [
    needs(("train rows", "data.block_size=9000"), block_size=9000),
    needs(("train rows", "data.batch_size=9000"), batch_size=9000, block_size=2),
    needs(
        ("validation rows", "data.validation_fraction=0.0001"),
        validation_fraction=0.0001,
        batch_size=1,
        block_size=64,
    ),
    BadInput(
        "setup-before prepare_data",
        sets_up_without_preparing,
        ("does not exist", "prepare_data"),
        RuntimeError,
    ),
]

BAD_INPUTS = [*arguments, *paths, *objects, *files, *tokenizers, *rows]
