"""The target's modules, in the view of one device: what a pipeline stage runs, and the ends of the model.

Arrays are described first (globally, with the mesh axes that split them), then the forward pass, then how canonical
tensors become these arrays. Every layer is a module of its own with one array a matrix: a slice of stacked weights
would be copied before each product.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.mesh import MODEL_AXES, PP, TP, XLA, AxisNames, Collectives, MeshShape, rank
from jaxspec.models import rope, tensors
from jaxspec.models.config import ModelConfig
from jaxspec.models.heads import HeadLayout, head_layout, take_heads

# (new, layer, q, k, v) -> (attention output of this device's own query heads, new), where `new` is what the layers so
# far leave behind. The tick supplies it: a model knows rows and positions, not trees, pages or prompt chunks.
type Attend[New] = Callable[
    [New, int, Float[Array, "N H D"], Float[Array, "N K D"], Float[Array, "N K D"]],
    tuple[Float[Array, "N own_H*D"], New],
]


# (observed, layer, x) -> observed. Called with the residual stream that enters the first layer of a stage (layer -1)
# and with that after every layer slot; what it gathers is handed back by `Decoder.stage`.
type Observe[Observed] = Callable[[Observed, int, Float[Array, "N E"]], Observed]


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """How one layer lies on a mesh. A target's layers are split by stages; a draft's lie in the tail.

    Attributes:
      input_size: width of what the attention projections read.
      stage_axis: the axis over which the stages' layers are split, or None for a layer that every stage has.
      kv_axes: KV heads are split over them, and the query heads that they serve.
      out_axes: the attention output is split over them: `kv_axes`, and those that share out the queries of a KV head.
      ffn_axes: the feed-forward is split over them.
    """

    config: ModelConfig
    mesh: MeshShape
    dtype: jnp.dtype
    input_size: int
    stage_axis: str | None
    kv_axes: AxisNames
    out_axes: AxisNames
    ffn_axes: AxisNames

    @property
    def stages(self) -> int:
        return 1 if self.stage_axis is None else self.mesh.axis_size((self.stage_axis,))

    @property
    def heads(self) -> HeadLayout:
        return head_layout(self.config, self.mesh.axis_size(self.kv_axes), self.mesh.axis_size(self.out_axes))

    @property
    def padded_ffn(self) -> int:
        return round_up(self.config.intermediate_size, self.mesh.axis_size(self.ffn_axes))


@dataclasses.dataclass(frozen=True)
class DecoderLayout:
    """How a model of `config` lies on a mesh: which layers a stage runs, padded heads, the tail's split."""

    config: ModelConfig
    mesh: MeshShape
    tail_axes: AxisNames
    dtype: jnp.dtype

    @property
    def layer(self) -> LayerLayout:
        """One layer slot of every stage. The dcp ranks of a group hold the same KV heads, of other positions."""
        return LayerLayout(
            config=self.config,
            mesh=self.mesh,
            dtype=self.dtype,
            input_size=self.config.hidden_size,
            stage_axis=PP,
            kv_axes=(TP,),
            out_axes=MODEL_AXES,
            ffn_axes=MODEL_AXES,
        )

    @property
    def heads(self) -> HeadLayout:
        return self.layer.heads

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each stage; the first ones take what does not divide."""
        base, rest = divmod(self.config.num_layers, self.mesh.pp)
        return tuple(base + (stage < rest) for stage in range(self.mesh.pp))

    @property
    def layer_slots(self) -> int:
        """Layers that every stage steps through; a shorter stage passes its rows through the last one unchanged."""
        return max(self.stage_sizes)

    def layer_of(self, stage: int, slot: int) -> int | None:
        """The model's layer in a stage's slot, or None for padding."""
        return sum(self.stage_sizes[:stage]) + slot if slot < self.stage_sizes[stage] else None

    @property
    def padded_vocab(self) -> int:
        return self.padded_for_tail(self.config.vocab_size)

    def padded_for_tail(self, size: int) -> int:
        """An axis of so many that divides over the tail's devices."""
        return round_up(size, self._tail_size)

    @property
    def shares_head(self) -> bool:
        """One array serves as embedding and head: they are tied, and neither is split."""
        return self.config.tie_embeddings and self.padded_vocab == self.config.vocab_size and self._tail_size == 1

    @property
    def _tail_size(self) -> int:
        return self.mesh.axis_size(self.tail_axes)


def ignore[Observed](observed: Observed, layer: int, x: Float[Array, "N E"]) -> Observed:
    """Observes nothing."""
    return observed


def parameter(shape: tuple[int, ...], spec: P, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=spec)


ROW_MULTIPLE = 8  # products of fewer rows are no faster, and one row is slower


def pad_rows(x: Shaped[Array, "R *S"]) -> Shaped[Array, "N *S"]:
    """Rows for matrix products, with zeros after them."""
    return jnp.pad(x, ((0, -len(x) % ROW_MULTIPLE), *((0, 0),) * (x.ndim - 1)))


def rms_norm(x: Float[Array, "... E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


class DecoderLayer(nnx.Module):
    """One layer slot: pre-norm attention and a SwiGLU feed-forward, each added to the residual."""

    def __init__(self, layout: LayerLayout):
        config, heads, dtype = layout.config, layout.heads, layout.dtype
        stages, stage, e, d = layout.stages, layout.stage_axis, config.hidden_size, config.head_dim
        qkv = (heads.query_heads + 2 * heads.kv_heads) * d
        self.layout = layout
        self.norms = parameter((stages, 2, e), P(stage), dtype)
        # Columns of one rank of `kv_axes` lie together: its query heads, its key heads, its value heads. The dcp ranks
        # of a group repeat this product, which is cheaper than exchanging queries.
        self.qkv = parameter((stages, layout.input_size, qkv), P(stage, None, layout.kv_axes), dtype)
        self.out = parameter((stages, heads.query_heads * d, e), P(stage, layout.out_axes), dtype)
        # Columns of one rank lie together: its gate, its up.
        self.gate_up = parameter((stages, e, 2 * layout.padded_ffn), P(stage, None, layout.ffn_axes), dtype)
        self.down = parameter((stages, layout.padded_ffn, e), P(stage, layout.ffn_axes), dtype)
        if config.qkv_bias:
            self.qkv_bias = parameter((stages, qkv), P(stage, layout.kv_axes), dtype)
        if config.mlp_bias:
            self.gate_up_bias = parameter((stages, 2 * layout.padded_ffn), P(stage, layout.ffn_axes), dtype)
        if config.output_bias or config.mlp_bias:
            self.row_biases = parameter((stages, 2, e), P(stage), dtype)
        if config.qk_norm:
            self.qk_norms = parameter((stages, 2, d), P(stage), dtype)

    def __call__[New](
        self,
        x: Float[Array, "N E"],
        positions: Int[Array, "N"],
        slot: int,
        attend: Attend[New],
        new: New,
        collectives: Collectives = XLA,
    ) -> tuple[Float[Array, "N E"], New]:
        attended, new = attend(new, slot, *self.heads_of(self.input_norm(x), positions))
        return self.finish(x, attended, collectives), new

    def input_norm(self, x: Float[Array, "N E"]) -> Float[Array, "N E"]:
        return rms_norm(x, self.norms[0, 0], self.layout.config.norm_eps)

    def heads_of(
        self, x: Float[Array, "N input"], positions: Int[Array, "N"]
    ) -> tuple[Float[Array, "N H D"], Float[Array, "N K D"], Float[Array, "N K D"]]:
        """Queries, keys and values of this device, from what the projections read."""
        config, heads = self.layout.config, self.layout.heads
        local_kv = heads.kv_heads // self.layout.mesh.axis_size(self.layout.kv_axes)
        local_q = local_kv * heads.queries_per_kv
        fused = x @ self.qkv[0]
        if config.qkv_bias:
            fused = fused + self.qkv_bias[0]
        q, k, v = jnp.split(fused.reshape(len(x), -1, config.head_dim), [local_q, local_q + local_kv], axis=1)
        if config.qk_norm:
            q, k = (rms_norm(h, self.qk_norms[0, i], config.norm_eps) for i, h in enumerate((q, k)))
        frequency = rope.frequencies(config)
        return rope.rotate(q, positions, frequency), rope.rotate(k, positions, frequency), v

    def finish(
        self, residual: Float[Array, "N E"], attended: Float[Array, "N own_H*D"], collectives: Collectives = XLA
    ) -> Float[Array, "N E"]:
        """The output projection and the feed-forward."""
        config, layout = self.layout.config, self.layout
        x = residual + collectives.all_reduce(attended @ self.out[0], layout.out_axes)
        if config.output_bias:
            x = x + self.row_biases[0, 0]
        gate_up = rms_norm(x, self.norms[0, 1], config.norm_eps) @ self.gate_up[0]
        if config.mlp_bias:
            gate_up = gate_up + self.gate_up_bias[0]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        x = x + collectives.all_reduce((jax.nn.silu(gate) * up) @ self.down[0], layout.ffn_axes)
        if config.mlp_bias:
            x = x + self.row_biases[0, 1]
        return x

    @staticmethod
    def pack(layout: LayerLayout, canonical: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This layer's arrays, without the stage axis, from its canonical tensors (names after `model.layers.N.`)."""
        config, heads, mesh = layout.config, layout.heads, layout.mesh
        d, kv_ranks, ffn_ranks = config.head_dim, mesh.axis_size(layout.kv_axes), mesh.axis_size(layout.ffn_axes)

        def columns(name: str, sources: tuple[int, ...], kind: str) -> np.ndarray:
            """[..., ranks of `kv_axes`, columns of a rank]"""
            tensor = canonical[f"self_attn.{name}_proj.{kind}"]
            picked = take_heads(tensor.reshape(-1, d, *tensor.shape[1:]), sources)
            return np.moveaxis(picked.reshape(kv_ranks, -1, *tensor.shape[1:]), (0, 1), (-2, -1))

        def fused_qkv(kind: str) -> np.ndarray:
            parts = [
                columns("q", heads.query_sources, kind),
                columns("k", heads.kv_sources, kind),
                columns("v", heads.kv_sources, kind),
            ]
            joined = np.concatenate(parts, axis=-1)
            return joined.reshape(*joined.shape[:-2], -1)

        def ffn_columns(kind: str) -> np.ndarray:
            parts = []
            for name in ("gate", "up"):
                tensor = np.moveaxis(canonical[f"mlp.{name}_proj.{kind}"], 0, -1)
                parts.append(pad_axis(tensor, -1, layout.padded_ffn).reshape(*tensor.shape[:-1], ffn_ranks, -1))
            joined = np.concatenate(parts, axis=-1)
            return joined.reshape(*joined.shape[:-2], -1)

        output = canonical["self_attn.o_proj.weight"].T
        packed = {
            "norms": np.stack([canonical["input_layernorm.weight"], canonical["post_attention_layernorm.weight"]]),
            "qkv": fused_qkv("weight"),
            "out": take_heads(output.reshape(-1, d, output.shape[1]), heads.query_sources).reshape(-1, output.shape[1]),
            "gate_up": ffn_columns("weight"),
            "down": pad_axis(canonical["mlp.down_proj.weight"].T, 0, layout.padded_ffn),
        }
        if config.qkv_bias:
            packed["qkv_bias"] = fused_qkv("bias")
        if config.mlp_bias:
            packed["gate_up_bias"] = ffn_columns("bias")
        if config.output_bias or config.mlp_bias:
            zero = np.zeros(config.hidden_size, output.dtype)
            packed["row_biases"] = np.stack(
                [canonical.get("self_attn.o_proj.bias", zero), canonical.get("mlp.down_proj.bias", zero)]
            )
        if config.qk_norm:
            packed["qk_norms"] = np.stack([canonical["self_attn.q_norm.weight"], canonical["self_attn.k_norm.weight"]])
        return packed

    @staticmethod
    def unpack(layout: LayerLayout, packed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inverse of `pack`, of a layer that no axis splits: nothing of it is padded or interleaved."""
        config, heads = layout.config, layout.heads
        assert layout.mesh.axis_size((*layout.kv_axes, *layout.out_axes, *layout.ffn_axes)) == 1, "its parts lie apart"
        ends = np.cumsum([heads.query_heads, heads.kv_heads]) * config.head_dim
        q, k, v = np.split(packed["qkv"], ends, axis=-1)
        gate, up = np.split(packed["gate_up"], 2, axis=-1)
        input_norm, middle_norm = packed["norms"]
        canonical = {
            "input_layernorm.weight": input_norm,
            "post_attention_layernorm.weight": middle_norm,
            "self_attn.q_proj.weight": q.T,
            "self_attn.k_proj.weight": k.T,
            "self_attn.v_proj.weight": v.T,
            "self_attn.o_proj.weight": packed["out"].T,
            "mlp.gate_proj.weight": gate.T,
            "mlp.up_proj.weight": up.T,
            "mlp.down_proj.weight": packed["down"].T,
        }
        if config.qkv_bias:
            biases = np.split(packed["qkv_bias"], ends)
            canonical |= {f"self_attn.{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
        if config.mlp_bias:
            gate, up = np.split(packed["gate_up_bias"], 2)
            canonical |= {
                "mlp.gate_proj.bias": gate,
                "mlp.up_proj.bias": up,
                "mlp.down_proj.bias": packed["row_biases"][1],
            }
        if config.output_bias:
            canonical["self_attn.o_proj.bias"] = packed["row_biases"][0]
        if config.qk_norm:
            canonical |= dict(
                zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), packed["qk_norms"], strict=True)
            )
        return canonical


class Decoder(nnx.Module):
    """The whole target: embedding and head at its ends, `layer_slots` layers on every stage."""

    def __init__(self, layout: DecoderLayout):
        config, dtype = layout.config, layout.dtype
        self.layout = layout
        # Replicated: reading one row is cheaper than any exchange.
        self.embedding = parameter((config.vocab_size, config.hidden_size), P(), dtype)
        self.layers = nnx.List([DecoderLayer(layout.layer) for _ in range(layout.layer_slots)])
        self.final_norm = parameter((config.hidden_size,), P(), dtype)
        if not layout.shares_head:
            self.head = parameter((layout.padded_vocab, config.hidden_size), P(layout.tail_axes), dtype)

    def embed(self, tokens: Int[Array, "*R"]) -> Float[Array, "*R E"]:
        """Rows of the embedding; -1 (an empty tree node) reads row 0."""
        return self.embedding[...][jnp.maximum(tokens, 0)]

    def stage[New, Observed](
        self,
        x: Float[Array, "N E"],
        positions: Int[Array, "N"],
        attend: Attend[New],
        new: New,
        observe: Observe[Observed],
        observed: Observed,
        collectives: Collectives = XLA,
    ) -> tuple[Float[Array, "N E"], New, Observed]:
        """This stage's layers over N rows."""
        sizes = self.layout.stage_sizes
        observed = observe(observed, -1, x)
        for slot, layer in enumerate(self.layers):
            y, new = layer(x, positions, slot, attend, new, collectives)
            may_be_padding = slot >= min(sizes)
            x = jnp.where(slot < jnp.array(sizes)[rank((PP,))], y, x) if may_be_padding else y
            observed = observe(observed, slot, x)
        return x, new, observed

    def final_hidden(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return rms_norm(x, self.final_norm[...], self.layout.config.norm_eps)

    def logits(self, hidden: Float[Array, "... E"]) -> Float[Array, "... local_V"]:
        """Float32 logits of this device's part of the padded vocabulary, from `final_hidden`."""
        return jnp.einsum("...e,ve->...v", hidden, self.vocabulary, preferred_element_type=jnp.float32)

    @property
    def vocabulary(self) -> Float[Array, "local_V E"]:
        """Rows of this device's part of the padded vocabulary, with which logits are products."""
        return (self.embedding if self.layout.shares_head else self.head)[...]

    @staticmethod
    def end_tensor(config: ModelConfig, name: str) -> str:
        """The canonical tensor of the array called `name`, which belongs to no layer."""
        head = tensors.EMBEDDING if config.tie_embeddings else tensors.HEAD
        return {"embedding": tensors.EMBEDDING, "final_norm": tensors.FINAL_NORM, "head": head}[name]

    @staticmethod
    def pack_end(layout: DecoderLayout, name: str, canonical: np.ndarray) -> np.ndarray:
        return pad_axis(canonical, 0, layout.padded_vocab) if name == "head" else canonical


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad_axis(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Zeros at the end of an axis."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return np.pad(x, widths)
