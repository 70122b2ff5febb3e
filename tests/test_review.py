"""Pairs of answers shown without their arms: sheets that come back whole, and a judge that is asked
in both orders.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import stat
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_receipts import receipt
from scripted_server import Script, ScriptedServer, refusal

from speccheck.cli import main
from speccheck.corpus import load_corpus
from speccheck.errors import EngineError, UsageError
from speccheck.grading import review
from speccheck.grading.blind import AnswerPair, draw, first_arm, preferred, summarise
from speccheck.grading.judge import judge_pair, messages, verdict_in
from speccheck.records import Answer, Arm, Preference
from speccheck.replay import preferences
from speccheck.store import Run, Store

RUN = "run:abc"


def pair(number: int, target: str = "good answer", speculative: str = "bad answer") -> AnswerPair:
    chat = ({"role": "user", "content": f"question {number}"},)
    return AnswerPair(f"greedy:p{number}:0", "chat", "chat", chat, target, speculative)


PAIRS = [pair(i, f"target text {i}", f"other text {i}") for i in range(40)]


def export(tmp_path, pairs=PAIRS, n=50, key="k"):
    sheet = review.make_sheet(RUN, pairs, n, key)
    review.write(review.key_path(tmp_path, sheet.sheet_id), review.key_json(sheet), mode=0o600)
    return sheet


def filled(text: str, verdict, *, delimiter: str = ",", **cells) -> str:
    """The exported CSV with a verdict in each row (a text, or a function of the row)."""
    rows = list(csv.DictReader(io.StringIO(text)))
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys(), delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        told = verdict(row) if callable(verdict) else verdict
        writer.writerow(row | {"verdict": told} | cells)
    return out.getvalue()


def read(tmp_path, text: str, encoding: str = "utf-8"):
    path = tmp_path / "ada.csv"
    path.write_bytes(text.encode(encoding))
    return review.read_sheet(path, tmp_path, "ada")


# --- sheets -------------------------------------------------------------------------------------


def test_the_sheet_does_not_tell_the_arms(tmp_path):
    """Neither form names an arm, and either arm stands first about as often."""
    sheet = export(tmp_path, [pair(i, f"A{i}", f"B{i}") for i in range(200)], n=200)
    for text in (review.sheet_csv(sheet), review.sheet_html(sheet)):
        assert not any(word in text for word in ("target", "speculative", "greedy:p", "p1:0"))
    first = [row.first for row in sheet.rows]
    assert 70 < first.count(Arm.TARGET_ONLY) < 130
    assert [row.pair_id for row in sheet.rows] != sorted(row.pair_id for row in sheet.rows)
    key = review.key_path(tmp_path, sheet.sheet_id)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_same_key_draws_the_same_sheet():
    """Another key draws other rows, in another order, with other coins."""
    a, b, c = (review.make_sheet(RUN, PAIRS, 10, key) for key in ("k", "k", "other"))
    assert a == b
    assert a.sheet_id != c.sheet_id
    assert [r.pair_id for r in a.rows] != [r.pair_id for r in c.rows]


def test_equal_answers_are_not_asked_about():
    """There is nothing to prefer in them; a sheet without a row is an error with its reason."""
    assert draw([pair(1, "same", " same\n"), pair(2)], 9, "k") == [pair(2)]
    with pytest.raises(UsageError, match="all 1 pairs of answers are equal"):
        review.make_sheet(RUN, [pair(1, "x", "x")], 9, "k")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_verdicts_come_back_for_the_right_arm(tmp_path, delimiter, encoding):
    """A reviewer who prefers the target's text wherever it stands prefers target-only each time."""
    sheet = export(tmp_path)

    def verdict(row):
        return "1" if row["answer_1"].startswith("target") else "2"

    text = filled(review.sheet_csv(sheet), verdict, delimiter=delimiter, comment="  well\nsaid ")
    _, given_back = read(tmp_path, text, encoding)
    assert {p.verdict for p in given_back} == {"target_only"}
    assert {p.pair_id for p in given_back} == {p.pair_id for p in PAIRS}
    assert {(p.source, p.who, p.note) for p in given_back} == {("human", "ada", "well said")}


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.tuples(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40)),
        min_size=1,
        max_size=4,
    ),
    verdict=st.sampled_from(["1", "2", "tie", " TIE ", "1.0"]),
)
def test_any_text_survives_the_sheet(tmp_path_factory, texts, verdict):
    """Whatever the answers hold, the row comes back as it was, with its verdict."""
    tmp_path = tmp_path_factory.mktemp("sheet")
    pairs = [pair(i, a, b) for i, (a, b) in enumerate(texts)]
    if not any(p.differs for p in pairs):
        return
    sheet = export(tmp_path, pairs)
    _, given_back = read(tmp_path, filled(review.sheet_csv(sheet), verdict))
    expected = {
        row.pair_id: preferred(row.first, verdict.strip().lower().removesuffix(".0"))
        for row in sheet.rows
    }
    assert {p.pair_id: p.verdict for p in given_back} == expected


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+1", "-1 of", "@SUM(A1)", "\t=1", "\r=1", "  =HYPERLINK(1)", "＝1+1", "|calc", "%0A"],
)
def test_no_cell_is_a_formula(tmp_path, text):
    """A model's text cannot run in a spreadsheet, in any column, and still reads back."""
    chat = ({"role": "user", "content": text},)
    hostile = AnswerPair("g:p:0", text, "chat", chat, text, f"{text} too")
    sheet = export(tmp_path, [hostile])
    told = review.sheet_csv(sheet)
    for row in csv.reader(io.StringIO(told)):
        for cell in row:
            assert not cell.lstrip()[:1] or cell.lstrip()[0] not in "=+-@＝＋－＠|%", cell
    assert len(read(tmp_path, filled(told, "tie"))[1]) == 1


def test_the_page_escapes_everything(tmp_path):
    """Markup of a user or a model is text, also in the task's name."""
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    chat = ({"role": "user", "content": evil},)
    page = review.sheet_html(export(tmp_path, [AnswerPair("g", evil, "r", chat, evil, "x" + evil)]))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") == 4


def test_long_answers_are_cut_with_a_word(tmp_path):
    """A cell stays under what spreadsheets hold, and says how much is missing."""
    sheet = export(tmp_path, [pair(1, "x" * 100_000, "y")])
    assert max(len(text) for text in sheet.rows[0].texts.values()) < 32_767
    assert "[70000 more characters]" in review.sheet_csv(sheet)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda t: t.replace("target text 7", "target text 8!"), ["was edited", "line "]),
        (lambda t: t + t.splitlines()[3] + "\n", ["already in line 4"]),
        (lambda t: "\n".join(t.splitlines()[:-2]), ["2 rows of sheet", "are missing", "put them"]),
        (lambda t: t.replace("-005,", "-999,"), ["-999' is not in sheet", "1 rows of sheet"]),
        (lambda t: filled(t, "yes"), ["verdict 'yes'; write 1, 2 or tie", "and 32 more"]),
        (lambda t: filled(t, ""), ["no row has a verdict yet"]),
        (lambda t: t.replace("verdict", "opinion"), ["must name the columns row and verdict"]),
        (lambda _: "row,verdict\n", ["no rows in it"]),
        (lambda _: "row,verdict\nx,1\n", ["no row id of a sheet"]),
        (lambda _: "row,verdict\n0abcde-001,1\n", ["sheet 0abcde has no key", "--out"]),
        (lambda _: "", ["it has nothing"]),
    ],
)
def test_what_is_wrong_with_a_sheet_is_said_with_its_line(tmp_path, break_it, words):
    """Edited, doubled, missing and unknown rows are refused; nothing of the file is taken."""
    text = break_it(filled(review.sheet_csv(export(tmp_path)), "tie").replace("\r\n", "\n"))
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    for word in words:
        assert word in str(error.value)
    assert "ada.csv" in str(error.value)


def test_a_sheet_that_is_no_text_or_no_file(tmp_path):
    """Another encoding and a missing file are named."""
    path = tmp_path / "x.csv"
    path.write_bytes("row,verdict\né".encode("utf-16"))
    with pytest.raises(UsageError, match="not UTF-8; save it as 'CSV UTF-8'"):
        review.read_sheet(path, tmp_path, "x")
    with pytest.raises(UsageError, match="cannot be read"):
        review.read_sheet(tmp_path / "none.csv", tmp_path, "x")


def test_rows_may_stay_open(tmp_path):
    """An empty verdict is no verdict, and no error."""
    text = filled(
        review.sheet_csv(export(tmp_path)), lambda row: "tie" if row["row"].endswith("1") else ""
    )
    assert len(read(tmp_path, text)[1]) == 4


# --- the commands -------------------------------------------------------------------------------

CORPUS = [
    {
        "id": f"p{i}",
        "task": "chat",
        "route": "chat",
        "messages": [{"role": "user", "content": f"question {i}"}],
        "max_tokens": 8,
        **({"follow_up": ["and then?"]} if i == 0 else {}),
    }
    for i in range(6)
]


@pytest.fixture
def folder(tmp_path):
    """A run that was replayed: six prompts, one of them with a second turn, both arms answered."""
    (tmp_path / "rollout.yaml").write_text(
        "name: x\nspeculation: {method: ngram, num_speculative_tokens: 2}\n"
        "corpus: {paths: [c.jsonl]}\nroutes: [{name: chat}]\n"
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(p) + "\n" for p in CORPUS))
    out = tmp_path / "out"
    out.mkdir()
    config = {"rollout": {"routes": [{"name": "chat"}]}}
    with Store.open(out / "receipts.duckdb") as store:
        digest = load_corpus([tmp_path / "c.jsonl"]).digest
        run = Run(RUN, 1, 0, digest, "rules", config)
        store.begin_run(run, wall_ns=1, clock_ns=1)
        for i, name in enumerate(["p0", "p1", "p2", "p3", "p4", "p5", "p0#2"]):
            for arm in Arm:
                made = receipt(
                    i, arm, phase="greedy", stage="replay", prompt_id=name, run_id=RUN,
                    pair_id=f"greedy:{name}:0",
                )  # fmt: skip
                text = "first turn" if name == "p0" else f"{arm} says {name}"
                store.append_receipts([(made, Answer(made.receipt_id, text, None))])
    return tmp_path


@pytest.fixture
def run_cli(folder, capsys, monkeypatch):
    """The command line in this process, with its exit code and what it said."""
    monkeypatch.chdir(folder)

    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        assert "Traceback" not in said.err
        return said

    return run


def test_a_sheet_goes_out_and_its_verdicts_come_back(folder, run_cli):
    """Export, fill in, import; `decide` and the packet show what people preferred."""
    told = run_cli("review", "export", "s.csv", "--out", "out").out
    assert "wrote s.csv: 6 of 6 pairs that differ" in told
    text = (folder / "s.csv").read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum("and then?" in row["prompt"] for row in rows) == 1, "a turn comes with its history"
    assert sum("[assistant] first turn" in row["prompt"] for row in rows) == 1
    back = filled(text, lambda row: "1" if row["answer_1"].startswith("speculative") else "2")
    (folder / "ada.csv").write_text(back)
    told = run_cli("review", "import", "ada.csv", "--out", "out", "--json").out
    (one,) = json.loads(told)["preferences"]
    assert (one["who"], one["n"], one["speculative"], one["target_only"]) == ("ada", 6, 6, 0)
    decided = json.loads(run_cli("decide", "--out", "out", "--json", code=4).out)
    assert decided["preferences"] == [one]
    page = run_cli("decide", "--out", "out", code=4).out
    assert "human ada (information only): 0 prefer target-only, 6" in page.replace("\n", " ")


def test_what_cannot_be_reviewed_is_one_line(folder, run_cli):
    """No run there, other prompts than the run's, an unknown ending, a key that is not set."""
    run_cli("review", "export", "s.csv", "--out", "none", code=4)
    run_cli("review", "export", "s.txt", "--out", "out", code=2)
    judge = ("judge", "--out", "out", "--url", "http://127.0.0.1:9", "--model", "m")
    assert "NO_KEY is not set" in run_cli(*judge, "--api-key-env", "NO_KEY", code=2).err
    assert "the judge did not answer" in run_cli(*judge, code=4).err
    (folder / "c.jsonl").write_text(json.dumps(CORPUS[1]) + "\n")
    done = run_cli("review", "export", "s.csv", "--out", "out", code=2)
    assert "no run was made of these prompts" in done.err


# --- summary ------------------------------------------------------------------------------------


def test_a_summary_has_its_interval():
    """Golden: 8 prefer the target, 2 the other, 200 pairs: Tango's 95 % interval of STATS 4.5."""
    told = ["target_only"] * 8 + ["speculative"] * 2 + ["tie"] * 190 + ["unclear"]
    given_back = [Preference("judge", "m", f"p{i}", verdict) for i, verdict in enumerate(told)]
    (one,) = summarise(given_back, alpha=0.025)
    assert (one.n, one.ties, one.unclear) == (200, 190, 1)
    assert one.difference.value == pytest.approx(0.030)
    assert (one.difference.low, one.difference.high) == pytest.approx((-0.00121, 0.06840), abs=1e-5)
    assert one.p_value == pytest.approx(0.0547, abs=1e-4)


def test_the_last_verdict_on_a_pair_stands(tmp_path):
    """A second import of the same reviewer replaces nothing in the store, and is what counts."""
    with Store.open(tmp_path / "s.duckdb") as store:
        for verdict in ("tie", "speculative"):
            told = [Preference("human", "ada", "p", verdict, "why")]
            store.put_preferences(RUN, told, given_at_ns=1)
        store.put_preferences(RUN, [Preference("human", "bob", "p", "tie")], given_at_ns=2)
        assert [(p.who, p.verdict) for p in store.preferences(RUN)] == [
            ("ada", "speculative"),
            ("bob", "tie"),
        ]
        assert store.preferences("run:other") == []


# --- judge --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"winner": "1", "why": "right"}', "1"),
        ('Let me see.\n```json\n{"winner": "2"}\n```', "2"),
        ('{"winner": 2}', "2"),
        ('{"winner": "Answer 1"}', "1"),
        ('{"winner": "tie"} or rather {"winner": "1"}', "1"),
        ("tie", "tie"),
        ('"2".', "2"),
        ("I prefer the first one.", None),
        ('{"winner": "3"}', None),
        ('{"winner":', None),
        ("", None),
    ],
)
def test_verdict_in_a_reply(reply, verdict):
    """The last JSON object with a winner, or the bare word; anything else is no verdict."""
    assert verdict_in(reply) == verdict


def judged(reply, **texts):
    """What comes of a judge that is a function of the messages."""

    async def ask(asked):
        return reply(asked)

    return asyncio.run(judge_pair(ask, pair(1, **texts), who="m"))


def second_good(asked):
    text = asked[1]["content"]
    return "2" if text.index("good answer") > text.index("bad answer") else "1"


def test_a_judge_must_agree_with_itself():
    """Who prefers a text in both orders is believed, who prefers a place has found a tie."""
    assert judged(second_good).verdict == "target_only"
    first = judged(lambda _: '{"winner": "1"}')
    assert first.verdict == "tie"
    assert first.note == "shown in the other order: target_only, then speculative"
    assert judged(lambda _: "tie").verdict == "tie"
    unclear = judged(lambda _: "Hm\x1b[31m")
    assert unclear.verdict == "unclear"
    assert "\x1b" not in unclear.note


def test_what_a_judge_reads_cannot_close_its_own_marker():
    """Markers are drawn anew for each question, and nothing names the arms."""
    asked = [messages(pair(1), arm) for arm in Arm for _ in range(2)]
    assert len({m[1]["content"] for m in asked}) == 4
    assert not any(w in json.dumps(m) for m in asked for w in ("speculative", "target"))


def completion(text: str, status: int = 200) -> Script:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return Script([json.dumps(body).encode()], status=status, content_type="application/json")


def ask_judge(server, store, pairs, n=50, **how):
    run = SimpleNamespace(run_id=RUN, store=store)
    at = preferences.Judge(server.url + "/v1", "big", how.pop("api_key", None), **how)
    told = []
    left = asyncio.run(preferences.judge(run, at, pairs, n, told.append))
    return told, left


def test_the_judge_is_asked_twice_per_pair_and_once_in_all(tmp_path):
    """Two questions a pair; the key goes into the header and nowhere else; a rerun asks nothing."""
    pairs = [pair(i, f"good answer {i}", f"bad answer {i}") for i in range(6)]
    with (
        ScriptedServer(lambda body, _: completion(second_good(body["messages"]))) as server,
        Store.open(tmp_path / "s.duckdb") as store,
    ):
        told, left = ask_judge(server, store, pairs, n=4, api_key="sk-secret", concurrency=2)
        assert (len(told), left, len(server.seen)) == (4, 0, 8)
        assert {p.verdict for p in store.preferences(RUN)} == {"target_only"}
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer sk-secret"}
        assert {seen.body["temperature"] for seen in server.seen} == {0}
        ask_judge(server, store, pairs, n=4)
        assert len(server.seen) == 8
        ask_judge(server, store, pairs, n=6)
        assert len(server.seen) == 12
    assert b"sk-secret" not in (tmp_path / "s.duckdb").read_bytes()


def test_a_judge_that_fails_now_and_then_is_asked_again(tmp_path):
    """A pair without an answer has no verdict, and the next command asks it again."""
    down = {"now": True}

    def script(body, n):
        broken = down["now"] and n < 2
        return refusal(500, "overloaded sk-secret") if broken else completion("tie")

    with ScriptedServer(script) as server, Store.open(tmp_path / "s.duckdb") as store:
        told, left = ask_judge(server, store, PAIRS[:4], concurrency=1)
        assert (len(told), left) == (3, 1)
        down["now"] = False
        told, left = ask_judge(server, store, PAIRS[:4], concurrency=1)
        assert (len(told), left) == (1, 0)
        assert len(store.preferences(RUN)) == 4


def test_a_judge_that_is_down_ends_in_one_error(tmp_path):
    """After five pairs in a row it is asked no more; the error says why, without the key."""
    with (
        ScriptedServer(lambda *_: refusal(401, "bad key sk-secret")) as server,
        Store.open(tmp_path / "s.duckdb") as store,
    ):
        with pytest.raises(EngineError, match="HTTP 401") as error:
            ask_judge(server, store, PAIRS, api_key="sk-secret", concurrency=1)
        assert "sk-secret" not in str(error.value)
        assert len(server.seen) <= 2 * preferences.GIVE_UP_AFTER


def test_a_judge_that_never_answers_is_not_waited_for(tmp_path):
    """Its time is limited."""
    with (
        ScriptedServer(lambda *_: Script([30.0])) as server,
        Store.open(tmp_path / "s.duckdb") as store,
        pytest.raises(EngineError, match=r"no answer within 0\.2 s"),
    ):
        ask_judge(server, store, PAIRS[:1], timeout_s=0.2)


def test_the_coin_is_fair_and_the_holder_of_the_key_can_toss_it_again():
    """Either arm comes first in about half of many pairs."""
    tossed = [first_arm("key", f"p{i}") for i in range(2000)]
    assert 900 < tossed.count(Arm.SPECULATIVE) < 1100
    assert tossed == [first_arm("key", f"p{i}") for i in range(2000)]
