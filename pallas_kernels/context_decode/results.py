"""How what a block finds leaves it.

Where two warpgroups take turns, the first joins what both found. Where the blocks of all splits are a cluster, each
merges a share of the output's columns: it keeps its own part of them and gets the others through memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE, Plan
from pallas_kernels.context_decode.reference import NO_KEYS


class Outputs(NamedTuple):
    """In memory: outputs f32[B, K, splits, row_tiles, rows, D] and log-sum-exps f32[B, K, splits, row_tiles, 64] of
    each split, and where a cluster merges them the same of all keys, as one split."""

    o: Any
    lse: Any
    merged: Any = None
    merged_lse: Any = None


class Shared(NamedTuple):
    """In shared memory: pieces of the output, log-sum-exps, and `top` and sum of the other warpgroup's softmax."""

    o: Any
    lse: Any
    other: Any


class Barriers(NamedTuple):
    """For the first of two warpgroups that take turns; for a cluster, when all have written and what it reads is in."""

    is_told: Any
    all_written: Any = None
    merge_in: Any = None


def shapes(plan: Plan, batch: int, kv_heads: int, head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of `Outputs`."""

    def of(parts: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        here = (batch, kv_heads, parts, plan.row_tiles)
        return (
            jax.ShapeDtypeStruct((*here, plan.rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*here, TILE), jnp.float32),
        )

    return of(plan.splits) + (of(1) if plan.is_cluster else ())


def shared_memory(plan: Plan, head_dim: int) -> tuple[plgpu.SMEM, ...]:
    """Of `Shared`."""
    share = plan.share(head_dim)
    return (
        plgpu.SMEM((plan.warpgroups, head_dim // share, TILE, share), jnp.float32),
        plgpu.SMEM((plan.row_sets, TILE), jnp.float32),
        plgpu.SMEM((2, TILE), jnp.float32),
    )


def barriers(plan: Plan) -> tuple[Any, ...]:
    """Of `Barriers`."""
    is_told = (plgpu.Barrier(),)
    if not plan.is_cluster:
        return is_told
    return (
        *is_told,
        plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=plan.row_sets),
        plgpu.Barrier(num_arrivals=plan.splits - 1, num_barriers=plan.row_sets),
    )


@dataclasses.dataclass(frozen=True)
class Results:
    """Of a warpgroup.

    Attributes:
      plan: of all blocks.
      scale: factor on the scores.
      sequence, head, split: which block.
      row_set, row_tile: which rows, of the block's and of all.
      turn: which of the warpgroups that take turns.
    """

    plan: Plan
    scale: float
    sequence: Int[Array, ""]
    head: Int[Array, ""]
    split: Int[Array, ""]
    row_set: Int[Array, ""]
    row_tile: Int[Array, ""]
    turn: Int[Array, ""]
    outputs: Outputs
    shared: Shared
    barriers: Barriers

    def leave(self, acc, top, total) -> None:
        """Sum of weighted values, and `top` and sum of the softmax, of this warpgroup's tiles."""
        pieces = self._cut(acc)
        if self.plan.turns == 1:
            self._put(pieces, top, total)
        else:
            pl.when(self.turn == 1)(lambda: self._tell(pieces, top, total))
            pl.when(self.turn == 0)(lambda: self._put(*self._hear(pieces, top, total)))

    @property
    def _share(self) -> int:
        return self.plan.share(self.outputs.o.shape[-1])

    def _cut(self, output) -> list[Array]:
        return [output[:, first : first + self._share] for first in range(0, output.shape[1], self._share)]

    def _tell(self, pieces, top, total) -> None:
        """By the second, for the first."""
        for i, piece in enumerate(pieces):
            self.shared.o.at[1, i][...] = piece
        for i, each in enumerate((top, total)):
            self.shared.other.at[i][...] = each
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.is_told)

    def _hear(self, pieces, top, total):
        """What both found, by the first."""
        plgpu.barrier_wait(self.barriers.is_told)
        other_top, other_total = (plgpu.load(self.shared.other.at[i], layout=mosaic.ROW) for i in range(2))
        new_top = jnp.maximum(top, other_top)
        to_log2 = self.scale * mosaic.LOG2_E
        shrink, other_shrink = (jnp.exp2((x - new_top) * to_log2) for x in (top, other_top))
        joined = [
            piece * mosaic.over(shrink, self._share)
            + plgpu.load(self.shared.o.at[1, i], layout=mosaic.MATRIX) * mosaic.over(other_shrink, self._share)
            for i, piece in enumerate(pieces)
        ]
        return joined, new_top, total * shrink + other_total * other_shrink

    def _put(self, pieces, top, total) -> None:
        has_keys = total > 0
        divisor = jnp.where(has_keys, total, 1.0)
        here = (self.sequence, self.head, self.split, self.row_tile)
        self._copy_lse(jnp.where(has_keys, top * self.scale + jnp.log(divisor), NO_KEYS), self.outputs.lse.at[here])
        pieces = [piece / mosaic.over(divisor, self._share) for piece in pieces]
        self._copy(
            pieces, 0, self.outputs.o.at[here], self._other_splits if self.plan.is_cluster else range(len(pieces))
        )
        if self.plan.is_cluster:
            plgpu.wait_smem_to_gmem(0)
            self._merge()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def _other_splits(self) -> list[Int[Array, ""]]:
        return [lax.rem(self.split + i, self.plan.splits) for i in range(1, self.plan.splits)]

    def _merge(self) -> None:
        """Of all splits, this block's share of the columns."""
        o, lse, merged, merged_lse = self.outputs
        o_s, merge_in = self.shared.o, self.barriers.merge_in
        me, share, of_rows, here = self.row_set, self._share, (self.sequence, self.head), self.row_tile
        first = self.split * share
        plgpu.barrier_arrive(self.barriers.all_written)
        plgpu.barrier_wait(self.barriers.all_written)
        for other in self._other_splits:
            source = o.at[*of_rows, other, here, :, pl.ds(first, share)]
            plgpu.copy_gmem_to_smem(source, o_s.at[me, other, pl.ds(0, self.plan.rows)], merge_in.at[me])
        lses = [
            plgpu.load(lse.at[*of_rows, split, here], layout=mosaic.ROW, optimized=False)
            for split in range(self.plan.splits)
        ]
        top = functools.reduce(jnp.maximum, lses)
        weights = [jnp.exp(lse - top) for lse in lses]
        total = functools.reduce(jnp.add, weights)
        output = mosaic.full((TILE, share), 0.0, mosaic.MATRIX)
        plgpu.barrier_wait(merge_in.at[me])
        for split, weight in enumerate(weights):
            output += plgpu.load(o_s.at[me, split], layout=mosaic.MATRIX) * mosaic.over(weight, share)
        plgpu.commit_smem()

        @pl.when(self.split == 0)
        def copy_lse():
            self._copy_lse(top + jnp.log(total), merged_lse.at[*of_rows, 0, here])

        self._copy([output / mosaic.over(total, share)], first, merged.at[*of_rows, 0, here], [0])

    def _copy_lse(self, lse, target) -> None:
        lse_s = self.shared.lse
        lse_s.at[self.row_set][...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_s.at[self.row_set], target)

    def _copy(self, pieces, column, target, which) -> None:
        """Into shared memory, and some of them from there to their columns of a target."""
        o_s = self.shared.o
        for i, piece in enumerate(pieces):
            o_s.at[self.row_set, i][...] = piece
        plgpu.commit_smem()
        for i in which:
            columns = pl.ds(column + i * self._share, self._share)
            plgpu.copy_smem_to_gmem(o_s.at[self.row_set, i, pl.ds(0, self.plan.rows)], target.at[:, columns])
