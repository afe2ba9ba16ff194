// The default order in which pages go to the host.
#include "pool/spill_policy.hpp"

#include <algorithm>
#include <new>
#include <tuple>

namespace vram {

namespace {

// Blocks that are remembered; what is older is forgotten.
constexpr std::size_t kMostGone = 4096;
// If the youngest go first: blocks younger than this part of a life are still in use.
constexpr std::uint32_t kInUse = 16;
// … and blocks that have lived for so many lives are not replaced; everything else is used with them.
constexpr std::uint64_t kLasting = 2;

}  // namespace

void SpillOrder::sort(std::vector<SpillCandidate>& candidates) const {
  // Smaller ones go first; the age counts up or down.
  const auto key = [this](const SpillCandidate& each) {
    const std::uint64_t oldest_first = ~each.age;
    int group = 0;
    if (youngest_first_ && each.age > kLasting * life_) group = 1;
    if (youngest_first_ && each.age < life_ / kInUse) group = 2;
    const std::uint64_t age = youngest_first_ && group == 0 ? each.age : oldest_first;
    return std::tuple(each.last, !each.first, group, age, ~each.block_bytes);
  };
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const SpillCandidate& a, const SpillCandidate& b) { return key(a) < key(b); });
}

void SpillOrder::note(const SpillCandidate& gone) {
  if (gone.first || gone.last) return;  // the program knows better
  if (gone_.size() >= kMostGone) gone_.erase(gone_.begin(), gone_.begin() + kMostGone / 2);
  const auto age = static_cast<std::uint32_t>(gone.age);
  try {
    gone_.push_back({gone.block, gone.serial, gone.counts_on, age, gone.serial + age, gone.bytes});
  } catch (const std::bad_alloc&) {
    // It is not learned from.
  }
}

void SpillOrder::learn(const std::function<std::uint32_t(StreamNumber)>& now,
                       const std::function<bool(Index, std::uint32_t)>& live, std::uint64_t enough) {
  std::erase_if(gone_, [&](const Gone& each) {
    const std::uint32_t passed = now(each.stream) - each.at;
    const bool long_ago = passed >= (youngest_first_ ? life_ : each.age) / 2;
    const bool lives = live(each.block, each.serial);
    if (lives && !long_ago) return false;
    if (!lives) longest_ = std::max(longest_, each.age + passed);
    (long_ago ? stayed_ : freed_) += each.bytes;
    return true;
  });
  if (stayed_ + freed_ < enough) return;
  if (freed_ > stayed_) youngest_first_ = !youngest_first_;
  if (longest_ != 0) life_ = longest_;
  longest_ = 0;
  stayed_ = freed_ = 0;
}

}  // namespace vram
