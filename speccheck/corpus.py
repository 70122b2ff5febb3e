"""Prompt files: our own JSONL, and importers of public formats.

What comes from outside is checked once, here: an unknown key is an error with file and line, since
a typo must never turn into a default that quietly changes what is measured. Files are read line by
line, so that a mistake in the first line of a huge file is found at once. A digest of the prompts
in their order identifies a corpus in every run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from speccheck.errors import StoreError, UsageError
from speccheck.records import Prompt, digest, to_json

Format = Literal["auto", "native", "spec_bench", "openai_batch", "lines"]

_REQUIRED = ("id", "task", "route", "messages", "max_tokens")
_OPTIONAL = (
    "priority",
    "language",
    "output_band",
    "check",
    "stop",
    "response_format",
    "features",
    "follow_up",
    "follow_checks",
    "group",
    "source",
)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PRIORITIES = ("normal", "protected")
_OUTPUT_BANDS = ("short", "medium", "long")

_FORMAT_RULES: dict[str, type] = {
    "max_words": int,
    "min_words": int,
    "sentences": int,
    "lines": int,
    "bullets": int,
    "starts_with": str,
    "ends_with": str,
}

_CONFIG_FORMATS = ("yaml", "toml", "ini", "env")

_CHECKS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "none": (frozenset(), frozenset()),
    "exact": (frozenset({"answer"}), frozenset({"ignore_case", "tolerance"})),
    "json": (frozenset(), frozenset({"expect"})),
    "json_schema": (frozenset({"schema"}), frozenset({"expect"})),
    "sql": (frozenset({"setup", "gold"}), frozenset()),
    "code": (frozenset({"tests"}), frozenset()),
    "match": (frozenset({"answers"}), frozenset()),
    "contains": (frozenset(), frozenset({"all", "any", "none"})),
    "number": (frozenset({"answer"}), frozenset({"tolerance"})),
    "refusal": (frozenset({"expected"}), frozenset()),
    "config": (frozenset({"format"}), frozenset({"expect"})),
    "citations": (frozenset({"sources"}), frozenset({"must_cite", "contains", "quotes"})),
    "regex": (frozenset({"pattern"}), frozenset()),
    "format": (frozenset(), frozenset(_FORMAT_RULES)),
    "all": (frozenset({"checks"}), frozenset()),
    "any": (frozenset({"checks"}), frozenset()),
}
"""Kinds of checks with their required and optional keys; what they mean is up to `grading`."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Prompts in order, ids unique, and the digest that runs are identified by."""

    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """Digest of every field of every prompt, in order."""
        return digest("corpus", [to_json(prompt) for prompt in self.prompts])

    def limited(self, per_task: int) -> Corpus:
        """The first `per_task` prompts of each task, order kept."""
        counts: dict[str, int] = {}
        kept: list[Prompt] = []
        for prompt in self.prompts:
            counts[prompt.task] = counts.get(prompt.task, 0) + 1
            if counts[prompt.task] <= per_task:
                kept.append(prompt)
        return Corpus(tuple(kept))


RANDOM_SHARE = 0.1
"""Share of prompts made of random ids above which a workload is not a sample of real traffic."""


def unrepresentative(prompts: Sequence[Prompt]) -> str:
    """Why prompts are no sample of real traffic, or empty.

    Random token ids, as load generators send: their source says so, or there is nothing but numbers
    in them. Drafts of such text are worth nothing, whatever the draft is worth.
    """
    random = [p for p in prompts if _is_random(p)]
    if not random or len(random) < RANDOM_SHARE * len(prompts):
        return ""
    return f"{len(random)} of {len(prompts)} prompts are random ids (such as {random[0].prompt_id})"


def _is_random(prompt: Prompt) -> bool:
    words = set(re.split(r"[^a-z0-9]+", prompt.source.lower()))
    says_so = "random" in words and (len(words) == 1 or bool(words & {"ids", "token", "tokens"}))
    text = " ".join(message["content"] for message in prompt.messages)
    numbers = re.fullmatch(r"[\s\[]*\d+(?:[\s,]+\d+){7,}[\s\],]*", text)
    return says_so or numbers is not None


# --- reading and writing ------------------------------------------------------------------------


def load_corpus(paths: Iterable[str | Path], *, format: Format = "auto") -> Corpus:  # noqa: A002
    """All prompts of the given files, in order.

    Raises:
        UsageError: with file and line, for anything that is wrong in a file, an id that is in two
            of them, or no file at all.
    """
    prompts: list[Prompt] = []
    first_seen: dict[str, Path] = {}
    for path in map(Path, paths):
        for prompt in import_prompts(path, format=format):
            other = first_seen.setdefault(prompt.prompt_id, path)
            if other != path:
                raise UsageError(f"{path}: id {prompt.prompt_id!r} is already in {other}")
            prompts.append(prompt)
    if not prompts:
        raise UsageError("no corpus files given; name at least one *.jsonl")
    return Corpus(tuple(prompts))


def import_prompts(
    path: str | Path,
    *,
    format: Format = "auto",  # noqa: A002
    route: str = "default",
    max_tokens: int = 256,
) -> tuple[Prompt, ...]:
    """The prompts of one file in a known format.

    - native: see the README; what `write_corpus` writes.
    - spec_bench: Spec-Bench and EAGLE, `{question_id, category, turns[]}`; later turns become
      `follow_up`, the category is the task.
    - openai_batch: `{custom_id, method, url, body{messages, ...}}`, chat completions only; how it
      is sampled is for the plan to say, so temperature and the like are not taken over.
    - lines: one prompt a line, blank lines left out.
    - auto: told from the first line.

    Args:
        path: UTF-8, with or without byte-order mark, LF or CRLF line ends, last one optional.
        format: of the file.
        route: of imported prompts; native ones have their own.
        max_tokens: where the file does not say.

    Raises:
        UsageError: with file and line.
    """
    return tuple(read_prompts(path, format=format, route=route, max_tokens=max_tokens))


def read_prompts(
    path: str | Path,
    *,
    format: Format = "auto",  # noqa: A002
    route: str = "default",
    max_tokens: int = 256,
) -> Iterator[Prompt]:
    """As `import_prompts`, one by one, for files too large to hold."""
    where = Path(path)
    if format not in get_args(Format):
        raise UsageError(f"no format {format!r}; there are: {', '.join(get_args(Format))}")
    chosen: Format | None = None if format == "auto" else format
    seen: dict[str, int] = {}
    for number, line in _lines(where):
        place = f"{where}:{number}"
        if chosen is None:
            chosen = _detect(line, place)
        if chosen == "lines":
            prompt = _from_line(line, number, where, route, max_tokens)
        else:
            value = _object(line, place)
            prompt = _READERS[chosen](value, place, route, max_tokens)
        earlier = seen.setdefault(prompt.prompt_id, number)
        if earlier != number:
            raise UsageError(f"{place}: id {prompt.prompt_id!r} is already in line {earlier}")
        yield prompt
    if not seen:
        raise UsageError(f"{where}: no prompts in it")


def write_corpus(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """Write native JSONL; the file is whole or not there.

    Raises:
        StoreError: where it cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for prompt in prompts:
                file.write(json.dumps(_to_native(prompt), ensure_ascii=False) + "\n")
        os.replace(partial, target)  # noqa: PTH105 -- one call, whole or not at all
    except OSError as error:
        raise StoreError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines that are not blank."""
    try:
        # Bytes are split here, not by the text layer, which would also split at U+2028 in a
        # prompt or at a lone carriage return, and could not name the line of a wrong byte.
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                with _placed(f"{path}:{number}"):
                    line = raw.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode()
                line = line.rstrip("\r\n")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _placed(place: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8 ({error.reason}, byte {error.start})") from error


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(
            line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{place}: a JSON object is expected in each line")
    try:
        line.encode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place}: half a character (a lone surrogate) in a string") from None
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _detect(line: str, place: str) -> Format:
    """The format, by the keys of the first line."""
    if not line.lstrip().startswith("{"):
        if line.lstrip().startswith("["):
            raise UsageError(
                f"{place}: looks like one JSON array; write one object per line "
                "(jq -c '.[]'), or give the format"
            )
        return "lines"
    keys = set(_object(line, place))
    if {"question_id", "turns"} <= keys:
        return "spec_bench"
    if {"custom_id", "body"} <= keys:
        return "openai_batch"
    if {"id", "messages"} & keys:
        return "native"
    raise UsageError(
        f"{place}: cannot tell the format from the keys {', '.join(sorted(keys))}; known: native "
        "(id, messages), spec_bench (question_id, turns), openai_batch (custom_id, body), lines"
    )


# --- formats ------------------------------------------------------------------------------------


def _from_native(value: dict[str, Any], place: str, route: str, max_tokens: int) -> Prompt:
    del route, max_tokens  # a native line says both itself
    missing = [name for name in _REQUIRED if name not in value]
    if missing:
        raise UsageError(f"{place}: {', '.join(missing)} missing")
    unknown = sorted(set(value) - {*_REQUIRED, *_OPTIONAL})
    if unknown:
        raise UsageError(
            f"{place}: unknown {', '.join(unknown)}; known: {', '.join((*_REQUIRED, *_OPTIONAL))}"
        )
    tokens = _positive(value, "max_tokens", place)
    response_format = value.get("response_format")
    if response_format is not None:
        _check_response_format(response_format, place)
    check = value.get("check", {"kind": "none"})
    _check_check(check, f"{place}: check")
    follow_up = _texts(value.get("follow_up", []), "follow_up", place)
    return Prompt(
        prompt_id=_word(value, "id", place),
        task=_word(value, "task", place),
        route=_word(value, "route", place),
        messages=_messages(value["messages"], place),
        max_tokens=tokens,
        check=check,
        priority=_one_of(value, "priority", _PRIORITIES, "normal", place),
        language=_word({"language": "en", **value}, "language", place),
        output_band=_one_of(value, "output_band", _OUTPUT_BANDS, _output_band(tokens), place),
        stop=_texts(value.get("stop", []), "stop", place),
        response_format=response_format,
        features=_texts(value.get("features", []), "features", place),
        follow_up=follow_up,
        follow_checks=_follow_checks(value.get("follow_checks", []), len(follow_up), place),
        group=_string(value.get("group", ""), "group", place),
        source=_string(value.get("source", ""), "source", place),
    )


def _from_spec_bench(value: dict[str, Any], place: str, route: str, max_tokens: int) -> Prompt:
    turns = _texts(value.get("turns"), "turns", place)
    if not turns:
        raise UsageError(f"{place}: turns is empty")
    question = value.get("question_id")
    if isinstance(question, bool) or not isinstance(question, (int, str)) or question == "":
        raise UsageError(f"{place}: question_id must be a number or a text")
    return _plain_prompt(
        prompt_id=str(question),
        task=_word({"category": "unknown", **value}, "category", place),
        route=route,
        messages=({"role": "user", "content": turns[0]},),
        max_tokens=max_tokens,
        follow_up=turns[1:],
        source="spec_bench",
    )


def _from_openai_batch(value: dict[str, Any], place: str, route: str, max_tokens: int) -> Prompt:
    url = value.get("url", "/v1/chat/completions")
    if url != "/v1/chat/completions":
        raise UsageError(f"{place}: url {url!r}: only /v1/chat/completions can be imported")
    body = value.get("body")
    if not isinstance(body, dict) or "messages" not in body:
        raise UsageError(f"{place}: body must be an object with messages")
    if body.get("tools"):
        raise UsageError(f"{place}: body.tools cannot be imported; leave such requests out")
    stop = body.get("stop") or []
    given = [body.get("max_completion_tokens"), body.get("max_tokens"), max_tokens]
    limit = next(value for value in given if value is not None)
    response_format = body.get("response_format")
    if response_format is not None:
        _check_response_format(response_format, place)
    return replace(
        _plain_prompt(
            prompt_id=_word(value, "custom_id", place),
            task="unknown",
            route=route,
            messages=_messages(body["messages"], place),
            max_tokens=_positive({"max_tokens": limit}, "max_tokens", place),
            follow_up=(),
            source="openai_batch",
        ),
        stop=_texts([stop] if isinstance(stop, str) else stop, "stop", place),
        response_format=response_format,
    )


def _from_line(line: str, number: int, path: Path, route: str, max_tokens: int) -> Prompt:
    return _plain_prompt(
        prompt_id=f"{path.stem}-{number}",
        task="unknown",
        route=route,
        messages=({"role": "user", "content": line},),
        max_tokens=max_tokens,
        follow_up=(),
        source="lines",
    )


_READERS: dict[str, Callable[[dict[str, Any], str, str, int], Prompt]] = {
    "native": _from_native,
    "spec_bench": _from_spec_bench,
    "openai_batch": _from_openai_batch,
}


def _plain_prompt(
    *,
    prompt_id: str,
    task: str,
    route: str,
    messages: tuple[Mapping[str, str], ...],
    max_tokens: int,
    follow_up: tuple[str, ...],
    source: str,
) -> Prompt:
    """An imported prompt: nothing is known that would grade its answer."""
    return Prompt(
        prompt_id=prompt_id,
        task=task,
        route=route,
        messages=messages,
        max_tokens=max_tokens,
        check={"kind": "none"},
        output_band=_output_band(max_tokens),
        follow_up=follow_up,
        source=source,
    )


def _to_native(prompt: Prompt) -> dict[str, Any]:
    """Required fields always, others where they are not the default."""
    values = {field.name: to_json(getattr(prompt, field.name)) for field in fields(Prompt)}
    value = {"id": values.pop("prompt_id"), **values}
    always = {*_REQUIRED, "check", "priority", "language", "output_band"}
    return {name: item for name, item in value.items() if name in always or item}


def _output_band(max_tokens: int) -> str:
    """What the limit alone tells of the expected length."""
    if max_tokens < 32:
        return "short"
    return "medium" if max_tokens < 80 else "long"


# --- values -------------------------------------------------------------------------------------


def _string(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place}: {name} must be a text")
    return value


def _word(value: Mapping[str, Any], name: str, place: str) -> str:
    text = _string(value.get(name), name, place)
    if not text.strip():
        raise UsageError(f"{place}: {name} is empty")
    return text


def _one_of(
    value: Mapping[str, Any], name: str, choices: Sequence[str], default: str, place: str
) -> str:
    text = value.get(name, default)
    if text not in choices:
        raise UsageError(f"{place}: {name} is {text!r}, must be one of {', '.join(choices)}")
    return str(text)


def _positive(value: Mapping[str, Any], name: str, place: str) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"{place}: {name} must be a whole number from 1")
    return number


def _texts(value: Any, name: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f"{place}: {name} must be a list of texts")
    return tuple(value)


def _messages(value: Any, place: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{place}: messages must be a list with at least one message")
    messages: list[Mapping[str, str]] = []
    for i, message in enumerate(value):
        at = f"{place}: messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UsageError(f"{at} must have role and content, and nothing else")
        role = _one_of(message, "role", _ROLES, "", at)
        messages.append({"role": role, "content": _content(message["content"], at)})
    return tuple(messages)


def _content(value: Any, place: str) -> str:
    """A text, or OpenAI's list of text parts joined; pictures and sound cannot be sent."""
    if isinstance(value, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in value
        ]
        if not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{place}: content has parts that are not text")
        return "".join(map(str, parts))
    return _string(value, "content", place)


def _check_response_format(value: Any, place: str) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise UsageError(f"{place}: response_format must be an object with a type")
    if value["type"] == "json_schema":
        schema = value.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise UsageError(f"{place}: response_format.json_schema must have name and schema")


def _follow_checks(value: Any, turns: int, place: str) -> tuple[Mapping[str, Any], ...]:
    """A check for each follow-up turn, or none at all."""
    if not isinstance(value, list) or len(value) not in (0, turns):
        raise UsageError(f"{place}: follow_checks must be a list with one check per follow_up turn")
    for i, check in enumerate(value):
        _check_check(check, f"{place}: follow_checks[{i}]")
    return tuple(value)


def _check_check(check: Any, place: str) -> None:
    """Kind, keys and types. Whether a gold query runs is found out where it is graded."""
    kind = check.get("kind") if isinstance(check, dict) else None
    if not isinstance(kind, str) or kind not in _CHECKS:
        raise UsageError(f"{place}.kind is {kind!r}, must be one of {', '.join(_CHECKS)}")
    required, optional = _CHECKS[kind]
    keys = set(check) - {"kind"}
    if missing := sorted(required - keys):
        raise UsageError(f"{place} of kind {kind}: {', '.join(missing)} missing")
    if unknown := sorted(keys - required - optional):
        known = ", ".join(sorted(required | optional)) or "none"
        raise UsageError(f"{place} of kind {kind}: unknown {', '.join(unknown)}; known: {known}")
    if kind in ("all", "any"):
        if not isinstance(check["checks"], list) or not check["checks"]:
            raise UsageError(f"{place} of kind {kind}: checks must be a list with a check in it")
        for i, part in enumerate(check["checks"]):
            _check_check(part, f"{place}.checks[{i}]")
    elif kind == "exact":
        answer = check["answer"]
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise UsageError(f"{place} of kind exact: answer must be a text or a number")
    elif kind == "regex":
        _check_pattern(check["pattern"], f"{place} of kind regex: pattern")
    elif kind == "format":
        if not keys:
            raise UsageError(f"{place} of kind format: give one of {', '.join(_FORMAT_RULES)}")
        for name in sorted(keys):
            if type(check[name]) is not _FORMAT_RULES[name]:
                wanted = "a whole number" if _FORMAT_RULES[name] is int else "a text"
                raise UsageError(f"{place} of kind format: {name} must be {wanted}")
    elif kind == "json_schema" and not isinstance(check["schema"], dict):
        raise UsageError(f"{place} of kind json_schema: schema must be an object")
    elif kind in ("sql", "code"):
        for name in sorted(required):
            _word(check, name, f"{place} of kind {kind}")
    elif kind == "citations":
        _check_citations(check, f"{place} of kind citations")
    elif kind in ("match", "contains"):
        if not keys:
            raise UsageError(f"{place} of kind {kind}: give one of all, any, none")
        for name in sorted(keys):
            if not _texts(check[name], name, f"{place} of kind {kind}"):
                raise UsageError(f"{place} of kind {kind}: {name} is empty")
    elif kind == "number":
        for name in sorted(keys):
            if isinstance(check[name], bool) or not isinstance(check[name], (int, float)):
                raise UsageError(f"{place} of kind number: {name} must be a number")
    elif kind == "refusal" and not isinstance(check["expected"], bool):
        raise UsageError(f"{place} of kind refusal: expected must be true or false")
    elif kind == "config":
        _one_of(check, "format", _CONFIG_FORMATS, "", f"{place} of kind config")


def _check_citations(check: Mapping[str, Any], place: str) -> None:
    """`sources` are names, or texts by name; only the latter can be quoted from."""
    sources = check["sources"]
    if isinstance(sources, dict):
        _texts([*sources, *sources.values()], "sources", place)
    else:
        _texts(sources, "sources", place)
    for name in sorted({"must_cite", "contains"} & set(check)):
        _texts(check[name], name, place)
    if "quotes" in check:
        _positive(check, "quotes", place)
        if not isinstance(sources, dict):
            raise UsageError(f"{place}: quotes needs sources with their texts (name: text)")


def _check_pattern(pattern: Any, place: str) -> None:
    try:
        re.compile(_string(pattern, "pattern", place))
    except re.error as error:
        raise UsageError(f"{place}: {error}") from error
