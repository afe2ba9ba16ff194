// The real pool as a policy. See vram.hpp.
#include "replay/policies/vram.hpp"

namespace vram {

namespace {

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
      us_before_(model_->driver_us()) {}

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
  Address address = 0;
  if (size <= kMaxRequest && pool_.try_cached(size, handles_[stream], 0, &address))
    return reinterpret_cast<Token>(address);
  model_->set_time(static_cast<double>(time_us));
  const Status status = pool_.allocate_slow(size, handles_[stream], 0, 0, &address, nullptr);
  return status.ok() ? reinterpret_cast<Token>(address) : nullptr;
}

void VramPolicy::free(Token token, std::int64_t time_us) {
  const auto address = reinterpret_cast<Address>(token);
  if (pool_.try_free_cached(address)) return;
  model_->set_time(static_cast<double>(time_us));
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
  model_->set_time(static_cast<double>(time_us));
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
  return usage;
}

}  // namespace vram
