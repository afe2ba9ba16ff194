// The contract of a device: memory, pages, streams, events, copies. Its implementations are host (real
// memory, one thread per stream), model (addresses only, a virtual clock), cuda (the driver), and pinned
// (pinned host memory in the order of another device's streams). The pool calls nothing else; placement,
// caching and order belong to the pool, not to the backend.
//
// Rules for every call
//   - it may come from any thread, also concurrently, and never needs the GIL;
//   - it reports by Status, never by exception, and a failure leaves the device unchanged;
// - it checks its handles: an unknown one is Code::invalid, not undefined behavior. The exception are streams
//     of other libraries, which cannot be checked: the caller must know that such a stream exists.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "base/waits.hpp"

namespace vram {

struct DeviceInfo {
  std::string name;               // "host", "model:0", "cuda:0"
  std::uint64_t total_bytes = 0;  // physical capacity
  bool pages = false;             // the page calls work
  bool host_accessible = false;   // the host may dereference addresses
  bool release_waits = false;     // release() waits for running work, regardless of the owner
  bool captures = false;          // streams can be captured into graphs
  bool host_pages = false;        // host pages and gates work
  // The host writes here outside of stream order: uses on a block's own stream count as well.
  bool host_writes = false;
  std::uint64_t grain = kSlotBytes;  // reserve() takes multiples of it; a divisor of kSlotBytes
  std::string no_pages = {};         // why the page calls do not work, if they do not
};

class DriverPoolBackend;

// Names plain memory to other processes: what the driver makes of an address.
struct PlainName {
  unsigned char bytes[64] = {};
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const DeviceInfo& info() const = 0;
  // post: *free_bytes <= *total_bytes. Physical memory, including the use of other processes.
  virtual Status memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) = 0;

  // ---- plain memory -------------------------------------------------------------------------
  // pre: bytes > 0 and a multiple of kSlotBytes. post: *out is aligned to kUnit and usable.
  virtual Status reserve(std::uint64_t bytes, Address* out) = 0;
  // pre: (address, bytes) came from reserve and no stream uses it anymore.
  virtual Status release(Address address, std::uint64_t bytes) = 0;

  // ---- pages (only if info().pages) -----------------------------------------------------------
  // Addresses without memory. pre: bytes is a multiple of kSlotBytes. post: *out aligned to kSlotBytes.
  virtual Status space_reserve(std::uint64_t bytes, Address* out) = 0;
  // pre: nothing is mapped in it.
  virtual Status space_release(Address address, std::uint64_t bytes) = 0;
  // Physical memory without an address. pre: bytes is kPageSlots[i] * kSlotBytes for some i.
  virtual Status page_create(std::uint64_t bytes, PageHandle* out) = 0;
  // pre: not mapped.
  virtual Status page_release(PageHandle page, std::uint64_t bytes) = 0;
  // Backs [address, address + bytes) with the whole page. One page may be mapped at several
  // addresses at once. pre: address is slot-aligned inside a space and nothing is mapped there.
  // post: usable only after set_access.
  virtual Status map(Address address, std::uint64_t bytes, PageHandle page) = 0;
  // Grants the device access to a completely mapped range; it may span several pages.
  virtual Status set_access(Address address, std::uint64_t bytes) = 0;
  // From now on set_access includes another device of the same kind, by its number. pre: that device can
  // access the memory of this one.
  virtual Status add_peer(int) { return {Code::unsupported, 0, "add_peer"}; }
  // pre: the range is exactly one mapping and no work on any stream uses it anymore.
  virtual Status unmap(Address address, std::uint64_t bytes) = 0;

  // ---- host pages (only if info().host_pages) ---------------------------------------------------
  // A page in host memory, which map, set_access and unmap take like any other: work then uses it in place of
  // a device page, at the speed of the bus. pre: as for page_create. post: work on any stream can use the
  // page at [*copies, *copies + bytes) as long as it exists, so contents are copied without a call to map.
  virtual Status host_page_create(std::uint64_t /*bytes*/, PageHandle*, Address* /*copies*/) {
    return {Code::unsupported, 0, "host_page_create"};
  }
  // pre: not mapped, except at `copies`, where no work uses it anymore.
  virtual Status host_page_release(PageHandle, std::uint64_t /*bytes*/, Address /*copies*/) {
    return {Code::unsupported, 0, "host_page_release"};
  }

  // ---- gates (only if info().host_pages) --------------------------------------------------------
  // A gate is a point in the order of a stream at which it waits until the host opens the gate. The stream
  // has arrived when everything queued before the gate has completed; nothing queued behind it has begun.
  // Closing is one operation: no work of another thread comes between the arrival and the wait.
  // capturing: the stream's work goes into a graph, or the gate would break a capture.
  virtual Status gate_close(StreamHandle, GateHandle*) { return {Code::unsupported, 0, "gate_close"}; }
  // Closes one on each of held_streams() but these, in as short a time as possible: a stream that is made to
  // wait for work behind one gate, before its own is closed, never arrives. `closed` is told each one.
  virtual Status gates_close(const std::vector<StreamHandle>& except,
                             const std::function<void(GateHandle)>& closed) {
    for (const StreamHandle stream : held_streams()) {
      if (std::find(except.begin(), except.end(), stream) != except.end()) continue;
      GateHandle gate = 0;
      const Status status = gate_close(stream, &gate);
      if (status.ok()) closed(gate);
      if (!status.ok() && status.code != Code::invalid) return status;  // invalid: it was destroyed meanwhile
    }
    return {};
  }
  // Waits until the stream has arrived, or at most so long: not_ready.
  virtual Status gate_wait(GateHandle, double /*seconds*/) { return {Code::unsupported, 0, "gate_wait"}; }
  // The stream goes on, also if it has not arrived yet. The handle is invalid afterwards. Cannot fail, and
  // waits for no other call.
  virtual void gate_open(GateHandle) {}
  // The streams that a gate must be closed on to hold all lasting streams (see `lasting`). They do not wait
  // for each other by themselves: a gate on one of them never keeps another from arriving.
  virtual std::vector<StreamHandle> held_streams() { return {}; }
  // Whoever closes gates on several streams holds this meanwhile. Two sets of gates that were closed in
  // different orders would wait for each other.
  std::mutex& gates_turn() { return gates_turn_; }
  // Makes a call that queues work on memory of a pool, with no lock of a pool held. While pages are exchanged
  // under their addresses, these have none for a moment, and a driver may refuse the call (invalid); it is
  // then made again after the swap.
  template <typename Call>
  Status beside_swaps(Call call) {
    constexpr double kMostSeconds = 10;
    const Status status = call();
    if (status.code != Code::invalid || !info().host_pages) return status;
    if (!lock_within(gates_turn_, kMostSeconds)) return status;
    const std::unique_lock turn(gates_turn_, std::adopt_lock);
    return call();
  }

  // ---- memory shared between processes ---------------------------------------------------------
  // A file descriptor of the page, which the caller closes. It keeps the memory until it is closed, as does
  // every page imported from it.
  virtual Status page_export(PageHandle, int*) { return {Code::unsupported, 0, "page_export"}; }
  // Another process's page, to be mapped and released like one of this process. pre: the caller keeps `fd`
  // and closes it; bytes is the size of the page.
  virtual Status page_import(int /*fd*/, std::uint64_t /*bytes*/, PageHandle*) {
    return {Code::unsupported, 0, "page_import"};
  }
  // The same for plain memory. pre: the address came from reserve.
  virtual Status plain_export(Address, PlainName*) { return {Code::unsupported, 0, "plain_export"}; }
  // pre: the name comes from another process. One process may open a name several times, and closes it as
  // often. post: *out is usable.
  virtual Status plain_open(const PlainName&, Address*) { return {Code::unsupported, 0, "plain_open"}; }
  // pre: no stream uses it anymore.
  virtual Status plain_close(Address) { return {Code::unsupported, 0, "plain_close"}; }

  // ---- streams and events ---------------------------------------------------------------------
  virtual Status stream_create(StreamHandle* out) = 0;
  // Queued work still completes; the handle is invalid afterwards. Stream 0 cannot be destroyed.
  virtual Status stream_destroy(StreamHandle stream) = 0;
  virtual Status stream_synchronize(StreamHandle stream) = 0;
  // ok if everything queued has completed, else not_ready.
  virtual Status stream_query(StreamHandle stream) = 0;
  virtual Status stream_wait(StreamHandle stream, EventHandle event) = 0;  // later work waits for the event
  virtual Status event_create(EventHandle* out) = 0;
  virtual Status event_destroy(EventHandle event) = 0;  // safe while pending
  // Marks everything queued on the stream so far. Recording again moves the mark.
  virtual Status event_record(EventHandle event, StreamHandle stream) = 0;
  virtual Status event_query(EventHandle event) = 0;  // ok (completed or never recorded) or not_ready
  virtual Status event_synchronize(EventHandle event) = 0;
  // An event that also records the time at which it completes; otherwise like any other.
  virtual Status timing_event_create(EventHandle*) { return {Code::unsupported, 0, "timing_event_create"}; }
  // Milliseconds between two such events; not_ready before both have completed, invalid for other events and
  // for those never recorded.
  virtual Status elapsed_ms(EventHandle, EventHandle, double*) {
    return {Code::unsupported, 0, "elapsed_ms"};
  }
  // Waits for everything queued on every stream of the device, regardless of the owner.
  virtual Status synchronize() = 0;

  // The device that owns these streams and events; copies between backends of one order are stream-ordered.
  virtual const Backend* order() const { return this; }
  // The canonical handle of a stream that has several, or that means another stream on each thread.
  virtual StreamHandle canonical(StreamHandle stream) const { return stream; }

  // ---- streams of other libraries ---------------------------------------------------------------
  // Whether the stream exists until the pools are told that it will be destroyed (Allocator::retire_stream):
  // the default stream, those created here, and adopted ones. Any other stream may be destroyed at any
  // moment, and its handle may be reused for another stream.
  virtual bool lasting(StreamHandle) const { return true; }
  // Makes the stream lasting until it is disowned: the caller tells the pools before it is destroyed.
  virtual Status stream_adopt(StreamHandle) { return {Code::unsupported, 0, "stream_adopt"}; }
  virtual Status stream_disown(StreamHandle) { return {Code::unsupported, 0, "stream_disown"}; }
  // A pool begins to use a lasting stream.
  virtual void stream_used(StreamHandle) {}
  // post: *out is a number that no other stream of the process has, had or will have.
  virtual Status stream_id(StreamHandle, StreamId*) { return {Code::unsupported, 0, "stream_id"}; }
  // Whether a lasting stream has ended on its own: the stream of a thread that has ended. Events can still be
  // recorded behind its work.
  virtual bool ended(StreamHandle) const { return false; }

  // ---- other devices ----------------------------------------------------------------------------
  // Whether work here can use the other device's memory directly, once that memory is opened to this device:
  // pages by add_peer and set_access there, plain memory by open_plain here.
  virtual bool can_access(const Backend&) const { return false; }
  // Lets work here use all plain memory of the other device. pre: can_access.
  virtual Status open_plain(Backend&) { return {Code::unsupported, 0, "open_plain"}; }
  // Whether streams here can wait for events of the other device. Otherwise the host must wait.
  virtual bool waits_for(const Backend&) const { return false; }
  // Later work on the stream waits for an event of the other device. pre: waits_for.
  virtual Status stream_wait_peer(StreamHandle, const Backend&, EventHandle) {
    return {Code::unsupported, 0, "stream_wait_peer"};
  }
  // As copy, where one side is memory of the other device: `from` if from_other is set, else `to`. That
  // memory need not be opened to this device. pre: can_access.
  virtual Status copy_peer(Address /*to*/, Address /*from*/, std::uint64_t /*bytes*/, const Backend&,
                           bool /*from_other*/, StreamHandle) {
    return {Code::unsupported, 0, "copy_peer"};
  }

  // ---- capture --------------------------------------------------------------------------------
  // While a stream is captured, its work is recorded in a graph and does not run; the pool must not query it,
  // wait for it or record events on it. post: *out is the id of the capture, 0 if there is none.
  virtual Status capture_of(StreamHandle, CaptureId* out) {
    *out = 0;
    return {};
  }
  // The same, fast enough to be called before every allocation.
  virtual bool capturing(StreamHandle) { return false; }
  // Where a captured stream stands in its graph. post: *capture as from capture_of, and *out are the nodes
  // that its next work follows.
  virtual Status capture_position(StreamHandle, CaptureId* capture, std::vector<GraphNode>*) {
    *capture = 0;
    return {Code::unsupported, 0, "capture_position"};
  }
  // post: *out are the nodes that a node of a graph under capture follows directly.
  virtual Status capture_followed(GraphNode, std::vector<GraphNode>*) {
    return {Code::unsupported, 0, "capture_followed"};
  }
  // Calls `gone` once, on any thread, when the graph being captured on this stream and everything created
  // from it were destroyed and will not run anymore. `gone` must not call the backend.
  virtual Status capture_keep(StreamHandle, std::function<void()>) {
    return {Code::unsupported, 0, "capture_keep"};
  }

  // ---- the driver's own pools -------------------------------------------------------------------
  // See driver_pool_backend.hpp; null if the device has none. Lives as long as the backend.
  virtual DriverPoolBackend* driver_pools() { return nullptr; }

  // ---- work -----------------------------------------------------------------------------------
  // Both are ordered on the stream; either side of a copy may be host memory.
  virtual Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) = 0;
  virtual Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) = 0;
  // Runs a host function in stream order. It must not wait for this stream.
  virtual Status launch(StreamHandle stream, std::function<void()> work) = 0;

 private:
  std::mutex gates_turn_;
};

}  // namespace vram
