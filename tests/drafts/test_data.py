import pytest
import torch

from ace_learn.drafts.data import TraceData, by_length, collate, read_traces
from ace_learn.features import FeatureStore, shard_folders
from ace_learn.labels.records import read_records
from ace_learn.signals import LEARNED
from tests.drafts.corpus import sampled_traces


def records_of(dataset, split):
    records = [r for shard in shard_folders(dataset) for r in read_records(shard / "traces.parquet")]
    return [record for record in records if record.split == split]


def test_traces_are_prompt_and_output_with_targets_at_their_tokens(dataset):
    store, records = FeatureStore(dataset), records_of(dataset, "train")
    traces, cut = read_traces(store, "train", max_tokens=512)
    assert cut == 0
    assert [trace.tokens.tolist() for trace in traces] == [[*r.prompt_ids, *r.token_ids] for r in records]
    assert [trace.prompt_length for trace in traces] == [len(r.prompt_ids) for r in records]
    labelled = 0
    for trace, record in zip(traces, records, strict=True):
        known = (~trace.targets.isnan().all(-1)).nonzero()[:, 0]
        assert record.excluded == (len(known) == 0)
        for position, boundary in enumerate(record.boundary if not record.excluded else []):
            row = trace.targets[trace.prompt_length + record.think_start + boundary]
            assert row[LEARNED.index("confidence")].item() == pytest.approx(record.boundary_confidence[position], 1e-5)
            assert row[LEARNED.index("consistency")].item() == record.probe_match_rate[position]
            labelled += 1
    assert labelled > 0


def test_long_traces_are_cut_and_long_prompts_left_out(dataset):
    store = FeatureStore(dataset)
    whole = read_traces(store, "train", max_tokens=512).traces
    longest = max(trace.prompt_length for trace in whole)
    traces, cut = read_traces(store, "train", max_tokens=longest + 2)
    assert max(len(trace.tokens) for trace in traces) == longest + 2
    assert all(len(trace.targets) == len(trace.tokens) for trace in traces)
    assert cut > 0
    with pytest.raises(ValueError, match="max_tokens"):
        read_traces(store, "train", max_tokens=4)


def test_padding_has_no_targets_and_no_length():
    traces = sampled_traces()
    batch = collate(traces)
    assert batch.lengths.tolist() == [24, 23, 22, 21]
    assert batch.tokens[3, 21:].tolist() == [0, 0, 0]
    assert batch.targets[3, 21:].isnan().all()
    torch.testing.assert_close(batch.targets[3, :21], traces[3].targets, equal_nan=True)


def test_batches_hold_every_trace_once_and_traces_of_like_length():
    lengths = torch.randint(5, 100, (101,), generator=torch.Generator().manual_seed(0))
    batches = by_length(torch.randperm(101), lengths, batch_size=4)
    assert torch.cat(batches).sort().values.tolist() == list(range(101))
    spread = [int(lengths[batch].max() - lengths[batch].min()) for batch in batches]
    assert sum(spread) / len(spread) < 25  # of about 60 in random batches


def test_the_order_is_a_function_of_the_seed():
    traces = sampled_traces()
    first, again, other = (
        [batch.tokens.tolist() for batch in TraceData(traces, traces, batch_size=1, seed=seed).train_dataloader()]
        for seed in (0, 0, 2)
    )
    assert first == again
    assert first != other
