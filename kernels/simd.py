"""Vectors of 16 lanes for functions that Numba compiles; LLVM splits them where a processor's are narrower.

Addresses are int64, bfloat16 is read and written as float32 (2 bytes an element in memory, 4 in a register). A tuple of
vectors is registers that are worked on together. `emit_` functions write LLVM's instructions, for `operation`s.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel.models import PrimitiveModel
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, register_model

LANES = 16
# Of 16 bfloat16 in memory.
VECTOR_BYTES = 2 * LANES
# How far before its use memory is asked for: the processor's own prefetching stops at the end of every page.
_BYTES_AHEAD = 4096

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_BYTE, _HALVES = ir.IntType(8), ir.VectorType(ir.IntType(16), LANES)
_ZEROS = ir.Constant(FLOATS, [0.0] * LANES)

Value: TypeAlias = ir.Value
Builder: TypeAlias = ir.IRBuilder


class _Vector(types.Type):
    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(_Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


Floats = _Vector("float32x16", FLOATS)
Ints = _Vector("int32x16", INTS)


def operation(
    result: types.Type | Callable[..., types.Type],
    *parameters: types.Type,
    num_tuples: int = 0,
    num_constants: int = 0,
) -> Callable[[Callable[..., Any]], Any]:
    """A function for compiled code out of `emit(builder, *values)`, which writes its instructions.

    It takes `num_tuples` tuples of vectors, which `emit` gets as lists, `parameters`, and `num_constants` whole numbers
    that are known when it is compiled. `result` is a type, or is told it by the tuples' types and the constants. `emit`
    returns a value, a list for a tuple, or nothing for `void`.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def typed(_: object, *arguments: Any) -> Any:
            tuples, constants = arguments[:num_tuples], arguments[len(arguments) - num_constants :]
            if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
                return None
            numbers = [constant.literal_value for constant in constants]
            returned = result if isinstance(result, types.Type) else result(*tuples, *numbers)

            def generate(context: Any, builder: Builder, _: object, values: Sequence[Value]) -> Any:
                lists = [
                    [builder.extract_value(value, i) for i in range(of_type.count)]
                    for value, of_type in zip(values, tuples, strict=False)
                ]
                value = emit(builder, *lists, *values[num_tuples : len(values) - num_constants], *numbers)
                if returned is types.void:
                    return context.get_dummy_value()
                return _emit_tuple(builder, value) if isinstance(value, list) else value

            return returned(*tuples, *parameters, *constants), generate

        return intrinsic(prefer_literal=True)(typed)

    return decorate


@operation(lambda start, stop: UniTuple(types.int64, stop - start), types.voidptr, num_constants=2)
def unpack(builder: Builder, arguments: Value, start: int, stop: int) -> list[Value]:
    """Those from `start` to `stop` of the array of int64 that a kernel is called with."""
    array = builder.bitcast(arguments, LONG.as_pointer())
    return [builder.load(builder.gep(array, [ir.Constant(LONG, i)])) for i in range(start, stop)]


@operation(types.float32, types.int64)
def float_of_bits(builder: Builder, bits: Value) -> Value:
    return builder.bitcast(builder.trunc(bits, INT), FLOAT)


@operation(types.void, types.int64, types.int64)
def call(builder: Builder, function: Value, argument: Value) -> None:
    """`function(argument)`, both addresses."""
    pointer = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer()]).as_pointer()
    builder.call(builder.inttoptr(function, pointer), [builder.inttoptr(argument, _BYTE.as_pointer())])


@operation(types.int64, types.int64)
def load_int64(builder: Builder, address: Value) -> Value:
    return emit_load(builder, address, LONG)


@operation(types.float32, types.int64)
def load_float(builder: Builder, address: Value) -> Value:
    return emit_load(builder, address, FLOAT)


@operation(types.void, types.int64, types.float32)
def store_float(builder: Builder, address: Value, value: Value) -> None:
    _emit_store(builder, address, value)


@operation(Ints, types.int64)
def load_ints(builder: Builder, address: Value) -> Value:
    return emit_load(builder, address, INTS)


@operation(Floats, types.int64)
def load_floats(builder: Builder, address: Value) -> Value:
    return emit_load(builder, address, FLOATS)


@operation(types.void, types.int64, Floats)
def store_floats(builder: Builder, address: Value, values: Value) -> None:
    _emit_store(builder, address, values)


@operation(Floats, types.int64)
def load_bfloats(builder: Builder, address: Value) -> Value:
    return emit_load_bfloats(builder, address)


@operation(types.void, types.int64, Floats)
def store_bfloats(builder: Builder, address: Value, values: Value) -> None:
    emit_store_bfloats(builder, address, values)


@operation(types.void, types.int64)
def prefetch(builder: Builder, address: Value) -> None:
    """The cache line that will be read some time after this one."""
    function = _function(builder, "llvm.prefetch.p0", ir.VoidType(), _BYTE.as_pointer(), INT, INT, INT)
    ahead = builder.inttoptr(builder.add(address, ir.Constant(LONG, _BYTES_AHEAD)), _BYTE.as_pointer())
    for_reading, keep_in_all_caches, data = (ir.Constant(INT, value) for value in (0, 3, 1))
    builder.call(function, [ahead, for_reading, keep_in_all_caches, data])


@operation(Floats)
def zeros(_: Builder) -> Value:
    return _ZEROS


@operation(Floats, types.float32)
def splat(builder: Builder, value: Value) -> Value:
    return emit_splat(builder, value)


@operation(Floats, Floats)
def negative(builder: Builder, values: Value) -> Value:
    return builder.fneg(values)


@operation(Floats, Floats, Floats)
def add(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fadd(a, b)


@operation(Floats, Floats, Floats)
def multiply(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fmul(a, b)


@operation(Floats, Floats, Floats)
def divide(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fdiv(a, b)


@operation(Floats, Floats, Floats, Floats)
def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """`a * b + c`, rounded once."""
    return emit_fma(builder, a, b, c)


@operation(types.float32, Floats)
def total(builder: Builder, values: Value) -> Value:
    return _emit_total(builder, values)


@operation(types.float32, types.float32)
def inverse_root(builder: Builder, value: Value) -> Value:
    root = builder.call(_function(builder, "llvm.sqrt.f32", FLOAT, FLOAT), [value])
    return builder.fdiv(ir.Constant(FLOAT, 1.0), root)


@operation(types.float32, types.float32)
def inverse(builder: Builder, value: Value) -> Value:
    return builder.fdiv(ir.Constant(FLOAT, 1.0), value)


@operation(types.float32)
def infinity(_: Builder) -> Value:
    return ir.Constant(FLOAT, float("inf"))


@operation(Floats, Floats)
def exp(builder: Builder, x: Value) -> Value:
    """`2 ** n * e ** r`, r being at most half of ln 2: seven terms of its series, 3e-7 off at most.

    0 below -87, infinity above 88. ln 2 is subtracted in two parts, so that r is exact (Cody and Waite 1980).
    """
    low, high = float_lanes(-87.0), float_lanes(88.0)
    is_low = builder.fcmp_ordered("<", x, low)
    bounded = builder.select(is_low, low, x)
    is_high = builder.fcmp_ordered(">", bounded, high)
    bounded = builder.select(is_high, high, bounded)
    turns = builder.fmul(bounded, float_lanes(1.44269504))
    n = builder.call(_function(builder, "llvm.nearbyint.v16f32", FLOATS, FLOATS), [turns])
    rest = emit_fma(builder, n, float_lanes(-0.693359375), bounded)
    rest = emit_fma(builder, n, float_lanes(2.12194440e-4), rest)
    series = float_lanes(1 / 720)
    for term in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = emit_fma(builder, series, rest, float_lanes(term))
    exponent = builder.shl(builder.add(builder.fptosi(n, INTS), int_lanes(127)), int_lanes(23))
    power = builder.select(is_low, _ZEROS, builder.fmul(series, builder.bitcast(exponent, FLOATS)))
    return builder.select(is_high, float_lanes(float("inf")), power)


@operation(lambda count: UniTuple(Floats, count), num_constants=1)
def many_zeros(_: Builder, count: int) -> list[Value]:
    return [_ZEROS] * count


@operation(lambda count: UniTuple(Floats, count), types.int64, num_constants=1)
def load_many_bfloats(builder: Builder, address: Value, count: int) -> list[Value]:
    """`count` vectors that lie side by side."""
    return [emit_load_bfloats(builder, _emit_moved(builder, address, i)) for i in range(count)]


@operation(types.float32, types.int64, num_tuples=1)
def dot(builder: Builder, vectors: list[Value], address: Value) -> Value:
    """Sum of the products with as many vectors of bfloat16."""
    sums = _ZEROS
    for i, vector in enumerate(vectors):
        sums = emit_fma(builder, vector, emit_load_bfloats(builder, _emit_moved(builder, address, i)), sums)
    return _emit_total(builder, sums)


@operation(lambda sums: sums, types.float32, types.int64, num_tuples=1)
def accumulate(builder: Builder, sums: list[Value], weight: Value, address: Value) -> list[Value]:
    """`sums + weight * vectors`, these being bfloat16."""
    weights = emit_splat(builder, weight)
    vectors = [emit_load_bfloats(builder, _emit_moved(builder, address, i)) for i in range(len(sums))]
    return [emit_fma(builder, weights, vector, sums[i]) for i, vector in enumerate(vectors)]


@operation(types.void, types.float32, types.int64, num_tuples=1)
def store_scaled(builder: Builder, vectors: list[Value], factor: Value, address: Value) -> None:
    """`vectors * factor` as bfloat16."""
    factors = emit_splat(builder, factor)
    for i, vector in enumerate(vectors):
        emit_store_bfloats(builder, _emit_moved(builder, address, i), builder.fmul(vector, factors))


def int_lanes(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)


def float_lanes(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * LANES)


def emit_load(builder: Builder, address: Value, of_type: ir.Type) -> Value:
    value = builder.load(builder.inttoptr(address, of_type.as_pointer()))
    value.align = 2
    return value


def emit_load_bfloats(builder: Builder, address: Value) -> Value:
    """They are the upper halves of float32."""
    halves = builder.zext(emit_load(builder, address, _HALVES), INTS)
    return builder.bitcast(builder.shl(halves, int_lanes(16)), FLOATS)


def emit_load_halves(builder: Builder, address: Value) -> Value:
    """float16 as float32."""
    halves = emit_load(builder, address, ir.VectorType(ir.HalfType(), LANES))
    return builder.fpext(halves, FLOATS)


def emit_store_bfloats(builder: Builder, address: Value, values: Value) -> None:
    """Rounded to the nearest, ties to even."""
    bits = builder.bitcast(values, INTS)
    is_odd = builder.and_(builder.lshr(bits, int_lanes(16)), int_lanes(1))
    rounded = builder.add(bits, builder.add(is_odd, int_lanes(0x7FFF)))
    _emit_store(builder, address, builder.trunc(builder.lshr(rounded, int_lanes(16)), _HALVES))


def emit_splat(builder: Builder, value: Value) -> Value:
    undefined = ir.Constant(FLOATS, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, ir.Constant(INT, 0)), undefined, int_lanes(0)
    )


def emit_fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return builder.call(_function(builder, "llvm.fma.v16f32", FLOATS, FLOATS, FLOATS, FLOATS), [a, b, c])


def _emit_store(builder: Builder, address: Value, value: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 2


def _emit_moved(builder: Builder, address: Value, num_vectors: int) -> Value:
    """Past so many vectors of bfloat16."""
    return builder.add(address, ir.Constant(LONG, VECTOR_BYTES * num_vectors))


def _emit_total(builder: Builder, values: Value) -> Value:
    undefined, size = ir.Constant(FLOATS, ir.Undefined), LANES
    while size > 1:
        size //= 2
        halves_swapped = ir.Constant(INTS, [(i + size) % LANES for i in range(LANES)])
        values = builder.fadd(values, builder.shuffle_vector(values, undefined, halves_swapped))
    return builder.extract_element(values, ir.Constant(INT, 0))


def _emit_tuple(builder: Builder, values: Sequence[Value]) -> Value:
    array = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        array = builder.insert_value(array, value, i)
    return array


def _function(builder: Builder, name: str, result: ir.Type, *parameters: ir.Type) -> ir.Function:
    return get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)
