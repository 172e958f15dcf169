"""Notebooks become PDFs: what is on the page, what is not, and what can never break it."""

import base64
import re
import subprocess
import sys
from io import BytesIO

import nbformat
import numpy as np
import pandas as pd
import pytest
import typst
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image
from pypdf import PdfReader

from attnknn.paper import markup
from attnknn.paper.book import bind_report
from attnknn.paper.cells import is_bare_repr, printed
from attnknn.paper.markup import PDFError, breakable, clean, literal, read_html
from attnknn.paper.pdf import (
    AttnKNNPDFExporter,
    notebook_to_pdf,
    provenance_lines,
)
from attnknn.paper.typst import Setter, Workshop, workshop

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="300pt" height="100pt" viewBox="0 0 300 100">'
    '<path d="M 10 10 L 290 90" stroke="black"/></svg>'
)
NASTY = [
    "a_b*c#d$e@f<g>h\\i`j`",
    '"]) #panic("x")',
    '#read("/etc/passwd")',
    "= head",
    "- item",
    "/ term: def",
    "// comment",
    "/* open",
    "<script>alert(1)</script>",
    "@cite <label>",
    "$x $$ $\\frac{$",
    "```{=typst}\n#panic()\n```",
    "`#panic()`{=typst}",
    "[x]{typst:text:fill='panic()'}",
    "\\input{/etc/passwd} \\begin{align}",
    "![a](/etc/passwd) ![b](../../x.png) [l](#nowhere)",
    "\x1b[31mred\x1b[0m \x00 \ud800",
    "```unclosed",
    "W" * 400,
]


def picture_bytes(size=(8, 8)):
    file = BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def shown(mime, value, **metadata):
    return new_output("display_data", {mime: value, "text/plain": "PLAIN TWIN"}, metadata=metadata)


def code(source="x = 1", *outputs, tags=(), **metadata):
    return new_code_cell(
        source,
        execution_count=1,
        outputs=list(outputs),
        metadata={"tags": list(tags), **metadata},
    )


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def pdf_of(*cells, metadata=None):
    notebook = new_notebook(cells=list(cells), metadata=metadata or {})
    data, _ = AttnKNNPDFExporter().from_notebook_node(notebook)
    return PdfReader(BytesIO(data))


def text_of(reader):
    text = "\n".join(page.extract_text() for page in reader.pages)
    return text.replace("\u200b", "")


def fonts_of(reader):
    for page in reader.pages:
        for font in page["/Resources"].get("/Font", {}).values():
            yield font.get_object()["/DescendantFonts"][0].get_object()["/FontDescriptor"]


@pytest.fixture
def own_tempdir(tmp_path, monkeypatch):
    """Keep the sources of failed compilations out of the system's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def margins(monkeypatch):
    """Return a function that draws notebooks and tells the darkest pixel in the side margins."""
    drawn = []
    compile_pdf = typst.compile

    def draw(*args, **options):
        pages = compile_pdf(*args, **options, format="png", ppi=72)
        drawn[:] = pages if isinstance(pages, list) else [pages]  # the last is the document
        return compile_pdf(*args, **options)

    monkeypatch.setattr("attnknn.paper.typst.typst.compile", draw)

    def darkest(*cells):
        pdf_of(*cells)
        pages = [np.asarray(Image.open(BytesIO(page)).convert("L")) for page in drawn]
        assert all(page[:, 80:-80].min() < 128 for page in pages)
        return min(min(page[:, :66].min(), page[:, -66:].min()) for page in pages)

    return darkest


def write(folder, name, *cells, metadata=None):
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=list(cells), metadata=metadata or {}), path)
    return path


class TestText:
    def test_a_terminal_shows_the_last_writing_of_a_line(self):
        assert printed("10%\r50%\rdone\nnext") == "done\nnext"

    @pytest.mark.parametrize(
        "bar",
        [
            "  40%|████      | 2/5 [00:01<00:02,  1.2it/s]",
            "100%|##########| 1797/1797 [00:00<00:00, 9999.1it/s]",
            "17it [00:03,  5.10it/s]",
            "Epoch 3:  40%|████      | 2.0k/5.0k [00:01<?, ?B/s]",
        ],
    )
    def test_progress_bars_go(self, bar):
        assert printed(f"before\n\r{bar}\nafter") == "before\nafter"

    def test_words_behind_a_bar_stay_and_tqdms_own_warning_goes(self):
        bar = "\rlevels:  10%|█         | 1/10 [00:01<00:12,  1.37s/it]"
        moan = "/x/auto.py:21: TqdmWarning: IProgress not found. Please update jupyter"
        where = "  from .autonotebook import tqdm as notebook_tqdm"
        assert printed(f"{bar}{moan}\n{where}\n{bar}real warning\nnext") == "real warning\nnext"

    @pytest.mark.parametrize("line", ["accuracy 40% | NLL 0.3", "a | b | 2/5", "took 3 s [ok]"])
    def test_lines_that_only_resemble_bars_stay(self, line):
        assert printed(line) == line

    def test_clean_removes_codes_and_control_characters(self):
        link = "\x1b]8;;x\x07link\x1b]8;;\x07"
        assert clean(f"\x1b[1;31mred\x1b[0m\x00 {link}") == "red link"
        assert clean("\ud800") == "?"

    def test_bare_representations_are_recognised(self):
        assert is_bare_repr("<Axes: xlabel='k'>")
        assert is_bare_repr("[<matplotlib.lines.Line2D at 0x7f00>]")
        assert not is_bare_repr("<class 'int'> is a type")

    def test_a_typst_string_cannot_be_left(self):
        assert literal('a"b\\\n') == '"a\\"b\\\\\\n"'

    def test_only_long_words_get_break_points(self):
        assert breakable("short words stay") == "short words stay"
        assert breakable("x" * 40).replace("\u200b", "") == "x" * 40
        assert max(map(len, breakable("x" * 40).split("\u200b"))) <= 20


def place_of(reader, words):
    """Return the page of some words, and how far down on it they stand."""
    for number, page in enumerate(reader.pages):
        found = []

        def visit(text, matrix, text_matrix, *_, found=found):
            if words in text:
                found.append(-(matrix[3] * text_matrix[5] + matrix[5]))

        page.extract_text(visitor_text=visit)
        if found:
            return number, found[0]
    raise AssertionError(f"{words} is on no page")


def columns_of(html):
    """Return what the template is told of a table's columns."""
    with workshop() as place:
        (table,) = Setter(place).blocks(read_html({"t": html})["t"])
    return re.findall(
        r"align: (\w+), long: (\w+), share: .*?fr, word: \"(.*?)\"", table["c"][0]["c"][1]
    )


class TestTables:
    def test_spans_by_hand(self):
        html = "<table><tr><th colspan=2>a</th></tr><tr><td rowspan=2>1</td><td>x</td></tr>"
        html += "<tr><td>y</td></tr></table>"
        with workshop() as place:
            (table,) = Setter(place).blocks(read_html({"t": html})["t"])
        source = "".join(part["c"][1] for part in table["c"])
        cells = re.findall(
            r'x: (\d), y: (\d), rowspan: (\d), colspan: (\d), body: \[#"(.)"', source
        )
        assert ["".join(cell) for cell in cells] == ["0012a", "00211", "1011x", "1111y"]

    @pytest.mark.parametrize("value", ["0.91 ± 0.02", "-3", "1e-4", "92.5%", "+.04 [.03, .05]"])
    def test_numbers_go_right(self, value):
        html = f"<table><tr><td>{value}</td><td>attention</td></tr><tr><td>nan</td><td>b</td></tr>"
        assert [side for side, _, _ in columns_of(html + "</table>")] == ["right", "left"]

    def test_running_text_wraps_and_headings_break_at_their_signs(self):
        html = (
            f"<table><tr><th>a</th><th>long_name</th></tr><tr><td>{'w ' * 30}</td><td>1</td></tr>"
        )
        assert columns_of(html + "</table>") == [("left", "true", "a"), ("right", "false", "long_")]


class TestPages:
    def test_title_date_and_provenance(self):
        run = {"run": "quick", "seeds": [3], "commit": "abc1234", "versions": {"torch": "2.15"}}
        metadata = {
            "attnknn": {"provenance": run | {"seconds": 12.34, "date": "2025-11-16T03:00:00"}}
        }
        reader = pdf_of(new_markdown_cell("# The *title*\n\nBody."), metadata=metadata)
        text = text_of(reader)
        assert text.startswith("The title")
        assert "16 November 2025" in text
        assert "run quick · seed 3 · commit abc1234 · 12.3 s" in text
        assert "torch 2.15" in text
        assert reader.metadata.title == "The title"

    def test_a_notebook_without_heading_or_record_still_says_what_it_is(self, tmp_path):
        metadata = {"kernelspec": {"display_name": "Python 3", "name": "python3"}}
        path = write(tmp_path, "02-noise", new_markdown_cell("Body."), metadata=metadata)
        text = text_of(PdfReader(notebook_to_pdf(path)))
        assert text.startswith("02-noise")
        assert "Python 3" in text

    def test_provenance_lines_by_hand(self):
        lines = provenance_lines({"seconds": 250.4, "run": "full", "seeds": [0, 1], "commit": None})
        assert lines == ["run full · seeds 0, 1 · 250 s"]

    def test_greek_and_symbols_survive(self):
        symbols = "αβγδελτΣΩ ✓ √ → ≤ ± × ∈"  # noqa: RUF001
        text = text_of(pdf_of(new_markdown_cell(f"# T\n\n{symbols}"), code("y", stream(symbols))))
        for symbol in symbols.replace(" ", ""):
            assert text.count(symbol) == 2, symbol

    def test_math_is_set_and_not_shown_as_source(self):
        align = r"\begin{align} a &= \sqrt{b} \\ c &= \operatorname*{arg\,max}_k d \end{align}"
        formula = new_output("display_data", {"text/latex": r"$\displaystyle \frac{p}{q}$"})
        text = text_of(
            pdf_of(new_markdown_cell(f"# T\n\n{align}\n\n$$\n{align}\n$$"), code("y", formula))
        )
        assert "\\" not in text and "begin" not in text
        assert text.count("√") == 2
        assert "\N{MATHEMATICAL ITALIC SMALL P}" in text

    def test_a_formula_pandoc_does_not_know_is_shown_as_written(self):
        assert "frobnicate" in text_of(pdf_of(new_markdown_cell(r"# T" "\n\n" r"$\frobnicate{x}$")))

    def test_dataframe_is_a_table_and_not_its_text_twin(self):
        frame = pd.DataFrame({"method": ["uniform", "attention"], "ECE": [0.038, 0.0088]})
        output = shown("text/html", frame.to_html(notebook=True), caption="Errors, $n = 3$")
        text = text_of(pdf_of(code("frame", output)))
        assert re.search(r"Table 1\. Errors", text)
        assert "attention" in text and "0.0088" in text
        assert "PLAIN TWIN" not in text

    def test_styler_keeps_bold_colour_and_caption(self):
        frame = pd.DataFrame({"a": [1.0, 2.0]})
        styler = frame.style.highlight_max(props="font-weight: bold; background-color: #ffeeaa")
        html = styler.set_caption("Best in bold").to_html()
        with workshop() as place:
            source = str(Setter(place).blocks(read_html({"t": html})["t"]))
        assert source.count("#strong[") == 1 and source.count('fill: rgb("#ffeeaa")') == 1
        assert "Table 1. Best in bold" in text_of(pdf_of(code("s", shown("text/html", html))))

    @pytest.mark.parametrize("n_columns", [16, 40])
    def test_no_table_leaves_the_page(self, n_columns, margins):
        frame = pd.DataFrame([[f"{0.123456:.6f}"] * n_columns] * 3)
        frame.columns = [f"a_long_feature_name_{i}" for i in range(n_columns)]
        assert margins(code("frame", shown("text/html", frame.to_html()))) == 255

    def test_headings_of_several_words_do_not_push_a_table_off_the_page(self, margins):
        # Headings that break, beside columns whose entries are wider than their headings.
        frame = pd.DataFrame(
            {
                "corrupted": ["training + memory"] * 3,
                "held-out rows": ["long-tailed"] * 3,
                "ratio": ["0.01"] * 3,
                "method": ["distance (squared, tau = 1)"] * 3,
                "accuracy (%)": ["93.17"] * 3,
                "balanced accuracy (%)": ["93.17"] * 3,
                "NLL": ["0.447"] * 3,
                "Brier score": ["0.118"] * 3,
                "ECE": ["0.0491"] * 3,
                "n": ["1"] * 3,
            }
        )
        assert margins(code("frame", shown("text/html", frame.to_html(index=False)))) == 255

    def test_a_bold_mean_and_its_interval_stay_on_one_line(self):
        texts = {f"measure {i}": ["0.178 ± 0.012"] * 2 for i in range(5)}
        frame = pd.DataFrame({"method": ["distance (tuned) + TTA"] * 2, **texts})
        html = frame.style.hide(axis="index").set_properties(**{"font-weight": "bold"}).to_html()
        reader = pdf_of(code("frame", shown("text/html", html)))
        assert text_of(reader).replace("\xa0", " ").count("0.178 ± 0.012") == 10

    def test_a_table_too_wide_for_readable_print_stands_on_its_side(self):
        frame = pd.DataFrame([["0.0671 ± 0.0049"] * 8] * 3, columns=[f"k = {i}" for i in range(8)])
        frame.insert(0, "method", "distance (squared, tau = 1)")
        frame.insert(0, "measure", "balanced accuracy (%)")
        sizes = []

        def visit(text, matrix, text_matrix, font, size):
            if "0.0671" in text:
                sizes.append((size, matrix[0] * text_matrix[0] + matrix[2] * text_matrix[1]))

        reader = pdf_of(code("frame", shown("text/html", frame.to_html(index=False))))
        for page in reader.pages:
            page.extract_text(visitor_text=visit)
        assert sizes and min(size for size, _ in sizes) >= 7
        assert all(abs(across) < 1e-3 for _, across in sizes)  # lines run up the page

    def test_a_long_table_repeats_its_header(self):
        frame = pd.DataFrame({"accuracy_header": range(150)})
        reader = pdf_of(code("f", shown("text/html", frame.to_html())))
        assert len(reader.pages) > 1
        assert all("accuracy_header" in text_of_page(page) for page in reader.pages)

    def test_a_wide_markdown_table_stays_on_the_page(self, margins):
        row = "|" + "|".join(["0.123456"] * 24) + "|"
        assert margins(new_markdown_cell(f"# T\n\n{row}\n{'|--' * 24}|\n{row}")) == 255

    def test_figures_are_vector_numbered_and_captioned(self):
        first = code("# caption: First, $\\tau$.\nplot()", shown("image/svg+xml", SVG))
        second = code("plot()", shown("image/svg+xml", SVG), attnknn={"caption": "Second."})
        third = code("plot()", shown("image/svg+xml", SVG, caption="Third."))
        reader = pdf_of(first, code("plot()", shown("image/svg+xml", SVG)), second, third)
        text = text_of(reader)
        assert [n for n in "1234" if f"Figure {n}." in text] == ["1", "2", "3"]
        assert "# caption" not in text
        assert "PLAIN TWIN" not in text
        assert sum(len(page.images) for page in reader.pages) == 0

    def test_vector_is_preferred_to_raster(self):
        png = base64.b64encode(picture_bytes()).decode()
        both = new_output("display_data", {"image/png": png, "image/svg+xml": SVG})
        only = new_output("display_data", {"image/png": png})
        assert sum(len(page.images) for page in pdf_of(code("a", both)).pages) == 0
        assert sum(len(page.images) for page in pdf_of(code("a", only)).pages) == 1

    def test_a_pdf_figure_is_embedded(self):
        figure, _ = AttnKNNPDFExporter().from_notebook_node(
            new_notebook(cells=[new_markdown_cell("# Inner figure")])
        )
        output = new_output("display_data", {"application/pdf": base64.b64encode(figure).decode()})
        assert len(pdf_of(code("a", output)).pages) >= 1

    def test_a_cut_picture_is_reported_and_not_fatal(self):
        cut = base64.b64encode(picture_bytes((64, 64))[:60]).decode()
        text = text_of(pdf_of(code("a", new_output("display_data", {"image/png": cut}))))
        assert "cannot be read" in text

    def test_all_fonts_are_embedded(self):
        reader = pdf_of(new_markdown_cell("# T\n\nBody $x^2$ ✓ `code`"), code("x", stream("out")))
        fonts = list(fonts_of(reader))
        assert len(fonts) >= 3
        assert all({"/FontFile2", "/FontFile3"} & set(font.get_object()) for font in fonts)

    def test_noise_is_left_out(self):
        widget = new_output(
            "display_data",
            {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "WIDGET"},
        )
        bars = [
            stream("\r 10%|█   | 1/9 [00:00<00:01", "stderr"),
            stream(", 1.1it/s]\nreal warning\n", "stderr"),
        ]
        axes = new_output("execute_result", {"text/plain": "<Axes: >"}, execution_count=1)
        text = text_of(pdf_of(code("run()", *bars, widget, axes)))
        assert "real warning" in text
        assert "it/s" not in text and "WIDGET" not in text and "<Axes" not in text

    def test_errors_are_shown_in_red(self):
        error = new_output(
            "error", ename="ZeroDivisionError", evalue="by zero", traceback=["\x1b[31m1/0\x1b[0m"]
        )
        reader = pdf_of(code("1/0", error))
        assert "ZeroDivisionError: by zero" in text_of(reader)
        red = b"0.6392157 0.09803922 0.12156863"
        assert red in reader.pages[0].get_contents().get_data()

    @pytest.mark.parametrize(
        ("tag", "source", "output"),
        [
            ("hide-input", False, True),
            ("hide-output", True, False),
            ("hide-cell", False, False),
            ("remove-cell", False, False),
            ("plain", True, True),
        ],
    )
    def test_tags_hide(self, tag, source, output):
        text = text_of(pdf_of(code("SOURCE = 1", stream("RESULT"), tags=[tag])))
        assert ("SOURCE" in text, "RESULT" in text) == (source, output)

    def test_injected_parameters_are_a_labelled_block(self):
        cell = code("# Parameters\nk = 16\n", tags=["injected-parameters"])
        text = text_of(pdf_of(cell))
        assert "PARAMETERS" in text and "k = 16" in text and "# Parameters" not in text

    def test_parameters_are_shown_once_with_the_values_used(self):
        declared = code(
            "k = 5  # neighbours\nrates = [\n    0.1,\n]\nname = 'ä'", tags=["parameters"]
        )
        injected = code("# Parameters\nk = 16\nrates = [0.2, 0.4]\n", tags=["injected-parameters"])
        text = text_of(pdf_of(declared, injected))
        assert text.count("PARAMETERS") == 1 and "DEFAULT" not in text
        assert re.search(r"k = 16 +# neighbours", text) and "k = 5" not in text
        assert "rates = [0.2, 0.4]" in text and "0.1" not in text and "name = 'ä'" in text

    def test_parameters_that_compute_are_shown_as_they_are(self):
        declared = code("k = 5\nprint(k)", tags=["parameters"])
        text = text_of(pdf_of(declared, code("k = 16\n", tags=["injected-parameters"])))
        assert "DEFAULT PARAMETERS" in text and "k = 5" in text and "k = 16" in text

    def test_a_verdict_is_shown_without_the_call_that_says_it(self):
        said = new_output("display_data", {"text/markdown": "It **helps**."})
        text = text_of(pdf_of(code("say_verdict()", said, tags=["verdict"])))
        assert "It helps." in text and "say_verdict" not in text

    def test_figures_stand_where_they_are_drawn_before_the_words_that_follow(self):
        tall = SVG.replace('height="100pt" viewBox="0 0 300 100"', 'height="300pt"')
        filler = new_markdown_cell("\n\n".join(["Words of a paragraph. " * 12] * 3))
        plots = [code("# caption: Late.\nplot()", shown("image/svg+xml", tall)) for _ in range(3)]
        cells = [filler, *plots, new_markdown_cell("The words that follow.")]
        pages = "".join(text_of_page(page) for page in pdf_of(*cells).pages)
        before, _ = pages.split("The words that follow.")
        assert before.count("Late.") == 3

    def test_a_figure_stays_below_its_own_heading_and_on_no_later_page_than_the_next(self):
        filler = "\n\n".join(["Words of a paragraph. " * 12] * 4)
        tall = SVG.replace('height="100pt" viewBox="0 0 300 100"', 'height="330pt"')
        plots = [
            code(f"# caption: {name}.\nplot()", shown("image/svg+xml", tall))
            for name in ("Early", "Late")
        ]
        headings = [new_markdown_cell(f"## {name}\n\n{filler}") for name in ("First", "Second")]
        end = new_markdown_cell("## Third\n\nThe end.")
        title = new_markdown_cell("# Title\n\nWords.")
        reader = pdf_of(title, headings[0], plots[0], headings[1], plots[1], end)
        places = {
            name: place_of(reader, name) for name in ("First", "Early", "Second", "Late", "Third")
        }
        assert places["First"] < places["Early"] and places["Second"] < places["Late"]
        assert places["Late"][0] <= places["Third"][0]  # page

    def test_long_lines_and_words_stay_on_the_page(self, margins):
        long = "word " * 80 + "x" * 400
        error = new_output("error", ename="E", evalue=long, traceback=[long])
        formula = "$$" + " + ".join(["\\alpha_{long}"] * 60) + "$$"
        title = new_markdown_cell(f"# {long}\n\n{long} `{long}`\n\n{formula}\n\n```\n{long}\n```")
        assert margins(title, code(long, stream(long), error)) == 255

    def test_no_picture_leaves_the_page(self, margins):
        tall, wide = (
            SVG.replace("300", "{}").format(*[w] * 2).replace("100", "{}").format(*[h] * 2)
            for w, h in [(200, 3000), (4000, 100)]
        )
        outputs = [shown("image/svg+xml", svg, caption="c") for svg in (tall, wide)]
        assert margins(code("plot()", *outputs)) == 255
        assert len(pdf_of(code("plot()", *outputs)).pages) <= 2

    def test_unexecuted_notebooks_say_so(self):
        with pytest.warns(UserWarning, match="has not been executed"):
            reader = pdf_of(new_code_cell("x = 1"))
        assert "has not been executed" in text_of(reader)

    def test_the_same_notebook_gives_the_same_bytes(self, tmp_path):
        path = write(
            tmp_path, "a", new_markdown_cell("# T"), code("x", shown("image/svg+xml", SVG))
        )
        first = notebook_to_pdf(path, tmp_path / "1.pdf").read_bytes()
        assert notebook_to_pdf(path, tmp_path / "2.pdf").read_bytes() == first


def text_of_page(page):
    return page.extract_text().replace("\u200b", "")


class TestTrust:
    def test_odd_text_neither_breaks_nor_acts_anywhere(self):
        cells = [cell for nasty in NASTY for cell in self.cells_of(nasty)]
        run = {"run": NASTY[0]} | {nasty: [nasty] for nasty in NASTY}
        text = text_of(pdf_of(*cells, metadata={"attnknn": {"provenance": run}}))
        assert "root:" not in text and "could not be set" not in text

    def cells_of(self, nasty):
        clean_html = f"<table><caption>{nasty}</caption><tr><td>{nasty}</td></tr></table>"
        table = "| " + nasty.replace("\n", " ") + " | x |\n|--|--|\n| " + nasty[:20] + " | y |"
        outputs = [
            stream(nasty),
            new_output("display_data", {"text/markdown": nasty}),
            new_output("display_data", {"text/latex": nasty}),
            new_output("display_data", {"text/html": nasty}),
            new_output("display_data", {"text/html": clean_html}),
            new_output("display_data", {"image/svg+xml": SVG}, metadata={"caption": nasty}),
            new_output("error", ename=nasty, evalue=nasty, traceback=[nasty]),
        ]
        yield from (new_markdown_cell(text) for text in (f"# {nasty}", nasty, f"## {nasty}", table))
        yield code(nasty, *outputs)

    @pytest.mark.parametrize("nasty", ["= head", "- item", "+ item", "/ term: x", "1. one"])
    def test_a_table_cell_is_never_markup(self, nasty):
        marker = nasty.split()[0]
        reader = pdf_of(new_markdown_cell(f"# T\n\n| a | b |\n|--|--|\n| {nasty} | x |"))
        assert marker in text_of(reader)
        assert reader.outline == []

    def test_no_character_after_an_inline_makes_a_call_of_it(self):
        inlines = ["*x*", "**x**", "~~x~~", "`x`", "[x](https://a.b)", "[x](#t)", "$x$", "x^2^",
                   "<b>x</b>", "![x](no.png)", "<q>x</q>", "x[^1]", "***x***"]  # fmt: skip
        after = [".at(", "(1)", "[y]", "{z}", ".len()", ";", ":", "<t>", "\\[", "#panic()", "=",
                 "$", "_", "'", '"', "@t", "//", "/*", "~", "\\"]  # fmt: skip
        seams = [f"{inline}{end}q" for inline in inlines for end in after]
        text = text_of(pdf_of(new_markdown_cell("# T\n\n" + "\n\n".join(seams) + "\n\n[^1]: n")))
        assert text.count("q") >= len(seams) and "could not be set" not in text

    def test_text_is_never_evaluated(self):
        attack = '*x*.at(eval(`str( 7 * 191 )`.text)) #import "@preview/cetz:0.3.4" #panic()'
        raw = "```{=typst}\n#(7 * 191)\n```\n\n`#(7 * 191)`{=typst} <q id='#(7*191)'>x</q>"
        html = new_output(
            "display_data", {"text/html": f"<table><tr><td>{attack}</td></tr></table>"}
        )
        text = text_of(
            pdf_of(new_markdown_cell(f"# {attack}\n\n{attack}\n\n{raw}"), code("x", html))
        )
        assert "1337" not in text and text.count("cetz") == 3

    def test_ordinary_mathematics_is_set(self):
        symbols = r"\cap \sqcap \otimes \odot \ominus \bigcap \bigotimes \bigodot \Cap \sqrt{}"
        symbols += r" \frac{a}{} \overline{} \dot{x} \mathbf{} \circleddash \binom{}{}"
        text = text_of(
            pdf_of(new_markdown_cell(f"# T\n\n${symbols}$ and the sect of times.circle"))
        )
        assert all(sign in text for sign in "∩⊓⊗⊙⊖⋂⨂⨀⋒√⊝")
        assert "the sect of times.circle" in text and "could not be set" not in text

    def test_what_typst_refuses_costs_a_note(self, monkeypatch):
        monkeypatch.setattr("attnknn.paper.typst._renamed", lambda found: found.group())
        body = "# T\n\nBefore.\n\nBad $a \\cap b$ words.\n\nAfter $c$."
        text = text_of(pdf_of(new_markdown_cell(body)))
        assert "Before." in text and "After" in text and r"Bad a \cap b words." in text
        assert text.count("could not be set") == 1

    def test_what_pandoc_cannot_read_in_time_costs_its_cell(self, monkeypatch):
        monkeypatch.setattr(markup, "_SECONDS", 1.5)
        text = text_of(
            pdf_of(new_markdown_cell("# Title"), new_markdown_cell("[" * 300 + "]" * 300))
        )
        assert text.startswith("Title") and "cannot be set" in text and "[[[" in text

    def test_deep_nesting_ends_as_words(self):
        quotes, html = ">" * 400 + " deep", "<b>" * 3000 + "bold" + "</b>" * 3000
        lists = "\n".join("  " * i + "- deep" for i in range(150))
        cells = [new_markdown_cell(text) for text in ("# T", quotes, html, lists)]
        shown_html = shown("text/html", "<div>" * 3000 + "<table><tr><td>cell</td></tr></table>")
        text = text_of(pdf_of(*cells, code("x", shown_html)))
        assert "deep" in text and "bold" in text and "cell" in text

    def test_a_drawing_too_deep_for_typst_gives_way_to_its_other_form(self, tmp_path):
        svg = '<svg xmlns="http://www.w3.org/2000/svg">' + "<g>" * 2000 + "</g>" * 2000 + "</svg>"
        with workshop() as place:
            assert Workshop.add_picture(place, svg.encode()) is None
        png = base64.b64encode(picture_bytes()).decode()
        both = new_output("display_data", {"image/svg+xml": svg, "image/png": png})
        assert sum(len(page.images) for page in pdf_of(code("a", both)).pages) == 1

    @pytest.mark.parametrize(
        ("markdown", "expected"),
        [
            ("2024. A good year", "2024. A good year"),
            ("Text\n| a | b |\n|---|---|\n| c | d |", "a b\nc d"),
            ("<details><summary>Sum</summary>\n\nInner\n\n</details>", "Sum\nInner"),
            ("<blockquote>Said</blockquote>", "Said"),
            ("<dl><dt>Term</dt><dd>Meaning</dd></dl>", "Term\nMeaning"),
            ("<figure><figcaption>Told</figcaption></figure>", "Told"),
        ],
    )
    def test_common_markdown_and_html_is_read(self, markdown, expected):
        text = re.sub(" +", " ", text_of(pdf_of(new_markdown_cell(f"# T\n\n{markdown}"))))
        assert expected in text and "<" not in text

    def test_raw_cells_are_shown(self):
        assert "kept as it is" in text_of(pdf_of(nbformat.v4.new_raw_cell("kept as it is")))

    def test_class_names_come_out_as_they_are(self):
        name = 'cat_*#$@<dog>\\`"'
        frame = pd.DataFrame({name: [1]})
        text = text_of(pdf_of(code("f", shown("text/html", frame.to_html()))))
        assert name in text.replace(" ", "")  # pypdf takes kerning for a space

    def test_an_unclosed_fence_stays_in_its_cell(self):
        reader = pdf_of(new_markdown_cell("# T\n\n```\nopen"), new_markdown_cell("**next** cell"))
        assert "**" not in text_of(reader)

    def test_pictures_beside_the_notebook_and_attached(self, tmp_path):
        (tmp_path / "near.png").write_bytes(picture_bytes((5, 5)))
        attached = {"in.png": {"image/png": base64.b64encode(picture_bytes((7, 7))).decode()}}
        cell = new_markdown_cell(
            "# T\n\n![a](near.png) ![b](attachment:in.png)", attachments=attached
        )
        reader = PdfReader(notebook_to_pdf(write(tmp_path, "a", cell)))
        assert sorted(i.image.size for page in reader.pages for i in page.images) == [
            (5, 5),
            (7, 7),
        ]

    def test_pictures_from_elsewhere_become_their_alternative_text(self, tmp_path):
        inside = tmp_path / "inside"
        inside.mkdir()
        (tmp_path / "secret.png").write_bytes(picture_bytes())
        (inside / "link.png").symlink_to(tmp_path / "secret.png")
        places = [
            "https://example.org/x.png",
            "../secret.png",
            str(tmp_path / "secret.png"),
            "link.png",
        ]
        body = "\n\n".join(f"![alternative {i}]({place})" for i, place in enumerate(places))
        reader = PdfReader(notebook_to_pdf(write(inside, "a", new_markdown_cell(f"# T\n\n{body}"))))
        assert sum(len(page.images) for page in reader.pages) == 0
        assert all(f"alternative {i}" in text_of(reader) for i in range(4))

    def test_links_to_missing_or_repeated_places_are_plain_words(self):
        body = "# T\n\n## A\n\n## B\n\n[to a](#a) [gone](#gone) [code](javascript:x)"
        reader = pdf_of(new_markdown_cell(body), new_markdown_cell("## B"))
        annotations = [a for page in reader.pages for a in page.get("/Annots", [])]
        assert len(annotations) == 1

    def test_typst_sees_nothing_outside_of_its_folder(self, own_tempdir):
        with pytest.raises(PDFError, match=r"(?i)not found|outside|denied"), workshop() as place:
            place.compile('#read("/etc/passwd")')
        with pytest.raises(PDFError), workshop() as place:
            place.compile('#read("../../etc/passwd")')

    def test_nothing_is_left_behind(self, own_tempdir):
        pdf_of(new_markdown_cell("# T"))
        assert list(own_tempdir.iterdir()) == []

    def test_bad_files_are_refused(self, tmp_path):
        (tmp_path / "a.ipynb").write_text("not json")
        with pytest.raises(ValueError, match="path must be a Jupyter notebook, got path="):
            notebook_to_pdf(tmp_path / "a.ipynb")
        (tmp_path / "c.ipynb").write_text(
            '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}'
        )
        with pytest.raises(ValueError, match=r"must be a Jupyter notebook, got path=.*c\.ipynb"):
            notebook_to_pdf(tmp_path / "c.ipynb")
        (tmp_path / "b.ipynb").write_text("[1, 2]")
        with pytest.raises(ValueError, match="path must be a Jupyter notebook"):
            notebook_to_pdf(tmp_path / "b.ipynb")
        with pytest.raises(FileNotFoundError):
            notebook_to_pdf(tmp_path / "missing.ipynb")


class TestReport:
    def notebooks(self, folder):
        for i, name in enumerate(["Alpha", "Beta"], start=1):
            said = new_output(
                "display_data", {"text/markdown": f"## Answer\n\nSentence of {name}."}
            )
            yield write(
                folder,
                f"0{i}",
                new_markdown_cell(f"# {name} study\n\nIntroduction."),
                new_markdown_cell("## Same heading\n\n[back](#same-heading)"),
                code("# caption: A figure.\nplot()", shown("image/svg+xml", SVG)),
                code("say()", said, tags=["verdict", "hide-cell"]),
            )

    def test_verdicts_and_contents_first_then_a_page_for_each(self, tmp_path):
        path = bind_report(
            list(self.notebooks(tmp_path)),
            tmp_path / "new" / "report.pdf",
            title="All = results_",
            provenance={"run": "quick"},
            verdicts=None,
        )
        reader = PdfReader(path)
        pages = [text_of_page(page) for page in reader.pages]
        assert len(pages) == 3
        assert pages[0].startswith("All = results_")
        assert "run quick" in pages[0]
        assert "Sentence of Alpha." in pages[0] and "Sentence of Beta." in pages[0]
        assert re.search(r"Alpha study[ .]*2\b", pages[0])
        assert re.search(r"Beta study[ .]*3\b", pages[0])
        assert "Figure 1." in pages[1] and "Figure 2." in pages[2]
        chapters = [entry.title for entry in reader.outline if not isinstance(entry, list)]
        assert chapters == ["Alpha study", "Beta study"]

    def report_of(self, folder, verdict, **options):
        said = new_output("display_data", {"text/markdown": verdict})
        cells = [new_markdown_cell("# Study"), code("say()", said, tags=["verdict"])]
        path = write(folder, "01", *cells)
        made = bind_report([path], folder / "r.pdf", title="T", provenance={}, **options)
        return [text_of_page(page) for page in PdfReader(made).pages]

    def test_page_one_shows_the_first_points_and_where_the_rest_is(self, tmp_path):
        points = [f"- Point {i}: {'many words ' * 10}." for i in range(9)]
        first, second = self.report_of(tmp_path, "\n".join(["Compared:", "", *points]))
        assert "Compared:" in first and "Point 1:" in first and "Point 5:" not in first
        assert re.search(r"… \d more, page 2", first)
        assert all(f"Point {i}:" in second for i in range(9))

    def test_page_one_counts_points_that_end_in_a_few_words(self, tmp_path):
        ends = ["holds"] * 4 + ["does not hold"] * 2
        verdict = "\n".join(f"- Claim {i}: **{end}**." for i, end in enumerate(ends))
        first, _ = self.report_of(tmp_path, verdict)
        assert "Of 6 points: holds 4, does not hold 2." in first and "Claim" not in first

    def test_a_preface_is_a_chapter_of_its_own(self, tmp_path):
        preface = "# Claims\n\nJudged.\n\n| claim | evidence |\n|:--|:--|\n| yes | " + "long " * 40
        first, second, third = self.report_of(tmp_path, "Yes.", preface=f"{preface}|\n")
        assert re.search(r"Claims[ .]*2\b", first) and "Judged." in second and "Study" in third
        with pytest.raises(ValueError, match="preface must hold a heading"):
            self.report_of(tmp_path, "Yes.", preface="words")

    def test_given_verdicts_replace_the_found_ones(self, tmp_path):
        verdicts = [("Given_title", "Holds at $k = 3$.")]
        path = bind_report(
            list(self.notebooks(tmp_path)),
            tmp_path / "r.pdf",
            title="T",
            provenance={},
            verdicts=verdicts,
        )
        first = text_of_page(PdfReader(path).pages[0])
        assert "Given_title" in first and "Holds at" in first and "Sentence of" not in first

    def test_a_missing_verdict_is_said(self, tmp_path):
        path = write(tmp_path, "a", new_markdown_cell("# Silent"))
        report = bind_report([path], tmp_path / "r.pdf", title="T", provenance={}, verdicts=None)
        assert "No verdict was computed" in text_of_page(PdfReader(report).pages[0])

    def test_chapters_of_one_title_are_told_apart_by_their_files(self, tmp_path):
        named = {"01_a.seed0": "Training", "01_a.seed1": "Training", "02_b": "Results"}
        paths = [write(tmp_path, name, new_markdown_cell(f"# {t}")) for name, t in named.items()]
        text = text_of(PdfReader(bind_report(paths, tmp_path / "r.pdf", title="T", provenance={})))
        assert "Training (seed0)" in text and "Training (seed1)" in text
        assert "Results (" not in text

    def test_no_notebooks_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="notebooks must name at least one"):
            bind_report([], tmp_path / "r.pdf", title="T", provenance={}, verdicts=None)


class TestCommandLine:
    def test_nbconvert_finds_the_exporter_and_keeps_its_own(self):
        from nbconvert.exporters import PDFExporter, get_exporter

        assert get_exporter("attnknn-pdf") is AttnKNNPDFExporter
        assert get_exporter("pdf") is PDFExporter

    @pytest.mark.slow
    def test_jupyter_nbconvert_writes_a_pdf(self, tmp_path):
        path = write(tmp_path, "a", new_markdown_cell("# T"), code("SOURCE", stream("RESULT")))
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "nbconvert",
            "--to",
            "attnknn-pdf",
            "--no-input",
        ]
        subprocess.run([*command, str(path)], check=True, capture_output=True)
        text = text_of(PdfReader(tmp_path / "a.pdf"))
        assert "RESULT" in text and "SOURCE" not in text
