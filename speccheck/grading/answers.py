"""What an answer looks like, whatever its task: does it refuse, in which language, in which form.

Rules of thumb over the text, the same for both arms, so that a change between the arms shows where
nothing else grades the answer. They are for comparing two answers to one prompt and do not pretend
to understand either.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

_HELP = (
    r"(?:help|assist|provide|comply|do (?:that|this|so)|support|create|write|give|share|answer"
    r"|fulfil+|engage|offer|discuss|generate|produce|participate|recommend|advise|continue|teach"
    r"|explain|describe|tell|show|proceed|encourage|facilitate)"
)
_CANNOT = (
    r"(?:can(?:'|no)t|can not|won't|will not|could(?:n't| not)|(?:am|'m) (?:not able|unable) to"
    r"|(?:am|'m) not (?:going|willing|allowed|permitted|comfortable) (?:to )?"
    r"|must (?:decline|refuse)(?: to)?|(?:have|need) to (?:decline|refuse)(?: to)?"
    r"|decline to|refuse to|(?:would|'d) rather not)"
)
_REFUSALS = re.compile(
    rf"\bi (?:\w+ )?{_CANNOT} (?!wait\b|stress\b)(?:\w+ ){{0,2}}?{_HELP}"
    rf"|\bi{_CANNOT} (?:\w+ ){{0,2}}?{_HELP}"
    r"|\b(?:not|isn't) something (?:that )?i (?:can|am able to|will)\b"
    r"|\bi (?:must |have to |need to )?(?:respectfully )?(?:decline|refuse)\b"
    r"|\b(?:unable|not able) to (?:help|assist|comply)"
    r"|\bagainst my (?:\w+ )?(?:guidelines|policy|policies|principles|programming)"
    r"|\bas an ai(?: \w+){0,3},? i (?:can't|cannot|won't|will not|do not|don't)"
    r"|\bich (?:kann|darf|werde) (?:\w+ ){0,4}?nicht (?:\w+ ){0,2}?"
    r"(?:helfen|weiterhelfen|unterstützen|beantworten|geben|erfüllen)"
    r"|\bje (?:ne )?(?:peux|suis) pas (?:\w+ ){0,3}?(?:aider|répondre|fournir|en mesure)"
    r"|\bno (?:puedo|me es posible) (?:\w+ )?(?:ayudar|proporcionar|responder|cumplir)"
    r"|(?:无法|不能|不可以)(?:为您|为你|向您|向你)?(?:提供|帮助|协助|回答|满足)"
    r"|(?:お手伝い|お答え|対応|提供)(?:する(?:こと)?(?:は|が)?)?でき(?:ません|かねます)"
)


def refuses(text: str) -> bool:
    """Whether an answer declines the request, by the phrases that models use at its beginning.

    An apology alone is none ("We are sorry that your parcel is late"). English, and the commonest
    phrases of German, French, Spanish, Chinese and Japanese.
    """
    start = unicodedata.normalize("NFKC", text.strip()[:400]).casefold()
    start = re.sub(r"[*_`#]", "", start.replace("’", "'").replace("ʼ", "'"))
    return _REFUSALS.search(" ".join(start.split())) is not None


# --- language -----------------------------------------------------------------------------------

_COMMON = {
    "en": "the of and to in is that it for was with as on be at by this have from or are you not",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch",
    "fr": "de la le et les des en un du une que est pour qui dans par pas sur au avec à vous elle",
    "es": "de la que el en y los se del las un por con no una su para es al lo como más pero",
    "it": "di che e la il un a per è in una sono mi ho non ma lo ha le si con come della",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como",
    "nl": "de en van ik te dat die in een hij het niet zijn is was op aan met als voor had er",
}
_STOPWORDS = {name: frozenset(words.split()) for name, words in _COMMON.items()}

_SCRIPTS = (
    ("kana", "\u3040", "\u30ff"),
    ("han", "\u4e00", "\u9fff"),
    ("hangul", "\uac00", "\ud7af"),
    ("cyrillic", "\u0400", "\u04ff"),
    ("arabic", "\u0600", "\u06ff"),
    ("hebrew", "\u0590", "\u05ff"),
    ("greek", "\u0370", "\u03ff"),
    ("devanagari", "\u0900", "\u097f"),
    ("thai", "\u0e00", "\u0e7f"),
    ("latin", "A", "\u024f"),
)
_LANGUAGE_OF_SCRIPT = {"kana": "ja", "han": "zh", "hangul": "ko"}
_FEWEST_WORDS = 12


def language(text: str) -> str | None:
    """Language (or script, where that is all that shows) of a text; None where it is too short.

    >>> language("The order is on its way to you and it should be there by the end of the week.")
    'en'
    """
    prose = re.sub(r"```.*?(?:```|\Z)", " ", text, flags=re.DOTALL)
    scripts = Counter(
        next((name for name, low, high in _SCRIPTS if low <= c <= high), "other")
        for c in prose[:4000]
        if c.isalpha()
    )
    total = sum(scripts.values())
    if not total:
        return None
    script, count = scripts.most_common(1)[0]
    if script in ("kana", "han"):
        script = "kana" if scripts["kana"] >= 0.1 * (scripts["kana"] + scripts["han"]) else "han"
        return _LANGUAGE_OF_SCRIPT[script] if total >= _FEWEST_WORDS else None
    if script != "latin":
        return _LANGUAGE_OF_SCRIPT.get(script, script) if count >= 3 * _FEWEST_WORDS else None
    words = re.findall(r"[^\W\d_]+", prose.casefold())
    if len(words) < _FEWEST_WORDS:
        return None
    hits = sorted(
        ((sum(word in known for word in words), name) for name, known in _STOPWORDS.items()),
        reverse=True,
    )
    (best, name), (second, _) = hits[:2]
    return name if best >= 0.1 * len(words) and best >= second + 2 else None


# --- form ---------------------------------------------------------------------------------------

_FORMS = (
    ("code block", re.compile(r"(?m)^[ \t]*```")),
    ("headings", re.compile(r"(?m)^#{1,6} \S")),
    ("table", re.compile(r"(?m)^\|.*\|[ \t]*$")),
    ("bullets", re.compile(r"(?m)^[ \t]*[-*•] \S")),
    ("numbered list", re.compile(r"(?m)^[ \t]*\d{1,2}[.)] \S")),
)


def structure_of(text: str) -> str:
    r"""The outer form of an answer in words: empty, JSON object, bullets + table, prose ...

    >>> structure_of("- one\n- two")
    'bullets'
    """
    whole = text.strip()
    if not whole:
        return "empty"
    if whole[0] in "{[":
        try:
            value = json.loads(whole)
        except (ValueError, RecursionError):
            return "broken JSON"
        return "JSON object" if isinstance(value, dict) else "JSON array"
    found = [name for name, pattern in _FORMS if pattern.search(text)]
    return " + ".join(found) or "prose"


def repeats(text: str) -> bool:
    """Whether an answer runs in circles: over half of its runs of four words were there before.

    For languages without blanks runs of eight characters are taken. Short answers never do.
    """
    words: list[str] | str = text.split()
    size = 4
    if len(words) < 40 < len(text) / 5:
        words, size = text, 8
    runs = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return len(words) >= 40 and len(set(runs)) < 0.5 * len(runs)


@dataclass(frozen=True, slots=True)
class Seen:
    """What shows of one complete answer. None: cannot be told."""

    refuses: bool
    empty: bool
    repeats: bool
    language: str | None
    structure: str
    words: int


def see(text: str) -> Seen:
    """Look at one answer."""
    return Seen(
        refuses=refuses(text),
        empty=not text.strip(),
        repeats=repeats(text),
        language=language(text),
        structure=structure_of(text),
        words=len(text.split()),
    )
