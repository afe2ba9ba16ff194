// Recordings: every event once, in order, from any number of threads, and what does not fit is counted.
#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>
#include <utility>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "pool/pool.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

constexpr std::uint64_t kPlenty = 1 << 20;

bool in_order(const std::vector<JournalEntry>& entries) {
  for (std::size_t i = 1; i < entries.size(); ++i)
    if (entries[i].sequence <= entries[i - 1].sequence) return false;
  return true;
}

std::size_t count(const std::vector<JournalEntry>& entries, Action action) {
  std::size_t found = 0;
  for (const JournalEntry& entry : entries) found += entry.action == action ? 1 : 0;
  return found;
}

}  // namespace

TEST(a_journal_keeps_exactly_the_last_events) {
  for (const std::uint32_t keep : {1u, 7u, 4096u, 4097u, 10000u}) {
    JournalTape tape(keep);
    for (const std::uint64_t added :
         {std::uint64_t{keep} - 1, std::uint64_t{keep}, 3 * std::uint64_t{keep} + 5000}) {
      std::vector<JournalEntry> entries;
      tape.copy_to(entries);
      std::uint64_t next = tape.dropped() + entries.size();
      for (; next < added; ++next) {
        JournalEntry entry;
        entry.sequence = next;
        tape.add(entry);
      }
      entries.clear();
      tape.copy_to(entries);
      CHECK(entries.size() == std::min<std::uint64_t>(added, keep));
      CHECK(tape.dropped() + entries.size() == added);
      CHECK(in_order(entries) && (entries.empty() || entries.back().sequence == added - 1));
    }
  }
}

TEST(a_recording_has_every_event_once) {
  Pool pool(std::make_shared<ModelBackend>(kGiB), PoolConfig{});
  pool.start_recording(kPlenty);
  std::vector<JournalEntry> entries;
  for (int i = 0; i < 3 * static_cast<int>(kChunkEntries); ++i) {
    Address address = 0;
    CHECK(pool.allocate(1000, 0, 0, 7, &address).ok());
    CHECK(pool.free(address).ok());
    if (i % 1000 == 0) CHECK(pool.take_recorded(entries) == 0);
  }
  CHECK(pool.take_recorded(entries) == 0);
  CHECK(in_order(entries));
  CHECK(count(entries, Action::allocate) == 3 * kChunkEntries &&
        count(entries, Action::free) == 3 * kChunkEntries);
  CHECK(count(entries, Action::grow) == 1);
  pool.start_recording(0);
  Address address = 0;
  CHECK(pool.allocate(1000, 0, 0, 7, &address).ok() && pool.free(address).ok());
  entries.clear();
  CHECK(pool.take_recorded(entries) == 0 && entries.empty());
}

TEST(what_is_there_comes_first) {
  Pool pool(std::make_shared<ModelBackend>(kGiB), PoolConfig{});
  Address held = 0;
  CHECK(pool.allocate(5000, 0, 0, 7, &held).ok());
  pool.start_recording(kPlenty);
  pool.mark(3);
  std::vector<JournalEntry> entries;
  CHECK(pool.take_recorded(entries) == 0 && entries.size() == 3);
  CHECK(entries[0].action == Action::grow && entries[0].bytes == pool.stats().reserved.current);
  CHECK(entries[1].action == Action::allocate && entries[1].address == held && entries[1].bytes == 5000);
  CHECK(entries[2].action == Action::mark && entries[2].bytes == 3);
  CHECK(pool.free(held).ok());
}

TEST(what_does_not_fit_is_counted) {
  Pool pool(std::make_shared<ModelBackend>(kGiB), PoolConfig{});
  pool.start_recording(1);
  for (std::size_t i = 0; i < kChunkEntries; ++i) {
    Address address = 0;
    CHECK(pool.allocate(1000, 0, 0, 0, &address).ok() && pool.free(address).ok());
  }
  std::vector<JournalEntry> entries;
  const std::uint64_t dropped = pool.take_recorded(entries);
  CHECK(entries.size() == kChunkEntries && entries.size() + dropped == 2 * kChunkEntries + 1);
  // Room again.
  Address address = 0;
  CHECK(pool.allocate(1000, 0, 0, 0, &address).ok() && pool.free(address).ok());
  CHECK(pool.take_recorded(entries) == 0 && entries.size() == kChunkEntries + 2);
}

// Streams and threads of their own, one of which takes meanwhile: an address has one owner at a time.
TEST(threads_are_in_one_order) {
  constexpr int kThreads = 4;
  const int rounds = 20000 / testing::kSlowdown;
  auto backend = std::make_shared<HostBackend>(kGiB);
  Pool pool(backend, PoolConfig{});
  pool.start_recording(kPlenty);
  StreamHandle streams[kThreads];
  for (StreamHandle& stream : streams) CHECK(backend->stream_create(&stream).ok());
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) {
        Address address = 0;
        CHECK(pool.allocate(std::uint64_t{512} << (i % 12), streams[t], 0, 0, &address).ok());
        CHECK(pool.free(address).ok());
      }
      --running;
    });
  std::vector<JournalEntry> entries;
  std::uint64_t dropped = 0;
  while (running.load() != 0) dropped += pool.take_recorded(entries);
  for (std::thread& thread : threads) thread.join();
  dropped += pool.take_recorded(entries);
  CHECK(dropped == 0 && in_order(entries));
  CHECK(count(entries, Action::allocate) == static_cast<std::size_t>(kThreads * rounds));
  std::unordered_map<Address, bool> live;
  bool owned = true;
  for (const JournalEntry& entry : entries) {
    if (entry.action == Action::allocate) owned &= !std::exchange(live[entry.address], true);
    if (entry.action == Action::free) owned &= std::exchange(live[entry.address], false);
  }
  CHECK(owned);
  CHECK(pool.close().ok());
  for (const StreamHandle stream : streams) (void)backend->stream_destroy(stream);
}

TEST_MAIN()
