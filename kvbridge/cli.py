"""The `kvbridge` command. In the base install it can still say which packages a command needs."""

from __future__ import annotations

import signal
import sys

from .commands.console import write_reasons

EXTRAS = {"aiohttp": "proxy", "opentelemetry": "otel"}
EXTRA = "this needs the packages of the {0}: pip install 'kvbridge[{0}]' (missing: {1})"


def main() -> None:
    """Run what the command line says.

    Exit codes: 0 done; 1 failed, with the reason on stderr; 2 the command line or a setting has to change; 3 the
    agent's data plane was stuck.
    """
    if sys.argv[1:2] == ["agent"]:  # before the slow imports: a reload while it starts must not end it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"kvbridge {version('kvbridge')}")
        return
    try:
        from .commands import app

        app.command()(prog_name="kvbridge")
    except ModuleNotFoundError as error:
        reason = missing(error)
        if sys.argv[1:2] == ["plan"] and "--json" in sys.argv:
            write_reasons(code="missing_package", reasons=[reason])
        sys.exit(reason)


def missing(error: ModuleNotFoundError) -> str:
    """The message for the operator. Raises the error again if a module of ours is missing: that is a bug."""
    if error.name is None or error.name.partition(".")[0].startswith("kvbridge"):
        raise error
    extra = EXTRAS.get(error.name.partition(".")[0], "agent")
    return f"kvbridge: {EXTRA.format(extra, error.name)}"


if __name__ == "__main__":
    main()
