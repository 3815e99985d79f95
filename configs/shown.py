# SPDX-License-Identifier: Apache-2.0
"""The other benchmarks and the memories that a model writes, each once and small: shown, no claim.

    python launch/sweep.py --config configs/shown.py --workdir runs/shown --config.data_dir=DIR

SmolLM2-135M as it is, in bf16. LoCoMo and LongMemEval answer in free text (F1 of words, and log p of
the reference); PersonaMem's file at hand holds 17 complete questions of one user, so it has no
interval. The memory systems write their stores on eight questions of PrefEval's choice form with the
model itself. Left out for cost: fine-tuned readers, Sal_a, more questions. An hour and a half of one
core; what it gave stands in the README and results/shown.json. Of the predictions the one on
LongMemEval was wrong (0.77 to 0.92), the others held.

Predictions, written before any result:
  - LoCoMo: Sal_q orders the evidence above 0.85 among some 300 turns, within 0.1 of MiniLM; evidence
    adds less than 15 points of F1 over no memory, so the set is uninformative for this model;
  - LongMemEval: MiniLM, BM25 and Sal_q order the evidence within 0.1 of each other, above 0.7;
  - PersonaMem: no method differs from no memory by more than three questions;
  - memory systems: Mem0 and A-MEM, which ask for JSON, fall back in over a fifth of their replies (not
    measured with this model); MemoryBank, which asks for prose, does not.
"""

from bfm.settings import default_config

FREE = "none,full,recency,bm25,embedding,sal_q,evidence,other"
SWEEP = [
    {"data": "locomo", "sample": 24, "methods": FREE},
    {"data": "prefeval_choice", "sample": 8,
     "methods": "none,full,sal_q,mem0,mem0_add,amem,memorybank"},
    {"data": "longmemeval", "sample": 20, "methods": FREE, "eval.budget": 2048},
    {"data": "personamem_32k", "split": "all", "eval.budget": 2048,
     "methods": "none,full,recency,bm25,embedding,sal_q,longest,shortest,first"},
]  # fmt: skip
EVALUATE = {"split": "test", "eval.contrasts": "sal_q-none"}


def get_config():
    config = default_config()
    config.model.dtype = "bfloat16"
    config.eval.sal_a = False
    config.train.tokens = 4096  # what the reader sees at most
    return config
