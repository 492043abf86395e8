"""Makes a labelled data set: `python -m ace_learn.build --help`."""

from ace_learn.cli.build import main

if __name__ == "__main__":
    main()
