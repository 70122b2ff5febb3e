"""What a person sees while a run goes on, and the tables at its end.

Progress goes to standard error, data to standard output, so that `--json` can be piped. On a
terminal there is one live line per phase with counts per arm and the time left; elsewhere (CI) a
plain line at the start, every ten seconds and at the end. Colour only on a terminal, and never as
the only carrier of a verdict. Everything that a model or a user wrote is printed without its
control characters.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from speccheck.records import Action, Answer, Arm, Decision, Receipt, Stage, Verdict
from speccheck.records import Outcome as RequestOutcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from speccheck.outcome import Outcome, WrittenPacket

PLAIN_EVERY_S = 10.0

MARKS = {
    Verdict.PASS: "✓",
    Verdict.INCONCLUSIVE: "?",
    Verdict.ERROR: "!",
    Verdict.FAIL: "✗",
}

_STYLES = {
    Verdict.PASS: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.ERROR: "red",
    Verdict.FAIL: "red",
}

ACTION_WORDS = {
    Action.PROMOTE: "✓ promote",
    Action.HOLD: "– hold, target-only",
    Action.FALL_BACK: "✗ fall back",
    Action.INCONCLUSIVE: "? inconclusive",
}


def printable(text: str) -> str:
    """Text without control characters, so that an answer cannot drive the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


class Reporter:
    """Progress of a run on standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._label = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = 0.0
        self._said = 0.0

    def line(self, text: str) -> None:
        """One plain line, above the live line if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
            return
        try:
            print(printable(text), file=self._stream, flush=True)
        except BrokenPipeError:  # `2>&1 | head`: nobody reads on, which must not end the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def stage(self, stage: Stage, text: str) -> None:
        """The heading of a stage."""
        self.line(f"\n{stage.value}: {text}")

    @contextmanager
    def phase(self, label: str, total: int) -> Iterator[None]:
        """A part of a stage in which `total` requests are sent."""
        self._label, self._total = label, total
        self._counts = Counter()
        self._started = self._said = time.monotonic()
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("  {task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[arms]}"),
                TimeRemainingColumn(compact=True),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=total, arms="")
            self._bar.start()
        else:
            self.line(f"  {label}: {total} requests")
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            self.line(f"  {label}: {self._summary()}, {time.monotonic() - self._started:.1f} s")

    def receipt(self, receipt: Receipt) -> None:
        """Count one finished request."""
        self._counts[receipt.arm] += 1
        self._counts["done"] += 1
        if receipt.outcome != RequestOutcome.OK:
            self._counts["bad"] += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._counts["done"], arms=self._arms())
        elif not self._live and time.monotonic() - self._said > PLAIN_EVERY_S:
            self._said = time.monotonic()
            self.line(f"  {self._label}: {self._counts['done']}/{self._total} {self._arms()}")

    def _arms(self) -> str:
        words = [
            f"{name} {self._counts[arm]}"
            for arm, name in ((Arm.TARGET_ONLY, "target"), (Arm.SPECULATIVE, "spec"))
            if self._counts[arm]
        ]
        if self._counts["bad"]:
            words.append(f"not ok {self._counts['bad']}")
        return " · ".join(words)

    def _summary(self) -> str:
        if not self._counts["done"]:
            return "nothing left to send (already measured)" if self._total == 0 else "none sent"
        return f"{self._counts['done']} done ({self._arms()})"


def outcome_page(ended: Outcome, written: WrittenPacket | None) -> None:
    """What came of a command: stages, then each route with its decision and what made it.

    Printed in one piece by ourselves: where the reader has left, rich would exit with a code of
    its own, which here would be a verdict.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as page:
        _outcome(console, ended, written)
    print("\n".join(line.rstrip(" ") for line in page.get().split("\n")), end="")


def _outcome(console: Console, ended: Outcome, written: WrittenPacket | None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print()
    for name, result in ended.stages.items():
        mark = f"{MARKS[result.verdict]} {name}: {result.verdict.word}"
        console.print(Text(mark, style=_STYLES[result.verdict]))
        if not ended.decisions or name == Stage.FIXTURE:
            for reason in result.evidence["reasons"]:
                console.print(Padding(Text(printable(reason)), (0, 0, 0, 4)))
    for decision in ended.decisions:
        console.print()
        words = _passed_words(decision, ended)
        console.print(Text(f"{printable(decision.route)}: ").append(words, style="bold"))
        console.print(Padding(Text(printable(decision.reason)), (0, 0, 0, 2)))
        if decision.scope:
            console.print(Padding(Text(printable(decision.scope)), (0, 0, 0, 2)))
    console.print()
    if written is not None:
        for path in written.files.values():
            console.print(Text(f"wrote {path}"))
        if written.missing:
            console.print(Text(f"! packet INCOMPLETE: no {', '.join(written.missing)} view"))
    code = ended.exit_code
    console.print(Text(f"exit code {int(code)}: {code.meaning}"))


def _passed_words(decision: Decision, ended: Outcome) -> str:
    """A decision in words; a stage on its own passes a route on and promotes nothing."""
    if (
        decision.action is Action.PROMOTE
        and len(ended.stages) == 1
        and (decision.stage != Stage.CANARY)
    ):
        return f"✓ passes {decision.stage}"
    return ACTION_WORDS[decision.action]


def plan_page(plan: Mapping[str, Any]) -> None:
    """What a run would send (`--dry-run`), stage by stage."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"run {plan['run_name']}: {plan['prompts']} prompts, {plan['corpus']}"))
    for stage in plan["stages"]:
        console.print(Text(f"{stage['stage']}: {stage['requests']} requests; {stage['note']}"))
    each = "requests more, each time servers are started"
    console.print(Text(f"warm-up: {plan['warm_up']} {each}"))
    for route in plan["routes"]:
        console.print(Text(f"route {route['route']}: {route['prompts']} prompts"))
        for rule, limit in route["rules"].items():
            console.print(Text(f"    {rule} {limit:g}"))


def receipt_table(receipts: Sequence[Receipt], *, total: int) -> None:
    """One line per receipt, 80 columns wide."""
    print(f"{'receipt':<16} {'arm':<6} {'stage/phase':<22} {'out':>4} {'acc':>7} {'ms':>6} outcome")
    for r in receipts:
        arm = "target" if r.arm == Arm.TARGET_ONLY else "spec"
        accepted = "-" if r.accepted_tokens is None else f"{r.accepted_tokens}/{r.proposed_tokens}"
        e2e = "-" if r.e2e_s is None else f"{r.e2e_s * 1e3:.0f}"
        tokens = "-" if r.completion_tokens is None else str(r.completion_tokens)
        phase = f"{r.stage}/{r.phase}"
        print(
            f"{r.receipt_id[:16]:<16} {arm:<6} {phase[:22]:<22} {tokens:>4} {accepted:>7} {e2e:>6} "
            f"{r.outcome}"
        )
    if total > len(receipts):
        print(f"{len(receipts)} of {total} receipts; --limit shows more", file=sys.stderr)


def receipt_page(receipt: Receipt, answer: Answer | None) -> None:
    """Every field of a receipt, then its answer where texts were kept."""
    for name, value in asdict(receipt).items():
        shown = "not known" if value is None else printable(str(value))
        print(f"{name:<22} {shown}")
    if answer is not None:
        print(f"\n{printable(answer.text)}")
