"""Assembly that decodes words of codes to float16, which represents each code exactly.

**Keys** of integer codes are their levels: int4 as they are, int8 plus 128. The bits of a level are
a subnormal float16 number, the level times 2 ** -24, so nothing but a mask is needed. A code of
int4 in the upper half of its byte is 16 times that, and its query a 16th. What the zero point adds
to a score is the same for all elements of a key; it is subtracted from the score.

**Values** are less their zero point, since a sum over many keys would lose what a small result has
to keep. A level becomes the last bits of 1024, whose float16 numbers are one apart, and a
subtraction gives the number. Of a code of int4 in the upper half of its byte, 16 times the level is
added to 1024; one fused multiply-add divides by 16.
"""

from triton.experimental import gluon

_FP8 = {
    "fp8_e4m3": "cvt.rn.f16x2.e4m3x2",
    "fp8_e5m2": "cvt.rn.f16x2.e5m2x2",
    "fp8_per_token_head": "cvt.rn.f16x2.e4m3x2",
}
_LOW = """lop3.b32 x, {source}, l, k, 0xEA; sub.f16x2 x, x, c;
        mov.b32 {{${first}, ${second}}}, x;"""
_HIGH = """lop3.b32 x, {source}, h, k, 0xEA; fma.rn.f16x2 x, x, s, d;
        mov.b32 {{${first}, ${second}}}, x;"""
_REGISTERS = ".reg .b32 p, q, c, d, h, k, l, s, x;"


@gluon.constexpr_function
def _levels(source, first):
    """Return PTX that decodes the four lower codes of both halves of a word, in pairs."""
    lines = []
    for pair in range(4):
        if pair == 2:
            lines.append(f"shr.u32 {source}, {source}, 8;")
        line = _HIGH if pair % 2 else _LOW
        number = first + 2 * pair
        lines.append(line.format(source=source, first=number, second=number + 1))
    return " ".join(lines)


@gluon.constexpr_function
def _zero_points(register):
    """Return PTX for what levels are combined with.

    c is 1024 and the zero point, d is -64 less the zero point, s is 1 / 16, and k 1024. l and h
    select the lower and the upper code of a byte.
    """
    return f"""mov.b32 l, 0x000F000F; mov.b32 h, 0x00F000F0; mov.b32 k, 0x64006400;
        mov.b32 s, 0x2C002C00; or.b32 c, {register}, k; shl.b32 d, {register}, 4;
        or.b32 d, d, 0xD400D400;"""


@gluon.constexpr_function
def k_code(name):
    """Return PTX that decodes a word of a key, $4 or $8, to its numbers.

    FP8 numbers are in their order. Of int8 they are levels 0, 2, 1, 3, and of int4 levels 0, 4, 1,
    5, 2, 6, 3, 7, where those of odd codes are 16 times as large.
    """
    if name in _FP8:
        return f"""{{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {{a, b}}, $4;
        {_FP8[name]} x, a; {_FP8[name]} y, b;
        mov.b32 {{$0, $1}}, x; mov.b32 {{$2, $3}}, y; }}"""
    if name == "int8_per_token_head":
        return """{ .reg .b32 c, m, p, x; mov.b32 m, 0x00FF00FF; mov.b32 c, 0x00800080;
        lop3.b32 x, $4, m, c, 0x6A; mov.b32 {$0, $1}, x; shr.u32 p, $4, 8;
        lop3.b32 x, p, m, c, 0x6A; mov.b32 {$2, $3}, x; }"""
    return """{ .reg .b32 p, x;
        and.b32 x, $8, 0x000F000F; mov.b32 {$0, $1}, x;
        and.b32 x, $8, 0x00F000F0; mov.b32 {$2, $3}, x; shr.u32 p, $8, 8;
        and.b32 x, p, 0x000F000F; mov.b32 {$4, $5}, x;
        and.b32 x, p, 0x00F000F0; mov.b32 {$6, $7}, x; }"""


@gluon.constexpr_function
def v_code(name):
    """Return PTX that decodes the words of two keys, the first arguments, to pairs of a column.

    $0 and $1 are column 0 of both keys, $2 and $3 column 1, and so on. Of int4 the third argument
    has the zero point of each key in a half.
    """
    if name in _FP8:
        return f"""{{ .reg .b16 a, b; .reg .b32 p, q, x, y;
        prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
        mov.b32 {{a, b}}, p; {_FP8[name]} x, a; {_FP8[name]} y, b;
        mov.b32 {{$0, $1}}, x; mov.b32 {{$2, $3}}, y;
        mov.b32 {{a, b}}, q; {_FP8[name]} x, a; {_FP8[name]} y, b;
        mov.b32 {{$4, $5}}, x; mov.b32 {{$6, $7}}, y; }}"""
    if name == "int8_per_token_head":
        columns = [
            f"prmt.b32 p, $8, $9, {selector}; xor.b32 p, p, 0x80808080;"
            f" prmt.b32 x, p, c, 0x4140; sub.f16x2 x, x, e; mov.b32 {{${to}, ${to + 1}}}, x;"
            f" prmt.b32 x, p, c, 0x4342; sub.f16x2 x, x, e;"
            f" mov.b32 {{${to + 2}, ${to + 3}}}, x;"
            for selector, to in (("0x5140", 0), ("0x7362", 4))
        ]
        return f"""{{ .reg .b32 p, c, e, x; mov.b32 c, 0x64646464; mov.b32 e, 0x64806480;
        {" ".join(columns)} }}"""
    return f"""{{ {_REGISTERS} {_zero_points("$18")}
        prmt.b32 p, $16, $17, 0x5410; prmt.b32 q, $16, $17, 0x7632;
        {_levels("p", 0)} {_levels("q", 8)} }}"""
