// Every policy keeps what any allocator owes: memory large enough, in nobody else's hands, not reused while
// another stream uses it, within the device, whatever the sizes; and PyTorch's does what its options say.
#include <map>

#include "oracle.hpp"
#include "replay/policies/bfc.hpp"
#include "replay/policies/cuda_async.hpp"
#include "replay/policies/rmm_arena.hpp"
#include "replay/policies/rmm_pool.hpp"
#include "replay/policies/torch_expandable.hpp"
#include "replay/policies/vram.hpp"
#include "replay/replay.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::Random;

namespace {

constexpr std::uint64_t kCapacity = 512 * kMiB;

struct Candidate {
  const char* name;
  std::unique_ptr<Policy> policy;
  bool waits;                          // keeps memory that another stream uses away from everybody
  std::uint64_t capacity = kCapacity;  // of its device
};

// Every policy on a device of `capacity` bytes, or on one that is never full.
std::vector<Candidate> candidates(std::uint64_t capacity = kCapacity) {
  TorchConfig plain;
  if (capacity != PolicyDevice::kUnlimited) plain.allowed = capacity;
  TorchConfig tuned = plain;
  tuned.max_split_size = 32 * kMiB;
  tuned.garbage_collection_threshold = 0.5;
  tuned.roundup_power2_divisions.fill(4);
  const PolicyDevice unlimited(PolicyDevice::kUnlimited);
  const PolicyDevice device(std::min(capacity, PolicyDevice::kUnlimited));
  std::vector<Candidate> all;
  all.push_back({"torch", std::make_unique<TorchPolicy>(plain, unlimited), true});
  all.push_back({"torch, tuned", std::make_unique<TorchPolicy>(tuned, unlimited), true});
  all.push_back({"torch-expandable", std::make_unique<TorchExpandablePolicy>(plain, unlimited), true});
  all.push_back({"cuda-async", std::make_unique<CudaAsyncPolicy>(device), false});
  all.push_back({"bfc", std::make_unique<BfcPolicy>(BfcConfig{true, true}, device), true});
  all.push_back({"rmm-pool", std::make_unique<RmmPoolPolicy>(RmmPoolConfig{}, device), true});
  all.push_back({"rmm-arena", std::make_unique<RmmArenaPolicy>(device), true});
  for (Candidate& each : all) each.capacity = capacity;
  return all;
}

std::uint64_t some_size(Random& random) {
  static const std::vector<std::uint64_t> kEdges = {
      0,        1,         256,           512,       513,       54 * kKiB, kMiB,      kMiB + 1,
      2 * kMiB, 10 * kMiB, 10 * kMiB - 1, 20 * kMiB, 32 * kMiB, 33 * kMiB, 100 * kMiB};
  return random.chance(50) ? random.of(kEdges) : random.below(std::uint64_t{1} << random.below(27));
}

// From 0 to 2^64 - 1: every power of two is as likely, and its neighbours and multiples of 512 among them.
std::uint64_t any_size(Random& random) {
  const std::uint64_t power = std::uint64_t{1} << random.below(64);
  switch (random.below(4)) {
    case 0:
      return power - 1;
    case 1:
      return power;
    case 2:
      return power + random.below(power) / 512 * 512;
    default:
      return power + random.below(power);
  }
}

// A program at random, and the addresses in use as the policy must respect them.
class Watched {
 public:
  using Sizes = std::uint64_t (*)(Random&);

  Watched(const Candidate& candidate, std::uint64_t seed, Sizes sizes = some_size)
      : candidate_(candidate), random_(seed), sizes_(sizes) {}

  // Empty, or what went wrong.
  std::string run(int steps) {
    for (int step = 0; step < steps && fault_.empty(); ++step) {
      const std::uint64_t what = random_.below(100);
      if (what < 50)
        allocate();
      else if (what < 85)
        free(false);
      else if (what < 93)
        free(true);
      else if (what < 99)
        complete();
      else {
        candidate_.policy->trim();
        wait_for_all();
      }
      if (step % 16 == 0 && !candidate_.policy->check(&why_)) fault_ = why_;
    }
    return fault_;
  }

 private:
  struct Live {
    Token token;
    std::uint32_t stream;
    Address address;
  };

  void allocate() {
    const std::uint64_t size = sizes_(random_);
    const auto stream = static_cast<std::uint32_t>(random_.below(3));
    const Token token = candidate_.policy->allocate(size, stream, 0);
    // A policy that ran out, even for a moment, may have waited for all other streams.
    if (candidate_.policy->usage().retries != retries_) wait_for_all();
    retries_ = candidate_.policy->usage().retries;
    if (token == nullptr) return;
    const Placement placement = candidate_.policy->placement(token);
    if (placement.size < size || placement.size == 0) fault_ = "a block is too small";
    const auto after = used_.lower_bound(placement.address);
    if (after != used_.end() && after->first < placement.address + placement.size) fault_ = "blocks overlap";
    if (after != used_.begin() && std::prev(after)->first + std::prev(after)->second > placement.address)
      fault_ = "blocks overlap";
    used_[placement.address] = placement.size;
    live_.push_back({token, stream, placement.address});
    // Mapping whole pages may pass PyTorch's limit by less than one.
    if (candidate_.policy->usage().reserved >= candidate_.capacity + 20 * kMiB)
      fault_ = "more than the device has";
  }

  void wait_for_all() {
    for (const auto& [ticket, address] : pending_) candidate_.policy->complete(ticket);
    for (const auto& [ticket, address] : pending_) used_.erase(address);
    pending_.clear();
  }

  void free(bool later) {
    if (live_.empty()) return;
    const std::size_t place = random_.below(live_.size());
    const Live freed = live_[place];
    live_[place] = live_.back();
    live_.pop_back();
    if (!later) {
      candidate_.policy->free(freed.token, 0);
      used_.erase(freed.address);
      return;
    }
    const Ticket ticket = candidate_.policy->free_later(freed.token, freed.stream, 0);
    if (candidate_.waits)
      pending_.emplace_back(ticket, freed.address);
    else
      used_.erase(freed.address);
  }

  void complete() {
    if (pending_.empty()) return;
    const std::size_t place = random_.below(pending_.size());
    candidate_.policy->complete(pending_[place].first);
    used_.erase(pending_[place].second);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  const Candidate& candidate_;
  Random random_;
  Sizes sizes_;
  std::vector<Live> live_;
  std::vector<std::pair<Ticket, Address>> pending_;
  std::map<Address, std::uint64_t> used_;
  std::uint64_t retries_ = 0;
  std::string why_;
  std::string fault_;
};

}  // namespace

TEST(an_ordered_set_of_blocks_is_an_ordered_set) {
  Random random(7);
  PolicyBlocks blocks;
  BlockSet<BySize> set;
  std::map<std::pair<std::uint64_t, Address>, PolicyBlock*> expected;
  for (int step = 0; step < 20000; ++step) {
    if (expected.empty() || random.chance(step < 10000 ? 70 : 35)) {
      PolicyBlock block;
      block.size = 1 + random.below(50);
      block.address = random.next();
      PolicyBlock* added = blocks.add(block);
      set.insert(added);
      expected[{block.size, block.address}] = added;
    } else {
      auto at = expected.lower_bound({random.below(60), random.next()});
      if (at == expected.end()) at = expected.begin();
      set.erase(at->second);
      blocks.drop(at->second);
      expected.erase(at);
    }
    const std::uint64_t size = random.below(60);
    const auto found = expected.lower_bound({size, 0});
    CHECK(set.lower_bound(size).block() == (found == expected.end() ? nullptr : found->second));
    CHECK(set.size() == expected.size());
  }
  std::vector<PolicyBlock*> order;
  for (const auto& [key, block] : expected) order.push_back(block);
  CHECK(set.list() == order && order.size() > 100 && set.last() == order.back());
}

TEST(no_policy_hands_memory_out_twice) {
  for (std::uint64_t seed = 1; seed <= 40 / vram::testing::kSlowdown; ++seed) {
    for (const Candidate& candidate : candidates()) {
      const std::string fault = Watched(candidate, seed).run(3000);
      if (!fault.empty())
        std::printf("%s, seed %d: %s\n", candidate.name, static_cast<int>(seed), fault.c_str());
      CHECK(fault.empty());
    }
  }
}

TEST(every_policy_answers_requests_of_any_size) {
  for (const std::uint64_t capacity : {std::uint64_t{1}, 3 * kMiB, 139 * kGiB, 20 * 1024 * kGiB,
                                       PolicyDevice::kUnlimited - 1, PolicyDevice::kUnlimited}) {
    for (std::uint64_t seed = 1; seed <= 20 / vram::testing::kSlowdown; ++seed) {
      for (const Candidate& candidate : candidates(capacity)) {
        const std::string fault = Watched(candidate, seed, any_size).run(1000);
        if (!fault.empty())
          std::printf("%s, %llu bytes, seed %d: %s\n", candidate.name,
                      static_cast<unsigned long long>(capacity), static_cast<int>(seed), fault.c_str());
        CHECK(fault.empty());
      }
    }
  }
}

TEST(a_device_that_is_never_full_serves_more_than_any_device_has) {
  for (const Candidate& candidate : candidates(PolicyDevice::kUnlimited)) {
    Policy& policy = *candidate.policy;
    for (std::uint64_t size = 128 * kGiB; size <= 64 * 1024 * kGiB; size *= 2) {
      const Token token = policy.allocate(size + kMiB, 0, 0);
      CHECK(token != nullptr && policy.placement(token).size >= size + kMiB);
      policy.free(token, 0);
    }
  }
}

TEST(the_real_pool_answers_requests_of_any_size) {
  for (const std::uint64_t capacity : {std::uint64_t{1}, 3 * kMiB, 5 * kGiB, std::uint64_t{1} << 62}) {
    for (const std::uint64_t spill : {std::uint64_t{0}, 8 * kGiB}) {
      PoolConfig config;
      config.spill = spill;
      VramPolicy policy(config, capacity, 5000);
      Random random(capacity + spill);
      std::vector<Token> live;
      for (int step = 0; step < 300 / vram::testing::kSlowdown; ++step) {
        if (live.empty() || random.chance(60)) {
          const auto stream = static_cast<std::uint32_t>(random.below(3));
          if (const Token token = policy.allocate(any_size(random), stream, 10 * step)) live.push_back(token);
          continue;
        }
        std::swap(live[random.below(live.size())], live.back());
        policy.free(live.back(), 10 * step);
        live.pop_back();
      }
      std::string why;
      CHECK(policy.check(&why));
    }
  }
}

TEST(everything_comes_back_when_all_is_freed) {
  for (const Candidate& candidate : candidates()) {
    Policy& policy = *candidate.policy;
    std::vector<Token> tokens;
    for (std::uint64_t size : {kMiB / 2, 3 * kMiB, 70 * kMiB, std::uint64_t{512}, 20 * kMiB})
      tokens.push_back(policy.allocate(size, 0, 0));
    const std::uint64_t reserved = policy.usage().reserved;
    for (const Token token : tokens) policy.free(token, 0);
    CHECK(policy.usage().allocated == 0 && policy.usage().peak_allocated >= 93 * kMiB);
    for (std::uint64_t size : {kMiB / 2, 3 * kMiB, 70 * kMiB, std::uint64_t{512}, 20 * kMiB})
      CHECK(policy.allocate(size, 0, 0) != nullptr);
    CHECK(policy.usage().reserved == reserved);
  }
}

TEST(a_request_beyond_the_device_fails_and_changes_nothing) {
  for (const Candidate& candidate : candidates()) {
    Policy& policy = *candidate.policy;
    for (const std::uint64_t size : {kCapacity + 1, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
      CHECK(policy.allocate(size, 0, 0) == nullptr);
      CHECK(policy.usage().allocated == 0);
    }
    std::string why;
    CHECK(policy.check(&why));
    CHECK(policy.allocate(kMiB, 0, 0) != nullptr);
  }
}

// ---- PyTorch's options ------------------------------------------------------------------------------

namespace {

std::uint64_t block_size(const TorchConfig& config, std::uint64_t size) {
  TorchPolicy policy(config, PolicyDevice(PolicyDevice::kUnlimited));
  return policy.placement(policy.allocate(size, 0, 0)).size;
}

}  // namespace

TEST(sizes_are_rounded_as_pytorch_rounds) {
  TorchConfig config;
  CHECK(block_size(config, 1) == 512);
  CHECK(block_size(config, 513) == 1024);
  config.roundup_power2_divisions.fill(4);
  CHECK(block_size(config, 1200 * kKiB) == 1280 * kKiB);
  CHECK(block_size(config, 2 * kMiB) == 2 * kMiB);
  CHECK(block_size(config, 2048) == 2048);  // not above 512 bytes a division
  CHECK(block_size(config, 2049) == 2560);
  config.roundup_power2_divisions.fill(1);
  CHECK(block_size(config, 1200 * kKiB) == 1200 * kKiB);
}

TEST(segments_have_pytorchs_sizes) {
  TorchConfig config;
  TorchPolicy policy(config, PolicyDevice(PolicyDevice::kUnlimited, true));
  for (const std::uint64_t size : {kMiB, kMiB + 512, 10 * kMiB, 21 * kMiB}) policy.allocate(size, 0, 0);
  CHECK((policy.segment_sizes() == std::vector<std::uint64_t>{2 * kMiB, 20 * kMiB, 22 * kMiB}));
  policy.allocate(kMiB, 1, 0);  // another stream shares nothing
  CHECK(policy.segment_sizes().back() == 2 * kMiB && policy.segment_sizes().size() == 4);
}

TEST(blocks_above_max_split_size_stay_whole) {
  TorchConfig config;
  config.max_split_size = 64 * kMiB;
  TorchPolicy policy(config, PolicyDevice(PolicyDevice::kUnlimited));
  policy.free(policy.allocate(100 * kMiB, 0, 0), 0);
  policy.allocate(30 * kMiB, 0, 0);  // a new segment rather than a part of the large one
  CHECK(policy.usage().reserved == 130 * kMiB);
  policy.allocate(90 * kMiB, 0, 0);  // less than 20 MiB below it: takes it as it is
  CHECK(policy.usage().reserved == 130 * kMiB && policy.usage().allocated == 130 * kMiB);
}

TEST(the_ladder_gives_whole_segments_back_and_counts_the_retry) {
  TorchConfig config;
  config.allowed = 100 * kMiB;
  TorchPolicy policy(config, PolicyDevice(PolicyDevice::kUnlimited));
  const Token other = policy.allocate(60 * kMiB, 1, 0);
  policy.free_later(other, 1, 0);  // the ladder waits for it
  CHECK(policy.allocate(80 * kMiB, 0, 0) != nullptr);
  CHECK(policy.usage().retries == 1 && policy.usage().reserved == 80 * kMiB);
  CHECK(policy.allocate(30 * kMiB, 0, 0) == nullptr);
  CHECK(policy.usage().retries == 2);
}

TEST(garbage_is_collected_oldest_first_above_the_threshold) {
  TorchConfig config;
  config.allowed = 100 * kMiB;
  config.garbage_collection_threshold = 0.5;
  TorchPolicy policy(config, PolicyDevice(PolicyDevice::kUnlimited));
  const Token old = policy.allocate(30 * kMiB, 0, 0);
  const Token young = policy.allocate(40 * kMiB, 0, 0);
  policy.free(old, 0);
  policy.allocate(kMiB, 0, 0);
  policy.free(young, 0);
  policy.allocate(20 * kMiB, 1, 0);  // 92 MiB would be held: the older segment goes
  CHECK(policy.usage().reserved == 62 * kMiB && policy.usage().retries == 0);
}

TEST(an_expandable_segment_grows_by_pages_and_shrinks_by_them) {
  TorchExpandablePolicy policy(TorchConfig{}, PolicyDevice(PolicyDevice::kUnlimited));
  const Token first = policy.allocate(30 * kMiB, 0, 0);
  CHECK(policy.usage().reserved == 40 * kMiB);
  const Token second = policy.allocate(25 * kMiB, 0, 0);  // 10 MiB are left, one page more is enough
  CHECK(policy.usage().reserved == 60 * kMiB);
  CHECK(policy.placement(second).address == policy.placement(first).address + 30 * kMiB);
  policy.free(first, 0);
  policy.trim();
  CHECK(policy.usage().reserved == 40 * kMiB);  // the page that the second begins in stays
  policy.allocate(50 * kMiB, 0, 0);             // does not fit the hole, goes behind
  CHECK(policy.usage().reserved == 100 * kMiB);
}

TEST(recorded_addresses_are_followed_only_while_they_are_free) {
  const std::vector<RecordedSegment> recorded = {{4 * kMiB, 8 * kMiB}, {4 * kMiB, 8 * kMiB}};
  PolicyDevice device(PolicyDevice::kUnlimited, false, recorded);
  Address first = 0;
  Address second = 0;
  CHECK(device.allocate(4 * kMiB, &first) && first == PolicyDevice::kRecordedBase + 8 * kMiB);
  CHECK(device.allocate(4 * kMiB, &second) && second < first);  // was given back in between, but not here
  PolicyDevice released(PolicyDevice::kUnlimited, false, recorded);
  CHECK(released.allocate(4 * kMiB, &first));
  released.release(first, 4 * kMiB);
  CHECK(released.allocate(4 * kMiB, &second) && second == first);
}

TEST(a_damaged_recording_changes_no_placement_into_nonsense) {
  const Address top = ~std::uint64_t{0};
  for (const Address address : {Address{0}, top, top - 2 * kMiB}) {
    TorchPolicy policy(TorchConfig{},
                       PolicyDevice(PolicyDevice::kUnlimited, false,
                                    {{4 * kMiB, address}, {20 * kMiB, address}, {20 * kMiB, address}}));
    for (const std::uint64_t size : {10 * kMiB, 3 * kMiB, 15 * kMiB})
      CHECK(policy.allocate(size, 0, 0) != nullptr);
    std::string why;
    CHECK(policy.check(&why));
  }
}

// ---- replay -------------------------------------------------------------------------------------------

TEST(a_delayed_free_is_reusable_from_its_recorded_event_on) {
  const std::uint8_t op[] = {0, 1, 0, 1, 0};
  const std::uint32_t id[] = {0, 0, 0, 0, 1};  // an id may come again
  const std::uint64_t size[] = {30 * kMiB, 30 * kMiB, 30 * kMiB, 30 * kMiB, 30 * kMiB};
  const std::uint32_t stream[] = {0, 0, 0, 0, 0};
  const std::int64_t time[] = {0, 1, 2, 3, 4};
  const std::int64_t event[] = {0, 1, 2, 3, 9};
  const std::int64_t completed[] = {-1, 7, -1, 20, -1};
  Replayer replayer(std::make_unique<TorchPolicy>(TorchConfig{}, PolicyDevice(PolicyDevice::kUnlimited)));
  replayer.run({3, op, id, size, stream, time, event, completed, 0, nullptr});
  CHECK(replayer.result().usage.reserved == 60 * kMiB);
  replayer.run({2, op + 3, id + 3, size + 3, stream + 3, time + 3, event + 3, completed + 3, 0, nullptr});
  CHECK(replayer.result().usage.reserved == 60 * kMiB && replayer.result().rows == 5);
}

TEST_MAIN()
