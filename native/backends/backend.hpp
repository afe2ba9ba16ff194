// The contract a device fulfils: memory, pages, streams, events, copies. These backends fulfil it:
// host (real memory, a thread a stream), model (addresses only, a virtual clock), cuda (driver), and pinned
// (page-locked host memory in the order of another device's streams).
// The pool calls nothing else; placement, caching and order are its business, not the backend's.
//
// Rules for every call
//   - may come from any thread, also several at once, and never needs the GIL;
//   - reports by Status, never by exception, and on failure leaves the device as it was;
//   - checks its handles: an unknown one is Code::invalid, not undefined behaviour. The exception are streams
//     of other libraries, which nobody can check: the caller knows that such a stream exists.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/types.hpp"

namespace vram {

struct DeviceInfo {
  std::string name;               // "host", "model:0", "cuda:0"
  std::uint64_t total_bytes = 0;  // physical capacity
  bool pages = false;             // the page calls work
  bool host_accessible = false;   // addresses may be dereferenced by the host
  bool release_waits = false;     // release() waits for work that is running, whosever it is
  bool captures = false;          // streams can be captured into graphs
  // The host writes here out of stream order: uses on a block's own stream count, too.
  bool host_writes = false;
  std::string no_pages = {};  // why the page calls do not work, where they do not
};

class DriverPoolBackend;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const DeviceInfo& info() const = 0;
  // post: *free_bytes <= *total_bytes. Physical memory, everyone's use counted.
  virtual Status memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) = 0;

  // ---- plain memory -------------------------------------------------------------------------
  // pre: bytes > 0 and a multiple of kSlotBytes. post: *out is aligned to kUnit and usable.
  virtual Status reserve(std::uint64_t bytes, Address* out) = 0;
  // pre: (address, bytes) came from reserve and nothing on any stream uses it any more.
  virtual Status release(Address address, std::uint64_t bytes) = 0;

  // ---- pages (only where info().pages) --------------------------------------------------------
  // Addresses without memory. pre: bytes is a multiple of kSlotBytes. post: *out aligned to kSlotBytes.
  virtual Status space_reserve(std::uint64_t bytes, Address* out) = 0;
  // pre: nothing is mapped in it.
  virtual Status space_release(Address address, std::uint64_t bytes) = 0;
  // Physical memory without an address. pre: bytes is kPageSlots[i] * kSlotBytes for some i.
  virtual Status page_create(std::uint64_t bytes, PageHandle* out) = 0;
  // pre: mapped nowhere.
  virtual Status page_release(PageHandle page, std::uint64_t bytes) = 0;
  // Backs [address, address + bytes) with the whole page. One page may be mapped at several
  // addresses at once. pre: address is slot-aligned inside a space and nothing is mapped there.
  // post: usable only after set_access.
  virtual Status map(Address address, std::uint64_t bytes, PageHandle page) = 0;
  // Grants the device access to a range that is wholly mapped; may span several pages.
  virtual Status set_access(Address address, std::uint64_t bytes) = 0;
  // pre: the range is one whole mapping and no work on any stream touches it any more.
  virtual Status unmap(Address address, std::uint64_t bytes) = 0;

  // ---- streams and events ---------------------------------------------------------------------
  virtual Status stream_create(StreamHandle* out) = 0;
  // Lets the queued work finish; the handle is invalid afterwards. Stream 0 cannot be destroyed.
  virtual Status stream_destroy(StreamHandle stream) = 0;
  virtual Status stream_synchronize(StreamHandle stream) = 0;
  // ok when everything queued has finished, else not_ready.
  virtual Status stream_query(StreamHandle stream) = 0;
  virtual Status stream_wait(StreamHandle stream, EventHandle event) = 0;  // later work waits for it
  virtual Status event_create(EventHandle* out) = 0;
  virtual Status event_destroy(EventHandle event) = 0;  // safe while pending
  // Marks "everything queued on stream so far". Recording again moves the mark.
  virtual Status event_record(EventHandle event, StreamHandle stream) = 0;
  virtual Status event_query(EventHandle event) = 0;  // ok (passed or never recorded) or not_ready
  virtual Status event_synchronize(EventHandle event) = 0;
  // An event that also keeps the moment its point was passed, for measuring; used as any other.
  virtual Status timing_event_create(EventHandle*) { return {Code::unsupported, 0, "timing_event_create"}; }
  // Milliseconds from one such event to another; not_ready before both have passed, invalid for other events
  // and for those never recorded.
  virtual Status elapsed_ms(EventHandle, EventHandle, double*) {
    return {Code::unsupported, 0, "elapsed_ms"};
  }
  // Waits for everything queued on every stream of the device, whosever it is.
  virtual Status synchronize() = 0;

  // The device whose streams and events these are; copies between backends of one order are stream-ordered.
  virtual const Backend* order() const { return this; }
  // The one handle that stands for a stream which has several names, or means another stream on each thread.
  virtual StreamHandle canonical(StreamHandle stream) const { return stream; }

  // ---- streams of other libraries ---------------------------------------------------------------
  // Whether the stream exists until the pools are told that it goes (Allocator::retire_stream): the default
  // stream, those made here, and those that were adopted. Any other one may be destroyed at any moment, and
  // its handle may come back as another stream.
  virtual bool lasting(StreamHandle) const { return true; }
  // From now on the stream is lasting, until it is disowned: the caller tells the pools before it goes.
  virtual Status stream_adopt(StreamHandle) { return {Code::unsupported, 0, "stream_adopt"}; }
  virtual Status stream_disown(StreamHandle) { return {Code::unsupported, 0, "stream_disown"}; }
  // post: *out is a number that no other stream of the process has, had or gets.
  virtual Status stream_id(StreamHandle, StreamId*) { return {Code::unsupported, 0, "stream_id"}; }
  // Whether a lasting stream has ended without anybody's doing: that of a thread which is gone. What it did
  // can still be marked.
  virtual bool ended(StreamHandle) const { return false; }

  // ---- capture --------------------------------------------------------------------------------
  // While a stream is captured its work is written into a graph and does not run; it must not be asked,
  // waited for or marked by the pool. post: *out is the number of the capture, 0 where there is none.
  virtual Status capture_of(StreamHandle, CaptureId* out) {
    *out = 0;
    return {};
  }
  // The same, quick enough to be asked before every allocation.
  virtual bool capturing(StreamHandle) { return false; }
  // Has `gone` called once, on any thread and without calls to the backend from it, when the graph under
  // capture on this stream and everything made of it have been destroyed and will not run any more.
  virtual Status capture_keep(StreamHandle, std::function<void()>) {
    return {Code::unsupported, 0, "capture_keep"};
  }

  // ---- the driver's own pools -------------------------------------------------------------------
  // See driver_pool_backend.hpp; null where the device has none. As long-lived as the backend.
  virtual DriverPoolBackend* driver_pools() { return nullptr; }

  // ---- work -----------------------------------------------------------------------------------
  // Both ordered on stream; either side of a copy may be host memory.
  virtual Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) = 0;
  virtual Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) = 0;
  // Runs a host function in stream order. It must not call back into this stream's waits.
  virtual Status launch(StreamHandle stream, std::function<void()> work) = 0;
};

}  // namespace vram
