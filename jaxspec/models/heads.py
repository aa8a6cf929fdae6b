"""How attention heads are padded and split so that any mesh can hold them.

Padding belongs to the mesh, never to a checkpoint. Padded heads have zero weights, and the output projection has
zero rows for them, so they change nothing.
"""

import dataclasses

import numpy as np

from jaxspec.models.config import ModelConfig

PADDED = -1


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Where each canonical head goes.

    The padded model has `kv_heads` KV heads, each serving `queries_per_kv` query heads; both numbers of heads divide
    over the devices that hold them. Where there are more devices than the model has KV heads, each is repeated and its
    query heads are dealt out among the copies.

    Attributes:
      kv_sources: canonical KV head of each padded one, or `PADDED`.
      query_sources: canonical query head of each padded one, in the order of the KV heads, or `PADDED`.
    """

    kv_heads: int
    queries_per_kv: int
    kv_sources: tuple[int, ...]
    query_sources: tuple[int, ...]

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.queries_per_kv


def head_layout(config: ModelConfig, kv_ranks: int, query_ranks: int) -> HeadLayout:
    """The least padding with which KV heads divide over `kv_ranks` devices, and query heads over `query_ranks`.

    9 query and 3 KV heads become 12/3 on tp 1, dcp 2 (1 and 2 ranks); 16/4 on tp 2, dcp 4 (2 and 8); 16/8 (each of 4 KV
    heads twice) on tp 8.
    """
    canonical, group = config.num_kv_heads, config.queries_per_kv_head
    if kv_ranks <= canonical:
        distinct, repeats = -(-canonical // kv_ranks) * kv_ranks, 1
    else:
        distinct = next(n for n in range(canonical, kv_ranks + 1) if kv_ranks % n == 0)
        repeats = kv_ranks // distinct
    queries = -(-group // repeats)
    while (distinct * repeats * queries) % query_ranks:
        queries += 1

    def query_source(kv: int, copy: int, member: int) -> int:
        index = copy * queries + member
        return kv * group + index if kv < canonical and index < group else PADDED

    slots = [(kv, copy) for kv in range(distinct) for copy in range(repeats)]
    return HeadLayout(
        kv_heads=distinct * repeats,
        queries_per_kv=queries,
        kv_sources=tuple(kv if kv < canonical else PADDED for kv, _ in slots),
        query_sources=tuple(query_source(kv, copy, member) for kv, copy in slots for member in range(queries)),
    )


def take_heads(x: np.ndarray, sources: tuple[int, ...]) -> np.ndarray:
    """Picks heads along axis 0 of `x` [heads, ...]; padded ones are zero."""
    picked = x[np.maximum(sources, 0)]
    picked[np.array(sources) == PADDED] = 0
    return picked
