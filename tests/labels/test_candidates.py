"""A data set with the answers that its thoughts state."""

import pytest

from ace_learn.features import CANDIDATES, FeatureStore
from ace_learn.labels.build import BuildConfig, FeatureConfig, build_dataset
from ace_learn.models.target import EMBEDDED, TargetConfig
from ace_learn.tasks import TaskConfig


@pytest.mark.slow
def test_a_build_keeps_the_candidates_that_its_thoughts_state(tmp_path):
    output = build_dataset(
        BuildConfig(
            target=TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"),
            output=tmp_path / "data",
            splits={"train": 6},
            task=TaskConfig(name="reasoner", families=("chain",)),
            features=FeatureConfig(sources=("scalars", "candidates")),
        )
    )
    store = FeatureStore(output)
    assert store.spec.sources == ("scalars", "candidates")
    found = store.gather(store.rows("train"), ("candidates",))
    assert found.shape == (store.num_rows, len(CANDIDATES))
    assert 0.0 < found[:, 0].mean() < 1.0
