"""Whether a decision still rests on what it was taken on.

A promotion holds for the target, draft, engine and policy that were measured, and for traffic like
that which was measured. `rests_on` writes that down in the packet; `revisit` compares it with what
runs now and with recent receipts, item by item: current, stale, too little evidence, or could not
look. Verdicts are the ones of rules (pass is current, fail is stale), so the worst wins here too.
The date comes in as an argument: the same inputs give the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from speccheck import eligibility, launch, stats
from speccheck.config import Rollout
from speccheck.context import PROTECTED, measured_arms, read_policy, read_rollout
from speccheck.errors import EngineError, UsageError
from speccheck.measure import ALPHA, acceptance_rate, with_prompt_bands
from speccheck.records import (
    Arm,
    ArmDescription,
    Estimate,
    Outcome,
    Receipt,
    Stage,
    Verdict,
    digest,
    worst,
)
from speccheck.store import Run, Store

ALPHA_STALE = 0.01
"""Level at which something is called stale, over all cohorts together."""
MINIMUM_RECENT = 100
"""Recent requests below which traffic is not compared."""
MINIMUM_DRAFTED = 30
"""Requests with drafts, on either side, below which a cohort's acceptance is not compared."""
MINIMUM_SHARE = 0.05
"""Share of recent traffic from which a cohort counts: smaller ones are named and decide nothing."""

_EXPECTED = 5
"""Requests that a cell of a chi-square test must expect; smaller cohorts are pooled."""
_POOLED = "small cohorts"


@dataclass(frozen=True, slots=True)
class Share:
    """One cohort of the traffic mix: its requests, and their share of all."""

    cohort: str
    n: int
    share: float


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a decision rests on, compared with what is there now."""

    name: str
    verdict: Verdict
    why: str
    was: str = ""
    now: str = ""
    estimate: Estimate | None = None
    limit: float | None = None
    counted: bool = True
    """False where nothing was to be decided: shown only."""


@dataclass(frozen=True, slots=True)
class Revisit:
    """The outcome: its verdict is the worst of its counted items."""

    run_id: str
    today: date
    items: tuple[Item, ...]

    @property
    def verdict(self) -> Verdict:
        """PASS is current, FAIL is stale."""
        return worst(item.verdict for item in self.items if item.counted)


@dataclass(frozen=True)
class Now:
    """What a run is compared with. A part that is None was not looked at, and says so."""

    arms: Callable[[], launch.Arms]
    """Describes the arms as they are; an EngineError becomes "could not look"."""
    files: Mapping[str, str] | None = None
    """Digests of today's policy, rules and corpus."""
    expires: date | None = None
    receipts: Sequence[Receipt] | None = None


# --- what a run rests on ------------------------------------------------------------------------


def rests_on(
    run: Run, arms: Mapping[Arm, ArmDescription], receipts: Sequence[Receipt]
) -> dict[str, str]:
    """What a run's decisions rest on, but the traffic: name -> digest, and a name if it has one.

    target and draft, both engines, policy, rules and corpus. What was not measured is left out.
    """
    found: dict[str, str] = {}
    target, speculative = arms.get(Arm.TARGET_ONLY), arms.get(Arm.SPECULATIVE)
    if target is not None:
        found["target"] = _target(target)
    if speculative is not None:
        found["draft"] = _draft(speculative)
    for arm in (target, speculative):
        if arm is not None:
            found[_engine(arm.arm)] = f"{arm.engine}, {arm.engine_config_id}"
    return found | _named(run, receipts)


def _named(run: Run, receipts: Sequence[Receipt]) -> dict[str, str]:
    """Digests of the files that a run was decided by."""
    policies = {receipt.policy_version for receipt in receipts if receipt.stage in tuple(Stage)}
    policy = {"policy": policies.pop()} if len(policies) == 1 else {}
    return {**policy, "rules": run.rules_digest, "corpus": run.corpus_digest}


def validity(run: Run) -> str:
    """How long a run's decisions hold, to be read after "valid until"."""
    begun, stated = run_date(run), run.config["rollout"].get("expires")
    expires = begun + timedelta(days=stated) if isinstance(stated, int) else stated
    changed = "something it rests on changes (speccheck revisit tells)"
    return changed if expires is None else f"{expires}, or until {changed}"


def _engine(arm: Arm) -> str:
    return f"{arm.replace('_', '-')} engine"


def _target(arm: ArmDescription) -> str:
    return ", ".join([arm.model, *_files(arm.config)])


def _draft(arm: ArmDescription) -> str:
    config = arm.speculative_config or {}
    named = [str(config[key]) for key in ("method", "model") if config.get(key)]
    return ", ".join([*named, *_files(config)]) or "not known"


def _files(config: Mapping[str, Any]) -> list[str]:
    """Digest of the weights, where the server reads them from a folder of this machine."""
    files = config.get("model_files", {})
    weights = files.get("model.safetensors") if isinstance(files, Mapping) else None
    return [str(weights)] if weights else []


def measured_traffic(receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts that stand for the traffic that a decision was taken on.

    Each request once, of the latest stage that there is: canary, shadow, replay. The protected
    traffic is measured beside and decides nothing about itself.
    """
    by_stage: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        if receipt.warm_up or receipt.mirror or PROTECTED in (receipt.route, receipt.priority):
            continue
        if not _is_first(receipt):
            continue
        if receipt.stage == Stage.REPLAY and receipt.arm != Arm.TARGET_ONLY:
            continue
        by_stage.setdefault(receipt.stage, []).append(receipt)
    for stage in (Stage.CANARY, Stage.SHADOW, Stage.REPLAY):
        if stage in by_stage:
            return with_prompt_bands(by_stage[stage])
    return []


def _is_first(receipt: Receipt) -> bool:
    """Whether it is no rerun of a replay and no slice: those ask suspects again, or odd things."""
    return receipt.stage != Stage.REPLAY or receipt.phase in ("greedy", "sampled")


def mix(receipts: Iterable[Receipt]) -> list[Share]:
    """Shares of the cohorts (route, task, temperature, prompt length), largest first."""
    counts = Counter(cohort(receipt) for receipt in receipts)
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [Share(name, n, n / total) for name, n in ordered]


def cohort(receipt: Receipt) -> str:
    """Name of a receipt's cohort in the traffic mix."""
    task = [] if receipt.task == receipt.route else [receipt.task]
    bands = (receipt.temperature_band, f"{receipt.prompt_band} prompt tokens")
    return ", ".join([receipt.route, *task, *bands])


def rollout_now(path: Path) -> tuple[Rollout, dict[str, str]]:
    """A rollout as its files are now, and the digests of policy, rules and corpus.

    Raises:
        UsageError: with file and line.
    """
    rollout, guardrails, corpus = read_rollout(path)
    policy = eligibility.policy_version(rollout, read_policy(path, rollout, corpus))
    rules = digest("rules", guardrails.model_dump(mode="json"))
    return rollout, {"policy": policy, "rules": rules, "corpus": corpus.digest}


# --- then and now -------------------------------------------------------------------------------


def revisit(
    opened: Store,
    run_id: str,
    now: Now,
    *,
    today: date,
    max_shift: float = 0.10,
    max_drift: float = 0.10,
) -> Revisit:
    """Compare what a run's decisions rest on with what is there now.

    Args:
        opened: the run's store.
        run_id: the run.
        now: today's arms, files and receipts.
        today: the date.
        max_shift: largest total variation between traffic mixes that is current.
        max_drift: largest change of a cohort's acceptance rate that is current.

    Raises:
        UsageError: the run has decided nothing.
    """
    run = opened.run(run_id)
    decided = opened.decisions(run_id)
    if not decided:
        raise UsageError(f"{opened.path}: run {run_id} has decided nothing yet: nothing to revisit")
    receipts = [r for r in opened.receipts(run_id) if r.stage in tuple(Stage)]
    items = [_expiry(now.expires, today)]
    items += _engines(opened, run_id, now.arms)
    items += _files_changed(_named(run, receipts), now.files)
    items += _traffic(receipts, now.receipts, max_shift, max_drift)
    return Revisit(run_id, today, tuple(items))


def run_date(run: Run) -> date:
    """The day on which a run began, UTC."""
    return datetime.fromtimestamp(run.created_at_ns / 1e9, UTC).date()


def stored_rollout(run: Run) -> Rollout:
    """The rollout that a run was begun with; the paths in it are relative to a file that is gone.

    Raises:
        UsageError: it was written by another version.
    """
    try:
        return Rollout.model_validate(run.config["rollout"])
    except ValueError:
        raise UsageError(
            f"run {run.run_id}: its rollout is from another version of speccheck; give --rollout"
        ) from None


def _expiry(expires: date | None, today: date) -> Item:
    if expires is None:
        return Item("expiry", Verdict.PASS, "no date is set (expires: in rollout.yaml)")
    left = (expires - today).days
    if left < 0:
        return Item("expiry", Verdict.FAIL, f"expired on {expires}", now=str(today))
    return Item("expiry", Verdict.PASS, f"holds until {expires}, {left} days from {today}")


def _engines(opened: Store, run_id: str, look: Callable[[], launch.Arms]) -> list[Item]:
    then = measured_arms(opened, run_id)
    if then is None:
        return [Item("engines", Verdict.ERROR, "no pair of servers was measured in this run")]
    try:
        now = look()
    except EngineError as error:
        return [Item("engines", Verdict.ERROR, f"could not look: {error}")]
    items = [
        _same("target", _target(then.target_only), _target(now.target_only)),
        _same("draft", _draft(then.speculative), _draft(now.speculative)),
    ]
    for arm in Arm:
        a, b = then[arm], now[arm]
        name = _engine(arm)
        if a.engine_config_id == b.engine_config_id:
            items.append(Item(name, Verdict.PASS, f"unchanged, {a.engine}, {a.engine_config_id}"))
            continue
        changed = _changes(a, b)
        shown = "; ".join(f"{key}: {was} then, {is_now} now" for key, was, is_now in changed[:3])
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        items.append(
            Item(
                name,
                Verdict.FAIL,
                f"{shown}{more}" or "its digest changed",
                was=a.engine_config_id,
                now=b.engine_config_id,
            )
        )
    return items


def _changes(a: ArmDescription, b: ArmDescription) -> list[tuple[str, Any, Any]]:
    """(dotted key, then, now) of all that differs between two descriptions of one arm."""
    then, now = (
        launch.flat(
            {
                "engine": arm.engine,
                "model": arm.model,
                "speculative_config": dict(arm.speculative_config or {}),
                **arm.config,
            }
        )
        for arm in (a, b)
    )
    return [
        (key, then.get(key), now.get(key))
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]


def _same(name: str, was: str, now: str) -> Item:
    if was == now:
        return Item(name, Verdict.PASS, f"unchanged, {was}")
    return Item(name, Verdict.FAIL, f"{was} then, {now} now", was=was, now=now)


def _files_changed(then: Mapping[str, str], now: Mapping[str, str] | None) -> list[Item]:
    if now is None:
        why = "not compared: give --rollout"
        return [Item("policy, rules, corpus", Verdict.PASS, why, counted=False)]
    items = []
    for name, is_now in now.items():
        was = then.get(name)
        if was is None:
            items.append(Item(name, Verdict.ERROR, "this run has no receipts that name it"))
        else:
            items.append(_same(name, was, is_now))
    return items


# --- traffic ------------------------------------------------------------------------------------


def _traffic(
    measured: Sequence[Receipt],
    recent: Sequence[Receipt] | None,
    max_shift: float,
    max_drift: float,
) -> list[Item]:
    if recent is None:
        why = "not compared: give recent receipts (--receipts)"
        return [Item("traffic mix, acceptance", Verdict.PASS, why, counted=False)]
    routes = {receipt.route for receipt in measured}
    seen = with_prompt_bands(
        [r for r in recent if not r.warm_up and not r.mirror and r.route in routes]
    )
    others = Counter(
        r.route for r in recent if not r.warm_up and r.route not in {*routes, PROTECTED}
    )
    items = [
        Item(
            "traffic mix",
            Verdict.PASS,
            f"route {route} ({n} recent requests) is none that was decided",
            counted=False,
        )
        for route, n in sorted(others.items())
    ]
    then = measured_traffic(measured)
    items.append(_mix_shift(mix(then), mix(seen), max_shift))
    return [*items, *_drift(measured, seen, max_drift)]


def _mix_shift(then: Sequence[Share], now: Sequence[Share], limit: float) -> Item:
    """Total variation between the mixes decides, by its interval; chi-square is told with it."""
    n_then, n_now = (sum(share.n for share in side) for side in (then, now))
    if min(n_then, n_now) < MINIMUM_RECENT:
        why = (
            f"{n_now:,} recent requests against {n_then:,} measured; {MINIMUM_RECENT} of each are "
            "needed"
        )
        return Item("traffic mix", Verdict.INCONCLUSIVE, why)
    a, b = ({share.cohort: share.n for share in side} for side in (then, now))
    new = [share for share in now if share.cohort not in a and share.n >= _EXPECTED]
    pooled: dict[str, tuple[int, int]] = {}
    for name in a | b:
        x, y = a.get(name, 0), b.get(name, 0)
        expected = (x + y) * min(n_then, n_now) / (n_then + n_now)
        key = name if expected >= _EXPECTED else _POOLED
        was = pooled.get(key, (0, 0))
        pooled[key] = (was[0] + x, was[1] + y)
    cells = [list(side) for side in zip(*pooled.values(), strict=True)]
    shift, strict = (
        stats.total_variation(*cells, rng=np.random.default_rng(0), alpha=level)
        for level in (ALPHA, ALPHA_STALE)
    )
    statistic, p_value = stats.homogeneity(*cells)
    told = (
        f"shares moved by {shift.value:.0%} in all ({shift.low:.0%} to {shift.high:.0%}; limit "
        f"{limit:.0%}; chi-square {statistic:.1f}, p {p_value:.2g}, n {n_then:,} then, {n_now:,} "
        "now)"
    )
    if new and (total := sum(share.n for share in new)) / n_now >= MINIMUM_SHARE:
        told = f"{total / n_now:.0%} of it was never measured, such as {new[0].cohort}; {told}"
        return Item("traffic mix", Verdict.FAIL, told, estimate=shift, limit=limit)
    if shift.high <= limit:
        return Item("traffic mix", Verdict.PASS, told, estimate=shift, limit=limit)
    name, (x, y) = max(
        pooled.items(), key=lambda cell: abs(cell[1][1] / n_now - cell[1][0] / n_then)
    )
    told += f"; most: {name} {x / n_then:.0%} then, {y / n_now:.0%} now"
    verdict = Verdict.FAIL if strict.low > limit else Verdict.INCONCLUSIVE
    if verdict is Verdict.INCONCLUSIVE and (needed := stats.needed_for_interval(shift, limit)):
        told += f"; about {needed:,} more recent requests would decide it"
    return Item("traffic mix", verdict, told, estimate=shift, limit=limit)


def _drift(measured: Sequence[Receipt], recent: Sequence[Receipt], limit: float) -> list[Item]:
    """Acceptance then and now, in each cohort that both sides drafted for."""
    then, now = _by_cohort(filter(_is_first, measured)), _by_cohort(filter(_is_first, recent))
    total = sum(len(rows) for rows in now.values())
    both = sorted(then.keys() & now.keys(), key=lambda name: (-len(now[name]), name))
    judged = [
        name
        for name in both
        if min(len(then[name]), len(now[name])) >= MINIMUM_DRAFTED
        and len(now[name]) >= MINIMUM_SHARE * total
    ]
    items = [
        _cohort_drift(name, then[name], now[name], limit, ALPHA_STALE / len(judged))
        for name in judged
    ]
    small = [name for name in both if name not in judged]
    if small:
        shown = f"{small[0]} ({len(now[small[0]])} recent requests)"
        more = f" and {len(small) - 1} more" if len(small) > 1 else ""
        why = f"too small to judge by themselves: {shown}{more}"
        items.append(Item("acceptance", Verdict.PASS, why, counted=False))
    if not judged:
        why = f"no cohort has {MINIMUM_DRAFTED} requests with drafts both then and now"
        items.append(Item("acceptance", Verdict.INCONCLUSIVE, why))
    return items


def _by_cohort(receipts: Iterable[Receipt]) -> dict[str, list[Receipt]]:
    found: dict[str, list[Receipt]] = {}
    for r in receipts:
        drafted = not r.warm_up and r.arm == Arm.SPECULATIVE and r.outcome == Outcome.OK
        if drafted and r.proposed_tokens and r.has_counts:
            found.setdefault(cohort(r), []).append(r)
    return found


def _cohort_drift(
    name: str, then: Sequence[Receipt], now: Sequence[Receipt], limit: float, level: float
) -> Item:
    """PASS and FAIL as rules have it: the interval of the change inside, or outside, the limit."""
    was, is_now = (acceptance_rate(side, alpha=ALPHA) for side in (then, now))
    change = stats.difference(was, is_now)
    strict = stats.difference(*(acceptance_rate(side, alpha=level) for side in (then, now)))
    told = (
        f"{was.value:.2f} then, {is_now.value:.2f} now: "
        f"changed by {change.value:+.2f} ({change.low:+.2f} to {change.high:+.2f}; limit "
        f"{limit:.2f}, n {len(then):,} then, {len(now):,} now)"
    )
    verdict = Verdict.INCONCLUSIVE
    if strict.low > limit or strict.high < -limit:
        verdict = Verdict.FAIL
    elif -limit <= change.low and change.high <= limit:
        verdict = Verdict.PASS
    else:
        side = limit if change.value > 0 else -limit
        needed = stats.needed_for_interval(change, side)
        if needed:
            told += f"; about {needed:,} more would decide it"
    return Item(f"acceptance, {name}", verdict, told, estimate=change, limit=limit)
