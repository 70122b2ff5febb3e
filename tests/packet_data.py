"""Evidence for packet tests: a realistic run, a small one for gold files, and a hostile one.

No generator of random numbers: latencies come from a low-discrepancy sequence through the normal
quantile function and are rounded to microseconds, so that they are the same on any machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from speccheck.grading.blind import summarise
from speccheck.matrix import KResult, LatencyCell, MatrixRow
from speccheck.packet import RunEvidence
from speccheck.records import (
    Action,
    Decision,
    Estimate,
    Finding,
    Preference,
    Receipt,
    Verdict,
    prompt_band,
)

GOLD = Path(__file__).resolve().parent / "gold"

ROUTES = ("support-chat", "json-extract", "code-complete", "sql-report", "prose-draft")
SPEEDUP = {
    "support-chat": 0.58,
    "json-extract": 0.52,
    "code-complete": 0.61,
    "sql-report": 0.98,
    "prose-draft": 1.04,
}
"""TPOT of the speculative arm as a share of target-only's."""

HOSTILE = (
    "<script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "]]></script><svg onload=window.pwned=1>",
    "{{7*7}} {% raw %} ${7*7} #{7*7}",
    "\x1b[31mred\x1b[0m \x07 \x00 end",
    "left \u202eevil\u202c right \u200bhidden\ufeff",
    "| a | b |\n|---|---|\n| `tick` | ```fence``` |",
    "[link](javascript:window.pwned=1) ![x](http://evil.example/x.png) <http://evil.example>",
    "W" * 5000,
    "lone surrogate \ud800 and $x^2$ \\frac",
    "&lt;script&gt; &amp; &#x3c;b&#x3e;",
    "'; DROP TABLE receipts; --",
    "مرحبا שלום 你好 🙂",
)
"""What a user or a model may write."""


def spread(n: int, median: float, sigma: float, *, phase: float = 0.5) -> list[float]:
    """So many lognormal values in a scattered order, without a generator."""
    golden = (math.sqrt(5) - 1) / 2
    shares = [(phase + i * golden) % 1 for i in range(1, n + 1)]
    normal = NormalDist()
    return [median * math.exp(sigma * normal.inv_cdf(min(max(u, 1e-6), 1 - 1e-6))) for u in shares]


def receipt(**changes: Any) -> Receipt:
    """One completed request; anything can be changed."""
    plain = Receipt(
        receipt_id="receipt:0",
        run_id="run:4f1c0a9b7d2e",
        stage="shadow",
        phase="mirror",
        arm="target_only",
        route=ROUTES[0],
        prompt_id="support-001",
        pair_id="mirror:support-001:0",
        repeat=0,
        attempt=0,
        block=0,
        warm_up=False,
        mirror=False,
        target_model="tiny-target",
        proposer=None,
        algorithm=None,
        draft_sampling=None,
        k=None,
        engine="embedded 0.1.0",
        engine_config_id="engine:aaaaaaaaaaaaaaaaaaaa",
        policy_version="policy:bbbbbbbbbbbbbbbbbbbb",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=None,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        stop_count=0,
        response_format=None,
        logprobs=None,
        task="support",
        language="en",
        priority="normal",
        prompt_band=prompt_band(120),
        output_band="medium",
        temperature_band="greedy",
        features="",
        concurrency=8,
        prompt_tokens=120,
        cached_tokens=0,
        completion_tokens=64,
        reasoning_tokens=None,
        proposed_tokens=None,
        accepted_tokens=None,
        discarded_tokens=None,
        target_passes=63,
        verify_steps=0,
        acceptance_histogram=None,
        counts_source="engine",
        counts_note="",
        scheduled_ns=1_000_000_000,
        sent_ns=1_000_500_000,
        first_token_ns=1_020_000_000,
        first_content_ns=1_020_000_000,
        last_token_ns=1_500_000_000,
        done_ns=1_500_100_000,
        server_queue_ms=1.0,
        max_chunk_gap_ns=30_000_000,
        chunks=64,
        outcome="ok",
        http_status=200,
        error_class=None,
        error_message=None,
        finish_reason="stop",
        stop_reason=None,
        decision="target_only",
        decision_reason="",
        output_digest="tokens:0123456789",
    )
    return replace(plain, **changes)


def timed(
    number: int, arm: str, route: str, at_s: float, ttft_s: float, tpot_s: float, **changes: Any
) -> Receipt:
    """A receipt with these times; counts of the speculative arm to match."""
    tokens = 64
    scheduled = round(at_s * 1e6) * 1000 + 5_000_000_000
    sent = scheduled + 400_000
    first = sent + round(ttft_s * 1e6) * 1000
    speculative = arm == "speculative"
    base: dict[str, Any] = {
        "receipt_id": f"receipt:{number:020x}",
        "arm": arm,
        "route": route,
        "scheduled_ns": scheduled,
        "sent_ns": sent,
        "first_token_ns": first,
        "first_content_ns": first,
        "last_token_ns": first + round(tpot_s * 1e6) * 1000 * (tokens - 1),
        "completion_tokens": tokens,
        "k": 4 if speculative else None,
        "proposed_tokens": 92 if speculative else None,
        "accepted_tokens": 61 if speculative else None,
        "verify_steps": 23 if speculative else 0,
        "target_passes": 23 if speculative else 63,
        "decision": "speculate" if speculative else "target_only",
    }
    return receipt(**(base | changes))


def shadow_receipts(pairs: int, *, loads: Sequence[int] = (4, 16, 64)) -> Iterator[Receipt]:
    """`pairs` pairs per route and load, paired by prompt; a few without a partner."""
    number = 0
    for load in loads:
        slow = 1 + math.log2(load) / 4
        for route in ROUTES:
            factor = SPEEDUP[route] * (1 + 0.12 * math.log2(load / loads[0]))
            ttft = spread(pairs, 0.021 * slow, 0.25, phase=0.1)
            tpot = spread(pairs, 0.0092 * slow, 0.18, phase=0.3)
            gain = spread(pairs, factor, 0.12, phase=0.7)
            for i in range(pairs):
                pair = f"load-{load}:{route}-{i:03d}:0"
                common = {
                    "phase": f"load-{load}",
                    "prompt_id": f"{route}-{i:03d}",
                    "pair_id": pair,
                    "concurrency": load,
                    "block": i % 8,
                    "task": route.split("-")[0],
                    "temperature": 0.7 if i % 3 == 0 else 0.0,
                }
                for arm, t1, t2 in (
                    ("target_only", ttft[i], tpot[i]),
                    ("speculative", ttft[i] * 1.06, tpot[i] * gain[i]),
                ):
                    number += 1
                    yield timed(number, arm, route, i * 0.4, t1, t2, **common)
    for i in range(7):
        number += 1
        yield timed(number, "speculative", ROUTES[0], i, 0.02, 0.008, pair_id=f"lost:{i}:0")


def canary_receipts(n: int, *, fall_at: float = 0.7) -> Iterator[Receipt]:
    """`n` requests on each canary route; code-complete slows down and falls back."""
    number = 1_000_000
    for route in ROUTES[:3]:
        ttft = spread(n, 0.024, 0.3, phase=0.2)
        tpot = spread(n, 0.0105, 0.2, phase=0.6)
        for i in range(n):
            progress = i / n
            share = 0.05 if progress < 0.3 else 0.25 if progress < 0.6 else 0.5
            broken = route == "code-complete" and progress > 0.6
            fallen = route == "code-complete" and progress > fall_at
            speculative = (i * 0.618) % 1 < share and not fallen
            factor = SPEEDUP[route] * (2.6 if broken else 1) if speculative else 1
            number += 1
            yield timed(
                number,
                "speculative" if speculative else "target_only",
                route,
                100 + i * 240 / n,
                ttft[i] * (1.8 if broken else 1),
                tpot[i] * factor,
                stage="canary",
                phase="step",
                pair_id=f"step:{route}-{i}:0",
                prompt_id=f"{route}-{i % 150:03d}",
                concurrency=8,
                temperature=0.7,
                temperature_band="mid",
            )
    yield timed(
        number + 1,
        "speculative",
        "code-complete",
        250,
        0.03,
        0.02,
        stage="canary",
        outcome="error",
        error_class="stream_error",
        error_message="stream ended in mid-answer: <no finish reason>",
    )


def protected_receipts(n: int) -> Iterator[Receipt]:
    """Protected traffic in shadow."""
    for i, ttft in enumerate(spread(n, 0.02, 0.3)):
        yield timed(
            2_000_000 + i,
            "target_only",
            "protected",
            i * 0.3,
            ttft,
            0.01,
            priority="protected",
            pair_id=f"mirror:protected-{i}:0",
            block=i % 8,
        )


def estimate(
    value: float, low: float, high: float, n: int = 150, method: str = "paired bootstrap"
) -> Estimate:
    """An estimate at the usual level."""
    return Estimate(value, low, high, n, method, 0.05)


def cohort(
    name: str, verdict: str, why: str, ratio: tuple[float, float, float], **changes: Any
) -> MatrixRow:
    """A matrix row around an e2e ratio."""
    route, stage, *_, task = name.split(", ")
    load = "16"
    value, low, high = ratio
    e2e = estimate(value, low, high)
    cells = tuple(
        LatencyCell(
            metric, quantile, base * scale, base * scale * r, estimate(r, r * 0.93, r * 1.08)
        )
        for metric, base, r in (
            ("ttft", 0.0234, 1.06),
            ("tpot", 0.0116, value),
            ("e2e", 0.755, value * 1.01),
        )
        for quantile, scale in (("p50", 1.0), ("p95", 1.46), ("p99", 1.81))
        if quantile != "p99"
    )
    row = MatrixRow(
        cohort={
            "route": route,
            "stage": stage,
            "concurrency": load,
            "task": task,
            "prompt_band": "64-255",
        },
        name=name,
        pooled=(),
        n_target=150,
        n_speculative=150,
        n_pairs=150,
        n_prompts=75,
        unpaired=0,
        k=4,
        by_k=(KResult(4, 150, e2e, estimate(0.662, 0.641, 0.683), estimate(3.65, 3.52, 3.78)),),
        drafted=13_800,
        accepted=9_136,
        acceptance=estimate(0.662, 0.641, 0.683, method="ratio of sums, clustered"),
        mean_acceptance_length=estimate(3.65, 3.52, 3.78),
        draft_coverage=0.914,
        saved_modelled=None,
        saved_measured=0.412,
        saved_note="modelled: not estimated, the verify step is not calibrated at this load and k",
        latency=cells,
        e2e_ratio=e2e,
        errors_target=0,
        errors_speculative=0,
        refused=0,
        quality_cases=60,
        quality_regressions=0,
        quality_improvements=1,
        verdict=verdict,  # type: ignore[arg-type]
        why=why,
        share=0.07,
    )
    return replace(row, **changes)


def matrix_rows() -> list[MatrixRow]:
    """Rows of every kind: yes, no for each reason, too little, pooled, nothing drafted."""
    rows = []
    for route, task in (("support-chat", "support"), ("json-extract", "json")):
        for load, ratio in ((4, 0.61), (16, 0.68), (64, 0.93)):
            rows.append(
                cohort(
                    f"{route}, replay, concurrency {load}, {task}",
                    "speculate",
                    f"with k 4 requests take {ratio} ({ratio - 0.04:.2f} to {ratio + 0.04:.2f}) "
                    "times as long as target-only",
                    (ratio, ratio - 0.04, ratio + 0.04),
                )
            )
    rows += [
        cohort(
            "code-complete, replay, concurrency 64, code",
            "target_only",
            "TPOT p95 is 1.29 (1.21 to 1.38) times target-only, over 1.1; it costs more than it "
            "saves at concurrency 64 (acceptance 0.58 is not the cause)",
            (1.24, 1.17, 1.31),
        ),
        cohort(
            "code-complete, canary, code",
            "target_only",
            "requests take 1.42 (1.22 to 1.66) times as long as target-only; it costs more than it "
            "saves at this load (acceptance 0.66 is not the cause)",
            (1.42, 1.22, 1.66),
            is_paired=False,
            n_target=124,
            n_speculative=36,
            n_pairs=0,
        ),
        cohort(
            "sql-report, replay, concurrency 16, sql",
            "target_only",
            "nothing to gain: requests take 0.998 (0.985 to 1.01) times as long as target-only",
            (0.998, 0.985, 1.011),
            by_k=(
                KResult(2, 150, estimate(0.998, 0.985, 1.011), estimate(0.69, 0.66, 0.72), None),
                KResult(4, 150, estimate(1.02, 1.0, 1.04), estimate(0.49, 0.46, 0.52), None),
            ),
            k=2,
        ),
        cohort(
            "sql-report, replay, concurrency 16, sql, features json_schema",
            "target_only",
            "2 of 40 prompts fail their check each time with speculation and pass it each time "
            "without",
            (0.81, 0.77, 0.85),
            quality_regressions=2,
            quality_cases=40,
        ),
        cohort(
            "prose-draft, replay, concurrency 4, prose, temperature high",
            "target_only",
            "requests take 1.07 (1.02 to 1.12) times as long as target-only; acceptance is low "
            "(0.21, break-even at concurrency 4 is 0.29)",
            (1.07, 1.02, 1.12),
            acceptance=estimate(0.21, 0.18, 0.24),
            mean_acceptance_length=estimate(1.84, 1.72, 1.97),
            saved_measured=-0.07,
            saved_modelled=-0.05,
        ),
        cohort(
            "prose-draft, replay, the rest",
            "inconclusive",
            "too little evidence: 11 pairs, 20 needed",
            (0.95, 0.7, 1.3),
            n_target=14,
            n_speculative=13,
            n_pairs=11,
            unpaired=5,
            pooled=(
                "prose-draft, replay, concurrency 16, prose",
                "prose-draft, replay, concurrency 64, prose",
            ),
            latency=(),
            quality_cases=0,
        ),
        cohort(
            "support-chat, replay, concurrency 4, support, features min_p",
            "target_only",
            "this server refuses it when speculating: min_p",
            (1, 1, 1),
            n_pairs=0,
            n_speculative=40,
            n_target=40,
            refused=40,
            k=None,
            by_k=(),
            drafted=0,
            accepted=0,
            acceptance=None,
            mean_acceptance_length=None,
            draft_coverage=None,
            saved_measured=None,
            saved_note="no pair with token times",
            latency=(),
            e2e_ratio=None,
            quality_cases=0,
        ),
    ]
    return rows


def findings() -> list[Finding]:
    """Findings of every verdict, with the limits that rounding could cross."""

    def made(rule: str, verdict: Verdict, route: str, *rest: Any, **more: Any) -> Finding:
        cohort_, stage, value, limit, unit, why = rest
        return Finding(rule, verdict, route, cohort_, stage, value, limit, unit, why, **more)

    found = [
        made(
            "max_tpot_p95_regression",
            Verdict.FAIL,
            "code-complete",
            "",
            "canary",
            estimate(1.42, 1.218, 1.66, 210, "ratio of order-statistic intervals, p95"),
            1.1,
            "ratio",
            "TPOT p95 +42% (+21.8% to +66%, n 210) against target-only is over the limit of +10%",
            examples=(*(f"receipt:{1_000_600 + i:020x}" for i in range(3)), "receipt:gone"),
        ),
        made(
            "max_error_rate",
            Verdict.INCONCLUSIVE,
            "code-complete",
            "",
            "canary",
            estimate(0.0047, 0.0002, 0.0223, 211, "Clopper-Pearson"),
            0.01,
            "share",
            "errors 0.47% (0.02% to 2.23%, n 211) does not decide the limit of at most 1%",
            needed=147,
        ),
        made(
            "min_acceptance_rate",
            Verdict.FAIL,
            "prose-draft",
            "concurrency 4",
            "shadow",
            estimate(0.5471, 0.5443, 0.5499, 150, "ratio of sums, clustered"),
            0.55,
            "share",
            "acceptance 54.71% (54.43% to 54.99%, n 150) is under the limit of at least 55%",
        ),
        made(
            "min_speedup",
            Verdict.FAIL,
            "sql-report",
            "",
            "shadow",
            estimate(0.998, 0.985, 1.011),
            1.0,
            "ratio",
            "speed-up 1.002 (0.989 to 1.02, n 150) is under the limit of at least 1.05",
        ),
        made(
            "max_protected_delay",
            Verdict.ERROR,
            "prose-draft",
            "",
            "shadow",
            None,
            1.05,
            "ratio",
            "protected delay was not measured: no protected prompts in the corpus",
        ),
        made(
            "max_acceptance_rate",
            Verdict.INCONCLUSIVE,
            "json-extract",
            "",
            "shadow",
            estimate(0.93, 0.91, 0.95),
            0.95,
            "share",
            "acceptance 93% (91% to 95%, n 150) does not decide the limit of at most 95%",
            counted=False,
        ),
        made(
            "max_quality_regression_cases",
            Verdict.FAIL,
            "sql-report",
            "features json_schema",
            "replay",
            estimate(2, 2, 2, 40, "count"),
            0.0,
            "count",
            "2 quality regression cases in 40 are over the limit of at most 0",
        ),
    ]
    for route in ROUTES[:2]:
        for rule, value, limit, unit in (
            ("max_tpot_p95_regression", estimate(0.71, 0.66, 0.77), 1.1, "ratio"),
            ("max_e2e_p95_regression", estimate(0.74, 0.69, 0.8), 1.1, "ratio"),
            ("min_acceptance_rate", estimate(0.662, 0.641, 0.683), 0.55, "share"),
            ("max_error_rate", estimate(0.0, 0.0, 0.0083, 360), 0.01, "share"),
        ):
            found.append(
                made(
                    rule,
                    Verdict.PASS,
                    route,
                    "",
                    "canary",
                    value,
                    limit,
                    unit,
                    f"{rule} is within its limit",
                )
            )
    return found


def decisions(found: Sequence[Finding]) -> list[Decision]:
    """One final decision per route, after earlier stages' own."""

    def made(route: str, action: Action, stage: str, reason: str, **more: Any) -> Decision:
        mine = tuple(f for f in found if f.route == route)
        return Decision(route, action, stage, reason, mine, **more)

    return [
        made("support-chat", Action.PROMOTE, "replay", "all 4 findings pass"),
        made("code-complete", Action.PROMOTE, "shadow", "all 9 findings pass"),
        made("support-chat", Action.PROMOTE, "canary", "all 12 findings pass", k=4),
        made(
            "json-extract",
            Action.PROMOTE,
            "canary",
            "all 11 findings pass: TPOT p95 -29% (-34% to -23%, n 360) is within the limit of +10%",
            k=4,
        ),
        made(
            "code-complete",
            Action.FALL_BACK,
            "canary",
            "TPOT p95 +42% (+21.8% to +66%, n 210) against target-only is over the limit of +10%",
            scope="fails at concurrency 64; passes at concurrency 4, concurrency 16",
        ),
        made(
            "sql-report",
            Action.HOLD,
            "replay",
            "2 quality regression cases in 40 (features json_schema); speed-up 1.002 does not pay",
        ),
        made(
            "prose-draft",
            Action.INCONCLUSIVE,
            "shadow",
            "about 90 more requests are needed: acceptance 54.71% (54.43% to 54.99%, n 150)",
        ),
    ]


BEWARE = (
    "route prose-draft, replay: on average requests take 0.98 times as long, yet they get slower "
    "in: prose-draft, replay, concurrency 4, prose, temperature high"
)

REGRESSIONS: list[dict[str, Any]] = [
    {
        "prompt_id": "sql-017",
        "route": "sql-report",
        "task": "sql",
        "phase": "greedy",
        "label": "real",
        "check": "the query returns the expected rows",
        "reason": "column total does not exist",
        "runs": 3,
        "target_passes": 3,
        "speculative_passes": 0,
        "prompt": "Table orders(id, city, total, day). How many orders were placed in Bergen?",
        "target_text": "SELECT count(*) FROM orders WHERE city = 'Bergen';",
        "speculative_text": "SELECT count(*) FROM orders WHERE total = 'Bergen' = 'Bergen';",
        "receipts": ["receipt:000000000000000000a1", "receipt:000000000000000000a2"],
        "divergence": {
            "prompt_id": "sql-017",
            "route": "sql-report",
            "position": 9,
            "gap": 2.91,
            "kind": "violation",
            "target_token": " city",
            "speculative_token": " total",
        },
    },
    {
        "prompt_id": "json-044",
        "route": "sql-report",
        "task": "json",
        "phase": "greedy",
        "label": "numerical_tie",
        "check": "valid JSON for the schema",
        "reason": "trailing text after the object",
        "runs": 3,
        "target_passes": 3,
        "speculative_passes": 0,
        "prompt": "Return the order as JSON: two lamps to Ada, Oslo.",
        "target_text": '{"item": "lamp", "count": 2, "name": "Ada", "city": "Oslo"}',
        "speculative_text": '{"item": "lamp", "count": 2, "name": "Ada", "city": "Oslo"} Done.',
        "receipts": ["receipt:000000000000000000b1", "receipt:000000000000000000b2"],
    },
]


PREFERENCES = summarise(
    [
        *(Preference("judge", "big-one", f"p{i}", "target_only") for i in range(9)),
        *(Preference("judge", "big-one", f"q{i}", "speculative") for i in range(6)),
        *(Preference("judge", "big-one", f"r{i}", "tie") for i in range(24)),
        Preference("judge", "big-one", "u", "unclear", "no verdict in 'Hm.'"),
        Preference("human", "ada", "p0", "tie"),
    ]
)


def replay_evidence() -> dict[str, Any]:
    """`ReplayEvidence`, all parts."""
    return {
        "cases": 540,
        "improvements": 3,
        "regressions": REGRESSIONS,
        "quality": [
            {
                "task": "support",
                "n": 120,
                "target_passes": 118,
                "speculative_passes": 118,
                "lost": 0,
                "gained": 0,
                "mcnemar_p": None,
                "difference": {
                    "value": 0.0,
                    "low": -0.0221,
                    "high": 0.0221,
                    "n": 120,
                    "method": "Tango score interval",
                    "alpha": 0.05,
                },
                "margin": 0.02,
                "verdict": "inconclusive",
                "why": "0 percentage points (-2.21 to 2.21) does not decide the margin of 2",
            },
            {
                "task": "sql",
                "n": 300,
                "target_passes": 291,
                "speculative_passes": 288,
                "lost": 4,
                "gained": 1,
                "flipped": 2,
                "regressions": 1,
                "improvements": 0,
                "mcnemar_p": 0.1875,
                "difference": estimate(0.01, -0.0021, 0.019996, 300, "Tango score interval"),
                "margin": 0.02,
                "verdict": "pass",
                "why": "the upper limit is within the margin",
            },
        ],
        "form": [
            {
                "temperature": "temperature 0",
                "pairs": 540,
                "faults": [
                    {
                        "fault": "cut at the token limit",
                        "n": 540,
                        "target": 9,
                        "speculative": 11,
                        "only_speculative": 3,
                        "only_target": 1,
                        "difference": estimate(0.0037, -0.0036, 0.0118, 540, "Tango"),
                        "mcnemar_p": 0.3125,
                    }
                ],
                "none_shown": ["empty", "refuses"],
                "changes": [
                    {
                        "what": "structure",
                        "n": 540,
                        "changed": 2,
                        "control_n": 540,
                        "control_changed": 1,
                        "p_value": 0.5,
                    },
                    {
                        "what": "language",
                        "n": 498,
                        "changed": 0,
                        "control_n": 0,
                        "control_changed": 0,
                        "p_value": None,
                    },
                ],
                "length": estimate(1.003, 0.996, 1.01, 540),
            }
        ],
        "divergences": {
            "pairs": 540,
            "tokens": 31_204,
            "diverged": 7,
            "ties": 5,
            "near": 1,
            "violations": 1,
            "unknown": 0,
            "tau": 0.031,
            "per_1000": 0.22433,
            "control_per_1000": 0.12712,
            "p_value": 0.274,
            "cases": [
                REGRESSIONS[0]["divergence"],
                {
                    "prompt_id": "rag-009",
                    "route": "support-chat",
                    "position": 31,
                    "gap": None,
                    "kind": "unknown",
                    "target_token": " [1]",
                    "speculative_token": " [2]",
                },
            ],
        },
        "noise_floor": {
            "pairs": 540,
            "tokens": 31_466,
            "diverged": 4,
            "flipped": 1,
            "tau": 0.031,
            "positions": 402,
            "content_missed": 0.0074,
            "axes": [
                {"name": "alone against in a batch", "largest": 0.011, "n": 402},
                {"name": "decoding against scoring", "largest": 0.031, "n": 410},
            ],
        },
        "lossless": {
            "verdict": "fail",
            "alpha": 0.001,
            "margin": 0.02,
            "tokens": 12_400,
            "open_tokens": 9_120,
            "control_tokens": 12_380,
            "prompts": 8,
            "samples": 512,
            "needed_tokens": None,
            "tests": [
                {
                    "name": "T1 PIT, Kolmogorov",
                    "catches": "wrong temperature, top-p",
                    "n": 12_400,
                    "unit": "tokens",
                    "statistic": 0.0081,
                    "p_value": 0.41,
                    "effect": estimate(0.0081, 0.0, 0.0203),
                    "effect_unit": "share",
                    "where": "",
                    "control": estimate(0.0074, 0.0, 0.0196),
                    "limit": 0.0374,
                    "seen": 0.0253,
                    "verdict": "pass",
                    "why": "0.0081 (0 to 0.0203), A/A 0.0074, limit 0.0374, p 0.41",
                },
                {
                    "name": "T7 by index in the round",
                    "catches": "wrong bonus or one position",
                    "n": 12_010,
                    "unit": "tokens",
                    "statistic": 11.2,
                    "p_value": 4.1e-27,
                    "effect": estimate(0.162, 0.138, 0.186),
                    "effect_unit": "share",
                    "where": "the bonus token",
                    "control": None,
                    "limit": 0.08,
                    "seen": 0.0171,
                    "verdict": "fail",
                    "why": "differs: 0.162 (0.138 to 0.186) at the bonus token, no A/A, limit 0.08,"
                    " p 4.1e-27",
                },
                {
                    "name": "T8 two samples",
                    "catches": "anything, without logprobs",
                    "n": 512,
                    "unit": "samples",
                    "statistic": 1.02,
                    "p_value": 0.38,
                    "effect": estimate(0.09, 0.0, 0.14),
                    "effect_unit": "share",
                    "where": "",
                    "control": estimate(0.07, 0.0, 0.13),
                    "limit": 0.27,
                    "seen": 0.17,
                    "verdict": None,
                    "why": "512 of the 2,000 samples that it takes to pass",
                },
            ],
            "tested": [
                "12,400 verified tokens in 512 sampled answers to 8 prompts, temperature 1, top_p 1"
            ],
            "not_tested": [
                "the first token of an answer: the prompt's pass draws it, nothing is drafted",
                "T8: 512 of the 2,000 samples that it takes to pass",
            ],
        },
        "features": [
            {
                "slice": "stop",
                "feature": "stop strings",
                "checked": "text ends before the stop string",
                "status": "ok",
                "n": 40,
                "target_ok": 40,
                "speculative_ok": 40,
                "verdict": "pass",
                "why": "no text after the stop on either arm",
            },
            {
                "slice": "min_p",
                "feature": "min_p",
                "checked": "min_p 1 leaves the most likely token only, or is refused",
                "status": "unsupported",
                "n": 40,
                "target_ok": 40,
                "speculative_ok": 0,
                "verdict": "pass",
                "why": "route to target-only: the speculative server refuses it (parameter min_p)",
            },
            {
                "slice": "penalties",
                "feature": "penalties",
                "checked": "each of three changes the answer, and as on target-only",
                "status": "broken",
                "n": 12,
                "target_ok": 12,
                "speculative_ok": 8,
                "verdict": "fail",
                "why": "4 with repetition_penalty 1.3: repetition_penalty 1.3 is ignored",
            },
        ],
    }


def shadow_evidence() -> dict[str, Any]:
    """`ShadowEvidence`, all parts."""
    without = spread(160, 0.021, 0.3, phase=0.15)
    beside = spread(160, 0.0222, 0.31, phase=0.35)
    return {
        "sharing": "two servers on one machine, arms in alternating blocks",
        "noise_floor": {
            "pairs": 80,
            "ratios": {
                "tpot_p95_ratio": estimate(1.006, 0.981, 1.031),
                "e2e_mean_ratio": estimate(0.998, 0.991, 1.004),
            },
        },
        "scheduling": [
            {
                "load": f"{load} in flight",
                "traffic": traffic,
                "arm": arm,
                "n": 150,
                "figures": {
                    "queue_age_p95_s": 0.0312 * load / 16,
                    "server_queue_p95_s": 0.0041 if arm == "target_only" else None,
                    "kv_cache_share": 0.41,
                    "preemptions": 0,
                    "output_tokens_per_s": 412.7,
                },
            }
            for load in (16, 64)
            for traffic, arm in (("normal", "target_only"), ("mirror", "speculative"))
        ],
        "protected": {
            "metric": "TTFT, scheduled to first token",
            "design": "ABBA BAAB, 16 blocks of 20 s, 2 s washout",
            "without_mirror_s": without,
            "with_mirror_s": beside,
            "blocks": [
                {
                    "block": block,
                    "mirror": block % 4 in (1, 2),
                    "n": 20,
                    "p50_s": 0.021 + 0.0001 * block,
                    "p95_s": 0.034 + 0.0002 * block if block < 15 else None,
                }
                for block in range(16)
            ],
            "ratio": estimate(1.0412, 1.011, 1.0496, 16, "block log-ratio, t"),
            "limit": 1.05,
            "verdict": "pass",
            "why": "protected requests take 1.041 (1.011 to 1.0496) times as long with the mirror",
        },
    }


def canary_evidence() -> dict[str, Any]:
    """`CanaryEvidence`, all parts; code-complete falls back in its third step."""

    def monitors(route: str) -> list[dict[str, Any]]:
        broken = route == "code-complete"
        value = 1.42 if broken else 0.71
        tpot = estimate(
            value,
            value * 0.86,
            value * 1.17,
            210,
            "rank-band confidence sequence, p95, unpaired",
        )
        errors = estimate(0.0, 0.0, 0.0081, 442, "beta-binomial e-process")
        levels = {"pass_needs": 20.0, "fail_needs": 600.0}
        return [
            {
                "route": route,
                "rule": "max_tpot_p95_regression",
                "cohort": "",
                "method": tpot.method,
                "verdict": "fail" if broken else "pass",
                "n": 210,
                "estimate": tpot,
                "limit": 1.1,
                "unit": "ratio",
                "pass_evidence": 1.0 if broken else 312.0,
                "fail_evidence": 8841.0 if broken else 1.0,
                **levels,
                "next": "failed at request 210, and nothing but a reset undoes that"
                if broken
                else "passed at request 110, which does not expire",
            },
            {
                "route": route,
                "rule": "max_error_rate",
                "cohort": "",
                "method": errors.method,
                "verdict": "pass",
                "n": 442,
                "estimate": errors,
                "limit": 0.01,
                "unit": "share",
                "pass_evidence": 39.4,
                "fail_evidence": 0.004,
                **levels,
                "next": "passed at request 358, which does not expire; 4 in a row fail it",
            },
            {
                "route": route,
                "rule": "max_unsupported_requests",
                "cohort": "",
                "method": "count of requests",
                "verdict": "pass",
                "n": 442,
                "estimate": estimate(0.0, 0.0, 0.0, 442, "count of requests"),
                "limit": 0.0,
                "unit": "count",
                "pass_evidence": 1e300,
                "fail_evidence": 1.0,
                **levels,
                "next": "fails at the first one over the limit",
            },
        ]

    steps = []
    for route in ROUTES[:3]:
        for number, (share, start, end) in enumerate(
            ((0.05, 0, 72), (0.25, 72, 144), (0.5, 144, 240))
        ):
            broken = route == "code-complete" and number == 2
            steps.append(
                {
                    "step": f"{number + 1} of 3",
                    "route": route,
                    "share": share,
                    "started_s": float(start),
                    "ended_s": 168.0 if broken else float(end),
                    "speculative_n": round(share * 144),
                    "target_n": round((1 - share) * 144),
                    "verdict": "fail" if broken else "pass",
                    "why": "TPOT p95 +42% (+21.8% to +66%) is over the limit of +10%"
                    if broken
                    else "no rule is broken; speculation pays so far",
                }
            )
    return {
        "origin_ns": 105_000_000_000,
        "steps": steps,
        "monitors": [line for route in ROUTES[:3] for line in monitors(route)],
        "assignment": [
            {
                "route": route,
                "speculative": 115,
                "target_only": 317,
                "expected": 115.2,
                "evidence": 0.31,
                "needs": 1000.0,
            }
            for route in ROUTES[:3]
        ],
        "events": [
            {
                "at_s": 72.0,
                "kind": "step",
                "route": "code-complete",
                "text": "share raised from 5 % to 25 %",
            },
            {
                "at_s": 168.0,
                "kind": "fall_back",
                "route": "code-complete",
                "text": "TPOT p95 +42% (+21.8% to +66%, n 210) is over the limit of +10%",
                "rule": "max_tpot_p95_regression",
                "action": "disable_speculative_decoding_for_route",
                "handed_over": 3,
            },
        ],
    }


def stage(verdict: str, evidence: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """`StageEvidence` around a stage's own evidence."""
    return {
        "verdict": verdict,
        "reasons": [],
        "started": "2026-11-29T17:00:00Z",
        "finished": "2026-11-29T17:09:41Z",
        "counts": {"planned": 1500, "ok": 1499, "error": 1},
        "client_health": {
            "valid": True,
            "reasons": [],
            "is_late": False,
            "driven_s": 540.2,
            "lag_p99_s": 0.00213,
            "loop_stall_max_s": 0.0119,
            "loop_stall_total_s": 0.0743,
            "loop_cpu_share": 0.38,
            "process_cpu_share": 0.44,
            "cpu_wait_share": 0.021,
            "machine_cpu_share": None,
            "held_requests": 0,
        },
        "server_counters": server_counters(),
        "notes": [],
        "evidence": evidence,
    } | changes


def server_counters() -> dict[str, Any]:
    """`ServerCounters` of an arm that agrees and of one that does not; T20's receipts."""
    explained = "40 of 100 requests carry none: ended on a stop string"
    return {
        "target_only": {"not_measured": "/metrics: HTTP 404; is /metrics turned on?"},
        "speculative": {
            "rows": [
                {
                    "quantity": "generated tokens",
                    "server": 9_600,
                    "receipts": 9_600,
                    "gap": 0,
                    "why": "they agree",
                },
                {
                    "quantity": "drafted tokens",
                    "server": 15_000,
                    "receipts": 9_000,
                    "gap": 6_000,
                    "why": explained,
                },
                {
                    "quantity": "verify steps",
                    "server": None,
                    "receipts": 2_250,
                    "gap": None,
                    "why": "the server has no such counter",
                },
            ],
            "resets": [],
            "acceptance": estimate(0.61, 0.53, 0.69, 100, "counters"),
            "tpot_p95": {"low_s": 0.0, "high_s": 0.01},
        },
    }


def fixture_evidence() -> dict[str, Any]:
    """`FixtureResult.to_dict()` of the shipped table, as it was on the day it was kept."""
    text = (GOLD / "fixture_t4.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def run_row() -> dict[str, Any]:
    """`RunFacts`, all parts."""
    return {
        "run_id": "run:4f1c0a9b7d2e3344aa55",
        "created": "2026-11-29T16:58:02Z",
        "config": {
            "name": "tiny pair, k 4",
            "engine": "embedded",
            "seed": 7,
            "speculation": {"method": "draft_model", "num_speculative_tokens": 4},
            "attached": {"api_key_env": "SPECCHECK_KEY", "api_key": "sk-never-shown"},
            "canary": {"rate_per_s": 10.0, "max_in_flight": 8},
        },
        "digests": {
            "corpus": "corpus:6f0e5d4c3b2a19087766",
            "rules": "rules:11aa22bb33cc44dd55ee",
            "target": "model:0badc0ffee0badc0ffee",
            "draft": "model:feedfacefeedfacefeed",
        },
        "seed": 7,
        "versions": {"speccheck": "0.1.0", "python": "3.11.2", "onnxruntime": "1.23.0"},
        "machine": {"processor": "2 shared cores", "cores": 2, "system": "Linux"},
        "differences": {"max_num_seqs": [64, 32], "scheduler.policy": ["fcfs", "priority"]},
        "waived": {"scheduler.policy": "waived by name"},
        "expires": "2026-12-29, or until something it rests on changes",
        "traffic": [
            {"cohort": "support, greedy, 64-255 prompt tokens", "n": 300, "share": 0.75},
            {"cohort": "prose, mid, <64 prompt tokens", "n": 100, "share": 0.25},
        ],
    }


def arms() -> list[dict[str, Any]]:
    """Both arms as captured."""
    return [
        {
            "arm": arm,
            "url": f"http://user:hunter2@127.0.0.1:{port}",
            "engine": "speccheck-embedded 0.1.0",
            "model": "tiny-target",
            "speculative_config": config,
            "engine_config_id": f"engine:{port}aaaaaaaaaaaaaaaa",
            "config": {
                "argv": ["serve", "--port", str(port), "--api-key", "sk-never-shown"],
                "scheduler": {"policy": "fcfs", "max_num_seqs": 64},
            },
        }
        for arm, port, config in (
            ("target_only", 8101, None),
            (
                "speculative",
                8102,
                {"method": "draft_model", "num_speculative_tokens": 4, "model": "tiny-draft"},
            ),
        )
    ]


def realistic(
    *, pairs: int = 80, canary: int = 300, loads: Sequence[int] = (4, 16, 64)
) -> RunEvidence:
    """A whole run: about 3,400 receipts with the default sizes, every part present."""
    found = findings()
    return RunEvidence(
        run=run_row(),
        arms=arms(),
        stages={
            "fixture": stage(
                "pass",
                fixture_evidence(),
                counts={},
                client_health={"not_measured": "no requests are sent"},
                server_counters={"not_measured": "no requests are sent"},
            ),
            "replay": stage(
                "fail",
                replay_evidence(),
                reasons=["sql-report: 2 quality regression cases in 40"],
                notes=["open prose is compared by distribution only"],
            ),
            "shadow": stage("inconclusive", shadow_evidence(), reasons=["prose-draft: open"]),
            "canary": stage(
                "fail", canary_evidence(), reasons=["code-complete: fell back at 168 s"]
            ),
        },
        preferences=PREFERENCES,
        receipts=[
            *shadow_receipts(pairs, loads=loads),
            *protected_receipts(40),
            *canary_receipts(canary),
        ],
        matrix=matrix_rows(),
        findings=found,
        decisions=decisions(found),
        matrix_warnings=[BEWARE],
        matrix_advice=["route sql-report: keep requests with min_p on target-only"],
    )


def small() -> RunEvidence:
    """A run small enough for gold files to be read."""
    return realistic(pairs=3, canary=40, loads=(16,))


def poisoned(value: Any, number: list[int]) -> Any:
    """The same evidence with something hostile appended to every free text in it."""
    if isinstance(value, str):
        number[0] += 1
        return f"{value}{HOSTILE[number[0] % len(HOSTILE)]}"
    if isinstance(value, Mapping):
        return {
            key: item if key in FIXED else poisoned(item, number) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [poisoned(item, number) for item in value]
    return value


FIXED = {"verdict", "kind", "arm", "outcome", "label", "status", "started", "finished"}
"""Words of ours, which nobody else writes."""


def hostile() -> RunEvidence:
    """The small run in which every text that a user, a model or a server may write is hostile."""
    plain = small()
    number = [0]

    def bad(text: str) -> str:
        found: str = poisoned(text, number)
        return found

    routes = {route: bad(route) for route in ROUTES}
    stages = {}
    for name, one in plain.stages.items():
        parts = {key: value for key, value in one.items() if key not in {"verdict", "evidence"}}
        evidence = one["evidence"]
        stages[name] = {
            **poisoned(parts, number),
            "verdict": one["verdict"],
            "evidence": evidence if name == "fixture" else poisoned(evidence, number),
        }
    for step in stages["canary"]["evidence"]["steps"]:
        step["route"] = routes[ROUTES[0]]
    found = [
        replace(
            f,
            route=routes[f.route],
            why=bad(f.why),
            cohort=bad(f.cohort) if f.cohort else "",
            examples=tuple(bad(e) for e in f.examples),
        )
        for f in plain.findings
    ]
    return RunEvidence(
        run=poisoned(plain.run, number),
        arms=poisoned(plain.arms, number),
        stages=stages,
        preferences=[replace(p, who=bad(p.who)) for p in plain.preferences],
        receipts=[
            replace(
                r,
                route=routes.get(r.route, r.route),
                prompt_id=r.prompt_id + HOSTILE[0],
                error_message=bad(r.error_message) if r.error_message else None,
            )
            for r in plain.receipts
        ],
        matrix=[
            replace(row, name=bad(row.name), why=bad(row.why), pooled=tuple(map(bad, row.pooled)))
            for row in plain.matrix
        ],
        findings=found,
        decisions=[
            replace(d, route=routes[d.route], reason=bad(d.reason), findings=())
            for d in plain.decisions
        ],
        matrix_warnings=[bad(text) for text in plain.matrix_warnings],
        matrix_advice=[bad(text) for text in plain.matrix_advice],
    )
