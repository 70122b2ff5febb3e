"""The packet: gold files, hostile texts, incomplete packets, rounding, determinism."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import packet_data as data
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from speccheck import charts, law, verifier
from speccheck.decision import final as final_decisions
from speccheck.errors import ExitCode, StoreError
from speccheck.packet import (
    PacketView,
    RunEvidence,
    build_view,
    outputs,
    packet_json_schema,
    pages,
    proof,
    render,
)
from speccheck.packet import view as models
from speccheck.packet.view import Figure, Interval, Missing
from speccheck.records import Action, Decision, Finding, Verdict

ROOT = Path(__file__).resolve().parent.parent
Written = tuple[PacketView, dict[str, str]]


def written(evidence: RunEvidence, folder: Path) -> Written:
    """The view and the text of each file."""
    view = build_view(evidence)
    paths = render(view, folder)
    return view, {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(data.small(), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(data.hostile(), tmp_path_factory.mktemp("hostile"))


class Page(html.parser.HTMLParser):
    """What a browser would find: elements with attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, found: str) -> None:
        if not self._style:
            self.words.append(found)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def attributes(self, name: str) -> list[str]:
        return [
            value or "" for _, attrs in self.elements for n, value in attrs.items() if n == name
        ]


# --- gold files ---------------------------------------------------------------------------------


def without_pictures(text: str) -> str:
    """The page with each chart reduced to its words: each release of matplotlib draws a little
    differently, and the browser test looks at what it draws.
    """
    return re.sub(r"(<svg[^>]*>.*?</desc>).*?</svg>", r"\1</svg>", text, flags=re.DOTALL)


def compare(name: str, actual: str, folder: Path) -> None:
    """Fail with both paths if a gold file differs; `SPECCHECK_WRITE_GOLD=1` writes it instead."""
    gold = data.GOLD / name
    if os.environ.get("SPECCHECK_WRITE_GOLD"):
        gold.write_text(actual, encoding="utf-8")
    left = folder / name
    left.write_text(actual, encoding="utf-8")
    expected = gold.read_text(encoding="utf-8") if gold.exists() else ""
    assert actual == expected, f"{left} is not {gold}; look, then SPECCHECK_WRITE_GOLD=1 keeps it"


def test_the_page_is_the_gold_page(
    small: Written, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """packet.html, its charts reduced to their words, is the file kept in tests/gold."""
    folder = tmp_path_factory.mktemp("actual")
    compare("packet.html", without_pictures(small[1]["packet.html"]), folder)


def test_the_markdown_is_the_gold_markdown(
    small: Written, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """packet.md is the file kept in tests/gold."""
    compare("packet.md", small[1]["packet.md"], tmp_path_factory.mktemp("actual"))


def rounded_numbers(value: Any) -> Any:
    """JSON with floats cut to nine digits, on which scipy's releases agree, and no pictures."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {k: "..." if k == "picture" else rounded_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded_numbers(item) for item in value]
    return value


def test_the_json_is_the_gold_json(
    small: Written, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """packet.json, to nine digits, is the file kept in tests/gold."""
    plain = rounded_numbers(json.loads(small[1]["packet.json"]))
    text = json.dumps(plain, ensure_ascii=False, indent=0) + "\n"
    compare("packet.json", text, tmp_path_factory.mktemp("actual"))


@pytest.mark.parametrize("which", ["small", "hostile"])
def test_the_json_follows_its_schema(which: str, request: pytest.FixtureRequest) -> None:
    """packet.json is valid under the schema that is read off the view models."""
    _, files = request.getfixturevalue(which)
    plain = json.loads(files["packet.json"])
    jsonschema.Draft202012Validator(packet_json_schema()).validate(plain)
    assert plain["schema_version"] == 1


def test_the_schema_can_fail(small: Written) -> None:
    """A packet without its exit code is not valid."""
    plain = json.loads(small[1]["packet.json"])
    del plain["exit_code"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain, packet_json_schema())


# --- determinism and files ----------------------------------------------------------------------


def test_the_same_evidence_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two processes with different hash seeds write the same packet."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import packet_data\n"
        "from pathlib import Path\n"
        "from speccheck.packet import build_view, render\n"
        "render(build_view(packet_data.small()), Path(sys.argv[2]))\n"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT / "tests"), str(tmp_path / seed)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            timeout=300,
        )
    first, second = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / seed).iterdir())}
        for seed in ("1", "2")
    )
    assert first == second


def test_the_checksums_hold(tmp_path: Path) -> None:
    """packet.sha256 is what `sha256sum -c` wants, and lists each other file."""
    render(build_view(data.small()), tmp_path)
    done = subprocess.run(
        ["sha256sum", "-c", pages.CHECKSUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(re.findall(r"^(\S+): OK$", done.stdout, re.MULTILINE)) == {
        "packet.html",
        "packet.md",
        "packet.json",
    }


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """The error names the file, and says that the receipts are safe."""
    (tmp_path / "out").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=r"out/packet.html: cannot be written"):
        render(build_view(data.small()), tmp_path / "out")


def test_the_page_needs_nothing_from_outside(small: Written) -> None:
    """No script, no resource, no link that leaves the page; the policy forbids them too."""
    page = Page(small[1]["packet.html"])
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "video", "form", "base"}
    assert page.attributes("src") == []
    links = {value for value in page.attributes("href") if not value.startswith("#")}
    assert links == {"data:,"}
    assert "default-src 'none'" in small[1]["packet.html"]
    assert "@import" not in small[1]["packet.html"]


def test_every_link_in_the_page_has_its_target(small: Written) -> None:
    """Ids are unique; each #link, url(#id) and aria reference points at one of them."""
    page = Page(small[1]["packet.html"])
    ids = Counter(page.attributes("id"))
    assert {name: n for name, n in ids.items() if n > 1} == {}
    used = {value[1:] for name in ("href", "xlink:href") for value in page.attributes(name)}
    used |= set(re.findall(r"url\(#([^)]+)\)", small[1]["packet.html"]))
    used |= {one for value in page.attributes("aria-labelledby") for one in value.split()}
    assert used - {"ata:,"} <= set(ids)


# --- what is missing ----------------------------------------------------------------------------


def without_stage(evidence: RunEvidence, *names: str) -> RunEvidence:
    stages = {name: stage for name, stage in evidence.stages.items() if name not in names}
    kept = [r for r in evidence.receipts if r.stage not in names]
    return replace(evidence, stages=stages, receipts=kept)


INCOMPLETE: dict[str, tuple[Callable[[RunEvidence], RunEvidence], set[int]]] = {
    "no fixture": (lambda e: without_stage(e, "fixture"), {1}),
    "fixture refused": (
        lambda e: replace(
            e,
            stages={
                **e.stages,
                "fixture": data.stage("fail", {"refused": ["lenience 0.8: lossy, refused"]}),
            },
        ),
        {1},
    ),
    "no matrix": (lambda e: replace(e, matrix=()), {2}),
    "no service": (lambda e: without_stage(e, "shadow", "canary"), {3}),
    "one arm only": (
        lambda e: replace(e, receipts=[r for r in e.receipts if r.arm == "target_only"]),
        {3},
    ),
    "nothing": (
        lambda e: replace(e, stages={}, receipts=(), matrix=(), findings=(), decisions=()),
        {1, 2, 3},
    ),
}
VIEW_NAMES = {1: "probability fixture", 2: "workload decision matrix", 3: "service latency"}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_packet_without_a_view_says_so_loudly(case: str, tmp_path: Path) -> None:
    """Title, heading, banner, section, Markdown, JSON and exit code all say INCOMPLETE."""
    change, numbers = INCOMPLETE[case]
    view, files = written(change(data.small()), tmp_path)
    assert {part.number for part in view.missing} == numbers
    assert not view.complete
    assert view.exit_code == ExitCode.JUDGED_BAD == json.loads(files["packet.json"])["exit_code"]
    page = files["packet.html"]
    title = re.search(r"<title>(.*?)</title>", page)
    heading = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert title is not None
    assert heading is not None
    for number in numbers:
        assert title[1].startswith("INCOMPLETE")
        for text in (title[1], heading[1], files["packet.md"].splitlines()[0]):
            assert VIEW_NAMES[number] in text
        assert f"View {number}, {VIEW_NAMES[number]}, is missing: " in page
    assert 'role="alert"' in page
    assert view.summary.startswith("What follows does not stand until the packet is whole.")
    assert page.count("<strong>MISSING.</strong>") == len(numbers)
    assert page.count("data-view=") == 3
    assert files["packet.md"].count("**MISSING.**") == len(numbers)


def test_a_whole_packet_is_not_called_incomplete(small: Written) -> None:
    """The word stands in no part of a packet that has its three views."""
    view, files = small
    assert view.complete
    assert "INCOMPLETE packet" not in files["packet.html"]
    assert "is missing:" not in files["packet.html"]


def test_what_was_not_measured_is_said_in_words(tmp_path: Path) -> None:
    """Optional parts that are left out, or given a reason, are neither blank nor zero."""
    plain = data.small()
    stages = {
        **plain.stages,
        "replay": data.stage(
            "inconclusive",
            {"noise_floor": {"not_measured": "the A/A control was cut off"}},
            client_health={"not_measured": "the client was killed"},
        ),
        "shadow": data.stage("error", {}),
        "canary": data.stage("error", {}),
    }
    view, files = written(replace(plain, stages=stages), tmp_path)
    assert view.complete
    for name in ("packet.html", "packet.md"):
        text = files[name]
        for why in (
            "the A/A control was cut off",
            "the client was killed",
            "greedy outputs were not compared token by token",
            "no distribution test was run",
            "no server feature was checked",
            "no task was graded",
            "shadow gave no scheduling figures",
            "shadow gave no protected-traffic result",
            "the canary stage gave neither steps nor events",
        ):
            assert f"not measured: {why}" in text, (name, why)
    assert isinstance(view.replay, type(build_view(plain).replay))


def test_a_template_cannot_print_what_is_not_there() -> None:
    """An unknown name raises instead of printing nothing."""
    made = pages.environment(lambda value: value)
    for text in ("{{ nothing }}", "{{ packet.nothing }}", "{% if packet.nothing %}{% endif %}"):
        with pytest.raises(jinja2.UndefinedError):
            made.from_string(text).render(packet=object())


def test_a_template_cannot_forget_to_escape() -> None:
    """Both environments escape what they print, without a filter."""
    for finalize in (pages._for_html, pages._for_markdown):
        made = pages.environment(finalize)
        shown = made.from_string("{{ text }}").render(text="<b>\x1b")
        assert "<b>" not in shown
        assert "\x1b" not in shown


def test_each_verification_has_words_that_an_engineer_knows() -> None:
    """Every algorithm and every way of drafting that the fixture runs is told in words."""
    shown = proof._verification("one_hot", "greedy")
    assert shown == "one_hot (greedy drafts, taken as certain: vLLM's default draft_sample_method)"
    assert set(proof.DRAFTS) == set(law.DRAFT_SAMPLING)
    assert set(proof.ACCEPTANCE) == set(verifier.ALGORITHMS) - {"token", "one_hot", "target_only"}


def test_a_load_is_a_rate_where_arrivals_set_it(small: Written) -> None:
    """An open loop is named by its requests/s, a closed one by its concurrency."""
    assert isinstance(small[0].service, models.ServiceView)
    loads = {(line.stage, line.load) for line in small[0].service.loads}
    assert loads == {("shadow", "concurrency 16"), ("canary", "10 requests/s")}
    assert "loads (concurrency 8, concurrency 16 and 10 requests/s)" in small[1]["packet.md"]
    assert "up to" not in small[0].service.summary


# --- decisions ----------------------------------------------------------------------------------


def decided(*actions: tuple[str, Action, str], error: str = "") -> RunEvidence:
    """A whole run with these decisions."""

    def findings(route: str) -> tuple[Finding, ...]:
        verdict = Verdict.ERROR if route == error else Verdict.PASS
        return (
            Finding("max_error_rate", verdict, route, "", "canary", None, 0.01, "share", "why"),
        )

    made = [Decision(r, action, stage, "why", findings(r)) for r, action, stage in actions]
    return replace(data.small(), findings=(), decisions=made)


@pytest.mark.parametrize(
    ("evidence", "code", "headline"),
    [
        (
            decided(("a", Action.PROMOTE, "canary")),
            ExitCode.PASS,
            "Promote 1 of 1 route",
        ),
        (
            decided(("a", Action.PROMOTE, "canary"), ("b", Action.HOLD, "shadow")),
            ExitCode.JUDGED_BAD,
            "Hold 1, promote 1 of 2 routes",
        ),
        (
            decided(("a", Action.FALL_BACK, "canary"), ("b", Action.INCONCLUSIVE, "shadow")),
            ExitCode.JUDGED_BAD,
            "Fall back 1, inconclusive 1 of 2 routes",
        ),
        (
            decided(("a", Action.INCONCLUSIVE, "canary")),
            ExitCode.INCONCLUSIVE,
            "Inconclusive 1 of 1 route",
        ),
        (
            decided(("a", Action.INCONCLUSIVE, "canary"), error="a"),
            ExitCode.COULD_NOT_JUDGE,
            "Could not judge: inconclusive 1 of 1 route",
        ),
        (
            decided(("a", Action.PROMOTE, "canary"), ("b", Action.PROMOTE, "shadow")),
            ExitCode.PASS,
            "Promote 1, passes shadow 1 of 2 routes",
        ),
        (decided(), ExitCode.COULD_NOT_JUDGE, "Nothing decided"),
    ],
)
def test_headline_and_exit_code_follow_the_decisions(
    evidence: RunEvidence, code: ExitCode, headline: str
) -> None:
    """The worst decision gives the exit code, and the headline counts them."""
    view = build_view(evidence)
    assert view.exit_code == code
    assert view.exit_meaning == code.meaning
    assert view.headline == headline


def test_only_the_canary_promotes(tmp_path: Path) -> None:
    """A yes of an earlier stage says that the stage is passed, in all three files."""
    made = decided(("a", Action.PROMOTE, "replay"), ("a", Action.PROMOTE, "canary"))
    view, files = written(made, tmp_path)
    words = [line.mark.word for line in view.findings[0].decisions]
    assert words == ["passes replay", "promote"]
    assert "**passes replay**: why" in files["packet.md"]
    assert "**promote** after canary: why" in files["packet.md"]
    text = Page(files["packet.html"]).text
    assert "✓ passes replay: why" in text
    assert "promote after replay" not in text
    early = build_view(decided(("a", Action.PROMOTE, "shadow")))
    assert early.headline == "Passes shadow 1 of 1 route"
    assert "only the canary promotes" in early.summary


def test_a_later_yes_does_not_undo_an_earlier_no() -> None:
    """The worst decision on a route stands; among equals the latest."""
    found = final_decisions(
        decided(
            ("a", Action.HOLD, "replay"),
            ("a", Action.PROMOTE, "canary"),
            ("b", Action.PROMOTE, "canary"),
            ("b", Action.PROMOTE, "replay"),
        ).decisions
    )
    assert [(d.route, d.action, d.stage) for d in found] == [
        ("a", Action.HOLD, "replay"),
        ("b", Action.PROMOTE, "canary"),
    ]


def test_each_finding_shows_number_limit_and_reason(small: Written) -> None:
    """Rule, value with interval, limit, n, why and the worst receipts stand in the page."""
    text = Page(small[1]["packet.html"]).text
    for part in (
        "max_tpot_p95_regression",
        "1.42",
        "[1.22, 1.66]",
        "TPOT p95 +42%",
        "receipt:gone: not among this packet's receipts",
        "About 147 more requests would decide it.",
        "1 shown, not counted",
    ):
        assert part in text, part


def test_a_promotion_names_its_proposal_length(small: Written) -> None:
    """The verdict says with which k a route may run."""
    assert "json-extract (k = 4) and support-chat (k = 4)" in small[0].summary


def test_secrets_do_not_reach_the_packet(small: Written) -> None:
    """Keys in settings, in arguments and in URLs are withheld from all three files."""
    for name, text in small[1].items():
        assert "sk-never-shown" not in text, name
        assert "hunter2" not in text, name
    assert "SPECCHECK_KEY" in small[1]["packet.html"]


def test_differences_between_the_arms_say_whether_they_were_waived(small: Written) -> None:
    """A waived difference and one that is not are told apart in words."""
    lines = {line.key: line.waived for line in small[0].comparison.differences}
    assert lines == {"max_num_seqs": "", "scheduler.policy": "waived by name"}
    assert "NOT waived" in small[1]["packet.html"]


def test_the_limits_of_the_proof_are_this_runs_own() -> None:
    """Without regressions the bound on the true rate is printed, with the number of cases."""
    plain = data.small()
    replay = plain.stages["replay"]
    clean = {**replay, "evidence": {**replay["evidence"], "regressions": []}}
    view = build_view(replace(plain, stages={**plain.stages, "replay": clean}))
    text = " ".join(pages._sentence(sentence) for sentence in view.not_proved)
    assert "No regression case in 540 checked cases" in text
    # 1 - 0.05 ** (1 / 540), by hand
    assert "0.553 %" in text
    assert "not a better model" in text
    assert "not GPU figures" in text


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (0.5499, 0.55, "54.99 %"),
        (0.55, 0.55, "55.0 %"),
        (0.5501, 0.55, "55.01 %"),
        (0.99996, None, "99.996 %"),
        (1.0, None, "100 %"),
        (0.00004, None, "0.00400 %"),
        (0.0, None, "0 %"),
    ],
)
def test_rounding_turns_no_miss_into_a_hit(value: float, limit: float | None, shown: str) -> None:
    """A share stays on its side of its limit, of nothing and of everything."""
    assert pages.figure(Figure("", value, "share"), limit) == shown


@given(
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.sampled_from([0, 2, 3]),
)
def test_a_rounded_number_is_on_the_same_side_of_the_limit(
    value: float, limit: float, shift: int
) -> None:
    """Below stays below, above stays above, equal stays equal."""
    shown = Decimal(pages.rounded(value, [limit], shift=shift).replace(",", "").replace("−", "-"))
    bound = Decimal(repr(limit)).scaleb(shift)
    exact = Decimal(repr(value)).scaleb(shift)
    assert (shown < bound, shown > bound) == (exact < bound, exact > bound)


@given(st.floats(1e-6, 1e6))
def test_a_rounded_number_is_the_number_to_three_digits(value: float) -> None:
    """Without a limit nothing is lost but digits after the third."""
    shown = float(pages.rounded(value).replace(",", ""))
    assert math.isclose(shown, value, rel_tol=0.0051)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.5, 1.25, "0.700 [0.500, 1.25]"),
        (None, 1.25, "0.700 [no bound, 1.25]"),
        (0.5, 1.0996, "0.700 [0.500, 1.0996]"),
        (0.7, 0.7, "0.700"),
    ],
)
def test_an_interval_shows_each_bound_on_its_side(
    low: float | None, high: float | None, shown: str
) -> None:
    """Bounds are rounded against the limit too, and a bound that does not exist is said."""
    value = Interval(0.7, low, high, 100, "bootstrap", 0.05, "ratio")
    assert pages.interval(value, 1.1) == shown


@pytest.mark.parametrize(
    ("limit", "unit", "shown"),
    [
        (1 / 1.05, "ratio", "0.9524"),
        (0.55, "share", "55 %"),
        (0.01, "share", "1 %"),
        (1.1, "ratio", "1.1"),
        (12345, "count", "12,345"),
        (0, "count", "0"),
    ],
)
def test_a_limit_has_four_digits_at_most(limit: float, unit: str, shown: str) -> None:
    """No digits are printed that nobody needs, and no zeros behind the last."""
    assert pages.limit_text(limit, unit) == shown
    far = Interval(limit + 1, limit + 0.5, None, 100, "bootstrap", 0.05, unit)
    assert pages.limit_text(limit, unit, far) == shown


@pytest.mark.parametrize(
    ("value", "low", "limit", "shown"),
    [
        (0.9524, 0.9, "0.95238", "0.9524 [0.900, 0.960]"),
        (0.95238, 0.9, "0.9524", "0.952 [0.900, 0.960]"),
        (0.955, 0.952381, "0.95238", "0.955 [0.9524, 0.960]"),
    ],
)
def test_a_limit_has_as_many_digits_as_its_neighbours_need(
    value: float, low: float, limit: str, shown: str
) -> None:
    """What is printed beside a limit lies on its side of what is printed of the limit."""
    near = Interval(value, low, 0.96, 100, "bootstrap", 0.05, "ratio")
    assert pages.limit_text(1 / 1.05, "ratio", near) == limit
    assert pages.interval(near, 1 / 1.05) == shown


@given(st.floats(0.001, 1000), st.floats(0.001, 1000), st.sampled_from(["ratio", "share", "ms"]))
def test_a_printed_value_lies_on_its_side_of_the_printed_limit(
    value: float, limit: float, unit: str
) -> None:
    """Also for a value a hair from its limit, whatever both are cut to."""
    for near in (value, limit * (1 + 1e-7), math.nextafter(limit, math.inf), limit):
        one = Interval(near, near, near, 100, "count", 0.05, unit)
        texts = pages.interval(one, limit), pages.limit_text(limit, unit, one)
        shown, bound = (Decimal(re.sub(r"[^0-9.]", "", text)) for text in texts)
        assert (shown < bound, shown > bound) == (near < limit, near > limit), texts


def test_a_missing_figure_says_why() -> None:
    """The reason stands in the cell."""
    assert pages.figure(Missing("n 3 is under 20")) == "not measured: n 3 is under 20"


def test_a_cohort_of_few_prompts_says_why_its_ratios_have_no_limits() -> None:
    """Beside the ratios that lack them, with what mends it; from five on there is no need."""
    for prompts, said in ((1, "1 prompt,"), (4, "4 different prompts,"), (5, "")):
        row = replace(data.matrix_rows()[0], n_prompts=prompts)
        evidence = replace(data.small(), matrix=[row])
        shown = build_view(evidence).matrix
        assert not isinstance(shown, Missing)
        for group in shown.rows[0].latency:
            whys = [line.not_measured for line in group.lines if isinstance(line, Missing)]
            told = [why for why in whys if why.startswith("no limits: these are of")]
            assert len(told) == bool(said)
            assert all(said in why and "give the route more prompts" in why for why in told)


# --- hostile texts ------------------------------------------------------------------------------


def test_hostile_texts_make_no_elements(hostile: Written, small: Written) -> None:
    """The hostile page has the elements of the tame one and no others, and no handlers."""
    page, tame = Page(hostile[1]["packet.html"]), Page(small[1]["packet.html"])
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in tame.elements} | {"wbr"}
    names = {name for _, attrs in page.elements for name in attrs}
    assert not [name for name in names if name.startswith("on")]
    assert {v for v in page.attributes("href") if not v.startswith("#")} == {"data:,"}


def test_hostile_texts_stay_readable(hostile: Written) -> None:
    """Each hostile text stands in the page as it was written, what hides in it made visible."""
    text = re.sub(r"\s+", " ", Page(hostile[1]["packet.html"]).text)
    for one in data.HOSTILE:
        shown = re.sub(r"\s+", " ", pages.visible(one)).strip()
        assert shown[:1000] in text, shown[:80]


@pytest.mark.parametrize("name", ["packet.html", "packet.md"])
def test_nothing_hides_in_a_page(hostile: Written, name: str) -> None:
    """No control, invisible or direction-turning character is left."""
    left = set(pages._HIDDEN.findall(hostile[1][name]))
    assert left == set()


def test_templates_in_texts_are_not_run(hostile: Written) -> None:
    """A text that looks like a template is printed as it is."""
    assert "{{7*7}} {% raw %} ${7*7} #{7*7}" in hostile[1]["packet.html"]
    assert "{{7*7}} {% raw %} ${7*7} #{7*7}" in hostile[1]["packet.json"]


def test_markdown_can_be_read_in_a_terminal(small: Written) -> None:
    """The first screen has the exit code and every route's verdict; numbers carry no escapes."""
    view, files = small
    first = "\n".join(files["packet.md"].splitlines()[:18])
    assert "**Exit code 1**" in first
    for line in view.routes:
        assert f"**{line.mark.word}** {line.route}" in first
    assert "min_acceptance_rate, shadow: concurrency 4: 54.7 % [54.4, 54.99]" in files["packet.md"]
    shown = {text: str(pages._for_markdown(text)) for text in ("prompt <64", "prompt >=4096")}
    assert all(text == kept for text, kept in shown.items())
    for text in ("<b", "a <", "</b>", "> quote", "_a_", "a_", "<!--", "<?", "__x__"):
        assert pages._for_markdown(text) != text


def test_hostile_markdown_makes_no_markup(hostile: Written) -> None:
    """Rendered, the Markdown has no HTML, link, image or code that a text brought along."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    kinds: Counter[str] = Counter()
    for token in parser.parse(hostile[1]["packet.md"]):
        kinds[token.type] += 1
        for child in token.children or []:
            kinds[child.type] += 1
    assert not {"html_block", "html_inline", "link_open", "image", "code_inline"} & set(kinds)


def test_markdown_tables_keep_their_columns(hostile: Written) -> None:
    """Pipes and line breaks in texts do not add cells or rows."""
    columns = 0
    fenced = ""
    for line in hostile[1]["packet.md"].splitlines():
        fence = re.match(r"`{3,}", line)
        if fence and not fenced:
            fenced = fence[0]
        elif fenced and line == fenced:
            fenced = ""
        elif fenced:
            continue
        elif line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", re.sub(r"\\\\", "", line))) - 1
            if columns:
                assert cells == columns, line[:200]
            columns = cells
        else:
            columns = 0
    assert not fenced


def test_texts_of_models_are_fenced(hostile: Written) -> None:
    """A fence in an answer does not end the block it stands in."""
    fences = MarkdownIt("commonmark").parse(hostile[1]["packet.md"])
    blocks = [token.content for token in fences if token.type == "fence"]
    assert len(blocks) == 2 * len(data.REGRESSIONS)
    text = "| a | b |\n```fence```\n````\nstill inside"
    (block,) = [t for t in MarkdownIt().parse(str(pages._fence(text))) if t.type == "fence"]
    assert block.content == f"{text}\n"


def test_hostile_json_is_json(hostile: Written) -> None:
    """Texts come out of packet.json as they went in, lone surrogates apart."""
    plain = json.loads(hostile[1]["packet.json"])
    assert plain["run_id"].startswith("run:4f1c0a9b7d2e3344aa55")
    assert any(text in hostile[1]["packet.json"] for text in ("<script>window.pwned=1</script>",))
    assert "\ud800" not in hostile[1]["packet.json"]


# --- charts and colours -------------------------------------------------------------------------


def test_each_chart_says_in_words_and_numbers_what_it_shows(small: Written) -> None:
    """Every chart is an image with a title, a description and a table of its numbers."""
    page = small[1]["packet.html"]
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) >= 10
    for picture in pictures:
        assert 'role="img"' in picture
        assert re.search(r"<title id=\"[^\"]+\">[^<]{5,}</title>", picture)
        assert re.search(r"<desc id=\"[^\"]+\">[^<]{20,}</desc>", picture)
        assert "<style" not in picture
        assert "<metadata" not in picture
    assert page.count("<summary>The numbers</summary>") == len(pictures)


def test_a_chart_label_cannot_break_out_of_its_picture() -> None:
    """Labels with markup, dollar signs or controls are drawn as text."""
    ratio = charts.Ratio("</text><script>1</script> $\\frac$", 1.2, None, 1.3, "bad")
    svg = charts.draw(charts.Ratios((ratio,), 1.1, "axis"), 'a"b', "<i>", "</desc><script>")
    assert "<script" not in svg
    assert "&lt;script&gt;1&lt;/script&gt; $\\frac$" in svg


def test_a_chart_draws_what_fonts_cannot() -> None:
    """Controls and lone surrogates in a label are made visible before they are drawn."""
    ratio = charts.Ratio("a\ud800b\x1b\u202ec", 1.2, 1.1, 1.3, "good")
    table = models.ChartTable(("n",), ((1,),))
    picture = charts.Ratios((ratio,), 1.1, "ratio")
    svg = str(pages._chart(models.Chart("name", "title", "description", table, picture)))
    assert "a⟨U+D800⟩b␛⟨U+202E⟩c" in svg


def css_colours(scheme: str) -> dict[str, str]:
    """The colour variables of one scheme."""
    css = (ROOT / "templates" / "packet.css").read_text(encoding="utf-8")
    light, dark, *_ = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    return (
        found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark)) if scheme == "dark" else found
    )


def contrast(a: str, b: str) -> float:
    """WCAG 2.2 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_on_their_background(scheme: str) -> None:
    """Text has a contrast of at least 4.5, marks of charts at least 3, in both colour schemes."""
    colours = css_colours(scheme)
    grounds = ["page", "panel", *(f"{tone}-bg" for tone in ("good", "bad", "unsure", "broken"))]
    for text in ("ink", "faint", "good", "bad", "unsure", "broken", "link"):
        for ground in grounds:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("arm-target", "arm-spec", "bad"):
        assert contrast(colours[mark], colours["page"]) >= 3, mark


def test_the_contrast_check_can_fail() -> None:
    """Black on white is 21, grey on white is too little."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#999999", "#ffffff") < 4.5


def test_verdicts_do_not_rest_on_colour(small: Written) -> None:
    """Each mark has a word and a symbol, and no two verdicts share a symbol in one column."""
    marks = re.findall(
        r'<span class="mark \w+"><span class="symbol" aria-hidden="true">(.)</span> ([^<]+)</span>',
        small[1]["packet.html"],
    )
    assert len(marks) > 30
    symbols = {word: symbol for symbol, word in marks}
    for group in (("pass", "inconclusive", "error", "fail"), ("promote", "hold", "fall back")):
        used = [symbols[word] for word in group]
        assert len(set(used)) == len(used)


def test_why_there_is_no_noise_floor_is_said():
    """A server without log-probabilities is named as the reason, not that nobody asked."""
    why = "the server gave no log-probabilities (HTTP 400)"
    floor = dict.fromkeys(("pairs", "tokens", "diverged", "flipped", "positions"), 0)
    floor |= {"tau": None, "content_missed": None, "axes": [], "why_no_tau": why}
    found = outputs._noise_floor({"noise_floor": floor})
    assert found.tau == Missing(why)
