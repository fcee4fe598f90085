"""Judges a PromQL expression by the metrics that are served: its names, labels and values must be theirs. Pure."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as promql

from tests.support.served_metrics import of_process, of_proxy, series, values

TARGET = frozenset({"instance", "job"})  # labels that Prometheus gives to all that it scrapes
SERIES = (
    series()
    | of_proxy()
    | of_process()
    | {
        "up": frozenset(
            {"namespace", "pod"}
        ),  # Prometheus makes it of each target; these are the Prometheus operator's
        "kube_deployment_spec_replicas": frozenset({"namespace", "deployment"}),  # of kube-state-metrics
        "kube_statefulset_replicas": frozenset({"namespace", "statefulset"}),
    }
)
SETS = ("and", "or", "unless")


class Misnamed(Exception):
    """The expression is about something that no agent serves."""


def parsed(expr: str) -> Any:
    try:
        return promql.parse(expr)
    except ValueError as error:
        raise Misnamed(f"{error}: {expr}") from None


def selectors(expr: Any) -> list[Any]:
    """Of a parsed expression, the selectors of series."""
    if isinstance(expr, promql.VectorSelector):
        return [expr]
    if isinstance(expr, promql.MatrixSelector):
        return [expr.vector_selector]
    parts = [getattr(expr, name, None) for name in ("lhs", "rhs", "expr", "param")]
    return [found for part in [*parts, *getattr(expr, "args", ())] if part is not None for found in selectors(part)]


def labels(
    expr: Any, variables: frozenset[str] = frozenset(), jobs: frozenset[str] = frozenset()
) -> frozenset[str] | None:
    """Which labels the result of a parsed expression has; None if it is one number. Raises Misnamed.

    `variables` are the dashboard's, which stand for values.
    """

    def of(part: Any) -> frozenset[str] | None:
        return labels(part, variables, jobs)

    match expr:
        case promql.NumberLiteral() | promql.StringLiteral():
            return None
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return of(expr.expr)
        case promql.VectorSelector():
            return _selected(expr, variables, jobs)
        case promql.MatrixSelector():
            return _selected(expr.vector_selector, variables, jobs)
        case promql.Call():
            (found,) = [each for each in map(of, expr.args) if each is not None]
            if expr.func.name == "absent":
                return frozenset()
            if expr.func.name == "histogram_quantile":
                _have(found, ["le"], expr)
                return found - {"le"}
            return found
        case promql.AggregateExpr():
            return _aggregated(of(expr.expr) or frozenset(), expr)
        case promql.BinaryExpr():
            return _joined(of(expr.lhs), of(expr.rhs), expr)
    raise Misnamed(f"nothing is known of a {type(expr).__name__}: {expr.prettify()}")


def _selected(selector: Any, variables: frozenset[str], jobs: frozenset[str]) -> frozenset[str]:
    if selector.name not in SERIES:
        raise Misnamed(f"no agent has {selector.name}")
    found = SERIES[selector.name] | TARGET
    for matcher in selector.matchers.matchers:
        _have(found, [matcher.name], selector)
        known = {"job": jobs, "instance": frozenset()}.get(matcher.name, values(selector.name, matcher.name))
        is_pattern = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
        for said in matcher.value.split("|") if is_pattern else [matcher.value]:
            if said.startswith("$") and is_pattern:  # many agents may be chosen
                if said.strip("${}") not in variables:
                    raise Misnamed(f"the dashboard has no variable {said}")
            elif known is not None and said not in known:
                raise Misnamed(f"{matcher.name} of {selector.name} is never {said}")
    return found


def _aggregated(found: frozenset[str], expr: Any) -> frozenset[str]:
    if expr.modifier is None:
        return frozenset()
    _have(found, expr.modifier.labels, expr)
    by = frozenset(expr.modifier.labels)
    return by if expr.modifier.type == promql.AggModifierType.By else found - by


def _joined(left: frozenset[str] | None, right: frozenset[str] | None, expr: Any) -> frozenset[str] | None:
    """Two vectors are joined by the labels that they have in common, which must be all, or those that it names."""
    if left is None or right is None:
        return right if left is None else left
    if str(expr.op) == "or":  # it takes both, whatever matches
        return left & right
    matching = expr.modifier and expr.modifier.matching
    if matching:
        _have(left & right, matching.labels, expr)
        named = frozenset(matching.labels)
        is_on = matching.type == promql.LabelModifierType.Include
        apart = frozenset() if is_on else (left ^ right) - named
        kept = named if is_on else left - named
    else:
        apart, kept = left ^ right, left
    if apart:
        raise Misnamed(f"nothing matches, one side alone has {', '.join(sorted(apart))}: {expr.prettify()}")
    return left if str(expr.op) in SETS else kept


def _have(found: frozenset[str], named: list[str], expr: Any) -> None:
    if missing := set(named) - found:
        raise Misnamed(f"no label {', '.join(sorted(missing))} in {expr.prettify()}")


def templates(text: str) -> set[str]:
    """The labels that an alert's text or a legend puts in."""
    return set(re.findall(r"\$labels\.(\w+)", text)) | set(re.findall(r"{{\s*(\w+)\s*}}", text))
