"""Targets: names, capabilities, occupancy; and, with NVRTC, that claimed instructions are the ones that assemble."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.codegen import nvrtc
from moesaic.codegen.target import Target, known_targets
from moesaic.ir.errors import InputError, KernelCompileError, UnsupportedError, UsageError


@pytest.fixture(autouse=True)
def private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_parse_gives_back_every_known_target(target: Target) -> None:
    assert Target.parse(str(target)) is target
    assert Target.parse(target.name.removeprefix("sm_")) is target
    assert Target.parse(target.name.replace("sm_", "compute_").upper()) is target


@pytest.mark.parametrize(("name", "near"), [("sm_90b", "sm_90"), ("sm_100b", "sm_100")])
def test_unknown_target_suggests_a_near_one(name: str, near: str) -> None:
    with pytest.raises(InputError, match=f"unknown target '{name}'.*did you mean '{near}a?'"):
        Target.parse(name)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 1), "sm_100"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_120"),
    ],
)
def test_from_capability(capability: tuple[int, int], name: str) -> None:
    target = Target.from_capability(*capability)
    assert target.name == name
    assert target.runs_on(*capability)


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_unsupported_capability(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=f"{capability[0]}.{capability[1]} is not supported.*sm_80"):
        Target.from_capability(*capability)


def test_specific_targets_run_on_one_capability_only() -> None:
    assert Target.parse("sm_80").runs_on(8, 9)
    assert not Target.parse("sm_89").runs_on(8, 0)
    assert not Target.parse("sm_90").runs_on(10, 0)
    assert not Target.parse("sm_100a").runs_on(10, 3)
    assert Target.parse("sm_100").runs_on(10, 3)


def test_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESAIC_ARCH", raising=False)
    assert Target.default().name == "sm_90a"
    monkeypatch.setenv("MOESAIC_ARCH", "sm_100a")
    assert Target.default().name == "sm_100a"
    monkeypatch.setenv("MOESAIC_ARCH", "sm_1OOa")
    with pytest.raises(UsageError, match=r"MOESAIC_ARCH: unknown target 'sm_1OOa'.*did you mean"):
        Target.default()


def test_sizes() -> None:
    hopper = Target.parse("sm_90a")
    assert (hopper.shared_static, hopper.shared_optin, hopper.shared_per_sm) == (49152, 232448, 233472)
    assert hopper.max_threads_per_sm == 2048
    assert hopper.matrix_kinds == ("mma.sync", "wgmma")
    assert Target.parse("sm_90").matrix_kinds == ("mma.sync",)
    assert Target.parse("sm_86").shared_optin == 101376
    assert Target.parse("sm_120a").max_threads_per_sm == 1536


# Worked out with the functions of `cuda_occupancy.h`.
@pytest.mark.parametrize(
    ("name", "registers", "shared", "threads", "blocks"),
    [
        ("sm_90a", 32, 0, 256, 8),  # warps
        ("sm_90a", 32, 0, 32, 32),  # blocks
        ("sm_86", 32, 0, 32, 16),
        ("sm_90a", 128, 0, 256, 2),  # registers
        ("sm_90a", 65, 0, 128, 7),  # 65 registers cost 72
        ("sm_90a", 168, 200 * 1024, 384, 1),
        ("sm_80", 168, 200 * 1024, 384, 0),  # more than the block may have
        ("sm_90a", 32, 227 * 1024, 128, 1),  # the largest block
        ("sm_90a", 32, 227 * 1024 + 1, 128, 0),
        ("sm_90a", 32, 113 * 1024, 128, 2),  # shared memory and 1 KiB for the system, twice
        ("sm_90a", 32, 113 * 1024 + 1, 128, 1),
        ("sm_90a", 65, 0, 1024, 0),  # a block that cannot launch
        ("sm_90a", 64, 0, 1024, 1),
        ("sm_90a", 32, 0, 33, 32),  # a second warp for one thread
        ("sm_90a", 256, 0, 32, 0),
        ("sm_90a", 32, 0, 1025, 0),
        ("sm_120a", 40, 10000, 1024, 1),
    ],
)
def test_occupancy(name: str, registers: int, shared: int, threads: int, blocks: int) -> None:
    assert Target.parse(name).occupancy(registers, shared, threads) == blocks


@pytest.mark.parametrize(("registers", "shared", "threads"), [(-1, 0, 32), (1, -1, 32), (1, 0, 0)])
def test_occupancy_refuses_nonsense(registers: int, shared: int, threads: int) -> None:
    with pytest.raises(InputError):
        Target.parse("sm_90a").occupancy(registers, shared, threads)


_INSTRUCTIONS = {
    "has_cp_async": '"cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(s), "l"(p)',
    "has_redux": '"redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(r)',
    "has_redux_f32": '"redux.sync.max.f32 %0, %1, 0xffffffff;" : "=f"(f) : "f"(f)',
    "has_fp8_mma": '"{ .reg .f32 d<4>; mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 '
    '{d0, d1, d2, d3}, {%0, %0, %0, %0}, {%0, %0}, {%1, %1, %1, %1}; }" :: "r"(r), "f"(f)',
    "has_tma": '"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%0];"'
    ' :: "r"(s), "l"(p)',
    "has_clusters": '"barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" :',
    "has_dependent_launch": '"griddepcontrol.wait;" :',
    "has_vector_red": '"red.global.v4.f32.add [%0], {%1, %1, %1, %1};" :: "l"(p), "f"(f)',
    "has_setmaxnreg": '"setmaxnreg.dec.sync.aligned.u32 40;" :',
    "has_wgmma": '"wgmma.fence.sync.aligned;" :',
    "has_tcgen05": '"tcgen05.fence::before_thread_sync;" :',
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("feature", _INSTRUCTIONS)
def test_claimed_instructions_are_those_that_assemble(feature: str) -> None:
    source = f"""extern "C" __global__ void __launch_bounds__(128) k(float* p) {{
      unsigned s = 0; int r = p[0]; float f = p[1];
      asm volatile({_INSTRUCTIONS[feature]});
      p[2] = r + f + s;
    }}"""

    def assembles(target: Target) -> bool:
        try:
            nvrtc.compile_source(source, name="k", target=target)
        except KernelCompileError:
            return False
        return True

    claimed = [str(target) for target in known_targets() if getattr(target, feature)]
    assert [str(target) for target in known_targets() if assembles(target)] == claimed
