"""``python -m gtrace``."""

from gtrace.cli import main

if __name__ == "__main__":
    main()
