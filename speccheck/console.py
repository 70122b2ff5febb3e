"""What a person sees while a run goes on, and the tables at its end.

Progress goes to standard error, data to standard output, so that `--json` can be piped. On a
terminal there is one live line per phase with counts per arm and the time left; elsewhere (CI) a
plain line at the start, every ten seconds and at the end. Colour only on a terminal, and never as
the only carrier of a verdict. Everything that a model or a user wrote is printed without its
control characters.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from speccheck.records import Action, Answer, Arm, Decision, Receipt, Stage, Verdict
from speccheck.records import Outcome as RequestOutcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from speccheck.canary import RouteStatus
    from speccheck.errors import ExitCode
    from speccheck.grading.blind import PreferenceSummary
    from speccheck.matrix import Matrix, MatrixRow
    from speccheck.replay.distributions import Result as BatteryResult
    from speccheck.results import Outcome, WrittenPacket
    from speccheck.sweep.cells import ArmFigures, Cell, Load
    from speccheck.sweep.rounds import Result as SweepResult

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
        if receipt.outcome != RequestOutcome.OK:
            self._counts["bad"] += 1
        self.step()

    def step(self) -> None:
        """Count one thing done, and show it."""
        self._counts["done"] += 1
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
        arms = self._arms()
        return f"{self._counts['done']} done" + (f" ({arms})" if arms else "")


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
    for one in ended.preferences:
        console.print(Text(preference_line(one)))
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


def preference_line(one: PreferenceSummary) -> str:
    """What one judge or reviewer preferred, in one line."""
    e = one.difference
    unclear = f", {one.unclear} unclear" if one.unclear else ""
    interval = ""
    if one.n:
        low, high = 100 * e.low, 100 * e.high
        interval = f"; loss {100 * e.value:+.1f} points ({low:+.1f} to {high:+.1f}, n {e.n})"
    return printable(
        f"{one.source} {one.who} (information only): {one.target_only} prefer target-only, "
        f"{one.speculative} speculative, {one.ties} ties{unclear}{interval}"
    )


_COHORT_MARKS = {
    "speculate": "✓ speculate",
    "target_only": "– target-only",
    "inconclusive": "? undecided",
}


def matrix_page(run_id: str, found: Matrix) -> None:
    """The workload decision matrix: what to do per cohort, the number with its interval, why."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def say(text: str, *, indent: int = 0, hang: int = 0, style: str = "") -> None:
        width = max(console.width - indent, 20)
        lines = textwrap.wrap(printable(text), width, subsequent_indent=" " * hang) or [""]
        for line in lines:
            console.print(Text(" " * indent + line, style=style))

    with console.capture() as page:
        say(
            f"{run_id}: what to do per cohort. Ratios are speculative over target-only, with their"
            " interval: under 1 is faster."
        )
        for route in sorted({row.cohort["route"] for row in found.rows}):
            mine = [row for row in found.rows if row.cohort["route"] == route]
            console.print()
            say(f"{route}: {_counted_verdicts(mine)}", hang=2, style="bold")
            for i, row in enumerate(mine):
                k = f", k {row.k}" if row.verdict == "speculate" else ""
                name = row.name.removeprefix(f"{route}, ")
                if row.in_flight is not None and row.cohort["concurrency"] != str(row.in_flight):
                    name += f", {row.in_flight} in flight"
                say(f"{_COHORT_MARKS[row.verdict]}{k}: {name} ({_evidence_words(row)})", hang=4)
                # Cohorts that stand together and have the same reason have it once.
                if i + 1 == len(mine) or mine[i + 1].why != row.why:
                    say(row.why, indent=6)
        for title, lines in (("Beware", found.warnings), ("Do", found.advice)):
            if lines:
                console.print()
            for line in lines:
                say(f"{title}: {line}", hang=4)
        console.print()
        say("next: speccheck matrix --propose (an eligibility policy, as a diff)")
    print("\n".join(line.rstrip(" ") for line in page.get().split("\n")), end="")


def _counted_verdicts(rows: Sequence[MatrixRow]) -> str:
    """How many cohorts, and what share of the route's requests, have which verdict."""
    total = sum(row.share for row in rows)
    parts = []
    for verdict, mark in _COHORT_MARKS.items():
        mine = [row for row in rows if row.verdict == verdict]
        if mine:
            share = sum(row.share for row in mine) / total
            parts.append(f"{len(mine)} {mark[2:]} ({share:.0%} of requests)")
    return ", ".join(parts)


def _evidence_words(row: MatrixRow) -> str:
    n = (
        f"{row.n_pairs} pairs"
        if row.is_paired
        else f"{row.n_speculative} speculative, {row.n_target} target-only requests"
    )
    return f"{n}, pools {len(row.pooled)} small cohorts" if row.pooled else n


def battery_page(found: BatteryResult, code: ExitCode) -> None:
    """The distribution tests, one line each, then what was tested and what was not."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as page:
        _battery(console, found, code)
    print("\n".join(line.rstrip(" ") for line in page.get().split("\n")), end="")


def _battery(console: Console, found: BatteryResult, code: ExitCode) -> None:
    from rich.padding import Padding
    from rich.text import Text

    verdict = found.verdict
    console.print()
    mark = f"{MARKS[verdict]} probe: {verdict.word}"
    console.print(Text(f"{mark}: {found.why}" if found.why else mark, style=_STYLES[verdict]))
    if found.battery is not None:
        head = f"\n{'test':<26}{'n':>8} {'effect (limits)':>23} {'A/A':>7} {'limit':>6} {'p':>7}"
        console.print(Text(head))
        for t in found.battery.tests:
            if not t.fit.applies:
                continue
            e = t.fit.effect
            effect = f"{e.value:.2g} ({e.low:.2g} to {e.high:.2g})"
            control = "-" if t.control is None else f"{t.control.effect.value:.2g}"
            mark = "–" if t.verdict is None else MARKS[t.verdict]
            row = (
                f"{t.name + ' ' + t.kind.title:<26}{t.fit.n:>8,} {effect:>23} {control:>7} "
                f"{t.limit:>6.2g} {t.p_adjusted:>7.1g} {mark}"
            )
            console.print(Text(row))
        key = "✓ within A/A + margin  ✗ differs  ? not clear  – too few to pass by"
        console.print(Text(f"\n{key}"))
        for t in found.battery.judged:
            if t.verdict is not Verdict.PASS:
                console.print(Padding(Text(f"{t.name}: {t.why}"), (0, 0, 0, 2)))
    for title, lines in (("tested:", found.tested), ("not tested:", found.not_tested)):
        if lines:
            console.print(Text(f"\n{title}"))
        for line in lines:
            console.print(Padding(Text(f"- {line}"), (0, 0, 0, 2)))
    console.print(Text("\nA pass bounds what these tests can see; it does not prove equality."))
    console.print(Text(f"exit code {int(code)}: {code.meaning}"))


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
            need = route["needs"][rule]
            console.print(Text(f"    {rule} {limit:g}" + (f": {need}" if need else "")))


def canary_page(run_id: str, routes: Sequence[RouteStatus]) -> None:
    """Where a canary stands, 80 columns wide: each route, then each of its monitors."""
    from speccheck.monitors import odds_text

    lines = [f"canary of {run_id}"]
    for route in routes:
        at = f", {route.step} at {route.share:.3g}" if route.share is not None else ""
        lines += ["", f"{route.route}: {route.state}{at}"]
        lines += _wrapped(route.why, 2)
        if route.share is not None:
            sent = (
                f"{route.speculative} speculative and {route.target_only} target-only requests,"
                f" {route.expected:.0f} speculative ones expected; evidence of a mismatch"
                f" {odds_text(route.mismatch_evidence, route.mismatch_needs)}"
            )
            lines += _wrapped(sent, 2)
        for text in route.restarts:
            lines += _wrapped(f"started anew: {text}", 2)
        for text in route.incidents:
            lines += _wrapped(f"incident: {text}", 2)
        for reading in route.readings:
            mark = MARKS[Verdict[reading.verdict.upper()]]
            name = f"{reading.rule} ({reading.cohort})" if reading.cohort else reading.rule
            dry = "" if reading.counted else " (not counted)"
            lines += _wrapped(f"{mark} {name}: {reading.verdict}{dry}", 2)
            lines += _wrapped(reading.why, 6)
            if reading.unit != "count":
                lines += _wrapped(
                    f"evidence {odds_text(reading.pass_evidence, reading.pass_needs)} to pass,"
                    f" {odds_text(reading.fail_evidence, reading.fail_needs)} to fail"
                    f" ({reading.method or 'none yet'})",
                    6,
                )
            lines += _wrapped(f"next: {reading.next}", 6)
    print("\n".join(lines))


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


# --- the sweep ----------------------------------------------------------------------------------

_CELL = 15
"""Width of a column of a sweep's tables: five of them and the concurrency fill 80 columns."""


def sweep_page(result: SweepResult, *, with_figures: bool) -> None:
    """What a sweep came to: per task a table of speed-ups, the costs, and where it pays."""
    print("\n".join(sweep_lines(result, with_figures=with_figures)))


def sweep_lines(result: SweepResult, *, with_figures: bool) -> list[str]:
    """The page of a sweep, 80 columns wide where there are up to five proposal lengths."""
    from speccheck.measure import ALPHA

    lines: list[str] = []
    for (route, task), loads in _by_family(result.loads).items():
        ks = sorted({cell.k for load in loads for cell in load.cells})
        lines += [
            "",
            f"{printable(route)}, {printable(task)}: e2e speed-up over target-only, with interval",
            _row("c", [f"k {k}" for k in ks]),
        ]
        for load in loads:
            cells = {cell.k: cell for cell in load.cells}
            lines += [
                _row(load.concurrency, [_speedup(load, cells.get(k)) for k in ks]),
                _row("", [_predicted(load, cells.get(k)) for k in ks]),
            ]
        lines.append("  saved target passes, % of decode tokens: measured; model, model - measured")
        for load in loads:
            cells = {cell.k: cell for cell in load.cells}
            lines += [
                _row(load.concurrency, [_saved(cells.get(k)) for k in ks]),
                _row("", [_saved_model(cells.get(k)) for k in ks]),
            ]
        if with_figures:
            lines += ["", *_figure_lines(loads)]
    if result.loads:
        lines += ["", "* best k, = cannot be told from it, (*) the model's choice"]
    lines += _cost_lines(result)
    lines.append("")
    for text in (*result.lines, *(f"note: {note}" for note in result.notes)):
        lines += _wrapped(text)
    decided = result.n_cells - len(result.open_cells) - result.n_unmeasured
    lines.append(f"{decided} of {result.n_cells} cells decided, {result.seconds:.0f} s")
    for text in result.open_cells[:_OPEN_SHOWN]:
        lines += _wrapped(f"  open: {text}")
    if len(result.open_cells) > _OPEN_SHOWN:
        lines.append(f"  and {len(result.open_cells) - _OPEN_SHOWN} more; --json has them all")
    lines += _wrapped(
        f"level: {ALPHA:.0%} a side for each load, shared by all its k; where nothing pays, up to"
        " that share of the loads would be said to pay. n and method of every interval: --json"
    )
    return lines


_OPEN_SHOWN = 8


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        printable(text),
        80,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + (2 if indent else 4)),
        break_long_words=False,
    )


def _by_family(loads: Iterable[Load]) -> dict[tuple[str, str], list[Load]]:
    found: dict[tuple[str, str], list[Load]] = {}
    for load in loads:
        found.setdefault((load.route, load.task), []).append(load)
    return found


def _row(head: object, columns: Sequence[str]) -> str:
    return f"{head!s:>3} " + " ".join(f"{column:<{_CELL - 1}}" for column in columns).rstrip()


def _span(value: float, low: float, high: float, digits: int = 2) -> str:
    """`1.52 1.41-1.63`, `-19 -53..15`, or the value alone where there is no bound."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:.{digits}f} no bound"
    if low >= 0 and high >= 10 and digits == 2:  # says next to nothing, and breaks the columns
        return f"{value:.2f} {low:.1f}-{min(high, 99):.0f}{'+' if high > 99 else ''}"
    to = "-" if low >= 0 else ".."
    return f"{value:.{digits}f} {low:.{digits}f}{to}{high:.{digits}f}"


def _speedup(load: Load, cell: Cell | None) -> str:
    ratio = None if cell is None else cell.ratios["e2e"]
    if cell is None or ratio is None or not ratio.is_known:
        return "-"
    mark = "*" if cell.k == load.best else "=" if load.best and cell.k in load.tied else ""
    low = 1 / ratio.high if ratio.high > 0 else math.inf
    high = 1 / ratio.low if ratio.low > 0 else math.inf
    if math.isinf(ratio.high):
        low = math.inf
    return _span(1 / ratio.value, low, high) + mark


def _predicted(load: Load, cell: Cell | None) -> str:
    if cell is None or cell.predicted is None or not cell.predicted.value > 0:
        return "model -"
    mark = "(*)" if cell.k == load.predicted_best else ""
    return f"model {1 / cell.predicted.value:.2f}{mark}"


def _saved(cell: Cell | None) -> str:
    saved = None if cell is None else cell.saved_measured
    if saved is None or not saved.is_known:
        return "-"
    return _span(100 * saved.value, 100 * saved.low, 100 * saved.high, 0)


def _saved_model(cell: Cell | None) -> str:
    if cell is None or cell.acceptance is None:
        return "none drafted"
    if cell.saved_modelled is None or cell.saved_gap is None:
        return "not estimated"
    return f"model {100 * cell.saved_modelled.value:.0f} {100 * cell.saved_gap:+.0f}"


_FIGURES = (
    ("tok/s", "throughput_tokens_per_s", 1.0, 6, 0),
    ("TTFT", "ttft_p50_s", 1e3, 6, 0),
    ("TPOT", "tpot_p50_s", 1e3, 6, 1),
    ("e2e", "e2e_p50_s", 1e3, 6, 0),
    ("e2e95", "e2e_p95_s", 1e3, 6, 0),
    ("eff95", "effective_p95_s", 1e3, 6, 0),
    ("age95", "queue_age_p95_s", 1e3, 6, 0),
    ("MB", "memory_bytes", 1e-6, 5, 0),
    ("cost", "cost_per_1k_tokens", 1.0, 8, 4),
)
"""Heading, figure, scale, width and digits."""


def _figure_lines(loads: Sequence[Load]) -> list[str]:
    """Each arm by itself: medians, p95, throughput, memory, errors, cost."""
    heads = "".join(f"{head:>{width}}" for head, _, _, width, _ in _FIGURES)
    lines = [f"{'c':>3} {'arm':<6}{'flight':>6}{heads} errors"]
    for load in loads:
        for arm in (load.target, *load.arms.values()):
            name = "target" if arm.k == 0 else f"k {arm.k}"
            flight = "-" if arm.in_flight is None else f"{arm.in_flight:.1f}"
            figures = "".join(
                _figure(arm, figure, scale, width, digits)
                for _, figure, scale, width, digits in _FIGURES
            )
            errors = f"{arm.errors}/{arm.n}"
            lines.append(f"{load.concurrency:>3} {name:<6}{flight:>6}{figures} {errors:>6}")
    lines.append("    ms: p50 of TTFT, TPOT and e2e; p95 of e2e, effective latency and queue age")
    return lines


def _figure(arm: ArmFigures, name: str, scale: float, width: int, digits: int) -> str:
    estimate = arm.figures.get(name)
    if estimate is None or not estimate.is_known:
        return f"{'-':>{width}}"
    return f"{scale * estimate.value:>{width}.{digits}f}"


def _cost_lines(result: SweepResult) -> list[str]:
    """Calibrated costs in target passes, one row per batch size."""
    if not result.calibrations:
        return []
    ks = sorted({k for found in result.calibrations.values() for k in found.verify})
    lines = [
        "",
        "costs in target passes, at batch size c: verify step V(k), draft step, overhead",
        _row("c", [f"V({k})" for k in ks]),
    ]
    for c, found in sorted(result.calibrations.items()):
        columns = []
        for k in ks:
            verify = found.verify.get(k)
            columns.append("-" if verify is None else _span(verify.value, verify.low, verify.high))
        apart = [
            f"{name} not told from V"
            if cost is None
            else f"{name} {_span(cost.value, cost.low, cost.high, 3)}"
            for name, cost in (("draft", found.draft), ("overhead", found.overhead))
        ]
        step = found.step_s
        plain = _span(1e3 * step.value, 1e3 * step.low, 1e3 * step.high, 1)
        lines += [
            _row(c, columns),
            f"    {', '.join(apart)}",
            f"    one target-only step {plain} ms",
        ]
    return lines
