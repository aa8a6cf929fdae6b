import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.convert import convert, open_source
from jaxspec.checkpoint.eagle3_files import open_eagle3, open_head
from jaxspec.checkpoint.huggingface import open_huggingface
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.drafts.eagle3_config import Eagle3Config, check_vocabulary, eagle3_tensor_shapes, read_eagle3_config
from jaxspec.errors import UserError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"

# One layer, 8 wide, 2 query heads and 1 key head of 4; 6 of 20 tokens.
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,
}
REFERENCE = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 6}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 6,
    "transformer_layer_config": LAYER,
}
CONFIGS = {"reference": REFERENCE, "speculators": SPECULATORS}
DRAFTED = np.array([1, 2, 5, 7, 11, 19])


def weights(**shapes: tuple[int, ...] | None) -> dict[str, np.ndarray]:
    """Canonical tensors of that head, with others added, reshaped or (None) left out."""
    layer = {
        "input_layernorm.weight": (8,),
        "hidden_norm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (8, 16),
        "self_attn.k_proj.weight": (4, 16),
        "self_attn.v_proj.weight": (4, 16),
        "self_attn.o_proj.weight": (8, 8),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    wanted: dict[str, tuple[int, ...] | None] = {f"layers.0.{name}": shape for name, shape in layer.items()}
    wanted |= {"fc.weight": (8, 24), "norm.weight": (8,), "lm_head.weight": (6, 8)} | shapes
    random = np.random.default_rng(0)
    tensors = {name: random.random(shape, np.float32) for name, shape in wanted.items() if shape is not None}
    return tensors | {"d2t": DRAFTED - np.arange(6), "t2d": np.isin(np.arange(20), DRAFTED)}


def without(tensors: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if name not in names}


def published(tensors: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """By the reference's names."""
    return {prefix + name.replace("layers.0.", "midlayer."): array for name, array in tensors.items()}


@pytest.fixture
def make(tmp_path):
    """Writes the directory of a head; `changes` go to the top of its config."""

    def write(tensors: dict[str, np.ndarray], config: dict[str, Any] = REFERENCE, **changes: Any) -> Path:
        path = tmp_path / "head"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def config_of(path: Path) -> Eagle3Config:
    head = open_head(path)
    return read_eagle3_config(head.config, head.shapes)


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def check_same(read: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(read) == set(expected)
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


LAYOUTS = {
    "reference": (REFERENCE, published(weights())),
    "with_a_prefix": (REFERENCE, published(weights(), "model.")),
    "named_as_a_target": (REFERENCE | {"architectures": ["LlamaForCausalLM"]}, published(weights())),
    "specforge": (REFERENCE | {"eagle_config": {IDS: [1, 3, 4]}}, published(weights())),
    "speculators": (SPECULATORS, weights() | {"verifier_lm_head.weight": np.ones((20, 8), np.float32)}),
    "rope_buffers": (REFERENCE, weights() | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}),
}


@pytest.mark.parametrize(("config", "tensors"), LAYOUTS.values(), ids=LAYOUTS)
def test_all_layouts_open_as_the_same_tensors(make, config, tensors):
    head = open_head(make(tensors, config))
    assert head.shapes == eagle3_tensor_shapes(read_eagle3_config(head.config, head.shapes))
    check_same(head.read(head.shapes), without(weights(), "t2d"))


def test_the_plain_head_has_the_sizes_of_its_file(make):
    config = config_of(make(weights()))
    layer = config.layer
    assert (layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (8, 2, 1, 4)
    assert (layer.vocab_size, layer.norm_eps, layer.rope_theta) == (20, 1e-5, 10000.0)
    assert (config.target_hidden_size, config.draft_vocab_size, config.num_taps) == (8, 6, 3)
    assert config.has_fc and config.has_head and not config.has_embedding and not config.fc_bias
    assert not (layer.qkv_bias or layer.output_bias or layer.mlp_bias or layer.qk_norm)


def test_parts_listed_by_an_index_are_joined(make):
    path = make(weights())
    (path / "model.safetensors").unlink()
    names = list(weights())
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: weights()[name] for name in members}, path / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = open_head(path)
    check_same(head.read(head.shapes), without(weights(), "t2d"))


def test_parts_of_torch_are_joined(tmp_path):
    path = tmp_path / "head"
    shutil.copytree(FIXTURES / "reference_layout", path)
    (path / "pytorch_model.bin").rename(path / "part.bin")
    refused(lambda: open_head(path), "pytorch_model.bin", "fetch")
    names = load_file(FIXTURES / "specforge_layout" / "model.safetensors")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.bin")}))
    whole, joined = open_head(FIXTURES / "reference_layout"), open_head(path)
    check_same(joined.read(joined.shapes), whole.read(whole.shapes))


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NORMS = {
    "norm_before_fc": {"input_norm.weight": (24,)},
    "fc_norm": {f"fc_norm.{part}.weight": (8,) for part in range(3)},
}


@pytest.mark.parametrize(("layout", "default"), [("reference", False), ("speculators", True)])
def test_flags_that_are_missing_have_the_default_of_their_format(make, layout, default):
    config = config_of(make(weights(), CONFIGS[layout]))
    assert [getattr(config, flag) for flag in FLAGS] == [default, False, False, False]


@pytest.mark.parametrize("place", ["top", "eagle_config"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("layout", CONFIGS)
def test_each_flag_is_read(make, layout, flag, place):
    fields = dict.fromkeys(FLAGS, False) | {flag: True}
    changes = fields if place == "top" else {"eagle_config": fields}
    config = config_of(make(weights(**NORMS.get(flag, {})), CONFIGS[layout], **changes))
    assert [getattr(config, name) for name in FLAGS] == [name == flag for name in FLAGS]


def test_norms_whose_flag_is_missing_are_known_by_their_weights(make):
    config = config_of(make(weights(**NORMS["norm_before_fc"], **NORMS["fc_norm"])))
    assert config.norm_before_fc and config.fc_norm


def test_a_flag_and_its_weights_must_agree(make):
    refused(lambda: open_head(make(weights(**NORMS["fc_norm"]), fc_norm=False)), "fc_norm.0.weight", "and 2 more")
    refused(lambda: open_head(make(weights(), fc_norm=True)), "lacks", "fc_norm.0.weight", "[8]")
    refused(lambda: open_head(make(weights(), norm_output="false")), "norm_output='false'", "true or false")


def test_first_names_of_the_norms_before_fc_are_understood(make):
    tensors = weights(**NORMS["fc_norm"])
    names = ("low", "mid", "high")
    old = {f"aux_norm_{name}.weight": tensors.pop(f"fc_norm.{part}.weight") for part, name in enumerate(names)}
    head = open_head(make(tensors | old, use_aux_norm=True))
    assert read_eagle3_config(head.config, head.shapes).fc_norm
    for part, name in enumerate(names):
        renamed = f"fc_norm.{part}.weight"
        np.testing.assert_array_equal(head.read([renamed])[renamed], old[f"aux_norm_{name}.weight"])


@pytest.mark.parametrize("place", ["top", "eagle_config"])
@pytest.mark.parametrize(
    ("layout", "listed", "taps"),
    [
        ("reference", None, None),
        ("reference", [], None),
        ("reference", [1, 15, 28], (2, 16, 29)),
        ("reference", [2, 16, 29], (2, 16, 29)),
        ("reference", [3, 16, 29], (4, 17, 30)),
        ("reference", [0, 5, 9], (1, 6, 10)),
        ("reference", [28, 1, 15], (2, 16, 29)),
        ("speculators", None, None),
        ("speculators", [1, 15, 28], (1, 15, 28)),
        ("speculators", [2, 16, 29], (2, 16, 29)),
        ("speculators", [0, 9, 3, 9], (0, 3, 9)),
    ],
)
def test_layer_lists_become_numbers_of_layers_before_the_tap(make, layout, listed, taps, place):
    changes = {IDS: listed} if place == "top" else {"eagle_config": {IDS: listed}}
    config = config_of(make(weights(), CONFIGS[layout], **changes))
    assert (config.taps, config.num_taps) == (taps, 3)


def test_other_numbers_of_taps_are_those_of_fc(make):
    config = config_of(make(weights(**{"fc.weight": (8, 40)}), **{IDS: [1, 3, 5, 7, 9]}))
    assert (config.taps, config.num_taps) == ((2, 4, 6, 8, 10), 5)


def test_taps_and_fc_must_agree(make):
    refused(lambda: open_head(make(weights(), **{IDS: [1, 2]})), "fc.weight", "[8, 24]", "3 taps", "names 2", IDS)
    # Which five are meant can still be said by the user.
    assert config_of(make(weights(**{"fc.weight": (8, 40)}))).num_taps == 5
    refused(lambda: open_head(make(weights(**{"fc.weight": (8, 20)}))), "fc.weight", "multiple", "target_hidden_size")
    refused(lambda: open_head(make(weights(**{"fc.weight": None}))), "lacks", "fc.weight", "3 taps")
    for bad in ("2, 3", [1, "2"], [-1, 2, 3], [True, 2, 3]):
        refused(lambda bad=bad: open_head(make(weights(), **{IDS: bad})), IDS, repr(bad), "layer numbers")


def test_a_window_that_is_switched_off_is_none(make):
    assert config_of(make(weights(), sliding_window=131072, use_sliding_window=False)).layer.family == "llama"
    refused(lambda: open_head(make(weights(), sliding_window=131072)), "of the head", "sliding_window=131072")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eagle_config": "abc"}, "eagle_config='abc'"),
        ({"eagle_config": [1]}, "eagle_config=[1]"),
        ({"layer_types": {"a": 1}}, "layer_types="),
        ({"rope_parameters": [1]}, "rope_parameters=[1]"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"quantization_config": "fp8"}, "quant_method='fp8'"),
        ({"model_type": "mistral"}, "of the head: model_type='mistral'"),
    ],
    ids=str,
)
def test_a_config_of_the_wrong_kind_is_refused_by_name(make, changes, says):
    refused(lambda: open_head(make(weights(), **changes)), says)


@pytest.mark.parametrize(("fc", "has_fc"), [(None, False), ((8, 8), True)])
def test_a_head_may_read_the_final_hidden_state(make, fc, has_fc):
    path = make(weights(**{"fc.weight": fc}), eagle_config={"use_aux_hidden_state": False, IDS: [1, 2, 3]})
    config = config_of(path)
    assert (config.taps, config.num_taps, config.has_fc) == ((), 1, has_fc)
    path = make(weights(), eagle_config={"use_aux_hidden_state": False})
    refused(lambda: open_head(path), "fc.weight", "3 taps", "final hidden state")


def test_the_target_may_have_another_width_if_the_head_embeds_by_itself(make):
    config = config_of(make(weights(**{"fc.weight": (8, 30), "embed_tokens.weight": (20, 8)}), target_hidden_size=10))
    assert (config.target_hidden_size, config.layer.hidden_size, config.num_taps) == (10, 8, 3)
    assert config.has_embedding
    path = make(weights(**{"fc.weight": (8, 30)}), target_hidden_size=10)
    refused(lambda: open_head(path), "8 wide", "10", "'embed_tokens.weight'")
    tensors = weights(**{"fc.weight": (8, 30), "embed_tokens.weight": (20, 8), "lm_head.weight": None})
    path = make(without(tensors, "d2t", "t2d"), target_hidden_size=10, draft_vocab_size=None)
    refused(lambda: open_head(path), "8 wide", "10", "'lm_head.weight'")


def test_biases_and_qk_norm_are_there_if_their_weights_are(make):
    biases = {"self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.v_proj": 4, "self_attn.o_proj": 8}
    biases |= {"mlp.gate_proj": 12, "mlp.up_proj": 12, "mlp.down_proj": 8}
    extra: dict[str, tuple[int, ...]] = {f"layers.0.{name}.bias": (size,) for name, size in biases.items()}
    extra |= {f"layers.0.self_attn.{name}_norm.weight": (4,) for name in "qk"} | {"fc.bias": (8,)}
    config = config_of(make(weights(**extra), REFERENCE))
    assert config.layer.qkv_bias and config.layer.output_bias and config.layer.mlp_bias
    assert config.layer.qk_norm and config.fc_bias
    layer = LAYER | {"model_type": "qwen3", "attention_bias": True}
    config = config_of(make(weights(), SPECULATORS, transformer_layer_config=layer))
    assert not config.layer.qkv_bias and not config.layer.qk_norm and config.layer.family == "qwen3"


def test_a_config_without_model_type_is_that_of_a_llama_layer(make):
    config = {key: value for key, value in REFERENCE.items() if key != "model_type"}
    assert config_of(make(weights(), config)).layer.family == "llama"


@pytest.mark.parametrize("spelled", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_the_rope_base_is_the_heads_own(make, spelled):
    assert config_of(make(weights(), **spelled)).layer.rope_theta == 5e5


def test_tied_embeddings_of_the_config_do_not_replace_a_stored_head(make):
    head = open_head(make(weights(), tie_word_embeddings=True))
    assert not read_eagle3_config(head.config, head.shapes).layer.tie_embeddings
    np.testing.assert_array_equal(head.read(["lm_head.weight"])["lm_head.weight"], weights()["lm_head.weight"])


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_later_layers_are_ordinary_ones_under_either_name_of_their_norm(make, norm):
    first = weights()
    later = {}
    for name, array in first.items():
        if name.startswith("layers.0.") and "norm" not in name:
            columns = 12 if "down_proj" in name else 8
            later[name.replace("layers.0.", "layers.1.")] = np.ascontiguousarray(array[:, :columns])
    later |= {f"layers.1.{name}.weight": np.full(8, 2, np.float32) for name in (norm, "post_attention_layernorm")}
    head = open_head(make(first | later, num_hidden_layers=2))
    assert head.shapes["layers.1.self_attn.q_proj.weight"] == (8, 8)
    assert head.shapes["layers.1.input_layernorm.weight"] == (8,)
    assert "layers.1.hidden_norm.weight" not in head.shapes
    config = read_eagle3_config(head.config, head.shapes)
    assert config.layer.num_layers == 2 and eagle3_tensor_shapes(config) == head.shapes


FULL = {"lm_head.weight": (20, 8)}


def test_a_head_of_the_whole_vocabulary_needs_no_map_and_drops_an_empty_one(make):
    for size in (None, 20):
        config = config_of(make(without(weights(**FULL), "d2t", "t2d"), draft_vocab_size=size))
        assert config.draft_vocab_size == 20 and config.has_head
    maps = {"d2t": np.zeros(20, np.int64), "t2d": np.ones(20, bool)}
    assert "d2t" not in open_head(make(weights(**FULL) | maps, draft_vocab_size=20)).shapes


def test_a_head_of_the_whole_vocabulary_may_take_the_targets_output_head(make):
    tensors = without(weights(), "d2t", "t2d", "lm_head.weight")
    config = config_of(make(tensors, draft_vocab_size=None))
    assert config.draft_vocab_size == 20 and not config.has_head
    refused(lambda: open_head(make(without(weights(), "lm_head.weight"))), "lacks", "lm_head.weight", "[6, 8]")


def test_a_reduced_vocabulary_without_its_map_is_refused(make):
    refused(lambda: open_head(make(without(weights(), "d2t"))), "6 of 20", "'d2t'", "acceptance would collapse")
    refused(lambda: open_head(make(weights(), draft_vocab_size=21)), "draft_vocab_size=21", "vocab_size=20")
    refused(lambda: open_head(make(weights(), draft_vocab_size=5)), "'d2t'", "[6]", "[5]")
    refused(lambda: open_head(make(weights(), draft_vocab_size=-1)), "draft_vocab_size=-1", "positive")


def test_maps_that_contradict_are_refused(make):
    def maps(*targets: int) -> dict[str, np.ndarray]:
        return weights() | {"d2t": np.array(targets) - np.arange(6)}

    refused(lambda: open_head(make(maps(1, 2, 5, 7, 11, 20))), "'d2t'", "token 5 to 20", "20 tokens")
    refused(lambda: open_head(make(maps(-1, 2, 5, 7, 11, 19))), "'d2t'", "token 0 to -1")
    refused(lambda: open_head(make(maps(1, 2, 5, 5, 11, 19))), "'d2t'", "2 and 3 to 5 and 5", "ascend")
    refused(lambda: open_head(make(maps(1, 2, 5, 8, 11, 19))), "'t2d'", "'d2t'")
    refused(lambda: check_vocabulary(np.array([1, 1]), np.array([True, True, True]), 3), "'t2d'", "3 target tokens")
    check_vocabulary(np.array([1, 1]), None, 3)


def test_a_narrow_map_is_widened_and_other_types_are_refused(make):
    narrow = weights() | {"d2t": weights()["d2t"].astype(np.int32)}
    assert open_head(make(narrow)).read(["d2t"])["d2t"].dtype == np.int64
    wrong = make(weights() | {"d2t": weights()["d2t"].astype(np.float32)})
    refused(lambda: open_head(wrong), "'d2t'", "float32", "integers")
    wrong = open_head(make(weights() | {"fc.weight": np.ones((8, 24), np.int64)}))
    refused(lambda: wrong.read(["fc.weight"]), "'fc.weight'", "int64", "bfloat16")


def test_what_jaxspec_does_not_compute_is_named(make):
    latent = {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (8, 16)}
    refused(lambda: open_head(make(weights(**latent))), "kv_a_proj_with_mqa", "latent attention")
    refused(lambda: open_head(make(weights(), sliding_window=64)), "sliding_window=64")
    refused(lambda: open_head(make(weights(), layer_types=["sliding_attention"])), "'sliding_attention'")
    refused(lambda: open_head(make(weights(), model_type="kimi_k2")), "model_type='kimi_k2'", "llama")
    refused(lambda: open_head(make(weights(), quantization_config={"quant_method": "fp8"})), "quantised", "'fp8'")
    refused(lambda: open_head(make(weights(mask_hidden=(1, 24)))), "'mask_hidden'", "[1, 24]", "does not ask for")
    refused(lambda: open_head(make(weights(), SPECULATORS, transformer_layer_config=None)), "transformer_layer_config")


def test_wrong_shapes_are_named_with_both(make):
    narrow = {"layers.0.self_attn.q_proj.weight": (8, 8)}
    refused(lambda: open_head(make(weights(**narrow))), "layers.0.self_attn.q_proj.weight", "[8, 8]", "[8, 16]")
    refused(lambda: open_head(make(weights(**{"fc.weight": (9, 24)}))), "'fc.weight'", "[9, 24]", "[8, 24]")


def test_a_name_that_is_there_twice_is_refused(make):
    twice = weights() | {"model.norm.weight": np.ones(8, np.float32)}
    refused(lambda: open_head(make(twice)), "'norm.weight'", "'model.norm.weight'", "twice")


def test_values_that_are_not_finite_and_unknown_names_are_refused_on_reading(make):
    bad = weights()
    bad["norm.weight"][3] = np.nan
    head = open_head(make(bad))
    assert list(head.read(["fc.weight", "d2t"])) == ["fc.weight", "d2t"]
    refused(lambda: head.read(["norm.weight"]), "'norm.weight'", "NaN")
    refused(lambda: head.read(["embed_tokens.weight"]), "embed_tokens.weight")


def test_missing_files_are_named(make, tmp_path):
    refused(lambda: open_head(tmp_path / "none"), "none", "config.json")
    path = make(weights())
    (path / "model.safetensors").unlink()
    refused(lambda: open_head(path), str(path), "neither model.safetensors nor pytorch_model.bin")


@pytest.fixture
def target(tmp_path, gguf) -> Path:
    """A target model as a Hugging Face directory."""
    source = open_source(gguf)
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(source.config))
    for name, content in source.tokenizer_files.items():
        (path / name).write_text(content)
    save_file({name: source.read(name) for name in source.names}, path / "model.safetensors")
    return path


def test_targets_and_heads_are_told_apart(make, target, tmp_path):
    named_as_a_target = LAYOUTS["named_as_a_target"]
    for config, tensors in (LAYOUTS["reference"], named_as_a_target, LAYOUTS["speculators"]):
        path = make(tensors, config)
        refused(lambda path=path: open_huggingface(path), "EAGLE-3 head", "draft")
    refused(lambda: open_eagle3(target), str(target), "no EAGLE-3 head", "target model")
    refused(lambda: open_huggingface(make(weights(), speculators_model_type="dflash")), "'dflash'", "eagle3")

    head = convert(make(*named_as_a_target[::-1]), tmp_path / "head.out", show_progress=False)
    model = convert(target, tmp_path / "target.out", show_progress=False)
    assert head.is_draft and not model.is_draft
    assert Checkpoint.open(head.path, is_draft=True) == head and Checkpoint.open(model.path, is_draft=False) == model
    refused(lambda: Checkpoint.open(head.path, is_draft=False), str(head.path), "EAGLE-3 head")
    refused(lambda: open_head(model.path), str(model.path), "target model")
    refused(lambda: Checkpoint.open(tmp_path / "head"), "jaxspec convert")


@pytest.mark.parametrize("case", sorted(path.name for path in FIXTURES.iterdir()))
def test_real_heads_open_and_stay_the_same_through_a_conversion(tmp_path, case):
    head = open_head(FIXTURES / case)
    checkpoint = convert(FIXTURES / case, tmp_path / "out", show_progress=False)
    assert open_head(tmp_path / "out") == checkpoint and checkpoint.is_draft
    assert checkpoint.config == json.loads((FIXTURES / case / "config.json").read_text())
    config = read_eagle3_config(head.config, head.shapes)
    assert read_eagle3_config(checkpoint.config, checkpoint.shapes) == config
    assert checkpoint.shapes == head.shapes == eagle3_tensor_shapes(config)
    check_same(checkpoint.read(head.shapes), head.read(head.shapes))
    stored = sorted(path.name for path in (tmp_path / "out" / "params").iterdir() if path.name != "embed")
    assert stored == ["head", *(f"layer_{layer:03d}" for layer in range(config.layer.num_layers))]


def test_real_heads_have_the_switches_of_their_names():
    configs = {path.name: config_of(path) for path in FIXTURES.iterdir()}
    assert configs["plain"].taps == (2, 4, 5)
    assert configs["before_residual"].norm_before_residual and not configs["plain"].norm_before_residual
    assert configs["before_fc"].norm_before_fc and configs["before_fc"].norm_output and configs["fc_norm"].fc_norm
    assert configs["full_vocab"].draft_vocab_size == configs["full_vocab"].layer.vocab_size
    assert configs["two_layers"].layer.num_layers == 2
    assert configs["qwen3"].layer.qk_norm and configs["qwen3"].layer.rope_theta == 1e6


@pytest.mark.parametrize(("layout", "taps"), [("reference_layout", None), ("specforge_layout", (2, 4, 5))])
def test_one_head_in_all_layouts_has_the_same_tensors(layout, taps):
    plain, other = open_head(FIXTURES / "plain"), open_head(FIXTURES / layout)
    names = [name for name in plain.shapes if name != "embed_tokens.weight"]
    assert set(other.shapes) == set(names)
    for name in names:
        expected = plain.read([name])[name].astype(np.float64)
        np.testing.assert_array_equal(other.read([name])[name].astype(np.float64), expected)
    assert config_of(FIXTURES / layout).taps == taps
