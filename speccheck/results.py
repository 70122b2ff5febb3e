"""From the store to what a person or a pipeline is told: decisions, exit code, packet.

Everything here is derived from what stages wrote, so it can be asked again at any time, also from
another process after the run. Text, JSON, JUnit, the packet and the exit code come from the same
list of decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from speccheck import decision, eligibility, launch, matrix, packet, proposal, revisit, slices
from speccheck.config import PACKAGED, Guardrails, load_rollout
from speccheck.context import (
    STORE_NAME,
    latest_arms,
    measured_arms,
    policy_path,
)
from speccheck.errors import ExitCode, StoreError, StoreHeldError, UsageError
from speccheck.grading.blind import PreferenceSummary, summarise
from speccheck.quality import CaseStatus
from speccheck.records import (
    CALIBRATION,
    FOLLOWED,
    PROBE,
    Action,
    Answer,
    Decision,
    Receipt,
    Stage,
    to_json,
)
from speccheck.replay.grades import in_figures
from speccheck.store import RecordedDecision, Run, StageResult, Store
from speccheck.sweep import calibration, rounds


@dataclass(frozen=True)
class Outcome:
    """What is told at the end of a command."""

    run_id: str
    stages: Mapping[str, StageResult]
    """Stages that the command is about, by name."""
    decisions: tuple[Decision, ...]
    """One per route."""
    checks: tuple[decision.Check, ...] = ()
    """What is judged beside routes: the fixture, and the packet where one was written."""
    preferences: tuple[PreferenceSummary, ...] = ()
    """What judges and reviewers preferred: shown, never judged."""

    @property
    def exit_code(self) -> ExitCode:
        """The code that every form of the outcome tells."""
        return decision.exit_code(self.decisions, self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "run_id": self.run_id,
            "exit_code": int(self.exit_code),
            "exit_meaning": self.exit_code.meaning,
            "stages": {
                name: {
                    "verdict": result.verdict.word,
                    "reasons": result.evidence["reasons"],
                    "counts": result.evidence["counts"],
                    "client_health": result.evidence["client_health"],
                    **_features(result),
                    "server_counters": result.evidence["server_counters"],
                    "notes": result.evidence["notes"],
                }
                for name, result in self.stages.items()
            },
            "decisions": [to_json(made) for made in self.decisions],
            "preferences": [to_json(one) for one in self.preferences],
        }


def _features(result: StageResult) -> dict[str, Any]:
    """Rows of the compatibility slices, where a stage tried some."""
    rows = result.evidence["evidence"].get("features")
    return {"features": rows} if rows else {}


@dataclass(frozen=True)
class WrittenPacket:
    """The packet's files, by name, and whether it is whole."""

    files: Mapping[str, Path]
    missing: tuple[str, ...]
    """Views that are not there."""

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "files": {name: str(path) for name, path in self.files.items()},
            "complete": not self.missing,
            "missing": list(self.missing),
        }


_PATIENCE_S = 3.0
"""How long a store that another process holds is asked for."""


# --- finding a run ------------------------------------------------------------------------------


@contextmanager
def open_store(out: Path, *, mode: Literal["read", "write"] = "read") -> Iterator[Store]:
    """The store of a run's folder, which must be there. A gateway's, which writes in bursts, is
    waited for.

    Raises:
        StoreError: there is none, or another process holds it.
    """
    path = out / STORE_NAME
    if not path.exists():
        raise StoreError(f"{path}: no receipts there; run a stage first, or give the --out of one")
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            opened = Store.open(path, mode)
            break
        except StoreHeldError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    with opened as store:
        yield store


def pick_run(store: Store, run_id: str | None) -> str:
    """The run asked for (a unique beginning is enough), or that which was taken up last.

    A watch's own run has no receipts to show: it is found only by its id, see `pick_guarded`.

    Raises:
        UsageError: there is no such run.
    """
    runs = store.runs()
    shown = runs if run_id is not None else [run for run in runs if FOLLOWED not in run.config]
    return _pick(store, [run.run_id for run in shown], run_id)


def pick_guarded(store: Store, run_id: str | None) -> str:
    """As `pick_run`, of all runs whose guards may have decided on live routes: a watch's as well.

    Raises:
        UsageError: there is no such run.
    """
    return _pick(store, [run.run_id for run in store.runs()], run_id)


def _pick(store: Store, known: Sequence[str], run_id: str | None) -> str:
    found = [known_id for known_id in known if run_id is None or known_id.startswith(run_id)]
    if not found or (run_id is not None and len(found) > 1):
        several = f"{len(found)} runs begin with {run_id!r}"
        what = several if found else f"no run {run_id}" if run_id else "no run yet"
        raise UsageError(f"{store.path}: {what}; there are: {', '.join(known) or 'none'}")
    return found[-1]


def find_receipt(store: Store, run_id: str, receipt_id: str) -> tuple[Receipt, Answer | None]:
    """One receipt by a unique beginning of its id, with its answer where texts were kept.

    Raises:
        UsageError: none or several begin so.
    """
    found = [r for r in store.receipts(run_id) if r.receipt_id.startswith(receipt_id)]
    if len(found) != 1:
        some = ", ".join(r.receipt_id for r in found[:3]) or "`speccheck receipts list` shows them"
        raise UsageError(f"{len(found)} receipts begin with {receipt_id!r}: {some}")
    return found[0], store.answers([found[0].receipt_id]).get(found[0].receipt_id)


# --- decisions ----------------------------------------------------------------------------------


def outcome(
    store: Store,
    run_id: str,
    stages: Sequence[Stage] = tuple(Stage),
    written: WrittenPacket | None = None,
) -> Outcome:
    """What the given stages came to: of all four for a whole run, of one for `speccheck stage`.

    `written` is the packet, where the command wrote one: an incomplete one is a failure.
    """
    results = {
        str(stage): result
        for stage in stages
        if (result := store.get_stage(run_id, stage)) is not None
    }
    made = _standing(store, run_id, stages)
    if tuple(stages) == tuple(Stage):
        made = [*made, *_unfinished(store, run_id, made)]
    checks = decision.run_checks(
        {name: result.evidence for name, result in results.items()},
        () if written is None else written.missing,
    )
    given = store.preferences(run_id) if Stage.REPLAY in stages else ()
    return Outcome(
        run_id, results, tuple(decision.final(made)), tuple(checks), tuple(summarise(given))
    )


def _standing(store: Store, run_id: str, stages: Sequence[Stage]) -> list[Decision]:
    """The last decision of each stage on each route."""
    last: dict[tuple[str, str], RecordedDecision] = {}
    for kept in store.decisions(run_id):
        if kept.decision.stage in stages:
            last[kept.decision.route, kept.decision.stage] = kept
    return [kept.decision for kept in last.values()]


def _unfinished(store: Store, run_id: str, made: Sequence[Decision]) -> list[Decision]:
    """For routes that nothing speaks against while a stage has not run: not decided yet.

    A canary alone promotes nothing: what the stages before it would have said is not known.
    """
    proof = store.get_stage(run_id, Stage.FIXTURE)
    found = []
    for entry in store.run(run_id).config["rollout"]["routes"]:
        route = entry["name"]
        mine = [d for d in made if d.route == route]
        ran = {d.stage for d in mine} | ({Stage.FIXTURE} if proof is not None else set())
        missing = [stage for stage in Stage if stage not in ran]
        if not missing or any(d.action is not Action.PROMOTE for d in mine):
            continue
        passed = [stage for stage in Stage if stage in ran]
        reason = f"not judged yet: {', '.join(missing)} did not run"
        last = passed[-1] if passed else Stage.FIXTURE
        found.append(Decision(route, Action.INCONCLUSIVE, last, reason, ()))
    return found


# --- the matrix, and the policy that follows from it ----------------------------------------------


@dataclass(frozen=True)
class ProposedPolicy:
    """Files as a proposal would have them; nothing is written before `accept`."""

    run_id: str
    files: tuple[tuple[Path, str | None, str], ...]
    """(path, text as it is or None, text as proposed), those that change."""
    policy: eligibility.Eligibility
    """The policy as proposed."""
    note: str = ""
    """What is left for a person to do."""

    @property
    def diff(self) -> str:
        """What accepting it would change, as a unified diff; empty where it says all already."""
        return "".join(proposal.diff(old, new, str(path)) for path, old, new in self.files)

    def accept(self) -> list[Path]:
        """Write the files.

        Raises:
            StoreError: one cannot be written.
        """
        for path, _, new in self.files:
            try:
                path.write_text(new, encoding="utf-8")
            except OSError as error:
                raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
        return [path for path, _, _ in self.files]


def _refused_in_slices(store: Store, run_id: str, table: matrix.Matrix) -> Iterator[matrix.Refusal]:
    """What a replay's slices saw refused, for each route that has not met it in its own traffic."""
    replayed = store.get_stage(run_id, Stage.REPLAY)
    if replayed is None:
        return
    known = {(r.route, option) for r in table.refusals for option in r.options}
    for route in sorted({row.cohort["route"] for row in table.rows}):
        for name, (n, message) in slices.refused(replayed.evidence["evidence"]).items():
            if (route, name) not in known:
                yield matrix.Refusal(route, (name,), n, n, message)


def propose_policy(store: Store, run_id: str, path: Path) -> ProposedPolicy:
    """An eligibility policy for the rollout file `path`, from what a run of it measured.

    Raises:
        UsageError: the run is one of another rollout, or the policy file cannot take a proposal.
    """
    rollout = load_rollout(path)
    run = store.run(run_id)
    measured = run.config["rollout"]
    if [route["name"] for route in measured["routes"]] != [r.name for r in rollout.routes]:
        raise UsageError(
            f"{path}: its routes are not those of run {run_id} (rollout {measured['name']!r});"
            " give the --rollout that was run"
        )
    obeyed = run.config.get("eligibility")
    table = workload(store, run_id)
    made = proposal.propose(
        replace(table, refusals=(*table.refusals, *_refused_in_slices(store, run_id, table))),
        [f for stage in Stage for f in store.findings(run_id, stage)],
        run_id=run_id,
        routes=[route.name for route in rollout.routes],
        usable_k=lambda k: eligibility.usable_k(rollout, k),
        pays_below={name: limits.e2e_ratio for name, limits in _route_limits(run).items()},
        old=None if obeyed is None else eligibility.Eligibility.model_validate(obeyed),
    )
    # Never into the file that comes with speccheck.
    is_packaged = rollout.eligibility in (None, PACKAGED)
    target = path.parent / "eligibility.yaml" if is_packaged else policy_path(path, rollout)
    old = _text(target)
    try:
        new = proposal.merged_text(old, made)
        policy = proposal.as_policy(new)
    except ValueError as error:
        raise UsageError(f"{target}: a proposal cannot be put into it ({error})") from None
    files: list[tuple[Path, str | None, str]] = [(target, old, new)]
    note = ""
    if is_packaged:
        text = path.read_text(encoding="utf-8-sig")
        named = proposal.naming(text, target.name)
        note = "" if named else f"add `eligibility: {target.name}` to {path}"
        files.append((path, text, named or text))
    changed = tuple(file for file in files if file[1] != file[2])
    return ProposedPolicy(run_id, changed, policy, note)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None


# --- packet -------------------------------------------------------------------------------------


def write_packet(store: Store, run_id: str, out: Path) -> WrittenPacket:
    """Render the packet of a run into `out`.

    Raises:
        StoreError: a file cannot be written.
    """
    view = packet.build_view(evidence(store, run_id))
    files = packet.render(view, out)
    return WrittenPacket(files, tuple(part.name for part in view.missing))


def workload(store: Store, run_id: str) -> matrix.Matrix:
    """The workload decision matrix of all that a run measured, in its sweep too."""
    import numpy as np

    run = store.run(run_id)
    receipts = rounds.that_count(store, run_id, store.receipts(run_id, warm_up=False))
    void = {}
    for stage in Stage:
        kept = store.get_stage(run_id, stage)
        health = {} if kept is None else kept.evidence["client_health"]
        if health.get("is_late"):
            void[stage.value] = f"our client was late ({health['reasons'][0]})"
    rules = Guardrails.model_validate(run.config["guardrails"])
    return matrix.workload_matrix(
        [r for r in receipts if r.stage not in (CALIBRATION, PROBE) and in_figures(r)],
        rng=np.random.default_rng([run.seed, len(receipts)]),
        limits=_matrix_limits(rules.limits("")),
        route_limits=_route_limits(run),
        costs=calibration.costs(receipts),
        quality=_case_status(store, run_id),
        void=void,
        unrepresentative={
            made.route: finding.why
            for made in _standing(store, run_id, tuple(Stage))
            for finding in made.findings
            if finding.rule == decision.WORKLOAD_IS_REPRESENTATIVE
        },
    )


def evidence(store: Store, run_id: str) -> packet.RunEvidence:
    """Everything a packet is made of, from the store."""
    run = store.run(run_id)
    receipts = [r for r in store.receipts(run_id) if not r.warm_up and r.stage in tuple(Stage)]
    made = _standing(store, run_id, tuple(Stage))
    arms = latest_arms(store, run_id)
    pair = measured_arms(store, run_id)
    table = workload(store, run_id)
    results = {
        str(stage): result.evidence
        for stage in Stage
        if (result := store.get_stage(run_id, stage)) is not None
    }
    differing = {} if pair is None else launch.differences(pair)
    return packet.RunEvidence(
        run={
            "run_id": run_id,
            "created": datetime.fromtimestamp(run.created_at_ns / 1e9, UTC).isoformat(
                timespec="seconds"
            ),
            "config": run.config["rollout"],
            "digests": revisit.rests_on(run, arms, receipts),
            "traffic": [asdict(share) for share in revisit.mix(revisit.measured_traffic(receipts))],
            "expires": revisit.validity(run),
            "seed": run.seed,
            "versions": {name: run.config["machine"][name] for name in ("speccheck", "python")},
            "machine": {
                name: run.config["machine"][name] for name in ("processor", "cores", "system")
            },
            "differences": differing,
            "waived": launch.accepted(differing, run.config["rollout"]["waive"]),
        },
        arms=[{**asdict(arm), "engine_config_id": arm.engine_config_id} for arm in arms.values()],
        stages=results,
        receipts=receipts,
        matrix=table.rows,
        matrix_warnings=table.warnings,
        matrix_advice=table.advice,
        findings=[f for stage in Stage for f in store.findings(run_id, stage)],
        decisions=[*made, *_unfinished(store, run_id, made)],
        preferences=summarise(store.preferences(run_id)),
    )


def _case_status(store: Store, run_id: str) -> dict[str, dict[str, CaseStatus]]:
    """What replay found of each prompt, greedy and sampled."""
    replayed = store.get_stage(run_id, Stage.REPLAY)
    if replayed is None:
        return {}
    found: dict[str, dict[str, CaseStatus]] = replayed.evidence["evidence"].get("case_status", {})
    return found


def _route_limits(run: Run) -> dict[str, matrix.MatrixLimits]:
    rules = Guardrails.model_validate(run.config["guardrails"])
    return {
        route["name"]: _matrix_limits(rules.limits(route["name"]))
        for route in run.config["rollout"]["routes"]
    }


def _matrix_limits(limits: Mapping[str, float]) -> matrix.MatrixLimits:
    slower = limits.get("max_tpot_p95_regression")
    return matrix.MatrixLimits(
        min_speedup=limits["min_speedup"],
        max_tpot_p95_ratio=math.inf if slower is None else 1 + slower,
    )
