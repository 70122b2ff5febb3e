"""Logs: every form that is read gives the same tokens, and a bad line is named or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck.engine.text import Tokenizer
from speccheck.errors import UsageError
from speccheck.logs import LoggedAnswer, Reading, open_tokenizer, read_batch_input

TOKENIZER = open_tokenizer("packaged")
MESSAGES = [{"role": "user", "content": "Name a city."}]
CHAT = TOKENIZER.encode(TOKENIZER.render_chat(MESSAGES), add_special_tokens=False)
ANSWER = TOKENIZER.encode("Paris is a city.", add_special_tokens=False)


def read(tmp_path: Path, *lines: Any, **options: Any) -> tuple[list[LoggedAnswer], Reading]:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8"
    )
    reading = Reading(lambda: TOKENIZER, **options)
    return list(reading.answers(path)), reading


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": CHAT},
        {"messages": MESSAGES},
        {"prompt": CHAT},
        {"prompt": TOKENIZER.render_chat(MESSAGES)},
    ],
)
@pytest.mark.parametrize("output", [{"output_token_ids": ANSWER}, {"output": "Paris is a city."}])
def test_all_forms_of_a_line_give_the_same_tokens(
    tmp_path: Path, prompt: dict[str, Any], output: dict[str, Any]
) -> None:
    """Ids, text and messages are one answer."""
    (found,), reading = read(tmp_path, {**prompt, **output})
    assert list(found.prompt) == CHAT
    assert list(found.output) == ANSWER
    assert reading.retokenised == ("output" in output)


def test_what_is_known_of_a_request_is_kept(tmp_path: Path) -> None:
    """Cohort fields, and the limit on the length: the one asked for, or where it was cut."""
    line = {"prompt": [1], "output_token_ids": [2, 3], "id": 7, "task": "code", "route": "r"}
    (a, b, c), reading = read(
        tmp_path,
        {**line, "temperature": 0.5, "max_tokens": 9, "finish_reason": "length", "user": "x"},
        {**line, "finish_reason": "length"},
        {"prompt": [1], "output_token_ids": []},
    )
    assert (a.prompt_id, a.task, a.route, a.temperature, a.max_tokens) == ("7", "code", "r", 0.5, 9)
    assert b.max_tokens == 2
    assert (c.task, c.route, c.temperature, c.max_tokens) == ("unknown", "default", None, None)
    assert c.prompt_id.startswith("prompt:")
    assert reading.ignored == {"user": 1}


def batch_line(custom_id: str, *contents: str, **body: Any) -> dict[str, Any]:
    choices = [{"message": {"content": text}, "finish_reason": "stop"} for text in contents]
    response = {"status_code": 200, "body": {"choices": choices, **body}}
    return {"id": "b", "custom_id": custom_id, "response": response, "error": None}


def test_batch_outputs_are_joined_with_their_input(tmp_path: Path) -> None:
    """Prompt, temperature and limit come from the input; n answers are one prompt."""
    source = tmp_path / "in.jsonl"
    body = {"messages": MESSAGES, "temperature": 0.7, "max_tokens": 50}
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1", "body": body}) + "\n\n")
    lines = [batch_line("a", "Paris is a city.", "Rome")]
    found, _ = read(tmp_path, *lines, batch_input=read_batch_input(source))
    assert [(f.prompt_id, f.temperature, f.max_tokens) for f in found] == [("a", 0.7, 50)] * 2
    assert list(found[0].prompt) == CHAT
    assert list(found[0].output) == ANSWER
    with pytest.raises(UsageError, match=r"log.jsonl:1: no prompt for 'a'.*--prompts"):
        read(tmp_path, *lines)
    served = batch_line("a", "x", prompt_token_ids=[1, 2])
    served["response"]["body"]["choices"][0]["token_ids"] = [3, 4]
    ((answer,), _) = read(tmp_path, served)
    assert (list(answer.prompt), list(answer.output)) == ([1, 2], [3, 4])


BAD = [
    ("{", "not JSON"),
    ("[1]", "a JSON object is expected"),
    ('{"output_token_ids": [1]}', "no prompt"),
    ('{"prompt": [1]}', "no answer"),
    ('{"prompt": [1], "output_token_ids": [1.5]}', "must be a list of token ids"),
    ('{"prompt": [true], "output_token_ids": [1]}', "must be a list of token ids"),
    ('{"prompt": [1], "output_token_ids": [1], "temperature": "hot"}', "temperature"),
    ('{"prompt": [1], "output_token_ids": [1], "max_tokens": 0}', "max_tokens"),
    ('{"prompt": [1], "output_token_ids": [1], "task": 3}', "task must be a text"),
    ('{"prompt": "\\ud800", "output_token_ids": [1]}', "half a character"),
    ('{"messages": "x", "output": "y"}', "messages must be"),
    (json.dumps({**batch_line("z", "x"), "response": None}), "was not answered"),
    (json.dumps(batch_line("z", prompt_token_ids=[1])), "has no choices"),
    (json.dumps({**batch_line("z", "x"), "response": {"body": {"choices": [3]}}}), "no prompt"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=lambda v: v[:24])
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: str, why: str) -> None:
    """With its number and what is wrong; with skip_bad it is counted and the rest is read."""
    good = {"prompt": [1], "output_token_ids": [2]}
    with pytest.raises(UsageError, match=rf"log.jsonl:2: .*{why}.*--skip-bad"):
        read(tmp_path, good, line, good)
    found, reading = read(tmp_path, good, line, good, skip_bad=True)
    assert len(found) == 2
    assert reading.skipped.n == 1
    assert why in reading.skipped.complaints[0]


def test_a_log_without_an_answer_is_an_error(tmp_path: Path) -> None:
    """Empty, or nothing usable in it: never an estimate of nothing."""
    with pytest.raises(UsageError, match="no answer in it: the file is empty"):
        read(tmp_path, "")
    with pytest.raises(UsageError, match=r"no answer in it: .*not JSON"):
        read(tmp_path, "{", skip_bad=True)
    with pytest.raises(UsageError, match="cannot be read"):
        list(Reading(lambda: TOKENIZER).answers(tmp_path / "none"))


def test_a_tokenizer_is_a_file_a_folder_or_packaged(tmp_path: Path) -> None:
    """All three open; what is none of them is an error in the user's words."""
    from speccheck.engine.settings import EngineSettings

    folder = EngineSettings().model_dir
    assert isinstance(open_tokenizer(str(folder / "tokenizer.json")), Tokenizer)
    assert isinstance(open_tokenizer(str(folder)), Tokenizer)
    with pytest.raises(UsageError, match=r"--tokenizer: .*no readable tokenizer"):
        open_tokenizer(str(tmp_path))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "output",
        "output_token_ids",
        "prompt_token_ids",
        "temperature",
        "custom_id",
        "response",
        "id",
        "task",
        "max_tokens",
        "finish_reason",
    ]
)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(names, values, max_size=6))
def test_any_object_is_an_answer_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]
) -> None:
    """Whatever a line holds, reading gives answers or a UsageError with the line."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(value), encoding="utf-8")
    complaint, found = "any.jsonl:1", []
    try:
        found = list(Reading(lambda: TOKENIZER).answers(path))
    except UsageError as error:
        complaint = str(error)
    assert "any.jsonl:1" in complaint
    assert all(isinstance(token, int) for answer in found for token in answer.output)
