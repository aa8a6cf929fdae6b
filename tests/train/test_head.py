"""New heads, and heads from arrays back to files."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from models_on_mesh import ONE, PAIR, PAIR_TARGET, load
from safetensors.numpy import load_file
from test_eagle3_head import FIXTURES, fitted, target_of

from jaxspec.checkpoint.eagle3_files import open_head
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import eagle3_tensor_shapes
from jaxspec.drafts.eagle3_head import pack_head, unpack_head
from jaxspec.errors import UserError
from jaxspec.models.decoder import DecoderLayout
from jaxspec.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from jaxspec.train.config import HeadConfig
from jaxspec.train.head import export_head, head_config, initial_tensors, most_frequent, trained_head

TARGET = load(PAIR_TARGET)[0]


def read_target(name):
    return load(PAIR_TARGET)[1][name]


def layout_of(target):
    return DecoderLayout(target, ONE, (), np.dtype("float32"))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    jax.tree.map(np.testing.assert_array_equal, dict(found), dict(wanted))


@pytest.mark.parametrize("case", sorted(path.name for path in FIXTURES.iterdir()))
def test_unpacking_is_the_inverse_of_packing(case):
    drafter = fitted(case)
    layout = layout_of(target_of(drafter))
    tensors = drafter.files.read(list(eagle3_tensor_shapes(drafter.config)))
    assert_same(unpack_head(drafter.config, layout, pack_head(drafter.config, layout, tensors)), tensors)


def test_biases_come_back_too():
    config = fitted("plain").config
    config = dataclasses.replace(
        config, layer=dataclasses.replace(config.layer, qkv_bias=True, output_bias=True, mlp_bias=True), fc_bias=True
    )
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape) for name, shape in eagle3_tensor_shapes(config).items()}
    tensors["d2t"] = np.zeros(config.draft_vocab_size, np.int64)
    layout = layout_of(target_of(fitted("plain")))
    assert_same(unpack_head(config, layout, pack_head(config, layout, tensors)), tensors)


@pytest.mark.parametrize(
    "wanted",
    [
        HeadConfig(taps=(1, 2, 4), draft_vocab_size=100),
        HeadConfig(taps=(2, 3), intermediate_size=48, norm_before_fc=True, norm_output=True),
        HeadConfig(taps=(1,), num_layers=2, fc_norm=True, norm_before_residual=True, rope_theta=500.0),
    ],
    ids=["reduced", "borrowed head", "two layers"],
)
def test_what_is_exported_is_read_back_as_it_was(tmp_path, wanted):
    config = head_config(wanted, TARGET)
    ids = np.arange(0, 2 * config.draft_vocab_size, 2) if wanted.draft_vocab_size else np.arange(TARGET.vocab_size)
    tensors = initial_tensors(config, TARGET, read_target, ids, seed=1)
    export_head(tmp_path / "head", config, TARGET, tensors)
    opened = Eagle3.open(tmp_path / "head").fit(TARGET)
    assert opened.config == config
    rounded = {name: tensor if name == "d2t" else tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    assert_same(opened.files.read(list(tensors)), rounded)
    again, to_go_on_from = trained_head(tmp_path / "head", TARGET)
    assert again == config
    assert_same(to_go_on_from, {name: x.astype(tensors[name].dtype) for name, x in rounded.items()})
    with pytest.raises(UserError, match="exists"):
        export_head(tmp_path / "head", config, TARGET, tensors)


@pytest.mark.parametrize(("case", "says"), [("plain", "it has has_embedding=True"), ("qwen3", "qk_norm=True")])
def test_a_head_with_parts_that_are_not_trained_is_nothing_to_go_on_from(case, says):
    with pytest.raises(UserError, match=says):
        trained_head(FIXTURES / case, target_of(fitted(case)))


def test_files_have_the_names_that_other_engines_know(tmp_path):
    """Those of the reference implementation and SpecForge, as docs of the formats have them."""
    config = head_config(HeadConfig(taps=(1, 2, 4), draft_vocab_size=192), TARGET)
    ids = np.sort(np.random.default_rng(0).permutation(TARGET.vocab_size)[:192])
    export_head(tmp_path / "head", config, TARGET, initial_tensors(config, TARGET, read_target, ids, seed=0))
    stored = load_file(tmp_path / "head" / "model.safetensors")
    layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    attention, mlp = (
        (f"self_attn.{name}_proj" for name in "qkvo"),
        (f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
    names = {f"midlayer.{name}.weight" for name in (*layer, *attention, *mlp)}
    assert stored.keys() == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
    assert np.flatnonzero(stored["t2d"]).tolist() == (np.arange(192) + stored["d2t"]).tolist() == ids.tolist()
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (raw["draft_vocab_size"], raw["vocab_size"], raw["num_hidden_layers"]) == (192, 256, 1)
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    # Published without its embedding, the pair's head has the same shapes under speculators' names.
    theirs = {name: tensor.shape for name, tensor in load_file(PAIR / "head" / "model.safetensors").items()}
    assert theirs == {name.replace("midlayer", "layers.0"): tensor.shape for name, tensor in stored.items()}


def test_the_usual_taps_are_not_written_since_tools_count_them_differently(tmp_path):
    target = dataclasses.replace(TARGET, num_layers=12)
    config = head_config(HeadConfig(draft_vocab_size=10), target)
    assert config.taps == (2, 6, 9)
    export_head(tmp_path / "head", config, target, initial_tensors(config, target, read_target, np.arange(10), 0))
    assert "eagle_config" not in json.loads((tmp_path / "head" / "config.json").read_text())
    assert Eagle3.open(tmp_path / "head").fit(target).taps == (2, 6, 9)


def test_a_head_without_a_vocabulary_of_its_own_says_so(tmp_path):
    """SGLang borrows the target's output head where the size is null, and only there."""
    config = head_config(HeadConfig(taps=(1, 2, 4)), TARGET)
    export_head(tmp_path / "head", config, TARGET, initial_tensors(config, TARGET, read_target, np.arange(0), 0))
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert "draft_vocab_size" in raw and raw["draft_vocab_size"] is None
    assert not {"lm_head.weight", "d2t", "t2d"} & load_file(tmp_path / "head" / "model.safetensors").keys()
    read = Eagle3.open(tmp_path / "head").config
    assert (read.draft_vocab_size, read.has_head) == (TARGET.vocab_size, False)


def test_a_new_head_ends_as_its_target_does_and_depends_on_its_seed():
    config = head_config(HeadConfig(taps=(1, 2, 4), draft_vocab_size=5), TARGET)
    ids = np.array([3, 7, 8, 100, 255])
    first, again, other = (initial_tensors(config, TARGET, read_target, ids, seed) for seed in (0, 0, 1))
    assert first.keys() == eagle3_tensor_shapes(config).keys()
    assert_same(first, again)
    assert not np.array_equal(first["fc.weight"], other["fc.weight"])
    np.testing.assert_array_equal(first[HEAD], read_target(EMBEDDING)[ids].astype(np.float32))
    np.testing.assert_array_equal(first["norm.weight"], read_target(FINAL_NORM).astype(np.float32))
    assert (np.arange(5) + first["d2t"]).tolist() == ids.tolist()


def test_the_draft_vocabulary_are_the_most_frequent_tokens():
    assert most_frequent(np.array([5, 0, 9, 5, 5, 1]), 3).tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (HeadConfig(), r"usual taps \[2, 2, 1\]"),
        (HeadConfig(taps=()), "can't be published"),
        (HeadConfig(taps=(0, 2)), "can't be published"),
        (HeadConfig(taps=(3, 4)), "can't be published"),
        (HeadConfig(taps=(2, 1)), "ascending"),
        (HeadConfig(taps=(2, 5)), "tap 5"),
        (HeadConfig(taps=(2,), draft_vocab_size=257), "draft_vocab_size=257"),
    ],
)
def test_heads_that_fit_no_target_are_refused(wanted, says):
    with pytest.raises(UserError, match=says):
        head_config(wanted, TARGET)


def test_the_pair_survives_the_way_out_and_in(tmp_path):
    """A trained head with all that it needs to draft, from other tools' files to ours."""
    config = Eagle3.open(PAIR / "head").fit(TARGET).config
    tensors = open_head(PAIR / "head").read(list(eagle3_tensor_shapes(config)))
    export_head(tmp_path / "head", config, TARGET, tensors)
    opened = Eagle3.open(tmp_path / "head").fit(TARGET)
    assert opened.config == config
    assert_same(opened.files.read(list(tensors)), tensors)
