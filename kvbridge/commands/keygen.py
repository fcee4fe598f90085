"""`kvbridge keygen`: a key pair for an agent, or one for a whole fleet."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import OperatorError
from ..transport.keys import OWNER_NAME, write_pair


def run(path: Path, name: str) -> None:
    """Write the secret key to `path`, and print the line for other agents' `peers` lists. Raises OperatorError."""
    if not OWNER_NAME.fullmatch(name):
        raise OperatorError("bad_name", f"name: got {name!r}, need up to 64 letters, digits, dots, dashes, underscores")
    public = write_pair(path)
    typer.echo(f"secret key written to {path} (mode 0600): set `key` to it", err=True)
    typer.echo("as the one key of a fleet: copy it to every host, by ssh or a secret store, 0600 there too", err=True)
    typer.echo('to fetch from other hosts, name them in `dial`: "10.0.0.0/24:7700", or "*:7700" for any', err=True)
    typer.echo("as one agent's own key: let it not leave this host. The line for everybody's `peers` list:", err=True)
    typer.echo(f"{name} {public}")
