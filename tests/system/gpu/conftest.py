"""Tests marked `gpu` and `multi_gpu` skip, with the reason, if the machine has no GPU, or only one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and count < needed:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: needs {needed} GPUs, torch sees {count}"))
