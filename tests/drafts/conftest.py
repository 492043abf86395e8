import json

import pytest
import torch

from ace_learn.labels.build import BuildConfig, FeatureConfig, build_dataset
from ace_learn.models.target import TargetConfig
from ace_learn.tasks import TaskConfig
from tests.helpers.targets import save_tiny


@pytest.fixture(autouse=True)
def _keep_the_global_generator():
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("traces")
    rows = [{"prompt": f"the sum is {i % 10}{i // 10}?", "gold": str(7 + i % 3)} for i in range(30)]
    table = folder / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_dataset(
        BuildConfig(
            target=TargetConfig(model=str(model), device="cpu"),
            task=TaskConfig(name="table", path=table, contract={"kind": "boxed"}, gold_column="gold", instruct=False),
            output=folder / "dataset",
            splits={"train": 18, "validation": 6, "test": 6},
            features=FeatureConfig(rows="all"),
            max_new_tokens=60,
            max_answer_tokens=20,
            batch_size=30,
            shard_size=15,
        )
    )
    return folder / "dataset"
