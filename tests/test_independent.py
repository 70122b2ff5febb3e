"""Figures and verdicts of a finished run against a computation of our own.

Everything here comes from what a user can have: the receipts as `speccheck receipts export` writes
them, and the JSON of `decide`, `matrix` and `canary status`. Nothing of speccheck's statistics is
used; formulas are those of STATS.md, from numpy and scipy.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attached_pair import attached_pair
from field import PATIENT, Model, Product, Say, Seen, corpus, observe
from scipy import optimize
from scipy import stats as sp
from statsmodels.stats.proportion import proportion_confint
from test_cases import REPLAY, SCHEMA, route, words

from speccheck.cli import main
from speccheck.records import Arm, PlannedRequest

Row = dict[str, Any]
PROMPTS = 24
RULES = {"min_acceptance_rate": 0.55, "max_tpot_p95_regression": 0.1, "max_error_rate": 0.01}


def see(seed: int) -> Callable[[PlannedRequest], Seen]:
    """What the servers do: prompts differ in speed and acceptance, one in 40 requests fails on the
    speculative arm, one in 15 has no counts, and answers are of 24 to 90 tokens.
    """
    rng = np.random.default_rng(seed)

    def seen(request: PlannedRequest) -> Seen:
        number = int(request.prompt.prompt_id.removeprefix("p"))
        spec = request.arm == Arm.SPECULATIVE
        own = np.random.default_rng(number)
        speed, share, tokens = own.lognormal(0, 0.2), own.uniform(0.5, 0.95), own.integers(24, 90)
        if spec and rng.random() < 1 / 40:
            return Seen(error="server_error")
        drafted = int(rng.integers(40, 120))
        accepted = int(rng.binomial(drafted, share))
        return Seen(
            tpot_ms=(11.0 if spec else 20.0) * speed * rng.lognormal(0, 0.08),
            ttft_ms=30 * rng.lognormal(0, 0.1),
            tokens=int(tokens),
            drafted=drafted if spec and rng.random() > 1 / 15 else None,
            accepted=accepted,
            steps=-(-drafted // 4),
        )

    return seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A shadow and a canary of one route: what they said, and their receipts as exported."""
    folder: Path = tmp_path_factory.mktemp("independent")
    (folder / "guardrails.yaml").write_text("speculative_decoding_guardrails: {}\n")
    patch = pytest.MonkeyPatch()
    capture: dict[str, Any] = {}
    canary = {"shares": [0.5], "requests_per_step": 500, "rate_per_s": 20_000}
    settings = {
        "warm_up": 2,
        "client_limits": PATIENT,
        "guardrails": "guardrails.yaml",
        "shadow": {"requests_per_route": 240, "rate_per_s": 20_000, "blocks": 16}
        | {"max_in_flight": 10_000},
        "canary": canary | {"watch_requests": 0, "max_in_flight": 10_000},
    }
    with attached_pair(folder, routes=route(**RULES), **settings):
        observe(patch, see(1))
        corpus(folder, PROMPTS)
        product = Product(folder, _Captured(patch))
        capture["shadow"] = product.stage("shadow").json["decisions"][0]
        capture["canary"] = product.stage("canary").json["decisions"][0]
        capture["matrix"] = product.run("matrix").json["rows"]
        capture["status"] = product.run("canary", "status").json
        capture["receipts"] = exported(folder)
    patch.undo()
    return capture


def exported(folder: Path) -> list[Row]:
    path = folder / "receipts.jsonl"
    with pytest.raises(SystemExit):
        main(["receipts", "export", str(path), "--out", str(folder / "run")])
    return [json.loads(line) for line in path.read_text().splitlines()]


class _Captured:
    """What `capsys` gives, for a fixture that lives longer than a test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._said = io.StringIO()
        patch.setattr(sys, "stdout", self._said)

    def readouterr(self) -> SimpleNamespace:
        """What was printed since the last call."""
        said = self._said.getvalue()
        self._said.seek(0)
        self._said.truncate()
        return SimpleNamespace(out=said, err="")


# --- from the rows of the export -----------------------------------------------------------------


def of(run: dict[str, Any], stage: str, arm: str) -> list[Row]:
    found = [r for r in run["receipts"] if (r["stage"], r["arm"]) == (stage, arm)]
    found = [r for r in found if not r["warm_up"] and r["pair_id"].startswith(f"{r['phase']}:")]
    return sorted(found, key=lambda r: r["sent_ns"])


def pairs(run: dict[str, Any], stage: str) -> list[tuple[Row, Row]]:
    target = {r["pair_id"]: r for r in of(run, stage, "target_only")}
    both = [
        (target[s["pair_id"]], s) for s in of(run, stage, "speculative") if s["pair_id"] in target
    ]
    return [(t, s) for t, s in both if t["outcome"] == s["outcome"] == "ok"]


def e2e(r: Row) -> float:
    return float(r["last_token_ns"] - r["sent_ns"])


def tpot(r: Row) -> float:
    return (r["last_token_ns"] - r["first_token_ns"]) / (r["completion_tokens"] - 1)


def quantile(values: Sequence[float], p: float) -> float:
    return sorted(values)[math.ceil(round(p * len(values), 9)) - 1]


def clustered(a: Sequence[float], d: Sequence[float], unit: Sequence[Any]) -> tuple[float, ...]:
    """Ratio of sums with its t-interval, clusters as given."""
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for x, y, u in zip(a, d, unit, strict=True):
        sums[u] += (x, y)
    A, D = np.array(list(sums.values())).T
    n, r = len(A), A.sum() / D.sum()
    reach = sp.t.isf(0.05, n - 1) * math.sqrt(n / (n - 1) * ((A - r * D) ** 2).sum()) / D.sum()
    return r, r - reach, r + reach


def crossed(x: np.ndarray, *units: Sequence[Any]) -> float:
    """Reach of the mean of x with crossed clusters (Cameron, Gelbach, Miller), the widest."""

    def variance(unit: Sequence[Any]) -> tuple[float, int]:
        sums: dict[Any, float] = defaultdict(float)
        for u, v in zip(unit, x - x.mean(), strict=True):
            sums[u] += v
        n = len(sums)
        return n / (n - 1) * sum(v * v for v in sums.values()) / len(x) ** 2, n

    found = [variance(unit) for unit in units]
    if len(units) == 2:
        joint = variance(list(zip(*units, strict=True)))[0]
        found.append((max(found[0][0] + found[1][0] - joint, 0), min(n for _, n in found)))
    return max(sp.t.isf(0.05, n - 1) * math.sqrt(v) for v, n in found)


def finding(decision: dict[str, Any], rule: str) -> dict[str, Any]:
    (found,) = [f for f in decision["findings"] if (f["rule"], f["cohort"]) == (rule, "")]
    return found


def is_estimate(estimate: dict[str, Any], *numbers: float, rel: float = 1e-6) -> bool:
    shown = [estimate["value"], estimate["low"], estimate["high"]]
    return shown == [n if n is None else pytest.approx(n, rel=rel, abs=1e-9) for n in numbers]


# --- replay --------------------------------------------------------------------------------------


def test_structured_validity(tmp_path, capsys):
    """Forty prompts, each asked greedily and sampled: four lose their JSON always, eight when they
    are sampled. The limits are statsmodels' for forty answers, not for all that were given.

    A broken answer has 20 tokens and a good one 30, so that the receipts tell which is which.
    """

    def speculative(i: int, _n: int, body: dict[str, Any]) -> Say:
        lost = i < (12 if body["temperature"] else 4)
        return Say('{"city": ' if lost else '{"city": "Rome"}', words(i, 20 if lost else 30))

    (tmp_path / "guardrails.yaml").write_text("speculative_decoding_guardrails: {}\n")
    with attached_pair(
        tmp_path,
        target=Model(lambda i, _n, _body: Say('{"city": "Rome"}', words(i, 30))),
        speculative=Model(speculative),
        routes=route(min_structured_output_validity=0.7),
        **REPLAY,
    ):
        corpus(tmp_path, 40, check={"kind": "json_schema", "schema": SCHEMA})
        decided = Product(tmp_path, capsys).stage("replay").json["decisions"][0]
    mine = [r for r in exported(tmp_path) if r["arm"] == "speculative" and r["phase"] != "aa"]
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for r in mine:
        if r["phase"] in ("greedy", "sampled"):
            by_prompt[r["prompt_id"]].append(r["completion_tokens"] == 30)
    each = {len(valid) for valid in by_prompt.values()}
    k, n = sum(map(sum, by_prompt.values())), sum(map(len, by_prompt.values()))
    assert (len(by_prompt), len(each)) == (40, 1)
    assert n > 40
    shown = finding(decided, "min_structured_output_validity")
    low, high = proportion_confint(40 * k / n, 40, alpha=0.1, method="beta")
    assert is_estimate(shown["estimate"], k / n, low, high)
    assert shown["estimate"]["n"] == 40
    assert f"valid {k} of {n} answers to 40 prompts" in shown["why"]
    alone, _ = proportion_confint(k, n, alpha=0.1, method="beta")
    assert low < 0.7 < alone, "a pass if each answer counted for itself"
    assert shown["verdict"] == "inconclusive"


# --- shadow --------------------------------------------------------------------------------------


def test_error_rate(run):
    """Clopper-Pearson by the quantiles of the beta distribution."""
    mine = of(run, "shadow", "speculative")
    k, n = sum(r["outcome"] != "ok" for r in mine), len(mine)
    high = sp.beta.isf(0.05, k + 1, n - k)
    shown = finding(run["shadow"], "max_error_rate")
    assert k > 0
    assert is_estimate(shown["estimate"], k / n, sp.beta.ppf(0.05, k, n - k + 1), high)
    low_at_1 = sp.binomtest(k, n, 0.01, alternative="greater").pvalue
    assert (shown["verdict"] == "fail") == (low_at_1 <= 0.01 / 4)  # Holm over four tests, at most


def test_acceptance(run):
    """Pooled, prompts as clusters; replies without counts are left out and counted."""
    mine = [r for r in of(run, "shadow", "speculative") if r["proposed_tokens"]]
    A, D = ([r[name] for r in mine] for name in ("accepted_tokens", "proposed_tokens"))
    shown = finding(run["shadow"], "min_acceptance_rate")
    assert is_estimate(shown["estimate"], *clustered(A, D, [r["prompt_id"] for r in mine]))
    assert shown["estimate"]["n"] == len(mine)
    assert f"{sum(A)} of {sum(D)} drafted tokens accepted" in shown["why"]
    assert shown["verdict"] == "pass"


def test_speed_up(run):
    """Geometric mean of paired ratios, blocks and prompts as crossed clusters."""
    both = pairs(run, "shadow")
    x = np.log([e2e(s) / e2e(t) for t, s in both])
    reach = crossed(x, [t["block"] for t, _ in both], [t["prompt_id"] for t, _ in both])
    shown = finding(run["shadow"], "min_speedup")
    assert shown["estimate"]["n"] == len(x)
    limits = (math.exp(x.mean() + sign * reach) for sign in (0, -1, 1))
    assert is_estimate(shown["estimate"], *limits)
    assert shown["verdict"] == "pass"


def test_p95_of_tpot(run):
    """The ratio of the quantiles, and a pigeonhole bootstrap of blocks and prompts of our own."""
    both = [
        (t, s)
        for t, s in pairs(run, "shadow")
        if min(t["completion_tokens"], s["completion_tokens"]) >= 32
    ]
    T, S = np.array([tpot(t) for t, _ in both]), np.array([tpot(s) for _, s in both])
    shown = finding(run["shadow"], "max_tpot_p95_regression")["estimate"]
    assert (shown["n"], shown["value"]) == (
        len(both),
        pytest.approx(quantile(S, 0.95) / quantile(T, 0.95)),
    )
    rng = np.random.default_rng(5)
    units = [
        np.unique([str(t[name]) for t, _ in both], return_inverse=True)[1]
        for name in ("block", "prompt_id")
    ]
    drawn = []
    for _ in range(1500):
        weight = np.prod(
            [
                np.bincount(rng.integers(0, u.max() + 1, u.max() + 1), minlength=u.max() + 1)[u]
                for u in units
            ],
            axis=0,
        )
        if weight.sum():
            drawn.append(
                math.log(
                    quantile(np.repeat(S, weight), 0.95) / quantile(np.repeat(T, weight), 0.95)
                )
            )
    low, high = np.quantile(drawn, (0.05, 0.95))
    assert math.log(shown["low"]) == pytest.approx(low, abs=0.02)
    assert math.log(shown["high"]) == pytest.approx(high, abs=0.02)


def test_matrix_rows(run):
    """Each row of the mirrored traffic: counts, acceptance, ratio, passes saved, verdict."""
    rows = [row for row in run["matrix"] if row["cohort"]["stage"] == "shadow"]
    seen = 0
    for row in rows:
        bands = {
            k: v
            for k, v in row["cohort"].items()
            if v not in ("any", "shadow") and k != "concurrency"
        }

        def here(r: Row, bands: dict[str, str] = bands) -> bool:
            # A request that failed has no prompt tokens; all prompts of this run are of one band.
            mine = r | ({"prompt_band": "64-255"} if r["prompt_tokens"] is None else {})
            return all(str(mine[k]) == v for k, v in bands.items())

        both = [(t, s) for t, s in pairs(run, "shadow") if here(t)]
        mine = [s for s in of(run, "shadow", "speculative") if here(s)]
        assert (row["n_pairs"], row["n_speculative"]) == (len(both), len(mine))
        assert row["errors_speculative"] == sum(s["outcome"] != "ok" for s in mine)
        counted = [r for r in mine if r["proposed_tokens"]]
        A, D = ([r[name] for r in counted] for name in ("accepted_tokens", "proposed_tokens"))
        assert (row["accepted"], row["drafted"]) == (sum(A), sum(D))
        assert is_estimate(row["acceptance"], *clustered(A, D, [r["prompt_id"] for r in counted]))
        x = np.log([e2e(s) / e2e(t) for t, s in both])
        reach = crossed(x, [t["block"] for t, _ in both], [t["prompt_id"] for t, _ in both])
        limits = [math.exp(x.mean() + sign * reach) for sign in (0, -1, 1)]
        assert is_estimate(row["e2e_ratio"], *limits)
        assert row["verdict"] == ("speculate" if limits[2] < 1 and len(x) >= 20 else "inconclusive")
        steps = [(t, s) for t, s in both if t["target_passes"] and s["target_passes"]]
        if steps:
            saved = sum(s["completion_tokens"] - 1 for _, s in steps)
            plain = sum(tpot(t) * (t["completion_tokens"] - 1) for t, _ in both)
            step = plain / sum(t["completion_tokens"] - 1 for t, _ in both)
            spent = sum(tpot(s) * (s["completion_tokens"] - 1) for _, s in steps) / step
            assert row["saved_measured"] == pytest.approx(1 - spent / saved)
        seen += len(mine)
    assert rows
    assert seen == len(of(run, "shadow", "speculative"))


# --- canary --------------------------------------------------------------------------------------


def log_evidence(k: int, n: int, limit: float, side: str) -> float:
    """The beta-binomial e-process of STATS 4.6, written with scipy's beta distribution."""
    a, b = (1, 0.3 / limit) if side == "over" else (0.5, 1 / limit)
    tail = sp.beta.logsf if side == "over" else sp.beta.logcdf
    mixture = sp.betabinom.logpmf(k, n, a, b) - sp.binom.logpmf(k, n, limit)
    return float(mixture + tail(limit, a + k, b + n - k) - tail(limit, a, b))


def reading(run: dict[str, Any], rule: str) -> dict[str, Any]:
    (status,) = run["status"]["routes"]
    (found,) = [m for m in status["readings"] if (m["rule"], m["cohort"]) == (rule, "")]
    return found


def live(run: dict[str, Any], arm: str) -> list[Row]:
    return [r for r in of(run, "canary", arm) if r["decision"] != "fell_back"]


def test_canary_error_rate(run):
    """Its interval are the limits that the evidence does not rule out; failing needs 800 to 1."""
    mine = live(run, "speculative")
    k, n = sum(r["outcome"] != "ok" for r in mine), len(mine)
    shown = reading(run, "max_error_rate")
    assert shown["n"] == n
    limits = [
        optimize.brentq(lambda p, s=side: log_evidence(k, n, p, s) - math.log(20), *span)
        for side, span in (("over", (1e-6, k / n)), ("under", (k / n, 0.9)))
    ]
    assert is_estimate(shown["estimate"], k / n, *limits, rel=1e-4)


def test_canary_acceptance(run):
    """Bets on each request's accepted/drafted, in the order in which requests were sent."""
    mine, seen = [], set()
    for r in live(run, "speculative"):
        key = (r["prompt_id"], r["output_digest"], r["accepted_tokens"], r["proposed_tokens"])
        if r["proposed_tokens"] and key not in seen:
            seen.add(key)
            mine.append(r["accepted_tokens"] / r["proposed_tokens"])
    won, squares, total = 0.0, 0.25, 0.5
    for i, x in enumerate(mine, 1):
        stake = math.sqrt(2 * math.log(20) / (squares / i * i * math.log(1 + i)))
        won += math.log1p(min(stake, 0.5 / 0.55) * (x - 0.55))
        total += x
        squares += (x - total / (i + 1)) ** 2
    shown = reading(run, "min_acceptance_rate")
    assert shown["estimate"]["value"] == pytest.approx(np.mean(mine))
    assert math.log(shown["pass_evidence"]) == pytest.approx(won, rel=1e-6)
    assert (shown["verdict"] == "pass") == (won >= math.log(20))


def test_canary_p95(run):
    """Rank bands: counts below the quantile whose beta-binomial evidence stays under 40 to 1."""
    sides = [
        sorted(
            tpot(r) for r in live(run, arm) if r["outcome"] == "ok" and r["completion_tokens"] >= 32
        )
        for arm in ("target_only", "speculative")
    ]
    ends = []
    for values in sides:
        n = len(values)
        s = np.arange(n + 1)
        evidence = sp.betabinom.logpmf(s, n, 9.5, 0.5) - sp.binom.logpmf(s, n, 0.95)
        credible = s[evidence < math.log(40)]
        low, high = credible[0], credible[-1]
        ends.append((values[low - 1], values[high] if high < n else math.inf))
    shown = reading(run, "max_tpot_p95_regression")
    assert shown["n"] == min(map(len, sides))
    high = ends[1][1] / ends[0][0]
    assert is_estimate(
        shown["estimate"],
        quantile(sides[1], 0.95) / quantile(sides[0], 0.95),
        ends[1][0] / ends[0][1],
        None if math.isinf(high) else high,
    )


def test_decisions(run):
    """A failed rule falls back, an open one is inconclusive, and all passed promotes."""
    for stage in ("shadow", "canary"):
        decision = run[stage]
        counted = {f["verdict"] for f in decision["findings"] if f["counted"]}
        expected = (
            "fall_back"
            if "fail" in counted
            else "inconclusive"
            if counted - {"pass"}
            else "promote"
        )
        assert decision["action"] == expected, decision["reason"]
