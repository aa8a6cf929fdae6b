"""The running softmax of attention whose scores come tile by tile, as warpgroups compute it from products of wgmma.

What a row's weights are relative to need not be its largest score so far: any score within a factor of 2 ** `_SLACK`
of the largest weight does, for what is found is divided by the sum of the weights in the end. So a warp leaves its
rows' reference as it is until a score passes it by more than that. After the first tile this is rare, and what it costs
is off the path of most tiles: to reduce over the four threads that share a row, and to rescale the sum of the values.
"""

import functools
import math
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
from pallas_kernels.mosaic import MATRIX, ROW, WGMMA_ROWS

_SLACK = 8.0  # in powers of two: weights up to 256, sums of which float32 holds
_COLUMNS = 8  # of a matrix, which the threads of a row hold once


class Softmax(NamedTuple):
    """Of the scores so far.

    Attributes:
      top: what the weights of a row are relative to, a score.
      sums: of weights, in parts that one thread adds up each.
    """

    top: Float[Array, "64"]
    sums: Float[Array, "64 8"]

    @property
    def total(self) -> Float[Array, "64"]:
        return self.sums.sum(axis=1)


def nothing() -> Softmax:
    return Softmax(mosaic.full((WGMMA_ROWS,), NO_KEYS, ROW), mosaic.full((WGMMA_ROWS, _COLUMNS), 0.0, MATRIX))


def soften(
    scores: Float[Array, "64 keys"], before: Softmax, to_log2: float, interpret
) -> tuple[Float[Array, "64 keys"], Softmax, Float[Array, "64"]]:
    """A tile's weights, the softmax with them, and by what factor that of before shrank.

    Args:
      to_log2: factor on the scores, for powers of two.
    """
    top = raise_top(before.top, scores, to_log2, interpret)
    shrink = jnp.exp2((before.top - top) * to_log2)
    weights = jnp.exp2(scores * to_log2 - mosaic.over(top * to_log2, scores.shape[1]))
    sums = add_up(before.sums, shrink, weights)
    return weights, Softmax(top, sums), shrink


def raise_top(
    top: Float[Array, "64"], scores: Float[Array, "64 keys"], to_log2: float, interpret
) -> Float[Array, "64"]:
    """The largest score of each row so far where any of the warp's is far above `top`, else that."""
    slack, largest = _SLACK / to_log2, _fold(jnp.maximum, scores)
    if interpret:
        of_row = largest.max(axis=1)
        return jnp.where(of_row > top + slack, of_row, top)

    @plgpu.inline_mgpu(arg_types=(ROW, MATRIX), return_type=plgpu.ShapeDtypeStruct(top.shape, top.dtype, layout=ROW))
    def run(_, top, largest):
        is_far = largest > (top + slack).broadcast_in_dim(largest.shape, (0,), largest.layout)
        return _where_any(is_far, lambda: largest.reduce("max", 1).max(top), top)

    return run(top, largest)


def rescale(acc: Float[Array, "64 D"], shrink: Float[Array, "64"], interpret) -> Float[Array, "64 D"]:
    """acc * shrink, where any of the warp's rows shrinks."""
    if interpret:
        return acc * mosaic.over(shrink, acc.shape[1])

    @plgpu.inline_mgpu(arg_types=(MATRIX, ROW), return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=MATRIX))
    def run(_, acc, shrink):
        return _where_any(shrink < 1.0, lambda: acc * shrink.broadcast_in_dim(acc.shape, (0,), acc.layout), acc)

    return run(acc, shrink)


def add_up(
    sums: Float[Array, "64 8"], shrink: Float[Array, "64"], weights: Float[Array, "64 keys"] | None = None
) -> Float[Array, "64 8"]:
    """The sums of before, shrunk, with a tile's weights."""
    shrunk = sums * mosaic.over(shrink, _COLUMNS)
    return shrunk if weights is None else shrunk + _fold(jnp.add, weights)


def _fold(operation, x: Float[Array, "64 keys"]) -> Float[Array, "64 8"]:
    """Over what one thread holds of a row."""
    return functools.reduce(operation, [x[:, i : i + _COLUMNS] for i in range(0, x.shape[1], _COLUMNS)])


def _where_any(condition: mgpu.FragmentedArray, compute, otherwise: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """What `compute` returns in warps with any true, computed only there."""
    i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
    flags = []
    for register in condition.registers.flat:
        if isinstance(register.type, ir.VectorType):
            size = math.prod(ir.VectorType(register.type).shape)
            flags += [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(size)]
        else:
            flags.append(register)
    here = arith.extui(i32, functools.reduce(arith.ori, flags))
    vote = "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.u32 $0, 1, 0, q; }"
    anywhere = mgpu_utils.inline_ptx(vote, here, result_types=i32, convergent=True)
    registers = list(otherwise.registers.flat)
    branch = scf.IfOp(arith.trunci(i1, anywhere), [r.type for r in registers], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(compute().registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(registers)
    shape, layout = otherwise.registers.shape, otherwise.layout
    return mgpu.FragmentedArray(
        _registers=np.array(list(branch.results), object).reshape(shape), _layout=layout, _is_signed=None
    )
