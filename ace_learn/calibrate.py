"""Certifies an exit policy: `python -m ace_learn.calibrate --help`."""

from ace_learn.cli.calibrate import main

if __name__ == "__main__":
    main()
