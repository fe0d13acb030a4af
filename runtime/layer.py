"""A compiled layer: from the tensors of a call to its results, by whatever runs them, and what prepares for that."""

from __future__ import annotations

import functools
import keyword
import pickle
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from moesaic.codegen.target import Target
from moesaic.ir.core import Module
from moesaic.ir.declare import LOSS_PREFIX, Router
from moesaic.ir.errors import InputError, InputTypeError, check_choice
from moesaic.ir.types import Affine, Dim, DType, symbol
from moesaic.runtime import launcher
from moesaic.runtime.backends import note_traced, resolve_backend, traced
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.inputs import bind
from moesaic.runtime.layer_views import LayerViews
from moesaic.runtime.main_grads import added_by_autograd, by_number
from moesaic.runtime.program import Program, program_by_key, program_of, with_gradients
from moesaic.runtime.reference import DTYPES, TORCH_DTYPES, evaluate
from moesaic.runtime.signature import for_wanted_gradients, has_backward, signature_of
from moesaic.runtime.torch_ops import record
from moesaic.runtime.traced import announce, in_graph
from moesaic.runtime.transforms import must_dispatch, refuse_transforms

_TOKENS = symbol("T")
_is_compiling = torch.compiler.is_compiling

_cuda = RUNNERS["cuda"]


class CompiledLayer(LayerViews):
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
        super().__init__(target, backend)
        self._declared = declared
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
        return next((traced[h, self._asked] for h in handles if (h, self._asked) in traced), self._asked)

    def __call__(self, /, *args: torch.Tensor, **inputs: torch.Tensor) -> Any:
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
                        outputs = record(for_wanted_gradients(key, self._passes, result), self._native_backend, result)
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
        tensors = bind(signature, logits, inputs)
        if _is_compiling():  # where to change the layer is a side effect, which checkpointing may not have
            note_traced(handle, self._asked, backend)
        else:
            self._ran = backend
        mains: dict[int, torch.Tensor] = {}
        if main_grads:
            names = [n for n, _ in signature.matrices]
            mains = by_number([i.name for i in signature.inputs], tensors, names, main_grads)
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        training = recorded and backend != "reference" and has_backward(handle)
        if training:
            handle = for_wanted_gradients(handle, self._passes, tensors, mains)
        if backend == "reference":
            if _is_compiling():
                announce()
            outputs = _evaluate(handle, added_by_autograd(tensors, mains) if mains else tensors)
        elif torch.compiler.is_compiling():
            outputs = torch.ops.moesaic.forward(handle, backend, training, tensors)
        else:
            self._last = logits.dtype
            refuse_transforms(tensors)
            if mains and must_dispatch(tensors):
                raise InputError("main_grads are for plain tensors and modes: nothing may watch the call")
            if must_dispatch(tensors) or (recorded and not training):
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
                o.reshape((*leading, *o.shape[1:])) if rows else o
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
        if not dtype.is_floating_point or dtype not in DTYPES:
            raise InputError(f"logits must be bf16, fp16 or fp32, found {str(dtype).removeprefix('torch.')}")
        found = DTYPES[dtype].public_name
        assert declared is not None
        raise InputError(
            f"this layer was declared for {declared.public_name} logits, found {found}; cast the logits, or declare it "
            f"with dtype={found!r} or without a dtype"
        )

    def _program(self, dtype: DType | None = None, *, masked: bool = False) -> Program:
        """The program to look at: of the dtype given, declared, called with last, or float32."""
        last = DTYPES[self._last] if self._last is not None else DType.F32
        return _program_for(self._declared, dtype or self._declared_dtype or last, self._passes, masked=masked)

    def _on(self, backend: str) -> CompiledLayer:
        layer = CompiledLayer(self._declared, self._target, backend, self._passes)
        layer._last = self._last
        return layer

    def __repr__(self) -> str:
        what = self._declared if isinstance(self._declared, Router) else f"@{self._declared.entry.name}"
        return f"CompiledLayer({what}, backend={self.backend!r})"


def _restore(declared: Router | str, target: str | None, backend: str, passes: str, tune: bool) -> CompiledLayer:
    from moesaic.ir.parser import parse

    made = parse(declared) if isinstance(declared, str) else declared
    return CompiledLayer(made, None if target is None else Target.parse(target), backend, passes, tune)


def _declared_dtype(declared: Router | Module) -> DType | None:
    """The dtype the logits have to have; ``None`` if each call may bring its own."""
    if isinstance(declared, Module):
        entry = declared.entry
        if not entry.arguments:
            raise InputError(f"@{entry.name} has no input; the first one must be rows [T, E]")
        for name in entry.result_names:
            if keyword.iskeyword(name) or name.startswith("_"):
                raise InputError(f"@{entry.name}: a result cannot be called {name!r} in Python; name it otherwise")
        return entry.arguments[0].type.dtype
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


@in_graph
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


def _native_size(dim: Dim) -> int:
    """A dimension for the native launcher: -1 is T; what it does not know becomes a size that no tensor has."""
    if isinstance(dim, Affine):
        return -1 if dim == _TOKENS else -2
    return dim
