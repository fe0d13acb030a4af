"""``plan-workspace``: the IR it makes, as FileCheck lines, and what it says and refuses."""

# ruff: noqa: E501 - a line of expected IR is as long as the IR

from lowering import file_check, lower

import moesaic as mo
from moesaic.ir.parser import parse


def test_plan():
    router = mo.Router(num_experts=5, top_k=2, outputs=("indices", "counts"))
    m, _ = lower(router.module(), "expand-rows,sink-gathers,dce,fuse-score-topk,plan-workspace")
    file_check(
        m,
        """
        CHECK: %indices = launch.alloc {space = result, type = "tensor<Tx2xi32>"} : tensor<Tx2xi32>
        CHECK-NEXT: %counts_partial = launch.alloc {slot = 0, space = workspace, type = "tensor<Bx5xi32>"} : tensor<Bx5xi32>
        CHECK-NEXT: launch.kernel %logits, %indices, %counts_partial {blocks = B, reads = 1, symbol = route_rows, template = row_program} (%logits: tensor<Tx5xf32>) {
        CHECK: yield %indices, %counts
        CHECK: %counts = launch.alloc {space = result, type = "tensor<5xi32>"}
        CHECK-NEXT: launch.kernel %counts_partial, %counts {partials = 1, reads = 1, symbol = route_finish, template = col_finish}
        CHECK: return %indices, %counts
        """,
    )


def chain(reads):
    """Kernels in a row, each writing one [T, 5] value; `reads[n]` says which of the earlier values kernel n reads."""
    lines = []
    for n, earlier in enumerate(reads):
        operands = ", ".join(f"%k{r}" for r in earlier) or "%x"
        arguments = ", ".join(f"%a{i}: tensor<Tx5xf32>" for i in range(max(len(earlier), 1)))
        lines.append(f"%k{n} = kernel.row_program {operands} {{blocks = B}} ({arguments}) {{")
        lines.append("%y = math.exp %a0\nyield %y\n}")
    body = "\n".join(lines)
    return parse(
        f"moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {{\n{body}\nreturn %k{len(reads) - 1}\n}}\n"
    )


def test_slots_are_reused_once_their_last_reader_has_run():
    """k0 is read by k1 only, so k2 may take its place; k1 lives until k3, so k2 may not take that."""
    m = chain([[], [0], [1], [2, 1], [3]])
    lowered, _ = lower(m, "plan-workspace")
    slots = {op.buffer.name: op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"}
    assert slots == {"k0": 0, "k1": 1, "k2": 0, "k3": 2}


def test_slots_of_one_kernel_are_apart_even_if_nobody_reads_them():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
          %a, %b, %c = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
            %p = math.exp %x
            %q = math.tanh %x
            %r = math.neg %x
            yield %p, %q, %r
          }
          %y = kernel.row_program %b {blocks = C} (%b: tensor<Tx5xf32>) {
            %s = math.exp %b
            yield %s
          }
          return %y
        }
        """
    )
    lowered, _ = lower(m, "plan-workspace")
    slots = [op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"]
    assert sorted(slots) == [0, 1, 2]


def test_slots_of_other_sizes_are_not_shared():
    m = parse(
        """
        moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
          %a = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
            %s = row.sum %x
            yield %s
          }
          %b = kernel.row_program %x, %a {blocks = C} (%x: tensor<Tx5xf32>, %a: tensor<Tx1xf32>) {
            %s = math.mul %x, %a
            yield %s
          }
          %c = kernel.row_program %b {blocks = D} (%b: tensor<Tx5xf32>) {
            %s = math.cast %b {dtype = bf16}
            yield %s
          }
          %y = kernel.row_program %c {blocks = A} (%c: tensor<Tx5xbf16>) {
            %s = math.exp %c
            yield %s
          }
          return %y
        }
        """
    )
    lowered, _ = lower(m, "plan-workspace")
    slots = [op.slot for op in lowered.walk() if op.name == "launch.alloc" and op.space == "workspace"]
    assert slots == [0, 1, 2]
