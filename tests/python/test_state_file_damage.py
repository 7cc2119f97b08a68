"""Damaged state files: refused in time and memory, and nothing has changed; killed saves."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import libmuon
import pytest
import torch
from test_state_file import groups_in, rewrite, same, snapshot
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
FILES = 2000
SECONDS = 5.0
Random = random.Random


def optimizer() -> libmuon.Muon:
    """Plain, coded and scalar state, with and without blocks."""
    shapes = {"a": (6, 5), "b": (4, 131), "c": (8, 3), "d": (5,)}
    named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    result = libmuon.Muon(
        [
            {"params": named[:1], "initial_lr": 0.5},
            {"params": named[1:2], "state_dtype": "int4"},
            {"params": named[2:3], "algorithm": "normuon", "state_dtype": "int8"},
            {"params": named[3:], "algorithm": "adamw", "lr": 1e-3},
        ],
        lr=0.02,
    )
    for _, p in named:
        p.grad = torch.randn_like(p)
    result.step()
    return result


# --- The file's bytes, whose checksums do not fit any more ---


def truncated(path: Path, rng: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def longer(path: Path, rng: Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 64)))


def flipped(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    for place in rng.sample(range(len(content)), rng.choice((1, 1, 2, 8))):
        content[place] ^= rng.randint(1, 255)
    path.write_bytes(content)


def overwritten(path: Path, rng: Random) -> None:
    content = path.read_bytes()
    begin = rng.randrange(len(content) - 16)
    piece = bytes(byte ^ 0xFF for byte in content[begin : begin + 16])
    path.write_bytes(content[:begin] + piece + content[begin + 16 :])


def header_length(path: Path, rng: Random) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    wrong = (
        0,
        1,
        length - 8,
        length + 8,
        len(content),
        2**31,
        2**63,
        2**64 - 1,
        rng.getrandbits(60),
    )
    path.write_bytes(struct.pack("<Q", rng.choice(wrong)) + content[8:])


# --- The header, sealed with a checksum that fits ---


def sealed(path: Path, change: Callable[[dict[str, Any]], None], text: Any = None) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    kind, _, *others = metadata["checksum"].split()
    change(header)
    metadata["checksum"] = " ".join([kind, "0" * 8, *others])
    new = json.dumps(header)
    new = (new if text is None else text(new)).encode()
    new += b" " * (-len(new) % 8)
    whole = struct.pack("<Q", len(new)) + new
    whole = whole.replace(b"crc32 00000000", f"crc32 {zlib.crc32(whole):08x}".encode(), 1)
    path.write_bytes(whole + content[8 + length :])


def bad_entry(path: Path, rng: Random) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = header[rng.choice([key for key in header if key != "__metadata__"])]
        begin, end = entry["data_offsets"]
        offsets = (
            [begin, end + 8],
            [begin + 1, end],
            [end + 8, end],
            [0, 2**63],
            [2**64 - 8, 2**64],
        )
        shapes = ([2**62, 2**62], [-1], [1] * 65, [1.5], "x", [0, 2**63], [entry["shape"]])
        key, values = rng.choice(
            (
                ("data_offsets", (*offsets, [begin], [], None, "x")),
                ("shape", (*shapes, [*entry["shape"], 2])),
                ("dtype", ("F128", "", None, 1, "BOOL" if entry["dtype"] != "BOOL" else "F64")),
                (rng.choice(("extra", "Dtype", "\x00")), (1,)),
            )
        )
        entry[key] = rng.choice(values)

    sealed(path, change)


def bad_header(path: Path, rng: Random) -> None:
    def change(header: dict[str, Any]) -> None:
        name = rng.choice([key for key in header if key != "__metadata__"])
        what = rng.randrange(4)
        if what == 0:
            del header[name]
        elif what == 1:
            del header[name][rng.choice(("dtype", "shape", "data_offsets"))]
        elif what == 2:
            header[name] = rng.choice((None, [], "x", 1))
        else:
            header[name + "x"] = header[name]

    sealed(path, change)


def doubled_header(path: Path, rng: Random) -> None:
    key = rng.choice(("a/momentum_buffer", "d/step", "__metadata__", "dtype", "shape", "groups"))
    sealed(path, lambda _: None, lambda text: text.replace(f'"{key}":', f'"{key}": 1, "{key}":', 1))


def unsealed(path: Path, rng: Random) -> None:
    key = rng.choice(("checksum_", "Checksum", "check"))
    sealed(path, lambda _: None, lambda text: text.replace('"checksum":', f'"{key}":', 1))


# --- Whole files of the right form whose contents are wrong ---


def metadata(path: Path, rng: Random) -> None:
    wrong = (
        {"format": "libmuon"},
        {"format": "pt"},
        {"version": rng.choice(("2", "", "1.0", "9" * 1000))},
        {"groups": rng.choice(("", "null", "[", "{}", "[]", "1", '"x"', "[1, 2, 3, 4]", "[{}]"))},
    )
    rewrite(path, **rng.choice(wrong))


def deep_or_huge(path: Path, rng: Random) -> None:
    many = rng.choice((100, 10_000, 200_000))
    texts = ("[" * many, '{"a":' * many, "[" * many + "]" * many, "[[]," * many, "9" * many)
    wrong = (*texts, '"' + "x" * many, "[" + "[]," * many + "[]]", "\0" * many, "\\u" * many)
    inner = json.dumps(groups_in(path)).replace("0.02", rng.choice(wrong), 1)
    rewrite(path, rng.choice((inner, rng.choice(wrong))))


def cut_groups(path: Path, rng: Random) -> None:
    text = json.dumps(groups_in(path))
    wrong = (
        text[: rng.randrange(len(text))],
        text + rng.choice("]}x,1"),
        text.replace('"lr": 0.02', rng.choice(('"lr": 1, "lr": 0.02', '"lr": NaN', '"lr": 1e999'))),
        text.replace(": 5,", ": " + "5" * rng.choice((30, 5000)) + ",", 1),
        text.replace(": 5,", rng.choice((": -Infinity,", ": 0x5,", ": 05,")), 1),
        text.replace(
            '"initial_lr": 0.5', '"initial_lr": ' + rng.choice(("NaN", "1e999", r'"\ud800"'))
        ),
        text.replace('"name": "a"', r'"name": "\ud800"'),
        re.sub(r'"(\w+)": ', r"\1: ", text, count=1),
    )
    rewrite(path, rng.choice(wrong))


def bad_group(path: Path, rng: Random) -> None:
    groups = groups_in(path)
    group = rng.choice(groups)
    keys = ("algorithm", "options", "algorithm_options", "params", "extra")
    wrong = {
        "algorithm": (None, 1, "", "sgd", "MUON", "x" * 1000, [], {}),
        "options": (None, 1, "x", [], [1]),
        "algorithm_options": (None, 1, "x", [1], {"damping": 1}),
        "params": (None, 1, "x", {}, [1], [[]], [None], [{}], group["params"] * 2, []),
        "extra": (None, 1, "x", [1], {"a": []}, {"a": {}}, {"lr": 1}, {"params": 1}, {"wd": 1}),
    }
    key = rng.choice(keys)
    group[key] = rng.choice(wrong[key])
    rewrite(path, groups)


def bad_keys(path: Path, rng: Random) -> None:
    groups = groups_in(path)
    group = rng.choice(groups)
    target = rng.choice((group, group["options"], group["params"][0]))
    key = rng.choice([key for key in target if key not in ("algorithm_options", "extra")])
    what = rng.randrange(3)
    if what == 0:
        target[key + "_"] = target.pop(key)
    elif what == 1:
        target["state_dtype"] = "int8"
    elif target is group["options"]:
        group["options"]["learning_rate"] = 1
    else:
        del target[key]
    rewrite(path, groups)


def bad_option(path: Path, rng: Random) -> None:
    groups = groups_in(path)
    options = rng.choice(groups)["options"]
    key = rng.choice(list(options))
    options[key] = rng.choice(("zzz", {}, {"a": 1}, [[[]]], [None], -7.5, "x" * 5000, [True]))
    rewrite(path, groups)


def bad_layout(path: Path, rng: Random) -> None:
    groups = groups_in(path)
    wrong: tuple[dict[str, Any], ...] = (
        {"rows": [7]},
        {"rows": [-9], "cols": [2**62]},
        {"rows": [0], "cols": [0]},
        {"batch_dims": 2**62},
        {"batch_dims": 1},
        {"split_sizes": [2**62, 2**62]},
        {"split_sizes": [1, 1]},
        {"split_sizes": [3] * 1000},
        {"num_heads": 2**62},
        {"num_heads": 7},
        {"num_heads": 2, "split_sizes": [1, 5]},
        {"split_dim": 2},
        {"complex_dim": -1},
        {"ns_steps": 2**62},
        {"ns_coefficients": [[1, 2]]},
        {"ns_coefficients": []},
        {"norm_factor": 0},
    )
    groups[0]["options"] |= rng.choice(wrong)
    rewrite(path, groups)


def bad_parameter(path: Path, rng: Random) -> None:
    groups = groups_in(path)
    param = rng.choice(groups)["params"][0]
    shape = param["shape"]
    wrong = {
        "name": ("", "z", 1, [], {}, True, "x" * 5000),
        "shape": (None, 1, "x", {}, [], [*shape, 1], [shape], [1.0] * len(shape), [True], [-1]),
        "dtype": (None, 1, "", "float", "F32", "Tensor", "nn", "x" * 5000),
    }
    key = rng.choice(list(wrong))
    param[key] = rng.choice(wrong[key])
    rewrite(path, groups)


def bad_tensor(path: Path, rng: Random) -> None:
    names, values, _ = torch.ops.muon.read_state_file(str(path), True)
    tensors = dict(zip(names, values, strict=True))
    name = rng.choice([name for name in names if not name.endswith("/step")])
    value = tensors[name]
    what = rng.randrange(6)
    if what == 0:  # another name: of no parameter, of no state
        del tensors[name]
        new = ("", "/", name + "x", "x" + name, name.replace("/", "."), name + "/x", "a/a/b")
        tensors[rng.choice(new)] = value
    elif what == 1:  # one of several is missing
        several = [key for key in names if key[0] != "a" and not key.endswith("/step")]
        del tensors[rng.choice(several)]
    elif what == 2:  # one that does not belong
        tensors[rng.choice(("x", "e/exp_avg", "a/exp_avg", "d/momentum_buffer", "d/x"))] = value
    elif what == 3:
        tensors[name] = rng.choice(
            (value[:-1], value[None], value.new_zeros(()), value.new_zeros(0))
        )
    elif what == 4:
        wrong = (torch.complex64, torch.complex128, torch.bool, torch.int64, torch.int16)
        tensors[name] = value.to(rng.choice(wrong[:2] if name.endswith("_scale") else wrong))
    else:
        tensors["d/step"] = torch.zeros(rng.choice(((1,), (2,), (0,), (1, 1))))
    rewrite(path, tensors=tensors)


DAMAGE = (
    *(truncated, longer, flipped, overwritten, header_length),
    *(bad_entry, bad_header, doubled_header, unsealed),
    *(metadata, deep_or_huge, cut_groups, bad_group, bad_keys),
    *(bad_option, bad_layout, bad_parameter, bad_tensor),
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a disk would wait for each of thousands of files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.mark.slow
def test_e6_damaged_files_are_refused_and_nothing_has_changed(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    source, target = optimizer(), optimizer()
    good, path = folder / "good", folder / "damaged"
    libmuon.save_state(source, good)
    content = good.read_bytes()
    libmuon.load_state(optimizer(), good)  # so that each error below is about the damage
    before = snapshot(target)
    quoted = re.escape(str(path))
    for number in range(FILES):
        damage = DAMAGE[number % len(DAMAGE)]
        path.write_bytes(content)
        damage(path, rng)
        begin = time.perf_counter()
        with pytest.raises(ValueError, match=quoted):
            libmuon.load_state(target, path)
        assert time.perf_counter() - begin < SECONDS, damage
        assert same(snapshot(target), before), damage


PEAK = """
import json, os, sys, torch, libmuon
from torch import nn

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

optimizer = libmuon.Muon([("w", nn.Parameter(torch.randn(4, 5)))])
optimizer.state_dict()
for path in sys.argv[1:]:
    if os.fork() == 0:  # each with a heap of its own
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is from now on
        before = status("VmRSS")
        try:
            libmuon.load_state(optimizer, path)
        except ValueError as error:
            print(json.dumps([path, status("VmHWM") - before, str(error)[:300]]), flush=True)
        os._exit(0)
    os.wait()
"""


def greedy_files(folder: Path) -> Iterator[Path]:
    """Files whose few bytes could stand for many objects."""
    param = {"name": "w", "shape": [4, 5], "dtype": "float32"}
    wide = {**param, "name": "\N{GRINNING FACE}" * 600_000}
    group = {"algorithm": "muon", "options": {}, "algorithm_options": {}, "extra": {}}
    many = [{**param, "name": f"p{i}"} for i in range(65_000)]
    rows = ",".join(["[1,2,3]"] * 300_000)
    texts = {
        "empty lists": "[" + "[]," * 2_600_000 + "[]]",
        "a few empty lists": "[" + "[]," * 170_000 + "[]]",
        "empty objects": "[" + "{}," * 170_000 + "{}]",
        "objects": "[" + '{"a":1},' * 170_000 + "{}]",
        "numbers": "[" + "1.5," * 500_000 + "1]",
        "large numbers": "[" + "1234567890123456.5," * 400_000 + "1]",
        "wide text": '["' + "x" * 7_900_000 + '\N{GRINNING FACE}"]',
        "wide name": json.dumps([{**group, "params": [wide]}]),
        "parameters": json.dumps([{**group, "params": many}], separators=(",", ":")),
        "an option": json.dumps([{**group, "options": {"rows": "ROWS"}, "params": [param]}]),
        "a lot": "[" + "1," * 25_000_000 + "1]",
    }
    texts["an option"] = texts["an option"].replace('"ROWS"', f"[{rows}]")
    for name, text in texts.items():
        metadata = {"format": "libmuon state", "version": "1", "groups": text}
        path = folder / name
        torch.ops.muon.write_state_file(str(path), ["w/x"], [torch.zeros(1)], metadata)
        yield path
    path = folder / "tensors"
    names = [f"w/{i}" for i in range(65_000)]
    metadata = {"format": "libmuon state", "version": "1"}
    metadata["groups"] = json.dumps([{**group, "params": [param]}])
    torch.ops.muon.write_state_file(str(path), names, [torch.zeros(0)] * 65_000, metadata)
    yield path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
def test_a_file_takes_no_more_memory_than_twice_its_size(tmp_path: Path) -> None:
    """And 64 MB, as src/state/file.h says of the file itself."""
    paths = list(greedy_files(tmp_path))
    command = [sys.executable, "-c", PEAK, *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(paths)
    for path, peak, error in lines:
        size = Path(path).stat().st_size
        assert peak <= 2 * size + 64 * 1024 * 1024, (path, peak / 2**20, size / 2**20, error)


KILLED = """
import os, random, signal, sys, time
import torch, libmuon
from torch import nn

torch.set_num_threads(1)
path, rng = sys.argv[1], random.Random(int(sys.argv[2]))
optimizer = libmuon.Muon([("w", nn.Parameter(torch.randn(512, 512)))])
contents = []
for lr in (0.25, 0.5):
    optimizer.param_groups[0]["lr"] = lr
    libmuon.save_state(optimizer, path)
    contents.append(open(path, "rb").read())
for _ in range(100):
    child = os.fork()
    if child == 0:
        for number in range(10**9):
            optimizer.param_groups[0]["lr"] = (0.25, 0.5)[number % 2]
            libmuon.save_state(optimizer, path)
    time.sleep(rng.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = contents.index(open(path, "rb").read())  # or it is neither
    libmuon.load_state(optimizer, path)
    print(found, optimizer.param_groups[0]["lr"])
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_or_the_new_file(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "state"), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 100, done.stderr
    assert set(lines) == {"0 0.25", "1 0.5"}
    # Some were killed in the middle.
    assert any(file.name.endswith(".tmp") for file in tmp_path.iterdir())
