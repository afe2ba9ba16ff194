// Suspend and resume under a happens-before oracle: no page goes while work may touch it, nothing is placed
// over what is suspended, and whichever call to the device fails, nothing is lost and a second try works.
// Real contents are the business of the Python tests, on the host.
#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "backends/host.hpp"
#include "oracle.hpp"
#include "pool/contents.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::FarHost;
using vram::testing::lagging;
using vram::testing::Random;
using vram::testing::Watched;

namespace {

std::shared_ptr<Pool> make_store(std::uint64_t limit = 0) {
  PoolConfig config;
  config.pages = false;
  config.limit = limit;
  return std::make_shared<Pool>(std::make_shared<HostBackend>(4 * kGiB), config);
}

Pool::Wanted tagged(std::uint32_t tag) {
  if (tag == 0) return nullptr;
  return [tag](std::uint32_t label) { return label == tag; };
}

// What a program works with.
struct Scale {
  std::uint64_t capacity;
  std::vector<std::uint64_t> sizes;
};
const Scale kModest{96 * kMiB,
                    {1000, 300 * kKiB, kMiB, kMiB + 1, 2 * kMiB, 3 * kMiB, 5 * kMiB, 9 * kMiB, 14 * kMiB}};
// With pages of every size, and pages that blocks cover in part.
const Scale kHuge{64 * kGiB,
                  {1000, kMiB, 15204352, 26 * kMiB, 33 * kMiB, 128 * kMiB, 500 * kMiB + 1, 1800 * kMiB,
                   2000 * kMiB + 512, 5 * kGiB}};

// A random program on three streams and two tags.
class Program {
 public:
  Program(std::uint64_t seed, const PoolConfig& config, const Scale& scale = kModest)
      : random_(seed),
        scale_(scale),
        world_(scale.capacity, config, lagging()),
        store_(make_store(64 * kMiB)) {
    for (int i = 0; i < 2; ++i) {
      StreamHandle stream = 0;
      if (world_.device->stream_create(&stream).ok()) streams_.push_back(stream);
    }
  }
  ModelBackend& device() { return *world_.device; }
  std::uint64_t suspended() const { return suspends_; }

  bool run(int steps, std::string* why) {
    for (int step = 0; step < steps; ++step) {
      act();
      if (!world_.good(why)) {
        *why += " (step " + std::to_string(step) + ")";
        return false;
      }
    }
    return true;
  }
  // What is suspended can be freed, the rest works, and nothing is left.
  bool end(std::string* why) {
    world_.device->clear_failures();
    resume(0);
    while (!world_.held.empty())
      if (!release(0)) return false;
    if (!world_.pool->trim(0, true).ok() || world_.pool->stats().reserved.current != 0) return false;
    if (store_->stats().live != 0 || world_.pool->stats().kept != 0 || world_.pool->stats().suspended != 0)
      return false;
    if (!world_.good(why) || !world_.device->check(why)) return false;
    world_.oracle->closing = true;
    const bool closed = world_.pool->close().ok();
    const ModelCounts left = world_.device->counts();
    return closed && left.pages == 0 && left.mappings == 0 && left.spaces == 0 && left.events == 0 &&
           left.streams == streams_.size();
  }

 private:
  void act() {
    const std::uint64_t dice = random_.below(100);
    const StreamHandle stream = random_.of(streams_);
    const std::size_t i = world_.held.empty() ? 0 : random_.below(world_.held.size());
    const std::uint32_t tag = static_cast<std::uint32_t>(random_.below(3));
    if (dice < 40) {
      allocate(random_.of(scale_.sizes), stream, 1 + tag % 2);
    } else if (dice < 70 && !world_.held.empty()) {
      const bool asleep = away_.count(world_.held[i].address) != 0;
      if (dice < 50) {
        (void)release(i);
      } else if (dice < 60 && !asleep) {
        world_.use(i);
      } else {
        const Status status = world_.use_on(i, stream);
        if (asleep != (status.code == Code::suspended))
          world_.oracle->faults.push_back("a suspended block was recorded, or another not");
      }
    } else if (dice < 80) {
      suspend(tag, random_.chance(70));
    } else if (dice < 90) {
      resume(tag);
    } else if (dice < 94) {
      (void)world_.pool->trim(0, random_.chance(50));
    } else {
      world_.device->advance(static_cast<double>(random_.below(150)));
    }
  }

  void allocate(std::uint64_t size, StreamHandle stream, std::uint32_t tag) {
    Address address = 0;
    if (!world_.pool->allocate(size, stream, 0, tag, &address).ok()) return;
    world_.oracle->allocated(address, Watched::bytes_of(size), stream);
    world_.held.push_back({address, size, stream, {}});
    tags_[address] = tag;
  }
  bool release(std::size_t i) {
    const Address address = world_.held[i].address;
    if (away_.count(address) == 0) {
      const bool freed = world_.free(i).ok();
      if (freed) tags_.erase(address);
      return freed;
    }
    if (!world_.pool->free(address).ok()) return false;
    away_.erase(address);
    tags_.erase(address);
    world_.held.erase(world_.held.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  void suspend(std::uint32_t tag, bool keep) {
    std::vector<Watched::Held> going;
    for (const Watched::Held& each : world_.held)
      if (away_.count(each.address) == 0 && (tag == 0 || tags_[each.address] == tag)) going.push_back(each);
    for (const Watched::Held& each : going) world_.oracle->freed(each.address);
    std::uint64_t given = 0;
    OutOfMemoryReport report;
    (void)world_.pool->suspend(tagged(tag), keep, keep || random_.chance(50) ? store_ : nullptr, &given,
                               &report);
    suspends_ += given != 0;
    for (const Watched::Held& each : going) {
      if (world_.pool->suspended(each.address)) {
        away_.insert(each.address);
      } else {
        world_.oracle->kept(each.address, Watched::bytes_of(each.size));
      }
    }
  }
  void resume(std::uint32_t tag) {
    std::uint64_t taken = 0;
    (void)world_.pool->resume(tagged(tag), &taken, nullptr);
    for (const Watched::Held& each : world_.held) {
      if (away_.count(each.address) == 0 || world_.pool->suspended(each.address)) continue;
      world_.oracle->allocated(each.address, Watched::bytes_of(each.size), each.stream);
      away_.erase(each.address);
    }
  }

  Random random_;
  const Scale& scale_;
  Watched world_;
  std::shared_ptr<Pool> store_;
  std::vector<StreamHandle> streams_{0};
  std::map<Address, std::uint32_t> tags_;
  std::set<Address> away_;
  std::uint64_t suspends_ = 0;
};

std::vector<PoolConfig> configs() {
  std::vector<PoolConfig> all(5);
  all[1].max_page = 2 * kMiB;
  all[2].cross_stream = CrossStream::wait;
  all[3].limit = 60 * kMiB;
  all[3].stream_cache = 0;
  all[4].zero_on_free = true;
  return all;
}

}  // namespace

namespace {

void random_programs(int programs, const Scale& scale) {
  std::uint64_t suspends = 0;
  const int most = std::max(programs / static_cast<int>(vram::testing::sampling()), 5);
  for (int seed = 1; seed <= most; ++seed) {
    PoolConfig config = configs()[static_cast<std::size_t>(seed) % 5];
    if (config.limit != 0) config.limit = scale.capacity / 8 * 5;
    Program program(static_cast<std::uint64_t>(seed), config, scale);
    std::string why;
    const bool good = program.run(150, &why) && program.end(&why);
    if (!good) std::printf("     seed %d: %s\n", seed, why.c_str());
    CHECK(good);
    suspends += program.suspended();
    if (!good) return;
  }
  CHECK(suspends > static_cast<std::uint64_t>(3 * most));
}

}  // namespace

TEST(random_programs_lose_nothing) { random_programs(300, kModest); }

TEST(random_programs_with_large_pages_lose_nothing) { random_programs(60, kHuge); }

// A page of 8 MiB of which a block covers the end lies beside another block's pages; larger pages must not
// be cut so that one of them is under no block.
TEST(pages_come_back_larger_and_are_never_cut) {
  const auto device = std::make_shared<ModelBackend>(64 * kGiB);
  Pool pool(device, {});
  StreamHandle side = 0;
  REQUIRE(device->stream_create(&side).ok());
  const auto get = [&](std::uint64_t size, StreamHandle stream = 0) {
    Address address = 0;
    CHECK(pool.allocate(size, stream, 0, 0, &address).ok());
    return address;
  };
  std::string why;
  const auto there_and_back = [&] {
    std::uint64_t bytes = 0;
    CHECK(pool.suspend(nullptr, false, nullptr, &bytes, nullptr).ok());
    CHECK(pool.check(&why));
    CHECK(pool.resume(nullptr, &bytes, nullptr).ok());
    CHECK(pool.stats().suspended == 0);
    CHECK(pool.check(&why));
  };
  const Address first = get(26 * kMiB);
  (void)get(128 * kMiB);
  const std::uint64_t pieces = pool.stats().segments.current;
  there_and_back();
  CHECK(pool.stats().segments.current < pieces);
  (void)get(kMiB);
  (void)get(kMiB, side);
  const Address hole = get(15204352);
  CHECK(pool.free(hole).ok() && pool.free(first).ok());
  (void)get(33 * kMiB);
  there_and_back();
}

// The driver's time to suspend and to resume is mostly a sum over pages.
TEST(long_blocks_come_back_in_few_pages_of_their_own) {
  const auto device = std::make_shared<ModelBackend>(64 * kGiB);
  Pool pool(device, {});
  std::vector<Address> blocks(64);
  for (Address& block : blocks) CHECK(pool.allocate(128 * kMiB, 0, 0, 0, &block).ok());
  std::uint64_t bytes = 0;
  CHECK(pool.suspend(nullptr, false, nullptr, &bytes, nullptr).ok());
  CHECK(pool.resume(nullptr, &bytes, nullptr).ok());
  CHECK(bytes == 8 * kGiB);
  CHECK(pool.stats().segments.current == 64);
  // They serve others, and go back to the driver.
  std::string why;
  Address other = 0;
  CHECK(pool.free(blocks[3]).ok());
  CHECK(pool.allocate(77 * kMiB, 0, 0, 0, &other).ok());
  CHECK(pool.stats().reserved.current == 8 * kGiB);
  CHECK(pool.free(blocks[5]).ok() && pool.free(other).ok());
  CHECK(pool.trim(0, true).ok());
  CHECK(pool.stats().reserved.current == 8 * kGiB - 256 * kMiB);
  CHECK(pool.check(&why));
}

// A page of 128 MiB would be a large part of what this pool holds.
TEST(few_blocks_come_back_in_smaller_pages) {
  const auto device = std::make_shared<ModelBackend>(64 * kGiB);
  Pool pool(device, {});
  std::vector<Address> blocks(8);
  for (Address& block : blocks) CHECK(pool.allocate(128 * kMiB, 0, 0, 0, &block).ok());
  std::uint64_t bytes = 0;
  CHECK(pool.suspend(nullptr, false, nullptr, &bytes, nullptr).ok());
  CHECK(pool.resume(nullptr, &bytes, nullptr).ok());
  CHECK(pool.stats().segments.current > 16);
}

TEST(every_call_fails_in_turn) {
  for (const Code code : {Code::failed, Code::out_of_memory}) {
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const PoolConfig config = configs()[seed % 5];
      Program whole(seed, config);
      std::string why;
      CHECK(whole.run(60, &why));
      const std::uint64_t calls = whole.device().total_calls();
      CHECK(whole.end(&why));
      for (std::uint64_t nth = 1; nth <= calls; nth += vram::testing::sampling()) {
        Program program(seed, config);
        program.device().fail_any(nth, {code, 700, "fault"});
        program.device().fail_any(nth + 2, {code, 700, "fault"});
        const bool good = program.run(60, &why) && program.end(&why);
        if (!good)
          std::printf("     seed %d, call %d: %s\n", static_cast<int>(seed), static_cast<int>(nth),
                      why.c_str());
        CHECK(good);
        if (!good) return;
      }
    }
  }
}

namespace {

// Acts once when work is queued, with no lock held.
class ActingHost : public FarHost {
 public:
  using FarHost::FarHost;
  Status fill(Address to, std::uint8_t value, std::uint64_t bytes, StreamHandle stream) override {
    if (on_fill) std::exchange(on_fill, nullptr)();
    return FarHost::fill(to, value, bytes, stream);
  }
  Status copy(Address to, Address from, std::uint64_t bytes, StreamHandle stream) override {
    if (on_copy) std::exchange(on_copy, nullptr)();
    return FarHost::copy(to, from, bytes, stream);
  }
  std::function<void()> on_fill, on_copy;
};

bool all_are(Address address, std::uint64_t bytes, char value) {
  const auto* const from = reinterpret_cast<const char*>(address);
  return std::all_of(from, from + bytes, [value](char each) { return each == value; });
}

}  // namespace

// The pages of a block stay where they are until its zeros are queued.
TEST(what_is_still_to_be_zeroed_is_not_suspended) {
  for (const std::uint64_t size : {64 * kKiB, 5 * kMiB})
    for (const bool cached : {false, true}) {
      const auto device = std::make_shared<ActingHost>(256 * kMiB);
      PoolConfig config;
      config.zero_on_allocate = true;
      Pool pool(device, config);
      Address first = 0, address = 0;
      std::uint64_t bytes = 0;
      CHECK(pool.allocate(size, 0, 0, 1, &first).ok() && device->fill(first, 7, size, 0).ok());
      if (cached) CHECK(pool.free(first).ok());
      device->on_fill = [&] { CHECK(pool.suspend(tagged(1), true, make_store(), &bytes, nullptr).ok()); };
      CHECK(pool.allocate(size, 0, 0, 1, &address).ok() && !device->on_fill);
      CHECK(!pool.suspended(address) && (cached || pool.suspended(first)));
      CHECK(device->synchronize().ok() && all_are(address, size, 0));
      CHECK(pool.suspend(tagged(1), true, make_store(), &bytes, nullptr).ok() && pool.suspended(address));
      CHECK(pool.resume(nullptr, &bytes, nullptr).ok() && all_are(address, size, 0) && pool.check(nullptr));
      CHECK(cached || all_are(first, size, 7));
    }
}

// The store's memory is in use until the copies have ended, in both directions.
TEST(a_store_is_not_closed_under_copies) {
  for (const bool back : {false, true})
    CHECK(vram::testing::holds_in_child([back] {
      constexpr std::uint64_t kBytes = 8 * kMiB;
      const auto device = std::make_shared<ActingHost>(256 * kMiB);
      const std::shared_ptr<Pool> store = make_store();
      Pool pool(device, {});
      Address address = 0;
      std::uint64_t bytes = 0;
      bool good = pool.allocate(kBytes, 0, 0, 0, &address).ok() && device->fill(address, 7, kBytes, 0).ok();
      if (back) good = good && pool.suspend(nullptr, true, store, &bytes, nullptr).ok();
      std::thread closing;
      device->on_copy = [&] {
        closing = std::thread([&] { (void)store->close(); });
        while (!Allocator::Access(*store).refused()) std::this_thread::yield();
        for (int i = 0; i < 10'000 && !store->closed(); ++i) std::this_thread::yield();
        good = good && !store->closed();
      };
      good = good && (back ? pool.resume(nullptr, &bytes, nullptr)
                           : pool.suspend(nullptr, true, store, &bytes, nullptr))
                         .ok();
      closing.join();
      if (back) return good && store->closed() && all_are(address, kBytes, 7);
      // The contents went with the store.
      return good && store->closed() && pool.resume(nullptr, &bytes, nullptr).code == Code::closed &&
             pool.suspended(address) && pool.free(address).ok() && pool.close().ok();
    }));
}

TEST(a_store_cannot_be_closed_by_the_thread_that_copies_into_it) {
  const auto device = std::make_shared<FarHost>(256 * kMiB);
  const std::shared_ptr<Pool> store = make_store(16 * kMiB);
  Pool pool(device, {});
  Address address = 0;
  std::uint64_t bytes = 0;
  Status closed;
  store->on_out_of_memory([&](std::uint64_t, StreamHandle) {
    closed = store->close();
    return false;
  });
  CHECK(pool.allocate(128 * kMiB, 0, 0, 0, &address).ok());
  CHECK(pool.suspend(nullptr, true, store, &bytes, nullptr).code == Code::out_of_memory);
  CHECK(closed.code == Code::deadlock && !store->closed() && store->live_bytes() == 0);
  CHECK(!pool.suspended(address) && store->close().ok());
}

TEST(contents_are_ranges_over_pieces) {
  const std::shared_ptr<Pool> store = make_store();
  const auto piece = [&](std::uint64_t bytes) {
    KeptPiece made{store, 0, bytes};
    CHECK(store->allocate_slow(bytes, 0, 0, 0, &made.host, nullptr).ok());
    return made;
  };
  Contents contents;
  const KeptPiece one = piece(100);
  contents.add(1000, one);
  contents.add(1100, piece(50));
  Contents::Pieces unused;
  contents.drop(1020, 10, unused);  // cuts a range in two
  CHECK(unused.empty() && contents.bytes() == 140 && contents.check(nullptr));
  std::vector<std::uint64_t> missing;
  contents.each_missing(990, 170, [&](Address at, std::uint64_t bytes) {
    missing.push_back(at);
    missing.push_back(bytes);
  });
  CHECK((missing == std::vector<std::uint64_t>{990, 10, 1020, 10, 1150, 10}));
  std::vector<Address> hosts;
  contents.each(1010, 40, [&](Address, Address host, std::uint64_t) { hosts.push_back(host); });
  CHECK((hosts == std::vector<Address>{one.host + 10, one.host + 30}));
  contents.drop(1000, 100, unused);
  CHECK(unused.size() == 1 && unused.contains(one.host) && contents.check(nullptr));
  std::size_t stores = 0;
  const auto count = [&](const std::shared_ptr<Allocator>& each) { stores += each == store ? 1 : 0; };
  contents.each_store(1000, 100, count);
  CHECK(stores == 0);
  contents.each_store(1100, 1, count);
  CHECK(stores == 1);
  contents.drop_all(unused);
  CHECK(unused.size() == 2 && contents.bytes() == 0 && contents.check(nullptr));
}

TEST_MAIN()
