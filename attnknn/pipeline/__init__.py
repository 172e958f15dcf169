"""Parameters and notebooks → executed notebooks and PDFs, resumable, several at a time.

``make_plan`` checks a request in well under a second; ``run_pipeline`` executes it: every notebook
in a process of its own, the training first, and only what is missing or outdated. ``make_grid``
and ``run_plans`` do the same for many runs, on a Dask cluster.
"""

from attnknn.pipeline.cluster import check_scheduler
from attnknn.pipeline.conduct import run_plans
from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.grid import Grid, make_grid
from attnknn.pipeline.plan import Plan, make_plan
from attnknn.pipeline.run import run_pipeline
from attnknn.pipeline.session import RunResult

__all__ = [
    "Grid",
    "Outcome",
    "Plan",
    "RunResult",
    "check_scheduler",
    "make_grid",
    "make_plan",
    "run_pipeline",
    "run_plans",
]
