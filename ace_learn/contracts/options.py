"""One of a list of words behind a cue: what choices and labels have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ace_learn.contracts.chars import is_word_char
from ace_learn.contracts.dress import SPACES, Dress, read_closers, read_openers
from ace_learn.contracts.follow import option_stands
from ace_learn.contracts.source import Source, Step

MAX_OPTION = 256
_TEX_SPACE = re.compile(r"\\[ ,;]|~|\\q?quad(?![A-Za-z])")


class Options:
    """The legal words, longest first, and how they are recognised.

    Words of two or more characters are recognised in any case. A single letter must be written as
    given, except in brackets or a box: "(b)" is B, but the answer "a" may be an article.
    """

    def __init__(self, options: Sequence[str]) -> None:
        """Prepare `options`, which :func:`check_options` has accepted."""
        self._by_length = sorted(options, key=len, reverse=True)
        folded = [option.lower() for option in options]
        self._foldable = len(set(folded)) == len(folded)

    def canonical(self, text: str) -> str | None:
        """The option that `text` spells, in any case if that is clear."""
        text = text.strip()
        if text in self._by_length:
            return text
        if not self._foldable:
            return None
        return next((o for o in self._by_length if o.lower() == text.lower()), None)

    def read(self, source: Source, *, loose: bool) -> Step[str | None]:
        """Move over the longest option here that ends a word.

        Args:
            source: The text.
            loose: Recognise a single letter in any case, too.
        """
        for option in self._by_length:
            fold = self._foldable and (loose or len(option) > 1)
            if not (yield from source.stands(option, fold=fold)) or (yield from _goes_on(source, option)):
                continue
            source.pos += len(option)
            return option
        return None

    def read_whole(self, content: Source) -> Step[str | None]:
        """The option that a box holds, alone or at its head: "B", "(B) 12", "B. Paris"."""
        content = Source.whole(_TEX_SPACE.sub(" ", content.buf))
        dress = Dress()
        yield from content.skip(SPACES)
        yield from read_openers(content, dress)
        option = yield from self.read(content, loose=True)
        if option is None or (yield from read_closers(content, dress)) is None:
            return None
        rest = content.buf[content.pos :].strip()
        headed = dress.bracketed or rest[:1] in (")", ".", ":")
        if rest and not headed:
            return None
        return option if (yield from option_stands(content, option, self.another)) else None

    def another(self, source: Source) -> Step[bool]:
        """Read an option; whether there is one."""
        return (yield from self.read(source, loose=False)) is not None


def check_options(key: str, options: Sequence[str]) -> None:
    """Refuse options that cannot be told apart.

    Raises:
        ValueError: There is none, or one is blank, padded, too long or there twice.
    """
    if not options:
        raise ValueError(f"{key} is empty; list the legal answers")
    for option in options:
        if not option or option != option.strip() or len(option) > MAX_OPTION:
            raise ValueError(f"{key}: {option!r} must be 1 to {MAX_OPTION} characters without outer spaces")
        if options.count(option) > 1:
            raise ValueError(f"{key}: {option!r} is there twice")


def _goes_on(source: Source, option: str) -> Step[bool]:
    """Whether the word or number goes on behind `option`, which stands at the position."""
    if not is_word_char(option[-1]):
        return False
    char = yield from source.peek(len(option))
    if is_word_char(char):
        return True
    if char == "_" or (option[-1].isdigit() and char in (".", ",")):
        return is_word_char((yield from source.peek(len(option) + 1)))
    return False
