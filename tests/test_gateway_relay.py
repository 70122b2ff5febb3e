"""One request through the gateway: bytes, headers, receipts, failures, what a client may send."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import threading
import time
from contextlib import suppress

import aiohttp
import pytest
from gateway_pair import WAIT_S, gateway
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import (
    DONE,
    Drop,
    Script,
    answer,
    as_completion,
    chunk,
    gzipped,
    recut,
    refusal,
    spec_metrics,
    sse,
    target_says,
    text_of,
    usage_of,
    whole,
)

from speccheck.gateway.asked import Asked
from speccheck.gateway.relay import Events, payload_of, stripped
from speccheck.records import Arm

IDS = [7, 8, 9, 10, 11, 2]
TEXT = "".join(map(text_of, IDS))
BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 16}
STREAM = {**BODY, "stream": True}
ALL = {**STREAM, "return_token_ids": True, "stream_options": {"include_usage": True}}


def call(running, body=None, path="/v1/chat/completions", method=None, headers=None, raw=None):
    """Status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
    sent = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if sent is None else "POST"), path, sent, headers or {})
    reply = connection.getresponse()
    read = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), read


def events_of(raw: bytes) -> list:
    """Parsed events; the last must be [DONE]."""
    payloads = [payload_of(event) for event in Events().feed(raw)]
    assert payloads[-1] == b"[DONE]", raw
    return [json.loads(payload) for payload in payloads[:-1] if payload]


def said(raw: bytes) -> tuple[str, list, list]:
    """Text, finish reasons and roles that a client sees in a chat's stream."""
    choices = [choice for event in events_of(raw) for choice in event.get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    finishes = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    return text, finishes, [c["delta"]["role"] for c in choices if "role" in c["delta"]]


def steps_then(parts, n_steps=2, per_step=1):
    """A speculative answer that begins well and goes on with `parts`."""
    ids = IDS[: n_steps * per_step]
    steps = [ids[i : i + per_step] for i in range(0, len(ids), per_step)]
    made = answer(steps, finish=None, final_usage=False, done=False)
    return Script([*made.parts, *parts], made.token_ids, made.text)


# --- passing through ----------------------------------------------------------------------------


def raw_events() -> list[bytes]:
    odd = json.dumps({"choices": [{"index": 0, "delta": {"content": ',"token_ids":[1]'}}]})
    return [
        sse(chunk("", role="assistant")),
        b": keep-alive\n\n",
        sse(chunk('x,"usage":null y', [1], usage=usage_of(5, 1))),
        f"data: {odd}\n\n".encode(),
        b'data:{"choices": [ {"index":0, "delta":{"content":"\\u00e9"},"token_ids":[2,3]}]}\n\n',
        sse(chunk("", [4], finish="stop")),
        sse({"choices": [], "usage": usage_of(5, 4), "metrics": spec_metrics([(1, 4)], 4)}),
    ]


@pytest.mark.parametrize("arm", list(Arm))
@pytest.mark.parametrize("sizes", [[10_000], [1], [7, 3]])
def test_what_the_client_asked_for_in_full_passes_byte_for_byte(tmp_path, arm, sizes):
    """However the server cuts its bytes: comments, blanks, escapes and order as they were."""
    sent = b"".join(raw_events()) + DONE

    def script(_body, _n):
        return recut(Script([sent], content_type="text/event-stream"), sizes)

    with gateway(tmp_path, script, script) as running:
        running.stand(share=1.0 if arm is Arm.SPECULATIVE else 0.0)
        status, headers, raw = call(running, ALL)
        assert (status, raw) == (200, sent)
        assert headers["x-speccheck-arm"] == arm
        assert headers["content-type"] == "text/event-stream"


def test_what_the_client_did_not_ask_for_is_cut_out(tmp_path):
    """No ids and no usage where none were asked for; every other byte stays."""

    def script(_body, _n):
        return Script([b"".join(raw_events()) + DONE])

    with gateway(tmp_path, script, script) as running:
        raw = call(running, STREAM)[2]
        assert b"prompt_token_ids" not in raw
        assert all("token_ids" not in c for e in events_of(raw) for c in e["choices"])
        assert all(event["choices"] for event in events_of(raw))
        assert b'"content": "x,\\"usage\\":null y"' in raw
        assert b'"content": ",\\"token_ids\\":[1]"' in raw
        assert b": keep-alive\n\n" in raw
        assert b'data:{"choices": [ {"index":0, "delta":{"content":"\\u00e9"}}]}\n\n' in raw
        asked = running.speculative.seen[0].body
        assert asked["return_token_ids"] is True
        assert asked["stream_options"] == {"include_usage": True}
        receipt = running.kept.wait(1)[0]
        assert (receipt.completion_tokens, receipt.verify_steps, receipt.accepted_tokens) == (
            4,
            1,
            1,
        )


def test_what_attached_servers_want_and_refuse_is_heeded(tmp_path):
    """`extra` goes with each request, under the client's own words; `omit` is not added."""
    omit = frozenset({"stream_options", "return_token_ids"})
    extra = {"a": 1, "max_tokens": 3}
    with gateway(tmp_path, extra=extra, omit=omit, hand_over="join") as running:
        call(running, STREAM)
        sent = running.speculative.seen[0].body
        assert sent == {**STREAM, "a": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.text(',":[]{}\\ token_idsug', max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.text('a,":[]{}\\ token_ids', max_size=30), st.lists(st.integers(0, 99)), json_values)
def test_cutting_bytes_is_the_same_as_cutting_fields(text, ids, extra):
    """For any text and any other field of a chunk, ids and empty usage go and nothing else does."""
    value = {
        "id": text,
        "choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids, "x": extra}],
        "extra": extra,
        "prompt_token_ids": ids,
        "usage": None,
    }
    for separators in ((",", ":"), (", ", ": ")):
        raw = f"data: {json.dumps(value, separators=separators)}\n\n".encode()
        left = json.loads(stripped(Asked("chat", {}), raw, value)[6:])
        wanted = json.loads(json.dumps(value))
        del wanted["prompt_token_ids"], wanted["usage"], wanted["choices"][0]["token_ids"]
        assert left == wanted


@given(
    st.lists(st.sampled_from([b"data: a", b": c", b"event: x\ndata: b", b"data: 1\ndata: 2"])),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_events_are_whole_and_all_there(events, end, sizes):
    """Cut anywhere, each event comes out once, in order, with the bytes it had."""
    data = b"".join(one.replace(b"\n", end[: len(end) // 2]) + end for one in events)
    feed, out, at, i = Events(), [], 0, 0
    while at < len(data):
        size = sizes[i % len(sizes)]
        out += feed.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert b"".join(out) == data
    if end != b"\r\r":  # a lone CR may be half of a CRLF: where it ends is told by what follows
        assert len(out) == len(events)


def test_an_answer_in_one_piece_passes_as_it_is(tmp_path):
    """Same bytes, same length; counts come from usage."""
    body = {
        "id": "a",
        "choices": [{"index": 0, "message": {"content": "hé"}, "finish_reason": "stop"}],
        "usage": usage_of(5, 3),
    }
    with gateway(tmp_path, speculative=lambda _b, _n: whole(body)) as running:
        status, headers, raw = call(running, BODY)
        assert (status, raw) == (200, json.dumps(body).encode())
        assert int(headers["content-length"]) == len(raw)
        assert running.kept.wait(1)[0].completion_tokens == 3


def test_any_other_method_and_path_goes_to_target_only(tmp_path):
    """Path, query, body and answer untouched; redirects and compression too."""

    def script(body, _n):
        if body.get("x") == 1:
            return Script(
                [gzip.compress(b"odd")],
                status=418,
                content_type="x/y",
                headers={"Content-Encoding": "gzip", "X-Own": "1"},
            )
        return Script([], status=302, content_type=None, headers={"Location": "http://x/"})

    with gateway(tmp_path, script) as running:
        status, headers, raw = call(running, {"x": 1}, "/v1/odd%2Fpath?a=%20b&a", "PUT")
        assert (status, gzip.decompress(raw), headers["x-own"]) == (418, b"odd", "1")
        assert headers["x-speccheck-arm"] == "target_only"
        assert running.target.seen[0].path == "/v1/odd%2Fpath?a=%20b&a"
        assert call(running, {}, "/elsewhere")[1]["location"] == "http://x/"
        assert (
            call(running, path="/v1/models")[2]
            == json.dumps({"object": "list", "data": [{"id": "target"}]}).encode()
        )
        assert running.speculative.seen == []


def test_a_body_that_is_no_request_gets_the_servers_own_words(tmp_path):
    """The gateway refuses nothing: it passes on what it does not understand."""
    with gateway(tmp_path, lambda _b, _n: refusal(400, "not JSON")) as running:
        for raw in (b"", b"[1]", b'"x"'):
            assert call(running, raw=raw)[0] == 400
        assert len(running.target.seen) == 3


def test_a_kept_connection_serves_many_requests(tmp_path):
    """On both sides."""
    with gateway(tmp_path) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        for _ in range(5):
            connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
            reply = connection.getresponse()
            assert reply.read().endswith(DONE)
            assert not reply.will_close
        connection.close()
        assert len({seen.connection for seen in running.speculative.seen}) == 1


# --- clients that are slow, or leave ------------------------------------------------------------


def long_stream(n: int):
    """More than fits into all buffers on the way."""
    filler = "x" * 65_536
    parts = [sse(chunk(filler, [i])) for i in range(n)]
    return Script([*parts, sse(chunk("", [n], finish="stop")), DONE])


def test_the_arm_is_read_no_faster_than_the_client_reads(tmp_path):
    """What a client does not take stays with the server; when it reads again, all of it comes."""
    with (
        gateway(tmp_path, speculative=lambda _b, _n: long_stream(200)) as running,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", running.port))
        body = json.dumps({**ALL, "max_tokens": 1000}).encode()
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        seen = None
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:  # until the server gets no further
            before = len(seen.sent_at_ns) if seen is not None else -1
            time.sleep(0.3)
            if running.speculative.seen:
                seen = running.speculative.seen[0]
                if len(seen.sent_at_ns) == before > 0:
                    break
        assert seen is not None
        assert len(seen.sent_at_ns) < 190
        read = 0
        while data := client.recv(1 << 20):
            read += len(data)
        assert read > 200 * 65_536


def test_a_client_that_leaves_takes_its_request_with_it(tmp_path):
    """The arm's connection is closed, and the receipt says cancelled."""
    parts = steps_then([60.0])
    with gateway(tmp_path, speculative=lambda _b, _n: parts) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        reply = connection.getresponse()
        reply.read1(10)
        reply.close()
        connection.close()
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome, receipt.error_class) == ("cancelled", "client_gone")
        assert receipt.completion_tokens == 2
        assert running.gate.in_flight_all == 0
        assert running.board.total() == 0


# --- arms that fail -----------------------------------------------------------------------------

BROKEN = {
    "reset": [Drop()],
    "closed": [],
    "error event": [sse({"error": {"message": "boom", "code": 500}}), DONE],
    "truncated JSON": [b'data: {"choices": [{"index"\n\n', DONE],
    "broken SSE": [b"garbage without end\n", Drop()],
    "no finish reason": [DONE],
    "half an event": [sse(chunk("lost", [9]))[:30], Drop()],
    "aborted": [sse(chunk("", finish="abort")), DONE],
    "not ids": [sse(chunk("x", ["a"])), DONE],
}


@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("how", BROKEN)
def test_an_answer_whose_arm_fails_is_continued(tmp_path, how, per_step):
    """One role, one end, the whole text once, usage over both arms; the receipt names the joint."""
    script = steps_then(BROKEN[how], 2, per_step)
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        status, headers, raw = call(running, ALL)
        assert (status, headers["x-speccheck-arm"]) == (200, "speculative")
        assert said(raw) == (TEXT, ["stop"], ["assistant"])
        events = events_of(raw)
        ids = [t for e in events for c in e["choices"] for t in c.get("token_ids") or ()]
        assert ids == IDS
        assert [e["usage"] for e in events if not e["choices"]] == [usage_of(5, 6)]
        assert {event["id"] for event in events} == {"x"}
        continued = next(s for s in running.target.seen if isinstance(s.body.get("prompt"), list))
        assert continued.body["prompt"] == [*range(5), *IDS[: 2 * per_step]]
        assert continued.body["max_tokens"] == 16 - 2 * per_step
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome, receipt.arm) == ("ok", "speculative")
        assert receipt.handover_at == 2 * per_step
        assert (receipt.handover_from, receipt.handover_to) == ("speculative", "target_only")
        assert receipt.handover_kind == "exact"
        assert receipt.handover_reason
        assert receipt.error_class
        assert (receipt.prompt_tokens, receipt.completion_tokens) == (5, 6)
        assert receipt.finish_reason == "stop"


def test_a_client_that_asked_for_nothing_more_gets_nothing_more(tmp_path):
    """After the joint too: no ids, no usage."""
    with gateway(tmp_path, speculative=lambda _b, _n: steps_then([Drop()])) as running:
        raw = call(running, STREAM)[2]
        assert said(raw) == (TEXT, ["stop"], ["assistant"])
        assert b"token_ids" not in raw
        assert b'"usage":{' not in raw.split(b'"delta":{"content"', 1)[1]


def test_completions_are_continued_as_completions(tmp_path):
    """`text`, not `delta`."""
    script = as_completion(steps_then([Drop()]))
    first = json.loads(script.parts[0][6:])
    first["choices"][0]["prompt_token_ids"] = list(range(5))
    script.parts[0] = sse(first)
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        body = {"prompt": "hi", "stream": True, "temperature": 0}
        raw = call(running, body, "/v1/completions")[2]
        assert "".join(c["text"] for e in events_of(raw) for c in e["choices"]) == TEXT
        assert running.target.seen[-1].body["max_tokens"] == 14


def test_a_stall_is_a_failure(tmp_path):
    """Silence for longer than idle_s; the answer goes on."""
    with gateway(
        tmp_path,
        speculative=lambda _b, _n: steps_then([60.0]),
        timeouts={"idle_s": 0.2},
    ) as running:
        assert said(call(running, STREAM)[2])[0] == TEXT
        assert running.kept.wait(1)[0].handover_reason.startswith("stall: ")


def test_more_tokens_than_were_allowed_is_no_answer(tmp_path):
    """An arm that does not end: what is beyond max_tokens is not delivered."""
    with gateway(tmp_path, speculative=lambda _b, _n: long_stream(4)) as running:
        raw = call(running, {**STREAM, "max_tokens": 2})[2]
        assert "error" in events_of(raw)[-1]
        assert running.kept.wait(1)[0].handover_kind == "broken"


REFUSED = {
    "500": refusal(500, "boom"),
    "503": refusal(503, "busy"),
    "429": refusal(429, "slow down"),
    "wrong content type": Script([b"<html>"], content_type="text/html"),
    "none": Script([b"{}"], content_type=None),
    "redirect": Script([], status=302, headers={"Location": "http://127.0.0.1:1/"}),
    "error at once": Script([sse({"error": {"message": "no", "code": 500}}), DONE]),
    "empty stream": Script([]),
    "reset": Script([Drop()]),
    "unsupported": refusal(400, "The min_p parameter is not yet supported", "min_p"),
}


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("how", REFUSED)
def test_a_request_that_never_began_is_sent_to_target_only(tmp_path, how, is_stream):
    """The client sees the answer only; a receipt per attempt says why there were two."""
    body = {**BODY, "stream": is_stream, "min_p": 0}

    def target(asked, n):
        if not is_stream:
            message = {"message": {"content": TEXT}, "finish_reason": "stop", "index": 0}
            return whole({"choices": [message], "usage": usage_of(5, 6)})
        return target_says()(asked, n)

    with gateway(tmp_path, target, lambda _b, _n: REFUSED[how]) as running:
        status, headers, raw = call(running, body)
        assert (status, headers["x-speccheck-arm"]) == (200, "target_only")
        assert headers["x-speccheck-decision"].startswith("fell_back: the speculative arm failed")
        if is_stream:
            assert said(raw) == (TEXT, ["stop"], ["assistant"])
        else:
            assert json.loads(raw)["choices"][0]["message"]["content"] == TEXT
        first, second = running.kept.wait(2)
        assert (first.arm, first.attempt, first.handover_kind) == ("speculative", 0, "restarted")
        assert first.outcome != "ok"
        assert (second.arm, second.attempt, second.outcome) == ("target_only", 1, "ok")
        assert second.decision == "fell_back"
        assert first.pair_id == second.pair_id


def test_a_request_that_is_wrong_is_not_tried_twice(tmp_path):
    """A refusal that the other arm would repeat goes back in the server's own words."""
    with gateway(tmp_path, speculative=lambda _b, _n: refusal(400, "bad temperature")) as running:
        status, _, raw = call(running, STREAM)
        assert status == 400
        assert json.loads(raw)["error"]["message"] == "bad temperature"
        assert running.target.seen == []
        assert running.kept.wait(1)[0].outcome == "rejected"


def test_compression_by_the_arm_is_undone(tmp_path):
    """A server that compresses although it was asked not to."""
    with gateway(tmp_path, speculative=lambda _b, _n: gzipped(answer([[7], [8]]))) as running:
        _, headers, raw = call(running, STREAM)
        assert said(raw)[0] == text_of(7) + text_of(8)
        assert "content-encoding" not in headers


def test_an_event_without_end_is_given_up(tmp_path, monkeypatch):
    """A huge line is a failure of the arm, not our memory's."""
    monkeypatch.setattr("speccheck.gateway.relay.MAX_EVENT_BYTES", 1 << 16)
    script = steps_then([b"data: " + b"x" * (1 << 18)])
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        assert said(call(running, STREAM)[2])[0] == TEXT
        assert "longer than" in running.kept.wait(1)[0].handover_reason


@pytest.mark.parametrize("is_stream", [True, False])
def test_target_only_down_is_an_error_and_speculation_is_not_the_only_arm(tmp_path, is_stream):
    """What was decided for target-only is never moved to the other arm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
        with gateway(tmp_path, urls={Arm.TARGET_ONLY: dead}) as running:
            running.stand(share=0.0)
            status, _, raw = call(running, {**BODY, "stream": is_stream})
            assert status == 502
            assert "unreachable" not in json.loads(raw)["error"]["type"]
            assert json.loads(raw)["error"]["message"].startswith("target_only: ")
            assert call(running, path="/v1/models")[0] == 502
            assert call(running, path="/health")[0] == 503
            assert running.speculative.seen == []
            assert running.kept.wait(1)[0].error_class == "unreachable"


def test_both_arms_failing_ends_in_one_clear_error(tmp_path):
    """In mid-answer an error event and [DONE], as vLLM ends a stream; the receipt says broken."""

    def target(body, n):
        return target_says()(body, n) if "tokens" in body else Script([Drop()])

    with gateway(tmp_path, target, lambda _b, _n: steps_then([Drop()])) as running:
        events = events_of(call(running, STREAM)[2])
        assert "then target-only" in events[-1]["error"]["message"]
        receipt = running.kept.wait(1)[0]
        assert (receipt.handover_kind, receipt.handover_to) == ("broken", None)
        assert receipt.outcome != "ok"
        assert receipt.completion_tokens == 2


@pytest.mark.parametrize(
    ("config", "body", "arm", "ends"),
    [
        ({"hand_over": "refuse"}, {"frequency_penalty": 0.5}, "target_only", "whole"),
        ({"hand_over": "join"}, {"frequency_penalty": 0.5}, "speculative", "error"),
        ({"hand_over": "off"}, {"frequency_penalty": 0.5}, "speculative", "error"),
        ({"hand_over": "refuse"}, {}, "speculative", "whole"),
        ({"hand_over": "join"}, {}, "speculative", "whole"),
        ({"hand_over": "off"}, {}, "speculative", "error"),
    ],
)
def test_what_cannot_be_continued_is_refused_or_ends_in_an_error(tmp_path, config, body, arm, ends):
    """As configured; never an approximation."""
    off = "hand_over: off" if config["hand_over"] == "off" else ""
    with gateway(
        tmp_path, speculative=lambda _b, _n: steps_then([Drop()]), no_joint=off, **config
    ) as running:
        _, headers, raw = call(running, {**STREAM, **body})
        assert headers["x-speccheck-arm"] == arm
        is_error = "error" in events_of(raw)[-1]
        assert is_error == (ends == "error")
        if not is_error:
            assert said(raw)[0] == TEXT
        else:
            assert "cannot be continued" in events_of(raw)[-1]["error"]["message"]
        if arm == "target_only":
            assert "no exact hand-over" in headers["x-speccheck-decision"]


def test_an_end_that_was_told_is_the_end(tmp_path):
    """The arm dies between the last token and [DONE]: nothing is asked for, books are closed."""
    script = answer([[7], [8]], final_usage=False, done=False)
    script.parts.append(Drop())
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        raw = call(running, ALL)[2]
        assert said(raw) == (text_of(7) + text_of(8), ["stop"], ["assistant"])
        assert events_of(raw)[-1]["usage"] == usage_of(5, 2)
        assert running.target.seen == []
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome, receipt.handover_kind) == ("ok", None)
        assert "after the end of the answer" in receipt.warnings[0]


@pytest.mark.parametrize("is_stream", [True, False])
def test_no_request_outlives_its_timeout(tmp_path, is_stream):
    """An arm that never answers, and one that never ends: an error, in time, for both arms."""

    def never(_body, _n):
        return Script([60.0])

    limits = {"first_byte_s": 0.2, "idle_s": 0.2, "total_s": 0.5}
    with gateway(tmp_path, never, never, timeouts=limits) as running:
        status, _, raw = call(running, {**BODY, "stream": is_stream})
        assert status == 504
        assert json.loads(raw)["error"]["code"] == 504
        assert running.kept.wait(2 if is_stream else 1)[-1].error_class == "timeout"


def test_a_reasoning_answer_is_not_continued_and_then_not_begun(tmp_path):
    """A parsed answer is not its ids; once seen, such requests stay on target-only."""
    thinking = sse({"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "h"},
                    "token_ids": [7], "finish_reason": None}]})  # fmt: skip
    script = Script([thinking, Drop()])
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        assert "error" in events_of(call(running, STREAM)[2])[-1]
        headers = call(running, STREAM)[1]
        assert headers["x-speccheck-arm"] == "target_only"
        assert "parses reasoning" in headers["x-speccheck-decision"]


def test_an_arm_without_ids_is_not_continued(tmp_path):
    """Text whose ids are not known."""
    made = answer([[7], [8]], ids=False, finish=None, final_usage=False, done=False)
    script = Script([*made.parts, Drop()])
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        assert "error" in events_of(call(running, STREAM)[2])[-1]


# --- decisions ----------------------------------------------------------------------------------


def test_the_kill_switch_holds_for_the_next_request(tmp_path):
    """A file and nothing else; taking it away gives the route back."""
    with gateway(tmp_path) as running:
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "speculative"
        (running.off / "chat").touch()
        headers = call(running, STREAM)[1]
        assert headers["x-speccheck-arm"] == "target_only"
        assert headers["x-speccheck-decision"] == "fell_back: disabled by an operator"
        (running.off / "chat").unlink()
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "speculative"


def test_a_decision_holds_for_the_next_request(tmp_path):
    """What the board says when the request comes, and its policy version."""
    with gateway(tmp_path) as running:
        running.stand(share=0.0, state="fell_back", reason="errors 0.2 over 0.01")
        headers = call(running, STREAM)[1]
        assert headers["x-speccheck-decision"] == "fell_back: fell_back: errors 0.2 over 0.01"
        running.stand(share=1.0)
        running.publish(policy_version="policy:next")
        headers = call(running, STREAM)[1]
        assert headers["x-speccheck-policy"] == "policy:next"
        receipts = running.kept.wait(2)
        assert [r.decision for r in receipts] == ["fell_back", "speculate"]
        assert receipts[1].policy_version == "policy:next"


def test_a_policy_that_asks_for_the_prompts_length_gets_it(tmp_path):
    """Target-only's own tokenizer is asked; where it does not say, target-only it is."""
    policy = {
        "rules": [{"name": "short", "when": {"prompt_tokens": {"below": 9}}, "use": "speculate"}]
    }
    counts = iter([whole({"count": 8}), whole({"count": 9}), refusal(404, "no")])

    def target(body, n):
        return next(counts) if "stream" not in body else target_says()(body, n)

    with gateway(tmp_path, target, policy=policy) as running:
        arms = [call(running, STREAM)[1]["x-speccheck-arm"] for _ in range(3)]
        assert arms == ["speculative", "target_only", "target_only"]


def test_the_load_of_the_speculative_arm_is_what_is_in_flight(tmp_path):
    """The request itself included; one that ended counts no more."""
    policy = {
        "rules": [{"name": "calm", "when": {"concurrency": {"at_most": 1}}, "use": "speculate"}]
    }
    go_on = threading.Event()
    slow = steps_then([60.0])
    with gateway(
        tmp_path,
        speculative=lambda b, n: slow if n == 0 else target_says()(b, n),
        policy=policy,
    ) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        first = connection.getresponse()
        assert first.headers["x-speccheck-arm"] == "speculative"
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "target_only"
        first.close()
        connection.close()
        running.kept.wait(2)
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "speculative"
        go_on.set()


# --- mirror -------------------------------------------------------------------------------------


def test_the_mirror_neither_delays_nor_fails_the_primary(tmp_path):
    """Its arm hangs or resets: the client sees nothing of it; more than the limit is left out."""

    def speculative(_body, n):
        return Script([60.0]) if n == 0 else Script([Drop()])

    with gateway(
        tmp_path, speculative=speculative, mirror={"share": 1.0, "max_in_flight": 2}
    ) as running:
        running.stand(share=0.0)
        for _ in range(4):
            status, headers, raw = call(running, STREAM)
            assert (status, headers["x-speccheck-arm"]) == (200, "target_only")
            assert said(raw)[0] == TEXT
        receipts = running.kept.wait(4)
        assert sum(not r.mirror for r in receipts) >= 4 - sum(r.mirror for r in receipts)
        assert len(running.speculative.seen) >= 2
        hung = [r for r in receipts if r.mirror and r.outcome == "ok"]
        assert hung == []


def test_a_mirrored_answer_leaves_a_receipt_beside_its_primary(tmp_path):
    """Same pair, other arm, output discarded."""
    with gateway(tmp_path, mirror={"share": 1.0}) as running:
        running.stand(share=0.0)
        call(running, STREAM)
        one, other = sorted(running.kept.wait(2), key=lambda r: r.mirror)
        assert (one.arm, one.mirror, other.arm, other.mirror) == (
            "target_only",
            False,
            "speculative",
            True,
        )
        assert one.pair_id == other.pair_id
        assert one.output_digest == other.output_digest
        assert one.receipt_id != other.receipt_id


# --- security -----------------------------------------------------------------------------------


def raw_call(running, data: bytes) -> bytes:
    """What comes back to bytes that no client library would send."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as client:
        with suppress(ConnectionError):
            client.sendall(data)
        received = b""
        with suppress(ConnectionError):
            while part := client.recv(65_536):
                received += part
        return received


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/evil",
        "//127.0.0.1:{port}/evil",
        "/\\127.0.0.1:{port}/evil",
        "@127.0.0.1:{port}/evil",
        "*@127.0.0.1:{port}/evil",
        "*.127.0.0.1:{port}/evil",
        "http://a*@127.0.0.1:{port}",
        ":{port}/evil",
        "/../../@127.0.0.1:{port}/",
        "/v1/models?url=http://127.0.0.1:{port}/",
        "/%0d%0aHost:%20127.0.0.1:{port}",
    ],
)
def test_no_request_chooses_the_upstream(tmp_path, target):
    """Whatever the request line and headers say, only the configured servers are spoken to."""
    with socket.create_server(("127.0.0.1", 0)) as trap, gateway(tmp_path) as running:
        trap.settimeout(0.3)
        port = trap.getsockname()[1]
        line = target.format(port=port).encode()
        raw_call(
            running,
            b"GET "
            + line
            + b" HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-forwarded-host: 127.0.0.1:%d\r\n"
            b"x-speccheck-arm: http://127.0.0.1:%d\r\nconnection: close\r\n\r\n"
            % (port, port, port),
        )
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize("is_clients", [True, False])
def test_keys_are_passed_on_and_written_nowhere(tmp_path, capfd, is_clients):
    """The client's own goes upstream, else the gateway's; a server that quotes it changes nothing.

    The gateway's key does not reach the client either.
    """
    key = "sk-very-secret"

    def script(_body, _n):
        return refusal(500, f"bad key {key}")

    with gateway(tmp_path, script, script, api_key=None if is_clients else key) as running:
        headers = {"Authorization": f"Bearer {key}"} if is_clients else {}
        _, _, raw = call(running, STREAM, headers=headers)
        assert running.speculative.seen[0].headers["authorization"] == f"Bearer {key}"
        assert running.target.seen[0].headers["authorization"] == f"Bearer {key}"
        written = repr(running.kept.wait(2)) + "".join(capfd.readouterr())
        assert key not in written
        assert "bad key [api key]" in written
        assert (key.encode() in raw) == is_clients


def test_prompts_and_answers_are_not_kept_unless_asked(tmp_path):
    """Receipts name a prompt by a keyed digest; with store_prompts the texts are there."""
    secret_text = "my secret question"
    body = {**STREAM, "messages": [{"role": "user", "content": secret_text}]}
    with gateway(tmp_path) as running:
        call(running, body)
        call(running, body)
        one, two = running.kept.wait(2)
        assert running.kept.answers == [None, None]
        assert secret_text not in repr(one)
        assert one.prompt_id == two.prompt_id
        assert one.receipt_id != two.receipt_id
    with gateway(tmp_path, store_prompts="on") as running:
        call(running, body)
        running.kept.wait(1)
        kept = running.kept.answers[0]
        assert kept.text == TEXT
        assert kept.details["asked"]["messages"] == body["messages"]


def test_headers_of_the_gateway_are_not_the_clients_to_set(tmp_path):
    """Nothing named x-speccheck-* goes upstream, or comes back from there."""

    def script(_body, _n):
        made = answer([[7]])
        made.headers["X-Speccheck-Arm"] = "forged"
        return made

    with gateway(tmp_path, speculative=script) as running:
        headers = call(running, STREAM, headers={"X-Speccheck-Key": "k", "X-Other": "1"})[1]
        assert headers["x-speccheck-arm"] == "speculative"
        sent = running.speculative.seen[0].headers
        assert not [name for name in sent if name.startswith("x-speccheck")]
        assert sent["x-other"] == "1"


def test_hop_by_hop_headers_stop_here(tmp_path):
    """Connection, and what it names, concern one connection only."""
    with gateway(tmp_path) as running:
        call(
            running,
            STREAM,
            headers={"Connection": "x-hop", "X-Hop": "1", "TE": "trailers", "Upgrade": "h2c"},
        )
        sent = running.speculative.seen[0].headers
        assert not {"x-hop", "te", "upgrade"} & set(sent)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_refused(tmp_path, declared):
    """By its declared length at once, by its real one as soon as it is over."""
    with gateway(tmp_path, limits={"max_body_bytes": 1000}) as running:
        if declared:
            data = b"content-length: 2000\r\n\r\n" + b"x" * 100
        else:
            data = (
                b"transfer-encoding: chunked\r\n\r\n" + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n"
            )
        reply = raw_call(running, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + data)
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert running.target.seen == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: y\r\n" % i for i in range(900))
        + b"\r\n",
        b"GET /" + b"z" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-endless: " + b"y" * 200_000,
    ],
    ids=["one long", "many", "path", "endless"],
)
def test_a_head_that_is_too_long_is_refused(tmp_path, head):
    """431, and the connection is closed, whether or not the head ever ends."""
    with gateway(tmp_path, limits={"max_header_bytes": 4000}) as running:
        assert raw_call(running, head).startswith(b"HTTP/1.1 431 ")
        assert running.target.seen == []


@pytest.mark.parametrize("part", [b"0\r\n" + b"x: y\r\n" * 100, b"0\r\nx: ", b"1;x="])
def test_a_body_whose_end_is_too_long_is_refused(tmp_path, part):
    """Trailers and extensions are heads too: nothing of a request grows without bound."""
    begin = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    more = (b"x: y\r\n" if part.endswith(b"\n") else b"yyyyyy") * 200_000  # some reads long
    with gateway(tmp_path, limits={"max_header_bytes": 4000}) as running:
        reply = raw_call(running, begin + b"1\r\nx\r\n" + part + more)
        # Closed while the client writes, so that it may not come to read why.
        assert reply == b"" or reply.startswith(b"HTTP/1.1 431 ")
        assert running.target.seen == []


@pytest.mark.parametrize("begun", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(tmp_path, begun):
    """A client that sends nothing, or never an end, holds no connection."""
    with gateway(tmp_path, timeouts={"request_s": 0.2}) as running:
        assert raw_call(running, begun) == b""


def test_a_body_that_does_not_come_is_refused(tmp_path):
    """408, in time."""
    with gateway(tmp_path, timeouts={"request_s": 0.2}) as running:
        reply = raw_call(
            running, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"
        )
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_one_request_too_many_is_told_to_come_again(tmp_path):
    """503 with retry-after; those in flight are not touched."""
    slow = steps_then([60.0])
    with gateway(tmp_path, speculative=lambda _b, _n: slow, limits={"max_in_flight": 1}) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        first = connection.getresponse()
        status, headers, _ = call(running, STREAM)
        assert (status, headers["retry-after"]) == (503, "1")
        assert first.read1(10)
        first.close()
        connection.close()


def test_admin_is_closed_without_its_token(tmp_path):
    """403 where none is configured, 401 where it is wrong; with it the kill switch is there."""
    with gateway(tmp_path) as running:
        assert call(running, path="/speccheck/routes")[0] == 403
    with gateway(tmp_path, admin_token_env="X") as running:
        disable = "/speccheck/routes/chat/disable"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "admin-token"}):
            assert call(running, path=disable, method="POST", headers=headers)[0] == 401
        good = {"Authorization": "Bearer admin-token"}
        assert call(running, path=disable, method="POST", headers=good)[0] == 200
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "target_only"
        states = json.loads(call(running, path="/speccheck/routes", headers=good)[2])
        assert states["routes"]["chat"]["is_disabled"] is True
        enable = "/speccheck/routes/chat/enable"
        assert call(running, path=enable, method="POST", headers=good)[0] == 200
        for path in ("/speccheck/routes/..%2Fboard/disable", "/speccheck/routes/nope/disable"):
            assert call(running, path=path, method="POST", headers=good)[0] == 404
        assert call(running, STREAM)[1]["x-speccheck-arm"] == "speculative"


def test_what_a_client_says_cannot_end_a_header(tmp_path):
    """A route's name comes back in a reason, as printable text of limited length."""
    with gateway(tmp_path) as running:
        name = "é\x80" + "r" * 2000
        headers = call(running, STREAM, headers={"X-Speccheck-Route": name.encode("latin-1")})[1]
        assert headers["x-speccheck-arm"] == "target_only"
        assert len(headers["x-speccheck-decision"]) <= 300


async def test_a_thousand_streams_at_once(tmp_path):
    """Each gets its own answer, whole."""
    n = 1000
    steps = [[7], [8, 9], [10, 11, 2]]
    with gateway(
        tmp_path,
        speculative=lambda _b, _n: answer(steps, delay_s=0.01),
        limits={"max_in_flight": n},
        timeouts={"connect_s": 120, "request_s": 120},
    ) as running:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one() -> str:
                async with session.post(f"{running.url}/v1/chat/completions", json=STREAM) as reply:
                    return said(await reply.read())[0]

            texts = await asyncio.gather(*(one() for _ in range(n)))
        assert set(texts) == {TEXT}
        receipts = running.kept.wait(n)
        assert {r.outcome for r in receipts} == {"ok"}
        assert len({r.receipt_id for r in receipts}) == n
        assert running.board.total() == 0
