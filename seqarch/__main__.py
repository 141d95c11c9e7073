"""``python -m seqarch`` is the command ``seqarch``."""

from seqarch.cli import main

if __name__ == "__main__":
    main()
