"""Suffix decoding's drafts: the likeliest continuation of the text's end, by counted occurrences.

The rule of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), as vLLM's method `suffix` runs it
on Arctic Inference: the last m tokens are looked up in two texts, the request's own (prompt and
answer so far) and the answers of earlier requests. The draft follows the most frequent next token
from there, as long as its estimated probability (count over count) stays at or above a floor, for
at most `max_spec_factor * m` tokens. Of all m, and of both texts, the draft with the largest sum of
probabilities is taken; a tie goes to the longer m, and to the request's own text.

Occurrences are counted in a suffix tree whose nodes are runs of tokens, grown one token at a time:
memory is linear in the text, and a token costs one step for each suffix that has occurred before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_ROUNDING = 1e-6


@dataclass(frozen=True)
class SuffixSettings:
    """vLLM's `suffix_decoding_*` fields, with its defaults.

    `max_cached_requests` answers are kept for other requests, the oldest is dropped first; with 0
    a request sees its own text only.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class _Node:
    """A run of tokens of one text, and how many suffixes pass through it or end at its end.

    The run is `text[start:limit]`, as far as the text goes: the run of a suffix that occurred once
    grows with its text, untouched.
    """

    __slots__ = ("best", "children", "count", "limit", "parent", "start", "text")

    def __init__(
        self, count: int, text: list[int], start: int, limit: int, parent: _Node | None
    ) -> None:
        self.count = count
        self.text = text
        self.start = start
        self.limit = limit
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.best: _Node | None = None
        """The child with the highest count; a tie goes to the one that reached it first."""

    def __len__(self) -> int:
        return min(self.limit, len(self.text)) - self.start


class Growing(NamedTuple):
    """A text in the tree, and the ends of its suffixes that occurred before, longest first."""

    tokens: list[int]
    ends: list[_Node]


class Path(NamedTuple):
    """A continuation: its tokens, and the running sum of their probabilities."""

    tokens: list[int]
    scores: list[float]


class SuffixTree:
    """All substrings up to `max_tree_depth` tokens of some texts, with how often each occurs.

    One text grows at a time: `begin` ends the one before.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self._depth = settings.max_tree_depth
        self._floor = settings.min_token_prob
        self._caps = [int(m * settings.max_spec_factor + _ROUNDING) for m in range(self._depth + 1)]
        """Longest draft for each match length."""
        self._root = _Node(0, [], 0, 0, None)

    def begin(self) -> Growing:
        """A new, empty text."""
        return Growing([], [])

    def append(self, grown: Growing, token: int) -> None:
        """Add a token to the text that was begun last."""
        text, ends = grown
        at = len(text)
        text.append(token)
        ends.append(self._root)
        if len(ends) > self._depth:
            del ends[0]
        first = at + 1 - len(ends)
        kept = []
        for start, node in enumerate(ends, first):
            child = node.children.get(token)
            if child is not None:
                kept.append(self._enter(node, child, text, at))
                continue
            # This suffix occurs for the first time; so did all that are longer.
            leaf = _Node(1, text, at, start + self._depth, node)
            node.children[token] = leaf
            if node.best is None:
                node.best = leaf
        ends[:] = kept

    def _enter(self, node: _Node, child: _Node, text: list[int], at: int) -> _Node:
        """Move a suffix that ends at `node` on into `child` by the token text[at]."""
        alone = node is not self._root and node.count == child.count + 1
        if alone:  # whatever passes through the node goes on to the child: the border moves
            length = len(node)
            node.text, node.start, node.limit = text, at - length, at + 1
            if len(child) > 1:
                child.start += 1
                node.children = {child.text[child.start]: child}
                return node
            child.count += 1
            child.text, child.start, child.limit = text, at - length, at + 1
            parent = child.parent = node.parent
            if parent is not None:
                parent.children[text[child.start]] = child
                if parent.best is node:
                    parent.best = child
            return child
        if len(child) == 1:
            child.count += 1
            entered = child
        else:
            entered = _Node(child.count + 1, text, at, at + 1, node)
            child.start += 1
            child.parent = entered
            entered.children[child.text[child.start]] = entered.best = child
            node.children[text[at]] = entered
        best = node.best
        if best is None or best is child or entered.count > best.count:
            node.best = entered
        return entered

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget a whole text that was added and is not growing."""
        for start in range(len(tokens)):
            node, at = self._root, start
            while at < len(tokens):
                child = node.children.get(tokens[at])
                if child is None:
                    break  # gone already, with all that was below it
                child.count -= 1
                if not child.count:
                    del node.children[tokens[at]]
                if node.best is child and node is not self._root:  # no draft starts at the root
                    node.best = max(node.children.values(), key=lambda n: n.count, default=None)
                if not child.count:
                    break
                node, at = child, at + len(child)

    def paths(self, grown: Growing, before: Sequence[int], most: int) -> Iterator[Path]:
        """Continuations of the text's end, for growing match lengths that can win.

        `before` are the tokens in front of the text (a prompt that the tree does not hold), which
        matches may reach into. `most` is the longest draft wanted.
        """
        ends, caps = grown.ends, self._caps
        longest = min(len(grown.tokens) + len(before), self._depth) - 1
        known = min(len(ends), longest)
        for m in range(1, known + 1):
            node = ends[-m]
            if (
                m < known
                and ends[-m - 1].count == node.count
                and m + 1 + min(most, caps[m + 1]) <= self._depth
            ):
                continue  # the same occurrences, found with one token more
            yield self._path(node, len(node), min(most, caps[m]))
        if before and len(ends) == len(grown.tokens):
            context = [*before[-self._depth :], *grown.tokens]
            for m in range(known + 1, longest + 1):
                found = self._find(context[-m:])
                if found is None:
                    return
                yield self._path(*found, min(most, caps[m]))

    def _find(self, pattern: Sequence[int]) -> tuple[_Node, int] | None:
        """Where a pattern ends: node, and how many of its tokens belong to the pattern."""
        node, used, length = self._root, 0, 0
        for token in pattern:
            if used < length:
                if node.text[node.start + used] != token:
                    return None
            else:
                child = node.children.get(token)
                if child is None:
                    return None
                node, used, length = child, 0, len(child)
            used += 1
        return node, used

    def _path(self, node: _Node, used: int, most: int) -> Path:
        tokens: list[int] = []
        scores: list[float] = []
        probability, score = 1.0, 0.0
        length = len(node)
        while len(tokens) < most and probability >= self._floor:
            if used < length:
                tokens.append(node.text[node.start + used])
                score += probability
                scores.append(score)
                used += 1
                continue
            child = node.best
            if child is None:
                break
            probability *= child.count / node.count
            node, used, length = child, 0, len(child)
        return Path(tokens, scores)


@dataclass
class SuffixDrafter:
    """Drafts for requests that are answered one after the other, as at concurrency 1."""

    settings: SuffixSettings = field(default_factory=SuffixSettings)

    def __post_init__(self) -> None:
        self._answers = SuffixTree(self.settings)
        self._cached: OrderedDict[int, list[int]] = OrderedDict()
        self._n_begun = 0
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request: its prompt is seen by itself only."""
        self._prompt = prompt
        self._own = SuffixTree(self.settings)
        self._text = self._own.begin()
        for token in prompt:
            self._own.append(self._text, token)
        self._answer = self._answers.begin()
        if self.settings.max_cached_requests > 0:
            self._cached[self._n_begun] = self._answer.tokens
            self._n_begun += 1
            if len(self._cached) > self.settings.max_cached_requests:
                self._answers.remove(self._cached.popitem(last=False)[1])

    def append(self, token: int) -> None:
        """The request's answer goes on."""
        self._own.append(self._text, token)
        if self.settings.max_cached_requests > 0:
            self._answers.append(self._answer, token)

    def propose(self, ks: Sequence[int], *, own_only: bool = False) -> list[list[int]]:
        """The draft at each proposal length in `ks`; `own_only` looks at this request's text."""
        most = max(ks)
        best = _best(self._own.paths(self._text, (), most), ks)
        if not own_only and self.settings.max_cached_requests > 0:
            shared = self._answers.paths(self._answer, self._prompt, most)
            best = [
                other if other[0] > own[0] else own
                for own, other in zip(best, _best(shared, ks), strict=True)
            ]
        return [tokens for _, tokens in best]


def _best(paths: Iterator[Path], ks: Sequence[int]) -> list[tuple[float, list[int]]]:
    """(score, draft) per proposal length; of equal scores the last stands."""
    scores = [0.0] * len(ks)
    chosen: list[tuple[list[int], int]] = [([], 0)] * len(ks)
    for tokens, running in paths:
        if tokens:
            n = len(tokens)
            for i, k in enumerate(ks):
                score = running[k - 1] if k < n else running[-1]
                if score >= scores[i]:
                    scores[i], chosen[i] = score, (tokens, k)
    return [(score, tokens[:n]) for score, (tokens, n) in zip(scores, chosen, strict=True)]
