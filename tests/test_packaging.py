"""What is shipped: the sdist, the wheel, and the wheel at work in an environment of its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import moesaic
from moesaic.codegen import nvrtc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "packages"
]
DEPENDENCIES = Path(sysconfig.get_paths()["purelib"])

pytestmark = pytest.mark.xdist_group("packaging")  # one worker builds once for all

EXTRAS = ("torch", "triton", "transformers", "rich", "pytest", "hypothesis")
"""What an installation without extras may lack; imports of these fail in some runs here."""

LAYER = """moe.func @route(%logits: tensor<Tx60xbf16>) -> (weights: tensor<Tx6xf32>, indices: tensor<Tx6xi32>) {
  %scores = math.sigmoid %logits : tensor<Tx60xf32>
  %values, %indices = row.topk %logits {k = 6} : tensor<Tx6xf32>, tensor<Tx6xi32>
  %picked = row.gather %scores, %indices : tensor<Tx6xf32>
  %weights = row.normalize %picked : tensor<Tx6xf32>
  return %weights, %indices
}
"""


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has to succeed, without what this one was told about where CUDA and Python packages are."""
    told = ("MOESAIC_", "PYTHON", "CUDA_", "CONDA_", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(told)}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**inherited, "MOESAIC_CACHE_DIR": str(cwd / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# Building -------------------------------------------------------------------------------------------------------------


def build_wheel(tree: Path, target: Path) -> Path:
    """The wheel of a source tree. No build isolation, which would download the backend."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", target, tree, cwd=target)
    [path] = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that neither old build output gets into a build nor new one stays behind."""
    copy = tmp_path_factory.mktemp("tree") / "somedir"
    left_out = (".git", ".venv*", ".*_cache", "__pycache__", "build", "dist", "*.egg-info", "golden")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta; setuptools.build_meta.build_sdist({str(target)!r})"
    run(sys.executable, "-c", code, cwd=tree)
    [path] = target.glob("*.tar.gz")
    return path


def sources(folder: str, *suffixes: str) -> set[Path]:
    found = (p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p for p in found if not suffixes or p.suffix in suffixes}


def shipped() -> set[Path]:
    """Files of the repository that belong into the wheel."""
    wanted = {*ROOT.glob("*.py"), ROOT / "py.typed", *(ROOT / "runtime").glob("tuned/**/*.json")}
    for folder in ("ir", "passes", "codegen", "runtime"):
        wanted |= sources(folder, ".py")
    wanted |= sources("templates", ".py", ".j2", ".cuh")
    wanted |= sources("runtime/launcher", ".cpp") | sources("runtime/commands", ".css", ".js")
    return wanted | sources("runtime/emulator/include") | sources("runtime/emulator/src")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    files = contents(wheel)
    held = {name for name in files if ".dist-info/" not in name}
    assert held == {f"moesaic/{p.relative_to(ROOT).as_posix()}" for p in shipped()}
    [licence] = [name for name in files if name.endswith(".dist-info/licenses/LICENSE")]
    assert files[licence] == (ROOT / "LICENSE").read_bytes()
    [metadata] = [files[name].decode() for name in files if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {moesaic.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # older than Python 3.11.4
        archive.extractall(tmp_path, **safe)
    [folder] = (p for p in tmp_path.iterdir() if p.is_dir())
    assert folder.name == f"moesaic-{moesaic.__version__}"
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    assert not [p for p in folder.rglob("*") if p.suffix in (".pyc", ".so") or "golden" in p.parts]
    target = tmp_path / "wheel"
    target.mkdir()
    again, before = contents(build_wheel(folder, target)), contents(wheel)
    # RECORD lists the order in which files were packed as well.
    assert again.keys() == before.keys()
    assert [n for n in again if again[n] != before[n] and not n.endswith("/RECORD")] == []


# Running what was built -----------------------------------------------------------------------------------------------


def install(wheel: Path, home: Path, *, cuda: bool = True) -> Path:
    """The Python of a fresh environment at `home` with the wheel in it, and links to everything installed here but
    moesaic itself; without `cuda`, to none of NVIDIA's libraries either.

    Links rather than a path: NVIDIA's wheels are searched for in the folder of packages only.
    """
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=home)
    [site] = home.glob("lib/python*/site-packages")
    for path in DEPENDENCIES.iterdir():
        ours = path.name.startswith(("moesaic", "__editable__"))
        nvidia = path.name == "nvidia" or path.name.startswith("nvidia_")
        if not ours and (cuda or not nvidia):
            (site / path.name).symlink_to(path)
    return python


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


REFUSE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.slow
def test_every_package_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, importlib.metadata, importlib.resources
for name in {PACKAGES!r}:
    print(importlib.import_module(name).__file__)
print(importlib.metadata.version("moesaic"))
print(*sorted(p.name for p in importlib.resources.files("moesaic.templates").iterdir() if p.name.endswith(".j2")))
"""
    *files, version, templates = run(installed, "-P", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert len(files) == len(PACKAGES)
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in files), files
    assert version == moesaic.__version__
    assert templates.split() == sorted(p.name for p in (ROOT / "templates").glob("*.j2"))


@pytest.mark.slow
@pytest.mark.nvrtc
def test_a_layer_becomes_a_cubin_without_any_extra(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.moe").write_text(LAYER, encoding="utf-8")
    code = f"{REFUSE}\nfrom moesaic.cli import main\nsys.exit(main(sys.argv[1:]))"
    run(installed, "-P", "-c", code, "compile", "layer.moe", "--arch", "sm_90a", "-o", "out", cwd=tmp_path)
    for kernel in ("route_rows", "route_backward_rows"):
        assert (tmp_path / "out" / f"{kernel}.cubin").read_bytes().startswith(b"\x7fELF")
        assert "moesaic/select.cuh" in (tmp_path / "out" / f"{kernel}.cu").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.nvrtc
def test_the_installed_commands_run(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.moe").write_text(LAYER, encoding="utf-8")
    script = run(installed.parent / "moesaic", "compile", "layer.moe", "--emit", "ptx", cwd=tmp_path).stdout
    module = run(installed, "-P", "-m", "moesaic", "compile", "layer.moe", "--emit", "ptx", cwd=tmp_path).stdout
    assert ".entry route_rows(" in script
    assert script == module


@pytest.mark.slow
@pytest.mark.emulate
def test_the_reference_and_the_emulator_agree(installed: Path, tmp_path: Path) -> None:
    """Forward and backward; the emulator builds its library from the headers and sources in the wheel."""
    pytest.importorskip("torch")
    from routing import EXACT, GRADIENT

    code = """
import torch, moesaic as mo
router = mo.Router(60, 6, score="sigmoid", selection_bias=True, renormalize=True)
torch.manual_seed(1)
logits, bias, sent = torch.randn(13, 60), torch.randn(60), torch.randn(13, 6)
results = []
for backend in ("reference", "emulate"):
    leaf = logits.clone().requires_grad_()
    r = mo.compile(router, backend=backend)(leaf, bias=bias)
    r.weights.backward(sent)
    results.append((r.indices, r.counts, r.weights.detach(), leaf.grad))
(i, c, w, g), (i2, c2, w2, g2) = results
assert torch.equal(i, i2) and torch.equal(c, c2) and int(c.sum()) == 13 * 6
assert w.min() > 0 and g.abs().max() > 0.01
print(float((w - w2).abs().max() / w.max()), float((g - g2).abs().max() / g.abs().max()))
"""
    weights, gradients = map(float, run(installed, "-P", "-c", code, cwd=tmp_path).stdout.split())
    assert weights <= EXACT
    assert gradients <= GRADIENT


# CUDA from wheels or from a toolkit -----------------------------------------------------------------------------------

FROM_WHERE = f"""{REFUSE}
from pathlib import Path
from moesaic.codegen import nvrtc
from moesaic.cli import main
assert main(["compile", "layer.moe", "--arch", "sm_80"]) == 0
print(nvrtc.nvrtc_path())
print(nvrtc.cuda_include_dirs()[0])
"""


@pytest.mark.slow
@pytest.mark.nvrtc
def test_cuda_from_wheels_needs_no_toolkit_and_no_variable(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.moe").write_text(LAYER, encoding="utf-8")
    if not (DEPENDENCIES / "nvidia").is_dir():
        pytest.skip("CUDA is not installed from wheels here")
    *_, library, headers = run(installed, "-P", "-c", FROM_WHERE, cwd=tmp_path).stdout.splitlines()
    for path in (library, headers):
        assert Path(path).resolve().is_relative_to((DEPENDENCIES / "nvidia").resolve()), path


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("libraries", ["lib64", "lib"])
def test_cuda_from_a_toolkit_needs_no_wheels(wheel: Path, tmp_path: Path, libraries: str) -> None:
    """NVRTC and the headers below CUDA_HOME alone: every dependency is there but NVIDIA's libraries."""
    library, (headers, *_) = nvrtc.nvrtc_path(), nvrtc.cuda_include_dirs()
    if library is None:
        pytest.skip("the place of NVRTC is not known here")
    toolkit = tmp_path / "toolkit"
    (toolkit / libraries).mkdir(parents=True)
    (toolkit / "include").symlink_to(headers)
    major, minor = nvrtc.nvrtc_version()
    for stem in ("libnvrtc", "libnvrtc-builtins"):  # a toolkit's files have full versions, with links to them
        [real] = (p for p in library.resolve().parent.glob(f"{stem}.so.{major}*") if not p.is_symlink())
        full = toolkit / libraries / f"{stem}.so.{major}.{minor}.99"
        try:
            full.hardlink_to(real)
        except OSError:  # another file system
            shutil.copyfile(real, full)
        for version in (f".{major}.{minor}", f".{major}", ""):
            (toolkit / libraries / f"{stem}.so{version}").symlink_to(full.name)
    python = install(wheel, tmp_path / "venv", cuda=False)
    (tmp_path / "layer.moe").write_text(LAYER, encoding="utf-8")
    where = {"CUDA_HOME": str(toolkit), "CUDA_PATH": str(toolkit)}
    *_, found, folder = run(python, "-P", "-c", FROM_WHERE, cwd=tmp_path, **where).stdout.splitlines()
    assert Path(found).parent == toolkit / libraries
    assert folder == str(toolkit / "include")


@pytest.mark.parametrize("name", ["sbsa-linux", "aarch64-linux"])
def test_headers_of_a_toolkit_for_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "targets" / name / "include"
    folder.mkdir(parents=True)
    (folder / "cuda_bf16.h").write_text("", encoding="utf-8")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(nvrtc, "_wheel_roots", list)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvrtc.cuda_include_dirs() == [folder]


def test_headers_of_wheels_come_before_those_of_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVRTC is a wheel then, too, and headers of another version need not fit it."""
    for folder in ("site/nvidia/cu13/include", "toolkit/include"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cuda_bf16.h").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert nvrtc.cuda_include_dirs() == [tmp_path / "site/nvidia/cu13/include"]
