"""Patched models in engines that their users set up themselves, without a strategy of this package."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_liger import LazyLogits, apply_liger_kernels, divergence, lazy_logits, token_scores, topk_log_probs
from lightning_liger.strategies.parts.visible_logits import HIDDEN_STATES
from tests.lightning_liger.tiny import tiny_llama

IDS = torch.arange(24).view(3, 8)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))  # or else it moves to a GPU
    for layer in [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]:
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    return sharded


ENGINES: dict[str, Any] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "ddp_find_unused_parameters": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp_static_graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": _fsdp2,
    "shown": lambda model: HIDDEN_STATES.expose(model) or model,
}


class _Probabilities(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).logits.softmax(-1)


# Each returns a loss, and logits that are kept beyond the step.


def _cross_entropy(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    logits = model(input_ids=IDS).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten()), logits.detach()


def _scores(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad(), lazy_logits():
        before = token_scores(model(input_ids=IDS).logits[:, :-1], IDS[:, 1:]).log_probs
        reference = model(input_ids=IDS.flip(0)).logits
    logits = model(input_ids=IDS).logits
    scores = token_scores(logits[:, :-1], IDS[:, 1:], outputs=("log_probs", "entropy"))
    loss = torch.exp(scores.log_probs - before).mean() - scores.entropy.mean()
    return loss + divergence(logits, reference, kind="jsd") + topk_log_probs(logits, IDS[..., None]).mean(), None


def _probabilities(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    return model(input_ids=IDS)[..., :9].square().sum(), None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [_cross_entropy, _scores, _probabilities])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_trains_a_patched_model_as_the_stock_one(
    engine: str, step: Callable[[nn.Module], tuple[Tensor, Tensor | None]], process_group: None
) -> None:
    results = []
    for patched in (False, True):
        model = tiny_llama(num_hidden_layers=1)
        if patched:
            apply_liger_kernels(model)
        whole = ENGINES[engine](_Probabilities(model) if step is _probabilities else model)
        optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
        loss, kept = step(whole)
        loss.backward()
        gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in whole.parameters()]
        optimizer.step()
        results.append((loss.detach(), gradients, kept))
        # The function that DDP applies to outputs in these modes needs their gradient.
        if patched and step is _scores and not engine.startswith("ddp_"):
            assert model.lm_head.fusion_counters.num_materialized == 0
    (want, wanted, real), (got, gradients, kept) = results
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for gradient, each in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, each, rtol=1e-4, atol=1e-6)
    if isinstance(kept, LazyLogits):
        with pytest.raises(RuntimeError, match=r"materialize\(logits\)"):
            kept.softmax(-1)
    elif kept is not None:
        torch.testing.assert_close(kept, real, rtol=1e-4, atol=1e-6)


def test_trainer_of_hugging_face_computes_metrics_and_predictions_of_patched_models() -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]

    def results(patched: bool) -> tuple[float, float, Any]:
        torch.manual_seed(0)
        model = tiny_llama()
        if patched:
            apply_liger_kernels(model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
            trainer = Trainer(
                model,
                arguments,
                train_dataset=data,
                eval_dataset=data,
                compute_metrics=lambda result: {"sum": float(result.predictions.sum())},
                preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            )
            trainer.train()
            metrics = trainer.evaluate()
            trainer.preprocess_logits_for_metrics = None
            return metrics["eval_loss"], metrics["eval_sum"], trainer.predict(data).predictions

    (loss, total, predictions), (patched_loss, patched_total, patched_predictions) = map(results, (False, True))
    assert patched_loss == pytest.approx(loss, rel=1e-4)
    assert patched_total == total
    torch.testing.assert_close(torch.tensor(patched_predictions), torch.tensor(predictions), rtol=1e-3, atol=1e-4)
