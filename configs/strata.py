# SPDX-License-Identifier: Apache-2.0
"""Where does a belief find what words do not? `shifting_prefs`, stratum by stratum.

    python launch/eval.py --config configs/strata.py --workdir runs/strata \\
        --config.eval.reader=runs/readers/full/export

The reader of whole histories (configs/readers.py), taught on other users without evidence labels, reads
two turns and is the judge of Sal_a. 160 questions of the test split, drawn; bf16; 20 minutes of a core.

Predictions, all of which held, written before this run (of 32 questions of small_dev, three to seven a
stratum, the areas of Sal_q and Sal_a were known):
  - placebo, where what tells the answer speaks in the question's words and nothing else does: Sal_q,
    BM25 and MiniLM order it at 0.95 or more, MiniLM's two turns beat nothing by 15 points, and Sal_q is
    not better than MiniLM;
  - dissimilar_useful, where it is the other way round: all three below 0.7, Sal_q within 0.1 of MiniLM;
    Sal_a of the reader 0.1 or more above MiniLM, and what it picks is read with 15 points more;
  - adverse, where the stale turn is worded as the current one: Sal_a orders at 0.85 or more and above
    all others; over latest mention MiniLM has no advantage (within 10 points);
  - the useless strata: no selector beats nothing by 10 points.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "test"
    config.sample = 160
    config.model.dtype = "bfloat16"
    config.tau = "0.0"  # Sal_a's own sign decides
    config.eval.k = 2
    config.methods = "none,full,recency,latest,bm25,embedding,sal_q,sal_a,evidence,other"
    config.eval.contrasts = (
        "sal_q-none,sal_q-embedding,sal_a-embedding,embedding-latest,evidence-none"
    )
    return config
