"""Tables and figures to files: complete, escaped, reproducible, each saved once."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from attnknn.figures import tables as report
from attnknn.figures.tables import escape_latex, escape_markdown

NASTY = r"50%_off & $x^2$ {a}~#1 \end <b>|bold|</b> *star*"


def tidy_results():
    rows = []
    for method, accuracy, nll in (("uniform", 0.90, 0.5), ("attention", 0.92, 0.2)):
        for seed, shift in enumerate((-0.01, 0.0, 0.01)):
            rows.append(
                {"method": method, "seed": seed, "metric": "accuracy", "value": accuracy + shift}
            )
            rows.append({"method": method, "seed": seed, "metric": "nll", "value": nll + shift})
    return pd.DataFrame(rows)


def comparison(verdict):
    return pd.DataFrame(
        {"method": ["attention"] * 2, "metric": ["accuracy", "nll"], "verdict": verdict}
    )


def test_pivot_by_hand():
    # Three seeds, standard deviation .01: half width 4.302653 · .01 / √3 = .02484.
    table = report.pivot_mean_interval(tidy_results()).text
    assert table.columns.tolist() == ["accuracy (%)", "NLL", "n"]
    assert table.loc["uniform"].tolist() == ["90.00 ± 2.48", "0.500 ± 0.025", "3"]
    assert table.loc["attention"].tolist() == ["92.00 ± 2.48", "0.200 ± 0.025", "3"]


def test_bold_only_where_a_test_supports_it():
    assert not report.pivot_mean_interval(tidy_results()).bold.any(axis=None)
    found = report.pivot_mean_interval(
        tidy_results(), comparison=comparison(["no difference at this size", "better"])
    ).bold
    assert found.loc["attention"].tolist() == [False, True, False]
    assert not found.loc["uniform"].any()


def test_one_seed_infinite_and_missing_values():
    tidy = pd.DataFrame(
        {
            "method": ["a", "a", "b"],
            "metric": ["nll", "ece", "nll"],
            "value": [np.inf, 0.01234, 0.5],
        }
    )
    table = report.pivot_mean_interval(tidy).text
    assert table.loc["a"].tolist() == ["∞", "0.0123", "1"]
    assert table.loc["b"].tolist() == ["0.500", "\N{EN DASH}", "1"]


def test_pivot_of_a_sweep_with_several_index_columns():
    tidy = tidy_results().query("metric == 'accuracy'").assign(k=[1, 5, 1, 1, 5, 1], noise=0.2)
    table = report.pivot_mean_interval(
        tidy, index=["noise", "method"], columns="k", metric="accuracy"
    ).text
    assert table.index.tolist() == [(0.2, "uniform"), (0.2, "attention")]
    assert table.columns.tolist() == ["1", "5", "n"]
    assert table.loc[(0.2, "uniform"), "5"] == "90.00"
    assert table.loc[(0.2, "uniform"), "n"] == "1\N{EN DASH}2"


def test_latex_is_booktabs_bold_and_escaped(tmp_path):
    display = report.pivot_mean_interval(
        tidy_results().replace({"attention": NASTY}),
        comparison=comparison(["better", "better"]).assign(method=NASTY),
    )
    text = report.to_latex(display.text, caption=NASTY, label="tab:x", bold=display.bold)
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lrrr}"):
        assert rule in text
    assert r"\bfseries 92.00 $\pm$ 2.48" in text
    assert r"accuracy (\%)" in text
    escaped = r"50\%\_off \& \$x\textasciicircum"
    assert text.count(escaped) == 2  # caption and cell
    # Every special sign left is one that we wrote.
    assert r"\end <b>" not in text


def test_latex_table_compiles_in_spirit():
    """Braces balance and every row has as many cells as the header."""
    frame = pd.DataFrame({"name": [NASTY, "plain"], "value": [0.5, np.nan]})
    lines = report.to_latex(frame).splitlines()
    body = [line for line in lines if line.endswith(r"\\")]
    assert len(body) == 3
    for line in body:
        assert line.replace(r"\&", "").count("&") == 1
        bare = line.replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")
    assert "--" in body[-1]


def test_markdown_is_one_line_a_row_and_escaped():
    frame = pd.DataFrame({"na|me": [NASTY, "two\nlines"], "value": [0.5, np.nan]})
    bold = pd.DataFrame({"na|me": [False, False], "value": [True, False]})
    lines = report.to_markdown(frame, bold=bold).splitlines()
    assert len(lines) == 4
    assert lines[0] == r"| na\|me | value |"
    assert lines[1] == "| :-- | --: |"
    assert r"\|bold\|" in lines[2] and "<b>" not in lines[2] and lines[2].endswith("| **0.5000** |")
    assert lines[3] == "| two lines | \N{EN DASH} |"


def test_escapes_by_hand():
    assert escape_latex("a_b 5% ± ∞") == r"a\_b 5\% $\pm$ $\infty$"
    assert escape_latex("\\") == r"\textbackslash{}"
    assert escape_markdown("a*b_c|<d>") == r"a\*b\_c\|&lt;d&gt;"


def test_notebook_style_escapes_html_and_is_reproducible():
    frame = pd.DataFrame({"value": [1.0]}, index=pd.Index(["<script>alert(1)</script>"], name="m"))
    bold = pd.DataFrame({"value": [True]}, index=frame.index)
    first, again = (report.main_table_style(frame, bold=bold).to_html() for _ in range(2))
    assert "<script>" not in first and "&lt;script&gt;" in first
    assert "font-weight: bold" in first
    assert first == again


def test_bold_of_another_shape_is_refused():
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    with pytest.raises(ValueError, match="bold must match the table"):
        report.to_latex(frame, bold=pd.DataFrame({"a": [True]}))


def test_a_table_is_saved_once_and_in_other_forms_where_asked(tmp_path):
    frame = pd.DataFrame({"method": [NASTY, "b"], "value": [0.1234567891234, 2.0]})
    folder, name = tmp_path / "deep", "k sweep: a/b"
    paths = report.save_table(frame, folder, name, caption="A table")
    assert [path.name for path in folder.iterdir()] == ["k-sweep-a-b.csv"]
    pd.testing.assert_frame_equal(pd.read_csv(paths["csv"]), frame, rtol=1e-12)
    paths = report.save_table(frame, folder, name, caption="A table", also=["tex", "md"])
    assert r"\label{tab:k-sweep-a-b}" in paths["tex"].read_text(encoding="utf-8")
    assert paths["md"].read_text(encoding="utf-8").startswith("A table\n\n| method |")
    before = {kind: path.read_bytes() for kind, path in paths.items()}
    again = report.save_table(frame, folder, name, caption="A table", also=["tex", "md"])
    assert {kind: path.read_bytes() for kind, path in again.items()} == before


def test_a_named_index_is_written(tmp_path):
    display = report.pivot_mean_interval(tidy_results())
    paths = report.save_table(display.text, tmp_path, "main", bold=display.bold, also=["md"])
    assert pd.read_csv(paths["csv"])["method"].tolist() == ["uniform", "attention"]
    assert "| method | accuracy (%) |" in paths["md"].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b", "CON?*", ".hidden", "ünï"])
def test_safe_names_stay_in_their_folder(name, tmp_path):
    safe = report.safe_name(name)
    assert (tmp_path / safe).resolve().parent == tmp_path.resolve()
    assert not safe.startswith(".") and " " not in safe


def test_a_name_without_letters_is_refused():
    with pytest.raises(ValueError, match="name must hold a letter or a digit"):
        report.safe_name("../..")


def test_a_sweep_has_a_block_of_rows_a_measure_and_a_column_a_level():
    rows = [
        {"method": method, "k": k, "metric": metric, "seed": 0, "value": value + k / 1000}
        for method, value in (("uniform", 0.5), ("attention", 0.25))
        for k in (3, 10)
        for metric in ("accuracy", "nll", "ece")
    ]
    text, bold = report.sweep_table(pd.DataFrame(rows), over="k", metrics=["accuracy", "nll"])
    assert list(text.columns) == list(bold.columns) == ["k = 3", "k = 10", "n"]
    assert text.index.names == ["measure", "method"]
    assert text.loc[("accuracy (%)", "attention"), "k = 10"] == "26.00"
    assert text.loc[("NLL", "uniform"), "k = 3"] == "0.503"
    assert len(text) == 4 and not bold.to_numpy().any()


def test_figures_are_reproducible_to_the_byte(tmp_path):
    def draw(folder):
        figure, ax = plt.subplots()
        ax.plot([1, 2], label="x")
        ax.fill_between([0, 1], [0, 1])
        assert list(report.save_figure(figure, folder, "figure")) == ["svg"]
        paths = report.save_figure(figure, folder, "figure", also=["png"])
        plt.close(figure)
        return {kind: path.read_bytes() for kind, path in paths.items()}

    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert first == second
    assert first["svg"].startswith(b"<?xml") and b"<dc:date>" not in first["svg"]
    assert first["png"].startswith(b"\x89PNG")


def test_a_figure_that_fails_leaves_nothing(tmp_path):
    class Broken:
        def savefig(self, handle, **_):
            handle.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        # The unchecked function: a stand-in for a figure is all this needs.
        report.save_figure.__wrapped__(Broken(), tmp_path, "figure")
    assert list(tmp_path.iterdir()) == []
