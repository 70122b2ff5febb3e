"""vLLM's rejection sampler on the fixture's table: judged rightly, and the judgement can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from speccheck import kernels, stats
from speccheck.config import package_dir
from speccheck.law import DRAFT_SAMPLING, Decoding
from speccheck.tables import load_table
from speccheck.verifier import ALGORITHMS

TABLE = load_table(package_dir("corpora") / "fixture_t4.json")
TOKEN = Decoding(TABLE, ALGORITHMS["token"], DRAFT_SAMPLING["probabilistic"])


def answered(residual, *, one_hot=False) -> dict:
    """An engine in twenty lines: rounds answered with a residual of our choice."""
    rng = np.random.default_rng(5)
    asked = kernels._rounds(TOKEN, probabilistic=not one_hot)

    def one(drafted, p, q, u):
        for i, x in enumerate(drafted):
            if u[i] * q[i][x] >= p[i][x]:
                law = residual(p[i], q[i], x)
                return [*drafted[:i], int(rng.choice(5, p=law / law.sum()))]
        return [*drafted, int(rng.choice(5, p=p[-1]))]

    def greedy(drafted, p):
        for i, x in enumerate(drafted):
            if x != p[i].argmax():
                return [*drafted[:i], int(p[i].argmax())]
        return [*drafted, int(p[-1].argmax())]

    sampled, at_zero = [], []
    for r in asked["rounds"]:
        p, q = np.array(r["p"]), np.array(r["q"])
        sampled.append([[one(r["drafted"], p, q, rng.random(4)), 1] for _ in range(r["n"])])
        at_zero.append([[greedy(r["drafted"], p), 1]])
    answer = {"version": "0", "device": "x", "sampled": sampled, "greedy": at_zero}
    return {"asked": asked, "answer": answer}


def judged(residual):
    return kernels._judge(TOKEN, **answered(residual), chi2_sf=stats.chi2_sf)


def test_a_right_sampler_passes():
    """The residual of the paper: law of whole rounds, accepted lengths and argmaxes as exact."""
    found = judged(lambda p, q, _x: np.maximum(p - q, 0))
    assert found.reasons == []
    assert [one.exact for one in found.lengths] == [
        "1/10",
        "27/200",
        "153/500",
        "153/1000",
        "153/500",
    ]
    assert found.n == kernels.N_ROUNDS


@pytest.mark.parametrize(
    "residual",
    [
        lambda p, _q, _x: p,
        lambda p, q, _x: np.abs(p - q),
        lambda p, _q, x: np.where(np.arange(5) == x, 0, p),
    ],
    ids=["raw target", "absolute difference", "rejected token zeroed"],
)
def test_a_wrong_residual_fails(residual):
    """Shortcuts that are known from real engines."""
    (reason,) = judged(residual).reasons
    assert "does not keep the target's law" in reason


def test_a_wrong_argmax_fails():
    """One round at temperature 0 is enough: nothing there is chance."""
    given = answered(lambda p, q, _x: np.maximum(p - q, 0))
    (row,) = given["answer"]["greedy"][3]
    row[0][-1] = (row[0][-1] + 1) % 5
    found = kernels._judge(TOKEN, **given, chi2_sf=stats.chi2_sf)
    assert found.greedy_wrong == 1
    assert "temperature 0" in found.reasons[0]


def test_what_cannot_be_asked_is_said(tmp_path):
    """Block verification, an interpreter without vLLM, one that is none: a reason, no verdict."""

    def run(python, algorithm="token"):
        return kernels.run(
            TABLE,
            python,
            algorithm=algorithm,
            draft_sampling="probabilistic",
            chi2_sf=stats.chi2_sf,
        )

    assert run(sys.executable, "block").startswith("block verification is not in")
    if importlib.util.find_spec("vllm") is None:
        assert "could not be called" in run(sys.executable)
    assert "did not run" in run(str(tmp_path / "no"))


def test_an_interpreter_that_answers_nonsense(tmp_path):
    """As if vLLM had printed and died with code 0."""
    fake = Path(tmp_path / "python")
    fake.write_text("#!/bin/sh\ncat >/dev/null\necho INFO hello\n")
    fake.chmod(0o755)
    found = kernels.run(
        TABLE, str(fake), algorithm="token", draft_sampling="probabilistic", chi2_sf=stats.chi2_sf
    )
    assert found == "vLLM's rejection sampler could not be called (no answer)"
