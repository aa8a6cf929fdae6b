"""All-reduce, all-gather and all-to-all of small messages by plain peer stores, as Mosaic GPU kernels for Hopper.

Every rank stores its data straight into its peers' workspaces, as 16-byte packets {data, epoch, data, epoch}, and polls
its own workspace until the epochs are right, like the LL protocol of NCCL: no fence, barrier, semaphore or multicast.
Two slots alternate, so nobody overwrites data that is still being read: a rank gets to epoch e + 2 only after all its
peers have sent e + 1, which they do only after they have read e. XLA sees a custom call that takes a table of
addresses and never sees the workspaces, so there is no rendezvous.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # private names, that may move
from jax._src.lib.mlir.dialects import arith, gpu, llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.peer_exchange.layout import (
    INCOMING,
    NAME,
    OUTGOING,
    PACKET,
    PAYLOAD,
    SLOTS,
    STRIDE,
    THREADS,
    Cut,
    Workspace,
    unsupported,
)

_POLLS = 1 << 24  # some ten seconds
_NAN = 0x7FC07FC0  # twice in bfloat16, once in float32


def poll(packets: int) -> str:
    """PTX that loads a thread's packets from one sender until both epochs of each are right.

    Outputs are 4 registers a packet. Inputs are the address, the epoch, how often to look, the address of the
    sender's name, and where that is written if it does not answer; the data is NaN then.
    """
    address, epoch, polls, name, failure = (f"${4 * packets + i}" for i in range(5))
    words = [[f"${4 * i + j}" for j in range(4)] for i in range(packets)]
    load = [f"ld.volatile.global.v4.u32 {{{','.join(w)}}}, [{address}+{STRIDE * i}];" for i, w in enumerate(words)]
    test = [f"xor.b32 t, {w[j]}, {epoch}; or.b32 a, a, t;" for w in words for j in (1, 3)]
    nan = [f"mov.b32 {w[j]}, {_NAN:#x};" for w in words for j in (0, 2)]
    return "\n".join(
        [
            f"{{ .reg .pred p; .reg .u32 a, t, n; mov.u32 n, {polls};",
            "again:",
            *load,
            "mov.u32 a, 0;",
            *test,
            "setp.eq.u32 p, a, 0; @p bra done; sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra again;",
            *nan,
            f"ld.global.u32 t, [{name}]; st.volatile.global.u32 [{failure}], t;",
            "done: }",
        ]
    )


def _layout(dtype, size: int):
    """Each register of an array is the data of one packet."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=PAYLOAD // jnp.dtype(dtype).itemsize)


def _exchange(outgoing, table_ref, failure_ref, dtype, size: int, ranks: int, is_other_only: bool = False):
    """Inside a kernel: sends each rank its array, or all of them the only one; what arrived from each, in their order.

    Args:
      outgoing: arrays of `size` elements, this block's part of the messages.
      failure_ref: takes the name of a rank that did not answer.
      is_other_only: of two ranks only the other one sends and receives.
    """
    layout, workspace = _layout(dtype, size), Workspace(ranks)
    rows = [ranks] if is_other_only else range(ranks)
    messages = outgoing if len(outgoing) > 1 else outgoing * len(rows)
    array = plgpu.ShapeDtypeStruct((size,), dtype, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=([layout] * len(messages), plgpu.RefType(), plgpu.RefType()),
        return_type=[array] * len(rows),
    )
    def run(ctx, messages, table, failure):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        two_words, ptx, like = ir.VectorType.get((2,), i32), mgpu_utils.inline_ptx, messages[0]

        def constant(kind, value):
            return arith.constant(kind, value)  # type: ignore[call-arg, arg-type]  # as it is generated, not as it is

        def step(start, index, size):
            return arith.addi(start, arith.muli(index, constant(i64, size)))

        def load(kind, address, result_type):
            return ptx(f"ld.{kind} $0, [$1];", address, result_types=result_type, has_side_effects=True)

        def address_of(ref):
            return llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref))

        def entry_address(row, column):
            return arith.addi(address_of(table), constant(i64, 8 * (3 * row + column)))

        def entry(row, column):
            return load("global.b64", entry_address(row, column), i64)

        thread, block = (arith.index_cast(i64, f(gpu.Dimension.x)) for f in (gpu.thread_id, gpu.block_id))
        peers, senders = ([entry(row, column) for row in rows] for column in (OUTGOING, INCOMING))
        counter = step(step(entry(ranks + 1, 0), block, 4 * THREADS), thread, 4)
        epoch = arith.addi(load("volatile.global.u32", counter, i32), constant(i32, 1))
        slot = step(arith.extui(i64, arith.andi(epoch, constant(i32, SLOTS - 1))), block, SLOTS)
        packet = step(step(constant(i64, 0), slot, workspace.slot_bytes), thread, PACKET)
        # After a failure nothing is waited for any more, so that a program ends in bounded time.
        failed = load("volatile.global.u32", address_of(failure), i32)
        is_well = arith.cmpi(arith.CmpIPredicate.eq, failed, constant(i32, 0))
        polls = arith.select(is_well, constant(i32, _POLLS), constant(i32, 1))

        for peer, message in zip(peers, messages, strict=True):
            for i, register in enumerate(message.registers.flat):
                words = vector.bitcast(two_words, register)
                low, high = (vector.extract(words, dynamic_position=[], static_position=[j]) for j in (0, 1))
                store = f"st.volatile.global.v4.u32 [$0+{i * STRIDE}], {{$1, $3, $2, $3}};"
                ptx(store, arith.addi(peer, packet), low, high, epoch)
        arrived = []
        for row, sender in zip(rows, senders, strict=True):
            words = ptx(
                poll(like.registers.size),
                *(arith.addi(sender, packet), epoch, polls, entry_address(row, NAME), address_of(failure)),
                result_types=(i32,) * (4 * like.registers.size),
                has_side_effects=True,
            )
            registers = np.empty(like.registers.shape, object)
            for i in range(registers.size):
                data = vector.from_elements(two_words, [words[4 * i], words[4 * i + 2]])
                registers.flat[i] = vector.bitcast(ir.VectorType(like.registers.flat[i].type), data)
            arrived.append(mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed))
        ptx("st.volatile.global.u32 [$0], $1;", counter, epoch)
        return arrived

    return run(messages, table_ref, failure_ref)


def all_reduce(
    x: Shaped[Array, "*S"], table: Int[Array, "_"], failure: jax.Ref, ranks: int, *, least_packets: int = 1
) -> Shaped[Array, "*S"]:
    """Sum over the ranks, inside `jax.shard_map`; the same bits on all of them.

    Two ranks add what both have; more add in order of rank. Sums are taken in float32 (of integers, in int32) and
    rounded once.

    Args:
      x: bfloat16, float16, float32 or int32.
      table, failure: of this device's `PeerGroup`. Calls of one program are ordered by the ref, which each writes.
      least_packets: of a thread, up to 4; more are fewer blocks.

    Raises:
      ValueError: a message that can't be exchanged (see `unsupported`).
    """
    _check(x.dtype, x.size, ranks)
    return _all_reduce(x, table, failure, ranks=ranks, least_packets=least_packets)


def all_gather(
    x: Shaped[Array, "*S"], table: Int[Array, "_"], failure: jax.Ref, ranks: int, *, least_packets: int = 1
) -> Shaped[Array, "n *S"]:
    """Stacks what every rank has, in order of rank; otherwise as `all_reduce`."""
    _check(x.dtype, x.size, ranks)
    return _collect(x[None], table, failure, ranks=ranks, least_packets=least_packets)


def all_to_all(
    x: Shaped[Array, "n *S"], table: Int[Array, "_"], failure: jax.Ref, ranks: int, *, least_packets: int = 1
) -> Shaped[Array, "n *S"]:
    """Row i goes to rank i, and row j of the result came from rank j; otherwise as `all_reduce`."""
    if len(x) != ranks:
        raise ValueError(f"{len(x)} rows must be {ranks}, one for each rank")
    _check(x.dtype, x[0].size, ranks)
    return _collect(x, table, failure, ranks=ranks, least_packets=least_packets)


def _check(dtype, size: int, ranks: int) -> None:
    if broken := unsupported(dtype=dtype, size=size, ranks=ranks):
        raise ValueError(f"{broken}; use the collective of XLA for this (exchange='xla')")


@functools.partial(jax.jit, static_argnames=("ranks", "least_packets"))  # one trace and one kernel for all layers
def _all_reduce(x, table, failure, *, ranks: int, least_packets: int):
    rows, cut, size = _blocks(x[None], least_packets)
    wide = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype

    def body(x_ref, table_ref, failure_ref, o_ref):
        here = pl.ds(lax.axis_index("block") * size, size)
        mine = plgpu.load(x_ref.at[here], layout=_layout(x.dtype, size))
        parts = _exchange([mine], table_ref, failure_ref, x.dtype, size, ranks, is_other_only=ranks == 2)
        # The sum of two is the same in either order.
        first, *rest = [mine, *parts] if ranks == 2 else parts
        o_ref[here] = sum((part.astype(wide) for part in rest), first.astype(wide)).astype(x.dtype)

    total = _call(body, cut, rows.shape[1:], x.dtype)(rows[0], table, failure)
    return total[: x.size].reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("ranks", "least_packets"))
def _collect(x, table, failure, *, ranks: int, least_packets: int):
    """All-to-all of rows, or all-gather of the only one."""
    rows, cut, size = _blocks(x, least_packets)
    total = rows.shape[1]

    def body(x_ref, table_ref, failure_ref, o_ref):
        start = lax.axis_index("block") * size
        layout = _layout(x.dtype, size)
        outgoing = [plgpu.load(x_ref.at[pl.ds(i * total + start, size)], layout=layout) for i in range(len(x))]
        for i, part in enumerate(_exchange(outgoing, table_ref, failure_ref, x.dtype, size, ranks)):
            o_ref[pl.ds(i * total + start, size)] = part

    arrived = _call(body, cut, (ranks * total,), x.dtype)(rows.reshape(-1), table, failure)
    return arrived.reshape(ranks, total)[:, : x[0].size].reshape(ranks, *x.shape[1:])


def _blocks(x: Shaped[Array, "n *S"], least_packets: int) -> tuple[Shaped[Array, "n padded"], Cut, int]:
    """Rows of whole blocks, and the elements of a block."""
    itemsize = x.dtype.itemsize
    cut = Cut.of(x[0].size * itemsize, least_packets)
    rows = x.reshape(len(x), -1)
    return jnp.pad(rows, ((0, 0), (0, cut.padded_size(itemsize) - rows.shape[1]))), cut, cut.block_size(itemsize)


def _call(body, cut: Cut, shape: tuple[int, ...], dtype):
    return plgpu.kernel(body, grid=(cut.blocks,), grid_names=("block",), out_type=jax.ShapeDtypeStruct(shape, dtype))
