"""Estimates from logs: against the exact law of verification, and against the engine itself."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from rule_receipts import receipt

from speccheck import stats
from speccheck.config import Rollout, package_dir
from speccheck.corpus import Corpus, load_corpus
from speccheck.engine.engine import Completion, Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings
from speccheck.errors import UsageError
from speccheck.estimate import (
    Drafting,
    Method,
    Prices,
    Replay,
    lookup_costs,
    replay,
    run_answers,
    scheduling_notes,
)
from speccheck.logs import LoggedAnswer, chat_ids, open_tokenizer
from speccheck.records import Answer, Estimate, to_json
from speccheck.speed import Costs, saved_passes
from speccheck.store import Run, Store
from speccheck.suffix import SuffixSettings
from speccheck.sweep.calibration import LOOKUP, TOGETHER, Calibration
from speccheck.tables import load_table

TABLE = load_table(package_dir("corpora") / "fixture_t4.json")


class Prefix:
    """The committed tokens, for a drafter that looks at them."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.ids = []

    def append(self, token: int) -> None:
        self.ids.append(token)


def test_replaying_logs_gives_the_exact_law_of_one_hot_verification() -> None:
    """Over all answers of the fixture table, weighted by their probability, the replay's counts are
    the exact expectations of STATS.md 1.5: passes 71/20, drafted 71/10, accepted 29/20.
    """
    prefix = Prefix()

    def argmax_draft(ks: Sequence[int]) -> list[list[int]]:
        found = []
        for k in ks:
            context, draft = prefix.ids[1:], []
            for _ in range(k):
                known = [*context, *draft]
                row = TABLE.draft_row(len(known) + 1, known[-1] if known else None)
                draft.append(max(range(len(row)), key=lambda i: (row[i], -i)))
            found.append(draft)
        return found

    method = Method("argmax", argmax_draft)
    passes = drafted = accepted = Fraction(0)
    size = len(TABLE.vocabulary)
    for answer in itertools.product(range(size), repeat=TABLE.horizon):
        weight = Fraction(1)
        for i, token in enumerate(answer):
            weight *= TABLE.target_row(i + 1, answer[i - 1] if i else None)[token]
        # The first token of an answer is the prompt's own; the table's five come after it.
        logged = LoggedAnswer("x", [], [0, *answer], max_tokens=TABLE.horizon + 1)
        _, agreed, _, rounds, *steps = replay(logged, [prefix], [method], [4])
        passes += weight * rounds
        accepted += weight * agreed
        drafted += weight * sum(k * n for k, n in enumerate(steps, start=1))
    assert (passes, drafted, accepted) == (Fraction(71, 20), Fraction(71, 10), Fraction(29, 20))


# --- against the engine -------------------------------------------------------------------------

K = 4
SPEC = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 2}
SPEC["prompt_lookup_max"] = 4


@pytest.fixture(scope="module")
def engines() -> dict[bool, Engine]:
    """The target alone (False), and with prompt lookup (True)."""
    return {
        speculative: Engine(
            EngineSettings.parse(
                {"max_num_seqs": 16, "speculative_config": SPEC if speculative else None}
            )
        )
        for speculative in (False, True)
    }


@pytest.fixture(scope="module")
def prompts(engines: dict[bool, Engine]) -> list[list[int]]:
    """Two prompts of each task of the packaged corpora, in token ids."""
    corpus = load_corpus(sorted(package_dir("corpora").glob("*.jsonl"))).limited(2)
    return [chat_ids(engines[False].tokenizer, prompt) for prompt in corpus.prompts]


def answers(engine: Engine, prompts: list[list[int]], **params: object) -> list[Completion]:
    """What the engine says, all prompts in one batch, seeds by position."""
    return engine.generate(
        Request(str(i), tuple(ids), SamplingParams(**{"seed": i, **params}))  # type: ignore[arg-type]
        for i, ids in enumerate(prompts)
    )


def replayed(
    prompts: list[list[int]],
    done: list[Completion],
    max_tokens: int,
    sizes: tuple[int, int] = (2, 4),
) -> list[list[int]]:
    """Per answer: accepted, unknown, passes and drafted of a replay over target-only answers."""
    rows = []
    for ids, answer in zip(prompts, done, strict=True):
        feed = Replay(ks=[K], ngrams=[sizes])
        feed.add(LoggedAnswer("x", ids, answer.token_ids, max_tokens=max_tokens))
        line = feed.estimates().cohorts[0].drafting[0]
        rows.append([line.accepted, line.unknown, line.passes, line.drafted])
    return rows


def measured(done: list[Completion]) -> list[list[int]]:
    """Accepted, passes and drafted as the engine counted them."""
    return [
        [
            sum(answer.stats.accepted_per_step),
            answer.stats.n_steps - 1,  # without the pass that read the prompt
            sum(answer.stats.drafted_per_step),
        ]
        for answer in done
    ]


def test_at_temperature_0_the_engine_counts_exactly_what_was_estimated(
    engines: dict[bool, Engine], prompts: list[list[int]]
) -> None:
    """Each request's accepted, drafted and passes on the speculative engine, from target-only
    answers of the same length. With other match lengths it is not so.
    """
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    done = answers(engines[False], prompts, **params)
    real = measured(answers(engines[True], prompts, **params))
    estimated = replayed(prompts, done, 40)
    assert [row[1] for row in estimated] == [0] * len(prompts)
    assert [[a, p, d] for a, _, p, d in estimated] == real
    assert sum(row[0] for row in estimated) > 50, "too little was accepted to show anything"
    other = replayed(prompts, done, 40, sizes=(3, 4))
    assert [[a, p, d] for a, _, p, d in other] != real


def test_where_an_answer_stops_only_drafts_beyond_its_end_are_open(
    engines: dict[bool, Engine], prompts: list[list[int]]
) -> None:
    """Answers that end by themselves: drafted and passes exact, accepted exact but for drafts past
    the end, which the engine still counts and a log cannot know.
    """
    params = {"temperature": 0.0, "max_tokens": 80}
    estimated = replayed(prompts, answers(engines[False], prompts, **params), 80)
    real = measured(answers(engines[True], prompts, **params))
    assert [[p, d] for _, _, p, d in estimated] == [[p, d] for _, p, d in real]
    for (accepted, unknown, _, _), (counted, _, _) in zip(estimated, real, strict=True):
        assert accepted <= counted <= accepted + unknown


def test_above_temperature_0_the_engine_is_within_the_interval(
    engines: dict[bool, Engine], prompts: list[list[int]]
) -> None:
    """Sampled answers are a draw of what verification accepts: both acceptances are estimates of
    one number (limits at one-sided 0.0005, so 1 alarm in 1,000 or fewer).
    """
    params = {"temperature": 0.8, "max_tokens": 32, "ignore_eos": True}
    many = prompts * 3
    rows = replayed(many, answers(engines[False], many, **params), 32)
    real = measured(answers(engines[True], many, **params))
    level = 0.0005
    a = stats.clustered_ratio([r[0] for r in rows], [r[3] for r in rows], alpha=level)
    b = stats.clustered_ratio([r[0] for r in real], [r[2] for r in real], alpha=level)
    reach = ((a.high - a.value) ** 2 + (b.high - b.value) ** 2) ** 0.5
    assert abs(a.value - b.value) < reach
    assert reach < 0.2, "the interval is too wide to show anything"


# --- arithmetic ---------------------------------------------------------------------------------


def logged(n: int = 30, *, task: str = "code", temperature: float = 0.0) -> list[LoggedAnswer]:
    """Answers that repeat their prompt, more or less."""
    rng = np.random.default_rng(5)
    found = []
    for i in range(n):
        prompt = [int(token) for token in rng.integers(0, 50, 40)]
        output = [token if rng.random() < 0.9 else 99 for token in prompt]
        found.append(LoggedAnswer(f"p{i}", prompt, output, task, "r", temperature, None))
    return found


def fed(answers: Sequence[LoggedAnswer], **options: object) -> Replay:
    replay = Replay(**options)  # type: ignore[arg-type]
    for answer in answers:
        replay.add(answer)
    return replay


LOAD = "8 at once"


def line(replay: Replay, method: str, k: int, costs: Costs | None = None) -> Drafting:
    cohort = replay.estimates(costs and {LOAD: Prices(costs)}).cohorts[0]
    return next(d for d in cohort.drafting if (d.method, d.k) == (method, k))


def test_passes_and_saved_passes_add_up() -> None:
    """Decode tokens are passes plus accepted, but for a last round that ends the answer."""
    replay = fed(logged(), ngrams=[(2, 4)], suffix=SuffixSettings())
    cohort = replay.estimates().cohorts[0]
    for d in cohort.drafting:
        assert 0 <= d.passes + d.accepted - cohort.decode_tokens <= cohort.answers
        assert d.accepted <= d.drafted - d.unknown
        assert d.verify_steps <= d.passes
        assert d.tokens_per_pass.value == pytest.approx(cohort.decode_tokens / d.passes)
        assert d.saved_share.value == pytest.approx(1 - d.passes / cohort.decode_tokens)
        assert d.speedup == {}
        assert d.acceptance.n <= cohort.prompts == 30
    assert cohort.best == ()


def test_costs_are_charged_as_the_definition_says() -> None:
    """With full drafts only, saved passes after costs are `speed.saved_passes` (STATS.md 2.2)."""
    text = list(range(200))
    endless = LoggedAnswer("p", [*text, *text, 0], text[1:], max_tokens=500)
    replay = fed([endless], ks=[4], ngrams=[(1, 3)])
    costs = Costs(draft=0.1, verify={4: 1.08}, rollback=0.05)
    d = line(replay, "ngram 1-3", 4, costs)
    rounds = d.verify_steps
    assert (d.drafted, d.passes) == (4 * rounds, rounds)
    ended_inside = d.accepted + d.passes - len(endless.output) + 1
    expected = saved_passes(d.accepted, d.drafted, rounds, 4, costs) - ended_inside
    n = len(endless.output) - 1
    assert d.speedup[LOAD].value == pytest.approx(n / (n - expected))


def test_without_a_calibrated_verify_step_nothing_is_claimed() -> None:
    """A k that was not calibrated has no speed-up, and does not compete for the best."""
    replay = fed(logged(), ks=[2, 4], ngrams=[(2, 4)])
    costs = Costs(0.0, {2: 1.01})
    assert line(replay, "ngram 2-4", 4, costs).speedup == {}
    assert line(replay, "ngram 2-4", 2, costs).speedup[LOAD].value > 1
    (best,) = replay.estimates({LOAD: Prices(costs)}).cohorts[0].best
    assert best.words.startswith("k = 2, ")
    (best,) = replay.estimates({LOAD: Prices(Costs(0.5, {2: 3.0, 4: 5.0}))}).cohorts[0].best
    assert best.words.startswith("target-only; ")


def test_the_best_of_several_lengths_is_held_to_all_of_them() -> None:
    """Whoever picks the largest of four picks its luck too: limits are those of a quarter level."""
    ks = [1, 2, 3, 4]
    price = Prices(Costs(0.0, {4: 1.2}))
    (best,) = fed(logged(), ks=ks, ngrams=[(2, 4)]).estimates({LOAD: price}).cohorts[0].best
    found = fed(logged(), ks=ks, ngrams=[(2, 4)]).estimates({LOAD: price}, alpha=0.05 / 4)
    lines = [d.speedup[LOAD] for d in found.cohorts[0].drafting]
    assert best.speedup == max(lines, key=lambda e: e.value)


def test_costs_that_say_nothing_are_left_out() -> None:
    """No limits, below a plain step, or with a draft model's cost in it: no price of a lookup."""

    def estimate(value: float, reach: float) -> Estimate:
        return Estimate(value, value - reach, value + reach, 3, "mean", 0.05)

    def calibrated(note: str, verify: dict[int, Estimate]) -> Calibration:
        costs = Costs(0.0, {k: e.value for k, e in verify.items()})
        return Calibration(4, estimate(0.02, 0.001), verify, verify, None, None, note, costs, ())

    verify = {
        1: estimate(0.98, 0.05),
        2: estimate(1.1, 0.02),
        4: estimate(-0.4, math.inf),
        8: estimate(0.5, 0.1),
    }
    found = lookup_costs({4: calibrated(LOOKUP, verify), 8: calibrated(TOGETHER, verify)})
    ends = [{1: 1.0, 2: 1.1}, {1: 1.0, 2: 1.08}, {1: 1.03, 2: 1.12}]
    (price,) = found.values()
    assert list(found) == ["4 at once"]
    assert [price.costs.draft, price.costs.rollback] == [0, 0]
    for costs, end in zip((price.costs, price.least, price.most), ends, strict=True):
        assert dict(costs.verify) == pytest.approx(end)


def test_what_is_not_known_of_the_costs_is_in_the_interval() -> None:
    """Answers and costs were measured apart: reaches add up as squares, and given costs have none.

    At the ends of the costs the speed-up itself is recomputed, so no limit lies within them.
    """
    replay = fed(logged(), ks=[4], ngrams=[(2, 4)])
    at = [Costs(0.0, {4: v}) for v in (1.2, 1.1, 1.5)]
    given, calibrated = (replay.estimates({LOAD: price}) for price in (Prices(at[0]), Prices(*at)))
    plain, wider = (found.cohorts[0].drafting[0].speedup[LOAD] for found in (given, calibrated))
    fast, slow = (line(replay, "ngram 2-4", 4, costs).speedup[LOAD].value for costs in at[1:])
    assert wider.value == plain.value
    assert wider.low == pytest.approx(
        plain.value - ((plain.value - plain.low) ** 2 + (plain.value - slow) ** 2) ** 0.5
    )
    assert wider.high == pytest.approx(
        plain.value + ((plain.high - plain.value) ** 2 + (fast - plain.value) ** 2) ** 0.5
    )
    assert wider.low < min(plain.low, slow)
    assert [
        any("taken as they are" in n for n in found.notes) for found in (given, calibrated)
    ] == [
        True,
        False,
    ]


def test_answers_to_one_prompt_are_one_cluster() -> None:
    """Repeats narrow nothing: n counts prompts, and the interval is that of the prompts."""
    once = line(fed(logged(), ngrams=[(2, 4)]), "ngram 2-4", 4)
    thrice = line(fed(logged() * 3, ngrams=[(2, 4)]), "ngram 2-4", 4)
    assert thrice.accepted == 3 * once.accepted
    assert thrice.acceptance.n == once.acceptance.n
    assert thrice.acceptance.low == pytest.approx(once.acceptance.low)


def test_cohorts_are_routes_tasks_and_temperature_bands() -> None:
    """All answers first, then each cohort by name; sums agree."""
    mixed = [*logged(task="code"), *logged(task="chat", temperature=0.7)]
    found = fed(mixed, ks=[3], ngrams=[(2, 4)]).estimates().cohorts
    assert [c.name for c in found] == ["all answers", "r, chat, mid", "r, code, greedy"]
    assert found[0].decode_tokens == found[1].decode_tokens + found[2].decode_tokens
    assert found[0].drafting[0].accepted == sum(c.drafting[0].accepted for c in found[1:])


def test_nothing_drafted_is_unknown_and_never_zero() -> None:
    """No draft at all: acceptance has no value, coverage and savings are 0."""
    d = line(fed([LoggedAnswer("p", [1, 2, 3], [4, 5, 6, 7])], ks=[2]), "ngram 5-5", 2)
    assert not d.acceptance.is_known
    assert d.coverage.value == 0
    assert d.tokens_per_pass.value == 1


def test_json_form_is_finite() -> None:
    """What is printed as JSON has no NaN in it."""
    told = to_json(fed([LoggedAnswer("p", [1], [2])]).estimates())
    json.dumps(told, allow_nan=False)


# --- the answers of a run -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Store, Corpus]]:
    """A run whose replay kept target-only answers that repeat their prompts."""
    corpus = load_corpus(sorted(package_dir("corpora").glob("*.jsonl"))).limited(2)
    tokenizer = open_tokenizer("packaged")
    with Store.open(tmp_path / "receipts.duckdb") as store:
        store.begin_run(Run("run", 0, 1, corpus.digest, "r", {}), wall_ns=0, clock_ns=0)
        batch = []
        for i, prompt in enumerate(corpus.prompts):
            ids = chat_ids(tokenizer, prompt)
            made = receipt(
                i,
                "target_only",
                stage="replay",
                phase="greedy" if i % 2 else "aa",
                prompt_id=f"{prompt.prompt_id}@r" if i == 1 else prompt.prompt_id,
                route="r",
                task=prompt.task,
                prompt_tokens=len(ids),
                finish_reason="stop",
            )
            batch.append((made, Answer(made.receipt_id, "", tuple(ids[:30]))))
        store.append_receipts(batch)
        yield store, corpus


def test_the_answers_of_a_run_are_its_greedy_and_sampled_target_only_ones(
    run: tuple[Store, Corpus],
) -> None:
    """With the prompts of the corpus as the server saw them; the A/A control is left out."""
    store, corpus = run
    found = list(run_answers(store, "run", corpus, open_tokenizer("packaged")))
    assert len(found) == len(corpus.prompts) // 2
    assert found[0].prompt_id == f"{corpus.prompts[1].prompt_id}@r"
    assert list(found[0].output) == found[0].prompt[:30]
    assert found[0].max_tokens == corpus.prompts[1].max_tokens
    with pytest.raises(UsageError, match="not in the corpus"):
        list(run_answers(store, "run", corpus.limited(1), open_tokenizer("packaged")))


def test_another_tokenizer_is_noticed(run: tuple[Store, Corpus]) -> None:
    """The server's own count of prompt tokens tells."""
    store, corpus = run

    class Other:
        def render_chat(self, messages: object) -> str:
            return "x"

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1, 2, 3]

    with pytest.raises(UsageError, match="has 3 tokens, the server counted"):
        list(run_answers(store, "run", corpus, Other()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"method": "ngram", "prompt_lookup_max": 3}, "ngram 3-3 at k = 4 gives "),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 8}, "suffix at k = 4 gives "),
        ({"method": "draft_model", "model": "packaged"}, None),
    ],
)
def test_a_rollout_of_lookup_drafting_is_estimated_before_any_load(
    run: tuple[Store, Corpus], speculation: dict[str, object], words: str | None
) -> None:
    """One sentence per route, with interval and n; without costs it says so."""
    store, corpus = run
    rollout = Rollout.model_validate(
        {
            "name": "x",
            "speculation": {**speculation, "num_speculative_tokens": 4},
            "routes": [{"name": "r", "tasks": ["*"]}],
        }
    )
    folder = EngineSettings().model_dir
    notes = scheduling_notes(store, "run", rollout, corpus, folder, {})
    if words is None:
        assert notes == []
        return
    (note,) = notes
    assert note.startswith(f"r: from target-only answers alone {words}")
    assert "n 9 prompts" in note
    assert note.endswith("the speed-up is not estimated, since no costs are calibrated")
