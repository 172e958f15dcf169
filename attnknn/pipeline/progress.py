"""What the user sees while notebooks run: live lines in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from attnknn.pipeline.state import Task

_SAYS_WIDTH = 40  # characters of a notebook's own output beside its count


class Progress:
    """One line a notebook: cells done, cells in all, seconds."""

    def __init__(self, tasks: Iterable[Task]):
        """Draw a waiting line for each task when stderr is a terminal."""
        self._totals = {t.name: t.notebook.n_cells + bool(t.parameters) for t in tasks}
        self._done = dict.fromkeys(self._totals, 0)
        self._says = dict.fromkeys(self._totals, "")
        self._starts: dict[str, float] = {}
        self._width = max((len(name) for name in self._totals), default=0)
        self._bars: dict[str, Any] = {}
        if sys.stderr.isatty():
            self._bars = {name: self._bar(place) for place, name in enumerate(self._totals)}
            self.tick()

    def start(self, name: str) -> None:
        """Let the seconds of a task run."""
        self._starts[name] = time.monotonic()

    def update(self, name: str, *, done: int | None = None, says: str | None = None) -> None:
        """Note the cells done, or the last line a task printed."""
        self._done[name] = self._done[name] if done is None else done
        self._says[name] = self._says[name] if says is None else says

    def tick(self) -> None:
        """Draw all lines again: their seconds move during a long cell, too."""
        for name in self._bars:
            if name in self._starts:
                seconds = time.monotonic() - self._starts[name]
                self._draw(name, ">", f"{seconds:.0f} s  {self._says[name][:_SAYS_WIDTH]}")

    def finish(self, name: str, seconds: float, status: str) -> None:
        """Show the end of a task: ``complete``, ``kept``, ``failed`` or ``skipped``."""
        self._starts.pop(name, None)
        if status == "kept":  # executed by an earlier call, in so many seconds
            self._done[name] = self._totals[name]
        if self._bars:
            mark = "+" if status in {"complete", "kept"} else "x"
            self._draw(name, mark, f"{seconds:.1f} s  {status}")
            return
        cells = f"{self._done[name]}/{self._totals[name]} cells"
        print(f"{status:<8}  {name:<{self._width}}  {cells:>11}  {seconds:.1f} s", flush=True)

    def close(self) -> None:
        """Leave the terminal below the last line."""
        for bar in self._bars.values():
            bar.close()

    def _bar(self, place: int) -> Any:
        from tqdm import tqdm

        form = "{desc} {n_fmt:>3}/{total_fmt} cells{postfix}"
        name = list(self._totals)[place]
        total = self._totals[name]
        waiting = f". {name:<{self._width}}"
        return tqdm(desc=waiting, total=total, position=place, bar_format=form, dynamic_ncols=True)

    def _draw(self, name: str, mark: str, note: str) -> None:
        bar = self._bars[name]
        bar.n = self._done[name]
        bar.set_description_str(f"{mark} {name:<{self._width}}", refresh=False)
        bar.set_postfix_str(note)


class Lines:
    """The end of each notebook of many runs, a line each, above one bar for all of them."""

    def __enter__(self) -> "Lines":
        """Start a bar when stderr is a terminal."""
        from tqdm import tqdm

        self._bar = tqdm(desc="notebooks", total=0, disable=not sys.stderr.isatty(), leave=False)
        return self

    def __exit__(self, *_: Any) -> None:
        """Remove the bar."""
        self._bar.close()

    def of(self, run: str) -> "RunLines":
        """Return the display of one run."""
        return RunLines(run, self)

    def expect(self) -> None:
        """Count one more notebook that is to be executed."""
        self._bar.total += 1
        self._bar.refresh()

    def finish(self, line: str) -> None:
        """Show a line, and one notebook less to wait for."""
        self._bar.update()
        self.say(line)

    def say(self, line: str) -> None:
        """Show a line above the bar."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()


class RunLines(Progress):
    """Shows what was executed of one run; what was there already is told in the summary."""

    def __init__(self, run: str, lines: Lines):
        """Prepare without showing anything."""
        super().__init__([])
        self._run, self._lines = run, lines

    def finish(self, name: str, seconds: float, status: str) -> None:
        """Show the end of a task: ``complete``, ``failed`` or ``skipped``."""
        line = f"{status:<8}  {self._run}  {name}  {seconds:.1f} s"
        if status == "skipped":
            self._lines.say(line)
        elif status != "kept":
            self._lines.finish(line)
