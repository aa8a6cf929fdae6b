"""Where packets lie in a workspace, and what a kernel must know of its peers: the host's side of the exchange."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

THREADS = 128  # of a block: one warpgroup
PACKET = 16  # bytes: data, epoch, data, epoch
PAYLOAD = 8  # bytes of data in a packet
SLOTS = 2  # epochs that may be on their way at once
STRIDE = THREADS * PACKET  # bytes from a thread's packet to its next
MAX_PACKETS = 4  # of a thread
MAX_BLOCKS = 128  # no more than multiprocessors, so that all blocks of a kernel run at once
MAX_BYTES = MAX_BLOCKS * MAX_PACKETS * THREADS * PAYLOAD
MAX_RANKS = 8
OUTGOING, INCOMING, NAME = range(3)  # columns of a table
DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32))


def unsupported(*, dtype, size: int, ranks: int) -> str | None:
    """Why a message can't be exchanged, as the rule that it breaks, or None where it can.

    Args:
      size: elements that one rank sends to another.
    """
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks must be 2 to {MAX_RANKS}, the GPUs of one host"
    if jnp.dtype(dtype) not in DTYPES:
        return f"dtype={jnp.dtype(dtype).name} must be one of {', '.join(each.name for each in DTYPES)}"
    if not 0 < size * jnp.dtype(dtype).itemsize <= MAX_BYTES:
        return f"a message of {size * jnp.dtype(dtype).itemsize} bytes must have 1 to {MAX_BYTES}"
    return None


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a message is cut: every thread of `blocks` blocks sends so many packets."""

    blocks: int
    packets: int

    @staticmethod
    def of(nbytes: int, least: int = 1) -> "Cut":
        """So many bytes with the fewest packets a thread, so the most threads; 1, 2 or 4, and at least `least`."""
        assert 0 < nbytes <= MAX_BYTES and 1 <= least <= MAX_PACKETS, "it would not lie within the workspace"
        lines = -(-nbytes // (THREADS * PAYLOAD))
        packets = next(count for count in (1, 2, MAX_PACKETS) if count >= least and lines <= count * MAX_BLOCKS)
        return Cut(-(-lines // packets), packets)

    def block_size(self, itemsize: int) -> int:
        """Elements of a block."""
        return self.packets * THREADS * PAYLOAD // itemsize

    def padded_size(self, itemsize: int) -> int:
        """Elements of the message, whole blocks."""
        return self.blocks * self.block_size(itemsize)


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The memory of one rank: packets[blocks, slots, senders, packets, threads], then epochs[blocks, threads].

    A thread of a block writes to the same thread of the same block of its peers only, at the same places whatever the
    size of a message, and counts its calls itself. So messages of all sizes share one workspace, without a barrier.
    """

    ranks: int

    @property
    def sender_bytes(self) -> int:
        return MAX_PACKETS * STRIDE

    @property
    def slot_bytes(self) -> int:
        return self.ranks * self.sender_bytes

    @property
    def epochs(self) -> int:
        """Bytes before them."""
        return MAX_BLOCKS * SLOTS * self.slot_bytes

    @property
    def words(self) -> int:
        """Of 32 bits, all in all."""
        return self.epochs // 4 + MAX_BLOCKS * THREADS

    @property
    def table_size(self) -> int:
        return 3 * (self.ranks + 1) + 1

    def packet(self, block: int, epoch: int, thread: int) -> int:
        """Bytes from where a sender's packets begin to the first of a thread; the next ones follow by `STRIDE`."""
        return (block * SLOTS + epoch % SLOTS) * self.slot_bytes + thread * PACKET

    def table(
        self, bases: Int64[np.ndarray, "ranks"], me: int, names: Int64[np.ndarray, "ranks"]
    ) -> Int64[np.ndarray, "entries"]:
        """What the kernels of rank `me` read: a row of (outgoing, incoming, name) a rank, one more, then `epochs`.

        The one more is that of the next rank, which of two is the only other one. A message for a rank goes to its
        outgoing address; what it sends arrives at its incoming one.

        Args:
          bases: device addresses of the workspaces of all ranks.
          names: what a failure calls them, not 0.
        """
        outgoing, incoming = bases + me * self.sender_bytes, bases[me] + np.arange(self.ranks) * self.sender_bytes
        rows = np.stack([outgoing, incoming, names], axis=1)
        rows = np.concatenate([rows, rows[[(me + 1) % self.ranks]]])
        return np.append(rows.ravel(), bases[me] + self.epochs)
