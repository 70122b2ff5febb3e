"""Other servers' words for speculation end in the same columns; what they do not say is unknown."""

from __future__ import annotations

import json

import pytest
from attached_pair import attached_pair
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, Script, chunk, sse, usage_of
from test_client import observe, planned

from speccheck import dialects
from speccheck.client import SpecCounts, make_receipt, target_passes
from speccheck.records import Arm, ArmDescription, Stage

SPECULATIVE = ArmDescription(Arm.SPECULATIVE, "http://x", "other 1", "m", {"method": "ngram"})

LLAMA_CPP = {
    "timings": {
        "prompt_n": 5,
        "prompt_ms": 9.1,
        "predicted_n": 16,
        "predicted_ms": 40.0,
        "draft_n": 12,
        "draft_n_accepted": 9,
    }
}
SGLANG = {
    "sglext": {
        "spec_tokens_details": {
            "spec_accept_rate": 0.75,
            "spec_accept_length": 2.5,
            "spec_num_correct_drafts": 9,
            "spec_num_proposed_drafts": 12,
            "spec_verify_ct": 6,
            "spec_correct_drafts_histogram": [1, 1, 4],
        }
    }
}
SGLANG_OLD = {
    "meta_info": {
        "spec_verify_ct": 6,
        "spec_accept_token_num": 9,
        "spec_draft_token_num": 12,
        "spec_accept_rate": 0.75,
    }
}
SGLANG_BETWEEN = {
    "meta_info": {"spec_verify_ct": 6, "spec_accepted_drafts": 9, "spec_proposed_drafts": 12}
}


def streamed(extra: dict, text: str = "a b c") -> Script:
    """A stream without token ids, as those servers send it, their words in the last chunk."""
    last = {"choices": [], "usage": usage_of(5, 16), **extra}
    parts = [chunk(text), chunk(finish="length"), last]
    return Script([b"".join(map(sse, parts)), DONE])


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (LLAMA_CPP, SpecCounts(None, 12, 9, None)),
        (SGLANG, SpecCounts(6, 12, 9, (1, 1, 4))),
        (SGLANG_OLD, SpecCounts(6, 12, 9, None)),
        (SGLANG_BETWEEN, SpecCounts(6, 12, 9, None)),
    ],
    ids=["llama.cpp", "sglang", "sglang, older", "sglang, in between"],
)
async def test_counts_of_other_servers(said, counts):
    """Drafted and accepted tokens, and verify steps where they are told; no warning."""
    seen = await observe(streamed(said))
    assert (seen.outcome, seen.counts, seen.warnings) == ("ok", counts, ())
    receipt = make_receipt(seen, planned(), "run:1", SPECULATIVE, "policy:1")
    assert (receipt.proposed_tokens, receipt.accepted_tokens, receipt.discarded_tokens) == (
        12,
        9,
        3,
    )
    assert receipt.verify_steps == counts.verify_steps
    assert receipt.counts_source == "engine"
    # 16 tokens, the first from the prefill, 9 of the others accepted drafts: 6 passes.
    assert receipt.target_passes == 6


@pytest.mark.parametrize(
    "said",
    [
        {"timings": {"predicted_n": 16}},
        {"timings": None},
        {"timings": [1]},
        {"sglext": None},
        {"sglext": {"spec_tokens_details": None}},
        {"meta_info": {"spec_verify_ct": 3}},
        {"meta_info": "no"},
    ],
)
async def test_what_is_not_said_is_not_zero(said):
    """A server that says nothing of drafts leaves the columns empty, with the reason."""
    seen = await observe(streamed(said))
    assert seen.outcome == "ok"
    assert seen.counts is None
    assert seen.counts_note == "the server sent no per-request metrics"


@pytest.mark.parametrize(
    "wrong", [{"draft_n": -3}, {"draft_n": "12"}, {"draft_n": 4}, {"draft_n_accepted": None}]
)
async def test_counts_that_cannot_be_are_a_warning(wrong):
    """More accepted than drafted, negative, missing or no numbers at all."""
    seen = await observe(streamed({"timings": LLAMA_CPP["timings"] | wrong}))
    assert seen.counts is None
    assert "unreadable speculative_decoding metrics" in seen.warnings[0]


async def test_a_histogram_that_does_not_add_up_is_a_warning():
    """SGLang's is held against its own counts as vLLM's is."""
    details = SGLANG["sglext"]["spec_tokens_details"] | {"spec_correct_drafts_histogram": [0, 0, 1]}
    seen = await observe(streamed({"sglext": {"spec_tokens_details": details}}))
    assert len([w for w in seen.warnings if "do not add up" in w]) == 2


async def test_the_last_word_counts():
    """llama.cpp may time each token (`timings_per_token`): the last is the whole answer's."""
    early = {"timings": {"draft_n": 2, "draft_n_accepted": 1}}
    parts = [chunk("a") | early, chunk("b", finish="stop"), {"choices": [], **LLAMA_CPP}]
    script = Script([b"".join(map(sse, [*parts, {"choices": [], "usage": usage_of(5, 16)}])), DONE])
    assert (await observe(script)).counts == SpecCounts(None, 12, 9, None)


@given(
    st.dictionaries(
        st.sampled_from(sorted(dialects.KEYS)),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: st.dictionaries(
                st.sampled_from(["spec_tokens_details", "draft_n"]), inner
            ),
            max_leaves=4,
        ),
    )
)
def test_no_reply_breaks_the_reader(reply):
    """Whatever a server puts there."""
    assert dialects.of_reply(reply) is None or isinstance(dialects.of_reply(reply), dict)


def test_passes_without_verify_steps():
    """They follow from the tokens: each accepted draft saved one."""
    assert target_passes(16, SpecCounts(None, 12, 9, None), Arm.SPECULATIVE) == 6
    assert target_passes(1, SpecCounts(None, 4, 0, None), Arm.SPECULATIVE) == 0


def test_what_a_server_needs_or_refuses_is_said_in_the_rollout(tmp_path):
    """`attached.extra` is in each request of both arms, `attached.omit` in none."""

    def target(_body, _n):
        return streamed({})

    def speculative(_body, _n):
        return streamed(SGLANG)

    with attached_pair(tmp_path, target=target, speculative=speculative, prompts=4) as pair:
        told = json.loads(pair.rollout.read_text())
        told["attached"] |= {"extra": {"return_spec_tokens_details": True}, "omit": ["cache_salt"]}
        told["replay"] = {"slices": "off", "probe": {"samples": 0}}
        pair.rollout.write_text(json.dumps(told))
        found = pair.run(Stage.REPLAY)
        bodies = [
            seen.body
            for server in pair.servers.values()
            for seen in server.seen
            if seen.path.endswith("/chat/completions")
        ]
    assert len(bodies) >= 8
    assert all(body["return_spec_tokens_details"] is True for body in bodies)
    assert not any("cache_salt" in body for body in bodies)
    (acceptance,) = [
        f for f in found.decisions[0].findings if f.rule == "min_acceptance_rate" and not f.cohort
    ]
    assert acceptance.estimate.value == 0.75
