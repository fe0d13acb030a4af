"""``moesaic.compile``: from a declaration to something that runs on tensors and can be looked into."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.core import Function, Module
from moesaic.ir.declare import Router
from moesaic.ir.errors import InputError, InputTypeError, suggestion
from moesaic.ir.types import Affine, DType
from moesaic.runtime.program import Executable, Program, program_of

if TYPE_CHECKING:
    import torch

    from moesaic.codegen.nvrtc import CompiledKernel
    from moesaic.codegen.resources import Resources

BACKENDS = ("auto", "cuda", "emulate", "reference")


def compile(what: Router | Module, *, target: str | Target | None = None, backend: str = "auto") -> CompiledLayer:
    """Compiles a declared layer.

    Nothing is built before the first call (or :meth:`CompiledLayer.warmup`, or a look inside).

    Args:
        what: a :class:`Router`, or a module from ``moesaic.parse`` or ``moesaic.Builder``.
        target: the GPU architecture to look at (``"sm_90a"``); calls on a GPU compile for the tensors' device.
        backend: ``"auto"`` follows the tensors (CUDA tensors run on ``cuda``, CPU tensors on ``reference``), unless
            ``MOESAIC_BACKEND`` names another; ``"emulate"`` runs the generated CUDA on the CPU.

    Raises:
        InputError: an unknown backend or target.
        InputTypeError: `what` is not a declaration.
    """
    if not isinstance(what, Router | Module):
        raise InputTypeError(
            f"compile takes a Router or a Module, found {type(what).__name__}; text goes through moesaic.parse(text)"
        )
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}{suggestion(backend, BACKENDS)}; known: {', '.join(BACKENDS)}")
    if isinstance(target, str):
        target = Target.parse(target)
    return CompiledLayer(what, target, backend)


class CompiledLayer:
    """A layer that runs on tensors.

    Call it with the logits [T, E] (leading dimensions are kept) and the declared inputs by name. The result unpacks in
    declared order and has a field for each output. Gradients flow to every input they reach.
    """

    def __init__(self, declared: Router | Module, target: Target | None, backend: str) -> None:
        self._declared = declared
        self._target = target
        self._asked = backend
        self._programs: dict[DType, Program] = {}
        self._last: DType | None = None
        self._results: dict[tuple[str, ...], type[Any]] = {}
        self._ran: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        declared = self._declared if isinstance(self._declared, Router) else str(self._declared)
        return _restore, (declared, None if self._target is None else self._target.name, self._asked)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLayer:
        return CompiledLayer(self._declared, self._target, self._asked)

    # ------------------------------------------------------------------------------------------------- running

    @property
    def backend(self) -> str:
        """The backend of the last call; before any, the one asked for."""
        return self._ran or self._asked

    def __call__(self, *args: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Runs the layer; see the class.

        Raises:
            InputTypeError: an input is missing, was not declared, or is not a tensor.
            InputError: an input has the wrong shape, dtype or device.
        """
        import torch

        program, tensors, leading = self._bind(args, inputs)
        function = program.function
        backend = self._choose_backend(tensors[0])
        if not torch.compiler.is_compiling():
            self._ran = backend
        training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if backend == "reference":
            from moesaic.runtime.reference import evaluate

            outputs = evaluate(function, dict(zip([a.name for a in function.arguments], tensors, strict=True)))
        else:
            import moesaic.runtime.torch_ops  # noqa: F401  (registers the operators)

            training = training and program.backward_function(program.float_results) is not None
            outputs = torch.ops.moesaic.forward(program.key, backend, training, tensors)
        shaped = [
            o.reshape(*leading, *o.shape[1:]) if len(leading) != 1 and _has_rows(t) else o
            for o, t in zip(outputs, function.result_types, strict=False)
        ]
        return self._result_type(function)(*shaped)

    def warmup(self, device: torch.device | str = "cuda", *, dtype: str | None = None, backward: bool = True) -> None:
        """Lowers, compiles and loads everything a call needs, for contiguous inputs on a device.

        Call it before capturing a CUDA graph.

        Args:
            device: where the layer will run.
            dtype: of the logits; needed if the layer was declared without one.
            backward: also prepare the backward function, with a cotangent for every float result.
        """
        import torch

        from moesaic.runtime.reference import TORCH_DTYPES

        program = self._program(DType.parse(dtype) if dtype else None)
        made = {}
        for argument in program.function.arguments:
            shape = [1 if isinstance(d, Affine) else d for d in argument.type.shape]
            made[argument.name] = torch.zeros(shape, dtype=TORCH_DTYPES[argument.type.dtype], device=device)
            if backward and argument.type.dtype.is_float:
                made[argument.name].requires_grad_()
        first, *rest = made.items()
        with torch.enable_grad():
            result = self(first[1], **dict(rest))
        floats = [r for r in result if r.requires_grad]
        if floats:
            torch.autograd.backward(floats, [torch.zeros_like(r) for r in floats])
        with torch.no_grad():
            self(first[1].detach(), **{k: v.detach() for k, v in rest})

    def _bind(
        self, args: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Program, list[torch.Tensor], tuple[int, ...]]:
        """The program for these inputs, the tensors in the order of its arguments, and the leading dimensions."""
        import torch

        if not args and "logits" in inputs:
            args, inputs = (inputs["logits"],), {k: v for k, v in inputs.items() if k != "logits"}
        if len(args) != 1:
            raise InputTypeError(f"pass the logits first and other inputs by name; found {len(args)} positional inputs")
        logits = args[0]
        if not isinstance(logits, torch.Tensor):
            raise InputTypeError(f"logits must be a tensor, found {type(logits).__name__}")
        program = self._program(self._dtype_of(logits))
        function = program.function
        first, *others = function.arguments
        names = [a.name for a in others]
        for name in inputs:
            if name not in names:
                raise InputTypeError(
                    f"input {name!r} was not declared{suggestion(name, names)}; declared: {', '.join(names) or 'none'}"
                )
        columns = first.type.shape[-1]
        if logits.dim() < 1 or logits.shape[-1] != columns:
            raise InputError(
                f"{first.name} must have shape [..., {columns}], found {list(logits.shape)}"
            )
        leading = tuple(logits.shape[:-1])
        rows = logits if logits.dim() == 2 else logits.reshape(-1, columns)
        tensors = [_dense_rows(rows)]
        symbols = {"T": rows.shape[0]}
        for argument in others:
            given = inputs.get(argument.name)
            if given is None:
                raise InputTypeError(f"input {argument.name!r} ({argument.type}) is missing")
            tensors.append(_dense_rows(_checked(argument.name, argument.type, given, logits.device, symbols)))
        return program, tensors, leading

    def _dtype_of(self, logits: torch.Tensor) -> DType:
        found = DType.parse(str(logits.dtype)) if logits.dtype.is_floating_point else None
        if found is None:
            raise InputError(f"logits must be bf16, fp16 or fp32, found {str(logits.dtype).removeprefix('torch.')}")
        declared = self._declared_dtype
        if declared is not None and found is not declared and found is not DType.F64:
            raise InputError(
                f"this layer was declared for {declared.public_name} logits, found {found.public_name}; cast the "
                f"logits, or declare it with dtype={found.public_name!r} or without a dtype"
            )
        return found

    @property
    def _declared_dtype(self) -> DType | None:
        if isinstance(self._declared, Module):
            return self._declared.entry.arguments[0].type.dtype
        return DType.parse(self._declared.dtype) if self._declared.dtype is not None else None

    def _program(self, dtype: DType | None = None) -> Program:
        dtype = dtype or self._declared_dtype or self._last or DType.F32
        self._last = dtype
        if dtype not in self._programs:
            module = self._declared.module(dtype) if isinstance(self._declared, Router) else self._declared
            self._programs[dtype] = program_of(module)
        return self._programs[dtype]

    def _choose_backend(self, logits: torch.Tensor) -> str:
        backend = self._asked
        if backend == "auto":
            backend = environment.BACKEND.get()
        if backend == "auto":
            backend = "cuda" if logits.is_cuda else "reference"
        if backend == "cuda" and not logits.is_cuda:
            raise InputError(f"backend 'cuda' needs CUDA tensors, found logits on {logits.device}")
        if backend == "emulate" and logits.device.type != "cpu":
            raise InputError(f"backend 'emulate' needs CPU tensors, found logits on {logits.device}")
        if backend != "reference" and str(logits.dtype) == "torch.float64":
            raise InputError(f"float64 logits run on backend 'reference' only, not on {backend!r}")
        return backend

    def _result_type(self, function: Function) -> type[Any]:
        names = tuple(function.result_names)
        if names not in self._results:
            self._results[names] = namedtuple("Routing", names)  # type: ignore[misc]  # noqa: PYI024
        return self._results[names]

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

    def _compiled(self, kernel: GeneratedKernel) -> CompiledKernel:
        from moesaic.runtime.execute import compiled_kernel

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


def _restore(declared: Router | str, target: str | None, backend: str) -> CompiledLayer:
    from moesaic.ir.parser import parse

    return compile(parse(declared) if isinstance(declared, str) else declared, target=target, backend=backend)


def _has_rows(type: Any) -> bool:
    return bool(type.rank) and isinstance(type.shape[0], Affine)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a row must be next to each other; rows may be anywhere."""
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _checked(
    name: str, type: Any, given: object, device: torch.device, symbols: Mapping[str, int]
) -> torch.Tensor:
    import torch

    if not isinstance(given, torch.Tensor):
        raise InputTypeError(f"{name} must be a tensor, found {given.__class__.__name__}")
    expected = [symbols.get(str(d), d) for d in type.shape]
    if list(given.shape) != expected:
        raise InputError(f"{name} must have shape {expected}, found {list(given.shape)}")
    found = str(given.dtype).removeprefix("torch.")
    if DType.parse(found) is not type.dtype and not (type.dtype.is_float and found == "float64"):
        raise InputError(f"{name} must be {type.dtype.public_name}, found {DType.parse(found).public_name}")
    if given.device != device:
        raise InputError(f"{name} is on {given.device}, but logits are on {device}; move one of them")
    return given
