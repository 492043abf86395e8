"""Labelled traces written by hand, and a head folder of any target."""

from pathlib import Path

import torch

from ace_learn.artifacts import JSON, write_json
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureSpec
from ace_learn.heads import HeadCard, HeadConfig, SignalHead, save_head
from ace_learn.labels.records import TraceRecord
from ace_learn.models.identity import TargetIdentity


def make_record(**changes: object) -> TraceRecord:
    """Thinks four tokens behind a start token, with paragraph ends at the second and the fourth; answers 7."""
    values: dict[str, object] = {
        "problem": 3, "family": "sums", "split": "test", "prompt": "?", "contract": '{"kind": "integer"}', "gold": "7",
        "excluded": False, "prompt_ids": [5, 6], "token_ids": [1, 11, 12, 13, 14, 2, 30], "think_start": 1,
        "think_end": 5, "full_answer": "7", "full_correct": True, "full_tokens": 7, "no_think_answer": "3",
        "no_think_correct": False, "no_think_tokens": 1, "no_think_token_ids": [31], "boundary": [1, 3],
        "probe_answer": ["8", "7"], "probe_matches": [False, True], "probe_correct": [False, True],
        "probe_tokens": [5, 7], "probe_token_ids": [[40], [30]], "boundary_confidence": [0.5, 0.5], "first": 1,
        "stable": 1, "probe_asked": [True, True], "probe_match_rate": [0.0, 1.0],
    }  # fmt: skip
    return TraceRecord(**values | changes)


def write_head(
    folder: Path,
    identity: TargetIdentity,
    *,
    data_sha256: str = "d" * 64,
    certificate: dict[str, JSON] | None = None,
    bias: float = 0.0,
) -> str:
    """A linear head with random weights and a policy beside it; gives the hash of its weights."""
    from ace_learn.heads import load_head

    folder.mkdir()
    spec = FeatureSpec(sources=("target_last",), hidden_size=identity.hidden_size, aux_layers=())
    torch.manual_seed(4)
    head = SignalHead(HeadConfig(arch="linear"), spec.size)
    with torch.no_grad():
        head.layers[0].bias += bias
    card = HeadCard(
        config=head.config, spec=spec, identity=identity, data_sha256=data_sha256, rows="boundaries", metrics=None
    )
    save_head(folder, head, card)
    sha256 = load_head(folder).weights_sha256
    policy = ExitPolicy(predicate="any", thresholds={"consistency": 0.5})
    if certificate is not None:
        policy = policy.with_certificate({"head_sha256": sha256} | certificate)
    write_json(folder / "policy.json", policy.to_json())
    return sha256
