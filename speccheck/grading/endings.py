"""How an answer ended: stop strings, the length limit, the finish reason (vLLM #47616)."""

from __future__ import annotations

from collections.abc import Sequence

from speccheck.grading.grade import shown
from speccheck.records import Outcome, Receipt


def ending_problems(receipt: Receipt, text: str, stop: Sequence[str], max_tokens: int) -> list[str]:
    """What is wrong with the way an answer ended: stop strings, length limit, finish reason.

    Empty for a sound ending. Only what the receipt shows is judged; a count that the server did not
    give is not a problem.
    """
    problems = [
        f"the text runs past the stop string {shown(word)}"
        for word in stop
        if word and word in text
    ]
    n = receipt.completion_tokens
    if n is not None and n > max_tokens:
        problems.append(f"{n} tokens were returned, {max_tokens} allowed")
    if receipt.outcome == Outcome.OK and receipt.finish_reason is None:
        problems.append("no finish reason")
    if receipt.finish_reason == "length" and n is not None and n < max_tokens:
        problems.append(f"finish reason is length at {n} of {max_tokens} tokens")
    if receipt.stop_reason in stop and receipt.finish_reason == "length":
        problems.append("a stop string ended the text, but the finish reason is length")
    return problems
