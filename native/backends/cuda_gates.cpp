// Gates on CUDA streams. A gate is a kernel of one thread that reports its arrival and waits until the host
// opens it.
//
// Not a wait of the stream for a word in memory (cuStreamWaitValue32): streams share a few queues of the
// hardware, and such a wait stops its queue, so the gates of other streams in the same queue never arrive. A
// kernel that runs stops only its own stream.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "backends/cuda.hpp"
#include "base/waits.hpp"

namespace vram {

namespace {

// More kernels than this do not run at a time.
constexpr std::size_t kMostClosed = 128;
// Numbers are reused as late as possible: a kernel whose gate was opened before it began still writes its
// words.
constexpr std::uint32_t kGateNumbers = 4096;

constexpr std::uint32_t gate_number(GateHandle gate) { return static_cast<std::uint32_t>(gate >> 32); }
constexpr std::uint32_t gate_value(GateHandle gate) { return static_cast<std::uint32_t>(gate); }

// void vram_gate(GateWords* words, uint32_t value): the words of the gate are in host memory. The fence makes
// what the stream wrote before visible to the copies that the host queues when it sees the arrival.
constexpr const char* kGateKernel = R"(
.version 6.3
.target sm_70
.address_size 64
.visible .entry vram_gate(.param .u64 words, .param .u32 value)
{
  .reg .u64 %address;
  .reg .u32 %value;
  .reg .s32 %opened;
  .reg .pred %closed;
  ld.param.u64 %address, [words];
  ld.param.u32 %value, [value];
  cvta.to.global.u64 %address, %address;
  membar.sys;
  st.volatile.global.u32 [%address], %value;
wait:
  nanosleep.u32 500;
  ld.volatile.global.s32 %opened, [%address+4];
  sub.s32 %opened, %opened, %value;
  setp.lt.s32 %closed, %opened, 0;
  @%closed bra wait;
  ret;
}
)";

}  // namespace

// pre: handles_mutex_ is held, no gate is closed: loading a kernel may wait for the device.
Status CudaBackend::begin_gates() {
  constexpr unsigned kPortable = 1;
  if (gate_words_ != nullptr) return {};
  void* words = nullptr;
  const std::size_t bytes = kGateNumbers * sizeof(GateWords);
  Status status = unseen_by_captures(
      "cuMemHostAlloc", [&] { return driver_.host_alloc(&words, bytes, kPortable | kCuHostMapped); });
  if (!status.ok()) return status;
  std::memset(words, 0, bytes);
  std::uint64_t module = 0;
  status = module_load(kGateKernel, &module);
  if (status.ok()) status = module_function(module, "vram_gate", &gate_kernel_);
  if (!status.ok()) {
    if (module != 0) (void)module_unload(module);
    (void)unseen_by_captures("cuMemFreeHost", [&] { return driver_.host_free(words); });
    return status;
  }
  gate_module_ = module;
  gate_words_ = static_cast<GateWords*>(words);
  const std::lock_guard lock(gate_numbers_mutex_);
  for (std::uint32_t i = 0; i < kGateNumbers; ++i) gate_numbers_.push_back(i);
  return {};
}

void CudaBackend::end_gates() {
  if (gate_words_ == nullptr || inherited()) return;
  (void)module_unload(gate_module_);
  (void)unseen_by_captures("cuMemFreeHost", [&] { return driver_.host_free(gate_words_); });
}

Status CudaBackend::gate_close(StreamHandle stream, GateHandle* out) {
  constexpr const char* kCall = "gate_close";
  if (in_launched_) return {Code::deadlock, 0, kCall};
  if (!info_.host_pages) return {Code::unsupported, kCuNotSupported, kCall};
  const std::lock_guard lock(handles_mutex_);
  if (stream != 0 && !streams_.contains(stream) && !adopted_.contains(stream))
    return {Code::invalid, 0, kCall};
  if (breaks_capture(reinterpret_cast<void*>(stream)) || (stream != 0 && capturing(stream)))
    return {Code::capturing, 0, kCall};
  if (const Status status = begin_gates(); !status.ok()) return status;
  std::uint32_t number = 0;
  {
    const std::lock_guard numbers(gate_numbers_mutex_);
    if (kGateNumbers - gate_numbers_.size() >= kMostClosed) return {Code::not_ready, 0, kCall};
    number = gate_numbers_.front();
    gate_numbers_.pop_front();
  }
  std::uint32_t value = ++last_gate_;
  GateWords* words = &gate_words_[number];
  void* parameters[] = {&words, &value};
  const GateHandle gate = (GateHandle{number} << 32) | value;
  const Status status = launch_kernel(gate_kernel_, Shape{}, parameters, stream);
  if (status.ok()) *out = gate;
  if (!status.ok()) gate_open(gate);
  return status;
}

Status CudaBackend::gate_wait(GateHandle gate, double seconds) {
  using Clock = std::chrono::steady_clock;
  if (inherited()) return {Code::closed, 0, "gate_wait"};
  if (in_launched_) return {Code::deadlock, 0, "gate_wait"};
  const std::atomic_ref<std::uint32_t> arrived(gate_words_[gate_number(gate)].arrived);
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  bool late = false;
  const Status status = wait_by_asking([&]() -> Status {
    if (arrived.load(std::memory_order_acquire) == gate_value(gate)) return {};
    late = Clock::now() >= end;
    return {late ? Code::ok : Code::not_ready, 0, "gate_wait"};
  });
  return late ? Status{Code::not_ready, 0, "gate_wait"} : status;
}

void CudaBackend::gate_open(GateHandle gate) {
  if (inherited()) return;
  const std::lock_guard lock(gate_numbers_mutex_);
  const std::atomic_ref<std::uint32_t> opened(gate_words_[gate_number(gate)].opened);
  opened.store(gate_value(gate), std::memory_order_release);
  gate_numbers_.push_back(gate_number(gate));
}

std::vector<StreamHandle> CudaBackend::held_streams() {
  std::vector<StreamHandle> held{0};
  if (inherited()) return held;
  const std::lock_guard lock(handles_mutex_);
  held.insert(held.end(), streams_.begin(), streams_.end());
  for (const auto& [stream, used] : adopted_) {
    void* const handle = reinterpret_cast<void*>(stream);
    unsigned flags = 0;
    const Status known = in_context("cuStreamGetFlags", [&] { return driver_.stream_flags(handle, &flags); });
    if (known.ok() && (flags & kCuStreamNonBlocking) == 0) continue;
    const bool idle = !used && !capturing(stream) &&
                      unseen_by_captures("cuStreamQuery", [&] { return driver_.stream_query(handle); }).ok();
    if (!idle) held.push_back(stream);
  }
  return held;
}

}  // namespace vram
