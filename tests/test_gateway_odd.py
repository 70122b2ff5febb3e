"""Answers and requests at the edge of what the gateway reads: nothing lost, doubled or made up."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import replace

import aiohttp
import pytest
from click.testing import CliRunner
from gateway_pair import WAIT_S, gateway
from scripted_server import (
    DONE,
    Drop,
    Script,
    answer,
    as_completion,
    chunk,
    sse,
    target_says,
    text_of,
    usage_of,
    whole,
)
from test_gateway_relay import (
    ALL,
    BODY,
    IDS,
    STREAM,
    TEXT,
    call,
    events_of,
    said,
    steps_then,
)
from test_store import receipt

from speccheck.cli.main import cli
from speccheck.config import FallbackConfig
from speccheck.errors import UsageError
from speccheck.fallback import Machine, late_mark, sticky
from speccheck.gateway.app import App
from speccheck.gateway.asked import Asked, read
from speccheck.gateway.choose import Decided
from speccheck.gateway.meters import _Said
from speccheck.gateway.outbox import Moved, SocketOutbox, Writer, line_of, written_of
from speccheck.gateway.relay import Relay, nowhere
from speccheck.gateway.server import _held, running
from speccheck.records import Arm
from speccheck.store import Run, Store


def eventually(check) -> None:
    """Once a check is true."""
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def errors_of(raw: bytes) -> list:
    return [event["error"]["message"] for event in events_of(raw) if "error" in event]


def ids_of(raw: bytes) -> list[int]:
    return [t for e in events_of(raw) for c in e["choices"] for t in c.get("token_ids") or ()]


def usages_of(raw: bytes) -> list:
    return [e["usage"] for e in events_of(raw) if not e["choices"]]


async def timed_out(running, monkeypatch, send, is_time):
    """The receipt of a speculative request whose total_s is over as soon as `is_time` is set."""
    real, timers = asyncio.timeout, []
    monkeypatch.setattr(asyncio, "timeout", lambda s: timers.append(real(s)) or timers[-1])
    decided = Decided(Arm.SPECULATIVE, "chat", "speculate", "")
    path = "/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        gate = replace(running.gate, session=session)
        relay = Relay(gate, Asked("chat", STREAM), path, [], decided, "0" * 32, 0, send)
        task = asyncio.create_task(relay.run())
        assert await asyncio.to_thread(is_time.wait, WAIT_S)
        timers[0].reschedule(0)
        await task
    return running.kept.wait(1)[0]


def test_a_mirrors_answer_stays_out_of_its_primarys(tmp_path):
    """Even where the mirror is answered first."""
    mirrored = threading.Event()

    def target(body, n):
        assert mirrored.wait(WAIT_S)
        return target_says()(body, n)

    with gateway(tmp_path, target, mirror={"share": 1.0}) as running:
        running.stand(share=0.0)
        threading.Thread(target=lambda: running.kept.wait(1) and mirrored.set()).start()
        raw = call(running, STREAM)[2]
        assert said(raw) == (TEXT, ["stop"], ["assistant"])


def test_an_end_that_was_not_delivered_is_no_end(tmp_path):
    """A chunk with too many tokens and a finish reason."""
    made = answer([[7], [8, 9]], finish="length", final_usage=False)
    with gateway(tmp_path, speculative=lambda _b, _n: made) as running:
        raw = call(running, {**STREAM, "max_tokens": 2})[2]
        assert errors_of(raw)
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome != "ok", receipt.handover_kind) == (True, "broken")


def test_usage_that_was_told_is_not_told_again(tmp_path):
    """The arm dies between its usage and [DONE]."""
    made = answer([[7], [8]], done=False)
    made.parts.append(Drop())
    with gateway(tmp_path, speculative=lambda _b, _n: made) as running:
        raw = call(running, ALL)[2]
        assert usages_of(raw) == [usage_of(5, 2)]


def test_usage_that_nobody_knows_is_not_made_up(tmp_path):
    """Without ids and usage of the arm there is nothing to count."""
    made = answer([[7], [8]], ids=False, continuous_usage=False, final_usage=False, done=False)
    made.parts.append(Drop())
    with gateway(
        tmp_path, speculative=lambda _b, _n: made, no_joint="x", hand_over="join"
    ) as running:
        raw = call(running, ALL)[2]
        assert usages_of(raw) == []


@pytest.mark.parametrize(
    "last", [chunk(text_of(8), [8], finish="abort"), {**chunk(text_of(8), [8]), "usage": 5}]
)
def test_ids_of_an_event_that_was_not_delivered_are_delivered_later(tmp_path, last):
    """A chunk that ends in a fault had text and ids: the client gets both, once."""
    made = answer([[7]], finish=None, final_usage=False, done=False)
    made.parts.append(sse(last))
    with gateway(tmp_path, speculative=lambda _b, _n: made) as running:
        raw = call(running, ALL)[2]
        assert said(raw) == (TEXT, ["stop"], ["assistant"])
        assert ids_of(raw) == IDS
        assert usages_of(raw) == [usage_of(5, 6)]


@pytest.mark.parametrize("more", [chunk("", finish="abort"), chunk("x", [9], finish="length")])
def test_what_comes_after_the_end_is_no_part_of_the_answer(tmp_path, more):
    """One finish reason, no more text, and the receipt has what the client has."""
    made = answer([[7], [8]], final_usage=False, done=False)
    made.parts += [sse(more), DONE]
    with gateway(tmp_path, speculative=lambda _b, _n: made) as running:
        raw = call(running, ALL)[2]
        assert said(raw) == (text_of(7) + text_of(8), ["stop"], ["assistant"])
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome, receipt.finish_reason) == ("ok", "stop")
        assert (receipt.completion_tokens, receipt.handover_kind) == (2, None)


@pytest.mark.parametrize("wanted", [1, "true", "yes", 1.0])
def test_a_stream_by_another_name(tmp_path, wanted):
    """Servers take 1 and "true" for true."""
    with gateway(tmp_path) as running:
        status, headers, raw = call(running, {**BODY, "stream": wanted})
        assert status == 200
        assert headers["x-speccheck-arm"] == "target_only"
        assert said(raw)[0] == TEXT


def test_running_usage_alone_is_no_wish_for_usage(tmp_path):
    """As in vLLM: without include_usage it means nothing."""
    with gateway(tmp_path) as running:
        call(running, {**STREAM, "stream_options": {"continuous_usage_stats": True}})
        assert running.speculative.seen[0].body["stream_options"] == {"include_usage": True}


def test_where_a_server_redirects_to_is_said_without_its_address(tmp_path):
    """A client that follows it comes back here."""

    def script(_body, _n):
        return Script(
            [],
            status=307,
            content_type=None,
            headers={"Location": f"{up[0]}/v1/chat/completions?a=b"},
        )

    up = [""]
    with gateway(tmp_path, script, script) as running:
        up[0] = running.target.url
        status, headers, _ = call(running, STREAM, "/v1/chat/completions/")
        assert (status, headers["location"]) == (307, "/v1/chat/completions?a=b")


def garbage_server(reply: bytes):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.recv(65536)
            one.sendall(reply)
            one.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/9 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_server_that_talks_nonsense_is_not_named(tmp_path, reply, is_stream):
    """No address of a server in an error of ours."""
    with garbage_server(reply) as listener:
        port = listener.getsockname()[1]
        urls = {arm: f"http://127.0.0.1:{port}/{arm}" for arm in Arm}
        with gateway(tmp_path, urls=urls) as running:
            status, _, raw = call(running, {**BODY, "stream": is_stream})
            assert status == 502
            assert str(port).encode() not in raw
            status, _, raw = call(running, path="/v1/models")
            assert str(port).encode() not in raw


def test_the_rest_is_asked_for_with_what_every_request_carries(tmp_path):
    """attached.extra holds after the joint too, under the client's own words."""
    with gateway(
        tmp_path,
        speculative=lambda _b, _n: steps_then([Drop()]),
        extra={"top_k": 3, "temperature": 0.5},
    ) as running:
        assert said(call(running, STREAM)[2])[0] == TEXT
        asked = next(s.body for s in running.target.seen if isinstance(s.body.get("prompt"), list))
        assert (asked["top_k"], asked["temperature"]) == (3, 0)


def test_what_every_request_carries_counts_for_what_can_be_continued(tmp_path):
    """attached.extra may rule a hand-over out."""
    with gateway(
        tmp_path, speculative=lambda _b, _n: steps_then([Drop()]), extra={"frequency_penalty": 1}
    ) as running:
        headers = call(running, STREAM)[1]
        assert headers["x-speccheck-arm"] == "target_only"


UNREADABLE = (
    *({"max_tokens": "3"}, {"max_tokens": 3.0}, {"max_completion_tokens": "3"}, {"n": "2"}),
    *({"seed": 3.0}, {"top_k": "4"}, {"top_p": "0.5"}, {"temperature": "0"}, {"min_p": "0.1"}),
    *({"frequency_penalty": "1"}, {"stop": {"a": 1}}, {"stop": ["a", 1]}, {"logprobs": 1}),
    *({"include_stop_str_in_output": "true"}, {"skip_special_tokens": 0}),
)


@pytest.mark.parametrize("hand_over", ["refuse", "join"])
def test_what_cannot_be_read_does_not_speculate(tmp_path, hand_over):
    """A server may read "3" and 3.0 as 3; what is not known is nothing to decide by."""
    with gateway(tmp_path, hand_over=hand_over) as running:
        for field in UNREADABLE:
            headers = call(running, {**STREAM, **field})[1]
            assert headers["x-speccheck-arm"] == "target_only"
            assert f"{next(iter(field))} is not readable" in headers["x-speccheck-decision"]


def test_no_limit_in_so_many_words_is_not_the_default_one(tmp_path):
    """VLLM's 16 tokens of a completion are for those who leave the field out."""
    script = as_completion(steps_then([Drop()]))
    first = json.loads(script.parts[0][6:])
    first["choices"][0]["prompt_token_ids"] = list(range(5))
    script.parts[0] = sse(first)
    with gateway(tmp_path, speculative=lambda _b, _n: script) as running:
        body = {"prompt": "hi", "stream": True, "temperature": 0, "max_tokens": None}
        call(running, body, "/v1/completions")
        assert running.target.seen[-1].body["max_tokens"] == 4096 - 5 - 2


def test_a_sign_of_life_is_no_beginning(tmp_path):
    """An arm that dies after keep-alives has told nothing: its request is sent again."""
    with gateway(tmp_path, speculative=lambda _b, _n: Script([b": ping\n\n", Drop()])) as running:
        raw = call(running, ALL)[2]
        assert said(raw) == (TEXT, ["stop"], ["assistant"])
        assert raw.startswith(b": ping\n\n")
        first, second = running.kept.wait(2)
        assert (first.handover_kind, second.outcome) == ("restarted", "ok")


def test_a_client_that_leaves_in_the_joint_hides_no_failure(tmp_path):
    """The guard of the route sees what the speculative arm did."""
    asked = threading.Event()

    def target(body, n):
        if "tokens" in body:
            return target_says()(body, n)
        asked.set()
        return Script([60.0])

    with gateway(tmp_path, target, lambda _b, _n: steps_then([Drop()])) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        reply = connection.getresponse()
        assert asked.wait(WAIT_S)
        reply.close()
        connection.close()
        receipt = running.kept.wait(1)[0]
        assert receipt.outcome == "cancelled"
        assert receipt.handover_from == "speculative"
        assert receipt.handover_reason


async def test_a_joint_that_takes_too_long_is_a_broken_answer(tmp_path, monkeypatch):
    """It ends with total_s, and the receipt says what began it."""
    told, asked = [], threading.Event()

    async def send(message):
        told.append(message.get("body", b""))

    def target(body, n):
        if "tokens" in body:
            return target_says()(body, n)
        asked.set()
        return Script([60.0])

    with gateway(tmp_path, target, lambda _b, _n: steps_then([Drop()])) as running:
        receipt = await timed_out(running, monkeypatch, send, asked)
        assert errors_of(b"".join(told))
        assert (receipt.handover_kind, receipt.handover_to) == ("broken", None)
        assert receipt.handover_reason.startswith("connection")


def test_one_choice_of_two_is_no_whole_answer(tmp_path):
    """The first choice has its end, the second has not begun: an error."""
    made = answer([[7], [8]], final_usage=False, done=False)
    made.parts.append(Drop())
    with gateway(tmp_path, speculative=lambda _b, _n: made, hand_over="join") as running:
        raw = call(running, {**STREAM, "temperature": 1, "n": 2})[2]
        assert errors_of(raw)
        assert running.kept.wait(1)[0].outcome != "ok"


@pytest.mark.parametrize("more", [chunk("late", [9]), {"error": {"message": "late"}}])
def test_what_comes_after_done_is_nobodys(tmp_path, more):
    """Whether or not it comes with the same read."""
    made = answer([[7], [8]], continuous_usage=False)
    data = b"".join(made.parts) + sse(more)
    with gateway(tmp_path, speculative=lambda _b, _n: Script([data])) as running:
        raw = call(running, ALL)[2]
        assert raw == b"".join(made.parts)
        receipt = running.kept.wait(1)[0]
        assert (receipt.outcome, receipt.completion_tokens, receipt.warnings) == ("ok", 2, ())


def test_the_prompt_that_is_counted_is_the_one_that_is_sent(tmp_path):
    """Tools and template count."""
    policy = {
        "rules": [{"name": "short", "when": {"prompt_tokens": {"below": 9}}, "use": "speculate"}]
    }
    more = {
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "x",
    }
    with gateway(
        tmp_path,
        lambda b, n: whole({"count": 9}) if "stream" not in b else target_says()(b, n),
        policy=policy,
    ) as running:
        call(running, {**STREAM, **more})
        asked = running.target.seen[0]
        assert asked.path == "/tokenize"
        assert asked.body == {
            "messages": BODY["messages"],
            **{k: v for k, v in more.items() if k != "tool_choice"},
        }


def test_how_to_speculate_is_not_the_clients_to_say(tmp_path):
    """The engine's own switches are the policy's."""
    with gateway(tmp_path) as running:
        call(running, {**STREAM, "k": 50, "speculation": "off"})
        assert not {"k", "speculation"} & set(running.speculative.seen[0].body)


@pytest.mark.parametrize("depth", [150, 250, 990, 5000])
def test_a_body_that_is_read_can_be_written(depth):
    """What nests too deep for servers is passed on as the bytes it is."""
    raw = json.dumps(STREAM).encode()[:-1] + b',"metadata":' + b"[" * depth + b"]" * depth + b"}"
    asked = read("/v1/chat/completions", raw)
    assert (asked is not None) == (depth < 200)


def test_an_answer_that_is_passed_on_to_nobody_ends_in_time(tmp_path):
    """A client that takes nothing holds its place for total_s at most."""
    filler = Script([b"x" * 65_536] * 400, content_type="x/y")
    with (
        gateway(tmp_path, lambda _b, _n: filler, timeouts={"total_s": 0.5}) as running,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", running.port))
        client.sendall(b"POST /v1/other HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        assert client.recv(1)
        eventually(lambda: running.gate.in_flight_all == 0)


async def test_mirrors_are_counted_from_the_moment_they_are_made(tmp_path):
    """However many requests come in one turn of the event loop."""
    with gateway(tmp_path, mirror={"share": 1.0, "max_in_flight": 2}) as running:
        app = App(running.gate)
        decided = Decided(Arm.TARGET_ONLY, "chat", "target_only", "control", is_eligible=True)
        made = [
            Relay(running.gate, Asked("chat", STREAM), "/x", [], decided, f"{n:032x}", 0, nowhere)
            for n in range(5)
        ]
        for relay in made:
            app._mirror(relay)
        assert len(app._mirrors) == 2
        for task in app._mirrors:
            task.cancel()
        await asyncio.gather(*app._mirrors, return_exceptions=True)


def test_hop_by_hop_headers_of_a_server_stop_here_too(tmp_path):
    """Connection, and what it names."""

    def script(_body, _n):
        made = answer([[7]])
        made.headers |= {"Connection": "x-hop", "X-Hop": "1", "X-Other": "2"}
        return made

    with gateway(tmp_path, script, script) as running:
        for path in ("/v1/chat/completions", "/v1/other"):
            headers = call(running, STREAM, path)[1]
            assert headers["x-other"] == "2"
            assert "x-hop" not in headers


def test_an_answer_that_the_gateway_ends_is_not_its_clients_doing(tmp_path):
    """The receipt of a gateway that is stopped says so."""
    with gateway(tmp_path, speculative=lambda _b, _n: steps_then([60.0])) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        assert connection.getresponse().status == 200
    connection.close()
    (one,) = running.kept.wait(1)
    assert (one.outcome, one.error_class) == ("cancelled", "gateway_stopped")


def test_a_switch_that_cannot_be_thrown_says_so(tmp_path):
    """The admin is told, and the route goes on as it was."""
    with gateway(tmp_path, admin_token_env="X") as running:
        running.off.rmdir()
        headers = {"Authorization": "Bearer admin-token"}
        path = "/speccheck/routes/chat/disable"
        status, _, raw = call(running, path=path, method="POST", headers=headers)
        assert status == 500
        assert "disable has no effect" in json.loads(raw)["error"]["message"]


async def test_a_client_that_takes_nothing_is_no_failure_of_the_arm(tmp_path, monkeypatch):
    """Its time is up, and the guard of the route has nothing to do with it."""
    told = threading.Event()

    async def send(message):
        if message["type"] == "http.response.body":
            told.set()
            await asyncio.Event().wait()

    with gateway(tmp_path) as running:
        receipt = await timed_out(running, monkeypatch, send, told)
        assert (receipt.outcome, receipt.error_class) == ("cancelled", "client_slow")


def test_a_mirror_runs_as_its_primary_would_have(tmp_path):
    """With the policy's proposal length; the control itself has none."""
    policy = {"rules": [{"name": "short", "use": "speculate", "k": 2}]}
    with gateway(tmp_path, policy=policy, mirror={"share": 1.0}) as running:
        running.stand(share=0.0)
        call(running, STREAM)
        one, other = sorted(running.kept.wait(2), key=lambda r: r.mirror)
        assert (one.k, other.k) == (None, 2)
        assert "k" not in running.target.seen[0].body
        assert running.speculative.seen[0].body["k"] == 2


def test_headers_go_on_as_the_bytes_they_are(tmp_path):
    """UTF-8 is not encoded twice."""
    with gateway(tmp_path) as running:
        call(running, STREAM, headers={"X-Title": "世界".encode()})
        assert running.speculative.seen[0].headers["x-title"].encode("latin-1") == "世界".encode()


# --- receipts -----------------------------------------------------------------------------------

NAMES = (
    *({"\ud800": 1}, {"a\x00b": 1}, {"x" * 1000: 1}, {f"x{n}": 1 for n in range(40)}),
    *({"response_format": {"type": "\ud800"}}, {"structured_outputs": {"\udfff": 1}}),
)
NUMBERS = (
    *({"top_k": 2**52}, {"seed": -(2**52)}, {"max_tokens": 2**52}, {"max_tokens": -5}),
    *({"temperature": 1e15}, {"presence_penalty": -1e300}, {"top_p": 1e-320}, {"n": -3}),
    *({"logprobs": True, "top_logprobs": 2**45}, {"user": "\ud800"}, {"model": "\ud800"}),
)


def begin(store: Store) -> None:
    store.begin_run(Run("run:test", 1, 0, "", "", {}), wall_ns=1, clock_ns=1)


def writer_of(folder, said: list[str]) -> Writer:
    return Writer(folder / "r.duckdb", begin=begin, limit=1000, every_s=999, say=said.append)


@pytest.mark.parametrize("store_prompts", ["off", "on"])
def test_no_request_makes_a_receipt_that_the_store_does_not_take(tmp_path, store_prompts):
    """Whatever a client names its fields, whatever its numbers; what it names is kept short."""
    headers = {"X-Speccheck-Task": b"\xff\x80", "X-Speccheck-Priority": b"\xfe"}
    with gateway(tmp_path, store_prompts=store_prompts) as running:
        for more in NAMES:
            told = call(running, {**STREAM, **more}, headers=headers)[1]
            assert told["x-speccheck-decision"].endswith(" is not readable")
        for more in (*NUMBERS, {"messages": [{"content": "\ud800"}]}):
            call(running, {**STREAM, **more}, headers=headers)
        running.kept.wait(len(NAMES) + len(NUMBERS) + 1)
    kept = running.kept  # whole, now that nothing runs: a mirror or a second attempt comes late
    n = len(kept.receipts)
    assert max(len(one.features) for one in kept.receipts) < 500
    said: list[str] = []
    writer = writer_of(tmp_path, said)
    for item in zip(kept.receipts, kept.answers, strict=True):
        writer.put(written_of(line_of(*item)))
    writer.flush()
    assert (writer.written, writer.lost, said) == (n, 0, [])


def test_a_receipt_that_the_store_does_not_take_is_lost_alone(tmp_path):
    """The others are written, and the loss is counted and said."""
    said: list[str] = []
    writer = writer_of(tmp_path, said)
    for n in range(5):
        one = receipt(n, run_id="run:test")
        writer.put((replace(one, task="\ud800") if n == 2 else one, None))
    writer.flush()
    assert (writer.written, writer.lost, writer.waiting) == (4, 1, 0)
    assert len(said) == 1
    assert writer.problem == ""


def test_receipts_that_wait_have_a_size_too(tmp_path, monkeypatch):
    """With prompts in them, a number of them is no bound of memory."""
    monkeypatch.setattr("speccheck.gateway.outbox.MOST_KEPT_BYTES", 100)
    writer = writer_of(tmp_path, [])
    for n in range(3):
        writer.put((receipt(n, run_id="run:test"), None), 60)
    assert (writer.waiting, writer.lost) == (1, 2)
    writer.flush()
    writer.put((receipt(9, run_id="run:test"), None), 60)
    assert (writer.waiting, writer.lost) == (1, 2)


def test_what_is_lost_at_the_end_is_said(tmp_path):
    """Receipts, scrapes and transitions, where the store takes none any more."""
    said: list[str] = []
    (tmp_path / "r.duckdb").mkdir()
    writer = writer_of(tmp_path, said)
    writer.put((receipt(1), None))
    writer.put_sample(Arm.SPECULATIVE, late_mark("receipt:1", 1))
    moved = Machine(sticky(FallbackConfig()), "chat").disable(5, "me")
    assert moved is not None
    writer.put_transition(Moved(moved, 5, "s"))
    writer.start()
    assert writer.stop() == "1 receipts (0 were written), 1 scrapes, 1 transitions"


def test_scrapes_that_were_lost_are_shown(tmp_path):
    """On /metrics and by `route status`, beside the receipts."""
    with gateway(tmp_path) as running:
        running.publish(receipts={**running.said["receipts"], "scrapes_lost": 7})
        page = "\n".join(
            f"{sample.name} {sample.value}"
            for metric in _Said(running.gate.said).collect()
            for sample in metric.samples
        )
        assert "speccheck_gateway_scrapes_lost_total 7" in page
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "gateway").symlink_to(tmp_path)
        shown = CliRunner().invoke(cli, ["route", "status", "--out", str(tmp_path / "out")])
        assert "scrapes: 7 lost" in shown.output


def test_a_line_that_the_parent_would_not_take_is_not_written(monkeypatch):
    """It would end the worker, and every answer with it."""
    monkeypatch.setattr("speccheck.gateway.outbox.LONGEST_LINE", 5000)
    lost: list[int] = []

    class Line(asyncio.WriteTransport):
        written = b""

        def get_write_buffer_size(self) -> int:
            return 0

        def is_closing(self) -> bool:
            return False

        def write(self, data) -> None:
            self.written += data

    line = Line()
    outbox = SocketOutbox(line, lost.append)
    outbox.put(receipt(1), None)
    outbox.put(receipt(2, error_message="x" * 5000), None)
    assert (line.written.count(b"\n"), lost) == (1, [1])


# --- the parent ---------------------------------------------------------------------------------


def test_a_folder_is_held_by_a_lock_and_not_by_a_number(tmp_path):
    """What a gateway that was killed left behind holds nobody up, whoever has its PID now."""
    (tmp_path / "gateway" / "metrics").mkdir(parents=True)
    (tmp_path / "gateway" / "pid").write_text(str(os.getpid()))
    assert running(tmp_path) is None
    with _held(tmp_path):
        (tmp_path / "gateway" / "metrics" / "counter_1.db").touch()
        assert running(tmp_path) == os.getpid()
        with pytest.raises(UsageError, match=rf"runs there already \(PID {os.getpid()}\)"):
            _held(tmp_path).__enter__()
        assert (tmp_path / "gateway" / "metrics" / "counter_1.db").exists()
    assert running(tmp_path) is None
