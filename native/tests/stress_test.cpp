// Four threads, each with streams of its own, allocate, fill, hand blocks to each other and free them, on
// real memory, and suspend, resume, grow, trim, configure and begin heaps in between. Every block carries a
// pattern that nobody else may disturb. The pool may be closed at any point. Captures are tried on the model
// device, which has no contents. Made for the sanitizers; the number of operations comes from
// VRAM_STRESS_OPS.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::FarHost;
using vram::testing::Random;

namespace {

constexpr int kThreads = 4;
constexpr std::uint64_t kDefaultOps = 2'000'000;

struct Held {
  Address address = 0;
  std::uint64_t size = 0;
  std::uint64_t pattern = 0;
};

// Blocks on their way to another thread, which will check and free them.
class Mailbox {
 public:
  void put(const Held& block) {
    std::lock_guard lock(mutex_);
    blocks_.push_back(block);
  }
  std::vector<Held> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(blocks_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Held> blocks_;
};

// Words at the block's beginning, middle and end: enough to see a foreign write, cheap enough for millions.
std::array<char*, 3> words(const Held& block) {
  char* const at = reinterpret_cast<char*>(block.address);
  return {at, at + block.size / 2, at + block.size - sizeof block.pattern};
}
bool has_room(const Held& block) { return block.size >= 4 * sizeof block.pattern; }
void write_pattern(const Held& block) {
  if (!has_room(block)) return;
  for (char* word : words(block)) std::memcpy(word, &block.pattern, sizeof block.pattern);
}
bool holds_pattern(const Held& block) {
  if (!has_room(block)) return true;
  for (const char* word : words(block))
    if (std::memcmp(word, &block.pattern, sizeof block.pattern) != 0) return false;
  return true;
}

bool is_zero(const Held& block) {
  if (!has_room(block)) return true;
  constexpr std::uint64_t kNothing = 0;
  for (const char* word : words(block))
    if (std::memcmp(word, &kNothing, sizeof kNothing) != 0) return false;
  return true;
}

std::uint64_t operations() {
  const char* const wanted = std::getenv("VRAM_STRESS_OPS");
  return wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : kDefaultOps;
}

class Crew {
 public:
  Crew(const char* name, const PoolConfig& config, std::uint64_t capacity)
      : Crew(name, config, std::make_shared<HostBackend>(capacity)) {}
  Crew(const char* name, const PoolConfig& config, std::shared_ptr<HostBackend> host)
      : name_(name), config_(config), host_(std::move(host)), pool_(host_, config) {
    store_ = std::make_shared<Pool>(std::make_shared<HostBackend>(kGiB), vram::testing::plain());
  }

  void run(std::uint64_t total) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number)
      threads.emplace_back([this, number, total] { work(number, total / kThreads); });
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("     %s: %llu operations, %.0f a second\n", name_, static_cast<unsigned long long>(total),
                static_cast<double>(total) / took.count());
    for (Mailbox& mailbox : mailboxes_)
      for (const Held& block : mailbox.take()) give(block);
    CHECK(damaged_ == 0);
    CHECK(missed_ < total / 4);  // else nothing much was tried
    CHECK(refused_ == 0);
    CHECK(pool_.live_bytes() == 0);
    std::string why;
    const bool good = pool_.check(&why);
    if (!good) std::printf("     %s\n", why.c_str());
    CHECK(good);
    CHECK(pool_.trim(0, true).ok());
    CHECK(pool_.stats().reserved.current == 0);
    CHECK(store_->live_bytes() == 0);
    CHECK(pool_.close().ok());
  }

  // The pool is closed while the threads work, after so many operations; and the store, if it comes first.
  void run_until_closed(std::uint64_t pool_after, std::uint64_t store_after) {
    closing_ = true;
    rare_ = 1000;
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number)
      threads.emplace_back([this, number] { work(number, ~std::uint64_t{0}); });
    const auto close_after = [this](std::uint64_t count, Pool& pool) {
      while (done_ < count) std::this_thread::yield();
      CHECK(pool.close().ok());
    };
    if (store_after < pool_after) close_after(store_after, *store_);
    close_after(pool_after, pool_);
    for (std::thread& thread : threads) thread.join();
    CHECK(damaged_ == 0 && refused_ == 0 && host_->synchronize().ok());
    std::uint64_t free_bytes = 0, total_bytes = 0;
    CHECK(host_->memory_info(&free_bytes, &total_bytes).ok() && free_bytes == total_bytes);
  }

 private:
  static constexpr std::size_t kMost = 64;     // blocks of a thread
  static constexpr std::size_t kSleepers = 6;  // and those that it suspends

  struct Worker {
    int number = 0;
    Random random{0};
    std::array<StreamHandle, 2> streams{};
    std::vector<Held> held;
    std::vector<Held> sleepers;  // tagged; nobody else touches them
    Held growing;                // a growable buffer, its length in `size`
    std::uint32_t tag() const { return static_cast<std::uint32_t>(number) + 1; }
  };

  // Counts what was refused that must not be.
  void must(const Status& status) {
    refused_ += status.ok() || (closing_ && status.code == Code::closed) ? 0 : 1;
  }
  // The same, but for memory that there is not.
  bool may(const Status& status) {
    const bool missed = status.code == Code::out_of_memory;
    missed_ += missed ? 1 : 0;
    if (!missed) must(status);
    return status.ok();
  }

  // Touches memory of the pool, or queues work that does, unless the pool is closed.
  template <class Touch>
  void touch(Touch use) {
    const Allocator::Access access(pool_);
    if (!access.refused()) use();
  }

  void work(int number, std::uint64_t count) {
    Worker me;
    me.number = number;
    me.random = Random(static_cast<std::uint64_t>(number) + 1);
    for (StreamHandle& stream : me.streams) must(host_->stream_create(&stream));
    for (std::uint64_t i = 0; i < count && !pool_.closed(); ++i) {
      if (closing_) ++done_;
      const std::uint64_t dice = me.random.below(10000);
      if (dice < 5000 && me.held.size() < kMost) {
        take(me, me.streams[me.random.below(2)], 0, me.held);
      } else if (dice < 9000 || me.held.size() >= kMost) {
        if (me.held.empty()) continue;
        std::swap(me.held[me.random.below(me.held.size())], me.held.back());
        if (me.random.chance(80)) {
          give(me.held.back());
        } else {
          mailboxes_[me.random.below(kThreads)].put(me.held.back());
        }
        me.held.pop_back();
      } else if (dice < 10000 - rare_) {
        for (const Held& block : mailboxes_[static_cast<std::size_t>(number)].take()) give(block);
      } else {
        rare(me);
      }
    }
    if (me.growing.address != 0) must(pool_.growable_close(me.growing.address));
    for (const Held& block : me.sleepers) give(block);
    for (const Held& block : me.held) give(block);
    for (const StreamHandle stream : me.streams) leave(stream);
  }

  void take(Worker& me, StreamHandle stream, std::uint32_t tag, std::vector<Held>& to) {
    static constexpr std::uint64_t kSizes[] = {0,     1,      24,   512,      513,     4096,
                                               40000, 300000, kMiB, kMiB + 1, 3 * kMiB};
    Held block;
    block.size = kSizes[me.random.below(me.random.chance(97) ? 8 : std::size(kSizes))];
    block.pattern = me.random.next();
    if (!may(pool_.allocate(block.size, stream, 0, tag, &block.address))) return;
    // The block is the stream's, in its order; the host may write only when the stream has got that far.
    settle(stream);
    touch([&] {
      if (config_.zero_on_allocate) damaged_ += is_zero(block) ? 0 : 1;
      write_pattern(block);
    });
    to.push_back(block);
  }
  void settle(StreamHandle stream) {
    if (!host_->stream_query(stream).ok()) must(host_->stream_synchronize(stream));
  }
  void give(const Held& block) {
    touch([&] { damaged_ += holds_pattern(block) ? 0 : 1; });
    must(pool_.free(block.address));
  }
  void leave(StreamHandle stream) {
    must(pool_.retire_stream(stream));
    must(host_->stream_destroy(stream));
  }
  // What takes long or stops others: work on another stream, housekeeping, looking, streams that come and go.
  void rare(Worker& me) {
    switch (me.random.below(18)) {
      case 0:
        return must(pool_.coalesce());
      case 1:
        return must(pool_.trim(me.random.below(64 * kMiB), me.random.chance(20)));
      case 2:
        (void)pool_.stats();
        return pool_.reset_peak();
      case 3:
        (void)pool_.snapshot();
        return;
      case 4:
        if (me.growing.address != 0) return;  // it is ordered by that stream
        leave(me.streams[1]);
        return must(host_->stream_create(&me.streams[1]));
      case 5: {
        std::string why;
        damaged_ += pool_.check(&why) || pool_.closed() ? 0 : 1;
        return;
      }
      case 6: {
        std::vector<Address> out;
        if (!pool_.allocate_batch({1000, 1000, 70000}, me.streams[0], 0, out, nullptr).ok()) return;
        for (const Address address : out) must(pool_.free(address));
        return;
      }
      case 7:  // never a live block: no block lies there
        if (const Status status = pool_.free(me.held.empty() ? 512 : me.held.back().address + 1);
            status.code != Code::invalid)
          refused_ += closing_ && status.code == Code::closed ? 0 : 1;
        return;
      case 8:
      case 9:
        return sleep(me);
      case 10:
      case 11:
      case 12:
        return grow(me);
      case 13:
        return in_a_heap(me);
      case 14:
        return reconfigured(me);
      default:
        return read_late(me);
    }
  }
  // Another stream reads the block after it was freed; the pool was told, by an address inside it, so the
  // pattern is still there.
  void read_late(Worker& me) {
    if (me.held.empty()) return;
    const Held block = me.held.back();
    me.held.pop_back();
    for (const StreamHandle stream : me.streams)
      touch([&] {
        must(pool_.record_stream(block.address + block.size / 2, stream));
        must(host_->launch(stream, [this, block] { damaged_ += holds_pattern(block) ? 0 : 1; }));
      });
    give(block);
  }
  // Blocks of this thread alone are suspended, perhaps some are freed meanwhile, and come back with their
  // contents or without.
  void sleep(Worker& me) {
    while (me.sleepers.size() < kSleepers) {
      const std::size_t before = me.sleepers.size();
      take(me, me.streams[0], me.tag(), me.sleepers);
      if (me.sleepers.size() == before) break;
    }
    const Pool::Wanted mine = [tag = me.tag()](std::uint32_t label) { return label == tag; };
    const bool keep = me.random.chance(60);
    std::uint64_t bytes = 0;
    const Status status = pool_.suspend(mine, keep, store_, &bytes, nullptr);
    if (status.code == Code::unsupported && !config_.pages) return;
    (void)may(status);
    take(me, me.streams[1], 0, me.held);
    if (me.random.chance(30) && !me.sleepers.empty()) {
      must(pool_.free(me.sleepers.back().address));
      me.sleepers.pop_back();
    }
    const bool back = may(pool_.resume(mine, &bytes, nullptr));
    for (const Held& block : me.sleepers) {
      if (pool_.suspended(block.address)) {
        refused_ += back ? 1 : 0;
        must(pool_.free(block.address));
        continue;
      }
      if (!keep) touch([&] { write_pattern(block); });
      give(block);
    }
    me.sleepers.clear();
  }
  // A growable buffer of the thread opens, grows, shrinks, is made ready ahead, and closes.
  void grow(Worker& me) {
    constexpr std::uint64_t kMax = 16 * kMiB;
    if (!config_.pages) return;
    Held& buffer = me.growing;
    if (buffer.address == 0) {
      buffer.size = 0;
      buffer.pattern = me.random.next();
      if (!may(pool_.growable_open(kMax, me.streams[1], &buffer.address))) buffer.address = 0;
      return;
    }
    settle(me.streams[1]);
    touch([&] { damaged_ += buffer.size == 0 || holds_pattern(buffer) ? 0 : 1; });
    if (me.random.chance(15)) {
      must(pool_.growable_close(buffer.address));
      buffer.address = 0;
      return;
    }
    const std::uint64_t wanted = me.random.below(kMax / kSlotBytes + 1) * kSlotBytes;
    const std::uint64_t ahead = me.random.chance(30) ? 2 * kSlotBytes : 0;
    if (may(pool_.growable_resize(buffer.address, wanted, ahead, me.tag() + kThreads))) buffer.size = wanted;
    settle(me.streams[1]);
    if (buffer.size != 0) touch([&] { write_pattern(buffer); });
  }
  // Memory apart, as a graph under capture gets it.
  void in_a_heap(Worker& me) {
    const HeapId id{me.tag(), me.random.next()};
    const StreamHandle mine = me.streams[0];
    must(pool_.heap_begin(id, [mine](StreamHandle stream) { return stream == mine; }));
    std::vector<Held> blocks;
    for (int i = 0; i < 8; ++i) {
      take(me, mine, 0, blocks);
      if (me.random.chance(30) && !blocks.empty()) {
        give(blocks.back());
        blocks.pop_back();
      }
    }
    must(pool_.heap_end(id));
    take(me, mine, 0, me.held);
    for (const Held& block : blocks) give(block);
    must(pool_.heap_release(id));
  }
  // Settings change under everybody's feet for a while.
  void reconfigured(Worker& me) {
    PoolConfig other = config_;
    other.stream_cache = static_cast<std::uint32_t>(me.random.below(64));
    other.release_threshold = me.random.chance(50) ? 8 * kMiB : ~std::uint64_t{0};
    other.max_page = me.random.chance(50) ? 2 * kMiB : 32 * kMiB;
    other.best_fit = me.random.chance(50);
    other.zero_on_allocate = config_.zero_on_allocate || me.random.chance(50);
    other.zero_on_free = config_.zero_on_free || me.random.chance(50);
    must(pool_.configure(other));
    for (int i = 0; i < 8; ++i) {
      take(me, me.streams[me.random.below(2)], 0, me.held);
      if (me.held.empty()) continue;
      give(me.held.front());
      me.held.erase(me.held.begin());
    }
    must(pool_.configure(config_));
  }

  const char* const name_;
  const PoolConfig config_;
  std::shared_ptr<HostBackend> host_;
  std::shared_ptr<Pool> store_;  // keeps the contents of what is suspended
  Pool pool_;
  std::array<Mailbox, kThreads> mailboxes_;
  std::atomic<std::uint64_t> missed_{0};  // out of memory
  std::atomic<int> damaged_{0};
  std::atomic<int> refused_{0};
  std::uint64_t rare_ = 10;  // of 10 000 operations
  bool closing_ = false;     // every call may be told that the pool is closed
  std::atomic<std::uint64_t> done_{0};
};

// Captures on several threads while others allocate, suspend and trim.
class Capturers {
 public:
  void run(std::uint64_t total) {
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number)
      threads.emplace_back([this, number, total] { work(number, total / kThreads); });
    for (std::thread& thread : threads) thread.join();
    CHECK(refused_ == 0);
    std::string why;
    const bool good = pool_.check(&why);
    if (!good) std::printf("     %s\n", why.c_str());
    CHECK(good);
    CHECK(pool_.live_bytes() == 0);
    device_->advance(1e6);
    CHECK(pool_.trim(0, true).ok());
    CHECK(pool_.stats().reserved.current == 0);
    CHECK(pool_.close().ok());
  }

 private:
  void must(bool good) { refused_ += good ? 0 : 1; }

  void work(int number, std::uint64_t count) {
    Random random(static_cast<std::uint64_t>(number) + 1);
    StreamHandle stream = 0;
    must(device_->stream_create(&stream).ok());
    std::vector<Address> held;
    std::vector<std::uint64_t> graphs;
    const auto take = [&] {
      Address address = 0;
      const std::uint64_t size = random.chance(80) ? random.below(100000) : random.below(40 * kMiB);
      if (pool_.allocate_slow(size, stream, 0, 0, &address, nullptr).ok()) held.push_back(address);
    };
    const auto give = [&] {
      if (held.empty()) return;
      std::swap(held[random.below(held.size())], held.back());
      must(pool_.free(held.back()).ok());
      held.pop_back();
    };
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t dice = random.below(100);
      if (dice < 50 && held.size() < 40) {
        take();
      } else if (dice < 92) {
        give();
      } else if (dice < 95) {
        std::uint64_t graph = 0;
        must(device_->capture_begin(stream).ok());
        for (int step = 0; step < 6; ++step) random.chance(60) ? take() : give();
        must(device_->capture_end(stream, &graph).ok());
        graphs.push_back(graph);
      } else if (dice < 98) {
        if (graphs.empty()) continue;
        if (random.chance(50)) must(device_->graph_launch(graphs.back(), stream).ok());
        must(device_->graph_destroy(graphs.back()).ok());
        graphs.pop_back();
      } else if (random.chance(90)) {
        device_->advance(100);
      } else {
        must(pool_.coalesce().ok());
      }
    }
    for (const std::uint64_t graph : graphs) must(device_->graph_destroy(graph).ok());
    while (!held.empty()) give();
  }

  std::shared_ptr<ModelBackend> device_ = std::make_shared<ModelBackend>(4 * kGiB);
  Pool pool_{device_, {}};
  std::atomic<int> refused_{0};
};

}  // namespace

TEST(with_pages_and_enough_memory) { Crew("pages", {}, 2 * kGiB).run(operations() / 4); }

TEST(with_pages_and_little_memory) {
  PoolConfig config;
  config.cross_stream = CrossStream::wait;
  config.stream_cache = 16;
  Crew("pages, little memory", config, 24 * kMiB).run(operations() / 4);
}

TEST(without_pages) {
  PoolConfig config;
  config.pages = false;
  config.journal = 64;
  Crew("plain", config, kGiB).run(operations() / 4);
}

TEST(without_sharing_between_streams) {
  PoolConfig config;
  config.cross_stream = CrossStream::never;
  config.release_threshold = 16 * kMiB;
  Crew("never", config, kGiB).run(operations() / 4);
}

// Every block is zeroed twice on its way, on a stream's thread, so there are fewer of them.
TEST(with_zeroing) {
  PoolConfig config;
  config.zero_on_allocate = config.zero_on_free = true;
  Crew("zeroing", config, kGiB).run(operations() / 100);
}

// On memory that the host does not zero at once, closed by another thread in the middle of anything.
TEST(closed_at_any_point) {
  Random random(5);
  const std::uint64_t rounds = 1 + std::min<std::uint64_t>(operations(), kDefaultOps) / 100'000;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    PoolConfig config;
    config.zero_on_free = round % 4 != 3;
    config.zero_on_allocate = round % 2 == 0;
    config.pages = round % 3 != 2;
    config.stream_cache = round % 5 == 0 ? 0 : 16;
    Crew("closing", config, std::make_shared<FarHost>(256 * kMiB))
        .run_until_closed(1 + random.below(3000), random.below(6000));
  }
}

TEST(with_captures) { Capturers().run(operations() / 100); }

TEST_MAIN()
