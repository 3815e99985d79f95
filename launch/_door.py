# SPDX-License-Identifier: Apache-2.0
"""The one door of every launch script: flags in, exit codes out (0 done, 1 failed, 2 bad input)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Quiet libraries before they are imported; errors still come through.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

USAGE = """usage: python launch/{script} --config FILE {workdir}[--config.NAME=VALUE ...]

{doc}

settings (--config.NAME=VALUE), with their defaults:
{settings}
"""


def config_main(main: Callable, doc: str, workdir: bool = True) -> None:
    """Run `main(settings, workdir)` from --config, --config.x=y and --workdir; then exit.

    Without a workdir it is `main(settings)`.
    """
    guarded(lambda: main(*_parse(doc, workdir)))


def guarded(main: Callable[[], int | None]) -> None:
    """Run main and exit: one line and code 2 for bad input, a traceback and 1 for a failure."""
    _use_huge_pages()
    try:
        code = main() or 0
    except KeyboardInterrupt:
        print("interrupted; start the same command again to go on", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if not isinstance(error, _input_errors()):
            raise
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.exit(code)


def _use_huge_pages() -> None:
    """Start the script again with large arrays on huge pages; glibc reads this at its start only.

    XLA's buffers are fresh memory in every program: one gradient of 135M parameters over 900 tokens
    faults 690,000 small pages, or 2,000 huge ones.
    """
    started = sys.argv[0] in sys.orig_argv  # not run inside another program, such as a test
    if started and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, sys.orig_argv)


class UsageError(ValueError):
    """Flags that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """For scripts of plain flags: a docstring as help, one line for what cannot be understood."""

    def __init__(self, doc: str):
        super().__init__(
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")


def _input_errors() -> tuple[type[Exception], ...]:
    from bfm.baselines import BackendError, StoreError
    from bfm.checkpoint import CheckpointError
    from bfm.dialogue import RecordError
    from bfm.embed import EmbedError
    from bfm.jsonl import DataError
    from bfm.lm import ModelError
    from bfm.model.config import ConfigError
    from bfm.settings import SettingsError
    from bfm.sharding import ShardingError
    from bfm.tokenizer import TokenizerError
    from bfm.weights import WeightsError
    from bfm.workdir import WorkdirError

    return (
        *(UsageError, DataError, RecordError, WorkdirError, ModelError, ConfigError),
        *(SettingsError, ShardingError, TokenizerError, WeightsError, EmbedError, CheckpointError),
        *(BackendError, StoreError),
    )


def _parse(doc: str, workdir: bool):
    """Parse sys.argv into (Settings, workdir), or (Settings,). Raises UsageError, SettingsError."""
    from absl import flags
    from ml_collections import config_flags

    from bfm.settings import Settings, describe

    script, place = Path(sys.argv[0]).name, "--workdir DIR " if workdir else ""
    if not sys.argv[1:] or {"-h", "--help", "--helpfull"} & set(sys.argv[1:]):
        rows = "\n".join(
            f"  {name} = {default!r}\n      {text}" for name, default, text in describe()
        )
        print(USAGE.format(script=script, workdir=place, doc=doc.strip(), settings=rows))
        sys.exit(0 if sys.argv[1:] else 2)
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file(
        "config", None, "settings file, one of configs/", lock_config=True, flag_values=values
    )
    if workdir:
        flags.DEFINE_string("workdir", None, "folder to write to", flag_values=values)
    try:
        rest = values(sys.argv)[1:]
        list(config.value or ())  # a file that cannot be read is told at the first look inside
    except Exception as error:  # absl, ml_collections and the config file itself raise many kinds
        raise UsageError(f"{_reason(error)} (see --help)") from None
    if rest:
        raise UsageError(f"{rest[0]!r}: not a flag; settings are given as --config.NAME=VALUE")
    if config.value is None:
        raise UsageError("--config: missing; for example --config configs/smollm2_135m.py")
    if workdir and not values["workdir"].value:
        raise UsageError("--workdir: missing; name a folder to write to")
    settings = Settings.of(config.value)
    enable_compile_cache()
    return (settings, Path(values["workdir"].value)) if workdir else (settings,)


def _reason(error: Exception) -> str:
    while error.args and isinstance(error.args[0], Exception):  # one error inside another
        error = type(error)(*error.args[0].args)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError):  # after the places where ml_collections has looked
        return f"--config: {text[max(text.rfind('[Errno'), 0) :]}"
    if isinstance(error, AttributeError) and text.startswith("'"):  # a key of the config
        return "no setting " + text.replace(" Did you mean", "; did you mean")
    plain = isinstance(error, (ValueError, AttributeError))
    return text if plain else f"{type(error).__name__}: {text}"


def join_processes() -> None:
    """Join the other processes of this run, where the environment says that there are some.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them; on a TPU slice of several
    hosts and under Slurm jax finds them itself. Must come before the first use of a device.
    """
    import jax

    env, found = os.environ, {}
    if address := env.get("JAX_COORDINATOR_ADDRESS"):
        try:
            found = {
                "num_processes": int(env["JAX_NUM_PROCESSES"]),
                "process_id": int(env["JAX_PROCESS_ID"]),
            }
        except (KeyError, ValueError):
            raise UsageError(
                f"JAX_COORDINATOR_ADDRESS={address} needs JAX_NUM_PROCESSES and JAX_PROCESS_ID, numbers"
            ) from None
        found["coordinator_address"] = address
    nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > 1 and (address or "").rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        raise UsageError(f"JAX_COORDINATOR_ADDRESS={address} is this host alone; there are {nodes}")
    several = "," in env.get("TPU_WORKER_HOSTNAMES", "") or int(env.get("SLURM_NTASKS", "1")) > 1
    if found or several:
        # After five minutes jax names the processes that are missing.
        jax.distributed.initialize(**found, initialization_timeout=300)


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache, so that a second run starts in seconds.

    JAX_COMPILATION_CACHE_DIR names another place, under jax's own rules.
    """
    import jax

    from bfm.wheel import cache_dir

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
