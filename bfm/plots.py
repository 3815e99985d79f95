# SPDX-License-Identifier: Apache-2.0
"""The plots of a report: SVG to stand inside an HTML page, in the page's own ink and paper.

Text stays text (any script shows, and can be selected), nothing is loaded, names are data.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

Row = Mapping[str, object]

# `_svg` turns all of these into the page's colours, which follow the reader's light or dark.
INK, PAPER = "#101112", "#fefdfc"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
)  # Okabe and Ito, but for 4
MARKERS = "osD^vP"
SERIES = len(COLOURS)  # more lines than this in one plot cannot be told apart
WIDTH = 5.6  # inches of 72 units: shown near this size, so that text stays readable on a phone
_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), INK),
    **dict.fromkeys(("ytick.color", "grid.color"), INK),
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "bfm",  # the same numbers give the same bytes
    "font.size": 11,
    "figure.dpi": 72,  # the unit of SVG, so that measured text and drawn text agree
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def label(text: object, width: int = 26) -> str:
    """Return a name as one short line (matplotlib hides names that start with an underscore)."""
    line = " ".join(str(text).split()) or "(no name)"
    line = line if len(line) <= width else line[: width - 1] + "…"
    return " " + line if line.startswith("_") else line


def accuracy_tokens(rows: Sequence[Row]) -> str:
    """Accuracy with its interval against mean prompt tokens, each point named next to it."""
    x, y = _columns(rows, "tokens", "accuracy")
    y = 100 * y
    with _figure("tokens", 3.4 + 0.09 * len(rows)) as (figure, axis, done):
        for control, colour, marker in ((False, COLOURS[0], "o"), (True, INK, "s")):
            at = np.array([bool(row.get("control")) == control for row in rows])
            if at.any():
                face = PAPER if control else colour
                error = _error(rows, y, at)
                axis.errorbar(x[at], y[at], error, fmt=marker, color=colour, mfc=face, ms=6,
                              elinewidth=1, label="control" if control else "method")  # fmt: skip
        if x.min() > 0 and x.max() > 8 * x.min():
            axis.set_xscale("log")
            _plain_log(axis.xaxis)
        axis.margins(0.14, 0.12)
        axis.set(xlabel="prompt tokens read for a question (mean)", ylabel="accuracy, %")
        if any(row.get("control") for row in rows):
            _legend(figure, axis)
        figure.draw_without_rendering()  # fixes where the points stand
        _name_points(axis, x, y, [label(row["method"], 28) for row in rows], _error(rows, y))
    return done[0]


def recall_at_k(pairs: Sequence[tuple[float, float]], ceiling: float | None) -> str:
    """Evidence recall against the size of the shortlist, with the ceiling as a dashed line."""
    k, recall = np.array(pairs, float).T
    with _figure("recall", 3.0) as (figure, axis, done):
        axis.plot(k, 100 * recall, marker="o", color=COLOURS[0], clip_on=False)
        if ceiling is not None:
            name = f"ceiling: oracle within K, {100 * ceiling:.1f} %"
            axis.axhline(100 * ceiling, color=COLOURS[1], linestyle="--", linewidth=1.5, label=name)
            _legend(figure, axis)
        axis.set(xlabel="K, turns on the shortlist", ylabel="evidence turns kept, %", ylim=(0, 104))
        axis.xaxis.get_major_locator().set_params(integer=True)
    return done[0]


def reliability(bins: Sequence[tuple[float, float, float]]) -> str:
    """Predicted probability of opening against how often memory was needed, with Wilson intervals."""
    predicted, share, n = np.array(bins, float).T
    middle = (share + 1.92 / n) / (1 + 3.84 / n)
    half = 1.96 / (1 + 3.84 / n) * np.sqrt(share * (1 - share) / n + 0.96 / n**2)
    error = np.maximum(0, [share - (middle - half), middle + half - share])
    with _figure("gate", 4.2) as (_, axis, done):
        axis.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
        axis.errorbar(predicted, share, error, fmt="-", color=COLOURS[0], elinewidth=1.2)
        axis.scatter(predicted, share, 20 + 180 * n / n.max(), color=COLOURS[0], zorder=3)
        axis.set(xlabel="predicted probability that the memory is needed", xlim=(-0.04, 1.04),
                 ylabel="share where it was needed", ylim=(-0.04, 1.04))  # fmt: skip
    return done[0]


def two_distributions(evidence: Sequence[float], other: Sequence[float]) -> str:
    """Histograms of saliency of evidence and of other turns; the outermost bins hold the tails."""
    both = np.concatenate([evidence, other]).astype(float)
    low, high = np.percentile(both, [0.5, 99.5])
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    edges = np.linspace(low, high, 31)
    with _figure("saliency", 3.2) as (figure, axis, done):
        groups = (("other turns", other), ("evidence turns", evidence))
        for (name, values), colour, line in zip(groups, COLOURS, ("-", "--"), strict=False):
            if not len(values):
                continue
            share = np.histogram(np.clip(values, low, high), edges)[0] / len(values)
            text = f"{name} ({len(values):,}), median {np.median(values):+.2f}"
            axis.stairs(100 * share, edges, fill=True, color=colour, alpha=0.25)
            axis.stairs(100 * share, edges, color=colour, linewidth=1.6, linestyle=line, label=text)
            axis.axvline(np.median(values), color=colour, linestyle=line, linewidth=1)
        axis.set(xlabel="Sal_q, nats", ylabel="share of turns, %")
        _legend(figure, axis)
    return done[0]


def dots(rows: Sequence[Row], name: str, value: str, xlabel: str, zero: bool = True) -> str:
    """One line a row: its name, its value as a dot and its interval."""
    (x,) = _columns(rows, value)
    y = np.arange(len(rows))[::-1]
    with _figure("dots-" + value, 1.0 + 0.32 * len(rows)) as (_, axis, done):
        if zero:
            axis.axvline(0, color=INK, linewidth=1, linestyle=":")
        error = _error(rows, x, scale=1)
        axis.errorbar(x, y, xerr=error, fmt="o", color=COLOURS[0], elinewidth=1.5, ms=6)
        names = [label(row[name]) + (f" ({row['n']:,})" if row.get("n") else "") for row in rows]
        axis.set_yticks(y, names)
        axis.set(xlabel=xlabel, ylim=(-0.6, len(rows) - 0.4))
    return done[0]


def lines_by_bin(rows: Sequence[Row], methods: Sequence[str], xlabel: str, name: str) -> str:
    """Accuracy with intervals by bin, a line a method, moved sideways so that intervals are seen."""
    bins = list(dict.fromkeys(str(row["bin"]) for row in rows))
    with _figure(name, 3.4 + 0.2 * ((len(methods) + 1) // 2)) as (figure, axis, done):
        for i, method in enumerate(methods):
            own = [row for row in rows if row["method"] == method]
            (y,) = _columns(own, "accuracy")
            x = np.array([bins.index(str(row["bin"])) for row in own], float)
            x += 0.5 * ((i + 0.5) / len(methods) - 0.5)
            axis.errorbar(x, 100 * y, _error(own, 100 * y), color=COLOURS[i], marker=MARKERS[i],
                          ms=5, lw=1.2, elinewidth=1, label=label(method))  # fmt: skip
        steep = max(map(len, bins)) * len(bins) > 48
        axis.set_xticks(range(len(bins)), [label(b, 16) for b in bins], rotation=30 if steep else 0,
                        ha="right" if steep else "center")  # fmt: skip
        axis.grid(axis="x", visible=False)
        axis.set(xlabel=xlabel, ylabel="accuracy, %")
        _legend(figure, axis)
    return done[0]


def cost(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Median seconds a question against turns of history; a whisker reaches to the 95th percentile."""
    with _figure("cost", 3.4 + 0.2 * ((len(methods) + 1) // 2)) as (figure, axis, done):
        for i, method in enumerate(methods):
            own = sorted((r for r in rows if r["method"] == method), key=lambda r: r["turns"])
            turns, p50 = _columns(own, "turns", "p50_s")
            p95 = [max(r["p50_s"], r["p95_s"]) if r.get("p95_s") else r["p50_s"] for r in own]
            turns = turns * (1 + 0.03 * (i - (len(methods) - 1) / 2))  # whiskers apart
            axis.errorbar(turns, p50, [np.zeros(len(own)), p95 - p50], color=COLOURS[i],
                          marker=MARKERS[i], ms=5, lw=1.2, elinewidth=1,
                          label=label(method))  # fmt: skip
        turns, p50 = _columns(rows, "turns", "p50_s")
        if turns.min() > 0 and p50.min() > 0:
            axis.loglog()
            _plain_log(axis.xaxis)
            _plain_log(axis.yaxis)
            if turns.max() < 30 * turns.min():
                axis.set_xticks(sorted(set(turns)), minor=False)
        axis.set(xlabel="turns in the history", ylabel="seconds a question")
        _legend(figure, axis)
    return done[0]


# Parts


@contextlib.contextmanager
def _figure(name: str, height: float) -> Iterator[tuple[Figure, object, list[str]]]:
    """Open a figure with one axis; when the block is done the list holds its SVG."""
    done: list[str] = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The page's own fonts draw the text; what the measuring font lacks is of no matter.
        warnings.filterwarnings("ignore", r"(?s).*[Gg]lyph.*missing from")
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
        axis = figure.add_subplot(facecolor="none")
        yield figure, axis, done
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    done.append(_svg(buffer.getvalue(), name))


def _svg(document: bytes, name: str) -> str:
    """Make an SVG document an element of HTML: own ids, no namespaces, no style for all the page."""
    root = ElementTree.fromstring(document)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for key, value in attributes.items():
            value = value.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
            for i, colour in enumerate(COLOURS):
                value = value.replace(colour, f"var(--c{i})")
            if key == "id" or value.startswith("#"):
                value = value.replace("#", f"#{name}-") if value[0] == "#" else f"{name}-{value}"
            attributes[key] = value.replace("url(#", f"url(#{name}-")
        element.attrib.clear()
        element.attrib.update(attributes)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib["aria-hidden"] = "true"  # the same numbers stand in the table below
    return ElementTree.tostring(root, encoding="unicode")


def _columns(rows: Sequence[Row], *names: str) -> list[np.ndarray]:
    return [np.array([row[name] for row in rows], float) for name in names]


def _error(rows: Sequence[Row], value, keep=None, scale: float = 100) -> np.ndarray:
    """[2, row] distances to the interval's ends; 0 where a row has no interval."""
    ends = [(row.get("low"), row.get("high")) for row in rows]
    span = [(v, v) if None in e else (scale * e[0], scale * e[1])
            for v, e in zip(value, ends, strict=True)]  # fmt: skip
    low, high = np.array(span, float).T
    error = np.maximum(0, [value - low, high - value])
    return error if keep is None else error[:, keep]


def _plain_log(axis) -> None:
    """Write numbers, not powers of ten, at 1, 2 and 5 of each decade, or at 1 where those crowd."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}")
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axis) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _name_points(axis, x, y, names: Sequence[str], error: np.ndarray) -> None:
    """Write each name near its point, clear of other names, of points and, if it can be, of bars."""
    see = axis.transData.transform
    points = see(np.column_stack([x, y]))
    ends = [see(np.column_stack([x, y + sign * e])) for sign, e in zip((-1, 1), error, strict=True)]
    marks = np.concatenate([points - 5, points + 5], axis=1)
    bars = np.concatenate([ends[0] - (2, 0), ends[1] + (2, 0)], axis=1)
    texts = [axis.text(0, 0, name, fontsize=10, va="bottom", transform=None) for name in names]
    area, taken = axis.get_window_extent(), []
    for text, point in zip(texts, points, strict=True):
        extent = text.get_window_extent()
        size = np.array([extent.width + 4, extent.height + 1])
        text.set_in_layout(False)
        near = point + np.array([(7, -size[1] / 2), (-7 - size[0], -size[1] / 2),
                                 (4, 4), (4, -4 - size[1])])  # fmt: skip
        grid = np.stack(np.meshgrid(np.arange(area.x0, area.x1 - size[0], 5),
                                    np.arange(area.y0, area.y1 - size[1], 4)), -1)  # fmt: skip
        corner = np.concatenate([near, grid.reshape(-1, 2)])
        boxes = np.concatenate([corner, corner + size], axis=1)
        outside = (corner < area.min).any(1) | (corner + size > area.max).any(1)
        reach = np.linalg.norm(point - np.clip(point, boxes[:, :2], boxes[:, 2:]), axis=1)
        hit = _overlap(boxes, np.array([*taken, *marks]))
        best = np.argmin(reach + 1e3 * hit + 1e5 * outside + 0.8 * _overlap(boxes, bars))
        taken.append(boxes[best])
        text.set_position(corner[best] + (2, 0))
        if reach[best] > 9:
            end = np.clip(point, boxes[best, :2], boxes[best, 2:])
            axis.annotate("", end, point, "figure pixels", "figure pixels", arrowprops={
                "arrowstyle": "-", "color": INK, "alpha": 0.45, "linewidth": 0.7}
            ).set_in_layout(False)  # fmt: skip


def _overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Area of each box (left, bottom, right, top) that the others cover together."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return np.maximum(0, high - low).prod(-1).sum(-1)
