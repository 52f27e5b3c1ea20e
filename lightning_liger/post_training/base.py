"""Base of the mixins of post-training: losses of whole steps whose summands are means over different items."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_ops.arguments import wrong_type, wrong_value
from lightning_liger.lazy.logits import LazyLogits, as_lazy, lazy_logits
from lightning_liger.losses.options import check_declared, declared, is_options
from lightning_liger.post_training.metrics import KINDS, Mean, Measured, SumOfMeans
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.training.language_model import LanguageModel
from lightning_liger.training.metrics import RunningMetric, as_count
from lightning_liger.training.protocol import engine_of
from lightning_liger.training.step_mean import sum_over_ranks
from lightning_liger.training.steps import LigerStepMixin
from lightning_liger.training.window import upcoming_batches


class Term(NamedTuple):
    """One summand of a loss: a sum over items, to be divided by their number in the whole optimizer step."""

    total: Tensor
    """The sum over this batch's items, weights included, a differentiable scalar."""
    count: Tensor | float  # type: ignore[assignment]  # hides the method of tuples
    """The number of items in this batch."""
    item: str = "sequences"
    """What ``count`` counts. A loss whose terms count different items has to implement ``count_items``."""
    is_whole: bool = True
    """With context parallelism: the sum is over whole sequences, the same on all ranks that share them, and not over
    this rank's tokens."""


class StepLoss(NamedTuple):
    """The loss of one batch and what is measured on it."""

    terms: tuple[Term, ...]
    """Their means are added. The first one's items weight the model's auxiliary losses."""
    metrics: Mapping[str, Measured] = {}
    """The batch's part of each metric in ``metric_kinds``; a missing one is left out."""
    auxiliary: Tensor | None = None
    """Losses that the model itself adds, such as a router's, a differentiable scalar."""


class LigerPostTrainingMixin(LigerStepMixin):
    """Training, validation and test steps of a loss that is a sum of means over pairs, sequences or tokens.

    Subclasses implement :meth:`step_loss`. The loss and its gradients are those of the whole optimizer step: a mean
    over pairs is over the pairs of all its micro-batches and ranks, a mean over tokens over all their tokens, however
    they were split. With ``loss_normalization = "micro_batch"`` they are means of the micro-batches' means.

    The loss of a batch is weighted by its share of the step's items where it is differentiated, as in ``LigerLMMixin``.
    One whose terms count different items is divided by their numbers in the whole step, which the ranks add up when its
    first micro-batch arrives: the batches that follow are looked at ahead of time, see :meth:`count_items`, and none
    may be skipped. Under DeepSpeed, a step that ends in the next epoch cannot be looked at as a whole.

    Each stage logs its loss and metrics as ``{train,val,test}_{name}``, exact over batches and ranks, and training
    steps also as ``train_{name}_step``.
    """

    _items = "sequences"
    keeps_float_inputs = True
    """Strategies of this package do not round log-probabilities and rewards in batches to half precision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_arguments()
        self._hidden_metrics = {"aux_loss"}
        """Metrics that the data or the model do not have, which are not logged; the same on all ranks."""
        self._other_models: dict[nn.Module, LanguageModel] = {}
        self._item_totals: Tensor | None = None
        self._num_counted = self._next_index = 0
        self._first_batch = self._last_batch = -1
        self._step_sums: Tensor | None = None

    @classmethod
    def _attribute_arguments(cls) -> list[str]:
        """The attributes with a default that our mixins declare, which finished modules take as arguments."""
        ours = [base for base in cls.__mro__ if base.__module__.startswith(__package__)]
        names = dict.fromkeys(name for base in ours for name in inspect.get_annotations(base) if hasattr(cls, name))
        return [name for name in names if not name.startswith("_") and not is_options(declared(cls)[name])]

    def _check_arguments(self) -> None:
        """Raises for options and attributes that are wrong, or do not fit together."""
        options = [name for name, hint in declared(type(self)).items() if is_options(hint)]
        check_declared(self, (*options, *self._attribute_arguments()))
        if (loss_type := getattr(self, "loss_type", "nll")) != "nll":
            raise wrong_value("loss_type", "'nll' in a module with another loss than LigerCausalLM's", loss_type)

    # To be implemented

    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        """The loss of a batch.

        Args:
            stage: ``"train"``, ``"val"`` or ``"test"``.
            batch: As the data loader gives it, on the module's device.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step_loss(stage, batch)")

    def metric_kinds(self) -> dict[str, str]:
        """Each metric of :meth:`step_loss` with its kind: ``"mean"``, ``"max"``, ``"min"`` or ``"sum"``.

        ``loss`` and ``aux_loss`` need not be listed. The same on all ranks, whatever their batches hold.
        """
        return {}

    def count_items(self, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        """The number of items of each name in a batch of the data loader, wherever its tensors are.

        Called only for losses whose terms count different items, also for batches not moved to the device yet.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} must implement count_items(batch), as its loss has several kinds of items")

    def call_model(
        self, inputs: Mapping[str, Any], labels: Tensor, model: nn.Module | None = None
    ) -> tuple[LazyLogits | Tensor, Tensor | None]:
        """Calls ``self.model``, or another one, such as a reference.

        ``inputs`` are all that the model takes besides ``labels``, ``[batch_size, seq_len]``, one for each token.

        Returns:
            The logits, lazy if the head was patched, ``[batch_size, seq_len, vocab_size]``, and the sum of the losses
            that the model adds to cross entropy, None if it adds none.
        """
        seen = self._seen(model)
        with lazy_logits():
            output, auxiliary, _ = seen(inputs, labels)
            # peft's prompt learning adds tokens in front
            logits = as_lazy(output.logits)
            return logits if seen.returns_tokens else logits[:, -labels.shape[1] :], auxiliary

    @property
    def context(self) -> ContextParallel | None:
        """The group of ranks that share each sequence, if they do."""
        return None if self._attached_trainer is None else engine_of(self.trainer).context_parallel

    @property
    def _ranks_per_batch(self) -> int:
        """How many ranks get each batch, because they share its sequences or the weights."""
        if self._attached_trainer is None:
            return 1
        num_ranks: int = self.trainer.world_size
        return num_ranks // (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", num_ranks)

    def sum_over_context(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share sequences, differentiable; the tensor itself if ranks do not share any."""
        if self.context is None:
            return tensor
        from torch.distributed.nn.functional import all_reduce  # whose package makes files when it is imported

        return cast(Tensor, all_reduce(tensor, group=self.context.group))

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor if self._attached_trainer is None else sum_over_ranks(self.trainer, tensor)

    # The steps

    def _step(self, stage: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int | None]:
        if not isinstance(batch, Mapping):
            raise wrong_type("batch", "a mapping of names to tensors", batch)
        return self._mean(stage, self.step_loss(stage, batch))

    @torch.compiler.disable  # counts batches, and Lightning inspects the signatures of hooks
    def _mean(self, stage: str, result: StepLoss) -> tuple[Tensor, Tensor, int | None]:
        """The sum of the terms' means, with the number of the first one's items; logs metrics."""
        terms = list(result.terms)
        totals = [term.total / self._num_shares(term) for term in terms]
        sizes = [as_count(term.count, term.total.device) / self._num_shares(term) for term in terms]
        if result.auxiliary is not None:
            terms, sizes = [*terms, terms[0]], [*sizes, sizes[0]]
            totals.append(result.auxiliary * sizes[0].to(result.auxiliary.dtype))
        counts, num_batches = torch.stack(sizes), None
        self._measure(stage, result, torch.stack((torch.stack(totals).detach().double(), counts), 1))
        size = counts[0]
        if len({term.item for term in terms}) == 1:
            counts = size.expand_as(counts)
        elif stage == "train" and self._normalizes_steps():
            counts, num_batches = self._count_step(counts, terms)
            size = torch.ones_like(size)
        counts = counts.masked_fill(counts == 0, 1)  # a term without items is 0
        means = [total / number.to(total.dtype) for total, number in zip(totals, counts, strict=True)]
        return torch.stack(means).sum(), size, num_batches

    def _num_shares(self, term: Term) -> int:
        """On how many ranks the term is the same."""
        return 1 if self.context is None or not term.is_whole else self.context.size

    def _count_step(self, own: Tensor, terms: list[Term]) -> tuple[Tensor, int]:
        """The numbers of items in an average batch of the optimizer step, ``[number of terms]``, and of its batches."""
        index, batch = engine_of(self.trainer).micro_batch_index(), self.trainer.fit_loop.epoch_loop.total_batch_idx
        is_again = batch == self._last_batch
        if is_again and self.trainer.accumulate_grad_batches > 1:
            raise RuntimeError(
                f"{type(self).__name__}.training_step must be called once for a batch with accumulate_grad_batches: its"
                " loss has several kinds of items, which are counted for whole batches"
            )
        self._last_batch = batch
        if batch - index != self._first_batch or is_again:
            self._first_batch, self._item_totals, self._num_counted, self._next_index = batch - index, None, 0, 0
        if index >= self._next_index:
            ahead = upcoming_batches(self.trainer, self.trainer.accumulate_grad_batches - index - 1)
            counts = [self.count_items(upcoming) for upcoming in ahead]
            if counts:
                rows = [[float(each[term.item]) / self._num_shares(term) for term in terms] for each in counts]
                own = own + torch.tensor(rows, dtype=torch.float64).sum(0).to(own.device)
            totals = self._sum_over_ranks(own)
            self._item_totals = totals if self._item_totals is None else self._item_totals + totals
            self._num_counted += 1 + len(ahead)
            self._next_index = index + 1 + len(ahead)
        return cast(Tensor, self._item_totals) / (self._num_counted * self.trainer.world_size), self._num_counted

    # Metrics

    def _make_metrics(self) -> dict[str, RunningMetric]:
        kinds = {**self.metric_kinds(), "aux_loss": "mean"}
        return {"loss": SumOfMeans()} | {name: KINDS[kind]() for name, kind in kinds.items()}

    def on_fit_start(self) -> None:
        super().on_fit_start()
        unused = [part for part in self.modules() if not part.training]
        if unused and not any(p.requires_grad for part in unused for p in part.parameters(recurse=False)):
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # references, teachers

    def _measure(self, stage: str, result: StepLoss, parts: Tensor) -> None:
        """Adds a batch to the stage's metrics and logs them."""
        if self._attached_trainer is None:
            return
        measured = dict(result.metrics)
        self._hidden_metrics.add("aux_loss")
        if result.auxiliary is not None:
            measured["aux_loss"] = Mean(*parts[-1])
            self._hidden_metrics.discard("aux_loss")
        metrics, _ = self._stage_metrics(stage)
        if unknown := sorted(measured.keys() - set(metrics)):
            raise ValueError(f"metrics of step_loss must be listed in metric_kinds, got {unknown}")
        metrics["loss"].update(parts)
        for name, value in measured.items():
            metrics[name].update(*(value if isinstance(value, tuple) else (value,)))
        self._log_metrics(stage, [name for name in metrics if name not in self._hidden_metrics])
        if stage == "train":
            self._add_step_sums(measured, parts.device)

    def _step_names(self) -> list[str]:
        """The metrics that are logged for each training step."""
        return [*(name for name, kind in self.metric_kinds().items() if kind in ("mean", "sum")), "aux_loss"]

    def _add_step_sums(self, measured: Mapping[str, Measured], device: torch.device) -> None:
        rows = []
        for name in self._step_names():
            value: Any = measured.get(name, (0.0, 0.0))
            row = value if isinstance(value, tuple) else (value, 1.0)
            rows.append(torch.stack([as_count(part, device) for part in row]))
        sums = torch.stack(rows)
        is_first = engine_of(self.trainer).micro_batch_index() == 0
        self._step_sums = sums if self._step_sums is None or is_first else self._step_sums + sums

    def _log_step(self, loss: Tensor) -> None:
        super()._log_step(loss)
        if self._step_sums is None:
            return
        sums, self._step_sums = self._step_sums, None
        if self._normalizes_steps():
            sums = self._sum_over_ranks(sums)
        kinds = self.metric_kinds()
        for name, (total, count) in zip(self._step_names(), sums, strict=True):
            if name not in self._hidden_metrics:
                self.log(f"train_{name}_step", total if kinds.get(name) == "sum" else total / count)

    def _seen(self, model: nn.Module | None) -> LanguageModel:
        if model is None or model is self.model:
            return self._seen_model()
        if model not in self._other_models:
            self._other_models[model] = LanguageModel(model)
        return self._other_models[model]
