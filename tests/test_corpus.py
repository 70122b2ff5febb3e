"""Prompt files: read, written, imported, refused with file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speccheck.corpus import Corpus, import_prompts, load_corpus, unrepresentative, write_corpus
from speccheck.errors import StoreError, UsageError
from speccheck.records import Prompt

GOOD = {
    "id": "a",
    "task": "qa",
    "route": "chat",
    "priority": "protected",
    "language": "de",
    "output_band": "short",
    "max_tokens": 16,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße\u2028 🙂"},
    ],
    "check": {"kind": "exact", "answer": "4"},
    "stop": ["\n"],
    "response_format": {"type": "json_object"},
    "features": ["tools"],
    "follow_up": ["And then?"],
    "source": "by hand",
}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def write(path: Path, *lines: dict | str | bytes, end: bytes = b"\n") -> Path:
    encoded = [
        line
        if isinstance(line, bytes)
        else line.encode()
        if isinstance(line, str)
        else json.dumps(line, ensure_ascii=False).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + end for line in encoded))
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "c.jsonl"


def load(path: Path, *lines, **options) -> Corpus:
    return load_corpus([write(path, *lines)], **options)


# --- native -------------------------------------------------------------------------------------


def test_every_field_of_a_line_becomes_one_of_the_prompt(path):
    """Nothing is dropped and nothing invented."""
    assert load(path, GOOD).prompts == (
        Prompt(
            prompt_id="a",
            task="qa",
            route="chat",
            messages=tuple(GOOD["messages"]),
            max_tokens=16,
            check={"kind": "exact", "answer": "4"},
            priority="protected",
            language="de",
            output_band="short",
            stop=("\n",),
            response_format={"type": "json_object"},
            features=("tools",),
            follow_up=("And then?",),
            source="by hand",
        ),
    )


def test_defaults_are_the_plain_case(path):
    """A line with the required keys is normal English traffic without a check."""
    names = ("id", "task", "route", "messages", "max_tokens")
    prompt = load(path, {**{name: GOOD[name] for name in names}, "max_tokens": 79}).prompts[0]
    assert (prompt.priority, prompt.language, prompt.output_band) == ("normal", "en", "medium")
    assert prompt.check == {"kind": "none"}


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_line_end(path):
    """Files from other systems are read alike; U+2028 in a prompt ends no line."""
    second = {**GOOD, "id": "b"}
    unix = load(path, GOOD, second)
    lines = [json.dumps(value, ensure_ascii=False).encode() for value in (GOOD, second)]
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \n" + lines[1])
    assert load_corpus([path]) == unix
    assert len(unix.prompts) == 2


def without(name: str) -> dict:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (without("route"), "route missing"),
        ({**without("route"), "rout": "x"}, "route missing"),
        ({**GOOD, "langage": "en"}, "unknown langage; known: id, task"),
        ({**GOOD, "id": 7}, "id must be a text"),
        ({**GOOD, "id": " "}, "id is empty"),
        ({**GOOD, "max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({**GOOD, "max_tokens": True}, "max_tokens must be a whole number from 1"),
        ({**GOOD, "max_tokens": "16"}, "max_tokens must be a whole number from 1"),
        ({**GOOD, "priority": "high"}, "priority is 'high', must be one of normal, protected"),
        ({**GOOD, "output_band": ["short"]}, "output_band is"),
        ({**GOOD, "messages": []}, "messages must be a list with at least one"),
        ({**GOOD, "messages": [{"role": "user"}]}, r"messages\[0\] must have role and content"),
        ({**GOOD, "messages": [{"role": "me", "content": ""}]}, r"messages\[0\]: role is 'me'"),
        ({**GOOD, "messages": [{"role": "user", "content": 1}]}, "content must be a text"),
        ({**GOOD, "stop": "x"}, "stop must be a list of texts"),
        ({**GOOD, "stop": [""]}, "stop must be a list of texts"),
        ({**GOOD, "response_format": {"kind": 1}}, "response_format must be an object with a type"),
        ({**GOOD, "response_format": {"type": "json_schema"}}, "must have name and schema"),
        ('{"id": "b", "id": "c"}', "not JSON: key 'id' is there twice"),
        ('{"id": "b", "x": NaN}', "not JSON: NaN is not JSON"),
        ('{"id": "b"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('"text"', "a JSON object is expected"),
        (b'{"id": "\xff"}', "not UTF-8"),
        ('{"id": "\\ud800"}', "half a character"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(path, line, words):
    """The second line is broken, so the message starts with file:2."""
    with pytest.raises(UsageError, match=words) as caught:
        load(path, {**GOOD, "id": "first"}, line)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_ids_are_unique_in_a_file_and_across_files(path, tmp_path):
    """Receipts are keyed by prompt id, so two prompts of one id would be one."""
    with pytest.raises(UsageError, match=r"c.jsonl:2: id 'a' is already in line 1"):
        load(path, GOOD, GOOD)
    other = write(tmp_path / "d.jsonl", GOOD)
    with pytest.raises(UsageError, match=r"d.jsonl: id 'a' is already in .*c.jsonl"):
        load_corpus([write(path, GOOD), other])


def test_files_with_nothing_in_them(path, tmp_path):
    """Empty, missing and no files are usage errors, not an empty corpus."""
    for content in (b"", b"\n \n"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="no prompts in it"):
            load_corpus([path])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_corpus([tmp_path / "nope.jsonl"])
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_corpus([tmp_path])
    with pytest.raises(UsageError, match="no corpus files given"):
        load_corpus([])


def test_digest_is_of_content_and_order(path):
    """Any change of any field is another corpus; the file's name is not part of it."""
    one, two = load(path, GOOD), load(path, {**GOOD, "id": "b"})
    both = Corpus(one.prompts + two.prompts)
    assert both.digest == load(path, GOOD, {**GOOD, "id": "b"}).digest
    assert both.digest != Corpus(two.prompts + one.prompts).digest
    assert one.digest != Corpus((replace(one.prompts[0], source=""),)).digest
    assert load_corpus([write(path.with_name("x.jsonl"), GOOD)]).digest == one.digest


def test_limited_keeps_the_first_of_each_task(path):
    """Small runs see every task."""
    lines = [{**GOOD, "id": f"{i}", "task": "ab"[i % 2]} for i in range(6)]
    kept = load(path, *lines).limited(2).prompts
    assert [prompt.prompt_id for prompt in kept] == ["0", "1", "2", "3"]


# --- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [
        {"kind": "none"},
        {"kind": "exact", "answer": 4.5, "tolerance": 0.1},
        {"kind": "json"},
        {"kind": "json", "expect": {"a": 1}},
        {"kind": "json_schema", "schema": {}, "expect": 1},
        {"kind": "sql", "setup": "CREATE TABLE t (x INT)", "gold": "SELECT 1"},
        {"kind": "code", "tests": "assert True"},
        {"kind": "citations", "sources": ["K1"], "must_cite": ["K1"], "contains": ["x"]},
        {"kind": "regex", "pattern": "^a+$"},
        {"kind": "format", "max_words": 3, "starts_with": "- "},
        {"kind": "all", "checks": [{"kind": "any", "checks": [{"kind": "none"}]}]},
    ],
)
def test_good_checks_pass(path, check):
    """Each kind with its keys is taken as it is."""
    assert load(path, {**GOOD, "check": check}).prompts[0].check == check


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({}, "check.kind is None, must be one of none, exact"),
        ("exact", "check.kind is None"),
        ({"kind": ["exact"]}, r"check.kind is \['exact'\]"),
        ({"kind": "exact"}, "check of kind exact: answer missing"),
        ({"kind": "exact", "answer": ["4"]}, "answer must be a text or a number"),
        ({"kind": "json", "expects": 1}, "unknown expects; known: expect"),
        ({"kind": "none", "x": 1}, "unknown x; known: none"),
        ({"kind": "json_schema", "schema": "x"}, "schema must be an object"),
        ({"kind": "sql", "setup": "x"}, "gold missing"),
        ({"kind": "sql", "setup": 1, "gold": "x"}, "setup must be a text"),
        ({"kind": "code", "tests": " "}, "tests is empty"),
        ({"kind": "citations", "sources": "K1"}, "sources must be a list of texts"),
        ({"kind": "regex", "pattern": "("}, "kind regex: pattern: missing"),
        ({"kind": "regex", "pattern": 1}, "pattern must be a text"),
        ({"kind": "format"}, "give one of max_words"),
        ({"kind": "format", "max_words": "3"}, "max_words must be a whole number"),
        ({"kind": "format", "starts_with": 3}, "starts_with must be a text"),
        ({"kind": "all", "checks": []}, "checks must be a list with a check in it"),
        ({"kind": "any", "checks": [{"kind": "none"}, {"kind": "x"}]}, r"check.checks\[1\].kind"),
    ],
)
def test_bad_checks_are_refused(path, check, words):
    """A check with a typo would pass or fail everything."""
    with pytest.raises(UsageError, match=words):
        load(path, {**GOOD, "check": check})


# --- writing ------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
names = words.filter(str.strip)
prompts = st.builds(
    Prompt,
    prompt_id=names,
    task=names,
    route=names,
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": words}),
        min_size=1,
        max_size=3,
    ).map(tuple),
    max_tokens=st.integers(1, 10**6),
    check=st.sampled_from([{"kind": "none"}, {"kind": "regex", "pattern": "a|b"}]),
    priority=st.sampled_from(["normal", "protected"]),
    language=names,
    output_band=st.sampled_from(["short", "medium", "long"]),
    stop=st.lists(words, max_size=2).map(tuple),
    response_format=st.none() | st.just({"type": "json_object"}),
    features=st.lists(words, max_size=2).map(tuple),
    follow_up=st.lists(words, max_size=2).map(tuple),
    source=st.just("") | words,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(prompts, min_size=1, max_size=4, unique_by=lambda p: p.prompt_id))
def test_what_is_written_is_read_back(path, corpus):
    """Every field of every prompt, whatever characters are in it."""
    write_corpus(path, corpus)
    assert load_corpus([path]).prompts == tuple(corpus)


def test_writing_replaces_whole_or_not_at_all(path, tmp_path):
    """A failure leaves the old file and no partial one."""
    write(path, GOOD)
    before = path.read_bytes()

    def failing():
        yield load_corpus([path]).prompts[0]
        raise UsageError("stop")

    with pytest.raises(UsageError, match="stop"):
        write_corpus(path, failing())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        write_corpus(tmp_path / "no" / "x.jsonl", [])


# --- importers ----------------------------------------------------------------------------------


def test_spec_bench_keeps_ids_categories_and_later_turns(path):
    """The first turn is the prompt, later ones need its answer; extra keys are the data set's."""
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["x"]},
        {"question_id": "b", "category": "qa", "turns": ["Only."]},
    ]
    path.write_bytes(b"\n".join(json.dumps(line).encode() for line in lines))
    got = import_prompts(path, route="chat", max_tokens=64)
    assert [p.prompt_id for p in got] == ["81", "b"]
    assert [p.task for p in got] == ["writing", "qa"]
    assert [p.follow_up for p in got] == [("Two.",), ()]
    assert got[0].messages == ({"role": "user", "content": "One."},)
    assert (got[0].route, got[0].max_tokens, got[0].check) == ("chat", 64, {"kind": "none"})


def test_openai_batch(path):
    """Messages, limits, stops and structured output of a batch file are kept."""
    body = {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        "max_completion_tokens": 9,
        "stop": "X",
        "response_format": {"type": "json_object"},
        "temperature": 1,
    }
    line = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (prompt,) = import_prompts(write(path, line))
    assert prompt.prompt_id == "r-1"
    assert prompt.messages == ({"role": "user", "content": "ab"},)
    assert (prompt.max_tokens, prompt.stop) == (9, ("X",))
    assert prompt.response_format == {"type": "json_object"}


def test_lines(path):
    """Each line that is not blank is a prompt; its number is in its id."""
    got = import_prompts(write(path, "Say hi. ", "", "'Tis 5 > 4"))
    assert [(p.prompt_id, p.messages[0]["content"]) for p in got] == [
        ("c-1", "Say hi. "),
        ("c-3", "'Tis 5 > 4"),
    ]


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ({"prompt": "x"}, {}, "cannot tell the format from the keys prompt; known: native"),
        ("[{", {}, "looks like one JSON array"),
        ({"question_id": 1, "turns": []}, {}, "turns is empty"),
        ({"question_id": 1, "turns": "x"}, {}, "turns must be a list of texts"),
        ({"question_id": None, "turns": ["x"]}, {}, "question_id must be"),
        ({"custom_id": "x", "body": {}}, {}, "body must be an object with messages"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, {}, "only /v1/chat"),
        (
            {
                "custom_id": "x",
                "body": {"messages": [{"role": "user", "content": "a"}], "tools": [1]},
            },
            {},
            "body.tools cannot be imported",
        ),
        (
            {
                "custom_id": "x",
                "body": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            },
            {},
            "parts that are not text",
        ),
        ({"custom_id": "x", "body": {"messages": [], "max_tokens": 1}}, {}, "at least one message"),
        (GOOD, {"format": "spec_bench"}, "turns must be"),
        ("Say hi.", {"format": "native"}, "not JSON"),
        ("x", {"format": "sharegpt"}, "no format 'sharegpt'; there are: auto, native"),
    ],
)
def test_what_cannot_be_imported_says_why(path, line, options, words):
    """An importer refuses what it would otherwise change in silence."""
    with pytest.raises(UsageError, match=words):
        import_prompts(write(path, line), **options)


def test_an_import_can_be_written_and_read(path, tmp_path):
    """`corpus import` gives a file that `load_corpus` takes."""
    imported = import_prompts(write(path, {"question_id": 1, "turns": ["a", "b"]}))
    target = tmp_path / "out.jsonl"
    write_corpus(target, imported)
    assert load_corpus([target], format="native").prompts == imported


# --- workloads that are no sample of traffic ----------------------------------------------------


def test_random_ids_are_told_from_prompts() -> None:
    """T08: by their source, or by being nothing but numbers; a random sample of logs is none."""
    plain = Prompt("p", "chat", "chat", ({"role": "user", "content": "Hi"},), 64, {"kind": "none"})
    real = [
        replace(plain, prompt_id=f"r{i}", source="random sample of production logs")
        for i in range(20)
    ]
    named = [replace(plain, prompt_id=f"n{i}", source="random_token_ids") for i in range(8)]
    ids = ({"role": "user", "content": " ".join(map(str, range(100, 120)))},)
    bare = [replace(plain, prompt_id=f"b{i}", messages=ids) for i in range(8)]
    sums = replace(plain, messages=({"role": "user", "content": "Add 1, 2, 3 and 4 up."},))
    assert unrepresentative([*real, sums]) == ""
    assert unrepresentative([*real, named[0]]) == "", "one in twenty is no workload"
    assert unrepresentative([*real, *named]).startswith("8 of 28 prompts are random ids")
    assert "such as b0" in unrepresentative(bare)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"follow_up": ["a", "b"], "follow_checks": [{"kind": "none"}]}, "one check per follow_up"),
        ({"follow_up": ["a"], "follow_checks": [{"kind": "nope"}]}, "follow_checks[0].kind"),
        ({"follow_checks": [{"kind": "none"}]}, "one check per follow_up"),
        ({"group": 3}, "group must be a text"),
        ({"check": {"kind": "match", "answers": []}}, "answers is empty"),
        ({"check": {"kind": "contains"}}, "give one of all, any, none"),
        ({"check": {"kind": "number", "answer": "3"}}, "answer must be a number"),
        ({"check": {"kind": "refusal", "expected": "yes"}}, "must be true or false"),
        ({"check": {"kind": "config", "format": "xml"}}, "must be one of yaml, toml, ini, env"),
        ({"check": {"kind": "citations", "sources": ["a"], "quotes": 1}}, "with their texts"),
        ({"check": {"kind": "citations", "sources": {"a": 1}}}, "sources must be a list of texts"),
    ],
)
def test_new_fields_and_checks_are_checked_at_the_border(tmp_path, fields, words):
    """Later turns, groups and every kind of check: what is wrong is said with file and line."""
    line = {
        "id": "p",
        "task": "t",
        "route": "r",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
    }
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(line | fields) + "\n")
    with pytest.raises(UsageError) as error:
        load_corpus([path])
    assert words in str(error.value)
    assert "c.jsonl:1" in str(error.value)


def test_conversations_survive_writing(tmp_path):
    """Later turns, their checks and the group come back as they were."""
    made = Prompt(
        "p",
        "t",
        "r",
        ({"role": "user", "content": "x"},),
        5,
        {"kind": "none"},
        output_band="short",
        follow_up=("and?", "then?"),
        follow_checks=({"kind": "none"}, {"kind": "number", "answer": 3}),
        group="doc",
    )
    write_corpus(tmp_path / "c.jsonl", [made])
    assert load_corpus([tmp_path / "c.jsonl"]).prompts == (made,)
