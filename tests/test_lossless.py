"""Divergence told from noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccheck import lossless
from speccheck.lossless import Compared, Divergence, NoiseFloor

tokens = st.lists(st.integers(0, 3), max_size=12)


def compared(gap: float | None, *, tau: float = 0.1, number: int = 0) -> Compared:
    """One output that diverges at token 10 with this gap."""
    return Compared(
        f"p{number}",
        f"r{number}",
        11,
        Divergence(10, 1, 2),
        gap,
        lossless.classify(gap, tau),
    )


def equal(number: int, exposure: int = 60) -> Compared:
    """One output that is the target's."""
    return Compared(f"e{number}", f"re{number}", exposure, None)


def count_of(found, metric="lossless_violations"):
    return next(m for m in found if m.metric == metric)


# --- divergence ---------------------------------------------------------------------------------


@given(tokens, tokens)
def test_first_divergence_is_where_prefixes_part(a, b):
    """Everything before it is equal and the tokens at it differ; equal outputs have none."""
    found = lossless.first_divergence(a, b)
    if found is None:
        assert a == b
        assert lossless.exposure(a, b) == len(a)
    else:
        assert a[: found.index] == b[: found.index]
        assert found.target_token != found.other_token
        assert a[found.index : found.index + 1] == [
            t for t in [found.target_token] if t is not None
        ]
        assert lossless.exposure(a, b) == found.index + 1


def test_a_shorter_output_is_a_divergence():
    """An answer that stops early parts from the target's there; `zip` would call them equal."""
    assert lossless.first_divergence([1, 2, 3], [1, 2]) == Divergence(2, 3, None)


@pytest.mark.parametrize(
    ("gap", "kind"),
    [
        (0.0, "tie"),
        (-0.01, "tie"),
        (0.1, "tie"),
        (0.15, "near"),
        (0.2, "near"),
        (0.21, "violation"),
        (math.inf, "violation"),
        (None, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_classes_by_gap(gap, kind):
    """Up to tau a tie, up to twice tau near, beyond a violation; no answer is unknown."""
    assert lossless.classify(gap, 0.1) == kind


def test_noise_floor_is_the_largest_observed_change():
    """Over all axes; its coverage is that of a one-sided tolerance bound: 299 for 99 %."""
    floor = lossless.noise_floor({"batch": [0.01] * 298 + [-0.04], "path": [0.02] * 400})
    assert (floor.tau, floor.n) == (0.04, 299)
    assert [(axis.largest, axis.n) for axis in floor.axes] == [(0.04, 299), (0.02, 400)]
    assert floor.content_missed <= 0.01
    assert lossless.noise_floor({"batch": [0.0] * 298}).content_missed > 0.01
    assert lossless.noise_floor({"batch": [0.0]}, resolution=0.25).tau == 0.25
    assert lossless.noise_floor({"batch": [], "path": []}) is None


def test_a_broken_probe_is_no_noise_floor():
    """A NaN must not become a tolerance."""
    with pytest.raises(ValueError, match="NaN"):
        lossless.noise_floor({"path": [0.0, math.nan]})


@pytest.mark.parametrize(
    ("logit", "step"), [(16.0, 0.125), (31.9, 0.125), (-9.0, 0.0625), (1, 2**-7)]
)
def test_bf16_step(logit, step):
    """Spacing of bf16 numbers, seven bits after the leading one."""
    assert lossless.bf16_step(logit) == step


def test_a_near_divergence_is_settled_by_replays():
    """Parting likewise each time is a violation, anything else noise; no replay settles nothing."""
    first = Divergence(4, 7, 8)
    assert lossless.settle_near(first, [first, first, first]) == "violation"
    assert lossless.settle_near(first, [first, None, first]) == "tie"
    assert lossless.settle_near(first, [first, Divergence(4, 7, 9)]) == "tie"
    assert lossless.settle_near(first, []) == "near"


def test_near_ties_are_no_violation():
    """T01: six divergences against five in the A/A control, all at near ties: none counts, both
    numbers are said, and nothing is called identical or proven.
    """
    gaps = [0.0, 0.0003, 0.0011, 0.0002, 0.0, 0.0008]
    floor = lossless.noise_floor({"batch": [0.0005, 0.0015], "path": [0.001]})
    found = lossless.measure_lossless(
        [compared(g, tau=floor.tau, number=i) for i, g in enumerate(gaps)]
        + [equal(i) for i in range(194)],
        [compared(0.0, number=i) for i in range(5)] + [equal(i) for i in range(195)],
        floor,
        stage="replay",
        route="chat",
    )
    count = count_of(found)
    assert (count.estimate.value, count.estimate.high) == (0, 0)
    assert "6 of 200" in count.note
    assert "5 of 200 do in the A/A control" in count.note
    assert not {"identical", "proven", "lossless proven"} & set(count.note.split())
    rate = count_of(found, "divergences_per_1000")
    assert rate.estimate.value == pytest.approx(1000 * 6 / count.estimate.n)
    assert "against 5" in rate.note


def test_certain_divergences_are_violations():
    """T02: 47 divergences with a median gap of 2.9 nats, one in the A/A control."""
    found = lossless.measure_lossless(
        [compared(2.9, number=i) for i in range(47)] + [equal(i) for i in range(33)],
        [compared(0.0)] + [equal(i) for i in range(79)],
        NoiseFloor(0.1, 300, 0.01),
        stage="replay",
        route="chat",
    )
    count = count_of(found)
    assert (count.estimate.value, count.estimate.low) == (47, 47)
    assert "47 where the target is sure" in count.note
    assert "median gap 2.9 nats" in count.note
    assert len(count.examples) == 5


def test_without_a_noise_floor_nothing_is_told_from_noise():
    """Every divergence stays open, except a token outside the target's top k."""
    found = lossless.measure_lossless(
        [compared(0.0), compared(5.0, number=1), compared(math.inf, number=2)],
        [],
        None,
        stage="replay",
        route="chat",
    )
    count = count_of(found)
    assert (count.estimate.low, count.estimate.high) == (1, 3)
    assert "no noise floor was measured" in count.note
    assert "no A/A control was run" in count.note


def test_nothing_compared_is_not_zero_violations():
    """Without outputs there is no estimate."""
    found = lossless.measure_lossless(
        [], [], NoiseFloor(0.1, 300, 0.01), stage="replay", route="chat"
    )
    assert [m.estimate for m in found] == [None, None]
