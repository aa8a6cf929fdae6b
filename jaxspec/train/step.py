"""One jitted step: the frozen target reads the batch, the head is unrolled, and the optimiser moves it.

Rows of a batch are split over the mesh axis `data`; each group of devices holds the head whole, and the target whole or
split over `tp`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxspec.checkpoint.restore import abstract_module
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.drafts.eagle3_head import Eagle3Head, pack_head
from jaxspec.mesh import AXES, MeshShape, find_devices
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, DecoderLayout
from jaxspec.precision import matmul_precision
from jaxspec.train.config import TrainingConfig, TrainMesh
from jaxspec.train.dataset import Batch
from jaxspec.train.loss import Sums, is_drafted, step_sums
from jaxspec.train.unroll import read_target, unroll

DATA = "data"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Attributes:
    params: the head's parameters in float32, by the names of its attributes.
    optimizer: optax's state.
    """

    params: Any
    optimizer: Any


def train_mesh(shape: TrainMesh) -> Mesh:
    """Raises `UserError` where there are fewer devices than it needs."""
    sizes = {DATA: shape.data, "pp": 1, "tp": shape.tp, "dcp": 1}
    devices = find_devices(math.prod(sizes.values()), f"mesh data={shape.data}, tp={shape.tp}")
    return jax.make_mesh(tuple(sizes.values()), (DATA, *AXES), axis_types=(AxisType.Auto,) * 4, devices=devices)


def train_layout(config: ModelConfig, shape: TrainMesh, dtype: np.dtype) -> DecoderLayout:
    """The target on the devices of one group; no axis splits its ends, nor the head."""
    return DecoderLayout(config, MeshShape(1, shape.tp, 1), (), dtype)


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW behind clipping, with a linear warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_learning_rate,
    )
    adamw = optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay)
    chain = optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    return optax.MultiSteps(chain, config.accumulate).gradient_transformation() if config.accumulate > 1 else chain


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A head, its target and its optimiser on a mesh.

    Attributes:
      step: (state, target weights, batch) -> (state, sums); donates the state.
      evaluate: (parameters, target weights, batch) -> sums.
    """

    mesh: Mesh
    initial: dict[str, Any]
    fixed: dict[str, Any]
    optimizer: optax.GradientTransformation
    step: Callable[[TrainState, Any, Batch], tuple[TrainState, Sums]]
    evaluate: Callable[[dict[str, Any], Any, Batch], Sums]

    def initial_state(self) -> TrainState:
        everywhere = NamedSharding(self.mesh, P())
        params = jax.device_put(self.initial, everywhere)
        return TrainState(params, jax.jit(self.optimizer.init, out_shardings=everywhere)(params))

    def put(self, arrays: dict[str, np.ndarray]) -> Batch:
        """A batch of the host on the devices."""
        return Batch(**jax.device_put(arrays, NamedSharding(self.mesh, P(DATA))))

    def arrays(self, state: TrainState) -> dict[str, Any]:
        """All arrays of the trained head on the host, as `unpack_head` takes them."""
        return jax.tree.map(np.asarray, state.params | self.fixed)


def build_trainer(
    config: Eagle3Config,
    training: TrainingConfig,
    layout: DecoderLayout,
    mesh: Mesh,
    target: tuple[Any, Any],
    canonical: dict[str, np.ndarray],
) -> Trainer:
    """Args:
    target: its `nnx.GraphDef`, and how its weights are split.
    canonical: tensors of the head to begin with, as `initial_tensors` gives them.
    """
    target_graph, target_specs = target
    taps, optimizer = config.taps, make_optimizer(training)
    assert taps is not None
    head_graph, abstract = abstract_module(lambda: Eagle3Head(config, layout))
    packed = pack_head(config, layout, canonical)
    fixed = {name: jnp.asarray(packed.pop(name)) for name in ("target_ids",) if name in packed}

    def merge_head(params: dict[str, Any]) -> Eagle3Head:
        state = jax.tree.map(lambda x: x, abstract)
        cast = jax.tree.map(lambda x: x.astype(layout.dtype), params)
        nnx.replace_by_pure_dict(state, cast | fixed)
        return nnx.merge(head_graph, state)

    def read(target_weights: Any, batch: Batch) -> tuple[Decoder, tuple[Array, Array]]:
        target = nnx.merge(target_graph, target_weights)
        return target, read_target(target, batch, taps)

    def measure(
        params: dict[str, Any], target: Decoder, seen: tuple[Array, Array], batch: Batch
    ) -> tuple[Float[Array, ""], Sums]:
        head, steps = merge_head(params), training.unroll_steps
        # Means over the whole batch, so that the number of devices does not matter.
        counts = lax.psum(is_drafted(batch, steps).sum((1, 2)), DATA)
        weights = training.decay ** jnp.arange(steps) / jnp.maximum(counts, 1)
        outputs = unroll(head, target, seen[0], batch, steps)
        return step_sums(head, target, outputs, seen[1], batch, training.loss, weights)

    def step(state: TrainState, target_weights: Any, batch: Batch) -> tuple[TrainState, Sums]:
        target, seen = read(target_weights, batch)
        gradients, sums = lax.psum(jax.grad(measure, has_aux=True)(state.params, target, seen, batch), DATA)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), optimizer_state), sums

    def evaluate(params: dict[str, Any], target_weights: Any, batch: Batch) -> Sums:
        target, seen = read(target_weights, batch)
        return lax.psum(measure(params, target, seen, batch)[1], DATA)

    def compiled(function: Callable[..., Any], donated: tuple[int, ...]) -> Any:
        specs = (P(), target_specs, P(DATA))
        sharded = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

        def call(*arguments: Any) -> Any:
            with matmul_precision(layout.dtype):
                return sharded(*arguments)

        return jax.jit(call, donate_argnums=donated)

    return Trainer(mesh, packed, fixed, optimizer, compiled(step, donated=(0,)), compiled(evaluate, donated=()))
