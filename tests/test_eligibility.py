"""Which requests may speculate: the file, the first match, and uncertain meaning target-only."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from rule_receipts import receipt

from speccheck.client import Observation, make_receipt
from speccheck.config import load_rollout, package_dir
from speccheck.eligibility import (
    KNOWN_FEATURES,
    Door,
    Eligibility,
    Facts,
    When,
    decide,
    decide_at_best,
    enforce,
    facts_of,
    features_of,
    load_eligibility,
    policy_version,
)
from speccheck.errors import UsageError
from speccheck.measure import used_options
from speccheck.records import (
    Arm,
    ArmDescription,
    Outcome,
    PlannedRequest,
    Prompt,
    Sampler,
    Stage,
    to_json,
)

FILE = """\
version: 1
rules:
  - name: long
    when: {route: chat, prompt_tokens: {at_least: 4096}}
    use: target_only
    reason: TPOT p95 +43%
  - name: calm
    when:
      route: [chat, support]
      temperature: {at_most: 0}
      features: {only: [stop]}
      concurrency: {at_most: 16}
    use: speculate
    k: 2
    reason: e2e 0.7
"""

KNOWN = Facts(
    route="chat",
    prompt_tokens=100,
    temperature=0.0,
    features=frozenset(),
    concurrency=4,
)


def load(tmp_path: Path, text: str, **how) -> Eligibility:
    path = tmp_path / "eligibility.yaml"
    path.write_text(text, encoding="utf-8")
    return load_eligibility(path, **how)


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("prompt_tokens", "promt_tokens", 4, "did you mean 'prompt_tokens'"),
        ("at_least: 4096", "at_leest: 4096", 4, "did you mean 'at_least'"),
        ("{at_least: 4096}", "{}", 4, "a bound is needed"),
        ("{at_least: 4096}", "{at_least: 9, below: 9}", 4, "nothing lies between"),
        ("{at_least: 4096}", "{at_least: 9, above: 9}", 4, "two lower bounds"),
        ("{at_least: 4096}", "{at_least: many}", 4, "valid number"),
        ("{at_least: 4096}", "{at_least: .nan}", 4, "finite"),
        ("use: target_only", "use: off", 5, "speculate"),
        ("use: target_only", "use: target_only\n    k: 2", 3, "k means nothing"),
        ("name: calm", "name: long", 2, "two are called 'long'"),
        ("k: 2", "k: 0", 14, "greater than or equal to 1"),
        ("{only: [stop]}", "{only: [stop], any_of: [n]}", 11, "any_of or only"),
        ("{only: [stop]}", "{any_of: []}", 11, "at least one feature"),
        ("{only: [stop]}", "{only: [stopp]}", 11, "did you mean 'stop'"),
        ("[chat, support]", "[chat, suport]", 9, "did you mean 'support'"),
        ("route: chat", "route: []", 4, "at least 1 item"),
        ("version: 1", "version: 2", 1, "Input should be 1"),
    ],
)
def test_a_broken_policy_is_an_error_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    """A typo never turns into a rule that matches something else."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, FILE.replace(old, new), routes=["chat", "support"])
    assert f"eligibility.yaml:{line}:" in str(caught.value)
    assert words in str(caught.value)


def test_a_corpus_may_name_features_of_its_own(tmp_path: Path) -> None:
    """A feature that only the corpus knows is known; one that nobody knows is not."""
    text = FILE.replace("[stop]", "[stop, house_style]")
    assert load(tmp_path, text, features=["house_style"])
    with pytest.raises(UsageError, match="house_style"):
        load(tmp_path, text)


def test_the_packaged_policy_keeps_protected_traffic_off(tmp_path: Path) -> None:
    """What `speccheck init` writes: protected traffic target-only, the rest as before."""
    policy = load_eligibility(package_dir("rules") / "eligibility.yaml")
    assert not decide(policy, Facts(priority="protected")).speculates
    assert decide(policy, Facts(priority="normal")).speculates
    assert not decide(policy, Facts()).speculates, "a priority that is not known may be protected"


def test_the_commented_examples_of_the_packaged_policy_are_rules(tmp_path: Path) -> None:
    """What a user takes out of the comments loads."""
    text = (package_dir("rules") / "eligibility.yaml").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if line.startswith("  #")]
    lines = [line.replace("  #", "", 1) for line in kept if "Conditions" not in line]
    lines = [line[1:] for line in lines if line.startswith((" - ", "   "))]
    body = "\n".join(f"  {line}" for line in lines)
    policy = load(tmp_path, f"rules:\n{body}\n", routes=["support"])
    assert [rule.name for rule in policy.rules] == ["short and calm", "no min_p"]
    assert set(policy.rules[0].when.conditions) == set(When.model_fields) - {"priority"}


def test_the_policy_version_covers_the_file(tmp_path: Path) -> None:
    """Another limit is another version; another comment is not; no policy is the rollout's own."""
    path = tmp_path / "rollout.yaml"
    path.write_text("name: x\nspeculation: {method: ngram}\nroutes: [{name: chat}]\n")
    rollout = load_rollout(path)
    one = policy_version(rollout, load(tmp_path, FILE))
    assert one == policy_version(rollout, load(tmp_path, f"# a comment\n{FILE}"))
    assert one != policy_version(rollout, load(tmp_path, FILE.replace("16", "17")))
    assert policy_version(rollout, None) == rollout.policy_version != one


# --- one request --------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    """Rules are read from the top; what none matches stays on target-only."""
    policy = load(tmp_path, FILE)
    yes = decide(policy, KNOWN)
    assert (yes.use, yes.k, yes.rule, yes.number) == ("speculate", 2, "calm", 2)
    long = decide(policy, replace(KNOWN, prompt_tokens=5000))
    assert (long.use, long.rule, long.reason) == ("target_only", "long", "TPOT p95 +43%")
    busy = decide(policy, replace(KNOWN, concurrency=17))
    assert (busy.use, busy.rule, busy.number) == ("target_only", "", 0)
    assert not decide(policy, replace(KNOWN, features=frozenset({"stop", "min_p"}))).speculates


@pytest.mark.parametrize("fact", ["prompt_tokens", "temperature", "features", "concurrency"])
def test_uncertain_means_target_only(tmp_path: Path, fact: str) -> None:
    """A fact that a rule asks for and that is not known: target-only, and the reason names it."""
    choice = decide(load(tmp_path, FILE), replace(KNOWN, **{fact: None}))
    assert not choice.speculates
    assert f"{fact} is not known" in choice.reason


def test_a_number_that_is_none_is_not_known(tmp_path: Path) -> None:
    """NaN compares false with everything: it must not slip past a target-only rule."""
    policy = load(
        tmp_path,
        "rules:\n  - {name: hot, when: {temperature: {above: 0}}, use: target_only}\n"
        "  - {name: all, use: speculate}\n",
    )
    assert not decide(policy, Facts(temperature=float("nan"))).speculates


ranges = st.builds(
    lambda low, width: {"at_least": low, "at_most": low + width},
    st.integers(0, 4),
    st.integers(0, 4),
) | st.builds(lambda kind, x: {kind: x}, st.sampled_from(["above", "below"]), st.integers(1, 5))
whens = st.fixed_dictionaries(
    {},
    optional={
        "route": st.lists(st.sampled_from("abc"), min_size=1, max_size=2),
        "temperature": ranges,
        "prompt_tokens": ranges,
        "concurrency": ranges,
        "queued": ranges,
        "features": st.builds(
            lambda kind, names: {kind: sorted(names)},
            st.sampled_from(["any_of", "only"]),
            st.sets(st.sampled_from(["n", "stop", "min_p"]), min_size=1),
        ),
    },
)
policies = st.lists(
    st.tuples(whens, st.sampled_from(["speculate", "target_only"])), max_size=4
).map(
    lambda found: Eligibility.model_validate(
        {"rules": [{"name": f"r{i}", "when": w, "use": u} for i, (w, u) in enumerate(found)]}
    )
)
full_facts = st.builds(
    Facts,
    route=st.sampled_from("abc"),
    temperature=st.integers(0, 6).map(float),
    prompt_tokens=st.integers(0, 6),
    concurrency=st.integers(1, 6),
    queued=st.integers(0, 6),
    features=st.frozensets(st.sampled_from(["n", "stop", "min_p"])),
)
asked = st.sets(
    st.sampled_from(["route", "temperature", "prompt_tokens", "concurrency", "queued", "features"])
)


def matches(when: dict, facts: Facts) -> bool:
    """Whether a rule's conditions hold, spelled out once more from the file's own form."""
    for name, condition in when.items():
        value = getattr(facts, name)
        if name == "route":
            held = value in condition
        elif name == "features":
            held = (
                bool(value & set(condition["any_of"]))
                if "any_of" in condition
                else value <= set(condition["only"])
            )
        else:
            held = all(
                {
                    "at_least": value >= bound,
                    "above": value > bound,
                    "at_most": value <= bound,
                    "below": value < bound,
                }[kind]
                for kind, bound in condition.items()
            )
        if not held:
            return False
    return True


@settings(deadline=None)
@given(policies, full_facts)
def test_with_all_facts_known_it_is_the_first_match(policy: Eligibility, facts: Facts) -> None:
    """`decide` agrees with a search for the first rule all of whose conditions hold."""
    rules = policy.model_dump(mode="json", exclude_none=True)["rules"]
    first = next((r for r in rules if matches(r["when"], facts)), None)
    choice = decide(policy, facts)
    assert choice.use == (first["use"] if first else "target_only")
    assert choice.rule == (first["name"] if first else "")


@settings(deadline=None)
@given(policies, full_facts, asked)
def test_knowing_more_never_takes_a_yes_back(
    policy: Eligibility, facts: Facts, unknown: set[str]
) -> None:
    """What may speculate with facts missing may speculate whatever they turn out to be."""
    partly = replace(facts, **dict.fromkeys(unknown))
    choice = decide(policy, partly)
    if choice.speculates:
        assert decide(policy, facts).speculates
        rule = policy.rules[choice.number - 1]
        assert not unknown & set(rule.when.conditions), "a missing fact matched a speculate rule"


@settings(deadline=None)
@given(policies, full_facts)
def test_at_best_is_the_best_over_all_pressures(policy: Eligibility, facts: Facts) -> None:
    """`decide_at_best` says yes exactly if some concurrency and queue would."""
    free = replace(facts, concurrency=None, queued=None)
    some = any(
        decide(policy, replace(facts, concurrency=c, queued=q)).speculates
        for c in range(1, 12)
        for q in range(12)
    )
    assert decide_at_best(policy, free).speculates == some


@settings(max_examples=40, deadline=None)
@given(policies)
def test_a_policy_that_is_written_is_read_as_the_same(policy: Eligibility) -> None:
    """Through YAML and back nothing changes, the digest included."""
    text = io.StringIO()
    YAML().dump(policy.model_dump(mode="json", exclude_none=True), text)
    data = YAML(typ="safe").load(text.getvalue())
    again = Eligibility.model_validate(data)
    assert again == policy
    assert again.digest == policy.digest


def test_conditions_are_the_facts() -> None:
    """Each condition of the file asks for a fact of the same name, and each fact can be asked."""
    assert set(When.model_fields) == {field.name for field in fields(Facts)}


# --- what the stages plan -----------------------------------------------------------------------


def planned(number: int, arm: Arm = Arm.SPECULATIVE, **how) -> PlannedRequest:
    prompt = Prompt(
        f"p{number}", "json", "chat", ({"role": "user", "content": "x"},), 64, {"kind": "none"}
    )
    given = {"stage": Stage.CANARY, "sampler": Sampler(), "repeat": 0} | how
    return PlannedRequest(
        phase="step",
        arm=arm,
        route="chat",
        prompt=prompt,
        pair_id=f"step:p{number}:0",
        max_tokens=64,
        concurrency=64,
        **given,
    )


LENGTHS = {"p1": 100, "p2": 5000}


def test_a_canary_keeps_on_target_what_the_policy_keeps_off(tmp_path: Path) -> None:
    """Both arms' long prompts are marked and go to target-only; the others stay as planned."""
    plan = [planned(n, arm) for n in (1, 2) for arm in Arm]
    sent = enforce(load(tmp_path, FILE), plan, {"chat"}, LENGTHS)
    assert sent[:2] == [plan[0], replace(plan[1], fields={"k": 2})], "asked for the rule's k"
    assert [(r.arm, r.decision) for r in sent[2:]] == [(Arm.TARGET_ONLY, "target_only")] * 2
    assert sent[2].decision_reason == "eligibility policy: rule 'long': TPOT p95 +43%"
    assert receipt(1, "target_only", decision_reason=sent[2].decision_reason).kept_off
    assert not receipt(1, "target_only", decision_reason="outside the canary share").kept_off


def test_a_mirrored_copy_that_must_not_speculate_is_not_sent(tmp_path: Path) -> None:
    """In shadow the original goes out, marked, and its copy does not."""
    plan = [
        planned(2, Arm.TARGET_ONLY, stage=Stage.SHADOW),
        planned(2, mirror=True, stage=Stage.SHADOW),
    ]
    (sent,) = enforce(load(tmp_path, FILE), plan, {"chat"}, LENGTHS)
    assert sent.arm is Arm.TARGET_ONLY
    assert not sent.mirror


def test_replay_asks_both_arms_all_the_same(tmp_path: Path) -> None:
    """What the policy excludes is marked in replay and looked at on both arms."""
    plan = [planned(2, arm, stage=Stage.REPLAY) for arm in Arm]
    sent = enforce(load(tmp_path, FILE), plan, {"chat"}, LENGTHS)
    assert [r.arm for r in sent] == list(Arm)
    assert all(r.decision_reason.startswith("eligibility policy") for r in sent)


def test_a_prompt_of_unknown_length_stays_on_target(tmp_path: Path) -> None:
    """Where neither a server nor a tokenizer gave its length."""
    (sent,) = enforce(load(tmp_path, FILE), [planned(3)], {"chat"}, LENGTHS)
    assert sent.arm is Arm.TARGET_ONLY
    assert "prompt_tokens is not known" in sent.decision_reason


def test_warm_up_and_other_traffic_are_no_matter_of_the_policy(tmp_path: Path) -> None:
    """Requests that are never judged, and those of no route, stay as planned."""
    plan = [planned(2, warm_up=True), replace(planned(2), route="protected")]
    policy = load(tmp_path, FILE)
    assert enforce(policy, plan, {"chat"}, LENGTHS) == plan
    assert [Door(policy, {"chat"}, LENGTHS).send(r) for r in plan] == plan


def test_the_door_counts_what_is_in_flight(tmp_path: Path) -> None:
    """The seventeenth request at once stays on target-only; one that ends makes room."""
    door = Door(load(tmp_path, FILE), {"chat"}, {f"p{n}": 10 for n in range(40)})
    sent = [door.send(planned(n)) for n in range(18)]
    assert [r.arm for r in sent if r] == [Arm.SPECULATIVE] * 16 + [Arm.TARGET_ONLY] * 2
    assert "no rule says speculate" in sent[17].decision_reason
    door.receipt(receipt(0, "target_only"))
    assert door.send(planned(20)).arm is Arm.TARGET_ONLY, "target-only answers make no room"
    door.receipt(receipt(0, "speculative"))
    assert door.send(planned(21)).arm is Arm.SPECULATIVE
    assert door.send(planned(22)).arm is Arm.TARGET_ONLY


def test_the_door_lets_through_what_the_plan_let_through(tmp_path: Path) -> None:
    """The proposal length that the plan was given is no feature of the request."""
    policy = load(tmp_path, FILE.replace("[stop]", "[]"))
    (sent,) = enforce(policy, [planned(1)], {"chat"}, LENGTHS)
    assert sent.fields == {"k": 2}
    assert Door(policy, {"chat"}, LENGTHS).send(sent) == sent


@settings(deadline=None)
@given(
    st.builds(
        Sampler,
        temperature=st.sampled_from([0.0, 0.7]),
        top_p=st.sampled_from([1.0, 0.9]),
        top_k=st.sampled_from([0, 5]),
        min_p=st.sampled_from([0.0, 0.1]),
        seed=st.sampled_from([None, 0, 7]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, -1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.1]),
        stop=st.sampled_from([(), ("x",)]),
        logprobs=st.sampled_from([None, 0, 3]),
        response_format=st.sampled_from([None, "json_object"]),
    ),
    st.sampled_from([{}, {"logit_bias": {"1": 2}}, {"k": 3}]),
)
def test_a_request_and_its_receipt_have_the_same_features(sampler, fields) -> None:
    """What the matrix sees of a request afterwards is what the policy sees of it before."""
    request = planned(1, sampler=sampler, fields=fields)
    seen = Observation(Outcome.OK, 1, 2, completion_tokens=1)
    about = ArmDescription(Arm.SPECULATIVE, "http://x", "scripted", "m", {})
    made = make_receipt(seen, request, "run", about, "policy:1", scheduled_ns=0)
    assert features_of(request) == used_options(made)
    assert features_of(request) <= set(KNOWN_FEATURES)


def test_the_door_gives_a_pair_one_answer(tmp_path: Path) -> None:
    """Both sides of a pair, and a control at full load, are marked as the candidate would be."""
    door = Door(load(tmp_path, FILE), {"chat"}, {f"p{n}": 10 for n in range(40)})
    pair = [planned(0, arm, stage=Stage.SHADOW, mirror=arm is Arm.SPECULATIVE) for arm in Arm]
    sent = [door.send(r) for r in pair]
    assert sent == [pair[0], replace(pair[1], fields={"k": 2})]
    for n in range(1, 16):
        door.send(planned(n))
    assert door.send(planned(16, Arm.TARGET_ONLY)).decision_reason.startswith("eligibility")
    assert door.send(pair[1]) == sent[1], "decided when its other side went out"


def test_what_fell_back_keeps_its_reason(tmp_path: Path) -> None:
    """A request that a fallback moved is no matter of the policy, and takes no place."""
    door = Door(load(tmp_path, FILE), {"chat"}, LENGTHS)
    moved = replace(planned(2, Arm.TARGET_ONLY), decision="fell_back", decision_reason="fell")
    assert door.send(moved) == moved


def test_facts_of_a_planned_request(tmp_path: Path) -> None:
    """Facts come from prompt, sampler and plan; pressure is not known yet."""
    request = planned(1, sampler=Sampler(temperature=0.7, min_p=0.1, stop=("x",)))
    facts = facts_of(request, LENGTHS)
    assert facts == Facts(
        route="chat",
        task="json",
        language="en",
        priority="normal",
        prompt_tokens=100,
        output_band="medium",
        max_tokens=64,
        temperature=0.7,
        features=frozenset({"min_p", "stop"}),
    )
    assert to_json(decide(load(tmp_path, FILE), facts))["use"] == "target_only"
