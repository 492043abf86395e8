"""`python -m ace_learn.bench WHAT [RECIPE.yaml]`: costs side by side in one run, proofs of parity, and fuzzing."""

import sys
from collections.abc import Callable, Mapping, Sequence

from ace_learn.cli.common import USER_ERROR, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the benchmarks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    run = _BENCHMARKS.get(command)
    if run is None:
        known = ",".join(_BENCHMARKS)
        print(f"usage: python -m ace_learn.bench {{{known}}} [RECIPE.yaml] [--help]", file=sys.stderr)
        sys.exit(0 if command in ("-h", "--help") else USER_ERROR)
    run(rest)


def _acceptance(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.speculation.features import FeatureStudy, study_features

    run_command(
        FeatureStudy,
        study_features,
        description="Which features predict acceptance, on events of real decoding; the online estimator on streams.",
        resumes=False,
        argv=argv,
    )


def _contracts(argv: Sequence[str]) -> None:
    from ace_learn.contracts.benchmark import ContractBenchmark, benchmark_contracts

    run_command(
        ContractBenchmark,
        benchmark_contracts,
        description="What each kind of contract costs per chunk of text, and how that grows with the text.",
        resumes=False,
        argv=argv,
    )


def _drafts(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.drafting import DraftStudyConfig, study_drafters

    run_command(
        DraftStudyConfig,
        study_drafters,
        description="How many tokens a verification gives with each drafter, on the same problems, by decoding them.",
        resumes=False,
        argv=argv,
    )


def _estimator(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.speculation.estimator import EstimatorBenchmark, benchmark_estimator

    run_command(
        EstimatorBenchmark,
        benchmark_estimator,
        description="Microseconds per step of the online acceptance estimator and of adaptive verification.",
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


def _hook(argv: Sequence[str]) -> None:
    from ace_learn.engines.vllm.benchmark import HookBenchmark, benchmark_hook

    run_command(
        HookBenchmark,
        benchmark_hook,
        description="What the exit hook of the vLLM plugin costs per step, beside a decode step of a small model.",
        resumes=False,
        argv=argv,
    )


def _law(argv: Sequence[str]) -> None:
    from ace_learn.testing.vllm.law import LawBenchmark, compare_laws

    run_command(
        LawBenchmark,
        compare_laws,
        description="Do drafts change the law of sampled outputs of vLLM with exits?",
        resumes=False,
        argv=argv,
    )


def _parity(argv: Sequence[str]) -> None:
    from ace_learn.testing.vllm.parity import ParityBenchmark, compare_engines

    run_command(
        ParityBenchmark,
        compare_engines,
        description="Are greedy outputs of vLLM with exits the same with any drafts, and as in the HF engine?",
        resumes=False,
        argv=argv,
    )


def _rules(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.speculation.rules import RuleStudy, study_rules

    run_command(
        RuleStudy,
        study_rules,
        description="What each acceptance rule gives in tokens per step, and takes in accuracy and fidelity.",
        resumes=False,
        argv=argv,
    )


def _serve(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.serving.bench import ServeBenchmark, bench_serve

    run_command(
        ServeBenchmark,
        bench_serve,
        description="What learned exits are worth on a vLLM server: tokens, latency, accuracy, valid answers/s.",
        resumes=False,
        argv=argv,
    )


def _speculation(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.speculation.drafters import SpeculationBenchmark, benchmark_speculation

    run_command(
        SpeculationBenchmark,
        benchmark_speculation,
        description="Tokens per forward pass of the target, and time against no speculation, for each drafter.",
        resumes=False,
        argv=argv,
    )


def _verification(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.speculation.verification import VerificationSweep, sweep_verification

    run_command(
        VerificationSweep,
        sweep_verification,
        description="Fixed draft lengths against adaptive verification, decoded here and simulated for a GPU.",
        resumes=False,
        argv=argv,
    )


_BENCHMARKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "acceptance": _acceptance,
    "contracts": _contracts,
    "drafts": _drafts,
    "estimator": _estimator,
    "fuzz-contracts": _fuzz_contracts,
    "hook": _hook,
    "law": _law,
    "parity": _parity,
    "rules": _rules,
    "serve": _serve,
    "speculation": _speculation,
    "verification": _verification,
}
