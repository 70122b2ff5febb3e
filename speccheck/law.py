"""What decoding with a verifier does to tokens whose every probability is known.

A `Table` is a pair of made-up models small enough to know everything about; a `Decoding` runs a
verification algorithm of `verifier` on it, round by round. Three readings of the same loop:
`exact_law` sums over every way a run can go, `sample` draws a run per seed, `trace` writes one run
down. All three go through the pieces that `verify` draws from, so they agree with what serves.

Kept apart from `verifier`, since serving needs none of it: the engine cannot depend on its proof.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from speccheck.verifier import (
    Floats,
    Ids,
    Row,
    Site,
    Step,
    Stream,
    VerificationError,
    Verifier,
    draw,
    inverse_cdf,
    inverse_cdfs,
    norm,
    one_hot,
    uniforms,
)

# ---------------------------------------------------------------------------------------------
# Decoding on a table of known rows


@dataclass(frozen=True)
class Table:
    """A made-up pair of models small enough to know everything about."""

    name: str
    vocabulary: tuple[str, ...]
    """Token names; the id is the index."""
    horizon: int
    """Tokens of one run, H. A run drafts at most H - 1, so that no round is ever cut."""
    target: Mapping[tuple[int, int | None], Row]
    """p by (position 1..H, previous id); previous None is the row for any other previous token."""
    draft: Mapping[tuple[int, int | None], Row]
    """q by the same keys."""
    declared: tuple[int, float, float] | None = None
    """(runs, deviation allowed from exact, from control): tolerances its author declared."""

    def target_row(self, position: int, previous: int | None) -> Row:
        """The row p at a position (1..H) after a token."""
        return self.target[self._key(position, previous)]

    def draft_row(self, position: int, previous: int | None) -> Row:
        """The row q at a position (1..H) after a token."""
        return self.draft[self._key(position, previous)]

    def _key(self, position: int, previous: int | None) -> tuple[int, int | None]:
        return (position, previous) if (position, previous) in self.target else (position, None)

    def as_floats(self) -> "Table":
        """The same table in float64, for drawing."""
        target = {key: row.astype(np.float64) for key, row in self.target.items()}
        draft = {key: row.astype(np.float64) for key, row in self.draft.items()}
        return replace(self, target=target, draft=draft)


class Drafting:
    """How draft tokens are drawn from the draft row, and which row the verifier is told."""

    name = "probabilistic"

    def drawn(self, q: Row, position: int) -> Row:  # noqa: ARG002  the n-gram child looks at it
        """(V,) law the token at `position` is drawn from."""
        return q

    def claimed(self, q: Row, x: int) -> Row:  # noqa: ARG002  one-hot children look at it
        """(V,) draft row the verifier gets for the drawn x."""
        return q


class SampledOneHot(Drafting):
    """Drawn from the draft row, then taken as certain: acceptance falls to sum q p."""

    name = "sampled_one_hot"

    def claimed(self, q: Row, x: int) -> Row:
        """All mass on x."""
        return np.asarray(one_hot(np.array([x]), q)[0])


class GreedyDraft(SampledOneHot):
    """The argmax of the draft row, taken as certain: vLLM's default."""

    name = "greedy"

    def drawn(self, q: Row, position: int) -> Row:  # noqa: ARG002
        """All mass on argmax q."""
        return self.claimed(q, int(q.argmax()))


class NGramDraft(SampledOneHot):
    """A proposal that looks at neither model: the vocabulary in order, one id a position."""

    name = "ngram"

    def drawn(self, q: Row, position: int) -> Row:
        """All mass on the id position - 1, modulo V."""
        return self.claimed(q, (position - 1) % len(q))


DRAFT_SAMPLING: dict[str, Drafting] = {
    drafting.name: drafting
    for drafting in (Drafting(), GreedyDraft(), SampledOneHot(), NGramDraft())
}
"""How a table's drafts may be drawn, by name."""


class State(NamedTuple):
    """What the rest of a run depends on, between rounds."""

    n: int
    """Committed tokens."""
    previous: int | None
    """Id of the last one; None where the next row does not depend on it."""
    memory: Hashable = None
    """What a broken engine carries over from an earlier round; a right one carries nothing."""


class Decoding:
    """A decoding loop on a table, again as pieces that a wrong engine can override.

    At n committed tokens it drafts k = min(proposal length, H - n - 1) tokens, verifies k+1 rows
    in one target pass and commits tau+1 tokens.
    """

    def __init__(
        self,
        table: Table,
        verifier: Verifier,
        drafting: Drafting | None = None,
        proposal_length: int | None = None,
    ) -> None:
        """drafting: probabilistic if not given. proposal_length: H - 1 if not given."""
        self.table = table
        self.verifier = verifier
        self.drafting = Drafting() if drafting is None else drafting
        self.proposal_length = table.horizon - 1 if proposal_length is None else proposal_length

    def on(self, table: Table) -> "Decoding":
        """The same loop on another table, such as the one in floats."""
        return type(self)(table, self.verifier, self.drafting, self.proposal_length)

    def start(self) -> State:
        """Nothing committed."""
        return State(0, None)

    def length(self, state: State) -> int:
        """Proposal length of the next round."""
        return min(self.proposal_length, self.table.horizon - state.n - 1)

    def target_row(self, state: State, drafted: tuple[int, ...]) -> Row:
        """The row p after the committed prefix and `drafted`."""
        previous = drafted[-1] if drafted else state.previous
        return self.table.target_row(state.n + len(drafted) + 1, previous)

    def draft_row(self, state: State, drafted: tuple[int, ...]) -> Row:
        """The row q after the committed prefix and `drafted`."""
        previous = drafted[-1] if drafted else state.previous
        return self.table.draft_row(state.n + len(drafted) + 1, previous)

    def drawn_row(self, state: State, drafted: tuple[int, ...]) -> Row:
        """The law the draft token after `drafted` is drawn from."""
        q = self.draft_row(state, drafted)
        return self.drafting.drawn(q, state.n + len(drafted) + 1)

    def step(self, state: State, drafted: tuple[int, ...]) -> Step:
        """What the verifier gets to see of a drafted block.

        The q of the row after the block is handed over too: no right verifier looks at it.
        """
        prefixes = [drafted[:i] for i in range(len(drafted) + 1)]
        p = np.stack([self.target_row(state, prefix) for prefix in prefixes])
        q = [self.draft_row(state, prefix) for prefix in prefixes]
        claimed = [self.drafting.claimed(row, x) for row, x in zip(q, drafted, strict=False)]
        return Step(p, np.stack([*claimed, q[-1]]), np.array(drafted, dtype=np.int64))

    def tail(self, step: Step, tau: int) -> list[Row]:
        """Laws of the tokens committed after x[:tau]: one row, the verifier's."""
        return [self.verifier.final(step, tau)]

    def commit(
        self, state: State, drafted: tuple[int, ...], tau: int, tail: tuple[int, ...]
    ) -> tuple[tuple[int, ...], State]:
        """(tokens committed by the round, state after it)."""
        tokens = drafted[:tau] + tail
        if not tokens:
            return tokens, state
        n = state.n + len(tokens)
        return tokens, State(n, tokens[-1] if self.distinguishes(n + 1, tokens[-1]) else None)

    def distinguishes(self, position: int, previous: int) -> bool:
        """Whether the next row depends on the last token; if not, its states are one state."""
        return (position, previous) in self.table.target

    def stream(self, site: Site, k: int) -> Stream:
        """Which stream of uniforms a site reads when runs are drawn from seeds."""
        kind, i = site
        if kind == "final":
            return Stream.RESIDUAL if i < k else Stream.BONUS
        return Stream.DRAFT if kind == "draft" else Stream.ACCEPT


class Control(Decoding):
    """The target-only control: the same loop with k = 0, on a stream of its own."""

    def length(self, state: State) -> int:  # noqa: ARG002
        """0: nothing is drafted."""
        return 0

    def stream(self, site: Site, k: int) -> Stream:  # noqa: ARG002
        """CONTROL."""
        return Stream.CONTROL


# ---------------------------------------------------------------------------------------------
# The exact law


Cells = Mapping[Site, tuple[Any, Any]]
"""What is known of the uniforms used so far: each lies in [low, high)."""
Edges = Sequence[tuple[Any, Any, Any, Any]]
"""A partition of [0, 1) without empty parts: (outcome, low, high, high - low)."""


def _split(cells: Cells, site: Site, edges: Edges) -> Iterator[tuple[Any, Any, Cells]]:
    """(outcome, conditional probability, what is known then) of a decision on one uniform.

    A uniform that was used before is not uniform any more; keeping its interval makes the law of
    a verifier that uses one twice exact too.
    """
    if site not in cells:
        for outcome, low, high, mass in edges:
            yield outcome, mass, {**cells, site: (low, high)}
        return
    a, b = cells[site]
    for outcome, low, high, _ in edges:
        lo, hi = max(a, low), min(b, high)
        if lo < hi:
            yield outcome, (hi - lo) / (b - a + Fraction(0)), {**cells, site: (lo, hi)}


def _cdf(row: Row) -> Edges:
    edges: list[tuple[Any, Any, Any, Any]] = []
    low: Any = Fraction(0)
    for token, mass in enumerate(row):
        if mass:
            high = low + mass
            edges.append((token, low, high, mass))
            low = high
    return edges


def _test(low: Any, high: Any) -> Edges:
    """What a uniform decides that passes a test from `low` to `high`."""
    zero, one = Fraction(0), Fraction(1)
    parts = ((False, zero, low), (True, low, high), (False, high, one))
    return [(passed, a, b, b - a) for passed, a, b in parts if a < b]


def _add(law: dict[Any, Any], key: Any, mass: Any) -> None:
    """Add to a sum of exact numbers; starting it at 0 would cost one more sum of fractions."""
    law[key] = law[key] + mass if key in law else mass


def _drafts(
    decoding: Decoding, state: State, drafted: tuple[int, ...], weight: Any, cells: Cells
) -> Iterator[tuple[tuple[int, ...], Any, Cells]]:
    """(block, probability, cells) of every block that can be drafted after `drafted`."""
    i = len(drafted)
    if i == decoding.length(state):
        yield drafted, weight, cells
        return
    row = decoding.drawn_row(state, drafted)
    for token, mass, known in _split(cells, ("draft", i), _cdf(row)):
        yield from _drafts(decoding, state, (*drafted, token), weight * mass, known)


def _tests(
    verifier: Verifier,
    windows: Sequence[tuple[Site, Edges]],
    passed: list[bool],
    weight: Any,
    cells: Cells,
) -> Iterator[tuple[list[bool], Any, Cells]]:
    """(tests passed, probability, cells) of every way the tests of a block can go."""
    i = len(passed)
    if i == len(windows) or (passed and not passed[-1] and verifier.stops_at_first_rejection):
        yield passed, weight, cells
        return
    for ok, mass, known in _split(cells, *windows[i]):
        yield from _tests(verifier, windows, [*passed, ok], weight * mass, known)


def _tails(
    laws: Sequence[tuple[Site, Edges]], tokens: tuple[int, ...], weight: Any, cells: Cells
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(tokens, probability) of the tokens after the accepted ones."""
    i = len(tokens)
    if i == len(laws):
        yield tokens, weight
        return
    for token, mass, known in _split(cells, *laws[i]):
        yield from _tails(laws, (*tokens, token), weight * mass, known)


def blocks(decoding: Decoding, state: State) -> list[tuple[tuple[int, ...], Any]]:
    """(block, probability) of everything that can be drafted from `state`."""
    return [(drafted, w) for drafted, w, _ in _drafts(decoding, state, (), Fraction(1), {})]


Round = dict[tuple[tuple[int, ...], int, State], Any]
"""Probability by (committed tokens, tau, state after)."""


def _tail_laws(decoding: Decoding, step: Step, tau: int) -> list[tuple[Site, Row]]:
    """(uniform, law) of each token committed after x[:tau]."""
    rows = decoding.tail(step, tau)
    first = decoding.verifier.final_sites(step.k)[tau]
    return [(first if j == 0 else ("final", tau + j), row) for j, row in enumerate(rows)]


def round_law(decoding: Decoding, state: State) -> Round:
    """Round(c, k): the exact law of one round from `state`. Its values sum to 1."""
    verifier, k = decoding.verifier, decoding.length(state)
    law: Round = {}
    for drafted, p_draft, drawn in _drafts(decoding, state, (), Fraction(1), {}):
        step = decoding.step(state, drafted)
        windows = [
            (site, _test(low, high))
            for site, low, high in zip(verifier.test_sites(k), *verifier.window(step), strict=True)
        ]
        tails: dict[int, list[tuple[Site, Edges]]] = {}
        ways: dict[tuple[int, tuple[tuple[Site, Any], ...]], Any] = {}
        for passed, p_tests, tested in _tests(verifier, windows, [], p_draft, drawn):
            tau = verifier.accepted(passed)
            if tau not in tails:
                tails[tau] = [(u, _cdf(row)) for u, row in _tail_laws(decoding, step, tau)]
            known = tuple((site, tested[site]) for site, _ in tails[tau] if site in tested)
            _add(ways, (tau, known), p_tests)
        for (tau, known), p_tau in ways.items():
            for tail, p_tail in _tails(tails[tau], (), p_tau, dict(known)):
                tokens, after = decoding.commit(state, drafted, tau, tail)
                _add(law, (tokens, tau, after), p_tail)
    return law


@dataclass(frozen=True)
class ExactLaw:
    """What a decoding loop does to a table, without sampling error."""

    sequences: Mapping[tuple[int, ...], Any]
    """Probability of every committed sequence of H tokens that can occur."""
    passes: Any
    """Expected target passes of a run."""
    passes_law: Mapping[int, Any]
    """Probability of each number of passes; empty if a round can commit nothing."""
    drafted: Any
    """Expected drafted tokens of a run."""
    accepted: Any
    """Expected accepted tokens of a run."""
    first_tau: tuple[Any, ...]
    """Probability of tau = 0..k in the first round."""
    starts: Mapping[int, tuple[Any, Any]]
    """By position: (expected rounds with drafts that start there, P(first draft accepted))."""


def exact_law(decoding: Decoding) -> ExactLaw:
    """The law of whole runs, by dynamic programming over committed prefixes.

    With a table of `Fraction` every number is exact, so losslessness is
    `exact_law(d).sequences == target_law(table)` with no tolerance.

    A round that commits nothing (only a wrong engine has one) comes back to the state it started
    from with probability s; such a state is visited 1/(1 - s) times.
    """
    rounds: dict[State, Round] = {}
    stuck: dict[State, Any] = {}
    layers: list[dict[tuple[tuple[int, ...], State], Any]] = [
        {} for _ in range(decoding.table.horizon + 1)
    ]
    layers[0][(), decoding.start()] = Fraction(1)
    passes = drafted = accepted = 0
    starts: dict[int, list[Any]] = defaultdict(lambda: [0, 0])
    for layer in layers[:-1]:
        visits: dict[State, Any] = {}
        for (prefix, state), mass in layer.items():
            if state not in rounds:
                rounds[state] = law = round_law(decoding, state)
                stuck[state] = sum(w for (tokens, _, _), w in law.items() if not tokens)
            n_visits = mass / (1 - stuck[state]) if stuck[state] else mass
            _add(visits, state, n_visits)
            for (tokens, _, after), w in rounds[state].items():
                if tokens:
                    longer = (*prefix, *tokens)
                    _add(layers[len(longer)], (longer, after), n_visits * w)
        for state, mass in visits.items():
            k = decoding.length(state)
            taus = _tau_law(rounds[state], k)
            passes += mass
            drafted += mass * k
            accepted += mass * sum(tau * w for tau, w in enumerate(taus))
            if k:
                starts[state.n + 1][0] += mass
                starts[state.n + 1][1] += mass * (1 - taus[0])
    sequences: dict[tuple[int, ...], Any] = {}
    for (sequence, _), mass in layers[-1].items():
        _add(sequences, sequence, mass)
    first = decoding.start()
    return ExactLaw(
        sequences=sequences,
        passes=passes,
        passes_law=_passes_law(rounds, first, decoding.table.horizon),
        drafted=drafted,
        accepted=accepted,
        first_tau=_tau_law(rounds[first], decoding.length(first)),
        starts={n: (mass, hits / mass) for n, (mass, hits) in sorted(starts.items())},
    )


def _tau_law(law: Round, k: int) -> tuple[Any, ...]:
    """P(tau = 0..k) of a round."""
    by_tau: list[list[Any]] = [[] for _ in range(k + 1)]
    for (_, tau, _), w in law.items():
        by_tau[tau].append(w)
    return tuple(sum(weights) for weights in by_tau)


def _passes_law(rounds: Mapping[State, Round], start: State, horizon: int) -> dict[int, Any]:
    now: dict[State, Any] = {start: Fraction(1)}
    law: dict[int, Any] = {}
    n_passes = 0
    while now:
        n_passes += 1
        following: dict[State, Any] = {}
        for state, mass in now.items():
            for (tokens, _, after), w in rounds[state].items():
                if not tokens:
                    return {}
                _add(following, after, mass * w)
        done = sum(mass for state, mass in following.items() if state.n >= horizon)
        if done:
            law[n_passes] = done
        now = {state: mass for state, mass in following.items() if state.n < horizon}
    return law


def target_law(table: Table) -> dict[tuple[int, ...], Any]:
    """Probability of every sequence of H tokens under the target alone, those of mass 0 left out.

    The reference, so it knows nothing of rounds: the product of the rows.
    """
    law: dict[tuple[int, ...], Any] = {(): 1}
    for position in range(1, table.horizon + 1):
        law = {
            (*prefix, token): mass * p
            for prefix, mass in law.items()
            for token, p in enumerate(table.target_row(position, prefix[-1] if prefix else None))
            if p
        }
    return law


def total_variation(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Any:
    """TV(a, b) = sum |a - b| / 2 of two laws given as probability by outcome."""
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in a.keys() | b.keys()) / 2


def marginals(sequences: Mapping[tuple[int, ...], Any], n_tokens: int) -> list[list[Any]]:
    """[position][token] marginal probabilities of a law over sequences."""
    horizon = len(next(iter(sequences)))
    table: list[list[Any]] = [[0] * n_tokens for _ in range(horizon)]
    for sequence, mass in sequences.items():
        for position, token in enumerate(sequence):
            table[position][token] += mass
    return table


# ---------------------------------------------------------------------------------------------
# Many runs, drawn from enumerated seeds


@dataclass(frozen=True)
class Runs:
    """N runs of H tokens, one per seed."""

    tokens: Ids
    """(N, H) committed ids."""
    passes: Ids
    """(N,) target passes."""
    drafted: Ids
    """(N,) drafted tokens."""
    accepted: Ids
    """(N,) accepted tokens."""
    first_tau: Ids
    """(N,) tau of the first round."""
    starts: Mapping[int, tuple[int, int]]
    """By position: (rounds with drafts that started there, those whose first draft stood)."""


def sample(decoding: Decoding, seeds: npt.NDArray[Any]) -> Runs:
    """Draw one run per seed, (N,) integers, through the same pieces as `verify` and `exact_law`.

    Runs that are in the same state with the same drafts are tested together, so the cost is that
    of the distinct situations and not of the runs.
    """
    decoding = decoding.on(decoding.table.as_floats())
    verifier, horizon = decoding.verifier, decoding.table.horizon
    n_runs = len(seeds)
    tokens = np.full((n_runs, horizon), -1)
    passes, drafted, accepted, first_tau = (np.zeros(n_runs, dtype=np.int64) for _ in range(4))
    starts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    steps: dict[tuple[State, tuple[int, ...]], tuple[Step, Row, Row]] = {}
    tails: dict[tuple[State, tuple[int, ...], int], list[tuple[Site, Row]]] = {}
    taus_of = [_taus(verifier, k) for k in range(horizon)]
    waiting: dict[State, Ids] = {decoding.start(): np.arange(n_runs)}
    round_ = 0
    while waiting:
        u = _Chance(decoding, seeds, round_)
        following: dict[State, list[Ids]] = defaultdict(list)
        for state, members in waiting.items():
            k = decoding.length(state)
            for block, runs in _draw_drafts(decoding, state, (), members, u):
                if (state, block) not in steps:
                    step = decoding.step(state, block)
                    steps[state, block] = (step, *verifier.window(step))
                step, low, high = steps[state, block]
                pattern = np.zeros(len(runs), dtype=np.int64)
                for i, site in enumerate(verifier.test_sites(k)):
                    v = u(site, state, runs)
                    pattern += ((low[i] <= v) & (v < high[i])) << i
                taus = taus_of[k][pattern]
                passes[runs] += 1
                drafted[runs] += k
                accepted[runs] += taus
                if round_ == 0:
                    first_tau[runs] = taus
                if k:
                    starts[state.n + 1][0] += len(runs)
                    starts[state.n + 1][1] += int((taus > 0).sum())
                for tau, same_tau in _by_value(taus, runs):
                    if (state, block, tau) not in tails:
                        tails[state, block, tau] = _tail_laws(decoding, step, tau)
                    laws = tails[state, block, tau]
                    for tail, group in _draw_tails(laws, state, same_tau, u):
                        committed, after = decoding.commit(state, block, tau, tail)
                        tokens[group, state.n : state.n + len(committed)] = committed
                        if after.n < horizon:
                            following[after].append(group)
        waiting = {state: np.concatenate(groups) for state, groups in following.items()}
        round_ += 1
    return Runs(
        tokens,
        passes,
        drafted,
        accepted,
        first_tau,
        {position: (n, hits) for position, (n, hits) in sorted(starts.items())},
    )


class _Chance:
    """The uniforms of one round of all runs; each array is made once, when it is first read."""

    def __init__(self, decoding: Decoding, seeds: npt.NDArray[Any], round_: int) -> None:
        self.decoding, self.seeds, self.round = decoding, seeds, round_
        self.made: dict[tuple[Stream, int], Floats] = {}

    def __call__(self, site: Site, state: State, runs: Ids) -> Floats:
        """(len(runs),) uniforms of `runs` at a site of the round that starts in `state`."""
        stream = self.decoding.stream(site, self.decoding.length(state))
        position = state.n + 1 + site[1]
        if (stream, position) not in self.made:
            self.made[stream, position] = uniforms(self.seeds, stream, self.round, position)
        return np.asarray(self.made[stream, position][runs])


def _by_value(values: Ids, runs: Ids) -> Iterator[tuple[int, Ids]]:
    """(value, the runs that have it)."""
    for value in np.flatnonzero(np.bincount(values)):
        yield int(value), runs[values == value]


def _draw_drafts(
    decoding: Decoding, state: State, drafted: tuple[int, ...], runs: Ids, u: _Chance
) -> Iterator[tuple[tuple[int, ...], Ids]]:
    """(drafted block, the runs that drew it)."""
    i = len(drafted)
    if i == decoding.length(state):
        yield drafted, runs
        return
    drawn = inverse_cdfs(decoding.drawn_row(state, drafted), u(("draft", i), state, runs))
    for token, group in _by_value(drawn, runs):
        yield from _draw_drafts(decoding, state, (*drafted, token), group, u)


def _draw_tails(
    laws: Sequence[tuple[Site, Row]], state: State, runs: Ids, u: _Chance
) -> Iterator[tuple[tuple[int, ...], Ids]]:
    """(tokens after the accepted ones, the runs that drew them)."""
    if not laws:
        yield (), runs
        return
    site, law = laws[0]
    for token, group in _by_value(inverse_cdfs(law, u(site, state, runs)), runs):
        for tokens, same in _draw_tails(laws[1:], state, group, u):
            yield (token, *tokens), same


def _taus(verifier: Verifier, k: int) -> Ids:
    """Accepted length by pattern of passed tests, test i as bit i."""
    patterns = ([bool(bits >> i & 1) for i in range(k)] for bits in range(2**k))
    return np.array([verifier.accepted(passed) for passed in patterns])


# ---------------------------------------------------------------------------------------------
# One run, written down


def trace(decoding: Decoding, u: Callable[[Stream, int, int], float]) -> list[dict[str, Any]]:
    """One run as JSON-ready records, one a round, checked by `check_trace`.

    u(stream, round, position) gives the uniforms: `uniform` with a seed bound, or a worked
    example's own numbers. Tokens are given by name, positions count from 1.
    """
    decoding = decoding.on(decoding.table.as_floats())
    state = decoding.start()
    prefix: list[int] = []
    rounds: list[dict[str, Any]] = []
    while state.n < decoding.table.horizon:
        record, state = _trace_round(decoding, state, prefix, len(rounds), u)
        rounds.append(record)
    check_trace(rounds)
    return rounds


def _trace_round(
    decoding: Decoding,
    state: State,
    prefix: list[int],
    round_: int,
    u: Callable[[Stream, int, int], float],
) -> tuple[dict[str, Any], State]:
    table, verifier, k = decoding.table, decoding.verifier, decoding.length(state)
    names = table.vocabulary

    def chance(site: Site) -> float:
        return u(decoding.stream(site, k), round_, state.n + 1 + site[1])

    drafted: tuple[int, ...] = ()
    for i in range(k):
        row = decoding.drawn_row(state, drafted)
        drafted = (*drafted, inverse_cdf(row, chance(("draft", i))))
    step = decoding.step(state, drafted)
    passed, tau, _ = draw(verifier, step, chance)
    laws = _tail_laws(decoding, step, tau)
    tail = tuple(inverse_cdf(law, chance(site)) for site, law in laws)
    tokens, after = decoding.commit(state, drafted, tau, tail)
    compared = verifier.compared(step)
    low, high = verifier.window(step)
    record: dict[str, Any] = {
        "round": round_,
        "base_position": state.n + 1,
        "prefix": [names[t] for t in prefix],
        "draft": [
            {
                "pos": state.n + 1 + i,
                "token": names[x],
                "q": float(decoding.drawn_row(state, drafted[:i])[x]),
                "u_draft": chance(("draft", i)),
            }
            for i, x in enumerate(drafted)
        ],
        "verify": [
            {
                "pos": state.n + 1 + i,
                "token": names[x],
                "p": float(compared.p[i][x]),
                "q": float(compared.q[i][x]),
                "ratio": float(compared.p[i][x] / compared.q[i][x]) if compared.q[i][x] else None,
                "accept_prob": float(high[i] - low[i]),
                "window": [float(low[i]), float(high[i])],
                "u": chance(site),
                "test": "passed" if ok else "failed",
                "outcome": "accepted" if i < tau else "rejected" if i == tau else None,
            }
            for i, (x, ok, site) in enumerate(
                zip(drafted, passed, verifier.test_sites(k), strict=False)
            )
        ],
        "discarded": [
            {
                "pos": state.n + 1 + i,
                "token": names[drafted[i]],
                "reason": f"drafted after {names[drafted[tau]]}, which was rejected",
            }
            for i in range(tau + 1, k)
        ],
        "committed": [names[t] for t in tokens],
        "counters": {
            "target_passes": 1,
            "drafted": k,
            "accepted": tau,
            "rejected": int(tau < k),
            "bonus": int(tau == k),
            "discarded": max(0, k - tau - 1),
        },
    }
    if tail:
        site, law = laws[0]
        last = {"pos": state.n + 1 + tau, "token": names[tail[0]], "u": chance(site)}
        if tau < k:
            weights = verifier.residual(step, tau)
            weighted = verifier.path_weights(step)[tau] * compared.p[tau]
            last |= {
                "residual": {
                    name: float(w) for name, w in zip(names, norm(weights, law), strict=True) if w
                },
                "residual_mass": float(weights.sum()),
                "overlap": float(np.minimum(weighted, compared.q[tau]).sum()),
                "path_weight": float(verifier.path_weights(step)[tau]),
            }
        record["correction" if tau < k else "bonus"] = last
    prefix.extend(tokens)
    return record, after


def check_trace(rounds: Sequence[Mapping[str, Any]]) -> None:
    """Raise VerificationError at the first invariant of verification that a trace breaks.

    Wrong shortcuts mostly break one of them in a single readable run; the exact law is the proof.
    """
    prefix: list[str] = []
    for record in rounds:
        counters, where = record["counters"], f"round {record['round']}"
        tau, committed = counters["accepted"], record["committed"]
        _hold(where, record["prefix"] == prefix, "the prefix is what earlier rounds committed")
        _hold(
            where,
            record["base_position"] == len(prefix) + 1,
            "the round starts at the position after the committed prefix",
        )
        _hold(where, len(committed) == tau + 1, "a round commits accepted + 1 tokens")
        _hold(
            where,
            committed[:tau] == [d["token"] for d in record["draft"][:tau]],
            "the accepted tokens are the first drafted ones",
        )
        _hold(
            where,
            all(v["outcome"] is None for v in record["verify"][tau + 1 :]),
            "no drafted token after the first rejection has an outcome",
        )
        _hold(
            where,
            counters["drafted"]
            == tau + counters["rejected"] + counters["discarded"]
            == len(record["draft"]),
            "every drafted token is accepted, rejected or discarded",
        )
        if "correction" in record:
            correction, rejected = record["correction"], record["verify"][tau]
            _hold(
                where,
                abs(correction["residual_mass"] - correction["path_weight"] + correction["overlap"])
                < 1e-9,
                "the residual mass is 1 - sum min(p, q)",
            )
            _hold(
                where,
                correction["token"] in correction["residual"],
                "the correction comes from the residual",
            )
            _hold(
                where,
                correction["token"] != rejected["token"],
                "the correction is not the rejected token",
            )
        prefix += committed
    passes = sum(record["counters"]["target_passes"] for record in rounds)
    accepted = sum(record["counters"]["accepted"] for record in rounds)
    _hold("run", passes + accepted == len(prefix), "passes + accepted = tokens")


def _hold(where: str, holds: object, invariant: str) -> None:
    if not holds:
        raise VerificationError(f"{where} breaks an invariant of verification: {invariant}")
