"""A sheet of answer pairs for people: arms hidden, order drawn, and verdicts read back with care.

The sheet holds no word of the arms; which answer stood first is in a key file that stays with the
run. What a model wrote is data of a stranger: in CSV nothing may be taken for a formula, in HTML
nothing for markup. On the way back every row must be there once, as it was shown: a verdict on a
text that somebody edited is a verdict on something else.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from speccheck.config import package_dir
from speccheck.errors import StoreError, UsageError
from speccheck.grading.blind import AnswerPair, Choice, draw, first_arm, preferred
from speccheck.records import Arm, Preference

COLUMNS = ("row", "task", "prompt", "answer_1", "answer_2", "verdict", "comment")
_TEXTS = ("prompt", "answer_1", "answer_2")
_CLIP = 30_000
"""Characters of a cell: spreadsheets cut at 32,767, without a word."""

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠\t\r\n|%]")
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a sheet as the key file has it."""

    row: str
    pair_id: str
    first: Arm
    task: str
    texts: Mapping[str, str]
    """What was shown, by column."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A sheet and its key. `sheet_id` names both, and begins each row's id."""

    sheet_id: str
    run_id: str
    rows: tuple[Row, ...]


def make_sheet(run_id: str, pairs: Sequence[AnswerPair], n: int, key: str) -> Sheet:
    """Draw at most `n` pairs that differ; the same key draws the same sheet.

    Raises:
        UsageError: no pair differs.
    """
    drawn = draw(pairs, n, key)
    if not drawn:
        same = f"all {len(pairs)} pairs of answers are equal" if pairs else "there are no answers"
        raise UsageError(f"nothing to review: {same}")
    sheet_id = hashlib.sha256(f"sheet\n{run_id}\n{key}\n{n}".encode()).hexdigest()[:6]
    rows = []
    for number, pair in enumerate(drawn, 1):
        first = first_arm(key, pair.pair_id)
        chat = "\n\n".join(f"[{m['role']}] {m['content']}" for m in pair.messages)
        shown = dict(zip(_TEXTS, (chat, *pair.shown(first)), strict=True))
        texts = {name: _printable(text) for name, text in shown.items()}
        rows.append(Row(f"{sheet_id}-{number:03d}", pair.pair_id, first, pair.task, texts))
    return Sheet(sheet_id, run_id, tuple(rows))


def _printable(text: str) -> str:
    """A text as a cell can hold it: control characters visible, half characters whole, not cut."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").encode(errors="replace").decode()
    text = "".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "\ufffd" for c in text)
    cut = len(text) - _CLIP
    return f"{text[:_CLIP]}\n[{cut} more characters]" if cut > 0 else text


# --- writing ------------------------------------------------------------------------------------


def sheet_csv(sheet: Sheet) -> str:
    """The sheet as CSV, every cell safe to open in a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    for row in sheet.rows:
        cells = (row.row, row.task, *(row.texts[name] for name in _TEXTS), "", "")
        writer.writerow([as_text(cell) for cell in cells])
    return out.getvalue()


def as_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula (OWASP, CSV injection)."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def sheet_html(sheet: Sheet) -> str:
    """The sheet as one page that works without a network and saves a CSV of verdicts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(package_dir("templates")),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A nonce: were something not escaped after all, it could not guess it and would not run.
    return made.get_template("review.html.j2").render(sheet=sheet, nonce=secrets.token_hex(16))


def write(path: Path, text: str, *, mode: int = 0o644, mark: str = "") -> None:
    """Write a sheet or a key.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.touch(mode)
        path.chmod(mode)
        path.write_text(mark + text, encoding="utf-8", newline="")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None


def key_path(out: Path, sheet_id: str) -> Path:
    """Where the key of a sheet is kept: with the run, never with the sheet."""
    return out / f"review-{sheet_id}.key.json"


def key_json(sheet: Sheet) -> str:
    """The key: which arm stood first in each row, and what was shown."""
    return json.dumps(asdict(sheet), indent=1, ensure_ascii=False) + "\n"


# --- reading ------------------------------------------------------------------------------------


def read_sheet(path: Path, out: Path, reviewer: str) -> tuple[Sheet, list[Preference]]:
    """Verdicts of a sheet that came back, joined with its key.

    A row without a verdict is let through (not judged); a missing, doubled, unknown or edited row
    is not.

    Args:
        path: CSV, as exported and filled in, or as the HTML page saves it.
        out: folder of the run, which has the key.
        reviewer: whose verdicts these are.

    Raises:
        UsageError: with each line that is wrong, at most eight of them.
    """
    filled = _read_csv(path)
    sheet = _key_of(path, out, filled)
    rows = {row.row: row for row in sheet.rows}
    problems: list[str] = []
    seen: dict[str, int] = {}
    given: list[Preference] = []
    for line, cells in filled:
        name = cells["row"]
        row = rows.get(name)
        if row is None:
            problems.append(f"line {line}: row {name!r} is not in sheet {sheet.sheet_id}")
            continue
        if name in seen:
            problems.append(f"line {line}: row {name} is already in line {seen[name]}")
            continue
        seen[name] = line
        edited = [c for c in _TEXTS if c in cells and not _same(cells[c], row.texts[c])]
        if edited:
            problems.append(
                f"line {line}: row {name}: {', '.join(edited)} was edited; a verdict only holds "
                "for the text that was shown"
            )
            continue
        choice = _choice(cells["verdict"])
        if choice is None:
            problems.append(
                f"line {line}: row {name}: verdict {cells['verdict']!r}; write 1, 2 or tie, or "
                "leave it empty"
            )
        elif choice:
            comment = " ".join(cells.get("comment", "").split())
            verdict = preferred(row.first, choice)
            given.append(Preference("human", reviewer, row.pair_id, verdict, comment))
    missing = [name for name in rows if name not in seen]
    if missing:
        some = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        problems.append(
            f"{len(missing)} rows of sheet {sheet.sheet_id} are missing ({some}); put them back, "
            "their verdicts may stay empty"
        )
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        tail = [f"and {more} more"] if more > 0 else []
        raise UsageError("\n".join(f"{path}: {p}" for p in problems[:_MOST_PROBLEMS] + tail))
    if not given:
        raise UsageError(f"{path}: no row has a verdict yet; write 1, 2 or tie in that column")
    return sheet, given


def _read_csv(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line, cells by column) of each row; comma, semicolon or tab between cells."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8; save it as 'CSV UTF-8'") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        names = [name.strip().casefold() for name in next(reader, [])]
        absent = [name for name in ("row", "verdict") if name not in names]
        if absent:
            raise UsageError(
                f"{path}: the first line must name the columns row and verdict; it has "
                f"{', '.join(names) or 'nothing'}"
            )
        found = []
        for cells in reader:
            if any(cell.strip() for cell in cells):
                padded = [*cells, *[""] * (len(names) - len(cells))]
                values = dict(zip(names, padded, strict=False))
                found.append((reader.line_num, values | {"row": values["row"].strip()}))
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    if not found:
        raise UsageError(f"{path}: no rows in it")
    return found


def _key_of(path: Path, out: Path, filled: Sequence[tuple[int, Mapping[str, str]]]) -> Sheet:
    """The key of the sheet that most rows say they are of."""
    named = [match.group(1) for _, c in filled if (match := re.match(r"([0-9a-f]{6})-", c["row"]))]
    if not named:
        raise UsageError(f"{path}: no row id of a sheet in column row (like 3f09ab-001)")
    sheet_id = max(sorted(set(named)), key=named.count)
    where = key_path(out, sheet_id)
    try:
        value: Any = json.loads(where.read_text(encoding="utf-8"))
        rows = tuple(Row(**row | {"first": Arm(row["first"])}) for row in value["rows"])
        return Sheet(value["sheet_id"], value["run_id"], rows)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: sheet {sheet_id} has no key in {out} ({where.name}); give the --out of the "
            "run that it was exported from"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where}: is no key of a sheet ({error})") from None


def _same(cell: str, shown: str) -> bool:
    """Whether a cell is what was shown, but for blanks and line ends, which spreadsheets change."""
    known = {" ".join(text.split()) for text in (shown, as_text(shown))}
    return " ".join(cell.split()) in known


_CHOICES: dict[str, Choice | Literal[""]] = {"": "", "1": "1", "2": "2", "tie": "tie"}


def _choice(cell: str) -> Choice | Literal[""] | None:
    """1, 2, tie or empty; None for anything else. Spreadsheets may write 1 as 1.0."""
    return _CHOICES.get(cell.strip().casefold().removesuffix(".0"))
