"""The JSON schema accepts every shipped yaml, and no misspelled key at any depth."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_liger.cli import main
from lightning_liger.commands.schema import make_schema

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema():
    return json.loads(json.dumps(make_schema()))


@pytest.fixture(scope="module")
def validator(schema):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_examples_printed_configs_classes_of_users_and_additions_are_accepted(validator, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    accepted = [load(path) for path in EXAMPLES]
    accepted.append({"model": {"class_path": "mine.Model", "init_args": {"a": 1}}})
    accepted.append({"model": {"init_args": {"learning_rate": 1.0e-3}}})
    for name in ("tiny", "llama3_8b", "distill_topk"):
        with pytest.raises(SystemExit):
            main(["fit", f"--config={ROOT / 'examples' / name}.yaml", "--print_config"])
        accepted.append(yaml.safe_load(capsys.readouterr().out))
    for each in accepted:
        assert [error.message for error in validator.iter_errors(each)] == [], each


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ((), "trainr", {}),
        (("trainer",), "max_steps", "many"),
        (("trainer", "strategy", "init_args"), "state_dict", "sharded"),
        (("trainer", "callbacks", 0, "init_args"), "dirpat", "a"),
        (("model",), "init_arg", {}),
        (("model",), "class_path", "lightning_liger.LigerCasualLM"),
        (("model", "init_args"), "learning_rate", "fast"),
        (("data", "init_args"), "batch_siz", 1),
    ],
)
def test_mistake_is_refused(validator, path, key, value):
    config = copy.deepcopy(load(ROOT / "examples" / "llama3_8b.yaml"))
    assert not list(validator.iter_errors(config))
    place = config
    for each in path:
        place = place[each]
    place[key] = value
    assert list(validator.iter_errors(config))


def test_schema_has_options_with_descriptions_of_all_subcommands(schema):
    properties = schema["properties"]
    assert {"seed_everything", "trainer", "model", "data", "ckpt_path", "output", "top_k"} <= set(properties)
    assert properties["trainer"]["properties"]["max_steps"]["description"].startswith("Stop training after")
    options = schema["definitions"]["lightning_liger.LigerCausalLM"]["properties"]
    assert options["learning_rate"]["type"] == "number"
    assert "``" not in json.dumps(schema)
    undescribed = {
        f"{name}.{option}"
        for name, definition in schema["definitions"].items()
        if re.fullmatch(r"lightning_liger\.(Liger\w+|data\.\w+Module)", name)
        for option, each in definition["properties"].items()
        if "description" not in each
    }
    ours = {"kernels", "memory_budget", "fault_tolerance", "context_parallel_size"}
    # Options of strategies that are not ours are Lightning's.
    assert [each for each in undescribed if "Strategy." not in each or each.rpartition(".")[2] in ours] == []


def test_schema_is_written_to_a_file(tmp_path, capsys, monkeypatch, schema):
    monkeypatch.setattr("lightning_liger.commands.schema.make_schema", lambda: schema)
    assert main(["schema", f"--output={tmp_path / 's.json'}"]) == 0
    assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["title"] == "lightning-liger"
    assert f"# yaml-language-server: $schema={tmp_path / 's.json'}" in capsys.readouterr().out.replace("\n", "")
