"""Tensor parallelism of a whole Hugging Face model, by the plan that the model carries.

Projections become DTensors by PyTorch's own styles. The embeddings and the LM head are sharded over the vocabulary, and
the loss with them. Every other parameter becomes a replicated DTensor, whose module computes with the local tensor:
optimizers and FSDP2 then find all parameters on the same device mesh, and broadcasting makes replicas equal.
"""

import re
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_liger.sequences.context_parallel import outermost_models
from lightning_liger.strategies.parts.head_units import tied_pairs


class Replicated(ParallelStyle):
    """Each rank has all of a module's own parameters, and computes with plain tensors.

    With ``sums_gradients`` ranks pass the module different parts of the activations, such as their attention heads, and
    a parameter's gradient is the sum over ranks. Otherwise all ranks compute the same gradient.
    """

    def __init__(self, sums_gradients: bool = False) -> None:
        super().__init__()
        self.gradient = Partial() if sums_gradients else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        _compute_locally(module, [self.gradient])
        return module


class VocabParallelEmbedding(ParallelStyle):
    """Each rank has some rows of an embedding and looks up the tokens among them; the results are summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)  # see _planned
        # Every rank but the last, which may have fewer, has as many rows.
        start = -(-module.num_embeddings // device_mesh.size()) * device_mesh.get_local_rank()
        _distribute(module, device_mesh, Shard(0))
        num_rows = cast(DTensor, module.weight).to_local().shape[0]
        padding = module.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < start + num_rows else None
        others: list[Tensor] = []  # for each nested call, the mask of tokens that other ranks look up

        def look_up_own(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = args[0] - start
            others.append((rows < 0) | (rows >= num_rows))
            return rows.masked_fill(others[-1], 0), *args[1:]

        def add_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            own = output.masked_fill(others.pop()[..., None], 0.0)
            return DTensor.from_local(own, device_mesh, [Partial()], run_check=False).full_tensor()

        module.register_forward_pre_hook(look_up_own)
        module.register_forward_hook(add_up)
        _compute_locally(module, [Shard(0)], padding_idx=own_padding)
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": VocabParallelEmbedding,
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: Replicated(sums_gradients=True),
    "replicate": Replicated,
}
"""The names of transformers' styles, and the styles of PyTorch or ours that do the same."""

_SPLIT = {"colwise": "out_features", "rowwise": "in_features"}
"""Styles that shard a layer's outputs or inputs over ranks: the attribute with the size that must divide evenly."""


def is_distributed(model: nn.Module) -> bool:
    """Whether ``model`` has a DTensor among its parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Spreads the Hugging Face models in ``model`` over the ranks of a mesh of one dimension, by their own plans.

    Where that is not possible, it raises ValueError before it changes anything.
    """
    styles: dict[nn.Module, str] = {}
    for owner in outermost_models(model):
        styles |= _planned(owner, device_mesh.size())
    if not styles:
        raise ValueError(
            f"tensor_parallel_size={device_mesh.size()} needs a Hugging Face model with a tensor-parallel plan"
            " (base_model_tp_plan in its configuration), but the module has none: parallelize your model in"
            ' configure_model, on self.device_mesh["tensor_parallel"]'
        )
    pairs = tied_pairs(model)
    for module, style in styles.items():
        parallelize_module(module, device_mesh, _STYLES[style]())
    for embeddings, head in pairs:
        head.weight = embeddings.weight
    replicas: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():  # the rest is replicated; shared parameters stay shared
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own.values()):
            Replicated()._apply(module, device_mesh)
            for name, parameter in own.items():
                module.register_parameter(name, replicas.setdefault(parameter, module.get_parameter(name)))


def _planned(owner: Any, num_ranks: int) -> dict[nn.Module, str]:
    """The style of each module that the plan of a Hugging Face model names, checked."""
    plan = owner._tp_plan or {}  # with those of the models inside
    for name, _ in owner.named_parameters():
        if _generic(name) in plan:
            raise ValueError(_unsupported(num_ranks, owner, name, plan[_generic(name)]))
    names = {module: name for name, module in owner.named_modules()}
    styles = {module: plan[_generic(name)] for module, name in names.items() if _generic(name) in plan}
    embeddings, head = owner.get_input_embeddings(), owner.get_output_embeddings()
    if not styles.keys() - {embeddings, head}:
        return {}
    if isinstance(embeddings, nn.Embedding):
        styles[embeddings] = "embedding_rowwise"
    if isinstance(head, nn.Linear):
        styles[head] = "colwise_gather_output"
    for module, style in styles.items():
        expected = nn.Embedding if style.startswith("embedding") else nn.Linear
        shards = style.startswith(("colwise", "rowwise", "embedding"))
        if style not in _STYLES or (shards and not isinstance(module, expected)):
            raise ValueError(_unsupported(num_ranks, owner, names[module], f"{style} of {type(module).__name__}"))
        split = _SPLIT.get(style)
        if split is not None and (size := getattr(module, split)) % num_ranks:
            raise ValueError(
                f"tensor_parallel_size={num_ranks} must divide {split} of {names[module]!r}, which is {size}"
            )
    if "colwise" in styles.values():
        config = owner.config.get_text_config()
        for setting in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, setting, None)
            if isinstance(count, int) and count % num_ranks:
                raise ValueError(
                    f"tensor_parallel_size={num_ranks} must divide the model's {setting}, got {count}: each rank takes"
                    " whole attention heads"
                )
    return styles


def _generic(name: str) -> str:
    """A module's name as in plans, with stars for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _unsupported(num_ranks: int, owner: nn.Module, name: str, style: str) -> str:
    return (
        f"tensor_parallel_size={num_ranks}: the plan of {type(owner).__name__} has {style!r} for {name!r}; expected one"
        f" of {sorted(_STYLES)} for linear layers and embeddings. Parallelize the model in configure_model, on"
        ' self.device_mesh["tensor_parallel"]'
    )


def _distribute(module: nn.Module, device_mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        distributed = distribute_tensor(parameter.detach(), device_mesh, [placement])
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def _compute_locally(module: nn.Module, gradients: list[Placement], **settings: Any) -> None:
    """Replaces a module's own parameters, which are DTensors, by local tensors during its forward.

    The gradients of these have the placements ``gradients``; attributes ``settings`` have other values then.
    """
    outside: list[tuple[dict[str, Any], dict[str, Any]]] = []  # one entry for each nested call

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        parameters: dict[str, Any] = {name: each for name, each in module._parameters.items() if each is not None}
        outside.append((parameters, {name: getattr(module, name) for name in settings}))
        local = {name: parameter.to_local(grad_placements=gradients) for name, parameter in parameters.items()}
        module._parameters.update(local)
        vars(module).update(settings)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if outside:
            parameters, others = outside.pop()
            module._parameters.update(parameters)
            vars(module).update(others)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
