"""The running softmax of attention whose scores come tile by tile from wgmma.

The weights of a row need not be relative to its largest score so far, for what is found is divided by their sum in the
end: any score does from which the largest is not so far that float32 or a weight's own type would overflow. So what a
row's weights are relative to, its `top`, stays as it is until a score is above it by more than `_SLACK` powers of two,
and then rises to the largest. After the first tiles that is rare, and where no row of a warp needs it, the warp leaves
out the reduction of maxima over the four threads that share a row, and rescaling the sum of the values. What a row
gives does not depend on other rows.

A row that one key dominates pays with accuracy: that key's weight was 1, and is now rounded like any other where it
meets the values, but not in the sum of weights: by up to 2^-8 of itself in bfloat16, 2^-11 in float16.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # private names, that may move
from jax._src.lib.mlir.dialects import arith, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.context_decode.reference import NO_KEYS

_SLACK = 8.0  # weights up to 256
_COLUMNS = 8  # of scores, of which each of the four threads that share a row has two


class Softmax(NamedTuple):
    """Of the scores so far.

    Attributes:
      top: what the weights of a row are relative to, a score.
      sums: of weights; column c has those of keys c, c + 8, and so on.
    """

    top: Float[Array, "64"]
    sums: Float[Array, "64 8"]

    @property
    def total(self) -> Float[Array, "64"]:
        return self.sums.sum(axis=1)


def nothing() -> Softmax:
    rows = mosaic.WGMMA_ROWS
    return Softmax(mosaic.full((rows,), NO_KEYS, mosaic.ROW), mosaic.full((rows, _COLUMNS), 0.0, mosaic.MATRIX))


def soften(
    scores: Float[Array, "64 keys"], before: Softmax, to_log2: float, interpret
) -> tuple[Float[Array, "64 keys"], Softmax, Float[Array, "64"]]:
    """A tile's weights, the softmax with them, and by what factor all before shrinks.

    Args:
      to_log2: factor on the scores, for powers of two.
    """
    top = raise_top(before.top, scores, to_log2, interpret)
    shrink, weights = shrink_of(before.top, top, to_log2), weigh(scores, top, to_log2)
    sums = before.sums * mosaic.over(shrink, _COLUMNS) + _fold(jnp.add, weights)
    return weights, Softmax(top, sums), shrink


def raise_top(
    top: Float[Array, "64"], scores: Float[Array, "64 keys"], to_log2: float, interpret
) -> Float[Array, "64"]:
    """The largest score of a row so far where it is far above the row's `top`, else that."""
    slack, largest = _SLACK / to_log2, _fold(jnp.maximum, scores)

    @plgpu.inline_mgpu(arg_types=(mosaic.ROW, mosaic.MATRIX), return_type=_like(top, mosaic.ROW))
    def run(_, top, largest):
        limit = (top + slack).broadcast_in_dim(largest.shape, (0,), largest.layout)
        return _where_any(largest > limit, lambda: largest.reduce("max", 1), top)

    of_row = largest.max(axis=1) if interpret else run(top, largest)
    return jnp.where(of_row > top + slack, of_row, top)


def weigh(scores: Float[Array, "64 keys"], top: Float[Array, "64"], to_log2: float) -> Float[Array, "64 keys"]:
    return jnp.exp2(scores * to_log2 - mosaic.over(top * to_log2, scores.shape[1]))


def shrink_of(before: Float[Array, "64"], top: Float[Array, "64"], to_log2: float) -> Float[Array, "64"]:
    """By what factor weights relative to `before` shrink, to be relative to `top`."""
    return jnp.exp2((before - top) * to_log2)


def rescale(acc: Float[Array, "64 D"], shrink: Float[Array, "64"], interpret) -> Float[Array, "64 D"]:
    """acc * shrink, at most 1, which warps leave out whose rows all keep their `top`."""
    if interpret:
        shrink = mosaic.over(shrink, acc.shape[1])
        return jnp.where(shrink < 1.0, acc * shrink, acc)

    @plgpu.inline_mgpu(arg_types=(mosaic.MATRIX, mosaic.ROW), return_type=_like(acc, mosaic.MATRIX))
    def run(_, acc, shrink):
        return _where_any(shrink < 1.0, lambda: acc * shrink.broadcast_in_dim(acc.shape, (0,), acc.layout), acc)

    return run(acc, shrink)


def _like(x: Array, layout) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)


def _fold(operation, x: Float[Array, "64 keys"]) -> Float[Array, "64 8"]:
    """As far as a thread can by itself."""
    return functools.reduce(operation, [x[:, first : first + _COLUMNS] for first in range(0, x.shape[1], _COLUMNS)])


def _where_any(
    condition: mgpu.FragmentedArray, compute: Callable[[], mgpu.FragmentedArray], otherwise: mgpu.FragmentedArray
) -> mgpu.FragmentedArray:
    """What `compute` returns in warps where the condition holds anywhere; others leave it out.

    All threads of a warp take the same branch, as shuffles in it need.
    """
    i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
    flags = [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in condition.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]
    mine = arith.extui(i32, functools.reduce(arith.ori, flags))
    vote = (
        "{ .reg .pred mine, any; setp.ne.u32 mine, $1, 0; vote.sync.any.pred any, mine, -1; selp.u32 $0, 1, 0, any; }"
    )
    anyone = arith.trunci(i1, mgpu_utils.inline_ptx(vote, mine, result_types=i32, convergent=True))
    kept = list(otherwise.registers.flat)
    kinds = [register.type for register in kept]
    branch = scf.IfOp(anyone, kinds, has_else=True)  # type: ignore[call-arg]  # as it is generated, not as it is
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(compute().registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(kept)
    registers = np.array(list(branch.results), object).reshape(otherwise.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=otherwise.layout, _is_signed=otherwise.is_signed)
