"""The optimiser of a run; what a step computes is tested by its parts, and in test_run.py on several meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.errors import UserError
from jaxspec.train.config import TrainingConfig, TrainMesh
from jaxspec.train.step import make_optimizer, train_mesh

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[3.0]])}


def gradients(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), PARAMS)


def after(config, all_gradients):
    optimizer = make_optimizer(config)
    params, state = PARAMS, optimizer.init(PARAMS)
    for each in all_gradients:
        updates, state = optimizer.update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_gradients_of_several_batches_are_averaged_into_one_step():
    settings = dict(steps=10, warmup_steps=0, learning_rate=0.1, clip=100.0)
    averaged = jax.tree.map(lambda a, b: (a + b) / 2, gradients(0), gradients(1))
    once = after(TrainingConfig(**settings), [averaged])
    twice = after(TrainingConfig(**settings, accumulate=2), [gradients(0), gradients(1)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), once, twice)
    assert not np.allclose(once["a"], PARAMS["a"])


def test_the_rate_rises_falls_and_gradients_are_clipped():
    config = TrainingConfig(steps=10, warmup_steps=4, learning_rate=0.1, final_learning_rate=0.01, clip=1e-9)
    sizes, before = [], PARAMS
    for count in range(1, 11):
        params = after(config, [gradients(0)] * count)
        sizes.append(float(jnp.abs(params["a"] - before["a"]).max()))
        before = params
    # Clipped below Adam's epsilon the step is proportional to the gradient, else it would be the rate itself.
    assert sizes[0] == 0 and sizes[1] < sizes[4] < 0.01
    assert np.argmax(sizes) in (3, 4) and sizes[9] < sizes[5]


def test_a_mesh_of_more_devices_than_there_are():
    with pytest.raises(UserError, match="data=5, tp=3 needs 15 devices but there are 8"):
        train_mesh(TrainMesh(data=5, tp=3))
