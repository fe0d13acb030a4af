"""What ``moesaic doctor`` finds out about this machine: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.codegen import disassemble, nvrtc
from moesaic.codegen.target import Target
from moesaic.ir import environment
from moesaic.ir.errors import MoesaicError, ToolchainError
from moesaic.runtime import driver, folders
from moesaic.runtime.emulator import toolchain

Status = Literal["ok", "warn", "fail"]

_PROBE = """#include <cuda_bf16.h>
extern "C" __global__ void doctor(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16(1.0f); }
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `warn` costs a feature, `fail` keeps kernels from being compiled; `remedy` is empty if it is ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def checks() -> list[Check]:
    """Look at everything moesaic needs or can use; never raises for what it finds."""
    return [
        _guarded(name, probe)
        for name, probe in (
            ("python", _python),
            ("environment", _environment),
            ("nvrtc", _nvrtc),
            ("headers", _headers),
            ("compile", _compile),
            ("driver", _driver),
            ("gpus", _gpus),
            ("torch", _torch),
            ("c++ compiler", _compiler),
            ("emulator headers", _emulator_headers),
            ("launcher", _launcher),
            ("disassembler", _disassembler),
            ("cache", _cache),
        )
    ]


def table(found: Iterable[Check]) -> str:
    """The findings as text, a line each and a second one where something is to be done. Ends without a newline."""
    listed = list(found)
    width = max((len(check.name) for check in listed), default=0)
    lines = []
    for check in listed:
        lines.append(f"{check.status:4}  {check.name:{width}}  {_indented(check.detail, width + 8)}")
        if check.remedy:
            lines.append(f"{'':{width + 8}}-> {_indented(check.remedy, width + 11)}")
    return "\n".join(lines)


def worst(found: Iterable[Check]) -> Status:
    """The gravest status of all: what an exit code follows."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((check.status for check in found), key=order.index, default="ok")


def _guarded(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except (MoesaicError, OSError) as error:
        return Check(name, "fail", str(error))


def _indented(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)


def _python() -> Check:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    if platform.system() != "Linux":
        return Check("python", "warn", detail, "moesaic is tested on Linux only")
    return Check("python", "ok", detail)


def _environment() -> Check:
    problems = environment.unknown()
    for variable in environment.variables():
        try:
            variable.get()
        except MoesaicError as error:
            problems.append(str(error))
    try:
        Target.default()
    except MoesaicError as error:
        problems.append(str(error))
    if problems:
        return Check("environment", "warn", "\n".join(problems), "correct or unset the variable; see: moesaic env")
    names = [variable.name for variable in environment.variables() if variable.text() is not None]
    return Check("environment", "ok", f"set: {', '.join(names)}" if names else "no MOESAIC_* variable is set")


def _nvrtc() -> Check:
    major, minor = nvrtc.nvrtc_version()
    detail = f"{major}.{minor} ({nvrtc.nvrtc_path() or 'path unknown'})"
    if major != 13:
        return Check(
            "nvrtc", "warn", detail, f"moesaic is tested with NVRTC 13: pip install '{nvrtc.NVRTC_PACKAGE}>=13,<14'"
        )
    return Check("nvrtc", "ok", detail)


def _headers() -> Check:
    folder = nvrtc.cuda_include_dirs()[0]
    kind = "wheel" if "site-packages" in folder.parts or "nvidia" in folder.parts else "toolkit"
    version = _header_version(folder)
    if version is None:
        return Check("headers", "ok", f"{folder} ({kind})")
    detail = f"{version[0]}.{version[1]} in {folder} ({kind})"
    try:
        wanted = nvrtc.nvrtc_version()
    except ToolchainError:
        return Check("headers", "ok", detail)
    if version != wanted:
        remedy = f"use headers of NVRTC's version: pip install '{nvrtc.HEADER_PACKAGE}=={wanted[0]}.{wanted[1]}.*'"
        return Check("headers", "warn", f"{detail}, but NVRTC is {wanted[0]}.{wanted[1]}", remedy)
    return Check("headers", "ok", detail)


def _header_version(folder: Path) -> tuple[int, int] | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def _compile() -> Check:
    try:
        target = Target.default()
    except MoesaicError:
        target = Target.parse("sm_90a")  # the variable is complained about above
    kernel = nvrtc.compile_source(_PROBE, name="doctor", target=target)
    return Check("compile", "ok", f"a bfloat16 kernel for {target}: {len(kernel.cubin)} bytes, {kernel.resources}")


def _driver() -> Check:
    try:
        version = driver.driver_version()
    except MoesaicError as error:
        return Check("driver", "warn", str(error), "needed to run kernels, not to compile or inspect them")
    detail = f"knows CUDA {version[0]}.{version[1]}"
    try:
        wanted = nvrtc.nvrtc_version()
    except ToolchainError:
        return Check("driver", "ok", detail)
    if version[0] < wanted[0]:
        remedy = f"update the NVIDIA driver to one for CUDA {wanted[0]}"
        return Check("driver", "fail", f"{detail}, but NVRTC is {wanted[0]}.{wanted[1]}", remedy)
    return Check("driver", "ok", detail)


def _gpus() -> Check:
    try:
        count = driver.device_count()
    except MoesaicError:
        return Check("gpus", "warn", f"none; kernels are compiled for {_default_target()}", "see driver")
    if count == 0:
        return Check("gpus", "warn", "the driver sees none", "is CUDA_VISIBLE_DEVICES set?")
    lines = []
    status: Status = "ok"
    for ordinal in range(count):
        found = driver.device(ordinal)
        try:
            target = found.target.name
        except MoesaicError as error:
            target, status = str(error), "warn"
        major, minor = found.capability
        lines.append(
            f"{ordinal}: {found.name}, compute capability {major}.{minor}, {found.sm_count} SMs, target {target}"
        )
    return Check("gpus", status, "\n".join(lines), "such a GPU cannot run kernels" if status == "warn" else "")


def _default_target() -> str:
    try:
        return Target.default().name
    except MoesaicError:
        return "no valid target"


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        return Check(
            "torch", "warn", f"cannot be imported ({first})", "needed to run layers: pip install 'moesaic[torch]'"
        )
    cuda = torch.version.cuda
    if cuda is None:
        return Check(
            "torch", "warn", f"{torch.__version__}, without CUDA", "runs the reference and emulate backends only"
        )
    detail = f"{torch.__version__}, CUDA {cuda}"
    if not torch.cuda.is_available():
        return Check("torch", "warn", f"{detail}, sees no GPU", "runs the reference and emulate backends only")
    return Check("torch", "ok", f"{detail}, sees {torch.cuda.device_count()} GPUs")


def _compiler() -> Check:
    try:
        found = toolchain.find_compiler()
    except ToolchainError as missing:
        return Check("c++ compiler", "warn", "none that works", str(missing))
    return Check("c++ compiler", "ok", f"{' '.join(found.command)}: {found.version}")


def _emulator_headers() -> Check:
    try:
        folders = toolchain.cuda_include_dirs()
    except ToolchainError as missing:
        return Check("emulator headers", "warn", "incomplete", str(missing))
    return Check("emulator headers", "ok", str(folders[0]))


def _launcher() -> Check:
    if environment.LAUNCHER.get() == "python":
        return Check("launcher", "ok", f"python, because {environment.LAUNCHER.name} says so")
    try:
        from moesaic.runtime.launcher import build
    except (ImportError, OSError, RuntimeError):
        return Check("launcher", "warn", "needs torch", "see torch")
    try:
        key = build.recipe().key
    except ToolchainError as missing:
        return Check("launcher", "warn", "python, which takes more host time a call", str(missing))
    if (environment.cache_root() / key.kind / key.digest).is_dir():
        return Check("launcher", "ok", "native, built")
    return Check("launcher", "ok", "native, built on first use; layer.warmup() waits for that")


def _disassembler() -> Check:
    tools = disassemble.disassemblers()
    if not tools:
        remedy = "needed to print SASS: pip install 'moesaic[sass]'"
        return Check("disassembler", "warn", "neither cuobjdump nor nvdisasm found", remedy)
    return Check("disassembler", "ok", f"{tools[0].path} (from {tools[0].origin})")


def _cache() -> Check:
    root = environment.cache_root()
    if not root.exists():
        parent = next(folder for folder in root.parents if folder.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Check("cache", "ok", f"{root} (will be made on first use)")
        return Check("cache", "warn", f"{root} cannot be made in {parent}", f"set {environment.CACHE_DIR.name}")
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        remedy = f"nothing is kept between runs: set {environment.CACHE_DIR.name} to a folder of yours"
        return Check("cache", "warn", f"{root} is not a folder that can be written", remedy)
    suspicion = folders.distrust(root)
    if suspicion is not None:
        remedy = f"chmod go-w {root} if it is yours, else set {environment.CACHE_DIR.name}"
        return Check("cache", "fail", f"{root}: {suspicion}", remedy)
    return Check("cache", "ok", str(root))
