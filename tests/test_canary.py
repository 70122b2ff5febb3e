"""The canary stage on traffic that is made up: ramp, fallback, reset, watch, resuming, status.

The plan, the guard, the store, judging and the commands are the real ones; only the servers are
not there: `World` answers what was planned, in order, and says when.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rule_receipts import receipt

from speccheck import canary, stages
from speccheck.cli import cli
from speccheck.config import CanaryConfig, package_dir
from speccheck.context import RunContext, open_run
from speccheck.errors import ExitCode, UsageError
from speccheck.records import (
    Action,
    Arm,
    ArmDescription,
    Decision,
    PlannedRequest,
    Receipt,
    Stage,
    receipt_key,
)

ROLLOUT = """\
name: test
speculation: {method: draft_model, model: packaged, num_speculative_tokens: 4}
corpus: {paths: [corpus.jsonl]}
guardrails: guardrails.yaml
canary:
  shares: [10%, 50%]
  requests_per_step: 120
  min_speculative: 10
  watch_requests: 40
  rate_per_s: 1000
routes:
  - {name: chat, tasks: [support]}
"""

RULES = """\
speculative_decoding_guardrails:
  min_acceptance_rate: 0.55
  max_error_rate: "20%"
"""
"""An error limit that the few requests of a test can pass."""


class Quiet:
    """A reporter that remembers its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def stage(self, stage: Stage, text: str) -> None:
        self.lines.append(f"{stage}: {text}")

    @contextmanager
    def phase(self, label: str, total: int) -> Iterator[None]:
        self.lines.append(f"{label}: {total}")
        yield

    def receipt(self, receipt: Receipt) -> None:
        pass


ARMS = {
    arm: ArmDescription(
        arm,
        f"http://{arm}",
        "scripted 1",
        "target",
        {"method": "draft_model", "num_speculative_tokens": 4} if arm is Arm.SPECULATIVE else None,
    )
    for arm in Arm
}


class StoppedError(Exception):
    """The process ends here."""


def healthy(request: PlannedRequest, n: int) -> dict[str, Any]:
    """Nothing is wrong."""
    del request, n
    return {}


class World:
    """Servers that answer as `truth` says; what was sent is written down."""

    def __init__(
        self, truth: Callable[[PlannedRequest, int], dict[str, Any]] | None = None
    ) -> None:
        self.truth = truth or healthy
        self.sent: list[PlannedRequest] = []
        self.stop_after: int | None = None

    def drive(
        self,
        run: RunContext,
        label: str,
        plan: Sequence[PlannedRequest],
        *,
        on_receipt: Callable[[Receipt], None],
        should_send: Callable[[PlannedRequest], PlannedRequest],
        is_enough: Callable[[], bool],
        **_: Any,
    ) -> None:
        """As `RunContext.drive`: what this run has not sent yet, each receipt stored."""
        for arm in ARMS.values():
            run.store.put_arm(run.run_id, arm)
        done = run.store.done_keys(run.run_id, Stage.CANARY)
        run.report.line(label)
        left = canary.plan.remaining([r for r in plan if not r.warm_up], run.run_id, done)
        waiting: list[tuple[Receipt, None]] = []
        try:
            for planned in left:
                if self.stop_after is not None and len(self.sent) >= self.stop_after:
                    raise StoppedError
                if is_enough():
                    break
                request = should_send(planned)
                self.sent.append(request)
                waiting.append((self.answer(request, run.run_id), None))
                on_receipt(waiting[-1][0])
        finally:
            run.store.append_receipts(waiting)

    def answer(self, request: PlannedRequest, run_id: str) -> Receipt:
        n = len(self.sent)
        rng = np.random.default_rng(n)
        fast = request.arm is Arm.SPECULATIVE
        fields: dict[str, Any] = {"tpot_ms": float((10 if fast else 20) * rng.lognormal(0, 0.1))}
        if fast:
            fields |= {"proposed_tokens": 100, "accepted_tokens": 70 + n % 20}
        fields |= self.truth(request, n) if fast else {}
        made = receipt(n, str(request.arm), stage="canary", phase=request.phase, **fields)
        start = 1_000_000_000 + n * 1_000_000
        return replace(
            made,
            receipt_id=receipt_key(request, run_id),
            run_id=run_id,
            engine_config_id=ARMS[request.arm].engine_config_id,
            route=request.route,
            prompt_id=request.prompt.prompt_id,
            pair_id=request.pair_id,
            repeat=request.repeat,
            decision=request.decision,
            decision_reason=request.decision_reason,
            output_digest=f"output:{n}",
            discarded_tokens=None
            if made.proposed_tokens is None
            else made.proposed_tokens - (made.accepted_tokens or 0),
            accepted_tokens=None if made.proposed_tokens is None else made.accepted_tokens,
            **{
                name: None if at is None else at + start
                for name in (
                    "scheduled_ns",
                    "sent_ns",
                    "first_token_ns",
                    "last_token_ns",
                    "done_ns",
                )
                for at in (getattr(made, name),)
            },
        )

    def arms(self, phase: str) -> list[str]:
        """Arms of what was sent in a phase, in order."""
        return [str(r.arm) for r in self.sent if r.phase == phase]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rollout.yaml").write_text(ROLLOUT, encoding="utf-8")
    (tmp_path / "guardrails.yaml").write_text(RULES, encoding="utf-8")
    lines = (package_dir("corpora") / "support.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    return tmp_path


def stage(
    folder: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fresh: bool = False,
) -> tuple[str, list[Decision], list[str]]:
    """Run the canary stage; run id, the route's decisions in order, and what was reported."""

    def drive(run: RunContext, *a: Any, **k: Any) -> None:
        world.drive(run, *a, **k)

    monkeypatch.setattr(RunContext, "drive", drive)
    report = Quiet()
    with open_run(folder / "rollout.yaml", folder / "out", report, fresh=fresh) as run:
        stages.run_stage(run, Stage.CANARY, stop_early=False)
        made = [kept.decision for kept in run.store.decisions(run.run_id, "chat")]
        assert run.store.verify() == []
        return run.run_id, made, report.lines


def dead(request: PlannedRequest, n: int) -> dict[str, Any]:
    """Nothing is accepted."""
    del request, n
    return {"accepted_tokens": 0}


# --- the ramp -----------------------------------------------------------------------------------


def test_the_default_ramp_goes_from_1_to_50_percent() -> None:
    """1, 5, 25, 50 %, each until its minimum was seen, then a watch."""
    steps = canary.ramp(CanaryConfig(), "chat", 0)
    assert [step.share for step in steps] == [0.01, 0.05, 0.25, 0.5, 0.9]
    assert [step.requests for step in steps] == [1000, 400, 400, 400, 200]
    assert [step.is_watch for step in steps] == [False] * 4 + [True]
    again = canary.ramp(CanaryConfig(), "chat", 2)
    assert again[0].phase == "chat-again-2-step-1"
    assert not any(step.is_watch for step in canary.ramp(CanaryConfig(watch_requests=0), "chat", 0))


def test_a_healthy_route_climbs_and_is_promoted_and_watched(folder, monkeypatch) -> None:
    """Each step is seen, the promotion stands in the chain before the watch begins."""
    world = World()
    _, made, lines = stage(folder, world, monkeypatch)
    phases = list(dict.fromkeys(r.phase for r in world.sent))
    assert phases == ["chat-step-1", "chat-step-2", "chat-watch"]
    assert [d.action for d in made] == [Action.PROMOTE, Action.PROMOTE]
    assert made[-1].k == 4
    promoted = next(i for i, line in enumerate(lines) if "promoted" in line)
    watch = next(i for i, line in enumerate(lines) if line.startswith("chat at 90%"))
    assert promoted < watch
    shares = [world.arms(p).count("speculative") / len(world.arms(p)) for p in phases]
    assert shares[0] < 0.25 < shares[1] < 0.7 < shares[2]


def test_keys_stay_on_their_arm_as_the_share_grows(folder, monkeypatch) -> None:
    """Who was in at 10 % is in at 50 % and at 90 %."""
    world = World()
    stage(folder, world, monkeypatch)
    inside: dict[str, set[tuple[str, int]]] = {}
    for r in world.sent:
        if r.arm is Arm.SPECULATIVE:
            inside.setdefault(r.phase, set()).add((r.prompt.prompt_id, r.repeat))
    sent_later = {(r.prompt.prompt_id, r.repeat) for r in world.sent if r.phase == "chat-step-2"}
    assert inside["chat-step-1"] & sent_later <= inside["chat-step-2"]


def test_a_step_goes_on_until_its_minimum_was_seen(folder, monkeypatch) -> None:
    """With 40 speculative requests asked for at 10 %, the first step sends about 400."""
    path = folder / "rollout.yaml"
    text = path.read_text(encoding="utf-8").replace("min_speculative: 10", "min_speculative: 40")
    path.write_text(text, encoding="utf-8")
    world = World()
    stage(folder, world, monkeypatch)
    assert world.arms("chat-step-1").count("speculative") >= 40
    assert 300 <= len(world.arms("chat-step-1")) <= 800


def test_a_share_whose_minimum_is_never_seen_does_not_grow(folder, monkeypatch) -> None:
    """All of the speculative requests kept off by policy: no second step, and it is said."""
    world = World()
    plain = world.drive

    def kept_off(run: RunContext, label: str, plan: Any, **more: Any) -> None:
        reason = "eligibility policy: rule 'all': why"
        plan = [replace(r, arm=Arm.TARGET_ONLY, decision_reason=reason) for r in plan]
        plain(run, label, plan, **more)

    world.drive = kept_off
    _, made, lines = stage(folder, world, monkeypatch)
    assert {r.phase for r in world.sent} == {"chat-step-1"}
    assert made[-1].action is not Action.PROMOTE
    assert any("saw 0 of the 10 speculative requests" in line for line in lines)
    assert canary.RAMP in {f.rule for f in made[-1].findings}


# --- falling back -------------------------------------------------------------------------------


def test_a_broken_rule_falls_back_at_the_request_that_shows_it(folder, monkeypatch) -> None:
    """The next request already goes to target-only, later steps are not begun, it is written."""
    world = World(dead)
    run_id, made, _ = stage(folder, world, monkeypatch)
    assert [d.action for d in made] == [Action.FALL_BACK]
    assert "acceptance 0 " in made[0].reason
    assert made[0].findings[0].rule == "min_acceptance_rate"
    assert {r.phase for r in world.sent} == {"chat-step-1", "chat-step-2"}
    arms = [r.arm for r in world.sent]
    last = len(arms) - 1 - arms[::-1].index(Arm.SPECULATIVE)
    assert arms.count(Arm.SPECULATIVE) <= 20
    moved = [r for r in world.sent[last + 1 :] if r.decision == "fell_back"]
    assert len(moved) <= 30, "the rest of the step need not be sent"
    assert moved
    assert all(r.decision_reason == "route fell back: min_acceptance_rate" for r in moved)
    del run_id


def test_a_fallback_sticks_through_repeated_and_new_runs(folder, monkeypatch) -> None:
    """The same command, the same run measured anew and a changed rollout: nothing is sent."""
    stage(folder, World(dead), monkeypatch)
    for change in ("", "fresh", "changed"):
        if change == "changed":
            path = folder / "rollout.yaml"
            path.write_text(f"seed: 5\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
        healthy = World()
        _, made, _ = stage(folder, healthy, monkeypatch, fresh=change == "fresh")
        assert healthy.sent == [], change
        assert made[-1].action is Action.FALL_BACK
        assert "acceptance 0 " in made[-1].reason
        assert ("stays off until" in made[-1].reason) == bool(change)
        assert made[-1].reason.count("stays off until") <= 1


def test_a_reset_lets_it_begin_again_with_no_evidence(folder, monkeypatch) -> None:
    """From the first share on, under phases of their own; what was seen before counts no more."""
    run_id, _, _ = stage(folder, World(dead), monkeypatch)
    done = CliRunner().invoke(
        cli, ["canary", "reset", "chat", "--reason", "new draft", "--out", str(folder / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "reset by an operator: new draft" in done.output
    world = World()
    again, made, _ = stage(folder, world, monkeypatch)
    assert again == run_id
    assert [d.action for d in made] == [
        Action.FALL_BACK,
        Action.INCONCLUSIVE,
        Action.PROMOTE,
        Action.PROMOTE,
    ]
    assert list(dict.fromkeys(r.phase for r in world.sent)) == [
        "chat-again-1-step-1",
        "chat-again-1-step-2",
        "chat-again-1-watch",
    ]
    (told,) = survey(folder)
    assert told["state"] == "promoted"
    assert told["restarts"] == ["reset by an operator: new draft"]


def test_a_route_that_is_not_off_cannot_be_reset(folder, monkeypatch) -> None:
    """Exit code 2, and nothing is written."""
    stage(folder, World(), monkeypatch)
    for route, text in (("chat", "is not off"), ("typo", "no route 'typo'")):
        with pytest.raises(UsageError, match=text):
            cli.main(
                ["canary", "reset", route, "--reason", "x", "--out", str(folder / "out")],
                standalone_mode=False,
            )


def test_a_failure_after_the_promotion_overrides_it(folder, monkeypatch) -> None:
    """Monitors go on in the watch: an outage there falls back, and the chain shows both."""

    def truth(request: PlannedRequest, n: int) -> dict[str, Any]:
        broken = {"outcome": "error", "error_class": "unreachable", "proposed_tokens": None}
        return broken if request.phase == "chat-watch" else {}

    world = World(truth)
    _, made, _ = stage(folder, world, monkeypatch)
    assert [d.action for d in made] == [Action.PROMOTE, Action.FALL_BACK]
    assert made[-1].findings[0].rule == "max_error_rate"
    assert "one outage:" in made[-1].reason
    assert world.arms("chat-watch").count("speculative") < 30
    with open_run(folder / "rollout.yaml", folder / "out", Quiet(), fresh=False) as run:
        kept = run.store.get_stage(run.run_id, Stage.CANARY)
    kinds = [event["kind"] for event in kept.evidence["evidence"]["events"]]
    assert kinds == ["outage", "fall_back"]


def test_what_does_not_pay_is_held_and_not_turned_off(folder, monkeypatch) -> None:
    """A route that is slower but not broken runs its ramp to the end, then stays target-only."""

    def slow(request: PlannedRequest, n: int) -> dict[str, Any]:
        del request
        return {"tpot_ms": 26.0 + n % 5}

    world = World(slow)
    _, made, _ = stage(folder, world, monkeypatch)
    assert {r.phase for r in world.sent} == {"chat-step-1", "chat-step-2"}
    assert not any(r.decision == "fell_back" for r in world.sent)
    assert [d.action for d in made] == [Action.HOLD]


def test_random_ids_turn_nothing_off_but_wrong_outputs_do(folder, monkeypatch) -> None:
    """T08: acceptance breaks on a synthetic workload, which decides nothing; errors still do."""
    path = folder / "corpus.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [json.dumps(line | {"source": "random_token_ids"}) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    _, made, _ = stage(folder, World(dead), monkeypatch)
    assert [d.action for d in made] == [Action.INCONCLUSIVE]
    assert "random" in made[0].reason

    def failing(request: PlannedRequest, n: int) -> dict[str, Any]:
        del request, n
        return {"outcome": "error", "error_class": "timeout", "proposed_tokens": None}

    _, made, _ = stage(folder, World(failing), monkeypatch, fresh=True)
    assert made[-1].action is Action.FALL_BACK


def test_a_rule_in_dry_run_turns_nothing_off(folder, monkeypatch) -> None:
    """It fails, is shown, and the route goes on."""
    (folder / "guardrails.yaml").write_text(
        f"{RULES}dry_run: [min_acceptance_rate]\n", encoding="utf-8"
    )
    world = World(dead)
    _, made, _ = stage(folder, world, monkeypatch)
    assert made[-1].action is not Action.FALL_BACK
    assert {r.phase for r in world.sent} >= {"chat-step-1", "chat-step-2"}


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "stop_after"), [(None, 60), (dead, 150), (None, 250)], ids=["ramp", "dead", "watch"]
)
def test_a_killed_canary_comes_to_the_same_decision(folder, monkeypatch, truth, stop_after) -> None:
    """Stopped at any request and run again: the same readings, and the same decisions once each."""
    whole = World(truth)
    _, expected, _ = stage(folder, whole, monkeypatch)
    (before,) = survey(folder)
    other = folder / "other"
    other.mkdir()
    for name in ("rollout.yaml", "guardrails.yaml", "corpus.jsonl"):
        (other / name).write_bytes((folder / name).read_bytes())
    cut = World(truth)
    cut.stop_after = stop_after
    if stop_after < len(whole.sent):
        with pytest.raises(StoppedError):
            stage(other, cut, monkeypatch)
    cut.stop_after = None
    _, made, _ = stage(other, cut, monkeypatch)
    assert [d.action for d in made] == [d.action for d in expected]
    assert made[-1].reason == expected[-1].reason
    (after,) = survey(other)
    assert after["verdict"] == before["verdict"]
    if truth is None:
        assert after["readings"] == before["readings"]
    else:  # once off, nothing more is sent to the route, target-only or not
        assert after["readings"][0]["failed_at"] == before["readings"][0]["failed_at"]


def test_a_finished_canary_is_only_judged_again(folder, monkeypatch) -> None:
    """The same command sends nothing and writes no second decision."""
    _, made, _ = stage(folder, World(), monkeypatch)
    idle = World()
    _, again, _ = stage(folder, idle, monkeypatch)
    assert idle.sent == []
    assert again == made


# --- status -------------------------------------------------------------------------------------


def survey(folder: Path, *more: str) -> list[dict[str, Any]]:
    """The routes of `speccheck canary status --json`."""
    done = CliRunner().invoke(
        cli,
        ["canary", "status", "--json", "--out", str(folder / "out"), *more],
        standalone_mode=False,
    )
    assert done.exception is None, done.output
    told = json.loads(done.output)
    assert told["exit_code"] == done.return_value
    return list(told["routes"])


def page(folder: Path) -> tuple[int, str]:
    """Exit code and text of `speccheck canary status`."""
    done = CliRunner().invoke(
        cli, ["canary", "status", "--out", str(folder / "out")], standalone_mode=False
    )
    assert done.exception is None, done.output
    return int(done.return_value), done.output


def test_status_of_a_promoted_route(folder, monkeypatch) -> None:
    """Exit code 0; each rule with figures, evidence, method and what stands; 80 columns."""
    stage(folder, World(), monkeypatch)
    code, text = page(folder)
    assert code == ExitCode.PASS
    assert all(len(line) <= 80 for line in text.splitlines())
    flat = " ".join(text.split())
    assert "chat: promoted, watch at 0.9" in flat
    assert "speculative ones expected; evidence of a mismatch" in flat
    assert "✓ min_acceptance_rate: pass" in flat
    assert "betting e-process" in flat
    assert "of 20 to pass" in flat
    assert "which does not expire" in flat


def test_status_of_a_route_that_is_off(folder, monkeypatch) -> None:
    """Exit code 1, the rule that failed with its evidence, and that only a reset undoes it."""
    stage(folder, World(dead), monkeypatch)
    code, text = page(folder)
    flat = " ".join(text.split())
    assert code == ExitCode.JUDGED_BAD
    assert "chat: off" in flat
    assert "✗ min_acceptance_rate: fail" in flat
    assert "nothing but a reset undoes that" in flat


def test_status_before_a_canary_could_not_judge(folder, monkeypatch) -> None:
    """Nothing was sent: exit code 4, and it says so."""
    with open_run(folder / "rollout.yaml", folder / "out", Quiet(), fresh=False):
        pass
    code, text = page(folder)
    assert code == ExitCode.COULD_NOT_JUDGE
    assert "chat: not begun" in text


def test_status_says_off_before_a_new_run_has_begun_its_canary(folder, monkeypatch) -> None:
    """What keeps a route off was decided in another run: exit code 1 and its reason, as the canary
    of this run would say, and not "not begun".
    """
    stage(folder, World(dead), monkeypatch)
    with open_run(folder / "rollout.yaml", folder / "out", Quiet(), fresh=True):
        pass
    code, text = page(folder)
    assert code == ExitCode.JUDGED_BAD
    assert "chat: off" in text
    assert "stays off until `speccheck canary reset`: " in " ".join(text.split())


def test_status_in_mid_canary_says_how_many_are_missing(folder, monkeypatch) -> None:
    """Stopped after 60 requests: exit code 3, and how many more clean requests pass."""
    world = World()
    world.stop_after = 60
    with pytest.raises(StoppedError):
        stage(folder, world, monkeypatch)
    code, text = page(folder)
    assert code in (ExitCode.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE)
    flat = " ".join(text.split())
    assert "chat: running, step 1 at 0.1" in flat
    assert "more clean requests pass it" in flat


def test_lost_requests_of_one_arm_stop_the_ramp(folder, monkeypatch) -> None:
    """Assignments that do not come out as planned: the arms cannot be compared, exit code 4."""
    world = World()
    plain = world.drive

    def lossy(run: RunContext, label: str, plan: Any, **more: Any) -> None:
        plan = [r for i, r in enumerate(plan) if r.arm is Arm.TARGET_ONLY or r.warm_up or i % 3]
        plain(run, label, [r for r in plan if r.arm is Arm.SPECULATIVE], **more)

    world.drive = lossy
    _, made, _ = stage(folder, world, monkeypatch)
    assert {r.phase for r in world.sent} == {"chat-step-1"}
    assert made[-1].action is Action.INCONCLUSIVE
    assert "do not fall to the arms as planned" in made[-1].reason
    code, text = page(folder)
    assert code == ExitCode.COULD_NOT_JUDGE
    assert "do not fall to the arms as planned" in " ".join(text.split())


def test_the_packet_shows_the_monitors(folder, monkeypatch) -> None:
    """Each rule's method and evidence, steps and assignment, in the packet's own records."""
    stage(folder, World(), monkeypatch)
    with open_run(folder / "rollout.yaml", folder / "out", Quiet(), fresh=False) as run:
        kept = run.store.get_stage(run.run_id, Stage.CANARY)
    found = kept.evidence["evidence"]
    assert [step["verdict"] for step in found["steps"]] == ["pass", "pass", "pass"]
    methods = {line["rule"]: line["method"] for line in found["monitors"]}
    assert methods["max_error_rate"] == "beta-binomial e-process"
    assert methods["min_speedup"].startswith("asymptotic confidence sequence")
    assert found["assignment"][0]["speculative"] > 50
