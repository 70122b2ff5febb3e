"""Compatibility slices against the real pair, sound and meddled with, and against made-up replies.

Both servers run in this process, so that the speculative engine can be broken in one place while
the target stays as it is. Each slice passes on the sound pair and fails on a broken one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import uvicorn
from attached_pair import attached_pair
from rule_receipts import receipt
from scripted_server import Script, answer, refusal, spec_metrics

from speccheck import client, guardrails, plan, results, slices
from speccheck.config import ReplayConfig, SliceName, package_dir
from speccheck.corpus import load_corpus
from speccheck.drive import Endpoint
from speccheck.eligibility import KNOWN_FEATURES
from speccheck.engine.server import Server
from speccheck.engine.settings import EngineSettings
from speccheck.records import (
    Action,
    Answer,
    Arm,
    ArmDescription,
    Outcome,
    PlannedRequest,
    Prompt,
    Receipt,
    Sampler,
    Stage,
    Verdict,
    receipt_key,
)
from speccheck.slices.asked import (
    PENALTIES,
    VARIANTS,
    Asker,
    Source,
    plan_slice,
    sources,
    stop_inside,
)
from speccheck.slices.checks import Check, Group, Item, Reply, check
from speccheck.slices.support import evidence, measure, refused, row, summary
from speccheck.store import Store

RUN = "run:slices"
LIMIT = 320
SPECULATION = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}
SETTINGS = ReplayConfig(slice_prompts=1, concurrency=8)


# -- two servers in this process ------------------------------------------------------------------


@dataclass
class Arms:
    """The running pair, the prompts' greedy answers, and what the target said to each request."""

    servers: dict[Arm, Server]
    endpoints: dict[Arm, Endpoint]
    found: list[Source] = field(default_factory=list)
    known: dict[str, tuple[Receipt, Answer]] = field(default_factory=dict)
    scored: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def send(self, requests: list[PlannedRequest]) -> tuple[list[Receipt], dict[str, Answer]]:
        """Receipts and answers; the target, which no test meddles with, is asked once."""

        async def one(session: Any, request: PlannedRequest) -> tuple[Receipt, Answer]:
            key = receipt_key(request, RUN)
            if key not in self.known or request.arm is Arm.SPECULATIVE:
                endpoint = self.endpoints[request.arm]
                seen = await client.send(session, endpoint.description.url, "target", request)
                receipt = client.make_receipt(seen, request, RUN, endpoint.description, "v")
                self.known[key] = receipt, client.make_answer(seen, receipt.receipt_id)
            return self.known[key]

        async def ask() -> list[tuple[Receipt, Answer]]:
            made: list[tuple[Receipt, Answer]] = []
            async with client.open_session() as session:
                turns = [requests] if requests[0].concurrency > 1 else [[r] for r in requests]
                for turn in turns:
                    made += await asyncio.gather(*(one(session, r) for r in turn))
            return made

        both = asyncio.run(ask())
        return [r for r, _ in both], {r.receipt_id: a for r, a in both}

    def try_slice(self, name: SliceName) -> tuple[slices.Row, list[Item]]:
        """One slice on both arms."""
        tokenizer = self.servers[Arm.TARGET_ONLY].engine.tokenizer

        def count(messages):
            return len(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))

        asker = Asker(name, RUN, SETTINGS, LIMIT, np.random.default_rng(3), count)
        requests = plan_slice(asker, self.found)
        receipts, answers = self.send(requests)
        known = {source.prompt.prompt_id: source for source in self.found}
        groups = slices.groups(requests, receipts, answers, known)

        async def look() -> list[Item]:
            async with client.open_session() as session:
                target = Asked(self, session)
                return [item for group in groups for item in await check(name, group, target)]

        items = asyncio.run(look())
        return row(name, items), items


class Asked(slices.Target):
    """The target as it is asked in a run, with its answers kept for the next test."""

    def __init__(self, pair, session):
        super().__init__(session, pair.endpoints[Arm.TARGET_ONLY], 1e-3)
        self._scored = pair.scored

    async def logprobs(self, ids):
        key = tuple(ids)
        if key not in self._scored:
            self._scored[key] = await super().logprobs(ids)
        return self._scored[key]


@contextmanager
def serving(arm: Arm):
    """An engine with its HTTP side, on a thread of this process."""
    settings = EngineSettings.parse(
        {
            "speculative_config": SPECULATION if arm is Arm.SPECULATIVE else None,
            "max_model_len": LIMIT,
            "served_model_name": "target",
        }
    )
    server = Server(settings)
    listener = socket.create_server(("127.0.0.1", 0))
    app = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))

    async def run() -> None:
        server.start()
        await app.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    while not app.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    description = ArmDescription(
        arm,
        url,
        "speccheck",
        "target",
        SPECULATION if arm is Arm.SPECULATIVE else None,
        {"max_model_len": LIMIT},
    )
    try:
        yield server, Endpoint(description, "v", "target")
    finally:
        app.should_exit = True
        thread.join(20)
        server.stop()
        listener.close()


@pytest.fixture(scope="module")
def arms():
    """The pair, with greedy and sampled answers to a few prompts of three routes."""
    corpus = load_corpus(sorted(package_dir("corpora").glob("*.jsonl")))
    prompts = [
        prompt
        for task, n in (("json", 2), ("support", 2), ("prose", 1))
        for prompt in [p for p in corpus.prompts if p.task == task][:n]
    ]
    prompts = [replace(p, max_tokens=min(p.max_tokens, 40)) for p in prompts]
    with serving(Arm.TARGET_ONLY) as one, serving(Arm.SPECULATIVE) as other:
        pair = Arms(
            {Arm.TARGET_ONLY: one[0], Arm.SPECULATIVE: other[0]},
            {Arm.TARGET_ONLY: one[1], Arm.SPECULATIVE: other[1]},
        )
        requests = [
            request
            for name, temperature in (("greedy", 0.0), ("sampled", 1.2))
            for request in plan.closed_loop(
                plan.Phase(
                    RUN,
                    Stage.REPLAY,
                    name,
                    Sampler(temperature=temperature, seed=5),
                    concurrency=8,
                    keep_text=True,
                ),
                prompts,
                rng=np.random.default_rng(1),
            )
        ]
        pair.found = sources(prompts, *pair.send(requests))
        assert len(pair.found) == len(prompts)
        yield pair


# -- meddling with the speculative engine ---------------------------------------------------------


@contextmanager
def each_request(server: Server, change):
    """Every request that reaches the engine is changed on its way."""
    add = server.engine.add
    server.engine.add = lambda request: add(change(request))
    try:
        yield
    finally:
        del server.engine.add


@contextmanager
def each_step(server: Server, change):
    """Every output that leaves the engine is changed on its way."""
    step = server.engine.step

    def changed():
        outputs = step()
        for output in outputs:
            change(output)
        return outputs

    server.engine.step = changed
    try:
        yield
    finally:
        del server.engine.step


def params(**changes):
    return lambda request: replace(request, params=replace(request.params, **changes))


def each_chunk(server: Server, change):
    """Every chunk of a stream is changed on its way; whole answers are not."""

    @contextmanager
    def changed():
        events = server._events

        async def other(*args):
            async for data in events(*args):
                if b"[DONE]" in data:
                    yield data
                else:
                    value = json.loads(data[6:])
                    for choice in value["choices"]:
                        change(choice["delta"])
                    yield f"data: {json.dumps(value)}\n\n".encode()

        server._events = other
        try:
            yield
        finally:
            del server._events

    return changed()


def block_loses_its_end(server):
    """The last character of every block of several tokens is lost (T15: JSON at a boundary)."""

    def cut(output):
        if len(output.token_ids) > 1:
            output.text = output.text[:-1]

    return each_step(server, cut)


def shifted_logprobs(server):
    """vllm#17876: log-probabilities that belong to other tokens."""

    def shift(output):
        if output.logprobs and len(output.logprobs) > 1:
            values = [entry.logprob for entry in output.logprobs]
            output.logprobs = [
                replace(entry, logprob=value, top=())
                for entry, value in zip(output.logprobs, values[1:] + values[:1], strict=True)
            ]

    return each_step(server, shift)


def one_logprob_a_block(server):
    """One entry a verify step and not one a token."""

    def drop(output):
        if output.logprobs:
            output.logprobs = output.logprobs[:1]

    return each_step(server, drop)


def wrong_prefix(server):
    """A prefix cache that hands out the keys of other tokens."""

    @contextmanager
    def broken():
        cache = server.engine._prefixes
        find = cache.find

        def other(*args, **options):
            blocks = find(*args, **options)
            return [replace(block, target=block.target[..., ::-1].copy()) for block in blocks]

        cache.find = other
        try:
            yield
        finally:
            del cache.find

    return broken()


def one_choice(server):
    """N is accepted and one choice is sent."""

    @contextmanager
    def broken():
        whole = server._answer
        server._answer = lambda http, request, ids, kind: whole(
            http, request.model_copy(update={"n": 1}), ids, kind
        )
        try:
            yield
        finally:
            del server._answer

    return broken()


def empty_choice(server):
    """The second choice comes without text."""

    def empty(output):
        if output.request_id.endswith("-1"):
            output.text = ""

    return each_step(server, empty)


def streamed_blanks_lost(server):
    """Streamed text that is another one than the whole answer's."""

    def strip(delta):
        if delta.get("content"):
            delta["content"] = delta["content"].replace(" ", "")

    return each_chunk(server, strip)


def streamed_arguments_lost(server):
    """A call whose streamed pieces do not join: the colons are missing."""

    def strip(delta):
        for call in delta.get("tool_calls") or ():
            call["function"]["arguments"] = call["function"]["arguments"].replace(":", "")

    return each_chunk(server, strip)


def stop_kept(server):
    """Stop strings found, and left in the text."""
    return each_request(server, params(include_stop_str_in_output=True))


def stop_ignored(server):
    """Stop strings dropped."""
    return each_request(server, params(stop=()))


def penalties_ignored(server):
    """Penalties accepted and dropped (T17)."""
    return each_request(
        server, params(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
    )


def seed_ignored(server):
    """A seed that is not honoured."""
    numbers = iter(range(10**6))
    return each_request(
        server, lambda request: replace(request, params=replace(request.params, seed=next(numbers)))
    )


def context_cut(server):
    """Only the end of a long prompt is read."""
    return each_request(server, lambda request: replace(request, prompt=request.prompt[-150:]))


@contextmanager
def served_all(server):
    """A speculative server that takes min_p and logit_bias."""
    limits = server.limits
    server.limits = replace(limits, k=None)
    try:
        yield
    finally:
        server.limits = limits


@contextmanager
def served_and_dropped(server):
    """A speculative server that takes min_p and logit_bias and does nothing with them."""
    with served_all(server), each_request(server, params(min_p=0.0, logit_bias={})):
        yield


# -- the sound pair -------------------------------------------------------------------------------

SOUND = dict.fromkeys(VARIANTS, "ok") | {
    "min_p": "unsupported",
    "logit_bias": "unsupported",
    "ignored_fields": "ignored",
}


@pytest.mark.parametrize("name", SOUND)
def test_the_sound_pair_keeps_every_feature(arms, name):
    """Nothing is broken; what the engine refuses when speculating is unsupported, not an error."""
    found, items = arms.try_slice(name)
    assert found.status == SOUND[name], found.why
    assert found.n == found.target_ok > 0
    if found.status == "unsupported":
        assert found.speculative_ok == 0
        assert name in found.why
        assert found.why.startswith("route to target-only")
        assert measure({name: items}, route=items[0].route)[0].estimate is None
    if found.status == "ignored":
        assert "tokens were drafted" in found.why


def test_min_p_and_logit_bias_hold_where_they_are_taken(arms):
    """A server that takes them while speculating, and honours them, is fine."""
    with served_all(arms.servers[Arm.SPECULATIVE]):
        for name in ("min_p", "logit_bias"):
            found, _ = arms.try_slice(name)
            assert (found.status, found.speculative_ok) == ("ok", found.n), found.why


# -- each check can fail --------------------------------------------------------------------------

BROKEN = [
    ("json_object", block_loses_its_end, "no JSON"),
    ("json_schema", block_loses_its_end, "no JSON"),
    ("stop", stop_kept, "is in the text"),
    ("stop", stop_ignored, "is in the text"),
    ("logprobs", shifted_logprobs, "the target says"),
    ("logprobs", one_logprob_a_block, "log-probabilities for"),
    ("penalties", penalties_ignored, "is ignored: the answer is the one without it"),
    ("min_p", served_and_dropped, "min_p 1 left another token"),
    ("logit_bias", served_and_dropped, "which a bias of -100 forbids"),
    ("n", one_choice, "1 of 3 choices came"),
    ("n", empty_choice, "1 of 3 choices are empty"),
    ("long_context", context_cut, "where the target is sure"),
    ("warm_cache", wrong_prefix, "where the target is sure"),
    ("streaming", streamed_blanks_lost, "the same tokens, but text"),
    ("tools", block_loses_its_end, "arguments: no JSON"),
    ("tools", streamed_arguments_lost, "no JSON"),
]


@pytest.mark.parametrize(
    ("name", "meddled", "why"), BROKEN, ids=[f"{n}-{m.__name__}" for n, m, _ in BROKEN]
)
def test_a_broken_feature_is_found_and_named(arms, name, meddled, why):
    """One defect in the speculative server makes one slice broken, with the reason in its row."""
    with meddled(arms.servers[Arm.SPECULATIVE]):
        found, items = arms.try_slice(name)
    assert found.status == "broken", found
    assert why in found.why
    assert found.speculative_ok < found.target_ok
    assert found.examples
    failing = {item.route for item in items if item.receipt_id in found.examples}
    for route in failing:
        counts = [m for m in measure({name: items}, route=route) if m.metric == "slice_failures"]
        whole, *cohorts = counts
        assert whole.estimate.value >= 1
        policed = f"features {name}" if name in KNOWN_FEATURES else f"slice {found.feature}"
        assert [m.cohort for m in cohorts] == [policed]


def test_a_seed_that_is_not_honoured_is_reported_and_fails_nothing(arms):
    """Batches change arithmetic: one seed giving two answers is told, not judged."""
    with seed_ignored(arms.servers[Arm.SPECULATIVE]):
        found, items = arms.try_slice("seed")
    assert found.status in ("ok", "unclear")
    assert "one seed gave two answers" in found.why
    assert found.speculative_ok < found.n
    assert all(
        m.estimate is None or m.estimate.value == 0
        for m in measure({"seed": items}, route=items[0].route)
    )


# -- made-up replies ------------------------------------------------------------------------------

PROMPT = Prompt("p", "qa", "chat", ({"role": "user", "content": "x"},), 64, {"kind": "none"})
TEXT = "one two three four five six"
IDS = tuple(range(10, 22))
SOURCE = Source(PROMPT, TEXT, IDS, IDS, tuple(range(50, 60)), 5)


class Oracle:
    """A target that gives each token the log-probability in `values`, -5 to all others."""

    def __init__(self, values=None, tau=0.1):
        self.values = values
        self.tau = tau

    async def prompt_ids(self, prompt):
        return [1, 2, 3]

    async def logprobs(self, ids):
        return None if self.values is None else [self.values.get(t, -5.0) for t in ids]


def reply(arm, variant=0, *, ids=IDS, text=TEXT, details=None, sampler=None, **changes):
    """One request with what is said to have come of it."""
    asked = PlannedRequest(
        Stage.REPLAY,
        "slice",
        arm,
        "chat",
        PROMPT,
        "x",
        variant,
        sampler or Sampler(),
        64,
        1,
    )
    made = receipt(
        variant,
        str(arm),
        **{
            "prompt_id": "p",
            "route": "chat",
            "stage": "replay",
            "completion_tokens": len(ids or ()),
        }
        | changes,
    )
    return Reply(asked, made, Answer(made.receipt_id, text, ids, details=details))


def looked(name, *replies, oracle=None, source=SOURCE):
    """Items of one prompt."""
    by_key = {(r.request.repeat, Arm(r.receipt.arm)): r for r in replies}
    return asyncio.run(check(name, Group(source, by_key), oracle or Oracle()))


def both(target, speculative, variant=0, **shared):
    """Two replies that share some fields."""
    return (
        reply(Arm.TARGET_ONLY, variant, **shared | target),
        reply(Arm.SPECULATIVE, variant, **shared | speculative),
    )


@pytest.mark.parametrize(
    ("values", "tau", "outcome", "why"),
    [
        ({12: -1.0, 99: -1.05}, 0.1, "ok", "a tie"),
        ({12: -1.0, 99: -1.15}, 0.1, "unclear", "0.15 nats apart"),
        ({12: -1.0, 99: -4.0}, 0.1, "fault", "where the target is sure (3 nats)"),
        ({12: -1.0, 99: -4.0}, None, "unclear", "3 nats apart"),
        (None, 0.1, "unclear", "whose gap is not known"),
    ],
)
def test_a_difference_is_held_against_what_the_target_thinks(values, tau, outcome, why):
    """T01 and T02 in a slice: a tie is noise, a sure token is a fault, no answer is neither."""
    other = (*IDS[:2], 99, *IDS[3:])
    (item,) = looked(
        "long_context", *both({}, {"ids": other}), oracle=Oracle(values, tau), source=SOURCE
    )
    assert item.target.outcome == "ok"
    assert item.speculative.outcome == outcome
    assert why in item.speculative.why
    (item,) = looked("long_context", *both({}, {"ids": IDS[:-1]}), oracle=Oracle(values, tau))
    assert item.speculative.outcome == "unclear"


@pytest.mark.parametrize(
    ("variant", "gap", "outcome"),
    [(0, 3.95, "ok"), (0, 1.0, "fault"), (1, 1.95, "ok"), (1, 0.5, "fault"), (2, 0, "unclear")],
)
def test_a_penalised_gap_is_that_of_the_penalised_target(variant, gap, outcome):
    """Token 10 came twice before and leads by `gap`: frequency 2 takes 4 nats from it, presence 2
    takes 2, and what is left decides. What a repetition penalty does to a logit cannot be told.
    """
    plain = Source(PROMPT, TEXT, IDS, IDS, None, 5)
    target, other = (10, 10, 20, 20), (10, 10, 10, 30)
    sampler = list(PENALTIES.values())[variant]
    replies = both({"ids": target}, {"ids": other}, variant, sampler=sampler)
    oracle = Oracle({20: -1.0 - gap, 10: -1.0})
    (item,) = looked("penalties", *replies, oracle=oracle, source=plain)
    assert item.speculative.outcome == outcome, item.speculative


def test_an_ignored_penalty_is_told_from_one_that_changes_nothing():
    """T17: 60 prompts; the arm's answers with and without the penalty are equal in 58."""
    items = []
    for n in range(60):
        penalised = (*IDS[:4], 100 + n)
        ignoring = both({"ids": penalised}, {"ids": IDS if n < 58 else penalised}, 2)
        items += looked("penalties", *ignoring)
    found = row("penalties", items)
    assert (found.status, found.n, found.speculative_ok) == ("broken", 60, 2)
    assert found.why.startswith("58 of 60: repetition_penalty 1.3 is ignored")
    (item,) = looked("penalties", *both({}, {}, 2))
    assert (item.target.outcome, item.speculative.outcome) == ("unclear", "unclear")


def test_json_lost_in_one_slice_is_broken_although_http_says_200():
    """T15: valid 29 of 30 on target-only, 17 of 30 here: 12 new failures, the slice is named."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    prompt = replace(PROMPT, response_format=schema)
    items = []
    for n in range(30):
        texts = ['{"answer": "a"}' if n < good else '{"answer": "a"' for good in (29, 17)]
        replies = both({"text": texts[0]}, {"text": texts[1]})
        items += looked(
            "json_schema", *(replace(r, request=replace(r.request, prompt=prompt)) for r in replies)
        )
    found = row("json_schema", items)
    assert (found.status, found.target_ok, found.speculative_ok) == ("broken", 29, 17)
    whole, cohort = measure({"json_schema": items}, route="chat")
    assert (whole.estimate.value, whole.estimate.n) == (12, 29)
    assert cohort.cohort == "features json_schema"


STOP = stop_inside(TEXT)
BEFORE = TEXT[: TEXT.find(STOP)]


@pytest.mark.parametrize(
    ("speculative", "outcome", "why"),
    [
        ({"text": BEFORE}, "ok", ""),
        ({"text": BEFORE + STOP}, "fault", "is in the text"),
        ({"text": BEFORE + STOP[:2]}, "fault", "goes on after the stop"),
        ({"text": BEFORE[:-3]}, "fault", "lacks its end"),
        ({"text": BEFORE, "finish_reason": "length"}, "fault", "finish_reason length"),
        ({"text": "another answer"}, "unclear", "another one"),
        ({"text": BEFORE, "ids": IDS[:8]}, "fault", "2 token ids past the stop string"),
        ({"text": BEFORE, "details": {"logprobs": [[1, -1.0, []]] * 9}}, "fault", "9 logprobs for"),
        (
            {"text": BEFORE, "warnings": ("9 token ids received, usage says 6",)},
            "fault",
            "usage says 6",
        ),
    ],
)
def test_stop_strings(speculative, outcome, why):
    """Text ends before the stop, nothing is left past it (vllm#47616), and the reason is stop."""
    sampler = Sampler(stop=(STOP,))
    target = {"text": BEFORE, "ids": IDS[:6]}
    (item,) = looked("stop", *both(target, {"ids": IDS[:6]} | speculative, sampler=sampler))
    assert item.target == Check("ok")
    assert item.speculative.outcome == outcome
    assert why in item.speculative.why


def entries(values, ids=IDS[:3], top=None):
    return {"logprobs": [[i, v, top or [[i, v]]] for i, v in zip(ids, values, strict=True)]}


@pytest.mark.parametrize(
    ("details", "why"),
    [
        (entries((-0.5, -0.6, -0.7)), ""),
        (None, "no log-probabilities came"),
        (entries((-0.5, -0.6), IDS[:2]), "2 log-probabilities for 3 tokens"),
        (entries((-0.5, -0.6, -1.2)), "token 2: log-probability -1.2, the target says -0.7"),
        (entries((-0.5, 0.2, -0.7)), "token 1: the log-probability is no number"),
        (entries((-0.5, None, -0.7)), "token 1: the log-probability is no number"),
        (entries((-0.5, -0.6, -0.7), (10, 12, 11)), "of id 12, the token is 11"),
        (entries((-0.5,) * 3, top=[[7, -0.4], [8, -0.9], [9, -0.2]]), "not in order"),
        (entries((-0.5, -0.6, -0.7), top=[[7, -0.9], [8, -1.9]]), "not among them"),
        (entries((-0.5,) * 3, top=[[7, -0.1], [8, -0.2]]), "probabilities sum to 1.7"),
        (entries((-0.5,) * 3, top=[[7, -0.4], [8, -2.0]]), "not among them"),
        (entries((-0.6,) * 3, top=[[7, -0.5], [8, -1.2]]), "not among them"),
        (entries((-1.9,) * 3, top=[[7, -0.5]]), "at temperature 0 it is not the most likely"),
    ],
)
def test_logprobs(details, why):
    """One each, of the right token, at most 1 in sum, in order, and what the target says."""
    oracle = Oracle({10: -0.5, 11: -0.6, 12: -0.7})
    good = entries((-0.5, -0.6, -0.7))
    replies = both({"details": good}, {"details": details}, ids=IDS[:3], text="a")
    (item,) = looked("logprobs", *replies, oracle=oracle)
    assert item.target == Check("ok")
    assert item.speculative.outcome == ("fault" if why else "ok")
    assert why in item.speculative.why


REFUSED = {
    "outcome": Outcome.REJECTED,
    "error_class": "unsupported_parameter",
    "error_message": "parameter min_p: not yet supported",
    "ids": None,
}


@pytest.mark.parametrize(
    ("target", "speculative", "status", "why"),
    [
        ({}, REFUSED, "unsupported", "route to target-only: the speculative server refuses it"),
        (REFUSED, REFUSED, "not_offered", "both servers refuse it"),
        (REFUSED, {}, "unclear", "target-only alone refuses it"),
        (
            {},
            {"outcome": Outcome.ERROR, "error_class": "server_error", "error_message": "boom"},
            "broken",
            "the request ended as error: boom",
        ),
        ({}, {"outcome": Outcome.ERROR, "error_class": "timeout"}, "unclear", "timeout"),
        ({}, {"outcome": Outcome.REJECTED, "error_class": "overloaded"}, "unclear", "overloaded"),
    ],
)
def test_refusals_are_no_failures_and_crashes_are(target, speculative, status, why):
    """T13: what an arm refuses is a property of the arm; a 500 where target-only answers is not."""
    items = looked("min_p", *both(target, speculative))
    found = row("min_p", items)
    assert found.status == status
    assert why in found.why


def test_an_ignored_field_is_named():
    """T23: `speculative: false` answered with 123 drafts in 41 steps."""
    drafted = {"proposed_tokens": 123, "verify_steps": 41}
    items = looked("ignored_fields", *both({}, drafted))
    found = row("ignored_fields", items)
    assert found.status == "ignored"
    assert "123 tokens were drafted in 41 steps" in found.why
    assert "controlled by server, not by field" in found.why
    items = looked("ignored_fields", *both({}, {"proposed_tokens": 0, "verify_steps": 0}))
    assert row("ignored_fields", items).status == "ok"
    items = looked("ignored_fields", *both({}, {"proposed_tokens": None}))
    assert row("ignored_fields", items).status == "unclear"


def test_what_looks_broken_once_is_not_broken():
    """A fault stands only where it comes again: a crash under load is no property of a feature."""
    fault = Check("fault", "boom")
    items = [
        Item(f"p{i}", "chat", v, Check("ok"), fault, f"r{i}{v}", kept_off=False)
        for i in range(2)
        for v in range(2)
    ]
    fine = [replace(i, speculative=Check("ok")) for i in items]
    again = [items[0], *fine[1:]]
    stands = slices.confirmed(items, again)
    assert [i.is_broken for i in stands] == [True, False, False, False]
    assert stands[1].speculative == Check("unclear", "boom; not when asked again")
    assert row("stop", stands).why == "1 of 4 (1 plain): boom"


def graded(passes: list[tuple[int, int]], n: int = 3) -> list[Item]:
    """Prompts of the slice n: of `n` choices each, how many pass on target-only and here."""
    return [
        Item(
            f"p{i}",
            "chat",
            0,
            Check("ok", "", n, a),
            Check("ok", "", n, b),
            f"r{i}",
            kept_off=False,
        )
        for i, (a, b) in enumerate(passes)
    ]


def test_graded_choices_are_tested_and_not_only_counted():
    """Prompts are the units: all of 5 worse is p 1/32, one of 12 says nothing.

    What may cost quality is never "as on target-only", and never "broken" by chance either.
    """
    found = row("n", graded([(3, 0)] * 5))
    assert (found.status, found.examples) == ("unclear", ("r0", "r1", "r2", "r3", "r4"))
    assert "it may cost quality" in found.why
    assert "5 worse, 0 better of 5, exact p 0.031" in found.why
    assert row("n", graded([(3, 0)] * 4)).status == "unclear"
    for passes in ([(3, 3)] * 11 + [(3, 2)], [(3, 0), (0, 3)] * 6):
        fine = row("n", graded(passes))
        assert fine.status == "ok"
        assert "exact p" in fine.why


def test_a_slice_that_surely_loses_passes_fails_the_rule_on_quality():
    """By the rule that judges all cases, prompts as clusters; few prompts fail nothing."""

    def judged(passes):
        rules = {"max_quality_regression_cases": guardrails.RuleLimit(0)}
        found = guardrails.judge(
            rules, measure({"n": graded(passes)}, route="chat"), stage=Stage.REPLAY, route="chat"
        )
        return {f.cohort: f.verdict for f in found if f.rule == "max_quality_loss" and f.estimate}

    assert judged([(3, 0)] * 30) == {"features n": Verdict.FAIL}
    assert judged([(3, 0)] * 4) == {}
    assert judged([(3, 3)] * 30) == {}


def test_reruns_ask_the_whole_group_with_a_cold_cache():
    """A, B and A again, under new keys and another salt; prompts that are fine are left alone."""
    source = replace(SOURCE, prompt_tokens=50)
    other = replace(source, prompt=replace(PROMPT, prompt_id="q"))
    settings = ReplayConfig(slice_prompts=2)
    asker = Asker("warm_cache", RUN, settings, LIMIT, np.random.default_rng(0))
    requests = plan_slice(asker, [source, other])
    broken = Item("p", "chat", 1, Check("ok"), Check("fault"), "r", kept_off=False)
    again = slices.reruns(requests, [broken])
    assert [(r.prompt.prompt_id, r.repeat) for r in again if r.arm is Arm.SPECULATIVE] == [
        ("p", 8),
        ("p+between", 8),
        ("p", 9),
    ]
    assert {r.cache_salt for r in again}.isdisjoint(r.cache_salt for r in requests)
    assert len({receipt_key(r, RUN) for r in [*requests, *again]}) == len(requests) + len(again)


def test_what_policy_keeps_off_fails_nothing():
    """A failure among requests that the policy keeps on target-only is measured apart."""
    items = [
        Item("p", "chat", 0, Check("ok"), Check("fault", "x"), f"r{i}", kept_off=i == 0)
        for i in range(3)
    ]
    assert measure({"stop": items}, route="chat")[0].estimate.value == 2
    assert measure({"stop": items}, route="chat", kept_off=True)[0].estimate.value == 1
    assert measure({"stop": items}, route="other")[0].estimate is None


def test_a_feature_that_speculation_never_met_is_open():
    """Nothing drafted proves nothing; a server that does not say what it drafted is believed."""
    for drafted, status in ((0, "unclear"), (12, "ok"), (None, "ok")):
        items = looked(
            "streaming",
            *both({}, {"proposed_tokens": drafted}, 0),
            *both({}, {"proposed_tokens": drafted}, 1),
        )
        assert row("streaming", items).status == status


def test_evidence_says_which_features_belong_on_target_only():
    """Status per slice for the policy, rows for the packet; nothing where nothing was tried."""
    rows = [
        row("min_p", looked("min_p", *both({}, REFUSED))),
        row("stop", [Item("p", "chat", 0, Check("ok"), Check("fault", "x"), "r", kept_off=False)]),
        row("tools", [], "no prompt of the corpus is fit for it"),
    ]
    told = evidence(rows)
    statuses = {name: part["status"] for name, part in told["feature_support"].items()}
    assert statuses == {"min_p": "unsupported", "stop": "broken", "tools": "unclear"}
    assert [r["verdict"] for r in told["features"]] == ["pass", "fail", "inconclusive"]
    assert refused(told) == {"min_p": (1, "parameter min_p: not yet supported")}
    assert (evidence([]), refused({})) == ({}, {})
    assert summary(rows) == [
        "server features: 0 of 3 as on target-only",
        f"  refused: min_p: {rows[0].why}",
        "  BROKEN: stop strings: 1 of 1: x",
        "  open: tool calls: no prompt of the corpus is fit for it",
    ]


# -- in a replay ----------------------------------------------------------------------------------


def whole_answer(text, ids):
    """A chat answer in one piece."""
    choice = {"message": {"content": text}, "token_ids": ids, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(ids)}
    body = json.dumps({"choices": [choice], "usage": usage}).encode()
    return Script([body], content_type="application/json")


def featured(text):
    """A server that answers in 12 tokens, other ones when sampled without min_p."""

    def script(body, _n):
        if body.get("min_p") and not text:
            return refusal(400, "The min_p parameter is not yet supported with speculation.")
        sampled = body.get("temperature", 0) > 0 and not body.get("min_p")
        ids = list(range(40, 52)) if sampled else list(range(12))
        metrics = None if text else spec_metrics([(2, 4)] * 4, 4)
        streamed = answer([ids], metrics=metrics)
        return streamed if body.get("stream") else whole_answer(text or "another", ids)

    return script


def test_a_replay_fails_the_route_by_the_slice_and_keeps_its_receipts(tmp_path):
    """The rule names the slice, a refusal is advice, and a resumed run sends nothing again."""
    right = answer([list(range(12))]).text
    with attached_pair(
        tmp_path,
        target=featured(right),
        speculative=featured(""),
        replay={"slices": ["min_p", "streaming", "long_context"], "slice_prompts": 2},
    ) as pair:
        ended = pair.run(Stage.REPLAY)
        (decision,) = ended.decisions
        assert decision.action is Action.FALL_BACK
        assert "slice streaming against whole" in decision.reason
        sent = [len(server.seen) for server in pair.servers.values()]
        pair.run(Stage.REPLAY)
        again = [len(server.seen) for server in pair.servers.values()]
        with Store.read(pair.folder / "run" / "receipts.duckdb") as store:
            proposed = results.propose_policy(store, ended.run_id, pair.rollout).policy
            told = store.get_stage(ended.run_id, Stage.REPLAY).evidence["evidence"]
            kept = store.receipts(ended.run_id, phase="slice-streaming")
    assert [row["status"] for row in told["features"]] == ["unsupported", "broken", "unclear"]
    assert "set replay.long_context_tokens" in told["features"][2]["why"]
    assert "min_p" not in decision.reason
    kept_off = [rule.when.features for rule in proposed.rules if rule.use == "target_only"]
    assert ("min_p",) in [features.any_of for features in kept_off if features is not None]
    assert len(kept) == 16  # two prompts, two variants, two arms, and once more
    chats = [
        sum(seen.path == "/v1/chat/completions" and seen.body["max_tokens"] > 1 for seen in s.seen)
        for s in pair.servers.values()
    ]
    assert [a - s for a, s in zip(again, sent, strict=True)][1] == 0
    assert chats[0] > 0
