"""FeatureSpec: sizes, order and refusals."""

import pytest

from ace_learn.features import SCALARS, FeatureSpec


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


@pytest.mark.parametrize(
    ("sources", "aux_layers", "message"),
    [
        (["draft"], [1], "one or more of target_last, target_aux, scalars"),
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
