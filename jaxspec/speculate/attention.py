"""Attention of one stage's visit: trees of a group over their prefixes, and the lane's chunk over its own.

Both are the same decomposition. A prefix part over pages, which each dcp rank computes for all query heads of its
group over the tokens it holds, then one exchange that brings every rank the partial results of its own heads; and a
part among the new rows, which each rank computes for its own heads only (inside the exchange it would count once a
rank). The parts are joined by their log-sum-exp.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.errors import UserError
from jaxspec.mesh import DCP, XLA, Collectives, rank
from jaxspec.models.decoder import DecoderLayout
from jaxspec.speculate.lane import LaneRows
from pallas_kernels.chunk_prefill import Prefix, causal_attention, chunk_prefill
from pallas_kernels.chunk_prefill import plan as prefill_plan
from pallas_kernels.context_decode import context_decode, kernel, plan
from pallas_kernels.lse_merge import join, merge, pack, unpack
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.kernel import tree_join

AUTO, REFERENCE, PALLAS = "auto", "reference", "pallas"
_HOPPER = "9.0"


def choose_attention(
    wanted: str, device: jax.Device, layout: DecoderLayout, nodes: int, geometry: PageGeometry
) -> tuple[str, str]:
    """Which attention decoding takes, `REFERENCE` or `PALLAS`, and why.

    Args:
      wanted: one of these, or `AUTO`: the kernel on Hopper GPUs for all that it takes.
      device: one of the mesh.
      nodes: T.

    Raises:
      UserError: the kernel is wanted where it can't be had.
    """
    broken = plan.unsupported(
        dtype=layout.dtype,
        tokens=nodes,
        heads=layout.heads.query_heads,
        kv_heads=layout.heads.kv_heads,
        head_dim=layout.config.head_dim,
        page_size=geometry.local_size,
    )
    is_hopper = getattr(device, "compute_capability", None) == _HOPPER
    if wanted == REFERENCE:
        return REFERENCE, "plain JAX"
    if wanted == PALLAS:
        if device.platform == "cpu" and layout.mesh.size > 1:
            broken = broken or f"mesh {layout.mesh} is simulated, but the kernel can be simulated on one device only"
        elif device.platform != "cpu" and not is_hopper:
            broken = broken or f"the kernel runs on Hopper GPUs, not on {device.device_kind}"
        if broken:
            other = "" if layout.dtype in plan.DTYPES else "dtype 'bfloat16', or "
            raise UserError(f"attention 'pallas': {broken}; use {other}attention 'reference' or 'auto'")
        return PALLAS, "simulated on the CPU: right results, very slow" if device.platform == "cpu" else "as asked for"
    if not is_hopper:
        return REFERENCE, "the kernel runs on Hopper GPUs"
    return (REFERENCE, broken) if broken else (PALLAS, "Hopper")


def attend_to_pages(
    attention: str,
    q: Float[Array, "B T H D"],
    pages: Float[Array, "L 2 P S K D"],
    layer: int,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """`context_decode` over pages that no axis splits along the sequence, as those of a draft.

    Args:
      attention: `PALLAS` takes the kernel where it takes these shapes.
    """
    (tokens, heads, head_dim), (page_size, kv_heads) = q.shape[1:], pages.shape[3:5]
    broken = plan.unsupported(
        dtype=pages.dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size
    )
    decode = kernel.context_decode if attention == PALLAS and not broken else context_decode
    return decode(q, pages, layer, page_table, lengths, scale=_scale(q))


# Keys and values of the rows of each layer so far.
type New = tuple[tuple[Float[Array, "N K D"], Float[Array, "N K D"]], ...]


@dataclasses.dataclass(frozen=True)
class VisitAttention:
    """The `attend` that a stage hands to its layers. Rows are the B * T tree nodes, then the lane's, then padding.

    Layers only read the cache; what they add to it is written once, when all have read (`written`): a few launches
    instead of some for every layer.

    Attributes:
      first_slot: of the group's B slots.
      is_occupied: a group is there at all; else nothing may be kept of its rows.
      lengths, page_table, ancestors: of the group's slots.
      lane: the chunk, or None in a program without a lane.
      attention: `PALLAS` takes the kernels, for the chunk where they take its shapes.
    """

    cache: TargetCache
    geometry: PageGeometry
    first_slot: Int[Array, ""]
    is_occupied: Bool[Array, ""]
    lengths: Int[Array, "B"]
    page_table: Int[Array, "B M"]
    ancestors: UInt32[Array, "B T 2"]
    lane: LaneRows | None
    attention: str = REFERENCE
    collectives: Collectives = XLA

    def __call__(
        self,
        new: New,
        layer: int,
        q: Float[Array, "N H D"],
        k: Float[Array, "N K D"],
        v: Float[Array, "N K D"],
    ) -> tuple[Float[Array, "N own_H*D"], New]:
        b, t = self.ancestors.shape[:2]
        tree = (x[: b * t].reshape(b, t, *x.shape[1:]) for x in (q, k, v))
        rows = self._trees(layer, *tree).reshape(b * t, -1)
        if self.lane is not None:
            chunk = (x[b * t : b * t + len(self.lane.tokens)] for x in (q, k, v))
            rows = jnp.concatenate([rows, self._chunk(layer, *chunk).reshape(len(self.lane.tokens), -1)])
        return jnp.pad(rows.astype(q.dtype), ((0, len(q) - len(rows)), (0, 0))), (*new, (k, v))

    def written(self, new: New, output: Float[Array, "N E"]) -> tuple[TargetCache, Float[Array, "N E"]]:
        """The cache with the rows of all layers: the trees' pending, the chunk's in its pages.

        Args:
          output: of the layers; it is returned, and whoever goes on must take it from here.
        """
        b, t = self.ancestors.shape[:2]
        rows = jnp.stack([jnp.stack(of_layer) for of_layer in new])  # [L, 2, N, K, D]
        trees = rows[:, :, : b * t].reshape(*rows.shape[:2], b, t, *rows.shape[3:])
        cache = self.cache.put_pending(self.first_slot, trees, self.is_occupied)
        if self.lane is None:
            return cache, output
        step = jnp.arange(len(self.lane.tokens))
        # After the last read of the pages, on which the output depends: else they would be copied.
        chunk, output = lax.optimization_barrier((rows[:, :, b * t : b * t + len(step)], output))
        positions = self.lane.start + step
        is_written = step < self.lane.length
        where = positions, is_written, self.lane.page_row, self.geometry
        return cache.put_rows(chunk, *where, by_kernel=self.attention == PALLAS), output

    def _trees(self, layer: int, q: Array, k: Array, v: Array) -> Float[Array, "B T own_H D"]:
        if self.attention == PALLAS:
            if self.geometry.dcp == 1:
                pages = (self.cache.pages[0], layer, self.page_table, self.lengths)
                return kernel.tree_decode(q, *pages, k, v, self.ancestors, scale=_scale(q))[0]
            parts = self._parts(kernel.context_decode, layer, q, self.page_table, self.lengths)
            return tree_join(q, k, v, self.ancestors, self._first_head(q), parts, scale=_scale(q))
        prefix = self._prefix(layer, q, self.page_table, self.lengths)
        own_q, own_k, own_v = self._own_heads(q, k, v)
        return join(prefix, tree_attention(own_q, own_k, own_v, self.ancestors, scale=_scale(q)))

    def _chunk(self, layer: int, q: Array, k: Array, v: Array) -> Float[Array, "C own_H D"]:
        assert self.lane is not None
        row, start = self.lane.page_row, self.lane.start
        if self.attention == PALLAS and self._has_prefill(q, k):
            if self.geometry.dcp == 1:
                prefix = Prefix(self.cache.pages[0], layer, row, start)
                return chunk_prefill(q, chunk=(k, v), prefix=prefix, scale=_scale(q))[0]
            parts = self._parts(_prefill_prefix, layer, q[None], row[None], start[None])
            output, lse = merge(*unpack(parts))
            own_q, *own = self._own_heads(q, k, v)
            among = chunk_prefill(own_q, chunk=(own[0], own[1]), prefix=None, scale=_scale(q))
        else:
            output, lse = self._prefix(layer, q[None], row[None], start[None])
            among = causal_attention(*self._own_heads(q, k, v), scale=_scale(q))
        return join((output[0], lse[0]), among)

    def _has_prefill(self, q: Array, k: Array) -> bool:
        """Whether the kernel takes chunks of these shapes: it takes fewer than that of the trees."""
        return not prefill_plan.unsupported(
            dtype=q.dtype,
            heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            page_size=self.geometry.local_size,
        )

    def _prefix(
        self, layer: int, q: Float[Array, "B T H D"], page_table: Array, lengths: Array
    ) -> tuple[Float[Array, "B T own_H D"], Float[Array, "B T own_H"]]:
        """Attention over all tokens in pages, for this rank's own heads."""
        if self.geometry.dcp == 1:
            return context_decode(q, self.cache.pages[0], layer, page_table, lengths, scale=_scale(q))
        return merge(*unpack(self._parts(context_decode, layer, q, page_table, lengths)))

    def _parts(
        self,
        decode: Callable[..., tuple[Array, Array]],
        layer: int,
        q: Float[Array, "B T H D"],
        page_table: Array,
        lengths: Array,
    ) -> Float[Array, "dcp B T own_H D+8"]:
        """Each rank's attention over the tokens in its pages, packed, for this rank's own heads."""
        local = self.geometry.local_length(lengths, rank((DCP,)))
        packed = pack(*decode(q, self.cache.pages[0], layer, page_table, local, scale=_scale(q)))
        by_owner = packed.reshape(*packed.shape[:2], self.geometry.dcp, -1, packed.shape[-1])
        return self.collectives.exchange(jnp.moveaxis(by_owner, 2, 0), DCP)

    def _own_heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """This rank's query heads, each with its KV head. (A rank's heads may begin inside a KV group.)"""
        ranks, heads, kv_heads = self.geometry.dcp, q.shape[-2], k.shape[-2]
        if ranks == 1:
            return q, k, v
        own = self._first_head(q) + jnp.arange(heads // ranks)
        kv_of_own = own // (heads // kv_heads)
        return jnp.take(q, own, axis=-2), jnp.take(k, kv_of_own, axis=-2), jnp.take(v, kv_of_own, axis=-2)

    def _first_head(self, q: Float[Array, "... H D"]) -> Int[Array, ""]:
        """Of this rank's own query heads."""
        return rank((DCP,)) * (q.shape[-2] // self.geometry.dcp)


def _prefill_prefix(
    q: Float[Array, "1 C H D"],
    pages: Array,
    layer: int,
    page_table: Int[Array, "1 M"],
    length: Int[Array, "1"],
    scale: float,
) -> tuple[Float[Array, "1 C H D"], Float[Array, "1 C H"]]:
    """The prefix part of a chunk, called as `context_decode` is."""
    output, lse = chunk_prefill(q[0], chunk=None, prefix=Prefix(pages, layer, page_table[0], length[0]), scale=scale)
    return output[None], lse[None]


def _scale(q: Float[Array, "... D"]) -> float:
    return q.shape[-1] ** -0.5
