"""Base of the mixins whose loss does not depend on how a step was split over micro-batches and ranks."""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from liger_ops.arguments import check_choice, wrong_type
from lightning_liger.training.language_model import LanguageModel
from lightning_liger.training.metrics import RunningMetric, ShownLoss
from lightning_liger.training.protocol import engine_of
from lightning_liger.training.step_mean import StepMean

if TYPE_CHECKING:
    _Module = L.LightningModule
else:
    _Module = object

_LOSS = "train_loss_step"


class LigerStepMixin(_Module):
    """Hooks that make gradients those of the mean over a whole optimizer step, see :mod:`.step_mean`."""

    model: nn.Module
    loss_normalization: str = "tokens"
    _items = "tokens"
    _labels: tuple[str, ...] = ("next",)
    """The meanings of labels, as :class:`~.language_model.LanguageModel` names them, that the steps can train on."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        after = itertools.dropwhile(lambda base: base is not L.LightningModule, cls.__mro__)
        if late := [base.__name__ for base in after if issubclass(base, LigerStepMixin)]:
            raise TypeError(
                f"{cls.__name__} must list {late[0]} before LightningModule:"
                f" class {cls.__name__}({late[0]}, L.LightningModule)"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.loss_normalization == "step":
            warnings.warn("loss_normalization='step' was renamed to 'tokens'", FutureWarning, stacklevel=2)
            self.loss_normalization = "tokens"
        check_choice("loss_normalization", self.loss_normalization, ("tokens", "micro_batch"))
        self._step_mean = StepMean()
        self._language_model: LanguageModel | None = None
        self._has_begun = False
        self._former_model: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
        self.step_metrics, self.shown_loss = nn.ModuleDict(), ShownLoss()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "model":
                raise
            raise AttributeError(
                f"{type(self).__name__} has no self.model yet: set it in __init__, or in configure_model, which"
                " Lightning calls when fit, validate, test or predict begins; call that yourself to have it earlier"
            ) from None

    @property
    def trainer(self) -> L.Trainer:
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        L.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if isinstance(trainer, L.Trainer):  # here, as users override every hook without super()
            _follow_steps(trainer.precision_plugin)
            model = getattr(self, "model", None)
            self._former_model, self._has_begun = () if model is None else (model,), False

    @property
    def _attached_trainer(self) -> L.Trainer | None:
        """The Trainer; None outside of one, as with Fabric."""
        try:
            trainer = self.trainer
        except RuntimeError:
            return None
        return trainer if isinstance(trainer, L.Trainer) else None

    @torch.compiler.disable  # looks at the signatures of modules
    def _seen_model(self) -> LanguageModel:
        if self._language_model is not None and self._language_model.model is self.model:
            return self._language_model
        if not isinstance(self.model, nn.Module):
            raise wrong_type("self.model", "a torch.nn.Module", self.model)
        seen = LanguageModel(self.model)
        if seen.labels not in self._labels:
            raise ValueError(
                f"the steps of {type(self).__name__} cannot train on the labels of {type(seen.pretrained).__name__}:"
                " return self.model(**batch).loss from a training_step, validation_step and test_step of your own, or"
                " from those of a plain LightningModule"
            )
        self._language_model = seen
        return seen

    def _context_parallel_shard(self, stage: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of the rows under context parallelism, else all of them."""
        context = None if self._attached_trainer is None else engine_of(self.trainer).context_parallel
        if context is None:
            return batch
        if stage == "train" and not self._normalizes_steps():
            raise ValueError(
                "context_parallel_size needs loss_normalization='tokens' and automatic optimization: ranks hold pieces"
                f" with different numbers of labels, got loss_normalization={self.loss_normalization!r} and"
                f" automatic_optimization={self.automatic_optimization}"
            )
        return context.split(batch)

    def _normalizes_steps(self) -> bool:
        """Whether gradients become those of the step's mean; not where an engine gives no access to them."""
        trainer = self._attached_trainer
        if self.loss_normalization == "micro_batch" or trainer is None or not self.automatic_optimization:
            return False
        return trainer.accumulate_grad_batches == 1 or engine_of(trainer).scales_gradients

    @torch.compiler.disable  # the number of the batch is another each time
    def _counted(self, loss: Tensor, num_items: Tensor, num_batches: int | None = None) -> Tensor:
        """The loss of a training step, which is the mean of so many items; see :meth:`.StepMean.add`."""
        if self._attached_trainer is None:
            return loss
        if self._normalizes_steps():
            self._step_mean.add(self.trainer, loss, num_items, num_batches)
        else:
            self._log_step(loss.detach())
        return loss

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        self._begin_stage()
        return self._counted(*self._step("train", batch))

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self._begin_stage()
        return self._step("val", batch)[0]

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self._begin_stage()
        return self._step("test", batch)[0]

    def _step(self, stage: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int | None]:
        """The loss of a batch as :meth:`_counted` takes it; logs metrics. ``stage`` is "train", "val" or "test"."""
        raise NotImplementedError

    def _make_metrics(self) -> dict[str, RunningMetric]:
        raise NotImplementedError

    @torch.compiler.disable
    def _stage_metrics(self, stage: str) -> tuple[Any, str]:
        """The metrics of a stage in ``self.step_metrics``, for each of several data loaders others; their path."""
        results = None if self._attached_trainer is None or stage == "train" else self.trainer._results
        index = None if results is None else results.dataloader_idx  # whatever index an override passes on
        key = f"{stage}_metrics" + (f"_{index}" if index else "")
        if key not in self.step_metrics:
            with torch.inference_mode(False):  # a validation before training must not leave inference tensors
                self.step_metrics[key] = nn.ModuleDict(self._make_metrics()).to(self.device)
        return self.step_metrics[key], f"step_metrics.{key}"

    def _log_metrics(self, stage: str, names: Iterable[str]) -> None:
        """Logs metrics of the stage, which have been updated, over its epoch."""
        metrics, path = self._stage_metrics(stage)
        for name in names:
            self.log(
                f"{stage}_{name}", metrics[name], on_step=False, on_epoch=True, metric_attribute=f"{path}.{name}",
                prog_bar=stage != "train" and name in ("loss", "choice_accuracy"),
            )  # fmt: skip

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's part of the averages over the epoch, with which it resumes in the middle of the epoch."""
        metrics, _ = self._stage_metrics("train")
        return {"train_metrics": {name: metric.parts.clone() for name, metric in metrics.items()}}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`rank_state_dict` returned."""
        metrics, saved = self._stage_metrics("train")[0], state["train_metrics"]
        if isinstance(saved, Tensor):  # of version 0.1.0
            saved = dict(zip(("loss", "perplexity", "mean_token_accuracy"), saved, strict=True))
        for name in metrics.keys() & saved.keys():
            metrics[name].parts = saved[name].to(metrics[name].parts.device, copy=True)

    def _step_ends(self) -> None:
        """Called after each step of an optimizer, whatever hooks the module overrides."""

    def _require_super(self, owner: type, *hooks: str) -> None:
        """Raises RuntimeError if a class before ``owner`` overrides one of its hooks without calling it."""
        before = itertools.takewhile(lambda base: base is not owner, type(self).__mro__)
        for base, name in itertools.product(before, hooks):
            code = getattr(inspect.unwrap(vars(base).get(name, owner)), "__code__", None)
            if code is not None and name not in code.co_names:
                raise RuntimeError(f"{base.__name__}.{name} must call super().{name}: training depends on it")

    def _begin_stage(self) -> None:
        """Called when a stage begins and in each step, as users override hooks without ``super()``."""
        if not self._has_begun:
            self._has_begun = True
            self._prepare_stage()

    def _prepare_stage(self) -> None:
        """Checks, and makes what steps need, once in each stage; here refuses a model in the place of another one."""
        former, self._former_model = self._former_model, ()
        model = getattr(self, "model", None)
        if not former or (isinstance(model, nn.Module) and any(part is former[0] for part in model.modules())):
            return
        if getattr(self._attached_trainer, "ckpt_path", None) is not None:  # the weights are those of the checkpoint
            return
        self.model = former[0]
        raise RuntimeError(
            f"{type(self).__name__}.configure_model must keep self.model, got a new {type(model).__name__} without the"
            " weights so far: Lightning calls the hook for each stage (fit, validate, test, predict). Begin it with `if"
            " getattr(self, 'model', None) is not None: return`, or set self.model = None before a stage that should"
            " start from scratch. self.model was set back to the previous model"
        )

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_stage()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_stage()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_stage()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._begin_stage()
        self.shown_loss, self._step_mean = ShownLoss(), StepMean()  # a step that failed may be tried with less
        if self.loss_normalization != "micro_batch" and self.automatic_optimization and not self._normalizes_steps():
            rank_zero_warn(
                f"{type(self.trainer.strategy).__name__} gives no access to its gradients: with accumulate_grad_batches"
                f" the training loss is the mean of the micro-batches' means, regardless of their numbers of"
                f" {self._items}. Use 'liger_deepspeed_stage_2' or '_3' for the mean over {self._items}, or set"
                " loss_normalization = 'micro_batch' if you do not want it."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        # Of both entries with this name, the later one is in callback_metrics: the exact one, on the device.
        # Named, as Lightning looks for metrics once, and the batch-size finder trains several times.
        self.log(
            _LOSS, self.shown_loss, prog_bar=True, logger=False, on_step=True, on_epoch=False,
            metric_attribute="shown_loss",
        )  # fmt: skip
        return super().on_train_batch_start(batch, batch_idx)

    def _log_step(self, loss: Tensor) -> None:
        self.shown_loss.show(loss)
        self.log(_LOSS, loss, on_step=True, on_epoch=False)


def _follow_steps(plugin: Any) -> None:
    """Extends the Trainer's precision plugin: no override of a module's hooks can leave out what it calls."""
    if "_follows_steps" not in vars(plugin):
        plugin._follows_steps = True
        plugin.backward = functools.partial(_backward, plugin)
        plugin.optimizer_step = functools.partial(_optimizer_step, plugin)


def _backward(plugin: Any, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
    """``backward`` of a precision plugin, which runs between the hooks before and after backward."""
    is_ours = isinstance(model, LigerStepMixin) and model._normalizes_steps()
    if is_ours and (weight := model._step_mean.weight(model)) is not None:
        tensor = tensor * weight.to(tensor.device, torch.float32)
    type(plugin).backward(plugin, tensor, model, *args, **kwargs)  # the class may have been extended since
    if is_ours:
        model._step_mean.finish(model)


def _optimizer_step(plugin: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """``optimizer_step`` of a precision plugin, whose closure runs the training step and backward."""
    is_ours = isinstance(model, LigerStepMixin)

    def finished() -> Any:
        result = closure()
        is_mean = is_ours and model._normalizes_steps()
        # Again, as the last micro-batch may have been skipped.
        if is_mean and (loss := model._step_mean.finish(model)) is not None:
            model._log_step(loss)
        return result

    result = type(plugin).optimizer_step(plugin, optimizer, model=model, closure=finished, **kwargs)
    if is_ours:
        model._step_ends()
    return result
