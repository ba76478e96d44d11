"""``hashtap`` and ``python -m hashtap``."""

import sys


def main() -> None:
    """Run the command line; exits with its status."""
    try:
        from hashtap.cli import run
    except ModuleNotFoundError as error:
        if (error.name or "hashtap").partition(".")[0] == "hashtap":
            raise
        print(f"hashtap: the command line needs {error.name}: pip install 'hashtap[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
