"""`python -m ace_learn.contracts check FILE`: run a file of contract cases.

Prints one line per failure (id, expected, got); a case of a kind that does not exist is one, and the last line counts
them by kind. Exit status 0: all cases came out right, 1: some did not, 2: the file cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from ace_learn.contracts.check import UnknownKind, check_case, load_cases


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ace_learn.contracts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run a file of cases, whole and in chunks")
    check.add_argument("file", help="one JSON case per line")
    arguments = parser.parse_args(argv)
    try:
        cases = load_cases(arguments.file)
        failures = [failure for case in cases for failure in check_case(case)]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(failure)
    unknown = Counter(failure.kind for failure in failures if isinstance(failure, UnknownKind))
    counts = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
    right = f"{len(cases) - len(failures)} of {len(cases)} cases right"
    print(f"{right}; not checked, for their kinds are unknown: {counts}" if unknown else right)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
