"""``specialize``: the IR it makes, as FileCheck lines, and what it says and refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import lower

import moesaic as mo
from moesaic.ir.errors import UnsupportedError, UsageError
from moesaic.passes.manager import PassManager
from moesaic.passes.row_shape import MAX_EXPERTS
from moesaic.passes.specialize import Specialize
from moesaic.runtime.program import program_of

COMPACT, DENSE = ("weights", "indices"), ("probs", "map")


def configuration(router, pipeline="forward", dtype="f32"):
    m, _ = lower(router.module(dtype), pipeline)
    return [op.configuration for op in m.walk() if op.name == "launch.kernel"]


def test_specialize():
    [rows, finish] = configuration(mo.Router(num_experts=128, top_k=8, score="softmax"), dtype="bf16")
    assert rows["target"] == finish["target"] == "sm_90a"
    assert rows["grid"] == "persistent" and rows["select"] in ("merge", "rounds") and rows["alignment"] == "16"
    assert int(rows["vec"]) == 8
    [rows] = configuration(mo.Router(num_experts=128, top_k=64, outputs=("weights",)))
    assert rows["grid"] == "cover" and rows["select"] == "sort" and int(rows["vec"]) == 4


@settings(max_examples=60)
@given(
    st.one_of(st.integers(1, 1024), st.integers(1025, MAX_EXPERTS)),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from([("weights", "indices", "counts"), ("probs", "map"), ("indices",)]),
    st.data(),
)
def test_every_number_of_experts_has_a_configuration(experts, dtype, outputs, data):
    k = data.draw(st.integers(1, min(experts, 40)))
    router = mo.Router(num_experts=experts, top_k=k, outputs=outputs, renormalize=True)
    for config in configuration(router, "default", dtype):
        if "lanes" not in config:
            continue
        lanes, vec, threads = (int(config[n]) for n in ("lanes", "vec", "threads"))
        assert lanes & (lanes - 1) == 0 and 1 <= lanes <= 1024 and experts % vec == 0 and vec & (vec - 1) == 0
        assert lanes == threads if experts > 1024 else lanes <= 32
        slots = -(-experts // (lanes * vec)) * vec
        assert lanes * slots >= experts and slots <= 32, "membership packs one bit a slot into a word"
        assert threads % 32 == 0 and threads % lanes == 0 and 32 <= threads <= 1024
        if vec > 1:
            assert vec * (2 if dtype == "bf16" else 4) <= 16


def test_limits_of_specialize():
    assert MAX_EXPERTS == 16384
    assert configuration(mo.Router(num_experts=16384, top_k=3))
    with pytest.raises(UnsupportedError, match="rows of 16385 experts: a row program holds up to 16384 in registers"):
        configuration(mo.Router(num_experts=16385, top_k=3))
    with pytest.raises(UnsupportedError, match="1 lanes cannot hold a row of 128 experts"):
        configuration(mo.Router(num_experts=128, top_k=3), "forward,specialize{lanes=1}")
    assert configuration(mo.Router(num_experts=32, top_k=3), "forward,specialize{lanes=1}")
    with pytest.raises(UnsupportedError, match="1 lanes cannot hold a row of 33 experts"):
        configuration(mo.Router(num_experts=33, top_k=3), "forward,specialize{lanes=1}")
    for lanes in (3, -2, 2048):
        with pytest.raises(UsageError, match=f"lanes must be a power of two, at most 1024, found {lanes}"):
            configuration(mo.Router(num_experts=12, top_k=3), f"forward,specialize{{lanes={lanes}}}")
    for alignment in ("3", "16,0", "32"):
        with pytest.raises(
            UsageError, match=f"alignment must be of 1, 2, 4, 8, 16 bytes, found {alignment[-2:].lstrip(',')}"
        ):
            configuration(mo.Router(num_experts=12, top_k=3), f"forward,specialize{{alignment={alignment}}}")
    with pytest.raises(UnsupportedError, match="64 lanes cannot hold a row of 4096 experts"):
        configuration(mo.Router(num_experts=4096, top_k=3), "forward,specialize{lanes=64}")
    with pytest.raises(UsageError, match="64 lanes that share a token are a whole block, not 128 threads"):
        configuration(mo.Router(num_experts=512, top_k=3), "forward,specialize{lanes=64 threads=128}")
    for lanes, way in ((64, "merge"), (16, "radix")):
        with pytest.raises(UsageError, match=f"select={way} does not work over {lanes} lanes"):
            configuration(mo.Router(num_experts=512, top_k=3), f"forward,specialize{{lanes={lanes} select={way}}}")


@pytest.mark.parametrize(
    ("experts", "picks", "dtype", "lanes", "vec", "select"),
    [
        (512, 10, "bf16", 16, 8, "merge"),
        (896, 16, "bf16", 32, 4, "merge"),
        (896, 16, "f32", 32, 4, "radix"),
        (512, 16, "f32", 16, 4, "merge"),
        (512, 17, "bf16", 32, 8, "radix"),
        (256, 17, "bf16", 8, 8, "rounds"),
        (256, 17, "f32", 32, 4, "radix"),
        (256, 64, "bf16", 32, 8, "radix"),
        (128, 64, "bf16", 8, 8, "sort"),
        (1025, 2, "bf16", 64, 1, "rounds"),
        (2304, 36, "bf16", 128, 2, "radix"),
        (4096, 36, "f32", 256, 4, "radix"),
        (4096, 2049, "f32", 256, 4, "sort"),
        (16384, 36, "bf16", 512, 8, "radix"),
    ],
)
def test_specialize_spreads_long_rows_and_many_picks(experts, picks, dtype, lanes, vec, select):
    [rows] = configuration(mo.Router(num_experts=experts, top_k=picks, outputs=("weights",)), dtype=dtype)
    assert (rows["lanes"], rows["vec"], rows["select"]) == (str(lanes), str(vec), select)


@pytest.mark.parametrize(
    ("experts", "options", "dtype", "forward", "backward"),
    [
        (64, {}, "bf16", (256, False), ("on", "8")),
        (512, {}, "bf16", (512, False), ("on", "5")),
        (512, {}, "f32", (128, True), ("on", "1")),
        (400, {}, "bf16", (512, False), ("on", "1")),  # dead slots: the bound would spill
        (512, {"score": "sigmoid"}, "bf16", (512, False), ("on", "5")),
        (512, {"score": "sqrtsoftplus"}, "bf16", (512, False), ("on", "1")),  # and so it would here
        (512, {"groups": 8, "groups_kept": 4}, "bf16", (128, True), ("on", "5")),
    ],
)
def test_rows_that_losses_are_of(experts, options, dtype, forward, backward):
    """Sums over tokens are in registers where these are there; a gradient of sums has a bound on them where it fits."""
    losses = {"balance": mo.LoadBalance()}
    router = mo.Router(experts, 8, outputs=("weights", "indices"), losses=losses, **options)
    rows, _, gradient = configuration(router, "default", dtype)
    assert (int(rows["threads"]), rows.get("sums") == "shared") == forward
    assert (gradient["prefetch"], gradient["resident"]) == backward
    assert (rows.get("rounds") == "warps") == (experts > 64 and not options.get("groups"))
    assert "rounds" not in gradient


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("experts", "options", "outputs", "blocks"),
    [
        (64, {}, COMPACT, 8),
        (128, {}, COMPACT, 1),
        (256, {"losses": {"balance": mo.LoadBalance(), "z": mo.ZLoss()}}, COMPACT, 5),
        (512, {}, DENSE, 4),
        (512, {"logit_cap": 30.0}, COMPACT, 4),
        (512, {"logit_cap": 30.0}, DENSE, 1),
        (512, {"gate_bias": True}, COMPACT, 1),  # whose gradient is summed, too
        (64, {"score": "sigmoid", "selection_bias": True}, COMPACT, 7),
        (128, {"score": "sigmoid"}, COMPACT, 5),
        (256, {"score": "sigmoid"}, DENSE, 4),
        (256, {"score": "sigmoid", "logit_cap": 30.0}, COMPACT, 1),
        (256, {"score": "sqrtsoftplus"}, COMPACT, 1),
        (2304, {}, DENSE, 7),
        (2304, {"score": "sigmoid"}, COMPACT, 7),
        (4096, {}, DENSE, 3),
        (3000, {}, COMPACT, 1),
        (2304, {"gate_bias": True}, DENSE, 1),
    ],
)
def test_bounds_of_gradients_of_losses_do_not_spill(experts, options, outputs, blocks):
    given = {"losses": {"balance": mo.LoadBalance()}, **options}
    router = mo.Router(experts, 8, renormalize=True, outputs=outputs, dtype="bf16", **given)
    _, _, gradient, *_ = configuration(router, "default", "bf16")
    assert gradient["resident"] == str(blocks)
    compiled = mo.compile(router, target="sm_90a", passes="specialize{tokens=many}")
    assert not compiled.resources["route_backward_rows"].uses_local_memory


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("experts", "options", "dtype", "resident"),
    [
        (256, {"score": "sigmoid", "selection_bias": True, "groups": 8, "groups_kept": 4}, "bf16", 4),
        (256, {"score": "sigmoid", "selection_bias": True}, "bf16", 4),
        (256, {"gate_bias": True}, "f32", 4),
        (512, {}, "f32", 4),
        (2304, {}, "bf16", 8),
        (2304, {"score": "sigmoid", "selection_bias": True}, "bf16", 1),
        (256, {"top_k": 16, "score": "sigmoid", "groups": 8, "groups_kept": 4, "outputs": DENSE}, "bf16", 1),
    ],
)
def test_sums_in_shared_memory_leave_registers(experts, options, dtype, resident):
    """They come ahead of what finds picks, with the row sum that they divide by."""
    losses = {"balance": mo.LoadBalance()}
    given = {"top_k": 8, "outputs": COMPACT, **options}
    router = mo.Router(experts, renormalize=True, losses=losses, dtype=dtype, **given)
    rows, *_ = configuration(router, "forward", dtype)
    assert (rows["sums"], rows["resident"]) == ("shared", str(resident))
    [kernel, *_] = program_of(router.module(dtype)).executable("training", "sm_90a", ()).kernels
    assert kernel.source.index("score_sums.update(") < kernel.source.index("moesaic::top_k")
    compiled = mo.compile(router, target="sm_90a", passes="specialize{tokens=many}")
    assert not compiled.resources["route_rows"].uses_local_memory


@pytest.mark.parametrize(
    ("options", "dtype", "shared"),
    [
        ({"selection_bias": True}, "bf16", True),
        ({"selection_bias": True, "outputs": DENSE}, "bf16", False),  # registers are not what it lacks
        ({"gate_bias": True}, "f32", True),
        ({"gate_bias": True, "groups": 8, "groups_kept": 4}, "bf16", True),
        ({"selection_bias": True, "losses": {"balance": mo.LoadBalance()}}, "bf16", False),  # where its sums are
    ],
)
def test_where_rows_of_all_tokens_lie(options, dtype, shared):
    router = mo.Router(256, 8, **{"score": "sigmoid", "outputs": COMPACT, **options})
    for tokens, expected in (("many", shared), ("few", False)):
        [rows, *_] = configuration(router, f"forward,specialize{{tokens={tokens}}}", dtype)
        assert (rows.get("vectors") == "shared") == expected
        [kernel, *_] = program_of(router.module(dtype)).executable("training", "sm_90a", (), tokens=tokens).kernels
        assert ("bias.at(lane, i)" in kernel.source) == expected


@pytest.mark.parametrize(
    ("experts", "options", "tokens", "late"),
    [
        (256, {"outputs": ("probs", "map")}, "few", True),
        (256, {"outputs": ("probs", "map")}, "many", False),
        (256, {"outputs": ("probs", "map")}, "fewest", False),
        (256, {}, "few", False),
        (128, {"outputs": ("probs", "map")}, "few", False),
        (512, {"outputs": ("probs", "map")}, "few", False),
        (256, {"groups": 8, "groups_kept": 4}, "few", True),
        (256, {"groups": 8, "groups_kept": 4}, "many", True),
    ],
)
def test_when_the_next_launch_begins(experts, options, tokens, late):
    """Late where blocks of launches that overlap share out badly: the kernel says so behind its loop over tokens."""
    router = mo.Router(experts, 8, **{"outputs": ("weights", "indices"), **options})
    [rows, *_] = program_of(router.module("bf16")).executable("forward", "sm_90a", (), tokens=tokens).kernels
    before, after = rows.source.split("moesaic::let_next_kernel_begin();")
    assert "moesaic::after_kernels_before();" in before
    assert ("for (long long first" in before, "for (long long first" in after) == (late, not late)


def test_options_of_specialize():
    router = mo.Router(num_experts=64, top_k=3, selection_bias=True)
    options = "forward,specialize{target=sm_80 lanes=8 threads=64 select=rounds alignment=2,4}"
    [rows, _] = configuration(router, options)
    wanted = {"target": "sm_80", "lanes": "8", "threads": "64", "select": "rounds", "alignment": "2,4"}
    assert {n: rows[n] for n in wanted} == wanted
    [rows, _] = configuration(router, "forward,specialize{alignment=2}")
    assert rows["alignment"] == "2,16", "an input without an entry has 16"
    assert Specialize() == PassManager("specialize").passes[0]
