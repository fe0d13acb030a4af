"""How generated text is laid out: what is too wide goes on below, and nothing but white space changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.codegen.layout import WIDTH, laid_out

GOLDEN = Path(__file__).parent / "golden"


def words(text: str) -> str:
    return re.sub(r"\s+", "", text)


def widths(text: str) -> list[int]:
    """Of statements, without the comments behind them."""
    lines = (line.partition("  // ")[0] for line in text.split("\n"))
    return [len(line) for line in lines if not line.lstrip().startswith(("//", "#"))]


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.cu")), ids=lambda file: file.stem)
def test_kernels_fit_a_window(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert max(widths(text)) <= WIDTH
    assert laid_out(text) == text


CASES = {
    "what fits": """
  const int a = b;  // %a = something that may be as wide as it is, because whoever reads code can leave it where it is
""",
    "arguments": """
    moesaic::load_what_there_is<kVector, /*align=*/16>(address_of_a_row + row * stride, left, left, left, left, left,
                                                       value);
""",
    "arguments far to the right": """
  const auto result = some_namespace::a_function_of<Type<1, 2>, 3, 4, 5, and_so_on>(
      argument + 1, argument + 1, argument + 1, argument + 1, Type<int, 2>{a});
""",
    "a function": """
  const auto left = [&](int r) -> const Element* {
    return rows_of_an_operand_with_a_long_name + (first_slot_of_the_tile + r) * its_stride_in_elements;
  };
""",
    "an assignment": """
      const __nv_bfloat16* const a_row_of_an_operand_with_a_long_name =
          the_pointer_of_an_operand_with_a_long_name + token * stride;  // %why
""",
    "operands": """
  total += moesaic::to_float(moesaic::load_one(one_row_that_is_read + column < 1 ? c->d : e))
      * moesaic::to_float(moesaic::load_one(another_row_that_is_read + column));
""",
    "a loop": """
  for (long long a_number_with_a_name = blockIdx.x; a_number_with_a_name < static_cast<long long>(row_tiles) * kColumns;
       a_number_with_a_name += gridDim.x) {
""",
    "a kernel": """
extern "C" __global__ void __launch_bounds__(kThreads, /*blocks per multiprocessor, at least=*/12)
moe_backward_a_product_with_a_name(
""",
}


@pytest.mark.parametrize("case", CASES)
def test_where_statements_are_broken(case: str) -> None:
    wanted = CASES[case].strip("\n")
    wide = re.sub(r"(?<=\()\n *", "", wanted)
    wide = re.sub(r"\n *", " ", wide)
    assert laid_out(wide) == wanted


NAMES = st.text("abc_", min_size=1, max_size=24)
EXPRESSIONS = st.recursive(
    NAMES | st.sampled_from(["a->b", "Type<1, 2>{a}", "values[i][j]", "/*why=*/1", "x < y ? a : b", "-1.0f"]),
    lambda inner: (
        st.builds("{}({})".format, NAMES, st.lists(inner, max_size=5).map(", ".join))
        | st.builds("f<{}, 3>({})".format, NAMES, inner)
        | st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner)
        | st.builds("[&](int r) {{ return {}; }}".format, inner)
    ),
    max_leaves=25,
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 20), st.sampled_from(["", "const auto x = ", "x += "]), EXPRESSIONS, st.sampled_from(["", "  // c"])
)
def test_only_white_space_changes(margin: int, begin: str, expression: str, end: str) -> None:
    line = " " * margin + f"{begin}{expression};{end}"
    found = laid_out(line)
    assert words(found) == words(line)
    assert laid_out(found) == found or max(widths(found)) > WIDTH
    assert all(part == part.rstrip() and part.startswith(" " * margin) for part in found.split("\n"))
    if max(widths(line)) <= WIDTH:
        assert found == line
