"""Hardware faults: a processor or a memory that computes or keeps something wrong, silently.

Each strikes with some `probability` a step (one draw for all buckets of the step, so that it is the same whatever the
bucket layout) and either in all buckets of such a step or in one. Where in a bucket it strikes is drawn anew each time,
or once and for all where hardware would have it so (`lanes`, `stuck`); with another bucket layout these are other
weights. The same faults on two replicas are drawn independently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, seeded, widened

# Bits of a word, and those of its mantissa; between the mantissa and the sign is the exponent.
_FORMATS = {torch.float16: (16, 10), torch.bfloat16: (16, 7), torch.float32: (32, 23), torch.float64: (64, 52)}
_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


@implements("bit_flip")
def bit_flip(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    bits: int = 1,
    words: int = 1,
    where: str | int = "exponent",
    probability: float = 1.0,
    bucket: int | None = None,
) -> Tensor:
    """Some bits of some words are the opposite of what they were; everything else stays as it is, bit by bit.

    Args:
        own_D: the gradient of this replica, [D], float16, bfloat16, float32 or float64.
        honest_HD: not used.
        info: its generator gives the words and the bits, anew in each call.
        bits: different bits that flip in each word, 1 to 8.
        words: different words, drawn from all of the bucket; all of them if it has no more.
        where: the bits to draw from: "exponent", "mantissa", "sign" or "any"; or the one bit, 0 for the lowest.
        probability: of a step in which it happens, 0 to 1.
        bucket: the only bucket of a step in which it happens, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Raises:
        ValueError: `own_D` has another dtype, or its words have too few such bits.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator().manual_seed(1))
        >>> bit_flip(torch.tensor([1.0, 1.0, 1.0]), None, info, where=30)
        tensor([1., inf, 1.])

    Reference:
        Li et al. (2017), Understanding error propagation in deep learning neural network accelerators and applications.
    """
    width, choice = _choice(own_D.dtype, where)
    if bits > len(choice):
        what = f"{len(choice)} such bits" if isinstance(where, str) else "one bit of that number"
        raise ValueError(
            f'bits: got {bits}, but a word of {own_D.dtype} has {what} (where={where!r}). Use fewer, or where="any".'
        )
    out_D = own_D.clone(memory_format=torch.contiguous_format)
    if own_D.numel() == 0 or not _strikes(info, probability, bucket):
        return out_D
    index_W = _distinct(words, own_D.numel(), info.generator)
    order_WB = torch.rand(len(index_W), len(choice), generator=info.generator).argsort(1)[:, :bits]
    mask_W = (torch.ones((), dtype=torch.int64) << torch.tensor(choice)[order_WB]).sum(1)
    _flip(out_D, index_W, mask_W, width)
    return out_D


@implements("lanes")
def lanes(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    how: str = "xor",
    lane: int | None = None,
    period: int = 32,
    where: str | int = "exponent",
    factor: float = -1.0,
    probability: float = 1.0,
    bucket: int | None = None,
) -> Tensor:
    """Every `period`-th element is wrong, as from one broken lane of a vector unit or of a GPU's warp.

    Lane and bit are drawn from the seed and the replica: they stay the same in all steps and buckets. An element's lane
    is its place in the bucket modulo `period`.

    Args:
        own_D: the gradient of this replica, [D], float16, bfloat16, float32 or float64.
        honest_HD: not used.
        info: its seed and replica give lane and bit.
        how: "xor": one bit flips, the same in all elements; "scale": they are multiplied by `factor`.
        lane: which lane, 0 to period - 1; None: drawn.
        period: how many lanes there are, >= 1.
        where: for "xor", the bits to draw from or the bit itself, as for `bit_flip`.
        factor: for "scale", any finite number.
        probability: of a step in which it happens, 0 to 1.
        bucket: the only bucket of a step in which it happens, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Raises:
        ValueError: "xor" and `own_D` has another dtype, or its words have no such bit.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> lanes(torch.ones(6), None, info, how="scale", lane=1, period=3, factor=0.5)
        tensor([1.0000, 0.5000, 1.0000, 1.0000, 0.5000, 1.0000])

    Reference:
        Hochschild et al. (2021), Cores that don't count.
    """
    generator = seeded(info.seed, info.replica, purpose="lanes")
    drawn = int(torch.randint(period, (), generator=generator))
    width, choice = _choice(own_D.dtype, where) if how == "xor" else (0, [0])
    bit = choice[int(torch.randint(len(choice), (), generator=generator))]
    out_D = own_D.clone(memory_format=torch.contiguous_format)
    first = drawn if lane is None else lane
    index_W = torch.arange(first, max(own_D.numel(), first), period)
    if len(index_W) and _strikes(info, probability, bucket):
        if how == "xor":
            _flip(out_D, index_W, torch.ones(1, dtype=torch.int64) << bit, width)
        else:
            _scale(out_D, index_W, factor)
    return out_D


@implements("gemm_tile")
def gemm_tile(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    rows: int = 16,
    cols: int = 16,
    pitch: int = 1024,
    factor: float = 64.0,
    probability: float = 1.0,
    bucket: int | None = None,
) -> Tensor:
    """One tile of a weight gradient is multiplied by `factor`, as if one block of a matrix product went wrong.

    A bucket is flat, so the tile is `rows` runs of `cols` elements, `pitch` apart: the width of the weight matrix.
    Where it begins is drawn anew in each call; it may straddle tensors, and what reaches beyond the bucket is cut off.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its generator gives the place.
        rows: height of the tile, >= 1.
        cols: width of the tile, 1 to pitch.
        pitch: elements from one row of the tile to the next.
        factor: size relative to the true gradient, any finite number.
        probability: of a step in which it happens, 0 to 1.
        bucket: the only bucket of a step in which it happens, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> gemm_tile(torch.ones(6), None, info, rows=2, cols=2, pitch=4, factor=5.0)
        tensor([5., 5., 1., 1., 5., 5.])

    Reference:
        Rech et al. (2013), An efficient and experimentally tuned software-based hardening strategy for matrix
        multiplication on GPUs, for the shapes of such errors.
    """
    out_D = own_D.clone()
    if own_D.numel() == 0 or not _strikes(info, probability, bucket):
        return out_D
    last = max(own_D.numel() - (rows - 1) * pitch - cols, 0)
    start = int(torch.randint(last + 1, (), generator=info.generator))
    index_RC = start + torch.arange(rows)[:, None] * pitch + torch.arange(cols)
    _scale(out_D, index_RC[index_RC < own_D.numel()], factor)
    return out_D


@implements("single_element")
def single_element(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    factor: float = 1e4,
    probability: float = 1.0,
    bucket: int | None = None,
) -> Tensor:
    """One element, drawn anew in each call, is `factor` times the root mean square of the bucket.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its generator gives the place.
        factor: any finite number; large ones overflow float16 to Inf.
        probability: of a step in which it happens, 0 to 1.
        bucket: the only bucket of a step in which it happens, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator().manual_seed(0))
        >>> single_element(torch.ones(4), None, info, factor=7.0)
        tensor([7., 1., 1., 1.])

    Reference:
        Dixit et al. (2021), Silent data corruptions at scale.
    """
    out_D = own_D.clone()
    if own_D.numel() and _strikes(info, probability, bucket):
        index = int(torch.randint(own_D.numel(), (), generator=info.generator))
        out_D[index] = (widened(own_D).square().mean().sqrt() * factor).to(own_D.dtype)
    return out_D


@implements("stuck")
def stuck(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    words: int = 1,
    value: float = 1.0,
    probability: float = 1.0,
    bucket: int | None = None,
) -> Tensor:
    """Some words hold the same value in every step, whatever was written to them.

    Which words is drawn from the seed, the replica and the number of the bucket.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its seed, replica and call give the words.
        words: different words of a bucket; all of them if it has no more.
        value: what they hold, any finite number; rounded to the dtype.
        probability: of a step in which it happens, 0 to 1.
        bucket: the only bucket of a step in which it happens, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator(), seed=2)
        >>> stuck(torch.ones(4), None, info, value=0.25)
        tensor([0.2500, 1.0000, 1.0000, 1.0000])

    Reference:
        Schroeder, Pinheiro and Weber (2009), DRAM errors in the wild, for hard errors of memory.
    """
    out_D = own_D.clone()
    if own_D.numel() and _strikes(info, probability, bucket):
        generator = seeded(info.seed, info.replica, info.call, purpose="stuck")
        out_D[_distinct(words, own_D.numel(), generator).to(own_D.device)] = value
    return out_D


def _strikes(info: AttackInfo, probability: float, bucket: int | None) -> bool:
    generator = seeded(info.seed, info.replica, info.step, purpose="strike")
    return bucket in (None, info.call) and float(torch.rand((), generator=generator)) < probability


def _choice(dtype: torch.dtype, where: str | int) -> tuple[int, list[int]]:
    """Bits in a word, and the numbers of those that `where` names."""
    if dtype not in _FORMATS:
        known = ", ".join(str(one).removeprefix("torch.") for one in _FORMATS)
        raise ValueError(f"name: the gradients are {dtype}, but bits are known of {known} only. Use another fault.")
    width, mantissa = _FORMATS[dtype]
    if isinstance(where, int):
        if not 0 <= where < width:
            raise ValueError(
                f"where: got {where}, but the gradients are {dtype}: bits 0 to {width - 1}, the sign last. Use one of "
                "these, or a name."
            )
        return width, [where]
    named = {"sign": range(width - 1, width), "exponent": range(mantissa, width - 1), "mantissa": range(mantissa)}
    return width, list(named.get(where, range(width)))


def _flip(out_D: Tensor, index_W: Tensor, mask_W: Tensor, width: int) -> None:
    """XOR words of a contiguous tensor in place with int64 masks of which the lowest `width` bits count."""
    if width < 64:  # the sign bit of a narrower word, as a number that fits in it
        mask_W = torch.where(mask_W >= 1 << (width - 1), mask_W - (1 << width), mask_W)
    words_D, index_W = out_D.view(_WORDS[width]), index_W.to(out_D.device)
    words_D[index_W] ^= mask_W.to(out_D.device, _WORDS[width])


def _scale(out_D: Tensor, index_W: Tensor, factor: float) -> None:
    index_W = index_W.to(out_D.device)
    out_D[index_W] = (widened(out_D[index_W]) * factor).to(out_D.dtype)


def _distinct(count: int, size: int, generator: torch.Generator) -> Tensor:
    """min(count, size) different numbers below size, in ascending order, without a pass over all of them if few."""
    if count >= size:
        return torch.arange(size)
    if 2 * count > size:
        return torch.randperm(size, generator=generator)[:count].sort().values
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < count:
        more = torch.randint(size, (count - len(found),), generator=generator)
        found = torch.unique(torch.cat([found, more]))
    return found
