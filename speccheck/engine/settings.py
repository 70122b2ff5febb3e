"""What the embedded engine can be told, in vLLM's own words where vLLM has them.

Every value is checked here, before a model is read, and an unknown key is an error: a misspelt
`num_speculative_tokens` must not quietly become a default. Importing this module costs nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from speccheck import __version__
from speccheck.engine.adaptive import LOOKUP_COSTS, Adaptive, StepCosts
from speccheck.errors import UsageError

PACKAGED = "packaged"
MAX_PROPOSAL_LENGTH = 15  # verifier.uniform counts 16 positions a round
PAIR_DIR = Path(__file__).parent / "pair"


@dataclass(frozen=True)
class SpeculativeSettings:
    """vLLM's `speculative_config`, the fields that mean something here. See `parse`."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    adaptive: Adaptive | None = None
    """Lengths up to num_speculative_tokens, by agreement and load; None: always that many."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SpeculativeSettings:
        """Check a config of vLLM's shape. Raises UsageError that names the field.

        `{"method": "draft_model", "model": DIR | "packaged", "num_speculative_tokens": 4,
        "draft_sample_method": "greedy" | "probabilistic",
        "rejection_sample_method": "standard" | "block"}` or `{"method": "ngram",
        "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}`; either with
        `"adaptive": true` or `{"min_speculative_tokens": 0, "costs": {"step": 0.8, ...}}`.
        """
        where = "speculative_config"
        values = {str(key).replace("-", "_"): value for key, value in raw.items()}  # as vLLM does
        _known(values, cls, where)
        method = _one_of(values, "method", ("draft_model", "ngram"), where)
        k = _integer(values, "num_speculative_tokens", where, low=1, high=MAX_PROPOSAL_LENGTH)
        if k is None:
            raise UsageError(f"{where}: num_speculative_tokens is missing")
        rejection = _one_of(
            values, "rejection_sample_method", ("standard", "block"), where, "standard"
        )
        default = LOOKUP_COSTS if method == "ngram" else StepCosts()
        adaptive = _adaptive(values.get("adaptive"), k, default, f"{where}.adaptive")
        if method == "ngram":
            for key in ("model", "draft_sample_method"):
                if values.get(key) is not None:
                    raise UsageError(f"{where}: {key} means nothing with method ngram")
            low = _integer(values, "prompt_lookup_min", where, low=1)
            high = _integer(values, "prompt_lookup_max", where, low=1)
            # vLLM: one given stands for both, none means 5 and 5.
            low, high = low or high or 5, high or low or 5
            if low > high:
                raise UsageError(f"{where}: prompt_lookup_min {low} > prompt_lookup_max {high}")
            return cls(
                method,
                k,
                rejection_sample_method=rejection,
                prompt_lookup_min=low,
                prompt_lookup_max=high,
                adaptive=adaptive,
            )
        for key in ("prompt_lookup_min", "prompt_lookup_max"):
            if values.get(key) is not None:
                raise UsageError(f"{where}: {key} means nothing with method draft_model")
        model = values.get("model")
        if not isinstance(model, str) or not model:
            raise UsageError(f"{where}: draft_model needs `model`: a directory or 'packaged'")
        return cls(
            method,
            k,
            model=model,
            draft_sample_method=_one_of(
                values, "draft_sample_method", ("greedy", "probabilistic"), where, "greedy"
            ),
            rejection_sample_method=rejection,
            adaptive=adaptive,
        )

    @property
    def model_dir(self) -> Path:
        """The draft model's directory. Only for method draft_model."""
        return PAIR_DIR / "draft" if self.model in (None, PACKAGED) else Path(str(self.model))

    def as_config(self) -> dict[str, Any]:
        """The config as JSON, fields that mean nothing to the method left out."""
        raw = asdict(self)
        unused: tuple[str, ...] = (
            ("model", "draft_sample_method")
            if self.method == "ngram"
            else ("prompt_lookup_min", "prompt_lookup_max")
        )
        if self.adaptive is None:
            unused = (*unused, "adaptive")
        return {key: value for key, value in raw.items() if key not in unused}


@dataclass(frozen=True)
class EngineSettings:
    """One engine. `speculative_config=None` is a target-only server, as in vLLM.

    `max_num_seqs` bounds the running batch; `max_num_queued_reqs` bounds running plus waiting
    requests (None: no bound), and more are refused with 503; `max_model_len` (tokens, prompt plus
    answer) defaults to what both models can hold; `seed` gives unseeded requests theirs;
    `max_logprobs` is vLLM's, -1 for the whole vocabulary; `max_num_batched_tokens` is how much
    prompt a step may process while others decode; `enable_prefix_caching` keeps the keys of
    prompts for later requests that begin alike.
    """

    model: str = PACKAGED
    speculative_config: SpeculativeSettings | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    seed: int = 0
    served_model_name: str | None = None
    max_num_queued_reqs: int | None = None
    max_logprobs: int = 20
    max_num_batched_tokens: int = 128
    enable_prefix_caching: bool = True

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> EngineSettings:
        """Check settings from JSON. Raises UsageError that names the key."""
        where = "engine settings"
        if not isinstance(raw, Mapping):
            raise UsageError(f"{where}: a JSON object is wanted, got {type(raw).__name__}")
        _known(raw, cls, where)
        spec = raw.get("speculative_config")
        if spec is not None and not isinstance(spec, Mapping):
            raise UsageError(f"{where}: speculative_config must be an object or null")
        model = raw.get("model", PACKAGED)
        name = raw.get("served_model_name")
        if not isinstance(model, str) or not model or not isinstance(name, str | None):
            raise UsageError(f"{where}: model and served_model_name are strings")
        caching = raw.get("enable_prefix_caching")
        if not isinstance(caching, bool | None):
            raise UsageError(f"{where}: enable_prefix_caching is {caching!r}; true or false")
        default = cls()
        return cls(
            model=model,
            speculative_config=None if spec is None else SpeculativeSettings.parse(spec),
            max_num_seqs=_integer(raw, "max_num_seqs", where, low=1) or default.max_num_seqs,
            max_model_len=_integer(raw, "max_model_len", where, low=2),
            seed=_integer(raw, "seed", where, low=0) or 0,
            served_model_name=name,
            max_num_queued_reqs=_integer(raw, "max_num_queued_reqs", where, low=1),
            max_logprobs=default.max_logprobs
            if raw.get("max_logprobs") is None
            else _integer(raw, "max_logprobs", where, low=-1) or 0,
            max_num_batched_tokens=_integer(raw, "max_num_batched_tokens", where, low=1)
            or default.max_num_batched_tokens,
            enable_prefix_caching=default.enable_prefix_caching if caching is None else caching,
        )

    @property
    def model_dir(self) -> Path:
        """The target model's directory."""
        return PAIR_DIR / "target" if self.model == PACKAGED else Path(self.model)

    @property
    def name(self) -> str:
        """The model name clients ask for: as given, else the directory as vLLM does."""
        if self.served_model_name:
            return self.served_model_name
        return "speccheck-target" if self.model == PACKAGED else self.model

    def as_config(self) -> dict[str, Any]:
        """The settings as JSON, in the shape `parse` takes."""
        raw = asdict(self)
        spec = self.speculative_config
        raw["speculative_config"] = None if spec is None else spec.as_config()
        return raw

    def server_info(self, max_model_len: int) -> dict[str, Any]:
        """What the server answers to GET /server_info: the settings, where vLLM has them."""
        spec = self.speculative_config
        return {
            "engine": "speccheck",
            "version": __version__,
            "settings": self.as_config(),
            "vllm_config": {
                "model_config": {
                    "model": str(self.model_dir),
                    "served_model_name": self.name,
                    "max_model_len": max_model_len,
                    "dtype": "float32",
                    "seed": self.seed,
                    "max_logprobs": self.max_logprobs,
                },
                "scheduler_config": {
                    "max_num_seqs": self.max_num_seqs,
                    "max_num_batched_tokens": self.max_num_batched_tokens,
                    "max_num_queued_reqs": self.max_num_queued_reqs,
                    "policy": "priority",
                },
                "cache_config": {"enable_prefix_caching": self.enable_prefix_caching},
                "speculative_config": None if spec is None else spec.as_config(),
            },
            "system_env": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "threads_per_session": 1,
            },
        }


def _adaptive(value: Any, k: int, default: StepCosts, where: str) -> Adaptive | None:
    if value is None or value is False:
        return None
    given = {} if value is True else value
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: true, false or an object is wanted")
    _known(given, Adaptive, where)
    least = _integer(given, "min_speculative_tokens", where, low=0, high=k) or 0
    costs = given.get("costs") or {}
    if not isinstance(costs, Mapping):
        raise UsageError(f"{where}.costs: an object is wanted")
    _known(costs, StepCosts, f"{where}.costs")
    for name, cost in costs.items():
        is_number = isinstance(cost, int | float) and not isinstance(cost, bool)
        if not is_number or not 0 <= cost < float("inf"):
            raise UsageError(f"{where}.costs: {name} is a number from 0 up, got {cost!r}")
    found = replace(default, **{name: float(cost) for name, cost in costs.items()})
    if found.step + found.sequence + found.token + found.cell <= 0:
        raise UsageError(f"{where}.costs: a step must cost something")
    return Adaptive(least, found)


def _known(raw: Mapping[str, Any], cls: Any, where: str) -> None:
    known = [field.name for field in fields(cls)]
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")


def _one_of(
    raw: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str, default: str = ""
) -> str:
    value = raw.get(key) or default
    if value not in allowed:
        raise UsageError(
            f"{where}: {key} is {raw.get(key)!r}; the embedded engine knows {', '.join(allowed)}"
        )
    return str(value)


def _integer(
    raw: Mapping[str, Any], key: str, where: str, low: int, high: int | None = None
) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {key} is {value!r}; an integer is wanted")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise UsageError(f"{where}: {key} is {value}; {limit} is wanted")
    return value
