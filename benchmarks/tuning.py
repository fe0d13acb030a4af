"""Tunes kernels on this card: shows that 20 candidates find what all of them would, and grows the shipped table.

    python benchmarks/tuning.py --out results --seconds 500            # both parts, one after the other
    python benchmarks/tuning.py --out results --only prove             # all candidates of five shapes, against 20
    python benchmarks/tuning.py --out results --only grow --seconds 0  # the whole table; stop and start it at will
    python benchmarks/tuning.py --out results --only grow --layers routers --tokens 65536
    python benchmarks/tuning.py --out results --only grow --jobs 4     # four compile, one at a time has the card
    python benchmarks/tuning.py --out results --install                # puts the table where the package ships it
    python benchmarks/tuning.py --list                                 # what is tuned, without a GPU

moesaic has to be importable (``pip install -e .``). Nothing is begun after ``--seconds``. Every trial is noted in the
output folder as it happens, and a run goes on where the last one in that folder stopped. The work is done by a process
that is started again when a candidate hangs, or takes the GPU's context with it; such a candidate is not tried again.

*Prove*: for each of five kernels every candidate is compiled, checked against the rule's and timed. Then the search
that users run looks for the fastest among the times that were measured, with 20 trials; the winners are timed in turn.
``prove.json`` has all times, ``prove.txt`` the table:

    points   candidates that are valid; built: that compiled to something of its own; wrong: refused for their results
    rule     microseconds of the rule's choice, all of the fastest of all, 20 of the fastest of the 20
    off      how much slower the latter is

*Grow*: routers, with losses and without, and layers of experts are called, forward and backward, for each number of
tokens, and every kernel with a choice is searched for with 20 trials. ``<target>-<SMs>.json`` is the table for
``runtime/tuned``, ``grow.txt`` what it gains. ``--install`` leaves out what wins less than 3 %, and 10 % where a kernel
writes [T, E] for many tokens: then bandwidth decides, which cards of one target and as many multiprocessors need not
share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from experts_cases import CASES as EXPERTS
from timing import commit, driver_version, in_turn

import moesaic as mo
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir.presets import PRESETS
from moesaic.passes.kernel_key import KernelKey
from moesaic.passes.space import Point
from moesaic.runtime import driver
from moesaic.runtime.commands import console
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.layer import CompiledLayer
from moesaic.runtime.measure import call, draw_inputs
from moesaic.runtime.tuning.autotune import Session, active, autotune
from moesaic.runtime.tuning.bench import KernelBench, Timers
from moesaic.runtime.tuning.journal import Journal
from moesaic.runtime.tuning.search import Built, Search, Trial, key_of
from moesaic.runtime.tuning.tables import SHIPPED, CardName, Entry, Table, Tables
from moesaic.runtime.tuning.tuner import Settings, Tuned, Watch

TRIALS = 20
_HANGS_SECONDS = 60.0
_MOST_RESTARTS = 30
_AGAIN = 75  # exit code of a process that is to be started again

ALLOWED = 0.05
"""How much slower the best of 20 may be than the best of all."""

WORTH_SHIPPING = 0.03
"""What an entry of the shipped table wins at least, of the rule's time."""

WORTH_SHIPPING_OF_BYTES = 0.10
"""The same where bandwidth decides."""

Layer = Callable[[], CompiledLayer]


@dataclass(frozen=True)
class Work:
    """A layer and the numbers of tokens it is tuned for; of those of the same `sizes` one process has all."""

    name: str
    group: str
    sizes: str
    make: Layer
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Proof:
    """A kernel that is searched through as a whole."""

    name: str
    kernel: str
    make: Layer
    tokens: int


# ------------------------------------------------------------------------------------------------------------- layers


def router(experts: int, top_k: int, *, renormalize: bool = True, dtype: str = "bf16", **options: Any) -> Layer:
    """Softmax scores, divided by their sum unless said otherwise."""
    return lambda: mo.compile(mo.Router(experts, top_k, renormalize=renormalize, dtype=dtype, **options))


def experts(name: str) -> Layer:
    """One of the layers that ``experts.py`` times."""
    case = next(c for c in EXPERTS if c.name == name)
    return lambda: mo.compile(case.declared).layer(case.top_k, dtype="bf16", weights_dtype="bf16")


GROUPS: dict[str, Any] = {"score": "sigmoid", "selection_bias": True, "groups": 8, "groups_kept": 4}
DENSE = ("probs", "map")

PROOFS = (
    Proof("router 128x8 dense", "route_rows", router(128, 8, outputs=DENSE), 65536),
    Proof("router 256x8 groups", "route_rows", router(256, 8, **GROUPS), 65536),
    Proof("router 512x10", "route_rows", router(512, 10), 16384),
    Proof("router 64x6, few tokens", "route_rows", router(64, 6), 1024),
    Proof("experts qwen3, first product", "experts_gate_up_proj", experts("qwen3"), 4096),
)


def work() -> Iterator[Work]:
    """What the table holds, the most used first."""
    many = (65536, 16384, 4096, 256)
    plain: dict[str, Any] = {}
    timed = ((128, 8, plain), (256, 8, GROUPS), (512, 10, plain), (64, 6, plain), (256, 8, plain), (8, 2, plain))
    for tokens in (many[:1], many[1:]):
        for e, k, options in timed:
            for outputs in (("weights", "indices", "counts"), DENSE):
                name = f"router {e}x{k}{' groups' if options else ''}{' dense' if outputs is DENSE else ''}"
                yield Work(name, "routers", f"{e}x{k}", router(e, k, outputs=outputs, **options), tokens)
        for case in EXPERTS:
            of_experts = (16384,) if tokens == many[:1] else (4096, 512)
            yield Work(f"experts {case.name}", "experts", case.name, experts(case.name), of_experts)
    balance = {"balance": mo.LoadBalance(coef=1e-2)}
    for e, k, options in timed:
        for outputs in (("weights", "indices", "counts"), (*DENSE, "counts")):
            name = f"losses {e}x{k}{' groups' if options else ''}{' dense' if DENSE[0] in outputs else ''}"
            yield Work(name, "losses", f"{e}x{k}", router(e, k, outputs=outputs, losses=balance, **options), many)
    for e, k in ((896, 16), (384, 8), (160, 6), (128, 4), (64, 8), (60, 4), (32, 4), (16, 1)):
        yield Work(f"router {e}x{k}", "routers", f"{e}x{k}", router(e, k), many)
    for dtype in ("bf16", "fp32"):
        for name, arguments in PRESETS.items():
            if "num_experts" in arguments and "top_k" in arguments:
                sizes = f"{arguments['num_experts']}x{arguments['top_k']}"
                yield Work(f"preset {name} {dtype}", "presets", sizes, _preset(name, dtype), many)


def shares(found: Sequence[Work], jobs: int) -> list[list[Work]]:
    """The work of each of so many processes: about equally much, in order, and kernels that are alike in one."""
    amounts: dict[str, int] = {}
    for one in found:
        amounts[one.sizes] = amounts.get(one.sizes, 0) + len(one.tokens)
    loads, owners = [0] * jobs, {}
    for sizes in sorted(amounts, key=lambda s: -amounts[s]):
        owners[sizes] = loads.index(min(loads))
        loads[owners[sizes]] += amounts[sizes]
    return [[one for one in found if owners[one.sizes] == job] for job in range(jobs)]


def _preset(name: str, dtype: str) -> Layer:
    return lambda: mo.compile(mo.Router.preset(name, dtype=dtype))


# -------------------------------------------------------------------------------------------------------------- prove


class Replayed:
    """A bench that answers with what has been measured; what ran like another one then, does so here."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.times = {key_of(t.point): t.us for t in trials if t.us is not None}
        self._wrong = {key_of(t.point): t.verdict for t in trials if t.verdict.startswith(("wrong", "failed"))}
        first: dict[float, str] = {}  # which is the same has the very time of what it is the same as
        for trial in trials:
            if trial.us is not None and trial.verdict != "same":
                first.setdefault(trial.us, key_of(trial.point))
        self._alike = {key_of(t.point): first[t.us] for t in trials if t.verdict == "same" and t.us in first}

    def build(self, points: Sequence[Point]) -> list[Built | str]:
        built: list[Built | str] = []
        for point in points:
            key = key_of(point)
            kernel = GeneratedKernel(key, "", (), 1, 1, "fixed")
            refused = key not in self.times and key not in self._wrong
            built.append("not timed" if refused else Built(kernel, self._alike.get(key, key)))
        return built

    def check(self, kernel: GeneratedKernel) -> str:
        return self._wrong.get(kernel.symbol, "")

    def timer(self, kernel: GeneratedKernel) -> Replay:
        return Replay(self.times[kernel.symbol])


@dataclass
class Replay:
    """A timer that takes no time."""

    us: float
    calls: int = 1
    replay_ms: float = 1.0

    def burst(self, ms: float) -> list[float]:
        return [self.us]


def replayed(candidates: Sequence[tuple[Point, float]], trials: Sequence[Trial], most: int) -> tuple[Point, float]:
    """What the search finds with so many trials among times that are known."""
    bench = Replayed(trials)
    found = Search(candidates, bench.build, bench, most_trials=most).run()
    return found.best, bench.times[key_of(found.best)]


class Prover:
    """Goes through the proofs; what a run has no time for is left to the next."""

    def __init__(
        self, out: Path, deadline: float, workers: int | None, device: str = "cuda", timers: Timers | None = None
    ) -> None:
        self._out = out
        self._deadline = deadline
        self._workers = workers
        self._device = torch.device(device)
        self._timers = timers
        self.rows: list[dict[str, Any]] = []

    def run(self, proofs: Sequence[Proof]) -> int:
        """How many shapes are off by more than is allowed."""
        bad = 0
        for proof in proofs:
            if time.monotonic() > self._deadline:
                say(f"{proof.name}: no time left")
                break
            try:
                row = self._prove(proof)
            except Exception as error:  # noqa: BLE001 - the other shapes are worth having
                say(f"{proof.name}: {type(error).__name__}: {error}")
                if torch.cuda.is_available() and not still_works():
                    os._exit(_AGAIN)
                bad += 1
                continue
            self.rows.append(row)
            bad += row["off"] > ALLOWED or not row["complete"]
            self._write()
        return bad

    def _prove(self, proof: Proof) -> dict[str, Any]:
        say(f"{proof.name}, T = {proof.tokens}")
        kept = Kept(proof.kernel)
        settings = Settings(
            seconds=max(1.0, self._deadline - time.monotonic()),
            trials=0,
            workers=self._workers,
            force=True,
            journal=Journal(self._out / "prove.jsonl"),
            watch=kept,
            kernels=(proof.kernel,),
            timers=self._timers,
        )
        layer = proof.make()
        given = draw_inputs(layer._program().function, proof.tokens, device=str(self._device))
        session = Session(settings, functions=1)
        with active(session), torch.no_grad():
            call(layer, given, training=False)
        [tuned] = [t for t in session.report.tuned if t.kernel == proof.kernel]
        assert tuned.found is not None
        return self._row(proof, tuned, kept)

    def _row(self, proof: Proof, tuned: Tuned, kept: Kept) -> dict[str, Any]:
        assert tuned.found is not None and kept.bench is not None
        trials = tuned.found.trials
        candidates = kept.candidates
        timed = {key_of(t.point): t for t in trials if t.us is not None and t.verdict in ("timed", "stopped")}
        best = min((t for t in timed.values() if t.verdict == "timed"), key=lambda t: t.us or math.inf)
        few, _ = replayed(candidates, trials, TRIALS)
        entrants = {"rule": tuned.default, "all": best.point, "few": few}
        kernels = {}
        for name, built in zip(entrants, kept.build([*entrants.values()]), strict=True):
            assert not isinstance(built, str), built
            kernels[name] = built.kernel
        bench = kept.bench
        ratios: dict[str, list[float]] = {n: [] for n in entrants}
        for _ in range(3):
            times = in_turn({n: bench.timer(k) for n, k in kernels.items()}, 40.0)
            for name, timing in times.items():
                ratios[name].append(timing.us)
        us = {n: statistics.median(found) for n, found in ratios.items()}
        verdicts: dict[str, int] = {}
        for trial in trials:
            word = trial.verdict.partition(":")[0]
            verdicts[word] = verdicts.get(word, 0) + 1
        row = {
            "shape": proof.name,
            "tokens": proof.tokens,
            "kernel": proof.kernel,
            "points": tuned.found.points,
            "complete": tuned.found.ended == "all",
            "verdicts": verdicts,
            "floor_us": tuned.floor_us,
            "us": us,
            "off": us["few"] / min(us["all"], us["few"]) - 1,
            "chosen": {n: dict(p) for n, p in entrants.items()},
            "trials": [asdict(t) for t in trials],
        }
        print(self._line(row), flush=True)
        for trial in trials:
            if trial.verdict.startswith(("wrong", "failed", "refused")):
                print(f"    {key_of(trial.point)}: {trial.verdict[:160]}", flush=True)
        return row

    @staticmethod
    def _line(row: Mapping[str, Any]) -> str:
        us = row["us"]
        return (
            f"{row['shape']:30} T={row['tokens']:<6} {row['points']:5} points {row['verdicts']}  floor "
            f"{row['floor_us']:.2f} rule {us['rule']:.2f} all {us['all']:.2f} {TRIALS} {us['few']:.2f} off "
            f"{100 * row['off']:.1f} %{'' if row['complete'] else '  (not all were tried)'}"
        )

    def _write(self) -> None:
        (self._out / "prove.json").write_text(json.dumps({"about": about(), "rows": self.rows}, indent=1) + "\n")
        (self._out / "prove.txt").write_text("\n".join([str(about()), *map(self._line, self.rows)]) + "\n")


class Watchdog(Watch):
    """Ends the process, with an exit code that has it started again, when a candidate does not come to an end."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def trial(self, trial: Trial) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if trial.verdict == "begun":
            self._timer = threading.Timer(_HANGS_SECONDS, self._hangs, (trial,))
            self._timer.daemon = True
            self._timer.start()

    @staticmethod
    def _hangs(trial: Trial) -> None:
        say(f"  {key_of(trial.point)} hangs")
        os._exit(_AGAIN)


def still_works() -> bool:
    """Whether this process can still use the GPU."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        say(f"  the GPU's context is lost: {str(error).partition(chr(10))[0]}")
        return False
    return True


class Kept(Watchdog):
    """Keeps what a search was made of."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.bench: KernelBench | None = None
        self.build: Callable[[Sequence[Point]], Sequence[Built | str]] = lambda points: []
        self.candidates: Sequence[tuple[Point, float]] = ()
        self._done = 0
        self._said = time.monotonic()

    def searching(self, search: Search) -> None:
        assert isinstance(search.bench, KernelBench)
        self.bench, self.build, self.candidates = search.bench, search.build, search.candidates

    def trial(self, trial: Trial) -> None:
        super().trial(trial)
        self._done += trial.verdict != "begun"
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            say(f"  {self._done} of {len(self.candidates)} candidates")


# --------------------------------------------------------------------------------------------------------------- grow


def grow(args: argparse.Namespace, out: Path, tables: Tables, deadline: float) -> int:
    """Tunes layer after layer; gives how many failed."""
    failed, journal = 0, Journal(out / "grow.jsonl")
    common = Table(out / f"{replace(tables.card, device='').stem}.json", replace(tables.card, device=""))
    wanted = [one for one in work() if not args.layers or one.group in args.layers]
    wanted = [one for one in wanted if not args.shapes or any(s in one.name for s in args.shapes)]
    for one in shares(wanted, args.jobs)[args.child]:
        for tokens in one.tokens:
            if args.tokens and tokens not in args.tokens:
                continue
            left = deadline - time.monotonic()
            if left <= 2:
                say("no time left")
                return failed
            say(f"{one.name}, T = {tokens}, {left:.0f} s left")
            try:
                found = autotune(
                    one.make(),
                    tokens=tokens,
                    budget=min(left, args.budget),
                    trials=TRIALS,
                    workers=args.workers,
                    journal=journal,
                    watch=Watchdog(),
                )
            except Exception as error:  # noqa: BLE001 - the other layers are worth having
                say(f"  {type(error).__name__}: {str(error)[:300]}")
                if not still_works():
                    os._exit(_AGAIN)
                failed += 1
                continue
            for tuned in found.tuned:
                if tuned.found is not None:
                    print(f"  {_gain(tuned)}", flush=True)
            common.add(tables.user.entries, about())
            listed = out / f".grow-{args.child}.txt"
            listed.write_text(table_of(common.entries) + "\n", encoding="utf-8")
            listed.replace(out / "grow.txt")
        torch.cuda.empty_cache()
    return failed


def _gain(tuned: Tuned) -> str:
    entry = tuned.entry
    changed = {n: v for n, v in entry.point.items() if tuned.default.get(n) != v}
    gain = 100 * (1 - entry.us / entry.default_us)
    return f"{tuned.kernel:28} {entry.default_us:9.2f} -> {entry.us:9.2f} us, {gain:4.1f} %  {changed or ''}"


def table_of(entries: Mapping[KernelKey, Any]) -> str:
    """Every entry as a line."""
    rows = [
        (
            str(key),
            key.features[:40],
            f"{e.default_us:.2f}",
            f"{e.us:.2f}",
            f"{100 * (1 - e.us / e.default_us):.1f} %",
            key_of(e.point),
        )
        for key, e in sorted(entries.items())
    ]
    header = ("kernel", "ops", "rule, us", "tuned, us", "gain", "point")
    return console.table(header, rows, right={2, 3, 4}) if rows else "nothing yet"


# ------------------------------------------------------------------------------------------------------------- running


def about() -> dict[str, str]:
    """Where numbers are from."""
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "commit": commit(),
    }


def supervise(arguments: Sequence[str], seconds: float, job: int) -> int:
    """Does a share of the work in a process beside, which is started again where a candidate ended it."""
    start = time.monotonic()
    for _ in range(_MOST_RESTARTS):
        left = seconds - (time.monotonic() - start)
        if seconds and left < 5:
            break
        command = [sys.executable, __file__, *arguments, "--child", str(job)]
        command += ["--seconds", f"{left:.0f}"] if seconds else []
        code = subprocess.run(command, check=False).returncode
        if code != _AGAIN and code >= 0:
            return code
        say(f"ended with {code}; once more")
    return 1


def worth_shipping(key: KernelKey, entry: Entry) -> bool:
    """Whether an entry is of a search that came to its end, and wins enough on this card to be right for others."""
    _, _, written = key.operands.partition(" -> ")
    streams = key.tokens.startswith(">") and any(kind.startswith(f"Tx{key.experts}x") for kind in written.split())
    least = WORTH_SHIPPING_OF_BYTES if streams and key.template == "row_program" else WORTH_SHIPPING
    return entry.complete and entry.us <= (1 - least) * entry.default_us


def install(path: Path) -> None:
    """Adds the entries of a table for all cards of a target to the shipped one, as far as they win enough."""
    head = json.loads(path.read_text(encoding="utf-8"))["environment"]
    if "device" in head:  # the user's table of the same run
        return
    card = CardName(head["target"], head["sms"])
    found = Table.load(path, card)
    shipped = Table.load(SHIPPED / path.name, card)
    before = len(shipped.entries)
    shipped.entries |= {key: entry for key, entry in found.entries.items() if worth_shipping(key, entry)}
    SHIPPED.mkdir(exist_ok=True)
    there = json.loads(shipped.path.read_text(encoding="utf-8"))["environment"].get("gpu", "") if before else ""
    others = {n: v for n, v in head.items() if n not in asdict(card) and v != "unknown"}
    gpus = [name for name in (*there.split(", "), others.get("gpu", "")) if name]
    others["gpu"] = ", ".join(dict.fromkeys(gpus))
    shipped.path.write_text(shipped.text(others), encoding="utf-8")
    print(f"{shipped.path}: {before} entries, now {len(shipped.entries)}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tuning.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, default=Path("tuning"), help="folder of results (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=0.0, help="for everything; 0: no limit")
    p.add_argument("--only", choices=("prove", "grow"), help="one of the two parts")
    p.add_argument("--layers", type=lambda t: t.split(","), help="of routers, experts, losses, presets (grow)")
    p.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], help="only these (grow)")
    p.add_argument("--shapes", type=lambda t: t.split(","), help="only what has one of these in its name")
    p.add_argument(
        "--budget", type=float, default=60.0, help="seconds for a layer and a T (grow; default: %(default)s)"
    )
    p.add_argument("--jobs", type=int, default=1, help="layers at a time (grow; default: %(default)s)")
    p.add_argument("--workers", type=int, help="processes that compile, of each job (default: one a core in all)")
    p.add_argument("--child", type=int, metavar="JOB", help=argparse.SUPPRESS)
    p.add_argument("--install", action="store_true", help="copy the table into the package, and do nothing else")
    p.add_argument("--list", action="store_true", help="print what is tuned, and do nothing else")
    args = p.parse_args(arguments)
    if args.jobs < 1:
        p.error("--jobs: expected 1 or more")
    args.workers = args.workers or max(1, (os.cpu_count() or 1) // args.jobs)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; gives the exit code."""
    args = parse_arguments(arguments)
    if args.list:
        for one in work():
            print(f"{one.name:32} {one.group:8} T = {', '.join(map(str, one.tokens))}")
        return 0
    if args.install:
        for path in sorted(args.out.glob("sm_*.json")):
            install(path)
        return 0
    if not torch.cuda.is_available():
        say("no GPU: only --list and --install work here")
        return 3
    if args.child is None:
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        with ThreadPoolExecutor(args.jobs) as jobs:
            return max(jobs.map(lambda job: supervise(given, args.seconds, job), range(args.jobs)))
    start = time.monotonic()
    deadline = start + args.seconds if args.seconds else math.inf
    args.out.mkdir(parents=True, exist_ok=True)
    found = driver.device(0)
    card = CardName(found.target.name, found.sm_count, found.name)
    runner = RUNNERS["cuda"]
    tables = runner.tables = Tables(card, args.out / f"{card.stem}.json", args.out / "none.json")
    bad = 0
    if args.only != "grow" and args.child == 0:
        until = deadline if args.only else start + 0.5 * args.seconds if args.seconds else math.inf
        proofs = [p for p in PROOFS if not args.shapes or any(s in p.name for s in args.shapes)]
        runner.tables = Tables(card, args.out / "prove-table.json", args.out / "none.json")
        bad += Prover(args.out, until, args.workers).run(proofs)
        runner.tables = tables
    if args.only != "prove":
        bad += grow(args, args.out, tables, deadline)
    say(f"{time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
