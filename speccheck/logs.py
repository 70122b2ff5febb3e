"""Logs of target-only answers: JSON lines, an OpenAI batch output, or the texts of a replay.

One JSON object a line. The prompt is `prompt_token_ids`, or `messages`, or `prompt` (a text, or
token ids); the answer is `output_token_ids`, or `output` (a text). Optional: `id` (of the prompt:
answers to one prompt are one cluster), `task`, `route`, `temperature`, `max_tokens` (what the
request asked for) and `finish_reason`. A line of an OpenAI batch output (`custom_id`, `response`)
is told by its keys; its prompt is looked up in the batch input. Texts and messages need a tokenizer
and its chat template. What a line holds besides is ignored, and counted by name.

Files are read line by line: a log of a service is large.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccheck.errors import UsageError
from speccheck.records import Prompt, digest

if TYPE_CHECKING:
    from speccheck.engine.text import Tokenizer

_PROMPT = ("prompt_token_ids", "messages", "prompt")
_OUTPUT = ("output_token_ids", "output")
_OPTIONAL = ("id", "task", "route", "temperature", "max_tokens", "finish_reason")
_KNOWN = frozenset((*_PROMPT, *_OUTPUT, *_OPTIONAL))
_BATCH = frozenset(("id", "custom_id", "response", "error"))
_KEPT_COMPLAINTS = 5


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One target-only answer, in token ids. `max_tokens` is None where it is not known."""

    prompt_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    task: str = "unknown"
    route: str = "default"
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass
class Skipped:
    """Lines that were left out, and what was wrong with the first of them."""

    n: int = 0
    complaints: list[str] = field(default_factory=list)

    def add(self, complaint: str) -> None:
        """Count a line."""
        self.n += 1
        if len(self.complaints) < _KEPT_COMPLAINTS:
            self.complaints.append(complaint)


@dataclass
class Reading:
    """How a log is read, and what was seen on the way.

    `tokenizer` is called once, where a text needs it. With `skip_bad` a line that cannot be used is
    counted in `skipped`, otherwise it is an error. `batch_input` holds the requests of a batch by
    custom_id, as `read_batch_input` gives them.
    """

    tokenizer: Callable[[], Tokenizer]
    skip_bad: bool = False
    batch_input: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    ignored: Counter[str] = field(default_factory=Counter)
    """Keys that mean nothing here, with how many lines have them."""
    retokenised: int = 0
    """Answers that came as text: their tokens may not be those that the model produced."""
    bytes_read: int = 0

    def answers(self, path: Path) -> Iterator[LoggedAnswer]:
        """The answers of one file, in its order.

        Raises:
            UsageError: with file and line; the file cannot be read, or has no answer in it.
        """
        n = 0
        for place, line in self._lines(path):
            try:
                found = self._line(line, place)
            except UsageError as error:
                if not self.skip_bad:
                    raise UsageError(f"{error}; --skip-bad leaves such lines out") from None
                self.skipped.add(str(error))
                continue
            n += len(found)
            yield from found
        if not n:
            why = self.skipped.complaints[:1] or ["the file is empty"]
            raise UsageError(f"{path}: no answer in it: {why[0]}")

    def _lines(self, path: Path) -> Iterator[tuple[str, bytes]]:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    self.bytes_read += len(line)
                    if line.strip():
                        yield f"{path}:{number}", line
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error

    def _line(self, line: bytes, place: str) -> list[LoggedAnswer]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{place}: a JSON object is expected in each line")
        if "response" in value and "custom_id" in value:
            return self._batch_line(value, place)
        self.ignored.update(value.keys() - _KNOWN)
        prompt = self._prompt(value, place)
        output = self._output(value, place)
        return [_answer(value, value.get("id"), prompt, output, place)]

    def _batch_line(self, value: Mapping[str, Any], place: str) -> list[LoggedAnswer]:
        """The answers (n of them) of one request of a batch."""
        self.ignored.update(value.keys() - _BATCH)
        reply = value["response"]
        body = reply.get("body") if isinstance(reply, dict) else None
        if not isinstance(body, dict) or reply.get("status_code", 200) != 200:
            raise UsageError(f"{place}: the request {value['custom_id']!r} was not answered")
        custom_id = str(value["custom_id"])
        request = dict(self.batch_input.get(custom_id, {}))
        if "prompt_token_ids" in body:
            request["prompt_token_ids"] = body["prompt_token_ids"]
        if not request:
            raise UsageError(
                f"{place}: no prompt for {custom_id!r}: a batch output holds answers only, so give "
                "the batch input too (--prompts FILE)"
            )
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices:
            raise UsageError(f"{place}: the answer to {custom_id!r} has no choices")
        prompt = self._prompt(request, place)
        limit = request.get("max_completion_tokens", request.get("max_tokens"))
        given = {"temperature": request.get("temperature"), "max_tokens": limit}
        found = []
        for choice in choices:
            message = choice.get("message") if isinstance(choice, dict) else None
            text = message.get("content") if isinstance(message, dict) else None
            if not isinstance(choice, dict):
                raise UsageError(f"{place}: a choice is no JSON object")
            said = {"output": choice.get("text") if text is None else text}
            if choice.get("token_ids") is not None:
                said = {"output_token_ids": choice["token_ids"]}
            values = {**given, "finish_reason": choice.get("finish_reason")}
            found.append(_answer(values, custom_id, prompt, self._output(said, place), place))
        return found

    def _prompt(self, value: Mapping[str, Any], place: str) -> list[int]:
        if value.get("prompt_token_ids") is not None:
            return _ids(value["prompt_token_ids"], "prompt_token_ids", place)
        if value.get("messages") is not None:
            return self._chat(value["messages"], place)
        prompt = value.get("prompt")
        if isinstance(prompt, list):
            return _ids(prompt, "prompt", place)
        if not isinstance(prompt, str):
            raise UsageError(f"{place}: no prompt; one of {', '.join(_PROMPT)} is needed")
        return self._encode(prompt, "prompt", place, special=True)

    def _chat(self, messages: Any, place: str) -> list[int]:
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise UsageError(f"{place}: messages must be a list of objects")
        try:
            text = self.tokenizer().render_chat(messages)
        except ValueError as error:
            raise UsageError(f"{place}: messages: {error}") from None
        return self._encode(text, "messages", place, special=False)

    def _output(self, value: Mapping[str, Any], place: str) -> list[int]:
        if value.get("output_token_ids") is not None:
            return _ids(value["output_token_ids"], "output_token_ids", place)
        if not isinstance(value.get("output"), str):
            raise UsageError(f"{place}: no answer; one of {', '.join(_OUTPUT)} is needed")
        self.retokenised += 1
        return self._encode(value["output"], "output", place, special=False)

    def _encode(self, text: str, name: str, place: str, *, special: bool) -> list[int]:
        try:
            return self.tokenizer().encode(text, add_special_tokens=special)
        except ValueError:
            raise UsageError(f"{place}: {name} has half a character in it") from None


def _answer(
    value: Mapping[str, Any], prompt_id: Any, prompt: list[int], output: list[int], place: str
) -> LoggedAnswer:
    temperature = value.get("temperature")
    if temperature is not None and not _is_number(temperature):
        raise UsageError(f"{place}: temperature must be a number")
    limit = value.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UsageError(f"{place}: max_tokens must be a whole number from 1")
    if limit is None and value.get("finish_reason") == "length":
        limit = len(output)
    for name in ("task", "route"):
        if not isinstance(value.get(name) or "", str):
            raise UsageError(f"{place}: {name} must be a text")
    return LoggedAnswer(
        prompt_id=digest("prompt", prompt) if prompt_id is None else str(prompt_id),
        prompt=prompt,
        output=output,
        task=value.get("task") or "unknown",
        route=value.get("route") or "default",
        temperature=None if temperature is None else float(temperature),
        max_tokens=limit,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 100


def _ids(value: Any, name: str, place: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise UsageError(f"{place}: {name} must be a list of token ids")
    return value


def read_batch_input(path: Path) -> dict[str, dict[str, Any]]:
    """Bodies of the requests of an OpenAI batch input, by custom_id.

    Raises:
        UsageError: with file and line.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                    found[str(value["custom_id"])] = dict(value["body"])
                except (ValueError, KeyError, TypeError):
                    raise UsageError(
                        f"{path}:{number}: not a line of a batch input (custom_id, body)"
                    ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return found


def open_tokenizer(where: str) -> Tokenizer:
    """`packaged`, a tokenizer.json, or the folder that holds one.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from speccheck.engine.settings import PACKAGED, EngineSettings
    from speccheck.engine.text import Tokenizer
    from speccheck.errors import EngineError

    folder = EngineSettings().model_dir if where == PACKAGED else Path(where)
    if folder.name == "tokenizer.json":
        folder = folder.parent
    try:
        return Tokenizer(folder)
    except EngineError as error:
        raise UsageError(f"--tokenizer: {error}") from None


def chat_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a corpus prompt, as a chat server makes them."""
    text = tokenizer.render_chat([dict(message) for message in prompt.messages])
    return tokenizer.encode(text, add_special_tokens=False)
