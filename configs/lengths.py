# SPDX-License-Identifier: Apache-2.0
"""Does a longer history change who finds the evidence? `shifting_prefs` at 10, 100 and 1,000 exchanges.

    python launch/sweep.py --config configs/lengths.py --workdir runs/lengths

Questions of the test split, one or two a user, of all strata; Sal_q by the base model, answers and
Sal_a by the judge that comes with bfm, which was taught on ten exchanges; five turns, 512 tokens, bf16.
An hour and a quarter of one core. Left out for cost: Sal_a of 1,000 exchanges, more than six questions
of them (twelve were planned), and readers taught on long histories (train.tokens holds 8,192 tokens of
the longest).

What it gave (results/lengths.json):

                                        10 exchanges       100                1,000
    Sal_q orders the evidence first     0.84 [0.77, 0.90]  0.95 [0.89, 0.99]  1.00 (five with evidence)
    BM25; MiniLM                        0.83; 0.79         0.95; 0.91         0.98; 1.00
    the judge's Sal_a                   0.83 [0.74, 0.91]  0.75 [0.61, 0.88]
    share of the evidence in five       0.90; 0.96; 0.86   0.86; 0.83; 0.79   1.00; 0.80; 1.00
    in what Sal_a picks                 0.71               0.55
    latest mention                      0.82               0.00               0.00
    accuracy without; with evidence     0.25; 0.40         0.21; 0.46         0.50; 0.67

What fills a longer history is about other things, so it is no harder to find the evidence in it.

Predictions, written before any result (right: the fall of Sal_a. Wrong: the order rises, the share
stays, the gap does not grow, MiniLM's turns are read better than nothing by 10 and 17 points, latest
mention finds none):
  - order (area under the curve) does not depend on length: Sal_q, MiniLM and BM25 each within 0.1 of
    their own figure at ten exchanges; the judge's Sal_a falls by less than 0.1;
  - what stands among the best five does: Sal_q's share of the evidence falls below two thirds at 100
    exchanges and below one half at 1,000, MiniLM's and BM25's likewise;
  - so the label gap, the share of the evidence in what Sal_a picks minus that of MiniLM's five, grows
    from ten to 100 exchanges, by 10 points or more;
  - accuracy follows neither: this judge reads no method's turns better than nothing by 10 points;
  - latest mention finds more of the evidence at 1,000 exchanges than MiniLM does.
"""

from bfm.settings import default_config

SWEEP = [
    {"reading.length": 10, "sample": 48},
    {"reading.length": 100, "sample": 24},
    {"reading.length": 1000, "sample": 6, "eval.sal_a": False,
     "methods": "none,full,random,recency,latest,bm25,embedding,sal_q,evidence,other"},
]  # fmt: skip
EVALUATE = {"split": "test"}


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.model.dtype = "bfloat16"
    config.tau = "0.0"  # Sal_a's own sign decides
    config.train.tokens = 8192  # what the reader sees at most
    config.eval.reader = "judge"
    config.methods = "none,full,random,recency,latest,bm25,embedding,sal_q,sal_a,evidence,other"
    config.eval.contrasts = "sal_q-embedding,sal_q-none,full-none,evidence-none"
    return config
