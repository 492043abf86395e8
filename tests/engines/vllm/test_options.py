import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.contracts import Contract, Integer
from ace_learn.engines.vllm.options import KEYS, MAX_CONTRACT, read_options, sampling_of
from ace_learn.engines.vllm.settings import Settings
from ace_learn.exit import ExitPolicy, ScoreModel

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
SCORE = ExitPolicy(
    predicate="score",
    score=ScoreModel(signals=("confidence", "remaining"), weights=(1.0, -1.0), bias=0.0, threshold=0.8),
    patience=2,
    min_thinking_tokens=16,
    certificate={
        "sampling": {**SAMPLING, "seed": 3},
        "grid": [{"score": 0.99}, {"score": 0.9}, {"score": 0.8}, {"score": 0.5}],
        "certified": [0, 1, 2],
    },
)
ALL = ExitPolicy(
    predicate="all",
    thresholds={"confidence": 0.8, "remaining": 200.0},
    certificate={
        "sampling": SAMPLING,
        "grid": [{"confidence": 0.9, "remaining": 100.0}, {"confidence": 0.8, "remaining": 200.0}],
        "certified": [0, 1],
    },
)
FREE = ExitPolicy.specexit()
SERVER = Settings(head="head", contracts={"number": {"kind": "integer", "minimum": 0}})
ON = {"ace_enabled": True}


def read(extra_args, settings=SERVER, policy=SCORE, request_id="r", **kwargs):
    return read_options(extra_args, settings, policy, request_id=request_id, **kwargs)


@pytest.mark.parametrize("extra_args", [None, {}, {"other": object()}, {"ace_enabled": False}], ids=str)
def test_who_does_not_ask_gets_nothing(extra_args):
    options = read(extra_args)
    assert not options.exits
    assert not options.shadow
    assert not options.certified
    assert options.contract is None
    assert options.policy == ExitPolicy.never()


@pytest.mark.parametrize("value", [True, 1, "true", "True"], ids=repr)
def test_who_asks_gets_the_servers_policy(value):
    options = read({"ace_enabled": value})
    assert options.exits
    assert options.certified
    assert options.policy is SCORE


def test_exits_may_be_the_servers_default():
    always = Settings(head="head", exits="always")
    assert read(None, always).exits
    assert not read({"ace_enabled": 0}, always).exits


def test_a_server_without_a_head_takes_contracts_alone():
    bare = Settings(contracts={"number": {"kind": "integer"}})
    options = read({"ace_contract": "number"}, bare, None)
    assert not options.exits
    assert options.contract == Integer()
    with pytest.raises(ValueError, match="ace_enabled: this server has no head folder"):
        read(ON, bare, None)


def test_overrides_make_the_rule_more_careful_and_lose_the_certificate():
    options = read(ON | {"ace_patience": 3, "ace_min_thinking_tokens": 64, "ace_threshold": 0.9})
    assert (options.policy.patience, options.policy.min_thinking_tokens) == (3, 64)
    assert options.policy.score.threshold == 0.9
    assert options.policy.certificate is None
    assert not options.certified


def test_an_override_that_changes_nothing_keeps_the_certificate():
    options = read(ON | {"ace_patience": 2, "ace_min_thinking_tokens": 16, "ace_threshold": 0.8})
    assert options.policy is SCORE
    assert options.certified


@pytest.mark.parametrize(
    "value",
    ['{"confidence": 0.9, "remaining": 100}', {"remaining": 100, "confidence": 0.9}],
    ids=["text", "object"],
)
def test_a_policy_of_several_thresholds_takes_a_point(value):
    policy = read(ON | {"ace_threshold": value}, policy=ALL).policy
    assert policy.thresholds == {"confidence": 0.9, "remaining": 100.0}
    assert list(policy.thresholds) == ["confidence", "remaining"]


def test_without_a_certificate_any_threshold_goes_and_nothing_is_certified():
    asked = json.dumps({"confidence": 0.5, "progress": 0.1, "remaining": 500})
    options = read(ON | {"ace_threshold": asked}, policy=FREE)
    assert options.policy.thresholds == {"confidence": 0.5, "progress": 0.1, "remaining": 500.0}
    assert not options.certified
    assert not read(ON, policy=FREE).certified


def test_the_certificate_is_about_its_sampling_alone():
    assert read(ON, sampling=SAMPLING).certified
    assert not read(ON, sampling=SAMPLING | {"temperature": 0.7}).certified
    assert not read(ON, sampling=SAMPLING | {"min_p": 0.1}).certified
    greedy = SCORE.with_certificate(SCORE.certificate | {"sampling": SAMPLING | {"temperature": 0.0}})
    assert read(ON, policy=greedy, sampling={"temperature": 0.0, "top_k": 5, "top_p": 1.0}).certified
    assert not read(ON, policy=greedy, sampling=SAMPLING | {"temperature": 0.0, "presence_penalty": 1.0}).certified


def test_sampling_is_spelled_as_in_a_certificate():
    params = SimpleNamespace(
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.5,
        repetition_penalty=1.0,
    )
    assert sampling_of(params) == SAMPLING | {"frequency_penalty": 0.5}


def test_shadow_by_request_by_server_and_by_share():
    assert read(ON | {"ace_shadow": "true"}).shadow
    assert read(ON, Settings(head="head", shadow=True)).shadow
    share = Settings(head="head", shadow_fraction=0.25)
    taken = [read(ON, share, request_id=f"request-{i}").shadow for i in range(4000)]
    assert 0.22 < sum(taken) / len(taken) < 0.28  # more than four standard errors off: 1 in 20,000
    assert taken == [read(ON, share, request_id=f"request-{i}").shadow for i in range(4000)]
    assert not any(read(ON, request_id=f"request-{i}").shadow for i in range(100))
    assert all(read(ON, Settings(head="head", shadow_fraction=1.0), request_id=f"{i}").shadow for i in range(100))


@pytest.mark.parametrize(
    "value", ['{"kind": "integer", "maximum": 7}', {"kind": "integer", "maximum": 7}], ids=["text", "object"]
)
def test_a_request_may_bring_its_contract(value):
    assert read({"ace_contract": value}).contract == Contract.from_spec({"kind": "integer", "maximum": 7})


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"ace_enable": True}, r"unknown request key 'ace_enable'; did you mean ace_enabled\? \(known: ace_enabled, "),
        ({"ace_x" * 50: 1}, "unknown request key"),
        ({"ace_enabled": 2}, "ace_enabled must be true or false, not 2"),
        ({"ace_enabled": "yes"}, "ace_enabled must be true or false, not 'yes'"),
        ({"ace_enabled": 1.0}, "ace_enabled must be true or false"),
        ({"ace_enabled": None}, "ace_enabled must be true or false"),
        ({"ace_enabled": [True]}, "ace_enabled must be true or false"),
        ({"ace_enabled": 10**5000}, "not an integer of 16610 bits"),
        ({"ace_shadow": True}, "ace_shadow is not read without exits; send ace_enabled: true"),
        ({"ace_patience": 5}, "ace_patience is not read without exits"),
        (ON | {"ace_patience": 1}, "ace_patience must be from 2, the policy's own"),
        (ON | {"ace_patience": 2.0}, "ace_patience must be a whole number"),
        (ON | {"ace_patience": True}, "ace_patience must be a whole number"),
        (ON | {"ace_min_thinking_tokens": 15}, "ace_min_thinking_tokens must be from 16"),
        (ON | {"ace_min_thinking_tokens": 10**5000}, "to below 16777216, not an integer of"),
        (ON | {"ace_threshold": 0.5}, "0.5 is none of the 3 certified points .* nearest are: 0.8; 0.9; 0.99"),
        (ON | {"ace_threshold": float("nan")}, "finite number"),
        (ON | {"ace_threshold": 10**400}, "finite number"),
        (ON | {"ace_threshold": True}, "finite number"),
        (ON | {"ace_threshold": "0.9"}, "finite number"),
        (ON | {"ace_threshold": "{"}, "ace_threshold is no JSON"),
        (ON | {"ace_threshold": {"confidence": 0.9}}, "must give score as a number"),
        ({"ace_contract": "word"}, r"'word' is no name of the server's table \(known: number\)"),
        ({"ace_contract": 3}, "must be a name of the server's table or a spec as JSON text"),
        ({"ace_contract": '{"kind": "int"}'}, "ace_contract: unknown contract kind 'int'"),
        ({"ace_contract": {"kind": object()}}, "ace_contract: "),
        ({"ace_contract": "{" + " " * MAX_CONTRACT + "}"}, "at most 65536 are allowed"),
        ({"ace_contract": '{"a":' * 5000 + "1" + "}" * 5000}, "ace_contract"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_wrong_values_are_refused_by_name(extra_args, message):
    with pytest.raises(ValueError, match=message):
        read(extra_args)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, 'must give confidence, remaining as the text {"confidence": 0.5'),
        ('{"confidence": 0.9, "remaining": 200}', "none of the 2 certified points"),
    ],
)
def test_half_a_point_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        read(ON | {"ace_threshold": value}, policy=ALL)


def test_out_of_range_thresholds_are_refused_without_a_certificate():
    free = ExitPolicy(predicate="any", thresholds={"confidence": 0.8})
    assert read(ON | {"ace_threshold": 0}, policy=free).policy.thresholds == {"confidence": 0.0}
    with pytest.raises(ValueError, match=r"of confidence must be from 0 to 1, not 1\.5"):
        read(ON | {"ace_threshold": 1.5}, policy=free)


def test_overrides_of_a_rule_that_never_fires_are_refused():
    assert read(ON, policy=ExitPolicy.never()).exits
    with pytest.raises(ValueError, match="ace_patience is not read: the policy of this server's head is 'never'"):
        read(ON | {"ace_patience": 4}, policy=ExitPolicy.never())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0.9, 0.8, 20, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    extra_args=st.dictionaries(
        st.sampled_from(KEYS) | st.text(max_size=8).map("ace_".__add__), json_values, max_size=4
    ),
    exits=st.sampled_from(["asked", "always"]),
    policy=st.sampled_from([SCORE, ALL, FREE, ExitPolicy.never()]),
)
def test_any_value_is_read_or_refused_and_no_override_is_bolder(extra_args, exits, policy):
    settings = Settings(head="head", exits=exits)
    try:
        options = read(extra_args, settings, policy)
    except ValueError:
        return
    assert options == read(extra_args, settings, policy)
    assert set(extra_args) <= set(KEYS)
    if options.exits:
        assert options.policy.patience >= policy.patience
        assert options.policy.min_thinking_tokens >= policy.min_thinking_tokens
        assert options.certified == (options.policy == policy and policy.certificate is not None)
        assert (options.policy.certificate is None) or options.policy == policy
    if options.policy.score is not None:
        assert options.policy.score.threshold in (0.99, 0.9, 0.8)
