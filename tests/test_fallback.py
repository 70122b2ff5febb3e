"""The live guard: every transition, hysteresis, false alarms, detection, and that it is a function
of what it was told.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from live_route import S, feed, first_move, page, scraped, served, settings, traffic
from ruamel.yaml import YAML

from speccheck import fallback, telemetry
from speccheck.config import FallbackConfig, Guardrails, Rollout, package_dir
from speccheck.fallback import GRACE_NS, Machine, Sample
from speccheck.monitors import Monitors
from speccheck.records import Arm, Receipt, RouteState, Transition, canonical_json, to_json
from speccheck.telemetry import Snapshot, failed_scrape

SPEC, TARGET = Arm.SPECULATIVE, Arm.TARGET_ONLY
DEAD = {"outcome": "error", "error_class": "connection", "http_status": None}


def fallen(at_s: float = 10.0, **config: Any) -> Machine:
    """A machine that fell back when its server died."""
    machine = Machine(settings(**config), "chat")
    feed(machine, [served(i, round(at_s * S) + i, **DEAD) for i in range(10)])
    assert machine.state in (RouteState.FELL_BACK, RouteState.OFF)
    return machine


def on_probation(**config: Any) -> Machine:
    """A machine whose cool-down is over."""
    machine = fallen(**config)
    machine.tick((machine.due_ns or 0) + GRACE_NS)
    assert machine.state is RouteState.PROBATION
    return machine


def good(n: int, start_ns: int, **fields: Any) -> list[Receipt]:
    """Speculative requests that went well, 0.1 s apart."""
    return [
        served(i, start_ns + i * S // 10, accepted_tokens=60 + i % 21, **fields) for i in range(n)
    ]


# --- every rule turns the route off -------------------------------------------------------------


def live(rng: np.random.Generator, n: int = 4000, **bad: Any) -> Any:
    return traffic(rng, n, **bad)


@pytest.mark.parametrize(
    ("bad", "rules", "within"),
    [
        ({"acceptance": 0.25}, {"min_acceptance_rate"}, 80),
        ({"slower": 2.0}, {"max_tpot_p50_regression", "max_e2e_p50_regression"}, 1200),
        ({"errors": 0.1}, {"max_error_rate", "max_engine_error_rate"}, 200),
        ({"errors": 1.0}, {"max_error_rate", "max_engine_error_rate"}, 15),
        (
            {"acceptance": 1.5, "finish_reason": "length"},
            {"max_acceptance_rate"},
            800,
        ),
    ],
    ids=["low agreement", "slow", "errors", "dead", "repetition"],
)
def test_a_rule_on_receipts_turns_the_route_off(bad, rules, within):
    """What goes wrong is named by its rule, with value, interval, limit, window and n."""
    machine = Machine(settings(), "chat")
    seen, moved = first_move(machine, live(np.random.default_rng(5), **bad))
    assert moved is not None
    assert moved.rule in rules
    assert seen <= within
    assert (moved.before, moved.after) == (RouteState.ENABLED, RouteState.FELL_BACK)
    assert moved.estimate is not None
    assert moved.limit is not None
    assert moved.n > 0
    assert (moved.window_s or 0) > 0
    beyond = moved.estimate.high < moved.limit or moved.estimate.low > moved.limit
    assert beyond or bad.get("errors") == 1.0  # failures in a row are no interval of a rate
    assert machine.share == moved.share == 0.0


def test_a_change_after_a_long_calm_is_seen_soon():
    """The evidence reaches back a window, not to the beginning."""
    machine = Machine(settings(), "chat")
    rng = np.random.default_rng(1)
    calm = list(traffic(rng, 2500))
    assert feed(machine, calm) == []
    start = calm[-1].scheduled_ns
    seen, moved = first_move(machine, traffic(rng, 3000, start_ns=start, acceptance=0.3))
    assert moved is not None
    assert moved.rule == "min_acceptance_rate"
    assert seen < 500


def test_refused_requests_turn_the_route_off_beyond_their_count():
    """Three refusals in a window are over the limit of two; two are a client's slip."""
    machine = Machine(settings(), "chat")
    refusal = {"outcome": "rejected", "error_class": "unsupported_parameter", "http_status": 400}
    assert feed(machine, [served(i, S + i, **refusal) for i in range(2)]) == []
    (moved,) = feed(machine, [served(2, S + 2, **refusal)])
    assert (moved.rule, moved.n, moved.limit) == ("max_unsupported_requests", 3, 2.0)


def test_a_verifier_whose_counts_cannot_be_turns_the_route_off():
    """Accepted more than drafted: the first answer is enough."""
    machine = Machine(settings(), "chat")
    odd = served(1, S, warnings=("speculation metrics do not add up: accepted 9 of 4 drafted",))
    (moved,) = feed(machine, [served(0, S), odd])
    assert moved.rule == "max_verifier_errors"


def test_another_warning_is_no_verifier_error():
    """Usage that does not add up is the server's bookkeeping (CASES T22)."""
    machine = Machine(settings(), "chat")
    odd = ("usage does not add up: 71 reasoning tokens of 64",)
    assert feed(machine, [served(i, S + i, warnings=odd) for i in range(20)]) == []


def test_an_answer_that_target_only_had_to_end_is_the_speculative_arms_failure():
    """A joined answer is whole for the client, and an error for the arm that lost it."""
    machine = Machine(settings(), "chat")
    joined = {
        "handover_at": 7,
        "handover_from": "speculative",
        "handover_to": "target_only",
        "handover_kind": "exact",
        "handover_reason": "connection: reset by peer",
    }
    moved = feed(machine, [served(i, S + i, **joined) for i in range(12)])
    assert [m.rule for m in moved] in (["max_error_rate"], ["max_engine_error_rate"])


def test_protected_traffic_that_got_slower_turns_the_route_off():
    """Against protected requests from a time without speculation; without these it is silent."""
    rules = {"max_protected_delay": 0.2}
    rng = np.random.default_rng(2)

    def protected(n: int, start: int, ms: float) -> list[Receipt]:
        return [
            served(
                i,
                start + i * S,
                "target_only",
                route="billing",
                priority="protected",
                tpot_ms=ms * rng.lognormal(0, 0.2),
            )
            for i in range(n)
        ]

    spec = good(20, S)
    silent = Machine(settings(rules), "chat")
    assert feed(silent, [*spec, *protected(200, 20 * S, 60.0)]) == []
    machine = Machine(settings(rules), "chat")
    machine.disable(0, "operator")
    feed(machine, protected(200, S, 20.0))
    machine.reset(300 * S, "operator")
    feed(machine, good(20, 301 * S))
    (moved,) = feed(machine, protected(200, 400 * S, 40.0))
    assert moved.rule == "max_protected_delay"
    assert moved.estimate is not None
    assert moved.estimate.low > 1.2


def test_fewer_than_the_minimum_turn_nothing_off():
    """Nine dead requests are evidence enough, and too few by the settings."""
    machine = Machine(settings(min_requests=10), "chat")
    assert feed(machine, [served(i, S + i, **DEAD) for i in range(9)]) == []
    assert len(feed(machine, [served(9, S + 9, **DEAD)])) == 1


def test_missing_counts_are_no_evidence():
    """Requests that end on a stop string carry no counts: neither good nor bad (CASES T20)."""
    machine = Machine(settings(), "chat")
    missing = {"proposed_tokens": None, "accepted_tokens": None, "verify_steps": None}
    rows = [served(i, S + i * S, counts_source="none", **missing) for i in range(300)]
    assert feed(machine, rows) == []
    assert [g.rule for g in machine.gauges() if "acceptance" in g.rule] == []


def test_a_dead_draft_is_acceptance_zero_not_missing():
    """0 of 100 drafted tokens, again and again (CASES T06)."""
    machine = Machine(settings(), "chat")
    rows = [served(i, S + i * S, accepted_tokens=0, proposed_tokens=90 + i) for i in range(60)]
    (moved,) = feed(machine, rows)
    assert (moved.rule, moved.n) == ("max_unaccepted_tokens", 11)
    assert "does not belong to this target" in moved.why
    plain = Machine(settings(max_unaccepted_tokens=None), "chat")
    (moved,) = feed(plain, rows)
    assert moved.rule == "min_acceptance_rate"
    assert moved.estimate is not None
    assert moved.estimate.value == 0.0


def test_one_accepted_token_ends_a_row():
    """A draft that is hit now and then is weak, not dead: its rate is for the rule on rates."""
    machine = Machine(settings({"min_acceptance_rate": 0.001}), "chat")
    rows = [served(i, S + i * S, accepted_tokens=int(i % 9 == 8)) for i in range(200)]
    assert feed(machine, rows) == []


def test_other_routes_and_requests_kept_off_say_nothing():
    """Receipts of another route, and what the eligibility policy keeps off, are no evidence."""
    machine = Machine(settings(), "chat")
    rows = [served(i, S + i, route="code", **DEAD) for i in range(50)]
    kept = {"decision_reason": "eligibility policy: rule 'x'"}
    rows += [served(i, 2 * S + i, **kept, **DEAD) for i in range(50)]
    assert feed(machine, rows) == []
    assert machine.state is RouteState.ENABLED


# --- rules on scrapes ---------------------------------------------------------------------------


def both(machine: Machine, at_s: float, spec: Any, target: Any) -> Transition | None:
    return scraped(machine, round(at_s * S), target_only=target, speculative=spec)


def run_scrapes(machine: Machine, spec: Any, target: Any, seconds: int) -> list[Transition]:
    """A scrape of both each second, made by a function of the second; what came of it."""
    made = []
    for second in range(1, seconds + 1):
        moved = both(machine, second, spec(second), target(second))
        if moved is not None:
            made.append(moved)
    return made


def flowing(second: int) -> Snapshot:
    return page(second * S, running=2, waiting=0, tokens=100.0 * second)


def stuck(second: int) -> Snapshot:
    return page(second * S, running=2, waiting=0, tokens=500.0)


def test_a_stall_turns_the_route_off_once_it_lasted():
    """Requests run and no token comes, for longer than the limit and not a second before."""
    machine = Machine(settings(max_stall_s=20), "chat")
    (moved,) = run_scrapes(machine, lambda s: flowing(s) if s < 5 else stuck(s), flowing, 40)
    assert moved.rule == "max_stall_s"
    assert moved.at_ns == 25 * S  # the last token was seen at second 5
    assert moved.estimate is not None
    assert moved.estimate.value == 20.0


def test_a_stall_of_both_servers_is_not_speculations_own():
    """Falling back to a target that stalls, too, helps nobody."""
    machine = Machine(settings(), "chat")
    assert run_scrapes(machine, stuck, stuck, 60) == []


def engines(second: int, *tokens: float) -> Snapshot:
    """A server of several engines, each with requests running."""
    samples = {}
    for number, value in enumerate(tokens):
        engine = (("engine", str(number)),)
        samples |= {(telemetry.RUNNING, engine): 2.0, (telemetry.GENERATION_TOKENS, engine): value}
    return Snapshot(second * S, samples)


def test_one_engine_of_several_that_hangs_is_a_stall():
    """The others' tokens do not hide it."""
    machine = Machine(settings(max_stall_s=20), "chat")
    (moved,) = run_scrapes(machine, lambda s: engines(s, 100.0 * s, 100.0 * min(s, 4)), flowing, 40)
    assert (moved.rule, moved.at_ns) == ("max_stall_s", 24 * S)


def test_engines_that_pause_in_turns_do_not_hang():
    """Each has a long prefill now and then: none stalls for long."""
    machine = Machine(settings(max_stall_s=20), "chat")

    def in_turns(second: int) -> Snapshot:
        return engines(second, 100.0 * (second // 2), 100.0 * ((second + 1) // 2))

    assert run_scrapes(machine, in_turns, flowing, 60) == []


def test_a_pause_of_target_only_does_not_keep_a_hung_server_on():
    """A second without tokens on the control is no stall of the control."""
    machine = Machine(settings(max_stall_s=20), "chat")
    (moved,) = run_scrapes(machine, stuck, lambda s: flowing(s - s % 2), 40)
    assert (moved.rule, moved.at_ns) == ("max_stall_s", 21 * S)


def test_an_idle_server_does_not_stall():
    """No tokens and nothing running is no stall."""
    machine = Machine(settings(), "chat")
    idle = page(S, running=0, waiting=0, tokens=500.0)
    assert run_scrapes(machine, lambda _: idle, flowing, 60) == []


def test_a_queue_that_stays_long_turns_the_route_off():
    """Over the limit in every scrape of the time; one short one begins it anew."""

    def queue(second: int) -> Snapshot:
        waiting = 0 if second in (1, 8) else 9 + second % 3
        return page(second * S, running=4, waiting=waiting, tokens=100.0 * second)

    assert run_scrapes(Machine(settings(max_queued=8), "chat"), queue, flowing, 18) == []
    (moved,) = run_scrapes(Machine(settings(max_queued=8), "chat"), queue, flowing, 40)
    assert (moved.rule, moved.at_ns, moved.unit) == ("max_queued", 19 * S, "requests")
    assert moved.estimate is not None
    assert (moved.estimate.low, moved.estimate.high) == (9.0, 11.0)


def test_a_queue_at_its_limit_is_not_over_it():
    """The limit itself is fine."""
    machine = Machine(settings(max_queued=8), "chat")

    def queue(second: int) -> Snapshot:
        return page(second * S, running=4, waiting=8, tokens=100.0 * second)

    assert run_scrapes(machine, queue, flowing, 60) == []


def test_a_server_that_does_not_answer_turns_the_route_off():
    """It had answered, target-only does, and no request completed meanwhile."""
    machine = Machine(settings(max_unreachable_s=15), "chat")
    (moved,) = run_scrapes(machine, lambda s: flowing(s) if s < 5 else "refused", flowing, 40)
    assert (moved.rule, moved.at_ns) == ("max_unreachable_s", 20 * S)
    assert "target-only answers" in moved.why


@pytest.mark.parametrize("both_down", [True, False], ids=["both are down", "it never answered"])
def test_silence_that_tells_nothing_turns_nothing_off(both_down):
    """Neither a pair that is down nor a server that never had a /metrics is judged by it."""
    machine = Machine(settings(), "chat")
    spec = (lambda s: flowing(s) if s < 5 else "refused") if both_down else (lambda _: "HTTP 404")
    target = (lambda s: flowing(s) if s < 5 else "refused") if both_down else flowing
    assert run_scrapes(machine, spec, target, 60) == []


def test_requests_that_complete_outweigh_a_metrics_page_that_hangs():
    """A /metrics that hangs is no outage while answers come."""
    machine = Machine(settings(), "chat")
    moved = []
    for second in range(1, 60):
        moved += feed(machine, good(1, second * S, proposed_tokens=90 + second))
        one = both(machine, second, flowing(second) if second < 5 else "no answer", flowing(second))
        moved += [one] if one else []
    assert moved == []


def test_series_that_are_not_there_are_no_evidence():
    """A server without these series neither stalls nor queues."""
    machine = Machine(settings(), "chat")
    assert run_scrapes(machine, lambda s: Snapshot(s * S, {}), flowing, 60) == []


# --- by /metrics alone --------------------------------------------------------------------------


def counters(second: int, *, accepted: float = 0.7, tpot_s: float = 0.02, errors: float = 0.0):
    """A server that finishes 4 requests of 60 tokens a second."""
    wobbly = second + 0.1 * (second % 3)
    return page(
        second * S,
        running=2,
        waiting=0,
        tokens=240.0 * second,
        drafts=40.0 * second,
        drafted=160.0 * second,
        accepted=round(160.0 * second * accepted),
        tpot_sum=4 * tpot_s * wobbly,
        tpot_count=4.0 * second,
        e2e_sum=240 * tpot_s * wobbly,
        e2e_count=4.0 * second,
        stop=round(4.0 * second * (1 - errors)),
        error=round(4.0 * second * errors),
    )


@pytest.mark.parametrize(
    ("bad", "rules"),
    [
        ({"accepted": 0.1}, {"min_acceptance_rate"}),
        ({"tpot_s": 0.06}, {"max_tpot_p50_regression", "max_e2e_p50_regression"}),
        ({"errors": 0.2}, {"max_error_rate"}),
        ({"accepted": 1.2}, {"max_verifier_errors"}),
        ({"accepted": 0.0}, {"max_unaccepted_tokens"}),
    ],
    ids=["low agreement", "slow", "errors", "more accepted than drafted", "dead draft"],
)
def test_metrics_alone_turn_the_route_off(bad, rules):
    """Without receipts the same rules are judged from what the counters did."""
    machine = Machine(settings(evidence="metrics"), "chat")
    moved = run_scrapes(machine, lambda s: counters(s, **bad), counters, 120)
    assert moved[0].rule in rules
    healthy = Machine(settings(evidence="metrics"), "chat")
    assert run_scrapes(healthy, counters, counters, 300) == []
    assert {g.rule for g in healthy.gauges()} >= {"min_acceptance_rate", "max_error_rate"}


def test_a_server_that_restarts_is_no_fault_and_no_evidence():
    """Counters that begin anew are differenced anew, never negative (CASES T21)."""
    machine = Machine(settings(evidence="metrics"), "chat")

    def restarted(second: int) -> Snapshot:
        return counters(second if second < 100 else second - 99)

    assert run_scrapes(machine, restarted, counters, 200) == []
    assert all(0 <= g.estimate.value <= 1 for g in machine.gauges() if g.unit == "share")


# --- coming back --------------------------------------------------------------------------------


def test_the_cool_down_ends_when_it_was_due():
    """However late the next call comes; and twice as late after each further fallback."""
    machine = fallen(cool_down_s=300)
    fell = machine.since_ns
    assert machine.tick(fell + 300 * S + GRACE_NS - 1) is None
    moved = machine.tick(fell + 999 * S)
    assert moved is not None
    assert (moved.rule, moved.after, moved.at_ns) == (
        "cool_down",
        RouteState.PROBATION,
        fell + 300 * S,
    )
    assert machine.share == 0.10
    (again,) = feed(machine, [served(i, fell + 1000 * S + i, **DEAD) for i in range(10)])
    assert again.fallbacks == 2
    assert machine.due_ns == again.at_ns + 600 * S


def test_a_server_that_is_not_well_is_waited_for():
    """Probation begins when the cool-down is over and the server answers with a short queue."""
    machine = Machine(settings(cool_down_s=60, max_queued=8), "chat")

    def queue(second: int) -> Snapshot:
        waiting = 20 if second < 100 else 5 if second < 120 else 4
        return page(second * S, running=4, waiting=waiting, tokens=100.0 * second)

    moved = run_scrapes(machine, queue, flowing, 200)
    assert [(m.rule, m.at_ns // S) for m in moved] == [("max_queued", 11), ("cool_down", 120)]


def test_a_server_that_never_had_metrics_is_not_waited_for():
    """Its receipts say whether it is well; its page says nothing, before and after."""
    machine = Machine(settings(cool_down_s=60), "chat")
    assert run_scrapes(machine, lambda _: "/metrics: HTTP 404", flowing, 5) == []
    (fell,) = feed(machine, [served(i, 6 * S + i, **DEAD) for i in range(10)])
    moved = []
    for second in range(10, 120):
        one = both(machine, second, "/metrics: HTTP 404", flowing(second))
        moved += [one] if one else []
    assert [(m.rule, m.at_ns) for m in moved] == [("cool_down", fell.at_ns + 60 * S)]


def test_a_probation_that_goes_well_ends_in_enabled():
    """The rule that failed must be shown within its limit, on new evidence."""
    machine = on_probation(probation_requests=60)
    start = machine.since_ns + S
    assert feed(machine, good(59, start)) == []
    moved = feed(machine, good(60, start + 60 * S))
    assert [(m.rule, m.after) for m in moved] == [("probation", RouteState.ENABLED)]
    assert machine.share == 1.0
    assert "certain to be under 0.05" in moved[0].why


def test_what_is_neither_certain_to_be_bad_nor_good_stays_on_probation():
    """Between falling back and coming back there is a gap: acceptance at its limit does neither."""
    machine = Machine(settings(), "chat")
    feed(machine, [served(i, S + i * S, accepted_tokens=5 + i % 9) for i in range(60)])
    assert machine.state is RouteState.FELL_BACK
    machine.tick(10_000 * S)
    at_limit = [
        served(
            i,
            10_001 * S + i * S,
            accepted_tokens=round((0.45 + 0.2 * (i % 2)) * (100 + i // 2)),
            proposed_tokens=100 + i // 2,
        )
        for i in range(400)
    ]
    assert feed(machine, at_limit) == []
    assert machine.state is RouteState.PROBATION
    assert [m.after for m in feed(machine, good(200, 10_500 * S))] == [RouteState.ENABLED]


def test_an_undecided_probation_ends_in_a_fallback_that_does_not_count():
    """A route without traffic goes on being tried, and is never turned off for good by that."""
    machine = on_probation(probation_most_s=1000, cool_down_s=100)
    began = machine.since_ns
    moved = machine.tick(began + 1000 * S + GRACE_NS)
    assert moved is not None
    assert (moved.rule, moved.after, moved.at_ns) == (
        "probation",
        RouteState.FELL_BACK,
        began + 1000 * S,
    )
    assert moved.fallbacks == 1
    while machine.tick(began + 100_000 * S) is not None:
        pass
    assert machine.state is not RouteState.OFF


def test_too_many_fallbacks_turn_the_route_off_until_a_reset():
    """Two are allowed here; the third within the period is for an operator."""
    machine = fallen(most_fallbacks=2, cool_down_s=10)
    states = [machine.state]
    for _ in range(2):
        machine.tick((machine.due_ns or 0) + GRACE_NS)
        feed(machine, [served(i, machine.since_ns + S + i, **DEAD) for i in range(10)])
        states.append(machine.state)
    assert states == [RouteState.FELL_BACK, RouteState.FELL_BACK, RouteState.OFF]
    assert machine.due_ns is None
    assert machine.tick(10**18) is None
    moved = machine.reset(10**18, "ada: driver fixed")
    assert moved is not None
    assert (moved.after, moved.who, machine.fallbacks) == (
        RouteState.PROBATION,
        "ada: driver fixed",
        0,
    )


def test_fallbacks_of_another_day_do_not_count():
    """The period moves on."""
    machine = fallen(most_fallbacks=1, period_s=1000, cool_down_s=10)
    machine.tick(machine.since_ns + 2000 * S)
    (moved,) = feed(
        machine, [served(i, machine.since_ns + 2000 * S + i, **DEAD) for i in range(10)]
    )
    assert (moved.after, moved.fallbacks) == (RouteState.FELL_BACK, 1)


def test_requests_from_before_are_no_evidence_of_after():
    """What was sent before the route moved and ends in its probation says nothing about it."""
    machine = on_probation()
    late = [replace(r, done_ns=machine.since_ns + 5 * S) for r in good(200, S)]
    assert feed(machine, late) == []
    assert machine.windows == ()


def test_an_operator_moves_the_route_and_repeats_change_nothing():
    """Disable and reset take effect at once, each once."""
    machine = Machine(settings(), "chat")
    assert machine.reset(S, "ada") is None
    off = machine.disable(2 * S, "ada")
    assert off is not None
    assert (off.after, off.rule, off.share) == (RouteState.OFF, "disabled", 0.0)
    assert machine.disable(3 * S, "ada") is None
    back = machine.reset(4 * S, "ada")
    assert back is not None
    assert back.after is RouteState.PROBATION
    assert machine.reset(5 * S, "ada") is None
    # Nothing had failed, so sixty good requests are enough.
    assert [m.after for m in feed(machine, good(60, 6 * S))] == [RouteState.ENABLED]


def test_time_that_goes_back_is_no_time():
    """A clock step moves nothing, and no transition is earlier than the one before."""
    machine = fallen()
    fell = machine.since_ns
    assert machine.tick(0) is None
    machine.tick(fell + 400 * S + GRACE_NS)
    assert machine.observe(served(0, 5), 5) is None
    assert machine.since_ns == fell + 300 * S


# --- a function of what it was told -------------------------------------------------------------

LEGAL = {
    (RouteState.ENABLED, RouteState.FELL_BACK),
    (RouteState.ENABLED, RouteState.OFF),
    (RouteState.FELL_BACK, RouteState.PROBATION),
    (RouteState.FELL_BACK, RouteState.OFF),
    (RouteState.PROBATION, RouteState.ENABLED),
    (RouteState.PROBATION, RouteState.FELL_BACK),
    (RouteState.PROBATION, RouteState.OFF),
    (RouteState.OFF, RouteState.PROBATION),
}

Told = tuple[int, str, Any]


@st.composite
def histories(draw: st.DrawFn) -> list[Told]:
    """Stretches of live traffic, scrapes and operators, with times that only grow."""
    at = S
    told: list[Told] = []
    number = 0
    kinds = ("good", "dead", "low", "slow", "refused", "stuck", "silent", "fine", "off", "reset")
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7)):
        step = draw(st.sampled_from([S // 10, S, 30 * S]))
        at += draw(st.sampled_from([0, S, 400 * S, 90_000 * S]))
        for _ in range(draw(st.sampled_from([1, 12, 40]))):
            at += step
            number += 1
            if kind in ("off", "reset"):
                told.append((at, kind, "ada"))
                break
            if kind in ("stuck", "silent", "fine"):
                snapshot = {
                    "stuck": page(at, running=1, waiting=40, tokens=5.0),
                    "silent": failed_scrape("refused", at),
                    "fine": page(at, running=1, waiting=0, tokens=number * 10.0),
                }[kind]
                told.append((at, "scrape", Sample(SPEC, snapshot)))
                fine = page(at, running=1, waiting=0, tokens=number * 10.0)
                told.append((at, "scrape", Sample(TARGET, fine)))
                continue
            fields: dict[str, Any] = {
                "good": {"accepted_tokens": 60 + number % 30},
                "dead": DEAD,
                "low": {"accepted_tokens": number % 20},
                "slow": {"tpot_ms": 90.0 + number % 7},
                "refused": {"outcome": "rejected", "error_class": "unsupported_parameter"},
            }[kind]
            one = served(number, at - S // 50, ttft_ms=1, completion_tokens=None, **fields)
            told.append((at, "receipt", replace(one, done_ns=at)))
    return told


def tell(machine: Machine, told: Told) -> list[Transition]:
    """Hand one thing in; all that came of it."""
    at, kind, what = told
    if kind == "receipt":
        moved = machine.observe(what, at)
    elif kind == "scrape":
        moved = machine.telemetry(what, at)
    else:
        moved = machine.disable(at, what) if kind == "off" else machine.reset(at, what)
    made = []
    while moved is not None:
        made.append(moved)
        moved = machine.tick(0)
    return made


def ended(machine: Machine, at: int) -> list[Transition]:
    made = []
    while (moved := machine.tick(at + GRACE_NS + 1)) is not None:
        made.append(moved)
    return made


def as_bytes(made: list[Transition]) -> str:
    return "\n".join(canonical_json(to_json(moved)) for moved in made)


CONFIG = {"cool_down_s": 200, "most_fallbacks": 2, "probation_requests": 10, "max_stall_s": 5}


@given(told=histories())
@hypothesis_settings(max_examples=30)
def test_its_transitions_are_a_chain_of_legal_moves(told):
    """Each begins where the last ended; the share is the state's; only a reset leaves off."""
    machine = Machine(settings(**CONFIG), "chat")
    made = [moved for one in told for moved in tell(machine, one)] + ended(machine, told[-1][0])
    state, at = RouteState.ENABLED, 0
    for number, moved in enumerate(made):
        assert moved.seq == number
        assert moved.before is state
        assert (moved.before, moved.after) in LEGAL
        assert moved.at_ns >= at
        assert moved.share == {"enabled": 1.0, "probation": 0.1}.get(moved.after, 0.0)
        assert (moved.before is RouteState.OFF) <= (moved.rule == "reset")
        assert (moved.who != "") == (moved.rule in ("reset", "disabled"))
        state, at = moved.after, moved.at_ns
    assert machine.state is state
    assert machine.seq == len(made)


@given(told=histories(), data=st.data())
@hypothesis_settings(max_examples=30)
def test_ticks_between_change_no_byte(told, data):
    """However often time is told, and however late: the same transitions, byte for byte."""
    plain, ticked = Machine(settings(**CONFIG), "chat"), Machine(settings(**CONFIG), "chat")
    made = [moved for one in told for moved in tell(plain, one)] + ended(plain, told[-1][0])
    also: list[Transition] = []
    for i, one in enumerate(told):
        if data.draw(st.booleans()):
            before = told[i - 1][0] if i else 0
            at = data.draw(st.integers(before, one[0])) + data.draw(st.integers(0, GRACE_NS))
            while (moved := ticked.tick(at)) is not None:
                also.append(moved)
        also += tell(ticked, one)
    also += ended(ticked, told[-1][0])
    assert as_bytes(also) == as_bytes(made)


@given(told=histories(), data=st.data())
@hypothesis_settings(max_examples=30)
def test_a_restart_from_its_rows_is_in_the_same_state(told, data):
    """After any history: state, since, due, share, count of fallbacks and number of the next."""
    machine = Machine(settings(**CONFIG), "chat")
    cut = data.draw(st.integers(0, len(told)))
    made = [moved for one in told[:cut] for moved in tell(machine, one)]
    again = Machine.restore(machine.settings, "chat", made)
    for name in ("state", "since_ns", "seq", "due_ns", "share", "_blamed", "_fallbacks_ns"):
        assert getattr(again, name) == getattr(machine, name), name


@given(told=histories())
@hypothesis_settings(max_examples=20)
def test_a_replay_of_what_was_kept_decides_the_same(told):
    """From receipts, scrapes and what the operator did, each from its own table."""
    machine = Machine(settings(**CONFIG), "chat")
    made = [moved for one in told for moved in tell(machine, one)] + ended(machine, told[-1][0])
    again = fallback.replay(
        Machine(settings(**CONFIG), "chat"),
        [what for _, kind, what in told if kind == "receipt"],
        [what for _, kind, what in told if kind == "scrape"],
        [moved for moved in made if moved.who],
        until_ns=told[-1][0],
    )
    assert as_bytes(again) == as_bytes(made)


# --- false alarms -------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(60.0, 600.0), (30.0,), (10.0, 100.0, 1000.0)])
def test_the_levels_of_a_days_windows_add_up_to_the_rate_of_false_alarms(lengths):
    """By the union bound: they begin half their length apart, each fails at its level at most."""
    plain = settings(windows_s=lengths, false_alarms_per_day=0.02)
    total = sum(86_400 / (length / 2) * plain.alpha_fail(length) for length in lengths)
    assert total == pytest.approx(0.02)
    for length in lengths:
        window = fallback.Window(plain, "chat", 0, length)
        assert isinstance(window.watch, Monitors)
        # The rates of our own take what the monitors leave.
        assert (
            window.watch._alpha_fail + 2 * 0.1 * window.alpha_fail <= window.alpha_fail * 1.000001
        )


def test_windows_begin_no_oftener_than_their_level_allows():
    """Half a length apart, and later where the traffic is slow."""
    machine = Machine(settings(windows_s=(20.0, 60.0), window_requests=50), "chat")
    began: dict[float, set[int]] = {20.0: set(), 60.0: set()}
    rows = traffic(np.random.default_rng(3), 1500, rate_per_s=10)
    for one in rows:
        assert machine.observe(one, one.done_ns or 0) is None
        for window in machine.windows:
            began[window.length_s or 0.0].add(window.began_ns)
    for length, starts in began.items():
        gaps = np.diff(sorted(starts)) / S
        assert len(gaps) >= 3
        assert gaps.min() >= length / 2
    slow = Machine(settings(windows_s=(20.0,), window_requests=50), "chat")
    for one in good(120, S):
        slow.observe(replace(one, scheduled_ns=one.scheduled_ns * 100), (one.done_ns or 0) * 100)
        assert len(slow.windows) <= 2
    assert slow.windows[0].speculative > 50


# --- settings -----------------------------------------------------------------------------------


def test_limits_of_the_live_guard_overlay_those_of_the_guardrails():
    """Defaults first, then guardrails.yaml, then the route's rules, then fallback.limits."""
    rollout = Rollout(
        name="x",
        speculation={"method": "ngram"},
        routes=({"name": "chat"},),
        fallback={"limits": {"min_acceptance_rate": "40%"}},
    )
    rules = Guardrails(
        speculative_decoding_guardrails={"min_acceptance_rate": 0.55, "max_error_rate": "2%"},
        routes={"chat": {"max_tpot_p50_regression": "30%"}},
        dry_run=("max_error_rate",),
    )
    live_limits = fallback.settings_of(rollout, rules, "chat").limits
    assert {name: limit.limit for name, limit in live_limits.items()} == {
        "min_acceptance_rate": 0.4,
        "max_tpot_p50_regression": 0.3,
        "max_e2e_p50_regression": 0.10,
        "max_acceptance_rate": 0.95,
        "max_unsupported_requests": 2,
    }


def test_the_commented_block_of_rollout_yaml_is_the_defaults():
    """What the file shows is what holds where nothing is set, and every setting is shown."""
    text = (package_dir("rules") / "rollout.yaml").read_text(encoding="utf-8")
    block = text[text.index("# fallback:") : text.index("\n\n", text.index("# fallback:"))]
    loaded = YAML(typ="safe").load(block.replace("# ", "", 1).replace("\n# ", "\n"))
    shown = FallbackConfig(**loaded["fallback"])
    plain = FallbackConfig()
    told = shown.model_dump(exclude={"limits", "hooks"})
    assert told == plain.model_dump(exclude={"limits", "hooks"})
    assert shown.model_fields_set == set(FallbackConfig.model_fields)
    assert shown.hooks.model_fields_set == set(type(shown.hooks).model_fields)
    given = shown.limits.model_dump(exclude_none=True)
    assert {name: fallback.LIVE_LIMITS[name] for name in given} == given


def test_hooks_are_no_part_of_the_settings_that_are_written_down():
    """The URL of a webhook is often a secret; it moves no route either."""
    told = FallbackConfig(hooks={"webhook": "https://hooks.example/T0/secret"})
    assert "secret" not in json.dumps(told.model_dump(mode="json"))
    plain = settings()
    assert replace(plain, config=told).digest == plain.digest


@pytest.mark.parametrize("field", ["window_s", "coolDown", "max_queue"])
def test_a_misspelt_setting_is_an_error(field):
    """A typo never turns into a default."""
    with pytest.raises(ValueError, match="Extra inputs"):
        FallbackConfig(**{field: 1})


# --- what is kept of scrapes --------------------------------------------------------------------

ROUNDS = {
    "idle": {"running": 0, "waiting": 0, "grows": False},
    "flows": {"running": 3, "waiting": 2, "grows": True},
    "stands": {"running": 3, "waiting": 0, "grows": False},
    "queues": {"running": 3, "waiting": 9, "grows": True},
    "fails": None,
    "says nothing": {},
}


def rounds_of(words: list[tuple[str, str]]) -> list[list[Sample]]:
    """A scrape of each arm every second, as these words say."""
    tokens = dict.fromkeys(Arm, 0.0)
    made: list[list[Sample]] = []
    for second, both in enumerate(words, 1):
        row = []
        for arm, word in zip(Arm, both, strict=True):
            at, what = second * S, ROUNDS[word]
            if what is None:
                row.append(Sample(arm, failed_scrape("gone", at)))
                continue
            tokens[arm] += 50 if what.get("grows") else 0
            values = {
                (telemetry.RUNNING, ()): what.get("running"),
                (telemetry.WAITING, ()): what.get("waiting"),
                (telemetry.GENERATION_TOKENS, ()): tokens[arm] if what else None,
            }
            known = {series: float(x) for series, x in values.items() if x is not None}
            row.append(Sample(arm, Snapshot(at, known)))
        made.append(row)
    return made


words = st.sampled_from(sorted(ROUNDS))
rows = st.lists(
    st.tuples(st.tuples(words, words), st.integers(1, 8)).map(lambda x: [x[0]] * x[1]), max_size=12
)


@given(
    words=rows.map(lambda parts: [one for part in parts for one in part]), comes_back=st.booleans()
)
@example(words=[("flows", "flows")] * 6 + [("stands", "flows")] * 6, comes_back=True)
@example(words=[("flows", "flows")] * 6 + [("flows", "stands")] * 6, comes_back=True)
@example(words=[("idle", "idle")] * 6 + [("idle", "fails")] * 9, comes_back=True)
@hypothesis_settings(deadline=None)
def test_what_is_left_out_of_the_scrapes_decides_nothing(words, comes_back):
    """Of a row of quiet rounds the first and the last are kept, and the decisions are the same."""
    config = {
        "max_queued": 4,
        "queued_for_s": 2.0,
        "max_stall_s": 2.0,
        "max_unreachable_s": 2.0,
        "cool_down_s": 3.0 if comes_back else 600.0,
        "probation_most_s": 5.0,
    }
    every = rounds_of(words)
    thinned = fallback.Thinned(4)
    kept = [sample for row in every for sample in thinned.keep(row)]
    stored: dict[Arm, list[Snapshot]] = {arm: [] for arm in Arm}
    for sample in kept:
        stored[sample.arm].append(fallback.kept_sample(sample))
    read = fallback.kept_of(stored)
    assert {id(x) for x in kept} <= {id(x) for row in every for x in row}
    end = (len(every) + 1) * S
    receipts = [served(i, i * S + S // 2, completion_tokens=2) for i in range(0, len(every), 3)]
    one, other = (Machine(settings(**config), "chat") for _ in range(2))
    whole = fallback.replay(one, receipts, [s for row in every for s in row], until_ns=end)
    again = fallback.replay(other, receipts, read.samples, until_ns=end)
    assert as_bytes(again) == as_bytes(whole)
    if words and len(set(words)) == 1 and words[0] == ("idle", "idle"):
        assert len(kept) <= 4


def test_failures_in_a_row_after_a_long_calm_are_no_rate_over_the_limit():
    """The decision is right, and its words do not contradict their own figures."""
    machine = Machine(settings(windows_s=()), "chat")
    assert feed(machine, [served(i, i * S // 10) for i in range(1000)]) == []
    (moved,) = feed(machine, [served(i, 100 * S + i, **DEAD) for i in range(1000, 1012)])
    assert moved.estimate is not None
    assert moved.limit is not None
    assert moved.estimate.value < moved.limit
    assert "came too close together for the limit of" in moved.why
    assert "is over" not in moved.why


# --- what others broke ---------------------------------------------------------------------------


@pytest.mark.parametrize("error_class", ["unreachable", "stall", "connection", "server_error"])
def test_the_servers_own_faults_are_engine_errors(error_class):
    """A server that nobody can connect to has failed as much as one that breaks off."""
    machine = Machine(replace(settings(), limits={}), "chat")
    fields = {**DEAD, "error_class": error_class}
    (moved,) = feed(machine, [served(i, S + i, **fields) for i in range(30)])
    assert moved.rule == "max_engine_error_rate"


def test_an_answer_that_took_too_long_is_no_engine_error():
    """It may be a long one: it is in the error rate."""
    machine = Machine(settings(), "chat")
    slow = {"outcome": "incomplete", "error_class": "timeout"}
    (moved,) = feed(machine, [served(i, S + i, **slow) for i in range(12)])
    assert moved.rule == "max_error_rate"


def test_a_failure_of_a_version_that_was_replaced_moves_nothing():
    """What was too few requests to count is not made up by those of the next version."""
    machine = Machine(settings(min_requests=20, max_engine_error_rate=None), "chat")
    bad = [served(i, S + i, **DEAD) for i in range(8)]
    assert feed(machine, bad) == []
    assert feed(machine, [replace(r, policy_version="new") for r in good(40, 2 * S)]) == []


def test_a_server_that_dies_after_its_page_did_is_unreachable_from_its_last_answer():
    """One answer after the first failed scrape does not vouch for it for ever."""
    machine = Machine(settings(max_unreachable_s=15), "chat")
    moved = []
    for second in range(1, 60):
        if second <= 10:
            moved += feed(machine, good(1, second * S, proposed_tokens=90 + second))
        one = both(machine, second, flowing(second) if second < 5 else "no answer", flowing(second))
        moved += [one] if one else []
    (only,) = moved
    assert only.rule == "max_unreachable_s"
    assert 25 * S <= only.at_ns <= 28 * S


def test_scrapes_that_fail_now_and_then_lose_no_evidence():
    """Counters are differenced over the hole."""
    machine = Machine(settings(evidence="metrics"), "chat")

    def flaky(second: int) -> Snapshot | str:
        return "no answer within 3 s" if second % 2 else counters(second, errors=0.2)

    moved = run_scrapes(machine, flaky, counters, 120)
    assert moved
    assert moved[0].rule == "max_error_rate"


def test_what_a_process_did_before_it_died_is_no_evidence_on_the_next():
    """Also where nobody saw it start again."""
    machine = Machine(settings(evidence="metrics"), "chat")

    def restarted(second: int) -> Snapshot | str:
        if second < 20:
            return counters(second)
        return "refused" if second < 25 else counters(second - 24)

    assert run_scrapes(machine, restarted, counters, 25) == []
    assert {window.began_ns for window in machine.windows} == {25 * S}


def test_a_page_without_counters_is_no_page_of_zeros():
    """What was counted since the server began is not what happened after an empty page."""
    machine = Machine(settings(evidence="metrics"), "chat")

    def once_bad(second: int) -> Snapshot:
        if second == 30:
            return Snapshot(second * S, {})
        made = counters(second)
        labels = (("engine", "0"), ("finished_reason", "error"))
        return replace(made, samples={**made.samples, (telemetry.FINISHED, labels): 500.0})

    assert run_scrapes(machine, once_bad, counters, 60) == []


def test_evidence_of_a_state_before_is_none_of_the_next_by_metrics_either():
    """An interval that began before a route was tried again says nothing of the trial."""
    machine = Machine(settings(evidence="metrics", cool_down_s=30), "chat")

    def dies(second: int) -> Snapshot | str:
        return counters(second, accepted=0.0 if second < 50 else 0.7)

    moved = run_scrapes(machine, dies, counters, 120)
    assert [m.rule for m in moved[:2]] == ["max_unaccepted_tokens", "cool_down"]
    since = moved[1].at_ns
    assert all(window.began_ns > since for window in machine.windows)


def test_a_wall_clock_that_was_set_back_blinds_no_guard():
    """A row from the future would make each receipt one from before."""
    (moved,) = feed(Machine(settings(), "chat"), [served(i, S + i, **DEAD) for i in range(10)])
    rows = [
        (moved, 3_600 * S),
        (
            replace(moved, seq=1, before=moved.after, after=RouteState.ENABLED, rule="probation"),
            3_601 * S,
        ),
    ]
    machine = fallback.resume(settings(), "chat", rows, now_wall_ns=10 * S, now_ns=5 * S)
    assert machine.state is RouteState.ENABLED
    (again,) = feed(machine, [served(i, 6 * S + i, **DEAD) for i in range(10)])
    assert again.after is RouteState.FELL_BACK


def test_a_period_in_which_no_two_fallbacks_fit_is_refused():
    """It would never turn a route off for good, and cut the cool-down short."""
    with pytest.raises(ValueError, match="longer than cool_down_s"):
        FallbackConfig(cool_down_s=600, period_s=600)
