// The contract implemented with the driver. See cuda.hpp.
#include "backends/cuda.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "backends/thread_streams.hpp"
#include "base/waits.hpp"

namespace vram {

int CudaBackend::device_count(std::string* why) {
  const CudaDriver& d = CudaDriver::get();
  if (why != nullptr) *why = d.missing;
  int count = 0;
  if (!d.missing.empty() || d.device_count(&count) != kCuSuccess) return 0;
  return count;
}

CudaBackend::CudaBackend(int index) : driver_(CudaDriver::get()) {
  if (!driver_.missing.empty()) throw std::runtime_error(driver_.missing);
  const int count = device_count(nullptr);
  if (index < 0 || index >= count)
    throw std::runtime_error("the driver has " + std::to_string(count) + " device(s)");
  const auto require = [](CuResult result, const char* call) {
    if (result != kCuSuccess)
      throw std::runtime_error(std::string(call) + " failed with code " + std::to_string(result));
  };
  std::size_t total = 0;
  require(driver_.device_get(&device_, index), "cuDeviceGet");
  require(driver_.device_total(&total, device_), "cuDeviceTotalMem");
  require(driver_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  process_ = getpid();
  rdma_ = attribute(kCuAttributeRdmaWithVirtualMemory) != 0;
  exports_ = attribute(kCuAttributePageDescriptors) != 0;
  info_.name = "cuda:" + std::to_string(index);
  info_.total_bytes = total;
  info_.release_waits = true;
  info_.captures = true;
  info_.no_pages = probe_pages();
  info_.pages = info_.no_pages.empty();
  info_.host_pages =
      info_.pages && attribute(kCuAttributeHostNumaPages) != 0 && driver_.stream_flags != nullptr;
}

CudaBackend::~CudaBackend() {
  end_gates();
  if (context_ != nullptr && getpid() == process_) (void)driver_.primary_release(device_);
}

bool CudaBackend::inherited() const {
  return abandoned_.load(std::memory_order_relaxed) || getpid() != process_;
}

void CudaBackend::abandon() { abandoned_ = true; }

// Some devices, and some containers on devices that support them, refuse the page calls. Uses a page to find
// out, and returns why it does not work, or nothing.
std::string CudaBackend::probe_pages() {
  if (attribute(kCuAttributeVirtualMemory) == 0) return "the device has no virtual memory management";
  Status status = try_page();
  // Without one feature after the other, if the device promises more than the system grants: containers
  // refuse to create such a page, and WSL2 refuses access to a page for RDMA.
  for (bool* feature : {&rdma_, &exports_}) {
    if (status.ok() || !*feature) continue;
    *feature = false;
    status = try_page();
  }
  // Without memory for a single page, the calls cannot be tested.
  if (status.ok() || status.code == Code::out_of_memory) return {};
  return std::string(status.call) + " failed: " + cuda_error_text(status.native);
}

// Creates a page, maps it, and asks for access.
Status CudaBackend::try_page() {
  PageHandle page = 0;
  Status status = page_create(kSlotBytes, &page);
  Address space = 0;
  bool mapped = false;
  if (status.ok()) status = space_reserve(kSlotBytes, &space);
  if (status.ok()) {
    status = map(space, kSlotBytes, page);
    mapped = status.ok();
  }
  if (status.ok()) status = set_access(space, kSlotBytes);
  if (mapped) (void)unmap(space, kSlotBytes);
  if (space != 0) (void)space_release(space, kSlotBytes);
  if (page != 0) (void)page_release(page, kSlotBytes);
  return status;
}

std::string CudaBackend::hardware() const {
  char name[256] = {};
  return driver_.device_name(name, sizeof name - 1, device_) == kCuSuccess ? name : "unknown";
}

int CudaBackend::driver_version() const {
  int version = 0;
  return driver_.version(&version) == kCuSuccess ? version : 0;
}

int CudaBackend::attribute(int number) const {
  int value = 0;
  return driver_.device_attribute(&value, number, device_) == kCuSuccess ? value : 0;
}

Status CudaBackend::memory_info(std::uint64_t* free_bytes, std::uint64_t* total_bytes) {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status status =
      unseen_by_captures("cuMemGetInfo", [&] { return driver_.memory_info(&free, &total); });
  *free_bytes = free;
  *total_bytes = total;
  return status;
}

// ---- memory ---------------------------------------------------------------------------------------------

Status CudaBackend::reserve(std::uint64_t bytes, Address* out) {
  return unseen_by_captures("cuMemAlloc", [&] { return driver_.memory_alloc(out, bytes); });
}
Status CudaBackend::release(Address address, std::uint64_t) {
  return unseen_by_captures("cuMemFree", [&] { return driver_.memory_free(address); });
}
Status CudaBackend::space_reserve(std::uint64_t bytes, Address* out) {
  return unseen_by_captures("cuMemAddressReserve",
                            [&] { return driver_.address_reserve(out, bytes, kSlotBytes, 0, 0); });
}
Status CudaBackend::space_release(Address address, std::uint64_t bytes) {
  return unseen_by_captures("cuMemAddressFree", [&] { return driver_.address_free(address, bytes); });
}
Status CudaBackend::page_create(std::uint64_t bytes, PageHandle* out) {
  CuAllocationProperties properties = {};
  properties.type = kCuAllocationPinned;
  properties.location = {kCuLocationDevice, device_};
  properties.handle_types = exports_ ? kCuHandleFileDescriptor : 0;
  properties.flags.rdma = rdma_ ? 1 : 0;
  return unseen_by_captures("cuMemCreate", [&] { return driver_.page_create(out, bytes, &properties, 0); });
}
Status CudaBackend::page_release(PageHandle page, std::uint64_t) {
  return unseen_by_captures("cuMemRelease", [&] { return driver_.page_release(page); });
}
Status CudaBackend::map(Address address, std::uint64_t bytes, PageHandle page) {
  return unseen_by_captures("cuMemMap", [&] { return driver_.map(address, bytes, 0, page, 0); });
}
Status CudaBackend::set_access(Address address, std::uint64_t bytes) {
  CuAccess access[1 + kMostPeers];
  std::size_t count = 0;
  access[count++] = {{kCuLocationDevice, device_}, kCuAccessReadWrite};
  const int peers = peer_count_.load(std::memory_order_acquire);
  for (int i = 0; i < peers; ++i) access[count++] = {{kCuLocationDevice, peers_[i]}, kCuAccessReadWrite};
  return unseen_by_captures("cuMemSetAccess",
                            [&] { return driver_.set_access(address, bytes, access, count); });
}
Status CudaBackend::add_peer(int device) {
  const std::lock_guard lock(handles_mutex_);
  const int count = peer_count_.load(std::memory_order_relaxed);
  if (device == device_ || std::find(peers_, peers_ + count, device) != peers_ + count) return {};
  if (device < 0 || count == kMostPeers) return {Code::invalid, 0, "add_peer"};
  peers_[count] = device;
  peer_count_.store(count + 1, std::memory_order_release);
  return {};
}
Status CudaBackend::unmap(Address address, std::uint64_t bytes) {
  return unseen_by_captures("cuMemUnmap", [&] { return driver_.unmap(address, bytes); });
}

// ---- host pages -----------------------------------------------------------------------------------------

Status CudaBackend::host_page_create(std::uint64_t bytes, PageHandle* out, Address* copies) {
  if (!info_.host_pages) return {Code::unsupported, kCuNotSupported, "cuMemCreate"};
  CuAllocationProperties properties = {};
  properties.type = kCuAllocationPinned;
  properties.location = {kCuLocationHostNuma, std::max(0, attribute(kCuAttributeHostNuma))};
  Status status =
      unseen_by_captures("cuMemCreate", [&] { return driver_.page_create(out, bytes, &properties, 0); });
  if (!status.ok()) return status;
  bool mapped = false;
  *copies = 0;
  status = space_reserve(bytes, copies);
  if (status.ok()) {
    status = map(*copies, bytes, *out);
    mapped = status.ok();
  }
  if (status.ok()) status = set_access(*copies, bytes);
  if (status.ok()) return status;
  if (mapped) (void)unmap(*copies, bytes);
  if (*copies != 0) (void)space_release(*copies, bytes);
  (void)page_release(*out, bytes);
  return status;
}
Status CudaBackend::host_page_release(PageHandle page, std::uint64_t bytes, Address copies) {
  if (const Status status = unmap(copies, bytes); !status.ok()) return status;
  (void)space_release(copies, bytes);
  return page_release(page, bytes);
}

// ---- memory shared between processes --------------------------------------------------------------------

Status CudaBackend::page_export(PageHandle page, int* fd) {
  if (!exports_) return {Code::unsupported, kCuNotSupported, "cuMemExportToShareableHandle"};
  return unseen_by_captures("cuMemExportToShareableHandle",
                            [&] { return driver_.page_export(fd, page, kCuHandleFileDescriptor, 0); });
}
Status CudaBackend::page_import(int fd, std::uint64_t, PageHandle* out) {
  return unseen_by_captures("cuMemImportFromShareableHandle", [&] {
    return driver_.page_import(out, cu_pointer(static_cast<std::uint64_t>(fd)), kCuHandleFileDescriptor);
  });
}
Status CudaBackend::plain_export(Address address, PlainName* out) {
  CuIpcHandle name = {};
  const Status status =
      unseen_by_captures("cuIpcGetMemHandle", [&] { return driver_.ipc_name(&name, address); });
  std::memcpy(out->bytes, name.bytes, sizeof name.bytes);
  return status;
}
Status CudaBackend::plain_open(const PlainName& name, Address* out) {
  constexpr unsigned kPeersWhenNeeded = 1;
  CuIpcHandle handle = {};
  std::memcpy(handle.bytes, name.bytes, sizeof handle.bytes);
  return unseen_by_captures("cuIpcOpenMemHandle",
                            [&] { return driver_.ipc_open(out, handle, kPeersWhenNeeded); });
}
Status CudaBackend::plain_close(Address address) {
  return unseen_by_captures("cuIpcCloseMemHandle", [&] { return driver_.ipc_close(address); });
}

// ---- streams and events ---------------------------------------------------------------------------------

namespace {

constexpr StreamHandle kLegacy = 1;
constexpr StreamHandle kPerThread = 2;

}  // namespace

thread_local bool CudaBackend::in_launched_ = false;

// A wait of the driver cannot be interrupted, so an interruptible wait polls.
template <typename Query, typename Block>
Status CudaBackend::wait(const char* name, Query query, Block block) const {
  if (in_launched_) return {Code::deadlock, 0, name};
  if (!interruptible()) return unseen_by_captures(name, block);
  Status status = wait_by_asking([&] { return unseen_by_captures(name, query); });
  status.call = name;
  // The work has completed, so this returns immediately. Memory freed in stream order is available to the
  // driver's own pools only after a wait.
  return status.ok() ? unseen_by_captures(name, block) : status;
}

void* for_work(StreamHandle stream) {
  return cu_pointer(ThreadStreams::is_one(stream) ? kPerThread : stream);
}
void* for_order(StreamHandle stream) { return cu_pointer(ThreadStreams::is_one(stream) ? 0 : stream); }

StreamHandle CudaBackend::canonical(StreamHandle stream) const {
  if (stream == kLegacy) return 0;
  return stream == kPerThread ? ThreadStreams::mine() : stream;
}

bool CudaBackend::lasting(StreamHandle stream) const {
  if (stream <= kPerThread || ThreadStreams::is_one(stream)) return true;
  const std::lock_guard lock(handles_mutex_);
  return streams_.contains(stream) || adopted_.contains(stream);
}

Status CudaBackend::stream_adopt(StreamHandle stream) {
  if (lasting(stream)) return {};
  const std::lock_guard lock(handles_mutex_);
  adopted_.emplace(stream, false);
  return {};
}

void CudaBackend::stream_used(StreamHandle stream) {
  const std::lock_guard lock(handles_mutex_);
  if (const auto found = adopted_.find(stream); found != adopted_.end()) found->second = true;
}

Status CudaBackend::stream_disown(StreamHandle stream) {
  const std::lock_guard lock(handles_mutex_);
  return {adopted_.erase(stream) != 0 ? Code::ok : Code::invalid, 0, "stream_disown"};
}

Status CudaBackend::stream_id(StreamHandle stream, StreamId* out) {
  unsigned long long id = 0;
  const Status status = in_context("cuStreamGetId", [&] { return driver_.stream_id(for_work(stream), &id); });
  *out = id;
  return status;
}

bool CudaBackend::ended(StreamHandle stream) const { return ThreadStreams::ended(stream); }

Status CudaBackend::stream_create(StreamHandle* out) {
  void* stream = nullptr;
  const Status status = unseen_by_captures(
      "cuStreamCreate", [&] { return driver_.stream_create(&stream, kCuStreamNonBlocking); });
  *out = reinterpret_cast<StreamHandle>(stream);
  const std::lock_guard lock(handles_mutex_);
  if (status.ok()) streams_.insert(*out);
  return status;
}
Status CudaBackend::stream_destroy(StreamHandle stream) {
  {
    // Before it is destroyed: the driver may give the handle to a stream that another thread creates.
    const std::lock_guard lock(handles_mutex_);
    if (streams_.erase(stream) == 0) return {Code::invalid, 0, "cuStreamDestroy"};
  }
  const Status status =
      unseen_by_captures("cuStreamDestroy", [&] { return driver_.stream_destroy(cu_pointer(stream)); });
  const std::lock_guard lock(handles_mutex_);
  if (!status.ok()) streams_.insert(stream);
  return status;
}
// Work on the default stream would have to run after that of every blocking stream. The driver refuses it
// while one of them is captured, and the capture then becomes invalid; so the pool does not try.
bool CudaBackend::breaks_capture(void* stream) const {
  int capturing = 0;
  return stream == nullptr && !inherited() && driver_.capture_asked(stream, &capturing) == kCuCaptureImplicit;
}

Status CudaBackend::stream_synchronize(StreamHandle stream) {
  if (breaks_capture(for_order(stream))) return {Code::capturing, kCuCaptureImplicit, "cuStreamSynchronize"};
  void* const order = for_order(stream);
  return wait(
      "cuStreamSynchronize", [&] { return driver_.stream_query(order); },
      [&] { return driver_.stream_synchronize(order); });
}
Status CudaBackend::stream_query(StreamHandle stream) {
  if (breaks_capture(for_order(stream))) return {Code::capturing, kCuCaptureImplicit, "cuStreamQuery"};
  return unseen_by_captures("cuStreamQuery", [&] { return driver_.stream_query(for_order(stream)); });
}
bool CudaBackend::knows(EventHandle event) const {
  const std::lock_guard lock(handles_mutex_);
  return events_.contains(event);
}
Status CudaBackend::stream_wait(StreamHandle stream, EventHandle event) {
  if (!knows(event)) return {Code::invalid, 0, "cuStreamWaitEvent"};
  if (breaks_capture(for_work(stream))) return {Code::capturing, kCuCaptureImplicit, "cuStreamWaitEvent"};
  return in_context("cuStreamWaitEvent",
                    [&] { return driver_.stream_wait(for_work(stream), cu_pointer(event), 0); });
}
Status CudaBackend::event_made(unsigned flags, EventHandle* out) {
  void* event = nullptr;
  const Status status = in_context("cuEventCreate", [&] { return driver_.event_create(&event, flags); });
  *out = reinterpret_cast<EventHandle>(event);
  const std::lock_guard lock(handles_mutex_);
  if (status.ok()) events_.insert(*out);
  return status;
}
Status CudaBackend::event_create(EventHandle* out) { return event_made(kCuEventDisableTiming, out); }
Status CudaBackend::event_destroy(EventHandle event) {
  {
    const std::lock_guard lock(handles_mutex_);
    if (events_.erase(event) == 0) return {Code::invalid, 0, "cuEventDestroy"};
  }
  const Status status =
      in_context("cuEventDestroy", [&] { return driver_.event_destroy(cu_pointer(event)); });
  const std::lock_guard lock(handles_mutex_);
  if (!status.ok()) events_.insert(event);
  return status;
}
Status CudaBackend::event_record(EventHandle event, StreamHandle stream) {
  if (!knows(event)) return {Code::invalid, 0, "cuEventRecord"};
  if (breaks_capture(for_order(stream))) return {Code::capturing, kCuCaptureImplicit, "cuEventRecord"};
  return in_context("cuEventRecord",
                    [&] { return driver_.event_record(cu_pointer(event), for_order(stream)); });
}
Status CudaBackend::event_query(EventHandle event) {
  if (!knows(event)) return {Code::invalid, 0, "cuEventQuery"};
  return unseen_by_captures("cuEventQuery", [&] { return driver_.event_query(cu_pointer(event)); });
}
Status CudaBackend::event_synchronize(EventHandle event) {
  if (!knows(event)) return {Code::invalid, 0, "cuEventSynchronize"};
  return wait(
      "cuEventSynchronize", [&] { return driver_.event_query(cu_pointer(event)); },
      [&] { return driver_.event_synchronize(cu_pointer(event)); });
}

Status CudaBackend::timing_event_create(EventHandle* out) { return event_made(0, out); }
Status CudaBackend::elapsed_ms(EventHandle from, EventHandle to, double* out) {
  if (!knows(from) || !knows(to)) return {Code::invalid, 0, "cuEventElapsedTime"};
  float elapsed = 0;
  const Status status = in_context("cuEventElapsedTime", [&] {
    return driver_.event_elapsed(&elapsed, cu_pointer(from), cu_pointer(to));
  });
  *out = elapsed;
  return status;
}

// ---- work -----------------------------------------------------------------------------------------------

bool CudaBackend::host_pinned(Address address, std::uint64_t bytes) const {
  const auto known = [&](Address at) {
    unsigned type = 0;
    const Status status = in_context(
        "cuPointerGetAttribute", [&] { return driver_.pointer_attribute(&type, kCuPointerMemoryType, at); });
    return status.ok() && type == kCuMemoryHost;
  };
  return bytes > 0 && known(address) && known(address + bytes - 1);
}

Status CudaBackend::copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) {
  return in_context("cuMemcpyAsync", [&] { return driver_.copy(to, from, bytes, for_work(stream)); });
}
Status CudaBackend::fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) {
  return in_context("cuMemsetD8Async", [&] { return driver_.fill(to, value, bytes, for_work(stream)); });
}
Status CudaBackend::launch(StreamHandle stream, std::function<void()> work) {
  auto* owned = new std::function<void()>(std::move(work));
  const auto run = [](void* argument) {
    const std::unique_ptr<std::function<void()>> function(static_cast<std::function<void()>*>(argument));
    in_launched_ = true;
    (*function)();
    in_launched_ = false;
  };
  const Status status =
      in_context("cuLaunchHostFunc", [&] { return driver_.launch_host(for_work(stream), run, owned); });
  if (!status.ok()) delete owned;
  return status;
}

// The driver cannot tell whether the whole device is idle. So this waits for the lasting streams one by one,
// which can be interrupted, and then for whatever others have queued.
Status CudaBackend::synchronize() {
  if (in_launched_) return {Code::deadlock, 0, "cuCtxSynchronize"};
  if (interruptible())
    if (const Status status = wait_for_lasting(); !status.ok()) return status;
  return unseen_by_captures("cuCtxSynchronize", [&] { return driver_.context_synchronize(); });
}

Status CudaBackend::wait_for_lasting() {
  std::vector<StreamHandle> streams{0};
  {
    const std::lock_guard lock(handles_mutex_);
    streams.insert(streams.end(), streams_.begin(), streams_.end());
    for (const auto& [stream, used] : adopted_) streams.push_back(stream);
  }
  for (const StreamHandle stream : streams) {
    const Status status = wait_by_asking([&]() -> Status {
      // A stream that is destroyed in the meantime leaves the table first.
      const std::lock_guard lock(handles_mutex_);
      const bool there = stream == 0 || streams_.contains(stream) || adopted_.contains(stream);
      if (!there || breaks_capture(cu_pointer(stream)) || capturing(stream)) return {};
      return unseen_by_captures("cuCtxSynchronize", [&] { return driver_.stream_query(cu_pointer(stream)); });
    });
    if (!status.ok()) return status;
  }
  return {};
}

// ---- other devices ----------------------------------------------------------------------------------------

bool CudaBackend::can_access(const Backend& other) const {
  const auto* cuda = dynamic_cast<const CudaBackend*>(&other);
  if (cuda == nullptr || cuda == this || inherited()) return false;
  int possible = 0;
  return driver_.can_access(&possible, device_, cuda->device_) == kCuSuccess && possible != 0;
}
Status CudaBackend::open_plain(Backend& other) {
  if (!can_access(other)) return {Code::unsupported, 0, "cuCtxEnablePeerAccess"};
  void* const context = dynamic_cast<CudaBackend&>(other).context_;
  return unseen_by_captures("cuCtxEnablePeerAccess", [&] {
    const CuResult result = driver_.open_context(context, 0);
    return result == kCuPeerAlreadyEnabled ? kCuSuccess : result;
  });
}
bool CudaBackend::waits_for(const Backend& other) const {
  return &other != this && dynamic_cast<const CudaBackend*>(&other) != nullptr;
}
Status CudaBackend::stream_wait_peer(StreamHandle stream, const Backend& other, EventHandle event) {
  if (!waits_for(other)) return {Code::unsupported, 0, "cuStreamWaitEvent"};
  if (!dynamic_cast<const CudaBackend&>(other).knows(event)) return {Code::invalid, 0, "cuStreamWaitEvent"};
  if (breaks_capture(for_work(stream))) return {Code::capturing, kCuCaptureImplicit, "cuStreamWaitEvent"};
  return in_context("cuStreamWaitEvent",
                    [&] { return driver_.stream_wait(for_work(stream), cu_pointer(event), 0); });
}
Status CudaBackend::copy_peer(Address to, Address from, std::uint64_t bytes, const Backend& other,
                              bool from_other, StreamHandle stream) {
  if (!can_access(other)) return {Code::unsupported, 0, "cuMemcpyPeerAsync"};
  void* const theirs = dynamic_cast<const CudaBackend&>(other).context_;
  return in_context("cuMemcpyPeerAsync", [&] {
    return driver_.copy_peer(to, from_other ? context_ : theirs, from, from_other ? theirs : context_, bytes,
                             for_work(stream));
  });
}

// ---- capture --------------------------------------------------------------------------------------------

Status CudaBackend::capture_position(StreamHandle stream, CaptureId* capture, std::vector<GraphNode>* out) {
  int capturing = 0;
  std::uint64_t id = 0;
  const void* const* nodes = nullptr;
  std::size_t count = 0;
  const Status status = in_context("cuStreamGetCaptureInfo", [&] {
    return driver_.capture_info(for_work(stream), &capturing, &id, nullptr, &nodes, &count);
  });
  *capture = status.ok() && capturing != 0 ? id : 0;
  out->clear();
  if (*capture == 0) return status;
  for (std::size_t i = 0; i < count; ++i) out->push_back(reinterpret_cast<GraphNode>(nodes[i]));
  return status;
}

// Fails for edges with data of their own, such as those of programmatic dependent launches.
Status CudaBackend::capture_followed(GraphNode node, std::vector<GraphNode>* out) {
  std::size_t count = 0;
  std::vector<void*> nodes;
  const auto ask = [&] {
    return in_context("cuGraphNodeGetDependencies", [&] {
      return driver_.node_dependencies(cu_pointer(node), nodes.empty() ? nullptr : nodes.data(), &count);
    });
  };
  Status status = ask();
  if (status.ok() && count != 0) {
    nodes.resize(count);
    status = ask();
  }
  out->clear();
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < std::min(count, nodes.size()); ++i)
    out->push_back(reinterpret_cast<GraphNode>(nodes[i]));
  return status;
}

Status CudaBackend::capture_of(StreamHandle stream, CaptureId* out) {
  int capturing = 0;
  std::uint64_t id = 0;
  const Status status = in_context("cuStreamGetCaptureInfo", [&] {
    return driver_.capture_info(for_work(stream), &capturing, &id, nullptr, nullptr, nullptr);
  });
  *out = status.ok() && capturing != 0 ? id : 0;
  return status;
}

bool CudaBackend::capturing(StreamHandle stream) {
  if (stream == 0 || inherited()) return false;
  int capturing = 0;
  return driver_.capture_asked(for_work(stream), &capturing) == kCuSuccess && capturing != 0;
}

// A user object of the graph: the driver drops it with the last object created from the graph.
Status CudaBackend::capture_keep(StreamHandle stream, std::function<void()> gone) {
  auto owned = std::make_unique<std::function<void()>>(std::move(gone));
  const auto drop = [](void* argument) {
    const std::unique_ptr<std::function<void()>> function(static_cast<std::function<void()>*>(argument));
    (*function)();
  };
  int capturing = 0;
  void* graph = nullptr;
  Status status = in_context("cuStreamGetCaptureInfo", [&] {
    return driver_.capture_info(for_work(stream), &capturing, nullptr, &graph, nullptr, nullptr);
  });
  if (!status.ok()) return status;
  if (capturing != 1 || graph == nullptr) return {Code::invalid, 0, "cuStreamGetCaptureInfo"};
  void* object = nullptr;
  constexpr unsigned kNoDestructorSync = 1;
  status = in_context("cuUserObjectCreate", [&] {
    return driver_.user_object_create(&object, owned.get(), drop, 1, kNoDestructorSync);
  });
  if (!status.ok()) return status;
  (void)owned.release();
  constexpr unsigned kMove = 1;  // the graph takes over our reference
  status = in_context("cuGraphRetainUserObject",
                      [&] { return driver_.graph_retain_user_object(graph, object, 1, kMove); });
  // Dropping it calls `gone`, which is correct: no graph holds it.
  if (!status.ok()) (void)driver_.user_object_release(object, 1);
  return status;
}

Status CudaBackend::capture_begin(StreamHandle stream) {
  return in_context("cuStreamBeginCapture",
                    [&] { return driver_.capture_begin(for_work(stream), kCuCaptureThreadLocal); });
}

Status CudaBackend::capture_end(StreamHandle stream, std::uint64_t* executable) {
  void* graph = nullptr;
  void* made = nullptr;
  *executable = 0;
  Status status =
      in_context("cuStreamEndCapture", [&] { return driver_.capture_end(for_work(stream), &graph); });
  if (!status.ok() || graph == nullptr)
    return status.ok() ? Status{Code::failed, 0, "cuStreamEndCapture"} : status;
  status = in_context("cuGraphInstantiate", [&] { return driver_.graph_instantiate(&made, graph, 0); });
  (void)in_context("cuGraphDestroy", [&] { return driver_.graph_destroy(graph); });
  *executable = reinterpret_cast<std::uint64_t>(made);
  return status;
}

Status CudaBackend::graph_launch(std::uint64_t executable, StreamHandle stream) {
  return in_context("cuGraphLaunch",
                    [&] { return driver_.graph_launch(cu_pointer(executable), for_work(stream)); });
}

Status CudaBackend::graph_destroy(std::uint64_t executable) {
  return in_context("cuGraphExecDestroy",
                    [&] { return driver_.graph_executable_destroy(cu_pointer(executable)); });
}

// ---- kernels --------------------------------------------------------------------------------------------

Status CudaBackend::module_load(const char* image, std::uint64_t* out) {
  void* module = nullptr;
  const Status status =
      unseen_by_captures("cuModuleLoadData", [&] { return driver_.module_load(&module, image); });
  *out = reinterpret_cast<std::uint64_t>(module);
  return status;
}
Status CudaBackend::module_unload(std::uint64_t module) {
  return unseen_by_captures("cuModuleUnload", [&] { return driver_.module_unload(cu_pointer(module)); });
}
Status CudaBackend::module_function(std::uint64_t module, const char* name, std::uint64_t* out) {
  void* function = nullptr;
  const Status status = unseen_by_captures(
      "cuModuleGetFunction", [&] { return driver_.module_function(&function, cu_pointer(module), name); });
  *out = reinterpret_cast<std::uint64_t>(function);
  return status;
}
Status CudaBackend::launch_kernel(std::uint64_t function, const Shape& shape, void** parameters,
                                  StreamHandle stream) {
  return in_context("cuLaunchKernel", [&] {
    return driver_.launch_kernel(cu_pointer(function), shape.grid[0], shape.grid[1], shape.grid[2],
                                 shape.block[0], shape.block[1], shape.block[2], shape.shared_bytes,
                                 for_work(stream), parameters, nullptr);
  });
}

}  // namespace vram
