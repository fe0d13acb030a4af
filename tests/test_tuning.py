"""Tables of what was tuned, what calls make of them, and a whole search on the emulator."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tuning_search import KEY

import moesaic as mo
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError, InputTypeError, ToolchainError
from moesaic.ir.ops.launch import Kernel
from moesaic.ir.types import DType
from moesaic.passes.kernel_key import KernelKey
from moesaic.runtime import token_buckets
from moesaic.runtime.execute import RUNNERS, Grid, Loaded, Runner, Value
from moesaic.runtime.measure import draw_inputs
from moesaic.runtime.program import Program, program_of
from moesaic.runtime.tuning.autotune import Session, active, autotune
from moesaic.runtime.tuning.bench import Recording
from moesaic.runtime.tuning.compilers import Compilers, workers_allowed
from moesaic.runtime.tuning.lookup import tunables
from moesaic.runtime.tuning.report import Report
from moesaic.runtime.tuning.tables import CardName, Entry, Table, Tables
from moesaic.runtime.tuning.tuner import Settings, Tuned, Watch

CARD = CardName("sm_90a", 132, "NVIDIA H100 80GB HBM3")
ENTRY = Entry({"lanes": "2", "threads": "64"}, 8.0, 10.0, 4096, 20, 300)
ROUTER = mo.Router(12, 3, renormalize=True)
TUNED = mo.Router(5, 2, renormalize=True, name="tuned", outputs=("weights", "indices"))


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(CARD, tmp_path / "user.json", tmp_path / "shipped.json")


# Tables ---------------------------------------------------------------------------------------------------------------


def test_a_table_is_readable_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    table = Table.load(path, CARD)
    assert not table.entries
    other = replace(KEY, tokens=">16384")
    table.add({KEY: ENTRY}, {"nvrtc": "13.0"})
    Table.load(path, CARD).add({other: replace(ENTRY, us=7.0)})
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    assert content["environment"]["device"] == CARD.device and content["schema"] == 1
    assert sum('"template": "row_program"' in line for line in text.splitlines()) == 2, "a line for each entry"
    found = Table.load(path, CARD)
    assert found.entries == {KEY: ENTRY, other: replace(ENTRY, us=7.0)}
    assert text == found.text() and CARD.stem == "sm_90a-132-nvidia-h100-80gb-hbm3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["environment"].update(sms=114), "is for target sm_90a, sms 114"),
        (
            lambda c: c["environment"].update(device="NVIDIA A100"),
            "device NVIDIA A100, schema 1; this is",
        ),
        (lambda c: c.update(schema=99), "schema 99"),
        (lambda c: c.pop("entries"), "is damaged"),
        (lambda c: c["entries"][0].pop("experts"), "experts must be int, found None"),
        (lambda c: c["entries"][0].update(point=["lanes"]), "point must map names to text"),
    ],
)
def test_foreign_tables_are_refused(change: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "user.json"
    Table(path, CARD).add({KEY: ENTRY})
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="tuned table") as refused:
        Table.load(path, CARD)
    assert said in str(refused.value) and "tune again" in str(refused.value)
    with caplog.at_level(logging.WARNING, logger="moesaic.tuner"):
        tables = Tables(CARD, path, tmp_path / "none.json")
        assert tables.find(KEY) is None and said in caplog.text
        other = replace(KEY, experts=9)
        tables.add({other: ENTRY})  # which puts the file aside
    assert Table.load(path, CARD).entries == {other: ENTRY}
    assert len([p for p in tmp_path.iterdir() if ".refused-" in p.name]) == 1


def test_many_processes_write_one_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    code = """
import sys
from dataclasses import replace
from pathlib import Path
from moesaic.passes.kernel_key import KernelKey
from moesaic.runtime.tuning.tables import CardName, Entry, Table
key = KernelKey("row_program", 1, 8, 2, 0, 0, "a -> b", "16", "<=4096", "")
for n in range(12):
    table = Table(Path(sys.argv[1]), CardName("sm_90a", 132))
    table.add({replace(key, experts=n, picks=int(sys.argv[2])): Entry({}, 1.0, 1.0, 1, 1, 1)})
"""
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    assert [p.wait() for p in started] == [0, 0, 0]
    assert len(Table.load(path, CardName("sm_90a", 132)).entries) == 36
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_user_s_table_comes_before_the_shipped_one(tmp_path: Path) -> None:
    shipped = Table(tmp_path / "shipped.json", CardName("sm_90a", 132))
    other = replace(KEY, experts=9)
    shipped.add({KEY: ENTRY, other: ENTRY})
    Table(tmp_path / "user.json", CARD).add({KEY: replace(ENTRY, us=1.0)})
    tables = Tables(CARD, tmp_path / "user.json", tmp_path / "shipped.json")
    found = [tables.find(k) for k in (KEY, other, replace(KEY, tokens=">16384"))]
    assert found == [replace(ENTRY, us=1.0), ENTRY, None]


def test_no_table_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))
    Tables(CARD).add({KEY: ENTRY})
    assert Tables(CARD).find(KEY) == ENTRY and [p.name for p in tmp_path.iterdir()] == ["tuned"]
    monkeypatch.setenv("MOESAIC_DISABLE_CACHE", "1")
    tables = Tables(CARD)
    assert tables.find(KEY) is None
    other = replace(KEY, experts=9)
    tables.add({other: ENTRY})
    assert tables.find(other) == ENTRY
    monkeypatch.delenv("MOESAIC_DISABLE_CACHE")
    assert Tables(CARD).find(other) is None


def test_a_table_that_cannot_be_written(tables: Tables, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables.user.path = tables.user_path = tmp_path / "user.json" / "below-a-file.json"
    (tmp_path / "user.json").write_text("", encoding="utf-8")
    tables.add({KEY: ENTRY})
    assert tables.find(KEY) == ENTRY and "for this process only" in caplog.text


# Calls ----------------------------------------------------------------------------------------------------------------


class Nothing(Loaded):
    """A kernel that does nothing."""

    most_blocks = 4

    def launch(self, grid: Grid, stream: int, values: Sequence[Value], tensors: Any, read: frozenset[int]) -> None:
        pass


class Counting(Runner):
    """Counts what it compiles; nothing is computed."""

    def __init__(self, tables: Tables | None = None) -> None:
        super().__init__()
        self.tables = tables
        self.loaded: list[GeneratedKernel] = []

    def target(self, device: torch.device) -> Target:
        return Target.parse("sm_90a")

    def again(self, target: str) -> str:
        return "again"

    def load(self, kernel: GeneratedKernel, device: torch.device) -> Loaded:
        self.loaded.append(kernel)
        return Nothing()

    def call(self, program: Program, tokens: int) -> list[GeneratedKernel]:
        """What a call compiles."""
        before = len(self.loaded)
        self.run(program, "forward", (), [torch.zeros(tokens, 12, dtype=torch.bfloat16)])
        return self.loaded[before:]


def keys_of(program: Program, bucket: int) -> dict[str, KernelKey]:
    """The keys of a program's kernels of inference in a bucket of T."""
    specialize = program.specialize("sm_90a", (8,), program.rule("forward", (), "sm_90a", bucket))
    label = token_buckets.label(bucket, Runner.few_tokens)
    found = tunables(program.planned("forward"), specialize, Target.parse("sm_90a"), (8,), label)
    return {t.space.op.symbol: t.key for t in found}


def lanes(kernels: Sequence[GeneratedKernel]) -> str:
    [text] = [k.source for k in kernels if k.symbol == "route_rows"]
    return text.partition("lanes=")[2].partition(" ")[0].partition(",")[0]


TOKENS = [*range(1, 65), 100, 1000, 4097]


def test_case_60_compiles_are_bounded(tables: Tables) -> None:
    """However T changes: two sets of kernels by the rule, and one launch for the fewest tokens where there are sums; a
    set a bucket where each is tuned otherwise."""
    program = program_of(ROUTER.module("bf16"))
    order = [int(n) for n in torch.tensor(TOKENS)[torch.randperm(len(TOKENS), generator=torch.manual_seed(3))]]
    plain = Counting()
    per_call = [len(plain.call(program, tokens)) for tokens in order]
    assert sum(per_call) == 2 * 2 + 1 and [plain.call(program, tokens) for tokens in order] == [[]] * len(order)
    without_sums = program_of(replace(ROUTER, outputs=("weights", "indices")).module("bf16"))
    assert sum(len(plain.call(without_sums, tokens)) for tokens in order) == 2
    for bucket, threads in enumerate(("32", "64", "128", "256")):
        point = {"lanes": "2", "select": "merge", "listed": "2", "threads": threads, "prefetch": "off", "resident": "1"}
        tables.user.entries[keys_of(program, bucket)["route_rows"]] = replace(ENTRY, point=point)
    tuned = Counting(tables)
    assert 0 < sum(len(tuned.call(program, t)) for t in [*order, 20000]) <= 7
    assert sum(len(tuned.call(program, t)) for t in [*order, 20000, 30000]) == 0
    assert {lanes([k]) for k in tuned.loaded if k.symbol == "route_rows"} == {"2"}


def test_lookups_are_made_once_a_bucket(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call of a bucket, a call costs no look into a table."""
    looked: list[KernelKey] = []
    find = tables.find
    monkeypatch.setattr(tables, "find", lambda key: looked.append(key) or find(key))
    program, runner = program_of(ROUTER.module("bf16")), Counting(tables)
    for tokens in (5, 4000):
        runner.call(program, tokens)
    assert len(looked) == 2
    for tokens in (5, 6, 7, 4000, 300):
        runner.call(program, tokens)
    assert len(looked) == 2


def test_case_63_a_table_is_silent_about_other_tokens(tables: Tables) -> None:
    """An entry for few tokens changes nothing for many."""
    program = program_of(ROUTER.module("bf16"))
    by_rule = {tokens: lanes(Counting().call(program, tokens)) for tokens in (8, 4096, 20000)}
    point = {"lanes": "1", "select": "merge", "listed": "4", "threads": "64", "prefetch": "off", "resident": "1"}
    tables.user.entries[keys_of(program, 0)["route_rows"]] = replace(ENTRY, point=point)
    found = {tokens: lanes(Counting(tables).call(program, tokens)) for tokens in by_rule}
    assert found[8] == "1" != by_rule[8]
    assert (found[4096], found[20000]) == (by_rule[4096], by_rule[20000])


def test_what_was_tuned_can_be_read(tables: Tables) -> None:
    program = program_of(ROUTER.module("bf16"))
    runner, device = Counting(tables), torch.device("cpu")
    assert runner.tuned(program, device) == {}
    point = {"lanes": "2", "select": "merge", "listed": "2", "threads": "64", "prefetch": "off", "resident": "1"}
    tables.user.entries[keys_of(program, 2)["route_rows"]] = replace(ENTRY, point=point)
    same = {"route_rows": point}
    assert runner.tuned(program, device) == {"<=16384": {"forward": same, "training": same}}
    # A dense router keeps its picks for backward: its inference is another kernel of that name.
    dense = program_of(replace(ROUTER, outputs=("probs", "map")).module("bf16"))
    tables.user.entries[keys_of(dense, 1)["route_rows"]] = replace(ENTRY, point=point)
    assert runner.tuned(dense, device) == {"<=4096": {"forward": same}}
    if not torch.cuda.is_available():
        assert mo.compile(ROUTER).tuned == {}


def test_what_a_user_or_the_environment_decides(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    point = {"lanes": "1", "select": "merge", "listed": "4", "threads": "64", "prefetch": "off", "resident": "1"}
    program = program_of(ROUTER.module("bf16"))
    tables.user.entries[keys_of(program, 0)["route_rows"]] = replace(ENTRY, point=point)
    assert lanes(Counting(tables).call(program, 8)) == "1"
    assert lanes(Counting(tables).call(program_of(ROUTER.module("bf16"), "specialize{lanes=2}"), 8)) == "2"
    monkeypatch.setenv("MOESAIC_AUTOTUNE", "off")
    assert lanes(Counting(tables).call(program, 8)) == lanes(Counting().call(program, 8)) != "1"


def test_a_point_that_is_not_valid_any_more(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(ROUTER.module("bf16"))
    tables.user.entries[keys_of(program, 0)["route_rows"]] = replace(ENTRY, point={"lanes": "3"})
    assert lanes(Counting(tables).call(program, 8)) == lanes(Counting().call(program, 8))
    assert "is not used: specialize: lanes must be a power of two" in caplog.text


def test_case_62_the_gate_product_is_no_slow_float32_product() -> None:
    """Operands of 16 bits go to tensor cores, and what comes out are float32 logits."""
    layer = mo.MoE(mo.Router(128, 8, renormalize=True), mo.Experts(128, 4096, 64), outputs=("hidden", "logits"))
    for target, tile in (("sm_90a", "WgmmaTile"), ("sm_80", "MmaTile")):
        executable = program_of(layer.module(DType.BF16)).executable("forward", target, ())
        gates = [
            op
            for op in executable.module.entry.body.ops
            if isinstance(op, Kernel) and op.template == "product" and op.written[0].type.shape[-1] == 128
        ]
        [gate] = gates
        assert gate.configuration["tile"] == tile and gate.written[0].type.dtype is DType.F32


@pytest.mark.gpu
def test_case_62_logits_of_the_gate_product() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(8192, 4096, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(128, 4096, device="cuda", generator=generator) / 64).bfloat16()
    declared = mo.MoE(
        mo.Router(128, 8, renormalize=True), mo.Experts(128, 4096, 64), outputs=("logits", "indices"), dtype="bf16"
    )
    up = torch.zeros(128, 128, 4096, device="cuda", dtype=torch.bfloat16)
    down = torch.zeros(128, 4096, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = mo.compile(declared)(x, w, up, down)
        expected = x.double() @ w.double().T
    assert float((found.logits.double() - expected).abs().max()) < 1e-4
    sets = [i.long().sort(-1).values for i in (found.indices, expected.topk(8).indices)]
    assert float((sets[0] == sets[1]).all(-1).double().mean()) >= 0.999


# A search on the emulator ---------------------------------------------------------------------------------------------


class Replay:
    """A timer by a false clock: what ran last is fastest."""

    calls, replay_ms = 1, 1.0

    def __init__(self, us: float) -> None:
        self.us = us

    def burst(self, ms: float) -> list[float]:
        return [self.us] * 3


class Seen(Watch):
    def __init__(self) -> None:
        self.made = 0
        self.tuned: list[Tuned] = []

    def timers(self, call: Any, sets: int) -> Replay:
        for number in range(sets):
            call(number)
        self.made += 1
        return Replay(100.0 - self.made)

    def end(self, tuned: Tuned) -> None:
        self.tuned.append(tuned)


@pytest.fixture
def emulated(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    runner = RUNNERS["emulate"]
    monkeypatch.setattr(runner, "tables", tables)
    yield runner
    for program in {k[0] for k in runner._prepared}:
        runner.prepare_again(program_of_key(program))


def program_of_key(key: str) -> Program:
    from moesaic.runtime.program import program_by_key

    return program_by_key(key)


@pytest.mark.emulate
def test_autotune(emulated: Runner, tables: Tables) -> None:
    """Tunes forward and backward on tensors of its own, and the layer runs what was found, with equal results."""
    seen = Seen()
    layer = mo.compile(TUNED, backend="emulate")
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = layer(logits)
    settings = {"trials": 2, "workers": 1, "watch": seen, "timers": seen.timers}
    report = autotune(layer, tokens=9, budget=500.0, dtype="bf16", device="cpu", **settings)
    assert [(t.kernel, t.kind) for t in seen.tuned] == [
        ("tuned_rows", "forward"),
        ("tuned_rows", "training"),
        ("tuned_backward_rows", "backward"),
    ]
    assert [t.found is not None for t in report.tuned] == [True, False, True]  # inference and training run one kernel
    assert all(t.entry.trials == 2 and t.entry.us < t.entry.default_us for t in report.tuned)
    assert len(Table.load(tables.user_path, CARD).entries) == 2
    [first, *_] = [k for k, p in emulated._prepared.items() if k[0] == layer._handles[torch.bfloat16]]
    assert emulated.session is None and first is not None
    again = layer(logits)
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    ran = emulated._prepared[next(k for k in emulated._prepared if k[0] == layer._handles[torch.bfloat16])]
    chosen = report.tuned[0].entry.point
    assert f"threads={chosen['threads']}" in ran.executable.kernels[0].source
    made = seen.made
    known = autotune(layer, tokens=9, budget=500.0, dtype="bf16", device="cpu", **settings)
    assert seen.made == made and [t.found for t in known.tuned] == [None] * 3
    key = report.tuned[0].key  # a search that had too little time goes on
    tables.user.entries[key] = replace(tables.user.entries[key], complete=False)
    with torch.no_grad(), mo.autotuning(budget=500, **settings) as more:
        layer(logits)
    assert seen.made > made and more.tuned[0].found is not None and tables.user.entries[key].complete


@pytest.mark.emulate
def test_candidates_are_held_against_the_rule(emulated: Runner) -> None:
    """Tiles of other sizes and schedules give the same bits; a kernel that does something else is found out."""
    program = program_of(mo.Experts(3, 64, 40, gated=False, dtype="bf16", name="held").module(
        DType.BF16, 2, DType.I32, DType.F32
    ))  # fmt: skip
    given = draw_inputs(program.function, 40, device="cpu")
    inputs = [given[a.name] for a in program.function.arguments]
    executable = program.executable("forward", "sm_90a", tuple(16 for _ in inputs))
    recording = Recording(executable, [inputs], emulated, torch.device("cpu"))
    names = [op.symbol for op in recording.ops]
    bench = recording.bench(names.index("held_up_proj"), Seen().timers)
    aligned = tuple(16 for _ in inputs)

    def kernel(point: str) -> GeneratedKernel:
        found = program.executable("forward", "sm_90a", aligned, points=(f"held_up_proj:{point}",) if point else ())
        return next(k for k in found.kernels if k.symbol == "held_up_proj")

    assert bench.check(kernel("")) == ""
    assert "tile=WgmmaTile" not in kernel("").source
    assert bench.check(kernel("rows=64:columns=64:stages=3:threads=128:blocks=1")) == ""
    broken = kernel("stages=3")
    changed = broken.source.replace("tile.clear();", "tile.clear(); tile.values[0][0][0][0] = 1.0f;")
    assert changed != broken.source
    assert "differs in" in bench.check(replace(broken, source=changed))


@pytest.mark.emulate
def test_autotuning(emulated: Runner, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    layer = mo.compile(TUNED, backend="emulate")
    logits = torch.randn(9, 5).bfloat16()
    with mo.autotuning(budget=500, trials=2, workers=1, watch=seen, timers=seen.timers) as report:
        layer(logits)
        layer(logits)
        with pytest.raises(InputError, match="active already"), mo.autotuning():
            pass
    assert len(report) == 1 and emulated.session is None
    # Nothing is begun without time, and other layers run as ever.
    session = Session(Settings(seconds=1e-9, timers=seen.timers))
    with active(session):
        layer(logits)
    assert not len(session.report)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["router", "experts"])
def test_on_a_gpu(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results stay what they were, bit by bit, forward and backward, and calls run what was found, captured or not."""
    runner = RUNNERS["cuda"]
    known = runner.tables_of(torch.device("cuda"))
    assert known is not None
    tables = Tables(known.card, tmp_path / "user.json", tmp_path / "none.json")
    monkeypatch.setattr(runner, "tables", tables)
    device = torch.device("cuda", torch.cuda.current_device())
    if what == "router":
        layer: Any = mo.compile(mo.Router(64, 6, renormalize=True, dtype="bf16", name="tuned_on_gpu"))
    else:
        layer = mo.compile(mo.Experts(9, 256, 136, dtype="bf16", name="tuned_on_gpu")).layer(2)
    given = draw_inputs(layer._program().function, 700)
    first = next(iter(given))

    def run() -> list[torch.Tensor]:
        leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in given.items()}
        result = layer(leaves[first], **{n: t for n, t in leaves.items() if n != first})
        floats = [r for r in result if r.requires_grad]
        wanted = [t for t in leaves.values() if t.requires_grad]
        cotangents = [torch.linspace(-1, 1, r.numel(), device=device).view_as(r).to(r.dtype) for r in floats]
        return [*result, *torch.autograd.grad(floats, wanted, cotangents)]

    before = run()
    report = autotune(layer, tokens=700, budget=120.0, trials=6)
    assert report.tuned and all(t.entry.us <= t.entry.default_us for t in report.tuned)
    assert not [t for r in report.tuned if r.found for t in r.found.trials if t.verdict.startswith(("wrong", "failed"))]
    assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))
    assert all(t.found is None for t in autotune(layer, tokens=700, trials=6).tuned)
    layer.warmup(device)
    static = {n: t.clone() for n, t in given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(static[first], **{n: t for n, t in static.items() if n != first})
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, captured, strict=False))


def test_a_layer_that_tunes_itself() -> None:
    """Its programs are marked, however it came here; a copy does the same."""
    experts = mo.Experts(3, 64, 40, dtype="bf16")
    for declared in (ROUTER, experts, mo.MoE(mo.Router(3, 2), experts)):
        layer: Any = mo.compile(declared, tune=True)
        for one in (layer, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert one._tune and not mo.compile(declared)._tune
    router = mo.compile(mo.Router(13, 3), tune=True)
    marked = RUNNERS["cuda"].tuned_first
    assert {*router._handles.values(), *router._masked_handles.values()} <= marked
    assert mo.compile(mo.Router(14, 3))._handles[torch.bfloat16] not in marked


@pytest.mark.gpu
def test_first_calls_that_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RUNNERS["cuda"]
    known = runner.tables_of(torch.device("cuda"))
    assert known is not None
    tables = Tables(known.card, tmp_path / "user.json", tmp_path / "none.json")
    monkeypatch.setattr(runner, "tables", tables)
    monkeypatch.setenv("MOESAIC_AUTOTUNE_BUDGET", "5")
    logits = torch.randn(300, 24, device="cuda").bfloat16()
    mo.compile(mo.Router(24, 3, name="tunes_itself"), tune=True)(logits)
    assert len(tables.user.entries) == 1
    mo.compile(mo.Router(24, 3, name="told_by_nobody", outputs=("indices",)))(logits)
    assert len(tables.user.entries) == 1
    monkeypatch.setenv("MOESAIC_AUTOTUNE", "1")
    mo.compile(mo.Router(24, 3, name="told_by_the_environment", outputs=("weights",)))(logits)
    assert len(tables.user.entries) == 2


def test_what_autotune_refuses() -> None:
    with pytest.raises(InputTypeError, match="found int"):
        autotune(3)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ToolchainError, match="torch can see none"):
            autotune(mo.Router(4, 2))
    with pytest.raises(InputError, match="tokens must be"):
        autotune(mo.Router(4, 2), tokens=0, device="cpu")


@pytest.mark.nvrtc
def test_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes compile what this one then finds; one that dies is replaced."""
    program = program_of(ROUTER.module("bf16"))
    kernels = [
        program.executable("forward", "sm_90a", (), points=(f"route_rows:threads={n}",)).kernels[0] for n in (64, 128)
    ]
    kernels.append(GeneratedKernel("bad", "this is no CUDA", (), 1, 1, "fixed"))
    with Compilers(Target.parse("sm_90a"), 2) as compilers:
        *made, bad = compilers.compile(kernels)
        assert isinstance(bad, str) and "rejected kernel 'bad'" in bad
        compilers._started[0]._process.kill()
        compilers._started[0]._process.wait()
        again = [compilers.compile(kernels[:2]) for _ in range(2)]
        assert again[1] == made
    with Compilers(Target.parse("sm_90a"), 1) as here:
        assert here.compile(kernels[:2]) == made and made[0] != made[1]
    monkeypatch.setenv("MOESAIC_TUNE_WORKERS", "3")
    assert (workers_allowed(), workers_allowed(5)) == (3, 5)


# Reports --------------------------------------------------------------------------------------------------------------


def report_of(*experts: int) -> Report:
    """Two kernels a number of experts, of which one does not know how many there are."""
    report = Report()
    for e in experts:
        for kernel, us in (("route_rows", 1.0), ("route_tail", 0.5)):
            key = replace(KEY, experts=e if kernel == "route_rows" else 1)
            entry = replace(ENTRY, us=us * e, default_us=2 * us * e)
            report.add([Tuned(kernel, "forward", key, e, entry, us * e / 2, {"lanes": "1", "threads": "64"}, None)])
    return report


def test_reports(tmp_path: Path) -> None:
    report = report_of(8, 64, 256)
    report.add(report.tuned)
    assert len(report) == 6 and report.kinds == ["forward"]
    lines = report.table().splitlines()
    assert " ".join(lines[1].split()) == "route_rows forward 8 4096 4.00 16.00 8.00 50.0 % known lanes=2"
    assert json.loads(json.dumps(report.rows()))[0]["experts"] == 8
    only_rows = Report([t for t in report.tuned if t.kernel == "route_rows"])
    for found, part in ((report, 1.5), (only_rows, 1.0)):
        assert [(t.experts, t.floor, t.default, t.tuned) for t in found.times("forward")] == [
            (e, part * e / 2, part * 2.0 * e, part * e) for e in (8, 64, 256)
        ]
    plot = only_rows.plot()
    assert all(word in plot for word in ("forward, T = 4096", "512 us", "4 us", "* tuned", "8", "256"))
    assert plot.count("*") == 4 and plot.count("o ") >= 1
    path = tmp_path / "plot.svg"
    only_rows.save(path)
    root = xml.parse(path).getroot()
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 and all(len(line.attrib["points"].split()) == 3 for line in lines)
    heights = [[float(p.split(",")[1]) for p in line.attrib["points"].split()] for line in lines]
    assert all(f > t and d < t for f, d, t in zip(*heights, strict=True)), "floor below tuned below default"
    with pytest.raises(InputError, match=r"\.svg or \.png"):
        only_rows.save(tmp_path / "plot.gif")
    assert Report().table() == "nothing was tuned" and Report().plot() == ""


def test_buckets() -> None:
    few = 4096
    assert [token_buckets.number_of(t, few) for t in (0, 256, 257, 4096, 4097, 16384, 16385)] == [0, 0, 1, 1, 2, 2, 3]
    assert [token_buckets.label(n, few) for n in range(token_buckets.COUNT)] == ["<=256", "<=4096", "<=16384", ">16384"]
    assert [token_buckets.rule(n) for n in range(token_buckets.COUNT)] == ["fewest", "few", "many", "many"]
    assert token_buckets.in_range(1024, 65536, few) == (4096, 16384, 65536)
    assert token_buckets.in_range(100, 200, few) == (200,)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from moesaic.cli import main
    from moesaic.runtime.tuning import autotune as tuning

    example = str(Path(__file__).resolve().parent.parent / "examples" / "qwen3_moe.moe")
    if not torch.cuda.is_available():
        assert main(["tune", example]) == ToolchainError.exit_code
        assert "tune measures a GPU" in capsys.readouterr().err
    for wrong in (["--tokens", "9:3"], ["--budget", "soon"], ["--experts", "8,few"]):
        assert main(["tune", example, *wrong]) == 2
    assert main(["tune", example, "--experts", "4"]) == 1
    assert "k = 8" in capsys.readouterr().err
    asked = []

    def autotune(what: Any, **options: Any) -> Report:
        asked.append((what.entry.arguments[0].type.shape[-1], options["tokens"], options["backward"]))
        assert 0 < options["budget"] <= 60 and options["trials"] == 9 and options["workers"] == 2
        return report_of(asked[-1][0])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "autotune", autotune)
    plot = tmp_path / "plot.svg"
    options = ["--experts", "8,64", "--tokens", "1024:65536", "--budget", "1m", "--trials", "9", "--jobs", "2"]
    assert main(["tune", example, *options, "--forward", "--plot", str(plot)]) == 0
    assert asked == [(8, (4096, 16384, 65536), False), (64, (4096, 16384, 65536), False)]
    out = capsys.readouterr().out
    assert "lanes=2" in out and "forward, T = 4096" in out and plot.read_text().startswith("<svg")
    assert main(["tune", example, *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["kernels"]) == 4
