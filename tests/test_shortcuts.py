"""Every wrong shortcut is wrong by exactly the amount worked out elsewhere, and is caught."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2
from shortcuts import (
    CATALOGUE,
    ForcedFromTarget,
    NoCorrection,
    StaleDraft,
    StaleTarget,
    loop,
)

from speccheck.controls import (
    NEGATIVE_CONTROLS,
    BlockWithTokenResidual,
    BonusFromDraft,
    KeepSuffix,
    ResampleFromTarget,
)
from speccheck.fixture import check, negative_controls, reference
from speccheck.law import (
    Decoding,
    State,
    Table,
    exact_law,
    marginals,
    round_law,
    sample,
    target_law,
    trace,
)
from speccheck.tables import load_table
from speccheck.verifier import Block, Token, VerificationError, uniform, verify

CORPORA = Path(__file__).parents[1] / "corpora"
T4 = load_table(CORPORA / "fixture_t4.json")
STRESS = load_table(CORPORA / "fixture_block.json")
TARGET = target_law(T4)
N = 20_000


def chi2_sf(statistic, df):
    return float(chi2.sf(statistic, df))


@pytest.fixture(scope="module")
def right():
    """The right loops, by algorithm."""
    return {v.name: reference(Decoding(T4, v), n_seeds=N) for v in (Token(), Block())}


def digits(printed):
    """Decimals after the point of a printed number."""
    return len(printed.partition(".")[2])


def agrees(value, printed):
    """Whether a number rounds to the printed one, halves either way."""
    return abs(value - float(printed)) <= 0.5 * 10 ** -digits(printed) + 1e-12


LOSSLESS = {"W12", "W34"}


@pytest.mark.parametrize("shortcut", CATALOGUE, ids=lambda s: s.id)
def test_each_shortcut_is_as_wrong_as_it_should_be_and_is_caught(shortcut, right):
    """The exact law differs by the printed amounts, and the checks that should catch it do."""
    decoding = shortcut.build(T4)
    checks = check(decoding, right[shortcut.right.name], chi2_sf=chi2_sf)
    law = checks.law
    assert sum(law.sequences.values()) == 1
    assert agrees(checks.exact.total_variation, shortcut.tv)

    size, _, cell = shortcut.worst.partition(" ")
    largest = max(abs(error) for row in checks.errors for error in row)
    assert agrees(largest, size)
    if cell:
        error = checks.errors[int(cell[0]) - 1]["ABCDX".index(cell[1])]
        assert abs(error) == pytest.approx(largest)

    if shortcut.id != "W11":  # its own test below
        if shortcut.acceptance != "-":
            assert agrees(law.accepted / law.drafted, shortcut.acceptance)
        assert agrees(5 / law.passes, shortcut.tokens_per_pass)

    caught = set(checks.failures())
    assert checks.exact.equal == (shortcut.id in LOSSLESS)
    assert ("exact law" in caught) == (shortcut.id not in LOSSLESS)
    sampled = caught & {"cells", "chi-square"}
    assert bool(sampled) == (shortcut.id not in LOSSLESS | {"W31"})
    if shortcut.id in LOSSLESS:
        assert caught
        assert all(name.startswith("counter") for name in caught)


def test_the_catalogue_is_complete():
    """W01 to W39, each once."""
    assert [s.id for s in CATALOGUE] == [f"W{i:02d}" for i in range(1, 40)]


def test_redrafting_costs_passes_that_commit_nothing():
    """W11's printed counters leave out passes that commit no token; all passes give less."""
    decoding = NoCorrection(T4, Token())
    passes = drafted = accepted = 0
    layers = [{State(0, None): Fraction(1)}, *({} for _ in range(5))]
    for layer in layers[:-1]:
        for state, mass in layer.items():
            law = round_law(decoding, state)
            commits = sum(w for (tokens, _, _), w in law.items() if tokens)
            passes += mass
            drafted += mass * decoding.length(state)
            for (tokens, tau, after), w in law.items():
                if tokens:
                    accepted += mass * w / commits * tau
                    later = layers[after.n]
                    later[after] = later.get(after, 0) + mass * w / commits
    assert agrees(accepted / drafted, ".716")
    assert agrees(5 / passes, "2.655")
    law = exact_law(decoding)
    assert float(law.accepted / law.drafted) == pytest.approx(0.5806, abs=5e-5)
    assert float(5 / law.passes) == pytest.approx(1.9710, abs=5e-5)
    runs = sample(decoding, np.arange(N))
    assert runs.passes.mean() == pytest.approx(float(law.passes), abs=0.05)


def test_stale_draft_state_shows_only_in_the_second_counter(right):
    """W34 accepts 0.5125 of first drafts from position 4 on where 0.55 is right."""
    checks = check(StaleDraft(T4, Token()), right["token"], chi2_sf=chi2_sf)
    assert checks.law.starts[4] == (Fraction(2, 5), Fraction(41, 80))
    assert list(checks.failures()) == [
        "counter: first draft stands, of rounds that start at position 4"
    ]


def test_a_forced_rejection_that_draws_from_the_target_is_lossless():
    """What W38 gets wrong is the law of the token, not the cut."""
    decoding = Decoding(T4, ForcedFromTarget())
    assert exact_law(decoding).sequences == TARGET


def test_the_block_stress_table_shows_the_wrong_residual():
    """W31 is wrong by 0.060 at position 2 of that table, and 20,000 runs show it."""
    law = exact_law(Decoding(STRESS, BlockWithTokenResidual()))
    assert [round(float(p), 4) for p in marginals(law.sequences, 3)[1]] == [0.3398, 0.6102, 0.05]
    right_block = reference(Decoding(STRESS, Block()), n_seeds=N)
    assert right_block.law.sequences == target_law(STRESS)
    wrong = check(Decoding(STRESS, BlockWithTokenResidual()), right_block, chi2_sf=chi2_sf)
    assert {"exact law", "cells", "chi-square"} <= set(wrong.failures())


@pytest.mark.parametrize("build", [loop(KeepSuffix, Token()), loop(StaleTarget, Token())])
def test_a_table_without_context_cannot_show_a_stale_cache(build):
    """On rows that depend on the position only, keeping the wrong prefix is lossless."""
    flat = Table(
        "flat",
        T4.vocabulary,
        T4.horizon,
        {key: row for key, row in T4.target.items() if key[1] is None},
        {key: row for key, row in T4.draft.items() if key[1] is None},
    )
    assert exact_law(build(flat)).sequences == target_law(flat)
    assert exact_law(build(T4)).sequences != TARGET


@pytest.mark.parametrize("name", ["W01", "W11", "W12", "W13", "W20", "W30"])
def test_readable_runs_break_an_invariant(name):
    """Some seed below 60 gives a run whose trace is refused, with the invariant in the message."""
    shortcut = next(s for s in CATALOGUE if s.id == name)

    def refused(seed):
        try:
            trace(shortcut.build(T4), lambda *site: uniform(seed, *site))
        except VerificationError as error:
            return "breaks an invariant" in str(error)
        return False

    assert any(refused(seed) for seed in range(60))


def test_negative_controls_of_the_packet_are_caught():
    """The six wrong verifiers that a packet shows: five by sample, all by the exact law."""
    rows = negative_controls(T4, chi2_sf=chi2_sf, n_seeds=N)
    assert len(rows) == len(NEGATIVE_CONTROLS) == 6
    assert all("exact law" in row["caught_by"] for row in rows)
    assert [row["name"] for row in rows if "cells" not in row["caught_by"]] == [
        "block with token residual"
    ]
    by_name = {row["name"]: row for row in rows}
    assert by_name["bonus from q"]["total_variation"] == pytest.approx(0.093)
    assert by_name["resample from p"]["largest_deviation"] == {
        "position": 3,
        "token": "X",
        "deviation": pytest.approx(-0.12),
    }


def test_sampled_and_exact_law_of_a_shortcut_agree():
    """Drawing a wrong verifier shows its own law, so the sampler hides no mistake of its pieces."""
    shortcut = next(s for s in CATALOGUE if s.id == "W15")
    decoding = shortcut.build(T4)
    runs = sample(decoding, np.arange(N))
    exact = marginals(exact_law(decoding).sequences, 5)
    for i, column in enumerate(runs.tokens.T):
        seen = np.bincount(column, minlength=5) / N
        assert np.abs(seen - np.array(exact[i], dtype=float)).max() < 0.015


def strata(decoding):
    """Within the first round, chi-square distance from the target at each index, given prefix."""
    law = round_law(decoding, decoding.start())
    distances = []
    for index in range(5):
        reached = {}
        for (tokens, _, _), w in law.items():
            if len(tokens) > index:
                counts = reached.setdefault(tokens[:index], [Fraction(0)] * 5)
                counts[tokens[index]] += w
        total = sum(sum(counts) for counts in reached.values())
        distance = Fraction(0)
        for prefix, counts in reached.items():
            p = T4.target_row(index + 1, prefix[-1] if prefix else None)
            share = sum(counts) / total
            seen = [n / sum(counts) for n in counts]
            distance += share * sum((a - b) ** 2 / b for a, b in zip(seen, p, strict=True))
        distances.append(distance)
    return distances


def test_the_index_inside_a_round_tells_bonus_from_correction():
    """A wrong bonus shows at index 5 only, a wrong correction at indices 1 to 4 only."""
    bonus = strata(Decoding(T4, BonusFromDraft()))
    assert bonus == [0, 0, 0, 0, Fraction(4, 25)]
    correction = strata(Decoding(T4, ResampleFromTarget()))
    assert all(distance > 0 for distance in correction[:4])
    assert correction[4] == 0


@pytest.mark.parametrize(
    ("wrong", "token"),
    [
        ("W01", "C"),
        ("W20", "C"),
        ("W23", "B"),
        ("W21", "C"),
        ("W18", "X"),
        ("W19", "A"),
    ],
)
def test_the_worked_uniforms_show_common_mistakes(wrong, token):
    """A B C D with residual uniform 0.30 (0.45 for W19), where X is right."""
    decoding = next(s for s in CATALOGUE if s.id == wrong).build(T4.as_floats())
    step = decoding.step(State(0, None), (0, 1, 2, 3))
    u = 0.45 if wrong == "W19" else 0.30  # past the mass of 0.40 the token falls off the end
    outcome = verify(decoding.verifier, step.p, step.q, step.x, [0.9, 0.4, 0.7, 0.6], u)
    assert outcome.accepted == 2
    assert T4.vocabulary[outcome.token] == token
