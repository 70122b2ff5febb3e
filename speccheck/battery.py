"""Whether sampled answers are drawn from the law that the target states for each of their tokens.

Sampled outputs of two right servers differ, so nothing can be compared token by token. But the
target can be asked, by teacher forcing, what it thought of each token that the speculative arm
drew given the tokens before it; under a lossless verifier those tokens follow it. Tests T1 to T8
(STATS 3.2) look at that from different sides, since each wrong verifier hides from some of them.
The same battery on target-only answers (A/A) shows what numerics alone look like.

A test fails where its p-value, Holm-adjusted over the tests, is at most `ALPHA` and its effect is
beyond what A/A shows and numerics make (`NUMERICS`). It passes where its effect's upper limit
lies within A/A + margin; what few samples cannot bound is no pass. The first token of an answer
comes from the prompt's pass and is never drafted: all tests begin with the second. Pure: `probe`
does the asking.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speccheck import stats
from speccheck.records import Estimate, Measurement, Verdict, worst
from speccheck.stats import Fit, Floats, Ints

ALPHA = 1e-3
"""Level of the battery, over all of its tests together (Holm); fixed before any sample."""

MARGIN = 0.02
"""How far beyond A/A T6 may reach (STATS 3.2), the other tests in proportion."""

NUMERICS = 0.005
"""How far beyond A/A an effect of T6 may be without being called one, however certain it is, other
tests in proportion: at 100,000 tokens the noise of bf16 kernels is detected too, and that of a
verify step need not be the noise of a decode step."""

CLEAN = 0.01
"""P-value above which target-only answers themselves show no deviation."""

TAIL_FLOOR = 1e-6
"""Least probability of the lumped tail: log-probabilities come as 32-bit floats."""

OPEN_BELOW = 0.999
"""A token is open where the target's best candidate has less probability than this."""

SLICE = "temperature > 0"
"""The slice of traffic that a finding of the battery is about: greedy answers are not sampled."""

BONUS = "bonus"

LEAST_AT_INDEX = 200
"""Tokens at an index in the round under which T7 leaves it out."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One test of the battery: what it looks at, and what is asked of it."""

    title: str
    catches: str
    unit: str
    """What n counts."""
    effect_unit: str
    margin_ratio: float
    """Its margin as a multiple of the battery's."""
    least: int
    """n under which finding nothing says nothing (STATS 4.7)."""


KINDS: dict[str, Kind] = {
    "T1": Kind("PIT, Kolmogorov", "wrong temperature, top-p", "tokens", "share", 1.5, 5000),
    "T1b": Kind("PIT, 20 bins", "wrong temperature, top-p", "tokens", "share", 2.0, 5000),
    "T2": Kind("rank categories", "cut or fattened tails", "tokens", "share", 1.5, 5000),
    "T3": Kind("surprisal", "too sure or too unsure", "tokens", "nats", 2.5, 5000),
    "T4": Kind("token ids", "draws that fall through to one id", "tokens", "share", 1.5, 5000),
    "T5": Kind("repeated samples", "anything, at few prefixes", "visits", "share", 6.0, 600),
    "T6": Kind("draft-aware, sign", "wrong acceptance or residual", "tokens", "share", 1.0, 800),
    "T6b": Kind("draft-aware, log ratio", "the same, weighted", "tokens", "nats", 4.0, 800),
    "T7": Kind(
        "by index in the round", "wrong bonus or one position", "tokens", "share", 4.0, 3000
    ),
    "T8": Kind("two samples", "anything, without logprobs", "samples", "share", 10.0, 2000),
}
"""Every test, in order."""


# --- what is known of the samples ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's likeliest tokens at each of m positions, most likely first."""

    ids: Ints
    """(m, k)"""
    probs: Floats
    """(m, k)"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled answer, and what is known about its tokens from the second on."""

    prompt: str
    tokens: tuple[int, ...]
    target: Scores | None = None
    """The target's, by teacher forcing, at tokens[1:]; None where it gives no logprobs."""
    draft: Scores | None = None
    """The draft's own, where drafts are drawn from them."""
    proposed: tuple[int | None, ...] | None = None
    """For one-hot drafts: the id proposed at each of tokens[1:], None where none was."""
    strata: tuple[str, ...] | None = None
    """For each of tokens[1:] its index in the round ("1", "2" ... or `BONUS`), "" where nothing was
    drafted; None where the server does not say."""


Round = tuple[int, int, int]
"""Index of a round's first token in the answer, tokens drafted, tokens accepted."""


def rounds(
    n_tokens: int,
    accepted: Sequence[int],
    drafted: Sequence[int],
    drafts_at: Callable[[int], int] | None = None,
) -> list[Round] | None:
    """The rounds of an answer of `n_tokens` from its verify steps, or None where they do not fit.

    Steps without drafts are not reported. A draft model drafts in every step but one that has a
    single token left; a drafter that may find nothing needs `drafts_at`: how many tokens it would
    propose after the first i of the answer.

    >>> rounds(6, [2, 0], [4, 2])
    [(1, 4, 2), (4, 2, 0), (5, 0, 0)]
    """
    found: list[Round] = []
    at, step = 1, 0
    while at < n_tokens:
        proposal = None if drafts_at is None else drafts_at(at)
        if proposal == 0:
            found.append((at, 0, 0))
            at += 1
        elif step < len(drafted):
            if proposal is not None and proposal < drafted[step]:
                return None
            found.append((at, drafted[step], accepted[step]))
            at += accepted[step] + 1
            step += 1
        elif at == n_tokens - 1:
            found.append((at, 0, 0))
            at += 1
        else:
            return None
    return found if step == len(drafted) else None


def strata(n_tokens: int, found: Sequence[Round]) -> tuple[str, ...]:
    """The index in its round of each token from the second on (STATS 1.8).

    Whether an index is reached is decided by earlier tokens only, so each stratum alone follows the
    target, for token and for block verification. Accepted against corrected would not do.

    >>> strata(6, [(1, 4, 2), (4, 2, 0), (5, 0, 0)])
    ('1', '2', '3', '1', '')
    """
    names = [""] * n_tokens
    for start, drafted, accepted in found:
        for offset in range(min(accepted + 1, n_tokens - start)):
            if drafted:
                names[start + offset] = BONUS if offset == drafted else str(offset + 1)
    return tuple(names[1:])


# --- rows of all tokens -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All verified tokens of one arm as arrays: n tokens, k of the target's likeliest, a tail."""

    prefixes: list[tuple[str, tuple[int, ...]]]
    ids: Ints
    rows: Floats
    """(n, k + 1)"""
    tokens: Ints
    seen: Ints
    """Category of each token, k for the tail."""
    draft: Floats
    """(n, k + 1), the draft's probability of each category."""
    is_drafted: npt.NDArray[np.bool_]
    """Where the draft is known."""
    is_soft: bool
    """Whether drafts are drawn from these rows, not certain."""
    strata: list[str]

    def __len__(self) -> int:
        return len(self.tokens)


def _tokens(samples: Sequence[Sampled]) -> _Tokens | None:
    """Rows of every token that the target scored, or None where it scored none."""
    scored = [(s, s.target) for s in samples if s.target is not None and len(s.tokens) > 1]
    if not scored:
        return None
    k = min(scores.ids.shape[1] for _, scores in scored)
    ids = np.concatenate([scores.ids[:, :k] for _, scores in scored])
    probs = np.concatenate([scores.probs[:, :k] for _, scores in scored])
    rows = _with_tail(probs)
    tokens = np.concatenate([np.array(s.tokens[1:], np.int64) for s, _ in scored])
    match = ids == tokens[:, None]
    drafts = [_draft_rows(s, scores.ids[:, :k]) for s, scores in scored]
    return _Tokens(
        prefixes=[(s.prompt, s.tokens[:i]) for s, _ in scored for i in range(1, len(s.tokens))],
        ids=ids,
        rows=rows,
        tokens=tokens,
        seen=np.where(match.any(axis=1), match.argmax(axis=1), k),
        draft=np.concatenate([draft for draft, _ in drafts]),
        is_drafted=np.concatenate([known for _, known in drafts]),
        is_soft=any(s.draft is not None for s, _ in scored),
        strata=[name for s, _ in scored for name in s.strata or [""] * (len(s.tokens) - 1)],
    )


def _with_tail(probs: Floats) -> Floats:
    tail = np.maximum(1 - probs.sum(axis=1, keepdims=True), TAIL_FLOOR)
    rows = np.concatenate([probs, tail], axis=1)
    normal: Floats = rows / rows.sum(axis=1, keepdims=True)
    return normal


def _draft_rows(sample: Sampled, ids: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The draft's probability of each category, and at which positions it is known.

    Any function of the prefix keeps the tests valid, so what the draft does not list may be
    guessed: a token gets the least listed probability, the tail what is left.
    """
    m, k = ids.shape
    if sample.draft is not None:
        listed, p = sample.draft.ids, sample.draft.probs
        match = ids[:, :, None] == listed[:, None, :]
        q = np.where(match.any(axis=2), (match * p[:, None, :]).sum(axis=2), p.min(axis=1)[:, None])
        tail = np.maximum(1 - q.sum(axis=1, keepdims=True), 0.0)
        return np.concatenate([q, tail], axis=1), np.ones(m, bool)
    if sample.proposed is not None:
        proposed = np.array([-1 if token is None else token for token in sample.proposed])
        hit = (ids == proposed[:, None]).astype(float)
        return np.concatenate([hit, np.zeros((m, 1))], axis=1), proposed >= 0
    return np.zeros((m, k + 1)), np.zeros(m, bool)


# --- the tests ----------------------------------------------------------------------------------


def _fits(
    t: _Tokens, wanted: Sequence[str], rng: np.random.Generator, alpha: float
) -> dict[str, Fit]:
    """T1 to T7 of one arm."""
    values = stats.pit(t.rows, t.seen, rng.random(len(t)))
    drafted = t.is_drafted
    rows, seen, draft = t.rows[drafted], t.seen[drafted], t.draft[drafted]
    no_draft = stats.no_fit("the draft's proposals are not known")
    tests: dict[str, Callable[[], Fit]] = {
        "T1": lambda: stats.uniform_ks(values, alpha=alpha),
        "T1b": lambda: stats.uniform_bins(values, alpha=alpha),
        "T2": lambda: stats.rank_categories(t.rows, t.seen, alpha=alpha),
        "T3": lambda: stats.calibration(stats.surprisal(t.rows), t.rows, t.seen, alpha=alpha),
        "T4": lambda: stats.token_ids(t.ids, t.rows, t.tokens, alpha=alpha),
        "T5": lambda: stats.node_fit(_nodes(t), alpha=alpha),
        "T6": lambda: (
            stats.calibration(stats.draft_sign(rows, draft), rows, seen, alpha=alpha)
            if drafted.any()
            else no_draft
        ),
        "T6b": lambda: (
            stats.calibration(stats.draft_log_ratio(rows, draft), rows, seen, alpha=alpha)
            if drafted.any() and t.is_soft
            else stats.no_fit("drafts are certain: their sign says it all")
            if drafted.any()
            else no_draft
        ),
        "T7": lambda: _by_index(t, alpha),
    }
    return {name: test() for name, test in tests.items() if name in wanted}


def _nodes(t: _Tokens) -> list[tuple[Ints, Floats]]:
    """Prefixes with the tokens that followed them: counts per category, and the target's row."""
    members: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, prefix in enumerate(t.prefixes):
        members[prefix].append(i)
    width = t.rows.shape[1]
    return [
        (np.bincount(t.seen[group], minlength=width), t.rows[group[0]])
        for group in members.values()
        if len(group) >= 2 * stats.LEAST_VARIANCE
    ]


def _by_index(t: _Tokens, alpha: float) -> Fit:
    """T7: the calibration of T6 (without a draft: of the likeliest token) at each index alone.

    Indices that few tokens reach are left out.
    """
    names = np.array(t.strata)
    reached = Counter(t.strata)
    parts = [part for part in reached if part and reached[part] >= LEAST_AT_INDEX]
    fits = {}
    for part in sorted(parts, key=lambda part: (part == BONUS, part.zfill(2))):
        here = names == part
        if (here & t.is_drafted).any():
            here &= t.is_drafted
            h = stats.draft_sign(t.rows[here], t.draft[here])
        else:
            h = np.zeros_like(t.rows[here])
            h[:, 0] = 1.0
        rows, seen = t.rows[here], t.seen[here]
        label = "the bonus token" if part == BONUS else f"index {part}"
        fits[label] = stats.calibration(
            h,
            rows,
            seen,
            alpha=alpha / len(parts),
            effect_alpha=stats.EFFECT_ALPHA / len(parts),
        )
    if not fits:
        return stats.no_fit("the server does not say how many tokens each step accepted")
    return stats.worst_part(fits)


def _pairs(
    control: Sequence[Sampled], arm: Sequence[Sampled]
) -> list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Token ids per prompt: control's and the arm's."""
    prompts = dict.fromkeys(s.prompt for s in arm)
    return [
        ([s.tokens for s in control if s.prompt == p], [s.tokens for s in arm if s.prompt == p])
        for p in prompts
    ]


def _halves(samples: Sequence[Sampled]) -> tuple[list[Sampled], list[Sampled]]:
    """Every other sample of each prompt, and the rest: two arms that are one."""
    halves: tuple[list[Sampled], list[Sampled]] = ([], [])
    met: dict[str, int] = defaultdict(int)
    for sample in samples:
        halves[met[sample.prompt] % 2].append(sample)
        met[sample.prompt] += 1
    return halves


# --- verdicts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """One test as judged. `verdict` is None where it was not judged; `why` says why, or how."""

    name: str
    fit: Fit
    p_adjusted: float
    """Holm over the tests that apply; NaN where it does not."""
    control: Fit | None
    """The same test on target-only answers (A/A)."""
    limit: float
    """A/A + margin, in the unit of the effect."""
    verdict: Verdict | None
    why: str

    @property
    def kind(self) -> Kind:
        """Title, units and minimum."""
        return KINDS[self.name]


@dataclass(frozen=True, slots=True)
class Battery:
    """Everything that the battery found on one pair of servers."""

    tests: tuple[Judged, ...]
    tokens: int
    """Verified tokens of the speculative arm."""
    open_tokens: int | None
    """Those at which the target was not certain; None without logprobs."""
    control_tokens: int
    prompts: int
    samples: int
    """Answers of the speculative arm."""
    margin: float

    @property
    def judged(self) -> tuple[Judged, ...]:
        """The tests that say something."""
        return tuple(t for t in self.tests if t.verdict is not None)

    @property
    def verdict(self) -> Verdict:
        """Worst of the judged tests. Samples of which none could be judged are inconclusive."""
        if self.samples == 0:
            return Verdict.ERROR
        return (
            worst(t.verdict for t in self.judged if t.verdict is not None)
            if self.judged
            else (Verdict.INCONCLUSIVE)
        )


def run(
    arm: Sequence[Sampled],
    control: Sequence[Sampled],
    *,
    rng: np.random.Generator,
    margin: float = MARGIN,
    wanted: Sequence[str] = tuple(KINDS),
    alpha: float = ALPHA,
) -> Battery:
    """Run and judge the battery.

    Args:
        arm: answers of the speculative arm, at temperature 1 and with nothing else that changes the
            target's law.
        control: target-only answers to the same prompts, other seeds.
        rng: for the randomised PIT and the permutations.
        margin: of T6, a share; other tests in proportion.
        wanted: names of `KINDS`.
        alpha: level of the whole battery.
    """
    level = alpha / max(1, len(wanted))
    mine, theirs = _tokens(arm), _tokens(control)
    fits: dict[str, Fit] = {}
    controls: dict[str, Fit] = {}
    for t, into in ((mine, fits), (theirs, controls)):
        if t is not None:
            into.update(_fits(t, wanted, rng, level))
    if "T8" in wanted:
        half, other = _halves(control)
        fits["T8"] = stats.two_samples(_pairs(control, arm), rng=rng, alpha=level)
        controls["T8"] = stats.two_samples(_pairs(half, other), rng=rng, alpha=level)
    missing = stats.no_fit("the target gives no log-probabilities")
    found = {name: fits.get(name, missing) for name in KINDS if name in wanted}
    applying = [name for name, fit in found.items() if fit.applies]
    adjusted = dict(
        zip(applying, stats.holm([found[name].p_value for name in applying]), strict=True)
    )
    return Battery(
        tests=tuple(
            judge(name, fit, controls.get(name), adjusted.get(name, math.nan), margin, alpha)
            for name, fit in found.items()
        ),
        tokens=sum(max(0, len(s.tokens) - 1) for s in arm),
        open_tokens=None if mine is None else int((mine.rows.max(axis=1) < OPEN_BELOW).sum()),
        control_tokens=sum(max(0, len(s.tokens) - 1) for s in control),
        prompts=len({s.prompt for s in arm}),
        samples=len(arm),
        margin=margin,
    )


def judge(
    name: str, fit: Fit, control: Fit | None, p_adjusted: float, margin: float, alpha: float = ALPHA
) -> Judged:
    """One test against A/A + margin; see the module's docstring for the rule."""
    kind = KINDS[name]
    aa = control if control is not None and control.applies else None
    limit = (aa.effect.value if aa is not None else 0.0) + margin * kind.margin_ratio
    if not fit.applies:
        return Judged(name, fit, p_adjusted, aa, limit, None, fit.effect.method)
    unit = "" if kind.effect_unit == "share" else f" {kind.effect_unit}"
    e = fit.effect
    found = f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g}){unit}"
    if fit.where:
        found += f" at {fit.where}"
    against = f"A/A {aa.effect.value:.3g}" if aa is not None else "no A/A"
    figure = f"{found}, {against}, limit {limit:.3g}, p {p_adjusted:.2g}"
    if p_adjusted <= alpha and _is_beyond(e, aa, NUMERICS * kind.margin_ratio):
        return Judged(name, fit, p_adjusted, aa, limit, Verdict.FAIL, f"differs: {figure}")
    if fit.n < kind.least:
        few = f"{fit.n:,} of the {kind.least:,} {kind.unit} that it takes to pass"
        return Judged(name, fit, p_adjusted, aa, limit, None, few)
    if e.high <= limit:
        small = "differs, but no more than numerics: " if p_adjusted <= alpha else ""
        return Judged(name, fit, p_adjusted, aa, limit, Verdict.PASS, f"{small}{figure}")
    return Judged(
        name, fit, p_adjusted, aa, limit, Verdict.INCONCLUSIVE, f"not clear of its limit: {figure}"
    )


def _is_beyond(e: Estimate, control: Fit | None, numerics: float) -> bool:
    """Whether an effect is larger than what numerics make, and larger than what A/A shows.

    A clean A/A shows nothing, whatever its point estimate: sizes are never below 0. Where A/A
    itself deviates the difference must exceed the chance of both (5 %, one-sided).
    """
    if control is None:
        return e.value > numerics
    base = control.effect
    if e.value <= base.low + numerics:
        return False
    if control.p_value > CLEAN:
        return True
    return e.value - base.value > math.hypot(e.high - e.value, base.high - base.value)


def needed_tokens(battery: Battery) -> int | None:
    """How many more verified tokens would settle what is open; None where that is not known."""
    if not battery.judged:
        least = [t.kind.least - t.fit.n for t in battery.tests if t.kind.unit == "tokens"]
        return max(0, min(least, default=0)) or None
    open_ones = [t for t in battery.judged if t.verdict is Verdict.INCONCLUSIVE]
    ratios = [
        ((t.fit.effect.high - t.fit.effect.value) / (t.limit - t.fit.effect.value)) ** 2
        for t in open_ones
        if t.fit.effect.value < t.limit
    ]
    if not open_ones or len(ratios) < len(open_ones):
        return None
    return math.ceil(battery.tokens * (max(ratios) - 1))


# --- what is said -------------------------------------------------------------------------------


def scope(battery: Battery, *, max_tokens: int, concurrency: int) -> tuple[list[str], list[str]]:
    """(what was tested, what was not), a line each: printed beside every verdict."""
    seen = [t for t in battery.judged if not math.isnan(t.fit.seen)]
    drawn = f"{battery.samples:,} sampled answers to {battery.prompts} prompts"
    tested = [
        f"{battery.tokens:,} verified tokens in {drawn}, temperature 1, top_p 1",
        f"tokens 2 to {max_tokens} of an answer, {concurrency} requests at a time",
    ]
    if battery.open_tokens is not None:
        tested.append(
            f"{battery.open_tokens:,} of them open: the target's best candidate under "
            f"{OPEN_BELOW:.1%}"
        )
    if seen:
        tested.append(
            "effects from these sizes on would have been found nine times in ten: "
            + ", ".join(
                f"{t.name} {t.fit.seen:.2g}{' nats' if t.kind.effect_unit == 'nats' else ''}"
                for t in seen
            )
        )
    not_tested = [
        "the first token of an answer: the prompt's pass draws it, nothing is drafted",
        "temperatures other than 1 (greedy answers are compared token by token in replay)",
        "top_p, top_k, min_p, logit_bias, penalties, stop strings, structured output, n > 1",
        f"answers beyond {max_tokens} tokens, other prompts, other loads",
    ]
    reasons: dict[str, list[str]] = defaultdict(list)
    for t in battery.tests:
        if t.verdict is None:
            reasons[t.why].append(t.name)
    not_tested += [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
    return tested, not_tested


def to_dict(battery: Battery) -> dict[str, Any]:
    """What was found, as plain values: for packet and JSON."""
    return {
        "verdict": battery.verdict.word,
        "alpha": ALPHA,
        "margin": battery.margin,
        "tokens": battery.tokens,
        "open_tokens": battery.open_tokens,
        "control_tokens": battery.control_tokens,
        "prompts": battery.prompts,
        "samples": battery.samples,
        "needed_tokens": needed_tokens(battery),
        "tests": [
            {
                "name": f"{t.name} {t.kind.title}",
                "catches": t.kind.catches,
                "n": t.fit.n,
                "unit": t.kind.unit,
                "statistic": t.fit.statistic,
                "p_value": t.p_adjusted,
                "effect": t.fit.effect,
                "effect_unit": t.kind.effect_unit,
                "where": t.fit.where,
                "control": None if t.control is None else t.control.effect,
                "limit": t.limit,
                "seen": t.fit.seen,
                "verdict": None if t.verdict is None else t.verdict.word,
                "why": t.why,
            }
            for t in battery.tests
        ],
    }


def measurement(battery: Battery | None, why: str, *, stage: str, route: str) -> Measurement:
    """Metric sampled_violations of a route: how many tests found a difference.

    As with greedy violations the limits hold what is settled: low counts tests that failed, high
    adds those that are open; with no test judged one is open. n counts verified tokens.
    """
    if battery is None or battery.samples == 0:
        return Measurement("sampled_violations", stage, route, SLICE, None, why)
    failed = [t for t in battery.judged if t.verdict is Verdict.FAIL]
    is_open = sum(t.verdict is Verdict.INCONCLUSIVE for t in battery.judged) or not battery.judged
    estimate = Estimate(
        len(failed),
        len(failed),
        len(failed) + int(is_open),
        battery.tokens,
        "count of distribution tests",
        ALPHA,
    )
    shown = failed or [t for t in battery.judged if t.verdict is Verdict.INCONCLUSIVE]
    shown = sorted(shown or battery.judged, key=lambda t: t.p_adjusted)[:3]
    parts = [f"{t.name} {t.kind.title}: {t.why}" for t in shown]
    if len(battery.judged) > len(shown):
        parts.append(f"{len(battery.judged)} tests judged")
    if not battery.judged:
        parts.append("too few tokens for any test to say something by finding nothing")
    parts.append("no sampled test proves two servers alike")
    return Measurement("sampled_violations", stage, route, SLICE, estimate, "; ".join(parts))
