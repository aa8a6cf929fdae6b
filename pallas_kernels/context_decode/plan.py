"""What the kernel takes, and how it cuts the work."""

import dataclasses

import jax.numpy as jnp

TILE = 64  # tokens; also the query rows of one wgmma, and the ancestor bits of a node
HEAD_DIMS = (64, 128)
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MAX_TOKENS, MAX_GROUP = 64, 16
_CLUSTERS = (
    2,
    4,
    8,
)  # blocks, which share the columns of the output out evenly; 8 is as many as any kernel may ask for
_MULTIPROCESSORS = 132  # of an H100 or H200
_SHARED = 227 * 1024  # bytes of shared memory that a block may have
_SHARED_BY_TWO = (228 // 2 - 1) * 1024  # that each of two blocks of a multiprocessor may have
_MAX_STAGES = 8  # more are not faster: they cover the latency of memory several times


def unsupported(*, dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, page_size: int) -> str | None:
    """Why the kernel does not take these, as the rule that they break, or None where it does.

    Args:
      dtype: of queries and cache.
      tokens: T.
      page_size: tokens of a page on this device.
    """
    if jnp.dtype(dtype) not in DTYPES:
        return f"dtype={jnp.dtype(dtype).name} must be bfloat16 or float16, which the tensor cores multiply"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} must be one of {HEAD_DIMS}"
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} query tokens must be 1 to {MAX_TOKENS}, as many as there are ancestor bits"
    if heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        return f"{heads} query heads must be 1 to {MAX_GROUP} times the {kv_heads} KV heads"
    if page_size % 8 or (page_size % TILE and TILE % page_size):
        return f"pages of {page_size} tokens on a device must have 8, 16, 32 or a multiple of {TILE}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes:
      rows: query rows of a warpgroup that count, a multiple of 8 or less than 8; it multiplies 64.
      row_tiles: such sets of rows; a block's warpgroups take one each and share the keys.
      warpgroups: of a block.
      splits: parts of the keys.
      stages: tiles of keys and values in shared memory; all but the one in use are on their way.
      may_cluster: blocks of 2, 4 or 8 splits merge their results themselves; else that is another launch or two.
      pipelined: values of a tile are added while the scores of the next become weights; else all is done in turn.
      producer: one more warpgroup fetches; else the first does beside its products.
    """

    rows: int
    row_tiles: int
    warpgroups: int
    splits: int
    stages: int
    may_cluster: bool = True
    pipelined: bool = True
    producer: bool = False

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that multiplies and of one that fetches, where the compiler's even share is too little.

        Page ids of two tiles of 8-token pages fit into 56 without spills.
        """
        return (224, 56) if self.warpgroups == 2 else None

    @property
    def is_cluster(self) -> bool:
        """The blocks of all splits are a cluster, which leaves nothing to merge."""
        return self.may_cluster and self.splits in _CLUSTERS

    def shared_bytes(self, head_dim: int) -> int:
        """Of shared memory that a block takes at most."""
        queries, weights, staging = 2 * TILE * head_dim, 2 * TILE * TILE, 4 * TILE * 64
        tiles = self.stages * 2 * 2 * TILE * head_dim
        if self.pipelined:
            barriers = 512
            return self.warpgroups * queries + tiles + barriers
        return self.warpgroups * (queries + weights + staging) + tiles + 4 * 1024

    def deepest(self, head_dim: int, is_alone: bool) -> "Plan":
        """As many stages as shared memory admits to a block that is alone on a multiprocessor, or one of two."""
        room = _SHARED if is_alone else _SHARED_BY_TWO
        left = room - dataclasses.replace(self, stages=0).shared_bytes(head_dim)
        return dataclasses.replace(self, stages=min(left // (2 * 2 * TILE * head_dim), _MAX_STAGES))

    @staticmethod
    def of(batch: int, rows: int, kv_heads: int, head_dim: int, tiles: int, *, may_cluster: bool = True) -> "Plan":
        """For so many query rows of a KV head over at most `tiles` tiles of keys."""
        warpgroups = 1 if rows <= TILE else 2
        row_tiles = warpgroups * -(-rows // (TILE * warpgroups))
        # With one warpgroup, two blocks share a multiprocessor: one multiplies while the other waits.
        slots = _MULTIPROCESSORS * (2 if warpgroups == 1 else 1)
        blocks = batch * kv_heads * row_tiles // warpgroups
        overhead = 3  # what a block costs beside its tiles: first fetch, and its share of the merge
        merge = 4  # what launches after the kernel cost, in tiles

        def cost(splits: int) -> int:
            is_merged = splits == 1 or (may_cluster and splits in _CLUSTERS)
            return -(-blocks * splits // slots) * (-(-tiles // splits) + overhead) + (0 if is_merged else merge)

        plan = Plan(
            rows=copied_rows(-(-rows // row_tiles)),
            row_tiles=row_tiles,
            warpgroups=warpgroups,
            splits=min(range(1, max(1, min(tiles, slots)) + 1), key=cost),
            stages=0,
            may_cluster=may_cluster,
        )
        is_alone = warpgroups == 2 or blocks * plan.splits <= _MULTIPROCESSORS
        # Registers do not suffice for two blocks with a warpgroup each that only fetches.
        return dataclasses.replace(plan, producer=is_alone).deepest(head_dim, is_alone)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def copied_rows(rows: int) -> int:
    """Rows that an array needs for a copy to fill a tile with them, and zeros beyond: it counts in tiles of 8."""
    return rows if rows <= 8 else round_up(rows, 8)
