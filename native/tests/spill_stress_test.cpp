// Spilling with real contents, streams and threads, on the host: every use of a block checks what the last
// one left there, on any stream, while pages move under it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::FarHost;

namespace {

constexpr std::uint64_t kStride = 4096;  // of the bytes that are written and checked

PoolConfig spilling() {
  PoolConfig config;
  config.spill = 256 * kMiB;
  config.spill_patience = 30.0;
  return config;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  std::uint64_t below(std::uint64_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return state_ % n;
  }

 private:
  std::uint64_t state_;
};

struct Shared {
  explicit Shared(int streams) : Shared(streams, std::make_shared<HostBackend>(kCapacity), spilling()) {}
  Shared(int streams, std::shared_ptr<HostBackend> on, const PoolConfig& config)
      : device(std::move(on)), pool(device, config) {
    for (int i = 0; i < streams; ++i) {
      StreamHandle stream = 0;
      CHECK(device->stream_create(&stream).ok());
      all.push_back(stream);
    }
  }
  // Whether a call did what it promises.
  bool good(const Status& status) const { return status.ok() || (closing && status.code == Code::closed); }
  static constexpr std::uint64_t kCapacity = 48 * kMiB;
  std::shared_ptr<HostBackend> device;
  Pool pool;
  std::vector<StreamHandle> all;
  bool closing = false;  // the pool may be closed at any time
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> operations{0};
};

// One thread with its own stream.
class Worker {
 public:
  Worker(Shared& shared, std::size_t number)
      : shared_(shared), random_(number + 1), stream_(shared.all[number]) {
    CHECK(shared_.device->event_create(&there_).ok() && shared_.device->event_create(&back_).ok());
  }
  ~Worker() {
    CHECK(shared_.device->event_destroy(there_).ok() && shared_.device->event_destroy(back_).ok());
  }

  void run(int steps) {
    for (int i = 0; i < steps && !shared_.pool.closed(); ++i) act();
    while (!held_.empty()) release(0);
  }

 private:
  struct Held {
    Address address = 0;
    std::uint64_t size = 0;
    std::uint8_t value = 0;
  };

  void act() {
    ++shared_.operations;
    const std::uint64_t dice = random_.below(100);
    if (dice < 35 || held_.empty()) return allocate();
    const std::size_t i = random_.below(held_.size());
    std::uint64_t moved = 0;
    if (dice < 65) {
      use(held_[i], stream_);
    } else if (dice < 72) {
      elsewhere(held_[i]);
    } else if (dice < 96) {
      release(i);
    } else if (dice < 98) {
      (void)shared_.pool.spill(held_[i].address, &moved);
    } else {
      (void)shared_.pool.prefetch(held_[i].address, &moved);
    }
  }
  void allocate() {
    static constexpr std::uint64_t kSizes[] = {512,      20 * kKiB, 300 * kKiB, kMiB,
                                               2 * kMiB, 3 * kMiB,  5 * kMiB};
    const std::uint64_t size = kSizes[random_.below(std::size(kSizes))];
    Held made{0, size, 0};
    if (held_.size() > 24 || !shared_.pool.allocate(size, stream_, 0, 0, &made.address).ok()) {
      if (!held_.empty()) release(random_.below(held_.size()));
      return;
    }
    write(made, stream_, false);
    held_.push_back(made);
  }
  // Checks what is there, unless it is new, and writes something else.
  void write(Held& block, StreamHandle on, bool check) {
    const Allocator::Access access(shared_.pool);
    if (access.refused()) return;
    const std::uint8_t before = block.value;
    block.value = static_cast<std::uint8_t>(before * 7 + random_.below(250) + 1);
    CHECK(
        shared_.device
            ->launch(on,
                     [this, address = block.address, size = block.size, before, after = block.value, check] {
                       auto* const bytes = reinterpret_cast<std::uint8_t*>(address);
                       bool good = true;
                       for (std::uint64_t at = 0; at < size; at += kStride) {
                         good = good && (!check || bytes[at] == before);
                         bytes[at] = after;
                       }
                       if (!good) ++shared_.wrong;
                     })
            .ok());
  }
  void use(Held& block, StreamHandle on) { write(block, on, true); }
  // On another stream, ordered by events alone: the pool does not know of it.
  void elsewhere(Held& block) {
    const Allocator::Access access(shared_.pool);
    if (access.refused()) return;
    const StreamHandle other = shared_.all[random_.below(shared_.all.size())];
    HostBackend& device = *shared_.device;
    CHECK(device.event_record(there_, stream_).ok() && device.stream_wait(other, there_).ok());
    use(block, other);
    CHECK(device.event_record(back_, other).ok() && device.stream_wait(stream_, back_).ok());
  }
  void release(std::size_t i) {
    use(held_[i], stream_);
    CHECK(shared_.good(shared_.pool.free_slow(held_[i].address)));
    held_[i] = held_.back();
    held_.pop_back();
  }

  Shared& shared_;
  Random random_;
  StreamHandle stream_;
  EventHandle there_ = 0;
  EventHandle back_ = 0;
  std::vector<Held> held_;
};

}  // namespace

TEST(contents_survive_on_many_streams_and_threads) {
  constexpr std::size_t kThreads = 4;
  const int steps = (std::getenv("VRAM_THOROUGH") != nullptr ? 100'000 : 10'000) / vram::testing::kSlowdown;
  Shared shared(kThreads);
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&shared, i, steps] { Worker(shared, i).run(steps); });
  std::thread upkeep([&] {
    std::string why;
    for (std::uint64_t moved = 0; !done; std::this_thread::sleep_for(std::chrono::milliseconds(3))) {
      (void)shared.pool.bring_back(8 * kMiB, &moved);
      (void)shared.pool.create_ahead(8 * kMiB, 2 * kMiB, &moved);
      CHECK(shared.pool.check(&why));
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  upkeep.join();
  CHECK(shared.device->synchronize().ok() && shared.wrong == 0);
  const PoolStats stats = shared.pool.stats();
  CHECK(stats.live == 0);
  CHECK(stats.spill.spilled_bytes > 0 && stats.spill.returned_bytes > 0);
  std::printf("     %llu operations, %llu swaps out, %llu back, %llu late\n",
              static_cast<unsigned long long>(shared.operations),
              static_cast<unsigned long long>(stats.spill.spills),
              static_cast<unsigned long long>(stats.spill.returns),
              static_cast<unsigned long long>(stats.spill.late));
  std::string why;
  CHECK(shared.pool.check(&why) && shared.pool.trim(0, true).ok());
  // Until now, freed blocks that nobody had asked about could still lie on host pages.
  CHECK(shared.pool.stats().spilled == 0 && shared.pool.stats().host == 0);
  CHECK(shared.pool.close().ok() && shared.device->check(&why));
}

TEST(a_stream_that_never_arrives_is_let_go) {
  Shared shared(2);
  PoolConfig config = spilling();
  config.spill_patience = 0.02;
  CHECK(shared.pool.configure(config).ok());
  std::atomic<bool> go{false};
  Address address = 0;
  CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
  CHECK(shared.device->fill(address, 5, 4 * kMiB, 0).ok());
  CHECK(shared.device
            ->launch(shared.all[0],
                     [&] {
                       while (!go) std::this_thread::yield();
                     })
            .ok());
  std::uint64_t moved = 0;
  CHECK(shared.pool.spill(address, &moved).code == Code::not_ready && moved == 0);
  // The others go on.
  CHECK(shared.device->fill(address, 6, 4 * kMiB, 0).ok() && shared.device->stream_synchronize(0).ok());
  CHECK(*reinterpret_cast<std::uint8_t*>(address) == 6 && shared.pool.stats().spill.late == 1);
  go = true;
  CHECK(shared.device->synchronize().ok() && shared.pool.spill(address, &moved).ok() && moved == 4 * kMiB);
  CHECK(*reinterpret_cast<std::uint8_t*>(address) == 6);
}

TEST(work_of_a_stream_that_needs_a_swap_does_not_wait_for_itself) {
  Shared shared(1);
  Address address = 0;
  std::uint64_t moved = 1;
  Status status;
  CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
  CHECK(shared.device->launch(0, [&] { status = shared.pool.spill(address, &moved); }).ok());
  CHECK(shared.device->synchronize().ok() && status.code == Code::deadlock && moved == 0);
}

TEST(a_function_on_a_stream_may_use_the_pool_during_a_swap) {
  Shared shared(2);
  Address address = 0, other = 0;
  std::uint64_t moved = 0;
  CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
  CHECK(shared.device
            ->launch(shared.all[1],
                     [&] {
                       std::this_thread::sleep_for(
                           std::chrono::milliseconds(20));  // the swap waits for this stream meanwhile
                       CHECK(shared.pool.allocate(2 * kMiB, shared.all[0], 0, 0, &other).ok());
                       CHECK(shared.pool.free_slow(other).ok() && shared.pool.free_slow(address).ok());
                     })
            .ok());
  CHECK(shared.pool.spill(address, &moved).ok());
  CHECK(shared.device->synchronize().ok() && shared.pool.stats().spilled == 0);
  std::string why;
  CHECK(shared.pool.check(&why));
}

// The suspend waits for the stream, whose function waits for the suspend: its allocation fails in time.
TEST(a_request_does_not_wait_for_a_suspend_that_waits_for_it) {
  Shared shared(1);
  PoolConfig config = spilling();
  config.spill_patience = 0.05;
  config.limit = 8 * kMiB;
  CHECK(shared.pool.configure(config).ok());
  Address address = 0, other = 0;
  CHECK(shared.pool.allocate(8 * kMiB, shared.all[0], 0, 0, &address).ok());
  Status status;
  CHECK(shared.device
            ->launch(shared.all[0],
                     [&] {
                       std::this_thread::sleep_for(std::chrono::milliseconds(30));
                       status = shared.pool.allocate(4 * kMiB, 0, 0, 0, &other);
                     })
            .ok());
  std::uint64_t given = 0;
  CHECK(shared.pool.suspend(nullptr, false, nullptr, &given, nullptr).ok());
  CHECK(!status.ok() || other != 0);
}

// Where zeros are queued, too, the pool is closed at any point of all this.
TEST(a_busy_pool_can_be_closed_at_any_point) {
  constexpr std::size_t kThreads = 3;
  Random random(3);
  for (int round = 0; round < 60 / vram::testing::kSlowdown; ++round) {
    PoolConfig config = spilling();
    config.zero_on_free = round % 2 == 0;
    config.zero_on_allocate = round % 3 == 0;
    Shared shared(kThreads, std::make_shared<FarHost>(Shared::kCapacity), config);
    shared.closing = true;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kThreads; ++i)
      threads.emplace_back([&shared, i] { Worker(shared, i).run(100'000); });
    const std::uint64_t count = random.below(600);
    while (shared.operations < count) std::this_thread::yield();
    CHECK(shared.pool.close().ok());
    for (std::thread& thread : threads) thread.join();
    std::string why;
    CHECK(shared.device->synchronize().ok() && shared.wrong == 0 && shared.device->check(&why));
  }
}

TEST(a_pool_can_be_closed_in_the_middle_of_a_swap) {
  for (int round = 0; round < 20; ++round) {
    Shared shared(2);
    std::vector<Address> blocks(4);
    for (Address& address : blocks) CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
    std::vector<std::thread> threads;
    for (const Address address : blocks)
      threads.emplace_back([&shared, address] {
        std::uint64_t moved = 0;
        Status status;
        while (status.code != Code::closed) {
          status = shared.pool.spill(address, &moved);
          if (status.ok()) status = shared.pool.prefetch(address, &moved);
          CHECK(status.ok() || status.code == Code::closed);
        }
      });
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 5));
    CHECK(shared.pool.close().ok());
    for (std::thread& thread : threads) thread.join();
    std::string why;
    CHECK(shared.device->check(&why));
  }
}

// Tags are parked and return while threads use, free and allocate their memory.
TEST(contents_survive_while_tags_are_parked) {
  constexpr std::size_t kThreads = 3;
  Shared shared(kThreads);
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&shared, i] { Worker(shared, i).run(3000 / vram::testing::kSlowdown); });
  std::uint64_t parked = 0;
  std::thread parking([&] {
    for (std::uint64_t moved = 0; !done;) {
      const Status there = shared.pool.park(nullptr, &moved);
      parked += moved;
      CHECK(there.ok() || there.code == Code::out_of_memory || there.code == Code::not_ready);
      const Status back = shared.pool.unpark(nullptr, &moved);
      CHECK(back.ok() || back.code == Code::out_of_memory || back.code == Code::not_ready);
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  parking.join();
  std::string why;
  CHECK(shared.device->synchronize().ok() && shared.wrong == 0 && parked > 0);
  CHECK(shared.pool.check(&why) && shared.pool.stats().live == 0);
  CHECK(shared.pool.coalesce().ok() && shared.pool.stats().parked == 0);  // freed blocks leave their pages
  CHECK(shared.pool.close().ok() && shared.device->check(&why));
}

TEST(a_pool_can_be_closed_while_a_tag_is_parked) {
  for (int round = 0; round < 10; ++round) {
    Shared shared(2);
    std::vector<Address> blocks(4);
    for (Address& address : blocks) CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
    std::thread parking([&] {
      Status status;
      for (std::uint64_t moved = 0; status.code != Code::closed;) {
        status = shared.pool.park(nullptr, &moved);
        if (status.ok()) status = shared.pool.unpark(nullptr, &moved);
        CHECK(status.ok() || status.code == Code::closed);
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 5));
    CHECK(shared.pool.close().ok());
    parking.join();
    std::string why;
    CHECK(shared.device->check(&why));
  }
}

TEST(two_pools_on_one_device_take_turns) {
  Shared shared(2);
  Pool second(shared.device, spilling());
  std::vector<std::thread> threads;
  for (Pool* const pool : {&shared.pool, &second})
    threads.emplace_back([pool] {
      Address address = 0;
      CHECK(pool->allocate(2 * kMiB, 0, 0, 0, &address).ok());
      for (int i = 0; i < 200; ++i) {
        std::uint64_t moved = 0;
        CHECK(pool->spill(address, &moved).ok() && moved == 2 * kMiB);
        CHECK(pool->prefetch(address, &moved).ok() && moved == 2 * kMiB);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(second.close().ok());
}

TEST(a_fork_in_the_middle_of_a_swap_leaves_the_parent_alone) {
  Shared shared(1);
  Address address = 0;
  CHECK(shared.pool.allocate(4 * kMiB, 0, 0, 0, &address).ok());
  CHECK(shared.device->fill(address, 9, 4 * kMiB, 0).ok());
  std::atomic<bool> done{false};
  std::thread swapping([&] {
    for (std::uint64_t moved = 0; !done;) {
      CHECK(shared.pool.spill(address, &moved).ok() && shared.pool.prefetch(address, &moved).ok());
    }
  });
  for (int i = 0; i < 10; ++i)
    CHECK(vram::testing::holds_in_child([&] {
      std::uint64_t moved = 0;
      return shared.pool.spill(address, &moved).code == Code::closed && shared.pool.close().ok();
    }));
  done = true;
  swapping.join();
  CHECK(shared.device->synchronize().ok());
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(address);
  CHECK(std::all_of(bytes, bytes + 4 * kMiB, [](std::uint8_t byte) { return byte == 9; }));
}

TEST_MAIN()
