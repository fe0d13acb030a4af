"""Passes change how, never what: random routers and random expressions computed in float64 before and after."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import backward_inputs, evaluate, inputs_of, lower, routers
from routing import DOUBLE, DOUBLE_GRADIENT

from moesaic.ir.builder import Builder
from moesaic.ir.errors import InputError
from moesaic.ir.ops.kernel import RowProgram
from moesaic.passes.differentiate import SUFFIX
from moesaic.runtime import reference

STEPS = ["canonicalize", "cse", "dce", "expand-rows", "sink-gathers", "cse", "dce"]
FUSED = "canonicalize,cse,dce,differentiate,expand-rows,sink-gathers,cse,dce,fuse-score-topk,choose-saved,dce"
SEEDS = st.integers(0, 10**6)


def assert_equal(found, wanted, tolerance=DOUBLE):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        if theirs.is_floating_point():
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(ours.long(), theirs.long())


@settings(max_examples=40)
@given(routers(), SEEDS, st.booleans())
def test_each_pass_keeps_the_forward_function(module, seed, special):
    inputs = inputs_of(module.entry, seed, special=special)
    wanted = evaluate(module.entry, inputs)
    pipeline = ""
    for step in STEPS:
        pipeline = f"{pipeline},{step}" if pipeline else step
        lowered, _ = lower(module, pipeline)
        assert_equal(evaluate(lowered.entry, inputs), wanted)


@settings(max_examples=40)
@given(routers(), SEEDS)
def test_the_derived_backward_is_autograd_of_the_forward(module, seed):
    """And stays it through every pass. Autograd runs over the reference semantics, never over our rules."""
    forward = module.entry
    inputs = {n: x.requires_grad_() for n, x in inputs_of(forward, seed).items()}
    results = reference.evaluate(forward, inputs)
    differentiated, _ = lower(module, "differentiate")
    if not differentiated.has_function(forward.name + SUFFIX):
        assert not any(r.requires_grad for r in results)
        return
    detached = {n: x.detach() for n, x in inputs.items()}
    plain = [r.detach() for r in results]
    backward = differentiated.function(forward.name + SUFFIX)
    given_values, cotangents = backward_inputs(forward, backward, detached, plain, seed)
    floats = [(r, cotangents[f"d_{n}"]) for n, r in zip(forward.result_names, results) if r.requires_grad]
    names = list(inputs)
    grads = torch.autograd.grad(
        [r for r, _ in floats], [inputs[n] for n in names], [c for _, c in floats], allow_unused=True
    )
    wanted = {f"d_{n}": g for n, g in zip(names, grads) if g is not None}
    assert sorted(backward.result_names) == sorted(wanted)
    assert "d_bias" not in wanted, "a selection bias only selects"
    pipeline = "differentiate"
    for step in ["", *STEPS]:
        pipeline = f"{pipeline},{step}" if step else pipeline
        lowered, _ = lower(module, pipeline)
        found = dict(
            zip(backward.result_names, evaluate(lowered.function(forward.name + SUFFIX), given_values), strict=True)
        )
        for name, gradient in wanted.items():
            size = max(float(gradient.abs().max()), 1e-3)
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=DOUBLE_GRADIENT * size)


@settings(max_examples=40)
@given(routers(), SEEDS, st.booleans(), st.sampled_from(["", ",plan-workspace", ",plan-workspace,specialize"]))
def test_fused_kernels_and_launches_compute_the_same(module, seed, special, end):
    """The whole pipeline, forward and backward, with what forward saves handed on by name."""
    inputs = inputs_of(module.entry, seed, special=special)
    plain = evaluate(module.entry, inputs)
    names = module.entry.result_names
    lowered, _ = lower(module, FUSED + end)
    found = dict(zip(lowered.entry.result_names, evaluate(lowered.entry, inputs), strict=True))
    assert_equal([found[n] for n in names], plain)
    if not lowered.has_function(module.entry.name + SUFFIX):
        return
    unfused, _ = lower(module, "canonicalize,differentiate")
    backward = unfused.function(module.entry.name + SUFFIX)
    wanted_inputs, cotangents = backward_inputs(module.entry, backward, inputs, plain, seed)
    wanted = evaluate(backward, wanted_inputs)
    fused_backward = lowered.function(module.entry.name + SUFFIX)
    available = {**inputs, **found, **cotangents}
    assert fused_backward.result_names == backward.result_names
    assert_equal(
        evaluate(fused_backward, {a.name: available[a.name] for a in fused_backward.arguments}),
        wanted,
        tolerance=DOUBLE_GRADIENT,
    )


@settings(max_examples=60)
@given(routers())
def test_forward_saves_the_picks_and_nothing_else(module):
    """As K indices, in the type they go out in, or, where that is smaller, as a byte map. No float is ever saved, least
    of all [T, E] of them."""
    before = module.entry.result_names[:]
    lowered, context = lower(module, FUSED)
    forward = lowered.entry
    assert forward.result_names[: len(before)] == before
    topk = next(op for op in module.walk() if op.name == "row.topk")
    e, k = topk.x.type.shape[-1], topk.k
    picks = {f"tensor<Tx{k}xi{8 * width}>": width * k for width in (2, 4, 8)} | {f"tensor<Tx{e}xu8>": e}
    saved = forward.result_types[len(before) :]
    assert len(saved) <= 1 and all(str(t) in picks for t in saved)
    if saved:
        assert "indices" not in before or picks[str(saved[0])] < 4 * k
    if lowered.has_function(forward.name + SUFFIX):
        [remark] = [r for r in context.remarks if r.startswith("choose-saved: keeps")]
        backward = lowered.function(forward.name + SUFFIX)
        for selection in ("row.topk", "row.group_limit"):
            assert sum(op.name == selection for op in lowered.walk()) <= 1, "a selection runs once"
        handed = [str(a.type) for a in backward.arguments if a.name in forward.result_names]
        assert ("nothing" in remark.split(";")[0]) == (not handed)
        total = sum(picks[type] for type in handed)
        out = dict(zip(forward.result_names, forward.result_types, strict=True)).get("indices")
        assert total <= k * (max(4, out.dtype.bytes) if out is not None else 4) and f"({total} B/token)" in remark
    for function in lowered.functions:
        assert sum(isinstance(op, RowProgram) for op in function.body.ops) == 1


# Expressions around a top-k, made to tempt sink-gathers ---------------------------------------------------------------


@st.composite
def expressions(draw):
    """Elementwise expressions over rows, vectors and numbers per token, gathered, then scattered again."""
    e = draw(st.sampled_from([1, 2, 3, 5, 7]))
    k = draw(st.integers(1, e))
    b = Builder("f")
    x = b.input("x", f"tensor<Tx{e}xf32>")
    rows = [x, b.input("z", f"tensor<Tx{e}xf32>"), b.input("v", f"tensor<{e}xf32>"), b.input("c", "tensor<Tx1xf32>")]
    rows += [b.input("u", "tensor<1xf32>"), b.input("n", "tensor<f32>")]
    other = b.input("other", f"tensor<Tx{k}xi32>")

    def grow(pool, steps):
        for kind in draw(st.lists(st.sampled_from(steps), max_size=5)):
            a, c = draw(st.sampled_from(pool)), draw(st.one_of(st.sampled_from(pool), st.sampled_from([0.5, -1.0])))
            before = len(b.function.body.ops)
            try:
                if kind == "select":
                    made = b.op("math.select", b.op("math.less", a, c), a, c)
                elif kind == "nested":
                    flag = b.op("math.equal", b.op("math.less", a, c), 1.0)
                    made = b.op("math.select", flag, c, a)
                elif kind == "broadcast":
                    made = b.op("math.broadcast", c, a)
                elif kind.startswith("row.") or kind in ("math.tanh", "math.neg"):
                    made = b.op(kind, a)
                else:
                    made = b.op(kind, a, c)
            except InputError:
                del b.function.body.ops[before:]
                continue
            pool.append(made)
        return pool

    steps = ["math.add", "math.mul", "math.tanh", "math.neg", "select", "nested", "broadcast", "row.sum", "row.max"]
    rows = grow(rows, steps)
    ranked = draw(st.sampled_from([r for r in rows if r.type == x.type]))
    values, indices = b.op("row.topk", ranked, k=k)
    wide = [r for r in rows if r.type.rank in (1, 2) and r.type.dtype.is_float]
    wide = [r for r in wide if r.type.shape[-1] == e] or [x]
    picked = [values]
    for _ in range(draw(st.integers(1, 3))):
        picked.append(b.op("row.gather", draw(st.sampled_from(wide)), draw(st.sampled_from([indices, other]))))
    picked = grow(picked, [s for s in steps if s != "row.max"])
    same = [p for p in picked if p.type == values.type]
    at_picks = draw(st.sampled_from(same))
    spread = b.op("row.scatter", at_picks, draw(st.sampled_from([indices, other])), size=e)
    spread = spread * draw(st.sampled_from([*[r for r in rows if r.type == x.type], 2.0]))
    again = b.op("row.gather", spread, indices)
    return b.build(values=values, picked=at_picks, spread=spread, again=again), e, k


@settings(max_examples=100)
@given(expressions(), SEEDS)
def test_gathers_sink_through_anything(made, seed):
    module, e, k = made
    inputs = (
        inputs_of(module.entry, seed, tokens=5) if not any(a.name == "other" for a in module.entry.arguments) else {}
    )
    generator = torch.Generator().manual_seed(seed)
    for argument in module.entry.arguments:
        if argument.name == "other":
            inputs["other"] = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(5)]).int()
        elif argument.name not in inputs:
            shape = [d if isinstance(d, int) else 5 for d in argument.type.shape]
            inputs[argument.name] = torch.randn(shape, dtype=torch.float64, generator=generator)
    wanted = evaluate(module.entry, inputs)
    assert all(w.abs().max() > 0 for w in wanted[:1])
    for pipeline in ("sink-gathers", "expand-rows,sink-gathers,cse,dce", "canonicalize,sink-gathers,sink-gathers,dce"):
        lowered, _ = lower(module, pipeline)
        assert_equal(evaluate(lowered.entry, inputs), wanted)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_two_selections_save_both(score):
    """A function with two top-ks keeps two sets of picks, under two names."""
    b = Builder("f")
    x = b.input("x", "tensor<Tx7xf32>")
    s = b.op("row.softmax" if score == "softmax" else "math.sigmoid", x)
    v1, _ = b.op("row.topk", s, k=2)
    v2, _ = b.op("row.topk", b.op("math.neg", x), k=3)
    module = b.build(a=b.op("row.normalize", v1), b=b.op("math.mul", v2, v2))
    lowered, _ = lower(module, FUSED)
    assert lowered.entry.result_names == ["a", "b", "saved_indices", "saved_indices_1"]
    inputs = inputs_of(module.entry, 3)
    found = dict(zip(lowered.entry.result_names, evaluate(lowered.entry, inputs), strict=True))
    unfused, _ = lower(module, "differentiate")
    backward = unfused.function("f_backward")
    wanted_inputs, cotangents = backward_inputs(module.entry, backward, inputs, [found["a"], found["b"]], 3)
    fused = lowered.function("f_backward")
    available = {**inputs, **found, **cotangents}
    ours = evaluate(fused, {a.name: available[a.name] for a in fused.arguments})
    theirs = evaluate(backward, wanted_inputs)
    assert theirs[0].abs().max() > 0
    assert_equal(ours, theirs)
