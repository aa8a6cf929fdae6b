"""The tokenizer inside a GGUF file, as `tokenizer.json` and `tokenizer_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.errors import UserError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
# What llama.cpp does when a file names no pre-tokenizer: one split after the other.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^\~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` of a byte-level BPE tokenizer.

    Args:
      path: the file, for errors.
      metadata: its keys and values.

    Raises:
      UserError: the tokenizer is missing, damaged, or of a kind that is not read.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise UserError(
            f"tokenizer.ggml.model={model!r} in {path} is not supported: jaxspec reads 'gpt2' (byte-level BPE); "
            "convert the Hugging Face directory instead"
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
        is_llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=is_llama3)  # type: ignore[arg-type]
        )
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _pre_tokenizer(path, pre)
        tokenizer.decoder = decoders.ByteLevel()
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [
                AddedToken(token, special=special, normalized=False)
                for token, k in zip(tokens, types, strict=True)
                if k == kind
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "unknown", "padding")}
        named = {kind: None if i is None else tokens[i] for kind, i in ids.items()}
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for a merge outside the vocabulary
        raise UserError(f"the tokenizer in {path} is damaged ({error!r}): fetch the file again") from error
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", is_llama3)) and named["bos"] is not None
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{named['bos']} $A", special_tokens=[(named["bos"], ids["bos"])]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["padding"],
        "clean_up_tokenization_spaces": False,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=2)}


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _pre_tokenizer(path: Path, pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges; every kind ends in bytes."""
    first: list[pre_tokenizers.PreTokenizer]
    match pre:
        case "smollm":
            first = [pre_tokenizers.Digits(individual_digits=True)]
        case "gpt-2" | "gpt2":
            first = []
        case "qwen2":
            first = [pre_tokenizers.Split(Regex(_QWEN2), "isolated")]
        case "llama-bpe" | "llama3" | "llama-v3":
            first = [pre_tokenizers.Split(Regex(_LLAMA3), "isolated")]
        case "default":
            first = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _DEFAULT]
        case _:
            raise UserError(
                f"tokenizer.ggml.pre={pre!r} in {path} is not supported: jaxspec reads smollm, gpt-2, qwen2, "
                "llama-bpe and default; convert the Hugging Face directory instead"
            )
    use_regex = pre in ("smollm", "gpt-2", "gpt2")
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])
