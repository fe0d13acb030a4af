"""The house rules: what imports what, what an import loads, which pages are current, what the Makefile says."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.ir import environment

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]

# A folder may import from itself and from those of a lower number.
RANK = {"ir": 0, "passes": 1, "templates": 2, "codegen": 3, "runtime": 4}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("moesaic", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, inside functions too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join((*base, alias.name))


def run_python(code: str, *, cwd: Path) -> str:
    """Runs `code` in a fresh interpreter away from the repository; `-P` keeps the working folder off the path."""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imports --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", RANK)
def test_imports_go_one_way(folder: str) -> None:
    bad = []
    for path in sources(folder):
        for line, name in imported(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            first, _, rest = name.partition(".")
            if first in RANK or first == "cli":
                bad.append(f"{where}: '{name}' needs the name moesaic.{name}")
            if first != "moesaic":
                continue
            target = rest.split(".")[0]
            if target == "__version__":
                continue
            if target not in RANK:
                bad.append(f"{where}: '{name}' goes through the facade; name the module")
            elif RANK[target] > RANK[folder]:
                bad.append(f"{where}: {folder} must not import '{name}'")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("folder", ["ir", "passes", "codegen"])
def test_no_torch_and_no_driver_below_runtime(folder: str) -> None:
    allowed = ("cuda.bindings.nvrtc", "cuda.pathfinder") if folder == "codegen" else ()
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(folder)
        for line, name in imported(path)
        if name.split(".")[0] in ("torch", "cuda", "cupy", "triton") and not name.startswith(allowed or "moesaic.")
    ]
    assert not bad, "\n".join(bad)


def test_import_is_light(tmp_path: Path) -> None:
    """`import moesaic` and its compiling half start without torch, networkx or anything of CUDA."""
    code = """
import sys
import moesaic, moesaic.ir, moesaic.passes, moesaic.templates, moesaic.codegen
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "networkx", "cuda", "triton", "transformers"}))
"""
    assert run_python(code, cwd=tmp_path).split() == []


def test_no_compiler_module_loads_torch_or_a_driver(tmp_path: Path) -> None:
    names = [module_name(p) for folder in ("ir", "passes", "codegen") for p in sources(folder)]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
heavy = ("torch", "cuda.core", "cuda.bindings.driver", "cuda.bindings.runtime")
print(*[name for name in heavy if name in sys.modules])
"""
    assert run_python(code, cwd=tmp_path).split() == []


def test_import_creates_nothing(tmp_path: Path) -> None:
    code = """
import logging, os, pathlib
here = os.getcwd()
os.environ.update(HOME=here, XDG_CACHE_HOME=here + "/cache", MOESAIC_CACHE_DIR=here + "/moesaic")
import moesaic, moesaic.ir, moesaic.passes, moesaic.codegen
print(*[path.name for path in pathlib.Path().rglob("*")])
print(*logging.getLogger().handlers, *logging.getLogger("moesaic").handlers)
"""
    assert run_python(code, cwd=tmp_path).split() == []


def test_no_module_has_a_second_copy(no_second_copies) -> None:
    """Also checked when each worker closes, after everything that its tests imported."""
    assert no_second_copies() == []


# The facade -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", moesaic.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(moesaic, name) is not None
    assert name in dir(moesaic)


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="module 'moesaic' has no attribute 'Rooter'"):
        moesaic.Rooter  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    """The `if TYPE_CHECKING` block of the root file holds the same names as its table."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    [block] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.level == 0, ast.unparse(node)
        for alias in node.names:
            seen[alias.asname or alias.name] = (node.module, alias.name)
    table = {}
    for name, target in moesaic._TABLE.items():
        module, _, attribute = target.partition(":")
        table[name] = (module, attribute) if attribute else tuple(module.rsplit(".", 1))
    assert seen == table


# The layout -----------------------------------------------------------------------------------------------------------


def test_root_shadows_nothing() -> None:
    names = {p.stem for p in ROOT.glob("*.py")} | {p.parent.name for p in ROOT.glob("*/*.py")}
    assert not names & (sys.stdlib_module_names - {"__init__", "__main__"})


def test_every_package_is_listed() -> None:
    found = {module_name(p) for folder in RANK for p in sources(folder) if p.name == "__init__.py"} | {"moesaic"}
    assert sorted(found) == sorted(PACKAGES), "pyproject.toml: [tool.setuptools] packages"
    folders = {p.parent for folder in RANK for p in sources(folder)}
    assert not [p for p in folders if not (p / "__init__.py").exists()], "folders with modules but no __init__.py"


def test_typing_link() -> None:
    """mypy and pyright find the folders under their import names through this link."""
    link = ROOT / ".typing" / "moesaic"
    assert link.is_symlink() and os.readlink(link) == ".."


def test_mypy_checks_everything_but_the_tests() -> None:
    """Each file of Python is found once, through the link where it belongs to the package."""
    found: list[Path] = []
    for pattern in PROJECT["tool"]["mypy"]["files"]:
        for path in sorted(ROOT.glob(pattern)):
            found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    folders = (*RANK, "benchmarks", "docs", "examples")
    every = sorted(p.resolve() for p in (*ROOT.glob("*.py"), *(p for folder in folders for p in sources(folder))))
    assert sorted(p.resolve() for p in found) == every
    assert not [p for p in found if p.relative_to(ROOT).parts[0] in (*RANK, *(q.name for q in ROOT.glob("*.py")))]


# The documentation ----------------------------------------------------------------------------------------------------


def test_pages_that_come_from_the_code_are_current() -> None:
    """`python docs/generate.py` writes them again."""
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    assert environment.markdown() in made["environment.md"]
    assert "### `row.topk`" in made["ops.md"] and "\n## fuse-experts\n" in made["passes.md"]
    stale = [name for name, page in made.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != page]
    assert not stale, f"{', '.join(stale)}: run python docs/generate.py"


def links_of(page: Path) -> list[str]:
    """Targets of the links and pictures of a page of Markdown, code left out."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            target = page if not path else page.parent / path
            assert target.exists(), f"{page.name}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in slugs, f"{page.name}: {link}"


# The Makefile ---------------------------------------------------------------------------------------------------------


def make_check(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "CXX"))}
    environment["PATH"] = str(path)
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    return subprocess.run(
        [make, "-s", "-C", ROOT, "check", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_make_says_that_python_is_too_old(tmp_path: Path) -> None:
    tool(tmp_path, "python3", "echo 3.9; exit 1")
    done = make_check(tmp_path)
    assert done.returncode != 0
    assert "error: moesaic needs Python >= 3.11 (found: python3 is 3.9;)" in done.stderr
    assert "PYTHON=" in done.stderr


def test_make_says_that_venv_is_missing(tmp_path: Path) -> None:
    tool(tmp_path, "python3", 'case "$2" in *venv*) exit 1;; esac; echo 3.12')
    done = make_check(tmp_path)
    assert done.returncode != 0
    assert "error: python3 has no venv module" in done.stderr
    assert "apt-get install python3.12-venv" in done.stderr


def test_make_says_that_the_compiler_is_missing(tmp_path: Path) -> None:
    tool(tmp_path, "python3", "echo 3.12")
    done = make_check(tmp_path)
    assert done.returncode != 0
    assert "error: no C++ compiler" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_make_prefers_a_python_that_is_new_enough(tmp_path: Path) -> None:
    tool(tmp_path, "python3", "echo 3.10; exit 1")
    tool(tmp_path, "python3.12", "echo 3.12")
    tool(tmp_path, "c++", "exit 0")
    done = make_check(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "python3.12\n", "")


# The tests' own machinery ---------------------------------------------------------------------------------------------


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small repository with our conftest.py, one GPU test and one golden file."""
    tests = tmp_path / "tests"
    (tests / "golden").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tests / "golden" / "kernel.cu").write_text("a\nb\nc\n", encoding="utf-8")
    (tests / "test_small.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.gpu\n"
        "@pytest.mark.parametrize('n', [1, 2, 3])\n"
        "def test_gpu(n): pass\n"
        "def test_golden(golden): golden('kernel.cu', 'a\\nB\\nc\\n')\n"
        "def test_cache(cache_dir): assert os.environ['MOESAIC_CACHE_DIR'] == str(cache_dir)\n",
        encoding="utf-8",
    )
    return tmp_path


def run_suite(suite: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # as on a machine without a GPU
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={suite / 'temporary'}",
        *arguments,
    ]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)


def test_run_without_a_gpu_says_what_it_skipped(suite: Path) -> None:
    done = run_suite(suite, "-k", "not golden")
    assert done.returncode == 0, done.stdout
    assert "3 tests marked 'gpu' did not run" in done.stdout
    assert "     3 tests/test_small.py" in done.stdout
    assert "1 passed, 3 skipped" in done.stdout


def test_golden_files_compare_and_refresh(suite: Path) -> None:
    done = run_suite(suite, "-k", "golden")
    assert done.returncode == 1
    assert "--- tests/golden/kernel.cu" in done.stdout and "-b\n" in done.stdout and "+B\n" in done.stdout
    assert "rerun with --update-golden" in done.stdout
    assert run_suite(suite, "-k", "golden", "--update-golden").returncode == 0
    assert (suite / "tests" / "golden" / "kernel.cu").read_text(encoding="utf-8") == "a\nB\nc\n"
    assert run_suite(suite, "-k", "golden").returncode == 0
