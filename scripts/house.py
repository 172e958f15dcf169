"""A checkout → how large the house is, and how far one import, one fit and one query reach into it.

``python scripts/house.py`` prints the numbers of this checkout; ``--before FOLDER`` or a saved
``--before numbers.json`` puts an older one beside them, ``--save numbers.json`` keeps them.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}

# What a user does, each in a process of its own: the modules of the package that it loads.
ACTS = {
    "importing the classifier": "from attnknn import AttnKNNClassifier",
    "a fit": (
        "from sklearn.datasets import load_iris\n"
        "from attnknn import AttnKNNClassifier\n"
        "x, y = load_iris(return_X_y=True)\n"
        "model = AttnKNNClassifier(random_state=0).fit(x, y)"
    ),
    "the command line": (
        "import contextlib, io\nfrom attnknn import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    cli.main(['--help'])"
    ),
}
REACHED = """
import json, sys
from pathlib import Path
own = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "attnknn" and m.__file__]
print(json.dumps([len(own), sum(len(Path(m.__file__).read_text().splitlines()) for m in own)]))
"""
# Calls into the package alone: one query, after one before it has paid for every late import.
QUERY = """
import json, sys
model.predict_proba(x[:1])
package, calls, files, depth, deepest = "/attnknn/", 0, set(), 0, 0
def watch(frame, event, argument):
    global calls, depth, deepest
    if event not in ("call", "return") or package not in frame.f_code.co_filename:
        return
    depth += 1 if event == "call" else -1
    if event == "call":
        calls, deepest = calls + 1, max(deepest, depth)
        files.add(frame.f_code.co_filename)
sys.setprofile(watch)
model.predict_proba(x[:1])
sys.setprofile(None)
print(json.dumps([calls, len(files), deepest]))
"""


def code_lines(path: Path) -> int:
    """Return the lines of a file that hold code: no blanks, no comments, no docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    with path.open("rb") as handle:
        tokens = [t for t in tokenize.tokenize(handle.readline) if t.type not in SKIPPED]
    lines = (range(token.start[0], token.end[0] + 1) for token in tokens if token.string)
    return len(set().union(*lines) - words - {0})


def public_names(path: Path) -> int:
    """Return how many functions and classes without an underscore stand at the top of a module."""
    found = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(path.read_text()).body
    return sum(isinstance(node, found) and not node.name.startswith("_") for node in body)


def function_lines(path: Path) -> list[int]:
    """Return how long every function of a module is, its docstring included."""
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, found))
    return [node.end_lineno - node.lineno + 1 for node in nodes]


def run(root: Path, code: str) -> list[int]:
    """Return the last line that a program prints in a checkout, read as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"a program failed in {root}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def numbers(root: Path) -> dict[str, int]:
    """Return every number of a checkout, by what it counts."""
    package = sorted((root / "attnknn").rglob("*.py"))
    modules = [path for path in package if path.name != "__init__.py"]
    lengths = sorted(length for path in package for length in function_lines(path))
    size = {path: len(path.read_text().splitlines()) for path in package}
    found = {
        "modules (without __init__)": len(modules),
        "lines": sum(size.values()),
        "code lines": sum(map(code_lines, package)),
        "longest module": max(size.values()),
        "modules above 500 lines": sum(lines > 500 for lines in size.values()),
        "public functions and classes": sum(map(public_names, package)),
        "median function": lengths[len(lengths) // 2],
        "functions above 40 lines": sum(length > 40 for length in lengths),
    }
    for act, code in ACTS.items():
        found[f"modules by {act}"], found[f"lines by {act}"] = run(root, f"{code}\n{REACHED}")
    names = ("calls", "files", "depth")
    values = run(root, ACTS["a fit"] + "\n" + QUERY)
    found |= {f"{name} of one query": value for name, value in zip(names, values, strict=True)}
    tests = sorted((root / "tests").rglob("*.py"))
    found["test modules"] = len(tests)
    found["test lines"] = sum(len(path.read_text().splitlines()) for path in tests)
    found["lines in benchmarks and scripts"] = sum(
        len(path.read_text().splitlines())
        for folder in ("benchmarks", "scripts")
        for path in (root / folder).rglob("*.py")
    )
    return found


def table(now: dict[str, int], before: dict[str, int]) -> str:
    """Return the numbers as Markdown, an older state in the first column where there is one."""
    heads = ["", "before", "now"] if before else ["", "now"]
    lines = ["| " + " | ".join(heads) + " |", "|:--|" + "--:|" * (len(heads) - 1)]
    for name, value in now.items():
        values = ([before.get(name, "-")] if before else []) + [value]
        lines.append(f"| {name} | " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the numbers of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to measure")
    parser.add_argument("--before", type=Path, help="older checkout, or its saved numbers")
    parser.add_argument("--save", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    now, before = numbers(args.root.resolve()), {}
    if args.before:
        is_folder = args.before.is_dir()
        before = (
            numbers(args.before.resolve()) if is_folder else json.loads(args.before.read_text())
        )
    if args.save:
        args.save.write_text(json.dumps(now, indent=1) + "\n")
    print(table(now, before))


if __name__ == "__main__":
    main()
