"""How much one line and one function of proxy/ may hold: a reader takes in one condition at a time."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator

import complexipy
import pytest

from tests.test_layout import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["complexipy"]
LIMIT = PYPROJECT["max-complexity-allowed"]

MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proxy").rglob("*.py"))

HOT = "runs for every item of a request: one more function is one more call of each"

# Functions above the limit, and why. It only shrinks: an entry that is no longer needed fails the test.
COMPLEX = {
    "proxy/core/apis/items.py::_canonical": HOT,
    "proxy/core/tool_calls.py::pairs_of": HOT,
    "proxy/core/conversation.py::lay_out": HOT,
    "proxy/core/apis/json_steps.py::_write": HOT,
    "proxy/core/apis/json_steps.py::_large": HOT,
}

# Lines that still hold a nested ternary, one over several lines or a dense comprehension: how many, and why.
DENSE = {}


def complex_functions() -> set[str]:
    """Every function above the limit, as ``file::function``."""
    return {
        f"{module}::{function.name}"
        for module in MODULES
        for function in complexipy.file_complexity(str(ROOT / module)).functions
        if function.complexity > LIMIT
    }


def conditions(comprehension: ast.expr) -> int:
    """How many conditions filter *comprehension*; the operands of ``and`` and ``or`` count one by one."""
    tests = [test for generator in comprehension.generators for test in generator.ifs]  # type: ignore[attr-defined]
    joined = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.BoolOp)]
    return len(tests) + sum(len(node.values) - 1 for node in joined)


def dense_expressions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and kind of every expression in *tree* that needs a second reading."""
    for node in ast.walk(tree):
        inner = [child for child in ast.walk(node) if child is not node]
        if isinstance(node, ast.IfExp):
            if node.lineno != node.end_lineno:
                yield node.lineno, "ternary over several lines"
            elif any(isinstance(child, ast.IfExp) for child in inner):
                yield node.lineno, "nested ternary"
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            names = any(isinstance(child, ast.NamedExpr) for child in inner)
            if names and conditions(node) > 1:
                yield node.lineno, "comprehension with two conditions and a walrus"


def test_no_function_is_too_complex() -> None:
    """The cognitive complexity of every function in proxy/ is within the limit, but for those listed."""
    assert complex_functions() == COMPLEX.keys()


def test_the_check_leaves_out_only_the_files_of_these_functions() -> None:
    """``complexipy``, run by itself, skips the files named above and no others."""
    assert set(PYPROJECT["exclude"]) == {name.partition("::")[0] for name in COMPLEX}


@pytest.mark.slow
def test_no_expression_is_too_dense() -> None:
    """No nested or multi-line ternary and no dense comprehension in proxy/, but for those listed."""
    found = {module: list(dense_expressions(ast.parse((ROOT / module).read_text()))) for module in MODULES}
    assert {module: len(places) for module, places in found.items() if places} == {
        module: count for module, (count, _) in DENSE.items()
    }, {module: places for module, places in found.items() if places and module not in DENSE}


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("a if b else c", []),
        ("a if b else c if d else e", ["nested ternary"]),
        ("(a if b else c) if d else e", ["nested ternary"]),
        ("(a\n if b else c)", ["ternary over several lines"]),
        ("[x for x in y if x and z]", []),
        ("[w for x in y if (w := x)]", []),
        ("[w for x in y if (w := x) and z]", ["comprehension with two conditions and a walrus"]),
        ("[w for x in y if (w := x) if z]", ["comprehension with two conditions and a walrus"]),
    ],
)
def test_the_check_sees_dense_expressions(source: str, kinds: list[str]) -> None:
    """The check tells dense expressions from plain ones."""
    assert [kind for _, kind in dense_expressions(ast.parse(source))] == kinds
