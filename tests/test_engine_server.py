"""The server over real HTTP, as a process of its own, beside a target-only twin.

`chain` servers say a known text whose characters are split over tokens; the `random` server has a
real draft and real rejections.
"""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from test_engine_models import byte_ids, chain_model, perturbed_model, random_model

from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Output, Request
from speccheck.engine.server import Server, merged
from speccheck.engine.settings import EngineSettings
from speccheck.engine.worker import EngineThread

CHAIN = "abéc€d😀e"
DEADLINE_S = 60


def schema_format(schema):
    """`response_format` of a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


CHAT = [{"role": "user", "content": "hi"}]


class Running:
    """A server process and a small client."""

    def __init__(self, settings):
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "speccheck.engine.server"),
                *("--settings", json.dumps(settings), "--parent-pid", str(os.getpid())),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = json.loads(self.process.stdout.readline())
        self.url = self.ready["url"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        return code

    def connection(self):
        where = urlsplit(self.url)
        return http.client.HTTPConnection(where.hostname, where.port, timeout=DEADLINE_S)

    def call(self, path, body=None, method=None, headers=None):
        connection = self.connection()
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, raw, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text

    def ask(self, path, **body):
        status, answer = self.call(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path, **body):
        """Parsed events up to [DONE]."""
        with self.open_stream(path, **body) as events:
            return list(events)

    @contextmanager
    def open_stream(self, path, **body):
        connection = self.connection()
        connection.request("POST", path, json.dumps({"stream": True, **body}).encode())
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers.get_content_type() == "text/event-stream"

        def events():
            done = False
            for line in answer:
                text = line.decode().strip()
                if text:
                    assert not done
                    assert text.startswith("data: ")
                    done = text == "data: [DONE]"
                    if not done:
                        yield json.loads(text[6:])
            assert done

        try:
            yield events()
        finally:
            answer.close()
            connection.close()

    def metrics(self):
        """Sample name with labels other than the constant ones -> value."""
        status, text = self.call("/metrics")
        assert status == 200
        from prometheus_client.parser import text_string_to_metric_families

        values = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert sample.labels.pop("model_name") == "m"
                sample.labels.pop("engine", None)
                values[(sample.name, *sample.labels.values())] = sample.value
        return values

    def wait_until(self, condition):
        until = time.monotonic() + DEADLINE_S
        while not condition(self.metrics()):
            assert time.monotonic() < until, self.metrics()
            time.sleep(0.02)


@contextmanager
def running(settings):
    server = Running(settings)
    try:
        yield server
    finally:
        assert server.stop() == 0


def draft_config(draft, **more):
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4} | more


@pytest.fixture(scope="module")
def chain_dir(tmp_path_factory):
    return chain_model(tmp_path_factory.mktemp("chain") / "m", CHAIN)


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("random") / "m", sharpness=3.0)


@pytest.fixture(scope="module")
def target_only(chain_dir):
    settings = {"model": str(chain_dir), "served_model_name": "m", "max_model_len": 512}
    with running(settings) as server:
        yield server


@pytest.fixture(scope="module")
def speculative(chain_dir):
    settings = {"model": str(chain_dir), "served_model_name": "m", "max_model_len": 512}
    with running(settings | {"speculative_config": draft_config(chain_dir)}) as server:
        yield server


@pytest.fixture(scope="module")
def random_server(random_dir, tmp_path_factory):
    draft = perturbed_model(random_dir, tmp_path_factory.mktemp("draft") / "m", seed=4, noise=0.4)
    spec = draft_config(draft, draft_sample_method="probabilistic")
    settings = {"model": str(random_dir), "served_model_name": "m", "max_logprobs": -1}
    with running(settings | {"speculative_config": spec}) as server:
        yield server


@pytest.fixture(params=["target_only", "speculative"])
def chain(request):
    return request.getfixturevalue(request.param)


def chained(n_tokens):
    """What a chain server says in n tokens; an unfinished character shows as U+FFFD."""
    data = (CHAIN.encode() * 40)[:n_tokens]
    return data.decode(errors="replace")


def delta(event):
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"]["content"]


# -- endpoints beside generation ------------------------------------------------------------------


def test_the_server_says_what_it_is(chain, speculative, chain_dir):
    """Ready line, health, version, models, and a config that parses to the settings it runs."""
    assert chain.ready["pid"] == chain.process.pid
    assert chain.url.startswith("http://127.0.0.1:")
    assert chain.call("/health") == (200, "")
    assert chain.call("/version")[1]["engine"] == "speccheck"
    model = chain.call("/v1/models")[1]["data"][0]
    assert (model["id"], model["max_model_len"]) == ("m", 512)
    info = chain.call("/server_info?config_format=json")[1]
    settings = EngineSettings.parse(info["settings"])
    assert settings.model_dir == chain_dir
    spec = info["vllm_config"]["speculative_config"]
    assert (spec is None) == (chain is not speculative)
    if spec:
        assert spec["num_speculative_tokens"] == settings.speculative_config.num_speculative_tokens


def test_tokenize_and_detokenize_are_inverse(target_only):
    """Ids of a text, ids of a chat, and back."""
    ids = byte_ids("né €")
    answer = target_only.ask("/tokenize", prompt="né €", return_token_strs=True)
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert len(answer["token_strs"]) == len(ids)
    assert target_only.ask("/detokenize", tokens=ids) == {"prompt": "né €"}
    chat = target_only.ask("/tokenize", messages=CHAT)["tokens"]
    text = target_only.ask("/detokenize", tokens=chat)["prompt"]
    assert text == "<s>user:hi</s><s>assistant:"


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2, 4, 9, 30])
def test_a_stream_is_the_whole_answer_in_pieces(chain, path, n):
    """Text, ids, reasons and usage are equal; no chunk shows half a character."""
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    body |= {"max_tokens": n, "temperature": 0, "return_token_ids": True}
    whole = chain.ask(path, **body)
    choice = whole["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text == chained(n)
    *events, last = chain.stream(
        path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    pieces = [delta(event) for event in events]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    ids = [event["choices"][0].get("token_ids", []) for event in events]
    assert [token for some in ids for token in some] == choice["token_ids"]
    assert len(choice["token_ids"]) == n
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + [
        "length"
    ]
    assert last["choices"] == []
    cached = last["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert cached >= whole["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == n
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [sum(map(len, ids[: i + 1])) for i in range(len(ids))]
    assert last["metrics"].keys() == whole["metrics"].keys()
    prompt_ids = [
        event.get("prompt_token_ids") or event["choices"][0].get("prompt_token_ids")
        for event in events
    ]
    expected = whole.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert prompt_ids == [expected] + [None] * (len(events) - 1)


def test_a_chat_stream_opens_with_the_role(chain):
    """The first chunk has role and empty content and carries no token."""
    first, second, *_ = chain.stream(
        "/v1/chat/completions", messages=CHAT, max_tokens=3, return_token_ids=True
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "token_ids" not in first["choices"][0]
    assert second["choices"][0]["token_ids"]
    assert "usage" not in second


def test_speculation_puts_several_tokens_into_a_chunk(speculative):
    """A fully accepted draft arrives as k+1 tokens, or as a multiple if the client was slow."""
    events = speculative.stream(
        "/v1/completions", prompt="x", max_tokens=31, temperature=0, return_token_ids=True
    )
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sum(sizes) == 31
    assert max(sizes) >= 5


@pytest.mark.parametrize(
    ("stop", "text", "n", "reason"),
    [
        ("c€", "abé", 8, "c€"),
        (["zzz", "😀"], "abéc€d", 13, "😀"),
        (["b", "e"], "a", 2, "b"),
        ("ea", "abéc€d😀", 15, "ea"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_strings_across_chunk_borders(chain, stop, text, n, reason, *, stream):
    """Text ends before the stop, ids with the token that completes it, nothing leaks."""
    body = {"prompt": "x", "max_tokens": 60, "stop": stop, "temperature": 0}
    body |= {"return_token_ids": True}
    if stream:
        events = chain.stream("/v1/completions", **body)
        got = "".join(delta(event) for event in events)
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        last = events[-1]["choices"][0]
    else:
        last = chain.ask("/v1/completions", **body)["choices"][0]
        got, ids = last["text"], last["token_ids"]
    assert got == text
    assert ids == byte_ids(CHAIN * 2)[:n]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


def test_stop_ids_and_including_the_stop(chain):
    """A stop id is the stop reason and its text is left out unless asked for."""
    d = byte_ids("d")[0]
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0, "stop_token_ids": [d]}
    choice = chain.ask("/v1/completions", **body)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("abéc€", d)
    choice = chain.ask("/v1/completions", **body, include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "abéc€d"
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0, "stop": "c€"}
    choice = chain.ask("/v1/completions", **body, include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "abéc€"


def test_an_answer_continues_from_its_own_ids(random_server):
    """Prompt ids plus the first received ids give exactly the rest."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = random_server.ask("/v1/completions", prompt="hello", max_tokens=30, **body)
    choice = whole["choices"][0]
    for n in (1, 5, 10, 29):
        rest = random_server.ask(
            "/v1/completions",
            prompt=choice["prompt_token_ids"] + choice["token_ids"][:n],
            max_tokens=30 - n,
            **body,
        )
        assert rest["choices"][0]["token_ids"] == choice["token_ids"][n:]


def test_a_chat_continues_its_last_message(target_only):
    """continue_final_message picks up inside the message; both switches at once are refused."""
    messages = [*CHAT, {"role": "assistant", "content": "ab"}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0}
    answer = target_only.ask(
        "/v1/chat/completions", **body, continue_final_message=True, add_generation_prompt=False
    )
    assert answer["choices"][0]["message"]["content"] == "éc"
    status, _ = target_only.call("/v1/chat/completions", body | {"continue_final_message": True})
    assert status == 400


def test_logprobs_in_both_shapes(random_server):
    """Chat and completion shapes; teacher forcing gives the same numbers as generation."""
    body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    chat = random_server.ask(
        "/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=2, **body
    )
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
    ids = chat["choices"][0]["token_ids"]
    forced = random_server.ask(
        "/v1/completions", prompt=chat["prompt_token_ids"] + ids, max_tokens=1, prompt_logprobs=2
    )["choices"][0]["prompt_logprobs"]
    assert forced[0] is None
    for entry, token, by_id in zip(content, ids, forced[-6:], strict=True):
        assert by_id[str(token)]["rank"] == 1
        assert by_id[str(token)]["logprob"] == pytest.approx(entry["logprob"], abs=1e-3)
    plain = random_server.ask(
        "/v1/completions",
        prompt=chat["prompt_token_ids"],
        logprobs=3,
        return_tokens_as_token_ids=True,
        **body,
    )["choices"][0]["logprobs"]
    assert plain["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(len(top) == 3 for top in plain["top_logprobs"])
    full = random_server.ask(
        "/v1/completions",
        prompt="x",
        max_tokens=1,
        logprobs=-1,
        return_tokens_as_token_ids=True,
    )
    assert len(full["choices"][0]["logprobs"]["top_logprobs"][0]) == 300


# -- several choices, structure, tools, cached prompts --------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_n_choices_are_n_requests_with_seeds_counted_up(random_server, path):
    """Choice i is the answer to seed + i; whole and streamed agree; usage counts all of them."""
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    body |= {"temperature": 1.0, "max_tokens": 12, "return_token_ids": True}
    alone = [
        random_server.ask(path, **body, seed=5 + i)["choices"][0]["token_ids"] for i in range(3)
    ]
    whole = random_server.ask(path, **body, seed=5, n=3, logprobs=path != "/v1/completions")
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in whole["choices"]] == alone
    assert len({tuple(ids) for ids in alone}) > 1
    assert whole["usage"]["completion_tokens"] == sum(map(len, alone))
    assert whole["metrics"] is None
    *events, last = random_server.stream(
        path, **body, seed=5, n=3, stream_options={"include_usage": True}
    )
    streamed = [[], [], []]
    ends = []
    for event in events:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice.get("token_ids", [])
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert streamed == alone
    assert sorted(ends) == [0, 1, 2]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["metrics"] is None


def test_a_structured_answer_is_valid_whatever_the_model_says(chain, random_server):
    """A chain that never says JSON, and random weights at temperature 1, meet the schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
        "required": ["ok", "kind"],
    }
    for server, seed in ((chain, 0), (random_server, 1), (random_server, 2)):
        body = {"messages": CHAT, "seed": seed, "max_tokens": 60, "ignore_eos": True}
        answer = server.ask("/v1/chat/completions", **body, response_format=schema_format(schema))
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert value.keys() == {"ok", "kind"}
        assert value["kind"] in ("a", "bc")


def test_a_named_function_is_called_with_valid_arguments(chain):
    """Pieces of a streamed call join to the whole one; its name comes once."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "book", "parameters": schema}}
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 60, "tools": [tool]}
    body["tool_choice"] = {"type": "function", "function": {"name": "book"}}
    choice = chain.ask("/v1/chat/completions", **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "book")
    assert json.loads(call["function"]["arguments"])["n"] in (1, 22)
    pieces = [
        piece
        for event in chain.stream("/v1/chat/completions", **body)
        for piece in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [p["function"].get("name") for p in pieces] == ["book"] + [None] * (len(pieces) - 1)
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined == call["function"]["arguments"]


@pytest.mark.parametrize(
    ("tool_choice", "words"),
    [
        ("required", "tool_choice 'required' is not supported"),
        ({"type": "function", "function": {"name": "other"}}, "does not match any"),
        ({"type": "function"}, "does not match any"),
    ],
)
def test_tool_choices_that_cannot_be_honoured_are_refused(target_only, tool_choice, words):
    """Status 400 with the field; none and auto are text with the tools in the template."""
    tool = {"type": "function", "function": {"name": "book"}}
    body = {"messages": CHAT, "max_tokens": 4, "temperature": 0, "tools": [tool]}
    status, answer = target_only.call("/v1/chat/completions", body | {"tool_choice": tool_choice})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert words in answer["error"]["message"]
    texts = {
        target_only.ask("/v1/chat/completions", **body, **choice)["choices"][0]["message"][
            "content"
        ]
        for choice in ({}, {"tool_choice": "none"}, {"tool_choice": "auto"})
    }
    assert texts == {"abé"}
    status, answer = target_only.call(
        "/v1/chat/completions", {"messages": CHAT, "tool_choice": "auto"}
    )
    assert "`tools` must be set" in answer["error"]["message"]


def test_cached_prompt_tokens_are_counted_per_salt(random_server):
    """Usage and counters say what was found; another salt and a reset find nothing."""

    def cached(salt):
        answer = random_server.ask(
            "/v1/completions", prompt="q" * 50, cache_salt=salt, max_tokens=1
        )
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    before = random_server.metrics()
    assert [cached("s"), cached("s"), cached("t")] == [0, 48, 0]
    after = random_server.metrics()
    hits = ("vllm:prefix_cache_hits_total",)
    assert after[hits] - before[hits] == 48
    assert random_server.call("/reset_prefix_cache", {})[0] == 200
    assert cached("s") == 0


# -- speculation ----------------------------------------------------------------------------------


def test_speculation_counters_exist_only_where_it_is_configured(target_only, speculative):
    """Absent on the target-only server, not 0; per-request metrics say null there."""
    answers = [
        server.ask("/v1/completions", prompt="x", max_tokens=11, temperature=0)
        for server in (target_only, speculative)
    ]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["metrics"]["speculative_decoding"] is None
    assert answers[1]["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0
    names = {key[0] for key in target_only.metrics()}
    assert not [name for name in names if "spec_decode" in name]
    assert ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "3") in speculative.metrics()


def test_a_request_can_switch_speculation_off(speculative, target_only):
    """Off, false and k 0 draft nothing; k 2 at most two; a target-only server refuses k."""
    body = {"prompt": "x", "max_tokens": 30, "temperature": 0}
    for switch in ({"speculation": "off"}, {"speculation": False}, {"k": 0}):
        spec = speculative.ask("/v1/completions", **body, **switch)["metrics"]
        assert spec["speculative_decoding"]["num_draft_tokens"] == 0
        assert spec["speculative_decoding"]["mean_acceptance_length"] == 1.0
        target_only.ask("/v1/completions", **body, **switch)
    two = speculative.ask("/v1/completions", **body, k=2)["metrics"]["speculative_decoding"]
    assert max(two["per_step_drafted"]) == 2
    assert len(two["acceptance_histogram"]) == 5
    for server, switch in ((speculative, {"k": 5}), (target_only, {"k": 1})):
        assert server.call("/v1/completions", body | switch)[0] == 400
    assert target_only.call("/v1/completions", body | {"speculation": "on"})[0] == 400


def test_per_request_metrics_and_counters_agree(random_server):
    """Invariants of vLLM's objects hold, and counters move by the sums of them."""
    before = random_server.metrics()
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda seed: random_server.ask(
                    "/v1/completions", prompt="abc" * seed, max_tokens=5 + seed, seed=seed
                ),
                range(1, 17),
            )
        )
    after = random_server.metrics()

    def moved(*key):
        return after[key] - before.get(key, 0)

    specs = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for answer, spec in zip(answers, specs, strict=True):
        steps, accepted = spec["num_spec_steps"], spec["num_accepted_draft_tokens"]
        assert sum(spec["acceptance_histogram"]) == steps == len(spec["per_step_accepted"])
        assert sum(j * n for j, n in enumerate(spec["acceptance_histogram"])) == accepted
        assert accepted == sum(spec["per_step_accepted"])
        assert spec["num_draft_tokens"] == sum(spec["per_step_drafted"])
        assert accepted <= spec["num_draft_tokens"] <= 4 * steps
        n = answer["usage"]["completion_tokens"]
        assert n <= accepted + steps + 2
        times = answer["metrics"]
        assert times["time_to_first_token_ms"] > 0
        assert times["queue_time_ms"] >= 0
        if n > 1:
            assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / (n - 1))
    for name, field in (
        ("drafts", "num_spec_steps"),
        ("draft_tokens", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert moved(f"vllm:spec_decode_num_{name}_total") == sum(spec[field] for spec in specs)
    usage = [answer["usage"] for answer in answers]
    assert moved("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
    assert moved("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    for reason in ("stop", "length", "abort", "error"):
        assert moved("vllm:request_success_total", reason) == reasons.count(reason)
    for histogram in ("e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert moved(f"vllm:{histogram}_count") == len(answers)
        assert after[f"vllm:{histogram}_bucket", "+Inf"] == after[(f"vllm:{histogram}_count",)]
    assert ("vllm:request_time_per_output_token_seconds_bucket", "0.01") in after


def test_many_clients_get_their_own_answers(random_server):
    """Answers under concurrency are those of one request at a time."""
    bodies = [
        {"prompt": f"number {i}", "max_tokens": 8 + i, "temperature": 0, "stream": False}
        for i in range(16)
    ]
    alone = [random_server.ask("/v1/completions", **body)["choices"] for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(
            pool.map(lambda body: random_server.ask("/v1/completions", **body)["choices"], bodies)
        )
    assert together == alone


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2"),
        ({"n": 0}, "n must be in 1..128"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 600}, "maximum context length is 512"),
        ({"prompt": [5] * 512}, "maximum context length is 512"),
        ({"prompt": []}, "empty"),
        ({"prompt": [272]}, "token ids"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", "b"]}, "Several prompts"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "greater than max allowed: 20"),
        ({"stream_options": {"include_usage": True}}, "stream=True"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"response_format": {"type": "grammar"}}, "response_format: type 'grammar'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
        (
            {"response_format": schema_format({"type": "string", "pattern": "a"})},
            "keyword 'pattern' is not supported",
        ),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words is not supported"),
        ({"temperature": "hot"}, "temperature"),
        ({"speculation": "maybe"}, "speculation"),
        ({"k": -1}, "k"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(target_only, body, words):
    """Status 400, the OpenAI shape, the field in the message."""
    status, answer = target_only.call("/v1/completions", {"prompt": "x"} | body)
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert words in error["message"]


def test_min_p_and_logit_bias_are_refused_only_with_speculation(target_only, speculative):
    """VLLM's words on a speculative server; the target-only one honours both."""
    words = (
        "The min_p and logit_bias sampling parameters are not yet supported with "
        "speculative decoding."
    )
    e = byte_ids("e")[0]
    for option in ({"min_p": 0.1}, {"logit_bias": {str(e): 100}}):
        body = {"prompt": "x", "max_tokens": 3} | option
        status, answer = speculative.call("/v1/completions", body)
        assert (status, answer["error"]["message"]) == (400, words)
        target_only.ask("/v1/completions", **body)
    forced = target_only.ask("/v1/completions", prompt="x", max_tokens=3, logit_bias={str(e): 100})
    assert forced["choices"][0]["text"] == "eee"
    speculative.ask("/v1/completions", prompt="x", min_p=0, some_unknown_field={"a": 1})


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, "POST", 404),
        ("/v1/nothing", None, "GET", 404),
        ("/v1/completions", None, "GET", 405),
        ("/v1/completions", b"{", "POST", 400),
        ("/v1/completions", b"[]", "POST", 400),
        ("/v1/completions", b"[" * 100_000, "POST", 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', "POST", 400),
        ("/v1/completions", {"prompt": "x", "model": "\ud800"}, "POST", 404),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', "POST", 400),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {"3": Infinity}}', "POST", 400),
        ("/v1/completions", {}, "POST", 400),
        ("/v1/chat/completions", {"messages": []}, "POST", 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "POST", 400),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "POST", 400),
        ("/v1/completions", b'{"prompt": "' + b"x" * (5 << 20) + b'"}', "POST", 413),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_have_the_openai_shape(target_only, path, body, method, *, status):
    """Unknown model, path, method, broken or oversized body: a JSON error with its code."""
    got, answer = target_only.call(path, body, method)
    assert got == status
    assert answer["error"]["code"] == status
    assert answer["error"]["message"]


def test_content_parts_are_joined(target_only):
    """Text parts work, other parts are refused."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}
    assert target_only.ask("/v1/chat/completions", **body)["usage"]["completion_tokens"] == 2
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert target_only.call("/v1/chat/completions", body)[0] == 400


# -- load and life --------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_row(chain):
    """Closing a stream or a plain request aborts it; the metrics show it."""
    before = chain.metrics()
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    with chain.open_stream("/v1/completions", **body) as events:
        next(events)
    connection = chain.connection()
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    aborted = ("vllm:request_success_total", "abort")
    finished = ("vllm:request_success_total", "length")

    def ended(metrics):
        # A fast server may have finished a request before it saw the client leave.
        return metrics[aborted] + metrics[finished] - before[aborted] - before[finished]

    chain.wait_until(lambda m: m[("vllm:num_requests_running",)] > 0 or ended(m) == 2)
    connection.close()
    chain.wait_until(lambda m: m[("vllm:num_requests_running",)] == 0 and ended(m) == 2)


def test_the_queue_has_a_limit_and_an_order(chain_dir):
    """Requests over the limit get 503 and are counted; a lower priority number goes first."""
    settings = {"model": str(chain_dir), "served_model_name": "m", "max_num_seqs": 1}
    with running(settings | {"max_num_queued_reqs": 3}) as server:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        with server.open_stream("/v1/completions", **body) as events, ThreadPoolExecutor(2) as pool:
            next(events)

            def ask(n_tokens, headers=None):
                asked = {"prompt": "x", "max_tokens": n_tokens, "priority": 5, "ignore_eos": True}
                answer = server.call("/v1/completions", asked, headers=headers)
                return answer, time.monotonic()

            late = pool.submit(ask, 2000)
            server.wait_until(lambda m: m[("vllm:num_requests_waiting",)] == 1)
            early = pool.submit(ask, 2, {"X-Vllm-Priority": "-1"})
            server.wait_until(lambda m: m[("vllm:num_requests_waiting",)] == 2)
            status, answer = server.call("/v1/completions", {"prompt": "x"})
            assert (status, answer["error"]["code"]) == (503, 503)
            list(events)
            (low, low_at), (high, high_at) = late.result(), early.result()
            assert (low[0], high[0]) == (200, 200)
            assert high_at < low_at
        rejected = ("vllm:admission_rejections_total", "max_num_queued_reqs")
        assert server.metrics()[rejected] == 1


def test_a_client_cannot_replace_the_messages_of_the_template(target_only):
    """Template arguments that share a name with ours lose."""
    body = {"messages": CHAT, "chat_template_kwargs": {"messages": [], "bos_token": "x"}}
    plain = target_only.ask("/v1/chat/completions", messages=CHAT, max_tokens=1)
    answer = target_only.ask("/v1/chat/completions", **body, max_tokens=1)
    assert answer["usage"] == plain["usage"]


def test_request_ids_are_the_callers(target_only):
    """The id comes from the header, else the body, else is new; a running one is refused."""
    body = {"prompt": "x", "max_tokens": 1, "request_id": "body"}
    status, answer = target_only.call("/v1/completions", body, headers={"X-Request-Id": "head"})
    assert (status, answer["id"]) == (200, "cmpl-head")
    assert target_only.ask("/v1/completions", **body)["id"] == "cmpl-body"
    with target_only.open_stream(
        "/v1/completions", prompt="x", max_tokens=500, ignore_eos=True, request_id="body"
    ) as events:
        next(events)
        assert target_only.call("/v1/completions", body)[0] == 400


def test_the_openai_client_works(random_server):
    """The real client: whole, streamed, with usage and extensions, and its error class."""
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    client = openai.OpenAI(base_url=random_server.url + "/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "m"
    body = {"model": "m", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**body)
    chunks = list(
        client.chat.completions.create(
            **body,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculation": "off", "return_token_ids": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    metrics = chunks[-1].model_extra["metrics"]
    assert metrics["speculative_decoding"]["num_draft_tokens"] == 0
    completion = client.completions.create(model="m", prompt="x", max_tokens=3, logprobs=1, seed=1)
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="m", prompt="x", top_p=7)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ('{"max_num_seq": 1}', 2, "unknown key max_num_seq"),
        ("{", 2, "--settings: no JSON"),
        ("[]", 2, "a JSON object is wanted"),
        ('{"model": "/nowhere"}', 4, "/nowhere/config.json"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_line(settings, code, words):
    """One line on stderr, no traceback, the documented exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "speccheck.engine.server", "--settings", settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_taken_port_is_an_engine_error(target_only):
    """The address is in the message, and the exit code is 4."""
    port = str(urlsplit(target_only.url).port)
    done = subprocess.run(
        [sys.executable, "-m", "speccheck.engine.server", "--port", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 4
    assert f"127.0.0.1:{port}" in done.stderr


def test_the_server_ends_with_its_parent(chain_dir):
    """A server whose parent died stops by itself."""
    script = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'speccheck.engine.server', '--settings',"
        " sys.argv[1], '--parent-pid', str(os.getpid())], stdout=subprocess.PIPE, text=True)\n"
        "print(p.stdout.readline(), flush=True)\n"
    )
    settings = json.dumps({"model": str(chain_dir)})
    parent = subprocess.run(
        [sys.executable, "-c", script, settings],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    pid = json.loads(parent.stdout)["pid"]
    until = time.monotonic() + DEADLINE_S
    while os.path.exists(f"/proc/{pid}") and not _is_zombie(pid):  # noqa: PTH110
        assert time.monotonic() < until
        time.sleep(0.05)


def _is_zombie(pid):
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] == "Z"


# -- failure inside -------------------------------------------------------------------------------


class Failing:
    """An engine whose second step fails."""

    n_unfinished = 0

    def __init__(self):
        self.steps = 0

    def add(self, request):
        self.n_unfinished += 1

    def abort(self, request_id):
        self.n_unfinished -= 1

    def step(self):
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("broken")
        return [Output("a", [1], "x")]


def test_nobody_waits_for_an_engine_that_failed(capfd):
    """Everything in flight and everything later ends with reason error; the log has the reason."""
    seen = []
    thread = EngineThread(Failing(), seen.extend)
    thread.start()
    for name in ("a", "b"):
        thread.submit(Request(name, (1,), SamplingParams()))
    until = time.monotonic() + DEADLINE_S
    while thread.dead is None and time.monotonic() < until:
        time.sleep(0.01)
    thread.submit(Request("c", (1,), SamplingParams()))
    thread.stop()
    assert thread.dead == "RuntimeError: broken"
    ended = {output.request_id for output in seen if output.finish_reason == "error"}
    assert ended == {"a", "b", "c"}
    assert "broken" in capfd.readouterr().err


async def asgi(app, path, body):
    """One POST through the application, without a socket: (status, body text)."""
    sent = []
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        if asked:
            return asked.pop()
        await asyncio.sleep(DEADLINE_S)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app(scope | {"http_version": "1.1"}, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode()


async def test_a_failure_in_mid_stream_is_an_event(chain_dir, capfd):
    """HTTP 200, an error event, [DONE], no finish reason; afterwards 500 and health 503."""
    server = Server(EngineSettings.parse({"model": str(chain_dir)}))
    steps = iter(range(3))
    step = server.engine.step

    def failing():
        if next(steps, None) is None:
            raise RuntimeError("broken")
        return step()

    server.engine.step = failing
    server.start()
    body = {"prompt": "x", "max_tokens": 50, "stream": True}
    status, text = await asgi(server.app, "/v1/completions", body)
    assert status == 200
    *chunks, error, done = [line[6:] for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == 500
    assert all(json.loads(c)["choices"][0]["finish_reason"] is None for c in chunks)
    status, _ = await asgi(server.app, "/v1/completions", {"prompt": "x"})
    assert status == 500
    assert (await server.health(None)).status_code == 503
    server.stop()
    assert "RuntimeError: broken" in capfd.readouterr().err


def test_merging_outputs_loses_nothing():
    """Two outputs of one request as one: ids, text and logprobs in order, the end of the second."""
    a = Output("r", [1], "x", logprobs=["p"], prompt_logprobs=[None])
    b = Output("r", [2, 3], "y", logprobs=["q", "r"], finish_reason="stop", stop_reason="s")
    both = merged(a, b)
    assert (both.token_ids, both.text, both.logprobs) == ([1, 2, 3], "xy", ["p", "q", "r"])
    assert (both.finish_reason, both.stop_reason) == ("stop", "s")
    assert both.prompt_logprobs == [None]
