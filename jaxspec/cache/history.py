"""Token history in pages: what a drafter that looks tokens up, or a penalty, reads.

It lives under the same page table as the KV cache, so prompt chunks can be written before their slot is chosen, and
shared pages share it. Only tails write and read it, each the group (or chunk) that it finishes; tails follow one
another in order of entry, so a page's new owner always writes after its old one. Every device holds all of it
(4 bytes a token).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache.pages import TRASH_PAGE, locate

type History = Int[Array, "P S"]


def write(
    history: History,
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B A"],
    tokens: Int[Array, "B A"],
    is_written: Bool[Array, "B A"],
) -> History:
    """Stores tokens at their positions; the rest goes to the trash page as zeros."""
    page, offset, is_inside = locate(positions, page_table, history.shape[1])
    keep = is_written & is_inside
    return history.at[jnp.where(keep, page, TRASH_PAGE), offset].set(jnp.where(keep, tokens, 0))


def read(history: History, page_table: Int[Array, "B M"]) -> Int[Array, "B M*S"]:
    """All positions of each sequence; those not yet written hold anything."""
    return history[page_table].reshape(len(page_table), -1)
