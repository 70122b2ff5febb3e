"""View to files: packet.html, packet.md, packet.json and their checksums.

The one place that rounds. A number is cut to three digits, or to as many as it takes to keep it on
its side of its limit: 0.5499 is shown as 0.5499 beside a limit of 0.55, and a share that is not
zero is never shown as zero. The one place that escapes, too: every value that a template prints
passes `_for_html` or `_for_markdown`, so that a template cannot forget it. An unknown name in a
template raises (StrictUndefined).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccheck import charts
from speccheck.config import package_dir
from speccheck.errors import StoreError
from speccheck.packet.view import Chart, Figure, Interval, Missing, PacketView, Sentence
from speccheck.records import to_json

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

DIGITS, LIMIT_DIGITS = 3, 4
SHOWN_CASES, SHOWN_CHARS = 40, 4000
"""What a page shows of very many or very long texts; packet.json has all of them."""
BRIEF_CHARS = 400
SMALL_P = 1e-6
"""A p-value under this is printed so: further digits say nothing."""
CHECKSUMS = "packet.sha256"


def render(view: PacketView, out_dir: Path) -> dict[str, Path]:
    """Write the packet; the paths by file name.

    packet.sha256 lists the other files in the form that `sha256sum -c` reads.

    Raises:
        StoreError: a file cannot be written.
    """
    texts = {
        "packet.html": _page("packet.html.j2", view, _for_html),
        "packet.md": _page("packet.md.j2", view, _for_markdown),
        "packet.json": packet_json(view),
    }
    files = {name: text.encode() for name, text in texts.items()}
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    files[CHECKSUMS] = "".join(sums).encode()
    paths = {}
    for name, data in files.items():
        path = out_dir / name
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written ({error.strerror}); the receipts are safe, give "
                "another folder or make room and render the packet again"
            ) from error
        paths[name] = path
    return paths


def packet_json(view: PacketView) -> str:
    """The view as JSON: unrounded, keys in the order of the page."""
    plain = _replace_surrogates(to_json(view))
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def packet_json_schema() -> dict[str, Any]:
    """The JSON Schema of packet.json, read off the view models."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(PacketView).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


# --- templates ----------------------------------------------------------------------------------


def _page(template: str, view: PacketView, finalize: Callable[[Any], Any]) -> str:
    return environment(finalize).get_template(template).render(packet=view, shown_cases=SHOWN_CASES)


def environment(finalize: Callable[[Any], Any]) -> jinja2.Environment:
    """Jinja as packets use it: strict, escaping, with the filters that round."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(package_dir("templates")),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "figure": figure,
        "interval": interval,
        "value": _point,
        "bounds": bounds,
        "limit": limit_text,
        "count": _thousands,
        "sentence": _sentence,
        "clip": _clip,
        "brief": _brief,
        "chart": _chart,
        "fence": _fence,
    }
    made.tests["missing"] = lambda value: isinstance(value, Missing)
    made.tests["exact"] = lambda value: value.low == value.high == value.value
    return made


def _for_html(value: Any) -> Any:
    """What a template prints, made visible; Jinja escapes it afterwards."""
    return visible(value) if type(value) is str else value


def _for_markdown(value: Any) -> Any:
    """What a template prints, as Markdown text that means nothing to Markdown."""
    from markupsafe import Markup

    if type(value) is not str:
        return value
    text = visible(value).replace("&", "&amp;")
    # A band such as <64 or >=4096, or a name_with_underscores, means nothing to Markdown either,
    # and who reads the file in a terminal is spared the escapes.
    text = re.sub(r"<(?![\d=])", "&lt;", text)
    text = re.sub(r"(?<!\w )>|>(?![\d=])", "&gt;", text)
    text = re.sub(r"([\\`*\[\]{}|#~!$^]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", text)
    text = re.sub(r"(https?):", r"\1\\:", text)  # no links made of what a model wrote
    return Markup(re.sub(r"\s*\n\s*", " ", text))  # noqa: S704 (escaped in the lines above)


_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters, invisible ones, those that turn the direction of text, lone surrogates."""


def visible(text: str) -> str:
    """Text in which nothing hides: ESC becomes ␛, a direction override becomes ⟨U+202E⟩."""

    def name(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code < 0x20:
            return chr(0x2400 + code)
        return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"

    return _HIDDEN.sub(name, text.replace("\r\n", "\n"))


def _replace_surrogates(value: Any) -> Any:
    """Lone surrogates, which no UTF-8 file can hold, as U+FFFD."""
    if isinstance(value, str):
        return (
            value.encode("utf-8", "replace").decode()
            if value.isascii()
            else re.sub("[\ud800-\udfff]", "\ufffd", value)
        )
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    return value


def _chart(chart: Chart) -> Markup:
    from markupsafe import Markup

    shown = _visible_in(chart)
    picture = charts.draw(shown.picture, shown.name, shown.title, shown.description)
    return Markup(picture)  # noqa: S704 (matplotlib escapes the labels, `charts` the rest)


def _visible_in(value: Any) -> Any:
    """A record with every text in it made visible: matplotlib stumbles over lone surrogates."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, tuple):
        return tuple(_visible_in(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _visible_in(getattr(value, name)) for name in names})
    return value


def _fence(text: str) -> Markup:
    """A text as a Markdown code block, fenced by more backticks than it holds in a row."""
    from markupsafe import Markup

    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{visible(text)}\n{fence}")  # noqa: S704 (inside the fence)


def _clip(text: str) -> str:
    """A very long text, cut, with what was cut said."""
    if len(text) <= SHOWN_CHARS:
        return text
    left = len(text) - SHOWN_CHARS
    return f"{text[:SHOWN_CHARS]}\n[{left:,} more characters in packet.json]"


def _brief(text: str) -> str:
    """A reason for the verdict bar, which a long one must not push off the screen."""
    return text if len(text) <= BRIEF_CHARS else f"{text[:BRIEF_CHARS]}… (all of it below)"


# --- numbers ------------------------------------------------------------------------------------


def rounded(value: float, limits: Iterable[float] = (), *, shift: int = 0) -> str:
    """Three digits, or as many as keep the number on its side of each limit; times 10**shift.

    >>> rounded(0.5499, [0.55]), rounded(0.5511, [0.55]), rounded(0.31249)
    ('0.5499', '0.551', '0.312')
    >>> rounded(0.99996, [0, 1], shift=2)
    '99.996'
    """
    scaled = Decimal(repr(float(value))).scaleb(shift)
    sides = [Decimal(repr(float(limit))).scaleb(shift) for limit in limits]
    shown = scaled
    for digits in range(DIGITS, 20):
        places = max(0, digits - 1 - scaled.adjusted()) if scaled else 0
        shown = scaled.quantize(Decimal(1).scaleb(-places))
        if all(shown.compare(side) == scaled.compare(side) for side in sides):
            break
    return f"{shown:,f}".replace("-", "−")


def limit_text(limit: float, unit: str, value: Interval | Missing | None = None) -> str:
    """A limit in four digits, or as many as keep it on its side of what is printed beside it.

    Rules are short (0.55), but what they turn into need not be: a speed-up of at least 1.05 is a
    ratio of at most 0.952380952...

    >>> limit_text(1 / 1.05, "ratio"), limit_text(0.055, "share"), limit_text(12345, "count")
    ('0.9524', '5.5 %', '12,345')
    """
    shift, ending = _scale(limit, unit)
    number = _shown_limit(limit, value).scaleb(shift).normalize()
    return f"{number:,f}{ending}".replace("-", "−")


def _shown_limit(limit: float, value: Interval | Missing | None) -> Decimal:
    exact = Decimal(repr(float(limit)))
    beside = (value.value, value.low, value.high) if isinstance(value, Interval) else ()
    sides = [Decimal(repr(float(x))) for x in beside if x is not None]
    shown = exact
    for digits in range(LIMIT_DIGITS, 20):
        places = max(0, digits - 1 - exact.adjusted()) if exact else 0
        shown = exact.quantize(Decimal(1).scaleb(-places))
        if all(side.compare(shown) == side.compare(exact) for side in sides):
            break
    return shown


def figure(value: Any, limit: float | None = None) -> str:
    """A table cell: a figure with its unit, a count, a text, or why it is missing."""
    if isinstance(value, Missing):
        return f"not measured: {value.not_measured}"
    if isinstance(value, Figure):
        return _number(value.value, value.unit, () if limit is None else (limit,))
    return _thousands(value) if isinstance(value, int) else str(value)


def interval(value: Interval | Missing, limit: float | None = None) -> str:
    """`value [low, high]`, each on its side of the limit, as it is and as it is printed."""
    from markupsafe import Markup

    if isinstance(value, Missing):
        return f"not measured: {value.not_measured}"
    text = _point(value, limit)
    if not value.low == value.high == value.value:
        text += f" {bounds(value, limit)}"
    return Markup(text)  # noqa: S704 (numbers and units: brackets need no escape in Markdown)


def _point(value: Interval, limit: float | None = None) -> str:
    return _number(value.value, value.unit, _limits_beside(value, limit))


def bounds(value: Interval, limit: float | None = None) -> str:
    """`[low, high]`; a unit that stands behind the value is not said again."""
    unit = "" if value.unit == "s" else _scale(value.value, value.unit)[1]
    limits = _limits_beside(value, limit)
    low, high = (
        "no bound" if bound is None else _number(bound, value.unit, limits).removesuffix(unit)
        for bound in (value.low, value.high)
    )
    return f"[{low}, {high}]"


def _limits_beside(value: Interval, limit: float | None) -> tuple[float, ...]:
    return () if limit is None else (limit, float(_shown_limit(limit, value)))


def _number(value: float, unit: str, beside: Iterable[float] = ()) -> str:
    limits = [*beside]
    match unit:
        case "p" if 0 < value < SMALL_P:
            return f"under {SMALL_P:.6f}"
        case "share" | "p":
            limits += [0, 1]
        case "ratio":
            limits.append(1)
        case "count":
            if float(value).is_integer():
                return _thousands(int(value))
        case "clock":
            return f"{value:.1f} s"
    shift, ending = _scale(value, unit)
    return rounded(value, limits, shift=shift) + ending


def _scale(value: float, unit: str) -> tuple[int, str]:
    """Powers of ten to shift a number by, and what stands behind it."""
    match unit:
        case "s":
            return (0, " s") if abs(value) >= 1 else (3, " ms")
        case "ms" | "nats":
            return 0, f" {unit}"
        case "share":
            return 2, " %"
        case "bytes":
            return -6, " MB"
        case "per_s":
            return 0, " /s"
        case _:
            return 0, ""


def _thousands(value: int) -> str:
    return f"{value:,}"


def _sentence(parts: Sentence) -> str:
    return "".join(part if isinstance(part, str) else figure(part) for part in parts)
