"""What a kernel is given must go together: an array of another size, in a dimension that others have, is refused."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_prefill import Prefix, chunk_prefill
from pallas_kernels.context_decode.kernel import context_decode, tree_decode
from pallas_kernels.kv_commit.kernel import commit_rows
from pallas_kernels.latent_decode.kernel import latent_decode, latent_tree_decode
from pallas_kernels.lse_merge.kernel import merge_splits
from pallas_kernels.shapes import check_shapes
from pallas_kernels.tree_attention.kernel import tree_join

type Shapes = Mapping[str, tuple[int, ...]]


class Kernel(NamedTuple):
    """A kernel as a function of arrays alone, by name.

    Attributes:
      sizes: of the dimensions.
      takes: each array's dimensions; one that no other array has may be of any size but 0.
    """

    run: Callable[..., Any]
    takes: dict[str, str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(SIZES.get(each) or int(each) for each in dims.split()) for name, dims in self.takes.items()}


SIZES = dict(B=2, T=3, H=4, K=2, D=64, L=1, P=5, S=16, M=2, E=576, C=9, A=2, slots=3, ranks=2, own=2, parts=3, tiles=1)
SIZES |= {"D+8": 72, "R": 8, "wide": 8}
DTYPES = {"ancestors": jnp.uint32, "parts": jnp.float32, "is_written": jnp.bool}
INTEGERS = {"page_table", "lengths", "page_row", "length", "nodes", "page", "offset"}
PAGES = {"q": "B T H D", "pages": "L 2 P S K D", "page_table": "B M", "lengths": "B"}
TREE = {"tree_k": "B T K D", "tree_v": "B T K D", "ancestors": "B T 2"}
LATENTS = {"q": "B T H E", "pages": "L P S E", "page_table": "B M", "lengths": "B"}
PREFIX = {"pages": "L 2 P S K D", "page_row": "M", "length": ""}


def prefix_of(arrays: dict[str, Any]) -> Prefix:
    return Prefix(arrays["pages"], 0, arrays["page_row"], arrays["length"])


KERNELS = {
    "context_decode": Kernel(lambda **x: context_decode(**x, layer=0, scale=1.0), PAGES),
    "tree_decode": Kernel(lambda **x: tree_decode(**x, layer=0, scale=1.0), PAGES | TREE),
    "latent_decode": Kernel(lambda **x: latent_decode(**x, layer=0, scale=1.0), LATENTS),
    "latent_tree_decode": Kernel(
        lambda **x: latent_tree_decode(**x, layer=0, scale=1.0), LATENTS | {"tree": "B T E", "ancestors": "B T 2"}
    ),
    "tree_join": Kernel(
        lambda **x: tree_join(**x, first_head=0, scale=1.0),
        {"q": "B T H D", "k": "B T K D", "v": "B T K D", "ancestors": "B T 2", "parts": "ranks B T own D+8"},
    ),
    "chunk_prefill": Kernel(
        lambda **x: chunk_prefill(x["q"], chunk=(x["k"], x["v"]), prefix=prefix_of(x), scale=1.0),
        {"q": "C H D", "k": "C K D", "v": "C K D"} | PREFIX,
    ),
    "its prefix alone": Kernel(
        lambda **x: chunk_prefill(x["q"], chunk=None, prefix=prefix_of(x), scale=1.0), {"q": "C H D"} | PREFIX
    ),
    "its chunk alone": Kernel(
        lambda **x: chunk_prefill(x["q"], chunk=(x["k"], x["v"]), prefix=None, scale=1.0),
        {"q": "C H D", "k": "C K D", "v": "C K D"},
    ),
    "commit_rows": Kernel(
        lambda **x: commit_rows(**x, first_slot=0),
        {"pages": "L 2 P S K D", "pending": "L 2 slots T K D"}
        | {name: "B A" for name in ("nodes", "page", "offset", "is_written")},
    ),
    "merge_splits": Kernel(
        lambda **x: merge_splits(**x, tokens=2, group=4),
        {"outputs": "B K parts tiles R D", "lses": "B K parts tiles wide"},
    ),
}


def call(kernel: Kernel, shapes: Shapes) -> Any:
    def dtype(name: str):
        return jnp.int32 if name in INTEGERS else DTYPES.get(name, jnp.bfloat16)

    arrays = {name: jax.ShapeDtypeStruct(shape, dtype(name)) for name, shape in shapes.items()}
    return jax.eval_shape(lambda x: kernel.run(**x), arrays)


def wrong_shapes() -> Iterator[Any]:
    """One array longer in a dimension that others have or that is a number, empty in any, or with one more."""
    for name, kernel in KERNELS.items():
        shapes = kernel.shapes()
        for array, dims in kernel.takes.items():
            others = " ".join(of for other, of in kernel.takes.items() if other != array).split()
            for axis, dim in enumerate(dims.split()):
                for size in [0] + [shapes[array][axis] + 1] * (not dim.isidentifier() or dim in others):
                    shape = (*shapes[array][:axis], size, *shapes[array][axis + 1 :])
                    yield pytest.param(kernel, shapes | {array: shape}, id=f"{name}-{array}-{dim}-{size}")
            yield pytest.param(kernel, shapes | {array: (1, *shapes[array])}, id=f"{name}-{array}-more")


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_shapes_that_go_together_are_taken(kernel):
    assert jax.tree.leaves(call(kernel, kernel.shapes()))


@pytest.mark.parametrize(("kernel", "shapes"), list(wrong_shapes()))
def test_one_array_of_another_shape_is_refused(kernel, shapes):
    with pytest.raises(ValueError, match=" must "):
        call(kernel, shapes)


def test_the_message_names_the_array_its_shape_and_what_is_expected():
    q, k = np.zeros((2, 3, 64)), np.zeros((2, 4, 64))
    with pytest.raises(ValueError) as raised:
        check_shapes(q=(q, "B T D"), k=(k, "B T D"))
    assert str(raised.value) == "k of shape (2, 4, 64) must be (B, T, D), none of them 0, and here B=2, T=3, D=64"
    check_shapes(q=(q, "B T D"), packed=(np.zeros((2, 72)), "B D+8"), two=(k, "2 N D"))
