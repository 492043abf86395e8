import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.engines.vllm.settings import KEY, Acceptance, Settings, settings_of
from ace_learn.exit import ExitPolicy

FULL = Settings(
    head="runs/head",
    exits="always",
    shadow_fraction=0.25,
    contracts={"number": {"kind": "integer", "maximum": 99}},
    audit_log="audit.jsonl",
    audit_log_bytes=4096,
    runtime_switch=True,
    acceptance=Acceptance(rule="cactus_exact", delta=0.1, only_in_think=True),
)


@pytest.mark.parametrize("settings", [Settings(), FULL], ids=["default", "full"])
def test_settings_survive_the_wire(settings):
    assert settings_of({KEY: json.loads(json.dumps(settings.to_json()))}) == settings


def test_what_the_object_leaves_out_has_its_default():
    assert settings_of({KEY: {}}) == Settings()
    assert settings_of({KEY: {"acceptance": {"rule": "cactus", "delta": 1}}}).acceptance.delta == 1


@pytest.mark.parametrize("config", [{}, {"other": 1}, None, 3], ids=str)
def test_a_server_without_the_key_is_not_ours(config):
    assert settings_of(config) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"hed": "x"}, "unknown setting 'hed'.*known: head"),
        ({"acceptance": {"rul": "cactus"}}, "unknown setting 'rul'"),
        ({"acceptance": 3}, "must be a JSON object"),
        ("head", "must be a JSON object"),
        ({"head": 3}, "'head' must be a string"),
        ({"head": ""}, "must not be empty"),
        ({"head": "x", "exits": "sometimes"}, "exits is 'sometimes'; known: asked, always"),
        ({"exits": "always"}, "exits is not read without head"),
        ({"shadow": True}, "shadow is not read without head"),
        ({"runtime_switch": True}, "runtime_switch is not read without head"),
        ({"head": "x", "shadow": 1}, "'shadow' must be true or false"),
        ({"head": "x", "shadow_fraction": 1.5}, "share from 0 to 1"),
        ({"head": "x", "shadow_fraction": float("nan")}, "share from 0 to 1"),
        ({"head": "x", "shadow_fraction": 10**400}, "too large"),
        ({"head": "x", "shadow": True, "shadow_fraction": 0.1}, "every request is shadowed"),
        ({"audit_log_bytes": 1 << 20}, "audit_log_bytes is not read without audit_log"),
        ({"audit_log": "x", "audit_log_files": 0}, "must be from 1"),
        ({"audit_records": -1}, "must be from 0"),
        ({"head": "x", "max_failures": 2.0}, "must be an integer"),
        ({"contracts": []}, "'contracts' must be a JSON object|must be a JSON object"),
        ({"contracts": {"": {"kind": "boxed"}}}, "cannot be called ''"),
        ({"contracts": {"{a": {"kind": "boxed"}}}, "is no JSON text"),
        ({"contracts": {"n": {"kind": "number"}}}, "contracts.n: unknown contract kind 'number'"),
        ({"acceptance": {"rule": "typical"}}, "known: standard, cactus, cactus_exact"),
        ({"acceptance": {"rule": "cactus"}}, "delta must be a positive number"),
        ({"acceptance": {"delta": 0.1}}, "not read by the rule 'standard'"),
        ({"acceptance": {"only_in_think": True}}, "not read by the rule 'standard'"),
    ],
)
def test_wrong_settings_are_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        settings_of({KEY: data})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(Settings().to_json())), value=json_values)
def test_any_value_is_read_or_refused(name, value):
    try:
        settings = settings_of({KEY: {"head": "x", name: value}})
    except ValueError:
        return
    assert settings_of({KEY: json.loads(json.dumps(settings.to_json()))}) == settings


def test_policy_lies_beside_the_head(tmp_path):
    assert Settings().policy() is None
    with pytest.raises(ValueError, match=r"holds no policy\.json"):
        Settings(head=str(tmp_path)).policy()
    (tmp_path / "policy.json").write_text(json.dumps(ExitPolicy.specexit().to_json()))
    assert Settings(head=str(tmp_path)).policy() == ExitPolicy.specexit()
