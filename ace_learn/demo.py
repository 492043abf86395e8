"""Does the main job on the embedded reasoner: `python -m ace_learn.demo --help`."""

from ace_learn.cli.demo import main

if __name__ == "__main__":
    main()
