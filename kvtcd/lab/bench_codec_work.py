"""What a codec asks of a GPU for one block, by stage, counted while it runs on a stand-in.

Nothing is estimated: the codec itself runs on `second_device`, and whatever a GPU would be told to do is
noted. Only the entropy stage, which runs on the CPU there, is chunks and their raw bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from kvtcd.codec.graphs import DUE, Graphs
from kvtcd.codec.ports import Encoded
from kvtcd.codec.residency import Residency
from kvtcd.codec.staged import Accelerator
from kvtcd.codec.stages import Stopwatch
from kvtcd.codec.uniform import InTorch
from kvtcd.core.blob import parse
from kvtcd.lab.bench_codec_case import Case
from kvtcd.lab.bench_codec_packers import codec
from kvtcd.lab.bench_codec_timing import OTHER
from kvtcd.lab.second_device import DEVICE, Operation, SecondDevice
from kvtcd.lab.second_kernels import SecondKernels
from kvtcd.lab.second_tapes import SecondTapes


@dataclass(frozen=True, slots=True)
class Work:
    """Of one stage and one block.

    Attributes:
        launches: kernels, copies and recordings that the host tells the device of, one by one.
        runs: kernels and copies that the device runs; those of a recording are told of together.
        waits: how often the host waits until the device has come so far.
        flop: of matrix products, two for each multiplication.
        products: bytes that these read and write on the device.
        memory: bytes read and written there in all, as if nothing stayed in its caches.
        bus: bytes to or from host memory.
        chunks: of DEFLATE.
        codes: raw bytes of these chunks.
    """

    launches: int = 0
    waits: int = 0
    runs: int = 0
    flop: int = 0
    products: int = 0
    memory: int = 0
    bus: int = 0
    chunks: int = 0
    codes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


Stages = dict[str, Work]


def counted(name: str, case: Case, *, kernels: bool = True, graphs: bool = True) -> dict[str, Stages]:
    """Count the work of a codec for the block of a case: by way and by stage.

    Ways are ``encode`` and ``decode``, of a block in host memory, and ``straight``: decoded to where it is
    wanted on the device.

    Matrix products have the element type that they have on this CPU. `kernels`: codes are rounded and packed
    by them, not by torch's operations. `graphs`: what recurs is replayed.
    """
    done: list[Operation] = []
    with SecondDevice(done.append) as device:
        arithmetic = SecondKernels(device) if kernels else InTorch()
        replayed = Graphs(DEVICE, SecondTapes(device), Residency()) if graphs else None
        packer = codec(name, case, Accelerator(DEVICE, arithmetic=arithmetic, graphs=replayed))
        encoded = packer.encode()
        for _ in range(DUE):  # puts on the device what stays there
            packer.encode()
            packer.decode()
        assert packer.straight is not None, "there is an accelerator"
        ways = {"encode": packer.encode, "decode": packer.decode, "straight": packer.straight}
        found = {way: _by_stage(call, done) for way, call in ways.items()}
    assert isinstance(encoded, Encoded)
    sections = parse(memoryview(encoded.blob)).sections
    entropy = Work(
        chunks=sum(len(section.chunks) for section in sections),
        codes=sum(section.raw_bytes for section in sections),
    )
    found["encode"]["deflate"] = found["decode"]["inflate"] = found["straight"]["inflate"] = entropy
    return found


def _by_stage(call: Callable[[], object], done: list[Operation]) -> Stages:
    done.clear()
    watch = Stopwatch(lambda: len(done))
    with watch.running():
        call()
    found: Stages = {}
    for stage, operations in _split(watch, done):
        for operation in operations:
            found[stage] = found.get(stage, Work()) + _work(operation)
    return found


def _split(watch: Stopwatch, done: list[Operation]) -> Iterator[tuple[str, list[Operation]]]:
    end = 0
    for stage, first, last in watch.spans:
        yield OTHER, done[end:first]
        yield stage, done[first:last]
        end = last
    yield OTHER, done[end:]


def _work(operation: Operation) -> Work:
    product = operation.name == "mm"
    return Work(
        launches=int(operation.launches),
        runs=int(operation.runs),
        waits=int(operation.waits),
        flop=2 * operation.read[0].numel() * operation.read[1][1] if product else 0,
        products=operation.nbytes if product else 0,
        memory=operation.nbytes,
        bus=operation.crosses,
    )
