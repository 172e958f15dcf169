"""Plain text on its way to paper: terminal noise out, Typst strings safe, long words breakable."""

import re

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[@-Z\\-_]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
# "  40%|████      | 2/5 [00:01<00:02, 1.2it/s]" and "17it [00:03, 5.1it/s]", with words before
_PROGRESS = re.compile(
    r".*\d+%\|[^|]*\|\s*[\d.]+\w?/[\d.?]+\w?(?:\s*\[[^\]]*\])?"
    r"|.*\b\d+\w?(?:it|[A-Z]?B)? \[\d+:\d\d[^\]]*(?:it|s|B)/(?:s|it)[^\]]*\]"
)
# What tqdm says, in two lines, where it cannot show its bar as a widget.
_NO_WIDGET = re.compile(r"TqdmWarning: IProgress not found|from \.autonotebook import tqdm")
_REPR = re.compile(r"\[?<[^<>\n]*(?: at 0x[0-9a-f]+|\bobject|[Aa]xes[^<>\n]*)>\]?")
_AFTER_PUNCTUATION = re.compile(r"([/\\._\-=,:;&?+|)(\[\]])(?=.)")
_LONG_RUN = re.compile(r"[^\s\u200b]{16}(?=[^\s\u200b]{4})")

ZERO_WIDTH_SPACE = "\u200b"


def clean(text: str) -> str:
    """Return ``text`` without ANSI codes, control characters or lone surrogates."""
    text = _ANSI.sub("", text).expandtabs(8)
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def printed(text: str) -> str:
    """Return what a terminal would show: overwritten and progress-bar lines removed.

    Args:
        text: A whole stdout or stderr stream, carriage returns included.

    Returns:
        The lines that remain readable, without leading and trailing blank lines.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # A carriage return starts the line again; the last writing is the one that stays.
        shown = [part for part in line.split("\r") if part.strip()]
        lines.append(clean(shown[-1]).rstrip() if shown else "")
    left = [_PROGRESS.sub("", line) for line in lines]
    # Words written behind a bar, without a line break of their own, are still words.
    kept = [
        text
        for text, line in zip(left, lines, strict=True)
        if not _NO_WIDGET.search(text) and (text.strip() or text == line)
    ]
    return "\n".join(kept).strip("\n")


def is_bare_repr(text: str) -> bool:
    """Tell whether ``text`` only names objects: ``<Axes: >`` or ``[<Line2D at 0x7f>]``."""
    return all(_REPR.fullmatch(line.strip(" ,")) for line in text.strip().splitlines() or [""])


def typst_string(text: str) -> str:
    """Return ``text`` as a Typst string literal; nothing in it can end the literal."""
    text = clean(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\n", "\\n") + '"'


def breakable(text: str, *, longest: int = 28) -> str:
    """Return ``text`` with invisible break points in words of more than ``longest`` characters."""
    return " ".join(word if len(word) <= longest else _break_word(word) for word in text.split(" "))


def _break_word(word: str) -> str:
    word = _AFTER_PUNCTUATION.sub(r"\1" + ZERO_WIDTH_SPACE, word)
    return _LONG_RUN.sub(lambda run: run.group() + ZERO_WIDTH_SPACE, word)
