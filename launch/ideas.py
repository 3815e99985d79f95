# SPDX-License-Identifier: Apache-2.0
"""Two ideas beyond the paper, measured: greedy sets of turns, and a threshold with a unit.

    python launch/ideas.py --config configs/judging.py --workdir DIR \\
        --config.split=small_dev --config.limit=45 --config.model.dtype=bfloat16

The reader that `eval.reader` names judges. Greedy sets: the turn that raises log p(answer) most, then
the one that raises it most beside the first, and so on, against every turn judged by itself; both
against the labelled evidence. A threshold with a unit: a turn of another user should multiply the
belief in the right option by 1/alpha in at most a share alpha of the cases; and a cut of a score that
keeps a stated share of the evidence of users that it was not chosen on. Writes scores.jsonl (appended,
gone on with after a kill) and ideas.json.
"""

import json

import _door

TAUS = (0.25, 0.5, 1.0, 1.5, 2.0)  # greedy sets end where no turn gains the first
ALPHAS = (0.05, 0.1, 0.2, 0.3)
GROUP = 15  # examples that are scored, then written, together
MOST = 3  # turns of a set
FOREIGN = 5  # turns of another user a question
MISSED = 0.2  # share of the evidence turns that a cut may lose


def main(settings, workdir) -> None:
    from bfm import lora
    from bfm.jsonl import write_json
    from bfm.lm import adapted
    from bfm.opening import adapter_at, open_base, open_data
    from bfm.progress import Meter
    from bfm.saliency import Scorer

    base = open_base(settings).load(settings.model.dtype)
    place = adapter_at(settings.eval.reader)
    lm = adapted(base, lora.read(place, base.decoder.config)) if place else base
    scorers = [
        Scorer(m.decoder, m.scaffold.head, batch_size=settings.batch_size) for m in (base, lm)
    ]
    source = open_data(settings)
    examples = [source[i] for i in range(len(source))]
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "scores.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    with (
        Meter("scoring", len(examples), "examples") as meter,
        path.open("a", encoding="utf-8") as file,
    ):
        meter.skip(len(lines))
        for start in range(len(lines), len(examples), GROUP):
            group = examples[start : start + GROUP]
            made = measure(group, examples, lm, scorers, settings)
            lines += [json.dumps(line) for line in made]
            file.writelines(line + "\n" for line in lines[-len(made) :])
            file.flush()
            meter.add(len(made))
    rows = [json.loads(line) for line in lines]
    found = {"n": len(rows), "sets": sets(rows), "units": units(rows), "cuts": cuts(rows)}
    write_json(workdir / "ideas.json", found)
    print(json.dumps(found, indent=1))


def measure(group, examples, lm, scorers, settings):
    """Score a group of questions: greedy sets, own and foreign turns under every option, Sal_q."""
    import zlib

    from bfm.dialogue import evidence_turns, group_of, turns_of
    from bfm.heads import reader_prompt, reader_room
    from bfm.policy import asked, option_suffixes
    from bfm.saliency import Job

    (base, judge), scaffold = scorers, lm.scaffold

    def believe(asks):
        """[(example, turns, sets of turns, all options)] -> log p of option texts after each, nats."""
        jobs = []
        for example, turns, chosen, every in asks:
            room = reader_room(scaffold, example.question, settings)
            suffixes = option_suffixes(scaffold, example.question, "text")
            if not every:
                suffixes = suffixes[example.answer_index : example.answer_index + 1]
            bare = asked(scaffold, example.question, "text")
            blocks = (reader_prompt(scaffold, turns, s, settings, room).prefix for s in chosen)
            jobs.append(Job(tuple((*block, *bare) for block in blocks), suffixes))
        return [
            [[one.logp_a for one in turn] for turn in scored[1:]] for scored in judge.score(jobs)
        ]

    def greedy(stories):
        """[(example, turns, log p after nothing and each turn)] -> [(turn, gain), ..] of each."""
        paths = [[] for _ in stories]
        last = [first[0] for _, _, first in stories]
        after = [dict(enumerate(first[1:])) for _, _, first in stories]
        going = list(range(len(stories)))
        while going:
            still = []
            for i in going:
                best = max(after[i], key=lambda c, own=after[i]: (own[c], -c))
                if after[i][best] - last[i] <= TAUS[0]:
                    continue
                paths[i].append((best, after[i][best] - last[i]))
                last[i] = after[i].pop(best)
                if after[i] and len(paths[i]) < MOST:
                    still.append(i)
            going = still
            found = believe([
                (*stories[i][:2], [(*(c for c, _ in paths[i]), k) for k in after[i]], False)
                for i in going
            ])  # fmt: skip
            for i, values in zip(going, found, strict=True):
                after[i] = dict(zip(after[i], (value for (value,) in values), strict=True))
        return paths

    own = [turns_of(example.question.messages, settings.unit) for example in group]
    foreign = []
    for example in group:
        strangers = [e for e in examples if group_of(e) != group_of(example)]
        other = strangers[zlib.crc32(example.question.id.encode()) % len(strangers)]
        foreign.append(turns_of(other.question.messages, settings.unit)[-FOREIGN:])
    beliefs = believe([
        (example, turns, [(), *((k,) for k in range(len(turns)))], True)
        for example, turns in zip(group, own, strict=True)
    ])  # fmt: skip
    strange = believe([
        (example, turns, [(k,) for k in range(len(turns))], True)
        for example, turns in zip(group, foreign, strict=True)
    ])  # fmt: skip
    wanted = [evidence_turns(example, settings.unit) for example in group]
    first = [[row[e.answer_index] for row in b] for e, b in zip(group, beliefs, strict=True)]
    doubled = [i for i in range(len(group)) if len(wanted[i]) == 1]  # said twice: once is enough
    stories = list(zip(group, own, first, strict=True))
    again = [
        (group[i], (*own[i], own[i][wanted[i][0]]), [*first[i], first[i][1 + wanted[i][0]]])
        for i in doubled
    ]
    paths = greedy([*stories, *again])
    twice = dict(zip(doubled, paths[len(group) :], strict=True))
    jobs = [
        Job(tuple(scaffold.prefix(t.messages)[0] for t in turns), (scaffold.suffix(e.question),))
        for e, turns in zip(group, own, strict=True)
    ]
    lines = []
    for i, (example, asks) in enumerate(zip(group, base.score(jobs), strict=True)):
        line = {
            "id": example.question.id, "group": group_of(example), "gold": example.answer_index,
            "needs": example.meta.get("needs"), "evidence": list(wanted[i]),
            "beliefs": beliefs[i], "foreign": strange[i], "greedy": paths[i],
            "sal_q": [turn[0].logp_q - asks[0][0].logp_q for turn in asks[1:]],
        }  # fmt: skip
        lines.append(line | ({"twice": twice[i]} if i in twice else {}))
    return lines


def sets(rows):
    """F1 of both kinds of focus by what questions need; tau of each chosen on the other users."""
    import numpy as np

    from bfm.intervals import f1, interval

    found = {}
    kinds = [*sorted({row["needs"] for row in rows}), "said twice", "all"]
    for kind in kinds:
        some = [
            r
            for r in rows
            if kind == "all" or r["needs"] == kind or ("twice" in r and kind == "said twice")
        ]
        doubled = kind == "said twice"
        hits = {way: counts(some, rows, way, doubled) for way in ("single", "greedy")}
        groups = [row["group"] for row in some]
        found[kind] = {"n": len(some)}
        for way, own in hits.items():
            found[kind][way] = interval(groups, f1(*own))
        a, b = (f1(*hits[way]) for way in ("greedy", "single"))
        found[kind]["greedy-single"] = interval(groups, lambda index, a=a, b=b: a(index) - b(index))
        found[kind]["turns"] = {way: float(np.mean(own[1])) for way, own in hits.items()}
    return found


def counts(some, rows, way, doubled):
    """(hits, chosen, wanted) of each row, its tau chosen by F1 on all the other half of users."""
    import numpy as np

    def focus(row, tau, doubled):
        n = len(row["beliefs"]) - 1
        if way == "greedy":
            path = row["twice" if doubled else "greedy"]
            picked = []
            for turn, gain in path:
                if gain <= tau:
                    break
                picked.append(turn)
            return picked
        gains = [one[row["gold"]] - row["beliefs"][0][row["gold"]] for one in row["beliefs"][1:]]
        if doubled:
            gains = [*gains, gains[row["evidence"][0]]]
        order = sorted((k for k in range(len(gains)) if gains[k] > tau), key=lambda k: -gains[k])
        return [k if k < n else n for k in order[:MOST]]

    def triple(row, tau, doubled=False):
        picked, wanted = focus(row, tau, doubled), set(row["evidence"])
        n = len(row["beliefs"]) - 1
        named = {row["evidence"][0] if k == n else k for k in picked}
        return len(named & wanted), len(picked), len(wanted)

    users = sorted({row["group"] for row in rows})
    half = {user: k % 2 for k, user in enumerate(users)}
    chosen = {}
    for part in (0, 1):
        others = [row for row in rows if half[row["group"]] != part]
        scores = {}
        for tau in TAUS:
            h, f, w = np.sum([triple(row, tau) for row in others], axis=0)
            scores[tau] = 2 * h / (f + w)
        chosen[part] = max(scores, key=scores.get)
    triples = [triple(row, chosen[half[row["group"]]], doubled) for row in some]
    return np.array(triples, float).T


def units(rows):
    """Share of foreign and of evidence turns whose Bayes factor passes 1/alpha."""
    import numpy as np
    from scipy.optimize import minimize_scalar

    from bfm.intervals import interval

    def posterior(logp, t):
        z = np.array(logp) * t
        return z - np.logaddexp.reduce(z)

    def loss(t, some):
        return -np.mean(
            [
                posterior(b, t)[row["gold"]]
                for row in some
                for b in (row["beliefs"][0], *row["foreign"])
            ]
        )

    users = sorted({row["group"] for row in rows})
    half = {user: k % 2 for k, user in enumerate(users)}
    scale = {}
    for part in (0, 1):
        others = [row for row in rows if half[row["group"]] != part]
        scale[part] = float(
            minimize_scalar(
                lambda x, o=others: loss(np.exp(x), o), bounds=(-6, 3), method="bounded"
            ).x
        )
    found = {"temperature": [float(np.exp(-x)) for x in scale.values()]}
    groups = [row["group"] for row in rows]

    def share(which, alpha, kind):
        told = []
        for row in rows:
            t = np.exp(scale[half[row["group"]]]) if kind == "scaled" else 1.0
            turns = (
                row["foreign"]
                if which == "foreign"
                else [row["beliefs"][1 + k] for k in row["evidence"]]
            )
            if kind == "text":
                gains = [b[row["gold"]] - row["beliefs"][0][row["gold"]] for b in turns]
            else:
                bare = posterior(row["beliefs"][0], t)[row["gold"]]
                gains = [posterior(b, t)[row["gold"]] - bare for b in turns]
            told.append((sum(g >= np.log(1 / alpha) for g in gains), len(gains)))
        over, n = np.array(told, float).T
        return interval(groups, lambda i: over[i].sum() / n[i].sum() if n[i].sum() else np.nan)

    for kind in ("options", "scaled", "text"):
        found[kind] = {
            which: {str(alpha): share(which, alpha, kind) for alpha in ALPHAS}
            for which in ("foreign", "evidence")
        }
    found["nll"] = {
        "options": loss(1.0, rows),
        "uniform": float(np.log(4)),
        "scaled": float(np.mean([loss(np.exp(scale[half[r["group"]]]), [r]) for r in rows])),
    }
    return found


def cuts(rows):
    """A cut of each score that loses MISSED of the evidence on half of the users, on the other half."""
    import numpy as np

    from bfm.intervals import interval

    def ebf(row):
        z = np.array(row["beliefs"])
        z = z - np.logaddexp.reduce(z, axis=1)[:, None]
        return (np.exp(z[1:]) * (z[1:] - z[0])).sum(1)

    scores = {"sal_q": [np.array(r["sal_q"]) for r in rows], "ebf": [ebf(r) for r in rows]}
    scores["sal_a (knows the answer)"] = [
        np.array([b[r["gold"]] - r["beliefs"][0][r["gold"]] for b in r["beliefs"][1:]])
        for r in rows
    ]
    users = sorted({row["group"] for row in rows})
    half = {user: k % 2 for k, user in enumerate(users)}
    groups = [row["group"] for row in rows]
    found = {}
    for name, own in scores.items():
        told = []
        cut = {}
        for part in (0, 1):
            others = [k for k, row in enumerate(rows) if half[row["group"]] != part]
            losses = sorted(own[k][e] for k in others for e in rows[k]["evidence"])
            # Conformal risk control: the n + 1 of a turn that is not seen yet.
            allowed = int(np.floor(MISSED * (len(losses) + 1))) - 1
            cut[part] = losses[allowed] if allowed >= 0 else -np.inf
        for k, row in enumerate(rows):
            picked = set(np.flatnonzero(own[k] >= cut[half[row["group"]]]))
            told.append(
                (len(picked & set(row["evidence"])), len(row["evidence"]), len(picked), len(own[k]))
            )
        hits, wanted, read, n = np.array(told, float).T
        found[name] = {
            "evidence kept": interval(groups, lambda i, h=hits, w=wanted: h[i].sum() / w[i].sum()),
            "turns read": interval(groups, lambda i, r=read, n=n: r[i].sum() / n[i].sum()),
        }
    return found


if __name__ == "__main__":
    _door.config_main(main, __doc__)
