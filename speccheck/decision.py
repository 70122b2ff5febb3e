"""From findings to one decision per route, and the same decision in every form. Pure.

promote: every counted rule passed and speculation pays. fall_back: a rule failed. hold: nothing
broke, but it does not pay, or the policy lets nothing speculate. inconclusive: more evidence is
needed, or something could not be measured. The exit code, the JUnit
report and the Markdown summary are derived from the same decisions, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree as ET

from speccheck.errors import ExitCode
from speccheck.guardrails import HELD, LATE, RULES
from speccheck.records import POLICY, Action, Decision, Finding, Stage, Verdict, worst

RUN_IS_VALID = "run_is_valid"
WORKLOAD_IS_REPRESENTATIVE = "workload_is_representative"
"""Findings about the run itself, beside those of the rules."""


def decide(
    route: str,
    stage: Stage,
    findings: Sequence[Finding],
    *,
    k: int | None = None,
    invalid: str = "",
    unrepresentative: str = "",
    kept_off: Mapping[str, int] | None = None,
    requests: int = 0,
) -> Decision:
    """Decide one route from its findings.

    `kept_off` says how many of the route's `requests` the eligibility policy keeps on target-only,
    by reason: the decision is about the others, and its scope says so.

    `invalid` says why the run itself cannot be judged (our client was late, the arms differ in more
    than speculation); it overrules everything. `unrepresentative` says why the workload is not the
    route's own (random token ids): rules about speed and acceptance then decide nothing, rules
    about correct output still do. Both are added to the findings.
    """
    mine = tuple(f for f in findings if f.route == route)
    for rule, verdict, text in (
        (RUN_IS_VALID, Verdict.ERROR, invalid),
        (WORKLOAD_IS_REPRESENTATIVE, Verdict.INCONCLUSIVE, unrepresentative),
    ):
        if text:
            mine += (Finding(rule, verdict, route, "", stage, None, None, "", text),)
    counted = [f for f in mine if f.counted]
    of = {v: [f for f in counted if f.verdict is v] for v in Verdict}

    policy = _policy_scope(kept_off or {}, requests, mine)

    def decided(action: Action, reason: str, scope: str = "") -> Decision:
        return Decision(
            route,
            action,
            stage,
            reason,
            mine,
            k if action is Action.PROMOTE else None,
            "; ".join(text for text in (scope, policy) if text),
        )

    if not invalid and 0 < requests == sum((kept_off or {}).values()):
        return decided(Action.HOLD, "the eligibility policy lets none of its requests speculate")

    if invalid or not counted:
        return decided(Action.INCONCLUSIVE, f"could not judge: {invalid or 'no rule was judged'}")
    failed = [
        f
        for f in of[Verdict.FAIL]
        if not _only_pays(f) and (not unrepresentative or _holds_anywhere(f))
    ]
    if failed:
        return decided(Action.FALL_BACK, _reasons(failed), _scope(failed, counted))
    if unrepresentative:
        what = "could not judge" if of[Verdict.ERROR] else "not decisive"
        return decided(
            Action.INCONCLUSIVE,
            f"{what}: {unrepresentative}; run it on a sample of the route's own traffic",
        )
    if of[Verdict.FAIL]:
        unpaid = of[Verdict.FAIL]
        return decided(Action.HOLD, f"it does not pay: {_reasons(unpaid)}", _scope(unpaid, counted))
    if of[Verdict.ERROR]:
        return decided(Action.INCONCLUSIVE, f"could not judge: {_reasons(of[Verdict.ERROR])}")
    undecided = of[Verdict.INCONCLUSIVE]
    if undecided:
        more = max((f.needed for f in undecided if f.needed), default=None)
        ask = f"about {more} more requests are needed" if more else "more evidence is needed"
        return decided(Action.INCONCLUSIVE, f"{ask}: {_reasons(undecided)}")
    rules = f"all {len(counted)} findings pass" if len(counted) > 1 else "the one finding passes"
    slices = sorted({f.cohort for f in counted if f.cohort})
    scope = f"measured at {', '.join(slices)}" if slices else ""
    return decided(Action.PROMOTE, f"{rules}: {_reasons(counted, most=2)}", scope)


def _only_pays(finding: Finding) -> bool:
    return finding.rule in RULES and RULES[finding.rule].pays


def _holds_anywhere(finding: Finding) -> bool:
    return finding.rule in RULES and RULES[finding.rule].any_workload


_GRAVEST = ("max_lossless_violations", "max_quality_regression_cases")
"""Wrong outputs are told before all else: neither speed nor an aggregate may stand in front."""


def _reasons(findings: Sequence[Finding], *, most: int = 3) -> str:
    """The findings' own sentences: wrong outputs first, the whole route's before its slices', and
    each rule once before any of them again. A reason that several share is said once.
    """
    ordered = sorted(findings, key=lambda f: (f.rule not in _GRAVEST, f.cohort != ""))
    firsts = {f.rule: f for f in reversed(ordered)}
    ordered.sort(key=lambda f: firsts[f.rule] is not f)
    late: dict[str, list[str]] = {}
    texts: list[str] = []
    for f in ordered:
        subject, is_late, reason = f.why.partition(LATE)
        if not is_late:
            texts.append(f"{f.why} ({f.cohort})" if f.cohort else f.why)
        elif subject not in late.setdefault(reason, []):
            late[reason].append(subject)
    texts += [_void(subjects, reason) for reason, subjects in late.items()]
    shown = [text.partition(HELD)[0] for text in texts[:most]]
    if len(texts) > most:
        shown.append(f"and {len(texts) - most} more")
    held = dict.fromkeys(f.why.partition(HELD)[2] for f in ordered if HELD in f.why)
    return "; ".join(shown) + "".join(f"{HELD}{reason}" for reason in held)


def _void(subjects: Sequence[str], reason: str) -> str:
    """All that a late client made void, and why it was late."""
    verb = "is" if len(subjects) == 1 else "are"
    return f"{', '.join(subjects)}{LATE.replace('is', verb, 1)}{reason}"


def _scope(failed: Sequence[Finding], decisive: Sequence[Finding]) -> str:
    """Which slices failed and which passed every rule: what an eligibility policy could allow."""
    bad = {f.cohort for f in failed}
    if "" in bad or not bad:
        return ""
    slices = {f.cohort for f in decisive if f.cohort}
    good = sorted(
        c for c in slices - bad if all(f.verdict is Verdict.PASS for f in decisive if f.cohort == c)
    )
    text = f"fails at {', '.join(sorted(bad))}"
    if good:
        text += f"; passes at {', '.join(good)}: limit the eligibility policy to that and run again"
    return text


def _policy_scope(kept_off: Mapping[str, int], requests: int, findings: Sequence[Finding]) -> str:
    """What the eligibility policy keeps off, why, and which rules fail there."""
    if not kept_off:
        return ""
    why = "; ".join(
        f"{n}: {reason.removeprefix(POLICY).removeprefix(': ')}"
        for reason, n in sorted(kept_off.items(), key=lambda item: (-item[1], item[0]))[:3]
    )
    text = f"the eligibility policy keeps {sum(kept_off.values())} of {requests} requests on"
    text += f" target-only ({why})"
    failed = sorted({f.rule for f in findings if is_kept_off(f)})
    return f"{text}, where {', '.join(failed)} would fail" if failed else text


KEPT_OFF = "kept off by policy"
"""First words of the cohort of a finding about what the eligibility policy keeps off."""


def is_kept_off(finding: Finding) -> bool:
    """Whether a finding is about requests that the eligibility policy keeps off."""
    return finding.cohort.startswith(KEPT_OFF)


def of_kept_off(findings: Sequence[Finding]) -> list[Finding]:
    """Failures among requests that the eligibility policy keeps off: shown, not counted."""
    return [
        replace(f, counted=False, cohort=", ".join(c for c in (KEPT_OFF, f.cohort) if c))
        for f in findings
        if f.verdict is Verdict.FAIL
    ]


# --- several stages, one answer per route -------------------------------------------------------

_WORST_FIRST = (Action.FALL_BACK, Action.HOLD, Action.INCONCLUSIVE, Action.PROMOTE)


def final(decisions: Sequence[Decision]) -> list[Decision]:
    """One decision per route, worst routes first.

    Each stage decides on each route that reached it, and a later yes does not undo an earlier no:
    the worst decision stands (what could not be judged is worse than what needs more evidence), the
    latest stage among equals. So these come to the exit code that all decisions come to.
    """
    order = list(Stage)

    def goodness(made: Decision) -> tuple[int, int]:
        return _WORST_FIRST.index(made.action), -verdict_of(made)

    found: dict[str, Decision] = {}
    for made in sorted(decisions, key=lambda d: order.index(Stage(d.stage))):
        known = found.get(made.route)
        if known is None or goodness(made) <= goodness(known):
            found[made.route] = made
    return sorted(found.values(), key=lambda d: (_WORST_FIRST.index(d.action), d.route))


# --- one decision, many forms -------------------------------------------------------------------


def verdict_of(decision: Decision) -> Verdict:
    """The decision as a verdict: promote passes, hold and fall back fail.

    An inconclusive decision is an error where something could not be judged, else inconclusive.
    """
    if decision.action is Action.PROMOTE:
        return Verdict.PASS
    if decision.action in (Action.HOLD, Action.FALL_BACK):
        return Verdict.FAIL
    counted = [f.verdict for f in decision.findings if f.counted]
    return Verdict.ERROR if Verdict.ERROR in counted or not counted else Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Check:
    """What is judged of a run beside its routes: the fixture, or whether the packet is whole."""

    name: str
    verdict: Verdict
    why: str


def run_checks(stages: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> list[Check]:
    """What is judged of a run beside its routes.

    `stages` are the stages' evidence by name, `missing` the views that its packet lacks.
    """
    checks = []
    if missing:
        checks.append(Check("packet", Verdict.FAIL, f"no {', '.join(missing)} view"))
    proof = stages.get(Stage.FIXTURE)
    if proof is not None:
        why = "; ".join(proof["reasons"]) or "exact law and sampled runs agree with the target"
        checks.append(Check("fixture", Verdict[proof["verdict"].upper()], why))
    return checks


def exit_code(decisions: Sequence[Decision], checks: Sequence[Check] = ()) -> ExitCode:
    """The worst of decisions and checks as exit code; nothing at all could not be judged."""
    return {
        Verdict.PASS: ExitCode.PASS,
        Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        Verdict.ERROR: ExitCode.COULD_NOT_JUDGE,
        Verdict.FAIL: ExitCode.JUDGED_BAD,
    }[worst([*map(verdict_of, decisions), *(check.verdict for check in checks)])]


def junit(decisions: Sequence[Decision], checks: Sequence[Check] = ()) -> str:
    """JUnit XML: one suite per route, one case per counted finding, and one for the decision;
    before them a suite with the run's own checks.

    A failed rule is a failure. What could not be judged, and what is inconclusive, is an error (of
    type could_not_judge or inconclusive): a pipeline must not go green on missing evidence. Rules
    in dry run are skipped cases. The decision's own case carries the verdict of the route, so that
    the report is red exactly if the exit code is not 0.
    """
    root = ET.Element("testsuites", name="speccheck")
    if checks:
        cases = [(check.name, check.verdict, check.why, True) for check in checks]
        _suite(root, "run", "speccheck.run", cases)
    for d in decisions:
        cases = [("decision", verdict_of(d), f"{d.action}: {d.reason}", True)]
        cases += [
            (f"{f.rule} [{f.cohort}]" if f.cohort else f.rule, f.verdict, f.why, f.counted)
            for f in d.findings
        ]
        _suite(root, f"{d.route} ({d.stage})", f"speccheck.{d.stage}.{d.route}", cases)
    if not decisions and not checks:
        nothing = [("decision", Verdict.ERROR, "nothing was decided", True)]
        _suite(root, "speccheck", "speccheck", nothing)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(
    root: ET.Element, name: str, classname: str, cases: Sequence[tuple[str, Verdict, str, bool]]
) -> None:
    """One suite; a case is (name, verdict, text, whether it counts)."""
    suite = ET.SubElement(root, "testsuite", name=_xml(name))
    failures = errors = skipped = 0
    for title, verdict, text, counted in cases:
        case = ET.SubElement(suite, "testcase", classname=_xml(classname), name=_xml(title))
        if not counted:
            ET.SubElement(case, "skipped", message=_xml(f"not counted: {text}"))
            skipped += 1
        elif verdict is Verdict.FAIL:
            ET.SubElement(case, "failure", type="fail", message=_xml(text))
            failures += 1
        elif verdict is not Verdict.PASS:
            kind = "could_not_judge" if verdict is Verdict.ERROR else "inconclusive"
            ET.SubElement(case, "error", type=kind, message=_xml(text))
            errors += 1
    for key, number in (
        ("tests", len(cases)),
        ("failures", failures),
        ("errors", errors),
        ("skipped", skipped),
    ):
        suite.set(key, str(number))


def _xml(text: str) -> str:
    """Text for a report: what XML 1.0 cannot hold, and what would not print, as escapes."""
    return "".join(c if c.isprintable() or c in "\t\n\r" else repr(c)[1:-1] for c in text)


_ACTION_WORDS = {
    Action.PROMOTE: "promote",
    Action.HOLD: "hold",
    Action.FALL_BACK: "fall back",
    Action.INCONCLUSIVE: "inconclusive",
}


def summary_markdown(decisions: Sequence[Decision], checks: Sequence[Check] = ()) -> str:
    """A short summary for a pipeline's step summary: a table of routes, then what did not pass."""
    code = exit_code(decisions, checks)
    lines = [
        "## speccheck",
        "",
        f"Exit code {int(code)}: {code.meaning}.",
        "",
        "| route | stage | decision | why |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {_cell(d.route)} | {d.stage} | **{_ACTION_WORDS[d.action]}** | {_cell(d.reason)} |"
        for d in decisions
    ]
    lines += [
        f"| - | {_cell(check.name)} | **{check.verdict.word}** | {_cell(check.why)} |"
        for check in checks
    ]
    if not decisions and not checks:
        lines.append("| - | - | **nothing was decided** | - |")
    open_findings = [(d, f) for d in decisions for f in d.findings if f.verdict is not Verdict.PASS]
    if open_findings:
        lines += ["", "| route | rule | slice | verdict | finding |", "|---|---|---|---|---|"]
        lines += [
            f"| {_cell(d.route)} | `{f.rule}` | {_cell(f.cohort) or 'all'} |"
            f" {f.verdict.word}{'' if f.counted else ' (not counted)'} | {_cell(f.why)} |"
            for d, f in open_findings
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text inside a Markdown table cell: foreign characters can neither end it nor become HTML."""
    text = _xml(text)
    for raw, safe in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("[", "\\["),
        ("\r", " "),
        ("\n", " "),
    ):
        text = text.replace(raw, safe)
    return text
