"""`python -m atlas_lab`: the command."""

from atlas_lab.cli import main

if __name__ == "__main__":
    main()
