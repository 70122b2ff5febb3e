"""One request, one decision: what a request asks for, the order of what decides, and the board."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccheck.config import UsageError
from speccheck.eligibility import Eligibility, Facts, load_eligibility, route_of
from speccheck.gateway import asked as asking
from speccheck.gateway.asked import Asked
from speccheck.gateway.board import Board
from speccheck.gateway.choose import Standing, choose, position, sticky_key
from speccheck.gateway.outbox import line_of, written_of
from speccheck.records import POLICY, Answer, Arm

CHAT = "/v1/chat/completions"
STREAM = {"messages": [], "stream": True, "temperature": 0, "max_tokens": 5}


def asked(**more) -> Asked:
    return Asked("chat", {**STREAM, **more})


# --- what a request asks for --------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": "x", "seed": 3, "top_p": 0.5, "top_k": 4, "repetition_penalty": 1.2},
        {"stop": ["x", "yz"], "include_stop_str_in_output": True, "ignore_eos": True},
        {"logprobs": False, "top_logprobs": 0, "n": 1, "tools": [], "logit_bias": {}},
        {"logprobs": None, "response_format": {"type": "text"}, "min_p": 0.0, "min_tokens": 0},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"user": "u", "metadata": {"a": "b"}, "stream_options": {"include_usage": True}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "priority": 3, "cache_salt": "s"},
        {"stream": False, "n": 4, "tools": [{}]},
    ],
)
def test_what_can_be_continued(more):
    """From its ids alone, exactly; an answer in one piece can always be asked for again."""
    assert asked(**more).not_joinable == ""


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 2}, "n:"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"echo": True}, "echo"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"an_option_of_next_year": 1}, "an_option_of_next_year"),
    ],
)
def test_what_cannot_be_continued(more, names):
    """Whatever is not known to be harmless, by name."""
    assert asked(**more).not_joinable.startswith(names)


def test_one_prompt_can_be_continued_and_several_cannot():
    """Text, ids, or a list of one."""
    for prompt in ("x", [1, 2], ["x"], [[1, 2]]):
        assert Asked("completion", {"prompt": prompt, "stream": True}).not_joinable == ""
    for prompt in (["x", "y"], [[1], [2]], [], None, {}):
        assert "several" in Asked("completion", {"prompt": prompt, "stream": True}).not_joinable


def test_features_have_the_names_that_policies_know():
    """Single options, their cohort names, and unknown fields by their own."""
    used = asked(
        min_p=0.1,
        logit_bias={"1": 2},
        frequency_penalty=1,
        response_format={"type": "json_schema"},
        tools=[{}],
        structured_outputs={"regex": "a", "json": {}},
        n=2,
        seed=0,
        top_p=0.9,
        odd_option=True,
    ).features
    assert used == {
        *("min_p", "logit_bias", "frequency_penalty", "penalties", "response_format"),
        *("json_schema", "tools", "regex", "n", "seed", "top_p", "odd_option"),
    }
    assert asked(user="u", stop=[]).features == frozenset()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
fields = st.sampled_from(
    [
        *("messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "user"),
        *("response_format", "tools", "tool_choice", "logit_bias", "structured_outputs", "odd"),
        *("frequency_penalty", "min_tokens", "return_token_ids", "top_logprobs"),
    ]
)


@given(st.dictionaries(fields, anything), st.sampled_from(sorted(asking.PATHS)))
def test_no_body_is_too_odd_to_be_decided(body, path):
    """Any JSON object: read, described and decided, never an exception."""
    read = asking.read(path, json.dumps(body).encode())
    if read is None:  # whether its answer streams is not known
        return
    for value in (read.sampler, read.features, read.not_joinable, read.facts({}), read.n):
        assert value is not None
    decided = choose(
        read,
        read.facts({}),
        policy=None,
        routes={"chat": Standing(1.0)},
        is_off=lambda _route: False,
        key="k",
        not_joinable=read.not_joinable,
    )
    assert decided.decision in ("speculate", "target_only")


def test_what_is_no_request_is_not_read():
    """Other paths, and bodies that are no JSON object."""
    assert asking.read("/v1/embeddings", b"{}") is None
    for raw in (b"", b"[]", b"x", b"[" * 100_000, b"\xff"):
        assert asking.read(CHAT, raw) is None


# --- the order of what decides ------------------------------------------------------------------

POLICY_RULES = Eligibility.model_validate(
    {
        "rules": [
            {"name": "no", "when": {"features": {"any_of": ["stop"]}}, "use": "target_only"},
            {"name": "yes", "use": "speculate", "k": 2},
        ]
    }
)


def decide(
    more=None, *, key="k", off=(), labels=None, not_joinable="", policy=POLICY_RULES, **routes
):
    one = asked(**(more or {}))
    return choose(
        one,
        one.facts(labels or {}),
        policy=policy,
        routes=routes or {"chat": Standing(1.0)},
        is_off=lambda route: route in off,
        key=key,
        not_joinable=not_joinable,
    )


def test_the_order_of_what_decides():
    """Policy, then kill switch, then state, then share: the first that says no is the reason."""
    made = decide()
    assert (made.arm, made.decision, made.k, made.is_eligible) == (
        Arm.SPECULATIVE,
        "speculate",
        2,
        True,
    )
    fell = Standing(0.0, "fell_back", "errors")
    kept = decide({"stop": ["x"]}, off=("chat",), chat=fell)
    assert (kept.decision, kept.is_eligible) == ("target_only", False)
    assert kept.reason.startswith(f"{POLICY}: rule 'no'")
    assert decide(off=("chat",), chat=fell).reason == "disabled by an operator"
    assert decide(chat=fell).reason == "fell_back: errors"
    assert decide(chat=Standing(0.0, "off", "")).decision == "fell_back"
    control = decide(chat=Standing(0.0))
    assert (control.decision, control.is_eligible) == ("target_only", True)
    assert "control" in control.reason
    assert not control.reason.startswith(POLICY)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"logit_bias": {"5": 1}}])
def test_what_speculation_does_not_support_goes_to_target_only(option):
    """Whatever the policy says; it is no control."""
    for policy in (POLICY_RULES, None):
        made = decide(option, policy=policy)
        assert (made.arm, made.is_eligible) == (Arm.TARGET_ONLY, False)
        assert next(iter(option)) in made.reason
        assert made.reason.startswith(POLICY)


def test_what_cannot_be_handed_over_is_kept_off_by_policy():
    """Named, and no control."""
    made = decide(not_joinable="tools: parsed")
    assert made.reason == f"{POLICY}: no exact hand-over in mid-answer (tools: parsed)"
    assert not made.is_eligible


def test_the_route_is_named_or_found_or_the_only_one():
    """Two routes and no word which: target-only."""
    both = {"a": Standing(1.0), "b": Standing(1.0)}
    assert decide(**both).route is None
    assert decide(**both).arm is Arm.TARGET_ONLY
    assert decide(labels={"x-speccheck-route": "b"}, **both).route == "b"
    wrong = decide(labels={"x-speccheck-route": "../b"}, **both)
    assert (wrong.route, wrong.arm) == (None, Arm.TARGET_ONLY)
    assert decide().route == "chat"
    policy = POLICY_RULES.model_copy(
        update={
            "routes": Eligibility.model_validate(
                {
                    "rules": [],
                    "routes": [
                        {"route": "a", "when": {"task": "sql"}},
                        {"route": "b", "when": {"max_tokens": {"at_most": 5}}},
                    ],
                }
            ).routes
        }
    )
    assert decide(policy=policy, **both).route == "b"
    assert decide({"max_tokens": 6}, policy=policy, **both).route is None
    assert decide(labels={"x-speccheck-task": "sql"}, policy=policy, **both).route == "a"


def test_route_rules_are_checked_when_they_are_read(tmp_path):
    """A route that does not exist, or a rule that asks for the route it should find."""
    path = tmp_path / "e.yaml"
    rules = "rules: [{name: all, use: speculate}]\nroutes: [{route: %s, when: {%s}}]\n"
    path.write_text(rules % ("chta", "task: x"), encoding="utf-8")
    with pytest.raises(UsageError, match="'chta' is none of the routes; did you mean 'chat'"):
        load_eligibility(path, routes=["chat"])
    path.write_text(rules % ("chat", "route: chat"), encoding="utf-8")
    with pytest.raises(UsageError, match="ask for something else"):
        load_eligibility(path, routes=["chat"])
    path.write_text(rules % ("chat", "task: x"), encoding="utf-8")
    policy = load_eligibility(path, routes=["chat"])
    assert route_of(policy, Facts(task="x")) == "chat"
    assert route_of(policy, Facts()) is None
    assert policy.asks_for == {"task"}


def test_policies_without_route_rules_keep_their_digest():
    """What was accepted before route rules existed is still the same policy."""
    assert POLICY_RULES.digest == "eligibility:" + _digest(
        {
            "version": 1,
            "rules": [
                {
                    "name": "no",
                    "when": {"features": {"any_of": ["stop"]}},
                    "use": "target_only",
                    "reason": "",
                },
                {"name": "yes", "when": {}, "use": "speculate", "k": 2, "reason": ""},
            ],
        }
    )


def _digest(value) -> str:
    import hashlib

    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"eligibility\n{text}".encode()).hexdigest()[:20]


# --- the share ----------------------------------------------------------------------------------


def test_the_share_is_sticky_and_grows_by_addition():
    """A key that speculates at a share does so at every larger one, in every process."""
    keys = [f"user-{i}" for i in range(4000)]
    before: set[str] = set()
    for share in (0.01, 0.05, 0.25, 0.5, 1.0):
        chosen = {k for k in keys if decide(key=k, chat=Standing(share)).arm is Arm.SPECULATIVE}
        assert before <= chosen
        deviation = (share * (1 - share) / len(keys)) ** 0.5
        assert abs(len(chosen) / len(keys) - share) < 4 * deviation + 1e-9
        before = chosen
    assert position("chat", "user-1") == 0.9900411375932695  # as every version must have it


def test_routes_are_drawn_apart():
    """Who is in the canary of one route is no likelier to be in another's."""
    keys = [f"user-{i}" for i in range(4000)]
    one = {k for k in keys if position("a", k) < 0.1}
    both = {k for k in one if position("b", k) < 0.1}
    assert abs(len(both) / len(one) - 0.1) < 4 * (0.09 / len(one)) ** 0.5


def test_the_key_is_the_header_or_what_the_body_calls_the_user():
    """Nothing at all is None: such requests are drawn one by one."""
    assert sticky_key({"x-k": "h"}, "X-K", {"user": "u"}) == "h"
    assert sticky_key({}, "x-k", {"user": "u"}) == "u"
    assert sticky_key({}, "x-k", {"session_id": "s"}) == "s"
    for body in ({}, {"user": 5}, {"user": ""}, {"user": {"a": 1}}):
        assert sticky_key({}, "x-k", body) is None


# --- the board ----------------------------------------------------------------------------------


def _publish(path: str, stop) -> None:
    board, n = Board(Path(path)), 0
    while not stop.is_set():
        n += 1
        board.publish({"n": n, "filler": [n] * (n % 500)})
    board.close()


def test_a_board_is_never_read_in_parts(tmp_path):
    """A writer that never rests, another process: each value read is one that was written whole."""
    path = tmp_path / "board"
    board = Board.create(path, {"n": 0, "filler": []})
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_publish, args=(str(path), stop))
    writer.start()
    seen: set[int] = set()
    last = -1
    while len(seen) < 100:
        value = board.read()
        assert value["filler"] == [value["n"]] * (value["n"] % 500)
        assert value["n"] >= last
        last = value["n"]
        seen.add(last)
    stop.set()
    writer.join()
    board.close()


def test_a_board_says_the_last_thing_to_all_who_map_it(tmp_path):
    """Readers that were there before, and those that come later; unchanged, the same object."""
    path = tmp_path / "board"
    writer = Board.create(path, {"a": 1})
    reader = Board(path)
    assert reader.read() == {"a": 1}
    assert reader.read() is reader.read()
    for n in range(5):
        writer.publish({"a": n})
        assert reader.read() == {"a": n}
    assert Board(path).read() == {"a": 4}
    with pytest.raises(ValueError, match="do not fit"):
        writer.publish({"a": "x" * (2 << 20)})
    assert reader.read() == {"a": 4}
    reader.set_count(1, 7)
    writer.set_count(63, 2)
    assert (reader.total(), writer.total()) == (9, 9)


# --- receipts on their way ----------------------------------------------------------------------


def test_a_receipt_is_the_same_on_the_other_side():
    """Tuples stay tuples, and what is missing stays missing."""
    from test_store import receipt

    for one in (receipt(1), receipt(2, acceptance_histogram=None, warnings=("a", "é"))):
        kept = Answer("r", "té\nxt", (1, 2), None, None, {"asked": {"messages": []}})
        for answer in (None, kept):
            line = line_of(one, answer)
            assert line.count(b"\n") == 1
            assert written_of(line) == (one, answer)
