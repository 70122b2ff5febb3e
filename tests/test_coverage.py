"""What the fixture covers, and that everything else is refused by name."""

import pytest

from speccheck.coverage import check_coverage


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        {"method": "eagle3", "model": "m", "draft_sample_method": "greedy"},
        {"method": "draft_model", "model": "m", "draft_sample_method": "probabilistic"},
        {"method": "deepseek_mtp", "rejection_sample_method": "standard"},
        {"method": "draft_model", "rejection_sample_method": "block"},
        {"method": "suffix", "rejection-sample-method": "standard", "lenience": 1},
        {"synthetic_acceptance_rates": None, "enable_adaptive_verification": False},
    ],
)
def test_covered_configs_have_no_reason_to_refuse(config):
    """What vLLM and the embedded engine run by default is covered."""
    assert check_coverage(config) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rejection_sample_method": "synthetic"}, "'synthetic' accepts at a fixed rate"),
        ({"rejection-sample-method": "synthetic"}, "lossy, refused"),
        ({"rejection_sample_method": "fly"}, "intentionally lossy"),
        ({"rejection_sample_method": "new"}, "'new' is not covered; the fixture covers token"),
        ({"acceptance_method": "typical_acceptance_sampler"}, "by the target's entropy"),
        ({"algorithm": "medusa"}, "'medusa' is not covered"),
        ({"algorithm": ["token"]}, "is not covered"),
        ({"synthetic_acceptance_rates": [0.9]}, "fixes the acceptance rates: lossy"),
        ({"synthetic_acceptance_length": 3.0}, "fixes the acceptance length: lossy"),
        ({"posterior_threshold": 0.09}, "typical acceptance: lossy"),
        ({"posterior_alpha": 0.3}, "typical acceptance: lossy"),
        ({"lenience": 0.8}, "lenience 0.8 accepts"),
        ({"enable_adaptive_verification": True}, "cuts blocks by what was drawn"),
        ({"draft_sample_method": "beam"}, "'beam' is not covered"),
        ({"method": "custom_class"}, "'custom_class' is not covered"),
        ({"method": "dspark"}, "'dspark' is not covered"),
        ({"speculative_token_tree": "[(0,), (1,)]"}, "covers single chains"),
    ],
)
def test_lossy_and_unknown_configs_are_refused(config, message):
    """A reason names the setting and says why; unknown is refused, never passed by default."""
    reasons = check_coverage(config)
    assert len(reasons) == 1
    assert message in reasons[0]


def test_every_reason_is_given():
    """Two wrong settings, two reasons."""
    assert len(check_coverage({"rejection_sample_method": "fly", "lenience": 0.5})) == 2


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "algorithm": "sampler_match"},
        {"method": "draft_model", "rejection_sample_method": "target_only"},
        {"method": "draft_model", "draft_sample_method": "sampled_one_hot"},
    ],
)
def test_what_no_server_can_be_told_is_not_covered(config):
    """A name that the fixture knows and that maps to nothing it would prove here is refused."""
    assert check_coverage(config)
