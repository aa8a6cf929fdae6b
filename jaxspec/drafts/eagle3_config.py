"""What an EAGLE-3 head is (Li et al. 2025, arXiv 2503.01840), read from its published `config.json` and tensor names.

Three formats are in use: that of the reference code, that of SpecForge and ModelOpt (the same names, with an
`eagle_config`), and that of speculators (`transformer_layer_config`). All become one configuration and one set of
canonical tensor names, those of the speculators format.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import read_config
from jaxspec.models.tensors import HEAD, layer_shapes

FC = "fc.weight"
FC_BIAS = "fc.bias"
FC_INPUT_NORM = "input_norm.weight"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"
DEFAULT_TAPS = 3
HEAD_FOR_TARGET = "{} is an EAGLE-3 head, not a model by itself: give its target model here, and the head as draft"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes and switches of a head; H is its own width, T the target's, V and V_d the target's and its vocabulary.

    Attributes:
      layer: its own transformer, of width H over the target's V tokens. Biases and QK norm are those of the tensors.
        `max_positions` is the length it was trained at and limits nothing; `tie_embeddings` is never set.
      target_hidden_size: T, the width of one tap.
      draft_vocab_size: V_d; smaller than V where the head has a map `d2t`.
      taps: what it reads of the target, ascending: i stands for the residual stream after i layers (0: the embedding;
        n of n layers: before the final norm). None where its files name none: `(2, n // 2, n - 3)` for n layers is
        meant. Empty where it reads the target's final hidden state.
      num_taps: parts m of the input of `fc`; 1 for a head that reads the final hidden state.
      norm_before_residual: layer 0 adds to the normed features instead of the features as they are.
      norm_before_fc: one RMS norm over the m·T concatenated features.
      fc_norm: one RMS norm for each of the m parts.
      norm_output: later steps are fed the output after the final norm instead of before it.
      has_fc, fc_bias: a projection from m·T to H; without it the features are taken as they are.
      has_embedding: its own embedding; else the target's.
      has_head: its own output head; else the target's, with V_d = V.
    """

    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    num_taps: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has_fc: bool
    fc_bias: bool
    has_embedding: bool
    has_head: bool


def is_eagle3(raw_config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these are the `config.json` and the tensor names, published or canonical, of an EAGLE-3 head."""
    if "speculators_model_type" in raw_config:
        return raw_config["speculators_model_type"] == "eagle3"
    architectures = raw_config.get("architectures") or ()
    if any("eagle3" in str(architecture).lower() for architecture in architectures):
        return True
    # The reference's own heads may call themselves LlamaForCausalLM.
    return any(re.search(r"(^|\.)(midlayer|layers\.0)\.hidden_norm\.weight$", name) for name in names)


def read_eagle3_config(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Eagle3Config:
    """The head that a parsed `config.json` describes, together with its tensors.

    What has weights of its own (biases, QK norm, the norms before `fc` where no flag says so, the embedding, the
    output head) is there exactly if the weights are; `tie_word_embeddings` is not listened to. A missing `rope_theta`
    is 10000 whatever the target's is, and a missing `norm_before_residual` is true in the speculators format alone.

    Integers in `eagle_aux_hidden_state_layer_ids` mean different things to different tools. In the speculators format
    i always is the residual stream after i layers. Elsewhere a list that starts with 2 is read so too, since it is the
    reference's default; any other list, one that starts with 1 above all, names outputs of 0-based layers, as
    SpecForge, ModelOpt and SGLang mean it, so that 1 is added. A wrong reading shows only in a low acceptance:
    `dataclasses.replace(config, taps=...)` overrides it.

    Args:
      raw: the parsed file.
      shapes: canonical names and shapes of the head's tensors.

    Raises:
      UserError: a field is missing or contradicts the tensors, or asks for something that jaxspec does not compute.
    """
    if latent := [name for name in shapes if "_a_proj" in name or "kv_b_proj" in name]:
        raise UserError(
            f"tensor {latent[0]!r} of the head belongs to multi-head latent attention, which jaxspec does not compute: "
            "use a head with plain q_proj, k_proj and v_proj"
        )
    is_speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise UserError(f"eagle_config={nested!r} in the head's config.json must be an object: correct it")

    def field(*names: str) -> Any:
        values = (source[name] for source in (raw, nested) for name in names if source.get(name) is not None)
        return next(values, None)

    def flag(*names: str, default: bool) -> bool:
        value = field(*names)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{names[0]}={value!r} in the head's config.json must be true or false: correct it")
        return default if value is None else value

    layer = _read_layer(raw.get("transformer_layer_config") if is_speculators else raw, shapes)
    target_hidden_size = _positive("target_hidden_size", field("target_hidden_size"), layer.hidden_size)
    taps = _read_taps(field(_LAYER_IDS), is_speculators) if flag("use_aux_hidden_state", default=True) else ()
    num_taps = _count_taps(taps, shapes.get(FC), target_hidden_size, layer.hidden_size)
    draft_vocab_size = _positive(
        "draft_vocab_size", field("draft_vocab_size"), shapes.get(HEAD, (layer.vocab_size,))[0]
    )
    is_reduced = draft_vocab_size != layer.vocab_size
    if draft_vocab_size > layer.vocab_size:
        raise UserError(
            f"draft_vocab_size={draft_vocab_size} of the head exceeds vocab_size={layer.vocab_size} of its target: "
            "correct its config.json"
        )
    if is_reduced and DRAFT_TO_TARGET not in shapes:
        raise UserError(
            f"the head drafts from {draft_vocab_size} of {layer.vocab_size} tokens but has no tensor 'd2t' that says "
            "which: acceptance would collapse; use complete files"
        )
    if shapes.get(DRAFT_TO_TARGET, (draft_vocab_size,)) != (draft_vocab_size,):
        raise UserError(
            f"tensor 'd2t' of the head has shape {list(shapes[DRAFT_TO_TARGET])}, not [{draft_vocab_size}] as "
            "draft_vocab_size of its config.json asks: use files and a config of one head"
        )
    borrowed = [name for name in (EMBEDDING, HEAD) if name not in shapes]
    if target_hidden_size != layer.hidden_size and borrowed:
        raise UserError(
            f"the head is {layer.hidden_size} wide, its target {target_hidden_size}, and it has no {borrowed[0]!r} of "
            "its own: the target's does not fit it; use complete files"
        )
    return Eagle3Config(
        layer=layer,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        num_taps=num_taps,
        norm_before_residual=flag("norm_before_residual", default=is_speculators),
        norm_before_fc=flag("norm_before_fc", default=FC_INPUT_NORM in shapes),
        fc_norm=flag("fc_norm", "use_aux_norm", default=tap_norm(0) in shapes),
        norm_output=flag("norm_output", default=False),
        has_fc=FC in shapes,
        fc_bias=FC_BIAS in shapes,
        has_embedding=EMBEDDING in shapes,
        has_head=HEAD in shapes or is_reduced,
    )


def eagle3_tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of exactly the tensors of a stored head.

    All are floating-point, matrices `[out, in]`, but `d2t`: int64 `[V_d]`, what is added to a draft token's id to get
    the target's; it is stored where V_d < V alone.
    """
    width, target_width = config.layer.hidden_size, config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_embedding:
        shapes[EMBEDDING] = (config.layer.vocab_size, width)
    if config.norm_before_fc:
        shapes[FC_INPUT_NORM] = (config.num_taps * target_width,)
    if config.fc_norm:
        shapes |= {tap_norm(part): (target_width,) for part in range(config.num_taps)}
    if config.has_fc:
        shapes[FC] = (width, config.num_taps * target_width)
    if config.fc_bias:
        shapes[FC_BIAS] = (width,)
    for layer in range(config.layer.num_layers):
        members = layer_shapes(config.layer)
        if layer == 0:
            for matrix in ("q_proj", "k_proj", "v_proj"):
                name = f"self_attn.{matrix}.weight"
                members[name] = (members[name][0], 2 * width)
            members["hidden_norm.weight"] = (width,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in members.items()}
    shapes[FINAL_NORM] = (width,)
    if config.has_head:
        shapes[HEAD] = (config.draft_vocab_size, width)
    if config.draft_vocab_size < config.layer.vocab_size:
        shapes[DRAFT_TO_TARGET] = (config.draft_vocab_size,)
    return shapes


def check_vocabulary(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> None:
    """Requires that draft token d and target token `d + d2t[d]` are one, for ascending target tokens.

    Args:
      d2t: int `[V_d]`.
      t2d: bool `[V]`, true for target tokens that are drafted; None where a head has none.
      vocab_size: V.

    Raises:
      UserError: some target token is out of range or out of order, or the two maps disagree.
    """
    if d2t.dtype.kind != "i":
        raise UserError(f"'d2t' of the head is {d2t.dtype.name}, not integers: use undamaged files")
    target = np.arange(len(d2t)) + d2t.astype(np.int64)
    if bad := np.flatnonzero((target < 0) | (target >= vocab_size)).tolist():
        raise UserError(
            f"'d2t' of the head maps draft token {bad[0]} to {target[bad[0]]}, outside the target's {vocab_size} "
            "tokens: use the head of this target, with undamaged files"
        )
    if bad := np.flatnonzero(np.diff(target) <= 0).tolist():
        raise UserError(
            f"'d2t' of the head maps draft tokens {bad[0]} and {bad[0] + 1} to {target[bad[0]]} and "
            f"{target[bad[0] + 1]}, which must ascend: d2t holds target id minus draft id; use undamaged files"
        )
    if t2d is not None and not np.array_equal(target, np.flatnonzero(t2d)):
        raise UserError(
            f"'t2d' of the head marks {np.count_nonzero(t2d)} target tokens, other ones than the {len(d2t)} of 'd2t': "
            "use the maps of one training run"
        )


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """What heads read of a target of so many layers where their files name nothing."""
    return (2, num_layers // 2, num_layers - 3)


def tap_norm(part: int) -> str:
    return f"fc_norm.{part}.weight"


def _positive(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r} in the head's config.json must be a positive integer: correct it")
    return value


def _read_layer(raw: Any, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    if not isinstance(raw, Mapping):
        raise UserError(
            f"transformer_layer_config={raw!r} in the head's config.json must be an object, which its format needs: "
            "correct it"
        )
    try:
        layer = read_config({**raw, "model_type": raw.get("model_type") or "llama"})
    except UserError as error:
        raise UserError(f"of the head: {error}") from error
    kinds = raw.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise UserError(f"layer_types={kinds!r} in the head's config.json must be a list: correct it")
    for kind in kinds[: layer.num_layers]:
        if kind != "full_attention":
            raise UserError(
                f"layer_types={kind!r} in the head's config.json is not supported: jaxspec computes full attention only"
            )
    has_query_bias, has_output_bias, has_mlp_bias, has_query_norm = (
        f"layers.0.{name}" in shapes
        for name in ("self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.gate_proj.bias", "self_attn.q_norm.weight")
    )
    return dataclasses.replace(
        layer,
        tie_embeddings=False,
        qkv_bias=has_query_bias,
        output_bias=has_output_bias,
        mlp_bias=has_mlp_bias,
        qk_norm=has_query_norm,
    )


def _read_taps(listed: Any, is_speculators: bool) -> tuple[int, ...] | None:
    if not listed:
        return None
    if not isinstance(listed, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in listed):
        raise UserError(
            f"{_LAYER_IDS}={listed!r} in the head's config.json must be a list of layer numbers: correct it"
        )
    taps = sorted(set(listed))
    are_outputs = not is_speculators and taps[0] != 2
    return tuple(tap + are_outputs for tap in taps)


def _count_taps(
    taps: tuple[int, ...] | None, fc: tuple[int, ...] | None, target_hidden_size: int, hidden_size: int
) -> int:
    wanted = DEFAULT_TAPS if taps is None else len(taps) or 1
    if fc is None:
        if wanted > 1:
            raise UserError(f"the head lacks tensor {FC!r}, which {wanted} taps of the target need: use complete files")
        if target_hidden_size != hidden_size:
            raise UserError(
                f"the head lacks tensor {FC!r}, though target_hidden_size={target_hidden_size} differs from "
                f"hidden_size={hidden_size}: use complete files"
            )
        return 1
    if len(fc) != 2 or fc[1] % target_hidden_size:
        raise UserError(
            f"tensor {FC!r} of the head has shape {list(fc)}: its inputs must be a multiple of the target's width "
            f"{target_hidden_size}; correct target_hidden_size in its config.json"
        )
    count = fc[1] // target_hidden_size
    if taps is not None and count != wanted:
        said = f"names {wanted}" if taps else "reads the final hidden state"
        raise UserError(
            f"tensor {FC!r} of the head has shape {list(fc)}, {count} taps of width {target_hidden_size}, but its "
            f"config.json {said}: use files of one head, or correct {_LAYER_IDS} there"
        )
    return count
