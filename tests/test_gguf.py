# SPDX-License-Identifier: Apache-2.0
"""GGUF: what the gguf package reads is what we read; a broken file gives one line with its path."""

import re
import struct
import tracemalloc

import gguf as package
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bfm import gguf, tokenizer, weights
from bfm.gguf import GgufError
from bfm.tokenizer import TokenizerError
from bfm.weights import WeightsError

KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1)
SHAPES = {"one": (64,), "two": (3, 32), "odd": (5, 1, 96), "four": (2, 3, 1, 32)}


def write(path, kind=Kind.F32, alignment=None, **tensors):
    """Write a file with every type of value, and tensors stored as `kind`."""
    writer = GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"a.uint{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"a.int{bits}", -(2 ** (bits - 1)))
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve\n北京 \0")
    writer.add_string("a.nothing", "")
    writer.add_array("a.strings", ["a", "", "é", "<s>"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.25])
    writer.add_array("a.bools", [True, False])
    for name, values in tensors.items():
        writer.add_tensor(name, package.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(shapes):
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def raw(path, *parts, keys=0, tensors=0, magic=b"GGUF", version=3):
    """Write a file byte by byte; text gets its length in front, (form, values..) is packed."""
    data = magic + struct.pack("<IQQ", version, tensors, keys)
    for part in parts:
        if isinstance(part, str):
            part = struct.pack("<Q", len(part.encode())) + part.encode()
        data += part if isinstance(part, bytes) else struct.pack("<" + part[0], *part[1:])
    path.write_bytes(data)
    return path


def assert_as_package_reads(path):
    theirs, ours = GGUFReader(path), gguf.open(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == expected
    types = {key: type(value) for key, value in ours.metadata.items()}
    assert types == {key: type(value) for key, value in expected.items()}
    assert list(ours.shapes) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        values = ours.read(tensor.name)
        assert ours.shapes[tensor.name] == values.shape == tuple(tensor.shape[::-1])
        assert values.dtype == np.float32
        dequantized = package.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values, dequantized.reshape(values.shape))


def refusal(path, error=GgufError, call=gguf.open):
    """Return the message without its path, after checking that it is one line that starts so."""
    with pytest.raises(error) as caught:
        call(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


# --- files that can be read --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_reads_what_the_package_reads(tmp_path, kind):
    values = random(SHAPES)
    path = write(tmp_path / "a.gguf", kind, **values)
    assert_as_package_reads(path)
    file, near = gguf.open(path), {Kind.F32: 0, Kind.Q4_1: 0.3}.get(kind, 0.03)
    assert file.path == path and file.shapes == SHAPES
    for name, expected in values.items():
        np.testing.assert_allclose(file.read(name), expected, atol=near, rtol=0)
    with pytest.raises(GgufError, match=r"a\.gguf: no tensor 'three'"):
        file.read("three")


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_places_the_data(tmp_path, alignment):
    values = random(SHAPES)
    path = write(tmp_path / "a.gguf", alignment=alignment, **values)
    assert_as_package_reads(path)
    np.testing.assert_array_equal(gguf.open(path).read("two"), values["two"])


def test_no_tensors_version_2_nested_arrays_and_a_scalar(tmp_path):
    assert gguf.open(write(tmp_path / "a.gguf")).shapes == {}
    nested = ("n", ("IIQ", 9, 9, 2), ("IQ", 8, 1), "x", ("IQ", 4, 2), ("II", 5, 6))
    scalar = ("s", ("IIQ", 0, 0, 0), bytes(32))
    file = gguf.open(raw(tmp_path / "b.gguf", *nested, *scalar, keys=1, tensors=1, version=2))
    assert file.metadata == {"n": [["x"], [5, 6]]}
    assert file.read("s") == 0 and file.read("s").shape == ()


@pytest.mark.real
def test_smollm2_is_read_as_the_package_reads_it(smollm2_path):
    assert_as_package_reads(smollm2_path)


# --- files that cannot -------------------------------------------------------------------------


def test_what_is_no_gguf_file(tmp_path):
    assert refusal(tmp_path / "absent.gguf") == "no such file"
    assert refusal(tmp_path) == "a folder, not a .gguf file"
    for data, reason in (
        (b"", "it is empty"),
        (b"GG", "header does not fit into its 2 bytes"),
        (b"PK\3\4" + bytes(60), r"not GGUF: it starts with b'PK\x03\x04'"),
        (b"line\n" * 9, "not GGUF"),
    ):
        (tmp_path / "a.gguf").write_bytes(data)
        assert reason in refusal(tmp_path / "a.gguf")
    for version in (0, 1, 4):
        path = raw(tmp_path / "a.gguf", version=version)
        assert f"version {version}, not 2 or 3" in refusal(path)
    writer = GGUFWriter(tmp_path / "big.gguf", "llama", endianess=package.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "it is big-endian" in refusal(tmp_path / "big.gguf")


def test_every_cut_is_found(tmp_path):
    values = random({"one": (64,), "two": (2, 7)})
    whole = write(tmp_path / "a.gguf", **values).read_bytes()
    end = whole.index(values["two"].tobytes()) + values["two"].nbytes  # then it is padded
    for size in range(end):
        (tmp_path / "a.gguf").write_bytes(whole[:size])
        assert "not a complete GGUF file" in refusal(tmp_path / "a.gguf")
    assert f"two: ends at byte {end} of {end - 1}" in refusal(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(whole[:end])
    assert_as_package_reads(tmp_path / "a.gguf")


HUGE = (2**24, 2**24 + 1, 2**32, 2**60, 2**64 - 1)


@pytest.mark.parametrize("count", HUGE)
def test_absurd_counts_take_no_memory(tmp_path, count):
    places = {
        "keys": ({"keys": count},),
        "tensors": ({"tensors": count},),
        "text": ({"keys": 1}, ("Q", count), "key"),
        "texts": ({"keys": 1}, "k", ("IIQ", 9, 8, count)),
        "numbers": ({"keys": 1}, "k", ("IIQ", 9, 0, count)),
        "nested": ({"keys": 1}, "k", ("IIQ", 9, 9, count)),
        "dims": ({"tensors": 1}, "t", ("IQ", min(count, 2**32 - 1), 1)),
        "elements": ({"tensors": 1}, "t", ("IQQIQ", 2, count - 1, count - 1, 0, 0)),
        "offset": ({"tensors": 1}, "t", ("IQIQ", 1, 1, 0, count - 1)),
    }
    for name, (counts, *parts) in places.items():
        path = raw(tmp_path / f"{name}.gguf", *parts, bytes(256), **counts)
        refusal(path)
        tracemalloc.start()
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 100_000, name
        tracemalloc.stop()


def test_headers_that_contradict_themselves(tmp_path):
    tensor = ("IQIQ", 1, 8, 0, 0)
    for parts, counts, reason in (
        (["k", ("IIQ", 9, 9, 1), struct.pack("<IQ", 9, 1) * 5000], {"keys": 1}, "recursion"),
        (["k", ("II", 13, 0)], {"keys": 1}, "a value of type 13"),
        (["k", ("II", 4, 0)] * 2, {"keys": 2}, "a name stands in it twice"),
        (["t", tensor] * 2, {"tensors": 2}, "a name stands in it twice"),
        (["t", ("IQIQ", 1, 0, 0, 0)], {"tensors": 1}, r"t: shape \(0,\)"),
        (["t", ("IQQIQ", 2, 31, 2, 3, 0)], {"tensors": 1}, r"t: shape \(2, 31\) in blocks of 32"),
        (["t", ("I5QIQ", 5, *[1] * 5, 0, 0)], {"tensors": 1}, "t: 5 dimensions"),
        ([("Q", 1), b"\xff", ("II", 4, 0)], {"keys": 1}, "invalid start byte"),
        (["general.alignment", ("II", 4, 0)], {"keys": 1}, "alignment 0 is not a power of two"),
        (["general.alignment", ("II", 4, 24)], {"keys": 1}, "alignment 24 is not a power"),
        (["general.alignment", ("I", 8), "x"], {"keys": 1}, "alignment 'x' is not a power"),
    ):
        message = refusal(raw(tmp_path / "a.gguf", *parts, bytes(256), **counts))
        assert re.search(reason, message), message


def test_tensor_types_that_cannot_be_read(tmp_path):
    last = "; get the model in another quantization"
    for kind, reason in (
        (4, "tensor type 4 is not known"),  # Q4_2, long gone
        (999, "tensor type 999 is not known"),
        (Kind.I32, "tensor type I32 cannot be read"),
        (Kind.Q8_K, "tensor type Q8_K cannot be read"),
    ):
        parts = ["t", ("IQIQ", 1, 256, kind, 0), bytes(2048)]
        assert refusal(raw(tmp_path / "a.gguf", *parts, tensors=1)) == reason + last


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.dictionaries(st.integers(0, 1400), st.integers(0, 255), max_size=4))
def test_a_damaged_file_is_read_or_refused(tmp_path, changes):
    path = tmp_path / "a.gguf"
    data = bytearray(write(path, Kind.Q8_0, **random({"one": (64,), "two": (2, 32)})).read_bytes())
    for at, byte in changes.items():
        data[at % len(data)] = byte
    path.write_bytes(data)
    try:
        file = gguf.open(path)
    except GgufError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert all(file.read(name).shape == shape for name, shape in file.shapes.items())


def test_callers_raise_their_own_errors(tmp_path):
    whole = write(tmp_path / "a.gguf", one=np.ones(64, np.float32)).read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[:-1])
    for error, call in ((WeightsError, weights.open_source), (TokenizerError, tokenizer.load)):
        assert "one: ends at byte" in refusal(tmp_path / "a.gguf", error, call)
    assert refusal(tmp_path / "no.gguf", WeightsError, weights.open_source) == "no such file"
