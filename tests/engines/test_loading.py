"""From folders to an engine: which head, which policy, and what is said about the sampling."""

import shutil
import warnings

import pytest

from ace_learn.engines import load_engine
from ace_learn.engines.loading import build_engine
from ace_learn.engines.sampling import Sampling
from tests.helpers.records import write_head
from tests.helpers.targets import save_tiny, tiny_target

CERTIFIED = {"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5}}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_the_certified_sampling_needs_no_warning_whatever_its_seed(target, tmp_path):
    write_head(tmp_path / "head", target.identity, certificate=CERTIFIED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build_engine(target, head=tmp_path / "head", sampling=Sampling(seed=9))
        build_engine(target, head=None, sampling=Sampling(temperature=0.3))
    assert engine.policy.certificate is not None


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(temperature=0.0), r"temperature 0\.0, certified for 1\.0$"),
        (Sampling(top_k=5, top_p=0.9), r"top_k 5, certified for 0; top_p 0\.9, certified for 1\.0$"),
    ],
)
def test_another_sampling_is_warned_of_naming_both_sides(target, tmp_path, sampling, named):
    write_head(tmp_path / "head", target.identity, certificate=CERTIFIED)
    with pytest.warns(UserWarning, match=f"certificate does not hold here: {named}"):
        build_engine(target, head=tmp_path / "head", sampling=sampling)


def test_without_a_certificate_there_is_nothing_to_warn_of(target, tmp_path):
    write_head(tmp_path / "head", target.identity)
    build_engine(target, head=tmp_path / "head", sampling=Sampling(temperature=0.0))


def test_a_policy_of_another_head_is_refused_naming_both(target, tmp_path):
    own = write_head(tmp_path / "own", target.identity, certificate=CERTIFIED)
    other = write_head(tmp_path / "other", target.identity, certificate=CERTIFIED, bias=1.0)
    assert own != other
    shutil.copyfile(tmp_path / "own" / "policy.json", tmp_path / "other" / "policy.json")
    with pytest.raises(ValueError, match=f"certified with another head .*{own}.*{other}.*calibrate with this head"):
        build_engine(target, head=tmp_path / "other")


def test_by_name(tmp_path):
    save_tiny(tmp_path / "model", "qwen3")
    assert load_engine(str(tmp_path / "model"), draft_tokens=2).policy.predicate == "never"
    write_head(tmp_path / "head", tiny_target(seed=3).identity)
    with pytest.raises(ValueError, match="was trained for the target"):
        load_engine(str(tmp_path / "model"), head=tmp_path / "head")
