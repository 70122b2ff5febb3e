"""Suffix drafting against its definition: occurrences counted by looking through all texts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck.suffix import SuffixDrafter, SuffixSettings

KS = (1, 2, 3, 5, 8)


class Counted:
    """The same rule without a tree. Texts are lists; every token has the time it was added at."""

    def __init__(self, rule: SuffixSettings) -> None:
        self.rule = rule
        self.texts: list[list[tuple[int, int]]] = []

    def occurrences(self, wanted: Sequence[int]) -> list[int]:
        """When each occurrence was complete."""
        n = len(wanted)
        return [
            text[i + n - 1][1]
            for text in self.texts
            for i in range(len(text) - n + 1)
            if [token for token, _ in text[i : i + n]] == list(wanted)
        ]

    def path(self, matched: list[int], most: int) -> tuple[float, list[int]]:
        score, probability = 0.0, 1.0
        drafted: list[int] = []
        vocabulary = sorted({token for text in self.texts for token, _ in text})
        while len(drafted) < most:
            known = [*matched, *drafted]
            if len(known) == self.rule.max_tree_depth:
                break
            times = {c: self.occurrences([*known, c]) for c in vocabulary}
            token = min(vocabulary, key=lambda c: (-len(times[c]), max(times[c], default=0)))
            if not times[token]:
                break
            probability *= len(times[token]) / len(self.occurrences(known))
            if probability < self.rule.min_token_prob:
                break
            score += probability
            drafted.append(token)
        return score, drafted

    def best(self, context: list[int], k: int) -> tuple[float, list[int]]:
        score, draft = 0.0, []
        context = context[-self.rule.max_tree_depth :]
        for m in range(1, len(context)):
            if not self.occurrences(context[-m:]):
                break
            cap = int(m * self.rule.max_spec_factor + 1e-6)
            found, tokens = self.path(context[-m:], min(k, cap))
            if found > score - 1e-12:
                score, draft = found, tokens
        return score, draft


def score_of(found: tuple[float, list[int]]) -> tuple[float, int]:
    return round(found[0], 9), len(found[1])


rules = st.builds(
    SuffixSettings,
    max_tree_depth=st.sampled_from([2, 3, 5, 8]),
    max_cached_requests=st.sampled_from([0, 10_000]),
    max_spec_factor=st.sampled_from([0.5, 1.0, 2.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.4]),
)
tokens = st.lists(st.integers(0, 2), max_size=10)


@settings(max_examples=40, deadline=None)
@given(rules, st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3))
def test_drafts_are_those_of_the_definition(
    rule: SuffixSettings, requests: list[tuple[list[int], list[int]]]
) -> None:
    """At every token of every request the draft is what counting occurrences gives."""
    drafter = SuffixDrafter(rule)
    shared = Counted(rule)
    time = 0
    for prompt, answer in requests:
        own = Counted(rule)
        own.texts.append([])
        shared.texts.append([])
        drafter.begin(prompt)
        for token in prompt:
            own.texts[0].append((token, time := time + 1))
        for t, token in enumerate(answer, start=1):
            drafter.append(token)
            own.texts[0].append((token, time := time + 1))
            shared.texts[-1].append((token, time))
            context = [*prompt, *answer[:t]]
            mine = [own.best(context, k) for k in KS]
            assert drafter.propose(KS, own_only=True) == [draft for _, draft in mine]
            if rule.max_cached_requests:
                others = [shared.best(context, k) for k in KS]
                mine = [b if b[0] > a[0] + 1e-12 else a for a, b in zip(mine, others, strict=True)]
            assert drafter.propose(KS) == [draft for _, draft in mine]


def test_a_worked_example() -> None:
    """After A B C and A B D the tokens C and D tie and the first stays; one more D, and D leads."""
    drafter = SuffixDrafter(SuffixSettings())
    drafter.begin([1, 2, 3, 1, 2, 4, 1])
    drafter.append(2)
    assert drafter.propose([1, 2]) == [[3], [3, 1]]
    for token in (4, 9, 1, 2):
        drafter.append(token)
    assert drafter.propose([1]) == [[4]]


def test_answers_of_other_requests_are_seen_and_forgotten() -> None:
    """A request drafts from the answer before it, until that is dropped from the cache."""
    drafter = SuffixDrafter(SuffixSettings(max_cached_requests=2))
    drafter.begin([])
    for token in (5, 6, 7, 8):
        drafter.append(token)
    drafter.begin([])
    for token in (5, 6):
        drafter.append(token)
    assert drafter.propose([4]) == [[7]]  # a match of one token allows a draft of one
    assert drafter.propose([4], own_only=True) == [[]]
    drafter.begin([])  # the third answer drops the first
    for token in (6, 7):
        drafter.append(token)
    assert drafter.propose([4]) == [[]]


def test_the_longest_draft_is_bounded_by_the_match() -> None:
    """max_spec_factor times the matched tokens is all that is drafted (vLLM's own limit)."""
    for factor, wanted in ((0.5, 2), (1.0, 4), (2.0, 8)):
        drafter = SuffixDrafter(SuffixSettings(max_spec_factor=factor))
        drafter.begin([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2])
        drafter.append(3)
        assert drafter.propose([8]) == [[4, 5, 6, 7, 8, 9, 0, 1][:wanted]]


def test_a_text_that_was_removed_leaves_no_trace() -> None:
    """With a cache of one answer every request drafts as if only itself and none other existed."""
    one = SuffixDrafter(SuffixSettings(max_cached_requests=1))
    none = SuffixDrafter(SuffixSettings(max_cached_requests=0))
    for answer in ([1, 2, 3, 1, 2, 3], [3, 1, 2, 3, 1], [1, 2, 1, 2, 3, 3, 1]):
        one.begin([])
        none.begin([])
        for token in answer:
            one.append(token)
            none.append(token)
            assert one.propose(KS) == none.propose(KS)
