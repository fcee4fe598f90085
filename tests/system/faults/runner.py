"""Runs the stories of many cases, one after another in one world. A world where one fails is dropped."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kvbridge.failpoints import Way
from tests.system.faults.cases import Case, tell
from tests.system.faults.world import World


class Runner:
    """One world at a time. Survivors of one story are in the next: what leaks, adds up and shows."""

    def __init__(self) -> None:
        self._world: World | None = None

    def tell(self, case: Case, is_keyed: bool = False) -> str:
        world = self.world(is_keyed, case.way)
        try:
            return tell(world, case)
        except BaseException:
            self._world = None
            world.close()
            raise

    def world(self, is_keyed: bool = False, way: Way = "slots") -> World:
        if self._world is not None and (self._world.is_keyed, self._world.way) == (is_keyed, way):
            return self._world
        self._leave()
        folder = Path(tempfile.mkdtemp(prefix="kvbridge-faults-"))
        self._world = world = World(folder, is_keyed=is_keyed, way=way)
        try:
            world.meet()
        except BaseException:
            self._world = None
            world.close()
            raise
        return world

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(is_well=kind is None)

    def _leave(self, is_well: bool = True) -> None:
        """Another world will be needed, or none; of one that went wrong the logs stay."""
        world, self._world = self._world, None
        if world is not None:
            world.close()
            if is_well:
                shutil.rmtree(world.folder)
