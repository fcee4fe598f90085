"""An agent that logs for which pulls it would compile kernels. On the processor there are none to compile."""

from __future__ import annotations

import logging
from typing import Any

from kvbridge.cli import main
from kvbridge.device.copier import CpuBlockCopier


class Warming(CpuBlockCopier):
    def warm_pull(self, sender: Any, theirs: Any, pool: Any, ours: Any, has_digest: bool) -> None:
        logging.getLogger("kvbridge.test").info("warm pull: own=%s digest=%s", sender is pool, has_digest)


if __name__ == "__main__":
    CpuBlockCopier.warm_pull = Warming.warm_pull
    main()
