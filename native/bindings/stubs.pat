# Types of what the C interface gives no signature for: PoolCore and Buffer (pool.cpp, buffer.cpp).
# Read by nanobind.stubgen -p; a name, then what stands for it in src/vram/_native.pyi.

vram._native.__prefix__:
    \from collections.abc import Callable, Sequence
    \from typing import Any, Self
    \from vram.core.device import Device
    \from vram.trace.model import Frame

vram._native.PoolCore.__init__$:
    def __init__(self, device: Device, config: dict[str, Any], backend: Backend | None = None) -> None:
        """Make a pool on a device, with options as in PoolConfig."""

vram._native.PoolCore.malloc$:
    def malloc(self, size: int | str, stream: Any = 0) -> int:
        \doc

vram._native.PoolCore.free$:
    def free(self, ptr: int, /) -> None:
        \doc

vram._native.PoolCore.allocate$:
    def allocate(self, size: int | str, *, stream: Any = None, align: int | str | None = None, tag: str | None = None) -> Buffer:
        \doc

vram._native.PoolCore.allocate_batch$:
    def allocate_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[Buffer]:
        \doc

vram._native.PoolCore.malloc_batch$:
    def malloc_batch(self, sizes: Sequence[int | str], stream: Any = None, tag: str | None = None) -> list[int]:
        \doc

vram._native.PoolCore.record_stream$:
    def record_stream(self, ptr: int, stream: Any, /) -> None:
        \doc

vram._native.PoolCore.growable_open$:
    def growable_open(self, max: int, stream: Any, /) -> tuple[int, int]:
        \doc

vram._native.PoolCore.growable_resize$:
    def growable_resize(self, ptr: int, bytes: int, ahead: int, stream: int, tag: str | None, /) -> None:
        \doc

vram._native.PoolCore.growable_prepare$:
    def growable_prepare(self, ptr: int, bytes: int, /) -> None:
        \doc

vram._native.PoolCore.growable_close$:
    def growable_close(self, ptr: int, dropped: bool = False, /) -> None:
        \doc

vram._native.PoolCore.growable_info$:
    def growable_info(self, ptr: int, /) -> dict[str, int]:
        \doc

vram._native.PoolCore.part_of$:
    def part_of(self, block: int, offset: int, size: int, stream: Any, base: object, /) -> Buffer:
        \doc

vram._native.PoolCore.trim_to$:
    def trim_to(self, keep: int, wait: bool, /) -> None:
        \doc

vram._native.PoolCore.suspend_blocks$:
    def suspend_blocks(self, tag: str | None, keep: bool, store: PoolCore | None, /) -> int:
        \doc

vram._native.PoolCore.resume_blocks$:
    def resume_blocks(self, tag: str | None, /) -> int:
        \doc

vram._native.PoolCore.set_spill_callback$:
    def set_spill_callback(self, function: Callable[[int, int], object] | None, /) -> None:
        \doc

vram._native.PoolCore.steer_spill_allocations$:
    def steer_spill_allocations(self, first: Sequence[int], last: Sequence[int], /) -> None:
        \doc

vram._native.PoolCore.steer_spill$:
    def steer_spill(self, first: Sequence[str], never: Sequence[str], /) -> None:
        \doc

vram._native.PoolCore.spill_block$:
    def spill_block(self, ptr: int, /) -> int:
        \doc

vram._native.PoolCore.prefetch_block$:
    def prefetch_block(self, ptr: int, /) -> int:
        \doc

vram._native.PoolCore.park_blocks$:
    def park_blocks(self, tag: str | None, /) -> int:
        \doc

vram._native.PoolCore.unpark_blocks$:
    def unpark_blocks(self, tag: str | None, /) -> int:
        \doc

vram._native.PoolCore.bring_back$:
    def bring_back(self, most: int, wait: bool = False, /) -> int:
        \doc

vram._native.PoolCore.create_ahead$:
    def create_ahead(self, spare: int, most: int, /) -> int:
        \doc

vram._native.PoolCore.take_host_bytes$:
    def take_host_bytes(self, bytes: int, /) -> bool:
        \doc

vram._native.PoolCore.give_host_bytes$:
    def give_host_bytes(self, bytes: int, /) -> None:
        \doc

vram._native.PoolCore.release_host_bytes$:
    def release_host_bytes(self) -> None:
        \doc

vram._native.PoolCore.release_unused$:
    def release_unused(self, wait: bool, /) -> None:
        \doc

vram._native.PoolCore.coalesce$:
    def coalesce(self) -> None:
        \doc

vram._native.PoolCore.set_limit$:
    def set_limit(self, bytes: int, /) -> None:
        \doc

vram._native.PoolCore.add_peer$:
    def add_peer(self, number: int, /) -> None:
        \doc

vram._native.PoolCore.stream_listener$:
    def stream_listener(self) -> Callable[[int | None], bool]:
        \doc

vram._native.PoolCore.retire_stream$:
    def retire_stream(self, handle: int, /) -> None:
        \doc

vram._native.PoolCore.set_high_water$:
    def set_high_water(self, mark: int, function: Callable[[int], object] | None, /) -> None:
        \doc

vram._native.PoolCore.set_oom_callback$:
    def set_oom_callback(self, function: Callable[[int, int], bool] | None, /) -> None:
        \doc

vram._native.PoolCore.reconfigure$:
    def reconfigure(self, options: dict[str, Any], /) -> None:
        \doc

vram._native.PoolCore.config$:
    def config(self) -> dict[str, Any]:
        \doc

vram._native.PoolCore.raw_stats$:
    def raw_stats(self) -> dict[str, Any]:
        \doc

vram._native.PoolCore.raw_snapshot$:
    def raw_snapshot(self) -> list[dict[str, Any]]:
        \doc

vram._native.PoolCore.raw_holders$:
    def raw_holders(self) -> list[tuple[str | None, tuple[Frame, ...], int, int, int, int]]:
        \doc

vram._native.PoolCore.raw_spill_by_tag$:
    def raw_spill_by_tag(self) -> list[tuple[str | None, int, int, int, float]]:
        \doc

vram._native.PoolCore.usage$:
    def usage(self, restart_peak: bool, /) -> tuple[int, int, int]:
        \doc

vram._native.PoolCore.journal_start$:
    def journal_start(self, entries: int, /) -> None:
        \doc

vram._native.PoolCore.info$:
    def info(self, ptr: int, /) -> dict[str, Any]:
        \doc

vram._native.PoolCore.reset_peak$:
    def reset_peak(self) -> None:
        \doc

vram._native.PoolCore.live_bytes$:
    def live_bytes(self) -> int:
        \doc

vram._native.PoolCore.check$:
    def check(self) -> str | None:
        \doc

vram._native.PoolCore.close$:
    def close(self) -> None:
        \doc

vram._native.PoolCore.keeps_stacks$:
    keeps_stacks: bool
    """Whether allocations are kept with their Python stacks."""

vram._native.PoolCore.closed$:
    @property
    def closed(self) -> bool:
        \doc

vram._native.PoolCore.device$:
    @property
    def device(self) -> Device:
        \doc

vram._native.DriverPoolCore.__init__$:
    def __init__(self, device: Device, config: dict[str, Any], origin: str, kind: str = "device", shareable: bool = False, max_size: int = 0, fd: int = -1) -> None:
        """Open a driver pool: origin "created", "default" or "imported"."""

vram._native.DriverPoolCore.attribute$:
    def attribute(self, name: str, /) -> int:
        \doc

vram._native.DriverPoolCore.set_attribute$:
    def set_attribute(self, name: str, value: int, /) -> None:
        \doc

vram._native.DriverPoolCore.export_fd$:
    def export_fd(self) -> int:
        \doc

vram._native.DriverPoolCore.export_pointer$:
    def export_pointer(self, ptr: int, /) -> tuple[bytes, int]:
        \doc

vram._native.DriverPoolCore.import_pointer$:
    def import_pointer(self, words: bytes, offset: int, size: int, stream: Any = None, /) -> Buffer:
        \doc

vram._native.Buffer.__repr__$:
    def __repr__(self) -> str: ...

vram._native.Buffer.__len__$:
    def __len__(self) -> int: ...

vram._native.Buffer.free$:
    def free(self) -> None:
        \doc

vram._native.Buffer.record_stream$:
    def record_stream(self, stream: Any, /) -> None:
        \doc

vram._native.Buffer.fill$:
    def fill(self, value: int | bytes, *, stream: Any = None) -> None:
        \doc

vram._native.Buffer.copy_from$:
    def copy_from(self, source: Any, /, *, stream: Any = None) -> None:
        \doc

vram._native.Buffer.copy_to$:
    def copy_to(self, target: Any, /, *, stream: Any = None) -> None:
        \doc

vram._native.Buffer.__dlpack__$:
    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        \doc

vram._native.Buffer.__dlpack_device__$:
    def __dlpack_device__(self) -> tuple[int, int]:
        \doc

vram._native.Buffer.__enter__$:
    def __enter__(self) -> Self: ...

vram._native.Buffer.__exit__$:
    def __exit__(self, *exception: object) -> None: ...

vram._native.Buffer.(ptr|size|stream)$:
    @property
    def \1(self) -> int:
        \doc

vram._native.Buffer.device$:
    @property
    def device(self) -> Device:
        \doc

vram._native.Buffer.pool$:
    @property
    def pool(self) -> PoolCore:
        \doc

vram._native.Buffer.tag$:
    @property
    def tag(self) -> str | None:
        \doc

vram._native.Buffer.freed$:
    @property
    def freed(self) -> bool:
        \doc

vram._native.Buffer.shape$:
    @property
    def shape(self) -> tuple[int, ...]:
        \doc

vram._native.Buffer.typestr$:
    @property
    def typestr(self) -> str:
        \doc

vram._native.ArenaCore.__init__$:
    def __init__(self, pool: PoolCore, size: int, growable: bool, align: int, stream: Any, tag: str | None, checked: bool) -> None: ...

vram._native.ArenaCore.allocate$:
    def allocate(self, size: int | str, *, align: int | None = None) -> Buffer:
        \doc

vram._native.ArenaCore.take_array$:
    def take_array(self, shape: int | tuple[int, ...], item: int, typestr: str, code: int, /) -> Buffer:
        \doc

vram._native.ArenaCore.call_at_end$:
    def call_at_end(self, function: Callable[[], object]) -> None:
        \doc

vram._native.ArenaCore.mark$:
    def mark(self) -> tuple[int, int]:
        \doc

vram._native.ArenaCore.record_stream$:
    def record_stream(self, stream: Any) -> None:
        \doc

vram._native.ArenaCore.stream_listener$:
    def stream_listener(self) -> Callable[[int | None], bool]:
        \doc

vram._native.ArenaCore.raw_stats$:
    def raw_stats(self) -> dict[str, int]:
        \doc

vram._native.ArenaCore.pool$:
    @property
    def pool(self) -> PoolCore:
        \doc

vram._native.Buffer.base$:
    @property
    def base(self) -> object | None:
        \doc

vram._native.Buffer.views$:
    @property
    def views(self) -> int:
        \doc

vram._native.Buffer.spilled$:
    @property
    def spilled(self) -> int:
        \doc

vram._native.Buffer.spill$:
    def spill(self) -> int:
        \doc

vram._native.Buffer.prefetch$:
    def prefetch(self) -> int:
        \doc

vram._native.Buffer.suspended$:
    @property
    def suspended(self) -> bool:
        \doc

vram._native.Buffer.__cuda_array_interface__$:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        \doc

vram._native.Replayer.__init__$:
    def __init__(self, policy: str, conf: dict[str, Any], capacity: int, lag_us: float, segment_size: Any, segment_address: Any, keep_sizes: bool = False) -> None: ...

vram._native.Replayer.result$:
    def result(self) -> dict[str, Any]: ...

vram._native.Replayer.spill_steps$:
    def spill_steps(self) -> list[dict[str, Any]]:
        \doc

vram._native.plan$:
    def plan(lower: Any, upper: Any, size: Any, align: int, capacity: int, time_limit: float, seed: int) -> dict[str, Any]:
        \doc
