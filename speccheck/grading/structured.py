"""Answers that a program reads: JSON, JSON under a schema, configuration files.

Also the share of such answers that are well formed, as a metric: with speculation a grammar may not
be applied inside the accepted block, and HTTP says 200 all the same (vLLM #44993).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speccheck import stats
from speccheck.errors import UsageError
from speccheck.grading.grade import PASSED, Grade, GradeOutcome, failed, need, shown, unfenced
from speccheck.records import Arm, Estimate, Measurement


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"beyond what a number holds: {digits}")
    return value


def _whole(digits: str) -> int:
    _finite(digits)
    return int(digits)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"field {twice!r} comes twice")
    return found


def _parsed(text: str) -> tuple[Any, str]:
    """The value and an empty problem, or None and the problem.

    Strict where parsers differ (RFC 8259): a name that comes twice, as when a token is doubled,
    NaN, and numbers that no float holds are faults.
    """
    try:
        value = json.loads(
            text.strip(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_once,
        )
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, f"no JSON: {shown(error)}"
    return value, ""


def _same(a: Any, b: Any) -> bool:
    """Equality as JSON means it: true is not 1, but 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _expected(check: Mapping[str, Any], value: Any) -> Grade:
    if "expect" not in check or _same(value, check["expect"]):
        return PASSED
    expect = check["expect"]
    if isinstance(expect, dict) and isinstance(value, dict):
        for key in sorted(expect.keys() | value.keys()):
            if key not in value:
                return failed(f"field {shown(key)} is missing")
            if key not in expect:
                return failed(f"field {shown(key)} was not asked for")
            if not _same(value[key], expect[key]):
                return failed(
                    f"field {shown(key)} is {shown(value[key])}, expected {shown(expect[key])}"
                )
    return failed(f"is {shown(value)}, expected {shown(expect)}")


def check_json(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer is one JSON value, equal to `expect` where given."""
    value, problem = _parsed(text)
    return failed(problem) if problem else _expected(check, value)


def check_json_schema(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer is one JSON value, valid against `schema`, equal to `expect` where given."""
    import jsonschema
    import referencing.exceptions

    validator = _validator(json.dumps(need(check, "schema")))
    value, problem = _parsed(text)
    if problem:
        return failed(problem)
    try:
        breach = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except referencing.exceptions.Unresolvable as error:
        raise UsageError(f"check schema has a broken reference: {shown(error)}") from None
    except RecursionError:
        return failed("nested too deeply")
    if breach is not None:
        where = "/".join(str(part) for part in breach.absolute_path)
        return failed(f"breaks the schema at {shown('/' + where)}: {shown(breach.message)}")
    return _expected(check, value)


@functools.lru_cache(maxsize=512)
def _validator(schema: str) -> Any:
    """A validator for a schema (as JSON), the schema itself checked once."""
    import jsonschema
    import referencing

    value = json.loads(schema)
    try:
        jsonschema.Draft202012Validator.check_schema(value)
    except jsonschema.SchemaError as error:
        raise UsageError(f"check schema is invalid: {shown(error.message)}") from None
    # An empty registry: a $ref to the net must not be fetched.
    return jsonschema.Draft202012Validator(value, registry=referencing.Registry())


# --- configuration files ------------------------------------------------------------------------


def _env(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            name, sign, value = line.removeprefix("export ").partition("=")
            if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
                raise ValueError(f"{line!r} is no NAME=value")
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name.strip()] = value[1:-1] if quoted else value
    return found


def _ini(text: str) -> dict[str, dict[str, str]]:
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections()}


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    from ruamel.yaml import YAML

    if len(text) > _MOST_YAML:
        raise ValueError(f"over {_MOST_YAML} characters")
    if re.search(r"(?m)(^|[\s\[,{:-])[&*]\w", text):  # a few aliases can stand for gigabytes
        raise ValueError("anchors and aliases are not read")
    return YAML(typ="safe", pure=True).load(text)


_MOST_YAML = 20_000

CONFIG_FORMATS: dict[str, Callable[[str], Any]] = {
    "yaml": _yaml,
    "toml": _toml,
    "ini": _ini,
    "env": _env,
}


def check_config(check: Mapping[str, Any], text: str) -> Grade:
    """A configuration file (fenced or not) that parses and, where given, equals `expect`.

    INI and env files hold texts only, so there `expect` is compared as texts.
    """
    name = need(check, "format")
    if name not in CONFIG_FORMATS:
        known = ", ".join(CONFIG_FORMATS)
        raise UsageError(f"check of kind 'config': format {name!r} is none of {known}")
    try:
        value = CONFIG_FORMATS[name](unfenced(text))
    except RecursionError:
        return failed("nested too deeply")
    except Exception as error:  # noqa: BLE001 -- each parser has errors of its own
        return failed(f"no {name}: {shown(' '.join(str(error).split()))}")
    try:
        value = json.loads(json.dumps(value, default=str))
    except (ValueError, TypeError, RecursionError):
        return failed(f"no plain {name}: {shown(value)}")
    return _expected(check, value)


# --- how many are well formed ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Structured:
    """The `structure` grade of one request that asked for structured output."""

    arm: str
    prompt_id: str
    receipt_id: str
    outcome: GradeOutcome
    cohort: str = ""


def measure_structured_validity(
    graded: Sequence[Structured], *, stage: str, route: str, alpha: float = 0.05
) -> list[Measurement]:
    """Metric structured_output_validity of the speculative arm: route, then each cohort that is
    worse than on the target-only arm. Not-applicable grades do not count.

    The prompt is the unit, and n: its answers, greedy and sampled, are not independent.
    """
    metric = "structured_output_validity"
    cohorts = sorted({g.cohort for g in graded if g.cohort})
    found = []
    for cohort in ["", *(cohorts if len(cohorts) > 1 else [])]:
        here = [
            g
            for g in graded
            if g.outcome != "not_applicable" and (not cohort or g.cohort == cohort)
        ]
        sides = {arm: [g for g in here if g.arm == arm] for arm in Arm}
        valid = {arm: sum(g.outcome == "pass" for g in side) for arm, side in sides.items()}
        spec, target = sides[Arm.SPECULATIVE], sides[Arm.TARGET_ONLY]
        worse = valid[Arm.SPECULATIVE] * len(target) < valid[Arm.TARGET_ONLY] * len(spec)
        if cohort and not worse:
            continue
        if not spec:
            found.append(Measurement(metric, stage, route, cohort, None, "no structured output"))
            continue
        sizes = Counter(g.prompt_id for g in spec)
        passed = Counter(g.prompt_id for g in spec if g.outcome == "pass")
        hits = [passed[prompt] for prompt in sizes]

        def share(
            level: float, hits: Sequence[int] = hits, sizes: Sequence[int] = tuple(sizes.values())
        ) -> Estimate:
            return stats.clustered_share(hits, sizes, alpha=level)

        said = f"valid {valid[Arm.SPECULATIVE]} of {len(spec)}"
        if len(sizes) < len(spec):
            said += f" answers to {len(sizes)} prompts"
        found.append(
            Measurement(
                metric,
                stage,
                route,
                cohort,
                share(alpha),
                f"{said}; target-only {valid[Arm.TARGET_ONLY]} of {len(target)}",
                tuple(g.receipt_id for g in spec if g.outcome == "fail")[:5],
                tuple(share(level) for level in stats.FAIL_LEVELS),
                share=len(spec) / max(1, sum(g.arm == Arm.SPECULATIVE for g in graded)),
            )
        )
    return found
