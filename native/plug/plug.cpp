// Which pool serves which device. See plug.hpp.
#include "plug/plug.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace vram {

namespace {

// Never destroyed: frees arrive until the process ends.
struct State {
  std::atomic<Pool*> pools[Plug::kDevices] = {};
  std::mutex mutex;
  std::vector<std::pair<int, std::shared_ptr<Pool>>> kept;  // with their devices
  std::atomic<int> used{0};                                 // size of `kept`
  std::atomic<Plug::Explain> explain{nullptr};
  std::atomic<Plug::Make> make{nullptr};
  std::atomic<Plug::Label> label{nullptr};
  std::atomic<Plug::Adopt> adopt{nullptr};
  std::atomic<Plug::Recorded> recorded{nullptr};
  std::atomic<bool> adopted[Plug::kDevices] = {};
  Plug::Listen listen = nullptr;  // guarded by the mutex
};
State& state() {
  static State* const leaked = new State();
  return *leaked;
}

// Called before a stream is passed to a pool, which must know whether the stream is lasting.
void adopt_streams(int device, StreamHandle stream) {
  constexpr StreamHandle kNamesOfDefault = 2;
  if (stream <= kNamesOfDefault || device < 0 || device >= Plug::kDevices) return;
  const Plug::Adopt adopt = state().adopt.load();
  if (adopt != nullptr && !state().adopted[device].exchange(true)) adopt(device);
}

// The live block that contains an address, and its pool, which is never destroyed; null: none.
struct Owner {
  Pool* pool = nullptr;
  int device = 0;
  BlockInfo block = {};
};
Owner owner_of(Address address) {
  const std::lock_guard lock(state().mutex);
  for (const auto& [device, pool] : state().kept) {
    Owner owner{pool.get(), device};
    if (pool->find(address, &owner.block).ok()) return owner;
  }
  return {};
}

void follow(int device, Pool& pool, Plug::Listen listen) {
  if (listen == nullptr) return pool.listen(nullptr);
  pool.listen([device, listen](const PoolEvent& event) { listen(device, event); });
}

// As PyTorch writes sizes in its errors. Plain C: C++ streams crash if the process has two C++ libraries.
std::string sized(std::uint64_t bytes) {
  constexpr std::uint64_t kKib = 1 << 10, kMib = 1 << 20, kGib = 1 << 30;
  if (bytes <= kKib) return std::to_string(bytes) + " bytes";
  const std::uint64_t unit = bytes <= kMib ? kKib : bytes <= kGib ? kMib : kGib;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", static_cast<double>(bytes) / static_cast<double>(unit),
                unit == kKib   ? "KiB"
                : unit == kMib ? "MiB"
                               : "GiB");
  return text;
}

// How PyTorch begins its own error. Programs that search for a batch size recognise running out of memory by
// these words.
std::string words_of_pytorch(int device, std::uint64_t size, const OutOfMemoryReport& report) {
  const std::uint64_t unallocated = report.reserved - std::min(report.reserved, report.live);
  return "CUDA out of memory. Tried to allocate " + sized(size) + ". GPU " + std::to_string(device) +
         " has a total capacity of " + sized(report.device_total) + " of which " + sized(report.device_free) +
         " is free. " + (report.limit != 0 ? sized(report.limit) + " allowed; " : "") +
         "Of the allocated memory " + sized(report.live) + " is allocated by PyTorch, and " +
         sized(unallocated) + " is reserved by PyTorch but unallocated.";
}

}  // namespace

void Plug::set_pool(int device, std::shared_ptr<Pool> pool) {
  if (device < 0 || device >= kDevices) throw std::out_of_range("the device does not exist");
  const std::lock_guard lock(state().mutex);
  state().pools[device].store(pool.get(), std::memory_order_release);
  if (pool == nullptr) return;
  if (state().listen != nullptr) follow(device, *pool, state().listen);
  state().kept.emplace_back(device, std::move(pool));
  state().used.store(static_cast<int>(state().kept.size()), std::memory_order_release);
}

void Plug::set_listen(Listen listen) {
  const std::lock_guard lock(state().mutex);
  state().listen = listen;
  for (const auto& [device, pool] : state().kept) follow(device, *pool, listen);
}

void Plug::set_explain(Explain explain) { state().explain = explain; }
void Plug::set_make(Make make) { state().make = make; }
void Plug::set_label(Label label) { state().label = label; }
void Plug::set_adopt(Adopt adopt) { state().adopt = adopt; }
void Plug::set_recorded(Recorded recorded) { state().recorded = recorded; }

Pool* Plug::pool(int device) {
  return device >= 0 && device < kDevices ? state().pools[device].load(std::memory_order_acquire) : nullptr;
}

Pool* Plug::serving(int device) {
  Pool* const known = pool(device);
  if (known != nullptr) [[likely]]
    return known;
  if (const Make make = state().make.load()) make(device);
  return pool(device);
}

Status Plug::allocate(int device, std::size_t size, StreamHandle stream, Address* out,
                      OutOfMemoryReport* report) {
  *out = 0;
  Pool* const pool = serving(device);  // before the label, because the pool may request labels
  if (pool == nullptr) return {Code::invalid, 0, "device"};
  const Label label = state().label.load(std::memory_order_relaxed);
  const std::uint32_t tag = label == nullptr ? 0 : label(device);
  if (size <= kMaxRequest && pool->try_now(size, stream, tag, out)) return {};
  adopt_streams(device, stream);
  return pool->allocate_slow(size, stream, 0, tag, out, report);
}

Status Plug::allocate_padded(int device, std::size_t size, std::size_t room, StreamHandle stream,
                             Address* out, OutOfMemoryReport* report) {
  *out = 0;
  Pool* const pool = serving(device);
  if (pool == nullptr) return {Code::invalid, 0, "device"};
  const Label label = state().label.load(std::memory_order_relaxed);
  adopt_streams(device, stream);
  return pool->allocate_padded(size, room, stream, 0, label == nullptr ? 0 : label(device), out, report);
}

std::string Plug::explain(int device, std::uint64_t size, StreamHandle stream,
                          const OutOfMemoryReport& report) {
  const Explain explain = state().explain.load();
  const std::string opening = words_of_pytorch(device, size, report);
  return explain == nullptr ? opening : opening + "\n" + explain(device, size, stream, report);
}

// Most blocks go back to a cache, which costs no lock of a pool. Most programs have one pool, which need not
// be searched for.
Status Plug::free(Address address, int hint) {
  Pool* const guess = pool(hint);
  if (guess != nullptr && guess->try_free_cached(address)) [[likely]]
    return {};
  const int used = state().used.load(std::memory_order_acquire);
  if (guess != nullptr && used == 1) return guess->free_slow(address);
  for (int device = 0, seen = 0; device < kDevices && seen < used; ++device) {
    Pool* const other = pool(device);
    if (other == nullptr) continue;
    ++seen;
    if (other != guess && other->try_free_cached(address)) return {};
  }
  const Owner owner = owner_of(address);
  return owner.pool != nullptr ? owner.pool->free(address) : Status{Code::invalid, 0, "free"};
}

Status Plug::find(Address address, BlockInfo* out, int* device) {
  const Owner owner = owner_of(address);
  if (owner.pool == nullptr) return {Code::invalid, 0, "find"};
  *device = owner.device;
  *out = owner.block;
  return {};
}

Status Plug::record_stream(Address address, StreamHandle stream) {
  const Owner owner = owner_of(address);
  if (owner.pool == nullptr) return {Code::invalid, 0, "record_stream"};
  adopt_streams(owner.device, stream);
  const Status status = owner.pool->record_stream(address, stream);
  const Recorded recorded = state().recorded.load(std::memory_order_relaxed);
  if (recorded != nullptr && status.ok()) [[unlikely]]
    recorded(owner.device, owner.block.address, stream);
  return status;
}

}  // namespace vram
