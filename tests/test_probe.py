"""What the target is asked, what the samples become, and `speccheck probe` on served pairs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from broken_server import RIGHT
from scripted_server import Script, ScriptedServer, refusal
from served_pair import served, small_pair, write_rollout
from test_cli import speccheck

from speccheck import battery, client, probe
from speccheck.client import TokenLogprob
from speccheck.drive import Endpoint
from speccheck.engine.engine import Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings
from speccheck.errors import EngineError
from speccheck.lossless import Compared, Divergence
from speccheck.records import Answer, Arm, ArmDescription, Prompt
from speccheck.replay import attribution, distributions

# --- rows and gaps ------------------------------------------------------------------------------


def target(url: str, **config: Any) -> Endpoint:
    """An endpoint as the stages have it."""
    description = ArmDescription(Arm.TARGET_ONLY, url, "x 1", "m", None, config)
    return Endpoint(description, "policy", "m")


def scored(body: dict[str, Any], gap: float) -> list[Any]:
    """Prompt logprobs of a model whose best token is 1, its second 2, and token 9 far behind.

    As vLLM's, the token that is there is listed whether or not it is one of the top k.
    """
    top = {1: -0.1, 2: -0.1 - gap, 3: -4.0, 9: -9.0}
    k = body["prompt_logprobs"]
    listed = dict(sorted(top.items(), key=lambda item: -item[1])[:k])
    return [None] + [
        {
            str(t): {"logprob": logp, "rank": rank}
            for rank, (t, logp) in enumerate((listed | {token: top[token]}).items(), 1)
        }
        for token in body["prompt"][1:]
    ]


def completion(body: dict[str, Any], gap: float) -> Script:
    """A reply of /v1/completions: what was asked for, and four greedy tokens."""
    n = body["max_tokens"]
    choice: dict[str, Any] = {"index": 0, "text": "x", "token_ids": [1] * n, "finish_reason": "x"}
    if "prompt_logprobs" in body:
        choice["prompt_logprobs"] = scored(body, gap)
    if "logprobs" in body:
        top = {"token_id:1": -0.1, "token_id:2": -0.1 - gap}
        choice["logprobs"] = {"top_logprobs": [top] * n}
    raw = json.dumps({"choices": [choice]}).encode()
    return Script([raw], content_type="application/json")


async def test_rows_are_those_of_the_answer_from_its_second_token():
    """Positions, order and probabilities, and never a category for having been drawn."""
    with ScriptedServer(lambda body, _: completion(body, 0.5)) as server:
        async with client.open_session() as session:
            done: list[int] = []
            rows = await probe.rows_of(
                session,
                target(server.url),
                {"a": ([1, 2, 3, 1, 9, 2], 3), "b": ([1, 2, 1], 2)},
                top_k=3,
                step=lambda: done.append(1),
            )
    assert rows["a"].ids.tolist() == [[1, 2, 3], [1, 2, 3]]  # of tokens 9 and 2
    assert rows["a"].probs[0].tolist() == pytest.approx([math.exp(x) for x in (-0.1, -0.6, -4)])
    assert rows["b"].ids.shape[0] == 0
    assert len(done) == 2


def test_ties_go_to_the_lower_id():
    """Which of two equal tokens is in the top k may not depend on which of them was drawn."""
    for drawn in (4, 7):
        other = 11 - drawn
        row = TokenLogprob(drawn, -1.0, 2, ((1, -0.5), (drawn, -1.0), (other, -1.0)))
        assert probe._rows([row], 2).ids.tolist() == [[1, 4]]


async def test_a_server_without_logprobs_gives_no_rows():
    """Refused at the first question, also with fewer candidates, is "none"; later is an error."""
    no = refusal(400, "prompt_logprobs are not supported")
    with ScriptedServer(lambda body, n: completion(body, 0.5) if n in (2, 5) else no) as server:
        async with client.open_session() as session:
            ask = partial(
                probe.rows_of,
                session,
                target(server.url),
                {"a": ([1, 2, 3], 1), "b": ([1, 2, 3], 1)},
                step=lambda: None,
            )
            assert await ask(top_k=20) == {}
            with pytest.raises(EngineError, match="prompt_logprobs"):
                await ask(top_k=3)
            with pytest.raises(EngineError, match="prompt_logprobs"):
                await ask(top_k=20)  # the first is refused, five candidates are given
        assert [seen.body["prompt_logprobs"] for seen in server.seen] == [20, 5, 3, 3, 20, 5, 5]


async def test_the_noise_floor_has_two_axes():
    """Alone against in a batch, decoding against scoring: each with the change that was sent."""
    prompts = [[1, 2], [1, 3]]

    def gap(body: dict[str, Any], n: int) -> float:
        if "prompt_logprobs" in body:
            return 0.48
        return 0.5 if n < len(prompts) else 0.53

    with ScriptedServer(lambda body, n: completion(body, gap(body, n))) as server:
        async with client.open_session() as session:
            changes = await probe.gap_changes(
                session, target(server.url), prompts, max_tokens=4, concurrency=3
            )
    assert changes[probe.BATCH] == pytest.approx([-0.03] * 8)
    assert changes[probe.PATH] == pytest.approx([0.02] * 8)


async def test_the_gap_at_a_divergence():
    """Between two candidates; infinite outside the top k."""
    with ScriptedServer(lambda body, _: completion(body, 0.5)) as server:
        async with client.open_session() as session:
            where = target(server.url)
            assert await probe.gap_at(session, where, [1, 2], 1, 2) == pytest.approx(0.5)
            assert await probe.gap_at(session, where, [1, 2], 1, 17) == math.inf


@pytest.mark.parametrize(
    ("config", "nats"),
    [
        ({"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}}, 0.25),
        ({"vllm_config": {"model_config": {"dtype": "float32"}}}, 0.0),
        ({"vllm_config": {"model_config": {"dtype": "torch.float16"}}}, 0.03125),
        ({}, 0.25),
    ],
)
def test_the_floor_is_two_steps_of_the_arithmetic(config, nats):
    """Two steps of what the server says it computes in; of bf16 where it does not say."""
    assert probe.resolution(target("http://x", **config).description) == nats


async def test_the_first_error_ends_the_others():
    """Parallel questions stop when one of them cannot be answered."""
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    async def fails() -> None:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        await probe.in_parallel([slow, fails], 2)
    assert ended == ["slow"]


# --- near divergences ---------------------------------------------------------------------------


def test_near_divergences_are_settled_by_their_replays():
    """Parting alike in each replay is a violation, else a tie; what was not replayed stays near."""
    prompts = [
        Prompt(name, "t", "r", ({"role": "user", "content": "x"},), 4, {"kind": "none"})
        for name in ("same", "other", "none", "tie")
    ]
    part = Divergence(1, 5, 6)
    pairs = {
        p.prompt_id: Compared("pair", "r", 2, part, 0.15, "tie" if p.prompt_id == "tie" else "near")
        for p in prompts
    }
    asked = attribution.Attribution(pairs, {}, None, "")
    unsettled = attribution.near(asked, prompts)
    assert [p.prompt_id for p in unsettled] == ["same", "other", "none"]
    ids = {
        ("same", Arm.TARGET_ONLY): (4, 5),
        ("same", Arm.SPECULATIVE): (4, 6),
        ("other", Arm.TARGET_ONLY): (4, 5),
        ("other", Arm.SPECULATIVE): (4, 5),
    }
    receipts = [
        SimpleNamespace(receipt_id=f"{name}{arm}{n}", prompt_id=name, arm=arm, repeat=n)
        for name, arm in ids
        for n in range(attribution.NEAR_REPLAYS)
    ]
    kept = {r.receipt_id: Answer(r.receipt_id, "", ids[r.prompt_id, r.arm]) for r in receipts}
    store = SimpleNamespace(receipts=lambda *_a, **_k: receipts, answers=lambda _ids: kept)
    settled = attribution.settle(SimpleNamespace(store=store, run_id="run"), asked, unsettled)
    assert {name: pair.kind for name, pair in settled.compared.items()} == {
        "same": "violation",
        "other": "tie",
        "none": "near",
        "tie": "tie",
    }


# --- what was proposed --------------------------------------------------------------------------


def test_prompt_lookup_is_recomputed_as_the_engine_proposed_it(tmp_path):
    """From ids alone: rounds laid over answers, each accepted token the one that was proposed."""
    pair = small_pair(tmp_path)
    config = RIGHT["ngram"]
    engine = Engine(EngineSettings.parse({"model": pair["target"], "speculative_config": config}))
    prompt = (3, 4, 5, 3, 4, 6, 3, 4)
    params = SamplingParams(temperature=1.0, max_tokens=20)
    requests = [Request(str(i), prompt, replace(params, seed=i)) for i in range(30)]
    n_accepted = 0
    for done in engine.generate(requests):
        tokens = tuple(done.token_ids)
        proposals = distributions._lookups(config, prompt, tokens)
        found = battery.rounds(
            len(tokens),
            done.stats.accepted_per_step,
            done.stats.drafted_per_step,
            lambda at, known=proposals: len(known[at]),
        )
        assert found is not None
        proposed = distributions._proposed(len(tokens), proposals, found)
        for start, drafted, accepted in found:
            kept = tokens[start : start + accepted]
            assert proposed[start - 1 : start - 1 + len(kept)] == kept
            n_accepted += len(kept)
            assert drafted <= len(proposals[start])
    assert n_accepted > 10


def test_answers_without_ids_are_compared_word_by_word():
    """A server that sends text alone still has a two-sample test."""
    a, b = (
        distributions._sampled("p", Answer("r", text, None), None, None, None, "unknown", {})
        for text in ("one two", "one three")
    )
    assert a.tokens[0] == b.tokens[0]
    assert a.tokens[1] != b.tokens[1]
    assert a.target is None


# --- the command, on served pairs ---------------------------------------------------------------

OPTIONS = ("--prompts", "4", "--samples", "16", "--max-tokens", "16", "--margin", "0.09")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with the small pair, and its target and its draft behind servers."""
    folder = tmp_path_factory.mktemp("pair")
    pair = small_pair(folder)
    serving = {"served_model_name": "pair", "seed": 1}
    with (
        served("right", serving | {"model": pair["target"]}) as url,
        served("right", serving | {"model": pair["draft"]}) as draft,
    ):
        yield SimpleNamespace(folder=folder, pair=pair, serving=serving, url=url, draft=draft)


@contextmanager
def speculating(bench: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """URL and config of a speculative server whose verifier has this shortcut."""
    spec = RIGHT["token"] | {"model": bench.pair["draft"]}
    settings = bench.serving | {"model": bench.pair["target"], "speculative_config": spec}
    with served(name, settings) as url:
        yield url, spec


def probed(bench: Any, name: str, urls: dict[str, str], spec: dict[str, Any], *more: str) -> Any:
    """`speccheck probe` on these servers, in a folder of this name."""
    corpus = {"paths": [bench.pair["corpus"]]}
    path = write_rollout(bench.folder / f"{name}.yaml", urls, spec, corpus=corpus)
    command = ("probe", "--rollout", path, "--out", f"{name}-out", *OPTIONS, *more)
    return speccheck(*command, cwd=bench.folder)


def named(done: Any) -> dict[str, Any]:
    """The tests of an answer, by name."""
    return {t["name"].split()[0]: t for t in json.loads(done.stdout)["tests"]}


def test_a_right_verifier_passes_and_is_asked_once(bench):
    """Exit code 0, what was tested and what was not; the same command again draws nothing."""
    with speculating(bench, "right") as (url, spec):
        urls = {"target_only": bench.url, "speculative": url, "draft": bench.draft}
        first, again = (probed(bench, "right", urls, spec, "--json") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    found = json.loads(first.stdout)
    assert found["verdict"] == "pass"
    assert {"T6", "T6b"} <= {n for n, t in named(first).items() if t["verdict"] == "pass"}
    assert any("verified tokens" in line for line in found["tested"])
    assert any("first token" in line for line in found["not_tested"])
    assert "nothing left to send" in again.stderr
    assert json.loads(again.stdout) == found
    written = (bench.folder / "right-out" / "probe.json").read_text(encoding="utf-8")
    assert json.loads(written)["tests"] == found["tests"]


def test_a_wrong_verifier_fails(bench):
    """W01 over HTTP: exit code 1, found by the draft-aware test. Where the target gives no
    log-probabilities the two-sample test is left, and so few samples are inconclusive: code 3.
    """
    with speculating(bench, "W01") as (url, spec):
        urls = {"target_only": bench.url, "speculative": url, "draft": bench.draft}
        done = probed(bench, "W01", urls, spec, "--json")
        mute = bench.serving | {"model": bench.pair["target"], "max_logprobs": 0}
        with served("right", mute) as target_url:
            urls = {"target_only": target_url, "speculative": url}
            bare = probed(bench, "bare", urls, spec, "--samples", "8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert named(done)["T6"]["verdict"] == "fail"
    assert bare.returncode == 3, bare.stdout + bare.stderr
    assert "the target gives no log-probabilities" in bare.stdout
    assert "T8: 32 of the 2,000 samples" in bare.stdout
    assert max(map(len, bare.stdout.splitlines())) <= 80


def test_a_test_that_does_not_exist_is_named(tmp_path):
    """One line, exit code 2, nothing started."""
    done = speccheck("probe", "--tests", "T3,T9", cwd=tmp_path)
    assert done.returncode == 2
    assert "no test is called 'T9'" in done.stderr
