"""Pipelines as text, the loop that runs them, the stages between them, and everything that watches."""

import dataclasses
import io
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowering import lower

import moesaic as mo
from moesaic.ir.diagnostics import DiagnosticError
from moesaic.ir.errors import InternalError, UsageError
from moesaic.ir.parser import parse
from moesaic.passes import manager
from moesaic.passes.instruments import (
    CrashReproducer,
    DiffIR,
    History,
    PrintIR,
    SaveTree,
    Timing,
    VerifyEach,
    read_reproducer,
)
from moesaic.passes.manager import (
    DEFAULT,
    FORWARD,
    PIPELINES,
    REGISTRY,
    Instrument,
    Pass,
    PassContext,
    PassManager,
    parse_pipeline,
    pass_class,
    pipeline_text,
)
from moesaic.passes.stages import STAGES, check_stage
from moesaic.runtime.program import program_of


def router():
    return mo.Router(num_experts=5, top_k=2, score="sigmoid", renormalize=True).module()


# Pipelines as text ----------------------------------------------------------------------------------------------------

WORDS = st.from_regex(r"[A-Za-z0-9_.\-]{1,6}", fullmatch=True)
VALUES = {int: st.integers(-(10**6), 10**6), str: WORDS, bool: st.booleans(), float: st.floats(allow_nan=False)}


@st.composite
def passes(draw):
    cls = pass_class(draw(st.sampled_from(sorted(REGISTRY))))
    options = {}
    for field in dataclasses.fields(cls):
        kind = field.type
        if kind.startswith("tuple["):
            element = {"int": int, "str": str}[re.match(r"tuple\[(\w+)", kind)[1]]
            options[field.name] = tuple(draw(st.lists(VALUES[element], max_size=3)))
        else:
            options[field.name] = draw(VALUES[{"int": int, "str": str, "bool": bool, "float": float}[kind]])
    return cls(**{n: v for n, v in options.items() if draw(st.booleans())})


@given(st.lists(passes(), max_size=5))
def test_pipeline_text_reads_back(pipeline):
    text = pipeline_text(pipeline)
    assert parse_pipeline(text) == pipeline
    assert pipeline_text(parse_pipeline(text)) == text
    assert parse_pipeline(text.replace(",", " , ") if "{" not in text else f"\n {text} ") == pipeline


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_registered_passes(name):
    cls = pass_class(name)
    assert cls.name == name and str(cls()) == name and parse_pipeline(name) == [cls()]
    assert cls.__module__ == REGISTRY[name].split(":")[0]
    assert cls.__doc__ and cls.__dataclass_params__.frozen
    for stage in (cls.requires, cls.establishes):
        assert stage is None or stage in STAGES
    for field in dataclasses.fields(cls):
        assert re.search(rf"\b{field.name}\b.*:", cls.__doc__), f"option {field.name} is not described"


def test_named_pipelines():
    assert PIPELINES == {"default": DEFAULT, "forward": FORWARD}
    assert pipeline_text(parse_pipeline("default")) == DEFAULT
    assert pipeline_text(parse_pipeline("forward,dce")) == FORWARD + ",dce"
    assert parse_pipeline("") == parse_pipeline("  ") == []


def test_options():
    [found] = parse_pipeline("specialize{target=sm_80  lanes=8 alignment=2,16,4}")
    assert (found.target, found.lanes, found.alignment, found.threads) == ("sm_80", 8, (2, 16, 4), 0)
    assert str(found) == "specialize{target=sm_80 lanes=8 alignment=2,16,4}"
    assert str(parse_pipeline("specialize{lanes=0}")[0]) == "specialize", "a default is not spelled"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("canonicalise", "unknown pass 'canonicalise'; did you mean 'canonicalize'?; known: canonicalize, cse, dce"),
        ("defalt", "unknown pass 'defalt'; did you mean 'default'?"),
        ("zzz", "unknown pass 'zzz'; known: canonicalize"),
        ("specialize{lane=8}", "specialize: unknown option 'lane'; did you mean 'lanes'?; known: target, lanes"),
        ("cse{x=1}", "cse: unknown option 'x'; known: none"),
        ("specialize{lanes}", "specialize: option 'lanes' has no value; write lanes=value"),
        ("specialize{lanes=eight}", "specialize: option 'lanes' expects an integer, found 'eight'"),
        ("specialize{lanes=}", "specialize: option 'lanes' expects an integer, found ''"),
        ("specialize{alignment=2,x}", "specialize: option 'alignment' expects an integer, found 'x'"),
        ("specialize{lanes=8", "pipeline 'specialize{lanes=8': '{' is not closed"),
        ("specialize lanes=8}", "pipeline 'specialize lanes=8}': '}' without '{'"),
        ("cse dce", "'cse dce' is not a pass; write name or name{option=value}"),
        ("cse,{x=1}", "'{x=1}' is not a pass"),
    ],
)
def test_pipeline_errors(text, message):
    with pytest.raises(UsageError) as caught:
        parse_pipeline(text)
    assert message in str(caught.value) and caught.value.exit_code == 2


@dataclass(frozen=True)
class Odd(Pass):
    """Every kind of option, and one that has no text."""

    name: ClassVar[str] = "odd"
    flag: bool = False
    ratio: float = 0.5
    names: tuple[str, ...] = ("a",)
    table: dict[str, int] = dataclasses.field(default_factory=dict)

    def run(self, module, context):
        return False


def test_every_kind_of_option(monkeypatch):
    monkeypatch.setitem(REGISTRY, "odd", "moesaic.passes.manager:Odd")
    monkeypatch.setattr(manager, "Odd", Odd, raising=False)
    [found] = parse_pipeline("odd{flag=true ratio=1e-3 names=b,c}")
    assert (found.flag, found.ratio, found.names) == (True, 1e-3, ("b", "c"))
    assert str(dataclasses.replace(found, names=())).startswith("odd{flag=true ratio=0.001 names=")
    for text, kind in {"flag=yes": "true or false", "ratio=x": "a number"}.items():
        with pytest.raises(UsageError, match=f"expects {kind}"):
            parse_pipeline(f"odd{{{text}}}")
    with pytest.raises(InternalError, match="unsupported type"):
        parse_pipeline("odd{table=1}")


def test_passes_are_imported_when_used():
    code = (
        "import sys, moesaic.passes.manager as m\n"
        "print(*[n for n in sys.modules if n.startswith('moesaic.passes.')])\n"
        "m.parse_pipeline('cse')\n"
        "print('moesaic.passes.cse' in sys.modules, 'moesaic.passes.dce' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert set(first.split()) == {"moesaic.passes.manager", "moesaic.passes.stages"}
    assert second == "True False"


# Stages ---------------------------------------------------------------------------------------------------------------


def test_a_whole_compilation_goes_through_the_stages():
    module = router()
    stages = []
    for current in parse_pipeline("default"):
        PassManager([current]).run(module)
        legal = [s for s in STAGES if not _raises(module, s)]
        stages.append(legal[0] if legal else None)
    assert stages == sorted(stages, key=list(STAGES).index) and stages[-1] == "planned"
    assert "fused" in stages and stages[0] == "declared"


def _raises(module, stage):
    try:
        check_stage(module, stage)
    except DiagnosticError:
        return True
    return False


def test_the_table_knows_every_op():
    import moesaic.ir.ops  # noqa: F401
    from moesaic.ir.core import OPS

    prefixes = tuple(p for allowed in STAGES.values() for p in allowed)
    assert all(n.startswith(prefixes) for n in OPS if n not in ("return", "yield"))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("fuse-score-topk,sink-gathers", "col.count: not legal inside kernel.row_program in stage 'expanded'"),
        ("fuse-score-topk,fuse-score-topk", "col.count: not legal inside kernel.row_program in stage 'expanded'"),
        (
            "fuse-score-topk,differentiate",
            "kernel.row_program: not legal in stage 'summed', which allows math., row., col., slot.",
        ),
        ("fuse-score-topk,expand-rows", "kernel.row_program: not legal in stage 'summed'"),
        ("choose-saved", "math.sigmoid: not legal in stage 'fused', which allows kernel."),
        ("plan-workspace", "math.sigmoid: not legal in stage 'fused', which allows kernel."),
        ("fuse-score-topk,specialize", "kernel.col_finish: not legal in stage 'planned', which allows launch."),
    ],
)
def test_a_pass_in_the_wrong_stage_names_the_op(pipeline, message):
    with pytest.raises(DiagnosticError) as caught:
        PassManager(pipeline).run(router())
    shown = caught.value.diagnostics
    assert any(d.message.startswith(message) for d in shown) and len(shown) <= 3
    last = pipeline.rpartition(",")[2]
    assert f"note: {last} takes a module in stage" in str(caught.value) and "'default'" in str(caught.value)


def test_a_module_in_the_wrong_stage_is_told_once():
    with pytest.raises(DiagnosticError) as caught:
        PassManager("specialize").run(router())
    shown = str(caught.value)
    assert shown.count("error:") == 3 and "note: so are" in shown
    assert "specialize takes a module in stage 'planned', which plan-workspace makes" in shown


def test_ops_inside_kernels_are_checked():
    text = """
    moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
      %y = kernel.row_program %x {blocks = B} (%x: tensor<Tx5xf32>) {
        %b = launch.alloc {space = workspace, type = "tensor<Tx5xf32>"}
        yield %x
      }
      return %y
    }
    """
    with pytest.raises(
        DiagnosticError, match=r":4:14: error: launch\.alloc: not legal inside kernel\.row_program in stage 'fused'"
    ):
        check_stage(parse(text), "fused")


# The loop and what watches it -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breaks(Pass):
    """Leaves an op with an attribute that it does not have."""

    name: ClassVar[str] = "breaks"

    def run(self, module, context):
        module.entry.body.ops[0].attributes["colour"] = "red"
        return True


@dataclass(frozen=True)
class Fails(Pass):
    """Raises, after it has changed the module."""

    name: ClassVar[str] = "fails"
    after: int = 0

    def run(self, module, context):
        module.entry.body.ops[0].parent = None
        raise InternalError("first line\nsecond line")


class Log(Instrument):
    def __init__(self):
        self.calls = []

    def before_pipeline(self, module, passes):
        self.calls.append(("before all", len(passes)))

    def before_pass(self, index, current, module):
        self.calls.append(("before", index, current.name))

    def after_pass(self, index, current, module, changed):
        self.calls.append(("after", index, current.name, changed))

    def after_pipeline(self, module):
        self.calls.append(("after all",))

    def on_failure(self, index, current, passes, error):
        self.calls.append(("failed", index, current.name, str(error)))


def test_instruments_see_every_step():
    log = Log()
    context = PassContext()
    assert PassManager("canonicalize,expand-rows,expand-rows", [log]).run(router(), context) is context
    assert log.calls == [
        ("before all", 3),
        ("before", 0, "canonicalize"),
        ("after", 0, "canonicalize", False),
        ("before", 1, "expand-rows"),
        ("after", 1, "expand-rows", True),
        ("before", 2, "expand-rows"),
        ("after", 2, "expand-rows", False),
        ("after all",),
    ]


def test_a_failure_is_reported_and_raised():
    log = Log()
    with pytest.raises(InternalError, match="first line"):
        PassManager([*parse_pipeline("dce"), Fails(), *parse_pipeline("cse")], [log]).run(router())
    assert log.calls[-1] == ("failed", 1, "fails", "first line\nsecond line")
    assert ("after all",) not in log.calls


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_pass_that_reports_no_change_made_none(name):
    """Over all stages that the pass accepts, with and without something to do."""
    prefix, found = [], set()
    for current in ["", *DEFAULT.split(",")]:
        prefix += [current] if current else []
        module, _ = lower(router(), ",".join(prefix))
        for _ in range(2):
            before = str(module)
            try:
                changed = []
                recorder = Log()
                PassManager(name, [recorder]).run(module)
                changed = recorder.calls[2][3]
            except DiagnosticError:
                break
            found.add(changed)
            assert changed or str(module) == before, f"{name} after {prefix} changed something and did not say so"
    assert found, f"{name} ran nowhere"


def test_verify_each_catches_a_broken_pass():
    log = Log()
    with pytest.raises(DiagnosticError, match=r"math\.sigmoid: unknown attribute 'colour'"):
        PassManager([Breaks()], [VerifyEach(), log]).run(router())
    assert log.calls[-1][0] == "failed"
    PassManager([Breaks()]).run(router())  # nobody looked
    broken = router()
    broken.entry.body.ops[0].attributes["colour"] = "red"
    with pytest.raises(DiagnosticError):
        PassManager([], [VerifyEach()]).run(broken)


def printed(pipeline, **options):
    stream = io.StringIO()
    PassManager(pipeline, [PrintIR(stream, **options)]).run(router())
    return re.findall(r"// ----- (.*) -----\nmoe\.func", stream.getvalue()), stream.getvalue()


def test_print():
    pipeline = "canonicalize,expand-rows,dce"
    assert printed(pipeline, after_all=True)[0] == [
        "IR after canonicalize (no change)",
        "IR after expand-rows",
        "IR after dce (no change)",
    ]
    assert printed(pipeline, after_change=True)[0] == ["IR after expand-rows"]
    assert printed(pipeline, after=["dce"])[0] == ["IR after dce (no change)"]
    heads, text = printed(pipeline, before=["expand-rows"], after=["expand-rows"])
    assert heads == ["IR before expand-rows", "IR after expand-rows"]
    assert text.count("row.normalize") == 1 and text.count("math.safe_div") == 1
    assert printed(pipeline) == ([], "")


def test_diff():
    stream = io.StringIO()
    PassManager("canonicalize,expand-rows", [DiffIR(stream)]).run(router())
    text = stream.getvalue()
    assert text.startswith("// ----- changed by expand-rows -----\n")
    assert re.search(r"^-  %\w+ = row\.normalize", text, re.M) and re.search(r"^\+  %\w+ = math\.safe_div", text, re.M)
    assert "---" not in text.replace("-----", "") and "@@" not in text


def test_timing():
    stream = io.StringIO()
    timing = Timing(stream)
    PassManager("cse,expand-rows,cse", [timing]).run(router())
    assert [n for n, _ in timing.times] == ["cse", "expand-rows", "cse"] and all(t >= 0 for _, t in timing.times)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["ms", "%", "pass"] and [x.split()[-1] for x in lines[1:]] == [
        "cse",
        "expand-rows",
        "cse",
        "total",
    ]


def test_numbered_files(tmp_path):
    module = router()
    first = str(module)
    PassManager("canonicalize,expand-rows", [SaveTree(tmp_path / "a" / "b")]).run(module)
    files = {p.name: p.read_text() for p in (tmp_path / "a" / "b").iterdir()}
    assert sorted(files) == ["00_input.moe", "01_canonicalize.moe", "02_expand-rows.moe"]
    assert files["00_input.moe"] == first
    assert files["02_expand-rows.moe"] == f"// after expand-rows\n{module}"
    assert all(parse(text) for text in files.values())


def test_history():
    history = History()
    module = router()
    first = str(module)
    PassManager(DEFAULT, [history]).run(module)
    assert next(iter(history.stages)) == "declared" and history.stages["declared"] == first
    assert list(history.stages.values())[-1] == str(module)
    assert "canonicalize" not in history.stages, "it changed nothing"
    repeated = [n for n in history.stages if re.fullmatch(r".*-\d+", n)]
    assert all(n.rsplit("-", 1)[0] in history.stages for n in repeated)


def test_a_reproducer_reruns_to_the_same_error(tmp_path):
    text = """moe.func @f(%x: tensor<Tx5xf32>) -> (y: tensor<Tx5xf32>) {
  %a = math.mul %x, 1.0
  %s = col.sum %a
  %y = math.mul %a, %s
  return %y
}
"""
    path = tmp_path / "deep" / "crash.moe"
    reproducer = CrashReproducer(path)
    with pytest.raises(DiagnosticError) as first:
        PassManager("canonicalize,fuse-score-topk,plan-workspace,specialize{lanes=4}", [reproducer]).run(parse(text))
    assert reproducer.written
    written = path.read_text()
    assert written.splitlines()[0] == "// moesaic-pipeline: fuse-score-topk,plan-workspace,specialize{lanes=4}"
    assert written.splitlines()[1].startswith("// DiagnosticError in fuse-score-topk: ")
    assert "math.mul %x, 1.0" not in written, "the IR is that before the pass that failed"
    pipeline = read_reproducer(written)
    assert pipeline == "fuse-score-topk,plan-workspace,specialize{lanes=4}"
    again = parse(written)
    with pytest.raises(DiagnosticError) as second:
        PassManager(pipeline).run(again)
    assert [d.message for d in first.value.diagnostics] == [d.message for d in second.value.diagnostics]
    assert read_reproducer(text) is None and read_reproducer("") is None


def test_a_reproducer_of_a_check_and_of_many_lines(tmp_path):
    path = tmp_path / "crash.moe"
    with pytest.raises(InternalError):
        PassManager([Fails(after=3)], [CrashReproducer(path)]).run(router())
    lines = path.read_text().splitlines()
    assert lines[:2] == ["// moesaic-pipeline: fails{after=3}", "// InternalError in fails: first line"]
    assert parse(path.read_text()) == router()
    good = tmp_path / "none.moe"
    reproducer = CrashReproducer(good)
    PassManager("default", [reproducer]).run(router())
    assert not reproducer.written and not good.exists()
    with pytest.raises(DiagnosticError):
        PassManager([Breaks()], [VerifyEach(), CrashReproducer(path)]).run(router())
    assert path.read_text().startswith("// moesaic-pipeline: breaks\n// DiagnosticError in breaks: ")
    assert "colour =" not in path.read_text()


def test_the_environment_shows_a_lowering(tmp_path, monkeypatch, capsys):
    """Without the command line: prints, numbered files, and a bad value named."""
    program = program_of(mo.Router(11, 3, renormalize=True, name="shown").module())
    monkeypatch.setenv("MOESAIC_PRINT_IR", "fuse-score-topk")
    monkeypatch.setenv("MOESAIC_DUMP_DIR", str(tmp_path))
    program.lower("training")
    printed = capsys.readouterr().err
    assert printed.count("// ----- IR after fuse-score-topk") == 1 and "kernel.row_program" in printed
    [folder] = tmp_path.iterdir()
    assert sorted(p.name for p in folder.iterdir())[0] == "00_input.moe"
    monkeypatch.setenv("MOESAIC_PRINT_IR", "fuse-score-top")
    with pytest.raises(UsageError, match="did you mean 'fuse-score-topk'"):
        program.lower("forward")
