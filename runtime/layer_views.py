"""What can be seen of a layer: its IR, its kernels, what they cost, what was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir.errors import InputError, suggestion
from moesaic.ir.types import DType
from moesaic.runtime.execute import RUNNERS
from moesaic.runtime.explain import TOKENS, Explanation, explain
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.measure import can_measure, kernel_times, measured_card, target_here
from moesaic.runtime.memory import Memory, memory_of
from moesaic.runtime.program import Executable, Program
from moesaic.runtime.side_by_side import side_by_side

if TYPE_CHECKING:
    from moesaic.codegen.nvrtc import CompiledKernel
    from moesaic.codegen.resources import Resources
    from moesaic.runtime.measure import Layer

_cuda = RUNNERS["cuda"]


class LayerViews:
    """Base of compiled layers.

    Args:
        target: that was asked for.
        asked: the backend that was asked for.
    """

    def __init__(self, target: Target | None, asked: str) -> None:
        self._target = target
        self._asked = asked

    def _program(self, dtype: DType | None = None, *, masked: bool = False) -> Program:
        """The program to look at."""
        raise NotImplementedError

    def _on(self, backend: str) -> Layer:
        """The same layer for another backend."""
        raise NotImplementedError

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
        return _Assembly(self._all_compiled())

    @property
    def resources(self) -> Mapping[str, Resources]:
        """Registers, spills and shared memory of each kernel, from the compiler's log."""
        return {symbol: made.resources for symbol, made in self._all_compiled().items()}

    @property
    def tuned(self) -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]]:
        """What was tuned for this GPU: by numbers of tokens, such as ``<=4096``, function and kernel, the choices that
        calls with contiguous inputs run in place of those that the views here show.

        Functions are ``forward``, ``training`` (the forward that keeps what backward needs) and ``backward``; kernels
        of the first two share names, and may differ. Empty without a GPU.
        """
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
        times = kernel_times(self._on("cuda"), program, tokens, training=training, live=live)
        notes = () if times else ("not measured: the profiler of torch sees no kernels here",)
        device = torch.device("cuda", torch.cuda.current_device())

        def tuned(kind: str, cotangents: tuple[str, ...], bucket: int) -> tuple[str, ...]:
            return _cuda.usual_points(program, kind, cotangents, bucket, device)

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

    def _all_compiled(self) -> dict[str, CompiledKernel]:
        target, kernels = self.target, self.kernels
        return dict(zip(kernels, side_by_side(lambda k: compiled_kernel(k, target), kernels.values()), strict=True))

    def _views(self) -> list[Executable]:
        """Executables for aligned inputs on the target: the training forward, and backward if there is one."""
        program = self._program()
        every = [program.executable("training", self.target.name, ())]
        if program.backward_function(program.float_results) is not None:
            every.append(program.executable("backward", self.target.name, (), program.float_results))
        return every


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

    def __iter__(self) -> Iterator[str]:
        return iter(self._KINDS)

    def __len__(self) -> int:
        return len(self._KINDS)
