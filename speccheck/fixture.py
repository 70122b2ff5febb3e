"""The evidence of the fixture stage: that a verifier preserves the target's distribution.

Two separate checks on a table of made-up models that is small enough to know everything about.
*Exact*: the law of whole runs, summed over every way a run can go, must equal the target's product
law with no tolerance at all. *Sampled*: enumerated seeds must show it, cell by cell, within
tolerances declared before the first run, against the exact table and against a target-only control.
The first catches mistakes no affordable sample shows; the second is what a reader believes.

Losslessness does not see an inefficient verifier, so counters are compared too, and a handful of
wrong verifiers is run through the same checks, so that a reader sees the checks can fail.

Pure: a table in, a result out. No printing, no store, no scipy: the chi-square tail is an argument.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from speccheck.controls import NEGATIVE_CONTROLS, NegativeControl
from speccheck.errors import UsageError
from speccheck.law import (
    DRAFT_SAMPLING,
    Control,
    Decoding,
    ExactLaw,
    Runs,
    Table,
    exact_law,
    marginals,
    sample,
    target_law,
    total_variation,
)
from speccheck.law import trace as trace_rounds
from speccheck.verifier import ALGORITHMS, Greedy, Row, Verifier, one_hot, uniform

# ---------------------------------------------------------------------------------------------
# The checks

CELL_ALARM = 1e-4
"""Probability that any cell of a right verifier is out of tolerance, where none is declared."""
CHI_SQUARE_ALARM = 1e-3
"""Probability that any chi-square test rejects a right verifier (Bonferroni)."""
PASSES_SIGMAS = 5.0
START_SIGMAS = 3.5
"""Tolerance of the two counters in standard errors; 0.031 and 0.020 on T4 with 20,000 runs."""

Chi2Tail = Callable[[float, int], float]
"""P(chi-square with df degrees of freedom > statistic), by (statistic, df); scipy's chi2.sf."""


@dataclass(frozen=True)
class ExactProof:
    """Law of the committed sequences against the target's product law."""

    equal: bool
    """Equality of every probability as a fraction; no tolerance."""
    sequences: int
    """Sequences with probability above 0 under the target."""
    total_variation: float
    """TV distance over whole sequences; exactly 0 if equal."""
    first_difference: Mapping[str, Any] | None
    """First sequence (in vocabulary order) that differs, with both probabilities as fractions."""


@dataclass(frozen=True)
class Cell:
    """How often one token stood at one position. All but the names are shares of runs."""

    position: int
    token: str
    exact: float
    speculative: float
    target_only: float
    """The target-only control: the same loop with k = 0, other random numbers."""
    tolerance_exact: float
    tolerance_control: float
    within: bool


@dataclass(frozen=True)
class ChiSquare:
    """Goodness of fit of one position, or of two neighbours, against the exact table."""

    name: str
    statistic: float | None
    """None where a token came up that has probability 0."""
    df: int
    p_value: float
    level: float
    """Rejects below; 1e-3 shared over all tests."""
    within: bool


@dataclass(frozen=True)
class CounterCheck:
    """A count that losslessness does not constrain, against its exact expectation."""

    name: str
    exact: str
    """As a fraction."""
    expected: float
    observed: float
    tolerance: float
    within: bool


@dataclass(frozen=True)
class Checks:
    """Everything one decoding loop was measured by on one table."""

    exact: ExactProof
    errors: tuple[tuple[float, ...], ...]
    """[position][token] exact error of the marginal probability."""
    cells: tuple[Cell, ...]
    chi_squares: tuple[ChiSquare, ...]
    counters: tuple[CounterCheck, ...]
    law: ExactLaw
    runs: Runs

    def failures(self) -> dict[str, str]:
        """Why each check that failed did, by the name of the check."""
        reasons: dict[str, str] = {}
        if not self.exact.equal and self.exact.first_difference is not None:
            difference = self.exact.first_difference
            reasons["exact law"] = (
                f"the exact law is not the target's: TV {self.exact.total_variation:.4g}; first "
                f"{' '.join(difference['sequence'])}: {difference['speculative']} instead of "
                f"{difference['target']}"
            )
        if out := [cell for cell in self.cells if not cell.within]:
            worst = max(out, key=lambda cell: abs(cell.speculative - cell.exact))
            reasons["cells"] = (
                f"{len(out)} of {len(self.cells)} cells out of tolerance; worst position "
                f"{worst.position} token {worst.token}: {worst.speculative:.4f} against "
                f"{worst.exact:.4f} exact (limit {worst.tolerance_exact:.4f}) and "
                f"{worst.target_only:.4f} target-only (limit {worst.tolerance_control:.4f})"
            )
        if rejected := [test for test in self.chi_squares if not test.within]:
            worst_test = min(rejected, key=lambda test: test.p_value)
            reasons["chi-square"] = (
                f"{len(rejected)} of {len(self.chi_squares)} chi-square tests reject; smallest p "
                f"{worst_test.p_value:.2g} at {worst_test.name} (level {worst_test.level:.2g})"
            )
        for counter in self.counters:
            if not counter.within:
                reasons[f"counter: {counter.name}"] = (
                    f"{counter.name} is {counter.observed:.4f}, expected "
                    f"{counter.expected:.4f} +- {counter.tolerance:.3f}"
                )
        return reasons


@dataclass(frozen=True)
class Reference:
    """What a right loop does: the truth that others are measured by."""

    decoding: Decoding
    truth: Mapping[tuple[int, ...], Any]
    """The law to preserve. At temperature 0 it is the chain of argmaxes."""
    law: ExactLaw
    """The right loop's own law, for its counters."""
    control: Runs
    """Target-only: the same loop with k = 0, on random numbers of its own."""
    marginals: list[list[Any]]
    """[position][token] of the truth."""
    groups: Mapping[tuple[int, ...], Row]
    """Law of the tokens at each position and at each pair of neighbours (positions from 0)."""


def reference(decoding: Decoding, *, n_seeds: int) -> Reference:
    """The truth for loops on a table that ought to do what `decoding` does."""
    table, horizon = decoding.table, decoding.table.horizon
    n_tokens = len(table.vocabulary)
    truth = target_law(_truth(table, decoding.verifier))
    positions = [(i,) for i in range(horizon)] + [(i, i + 1) for i in range(horizon - 1)]
    return Reference(
        decoding,
        truth,
        exact_law(decoding),
        sample(Control(table, decoding.verifier), np.arange(n_seeds)),
        marginals(truth, n_tokens),
        {group: _group_law(truth, group, n_tokens) for group in positions},
    )


def _group_law(truth: Mapping[tuple[int, ...], Any], group: tuple[int, ...], n: int) -> Row:
    law = np.zeros(n ** len(group))
    for sequence, mass in truth.items():
        law[_code([sequence[i] for i in group], n)] += float(mass)
    return law


def check(decoding: Decoding, right: Reference, *, chi2_sf: Chi2Tail) -> Checks:
    """Run every check on a decoding loop, with as many seeds as the reference's control has."""
    vocabulary = decoding.table.vocabulary
    law = right.law if decoding is right.decoding else exact_law(decoding)
    runs = sample(decoding, np.arange(len(right.control.tokens)))
    return Checks(
        exact=_prove(law.sequences, right.truth, vocabulary),
        errors=_errors(law.sequences, right.marginals),
        cells=_cells(decoding.table, right, runs),
        chi_squares=_chi_squares(right, runs, chi2_sf),
        counters=_counters(decoding.table.horizon, right.law, runs),
        law=law,
        runs=runs,
    )


def _truth(table: Table, verifier: Verifier) -> Table:
    """The table whose product law has to be preserved."""
    if not isinstance(verifier, Greedy):
        return table
    target = {key: one_hot(np.array([row.argmax()]), row)[0] for key, row in table.target.items()}
    return Table(table.name, table.vocabulary, table.horizon, target, table.draft)


def _prove(
    law: Mapping[tuple[int, ...], Any],
    truth: Mapping[tuple[int, ...], Any],
    vocabulary: Sequence[str],
) -> ExactProof:
    different = (s for s in sorted(law.keys() | truth.keys()) if law.get(s, 0) != truth.get(s, 0))
    first = next(different, None)
    return ExactProof(
        equal=first is None,
        sequences=len(truth),
        total_variation=float(total_variation(law, truth)),
        first_difference=None
        if first is None
        else {
            "sequence": [vocabulary[token] for token in first],
            "speculative": str(law.get(first, 0)),
            "target": str(truth.get(first, 0)),
        },
    )


def _errors(
    law: Mapping[tuple[int, ...], Any], exact: Sequence[Sequence[Any]]
) -> tuple[tuple[float, ...], ...]:
    seen = marginals({s: float(mass) for s, mass in law.items()}, len(exact[0]))
    return tuple(
        tuple(f - float(p) for f, p in zip(*pair, strict=True))
        for pair in zip(seen, exact, strict=True)
    )


def _frequencies(runs: Runs, n_tokens: int) -> list[list[float]]:
    return [
        [float(f) for f in np.bincount(column, minlength=n_tokens) / len(column)]
        for column in runs.tokens.T
    ]


def _tolerances(
    table: Table, exact: Sequence[Sequence[Any]], n_runs: int
) -> list[list[tuple[float, float]]]:
    """[position][token] (against the exact table, against the control).

    Declared by the table for this number of runs, or z standard errors with the z that makes
    CELL_ALARM the probability of any alarm over both comparisons of all cells.
    """
    if table.declared is not None and table.declared[0] == n_runs:
        pair = table.declared[1:]
        return [[pair for _ in row] for row in exact]
    z = NormalDist().inv_cdf(1 - CELL_ALARM / (4 * sum(len(row) for row in exact)))
    errors = [[math.sqrt(float(p * (1 - p)) / n_runs) for p in row] for row in exact]
    return [[(z * se, z * se * math.sqrt(2)) for se in row] for row in errors]


def _cells(table: Table, right: Reference, runs: Runs) -> tuple[Cell, ...]:
    n_tokens, exact = len(table.vocabulary), right.marginals
    tolerances = _tolerances(table, exact, len(runs.tokens))
    seen = _frequencies(runs, n_tokens)
    seen_control = _frequencies(right.control, n_tokens)
    cells = []
    for i, row in enumerate(exact):
        for token, name in enumerate(table.vocabulary):
            p, f, g = float(row[token]), seen[i][token], seen_control[i][token]
            to_exact, to_control = tolerances[i][token]
            within = abs(f - p) <= to_exact and abs(f - g) <= to_control
            cells.append(Cell(i + 1, name, p, f, g, to_exact, to_control, within))
    return tuple(cells)


def _chi_squares(right: Reference, runs: Runs, chi2_sf: Chi2Tail) -> tuple[ChiSquare, ...]:
    """Each position, and each pair of neighbours: what one position alone cannot show."""
    n_tokens = len(right.marginals[0])
    level = CHI_SQUARE_ALARM / len(right.groups)
    tests = []
    for group, probabilities in right.groups.items():
        codes = _code([runs.tokens[:, i] for i in group], n_tokens)
        observed = np.bincount(codes, minlength=len(probabilities))
        statistic, df = chi_square(observed, probabilities * len(runs.tokens))
        p_value = 0.0 if math.isinf(statistic) else chi2_sf(statistic, df) if df else 1.0
        name = " and ".join(str(i + 1) for i in group)
        name = f"positions {name}" if len(group) > 1 else f"position {name}"
        shown = None if math.isinf(statistic) else statistic
        tests.append(ChiSquare(name, shown, df, float(p_value), level, p_value >= level))
    return tuple(tests)


def _code(tokens: Sequence[Any], n_tokens: int) -> Any:
    code = tokens[0]
    for token in tokens[1:]:
        code = code * n_tokens + token
    return code


def chi_square(observed: Row, expected: Row) -> tuple[float, int]:
    """(statistic, degrees of freedom); infinite where something impossible was observed.

    Cells that expect fewer than 5 are pooled, the usual condition for the chi-square tail.
    """
    if observed[expected == 0].any():
        return math.inf, 0
    small = expected < 5
    pooled_observed = np.append(observed[~small], observed[small].sum())
    pooled_expected = np.append(expected[~small], expected[small].sum())
    kept = pooled_expected > 0
    gap = pooled_observed[kept] - pooled_expected[kept]
    return float((gap**2 / pooled_expected[kept]).sum()), int(kept.sum()) - 1


def _counters(horizon: int, law: ExactLaw, runs: Runs) -> tuple[CounterCheck, ...]:
    n = len(runs.passes)
    variance = sum(count**2 * mass for count, mass in law.passes_law.items()) - law.passes**2
    checks = [
        _counter(
            "mean target passes per run",
            law.passes,
            float(runs.passes.mean()),
            _up(PASSES_SIGMAS * math.sqrt(float(variance) / n)),
        ),
        _counter(
            "accepted tokens + target passes - tokens, over all runs",
            Fraction(0),
            float((runs.accepted + runs.passes - horizon).sum()),
            0.0,
        ),
    ]
    last = horizon - 1  # the last position a draft can be at: reached by every kind of round
    if last in law.starts:
        share, first_stands = law.starts[last]
        started, stood = runs.starts.get(last, (0, 0))
        spread = float(first_stands * (1 - first_stands)) / max(1e-12, n * float(share))
        checks.append(
            _counter(
                f"first draft stands, of rounds that start at position {last}",
                first_stands,
                stood / started if started else 0.0,
                _up(START_SIGMAS * math.sqrt(spread)),
            )
        )
    return tuple(checks)


def _counter(name: str, exact: Any, observed: float, tolerance: float) -> CounterCheck:
    within = abs(observed - float(exact)) <= tolerance
    return CounterCheck(name, str(exact), float(exact), observed, tolerance, within)


def _up(tolerance: float) -> float:
    """Rounded up to three decimals, so that a printed limit is the limit."""
    return math.ceil(tolerance * 1000) / 1000


# ---------------------------------------------------------------------------------------------
# The result


@dataclass(frozen=True)
class FalseAlarm:
    """Probability, before the first run, that a right verifier fails a sampled check."""

    cells_exact: float
    cells_control: float
    chi_square: float
    counters: float

    @property
    def total(self) -> float:
        """Union bound over all sampled checks."""
        return self.cells_exact + self.cells_control + self.chi_square + self.counters

    def statement(self, n_seeds: int) -> str:
        """In one sentence for the packet."""
        return (
            f"Declared before the first run: a right verifier fails one of the sampled checks with "
            f"probability at most {self.total:.1g} (cells against the exact table "
            f"{self.cells_exact:.0e}, against the control {self.cells_control:.0e}, chi-square "
            f"{self.chi_square:.0e}, counters {self.counters:.0e}). The runs are seeds "
            f"0 to {n_seeds - 1}, so the same build gives the same answer every time."
        )


def _false_alarm(checks: Checks, n_seeds: int) -> FalseAlarm:
    def tail(limit: float, se: float) -> float:
        return 2 * NormalDist().cdf(-limit / se) if se > 0 else 0.0

    errors = [math.sqrt(c.exact * (1 - c.exact) / n_seeds) for c in checks.cells]
    pairs = list(zip(checks.cells, errors, strict=True))
    return FalseAlarm(
        cells_exact=sum(tail(c.tolerance_exact, se) for c, se in pairs),
        cells_control=sum(tail(c.tolerance_control, se * math.sqrt(2)) for c, se in pairs),
        chi_square=CHI_SQUARE_ALARM,
        counters=tail(PASSES_SIGMAS, 1) + tail(START_SIGMAS, 1),
    )


@dataclass(frozen=True)
class FixtureResult:
    """Everything the fixture stage knows; `to_dict` is what the packet gets."""

    table: Table
    algorithm: str
    draft_sampling: str
    n_seeds: int
    """Runs drawn, seeds 0..n_seeds-1."""
    checks: Checks
    marginals: tuple[tuple[str, ...], ...]
    """[position][token] exact target probabilities as fractions."""
    greedy: ExactProof
    """Temperature 0 with the same drafts: the chain of argmaxes must come out."""
    expected: ExactLaw
    """Exact expectations of the counters."""
    mean: Mapping[str, float]
    """Observed means per run: target_passes, drafted, accepted."""
    first_tau: tuple[int, ...]
    """Runs by accepted length of their first round, 0..k."""
    false_alarm: FalseAlarm
    traces: tuple[dict[str, Any], ...]
    negative_controls: tuple[dict[str, Any], ...]
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""

    @property
    def verdict(self) -> str:
        """Either pass or fail: an exact proof is never inconclusive."""
        return "fail" if self.reasons else "pass"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; exact numbers as fractions in text beside their float."""
        table, law = self.table, self.expected
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "algorithm": self.algorithm,
            "draft_sampling": self.draft_sampling,
            "n_seeds": self.n_seeds,
            "table": _table_dict(table),
            "exact": asdict(self.checks.exact),
            "marginals": [list(row) for row in self.marginals],
            "cells": [asdict(cell) for cell in self.checks.cells],
            "chi_squares": [asdict(test) for test in self.checks.chi_squares],
            "counters": [asdict(counter) for counter in self.checks.counters],
            "per_run": {
                name: {"exact": str(exact), "expected": float(exact), "observed": self.mean[name]}
                for name, exact in (
                    ("target_passes", law.passes),
                    ("drafted", law.drafted),
                    ("accepted", law.accepted),
                )
            },
            "acceptance_rate": _ratio(law.accepted, law.drafted),
            "tokens_per_pass": _ratio(Fraction(table.horizon), law.passes),
            "first_round": [
                {
                    "accepted": tau,
                    "exact": str(p),
                    "expected": float(p),
                    "observed": n / self.n_seeds,
                }
                for tau, (p, n) in enumerate(zip(law.first_tau, self.first_tau, strict=True))
            ],
            "greedy": asdict(self.greedy),
            "false_alarm": asdict(self.false_alarm) | {"total": self.false_alarm.total},
            "statement": self.false_alarm.statement(self.n_seeds),
            "traces": list(self.traces),
            "negative_controls": list(self.negative_controls),
        }


def _ratio(part: Any, whole: Any) -> dict[str, Any] | None:
    """None where nothing was drafted: there is no rate then."""
    return {"exact": str(part / whole), "expected": float(part / whole)} if whole else None


def _table_dict(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "vocabulary": list(table.vocabulary),
        "horizon": table.horizon,
        "rows": [
            {
                "position": position,
                "after": "*" if previous is None else table.vocabulary[previous],
                "target": [float(p) for p in table.target[position, previous]],
                "draft": [float(q) for q in table.draft[position, previous]],
                "overlap": float(
                    np.minimum(
                        table.target[position, previous], table.draft[position, previous]
                    ).sum()
                ),
            }
            for position, previous in table.target
        ],
    }


def run_fixture(
    table: Table,
    *,
    algorithm: str,
    draft_sampling: str,
    chi2_sf: Chi2Tail,
    n_seeds: int = 20_000,
    trace_seeds: Sequence[int] = (18, 0, 1),
    controls: Sequence[NegativeControl] | None = None,
) -> FixtureResult:
    """Prove and measure one verification algorithm on one table.

    algorithm: a name of `ALGORITHMS`. draft_sampling: a name of `DRAFT_SAMPLING`. chi2_sf: tail of
    the chi-square law, scipy's chi2.sf. n_seeds: runs, seeds 0..n_seeds-1. controls: the wrong
    verifiers to show, `NEGATIVE_CONTROLS` if not given. Raises UsageError for an unknown name.
    """
    decoding = _decoding(table, algorithm, draft_sampling)
    if n_seeds < 1:
        raise UsageError(f"the fixture needs at least one seed, got {n_seeds}")
    right = reference(decoding, n_seeds=n_seeds)
    checks = check(decoding, right, chi2_sf=chi2_sf)
    runs, law = checks.runs, right.law
    greedy = Decoding(table, Greedy(), decoding.drafting, decoding.proposal_length)
    at_zero = _prove(
        exact_law(greedy).sequences, target_law(_truth(table, Greedy())), table.vocabulary
    )
    reasons = list(checks.failures().values())
    if not at_zero.equal:
        reasons.append("at temperature 0 the committed tokens are not the target's argmaxes")
    return FixtureResult(
        table=table,
        algorithm=algorithm,
        draft_sampling=draft_sampling,
        n_seeds=n_seeds,
        checks=checks,
        marginals=tuple(tuple(str(p) for p in row) for row in right.marginals),
        greedy=at_zero,
        expected=law,
        mean={
            "target_passes": float(runs.passes.mean()),
            "drafted": float(runs.drafted.mean()),
            "accepted": float(runs.accepted.mean()),
        },
        first_tau=tuple(int(n) for n in np.bincount(runs.first_tau, minlength=len(law.first_tau))),
        false_alarm=_false_alarm(checks, n_seeds),
        traces=tuple(
            trace(table, seed, algorithm=algorithm, draft_sampling=draft_sampling)
            for seed in trace_seeds
        ),
        negative_controls=tuple(
            negative_controls(table, chi2_sf=chi2_sf, n_seeds=n_seeds, controls=controls)
        ),
        reasons=tuple(reasons),
    )


def _decoding(table: Table, algorithm: str, draft_sampling: str) -> Decoding:
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {algorithm!r}; the fixture has {list(ALGORITHMS)}")
    if draft_sampling not in DRAFT_SAMPLING:
        raise UsageError(
            f"unknown draft sampling {draft_sampling!r}; the fixture has {list(DRAFT_SAMPLING)}"
        )
    length = 0 if algorithm == "target_only" else table.horizon - 1
    return Decoding(table, ALGORITHMS[algorithm], DRAFT_SAMPLING[draft_sampling], length)


# ---------------------------------------------------------------------------------------------
# Traces


def trace(table: Table, seed: int, *, algorithm: str, draft_sampling: str) -> dict[str, Any]:
    """One run from a seed, step by step, its invariants checked; JSON-ready."""
    decoding = _decoding(table, algorithm, draft_sampling)
    rounds = trace_rounds(decoding, lambda *site: uniform(seed, *site))
    totals: Counter[str] = Counter()
    for record in rounds:
        totals.update(record["counters"])
    return {
        "table": table.name,
        "seed": seed,
        "algorithm": algorithm,
        "draft_sampling": draft_sampling,
        "rounds": rounds,
        "tokens": [token for record in rounds for token in record["committed"]],
        "counters": dict(totals),
    }


def format_trace(record: Mapping[str, Any]) -> str:
    """A trace as text, at most 80 columns wide for token names of up to 6 letters."""
    kind = f"{record['algorithm']} verification, {record['draft_sampling']} drafts"
    lines = [f"Seed {record['seed']} on table {record['table']}: {kind}"]
    for round_ in record["rounds"]:
        lines += ["", *_round_lines(round_)]
    counters = record["counters"]
    totals = (
        f"{len(record['tokens'])} tokens in {counters['target_passes']} target passes: "
        f"{counters['accepted']} accepted of {counters['drafted']} drafted, "
        f"{counters['discarded']} discarded"
    )
    lines += ["", f"Run: {' '.join(record['tokens'])}", f"     {totals}"]
    return "\n".join(lines)


def _round_lines(round_: Mapping[str, Any]) -> Iterable[str]:
    prefix = " ".join(round_["prefix"]) or "(empty)"
    drafted = " ".join(draft["token"] for draft in round_["draft"]) or "nothing"
    yield f"Round {round_['round'] + 1}, after {prefix}: drafted {drafted}"
    for test in round_["verify"]:
        low, high = test["window"]
        rule = f"if {low:.4f} <= u < {high:.4f}" if low else f"accept if u < {high:.4f}"
        outcome = test["outcome"] or "not committed"
        yield (
            f"  {test['pos']:>2} {test['token']:<6} p {test['p']:.3f}  q {test['q']:.3f}  "
            f"{rule}  u {test['u']:.4f}  {outcome}"
        )
    tested = len(round_["verify"])
    accepted = round_["counters"]["accepted"]
    if "correction" in round_:
        correction = round_["correction"]
        rejected = round_["draft"][accepted]["token"]
        law = "  ".join(f"{name} {p:.3f}" for name, p in correction["residual"].items())
        yield f"     {rejected} is rejected; corrected distribution {law}"
        yield (
            f"  {correction['pos']:>2} {correction['token']:<6} drawn from it with "
            f"u {correction['u']:.4f}"
        )
    if "bonus" in round_:
        bonus = round_["bonus"]
        what = "all drafts stand; bonus" if round_["draft"] else "no draft; target"
        yield f"  {bonus['pos']:>2} {bonus['token']:<6} {what} token with u {bonus['u']:.4f}"
    for lost in round_["discarded"]:
        how = "untested" if lost["pos"] - round_["base_position"] >= tested else "with it"
        yield f"  {lost['pos']:>2} {lost['token']:<6} discarded {how}: {lost['reason']}"
    yield f"     committed {' '.join(round_['committed'])}"


# ---------------------------------------------------------------------------------------------
# Wrong verifiers: the checks can fail


def negative_controls(
    table: Table,
    *,
    chi2_sf: Chi2Tail,
    n_seeds: int = 20_000,
    controls: Sequence[NegativeControl] | None = None,
) -> list[dict[str, Any]]:
    """Run wrong verifiers through the same checks; one JSON-ready record each.

    `caught_by` names the checks that failed, `total_variation` is exact and `largest_deviation` is
    the worst exact error of one position. A mistake with `caught_by` [] is one that this table
    cannot show.
    """
    references: dict[str, Reference] = {}
    rows = []
    for control in NEGATIVE_CONTROLS if controls is None else controls:
        right = control.right
        if right.name not in references:
            references[right.name] = reference(Decoding(table, right), n_seeds=n_seeds)
        loop = control.loop(table, control.verifier)
        checks = check(loop, references[right.name], chi2_sf=chi2_sf)
        failures = checks.failures()
        rows.append(
            {
                "name": control.name,
                "mistake": control.mistake,
                "total_variation": checks.exact.total_variation,
                "largest_deviation": _largest(checks.errors, table.vocabulary),
                "caught_by": list(failures),
                "reasons": list(failures.values()),
            }
        )
    return rows


def _largest(errors: Sequence[Sequence[float]], vocabulary: Sequence[str]) -> dict[str, Any]:
    cells = [(i, t) for i in range(len(errors)) for t in range(len(vocabulary))]
    i, t = max(cells, key=lambda cell: abs(errors[cell[0]][cell[1]]))
    return {"position": i + 1, "token": vocabulary[t], "deviation": errors[i][t]}
