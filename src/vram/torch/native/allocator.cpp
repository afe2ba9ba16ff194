// PyTorch's CUDA allocator on vram: a subclass of c10's CUDAAllocator that serves every call from the engine
// (engine.h). Compiled by vram.torch.companion against the PyTorch in use.
//
// The pools, their statistics and their heaps are the engine's. Here is what only PyTorch knows: stacks and
// histories (History), the current stream, its errors, observers and profiler.
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <bit>
#include <cstdlib>

#include "engine.h"
#include "history.hpp"
#include "host_allocator.hpp"

// Of Python itself, whose headers need not be installed.
using PyObject = struct _object;
extern "C" int PyGILState_Check(void);
extern "C" void PyErr_Fetch(PyObject** type, PyObject** value, PyObject** traceback);
extern "C" void PyErr_Restore(PyObject* type, PyObject* value, PyObject* traceback);

namespace vram_torch {

namespace allocator = c10::cuda::CUDACachingAllocator;
using allocator::CheckpointDelta;
using allocator::CUDAAllocator;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;
using traces::BlockInfo;
using traces::SegmentInfo;

namespace {

const VramEngine* engine = nullptr;
constexpr std::size_t kExabyte = std::size_t{1} << 60;
constexpr std::size_t kMostDevices = 64;

VramHeap heap_of(c10::MempoolId_t id) { return {id.first, id.second}; }
c10::MempoolId_t id_of(VramHeap heap) { return {heap.first, heap.second}; }
bool same(VramHeap one, VramHeap two) { return one.first == two.first && one.second == two.second; }
std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

c10::DeviceIndex current_device() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

// The callbacks are Python code. If an exception of Python is being unwound, they would destroy it.
void tell_freed(const c10::impl::PyInterpreter& trace, const void* address) {
  const bool in_python = PyGILState_Check() != 0;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  if (in_python) PyErr_Fetch(&type, &value, &traceback);
  trace->trace_gpu_memory_deallocation(c10::DeviceType::CUDA, number(address));
  if (in_python) PyErr_Restore(type, value, traceback);
}

// ---- settings -------------------------------------------------------------------------------------------

bool rounding_set() {
  const auto& divisions = allocator::CUDAAllocatorConfig::roundup_power2_divisions();
  return std::any_of(divisions.begin(), divisions.end(), [](std::size_t each) { return each > 1; });
}

// By the setting roundup_power2_divisions: up to the next of so many equal steps between two powers of two.
// As with PyTorch, steps are not smaller than its smallest block.
std::size_t rounded(std::size_t bytes) {
  constexpr std::size_t kSmallestBlock = 512;
  const std::size_t divisions = allocator::CUDAAllocatorConfig::roundup_power2_divisions(bytes);
  if (divisions <= 1 || bytes <= kSmallestBlock * divisions) return bytes;
  const std::size_t step = std::bit_floor(bytes) / std::bit_floor(divisions);
  return (bytes + step - 1) / step * step;
}

// ---- statistics -----------------------------------------------------------------------------------------

constexpr std::size_t kAll = 0, kSmall = 1, kLarge = 2;

Stat stat(std::uint64_t current, std::uint64_t peak, std::uint64_t total, std::uint64_t freed) {
  Stat result;
  result.current = static_cast<std::int64_t>(current);
  result.peak = static_cast<std::int64_t>(peak);
  result.allocated = static_cast<std::int64_t>(total);
  result.freed = static_cast<std::int64_t>(freed);
  return result;
}
Stat stat(const VramMeter& from) {
  return stat(from.current, from.peak, from.total, from.total - from.current);
}

// By size. The peak of both together is at most the sum of the two, which need not be reached at one moment,
// and at most `most`: the peak of all live bytes.
StatArray by_size(const VramMeter (&from)[2], std::uint64_t most = ~std::uint64_t{0}) {
  StatArray result;
  result[kSmall] = stat(from[0]);
  result[kLarge] = stat(from[1]);
  result[kAll] =
      stat(from[0].current + from[1].current, std::min(from[0].peak + from[1].peak, most),
           from[0].total + from[1].total, from[0].total - from[0].current + from[1].total - from[1].current);
  return result;
}

// Of pages, which are not divided by size.
StatArray undivided(const Stat& from) {
  StatArray result;
  result[kAll] = result[kLarge] = from;
  return result;
}

// Allocated, or freed and still used by a stream. What is still used counts as large, as far as it can be.
StatArray with_pending(StatArray from, std::uint64_t pending, std::uint64_t peak = 0) {
  const auto used = static_cast<std::int64_t>(pending);
  const std::int64_t large = std::min(used, from[kLarge].freed);
  const auto add = [&](std::size_t type, std::int64_t more) {
    from[type].current += more;
    from[type].freed -= more;
    from[type].peak = std::max(from[type].peak, from[type].current);
  };
  if (peak != 0) from[kAll].peak = static_cast<std::int64_t>(peak);
  add(kAll, used);
  add(kSmall, used - large);
  add(kLarge, large);
  return from;
}

DeviceStats device_stats(const VramStats& from) {
  DeviceStats stats;
  stats.allocation = by_size(from.allocations);
  stats.segment = undivided(stat(from.segments));
  stats.active = with_pending(stats.allocation, from.pending_blocks);
  stats.inactive_split = undivided(stat(from.inactive));
  stats.allocated_bytes = by_size(from.bytes, from.peak_live);
  stats.reserved_bytes = undivided(stat(from.reserved));
  stats.active_bytes = with_pending(stats.allocated_bytes, from.pending.current, from.peak_active);
  stats.inactive_split_bytes = undivided(stat(from.inactive_bytes));
  stats.requested_bytes = by_size(from.requested, from.peak_live);
  stats.num_alloc_retries = static_cast<std::int64_t>(from.retries);
  stats.num_ooms = static_cast<std::int64_t>(from.out_of_memory);
  stats.num_sync_all_streams = static_cast<std::int64_t>(from.host_waits);
  stats.num_device_alloc = static_cast<std::int64_t>(from.segments.total);
  stats.num_device_free = static_cast<std::int64_t>(from.segments.total - from.segments.current);
  stats.max_split_size = static_cast<std::int64_t>(allocator::CUDAAllocatorConfig::max_split_size());
  return stats;
}

// Calls change(stat, the same stat of `other`) for all of them.
template <typename Change>
void each_stat(DeviceStats& stats, const DeviceStats& other, Change change) {
  for (const auto member :
       {&DeviceStats::allocation, &DeviceStats::segment, &DeviceStats::active, &DeviceStats::inactive_split,
        &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes, &DeviceStats::active_bytes,
        &DeviceStats::inactive_split_bytes, &DeviceStats::requested_bytes})
    for (std::size_t type = 0; type < (stats.*member).size(); ++type)
      change((stats.*member)[type], (other.*member)[type]);
}

// What has accumulated since `reset`.
void subtract(DeviceStats& stats, const DeviceStats& reset) {
  each_stat(stats, reset, [](Stat& stat, const Stat& before) {
    stat.allocated -= before.allocated;
    stat.freed -= before.freed;
  });
  stats.num_alloc_retries -= reset.num_alloc_retries;
  stats.num_ooms -= reset.num_ooms;
  stats.num_sync_all_streams -= reset.num_sync_all_streams;
  stats.num_device_alloc -= reset.num_device_alloc;
  stats.num_device_free -= reset.num_device_free;
}

// ---- heaps ----------------------------------------------------------------------------------------------

// The state of a heap at one moment, for CUDA-graph trees.
struct Checkpoint : allocator::AllocatorState {
  VramHeap heap{};
  std::vector<VramBlock> blocks;
};

std::vector<VramBlock> live_blocks(int device, VramHeap heap) {
  std::vector<VramBlock> blocks;
  engine->heap_live(device, heap, &blocks, [](void* into, const VramBlock* block) {
    static_cast<std::vector<VramBlock>*>(into)->push_back(*block);
  });
  return blocks;
}

using Filter = std::function<bool(cudaStream_t)>;

VramServes serves(Filter filter) {
  return {new Filter(std::move(filter)),
          [](void* context, void* stream) -> int {
            return (*static_cast<Filter*>(context))(static_cast<cudaStream_t>(stream));
          },
          [](void* context) { delete static_cast<Filter*>(context); }};
}

// Memory of a MemPool that has an allocator of its own.
struct Custom {
  std::shared_ptr<CUDAAllocator> allocator;
  c10::DeviceIndex device;
};

void* reserve_custom(void* context, std::size_t bytes) {
  const auto* const custom = static_cast<Custom*>(context);
  try {
    const c10::cuda::CUDAGuard guard(custom->device);
    return custom->allocator->raw_alloc(bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void release_custom(void* context, void* address) {
  const auto* const custom = static_cast<Custom*>(context);
  try {
    const c10::cuda::CUDAGuard guard(custom->device);
    custom->allocator->raw_delete(address);
  } catch (const std::exception& error) {
    TORCH_WARN("the allocator of a MemPool failed to free ", address, ": ", error.what());
  }
}

VramSource source(std::shared_ptr<CUDAAllocator> from, c10::DeviceIndex device) {
  return {new Custom{std::move(from), device}, reserve_custom, release_custom,
          [](void* context) { delete static_cast<Custom*>(context); }};
}

void delete_block(void* address);
void delete_uncached(void* address);

}  // namespace

// ---- the allocator --------------------------------------------------------------------------------------

class VramAllocator final : public CUDAAllocator {
 public:
  History history;

  // ---- allocating -----------------------------------------------------------------------------
  void* obtain(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream, VramFailure* failure) {
    if (rounds_.load(std::memory_order_relaxed)) [[unlikely]]
      return engine->allocate_padded(device, bytes, rounded(bytes), stream, failure);
    return engine->allocate(device, bytes, stream, failure);
  }

  void* serve(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
    if (history.active()) [[unlikely]]
      return serve_noted(device, bytes, stream);
    VramFailure failure;
    void* address = obtain(device, bytes, stream, &failure);
    if (address == nullptr) [[unlikely]]
      address = serve_last(device, bytes, stream, failure);
    if (c10::memoryProfilingEnabled()) [[unlikely]]
      profile(address, device, 1);
    if (const auto* const trace = c10::impl::GPUTrace::get_trace()) [[unlikely]]
      (*trace)->trace_gpu_memory_allocation(c10::DeviceType::CUDA, number(address));
    return address;
  }

  void release(void* address) {
    if (const auto* const trace = c10::impl::GPUTrace::get_trace()) [[unlikely]]
      tell_freed(*trace, address);
    if (history.active() || c10::memoryProfilingEnabled()) [[unlikely]]
      return release_noted(address);
    if (history.remembers()) [[unlikely]]
      history.forget(History::Kind::block, number(address));
    (void)engine->free(address);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < kExabyte,
                     "CUDA out of memory. Tried to allocate more than 1EB memory.");
    const c10::DeviceIndex device = current_device();
    void* address = nullptr;
    if (!isEnabled()) [[unlikely]] {
      if (bytes != 0) C10_CUDA_CHECK(cudaMalloc(&address, bytes));
      return {address, address, delete_uncached, c10::Device(c10::DeviceType::CUDA, device)};
    }
    if (bytes != 0) address = serve(device, bytes, c10::cuda::getCurrentCUDAStream(device));
    return {address, address, delete_block, c10::Device(c10::DeviceType::CUDA, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return isEnabled() ? delete_block : delete_uncached; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  void* raw_alloc(std::size_t bytes) override {
    return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()));
  }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    void* address = nullptr;
    if (bytes == 0) return address;
    if (isEnabled()) return serve(current_device(), bytes, stream);
    C10_CUDA_CHECK(cudaMalloc(&address, bytes));
    return address;
  }
  void raw_delete(void* address) override { raw_deleter()(address); }

  // A tensor of another allocator, such as one shared by another process, is not ours to hold.
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    if (data.get() == nullptr || data.get_deleter() != &delete_block) return;
    (void)engine->record_stream(data.get(), stream.stream());
  }

  // ---- life -----------------------------------------------------------------------------------
  void init(int device_count) override {
    devices_ = std::max(devices_, device_count);
    engine->listen([](const VramEvent* event) { self().tell(*event); });
  }
  bool initialized() override { return devices_ != 0; }
  void enable(bool value) override { enabled_ = value; }
  bool isEnabled() const override { return enabled_ && !uncached_; }
  std::string name() override { return "vram"; }

  // ---- limits ---------------------------------------------------------------------------------
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction: ", fraction,
                ". Please set within [0, 1].");
    const auto total = static_cast<double>(capacity(device));
    // A limit of 0 would mean none.
    engine->set_limit(device, std::max<std::uint64_t>(1, static_cast<std::uint64_t>(fraction * total)));
    fractions_[slot(device)] = fraction;
  }
  double getMemoryFraction(c10::DeviceIndex device) override {
    const std::uint64_t limit = engine->limit(device);
    if (limit == 0) return 1.0;
    const auto total = static_cast<double>(capacity(device));
    const double told = fractions_[slot(device)];
    if (std::max<std::uint64_t>(1, static_cast<std::uint64_t>(told * total)) == limit) return told;
    return std::min(1.0, static_cast<double>(limit) / total);
  }

  void emptyCache(c10::MempoolId_t id = {0, 0}) override {
    const Context context = history.active() ? history.gather(RecordContext::ALL) : nullptr;
    const History::Under under(context);
    engine->trim(-1, heap_of(id));
  }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override {
    VramStats stats;
    (void)engine->stats(device, &stats);
    if (*largest == 0) *largest = getMemoryInfo(device).first;
    *largest = std::max<std::size_t>(*largest, stats.largest_free);
  }
  void* getBaseAllocation(void* address, std::size_t* bytes) override {
    VramBlock block;
    int device = 0;
    TORCH_CHECK(engine->find(address, &block, &device) != 0, "invalid device pointer: ", address);
    if (bytes != nullptr) *bytes = block.bytes;
    return reinterpret_cast<void*>(block.address);
  }
#if VRAM_TORCH_SINCE(10)
  std::vector<allocator::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override {
    return {};
  }
#else
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    std::size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {free, total};
  }
#endif

  // ---- statistics -----------------------------------------------------------------------------
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    DeviceStats stats = stats_since_start(device);
    const std::lock_guard lock(mutex_);
    if (const auto reset = resets_.find(device); reset != resets_.end()) subtract(stats, reset->second);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const DeviceStats now = stats_since_start(device);
    const std::lock_guard lock(mutex_);
    resets_[device] = now;
  }
  void resetPeakStats(c10::DeviceIndex device) override { engine->reset_peaks(device); }

  // ---- history --------------------------------------------------------------------------------
  allocator::SnapshotInfo snapshot(c10::MempoolId_t id, bool include_traces) VRAM_OVERRIDES_SINCE_11;
  bool isHistoryEnabled() override { return history.enabled(); }
  void recordHistory(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) VRAM_OVERRIDES_SINCE_11 {
    history.record(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    if (history.enabled()) history.annotate(current_device(), metadata);
  }
  void pushCompileContext(std::string& text) override { History::push_compile_context(text); }
  void popCompileContext() override { History::pop_compile_context(); }
  void setUserMetadata(const std::string& text) VRAM_OVERRIDES_SINCE_10 { History::user_metadata() = text; }
  std::string getUserMetadata() VRAM_OVERRIDES_SINCE_10 { return History::user_metadata(); }
  void attachOutOfMemoryObserver(allocator::OutOfMemoryObserver observer) override {
    const std::lock_guard lock(mutex_);
    observers_.push_back(std::move(observer));
  }
#if VRAM_TORCH_SINCE(12)
  // It is told of requests that a setting of PyTorch's own allocator rejects. vram has no such setting.
  void attachOomRejectionObserver(allocator::OomRejectionObserver) override {}
#endif
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    history.follow(std::move(tracker));
  }

  // ---- heaps ----------------------------------------------------------------------------------
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter) override {
    TORCH_CHECK(engine->heap_begin(device, heap_of(id), serves(std::move(filter))) != 0,
                "vram cannot begin to allocate in pool (", id.first, ", ", id.second, ")");
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) override {
    TORCH_CHECK(engine->heap_end(device, heap_of(id)) != 0, "no allocation to pool (", id.first, ", ",
                id.second, ") is in progress");
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t id) override {
    (void)engine->heap_release(device, heap_of(id));
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t id) override {
    return engine->heap_uses(device, heap_of(id));
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t id,
                          std::shared_ptr<CUDAAllocator> from) VRAM_OVERRIDES_SINCE_11 {
    const bool own = from != nullptr && from.get() != this;
    const VramSource custom = own ? source(std::move(from), device) : VramSource{};
    TORCH_CHECK(engine->heap_open(device, heap_of(id), own ? &custom : nullptr) != 0,
                "vram cannot create pool (", id.first, ", ", id.second, ")");
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t id, bool use_on_oom) VRAM_OVERRIDES_SINCE_11 {
    (void)engine->heap_set(device, heap_of(id), use_on_oom, -1);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t id) VRAM_OVERRIDES_SINCE_10 {
    (void)engine->heap_set(device, heap_of(id), -1, 1);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t id,
                                const std::unordered_set<void*>& expected) override {
    const std::vector<VramBlock> live = live_blocks(device, heap_of(id));
    return live.size() == expected.size() &&
           std::all_of(live.begin(), live.end(), [&](const VramBlock& block) {
             return expected.count(reinterpret_cast<void*>(block.address)) != 0;
           });
  }
  std::shared_ptr<allocator::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                                c10::MempoolId_t id) override {
    auto state = std::make_shared<Checkpoint>();
    state->heap = heap_of(id);
    state->blocks = live_blocks(device, state->heap);
    return state;
  }
  CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                         std::shared_ptr<allocator::AllocatorState> state) override;

#if !VRAM_TORCH_SINCE(11)
  // ---- the same with the signatures of older versions -------------------------------------------
  allocator::SnapshotInfo snapshot(c10::MempoolId_t id = {0, 0}) override { return snapshot(id, true); }
  void recordHistory(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when,
                     bool clear) override {
    recordHistory(enabled, recorder, entries, when, clear, {});
  }
  // The MemPool owns its allocator and lives longer than the pool.
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t id, CUDAAllocator* from) override {
    createOrIncrefPool(device, id, std::shared_ptr<CUDAAllocator>(from, [](auto*){}));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t id) override { setUseOnOOM(device, id, true); }
#endif

  // ---- other processes and devices ------------------------------------------------------------
  allocator::ShareableHandle shareIpcHandle(void* address) override {
    char name[VRAM_SHARED_NAME];
    std::int64_t offset = 0;
    const char* why = "";
    const std::size_t length = engine->share(address, name, sizeof name, &offset, &why);
    TORCH_CHECK(length != 0, "the tensor at ", address, " cannot be shared with another process: ", why);
    return {static_cast<std::ptrdiff_t>(offset), std::string(name, length)};
  }
  // The engine counts the uses of what is mapped.
  std::shared_ptr<void> getIpcDevPtr(std::string name) override {
    const char* why = "";
    void* const address = engine->attach(current_device(), name.data(), name.size(), &why);
    TORCH_CHECK(address != nullptr, "a tensor of another process cannot be used here: ", why);
    return {address, [](void* attached) { engine->detach(attached); }};
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(error);
    }
    TORCH_CHECK(engine->add_peer(peer, device) != 0, "vram cannot open the memory of GPU ", int(peer),
                " to GPU ", int(device));
  }
  // This call works with and without peer access.
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                          cudaStream_t stream, bool) override {
    if (to_device == from_device) return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  static VramAllocator& self() {
    static VramAllocator* const only = new VramAllocator();  // PyTorch frees memory until the process ends
    return *only;
  }

 private:
  VramAllocator() {
    const char* const none = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
    uncached_ = none != nullptr;
    follow_settings();
  }
  void follow_settings();
  static std::size_t slot(c10::DeviceIndex device) {
    TORCH_CHECK(device >= 0 && static_cast<std::size_t>(device) < kMostDevices, "no device ", int(device));
    return static_cast<std::size_t>(device);
  }
  std::uint64_t capacity(c10::DeviceIndex device) { return getMemoryInfo(device).second; }
  DeviceStats stats_since_start(c10::DeviceIndex device) {
    VramStats stats;
    (void)engine->stats(device, &stats);
    return device_stats(stats);
  }
  void* serve_noted(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream);
  void* serve_last(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream, VramFailure failure);
  [[noreturn]] void fail(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream,
                         const VramFailure& failure);
  void release_noted(void* address);
  void profile(void* address, int device, int sign);
  void tell(const VramEvent& event);

  std::mutex mutex_;
  int devices_ = 0;
  std::atomic<bool> enabled_{true};
  bool uncached_ = false;            // by the environment
  std::atomic<bool> rounds_{false};  // roundup_power2_divisions may be set
  double fractions_[kMostDevices] = {};
  std::unordered_map<int, DeviceStats> resets_;
  std::vector<allocator::OutOfMemoryObserver> observers_;
};

namespace {

void delete_block(void* address) {
  if (address != nullptr) VramAllocator::self().release(address);
}

void delete_uncached(void* address) {
  if (address != nullptr) C10_CUDA_CHECK(cudaFree(address));
}

}  // namespace

// PyTorch has one hook for changes of the settings, which parses those of CUDA.
void VramAllocator::follow_settings() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  rounds_ = true;  // nothing tells of changes
#else
  using allocator::CUDAAllocatorConfig;
  c10::CachingAllocator::AcceleratorAllocatorConfig::registerDeviceConfigParserHook(
      [this](const std::string& settings) {
        CUDAAllocatorConfig::instance().parseArgs(settings);
        rounds_ = rounding_set();
      },
      {});
  rounds_ = rounding_set();
#endif
}

// ---- slower ways to allocate ----------------------------------------------------------------------------

void* VramAllocator::serve_noted(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  const Context context = history.gather(RecordContext::STATE);
  const History::Under under(context);
  VramFailure failure;
  void* address = obtain(device, bytes, stream, &failure);
  if (address == nullptr) address = serve_last(device, bytes, stream, failure);
  history.remember(History::Kind::block, number(address), context);
  VramBlock block{};
  int of = device;
  (void)engine->find(address, &block, &of);
  history.note(TraceEntry::ALLOC, device, number(address), bytes, stream, id_of(block.heap), context);
  if (c10::memoryProfilingEnabled()) profile(address, device, 1);
  if (const auto* const trace = c10::impl::GPUTrace::get_trace())
    (*trace)->trace_gpu_memory_allocation(c10::DeviceType::CUDA, number(address));
  return address;
}

// When everything else has failed: what other parts of PyTorch can free.
void* VramAllocator::serve_last(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream,
                                VramFailure failure) {
  bool freed = false;
  if (failure.out_of_memory != 0)
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  void* const address = freed ? obtain(device, bytes, stream, &failure) : nullptr;
  if (address == nullptr) fail(device, bytes, stream, failure);
  return address;
}

void VramAllocator::fail(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream,
                         const VramFailure& failure) {
  TORCH_CHECK(failure.out_of_memory != 0, "vram failed to allocate ", bytes, " bytes on GPU ", int(device),
              ": ", failure.call, " failed, CUDA error ", failure.native);
  const std::string words = engine->explain(device, bytes, stream);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes), failure.live, failure.reserved,
                                   c10::Device(c10::DeviceType::CUDA, device));
  if (history.active())
    history.note(TraceEntry::OOM, device, failure.device_free, bytes, stream, {0, 0},
                 History::Under::context());
  std::vector<allocator::OutOfMemoryObserver> observers;
  {
    const std::lock_guard lock(mutex_);
    observers = observers_;
  }
  for (const auto& observer : observers)
    observer(device, bytes, failure.limit != 0 ? failure.limit : failure.device_total, failure.device_free);
  TORCH_CHECK_WITH(OutOfMemoryError, false, words);
}

void VramAllocator::release_noted(void* address) {
  VramBlock block{};
  int device = 0;
  const bool known = engine->find(address, &block, &device) != 0;
  if (known && c10::memoryProfilingEnabled()) profile(address, device, -1);
  if (!known || !history.active()) {
    history.forget(History::Kind::block, number(address));
    (void)engine->free(address);
    return;
  }
  const Context context = history.gather(RecordContext::ALL);
  const c10::MempoolId_t heap = id_of(block.heap);
  history.note(TraceEntry::FREE_REQUESTED, device, block.address, block.requested, block.stream, heap,
               context);
  history.forget(History::Kind::block, block.address);
  // Otherwise the engine tells when the other streams have completed.
  if (block.used_elsewhere == 0)
    history.note(TraceEntry::FREE_COMPLETED, device, block.address, block.requested, block.stream, heap,
                 context);
  const History::Under under(context);
  (void)engine->free(address);
}

// Called before a free and after an allocation; the profiler wants the totals after both.
void VramAllocator::profile(void* address, int device, int sign) {
  VramBlock block{};
  VramStats stats;
  int of = device;
  (void)engine->find(address, &block, &of);
  (void)engine->stats(device, &stats);
  const std::uint64_t live = stats.live - (sign < 0 ? block.bytes : 0);
  c10::reportMemoryUsageToProfiler(address, sign * static_cast<std::int64_t>(block.bytes), live,
                                   stats.reserved.current,
                                   c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
}

// Under the engine's lock.
void VramAllocator::tell(const VramEvent& event) {
  if (event.kind == VRAM_EVENT_RELEASED && history.remembers())
    history.forget(History::Kind::segment, event.address);
  if (!history.active()) return;
  const bool plain = event.plain != 0;
  const Context context = History::Under::context();
  if (event.kind == VRAM_EVENT_RESERVED) history.remember(History::Kind::segment, event.address, context);
  TraceEntry::Action action = TraceEntry::FREE_COMPLETED;
  if (event.kind == VRAM_EVENT_RESERVED) action = plain ? TraceEntry::SEGMENT_ALLOC : TraceEntry::SEGMENT_MAP;
  if (event.kind == VRAM_EVENT_RELEASED)
    action = plain ? TraceEntry::SEGMENT_FREE : TraceEntry::SEGMENT_UNMAP;
  history.note(action, event.device, event.address, event.bytes, event.stream, id_of(event.heap), context);
}

// ---- snapshots ------------------------------------------------------------------------------------------

namespace {

struct Visit {
  const History& history;
  VramHeap wanted;
  c10::DeviceIndex device;
  std::vector<SegmentInfo>* segments;
  bool skipped = false;
};

void add_segment(void* context, const VramSegment* from) {
  auto& visit = *static_cast<Visit*>(context);
  visit.skipped = !same(visit.wanted, {0, 0}) && !same(visit.wanted, from->heap);
  if (visit.skipped) return;
  SegmentInfo segment;
  segment.device = visit.device;
  segment.address = from->address;
  segment.total_size = from->bytes;
  segment.stream = static_cast<cudaStream_t>(from->stream);
  segment.is_large = from->small == 0;
  segment.is_expandable = from->plain == 0;
  segment.owner_private_pool_id = id_of(from->heap);
  segment.context_when_allocated = visit.history.remembered(History::Kind::segment, from->address);
  visit.segments->push_back(std::move(segment));
}

void add_block(void* context, const VramBlock* from) {
  auto& visit = *static_cast<Visit*>(context);
  if (visit.skipped) return;
  SegmentInfo& segment = visit.segments->back();
  // Free neighbours that the engine keeps apart are one free block to PyTorch.
  if (from->state == VRAM_BLOCK_FREE && !segment.blocks.empty() && !segment.blocks.back().active) {
    segment.blocks.back().size += from->bytes;
    return;
  }
  BlockInfo block;
  block.size = from->bytes;
  block.allocated = from->state == VRAM_BLOCK_LIVE;
  block.active = from->state != VRAM_BLOCK_FREE;
  block.requested_size = block.active ? from->requested : 0;
  if (block.allocated)
    block.context_when_allocated = visit.history.remembered(History::Kind::block, from->address);
  segment.allocated_size += block.allocated ? block.size : 0;
  segment.active_size += block.active ? block.size : 0;
  segment.requested_size += block.requested_size;
  segment.blocks.push_back(std::move(block));
}

allocator::AllocatorConfigInfo settings() {
  using allocator::CUDAAllocatorConfig;
  allocator::AllocatorConfigInfo info;
  info.garbage_collection_threshold = CUDAAllocatorConfig::garbage_collection_threshold();
  info.max_split_size = CUDAAllocatorConfig::max_split_size();
  info.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
  info.expandable_segments = CUDAAllocatorConfig::expandable_segments();
  info.release_lock_on_malloc = CUDAAllocatorConfig::release_lock_on_cudamalloc();
  info.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
  info.graph_capture_record_stream_reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
  info.last_allocator_settings = CUDAAllocatorConfig::last_allocator_settings();
  info.roundup_power2_divisions = CUDAAllocatorConfig::roundup_power2_divisions();
  return info;
}

}  // namespace

allocator::SnapshotInfo VramAllocator::snapshot(c10::MempoolId_t id, bool include_traces) {
  allocator::SnapshotInfo result;
  // Before this snapshot is noted itself.
  result.device_traces = include_traces
                             ? history.entries(devices_)
                             : std::vector<std::vector<TraceEntry>>(static_cast<std::size_t>(devices_));
  for (int device = 0; device < devices_; ++device) {
    Visit visit{history, heap_of(id), static_cast<c10::DeviceIndex>(device), &result.segments};
    const std::size_t before = result.segments.size();
    const VramSnapshot callbacks{&visit, add_segment, add_block};
    engine->snapshot(device, &callbacks);
    std::size_t active = 0;
    for (std::size_t i = before; i < result.segments.size(); ++i) active += result.segments[i].active_size;
    if (history.active()) history.note(TraceEntry::SNAPSHOT, device, 0, active, nullptr, {0, 0}, nullptr);
  }
  std::stable_sort(result.segments.begin(), result.segments.end(), [](const auto& one, const auto& two) {
    return one.device != two.device ? one.device < two.device : one.address < two.address;
  });
  if (include_traces) result.external_annotations = history.annotations();
  result.config_metadata = settings();
  return result;
}

// ---- checkpoints ----------------------------------------------------------------------------

CheckpointDelta VramAllocator::setCheckpointPoolState(c10::DeviceIndex device,
                                                      std::shared_ptr<allocator::AllocatorState> state) {
  const auto* const wanted = dynamic_cast<const Checkpoint*>(state.get());
  TORCH_CHECK(wanted != nullptr, "the state is not one of vram's getCheckpointState");
  CheckpointDelta delta;
  for (const VramBlock& block : live_blocks(device, wanted->heap)) {
    delta.ptrs_freed.push_back(reinterpret_cast<void*>(block.address));
    history.forget(History::Kind::block, block.address);
  }
  TORCH_CHECK(engine->heap_restore(device, wanted->heap, wanted->blocks.data(), wanted->blocks.size()) != 0,
              "vram cannot restore the state of pool (", wanted->heap.first, ", ", wanted->heap.second,
              "): part of its memory has changed");
  for (const VramBlock& block : wanted->blocks) {
    void* const address = reinterpret_cast<void*>(block.address);
    delta.dataptrs_allocd.emplace_back(address, address, delete_block,
                                       c10::Device(c10::DeviceType::CUDA, device));
  }
  return delta;
}

}  // namespace vram_torch

#define VRAM_EXPORT __attribute__((visibility("default")))

extern "C" {

// Which PyTorch and vram this was made for (companion.py).
VRAM_EXPORT extern const char vram_torch_identity[];
const char vram_torch_identity[] = VRAM_IDENTITY;

// Makes PyTorch allocate from the engine. Returns why not, or null.
VRAM_EXPORT const char* vram_torch_install(const VramEngine* table) {
  thread_local std::string why;
  vram_torch::engine = table;
  try {
    // Never destroyed, so the pointer owns nothing.
    const std::shared_ptr<vram_torch::CUDAAllocator> shared(&vram_torch::VramAllocator::self(), [](auto*) {});
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(shared);
    // torch.accelerator looks here. PyTorch may set its own afterwards, with a lower priority.
    c10::SetAllocator(c10::DeviceType::CUDA, shared.get(), 255);
    vram_torch::install_host_allocator(table);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}

}  // extern "C"
