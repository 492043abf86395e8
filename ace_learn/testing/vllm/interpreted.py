"""`python -m ace_learn.testing.vllm.interpreted JOBS.json RESULTS.json`: cells on Model Runner V2, on a CPU."""

import sys
from pathlib import Path

from ace_learn.testing.vllm.shims import use_interpreted_v2


def main() -> None:
    """Runs the cells of a file."""
    use_interpreted_v2()
    from ace_learn.testing.vllm.cells import read_cells, run_cell, write_results

    jobs, results = map(Path, sys.argv[1:])
    write_results(results, [run_cell(cell) for cell in read_cells(jobs)])


if __name__ == "__main__":
    main()
