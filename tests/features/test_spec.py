"""FeatureSpec: sizes, order and refusals."""

import pytest

from ace_learn.features import SCALARS, FeatureSpec
from ace_learn.speculation.drafters import DraftStates


def test_sizes_and_fixed_order() -> None:
    spec = FeatureSpec(sources=("scalars", "target_last", "target_aux"), hidden_size=5, aux_layers=(1, 4, 6))
    assert spec.sources == ("target_last", "target_aux", "scalars")
    assert len(SCALARS) == 7
    assert spec.size == 5 + 15 + 7
    assert [spec.subset([source]).size for source in spec.sources] == [5, 15, 7]
    assert spec.subset(["scalars", "target_last"]).sources == ("target_last", "scalars")


def test_json_round_trip() -> None:
    spec = FeatureSpec(sources=("target_aux", "scalars"), hidden_size=5, aux_layers=(1, 4))
    assert FeatureSpec.from_json(spec.to_json()) == spec
    assert "draft" not in spec.to_json()


def test_states_of_a_drafter() -> None:
    states = DraftStates(size=6, delay=5, drafter="abc")
    spec = FeatureSpec(sources=("draft", "scalars"), hidden_size=5, aux_layers=(), draft=states)
    assert spec.size == 6 + 7
    assert FeatureSpec.from_json(spec.to_json()) == spec
    assert spec.subset(["draft"]).draft == states
    assert spec.subset(["scalars"]).draft is None
    odds = FeatureSpec(sources=("acceptance", "draft"), hidden_size=5, aux_layers=(), draft=states)
    assert odds.sources == ("draft", "acceptance")
    assert odds.size == 6 + 3
    assert odds.subset(["acceptance"]).draft == states
    with pytest.raises(ValueError, match="go together"):
        FeatureSpec(sources=("scalars",), hidden_size=5, aux_layers=(), draft=states)
    with pytest.raises(ValueError, match="K >= 1 draft tokens, not 0"):
        DraftStates(size=6, delay=1, drafter="abc")


@pytest.mark.parametrize(
    ("sources", "aux_layers", "message"),
    [
        (["draft"], [1], "go together"),
        (["logits"], [1], "one or more of target_last, target_aux, scalars"),
        ([], [1], "one or more"),
        (["scalars", "scalars"], [1], "each once"),
        (["target_aux"], [], "needs aux_layers"),
    ],
)
def test_wrong_specs_are_refused(sources: list[str], aux_layers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureSpec.from_json({"sources": [*sources], "hidden_size": 4, "aux_layers": [*aux_layers]})


def test_subset_names_both_sides() -> None:
    spec = FeatureSpec(sources=("scalars",), hidden_size=4, aux_layers=())
    with pytest.raises(ValueError, match="hold scalars but not target_last"):
        spec.subset(["target_last"])
