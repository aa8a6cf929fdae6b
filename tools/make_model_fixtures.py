"""Tiny random models of every family, and what transformers computes with them, for `tests/fixtures/models`.

Each `<name>/` gets `config.json` and `model.safetensors`, as `save_pretrained` writes them, and
`reference.safetensors`:

  tokens  i32[2, 48]     two random prompts
  logits  f32[2, 48, V]  the forward over them, without a cache
  greedy  i32[2, 24]     greedy continuation of their first 16 tokens, with a cache

transformers needs torch, so this runs in an environment of its own:

  python3.11 -m venv ref
  ref/bin/pip install torch==2.13.0 transformers==5.17.0 safetensors
  ref/bin/python tools/make_model_fixtures.py
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import tempfile
from typing import Any

import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

OUTPUT = pathlib.Path(__file__).parents[1] / "tests" / "fixtures" / "models"
PROMPT, CONTEXT, CONTINUATION = 48, 16, 24
CANDIDATES = 1024
# Well above what summing float32 in another order can change, so the greedy tokens are the same everywhere.
SMALLEST_MARGIN = 0.05
# A continuation that repeats one token would come out right with a broken cache.
FEWEST_DISTINCT = 16


@dataclasses.dataclass(frozen=True)
class Family:
    config: type
    model: type


LLAMA = Family(LlamaConfig, LlamaForCausalLM)
QWEN2 = Family(Qwen2Config, Qwen2ForCausalLM)
QWEN3 = Family(Qwen3Config, Qwen3ForCausalLM)

SHARED = dict(
    vocab_size=256,
    num_hidden_layers=4,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
    # The default, 0.02, leaves the logits nearly uniform.
    initializer_range=0.15,
    dtype="float32",
)

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama2": (
        LLAMA,
        dict(
            hidden_size=64,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
            tie_word_embeddings=False,
        ),
    ),
    # Wavelengths are 2 pi 5e5^(i/8) = 6, 32, 167, ...; the bounds are 64 / 4 = 16 and 64 / 1 = 64, so the first
    # frequency is kept, the second interpolated and the others divided by 8.
    "llama3": (
        LLAMA,
        dict(
            hidden_size=96,
            intermediate_size=20,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            tie_word_embeddings=True,
        ),
    ),
    # Head counts of SmolLM2; head_dim is not hidden_size / heads, and 3 layers split unevenly over 2 pipeline stages.
    "llama_bias": (
        LLAMA,
        dict(
            hidden_size=72,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=1e5),
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2": (
        QWEN2,
        dict(
            hidden_size=64,
            intermediate_size=80,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": (
        QWEN3,
        dict(
            hidden_size=48,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=False,
        ),
    ),
}


def make_model(family: Family, fields: dict[str, Any]) -> torch.nn.Module:
    """A model with random weights, norms and biases among them: those start at 1 and 0, which would hide a mistake."""
    torch.manual_seed(0)
    model = family.model._from_config(family.config(**SHARED | fields), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.3)
    return model


@torch.no_grad()
def compute_reference(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Prompts, logits and greedy continuations, for the first two random prompts whose continuations test something.

    Returns:
      The tensors to store, and for each prompt the least difference of the two largest logits along its continuation.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (CANDIDATES, PROMPT), generator=generator)
    greedy, margins = continue_greedily(model, tokens)
    varied = torch.tensor([len(set(row.tolist())) >= FEWEST_DISTINCT for row in greedy])
    chosen = torch.nonzero(varied & (margins >= SMALLEST_MARGIN)).flatten()[:2]
    if len(chosen) < 2:
        raise RuntimeError(
            f"{len(chosen)} of {CANDIDATES} prompts have a continuation of {FEWEST_DISTINCT} distinct tokens "
            f"and no margin below {SMALLEST_MARGIN}, and two are needed: raise CANDIDATES"
        )
    tokens = tokens[chosen]
    greedy, margins = continue_greedily(model, tokens)
    logits = model(tokens, use_cache=False).logits
    return {"tokens": tokens.int(), "logits": logits, "greedy": greedy.int()}, margins


def continue_greedily(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens after the first `CONTEXT`, with a cache, and their least margins by the forward without one."""
    context = tokens[:, :CONTEXT]
    whole = model.generate(
        context,
        attention_mask=torch.ones_like(context),
        max_new_tokens=CONTINUATION,
        do_sample=False,
        use_cache=True,
    )
    greedy = whole[:, CONTEXT:].contiguous()
    top = model(whole, use_cache=False).logits[:, CONTEXT - 1 : -1].topk(2)
    margins = (top.values[..., 0] - top.values[..., 1]).amin(-1)
    decided = margins >= SMALLEST_MARGIN
    if not torch.equal(top.indices[..., 0][decided], greedy[decided]):
        raise RuntimeError("greedy tokens with and without the cache differ where no two logits are close")
    return greedy, margins


def save_model(model: torch.nn.Module, directory: pathlib.Path) -> None:
    """Only the two files that jaxspec reads."""
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(pathlib.Path(saved, name), directory / name)


def older_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The same `config.json` as transformers 4 wrote it: RoPE in `rope_theta` and `rope_scaling`, and `torch_dtype`."""
    older = {key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype")}
    scaling = dict(raw["rope_parameters"])
    older["rope_theta"] = scaling.pop("rope_theta")
    older["rope_scaling"] = scaling
    older["torch_dtype"] = raw["dtype"]
    older["transformers_version"] = "4.45.0"
    return dict(sorted(older.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; all when none is given")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(CASES):
        parser.error(f"no fixture is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    for name in arguments.names or CASES:
        directory = arguments.output / name
        directory.mkdir(parents=True, exist_ok=True)
        model = make_model(*CASES[name])
        save_model(model, directory)
        reference, margins = compute_reference(model)
        (directory / "reference.safetensors").write_bytes(save(reference))
        if name == "llama3":
            raw = json.loads((directory / "config.json").read_text())
            (directory / "config.old.json").write_text(json.dumps(older_config(raw), indent=2) + "\n")
        size = (directory / "model.safetensors").stat().st_size
        print(f"{name:12}{size:8} bytes   smallest margins {margins[0]:.3f}, {margins[1]:.3f}")


if __name__ == "__main__":
    main()
