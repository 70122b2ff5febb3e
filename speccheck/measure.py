"""Receipts to measurements: every number that a rule can judge, with its interval and a note.

The arms' receipts are joined by pair id, never by position. Receipts without a partner are counted
and said. A pair in which one side failed says nothing about latency; it counts as an error.

Nothing is averaged over loads: verifying k+1 positions is nearly free on an idle machine and costs
as much as k+1 steps on a full one, so each load level is measured by itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from speccheck import stats
from speccheck.records import Arm, Estimate, Measurement, Outcome, Receipt, prompt_band

ALPHA = 0.05
"""One-sided level at which a rule is passed."""

TPOT_MIN_TOKENS = 32
"""Shorter outputs are left out of TPOT: their last, cut round dominates it."""

SLOWER = 1.10
"""A pair whose TPOT is over this many times target-only's got slower: how many did is told beside
the ratio of quantiles, which is another question and the one that is judged (STATS 4.2)."""

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""The quantiles of latency that are measured, by the name they have in metrics."""

_BLOCKS_NEEDED = 8
"""Fewer pairs of blocks than this give no usable block bootstrap."""


# --- pairs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both arms' receipts joined by pair id, and what could not be joined."""

    pairs: tuple[tuple[Receipt, Receipt], ...]
    """(target-only, speculative), both completed."""
    target: tuple[Receipt, ...]
    """Every target-only receipt that counts, completed or not."""
    speculative: tuple[Receipt, ...]
    unpaired: int
    """Receipts whose partner was never sent or is missing."""
    failed: int
    """Pairs in which at least one side did not complete."""

    @property
    def note(self) -> str:
        """What was left out of the pairs, or empty."""
        parts = []
        if self.unpaired:
            parts.append(f"{self.unpaired} receipts without a partner left out")
        if self.failed:
            parts.append(f"{self.failed} pairs with a side that did not complete left out")
        return "; ".join(parts)


def _fell_back(receipt: Receipt) -> bool:
    return receipt.decision == "fell_back"


def is_control(receipt: Receipt) -> bool:
    """Whether the receipt is the second half of an A/A pair: it carries another phase's pair id."""
    return receipt.arm == Arm.TARGET_ONLY and not receipt.pair_id.startswith(f"{receipt.phase}:")


def pair_receipts(receipts: Iterable[Receipt]) -> Pairing:
    """Join the arms by pair id; the last attempt counts.

    Warm-up, A/A controls and requests that were moved to target-only after a fallback do not: the
    last came later than what they would be compared with.
    """
    latest: dict[tuple[str, str], Receipt] = {}
    for r in receipts:
        if r.warm_up or is_control(r) or (r.arm == Arm.TARGET_ONLY and _fell_back(r)):
            continue
        known = latest.get((r.pair_id, r.arm))
        if known is None or r.attempt > known.attempt:
            latest[r.pair_id, r.arm] = r
    target = {key: r for (key, arm), r in latest.items() if arm == Arm.TARGET_ONLY}
    speculative = {key: r for (key, arm), r in latest.items() if arm == Arm.SPECULATIVE}
    both = [(target[key], speculative[key]) for key in target if key in speculative]
    done = [(t, s) for t, s in both if t.outcome == s.outcome == Outcome.OK]
    return Pairing(
        tuple(done),
        tuple(target.values()),
        tuple(speculative.values()),
        len(target) + len(speculative) - 2 * len(both),
        len(both) - len(done),
    )


UNKNOWN_BAND = prompt_band(None)


def with_prompt_bands(receipts: Sequence[Receipt]) -> list[Receipt]:
    """The receipts, those without a count of prompt tokens in the band of their prompt.

    A request that failed has no such count. Left as it is, "unknown" would be a slice of nothing
    but failures. Its band is that of its pair's other side, or of its prompt on other requests.
    """
    known: dict[str, str] = {}
    for r in receipts:
        if r.prompt_band != UNKNOWN_BAND:
            known.setdefault(f"pair {r.pair_id}", r.prompt_band)
            known.setdefault(f"prompt {r.prompt_id}", r.prompt_band)
    return [
        replace(r, prompt_band=band)
        if r.prompt_band == UNKNOWN_BAND
        and (band := known.get(f"pair {r.pair_id}") or known.get(f"prompt {r.prompt_id}"))
        else r
        for r in receipts
    ]


# --- measurements for the rules -----------------------------------------------------------------


def positive(seconds: float | None) -> float | None:
    """A time that was measured: what took no time, or less, was not (a clock that was set back)."""
    return seconds if seconds is not None and seconds > 0 else None


LATENCIES: dict[str, Callable[[Receipt], float | None]] = {
    "ttft": lambda r: positive(r.ttft_s),
    "tpot": lambda r: positive(r.tpot_s),
    "e2e": lambda r: positive(r.e2e_s),
    "queue_age": lambda r: positive(r.queue_age_s),
}
"""How each latency is read from a receipt, in seconds, over 0."""


def latency(receipt: Receipt, name: str, *, tpot_min_tokens: int = TPOT_MIN_TOKENS) -> float | None:
    """A latency of a completed request, seconds; None where it says nothing about it."""
    if receipt.outcome != Outcome.OK:
        return None
    if name == "tpot" and (receipt.completion_tokens or 0) < tpot_min_tokens:
        return None
    return LATENCIES[name](receipt)


def measure_route(
    receipts: Sequence[Receipt],
    *,
    stage: str,
    route: str,
    rng: np.random.Generator,
    tpot_min_tokens: int = TPOT_MIN_TOKENS,
    kept_off: bool = False,
) -> list[Measurement]:
    """Every metric that receipts of both arms can give, for the route and for slices of it.

    Slices are named "concurrency 16", "prompt >=4096" and "temperature high" and appear where there
    are two or more of a kind. Latencies at different loads are never pooled: with several loads
    they are measured per load only. Protected traffic has its own metric (`measure_protected`).

    Metrics: acceptance_rate, mean_acceptance_length, draft_coverage; ttft, tpot, e2e and queue_age
    ratios at p50, p95, p99 (tpot_p95_ratio ...); e2e_mean_ratio; tpot_slower_share; error_rate,
    error_rate_target_only, error_rate_difference, unsupported_requests; length_finish_rate;
    fallback_rate.

    Outputs under `tpot_min_tokens` tokens, and pairs of unequal length, are left out of TPOT.
    What the eligibility policy keeps on target-only is evidence of neither arm and left out; with
    `kept_off` it alone is measured.
    """
    mine = with_prompt_bands(
        [
            r
            for r in receipts
            if r.route == route
            and r.stage == stage
            and r.priority != "protected"
            and not r.warm_up
            and r.kept_off is kept_off
        ]
    )
    loads = sorted({r.concurrency for r in mine})

    def measure(name: str, here: Sequence[Receipt]) -> list[Measurement]:
        return _measure(
            here,
            cohort=name,
            share=len(here) / len(mine) if mine else 1.0,
            stage=stage,
            route=route,
            rng=rng,
            tpot_min_tokens=tpot_min_tokens,
        )

    found = measure("", mine)
    if len(loads) > 1:
        for load in loads:
            found += measure(f"concurrency {load}", [r for r in mine if r.concurrency == load])
    for field, name in (("prompt_band", "prompt"), ("temperature_band", "temperature")):
        values = sorted({getattr(r, field) for r in mine} - {UNKNOWN_BAND})
        if len(values) > 1:
            for value in values:
                found += measure(f"{name} {value}", [r for r in mine if getattr(r, field) == value])
    return found


def _measure(
    receipts: Sequence[Receipt],
    *,
    cohort: str,
    share: float,
    stage: str,
    route: str,
    rng: np.random.Generator,
    tpot_min_tokens: int,
) -> list[Measurement]:
    pairing = pair_receipts(receipts)
    measured = _measured(cohort, share, stage, route, stats.FAIL_LEVELS)
    found = []
    if len({r.concurrency for r in receipts}) <= 1:
        for name, get in LATENCIES.items():
            found += _latency(
                pairing, name, get, measured, rng=rng, tpot_min_tokens=tpot_min_tokens
            )
    return [*found, *_counts(receipts, pairing, measured)]


def measure_counts(
    receipts: Sequence[Receipt], *, cohort: str, share: float, stage: str, route: str
) -> list[Measurement]:
    """What `measure_route` says of one cohort, without latencies and at the level of passing alone.

    For those who have intervals of their own and want the counts, notes and worst cases.
    """
    return _counts(receipts, pair_receipts(receipts), _measured(cohort, share, stage, route, ()))


Measured = Callable[..., Measurement]


def _measured(
    cohort: str, share: float, stage: str, route: str, fail_levels: Sequence[float]
) -> Measured:
    def measured(
        metric: str,
        estimate: Callable[[float], Estimate] | None,
        note: str = "",
        examples: Sequence[Receipt] = (),
    ) -> Measurement:
        return Measurement(
            metric,
            stage,
            route,
            cohort,
            estimate(ALPHA) if estimate else None,
            note,
            tuple(r.receipt_id for r in examples[:5]),
            tuple(estimate(level) for level in fail_levels) if estimate else (),
            share,
        )

    return measured


def _counts(receipts: Sequence[Receipt], pairing: Pairing, measured: Measured) -> list[Measurement]:
    return [
        *_acceptance(pairing.speculative, measured),
        *_outcomes(pairing, measured),
        _fallbacks(receipts, measured),
    ]


def _acceptance(spec: Sequence[Receipt], measured: Measured) -> list[Measurement]:
    counted = [r for r in spec if r.has_counts]
    drafting = [r for r in counted if r.proposed_tokens]
    drafted = sum(r.proposed_tokens or 0 for r in drafting)
    accepted = sum(r.accepted_tokens or 0 for r in drafting)
    completed = sum(r.outcome == Outcome.OK for r in spec)
    with_counts = sum(r.outcome == Outcome.OK for r in counted)
    parts = [f"{accepted} of {drafted} drafted tokens accepted"] if drafted else []
    if with_counts < completed:
        reasons = Counter(_why_no_counts(r) for r in spec if not r.has_counts)
        parts.append(
            f"from {with_counts} of {completed} completed requests"
            f" ({with_counts / completed:.0%}); the others carry no usable counts:"
            f" {reasons.most_common(1)[0][0]}"
        )
    if counted and not drafted:
        parts.append(f"no token was drafted in {len(counted)} requests")
    if not counted:
        parts.append("no speculative request carries draft counts")
    note = "; ".join(parts)
    worst = sorted(drafting, key=lambda r: (r.accepted_tokens or 0) / (r.proposed_tokens or 1))
    stepping = [r for r in drafting if r.verify_steps]
    return [
        measured(
            "acceptance_rate",
            (lambda a: acceptance_rate(drafting, alpha=a)) if drafting else None,
            note,
            worst,
        ),
        measured(
            "mean_acceptance_length",
            (lambda a: mean_acceptance_length(stepping, alpha=a)) if stepping else None,
            note if stepping else "no speculative request carries verify steps",
            worst,
        ),
        _coverage(counted, measured),
    ]


def _why_no_counts(receipt: Receipt) -> str:
    if None not in (receipt.proposed_tokens, receipt.accepted_tokens):
        return "more accepted tokens than drafted ones"
    return receipt.counts_note or "no reason given"


def acceptance_rate(drafting: Sequence[Receipt], *, alpha: float) -> Estimate:
    """Accepted over drafted tokens of receipts that drafted, prompts as clusters."""
    A, D = by_prompt(drafting, attrgetter("accepted_tokens"), attrgetter("proposed_tokens"))
    return _clustered(stats.acceptance_rate(A, D, alpha=alpha), drafting)


def mean_acceptance_length(stepping: Sequence[Receipt], *, alpha: float) -> Estimate:
    """Tokens per verify step of receipts that have such steps, prompts as clusters."""
    A, S = by_prompt(stepping, attrgetter("accepted_tokens"), attrgetter("verify_steps"))
    return _clustered(stats.mean_acceptance_length(A, S, alpha=alpha), stepping)


def by_prompt(
    receipts: Sequence[Receipt], *counts: Callable[[Receipt], int | None]
) -> tuple[list[int], ...]:
    """Sums of counts per prompt: repeats of a prompt are one cluster, copies at temperature 0."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * len(counts))
    for r in receipts:
        for i, count in enumerate(counts):
            sums[r.prompt_id][i] += count(r) or 0
    return tuple([row[i] for row in sums.values()] for i in range(len(counts)))


def _clustered(estimate: Estimate, receipts: Sequence[Receipt]) -> Estimate:
    """N counts requests, as rules ask for; the method says how many prompts they were."""
    prompts = len({r.prompt_id for r in receipts})
    if prompts == len(receipts):
        return estimate
    method = f"{estimate.method}, {prompts} prompts as clusters"
    return replace(estimate, n=len(receipts), method=method)


def _coverage(counted: Sequence[Receipt], measured: Measured) -> Measurement:
    """Verify steps with drafts over all decode passes of the target."""
    known = [r for r in counted if r.verify_steps is not None and r.target_passes]
    steps, passes = by_prompt(known, attrgetter("verify_steps"), attrgetter("target_passes"))
    return measured(
        "draft_coverage",
        (lambda a: _clustered(stats.acceptance_rate(steps, passes, alpha=a), known))
        if known
        else None,
        f"{sum(steps)} of {sum(passes)} decode passes checked drafts"
        if known
        else "no request carries verify steps and decode passes",
    )


def _latency(
    pairing: Pairing,
    name: str,
    get: Callable[[Receipt], float | None],
    measured: Measured,
    *,
    rng: np.random.Generator,
    tpot_min_tokens: int,
) -> list[Measurement]:
    note = pairing.note
    pairs = pairing.pairs
    if name == "tpot":
        comparable = [(t, s) for t, s in pairs if same_length(t, s, tpot_min_tokens)]
        if len(comparable) < len(pairs):
            left_out = len(pairs) - len(comparable)
            reason = (
                f"{left_out} pairs under {tpot_min_tokens} tokens or of unequal length left out"
            )
            note = f"{note}; {reason}" if note else reason
        pairs = tuple(comparable)
    values = [(t, s, get(t), get(s)) for t, s in pairs]
    known = [(t, s, a, b) for t, s, a, b in values if a is not None and b is not None]
    if len(known) < len(values):
        note = f"{note}; {len(values) - len(known)} pairs without times".removeprefix("; ")
    metrics = [f"{name}_{label}_ratio" for label in QUANTILES]
    if not known and not pairing.pairs and pairing.target and pairing.speculative:
        least = tpot_min_tokens if name == "tpot" else 0
        return _unpaired_latency(pairing, name, measured, rng=rng, least=least)
    if not known:
        none = note or "no completed pair"
        return [
            measured(metric, None, none)
            for metric in (*metrics, *(["e2e_mean_ratio"] if name == "e2e" else []))
        ]
    target = np.array([a for _, _, a, _ in known])
    speculative = np.array([b for _, _, _, b in known])
    clusters = clusters_of([(t, s) for t, s, _, _ in known])
    prompts, unit = np.unique([t.prompt_id for t, _, _, _ in known], return_inverse=True)
    slower = speculative > SLOWER * target
    if name == "tpot":
        own = f"{slower.sum()} of {len(known)} pairs took over {SLOWER:g} times as long"
        note = f"{own}; {note}".removesuffix("; ")
    slowest = [s for _, s, a, b in sorted(known, key=lambda x: -(x[3] / x[2] if x[2] else 0))]
    draws = stats.bootstrap_quantile_ratios(
        target,
        speculative,
        tuple(QUANTILES.values()),
        rng=rng,
        blocks=clusters.get("blocks"),
        prompts=clusters.get("prompts"),
    )
    if not draws.draws:
        note = f"{note}; {few_prompts(prompts.size)}".removeprefix("; ")
    found = [
        measured(
            f"{name}_{label}_ratio",
            lambda a, p=p: quantile_ratio(draws, target, speculative, p, alpha=a),
            _times_note(stats.quantile(target, p), stats.quantile(speculative, p), label, note),
            slowest,
        )
        for label, p in QUANTILES.items()
    ]
    if name == "tpot":
        found.append(
            measured(
                "tpot_slower_share",
                lambda a: replace(
                    stats.clustered_share(np.bincount(unit, slower), np.bincount(unit), alpha=a),
                    n=len(known),
                ),
                f"pairs whose TPOT is over {SLOWER:g} times target-only's",
                slowest,
            )
        )
    if name == "e2e":
        found.append(
            measured(
                "e2e_mean_ratio",
                lambda a: stats.geometric_mean_ratio(target, speculative, alpha=a, **clusters),
                note,
                slowest,
            )
        )
    return found


def quantile_ratio(
    draws: stats.RatioDraws,
    target: npt.ArrayLike,
    speculative: npt.ArrayLike,
    p: float,
    *,
    alpha: float,
) -> Estimate:
    """From the draws, or the conservative order statistics where the tail is too thin for them.

    A resampled maximum is never over the observed one, so that few values beyond a quantile make
    limits that are far too near; those of order statistics do not exist then, which is the truth.
    Where there were too few prompts or blocks to draw from, there are no limits at all: order
    statistics would take repeats of one prompt for independent.
    """
    if p in draws.values and (not draws.draws or draws.n * min(p, 1 - p) >= stats.TAIL_VALUES):
        return draws.estimate(p, alpha=alpha)
    return stats.order_statistic_ratio(target, speculative, p, alpha=alpha)


def few_prompts(n: int) -> str:
    """Why a quantile of so few different prompts has no limits, and what mends it, in words."""
    prompts = "1 prompt" if n == 1 else f"{n} different prompts"
    return (
        f"these are of {prompts}, and under {stats.FEWEST_CLUSTERS} a quantile has no limits,"
        " however often each is sent: give the route more prompts"
    )


def _times_note(target_s: float, speculative_s: float, label: str, note: str) -> str:
    times = f"{label} {_ms(target_s)} target-only, {_ms(speculative_s)} speculative"
    return f"{times}; {note}" if note else times


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _unpaired_latency(
    pairing: Pairing,
    name: str,
    measured: Measured,
    *,
    rng: np.random.Generator,
    least: int,
) -> list[Measurement]:
    """A canary sends each request to one arm: independent samples.

    Each arm is resampled; where that says nothing (a tail of too few values) the conservative
    order-statistic ratio is left. Outputs under `least` tokens are left out.
    """

    def values(side: Sequence[Receipt]) -> list[float]:
        return [v for r in side if (v := latency(r, name, tpot_min_tokens=least)) is not None]

    target, speculative = values(pairing.target), values(pairing.speculative)
    if not target or not speculative:
        return [
            measured(f"{name}_{label}_ratio", None, "one arm has no times") for label in QUANTILES
        ]
    note = f"unpaired: {len(target)} target-only and {len(speculative)} speculative requests"
    if least:
        note += f" of {least} tokens and more"
    draws = stats.unpaired_quantile_ratios(target, speculative, tuple(QUANTILES.values()), rng=rng)
    found = [
        measured(
            f"{name}_{label}_ratio",
            lambda a, p=p: quantile_ratio(draws, target, speculative, p, alpha=a),
            _times_note(stats.quantile(target, p), stats.quantile(speculative, p), label, note),
        )
        for label, p in QUANTILES.items()
    ]
    if name == "e2e":
        found.append(
            measured(
                "e2e_mean_ratio",
                lambda a: stats.unpaired_mean_ratio(target, speculative, alpha=a),
                note,
            )
        )
    return found


def same_length(target: Receipt, speculative: Receipt, least: int) -> bool:
    """Whether both answers have `least` tokens and lengths within a tenth: equal work, paired."""
    a, b = target.completion_tokens, speculative.completion_tokens
    return a is not None and b is not None and min(a, b) >= least and abs(a - b) <= 0.1 * max(a, b)


def clusters_of(pairs: Sequence[tuple[Receipt, Receipt]]) -> dict[str, list[str]]:
    """What pairs are not independent within, for the intervals: `blocks` and `prompts`.

    The block of each pair, if there are enough; its prompt, if any comes again: its repeats do the
    same work.
    """
    found = {}
    blocks = [f"{t.phase}/{t.block}" for t, _ in pairs]
    if len(set(blocks)) >= _BLOCKS_NEEDED:
        found["blocks"] = blocks
    prompts = [t.prompt_id for t, _ in pairs]
    if len(set(prompts)) < len(prompts):
        found["prompts"] = prompts
    return found


def is_refused(receipt: Receipt) -> bool:
    """Whether the arm turned the request down for a parameter that it does not support."""
    return receipt.error_class == "unsupported_parameter"


def is_error(receipt: Receipt) -> bool:
    """Timeout, server error, broken or cut stream, refusal of another kind, no finish reason.

    Cancelled by us is no error; refused for a parameter the arm does not support has its own rule.
    """
    if is_refused(receipt) or receipt.outcome == Outcome.CANCELLED:
        return False
    if receipt.outcome != Outcome.OK:
        return True
    return receipt.finish_reason is None or receipt.completion_tokens == 0


def _errors(pairing: Pairing, measured: Measured) -> list[Measurement]:
    """Error rates of both arms and their difference: what is acceptable, what speculation's own."""
    sides = []
    for side in (pairing.speculative, pairing.target):
        judged = [r for r in side if not is_refused(r) and r.outcome != Outcome.CANCELLED]
        sides.append((judged, [r for r in judged if is_error(r)]))

    def rate(arm: int, alpha: float) -> Estimate:
        judged, bad = sides[arm]
        return stats.clopper_pearson(len(bad), len(judged), alpha=alpha)

    found = []
    for arm, metric in enumerate(("error_rate", "error_rate_target_only")):
        judged, bad = sides[arm]
        note = f"{len(bad)} of {len(judged)} requests failed"
        if bad:
            kinds = Counter(r.error_class or r.outcome for r in bad)
            note += f": {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(3))}"
            if arm == 0 and sides[1][0]:
                note += f"; {len(sides[1][1])} of {len(sides[1][0])} on target-only"
        found.append(
            measured(
                metric,
                (lambda a, arm=arm: rate(arm, a)) if judged else None,
                note if judged else "no request was sent",
                bad,
            )
        )
    if all(judged for judged, _ in sides):
        found.append(
            measured(
                "error_rate_difference",
                lambda a: stats.difference(rate(1, a), rate(0, a)),
                "speculative less target-only",
            )
        )
    return found


def _outcomes(pairing: Pairing, measured: Measured) -> list[Measurement]:
    found = _errors(pairing, measured)
    spec = pairing.speculative
    both = {r.pair_id for r in pairing.target if is_refused(r)}
    refused = [r for r in spec if is_refused(r) and r.pair_id not in both]
    completed = [r for r in spec if r.outcome == Outcome.OK]
    cut = sum(r.finish_reason == "length" for r in completed)
    count = float(len(refused))
    found += [
        measured(
            "unsupported_requests",
            (lambda a: Estimate(count, count, count, len(spec), "count of requests", a))
            if spec
            else None,
            _refusal_note(refused, spec)
            + (f"; {len(both)} more are refused by target-only too" if both else ""),
            refused,
        ),
        measured(
            "length_finish_rate",
            (lambda a: stats.clopper_pearson(cut, len(completed), alpha=a)) if completed else None,
            f"{cut} of {len(completed)} completed answers ran to the length limit",
        ),
    ]
    return found


def _fallbacks(receipts: Sequence[Receipt], measured: Measured) -> Measurement:
    """Share of the requests meant for the speculative arm that fell back."""
    meant = [r for r in receipts if r.arm == Arm.SPECULATIVE or _fell_back(r)]
    fell = [r for r in meant if _fell_back(r)]
    return measured(
        "fallback_rate",
        (lambda a: stats.clopper_pearson(len(fell), len(meant), alpha=a)) if meant else None,
        f"{len(fell)} of {len(meant)} requests fell back" if meant else "no request was sent",
        fell,
    )


def used_options(receipt: Receipt) -> set[str]:
    """Names of the options that a request used."""
    used = {
        "min_p": receipt.min_p > 0,
        "top_p": receipt.top_p < 1,
        "top_k": receipt.top_k > 0,
        "seed": receipt.seed is not None,
        "frequency_penalty": receipt.frequency_penalty != 0,
        "presence_penalty": receipt.presence_penalty != 0,
        "repetition_penalty": receipt.repetition_penalty != 1,
        "stop": receipt.stop_count > 0,
        "logprobs": receipt.logprobs is not None,
        "response_format": receipt.response_format is not None,
    }
    names = {name for name, is_used in used.items() if is_used}
    return names | {name for name in receipt.features.split(",") if name}


def blamed_options(refused: Iterable[Receipt], served: Iterable[Receipt]) -> list[str]:
    """What all refused requests use and none of those served does."""
    common = set.intersection(*(used_options(r) for r in refused))
    return sorted(common.difference(*(used_options(r) for r in served)))


def _refusal_note(refused: Sequence[Receipt], spec: Sequence[Receipt]) -> str:
    """How many were refused, and the option that tells them from those that were served."""
    if not spec:
        return "no request was sent"
    if not refused:
        return f"0 of {len(spec)} requests refused"
    common = set.intersection(*(used_options(r) for r in refused))
    blamed = blamed_options(refused, [r for r in spec if not is_refused(r)])
    message = Counter(r.error_message or "no message" for r in refused).most_common(1)[0][0]
    text = f"{len(refused)} of {len(spec)} requests ({len(refused) / len(spec):.0%}) refused by"
    text += " this arm for what they ask, not by chance"
    if blamed:
        text += f"; all of them carry {', '.join(blamed)}, none of those served does"
    elif not common:
        text += (
            "; no option of theirs explains it: look at the defaults that the server adds"
            " (generation_config)"
        )
    return f"{text}; the server says {message[:160]!r}"


def measure_protected(receipts: Sequence[Receipt], *, stage: str, route: str) -> list[Measurement]:
    """Metric protected_e2e_ratio: protected traffic in blocks with speculative work, over without.

    `receipts` are all of a switchback run, those of other routes too: a block counts as "with" if
    any receipt in it ran (or was mirrored) on the speculative arm. Empty without protected traffic.
    """
    run = [r for r in receipts if r.stage == stage and not r.warm_up and not is_control(r)]
    protected = [r for r in run if r.priority == "protected" and r.outcome == Outcome.OK]
    if not protected:
        return []
    loaded = {(r.phase, r.block) for r in run if r.arm == Arm.SPECULATIVE}
    # Blocks 2j and 2j+1 are one with and one without: a block that no protected request fell into
    # takes its neighbour out, or all later blocks would be compared with the wrong ones.
    present = {(r.phase, r.block) for r in protected}
    whole = {(phase, block) for phase, block in present if (phase, block ^ 1) in present}
    timed = [
        (r, seconds)
        for r in protected
        if (r.phase, r.block) in whole and (seconds := positive(r.effective_s))
    ]
    number = {key: i for i, key in enumerate(sorted(whole))}

    def estimate(alpha: float) -> Estimate:
        return stats.block_log_ratio(
            [math.log(seconds) for _, seconds in timed],
            [number[r.phase, r.block] for r, _ in timed],
            [(r.phase, r.block) in loaded for r, _ in timed],
            alpha=alpha,
        )

    with_n = sum((r.phase, r.block) in loaded for r, _ in timed)
    return [
        Measurement(
            "protected_e2e_ratio",
            stage,
            route,
            "",
            estimate(ALPHA),
            f"{with_n} protected requests beside speculative work, {len(timed) - with_n} without",
            tuple(r.receipt_id for r, _ in sorted(timed, key=lambda x: -x[1])[:5]),
            tuple(estimate(level) for level in stats.FAIL_LEVELS),
        )
    ]


FLOOR_LEAST = 10
"""A/A pairs without which no noise floor is told; a quantile needs one pair beyond it besides."""


def a_a_pairs(receipts: Iterable[Receipt]) -> list[tuple[Receipt, Receipt]]:
    """Target-only receipts of one load that share a pair id, both completed: the A/A control.

    They come in pairs of blocks, earlier and later; in every other one the later side is named
    first, so that what drifted between the blocks cancels in a ratio of the two.
    """
    twins: dict[str, dict[tuple[str, int, int], Receipt]] = defaultdict(dict)
    for r in sorted(receipts, key=lambda r: r.attempt):
        if r.arm == Arm.TARGET_ONLY and not r.warm_up:
            twins[r.pair_id][r.phase, r.block, r.repeat] = r
    pairs = []
    for found in twins.values():
        done = sorted(found.values(), key=lambda r: (r.block, r.repeat))
        if len(done) == 2 and all(r.outcome == Outcome.OK for r in done):
            first, second = done
            if first.concurrency == second.concurrency:
                pairs.append((first, second))
    blocks = sorted({first.block for first, _ in pairs})
    return [
        (second, first) if blocks.index(first.block) % 2 else (first, second)
        for first, second in pairs
    ]


def noise_floors(
    receipts: Iterable[Receipt],
    *,
    rng: np.random.Generator,
    tpot_min_tokens: int = TPOT_MIN_TOKENS,
) -> dict[str, Estimate]:
    """Target-only over target-only: metric name (as in `measure_route`) -> ratio of the A/A pairs.

    What the measurement shows where nothing differs (STATS 5.8). Answers of unequal length are no
    equal work and left out of TPOT and e2e. Empty without enough A/A pairs.
    """
    pairs = a_a_pairs(receipts)
    least = {"tpot": tpot_min_tokens, "e2e": 1}
    found: dict[str, Estimate] = {}
    for name, get in LATENCIES.items():
        known = [
            (a, b)
            for s, t in pairs
            if (name not in least or same_length(s, t, least[name]))
            and (a := get(s)) is not None
            and (b := get(t)) is not None
        ]
        n = len(known)
        if n < FLOOR_LEAST:
            continue
        first, second = zip(*known, strict=True)
        told = {label: p for label, p in QUANTILES.items() if n * (1 - p) >= 1 - 1e-9}
        draws = stats.bootstrap_quantile_ratios(first, second, tuple(told.values()), rng=rng)
        for label, p in told.items():
            found[f"{name}_{label}_ratio"] = draws.estimate(p, alpha=ALPHA)
        if name == "e2e":
            found["e2e_mean_ratio"] = stats.geometric_mean_ratio(first, second, alpha=ALPHA)
    return found


def acceptance_from_counters(
    accepted: int, drafted: int, requests: int, *, stage: str, route: str
) -> Measurement:
    """Metric acceptance_rate from the server's own counters, where requests carry no counts.

    Counter differences over the run, after resets were taken care of. Nothing is estimated from
    more accepted than drafted tokens.
    """
    note = f"{accepted} of {drafted} drafted tokens accepted, from the server's counters"
    if accepted > drafted:
        note += ", which cannot be"
    if not 0 <= accepted <= drafted or not drafted:
        return Measurement("acceptance_rate", stage, route, "", None, note)
    estimate, *others = (
        stats.acceptance_from_totals(accepted, drafted, requests, alpha=level)
        for level in (ALPHA, *stats.FAIL_LEVELS)
    )
    return Measurement("acceptance_rate", stage, route, "", estimate, note, (), tuple(others))
