"""What runs on a table do: exact laws, reference counts of drawn runs, traces."""

from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verifier import distributions, fractions, rows

from speccheck.law import (
    DRAFT_SAMPLING,
    Control,
    Decoding,
    State,
    Table,
    check_trace,
    exact_law,
    marginals,
    round_law,
    sample,
    target_law,
    trace,
)
from speccheck.tables import load_table
from speccheck.verifier import (
    ALGORITHMS,
    Block,
    Stream,
    Token,
    VerificationError,
    inverse_cdf,
    uniform,
    verify,
)

T4 = load_table(Path(__file__).parents[1] / "corpora" / "fixture_t4.json")
F4 = T4.as_floats()
TARGET = target_law(T4)
A, B, C, D, X = range(5)


def test_target_marginals_of_t4():
    """Position 4 mixes its two rows; the others are rows of the table."""
    assert marginals(TARGET, 5) == [
        [Fraction(n, 100) for n in row]
        for row in (
            (60, 10, 10, 5, 15),
            (10, 45, 15, 5, 25),
            (20, 5, 20, 10, 45),
            (33, 14, 9, 16, 28),
            (25, 10, 20, 15, 30),
        )
    ]
    assert len(TARGET) == 5**5
    assert sum(TARGET.values()) == 1


# --- exact laws ---

COUNTERS = {
    ("token", "probabilistic"): (
        "203/100 5 297/100",
        "1/10 27/200 153/500 153/1000 153/500",
    ),
    ("block", "probabilistic"): (
        "76101/40000 613/125 123899/40000",
        "1/10 23/200 1047/4000 5551/40000 15379/40000",
    ),
    ("token", "greedy"): ("71/20 71/10 29/20", "2/5 33/100 27/125 27/1250 81/2500"),
    ("one_hot", "greedy"): ("71/20 71/10 29/20", "2/5 33/100 27/125 27/1250 81/2500"),
    ("one_hot", "probabilistic"): (
        "7791/2000 3227/400 2209/2000",
        "259/400 18753/80000 1502073/16000000 28180401/1600000000 10552299/1600000000",
    ),
    ("token", "sampled_one_hot"): (
        "7791/2000 3227/400 2209/2000",
        "259/400 18753/80000 1502073/16000000 28180401/1600000000 10552299/1600000000",
    ),
    ("sampler_match", "probabilistic"): (
        "7791/2000 3227/400 2209/2000",
        "259/400 18753/80000 1502073/16000000 28180401/1600000000 10552299/1600000000",
    ),
    ("one_hot", "ngram"): ("359/100 71/10 141/100", "2/5 33/100 27/125 27/1250 81/2500"),
    ("block", "greedy"): ("71/20 71/10 29/20", "2/5 33/100 27/125 27/1250 81/2500"),
    ("block", "ngram"): ("359/100 71/10 141/100", "2/5 33/100 27/125 27/1250 81/2500"),
}


@pytest.mark.parametrize(("algorithm", "drafting"), COUNTERS)
def test_lossless_with_the_printed_counters(algorithm, drafting):
    """The law of whole runs equals the target's product law as fractions, so do the counters."""
    law = exact_law(Decoding(T4, ALGORITHMS[algorithm], DRAFT_SAMPLING[drafting]))
    counters, first_tau = COUNTERS[algorithm, drafting]
    assert law.sequences == TARGET
    assert [law.passes, law.drafted, law.accepted] == [Fraction(n) for n in counters.split()]
    assert list(law.first_tau) == [Fraction(n) for n in first_tau.split()]
    assert law.passes + law.accepted == 5
    assert sum(law.passes_law.values()) == 1


def test_passes_of_the_standard_verifier():
    """The law of the number of passes, and the rounds that start at position 4."""
    law = exact_law(Decoding(T4, Token()))
    assert law.passes_law == {
        1: Fraction(153, 500),
        2: Fraction(4093, 10000),
        3: Fraction(2361, 10000),
        4: Fraction(459, 10000),
        5: Fraction(27, 10000),
    }
    variance = sum(n * n * w for n, w in law.passes_law.items()) - law.passes**2
    assert float(variance) ** 0.5 == pytest.approx(0.8655, abs=5e-5)
    assert law.starts[4] == (Fraction(2, 5), Fraction(11, 20))


def test_greedy_commits_the_argmaxes():
    """At temperature 0 the run is A B X A X, whatever was drafted."""
    for drafting in DRAFT_SAMPLING.values():
        law = exact_law(Decoding(T4, ALGORITHMS["greedy"], drafting))
        assert law.sequences == {(A, B, X, A, X): 1}


@pytest.mark.parametrize("proposal_length", [0, 1, 2, 3])
def test_shorter_proposals_are_lossless_too(proposal_length):
    """The proposal length changes the counters and not the law; 0 is target-only."""
    law = exact_law(Decoding(T4, Token(), None, proposal_length))
    assert law.sequences == TARGET
    assert law.passes + law.accepted == 5
    assert (law.accepted == 0) == (proposal_length == 0)


@pytest.mark.parametrize("algorithm", ["token", "block"])
def test_tokens_have_the_target_law_at_every_index_of_a_round(algorithm):
    """Stratified by index inside the first round, bonus included, given the prefix: no bias."""
    decoding = Decoding(T4, ALGORITHMS[algorithm])
    law = round_law(decoding, decoding.start())
    for index in range(5):
        reached = {}
        for (tokens, _, _), w in law.items():
            if len(tokens) > index:
                counts = reached.setdefault(tokens[:index], [Fraction(0)] * 5)
                counts[tokens[index]] += w
        for prefix, counts in reached.items():
            row = T4.target_row(index + 1, prefix[-1] if prefix else None)
            assert [n / sum(counts) for n in counts] == row.tolist()


@pytest.mark.parametrize(
    ("k", "token", "block"),
    [(1, "2/3", "2/3"), (2, "10/9", "11/9"), (3, "38/27", "5/3")],
)
def test_block_verification_reference_values(k, token, block):
    """Expected accepted tokens of the example in Sun et al. 2024."""
    p, q = fractions("1/3", "2/3"), fractions("2/3", "1/3")
    keys = [(position, None) for position in range(1, k + 2)]
    table = Table("Sun", ("a", "b"), k + 1, dict.fromkeys(keys, p), dict.fromkeys(keys, q))
    for verifier, expected in ((Token(), token), (Block(), block)):
        law = exact_law(Decoding(table, verifier))
        mean = sum(tau * w for tau, w in enumerate(law.first_tau))
        assert mean == Fraction(expected)
        assert law.sequences == target_law(table)


# --- drawn runs ---


def test_reference_counts_of_twenty_thousand_seeds():
    """Seeds 0..19999 give the counts of an independent pure-Python program."""
    runs = sample(Decoding(T4, Token()), np.arange(20_000))
    assert [runs.passes.sum(), runs.accepted.sum(), runs.drafted.sum()] == [40517, 59483, 100000]
    counts = [np.bincount(column, minlength=5).tolist() for column in runs.tokens.T]
    assert counts == [
        [11970, 1910, 2054, 1039, 3027],
        [1974, 8935, 3080, 1010, 5001],
        [3992, 1029, 4027, 1982, 8970],
        [6648, 2740, 1805, 3217, 5590],
        [4866, 2031, 4112, 2948, 6043],
    ]
    exact = np.array(marginals(TARGET, 5), dtype=float)
    assert np.abs(np.array(counts) / 20_000 - exact).max() == pytest.approx(0.0067, abs=5e-5)
    assert (runs.passes + runs.accepted == 5).all()


@pytest.mark.parametrize("algorithm", ["token", "one_hot", "sampler_match", "block", "greedy"])
def test_runs_drawn_together_are_the_runs_drawn_one_by_one(algorithm):
    """The vectorised path commits what `verify` commits, round by round."""
    decoding = Decoding(T4, ALGORITHMS[algorithm])
    floats = decoding.on(F4)
    runs = sample(decoding, np.arange(60))
    for seed in range(60):
        tokens, passes = [], 0
        while len(tokens) < 5:
            n, k = len(tokens), 4 - len(tokens)
            state = State(n, tokens[-1] if tokens else None)
            drafted = ()
            for i in range(k):
                u = uniform(seed, Stream.DRAFT, passes, n + i + 1)
                drafted = (*drafted, inverse_cdf(floats.drawn_row(state, drafted), u))
            p, q = rows(F4, tuple(tokens), drafted)
            accept_u = [uniform(seed, Stream.ACCEPT, passes, n + i + 1) for i in range(k)]
            dry = verify(decoding.verifier, p, q, np.array(drafted, dtype=int), accept_u, 0.5)
            stream = Stream.BONUS if dry.bonus else Stream.RESIDUAL
            final_u = uniform(seed, stream, passes, n + dry.accepted + 1)
            outcome = verify(
                decoding.verifier, p, q, np.array(drafted, dtype=int), accept_u, final_u
            )
            tokens += [*drafted[: outcome.accepted], outcome.token]
            passes += 1
        assert runs.tokens[seed].tolist() == tokens
        assert runs.passes[seed] == passes


def test_the_control_shares_no_number_with_the_speculative_runs():
    """Target-only control: one pass a token, and other tokens than the speculative runs."""
    control = sample(Control(T4, Token()), np.arange(2000))
    runs = sample(Decoding(T4, Token()), np.arange(2000))
    assert (control.passes == 5).all()
    assert (control.drafted == 0).all()
    agreement = (control.tokens == runs.tokens).mean()
    by_chance = np.mean([[float(p) ** 2 for p in row] for row in marginals(TARGET, 5)]) * 5
    assert agreement == pytest.approx(by_chance, abs=0.03)


# --- traces ---

WORKED = {
    (Stream.DRAFT, 1): 0.20,
    (Stream.DRAFT, 2): 0.40,
    (Stream.DRAFT, 3): 0.50,
    (Stream.DRAFT, 4): 0.60,
    (Stream.ACCEPT, 1): 0.90,
    (Stream.ACCEPT, 2): 0.40,
    (Stream.ACCEPT, 3): 0.70,
    (Stream.ACCEPT, 4): 0.60,
    (Stream.RESIDUAL, 3): 0.30,
}


def worked(stream, round_, position):
    """The uniforms of the worked example, then those of seed 18."""
    return uniform(18, stream, round_, position) if round_ else WORKED[stream, position]


def test_the_worked_trace():
    """A B C D proposed, A B accepted, C rejected, X drawn, D discarded untested."""
    first, second = trace(Decoding(T4, Token()), worked)[:2]
    assert [d["token"] for d in first["draft"]] == ["A", "B", "C", "D"]
    assert [(v["token"], v["outcome"]) for v in first["verify"]] == [
        ("A", "accepted"),
        ("B", "accepted"),
        ("C", "rejected"),
    ]
    assert [v["ratio"] for v in first["verify"]] == pytest.approx([1.2, 0.75, 0.4])
    assert [v["accept_prob"] for v in first["verify"]] == pytest.approx([1, 0.75, 0.4])
    correction = first["correction"]
    assert correction["residual"] == pytest.approx({"A": 0.25, "X": 0.75})
    assert correction["residual_mass"] == pytest.approx(0.4)
    assert (correction["token"], correction["u"]) == ("X", 0.3)
    assert [(d["token"], d["pos"]) for d in first["discarded"]] == [("D", 4)]
    assert first["committed"] == ["A", "B", "X"]
    assert first["counters"] == {
        "target_passes": 1,
        "drafted": 4,
        "accepted": 2,
        "rejected": 1,
        "bonus": 0,
        "discarded": 1,
    }
    assert second["base_position"] == 4
    assert second["prefix"] == ["A", "B", "X"]


def test_the_discarded_token_would_have_passed_a_stale_test():
    """After C, D has p/q above 1; in the committed context it has p = 0.05."""
    after_c, after_x = T4.target_row(4, C)[D], T4.target_row(4, X)[D]
    assert after_c / T4.draft_row(4, C)[D] > 1
    assert (after_c, after_x) == (Fraction(3, 5), Fraction(1, 20))


def test_the_worked_uniforms_by_other_algorithms():
    """Block commits A B X too and tests all four; greedy drafts A B C D and corrects C to X."""
    block = trace(Decoding(T4, Block()), worked)[0]
    assert block["committed"] == ["A", "B", "X"]
    assert [v["test"] for v in block["verify"]] == ["passed", "passed", "failed", "failed"]
    assert [v["outcome"] for v in block["verify"]] == ["accepted", "accepted", "rejected", None]
    assert block["correction"]["residual"] == pytest.approx({"A": 4 / 19, "X": 15 / 19})
    greedy = trace(Decoding(T4, ALGORITHMS["greedy"], DRAFT_SAMPLING["greedy"]), worked)[0]
    assert [d["token"] for d in greedy["draft"]] == ["A", "B", "C", "D"]
    assert greedy["committed"] == ["A", "B", "X"]


def test_first_seeds_that_draw_the_worked_round():
    """Seeds 18, 20 and 265 draft A B C D and commit A B X by real rejection."""

    def shows_it(seed):
        first = trace(Decoding(T4, Token()), lambda *site: uniform(seed, *site))[0]
        return ([d["token"] for d in first["draft"]], first["committed"]) == (
            ["A", "B", "C", "D"],
            ["A", "B", "X"],
        )

    assert [seed for seed in range(280) if shows_it(seed)] == [18, 20, 265]


@pytest.mark.parametrize("algorithm", ["token", "one_hot", "sampler_match", "block", "greedy"])
@pytest.mark.parametrize("drafting", DRAFT_SAMPLING)
def test_traces_hold_their_invariants(algorithm, drafting):
    """No seed gives a trace that is refused, and it commits what the runs commit."""
    decoding = Decoding(T4, ALGORITHMS[algorithm], DRAFT_SAMPLING[drafting])
    runs = sample(decoding, np.arange(40))
    for seed in range(40):
        rounds = trace(decoding, lambda *site, seed=seed: uniform(seed, *site))
        tokens = [token for record in rounds for token in record["committed"]]
        assert tokens == [T4.vocabulary[t] for t in runs.tokens[seed]]


def spoil(path, value):
    """A worked trace with one entry changed."""
    rounds = trace(Decoding(T4, Token()), worked)
    *keys, last = path
    place = rounds
    for key in keys:
        place = place[key]
    place[last] = value
    return rounds


@pytest.mark.parametrize(
    ("path", "value", "invariant"),
    [
        ((0, "committed"), ["A", "B"], "accepted . 1 tokens"),
        ((0, "committed"), ["A", "C", "X"], "first drafted"),
        ((0, "correction", "residual_mass"), 0.41, "residual mass"),
        ((0, "correction", "token"), "B", "comes from the residual"),
        ((0, "correction", "residual"), {"C": 1.0, "X": 0.5}, None),
        ((0, "verify", 2, "token"), "X", "not the rejected token"),
        ((0, "counters", "discarded"), 0, "accepted, rejected or discarded"),
        ((1, "base_position"), 3, "after the committed prefix"),
        ((1, "prefix"), ["A", "B", "C"], "earlier rounds committed"),
        ((0, "counters", "target_passes"), 2, "passes . accepted = tokens"),
    ],
)
def test_a_spoilt_trace_is_refused(path, value, invariant):
    """Each invariant has a trace that breaks it, and the message names it."""
    rounds = spoil(path, value)
    if invariant is None:
        check_trace(rounds)
        return
    with pytest.raises(VerificationError, match=invariant):
        check_trace(rounds)


def test_an_outcome_after_the_first_rejection_is_refused():
    """What was drafted after a rejected token has no outcome."""
    rounds = trace(Decoding(T4, Block()), worked)
    rounds[0]["verify"][3]["outcome"] = "accepted"
    with pytest.raises(VerificationError, match="no drafted token after"):
        check_trace(rounds)


# --- any table ---


@st.composite
def tables(draw):
    """Small tables, each row after each token its own."""
    size, horizon = draw(st.sampled_from([(2, 4), (3, 3)]))
    keys = [(1, None)] + [(i, t) for i in range(2, horizon + 1) for t in range(size)]
    target = {key: draw(distributions(size)) for key in keys}
    draft = {key: draw(distributions(size)) for key in keys}
    return Table("random", tuple("abc"[:size]), horizon, target, draft)


@settings(max_examples=40, deadline=None)
@given(tables())
def test_every_algorithm_is_lossless_on_every_table(table):
    """Zeros, certainties and token id 0 included, for every way of drafting."""
    truth = target_law(table)
    for name, drafting in product(
        ("token", "one_hot", "sampler_match", "block", "target_only"), DRAFT_SAMPLING.values()
    ):
        law = exact_law(Decoding(table, ALGORITHMS[name], drafting))
        assert law.sequences == truth


@settings(max_examples=25, deadline=None)
@given(tables())
def test_block_expects_at_least_the_acceptance_of_token(table):
    """Sun et al. 2024, Theorem 2, in the first round."""
    first = [exact_law(Decoding(table, v)).first_tau for v in (Token(), Block())]
    token, block = (sum(tau * w for tau, w in enumerate(law)) for law in first)
    assert block >= token
