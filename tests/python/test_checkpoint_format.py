"""A checkpoint read by nothing of libfsdp: by docs/checkpoint.md's words, and by the safetensors package if it is there."""

import json
import os
import pathlib
import struct
import subprocess
import zlib

import numpy
import pytest

DTYPES = {"F32": "<f4", "I64": "<i8", "U8": "u1"}


def run(test, folder):
    if "FSDP_BINARY_DIR" not in os.environ:
        pytest.skip("FSDP_BINARY_DIR is not set to the build folder")
    program = pathlib.Path(os.environ["FSDP_BINARY_DIR"]) / "tests" / "fsdp_checkpoint_test"
    if not program.exists():
        pytest.skip("fsdp_checkpoint_test is not built")
    done = subprocess.run(
        [program, f"--gtest_filter={test}", "--gtest_also_run_disabled_tests"],
        env={**os.environ, "FSDP_TEST_FOLDER": str(folder)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "[  PASSED  ] 1 test" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interop")
    output = run("InteropThreads.DISABLED_Write", folder)
    sums = dict(line.split()[1:] for line in output.splitlines() if line.startswith("value "))
    return folder / "ckpt", sums


def read_file(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return zlib.crc32(data[: 8 + length]), header, data[8 + length :]


def test_by_the_words_of_the_spec(checkpoint):
    folder, sums = checkpoint
    text = (folder / "index.json").read_bytes()
    assert text.startswith(b'{"crc32":"') and text[18:20] == b'",'
    assert int(text[10:18], 16) == zlib.crc32(text[20:])
    index = json.loads(text)
    assert (index["format"], index["version"], index["world_size"], index["step"]) == ("libfsdp.checkpoint", 1, 3, 2)
    assert index["metadata"] == {"k": "v"}
    assert index["optimizer"]["type"] == "AdamW"
    assert index["optimizer"]["groups"][0]["options"]["lr"] == 0.25
    assert set(index["optimizer"]["counters"]) == set(index["optimizer"]["groups"][0]["params"])

    files = []
    for entry in index["files"]:
        assert (folder / entry["name"]).stat().st_size == entry["size"]
        crc, header, data = read_file(folder / entry["name"])
        assert int(entry["header_crc32"], 16) == crc
        files.append((header, data))

    whole = {}
    for name, entry in index["tensors"].items():
        pieces, row = [], 0
        for piece in entry["pieces"]:
            header, data = files[piece["rank"]]
            begin, end = header[name]["data_offsets"]
            assert zlib.crc32(data[begin:end]) == int(piece["crc32"], 16)
            assert piece["rows"][0] == row
            row = piece["rows"][1]
            pieces.append(numpy.frombuffer(data[begin:end], DTYPES[entry["dtype"]]))
        whole[name] = numpy.concatenate(pieces).reshape(entry["shape"])
    for alias, name in index["aliases"].items():
        whole[alias] = whole[name]
    assert sums
    for name, value in sums.items():
        assert whole["model." + name].astype("f8").sum() == pytest.approx(float(value), rel=1e-4, abs=1e-5)


def test_the_safetensors_package_reads_ours(checkpoint):
    safetensors = pytest.importorskip("safetensors")
    folder, _ = checkpoint
    for path in sorted(folder.glob("*.safetensors")):
        _, header, data = read_file(path)
        with safetensors.safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(header) - {"__metadata__"}
            for name in file.keys():
                begin, end = header[name]["data_offsets"]
                assert file.get_tensor(name).tobytes() == data[begin:end]


def test_ours_reads_the_safetensors_package(tmp_path):
    numpy_side = pytest.importorskip("safetensors.numpy")
    tensors = {"a": numpy.ones((2, 3), "f4"), "b/\u00fc": numpy.zeros((), "i8"), "c": numpy.zeros((0, 4), "u1")}
    numpy_side.save_file(tensors, tmp_path / "theirs.safetensors", {"key": "value"})
    output = run("Interop.DISABLED_Read", tmp_path)
    lines = {line for line in output.splitlines() if line.startswith("tensor ")}
    assert lines == {"tensor a F32 2,3", "tensor b/\u00fc I64 ", "tensor c U8 0,4"}
