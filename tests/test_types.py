"""Element types, affine dimensions, tensor types and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.ir.errors import InputError
from moesaic.ir.types import (
    Affine,
    DType,
    TensorType,
    affine,
    broadcast_shapes,
    dim_add,
    dim_scale,
    dim_value,
    parse_dim,
    symbol,
    tensor,
)

SYMBOLS = st.from_regex(r"[A-Z][A-Z0-9_]{0,3}", fullmatch=True)
TERMS = st.dictionaries(SYMBOLS, st.integers(-5, 300), max_size=3)
DIMS = st.one_of(
    st.integers(0, 5000), st.builds(affine, TERMS.filter(lambda t: any(t.values())), st.integers(-200, 200))
)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("bf16", DType.BF16),
        ("fp16", DType.F16),
        ("torch.float32", DType.F32),
        ("double", DType.F64),
        ("bool", DType.I1),
    ],
)
def test_dtype_names(text, dtype):
    assert DType.parse(text) is dtype
    assert DType.parse(dtype.public_name) is dtype
    assert DType.parse(dtype) is dtype


def test_every_dtype_has_a_size_and_reads_back():
    sizes = {d.value: d.bytes for d in DType}
    assert sizes == {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i1": 1, "u8": 1, "i16": 2, "i32": 4, "i64": 8}
    assert all(DType.parse(d.value) is d and DType.parse(d.public_name) is d for d in DType)
    assert {d.value for d in DType if d.is_float} == {"bf16", "f16", "f32", "f64"}


def test_unknown_dtype_suggests():
    with pytest.raises(InputError, match=r"unknown dtype 'bf61'; did you mean 'bf16'\?; known: bf16, f16"):
        DType.parse("bf61")


def test_a_dtype_of_torch():
    torch = pytest.importorskip("torch")
    assert DType.parse(torch.bfloat16) is DType.BF16
    assert DType.parse(torch.int32) is DType.I32


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("T", "T"),
        ("17", "17"),
        ("T*8 + 16*127", "T*8 + 2032"),
        ("8*T", "T*8"),
        ("2 + T + 3 + T", "T*2 + 5"),
        ("T*0 + 5", "5"),
        ("B + A", "A + B"),
        ("T + -1", "T + -1"),
        ("T*-2", "T*-2"),
        ("2*3*T", "T*6"),
    ],
)
def test_dimension_text_is_canonical(text, shown):
    assert str(parse_dim(text)) == shown
    assert parse_dim(shown) == parse_dim(text)


@pytest.mark.parametrize("text", ["", "t", "T*E", "T-1", "T+", "1.5", "T**2", "Tx"])
def test_bad_dimensions(text):
    with pytest.raises(InputError, match="is not a dimension; write a number or an affine expression"):
        parse_dim(text)


@pytest.mark.parametrize("name", ["t", "", "T-1", "Tx", "1T", "T\n"])
def test_bad_symbols(name):
    with pytest.raises(InputError, match="is not a dimension symbol"):
        symbol(name)


@given(DIMS, DIMS, st.integers(-7, 7), st.integers(0, 97))
def test_dimension_arithmetic_is_arithmetic(a, b, factor, seed):
    names = {n for d in (a, b) if isinstance(d, Affine) for n, _ in d.terms}
    given_values = {n: seed + 3 * i for i, n in enumerate(sorted(names))}
    value = lambda d: dim_value(d, given_values)  # noqa: E731
    assert value(dim_add(a, b)) == value(a) + value(b)
    assert value(dim_scale(a, factor)) == factor * value(a)
    assert dim_add(a, b) == dim_add(b, a)
    assert dim_add(a, dim_scale(a, -1)) == 0


def test_a_missing_symbol_is_named():
    with pytest.raises(InputError, match=r"dimension T\*8 \+ 3 needs a value for T; given: B, E"):
        dim_value(parse_dim("T*8 + 3"), {"E": 1, "B": 2})
    with pytest.raises(InputError, match="given: none"):
        dim_value(symbol("T"), {})


@given(st.lists(DIMS, max_size=4), st.sampled_from(list(DType)))
def test_types_read_back(shape, dtype):
    type = TensorType(tuple(shape), dtype)
    assert TensorType.parse(str(type)) == type
    assert TensorType.parse(f" tensor < {str(type).removeprefix('tensor<')} ") == type


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor<Tx8>", "unknown dtype '8'"),
        ("tensor<Tx8xf23>", "unknown dtype 'f23'; did you mean 'f32'"),
        ("tensor<tx8xf32>", "'t' is not a dimension"),
        ("tensor<-3xf32>", "negative dimension"),
        ("tensor<Txx8xf32>", "'' is not a dimension"),
        ("tensor<>", "unknown dtype ''"),
        ("Tx8xf32", "is not a type; write one such as tensor<Tx256xbf16>"),
        ("tensor<Tx<8>xf32>", "is not a type"),
    ],
)
def test_bad_types(text, message):
    with pytest.raises(InputError, match=message):
        TensorType.parse(text)


def test_tensor_helpers():
    type = tensor("bf16", "T*8 + 1", 7)
    assert str(type) == "tensor<T*8 + 1x7xbf16>" and type.rank == 2
    assert type.elements({"T": 3}) == 175
    assert tensor("f32").elements({}) == 1
    assert type.with_dtype(DType.I1) == tensor("i1", "T*8 + 1", 7)


def test_broadcasting():
    t = symbol("T")
    assert broadcast_shapes((t, 5), (5,)) == (t, 5)
    assert broadcast_shapes((t, 1), (1, 7)) == (t, 7)
    assert broadcast_shapes((), (3,), (2, 1)) == (2, 3)
    with pytest.raises(InputError, match=r"shapes \[T, 5\] and \[3\] do not broadcast: 5 against 3"):
        broadcast_shapes((t, 5), (3,))
    with pytest.raises(InputError, match="T against B"):
        broadcast_shapes((t,), (symbol("B"),))
