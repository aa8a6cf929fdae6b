"""Text to token ids and back, as a checkpoint's own files say."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from jaxspec.checkpoint.json_file import read_json
from jaxspec.errors import UserError

_CONVERT_AGAIN = "make the checkpoint anew with `jaxspec convert SRC DST`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer, its chat template and the ids that end a text.

    `special` are the named special tokens (`bos_token`, `eos_token`, ...), which a template may use.
    """

    encoder: tokenizers.Tokenizer
    chat_template: str | None
    special: Mapping[str, str]
    adds_bos: bool | None  # None leaves it to the post-processor of tokenizer.json
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, checkpoint_dir: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` (if any) and the end tokens of `config.json`.

        Raises:
          UserError: a file is missing or damaged.
        """
        directory = Path(checkpoint_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{directory} has no tokenizer.json: {_CONVERT_AGAIN} from a source that has one")
        try:
            encoder = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise UserError(f"{path} is not a tokenizer ({error}): {_CONVERT_AGAIN}") from error
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path, _CONVERT_AGAIN) if settings_path.is_file() else {}
        special = {key: _content(settings[key]) for key in settings if key.endswith("_token") and settings[key]}
        special = {key: token for key, token in special.items() if isinstance(token, str)}
        stops = read_json(directory / "config.json", _CONVERT_AGAIN).get("eos_token_id")
        stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
        if (eos := encoder.token_to_id(special.get("eos_token", ""))) is not None:
            stops = [*stops, eos]
        return cls(
            encoder=encoder,
            chat_template=_template(settings.get("chat_template")),
            special=special,
            adds_bos=settings.get("add_bos_token"),
            eos_token_ids=tuple(dict.fromkeys(stops)),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included; the model's vocabulary may be padded beyond it."""
        return self.encoder.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self.encoder.token_to_id(self.special.get("bos_token", ""))

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, after a BOS token if the checkpoint's files ask for one."""
        ids = self._ids(text, add_special_tokens=True)
        bos = self.bos_token_id
        if self.adds_bos is None or bos is None:
            return ids
        if not self.adds_bos:
            return self._ids(text, add_special_tokens=False)
        return ids if ids[:1] == [bos] else [bos, *ids]

    def encode_part(self, text: str) -> list[int]:
        """Ids of a part of a text; nothing is added."""
        return self._ids(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.encoder.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def whole_text(self, ids: Sequence[int]) -> str:
        """What a `StreamDecoder` makes of all of them, at a fraction of its cost where no character is broken.

        Where one is, a decoder of bytes may give up a run of whole characters before it, which a stream has shown.
        """
        text = self.decode(ids)
        if "\ufffd" not in text:
            return text
        stream = StreamDecoder(self)
        return "".join([stream.add(token) for token in ids]) + stream.flush()

    def apply_chat_template(self, messages: list[dict[str, Any]], for_answer: bool = True) -> str:
        """The prompt for the assistant's next turn, or (without `for_answer`) what was said so far.

        Args:
          messages: each with a `role` and a `content`, the oldest first.

        Raises:
          UserError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError("this checkpoint has no chat template: give plain text instead of chat messages")
        try:
            return _compiled(self.chat_template).render(
                messages=messages, add_generation_prompt=for_answer, tools=None, documents=None, **self.special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(
                f"the chat template refuses these messages ({error}): change them or give plain text"
            ) from error

    def encode_chat(self, user_text: str) -> list[int]:
        """Ids of the prompt in which the user says `user_text`."""
        return self.encode_messages([{"role": "user", "content": user_text}])

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of the prompt for the assistant's next turn. The template writes BOS itself; none is added."""
        return self.encode_part(self.apply_chat_template(messages))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.encoder.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # the encoder's way of saying that it is not Unicode
            raise UserError("the prompt is not valid Unicode text: remove bytes that are not UTF-8") from error


class StreamDecoder:
    """Text of a growing sequence of tokens, piece by piece; the pieces together are the `whole_text`.

    A piece is held back while it ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        # Tokens since the last piece but one, and how many of them are in the pieces already given. A decoder may treat
        # the first token of a text differently, so a piece is what a token adds to the text before it.
        self._ids: list[int] = []
        self._num_given = 0

    def add(self, token: int) -> str:
        """The text that `token` completes, often empty."""
        self._ids.append(token)
        piece = self._pending()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._num_given :]
        self._num_given = len(self._ids)
        return piece

    def flush(self) -> str:
        """What is held back, with U+FFFD for bytes that no token completed; the next token starts a new text."""
        piece = self._pending()
        self._ids, self._num_given = [], 0
        return piece

    def _pending(self) -> str:
        given = self._tokenizer.decode(self._ids[: self._num_given], self._skip_special_tokens)
        return self._tokenizer.decode(self._ids, self._skip_special_tokens)[len(given) :]


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _template(value: Any) -> str | None:
    """A template may be one of several, named in a list; then it is the one named "default"."""
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value or None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    """What Hugging Face templates expect to find; they are code from outside, hence the sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment
