"""Compiled kernels for the runtime: from memory, else from the disk, else from NVRTC. Needs neither torch nor a GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from moesaic.codegen import nvrtc, resources
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.runtime import cache, folders
from moesaic.runtime.locks import KeyedLocks

NVRTC_OPTIONS = ("--fmad=false",)
"""Contraction to fused multiply-adds would depend on the code around an expression, hence on the configuration."""

_log = logging.getLogger("moesaic.cache")
_compiled: dict[tuple[str, str, tuple[str, ...]], nvrtc.CompiledKernel] = {}
_locks = KeyedLocks()
_said: set[str] = set()
_dumped: dict[Path, str] = {}  # stem of a dump: the key of what lies there
_dumped_guard = threading.Lock()


def compiled_kernel(kernel: GeneratedKernel, target: Target, *, lineinfo: bool | None = None) -> nvrtc.CompiledKernel:
    """The kernel compiled by NVRTC, once per text, target and options in a process; threads compile side by side.

    `lineinfo` is whether with line information; ``None``: as ``MOESAIC_LINEINFO`` says.

    Raises what `nvrtc.compile_source` raises.
    """
    source = source_of(kernel)
    options = nvrtc.compile_options(target, lineinfo=lineinfo, extra_options=NVRTC_OPTIONS)
    wanted = (kernel.symbol, source, options)
    with _locks.holding(wanted):
        found = _compiled.get(wanted)
        if found is None:
            found = _compiled[wanted] = _obtain(kernel.symbol, source, target, lineinfo)
    if environment.PTXAS_CHECK.get():  # what was compiled before may not have been checked
        nvrtc.check_local_memory(found, source)
    dump_dir = environment.DUMP_DIR.get()
    if dump_dir is not None:
        _dump(dump_dir, source, found)
    return found


def source_of(kernel: GeneratedKernel) -> str:
    """The kernel's text, or that of the file of its name in ``MOESAIC_OVERRIDE_DIR``."""
    folder = environment.OVERRIDE_DIR.get()
    if folder is None:
        return kernel.source
    path = folder / f"{kernel.symbol}.cu"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return kernel.source
    _say_once(f"{path} is used instead of the generated text, because {environment.OVERRIDE_DIR.name} is set")
    return text


def key_of(
    symbol: str,
    source: str,
    target: Target,
    extra_options: Sequence[str] = NVRTC_OPTIONS,
    lineinfo: bool | None = None,
) -> cache.KernelKey:
    """The key of a kernel in the cache. Raises `ToolchainError` if NVRTC or the headers are missing."""
    major, minor = nvrtc.nvrtc_version()
    return cache.KernelKey(
        symbol=symbol,
        target=target.name,
        source_sha256=cache.sha256(source),
        options=nvrtc.compile_options(target, lineinfo=lineinfo, extra_options=extra_options),
        nvrtc=f"{major}.{minor}, {_library_bytes()} bytes",
        headers=nvrtc.header_digest(),
    )


def _obtain(symbol: str, source: str, target: Target, lineinfo: bool | None) -> nvrtc.CompiledKernel:
    def make() -> cache.Content:
        made = nvrtc.compile_source(source, name=symbol, target=target, lineinfo=lineinfo, extra_options=NVRTC_OPTIONS)
        return cache.Content(
            {f"{symbol}.cu": source.encode(), f"{symbol}.cubin": made.cubin, f"{symbol}.ptx": made.ptx.encode()},
            {"log": made.log, "resources": _resources(made), "seconds": round(made.seconds, 4)},
        )

    key = key_of(symbol, source, target, lineinfo=lineinfo)
    stored = cache.obtain(key, make)
    log = stored.facts["log"]
    include_dirs = [*nvrtc.helper_include_dirs(), *nvrtc.cuda_include_dirs()]
    return nvrtc.CompiledKernel(
        name=symbol,
        target=target,
        cubin=stored.files[f"{symbol}.cubin"],
        ptx=stored.files[f"{symbol}.ptx"].decode(),
        log=log,
        entries=resources.parse_ptxas_log(log),
        options=(*key.options, *(f"--include-path={folder}" for folder in include_dirs)),
        seconds=stored.facts["seconds"],
    )


def _resources(made: nvrtc.CompiledKernel) -> dict[str, dict[str, int]]:
    return {entry: dataclasses.asdict(used) for entry, used in made.entries.items()}


@functools.cache
def _library_bytes() -> int:
    """The size of NVRTC, which tells patch releases apart: it only states its minor version."""
    path = nvrtc.nvrtc_path()
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning(text)


def _dump(folder: Path, source: str, made: nvrtc.CompiledKernel) -> None:
    """Writes a kernel for reading; a second kernel of one name in this process gets a part of its digest in its name.

    The plain name is what `MOESAIC_OVERRIDE_DIR` looks for. Never raises: a dump must not stop what it is about.
    """
    identity = cache.sha256(cache.canonical_json([made.target.name, made.options, source]))
    with _dumped_guard:
        stem = folder / made.name
        if _dumped.get(stem, identity) != identity:
            stem = folder / f"{made.name}-{identity[:8]}"
        if stem in _dumped:
            return
        _dumped[stem] = identity
        report = {"kernel": made.name, "target": made.target.name, "seconds": made.seconds, "entries": _resources(made)}
        try:
            folders.make_private(folder)
            _replace(stem.with_name(f"{stem.name}.cu"), source.encode())
            _replace(stem.with_name(f"{stem.name}.ptx"), made.ptx.encode())
            _replace(stem.with_name(f"{stem.name}.cubin"), made.cubin)
            _replace(stem.with_name(f"{stem.name}.resources.json"), (json.dumps(report, indent=2) + "\n").encode())
        except OSError as error:
            _say_once(f"{environment.DUMP_DIR.name}={folder} cannot be written: {error.strerror or error}")


def _replace(path: Path, content: bytes) -> None:
    """Writes a file in one step: of several processes that dump the same kernel, the last one wins."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
