"""Mixin of preference losses: pairs, triples, and completions with labels."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from liger_ops import IGNORE_INDEX, TokenScores
from liger_ops.arguments import check_path, check_shape, check_tensor, wrong_value
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.lazy.scores import token_loss, token_scores
from lightning_liger.losses.dpo import DPOOptions, PairLogProbs, PairLosses, PreferenceOptions, wpo_weights
from lightning_liger.losses.kto import KTOOptions, kl_estimate, kto_loss, reward_sums, running_delta
from lightning_liger.post_training.base import StepLoss, Term
from lightning_liger.post_training.metrics import Mean, Measured, mean_of
from lightning_liger.post_training.reference import (
    LigerReferenceMixin,
    ReferenceCache,
    every_batch,
    has_adapters,
    sequence_keys,
    weights_fingerprint,
)
from lightning_liger.post_training.rows import Rows, check_log_probs, read_rows
from lightning_liger.sequences.labels import shift_labels

_FINGERPRINT, _CACHE, _DELTA = "reference_fingerprint", "reference_log_probs", "running_delta"
MAX_UNIT_BYTES = 2**30  # of the logits of a unit, such as a pair, which are in memory at once
_MEASURED = ("entropy", "mean_logit", "correct")


class SequenceScores(NamedTuple):
    """Sums over the completion tokens of each sequence, ``[num_sequences]``, of which the first two are differentiable.

    ``log_probs`` are weighted as LD-DPO asks, ``nll`` is of all labels: for ORPO of the prompt too.
    """

    log_probs: Tensor
    nll: Tensor
    entropy: Tensor
    mean_logit: Tensor
    correct: Tensor
    log_sum_sq_probs: Tensor


class LigerPreferenceMixin(LigerReferenceMixin):
    """Training, validation and test steps of preference losses, whose logits are never materialized.

    List it before the base class, set the loss, and put the models into ``self.model`` and ``self.ref_model``::

        class DPO(LigerPreferenceMixin, L.LightningModule):
            preference_loss = DPOOptions(loss_type="sigmoid", beta=0.1)

            def configure_model(self):
                if getattr(self, "model", None) is None:
                    self.model = AutoLigerModelForCausalLM.from_pretrained(folder)
                    self.ref_model = AutoLigerModelForCausalLM.from_pretrained(folder)

    ``preference_loss`` is one of ``DPOOptions``, ``CPOOptions`` (also SimPO and AlphaPO), ``ORPOOptions``,
    ``TPOOptions`` and ``KTOOptions`` (also APO-zero for labels and BCO); set it in the class or before
    ``super().__init__()``.

    Batches of pairs have ``input_ids``, ``completion_mask`` and ``attention_mask``, ``[2B, seq_len]``: B chosen
    sequences, then the B rejected ones in the same order, then B references for ``TPOOptions``. Packed batches have one
    or more rows of several sequences, with ``position_ids`` that start again with each, and ``sequence_ids``, which
    number them in the order above. Batches of ``KTOOptions`` have B sequences and ``label``, ``[B]`` of bool; for
    ``"kto"`` also mismatched pairs with the prefix ``KL_``. The policy is called once for all sequences of a batch.

    The reference's log-probabilities come from ``ref_model``; from the policy with its peft adapters off (or with one
    that is named ``"ref"``); or from the batch: ``ref_chosen_logps`` and ``ref_rejected_logps`` (for KTO ``ref_logps``
    and ``ref_KL_logps``), ``[B]``, summed over tokens. With ``precompute_ref_log_probs = True`` all training and
    validation data are passed through the reference before training, and without ``ref_model`` or adapters it is the
    policy as it is then.

    The loss does not depend on how pairs were split over micro-batches and ranks, see
    :class:`~lightning_liger.post_training.base.LigerPostTrainingMixin`, except where it is defined by a batch: ``aot``
    sorts the pairs of a micro-batch, and KTO's ``kl`` is that of the micro-batches of all ranks. Metrics are logged as
    ``{train,val,test}_{name}`` by the names of TRL: ``loss``, ``rewards/chosen``, ``rewards/rejected``,
    ``rewards/accuracies``, ``rewards/margins``, ``logps/chosen``, ``logps/rejected``, ``logits/chosen``,
    ``logits/rejected`` (mean logits of completion tokens), ``entropy``, ``mean_token_accuracy`` (of chosen tokens),
    ``num_tokens``, and ``nll_loss``, ``log_odds_ratio``, ``log_odds_chosen``, ``kl`` where the loss has them.

    Attributes:
        preference_loss: The options of the loss.
        precompute_ref_log_probs: Whether the reference's log-probabilities are computed for all data before training.
            Finished modules make no copy of the model then.
        ref_log_probs_folder: Where they are kept for runs with the same weights, which compute those of new data only;
            None for the checkpoint.
    """

    preference_loss: PreferenceOptions = DPOOptions()
    precompute_ref_log_probs: bool = False
    ref_log_probs_folder: str | None = None
    _items = "pairs"
    _reference_hint = (
        "set self.ref_model, train adapters of peft, give batches with ref_chosen_logps and ref_rejected_logps (for KTO"
        " ref_logps), or set precompute_ref_log_probs=True"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reference_cache: ReferenceCache | None = None
        self._is_precomputing = False
        self._reward_sums = torch.zeros(2, 2, dtype=torch.float64)  # of BCO, of all steps so far

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_path("ref_log_probs_folder", self.ref_log_probs_folder, optional=True)
        if self.precompute_ref_log_probs and self.sync_ref_model:
            raise wrong_value("sync_ref_model", "False with precompute_ref_log_probs=True", True)
        if self.ref_log_probs_folder is not None and not self.precompute_ref_log_probs:
            expected = "None without precompute_ref_log_probs=True"
            raise wrong_value("ref_log_probs_folder", expected, self.ref_log_probs_folder)

    # The reference

    @property
    def needs_reference(self) -> bool:
        return self.preference_loss.needs_reference

    def _without_reference(self) -> dict[str, Any]:
        return {**super()._without_reference(), "precompute_ref_log_probs": False}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        # Lightning takes the hook for a mistake next to a LightningDataModule without one.
        warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in `LightningModule`")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.precompute_ref_log_probs:
            self._precompute()

    def _reference_kind(self) -> str:
        """``"model"``, ``"adapters"`` or ``"policy"``, of the log-probabilities that are computed here."""
        has_other = self.ref_model is not None or has_adapters(self.model)
        if self._is_precomputing and (self.reference == "columns" or (self.reference == "auto" and not has_other)):
            return "policy"
        if self.precompute_ref_log_probs and self.reference in ("auto", "columns") and not has_other:
            raise ValueError(
                f"{type(self).__name__} has no reference for this batch: precompute_ref_log_probs=True computes the"
                " log-probabilities of the training and validation data when fit begins, from the policy as it is then."
                " Call fit before validate and test, with all their data, or set precompute_ref_log_probs=False"
            )
        return super()._reference_kind()

    @torch.no_grad()
    def _log_prob_sums(self, rows: Rows, model: nn.Module) -> Tensor:
        """The sums of log-probabilities under a model, ``[num_sequences]``."""
        local = rows.to_context(self.context)
        logits, _ = self.call_model(local.inputs, local.labels, model)
        log_probs = cast(Tensor, token_scores(logits, local.labels).log_probs)
        return self.sum_over_context(local.sums(log_probs * local.extras["weights"]))

    def _compute_reference(self, rows: Rows) -> Tensor:
        with self._reference_model() as model:
            return self._log_prob_sums(rows, model)

    def _reference_of(self, batch: Mapping[str, Any], rows: Rows, columns: Sequence[str]) -> Tensor:
        """The reference's sums: those of the batch, ``columns`` in order, or computed ones."""
        given = [key for key in columns if batch.get(key) is not None]
        if self.reference == "columns" or (self.reference == "auto" and given):
            if len(given) < len(columns):
                raise ValueError(
                    f"batch must have all of the keys {list(columns)} for reference='columns', got {sorted(batch)};"
                    " with precompute_ref_log_probs=True they are computed before training"
                )
            for key in columns:
                check_log_probs(f"batch[{key!r}]", batch[key])
                shape = (rows.num_sequences // len(columns),)
                check_shape(f"batch[{key!r}]", batch[key], shape, "one log-probability for each sequence")
            return torch.cat([batch[key] for key in columns]).float().detach()
        return self._compute_reference(rows)

    def _columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of stored log-probabilities, by the prefix of the keys of their sequences."""
        if not self.preference_loss.is_labelled:
            return {"": ("ref_chosen_logps", "ref_rejected_logps")}
        needs_kl = cast(KTOOptions, self.preference_loss).needs_kl
        return {"": ("ref_logps",), **({"KL_": ("ref_KL_logps",)} if needs_kl else {})}

    def _precompute(self) -> None:
        """Passes all data through the reference, and keeps its log-probabilities."""
        self._is_precomputing = True
        try:
            kind, strategy = self._reference_kind(), self.trainer.strategy
            cache = self._reference_cache
            is_resumed = cache is not None and kind == "policy"
            if not is_resumed:
                model = cast(nn.Module, self.ref_model) if kind == "model" else self.model
                settings = (kind, getattr(self.preference_loss, "ld_alpha", None))
                fingerprint = weights_fingerprint(model, settings, without_adapters=kind == "adapters")
                if cache is None or cache.fingerprint != fingerprint:
                    cache = ReferenceCache(self.ref_log_probs_folder, fingerprint)
            assert cache is not None
            for batch in every_batch(self.trainer):
                for prefix in self._columns():
                    read_rows(batch, prefix)  # raises for keys that are missing
                keys = {prefix: sequence_keys(batch, prefix) for prefix in self._columns()}
                is_new = any(key not in cache for found in keys.values() for key in found)
                if not strategy.reduce_boolean_decision(is_new, all=False):
                    continue
                if is_resumed:
                    raise ValueError(
                        "the data, and ref_log_probs_folder, must be those of the run that is resumed: the policy is"
                        f" no longer its own reference, and {cache.path or 'the checkpoint'} lacks some sequences"
                    )
                moved = strategy.batch_to_device(batch, dataloader_idx=0)
                # Through the strategy, whose engine must see that its model is called.
                with torch.no_grad():
                    found = cast(dict[str, Tensor], strategy.validation_step(moved, 0))
                for prefix, log_probs in found.items():
                    cache.update(zip(keys[prefix], log_probs.tolist(), strict=True))
            cache.share()
            self._reference_cache = cache
            rank_zero_info(f"Computed the reference log-probabilities of {len(cache)} sequences")
        finally:
            self._is_precomputing = False

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self._is_precomputing:
            return {prefix: self._compute_reference(self._rows(batch, prefix)) for prefix in self._columns()}
        return super().validation_step(batch, batch_idx, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._with_stored(super().on_before_batch_transfer(batch, dataloader_idx))

    def _prepare_stage(self) -> None:
        super()._prepare_stage()
        if self.precompute_ref_log_probs or getattr(self.preference_loss, "loss_type", None) == "bco":
            self._require_super(LigerPreferenceMixin, "on_save_checkpoint", "on_load_checkpoint")

    def _step(self, stage: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int | None]:
        if stage == "train" and self.precompute_ref_log_probs and self._reference_cache is None:
            raise RuntimeError(
                f"{type(self).__name__}.on_fit_start must call super().on_fit_start(), which computes the reference"
                " log-probabilities of precompute_ref_log_probs=True, got none"
            )
        # Again, as a hook of the data module takes the place of that of the module.
        return super()._step(stage, self._with_stored(batch))

    def _with_stored(self, batch: Any) -> Any:
        """A batch with the log-probabilities that were computed before training; raises for NaN and infinite ones."""
        cache, added = None if self._is_precomputing else self._reference_cache, dict[str, Any]()
        for prefix, columns in self._columns().items() if isinstance(batch, Mapping) else ():
            for name in columns:
                value = batch.get(name)
                if isinstance(value, Tensor) and value.device.type == "cpu" and not value.isfinite().all():
                    wrong = value[~value.isfinite()].tolist()
                    raise wrong_value(f"batch[{name!r}]", "finite log-probabilities", wrong)
            if cache is None or batch.get(columns[0]) is not None or batch.get(prefix + "input_ids") is None:
                continue
            keys = sequence_keys(batch, prefix)
            if self.trainer.state.fn != "fit" and any(key not in cache for key in keys):
                continue  # data for testing, which was not seen before training
            found = cache.find(keys).to(batch[prefix + "input_ids"].device)
            added |= dict(zip(columns, found.chunk(len(columns)), strict=True))
        return {**batch, **added} if added else batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.preference_loss.is_labelled:
            checkpoint[_DELTA] = self._reward_sums
        if (cache := self._reference_cache) is not None:
            checkpoint[_FINGERPRINT] = cache.fingerprint
            if cache.path is None:
                checkpoint[_CACHE] = cache.tensors()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._reward_sums = checkpoint.get(_DELTA, self._reward_sums)
        self._reference_cache = None
        if _FINGERPRINT in checkpoint:
            self._reference_cache = ReferenceCache(self.ref_log_probs_folder, checkpoint[_FINGERPRINT])
            self._reference_cache.load(checkpoint.get(_CACHE, {}))

    # Sequences

    def _rows(self, batch: Mapping[str, Any], prefix: str = "") -> Rows:
        """The sequences of a batch with ``weights``, the weight of each token in its sequence's log-probability."""
        rows, options = read_rows(batch, prefix), self.preference_loss
        if rows.num_sequences % options.num_sequences:
            triples = "chosen, rejected and reference sequences (for pairs, tpo_alpha=0)"
            names = triples if options.num_sequences == 3 else "chosen and rejected sequences"
            raise ValueError(f"batch must hold as many {names}, got {rows.num_sequences} sequences in all")
        completions, ld_alpha = rows.completions, getattr(options, "ld_alpha", None)
        weights = completions.mask.float() if ld_alpha is None else completions.length_desensitized(ld_alpha)
        if options.scores_prompts:
            rows = rows._replace(labels=_with_prompts_of_chosen(rows))
        return rows._replace(extras={"weights": weights, "completion": completions.mask})

    def _num_tokens(self, rows: Rows) -> Tensor:
        return rows.sums(rows.extras["completion"])

    def _num_nll_tokens(self, rows: Rows) -> Tensor:
        """The number of tokens over which the negative log-likelihood is averaged."""
        options = self.preference_loss
        return rows.completions.lengths.chunk(options.num_sequences)[options.nll_part or 0].sum()

    def _score(
        self, rows: Rows, losses: Callable[[SequenceScores], Tensor] | None = None
    ) -> tuple[SequenceScores, Tensor | None, Tensor | None]:
        """Calls the policy, and returns the sums over sequences and the losses that the model adds.

        And the sum of ``losses``, those of examples which depend on their own sequences only, if it was taken in the
        loop over the head: then the sums over sequences have no gradient.
        """
        options = self.preference_loss
        is_weighted = getattr(options, "use_weighting", False)
        outputs, detach = ("log_probs", *_MEASURED, *(("log_sum_sq_probs",) if is_weighted else ())), _MEASURED[:2]
        local = rows.to_context(self.context)
        logits, auxiliary = self.call_model(local.inputs, local.labels)
        num_examples = rows.num_sequences // options.num_sequences
        most = rows.labels.numel() if rows.sequence_ids is not None else options.num_sequences * rows.labels.shape[1]
        if losses is None or self.context is not None or not can_take_units(logits, most):
            scores = token_scores(logits, local.labels, outputs=outputs, detach=detach)
            return self._sums(scores, local), auxiliary, None
        units = _sequence_numbers(rows) % num_examples

        total, scores = unit_loss(
            logits, rows.labels, units, lambda scores: losses(self._sums(scores, rows)), outputs=outputs, detach=detach
        )
        return self._sums(scores, rows), auxiliary, total

    def _sums(self, scores: TokenScores, local: Rows) -> SequenceScores:
        completion = local.extras["completion"]
        log_probs = cast(Tensor, scores.log_probs)
        others = (scores.entropy, scores.mean_logit, scores.correct, scores.log_sum_sq_probs)
        values = [log_probs * local.extras["weights"], -log_probs]
        values += [log_probs.new_zeros(()) if each is None else each.detach() * completion for each in others]
        sums = [local.sums(each) if each.ndim else each.expand(local.num_sequences) for each in values]
        return SequenceScores(*self.sum_over_context(torch.stack(sums)).unbind())

    # The loss

    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        rows = self._rows(batch)
        if self.preference_loss.is_labelled:
            return self._labeled_loss(stage, batch, rows)
        reference = None
        if self.needs_reference:  # first, when the policy has not stored anything for backward
            reference = self._reference_of(batch, rows, self._columns()[""])
        num_tokens = self._num_tokens(rows)
        pair_losses = partial(self._pair_losses, num_tokens=num_tokens, reference=reference)
        is_apart = self.preference_loss.is_of_single_examples
        scores, auxiliary, total = self._score(rows, (lambda sums: pair_losses(sums).losses) if is_apart else None)
        result = pair_losses(scores)
        num_pairs = len(result.losses)
        terms = [Term(result.losses.sum() if total is None else total, num_pairs, "pairs")]
        num_nll_tokens = self._num_nll_tokens(rows)
        if result.nll is not None:
            terms.append(Term(result.nll.sum(), num_nll_tokens, "tokens"))
        metrics: dict[str, Measured] = {name: mean_of(vector) for name, vector in result.metrics.items()}
        part = torch.arange(rows.num_sequences, device=num_tokens.device) // num_pairs
        metrics |= self._token_metrics(rows, scores, num_tokens, part == 0, part == 1)
        if (nll_part := self.preference_loss.nll_part) is not None:
            nll = scores.nll.detach().chunk(self.preference_loss.num_sequences)[nll_part]
            metrics["nll_loss"] = Mean(nll.sum(), num_nll_tokens)
        return StepLoss(tuple(terms), metrics, auxiliary)

    def _pair_losses(self, scores: SequenceScores, num_tokens: Tensor, reference: Tensor | None) -> PairLosses:
        options, parts = self.preference_loss, self.preference_loss.num_sequences
        chosen, rejected, *gold = scores.log_probs.chunk(parts)
        num_chosen, num_rejected, *_ = num_tokens.chunk(parts)
        pairs = PairLogProbs(chosen, rejected, num_chosen, num_rejected, chosen_nll=scores.nll.chunk(parts)[0])
        pairs = pairs._replace(gold=gold[0] if gold else None)
        if reference is not None:
            ref_chosen, ref_rejected = reference.chunk(2)
            pairs = pairs._replace(ref_chosen=ref_chosen, ref_rejected=ref_rejected)
        if getattr(options, "use_weighting", False):
            weight = wpo_weights(-scores.nll, scores.log_sum_sq_probs, num_chosen, num_rejected)
            pairs = pairs._replace(weight=weight)
        return options.losses(pairs)

    def _labeled_loss(self, stage: str, batch: Mapping[str, Any], rows: Rows) -> StepLoss:
        options = cast(KTOOptions, self.preference_loss)
        check_tensor("batch['label']", batch.get("label"))
        check_shape("batch['label']", batch["label"], (rows.num_sequences,), "one label for each sequence")
        labels = batch["label"].bool()
        reference = self._reference_of(batch, rows, ("ref_logps",))
        baseline = self._kl(batch) if options.needs_kl else torch.zeros((), device=labels.device)
        scores, auxiliary, _ = self._score(rows)
        if options.loss_type == "bco":
            if stage == "train":
                sums = reward_sums(options.beta * (scores.log_probs - reference), labels)
                self._reward_sums = self._reward_sums.to(sums.device) + self._sum_over_ranks(sums).double()
            baseline = running_delta(self._reward_sums).to(labels.device)
        losses, rewards = kto_loss(scores.log_probs, reference, labels, options, baseline=baseline)
        metrics: dict[str, Any] = {}
        for name, mask in (("chosen", labels), ("rejected", ~labels)):
            metrics |= {f"rewards/{name}": mean_of(rewards, mask), f"logps/{name}": mean_of(scores.log_probs, mask)}
        metrics["rewards/margins"] = metrics["rewards/chosen"], metrics["rewards/rejected"]
        if options.needs_kl:
            metrics["kl"] = mean_of(baseline[None])
        metrics |= self._token_metrics(rows, scores, self._num_tokens(rows), labels, ~labels)
        return StepLoss((Term(losses.sum(), rows.num_sequences, "sequences"),), metrics, auxiliary)

    def _kl(self, batch: Mapping[str, Any]) -> Tensor:
        """KTO's estimate of the policy's divergence, from the mismatched pairs of all ranks."""
        rows = self._rows(batch, "KL_")
        reference = self._reference_of(batch, rows, ("ref_KL_logps",))
        difference = self._log_prob_sums(rows, self.model) - reference
        is_scored = self._num_tokens(rows) > 0
        total = torch.where(is_scored, difference, 0).sum()
        return kl_estimate(*self._sum_over_ranks(torch.stack((total, is_scored.sum().to(total.dtype)))))

    def count_items(self, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        rows = self._rows(batch)
        return {"pairs": rows.num_sequences / self.preference_loss.num_sequences, "tokens": self._num_nll_tokens(rows)}

    # Metrics

    def metric_kinds(self) -> dict[str, str]:
        options = self.preference_loss
        names = (*options.metric_names, "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy")
        kinds = dict.fromkeys(names, "mean") | {"num_tokens": "sum"}
        return kinds | ({"rewards/margins": "difference"} if options.is_labelled else {})

    def _token_metrics(
        self, rows: Rows, scores: SequenceScores, num_tokens: Tensor, is_chosen: Tensor, is_rejected: Tensor
    ) -> dict[str, Measured]:
        def mean(values: Tensor, where: Tensor) -> Mean:
            return Mean(torch.where(where, values.detach(), 0).sum(), torch.where(where, num_tokens, 0).sum())

        return {
            "entropy": mean(scores.entropy, is_chosen | is_rejected),
            "logits/chosen": mean(scores.mean_logit, is_chosen),
            "logits/rejected": mean(scores.mean_logit, is_rejected),
            "mean_token_accuracy": mean(scores.correct, is_chosen),
            "num_tokens": rows.num_tokens / self._ranks_per_batch,
        }


def _sequence_numbers(rows: Rows) -> Tensor:
    """The sequence of each token, ``[rows, seq_len]``; negative for padding of packed rows."""
    if rows.sequence_ids is not None:
        return rows.sequence_ids
    return torch.arange(len(rows.labels), device=rows.labels.device)[:, None].expand_as(rows.labels)


def _with_prompts_of_chosen(rows: Rows) -> Tensor:
    """The labels of all tokens of chosen sequences, prompts included, and of the completions of the others."""
    ids, numbers = rows.inputs["input_ids"].long(), _sequence_numbers(rows)
    attention = rows.inputs.get("attention_mask")
    is_real = ids != IGNORE_INDEX if attention is None else attention.bool()
    everything = shift_labels(ids.masked_fill(~is_real, IGNORE_INDEX), rows.inputs.get("position_ids"))
    is_last = torch.ones_like(is_real)
    is_last[..., :-1] = numbers.diff(dim=-1) != 0
    is_chosen = is_real & (numbers >= 0) & (numbers < rows.num_sequences // 2) & ~is_last
    return torch.where(is_chosen, everything, rows.labels)


def can_take_units(logits: Tensor, max_unit_tokens: int) -> bool:
    """Whether it saves a product of the head's size to take units, of at most so many tokens, with all their logits."""
    if not torch.is_grad_enabled() or not isinstance(logits, LazyLogits):
        return False
    unit_bytes = max_unit_tokens * logits.shape[-1] * logits.element_size()
    return logits.head.requires_grad and unit_bytes <= MAX_UNIT_BYTES


def unit_loss(
    logits: Tensor,
    labels: Tensor,
    units: Tensor,
    losses: Callable[[TokenScores], Tensor],
    *,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
) -> tuple[Tensor, TokenScores]:
    """The sum of a loss over units of tokens, differentiable; and the scores of all tokens, which are not.

    ``units`` is the unit of each token, from 0. ``losses`` gets the ``outputs`` of all tokens, those in ``detach``
    without gradient, and returns the losses of all units, each of which depends on its own tokens only. It is called
    for some units at a time; the scores of the others' tokens are 0 then.
    """

    def chunk_losses(scores: TokenScores, index: Tensor) -> Tensor:
        whole = (
            None if each is None else each.new_zeros(labels.numel()).index_put((index,), each).view(labels.shape)
            for each in scores
        )
        total = losses(TokenScores(*whole)).sum()
        return torch.cat([total[None], total.new_zeros(len(index) - 1)])  # which token has it does not matter

    # Its gradient is that of the sum, but its value counts units with scores of 0.
    total, scores = token_loss(logits, labels, chunk_losses, units=units, outputs=outputs, detach=detach)
    with torch.no_grad():
        value = losses(scores).sum()
    return value.to(total.dtype) + (total - total.detach()), scores
