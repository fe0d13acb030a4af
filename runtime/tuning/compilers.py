"""Compiles candidates in processes beside this one, as many as the user allows.

The processes fill the disk cache, from which a kernel is then loaded. They are started as plain commands, not forked:
CUDA does not survive a fork, and a user's script need not guard itself against being imported again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import MoesaicError
from moesaic.runtime import cache
from moesaic.runtime.kernels import compiled_kernel
from moesaic.runtime.side_by_side import cores

_MOST_WORKERS = 8
_FEW_BYTES = 64  # of local memory, of a thread: a few registers that wait there for a tile to be over take no time


@dataclass(frozen=True)
class Compiled:
    """What is known of machine code without it: its digest, registers of a thread, whether many more lie in memory."""

    cubin_sha256: str
    registers: int
    spills: bool


def workers_allowed(asked: int | None = None) -> int:
    """How many compiles may run side by side: as asked, as ``MOESAIC_TUNE_WORKERS`` says, or one a core up to 8."""
    found = asked if asked is not None else environment.TUNE_WORKERS.get()
    if found is not None:
        return found
    return max(1, min(_MOST_WORKERS, cores()))


def compile_here(kernel: GeneratedKernel, target: Target) -> Compiled | str:
    """In this process; text says why not."""
    try:
        made = compiled_kernel(kernel, target)
    except MoesaicError as error:
        return str(error).partition("\n")[0]
    used = made.resources
    local = max(used.stack_bytes, used.spill_store_bytes)
    return Compiled(cache.sha256(made.cubin), used.registers, local > _FEW_BYTES)


class Compilers:
    """As many processes as `workers`; with one, this process compiles itself."""

    def __init__(self, target: Target, workers: int) -> None:
        self._target = target
        self._workers = workers
        self._started: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._started:
            worker.end()
        self._workers = 1  # what comes late is compiled here

    @property
    def workers(self) -> int:
        """How many."""
        return self._workers

    def compile(self, kernels: Sequence[GeneratedKernel]) -> list[Compiled | str]:
        """Each kernel, or why it does not compile, in order."""
        if self._workers <= 1 or len(kernels) < 2 or environment.DISABLE_CACHE.get():
            return [compile_here(kernel, self._target) for kernel in kernels]
        while len(self._started) < min(self._workers, len(kernels)):
            worker = _Worker()
            self._started.append(worker)
            self._idle.put(worker)
        with ThreadPoolExecutor(len(self._started)) as threads:
            return list(threads.map(self._compile, kernels))

    def _compile(self, kernel: GeneratedKernel) -> Compiled | str:
        worker = self._idle.get()
        try:
            return worker.compile(kernel, self._target)
        finally:
            if not worker.lives:
                worker.end()
                self._started.remove(worker)
                worker = _Worker()
                self._started.append(worker)
            self._idle.put(worker)


class _Worker:
    """One process, and its end of the conversation: a line of JSON each way."""

    def __init__(self) -> None:
        self._dead = False
        command = [sys.executable, "-m", "moesaic.runtime.tuning.compilers"]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # what this process imports
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=found)

    def compile(self, kernel: GeneratedKernel, target: Target) -> Compiled | str:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            request = {"symbol": kernel.symbol, "source": kernel.source, "target": target.name}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError as error:
            answer, reason = "", str(error)
        else:
            reason = f"exit code {self._process.poll()}"
        if not answer:  # it has died of it: out of memory, most likely
            self._dead = True
            return f"the process that compiled it ended ({reason})"
        made: dict[str, Any] = json.loads(answer)
        return str(made["error"]) if "error" in made else Compiled(**made)

    @property
    def lives(self) -> bool:
        """Whether it can compile more."""
        return not self._dead and self._process.poll() is None

    def end(self) -> None:
        """Has it end, or ends it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # it has ended, with something unread
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        kernel = GeneratedKernel(given["symbol"], given["source"], (), 1, 1, "fixed")
        made = compile_here(kernel, Target.parse(given["target"]))
        answer = {"error": made} if isinstance(made, str) else vars(made)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
