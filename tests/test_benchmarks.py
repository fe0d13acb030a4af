"""Benchmarks of routers, experts and models without a GPU: floors, checks, and the way of a run, with a false clock."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Benchmarks are scripts: their folder is on the path as it is when one is run."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


class Counting:
    """A timer for which every call takes as many microseconds as there were timers before it, plus one."""

    made = 0

    def __init__(self, call: Callable[[int], Any], sets: int, shared: Any) -> None:
        Counting.made += 1
        self._us = float(Counting.made)
        self.calls = sets
        self.replay_ms = self._us / 1e3
        self.results = [call(i) for i in range(sets)]

    def burst(self, ms: float) -> list[float]:
        return [self._us, self._us]


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Any]:
    """Runs sections of a small case on the emulator; gives the bench."""
    import experts
    from experts_bench import Bench
    from experts_cases import CASES
    from experts_options import parse_arguments
    from timing import Machine

    def run(*arguments: str) -> Any:
        args = parse_arguments([*arguments, "--cases", "mixtral", "--tokens", "37", "--budget", "0"])
        args.cases = [case.small for case in CASES if case.name == "mixtral"]
        Counting.made = 0
        made = Bench(args, Machine(), device="cpu", timers=Counting, shared=lambda: None)
        made.run()
        args.json = str(tmp_path / "numbers.json")
        experts.write_json(args, Machine(), made)
        assert json.loads((tmp_path / "numbers.json").read_text())["rows"]
        return made

    return run


def test_floors() -> None:
    """Those that are written down in the project's notes, for 700 TFLOP/s and 3 TB/s."""
    from experts_bounds import Load
    from experts_cases import CASES
    from timing import Machine

    cases = {case.name: case for case in CASES}
    known = [
        ("qwen3", 16384, False, 1767),
        ("qwen3", 16384, True, 5301),
        ("qwen3", 512, False, 404),  # the matrices
        ("olmoe", 4096, True, 1767),
        ("mixtral", 512, False, 942),
        ("deepseek", 16384, False, 16493),
    ]
    for name, tokens, backward, us in known:
        case = cases[name]
        load = Load(tokens, tokens * case.top_k, case.experts, 1.0)
        assert round(case.cost(load, backward).floor_us(Machine(), 7e14)) == us


def test_kernels_add_up_to_the_layer() -> None:
    """Every FLOP of the layer is in one kernel; kernels move more than the layer must."""
    from experts_bounds import Load
    from experts_cases import CASES
    from experts_kernels import KINDS, executable_of, launches_of

    from moesaic.codegen.target import Target

    case = CASES[0]
    load = Load(4096, 20000, 100, 1.0)
    flops, moved = {}, {}
    for kind in KINDS:
        costs = [launch.cost(load) for launch in launches_of(kind, executable_of(case, kind, Target.default()))]
        flops[kind], moved[kind] = sum(c.flops for c in costs), sum(c.bytes for c in costs)
    assert flops["forward"] == flops["training"] == case.cost(load, False).flops
    assert flops["training"] + flops["backward"] == case.cost(load, True).flops
    assert moved["forward"] > case.cost(load, False).bytes
    assert moved["training"] + moved["backward"] > case.cost(load, True).bytes


def test_kernels_that_are_timed_alone_wait_for_themselves() -> None:
    """A launch behind itself that began early would count and write what the one before still does."""
    from experts_cases import CASES
    from experts_kernels import executable_of, in_turn

    from moesaic.codegen.target import Target

    early = executable_of(CASES[0], "backward", Target.default())
    alone = in_turn(early)
    assert [kernel.symbol for kernel in alone.kernels] == [kernel.symbol for kernel in early.kernels]
    assert sum("beside_kernels_before" in kernel.source for kernel in early.kernels) == 3
    assert not any("beside_kernels_before" in kernel.source for kernel in alone.kernels)
    assert [step.kernel for step in alone.plan.steps] == [*alone.kernels]
    assert [step.after for step in alone.plan.steps] == [*range(len(alone.kernels))]


def test_picks() -> None:
    from experts_cases import CASES, keep_share, load_of, make_picks

    case, generator = CASES[0], torch.Generator().manual_seed(0)
    for routing in ("random", "even", "zipf"):
        picks = make_picks(case, 512, generator, routing).sort(-1)[0]
        assert (picks[:, 1:] > picks[:, :-1]).all(), "an expert is picked twice"
        assert picks.min() >= 0 and picks.max() < case.experts
    even = make_picks(case, 512, generator, "even")
    assert load_of(case, even).skew == 1.0
    assert (even.sort(-1)[0].diff(dim=-1) >= case.experts // case.top_k).all()
    assert load_of(case, make_picks(case, 512, generator, "one")).experts == 1
    every = make_picks(case, 4096, generator)
    local = load_of(case, keep_share(case, every, 0.125, "local", generator))
    spread = load_of(case, keep_share(case, every, 0.125, "spread", generator))
    assert local.experts == 16 and spread.experts == 128
    assert abs(local.rows / 4096 - 1) < 0.1 and abs(spread.rows / 4096 - 1) < 0.1


def test_what_is_wrong_is_found() -> None:
    """Each tensor with a row left out of it, by an implementation that is right otherwise."""
    pytest.importorskip("transformers")
    from experts_cases import CASES, check, make_inputs, make_matrices, make_picks, transformers

    generator = torch.Generator().manual_seed(0)
    case = CASES[2].small
    matrices = make_matrices(case, generator)
    given = make_inputs(case, make_picks(case, 40, generator), generator)
    right = transformers(case, matrices, "eager")

    class Hurt(torch.autograd.Function):
        """Gives a tensor on, with a gradient whose last row is zeros."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[-1] = 0
            return gradient

    def hidden(given: Any) -> torch.Tensor:
        y = right(given)
        return y - torch.cat((0 * y[:-1], y[-1:])).detach()

    def of_inputs(name: str) -> Callable[[Any], torch.Tensor]:
        return lambda given: right(
            type(given)(**{n: Hurt.apply(t) if n == name else t for n, t in vars(given).items()})
        )

    def of_matrices(name: str) -> Callable[[Any], torch.Tensor]:
        hurt = {n: Hurt.apply(t) if n == name else t for n, t in vars(matrices).items()}
        return transformers(case, type(matrices)(**hurt), "eager")

    runs = {
        "right": right,
        "hidden": hidden,
        "d_x": of_inputs("x"),
        "d_weights": of_inputs("weights"),
        "d_gate_up_proj": of_matrices("gate_up"),
        "d_down_proj": of_matrices("down"),
    }
    problems = check(case, given, matrices, runs)
    assert "right" not in problems
    for name in runs.keys() - {"right"}:
        assert problems[name].startswith(f"WRONG: {name}"), problems.get(name)


def test_what_is_right_passes_however_tokens_pick() -> None:
    """Errors are what rounding makes them, the largest of 16000 numbers, too; with one expert for all, those of a token
    are the same."""
    from experts_cases import CASES, ROUTINGS, check, make_inputs, make_matrices, make_picks, ours

    generator = torch.Generator().manual_seed(0)
    case = CASES[0].small
    matrices = make_matrices(case, generator)
    for routing in ROUTINGS:
        given = make_inputs(case, make_picks(case, 2000, generator, routing), generator)
        assert not check(case, given, matrices, {"ours": ours(case, matrices, "reference")}), routing


def test_in_turn() -> None:
    """Each has its turn in each round, after replays that are not counted; what takes long is timed less often."""
    from timing import in_turn

    order = []

    class One:
        calls = 2

        def __init__(self, name: str, ms: float) -> None:
            self.name, self.replay_ms = name, ms

        def burst(self, ms: float) -> list[float]:
            order.append((self.name, ms))
            return [self.replay_ms if ms == 20.0 else 7.0]

    found = in_turn({"a": One("a", 1.0), "b": One("b", 2.0)}, ms=100.0, rounds=5, settle_ms=50.0)
    assert order == [("a", 50.0), ("a", 20.0), ("b", 50.0), ("b", 20.0)] * 5
    assert found["b"].us == 2.0 and found["a"].us == 1.0 and found["a"].replays == 5
    order.clear()
    in_turn({"a": One("a", 1.0), "b": One("b", 500.0)}, ms=60.0, rounds=5, settle_ms=0.0)
    assert order == [("a", 20.0), ("b", 20.0)] * 3


class FalseGpu:
    """What a timer uses of ``torch.cuda``, with a clock: a captured call takes 100 us, each replay 20 more."""

    def __init__(self) -> None:
        self.us = 0.0
        self.pools: list[Any] = []
        self.captured: list[int] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.us

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) / 1e3

        class CUDAGraph:
            calls = 0

            def replay(self) -> None:
                gpu.us += 20 + 100 * self.calls

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        self.Event, self.CUDAGraph, self.Stream = Event, CUDAGraph, Stream

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        self.pools.append(pool)
        before = len(self.captured)
        yield
        graph.calls = len(self.captured) - before

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def current_stream(self) -> Any:
        return self.Stream()

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    def synchronize(self) -> None:
        pass


def test_timers_on_a_false_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.runtime import graph_timer as timing

    gpu = FalseGpu()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=gpu, zeros=lambda n, device: None))
    shared = timing.Shared()
    few = timing.GraphTimer(lambda i: gpu.captured.append(i), sets=2, least_ms=1.0, shared=shared)
    assert few.calls * 100 + 20 >= 1000 and set(gpu.pools) == {(0, 1)}
    assert few.replay_ms == pytest.approx(0.02 + 0.1 * few.calls)
    assert few.burst(0.01) == pytest.approx([100 + 20 / few.calls])
    assert len(few.burst(10 * few.replay_ms)) == 10
    many = timing.GraphTimer(lambda i: [gpu.captured.append(i) for _ in range(400)], shared=shared)
    assert many.calls == 1
    found = timing.in_turn({"few": few, "many": many}, ms=200.0)
    assert found["few"].us == pytest.approx(100 + 20 / few.calls) and found["many"].us == pytest.approx(40020)
    assert found["many"].replays == 5


@pytest.mark.emulate
@pytest.mark.slow
def test_sections_of_layers(bench: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    made = bench("--rows", "--live", "0.25", "--skew", "--only", "ours,hf")
    printed = capsys.readouterr()
    assert made.wrong == 0, printed.out
    picks = [(row.section, row.picks) for row in made.rows if row.which == "fwd+bwd"]
    assert picks == [
        ("rows", "random"),
        *(("live", label) for label in ("0.25 spread", "0.25 local")),
        *(("skew", label) for label in ("even", "random", "zipf", "one")),
    ]
    assert all(row.us("ours") and row.us("hf") and row.dense for row in made.rows)
    assert "live: mixtral, T = 37" in printed.err


@pytest.mark.emulate
def test_sections_of_kernels_and_memory(bench: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Launched alone, in any order and more than once, kernels find what they need: the emulator would say if not."""
    made = bench("--kernels", "--memory", "--host", "--no-peers")
    assert made.wrong == 0, capsys.readouterr().out
    names = [(row.kind, row.name) for row in made.kernels]
    assert names[0] == ("forward", "metadata") and ("backward", "d_gate_up_proj") in names
    assert len(set(names)) == len(names)
    assert all(row.us for row in made.kernels)


@pytest.mark.emulate
def test_a_wrong_result_is_not_timed(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import experts
    import experts_bench

    right = experts_bench.ours

    def doubled(*arguments: Any) -> Callable[[Any], torch.Tensor]:
        run = right(*arguments)
        return lambda given: 2 * run(given)

    monkeypatch.setattr(experts_bench, "ours", doubled)
    made = bench("--rows", "--no-peers")
    assert made.wrong == 1 and experts.summarise(made) == 1
    assert all(row.cells["ours"].startswith("WRONG: d_gate_up_proj") for row in made.rows)


@pytest.mark.emulate
def test_a_section_that_fails_leaves_the_others(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import experts_bench

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(experts_bench, "record", fails)
    made = bench("--kernels", "--rows", "--no-peers")
    assert made.wrong == 1 and not made.kernels
    assert all(row.us("ours") for row in made.rows)


@pytest.mark.parametrize("arguments", [["--dry-run"], ["--memory", "--cases", "qwen3"]], ids=" ".join)
def test_views_without_a_gpu(arguments: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("measures the machine where there is one")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "experts.py"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "qwen3" in done.stdout


def test_resources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kernel once, whoever launches it; spilled registers fail."""
    import experts
    import experts_views
    from compiled import Needs

    from moesaic.codegen.resources import Resources

    spilled = [8]
    monkeypatch.setattr(
        experts_views,
        "needs_of",
        lambda kernel, target: Needs(Resources(9, spilled[0]), 0, 2, 0.5, ("HMMA.16816", "EXIT")),
    )
    assert experts.main(["--resources", "--cases", "mixtral"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(" dispatch " in line for line in lines) == 2  # for many tokens and for few
    assert all("LOCAL MEMORY" in line and line.split()[-4:-2] == ["2", "1"] for line in lines[2:-1])
    spilled[0] = 0
    assert experts.main(["--resources", "--cases", "mixtral"]) == 0


def test_what_is_tuned_and_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The list of layers is sound, and a search among known times finds what the real one would."""
    from test_tuning_search import KEY

    from moesaic.runtime.tuning.search import Trial
    from moesaic.runtime.tuning.tables import CardName, Entry, Table

    # By its path: a checkout may be called the same, and pytest imports that by its name.
    found = importlib.util.spec_from_file_location("benchmark_of_tuning", FOLDER / "tuning.py")
    assert found is not None and found.loader is not None
    tuning: Any = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, found.name, tuning)
    found.loader.exec_module(tuning)
    layers = list(tuning.work())
    assert {one.group for one in layers} == {"routers", "experts", "losses", "presets"}
    assert len({(one.name, one.tokens) for one in layers}) == len(layers)
    made = [one.make() for one in layers if one.group == "routers"]
    sizes = {(layer._declared.num_experts, layer._declared.top_k) for layer in made}
    assert {(8, 2), (64, 6), (128, 8), (256, 8), (512, 10), (896, 16)} <= sizes
    assert len(tuning.PROOFS) == 5
    for jobs in (1, 3, 200):
        parts = tuning.shares(layers, jobs)
        assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in layers)
        owners = {(one.sizes, job) for job, part in enumerate(parts) for one in part}
        assert len(owners) == len({one.sizes for one in layers}), "kernels that are alike are tuned by one process"
        assert jobs == 200 or max(map(len, parts)) < len(layers) / jobs + 20

    candidates = [({"n": str(n)}, 10.0) for n in range(30)]
    trials = [Trial(p, e, 10.0 - 0.1 * n, "timed") for n, (p, e) in enumerate(candidates)]
    trials[29] = Trial({"n": "29"}, 10.0, 1.0, "wrong: bits")
    assert tuning.replayed(candidates, trials, 30) == ({"n": "28"}, pytest.approx(7.2))
    assert tuning.replayed(candidates, trials, 5)[1] >= 9.5
    lines = tuning.table_of({KEY: Entry({"lanes": "2"}, 8.0, 10.0, 4096, 20, 300)}).splitlines()
    assert lines[1].split()[-4:] == ["8.00", "20.0", "%", "lanes=2"]
    assert tuning.table_of({}) == "nothing yet"

    entry, card = Entry({"lanes": "2"}, 8.0, 10.0, 4096, 20, 300), CardName("sm_90a", 132)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "tuned")
    out = tmp_path / "out"
    many = replace(KEY, operands="Tx8xbf16 -> Tx8xbf16 Tx8xu8", tokens=">16384")
    kept = {  # by its gain, in percent
        KEY: (2.9, 3.0),
        many: (9.9, 10.0),
        replace(many, tokens="<=16384"): (2.9, 3.0),
        replace(many, operands="Tx8xbf16 -> Tx2xf32"): (2.9, 3.0),
    }
    for key, (little, enough) in kept.items():
        assert not tuning.worth_shipping(key, replace(entry, us=10 - little / 10))
        assert tuning.worth_shipping(key, replace(entry, us=10 - enough / 10))
    assert not tuning.worth_shipping(KEY, replace(entry, complete=False))
    for experts in (8, 9):
        found_now = {
            replace(KEY, experts=experts): entry,
            replace(KEY, experts=experts + 10): replace(entry, us=9.9),
        }
        Table(out / "sm_90a-132.json", card).add(found_now, {"gpu": f"H{experts}00", "commit": "unknown"})
        Table(out / "sm_90a-132-h100.json", replace(card, device="H100")).add({KEY: entry})
        assert tuning.main(["--out", str(out), "--install"]) == 0
        (out / "sm_90a-132.json").unlink()
    shipped = Table.load(tmp_path / "tuned" / "sm_90a-132.json", card)
    assert {key.experts for key in shipped.entries} == {8, 9}
    head = json.loads(shipped.path.read_text())["environment"]
    assert head == {"target": "sm_90a", "sms": 132, "gpu": "H800, H900"}
    assert [p.name for p in (tmp_path / "tuned").iterdir()] == ["sm_90a-132.json"]


# Models ---------------------------------------------------------------------------------------------------------------


class InTurn(Counting):
    """The same for calls that a GPU would capture, or not."""

    captured: list[bool]

    def __init__(self, call: Callable[[int], Any], graph: bool, shared: Any) -> None:
        super().__init__(call, 2, shared)
        InTurn.captured.append(graph)


@pytest.fixture
def models(tmp_path: Path) -> Callable[..., Any]:
    """Runs sections of a tiny model on the CPU; gives the bench, and what was written of it."""
    pytest.importorskip("transformers")
    import models
    import models_bench
    from timing import Machine

    def run(*arguments: str) -> Any:
        args = models.parse_arguments(
            [*arguments, "--shape", "tiny", "--batch", "2", "--length", "13", "--served", "1,5", "--budget", "0"]
        )
        Counting.made, InTurn.captured = 0, []
        made = models_bench.Bench(args, device="cpu", timers=InTurn, shared=lambda: None, compiler="eager")
        made.run()
        args.out = str(tmp_path / "numbers.json")
        models.write_json(args, Machine(), made)
        return made, json.loads((tmp_path / "numbers.json").read_text())

    return run


def test_a_layer_and_a_model(models: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Every part with every implementation that is asked for; of what is around experts, one timing for all."""
    names = ("eager", "grouped_mm", "moesaic")
    bench, written = models("--only", ",".join(names))
    printed = capsys.readouterr().out
    assert bench.wrong == 0, printed
    training, *serving = bench.rows
    assert set(training.cells) == {(p, n) for p in ("experts", "rest", "layer", "model") for n in names}
    # The false clock: 1, 2, 3 us for experts, 4 for the rest, 5, 6, 7 for the layer, 8, 9, 10 for the model.
    assert [training.us("model", n) for n in names] == [8, 9, 10] and training.us("rest", "moesaic") == 4
    assert training.amdahl("layer", "grouped_mm", "moesaic") == (6 / (6 + 1), 6 / 7)
    assert training.amdahl("model", "grouped_mm", "moesaic") == (9 / (9 + 2 * 1), 9 / 10)
    assert training.gain("layer") == 5 / 7 and f"{26 / 7 * 1e6:,.0f}" in printed
    assert [row.tokens for row in serving] == [1, 5] and all(len(row.cells) == 6 for row in serving)
    assert InTurn.captured == [False] * 10 + [False, True, True] * 4  # the loop of eager cannot be captured
    assert [row["tokens"] for row in written["rows"]] == [26, 1, 5]


def test_a_compiled_layer(models: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    bench, written = models("--training", "--only", "moesaic+compile")
    assert bench.wrong == 0, capsys.readouterr().out
    assert {part for part, _ in bench.rows[0].cells} == {"experts", "rest", "layer", "model"}
    assert all(cell["us"] > 0 for cell in written["rows"][0]["cells"].values())


def test_blocks_of_a_model(models: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """They have no experts to be timed alone: those of ours stand for them where a gain is compared with its bound."""
    bench, _ = models("--training", "--only", "grouped_mm,moesaic,moesaic-blocks")
    assert bench.wrong == 0, capsys.readouterr().out
    [row] = bench.rows
    assert {part for part, name in row.cells if name == "moesaic-blocks"} == {"layer", "model"}
    # The false clock: 1, 2 us for experts, 3 for the rest, 4, 5, 6 for the layer.
    assert row.amdahl("layer", "grouped_mm", "moesaic-blocks") == (4 / (4 + 1), 4 / 6)


@pytest.mark.parametrize("section", ["--training", "--serving"])
def test_wrong_experts_of_a_model_are_not_timed(
    section: str, models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import models_bench as benchmark
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    register = benchmark.mo.hf.register

    def registered() -> None:
        register()
        right = ALL_EXPERTS_FUNCTIONS["moesaic"]
        ALL_EXPERTS_FUNCTIONS.register("moesaic", lambda *given: 1.1 * right(*given))

    monkeypatch.setattr(benchmark.mo.hf, "register", registered)
    bench, _ = models(section, "--only", "grouped_mm,moesaic")
    register()
    assert bench.wrong
    for row in bench.rows:
        assert row.us("experts", "grouped_mm") and row.us("experts", "moesaic") is None
        cell = row.cells["experts", "moesaic"]
        assert cell.startswith("WRONG: result is off by 0." if section == "--training" else "ERROR: WrongResult: off")


def test_calls_between_events_on_a_false_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import models_bench

    gpu = FalseGpu()
    monkeypatch.setattr(models_bench, "torch", SimpleNamespace(cuda=gpu))

    def call(i: int) -> None:
        gpu.us += 250

    timer = models_bench.EventTimer(call)
    assert timer.replay_ms == 0.25 and timer.burst(1.0) == [250.0] * 4


# Routers --------------------------------------------------------------------------------------------------------------


class OfRouters(Counting):
    """The same with what a benchmark of routers asks of a timer."""

    def __init__(self, call: Callable[[int], Any], sets: int) -> None:
        super().__init__(call, sets, None)

    def sample(self, ms: float) -> list[float]:
        return self.burst(ms)

    def time(self, ms: float) -> Any:
        from timing import summary

        return summary(self.burst(ms), self.calls)


def routers(*arguments: str) -> Any:
    """Runs a small case on the emulator; gives the bench."""
    import router
    from router_bench import Bench
    from timing import Machine

    from moesaic.codegen.target import Target

    args = router.parse_arguments([*arguments, "--cases", "8x2", "--dtype", "bf16", "--budget", "0"])
    args.tokens = [5]
    Counting.made = 0
    made = Bench(args, replace(Machine(), l2_bytes=0), Target.default(), device="cpu", timers=OfRouters)
    made.run()
    return made


def test_rows_of_routers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours beside eager, each pass of each kind of outputs; the JSON has what the table has."""
    from router_rows import write_json
    from timing import Machine

    made = routers("--only", "ours,eager")
    said = capsys.readouterr().out
    assert [(row.variant.outputs, row.which) for row in made.rows] == [
        ("dense", "fwd"), ("dense", "fwd+bwd"), ("compact", "fwd"), ("compact", "fwd+bwd")
    ]  # fmt: skip
    assert [row.us("ours") for row in made.rows] == [1.0, 3.0, 5.0, 7.0]
    assert [row.us("eager") for row in made.rows] == [2.0, 4.0, 6.0, 8.0]
    assert not made.wrong and said.count("8x2") == 4 and "2.0x" in said
    args = SimpleNamespace(json=str(tmp_path / "rows.json"))
    write_json(args, Machine(), made.rows)  # type: ignore[arg-type]
    rows = json.loads(Path(args.json).read_text())["rows"]
    assert [(row["pass"], row["ours"]["us"]) for row in rows] == [
        ("fwd", 1.0), ("fwd+bwd", 3.0), ("fwd", 5.0), ("fwd+bwd", 7.0)
    ]  # fmt: skip


def test_rows_of_routers_say_what_was_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the pass and the bucket of T that is timed."""
    from moesaic.runtime.layer_views import LayerViews

    point = {"lanes": "2"}
    known = {"training": {"route_rows": point}, "backward": {"route_backward_rows": point}}
    monkeypatch.setattr(LayerViews, "tuned", property(lambda layer: {"<=256": known, "<=4096": {"forward": known}}))
    made = routers("--only", "ours", "--outputs", "compact")
    assert [row.tuned for row in made.rows] == [{}, known]
    assert [row.as_dict()["tuned"] for row in made.rows] == [{}, known]
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("8x2")]
    assert [line[-1] for line in lines] == ["0", "2"]


def test_a_wrong_router_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import router_bench
    from router_cases import WrongResult

    def found(*given: object) -> None:
        raise WrongResult("weights are off")

    monkeypatch.setattr(router_bench, "check", found)
    made = routers("--only", "ours,eager", "--outputs", "dense")
    assert made.wrong == 1
    for row in made.rows:
        assert row.cells["ours"] == "WRONG: weights are off" and row.us("eager")
    assert "WRONG: weights are off" in capsys.readouterr().out


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("mode", "said"),
    [("--dry-run", "8x2"), ("--check", "right"), ("--resources", "0 kernels use local memory")],
)
def test_views_of_routers(mode: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    import router

    asked = [mode, "--cases", "8x2", "--dtype", "bf16", "--outputs", "dense", "--tokens", "4096"]
    assert router.main(asked) == 0
    assert said in capsys.readouterr().out
