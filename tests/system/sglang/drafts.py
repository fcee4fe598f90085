"""SGLang servers that draft (EAGLE) beside some that do not: what they say, and how many drafts they accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.system.engines.drafts import MORE, SGLANG_EAGLE, write_drafted, write_eagle
from tests.system.sglang.drafting import VARIABLE
from tests.system.sglang.fleet import CONFIGS, Fleet

AT_ONCE = 24
DRAFTING = ("p16", "d32", "p16-two", "d16-two")


class Drafting(Fleet):
    """Those of DRAFTING draft with "-drafts" behind their names, and "alone" does; `plain` are up beside them."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        steps: int = 1,
        changes: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        plain: Sequence[str] = ("p16", "d32"),
    ) -> None:
        model = write_drafted(folder / "model")
        eagle = write_eagle(folder / "eagle", model, architectures=[SGLANG_EAGLE])
        flags = (
            *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(eagle)),
            *("--speculative-num-steps", str(steps), "--speculative-num-draft-tokens", str(steps + 1)),
            *("--speculative-eagle-topk", "1"),
        )
        told = {VARIABLE: "1", **(environment or {})}
        names = {"alone": "alone"} | {f"{name}-drafts": name for name in DRAFTING}
        drafting = {name: replace(CONFIGS[of], flags=flags, environment=told) for name, of in names.items()}
        start = (*plain, "p16-drafts", "d32-drafts", "alone")
        super().__init__(folder, stack, write=lambda at: at, changes=changes, others=drafting, start=start)

    def body(self, *args: Any, **more: Any) -> dict[str, Any]:
        """Without probabilities, which are not told of drafts."""
        return super().body(*args, **{"return_logprob": False, "top_logprobs_num": 0} | more)

    def many(self, receiver: str, sender: str, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """What the decoding server says, with the rooms; without a `sender`, one by itself."""
        said: list[dict[str, Any]] = []
        for at in range(0, len(prompts), AT_ONCE):
            some = prompts[at : at + AT_ONCE]
            rooms = [self.room() for _ in some]
            if sender:
                status, answers = self.both(sender, receiver, self.body(sender, some, rooms, MORE))[1]
            else:
                no = dict.fromkeys(("bootstrap_host", "bootstrap_port"))
                status, answers = self[receiver].generate(self.body(receiver, some, None, MORE, **no))
            assert status == 200, answers
            said += [answer | {"room": room} for answer, room in zip(answers, rooms, strict=True)]
        return said


def per_step(said: Sequence[dict[str, Any]]) -> float:
    """Drafts accepted in a step. The first token comes from the prefill, and one of each step is no draft."""
    steps = sum(each["meta_info"]["spec_verify_ct"] for each in said)
    return float(sum(each["meta_info"]["completion_tokens"] - 1 for each in said) / steps - 1)
