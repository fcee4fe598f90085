"""Tells the stories of many cases, one after the other in one world; a world where one went wrong is given up."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from .cases import Case, tell
from .processes import Nursery
from .world import World


class Runner:
    """One world at a time. Survivors of one story are in the next: what leaks, adds up and shows."""

    def __init__(self, nursery: Nursery | None = None) -> None:
        self._nursery = nursery or Nursery()
        self._world: World | None = None

    def tell(self, case: Case) -> str:
        world = self.world()
        try:
            return tell(world, case)
        except BaseException:
            self._world = None
            world.close()
            raise

    def world(self) -> World:
        if self._world is not None:
            return self._world
        self._world = world = World(Path(tempfile.mkdtemp(prefix="kvbridge-faults-")), self._nursery)
        try:
            world.meet()
        except BaseException:
            self._world = None
            world.close()
            raise
        return world

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._world is not None:
            self._world.close()
            if kind is None:
                shutil.rmtree(self._world.folder)
        self._nursery.close()
