"""Parameters and notebooks → executed notebooks and PDFs, resumable, several at a time.

``make_plan`` checks a request in well under a second; ``run_pipeline`` executes it: every notebook
in a process of its own, the training first, and only what is missing or outdated.
"""

from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.plan import Plan, make_plan
from attnknn.pipeline.run import RunResult, run_pipeline

__all__ = ["Outcome", "Plan", "RunResult", "make_plan", "run_pipeline"]
