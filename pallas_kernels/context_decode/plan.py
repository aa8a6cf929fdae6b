"""What the kernel takes, and how it cuts the work."""

import dataclasses

import jax.numpy as jnp

TILE = 64  # tokens; also the query rows of one wgmma, and the ancestor bits of a node
HEAD_DIMS = (64, 128)
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MAX_TOKENS, MAX_GROUP = 64, 16
_CLUSTERS = (2, 4, 8)  # blocks, which share the columns of the output out evenly; 8 are as many as may be asked for
_MULTIPROCESSORS = 132  # of an H100 or H200
_SHARED = 227 * 1024  # bytes of shared memory that a block may have
_SHARED_BY_TWO = (228 // 2 - 1) * 1024  # that each of two blocks of a multiprocessor may have


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
    if page_size < 8 or page_size % 8 or (page_size % TILE and TILE % page_size):
        return f"pages of {page_size} tokens on a device must have 8, 16, 32 or a multiple of {TILE}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes:
      rows: query rows of a warpgroup that count, even, a multiple of 8 or less than 8; it multiplies 64.
      row_tiles: such sets of rows; a block's warpgroups take one each, for the same tiles of keys. Where there is one
        set for two warpgroups, they take turns with the tiles, and the first joins what both found.
      warpgroups: of a block, that multiply.
      splits: parts of the keys.
      stages: tiles of keys and values in shared memory; all but the one in use are on their way.
      is_cluster: the blocks of all splits merge their results themselves; else that is another launch.
      producer: one more warpgroup fetches; else the first does beside its products.
    """

    rows: int
    row_tiles: int
    warpgroups: int
    splits: int
    stages: int
    is_cluster: bool
    producer: bool

    def __post_init__(self) -> None:
        if self.is_cluster and self.splits not in _CLUSTERS:
            raise ValueError(f"splits={self.splits} must be one of {_CLUSTERS} to be a cluster")
        if self.warpgroups not in (1, 2) or self.row_tiles % self.row_sets:
            raise ValueError(
                f"warpgroups={self.warpgroups} must be 1, or 2 where row_tiles={self.row_tiles} is 1 or even"
            )
        if self.turns > 1 and not self.producer:
            raise ValueError("producer=False must be True for two warpgroups that take turns")
        if self.producer and (self.stages < 2 * self.turns or self.stages % self.turns):
            # A warpgroup waits for the values of its next tile while it multiplies those of its last.
            raise ValueError(
                f"stages={self.stages} must be at least {2 * self.turns} with a producer, by steps of {self.turns}"
            )

    @property
    def turns(self) -> int:
        """Warpgroups that share the tiles of keys of one set of rows."""
        return self.warpgroups if self.row_tiles == 1 else 1

    @property
    def row_sets(self) -> int:
        """Sets of rows of a block."""
        return self.warpgroups // self.turns

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that multiplies and of one that fetches, where the compiler's even share is too little.

        Page ids of two tiles of 8-token pages fit into 56 without spills.
        """
        return (224, 56) if self.warpgroups == 2 else None

    def share(self, head_dim: int) -> int:
        """Columns of the output that are copied as one, and that a block of a cluster merges."""
        return min(64, head_dim // (self.splits if self.is_cluster else 1))

    def shared_bytes(self, head_dim: int) -> int:
        """Of shared memory that a block takes at most."""
        return _bytes_of_queries(head_dim, self.row_sets) + self.stages * tile_bytes(head_dim)

    @staticmethod
    def of(batch: int, rows: int, kv_heads: int, head_dim: int, tiles: int, *, may_cluster: bool = True) -> "Plan":
        """For so many query rows of a KV head over at most `tiles` tiles of keys."""
        row_sets = 1 if rows <= TILE else 2
        row_tiles = row_sets * -(-rows // (TILE * row_sets))
        blocks = batch * kv_heads * row_tiles // row_sets  # in each split

        def cut(warpgroups: int, splits: int) -> Plan:
            has_place = blocks * splits <= _MULTIPROCESSORS
            is_alone = warpgroups == 2 or has_place
            return Plan(
                rows=round_up(copied_rows(-(-rows // row_tiles)), 2),  # a merge may take two at once
                row_tiles=row_tiles,
                warpgroups=warpgroups,
                splits=splits,
                stages=stages_for(head_dim, row_sets, is_alone),
                # The blocks of a cluster start together: where there are more than places, some wait long for one.
                is_cluster=may_cluster and splits in _CLUSTERS and has_place,
                # Registers do not suffice for two blocks with a warpgroup each that only fetches.
                producer=is_alone,
            )

        most = max(1, min(tiles, 2 * _MULTIPROCESSORS))
        plans = [cut(warpgroups, splits) for warpgroups in range(row_sets, 3) for splits in range(1, most + 1)]
        return min(plans, key=lambda plan: _microseconds(plan, blocks * plan.splits, -(-tiles // plan.splits)))


def _microseconds(plan: Plan, blocks: int, tiles: int) -> float:
    """What blocks of so many tiles take, roughly: fitted to an H200, bfloat16, head_dim 128."""
    places = _MULTIPROCESSORS if plan.producer else 2 * _MULTIPROCESSORS
    if not plan.producer:
        tile, start = 1.95, 5.0  # two blocks share a multiprocessor's bandwidth
    elif plan.warpgroups == 1:
        tile, start = 1.13, 3.0
    else:
        tile, start = (1.14, 3.0) if plan.turns == 1 else (1.03, 4.0)
    merge = 0.0 if plan.splits == 1 else 1.0 if plan.is_cluster else 3.0 + 0.1 * plan.splits
    return -(-blocks // places) * (tiles * tile + start) + merge


def stages_for(head_dim: int, row_sets: int, is_alone: bool) -> int:
    """As many as shared memory admits to a block that is alone on a multiprocessor, or one of two.

    A power of two: others were slower, though deeper (8 x 8,192 and 1 x 131,072 tokens: by 5 and 11 % with 3 for 2).
    """
    room = (_SHARED if is_alone else _SHARED_BY_TWO) - _bytes_of_queries(head_dim, row_sets)
    return 1 << (room // tile_bytes(head_dim)).bit_length() - 1


def _bytes_of_queries(head_dim: int, row_sets: int) -> int:
    """Of shared memory, with those of the barriers."""
    barriers = 512
    return row_sets * 2 * TILE * head_dim + barriers


def tile_bytes(head_dim: int) -> int:
    """Of the keys and values of a tile."""
    return 2 * 2 * TILE * head_dim


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def copied_rows(rows: int) -> int:
    """Rows that an array needs for a copy to fill a tile with them, and zeros beyond: it counts in tiles of 8."""
    return rows if rows <= 8 else round_up(rows, 8)
