// The counting device. See policy.hpp.
#include "backends/driver_costs.hpp"
#include "replay/policies/policy.hpp"

namespace vram {

namespace {
constexpr std::uint64_t kStride = 32 * kMiB;
}  // namespace

bool PolicyDevice::grow(std::uint64_t bytes) {
  if (bytes > capacity_ - reserved_) return false;
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  if (keep_sizes_) sizes_.push_back(bytes);
  return true;
}

bool PolicyDevice::allocate(std::uint64_t bytes, Address* address) {
  ++calls_;
  if (!has_addresses(bytes, kStride) || !grow(bytes)) return false;
  us_ += prices::plain(bytes) * prices::kReserveShare;
  *address = place(bytes);
  held_.emplace(*address, bytes);
  return true;
}

void PolicyDevice::release(Address address, std::uint64_t bytes) {
  ++calls_;
  us_ += prices::plain(bytes) * (1 - prices::kReserveShare);
  reserved_ -= bytes;
  held_.erase(address);
}

// Each page is created and mapped by a separate call; one call grants access to all of them.
bool PolicyDevice::map(std::uint64_t bytes, std::uint64_t page) {
  const std::uint64_t pages = bytes / page;
  calls_ += pages;
  if (!grow(bytes)) return false;
  calls_ += pages + 1;
  const prices::Page& price = prices::page(page);
  us_ += static_cast<double>(pages) * (price.create + price.map + price.set_access);
  return true;
}

void PolicyDevice::unmap(std::uint64_t bytes, std::uint64_t page) {
  const std::uint64_t pages = bytes / page;
  calls_ += 2 * pages;
  const prices::Page& price = prices::page(page);
  us_ += static_cast<double>(pages) * (price.unmap + price.release);
  reserved_ -= bytes;
}

bool PolicyDevice::has_addresses(std::uint64_t bytes, std::uint64_t alignment) const {
  return bytes < lowest_ && alignment <= lowest_ - bytes;
}

Address PolicyDevice::reserve_addresses(std::uint64_t bytes, std::uint64_t alignment) {
  if (!has_addresses(bytes, alignment)) return 0;
  lowest_ = (lowest_ - bytes) / alignment * alignment;
  return lowest_;
}

Address PolicyDevice::place(std::uint64_t bytes) {
  if (const Address recorded = follow(bytes)) return recorded;
  recorded_.clear();
  const Address address = rest_end_ - rest_ >= bytes ? rest_ : reserve_addresses(bytes, kStride);
  if (address != rest_) rest_end_ = round_up(address + bytes, kStride);
  rest_ = address + bytes;
  return address;
}

// Memory that was released in the recording may still be held here, and a damaged recording may contain
// anything.
Address PolicyDevice::follow(std::uint64_t bytes) {
  if (followed_ >= recorded_.size() || recorded_[followed_].size != bytes) return 0;
  const Address address = recorded_[followed_].address + kRecordedBase;
  if (address < kRecordedBase || bytes > std::numeric_limits<Address>::max() - address) return 0;
  const auto above = held_.lower_bound(address);
  if (above != held_.end() && above->first < address + bytes) return 0;
  if (above != held_.begin() && std::prev(above)->first + std::prev(above)->second > address) return 0;
  ++followed_;
  return address;
}

}  // namespace vram
