"""All-reduce, all-gather and all-to-all of small messages between the GPUs of one host, by plain peer stores.

The references are `lax.psum`, `lax.all_gather` and `lax.all_to_all`, which also serve where this can't: on other
devices, for larger messages, across hosts.
"""

from pallas_kernels.peer_exchange.group import PeerGroup, unreachable
from pallas_kernels.peer_exchange.kernel import all_gather, all_reduce, all_to_all
from pallas_kernels.peer_exchange.layout import unsupported

__all__ = ["PeerGroup", "all_gather", "all_reduce", "all_to_all", "unreachable", "unsupported"]
