# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: other meshes, damage, a kill, a full disk; compared bit for bit."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from bfm.checkpoint import CheckpointError, Checkpoints

IDENTITY = {"dtype": "float32", "data": {"sha256": "aa", "split": "train"}, "lora_rank": None}
POSITION = {"next": 7, "epoch": 0.5}


def mesh(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "tensor"))


def placed(tree, on):
    """The same values on a mesh: matrices over fsdp and tensor, or data where it is the only axis."""
    specs = {2: P(("data", "fsdp"), "tensor"), 1: P("tensor"), 0: P()}
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, specs[x.ndim])), tree)


def make_state(seed=0, on=None):
    rng = np.random.default_rng(seed)
    params = {
        "layers.0/w": jnp.asarray(rng.standard_normal((16, 24)), jnp.bfloat16),
        "embed": jnp.asarray(rng.standard_normal((32, 8)), jnp.float32),
        "norm": jnp.asarray(rng.standard_normal(8), jnp.float32),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    moments = jax.tree.map(
        lambda x: x if x.ndim == 0 else jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        tx.init(params),
    )
    state = {"step": jnp.int32(seed), "params": params, "opt": moments}
    return placed(state, on or mesh(8, 1, 1))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def write(folder, *steps, identity=IDENTITY, **settings):
    with Checkpoints(folder, keep=9, identity=identity, **settings) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), POSITION | {"next": step})


def test_restores_on_other_meshes_and_one_device_bit_for_bit(tmp_path):
    state = make_state(3)
    write(tmp_path, 3)
    layouts = [placed(state, mesh(*shape)) for shape in ((8, 1, 1), (2, 2, 2), (1, 8, 1))]
    layouts.append(jax.device_put(state, SingleDeviceSharding(jax.devices()[5])))
    with Checkpoints(tmp_path, keep=2, identity=IDENTITY) as checkpoints:
        assert checkpoints.latest() == 3
        for layout in layouts:
            got, position = checkpoints.restore(3, abstract(layout))
            assert position == POSITION | {"next": 3}
            assert_same(got, state)
            assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(
                lambda x: x.sharding, layout
            )


def test_what_is_saved_is_the_state_of_the_call_though_it_is_donated_next(tmp_path):
    ones = placed({"w": jnp.ones((256, 4096))}, mesh(2, 2, 2))
    target = abstract(ones)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1, identity={}) as checkpoints:
        checkpoints.save(1, ones)
        # Where the copying is still going on, the CPU backend updates a copy and leaves `ones` alive:
        # either way the step that was saved must not see the updates.
        after = update(update(ones))
        assert float(after["w"].max()) == 3
        got, position = checkpoints.restore(1, target)
    assert position is None
    assert np.all(np.asarray(got["w"]) == 1)


def test_keeps_the_newest_and_the_best(tmp_path):
    scores = {1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.8, 5: 0.9, 6: None, 7: 0.3, 8: 0.1}
    state = {"w": jnp.zeros(2)}
    settings = dict(keep=2, identity={}, best="accuracy")

    def save(checkpoints, *steps):
        for step in steps:
            metrics = {"accuracy": scores[step], "loss": -step} if scores[step] else None
            checkpoints.save(step, state, metrics=metrics)

    def kept():
        return sorted(int(path.name) for path in tmp_path.iterdir())

    with Checkpoints(tmp_path, **settings) as checkpoints:
        assert checkpoints.latest() is checkpoints.best() is None
        save(checkpoints, 1, 2, 3, 4)
        with pytest.raises(ValueError, match="'accuracy' is missing"):
            checkpoints.save(5, state, metrics={"loss": 1.0})
    assert kept() == [2, 3, 4]  # nan is the worst
    with Checkpoints(tmp_path, **settings) as checkpoints:  # metrics are read back
        save(checkpoints, 5)
        assert checkpoints.best() == 5  # the newest of equals
        save(checkpoints, 6, 7, 8)
        assert (checkpoints.latest(), checkpoints.best()) == (8, 5)
    assert kept() == [5, 7, 8]


def test_a_step_is_saved_once_and_never_behind_another(tmp_path):
    write(tmp_path, 4)
    before = (tmp_path / "4" / "files.json").stat().st_mtime_ns
    with Checkpoints(tmp_path, keep=2, identity=IDENTITY) as checkpoints:
        for step in (3, 4):  # a run that did not go on from 4
            with pytest.raises(CheckpointError, match=f"step {step} is not after step 4"):
                checkpoints.save(step, make_state())
        checkpoints.restore(4, abstract(make_state()))
        checkpoints.save(4, make_state(4))  # SIGTERM right after a resume
        checkpoints.save(5, make_state(5))
        checkpoints.save(5, make_state(5))  # SIGTERM right after a save
        assert checkpoints.latest() == 5
    assert (tmp_path / "4" / "files.json").stat().st_mtime_ns == before


def test_another_identity_is_refused_with_the_names(tmp_path):
    write(tmp_path, 1)
    other = {"dtype": "bfloat16", "data": {"sha256": "bb", "split": "train"}, "seed": 1}
    with Checkpoints(tmp_path, keep=2, identity=other) as checkpoints:
        for call in (checkpoints.latest, lambda: checkpoints.restore(1, abstract(make_state()))):
            with pytest.raises(CheckpointError) as caught:
                call()
            text = str(caught.value)
            assert "dtype is float32 there and bfloat16 here" in text
            assert "data/sha256 is aa there and bb here" in text
            assert "seed is absent there and 1 here" in text
            assert "split" not in text and "\n" not in text
    with (
        Checkpoints(tmp_path, keep=2, identity=IDENTITY | {"data": {}}) as checkpoints,
        pytest.raises(CheckpointError, match="data/sha256 is aa there and absent here"),
    ):
        checkpoints.latest()


def test_another_dtype_shape_or_tree_is_refused(tmp_path):
    write(tmp_path, 1)
    whole = abstract(make_state())

    def changed(**leaf):
        return whole | {
            "params": whole["params"] | {"norm": whole["params"]["norm"].update(**leaf)}
        }

    renamed = dict(whole["params"])
    renamed["head"] = renamed.pop("norm")
    sgd = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, whole["params"])
    cases = {
        "params/norm is float32[8] there and bfloat16[8] here": changed(dtype=jnp.bfloat16),
        "params/norm is float32[8] there and float32[16] here": changed(shape=(16,)),
        "params/norm is float32[8] there and float32[1, 8] here": changed(shape=(1, 8)),
        "params/head is absent there and float32[8] here": whole | {"params": renamed},
        "params/norm is float32[8] there and absent here": whole | {"params": renamed},
        "step is int32[] there and absent here": {k: whole[k] for k in ("params", "opt")},
        "opt/0/trace/embed is absent there": whole | {"opt": sgd},
    }
    with Checkpoints(tmp_path, keep=2, identity=IDENTITY) as checkpoints:
        for text, target in cases.items():
            with pytest.raises(CheckpointError) as caught:
                checkpoints.restore(1, target)
            assert text in str(caught.value) or "more" in str(caught.value), text
            assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="needs a sharding"):
            checkpoints.restore(1, changed(sharding=None))
        with pytest.raises(CheckpointError, match="7: cannot be read"):
            checkpoints.restore(7, whole)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGE = {
    "a data file cut short": lambda step: halve(largest(step / "state")),
    "a data file gone": lambda step: largest(step / "state").unlink(),
    "a data file emptied": lambda step: largest(step / "state").write_bytes(b""),
    "the arrays gone": lambda step: shutil.rmtree(step / "state"),
    "the metadata emptied": lambda step: (step / "_CHECKPOINT_METADATA").write_bytes(b""),
    "the metadata gone": lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
    "the tree's metadata emptied": lambda step: (step / "state" / "_METADATA").write_bytes(b""),
    "metrics cut short": lambda step: halve(step / "metrics" / "metrics"),
    "the list of files gone": lambda step: (step / "files.json").unlink(),
    "the list of files cut short": lambda step: halve(step / "files.json"),
    "nothing inside": lambda step: [shutil.rmtree(step), step.mkdir()],
}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    with Checkpoints(folder, keep=9, identity=IDENTITY, best="accuracy") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), POSITION, {"accuracy": step / 10})
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_step_is_ignored_with_one_line_and_can_be_saved_again(
    three_steps, tmp_path, capfd, kind
):
    folder = tmp_path / "steps"
    shutil.copytree(three_steps, folder)
    DAMAGE[kind](folder / "3")
    settings = dict(keep=2, identity=IDENTITY, best="accuracy")
    with Checkpoints(folder, **settings) as checkpoints:
        assert checkpoints.latest() == checkpoints.best() == 2
        got, _ = checkpoints.restore(2, abstract(make_state()))
        assert_same(got, make_state(2))
        checkpoints.save(3, make_state(30))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"warning: {folder / '3'}: "), lines
    with Checkpoints(folder, **settings) as checkpoints:
        assert checkpoints.latest() == 3
        assert_same(checkpoints.restore(3, abstract(make_state()))[0], make_state(30))
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "damaged-3"]


def test_bytes_that_changed_in_place_raise_one_line(three_steps, tmp_path):
    folder = tmp_path / "steps"
    shutil.copytree(three_steps, folder)
    data = max((folder / "3" / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    with (
        Checkpoints(folder, keep=2, identity=IDENTITY) as checkpoints,
        pytest.raises(CheckpointError, match=r"/3: cannot be read \(remove") as caught,
    ):
        checkpoints.restore(3, abstract(make_state()))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


KILLED = """
import sys, jax, numpy as np
from bfm.checkpoint import Checkpoints
rng = np.random.default_rng(0)
with Checkpoints(sys.argv[1], keep=1, identity={}) as checkpoints:
    checkpoints.save(1, {"w": jax.numpy.arange(4.0)}, {"next": 2})
    big = jax.numpy.asarray(rng.standard_normal(1 << 24, dtype=np.float32))
    checkpoints.save(2, {"w": big})
    print("writing", flush=True)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_step_before(tmp_path, capfd):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert child.stdout.readline() == b"writing\n"
    while not list(tmp_path.glob("2.orbax-checkpoint-tmp*/*/*")):
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    [half] = tmp_path.glob("2*")
    assert half.name != "2"  # else the kill came too late to show anything
    with Checkpoints(tmp_path, keep=1, identity={}) as checkpoints:
        assert checkpoints.latest() == 1
        target = {
            "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh(1, 8, 1), P()))
        }
        got, position = checkpoints.restore(1, target)
        assert np.asarray(got["w"]).tolist() == [0, 1, 2, 3] and position == {"next": 2}
        checkpoints.save(3, got)
        assert checkpoints.latest() == 3
    warnings = capfd.readouterr().err.splitlines()
    assert warnings == [f"warning: {half}: was not finished; it is ignored and removed"]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


TWO = """
import sys, jax, numpy as np
from pathlib import Path
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from bfm.checkpoint import CheckpointError, Checkpoints
process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
on = jax.make_mesh((2, 4), ("a", "b"))
def make(step, spec):
    values = {"w": np.arange(64, dtype=np.float32).reshape(8, 8) + step, "r": np.arange(5.0) + step}
    shardings = {"w": NamedSharding(on, spec), "r": NamedSharding(on, P())}
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda at: x[at]), values, shardings
    )
with Checkpoints(folder, keep=2, identity={}) as checkpoints:
    assert checkpoints.latest() is None
    for step in (1, 2):
        checkpoints.save(step, make(step, P("a", "b")), {"next": step}, {"accuracy": -step})
if process == 0:
    (folder / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
multihost_utils.sync_global_devices("damaged")
with Checkpoints(folder, keep=1, identity={}, best="accuracy") as checkpoints:
    assert checkpoints.latest() == 1
    want = make(1, P("b"))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    got, position = checkpoints.restore(1, target)
    assert position == {"next": 1}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding == b.sharding
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)
    checkpoints.save(2, got)
    checkpoints.save(3, got)
"""


def test_two_processes_save_restore_and_set_aside_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(process), port, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for process in (0, 1)
    ]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    assert [error.count("warning:") for error in errors] == [1, 0], errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "damaged-2"]


def test_a_write_that_fails_is_told_at_the_next_call_in_one_line(tmp_path, capfd, caplog):
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 20), jnp.float32)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path, keep=1, identity={})
    checkpoints.save(1, {"w": jnp.zeros(2)})
    assert checkpoints.latest() == 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # as a full disk
        checkpoints.save(2, state)
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be saved: .*File too large"
        ) as caught:
            checkpoints.save(3, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # nothing of orbax's own tracebacks
    assert not [record for record in caplog.records if record.exc_info]
    with Checkpoints(tmp_path, keep=1, identity={}) as again:
        assert again.latest() == 1
    with contextlib.suppress(CheckpointError):  # orbax tells it twice
        checkpoints.save(2, state)
    checkpoints.save(2, state)
    checkpoints.close()
    with Checkpoints(tmp_path, keep=1, identity={}) as again:
        assert again.latest() == 2


def test_the_error_that_ends_the_block_is_the_one_reported(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 20), jnp.float32)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        with (
            pytest.raises(KeyError, match="batch"),
            Checkpoints(tmp_path, keep=1, identity={}) as checkpoints,
        ):
            checkpoints.save(1, state)
            raise KeyError("batch")
        with (
            pytest.raises(CheckpointError, match="step 1 could not be saved"),
            Checkpoints(tmp_path, keep=1, identity={}) as checkpoints,
        ):
            checkpoints.save(1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be_written_stops_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="checkpoints cannot be kept here") as caught:
            Checkpoints(folder, keep=1, identity={})
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="keep: must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0, identity={})


@contextlib.contextmanager
def no_longer_root():
    """For root no folder is read-only."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_read_only_folder_stops_before_training():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        write(folder, 1)
        os.chmod(folder, 0o555)
        with no_longer_root():
            assert "1" in os.listdir(folder)
            with pytest.raises(CheckpointError, match="cannot be kept here: Permission denied"):
                Checkpoints(folder, keep=1, identity=IDENTITY)
        os.chmod(folder, 0o755)


def test_a_folder_that_vanishes_is_not_made_anew(tmp_path):
    with Checkpoints(tmp_path / "run", keep=1, identity={}) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)})
        checkpoints.latest()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(CheckpointError, match="step 2 cannot be saved: No such file"):
            checkpoints.save(2, {"w": jnp.zeros(2)})
    assert not (tmp_path / "run").exists()


def test_identity_and_position_are_json_in_the_checkpoint(tmp_path):
    write(tmp_path, 5)
    saved = json.loads((tmp_path / "5" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert saved == {"identity": IDENTITY, "position": POSITION | {"next": 5}}
