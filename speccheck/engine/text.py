"""Between text and token ids: tokenizer, chat template, incremental text, stop strings.

Text is produced token by token, whatever the size of the block a verify step committed: so both
arms, streaming or not, give the same text for the same ids, and a stop string ends the answer at
the token that completes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccheck.errors import EngineError

_REPLACEMENT = "\ufffd"
_CONTEXT = 6  # prompt tokens decoded with the first ones, so that a leading space is kept


class Tokenizer:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json and tokenizer_config.json. Raises EngineError."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        path = folder / "tokenizer.json"
        try:
            self._tokenizer: Any = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise EngineError(f"{path}: no readable tokenizer ({error})") from error
        path = folder / "tokenizer_config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raw = {}
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: not readable ({error})") from error
        self._special = {
            name: value["content"] if isinstance(value, Mapping) else value
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := raw.get(name)) is not None
        }
        template = raw.get("chat_template")
        separate = folder / "chat_template.jinja"
        if template is None and separate.exists():
            template = separate.read_text(encoding="utf-8")
        self._template = None if template is None else _compile(template, folder)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises ValueError where it is no Unicode (half a surrogate)."""
        text.encode()  # tokenizers answers half a surrogate with a TypeError
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 come out as U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self) -> list[bytes | None]:
        """The bytes of each id, None for special tokens. Raises ValueError if not byte-level."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ValueError("structured output needs a byte-level tokenizer")
        special = self._tokenizer.get_added_tokens_decoder()
        letters = _byte_letters()
        return [
            None if i in special else bytes(letters[c] for c in self._tokenizer.id_to_token(i))
            for i in range(self.vocab_size)
        ]

    def token_text(self, token: int) -> str:
        """The text of one token by itself, special tokens by name."""
        return self.decode([token], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises ValueError with the template's complaint.

        With `continue_final_message` the text ends inside the last message, as vLLM and
        transformers do it: everything the template puts after its content is cut off.
        """
        if self._template is None:
            raise ValueError("the model has no chat template; use /v1/completions")
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(
                {
                    **(template_arguments or {}),
                    **self._special,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        if continue_final_message:
            last = str(messages[-1]["content"])
            start = text.rfind(last.strip())
            if start < 0 or not last.strip():
                raise ValueError("continue_final_message: the last message is empty or was changed")
            end = start + len(last.strip())
            kept_space = text[end:].startswith(last[len(last.rstrip()) :])
            text = text[: end + (len(last) - len(last.rstrip()) if kept_space else 0)]
        return text


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies: printable bytes stand for themselves (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _compile(template: str, folder: Path) -> Any:
    """A sandboxed template with what transformers offers to chat templates."""
    from jinja2 import TemplateError
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise EngineError(f"{folder}: chat template does not compile ({error})") from error


class Detokenizer:
    """Text of a growing list of ids: each token adds a piece that is final once it is given out.

    Bytes of a character that is not complete are held back, so U+FFFD appears only where the ids
    really hold broken UTF-8. Method of the two offsets, as in vLLM and text-generation-inference:
    compare the text of a short window with and without the new token.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0
        self._read = len(self._ids)
        self._known = self._decode(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def add(self, token: int) -> str:
        """The text this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(self._known) or text.endswith(_REPLACEMENT):
            return ""
        piece = text[len(self._known) :]
        self._start, self._read = self._read, len(self._ids)
        self._known = self._decode(self._ids[self._start :])
        return piece

    def flush(self) -> str:
        """What was held back and will not be completed any more."""
        text = self._decode(self._ids[self._start :])
        piece = text[len(self._known) :]
        self._known = text
        return piece


class StopMatcher:
    """Finds the stop string that is complete first, in text that comes in pieces.

    Of two that are complete at once the first in the list counts (vLLM, v1/engine/detokenizer.py).
    What may become one is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: non-empty strings."""
        self._stop = tuple(stop)
        self._held = ""

    def add(self, piece: str, *, include_stop: bool) -> tuple[str, str | None]:
        """Text that may be given out now, and the stop string if one was completed.

        The stop string itself is given out only with `include_stop`; what follows it never is.
        """
        text = self._held + piece
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
            self._held = ""
            return text[: at + len(stop) if include_stop else at], stop
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
