"""View 1, the probability fixture: a proof, a trace to follow, and checks that can fail.

The evidence is `FixtureResult.to_dict()`. Everything is said twice, once exactly (fractions,
equality without tolerance) and once as sampled (declared tolerance, observed deviation), because
the first catches what no affordable sample shows and the second is what a reader believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import known, listed, stage_evidence, verdict_mark
from speccheck.packet.view import Figure, Mark, Missing
from speccheck.records import Stage

EQUAL = Mark("equal", "✓", "good")
NOT_EQUAL = Mark("NOT equal", "✗", "bad")
WITHIN = Mark("within", "✓", "good")
OUTSIDE = Mark("outside", "✗", "bad")
CAUGHT = Mark("caught", "✓", "good")
MISSED = Mark("not caught", "!", "unsure")

OUTCOME_TONES: Mapping[str | None, view.Tone] = {"accepted": "good", "rejected": "bad"}

DRAFTS = {
    "probabilistic": "drafts drawn from the draft model's distribution: vLLM's draft_sample_method "
    "probabilistic",
    "greedy": "greedy drafts, taken as certain: vLLM's default draft_sample_method",
    "sampled_one_hot": "sampled drafts, taken as certain",
    "ngram": "n-gram drafts, taken as certain: vLLM's method ngram",
}
"""What a serving engineer knows a way of drafting by."""
ACCEPTANCE = {
    "block": "a block of drafts tested as a whole: vLLM's rejection_sample_method block",
    "sampler_match": "a draft stands if the target's own sample is the same token",
    "greedy": "temperature 0: a draft stands if it is the target's most likely token",
}
"""What sets an algorithm apart from vLLM's standard rejection sampling."""

NOT_COVERED = (
    "kernels, caches and batching of a server: replay compares its outputs instead",
    "how the target's rows are made (top-p, penalties, grammars): the table holds finished rows",
    "token trees, several candidates per position, and proposals cut by what was drawn",
    "floating-point error: the proof is in fractions, the sampled runs in float64",
)


def fixture_view(evidence: RunEvidence) -> view.FixtureView | Missing:
    """View 1, or why there is none."""
    if Stage.FIXTURE not in evidence.stages:
        return Missing("the fixture stage did not run")
    result = stage_evidence(evidence, Stage.FIXTURE)
    if "refused" in result:
        return Missing(f"the fixture refuses this configuration: {'; '.join(result['refused'])}")
    if "exact" not in result:
        return Missing("the fixture stage ended before it had a result")
    table = result["table"]
    return view.FixtureView(
        mark=verdict_mark(result["verdict"]),
        reasons=tuple(result["reasons"]),
        algorithm=result["algorithm"],
        verification=_verification(result["algorithm"], result["draft_sampling"]),
        draft_sampling=result["draft_sampling"],
        n_seeds=result["n_seeds"],
        statement=result["statement"],
        table=view.ProbabilityTable(
            name=table["name"],
            vocabulary=tuple(table["vocabulary"]),
            horizon=table["horizon"],
            rows=tuple(_table_row(row) for row in table["rows"]),
        ),
        proofs=(
            _proof("as sampled (temperature 1)", result["exact"]),
            _proof("greedy (temperature 0)", result["greedy"]),
        ),
        per_run=tuple(_per_run(result)),
        first_round=tuple(
            view.ExactLine(
                name=str(line["accepted"]),
                exact=line["exact"],
                expected=_number(line["expected"]),
                observed=_number(line["observed"]),
            )
            for line in result["first_round"]
        ),
        tolerances=tuple(_tolerances(result)),
        cells=tuple(_cell_row(position, result) for position in range(1, table["horizon"] + 1)),
        chi_squares=tuple(
            view.ChiSquareLine(
                name=test["name"],
                statistic=known(test["statistic"], "an impossible token came up", "number"),
                df=test["df"],
                p_value=Figure("p", test["p_value"], "p"),
                level=test["level"],
                mark=WITHIN if test["within"] else OUTSIDE,
            )
            for test in result["chi_squares"]
        ),
        traces=tuple(_trace(trace) for trace in result["traces"]),
        controls=tuple(_control(control) for control in result["negative_controls"]),
        not_covered=(*NOT_COVERED, *_kernels_not_run(result)),
    )


def _kernels_not_run(result: Mapping[str, Any]) -> Iterable[str]:
    kernels = result.get("kernels") or {}
    if "not_run" in kernels:
        yield f"vLLM's own rejection sampler: {kernels['not_run']}"


def _verification(algorithm: str, draft_sampling: str) -> str:
    """The algorithm by our name and in the words of vLLM's settings."""
    drafts = DRAFTS.get(draft_sampling, f"{draft_sampling} drafts")
    meaning = [ACCEPTANCE[algorithm], drafts] if algorithm in ACCEPTANCE else [drafts]
    return f"{algorithm} ({'; '.join(meaning)})"


def _number(value: float) -> Figure:
    return Figure("", value, "number")


def _probability(value: float) -> Figure:
    return Figure("", value, "p")


def _table_row(row: Mapping[str, Any]) -> view.ProbabilityRow:
    after = "any token" if row["after"] == "*" else row["after"]
    return view.ProbabilityRow(
        position=row["position"],
        after=after if row["position"] > 1 else "the start",
        target=tuple(_probability(p) for p in row["target"]),
        draft=tuple(_probability(q) for q in row["draft"]),
        overlap=_probability(row["overlap"]),
    )


def _proof(name: str, proof: Mapping[str, Any]) -> view.ProofLine:
    difference = proof["first_difference"]
    return view.ProofLine(
        name=name,
        mark=EQUAL if proof["equal"] else NOT_EQUAL,
        sequences=proof["sequences"],
        total_variation=_number(proof["total_variation"]),
        first_difference=""
        if difference is None
        else f"{' '.join(difference['sequence'])}: {difference['speculative']} instead of "
        f"{difference['target']}",
    )


def _per_run(result: Mapping[str, Any]) -> Iterable[view.ExactLine]:
    names = {"target_passes": "target passes", "drafted": "drafted", "accepted": "accepted"}
    for key, name in names.items():
        line = result["per_run"][key]
        yield view.ExactLine(
            name, line["exact"], _number(line["expected"]), _number(line["observed"])
        )
    for key, name in (
        ("acceptance_rate", "accepted / drafted"),
        ("tokens_per_pass", "tokens per target pass"),
    ):
        line = result[key]
        if line is not None:
            seen = result["per_run"]
            above = seen["accepted"]["observed"] if key == "acceptance_rate" else None
            observed = (
                above / seen["drafted"]["observed"]
                if above is not None
                else result["table"]["horizon"] / seen["target_passes"]["observed"]
            )
            yield view.ExactLine(name, line["exact"], _number(line["expected"]), _number(observed))


def _tolerances(result: Mapping[str, Any]) -> Iterable[view.ToleranceLine]:
    """What was declared before the first run, and the worst that was observed."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    for name, other, limit in (
        ("share of a cell against the exact table", "exact", "tolerance_exact"),
        ("share of a cell against the target-only control", "target_only", "tolerance_control"),
    ):
        worst = max(cells, key=lambda c: abs(c["speculative"] - c[other]) / (c[limit] or 1e-300))
        deviation = abs(worst["speculative"] - worst[other])
        yield view.ToleranceLine(
            name=name,
            declared=_number(worst[limit]),
            observed=_number(deviation),
            where=f"position {worst['position']}, token {worst['token']}",
            mark=WITHIN if deviation <= worst[limit] else OUTSIDE,
        )
    smallest = min(result["chi_squares"], key=lambda test: test["p_value"])
    yield view.ToleranceLine(
        name="smallest chi-square p, at least",
        declared=Figure("", smallest["level"], "p"),
        observed=Figure("", smallest["p_value"], "p"),
        where=smallest["name"],
        mark=WITHIN if smallest["within"] else OUTSIDE,
    )
    for counter in result["counters"]:
        yield view.ToleranceLine(
            name=f"{counter['name']}: distance from {counter['exact']}",
            declared=_number(counter["tolerance"]),
            observed=_number(abs(counter["observed"] - counter["expected"])),
            where="over all runs",
            mark=WITHIN if counter["within"] else OUTSIDE,
        )
    kernels = result.get("kernels") or {}
    if "version" in kernels:
        name = f"vLLM {kernels['version']}'s own rejection sampler ({kernels['device']})"
        yield view.ToleranceLine(
            name=f"{name}: chi-square p of whole rounds, at least",
            declared=Figure("", kernels["level"], "p"),
            observed=Figure("", kernels["p_value"], "p"),
            where=f"{kernels['n']} first rounds",
            mark=WITHIN if kernels["p_value"] >= kernels["level"] else OUTSIDE,
        )
        yield view.ToleranceLine(
            name=f"{name}: rounds at temperature 0 that are not the argmaxes",
            declared=_number(0.0),
            observed=_number(kernels["greedy_wrong"]),
            where=f"{kernels['greedy_rounds']} rounds in the same batch",
            mark=OUTSIDE if kernels["greedy_wrong"] else WITHIN,
        )


def _cell_row(position: int, result: Mapping[str, Any]) -> view.CellRow:
    cells = [cell for cell in result["cells"] if cell["position"] == position]
    return view.CellRow(
        position=position,
        cells=tuple(
            view.CellValue(
                token=cell["token"],
                exact=exact,
                expected=_probability(cell["exact"]),
                speculative=_probability(cell["speculative"]),
                target_only=_probability(cell["target_only"]),
                within=cell["within"],
            )
            for cell, exact in zip(cells, result["marginals"][position - 1], strict=True)
        ),
    )


def _trace(trace: Mapping[str, Any]) -> view.TraceView:
    counters = trace["counters"]
    return view.TraceView(
        seed=trace["seed"],
        rounds=tuple(_round(record) for record in trace["rounds"]),
        result=f"{' '.join(trace['tokens'])}: {len(trace['tokens'])} tokens in "
        f"{counters['target_passes']} target passes, {counters['accepted']} accepted of "
        f"{counters['drafted']} drafted, {counters['discarded']} discarded",
    )


def _round(record: Mapping[str, Any]) -> view.TraceRound:
    prefix = " ".join(record["prefix"]) or "nothing"
    drafted = " ".join(draft["token"] for draft in record["draft"]) or "nothing"
    accepted = record["counters"]["accepted"]
    steps: list[view.Sentence] = []
    if "correction" in record:
        last = record["correction"]
        law: list[str | Figure] = []
        for token, probability in last["residual"].items():
            law += [f"{', ' if law else ''}{token} ", _probability(probability)]
        rejected = record["draft"][accepted]["token"]
        lead = f"{rejected} is rejected. The residual, norm(max(0, p − q)), is "
        steps.append(
            (
                lead,
                *law,
                "; u ",
                _probability(last["u"]),
                f" draws {last['token']} from it.",
            )
        )
    if "bonus" in record:
        last = record["bonus"]
        why = "All drafts stand: the same target pass" if record["draft"] else "No draft: the pass"
        u = _probability(last["u"])
        steps.append((f"{why} gives one token more; u ", u, f" draws {last['token']}."))
    if record["discarded"]:
        lost = [one["token"] for one in record["discarded"]]
        steps.append((f"{listed(lost)} discarded: {record['discarded'][0]['reason']}.",))
    return view.TraceRound(
        title=f"Round {record['round'] + 1}, after {prefix}: drafted {drafted}",
        tests=tuple(_test(test) for test in record["verify"]),
        steps=tuple(steps),
        committed=" ".join(record["committed"]),
    )


def _test(test: Mapping[str, Any]) -> view.TraceTest:
    low, high = test["window"]
    return view.TraceTest(
        position=test["pos"],
        token=test["token"],
        p=_probability(test["p"]),
        q=_probability(test["q"]),
        low=_probability(low),
        high=_probability(high),
        u=_probability(test["u"]),
        outcome=test["outcome"] or "not committed",
        tone=OUTCOME_TONES.get(test["outcome"], "plain"),
    )


def _control(control: Mapping[str, Any]) -> view.ControlLine:
    largest = control["largest_deviation"]
    return view.ControlLine(
        name=control["name"],
        mistake=control["mistake"],
        mark=CAUGHT if control["caught_by"] else MISSED,
        total_variation=_number(control["total_variation"]),
        largest_deviation=_number(abs(largest["deviation"])),
        where=f"position {largest['position']}, token {largest['token']}",
        caught_by=tuple(control["caught_by"]),
        reasons=tuple(control["reasons"]),
    )
