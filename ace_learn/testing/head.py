"""The laws of a signal head and of its folder."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.features import FeatureSpec
from ace_learn.heads import HeadCard, LoadedHead, SignalHead, load_head, save_head
from ace_learn.models.identity import TargetIdentity
from ace_learn.signals import LEARNED
from ace_learn.testing.law import RaisesNothing, holds, refuses, same
from ace_learn.thinking import ThinkMarkers

OUTPUTS = len(LEARNED)
"""Columns of a head's output."""

_REMAINING = LEARNED.index("remaining")
_PICKLE_SUFFIXES = frozenset((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib"))
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


def check_head(head: SignalHead | Path | str, *, expect: TargetIdentity | None = None, seed: int = 0) -> None:
    """Checks that a head, or a head folder, keeps the laws that every engine relies on.

    The laws: signals of any leading axes, in float32; a row gets the signals that it gets alone, also beside rows that
    are NaN; probabilities and shares are in [0, 1] and `remaining` is >= 0, all finite on features however large;
    export and load give the same numbers; another target, hidden size, marker or boundary table is refused; the folder
    holds no pickle (what training keeps in its subfolders is not looked at).

    Args:
        head: The head, or its folder.
        expect: The target that the folder must have been trained for; only with a folder.
        seed: Of the feature rows.

    Raises:
        LawError: A law does not hold; names the law, the input and both values.
        ValueError: The folder holds no head, or one of another target than the expected one.
    """
    if isinstance(head, SignalHead):
        if expect is not None:
            raise ValueError("a head alone does not know its target; give its folder to check it against `expect`")
        module, card = head, _made_up_card(head)
    else:
        folder = Path(head)
        loaded = load_head(folder, expect)
        module, card = loaded.head, loaded.card
        the_folder_holds_no_pickle(folder)
        another_target_is_refused(folder, loaded.identity)
    training = module.training
    module.eval()
    features = torch.randn(8, module.feature_size, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        shapes_follow_the_rows(module, features)
        a_row_stands_alone(module, features)
        signals_are_in_their_ranges(module, features)
        with tempfile.TemporaryDirectory() as temporary:
            export_keeps_the_numbers(module, card, Path(temporary), features)
    module.train(training)


def shapes_follow_the_rows(head: SignalHead, features: Float[Tensor, "n F"]) -> None:
    """Any leading axes, none and empty ones included, any float dtype in, float32 out.

    Raises:
        LawError: Another shape or dtype.
    """
    law = "signals have the shape of their rows, in float32"
    for rows in (features, features[0], features[:0], features.reshape(2, -1, features.shape[-1]), features.bfloat16()):
        given = f"features of shape {tuple(rows.shape)}, {rows.dtype}"
        with RaisesNothing(law, given=given):
            signals = head(rows)
        same(law, (tuple(signals.shape), signals.dtype), ((*rows.shape[:-1], OUTPUTS), torch.float32), given=given)


def a_row_stands_alone(head: SignalHead, features: Float[Tensor, "n F"]) -> None:
    """A row gets the same signals alone, in a batch, in another order, and beside a NaN row, each time.

    Raises:
        LawError: It does not.
    """
    law = "a row gets the signals that it gets alone"
    beside_nan = torch.cat([features, torch.full_like(features[:1], torch.nan)])
    ways = {
        "alone": torch.stack([head(row) for row in features]),
        "in another order": head(features.flip(0)).flip(0),
        "a second time": head(features),
        "beside a NaN row": head(beside_nan)[:-1],
    }
    expected = head(features)
    for way, signals in ways.items():
        close = torch.allclose(signals, expected, rtol=1e-4, atol=1e-5)
        holds(law, close, given=way, expected=str(expected.tolist()), got=signals.tolist())


def signals_are_in_their_ranges(head: SignalHead, features: Float[Tensor, "n F"]) -> None:
    """Probabilities and shares in [0, 1], `remaining` >= 0, all finite, on usual and on extreme features.

    Raises:
        LawError: A value is outside.
    """
    law = "signals are finite and in their ranges"
    for scale in (0.0, 1.0, 65_504.0, 1e20):
        signals = head(scale * features)
        tokens = signals[:, _REMAINING]
        shares = torch.cat([signals[:, :_REMAINING], signals[:, _REMAINING + 1 :]], dim=-1)
        inside = bool(signals.isfinite().all() and (tokens >= 0).all() and (shares >= 0).all() and (shares <= 1).all())
        expected = "shares in [0, 1] and finite tokens >= 0"
        holds(law, inside, given=f"features of size {scale:g}", expected=expected, got=signals.tolist())


def export_keeps_the_numbers(head: SignalHead, card: HeadCard, folder: Path, features: Float[Tensor, "n F"]) -> None:
    """What `save_head` writes, `load_head` reads as a head that gives the same signals, bit for bit.

    Args:
        head: The head.
        card: Its card.
        folder: An empty folder.
        features: Rows to compare on.

    Raises:
        LawError: The numbers differ, or a law of the folder is broken.
    """
    law = "export and load give the same numbers"
    with RaisesNothing(law, given=folder):
        save_head(folder, head, card)
        loaded: LoadedHead = load_head(folder, card.identity)
    expected, got = head(features), loaded.head(features)
    holds(law, torch.equal(got, expected), given=card.config, expected=str(expected.tolist()), got=got.tolist())
    the_folder_holds_no_pickle(folder)
    another_target_is_refused(folder, card.identity)


def another_target_is_refused(folder: Path, identity: TargetIdentity) -> None:
    """The head is not loaded for a target that differs in anything but its name.

    Raises:
        LawError: It is.
    """
    markers = ThinkMarkers(identity.markers.start, (*identity.markers.end, 0))
    others = (
        replace(identity, fingerprint="0" * 64 if identity.fingerprint != "0" * 64 else "1" * 64),
        replace(identity, hidden_size=identity.hidden_size + 1),
        replace(identity, markers=markers),
        replace(identity, tables_sha256="0" * 64 if identity.tables_sha256 != "0" * 64 else "1" * 64),
    )
    for other in others:
        with refuses("another target is refused", given=(folder, *identity.mismatches(other))):
            load_head(folder, other)


def the_folder_holds_no_pickle(folder: Path) -> None:
    """None of the folder's own files is a pickle or a zip of pickles, by name or by content.

    Raises:
        LawError: One is.
    """
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            start = file.read(4)
        clean = path.suffix not in _PICKLE_SUFFIXES and not start.startswith(_PICKLE_STARTS)
        holds("a head folder holds no pickle", clean, given=path, expected="JSON or safetensors", got=start)


def _made_up_card(head: SignalHead) -> HeadCard:
    """A card with which a head can be exported: all its features are the last hidden state of a made-up target."""
    identity = TargetIdentity(
        name="made up",
        fingerprint="f" * 64,
        hidden_size=head.feature_size,
        num_layers=1,
        vocab_size=8,
        markers=ThinkMarkers((1,), (2,)),
        tables_sha256="a" * 64,
    )
    spec = FeatureSpec(sources=("target_last",), hidden_size=head.feature_size, aux_layers=())
    return HeadCard(
        config=head.config, spec=spec, identity=identity, data_sha256="d" * 64, rows="boundaries", metrics=None
    )
