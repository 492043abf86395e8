"""From folders to an engine: which head, which policy, and what is said about the sampling."""

import shutil
import warnings

import pytest

from ace_learn.engines import load_engine
from ace_learn.engines.loading import build_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.speculation.drafters import DrafterConfig
from tests.helpers.records import write_head
from tests.helpers.targets import save_tiny, tiny_model, tiny_target, tiny_tokenizer

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
    engine = load_engine(str(tmp_path / "model"), drafter=DrafterConfig(kind="ngram", draft_tokens=2))
    assert engine.policy.predicate == "never"
    assert engine.num_draft_tokens == 2
    write_head(tmp_path / "head", tiny_target(seed=3).identity)
    with pytest.raises(ValueError, match="was trained for the target"):
        load_engine(str(tmp_path / "model"), head=tmp_path / "head")


def test_a_draft_model_of_another_size_and_padding(target, tmp_path):
    tiny_model("llama", layers=1, vocab_size=70).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    config = DrafterConfig(kind="draft_model", draft_tokens=3, model=str(tmp_path / "draft"))
    engine = build_engine(target, head=None, drafter=config, sampling=Sampling(seed=1))
    output = engine.generate([Request(key=0, prompt_ids=(5, 6, 3), max_new_tokens=20)])[0]
    assert output.stats.drafted > 10


def test_a_draft_model_with_another_tokenizer_is_refused_naming_both(target, tmp_path):
    tiny_model().save_pretrained(tmp_path / "draft")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<reason>"])
    tokenizer.save_pretrained(tmp_path / "draft")
    config = DrafterConfig(kind="draft_model", model=str(tmp_path / "draft"))
    both = rf"{tmp_path / 'draft'}' \(58 tokens\) and the target '{target.identity.name}' \(57 tokens\)"
    with pytest.raises(ValueError, match=rf"{both} have different tokenizers: 1 tokens differ, such as '<reason>'"):
        build_engine(target, head=None, drafter=config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ngram", "draft_tokens": 0}, "draft_tokens must be >= 1, not 0"),
        ({"kind": "draft_model"}, "needs `model`"),
        ({"kind": "ngram", "model": "x"}, "ngram reads no `model`"),
        ({"draft_tokens": 2}, "would be ignored without a drafter"),
    ],
)
def test_drafters_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig(**values)
