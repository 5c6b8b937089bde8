"""Layouts by patterns over names: finds the tensors whose layout does not match their rule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.order.infer.splits import right_label
from shardviz.check.order.rules.intent import intended_text
from shardviz.dump.dump import hint_at_name, matches_pattern
from shardviz.dump.validate import mesh_of
from shardviz.errors import MeshError, ShardvizError
from shardviz.explain.finding import MOST_NAMES
from shardviz.explain.testing.assertions import (
    UnexpectedDtype,
    UnexpectedPlacement,
    UnexpectedPlainTensor,
    UnexpectedShape,
)
from shardviz.layout.notation import parse, write
from shardviz.plan.lock import read_lock
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.text import counted, folded_names, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.notation import Pattern

ANY = "any"
"""A rule that allows every layout."""


def of_lock(error: ShardAssertionError | ShardvizError, lock: Path, dump: Dump) -> Exception:
    """Return a lockfile's error, with both meshes if they differ."""
    planned, run = read_lock(lock)[0], dump.files.run.mesh
    if run is None or planned == str(mesh_of(run)):
        return error
    if isinstance(error, MeshError):
        missing = f"{lock} was written for mesh {planned}: {error.message}"
        return MeshError(missing, "name the axes as the lockfile does, or write it again: shardviz plan ... --force")
    return ShardAssertionError(f"{error}\n\n{lock} was written for mesh {planned}, and this is mesh {mesh_of(run)}")


def check_rules(dump: Dump, layouts: Mapping[str, str | None]) -> list[Finding]:
    """Return a finding for each tensor whose layout is not the intended one.

    Args:
        layouts: Layouts in the notation by pattern over names; None for any.

    Raises:
        ShardAssertionError: A parameter matches no rule, or a rule matches no tensor, and no layout is wrong.
        ShardvizError: A layout cannot be read, or does not fit the mesh or the tensor.
    """
    __tracebackhide__ = True
    rules = {pattern: ANY if text is None else text for pattern, text in layouts.items()}
    patterns = {text: _parsed(rule, text) for rule, text in rules.items() if text != ANY}
    tensors = dump.at("stamped") or dump.at("initial")
    of_params = {_rule_of(rules, name) for tensor in tensors if tensor.role != "buffer" for name in tensor.names}
    findings = [
        finding
        for tensor in tensors
        for name in tensor.names
        if tensor.role != "buffer" or _rule_of(rules, name) not in of_params
        if (text := intended_text(rules, name)) in patterns
        for finding in _compare_by(rules, tensor, name, patterns[text], text)
    ]
    if not findings:
        _check_complete(tensors, rules)
    return findings


def _parsed(rule: str, text: str) -> Pattern:
    """Read the layout of a rule; an error names the rule."""
    __tracebackhide__ = True
    try:
        return parse(text)
    except ShardvizError as error:
        raise type(error)(f"rule {rule!r}: {error.message}", error.hint) from None


def _compare_by(rules: Mapping[str, str], tensor: Tensor, name: str, pattern: Pattern, text: str) -> list[Finding]:
    """Compare a tensor with its rule; an error, such as an axis that the mesh lacks, names both."""
    __tracebackhide__ = True
    try:
        return list(_compare(tensor, name, pattern, text))
    except ShardvizError as error:
        what = f"rule {_rule_of(rules, name)!r}: {text!r} does not fit {printable(name)}"
        raise type(error)(f"{what}: {error.message}", error.hint) from None


def _check_complete(tensors: Sequence[Tensor], rules: Mapping[str, str]) -> None:
    """Check that each parameter has a rule and each rule a tensor."""
    __tracebackhide__ = True
    names = {name: tensor.role for tensor in tensors for name in tensor.names}
    by_name = {name: _rule_of(rules, name) for name in names}
    unmatched = [name for name, rule in by_name.items() if rule is None and names[name] != "buffer"]
    unused = {
        rule: [name for name in names if matches_pattern(name, rule)]
        for rule in rules
        if rule not in {*by_name.values()}
    }
    if misspelt := [rule for rule, matched in unused.items() if not matched]:
        others = f", and no rule matches {_counted_names(unmatched)}" if unmatched else ""
        nothing = "no tensors: an optimizer has none before its first step"
        existing = hint_at_name(misspelt[0], [*names]) if names else nothing
        raise ShardAssertionError(
            f"no tensor matches {listed(map(repr, misspelt), MOST_NAMES)}{others}\n"
            f"  fix       remove the rule, or correct its pattern: {existing}"
        )
    if unmatched:
        raise ShardAssertionError(
            f"no rule matches {_counted_names(unmatched)}\n"
            "  fix       add a rule, or end with {'*': None} to allow any layout for the rest"
        )
    if unused:
        rule, matched = next(iter(unused.items()))
        earlier = listed(dict.fromkeys(repr(by_name[name]) for name in matched), MOST_NAMES)
        raise ShardAssertionError(
            f"{rule!r} is never used: earlier rules match all that it does: {earlier}\n"
            "  fix       put it before them, or remove it"
        )


def _counted_names(names: Sequence[str]) -> str:
    """Return names, and how many they are if they are several."""
    shown = printable(folded_names(names, MOST_NAMES))
    return shown if len(names) == 1 else f"{counted(len(names), 'tensor')}: {shown}"


def _rule_of(rules: Mapping[str, str], name: str) -> str | None:
    return next((pattern for pattern in rules if matches_pattern(name, pattern)), None)


def _compare(tensor: Tensor, name: str, pattern: Pattern, text: str) -> Iterator[Finding]:
    """Yield a finding for each claimed layout that isn't the intended one; ranks may disagree."""
    for layout, ranks in tensor.claims.items():
        local = tensor.shards[ranks[0]].body.local_shape
        if pattern.matches(layout, tensor.dtype) if layout else _is_whole(pattern, local):
            continue
        layout_text = write(layout, tensor.dtype) if layout else f"{tensor.dtype}{list(local)}, plain"
        does = f"claim {layout_text}" if layout else "have a plain tensor"
        yield _cause_of(tensor, layout, local, pattern).finding(
            name,
            ranks,
            f"{len(ranks):,} of {len(tensor.shards):,} ranks {does}, not the intended {text}",
            claimed=layout_text,
            intended=text,
        )


def _is_whole(pattern: Pattern, shape: Sequence[int]) -> bool:
    """Whether a plain tensor of a shape matches the pattern: whole on every rank."""
    return not any(pattern.chains) and not pattern.partial and not pattern.flat and pattern.fits_shape(shape)


def _cause_of(tensor: Tensor, layout: Layout | None, local: Sequence[int], pattern: Pattern) -> Cause:
    """Return what is not as intended: the dtype, the shape, or the placements."""
    actual = write(layout) if layout else str(list(local))
    same = replace(pattern, dtype="")
    if pattern.dtype and (same.matches(layout) if layout else _is_whole(same, local)):
        return UnexpectedDtype(pattern.dtype, f"{tensor.dtype}{actual}")
    if not pattern.fits_shape(tensor.shape):
        return UnexpectedShape(actual, str(pattern), tuple(tensor.shape))
    if layout is None:
        return UnexpectedPlainTensor(actual, is_param=tensor.role == "param")
    expected = pattern.layout(layout.mesh, None if pattern.flat else tensor.shape)
    has_same_axes = [*map(set, expected.chains)] == [*map(set, layout.chains)]
    return UnexpectedPlacement(right_label(expected), actual, has_same_axes and "_StridedShard" in right_label(layout))
