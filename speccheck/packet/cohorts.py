"""View 2, the workload decision matrix: one row per cohort, and why where the answer is no."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from speccheck.charts import Ratio, Ratios
from speccheck.matrix import MatrixRow
from speccheck.measure import ALPHA, few_prompts
from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import interval, known, listed
from speccheck.packet.settings import setting_lines
from speccheck.packet.view import Figure, Mark, Missing
from speccheck.stats import FEWEST_CLUSTERS

LABEL_CHARS = 36
"""Longest cohort name in a chart; the row's number stands beside it."""

NOT_TIMED = "nothing was timed on both arms"
METRIC_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "e2e"}
COHORT_MARKS = {
    "speculate": Mark("speculate", "✓", "good"),
    "target_only": Mark("target-only", "–", "bad"),
    "inconclusive": Mark("inconclusive", "?", "unsure"),
}


def matrix_view(evidence: RunEvidence) -> view.MatrixView | Missing:
    """View 2, or why there is none."""
    if not evidence.matrix:
        return Missing("no cohort was measured on both arms")
    verdicts: Counter[str] = Counter(row.verdict for row in evidence.matrix)
    return view.MatrixView(
        level=Figure("", ALPHA, "share"),
        counts=tuple(
            Figure(mark.word, verdicts[verdict], "count")
            for verdict, mark in COHORT_MARKS.items()
            if verdicts[verdict]
        ),
        warnings=tuple(evidence.matrix_warnings),
        advice=tuple(evidence.matrix_advice),
        rows=tuple(_cohort(number, row) for number, row in enumerate(evidence.matrix, 1)),
        chart=_matrix_chart(evidence.matrix),
    )


def _cohort(number: int, row: MatrixRow) -> view.CohortRow:
    no_drafts = "no drafted token was counted"
    return view.CohortRow(
        number=number,
        name=row.name,
        mark=COHORT_MARKS[row.verdict],
        k=row.k,
        why=row.why,
        share=Figure("share of all requests", row.share, "share"),
        in_flight=row.in_flight,
        dimensions=setting_lines(row.cohort),
        pooled=row.pooled,
        is_paired=row.is_paired,
        n_pairs=row.n_pairs,
        n_target=row.n_target,
        n_speculative=row.n_speculative,
        unpaired=row.unpaired,
        accepted=row.accepted,
        drafted=row.drafted,
        acceptance=interval(row.acceptance, "share", no_drafts),
        mean_acceptance_length=interval(row.mean_acceptance_length, "tokens", no_drafts),
        draft_coverage=known(row.draft_coverage, "passes were not counted", "share"),
        saved_modelled=known(row.saved_modelled, _saved_note(row, "modelled"), "share"),
        saved_measured=known(row.saved_measured, _saved_note(row, "measured"), "share"),
        latency=tuple(_latency(metric, row) for metric in ("ttft", "tpot", "e2e")),
        e2e_ratio=interval(row.e2e_ratio, "ratio", NOT_TIMED),
        by_k=tuple(
            view.ProposalLine(
                k=one.k,
                n=one.n,
                e2e_ratio=interval(one.e2e_ratio, "ratio", NOT_TIMED),
                acceptance=interval(one.acceptance, "share", no_drafts),
                mean_acceptance_length=interval(one.mean_acceptance_length, "tokens", no_drafts),
            )
            for one in row.by_k
        ),
        errors_target=row.errors_target,
        errors_speculative=row.errors_speculative,
        refused=row.refused,
        quality=view.CohortQuality(
            row.quality_cases, row.quality_regressions, row.quality_improvements
        )
        if row.quality_cases
        else Missing("no prompt of this cohort was checked"),
    )


def _saved_note(row: MatrixRow, kind: str) -> str:
    """Why a kind is missing, from the row's note ("modelled: ...; measured: ...")."""
    for part in row.saved_note.split("; "):
        if part.startswith(f"{kind}: "):
            return part.removeprefix(f"{kind}: ").removeprefix("not estimated, ")
    return row.saved_note or "not estimated"


def _latency(metric: str, row: MatrixRow) -> view.LatencyGroup:
    cells = {cell.quantile: cell for cell in row.latency if cell.metric == metric}
    lines: list[view.LatencyLine | Missing] = [
        view.LatencyLine(
            quantile=cell.quantile,
            target=Figure("target-only", cell.target_s, "s"),
            speculative=Figure("speculative", cell.speculative_s, "s"),
            ratio=interval(cell.ratio, "ratio", "no ratio was estimated"),
        )
        for cell in cells.values()
    ]
    short = [quantile for quantile in ("p50", "p95", "p99") if quantile not in cells]
    if short:
        have = (
            f"{row.n_pairs} pairs"
            if row.is_paired
            else f"{min(row.n_target, row.n_speculative)} requests on the smaller arm"
        )
        lines.append(Missing(f"{have} are too few for {listed(short)}"))
    if cells and row.n_prompts < FEWEST_CLUSTERS:
        lines.append(Missing(f"no limits: {few_prompts(row.n_prompts)}"))
    return view.LatencyGroup(METRIC_NAMES[metric], tuple(lines))


def _matrix_chart(rows: Sequence[MatrixRow]) -> view.Chart | Missing:
    bars = []
    table: list[tuple[view.Cell, ...]] = []
    for number, row in enumerate(rows, 1):
        ratio = interval(row.e2e_ratio, "ratio", NOT_TIMED)
        if isinstance(ratio, Missing):
            continue
        name = row.name.replace("concurrency ", "c ").replace("temperature ", "T ")
        name = name if len(name) <= LABEL_CHARS else f"{name[: LABEL_CHARS - 1]}…"
        tone = COHORT_MARKS[row.verdict].tone
        bars.append(Ratio(f"{name}  {number}", ratio.value, ratio.low, ratio.high, tone))
        bounds = [
            Missing("no bound") if bound is None else Figure("", bound, "ratio")
            for bound in (ratio.low, ratio.high)
        ]
        table.append((number, row.name, ratio.n, Figure("", ratio.value, "ratio"), *bounds))
    if not bars:
        return Missing("no cohort was timed on both arms")
    return view.Chart(
        name="cohorts",
        title="e2e of speculative over target-only, by cohort",
        description="Each line is a cohort, numbered as in the table, c its concurrency: mean "
        "ratio of e2e times with its interval, within pairs except in the canary. Left of 1 is "
        "faster. Crosses stay target-only, hollow circles are inconclusive.",
        table=view.ChartTable(("row", "cohort", "n", "ratio", "low", "high"), tuple(table)),
        picture=Ratios(tuple(bars), None, "e2e ratio"),
    )
