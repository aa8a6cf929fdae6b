"""Whether the arrays that a kernel is given go together: it takes a size from one of them and counts on it in all."""

import jax.numpy as jnp
from jaxtyping import Array


def check_shapes(**arrays: tuple[Array, str]) -> None:
    """Refuses the first array whose shape does not go with those before it.

    Args:
      arrays: each with its dimensions, named as in jaxtyping annotations. A name stands for one size, at least 1,
        wherever it is; "D+8" is 8 more than the D of an array before.

    Raises:
      ValueError: names the array, its shape and what it must be.
    """
    sizes: dict[str, int] = {}

    def is_right(dimension: str, size: int) -> bool:
        name, _, more = dimension.partition("+")
        base = int(name) if name.isdigit() else sizes.setdefault(name, size)
        return 0 < size == base + int(more or 0)

    for name, (x, dimensions) in arrays.items():
        shape, names = jnp.shape(x), dimensions.split()
        known = [f"{each}={sizes[each]}" for each in names if each in sizes]
        if len(shape) != len(names) or not all(map(is_right, names, shape)):
            others = f", and here {', '.join(known)}" if known else ""
            raise ValueError(f"{name} of shape {shape} must be ({', '.join(names)}), none of them 0{others}")
