"""Pages: which are free, on the host, and how positions map to them.

Page 0 belongs to no request. Table entries that are not granted point to it, so it is read (and masked), and writes
that must not happen go to it as zeros.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.errors import UserError

TRASH_PAGE = 0


@dataclasses.dataclass(frozen=True)
class PageGeometry:
    """How a sequence is cut.

    Rank r of a dcp group holds offsets `[r*S/c, (r+1)*S/c)` of every page of S tokens, c ranks in all; so every rank
    has the same page table, and bytes per token and device are 1/c.
    """

    page_size: int
    dcp: int

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size % self.dcp:
            raise UserError(
                f"page_size={self.page_size} must be a positive multiple of dcp={self.dcp}: "
                "each rank holds an equal part of every page"
            )

    @property
    def local_size(self) -> int:
        return self.page_size // self.dcp

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def local_length(self, length: Int[Array, "..."], rank: Int[Array, ""] | int) -> Int[Array, "..."]:
        """How many of the first `length` tokens rank `rank` of the dcp group holds."""
        full, partial = jnp.divmod(length, self.page_size)
        return full * self.local_size + jnp.clip(partial - rank * self.local_size, 0, self.local_size)


def locate(
    positions: Int[Array, "B A"], page_table: Int[Array, "B M"], page_size: int
) -> tuple[Int[Array, "B A"], Int[Array, "B A"], Bool[Array, "B A"]]:
    """Page and offset of each position, and whether there is such a page: a position past the table has none."""
    index, offset = jnp.divmod(positions, page_size)
    is_inside = index < page_table.shape[1]
    return jnp.take_along_axis(page_table, jnp.where(is_inside, index, 0), axis=1), offset, is_inside


class PagePool:
    """The free pages. Pages are granted and returned whole."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grant(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing changes) where fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
