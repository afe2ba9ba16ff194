// PyTorch's allocator of pinned host memory (`pin_memory()`, DataLoader, `non_blocking` copies) over vram's
// pool of pinned memory. Compiled against the installed PyTorch, 2.9 or later; talks to vram through
// engine.h.
#include "host_allocator.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using PoolId = std::pair<unsigned long long, unsigned long long>;  // MempoolId_t

const VramEngine* engine = nullptr;

void free_pinned(void* address);

// A block of a graph pool.
struct GraphBlock {
  PoolId pool;
  std::size_t bytes = 0;
  bool copied = false;  // a copy uses it, now or whenever the graph is launched
};

// A pool of PyTorch's, for graphs: what is allocated while it is filled is kept until it is released. A
// captured copy uses its block whenever the graph is launched; blocks without copies may serve again.
struct GraphPool {
  std::function<bool(c10::Stream)> serves;  // empty: not being filled
  int uses = 0;
  std::vector<void*> kept;                     // freed, and used by copies
  std::multimap<std::size_t, void*> reusable;  // freed, by size
};

// What has happened before a reset of the totals.
struct Before {
  int64_t total = 0;
  int64_t freed = 0;
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, at::DeviceType::CPU};
    void* address = filling_.load(std::memory_order_relaxed) != 0 ? allocate_for_graph(bytes) : nullptr;
    if (address == nullptr) address = allocate_block(bytes);
    return {address, address, &free_pinned, at::DeviceType::CPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  void free(void* address) {
    if (address == nullptr || kept_for_graph(address)) return;
    (void)engine->pinned_free(address);
  }

  // `pointer` may be inside the block, and `context` may be another library's.
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    if (copied_by_graph(context)) return true;
    const c10::cuda::CUDAStream cuda(c10::cuda::CUDAStream::UNCHECKED, stream);
    for (void* const address : {context, pointer})
      if (address != nullptr && engine->pinned_record(address, cuda.device_index(), cuda.stream()) != 0)
        return true;
    return false;
  }

  void empty_cache() override { engine->pinned_trim(); }

  at::HostStats get_stats() override {
    const std::lock_guard lock(mutex_);
    VramPinnedStats now;
    engine->pinned_stats(&now);
    at::HostStats stats;
    write(stats, now);
    stats.num_host_alloc = stat(now.reserved, before_[2]).allocated;
    stats.num_host_free = stat(now.reserved, before_[2]).freed;
    stats.host_alloc_time.total = static_cast<int64_t>(now.allocate_us) - allocate_us_;
    stats.host_alloc_time.count = stats.num_host_alloc;
    stats.host_free_time.total = static_cast<int64_t>(now.release_us) - release_us_;
    stats.host_free_time.count = stats.num_host_free;
    return stats;
  }

  void reset_accumulated_stats() override {
    const std::lock_guard lock(mutex_);
    VramPinnedStats now;
    engine->pinned_stats(&now);
    const VramMeter* const meters[] = {&now.active, &now.active_bytes, &now.reserved, &now.reserved_bytes};
    for (int i = 0; i < 4; ++i)
      before_[i] = {static_cast<int64_t>(meters[i]->total),
                    static_cast<int64_t>(meters[i]->total - meters[i]->current)};
    allocate_us_ = static_cast<int64_t>(now.allocate_us);
    release_us_ = static_cast<int64_t>(now.release_us);
  }

  void reset_peak_stats() override { engine->pinned_reset_peaks(); }

  // Virtual functions of HostAllocator in later versions of PyTorch.
  void begin_allocate_to_pool(PoolId id, std::function<bool(c10::Stream)> serves) {
    const std::lock_guard lock(mutex_);
    GraphPool& pool = pools_[id];
    ++pool.uses;
    pool.serves = std::move(serves);
    ++filling_;
  }

  void end_allocate_to_pool(PoolId id) {
    const std::lock_guard lock(mutex_);
    const auto found = pools_.find(id);
    if (found == pools_.end() || !found->second.serves) return;
    found->second.serves = nullptr;
    --filling_;
  }

  void release_pool(PoolId id) {
    GraphPool released;
    {
      const std::lock_guard lock(mutex_);
      const auto found = pools_.find(id);
      if (found == pools_.end() || --found->second.uses > 0) return;
      released = std::move(found->second);
      if (released.serves) --filling_;
      pools_.erase(found);
      std::erase_if(blocks_, [&](const auto& block) { return block.second.pool == id; });
      blocks_in_pools_ = blocks_.size();
    }
    for (void* const address : released.kept) (void)engine->pinned_free(address);
    for (const auto& [bytes, address] : released.reusable) (void)engine->pinned_free(address);
  }

 private:
  // One that has a context already: making another costs memory on that device.
  static int device_in_use() {
    const auto found = c10::cuda::getDeviceIndexWithPrimaryContext();
    return found.has_value() ? *found : c10::cuda::current_device();
  }

  static void* allocate_block(std::size_t bytes) {
    const char* why = "";
    void* const address = engine->pinned_allocate(device_in_use(), bytes, &why);
    TORCH_CHECK(address != nullptr, why);
    return address;
  }
  // Null: no pool that is being filled serves the current stream.
  void* allocate_for_graph(std::size_t bytes) {
    const c10::Stream stream = c10::cuda::getCurrentCUDAStream().unwrap();
    const std::lock_guard lock(mutex_);
    for (auto& [id, pool] : pools_) {
      if (!pool.serves || !pool.serves(stream)) continue;
      // A block twice as long would waste as much as it serves.
      if (const auto found = pool.reusable.lower_bound(bytes);
          found != pool.reusable.end() && found->first / 2 <= bytes) {
        void* const address = found->second;
        pool.reusable.erase(found);
        return address;
      }
      void* const address = allocate_block(bytes);
      blocks_[address] = {id, bytes};
      blocks_in_pools_ = blocks_.size();
      return address;
    }
    return nullptr;
  }
  // Whether it is a captured copy. Any copy makes a graph pool keep the block.
  bool copied_by_graph(void* address) {
    if (blocks_in_pools_.load(std::memory_order_relaxed) == 0) return false;
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return false;
    found->second.copied = true;
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  bool kept_for_graph(void* address) {
    if (blocks_in_pools_.load(std::memory_order_relaxed) == 0) return false;
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return false;
    GraphPool& pool = pools_[found->second.pool];
    if (found->second.copied) {
      pool.kept.push_back(address);
    } else {
      pool.reusable.emplace(found->second.bytes, address);
    }
    return true;
  }

  static c10::CachingAllocator::Stat stat(const VramMeter& meter, const Before& before) {
    c10::CachingAllocator::Stat stat;
    stat.current = static_cast<int64_t>(meter.current);
    stat.peak = static_cast<int64_t>(meter.peak);
    stat.allocated = static_cast<int64_t>(meter.total) - before.total;
    stat.freed = static_cast<int64_t>(meter.total - meter.current) - before.freed;
    return stat;
  }
  // The fields have other names in PyTorch 2.9.
  template <class Stats>
  void write(Stats& stats, const VramPinnedStats& now) const {
    if constexpr (requires { stats.active_requests; }) {
      stats.active_requests = stat(now.active, before_[0]);
      stats.active_bytes = stat(now.active_bytes, before_[1]);
      stats.allocations = stat(now.reserved, before_[2]);
      stats.allocated_bytes = stat(now.reserved_bytes, before_[3]);
    } else {
      stats.allocation = stat(now.active, before_[0]);
      stats.allocated_bytes = stat(now.active_bytes, before_[1]);
      stats.segment = stat(now.reserved, before_[2]);
      stats.reserved_bytes = stat(now.reserved_bytes, before_[3]);
    }
  }

  std::mutex mutex_;
  std::map<PoolId, GraphPool> pools_;
  std::unordered_map<void*, GraphBlock> blocks_;  // those that belong to one
  std::atomic<int> filling_{0};
  std::atomic<std::size_t> blocks_in_pools_{0};
  Before before_[4];
  int64_t allocate_us_ = 0;
  int64_t release_us_ = 0;
};

// Never destroyed: tensors are freed until the process ends.
PinnedAllocator& allocator() {
  static PinnedAllocator* const leaked = new PinnedAllocator();
  return *leaked;
}

void free_pinned(void* address) { allocator().free(address); }

}  // namespace

void vram_torch::install_host_allocator(const VramEngine* table) {
  constexpr uint8_t kPriority = 255;  // above PyTorch's own
  engine = table;
  at::setHostAllocator(at::kCUDA, &allocator(), kPriority);
}
