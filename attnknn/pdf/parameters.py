"""The parameters cell and papermill's injected one → one cell with the values that were used."""

import ast


def merged_parameters(declared: str, injected: str) -> str | None:
    """Return the parameters cell with the injected values in the place of its defaults.

    Args:
        declared: Source of the cell tagged ``parameters``; its comments stay.
        injected: Source of the cell that papermill put after it.

    Returns:
        The merged source, injected names that were not declared at its end; None where one of the
        cells holds anything but ``name = value`` in Python.
    """
    given, places = _values(injected), _values(declared)
    if given is None or places is None:
        return None
    lines = [line.encode() for line in declared.split("\n")]
    known = {name: _segment(injected, value) for name, value in given.items()}
    # From the end: what is replaced must not move what is still to come.
    for name, value in sorted(places.items(), key=lambda pair: pair[1].lineno, reverse=True):
        if name in known:
            first, last = value.lineno - 1, value.end_lineno - 1
            head, tail = lines[first][: value.col_offset], lines[last][value.end_col_offset :]
            lines[first : last + 1] = [head + known[name].encode() + tail]
    extra = [f"{name} = {text}".encode() for name, text in known.items() if name not in places]
    return b"\n".join([*lines, *extra]).decode()


def _values(source: str) -> dict[str, ast.expr] | None:
    """Return the value of each assignment; None if there is anything else."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    values = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case _:
                return None
    return values


def _segment(source: str, value: ast.expr) -> str:
    return ast.get_source_segment(source, value) or ""
