"""Small modules for the tests of passes, and running one pass on them."""

import re

from moesaic.ir.parser import parse
from moesaic.passes.manager import PassContext, pass_class

TYPES = {
    "x": "tensor<Tx5xf32>",
    "z": "tensor<Tx5xf32>",
    "h": "tensor<Tx5xbf16>",
    "d": "tensor<Tx5xf64>",
    "v": "tensor<5xf32>",
    "c": "tensor<Tx1xf32>",
    "i": "tensor<Tx2xi32>",
    "p": "tensor<Tx2xf32>",
}


def module(body, **results):
    """A function over those of the inputs above that the body names; `results` gives names and values."""
    named = results or {"y": "y"}
    used = [n for n in TYPES if re.search(rf"%{n}\b", body + "".join(f"%{v} " for v in named.values()))]
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    head = ", ".join(f"%{n}: {TYPES[n]}" for n in used)
    b = parse(f"moe.func @f({head}) -> () {{\n{lines}\n  return\n}}\n", verify=False)
    function = b.entry
    by_name = {a.name: a for a in function.arguments} | {r.name: r for op in function.body.walk() for r in op.results}
    function.returned.extend(by_name[v] for v in named.values())
    function.result_names.extend(named)
    return b


def run(name, m, **options):
    """(changed, context) of one pass, in place."""
    context = PassContext()
    return pass_class(name)(**options).run(m, context), context
