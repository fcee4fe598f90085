"""The `kvbridge` command. Works far enough in the base install to say which packages a command still needs."""

from __future__ import annotations

import signal
import sys

from .extras import missing


def main() -> None:
    """Run what the command line says.

    Exit codes: 0 done, 1 it failed and said why, 2 only another command line or setting helps, 3 the agent's data plane
    was stuck.
    """
    if sys.argv[1:2] == ["agent"]:  # before the slow imports: a reload while it starts must not end it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"kvbridge {version('kvbridge')}")
        return
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        sys.exit(missing(error))
    app.build()(prog_name="kvbridge")


if __name__ == "__main__":
    main()
