"""The report of a comparison: `report.md`, `index.html`, `scores.csv`, `tables.csv` and the plots as PNG and SVG."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_algorithms.lab import chosen, plots, ranking, significance, tables, usefulness
from fl_algorithms.lab.markdown import Block, markdown
from fl_algorithms.lab.plots import Picture
from fl_algorithms.lab.results import PREFERRED, Results, load
from fl_algorithms.lab.tables import CSV_COLUMNS, Stat, Table
from wardround.local import durable
from wardround.pages import rendering
from wardround.pages.blocks import Code, Figure, Grid, Heading, Items, Page, Paragraph

SCORE_COLUMNS = ("row", "seed", "site", "checkpoint", "split", "metric", "value")


def write(folder: Path, out: Path, metric: str = "", reference: str = "") -> list[Path]:
    """Make the report of ``folder``'s runs in ``out``; the paths of what was written.

    Args:
        metric, reference: what is shown, and the row that others are compared with; "" for the suite's.

    Raises:
        BadData: ``folder`` holds no comparison, or one without a finished run.
        UsageProblem: its runs have no such metric, or it has no such row.
        NeedsPerson: matplotlib is not installed.
        CannotWrite: ``out`` cannot be written.
    """
    results = load(folder, metric, reference)
    title = str(results.record["title"])
    with plots.style():
        made = _Report(results)
    files = {
        "report.md": markdown(title, made.blocks).encode(),
        "index.html": rendering.html(Page(title, "Comparison of methods", made.blocks)).encode(),
        "tests.csv": as_csv(significance.TESTS_COLUMNS, significance.tests_csv(results, made.tests)),
        "scores.csv": as_csv(SCORE_COLUMNS, ((*row[:-1], repr(row[-1])) for row in tables.every_score(results))),
        "tables.csv": as_csv(CSV_COLUMNS, (line for table in made.tables for line in table.csv_rows())),
    }
    for name, picture in made.pictures.items():
        files[f"{name}.png"], files[f"{name}.svg"] = picture.png, picture.svg
    durable.make_folder(out)
    for name, content in files.items():
        durable.write_file(out / name, content)
    return [out / name for name in files]


def warnings(results: Results) -> list[str]:
    """What a reader must know before the numbers, a sentence each."""
    alone = ["There is one seed, so no interval."] if len(results.seeds) == 1 else []
    return [*_incomplete(results), *useless(results), *tables.identical(results), *tables.undefined(results), *alone]


def useless(results: Results) -> list[str]:
    """In which metrics, and where, rows are no better than the same answer for everyone; a sentence a metric."""
    found = []
    for row in results.reported:
        found += usefulness.behind(row.label, *usefulness.of_runs(row.runs.values(), row.shown_kind))
    return usefulness.warnings(found)


class _Report:
    """The blocks of a report, in the order in which they are read."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.blocks: list[Block] = []
        self.tables: list[Table] = []
        self.pictures: dict[str, Picture] = {}
        self.tests = significance.compared(results)
        self._head()
        self._scores()
        self._usefulness()
        self._differences()
        self._tests()
        self._sites()
        self._choices()
        self._tuning()
        self._matrix()
        self._protocol()
        self._complete()
        self._repeat()

    def _head(self) -> None:
        results = self.results
        seeds, sites = f"{results.seeds[0]} to {results.seeds[-1]}", ", ".join(results.record["sites"])
        rows, doubts = ranking.ranked(results), warnings(results)
        self.blocks.append(ranking.answer(rows, results, len(doubts)))
        self.blocks.append(
            Paragraph(
                f"{len(results.rows)} rows, {len(results.seeds)} seeds ({seeds}), sites {sites}. Scores are "
                f"{results.metric} on {tables.split_of(results)} rows. Within a run the sites count alike; "
                "a cell is the mean over the runs ± the radius of its 95 % interval (Student's t), which covers seeds: "
                "initial weights, validation split and batches, not other patients."
            )
        )
        if doubts:
            self.blocks.append(Items("Read this before the numbers.", tuple(doubts), open=True))
        about = (
            f"One kind of checkpoint of each row: the first that it has of {', '.join(PREFERRED)}. In brackets, the "
            "95 % interval of the difference with the same seed in both."
        )
        self.blocks += [Heading("Best first"), Paragraph(about), ranking.grid(rows, results)]

    def _scores(self) -> None:
        table = self._table("Scores", tables.main(self.results))
        self._dots(
            "scores", table, "mean", plots.axis_of(self.results.metric), "Mean over the runs, with 95 % intervals."
        )

    def _usefulness(self) -> None:
        """Beside each score that of a constant; and how well probabilities are calibrated."""
        rows, metrics = [], list[str]()
        for row in self.results.reported:
            scores, constants = usefulness.of_runs(row.runs.values(), row.shown_kind)
            metrics = metrics or usefulness.columns(scores)
            means = (
                (usefulness.mean_over(scores, metric), usefulness.mean_over(constants, metric)) for metric in metrics
            )
            chosen = usefulness.thresholds(row.runs.values(), row.shown_kind)
            limits = ", ".join(f"{site} {value:.2f}" for site, value in chosen.items()) or tables.NONE
            rows.append((row.label, *(usefulness.beside(*pair) for pair in means), limits))
        if not metrics:
            return
        about = (
            "In brackets, what the best answer scores that is the same for every row of a site: the majority for "
            "everyone. A model that is no better than that is of no use there. Calibration is right at slope 1 and "
            "intercept 0. Thresholds were chosen on each site's validation rows; accuracy counts the likeliest class."
        )
        columns = ("row", *metrics, "thresholds")
        numbers = tuple(range(1, len(metrics) + 1))
        self.blocks += [Heading("Is it of any use?"), Paragraph(about), Grid(columns, tuple(rows), numbers=numbers)]
        if counts := usefulness.positives(next(iter(self.results.reported[0].runs.values()))):
            self.blocks.append(Grid(("site", "rows of the first seed"), tuple(counts.items()), 2))

    def _tests(self) -> None:
        """The tests that reviewers ask for."""
        results = self.results
        if self.tests:
            about = (
                "Runs are paired by seed, and Holm's p allows for all rows of the table. A small p says that the "
                "difference is not the luck of the seeds; it says nothing of other patients."
            )
            grid = significance.tests_grid(results, self.tests)
            self.blocks += [Heading("Tests against the reference"), Paragraph(about), grid]
        if (ranked := significance.ranks(results)) is not None:
            found, labels = ranked
            self.blocks += [Heading("Ranks over the seeds"), Paragraph(significance.ranks_words(found))]
            self.blocks.append(significance.ranks_grid(found, labels))
        if (drawn := significance.patients(results)) is not None:
            about = (
                "The scored rows of each site were drawn again with replacement, the same draws for every row of this "
                "table and every seed. The interval is of the mean over seeds and sites."
            )
            self.blocks += [Heading("Other patients"), Paragraph(about), drawn]

    def _differences(self) -> None:
        table = tables.differences(self.results)
        if table is None or not table.cells:
            return
        reference = next(line for line in self.results.lines if line.name == self.results.record["reference"])
        self._table(
            f"Against {reference.label}, run by run",
            table,
            "Row minus reference, with the same seed in both. Where the interval holds 0, no difference is shown.",
        )
        self._dots(
            "differences", table, f"minus {reference.name}",
            f"{self.results.metric}, difference from {reference.label}",
            "Mean of the paired differences, with 95 % intervals.", zero=True,
        )  # fmt: skip

    def _sites(self) -> None:
        self._table("Site by site", tables.per_site(self.results))

    def _choices(self) -> None:
        if (choices := chosen.choices(self.results)) is None:
            return
        about = (
            "On its validation rows each site chose what it uses; two names are two models that answer together. How "
            "often, over the runs:"
        )
        self.blocks += [Heading("What each site chose"), Paragraph(about), choices]
        if (worth := chosen.worth(self.results)) is not None:
            self._table("", worth, f"{self.results.metric} of what was chosen minus that of the other checkpoints.")

    def _tuning(self) -> None:
        grid = tables.tuned(self.results)
        if grid is not None:
            about = (
                "Chosen on validation loss, the sites' weighted by their validation rows, with seeds that no reported "
                "run has. Test rows were not looked at."
            )
            self.blocks += [Heading("Tuned settings"), Paragraph(about), grid]

    def _matrix(self) -> None:
        results = self.results
        table = tables.local_global(results)
        panels = {}
        for row in results.reported:
            kind = row.shown_kind
            if (matrix := tables.mean_matrix(results, row, kind)) is not None:
                panels[f"{row.label} ({plots.KIND_LABELS[kind]})"] = matrix
        if not panels:
            return
        self.blocks.append(Heading("At home and away"))
        self._picture(
            "matrix", plots.matrices(results.record["sites"], panels, results.metric),
            f"Heat maps: {results.metric} of each site's model at each site",
            "Each site's model (down) on each site's held-out rows (across), averaged over the runs.",
        )  # fmt: skip
        if table is not None:
            about = (
                "local and global are FedSoup's two tests, which have no row in common: each model on its own site's "
                "rows, and on a union with equally many rows of each site. other sites leaves out the model's own."
            )
            self._table("", table, about)
            self._columns(
                "local_global", {"local": (table, "local"), "global": (table, "global")}, results.metric,
                "FedSoup's two tests, with 95 % intervals.",
            )  # fmt: skip

    def _protocol(self) -> None:
        self._personalisation()
        protocol = self.results.record["suite"]["protocol"]
        tent = (
            f"The model adapts its batch norms to the test rows as they come, {protocol['tent_batch']} at a time, "
            f"learning rate {protocol['tent_learning_rate']}{', anew for each batch' if protocol['episodic'] else ''}."
        )
        sharp = "The Hessian's eigenvalue of largest magnitude, median over the training batches; lower is flatter."
        unseen = "The federation ran again without the site, and its models met all of that site's rows."
        still, adapting, metric = tables.local_global(self.results), tables.tent(self.results), self.results.metric
        for name, heading, table, about, series, axis in (
            (
                "tent", "Adapting at test time (Tent)", adapting, tent,
                {"global, as it is": (still, "global"), "global, adapting": (adapting, "global")}, metric,
            ),
            (
                "sharpness", "Sharpness", (sharpness := tables.sharpness(self.results)), sharp,
                {"median of the sites": (sharpness, "median")}, "eigenvalue",
            ),
            (
                "unseen", "At a site that took no part", (away := tables.leave_one_out(self.results)), unseen,
                {"mean of the sites": (away, "mean")}, metric,
            ),
        ):  # fmt: skip
            if table is not None:
                self._table(heading, table, about)
                self._columns(name, series, axis, f"{heading}: mean over the runs, with 95 % intervals.")

    def _personalisation(self) -> None:
        table = tables.personalisation(self.results)
        if table is None:
            return
        protocol = self.results.record["suite"]["protocol"]
        amounts, unit = [0, *protocol["personalisation"]], protocol["personalisation_unit"]
        self._table(
            "After fine-tuning at each site",
            table,
            f"{unit.capitalize()} on the site's training rows; 0 is the checkpoint itself.",
        )
        panels = {}
        for row in self.results.reported:
            tests = {
                test: [table.cells.get((row.name, row.shown_kind, f"{test} at {amount}")) for amount in amounts]
                for test in ("local", "global")
            }
            if any(stat is not None for stats in tests.values() for stat in stats):
                panels[f"{row.label} ({plots.KIND_LABELS[row.shown_kind]})"] = tests
        self._picture(
            "personalisation", plots.curves(amounts, panels, unit, self.results.metric),
            f"Curves: {self.results.metric} after fine-tuning, local and global",
            "Local: on the own site's rows. Global: on a union with equally many rows of each site.",
        )  # fmt: skip

    def _complete(self) -> None:
        failures = [failure for row in self.results.rows for failure in row.failures]
        if failures:
            self.blocks.append(Heading("Runs that failed"))
            self.blocks.append(Grid(("run", "why"), tuple(_split(failure) for failure in failures), 2))

    def _repeat(self) -> None:
        record = self.results.record
        facts = [
            ("suite", f"{record['name']}, digest {record['digest']}"),
            ("seeds", f"{self.results.seeds[0]} to {self.results.seeds[-1]}"),
            *((what.replace("_", " "), str(version)) for what, version in record["versions"].items()),
            *((f"data of {site}", digest) for site, digest in record["data"].items()),
        ]
        self.blocks += [Heading("To repeat it"), Code(record["command"]), Grid(("what", "which"), tuple(facts), 2)]
        rows, total = [], 0.0
        for row in self.results.reported:
            seed, run = next(iter(row.runs.items()))
            seconds = fmean(run["seconds"]["cpu"] for run in row.runs.values())
            total += seconds
            rows.append((row.label, str(seed), run["study_digest"], f"{seconds:.1f}"))
        about = (
            "The study's digest of each row's first run; every run's file has its own, and the digest of its model. "
            f"One run of every row, with all that is measured of it, takes {total:.0f} s of one core."
        )
        self.blocks += [Paragraph(about), Grid(("row", "seed", "study digest", "CPU s a run"), tuple(rows), 3)]

    def _table(self, heading: str, table: Table, about: str = "") -> Table:
        if heading:
            self.blocks.append(Heading(heading))
        if about:
            self.blocks.append(Paragraph(about))
        self.blocks.append(table.grid)
        self.tables.append(table)
        return table

    def _dots(self, name: str, table: Table, column: str, axis: str, caption: str, *, zero: bool = False) -> None:
        lines = [line for line in self.results.lines if any(row == line.name for row, _, _ in table.cells)]
        series = {
            kind: {
                line.label: table.cells[line.name, kind, column]
                for line in lines
                if (line.name, kind, column) in table.cells
            }
            for kind in self.results.kinds
            if any(of == kind and at == column for _, of, at in table.cells)
        }
        picture = plots.dots([line.label for line in lines], series, axis, zero=zero)
        self._picture(name, picture, f"Dot plot: {axis} of each row", caption)

    def _columns(self, name: str, series: dict[str, tuple[Table | None, str]], axis: str, caption: str) -> None:
        """Columns of tables beside each other, for each row's shown kind of checkpoint."""
        rows = self.results.reported
        drawn: dict[str, dict[str, Stat]] = {}
        for label, (table, column) in series.items():
            cells = {} if table is None else table.cells
            for row in rows:
                if (stat := cells.get((row.name, row.shown_kind, column))) is not None:
                    drawn.setdefault(label, {})[row.label] = stat
        if drawn:
            picture = plots.dots([row.label for row in rows], drawn, axis)
            kinds = ", ".join(f"{row.label}: {row.shown_kind}" for row in rows if row.shown_kind != PREFERRED[0])
            about = f" Checkpoints are {PREFERRED[0]}{f' ({kinds})' if kinds else ''}."
            self._picture(name, picture, f"Dot plot: {axis} of each row", caption + about)

    def _picture(self, name: str, picture: Picture, alt: str, caption: str) -> None:
        self.pictures[name] = picture
        self.blocks.append(Figure(name, alt, caption, picture.svg))


def _incomplete(results: Results) -> list[str]:
    """Rows without all of their runs."""
    sentences = []
    for row in results.rows:
        if not row.missing:
            continue
        why = ", for its tuning is not complete" if row.tuned and row.choice is None else ""
        named = ", ".join(map(str, row.missing[:12])) + (" …" if len(row.missing) > 12 else "")
        sentences.append(
            f"{row.label}: {len(row.runs)} of {len(results.seeds)} seeds{why}; missing are {named}"
            + (f"; {len(row.failures)} runs failed, see below" if row.failures else "")
            + "."
        )
    return sentences


def _split(failure: str) -> tuple[str, str]:
    row, seed, why = failure.split(": ", 2)
    return f"{row}: {seed}", why


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A CSV file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()
