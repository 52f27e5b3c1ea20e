"""Mixin for LightningModules that train a policy on given completions: GRPO and variants, RLOO, PPO's policy loss."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops import TokenScores
from liger_ops.arguments import check_tensor
from lightning_liger.lazy.scores import token_loss, token_scores
from lightning_liger.losses.options import Count, Positive
from lightning_liger.losses.policy import num_items, num_top_entropies
from lightning_liger.losses.policy_batch import (
    PolicyBatch,
    PolicyObjective,
    check_policy_batch,
    is_token_local,
    policy_objective,
    token_objective,
)
from lightning_liger.losses.policy_metrics import OF_DATA, metric_kind, metric_names, policy_metrics, reward_metrics
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.post_training.base import StepLoss, Term
from lightning_liger.post_training.metrics import Mean, Measured
from lightning_liger.post_training.reference import LigerReferenceMixin
from lightning_liger.post_training.rows import Rows, read_completions


class LigerPolicyMixin(LigerReferenceMixin):
    """Training, validation and test steps of a policy-gradient loss on completions with advantages.

    Completions come with the data: from a file, or from your own sampling loop. List the mixin before the
    base class, put the model into ``self.model`` and the loss into ``policy_options``::

        class Policy(LigerPolicyMixin, L.LightningModule):
            policy_options = PolicyOptions(loss_type="grpo", beta=0.04)

    Batches are those of TRL's ``GRPOTrainer``, padded or packed, see :func:`read_completions`. Without
    ``old_per_token_logps`` the policy is the one that was sampled from. A reference (for ``beta`` above 0) is the
    column ``ref_per_token_logps``, ``ref_model``, or the policy with its peft adapters off (or with one that is named
    ``"ref"``), see ``reference``.

    The loss is that of a whole optimizer step, regardless of its split over micro-batches and ranks, divided by the
    number of tokens or completions (:mod:`lightning_liger.losses.policy`). With ``num_items_in_batch``, the number
    of tokens of a whole generation batch on all ranks, losses of tokens are divided by its share of a step, as TRL
    does: a micro-batch's share is ``1 / steps_per_generation``.

    Losses that are functions of each token alone are computed in one pass over the head, other ones (ratios of
    completions, masks of completions or by entropy) from the log-probabilities of all tokens, with one more product of
    the head. Quantiles of ``top_entropy_quantile`` are those of a micro-batch on all ranks, as TRL's.

    The steps log TRL's metrics (``kl``, ``entropy``, ``clip_ratio/low_mean``, ...) as ``{train,val,test}_{name}``.

    Attributes:
        policy_options: The loss.
        temperature: That logits are divided by, the one that completions were sampled with.
        steps_per_generation: Micro-batches that ``num_items_in_batch`` is spread over; None is the number of an
            optimizer step.
    """

    policy_options: PolicyOptions = PolicyOptions()
    temperature: Positive = 1.0
    steps_per_generation: Count | None = None
    disable_dropout: bool = False
    _items = "tokens or completions"
    _reference_hint = (
        "set self.ref_model, train adapters of peft, or give batches with ref_per_token_logps, as beta is above 0"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = metric_names(self.policy_options)
        names += ["policy_loss"] * (self.policy_options.entropy_coef > 0)
        data_metrics = sorted(set(OF_DATA) - set(names))
        self._hidden_metrics.update(data_metrics)
        self._kinds = {name: metric_kind(name) for name in (*names, *data_metrics)} | {"num_tokens": "sum"}

    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        options = self.policy_options
        rows, policy, _ = read_completions(batch)
        if options.beta and (policy.ref_log_probs is None or self.reference not in ("auto", "columns")):
            if self.reference == "columns":
                raise ValueError("batch must have the key 'ref_per_token_logps' for reference='columns'")
            with self._reference_model() as model:
                policy = policy._replace(ref_log_probs=self._log_probs(rows, model))
        check_policy_batch(policy, options)
        coefficient = options.entropy_coef or None
        count: Tensor | float = num_items(policy.completions, options)
        item = "tokens" if options.counts_tokens else "sequences"
        if options.counts_tokens and batch.get("num_items_in_batch") is not None:
            count, item = self._share(batch["num_items_in_batch"]), "items"
        local = rows.to_context(self.context)
        logits, auxiliary = self.call_model(local.inputs, local.labels)
        scored: dict[str, Any] = {"temperature": self.temperature, "outputs": ("log_probs", "entropy")}
        scored["detach"] = ("entropy",) if coefficient is None else ()
        if is_token_local(policy, options) and (coefficient is None or item == "tokens"):
            objective = self._in_context(token_objective(policy, options, entropy_weight=coefficient), rows)
            total, scores = token_loss(logits, local.labels, objective, **scored)
            result, entropies = self._objective(scores, policy)
            terms = [Term(total * (1 if self.context is None else self.context.size), count, item)]
        else:
            scores = token_scores(logits, local.labels, **scored)
            result, entropies = self._objective(scores, policy)
            terms = [Term(result.total, count, item)]
            if coefficient is not None:
                num_entropies = self._num_entropies(policy.completions.mask)
                terms.append(Term(-coefficient * result.entropy, num_entropies, "entropies"))
        metrics = self._measured(rows, batch, policy, result, entropies)
        if coefficient is not None:
            metrics["policy_loss"] = Mean(result.total.detach(), count)
        return StepLoss(tuple(terms), metrics, auxiliary)

    def per_token_log_probs(self, batch: Mapping[str, Any], model: nn.Module | None = None) -> Tensor:
        """Log-probabilities of the completions' tokens under the policy, or another model, without gradient.

        With them as ``old_per_token_logps``, several optimizer steps can be made on the same completions.

        Args:
            batch: As for the steps; ``advantages`` may be missing.
            model: None is ``self.model``.

        Returns:
            ``[num_sequences, completion_len]`` for batches with ``completion_ids``, else in the shape of ``input_ids``,
            each at its token; 0 for tokens that are not scored.
        """
        if "advantages" not in batch:
            mask = batch.get("completion_mask")
            check_tensor("batch['completion_mask']", mask)
            batch = {**batch, "advantages": torch.zeros(cast(Tensor, mask).shape, device=cast(Tensor, mask).device)}
        rows, _, places = read_completions(batch)
        log_probs = F.pad(self._log_probs(rows, model)[:, :-1], (1, 0))  # to the token that is predicted
        if places is None:
            return log_probs
        apart = torch.zeros_like(log_probs).scatter(1, places, log_probs)
        return apart[:, batch["prompt_ids"].shape[1] :]

    def count_items(self, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        completions = read_completions(batch)[1].completions
        mask, items = completions.mask, batch.get("num_items_in_batch", 0.0)
        return {
            "sequences": completions.count,
            "tokens": mask.sum(),
            "items": self._share(items),
            "entropies": self._num_entropies(mask),
        }

    def _num_entropies(self, mask: Tensor) -> Tensor:
        """How many of this rank's tokens the entropy mask keeps: of those of one rank exactly, of several about."""
        return num_top_entropies(mask.sum(), self.policy_options.top_entropy_quantile)

    def metric_kinds(self) -> dict[str, str]:
        return dict(self._kinds)

    def _share(self, num_items: Tensor | float) -> Tensor | float:
        """The part of a generation batch's tokens that a micro-batch of one rank counts as."""
        if self._attached_trainer is None:
            return num_items
        num_replicas = self.trainer.world_size / (1 if self.context is None else self.context.size)
        steps = self.steps_per_generation or self.trainer.accumulate_grad_batches
        return num_items / (num_replicas * steps)

    def _objective(self, scores: TokenScores, policy: PolicyBatch) -> tuple[PolicyObjective, Tensor]:
        log_probs, entropies = self._whole(scores.log_probs), self._whole(scores.entropy)
        trainer = self._attached_trainer
        gather = None if trainer is None or trainer.world_size == 1 else self._gather
        return policy_objective(log_probs, entropies, policy, self.policy_options, gather=gather), entropies.detach()

    def _whole(self, values: Tensor | None) -> Tensor:
        """Whole rows of values of tokens, of which each rank has a part under context parallelism."""
        assert values is not None
        context = self.context
        if context is None:
            return values
        length = values.shape[1]
        before, after = context.rank * length, (context.size - 1 - context.rank) * length
        return self.sum_over_context(F.pad(values, (before, after)))

    def _in_context(
        self, objective: Callable[[TokenScores, Tensor], Tensor], rows: Rows
    ) -> Callable[[TokenScores, Tensor], Tensor]:
        """``objective``, which takes indices in whole rows, for indices in this rank's part of them."""
        context = self.context
        if context is None:
            return objective
        seq_len = rows.labels.shape[1]
        length, first = seq_len // context.size, context.rank * (seq_len // context.size)
        return lambda scores, index: objective(scores, index // length * seq_len + first + index % length)

    def _gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, each sequence's once, -1 for none."""
        if self.context is not None and self.context.rank:
            values = torch.full_like(values, -1)
        strategy = self.trainer.strategy
        number = torch.tensor(values.numel(), device=values.device)
        largest = int(cast(Tensor, strategy.reduce(number, reduce_op="max")))  # ranks' rows differ in length
        return strategy.all_gather(F.pad(values, (0, largest - values.numel()), value=-1.0)).flatten()

    def _log_probs(self, rows: Rows, model: nn.Module | None = None) -> Tensor:
        """Of each token, where it is predicted; without gradient."""
        local = rows.to_context(self.context)
        with torch.no_grad():
            logits, _ = self.call_model(local.inputs, local.labels, model)
            return self._whole(token_scores(logits, local.labels, temperature=self.temperature).log_probs)

    @property
    def needs_reference(self) -> bool:
        return self.policy_options.beta > 0

    def _measured(
        self, rows: Rows, batch: Mapping[str, Any], policy: PolicyBatch, result: PolicyObjective, entropies: Tensor
    ) -> dict[str, Measured]:
        is_terminated = None
        if ends := _end_of_sequence_ids(self.model):
            is_end = torch.stack([rows.labels == end for end in ends]).any(0)
            is_last = policy.completions.positions == policy.completions.spread(policy.completions.lengths)
            is_terminated = policy.completions.sum(is_end & is_last) > 0
        measured = policy_metrics(entropies, policy, result, self.policy_options, is_terminated)
        measured["num_tokens"] = rows.num_tokens / self._ranks_per_batch
        if isinstance(batch.get("rewards"), Tensor):
            measured |= reward_metrics(batch["rewards"], batch.get("group_ids"))
        self._hidden_metrics -= measured.keys()
        return measured


def _end_of_sequence_ids(model: nn.Module) -> list[int]:
    """The ids with which a Hugging Face model ends a text."""
    configs = (getattr(model, name, None) for name in ("generation_config", "config"))
    found: Any = next((ids for each in configs if (ids := getattr(each, "eos_token_id", None)) is not None), [])
    return [found] if isinstance(found, int) else list(found)
