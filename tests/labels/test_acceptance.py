"""A data set with what the signal `acceptance` is computed from."""

from pathlib import Path

import pytest
import torch

from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.signals import SignalReader
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureStore
from ace_learn.heads.config import TrainConfig
from ace_learn.heads.head import natural
from ace_learn.labels import acceptance
from ace_learn.labels.acceptance import FILE_NAME, kept_estimator
from ace_learn.labels.build import BuildConfig, FeatureConfig, build_dataset
from ace_learn.labels.records import read_records
from ace_learn.models.target import EMBEDDED, TargetConfig
from ace_learn.signals import SIGNALS
from ace_learn.speculation.adaptive import AdaptiveConfig, AdaptiveVerifier
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator
from tests.engines.test_hf import reasoner_requests

EAGLE = DrafterConfig(kind="eagle3", model="ace_learn/reasoner-eagle3", draft_tokens=3)
SAMPLED = Sampling(temperature=1.0)


def recipe(output, sources, drafter, **changes):
    fields = {"splits": {"train": 6, "test": 6}, "sampling": SAMPLED} | changes
    return BuildConfig(
        target=TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"), output=output, max_new_tokens=300,
        max_answer_tokens=30, batch_size=6, shard_size=6,
        features=FeatureConfig(sources=sources, drafter=drafter), **fields,
    )  # fmt: skip


@pytest.mark.slow
def test_the_estimator_is_fitted_once_and_kept(reasoner_target, tmp_path, monkeypatch):
    """The coefficients are those of an engine that has speculated on the requests; the next call reads the file."""
    monkeypatch.setattr(acceptance, "_TOGETHER", 2)  # so that a few requests take more than a hundred steps
    drafter = load_drafter(EAGLE, reasoner_target, SAMPLED, states_delay=EAGLE.draft_tokens + 1)
    asked = reasoner_requests(reasoner_target, 4)
    options = {"sampling": SAMPLED, "length": EAGLE.draft_tokens}
    fitted = kept_estimator(tmp_path, reasoner_target, drafter, asked, **options)
    assert fitted.num_positions == 3
    assert float(fitted.slope) != 0.5
    again = kept_estimator(tmp_path, reasoner_target, drafter, [], **options)
    assert torch.equal(again.slope, fitted.slope)
    assert torch.equal(again.intercepts, fitted.intercepts)
    estimator = AdaptiveConfig().estimator(EAGLE.draft_tokens, reasoner_target.device)
    HFEngine(
        reasoner_target, sampling=SAMPLED, drafter=drafter, num_draft_tokens=3, batch_size=2,
        verifier=AdaptiveVerifier(estimator=estimator, costs=None),
    ).generate(asked)  # fmt: skip
    assert torch.equal(estimator.slope, fitted.slope)


def test_recipes_that_could_not_be_built_are_refused():
    sources = ("scalars", "acceptance")
    with pytest.raises(ValueError, match="go together"):
        FeatureConfig(sources=sources)
    for changes in ({"sampling": Sampling(temperature=0.0)}, {"splits": {"test": 2}}):
        with pytest.raises(ValueError, match=r"set sampling\.temperature and splits\.train, or leave acceptance out"):
            recipe(Path("never"), sources, EAGLE, **changes)
    with pytest.raises(ValueError, match="let the policy read the signal acceptance"):
        TrainConfig(dataset=Path("data"), output=Path("head"), sources=sources)


@pytest.mark.slow
def test_built_replayed_and_run_live(reasoner_target, tmp_path):
    """Same traces as without the source; and live, with the kept coefficients held still, the exits of the replay."""
    data = build_dataset(recipe(tmp_path / "with", ("scalars", "acceptance"), EAGLE))
    without = build_dataset(recipe(tmp_path / "without", ("scalars",), DrafterConfig()))
    shards = [sorted(folder.glob("shards/*/traces.parquet")) for folder in (data, without)]
    traces = [[r.token_ids for path in paths for r in read_records(path)] for paths in shards]
    assert traces[0] == traces[1]
    kept, store = OnlineAcceptanceEstimator.load(data / FILE_NAME), FeatureStore(data)
    columns = store.gather(torch.arange(store.num_rows), ("acceptance",))
    assert torch.equal(columns[:, 1:].unique(dim=0), torch.stack((kept.slope, kept.intercepts[0]))[None])
    assert store.spec.draft.delay == 4

    # A shard that was lost is made anew with the same coefficients.
    before = (data / FILE_NAME).read_bytes()
    (data / "dataset.json").unlink()
    (data / "shards" / "00001" / "shard.json").unlink()
    assert torch.equal(FeatureStore(build_dataset(recipe(data, ("scalars", "acceptance"), EAGLE))).gather(
        torch.arange(store.num_rows), ("acceptance",)), columns)  # fmt: skip
    assert (data / FILE_NAME).read_bytes() == before

    reader = SignalReader(store, lambda rows: natural(rows[:, :4]), ("scalars",))
    reader.require(["acceptance"])
    rows = store.rows("test", boundaries_only=True)
    said = reader.signals(rows)[:, SIGNALS.index("acceptance")]
    bound = float(said.quantile(0.7))
    records = {r.problem: r for path in shards[0] for r in read_records(path) if r.split == "test"}
    problems = [
        Request(
            key=r.problem, prompt_ids=tuple(r.prompt_ids), contract=Contract.from_spec(r.contract),
            max_new_tokens=300, max_answer_tokens=30,
        )
        for r in records.values() if not r.excluded
    ]  # fmt: skip
    live = HFEngine(
        reasoner_target,
        sampling=SAMPLED,
        policy=ExitPolicy(predicate="all", thresholds={"acceptance": bound}),
        drafter=load_drafter(EAGLE, reasoner_target, SAMPLED, states_delay=4),
        verifier=AdaptiveVerifier(estimator=kept, costs=None),
    ).generate(problems)
    fired = 0
    for request, output in zip(problems, live, strict=True):
        record, mine = records[request.key], store.trace(rows) == request.key
        held = store.position(rows)[mine & (said > bound)].tolist()
        assert (output.exit is None) == (not held)
        if output.exit is not None:
            fired += 1
            assert output.exit.output_index == record.think_start + held[0] + 1
    assert fired >= 3
