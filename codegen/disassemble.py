"""SASS, the machine code of a kernel as text, out of a cubin.

NVIDIA's own programs do it, cuobjdump or nvdisasm. Neither comes with the driver, so several places are searched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moesaic.ir import environment
from moesaic.ir.errors import ToolchainError

_PROGRAMS = ("cuobjdump", "nvdisasm")
_SECONDS = 120
_REMEDY = (
    "install them with: pip install 'nvidia-cuda-cuobjdump>=13.2.51,<14' 'nvidia-cuda-nvdisasm>=13.2.51,<14' "
    f"(or set {environment.CUOBJDUMP.name} to a cuobjdump or nvdisasm)"
)


@dataclass(frozen=True, slots=True)
class Disassembler:
    """A program that prints SASS: where it is, and how it was found (``MOESAIC_CUOBJDUMP``, wheel, PATH or triton)."""

    path: Path
    origin: str

    @property
    def knows_lines(self) -> bool:
        """Whether it prints which line an instruction comes from."""
        return self.path.name.startswith("nvdisasm")

    def command(self, cubin: Path, *, lines: bool = False) -> list[str]:
        """The command line that prints the SASS of a cubin file, with the lines of source if asked for."""
        # `-hex` and `-c` alike would add noise: only instructions and their addresses are wanted.
        flags = ["-c", *(["-gi"] if lines else [])] if self.path.name.startswith("nvdisasm") else ["-sass"]
        return [str(self.path), *flags, str(cubin)]


def disassemblers() -> list[Disassembler]:
    """Every program found, the preferred one first: as ``MOESAIC_CUOBJDUMP`` says, then wheels, PATH, triton's own.

    Empty if there is none. Raises `ToolchainError` if the variable is set to something that is not a program.
    """
    chosen = environment.CUOBJDUMP.get()
    if chosen is not None:
        if not _is_program(chosen):
            raise ToolchainError(f"environment variable {environment.CUOBJDUMP.name}: {chosen} is not a program")
        return [Disassembler(chosen, environment.CUOBJDUMP.name)]
    places = [Path(entry) for entry in sys.path if entry]
    found = [
        Disassembler(place / folder / program, origin)
        for folder, origin in (("nvidia/cu13/bin", "wheel"), ("triton/backends/nvidia/bin", "triton"))
        for place in places
        for program in _PROGRAMS
        if _is_program(place / folder / program)
    ]
    on_path = [Disassembler(Path(path), "PATH") for program in _PROGRAMS if (path := shutil.which(program))]
    order = ("wheel", "PATH", "triton")
    return sorted([*found, *on_path], key=lambda tool: order.index(tool.origin))


def disassemble(cubin: bytes, *, lines: bool = False) -> str:
    """The SASS of every kernel in a cubin; with `lines`, comments say which line of source comes next, and where that
    was inlined, which only nvdisasm does.

    Raises `ToolchainError` if no program is found, or none of those found can read the cubin (an old one refuses those
    of a newer NVRTC); the message lists what each said.
    """
    tools = [tool for tool in disassemblers() if tool.knows_lines or not lines]
    if not tools:
        missing = "lines of SASS need nvdisasm, and it" if lines else "SASS needs cuobjdump and nvdisasm, and neither"
        raise ToolchainError(f"{missing} was {'not ' if lines else ''}found; {_REMEDY}")
    complaints = []
    # cuobjdump calls nvdisasm and takes whichever lies beside it or on PATH.
    folders = os.pathsep.join(dict.fromkeys(str(tool.path.parent) for tool in tools))
    search = {**os.environ, "PATH": folders + os.pathsep + os.environ.get("PATH", "")}
    with tempfile.TemporaryDirectory(prefix="moesaic-sass-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        for tool in tools:
            try:
                command = tool.command(file, lines=lines)
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=search
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                complaints.append(f"{tool.path}: {error}")
                continue
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout
            said = (done.stderr or done.stdout).strip().splitlines() or ["printed nothing"]
            complaints.append(f"{tool.path} ({tool.origin}): {said[0]}")
    raise ToolchainError(
        "no program could print the SASS of this cubin:\n  " + "\n  ".join(complaints) + f"\n{_REMEDY}"
    )


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
