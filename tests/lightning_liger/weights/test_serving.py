"""An exported folder gives the tokens of the trained module, in transformers and in vLLM."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import LigerCausalLM, export_pretrained
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_batch

PROMPTS = torch.tensor([[5, 6, 7, 8], [100, 3, 90, 44]])
NUM_NEW = 12


def trained(tmp_path, accelerator: str, precision: str, lora, **sizes):
    """The folder of an exported model, and the tokens that the trained module predicts greedily."""
    settings = {"learning_rate": 1e-2, "max_new_tokens": NUM_NEW, "temperature": 0.0, "lora": lora}
    torch.manual_seed(0)
    module = LigerCausalLM(config=TINY_CONFIG | {"eos_token_id": None} | sizes, **settings)
    trainer = quiet_trainer(strategy="liger", accelerator=accelerator, precision=precision, max_steps=6)
    trainer.fit(module, DataLoader([tiny_batch(seed=seed) for seed in range(6)], batch_size=None))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (tokens,) = trainer.predict(module, DataLoader([{"input_ids": PROMPTS}], batch_size=None))
    twin = LigerCausalLM(config=TINY_CONFIG | {"eos_token_id": None} | sizes, **settings)
    export_pretrained(twin, tmp_path / "last.ckpt", tmp_path / "served")
    return tmp_path / "served", tokens.cpu()


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
def test_transformers_generates_the_tokens_of_the_trained_module(tmp_path, lora):
    folder, tokens = trained(tmp_path, "cpu", "32-true", lora)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generated = model.generate(
        PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=NUM_NEW, do_sample=False
    )
    assert tokens.shape == (2, 4 + NUM_NEW)
    assert torch.equal(tokens[:, :4], PROMPTS)
    assert torch.equal(generated, tokens)
    assert len(tokens[:, 4:].unique()) > 2  # not one token over and over, which any model would repeat


@pytest.mark.gpu
def test_vllm_generates_the_tokens_of_the_trained_module(tmp_path):
    vllm = pytest.importorskip("vllm")
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 64}
    folder, tokens = trained(tmp_path, "gpu", "32-true", None, **sizes)
    engine = vllm.LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.3
    )
    options = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": row.tolist()} for row in PROMPTS], options)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == tokens[:, 4:].tolist()
