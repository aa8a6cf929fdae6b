"""Milliseconds of one step of draft training, with random weights and tokens: no checkpoint and no data are needed.

    python tools/bench/train.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python tools/bench/train.py --profile

The floor counts the arithmetic of the matrix products alone, at the rate of a large product measured in the same run.
"""

import argparse
import time

import jax
import numpy as np
from flax import nnx
from profiling import print_kernels
from step import SHAPES, random_weights

from jaxspec.checkpoint.restore import abstract_decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import read_config
from jaxspec.models.tensors import tensor_shapes
from jaxspec.precision import DTYPES
from jaxspec.train.config import HeadConfig, TrainingConfig, TrainMesh
from jaxspec.train.head import head_config, initial_tensors
from jaxspec.train.step import build_trainer, train_layout, train_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7, help="of the training-time test")
    parser.add_argument("--draft-vocab", type=int, default=12_288)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step by their time")
    options = parser.parse_args()

    target = read_config({"model_type": "llama", "max_position_embeddings": 131072, **SHAPES[options.shape]})
    shapes = tensor_shapes(target)
    shape, random = TrainMesh(), np.random.default_rng(0)
    mesh = train_mesh(shape)
    layout = train_layout(target, shape, DTYPES[options.dtype])
    graph, state = abstract_decoder(layout)
    specs = nnx.get_partition_spec(state)
    weights = random_weights(state, mesh)
    head = head_config(HeadConfig(draft_vocab_size=options.draft_vocab), target)
    canonical = initial_tensors(
        head,
        target,
        lambda name: 0.02 * random.standard_normal(shapes[name], np.float32),
        np.arange(options.draft_vocab),
        seed=0,
    )
    training = TrainingConfig(steps=1000, batch_size=options.batch, unroll_steps=options.steps)
    trainer = build_trainer(head, training, layout, mesh, (graph, specs), canonical)

    size = (options.batch, options.length)
    positions = np.broadcast_to(np.arange(options.length, dtype=np.int32), size)
    batch = trainer.put(
        {
            "tokens": random.integers(0, target.vocab_size, size, dtype=np.int32),
            "documents": 1 + positions // 256,
            "positions": positions % 256,
            "is_answer": positions % 256 >= 64,
        }
    )
    trained = trainer.initial_state()
    started = time.perf_counter()
    trained, sums = trainer.step(trained, weights, batch)
    jax.block_until_ready(sums)
    compiled = time.perf_counter() - started

    def steps(count: int) -> float:
        nonlocal trained, sums
        started = time.perf_counter()
        for _ in range(count):
            trained, sums = trainer.step(trained, weights, batch)
        jax.block_until_ready(sums)
        return (time.perf_counter() - started) / count

    steps(2)
    seconds = float(np.median([steps(2) for _ in range(5)]))
    tokens, rate = options.batch * options.length, product_rate(DTYPES[options.dtype])
    floor = flops(head.draft_vocab_size, target, options.steps) * tokens / rate
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, products do {rate / 1e12:.0f} TFLOP/s")
    print("ms/step | tokens/s | floor ms | ratio | first step s")
    print(f"{1e3 * seconds:.1f} | {tokens / seconds:,.0f} | {1e3 * floor:.1f} | {seconds / floor:.2f} | {compiled:.1f}")
    if options.profile:
        print_kernels(lambda: steps(1))


def flops(draft_vocab: int, target: ModelConfig, steps: int) -> float:
    """Of a token: the target once, and in each draft step the head's layer and vocabulary, forward and backward."""
    width, inner = target.hidden_size, target.intermediate_size
    heads = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    layer = width * (heads + 3 * inner)
    draft = layer + width * (target.num_heads + 2 * target.num_kv_heads) * target.head_dim + width * draft_vocab
    once = target.num_layers * layer + width * target.vocab_size
    return 2 * once + 4 * 3 * width * width + 6 * steps * draft


def product_rate(dtype: np.dtype) -> float:
    """Operations a second of a large matrix product."""
    size = 8192 if jax.devices()[0].platform != "cpu" else 1024
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda x, y: (x @ y * size**-0.5).astype(dtype))
    y = product(x, x).block_until_ready()
    started = time.perf_counter()
    for _ in range(10):
        y = product(x, y)
    y.block_until_ready()
    return 2 * size**3 * 10 / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
