"""The README is under test: the exit codes, the commands and the rules it names are the real ones.

`python tests/test_docs.py` writes the generated parts into the README.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from speccheck.cli import cli
from speccheck.errors import EngineError, ExitCode, SpeccheckError, StoreError, UsageError

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- exit codes: generated -->", "<!-- end of exit codes -->"


def exit_code_table() -> str:
    """The table as Markdown, from the code."""
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    return "\n".join([BEGIN, "| code | meaning |", "|---:|---|", *rows, END])


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda c: str(c.value))
def test_each_exit_code_stands_in_the_readme(code: ExitCode) -> None:
    """README and code say the same about each exit code."""
    assert f"| {code.value} | {code.meaning} |" in README.read_text(encoding="utf-8")


def test_the_readme_table_has_no_other_rows() -> None:
    """The generated part of the README is exactly what the code generates."""
    text = README.read_text(encoding="utf-8")
    assert exit_code_table() in text, "run: python tests/test_docs.py"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpeccheckError, ExitCode.COULD_NOT_JUDGE),
        (UsageError, ExitCode.USAGE),
        (EngineError, ExitCode.COULD_NOT_JUDGE),
        (StoreError, ExitCode.COULD_NOT_JUDGE),
    ],
)
def test_each_error_has_its_exit_code(error: type[SpeccheckError], code: ExitCode) -> None:
    """The error family maps to the table."""
    assert error("x").exit_code is code


def test_every_command_the_readme_names_exists() -> None:
    """`speccheck NAME` in the README is a command, and each command's help has an example."""
    named = set(re.findall(r"speccheck ([a-z]+)\b", README.read_text(encoding="utf-8")))
    known = set(cli.commands)
    used = {name for name in named if name in known}
    assert used, "the README shows no command"
    assert named - known <= PROSE, f"not a command: {named - known - PROSE}"


PROSE: set[str] = set()


def help_pages(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The path of every command and group."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from help_pages(below, (*path, name))


@pytest.mark.parametrize("path", list(help_pages(cli, ())), ids=" ".join)
def test_help_is_whole_at_80_columns(path: tuple[str, ...]) -> None:
    """No line is wider, no summary of a command is cut, and every option says what it is for."""
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    with click.Context(command, info_name=" ".join(("speccheck", *path))) as context:
        context.terminal_width = 80
        lines = command.get_help(context).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines[1:] if line.endswith("...")] == []
    silent = [p.opts for p in command.params if isinstance(p, click.Option) and not p.help]
    assert silent == []


def leaves() -> list[tuple[str, str]]:
    """(name, help) of every command that does something."""
    found = []
    for name, command in cli.commands.items():
        below = getattr(command, "commands", None)
        if below:
            found += [(f"{name} {n}", c.help or "") for n, c in below.items()]
        else:
            found.append((name, command.help or ""))
    return found


@pytest.mark.parametrize(("name", "text"), leaves(), ids=lambda v: v[:20])
def test_each_command_shows_an_example(name: str, text: str) -> None:
    """The help of each command ends with an example that names the command."""
    assert "Example:" in text
    assert f"speccheck {name}" in text


if __name__ == "__main__":
    old = README.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    README.write_text(pattern.sub(lambda _: exit_code_table(), old), encoding="utf-8")
