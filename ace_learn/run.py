"""Runs a model with an exit policy: `python -m ace_learn.run --help`."""

from ace_learn.cli.run import main

if __name__ == "__main__":
    main()
