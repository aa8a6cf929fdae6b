"""The target of the trained pair as a checkpoint with a tokenizer, whose words are w0, w1, …, and prompts for it."""

import json
import random
import shutil
from pathlib import Path

import tokenizers
from models_on_mesh import FIXTURES, PAIR_TARGET

from jaxspec.checkpoint.convert import convert

VOCAB = 256
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] == 'user' and 'w1 ' or 'w2 ' }}{{ message['content'] }} w3 "
    "{% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)


def write_tokenizer(directory: Path, chat_template: str | None = None, eos: str | None = None) -> None:
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": chat_template, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v}))


def make_target(directory: Path) -> Path:
    source = directory / "source"
    shutil.copytree(FIXTURES / PAIR_TARGET, source)
    write_tokenizer(source)
    convert(source, directory / "target", show_progress=False)
    return directory / "target"


def write_prompts(path: Path, count: int) -> Path:
    """Two words each: a topic of the language that the target speaks, and any other."""
    chance = random.Random(0)
    lines = [json.dumps({"prompt": f"w{chance.randrange(4)} w{chance.randrange(4, VOCAB)}"}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path
