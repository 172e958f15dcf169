"""What is committed: results that a reader opens, and a README made from them."""

import re
import shutil
import subprocess

import pytest

from scripts import readme as showcase

MOST_BYTES = 15_000_000  # of results/ in git


def tracked(*options: str) -> list[str]:
    """Return the tracked files below results/."""
    if shutil.which("git") is None or not (showcase.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", *options, "results"]
    done = subprocess.run(command, cwd=showcase.ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def test_results_in_git_follow_the_rule_and_stay_small():
    assert tracked("-ci", "--exclude-standard") == [], "excluded by .gitignore, yet committed"
    sizes = {name: (showcase.ROOT / name).stat().st_size for name in tracked()}
    assert sum(sizes.values()) <= MOST_BYTES, sorted(sizes, key=sizes.__getitem__)[-5:]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/architecture.md", "docs/scaling.md", "results/README.md"]
)
def test_every_local_link_leads_somewhere(page):
    path = showcase.ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_the_results_in_the_readme_are_those_of_the_saved_tables():
    readme = (showcase.ROOT / "README.md").read_text(encoding="utf-8")
    assert showcase.with_results(readme, showcase.results_section()) == readme, (
        "run: python -m scripts.readme"
    )


def test_the_showcase_reads_saved_tables(tmp_path):
    folder = tmp_path / "iris" / "02_main_results"
    folder.mkdir(parents=True)
    (folder / "main_results.csv").write_text(
        "method,accuracy (%),macro F1 (%),NLL,Brier score,ECE,n\n"
        "attention,91.23,90,0.5,0.1,0.0123,3\nuniform,90.00,90,0.6,0.1,0.0200,3\nodd,1,1,1,1,1,3\n"
    )
    noise = tmp_path / "iris" / "04_label_noise"
    noise.mkdir()
    rows = [
        f"symmetric,0.4,clean,attention,{metric},{value}"
        for metric, value in (("accuracy", 0.875), ("nll", 0.25), ("ece", 0.0321))
    ]
    (noise / "measures.csv").write_text(
        "\n".join(["kind,rate,held_out,method,metric,value", *rows])
    )
    rows = [
        f"{method},{metric},{gap},{p_value},0.95,old"
        for method, metric, gap, p_value in (
            ("uniform", "nll", 0.1, 0.001),
            ("distance (tuned)", "nll", -0.1, 0.001),
            ("uniform", "ece", 0.1, 0.3),
            ("attention + TTA", "nll", -0.1, 0.001),
        )
    ]
    (folder / "comparison.csv").write_text(
        "\n".join(["method,metric,difference,p_value,level,verdict", *rows])
    )
    section = showcase.results_section(tmp_path)
    assert "- Iris: better than uniform in NLL; worse than distance (tuned) in NLL.\n" in section
    (folder / "comparison.csv").write_text(
        "method,metric,difference,p_value,level,verdict\nuniform,nll,0.1,0.3,0.95,old"
    )
    again = showcase.results_section(tmp_path)
    assert "- Iris: no difference at this size in any of them." in again
    assert "the held-out labels that all are fitted on are clean" in section
    assert section.index("| uniform | 90.00 | 0.6 | 0.0200 | 3 |") < section.index("| attention |")
    assert "| Iris | attention | 87.50 | 0.250 | 0.0321 |" in section and "odd" not in section


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="once each"):
        showcase.with_results("no markers", "section")
