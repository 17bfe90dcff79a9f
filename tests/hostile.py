"""Files that must not be believed, made by code: each with what its refusal says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
HUGE = 10**4000
"""A size that no file has, of more digits than Python prints in one go."""


@dataclass(frozen=True)
class Hostile:
    """The bytes of a file, and words of its refusal.

    Attributes:
        accepted_elsewhere: The safetensors library takes it.
    """

    name: str
    content: bytes
    message: str
    accepted_elsewhere: bool = False


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    """Return what a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header: object, data: int | bytes = 0, length: int | None = None) -> bytes:
    """Return a file: `header` as JSON, unless it is bytes; `data` bytes after it; `length` as it is claimed."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(raw) if length is None else length
    return claimed.to_bytes(8, "little") + raw + (data if isinstance(data, bytes) else bytes(data))


ONE = json.dumps(entry([1], 0, 4)).encode()


def one(value: object, data: int = 4) -> bytes:
    """Return a file whose header says `value` of its one tensor."""
    return packed({"a": value}, data)


NO_SAFETENSORS = [
    Hostile("empty", b"", "has 0 bytes, too few"),
    Hostile("seven_bytes", b"1234567", "has 7 bytes, too few"),
    Hostile("lfs_pointer", LFS_POINTER, "Git LFS pointer, not the file itself; run `git lfs pull`"),
    Hostile("zip", b"PK\x03\x04" + bytes(100), "claims a header of"),
    Hostile("text", b"Entry not found", "claims a header of"),
    Hostile("zeros", bytes(64), "does not start with '{'"),
    *(
        Hostile(f"header_of_{n}", packed(b"{}", 0, n), f"claims a header of {n} bytes and has 10")
        for n in (3, 10**6, 2**31, 2**63, 2**64 - 1)
    ),
]

DEEP = "nested too deeply"
NO_JSON = [
    Hostile("no_header", packed(b""), "does not start with '{'"),
    Hostile("cut", packed(b"{"), "invalid JSON"),
    Hostile("no_json", packed(b"not json"), "does not start with '{'"),
    Hostile("no_value", packed(b'{"a": }'), "invalid JSON"),
    Hostile("two_objects", packed(b"{} {}"), "invalid JSON"),
    Hostile("nul_at_the_end", packed(b"{}\0"), "invalid JSON"),
    Hostile("comma_at_the_end", packed(b'{"a": ' + ONE + b",}", 4), "invalid JSON"),
    Hostile("control_character", packed(b'{"a\n": ' + ONE + b"}", 4), "invalid JSON"),
    Hostile("not_utf8", packed(b'{"a\xff": 1}'), "can't decode byte 0xff"),
    Hostile("surrogates_in_utf8", packed(b'{"\xed\xa0\x80": ' + ONE + b"}", 4), "can't decode byte 0xed"),
    Hostile("overlong_utf8", packed(b'{"\xc1\xa1": ' + ONE + b"}", 4), "can't decode byte 0xc1"),
    Hostile("byte_order_mark", packed(b"\xef\xbb\xbf{}"), "does not start with '{'"),
    Hostile("utf16", packed("{}".encode("utf-16")), "does not start with '{'"),
    Hostile("space_first", packed(b" {}"), "does not start with '{'", accepted_elsewhere=True),
    Hostile("newline_first", packed(b"\n{}"), "does not start with '{'", accepted_elsewhere=True),
    Hostile("deep_list", packed(b'{"a":' + b"[" * 100_000), DEEP),
    Hostile("deep_object", packed(b'{"a":' * 100_000), DEEP),
    Hostile("long_number", packed(b'{"a": 1' + b"0" * 5000 + b"}"), "a must have dtype"),
    *(Hostile(f"is_{value!r}", packed(value), "does not start") for value in ([], "text", 7, None, True)),
    Hostile("nan", packed(b'{"a": NaN}'), "NaN is not JSON"),
    Hostile("infinity", packed(b'{"a": -Infinity}'), "-Infinity is not JSON"),
]

NAMES = [
    Hostile(
        "name_twice",
        packed(b'{"a": %s, "a": %s}' % (ONE, ONE), 4),
        "'a' is given twice",
        accepted_elsewhere=True,
    ),
    Hostile(
        "name_twice_escaped",
        packed(b'{"a": %s, "\\u0061": %s}' % (ONE, ONE), 4),
        "'a' is given twice",
        accepted_elsewhere=True,
    ),
    Hostile("metadata_twice", packed(b'{"__metadata__": {}, "__metadata__": {}}'), "is given twice"),
    Hostile(
        "metadata_key_twice",
        packed(b'{"__metadata__": {"a": "b", "a": "c"}}'),
        "is given twice",
        accepted_elsewhere=True,
    ),
    Hostile(
        "field_twice",
        packed(b'{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 4]}}', 4),
        "'shape' is given twice",
    ),
    Hostile("half_surrogate", packed(b'{"\\ud800": %s}' % ONE, 4), "surrogates not allowed"),
    Hostile(
        "half_surrogate_in_metadata", packed(b'{"__metadata__": {"a": "\\udc00"}}'), "surrogates not allowed"
    ),
    *(
        Hostile(
            f"name_{name[:4]!r}",
            packed({name: entry([1], 0, 4)}, 4),
            "is not a name",
            accepted_elsewhere=True,
        )
        for name in ("a\n", "\x1b[2J", "\0", "‮", "x" * 1025)
    ),
    *(
        Hostile(f"metadata_{value}", packed({"__metadata__": value}), "metadata is not text by name")
        for value in (5, [], "text", {"a": 1}, {"a": None}, {"a": {"b": "c"}})
    ),
    Hostile(
        "metadata_null",
        packed({"__metadata__": None}),
        "metadata is not text by name",
        accepted_elsewhere=True,
    ),
]

FIELDS = [
    *(
        Hostile(f"entry_{value}", one(value), "a must have dtype, shape and data_offsets and nothing else")
        for value in (
            None,
            7,
            "text",
            [],
            {},
            {"dtype": "F32", "shape": [1]},
            {"shape": [1], "data_offsets": [0, 4]},
        )
    ),
    Hostile("entry_as_list", one(["F32", [1], [0, 4]]), "a must have dtype", accepted_elsewhere=True),
    Hostile("more_fields", one({**entry([1], 0, 4), "more": 1}), "nothing else", accepted_elsewhere=True),
    *(
        Hostile(f"dtype_{code!r}", one(entry([1], 0, 4, code)), "which the format does not have")
        for code in ("F128", "f32", "", "I4", 4, None, True, ["F32"])
    ),
    Hostile(
        "dtype_as_object",
        one(entry([1], 0, 4, {"F32": None})),
        "format does not have",
        accepted_elsewhere=True,
    ),
    *(
        Hostile(
            f"dtype_{code}",
            one(entry([4], 0, size, code), size),
            "numbers share bytes; they cannot be sliced; use the checkpoint that is not quantized",
            accepted_elsewhere=True,
        )
        for code, size in (("F4", 2), ("F6_E2M3", 3), ("F6_E3M2", 3))
    ),
    *(
        Hostile(f"shape_{shape!r}", one(entry(shape, 0, 4)), "list of whole numbers as its shape")
        for shape in (None, 1, {}, "", "1", {"1": 1}, [None], [[1]], ["1"])
    ),
    *(
        Hostile(f"offsets_{offsets}", one({"dtype": "F32", "shape": [1], "data_offsets": offsets}), message)
        for offsets, message in (
            *((value, "list of whole numbers as its data_offsets") for value in (None, 4, "04", {"0": 1})),
            *(
                (value, "list of whole numbers as its data_offsets")
                for value in ([None, 4], ["0", "4"], [[0], [4]])
            ),
            *((value, "must have two data_offsets") for value in ([], [4], [0, 2, 4], list(range(1000)))),
        )
    ),
    *(
        Hostile(
            f"{place}_{number[:25]}_{len(number)}",
            packed(raw.replace(b"?", number.encode()), 4),
            "list of whole numbers",
        )
        for place, raw in (
            ("shape", b'{"a": {"dtype": "F32", "shape": [?], "data_offsets": [0, 4]}}'),
            ("begin", b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [?, 4]}}'),
            ("end", b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, ?]}}'),
        )
        for number in ("true", "1.0", "1e0", "-1", "-0", "1e400", str(10**20), str(HUGE))
    ),
]

SIZES = [
    *(
        Hostile(f"{dtype}_{shape}_{begin}_{end}", one(entry(shape, begin, end, dtype)), message)
        for shape, begin, end, dtype, message in (
            ([2], 0, 4, "F32", "needs 8 bytes, the header gives it 4"),
            ([1], 0, 4, "F64", "needs 8 bytes, the header gives it 4"),
            ([1], 4, 0, "F32", "needs 4 bytes, the header gives it -4"),
            ([], 0, 0, "F32", "needs 4 bytes, the header gives it 0"),
            ([0], 0, 4, "F32", "needs 0 bytes, the header gives it 4"),
            ([2**31, 2**31], 0, 4, "F32", f"needs {2**64} bytes, the header gives it 4"),
            ([2**62, 4], 0, 0, "U8", "beyond counting"),
            ([3037000500, 3037000500], 0, 4, "U8", "beyond counting"),
            ([10**18] * 8, 0, 4, "U8", "beyond counting"),
            ([2**62, 4, 0], 0, 0, "U8", "beyond counting"),
            ([2**64], 0, 4, "U8", "beyond counting"),
            ([4], 2**64 - 4, 2**64, "U8", "no tensor has bytes"),
            ([4], 2**64, 4, "U8", "needs 4 bytes, the header gives it"),
            ([4], 0, 2**64, "U8", f"needs 4 bytes, the header gives it {2**64}"),
        )
    ),
    Hostile("zero_first", one(entry([0, 2**62, 4], 0, 0), 0), "beyond counting", accepted_elsewhere=True),
    *(
        Hostile(
            f"{len(shape)}_dims_{end}",
            one(entry(shape, 0, end), end),
            "at most 8 are expected",
            accepted_elsewhere=True,
        )
        for shape, end in (([1] * 9, 4), ([1] * 1000, 4), ([0] * 9, 0))
    ),
]

COVERAGE = [
    Hostile(name, packed(header, data), message)
    for name, header, data, message in (
        ("hole", {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "between a and b"),
        ("hole_first", {"a": entry([1], 4, 8)}, 8, "between the header and a"),
        ("overlap", {"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8, "b overlaps a"),
        ("same_bytes", {"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4, "b overlaps a"),
        ("nested", {"a": entry([4], 0, 16), "b": entry([1], 4, 8)}, 16, "b overlaps a"),
        ("zero_size_inside", {"a": entry([2], 0, 8), "b": entry([0], 4, 4)}, 8, "b overlaps a"),
        ("zero_size_far", {"a": entry([1], 0, 4), "b": entry([0], 10**12, 10**12)}, 4, "between a and b"),
        ("one_byte_short", {"a": entry([2], 0, 8)}, 7, "it is truncated"),
        ("no_data", {"a": entry([2], 0, 8)}, 0, "it is truncated"),
        ("one_byte_long", {"a": entry([2], 0, 8)}, 9, "1 bytes after its last tensor"),
        ("data_of_nothing", {}, 1, "1 bytes after its last tensor"),
        ("petabytes", {"a": entry([10**15], 0, 4 * 10**15)}, 4, "it is truncated"),
    )
]  # fmt: skip

HEADERS = [*NO_SAFETENSORS, *NO_JSON, *NAMES, *FIELDS, *SIZES, *COVERAGE]
"""Safetensors files that must be refused."""


def weight_map(**files: object) -> bytes:
    """Return an index."""
    return json.dumps({"metadata": {"total_size": 8}, "weight_map": files}).encode()


ESCAPES = [
    "../secret.safetensors",
    "sub/secret.safetensors",
    "./secret.safetensors",
    "secret.safetensors/",
    "sub/../secret.safetensors",
    "/secret.safetensors",
    "..",
    ".",
    "",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "nul\0.safetensors",
    "line\n.safetensors",
    "x" * 300 + ".safetensors",
    "é" * 130 + ".safetensors",
]

INDEXES = [
    Hostile("empty", b"", "invalid JSON"),
    Hostile("cut", b'{"weight_map": {"a": ', "invalid JSON"),
    *(Hostile(f"is_{raw}", raw, "not an object") for raw in (b"[]", b"7", b"null", b'"weight_map"')),
    Hostile("not_utf8", b'{"weight_map": {"\xff": "a.safetensors"}}', "can't decode byte 0xff"),
    Hostile("utf16", weight_map(a="a.safetensors").decode().encode("utf-16"), "can't decode byte 0xff"),
    Hostile("byte_order_mark", b"\xef\xbb\xbf" + weight_map(a="a.safetensors"), "invalid JSON"),
    Hostile("deep_list", b"[" * 100_000, DEEP),
    Hostile("deep_object", b'{"weight_map": ' * 100_000, DEEP),
    Hostile("lfs_pointer", LFS_POINTER, "run `git lfs pull`"),
    Hostile("nan", b'{"metadata": NaN, "weight_map": {"a": "a.safetensors"}}', "NaN is not JSON"),
    *(
        Hostile(f"map_{value}", json.dumps({"weight_map": value}).encode(), "names no files")
        for value in (None, [], ["a.safetensors"], "a.safetensors", {}, 7)
    ),
    Hostile("no_map", b"{}", "names no files"),
    Hostile(
        "name_twice",
        b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        "'a' is given twice",
    ),
    Hostile(
        "map_twice",
        b'{"weight_map": {"a": "a.safetensors"}, "weight_map": {"b": "b.safetensors"}}',
        "'weight_map' is given twice",
    ),
    Hostile("half_surrogate", b'{"weight_map": {"a": "\\ud800.safetensors"}}', "surrogates not allowed"),
    *(
        Hostile(f"name_{name[:4]!r}", weight_map(**{name: "a.safetensors"}), "is not a name")
        for name in ("a\n", "\x1b[2J", "x" * 1025)
    ),
    *(
        Hostile(f"names_{name!r}"[:30], weight_map(a="a.safetensors", b=name), "plain file names beside the index")
        for name in (*ESCAPES, 1, None, ["a.safetensors"], {}, True, HUGE)
    ),
]  # fmt: skip
"""Indexes that must be refused."""
