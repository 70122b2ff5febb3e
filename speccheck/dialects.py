"""How servers other than vLLM report a request's speculation, put in vLLM's words.

One client and one set of receipt columns for all servers; what a server does not say stays unknown.
Read from llama.cpp (`timings`, tools/server) and SGLang (`sglext.spec_tokens_details` of a request
with `return_spec_tokens_details`, and the older `meta_info` with its older names).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = frozenset({"timings", "sglext", "meta_info"})
"""What a chunk has that `of_reply` has to look at."""

Counts = Mapping[str, Any]
"""The keys of vLLM's `SpeculativeDecodingMetrics`, as far as they are known."""


def of_reply(reply: Mapping[str, Any]) -> Counts | None:
    """The counts in a reply or in one chunk of it; None where there are none.

    Values are as sent: whoever reads them checks them.
    """
    if (timings := reply.get("timings")) is not None:
        return _llama_cpp(timings)
    if isinstance(extension := reply.get("sglext"), Mapping):
        return _sglang(extension.get("spec_tokens_details"))
    if (info := reply.get("meta_info")) is not None:
        return _sglang(info)
    return None


def _llama_cpp(timings: Any) -> Counts | None:
    """`draft_n` is there only where something was drafted; verify steps are not told apart.

    llama.cpp's own `/props` may say that nothing speculates while it does: this is what counts.
    """
    if not isinstance(timings, Mapping) or timings.get("draft_n") is None:
        return None
    return {
        "num_spec_steps": None,
        "num_draft_tokens": timings["draft_n"],
        "num_accepted_draft_tokens": timings.get("draft_n_accepted"),
    }


def _sglang(info: Any) -> Counts | None:
    """Names changed on the way: accepted tokens became correct drafts. The bonus token is in none
    of them. `spec_accept_length` counts it, so it is not used.
    """
    if not isinstance(info, Mapping) or info.get("spec_verify_ct") is None:
        return None
    known = {
        "num_spec_steps": info["spec_verify_ct"],
        "num_draft_tokens": _first(
            info, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"
        ),
        "num_accepted_draft_tokens": _first(
            info, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"
        ),
    }
    if None in known.values():
        return None
    histogram = _first(info, "spec_correct_drafts_histogram", "spec_accept_histogram")
    return known | ({"acceptance_histogram": histogram} if histogram else {})


def _first(info: Mapping[str, Any], *names: str) -> Any:
    return next((info[name] for name in names if info.get(name) is not None), None)
