"""The type of free-form fields in recipes."""

from typing import TYPE_CHECKING, TypeAlias

from ace_learn.contracts import JSON

if TYPE_CHECKING:
    JsonObject: TypeAlias = dict[str, JSON]
else:
    # jsonargparse keeps the values of a bare dict as they are. A text in a dict[str, object] it reads as YAML again,
    # so that the pattern "[A-D]" becomes a list; `ace_learn.cli` refuses configs that hold one.
    JsonObject = dict
