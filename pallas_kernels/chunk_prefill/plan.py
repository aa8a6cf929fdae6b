"""What the kernel takes, and how it cuts the work."""

import dataclasses

import jax.numpy as jnp

ROWS = 64  # query rows of a warpgroup, as many as one wgmma has
TILE = 128  # keys of a tile
HEAD_DIMS = (64, 128)
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MAX_GROUP = 16
_MULTIPROCESSORS = 132  # of an H100 or H200


def unsupported(*, dtype, heads: int, kv_heads: int, head_dim: int, page_size: int | None = None) -> str | None:
    """Why the kernel does not take these, as the rule that they break, or None where it does.

    Args:
      dtype: of queries, keys and cache.
      page_size: tokens of a page on this device; None without a prefix.
    """
    if jnp.dtype(dtype) not in DTYPES:
        return f"dtype={jnp.dtype(dtype).name} must be bfloat16 or float16, which the tensor cores multiply"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} must be one of {HEAD_DIMS}"
    if heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        return f"{heads} query heads must be 1 to {MAX_GROUP} times the {kv_heads} KV heads"
    if page_size is not None and (page_size < 8 or page_size % 8):
        return (
            f"pages of {page_size} tokens on a device must have a multiple of 8, the rows that a copy brings at least"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut. One more warpgroup than `warpgroups` fetches.

    Attributes:
      packed: query heads of a group whose rows lie together, token by token. 1 reads queries and writes outputs where
        they are; a whole group fills tiles that a short chunk would leave empty.
      warpgroups: of a block, that multiply: 1 or 2, each with 64 query rows; they share the keys.
      splits: parts of the keys.
      stages: tiles of keys and values in shared memory.
    """

    packed: int
    warpgroups: int
    splits: int
    stages: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that multiplies and of one that fetches, where the compiler's even share is too little.

        Scores, in whose place the next weights arise, take TILE / 2 registers, the output head_dim / 2, and the
        weights that are being multiplied TILE / 4: 160 at head_dim 128, and what addresses and sums need. Page ids of
        a tile of 16-token pages fit into 40 without spills.
        """
        return (232, 40) if self.warpgroups == 2 else None

    @staticmethod
    def of(tokens: int, heads: int, kv_heads: int, head_dim: int, max_keys: int) -> "Plan":
        """For a chunk of so many tokens, each of which sees at most `max_keys` keys."""
        group = heads // kv_heads
        warpgroups = 1 if tokens * group <= ROWS else 2
        rows = ROWS * warpgroups
        packed = 1 if 8 * (-tokens % rows) <= tokens else group
        blocks = -(-tokens * packed // rows) * heads // packed
        tiles = -(-max_keys // TILE)
        overhead = 2  # what a block costs beside its tiles: first fetch, and its share of the merge

        def cost(splits: int) -> int:
            return -(-blocks * splits // _MULTIPROCESSORS) * (-(-tiles // splits) + overhead)

        # Where there are blocks for all multiprocessors, float32 partial results are not worth an evener last wave.
        most = min(tiles, _MULTIPROCESSORS) if blocks < _MULTIPROCESSORS else 1
        return Plan(
            packed=packed,
            warpgroups=warpgroups,
            splits=min(range(1, most + 1), key=cost),
            # A tile of keys and values takes 64 KiB at head_dim 128; beside two, and queries and output with 96, there
            # is no room for a third.
            stages=2 * 128 // head_dim,
        )
