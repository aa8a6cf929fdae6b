import itertools

import numpy as np
import pytest

from jaxspec.mesh import MODEL_AXES, MeshShape
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayer, DecoderLayout
from jaxspec.models.heads import PADDED, head_layout, take_heads

HEADS = [(9, 3), (12, 3), (32, 8), (8, 8), (16, 2), (14, 2), (4, 1), (15, 5), (28, 4), (1, 1), (7, 7), (10, 5)]
MESHES = [MeshShape(1, tp, dcp) for tp, dcp in itertools.product((1, 2, 3, 4, 6, 8, 16), (1, 2, 3, 4, 8))]
HEAD_DIM, WIDTH, FFN, ROWS = 4, 6, 10, 5


def make_config(heads: int, kv_heads: int, **switches) -> ModelConfig:
    return ModelConfig(
        family="test",
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        norm_eps=1e-5,
        rope_theta=10000.0,
        max_positions=64,
        **switches,
    )


def layouts(heads: int, kv_heads: int):
    config = make_config(heads, kv_heads)
    return [(mesh, head_layout(config, mesh.tp, mesh.tp * mesh.dcp)) for mesh in MESHES]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_padded_heads_divide_over_every_mesh(heads, kv_heads):
    for mesh, layout in layouts(heads, kv_heads):
        assert layout.kv_heads % mesh.tp == 0
        assert layout.query_heads % (mesh.tp * mesh.dcp) == 0
        assert len(layout.kv_sources) == layout.kv_heads
        assert len(layout.query_sources) == layout.query_heads


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_every_query_head_appears_once_and_reads_its_own_kv_head(heads, kv_heads):
    for _, layout in layouts(heads, kv_heads):
        placed = [source for source in layout.query_sources if source != PADDED]
        assert sorted(placed) == list(range(heads))
        for place, source in enumerate(layout.query_sources):
            if source != PADDED:
                assert layout.kv_sources[place // layout.queries_per_kv] == source // (heads // kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_that_divide_are_left_alone(heads, kv_heads):
    for mesh, layout in layouts(heads, kv_heads):
        if kv_heads % mesh.tp == 0 and heads % (mesh.tp * mesh.dcp) == 0:
            assert layout.kv_sources == tuple(range(kv_heads))
            assert layout.query_sources == tuple(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_no_smaller_group_would_divide(heads, kv_heads):
    for mesh, layout in layouts(heads, kv_heads):
        copies = max(layout.kv_sources.count(kv) for kv in range(kv_heads))
        fewest = -(-(heads // kv_heads) // copies)
        for queries in range(fewest, layout.queries_per_kv):
            assert layout.kv_heads * queries % (mesh.tp * mesh.dcp)


def test_kv_heads_are_repeated_only_where_tp_exceeds_them():
    for heads, kv_heads in HEADS:
        for mesh, layout in layouts(heads, kv_heads):
            copies = {layout.kv_sources.count(kv) for kv in range(kv_heads)}
            assert len(copies) == 1
            assert copies == {1} or mesh.tp > kv_heads


@pytest.mark.parametrize(
    ("mesh", "padded"),
    # The last: 4 KV heads (one of them padding) twice each, and the three query heads of a group dealt out as 2 and 1.
    [(MeshShape(1, 1, 2), (12, 3)), (MeshShape(1, 2, 4), (16, 4)), (MeshShape(1, 8, 1), (16, 8))],
    ids=str,
)
def test_nine_query_and_three_kv_heads_are_padded_as_the_examples_say(mesh, padded):
    layout = head_layout(make_config(9, 3), mesh.tp, mesh.tp * mesh.dcp)
    assert (layout.query_heads, layout.kv_heads) == padded


def test_the_queries_of_a_repeated_kv_head_are_dealt_out_among_its_copies():
    layout = head_layout(make_config(9, 3), 8, 8)
    assert layout.kv_sources == (0, 0, 1, 1, 2, 2, PADDED, PADDED)
    assert layout.query_sources == (0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, -1, -1, -1, -1)


def test_taken_heads_are_zero_where_padded():
    x = np.arange(1, 7).reshape(3, 2)
    np.testing.assert_array_equal(take_heads(x, (2, PADDED, 0, 0)), [[5, 6], [0, 0], [1, 2], [1, 2]])
    assert np.all(x > 0)


def draw_layer(config: ModelConfig) -> dict[str, np.ndarray]:
    """Canonical tensors of one layer, float64."""
    random = np.random.default_rng(0)
    q, kv = config.num_heads * HEAD_DIM, config.num_kv_heads * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q, WIDTH),
        "self_attn.k_proj": (kv, WIDTH),
        "self_attn.v_proj": (kv, WIDTH),
        "self_attn.o_proj": (WIDTH, q),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    layer = {f"{name}.weight": random.standard_normal(shape) for name, shape in shapes.items()}
    layer |= {f"{name}.bias": random.standard_normal(shape[0]) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return layer | {f"{name}.weight": random.standard_normal(WIDTH) for name in norms}


def project(x: np.ndarray, layer: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One head over all rows."""
    weights = np.exp(q @ k.T)
    return weights / np.sum(weights, axis=1, keepdims=True) @ v


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def ranks_of(mesh: MeshShape):
    """(tp rank, index among all ranks of a layer), dcp fastest."""
    return [(tp, tp * mesh.dcp + dcp) for tp in range(mesh.tp) for dcp in range(mesh.dcp)]


PACKED = [
    ((9, 3), MeshShape(1, 1, 1)),
    ((9, 3), MeshShape(1, 1, 2)),
    ((9, 3), MeshShape(1, 2, 4)),
    ((9, 3), MeshShape(1, 8, 1)),
    ((8, 2), MeshShape(1, 2, 2)),
    ((4, 1), MeshShape(1, 4, 2)),
    ((14, 2), MeshShape(1, 4, 1)),
]


def pack(heads, mesh):
    config = make_config(*heads, qkv_bias=True, output_bias=True, mlp_bias=True)
    layer = draw_layer(config)
    layout = DecoderLayout(config, mesh, MODEL_AXES, np.float64)
    return config, layer, layout, DecoderLayer.pack(layout.layer, layer)


@pytest.mark.parametrize(("heads", "mesh"), PACKED, ids=str)
def test_packed_attention_summed_over_the_ranks_equals_the_canonical_one(heads, mesh):
    config, layer, layout, packed = pack(heads, mesh)
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)) / 4

    q, k, v = (project(x, layer, f"self_attn.{n}_proj").reshape(ROWS, -1, HEAD_DIM) for n in "qkv")
    group = config.num_heads // config.num_kv_heads
    outputs = [attend(q[:, h], k[:, h // group], v[:, h // group]) for h in range(config.num_heads)]
    expected = project(np.concatenate(outputs, axis=1), layer, "self_attn.o_proj")

    padded = layout.heads
    local_kv = padded.kv_heads // mesh.tp
    own_count = padded.query_heads // (mesh.tp * mesh.dcp)
    columns = np.split(packed["qkv"], mesh.tp, axis=1)
    biases = np.split(packed["qkv_bias"], mesh.tp)
    out_rows = np.split(packed["out"], mesh.tp * mesh.dcp)
    total = packed["row_biases"][0] + np.zeros((ROWS, WIDTH))
    for tp, index in ranks_of(mesh):
        fused = (x @ columns[tp] + biases[tp]).reshape(ROWS, -1, HEAD_DIM)
        local_q, local_k, local_v = np.split(fused, [fused.shape[1] - 2 * local_kv, fused.shape[1] - local_kv], axis=1)
        own = [index % mesh.dcp * own_count + i for i in range(own_count)]
        kv = [h // padded.queries_per_kv for h in own]
        attended = [attend(local_q[:, h], local_k[:, n], local_v[:, n]) for h, n in zip(own, kv, strict=True)]
        total += np.concatenate(attended, axis=1) @ out_rows[index]
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("heads", "mesh"), PACKED, ids=str)
def test_packed_feed_forward_summed_over_the_ranks_equals_the_canonical_one(heads, mesh):
    _, layer, _, packed = pack(heads, mesh)
    x = np.random.default_rng(2).standard_normal((ROWS, WIDTH))
    expected = silu(project(x, layer, "mlp.gate_proj")) * project(x, layer, "mlp.up_proj")
    expected = project(expected, layer, "mlp.down_proj")

    size = mesh.tp * mesh.dcp
    columns, biases = np.split(packed["gate_up"], size, axis=1), np.split(packed["gate_up_bias"], size)
    down = np.split(packed["down"], size)
    total = packed["row_biases"][1] + np.zeros((ROWS, WIDTH))
    for _, index in ranks_of(mesh):
        gate, up = np.split(x @ columns[index] + biases[index], 2, axis=1)
        total += silu(gate) * up @ down[index]
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)
