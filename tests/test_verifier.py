"""The verification algorithms against worked examples, and what they refuse."""

import doctest
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import speccheck.verifier
from speccheck.law import Decoding, State, total_variation
from speccheck.tables import load_table
from speccheck.verifier import (
    ALGORITHMS,
    NODE_ALGORITHMS,
    Block,
    Candidates,
    CandidatesWithoutReplacement,
    Delivery,
    RoundOutcome,
    Step,
    Stream,
    Token,
    TopCandidates,
    VerificationError,
    deliver,
    greedy_round,
    inverse_cdf,
    inverse_cdfs,
    node_law,
    one_hot,
    uniform,
    uniforms,
    verify,
    verify_node,
)

T4 = load_table(Path(__file__).parents[1] / "corpora" / "fixture_t4.json")
F4 = T4.as_floats()
A, B, C, D, X = range(5)
ABCD = np.array([A, B, C, D])


def rows(table, prefix, drafted):
    """(p, q) of the round that drafts `drafted` after `prefix`."""
    decoding = Decoding(table, Token())
    step = decoding.step(State(len(prefix), prefix[-1] if prefix else None), tuple(drafted))
    return step.p, step.q[: len(drafted)]


P, Q = rows(F4, (), (A, B, C, D))
EXACT_P, EXACT_Q = rows(T4, (), (A, B, C, D))


def fractions(*numbers):
    return np.array([Fraction(n) for n in numbers], dtype=object)


def test_the_worked_examples_in_the_docstrings_hold():
    """What the code says beside the papers is what it does."""
    outcome = doctest.testmod(speccheck.verifier)
    assert outcome.attempted > 20
    assert outcome.failed == 0


# --- rows and uniforms ---


@pytest.mark.parametrize(
    ("key", "overlap", "residual"),
    [
        ((1, None), "0.90", "1 0 0 0 0"),
        ((2, None), "0.85", "0 0 1/3 0 2/3"),
        ((3, None), "0.60", "1/4 0 0 0 3/4"),
        ((4, C), "0.90", "0 0 0 1/2 1/2"),
        ((4, None), "0.55", "4/9 1/9 0 0 4/9"),
        ((5, None), "0.85", "1/3 0 0 0 2/3"),
    ],
)
def test_overlap_and_residual_of_every_row(key, overlap, residual):
    """Acceptance of a position is sum min(p, q), the correction norm(max(0, p - q))."""
    p, q = T4.target[key], T4.draft[key]
    assert np.minimum(p, q).sum() == Fraction(overlap)
    step = Step(np.stack([p, p]), np.stack([q]), np.array([A]))
    assert Token().final(step, 0).tolist() == [Fraction(w) for w in residual.split()]
    assert Token().residual(step, 0).sum() == 1 - Fraction(overlap)


def test_uniforms_are_the_published_ones():
    """splitmix64 chained over seed, stream and counter; the array form gives the same bits."""
    assert uniform(0, Stream.DRAFT, 0, 1) == 0.27471265698820735
    assert uniform(18, Stream.ACCEPT, 0, 2) == 0.3585585779709066
    seeds = np.arange(200)
    for stream, round_, position in ((1, 0, 1), (4, 3, 15), (5, 1, 0)):
        one_by_one = [uniform(int(s), stream, round_, position) for s in seeds]
        assert uniforms(seeds, stream, round_, position).tolist() == one_by_one


def test_no_two_uniforms_of_a_run_are_the_same():
    """Streams, rounds and positions never share a number, and a colliding position is refused."""
    numbers = [
        uniform(7, stream, round_, position)
        for stream, round_, position in product(Stream, range(5), range(16))
    ]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    assert max(numbers) < 1
    with pytest.raises(VerificationError, match="collide"):
        uniform(7, Stream.DRAFT, 0, 16)


def test_inverse_cdf_takes_the_first_token_past_u():
    """The boundary belongs to the next token, zero mass is skipped, id 0 can be drawn."""
    probs = np.array([0.25, 0.0, 0.0, 0.0, 0.75])
    assert [inverse_cdf(probs, u) for u in (0.0, 0.2499, 0.25, 0.9999)] == [0, 0, 4, 4]
    assert inverse_cdf(np.array([0.0, 1.0, 0.0]), 0.0) == 1
    assert inverse_cdf(np.array([1.0, 0.0]), np.nextafter(1, 0)) == 0


def test_inverse_cdf_survives_rounding():
    """A row that sums to a little less than 1 never gives a token of no mass."""
    probs = np.array([0.1] * 10 + [0.0])
    short = probs * (1 - 1e-9)
    for row in (probs, short):
        assert inverse_cdf(row, np.nextafter(1, 0)) == 9
        assert inverse_cdfs(row, np.array([np.nextafter(1, 0), 0.0])).tolist() == [9, 0]


@pytest.mark.parametrize("row", [[0.5, 0.4], [np.nan, 1.0], [2.0, 3.0], [0.0, 0.0]])
def test_rows_that_are_no_distributions_are_refused(row):
    """A row that was not normalised must not be drawn from quietly."""
    with pytest.raises(VerificationError, match="sums to"):
        inverse_cdf(np.array(row), 0.5)


# --- golden rounds ---


@pytest.mark.parametrize(
    ("algorithm", "soft", "accept_u", "final_u", "outcome"),
    [
        ("token", True, [0.90, 0.40, 0.70, 0.60], 0.30, RoundOutcome(2, X, bonus=False)),
        ("token", True, [0.10, 0.10, 0.10, 0.10], 0.30, RoundOutcome(4, B, bonus=True)),
        ("token", False, [0.50, 0.40, 0.30, 0.00], 0.50, RoundOutcome(2, X, bonus=False)),
        ("one_hot", True, [0.50, 0.40, 0.30, 0.00], 0.50, RoundOutcome(2, X, bonus=False)),
        ("block", True, [0.90, 0.40, 0.70, 0.60], 0.30, RoundOutcome(2, X, bonus=False)),
        ("block", True, [0.90, 0.50, 0.70, 0.60], 0.30, RoundOutcome(1, C, bonus=False)),
        ("block", True, [0.90, 0.50, 0.70, 0.30], 0.30, RoundOutcome(4, B, bonus=True)),
        ("greedy", False, [0.99, 0.99, 0.99, 0.99], 0.99, RoundOutcome(2, X, bonus=False)),
        ("sampler_match", False, [0.50, 0.40, 0.30, 0.90], 0.00, RoundOutcome(3, X, bonus=False)),
        ("sampler_match", False, [0.50, 0.40, 0.60, 0.60], 0.00, RoundOutcome(2, X, bonus=False)),
        ("target_only", True, [0.00, 0.00, 0.00, 0.00], 0.70, RoundOutcome(0, C, bonus=False)),
    ],
)
def test_worked_rounds_of_abcd(algorithm, soft, accept_u, final_u, outcome):
    """A B C D proposed after nothing, with the uniforms of the worked examples."""
    q = Q if soft else None
    assert verify(ALGORITHMS[algorithm], P, q, ABCD, np.array(accept_u), final_u) == outcome


def test_accept_probabilities_of_the_worked_round():
    """1, 3/4, 2/5 and 1 one by one; 1, 19/39, 0 and 18/55 as a block."""
    step = Step(EXACT_P, EXACT_Q, ABCD)
    assert Token().accept_probs(step).tolist() == [1, Fraction(3, 4), Fraction(2, 5), 1]
    h = Block().accept_probs(step).tolist()
    assert h == [1, Fraction(19, 39), 0, Fraction(18, 55)]
    assert Block().path_weights(step) == [1, 1, Fraction(3, 4), Fraction(3, 10), Fraction(18, 55)]
    assert Block().final(step, 2).tolist() == [Fraction(4, 19), 0, 0, 0, Fraction(15, 19)]


def test_a_rejected_first_token_is_corrected_from_row_1():
    """D at position 1 is accepted with 1/2, and its correction is A for sure."""
    draft = np.array([D])
    p, q = rows(F4, (), (D,))
    assert verify(Token(), p, q, draft, [0.7], 0.999) == RoundOutcome(0, A, bonus=False)
    assert verify(Token(), p, q, draft, [0.49], 0.0) == RoundOutcome(1, A, bonus=True)


def test_a_probability_of_zero_is_never_accepted():
    """The test is strict, so u = 0 does not accept a token the target excludes."""
    p, q = np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([[0.5, 0.5]])
    for name in ("token", "one_hot", "block", "greedy", "sampler_match"):
        assert verify(ALGORITHMS[name], p, q, np.array([0]), [0.0], 0.0).accepted == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_without_drafts_every_algorithm_is_the_target(algorithm):
    """With k = 0 they draw from p[0] on the same path; greedy takes its argmax."""
    none = np.array([], dtype=np.int64)
    for u in (0.0, 0.05, 0.5, 0.99):
        outcome = verify(algorithm, P[:1], None, none, np.array([]), u)
        token = A if algorithm.name == "greedy" else inverse_cdf(P[0], u)
        assert outcome == RoundOutcome(0, token, bonus=True)


def test_greedy_ties_go_to_the_lowest_id():
    """Both arms must break ties alike, so the row form and the argmax form agree."""
    p = np.array([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    for x in range(3):
        by_rows = verify(ALGORITHMS["greedy"], p, None, np.array([x]), [0.5], 0.5)
        assert by_rows == greedy_round(p.argmax(axis=1).tolist(), [x])
    assert greedy_round([0, 1], [1]) == RoundOutcome(0, 0, bonus=False)
    assert greedy_round([0, 1], [0]) == RoundOutcome(1, 1, bonus=True)


@pytest.mark.parametrize(
    ("p", "q", "draft", "accept_u", "message"),
    [
        (P[:3], Q, ABCD, [0.5] * 4, "5 target rows"),
        (P, Q[:3], ABCD, [0.5] * 4, "4 draft rows"),
        (P, Q, ABCD, [0.5] * 3, "4 uniforms"),
        (P[0], Q, ABCD, [0.5] * 4, "target rows"),
        (P, Q, np.array([A, B, C, -1]), [0.5] * 4, "not all in 0..4"),
        (P, Q, np.array([A, B, C, 5]), [0.5] * 4, "not all in 0..4"),
        (P, one_hot(np.array([B, B, B, B]), Q), ABCD, [0.5] * 4, "draft probability 0"),
        (P * 0.5, Q, ABCD, [0.9] * 4, "sums to"),
        (P * np.nan, Q, ABCD, [0.9] * 4, "sums to|normalised"),
    ],
)
def test_what_no_right_engine_hands_over_is_refused(p, q, draft, accept_u, message):
    """Shapes, ids and rows that mean a bug raise instead of bending the distribution."""
    with pytest.raises(VerificationError, match=message):
        verify(Token(), p[: len(p)], q, draft, accept_u, 0.999)


def test_argmaxes_that_do_not_fit_are_refused():
    """A round of k drafts needs k + 1 argmaxes."""
    with pytest.raises(VerificationError, match="2 drafts need 3"):
        greedy_round([0, 1], [0, 1])


def test_a_stop_token_inside_the_accepted_prefix_ends_the_delivery():
    """Accepted tokens after the stop are dropped and are no saved work."""
    abcd_then_x = RoundOutcome(4, X, bonus=True)
    assert deliver(ABCD, abcd_then_x, {B}) == Delivery((A, B), 2, 3)
    assert deliver(ABCD, abcd_then_x, {X}) == Delivery((A, B, C, D, X), 4, 0)
    assert deliver(ABCD, RoundOutcome(2, X, bonus=False), set()) == Delivery((A, B, X), 2, 0)
    assert deliver(ABCD, RoundOutcome(2, B, bonus=False), {B}) == Delivery((A, B), 2, 1)


# --- several candidates at one position ---

ROW_3 = (T4.target[3, None], T4.draft[3, None])
ROW_4 = (T4.target[4, None], T4.draft[4, None])


@pytest.mark.parametrize(
    ("scheme", "row", "acceptance"),
    [
        ("with_replacement", ROW_3, ".6000 .7000 .7750"),
        ("without_replacement", ROW_3, ".6000 .7794 .8956"),
        ("top_k", ROW_3, ".2000 .2500 .7000"),
        ("with_replacement", ROW_4, ".5500 .7300 .8160"),
        ("without_replacement", ROW_4, ".5500 .7929 .9147"),
        ("top_k", ROW_4, ".1000 .1500 .5500"),
    ],
)
def test_acceptance_of_one_two_and_three_candidates(scheme, row, acceptance):
    """Each scheme is lossless for every K, with the printed acceptance."""
    for K, expected in enumerate(acceptance.split(), start=1):
        law, accepted = node_law(NODE_ALGORITHMS[scheme], *row, K)
        assert law.tolist() == row[0].tolist()
        assert round(float(accepted), 4) == float(expected)


class NotRenormalised(CandidatesWithoutReplacement):
    """The rejected candidate is taken out of the claimed q, which keeps its missing mass."""

    def drawn(self, q):
        return q / q.sum()

    def claimed(self, q):
        return q

    def next_draft(self, q, x):
        rest = q.copy()
        rest[x] = 0
        return rest


class TargetNotUpdated(Candidates):
    """Later candidates are tested against p instead of the residual."""

    def next_target(self, p, q):
        return p


class TopVerifiedSoft(NotRenormalised):
    """Deterministic candidates, verified with the soft q."""

    def drawn(self, q):
        return one_hot(np.array([q.argmax()]), q)[0]


@pytest.mark.parametrize(
    ("scheme", "distance"),
    [(NotRenormalised(), ".0159"), (TargetNotUpdated(), ".1960"), (TopVerifiedSoft(), ".2300")],
    ids=["q not renormalised", "p not updated", "deterministic with soft q"],
)
def test_wrong_candidate_schemes_are_lossy(scheme, distance):
    """Two candidates on row 3 bend the law by the printed total variation."""
    law, _ = node_law(scheme, *ROW_3, 2)
    wrong = total_variation(dict(enumerate(law)), dict(enumerate(ROW_3[0])))
    assert round(float(wrong), 4) == float(distance)


@pytest.mark.parametrize("scheme", NODE_ALGORITHMS.values(), ids=NODE_ALGORITHMS)
def test_drawn_nodes_follow_their_law(scheme):
    """Enumerated seeds through the drawn form show p, and the exact acceptance."""
    p, q = (row.astype(float) for row in ROW_3)
    n, K = 4000, 3
    counts, hits = np.zeros(5), 0
    for seed in range(n):
        chance = [
            (uniform(seed, Stream.DRAFT, 0, j), uniform(seed, Stream.ACCEPT, 0, j))
            for j in range(K)
        ]
        index, token = verify_node(scheme, p, q, chance, uniform(seed, Stream.RESIDUAL, 0, 0))
        counts[token] += 1
        hits += index is not None
    _, accepted = node_law(scheme, *ROW_3, K)
    assert np.abs(counts / n - p).max() < 0.03
    assert hits / n == pytest.approx(float(accepted), abs=0.03)


def test_more_candidates_than_the_draft_has_tokens():
    """Without replacement the candidates run out, and the node stays lossless."""
    p, q = fractions("1/2", "1/4", "1/4"), fractions("0", "1/3", "2/3")
    for scheme in NODE_ALGORITHMS.values():
        law, _ = node_law(scheme, p, q, 4)
        assert law.tolist() == p.tolist()
    index, token = verify_node(
        TopCandidates(), p.astype(float), q.astype(float), [(0.5, 0.99)] * 4, 0.5
    )
    assert (index, token) == (None, 0)


# --- any row ---


@st.composite
def distributions(draw, size):
    """Rational probabilities with zeros among them."""
    weights = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    if not any(weights):
        weights[draw(st.integers(0, size - 1))] = 1
    return fractions(*(Fraction(w, sum(weights)) for w in weights))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_node_scheme_is_lossless_on_every_row(data):
    """Any p and q, any number of candidates."""
    size = data.draw(st.integers(2, 4))
    p, q = data.draw(distributions(size)), data.draw(distributions(size))
    for scheme, K in product(NODE_ALGORITHMS.values(), (1, 2, 3)):
        law, accepted = node_law(scheme, p, q, K)
        assert law.tolist() == p.tolist()
        assert 0 <= accepted <= 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_drawn_rounds_stay_inside_the_target(data):
    """In floats, no uniforms make any algorithm commit a token of target probability 0."""
    size, k = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 3))
    p = np.stack([data.draw(distributions(size)) for _ in range(k + 1)]).astype(float)
    q = [data.draw(distributions(size)).astype(float) for _ in range(k)]
    draft = np.array([data.draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in q], int)
    unit = st.floats(0, 1, exclude_max=True)
    accept_u = data.draw(st.lists(unit, min_size=k, max_size=k))
    final_u = data.draw(unit)
    rows_q = np.stack(q) if k else np.empty((0, size))
    for algorithm, given_q in product(ALGORITHMS.values(), (rows_q, None)):
        outcome = verify(algorithm, p, given_q, draft, accept_u, final_u)
        assert 0 <= outcome.accepted <= k
        assert outcome.bonus == (outcome.accepted == k)
        committed = [*draft[: outcome.accepted], outcome.token]
        if algorithm.name != "greedy":
            assert all(p[i][token] > 0 for i, token in enumerate(committed))
