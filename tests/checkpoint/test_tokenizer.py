import json
import random
from pathlib import Path

import pytest
import tokenizers
from gguf_writer import model_metadata, model_tensors, plain, tokenizer_metadata, write_gguf

from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.errors import UserError
from jaxspec.tokenizer import StreamDecoder, Tokenizer

BOS, EOS = 258, 259
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def make(tmp_path):
    """A loaded tokenizer of 256 bytes and two merges; `settings` change its tokenizer_config.json."""

    def load(config: dict | None = None, add_bos: bool = False, **settings) -> Tokenizer:
        tensors = {name: plain(array) for name, array in model_tensors().items()}
        metadata = model_metadata() | tokenizer_metadata(add_bos_token=add_bos)
        source = open_gguf(write_gguf(tmp_path / "gguf", metadata, tensors))
        files = dict(source.tokenizer_files)
        old = json.loads(files["tokenizer_config.json"])
        merged = {key: value for key, value in (old | settings).items() if value != "remove"}
        files["tokenizer_config.json"] = json.dumps(merged)
        files["config.json"] = json.dumps(source.config | (config or {}))
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        return Tokenizer.load(tmp_path)

    return load


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2) -> Tokenizer:
    return Tokenizer.load(smollm2.path)


def test_smollm2_texts_are_tokenised_as_recorded(smollm2_tokenizer, fixture):
    assert len(fixture["tokenization"]) == 17
    for case in fixture["tokenization"]:
        assert smollm2_tokenizer.encode(case["text"]) == case["ids"]
        assert smollm2_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_smollm2_prompts_are_rendered_as_recorded(smollm2_tokenizer, fixture):
    for case in fixture["greedy"]:
        assert smollm2_tokenizer.apply_chat_template([{"role": "user", "content": case["user"]}]) == case["prompt"]
        assert smollm2_tokenizer.encode_chat(case["user"]) == case["prompt_ids"]


def test_smollm2_stops_at_its_end_token(smollm2_tokenizer):
    assert smollm2_tokenizer.eos_token_ids == (2,)
    assert smollm2_tokenizer.vocab_size == 49152


def test_smollm2_answers_stream_whole(smollm2_tokenizer, fixture):
    for case in fixture["greedy"]:
        stream = StreamDecoder(smollm2_tokenizer)
        pieces = [stream.add(token) for token in case["new_ids"]] + [stream.flush()]
        assert "".join(pieces) == smollm2_tokenizer.decode(case["new_ids"])


def test_streamed_text_never_breaks_a_character(smollm2_tokenizer):
    text = "naïve 漢字 👩‍👩‍👧‍👦 ﷽ é 🇫🇷!"
    ids = smollm2_tokenizer.encode(text)
    stream = StreamDecoder(smollm2_tokenizer)
    pieces = [stream.add(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text
    assert sum(piece != "" for piece in pieces) > 10


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_ids_stream_to_the_text_of_the_whole(make, seed, skip):
    """Random bytes: most are no valid UTF-8, and some are cut off at the end."""
    tokenizer = make()
    ids = random.Random(seed).choices([*range(260), EOS, 0xE6, 0xBC, 0xA2], k=100)
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("cut", range(1, 13))
def test_the_whole_text_is_that_of_a_stream_where_bytes_are_tokens(cut):
    """As in Llama 2, whose decoder gives up all of a run of bytes that ends inside a character."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    encoder.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    tokenizer = Tokenizer(encoder=encoder, chat_template=None, special={}, adds_bos=None, eos_token_ids=())
    cut_off = "漢😀字é".encode()[:cut]
    ids = [256, *cut_off]
    stream = StreamDecoder(tokenizer)
    streamed = "".join([stream.add(token) for token in ids]) + stream.flush()
    assert tokenizer.whole_text(ids) == streamed
    assert streamed.rstrip("\ufffd") == "a" + cut_off.decode(errors="ignore")


def test_what_is_held_back_comes_with_the_flush(make):
    stream = StreamDecoder(make())
    assert [stream.add(token) for token in "漢".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.add(ord("a")) == "a"


@pytest.mark.parametrize(("asked", "in_post_processor"), [(True, True), (True, False), ("remove", True)])
def test_bos_is_added_once_when_asked_for(make, asked, in_post_processor):
    tokenizer = make(add_bos=in_post_processor, add_bos_token=asked)
    assert tokenizer.encode("hel") == [BOS, 257]


@pytest.mark.parametrize(("asked", "in_post_processor"), [(False, True), (False, False), ("remove", False)])
def test_bos_is_not_added_when_not_asked_for(make, asked, in_post_processor):
    assert make(add_bos=in_post_processor, add_bos_token=asked).encode("hel") == [257]


def test_a_chat_has_the_bos_of_its_template_alone(make):
    tokenizer = make(add_bos=True, chat_template=TEMPLATE)
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat("hel") == [BOS, 257, ord(">")]


def test_a_template_may_be_one_of_several(make):
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert make(chat_template=templates).apply_chat_template([]) == "yes"


def test_tokens_may_be_written_as_objects(make):
    tokenizer = make(chat_template=TEMPLATE, bos_token={"content": "<s>", "lstrip": False})
    assert tokenizer.encode_chat("he")[0] == BOS


def test_templates_find_what_huggingface_gives_them(make):
    template = """{%- for m in messages %}
    {%- if loop.index0 == 1 %}{% break %}{% endif %}
    {{- m | tojson }} {{ strftime_now('%Y')[:2] }} {{ tools is none }}
{%- endfor %}"""
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "b"}]
    assert make(chat_template=template).apply_chat_template(messages) == '{"role": "user", "content": "é<"} 20 True'


def test_a_template_can_refuse_with_its_own_words(make):
    tokenizer = make(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{% for %}", "{{ messages.append(1) }}"])
def test_a_hostile_or_broken_template_is_a_user_error(make, template):
    with pytest.raises(UserError, match="template"):
        make(chat_template=template).apply_chat_template([])


def test_without_template_plain_text_is_the_remedy(make):
    tokenizer = make()
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="plain text"):
        tokenizer.encode_chat("hel")


@pytest.mark.parametrize(("stored", "expected"), [(7, (7, EOS)), ([EOS, 7], (EOS, 7)), (None, (EOS,))])
def test_end_tokens_of_config_and_tokenizer_are_joined(make, stored, expected):
    assert make(config={"eos_token_id": stored}).eos_token_ids == expected


def test_missing_and_damaged_files_are_user_errors(make, tmp_path):
    make()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        Tokenizer.load(Path(tmp_path))
