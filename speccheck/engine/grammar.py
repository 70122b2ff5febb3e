"""Structured output: which tokens may come next, as a mask over the vocabulary.

A schema becomes a grammar over bytes, and a state of it the set of what may still follow. A token
is allowed where its bytes lead from the state to another one, so a mask is one walk over the trie
of the vocabulary; masks are kept per state, and a state comes back for every character of a string.
Bytes rather than characters, because a byte-level token may hold half a character.

Covered: json_object, and of JSON schema type, properties, required, items, enum, const, anyOf, $ref
within the schema, minItems, maxItems, minLength, maxLength. Anything else that restricts a value
is refused by name: output that only nearly meets a schema is what structured output is there to
prevent. Properties come in the order of the schema and no others are added; between tokens there
is at most one blank, after a colon or a comma (vLLM's `disable_any_whitespace`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccheck.errors import UsageError

Mask = NDArray[np.bool_]
DEAD = -1
"""State after bytes that the grammar does not allow."""

_MOST_REPEATS = 256  # minItems, maxLength ...: each copy is a state of its own
_IGNORED = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs")
) | {"definitions", "deprecated", "readOnly", "writeOnly", "strict"}


# --- expressions over bytes ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # by identity: they form a graph, which may have cycles
class OneOf:
    """One byte of a set."""

    bytes: frozenset[int]


@dataclass(frozen=True, eq=False)
class InOrder:
    """One expression after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Either:
    """One of several."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repeated:
    """Any number of times, none included. What is repeated must not be empty."""

    part: Expression


@dataclass(eq=False)
class Named:
    """An expression that is filled in later: what makes recursion possible."""

    value: Expression = b""


Expression = bytes | OneOf | InOrder | Either | Repeated | Named
_Stack = Any  # mypy has no recursive tuple aliases here: (expression, rest) or None


def _in_order(*parts: Expression) -> Expression:
    return InOrder(parts)


def _optional(part: Expression) -> Expression:
    return Either((part, b""))


def _span(*ranges: tuple[int, int]) -> OneOf:
    return OneOf(frozenset(b for low, high in ranges for b in range(low, high + 1)))


_DIGIT = OneOf(frozenset(b"0123456789"))
_HEX = OneOf(frozenset(b"0123456789abcdefABCDEF"))
_INTEGER = _in_order(
    _optional(b"-"), Either((b"0", _in_order(OneOf(frozenset(b"123456789")), Repeated(_DIGIT))))
)
_NUMBER = _in_order(
    _INTEGER,
    _optional(_in_order(b".", _DIGIT, Repeated(_DIGIT))),
    _optional(
        _in_order(
            OneOf(frozenset(b"eE")), _optional(OneOf(frozenset(b"+-"))), _DIGIT, Repeated(_DIGIT)
        )
    ),
)
_TAIL = _span((0x80, 0xBF))
_CHARACTER = Either(
    (
        OneOf(frozenset(range(0x20, 0x80)) - frozenset(b'"\\')),
        _in_order(b"\\", OneOf(frozenset(b'"\\/bfnrt'))),
        # No surrogates by escape: half of one has no UTF-8 form, and whole characters need none.
        _in_order(b"\\u", OneOf(_HEX.bytes - frozenset(b"dD")), _HEX, _HEX, _HEX),
        _in_order(b"\\u", OneOf(frozenset(b"dD")), OneOf(frozenset(b"01234567")), _HEX, _HEX),
        _in_order(_span((0xC2, 0xDF)), _TAIL),
        _in_order(b"\xe0", _span((0xA0, 0xBF)), _TAIL),
        _in_order(_span((0xE1, 0xEC), (0xEE, 0xEF)), _TAIL, _TAIL),
        _in_order(b"\xed", _span((0x80, 0x9F)), _TAIL),
        _in_order(b"\xf0", _span((0x90, 0xBF)), _TAIL, _TAIL),
        _in_order(_span((0xF1, 0xF3)), _TAIL, _TAIL, _TAIL),
        _in_order(b"\xf4", _span((0x80, 0x8F)), _TAIL, _TAIL),
    )
)
"""One character inside a JSON string, as UTF-8 or escaped."""

_STRING = _in_order(b'"', Repeated(_CHARACTER), b'"')
_BLANK = _optional(b" ")


def _listed(begin: bytes, item: Expression, end: bytes) -> Expression:
    more = Repeated(_in_order(b",", _BLANK, item))
    return _in_order(begin, Either((end, _in_order(item, more, end))))


def _any_value() -> tuple[Expression, Expression]:
    """(any JSON value, any JSON object)."""
    value = Named()
    pair = _in_order(_STRING, b":", _BLANK, value)
    members = _listed(b"{", pair, b"}")
    value.value = Either(
        (_STRING, _NUMBER, members, _listed(b"[", value, b"]"), b"true", b"false", b"null")
    )
    return value, members


_VALUE, _OBJECT = _any_value()


# --- JSON schema --------------------------------------------------------------------------------


class _Compiler:
    """One schema to one expression."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, Named] = {}

    def expression(self, schema: Any, where: str) -> Expression:
        if schema is True or schema == {}:
            return _VALUE
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where}: a schema is an object, got {json.dumps(schema)[:60]}")
        schema = {key: value for key, value in schema.items() if key not in _IGNORED}
        if "$ref" in schema:
            return self._reference(schema, where)
        if "const" in schema:
            _only(schema, {"const", "type"}, where)
            return _literal(schema["const"])
        if "enum" in schema:
            _only(schema, {"enum", "type"}, where)
            if not isinstance(schema["enum"], list) or not schema["enum"]:
                raise UsageError(f"{where}.enum: a list of values is wanted")
            return Either(tuple(_literal(value) for value in schema["enum"]))
        if "anyOf" in schema:
            _only(schema, {"anyOf"}, where)
            parts = schema["anyOf"]
            if not isinstance(parts, list) or not parts:
                raise UsageError(f"{where}.anyOf: a list of schemas is wanted")
            return Either(
                tuple(self.expression(p, f"{where}.anyOf.{i}") for i, p in enumerate(parts))
            )
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return Either(tuple(self.expression({**schema, "type": k}, where) for k in kind))
        return self._typed(schema, kind, where)

    def _typed(self, schema: Mapping[str, Any], kind: Any, where: str) -> Expression:
        allowed: dict[Any, set[str]] = {
            "object": {"properties", "required", "additionalProperties"},
            "array": {"items", "minItems", "maxItems"},
            "string": {"minLength", "maxLength"},
        }
        _only(schema, allowed.get(kind, set()) | {"type"}, where)
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            item = self.expression(schema.get("items", True), f"{where}.items")
            least, most = _bounds(schema, "minItems", "maxItems", where)
            return _array(item, least, most)
        if kind == "string":
            least, most = _bounds(schema, "minLength", "maxLength", where)
            return _in_order(b'"', _repeats(_CHARACTER, least, most), b'"')
        simple: dict[Any, Expression] = {
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": Either((b"true", b"false")),
            "null": b"null",
        }
        if kind not in simple:
            raise UsageError(f"{where}.type: {json.dumps(kind)} is not a JSON type")
        return simple[kind]

    def _object(self, schema: Mapping[str, Any], where: str) -> Expression:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        more = schema.get("additionalProperties")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError(f"{where}: properties is an object and required a list")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise UsageError(
                f"{where}.required: {unknown[0]!r} is not among the properties; give its schema"
            )
        if not properties:
            if more is False:
                return b"{}"
            value = self.expression(True if more is None else more, f"{where}.additionalProperties")
            return _listed(b"{", _in_order(_STRING, b":", _BLANK, value), b"}")
        # From the last to the first: what may follow, at the beginning and after a property.
        at_first: Expression = b"}"
        after_one: Expression = b"}"
        for name, part in reversed(list(properties.items())):
            value = self.expression(part, f"{where}.properties.{name}")
            member = _in_order(_literal(name), b":", _BLANK, value, after_one)
            further = _in_order(b",", _BLANK, member)
            if name in required:
                at_first, after_one = member, further
            else:
                at_first, after_one = Either((member, at_first)), Either((further, after_one))
        return _in_order(b"{", at_first)

    def _reference(self, schema: Mapping[str, Any], where: str) -> Expression:
        _only(schema, {"$ref"}, where)
        path = schema["$ref"]
        if not isinstance(path, str) or not path.startswith("#"):
            raise UsageError(f"{where}.$ref: only references within the schema work, got {path!r}")
        if path not in self._named:
            found = self._root
            for part in path.removeprefix("#").strip("/").split("/"):
                if part:
                    if not isinstance(found, Mapping) or part not in found:
                        raise UsageError(f"{where}.$ref: {path!r} is not in the schema")
                    found = found[part]
            named = self._named[path] = Named()
            named.value = self.expression(found, path)
        return self._named[path]


def _only(schema: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for keyword in schema:
        if keyword not in known:
            raise UsageError(
                f"{where}: the JSON schema keyword {keyword!r} is not supported here "
                "by the embedded engine"
            )


def _bounds(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, most)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value <= _MOST_REPEATS):
            raise UsageError(f"{where}.{name}: a number from 0 to {_MOST_REPEATS} is wanted")
    if most is not None and most < least:
        raise UsageError(f"{where}: {low} {least} exceeds {high} {most}")
    return least, most


def _repeats(part: Expression, least: int, most: int | None) -> Expression:
    tail: Expression = b""
    if most is None:
        tail = Repeated(part)
    else:
        for _ in range(most - least):
            tail = _optional(_in_order(part, tail))
    return _in_order(*[part] * least, tail)


def _array(item: Expression, least: int, most: int | None) -> Expression:
    if most == 0:
        return b"[]"
    further = _repeats(
        _in_order(b",", _BLANK, item), max(0, least - 1), None if most is None else most - 1
    )
    filled = _in_order(item, further, b"]")
    return _in_order(b"[", filled if least else Either((b"]", filled)))


def _literal(value: Any) -> Expression:
    """A fixed value, written with the blanks that json.dumps puts."""
    return json.dumps(value, ensure_ascii=False).encode()


# --- grammars over a vocabulary -----------------------------------------------------------------


class Vocabulary:
    """The bytes of each token as a trie, and the tokens that end an answer."""

    def __init__(self, tokens: Sequence[bytes | None], eos_ids: Collection[int], size: int) -> None:
        """`tokens[i]` is None for special tokens, which no grammar allows. `size`: of a row."""
        self.size = size
        self.tokens = tokens
        self.eos_ids = frozenset(eos_ids)
        self.root: _Node = ({}, [])
        for token, data in enumerate(tokens):
            if not data or token in self.eos_ids:
                continue
            node = self.root
            for byte in data:
                node = node[0].setdefault(byte, ({}, []))
            node[1].append(token)


_Node = tuple[dict[int, Any], list[int]]
"""Children by byte, and the tokens that end here."""


class Grammar:
    """A language over a vocabulary. States are numbers; 0 is the beginning."""

    def __init__(self, start: Expression, vocabulary: Vocabulary) -> None:
        """Raises UsageError for a schema that no value can meet."""
        self._vocabulary = vocabulary
        self._states: list[frozenset[_Stack]] = []
        self._numbers: dict[frozenset[_Stack], int] = {}
        self._moves: list[dict[int, int]] = []
        self._masks: dict[int, Mask] = {}
        if self._number(_expanded([(start, None)])) == DEAD:
            raise UsageError("response_format: the schema refers to itself and allows no value")

    def _number(self, stacks: frozenset[_Stack]) -> int:
        if not stacks:
            return DEAD
        known = self._numbers.get(stacks)
        if known is None:
            known = self._numbers[stacks] = len(self._states)
            self._states.append(stacks)
            self._moves.append({})
        return known

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        moves = self._moves[state]
        known = moves.get(byte)
        if known is None:
            known = moves[byte] = self._number(_expanded(_consumed(self._states[state], byte)))
        return known

    def after(self, state: int, token: int) -> int:
        """The state after a token; DEAD where it is not allowed."""
        data = self._vocabulary.tokens[token] if token < len(self._vocabulary.tokens) else None
        if not data or token in self._vocabulary.eos_ids:
            return DEAD
        for byte in data:
            state = self.step(state, byte)
            if state == DEAD:
                break
        return state

    def may_end(self, state: int) -> bool:
        """Whether the answer may end here."""
        return None in self._states[state]

    def mask(self, state: int) -> Mask:
        """(vocab,) True for the tokens that may come next; the end of the answer is one of them."""
        known = self._masks.get(state)
        if known is None:
            known = np.zeros(self._vocabulary.size, bool)
            allowed: list[int] = list(self._vocabulary.eos_ids) if self.may_end(state) else []
            open_: list[tuple[int, _Node]] = [(state, self._vocabulary.root)]
            while open_:
                at, (children, ends) = open_.pop()
                allowed += ends
                for byte, child in children.items():
                    following = self.step(at, byte)
                    if following != DEAD:
                        open_.append((following, child))
            # Where the vocabulary lacks a byte that is needed, the answer ends, incomplete.
            known[allowed or list(self._vocabulary.eos_ids)] = True
            self._masks[state] = known
        return known


def _expanded(stacks: Sequence[_Stack]) -> frozenset[_Stack]:
    """Stacks whose top takes a byte (or that are empty), reached without taking one."""
    found: set[_Stack] = set()
    seen: set[_Stack] = set()
    todo = list(stacks)
    while todo:
        stack = todo.pop()
        if stack in seen:
            continue
        seen.add(stack)
        if stack is None:
            found.add(None)
            continue
        top, rest = stack
        if isinstance(top, bytes):
            if top:
                found.add(stack)
            else:
                todo.append(rest)
        elif isinstance(top, OneOf):
            found.add(stack)
        elif isinstance(top, InOrder):
            for part in reversed(top.parts):
                rest = (part, rest)
            todo.append(rest)
        elif isinstance(top, Either):
            todo += [(part, rest) for part in top.parts]
        elif isinstance(top, Repeated):
            todo += [rest, (top.part, stack)]
        else:
            todo.append((top.value, rest))
    return frozenset(found)


def _consumed(stacks: frozenset[_Stack], byte: int) -> list[_Stack]:
    left: list[_Stack] = []
    for stack in stacks:
        if stack is None:
            continue
        top, rest = stack
        if isinstance(top, bytes):
            if top[0] == byte:
                left.append((top[1:], rest))
        elif byte in top.bytes:
            left.append(rest)
    return left


@cache
def _no_constraint(size: int) -> Mask:
    return np.ones(size, bool)


class Matcher:
    """Where one answer stands in its grammar. Rows of a draft are looked at without moving."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.state = 0

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """How many drafted tokens the grammar allows, one after the other."""
        state = self.state
        for n, token in enumerate(draft):
            state = self.grammar.after(state, token)
            if state == DEAD:
                return n
        return len(draft)

    def masks(self, draft: Sequence[int]) -> list[Mask]:
        """Masks of the k+1 rows of a round: row i follows draft[:i].

        The row after a token that the grammar does not allow is not masked: that token has
        probability 0, so nothing is ever drawn from that row.
        """
        found = [self.grammar.mask(self.state)]
        state = self.state
        for token in draft:
            state = DEAD if state == DEAD else self.grammar.after(state, token)
            found.append(
                _no_constraint(len(found[0])) if state == DEAD else self.grammar.mask(state)
            )
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        """Move past committed tokens; the end of the answer leaves the state as it is."""
        for token in tokens:
            state = self.grammar.after(self.state, token)
            if state == DEAD:
                return
            self.state = state


def compile_format(response_format: Mapping[str, Any]) -> Expression | None:
    """The language of an OpenAI `response_format`, None for plain text.

    Raises UsageError, naming the part, for what is not covered (see the module's docstring).
    """
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return _OBJECT
    if kind != "json_schema":
        raise UsageError(
            f"response_format: type {kind!r} is not supported by the embedded engine; known are "
            "text, json_object and json_schema"
        )
    wrapper = response_format.get("json_schema")
    if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
        raise UsageError("response_format: json_schema.schema is missing")
    return compile_schema(wrapper["schema"], "response_format.json_schema.schema")


def compile_schema(schema: Any, where: str) -> Expression:
    """The language of a schema. Raises UsageError, naming the part, for what is not covered."""
    return _Compiler(schema).expression(schema, where)
