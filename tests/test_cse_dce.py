"""``cse`` and ``dce``: the IR it makes, as FileCheck lines, and what it says and refuses."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

from lowering import file_check, lower
from pass_modules import module, run

import moesaic as mo
from moesaic.ir.parser import parse


def test_cse():
    m = module(
        """
        %a = math.exp %x
        %b = math.exp %x
        %e = math.mul %a, 0.0
        %g = math.mul %b, 0.0
        %k = math.mul %b, -0.0
        %v1, %i1 = row.topk %e {k = 2}
        %v2, %i2 = row.topk %g {k = 2}
        %v3, %i3 = row.topk %g {k = 3}
        %s = math.sub %x, %z
        %t = math.sub %z, %x
        """,
        p="i1",
        q="i2",
        r="i3",
        s="k",
        t="s",
        u="t",
    )
    assert run("cse", m)[0]
    file_check(
        m,
        """
        CHECK: %a = math.exp %x
        CHECK-NEXT: %e = math.mul %a, 0.0
        CHECK-NEXT: %k = math.mul %a, -0.0
        CHECK-NEXT: %v1, %i1 = row.topk %e {k = 2}
        CHECK-NEXT: %v3, %i3 = row.topk %e {k = 3}
        CHECK-NEXT: %s = math.sub %x, %z
        CHECK-NEXT: %t = math.sub %z, %x
        CHECK-NEXT: return %i1, %i1, %i3, %k, %s, %t
        """,
    )
    assert not run("cse", m)[0]


def test_cse_leaves_buffers_and_kernels_alone():
    m, _ = lower(mo.Router(num_experts=5, top_k=2, outputs=("counts", "map")).module(), "forward")
    allocs = sum(op.name == "launch.alloc" for op in m.walk())
    assert allocs == 3 and not run("cse", m)[0]


def test_dce():
    m = module("%a = math.exp %x\n%b = math.exp %a\n%y = math.neg %x\n%n = row.sum %b")
    assert run("dce", m)[0]
    assert [op.name for op in m.walk()] == ["math.neg", "return"]
    assert not run("dce", m)[0]


def test_dce_shrinks_kernels():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>) -> (t: tensor<Tx5xf32>, s: tensor<5xf32>) {
          %p, %q, %r = kernel.row_program %x, %b, %v {blocks = B} (%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>) {
            %e = math.mul %x, %b
            %t = math.add %x, %v
            %s = col.sum %t
            yield %e, %t, %s
          }
          %fin = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
            yield %r
          }
          %unused = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
            yield %r
          }
          return %q, %fin
        }
        """
    )
    assert run("dce", m)[0]
    file_check(
        m,
        """
        CHECK: moe.func @f(%x: tensor<Tx5xf32>, %b: tensor<5xf32>, %v: tensor<5xf32>)
        CHECK-NEXT: %q, %r = kernel.row_program %x, %v {blocks = B} (%x: tensor<Tx5xf32>, %v: tensor<5xf32>) {
        CHECK-NEXT: %t = math.add %x, %v
        CHECK-NEXT: %s = col.sum %t
        CHECK-NEXT: yield %t, %s
        CHECK-NEXT: } : tensor<Tx5xf32>, tensor<Bx5xf32>
        CHECK-NEXT: %fin = kernel.col_finish %r {partials = 1} (%r: tensor<5xf32>) {
        CHECK-NEXT: yield %r
        CHECK-NEXT: } : tensor<5xf32>
        CHECK-NEXT: return %q, %fin
        """,
    )
    assert not run("dce", m)[0]
