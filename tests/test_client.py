"""The streaming client against a server that knows what it sent."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import (
    DONE,
    Drop,
    Script,
    ScriptedServer,
    answer,
    chunk,
    gzipped,
    recut,
    refusal,
    spec_metrics,
    sse,
    text_of,
    usage_of,
)

from speccheck import client
from speccheck.client import Observation, SpecCounts, SseParser, parse_counts, target_passes
from speccheck.errors import EngineError
from speccheck.records import (
    Arm,
    ArmDescription,
    Outcome,
    PlannedRequest,
    Prompt,
    Sampler,
    Stage,
    digest,
    receipt_key,
)

PROMPT = Prompt(
    prompt_id="p1",
    task="qa",
    route="chat",
    messages=({"role": "user", "content": "Say né 🙂"},),
    max_tokens=64,
    check={"kind": "none"},
)
SPECULATIVE = ArmDescription(
    arm=Arm.SPECULATIVE,
    url="http://s",
    engine="scripted 1",
    model="target",
    speculative_config={"method": "draft_model", "model": "draft", "num_speculative_tokens": 4},
)
TARGET_ONLY = ArmDescription(Arm.TARGET_ONLY, "http://b", "scripted 1", "target", None)


def planned(**changes) -> PlannedRequest:
    request = PlannedRequest(
        stage=Stage.REPLAY,
        phase="greedy",
        arm=Arm.SPECULATIVE,
        route="chat",
        prompt=PROMPT,
        pair_id="greedy:p1:0",
        repeat=0,
        sampler=Sampler(),
        max_tokens=64,
        concurrency=1,
    )
    return replace(request, **changes)


async def observe(script: Script, request: PlannedRequest | None = None, **options) -> Observation:
    with ScriptedServer(lambda _body, _n: script) as server:
        async with client.open_session() as session:
            return await client.send(session, server.url, "m", request or planned(), **options)


# --- counting and timing ------------------------------------------------------------------------

STEPS = [[7], [8, 9, 10], [1, 2, 3, 4, 5], [6], [11]]


async def test_tokens_are_counted_by_ids_never_by_chunks():
    """Chunks of one, three and five tokens count as what they hold."""
    script = answer(STEPS)
    seen = await observe(script)
    assert seen.outcome is Outcome.OK
    assert (seen.completion_tokens, seen.tokens_source) == (len(script.token_ids), "ids")
    assert seen.token_ids == tuple(script.token_ids)
    assert seen.text == script.text
    assert seen.chunks == len(STEPS)
    assert seen.prompt_tokens == 5
    assert seen.prompt_token_ids == (0, 1, 2, 3, 4)
    assert seen.warnings == ()


@pytest.mark.parametrize(("continuous", "final"), [(True, True), (True, False), (False, True)])
async def test_without_ids_tokens_are_counted_by_usage(continuous, final):
    """Running usage counts where there are no ids, and final usage where there is nothing else."""
    script = answer(STEPS, ids=False, continuous_usage=continuous, final_usage=final)
    seen = await observe(script)
    assert (seen.completion_tokens, seen.tokens_source) == (len(script.token_ids), "usage")
    assert seen.token_ids is None
    assert seen.text == script.text


async def test_without_ids_and_usage_the_count_is_missing():
    """No source of counts gives None, not the number of chunks."""
    seen = await observe(answer(STEPS, ids=False, continuous_usage=False, final_usage=False))
    assert seen.outcome is Outcome.OK
    assert (seen.completion_tokens, seen.tokens_source) == (None, "none")


async def test_ids_and_usage_that_differ_are_a_warning():
    """Ids stand, and the receipt says that usage disagrees."""
    script = Script(
        [
            sse(chunk(" a", [1], finish="stop")),
            sse({"choices": [], "usage": usage_of(5, 9)}),
            DONE,
        ]
    )
    seen = await observe(script)
    assert seen.completion_tokens == 1
    assert seen.warnings == ("1 token ids received, usage says 9",)


def watched(*events: tuple[int, bytes]) -> Observation:
    """What the client makes of events that arrive at the given milliseconds."""
    stream = client.Stream(started_ns=0)
    stream.status = 200
    for at_ms, event in events:
        stream.take(event.removeprefix(b"data: ").strip(), at_ms * 1_000_000)
    return stream.observation(planned(max_tokens=512), {}, None)


def test_first_token_is_the_first_chunk_with_ids():
    """T26: 480 ms, not the role chunk at 12 ms, nor the first content, which is apart at 3900."""
    seen = watched(
        (12, sse(chunk("", role="assistant"))),
        (480, sse(chunk(None, [1, 2, 3], reasoning="hm"))),
        (500, sse(chunk(None, list(range(4, 410)), reasoning="hm"))),
        (3900, sse(chunk("Yes", [5], finish="stop"))),
        (3950, sse(chunk(None, [6, 7]))),
        (3990, sse({"choices": [], "usage": usage_of(5, 412, reasoning=409)})),
        (3991, DONE),
    )
    receipt = client.make_receipt(seen, planned(), "r", SPECULATIVE, "v")
    assert receipt.outcome == "ok"
    assert receipt.ttft_s == 0.48
    assert receipt.first_content_ns == 3_900_000_000
    assert receipt.e2e_s == 3.95
    assert receipt.completion_tokens == 412
    assert receipt.tpot_s == pytest.approx((3.95 - 0.48) / 411)
    assert receipt.max_chunk_gap_ns == 3_400_000_000
    assert (seen.text, seen.reasoning, receipt.reasoning_tokens) == ("Yes", "hmhm", 409)
    assert seen.warnings == ()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_without_ids_reasoning_is_the_first_token(name):
    """Where no ids come, reasoning under either name starts the clock, content is apart."""
    seen = watched(
        (12, sse(chunk("", role="assistant"))),
        (480, sse(chunk(None, None, **{name: "hm"}))),
        (3900, sse(chunk("Yes", finish="stop"))),
        (3990, DONE),
    )
    assert (seen.first_token_ns, seen.first_content_ns) == (480_000_000, 3_900_000_000)
    assert seen.last_token_ns == 3_900_000_000
    assert (seen.text, seen.reasoning) == ("Yes", "hm")


async def test_times_are_taken_when_bytes_arrive():
    """No chunk is stamped before the server sent it, and the stamps are in order."""
    script = answer([[1], [2], [3]], delay_s=0.005)
    with ScriptedServer(lambda _body, _n: script) as server:
        async with client.open_session() as session:
            seen = await client.send(session, server.url, "m", planned())
        sent = server.seen[0]
    assert seen.first_token_ns is not None
    assert seen.last_token_ns is not None
    assert seen.sent_ns < sent.arrived_ns
    assert sent.sent_at_ns[1] < seen.first_token_ns <= seen.last_token_ns < seen.done_ns
    assert sent.sent_at_ns[3] < seen.last_token_ns


async def test_streamed_tool_calls_are_output():
    """A tool call starts the clock like text, and its pieces are joined per call."""
    calls = [
        {"index": 0, "function": {"name": "find", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"q":'}},
        {"index": 1, "function": {"name": "stop", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    parts: list[bytes | float | Drop] = [sse(chunk(None, tool_calls=[call])) for call in calls]
    seen = await observe(Script([*parts, sse(chunk(None, finish="tool_calls")), DONE]))
    assert seen.outcome is Outcome.OK
    assert seen.tool_calls == 'find{"q":1}\nstop{}'
    assert seen.first_token_ns is not None
    assert client.output_digest(seen) is not None


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [2, 3], [7, 1, 50], [4096]])
async def test_where_the_bytes_are_cut_does_not_matter(sizes):
    """Events, characters and line ends split over chunks are put together again."""
    script = answer(STEPS, metrics=spec_metrics([(3, 4), (2, 4)], 4))
    seen = await observe(recut(script, sizes))
    assert seen.outcome is Outcome.OK
    assert seen.token_ids == tuple(script.token_ids)
    assert seen.text == script.text


async def test_comments_line_ends_and_many_lines_are_understood():
    """Keep-alive comments, CRLF, event fields and data over several lines are all legal."""
    script = Script(
        [
            b"\xef\xbb\xbf: keep-alive\r\n\r\n",
            b'event: x\r\nid: 7\r\ndata: {"choices":\r\n',
            b'data: [{"delta": {"content": "a"}, "token_ids": [1]}]}\r\n\r\n',
            b": ping\n\n",
            b'data:{"choices": [{"delta": {"content": "b"}, "token_ids": [2]}]}\r\r',
            sse(chunk("", finish="stop"), "\r\n\r\n"),
            b"data: [DONE]\r\n\r\n",
        ]
    )
    seen = await observe(script)
    assert seen.outcome is Outcome.OK
    assert (seen.text, seen.token_ids) == ("ab", (1, 2))


def reference_events(data: bytes) -> list[bytes]:
    """The event stream rules of the HTML standard, written slowly."""
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events: list[bytes] = []
    lines: list[bytes] = []
    for line in text.split(b"\n")[:-1]:
        if line == b"":
            if lines:
                events.append(b"\n".join(lines))
            lines = []
        elif line.startswith(b":"):
            continue
        else:
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value.removeprefix(b" "))
    return events


@settings(max_examples=500)
@given(
    st.lists(
        st.sampled_from(
            [
                b"data: x",
                b"data:y",
                b"data",
                b"data: ",
                b": c",
                b"id: 1",
                b"\n",
                b"\r\n",
                b"\r",
                b"datax: n",
                "data: né世".encode(),
                b"\n\n",
                b"\r\n\r\n",
            ]
        ),
        max_size=30,
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_parser_agrees_with_the_standard_however_it_is_fed(pieces, sizes):
    """The quick parser gives the events that a literal reading of the standard gives."""
    data = b"".join(pieces) + b"\n\n"
    parser, got, at, i = SseParser(), [], 0, 0
    while at < len(data):
        size = sizes[i % len(sizes)]
        got += parser.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert got == reference_events(data)
    assert SseParser().feed(data) == reference_events(data)


async def test_a_compressed_stream_is_read():
    """A proxy that compresses against our wish costs timing, not the answer."""
    script = answer(STEPS)
    seen = await observe(gzipped(script))
    assert seen.token_ids == tuple(script.token_ids)


async def test_a_line_of_megabytes_is_read():
    """There is no line limit short of MAX_EVENT_BYTES."""
    text = "x" * 5_000_000
    script = Script([sse(chunk(text, [1], finish="stop")), DONE])
    assert (await observe(script)).text == text


async def test_a_line_without_end_is_a_broken_stream(monkeypatch):
    """Above MAX_EVENT_BYTES the stream is given up, with the limit in the message."""
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 2**20)
    parts: list[bytes | float | Drop] = [b"data: " + b"x" * 2**16] * 40
    seen = await observe(Script(parts))
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "bad_stream")
    assert "1 MiB" in (seen.error_message or "")


async def test_half_a_character_in_json_is_joined_or_replaced():
    """A surrogate pair split over two chunks becomes one character; a lone half never escapes."""
    script = Script(
        [
            b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
            b'data: {"choices": [{"delta": {"content": "\\ude42 \\ud83d"}}]}\n\n',
            sse(chunk("", finish="stop")),
            DONE,
        ]
    )
    seen = await observe(script)
    assert seen.text == "🙂 \ufffd"
    assert client.output_digest(seen) is not None


# --- how an attempt can end ---------------------------------------------------------------------


async def test_an_error_inside_a_stream_of_status_200_is_an_error():
    """T18: http 200, an error line, [DONE]: one error, no finish, counts missing with a reason."""
    error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
    seen = await observe(Script([sse(chunk("The pl", [1, 2])), sse({"error": error}), DONE]))
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "stream_error")
    assert (seen.http_status, seen.finish_reason) == (200, None)
    assert seen.error_message == "Internal server error"
    assert seen.counts_note == "no metrics: stream_error"
    receipt = client.make_receipt(seen, planned(), "r", SPECULATIVE, "v")
    assert (receipt.outcome, receipt.proposed_tokens) == ("error", None)


@pytest.mark.parametrize(
    ("script", "error_class"),
    [
        (answer(STEPS, finish=None), "no_finish_reason"),
        (answer(STEPS, done=False), "no_done"),
        (answer(STEPS, finish=None, done=False), "no_finish_reason"),
        (Script([sse(chunk(" a", [1])), 0.02, Drop()]), "connection"),
    ],
)
async def test_a_stream_that_is_cut_is_incomplete(script, error_class):
    """No finish_reason, no [DONE] or a lost connection: incomplete, with what came kept."""
    seen = await observe(script)
    assert (seen.outcome, seen.error_class) == (Outcome.INCOMPLETE, error_class)
    assert seen.token_ids


async def test_an_aborted_request_is_cancelled():
    """The server's own finish_reason abort is neither ok nor an error of the answer."""
    seen = await observe(answer(STEPS, finish="abort"))
    assert (seen.outcome, seen.error_class) == (Outcome.CANCELLED, "aborted")


@pytest.mark.parametrize(
    ("status", "outcome", "error_class"),
    [
        (400, Outcome.REJECTED, "bad_request"),
        (401, Outcome.REJECTED, "unauthorised"),
        (404, Outcome.REJECTED, "not_found"),
        (429, Outcome.REJECTED, "overloaded"),
        (503, Outcome.REJECTED, "overloaded"),
        (500, Outcome.ERROR, "server_error"),
        (502, Outcome.ERROR, "server_error"),
    ],
)
async def test_refusals_are_classified(status, outcome, error_class):
    """Each status has its class, and the server's message is kept."""
    seen = await observe(refusal(status, "so it is"))
    assert (seen.outcome, seen.error_class, seen.http_status) == (outcome, error_class, status)
    assert seen.error_message == "so it is"
    assert seen.chunks is None


MIN_P = (
    "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
)


async def test_an_unsupported_parameter_is_named():
    """T13: of the parameters that the server refuses, the one that the request carries."""
    request = planned(sampler=Sampler(min_p=0.05))
    seen = await observe(refusal(400, MIN_P), request)
    assert (seen.outcome, seen.error_class) == (Outcome.REJECTED, "unsupported_parameter")
    assert seen.error_message == f"parameter min_p: {MIN_P}"


async def test_a_parameter_that_was_never_sent_points_to_the_generation_config():
    """T13's variant: the model's own defaults can bring in what no request has."""
    seen = await observe(refusal(400, MIN_P))
    assert seen.error_class == "unsupported_parameter"
    assert "generation_config" in (seen.error_message or "")


async def test_an_extension_that_the_server_does_not_know_is_named():
    """A plain OpenAI server refuses vLLM's fields by name."""
    message = "Unrecognized request argument supplied: return_token_ids"
    seen = await observe(refusal(400, message))
    assert (seen.error_message or "").startswith("parameter return_token_ids: ")


@pytest.mark.parametrize(
    ("message", "param", "error_class", "said"),
    [
        ("Not supported.", "logit_bias", "unsupported_parameter", "parameter logit_bias (not in"),
        ("Images are not supported.", None, "bad_request", "Images are not supported."),
        ("seed must be below 10", "seed", "bad_request", "seed must be below 10"),
    ],
)
async def test_only_a_named_parameter_is_blamed(message, param, error_class, said):
    """The error's own `param` names it too; a refusal of something else is a bad request."""
    seen = await observe(refusal(400, message, param))
    assert seen.error_class == error_class
    assert (seen.error_message or "").startswith(said)


async def test_a_prompt_that_is_too_long_is_told_from_a_bad_request():
    """Length is a property of the prompt, not of the arm."""
    message = "This model's maximum context length is 2048 tokens."
    assert (await observe(refusal(400, message))).error_class == "context_length"


async def test_a_refusal_whose_body_is_cut_keeps_its_status():
    """The status alone still tells the class."""
    seen = await observe(Script([0.02, Drop()], status=503, content_type="application/json"))
    assert (seen.outcome, seen.error_class) == (Outcome.REJECTED, "overloaded")
    assert seen.error_message == "HTTP 503"


async def test_redirects_are_not_followed():
    """Following one would be a second request, with the key, to somebody else."""
    reply = Script([], status=307, headers={"Location": "http://127.0.0.1:1/"})
    seen = await observe(reply, api_key="sk-1")
    assert (seen.outcome, seen.error_class) == (Outcome.REJECTED, "redirected")


async def test_another_content_type_is_a_broken_stream():
    """JSON with status 200 is no stream, and the message says what came instead."""
    reply = Script([b'{"choices": []}'], content_type="application/json")
    seen = await observe(reply)
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "bad_stream")
    assert "application/json" in (seen.error_message or "")


async def test_a_server_that_is_silent_times_out():
    """The time limit is for the whole answer and keeps what came before it."""
    seen = await observe(Script([sse(chunk(" a", [1])), 5.0]), timeout_s=0.2)
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "timeout")
    assert seen.token_ids == (1,)


async def test_a_server_that_is_not_there_is_unreachable():
    """No connection at all is told from one that was lost."""
    with ScriptedServer(lambda _body, _n: answer([])) as server:
        url = server.url
    async with client.open_session() as session:
        seen = await client.send(session, url, "m", planned())
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "unreachable")
    assert seen.http_status is None


async def test_a_connection_lost_before_the_reply_is_an_error():
    """Nothing had begun, so nothing is incomplete."""

    async def drop(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with client.open_session() as session:
        seen = await client.send(session, url, "m", planned())
    server.close()
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "connection")


async def test_nothing_is_retried():
    """One attempt is one request, whatever its end."""
    with ScriptedServer(lambda _body, _n: refusal(503, "later")) as server:
        async with client.open_session() as session:
            await client.send(session, server.url, "m", planned())
        assert len(server.seen) == 1


async def test_cancelling_closes_the_connection():
    """The server notices that nobody listens any more."""
    script = Script([sse(chunk(" a", [1])), *[0.02] * 200])
    with ScriptedServer(lambda _body, _n: script) as server:
        async with client.open_session() as session:
            task = asyncio.create_task(client.send(session, server.url, "m", planned()))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                if server.seen[0].cut_off:
                    break
                await asyncio.sleep(0.02)
        assert server.seen[0].cut_off


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "content",
                    "token_ids",
                    "usage",
                    "metrics",
                    "error",
                    "finish_reason",
                    "completion_tokens",
                    "speculative_decoding",
                    "num_spec_steps",
                    "tool_calls",
                    "reasoning",
                    "stop_reason",
                    "prompt_token_ids",
                    "completion_tokens_details",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.lists(json_values, max_size=4), st.binary(max_size=20))
def test_no_event_of_any_shape_raises(values, raw):
    """Whatever a server streams ends in an observation and a receipt."""
    stream = client.Stream(started_ns=1)
    stream.status = 200
    for payload in [json.dumps(value).encode() for value in values] + [raw, b"[DONE]"]:
        stream.take(payload, 2)
    seen = stream.observation(planned(), {}, None)
    receipt = client.make_receipt(seen, planned(), "r", SPECULATIVE, "v")
    assert receipt.outcome in {"error", "incomplete", "ok", "cancelled"}


async def test_a_refusal_that_comes_as_an_event_is_a_refusal():
    """T13 as vLLM 0.32 streams it: HTTP 200, then an error event with code 400, nothing generated.

    The same event after a token is an error: something had begun.
    """
    error = {
        "message": "The min_p and logit_bias sampling parameters are not yet supported with "
        "speculative decoding.",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    request = planned(sampler=Sampler(min_p=0.05))
    seen = await observe(Script([sse({"error": error}), DONE]), request)
    assert (seen.outcome, seen.error_class) == (Outcome.REJECTED, "unsupported_parameter")
    assert seen.error_message.startswith("parameter min_p: The min_p and logit_bias")
    seen = await observe(Script([sse(chunk("x", [1])), sse({"error": error}), DONE]), request)
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "stream_error")
    for other in ({"error": error | {"code": 500}}, {"error": "boom"}):
        seen = await observe(Script([sse(other), DONE]), request)
        assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "stream_error")


# --- answers in one piece, several choices, log-probabilities ------------------------------------


def whole(*choices, usage=None, **more):
    """A chat answer that is not streamed, as a script."""
    listed = [{"index": i, **choice} for i, choice in enumerate(choices)]
    body = {"choices": listed, "usage": usage, **more}
    return Script([json.dumps(body).encode()], content_type="application/json")


def message(text, ids, finish="stop", **more):
    """One whole choice."""
    return {
        "message": {"role": "assistant", "content": text, **more},
        "token_ids": list(ids),
        "finish_reason": finish,
    }


async def test_an_answer_in_one_piece_has_its_end_and_no_other_time():
    """Counts, ids and reasons as in a stream; TTFT and chunks are missing, not invented."""
    counts = spec_metrics([(2, 4)], 4)
    script = whole(message("hi", [4, 5, 6]), usage=usage_of(7, 3, cached=4), metrics=counts)
    request = planned(stream=False)
    seen = await observe(script, request)
    assert (seen.outcome, seen.text, seen.token_ids) == (Outcome.OK, "hi", (4, 5, 6))
    assert (seen.prompt_tokens, seen.completion_tokens, seen.cached_tokens) == (7, 3, 4)
    assert seen.counts is not None
    assert seen.counts.accepted_tokens == 2
    assert (seen.first_token_ns, seen.first_content_ns, seen.chunks) == (None, None, None)
    receipt = client.make_receipt(seen, request, "r", SPECULATIVE, "v")
    assert receipt.e2e_s is not None
    assert (receipt.ttft_s, receipt.tpot_s) == (None, None)
    assert receipt.output_digest == digest("output", [4, 5, 6])
    body = client.request_body("m", request)
    assert body["stream"] is False
    assert "stream_options" not in body


@pytest.mark.parametrize("body", ["no json", "[]", '{"choices": 3}', '{"choices": [{}]}', "{}"])
async def test_a_broken_whole_answer_is_a_broken_stream(body):
    """Whatever comes in place of an answer is an error of the server, not an exception here."""
    script = Script([body.encode()], content_type="application/json")
    seen = await observe(script, planned(stream=False))
    assert (seen.outcome, seen.error_class) == (Outcome.ERROR, "bad_stream")


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_kept_apart_and_counted_together(stream):
    """Interleaved or whole, out of order or not: texts and ids by index, tokens of all of them."""
    if stream:
        chunks = [
            {"index": 1, "delta": {"content": "b"}, "token_ids": [8]},
            {"index": 0, "delta": {"content": "a"}, "token_ids": [7, 7]},
            {"index": 1, "delta": {"content": "B"}, "token_ids": [9], "finish_reason": "length"},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ]
        parts = [sse({"choices": [choice]}) for choice in chunks]
        script = Script([*parts, sse({"choices": [], "usage": usage_of(5, 4)}), DONE])
    else:
        script = whole(message("a", [7, 7]), message("bB", [8, 9], "length"), usage=usage_of(5, 4))
    request = planned(n=2, stream=stream)
    seen = await observe(script, request)
    assert (seen.outcome, seen.warnings) == (Outcome.OK, ())
    assert (seen.text, seen.token_ids, seen.finish_reason) == ("a", (7, 7), "stop")
    assert seen.others == (client.Choice("bB", (8, 9), "length"),)
    assert seen.completion_tokens == 4
    assert seen.counts_note.startswith("several choices")
    kept = client.make_answer(seen, "x")
    assert kept.details == {
        "choices": [{"text": "bB", "token_ids": (8, 9), "finish_reason": "length"}]
    }
    assert client.make_receipt(seen, request, "r", SPECULATIVE, "v").features == "n"


async def test_a_choice_that_never_ends_makes_the_answer_incomplete():
    """Each choice needs its own finish_reason."""
    parts = [sse({"choices": [{"index": i, "delta": {"content": "x"}}]}) for i in (0, 1)]
    end = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    seen = await observe(Script([*parts, end, DONE]), planned(n=2))
    assert (seen.outcome, seen.error_class) == (Outcome.INCOMPLETE, "no_finish_reason")


async def test_logprobs_are_read_by_id_where_the_server_names_ids():
    """Over several chunks, in order; names that are no ids leave the id missing."""

    def entry(token, value, *top):
        return {"token": token, "logprob": value, "top_logprobs": [entry(*t) for t in top]}

    first = {"content": [entry("token_id:5", -0.5, ("token_id:5", -0.5), ("token_id:6", -1.5))]}
    second = {"content": [entry(" x", -0.25, (" x", -0.25))]}
    parts = [
        sse({"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": logprobs}]})
        for logprobs in (first, second)
    ]
    seen = await observe(Script([*parts, sse(chunk(None, finish="stop")), DONE]))
    assert seen.logprobs == (
        client.OutputLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),
        client.OutputLogprob(None, -0.25, ((None, -0.25),)),
    )
    kept = client.make_answer(seen, "x").details
    assert kept == {"logprobs": [[5, -0.5, [[5, -0.5], [6, -1.5]]], [None, -0.25, [[None, -0.25]]]]}


async def test_a_whole_tool_call_reads_as_its_pieces_do():
    """Name and arguments of each call, whole or streamed."""
    calls = [
        {"id": "a", "function": {"name": "find", "arguments": '{"q":1}'}},
        {"id": "b", "function": {"name": "stop", "arguments": "{}"}},
    ]
    seen = await observe(whole(message(None, [1], tool_calls=calls)), planned(stream=False))
    assert seen.calls == (("find", '{"q":1}'), ("stop", "{}"))
    assert seen.tool_calls == 'find{"q":1}\nstop{}'


# --- the request --------------------------------------------------------------------------------


async def test_what_is_sent():
    """Streaming with usage and ids always; options at their neutral value are left out."""
    sampler = Sampler(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=0,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        stop=("\n",),
        logprobs=3,
        response_format="json_object",
    )
    request = planned(sampler=sampler, cache_salt="s", priority=-1, ignore_eos=True)
    with ScriptedServer(lambda _body, _n: answer([])) as server:
        async with client.open_session() as session:
            for r, options in ((planned(), {}), (request, {"extra": {"x": 1}, "omit": ["top_k"]})):
                await client.send(session, server.url + "/v1/", "m", r, api_key="sk-1", **options)
        plain, full = server.seen
    assert plain.path == "/v1/chat/completions"
    assert plain.headers["authorization"] == "Bearer sk-1"
    assert plain.headers["accept-encoding"] == "identity"
    assert plain.connection == full.connection
    assert plain.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Say né 🙂"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    assert {name: full.body[name] for name in set(full.body) - {"messages", "stream_options"}} == {
        "model": "m",
        "stream": True,
        "return_token_ids": True,
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 0,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["\n"],
        "logprobs": True,
        "top_logprobs": 3,
        "return_tokens_as_token_ids": True,
        "response_format": {"type": "json_object"},
        "cache_salt": "s",
        "priority": -1,
        "ignore_eos": True,
        "x": 1,
    }


async def test_a_key_that_the_server_quotes_does_not_reach_the_receipt():
    """Keys are taken out of error messages, wherever the server puts them."""
    seen = await observe(refusal(401, "bad key sk-secret"), api_key="sk-secret")
    assert seen.error_message == "bad key [api key]"


# --- speculation counts -------------------------------------------------------------------------

T22 = {
    "acceptance_histogram": [1, 0, 2, 0, 1, 2, 2, 4],
    "num_spec_tokens": 7,
    "num_spec_steps": 12,
    "num_accepted_draft_tokens": 58,
    "num_draft_tokens": 84,
}


async def test_usage_that_does_not_add_up_is_a_warning():
    """T22: reasoning above completion warns, accepted + steps above delivered does not."""
    usage = usage_of(5, 64, reasoning=71)
    script = Script(
        [
            sse(chunk("x", finish="length")),
            sse({"choices": [], "usage": usage, "metrics": {"speculative_decoding": T22}}),
            DONE,
        ]
    )
    seen = await observe(script)
    assert seen.outcome is Outcome.OK
    assert seen.completion_tokens == 64
    assert seen.warnings == ("usage does not add up: 71 reasoning tokens of 64 completion tokens",)
    receipt = client.make_receipt(seen, planned(), "r", SPECULATIVE, "v")
    assert (receipt.verify_steps, receipt.proposed_tokens, receipt.accepted_tokens) == (12, 84, 58)
    assert receipt.discarded_tokens == 26
    assert receipt.target_passes == 12
    assert receipt.acceptance_histogram == (1, 0, 2, 0, 1, 2, 2, 4)
    assert receipt.counts_source == "engine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acceptance_histogram": [1, 0, 2, 0, 1, 2, 6]}, "7 histogram entries for k=7"),
        ({"acceptance_histogram": [2, 0, 2, 0, 1, 2, 2, 4]}, "histogram sums to 13"),
        ({"num_accepted_draft_tokens": 57}, "histogram weighs 58, accepted are 57"),
        ({"num_draft_tokens": 85}, "drafted 85 in 12 steps of at most 7"),
        ({"per_step_accepted": [1]}, "per_step_accepted has 1 steps"),
    ],
)
def test_each_invariant_of_the_metrics_is_checked(changes, words):
    """A breach of what vLLM's own numbers must satisfy is a warning, not a crash."""
    counts, warnings = parse_counts({**T22, **changes}, 64)
    assert counts.verify_steps == 12
    assert any(words in warning for warning in warnings)


def test_more_accepted_than_drafted_is_no_count():
    """An acceptance of 116 % must not reach a rule; the receipt keeps the reason."""
    with pytest.raises(ValueError, match="accepted 58 of 50 drafted"):
        parse_counts({**T22, "num_draft_tokens": 50}, 64)


def test_more_than_one_block_above_the_delivered_is_a_warning():
    """One block may be cut at the end, two may not."""
    assert parse_counts(T22, 63)[1] == []
    assert "exceeds the 62 delivered by 8" in parse_counts(T22, 62)[1][0]


async def test_a_stop_string_has_no_metrics_and_says_why():
    """T20: counts are missing, not zero, and the note gives the reason."""
    seen = await observe(answer(STEPS, stop="\n\nQ:", metrics={"speculative_decoding": None}))
    assert seen.counts is None
    receipt = client.make_receipt(seen, planned(), "r", SPECULATIVE, "v")
    assert (receipt.proposed_tokens, receipt.accepted_tokens, receipt.target_passes) == (None,) * 3
    assert receipt.counts_source == "none"
    assert "stop string" in receipt.counts_note


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (answer(STEPS), "the server sent no per-request metrics"),
        (answer(STEPS, stop=2), "the server sent no per-request metrics"),
        (answer(STEPS, final_usage=False, continuous_usage=False), "no usage chunk"),
        (answer(STEPS, metrics={"speculative_decoding": {"num_spec_steps": -1}}), "unreadable"),
    ],
)
async def test_missing_counts_give_their_reason(script, note):
    """Each way in which counts can be missing is told from the others."""
    seen = await observe(script)
    assert seen.counts is None
    assert seen.counts_note.startswith(note)


@pytest.mark.parametrize("how", ["arm", "field"])
async def test_drafting_though_speculation_was_asked_off_is_a_warning(how):
    """T23: a server that ignores the field shows it in its own counts."""
    metrics = spec_metrics([(1, 3)] * 41, 3)
    request = planned(arm=Arm.TARGET_ONLY) if how == "arm" else planned()
    extra = {"speculative": False} if how == "field" else None
    script = answer([list(range(64))] + [[i] for i in range(19)], metrics=metrics)
    seen = await observe(script, request, extra=extra)
    assert "drafted 123 tokens in 41 steps" in seen.warnings[-1]
    assert "control it by server" in seen.warnings[-1]


@pytest.mark.parametrize(
    ("completion", "counts", "arm", "passes"),
    [
        (1, None, Arm.TARGET_ONLY, 0),
        (64, None, Arm.TARGET_ONLY, 63),
        (None, None, Arm.TARGET_ONLY, None),
        (64, None, Arm.SPECULATIVE, None),
        (0, SpecCounts(0, 0, 0, None), Arm.SPECULATIVE, 0),
        # prefill 1, three verify steps of 2+1, four plain steps: 1 + 9 + 4 = 14 tokens, 7 passes
        (14, SpecCounts(3, 12, 6, None), Arm.SPECULATIVE, 7),
        # the same with the last block cut by two tokens: 8 tokens, 3 passes
        (8, SpecCounts(3, 12, 6, None), Arm.SPECULATIVE, 3),
    ],
)
def test_target_passes(completion, counts, arm, passes):
    """Decode passes by hand-counted examples, prefill excluded."""
    assert target_passes(completion, counts, arm) == passes


@given(st.lists(st.none() | st.integers(0, 4), max_size=30), st.integers(0, 4))
def test_target_passes_is_low_by_at_most_the_cut(steps, cut):
    """Steps (None is plain, else accepted tokens) simulated: the formula's stated bound holds."""
    sizes = [1 if step is None else step + 1 for step in steps]
    cut = min(cut, sizes[-1] - 1) if sizes else 0
    verify = [step for step in steps if step is not None]
    counts = SpecCounts(len(verify), 4 * len(verify), sum(verify), None)
    got = target_passes(1 + sum(sizes) - cut, counts, Arm.SPECULATIVE)
    assert got is not None
    assert len(steps) - cut <= got <= len(steps)


# --- receipts -----------------------------------------------------------------------------------


async def test_a_receipt_joins_plan_and_observation():
    """Identity and sampler come from the plan, numbers from the server, versions from the arm."""
    request = planned(
        sampler=Sampler(temperature=0.7, top_p=0.9, stop=("x",)),
        prompt=replace(PROMPT, features=("tools",), priority="protected"),
    )
    script = answer(STEPS, metrics=spec_metrics([(2, 4), (4, 4)], 4), prompt_tokens=100)
    seen = await observe(script, request)
    receipt = client.make_receipt(seen, request, "run", SPECULATIVE, "policy-1", scheduled_ns=1)
    assert receipt.receipt_id == receipt_key(request, "run")
    assert (receipt.proposer, receipt.k, receipt.target_model) == ("draft", 4, "target")
    assert receipt.engine_config_id == SPECULATIVE.engine_config_id
    assert receipt.features == "stop,tools,top_p"
    assert (receipt.prompt_band, receipt.temperature_band) == ("64-255", "mid")
    assert receipt.scheduled_ns == 1
    assert receipt.output_digest == digest("output", script.token_ids)
    assert receipt.server_queue_ms == 1.5
    kept = client.make_answer(seen, receipt.receipt_id)
    assert (kept.accepted_per_step, kept.drafted_per_step) == ((2, 4), (4, 4))
    assert receipt.ttft_s is not None
    answered = client.make_answer(seen, receipt.receipt_id)
    assert answered.text == "".join(text_of(i) for i in script.token_ids)


async def test_target_only_has_no_speculation_counts():
    """Missing on target-only means just that: NULL, and passes are tokens less one."""
    request = planned(arm=Arm.TARGET_ONLY)
    script = answer(STEPS)
    receipt = client.make_receipt(await observe(script, request), request, "r", TARGET_ONLY, "v")
    assert (receipt.counts_source, receipt.counts_note) == ("none", "target-only")
    assert receipt.target_passes == len(script.token_ids) - 1
    assert receipt.warnings == ()


# --- completions --------------------------------------------------------------------------------


def json_reply(value) -> Script:
    return Script([json.dumps(value).encode()], content_type="application/json")


async def completed(value, **options) -> client.Completion:
    with ScriptedServer(lambda _body, _n: json_reply(value)) as server:
        async with client.open_session() as session:
            return await client.complete(session, server.url, "m", [5, 6], **options)


async def test_teacher_forcing_gives_rank_and_logprob_of_each_token():
    """The token that is there is found among the top, with its own rank."""
    scored = [
        None,
        {
            "6": {"logprob": -2.5, "rank": 4, "decoded_token": "b"},
            "9": {"logprob": -0.1, "rank": 1, "decoded_token": "c"},
        },
    ]
    choice = {"text": "x", "token_ids": [9], "finish_reason": "length", "prompt_logprobs": scored}
    got = await completed({"choices": [choice]}, prompt_logprobs=1)
    assert (got.token_ids, got.text, got.finish_reason) == ((9,), "x", "length")
    first, second = got.prompt_logprobs
    assert first is None
    assert second == client.TokenLogprob(6, -2.5, 4, ((9, -0.1), (6, -2.5)))


async def test_logprobs_of_generated_tokens_come_by_id():
    """The top of each generated position is keyed by token id, not by text."""
    top = [{"token_id:5": -0.25, "token_id:0": -1.5}, {"token_id:7": 0.0}]
    got = await completed(
        {"choices": [{"text": "x", "logprobs": {"top_logprobs": top}}]}, logprobs=2
    )
    assert got.logprobs == ({5: -0.25, 0: -1.5}, {7: 0.0})
    assert (await completed({"choices": [{"text": "x"}]})).logprobs == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"choices": []}, "not a completions reply"),
        ([1], "not a completions reply"),
        ({"choices": [{"text": "x"}]}, "0 prompt logprobs for 2 prompt tokens"),
        (
            {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]},
            "not a completions reply",
        ),
    ],
)
async def test_a_completion_that_is_none_is_an_engine_error(value, words):
    """What the attribution cannot rest on is refused in one line."""
    with pytest.raises(EngineError, match=words):
        await completed(value, prompt_logprobs=1)


async def test_completion_errors_name_the_server():
    """Status, message and address are in the error, keys are not."""
    with ScriptedServer(lambda _body, _n: refusal(400, "no sk-1 here")) as server:
        async with client.open_session() as session:
            with pytest.raises(
                EngineError, match=r"/v1/completions: HTTP 400: no \[api key\] here"
            ):
                await client.complete(session, server.url, "m", [1], api_key="sk-1")
        url = server.url
    async with client.open_session() as session:
        with pytest.raises(EngineError, match="is the server still running"):
            await client.complete(session, url, "m", [1])
