"""What servers counted beside what receipts say: the gap, its reasons, and what counters may judge.

The numbers are those of the cases from the field; the pages are parsed as a server would send them.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from attached_pair import attached_pair
from rule_receipts import receipt
from scripted_server import answer
from test_shadow import LOOSE
from test_telemetry import counters, page, snapshot

from speccheck import context, tally, telemetry
from speccheck.health import unknown_health
from speccheck.records import Action, Arm, Measurement, Stage, Verdict
from speccheck.store import DriveRecord
from speccheck.telemetry import (
    DRAFT_TOKENS,
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    counted,
    difference,
    parse_metrics,
)

NONE = {"proposed_tokens": None, "accepted_tokens": None, "verify_steps": None}


def between(before, after):
    """What a server counted between two pages, given as engines with their series."""
    return counted(difference(snapshot(0, **before), snapshot(60, **after)))


def drive(speculative, *, completed, routes=("chat",), target="no /metrics"):
    """One drive of a stage, with what its servers counted."""
    return DriveRecord(
        "shadow",
        "mirror",
        routes,
        completed,
        unknown_health("-"),
        {Arm.TARGET_ONLY: target, Arm.SPECULATIVE: speculative},
    )


def row(counters_of_arm, quantity):
    (found,) = [r for r in counters_of_arm["rows"] if r["quantity"] == quantity]
    return found


# --- side by side -------------------------------------------------------------------------------


def test_what_agrees_says_so():
    """Counters that equal the sum of receipts, warm-up included, have no gap."""
    receipts = [receipt(i, "speculative") for i in range(10)]
    receipts += [replace(receipt(i, "speculative"), warm_up=True) for i in range(10, 12)]
    after = counters(12 * 25, 1200, 720) | {GENERATION_TOKENS: 12 * 64}
    found = tally.beside_receipts([drive(between({}, {"e0": after}), completed=10)], receipts)
    for quantity in ("generated tokens", "drafted tokens", "accepted tokens", "verify steps"):
        assert (row(found["speculative"], quantity)["gap"]) == 0
        assert row(found["speculative"], quantity)["why"] == "they agree"
    assert found["target_only"] == {"not_measured": "no /metrics"}


def test_requests_without_metrics_explain_the_gap():
    """T20: 40 of 100 end on a stop string; the server's 15000 and the receipts' 9000 stand both."""
    with_counts = [
        receipt(i, "speculative", proposed_tokens=150, accepted_tokens=90) for i in range(60)
    ]
    reason = "ended on a stop string, for which the engine sends no metrics"
    without = [
        receipt(i, "speculative", counts_note=reason, stop_reason="\n\nQ:", **NONE)
        for i in range(60, 100)
    ]
    seen = between({}, {"e0": counters(3750, 15000, 9150) | {GENERATION_TOKENS: 6500}})
    found = tally.beside_receipts([drive(seen, completed=100)], with_counts + without)
    drafted = row(found["speculative"], "drafted tokens")
    assert (drafted["server"], drafted["receipts"], drafted["gap"]) == (15000, 9000, 6000)
    assert drafted["why"] == f"40 of 100 requests carry none: {reason}"
    assert found["speculative"]["acceptance"].value == pytest.approx(0.61)
    assert found["speculative"]["acceptance"].n == 100
    generated = row(found["speculative"], "generated tokens")
    assert generated["gap"] == 100
    assert "40 requests ended on a stop string" in generated["why"]


def test_an_engine_that_restarted_is_named():
    """T21: 0.539 of both engines together; never the 110 % of naive subtraction."""
    seen = between(
        {"e0": counters(5000, 15000, 8250), "e1": counters(5200, 15600, 8580)},
        {"e0": counters(9000, 27000, 14850), "e1": counters(1100, 3300, 1650)},
    )
    receipts = [
        receipt(i, "speculative", proposed_tokens=306, accepted_tokens=165) for i in range(60)
    ]
    found = tally.beside_receipts([drive(seen, completed=60)], receipts)["speculative"]
    assert found["acceptance"].value == pytest.approx(0.539, abs=5e-4)
    assert found["resets"] == ["1"]
    drafted = row(found, "drafted tokens")
    assert drafted["gap"] == 15300 - 60 * 306
    assert "engine 1 restarted: what it had counted before is lost" in drafted["why"]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (counters(0, 0, 0), "--disable-log-stats"),
        (counters(260, 1040, 624), "traffic that is not ours?"),
        (counters(240, 960, 576), "did another replica answer?"),
    ],
)
def test_a_gap_that_receipts_do_not_explain(after, words):
    """Counters that stand still, count more, or count less than receipts: the likely reason."""
    receipts = [receipt(i, "speculative") for i in range(10)]
    found = tally.beside_receipts([drive(between({}, {"e0": after}), completed=10)], receipts)
    assert words in row(found["speculative"], "drafted tokens")["why"]


def test_several_choices_explain_prompt_tokens_and_nothing_else():
    """The server counts a prompt once per choice: that is its reason, and no other traffic."""
    alone = [receipt(i, "speculative", prompt_tokens=20) for i in range(8)]
    several = [receipt(i, "speculative", prompt_tokens=20, features="n") for i in range(8, 10)]
    after = counters(10 * 25, 1000, 600) | {PROMPT_TOKENS: 8 * 20 + 2 * 3 * 20}
    seen = drive(between({}, {"e0": after}), completed=10)
    found = tally.beside_receipts([seen], alone + several)["speculative"]
    prompts = row(found, "prompt tokens")
    assert prompts["gap"] == 80
    assert prompts["why"].startswith("2 requests asked for several choices")
    assert "not ours" not in prompts["why"]
    without = tally.beside_receipts([seen], alone + alone[:2])["speculative"]
    assert "not ours" in row(without, "prompt tokens")["why"]


def test_a_drive_that_was_cut_off_is_said():
    """Receipts of a killed process have no reading after them: named, not a mystery."""
    receipts = [receipt(i, "speculative") for i in range(15)]
    drives = [drive(between({}, {"e0": counters(250, 1000, 600)}), completed=10)]
    assert "5 requests are of a drive that was cut off" in tally.cut_off_note(drives, receipts)
    why = row(tally.beside_receipts(drives, receipts)["speculative"], "drafted tokens")["why"]
    assert "5 requests are of a drive that was cut off" in why
    assert tally.cut_off_note([drive("-", completed=15)], receipts) == ""


def test_histograms_that_cannot_tell_a_change_say_so():
    """T25: 505 and 498 of 512 under 10 ms: both p95 are under the first bucket's border."""

    def at(below):
        name = telemetry.TPOT_BUCKETS
        text = f'{name}{{le="0.01"}} {below}\n{name}{{le="0.025"}} 512\n{name}{{le="+Inf"}} 512\n'
        return counted(difference(telemetry.Snapshot(0, {}), parse_metrics(text, 1)))

    receipts = [receipt(0, "speculative")]
    found = tally.beside_receipts([drive(at(498), completed=1, target=at(505))], receipts)
    assert found["speculative"]["tpot_p95"] == {"low_s": 0.0, "high_s": 0.01}
    note = tally.histogram_note(found)
    assert "TPOT p95 is under 10 ms on both arms" in note
    assert "receipts decide" in note
    assert "--custom-histogram-buckets" in note
    apart = tally.beside_receipts([drive(at(400), completed=1, target=at(505))], receipts)
    assert apart["speculative"]["tpot_p95"] == {"low_s": 0.01, "high_s": 0.025}
    assert tally.histogram_note(apart) == ""
    none = tally.beside_receipts([drive("no /metrics", completed=1)], receipts)
    assert tally.histogram_note(none) == ""


# --- acceptance from counters -------------------------------------------------------------------

UNKNOWN = Measurement("acceptance_rate", "shadow", "chat", "", None, "no counts")


def judged_by(drives, receipts):
    (found,) = tally.with_counters([UNKNOWN], drives, receipts, stage="shadow", route="chat")
    return found


def test_a_dead_drafter_is_seen_by_the_counters_alone():
    """T06: 0 of 6630 drafted is an acceptance of 0, whatever other routes were sent beside."""
    receipts = [receipt(i, "speculative", **NONE) for i in range(40)]
    seen = between({}, {"e0": counters(2210, 6630, 0)})
    found = judged_by([drive(seen, completed=40, routes=("chat", "other"))], receipts)
    assert found.estimate.value == 0
    assert found.estimate.n == 40
    assert "0 of 6630 drafted tokens accepted, from the server's counters; no counts" in found.note


def test_counters_speak_for_a_route_that_was_alone():
    """Drives that sent other routes too are left out; with none left nothing is claimed."""
    receipts = [receipt(i, "speculative", **NONE) for i in range(40)]
    alone = drive(between({}, {"e0": counters(100, 400, 240)}), completed=40)
    mixed = drive(between({}, {"e0": counters(100, 400, 40)}), completed=9, routes=("chat", "x"))
    assert judged_by([alone, mixed], receipts).estimate.value == pytest.approx(0.6)
    found = judged_by([mixed], receipts)
    assert found.estimate is None
    assert "says nothing of one: start it with --per-request-spec-decode-metrics" in found.note


def test_a_server_that_does_not_count_accepted_tokens_says_nothing_of_acceptance():
    """Drafted is counted, accepted is not: absent is not 0, and no acceptance is judged from it."""
    receipts = [receipt(i, "speculative", **NONE) for i in range(40)]
    half = {DRAFT_TOKENS: 400, GENERATION_TOKENS: 640}
    seen = between({}, {"e0": half})
    assert (seen.draft_tokens, seen.accepted_tokens) == (400, None)
    assert judged_by([drive(seen, completed=40)], receipts) == UNKNOWN


def test_counters_judge_nothing_where_receipts_can():
    """Requests with counts decide, few as they are; no /metrics changes nothing either."""
    receipts = [receipt(i, "speculative", **NONE) for i in range(40)]
    seen = between({}, {"e0": counters(100, 400, 240)})
    known = receipt(99, "speculative")
    assert judged_by([drive(seen, completed=41)], [*receipts, known]) == UNKNOWN
    assert judged_by([drive("HTTP 404", completed=40)], receipts) == UNKNOWN
    assert judged_by([], receipts) == UNKNOWN


# --- a server that hangs ------------------------------------------------------------------------


def hung(speculative_s, target_s, routes=("chat",)):
    """A drive in which requests ran so long without a token, per arm; None: not looked at."""
    pages = [
        replace(between({}, {"e0": counters(1, 4, 2)}), longest_stall_s=seconds)
        for seconds in (speculative_s, target_s)
    ]
    return drive(pages[0], completed=40, routes=routes, target=pages[1])


@pytest.mark.parametrize(
    ("drives", "verdict"),
    [
        ([hung(21.0, 0.0)], Verdict.FAIL),
        ([hung(21.0, None)], Verdict.FAIL),
        ([hung(0.0, 0.0), hung(34.0, 2.0)], Verdict.FAIL),
        ([hung(40.0, 41.0)], Verdict.ERROR),
        ([hung(20.0, 0.0)], None),
        ([hung(None, 30.0)], None),
        ([hung(99.0, 0.0, routes=("other",))], None),
        ([drive("HTTP 404", completed=40)], None),
        ([], None),
    ],
)
def test_a_server_that_hangs_is_a_failure_unless_both_do(drives, verdict):
    """Requests run and no token comes for longer than the live guard's limit; unknown is no 0."""
    found = tally.stalls(drives, 20.0, stage="shadow", route="chat")
    assert [f.verdict for f in found] == ([] if verdict is None else [verdict])
    assert tally.stalls(drives, None, stage="shadow", route="chat") == []


@pytest.mark.parametrize(("running", "action"), [(1, Action.FALL_BACK), (0, None)])
def test_shadow_looks_at_what_runs_while_it_sends(tmp_path, monkeypatch, running, action):
    """A speculative server whose page says that requests run and never counts a token fails."""
    monkeypatch.setattr(context, "_WATCH_EVERY_S", 0.01)
    fallback = {"max_stall_s": 0.01}
    with attached_pair(tmp_path, client_limits=LOOSE, fallback=fallback) as pair:
        still = {telemetry.RUNNING: running, GENERATION_TOKENS: 5}
        pair.servers[Arm.SPECULATIVE].metrics_text = page(e0=still)
        (made,) = pair.run(Stage.SHADOW).decisions
    found = [f for f in made.findings if f.rule == tally.STALL]
    assert [f.verdict for f in found] == ([Verdict.FAIL] if action else [])
    if action:
        assert made.action is action
        assert "without one token coming, over the limit of 0.01 s" in made.reason


# --- in a stage ---------------------------------------------------------------------------------


def plain_answer(_body, _n):
    """The speculative answer of a server that sends no per-request metrics."""
    return answer([[4 * i + j for j in range(4)] for i in range(10)], finish="length")


def counting(script, server_of, per_request):
    """A script that keeps the server's /metrics up to date with what was asked so far."""

    def answered(body, n):
        totals = {name: each * (n + 1) for name, each in per_request.items()}
        server_of().metrics_text = page(e0=totals)
        return script(body, n)

    return answered


@pytest.mark.parametrize(
    ("accepted", "action"), [(0, Action.FALL_BACK), (30, None)], ids=["dead drafter", "alive"]
)
def test_a_stage_judges_acceptance_from_counters(tmp_path, accepted, action):
    """Without per-request metrics the route's acceptance is the counters'; 0 falls back (T06)."""
    pairs = []
    per_request = counters(10, 40, accepted) | {GENERATION_TOKENS: 40}
    script = counting(plain_answer, lambda: pairs[0].servers[Arm.SPECULATIVE], per_request)
    shadow = {"requests_per_route": 70, "rate_per_s": 300, "blocks": 4}
    with attached_pair(tmp_path, speculative=script, shadow=shadow, client_limits=LOOSE) as pair:
        pairs.append(pair)
        pair.servers[Arm.SPECULATIVE].metrics_text = page(e0=dict.fromkeys(per_request, 0))
        ended = pair.run(Stage.SHADOW)
    (made,) = ended.decisions
    finding = next(f for f in made.findings if f.rule == "min_acceptance_rate" and not f.cohort)
    assert finding.estimate.value == pytest.approx(accepted / 40)
    assert "from the server's counters" in finding.why
    if action is not None:
        assert made.action is action
        assert "under the wrong method name" in made.reason
    told = json.loads(json.dumps(ended.to_dict()))["stages"]["shadow"]["server_counters"]
    assert told["target_only"] == {"not_measured": "/metrics holds none of vLLM's series"}
    rows = {r["quantity"]: r for r in told["speculative"]["rows"]}
    assert rows["generated tokens"]["gap"] == 0
    assert rows["drafted tokens"]["receipts"] is None
    assert "carry none: the server sent no per-request metrics" in rows["drafted tokens"]["why"]


def test_servers_without_metrics_are_not_available(tmp_path):
    """No page, or one of another kind: said per arm; neither a crash nor a pass nor zeros."""
    with attached_pair(tmp_path, client_limits=LOOSE) as pair:
        pair.servers[Arm.TARGET_ONLY].metrics_text = None
        pair.servers[Arm.SPECULATIVE].metrics_text = "<html>not here</html>"
        told = pair.run(Stage.SHADOW).to_dict()["stages"]["shadow"]["server_counters"]
    assert told["target_only"] == {"not_measured": "/metrics: HTTP 404; is /metrics turned on?"}
    assert told["speculative"] == {"not_measured": "/metrics holds none of vLLM's series"}


# --- a queue that grows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queues", "said"),
    [
        ([(0.0, 14.2, 31.0)], "speculative (from 0 to 14.2 waiting, 31 at most)"),
        ([(0.0, 0.5, 2.0), (1.0, 9.0, 12.0)], "speculative (from 1 to 9 waiting"),
        ([(3.0, 3.5, 9.0)], ""),
        ([(9.0, 0.0, 12.0)], ""),
        ([None], ""),
        ([], ""),
    ],
)
def test_a_queue_that_grew_is_noted(queues, said):
    """Of the server and the drive where it was worst; a steady or a shrinking one is not."""
    pages = [replace(between({}, {"e0": counters(1, 4, 2)}), waiting=queue) for queue in queues]
    note = tally.queue_note([drive(page, completed=40) for page in pages])
    assert said in note
    assert bool(note) == bool(said)
