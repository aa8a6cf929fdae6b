"""Taps: residual streams that a draft reads from inside the target, while rows pass through the stages.

R_i is the residual stream after i of the target's n layers: R_0 the embedding, R_n before the final norm. A tap is
numbered by its place in the ascending list of taps, whichever stage computes it. The stage that computes R_i does so as
the output of its layer i - 1, so a tap on the border of two stages belongs to the earlier one, and R_0 to the first.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.errors import UserError
from jaxspec.mesh import PP, rank
from jaxspec.models.decoder import DecoderLayout, Observe


def tap_places(taps: Sequence[int], stage_sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where each tap is computed: the stage, and the layer slot of it whose output it is (-1: what enters slot 0).

    Args:
      taps: R indices, ascending, each once.
      stage_sizes: layers of each stage.
    """
    ends = [sum(stage_sizes[: stage + 1]) for stage in range(len(stage_sizes))]
    stages = [next(stage for stage, end in enumerate(ends) if tap <= end) for tap in taps]
    return tuple((stage, tap - 1 - ends[stage] + stage_sizes[stage]) for tap, stage in zip(taps, stages, strict=True))


def tap_observer(taps: Sequence[int], layout: DecoderLayout) -> Observe[Float[Array, "N taps E"] | None]:
    """Puts each tap into its slot at the stage and the layer that compute it; the other stages keep what they have."""
    places = tap_places(taps, layout.stage_sizes)

    def observe(kept: Array | None, layer: int, x: Array) -> Array | None:
        for slot, (stage, after) in enumerate(places):
            if after == layer:
                assert kept is not None
                is_here = layout.mesh.pp == 1 or rank((PP,)) == stage
                kept = kept.at[:, slot].set(jnp.where(is_here, x, kept[:, slot]))
        return kept

    return observe


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises `UserError` for what is no ascending list of R indices of a target of so many layers."""
    if list(taps) != sorted(set(taps)):
        raise UserError(f"taps {list(taps)} must be ascending, each once: they name residual streams in their order")
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise UserError(
                f"tap {tap} must be between 0 (the embedding) and {num_layers} (after the target's last layer): "
                "taps count the layers before them"
            )
