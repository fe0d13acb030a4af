"""A layer as one HTML file: ops, CUDA, PTX and SASS beside one another and linked, and every pass.

The file needs nothing but itself. Every op is a link to its first line of CUDA, so that it can be read without scripts,
too; the script links the panes, shows one kernel or pass at a time, and takes keys.
"""

from __future__ import annotations

import html
import importlib.resources
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moesaic.codegen.listing import KERNEL, Line, Listing
from moesaic.runtime.commands import listings, text

if TYPE_CHECKING:
    from moesaic.codegen.kernel import GeneratedKernel
    from moesaic.runtime.explain import Explanation

AROUND = "the kernel around them: loops, addresses, stores"
FOLDED = "no line of its own: done where its operand is loaded or its result stored"


def page(
    title: str,
    target: str,
    kernels: Sequence[tuple[GeneratedKernel, Listing]],
    stages: Mapping[str, str],
    decisions: Sequence[str],
    explanation: Explanation,
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        title: what the layer is called.
        target: architecture that the kernels are for.
        kernels: of forward and backward, in order.
        stages: IR after each pass, by pass; the first is what was declared.
        decisions: remarks and warnings of the passes.
        explanation: of the same kernels.
        notes: what is missing, and why.
    """
    views = [(f"kernel-{k.symbol}", k.symbol) for k, _ in kernels]
    links = [*views, ("passes", "passes"), ("costs", "costs")]
    navigation = "".join(f'<a href="#{anchor}">{html.escape(name)}</a>' for anchor, name in links)
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    body = [
        *(_kernel(k, listing) for k, listing in kernels),
        _passes(stages, decisions),
        f'<section id="costs"><h2>What it costs</h2><div class="scroll">{explanation._repr_html_()}</div></section>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"<header><h1>{html.escape(title)}, for {html.escape(target)}</h1>{said}"
        "<p>Choose an op or a line to see what it comes from and what comes of it. <kbd>Tab</kbd> goes to the next "
        "pane, <kbd>↑</kbd> <kbd>↓</kbd> to the next line, <kbd>[</kbd> <kbd>]</kbd> to the next kernel or pass, "
        "<kbd>{</kbd> <kbd>}</kbd> out of the passes, <kbd>Esc</kbd> chooses nothing.</p>"
        f'<nav id="views" aria-label="Views">{navigation}</nav></header>\n<main>\n'
        + "\n".join(body)
        + f"\n</main>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _kernel(kernel: GeneratedKernel, listing: Listing) -> str:
    symbol = kernel.symbol
    configuration = next((line for line in listing.cuda if line.startswith("// Configuration:")), "")
    what = listing.cuda[0].removeprefix("// ").partition(": ")[2] if listing.cuda else ""
    panes = [
        _pane("IR", f'<ol tabindex="0" aria-label="Ops of {symbol}">{"".join(_ops(listing))}</ol>'),
        _pane("CUDA", f'<pre tabindex="0" aria-label="CUDA of {symbol}">{"".join(_cuda(listing))}</pre>'),
        _pane("PTX", _assembly("PTX", symbol, listing.ptx)),
        _pane("SASS", _assembly("SASS", symbol, listing.sass)),
    ]
    return (
        f'<section class="kernel" id="kernel-{symbol}" data-kernel="{symbol}"><h2>{symbol}</h2>'
        f"<p>{html.escape(what)}. {html.escape(configuration.removeprefix('// '))}</p>"
        f'<div class="panes">{"".join(panes)}</div></section>'
    )


def _pane(title: str, content: str) -> str:
    return f'<div class="pane"><h3>{title}</h3>{content}</div>'


def _ops(listing: Listing) -> Iterator[str]:
    for number, op in [*enumerate(map(str, listing.ops)), (KERNEL, AROUND)]:
        lines = listing.cuda_lines(number)
        name = f"op{number}" if number != KERNEL else "around"
        attributes = f'class="op" id="{listing.symbol}-{name}" data-op="{number}" style="--hue: {_hue(number)}"'
        if lines:
            first = lines[0] if number != KERNEL else _first_of_kernel(listing, lines)
            yield f'<li><a {attributes} href="#{listing.symbol}-L{first}">{html.escape(op)}</a></li>'
        else:
            yield f'<li><span class="op folded" title="{FOLDED}">{html.escape(op)}</span></li>'


def _first_of_kernel(listing: Listing, lines: Sequence[int]) -> int:
    return next((n for n in lines if listing.cuda[n - 1].startswith('extern "C"')), lines[0])


def _cuda(listing: Listing) -> Iterator[str]:
    for number, (line, owner) in enumerate(zip(listing.cuda, listing.owners, strict=True), 1):
        code, mark, note = line.partition("//")
        shown = html.escape(code, quote=False)
        if mark:
            shown += f'<span class="note">//{html.escape(note, quote=False)}</span>'
        hue = "" if owner == KERNEL else f' style="--hue: {_hue(owner)}"'
        yield (
            f'<span class="line" id="{listing.symbol}-L{number}" data-line="{number}" data-op="{owner}"{hue}>'
            f'<span class="number">{number}</span>{shown}</span>'
        )


def _assembly(kind: str, symbol: str, lines: Sequence[Line]) -> str:
    if not lines:
        return f'<pre tabindex="0" aria-label="{kind} of {symbol}">none here</pre>'
    runs = (
        f"{source}x{count}" if (count := len(list(group))) > 1 else str(source)
        for source, group in itertools.groupby(line.source for line in lines)
    )
    content = "\n".join(html.escape(line.text, quote=False) for line in lines)
    # The parser drops one line feed after <pre>.
    return f'<pre tabindex="0" aria-label="{kind} of {symbol}" data-source="{" ".join(runs)}">\n{content}</pre>'


def _hue(op: int) -> int:
    return (op * 67 + 200) % 360  # as in the script


def _passes(stages: Mapping[str, str], decisions: Sequence[str]) -> str:
    articles, links = [], []
    before = ""
    for number, (name, after) in enumerate(stages.items()):
        anchor = f"pass-{number}-{name}"
        lines = list(_difference(before, after)) if number else [("span", line) for line in after.splitlines()]
        changed = sum(kind != "span" for kind, _ in lines)
        summary = listings.pass_summary(name) if number else "the layer as IR"
        marked = "".join(f"<{kind}>{html.escape(line, quote=False)}</{kind}>" for kind, line in lines)
        label = f"{changed} lines changed" if number else f"{len(lines)} lines"
        articles.append(
            f'<article id="{anchor}"><h3>{html.escape(name)}: {html.escape(summary)} ({label})</h3>'
            f'<pre class="diff" tabindex="0">{marked}</pre></article>'
        )
        links.append(f'<a href="#{anchor}">{html.escape(name)}</a>')
        before = after
    said = "".join(f"<li>{html.escape(line)}</li>" for line in decisions)
    return (
        f'<section id="passes"><h2>Passes</h2><nav id="steps" aria-label="Passes">{"".join(links)}</nav>'
        f"{''.join(articles)}<h2>Decisions</h2><ul>{said}</ul></section>"
    )


def _difference(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Lines of `after` and those that are gone, with the element that each becomes."""
    for mark, line in text.difference(before, after):
        yield {"+": "ins", "-": "del"}.get(mark, "span"), line
