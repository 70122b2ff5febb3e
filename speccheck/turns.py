"""Conversations: later user turns of a prompt, each sent with the arm's own answers before it.

A plan is data made before anything is sent, and a later turn needs an answer that is not there yet.
So a phase is planned and driven turn by turn: the plan of a turn is pure too, once the answers of
the turn before are known. A turn is keyed as a prompt of its own (`chat-7#2` is the second turn of
`chat-7`); its case is a conversation, since the arms may have said different things before. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from speccheck.records import Arm, PlannedRequest, Prompt

RERUN_OF = {"greedy-confirm": "greedy", "sampled-confirm": "sampled"}
"""Phases that ask a turn again, with the history it had in another phase (repeat 0)."""

Said = Mapping[tuple[str, str, str, int], str]
"""Complete answers by (arm, phase, prompt id, repeat)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn. `prompt` is how it is keyed and graded; its messages are the first turn's."""

    prompt: Prompt
    first: Prompt
    number: int
    """From 2: the first turn is the prompt itself."""


def later_turns(prompts: Sequence[Prompt]) -> list[Turn]:
    """All turns after the first, second turns before third ones."""
    found = []
    for first in prompts:
        for number, _ in enumerate(first.follow_up, 2):
            checks = first.follow_checks
            prompt = replace(
                first,
                prompt_id=turn_id(first, number),
                check=checks[number - 2] if checks else {"kind": "none"},
                follow_up=(),
                follow_checks=(),
                group=first.group or first.prompt_id,
            )
            found.append(Turn(prompt, first, number))
    return sorted(found, key=lambda turn: turn.number)


def turn_id(first: Prompt, number: int) -> str:
    """Prompt id of one turn of a conversation."""
    return first.prompt_id if number == 1 else f"{first.prompt_id}#{number}"


def history(turn: Turn, said: Said, arm: Arm, phase: str, repeat: int) -> list[str] | None:
    """What an arm answered before a turn, in order; None where one of the answers is missing."""
    found = []
    for number in range(1, turn.number):
        answer = said.get((arm, phase, turn_id(turn.first, number), repeat))
        if answer is None:
            return None
        found.append(answer)
    return found


def with_history(turn: Turn, answers: Sequence[str]) -> Prompt:
    """The turn's prompt, its messages whole: question, answer, question ... and the turn's own."""
    messages = list(turn.first.messages)
    for answer, user in zip(answers, turn.first.follow_up, strict=False):
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": user},
        ]
    return replace(turn.prompt, messages=tuple(messages))


def own_histories(
    planned: Sequence[PlannedRequest], turns: Sequence[Turn], said: Said
) -> list[PlannedRequest]:
    """A plan in which each later turn carries what its own arm said before, in its own phase.

    A turn whose history is incomplete on its arm is left out: there is nothing to ask.
    """
    by_id = {turn.prompt.prompt_id: turn for turn in turns}
    found = []
    for request in planned:
        turn = by_id.get(request.prompt.prompt_id)
        if turn is None:
            found.append(request)
            continue
        phase = RERUN_OF.get(request.phase, request.phase)
        repeat = request.repeat if phase == request.phase else 0
        answers = history(turn, said, request.arm, phase, repeat)
        if answers is not None:
            found.append(replace(request, prompt=with_history(turn, answers)))
    return found
