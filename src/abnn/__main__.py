"""`python -m abnn` is `abnn`."""

from abnn.cli import main

if __name__ == "__main__":
    main()
