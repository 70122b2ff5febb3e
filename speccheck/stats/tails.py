"""Tail probabilities and quantiles of the usual laws, from `scipy.special`.

The same numbers as `scipy.stats`, which takes over a second to import and fifty microseconds a
call: every command would wait for it. Arguments may be arrays and are not checked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special


def binomial_cdf(k: npt.ArrayLike, n: int, p: float) -> Any:
    """P(Bin(n, p) <= k), k an integer from -1 to n."""
    successes = np.asarray(k, dtype=float)
    within = np.clip(successes, 0, max(n - 1, 0))
    inside = special.betaincc(within + 1, n - within, p)
    return np.where(successes >= n, 1.0, np.where(successes < 0, 0.0, inside))


def binomial_sf(k: npt.ArrayLike, n: int, p: float) -> Any:
    """P(Bin(n, p) > k), k an integer from -1 to n."""
    successes = np.asarray(k, dtype=float)
    within = np.clip(successes, 0, max(n - 1, 0))
    inside = special.betainc(within + 1, n - within, p)
    return np.where(successes >= n, 0.0, np.where(successes < 0, 1.0, inside))


def normal_pdf(z: float) -> float:
    """Density of the standard normal law."""
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def normal_sf(z: npt.ArrayLike) -> Any:
    """P(N(0, 1) > z)."""
    return special.ndtr(-np.asarray(z))


def normal_quantile(p: float) -> float:
    """The z with P(N(0, 1) <= z) = p."""
    return float(special.ndtri(p))


def normal_isf(p: float) -> float:
    """The z with P(N(0, 1) > z) = p."""
    return -float(special.ndtri(p))


def student_isf(p: npt.ArrayLike, df: npt.ArrayLike) -> Any:
    """The t with P(T > t) = p, Student's law with df degrees of freedom."""
    return -special.stdtrit(np.asarray(df, dtype=float), np.asarray(p))


def chi2_cdf(x: float, df: int) -> float:
    """P(chi-square with df degrees of freedom <= x)."""
    return float(special.chdtr(df, x))


def chi2_sf(x: float, df: int) -> float:
    """P(chi-square with df degrees of freedom > x)."""
    return float(special.chdtrc(df, x))


def chi2_isf(p: float, df: int) -> float:
    """The x with P(chi-square with df degrees of freedom > x) = p."""
    return float(special.chdtri(df, p))


def noncentral_chi2_cdf(x: float, df: int, noncentrality: float) -> float:
    """P(noncentral chi-square with df degrees of freedom <= x)."""
    return float(special.chndtr(x, df, noncentrality))


def smirnov_sf(distance: float, n: int) -> float:
    """P(D+ > distance): how far n uniform values fall behind their law on one side."""
    return float(special.smirnov(n, distance))
