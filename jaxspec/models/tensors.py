"""Canonical tensors: the names and shapes in which a decoder is stored, the same for every mesh.

They are those of a Hugging Face checkpoint (`[out, in]` matrices), so that a conversion only checks and copies.
"""

from jaxspec.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_tensor(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (after `model.layers.N.`) and shapes of one layer."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (e,),
        "post_attention_layernorm.weight": (e,),
        "self_attn.q_proj.weight": (q, e),
        "self_attn.k_proj.weight": (kv, e),
        "self_attn.v_proj.weight": (kv, e),
        "self_attn.o_proj.weight": (e, q),
        "mlp.gate_proj.weight": (f, e),
        "mlp.up_proj.weight": (f, e),
        "mlp.down_proj.weight": (e, f),
    }
    if config.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (e,)
    if config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,), "mlp.down_proj.bias": (e,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of a checkpoint; a tied head is not stored."""
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    for layer in range(config.num_layers):
        shapes |= {layer_tensor(layer, name): shape for name, shape in layer_shapes(config).items()}
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
