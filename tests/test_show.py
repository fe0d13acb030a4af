"""What `moesaic show` links: ops and their lines of CUDA, PTX and SASS, in text and on the page."""

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.codegen.kernel import FusedOp
from moesaic.codegen.listing import KERNEL, Line, Listing, _owners, _ptx, _sass
from moesaic.codegen.target import Target
from moesaic.runtime.commands import inputs, lowering, text
from moesaic.runtime.commands.page import page
from moesaic.runtime.explain import explain
from moesaic.runtime.program import program_of

HOPPER = Target.parse("sm_90a")
LAYER = """\
import moesaic as mo
router = mo.Router(num_experts=12, top_k=3, score="sigmoid", selection_bias=True, renormalize=True)
experts = mo.Experts(num_experts=12, hidden=32, intermediate=24)
"""
ROUTER = LAYER + "router = mo.Router(20, 3, score='sigmoid', selection_bias=True, renormalize=True, dtype='bf16')\n"
MOE = LAYER + "layer, router = mo.MoE(router, experts, dtype='bf16'), None\n"
VOID = {"meta", "link", "br", "hr", "img", "input"}
BOUNDS = {"row.topk", "math.sigmoid", "row.sum", "slot.grouped_linear", "slot.grouped_wgrad", "slot.combine"}
"""Ops that always have lines."""


class Page(html.parser.HTMLParser):
    """Elements of a page: that they are closed in order is checked on the way."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
            self._inside.append(attributes.get("id") or attributes.get("aria-label") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()
        self._inside.pop()

    def handle_data(self, data: str) -> None:
        for name in self._inside:
            if name:
                self.texts[name] = self.texts.get(name, "") + data

    def having(self, attribute: str) -> Iterator[tuple[str, dict[str, str | None]]]:
        return ((tag, a) for tag, a in self.elements if attribute in a)


def lowered(tmp_path: Path, content: str) -> tuple[lowering.Lowered, explain]:
    file = tmp_path / "layer.py"
    file.write_text(content)
    module = inputs.read_module(str(file))
    declared = module.clone()
    return lowering.lower(module, lowering.passes_for("default", HOPPER)), declared


def made_up(kernel: object) -> Listing:
    """A listing whose PTX and SASS are one line for each line of CUDA, so that no compiler is needed."""
    lines = tuple(kernel.source.splitlines())
    every = tuple(Line(f"<{n}> & so on", n) for n in range(1, len(lines) + 1) for _ in range(n % 3))
    return Listing(kernel.symbol, kernel.ops, lines, _owners(lines, kernel.ops), every, every)


@pytest.mark.parametrize("content", [ROUTER, MOE], ids=["router", "layer"])
def test_a_page_is_whole(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.runtime.explain._resources", lambda *arguments: None)
    low, declared = lowered(tmp_path, content)
    listings = [(k, made_up(k)) for k in low.kernels]
    said = ["<decision> & reason"]
    made = page("a <layer>", "sm_90a", listings, low.stages, said, explain(program_of(declared), HOPPER), ["a note"])
    found = Page(made)

    # It needs nothing but itself, and knows both colour schemes.
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", made)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in found.elements}
    assert not [a for _, a in found.elements if "src" in a]
    assert "prefers-color-scheme: dark" in made and ("meta", "light dark") in [
        (tag, a.get("content")) for tag, a in found.elements
    ]
    light, dark = (
        set(re.findall(r"(--\w+):", part)) for part in made.partition("@media (prefers-color-scheme: dark)")[::2]
    )
    used = set(re.findall(r"var\((--\w+)\)", made))
    assert used <= light and used <= dark

    # Every link leads somewhere, no name is given twice.
    names = [a["id"] for _, a in found.having("id")]
    assert len(names) == len(set(names))
    links = [a["href"] for _, a in found.having("href")]
    assert links and all(link.startswith("#") and link[1:] in names for link in links), links
    assert {f"#kernel-{k.symbol}" for k in low.kernels} | {"#passes", "#costs"} <= set(links)

    # Every op is there, those with lines lead to one of theirs, and all that can be chosen is reached by keys.
    by_name = {a["id"]: a for _, a in found.having("id")}
    for kernel, listing in listings:
        for number, op in enumerate(listing.ops):
            lines = listing.cuda_lines(number)
            if not lines:
                continue
            link = by_name[f"{kernel.symbol}-op{number}"]
            assert link["href"] == f"#{kernel.symbol}-L{lines[0]}"
            assert found.texts[f"{kernel.symbol}-op{number}"] == str(op)
            assert all(by_name[f"{kernel.symbol}-L{n}"]["data-op"] == str(number) for n in lines)
        for number, line in enumerate(listing.cuda, 1):
            assert found.texts[f"{kernel.symbol}-L{number}"] == f"{number}{line}"
        for kind in ("PTX", "SASS"):
            label = f"{kind} of {kernel.symbol}"
            [attributes] = [a for _, a in found.having("aria-label") if a["aria-label"] == label]
            places = [
                int(line)
                for run in attributes["data-source"].split()
                for line, _, times in [run.partition("x")]
                for _ in range(int(times or 1))
            ]
            assert places == [line.source for line in listing.ptx]
            assert found.texts[label].removeprefix("\n").split("\n") == [line.text for line in listing.ptx]
    assert all(a.get("tabindex") == "0" for tag, a in found.elements if tag == "pre" or tag == "ol")

    # Every pass is there, with what it changed; what stays is the next pass's input.
    for number, (name, after) in enumerate(low.stages.items()):
        assert f"#pass-{number}-{name}" in links
        assert all(line.strip() in found.texts[f"pass-{number}-{name}"] for line in after.splitlines())
    assert "decision" in found.texts["passes"]
    assert len(made) < 3_000_000


@pytest.mark.parametrize("content", [ROUTER, MOE], ids=["router", "layer"])
def test_ops_have_their_lines(tmp_path: Path, content: str) -> None:
    for kernel in lowered(tmp_path, content)[0].kernels:
        listing = made_up(kernel)
        for number, op in enumerate(kernel.ops):
            lines = listing.cuda_lines(number)
            name = op.comment.partition(" = ")[2].partition(" ")[0]
            if name in BOUNDS:
                assert lines, op
            shown = [listing.cuda[n - 1] for n in lines]
            assert not lines or any(op.comment in line for line in shown)
            # No other op's line is among them.
            others = [o.comment for o in kernel.ops if o is not op]
            assert not [line for line in shown if any(line.endswith(f"// {o}") for o in others)]
        assert listing.cuda_lines(KERNEL)


def test_four_columns_hold_every_line(tmp_path: Path) -> None:
    kernel = lowered(tmp_path, ROUTER)[0].kernels[0]
    listing = made_up(kernel)
    rows = list(text.four_columns(listing))
    start = next(n for n, line in enumerate(listing.cuda) if line.startswith('extern "C"'))
    assert [r[1] for r in rows if r[1]] == [c.partition("  // %")[0] for c in listing.cuda[start:] if c]
    beside = [line.text for line in listing.ptx if line.source > start]
    assert [r[2] for r in rows if r[2]] == [r[3] for r in rows if r[3]] == beside
    assert {r[0] for r in rows if r[0]} == {str(op) for n, op in enumerate(listing.ops) if listing.cuda_lines(n)}


def test_comments_own_what_follows_them() -> None:
    ops = [FusedOp("%a = math.exp %x", ""), FusedOp("%b = row.sum %a", ""), FusedOp("%c = math.mul %b, 2.0", "")]
    lines = """\
      for (int i = 0; i < n; ++i) {
        const float a = exp(x);  // %a = math.exp %x
        kept[i] = a;
      }

      // %b = row.sum %a
      float b = 0.0f;
#pragma unroll
      for (int i = 0; i < n; ++i) b += kept[i];

      if (last) {  // %c = math.mul %b, 2.0
        store(2.0f * b);
      }
    }""".splitlines()
    assert _owners(lines, ops) == (-1, 0, -1, -1, -1, 1, 1, 1, 1, -1, 2, 2, 2, -1)


def test_an_op_on_gates_and_ups_has_both_lines() -> None:
    lines = """\
  const float wide_gate = static_cast<float>(h_gate[v]);  // %wide = math.cast %h {dtype = f32}
  const float wide_up = static_cast<float>(h_up[v]);
  const float up = 1.0f;""".splitlines()
    assert _owners(lines, [FusedOp("%wide = math.cast %h {dtype = f32}", "")]) == (0, 0, -1)


def test_a_statement_in_several_lines_is_one() -> None:
    lines = """\
  store(row,
        column);
  const float a_name_that_is_long =
      moesaic::a_function(of_this,
                          of_that);  // %a = math.mul %b, %c
  const float next = 1.0f;""".splitlines()
    assert _owners(lines, [FusedOp("%a = math.mul %b, %c", "")]) == (-1, -1, 0, 0, 0, -1)


def test_lines_of_ptx_follow_what_was_inlined() -> None:
    ptx = """\
.visible .entry k(
)
{
	.loc	1 7 3
	mov.u32 	%r1, 1;
	.loc	2 40 3, function_name $L__info_string0, inlined_at 1 9 5
	.loc	3 50 1, function_name $L__info_string1, inlined_at 2 40 3
	mov.u32 	%r2, 2;
	.loc	2 41 3
	mov.u32 	%r3, 3;
	ret;
}
	.file	1 "/some/where/k.cu"
	.file	2 "/moesaic/row.cuh"
	.file	3 "/moesaic/base.cuh"
"""
    found = {line.text.split()[-1].rstrip(";"): line.source for line in _ptx(ptx, "k") if "mov" in line.text}
    assert found == {"1": 7, "2": 9, "3": 0}


def test_lines_of_sass_follow_what_was_inlined() -> None:
    sass = """\
	.section	.text.k,"ax",@progbits
	//## File "/some/where/k.cu", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/moesaic/base.cuh", line 50 inlined at "/moesaic/row.cuh", line 40
	//## File "/moesaic/row.cuh", line 40 inlined at "/some/where/k.cu", line 9
	//## File "/some/where/k.cu", line 9
        /*0010*/                   FADD R2, R1, R1 ;
        /*0020*/                   FADD R3, R1, R1 ;
.L_x_0:
	//## File "/moesaic/base.cuh", line 50
        /*0030*/                   EXIT ;
	.section	.other
        /*0040*/                   NOP ;
"""
    assert [(line.text.split()[-2 if ";" in line.text else -1], line.source) for line in _sass(sass, "k.cu")] == [
        ("c[0x0][0x28]", 7),
        ("R1", 9),
        ("R1", 9),
        (".L_x_0:", 0),
        ("EXIT", 0),
    ]


def test_differences_hold_all_lines() -> None:
    before = "func {\n  %0 = a\n  %1 = b %0\n}\n"
    after = "func {\n  %0 = c\n  %1 = a\n  %2 = b %1\n}\n"
    marked = list(text.difference(before, after))
    assert [line for mark, line in marked if mark != "-"] == after.splitlines()
    assert ("+", "  %0 = c") in marked and not [m for m in marked if m[0] == "-"]


@pytest.mark.nvrtc
def test_machine_code_is_linked_to_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from moesaic.codegen.disassemble import disassemblers

    file = tmp_path / "router.py"
    file.write_text(ROUTER)
    assert main(["show", str(file), "--kernel", "route_rows", "--op", "row.topk", "--arch", "sm_90a"]) == 0
    out = capsys.readouterr().out
    assert "%values, %indices = row.topk" in out
    instructions = re.findall(r"^ +\d+  (?:@!?%p\d+ )?[a-z]+\.[a-z0-9.]+[ \t]", out, re.MULTILINE)
    assert len(instructions) > 20
    if any(tool.knows_lines for tool in disassemblers()):
        assert len(re.findall(r"^ +\d+  /\*[0-9a-f]{4}\*/  ", out, re.MULTILINE)) > 20
    made = tmp_path / "page.html"
    assert main(["show", str(file), "--kernel", "route_rows", "--html", str(made), "--arch", "sm_90a"]) == 0
    sources = re.findall(r'aria-label="PTX of route_rows" data-source="([^"]*)"', made.read_text())
    assert len(set(sources[0].split())) > 20


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--op", "row.topkk"], 1, "did you mean 'row.topk'?"),
        (["--kernel", "route_row"], 2, "did you mean 'route_rows'?"),
        (["--html", "x.html", "--op", "row.topk"], 2, "--html shows everything"),
    ],
)
def test_faults(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("moesaic.runtime.commands.show._listings", lambda low, ks: ([(k, made_up(k)) for k in ks], []))
    file = tmp_path / "router.py"
    file.write_text(ROUTER)
    assert main(["show", str(file), *arguments]) == code
    assert message in capsys.readouterr().err
