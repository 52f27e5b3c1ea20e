"""Models, tokenizers and data of the Hub by name, through the real client and a local server that plays the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_liger import (
    AutoLigerModelForCausalLM,
    LigerCausalLM,
    LigerDistillation,
    LigerDPO,
    LigerMonitor,
    export_pretrained,
)
from lightning_liger.cli import main
from lightning_liger.data import PreferenceDataModule, TextDataModule
from lightning_liger.hub import is_hub_name, naming_repository
from tests.lightning_liger.hub_server import Hub, commit_of
from tests.lightning_liger.tiny import tiny_llama
from tests.lightning_liger.workers.example_runs import OF_THE_HUB

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
PAIRS = (EXAMPLES / "preference.jsonl").read_bytes().splitlines(keepends=True)
AUTO = AutoLigerModelForCausalLM.from_pretrained
README = b"""---
configs:
- config_name: pairs
  data_files: [{split: train_prefs, path: train.jsonl}, {split: test_prefs, path: test.jsonl}]
- config_name: texts
  data_files: [{split: train, path: texts.jsonl}]
---
"""


def serve(hub: Hub, folder: Path) -> None:
    """Two revisions of a model with a tokenizer, and a data set with two configurations."""
    for seed, revision in enumerate(("main", "other")):
        torch.manual_seed(seed)
        model = tiny_llama(vocab_size=320, max_position_embeddings=256)
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(folder / revision)
        for file in (EXAMPLES / "tokenizer").iterdir():
            shutil.copy(file, folder / revision)
        (folder / revision / "consolidated.safetensors").write_bytes(b"weights in another format")
        hub.add("models/someone/tiny", folder / revision, revision)
    texts = b"".join(json.dumps({"body": f"{index}: the quick brown fox"}).encode() + b"\n" for index in range(60))
    files = {"README.md": README, "train.jsonl": b"".join(PAIRS[:30]), "test.jsonl": b"".join(PAIRS[30:34])}
    hub.add("datasets/someone/data", {**files, "texts.jsonl": texts})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with Hub().running() as hub:
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        serve(hub, tmp_path / "served")
        yield hub


def weights(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).lm_head.weight


def test_a_name_is_owner_and_name_where_no_path_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "here").mkdir(parents=True)
    assert is_hub_name("someone/tiny-1.5_b")
    for path in ("tiny", "someone/here", "./someone/tiny", "/someone/tiny", "a/b/c", "~/tiny", "", None, 3, tmp_path):
        assert not is_hub_name(path)


def test_models_are_those_of_the_revision_and_come_from_the_cache_afterwards(hub, tmp_path, monkeypatch, capsys):
    assert main(["inspect", "someone/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert [Path(each).name for each in hub.downloads()] == ["config.json"]
    commit = commit_of(hub.repositories["models/someone/tiny"]["other"])
    for revision, folder in ((None, "main"), ("other", "other"), (commit, "other")):
        module = LigerDPO(pretrained="someone/tiny", revision=revision, learning_rate=0.0)
        module.configure_model()
        assert module.hparams["pretrained"] == "someone/tiny"
        for model in (module.model, module.ref_model):
            assert torch.equal(model.lm_head.weight, weights(tmp_path / "served" / folder))
    student = LigerDistillation(pretrained="someone/tiny", teacher="someone/tiny", teacher_revision="other")
    student.configure_model()
    teacher = student.configure_teacher()
    assert torch.equal(teacher.lm_head.weight, weights(tmp_path / "served" / "other"))
    auto = AutoLigerModelForCausalLM.from_pretrained("someone/tiny", revision="other")
    assert torch.equal(auto.lm_head.weight, teacher.lm_head.weight)
    adapted = LigerCausalLM("someone/tiny", lora={"r": 2})
    adapted.configure_model()
    assert not hub.downloads("consolidated.safetensors")

    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    LigerCausalLM("someone/tiny", revision="other").configure_model()
    assert not hub.requests


def test_adapters_of_the_hub_come_with_their_base_model(hub, tmp_path, capsys):
    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "main"),
        LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False),
    )
    adapted.peft_config["default"].base_model_name_or_path = "someone/tiny"
    adapted.save_pretrained(tmp_path / "adapter")
    hub.add("models/someone/adapter", tmp_path / "adapter")
    ids = torch.arange(3, 12)[None]
    model = AutoLigerModelForCausalLM.from_pretrained("someone/adapter")
    assert model.liger_report.num_replaced > 0
    torch.testing.assert_close(model(ids).logits, adapted.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    hint = r"pretrained must be .*'someone/adapter', adapters of peft: merge them"
    with pytest.raises(FileNotFoundError, match=hint):
        LigerCausalLM("someone/adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    module = LigerCausalLM(tmp_path / "merged")
    module.configure_model()
    torch.testing.assert_close(module.model.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("streaming", [False, True])
def test_data_of_the_hub_are_those_of_their_file(hub, tmp_path, streaming):
    def tokens(**settings):
        data = PreferenceDataModule(tokenizer="someone/tiny", cache_dir=tmp_path / "cache", **settings)
        data.prepare_data()
        data.setup()
        return [[row["chosen_ids"].tolist() for row in rows] for rows in (data.train_data, data.validation_data)]

    splits = {"split": "train_prefs", "validation_split": "test_prefs", "subset": "pairs", "streaming": streaming}
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}
    for file in files.values():
        file.write_bytes(hub.repositories["datasets/someone/data"]["main"][file.name])
    expected = tokens(path=files["train"], validation_path=files["test"])
    assert tokens(path="someone/data", **splits) == expected
    given = [datasets.Dataset.from_list([*map(json.loads, file.read_text().splitlines())]) for file in files.values()]
    assert tokens(path=given[0], validation_path=given[1].to_list()) == expected
    hub.requests.clear()
    assert tokens(path="someone/data", **splits) == expected  # of the cache
    assert not hub.downloads()

    text = TextDataModule(
        path="someone/data", subset="texts", text_field="body", block_size=32, vocab_size=300, cache_dir=tmp_path / "c",
        streaming=streaming, validation_fraction=0.2,
    )  # fmt: skip
    text.prepare_data()
    text.setup()
    decoded = [text.text_tokenizer.decode(row["input_ids"]) for row in text.train_data]
    assert sum(each.count("quick brown") for each in decoded) > 40


def test_errors_name_the_argument_and_what_to_do(hub, tmp_path, monkeypatch, capsys):
    hub.add("models/someone/gated", tmp_path / "served" / "main")
    hub.gated.add("models/someone/gated")
    data = {"path": "someone/data", "subset": "pairs", "cache_dir": tmp_path / "cache", "tokenizer": "someone/tiny"}
    for make, error, parts in (
        (lambda: LigerCausalLM("someone/none"), FileNotFoundError, ("pretrained='someone/none'", "check the name")),
        (lambda: LigerCausalLM("someone/tiny", revision="v9"), FileNotFoundError, ("revision='v9'", "no such branch")),
        (lambda: LigerCausalLM("someone/gated"), PermissionError, ("pretrained='someone/gated'", "hf auth login")),
        (lambda: AUTO("someone/none"), FileNotFoundError, ("name_or_path='someone/none'", "check the name")),
        (lambda: AUTO("someone/tiny", revision="v9"), FileNotFoundError, ("revision='v9'", "no such branch")),
        (lambda: AUTO("someone/gated"), PermissionError, ("name_or_path='someone/gated'", "hf auth login")),
        (lambda: AUTO("/no/where"), FileNotFoundError, ("name_or_path='/no/where'", "owner/name")),
        (lambda: LigerCausalLM("gpt2"), FileNotFoundError, ("pretrained", "'gpt2'", "such as 'openai-community/gpt2'")),
        (lambda: TextDataModule(path="imdb"), FileNotFoundError, ("data.path='imdb'", "owner/name of a data set")),
        (lambda: LigerCausalLM("/no/where", revision="v9"), ValueError, ("revision", "'/no/where'", "'v9'")),
        (
            lambda: PreferenceDataModule(**data | {"path": "someone/none"}),
            FileNotFoundError,
            ("data.path='someone/no",),
        ),
        (lambda: PreferenceDataModule(**data | {"tokenizer": "someone/none"}), FileNotFoundError, ("data.tokenizer=",)),
        (lambda: PreferenceDataModule(**data | {"path": EXAMPLES}), ValueError, ("data.subset", "'pairs'")),
        (lambda: PreferenceDataModule(**data | {"path": {"a": 1}, "subset": None}), TypeError, ("data.path", "'a'")),
        (
            PreferenceDataModule(**data, split="tain").prepare_data,
            ValueError,
            ("data.path='someone/data'", "split='tain'", "'train_prefs'"),
        ),
        (
            PreferenceDataModule(**data, split="train_prefs", columns={"prompt": "question"}).prepare_data,
            ValueError,
            ("data.columns", "split='train_prefs'", "no record has ['question']"),
        ),
    ):
        with pytest.raises(error) as raised:
            make()
        assert all(part in str(raised.value) for part in parts), raised.value
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    given = {"path": "someone/data", "subset": "pairs", "split": "tain", "cache_dir": tmp_path / "cache"}
    options = ["--model=LigerDPO", "--model.pretrained=someone/tiny", "--data=PreferenceDataModule"]
    options += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    with pytest.raises(SystemExit, match="2"):
        main(["fit", *options, *(f"--data.{name}={value}" for name, value in given.items())])
    assert "split='tain', subset='pairs' cannot be loaded" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", hub.token)
    LigerCausalLM("someone/gated").configure_model()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for load, name in ((LigerCausalLM, "pretrained"), (AUTO, "name_or_path")):
        with pytest.raises(ConnectionError, match=rf"{name}='someone/new'.*HF_HUB_OFFLINE"):
            load("someone/new")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for target, name in ((huggingface_hub.constants, "ENDPOINT"), (huggingface_hub.hf_api.api, "endpoint")):
        monkeypatch.setattr(target, name, "http://127.0.0.1:9")  # where nothing listens
    with pytest.raises(ConnectionError, match=r"pretrained='someone/new'.*no network.*refused"):
        LigerCausalLM("someone/new")
    with (
        pytest.raises(ConnectionError, match=r"push_to_hub='me/mine': the Hub cannot be reached"),
        naming_repository("push_to_hub", "me/mine"),
    ):
        huggingface_hub.hf_api.api.create_repo("me/mine")


def test_a_yaml_file_trains_on_two_processes_and_downloads_once(hub, tmp_path):
    config = {
        "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "liger_fsdp", "max_steps": 1, "logger": False,
                    "enable_checkpointing": False, "default_root_dir": str(tmp_path / "run"), "limit_val_batches": 0},
        "model": {"class_path": "lightning_liger.LigerDPO",
                  "init_args": {"pretrained": "someone/tiny", "revision": "other"}},
        "data": {"class_path": "lightning_liger.data.PreferenceDataModule",
                 "init_args": {"path": "someone/data", "subset": "pairs", "split": "train_prefs", "batch_size": 2,
                               "cache_dir": str(tmp_path / "cache")}},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "lightning_liger", "fit", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    downloads = hub.downloads()
    assert "data.tokenizer is that of model.pretrained='someone/tiny'" in done.stderr
    assert any(each.endswith("model.safetensors") for each in downloads)
    assert any(each.endswith("train.jsonl") for each in downloads)
    assert len(downloads) == len(set(downloads)), sorted(downloads)


@pytest.mark.parametrize("example", OF_THE_HUB)
def test_example_trains_with_its_names_and_is_exported(hub, tmp_path, example, monkeypatch):
    """The commands of the yaml, on a tiny model of the same architecture under the name of the real one."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen")
    for file in (*(EXAMPLES / "tokenizer").iterdir(), EXAMPLES / "chat_template.jinja"):
        shutil.copy(file, tmp_path / "qwen")
    settings = yaml.safe_load((EXAMPLES.parent / example).read_text(encoding="utf-8"))
    name, path = settings["model"]["init_args"]["pretrained"], settings["data"]["init_args"]["path"]
    hub.add(f"models/{name}", tmp_path / "qwen")
    hub.add(f"datasets/{path}", {"train.jsonl": (EXAMPLES / "conversations.jsonl").read_bytes()})
    config_option = ["--config", str(EXAMPLES.parent / example), "--trainer.accelerator=cpu", "--trainer.devices=1"]
    run = f"runs/{Path(example).stem}"
    checkpoint = f"{run}/checkpoints/last.ckpt"
    options = {"accumulate_grad_batches": 1, "max_steps": 2, "val_check_interval": 2, "log_every_n_steps": 1}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    main(["fit", *config_option, "--data.batch_size=1", *(f"--trainer.{key}={each}" for key, each in options.items())])
    main(["export", *config_option, "--ckpt_path", checkpoint, "--output", "chat"])
    models = (AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype="bfloat16") for each in ("qwen", "chat"))
    before, after = (model.model.layers[0].mlp.up_proj.weight for model in models)
    assert not torch.equal(before, after)
    assert (before - after).abs().max() < 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "chat").chat_template
    card = huggingface_hub.ModelCard.load(tmp_path / "chat" / "README.md")
    assert (card.data.base_model, card.data.datasets) == (name, path)
    assert "val_loss" in next(tmp_path.glob(f"{run}/csv/*/metrics.csv")).read_text(encoding="utf-8")


def test_export_has_a_card_and_is_pushed(hub, tmp_path, monkeypatch):
    from lightning import Trainer

    module = LigerCausalLM("someone/tiny", revision="other", loss_type="dft")
    data = TextDataModule(path="someone/data", subset="texts", text_field="body", tokenizer="someone/tiny",
                          block_size=16, batch_size=2, cache_dir=tmp_path / "cache")  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, callbacks=[LigerMonitor(page=None)],
        default_root_dir=tmp_path, enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    def export(output, **options):
        module = LigerCausalLM("someone/tiny", revision="other", loss_type="dft")
        options = {"data": "someone/data", "tokenizer": data.text_tokenizer} | options
        export_pretrained(module, tmp_path / "last.ckpt", tmp_path / output, **options)

    with pytest.raises(PermissionError, match="push_to_hub='me/mine'"):
        export("out", push_to_hub="me/mine")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="private"):
        export("out", private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    export("out", push_to_hub="me/mine", private=True)
    assert hub.private["models/me/mine"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    pushed = hub.repositories["models/me/mine"]["main"]
    assert {name: content for name, content in pushed.items() if name != ".gitattributes"} == files
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "someone/tiny"
    assert card.data.datasets == "someone/data"
    for part in (
        "revision other",
        "LigerCausalLM",
        '"loss_type": "dft"',
        "steps: 3",
        "Tokens: 96",
        "lightning-liger 0",
    ):
        assert part in card.text, card.text
    hub.add("models/me/public", {})
    with pytest.raises(ValueError, match="private"):
        export("other", push_to_hub="me/public", private=True)
