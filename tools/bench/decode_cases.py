"""Cases of decoding that the kernel and its peers are measured on, whatever framework these live in."""

import dataclasses

_COLD_BYTES = 2**28  # between two reads of one set of inputs; the L2 cache has 50 MiB


def cold_sets(of_one: int) -> int:
    """Sets of inputs, of so many bytes each, to go round so that each has left the L2 cache when it is read again."""
    return 1 + -(-_COLD_BYTES // of_one)


def variation(page_size: int = 64, head_dim: int = 128) -> str:
    """How the name of a case says what is not as usual."""
    return f":page{page_size}" * (page_size != 64) + f":head{head_dim}" * (head_dim != 128)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    tokens: int
    page_size: int = 64
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    has_tree: bool = True  # the query tokens are a tree that follows the context; else they see the context alone

    @property
    def name(self) -> str:
        name = f"{self.batch}x{self.context}:t{self.tokens}" + variation(self.page_size, self.head_dim)
        return name + ":no-tree" * (not self.has_tree)

    @property
    def bytes(self) -> int:
        """Of the keys and values of the context in bfloat16."""
        return 2 * 2 * self.batch * self.context * self.kv_heads * self.head_dim

    @property
    def sets(self) -> int:
        return cold_sets(self.bytes)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = [
    Case(8, 8192, 8),
    Case(8, 8192, 1),
    Case(8, 8192, 32),
    Case(1, 1024, 1),
    Case(1, 8192, 1),
    Case(32, 2048, 1),
    Case(1, 131072, 1),
    Case(8, 8192, 1, page_size=16),
    Case(8, 8192, 8, head_dim=64),
    Case(1, 1024, 8),
    Case(1, 8192, 8),
    Case(32, 2048, 8),
    Case(1, 131072, 8),
    Case(1, 1024, 32),
    Case(1, 8192, 32),
    Case(32, 2048, 32),
    Case(1, 131072, 32),
    Case(8, 8192, 8, has_tree=False),
    Case(8, 8192, 32, has_tree=False),
    Case(1, 8192, 8, has_tree=False),
]
