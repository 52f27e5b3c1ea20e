"""Wrong files, records, tokenizers and stored teachers of the data modules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_liger.data import (
    ConversationDataModule,
    ImageTextDataModule,
    Layout,
    PackedStream,
    PreferenceDataModule,
    PromptCompletionDataModule,
    RolloutDataModule,
    SupervisedCollator,
    TeacherTopKDataModule,
    TextDataModule,
    UnpairedFeedbackDataModule,
    write_teacher_topk,
)
from lightning_liger.data.records import read_records
from lightning_liger.data.sources import read_documents
from lightning_liger.data.tokenizer import load_tokenizer, tokenizer_from_content, train_bpe_tokenizer
from tests.bad_inputs import row
from tests.valid_calls import EXAMPLES, IMAGES, PAIRS, PLAIN_IMAGES, TEACHER, TEACHER_ROW

FREE = SupervisedCollator(Layout(max_length=8, padding_free=True))
NOT_PACKING = SupervisedCollator(Layout(max_length=8)), SupervisedCollator(Layout(padding_free=True))
TEXT, SOME = __file__, (TypeError, ValueError, FileNotFoundError)
TEACHERS = TeacherTopKDataModule
IMAGE = {"image": str(IMAGES / "00.ppm"), "prompt": "a", "completion": "b"}
OK = {"prompt": "a", "chosen": "b", "rejected": "c"}
ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
MIXED = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]}
TALK = {"messages": [ASK, ANSWER]}
GROUP = {"prompt": "a", "completions": ["b", "c"], "rewards": [0, 1]}
TOKENS = {"prompt_ids": [1], "completion_ids": [[1], [2, 3]], "rewards": [0, 1]}


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def prepares(cls: Any, good: Any, bad: Any) -> Callable[[Path], Any]:
    """Two good records and a wrong one in line 3."""

    def call(tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, (good, good, bad))), encoding="utf-8")
        if cls is ImageTextDataModule:
            return cls(path=tmp_path, processor=PLAIN_IMAGES, batch_size=1).setup()
        settings = {"validation_fraction": 0, "cache_dir": tmp_path / "cache", "tokenizer": EXAMPLES / "tokenizer"}
        template = None if bad.get("no_template") else EXAMPLES / "chat_template.jinja"
        return cls(path=tmp_path / "a.jsonl", chat_template=template, **settings).prepare_data()

    return call


def reads(content: str | bytes, name: str = "a.jsonl") -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        if name.endswith(".txt") or b"text" in file.read_bytes():
            list(read_documents("data.path", [file]))
        list(read_records("data.path", [file]))

    return call


def tokenizer(vocab_size: int) -> dict[str, bytes]:
    made = train_bpe_tokenizer(["a text, a text"], vocab_size)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": made.eos_token}
    content = {"tokenizer.json": made.backend_tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}
    return {name: text.encode() for name, text in content.items()}


def loads(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    load_tokenizer(tmp_path)


def predicts(prompt: str | None) -> None:
    data = TextDataModule(path=TEXT, prompt=prompt)
    data.load_state_dict({"tokenizer": tokenizer(258), "source": "a test"})
    data.predict_dataloader()


def writes(rows: Any, name: str, tmp_path: Path) -> None:
    try:
        write_teacher_topk(tmp_path / name, rows)
    finally:
        assert not list(tmp_path.iterdir())


# Classes, their arguments, and what messages say.
MODULES: list[tuple[Any, ...]] = [
    *((TextDataModule, {"path": path}, "data.path", path[:9]) for path in ("/no/such.jsonl", "x" * 5000, "~no-such/a")),
    (PreferenceDataModule, {"path": TEXT}, "data.path", "a folder with files that end in .jsonl, .json, .parquet"),
    (PreferenceDataModule, {"path": EXAMPLES.parents[1] / "kernels"}, "data.path", "is a folder without such files"),
    (PreferenceDataModule, {"validation_path": "/no/such.jsonl"}, "data.validation_path", "/no/such.jsonl"),
    (PreferenceDataModule, {"tokenizer": "/no/such"}, "data.tokenizer", "/no/such"),
    (PreferenceDataModule, {"chat_template": str(EXAMPLES)}, "data.chat_template", str(EXAMPLES)),
    (PreferenceDataModule, {"chat_template_kwargs": {"a": {1, 2}}}, "data.chat_template_kwargs", "{1, 2}"),
    (PreferenceDataModule, {"packing": True, "packing_strategy": "bfd", "max_length": None}, "data.max_length", "None"),
    (PreferenceDataModule, {"columns": {"promt": "question"}}, "data.columns", "promt"),
    (TEACHERS, {"path": str(PAIRS)}, "data.path", ".safetensors"),
    (ImageTextDataModule, {"path": IMAGES, "processor": {"size": 8}}, "data.processor", "image_size", "size"),
    (ImageTextDataModule, {"path": IMAGES, "processor": PLAIN_IMAGES | {"image_size": 0}}, "image_size", "at least 1"),
]
FILES: list[tuple[Any, ...]] = [
    (reads('{"a": 1}\n\n{"a": '), "a.jsonl, line 3", "cannot be read"),
    (reads("[" * 200_000), "a.jsonl, line 1", "cannot be read"),
    (reads(b'{"a": 1}\n{"a": "\xe9"}'), "a.jsonl, line 2", "cannot be read", "utf-8"),
    (reads(b"\x89PNG\r\n\x1a\n\x00"), "a.jsonl", "cannot be read"),
    (reads('[{"a": 1},\n 5]', "a.json"), "a.json, record 2", "expected an object, got a JSON int"),
    (reads('[{"a": 1},\n{"a": 2}\n', "a.json"), "a.json", "cannot be read", "line 3"),
    (reads("no table", "a.parquet"), "a.parquet", "cannot be read"),
    (reads(b'{"text": ["a"]}'), "line 1", "'text'", "must be a string"),
    (reads("é".encode("latin-1"), "a.txt"), "a.txt", "not UTF-8"),
    (reads("text".encode("utf-16-le"), "a.txt"), "a.txt", "not UTF-8", "null character"),
]
RECORDS: dict[Any, tuple[Any, list[tuple[Any, tuple[str, ...]]]]] = {
    PreferenceDataModule: (
        OK,
        [
            (without(OK, "rejected"), ("'rejected' is missing", "['chosen', 'prompt']")),
            (OK | {"chosen": None}, ("'chosen' is null",)),
            (OK | {"chosen": []}, ("'chosen'", "a list of messages that is not empty", "[]")),
            (OK | {"prompt": ["a"]}, ("'prompt[0]'", "a message, an object", "'a'")),
            (MIXED | {"chosen": [{"content": "a"}]}, ("'chosen[0].role'", "a string", "None")),
            (MIXED | {"chosen": [{"role": "assistant"}]}, ("'chosen[0].content'", "a string", "None")),
            (MIXED | {"chosen": [ANSWER | {"content": [{"type": "image"}]}]}, ("'chosen[0].content'", "text")),
            (OK | {"chosen": [ANSWER]}, ("'chosen' and 'rejected' must be either both strings",)),
            (MIXED | {"chosen": "a", "rejected": "b"}, ("prompt and completions must be either all strings",)),
            (MIXED | {"prompt": "another"}, ("'prompt' is a string, and no message of 'chosen'",)),
            (without(MIXED, "prompt"), ("'chosen' and 'rejected' must begin with the same messages",)),
            (MIXED | {"tools": "[{"}, ("'tools'", "text that is not JSON")),
            (MIXED | {"tools": {"a": 1}}, ("'tools'", "a list of JSON schemas", "{'a': 1}")),
            (MIXED | {"chat_template_kwargs": {"tools": 1}}, ("the chat template failed", "tools")),
            (MIXED | {"no_template": True}, ("messages need a chat template", "data.chat_template")),
            (OK | {"ref_chosen_logps": 1}, ("'ref_rejected_logps' is missing",)),
            (OK | {"ref_chosen_logps": True, "ref_rejected_logps": 1}, ("'ref_chosen_logps'", "a finite number")),
            (OK | {"ref_chosen_logps": math.nan, "ref_rejected_logps": 1}, ("'ref_chosen_logps'", "a finite number")),
            (without(OK, "prompt") | {"reference": "d"}, ("'prompt' is missing",)),
        ],
    ),
    UnpairedFeedbackDataModule: (
        {"prompt": "a", "completion": "b", "label": True},
        [({"prompt": "a", "completion": "b", "label": 1}, ("'label' must be true or false", "got 1"))],
    ),
    PromptCompletionDataModule: (
        {"prompt": "a", "completion": "b"},
        [
            ({"prompt": "", "completion": ""}, ("no token to train on",)),
            ({"instruction": "a"}, ("'output' is missing",)),
            ({"instruction": "a", "input": 5, "output": "b"}, ("'input' must be a string", "5")),
        ],
    ),
    ConversationDataModule: (
        TALK,
        [
            ({"messages": "a"}, ("'messages'", "a list", "'a'")),
            ({"messages": [ASK]}, ("no message with the role 'assistant'",)),
            ({"conversations": [{"value": "a"}]}, ("'conversations'", "'from' and 'value'")),
            ({"conversations": [{"from": "gpt", "value": 5}]}, ("'messages[0].content'", "a string", "5")),
        ],
    ),
    RolloutDataModule: (
        GROUP,
        [
            (without(GROUP, "rewards"), ("'rewards' is missing",)),
            (GROUP | {"rewards": [1, None]}, ("'rewards'", "2 finite numbers", "None")),
            (GROUP | {"rewards": [1]}, ("'rewards'", "2 finite numbers", "[1]")),
            (GROUP | {"completions": ["b", 5]}, ("'completions[1]'", "a list of messages", "5")),
            (GROUP | {"advantages": [[1], [2, 3]]}, ("'advantages[0]'", "finite numbers", "[1]")),
            (TOKENS | {"advantages": [[1]]}, ("'advantages'", "a list for each of 2 completions", "1")),
            (TOKENS | {"completion_ids": [[1], []]}, ("no token to train on",)),
            (TOKENS | {"completion_ids": [[1], [2.5]]}, ("'completion_ids'", "a list of token ids", "[2.5]")),
            (TOKENS | {"completion_ids": [[1], [-1]]}, ("'completion_ids'", "a list of token ids", "[-1]")),
            (TOKENS | {"old_per_token_logps": [[0], [1]]}, ("'old_per_token_logps[1]'", "2 finite numbers", "[1]")),
            (TOKENS | {"tool_mask": [[1], [0, 2]]}, ("'tool_mask'", "0 and 1", "2.0")),
        ],
    ),
    ImageTextDataModule: (
        IMAGE,
        [(IMAGE | {"image": None}, ("'image'", "None")), (IMAGE | {"image": "no.ppm"}, ("no.ppm", "does not exist"))],
    ),
}
STATES = (None, {"../tokenizer.json": b"{}"}, {"/tmp/tokenizer.json": b"{}"}, {"": b"{}"}, {"tokenizer.json": {}})
TOKENIZERS: list[tuple[Any, ...]] = [
    *((partial(loads, content), "data.tokenizer", "could not be loaded") for content in ("{", "{}", "[" * 9999)),
    *((partial(tokenizer_from_content, content, "a checkpoint"), "a checkpoint", "file names") for content in STATES),
    (partial(train_bpe_tokenizer, ["text"], 256), "vocab_size", "256", "an integer of at least 257"),
    (lambda: TextDataModule(path=TEXT).load_state_dict([1]), "state_dict", "[1]", "a dict"),
    (partial(predicts, ""), "data.prompt", "''", "the text that predict continues"),
]
# Changes of a row of a stored teacher, and what messages say.
TEACHER_ROWS: list[tuple[Any, ...]] = [
    ({"input_ids": None}, "must have 'input_ids'", "the keys"),
    ({"input_ids": []}, "input_ids", "an array of integers", "[]"),
    ({"input_ids": [1.5, 2]}, "input_ids", "an array of integers", "1.5"),
    ({"input_ids": [1, -1]}, "input_ids", "at least 0", "-1"),
    ({"input_ids": [1, 2**31]}, "input_ids", "at least 0", "2147483648"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, "teacher_topk_ids", "[L, K]", "[3, 2]", "[2, 2]"),
    ({"input_ids": [[1], [2, 3]]}, "input_ids", "an array", "[[1], [2, 3]]"),
    ({"labels": [1]}, "labels", "[L]", "[1]"),
    ({"labels": [-5, 1]}, "labels", "-100", "-5"),
    ({"teacher_topk_ids": [[1], [2]], "teacher_topk_log_probs": [[-1.0], [-1.0]]}, "topk_ids", "[L, K]", "[2, 1]"),
    ({"teacher_topk_ids": [[1, 1], [2, 3]]}, "teacher_topk_ids", "different ids", "[1, 1]"),
    ({"teacher_topk_log_probs": [[1, 2], [3, 4]]}, "log_probs", "floating-point", "[[1, 2]"),
    ({"teacher_topk_log_probs": [[-1.0]] * 2}, "log_probs", "[L, K]", "[2, 1]"),
    ({"teacher_topk_log_probs": [[-1.0, math.nan]] * 2}, "log_probs", "at most 1", "nan"),
    ({"teacher_topk_log_probs": [[0.5, 2.0]] * 2}, "log_probs", "at most 1", "9.0"),
]

BAD_INPUTS = [
    *(
        row(partial(cls, **{"path": TEACHER if cls is TEACHERS else PAIRS, **each}), *mentions, error=SOME)
        for cls, each, *mentions in MODULES
    ),
    *(row(call, "data.path", *mentions) for call, *mentions in FILES),
    *(
        row(prepares(cls, good, bad), "a.jsonl, line 3", *mentions, error=SOME)
        for cls, (good, rows) in RECORDS.items()
        for bad, mentions in rows
    ),
    *(row(call, *mentions, error=SOME) for call, *mentions in TOKENIZERS),
    *(
        row(partial(writes, [TEACHER_ROW, TEACHER_ROW | each], "a.safetensors"), "rows[1]", *mentions)
        for each, *mentions in TEACHER_ROWS
    ),
    *(row(partial(PackedStream, examples, FREE), "examples", "iterated over again") for examples in (iter([]), 5)),
    *(row(partial(PackedStream, [], collator), "collator", "max_length") for collator in (5, *NOT_PACKING)),
    row(partial(PackedStream, [], FREE, num_replicas=2, rank=2), "rank", "at most 1", "2"),
    row(partial(writes, [[1]], "a.safetensors"), "rows[0]", "a mapping", "[1]"),
    row(partial(writes, [], "a.safetensors"), "rows", "at least one row", "[]"),
    row(partial(writes, [TEACHER_ROW], "a.bin"), "path", "ends in .safetensors", "a.bin"),
    row(partial(writes, [TEACHER_ROW], "none/a.safetensors"), "path", "does not exist", error=FileNotFoundError),
]
