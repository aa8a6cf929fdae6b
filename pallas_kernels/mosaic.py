"""What the kernels for Hopper share: the layouts of wgmma in registers, products, and how kernels are simulated."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt32

WGMMA_ROWS = 64  # of the first operand of one wgmma, which a warpgroup does
LOG2_E = math.log2(math.e)
MATRIX, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def simulation(interpret: bool | plgpu.InterpretGPUParams | None) -> plgpu.InterpretGPUParams | Literal[False]:
    """How a kernel is simulated, or False where it is not; None simulates it where the CPU is the default backend."""
    if interpret is None:
        interpret = jax.default_backend() == "cpu"
    return plgpu.InterpretGPUParams() if interpret is True else interpret or False


def unsupported_scale(scale: float) -> str | None:
    """Why a kernel does not take the scale of the scores, as the rule that it breaks, or None where it does."""
    if 0 < scale < math.inf:
        return None
    return f"scale={scale} must be positive and finite: the largest product is taken for the largest score"


def first_page(layer: int | Int[Array, ""], pages_per_layer: int) -> Int[Array, "1"]:
    """Where a layer begins in an array of all layers' pages; in memory, so that all layers are one kernel."""
    return jnp.reshape(jnp.int32(layer) * pages_per_layer, 1)


def row_bits(ancestors: UInt32[Array, "B T 2"], heads: int, tiles: int, rows: int) -> Int[Array, "B 2 tiles 64"]:
    """The ancestor words of each query row, in tiles of `rows`; a node's heads are consecutive rows."""
    words = jnp.repeat(lax.bitcast_convert_type(ancestors, jnp.int32).swapaxes(1, 2), heads, axis=2)
    cut = pad(words, 2, tiles * rows).reshape(*words.shape[:2], tiles, rows)
    return pad(cut, 3, WGMMA_ROWS)


def pad(x: Array, axis: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


# Inside a kernel


def dot(lhs, rhs, width: int) -> Float[Array, "64 width"]:
    """lhs @ rhs: `rhs` in shared memory, and `lhs` there, where the interpreter knows it too, or in registers."""

    def run(acc):
        plgpu.wgmma(acc, lhs, rhs)
        return acc[...]  # waits for the product

    return pl.run_scoped(run, plgpu.ACC((WGMMA_ROWS, width), jnp.float32))


def add_product(acc, weights, values, interpret):
    """acc + weights @ values, with the weights in registers, which the interpreter does not know."""
    if interpret:
        loaded = values[...]
        plgpu.commit_smem()  # unlike the tensor cores' reads, this one is not in order with the next copy
        return acc + jnp.dot(weights, loaded, preferred_element_type=jnp.float32)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))


def dot_and_add_product(queries, keys, acc, weights, values, meanwhile: Callable[[Array], Any], interpret):
    """`add_product`, and the result of `meanwhile` on queries @ keys.T (as `dot`), which does not wait for the sum."""
    width = keys.shape[0]
    if interpret:
        return add_product(acc, weights, values, interpret), *meanwhile(dot(queries, keys.T, width))

    def run(scores_ref, acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(scores_ref, queries, keys.T)
        plgpu.wgmma(acc_ref, weights, values)
        # The barriers keep the compiler from computing ahead of a wait, and from waiting ahead of the computation.
        scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        result = meanwhile(scores)
        return lax.optimization_barrier((plgpu.wgmma_accumulator_load(acc_ref, wait_n=0), *result))

    return pl.run_scoped(run, plgpu.ACC((WGMMA_ROWS, width), jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def add_product_of_shared(acc, weights, values, meanwhile: Callable[[], Any], interpret):
    """acc + weights @ values, all but `acc` in shared memory; and what `meanwhile` returns, which runs beside it."""

    def run(result):
        if not interpret:  # the interpreter has no store to an accumulator
            result[...] = acc
        plgpu.wgmma(result, weights, values)
        other = meanwhile()
        product = result[...]  # waits for it
        return (acc + product if interpret else product), other

    return pl.run_scoped(run, plgpu.ACC(acc.shape, jnp.float32))


def operand(shape: Sequence[int], dtype) -> plgpu.SMEM:
    """Shared memory with rows of a multiple of 128 bytes, as wgmma reads it, and without bank conflicts."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def clear_rows(count, values) -> None:
    """Zeros instead of the rows from `count` on, to be committed.

    A weight of 0 would let a NaN through that an earlier owner of a page left.
    """
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
    loaded = plgpu.load(values, layout=MATRIX)
    values[...] = jnp.where(row < count, loaded, jnp.zeros_like(loaded))


def clear_after(count, values, cleared, me) -> None:
    """`clear_rows`, which the first warpgroup does and all wait for."""

    @pl.when(me == 0)
    def _():
        clear_rows(count, values)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cleared)

    plgpu.barrier_wait(cleared)


def share_roles(
    me, warpgroups: int, registers: tuple[int, int] | None, fetch: Callable[[], None], multiply: Callable[[], None]
) -> None:
    """The warpgroup after the first `warpgroups` fetches for them.

    Args:
      registers: of a thread that multiplies and of one that fetches; None leaves them as the compiler shares them out.
    """

    @pl.when(me == warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        fetch()

    @pl.when(me < warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        multiply()


def load_words(words: Sequence[Any], axis: int = 0) -> list[Int[Array, "queries"]]:
    """Of the ancestor bits in memory, of queries along an axis of the scores."""
    return [plgpu.load(word, layout=MATRIX.reduce(1 - axis), optimized=False) for word in words]


def sees(words: Sequence[Int[Array, "queries"]], node: Int[Array, "_ _"], axis: int = 0) -> Bool[Array, "_ _"]:
    """Whether each query, along an axis, sees each node; `words` are the two words of the queries' ancestor bits."""
    low, high = (lax.broadcast_in_dim(word, node.shape, [axis]) for word in words)
    return jnp.right_shift(jnp.where(node < 32, low, high), node & 31) & 1 == 1


def over(rows: Array, width: int) -> Array:
    return lax.broadcast_in_dim(rows, (WGMMA_ROWS, width), [0])


def full(shape: tuple[int, ...], value: float, layout) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
