"""Which kept answer a prompt goes on from."""

from __future__ import annotations

import random

import pytest
from kvbridge_proto.common import MOST_PREFIXES, PREFIX_TOKENS
from kvbridge_proto.engine import KeptBy

from kvbridge.adapters.engine import kept
from kvbridge.adapters.engine.kept import KeptPrefix, KeptPrefixes
from kvbridge.adapters.engine.prompts import PromptDigest


def prefixes(tokens: list[int]) -> tuple[bytes, ...]:
    return PromptDigest(()).prefixes(tokens, PREFIX_TOKENS, MOST_PREFIXES)


def told(name: str, tokens: list[int]) -> KeptBy:
    return KeptBy(sender=f"tcp://{name}:1", rendezvous=name, prefixes=prefixes(tokens))


@pytest.mark.proves("T7")
def test_a_prefix_is_all_tokens_before_it_and_what_else_decides_their_kv() -> None:
    tokens = list(range(300))
    found = prefixes(tokens)
    assert len(found) == 4 and len(set(found)) == 4 and {len(each) for each in found} == {20}
    assert prefixes(tokens[:130]) == found[:2] and prefixes(tokens[:63]) == ()
    for changed in (0, 63, 64, 191):
        others = prefixes([*tokens[:changed], -1, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(found, others, strict=True)] == [i < changed // 64 for i in range(4)]
    for more in (("salt", "mine"), ("lora", "a", "b")):
        digest = PromptDigest(())
        digest.add(*more)
        assert not set(digest.prefixes(tokens, PREFIX_TOKENS, MOST_PREFIXES)) & set(found)
    assert len(PromptDigest(()).prefixes(tokens, PREFIX_TOKENS, most=3)) == 3
    assert PromptDigest(tokens[:64]).text() not in {each.hex() for each in found}


def test_the_longest_prefix_wins_and_of_equal_ones_the_latest() -> None:
    index, system = KeptPrefixes(), list(range(64))
    one, two = [*system, *range(1000, 1100)], [*system, *range(2000, 2200)]
    index.heard(told("one", one))
    index.heard(told("two", two))
    assert index.find(prefixes([*one, 7])) == KeptPrefix("one", "tcp://one:1", 2 * PREFIX_TOKENS)
    assert index.find(prefixes([*two, 7])) == KeptPrefix("two", "tcp://two:1", 4 * PREFIX_TOKENS)
    assert index.find(prefixes([*system, *[5] * 200])) == KeptPrefix("two", "tcp://two:1", PREFIX_TOKENS)
    assert index.find(prefixes([5] * 200)) is None and index.find(()) is None
    index.heard(KeptBy(sender="tcp://two:1", rendezvous="two"))
    assert "two" not in index and index.find(prefixes([*two, 7])) == KeptPrefix("one", "tcp://one:1", PREFIX_TOKENS)
    index.told_by("tcp://agent:1")
    assert not index and index.find(prefixes(one)) is None


def test_of_equal_ones_that_of_our_agents_host_wins_and_a_longer_one_elsewhere() -> None:
    index, prompt = KeptPrefixes(), list(range(200))
    index.told_by("tcp://here:7700#key")
    for name in ("here", "[", "elsewhere"):  # an agent may call itself anything
        index.heard(told(name, prompt))
    assert index.find(prefixes(prompt)) == KeptPrefix("here", "tcp://here:1", 3 * PREFIX_TOKENS)
    longer = [*prompt, *range(300)]
    index.heard(told("elsewhere", longer))
    assert index.find(prefixes(longer)) == KeptPrefix("elsewhere", "tcp://elsewhere:1", 7 * PREFIX_TOKENS)
    assert index.find(prefixes(prompt)) == KeptPrefix("here", "tcp://here:1", 3 * PREFIX_TOKENS)
    index.gone("here")
    assert index.find(prefixes(prompt)) == KeptPrefix("elsewhere", "tcp://elsewhere:1", 3 * PREFIX_TOKENS)


def test_it_finds_what_a_search_through_everything_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come, are told again, go, and the oldest is forgotten where there are too many."""
    monkeypatch.setattr(kept, "MOST_ANSWERS", 6)
    rng = random.Random(7)
    for _ in range(60):
        index, there = KeptPrefixes(), dict[str, list[int]]()
        for step in range(60):
            name = f"{rng.randrange(9)}"
            tokens = [each for _ in range(rng.randrange(1, 5)) for each in [rng.randrange(2)] * PREFIX_TOKENS]
            there.pop(name, None)
            if rng.random() < 0.7:
                if len(there) >= 6:
                    del there[next(iter(there))]
                there[name] = tokens
                index.heard(told(name, tokens))
            else:
                index.gone(name)
            prompt = [each for _ in range(5) for each in [rng.randrange(2)] * PREFIX_TOKENS]
            common = {name: _common(prompt, tokens) for name, tokens in there.items()}
            found, longest = index.find(prefixes(prompt)), max(common.values(), default=0)
            if found is not None:
                assert common[found.rendezvous] >= found.tokens, step
            unique = [name for name, length in common.items() if length == longest > 0]
            if len(unique) == 1:
                assert found == KeptPrefix(unique[0], f"tcp://{unique[0]}:1", longest)
            assert bool(index) == bool(there)


def _common(prompt: list[int], tokens: list[int]) -> int:
    same = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), len(tokens))
    return same // PREFIX_TOKENS * PREFIX_TOKENS
