import math
import struct

import ml_dtypes
import numpy as np
import pytest
from gguf_writer import (
    TYPES,
    model_metadata,
    model_tensors,
    plain,
    tokenizer_metadata,
    write_gguf,
    write_model,
)
from tokenizers import Tokenizer

from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.gguf_file import GGUFFile
from jaxspec.errors import UserError
from jaxspec.models.registry import read_config
from jaxspec.models.tensors import tensor_shapes


def message(raised: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


def draw_blocks(kind: str, count: int) -> tuple[bytes, list[float]]:
    """Random blocks, and their elements by the definition of the type, one at a time."""
    random = np.random.default_rng(TYPES[kind])
    raw, elements = b"", []
    for _ in range(count):
        d, m = random.standard_normal(2).astype(np.float16)
        packed = random.integers(0, 256, 16, dtype=np.uint8)
        nibbles = [int(b) & 15 for b in packed] + [int(b) >> 4 for b in packed]
        signed = random.integers(-128, 128, 32, dtype=np.int8)
        match kind:
            case "Q4_0":
                raw += d.tobytes() + packed.tobytes()
                elements += [np.float32(d) * np.float32(q - 8) for q in nibbles]
            case "Q4_1":
                raw += d.tobytes() + m.tobytes() + packed.tobytes()
                elements += [np.float32(d) * np.float32(q) + np.float32(m) for q in nibbles]
            case "Q8_0":
                raw += d.tobytes() + signed.tobytes()
                elements += [np.float32(d) * np.float32(q) for q in signed]
    return raw, elements


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_tensors_are_read_by_the_definition_of_their_type(tmp_path, kind):
    raw, elements = draw_blocks(kind, 6)
    file = GGUFFile.open(write_gguf(tmp_path / "a", {}, {"x": (kind, (3, 64), raw)}))
    np.testing.assert_array_equal(file.read("x"), np.array(elements, np.float32).reshape(3, 64))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("version", [2, 3])
def test_plain_tensors_keep_their_type_and_bits(tmp_path, kind, dtype, version):
    array = np.random.default_rng(0).standard_normal((5, 7)).astype(dtype)
    path = write_gguf(tmp_path / "a", {}, {"one": plain(array, kind), "two": plain(array.T, kind)}, version)
    file = GGUFFile.open(path)
    assert file.read("one").dtype == dtype
    np.testing.assert_array_equal(file.read("one"), array)
    np.testing.assert_array_equal(file.read("two"), array.T)


def test_metadata_of_every_kind_is_read(tmp_path):
    metadata = {"a": 3, "b": 0.5, "c": True, "d": "text é", "e": [1, 2], "f": ["x", "yz"], "g": [[1], [2, 3]]}
    assert GGUFFile.open(write_gguf(tmp_path / "a", metadata, {})).metadata == metadata


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path, kind):
    path = write_gguf(tmp_path / "a", {}, {"blk.0.attn_q.weight": (kind, (1, 256), bytes(256))})
    with pytest.raises(UserError) as raised:
        GGUFFile.open(path)
    assert "'blk.0.attn_q.weight'" in message(raised) and kind in message(raised)


def test_every_cut_of_a_file_is_a_user_error(tmp_path):
    whole = write_model(tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for size in [0, 3, 10, 24, 100, *range(200, len(whole), len(whole) // 60), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError) as raised:
            open_gguf(cut)
        assert str(cut) in message(raised)


@pytest.mark.parametrize(
    ("start", "said"), [(b"PK\3\4" + bytes(40), "not a GGUF"), (b"GGUF" + struct.pack(">I", 3) + bytes(40), "version")]
)
def test_a_file_of_another_kind_is_refused(tmp_path, start, said):
    (tmp_path / "a").write_bytes(start)
    with pytest.raises(UserError) as raised:
        GGUFFile.open(tmp_path / "a")
    assert said in message(raised)


CASES = {
    "llama": ("llama", {}),
    "llama_untied": ("llama", {"untied": True}),
    "llama_bfloat16": ("llama", {"kind": "BF16"}),
    "qwen2": ("qwen2", {"bias": True}),
    "qwen3": ("qwen3", {"qk_norm": True, "untied": True}),
}


@pytest.mark.parametrize(("architecture", "options"), CASES.values(), ids=CASES)
def test_models_come_out_canonical(tmp_path, architecture, options):
    """Names and shapes are those of the config; only llama files have query and key rows to put back."""
    tensors = model_tensors(**options)
    source = open_gguf(write_model(tmp_path / "a", architecture, tensors))
    assert source.shapes == tensor_shapes(read_config(source.config))
    assert source.config["tie_word_embeddings"] == ("untied" not in options)
    names = {"attn_q.": "self_attn.q_proj.", "attn_k.": "self_attn.k_proj.", "ffn_down.": "mlp.down_proj."}
    for stored, array in tensors.items():
        for short, long in names.items():
            if short in stored:
                name = stored.replace("blk", "model.layers").replace(short, long)
                np.testing.assert_array_equal(source.read(name), array)


def test_query_and_key_biases_of_llama_files_are_put_back_too(tmp_path):
    tensors = model_tensors(bias=True)
    source = open_gguf(write_model(tmp_path / "a", "llama", tensors))
    assert source.config["attention_bias"]
    for short in "qkv":
        name = f"model.layers.1.self_attn.{short}_proj.bias"
        np.testing.assert_array_equal(source.read(name), tensors[f"blk.1.attn_{short}.bias"])


def test_config_says_what_the_metadata_says(tmp_path):
    config = open_gguf(write_model(tmp_path / "a")).config
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 500000.0
    assert (config["head_dim"], config["vocab_size"]) == (16, 260)
    assert (config["bos_token_id"], config["eos_token_id"]) == (258, 259)
    assert "rope_scaling" not in config


def with_rope(tmp_path, factors=None, **changes):
    tensors = {name: plain(array) for name, array in model_tensors().items()}
    if factors is not None:
        tensors["rope_freqs.weight"] = plain(np.array(factors, np.float32))
    return open_gguf(write_gguf(tmp_path / "a", model_metadata(**changes), tensors))


def test_linear_rope_scaling_is_kept(tmp_path):
    source = with_rope(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    scaling = read_config(source.config).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_llama3_rope_scaling_is_recognised_from_its_divisors(tmp_path):
    factors = []
    for i in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 16)
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        factors.append(1 / ((1 - smooth) / 32 + smooth))
    scaling = read_config(with_rope(tmp_path, factors).config).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("llama3", 32.0, 8192)
    assert "rope_freqs.weight" not in with_rope(tmp_path, factors).names


def test_other_rope_divisors_are_refused(tmp_path):
    with pytest.raises(UserError) as raised:
        with_rope(tmp_path, [1, 2, 3, 4, 5, 6, 7, 8])
    assert "rope_freqs.weight" in message(raised)


REFUSED = {
    "architecture": ({"general.architecture": "gemma3"}, {}, "'gemma3'"),
    "part": ({"split.count": 3}, {}, "one of 3 parts"),
    "varying_heads": ({"llama.attention.head_count": [4, 2]}, {}, "attention.head_count"),
    "no_heads": ({"llama.attention.head_count": 0}, {}, "attention.head_count=0"),
    "experts": ({}, {"blk.0.ffn_gate_inp.weight": plain(np.ones((4, 64)))}, "'blk.0.ffn_gate_inp.weight'"),
    "tokenizer_model": (tokenizer_metadata(model="llama"), {}, "tokenizer.ggml.model='llama'"),
    "tokenizer_pre": (tokenizer_metadata(pre="tekken"), {}, "tokenizer.ggml.pre='tekken'"),
    "merges": (tokenizer_metadata(merges=["h e", "zz y"]), {}, "tokenizer"),
}


@pytest.mark.parametrize(("metadata", "tensors", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_named(tmp_path, metadata, tensors, said):
    whole = {name: plain(array) for name, array in model_tensors().items()}
    path = write_gguf(tmp_path / "a", model_metadata() | metadata, whole | tensors)
    with pytest.raises(UserError) as raised:
        open_gguf(path)
    assert said in message(raised)


PIECES = {
    "smollm": ("a12 b", ["a", "1", "2", "Ġb"]),
    "gpt-2": ("a12 b", ["a", "12", "Ġb"]),
    "qwen2": ("a12 b", ["a", "1", "2", "Ġb"]),
    "llama-bpe": ("a1234 b", ["a", "123", "4", "Ġb"]),
    "default": ("a1234 b.", ["a", "123", "4", "Ġb", "."]),
}


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path, pre):
    text, pieces = PIECES[pre]
    tensors = {name: plain(array) for name, array in model_tensors().items()}
    source = open_gguf(write_gguf(tmp_path / "a", model_metadata() | tokenizer_metadata(pre), tensors))
    tokenizer = Tokenizer.from_str(source.tokenizer_files["tokenizer.json"])
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_smollm2_has_the_known_config(smollm2):
    known = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    known |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192}
    known |= {"rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "attention_bias": False}
    known |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "model_type": "llama"}
    assert {key: smollm2.config[key] for key in known} == known
