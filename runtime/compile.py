"""``moesaic.compile``: from a declaration to something that runs on tensors and can be looked into."""

from __future__ import annotations

import functools
import os
import pickle
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, overload

import torch
from torch.autograd import forward_ad

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.core import Function, Module
from moesaic.ir.declare import LOSS_PREFIX, Router
from moesaic.ir.errors import InputError, InputTypeError, UnsupportedError, check_choice, suggestion
from moesaic.ir.experts import Experts
from moesaic.ir.moe import MoE
from moesaic.ir.types import Affine, Dim, DType, TensorType, symbol
from moesaic.passes.manager import parse_pipeline
from moesaic.passes.save_products import SaveProducts
from moesaic.passes.specialize import Specialize
from moesaic.runtime import launcher, logs
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.explain import TOKENS, Explanation, explain
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.main_grads import added_by_autograd, by_number
from moesaic.runtime.measure import can_measure, kernel_times, measured_card, target_here
from moesaic.runtime.memory import Memory, memory_of
from moesaic.runtime.program import Executable, Program, program_by_key, program_of, with_gradients
from moesaic.runtime.reference import TORCH_DTYPES, evaluate
from moesaic.runtime.torch_ops import record

if TYPE_CHECKING:
    from moesaic.codegen.nvrtc import CompiledKernel
    from moesaic.codegen.resources import Resources
    from moesaic.runtime.experts import CompiledExperts
    from moesaic.runtime.moe import CompiledMoE

BACKENDS = ("auto", "cuda", "emulate", "reference")

_TOKENS = symbol("T")
_is_compiling = torch.compiler.is_compiling

_cuda = RUNNERS["cuda"]

_DTYPES = {t: d for d, t in TORCH_DTYPES.items()}


class Options(TypedDict, total=False):
    """What `compile` takes beside a declaration."""

    target: str | Target | None
    backend: str
    recompute: str | None
    allow_tf32: bool
    passes: str
    tune: bool


@overload
def compile(what: MoE, **options: Unpack[Options]) -> CompiledMoE: ...
@overload
def compile(what: Experts, **options: Unpack[Options]) -> CompiledExperts: ...
@overload
def compile(what: Router | Module, **options: Unpack[Options]) -> CompiledLayer: ...
def compile(
    what: Router | Experts | MoE | Module,
    *,
    target: str | Target | None = None,
    backend: str = "auto",
    recompute: str | None = None,
    allow_tf32: bool = False,
    passes: str = "",
    tune: bool = False,
) -> CompiledLayer | CompiledExperts | CompiledMoE:
    """Compiles a declared layer.

    Nothing is built before the first call (or ``warmup``, or a look inside).

    Args:
        what: a :class:`Router`, :class:`Experts`, :class:`MoE`, or a module from ``moesaic.parse`` or
            ``moesaic.Builder``.
        target: the GPU architecture to look at (``"sm_90a"``); calls on a GPU compile for the tensors' device.
        backend: ``"auto"`` follows the tensors (CUDA tensors run on ``cuda``, CPU tensors on ``reference``), unless
            ``MOESAIC_BACKEND`` names another; ``"emulate"`` runs the generated CUDA on the CPU.
        recompute: ``"h"`` if backward is to compute the first product of experts again instead of keeping it: of what
            forward makes, only the dispatch, logits and weights of picks are kept then.
        allow_tf32: whether products of float32 operands may round them to tf32 (10 bits of mantissa), which tensor
            cores multiply. Sums stay in float32. The reference does not round.
        passes: options of passes in place of the compiler's choices, written as in a pipeline, say
            ``"specialize{lanes=8}"``: for measuring one choice against another.
        tune: whether the first call on a GPU with numbers of tokens of a kind tunes the kernels that it runs, if no
            table knows them; see ``moesaic.autotune``, which does so beforehand. Such a call takes up to
            ``MOESAIC_AUTOTUNE_BUDGET`` seconds.

    Raises:
        InputError: an unknown backend, target or `recompute`.
        InputTypeError: `what` is not a declaration.
        UsageError: `passes` names an unknown pass or option.
    """
    logs.configure()
    if not isinstance(what, Router | Experts | MoE | Module):
        raise InputTypeError(
            f"compile takes a Router, Experts, a MoE or a Module, found {type(what).__name__}; text goes through "
            "moesaic.parse(text)"
        )
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}{suggestion(backend, BACKENDS)}; known: {', '.join(BACKENDS)}")
    if isinstance(target, str):
        target = Target.parse(target)
    chosen = _chosen(passes, recompute, allow_tf32)
    if isinstance(what, Experts):
        from moesaic.runtime.experts import CompiledExperts  # which is made of layers like the one below

        return CompiledExperts(what, target, backend, chosen, tune)
    if isinstance(what, MoE):
        from moesaic.runtime.moe import CompiledMoE

        return CompiledMoE(what, target, backend, chosen, tune)
    return CompiledLayer(what, target, backend, chosen, tune)


def _chosen(passes: str, recompute: str | None, allow_tf32: bool) -> str:
    """The passes that run with options, as pipeline text."""
    named = {p.name: p for p in parse_pipeline(passes)}
    if recompute is not None:
        check_choice("recompute", recompute, ("h",))
        saving = named.get(SaveProducts.name, SaveProducts())
        assert isinstance(saving, SaveProducts)
        named[saving.name] = replace(saving, recompute=recompute)
    if allow_tf32:
        specializing = named.get(Specialize.name, Specialize())
        assert isinstance(specializing, Specialize)
        named[specializing.name] = replace(specializing, allow_tf32=True)
    return ",".join(map(str, named.values()))


class Input(NamedTuple):
    """An input as plain values, which torch.compile can follow.

    Attributes:
        name: of it.
        text: its type, for messages.
        kind: ``rows`` (one for each token), ``sequences`` (one for each sequence; made from the shape of the logits if
            it is not given), ``slots`` (one for each slot), ``vector`` or ``number``.
        columns: its shape, without the axis of tokens.
        dtype: what it has to be.
        type_name: the same, as users write it.
    """

    name: str
    text: str
    kind: str
    columns: tuple[int, ...]
    dtype: torch.dtype
    type_name: str

    @classmethod
    def of(cls, name: str, declared: TensorType) -> Input:
        kinds = {"T": "rows", "N": "sequences", "M": "slots"}
        kind = kinds.get(declared.leading, "vector" if declared.rank else "number")
        columns = tuple(d for d in declared.shape if isinstance(d, int))
        return cls(name, str(declared), kind, columns, TORCH_DTYPES[declared.dtype], declared.dtype.public_name)


@dataclass(frozen=True, eq=False)
class Signature:
    """What a call has to know of a program, as plain values."""

    program: Program
    inputs: tuple[Input, ...]
    columns: int
    has_rows: tuple[bool, ...]
    segments: str
    """How the tokens of sequences lie in the logits, if anything is computed by sequence; else empty."""
    matrices: tuple[tuple[str, int], ...]
    """The inputs that are weights of products, and biases of experts, with their numbers."""
    sequences: str
    """The input that has a row for each sequence and nothing in it, and is made from the logits' shape; empty if none
    is."""


_signatures: dict[str, Signature] = {}


@torch.compiler.assume_constant_result
def signature_of(handle: str) -> Signature:
    """The signature of a program by its handle. Under torch.compile it runs while tracing: the handle, which torch
    guards, decides everything in it."""
    found = _signatures.get(handle)
    if found is None:
        program = program_by_key(handle)
        function = program.function
        first = function.arguments[0].type
        columns = first.shape[-1] if first.rank == 2 else None
        if not isinstance(columns, int):
            raise InputError(
                f"the first input of @{function.name} must be rows [T, E] with a constant E, found {first}"
            )
        found = _signatures[handle] = Signature(
            program=program,
            inputs=tuple(Input.of(a.name, a.type) for a in function.arguments),
            columns=columns,
            has_rows=tuple(t.leading == "T" for t in function.result_types),
            segments=_segments(function),
            matrices=tuple(
                (a.name, number)
                for number, a in enumerate(function.arguments)
                if a.type.rank > 1 and isinstance(a.type.shape[0], int)
            ),
            sequences=next((a.name for a in function.arguments if _is_only_a_number_of_sequences(a.type)), ""),
        )
    return found


def _segments(function: Function) -> str:
    found = {str(op.attributes["segments"]) for op in function.body.ops if op.attributes.get("segments")}
    if len(found) > 1:
        raise InputError(f"@{function.name} computes by sequence in two orders of tokens: {', '.join(sorted(found))}")
    return found.pop() if found else ""


def _is_only_a_number_of_sequences(type: TensorType) -> bool:
    return type.leading == "N" and type.shape[1:] == (0,)


@torch.compiler.assume_constant_result
def has_backward(handle: str) -> bool:
    """Whether a gradient reaches an input. Lowers the program, which the reference must not depend on."""
    return _has_backward(handle)


@functools.cache
def _has_backward(handle: str) -> bool:
    program = program_by_key(handle)
    return program.backward_function(program.float_results) is not None


@torch.compiler.assume_constant_result
def resolve_backend(asked: str, device: str, dtype: torch.dtype) -> str:
    """The backend that runs tensors of a device and dtype.

    Raises:
        InputError: the backend asked for cannot.
    """
    backend = asked
    if asked == "auto" and environment.BACKEND.name in os.environ:
        backend = environment.BACKEND.get()
    if backend == "auto":
        backend = "cuda" if device == "cuda" else "reference"
    if backend == "cuda" and device != "cuda":
        raise InputError(f"backend 'cuda' needs CUDA tensors, found logits on {device!r}")
    if backend == "emulate" and device != "cpu":
        raise InputError(f"backend 'emulate' needs CPU tensors, found logits on {device!r}")
    if backend != "reference" and dtype == torch.float64:
        raise InputError(f"float64 logits run on backend 'reference' only, not on {backend!r}")
    return backend


_traced: dict[tuple[str, str], str] = {}
"""Where programs run in graphs of torch.compile, by handle and the backend asked for; equal layers share a graph."""


@torch.compiler.assume_constant_result
def _note_traced(handle: str, asked: str, backend: str) -> bool:
    _traced[handle, asked] = backend
    return True


def _asked(
    handle: str, passes: str, tensors: Sequence[torch.Tensor], mains: Mapping[int, torch.Tensor] | None = None
) -> str:
    """The handle of the same function with a backward for the matrices that take a gradient: the product that makes one
    costs as much as the layer's own. Those in `mains`, by number, have a sum that theirs is added to."""
    signature = signature_of(handle)
    if not signature.matrices:
        return handle
    without = [name for name, number in signature.matrices if not tensors[number].requires_grad]
    into = [n for n, number in signature.matrices if number in mains and n not in without] if mains else ()
    return _with_gradients(handle, passes, ",".join(into), ",".join(without)) if into or without else handle


@torch.compiler.assume_constant_result
def _with_gradients(handle: str, passes: str, into: str, without: str) -> str:
    """`with_gradients`, from plain constants."""
    return with_gradients(
        handle, passes, tuple(into.split(",")) if into else (), tuple(without.split(",")) if without else ()
    )


class CompiledLayer:
    """A layer that runs on tensors.

    Call it with the logits [T, E] (leading dimensions are kept) and the declared inputs by name. The result unpacks in
    declared order and has a field for each output, and after them ``losses``, a mapping, if any are declared. Gradients
    flow to every input they reach.

    A router also takes ``token_mask``, bool, in the shape of the logits without experts: tokens where it is false get
    indices -1 and weights 0, and have no share in counts, losses or gradients. Losses by sequence need logits of three
    dimensions, [N, S, E] or [S, N, E] as declared.

    Where there are matrices, ``main_grads`` maps names of some to float32 tensors: backward adds their gradients there,
    unrounded, and gives autograd none. It is for eager calls.
    """

    def __init__(
        self, declared: Router | Module, target: Target | None, backend: str, passes: str = "", tune: bool = False
    ) -> None:
        self._declared = declared
        self._target = target
        self._asked = backend
        self._passes = passes
        self._tune = tune
        self._declared_dtype = _declared_dtype(declared)
        self._native: Any = None  # a `Caller` of the native launcher, and the backend that it stands for
        self._native_backend = ""
        self._ran: str | None = None
        self._last: torch.dtype | None = None
        # By dtype of the logits. Complete from the start, so that torch.compile finds nothing to do but look one up.
        self._handles: dict[torch.dtype, str] = {
            TORCH_DTYPES[dtype]: _program_for(declared, dtype, passes).key for dtype in self._dtypes()
        }
        self._masked_handles: dict[torch.dtype, str] = {}
        self._losses: tuple[str, ...] = ()
        if isinstance(declared, Router):
            self._masked_handles = {
                TORCH_DTYPES[dtype]: _program_for(declared, dtype, passes, masked=True).key for dtype in self._dtypes()
            }
            self._losses = tuple(declared.losses)
        if tune:
            _cuda.tuned_first |= {*self._handles.values(), *self._masked_handles.values()}
        names = declared.outputs if isinstance(declared, Router) else tuple(declared.entry.result_names)
        losses = [LOSS_PREFIX + n for n in self._losses]
        self._result_type = result_type("Routing", (*names, "losses") if losses else names)
        self._flat_type = result_type("Routing", (*names, *losses)) if losses else self._result_type

    def _dtypes(self) -> list[DType]:
        declared = self._declared_dtype
        if declared in (None, DType.F64):
            return [DType.BF16, DType.F16, DType.F32, DType.F64]
        return [declared, DType.F64]  # float64 is for the reference, whatever was declared

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._declared, Router):
            check_can_pickle("score", self._declared.score)
        declared = self._declared if isinstance(self._declared, Router) else str(self._declared)
        target = None if self._target is None else self._target.name
        return _restore, (declared, target, self._asked, self._passes, self._tune)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLayer:
        return CompiledLayer(self._declared, self._target, self._asked, self._passes, self._tune)

    # ------------------------------------------------------------------------------------------------- running

    @property
    def backend(self) -> str:
        """The backend of the last call; before any, the one asked for."""
        if self._ran is not None:
            return self._ran
        handles = (*self._handles.values(), *self._masked_handles.values())
        return next((_traced[h, self._asked] for h in handles if (h, self._asked) in _traced), self._asked)

    def __call__(self, *args: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Runs the layer; see the class.

        Raises:
            InputTypeError: an input is missing, was not declared, or is not a tensor.
            InputError: an input has the wrong shape, dtype or device.
        """
        if not _is_compiling():  # which torch.compile knows to be false
            native = self._native
            if native is not None and _cuda.session is None:
                result = native(args, inputs)
                if result is not None:
                    self._ran, self._last = self._native_backend, args[0].dtype
                    if type(result) is not list:
                        return self._named(result) if self._losses else result
                    key = (self._masked_handles if "token_mask" in inputs else self._handles)[self._last]
                    if has_backward(key):  # inputs, to be recorded by autograd
                        outputs = record(_asked(key, self._passes, result), self._native_backend, result)
                        return self._named(outputs[: len(self._flat_type._fields)])
        if not args and "logits" in inputs:
            args = (inputs.pop("logits"),)
        if len(args) != 1:
            raise InputTypeError(f"pass the logits first and other inputs by name; found {len(args)} positional inputs")
        logits = args[0]
        if not isinstance(logits, torch.Tensor):
            raise InputTypeError(f"logits must be a tensor, found {type(logits).__name__}")
        handles = self._handles
        if self._masked_handles and "token_mask" in inputs:
            if inputs["token_mask"] is None:
                del inputs["token_mask"]
            else:
                handles = self._masked_handles
        handle = handles.get(logits.dtype)
        if handle is None:
            handle = self._other_dtype(logits.dtype)
        main_grads = inputs.pop("main_grads", None)
        if main_grads and _is_compiling():
            raise InputError("main_grads are written in place, outside of what torch.compile may see; call eagerly")
        signature = signature_of(handle)
        backend = resolve_backend(self._asked, logits.device.type, logits.dtype)
        tensors = _bind(signature, logits, inputs)
        if _is_compiling():  # where to change the layer is a side effect, which checkpointing may not have
            _note_traced(handle, self._asked, backend)
        else:
            self._ran = backend
        mains: dict[int, torch.Tensor] = {}
        if main_grads:
            names = [n for n, _ in signature.matrices]
            mains = by_number([i.name for i in signature.inputs], tensors, names, main_grads)
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        training = recorded and backend != "reference" and has_backward(handle)
        if training:
            handle = _asked(handle, self._passes, tensors, mains)
        if backend == "reference":
            outputs = _evaluate(handle, added_by_autograd(tensors, mains) if mains else tensors)
        elif torch.compiler.is_compiling():
            outputs = torch.ops.moesaic.forward(handle, backend, training, tensors)
        else:
            self._last = logits.dtype
            _refuse_transforms(tensors)
            if mains and _must_dispatch(tensors):
                raise InputError("main_grads are for plain tensors and modes: nothing may watch the call")
            if _must_dispatch(tensors) or (recorded and not training):
                outputs = torch.ops.moesaic.forward(handle, backend, training, tensors)
            else:
                # Nobody watching: the same runner without the dispatcher's cost.
                if training:
                    outputs = record(handle, backend, tensors, mains)
                else:
                    outputs = RUNNERS[backend].run(signature.program, "forward", (), tensors)
                if self._native is None and launcher.is_built():
                    self._make_native(backend, logits)
        if logits.dim() == 2:
            results = outputs[: len(signature.has_rows)]
        else:
            leading = logits.shape[:-1]
            results = [
                o.reshape(*leading, *o.shape[1:]) if rows else o
                for o, rows in zip(outputs, signature.has_rows, strict=False)
            ]
        return self._named(results)

    def _named(self, results: Sequence[torch.Tensor]) -> Any:
        """The results of the function as the call's: outputs by name, then losses as a mapping."""
        if not self._losses:
            return self._result_type(*results)
        first = len(results) - len(self._losses)
        return self._result_type(*results[:first], dict(zip(self._losses, results[first:], strict=True)))

    def _make_native(self, backend: str, logits: torch.Tensor) -> None:
        """Has calls on such a device go through the native launcher, if the backend does."""
        variants = []
        for dtype, handle in (*self._handles.items(), *self._masked_handles.items()):
            if dtype == torch.float64:  # runs on the reference only
                continue
            signature = signature_of(handle)
            table = RUNNERS[backend].table(signature.program, "forward", ())
            if table is None:
                return
            inputs = tuple(
                (
                    argument.name,
                    tuple(map(_native_size, argument.type.shape)),
                    torch.empty(0, dtype=TORCH_DTYPES[argument.type.dtype], device="cpu"),
                )
                for argument in signature.program.function.arguments
            )
            variants.append((inputs, signature.has_rows, table))
        types = launcher.module()
        assert types is not None
        followed = backend if self._asked == "auto" else ""  # what MOESAIC_BACKEND may say
        self._native_backend = backend
        self._native = types.Caller(logits, followed, self._flat_type, tuple(variants))

    def warmup(
        self,
        device: torch.device | str = "cuda",
        *,
        dtype: torch.dtype | str | None = None,
        backward: bool = True,
        token_mask: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        """Lowers, compiles and loads everything a call needs, for contiguous inputs on a device, whatever T.

        Call it before capturing a CUDA graph.

        Args:
            device: where the layer will run.
            dtype: of the logits; needed if the layer was declared without one.
            backward: also prepare the backward functions: with a cotangent for every float result, and for each alone.
            token_mask: prepare calls with a token mask, which run other kernels, instead of calls without.
            frozen: matrices that take no gradient.

        Raises:
            InputError: the layer has no matrix of such a name.
        """
        program = self._program(DType.parse(dtype) if dtype is not None else None, masked=token_mask)
        matrices = tuple(n for n, _ in signature_of(program.key).matrices)
        for name in frozen:
            check_choice("frozen", name, matrices)
        if frozen:
            asked = tuple(name for name in matrices if name in frozen)
            program = program_by_key(with_gradients(program.key, self._passes, (), asked))
        logits_dtype = TORCH_DTYPES[program.function.arguments[0].type.dtype]
        runner = RUNNERS.get(resolve_backend(self._asked, torch.device(device).type, logits_dtype))
        if runner is not None:
            runner.wait_for_native()
        if runner is not None and any(len(i.columns) > 1 for i in signature_of(program.key).inputs):
            runner.prepare_all(program, torch.device(device), backward)  # matrices are too large for trial calls
            return
        if runner is None:  # the reference has nothing to prepare
            return
        for tokens in (1, runner.few_tokens + 1):
            self._warm_up(program, tokens, device, backward)
        runner.prepare_buckets(program, torch.device(device))

    def _warm_up(self, program: Program, tokens: int, device: torch.device | str, backward: bool) -> None:
        """Calls the layer on zeros, forward and backward, so that everything it needs is there."""
        made = {}
        signature = signature_of(program.key)
        lengths = {"rows": (tokens,), "sequences": (1,)}
        for wanted in signature.inputs:
            if wanted.name != signature.sequences:
                shape = (*lengths.get(wanted.kind, ()), *wanted.columns)
                made[wanted.name] = torch.zeros(shape, dtype=wanted.dtype, device=device)
        first, *rest = made.items()
        if signature.segments:  # one sequence
            axis = 0 if signature.segments == "batch_first" else 1
            of_tokens = {wanted.name for wanted in signature.inputs if wanted.kind == "rows"}
            first = (first[0], first[1].unsqueeze(axis))
            rest = [(n, t.unsqueeze(axis) if n in of_tokens else t) for n, t in rest]
        with torch.no_grad():
            self(first[1], **dict(rest))
        if not backward:
            return
        for tensor in (first[1], *dict(rest).values()):
            if tensor.dtype.is_floating_point:
                tensor.requires_grad_()
        with torch.enable_grad():
            result = self(first[1], **dict(rest))
        every = [*result[:-1], *result[-1].values()] if self._losses else result
        floats = [r for r in every if r.requires_grad]
        for used in [floats, *([r] for r in floats if len(floats) > 1)]:
            if used:
                torch.autograd.backward(used, [torch.zeros_like(r) for r in used], retain_graph=True)

    def _other_dtype(self, dtype: torch.dtype) -> str:
        """Raises for logits of a dtype that was not declared."""
        declared = self._declared_dtype
        if not dtype.is_floating_point or dtype not in _DTYPES:
            raise InputError(f"logits must be bf16, fp16 or fp32, found {str(dtype).removeprefix('torch.')}")
        found = _DTYPES[dtype].public_name
        assert declared is not None
        raise InputError(
            f"this layer was declared for {declared.public_name} logits, found {found}; cast the logits, or declare it "
            f"with dtype={found!r} or without a dtype"
        )

    def _program(self, dtype: DType | None = None, *, masked: bool = False) -> Program:
        """The program to look at: of the dtype given, declared, called with last, or float32."""
        last = _DTYPES[self._last] if self._last is not None else DType.F32
        return _program_for(self._declared, dtype or self._declared_dtype or last, self._passes, masked=masked)

    # ------------------------------------------------------------------------------------------------- looking

    @property
    def target(self) -> Target:
        """The architecture the views below are for."""
        return self._target or Target.default()

    @property
    def stages(self) -> Mapping[str, str]:
        """IR text after each pass that changed something, by pass; the first is ``declared``."""
        stages = dict(self._program().lower("training").stages)
        stages["specialize"] = "\n".join(str(e.module) for e in self._views())
        return stages

    def ir(self, stage: str = "specialize") -> str:
        """IR text of one stage.

        Raises:
            InputError: there is no such stage; the message names them.
        """
        stages = self.stages
        if stage not in stages:
            raise InputError(f"no stage {stage!r}{suggestion(stage, stages)}; stages: {', '.join(stages)}")
        return stages[stage]

    @property
    def warnings(self) -> list[str]:
        """What the compiler thinks was not meant."""
        return self._program().lower("training").context.warnings

    @property
    def remarks(self) -> list[str]:
        """Decisions of the passes, one line each."""
        return self._program().lower("training").context.remarks

    @property
    def kernels(self) -> Mapping[str, GeneratedKernel]:
        """The generated kernels, forward then backward, by symbol."""
        return {k.symbol: k for e in self._views() for k in e.kernels}

    @property
    def source(self) -> str:
        """CUDA text of all kernels."""
        return "\n".join(k.source for k in self.kernels.values())

    @property
    def asm(self) -> Mapping[str, Mapping[str, Any]]:
        """``asm["ptx"]``, ``asm["cubin"]``, ``asm["sass"]``: each by kernel symbol."""
        return _Assembly({s: self._compiled(k) for s, k in self.kernels.items()})

    @property
    def resources(self) -> Mapping[str, Resources]:
        """Registers, spills and shared memory of each kernel, from the compiler's log."""
        return {s: self._compiled(k).resources for s, k in self.kernels.items()}

    @property
    def tuned(self) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """What was tuned for this GPU: by numbers of tokens, such as ``<=4096``, and kernel, the choices that calls
        with contiguous inputs run in place of those that the views here show. Empty without a GPU."""
        if not torch.cuda.is_available():
            return {}
        return _cuda.tuned(self._program(), _cuda.place(torch.device("cuda")))

    def memory(self, tokens: int) -> Memory:
        """What a call with so many tokens allocates, in bytes, in training."""
        return memory_of(self._program(), self.target.name, tokens)

    def explain(
        self, tokens: int = TOKENS, *, training: bool = True, live: float = 1.0, measure: bool | None = None
    ) -> Explanation:
        """What each kernel must move and compute for so many tokens, what it uses of the hardware, and how far from
        its floor it is; prints as a table.

        Args:
            tokens: T.
            training: forward that keeps what backward needs, and backward; else forward alone.
            live: the share of picks that are of experts which are here.
            measure: whether to time kernels in calls on random inputs, on a GPU of the target; ``None``: if there is
                one. Without, rates are those of an H100.

        Raises:
            InputError: a negative number of tokens, a share that is none, or `measure` without such a GPU.
        """
        program, target = self._program(), self._target or target_here() or Target.default()
        if measure is None:
            measure = self._asked in ("auto", "cuda") and can_measure(target)
        elif measure and not can_measure(target):
            raise InputError(f"nothing can be measured: no GPU here runs kernels for {target}")
        if not measure:
            return explain(program, target, tokens, training=training, live=live)
        layer = CompiledLayer(self._declared, self._target, "cuda", self._passes)
        layer._last = self._last
        times = kernel_times(layer, program, tokens, training=training, live=live)
        notes = () if times else ("not measured: the profiler of torch sees no kernels here",)
        device = torch.device("cuda", torch.cuda.current_device())

        def tuned(kind: str, cotangents: tuple[str, ...], bucket: int) -> tuple[str, ...]:
            return RUNNERS["cuda"].usual_points(program, kind, cotangents, bucket, device)

        return explain(
            program,
            target,
            tokens,
            training=training,
            live=live,
            card=measured_card(device.index),
            times=times,
            notes=notes,
            tuned=tuned,
        )

    def _compiled(self, kernel: GeneratedKernel) -> CompiledKernel:
        return compiled_kernel(kernel, self.target)

    def _views(self) -> list[Executable]:
        """Executables for aligned inputs on the target: the training forward, and backward if there is one."""
        program = self._program()
        every = [program.executable("training", self.target.name, ())]
        if program.backward_function(program.float_results) is not None:
            every.append(program.executable("backward", self.target.name, (), program.float_results))
        return every

    def __repr__(self) -> str:
        what = self._declared if isinstance(self._declared, Router) else f"@{self._declared.entry.name}"
        return f"CompiledLayer({what}, backend={self.backend!r})"


class _Assembly(Mapping[str, Mapping[str, Any]]):
    """Views of compiled kernels, made when asked for: disassembly needs a tool that may not be there."""

    _KINDS = ("ptx", "cubin", "sass")

    def __init__(self, compiled: Mapping[str, CompiledKernel]) -> None:
        self._compiled = compiled

    def __getitem__(self, kind: str) -> Mapping[str, Any]:
        if kind not in self._KINDS:
            raise InputError(f"no assembly {kind!r}{suggestion(kind, self._KINDS)}; known: {', '.join(self._KINDS)}")
        if kind == "sass":
            from moesaic.codegen.disassemble import disassemble

            return {s: disassemble(c.cubin) for s, c in self._compiled.items()}
        return {s: getattr(c, kind) for s, c in self._compiled.items()}

    def __iter__(self) -> Any:
        return iter(self._KINDS)

    def __len__(self) -> int:
        return len(self._KINDS)


def _restore(declared: Router | str, target: str | None, backend: str, passes: str, tune: bool) -> CompiledLayer:
    from moesaic.ir.parser import parse

    made = parse(declared) if isinstance(declared, str) else declared
    return compile(made, target=target, backend=backend, passes=passes, tune=tune)


def _declared_dtype(declared: Router | Module) -> DType | None:
    """The dtype the logits have to have; ``None`` if each call may bring its own."""
    if isinstance(declared, Module):
        return declared.entry.arguments[0].type.dtype
    return DType.parse(declared.dtype) if declared.dtype is not None else None


@functools.cache
def result_type(kind: str, names: tuple[str, ...]) -> type[Any]:
    """The named tuple that a layer's call returns."""
    return namedtuple(kind, names)


@functools.lru_cache(maxsize=2048)
def _router_program(router: Router, dtype: DType, passes: str, masked: bool) -> Program:
    return program_of(router.module(dtype, masked=masked), passes)


def _program_for(declared: Router | Module, dtype: DType, passes: str, *, masked: bool = False) -> Program:
    if isinstance(declared, Router):
        return _router_program(declared, dtype, passes, masked)
    return program_of(declared, passes)


@torch._dynamo.allow_in_graph
def _evaluate(handle: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The reference. torch.compile does not look inside; the torch functions it calls become the graph."""
    function = program_by_key(handle).function
    return evaluate(function, {a.name: t for a, t in zip(function.arguments, tensors, strict=True)})


def check_can_pickle(what: str, function: object) -> None:
    """Raises, with what to do, if a function in a declaration is one that pickle cannot find by its name."""
    if function is None or isinstance(function, str):
        return
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise InputError(
            f"this layer cannot be pickled, because its {what} {name} is a lambda or a function made inside another "
            f"one, which pickle cannot store; define the {what} with def at the top of a module"
        ) from error


def _refuse_transforms(tensors: Sequence[torch.Tensor]) -> None:
    """Raises under transforms that would pass our gradients by, some of them without a word."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        kind = interpreter.key()
        if kind == torch._C._functorch.TransformType.Grad:
            raise UnsupportedError(
                "torch.func.grad, vjp and jacrev over a compiled layer are not available; use torch.autograd.grad or "
                "backward(), or backend='reference'"
            )
        if kind == torch._C._functorch.TransformType.Jvp:
            raise UnsupportedError(_NO_FORWARD_MODE)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(_NO_FORWARD_MODE)


_NO_FORWARD_MODE = (
    "forward-mode derivatives of a compiled layer are not available; use reverse mode (torch.autograd.grad or "
    "backward()), or backend='reference'"
)


def _must_dispatch(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch has to see the call: a mode or a transform (fake tensors, vmap, a profiler of operators), or a
    tensor whose memory does not hold its values (a lazy negation)."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for tensor in tensors:  # not `any` of a generator, which takes as long as all the rest here
        kind = type(tensor)
        if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or tensor.is_neg():
            return True
    return False


def _bind(signature: Signature, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the order of the function's inputs, checked, with rows that are dense inside."""
    if logits.dim() < 1 or logits.shape[-1] != signature.columns:
        name = signature.inputs[0].name
        raise InputError(f"{name} must have shape [..., {signature.columns}], found {list(logits.shape)}")
    rows = logits if logits.dim() == 2 else logits.reshape(-1, signature.columns)
    tensors = [_dense_rows(rows)]
    made = 0
    for wanted in signature.inputs[1:]:
        given = inputs.get(wanted.name)
        sequences = _sequences(signature, logits) if wanted.kind == "sequences" else 0
        if given is None and wanted.name == signature.sequences:
            # An empty batch counts as one empty sequence, here and below.
            tensors.append(logits.new_empty((sequences or 1, 0), dtype=torch.float32))
            made += 1
            continue
        if given is None:
            if wanted.kind == "sequences":
                tensors.append(_sequences(signature, logits))
                made += 1
                continue
            _refuse_undeclared(signature, inputs)  # a slip of the pen is the likeliest reason
            raise InputTypeError(f"input {wanted.name!r} ({wanted.text}) is missing")
        leading = (sequences,) if wanted.kind == "sequences" else tuple(logits.shape[:-1])
        checked = _checked(wanted, given, rows, leading)
        if wanted.kind == "sequences" and sequences == 0:
            checked = checked.new_zeros((1, *wanted.columns))
        tensors.append(_dense_rows(checked))
    if len(inputs) >= len(tensors) - made:
        _refuse_undeclared(signature, inputs)
    return tensors


def _native_size(dim: Dim) -> int:
    """A dimension for the native launcher: -1 is T; what it does not know becomes a size that no tensor has."""
    if isinstance(dim, Affine):
        return -1 if dim == _TOKENS else -2
    return dim


def _sequences(signature: Signature, logits: torch.Tensor) -> int:
    """N, from the shape of the logits."""
    axis = 0 if signature.segments == "batch_first" else 1
    if logits.dim() != 3:
        order = "[N, S, E]" if axis == 0 else "[S, N, E]"
        raise InputError(
            f"a loss by sequence is declared, {signature.segments}: {signature.inputs[0].name} must have the shape "
            f"{order}, found {list(logits.shape)}"
        )
    return logits.shape[axis]


def _refuse_undeclared(signature: Signature, inputs: Mapping[str, torch.Tensor]) -> None:
    known = [wanted.name for wanted in signature.inputs[1:]]
    for name in inputs:
        if name not in known:
            raise InputTypeError(
                f"input {name!r} was not declared{_suggestion(name, known)}; declared: {', '.join(known) or 'none'}"
            )


# torch.compile cannot trace a search for near misses, and would report that in place of our error.
_suggestion = torch.compiler.assume_constant_result(suggestion)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a row must be next to each other; rows may be anywhere."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    if tensor.layout is not torch.strided:
        raise InputError(f"inputs must be dense tensors, found layout {tensor.layout}; call to_dense() on it")
    return tensor.contiguous()


def as_number(name: str, given: object, rows: torch.Tensor) -> torch.Tensor:
    """A number, or a tensor of one, as a float scalar on the device of `rows`; without a synchronisation.

    Raises:
        InputTypeError: it is neither.
        InputError: it is a tensor of more than one element, or of none.
    """
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            raise InputError(f"{name} must be a number or a tensor of one element, found shape {list(given.shape)}")
        return given.reshape(()).to(dtype)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InputTypeError(f"{name} must be a number or a tensor of one element, found {type(given).__name__}")
    return rows.new_full((), float(given), dtype=dtype)


def _checked(wanted: Input, given: object, rows: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    """An input as the function takes it; `leading` is what stands in a call for the T or N of its rows."""
    name = wanted.name
    if wanted.kind == "number":
        given = as_number(name, given, rows)
    if not isinstance(given, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {type(given).__name__}")
    tensor: torch.Tensor = given
    has_rows = wanted.kind in ("rows", "sequences")
    expected = [*leading, *wanted.columns] if has_rows else [*wanted.columns]
    if wanted.kind == "slots":
        expected = [*tensor.shape[:1], *wanted.columns]
    if list(tensor.shape) != expected:
        raise InputError(f"{name} must have shape {expected}, found {list(tensor.shape)}")
    if wanted.kind == "rows" and len(leading) != 1:
        tensor = tensor.reshape(rows.shape[0], *wanted.columns)
    wide = tensor.dtype == torch.float64 and rows.dtype == torch.float64
    if tensor.dtype != wanted.dtype and not wide:
        known = _DTYPES.get(tensor.dtype)
        found = known.public_name if known is not None else str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} must be {wanted.type_name}, found {found}")
    if tensor.device != rows.device:
        raise InputError(f"{name} is on {tensor.device}, but logits are on {rows.device}; move one of them")
    return tensor
