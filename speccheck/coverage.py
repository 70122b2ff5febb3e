"""Which speculative settings a pass of the fixture says something about.

A proof about one way of verifying must not be read as one about another, so a server's config is
held against what the fixture covers before its verdict counts. Servers add settings faster than we
can read them: what is not known here is refused, never passed.
"""

from collections.abc import Mapping
from typing import Any

_COVERS = (
    "token verification (vLLM: standard), one-hot drafts (n-gram, greedy), greedy and block "
    "verification"
)
_LOSSY_METHODS = {
    "synthetic": "accepts at a fixed rate whatever the target says",
    "fly": "is documented as intentionally lossy",
    "typical_acceptance_sampler": "accepts by the target's entropy, not by p/q",
    "typical": "accepts by the target's entropy, not by p/q",
}
_COVERED_METHODS = {"standard", "strict", "rejection_sampler", "block"}
_COVERED_DRAFT_SAMPLING = ("greedy", "probabilistic")
_COVERED_PROPOSERS = {
    "ngram",
    "ngram_gpu",
    "suffix",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "dflash",
}


def check_coverage(speculative_config: Mapping[str, Any]) -> list[str]:
    """Reasons why a pass of the fixture would say nothing about a server with this config.

    speculative_config: vLLM's, or the embedded engine's. Empty if the fixture covers it. Lossy
    settings are refused by name, what is unknown is refused as not covered: never passed by
    default.
    """
    config = {str(key).replace("-", "_"): value for key, value in speculative_config.items()}
    reasons = []
    for key in ("rejection_sample_method", "acceptance_method", "algorithm"):
        value = config.get(key)
        if value is None or str(value) in _COVERED_METHODS:
            continue
        if str(value) in _LOSSY_METHODS:
            reasons.append(f"{key} {value!r} {_LOSSY_METHODS[str(value)]}: lossy, refused")
        else:
            reasons.append(f"{key} {value!r} is not covered; the fixture covers {_COVERS}")
    for key, why in (
        ("synthetic_acceptance_rates", "fixes the acceptance rates"),
        ("synthetic_acceptance_length", "fixes the acceptance length"),
        ("posterior_threshold", "belongs to typical acceptance"),
        ("posterior_alpha", "belongs to typical acceptance"),
    ):
        if config.get(key) is not None:
            reasons.append(f"{key} {why}: lossy, refused")
    lenience = config.get("lenience")
    if lenience is not None and lenience != 1:
        reasons.append(f"lenience {lenience!r} accepts with min(1, p/(l q)): lossy, refused")
    if config.get("enable_adaptive_verification"):
        reasons.append(
            "enable_adaptive_verification cuts blocks by what was drawn; the fixture covers "
            "proposals of a length fixed before the draw"
        )
    sampling = config.get("draft_sample_method")
    if sampling is not None and str(sampling) not in _COVERED_DRAFT_SAMPLING:
        reasons.append(
            f"draft_sample_method {sampling!r} is not covered; the fixture covers "
            f"{', '.join(_COVERED_DRAFT_SAMPLING)}"
        )
    method = config.get("method")
    if method is not None and not _covered_proposer(str(method)):
        reasons.append(
            f"method {method!r} is not covered: what it tells the verifier about its drafts is "
            f"unknown; covered are {', '.join(sorted(_COVERED_PROPOSERS))}"
        )
    if config.get("speculative_token_tree") is not None:
        reasons.append("speculative_token_tree drafts a tree; the fixture covers single chains")
    return reasons


def _covered_proposer(method: str) -> bool:
    """Older names that end in _mtp are rewritten by vLLM to mtp."""
    return method in _COVERED_PROPOSERS or method.endswith("_mtp")
