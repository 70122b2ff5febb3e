"""The client's own fitness: what is watched, what is judged, and what a late client decides."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from attached_pair import attached_pair
from rule_receipts import receipt

from speccheck import context, decision, guardrails, health
from speccheck.config import HealthLimits
from speccheck.console import Reporter
from speccheck.errors import ExitCode
from speccheck.health import HELD, CpuReading, LoopWatch, core_seconds, lateness, pooled_health
from speccheck.records import Action, Estimate, Finding, Stage, Verdict

LOOSE = HealthLimits(
    lag_floor_s=60, loop_stall_s=60, loop_stall_share=1, loop_cpu_share=None, process_cpu_share=None
)
STAT = """\
cpu  1000 0 0 1000 0 0 0 0 0 0
cpu0 300 10 50 100 40 0 0 0 7 0
cpu1 100 0 100 700 60 20 10 10 0 0
intr 5
"""


def sent(number: int, lag_ms: float, *, held: bool = False, ttft_ms: float = 50):
    """A receipt that left `lag_ms` after it was due."""
    late_ns = round(lag_ms * 1e6)
    made = receipt(number, "target_only", ttft_ms=ttft_ms)
    return replace(
        made,
        scheduled_ns=made.sent_ns - late_ns,
        warnings=(HELD,) if held else (),
    )


# --- what is watched ----------------------------------------------------------------------------


def test_busy_cores_are_those_we_may_run_on():
    """Waiting for a disk is not busy, stolen time is; guest time is counted once."""
    ticks = 100  # of every Linux
    assert core_seconds(STAT, {0}) == (360 / ticks, 500 / ticks)
    assert core_seconds(STAT, {0, 1}) == (600 / ticks, 1500 / ticks)
    assert all(map(math.isnan, core_seconds(STAT, {7})))


def test_this_system_tells_where_the_cpu_went():
    """Totals only grow, and what is unknown is NaN, never 0."""
    first, second = health.read_cpu(), health.read_cpu()
    for name in ("wall_s", "thread_s", "process_s", "waited_s", "busy_s", "capacity_s"):
        a, b = getattr(first, name), getattr(second, name)
        assert b >= a or (math.isnan(a) and math.isnan(b))


async def test_shares_are_of_the_time_watched():
    """Two spans of ten seconds: thread 1 s, process 3 s, waiting 2 s, machine 15 of 40."""
    readings = [
        CpuReading(0, 0, 0, 0, 0, 0),
        CpuReading(10, 1, 2, 0.5, 5, 20),
        CpuReading(100, 1, 2, 0.5, 5, 20),
        CpuReading(110, 1, 3, 2, 15, 40),
    ]
    watch = LoopWatch(iter(readings).__next__)
    for _ in range(2):
        with watch.measuring():
            await asyncio.sleep(0)
    seen = watch.health([0.0], [], 0, LOOSE)
    assert seen.driven_s == 20
    assert seen.loop_cpu_share == pytest.approx(1 / 20)
    assert seen.process_cpu_share == pytest.approx(3 / 20)
    assert seen.cpu_wait_share == pytest.approx(2 / 20)
    assert seen.machine_cpu_share == pytest.approx(15 / 40)


def test_stalls_are_summed_from_ten_milliseconds_on():
    """Smaller delays of a timer are no stall; the longest is kept whatever its size."""
    watch = LoopWatch()
    for late_s in (0.004, 0.009, -0.01):
        watch.note_lateness(late_s)
    assert (watch.stall_max_s, watch.stall_total_s) == (0.009, 0)
    for late_s in (0.010, 0.3, 0.02):
        watch.note_lateness(late_s)
    assert watch.stall_max_s == 0.3
    assert watch.stall_total_s == pytest.approx(0.33)


# --- what is judged -----------------------------------------------------------------------------

FIT = replace(
    health.unknown_health(""),
    driven_s=100.0,
    loop_stall_max_s=0.02,
    loop_stall_total_s=0.1,
    loop_cpu_share=0.1,
    process_cpu_share=0.2,
    cpu_wait_share=0.05,
    machine_cpu_share=1.0,
)


@pytest.mark.parametrize(
    ("figures", "limits", "words"),
    [
        ({}, {}, ""),
        ({"loop_stall_max_s": 0.4}, {}, "stalled for 400 ms > limit 250 ms"),
        ({"loop_stall_total_s": 6.0}, {}, "stalled for 6.0 s of 100 s > limit 5%"),
        ({"loop_cpu_share": 0.95}, {}, "the event loop used 95% of a core > limit 90%"),
        ({}, {"process_cpu_share": 0.15}, "the process used 20% of a core > limit 15%"),
        ({}, {"cpu_wait_share": 0.01}, "waited for a core 5% of the time > limit 1%"),
        ({}, {"machine_cpu_share": 0.9}, "cores were 100% busy > limit 90%"),
        ({}, {"lag_floor_s": 0.0001, "lag_share": 0.001}, "send lag p99 1.0 ms > limit 0.1 ms"),
        ({"cpu_wait_share": math.nan}, {"cpu_wait_share": 0.01}, ""),
    ],
)
def test_each_limit_can_make_the_run_invalid(figures, limits, words):
    """Each limit trips with its number in the reason; what is not known trips nothing."""
    receipts = [sent(i, 1.0) for i in range(50)]
    seen = pooled_health([replace(FIT, **figures)], receipts, HealthLimits(**limits))
    assert seen.valid == (words == "")
    assert seen.is_late == (words != "")
    assert words in "; ".join(seen.reasons)


def test_one_stall_in_a_short_drive_is_no_share():
    """50 ms in half a second are ten per cent, and still less than one stall may be."""
    short = replace(FIT, driven_s=0.5, loop_stall_max_s=0.05, loop_stall_total_s=0.05)
    assert pooled_health([short], [sent(0, 1.0)], HealthLimits()).valid


def test_a_stage_is_judged_from_all_its_drives():
    """The worst share and stall, the sum of stalls, and one p99 over all requests."""
    worse = replace(FIT, loop_cpu_share=0.3, loop_stall_max_s=0.1, machine_cpu_share=math.nan)
    receipts = [sent(i, 80.0 if i < 2 else 1.0) for i in range(400)]
    seen = pooled_health([FIT, worse], receipts, HealthLimits())
    assert seen.valid
    assert (seen.loop_cpu_share, seen.loop_stall_max_s) == (0.3, 0.1)
    assert (seen.driven_s, seen.loop_stall_total_s) == (200, pytest.approx(0.2))
    assert seen.machine_cpu_share == 1.0
    assert seen.lag_p99_s == pytest.approx(0.001)


def test_nothing_sent_is_not_valid():
    """No requests, no verdict on the client; warm-up does not count."""
    warm = [replace(sent(0, 1.0), warm_up=True)]
    seen = pooled_health([FIT], warm, HealthLimits())
    assert not seen.valid
    assert seen.reasons == ("nothing was sent",)


def test_requests_held_back_are_not_our_lateness():
    """Waiting for the cap is the servers' doing: told apart from lag, and from one in a hundred."""
    free = [sent(i, 1.0) for i in range(198)]
    held = [sent(i, 900.0, held=True) for i in range(198, 201)]
    seen = pooled_health([FIT], free + held, HealthLimits())
    assert not seen.valid
    assert not seen.is_late
    assert "3 of 201 requests waited for the cap in flight" in seen.reasons[0]
    assert pooled_health([FIT], free + held[:2], HealthLimits()).valid
    assert lateness(free + held, HealthLimits()) == ""


def test_a_look_knows_of_lateness_from_receipts():
    """What a live look has are receipts: late sends speak, held and warm-up ones do not."""
    on_time = [sent(i, 2.0) for i in range(50)]
    assert lateness(on_time, HealthLimits()) == ""
    assert lateness([], HealthLimits()) == ""
    late = [sent(i, 30.0) for i in range(50, 60)]
    assert "send lag p99 30.0 ms > limit 10.0 ms" in lateness(on_time + late, HealthLimits())
    slow = [sent(i, 30.0, ttft_ms=1000) for i in range(50)]
    assert lateness(slow, HealthLimits()) == ""


def test_lateness_of_the_last_requests_passes():
    """Two late sends void the times of the requests around them, and no more than those."""
    watched = health.Punctuality(HealthLimits(), window=50)
    said = [watched.add(sent(i, 40.0 if i in (60, 61) else 1.0)) for i in range(200)]
    assert not any(said[:60])
    assert all(said[61:110])
    assert not any(said[112:])


# --- what it decides ----------------------------------------------------------------------------


def finding(rule: str, verdict: Verdict, value: float = 1.0) -> Finding:
    estimate = Estimate(value, value, value, 200, "test", 0.05)
    return Finding(rule, verdict, "chat", "", "shadow", estimate, 1.1, "ratio", f"{rule} told")


TIMED = {
    name
    for name in guardrails.RULES
    if name.endswith(("_regression", "_delay")) or name == "min_speedup"
}


def test_times_are_what_a_late_client_makes_void():
    """Each rule on times becomes an error, whatever it said; no other rule changes."""
    found = [finding(name, v) for name in guardrails.RULES for v in Verdict]
    for before, after in zip(found, guardrails.void_times(found, "the loop slept"), strict=True):
        if before.rule in TIMED:
            assert after.verdict is Verdict.ERROR
            assert after.estimate is None
            assert "void: our client was late (the loop slept)" in after.why
        else:
            assert after is before
    assert guardrails.void_times(found, "") == tuple(found)


def test_a_lighter_load_than_planned_makes_no_pass():
    """Held-back requests: a pass on times cannot be judged, a failure stands."""
    found = [finding("max_tpot_p95_regression", v) for v in Verdict]
    after = guardrails.void_passes(found, "2 of 9 waited")
    assert [f.verdict for f in after] == [
        Verdict.ERROR,
        Verdict.INCONCLUSIVE,
        Verdict.ERROR,
        Verdict.FAIL,
    ]
    assert "not as planned: 2 of 9 waited" in after[0].why
    untimed = [finding("max_error_rate", Verdict.PASS)]
    assert guardrails.void_passes(untimed, "2 of 9 waited") == tuple(untimed)


@pytest.mark.parametrize(
    ("others", "action", "code"),
    [
        ([Verdict.PASS], Action.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE),
        ([Verdict.INCONCLUSIVE], Action.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE),
        ([Verdict.FAIL], Action.FALL_BACK, ExitCode.JUDGED_BAD),
    ],
)
def test_void_times_could_not_be_judged_and_a_failure_still_wins(others, action, code):
    """PASS < INCONCLUSIVE < ERROR < FAIL: late means exit 4, a wrong output stays wrong."""
    found = [finding("max_tpot_p95_regression", Verdict.FAIL)]
    found += [finding("max_error_rate", v) for v in others]
    made = decision.decide("chat", Stage.SHADOW, guardrails.void_times(found, "late"))
    assert made.action is action
    assert decision.exit_code([made]) == code


@pytest.mark.parametrize(("void", "once"), [("late", "send lag 9 ms"), ("held", "9 of 9 waited")])
def test_why_times_are_void_is_said_once(void, once):
    """However many rules it makes void: each is named, the reason they share stands once."""
    found = [finding(name, Verdict.PASS) for name in ("max_tpot_p95_regression", "min_speedup")]
    found += [replace(found[0], rule="max_e2e_p95_regression", cohort="concurrency 8")]
    judge = guardrails.void_times if void == "late" else guardrails.void_passes
    made = decision.decide("chat", Stage.SHADOW, judge(found, once))
    assert made.reason.count(once) == 1
    if void == "late":
        assert made.reason.endswith(
            "TPOT p95, e2e speed-up, e2e p95 are void: our client was late (send lag 9 ms)"
        )
    else:
        assert all(f.why.partition(",")[0] in made.reason for f in found)


NEVER = {"lag_floor_s": 0, "lag_share": 0}
"""Limits that no client keeps: every request leaves some microseconds after it was due."""


def test_a_late_shadow_ends_with_exit_code_4_in_every_form(tmp_path):
    """Text, JSON and JUnit say that times are void and why; nothing is promoted."""
    with attached_pair(tmp_path, client_limits=NEVER) as pair:
        ended = pair.run(Stage.SHADOW)
    assert ended.exit_code == ExitCode.COULD_NOT_JUDGE == 4
    (made,) = ended.decisions
    assert made.action is Action.INCONCLUSIVE
    assert "void: our client was late (send lag p99" in made.reason
    told = ended.to_dict()
    assert told["exit_code"] == 4
    assert told["stages"]["shadow"]["verdict"] == "error"
    client = told["stages"]["shadow"]["client_health"]
    assert not client["valid"]
    assert client["is_late"]
    assert client["driven_s"] > 0
    suites = ET.fromstring(decision.junit(ended.decisions, ended.checks))  # noqa: S314 (ours)
    assert suites.findall(".//error[@type='could_not_judge']")
    assert not suites.findall(".//failure")


def test_limits_are_part_of_the_run(tmp_path):
    """Another limit is another run: what was judged by one is not judged again by another."""
    ids = []
    with attached_pair(tmp_path) as pair:
        for limits in ({}, NEVER, {"loop_stall_s": 1}):
            rollout = json.loads(pair.rollout.read_text(encoding="utf-8"))
            pair.rollout.write_text(json.dumps(rollout | {"client_limits": limits}))
            with context.open_run(pair.rollout, tmp_path / "run", Reporter(), fresh=False) as run:
                ids.append(run.run_id)
    assert len(set(ids)) == 3
