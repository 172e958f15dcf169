"""Markdown and HTML → pandoc's tree of blocks, whatever a notebook holds."""

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pypandoc
from bs4 import BeautifulSoup

Node = dict[str, Any]


class PDFError(RuntimeError):
    """A notebook could not be turned into a PDF."""


# ---- Plain text on its way to paper

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[@-Z\\-_]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_AFTER_PUNCTUATION = re.compile(r"([/\\._\-=,:;&?+|)(\[\]])(?=.)")
_LONG_RUN = re.compile(r"[^\s\u200b]{16}(?=[^\s\u200b]{4})")


def clean(text: str) -> str:
    """Return ``text`` without ANSI codes, control characters or lone surrogates."""
    text = _ANSI.sub("", text).expandtabs(8).replace("\r\n", "\n")
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def literal(text: str) -> str:
    """Return ``text`` as a Typst string literal; nothing in it can end the literal."""
    text = clean(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\n", "\\n") + '"'


def breakable(text: str, *, longest: int = 28) -> str:
    """Return ``text`` with invisible break points in words of more than ``longest`` characters."""
    return " ".join(word if len(word) <= longest else _broken(word) for word in text.split(" "))


def _broken(word: str) -> str:
    word = _AFTER_PUNCTUATION.sub("\\1\u200b", word)
    return _LONG_RUN.sub(lambda run: run.group() + "\u200b", word)


# ---- Markdown and HTML → pandoc's tree

_READER = "ipynb+raw_tex+footnotes+latex_macros+tex_math_double_backslash+startnum+fancy_lists"
_LIMITS = ("+RTS", "-M1g", "-RTS")  # of pandoc's memory
_SECONDS = 20  # some inputs, such as 300 nested brackets, would keep pandoc for ever
_DEEPEST = 200  # levels of lists and mappings in pandoc's tree: some fifty of nested quotes
_TABLE_AFTER_TEXT = re.compile(
    r"^(?![ \t]*\|)([^\n]*\S[^\n]*)\n"
    r"(?=[^\n]*\|[^\n]*\n[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)+[-: \t]*$)",
    re.MULTILINE,
)
_STYLE_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_BOLD = re.compile(r"font-weight:\s*(?:bold|[6-9]00)")
_TAG = re.compile(r"<(/?)[a-zA-Z][^<>]*?(/?)>")


def read_markdown(texts: Mapping[str, str]) -> dict[str, list[Node]]:
    """Return pandoc's blocks of several independent Markdown texts, their HTML read as well.

    Args:
        texts: Markdown by key; keys are plain letters, digits and dashes.
    """
    # A table right behind a line of text is one, too: notebooks show it so.
    apart = {key: _TABLE_AFTER_TEXT.sub(r"\1\n\n", clean(text)) for key, text in texts.items()}
    trees = _read_all(apart, _notebook_of, _READER)
    found = {n["c"][1] for n in nodes(list(trees.values())) if _is_html(n)}
    names = {text: f"h{i}" for i, text in enumerate(sorted(found))}
    read = read_html({name: text for text, name in names.items()})
    return _with_html(trees, {text: read[name] for text, name in names.items()})


def read_html(texts: Mapping[str, str]) -> dict[str, list[Node]]:
    """Return pandoc's blocks of several independent pieces of HTML, such as tables of pandas."""
    return _read_all({key: _sound_html(text) for key, text in texts.items()}, _divisions, "html")


def plain_text(node: Any) -> str:
    """Return the words of a node, without any markup."""
    if isinstance(node, list):
        return "".join(plain_text(item) for item in node)
    if not isinstance(node, dict):
        return ""
    match node["t"]:
        case "Str":
            return node["c"]
        case "Space" | "SoftBreak" | "LineBreak":
            return " "
        case "Code" | "Math" | "CodeBlock":
            return node["c"][1]
        case "RawInline" | "RawBlock":
            return ""
    return plain_text(node.get("c", []))


def raw_block(source: str) -> Node:
    """Return a block of Typst source that pandoc passes through."""
    return {"t": "RawBlock", "c": ["typst", source]}


def raw_inline(source: str) -> Node:
    """Return an inline of Typst source that pandoc passes through."""
    return {"t": "RawInline", "c": ["typst", source]}


def word(text: str) -> Node:
    """Return literal text; the semicolon ends the expression, whatever comes next."""
    return raw_inline(f"#{literal(breakable(text))};")


def call(function: str, words: Sequence[Node], *arguments: str) -> Node:
    """Return a block that calls a template function with words and further Typst arguments."""
    closing = "".join(f", {argument}" for argument in arguments)
    return {"t": "Plain", "c": [raw_inline(f"#{function}(["), *words, raw_inline(f"]{closing})")]}


def code_call(function: str, text: str, *arguments: str) -> Node:
    """Return a block that calls a template function with verbatim lines."""
    lines = (breakable(line.rstrip(), longest=60) for line in text.strip("\n").split("\n"))
    return raw_block(f"#{function}({', '.join([literal(chr(10).join(lines)), *arguments])})")


def run_pandoc(text: str, source: str, target: str) -> str:
    command = [pypandoc.get_pandoc_path(), "--sandbox", "--wrap=none", "-f", source, "-t", target]
    try:
        done = subprocess.run(
            [*command, *_LIMITS], input=text.encode(), capture_output=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise PDFError(f"pandoc took more than {_SECONDS} s") from error
    if done.returncode:
        raise PDFError(f"pandoc: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def refusal(problem: object) -> Node:
    """Return the paragraph that stands for what pandoc or Typst could not do."""
    first = str(problem).strip().partition("\n")[0]
    words = {"t": "Str", "c": f"[This part cannot be set as it is: {first}]"}
    return {"t": "Para", "c": [{"t": "Emph", "c": [words]}]}


def _read_all(
    texts: Mapping[str, str], together: Callable[[Mapping[str, str]], str], reader: str
) -> dict[str, list[Node]]:
    """Read all texts in one call, or each alone where one of them is too much for pandoc."""
    if not texts:
        return {}
    try:
        tree = json.loads(run_pandoc(together(texts), reader, "json"))
        if _depth(tree) > _DEEPEST:
            raise PDFError("it is nested too deep")
    except (PDFError, RecursionError) as error:
        if len(texts) == 1:
            return {
                key: [refusal(error), {"t": "CodeBlock", "c": [["", [], []], text]}]
                for key, text in texts.items()
            }
        alone = [_read_all({key: text}, together, reader) for key, text in texts.items()]
        return {key: blocks for part in alone for key, blocks in part.items()}
    parts = [block["c"] for block in tree["blocks"] if block["t"] == "Div"]
    return {key: [] for key in texts} | {attributes[0]: blocks for attributes, blocks in parts}


def _depth(value: Any) -> int:
    """Return how many levels a tree has, whatever Python's limit of recursion."""
    level, depth = [value], 0
    while level := [i for item in level if isinstance(item, list | dict) for i in _inside(item)]:
        depth += 1
    return depth


def _inside(value: dict | list) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _notebook_of(texts: Mapping[str, str]) -> str:
    """Return a notebook: pandoc reads each cell alone, so no unclosed fence swallows the next."""
    cells = [
        {"cell_type": "markdown", "id": key, "metadata": {}, "source": text}
        for key, text in texts.items()
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})


def _divisions(texts: Mapping[str, str]) -> str:
    return "\n".join(f'<div id="{key}">{text}</div>' for key, text in texts.items())


def _sound_html(text: str) -> str:
    """Return HTML whose tags are all closed, without scripts; bold and colour at each cell."""
    text = clean(text)
    depth = deepest = 0
    for closing, empty in _TAG.findall(text):
        depth += -1 if closing else int(not empty)
        deepest = max(deepest, depth)
    if deepest > 5 * _DEEPEST:  # an unclosed <p> or <br> counts as a level here
        text = _TAG.sub(" ", text)
    soup = BeautifulSoup(f"<div>{text}</div>", "html.parser")
    rules: dict[str, str] = {}
    for selectors, body in _STYLE_RULE.findall("\n".join(s.get_text() for s in soup("style"))):
        for name in selectors.split(","):
            rules[name.strip()] = rules.get(name.strip(), "") + body + ";"
    for cell in soup(["td", "th"]):
        for name in ("colspan", "rowspan"):
            if len(str(cell.get(name, ""))) > 3 or not str(cell.get(name, "1")).isdecimal():
                del cell[name]  # it would make a table of a hundred thousand columns
        look = f"{rules.get('#' + str(cell.get('id')), '')};{cell.get('style', '')}".lower()
        if _BOLD.search(look):
            bold = soup.new_tag("strong")
            bold.extend(list(cell.contents))
            cell.append(bold)
        for name, kind in (("fill", "background(?:-color)?"), ("ink", "color")):
            if found := re.search(rf"(?:^|[;\s]){kind}:\s*(#[0-9a-f]{{3,6}}|[a-z]+)", look):
                cell[name] = found[1]
    for tag in soup(["script", "style", "template"]):
        tag.decompose()
    return str(soup)


def nodes(value: Any) -> Iterator[Node]:
    """Yield every node of a tree, from the outside in."""
    if isinstance(value, dict):
        yield value
    for item in _inside(value):
        if isinstance(item, list | dict):
            yield from nodes(item)


def _is_html(node: Node) -> bool:
    return node.get("t") == "RawBlock" and node["c"][0] == "html"


def _with_html(value: Any, read: Mapping[str, list[Node]]) -> Any:
    """Return a tree with blocks in the place of raw HTML."""
    if isinstance(value, dict):
        return {key: _with_html(item, read) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    items = [read[n["c"][1]] if isinstance(n, dict) and _is_html(n) else [n] for n in value]
    return [_with_html(item, read) for part in items for item in part]
