# SPDX-License-Identifier: Apache-2.0
"""Gradients: the same for any cut of a batch, any mesh, packed or padded; against a float64 oracle."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from bfm import lora, sharding, training, weights
from bfm.model.config_hf import from_hf
from bfm.rows import Row
from bfm.settings import TrainSettings
from tests import models, reference

TINY = models.LLAMA | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
CONFIG = from_hf(TINY)
TENSORS = models.tensors(TINY)
MESHES = [(8, 1, 1), (2, 2, 2), (1, 8, 1)]
# Relative to the largest gradient of a parameter (the bound).
CLOSE = 1e-5


def params():
    source = weights.Source(CONFIG, weights.expected(CONFIG), TENSORS.__getitem__, lambda: "", 0)
    return lora.flatten(weights.read(source))


def make_rows(n=16, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        length = int(rng.integers(6, 30))
        ids = tuple(int(x) for x in rng.integers(0, 64, length))
        head = "controller" if i % 3 == 0 else "reader"
        made.append(Row(str(i), head, ids, length - int(rng.integers(1, 5))))
    return made


ROWS = make_rows()
MODEL = training.Model(CONFIG, "float32", 1.0, remat=False)


@functools.cache
def step_of(mesh, remat=False):
    mesh = sharding.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    optimizer = optax.sgd(1.0)  # the change is the gradient
    abstract = jax.eval_shape(lambda: training.new_state(params(), optimizer))
    places = training.state_shardings(abstract, mesh)
    step = training.Step(dataclasses.replace(MODEL, remat=remat), optimizer, mesh, places)
    return step, places


def gradients(rows=ROWS, mesh=(1, 1, 1), remat=False, **train):
    """The gradient of an update as the step gives it (params before minus after), and its loss."""
    step, places = step_of(mesh, remat)
    settings = TrainSettings(
        **{"batch_size": len(rows), "controller_weight": 2.0, "tokens": 64, **train}
    )
    state = jax.tree.map(jax.device_put, training.new_state(params(), optax.sgd(1.0)), places)
    parts = training.split_batch(rows, settings, mesh[0] * mesh[1])
    assert len(parts) == settings.accumulation
    new, metrics = step(state, {}, parts)
    before = params()
    return {n: np.asarray(before[n] - new["params"][n]) for n in before}, float(metrics["loss"])


def assert_same(found, expected):
    (grads, loss), (wanted, loss_wanted) = found, expected
    assert abs(loss - loss_wanted) < 1e-6 * abs(loss_wanted)
    for name, grad in wanted.items():
        # params - (params - grad) rounds at the size of a parameter: 6e-8 of about 1
        bound = CLOSE * np.abs(grad).max() + 2e-7
        assert np.abs(grads[name] - grad).max() <= bound, name


@functools.cache
def whole():
    return gradients()


def test_loss_is_the_oracles():
    total = weight = 0.0
    for row in ROWS:
        logits_TV = reference.logits(TINY, TENSORS, list(row.ids))
        logp_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
        w = 2.0 if row.head == "controller" else 1.0
        for place in range(row.start, len(row.ids)):
            total -= w * logp_TV[place - 1, row.ids[place]]
            weight += w
    assert abs(whole()[1] - total / weight) < 1e-5 * total / weight


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_moves_nothing(accumulation):
    assert_same(gradients(accumulation=accumulation), whole())


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_move_nothing(mesh):
    accumulation = 2 if mesh == (2, 2, 2) else 1
    assert_same(gradients(mesh=mesh, accumulation=accumulation), whole())


def test_packing_and_remat_move_nothing():
    packed = training.split_batch(ROWS, TrainSettings(batch_size=16, packing=True, tokens=64), 1)
    assert packed[0].tokens_BT.shape[0] < 8 and packed[0].segments_BT.max() > 1
    assert_same(gradients(packing=True), whole())
    assert_same(gradients(packing=True, mesh=(2, 2, 2)), whole())
    assert_same(gradients(remat=True), whole())


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_a_row_never_moves_another(family):
    """Loss of each row alone equals its loss packed beside others, which then change."""
    config = from_hf(models.FAMILIES[family])
    tensors = models.tensors(models.FAMILIES[family])
    source = weights.Source(config, weights.expected(config), tensors.__getitem__, lambda: "", 0)
    named = lora.flatten(weights.read(source))
    model = training.Model(config, "float32", 1.0, remat=False)
    nll = jax.jit(lambda batch: training.loss_sum(named, {}, batch, model))
    rows = make_rows(4)
    alone = float(nll(training.make_batch([[rows[0]]], 1, 96, 1.0)))
    for others in (rows[1:], rows[:0:-1], make_rows(4, seed=9)[1:]):
        batch = training.make_batch([[others[0], rows[0], *others[1:]]], 1, 96, 1.0)
        mine = np.zeros_like(batch.weight_Bn)
        first = len(others[0].ids) - others[0].start
        mine[0, first : first + len(rows[0].ids) - rows[0].start] = 1.0
        packed = float(nll(dataclasses.replace(batch, weight_Bn=mine)))
        assert abs(packed - alone) < 1e-4 + 1e-6 * abs(alone)


def test_masters_are_fp32_unless_bf16_is_asked_for():
    train = TrainSettings(batch_size=16, tokens=64, learning_rate=1e-2, warmup=0.0)
    assert train.master == "float32"
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    parts, losses = training.split_batch(ROWS, train, 1), {}
    for dtype in ("float32", "bfloat16"):
        optimizer = training.make_optimizer(dataclasses.replace(train, master=dtype), 12)
        state = training.new_state({n: x.astype(dtype) for n, x in params().items()}, optimizer)
        places = training.state_shardings(jax.eval_shape(lambda s=state: s), mesh)
        state = jax.tree.map(jax.device_put, state, places)
        step = training.Step(MODEL, optimizer, mesh, places)
        losses[dtype] = []
        for _ in range(12):
            state, metrics = step(state, {}, parts)
            losses[dtype].append(float(metrics["loss"]))
        assert {str(x.dtype) for x in state["params"].values()} == {dtype}
    assert losses["bfloat16"][0] == pytest.approx(losses["float32"][0], rel=0.02)
    assert all(found[-1] < 0.7 * found[0] for found in losses.values())


def test_the_mask_is_the_answer_and_its_end():
    batch = training.split_batch(ROWS, TrainSettings(batch_size=16, accumulation=4), 1)
    scored = sum(int((part.weight_Bn > 0).sum()) for part in batch)
    assert scored == sum(len(row.ids) - row.start for row in ROWS)
    for part in batch:
        for i, weights_n in enumerate(part.weight_Bn):
            places = part.spans.index_Bn[i][weights_n > 0] + 1
            assert (part.tokens_BT[i, places] == part.spans.target_BnC[i, : len(places), 0]).all()
            assert places.max() == part.segments_BT[i].sum() - 1  # the row's last token: its end


def test_adapters_begin_as_the_model_and_merge_into_it():
    base = params()
    adapters = lora.init_adapters(CONFIG, 4, seed=0)
    names = {n for pair in map(functools.partial(lora.parts, CONFIG), base) if pair for n in pair}
    assert set(adapters) == names and len(names) == 14  # seven matrices a layer
    batch = training.make_batch([[row] for row in ROWS], 16, 32, 1.0)
    model = training.Model(CONFIG, "float32", 0.5, remat=False)
    plain = training.loss_sum(base, {}, batch, MODEL)
    np.testing.assert_array_equal(training.loss_sum(adapters, base, batch, model), plain)
    moved = {
        n: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape) for n, x in adapters.items()
    }
    loss = training.loss_sum(moved, base, batch, model)
    merged = lora.flatten(lora.merge(lora.assemble(CONFIG, {**base, **moved}, 0.5)))
    assert merged.keys() == base.keys()
    assert abs(training.loss_sum(merged, {}, batch, MODEL) - loss) < 1e-5 * loss
    w = base["full.q_DNh"] + 0.5 * np.einsum(
        "ldr,lrnh->ldnh", moved["full.q_Dr"], moved["full.q_rNh"]
    )
    np.testing.assert_allclose(merged["full.q_DNh"], w, atol=1e-6)


def test_schedule_and_decay():
    rate = training.make_schedule(TrainSettings(learning_rate=1.0, warmup=0.1), 100)
    assert 0 < rate(0) < rate(5) < rate(10) and abs(rate(10) - 1) < 1e-6
    assert rate(55) < rate(20) and abs(rate(100) - 0.1) < 1e-6
    constant = training.make_schedule(TrainSettings(warmup=0.0, schedule="constant"), 5)
    assert float(constant(0)) == float(constant(4)) == np.float32(2e-4)
    assert training.decayed({"norm_D": 0, "full.q_DNh": 0, "linear.log_rate_H": 0}) == {
        "norm_D": False, "full.q_DNh": True, "linear.log_rate_H": False,
    }  # fmt: skip


def test_a_mesh_that_does_not_divide_is_named():
    with pytest.raises(sharding.ShardingError, match="3 x 1 x 1 = 3, but there are 8"):
        sharding.make_mesh(3, 1, 1)
    mesh = sharding.make_mesh(0, 1, 4)
    assert mesh.shape["data"] == 2
    with pytest.raises(
        sharding.ShardingError, match=r"full\.k_DKh: 2 is not a multiple of tensor=4"
    ):
        sharding.shardings({"full.k_DKh": (2, 32, 2, 8)}, mesh)
