"""`python -m toolroll`."""

from toolroll.cli.app import main

if __name__ == "__main__":
    main()
