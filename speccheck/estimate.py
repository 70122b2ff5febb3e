"""What lookup drafting would do, from target-only answers alone: no server, no load.

Prompt lookup and suffix drafting propose one certain token per position. Against such a draft the
verifier accepts with the target's own probability of that token, which is the chance that the
target, sampling by itself, produces it (STATS.md 1.4: one-hot treatment and sampler match have one
law). So a logged answer *is* a draw of what verification would have accepted: replay the drafter
over it, count how far each draft agrees, go on after the first token that differs. At temperature 0
that repeats the rounds of a server exactly; above it is an unbiased draw of them. It does not hold
for drafts with a distribution of their own (a draft model that is sampled from).

What happens at the end of an answer is not in a log: drafted tokens beyond it are counted apart.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from speccheck import stats
from speccheck.config import Rollout
from speccheck.corpus import Corpus
from speccheck.engine.drafters import NgramIndex
from speccheck.errors import UsageError
from speccheck.logs import LoggedAnswer, chat_ids, open_tokenizer
from speccheck.measure import ALPHA
from speccheck.records import Arm, Estimate, Outcome, Stage, temperature_band
from speccheck.speed import Costs
from speccheck.store import Store
from speccheck.suffix import SuffixDrafter, SuffixSettings
from speccheck.sweep.calibration import TOGETHER, Calibration

if TYPE_CHECKING:
    from speccheck.engine.text import Tokenizer

KS = tuple(range(1, 9))
OWN_TEXT = "suffix own text"
"""Suffix drafting that sees no other request's answer: what a cold cache gives."""

_FIXED = 3
_ACCEPTED, _UNKNOWN, _PASSES = range(_FIXED)


class Text(Protocol):
    """What follows an answer, token by token."""

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request."""

    def append(self, token: int) -> None:
        """Its answer goes on."""


@dataclass(frozen=True)
class Method:
    """A way of drafting: its name, and its draft at each of some proposal lengths."""

    name: str
    propose: Callable[[Sequence[int]], list[list[int]]]


class NgramText:
    """The embedded engine's prompt lookup over one request at a time."""

    def __init__(self, shortest: int, longest: int) -> None:
        """`shortest` and `longest` are prompt_lookup_min and prompt_lookup_max (tokens)."""
        self._sizes = range(longest, shortest - 1, -1)
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request."""
        self._ids = list(prompt)
        self._index = NgramIndex(self._sizes)

    def append(self, token: int) -> None:
        """Its answer goes on."""
        self._ids.append(token)

    def propose(self, ks: Sequence[int]) -> list[list[int]]:
        """The draft at each proposal length: a longer one begins with the shorter."""
        longest = self._index.follow(self._ids, max(ks))
        return [longest[:k] for k in ks]


@dataclass(frozen=True, slots=True)
class Drafting:
    """One method at one proposal length in one cohort; prompts are the clusters of each interval.

    `saved_share` is the share of the target's decode passes that would not run, before what drafts
    and verification cost; `speedup` is after it, by load, empty without costs.
    """

    method: str
    k: int
    drafted: int
    accepted: int
    unknown: int
    """Drafted tokens beyond the end of a log, which nothing is known about; not in acceptance."""
    passes: int
    verify_steps: int
    acceptance: Estimate
    coverage: Estimate
    tokens_per_pass: Estimate
    saved_share: Estimate
    speedup: Mapping[str, Estimate]
    """Load -> decode tokens over the cost of all rounds, in target-equivalent passes (STATS.md
    2.2): 1 is target-only. Loads at which this k is not calibrated are left out."""


@dataclass(frozen=True, slots=True)
class Best:
    """Which proposal length pays most with one method at one load."""

    method: str
    load: str
    k: int
    speedup: Estimate
    """Its limits hold for all proposal lengths together, since the best was chosen (Bonferroni)."""

    @property
    def words(self) -> str:
        """The finding, decided by the interval."""
        if math.isinf(self.speedup.high):
            return (
                f"open; k = {self.k}, {self.speedup.value:.2f}x, from too few prompts to say more"
            )
        told = f"{self.speedup.value:.2f}x ({self.speedup.low:.2f} to {self.speedup.high:.2f})"
        if self.speedup.low > 1:
            return f"k = {self.k}, {told}"
        if self.speedup.high < 1:
            return f"target-only; k = {self.k} comes closest, {told}"
        return f"open; k = {self.k} comes out best, {told}"


@dataclass(frozen=True, slots=True)
class CohortEstimate:
    """One cohort: how much was logged, and what each method would have done with it."""

    name: str
    route: str
    task: str
    temperature: str
    prompts: int
    answers: int
    decode_tokens: int
    """Tokens after each answer's first, which the prompt's own pass gives."""
    drafting: tuple[Drafting, ...]
    best: tuple[Best, ...]
    """Per method and load; empty without costs: not estimated."""


@dataclass(frozen=True, slots=True)
class LogEstimate:
    """Of a whole log: all answers together first, then each cohort."""

    cohorts: tuple[CohortEstimate, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """What drafting and verifying cost at one load, and the least and the most that they may cost.

    The ends are those of the calibration's intervals, None for costs that are taken as given.
    """

    costs: Costs
    least: Costs | None = None
    most: Costs | None = None


@dataclass
class _Cohort:
    route: str
    task: str
    temperature: str
    answers: int = 0
    rows: dict[str, array[int]] = field(default_factory=dict)
    """Prompt -> what `replay` gives, summed over its answers."""

    def add(self, prompt_id: str, row: array[int]) -> None:
        self.answers += 1
        known = self.rows.get(prompt_id)
        if known is None:
            self.rows[prompt_id] = row
            return
        for i, value in enumerate(row):
            known[i] += value


def replay(
    answer: LoggedAnswer, texts: Sequence[Text], methods: Sequence[Method], ks: Sequence[int]
) -> array[int]:
    """The rounds of one answer under each method and proposal length.

    `texts` are what the methods draft from; they follow the answer. Gives decode tokens, then per
    method and k: accepted, unknown, passes, and how many verify steps checked 1, 2 ... k drafts.
    """
    output = answer.output
    n = len(output)
    for text in texts:
        text.begin(answer.prompt)
    counts = [[[0] * (_FIXED + k) for k in ks] for _ in methods]
    due = [[1] * len(ks) for _ in methods]  # the first token comes from the prompt's own pass
    for t in range(1, n):
        for text in texts:
            text.append(output[t - 1])
        budget = max(ks)
        if answer.max_tokens is not None:  # as `Sequence.draft_budget`: one token is the pass's own
            budget = max(0, answer.max_tokens - t - 1)
        for method, next_round, tallies in zip(methods, due, counts, strict=True):
            turn = [i for i, at in enumerate(next_round) if at == t]
            if not turn:
                continue
            wanted = [min(ks[i], budget) for i in turn]
            drafts = method.propose(wanted) if budget else [[]] * len(turn)
            for i, draft in zip(turn, drafts, strict=True):
                next_round[i] = t + 1 + _count(tallies[i], draft, output, t)
    if n:
        for text in texts:
            text.append(output[-1])
    row = array("q", [max(0, n - 1)])
    for tallies in counts:
        for tally in tallies:
            row.extend(tally)
    return row


def _count(tally: list[int], draft: Sequence[int], output: Sequence[int], t: int) -> int:
    """Add the round that drafts output[t:]; how many drafted tokens agree with it."""
    agreed = 0
    for token in draft:
        if t + agreed == len(output):
            tally[_UNKNOWN] += len(draft) - agreed
            break
        if token != output[t + agreed]:
            break
        agreed += 1
    tally[_ACCEPTED] += agreed
    tally[_PASSES] += 1
    if draft:
        tally[_FIXED + len(draft) - 1] += 1
    return agreed


class Replay:
    """Feed it answers in the order in which they were given; ask it for estimates at the end."""

    def __init__(
        self,
        *,
        ks: Sequence[int] = KS,
        ngrams: Sequence[tuple[int, int]] = ((5, 5),),
        suffix: SuffixSettings | None = None,
    ) -> None:
        """`ngrams` are (prompt_lookup_min, prompt_lookup_max); `suffix` None leaves it out."""
        self.ks = tuple(sorted(set(ks)))
        self._texts: list[Text] = []
        self._methods: list[Method] = []
        for low, high in ngrams:
            text = NgramText(low, high)
            self._texts.append(text)
            self._methods.append(Method(f"ngram {low}-{high}", text.propose))
        if suffix is not None:
            drafter = SuffixDrafter(suffix)
            self._texts.append(drafter)
            self._methods.append(Method(OWN_TEXT, lambda ks: drafter.propose(ks, own_only=True)))
            if suffix.max_cached_requests > 0:
                self._methods.append(Method("suffix", drafter.propose))
        self._cohorts: dict[tuple[str, str, str], _Cohort] = {}
        self.n_answers = 0
        self.n_tokens = 0

    def add(self, answer: LoggedAnswer) -> None:
        """Replay one answer."""
        band = "any T" if answer.temperature is None else temperature_band(answer.temperature)
        key = (answer.route, answer.task, band)
        cohort = self._cohorts.setdefault(key, _Cohort(*key))
        cohort.add(answer.prompt_id, replay(answer, self._texts, self._methods, self.ks))
        self.n_answers += 1
        self.n_tokens += len(answer.output)

    def estimates(
        self, costs: Mapping[str, Prices] | None = None, *, alpha: float = ALPHA
    ) -> LogEstimate:
        """All answers together (where there are several cohorts), then each cohort by name.

        `costs` are by load, in words; their ends are taken to be at `alpha`.
        """
        costs = costs or {}
        found = [self._cohort(cohort, costs, alpha) for _, cohort in sorted(self._cohorts.items())]
        if len(found) > 1:
            whole = _Cohort("", "", "")
            for cohort in self._cohorts.values():
                whole.answers += cohort.answers
                for prompt_id, row in cohort.rows.items():
                    known = whole.rows.get(prompt_id)
                    whole.rows[prompt_id] = (
                        array("q", row)
                        if known is None
                        else array("q", [a + b for a, b in zip(known, row, strict=True)])
                    )
            found.insert(0, self._cohort(whole, costs, alpha))
        notes = []
        if any(method.name == "suffix" for method in self._methods):
            notes.append(
                "suffix sees the answers before it in the log, as at concurrency 1 with a cache "
                "that began empty"
            )
        if any(None in (price.least, price.most) for price in costs.values()):
            notes.append(
                "costs are taken as they are: intervals of speed-ups come from the answers alone"
            )
        unknown = sum(line.unknown for line in found[0].drafting) if found else 0
        if unknown:
            notes.append(
                "drafted tokens beyond the end of an answer are in no acceptance: a log does not "
                "say whether they would have been accepted"
            )
        return LogEstimate(tuple(found), tuple(notes))

    def _cohort(self, cohort: _Cohort, costs: Mapping[str, Prices], alpha: float) -> CohortEstimate:
        table = np.array([list(row) for row in cohort.rows.values()], float)
        tokens = table[:, 0]
        lines: list[Drafting] = []
        chosen_from: dict[str, list[Drafting]] = {method.name: [] for method in self._methods}
        at = 1
        for method in self._methods:
            for k in self.ks:
                part = table[:, at : at + _FIXED + k]
                at += _FIXED + k
                lines.append(_drafting(method.name, k, tokens, part, costs, alpha))
                # The best of several lengths is no one's own choice: its limits hold for them all.
                chosen_from[method.name].append(
                    _drafting(method.name, k, tokens, part, costs, alpha / len(self.ks))
                )
        return CohortEstimate(
            name=_name(cohort) if cohort.route else "all answers",
            route=cohort.route,
            task=cohort.task,
            temperature=cohort.temperature,
            prompts=len(cohort.rows),
            answers=cohort.answers,
            decode_tokens=int(tokens.sum()),
            drafting=tuple(lines),
            best=tuple(
                best
                for several in chosen_from.values()
                for load in costs
                if (best := _best(several, load))
            ),
        )


def _name(cohort: _Cohort) -> str:
    parts = [part for part in (cohort.route, cohort.task) if part not in ("default", "unknown")]
    return ", ".join([*dict.fromkeys(parts), cohort.temperature])


def _drafting(
    method: str,
    k: int,
    tokens: stats.Floats,
    part: stats.Floats,
    costs: Mapping[str, Prices],
    alpha: float,
) -> Drafting:
    """`tokens` (prompts,) are decode tokens, `part` (prompts, 3 + k) `replay`'s counts of one k."""
    accepted, unknown, passes = part[:, _ACCEPTED], part[:, _UNKNOWN], part[:, _PASSES]
    steps = part[:, _FIXED:]
    drafted = steps @ np.arange(1, k + 1)
    verified = steps.sum(axis=1)
    rounds = _Rounds(k, passes, drafted, steps)
    speedups = {load: _speedup(tokens, rounds, price, alpha) for load, price in costs.items()}
    return Drafting(
        method=method,
        k=k,
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        unknown=int(unknown.sum()),
        passes=int(passes.sum()),
        verify_steps=int(verified.sum()),
        acceptance=stats.acceptance_rate(accepted, drafted - unknown, alpha=alpha),
        coverage=stats.acceptance_rate(verified, passes, alpha=alpha),
        tokens_per_pass=stats.clustered_ratio(tokens, passes, alpha=alpha),
        saved_share=stats.clustered_ratio(tokens - passes, tokens, alpha=alpha),
        speedup={load: e for load, e in speedups.items() if e is not None},
    )


@dataclass(frozen=True, slots=True)
class _Rounds:
    """A cohort's rounds by prompt: passes, drafted tokens, and verify steps of 1 to k drafts."""

    k: int
    passes: stats.Floats
    drafted: stats.Floats
    steps: stats.Floats

    def spent(self, costs: Costs) -> stats.Floats:
        """Their cost in target-equivalent passes.

        Raises:
            KeyError: k is not calibrated.
        """
        extra = [costs.verify_at(n) - 1 + costs.rollback for n in range(1, self.k + 1)]
        spent: stats.Floats = self.passes + costs.draft * self.drafted + self.steps @ extra
        return spent


def _speedup(tokens: stats.Floats, rounds: _Rounds, price: Prices, alpha: float) -> Estimate | None:
    """Decode tokens over the cost of their rounds; None where k is not calibrated.

    Answers and costs are measured apart, so their uncertainties add up as squares (Zou and Donner
    2008); all verify costs are taken at one end together, which is on the safe side.
    """
    try:
        e = stats.clustered_ratio(tokens, rounds.spent(price.costs), alpha=alpha)
        if price.least is None or price.most is None:
            return e
        slow, fast = (
            float(tokens.sum() / rounds.spent(end).sum()) for end in (price.most, price.least)
        )
    except KeyError:
        return None
    return replace(
        e,
        low=e.value - math.hypot(e.value - e.low, e.value - slow),
        high=e.value + math.hypot(e.high - e.value, fast - e.value),
        method=f"{e.method}; with the interval of the calibrated costs, square-and-add",
    )


def _best(lines: Sequence[Drafting], load: str) -> Best | None:
    """The proposal length with the largest speed-up; None where nothing is known."""
    priced = [d for d in lines if load in d.speedup and d.speedup[load].is_known]
    if not priced:
        return None
    line = max(priced, key=lambda d: d.speedup[load].value)
    return Best(line.method, load, line.k, line.speedup[load])


def lookup_costs(calibrated: Mapping[int, Calibration]) -> dict[str, Prices]:
    """What lookup drafting costs at each batch size that was calibrated, by load in words.

    A lookup costs nothing beside the verify step, so c and o are 0, and a verify step costs no less
    than a plain one. Left out is what says nothing: a proposal length whose interval has no limits
    or lies below 1 (the machine was busy with something else), and a calibration that could not
    tell a draft model's cost from the verify step's.
    """
    found: dict[str, Prices] = {}
    for batch, calibration in sorted(calibrated.items()):
        verify = {
            k: estimate
            for k, estimate in calibration.verify.items()
            if math.isfinite(estimate.low) and math.isfinite(estimate.high) and estimate.high >= 1
        }
        if verify and calibration.note != TOGETHER:
            found[f"{batch} at once"] = Prices(
                *(
                    Costs(0.0, {k: max(1.0, getattr(e, end)) for k, e in verify.items()})
                    for end in ("value", "low", "high")
                )
            )
    return found


# --- the answers of a run -----------------------------------------------------------------------


def run_answers(
    opened: Store, run_id: str, corpus: Corpus, tokenizer: Tokenizer
) -> Iterator[LoggedAnswer]:
    """Target-only answers of a run's replay, in the order in which they were asked.

    Reruns and the A/A control are left out: they ask again what is there already.

    Raises:
        UsageError: the run kept none, or corpus or tokenizer are not those of the run.
    """
    known = {prompt.prompt_id: prompt for prompt in corpus.prompts}
    receipts = opened.receipts(
        run_id,
        stage=Stage.REPLAY,
        arm=Arm.TARGET_ONLY,
        phase=("greedy", "sampled"),
        outcome=Outcome.OK,
        warm_up=False,
    )
    answers = opened.answers([receipt.receipt_id for receipt in receipts])
    kept = [r for r in receipts if r.receipt_id in answers]
    if not kept:
        raise UsageError(f"{opened.path}: no target-only answers there; run the replay stage first")
    prompts: dict[str, list[int]] = {}
    for receipt in kept:
        prompt_id = receipt.prompt_id
        prompt = known.get(prompt_id) or known.get(prompt_id.removesuffix(f"@{receipt.route}"))
        if prompt is None:
            raise UsageError(
                f"{opened.path}: prompt {prompt_id!r} is not in the corpus; give the rollout that "
                "the run was made with (--rollout)"
            )
        ids = prompts.setdefault(prompt_id, chat_ids(tokenizer, prompt))
        if receipt.prompt_tokens not in (None, len(ids)):
            raise UsageError(
                f"{opened.path}: prompt {prompt_id!r} has {len(ids)} tokens, the server counted "
                f"{receipt.prompt_tokens}: give the target's own tokenizer (--tokenizer)"
            )
        answer = answers[receipt.receipt_id]
        output = answer.token_ids
        if output is None:
            output = tuple(tokenizer.encode(answer.text, add_special_tokens=False))
        yield LoggedAnswer(
            prompt_id=prompt_id,
            prompt=ids,
            output=output,
            task=receipt.task,
            route=receipt.route,
            temperature=receipt.temperature,
            max_tokens=len(output) if receipt.finish_reason == "length" else prompt.max_tokens,
        )


def scheduling_notes(
    opened: Store,
    run_id: str,
    rollout: Rollout,
    corpus: Corpus,
    folder: Path,
    calibrated: Mapping[int, Calibration],
) -> list[str]:
    """What the rollout's own lookup drafting should do on each route, from target-only answers.

    One sentence per route; empty for drafts of a model, and where replay kept no answers. `folder`
    holds the target's tokenizer, `calibrated` the costs by batch size, where there are any.
    """
    spec = rollout.speculation
    k = spec.get("num_speculative_tokens")
    method = str(spec.get("method"))
    if not isinstance(k, int) or not method.startswith(("ngram", "suffix")):
        return []
    if method.startswith("ngram"):
        low, high = spec.get("prompt_lookup_min"), spec.get("prompt_lookup_max")
        feed = Replay(ks=[k], ngrams=[(low or high or 5, high or low or 5)])
    else:
        given = {
            field.name: spec[f"suffix_decoding_{field.name}"]
            for field in fields(SuffixSettings)
            if f"suffix_decoding_{field.name}" in spec
        }
        feed = Replay(ks=[k], ngrams=[], suffix=SuffixSettings(**given))
    try:
        for answer in run_answers(opened, run_id, corpus, open_tokenizer(str(folder))):
            feed.add(replace(answer, task="unknown", temperature=None))
    except UsageError:
        return []
    costs = lookup_costs(calibrated)
    return [_note(cohort) for cohort in feed.estimates(costs).cohorts if cohort.route]


def _note(cohort: CohortEstimate) -> str:
    line = cohort.drafting[-1]
    passes, saved = line.tokens_per_pass, line.saved_share
    text = (
        f"{cohort.route}: from target-only answers alone {line.method} at k = {line.k} gives "
        f"{passes.value:.2f} tokens per pass ({passes.low:.2f} to {passes.high:.2f}, n "
        f"{cohort.prompts} prompts) and saves {saved.value:.0%} of the target's passes before costs"
    )
    if not line.speedup:
        return f"{text}; the speed-up is not estimated, since no costs are calibrated"
    told = [f"{e.value:.2f}x ({e.low:.2f} to {e.high:.2f}) {at}" for at, e in line.speedup.items()]
    return f"{text}; with calibrated costs decoding is {', '.join(told)}"
