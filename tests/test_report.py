# SPDX-License-Identifier: Apache-2.0
"""Reports: whole pages from plausible and from hostile results; nothing in the data becomes markup."""

import collections
import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bfm import plots, report, report_parts, show

METHODS = ["bfm", "bfm, no gate", "full", "embedding", "bm25", "sal_q", "recency", "none", "oracle"]
HOSTILE = [
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!--<script>",
    "\u2028\u2029",
    "a | b\nc `x` **y** [l](https://example.com) $z$", "'\"><b>&amp;", "\u202eשלום مرحبا", "😀 日本",
    "\x00\x1b\ud800", "_hidden", "x" * 10_000, "", "]]>", "{{ 7 * 7 }}", "&lt;script&gt;", "C:\\x",
]  # fmt: skip


def made_up(n=60, texts=None, seed=0):
    """Plausible numbers (or hostile names) in every part of what `report.write` takes."""
    rng, texts = np.random.default_rng(seed), texts or []
    say = lambda default, i: texts[i % len(texts)] if texts else default  # noqa: E731
    names = [say(name, i) + (f" {i}" if texts else "") for i, name in enumerate(METHODS)]
    level = dict(zip(names, [0.66, 0.61, 0.52, 0.55, 0.49, 0.53, 0.41, 0.29, 0.74], strict=True))
    tokens = dict(zip(names, [410, 520, 5900, 515, 505, 498, 520, 96, 300], strict=True))
    results, rows, examples = [], [], []
    for i in range(n):
        turns = []
        for k in range(12):
            text = say(
                f"User: I liked tea on day {k}. " * (1 + 9 * (k == 3)) + "\nAssistant: Noted.", k
            )
            sal = float(rng.normal(2.0 if k == i % 12 else 0, 1))
            turns.append({
                "text": text, "time": f"2024-01-{k + 1:02d}", "evidence": k == i % 12,
                "sal_q": sal if k != 5 else None, "sal_a": sal / 2 + float(rng.normal()),
            })  # fmt: skip
        methods = {}
        for name in names:
            correct, gate = float(rng.random() < level[name]), int(name != names[7])
            read = sorted(map(int, rng.choice(12, 3, False))) if gate else []
            said = 0 if correct else 1 + i % 2
            probs = list(map(float, rng.dirichlet([1, 1, 1])))
            methods[name] = {"prediction": said, "correct": correct, "probs": probs, "evidence": read,
                             "gate": gate, "tokens": tokens[name]}  # fmt: skip
            results.append({
                "id": say(f"q{i}", i) + str(i), "method": name, "focus": read, "calls": 2, "logp": -1.0,
                "seconds": 0.3, "status": "error: no memory" if i == 9 and name == names[2] else "ok",
                "group": "u", "stratum": say("food", i), "n_turns": 12, "open_probability": None,
                "recall": float(i % 12 in read), **methods[name],
            })  # fmt: skip
        examples.append({
            "id": say(f"q{i}", i) + str(i), "query": say("What does the user drink these days?", i),
            "query_time": "2024-02-01", "gold": 0,
            "options": [say(o, j + i) for j, o in enumerate(["tea", "milk", "soda"])],
            "answer": say("tea", i), "turns": turns, "methods": methods,
        })  # fmt: skip
    for name in names:
        a = level[name]
        rows.append({
            "method": name, "data": say("membench_high", 0), "accuracy": a,
            "low": a - 0.06, "high": a + 0.06, "n": n, "tokens": tokens[name], "turns": 3.1,
            "logp": -1.2, "logp_low": -1.4, "logp_high": -1.0, "open": 0.8, "recall": None,
            "errors": 1, "calls": 2, "p50_s": 0.31, "p95_s": 0.7,
            "control": name in (names[7], names[8]),
        })  # fmt: skip

    def binned(bins):
        value = {(m, j): level[m] - 0.04 * j for m in names for j in range(len(bins))}
        return [{"method": m, "bin": say(bins[j], j), "accuracy": a, "low": a - 0.1,
                 "high": a + 0.1, "n": 20} for (m, j), a in value.items()]  # fmt: skip

    contrast = {"low": 0.01, "high": 0.2, "p": 0.0004, "p_holm": 0.0008, "detectable": 0.09}
    summary = {
        "identity": {"model": say("smol", 1), "settings": {"k": 5}},
        "data": say("membench_high", 0), "split": "test", "n": n, "valid": True, "rows": rows,
        "notes": [say("uninformative for this model", 3)],
        "contrasts": [
            {"a": names[0], "b": names[3], "metric": "accuracy", "difference": 0.11, **contrast},
            {"a": names[0], "b": names[2], "metric": "logp", "difference": 0.3, **contrast,
             "p_holm": 0.3},
        ],
        "diagnosis": {
            "recall_at_k": [[1, 0.4], [5, 0.7], [10, 0.82], [20, 0.9]], "oracle_in_k": 0.93,
            "reliability": [[0.1, 0.15, 20], [0.5, 0.4, 9], [0.9, 0.8, 40]],
            "gate_area": [0.64, 0.48, 0.8],
            "saliency_evidence": list(rng.normal(2, 1, 60)),
            "saliency_other": list(rng.normal(0, 1, 900)),
            "rank_agreement": [
                {"stratum": say(stratum, i), "rho": rho, "low": rho - 0.1, "high": rho + 0.1, "n": 40}
                for i, (stratum, rho) in enumerate({"food": 0.6, "book": 0.4, "mood": 0.2}.items())
            ],
            "by_distance": binned(["1-5", "6-20", "21-80"]),
            "by_density": binned(["under 1 %", "1-5 %", "over 5 %"]),
            "by_stratum": binned(["food", "book", "mood"]),
            "by_length": binned(["1-50", "51-200", "201 and more"]),
            "cost": [
                {"method": m, "turns": t, "p50_s": 0.05 + 1e-3 * t * i, "p95_s": 0.09 + 2e-3 * t * i}
                for i, m in enumerate(names[:5], 1) for t in (25, 50, 100, 200)
            ],
        },
    }  # fmt: skip
    return summary, results, examples


class Page(html.parser.HTMLParser):
    """Counts elements outside plots, keeps all names, attributes and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.counts, self.tags, self.attributes = collections.Counter(), set(), []
        self.scripts, self.words, self.svgs, self.inside = [], [], 0, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, key, value) for key, value in attributes]
        self.svgs += tag == "svg"
        if self.inside != "svg":
            self.inside = tag if tag in ("svg", "script") else ""
            self.counts[tag] += 1

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = ""

    def handle_data(self, data):
        (self.scripts if self.inside == "script" else self.words).append(data)


PAGE_TAGS = (
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "nav", "a", "section"),
    *("div", "table", "thead", "tbody", "tr", "th", "td", "strong", "figure", "details", "summary"),
    *("noscript", "button", "select", "input", "label", "script"),
    *("svg", "g", "path", "defs", "use", "text", "clippath", "rect"),
)


def check(text):
    """Fail where the page has an element, a handler or a load that is not the template's own."""
    page = Page(text)
    assert not page.tags - set(PAGE_TAGS)
    for tag, key, value in page.attributes:
        assert not key.startswith("on") and key not in ("src", "srcset", "action", "formaction"), (
            tag,
            key,
        )
        if key in ("href", "xlink:href"):
            assert value.startswith("#")
        assert not re.search(r"https?:|javascript:|url\((?!#)", value or ""), (tag, key, value)
    assert page.counts["script"] in (0, 2)
    return page


@pytest.fixture(scope="module")
def plausible(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    summary, results, examples = made_up()
    report.write(folder, summary, results, iter(examples[:50]))
    assert sorted(os.listdir(folder)) == ["report.html", "report.md"]
    return folder


def test_page_has_every_part_and_loads_nothing(plausible):
    text = (plausible / "report.html").read_text("utf-8")
    page = check(text)
    assert page.svgs == 9  # tokens, recall, gate, saliency, agreement, three by bin, cost
    assert "http://" not in text and "https://" not in text and "@import" not in text
    words = "".join(page.words)
    for part in ("Accuracy against tokens", "Holm", "oracle within K", "Gate reliability", "Examples",
                 "Rank agreement", "distance of the evidence", "density", "length of the history",
                 "Cost"):  # fmt: skip
        assert part in words
    assert "66.0 [60.0, 72.0]" in words and "oracle (control)" in words and "<0.001" in words
    assert "in 64.0 [48.0, 80.0] % of all pairs of one with" in words
    assert words.index("uninformative for this model") < words.index("Percent right")
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    data = json.loads(page.scripts[0])
    assert len(data) == 50 and [m["name"] for m in data[0]["methods"]] == METHODS
    assert (
        data[9]["methods"][2]["why"] == "no answer"
        and data[9]["methods"][2]["status"] == "error: no memory"
    )


def test_same_numbers_give_the_same_bytes(plausible, tmp_path):
    report.write(tmp_path, *made_up()[:2], made_up()[2][:50])
    for name in ("report.md", "report.html"):
        assert (tmp_path / name).read_bytes() == (plausible / name).read_bytes()


def test_markdown_tables_are_whole(plausible):
    lines = (plausible / "report.md").read_text("utf-8").split("\n")
    assert lines[0] == "# Evaluation on membench\\_high test, 60 questions"
    widths = [len(re.split(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
    starts = [
        i for i, line in enumerate(lines) if line.startswith("| :--") or line.startswith("| --:")
    ]
    assert len(starts) == 12 and min(widths) > 2
    for start in starts:
        end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
        assert end - start > 1
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in lines[start - 1 : end]}) == 1


def test_hostile_texts_stay_text(tmp_path):
    plain = made_up(20)
    report.write(tmp_path, *plain)
    expected = check((tmp_path / "report.html").read_text("utf-8"))
    report.write(tmp_path, *made_up(20, HOSTILE))
    text = (tmp_path / "report.html").read_text("utf-8")
    page = check(text)
    assert page.counts == expected.counts
    assert "".join(page.scripts[1:]) == "".join(expected.scripts[1:])
    assert "\u2028" not in page.scripts[0] and "\x00" not in text
    data = json.loads(page.scripts[0])
    assert data[0]["turns"][0]["text"] == HOSTILE[0] and data[0]["turns"][3]["text"] == HOSTILE[3]
    assert len(data[0]["turns"][10]["text"]) == 10_000
    tables = [
        line for line in (tmp_path / "report.md").read_text("utf-8").split("\n") if line[:1] == "|"
    ]
    assert tables and not any("<" in line for line in tables)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.text(max_size=40) | st.sampled_from(HOSTILE), min_size=1, max_size=6))
def test_any_text_makes_no_element(tmp_path, texts):
    pages = []
    for name, given_texts in (("plain", None), ("hostile", texts)):
        folder = tmp_path / name
        if name == "hostile" or not folder.exists():  # the plain page is made once
            folder.mkdir(exist_ok=True)
            summary, results, examples = made_up(2, given_texts)
            summary["diagnosis"] = {"rank_agreement": summary["diagnosis"]["rank_agreement"]}
            for row in summary["rows"]:
                row["tokens"] = None  # one plot is enough here
            report.write(folder, summary, results, examples)
        pages.append(check((folder / "report.html").read_text("utf-8")))
    assert pages[0].counts == pages[1].counts
    assert len(json.loads(pages[1].scripts[0])) == 2


def test_missing_parts_are_named_and_draw_nothing(tmp_path):
    report.write(tmp_path, {"valid": False, "notes": ["3 % errors"]}, [], [])
    text = (tmp_path / "report.html").read_text("utf-8")
    page = check(text)
    assert page.svgs == 0 and page.counts["table"] == 0 and page.counts["script"] == 0
    words = "".join(page.words)
    assert (
        words.index("This run is invalid.")
        < words.index("3 % errors")
        < words.index("No method was run.")
    )
    for line in ("No contrast was declared", "no shortlist was made", "No gate with a probability",
                 "was not recorded", "No example was kept", "Time was not measured"):  # fmt: skip
        assert line in words
        assert line in (tmp_path / "report.md").read_text("utf-8") or line == "No example was kept"
    summary, results, examples = made_up(3)
    for row in summary["rows"]:
        row.update(
            low=None, high=float("nan"), logp=np.float32("nan"), tokens=np.int64(7), recall=np.nan
        )
    summary["diagnosis"] = {
        "recall_at_k": [[1, None]], "oracle_in_k": None, "reliability": [[0.5, 0.5, 0]],
        "saliency_evidence": [None], "saliency_other": [1.0], "by_distance": [],
    }  # fmt: skip
    report.write(tmp_path, summary, results, examples)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert check(text).svgs == 1 and "nan" not in "".join(Page(text).words)


def test_a_failed_write_leaves_the_old_report(plausible, tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(KeyError, match="turns"):
        report.write(tmp_path, *made_up(2)[:2], [{"id": "x"}])
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "correct, gate, recall, status, read, expected",
    [
        (1, 1, 1.0, "ok", 3, "right, read the evidence"),
        (1, 1, 0.5, "truncated", 3, "right, read part of the evidence"),
        (1, 1, 0.0, "ok", 3, "right without the evidence"),
        (1, 0, 0.0, "ok", 0, "right without the evidence"),
        (1, 1, None, "ok", 3, "right"),
        (0.5, 1, 1.0, "ok", 3, "tie"),
        (0, 0, 0.0, "ok", 0, "wrong, did not open the memory"),
        (0, 0, None, "ok", 0, "wrong, did not open the memory"),
        (0, 1, 0.0, "ok", 3, "wrong, evidence missed"),
        (0, 1, 0.5, "ok", 3, "wrong, read part of the evidence"),
        (0, 1, 1.0, "ok", 3, "wrong, read the evidence"),
        (0, 1, None, "ok", 3, "wrong"),
        (0, 1, 1.0, "error: out of memory", 3, "no answer"),
        (0, 1, 1.0, "unparsed", 3, "no answer"),
    ],
)
def test_outcome(correct, gate, recall, status, read, expected):
    assert expected in report_parts.OUTCOMES
    assert report_parts.outcome(correct, gate, recall, status, read) == expected


def test_best_is_bold_only_when_its_interval_stands_apart(tmp_path):
    row = lambda m, a, half, **k: {"method": m, "data": "d", "accuracy": a, "low": a - half,  # noqa: E731
                                   "high": a + half, **k}  # fmt: skip
    table = lambda rows: report_parts.sections({"rows": rows}, [])[0].tables[0]  # noqa: E731
    assert table([row("a", 0.5, 0.1), row("b", 0.8, 0.1)]).bold == {(1, 1)}
    assert not table([row("a", 0.5, 0.1), row("b", 0.65, 0.1)]).bold
    assert not table([row("b", 0.8, 0.1)]).bold
    control = [row("a", 0.5, 0.1), row("b", 0.8, 0.1), row("oracle", 0.9, 0.1, control=True)]
    assert table(control).bold == {(1, 1)}
    two = report_parts.sections({"rows": [row("a", 0.5, 0.1), row("b", 0.8, 0.1),
                                    row("a", 0.6, 0.1) | {"data": "e"}]}, [])[0].tables  # fmt: skip
    assert two[0].head == ("method", "d", "e") and two[0].bold == {(1, 1)} and len(two) == 3
    assert two[0].rows[1] == ("b", "80.0 [70.0, 90.0]", "–")


def test_what_did_not_fit_is_counted_where_it_happened():
    rows = [{"method": m, "accuracy": 0.5, "low": 0.4, "high": 0.6, "control": False, "truncated": n}
            for m, n in (("full", 7), ("none", 0))]  # fmt: skip
    table = report_parts.sections({"rows": rows}, [])[0].tables[0]
    at = table.head.index("cut to fit")
    assert [row[at] for row in table.rows] == ["7", "0"]
    fits = report_parts.sections({"rows": rows[1:]}, [])[0].tables[0]
    assert "cut to fit" not in fits.head
    names = [column.header for column in show.compared(rows).columns]
    assert "cut" in names and "cut" not in [c.header for c in show.compared(rows[1:]).columns]


def test_names_in_the_scatter_do_not_overlap():
    rng = np.random.default_rng(1)
    rows = [{"method": f"method number {i}", "accuracy": 0.5 + 0.01 * float(rng.normal()), "low": 0.4,
             "high": 0.6, "tokens": 500 + i} for i in range(14)]  # fmt: skip
    svg = plots.accuracy_tokens(rows)
    found = re.findall(
        r"<text [^>]*?(?:x=\"([\d.]+)\" y=\"([\d.]+)\"|translate\(([\d.]+) ([\d.]+)\))[^>]*>method",
        svg,
    )
    spots = [tuple(float(v) for v in spot if v) for spot in found]
    assert len(spots) == 14
    for i, (x, y) in enumerate(spots):
        for u, v in spots[:i]:
            assert abs(y - v) > 9 or abs(x - u) > 80  # a name is over 80 wide and 10 high


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
def test_the_page_works_from_a_file(tmp_path):
    summary, results, examples = made_up(6, HOSTILE)
    report.write(tmp_path, summary, results, examples)
    run = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in run.stderr, run.stderr
    page = Page(run.stdout)
    assert page.counts["script"] == 2 and "img" not in page.tags and "b" in page.tags  # of a bar
    words = "".join(page.words)
    assert "turn 11" in words and "★ evidence" in words and "show all 10,000 characters" in words
