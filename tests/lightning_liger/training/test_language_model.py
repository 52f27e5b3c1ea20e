"""The mixin's loss is the model's own, with the losses that it adds to cross entropy, in one batch and in many."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from lightning_liger import LigerCallback, apply_liger_kernels
from lightning_liger.sequences.context_parallel import CACHE
from lightning_liger.training.language_model import LanguageModel
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.post_training.training import LM, assert_same_parameters, fit, metrics_of
from tests.lightning_liger.tiny import tiny_batch, tiny_llama, tiny_model

COEFFICIENT = 0.7


def tiny_mixtral(**overrides: Any) -> PreTrainedModel:
    """Its experts are not used evenly, so that the router's loss is large."""
    return tiny_model(
        "mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **overrides
    )


def num_with_more(module: LM, stage: str) -> bool:
    """Whether losses that the model adds were seen."""
    return bool(module.step_metrics[f"{stage}_metrics"]["aux_loss"].parts[1] > 0)


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
@pytest.mark.parametrize("architecture", ["mixtral", "bamba", "olmoe", "gpt_oss", "qwen3_next", "llama"])
def test_loss_and_gradients_of_one_batch_are_those_of_the_stock_model(architecture: str, patched: bool) -> None:
    stock = tiny_causal_lm(architecture).eval()
    stock.z_loss_coefficient = 0.05  # of bamba
    module = LM(copy.deepcopy(stock))
    if patched:
        apply_liger_kernels(module.model)
    batch = tiny_batch()
    want = stock(**batch).loss
    want.backward()
    got = module.training_step(batch, 0)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert_same_gradients(stock, module.model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(module.validation_step(batch, 0), got.detach())
    assert num_with_more(module, "train") == num_with_more(module, "val") == (architecture != "llama")


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_router_loss_of_a_compiled_model_is_seen(context: Any) -> None:
    module = LM(torch.compile(tiny_mixtral(), backend="eager"))
    with context():
        want = tiny_mixtral()(**tiny_batch()).loss
        for _ in range(2):
            torch.testing.assert_close(module.training_step(tiny_batch(), 0), want)
    assert num_with_more(module, "train")


def test_model_is_left_with_its_own_loss() -> None:
    module = LM(tiny_mixtral())
    want = module.model(**tiny_batch()).loss
    module.training_step(tiny_batch(), 0)
    torch.testing.assert_close(module.model(**tiny_batch()).loss, want)
    with pytest.raises(ValueError, match="no_such_key"):
        module.training_step(tiny_batch() | {"no_such_key": torch.ones(1)}, 0)
    module.model.forward = lambda **_: 1 / 0
    module._language_model = None
    with pytest.raises(ZeroDivisionError):
        module.training_step(tiny_batch(), 0)
    assert module.model.loss_function.__name__ == "ForCausalLMLoss"
    copy.deepcopy(module)  # holds no graph


def test_accumulated_router_losses_are_weighted_by_tokens() -> None:
    """Batches of unequal sizes, with unequal numbers of labels; the last one has none."""
    module, model = LM(tiny_mixtral()), tiny_mixtral()
    batches = [tiny_batch(2, 11, 4, seed=1), tiny_batch(1, 7, 1, seed=2), tiny_batch(1, 9, 9, seed=3)]
    trainer = fit(module, batches, strategy="auto", callbacks=[LigerCallback()], accumulate_grad_batches=3)
    outputs = [model(**batch) for batch in batches[:2]]
    counts = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches[:2]])
    shares = counts / counts.sum()
    total = (torch.stack([output.loss for output in outputs]) * shares).sum()
    router = (COEFFICIENT * torch.stack([output.aux_loss for output in outputs]) * shares).sum()
    total.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_parameters(module.model, model, rtol=1e-5, atol=1e-6)
    metrics = metrics_of(trainer)
    assert module.steps[-1]["train_loss_step"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["train_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["train_aux_loss"] == pytest.approx(router.item(), rel=1e-5)
    assert metrics["train_perplexity"] == pytest.approx((total - router).exp().item(), rel=1e-4)


def test_epoch_resumes_with_the_router_losses_so_far() -> None:
    module, resumed = LM(tiny_mixtral()), LM(tiny_mixtral())
    for seed in (1, 2):
        module.training_step(tiny_batch(seed=seed), 0)
    resumed.load_rank_state_dict(module.rank_state_dict())
    for name, metric in module.step_metrics["train_metrics"].items():
        torch.testing.assert_close(resumed.step_metrics["train_metrics"][name].compute(), metric.compute())
    LM(tiny_mixtral()).load_rank_state_dict({"train_metrics": torch.ones(3, 2)})  # of version 0.1.0


class OwnLoss(nn.Module):
    """Around a Llama, whose output gets a further loss."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny_llama()

    def forward(self, input_ids: Tensor) -> MoeCausalLMOutputWithPast:
        return MoeCausalLMOutputWithPast(logits=self.llama(input_ids).logits, aux_loss=torch.tensor(1.0))


def test_losses_that_a_model_returns_apart_are_named_in_one_warning() -> None:
    module = LM(OwnLoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.training_step(tiny_batch(), 0)
        module.training_step(tiny_batch(), 0)
    (message,) = [str(each.message) for each in caught if "loss" in str(each.message)]
    assert "OwnLoss returns ['aux_loss']" in message
    assert "training_step" in message


def test_further_heads_keep_their_loss_function() -> None:
    """A model that calls the function once more, as those that predict several tokens do."""
    model = tiny_llama()
    forward = model.forward

    def with_a_further_head(**batch: Any) -> Any:
        output = forward(**batch)
        if "labels" in batch:
            output.loss = output.loss + 0.5 * model.loss_function(output.logits[..., :50], batch["labels"] % 50, 50)
        return output

    batch = tiny_batch(num_ignored=0)
    model.forward = with_a_further_head
    want = model(**batch).loss
    torch.testing.assert_close(LM(model).training_step(batch, 0), want)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_steps_make_no_cache_unless_asked_to(model_type: str) -> None:
    """It would hold the keys and values of all layers until the end of backward; GPT-2 is not given an empty one."""
    model, caches = tiny_causal_lm(model_type), []
    model.config.use_cache = True
    model.register_forward_hook(lambda module, args, output: caches.append(output.get(CACHE)))
    module = LM(model)
    module.training_step(tiny_batch(), 0)
    module.training_step(tiny_batch() | {"use_cache": True}, 0)
    assert [cache is None or cache.get_seq_length() == 0 for cache in caches] == [True, False]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text"])
def test_empty_cache_changes_neither_logits_nor_gradients(model_type: str) -> None:
    """The two others have layers with a sliding window, shorter than the rows."""
    model = tiny_causal_lm(model_type)
    model.config.sliding_window = 5
    plain = {"input_ids": tiny_batch()["input_ids"]}
    seen, results = LanguageModel(model), []
    for inputs in (plain | {"use_cache": False}, dict(plain)):
        if len(results):
            seen.leave_out_cache(inputs)
            cache = inputs[CACHE]
        model.zero_grad()
        logits = model(**inputs).logits
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"position_ids": torch.arange(11).expand(2, -1)}),  # documents may be packed
        ("llama", {"attention_mask": torch.ones(2, 11, dtype=torch.int64)}),
        ("llama", {"use_cache": True}),
        ("gpt2", {}),  # may attend to an encoder
        ("jamba", {}),  # keeps states of other kinds
        ("blt", {}),  # of several models
    ],
)
def test_empty_cache_is_for_rows_of_one_document_and_plain_attention(model_type: str, more: dict[str, Any]) -> None:
    inputs = tiny_batch() | more
    inputs.pop("labels")
    LanguageModel(tiny_causal_lm(model_type)).leave_out_cache(inputs)
    assert inputs.get(CACHE) is None


@pytest.mark.parametrize(("architecture", "is_named"), [("bart", True), ("mbart", True), ("seed_oss", False)])
def test_other_loss_of_a_model_is_named_in_one_warning(architecture: str, is_named: bool) -> None:
    """BART's decoder does not shift labels."""
    module = LM(tiny_causal_lm(architecture).eval())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [module.training_step(tiny_batch(), 0).item() for _ in range(2)]
    assert losses[0] == losses[1]
    messages = [str(each.message) for each in caught if "but its cross entropy" in str(each.message)]
    assert len(messages) == is_named
    assert all(f"the loss of {type(module.model).__name__} is" in message for message in messages)
