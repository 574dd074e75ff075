"""``struprune`` and ``python -m struprune_cli``: the command line.

While this module is loaded, importing ``struprune_plugin`` registers nothing: help and early refusals need no torch, and a command
registers by itself when it runs.
"""

import sys

sys.modules["struprune_cli"] = sys.modules[__name__]  # also where it runs as the main module


def main() -> int:
    """Run the command line and return its exit status."""
    from struprune_plugin.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
