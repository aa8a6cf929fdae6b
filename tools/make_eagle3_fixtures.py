"""Tiny random EAGLE-3 heads, and what `speculators` computes with them, for `tests/fixtures/eagle3`.

Each `<case>/` gets `config.json` and `model.safetensors`, as `save_pretrained` of speculators writes them, and
`reference.safetensors`. Row p pairs token x_{p+1} with the target's hidden states at position p, and stands at RoPE
position p + s in draft step s. In step 0 it sees the rows up to itself, and in step s also its own rows of the steps
1 to s:

  taps              f32[24, 3, H]  hidden states of the target
  tokens            i32[24]        what row p embeds in step 0, x_{p+1}; x_24 is the last
  logits            f32[24, D]     of step 0, over the draft vocabulary
  recycle           f32[24, H]     what takes the place of the fused hidden states in step 1
  tokens_1, tokens_2, logits_1, ...  the same of steps 1 and 2, where row p embeds x_{p+1+s}, or 0 beyond the last

Three of them also get `loss.safetensors`, the training losses of steps 0 to 2 over two texts side by side:

  taps, states      f32[25, 3, H], f32[25, H]  of the target: the latter after its final norm
  target_head       f32[V, H]                  its output head
  tokens, documents, positions  i32[25]        of which the first 14 are one text and the rest another
  counted           i32[25]        1 where the target's prediction at a position is learned from
  kl, acceptance    f32[3]         means over what is counted, without decay: KL divergence and -log sum min(p, q)

`reference_layout/` and `specforge_layout/` hold the weights of `plain` as the reference implementation and SpecForge
publish them, which is without an embedding. Every weight is a multiple of 1/128 and at most 2, so float16, bfloat16
and float32 all hold the same number; the references are computed in float32.

speculators needs torch, so this runs in an environment of its own:

  python3.11 -m venv ref
  ref/bin/pip install torch==2.13.0 transformers==5.17.0 safetensors
  ref/bin/pip install --no-deps speculators==0.9.0
  ref/bin/pip install loguru pydantic-settings python-dotenv datasets==5.1.0 openai hs-connectors==0.9.0
  ref/bin/python tools/make_eagle3_fixtures.py
"""

import argparse
import collections
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

# Compiling would take longer than everything else here.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

OUTPUT = pathlib.Path(__file__).parents[1] / "tests" / "fixtures" / "eagle3"
LENGTH, STEPS = 24, 3
VOCAB, TAPS = 256, 3
# Unequal, as those of a target are: norms before and after their concatenation then differ.
TAP_SCALES = (0.5, 1.0, 2.0)
GRID, LARGEST = 128, 2.0
LOSS_CASES = ("plain", "before_fc", "full_vocab")

SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)

# The layer's config class, fields of its config, and fields of the head's.
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    # The width is that of all heads together, because the reference layout does not tell head_dim.
    "plain": (LlamaConfig, dict(hidden_size=64, intermediate_size=64), dict(draft_vocab_size=128)),
    "before_residual": (LlamaConfig, {}, dict(norm_before_residual=True)),
    "before_fc": (LlamaConfig, {}, dict(norm_before_fc=True, norm_output=True)),
    "fc_norm": (LlamaConfig, {}, dict(fc_norm=True)),
    "full_vocab": (LlamaConfig, dict(vocab_size=128), dict(draft_vocab_size=128)),
    "qwen3": (Qwen3Config, dict(num_attention_heads=6, rope_parameters=dict(rope_type="default", rope_theta=1e6)), {}),
    "two_layers": (LlamaConfig, dict(num_hidden_layers=2), {}),
    # speculators refuses fc_norm together with norm_before_fc.
    "everything": (
        Qwen3Config,
        dict(num_hidden_layers=2),
        dict(norm_before_residual=True, fc_norm=True, norm_output=True),
    ),
}

REFERENCE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    # Of training only: what is served may be longer. No rope_theta means 10000.
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB,
    "draft_vocab_size": 128,
}
# These ids count from the output of the first layer: the same tensors as 2, 4, 5 of speculators.
SPECFORGE_CONFIG = REFERENCE_CONFIG | {
    "torch_dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}


def on_grid(values: torch.Tensor) -> torch.Tensor:
    return (values * GRID).round().div(GRID).clamp(-LARGEST, LARGEST)


def make_head(layer: type, layer_fields: dict[str, Any], fields: dict[str, Any]) -> Eagle3DraftModel:
    """A head with random parameters, all of them: speculators leaves NaN in what it would take from a target."""
    torch.manual_seed(0)
    layer_config = layer(**SHARED | layer_fields)
    layer_config._attn_implementation = "eager"
    speculators_config = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    fields = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]} | fields
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config, speculators_config=speculators_config, **fields
    )
    head = Eagle3DraftModel(config).float().eval()
    head.load_vocab_mappings(*choose_vocabulary(head.draft_vocab_size, head.verifier_vocab_size))
    with torch.no_grad():
        for parameter in head.parameters():
            # Norms are the only vectors; matrices of the default, 0.02, would leave the logits nearly uniform.
            drawn = torch.rand_like(parameter) + 0.5 if parameter.ndim == 1 else torch.randn_like(parameter) * 0.15
            parameter.copy_(on_grid(drawn))
    return head


def choose_vocabulary(size: int, target_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which target ids the draft knows, bool[V], and how far each lies from its draft id, int64[D]."""
    ids = torch.randperm(target_size)[:size].sort().values
    known = torch.zeros(target_size, dtype=torch.bool)
    known[ids] = True
    return known, ids - torch.arange(size)


@torch.no_grad()
def compute_reference(head: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """What goes in and out of the head's modules while it unrolls its draft steps over one random sequence."""
    taps = torch.randn(LENGTH, TAPS, head.hidden_size) * torch.tensor(TAP_SCALES)[:, None]
    tokens = torch.randint(1, head.verifier_vocab_size, (LENGTH,))
    seen = collections.defaultdict(list)
    head.embed_tokens.register_forward_pre_hook(lambda _, args: seen["tokens"].append(args[0][0].int()))
    # Its input is the embedding and what was recycled, side by side.
    head.layers[0].register_forward_pre_hook(lambda _, args: seen["fed"].append(args[0][0].chunk(2, -1)[1]))
    head.lm_head.register_forward_hook(lambda _, args, output: seen["logits"].append(output[0]))
    # One step more shows what the last one recycled.
    head(taps.reshape(1, LENGTH, -1), tokens[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS + 1)
    reference = {"taps": taps}
    for step in range(STEPS):
        suffix = f"_{step}" if step else ""
        reference[f"tokens{suffix}"] = seen["tokens"][step]
        reference[f"logits{suffix}"] = seen["logits"][step]
        reference[f"recycle{suffix}"] = seen["fed"][step + 1]
    return {name: tensor.clone().contiguous() for name, tensor in reference.items()}


def compute_loss(head: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """Of two texts in a row, in float32. A row that drafts beyond its text, or from another one, is not counted."""
    torch.manual_seed(1)
    n, first, width = LENGTH + 1, 14, head.hidden_size
    taps = torch.randn(n, TAPS, width) * torch.tensor(TAP_SCALES)[:, None]
    tokens = torch.randint(1, head.verifier_vocab_size, (n,))
    documents = (torch.arange(n) >= first).int() + 1
    positions = torch.where(documents == 1, torch.arange(n), torch.arange(n) - first)
    target_head = on_grid(torch.randn(head.verifier_vocab_size, width) * 0.15)
    ids = torch.arange(len(target_head)) if head.t2d is None else head.t2d.nonzero()[:, 0]
    hidden = torch.randn(n, width)
    with torch.no_grad():
        head.verifier_lm_head.weight.copy_(target_head[ids])
        states = head.verifier_norm(hidden)
        is_known = torch.isin((states @ target_head.T).argmax(-1), ids)
    # What the first positions of the second text say would be drafted from the first one, in the last step.
    counted = is_known & (torch.rand(n) < 0.9) & ((documents == 1) | (positions >= STEPS))
    counted &= torch.cat([documents[1:] == documents[:-1], torch.tensor([False])])
    reference = {
        "taps": taps,
        "states": states,
        "target_head": target_head,
        "tokens": tokens.int(),
        "documents": documents.int(),
        "positions": positions.int(),
        "counted": counted.int(),
    }
    for name, theirs in (("kl", "kl_div"), ("acceptance", "nla")):
        _, _, metrics = head(
            taps[:-1].reshape(1, n - 1, -1),
            tokens[None, 1:].long(),
            documents[None, :-1].long(),
            loss_mask=counted[None, 1:],
            position_ids=positions[None, :-1],
            verifier_last_hidden_states=hidden[None, 1:],
            ttt_steps=STEPS,
            loss_config=resolve_loss_config(theirs, "eager"),
        )
        reference[name] = torch.stack([metrics[f"loss_{step}_sum"] for step in range(STEPS)])
    return {name: tensor.detach().clone().contiguous() for name, tensor in reference.items()}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SHARED["rms_norm_eps"]) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """RoPE of rows at positions 0, 1, ..., for x f32[n, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] / 1e4 ** (torch.arange(half) / half)
    low, high = x.chunk(2, -1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


def step_by_hand(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, fed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last row's logits and what it recycles, in a head without flags whose rows n see each other causally.

    Args:
      tokens: int[n]
      fed: f32[n, H] the fused hidden states of the target, or what the draft recycled.
    """
    layer = {name.removeprefix("layers.0."): weight.float() for name, weight in weights.items()}
    embedded = rms_norm(layer["embed_tokens.weight"][tokens], layer["input_layernorm.weight"])
    both = torch.cat([embedded, rms_norm(fed, layer["hidden_norm.weight"])], -1)
    query, key, value = (
        (both @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, SHARED["head_dim"])) for name in "qkv"
    )
    group = query.shape[1] // key.shape[1]
    key, value = rotate(key).repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("hd,khd->hk", rotate(query)[-1], key) / SHARED["head_dim"] ** 0.5
    attended = torch.einsum("hk,khd->hd", scores.softmax(-1), value).flatten()
    middle = fed[-1] + layer["self_attn.o_proj.weight"] @ attended
    normed = rms_norm(middle, layer["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(layer["mlp.gate_proj.weight"] @ normed)
    output = middle + layer["mlp.down_proj.weight"] @ (gate * (layer["mlp.up_proj.weight"] @ normed))
    return layer["lm_head.weight"] @ rms_norm(output, layer["norm.weight"]), output


def check_by_hand(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest error of a draft that is served: row t's chain follows the rows up to t, one position after another.

    Only the last row of each chain is compared, so attention needs no mask here.
    """
    fused = reference["taps"].flatten(1) @ weights["fc.weight"].float().T
    errors = []
    for row in range(LENGTH):
        tokens, fed = reference["tokens"][: row + 1], fused[: row + 1]
        for step in range(STEPS):
            suffix = f"_{step}" if step else ""
            if step:
                tokens = torch.cat([tokens, reference[f"tokens{suffix}"][row : row + 1]])
                fed = torch.cat([fed, recycled[None]])
            logits, recycled = step_by_hand(weights, tokens, fed)
            errors.append((logits - reference[f"logits{suffix}"][row]).abs().max().item())
            errors.append((recycled - reference[f"recycle{suffix}"][row]).abs().max().item())
    if max(errors) > 1e-4:
        raise RuntimeError(f"speculators and the step written by hand differ by {max(errors)}")
    return max(errors)


def save_model(model: torch.nn.Module, directory: pathlib.Path) -> None:
    """In bfloat16, as models are published, and only the two files that jaxspec reads."""
    with tempfile.TemporaryDirectory() as saved:
        model.bfloat16().save_pretrained(saved)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(pathlib.Path(saved, name), directory / name)


def rename_for_reference(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name.replace("layers.0.", "midlayer."): weight.to(dtype) if weight.is_floating_point() else weight
        for name, weight in weights.items()
        if name != "embed_tokens.weight"
    }


def make_directory(path: pathlib.Path) -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    for name, case in CASES.items():
        directory = make_directory(output / name)
        head = make_head(*case)
        reference = compute_reference(head)
        save_file(reference, directory / "reference.safetensors")
        if name in LOSS_CASES:
            save_file(compute_loss(head), directory / "loss.safetensors")
        save_model(head, directory)
        print(f"{name:16}{(directory / 'model.safetensors').stat().st_size:8} bytes")

    plain = load_file(output / "plain" / "model.safetensors")
    error = check_by_hand(plain, load_file(output / "plain" / "reference.safetensors"))
    print(f"plain by hand differs by {error:.1e} at most")

    directory = make_directory(output / "reference_layout")
    torch.save(rename_for_reference(plain, torch.float16), directory / "pytorch_model.bin")
    write_json(directory / "config.json", REFERENCE_CONFIG)
    directory = make_directory(output / "specforge_layout")
    save_file(rename_for_reference(plain, torch.bfloat16), directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", SPECFORGE_CONFIG)


if __name__ == "__main__":
    main()
