"""Every difference between two pools has a sentence that says what it means."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace

from kvbridge.geometry import compat
from kvbridge.geometry.compat import changes, verdict
from kvbridge.geometry.explain import WORDS, sentence
from testing.matrix import ROWS
from testing.oracle import Shape, describe, mla
from testing.pools import build

SHAPE = Shape(key_width=32, value_width=32)


def fields_of(function: object) -> set[str]:
    """The first argument of every difference that it makes, where it is spelled out."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Difference", "_if_other")]
    return {call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)}


def test_every_field_has_words() -> None:
    spelled = fields_of(compat._other_layers) | fields_of(compat._changes)
    assert spelled >= {"codec", "scales", "layers", "kind"}
    assert set(WORDS) == spelled | {"tp_size", "pp_size", "cp_size"}


def test_every_change_of_the_matrix_has_words() -> None:
    for row in ROWS:
        for case in row.cases():
            sender, receiver = build(case.sender).pool, build(case.receiver).pool
            if type(verdict(sender, receiver)).__name__ == "Convertible":
                assert all(sentence(each, sender, receiver) for each in changes(sender, receiver))


def said(sender: Shape, receiver: Shape) -> dict[str, str]:
    pools = describe(sender), describe(receiver)
    return {each.field: sentence(each, *pools) for each in changes(*pools)}


def test_says_where_rows_are_converted_and_how_many_bytes_cross() -> None:
    fp8 = replace(SHAPE, codec="fp8_e4m3")
    assert said(SHAPE, fp8)["codec"] == (
        "rows are quantized at the sender; 32 bytes of a row cross, 64 there and 32 here; "
        "off by at most |x|/16 + s/1024, saturating at 448 s"
    )
    assert said(fp8, SHAPE)["codec"] == (
        "rows are converted at the receiver; 32 bytes of a row cross, 32 there and 64 here"
    )  # fmt: skip
    assert said(mla("fp8_ds_mla"), mla())["codec"] == (
        "rows are converted at the sender; 1152 bytes of a row cross, 656 there and 1152 here"
    )


def test_says_which_tokens_travel() -> None:
    assert said(SHAPE, replace(SHAPE, kinds=("sliding",), window=512))["kind"] == (
        "only the last 512 tokens of these layers travel"
    )
    split = replace(SHAPE, cp_size=8)
    assert "1/8" in said(SHAPE, split)["cp_size"] and "1/8" in said(split, SHAPE)["cp_size"]


def test_says_by_how_much_requantizing_is_off() -> None:
    int8 = replace(SHAPE, codec="int8", scales={"k": (2.0,), "v": (2.0,)})
    expected = "requantized to the receiver's scales; off by at most s/2, saturating at 127 s"
    assert said(replace(SHAPE, codec="int8"), int8) == {"scales": expected}
