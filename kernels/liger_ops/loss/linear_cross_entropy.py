"""Cross entropy of a linear head without materialized logits: ``cross_entropy(input @ linear_weight.T + bias)``.

Chunks of tokens are projected, turned into their loss and gradient in place, and reduced to the gradients of the
hidden states and the head at once, so a training step costs the same three matrix products as without fusion and
the memory of one chunk. Logits of few tokens take none: they lie where the head's gradient will be. Forward therefore
saves gradients, not activations, and they include the mean's 1 / n (but not in float16, where they could underflow).
``reduction="none"``, whose upstream gradient is not known in forward, saves the logits of as many chunks as a budget
allows, and projects the others once more in backward. The idea of taking the gradient in forward is from Liger Kernel
(arXiv:2410.10989); see :mod:`liger_ops.loss.cross_entropy` for the formula and its options.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_bool,
    check_floating,
    check_integer,
    wrong_type,
    wrong_value,
)
from liger_ops.loss.chunked_loss import (
    MAX_CHUNK_BYTES,
    KeptTokens,
    SavedLogits,
    adapter_pair,
    choose_accumulate_dtype,
    chunked_linear_loss,
)
from liger_ops.loss.cross_entropy import cross_entropy, gradient_in_place, loss_and_gradient_in_place
from liger_ops.loss.gradient_memory import linear_loss_in_gradient
from liger_ops.loss.groups import is_grouped, join_groups, join_values
from liger_ops.loss.linear_head import NUM_GRADIENTS, check_head
from liger_ops.loss.options import (
    IGNORE_INDEX,
    Targets,
    TokenLossOptions,
    TokenStats,
    check_labels,
    check_reduction,
    check_tensors,
    check_weights,
    flat_targets,
)
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import balance_class_weight, plan_tokens, reduce_losses, unbalance_losses
from liger_ops.loss.vocab_parallel import VocabShard, sharded_loss_and_gradient_in_place


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **kwargs: Any
) -> Tensor | tuple[Tensor, TokenStats]:
    """Materializes the logits in plain PyTorch; also takes class probabilities and several classes per token."""
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias).unflatten(-1, linear_weight.shape[:-1])
    return cross_entropy(logits, target, **kwargs)


class LossArguments(NamedTuple):
    """The op's arguments, in its schema's order; see :func:`linear_cross_entropy`."""

    input: Tensor
    """``[num_tokens, hidden_size]``."""
    weight: Tensor
    bias: Tensor | None
    adapter_input: Tensor | None
    """``[num_tokens, rank]``."""
    adapter_weight: Tensor | None
    labels: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    grad_losses: Tensor | None
    """``[num_tokens]``: the upstream gradient of the losses, None for ones."""
    chunk_size: int
    logits_in_gradient: bool
    """Whether logits lie in the memory of the head's gradient; see :mod:`liger_ops.loss.gradient_memory`."""
    accumulate_dtype: torch.dtype
    max_valid_tokens: int | None
    needs_gradient: list[bool]
    """For each of the first ``NUM_GRADIENTS`` tensors."""
    reduction: str
    with_stats: bool
    ignore_index: int
    label_smoothing: float
    softcap: float
    """0 for none."""
    logit_scale: float
    z_loss_weight: float


_ACCUMULATE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NUM_TENSORS = LossArguments._fields.index("chunk_size")
_FIRST_OPTION = LossArguments._fields.index("ignore_index")
# Without a reduction the losses of the stats are the loss itself, which an op may return only once.
_FIRST_STAT = {"none": 1, "sum": 0, "mean": 0}


def _changed(values: Sequence[Any], **changes: Any) -> list[Any]:
    return [changes.get(name, value) for name, value in zip(LossArguments._fields, values, strict=True)]


def _is_mean_in_gradient(reduction: str, dtype: torch.dtype) -> bool:
    return reduction == "mean" and dtype != torch.float16


def _fake_linear_cross_entropy(*values: Any) -> list[Tensor]:
    arguments = LossArguments(*values)
    input, labels, reduction = arguments.input, arguments.labels, arguments.reduction
    dtype = torch.promote_types(input.dtype, torch.float32)
    of_tokens, of_head = input.dtype, arguments.accumulate_dtype
    dtypes = (of_tokens, of_head, of_head, of_tokens, of_head)
    gradients = [
        input.new_empty(tensor.shape if needed else 0, dtype=grad_dtype)
        for tensor, needed, grad_dtype in zip(values, arguments.needs_gradient, dtypes, strict=False)
    ]
    loss = labels.new_empty(labels.shape if reduction == "none" else (), dtype=dtype)
    stats = TokenStats.zeros_like(labels, dtype)[_FIRST_STAT[reduction] :] if arguments.with_stats else ()
    return [loss, labels.new_empty((), dtype=dtype), *gradients, *stats]


class _SavedChunks(NamedTuple):
    """What forward saves for backward with ``reduction="none"``."""

    logits: SavedLogits
    lse: Tensor
    """``[num_tokens]``, at least float32, as the next."""
    lse_error: Tensor


def _compute_loss(shard: VocabShard | None, *values: Any, saved: _SavedChunks | None = None) -> list[Tensor]:
    """The loss, the mean's factor, the gradients that ``needs_gradient`` names, and the stats.

    The gradients are those of ``sum(losses)``, or of the mean where ``_is_mean_in_gradient``; ``reduction="none"``
    takes ``grad_losses``. With a ``shard`` the loss is over the vocabulary of its whole group, and no logits are
    ``saved``. Without gradients saved logits are written, with them they are read.
    """
    arguments = LossArguments(*values)
    input, labels, reduction = arguments.input, arguments.labels, arguments.reduction
    chunk_size, max_valid_tokens = arguments.chunk_size, arguments.max_valid_tokens
    options = TokenLossOptions.from_scalars(*values[_FIRST_OPTION:])
    targets = Targets(labels, arguments.class_weight, arguments.token_weight)
    num_tokens = labels.shape[0]
    dtype = torch.promote_types(input.dtype, torch.float32)
    in_order = chunk_size >= num_tokens
    vocab_size = arguments.weight.shape[0] if shard is None else shard.vocab_size
    plan = plan_tokens(targets, vocab_size, options.ignore_index, input, with_order=not in_order)
    stats = TokenStats.zeros_like(labels, dtype) if arguments.with_stats else None
    losses = torch.zeros_like(labels, dtype=dtype) if stats is None else stats.losses
    if in_order or (max_valid_tokens is None and input.is_cuda and torch.cuda.is_current_stream_capturing()):
        max_valid_tokens = num_tokens
    elif max_valid_tokens is not None:  # tokens that the bound leaves out by mistake must not look like ignored ones
        losses.masked_fill_(labels != options.ignore_index, torch.nan)
    grad_scale = plan.mean_scale if _is_mean_in_gradient(reduction, input.dtype) else arguments.grad_losses

    logits_loss = loss_and_gradient_in_place
    if shard is not None:
        logits_loss = partial(sharded_loss_and_gradient_in_place, shard=shard)

    if saved is not None and saved.logits.to_gradient is None:
        logits_loss = partial(logits_loss, lse=saved.lse, lse_error=saved.lse_error)

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        logits_loss(
            logits,
            targets,
            grad_scale,
            options,
            token_index=index,
            with_gradient=any(arguments.needs_gradient),
            losses=losses,
            stats=stats,
        )

    tokens = KeptTokens(plan.order, plan.num_kept if max_valid_tokens is None else max_valid_tokens)
    if arguments.logits_in_gradient:
        assert plan.num_kept is not None  # there are several chunks
        gradients = linear_loss_in_gradient(
            input,
            arguments.weight,
            tokens,
            chunk_loss,
            num_valid=plan.num_kept,
            first_rows=chunk_size,
            needs_hidden=arguments.needs_gradient[0],
        )
    else:
        gradients = chunked_linear_loss(
            input,
            arguments.weight,
            arguments.bias,
            tokens,
            chunk_loss,
            chunk_size=chunk_size,
            accumulate_dtype=arguments.accumulate_dtype,
            needs_gradient=arguments.needs_gradient,
            adapter=adapter_pair(arguments.adapter_input, arguments.adapter_weight),
            saved=None if saved is None else saved.logits,
        )
    if saved is not None and stats is not None:
        saved.lse.copy_(stats.lse)
    if shard is not None:
        shard.sum_input_gradients(gradients.hidden_states, gradients.adapter_input)
    loss = losses if reduction == "none" else reduce_losses(losses, plan.mean_scale if reduction == "mean" else None)
    return [loss, plan.mean_scale, *gradients, *(stats or ())[_FIRST_STAT[reduction] :]]


@backend.register_op(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor? adapter_input, Tensor? adapter_weight,"
    " Tensor labels, Tensor? class_weight, Tensor? token_weight, Tensor? grad_losses, SymInt chunk_size,"
    " bool logits_in_gradient, ScalarType accumulate_dtype, SymInt? max_valid_tokens, bool[] needs_gradient,"
    " str reduction, bool with_stats, int ignore_index,"
    " float label_smoothing, float softcap, float logit_scale, float z_loss_weight) -> Tensor[]",
    fake=_fake_linear_cross_entropy,
)
def _linear_cross_entropy(*values: Any) -> list[Tensor]:
    return _compute_loss(None, *values)


class _LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, then the stats.

    A sum or a mean has its gradients from forward and only scales them in backward; losses of single tokens wait for
    backward to bring each token's factor.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., list[Tensor]], saved_chunks: int, *values: Any) -> tuple[Tensor, ...]:
        arguments = LossArguments(*values)
        wait = arguments.reduction == "none"
        saved: _SavedChunks | None = None
        if wait:
            values = tuple(_changed(values, needs_gradient=[False] * NUM_GRADIENTS))
            if saved_chunks:
                dtype = torch.promote_types(arguments.input.dtype, torch.float32)
                lse = torch.zeros_like(arguments.labels, dtype=dtype)
                saved = _SavedChunks(SavedLogits(saved_chunks), lse, torch.zeros_like(lse))
                compute = partial(_compute_loss, None)
        loss, mean_scale, *others = compute(*values, **({} if saved is None else {"saved": saved}))
        gradients, stats = others[:NUM_GRADIENTS], others[NUM_GRADIENTS:]
        chunks = () if saved is None else (saved.lse, saved.lse_error, *saved.logits.chunks)
        ctx.save_for_backward(*((*arguments[:_NUM_TENSORS], *chunks) if wait else (mean_scale, *gradients)))
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in values[:NUM_GRADIENTS]]
        ctx.compute = compute
        ctx.needs_gradient, ctx.reduction = arguments.needs_gradient, arguments.reduction
        ctx.settings = arguments[_NUM_TENSORS:]
        ctx.mark_non_differentiable(*stats)
        return loss, *stats

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.reduction == "none":
            saved_tensors = ctx.saved_tensors
            arguments, chunks = saved_tensors[:_NUM_TENSORS], saved_tensors[_NUM_TENSORS:]
            values = _changed((*arguments, *ctx.settings), grad_losses=grad_loss, with_stats=False)
            gradients = ctx.compute(*values, **_saved_for_backward(chunks, values))[2 : 2 + NUM_GRADIENTS]
            scaled = (gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True))
        else:
            mean_scale, *gradients = ctx.saved_tensors
            if ctx.reduction == "mean" and not _is_mean_in_gradient(ctx.reduction, ctx.dtypes[0]):
                grad_loss = grad_loss * mean_scale
            # A graph that ends with this pass needs no second buffer of the head's size.
            in_place = backend.graph_ends()
            scaled = (
                scale_gradient(gradient, grad_loss, dtype, in_place=in_place) if needed else None
                for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True)
            )
        needed = (gradient if need else None for gradient, need in zip(scaled, ctx.needs_gradient, strict=True))
        return None, None, *needed, *[None] * (len(LossArguments._fields) - NUM_GRADIENTS)


def _saved_for_backward(chunks: Sequence[Tensor], values: Sequence[Any]) -> dict[str, _SavedChunks]:
    """The argument ``saved`` of :func:`_compute_loss` in backward, if forward saved any chunks."""
    if not chunks:
        return {}
    lse, lse_error, *logits = chunks
    arguments = LossArguments(*values)
    targets = Targets(arguments.labels, arguments.class_weight, arguments.token_weight)
    options = TokenLossOptions.from_scalars(*values[_FIRST_OPTION:])

    def to_gradient(chunk: Tensor, index: Tensor | None) -> None:
        assert arguments.grad_losses is not None  # backward has it
        gradient_in_place(
            chunk, targets, arguments.grad_losses, options, token_index=index, lse=lse, lse_error=lse_error
        )

    saved = SavedLogits(0, logits, to_gradient, are_needed_again=not backend.graph_ends())
    return {"saved": _SavedChunks(saved, lse, lse_error)}


def _check_chunks(
    options: Any, chunk_bytes: int | None, accumulate_dtype: torch.dtype | None, max_valid_tokens: int | None
) -> tuple[int | None, torch.dtype | None]:
    """The chunk size of PyTorch's options, and ``accumulate_dtype`` or else theirs."""
    if options is not None and not hasattr(options, "batch_chunk_size"):
        raise wrong_type("options", "a torch.nn.LinearCrossEntropyOptions or None", options)
    chunk_size = getattr(options, "batch_chunk_size", None)
    check_integer("options.batch_chunk_size", chunk_size, at_least=1, optional=True)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("max_valid_tokens", max_valid_tokens, at_least=0, optional=True)
    acc_dtype = getattr(options, "acc_dtype", None)
    for name, value in (("accumulate_dtype", accumulate_dtype), ("options.acc_dtype", acc_dtype)):
        if value is not None and not isinstance(value, torch.dtype):
            raise wrong_type(name, "a torch.dtype or None", value)
        if value is not None and value not in _ACCUMULATE_DTYPES:
            raise wrong_value(name, "torch.float32, torch.float64, torch.bfloat16 or torch.float16", value)
    return chunk_size, accumulate_dtype or acc_dtype


def linear_cross_entropy(
    input: Tensor | Sequence[Tensor],
    linear_weight: Tensor,
    target: Tensor | Sequence[Tensor],
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    token_weight: Tensor | Sequence[Tensor | float] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    chunk_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    saved_logits_bytes: int | None = None,
    max_valid_tokens: int | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    return_stats: bool = False,
) -> Any:
    """Cross entropy of ``input @ linear_weight.T + linear_bias``, call-compatible with PyTorch's function of that name.

    Several groups of tokens over one head, such as Medusa's heads with a shared projection, are sequences of the same
    length: ``input``, ``target``, ``token_weight`` (a tensor or a number for each group) and the adapter's input. They
    are concatenated, so the head gets one gradient, and a mean is over the tokens of all groups. Losses of single
    tokens and stats are tuples of one for each group.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        target: Class indices, int64, ``[...]`` as ``input`` without its last dimension. Class probabilities, and heads
            of more dimensions, materialize the logits, as PyTorch does; ``chunk_bytes`` has no effect on them.
        linear_bias: The head's bias, ``[vocab_size]``.
        weight: Class weights, ``[vocab_size]``; not differentiable.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored, by their weight.
        ignore_index: Label of tokens that contribute nothing and cost nothing; None means -100.
        label_smoothing: Share of the target that is spread over all classes, between 0 and 1.
        options: PyTorch's ``LinearCrossEntropyOptions``; its ``batch_chunk_size`` and ``acc_dtype`` are followed.
        token_weight: Factor of each token's loss, ``target``'s shape; the mean divides by its sum (times the labels'
            class weights). Not differentiable.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        z_loss_weight: Factor of ``lse ** 2``, added to each token's loss. Class weights do not apply to it: in the mean
            it is divided by the tokens' number, or their summed ``token_weight``.
        chunk_bytes: Budget for one chunk of logits, which never holds all tokens. By default chunks are chosen for
            speed on a GPU (see :func:`~liger_ops.loss.chunked_loss.default_chunk_size`), where few tokens' logits lie
            in the memory of the head's gradient (see :mod:`~liger_ops.loss.gradient_memory`), and 8 MiB on a CPU.
        accumulate_dtype: Dtype in which chunks' gradients of the head are summed. By default bfloat16 heads sum in
            bfloat16 over at most 4 chunks, everything else in at least float32.
        saved_logits_bytes: Budget for logits that ``reduction="none"`` saves from forward for backward, in whole
            chunks; backward computes the others again, for a third of the loss's time if it is all of them. By default
            2 GiB on a GPU, but 0 if chunks are given by ``chunk_bytes`` or ``options``, and on other devices. Nothing
            is saved under ``torch.compile`` and with ``vocab_shard``.
        max_valid_tokens: How many labels are not ``ignore_index``, at most, if the caller knows. On a GPU the host then
            need not wait, once the first of several chunks is queued, for the device to count them. A bound that is so
            small that tokens are left out gives a NaN loss.
        adapter: A low-rank update of the logits, as LoRA makes it: ``[..., rank]``, already scaled, and ``[vocab_size,
            rank]``, in input's dtype; ``adapter[0] @ adapter[1].T`` is added to the logits before anything else.
        vocab_shard: This rank's part of the vocabulary, if each rank of a process group holds a part of the head:
            ``linear_weight``, ``linear_bias`` and the adapter's weight are its rows. Everything else is the same on
            all ranks, with ``weight`` and the labels of the whole vocabulary. All ranks get the same loss and stats;
            logits are never gathered. Every rank has to call, and with ``reduction="none"`` to run backward.
        return_stats: Whether to also return :class:`~liger_ops.TokenStats`.

    Returns:
        The loss in at least float32, with the stats (shaped as ``target``) on request. Under autocast the products run
        in the autocast dtype, as a linear layer's would.

    Raises:
        TypeError: For arguments of another type, and for tensors that are not floating point where they should be.
        ValueError: For shapes, dtypes, devices or options that do not fit; for weights that require a gradient; for
            labels out of range if they are on the CPU (on the GPU the loss is NaN instead).
    """
    if is_grouped(input):
        groups, states, labels, adapter = join_groups(input, target, adapter)
        result = linear_cross_entropy(
            states, linear_weight, labels, linear_bias=linear_bias, weight=weight, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, options=options,
            token_weight=join_values("token_weight", token_weight, groups, states), softcap=softcap,
            logit_scale=logit_scale, z_loss_weight=z_loss_weight, chunk_bytes=chunk_bytes,
            accumulate_dtype=accumulate_dtype, saved_logits_bytes=saved_logits_bytes,
            max_valid_tokens=max_valid_tokens, adapter=adapter, vocab_shard=vocab_shard, return_stats=return_stats,
        )  # fmt: skip
        loss, *stats = result if return_stats else (result,)
        loss = tuple(groups.split(loss)) if reduction == "none" else loss
        return (loss, groups.split_fields(stats[0])) if return_stats else loss
    input, target, token_weight = cast(Tensor, input), cast(Tensor, target), cast("Tensor | None", token_weight)
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    check_floating("linear_bias", linear_bias, optional=True)
    check_tensors(input, target, weight, token_weight, linear_weight=linear_weight, linear_bias=linear_bias)
    check_reduction(reduction)
    check_bool("return_stats", return_stats)
    chunk_size, accumulate_dtype = _check_chunks(options, chunk_bytes, accumulate_dtype, max_valid_tokens)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0, optional=True)
    ignore_index = IGNORE_INDEX if ignore_index is None else ignore_index
    if linear_weight.dim() < 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    if target.is_floating_point() or linear_weight.dim() > 2:
        if input.dim() > 2 or input.dim() < min(linear_weight.dim() - 1, 2):
            raise ValueError(
                "input must be [num_tokens, hidden_size] for class probabilities and heads of more than two dimensions,"
                f" got shape {tuple(input.shape)}"
            )
        for name, value in (("adapter", adapter), ("vocab_shard", vocab_shard)):
            if value is not None:
                raise ValueError(
                    f"{name} must be None for class probabilities and heads of more than two dimensions, got"
                    f" {type(value).__name__}; pass class indices and a head [vocab_size, hidden_size] to use it"
                )
        return linear_cross_entropy_reference(
            input, linear_weight, target, linear_bias=linear_bias, weight=weight, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, token_weight=token_weight, softcap=softcap,
            logit_scale=logit_scale, z_loss_weight=z_loss_weight, return_stats=return_stats,
        )  # fmt: skip
    token_options = TokenLossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss_weight)
    head = check_head(input, linear_weight, linear_bias, target, adapter, vocab_shard)
    dtype, vocab_size = head.dtype, head.vocab_size
    check_weights(weight, token_weight, target, vocab_size, ignore_index)
    check_labels("target", target, vocab_size, ignore_index)
    chunks_are_chosen = chunk_size is None and chunk_bytes is None
    if saved_logits_bytes is None:
        saved_logits_bytes = MAX_CHUNK_BYTES if input.is_cuda and chunks_are_chosen else 0
    chunk_size = head.chunk_size(chunk_bytes) if chunk_size is None else chunk_size
    in_gradient = (
        chunks_are_chosen
        and chunk_size < target.numel()
        and reduction != "none"
        and vocab_shard is None
        and head.gradient_holds_logits(accumulate_dtype)
    )
    num_sums = 1 if in_gradient else -(-target.numel() // chunk_size)
    accumulate_dtype = accumulate_dtype or choose_accumulate_dtype(dtype, num_sums)
    if torch.promote_types(accumulate_dtype, dtype) != accumulate_dtype:
        raise wrong_value("accumulate_dtype", f"at least as wide as the products' {dtype}", accumulate_dtype)
    targets = flat_targets(target, weight, token_weight, dtype)
    factor = None
    if reduction == "mean" and token_options.z_loss_weight:
        targets, factor = balance_class_weight(targets, vocab_size, ignore_index, dtype)
    compute = _linear_cross_entropy if vocab_shard is None else partial(_compute_loss, vocab_shard)
    keeps_logits = vocab_shard is None and reduction == "none"
    saved_chunks = head.saved_chunks(saved_logits_bytes, chunk_size) if keeps_logits else 0
    with head.products_dtype():
        loss, *stats = _LinearCrossEntropyFunction.apply(
            compute, saved_chunks, *head.tensors, *targets, None, chunk_size, in_gradient, accumulate_dtype,
            max_valid_tokens, head.needs_gradient, reduction, return_stats, *token_options.as_scalars(),
        )  # fmt: skip
    if reduction == "none":
        stats = [loss.detach(), *stats]
        loss = loss.view(target.shape)
    if not return_stats:
        return loss
    found = TokenStats(*stats)
    if factor is not None:
        found = unbalance_losses(found, targets.token_weight, z_loss_weight, factor)
    return loss, TokenStats(*(stat.view(target.shape) for stat in found))
