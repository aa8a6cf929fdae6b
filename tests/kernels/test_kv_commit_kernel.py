"""The Mosaic kernel of KV commit against the plain-JAX one: in interpret mode, races looked for.

On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_kv_commit_kernel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from jax.sharding import PartitionSpec as P
from kernel_cases import INTERPRET

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.mesh import MeshShape, make_mesh
from pallas_kernels.kv_commit import commit_rows as commit_by_reference
from pallas_kernels.kv_commit.kernel import commit_rows

LAYERS, PAGE_SIZE, NODES, ROWS = 3, 8, 5, 4
COUNTS = (0, 1, ROWS, 3)  # rows written of each sequence
PAGES = 1 + 2 * len(COUNTS)
FIRST = 2  # slot of the sequences

commit = jax.jit(lambda *arrays: commit_rows(*arrays, interpret=INTERPRET if jax.default_backend() == "cpu" else False))


def draw(kv_heads: int, head_dim: int, dtype: str) -> tuple[jax.Array, ...]:
    """Random rows and pages; `commit_rows`'s arguments."""
    random = np.random.default_rng(kv_heads)
    batch, row = len(COUNTS), (kv_heads, head_dim)
    # Sequence b owns pages 2 b + 1 and 2 b + 2; its rows are the last two of the one and the first two of the other.
    places = (2 * np.arange(batch)[:, None] + 2) * PAGE_SIZE - 2 + np.arange(ROWS)
    is_written = np.arange(ROWS) < np.array(COUNTS)[:, None]
    return (
        jnp.asarray(random.standard_normal((LAYERS, 2, PAGES, PAGE_SIZE, *row)), dtype),
        jnp.asarray(random.standard_normal((LAYERS, 2, FIRST + batch + 1, NODES, *row)), dtype),
        jnp.int32(FIRST),
        jnp.asarray(random.integers(NODES, size=(batch, ROWS)), jnp.int32),
        jnp.asarray(places // PAGE_SIZE, jnp.int32),
        jnp.asarray(places % PAGE_SIZE, jnp.int32),
        jnp.asarray(is_written),
    )


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [(2, 64, "bfloat16"), (1, 8, "bfloat16"), (3, 40, "float16"), (8, 128, "float32"), (1, 576, "bfloat16")],
)
def test_equals_the_reference_but_leaves_page_0_alone(kv_heads, head_dim, dtype, capfd):
    arrays = draw(kv_heads, head_dim, dtype)
    actual, expected = (np.asarray(f(*arrays), np.float32) for f in (commit, commit_by_reference))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    np.testing.assert_array_equal(actual[:, :, 1:], expected[:, :, 1:])
    np.testing.assert_array_equal(actual[:, :, 0], np.asarray(arrays[0][:, :, 0], np.float32))


def test_rows_that_are_not_accepted_touch_no_page_and_their_addresses_are_not_read():
    pages, pending, first, nodes, page, offset, is_written = draw(2, 64, "bfloat16")
    nowhere = [jnp.where(is_written, x, 2**30) for x in (nodes, page, offset)]
    actual, expected = (
        commit(pages, pending, first, *nowhere, is_written),
        commit(pages, pending, first, nodes, page, offset, is_written),
    )
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))
    unchanged = commit(pages, pending * np.nan, first, *nowhere, jnp.zeros_like(is_written))
    np.testing.assert_array_equal(np.asarray(unchanged, np.float32), np.asarray(pages, np.float32))


@pytest.mark.parametrize(
    ("shape", "pending_dtype", "rule"),
    [
        ((1, 2, 2, 8, 1, 4), "bfloat16", "rows of 1 x 4 values must be 1 to 256 times a power of two of 16 or more"),
        ((1, 2, 2, 8, 3, 4), "bfloat16", "rows of 3 x 4 values must be"),
        ((1, 2, 2, 8, 1, 64), "float32", "pending rows are float32 and the cache bfloat16: both must be the same"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_rule_and_the_remedy(shape, pending_dtype, rule):
    pages, pending, index = (
        jnp.zeros(shape, jnp.bfloat16),
        jnp.zeros(shape, pending_dtype),
        jnp.zeros((2, 1), jnp.int32),
    )
    with pytest.raises(ValueError, match=rule) as raised:
        commit_rows(pages, pending, 0, index, index, index, index == 0)
    assert "use the reference" in str(raised.value)


def test_the_cache_is_written_alike_by_the_kernel():
    """Accepted rows of some slots, and a chunk, by their positions."""
    pages, pending, first, nodes, *_, is_written = draw(2, 64, "bfloat16")
    geometry = PageGeometry(PAGE_SIZE, 1)
    table = 1 + jnp.arange(PAGES - 1, dtype=jnp.int32).reshape(len(COUNTS), 2)
    positions = PAGE_SIZE - 2 + jnp.tile(jnp.arange(ROWS), (len(COUNTS), 1))

    def write(by_kernel: bool):
        def body(cache):
            cache = cache.commit(first, nodes, positions, is_written, table, geometry, by_kernel=by_kernel)
            chunk, count = cache.pending[0][:, :, 0], jnp.arange(NODES)
            return cache.put_rows(chunk, count, count < 3, table[0], geometry, by_kernel=by_kernel)

        mapped = jax.shard_map(body, mesh=make_mesh(MeshShape(1, 1, 1)), in_specs=P(), out_specs=P(), check_vma=False)
        return np.asarray(jax.jit(mapped)(TargetCache(pages[None], pending[None])).pages[0], np.float32)

    kernel, reference = write(True), write(False)
    np.testing.assert_array_equal(kernel[:, :, 1:], reference[:, :, 1:])
    before = np.asarray(pages, np.float32)
    np.testing.assert_array_equal(kernel[:, :, 0], before[:, :, 0])
    assert np.any(kernel[:, :, 1, :3] != before[:, :, 1, :3]) and np.any(kernel[:, :, 8] != before[:, :, 8])


@NEEDS_COMPILER
@pytest.mark.parametrize("layers", [16, 61])
def test_compiles_for_an_h200_as_one_launch_that_updates_the_cache_in_place(layers, monkeypatch, capfd):
    batch, nodes, rows, kv_heads, head_dim = 8, 32, 6, 8, 128

    def argument(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = argument(jnp.bfloat16, layers, 2, 129, 64, kv_heads, head_dim)
    pending = argument(jnp.bfloat16, layers, 2, 2 * batch, nodes, kv_heads, head_dim)
    index = argument(jnp.int32, batch, rows)
    run = jax.jit(lambda *arrays: commit_rows(*arrays, interpret=False), donate_argnums=0)
    first_slot = argument(jnp.int32)
    arguments = (pages, pending, first_slot, index, index, index, argument(jnp.bool, batch, rows))
    compiled, report = compile_for_h200(run, arguments, monkeypatch, capfd)
    assert_without_spills(report)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 1
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.size * 2
    assert memory.temp_size_in_bytes < 1024
