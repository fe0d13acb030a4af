"""A declared function and everything made from it, addressed by content.

Two layers declared alike share one program, so that a model of 60 equal layers is lowered and compiled once. A program
is lowered once per direction, and specialised per target and alignment of its inputs.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moesaic import __version__
from moesaic.codegen.generate import generate_kernels
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.ir import environment
from moesaic.ir.core import Function, Module
from moesaic.ir.errors import InputError, InternalError
from moesaic.ir.ops.kernel import ColFinish
from moesaic.passes.choose_saved import ChooseSaved
from moesaic.passes.differentiate import SUFFIX, Differentiate, derive
from moesaic.passes.instruments import History, LogPasses, SaveTree, VerifyEach, print_by_environment
from moesaic.passes.lower_aux_loss import lower_losses
from moesaic.passes.manager import PIPELINES, Instrument, Pass, PassContext, PassManager, parse_pipeline, pipeline_text
from moesaic.passes.save_products import SaveProducts
from moesaic.passes.specialize import Specialize
from moesaic.runtime import token_buckets
from moesaic.runtime.kernels import say_once
from moesaic.runtime.plan import LaunchPlan, build_plan
from moesaic.runtime.reproducer import Reproduce


@dataclass(frozen=True)
class Lowered:
    """A module after planning, with what the passes said and how it looked on the way."""

    module: Module
    context: PassContext
    stages: Mapping[str, str]


@dataclass(frozen=True)
class Executable:
    """A plan for one target and alignment class, with the text of its kernels."""

    plan: LaunchPlan
    target: str
    kernels: tuple[GeneratedKernel, ...]
    module: Module = field(compare=False)


class Program:
    """See the module's docstring; get one from :func:`program_of`."""

    def __init__(self, key: str, module: Module, passes: str) -> None:
        self.key = key
        self.module = module
        self._lock = threading.RLock()
        self._lowered: dict[str, Lowered] = {}
        self._differentiable: dict[tuple[str, ...], frozenset[str]] = {}
        self._executables: dict[tuple[str, str, str, tuple[int, ...], str, tuple[str, ...]], Executable] = {}
        self._rules: dict[tuple[str, tuple[str, ...], str], str] = {}
        self._overrides: dict[str, Pass] = {p.name: p for p in parse_pipeline(passes)}

    @property
    def function(self) -> Function:
        """The declared function."""
        return self.module.entry

    @property
    def float_results(self) -> tuple[str, ...]:
        """Names of the results that can have a cotangent."""
        f = self.function
        return tuple(n for n, t in zip(f.result_names, f.result_types, strict=True) if t.dtype.is_float)

    def lower(self, kind: str, cotangents: tuple[str, ...] = ()) -> Lowered:
        """The planned module: ``forward`` alone, or ``training`` with the backward of the given cotangents.

        The training forward that runs is the one lowered for all cotangents. A backward for some of them gets along
        with what that one keeps.
        """
        if cotangents == self.float_results:
            cotangents = ()
        key = f"{kind} {','.join(cotangents)}"
        with self._lock:
            if key not in self._lowered:
                pipeline = PIPELINES["forward" if kind == "forward" else "default"]
                if cotangents:
                    kept = self._kept()
                    for saving in ("differentiate", "save-products", "choose-saved"):
                        given = f" cotangents={','.join(cotangents)}" if saving == "differentiate" else ""
                        pipeline = pipeline.replace(saving, f"{saving}{{kept={','.join(kept)}{given}}}")
                pipeline = pipeline.removesuffix(",specialize")
                module = self.module.clone()
                history, context = History(), PassContext()
                instruments = [history, LogPasses(context), *self._instruments(key)]
                passes = [self._chosen(p) for p in parse_pipeline(pipeline)]
                PassManager(passes, instruments).run(module, context)
                self._lowered[key] = Lowered(module, context, history.stages)
            return self._lowered[key]

    def pipeline(self, kind: str) -> str:
        """What lowers ``forward``, else ``training`` and ``backward``, with the options that were given, as text."""
        passes = parse_pipeline(PIPELINES["forward" if kind == "forward" else "default"])
        return pipeline_text([self._chosen(p) for p in passes])

    def _chosen(self, of_pipeline: Pass) -> Pass:
        """A pass with the options it was given, and what only the pipeline knows."""
        chosen = self._overrides.get(of_pipeline.name, of_pipeline)
        if isinstance(of_pipeline, Differentiate):
            assert isinstance(chosen, Differentiate)
            chosen = replace(chosen, cotangents=of_pipeline.cotangents, kept=of_pipeline.kept)
        if isinstance(of_pipeline, SaveProducts | ChooseSaved):
            assert isinstance(chosen, SaveProducts | ChooseSaved)
            chosen = replace(chosen, kept=of_pipeline.kept)
        return chosen

    def _instruments(self, key: str) -> list[Instrument]:
        """What the environment asks to see of a lowering."""
        made: list[Instrument] = []
        if environment.VERIFY_EACH.get():
            made.append(VerifyEach())
        printing = print_by_environment(sys.stderr)
        if printing is not None:
            made.append(printing)
        name = f"{self.function.name}-{self.key[:8]}-{key.strip().replace(' ', '-').replace(',', '-')}"
        dump, reproducers = environment.DUMP_DIR.get(), environment.REPRODUCER_DIR.get()
        if dump is not None and _can_hold_files(dump / name):
            made.append(SaveTree(dump / name))
        # Asked for, of any failure; else of faults of ours only.
        made.append(Reproduce(None if reproducers is None else reproducers / f"{name}.moe"))
        return made

    def _kept(self) -> tuple[str, ...]:
        """What the backward for all cotangents takes: inputs and results of the training forward, which autograd saves,
        and cotangents."""
        module = self.lower("training").module
        backward = self.function.name + SUFFIX
        return tuple(a.name for a in module.function(backward).arguments) if module.has_function(backward) else ()

    def backward_function(self, cotangents: tuple[str, ...]) -> Function | None:
        """The planned backward function for the given cotangents; ``None`` if no gradient reaches an input."""
        module = self.lower("training", cotangents).module
        name = self.function.name + SUFFIX
        return module.function(name) if module.has_function(name) else None

    def differentiable_inputs(self, cotangents: tuple[str, ...]) -> frozenset[str]:
        """Inputs that the given cotangents reach in the function as declared.

        Simplifying may cut one off (a normalisation over one pick is a constant): its gradient is zero, not missing.
        Those that get none by the options of ``differentiate`` are not among them.
        """
        if cotangents not in self._differentiable:
            summed = self.function.clone()
            lower_losses(summed.body)
            declared = derive(summed, cotangents) if cotangents else None
            names = declared.result_names if declared is not None else []
            chosen = self._overrides.get(Differentiate.name, Differentiate())
            assert isinstance(chosen, Differentiate)
            self._differentiable[cotangents] = frozenset(n.removeprefix("d_") for n in names) - {*chosen.without}
        return self._differentiable[cotangents]

    def forward_function(self, *, training: bool) -> Function:
        """The planned forward function; in training it also hands out what backward needs."""
        return self.lower("training" if training else "forward").module.entry

    def executable(
        self,
        kind: str,
        target: str,
        alignment: tuple[int, ...],
        cotangents: tuple[str, ...] = (),
        tokens: str = "many",
        points: tuple[str, ...] = (),
    ) -> Executable:
        """Plan and kernel text of ``forward``, ``training`` (its forward function) or ``backward``.

        `tokens` is what the rule knows of T, see `rule`; `points` are choices in its place, see `Specialize`.
        """
        key = (kind, ",".join(cotangents), target, alignment, tokens, points)
        found = self._executables.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._executables:
                specialize = self.specialize(target, alignment, tokens)
                if points:
                    specialize = replace(specialize, points=points)
                self._executables[key] = self._specialized(self.planned(kind, cotangents), specialize)
            return self._executables[key]

    def planned(self, kind: str, cotangents: tuple[str, ...] = ()) -> Function:
        """The planned function of a kind."""
        if kind != "backward":
            return self.forward_function(training=kind == "training")
        function = self.backward_function(cotangents)
        if function is None:
            raise InternalError(f"@{self.function.name} has no backward function")
        return function

    def rule(self, kind: str, cotangents: tuple[str, ...], target: str, bucket: int) -> str:
        """What `specialize` is told of T in a bucket: ``fewest``, ``few`` or ``many``.

        Where the fewest tokens have no kernel of their own, they are few: both buckets share what is made for one.
        """
        word = token_buckets.rule(bucket)
        if word != "fewest":
            return word
        key = (kind, cotangents, target)
        with self._lock:
            if key not in self._rules:
                function = self.planned(kind, cotangents).clone()
                self.specialize(target, (), word).rewrite(function, {})
                merged = any(isinstance(op, ColFinish) for op in function.body.walk())
                self._rules[key] = word if merged else "few"
            return self._rules[key]

    def specialize(self, target: str, alignment: tuple[int, ...], tokens: str) -> Specialize:
        """The pass that configures kernels, with the options that this program was made with."""
        chosen = self._overrides.get("specialize", Specialize())
        assert isinstance(chosen, Specialize)
        return replace(chosen, target=target, alignment=alignment, tokens=tokens)

    def _specialized(self, function: Function, specialize: Specialize) -> Executable:
        module = Module([function.clone()])
        PassManager([specialize]).run(module)
        kernels = generate_kernels(module.entry)
        return Executable(build_plan(module.entry, kernels), specialize.target, tuple(kernels), module)


@functools.cache
def _compiler_digest() -> bytes:
    """Of our own text that decides what a program hands from forward to backward.

    torch keeps compiled graphs on disk, and they name programs: an old graph must not fit a later version's program.
    """
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(__version__.encode())
    for folder in ("ir", "passes"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


_programs: dict[str, Program] = {}
_programs_lock = threading.Lock()


def program_of(module: Module, passes: str = "") -> Program:
    """The program of a declared module; the same object for equal modules.

    `passes` run with options, in place of the compiler's choices: ``specialize{lanes=8},sink-gathers{sparse=0}``.
    """
    pipelines = "\0".join(PIPELINES.values())  # which others may have put passes of their own into
    key = hashlib.sha256(_compiler_digest() + f"{pipelines}\0{passes}\0{module}".encode()).hexdigest()[:24]
    with _programs_lock:
        if key not in _programs:
            _programs[key] = Program(key, module.clone(), passes)
        return _programs[key]


def program_by_key(key: str) -> Program:
    """The program a handle stands for.

    Raises:
        InputError: the handle is unknown in this process.
    """
    try:
        return _programs[key]
    except KeyError:
        raise InputError(
            f"no compiled layer has the handle {key!r} in this process; a graph of another process finds its layer "
            "once an equal one is made here by the same version: call moesaic.compile(...) on the declaration first"
        ) from None


@functools.cache
def with_gradients(key: str, passes: str, into: tuple[str, ...], without: tuple[str, ...]) -> str:
    """The handle of a program of the same function whose backward adds the gradients of the inputs `into` to sums of
    the caller's, and makes none of those `without`; `passes` are the first program's.

    A matrix whose bias takes a gradient keeps its own: the bias's is a sum of rows beside it.
    """
    module = program_by_key(key).module
    biases = {a.name for a in module.entry.arguments} - {*without}
    changed = Differentiate(into=into, without=tuple(n for n in without if f"{n}_bias" not in biases))
    return program_of(module, ",".join([*([passes] if passes else []), str(changed)])).key


def _can_hold_files(folder: Path) -> bool:
    """Whether there is such a folder, or can be; says so where not, for a dump must not stop what it is about."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say_once(f"{environment.DUMP_DIR.name}={folder} cannot be written: {error.strerror or error}")
        return False
    return True
