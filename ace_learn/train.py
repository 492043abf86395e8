"""Trains a signal head: `python -m ace_learn.train --help`."""

from ace_learn.cli.train import main

if __name__ == "__main__":
    main()
