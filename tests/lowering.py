"""What the tests of passes share: FileCheck, random routers, and an interpreter for every stage of a compilation."""

import io
import math

import pytest
import torch
from hypothesis import strategies as st

import moesaic as mo
from moesaic.ir.core import Constant, Function
from moesaic.ir.ops.kernel import ColFinish, Ticket, is_column_value
from moesaic.ir.ops.launch import Alloc, Kernel
from moesaic.ir.verifier import verify_module
from moesaic.passes.instruments import VerifyEach
from moesaic.passes.manager import PassManager
from moesaic.runtime import reference


def lower(module, pipeline):
    """A copy of the module after a pipeline, verified after each pass, and what the passes had to say."""
    copy = module.clone()
    context = PassManager(pipeline, [VerifyEach()]).run(copy)
    verify_module(copy)
    return copy, context


def file_check(text, checks, name="checks"):
    """Fails unless `text` passes the FileCheck lines (`CHECK:`, `CHECK-NEXT:`, `CHECK-NOT:`, ...) in `checks`."""
    __tracebackhide__ = True
    # Here, so that tests that check no text run where this package is not.
    import filecheck.finput
    import filecheck.matcher
    import filecheck.options
    import filecheck.parser

    options = filecheck.options.Options(match_filename=name)
    parser = filecheck.parser.Parser(options, io.StringIO(checks), *filecheck.parser.pattern_for_opts(options))
    matcher = filecheck.matcher.Matcher(options, filecheck.finput.FInput("output", str(text)), parser)
    matcher.stderr = io.StringIO()
    if matcher.run() != 0:
        pytest.fail(f"{matcher.stderr.getvalue()}\nThe whole text:\n{text}", pytrace=False)


# Evaluating lowered functions -----------------------------------------------------------------------------------------


def evaluate(function, inputs):
    """Results of a function in any stage. Column sums of a kernel are split over two blocks; workspace slots are
    shared memory, where reading what a later buffer has overwritten is an error."""
    given = {a.name: inputs[a.name] for a in function.arguments}
    if not any(op.name.startswith(("kernel.", "launch.")) for op in function.body.ops):
        return reference.evaluate(function, given) if given else []
    values = {a: given[a.name] for a in function.arguments}
    slots, homes = {}, {}

    def read(value):
        if isinstance(value, Constant):
            return torch.tensor(value.value, dtype=torch.float64)
        if value in homes:
            assert slots[homes[value]][0] is value, f"slot {homes[value]} was overwritten before %{value.name} was read"
            return slots[homes[value]][1]
        return values[value]

    for op in function.body.ops[:-1]:
        if isinstance(op, Alloc):
            if op.space == "workspace":
                homes[op.buffer] = op.slot
        elif isinstance(op, Kernel):
            computed = _region(op.region, [read(v) for v in op.operands[: op.reads]], op.partials)
            for buffer, tensor in zip(op.written, computed, strict=True):
                if buffer in homes:
                    slots[homes[buffer]] = (buffer, tensor)
                else:
                    values[buffer] = tensor
            for buffer in op.written:
                read(buffer)  # two results of one kernel must not share a place
        else:
            partials = op.partials if isinstance(op, ColFinish) else 0
            computed = _region(op.region, [read(v) for v in op.operands], partials)
            values.update(zip(op.results, computed, strict=True))
    return [read(v) for v in function.returned]


def _region(region, operands, partials=0):
    """Results of a region; the first operands may be partial rows, whose sums it is about."""
    copy = region.clone()
    for i, argument in enumerate(copy.arguments):
        argument.name = f"a{i}"
    for ticket in [op for op in copy.ops if isinstance(op, Ticket)]:
        copy.replace({ticket.result: Constant(0.0)})
        copy.ops.remove(ticket)
    function = Function("region", copy)
    operands = [x.sum(0, dtype=x.dtype) if i < partials else x for i, x in enumerate(operands)]
    tokens = max(
        (x.shape[0] for a, x in zip(copy.arguments, operands, strict=True) if a.type.leading == "T"), default=0
    )
    if not any(is_column_value(v) for v in copy.terminator.operands):
        return reference.evaluate(function, {f"a{i}": x for i, x in enumerate(operands)})
    parts = []
    for rows in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
        part = {
            f"a{i}": x[rows] if a.type.leading == "T" else x
            for i, (a, x) in enumerate(zip(copy.arguments, operands, strict=True))
        }
        parts.append(reference.evaluate(function, part))
    joined = []
    for value, first, second in zip(copy.terminator.operands, *parts, strict=True):
        if is_column_value(value):
            joined.append(torch.stack([first, second]))
        else:
            joined.append(torch.cat([first, second]) if value.type.leading == "T" else first)
    return joined


# Random routers -------------------------------------------------------------------------------------------------------

SCORES = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrtsoftplus",
    "log1p of softplus": lambda x: mo.math.log1p(mo.math.softplus(x)),
    "clamped silu": lambda x: mo.math.clamp(mo.math.silu(x), min=0.0, max=1.5) + 0.125,
    "shifted sigmoid": lambda x: mo.math.sigmoid(x - 0.25) * 2.0,
}
OUTPUTS = ["weights", "indices", "counts", "probs", "map", "bitmap", "scores", "logsumexp"]


@st.composite
def router_options(draw):
    """Arguments of a router: every combination of score, order, biases, groups, division, scale and outputs."""
    groups = draw(st.sampled_from([None, None, 1, 2, 3, 5]))
    size = draw(st.integers(1, 5))
    experts = size * groups if groups else draw(st.sampled_from([1, 2, 3, 7, 11, 12, 13]))
    options = {
        "num_experts": experts,
        "score": SCORES[draw(st.sampled_from(sorted(SCORES)))],
        "order": draw(st.sampled_from(["score_then_topk", "topk_then_score"])),
        "selection_bias": draw(st.booleans()),
        "gate_bias": draw(st.booleans()),
        "renormalize": draw(
            st.sampled_from(
                [False, True, mo.norm.sum(eps=0.25), mo.norm.sum(eps=1e-20, min=1.0), mo.norm.lp(2), mo.norm.lp(3.5)]
            )
        ),
        "indices_dtype": draw(st.sampled_from(["int16", "int32", "int64"])),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "outputs": tuple(draw(st.lists(st.sampled_from(OUTPUTS), min_size=1, unique=True))),
        "rank": draw(st.sampled_from(["auto", "score"])),
        "weights_dtype": draw(st.sampled_from(["fp32", "bf16"])),
    }
    available = experts
    if groups:
        kept = draw(st.integers(1, groups))
        available = kept * size
        best = draw(st.integers(0, size))
        options |= {"groups": groups, "groups_kept": kept, "group_score": mo.sum_top(best) if best else "max"}
    return {**options, "top_k": draw(st.integers(1, available))}


@st.composite
def routers(draw):
    """A router as a module. Logits are declared bf16 or f32; the tests feed float64."""
    return mo.Router(**draw(router_options())).module(draw(st.sampled_from(["bf16", "f32"])))


def inputs_of(function, seed, tokens=7, special=False):
    """Random float64 inputs by name; with `special`, ties, infinities and NaN among the logits."""
    generator = torch.Generator().manual_seed(seed)
    symbols = {"T": tokens}
    made = {}
    for argument in function.arguments:
        shape = [d if isinstance(d, int) else symbols[str(d)] for d in argument.type.shape]
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        if special and argument.name == "logits":
            pool = torch.tensor([0.0, -0.0, 1.0, 1.0, -2.0, -math.inf, math.nan, 40.0, -750.0], dtype=torch.float64)
            odd = pool[torch.randint(0, len(pool), shape, generator=generator)]
            x = torch.where(torch.rand(shape, generator=generator) < 0.6, odd, x)
            x[0] = -math.inf
        made[argument.name] = x
    return made


def backward_inputs(forward, backward, inputs, results, seed):
    """What a backward function needs: inputs and results of forward by name, and random cotangents."""
    generator = torch.Generator().manual_seed(seed + 1000)
    named = dict(zip(forward.result_names, results, strict=True))
    cotangents = {
        f"d_{n}": torch.randn(r.shape, dtype=torch.float64, generator=generator)
        for n, r in named.items()
        if r.is_floating_point()
    }
    available = {**named, **inputs, **cotangents}
    return {a.name: available[a.name] for a in backward.arguments}, cotangents
