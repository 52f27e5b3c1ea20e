"""Moments in 16 and 8 bits, written without bias: the specification in PyTorch, and the same for kernels.

Stochastic rounding adds a random number to a float32's bits and cuts the lower ones off, so that the mean of the result
is the number itself. Rounded to nearest, a moment whose change is below half a digit would never change.

A code of 8 bits is the upper bits of a float32 too. Blocks of 256 numbers along the last dimension have a scale, their
largest magnitude (block-wise quantization on a logarithmic grid, as in arXiv:2110.02861). With r = |x| / scale:

    code = (bits(r (1 - b) + b) - bits(b)) >> 20        b: where the first octave begins

That is eight codes per octave, and equal steps below b. The first moment has a sign and 127 codes over 16 octaves, the
second 255 over 32. The square root of the smallest second moment is above the smallest first moment, and no second
moment becomes 0 unless it is 0: a first moment is never divided by a vanished second one. A block with a number that is
not finite is NaN. Decoded moments that are encoded to nearest have the same codes and scales.

Random numbers are Philox4x32-10's (doi:10.1145/2063384.2063405), 32 bits for each element: the key is a seed, the
counter the element's index, the step and the parameter's number. A parameter and its moments take it times 1 and two
odd factors, whose upper bits look independent.
"""

import math
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_ops.arguments import wrong_value

BLOCK = 256
"""Numbers that share a scale."""
MIN_ELEMENTS = 4096
"""Of a parameter whose moments have codes."""
STATE_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
"""What moments are stored in, by the names that groups have: PyTorch saves no dtypes in shards."""
FACTORS = (1597334677, 741103597)
"""Of the random words of both moments: multipliers that pass the spectral test."""
WORD = 2**32 - 1
Moment = dict[str, Tensor]
"""Of one parameter's states: a moment by its name, or its codes and scales."""
NAMES = ("exp_avg", "exp_avg_sq")


def names_of(name: str) -> tuple[str, str]:
    """The names of a moment's codes, uint8 of the parameter's shape, and scales ``[..., blocks of a row]``, float32."""
    return f"{name}_codes", f"{name}_scales"


STORED = {*NAMES, *chain.from_iterable(map(names_of, NAMES))}
"""The names of all that may be stored of moments."""


def _grid(is_signed: bool) -> tuple[int, float]:
    """The largest code, whose number is 1, and the number that code 0 would be without an offset."""
    return (127, 1.125 * 2.0**-16) if is_signed else (255, 1.125 * 2.0**-32)


def random_words(shape: torch.Size, is_padded: bool, seed: int, step: Tensor, number: int) -> Tensor:
    """A random word for each element, int64; with ``is_padded`` rows are counted in whole blocks."""
    last = shape[-1] if shape else 1
    row = -(-last // BLOCK) * BLOCK if is_padded else last
    num_words = math.prod(shape[:-1]) * row
    group = torch.arange(-(-num_words // 4), device=step.device)
    counter = [group & WORD, group >> 32, step.long().expand_as(group), torch.full_like(group, number)]
    key = [seed & WORD, seed >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        upper = (b >> 32) ^ counter[1] ^ key[0], (a >> 32) ^ counter[3] ^ key[1]
        counter = [upper[0] & WORD, b & WORD, upper[1] & WORD, a & WORD]
        key = [key[0] + 0x9E3779B9 & WORD, key[1] + 0xBB67AE85 & WORD]
    words = torch.stack(counter, dim=-1).flatten()[:num_words]
    return words.view(*shape[:-1], row)[..., :last].view(shape)


def cut(x: Tensor, words: Tensor) -> Tensor:
    """``x`` in bfloat16, rounded stochastically from float32."""
    x = x.float()
    bits = (x.view(torch.int32) + (words >> 16).int()) & -65536
    return bits.view(torch.float32).where(x == x, x).bfloat16()  # NaN's bits would overflow


def encode(x: Tensor, is_signed: bool, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment, rounded stochastically by ``words``, or else to nearest."""
    x = x.float()
    num_blocks = -(-x.shape[-1] // BLOCK)
    blocks = F.pad(x, (0, num_blocks * BLOCK - x.shape[-1])).unflatten(-1, (num_blocks, BLOCK))
    scales = blocks.abs().amax(-1) + (0 * blocks).sum(-1)
    last, start = _grid(is_signed)
    ratio = x.abs() / _each(scales.where(scales != 0, 1.0), x.shape[-1])
    bits = (ratio * (1 - start) + start).view(torch.int32) - (1016 - last << 20)
    codes = bits + (2**19 if words is None else (words >> 12).int()) >> 20
    codes = codes | torch.signbit(x).int() << 7 if is_signed else codes.maximum((x > 0).int())
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """The numbers of :func:`encode`, in float32."""
    last, start = _grid(is_signed)
    bits = (codes.int() & last) + (1016 - last) << 20
    x = (bits.view(torch.float32) - start) * (1 / (1 - start)) * _each(scales, codes.shape[-1])
    return x.where(codes <= last, -x)


def _each(scales: Tensor, row_size: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, -1)[..., :row_size]


def read(state: Moment, name: str) -> Tensor:
    """A moment that may have codes, as numbers; spread as the state is."""
    if name in state:
        return state[name]
    codes, scales = (state[each] for each in names_of(name))
    is_signed = name == "exp_avg"
    if not isinstance(codes, DTensor):
        return decode(codes, scales, is_signed)
    return spread(decode(codes.to_local(), local(scales), is_signed), codes)


def converted(state: dict[str, Any], name: str, like: Tensor, dtype: torch.dtype) -> Moment:
    """A moment of saved states for a parameter ``like``: in ``dtype``, or of codes for uint8, rounded to nearest."""
    if dtype != torch.uint8:
        return {name: read(state, name).to(like.device, dtype)}
    codes, scales = names_of(name)
    if codes in state:
        return {each: state[each].to(like.device) for each in (codes, scales)}
    made = encode(local(state[name]).to(like.device), name == "exp_avg")
    return {each: spread(tensor, like) for each, tensor in zip((codes, scales), made, strict=True)}


def has_codes(state: dict[str, Any]) -> bool:
    """Whether a parameter's states have codes for moments."""
    return names_of(NAMES[0])[0] in state


def relaid(state: dict[str, Any], to_codes: bool) -> dict[str, Any]:
    """Saved states with codes for moments, or float32 for codes; as they are if that is so, or without moments."""
    if has_codes(state) == to_codes or not (has_codes(state) or NAMES[0] in state):
        return state
    made = {name: value for name, value in state.items() if name not in STORED}
    like = state[NAMES[0] if to_codes else names_of(NAMES[0])[0]]
    for name in NAMES:
        made |= converted(state, name, like, torch.uint8 if to_codes else torch.float32)
    return made


def zeros(like: Tensor, name: str, dtype: torch.dtype) -> Moment:
    """A moment before the first step."""
    if dtype != torch.uint8:
        return {name: torch.zeros_like(like, dtype=dtype)}
    codes = torch.zeros(local(like).shape, dtype=torch.uint8, device=like.device)
    scales = codes.new_zeros((*codes.shape[:-1], -(-codes.shape[-1] // BLOCK)), dtype=torch.float32)
    return {each: spread(tensor, like) for each, tensor in zip(names_of(name), (codes, scales), strict=True)}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread(part: Tensor, like: Tensor) -> Tensor:
    """``part`` as this rank's part of a DTensor that is spread as ``like``, if that is one.

    Its rows may be as long as those of ``like``, or as many as they have blocks.
    """
    if not isinstance(like, DTensor):
        return part
    row_size = like.shape[-1] if part.shape[-1] == local(like).shape[-1] else -(-like.shape[-1] // BLOCK)
    shape = torch.Size((*like.shape[:-1], row_size))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def is_flat(parameter: Tensor) -> bool:
    """Whether a parameter is FSDP1's: a part of a flat one, of no shape that can be told."""
    return getattr(parameter, "_fsdp_flattened", False)


def dtype_of(parameter: Tensor, state_dtype: str | None) -> torch.dtype:
    """The dtype of a parameter's moments, uint8 for codes, by a name in ``STATE_DTYPES``.

    Raises:
        ValueError: If blocks of a row would be divided among ranks.
    """
    wanted = STATE_DTYPES[state_dtype]
    if wanted != torch.uint8:
        return wanted or parameter.dtype
    is_matrix = is_flat(parameter) or (parameter.dim() > 1 and parameter.shape[-1] >= BLOCK)
    if not is_matrix or parameter.numel() < MIN_ELEMENTS:
        return torch.float32
    if isinstance(parameter, DTensor):
        if parameter.device.type not in ("meta", parameter.device_mesh.device_type):
            raise wrong_value("state_dtype", "None or a dtype for shards that are kept in CPU memory", state_dtype)
        sharded = [getattr(each, "dim", None) == parameter.dim() - 1 for each in parameter.placements]
        num_shards = math.prod(
            size for size, is_last in zip(parameter.device_mesh.shape, sharded, strict=True) if is_last
        )
        if num_shards > 1 and parameter.shape[-1] % (BLOCK * num_shards):
            expected = f"None or a dtype for a parameter whose rows of {parameter.shape[-1]} numbers are sharded over"
            raise wrong_value(
                "state_dtype", f"{expected} {num_shards} ranks in no whole blocks of {BLOCK}", state_dtype
            )
    return torch.uint8


@triton.jit
def kernel_random_words(start, seed, step, number, NUM_WORDS: tl.constexpr):
    """:func:`random_words` of the elements from ``start`` on, uint32 ``[NUM_WORDS]``."""
    group = start // 4 + tl.arange(0, NUM_WORDS // 4)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    third, fourth = low * 0 + step.to(tl.int32).to(tl.uint32), (low * 0 + number).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, third, fourth)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(NUM_WORDS)


@triton.jit
def kernel_cut(x, words):
    """:func:`cut`, in float32."""
    bits = (x.to(tl.uint32, bitcast=True) + (words >> 16)) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def kernel_scales(x):
    """The scales of blocks, the rows of ``x``."""
    return tl.max(tl.abs(x), 1) + tl.sum(0.0 * x, 1)


@triton.jit
def kernel_encode(x, scales, words, IS_SIGNED: tl.constexpr):
    """The codes of :func:`encode` for blocks, the rows of ``x``."""
    LAST: tl.constexpr = 127 if IS_SIGNED else 255
    START: tl.constexpr = 1.125 * 2.0**-16 if IS_SIGNED else 1.125 * 2.0**-32
    scales = tl.where(scales == 0.0, 1.0, scales)[:, None]
    ratio = tl.div_rn(tl.abs(x), tl.broadcast_to(scales, x.shape))  # of the largest exactly 1
    bits = (ratio * (1.0 - START) + START).to(tl.uint32, bitcast=True) - ((1016 - LAST) << 20)
    codes = (bits + (words >> 12)) >> 20
    if IS_SIGNED:
        codes = codes | (x.to(tl.uint32, bitcast=True) >> 31 << 7)
    else:
        codes = tl.maximum(codes, (x > 0.0).to(tl.uint32))
    return codes.to(tl.uint8)


@triton.jit
def kernel_decode(codes, scales, IS_SIGNED: tl.constexpr):
    """:func:`decode` of blocks, the rows of ``codes``."""
    LAST: tl.constexpr = 127 if IS_SIGNED else 255
    START: tl.constexpr = 1.125 * 2.0**-16 if IS_SIGNED else 1.125 * 2.0**-32
    bits = ((codes.to(tl.uint32) & LAST) + (1016 - LAST)) << 20
    x = (bits.to(tl.float32, bitcast=True) - START) * (1.0 / (1.0 - START)) * scales[:, None]
    return tl.where(codes <= LAST, x, -x)
