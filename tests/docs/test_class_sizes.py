"""How large a class of the runtime may be: a class is one thing, and holds state or drives a loop over it."""

from __future__ import annotations

import ast
from typing import NamedTuple

import pytest

from support.documents import ROOT

RUNTIME = ROOT / "service/outfitter_service/runtime"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sizes(NamedTuple):
    """`methods` without dunders, `attributes` that it sets itself, `parameters` of its constructor. What a class
    inherits counts where it is written."""

    methods: int
    attributes: int
    parameters: int


MOST = Sizes(methods=15, attributes=12, parameters=8)

LARGER = {
    "Processor": "it puts its parts together: no other class knows them all",
    "Identity": "as many fields as records on the wire say of a manager",
    "Limits": "callers name the few that they change",
    "PendingCommit": "It is begun with four fields",
    "CommitOutput": "nobody passes its fields but `history`",
    "Effects": "nobody passes its fields",
}
"""The classes that are larger, and the reason, which their docstrings give in these words."""


def sizes_of(found: ast.ClassDef) -> Sizes:
    """A method with several overloads, or a property with a setter, counts once."""
    functions = [node for node in found.body if isinstance(node, FUNCTIONS)]
    methods = {node.name for node in functions if not (node.name.startswith("__") and node.name.endswith("__"))}
    fields = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    stored = {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return Sizes(len(methods), len(fields | stored), _parameters(found, functions, len(fields)))


def _parameters(found: ast.ClassDef, functions: list[ast.FunctionDef | ast.AsyncFunctionDef], fields: int) -> int:
    for function in functions:
        if function.name == "__init__":
            named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            return len(named) - 1 + (function.args.vararg is not None) + (function.args.kwarg is not None)
    made_of = " ".join(map(ast.unparse, [*found.bases, *found.decorator_list]))
    return fields if any(each in made_of for each in ("Struct", "NamedTuple", "dataclass")) else 0


def is_larger(found: ast.ClassDef) -> bool:
    return any(size > most for size, most in zip(sizes_of(found), MOST, strict=True))


def classes() -> list[ast.ClassDef]:
    trees = (ast.parse(path.read_text()) for path in sorted(RUNTIME.rglob("*.py")))
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_a_class_of_the_runtime_is_small_unless_its_docstring_says_why() -> None:
    found = classes()
    assert len(found) > 50
    docstrings = {each.name: " ".join((ast.get_docstring(each) or "").split()) for each in found if is_larger(each)}
    assert docstrings.keys() == LARGER.keys()
    assert [name for name, reason in LARGER.items() if reason not in docstrings[name]] == []


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("class A:\n def f(self): ...\n async def g(self): ...\n def __len__(self): ...", Sizes(2, 0, 0)),
        ("class A:\n @property\n def f(self): ...\n @f.setter\n def f(self, new): ...", Sizes(1, 0, 0)),
        ("class A:\n def __init__(self, a, *, b, **c):\n  self.a: int = 0\n  self.b, other.c = b", Sizes(0, 2, 3)),
        ("class A(Struct, frozen=True):\n a: int\n b: ClassVar[int] = 1\n c: str = ''", Sizes(0, 2, 2)),
    ],
)
def test_what_counts(source: str, sizes: Sizes) -> None:
    [found] = ast.parse(source).body
    assert isinstance(found, ast.ClassDef)
    assert sizes_of(found) == sizes
