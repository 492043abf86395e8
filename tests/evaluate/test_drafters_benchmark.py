"""The benchmark of drafters: what it measures on a tiny model, and what it refuses."""

import json

import pytest

from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.speculation.drafters import SpeculationBenchmark, benchmark_speculation
from ace_learn.models.draft_files import save_draft
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.tasks import TaskConfig
from tests.helpers.drafts import random_draft
from tests.helpers.targets import save_tiny


def test_every_drafter_is_measured_beside_no_speculation(tmp_path, capsys):
    config = TargetConfig(model=str(save_tiny(tmp_path / "model")), device="cpu")
    (tmp_path / "draft").mkdir()
    target = load_target(config)
    save_draft(tmp_path / "draft", random_draft(target, "eagle3"), target.identity)
    rows = [{"prompt": f"the sum is {i}?", "gold": "7"} for i in range(4)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = benchmark_speculation(
        SpeculationBenchmark(
            output=tmp_path / "out",
            target=config,
            drafters={
                "ngram": DrafterConfig(kind="ngram"),
                "eagle3": DrafterConfig(kind="eagle3", model=str(tmp_path / "draft")),
            },
            draft_tokens=(2,),
            noised_copy=1e-4,
            task=TaskConfig(
                name="table", path=tmp_path / "table.jsonl", gold_column="gold", instruct=False,
                contract={"kind": "boxed"},
            ),
            problems=4,
            batch_size=2,
            sampling=Sampling(temperature=0.0),
            max_new_tokens=40,
        )
    )  # fmt: skip
    measured = report["drafters"]
    assert list(measured) == ["none", "ngram, K 2", "eagle3, K 2", "noised copy, K 2"]
    assert measured["none"]["tokens_per_forward"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert measured["none"]["speedup"]["value"] == 1.0
    assert measured["noised copy, K 2"]["tokens_per_forward"]["value"] > 2.5
    for name, row in measured.items():
        estimate = row["tokens_per_forward"]
        assert estimate["low"] <= estimate["value"] <= estimate["high"], name
        assert row["outputs_as_without"] == 4
        steps, accepted = sum(row["accepted_histogram"]), sum(n * c for n, c in enumerate(row["accepted_histogram"]))
        assert (steps + accepted) / steps >= estimate["value"] - 1e-9  # a commit may drop accepted tokens
    assert json.loads((tmp_path / "out" / "speculation.json").read_text()) == report
    assert (tmp_path / "out" / "provenance.json").is_file()
    table = (tmp_path / "out" / "speculation.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n|") == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": 8, "batch_size": 8}, "at least two batches"),
        ({"draft_tokens": (0,)}, "lengths >= 1"),
        ({"drafters": {"none": DrafterConfig(kind="ngram")}}, "measured anyway"),
        ({"drafters": {"x": DrafterConfig()}}, "measured anyway"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SpeculationBenchmark(**changes)
