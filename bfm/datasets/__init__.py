# SPDX-License-Identifier: Apache-2.0
"""The benchmarks and our own generated set, all as one `Example`: raw files -> ArrayRecord -> examples.

One module a benchmark reads its official layout; `prepare` writes what it yields as a
tensorflow-datasets data set; `load` gives random access to a split of it.
"""

from bfm.datasets.build import NAMES, prepare
from bfm.datasets.common import File, Reading
from bfm.datasets.prepared import Prepared, load

__all__ = ["NAMES", "File", "Prepared", "Reading", "load", "prepare"]
