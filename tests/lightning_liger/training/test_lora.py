"""``LigerCausalLM`` with adapters: its settings, training, checkpoints, and export of merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import LigerCausalLM, export_pretrained
from lightning_liger.cli import main
from lightning_liger.training.lora import needs_weights
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_batch, tiny_llama, tiny_model

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:.*PeftModel.*tied"),
]

TINY_YAML = Path(__file__).parents[3] / "examples" / "tiny.yaml"


LORA = {"r": 2, "alpha": 16, "target_modules": ["q_proj", "lm_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pretrained")
    tiny_llama().save_pretrained(path)
    return path


def fit(module: LigerCausalLM, path: Path, steps: int, strategy: str = "liger", ckpt_path: Any = None) -> Path:
    """Returns the checkpoint of the last step."""
    saving = ModelCheckpoint(path, f"{steps}-{{step}}", every_n_train_steps=1, save_top_k=1, monitor=None)
    trainer = quiet_trainer(max_steps=steps, strategy=strategy, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, DataLoader([tiny_batch()] * 8, batch_size=None), ckpt_path=ckpt_path)
    return Path(saving.best_model_path)


def settings(folder: Path | None, **others: Any) -> dict[str, Any]:
    model = {"config": TINY_CONFIG} if folder is None else {"pretrained": str(folder)}
    return {"lora": LORA, "learning_rate": 0.05, "num_training_steps": 8, **model, **others}


@pytest.mark.parametrize(
    ("strategy", "modules"),
    [("liger", ["q_proj", "lm_head"]), ("liger_fsdp", ["q_proj"]), ("liger_model_parallel", ["q_proj", "lm_head"])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_adapters_learn_and_training_resumes_and_is_exported(
    folder: Path, tmp_path: Path, strategy: str, modules: list[str]
) -> None:
    arguments, exported = settings(folder, lora={**LORA, "target_modules": modules}), {}
    for name, starts in {"straight": (4,), "resumed": (2, 4)}.items():
        checkpoint = None
        for steps in starts:
            torch.manual_seed(1)
            module = LigerCausalLM(**arguments)
            checkpoint = fit(module, tmp_path / f"{name}-{steps}", steps, strategy, checkpoint)
        if strategy == "liger":
            with torch.no_grad():
                logits = module.model.eval()(input_ids=tiny_batch()["input_ids"]).logits + 0
        export_pretrained(LigerCausalLM(**arguments), checkpoint, tmp_path / name)
        exported[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    straight, resumed = (model.state_dict() for model in exported.values())
    assert straight.keys() == tiny_llama().state_dict().keys()
    torch.testing.assert_close(resumed, straight)
    changed = {name for name, value in tiny_llama().state_dict().items() if not torch.equal(value, straight[name])}
    assert changed == {name for name in straight if any(module in name for module in modules)}
    if strategy == "liger":
        torch.testing.assert_close(exported["resumed"](input_ids=tiny_batch()["input_ids"]).logits, logits)


def test_experts_learn_and_are_exported(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    base = tiny_model("qwen3_moe", **sizes)
    base.save_pretrained(tmp_path / "base")
    lora = {"r": 2, "alpha": 16, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    arguments = settings(tmp_path / "base", lora=lora)
    module = LigerCausalLM(**arguments)
    checkpoint = fit(module, tmp_path, 2)
    assert any(type(each).__name__ == "LigerParamWrapper" for each in module.modules())
    with torch.no_grad():
        logits = module.model.eval()(input_ids=tiny_batch()["input_ids"]).logits + 0
    names = {name for name in torch.load(checkpoint, weights_only=True)["state_dict"] if "lora_" in name}
    prefix = "model.base_model.model.model.layers"
    assert names == {
        f"{prefix}.{layer}.mlp.experts.{inner}lora_{part}.default.weight"
        for layer in (0, 1) for inner in ("", "base_layer.") for part in "AB"
    }  # fmt: skip
    export_pretrained(LigerCausalLM(**arguments), checkpoint, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(exported(input_ids=tiny_batch()["input_ids"]).logits, logits, rtol=1e-4, atol=1e-4)
    changed = {name for name, value in base.state_dict().items() if not torch.equal(value, exported.state_dict()[name])}
    assert changed == {name for name in base.state_dict() if "experts" in name}


def test_settings() -> None:
    config = LigerCausalLM(config=TINY_CONFIG, lora={**LORA, "dropout": 0.25})
    config.configure_model()
    adapter = config.model.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout, adapter.task_type) == (2, 16, 0.25, "CAUSAL_LM")
    assert not needs_weights({**LORA, "init_lora_weights": "gaussian", "use_dora": False})
    assert not needs_weights({**LORA, "target_parameters": ["experts.down_proj"]})
    assert needs_weights({**LORA, "use_dora": True})
    assert needs_weights({**LORA, "init_lora_weights": "pissa"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("modules", [["q_proj"], ["lm_head"], ["embed_tokens"]], ids=lambda names: names[0])
def test_tied_weights_are_untied_by_the_export_only_if_one_has_adapters(tmp_path: Path, modules: list[str]) -> None:
    arguments = settings(
        None, config={**TINY_CONFIG, "tie_word_embeddings": True}, lora={**LORA, "target_modules": modules}
    )
    module = LigerCausalLM(**arguments)
    checkpoint = fit(module, tmp_path, 2)
    with torch.no_grad():
        logits = module.model.eval()(input_ids=tiny_batch()["input_ids"]).logits + 0
    export_pretrained(LigerCausalLM(**arguments), checkpoint, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(exported(input_ids=tiny_batch()["input_ids"]).logits, logits)
    assert exported.config.tie_word_embeddings == (modules == ["q_proj"])


@pytest.mark.filterwarnings("ignore")
def test_command_exports_the_adapters_of_the_checkpoint(tmp_path: Path) -> None:
    """Also where its settings have none."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 1000)
    config = TINY_CONFIG | {"vocab_size": 300}
    checkpoint = fit(LigerCausalLM(**settings(None, config=config)), tmp_path, 1)
    main([
        "export", f"--config={TINY_YAML}", f"--data.path={text}", f"--data.cache_dir={tmp_path / 'cache'}",
        "--data.vocab_size=300", "--data.block_size=32", f"--model.config={json.dumps(config)}",
        f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'out'}",
    ])  # fmt: skip
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    prefix = "model.base_model.model."
    factors = (saved[f"{prefix}lm_head.lora_{part}.default.weight"] for part in "BA")
    expected = saved[f"{prefix}lm_head.base_layer.weight"] + 16 / 2 * torch.mm(*factors)
    torch.testing.assert_close(exported["lm_head.weight"], expected)
