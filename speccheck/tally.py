"""What servers counted, beside what receipts say: two accounts of one stage, and their gap.

Receipts count per request, servers per engine; where they differ, one of them is missing something,
and each known reason for that is said. Receipts decide: counters cannot tell routes apart, forget
what they counted at a restart, and have histograms whose first bucket may hold every request. Where
requests carry no counts at all, acceptance is taken from counters as far as they can tell it.
Absent is not 0: a server without /metrics, or without a series, is "not available". Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from speccheck import measure, stats, telemetry
from speccheck.records import Arm, Finding, Measurement, Outcome, Receipt, Verdict
from speccheck.store import DriveRecord
from speccheck.telemetry import Counted

_QUANTITIES = (
    ("generated tokens", "generation_tokens", "completion_tokens"),
    ("drafted tokens", "draft_tokens", "proposed_tokens"),
    ("accepted tokens", "accepted_tokens", "accepted_tokens"),
    ("verify steps", "drafts", "verify_steps"),
    ("prompt tokens", "prompt_tokens", "prompt_tokens"),
)
"""Words, the server's name, the receipts' name."""

_SPECULATION = {"proposed_tokens", "accepted_tokens", "verify_steps"}


def beside_receipts(
    drives: Sequence[DriveRecord], receipts: Sequence[Receipt]
) -> dict[str, dict[str, Any]]:
    """`packet.ServerCounters` by arm: a stage's counters held against its receipts.

    `receipts` are all of the stage, warm-up included: servers count it too.
    """
    return {
        arm.value: _of_arm(
            [drive.counters[arm] for drive in drives if arm in drive.counters],
            [r for r in receipts if r.arm == arm],
            unseen=_unseen(drives, receipts),
        )
        for arm in Arm
    }


def _unseen(drives: Sequence[DriveRecord], receipts: Sequence[Receipt]) -> int:
    """Receipts of drives that were cut off (killed, interrupted, a server gone)."""
    return sum(not r.warm_up for r in receipts) - sum(drive.completed for drive in drives)


def cut_off_note(drives: Sequence[DriveRecord], receipts: Sequence[Receipt]) -> str:
    """What is not known where a drive was cut off, or empty."""
    n = _unseen(drives, receipts)
    if n <= 0:
        return ""
    return (
        f"{n} requests are of a drive that was cut off: what the client's stalls and CPU and the "
        "servers' counters were meanwhile is not known"
    )


def _of_arm(
    counters: Sequence[Counted | str], receipts: Sequence[Receipt], unseen: int
) -> dict[str, Any]:
    failed = [one for one in counters if isinstance(one, str)]
    counted = [one for one in counters if not isinstance(one, str)]
    if failed or not counted:
        return {"not_measured": failed[0] if failed else "nothing was sent"}
    seen = telemetry.together(counted)
    if all(getattr(seen, name) is None for _, name, _ in _QUANTITIES) and not seen.tpot_buckets:
        return {"not_measured": "/metrics holds none of vLLM's series"}
    rows = []
    for words, counter, field in _QUANTITIES:
        server = getattr(seen, counter)
        known = [x for r in receipts if (x := getattr(r, field)) is not None]
        if server is None and not (known and field not in _SPECULATION):
            continue  # a target-only server has no series about speculation
        told = sum(known) if known else None
        gap = None if server is None or told is None else server - told
        rows.append(
            {
                "quantity": words,
                "server": server,
                "receipts": told,
                "gap": gap,
                "why": _why(field, server, gap, receipts, seen, unseen),
            }
        )
    return {
        "rows": rows,
        "resets": list(seen.resets),
        "acceptance": _acceptance(seen, receipts),
        "tpot_p95": _tpot_p95(seen),
    }


def _acceptance(seen: Counted, receipts: Sequence[Receipt]) -> Any:
    """Accepted over drafted by the counters alone, as if each request accepted all or nothing."""
    if not seen.draft_tokens or seen.accepted_tokens is None:
        return None
    completed = sum(r.outcome == Outcome.OK for r in receipts)
    return stats.acceptance_from_totals(
        seen.accepted_tokens, seen.draft_tokens, completed, alpha=measure.ALPHA
    )


def _tpot_p95(seen: Counted) -> dict[str, float] | None:
    """Between which borders of the server's histogram its TPOT p95 lies, seconds; None without."""
    if not seen.tpot_buckets:
        return None
    buckets = [(float(border), count) for border, count in seen.tpot_buckets.items()]
    low, high = stats.histogram_quantile_bounds(buckets, 0.95)
    return {"low_s": low, "high_s": high}


def _why(
    field: str,
    server: int | None,
    gap: int | None,
    receipts: Sequence[Receipt],
    seen: Counted,
    unseen: int,
) -> str:
    """Every known reason why server and receipts may differ here, or that they do not."""
    if server is None:
        return "the server has no such counter"
    if gap == 0:
        return "they agree"
    reasons = []
    if seen.resets:
        engines = ", ".join(sorted(set(seen.resets)))
        reasons.append(f"engine {engines} restarted: what it had counted before is lost")
    if unseen > 0:
        reasons.append(f"{unseen} requests are of a drive that was cut off before its last reading")
    missing = [r for r in receipts if getattr(r, field) is None]
    if missing:
        notes = Counter(_missing(r, field) for r in missing).most_common(3)
        about = ", ".join(f"{n} {note}" if len(notes) > 1 else note for note, n in notes)
        reasons.append(f"{len(missing)} of {len(receipts)} requests carry none: {about}")
    if field == "completion_tokens" and _on_stop_strings(receipts):
        reasons.append(
            f"{_on_stop_strings(receipts)} requests ended on a stop string, past which the server "
            "counts tokens that it does not deliver"
        )
    several = sum("n" in r.features.split(",") for r in receipts)
    if field == "prompt_tokens" and several and (gap or 0) > 0:
        reasons.append(
            f"{several} requests asked for several choices, and the server counts their prompt "
            "once for each choice, the receipt once"
        )
    if not reasons and server == 0:
        reasons.append("the counters stand still: is the server run with --disable-log-stats?")
    if not reasons and gap is not None:
        reasons.append(
            "the server counted more than receipts do: did it answer traffic that is not ours?"
            if gap > 0
            else "receipts say more than this server counted: did another replica answer?"
        )
    return "; ".join(reasons)


def _missing(receipt: Receipt, field: str) -> str:
    """Why a receipt does not carry a count, in a few words."""
    if field in _SPECULATION:
        return receipt.counts_note or "no reason given"
    return receipt.error_class or f"{receipt.outcome}, without usage"


def _on_stop_strings(receipts: Sequence[Receipt]) -> int:
    return sum(
        r.stop_reason is not None and not r.stop_reason.lstrip("-").isdecimal() for r in receipts
    )


def histogram_note(counters: Mapping[str, Mapping[str, Any]]) -> str:
    """What the servers' TPOT histograms cannot tell, or empty: both arms in one bucket (T25)."""
    target, speculative = (counters[arm.value].get("tpot_p95") for arm in Arm)
    if target is None or target != speculative:
        return ""
    low, high = 1e3 * target["low_s"], 1e3 * target["high_s"]
    place = f"under {high:g} ms" if low == 0 else f"between {low:g} and {high:g} ms"
    return (
        f"by the servers' histograms TPOT p95 is {place} on both arms, in one bucket: they cannot "
        "tell a change, receipts decide (vLLM: --custom-histogram-buckets for finer ones)"
    )


STALL = "max_stall_s"
"""Finding about requests that ran while no token came: that of the live guard, by its setting."""


def stalls(
    drives: Sequence[DriveRecord], limit_s: float | None, *, stage: str, route: str
) -> list[Finding]:
    """A failure where the speculative server hung: requests ran, and for longer than `limit_s` no
    token came. Where target-only hung as well, while both were driven, it is not speculation's own.

    Nothing where it is not judged (no limit), or not known (no /metrics).
    """
    found = []
    for drive in drives:
        lasted, beside = (
            _longest_stall_s(drive, arm) for arm in (Arm.SPECULATIVE, Arm.TARGET_ONLY)
        )
        if route not in drive.routes or limit_s is None or lasted is None or lasted <= limit_s:
            continue
        alone = beside is None or beside <= limit_s
        why = (
            f"requests ran on the speculative server for {lasted:.3g} s without one token coming,"
            f" over the limit of {limit_s:g} s"
        )
        why += "" if beside is None else f"; the longest on target-only was {beside:.3g} s"
        verdict = Verdict.FAIL if alone else Verdict.ERROR
        found.append(Finding(STALL, verdict, route, "", stage, None, limit_s, "seconds", why))
    return sorted(found, key=lambda f: -f.verdict)[:1]


def _longest_stall_s(drive: DriveRecord, arm: Arm) -> float | None:
    counted = drive.counters.get(arm)
    return counted.longest_stall_s if isinstance(counted, Counted) else None


QUEUE_GREW = 2.0
"""More requests waiting in the last third of a drive than in the first, from which that is said."""


def queue_note(drives: Sequence[DriveRecord]) -> str:
    """Which servers' queues grew while they were driven, or empty: such a load has no steady state,
    and each time measured under it depends on how long one waited to measure.
    """
    grew = []
    for arm in Arm:
        queues = [
            counted.waiting
            for drive in drives
            if isinstance(counted := drive.counters.get(arm), Counted) and counted.waiting
        ]
        worst = max(queues, key=lambda q: q[1] - q[0], default=None)
        if worst is not None and worst[1] - worst[0] >= QUEUE_GREW:
            first, last, most = worst
            grew.append(f"{arm} (from {first:.3g} to {last:.3g} waiting, {most:.0f} at most)")
    if not grew:
        return ""
    return (
        f"the queue grew on {' and '.join(grew)}: more came than was served, and times depend on"
        " how long this went on"
    )


def with_counters(
    measured: Sequence[Measurement],
    drives: Sequence[DriveRecord],
    receipts: Sequence[Receipt],
    *,
    stage: str,
    route: str,
) -> list[Measurement]:
    """A route's measurements, acceptance from the server's counters where no request has counts.

    Counters are sums over all that a server answered. They speak for a route if it alone was sent
    to the speculative arm while they were read, or if nothing at all was accepted. `receipts` are
    all of the stage, warm-up included.
    """
    mine = [r for r in receipts if r.arm == Arm.SPECULATIVE and r.route == route]
    completed = sum(r.outcome == Outcome.OK for r in mine)
    if not completed or any(r.proposed_tokens is not None for r in mine):
        return list(measured)
    ours = _counted([drive for drive in drives if set(drive.routes) == {route}])
    everybody = _counted(drives)
    usable = ours
    if usable is None and everybody is not None and everybody.accepted_tokens == 0:
        usable = everybody
    found = []
    for m in measured:
        made = m
        if m.metric == "acceptance_rate" and not m.cohort and m.estimate is None:
            if usable is not None and usable.draft_tokens and usable.accepted_tokens is not None:
                made = measure.acceptance_from_counters(
                    usable.accepted_tokens,
                    usable.draft_tokens,
                    completed,
                    stage=stage,
                    route=route,
                )
                made = replace(made, note=f"{made.note}; {m.note}")
            elif everybody is not None and everybody.draft_tokens and everybody.accepted_tokens:
                share = everybody.accepted_tokens / everybody.draft_tokens
                made = replace(
                    m,
                    note=f"{m.note}; the server's counters hold {share:.3g} over several routes "
                    "together, which says nothing of one: start it with "
                    "--per-request-spec-decode-metrics summary",
                )
        found.append(made)
    return found


def _counted(drives: Sequence[DriveRecord]) -> Counted | None:
    """The speculative arm's counters over drives that reached it; None where any is not known."""
    found = [
        drive.counters.get(Arm.SPECULATIVE)
        for drive in drives
        if set(drive.counters) != {Arm.TARGET_ONLY}  # servers that take turns: not its turn
    ]
    counted = [one for one in found if isinstance(one, Counted)]
    return telemetry.together(counted) if counted and len(counted) == len(found) else None
