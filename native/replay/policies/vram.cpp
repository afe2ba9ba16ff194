// The real pool as a policy. See vram.hpp.
#include "replay/policies/vram.hpp"

#include <unordered_map>
#include <utility>

#include "backends/driver_costs.hpp"

namespace vram {

namespace {

// As vram.core.spill does it.
constexpr double kUsBetweenReturns = 1e6;
constexpr double kPostponed = 64e6;
constexpr std::uint64_t kMostReturned = kGiB;

std::shared_ptr<ModelBackend> make_model(std::uint64_t capacity, double lag_us) {
  ModelOptions options;
  options.lag_us = lag_us;
  return std::make_shared<ModelBackend>(capacity, options);
}

}  // namespace

VramPolicy::VramPolicy(const PoolConfig& config, std::uint64_t capacity, double lag_us)
    : model_(make_model(capacity, lag_us)),
      pool_(model_, config),
      calls_before_(model_->driver_calls()),
      us_before_(model_->driver_us()),
      spills_(config.spill != 0) {
  if (!spills_) return;
  pool_.around_spill([this](std::uint64_t bytes, std::uint64_t moved) {
    if (moved != 0) return;
    spilled_ = spilling_ = true;
    needed_ += bytes;
    (void)pool_.release_host_bytes();
  });
}

void VramPolicy::notice(std::uint32_t stream) {
  if (stream == recent_) [[likely]]
    return;
  earlier_ = recent_;
  recent_ = stream;
  while (handles_.size() <= stream) {
    handles_.push_back(0);
    (void)model_->stream_create(&handles_.back());
  }
}

// Fast paths do not query the model, so its clock is set only on slow paths.
Token VramPolicy::allocate(std::uint64_t size, std::uint32_t stream, std::int64_t time_us) {
  notice(stream);
  if (spilled_) [[unlikely]]
    bring_back_in_time(time_us);
  Address address = 0;
  if (size <= kMaxRequest && pool_.try_cached(size, handles_[stream], 0, &address))
    return reinterpret_cast<Token>(address);
  set_time(time_us);
  const Status status = pool_.allocate_slow(size, handles_[stream], 0, 0, &address, nullptr);
  if (spilling_) [[unlikely]]
    follow_spill(time_us);
  return status.ok() ? reinterpret_cast<Token>(address) : nullptr;
}

void VramPolicy::free(Token token, std::int64_t time_us) {
  const auto address = reinterpret_cast<Address>(token);
  if (pool_.try_free_cached(address)) return;  // never a block on host pages
  set_time(time_us);
  read_before_free(address);
  (void)pool_.free(address);
}

// A free that waits in the recording was used on another stream. The recording does not say which one, so the
// one that was active last is used instead.
std::uint32_t VramPolicy::other_than(std::uint32_t stream) const {
  const std::uint32_t likely = stream == recent_ ? earlier_ : recent_;
  return likely != stream ? likely : (stream + 1) % static_cast<std::uint32_t>(handles_.size());
}

Ticket VramPolicy::free_later(Token token, std::uint32_t stream, std::int64_t time_us) {
  const auto address = reinterpret_cast<Address>(token);
  set_time(time_us);
  read_before_free(address);
  if (handles_.size() > 1) (void)pool_.record_stream(address, handles_[other_than(stream)]);
  (void)pool_.free(address);
  return 0;
}

PolicyUsage VramPolicy::usage() const {
  const PoolStats stats = pool_.stats();
  PolicyUsage usage;
  usage.allocated = stats.live;
  usage.peak_allocated = stats.peak_live;
  usage.reserved = stats.reserved.current;
  usage.peak_reserved = stats.reserved.peak;
  usage.driver_calls = model_->driver_calls() - calls_before_;
  usage.driver_us = model_->driver_us() - us_before_;
  usage.spill = traffic(stats);
  usage.spill.read += stats.spilled_live;
  usage.spill.read_us = prices::host_page_read(usage.spill.read);
  return usage;
}

// ---- spilling -------------------------------------------------------------------------------------------

void VramPolicy::set_time(std::int64_t time_us) {
  model_->set_time(static_cast<double>(time_us) + shift_us_);
}

// After a request that spilled, or tried to.
void VramPolicy::follow_spill(std::int64_t time_us) {
  spilling_ = false;
  peak_host_ = std::max(peak_host_, pool_.stats().host);
  shift_us_ = std::max(shift_us_, model_->now() - static_cast<double>(time_us));
}

// Once a second.
void VramPolicy::bring_back_in_time(std::int64_t time_us) {
  const double now_us = static_cast<double>(time_us) + model_->held_us();
  if (now_us < looked_us_ + kUsBetweenReturns) return;
  looked_us_ = now_us;
  set_time(time_us);
  const std::uint64_t swaps = pool_.stats().spill.spills;
  std::uint64_t returned = 0;
  if (std::exchange(swaps_seen_, swaps) == swaps) (void)pool_.bring_back(kMostReturned, &returned);
  shift_us_ = std::max(shift_us_, model_->now() - static_cast<double>(time_us));
}

VramPolicy::Look VramPolicy::look(bool restart_peak) {
  return {pool_.usage(restart_peak), std::exchange(needed_, 0)};
}

std::uint64_t VramPolicy::bring_back(std::uint64_t most, std::int64_t time_us) {
  set_time(time_us);
  std::uint64_t returned = 0;
  if (most != 0) (void)pool_.bring_back(most, &returned, true);
  shift_us_ = std::max(shift_us_, model_->now() - static_cast<double>(time_us));
  looked_us_ = static_cast<double>(time_us) + model_->held_us() + kPostponed;
  return returned;
}

void VramPolicy::steer(const std::vector<Token>& first, const std::vector<Token>& last) {
  std::unordered_map<Address, SpillWish> wishes;
  for (const Token token : first) wishes[reinterpret_cast<Address>(token)] = SpillWish::first;
  for (const Token token : last) wishes[reinterpret_cast<Address>(token)] = SpillWish::last;
  pool_.steer_spill(std::move(wishes));
}

void VramPolicy::read_before_free(Address address) {
  std::uint64_t bytes = 0;
  if (spilled_ && pool_.spilled(address, &bytes).ok()) read_ += bytes;
}

void VramPolicy::step() {
  if (!spills_) return;
  const PoolStats stats = pool_.stats();
  read_ += stats.spilled_live;
  steps_.push_back(traffic(stats));
}

SpillTraffic VramPolicy::traffic(const PoolStats& stats) const {
  SpillTraffic traffic;
  traffic.moved_out = stats.spill.spilled_bytes;
  traffic.moved_back = stats.spill.returned_bytes;
  traffic.read = read_;
  traffic.swaps = stats.spill.spills;
  traffic.returns = stats.spill.returns;
  traffic.peak = peak_host_;
  traffic.held_us = model_->held_us();
  traffic.read_us = prices::host_page_read(read_);
  traffic.created_us = model_->host_page_us();
  return traffic;
}

std::vector<SpillTraffic> VramPolicy::spill_steps() const {
  std::vector<SpillTraffic> steps = steps_;
  if (spills_) steps.push_back(usage().spill);
  return steps;
}

}  // namespace vram
