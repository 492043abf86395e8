"""Measures costs: `python -m ace_learn.bench --help`."""

from ace_learn.cli.bench import main

if __name__ == "__main__":
    main()
