"""A new EAGLE-3 head for a target, and a trained one in the layout in which heads are published."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Int
from safetensors.numpy import save_file

from jaxspec.checkpoint.staging import staged_directory
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import (
    DRAFT_TO_TARGET,
    FINAL_NORM,
    TARGET_TO_DRAFT,
    Eagle3Config,
    eagle3_tensor_shapes,
    usual_taps,
)
from jaxspec.drafts.registry import find_drafter
from jaxspec.errors import UserError
from jaxspec.models import tensors
from jaxspec.models.config import ModelConfig
from jaxspec.speculate.taps import check_taps
from jaxspec.train.config import HeadConfig

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

type ReadTensor = Callable[[str], np.ndarray]


def head_config(wanted: HeadConfig, target: ModelConfig) -> Eagle3Config:
    """The head that a training run's settings ask for.

    Raises:
      UserError: they don't fit the target.
    """
    depth, vocab_size = target.num_layers, target.vocab_size
    taps = usual_taps(depth) if wanted.taps is None else wanted.taps
    if wanted.taps is None and list(taps) != sorted(set(taps)):
        raise UserError(f"the usual taps {list(taps)} of a target of {depth} layers are not ascending: give head.taps")
    check_taps(taps, depth)
    if not taps or taps[0] in (0, 3):
        raise UserError(
            f"head.taps={list(taps)} can't be published: a list of taps must not be empty, nor begin with 0, which "
            "formats can't say, nor with 3, which is written as 2 and then read as the other convention's 2"
        )
    size = vocab_size if wanted.draft_vocab_size is None else wanted.draft_vocab_size
    if size > vocab_size:
        raise UserError(f"head.draft_vocab_size={size} must be at most the target's vocab_size={vocab_size}")
    return Eagle3Config(
        layer=dataclasses.replace(
            target,
            family="llama",
            num_layers=wanted.num_layers,
            intermediate_size=wanted.intermediate_size or target.intermediate_size,
            rope_theta=wanted.rope_theta or target.rope_theta,
            rope_scaling=None,
            tie_embeddings=False,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
        ),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=size,
        taps=taps,
        num_taps=len(taps),
        norm_before_residual=wanted.norm_before_residual,
        norm_before_fc=wanted.norm_before_fc,
        fc_norm=wanted.fc_norm,
        norm_output=wanted.norm_output,
        has_fc=True,
        fc_bias=False,
        has_embedding=False,
        has_head=wanted.draft_vocab_size is not None,
    )


def trained_head(path: Path, target: ModelConfig) -> tuple[Eagle3Config, dict[str, np.ndarray]]:
    """A head to go on from, and its canonical tensors in float32.

    Raises:
      UserError: there is none, it is not of this target, or it has parts that are not trained.
    """
    try:
        drafter = find_drafter(str(path)).fit(target)
    except UserError as error:
        raise UserError(f"head.start_from={path}: {error}") from error
    if not isinstance(drafter, Eagle3):
        raise UserError(f"head.start_from={path}: it is not trained: give the directory of a head")
    found = drafter.config
    wanted = HeadConfig(
        taps=found.taps,
        num_layers=found.layer.num_layers,
        draft_vocab_size=found.draft_vocab_size if found.has_head else None,
        intermediate_size=found.layer.intermediate_size,
        rope_theta=found.layer.rope_theta,
        **{flag: getattr(found, flag) for flag in _FLAGS},
    )
    config = head_config(wanted, target)
    ours, theirs = (_settings(each) for each in (config, found))
    if other := [f"{key}={theirs[key]}" for key in ours if theirs[key] != ours[key]]:
        raise UserError(f"head.start_from={path}: it has {', '.join(other)}, which training does not give a head")
    stored = drafter.files.read(list(eagle3_tensor_shapes(config)))
    return config, {name: x if x.dtype == np.int64 else x.astype(np.float32) for name, x in stored.items()}


def _settings(config: Eagle3Config) -> dict[str, Any]:
    """All that decides what a head computes: neither the name of its block nor the length it was trained at."""
    flat = dataclasses.asdict(config)
    layer = flat.pop("layer")
    return flat | {key: value for key, value in layer.items() if key not in ("family", "max_positions")}


def most_frequent(counts: Int[np.ndarray, "V"], size: int) -> Int[np.ndarray, "V_d"]:
    """The `size` tokens that are counted most often, ascending; of equal ones those with lower ids."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def initial_tensors(
    config: Eagle3Config, target: ModelConfig, read: ReadTensor, ids: Int[np.ndarray, "V_d"], seed: int
) -> dict[str, np.ndarray]:
    """Canonical tensors of an untrained head, float32.

    Matrices are normal with variance 1 / inputs. What stands between the last layer and the tokens starts as the
    target's: its final norm, and its output head's rows of the draft vocabulary.

    Args:
      read: a canonical tensor of the target.
      ids: the target's tokens that the head drafts.
      seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    shapes = eagle3_tensor_shapes(config)
    initial: dict[str, np.ndarray] = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    initial[FINAL_NORM] = read(tensors.FINAL_NORM).astype(np.float32)
    if config.has_head:
        head = read(tensors.EMBEDDING if target.tie_embeddings else tensors.HEAD)
        initial[tensors.HEAD] = head[ids].astype(np.float32)
    if DRAFT_TO_TARGET in shapes:
        initial[DRAFT_TO_TARGET] = ids.astype(np.int64) - np.arange(len(ids))
    return initial


def export_head(
    directory: Path, config: Eagle3Config, target: ModelConfig, canonical: Mapping[str, np.ndarray]
) -> None:
    """Writes a head as SpecForge publishes them, in bfloat16: SGLang, vLLM and jaxspec load it.

    A head without a vocabulary of its own says so by `draft_vocab_size` null: given the target's size instead, SGLang
    waits for an output head that is not in the file, and leaves its own as it was made, at random (its issue 27829).
    The list of taps is left out where it is the usual one, for SGLang and vLLM read such lists differently (SGLang as
    outputs of 0-based layers, as it is written here, vLLM as layers before them).

    Raises:
      UserError: `directory` is taken.
    """
    published: dict[str, np.ndarray] = {}
    for name, tensor in canonical.items():
        if config.layer.num_layers == 1:
            name = name.replace("layers.0.", "midlayer.")
        dtype = tensor.dtype if tensor.dtype == np.int64 else ml_dtypes.bfloat16
        published[name] = np.ascontiguousarray(tensor, dtype)
    if DRAFT_TO_TARGET in canonical:
        ids = canonical[DRAFT_TO_TARGET] + np.arange(config.draft_vocab_size)
        published[TARGET_TO_DRAFT] = np.isin(np.arange(config.layer.vocab_size), ids)
    with staged_directory(directory) as staging:
        (staging / "config.json").write_text(json.dumps(_published_config(config, target), indent=2) + "\n")
        save_file(published, staging / "model.safetensors", {"format": "pt"})


def _published_config(config: Eagle3Config, target: ModelConfig) -> dict[str, Any]:
    layer = config.layer
    published: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size if config.has_head else None,
        "hidden_size": layer.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "max_position_embeddings": layer.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    published |= {flag: True for flag in _FLAGS if getattr(config, flag)}
    assert config.taps is not None
    if config.taps != usual_taps(target.num_layers):
        outputs = [tap - 1 for tap in config.taps]
        published["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    return published
