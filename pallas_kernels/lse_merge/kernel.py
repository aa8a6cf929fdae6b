"""Log-sum-exp merge of the splits of one device as one launch, as a Mosaic GPU kernel for Hopper.

XLA makes two or three launches of the plain form, each as long as the merge itself where queries are few: it does not
compute an exponential again for every column that it scales. Here a block reads the rows of one query, many parts at
once, and keeps the running merge in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.context_decode.reference import NO_KEYS

_THREADS = 128
_IN_FLIGHT = 32  # parts that are read at once, of 4 registers a thread each where D is 512


def merge_splits(
    outputs: Float[Array, "B parts P D"],
    lses: Float[Array, "B parts P"],
    rows: int,
    *,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B R D"], Float[Array, "B R"]]:
    """Attention over the union of disjoint sets of keys, of the first R rows: the others are padding.

    Args:
      outputs: each part's output, float32, normalised by its own softmax.
      lses: each part's log-sum-exp of the scores, natural logarithm; -1e30 (finite) for a part without keys.
      rows: R.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Output and log-sum-exp over all parts; without any keys an output of 0 and -1e30.

    Raises:
      ValueError: D is not a multiple of 128.
    """
    b, parts, _, d = outputs.shape
    if d % _THREADS:
        raise ValueError(f"rows of {d} values must be a multiple of {_THREADS}, one a thread; use merge for this")
    interpret = mosaic.simulation(interpret)

    chunks = -(-parts // _IN_FLIGHT)
    size = -(-parts // chunks)
    strided = plgpu.Layout.WG_STRIDED((d,), vec_size=min(4, d // _THREADS))

    def body(outputs_ref, lses_ref, o_ref, lse_ref):
        sequence, row = lax.axis_index("sequence"), lax.axis_index("row")

        def add(chunk, carry):
            output, top, total = carry
            chosen = [chunk * size + i for i in range(size)]
            existing = [jnp.minimum(part, parts - 1) for part in chosen]
            values = [plgpu.load(outputs_ref.at[sequence, part, row], layout=strided) for part in existing]
            loaded = [lses_ref[sequence, part, row] for part in existing]
            lse = [jnp.where(part < parts, x, -jnp.inf) for part, x in zip(chosen, loaded, strict=True)]
            new_top = functools.reduce(jnp.maximum, lse, top)
            scale = jnp.exp(top - new_top)
            output, total = output * scale, total * scale
            for x, value in zip(lse, values, strict=True):
                weight = jnp.exp(x - new_top)
                output, total = output + value * weight, total + weight
            return output, new_top, total

        none = plgpu.layout_cast(jnp.zeros(d, jnp.float32), strided), jnp.float32(NO_KEYS), jnp.float32(0)
        output, top, total = lax.fori_loop(0, chunks, add, none)
        o_ref[sequence, row] = output / total
        lse_ref[sequence, row] = top + jnp.log(total)

    return plgpu.kernel(
        body,
        grid=(b, rows),
        grid_names=("sequence", "row"),
        interpret=interpret or None,
        out_type=(
            jax.ShapeDtypeStruct((b, rows, d), jnp.float32),
            jax.ShapeDtypeStruct((b, rows), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outputs, lses)
