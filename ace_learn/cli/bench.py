"""`python -m ace_learn.bench contracts|fuzz-contracts [RECIPE.yaml]`: costs side by side in one run, and fuzzing."""

import sys
from collections.abc import Sequence

from ace_learn.cli.common import USER_ERROR, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the benchmarks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "contracts":
        _contracts(rest)
    elif command == "fuzz-contracts":
        _fuzz_contracts(rest)
    else:
        print("usage: python -m ace_learn.bench {contracts,fuzz-contracts} [RECIPE.yaml] [--help]", file=sys.stderr)
        sys.exit(0 if command in ("-h", "--help") else USER_ERROR)


def _contracts(argv: Sequence[str]) -> None:
    from ace_learn.contracts.benchmark import ContractBenchmark, benchmark_contracts

    run_command(
        ContractBenchmark,
        benchmark_contracts,
        description="What each kind of contract costs per chunk of text, and how that grows with the text.",
        resumes=False,
        argv=argv,
    )


def _fuzz_contracts(argv: Sequence[str]) -> None:
    from ace_learn.testing.fuzz import ContractFuzz, fuzz_contracts

    run_command(
        ContractFuzz,
        fuzz_contracts,
        description="Try the laws of output contracts on made-up texts.",
        resumes=False,
        argv=argv,
    )
