// Page-locked memory: pieces are faulted in whole by several threads, a failure leaves nothing behind, copies
// follow the device's streams, and the pool over it reuses no block before its copies have finished.
#include "backends/pinned.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::holds_in_child;
using vram::testing::manual;

namespace {

constexpr std::uint64_t kPiece = 64 * kMiB;

Code code(Status status) { return status.code; }
unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

// Counts locked ranges in place of a driver, and fails on demand.
struct LockList {
  std::map<Address, std::uint64_t> locked;
  Status lock_answer;
  Status unlock_answer;
};
class CountingLock final : public PageLock {
 public:
  explicit CountingLock(LockList& locks) : locks_(locks) {}
  Status lock(Address address, std::uint64_t bytes, bool) override {
    if (locks_.lock_answer.ok()) locks_.locked[address] = bytes;
    return locks_.lock_answer;
  }
  Status unlock(Address address) override {
    if (locks_.unlock_answer.ok()) locks_.locked.erase(address);
    return locks_.unlock_answer;
  }

 private:
  LockList& locks_;
};

std::unique_ptr<PageLock> lock_in(LockList& locks) { return std::make_unique<CountingLock>(locks); }

// Bytes of anonymous memory of this process that are in physical memory now.
std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::uint64_t kib = 0;
    if (word == "RssAnon:" && file >> kib) return kib * kKiB;
  }
  return 0;
}

std::uint64_t resident_pages(Address address, std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in(bytes / page);
  if (mincore(reinterpret_cast<void*>(address), bytes, in.data()) != 0) return 0;
  std::uint64_t count = 0;
  for (const unsigned char each : in) count += each & 1;
  return count * page;
}

bool is_mapped(Address address) {
  unsigned char in = 0;
  return mincore(reinterpret_cast<void*>(address), 1, &in) == 0;
}

PoolConfig pinned_config() {
  PoolConfig config;
  config.pages = false;
  config.segment_size = kPiece;
  return config;
}

}  // namespace

TEST(a_piece_is_aligned_and_wholly_in_memory_however_many_threads) {
  for (const unsigned threads : {0u, 1u, 3u, 16u}) {
    PinnedBackend pinned(std::make_shared<HostBackend>(), threads);
    for (const std::uint64_t bytes : {kSlotBytes, 17 * kSlotBytes, kPiece}) {
      Address address = 0;
      REQUIRE(pinned.reserve(bytes, &address).ok());
      CHECK(address % kSlotBytes == 0);
      CHECK(resident_pages(address, bytes) == bytes);
      bytes_at(address)[0] = bytes_at(address)[bytes - 1] = 7;
      CHECK(pinned.release(address, bytes).ok());
      CHECK(!is_mapped(address));
    }
  }
}

TEST(a_piece_is_locked_as_a_whole_and_unlocked_before_it_goes) {
  LockList locks;
  PinnedBackend pinned(std::make_shared<HostBackend>(), lock_in(locks), 2);
  CHECK(pinned.pinned() && pinned.info().release_waits && pinned.info().host_accessible);
  CHECK(!pinned.info().pages && pinned.info().name == "pinned");
  Address address = 0;
  REQUIRE(pinned.reserve(kPiece, &address).ok());
  CHECK(locks.locked.size() == 1 && locks.locked[address] == kPiece);
  CHECK(pinned.release(address, kPiece).ok());
  CHECK(locks.locked.empty());
}

TEST(a_refused_lock_gives_the_drivers_code_and_leaves_nothing) {
  LockList locks;
  PinnedBackend pinned(std::make_shared<HostBackend>(), lock_in(locks), 2);
  Address address = 0;
  REQUIRE(pinned.reserve(kPiece, &address).ok());  // whatever threads and their stacks take, is taken
  REQUIRE(pinned.release(address, kPiece).ok());
  const std::uint64_t before = resident_bytes();
  locks.lock_answer = {Code::failed, 999, "cuMemHostRegister"};
  for (int i = 0; i < 5; ++i) {
    address = 0;
    const Status status = pinned.reserve(kPiece, &address);
    CHECK(status.code == Code::failed && status.native == 999);
    CHECK(std::strcmp(status.call, "cuMemHostRegister") == 0);
    CHECK(address == 0);
  }
  CHECK(resident_bytes() < before + kPiece / 2);
  locks.lock_answer = {};
  REQUIRE(pinned.reserve(kPiece, &address).ok());
  CHECK(pinned.release(address, kPiece).ok());
}

TEST(a_refused_unlock_keeps_the_piece) {
  LockList locks;
  PinnedBackend pinned(std::make_shared<HostBackend>(), lock_in(locks), 2);
  Address address = 0;
  REQUIRE(pinned.reserve(kSlotBytes, &address).ok());
  locks.unlock_answer = {Code::failed, 700, "cuMemHostUnregister"};
  CHECK(pinned.release(address, kSlotBytes).native == 700);
  CHECK(is_mapped(address));
  locks.unlock_answer = {};
  CHECK(pinned.release(address, kSlotBytes).ok());
  CHECK(code(pinned.release(address, kSlotBytes)) == Code::invalid);
}

TEST(what_is_left_goes_with_the_backend) {
  LockList locks;
  Address address = 0;
  {
    PinnedBackend pinned(std::make_shared<HostBackend>(), lock_in(locks), 2);
    REQUIRE(pinned.reserve(kPiece, &address).ok());
  }
  CHECK(locks.locked.empty() && !is_mapped(address));
}

TEST(more_than_the_machine_has_is_refused_and_not_faulted_in) {
  PinnedBackend pinned(std::make_shared<HostBackend>());
  std::uint64_t free_bytes = 0, total_bytes = 0;
  REQUIRE(pinned.memory_info(&free_bytes, &total_bytes).ok());
  CHECK(free_bytes > 0 && free_bytes <= total_bytes && total_bytes == pinned.info().total_bytes);
  Address address = 0;
  // All there is and not what is free now: another process may free as much in between.
  CHECK(code(pinned.reserve(total_bytes / kSlotBytes * kSlotBytes, &address)) == Code::out_of_memory);
  CHECK(code(pinned.reserve(total_bytes + kSlotBytes, &address)) == Code::out_of_memory);
  CHECK(code(pinned.reserve(kSlotBytes + 1, &address)) == Code::invalid);
  CHECK(code(pinned.reserve(0, &address)) == Code::invalid);
  PageHandle page = 0;
  CHECK(code(pinned.page_create(kSlotBytes, &page)) == Code::unsupported);
}

TEST(copies_follow_the_devices_streams) {
  const auto host = std::make_shared<HostBackend>();
  PinnedBackend pinned(host);
  CHECK(pinned.order() == host.get());
  Address here = 0, there = 0;
  REQUIRE(pinned.reserve(kSlotBytes, &here).ok());
  REQUIRE(host->reserve(kSlotBytes, &there).ok());
  StreamHandle stream = 0;
  REQUIRE(host->stream_create(&stream).ok());
  CHECK(pinned.fill(here, 9, kSlotBytes, stream).ok());
  CHECK(pinned.copy(there, here, kSlotBytes, stream).ok());
  CHECK(host->stream_synchronize(stream).ok());
  CHECK(bytes_at(there)[kSlotBytes - 1] == 9);
  CHECK(pinned.release(here, kSlotBytes).ok() && host->release(there, kSlotBytes).ok());
}

TEST(the_child_of_a_fork_reads_its_copy_and_is_refused_the_rest) {
  LockList locks;
  auto pinned = std::make_unique<PinnedBackend>(std::make_shared<HostBackend>(), lock_in(locks), 2);
  Address address = 0;
  REQUIRE(pinned->reserve(kSlotBytes, &address).ok());
  bytes_at(address)[5] = 5;
  CHECK(holds_in_child([&] {
    locks.unlock_answer = {Code::failed, 1, "the driver was called in a child"};
    Address other = 0;
    bool good = bytes_at(address)[5] == 5 && code(pinned->reserve(kSlotBytes, &other)) == Code::closed &&
                code(pinned->release(address, kSlotBytes)) == Code::closed;
    pinned.reset();
    good = good && locks.locked.size() == 1 && is_mapped(address);
    return good;
  }));
  CHECK(bytes_at(address)[5] == 5 && pinned->release(address, kSlotBytes).ok());
}

// ---- the pool over it -------------------------------------------------------------------------------------

TEST(blocks_share_large_pieces_without_rounding) {
  Pool pool(std::make_shared<PinnedBackend>(std::make_shared<ModelBackend>(kGiB)), pinned_config());
  std::vector<Address> held(8);
  for (Address& each : held) REQUIRE(pool.allocate(33 * kMiB, 0, 0, 0, &each).ok());
  CHECK(pool.stats().reserved.current == 8 * 33 * kMiB);
  for (const Address each : held) CHECK(pool.free(each).ok());
  Address whole = 0;
  REQUIRE(pool.allocate(66 * kMiB, 0, 0, 0, &whole).ok());  // two neighbours have merged
  Address small = 0;
  REQUIRE(pool.allocate(512, 0, 0, 0, &small).ok());  // and small blocks find room there, too
  CHECK(pool.stats().reserved.current == 8 * 33 * kMiB);
}

TEST(a_block_is_reused_only_when_its_copies_have_finished_on_its_own_stream_too) {
  const auto model = std::make_shared<ModelBackend>(kGiB, manual());
  Pool pool(std::make_shared<PinnedBackend>(model), pinned_config());
  StreamHandle stream = 0;
  REQUIRE(model->stream_create(&stream).ok());
  for (const StreamHandle used : {stream, StreamHandle{0}}) {
    Address first = 0, second = 0, third = 0;
    REQUIRE(pool.allocate(4 * kMiB, stream, 0, 0, &first).ok());
    REQUIRE(model->work(used, 1, first, 4 * kMiB).ok());
    REQUIRE(pool.record_stream(first, used).ok());
    REQUIRE(pool.free(first).ok());
    CHECK(pool.stats().pending_blocks == 1);
    REQUIRE(pool.allocate(4 * kMiB, stream, 0, 0, &second).ok());
    CHECK(second != first);
    CHECK(model->run_all());
    REQUIRE(pool.coalesce().ok());
    CHECK(pool.stats().pending_blocks == 0);
    REQUIRE(pool.allocate(4 * kMiB, stream, 0, 0, &third).ok());
    CHECK(third == first);
    CHECK(pool.free(second).ok() && pool.free(third).ok());
  }
}

TEST(where_the_driver_has_less_a_piece_is_as_large_as_needed) {
  ModelOptions options;
  options.pages = false;
  const auto model = std::make_shared<ModelBackend>(40 * kMiB, options);
  Pool pool(model, pinned_config());
  Address address = 0;
  REQUIRE(pool.allocate(33 * kMiB, 0, 0, 0, &address).ok());
  CHECK(pool.stats().reserved.current == 34 * kMiB);
  CHECK(code(pool.allocate(8 * kMiB, 0, 0, 0, &address)) == Code::out_of_memory);
  REQUIRE(pool.allocate(5 * kMiB, 0, 0, 0, &address).ok());
  CHECK(pool.stats().reserved.current == 40 * kMiB);
}

// ---- releases that wait -----------------------------------------------------------------------------------

TEST(nothing_is_released_by_a_waiting_call_while_work_runs_unless_asked) {
  ModelOptions options;
  options.pages = false;
  options.release_waits = true;
  const auto model = std::make_shared<ModelBackend>(kGiB, options);
  PoolConfig config;
  config.limit = 256 * kMiB;
  Pool pool(model, config);
  StreamHandle busy = 0;
  REQUIRE(model->stream_create(&busy).ok());
  std::vector<Address> held(4);
  for (Address& each : held) REQUIRE(pool.allocate(64 * kMiB, 0, 0, 0, &each).ok());
  for (const Address each : held) REQUIRE(pool.free(each).ok());
  CHECK(pool.trim(0, false).ok());  // asks when their last use has finished
  model->advance(1e5);              // it has
  model->set_lag(1e6);
  const double end = model->now() + 1e6;
  REQUIRE(model->work(busy, 1).ok());  // long, and somebody else's, of which the pool knows nothing
  model->set_lag(10);

  CHECK(pool.trim(0, false).ok());
  CHECK(pool.stats().reserved.current == 256 * kMiB);
  CHECK(model->calls("release") == 0 && model->counts().queued > 0);

  CHECK(pool.trim(128 * kMiB, true).ok());
  CHECK(pool.stats().reserved.current == 128 * kMiB);
  CHECK(model->busy_releases() == 1 && model->now() >= end);

  // The last rung gives segments back that are too small for the request.
  REQUIRE(model->work(busy, 2).ok());
  Address large = 0;
  REQUIRE(pool.allocate(256 * kMiB, 0, 0, 0, &large).ok());
  CHECK(pool.stats().rungs[static_cast<int>(Rung::give_back)] == 1);
  CHECK(pool.free(large).ok() && pool.close().ok());
  CHECK(model->counts().plain_ranges == 0);
}

TEST(where_releasing_does_not_wait_trim_gives_segments_back_at_once) {
  ModelOptions options;
  options.pages = false;
  const auto model = std::make_shared<ModelBackend>(kGiB, options);
  Pool pool(model, PoolConfig{});
  Address address = 0;
  REQUIRE(pool.allocate(64 * kMiB, 0, 0, 0, &address).ok());
  REQUIRE(pool.free(address).ok());
  model->advance(1e6);
  CHECK(pool.trim(0, false).ok());
  model->advance(1e6);  // past the fence that the first trim may have had to record
  CHECK(pool.trim(0, false).ok());
  CHECK(pool.stats().reserved.current == 0);
}

TEST_MAIN()
