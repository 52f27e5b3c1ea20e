"""Divergence of a student's logits from a teacher's, and of their linear heads without materialized logits.

Chunks of tokens are projected by both heads, so that each row of a chunk has both whole distributions: its divergence
and gradient need nothing else. The gradient overwrites the student's logits and is reduced to those of its hidden
states and head at once. Every kind takes four products of [num_tokens, hidden_size, vocab_size] (the logits of both,
dX, dW), three with a frozen head. See :mod:`liger_ops.divergence.rows` for the formulas.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating_tensors, check_integer, check_shape, wrong_value
from liger_ops.divergence.options import DivergenceOptions, num_common_columns
from liger_ops.divergence.rows import Rows, row_dtype, write_rows
from liger_ops.loss.chunked_loss import Projection, aligned_rows, chunked_linear_loss, visit_tokens
from liger_ops.loss.linear_head import LinearHead, check_head, is_trained
from liger_ops.loss.options import IGNORED, REDUCTIONS, Targets, check_tokens, flat_tokens
from liger_ops.loss.scale_gradient import scale_gradient
from liger_ops.loss.token_plan import mean_scale_of
from liger_ops.loss.vocab_parallel import VocabShard

_TEACHER_NAMES = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_adapter")
_NUM_TENSORS = 13


def _reduce_rows(losses: Tensor, reduction: str, mean_scale: Tensor) -> Tensor:
    """``losses`` by ``reduction``; 0 without tokens."""
    if reduction == "none":
        return losses
    return losses.sum() * mean_scale if reduction == "mean" else losses.sum()


def _scale_in_forward(reduction: str, dtype: torch.dtype) -> bool:
    """Whether gradients have the mean's factor from where they are computed; in float16 it might underflow."""
    return reduction == "mean" and dtype != torch.float16


def _empty_results(
    labels: Tensor, reduction: str, dtype: torch.dtype, gradients: Sequence[tuple[Tensor | None, bool, torch.dtype]]
) -> list[Tensor]:
    """What the ops return, without values: the divergence, the mean's factor, and gradients where wanted.

    ``gradients`` has each tensor, whether its gradient is wanted and in which dtype.
    """
    loss = labels.new_empty(labels.shape if reduction == "none" else (), dtype=dtype)
    empty = [
        labels.new_empty(tensor.shape if tensor is not None and needed else 0, dtype=dtype)
        for tensor, needed, dtype in gradients
    ]
    return [loss, loss.new_empty(()), *empty]


@backend.register_op(
    "divergence(Tensor student, Tensor teacher, Tensor labels, Tensor? token_weight, str reduction,"
    f" bool with_gradient, {backend.schema_of(DivergenceOptions)}) -> Tensor[]",
    fake=lambda student, teacher, labels, token_weight, reduction, with_gradient, *scalars: _empty_results(
        labels, reduction, row_dtype(student, teacher), [(student, with_gradient, student.dtype)]
    ),
)
def _divergence(student: Tensor, teacher: Tensor, labels: Tensor, *others: Any) -> list[Tensor]:
    """The divergence, the mean's factor, and the gradient, of the mean where :func:`_scale_in_forward`."""
    token_weight, reduction, with_gradient, *scalars = others
    mean_scale = mean_scale_of(Targets(labels, None, token_weight), 1, IGNORED, student.dtype)
    losses = torch.zeros_like(labels, dtype=row_dtype(student, teacher))
    gradient = student.new_empty(student.shape if with_gradient else 0)
    grad_scale = mean_scale if _scale_in_forward(reduction, student.dtype) else None
    buffer, options = gradient if with_gradient else None, DivergenceOptions(*scalars)
    write_rows(Rows(student, teacher, labels, token_weight, grad_scale, options, None, losses, buffer), None)
    return [_reduce_rows(losses, reduction, mean_scale), mean_scale.to(losses.dtype), gradient]


class _DivergenceFunction(torch.autograd.Function):
    """The divergence, given what computes it: ``compute(tensors, needs_gradient, grad_losses)`` as the ops do.

    A sum or a mean has its gradients from forward and only scales them in backward. So has each token's divergence
    where gradients have a row for each token. Otherwise (``waits``) backward brings each token's factor,
    ``grad_losses`` of ``[num_tokens]``, and computes again. Gradients are those of the first tensors; the
    last two are the tokens' labels and weights.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., list[Tensor]], reduction: str, waits: bool, *args: Any) -> Tensor:
        needs_gradient, *tensors = args
        wanted = [False] * len(needs_gradient) if waits else needs_gradient
        loss, mean_scale, *gradients = compute(tensors, wanted, None)
        ctx.save_for_backward(*(tensors if waits else (tensors[-2], mean_scale, *gradients)))
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors[: len(needs_gradient)]]
        ctx.compute, ctx.reduction, ctx.waits, ctx.needs_gradient = compute, reduction, waits, needs_gradient
        ctx.num_constants = len(tensors) - len(needs_gradient)
        return loss

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.waits:
            gradients = ctx.compute(ctx.saved_tensors, ctx.needs_gradient, grad_loss)[2:]
        else:
            labels, mean_scale, *gradients = ctx.saved_tensors
            if ctx.reduction == "mean" and not _scale_in_forward(ctx.reduction, ctx.dtypes[0]):
                grad_loss = grad_loss * mean_scale
            factor = grad_loss.where(labels != IGNORED, 0.0)[:, None] if ctx.reduction == "none" else grad_loss
        in_place = backend.graph_ends()  # no second buffer of the head's size
        scaled: list[Tensor | None] = []
        for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_gradient, strict=True):
            if not needed:
                scaled.append(None)
            elif ctx.waits:
                scaled.append(gradient.to(dtype))
            elif ctx.reduction == "none":
                scaled.append(gradient.mul_(factor) if in_place else (gradient * factor).to(dtype))
            else:
                scaled.append(scale_gradient(gradient, factor, dtype, in_place=in_place))
        return None, None, None, None, *scaled, *[None] * ctx.num_constants


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    t_squared: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    vocab: str = "equal",
) -> Tensor:
    """Divergence of the student's distributions from the teacher's; :func:`~liger_ops.linear_divergence` of logits.

    Args:
        student_logits: ``[..., vocab_size]``; the only argument with a gradient.
        teacher_logits: ``[..., vocab_size]``, of the same tokens.
        kind, beta, temperature, t_squared, softcap, logit_scale: As for :func:`~liger_ops.linear_divergence`.
        teacher_softcap, teacher_logit_scale, mask, token_weight, reduction, vocab: As for it, too.

    Returns:
        In at least float32: ``[...]`` for ``reduction="none"``, else a scalar. Beyond the gradient only rows that fit
        a few MiB are held in float32.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, devices or options that do not fit.
    """
    check_floating_tensors("student_logits", student_logits, optional=False, teacher_logits=teacher_logits)
    check_choice("reduction", reduction, REDUCTIONS)
    options = DivergenceOptions.checked(
        kind, beta, temperature, t_squared, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    if student_logits.dim() == 0:
        raise wrong_value("student_logits", "[..., vocab_size]", student_logits)
    tokens = student_logits.shape[:-1]
    vocab_size = teacher_logits.shape[-1:] or student_logits.shape[-1:]
    check_shape("teacher_logits", teacher_logits, (*tokens, *vocab_size), "student_logits' tokens")
    check_tokens(mask, token_weight, student_logits, tokens, "student_logits")
    num_columns = num_common_columns(student_logits.shape[-1], teacher_logits.shape[-1], vocab)
    student, teacher = (
        backend.as_rows(each, each.shape[-1])[:, :num_columns] for each in (student_logits, teacher_logits.detach())
    )
    labels, weight = flat_tokens(mask, token_weight, student_logits, tokens.numel())

    def compute(tensors: Sequence[Tensor | None], needs_gradient: list[bool], _: Tensor | None) -> list[Tensor]:
        return _divergence(*tensors, reduction, *needs_gradient, *options)

    tensors = student, teacher, labels, weight
    if backend.needs_graph(student_logits):
        loss = _DivergenceFunction.apply(compute, reduction, False, [True], *tensors)
    else:
        loss = compute(tensors, [False], None)[0]
    return loss.view(tokens) if reduction == "none" else loss


def _fake_linear_divergence(*values: Any) -> list[Tensor]:
    input, teacher_input, labels = values[0], values[5], values[10]
    _, _, accumulate_dtype, _, needs_gradient, reduction = values[_NUM_TENSORS:][:6]
    dtypes = input.dtype, accumulate_dtype, accumulate_dtype, input.dtype, accumulate_dtype
    gradients = list(zip(values, needs_gradient, dtypes, strict=False))
    return _empty_results(labels, reduction, row_dtype(input, teacher_input), gradients)


def _pair(input: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """An adapter from the op's arguments, which are both None without one."""
    return None if input is None or weight is None else (input, weight)


def _compute(*values: Any, shard: VocabShard | None = None) -> list[Tensor]:
    """The divergence, the mean's factor, and the gradients that ``needs_gradient`` names; arguments as the op's.

    The gradients are those of the sum, or of the mean where :func:`_scale_in_forward`; ``reduction="none"`` takes
    ``grad_losses``. With a ``shard`` the divergence is over the vocabulary of its whole group.
    """
    input, weight, bias, *adapter = values[:5]
    teacher_input, teacher_weight, teacher_bias, *teacher_adapter = values[5:10]
    labels, token_weight, grad_losses = values[10:_NUM_TENSORS]
    are_all_kept, chunk_size, accumulate_dtype, dtype, needs_gradient, reduction, *scalars = values[_NUM_TENSORS:]
    options = DivergenceOptions(*scalars)
    num_tokens, with_gradient = labels.shape[0], any(needs_gradient)
    logits_dtypes = [dtype if each.dtype.itemsize < 4 else None for each in (input, teacher_input)]
    targets = Targets(labels, None, token_weight)
    tokens, mean_scale = visit_tokens(targets, 1, IGNORED, input, chunk_size, are_all_kept=are_all_kept)
    losses = torch.zeros_like(labels, dtype=row_dtype(input, teacher_input))
    grad_scale = mean_scale if _scale_in_forward(reduction, input.dtype) else grad_losses
    gradient_buffer: Tensor | None = None
    num_rows = min(chunk_size, num_tokens)
    if with_gradient and logits_dtypes[0] is not None:
        gradient_buffer = aligned_rows(input, num_rows, weight.shape[0])
    teacher = Projection(
        teacher_input, teacher_weight, teacher_bias, num_rows, _pair(*teacher_adapter), logits_dtypes[1]
    )

    def chunk_loss(logits: Tensor, index: Tensor | None) -> Tensor:
        gradient = logits if gradient_buffer is None else gradient_buffer[: len(logits)]
        buffer = gradient if with_gradient else None
        rows = logits, teacher.logits(index), labels, token_weight, grad_scale, options, index, losses, buffer
        write_rows(Rows(*rows), shard)
        return gradient

    gradients = chunked_linear_loss(
        input, weight, bias, tokens, chunk_loss, chunk_size=chunk_size, accumulate_dtype=accumulate_dtype,
        needs_gradient=needs_gradient, adapter=_pair(*adapter), logits_dtype=logits_dtypes[0],
    )  # fmt: skip
    if shard is not None:
        shard.sum_input_gradients(gradients.hidden_states, gradients.adapter_input)
    return [_reduce_rows(losses, reduction, mean_scale), mean_scale.to(losses.dtype), *gradients]


_linear_divergence = backend.register_op(
    "linear_divergence(Tensor input, Tensor weight, Tensor? bias, Tensor? adapter_input, Tensor? adapter_weight,"
    " Tensor teacher_input, Tensor teacher_weight, Tensor? teacher_bias, Tensor? teacher_adapter_input,"
    " Tensor? teacher_adapter_weight, Tensor labels, Tensor? token_weight, Tensor? grad_losses, bool are_all_kept,"
    " SymInt chunk_size, ScalarType accumulate_dtype, ScalarType? logits_dtype, bool[] needs_gradient, str reduction,"
    f" {backend.schema_of(DivergenceOptions)}) -> Tensor[]",
    fake=_fake_linear_divergence,
)(_compute)


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    t_squared: bool = False,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    teacher_adapter: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    vocab: str = "equal",
    chunk_bytes: int | None = None,
    vocab_shard: VocabShard | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Divergence of a student's distributions from a teacher's, both given by hidden states and a linear head.

    With q the student's distribution of a token and p the teacher's, both of tempered logits ``softcap *
    tanh(logit_scale * logits / softcap) / temperature``:

    - ``"forward_kl"``: KL(p || q); ``"reverse_kl"``: KL(q || p); ``"mixed"``: beta * the forward + (1 - beta) * the
      reverse one.
    - ``"jsd"``: beta * KL(p || m) + (1 - beta) * KL(q || m) with m = beta * p + (1 - beta) * q, the generalized
      Jensen-Shannon divergence of GKD (arXiv:2306.13649). As usual with it, beta 0 means the forward and 1 the
      reverse KL, which its limits are after division by beta or 1 - beta.
    - ``"skew_kl"``: KL(p || beta * p + (1 - beta) * q); ``"skew_reverse_kl"``: KL(q || beta * p + (1 - beta) * q), of
      DistiLLM (arXiv:2402.03898), whose alpha is beta.
    - ``"total_variation"``: half of the sum of abs(q - p).
    - ``"mse"``: mean over the vocabulary of the squared differences of tempered logits; ``"cosine"``: 1 - their cosine
      similarity. Both compare logits, not distributions.

    Logits of -inf are classes without probability. A KL is infinite where its first distribution gives probability to
    a class that the second does not; its gradient has no meaning then. The mixtures and the total variation are finite.

    Args:
        input: The student's hidden states, ``[..., hidden_size]``.
        linear_weight: The student's head, ``[vocab_size, hidden_size]``.
        teacher_input: The teacher's hidden states of the same tokens, ``[..., the teacher's hidden_size]``. The
            teacher is a constant: none of its tensors gets a gradient, also if it requires one.
        teacher_weight: The teacher's head, ``[the teacher's vocab_size, the teacher's hidden_size]``.
        kind: The divergence, one of those above.
        beta: Between 0 and 1; kinds without it in their formula ignore it.
        temperature: Divides both models' logits.
        t_squared: Whether to multiply by ``temperature ** 2``, which keeps gradients at the size that they have
            without a temperature.
        linear_bias, teacher_bias: Biases of the heads, ``[vocab_size]``.
        softcap, teacher_softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale, teacher_logit_scale: Factors of the logits.
        adapter, teacher_adapter: Low-rank updates of the logits, as LoRA makes them: ``[..., rank]``, already scaled,
            and ``[vocab_size, rank]``; the product of the first and the transposed second is added to the logits.
        mask: bool, ``[...]``: True at tokens that count; the others cost nothing.
        token_weight: Factor of each token's divergence, ``[...]``; the mean divides by its sum. Not differentiable.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that count, by their weight.
        vocab: ``"equal"`` raises for vocabularies of different sizes. ``"common"`` compares the first classes that
            both have, whose probabilities are normalized without the others: those get no gradient.
        chunk_bytes: Budget for one chunk of both models' logits, which never holds all tokens. By default chunks are
            chosen for speed on a GPU, and 8 MiB on a CPU.
        vocab_shard: This rank's part of the vocabulary, if each rank of a process group holds a part of both heads:
            weights, biases and the adapters' weights are its rows, of the same classes in both models. All ranks get
            the same divergence. Every rank has to call, and with ``reduction="none"`` to run backward.
        logits_dtype: ``torch.float32`` keeps the products' float32 sums in the logits, where the heads' dtype would
            round them: the divergence of two models that are close is a small difference. None for the heads' dtype.

    Returns:
        The divergence in at least float32, ``[...]`` for ``reduction="none"``, else a scalar; without tokens 0, with a
        gradient of zeros. Under autocast the products run in the autocast dtype, as a linear layer's would.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, dtypes, devices or options that do not fit.
    """
    others = {"linear_weight": linear_weight, "teacher_input": teacher_input, "teacher_weight": teacher_weight}
    check_floating_tensors("input", input, optional=False, **others)
    check_floating_tensors("input", input, linear_bias=linear_bias, teacher_bias=teacher_bias)
    check_choice("reduction", reduction, REDUCTIONS)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    if logits_dtype not in (None, torch.float32):
        raise wrong_value("logits_dtype", "torch.float32 or None", logits_dtype)
    options = DivergenceOptions.checked(
        kind, beta, temperature, t_squared, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    check_shape("teacher_input", teacher_input, (*input.shape[:-1], *teacher_input.shape[-1:]), "input's tokens")
    tokens = input.shape[:-1]
    check_tokens(mask, token_weight, input, tokens, "input")
    labels, weight_of_tokens = flat_tokens(mask, token_weight, input, tokens.numel())
    shaped = labels.view(tokens)
    student = check_head(input, linear_weight, linear_bias, shaped, adapter, vocab_shard)
    bias = None if teacher_bias is None else teacher_bias.detach()
    constants = teacher_input.detach(), teacher_weight.detach(), bias
    teacher = check_head(*constants, shaped, teacher_adapter, vocab_shard, _TEACHER_NAMES)
    sizes = linear_weight.shape[0], teacher_weight.shape[0]
    if vocab_shard is None:
        num_columns = num_common_columns(*sizes, vocab)
        student, teacher = (_first_classes(head, num_columns) for head in (student, teacher))
    elif sizes[0] != sizes[1] or vocab != "equal":
        raise ValueError(
            "vocab_shard must hold the same classes of both models, with vocab='equal', got"
            f" {sizes[0]} classes of the student and {sizes[1]} of the teacher with vocab={vocab!r}"
        )
    # A chunk has both models' logits, and the gradient where that is apart.
    sizes_of_elements = [head.dtype.itemsize for head in (student, teacher)]
    element_size = sum(sizes_of_elements) if logits_dtype is None else 2 * logits_dtype.itemsize + sizes_of_elements[0]
    settings = mask is None, *student.chunks(chunk_bytes, element_size), logits_dtype
    op = _linear_divergence if vocab_shard is None else partial(_compute, shard=vocab_shard)

    def compute(
        tensors: Sequence[Tensor | None], needs_gradient: list[bool], grad_losses: Tensor | None
    ) -> list[Tensor]:
        return op(*tensors, grad_losses, *settings, needs_gradient, reduction, *options)

    tensors = (*student.tensors, *teacher.tensors, labels, weight_of_tokens)
    with student.products_dtype():
        if any(student.needs_gradient):
            waits = reduction == "none" and is_trained(student.needs_gradient)
            loss = _DivergenceFunction.apply(compute, reduction, waits, student.needs_gradient, *tensors)
        else:
            loss = compute(tensors, student.needs_gradient, None)[0]
    return loss.view(tokens) if reduction == "none" else loss


def _first_classes(head: LinearHead, num_columns: int) -> LinearHead:
    """The head of the first classes only."""
    if head.vocab_size == num_columns:
        return head
    given = {"weight": head.weight, "bias": head.bias, "adapter_weight": head.adapter_weight}
    parts = {name: each[:num_columns] for name, each in given.items() if each is not None}
    return head._replace(**parts, vocab_size=num_columns, num_columns=num_columns)  # type: ignore[arg-type]
