"""The size and shape of the package: figures that must not grow. `python tests/test_house.py` prints them."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = {
    # At most 66,900: 63,000, and 3,900 that were allowed for seventeen Hugging Face classes and multi-token
    # prediction, attention with windows and sinks, and decisions of long runs.
    "lines of Python": 66_800,
    "files": 330,
    "files under 60 lines": 30,
    "private module functions per 1,000 lines": 12.0,
    "private functions of at most 6 lines with one caller": 0,
    "functions over 60 lines": 0,
    "except per 1,000 lines": 6.0,
}
LEAST = {"full-line comments, %": 3.0}
LONGEST, TINY = 60, 6  # lines of a function without its docstring

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """Text of every Python file of the package, by path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "moe_exp/*.py"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}


def length(function: Function) -> int:
    """Lines of a function without decorators and docstring."""
    lines, first = function.end_lineno - function.lineno + 1, function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    return lines - (first.end_lineno - first.lineno + 1 if has_docstring else 0)


def is_private(function: Function) -> bool:
    return function.name.startswith("_") and not function.name.startswith("__")


def calls(nodes: list[ast.AST]) -> tuple[Counter[str], Counter[str]]:
    """How often each name is called in a module, and how often it is used in another way."""
    called = Counter()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called[node.func.id if isinstance(node.func, ast.Name) else node.func.attr] += 1
    used = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    used += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    return called, used - called


def tiny_functions(path: str, nodes: list[ast.AST]) -> list[str]:
    """Private functions that could stand in their only caller: short, called once, and not decorated (a
    cache, a property), abstract, handed on as a value or overriding another.
    """
    called, handed_on = calls(nodes)
    names = Counter(node.name for node in nodes if isinstance(node, Function))
    return [
        f"{path}: {node.name}"
        for node in nodes
        if isinstance(node, Function)
        and is_private(node)
        and length(node) <= TINY
        and called[node.name] == 1
        and not handed_on[node.name]
        and not node.decorator_list
        and names[node.name] == 1
        and f"super().{node.name}" not in ast.unparse(node)
    ]


def figures() -> dict[str, tuple[float, list[str]]]:
    """Each figure, and the places that it counts if a reader may want to look at them."""
    texts = sources()
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes_of = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    lines = sum(text.count("\n") for text in texts.values())
    comments = sum(line.lstrip().startswith("#") for text in texts.values() for line in text.splitlines())
    # a folder's __init__.py has to be there, with a docstring at least
    small = [path for path, text in texts.items() if text.count("\n") < 60 and "__init__" not in path]
    private = [node for tree in trees.values() for node in tree.body if isinstance(node, Function)]
    handlers = sum(isinstance(node, ast.ExceptHandler) for nodes in nodes_of.values() for node in nodes)
    tiny = [place for path, nodes in nodes_of.items() for place in tiny_functions(path, nodes)]
    long = [
        f"{path}: {node.name}, {length(node)} lines"
        for path, nodes in nodes_of.items()
        for node in nodes
        if isinstance(node, Function) and length(node) > LONGEST
    ]
    return {
        "lines of Python": (lines, []),
        "files": (len(texts), []),
        "files under 60 lines": (len(small), small),
        "private module functions per 1,000 lines": (1000 * sum(map(is_private, private)) / lines, []),
        "private functions of at most 6 lines with one caller": (len(tiny), tiny),
        "functions over 60 lines": (len(long), long),
        "except per 1,000 lines": (1000 * handlers / lines, []),
        "full-line comments, %": (100 * comments / lines, []),
    }


def test_figures_of_the_package():
    found = figures()
    too_many = {name: found[name] for name, most in MOST.items() if found[name][0] > most}
    too_few = {name: found[name] for name, least in LEAST.items() if found[name][0] < least}
    assert not too_many | too_few


if __name__ == "__main__":
    for name, (figure, places) in figures().items():
        limit = f"at most {MOST[name]:g}" if name in MOST else f"at least {LEAST[name]:g}"
        print(f"{name}: {figure:g} ({limit})", *places, sep="\n    ")
