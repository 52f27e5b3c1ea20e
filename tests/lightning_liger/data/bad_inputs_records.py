"""Wrong arguments, records, chat templates and stored teachers of the data modules of post-training."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from liger_ops.arguments import shown
from lightning_liger.data import (
    ConversationDataModule,
    Layout,
    PreferenceDataModule,
    PromptCompletionDataModule,
    RolloutDataModule,
    TeacherTopKDataModule,
    UnpairedFeedbackDataModule,
    write_teacher_topk,
)
from lightning_liger.data.records import read_records
from lightning_liger.data.sources import record_files
from tests.bad_inputs import BadInput

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
PAIRS = str(EXAMPLES / "preference.jsonl")
TEACHER = str(EXAMPLES / "teacher_topk.safetensors")


def construct(cls: Any, argument: str, value: Any) -> Callable[[], Any]:
    path = TEACHER if cls is TeacherTopKDataModule else PAIRS
    return lambda: cls(**{"path": path, argument: value})


# Wrong values of each argument, and what the message must say; those of TextDataModule are in its own table.
SHARED: dict[str, tuple[list[Any], str]] = {
    "path": (["", 5, None, [PAIRS], "/no/such.jsonl", "x" * 5000, "~no-such-user/a"], ""),
    "validation_path": (["", 5, [PAIRS], "/no/such.jsonl"], ""),
    "validation_fraction": ([1, -0.1, math.nan, "0.1", None, True], "a finite number of at least 0"),
    "tokenizer": (["", 5, "/no/such"], "a"),
    "max_length": ([1, 0, -8, 8.5, "8", True, [8]], "an integer of at least 2 or None"),
    "truncation": (["keep_middle", None, 5, True, ["keep_start"]], "one of 'keep_start', 'keep_end'"),
    "packing": (["no", 0, None], "True or False"),
    "pad_to_multiple_of": ([0, -8, 8.5, "8", True, None], "an integer of at least 1"),
    "batch_size": ([0, -2, 1.5, "2", True], "an integer of at least 1"),
    "seed": ([-1, 2**64, 1.5, "1", True], "an integer of at least 0"),
    "num_workers": ([-1, 1.5, "1", True], "an integer of at least 0"),
}
OF_RECORDS: dict[str, tuple[list[Any], str]] = {
    "path": ([__file__, TEACHER], "a folder with files that end in .jsonl, .json, .parquet"),
    "vocab_size": ([256, 2**40, "300"], "an integer of at least 257"),
    "max_records": ([0, -5, 2**70, 8.5, "8", True], "an integer of at least 1"),
    "chat_template": (["", 5, [PAIRS], "/no/such.jinja", str(EXAMPLES), TEACHER, "{{ messages }}"], ""),
    "chat_template_kwargs": ([5, "a", [1], {1: 2}, {"a": {1, 2}}], "a dict with string keys"),
    "columns": ([5, "prompt", ["prompt"], {"prompt": 5}, {"prompt": ""}, {"promt": "question"}], "a dict of strings"),
    "prompt": ([5, ["text"], True], "must be"),
    "cache_dir": (["", 5, __file__], "must be a"),
}
OF_ONE: dict[Any, dict[str, tuple[list[Any], str]]] = {
    UnpairedFeedbackDataModule: {"with_kl": (["no", 1, None], "True or False")},
    PromptCompletionDataModule: {
        "completion_only": (["no", 1, None], "True or False"),
        "teacher_tokenizer": ([3, ""], "path"),
    },
    ConversationDataModule: {"train_on": (["user", None, 5, ["all"]], "one of 'assistant', 'last', 'all'")},
    RolloutDataModule: {"scale_rewards": (["batch", None, True], "one of 'group', 'none'")},
    TeacherTopKDataModule: {
        "path": ([__file__, PAIRS, "/tmp/no-such-folder"], ".safetensors"),
        "pad_token_id": ([-1, 1.5, "1", True], "an integer of at least 0"),
    },
}
tables = [
    *((PreferenceDataModule, table) for table in (SHARED, OF_RECORDS)),
    (TeacherTopKDataModule, SHARED),
    *OF_ONE.items(),
]
arguments = [
    BadInput(
        f"{cls.__name__}-{argument}-{number}-{index}",
        construct(cls, argument, value),
        (f"data.{argument}", (repr(value) if isinstance(value, str) else shown(value))[:20], expected),
        (TypeError, ValueError, FileNotFoundError),
    )
    for number, (cls, table) in enumerate(tables)
    for argument, (values, expected) in table.items()
    for index, value in enumerate(values)
]
layouts = [
    BadInput(f"Layout-{argument}-{value!r}", lambda a=argument, v=value: Layout(**{a: v}), (argument, shown(value)))
    for argument, values in {
        "pad_token_id": (-1, None, 1.5),
        "max_length": (1, "8"),
        "truncation": ("end", None),
        "pad_to_multiple_of": (0, None),
        "packing": (1, None),
    }.items()
    for value in values
]


def reads(content: str | bytes, name: str = "a.jsonl") -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        list(read_records("data.path", record_files("data.path", tmp_path / name)))

    return call


files = [
    BadInput(f"read_records-{kind}", reads(*content), ("data.path", *mentions))
    for kind, content, mentions in (
        ("no JSON", ('{"a": 1}\n{a: 1}',), ("a.jsonl, line 2", "not JSON")),
        ("cut off", ('{"a": 1}\n\n{"a": ',), ("a.jsonl, line 3", "not JSON")),
        ("a list", ('{"a": 1}\n[1]',), ("a.jsonl, line 2", "JSON list, expected an object")),
        ("a number", ("NaN",), ("a.jsonl, line 1", "JSON float, expected an object")),
        ("nested too deeply", ("[" * 200_000,), ("a.jsonl, line 1", "not JSON")),
        ("Latin-1", (b'{"a": "\xe9"}',), ("a.jsonl", "not UTF-8")),
        ("UTF-16", ('{"a": 1}'.encode("utf-16"),), ("a.jsonl", "not UTF-8")),
        ("null characters", (b'{"a": 1}\n\0\0',), ("a.jsonl, line 2", "not JSON")),
        ("an image", (b"\x89PNG\r\n\x1a\n\x00",), ("a.jsonl", "not UTF-8")),
        ("list of numbers", ('[{"a": 1},\n 5]', "a.json"), ("a.json, record 2", "JSON int, expected an object")),
        ("list without an end", ('[{"a": 1},\n{"a": 2}\n', "a.json"), ("a.json", "not JSON", "line 3")),
        ("text", ("hello", "a.json"), ("a.json, line 1", "not JSON")),
    )
]

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
        settings = {"validation_fraction": 0, "cache_dir": tmp_path / "cache", "tokenizer": EXAMPLES / "tokenizer"}
        template = None if bad.get("no_template") else EXAMPLES / "chat_template.jinja"
        cls(path=tmp_path / "a.jsonl", chat_template=template, **settings).prepare_data()

    return call


WRONG: dict[Any, tuple[Any, list[tuple[Any, tuple[str, ...]]]]] = {
    PreferenceDataModule: (
        OK,
        [
            ({}, ("'chosen' is missing", "[]")),
            (without(OK, "rejected"), ("'rejected' is missing", "['chosen', 'prompt']")),
            (OK | {"chosen": None}, ("'chosen' is null",)),
            (OK | {"chosen": 5}, ("'chosen'", "a string, or a list of messages", "got 5")),
            (OK | {"chosen": []}, ("'chosen'", "a list of messages that is not empty", "[]")),
            (OK | {"prompt": {"role": "user"}}, ("'prompt'", "a string, or a list of messages")),
            (OK | {"prompt": ["a"]}, ("'prompt[0]'", "a message, an object", "'a'")),
            (MIXED | {"chosen": [{"content": "a"}]}, ("'chosen[0]'", "a string 'role'")),
            (MIXED | {"chosen": [{"role": "assistant"}]}, ("'chosen[0]'", "a string 'content'")),
            (MIXED | {"chosen": [{"role": "assistant", "content": 5}]}, ("'chosen[0]'", "a string 'content'", "5")),
            (
                MIXED | {"chosen": [{"role": "assistant", "content": [{"type": "image"}]}]},
                ("'chosen[0]'", "'content' is text", "image"),
            ),
            (OK | {"chosen": [ANSWER]}, ("'chosen' and 'rejected' must be either both strings",)),
            (MIXED | {"chosen": "a", "rejected": "b"}, ("prompt and completions must be either all strings",)),
            (MIXED | {"prompt": "another"}, ("'prompt' is a string, and no message of 'chosen'",)),
            (without(MIXED, "prompt"), ("'chosen' and 'rejected' must begin with the same messages",)),
            (MIXED | {"tools": "[{"}, ("'tools'", "text that is not JSON")),
            (MIXED | {"tools": [5]}, ("'tools'", "a list of JSON schemas", "[5]")),
            (MIXED | {"chat_template_kwargs": [1]}, ("'chat_template_kwargs'", "an object", "[1]")),
            (MIXED | {"chat_template_kwargs": {"tools": 1}}, ("the chat template failed", "tools")),
            (MIXED | {"chosen": [{"role": "assistant", "tool_calls": [{}]}]}, ("the chat template failed",)),
            (MIXED | {"no_template": True}, ("messages need a chat template", "data.chat_template")),
            (OK | {"ref_chosen_logps": 1}, ("'ref_rejected_logps' is missing",)),
            (OK | {"ref_chosen_logps": True, "ref_rejected_logps": 1}, ("'ref_chosen_logps'", "a finite number")),
            (OK | {"ref_chosen_logps": math.nan, "ref_rejected_logps": 1}, ("'ref_chosen_logps'", "a finite number")),
            (OK | {"reference": 5}, ("'reference'", "a string, or a list of messages", "5")),
            (without(OK, "prompt") | {"reference": "d"}, ("'prompt' is missing",)),
            (OK | {"reference": "d"}, ("this one has the values of 'reference_ids'",)),
        ],
    ),
    UnpairedFeedbackDataModule: (
        {"prompt": "a", "completion": "b", "label": True},
        [
            ({"prompt": "a", "completion": "b"}, ("'label' is missing", "['completion', 'prompt']")),
            ({"prompt": "a", "completion": "b", "label": 1}, ("'label' must be true or false", "got 1")),
            ({"prompt": "a", "completion": "b", "label": "good"}, ("'label' must be true or false", "'good'")),
            ({"completion": "b", "label": True}, ("'prompt' is missing",)),
            ({"prompt": "a", "chosen": "b"}, ("'rejected' is missing",)),
        ],
    ),
    PromptCompletionDataModule: (
        {"prompt": "a", "completion": "b"},
        [
            ({"prompt": "a"}, ("'completion' is missing",)),
            ({"prompt": "", "completion": ""}, ("no token to learn",)),
            ({"instruction": "a"}, ("'output' is missing",)),
            ({"instruction": "a", "input": 5, "output": "b"}, ("'input' must be a string", "5")),
            ({"instruction": ["a"], "output": "b"}, ("'instruction' must be a string", "['a']")),
        ],
    ),
    ConversationDataModule: (
        TALK,
        [
            ({"text": "a"}, ("'messages' is missing", "['text']")),
            ({"messages": "a"}, ("'messages'", "a list of messages", "'a'")),
            ({"messages": [ASK]}, ("no message with the role 'assistant'",)),
            ({"conversations": []}, ("'conversations'", "a list that is not empty")),
            ({"conversations": [{"value": "a"}]}, ("'conversations[0]'", "'from' and 'value'")),
            ({"conversations": [{"from": "gpt", "value": 5}]}, ("'conversations[0]'", "a string 'content'", "5")),
        ],
    ),
    RolloutDataModule: (
        GROUP,
        [
            (without(GROUP, "rewards"), ("'rewards' is missing",)),
            (GROUP | {"rewards": [1]}, ("'rewards'", "2 finite numbers", "[1]")),
            (GROUP | {"rewards": [1, None]}, ("'rewards'", "2 finite numbers", "None")),
            (GROUP | {"completions": "b"}, ("'completions'", "a list that is not empty", "'b'")),
            (GROUP | {"completions": ["b", 5]}, ("'completions[1]'", "a list of messages", "5")),
            (GROUP | {"advantages": [[1], [2, 3]]}, ("'advantages[0]'", "finite numbers", "[1]")),
            (TOKENS | {"advantages": [[1]]}, ("'advantages'", "a list for each of 2 completions", "1")),
            (TOKENS | {"completion_ids": [[1], []]}, ("no token to learn",)),
            (TOKENS | {"completion_ids": [[1], [2.5]]}, ("'completion_ids'", "a list of token ids", "[2.5]")),
            (TOKENS | {"completion_ids": [[1], [-1]]}, ("'completion_ids'", "a list of token ids", "[-1]")),
            (TOKENS | {"prompt_ids": []}, ("'prompt_ids'", "a list that is not empty")),
            (TOKENS | {"old_per_token_logps": [[0], [1]]}, ("'old_per_token_logps[1]'", "2 finite numbers", "[1]")),
            (TOKENS | {"tool_mask": [[1], [0, 2]]}, ("'tool_mask'", "0 and 1", "2.0")),
        ],
    ),
}
records = [
    BadInput(f"{cls.__name__}-record-{index}", prepares(cls, good, bad), ("data.path", "a.jsonl, line 3", *mentions))
    for cls, (good, rows) in WRONG.items()
    for index, (bad, mentions) in enumerate(rows)
]

ROW = {"input_ids": [1, 2], "teacher_topk_ids": [[1, 2], [3, 4]], "teacher_topk_log_probs": [[-1.0, -2.0]] * 2}


def writes(rows: Any, name: str = "a.safetensors", **settings: Any) -> Callable[[Path], Any]:
    return lambda tmp_path: write_teacher_topk(tmp_path / name, rows, **settings)


teachers = [
    *(
        BadInput(f"write_teacher_topk-row-{index}", writes([ROW, ROW | changed]), ("rows[1]", *mentions))
        for index, (changed, mentions) in enumerate(
            (
                ({"input_ids": None}, ("must have 'input_ids'", "the keys")),
                ({"input_ids": []}, ("input_ids", "1 dimensions", "(0,)")),
                ({"input_ids": [1.5, 2]}, ("input_ids", "an array of integers", "1.5")),
                ({"input_ids": [1, -1]}, ("input_ids", "at least 0", "-1")),
                ({"input_ids": [1, 2**31]}, ("input_ids", "at least 0", "2147483648")),
                ({"input_ids": [[1, 2]]}, ("input_ids", "1 dimensions", "(1, 2)")),
                ({"input_ids": [1, 2, 3]}, ("teacher_topk_ids", "L=3", "(2, 2)")),
                ({"input_ids": [[1], [2, 3]]}, ("input_ids", "an array", "[[1], [2, 3]]")),
                ({"labels": [1]}, ("labels", "2 values", "1")),
                ({"labels": [-5, 1]}, ("labels", "-100", "-5")),
                ({"teacher_topk_ids": [1, 2]}, ("teacher_topk_ids", "2 dimensions", "(2,)")),
                ({"teacher_topk_ids": [[1], [2]]}, ("teacher_topk_ids", "[L, K]", "(2, 1)")),
                ({"teacher_topk_ids": [[1, 1], [2, 3]]}, ("teacher_topk_ids", "different ids", "[1, 1]")),
                ({"teacher_topk_log_probs": [[1, 2], [3, 4]]}, ("log_probs", "floating-point", "[[1, 2]")),
                ({"teacher_topk_log_probs": [[-1.0]] * 2}, ("log_probs", "[L, K]", "(2, 1)")),
                ({"teacher_topk_log_probs": [[-1.0, math.nan]] * 2}, ("log_probs", "at most 1", "nan")),
                ({"teacher_topk_log_probs": [[0.5, 2.0]] * 2}, ("log_probs", "at most 1", "9.0")),
                ({"teacher_topk_log_probs": np.full((2, 2), 1e4)}, ("log_probs", "at most 1", "inf")),
            )
        )
    ),
    BadInput("write_teacher_topk-row-a list", writes([[1]]), ("rows[0]", "a mapping", "[1]")),
    BadInput("write_teacher_topk-rows-none", writes([]), ("rows", "at least one row", "[]")),
    BadInput("write_teacher_topk-path-name", writes([ROW], "a.bin"), ("path", "ends in .safetensors", "a.bin")),
    BadInput(
        "write_teacher_topk-path-folder",
        writes([ROW], "none/a.safetensors"),
        ("path", "none", "does not exist"),
        FileNotFoundError,
    ),
    BadInput("write_teacher_topk-path-type", lambda: write_teacher_topk(5, [ROW]), ("path", "a path", "5")),
    *(
        BadInput(f"write_teacher_topk-{key}-{value!r}", writes([ROW], **{key: value}), (key, shown(value)))
        for key, values in {
            "temperature": (0, -1, math.inf, "1", None, True),
            "dtype": ("float64", None, np.float32),
            "tokenizer": ("gpt2", 5),
        }.items()
        for value in values
    ),
]

BAD_INPUTS = [*arguments, *layouts, *files, *records, *teachers]
