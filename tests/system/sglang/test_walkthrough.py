"""The commands of SGLang's page, as they stand, on CPUs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from testing.agents import PYTHON
from tests.support.pages import block, told, why_not

PROMPT_TOKENS, ROW_BYTES = 500, LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2
UNIT_TOKENS = 64  # may move as one, the last beyond the prompt's end
RUN_S = 600  # at most; other work may leave little of the processor
CPUS, COMMON = (("docs/sglang.md", begins) for begins in ("# CPUs", "agent()"))


@pytest.mark.sglang
@pytest.mark.timeout(RUN_S + 30)
def test_the_page_carries_a_prompt_from_one_server_to_the_other(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    environments = {".venv": str(Path(PYTHON).parents[1]), ".venv-sglang": sys.prefix}
    said = told(f"{block(*CPUS)}{block(*COMMON)}kill $(jobs -p) && wait\n", tmp_path, environments, RUN_S)
    (text,) = re.findall(r'^"text": *"(.+)"$', said, re.MULTILINE)
    (moved,) = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', said, re.MULTILINE)
    assert len(set(text.split())) > 6 and 0 <= float(moved) / ROW_BYTES - PROMPT_TOKENS < UNIT_TOKENS, said
