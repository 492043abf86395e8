import json
import shlex
import sys

import pytest

from ace_learn.cli.serve import main
from ace_learn.engines.vllm import command
from ace_learn.engines.vllm.command import ServeConfig, ServedDrafter, ServedTarget, server_command
from ace_learn.engines.vllm.settings import Settings

EMBEDDED = ServedTarget(model="ace_learn/reasoner", dtype="float32")
BARE = ServeConfig(target=EMBEDDED)


def flags(config, **environment):
    """Flag -> its first value, of the command that a config makes."""
    words = server_command(config, environment)
    return {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_the_command_holds_everything_but_the_key():
    config = ServeConfig(
        target=ServedTarget(model="org/model", dtype="bfloat16", revision="abc"),
        settings=Settings(head="heads/a", contracts={"n": {"kind": "integer"}}),
        drafter=ServedDrafter(kind="eagle3", model="org/draft", draft_tokens=3),
        vllm={"max_model_len": 4096, "enforce-eager": True, "enable_prefix_caching": False, "seed": -1,
              "limit_mm_per_prompt": {"image": 0}, "cudagraph_capture_sizes": [1, 2]},
    )  # fmt: skip
    found = flags(config, VLLM_API_KEY="secret", ACE_LEARN_HOST="0.0.0.0", ACE_LEARN_PORT="81")
    assert (found["--host"], found["--port"]) == ("0.0.0.0", "81")
    assert (found["--dtype"], found["--revision"]) == ("bfloat16", "abc")
    drafter = {"method": "eagle3", "num_speculative_tokens": 3, "model": "org/draft"}
    assert json.loads(found["--speculative-config"]) == drafter
    settings = json.loads(found["--additional-config"])["ace_learn"]
    assert settings["contracts"] == {"n": {"kind": "integer"}}
    assert settings["head"].endswith("/heads/a")
    assert settings["head"].startswith("/")
    assert set(settings) == {"contracts", "head"}
    assert found["--max-model-len"] == "4096"
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--seed=-1"} <= set(found)
    assert json.loads(found["--limit-mm-per-prompt"]) == {"image": 0}
    assert "1 2" in " ".join(server_command(config, {"VLLM_API_KEY": "secret", "ACE_LEARN_HOST": "0.0.0.0"}))
    assert found["--middleware"] == "ace_learn.engines.vllm.middleware.AceEndpoints"
    assert "secret" not in shlex.join(server_command(config, {"VLLM_API_KEY": "secret"}))


def test_the_embedded_reasoner_is_served_under_its_name():
    assert flags(BARE)["--served-model-name"] == "ace_learn/reasoner"
    assert "--served-model-name" not in flags(ServeConfig(target=ServedTarget(model="org/model")))
    assert "--speculative-config" not in flags(BARE)
    assert (flags(BARE)["--host"], flags(BARE)["--port"]) == ("127.0.0.1", "8000")


@pytest.mark.parametrize(
    ("kind", "name", "folder"),
    [
        ("draft_model", "ace_learn/reasoner", "reasoner/weights"),
        ("eagle3", "ace_learn/reasoner-eagle3", "reasoner/drafter"),
    ],
)
def test_drafters_of_the_package_are_served_by_name(kind, name, folder):
    config = ServeConfig(target=EMBEDDED, drafter=ServedDrafter(kind=kind, model=name))
    assert json.loads(flags(config)["--speculative-config"])["model"].endswith(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": 81}, "vllm.port: this is said by the environment variable ACE_LEARN_PORT"),
        ({"api_key": "x"}, "VLLM_API_KEY"),
        ({"additional_config": {}}, "said by settings"),
        ({"trust_remote_code": True}, "none of the arguments that a recipe may hand on"),
        ({"middlew": "os.system"}, "none of the arguments"),
        ({"max_model_len": None}, "is null"),
        ({"api_server_count": 2}, "runtime_switch switches one API process"),
        ({"data_parallel_size": 2}, "set vllm.api_server_count to 1"),
    ],
)
def test_what_a_recipe_may_not_hand_on_is_refused(arguments, message):
    settings = Settings(head="heads/a", runtime_switch=True)
    with pytest.raises(ValueError, match=message):
        server_command(ServeConfig(target=EMBEDDED, settings=settings, vllm=arguments), {})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACE_LEARN_PORT": "0"}, "must be a port"),
        ({"ACE_LEARN_PORT": "http"}, "must be a port"),
        ({"ACE_LEARN_PORT": "65536"}, "must be a port"),
        ({"ACE_LEARN_HOST": ""}, "must be a host name"),
        ({"ACE_LEARN_HOST": "--model"}, "must be a host name"),
        ({"ACE_LEARN_HOST": "0.0.0.0"}, "opens the server to others; set VLLM_API_KEY"),
    ],
)
def test_a_bad_address_is_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        server_command(BARE, environment)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "eagle3"}, "eagle3 needs `model`"),
        ({"kind": "ngram", "model": "x"}, "ngram reads no `model`"),
        ({"draft_tokens": 2}, "ignored without a drafter"),
        ({"kind": "mtp", "draft_tokens": 0}, "must be >= 1"),
    ],
)
def test_a_drafter_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ServedDrafter(**fields)


def test_a_prediction_layer_is_the_targets_own_or_in_a_folder_of_its_own():
    assert ServedDrafter(kind="mtp").to_json() == {"method": "mtp", "num_speculative_tokens": 4}
    assert ServedDrafter(kind="mtp", model="runs/mtp").to_json()["model"] == "runs/mtp"


def test_a_dry_run_prints_the_command_alone(capsys, monkeypatch):
    monkeypatch.setattr(command.os, "execv", lambda *args: pytest.fail("it ran"))
    monkeypatch.delenv("ACE_LEARN_HOST", raising=False)
    main(["--model", "ace_learn/reasoner", "--dry_run", "true"])
    printed = shlex.split(capsys.readouterr().out)
    assert json.loads(printed[printed.index("--additional-config") + 1]) == {"ace_learn": {}}


@pytest.mark.parametrize("installed", [False, True])
def test_the_command_runs_where_vllm_is(installed, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(command, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(command.os, "execv", lambda *args: ran.append(args))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if installed:
        main(["--model", "ace_learn/reasoner"])
        assert shlex.split(capsys.readouterr().out) == ran[0][1]
        assert ran[0][0] == ran[0][1][0]
    else:
        with pytest.raises(SystemExit):
            main(["--model", "ace_learn/reasoner"])
        assert "vLLM is not installed here" in capsys.readouterr().err
        assert not ran


def test_a_plugin_list_without_this_package_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(SystemExit):
        main(["--model", "ace_learn/reasoner"])
    assert "VLLM_PLUGINS=other keeps vLLM from loading this package" in capsys.readouterr().err


def test_where_the_vllm_command_cannot_start_its_module_does(monkeypatch):
    def absent(name):
        raise command.PackageNotFoundError(name)

    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "version", absent)
    assert server_command(BARE, {})[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    monkeypatch.setattr(command, "version", lambda name: "0.32.0")
    assert "serve" in server_command(BARE, {})[:4]


def test_a_head_of_another_target_is_refused_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.os, "execv", lambda *args: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        main(["--model", "ace_learn/reasoner", "--settings.head", str(tmp_path)])
    assert "holds no finished head" in capsys.readouterr().err
