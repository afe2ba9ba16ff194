"""Every pool × backend that the one suite here holds to the same promises.

A new pool or backend is one entry of KINDS: a name, how to open its device, the options of the pool and,
where it is not vram.Pool, the class. Kinds that need hardware carry a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from vram import Device, DriverPool, PinnedPool, Pool

CAPACITY = "8GiB"


@dataclass(frozen=True)
class Kind:
    name: str
    device: Callable[[], Device]
    options: dict[str, Any] = field(default_factory=dict)
    build: Callable[..., Any] = Pool
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def make(self, **more: Any) -> Any:
        """A new pool of this kind; `more` options go over its own."""
        return self.build(self.device(), **{**self.options, **more})

    @property
    def places(self) -> bool:
        """Whether the pool itself decides where memory lies and what is cached, not the driver."""
        return self.build in (Pool, PinnedPool)


def host() -> Device:
    return Device("host")


def cuda() -> Device:
    return Device("cuda:0")


def model(**options: Any) -> Callable[[], Device]:
    return lambda: Device.model(CAPACITY, **options)


KINDS = [
    Kind("host", host),
    Kind("host-plain", host, {"pages": False}),
    Kind("host-wait", host, {"cross_stream": "wait"}),
    Kind("host-never", host, {"cross_stream": "never"}),
    Kind("host-limit", host, {"limit": "512MiB"}),
    Kind("host-uncached", host, {"stream_cache": 0}),
    Kind("host-journal", host, {"journal": 64, "stacks": "python"}),
    Kind("host-zeroing", host, {"zero_on_allocate": True, "zero_on_free": True}),
    *(
        Kind(name, cuda, options, marks=(pytest.mark.gpu,))
        for name, options in {
            "cuda": {},
            "cuda-plain": {"pages": False},
            "cuda-wait": {"cross_stream": "wait"},
            "cuda-never": {"cross_stream": "never"},
            "cuda-limit": {"limit": "512MiB"},
            "cuda-uncached": {"stream_cache": 0},
        }.items()
    ),
    Kind("model", model()),
    Kind("model-plain", model(pages=False)),
    Kind("model-wait", model(), {"cross_stream": "wait"}),
    Kind("model-never", model(), {"cross_stream": "never"}),
    Kind("model-limit", model(), {"limit": "512MiB"}),
    Kind("model-uncached", model(), {"stream_cache": 0}),
    Kind("model-good-fit", model(), {"best_fit": False}),
    Kind(
        "model-segments", model(), {"segment_size": "64MiB", "max_page": "8MiB", "release_threshold": "64MiB"}
    ),
    Kind("host-pinned", host, build=PinnedPool),
    Kind("host-pinned-traced", host, {"stacks": "python", "cross_stream": "wait"}, build=PinnedPool),
    Kind("model-pinned", model(), build=PinnedPool),
    Kind("cuda-pinned", cuda, build=PinnedPool, marks=(pytest.mark.gpu,)),
    Kind("model-driver", model(), build=DriverPool),
    Kind("model-driver-default", model(), build=DriverPool.default),
    Kind("model-driver-zeroing", model(), {"zero_on_allocate": True, "zero_on_free": True}, DriverPool),
    Kind("model-driver-kept", model(), {"release_threshold": None, "stacks": "python"}, DriverPool),
    Kind("cuda-driver", cuda, build=DriverPool, marks=(pytest.mark.gpu,)),
    Kind("cuda-driver-default", cuda, build=DriverPool.default, marks=(pytest.mark.gpu,)),
]


def left_on(device: Device) -> dict[str, int]:
    """What a model device still holds, but for streams."""
    backend: Any = device.backend
    counts = backend.counts() if device.kind == "model" else {}
    return {name: number for name, number in counts.items() if number and name not in ("streams", "queued")}


@pytest.fixture(params=[pytest.param(kind, id=kind.name, marks=kind.marks) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def pool(kind: Kind) -> Iterator[Pool]:
    """A pool that must be intact after the test, and leave nothing on its device once closed."""
    made = kind.make()
    yield made
    assert made.check() is None
    device = made.device
    made.close()
    assert left_on(device) == {}


@pytest.fixture
def limited(kind: Kind) -> Iterator[Pool]:
    """The same with room for 64 MiB."""
    made = kind.make(limit="64MiB")
    yield made
    assert made.check() is None
    made.close()
    assert left_on(made.device) == {}
