"""One notebook, one process: ``python -m attnknn.paper.worker`` executes it with papermill.

The job comes as one JSON line on stdin; cell counts and the outcome go to stdout, one JSON line
each. When stdin ends, the pipeline is gone (even by ``kill -9``): the kernel is killed and the
worker leaves, so that nothing keeps writing into a run nobody watches.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_MANAGERS: list[Any] = []  # the kernel manager, for the thread that may have to end the kernel
_SOCKET_FOLDERS: list[str] = []
_N_TRACEBACK_LINES = 12


def main() -> None:
    """Execute the job on stdin and report on stdout."""
    job = json.loads(sys.stdin.readline())
    # Libraries that print must not break the protocol: our lines keep the real stdout.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        execute(job, channel)
        outcome = {"outcome": "complete"}
    except Exception as error:
        outcome = {"outcome": "failed"} | describe(error)
    _remove_sockets()
    _send(channel, outcome)


def execute(job: dict[str, Any], channel: IO[str]) -> None:
    """Execute ``job["notebook"]`` into ``job["output"]``, counting the code cells that are done."""
    # jsonschema takes this module where it finds it, and compiles a grammar of web addresses on
    # import: 1.7 s of every start, for a check that no notebook asks for.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill

    n_done = 0

    def count(**_: Any) -> None:
        nonlocal n_done
        n_done += 1
        _send(channel, {"done": n_done})

    papermill.execute_notebook(
        _as_written(job["notebook"]),
        _as_written(job["output"]),
        parameters=job["parameters"],
        kernel_name="python3",
        language="python",
        kernel_manager_class=_kernel_manager_class(),
        cwd=str(Path(job["notebook"]).parent),
        progress_bar=False,
        start_timeout=300,  # seconds; many kernels may start at once on a busy machine
        iopub_timeout=120,
        on_cell_executed=count,
        stdout_file=_LastLine(channel),
        stderr_file=_LastLine(channel),
    )


def _as_written(path: str) -> str:
    """Return a path as papermill wants it: braces would be names of parameters to it."""
    return path.replace("{", "{{").replace("}", "}}")


def describe(error: BaseException) -> dict[str, Any]:
    """Return what a user needs to know of a failure: where, what, and the end of the traceback."""
    if type(error).__name__ == "PapermillExecutionError":
        lines = _ANSI.sub("", "\n".join(error.traceback)).splitlines()
        return {
            "cell": error.cell_index + 1,
            "prompt": error.exec_count,
            "source": error.source,
            "error": f"{error.ename}: {_ANSI.sub('', error.evalue)}",
            "traceback": lines[-_N_TRACEBACK_LINES:],
        }
    message = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "DeadKernelError":
        message += " (the kernel was killed or crashed; too little memory?)"
    return {"error": message, "traceback": []}


def _kernel_manager_class() -> type:
    """Return a kernel manager that starts this very Python.

    A kernelspec found by name may belong to another environment: ``$JUPYTER_PATH`` and the user's
    folder can both hold a ``python3`` that is not ours.
    """
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    # TCP ports are chosen by the manager and bound by the kernel only later: kernels that start
    # at the same time take each other's. Sockets in a folder of their own cannot collide.
    sockets = {"transport": "ipc", "ip": f"{_socket_folder()}/k"} if os.name == "posix" else {}

    class OwnPython(AsyncKernelManager):
        def __init__(self, **options: Any):
            super().__init__(**sockets | options)
            self._kernel_spec = KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())
            _MANAGERS.append(self)

    return OwnPython


def _socket_folder() -> str:
    # The name of a socket may have 107 characters at most: a deep $TMPDIR would not do.
    folder = tempfile.mkdtemp(prefix="attnknn-")
    if len(folder) > 90:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="attnknn-", dir="/tmp")
    _SOCKET_FOLDERS.append(folder)
    return folder


class _LastLine:
    """A text file that tells the pipeline the last full line written to it."""

    def __init__(self, channel: IO[str]):
        self._channel = channel

    def write(self, text: str) -> None:
        lines = [line for line in re.split(r"[\r\n]+", _ANSI.sub("", text)) if line.strip()]
        if lines:
            _send(self._channel, {"says": lines[-1].strip()})

    def flush(self) -> None:
        self._channel.flush()


def _send(channel: IO[str], message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")


def _leave_with_parent() -> None:
    while os.read(0, 1024):  # the bare descriptor: a locked sys.stdin would upset the exit
        pass
    for manager in _MANAGERS:
        process = getattr(manager.provisioner, "process", None)
        if process is not None and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # a kernel leads its own process group
        elif process is not None:
            process.kill()
    _remove_sockets()
    os._exit(1)


def _remove_sockets() -> None:
    for folder in _SOCKET_FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
