"""Log-sum-exp merge of the splits of one device as one launch, as a Mosaic GPU kernel for Hopper.

XLA makes two or three launches of the plain form, each as long as the merge itself where queries are few: it does not
compute an exponential again for every column that it scales. Here a block reads one query row, of many parts at once,
keeps the running merge in registers, and writes where the row belongs among those of all heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.shapes import check_shapes

_THREADS = 128
_IN_FLIGHT = 32  # parts that are read at once, of 4 registers a thread each where D is 512


def unsupported(rows: int, head_dim: int) -> str | None:
    """Why the kernel does not take tiles of so many rows, as the rule that they break, or None where it does."""
    if head_dim % _THREADS and _THREADS % head_dim:
        return f"rows of {head_dim} values must have a multiple or a part of {_THREADS}, one a thread"
    if rows * head_dim % _THREADS:
        return f"tiles of {rows} rows of {head_dim} values must have a multiple of {_THREADS} values, one a thread"
    return None


def merge_splits(
    outputs: Float[Array, "B K parts tiles R D"],
    lses: Float[Array, "B K parts tiles L"],
    tokens: int,
    group: int,
    *,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Attention over the union of disjoint sets of keys.

    Args:
      outputs: each part's output, float32, normalised by its own softmax. Rows of a KV head are T tokens times the
        group's heads, in tiles of R; those after them are padding.
      lses: each part's log-sum-exp of the scores, natural logarithm; -1e30 (finite) for a part without keys. L is at
        least R, and what is beyond R is padding.
      tokens: T.
      group: query heads of a KV head; H is K of these.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Output and log-sum-exp over all parts; without any keys an output of 0 and -1e30.

    Raises:
      ValueError: shapes that the kernel does not take (see `unsupported`), or that don't go together.
    """
    check_shapes(outputs=(outputs, "B K parts tiles R D"), lses=(lses, "B K parts tiles L"))
    b, kv_heads, parts, tiles, rows, d = outputs.shape
    broken = unsupported(rows, d)
    if lses.shape[-1] < rows:
        broken = broken or f"lses of {lses.shape[-1]} rows must be of at least the {rows} that a tile of outputs has"
    if not 1 <= tokens * group <= tiles * rows:
        broken = broken or f"{tokens} tokens of {group} heads must be 1 to {tiles * rows} rows, as outputs has"
    if broken:
        raise ValueError(f"{broken}; use merge for this")
    interpret = mosaic.simulation(interpret)

    heads = kv_heads * group
    several = max(1, _THREADS // d)  # rows of a block
    width = several * d
    chunks = -(-parts // _IN_FLIGHT)
    size = -(-parts // chunks)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=min(4, width // _THREADS))

    def body(outputs_ref, lses_ref, o_ref, lse_ref, *shared):
        sequence, head = lax.axis_index("sequence"), lax.axis_index("head")
        first = lax.axis_index("rows") * several
        tile, row = lax.div(first, rows), lax.rem(first, rows)

        def over(values):
            """A number for each of the block's rows, in all of its columns."""
            column = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
            spread = plgpu.layout_cast(jnp.full(width, values[0]), layout)
            for i, value in enumerate(values[1:], start=1):
                spread = jnp.where(column < i * d, spread, value)
            return spread

        def add(chunk, carry):
            output, tops, totals = carry
            chosen = [chunk * size + i for i in range(size)]
            existing = [jnp.minimum(part, parts - 1) for part in chosen]
            here = [outputs_ref.at[sequence, head, part, tile] for part in existing]
            values = [plgpu.load(ref.at[pl.ds(row * d, width)], layout=layout) for ref in here]
            loaded = [[lses_ref[sequence, head, part, tile, row + i] for i in range(several)] for part in existing]
            lse = [
                [jnp.where(part < parts, x, -jnp.inf) for x in each] for part, each in zip(chosen, loaded, strict=True)
            ]
            new_tops = [functools.reduce(jnp.maximum, [x[i] for x in lse], top) for i, top in enumerate(tops)]
            scales = [jnp.exp(top - new_top) for top, new_top in zip(tops, new_tops, strict=True)]
            output = output * over(scales)
            totals = [total * scale for total, scale in zip(totals, scales, strict=True)]
            for x, value in zip(lse, values, strict=True):
                weights = [jnp.exp(one - new_top) for one, new_top in zip(x, new_tops, strict=True)]
                output = output + value * over(weights)
                totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
            return output, new_tops, totals

        none = plgpu.layout_cast(jnp.zeros(width, jnp.float32), layout)
        carry = none, [jnp.float32(NO_KEYS)] * several, [jnp.float32(0)] * several
        output, tops, totals = lax.fori_loop(0, chunks, add, carry)
        output = output / over(totals)

        if several > 1:  # registers can't be cut
            (o_s,) = shared
            o_s[...] = output
            plgpu.commit_smem()
        for i in range(several):
            this = first + i

            @pl.when(this < tokens * group)
            def put(i=i, this=this):
                place = sequence, lax.div(this, group), head * group + lax.rem(this, group)
                lse_ref[place] = tops[i] + jnp.log(totals[i])
                if several > 1:
                    plgpu.copy_smem_to_gmem(o_s.at[pl.ds(i * d, d)], o_ref.at[place])
                else:
                    o_ref[place] = output

        if several > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        grid=(b, kv_heads, -(-tokens * group // several)),
        grid_names=("sequence", "head", "rows"),
        interpret=interpret or None,
        out_type=(
            jax.ShapeDtypeStruct((b, tokens, heads, d), jnp.float32),
            jax.ShapeDtypeStruct((b, tokens, heads), jnp.float32),
        ),
        scratch_types=(plgpu.SMEM((width,), jnp.float32),) if several > 1 else (),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outputs.reshape(*outputs.shape[:4], rows * d), lses)
