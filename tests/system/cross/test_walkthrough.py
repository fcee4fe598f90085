"""The commands of the proxy's page, as they stand, on CPUs: SGLang prefills, vLLM decodes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from testing.agents import PYTHON
from tests.support.pages import block, told, why_not

PROMPT_TOKENS, ROW_BYTES = 500, LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2
UNIT_TOKENS = 32  # may move as one, the last beyond the prompt's end
RUN_S = 600  # at most; other work may leave little of the processor
PAGE = "docs/proxy.md"


@pytest.mark.cross
@pytest.mark.timeout(RUN_S + 30)
def test_the_page_carries_a_prompt_from_one_engine_to_the_other(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    vllm = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"]
    pythons = {".venv": PYTHON, ".venv-vllm": vllm, ".venv-sglang": f"{sys.prefix}/bin/python"}
    environments = {name: str(Path(python).parents[1]) for name, python in pythons.items()}
    script = f"{block(PAGE, '# CPUs')}{block(PAGE, 'agent()')}kill $(jobs -p) && wait\n"
    said = told(script, tmp_path, environments, RUN_S)
    (text,) = re.findall(r'^"text": *"(.+)"$', said, re.MULTILINE)
    (moved,) = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', said, re.MULTILINE)
    assert len(set(text.split())) > 6 and 0 <= float(moved) / ROW_BYTES - (PROMPT_TOKENS - 1) < UNIT_TOKENS, said
