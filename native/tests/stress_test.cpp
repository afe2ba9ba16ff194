// Four threads, each with streams of its own, allocate, fill, hand blocks to each other and free them, on
// real memory. Every block carries a pattern that nobody else may disturb. Made for the sanitizers; the
// number of operations comes from VRAM_STRESS_OPS.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "backends/host.hpp"
#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
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

std::uint64_t operations() {
  const char* const wanted = std::getenv("VRAM_STRESS_OPS");
  return wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : kDefaultOps;
}

class Crew {
 public:
  Crew(const char* name, const PoolConfig& config, std::uint64_t capacity)
      : name_(name), host_(std::make_shared<HostBackend>(capacity)), pool_(host_, config) {}

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
    CHECK(pool_.check(&why));
    CHECK(pool_.trim(0, true).ok());
    CHECK(pool_.stats().reserved.current == 0);
    CHECK(pool_.close().ok());
  }

 private:
  static constexpr std::size_t kMost = 64;  // blocks of a thread

  void work(int number, std::uint64_t count) {
    Random random(static_cast<std::uint64_t>(number) + 1);
    std::array<StreamHandle, 2> streams{};
    for (StreamHandle& stream : streams) refused_ += host_->stream_create(&stream).ok() ? 0 : 1;
    std::vector<Held> held;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t dice = random.below(10000);
      if (dice < 5000 && held.size() < kMost) {
        take(random, streams[random.below(2)], held);
      } else if (dice < 9000 || held.size() >= kMost) {
        if (held.empty()) continue;
        std::swap(held[random.below(held.size())], held.back());
        if (random.chance(80)) {
          give(held.back());
        } else {
          mailboxes_[random.below(kThreads)].put(held.back());
        }
        held.pop_back();
      } else if (dice < 9995) {
        for (const Held& block : mailboxes_[static_cast<std::size_t>(number)].take()) give(block);
      } else {
        rare(random, streams, held);
      }
    }
    for (const Held& block : held) give(block);
    for (const StreamHandle stream : streams) leave(stream);
  }

  void take(Random& random, StreamHandle stream, std::vector<Held>& held) {
    static constexpr std::uint64_t kSizes[] = {0,     1,      24,   512,      513,     4096,
                                               40000, 300000, kMiB, kMiB + 1, 3 * kMiB};
    Held block;
    block.size = kSizes[random.below(random.chance(97) ? 8 : std::size(kSizes))];
    block.pattern = random.next();
    const Status status = pool_.allocate(block.size, stream, 0, 0, &block.address);
    if (status.code == Code::out_of_memory) {
      ++missed_;
      return;
    }
    if (!status.ok()) {
      ++refused_;
      return;
    }
    // The block is the stream's, in its order; the host may write only when the stream has got that far.
    if (!host_->stream_query(stream).ok()) refused_ += host_->stream_synchronize(stream).ok() ? 0 : 1;
    write_pattern(block);
    held.push_back(block);
  }
  void give(const Held& block) {
    damaged_ += holds_pattern(block) ? 0 : 1;
    refused_ += pool_.free(block.address).ok() ? 0 : 1;
  }
  void leave(StreamHandle stream) {
    refused_ += pool_.retire_stream(stream).ok() ? 0 : 1;
    refused_ += host_->stream_destroy(stream).ok() ? 0 : 1;
  }
  // What takes long or stops others: work on another stream, housekeeping, looking, streams that come and go.
  void rare(Random& random, std::array<StreamHandle, 2>& streams, std::vector<Held>& held) {
    switch (random.below(10)) {
      case 0:
        refused_ += pool_.coalesce().ok() ? 0 : 1;
        break;
      case 1:
        refused_ += pool_.trim(random.below(64 * kMiB), random.chance(20)).ok() ? 0 : 1;
        break;
      case 2:
        (void)pool_.stats();
        pool_.reset_peak();
        break;
      case 3:
        (void)pool_.snapshot();
        break;
      case 4:
        leave(streams[1]);
        refused_ += host_->stream_create(&streams[1]).ok() ? 0 : 1;
        break;
      case 5: {
        std::string why;
        damaged_ += pool_.check(&why) ? 0 : 1;
        break;
      }
      case 6: {
        std::vector<Address> out;
        if (!pool_.allocate_batch({1000, 1000, 70000}, streams[0], 0, out, nullptr).ok()) break;
        for (const Address address : out) refused_ += pool_.free(address).ok() ? 0 : 1;
        break;
      }
      case 7:  // never a live block: no block lies there
        refused_ += pool_.free(held.empty() ? 512 : held.back().address + 1).code == Code::invalid ? 0 : 1;
        break;
      default:
        read_late(streams, held);
    }
  }
  // Another stream reads the block after it was freed; the pool was told, so the pattern is still there.
  void read_late(const std::array<StreamHandle, 2>& streams, std::vector<Held>& held) {
    if (held.empty()) return;
    const Held block = held.back();
    held.pop_back();
    refused_ += pool_.record_stream(block.address, streams[0]).ok() ? 0 : 1;
    refused_ += pool_.record_stream(block.address, streams[1]).ok() ? 0 : 1;
    refused_ +=
        host_->launch(streams[0], [this, block] { damaged_ += holds_pattern(block) ? 0 : 1; }).ok() ? 0 : 1;
    refused_ +=
        host_->launch(streams[1], [this, block] { damaged_ += holds_pattern(block) ? 0 : 1; }).ok() ? 0 : 1;
    give(block);
  }

  const char* const name_;
  std::shared_ptr<HostBackend> host_;
  Pool pool_;
  std::array<Mailbox, kThreads> mailboxes_;
  std::atomic<std::uint64_t> missed_{0};  // out of memory
  std::atomic<int> damaged_{0};
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
  config.idle_limit = 16 * kMiB;
  Crew("never", config, kGiB).run(operations() / 4);
}

TEST_MAIN()
