"""Completions in every form of batch, a policy that trains on them, and the same training by hand on a stock model."""

from typing import Any

import torch
from torch import Tensor

from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.post_training.policy import LigerPolicyMixin
from tests.lightning_liger.losses.policy_batches import naive_loss
from tests.lightning_liger.post_training.training import Recorded
from tests.lightning_liger.tiny import tiny_llama

Batch = dict[str, Any]
TEMPERATURE = 1.3
PROMPTS, COMPLETIONS = (3, 1, 4, 2, 5, 2), (4, 6, 1, 0, 5, 3)
COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def sequences(
    number: int, *, per_token: bool = False, columns: tuple[str, ...] = COLUMNS, seed: int = 0
) -> list[Batch]:
    """Single sequences of a batch, each with its values."""
    random = torch.Generator().manual_seed(seed)
    result = []
    for prompt, length in zip(PROMPTS[:number], COMPLETIONS[:number], strict=True):
        prompt_ids = torch.randint(3, 131, (prompt,), generator=random)
        completion_ids = torch.randint(3, 131, (length,), generator=random)
        advantages = torch.randn(length if per_token else (), generator=random)
        values = {key: -torch.rand(length, generator=random) * 2 - 4 for key in COLUMNS}
        mask = (torch.arange(length) != 2).long()  # a tool's token
        example = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "advantages": advantages}
        result.append(example | {"tool_mask": mask} | {key: values[key] for key in columns})
    return result


def pad(rows: list[Tensor], left: bool = False, value: float = 0) -> Tensor:
    length = max(1, *map(len, rows))
    sides = [(length - len(row), 0) if left else (0, length - len(row)) for row in rows]
    padded = [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
    return torch.stack(padded)


def apart(examples: list[Batch]) -> Batch:
    """As TRL's batches: prompts padded on the left, completions on the right."""
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    batch: Batch = {}
    for name in ("prompt", "completion"):
        ids = columns.pop(f"{name}_ids")
        batch[f"{name}_ids"] = pad(ids, left=name == "prompt")
        batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], left=name == "prompt")
    for key, values in columns.items():
        batch[key] = torch.stack(values) if values[0].ndim == 0 else pad(values)
    return batch


def joined(examples: list[Batch]) -> Batch:
    """Rows of ``input_ids``, padded on the right."""
    columns = columns_of(examples)
    lengths = {"attention_mask": [torch.ones_like(row) for row in columns["input_ids"]]}
    return {key: torch.stack(x) if x[0].ndim == 0 else pad(x) for key, x in (columns | lengths).items()}


def packed(examples: list[Batch]) -> Batch:
    """One row of all sequences."""
    columns = columns_of(examples)
    rows = columns["input_ids"]
    columns["position_ids"] = [torch.arange(len(row)) for row in rows]
    columns["sequence_ids"] = [torch.full_like(row, index) for index, row in enumerate(rows)]
    batch = {key: torch.stack(x) if x[0].ndim == 0 else torch.cat(x)[None] for key, x in columns.items()}
    return batch | {"num_sequences": len(rows)}


def columns_of(examples: list[Batch]) -> dict[str, list[Tensor]]:
    """Of each sequence its values, those of tokens with zeros at the prompt."""
    prompts, completions = ([each[f"{name}_ids"] for each in examples] for name in ("prompt", "completion"))
    columns = {key: [each[key] for each in examples] for key in examples[0] if not key.endswith("_ids")}
    columns["completion_mask"] = [torch.ones_like(row) for row in completions]
    for key, values in columns.items():
        if values[0].ndim:
            zeros = (torch.zeros(len(prompt), dtype=values[0].dtype) for prompt in prompts)
            columns[key] = [torch.cat(pair) for pair in zip(zeros, values, strict=True)]
    return columns | {"input_ids": [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]}


class Policy(LigerPolicyMixin, Recorded):
    """A tiny Llama with SGD."""

    temperature = TEMPERATURE
    learning_rate = 0.3

    def __init__(self, options: PolicyOptions, **settings: Any) -> None:
        super().__init__(policy_options=options, **settings)
        self.model = tiny_llama()


def stock_scores(model: torch.nn.Module, examples: list[Batch]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of completions' tokens, each sequence computed alone."""
    rows = []
    for example in examples:
        ids = torch.cat((example["prompt_ids"], example["completion_ids"]))
        logits = model(input_ids=ids[None]).logits[0, len(example["prompt_ids"]) - 1 : -1] / TEMPERATURE
        log_p = logits.double().log_softmax(-1)
        rows.append((log_p.gather(1, example["completion_ids"][:, None])[:, 0], -(log_p.exp() * log_p).sum(1)))
    return pad([log_probs for log_probs, _ in rows]), pad([entropy for _, entropy in rows])


def expected_loss(model: torch.nn.Module, examples: list[Batch], options: PolicyOptions) -> Tensor:
    log_probs, entropies = stock_scores(model, examples)
    columns = {key: pad([example[key] for example in examples]).double() for key in COLUMNS if key in examples[0]}
    advantages = [example["advantages"].double() for example in examples]
    mask = pad([example["tool_mask"] for example in examples]).bool()
    batch = PolicyBatch(
        Completions(mask),
        pad(advantages) if advantages[0].ndim else torch.stack(advantages),
        *map(columns.get, COLUMNS),
    )
    kept = entropies[mask][entropies[mask] >= entropies[mask].quantile(1 - options.top_entropy_quantile)]
    return naive_loss(log_probs, batch, options, entropies) - options.entropy_coef * kept.mean()


def expected_model(steps: list[list[Batch]], options: PolicyOptions) -> tuple[torch.nn.Module, list[float]]:
    model, losses = tiny_llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for examples in steps:
        optimizer.zero_grad()
        loss = expected_loss(model, examples, options)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses
