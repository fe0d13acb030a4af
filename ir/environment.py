"""Every ``MOESAIC_*`` environment variable, declared once.

A variable is read when it is used, never at import, so that a test or a notebook can change it at any time. A value
that cannot be used raises `UsageError`. The tables that ``moesaic env`` prints and that the documentation shows come
from these declarations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from moesaic.ir.errors import UsageError, suggestion

PREFIX = "MOESAIC_"

_T = TypeVar("_T")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Variable(Generic[_T]):
    """One environment variable: `name`, how its text becomes a value, and what it means.

    `kind` names the type for people (``path``, ``flag``, ``text``, ``choice``, ``list`` or ``positive number``);
    `choices` lists the words allowed, and is empty where any text will do. A variable that is unset, or set to the
    empty string, has the value `default`.
    """

    name: str
    kind: str
    default: _T
    help: str
    convert: Callable[[str], _T]
    choices: tuple[str, ...] = ()
    default_text: str = ""

    def text(self) -> str | None:
        """The text in the environment now; None if the variable is unset or empty."""
        return os.environ.get(self.name) or None

    def get(self) -> _T:
        """The value now. Raises `UsageError` if the text in the environment is not a valid value."""
        text = self.text()
        if text is None:
            return self.default
        try:
            return self.convert(text)
        except ValueError:
            near = suggestion(text.lower(), self.choices)
            expected = f"one of {', '.join(self.choices)}" if self.choices else f"a {self.kind}"
            raise UsageError(
                f"environment variable {self.name} is {text!r}, expected {expected}{near} "
                f"(unset it to use the default, {self.shown_default})"
            ) from None

    @property
    def shown_default(self) -> str:
        """The default in words, for tables and messages."""
        if self.default_text:
            return self.default_text
        if isinstance(self.default, bool):
            return "1" if self.default else "0"
        return "not set" if self.default is None else str(self.default)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of variables; all fields are text to print. `value` is empty if the variable is unset."""

    name: str
    type: str
    default: str
    value: str
    help: str


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError(text)
        return word

    return convert


LOGGERS = ("passes", "compile", "cache", "launch", "launcher", "tuner", "hf")
"""What can be logged, see ``runtime/logs.py``."""

_INFO, _DEBUG = 20, 10  # of the module `logging`


def _logs(text: str) -> dict[str, int]:
    levels: dict[str, int] = {}
    for item in filter(None, (part.strip().lower() for part in text.split(","))):
        name, level = item.removeprefix("+"), _DEBUG if item.startswith("+") else _INFO
        if name not in (*LOGGERS, "all"):
            raise ValueError(text)
        levels.update(dict.fromkeys(LOGGERS if name == "all" else (name,), level))
    return levels


_Any: TypeAlias = (
    Variable[dict[str, int]]
    | Variable[Path | None]
    | Variable[bool]
    | Variable[str]
    | Variable[str | None]
    | Variable[int | None]
)

_DECLARED: list[_Any] = []


def _declare_path(name: str, help: str, default_text: str = "") -> Variable[Path | None]:
    variable: Variable[Path | None] = Variable(name, "path", None, help, _path, default_text=default_text)
    _DECLARED.append(variable)
    return variable


def _declare_flag(name: str, default: bool, help: str) -> Variable[bool]:
    variable: Variable[bool] = Variable(name, "flag", default, help, _flag, choices=("1", "0", *_TRUE[1:], *_FALSE[1:]))
    _DECLARED.append(variable)
    return variable


def _declare_count(name: str, help: str, default_text: str = "") -> Variable[int | None]:
    variable: Variable[int | None] = Variable(name, "positive number", None, help, _positive, default_text=default_text)
    _DECLARED.append(variable)
    return variable


def _declare_choice(name: str, choices: tuple[str, ...], default: str, help: str) -> Variable[str]:
    variable: Variable[str] = Variable(name, "choice", default, help, _choice(choices), choices=choices)
    _DECLARED.append(variable)
    return variable


def _declare_text(name: str, help: str, default_text: str = "") -> Variable[str | None]:
    variable: Variable[str | None] = Variable(name, "text", None, help, str.strip, default_text=default_text)
    _DECLARED.append(variable)
    return variable


CACHE_DIR = _declare_path(
    "MOESAIC_CACHE_DIR",
    "root of the disk cache",
    default_text="$XDG_CACHE_HOME/moesaic, else ~/.cache/moesaic",
)
DISABLE_CACHE = _declare_flag("MOESAIC_DISABLE_CACHE", False, "neither read nor write the disk cache")
ALWAYS_COMPILE = _declare_flag(
    "MOESAIC_ALWAYS_COMPILE",
    False,
    "compile what this process has not compiled yet, and write the cache, but never read it",
)
COMPILE_JOBS = _declare_count(
    "MOESAIC_COMPILE_JOBS",
    "compiles that may run at once on this host, over all processes of a user",
    default_text="as many as cores and free memory allow",
)
AUTOTUNE = _declare_choice(
    "MOESAIC_AUTOTUNE",
    ("0", "1", "force", "off"),
    "0",
    "0 uses what was tuned before; 1 also tunes a layer's kernels in the first call on a GPU that finds nothing, force "
    "even where something is found; off leaves all choices to the built-in rule",
)
AUTOTUNE_BUDGET = _declare_count(
    "MOESAIC_AUTOTUNE_BUDGET",
    "seconds that tuning may take in one call",
    default_text="30",
)
TUNE_WORKERS = _declare_count(
    "MOESAIC_TUNE_WORKERS",
    "processes that compile candidates side by side while tuning",
    default_text="one a core, up to 8",
)
BACKEND = _declare_choice(
    "MOESAIC_BACKEND",
    ("auto", "cuda", "emulate", "reference"),
    "auto",
    "what runs a compiled layer; auto follows the tensors: cuda on a GPU, reference on the CPU",
)
LAUNCHER = _declare_choice(
    "MOESAIC_LAUNCHER",
    ("auto", "python", "native"),
    "auto",
    "what launches kernels on a GPU: python, or native code that takes less host time; auto builds it in the "
    "background and falls back on python, native waits for it and fails without",
)
ARCH = _declare_text(
    "MOESAIC_ARCH",
    "target to compile for, such as sm_90a; needed where there is no GPU to ask",
    default_text="the current GPU's, else sm_90a",
)
DUMP_DIR = _declare_path(
    "MOESAIC_DUMP_DIR", "write IR, CUDA, PTX, cubin and resources of every compile into this folder"
)
OVERRIDE_DIR = _declare_path(
    "MOESAIC_OVERRIDE_DIR", "use the <kernel>.cu in this folder, edited by hand, instead of the generated text"
)
LOGS: Variable[dict[str, int]] = Variable(
    "MOESAIC_LOGS",
    "list",
    {},
    "what to log to stderr, separated by commas: " + ", ".join(LOGGERS) + " or all; with + before it in detail",
    _logs,
    choices=(*LOGGERS, "all"),
    default_text="not set",
)
_DECLARED.append(LOGS)
PRINT_IR = _declare_text("MOESAIC_PRINT_IR", "print the IR to stderr: after-all, after-change, or the name of a pass")
VERIFY_EACH = _declare_flag("MOESAIC_VERIFY_EACH", True, "verify the IR after every pass")
REPRODUCER_DIR = _declare_path(
    "MOESAIC_REPRODUCER_DIR", "where a failing pass writes its reproducer", default_text="reproducers in the disk cache"
)
LINEINFO = _declare_flag(
    "MOESAIC_LINEINFO", False, "compile with line information, for profilers and for SASS beside the source"
)
PTXAS_CHECK = _declare_flag("MOESAIC_PTXAS_CHECK", False, "fail when a kernel spills registers or uses local memory")
CUOBJDUMP = _declare_path(
    "MOESAIC_CUOBJDUMP",
    "the cuobjdump or nvdisasm program that prints SASS",
    default_text="from wheels, PATH, or triton",
)


def variables() -> tuple[_Any, ...]:
    """Every declared variable, in order of declaration."""
    return tuple(_DECLARED)


def unknown() -> list[str]:
    """A sentence for each ``MOESAIC_*`` name in the environment that nothing reads, most likely a slip of the pen."""
    known = [variable.name for variable in _DECLARED]
    strays = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return [f"{name} is set, but moesaic reads no such variable{suggestion(name, known)}" for name in strays]


def rows() -> list[Row]:
    """The table of variables as data. Never raises: a bad value is shown as it is, marked ``(not valid)``."""
    result = []
    for variable in _DECLARED:
        value = variable.text() or ""
        if value:
            try:
                variable.get()
            except UsageError:
                value += " (not valid)"
        kind = " | ".join(variable.choices) if variable.kind == "choice" else variable.kind
        result.append(Row(variable.name, kind, variable.shown_default, value, variable.help))
    return result


def table() -> str:
    """The table that ``moesaic env`` prints: names, values now, defaults and meaning. Ends without a newline."""
    lines: list[str] = []
    for row in rows():
        lines.append(f"{row.name}={row.value}" if row.value else f"{row.name} (not set)")
        lines.append(f"    {row.help}")
        lines.append(f"    {row.type}; default: {row.default}")
    return "\n".join([*lines, *unknown()])


def markdown() -> str:
    """The table of variables for the documentation: no values, so that it is the same on every machine."""
    body = [(f"`{row.name}`", row.type, row.default, row.help) for row in rows()]
    return _markdown_table(("variable", "type", "default", "meaning"), body)


def _markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, body)]) + "\n"


def cache_root() -> Path:
    """The folder that holds everything moesaic keeps between runs; it may not exist yet.

    ``MOESAIC_CACHE_DIR``, else ``$XDG_CACHE_HOME/moesaic``, else ``~/.cache/moesaic``.
    """
    chosen = CACHE_DIR.get()
    if chosen is not None:
        return chosen.absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "moesaic"
