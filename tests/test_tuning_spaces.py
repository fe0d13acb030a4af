"""The spaces of kernels: that they are data, hold the rule's choice on every target, and nothing that cannot be."""

from __future__ import annotations

import pytest

import moesaic as mo
from moesaic.codegen.generate import generate_kernel
from moesaic.codegen.target import Target, known_targets
from moesaic.ir.core import Module
from moesaic.ir.errors import UsageError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.resize import with_experts
from moesaic.ir.types import DType
from moesaic.passes.card import H100 as CARD
from moesaic.passes.cost import Extents
from moesaic.passes.cost_model import estimated_us, floor_us, ordered
from moesaic.passes.kernel_key import KernelKey, picks_of
from moesaic.passes.manager import parse_pipeline
from moesaic.passes.space import FAMILIES, Space, spaces_of
from moesaic.passes.specialize import Specialize, parse_point, point_text
from moesaic.runtime.program import program_of
from moesaic.runtime.tuning.lookup import Tunable, tunables

H100 = Target.parse("sm_90a")
LAYERS: dict[str, Module] = {
    "mixtral": mo.Router(8, 2, renormalize=True).module("bf16"),
    "groups": mo.Router(256, 8, score="sigmoid", selection_bias=True, groups=8, groups_kept=4).module("bf16"),
    "few": mo.Router(64, 6, renormalize=True).module("bf16"),
    "long": mo.Router(2304, 36, outputs=("probs", "map")).module("fp32"),
    "losses": mo.Router(60, 6, losses={"balance": mo.LoadBalance()}).module("fp16"),
    "experts": mo.Experts(7, 136, 88, dtype="bf16").module(DType.BF16, 2, DType.I32, DType.F32),
    "float32": mo.Experts(3, 40, 24, gated=False, dtype="fp32").module(DType.F32, 2, DType.I32, DType.F32),
    "odd": mo.Experts(3, 37, 21, dtype="bf16").module(DType.BF16, 2, DType.I32, DType.F32),
}


def kernels(layer: str, kind: str) -> list[Kernel]:
    program = program_of(LAYERS[layer])
    function = program.planned(kind, program.float_results if kind == "backward" else ())
    return [op for op in function.body.ops if isinstance(op, Kernel)]


def spaces(layer: str, target: Target = H100, tokens: str = "many") -> list[Space]:
    specialize = Specialize(target=target.name, tokens=tokens)
    found = [s for k in ("training", "backward") for s in spaces_of(kernels(layer, k), specialize, target, {})]
    assert found
    return found


def space(layer: str, symbol: str, target: Target = H100) -> Space:
    return next(s for s in spaces(layer, target) if s.op.symbol == symbol)


def test_a_row_program_in_one_cluster() -> None:
    """What has nothing to do with it cannot be chosen, and nothing that was found for two launches is taken for it."""
    program = program_of(LAYERS["losses"])

    def only(tokens: str) -> Tunable:
        specialize = program.specialize("sm_90a", (), tokens)
        [found] = tunables(program.planned("training"), specialize, H100, (), "<=256")
        return found

    one, two = only("fewest"), only("few")
    assert one.key != two.key and one.key.features.endswith(" kernel.col_finish{partials=2}")
    points = one.space.points()
    assert points[0] == one.space.default and 1 < len(points) < len(two.space.points())
    assert {p["resident"] for p in points} == {"1"} and max(int(p["lanes"]) for p in points) <= 32
    assert {one.space.config(p)["cluster"] for p in points} == {"8"}
    assert "is up to 32" in one.space.problem({**points[0], "lanes": "64"})
    assert "multiprocessors to spare" in one.space.problem({**points[0], "resident": "2"})
    load = Extents(256, 0)
    assert ordered(one.space, points, load, CARD)[0][0] == one.space.default
    assert all(estimated_us(one.space, p, load, CARD) >= floor_us(one.space.op, load, CARD) for p in points)


def test_parameters_are_data() -> None:
    seen = {name: set() for name in FAMILIES}  # type: dict[str, set[str]]
    for layer in LAYERS:
        for target in (H100, Target.parse("sm_80")):
            for one in spaces(layer, target):
                seen[one.op.template] |= one.default.keys()
    for name, family in FAMILIES.items():
        assert family.version >= 1
        names = [p.name for p in family.parameters]
        assert len(set(names)) == len(names) and all(p.meaning and len(set(p.values)) > 1 for p in family.parameters)
        assert not seen[name] or seen[name] == set(names), name
    assert [name for name, found in seen.items() if not found] == ["slot_rows"]  # which a quantity of experts needs


@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_the_rule_is_valid_everywhere(target: Target) -> None:
    for layer in LAYERS:
        for tokens in ("few", "many"):
            for one in spaces(layer, target, tokens):
                assert one.problem(one.default) == "", (layer, one.op.symbol)
                assert one.config(one.default) == one.config({})


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90a"])
def test_points_keep_within_the_target(name: str) -> None:
    target = Target.parse(name)
    for layer in {"sm_80": ("losses",), "sm_86": ("float32",), "sm_90a": ("long", "experts")}[name]:
        for one in spaces(layer, target):
            points = one.points()
            assert points[0] == one.default and len({str(p) for p in points}) == len(points) > 1
            for point in points[1 :: max(1, len(points) // 3)]:
                assert one.problem(point) == ""
                one.specialize.configure(one.op, one.aligned, point)
                kernel = generate_kernel(one.op)
                config = one.op.configuration
                assert {n: config[n] for n in point} == dict(point)
                assert kernel.shared_bytes <= target.shared_optin and kernel.threads <= target.max_threads_per_block
                blocks = int(config.get("blocks", 1))
                assert blocks * kernel.shared_bytes <= target.shared_per_sm or blocks == int(one.default["blocks"])


def test_what_cannot_be_says_why() -> None:
    rows = space("groups", "route_rows")
    for said, changed in {
        "cannot hold a row": {"lanes": "1"},
        "chunks of a row": {"lanes": "64", "threads": "64", "select": "rounds", "listed": ""},
        "does not work over": {"select": "radix", "listed": ""},
        "a multiprocessor does not hold": {"threads": "256", "resident": "12"},
        "leave": {"threads": "256", "resident": "8"},
        "unknown parameters stages": {"stages": "3"},
        "a number stands where": {"lanes": "eight"},
        "the kernel takes threads=": {"threads": "512", "lanes": "8", "select": "sort", "listed": "", "resident": "1"},
    }.items():
        problem = rows.problem({n: v for n, v in {**rows.default, **changed}.items() if v})
        assert said in problem, (said, problem)
    up = space("experts", "experts_gate_up_proj")
    for said, changed in {
        "sums a thread": {"rows": "256", "columns": "128"},
        "shared memory": {"stages": "8"},
        "two warpgroups": {"threads": "128"},
        "none of": {"columns": "32"},
        "unknown parameters tile": {"tile": "MmaTile"},
    }.items():
        assert said in up.problem({**up.default, **changed}), said


def test_sums_after_a_product_keep_their_order() -> None:
    """The partial sums of rows, for the gradients of weights of picks, follow columns and warps."""
    down = space("experts", "experts_backward_down_proj")
    assert {(p["columns"], p["threads"], p["depth"]) for p in down.points()} == {
        (down.default["columns"], down.default["threads"], down.default["depth"])
    }
    assert len({p["stages"] for p in down.points()}) > 1


def test_swapped_operands_are_a_schedule() -> None:
    """Of forward products and of data gradients, where nothing beside the product is read or summed up; of a matrix's
    gradient, where what is gathered is its right operand."""
    found = {}
    products = [one for one in spaces("experts") if one.op.template in ("product", "wgrad")]
    for one in products:
        chosen = [p for p in one.points() if p.get("schedule") == "swapped"]
        found[one.op.symbol] = {(p["rows"], p["columns"], p["stages"]) for p in chosen}
        for point in chosen[-1:]:
            one.specialize.configure(one.op, one.aligned, point)
            kernel = generate_kernel(one.op)
            assert "SwappedTile<" in kernel.source and kernel.shared_bytes <= H100.shared_optin
    two, one_part, matrix = (
        {(rows, columns, stages) for stages in "234"}
        for rows, columns in (("144", "128"), ("144", "256"), ("256", "128"))
    )
    assert {symbol: points for symbol, points in found.items() if points} == {
        "experts_gate_up_proj": two,
        "experts_down_proj": one_part,
        "experts_backward_gate_up_proj": one_part,
        "experts_backward_d_gate_up_proj": matrix,
    }
    swapped = {"schedule": "swapped", "rows": "144"}
    down = space("experts", "experts_backward_down_proj")
    assert "elementwise may follow" in down.problem({**down.default, **swapped, "columns": "128"})
    up = space("experts", "experts_gate_up_proj")
    assert "has 144 rows" in up.problem({**up.default, "schedule": "swapped"})
    assert "columns of all parts" in up.problem({**up.default, **swapped, "columns": "64"})
    assert "shared memory" in up.problem({**up.default, **swapped, "stages": "5"})
    assert up.config({**up.default, **swapped})["tile"] == "SwappedTile"
    up_matrix, down_matrix = (space("experts", f"experts_backward_d_{name}_proj") for name in ("gate_up", "down"))
    assert "has 256 rows" in up_matrix.problem({**up_matrix.default, **swapped})
    assert "is gathered" in down_matrix.problem(
        {**down_matrix.default, "schedule": "swapped", "rows": "256", "columns": "128"}
    )
    # An expert's rows are shared out evenly: around 256 they take no third tile. Of 200, nobody has one.
    module = mo.Experts(128, 2048, 768, dtype="bf16").module(DType.BF16, 8, DType.I32, DType.F32)
    planned = [o for o in program_of(module).planned("forward").body.ops if isinstance(o, Kernel)]
    up = next(s for s in spaces_of(planned, Specialize(), H100, {}) if s.op.symbol == "experts_gate_up_proj")
    gains = []
    for rows in (200, 256):
        load = Extents(16 * rows, 128 * rows, experts=128)
        gains.append(estimated_us(up, up.default, load, CARD) / estimated_us(up, {**up.default, **swapped}, load, CARD))
    assert gains[0] < 1.1 < gains[1]


def test_points_are_pipeline_text() -> None:
    rows = space("groups", "route_rows")
    chosen = next(p for p in rows.points() if p["select"] == "rounds" and p["lanes"] == "16")
    text = f"specialize{{points={point_text('route_rows', chosen)}}}"
    [parsed] = parse_pipeline(text)
    assert str(parsed) == text and isinstance(parsed, Specialize) and parsed.overrides
    program = program_of(LAYERS["groups"])
    executable = program.executable("training", "sm_90a", (), points=(point_text("route_rows", chosen),))
    banner = executable.kernels[0].source
    assert "select=rounds" in banner and "lanes=16" in banner
    assert executable is not program.executable("training", "sm_90a", ())
    for wrong in ("route_rows", ":lanes=8", "route_rows:lanes"):
        with pytest.raises(UsageError, match="written kernel:name=value"):
            parse_point(wrong)
    # What a user decides goes before what was tuned.
    decided = Specialize(lanes=8).config(rows.op, {}, {"lanes": "32", "threads": "64"})
    assert (decided["lanes"], decided["threads"]) == ("8", "64")


def test_keys() -> None:
    def key(layer: str, symbol: str, tokens: str = "<=4096") -> KernelKey:
        program = program_of(LAYERS[layer])
        one = space(layer, symbol)
        kind = "backward" if "backward" in symbol else "training"
        function = program.planned(kind, program.float_results if kind == "backward" else ())
        return KernelKey.of(one, picks_of(function), tokens)

    rows, up, down = (
        key("groups", "route_rows"),
        key("experts", "experts_gate_up_proj"),
        key("odd", "experts_down_proj"),
    )
    assert (rows.experts, rows.picks, rows.alignment) == (256, 8, "16")
    assert (up.experts, up.picks, up.inner, up.outer) == (7, 2, 136, 176)
    assert down.alignment != "16" and (down.inner, down.outer) == (21, 37)
    assert len({rows, up, down, key("groups", "route_rows", ">16384")}) == 4
    for one in (rows, up, down):
        assert KernelKey.parse(one.as_dict()) == one and str(one.experts) in str(one)
    with pytest.raises(ValueError, match="experts must be int, found 'many'"):
        KernelKey.parse({**rows.as_dict(), "experts": "many"})
    # Scores that only differ element by element share what is found; what is ranked in 16 bits, or not, does not.
    scores = {s: mo.Router(64, 6, score=s, renormalize=True).module("bf16") for s in ("sigmoid", "sqrtsoftplus")}
    ranked = mo.Router(64, 6, score="sigmoid", renormalize=True, rank="score").module("bf16")
    found = []
    for module in (*scores.values(), ranked):
        [one] = spaces_of(
            [o for o in program_of(module).planned("forward").body.ops if isinstance(o, Kernel)],
            Specialize(),
            H100,
            {},
        )[:1]
        found.append(KernelKey.of(one, 6, "<=256"))
    assert found[0] == found[1] != found[2]


def test_costs() -> None:
    """Estimates are never below the floor, grow with T, and put the rule first."""
    for layer in ("losses", "odd"):
        for one in spaces(layer):
            points = one.points()
            points = [points[0], *points[1 :: max(1, len(points) // 50)]]
            for tokens in (1024, 65536):
                load = Extents(tokens, 2 * tokens, experts=7)
                floor = floor_us(one.op, load, CARD)
                found = ordered(one, points, load, CARD)
                assert found[0][0] == one.default and len(found) == len(points)
                assert [us for _, us in found[1:]] == sorted(us for _, us in found[1:])
                assert all(us >= 0.95 * floor for _, us in found), one.op.symbol
            few, many = (estimated_us(one, one.default, Extents(t, 2 * t, experts=7), CARD) for t in (16384, 2**20))
            assert many > 8 * few


def test_another_number_of_experts() -> None:
    declared = mo.Router(64, 6, score="sigmoid", selection_bias=True, outputs=("weights", "indices", "counts", "map"))
    assert with_experts(declared.module("bf16"), 96) == mo.Router(
        96, 6, score="sigmoid", selection_bias=True, outputs=("weights", "indices", "counts", "map")
    ).module("bf16")
    with pytest.raises(mo.MoesaicError, match="k = 6"):
        with_experts(declared.module("bf16"), 5)
    with pytest.raises(mo.MoesaicError, match="is no router"):
        with_experts(LAYERS["experts"], 5)
