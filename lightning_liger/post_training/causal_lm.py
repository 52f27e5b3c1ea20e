"""Finished causal language models of post-training: what their losses need to be told are arguments of the module."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, fields
from types import FunctionType
from typing import Any, ClassVar, TypeVar, get_type_hints

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from liger_ops.arguments import wrong_value
from lightning_liger.losses.options import Options, declared
from lightning_liger.post_training.reference import LigerReferenceMixin, sum_of_bits
from lightning_liger.training.causal_lm import LigerCausalLM

_RANDOM_REFERENCE = "random_reference_fingerprint"
_Module = TypeVar("_Module", bound="type[LossCausalLM]")


def takes(**options: type[Options]) -> Callable[[_Module], _Module]:
    """Decorates a module that takes the fields of these dataclasses as arguments, and attributes of its mixins.

    The module has an attribute for each dataclass, and no ``__init__`` of its own: that gets a signature with all
    arguments, for help, schema and command line.
    """

    def decorate(cls: _Module) -> _Module:
        cls._options = options
        inherited: Any = cls.__init__
        init: Any = FunctionType(
            inherited.__code__, inherited.__globals__, "__init__", inherited.__defaults__, inherited.__closure__
        )  # another object with the same code, as Lightning compares that with its frame
        own, others = _own_arguments(cls), inspect.signature(LigerCausalLM.__init__).parameters
        known = {name: each for name, each in others.items() if name not in ("self", "loss_type", *own)}
        init.__annotations__ = {name: hint for name, (hint, _) in own.items()}
        hints = get_type_hints(init)  # without limits
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
                for name, (_, default) in own.items()
            ),
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in known.values()),
        ]
        init.__signature__ = inspect.Signature(parameters)
        docs = (inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2] for kind in options.values())
        init.__doc__ = "All options.\n\nArgs:\n" + "\n".join(doc.partition("\n\n")[0] for doc in docs)
        for name, argument in cls._renamed.items():
            init.__doc__ = init.__doc__.replace(f"\n    {name}: ", f"\n    {argument}: ")
        cls.__init__ = init  # type: ignore[method-assign]
        return cls

    return decorate


def _own_arguments(cls: Any) -> dict[str, tuple[Any, Any]]:
    """The type and the default of each argument that is no argument of ``LigerCausalLM``, or has another default."""
    found = {}
    for kind in cls._options.values():
        for each in fields(kind):
            if each.init:
                default = None if each.default is MISSING else each.default
                found[cls._renamed.get(each.name, each.name)] = (declared(kind)[each.name], default)
    return found | {name: (declared(cls)[name], getattr(cls, name)) for name in cls._attribute_arguments()}


class LossCausalLM(LigerCausalLM):
    """A causal language model whose arguments are also the options of its loss and attributes of its mixins."""

    _options: ClassVar[dict[str, type[Options]]] = {}
    _renamed: ClassVar[dict[str, str]] = {}
    """The arguments for fields of options that have another name."""

    def __init__(self, **kwargs: Any) -> None:
        own = _own_arguments(type(self))
        kwargs = {name: default for name, (_, default) in own.items()} | kwargs  # with defaults, for hyperparameters
        for attribute, kind in self._options.items():
            names = {each.name: self._renamed.get(each.name, each.name) for each in fields(kind) if each.init}
            setattr(self, attribute, kind(**{name: kwargs[argument] for name, argument in names.items()}))
        for name in self._attribute_arguments():
            setattr(self, name, kwargs[name])
        shared = inspect.signature(LigerCausalLM.__init__).parameters.keys() - {"loss_type"}
        others = {name: value for name, value in kwargs.items() if name in shared or name not in own}
        super().__init__(**others)


class ReferenceCausalLM(LigerReferenceMixin, LossCausalLM):
    """A causal language model with its reference model, a frozen copy of it as it starts."""

    _random_reference: int | None = None  # its fingerprint

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self._settings.lora is None and self.reference == "adapters":
            raise wrong_value("reference", "'adapters' only with lora", self.reference)

    def _configure_other_models(self) -> None:
        super()._configure_other_models()
        if self._has_reference_model():
            self.ref_model = self._build_reference()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._random_reference is not None:
            checkpoint[_RANDOM_REFERENCE] = self._random_reference

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        own, other = self._random_reference, checkpoint.get(_RANDOM_REFERENCE)
        if None not in (own, other) and own != other and not self.sync_ref_model:  # else it is in the checkpoint
            rank_zero_warn(
                "The reference model has other random weights than that of the checkpoint, so losses and rewards are"
                " not comparable: use the seed of that run (seed_everything), or start from a folder (pretrained)."
            )

    def _has_reference_model(self) -> bool:
        if not self.needs_reference or getattr(self, "precompute_ref_log_probs", False):
            return False
        return self.reference == "model" or (self.reference == "auto" and self._settings.lora is None)

    def _build_reference(self) -> nn.Module:
        if self._settings.pretrained is not None:
            return self._build_model()
        if any(parameter.is_meta or hasattr(parameter, "ds_id") for parameter in self.model.parameters()):
            expected = "a folder: strategies that shard cannot copy random weights for the reference"
            raise wrong_value("pretrained", expected, None)
        reference = deepcopy(self.model)
        self._random_reference = sum_of_bits(reference)
        return reference
