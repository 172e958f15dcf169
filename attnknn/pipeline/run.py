"""Parameters and notebooks → a run folder with executed notebooks, PDFs and ``report.json``."""

from attnknn.checks import check_count
from attnknn.pipeline.crew import Crew, n_cores, threads_each, threads_used
from attnknn.pipeline.plan import Plan
from attnknn.pipeline.session import RunResult, Session, open_session
from attnknn.pipeline.state import Task

_MOST_JOBS = 4  # by default; each process holds torch and a memory bank


def run_pipeline(
    plan: Plan, *, n_jobs: int | None = None, force: bool = False, pdf: bool = True
) -> RunResult:
    """Execute what is missing or outdated of a plan; a killed run goes on where it was.

    Args:
        plan: What to run, from :func:`make_plan`.
        n_jobs: Notebooks at a time; the cores of this machine, at most 4, when None.
        force: Execute complete notebooks again, and replace a run with other parameters.
        pdf: Write the PDFs, too.

    Returns:
        What was done; a failing notebook is no exception, the others go on.

    Raises:
        ConfigError: If the folder holds what no run made, or a run with other parameters while
            ``force`` is not set.
        FolderBusyError: If another process is writing this run.
    """
    n_jobs = check_jobs(n_jobs)
    with open_session(plan, force=force, pdf=pdf) as session:
        # Threads follow from the request alone, never from what is left of it: a resumed run
        # must end with the same digits as an unbroken one.
        n_trainers = min(n_jobs, len(plan.tasks()[0]) or 1)
        _execute(session, session.training(), n_jobs=n_trainers)
        _execute(session, session.rest(), n_jobs=n_jobs)
    return session.result


def check_jobs(n_jobs: int | None) -> int:
    """Return how many notebooks run at a time: ``n_jobs``, or what suits this machine."""
    return min(n_cores(), _MOST_JOBS) if n_jobs is None else check_count("jobs", n_jobs)


def _execute(session: Session, tasks: list[Task], *, n_jobs: int) -> None:
    if not tasks:
        return
    n_threads = threads_each(n_jobs)
    crew = Crew(session.run.path.parent, session.work, session.progress)
    crew.run(
        tasks,
        lambda outcome: session.record(outcome, n_threads=threads_used(n_threads)),
        n_jobs=n_jobs,
        n_threads=n_threads,
    )
