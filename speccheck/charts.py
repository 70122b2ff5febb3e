"""The packet's charts: a few kinds of picture, drawn by matplotlib, as SVG that lives inside HTML.

Inline rather than linked, so that the packet is one file; SVG rather than PNG, so that text stays
text and a chart takes the page's colours, light or dark. matplotlib is given stand-in colours that
are replaced by CSS variables afterwards, identifiers are made unique to the page, and coordinates
are cut to two decimals: the same data gives the same bytes, in about ten kilobytes. Arms differ by
dash and marker as well as by colour.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 4.5
"""One column of a wide page, the whole of a phone: text stays readable on both."""

_PAINT = {
    "#0a0a01": "var(--ink)",
    "#0a0a02": "var(--faint)",
    "#0a0a03": "var(--line)",
    "#0a0a04": "var(--arm-target)",
    "#0a0a05": "var(--arm-spec)",
    "#0a0a06": "var(--bad)",
    "#0a0a07": "var(--page)",
}
_INK, _FAINT, _LINE, _TARGET, _SPEC, _BAD, _PAGE = _PAINT
_DASHED = (0, (4, 2))


@dataclass(frozen=True)
class Series:
    """One line or strip of a chart; `second` paints it in the second colour, solid."""

    label: str
    second: bool


@dataclass(frozen=True)
class Strip:
    """Quantiles of one arm in one row of a strip chart, ms."""

    series: Series
    p05: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


@dataclass(frozen=True)
class StripRow:
    """One row of a strip chart: its arms, one below the other."""

    label: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Strips:
    """Per row and arm: a line p5-p95, a box p25-p75, marks at p50, p95 and p99."""

    rows: tuple[StripRow, ...]


@dataclass(frozen=True)
class Curve:
    """An empirical distribution: share `y` of requests took at most `x` ms, both ascending."""

    series: Series
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Distributions:
    """Empirical distribution functions, one line per arm, on a log axis."""

    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Track:
    """One arm over time, ms: a middle line and a high one, None where a window was empty."""

    series: Series
    at_s: tuple[float, ...]
    middle: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Panel:
    """One panel of a time chart."""

    title: str
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Share:
    """From this second on, this share of traffic was on the speculative arm."""

    from_s: float
    share: float


@dataclass(frozen=True)
class Moment:
    """A moment marked through all panels."""

    at_s: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """What happened to a route: panels over one time axis, the share below, moments marked."""

    panels: tuple[Panel, ...]
    shares: tuple[Share, ...]
    start_s: float
    end_s: float
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Ratio:
    """One row of a ratio chart: a value with its interval; None is a bound that does not exist."""

    label: str
    value: float
    low: float | None
    high: float | None
    tone: str
    """good, bad or unsure: a filled circle, a cross or a hollow circle."""


@dataclass(frozen=True)
class Ratios:
    """Ratios with intervals, one row each; the line of no change and the limit are marked."""

    rows: tuple[Ratio, ...]
    limit: float | None
    axis: str


Picture = Strips | Distributions | Timeline | Ratios


@lru_cache(maxsize=64)
def draw(picture: Picture, name: str, title: str, description: str) -> str:
    """The picture as an `<svg>` element. `name` makes its ids unique to the page.

    Kept, since matplotlib takes a fifth of a second for each: a packet that is rendered again in
    the same process draws what changed.
    """
    words = (name, title, description)
    match picture:
        case Strips():
            return _svg(picture, _strips, 0.85 + 0.52 * len(picture.rows), words)
        case Distributions():
            return _svg(picture, _distributions, 2.2, words)
        case Timeline():
            return _svg(picture, _timeline, 1.2 + 1.15 * len(picture.panels), words)
        case Ratios():
            return _svg(picture, _ratios, 0.7 + 0.2 * len(picture.rows), words)


# --- drawing ------------------------------------------------------------------------------------


def _margins(figure: Figure, labels: Iterable[str], top_in: float = 0.3, gap: float = 0.2) -> None:
    """Room for the tick labels, by their length: laying out by measuring costs twice the time."""
    width_in, height_in = figure.get_size_inches()
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    figure.subplots_adjust(
        left=(0.16 + 0.066 * longest) / width_in,
        right=1 - 0.12 / width_in,
        bottom=0.4 / height_in,
        top=1 - top_in / height_in,
        hspace=gap,
    )


def _strips(figure: Figure, picture: Strips) -> None:
    axes = figure.add_subplot()
    _margins(figure, [row.label for row in picture.rows])
    for y, row in enumerate(picture.rows):
        for lane, strip in enumerate(row.strips):
            _strip(axes, y + (lane - (len(row.strips) - 1) / 2) * 0.34, strip)
    axes.set_yticks(range(len(picture.rows)), [row.label for row in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.5, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    axes.grid(axis="x")
    _legend(figure, [strip.series for row in picture.rows for strip in row.strips])


def _distributions(figure: Figure, picture: Distributions) -> None:
    axes = figure.add_subplot()
    _margins(figure, ["p50"])
    for curve in picture.curves:
        axes.plot(curve.x, curve.y, drawstyle="steps-post", **_pen(curve.series))
    axes.set_xscale("log")
    _plain_log_ticks(axes)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 0.95], ["0 %", "p50", "p95"])
    axes.set_xlabel("ms (log)")
    axes.grid()
    _legend(figure, [curve.series for curve in picture.curves])


def _timeline(figure: Figure, picture: Timeline) -> None:
    heights = [1.0] * len(picture.panels) + [0.55]
    stack = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    *above, foot = [row[0] for row in stack]
    _margins(figure, ["0000"], top_in=0.48, gap=0.55)
    for axes, panel in zip(above, picture.panels, strict=True):
        for track in panel.tracks:
            pen = _pen(track.series)
            axes.plot(track.at_s, _gaps(track.middle), **pen, marker=".", markersize=3)
            axes.plot(track.at_s, _gaps(track.high), **(pen | {"linewidth": 0.7}))
        axes.set_title(panel.title, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid()
    percent = [100 * share.share for share in picture.shares]
    times = [share.from_s for share in picture.shares]
    if percent:
        times, steps = [*times, picture.end_s], [*percent, percent[-1]]
        foot.plot(times, steps, drawstyle="steps-post", color=_INK, linewidth=1.2)
    foot.set_title("share of the route on the speculative arm, %", loc="left")
    foot.set_ylim(0, max([*percent, 10]) * 1.15)
    foot.set_xlim(picture.start_s, picture.end_s)
    foot.set_xlabel("seconds since the canary began")
    foot.grid()
    for moment in picture.moments:
        for axes in (*above, foot):
            axes.axvline(moment.at_s, color=_BAD, linewidth=1.4)
        early = moment.at_s < picture.start_s + 0.78 * (picture.end_s - picture.start_s)
        (above or [foot])[0].annotate(
            moment.label,
            (moment.at_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3 if early else -3, -2),
            textcoords="offset points",
            ha="left" if early else "right",
            va="top",
            color=_BAD,
            fontweight="bold",
            bbox={"facecolor": _PAGE, "edgecolor": "none", "pad": 1},
        )
    _legend(figure, [track.series for panel in picture.panels for track in panel.tracks])


def _ratios(figure: Figure, picture: Ratios) -> None:
    axes = figure.add_subplot()
    _margins(figure, [row.label for row in picture.rows], top_in=0.08)
    ends = [x for r in picture.rows for x in (r.value, r.low, r.high) if x is not None]
    left, right = min([*ends, 1.0]), max([*ends, picture.limit or 1.0, 1.0])
    pad = (right - left) * 0.08 or 0.1
    for y, row in enumerate(picture.rows):
        paint = _BAD if row.tone == "bad" else _INK
        low = left - pad if row.low is None else row.low
        high = right + pad if row.high is None else row.high
        axes.plot([low, high], [y, y], color=paint, linewidth=1.4)
        marker = "X" if row.tone == "bad" else "o"
        fill = _PAGE if row.tone == "unsure" else paint
        axes.plot([row.value], [y], color=paint, marker=marker, markersize=5, markerfacecolor=fill)
    axes.axvline(1, color=_FAINT, linewidth=0.8)
    if picture.limit is not None:
        axes.axvline(picture.limit, color=_BAD, linewidth=1, linestyle=_DASHED)
    axes.set_yticks(range(len(picture.rows)), [row.label for row in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.4, -0.6)
    axes.set_xlim(left - pad, right + pad)
    axes.set_xlabel(picture.axis)
    axes.grid(axis="x")


def _strip(axes: Axes, y: float, strip: Strip) -> None:
    paint = _SPEC if strip.series.second else _TARGET
    axes.plot([strip.p05, strip.p95], [y, y], color=paint, linewidth=1.2)
    fill = paint if strip.series.second else "none"
    width = strip.p75 - strip.p25
    axes.barh(y, width, 0.2, strip.p25, facecolor=fill, edgecolor=paint, linewidth=1)
    axes.plot([strip.p50] * 2, [y - 0.15, y + 0.15], color=_INK, linewidth=1.8)
    axes.plot([strip.p95], [y], color=paint, marker="|", markersize=8, markeredgewidth=1.8)
    axes.plot([strip.p99], [y], color=paint, marker="x", markersize=4)


def _pen(series: Series) -> dict[str, Any]:
    if series.second:
        return {"color": _SPEC, "linewidth": 1.5, "linestyle": "-"}
    return {"color": _TARGET, "linewidth": 1.5, "linestyle": _DASHED}


def _legend(figure: Figure, series: Iterable[Series]) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[Line2D([], [], label=one.label, **_pen(one)) for one in dict.fromkeys(series)],
        loc="upper left",
        ncols=2,
        frameon=False,
        borderaxespad=0,
        handlelength=2.4,
    )


def _plain_log_ticks(axes: Axes) -> None:
    """1, 2, 5, 10 ... instead of powers: nobody should have to read 10^1.3 when paged."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


# --- SVG ----------------------------------------------------------------------------------------


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    settings: Any = {
        "svg.fonttype": "none",  # text as text: small, searchable, in the page's own font
        "svg.hashsalt": "speccheck",
        "text.parse_math": False,  # labels may hold a dollar sign
        "font.family": "DejaVu Sans",  # ships with matplotlib, so that layout is the same anywhere
        "font.size": 8.5,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "axes.titlecolor": _INK,
        "axes.facecolor": "none",
        "text.color": _INK,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
        "grid.color": _LINE,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "path.simplify": True,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A route may be named in a script that this font lacks; the page's font draws it.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        yield


P = TypeVar("P", bound=Picture)


def _svg(
    picture: P,
    paint: Callable[[Figure, P], None],
    height_in: float,
    words: tuple[str, str, str],
) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(WIDTH_IN, height_in))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        paint(figure, picture)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), height_in, *words)


def _for_page(svg: str, height_in: float, name: str, title: str, description: str) -> str:
    """Make matplotlib's file a piece of an HTML page: names, colours, size, text alternatives."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    inner = body[body.index(">") + 1 : body.rindex("</svg>")]
    inner = inner.replace(" font-family: 'DejaVu Sans';", "")  # the page's font
    inner = re.sub(r' transform="rotate\(-?0 [^"]*"', "", inner)
    for stand_in, paint in _PAINT.items():
        inner = inner.replace(stand_in, paint)
    inner = _own_ids(inner, name)
    inner = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), inner)
    inner = re.sub(r"\n\s*", "\n", inner).strip()
    label, more = html.escape(title), html.escape(description)
    return (
        f'<svg class="chart" role="img" aria-labelledby="{name}-t {name}-d" '
        f'viewBox="0 0 {WIDTH_IN * 72:g} {height_in * 72:g}">'
        f'<title id="{name}-t">{label}</title><desc id="{name}-d">{more}</desc>\n{inner}\n</svg>'
    )


def _own_ids(svg: str, name: str) -> str:
    """Drop the ids nobody refers to; make the others unique to this chart."""
    used = list(dict.fromkeys(re.findall(r"(?:url\(|href=\")#([^)\"]+)", svg)))
    number = {old: f"{name}-{index}" for index, old in enumerate(used)}
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{number[m[1]]}"' if m[1] in number else "", svg)
    return re.sub(r"((?:url\(|href=\")#)([^)\"]+)", lambda m: m[1] + number[m[2]], svg)
