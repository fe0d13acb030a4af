"""What all tests share: markers, golden files, a cache of their own, the command line, and a closing report."""

import difflib
import functools
import os
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"
PACKAGES = ("ir", "passes", "templates", "codegen", "runtime")

# Set before anything imports torch or transformers; processes that a test starts inherit it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already fill the machine
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

try:
    import hypothesis
except ModuleNotFoundError:  # a machine with only torch and pytest can still run the tests that need no hypothesis
    hypothesis = None  # type: ignore[assignment]
else:
    _everywhere = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("dev", **_everywhere)
    hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True, database=None, **_everywhere)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Markers --------------------------------------------------------------------------------------------------------------


@functools.cache
def why_no_gpu() -> str | None:
    """The reason why tests marked `gpu` cannot run here, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device here"


@functools.cache
def why_no_emulator() -> str | None:
    """The reason why tests marked `emulate` cannot run here, or None."""
    compilers = (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++")
    return None if any(c and shutil.which(c) for c in compilers) else "no C++ compiler here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):  # all on one worker: many processes would fight over one device's memory
            item.add_marker(pytest.mark.xdist_group("gpu"))
        elif item.get_closest_marker("emulate") and not item.get_closest_marker("xdist_group"):
            # Cases of a test often run the same kernels: while one worker builds them, another would only wait.
            test, case, _ = item.name.partition("[")
            if case:
                item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}.{test}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, why_not in (("gpu", why_no_gpu), ("emulate", why_no_emulator)):
        if item.get_closest_marker(marker) and (reason := why_not()):
            pytest.skip(f"{marker}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    nvrtc_times(terminalreporter)
    for marker, remedy in (
        ("gpu", "run 'pytest -m gpu' on a machine with an NVIDIA GPU"),
        ("emulate", "install a C++ compiler"),
    ):
        skipped = [r for r in terminalreporter.stats.get("skipped", []) if f"Skipped: {marker}: " in str(r.longrepr)]
        if not skipped:
            continue
        terminalreporter.section(f"{len(skipped)} tests marked '{marker}' did not run", sep="-")
        for path, count in sorted(Counter(r.nodeid.split("::")[0] for r in skipped).items()):
            terminalreporter.line(f"{count:6} {path}")
        terminalreporter.line(f"To run them, {remedy}.")


def nvrtc_times(terminalreporter: pytest.TerminalReporter) -> None:
    """A line on what NVRTC took for the kernels of tests that recorded it; no test judges by time."""
    reports = [report for outcome in terminalreporter.stats.values() for report in outcome]
    recorded = [p for report in reports for p in getattr(report, "user_properties", [])]
    times = dict(value for name, value in recorded if name == "nvrtc")
    if times:
        slowest = max(times, key=times.__getitem__)
        total = sum(times.values())
        terminalreporter.line(f"NVRTC: {len(times)} kernels, {total:.0f} s; slowest {times[slowest]:.1f} s ({slowest})")


# Isolation ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for this test run; all its workers share it, the user's own is never touched."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    path = base / "moesaic-cache"
    path.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESAIC_CACHE_DIR", str(path))
        yield path


@pytest.fixture(autouse=True)
def order_of_lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the emulator run in an order of lanes, warps and blocks that is the test's own, the same in every run.

    From lane 0 on, each as far as it gets, is the order in which the fewest mistakes show.
    """
    if request.node.get_closest_marker("emulate") and not why_no_emulator():
        from moesaic.runtime.execute import RUNNERS

        monkeypatch.setattr(RUNNERS["emulate"], "order", 1 + zlib.crc32(request.node.nodeid.encode()) % 1000)


def second_copies() -> list[str]:
    """Modules of our folders that are loaded under a name that does not start with `moesaic.`."""
    folders = [ROOT / name for name in PACKAGES]
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.startswith("moesaic."):
            continue
        path = Path(file).resolve()
        if any(path.is_relative_to(folder) for folder in folders):
            found.append(f"{name} ({path.relative_to(ROOT)})")
    return sorted(found)


@pytest.fixture(scope="session", autouse=True)
def no_second_copies() -> Iterator[Callable[[], list[str]]]:
    """Fails the run when a module of ours got loaded twice: two copies of a class make `isinstance` lie."""
    yield second_copies
    found = second_copies()
    assert not found, f"loaded under a wrong name (import them as moesaic.…): {', '.join(found)}"


# Golden files ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden that differ")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with `tests/golden/<name>`; `--update-golden` writes the file instead."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / name
        if not path.resolve().is_relative_to(GOLDEN):
            raise ValueError(f"golden file {name!r} is outside tests/golden")
        if not text.endswith("\n"):
            text += "\n"
        expected = path.read_bytes().decode() if path.exists() else None
        if text == expected:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return
        if expected is None:
            pytest.fail(f"tests/golden/{name} does not exist; make it with --update-golden", pytrace=False)
        pytest.fail(f"{diff(name, expected, text)}\nIf this is meant, rerun with --update-golden.", pytrace=False)

    return compare


def diff(name: str, expected: str, actual: str, limit: int = 100) -> str:
    """A unified diff of at most `limit` lines."""
    lines = list(
        difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), f"tests/golden/{name}", "this run", lineterm="", n=2
        )
    )
    if not lines:
        return f"tests/golden/{name} differs only in line ends"
    if len(lines) > limit:
        lines[limit:] = [f"… and {len(lines) - limit} more lines"]
    return "\n".join(lines)


# The command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def moesaic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""
    from moesaic.cli import main

    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def small(tmp_path: Path) -> Path:
    from command_line import SMALL

    path = tmp_path / "small.moe"
    path.write_text(SMALL)
    return path
