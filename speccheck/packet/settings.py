"""Configuration as lines of text, without secrets.

Stages keep secrets out already; this is the last gate before a file that gets mailed around.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speccheck.config import SECRET_NAME
from speccheck.packet.view import Setting
from speccheck.records import to_json


def setting_lines(values: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Nested settings as dotted keys with their values as text."""
    return tuple(Setting(key, setting_text(key, value)) for key, value in _flat(values))


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as (dotted key, value) pairs, in their own order."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def setting_text(key: str, value: Any) -> str:
    """One value as text, withheld if its name says that it is a secret.

    `api_key_env` names a variable and may be shown.
    """
    if SECRET_NAME.search(key) and not key.endswith("_env"):
        return "[withheld]"
    if isinstance(value, str):
        return without_userinfo(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return " ".join(_arguments(value))
    return json.dumps(to_json(value), ensure_ascii=False, sort_keys=True)


def _arguments(words: Sequence[str]) -> Iterable[str]:
    """A command line with the values of secret options withheld."""
    hide = False
    for word in words:
        option, equals, _ = word.partition("=")
        secret = option.startswith("-") and SECRET_NAME.search(option) is not None
        if secret and equals:
            yield f"{option}=[withheld]"
        else:
            yield "[withheld]" if hide else without_userinfo(word)
        hide = secret and not equals


def without_userinfo(text: str) -> str:
    """URLs without the name and password that may stand in them."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1[withheld]@", text)
