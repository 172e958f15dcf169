"""Executed copies → PDFs: one for each notebook, and one that binds them all; and the claims."""

import hashlib
import json
from pathlib import Path
from typing import Any

from attnknn.files import sha256_file
from attnknn.pipeline.state import RunFolder, code_digest


def publish(run: RunFolder) -> list[str]:
    """Write the PDFs of a run that are missing or older than their notebooks.

    Args:
        run: A run; only its complete notebooks are printed.

    Returns:
        One line for each PDF that could not be made.
    """
    names = sorted(name for name, entry in run.entries.items() if entry["status"] == "complete")
    problems = []
    for name in names:
        entry = run.entries[name]
        copy = run.path / entry["copy"]
        # PDFs cost half a second each: any change of our own code is a reason to print again.
        key = _digest([sha256_file(copy), code_digest()])
        if entry.get("pdf_key") == key and copy.with_suffix(".pdf").is_file():
            continue
        entry.pop("pdf_key", None)
        if problem := _print_notebook(copy):
            problems.append(problem)
        else:
            entry["pdf_key"] = key
        run.save()
    return problems + _publish_report(run, names)


def publish_claims(run: RunFolder) -> None:
    """Judge the published claims by the tables of the studies, where there are any."""
    if any((run.path / f"{name}/measures.csv").is_file() for name in run.entries):
        from attnknn.studies.claims import write_claims

        write_claims(run.path)


def _print_notebook(copy: Path) -> str:
    from attnknn.pdf import notebook_to_pdf

    try:
        notebook_to_pdf(copy)
    except (RuntimeError, ValueError) as error:
        return f"no PDF of {copy}: {error}"
    return ""


def _publish_report(run: RunFolder, names: list[str]) -> list[str]:
    output, claims = run.path / "report.pdf", run.path / "claims.md"
    preface = claims.read_text(encoding="utf-8") if claims.is_file() else ""
    key = _digest([preface, [[name, run.entries[name].get("pdf_key")] for name in names]])
    if not names or (run.report.get("pdf_key") == key and output.is_file()):
        return []
    from attnknn.pdf import bind_report

    copies = [run.path / run.entries[name]["copy"] for name in names]
    facts = {name: run.report.get(name) for name in ("run", "dataset", "seeds", "commit")}
    try:
        bind_report(
            copies,
            output,
            title=f"Attn-KNN: {run.report['run']}",
            provenance=facts | {"versions": run.report.get("versions", {})},
            preface=preface,
        )
    except (RuntimeError, ValueError) as error:
        return [f"no {output}: {error}"]
    run.report["pdf_key"] = key
    run.save()
    return []


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
