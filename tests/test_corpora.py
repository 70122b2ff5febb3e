"""The committed prompts: the generator makes them again, and their checks pass on its answers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from speccheck import corpus, grading
from speccheck.context import read_rollout
from speccheck.corpus import load_corpus
from speccheck.errors import UsageError
from speccheck.grading import checks
from speccheck.grading.structured import CONFIG_FORMATS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "corpora" / "make"))

import general  # noqa: E402
import make_corpus  # noqa: E402
import tasks  # noqa: E402

TOKENIZER = Tokenizer.from_file(str(make_corpus.TOKENIZER))
FAMILIES = list(tasks.TASKS)


def committed(task: str) -> list[dict]:
    lines = (ROOT / "corpora" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("task", FAMILIES)
def test_committed_prompts_are_what_the_generator_makes(task):
    """Whoever changes the generator must write the corpora (and train the pair) again."""
    assert committed(task) == make_corpus.corpus(task, TOKENIZER)


@pytest.mark.parametrize("task", FAMILIES)
def test_every_check_is_valid_and_passes_on_the_reference_answer(task):
    """A check that its own reference fails would count as a regression of every model."""
    for prompt, item in zip(committed(task), tasks.corpus_items(task), strict=True):
        grading.validate(prompt["check"])
        grade = grading.grade(prompt["check"], item.answer, code_execution="subprocess")
        assert grade.outcome == "pass", (prompt["id"], grade.reason)


@pytest.mark.parametrize("task", FAMILIES)
def test_checks_are_not_empty(task):
    """The answer to the next prompt fails the check of this one (prose is free, but has a topic).

    Two programs or queries may agree by chance on the test data: one of the twelve is let through.
    """
    items = tasks.corpus_items(task)[:12]
    wrong = 0
    for item, other in zip(items, items[1:] + items[:1], strict=True):
        grade = grading.grade(item.check, other.answer, code_execution="subprocess")
        wrong += grade.outcome == "pass"
    assert wrong <= 1


def test_reference_sql_results_are_never_empty():
    """An empty result would let any query pass that finds nothing."""
    import duckdb

    for item in tasks.corpus_items("sql"):
        with duckdb.connect() as connection:
            connection.execute(item.check["setup"])
            assert connection.execute(item.check["gold"]).fetchall(), item.answer


def test_each_family_has_its_route_and_enough_prompts():
    """Forty prompts are the least on which a route can be judged."""
    ids = Counter()
    for task in FAMILIES:
        prompts = committed(task)
        assert len(prompts) >= 40
        assert {p["route"] for p in prompts} == {make_corpus.ROUTES[task]}
        assert len({json.dumps(p["messages"]) for p in prompts}) == len(prompts)
        ids.update(p["id"] for p in prompts)
    assert set(ids.values()) == {1}


def test_the_corpora_load():
    """The product reads its own prompts without complaint."""
    prompts = load_corpus(sorted((ROOT / "corpora").glob("*.jsonl"))).prompts
    assert len(prompts) == len(FAMILIES) * tasks.CORPUS_SIZE


def test_all_kinds_bands_and_priorities_are_in_use():
    """The corpora exercise the whole grader and every cohort field."""
    prompts = [prompt for task in FAMILIES for prompt in committed(task)]
    kinds = {
        check["kind"] for p in prompts for check in [p["check"], *p["check"].get("checks", [])]
    }
    assert kinds >= {"exact", "json", "json_schema", "sql", "code", "citations", "regex", "format"}
    assert {p["output_band"] for p in prompts} == {"short", "medium", "long"}
    assert {p["priority"] for p in prompts} == {"normal", "protected"}


def test_reference_answers_fit_into_max_tokens():
    """A right answer is never cut off."""
    for task in FAMILIES:
        for prompt, item in zip(committed(task), tasks.corpus_items(task), strict=True):
            assert len(TOKENIZER.encode(item.answer).ids) < prompt["max_tokens"]


@pytest.mark.parametrize("task", general.FAMILIES)
def test_prompts_for_real_models(task):
    """Committed as generated; each check passes its reference and fails a wrong answer."""
    lines = (ROOT / "corpora" / "general" / f"{task}.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in lines.splitlines()] == general.corpus(task)
    asked = set()
    for item in general.items_of(task):
        asked.add(json.dumps([item.messages, item.follow_up]))
        answers = [(item.check, item.answer), *zip(item.follow_checks, item.follow_answers)]  # noqa: B905
        for check, answer in answers:
            grading.validate(check)
            assert grading.grade(check, answer).outcome == "pass", (answer, check)
            assert grading.grade(check, "").outcome == "fail", check
        assert grading.grade(item.check, item.wrong).outcome == "fail", (item.wrong, item.check)
    assert len(asked) == len(general.items_of(task)) >= 24


def test_prompts_for_real_models_are_asked_for_by_name(tmp_path):
    """`packaged` leaves them out, `packaged:general` has them all, a typo names what there is."""

    def ids(*paths):
        text = f"name: x\nspeculation: {{method: ngram, num_speculative_tokens: 2}}\ncorpus: {{paths: {list(paths)}}}\nroutes: [{{name: r, tasks: ['*']}}]\n"  # noqa: E501
        (tmp_path / "rollout.yaml").write_text(text)
        return {prompt.prompt_id for prompt in read_rollout(tmp_path / "rollout.yaml")[2].prompts}

    tasks_of = {name.rsplit("-", 1)[0] for name in ids("packaged:general")}
    assert tasks_of == set(general.FAMILIES)
    assert not ids("packaged") & ids("packaged:general")
    assert ids("packaged:refusal", "packaged:json") < ids("packaged", "packaged:general")
    with pytest.raises(UsageError, match=r"'jsn'; there are: code, config, dialogue"):
        ids("packaged:jsn")


def test_long_prompts_are_long_and_share_their_documents():
    """Four questions to a log are one cluster; the longest logs are of some thousand tokens."""
    prompts = general.corpus("long_context")
    groups = Counter(prompt["group"] for prompt in prompts)
    assert set(groups.values()) == {4}
    lengths = [len(prompt["messages"][1]["content"].split()) for prompt in prompts]
    assert max(lengths) > 3000


def test_loader_and_grader_know_the_same_checks():
    """A check that loads can be graded, with the same keys."""
    assert {kind: required | optional for kind, (required, optional) in corpus._CHECKS.items()} == {
        kind: set(keys) for kind, keys in checks._KEYS.items()
    }
    assert set(corpus._CONFIG_FORMATS) == set(CONFIG_FORMATS)


def test_every_field_and_check_is_written_down():
    """The corpora's README names each of them."""
    text = (ROOT / "corpora" / "README.md").read_text(encoding="utf-8")
    for name in (*corpus._REQUIRED, *corpus._OPTIONAL, *checks.KINDS):
        assert f"`{name}`" in text, name


def test_generator_depends_on_its_seed_only():
    """The same seed gives the same items, another seed gives others."""

    def draw(seed):
        rng = np.random.default_rng(seed)
        return [make(rng) for make in tasks.TASKS.values()]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize(
    "text",
    [
        "naïve café, 東京 🎉",
        "a\x00b\u2028c\u202e",
        "\n\n\t  two  \r\n",
        "<|user|> DROP TABLE x; --",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(text):
    """Bytes are tokens, so nothing a user sends is lost or replaced."""
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text
