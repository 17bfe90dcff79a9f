"""Makes headers and indexes: right ones, right ones with a few things changed, and noise."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from math import prod
from typing import Any

from tools.fuzz.tree import Object, Raw, containers, written

BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits of a number of each dtype of the format."""

NAMES = ["a", "b", "a.weight", "blocks.0.attn.to_q.weight", "ünï", "__metadata__", "", " ", "x" * 40]
ODD_NAMES = [
    *(Raw(text) for text in ('"\\u0061"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\n"', '"a\x00"', "a", "'a'", "1")),
    *("a\x7f", "\u202e", "\ufeff", "x" * 2000, "weight_map"),
]  # fmt: skip
ODD_VALUES = [
    *(Raw(text) for text in "true null -0 -1 1.0 1e0 1E400 0.5 01 +1 .5 0x1 NaN Infinity -Infinity".split()),
    *(Raw(text) for text in ('"\\ud800"', '"\\udc00\\ud800"', '"\\q"', "'1'", "", "[", "{", "[]]", "1 1")),
    *(Raw("[" * 200 + "]" * 200), Raw('{"a":' * 200 + "1" + "}" * 200), Raw("9" * 400), Raw("[" * 2000)),
    *(0, 1, 2, 4, 8, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**19, 10**30),
    *("", "4", "F32", [], [0], [1, 2, 3], [[1]], Object(), Object([("F32", None)]), Object([("a", "b")])),
]  # fmt: skip
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u",
    b"\xff",
    b"\xed\xa0\x80",
    b"\0",
    b" ",
    b"-",
    b"e9",
]
TOKENS += [b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b"null", b"1" * 30]


def valid_file(rng: random.Random) -> bytes:
    """Return a file that every reader should take, if its dtypes are known there."""
    header, size = _header(rng)
    return _packed(_text(rng, header), rng.randbytes(size))


def broken_file(rng: random.Random) -> bytes:
    """Return a file in which anything may be wrong; now and then nothing is."""
    kind = rng.random()
    if kind < 0.05:
        return _noise(rng)
    header, size = _header(rng)
    if kind < 0.7:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            _change(rng, header)
        size += rng.choice([0] * 12 + [1, -1, 4, 8])
    content = _packed(_text(rng, header), bytes(max(size, 0)))
    for _ in range(rng.choice([1, 1, 2, 4]) if kind >= 0.6 else 0):
        content = _damaged(rng, content)
    return content


def valid_index(rng: random.Random) -> bytes:
    """Return an index that is right."""
    return _text(rng, _index(rng))


def broken_index(rng: random.Random) -> bytes:
    """Return an index in which anything may be wrong; now and then nothing is."""
    if rng.random() < 0.05:
        return _noise(rng)
    index = _index(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        _change(rng, index)
    content = _text(rng, index)
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        content = _damaged(rng, content)
    return content


# ---------------------------------------------------------------- right ones


def _header(rng: random.Random) -> tuple[Object, int]:
    """Return a header, and how many bytes of data it describes."""
    header, end = Object(), 0
    for name in rng.sample([name for name in NAMES if name != "__metadata__"], rng.randint(0, 4)):
        dtype = rng.choice(list(BITS))
        shape = [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 8]))]
        if prod(shape) * BITS[dtype] % 8 or prod(shape) > 4096:
            dtype, shape = "F32", [2]
        begin, end = end, end + prod(shape) * BITS[dtype] // 8
        fields: list[tuple[Any, Any]] = [("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])]
        rng.shuffle(fields)
        header.pairs.append((name, Object(fields)))
    rng.shuffle(header.pairs)
    if rng.random() < 0.3:
        metadata = [
            (name, rng.choice(["pt", "", "1", "{}"])) for name in rng.sample(NAMES, rng.randint(0, 2))
        ]
        header.pairs.insert(0, ("__metadata__", Object(metadata)))
    return header, end


def _index(rng: random.Random) -> Object:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    names = rng.sample(NAMES, rng.randint(1, 5))
    index = Object([("weight_map", Object([(name, rng.choice(shards)) for name in names]))])
    if rng.random() < 0.8:
        index.pairs.insert(0, ("metadata", Object([("total_size", rng.randrange(2**40))])))
    return index


def _text(rng: random.Random, value: Any) -> bytes:
    space = rng.choice(["", "", " ", "\n  ", "\t"])
    text = written(value, "," + space, ":" + space) + rng.choice(["", "", "   "])
    return text.encode("utf-8", "surrogatepass")


def _packed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


# ---------------------------------------------------------------- what is changed


def _change(rng: random.Random, root: Object) -> None:
    """Change one thing in a tree."""
    rng.choice(_CHANGES)(rng, root)


def _set_value(rng: random.Random, root: Object) -> None:
    where = rng.choice(list(containers(root)))
    value = _odd(rng)
    if isinstance(where, list):
        if where:
            where[rng.randrange(len(where))] = value
        else:
            where.append(value)
    elif where.pairs:
        at = rng.randrange(len(where.pairs))
        where.pairs[at] = (where.pairs[at][0], value)


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD_VALUES + ODD_FILE_NAMES))


def _nudge(rng: random.Random, root: Object) -> None:
    """Change a number a little."""
    lists = [where for where in containers(root) if isinstance(where, list) and where]
    if lists:
        where = rng.choice(lists)
        at = rng.randrange(len(where))
        if isinstance(where[at], int):
            where[at] += rng.choice([-4, -1, 1, 4, 8])


def _grow_list(rng: random.Random, root: Object) -> None:
    lists = [where for where in containers(root) if isinstance(where, list)]
    if lists:
        more = rng.choice([[1], [0], [2**62, 4], [0, 2**62, 4], [2**62, 4, 0], [1] * 8, [0] * 9])
        where = rng.choice(lists)
        at = rng.choice([0, len(where)])
        where[at:at] = more


def _reach_back(rng: random.Random, root: Object) -> None:
    """Let a tensor begin before its predecessor ends, or have a place for more than its own bytes."""
    tensors = [(name, value) for name, value in root.pairs if isinstance(value, Object)]
    offsets = [value.get("data_offsets") for _, value in tensors]
    ends = [
        pair[1] for pair in offsets if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)
    ]
    if tensors and ends:
        name, _ = rng.choice(tensors)
        end = rng.choice(ends)
        begin = rng.randrange(max(end, 0) + 1)
        changed = Object([("dtype", "U8"), ("shape", [end - begin]), ("data_offsets", [begin, end])])
        root.pairs = [(key, changed if key == name else value) for key, value in root.pairs]


def _rename(rng: random.Random, root: Object) -> None:
    where = rng.choice([where for where in containers(root) if isinstance(where, Object)])
    if where.pairs:
        at = rng.randrange(len(where.pairs))
        where.pairs[at] = (rng.choice(NAMES + ODD_NAMES), where.pairs[at][1])


def _repeat(rng: random.Random, root: Object) -> None:
    """Give a name again, with its own value or another."""
    where = rng.choice([where for where in containers(root) if isinstance(where, Object)])
    if where.pairs:
        name, value = copy.deepcopy(rng.choice(where.pairs))
        where.pairs.insert(rng.randint(0, len(where.pairs)), (name, rng.choice([value, _odd(rng)])))


def _drop(rng: random.Random, root: Object) -> None:
    where = rng.choice(list(containers(root)))
    items: list[Any] = where if isinstance(where, list) else where.pairs
    if items:
        items.pop(rng.randrange(len(items)))


def _add(rng: random.Random, root: Object) -> None:
    where = rng.choice([where for where in containers(root) if isinstance(where, Object)])
    name = rng.choice(NAMES + ODD_NAMES)
    where.pairs.insert(rng.randint(0, len(where.pairs)), (name, _odd(rng)))


def _swap(rng: random.Random, root: Object) -> None:
    """Swap the same field of two tensors."""
    tensors = [value for _, value in root.pairs if isinstance(value, Object)]
    if len(tensors) > 1:
        first, second = rng.sample(tensors, 2)
        name = rng.choice(["dtype", "shape", "data_offsets"])
        values = first.get(name), second.get(name)
        for tensor, value in ((first, values[1]), (second, values[0])):
            tensor.pairs = [(key, value if key == name else old) for key, old in tensor.pairs]


ODD_FILE_NAMES = [
    *("../a.safetensors", "a/b.safetensors", "/a.safetensors", "..", ".", "a.safetensors/", "..\\a.safetensors"),
    *("C:a.safetensors", "a.bin", "a.safetensors", "a\0.safetensors", "~/a.safetensors", "x" * 300 + ".safetensors"),
]  # fmt: skip
_CHANGES: list[Callable[[random.Random, Object], None]] = [
    _set_value, _set_value, _nudge, _nudge, _grow_list, _reach_back, _rename, _repeat, _drop, _add, _swap,
]  # fmt: skip


def _damaged(rng: random.Random, content: bytes) -> bytes:
    """Return the bytes with a few of them changed, without regard to what they mean."""
    at = rng.randrange(len(content) + 1)
    kind = rng.randrange(7)
    if kind == 0:  # one bit
        return (
            content[:at]
            + bytes(byte ^ 1 << rng.randrange(8) for byte in content[at : at + 1])
            + content[at + 1 :]
        )
    if kind == 1:
        return content[:at] + rng.choice(TOKENS) + content[at:]
    if kind == 2:
        return content[:at] + content[at + rng.choice([1, 1, 2, 8]) :]
    if kind == 3:
        return content[:at] + rng.randbytes(1) + content[at + 1 :]
    if kind == 4:  # the length, and what it should be
        length = int.from_bytes(content[:8], "little") + rng.choice([-1, 1, -8, 8, 2**32, 2**63])
        return (length % 2**64).to_bytes(8, "little") + content[8:]
    if kind == 5:
        return content[:at]
    start = rng.randrange(len(content) + 1)
    return content[:at] + content[start : start + rng.randrange(40)] + content[at:]


def _noise(rng: random.Random) -> bytes:
    """Return bytes, or tokens of JSON, that nobody wrote."""
    noise = rng.randbytes(rng.randrange(64))
    if rng.random() < 0.3:
        return noise
    tokens = b"".join(rng.choice(TOKENS) for _ in range(rng.randrange(24)))
    return _packed(b"{" + rng.choice([tokens, tokens, noise]) + rng.choice([b"", b"}"]), b"")
