"""What makes a target model the one that a head was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from ace_learn.contracts import JSON
from ace_learn.thinking import ThinkMarkers


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Names a target model so that artifacts made with another one are refused."""

    name: str
    """Model id or folder name; informative only, not compared."""
    fingerprint: str
    """SHA-256 over the architecture and a sample of every weight."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    markers: ThinkMarkers
    tables_sha256: str
    """Hash of the boundary tables."""

    def to_json(self) -> dict[str, JSON]:
        """A JSON object that `from_json` reads."""
        data = asdict(self)
        data["markers"] = {"start": list(self.markers.start), "end": list(self.markers.end)}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, JSON]) -> TargetIdentity:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: A field is missing or has the wrong type.
        """
        try:
            markers = data["markers"]
            assert isinstance(markers, dict)
            parsed = ThinkMarkers(_ids(markers["start"]), _ids(markers["end"]))
            return cls(
                name=str(data["name"]),
                fingerprint=str(data["fingerprint"]),
                hidden_size=_int(data["hidden_size"]),
                num_layers=_int(data["num_layers"]),
                vocab_size=_int(data["vocab_size"]),
                markers=parsed,
                tables_sha256=str(data["tables_sha256"]),
            )
        except (KeyError, AssertionError, TypeError) as error:
            raise ValueError(f"not a target identity: {error!r} in {dict(data)!r}") from error

    def mismatches(self, other: TargetIdentity) -> list[str]:
        """One line per field that differs (names are not compared), naming both sides."""
        return [
            f"{field.name}: {getattr(self, field.name)!r} here, {getattr(other, field.name)!r} there"
            for field in fields(self)
            if field.name != "name" and getattr(self, field.name) != getattr(other, field.name)
        ]


def _int(value: JSON) -> int:
    assert isinstance(value, int), f"{value!r} is no integer"
    return value


def _ids(value: JSON) -> tuple[int, ...]:
    assert isinstance(value, list), f"{value!r} is no list of token ids"
    return tuple(_int(item) for item in value)
