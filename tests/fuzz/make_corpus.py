"""Writes the hand-made part of the corpus: whole files, and one file a way to break them."""
import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).parent / "corpus"


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder, name, data):
    path = ROOT / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def header(name, text, data=b"", length=None):
    text = text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
    write("header", name, struct.pack("<Q", len(text) if length is None else length) + text + data)


one = {"a": tensor("F32", [2], 0, 8)}
header("good_empty", {})
header("good_one", one, bytes(8))
header("good_padded", json.dumps(one) + "   ", bytes(8))
header("good_scalar_and_empty", {"s": tensor("F64", [], 0, 8), "e": tensor("F32", [0, 3], 8, 8)}, bytes(8))
header("good_metadata", {"__metadata__": {"k": "v"}, **one}, bytes(8))
header("good_many", {f"t{i}": tensor("U8", [i], i * (i - 1) // 2, i * (i + 1) // 2) for i in range(6)}, bytes(15))
header("good_unicode", {"\u00fc\n\u4e2d": tensor("BF16", [1, 2, 1], 0, 4)}, bytes(4))
write("header", "too_short", b"\x02\x00")
header("length_huge", "{}", length=2**64 - 1)
header("length_beyond_file", "{}", length=99)
header("not_json", "{nope}")
header("nul_inside", b"{}\x00{}")
header("not_utf8", b'{"\xff":1}')
header("deep", '{"a":' + "[" * 500 + "]" * 500 + "}")
header("list", "[]")
header("twice", '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}', b"0")
header("metadata_twice", '{"__metadata__":{"a":"b","a":"c"}}')
header("metadata_number", '{"__metadata__":{"a":1}}')
header("no_shape", '{"a":{"dtype":"U8","data_offsets":[0,1]}}', b"0")
header("extra_field", '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}}', b"0")
header("unknown_dtype", {"a": tensor("F33", [2], 0, 8)}, bytes(8))
header("negative_shape", {"a": tensor("F32", [-2], 0, 8)}, bytes(8))
header("float_shape", {"a": tensor("F32", [2.0], 0, 8)}, bytes(8))
header("overflow", {"a": tensor("F32", [2**32, 2**32, 4], 0, 0)})
header("overflow_behind_zero", {"a": tensor("F32", [0, 2**62, 2**62], 0, 0)})
header("many_dims", {"a": tensor("U8", [1] * 70, 0, 1)}, b"0")
header("offsets_backwards", {"a": tensor("F32", [2], 8, 0)}, bytes(8))
header("offsets_three", '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}', b"0")
header("offsets_beyond", {"a": tensor("F32", [2**40], 0, 2**42)}, bytes(8))
header("size_mismatch", {"a": tensor("F32", [3], 0, 8)}, bytes(8))
header("overlap", {"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, bytes(6))
header("hole", {"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 4, 6)}, bytes(6))
header("trailing", one, bytes(9))


def index(name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    write("index", name, text.removeprefix("{").encode())


def good():
    files = [{"name": f"rank-{r:05}-of-00002.safetensors", "size": 100, "header_crc32": "0badcafe"} for r in range(2)]
    pieces = [{"rank": 0, "rows": [0, 2], "crc32": "00000001"}, {"rank": 1, "rows": [2, 3], "crc32": "ffffffff"}]
    return {
        "format": "libfsdp.checkpoint", "version": 1, "world_size": 2, "step": 7, "metadata": {"k": "v"},
        "aliases": {"model.b": "model.a"}, "files": files,
        "tensors": {"model.a": {"dtype": "F32", "shape": [3, 2], "pieces": pieces},
                    "model.s": {"dtype": "F64", "shape": [], "pieces": [{"rank": 0, "rows": [0, 1], "crc32": "00000000"}]},
                    "model.e": {"dtype": "I64", "shape": [4, 0], "pieces": []}},
        "optimizer": {"type": "AdamW", "counters": {"a": {"step": 7}},
                      "groups": [{"params": ["a"], "options": {"lr": 0.1, "betas": [0.9, 0.999], "amsgrad": False}}]},
    }


def changed(name, change):
    value = good()
    change(value)
    index(name, value)


index("good", good())
index("not_json", "{]")
index("deep", '{"a":' + "[" * 100 + "]" * 100 + "}")
changed("no_files", lambda v: v.update(files=[]))
changed("other_world", lambda v: v.update(world_size=3))
changed("newer", lambda v: v.update(version=2))
changed("path_in_name", lambda v: v["files"][0].update(name="../../rank"))
changed("rank_beyond", lambda v: v["tensors"]["model.a"]["pieces"][1].update(rank=2))
changed("rows_hole", lambda v: v["tensors"]["model.a"]["pieces"][0].update(rows=[0, 1]))
changed("rows_short", lambda v: v["tensors"]["model.a"]["pieces"].pop())
changed("overflow", lambda v: v["tensors"]["model.a"].update(shape=[2**62, 2**62]))
changed("alias_of_nothing", lambda v: v.update(aliases={"model.b": "model.x"}))
