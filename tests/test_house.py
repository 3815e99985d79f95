# SPDX-License-Identifier: Apache-2.0
"""The house itself: arrows point one way, examples in docstrings hold, configs are what they were.

A changed default shows as a diff of tests/configs.txt; `python -m tests.test_house` writes it anew.
"""

import ast
import doctest
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from bfm.settings import describe

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("configs.txt")
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
# What computes log-probabilities, and nothing else: it reads in an hour.
CORE = {
    "bfm.batching", "bfm.likelihood", "bfm.model", "bfm.saliency", "bfm.sharding", "bfm.store",
}  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "bfm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, names) -> set[str]:
    """Return the modules that a file imports when it is imported itself, or names for its types."""
    found, body = set(), ast.parse(path.read_text("utf-8")).body
    inside = [each for node in body if isinstance(node, ast.If) for each in node.body]
    for node in [*body, *inside]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(names)
            found |= inner or {node.module}
    return found


def is_core(name: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in CORE)


def test_the_core_imports_jax_flax_and_numpy_only():
    names, seen = modules(), set()
    for name, path in names.items():
        # config files are read for the core, not by it
        if not is_core(name) or name.startswith("bfm.model.config_"):
            continue
        seen.add(name)
        for other in imports(path, names):
            root = other.partition(".")[0]
            allowed = root in ("jax", "flax", "numpy") or root in sys.stdlib_module_names
            assert allowed or is_core(other), f"{name} imports {other}"
    assert {"bfm.likelihood", "bfm.saliency", "bfm.model.decoder"} <= seen


def test_no_module_reaches_itself_by_its_imports():
    names = modules()
    graph = {name: imports(path, names) & set(names) for name, path in names.items()}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in graph[name]:
                walk(other, (*trail, name))
            done.add(name)

    for name in names:
        walk(name, ())


def test_flags_live_in_launch_only():
    for path in modules().values():
        assert not re.search(
            r"^\s*(import|from) (absl (import )?(flags|app)|absl\.(flags|app)|argparse|launch)\b",
            path.read_text(),
            re.M,
        ), path


@pytest.mark.parametrize(
    "name", [name for name, path in modules().items() if ">>> " in path.read_text("utf-8")]
)
def test_examples_in_docstrings_hold(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


def dump() -> str:
    """Return every default, and what each config sets otherwise."""
    defaults = {name: value for name, value, _ in describe()}
    lines = ["defaults", *(f"  {name} = {value!r}" for name, value in defaults.items())]
    for path in CONFIGS:
        config, lines = runpy.run_path(str(path))["get_config"](), [*lines, "", path.name]
        for name, default in defaults.items():
            value = config
            for key in name.split("."):
                value = value[key]
            if value != default:
                lines.append(f"  {name} = {value!r}")
    return "\n".join(lines) + "\n"


def test_configs_are_what_they_were():
    assert dump() == GOLDEN.read_text("utf-8")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_how_to_run_it(path):
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert f"--config configs/{path.name}" in text


def test_what_the_readme_names_is_there():
    text = (ROOT / "README.md").read_text("utf-8")
    for name in re.findall(r"\b(?:bfm|configs|launch|tests)/[\w/]+\.(?:py|sh|md)\b", text):
        assert (ROOT / name).exists(), name


if __name__ == "__main__":
    GOLDEN.write_text(dump(), "utf-8")
