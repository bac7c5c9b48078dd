"""The text form of a :class:`~autopar.ir.graph.Graph`: printing and parsing, inverse to each other."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from autopar.errors import GraphError

from .node import PLACEHOLDERS, SHORT_DTYPES, Arg, Dim, Node, Output, Phase, TensorType, Value, expression_text, symbol

_TORCH = {
    **{str(d).removeprefix("torch."): d for d in SHORT_DTYPES.values()},
    "strided": torch.strided,
    "sparse_coo": torch.sparse_coo,
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_VALUE = re.compile(rf"{_STRING}|%(\w+)(?:\.(\d+))?")
_RESULT = re.compile(r"%(\w+)(?:\.\d+)?: (none|\w+\[[^\]]*\])")
_OUTPUT = re.compile(rf"^return (\w+) ({_STRING}) = (?:none|%(\w+)(?:\.(\d+))?)$")
_UNQUOTED = r"""(?:(?!  @)[^"'])*"""
# Results, operation, arguments and module of one line, of a graph or of a program. What is within quotes ends nothing;
# what follows the arguments may be in brackets itself.
CALL = re.compile(
    r"^(?P<results>%.*?) = (?P<op>[\w.]+)"
    rf"\((?P<args>{_UNQUOTED}(?:{_STRING}{_UNQUOTED})*)\)(?:  @(?P<module>.+))?$"
)


def print_arg(arg: Arg) -> str:
    """``arg`` as in the text form: values as ``%name``, tuples in brackets, torch constants as ``torch.name``."""
    if isinstance(arg, tuple) and not isinstance(arg, Value):
        return f"[{', '.join(map(print_arg, arg))}]"
    if isinstance(arg, str):
        return _quoted(arg)
    if isinstance(arg, torch.device):
        return f'device("{arg}")'
    if isinstance(arg, float):
        # Of floats, since numbers of numpy print their type.
        return float.__repr__(arg) if math.isfinite(arg) else f'float("{float(arg)}")'
    if isinstance(arg, complex):
        return f"complex({print_arg(arg.real)}, {print_arg(arg.imag)})"
    return expression_text(arg) if isinstance(arg, sympy.Expr) else str(arg)


def _quoted(text: str) -> str:
    quoted = repr(text)
    return f'"{quoted[1:-1]}"' if not {"'", '"'} & set(text) else quoted


def print_node(node: Node) -> str:
    names = [str(Value(node.name, i)) for i in range(len(node.types))] or [f"%{node.name}"]
    types = [str(t) if t is not None else "none" for t in node.types] or ["none"]
    args = [print_arg(a) for a in node.args] + [f"{k}={print_arg(a)}" for k, a in node.kwargs]
    results = ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True))
    phase = "backward " if node.phase == "backward" else ""
    module = f"  @{node.module}" if node.module else ""
    return f"{phase}{results} = {node.op}({', '.join(args)}){module}"


# Stands for the name of a value; in a string that is printed, this character is escaped.
_SLOT = "\0"


def print_nodes(nodes: tuple[Node, ...]) -> Iterator[tuple[str, str]]:
    """The name and the line of each node, as :func:`print_node` prints it. Equal layers have lines that differ in
    names alone, so one of each kind is printed, and the values of others are put into it."""
    templates: dict[tuple[object, ...], str] = {}
    for node in nodes:
        if node.is_placeholder:
            yield node.name, print_node(node)
            continue
        key = node.form, node.phase, *map(id, node.types)
        if key not in templates:
            templates[key] = _template_of(node)
        values = (*[f"%{node.name}"] * (len(node.types) or 1), *map(str, node.operands))
        line = templates[key] % values
        yield node.name, f"{line}  @{node.module}" if node.module else line


def _template_of(node: Node) -> str:
    """The line of a node without its module, to be formatted with its name for each result, and its operands."""
    slot = Value(_SLOT)
    line = print_node(node.of_values(_SLOT, "", dict.fromkeys(node.operands, slot)))
    return line.replace(str(slot), _SLOT).replace("%", "%%").replace(_SLOT, "%s")


def print_graph(symbols: Iterable[tuple[str, int]], nodes: Iterable[str], outputs: Iterable[Output]) -> str:
    """The text form of a graph of these parts; ``nodes`` are lines."""
    lines = [f"graph({', '.join(f'{k}={v}' for k, v in symbols)})", *nodes]
    lines += [f"return {o.kind} {_quoted(o.name)} = {o.value if o.value is not None else 'none'}" for o in outputs]
    return "\n".join(lines) + "\n"


def _parse_expression(tree: ast.expr, symbols: dict[str, sympy.Symbol]) -> Arg:
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_parse_expression(item, symbols) for item in items)
        case ast.Name(id=name) if name.startswith("VALUE_"):
            index, _, node = name.removeprefix("VALUE_").partition("_")
            return Value(node, int(index))
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _TORCH:
            return _TORCH[name]
        case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=name)]):
            return torch.device(str(name))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=name)]):
            return float(str(name))
        case ast.Call(func=ast.Name(id="complex"), args=[real, imaginary]):
            return complex(_parse_expression(real, symbols), _parse_expression(imaginary, symbols))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() as number)):
            return -number  # Expressions know no -0.0.
        case ast.UnaryOp() | ast.BinOp() | ast.Call():
            return _parse_arithmetic(tree, symbols)
    raise GraphError(f"cannot read the argument {ast.unparse(tree)}")


_FUNCTIONS = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "Abs": sympy.Abs,
    "sqrt": sympy.sqrt,
}
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
# Chosen: sizes are below 2**63, and text from anywhere must not make numbers that fill the memory.
_LARGEST_EXPONENT = 64


def _parse_arithmetic(tree: ast.expr, symbols: dict[str, sympy.Symbol]) -> int | float | sympy.Expr:
    """Parses an expression of numbers and symbols. The text is untrusted, so only arithmetic is accepted."""
    value = _arithmetic(tree, symbols)
    if value.is_Integer:
        return int(value)
    return float(value) if value.is_Float else value


def _arithmetic(tree: ast.expr, symbols: dict[str, sympy.Symbol]) -> Any:
    match tree:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return sympy.sympify(number)
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_arithmetic(operand, symbols)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _arithmetic(operand, symbols)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            sides = _arithmetic(left, symbols), _arithmetic(right, symbols)
            if isinstance(operation, ast.Pow) and not (sides[1].is_number and abs(sides[1]) <= _LARGEST_EXPONENT):
                raise GraphError(f"the exponent in {ast.unparse(tree)} must be a number of at most {_LARGEST_EXPONENT}")
            return _OPERATIONS[type(operation)](*sides)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_arithmetic(arg, symbols) for arg in args))
    raise GraphError(f"cannot read the argument {ast.unparse(tree)}")


def _value(found: re.Match[str]) -> Value | None:
    """The value that a match of ``_VALUE`` is; None of a string."""
    return Value(found[1], int(found[2] or 0)) if found[1] else None


def _as_name(found: re.Match[str]) -> str:
    """A value as a name of Python, which :func:`_parse_expression` knows."""
    value = _value(found)
    return found[0] if value is None else f"VALUE_{value.index}_{value.node}"


def parse_args(text: str, symbols: dict[str, sympy.Symbol]) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The positional and keyword arguments in ``text``. Raises :class:`GraphError`."""
    python = _VALUE.sub(_as_name, text)
    try:
        call = ast.parse(f"f({python})", mode="eval").body
    except SyntaxError as error:
        raise GraphError(f"cannot read the arguments ({text}): {error.msg}") from error
    assert isinstance(call, ast.Call)
    args = tuple(_parse_expression(a, symbols) for a in call.args)
    return args, tuple((str(k.arg), _parse_expression(k.value, symbols)) for k in call.keywords)


def parse_type(text: str, symbols: dict[str, sympy.Symbol]) -> TensorType | None:
    """``f32[b, 4]`` as a type, ``none`` as None."""
    if text == "none":
        return None
    dtype, _, shape = text.removesuffix("]").partition("[")
    if dtype not in SHORT_DTYPES:
        raise GraphError(f"unknown dtype {dtype!r} in {text!r}; one of {', '.join(SHORT_DTYPES)}")
    dims: tuple[Dim, ...] = parse_args(shape, symbols)[0]
    return TensorType(dims, SHORT_DTYPES[dtype])


@dataclass(frozen=True)
class _NodeParser:
    """Parses the lines of a graph with these ``symbols``. Equal layers have lines that differ in names alone, so of
    each kind the first is parsed, and others are the same call of other tensors."""

    symbols: dict[str, sympy.Symbol]
    types: dict[str, TensorType | None] = field(default_factory=dict)
    firsts: dict[tuple[object, ...], Node] = field(default_factory=dict)

    def parse(self, line: str) -> Node:
        """The node of a line. Raises :class:`GraphError`."""
        match = CALL.match(line.removeprefix("backward "))
        if match is None:
            raise GraphError(f"cannot read the line {line!r}")
        results = _RESULT.findall(match["results"])
        if not results:
            raise GraphError(f"no typed result in the line {line!r}")
        if match["op"] in PLACEHOLDERS:
            return self._whole(line, match, results)
        numbers: dict[Value, int] = {}

        def numbered(found: re.Match[str]) -> str:
            value = _value(found)
            return found[0] if value is None else f"%{numbers.setdefault(value, len(numbers))}"

        kinds = (kind for _, kind in results)
        key = line.startswith("backward "), match["op"], _VALUE.sub(numbered, match["args"]), *kinds
        if key not in self.firsts:
            node = self._whole(line, match, results)
            if [*dict.fromkeys(node.operands)] == [*numbers]:  # Not where a value stands for a keyword's name.
                self.firsts[key] = node
            return node
        first = self.firsts[key]
        values = dict(zip(dict.fromkeys(first.operands), numbers, strict=True))
        return first.of_values(results[0][0], match["module"] or "", values)

    def _whole(self, line: str, match: re.Match[str], results: list[tuple[str, str]]) -> Node:
        args, kwargs = parse_args(match["args"], self.symbols)
        if match["op"] in PLACEHOLDERS and len(args) != 1:
            raise GraphError(f"a placeholder takes one name: {line!r}")
        phase: Phase = "backward" if line.startswith("backward ") else "forward"
        types = tuple(self._type_of(kind) for _, kind in results)
        return Node(results[0][0], match["op"], args, kwargs, types, match["module"] or "", "", phase)

    def _type_of(self, text: str) -> TensorType | None:
        if text not in self.types:
            self.types[text] = parse_type(text, self.symbols)
        return self.types[text]


def _parse_output(line: str) -> Output:
    match = _OUTPUT.match(line)
    if match is None:
        raise GraphError(f"cannot read the line {line!r}")
    value = Value(match[3], int(match[4] or 0)) if match[3] else None
    return Output(match[1], ast.literal_eval(match[2]), value)  # type: ignore[arg-type]


def text_lines(text: str) -> list[str]:
    """The lines of ``text`` that are not empty, without indentation."""
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def parse_graph(lines: list[str]) -> tuple[tuple[tuple[str, int], ...], tuple[Node, ...], tuple[Output, ...]]:
    """The symbols, nodes and outputs that :func:`print_graph` printed. Raises :class:`GraphError` naming the line."""
    header = re.match(r"^graph\((.*)\)$", lines[0]) if lines else None
    if header is None:
        raise GraphError('a graph starts with a line such as "graph(b=8)"')
    pairs = [part.split("=") for part in header[1].replace(" ", "").split(",") if part]
    hints = tuple((name, int(size)) for name, size in pairs)
    symbols = {name: symbol(name) for name, _ in hints}
    parse = _NodeParser(symbols).parse
    nodes = tuple([parse(line) for line in lines[1:] if not line.startswith("return ")])
    outputs = tuple(_parse_output(line) for line in lines[1:] if line.startswith("return "))
    return hints, nodes, outputs
