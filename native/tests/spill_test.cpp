// Spilling: contents move between device and host pages under the same addresses. On the model, stamps stand
// for contents (ModelBackend::stamp): a swap that loses or reorders an update is seen. Real contents and
// threads are in spill_stress_test.cpp.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <thread>

#include "pool/growables.hpp"
#include "pool/turn.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::World;
using Location = ModelBackend::Location;

namespace {

constexpr std::uint64_t kCapacity = 32 * kMiB;
constexpr std::uint64_t kBlock = 4 * kMiB;

PoolConfig spilling(std::uint64_t bytes = kGiB) {
  PoolConfig config;
  config.spill = bytes;
  config.spill_patience = 1.0;
  return config;
}
ModelOptions stamps(Schedule schedule = Schedule::lag) {
  ModelOptions options;
  options.schedule = schedule;
  options.lag_us = 100;
  options.stamps = true;
  return options;
}

// A pool whose program knows what each of its blocks should contain. Blocks consist of whole slots.
struct Program {
  explicit Program(const PoolConfig& config = spilling(), const ModelOptions& options = stamps(),
                   std::uint64_t capacity = kCapacity)
      : world(capacity, config, options) {}

  struct Held {
    std::uint64_t bytes = 0;
    StreamHandle stream = 0;
    std::uint64_t stamp = 0;
  };

  Address get(std::uint64_t bytes = kBlock, StreamHandle on = 0, std::uint32_t tag = 0) {
    Address address = 0;
    if (!world.pool->allocate(bytes, on, kSlotBytes, tag, &address).ok()) return 0;
    const std::uint8_t value = static_cast<std::uint8_t>(++values);
    // A failed fill leaves what was there; so does the next one.
    for (int i = 0; i < 5; ++i)
      if (world.device->fill(address, value, bytes, on).ok()) break;
    held[address] = {bytes, on, ModelBackend::stamped(0, value)};
    return address;
  }
  // 0 if nothing is held. below(n): a number below n.
  template <class Below>
  Address any_held(Below below) const {
    if (held.empty()) return 0;
    return std::next(held.begin(), static_cast<std::ptrdiff_t>(below(held.size())))->first;
  }
  bool use(Address address) {
    Held& block = held.at(address);
    if (!world.device->work(block.stream, ++ids, address, block.bytes).ok()) return false;
    block.stamp = ModelBackend::stamped(block.stamp, ids);
    return true;
  }
  bool drop(Address address) {
    held.erase(address);
    return world.pool->free_slow(address).ok();
  }
  bool spill(Address address, std::uint64_t* moved = nullptr) {
    std::uint64_t bytes = 0;
    return world.pool->spill(address, moved != nullptr ? moved : &bytes).ok();
  }
  bool prefetch(Address address) {
    std::uint64_t moved = 0;
    return world.pool->prefetch(address, &moved).ok();
  }
  Location where(Address address) const { return world.device->location(address); }
  // Everything queued has run, and all contents are right.
  bool right() {
    if (!world.device->run_all() || world.device->faults() != 0) return false;
    for (const auto& [address, block] : held)
      for (std::uint64_t at = 0; at < block.bytes; at += kSlotBytes)
        if (world.device->stamp(address + at) != block.stamp) return false;
    return world.good();
  }
  // Nothing is left after the end.
  bool ends() {
    world.device->clear_failures();
    while (!held.empty())
      if (!drop(held.begin()->first)) return false;
    if (!world.pool->trim(0, true).ok()) return false;
    const PoolStats stats = world.stats();
    if (stats.host != 0 || stats.spilled != 0 || stats.reserved.current != 0) return false;
    if (!world.good() || !world.pool->close().ok()) return false;
    const ModelCounts left = world.device->counts();
    return left.pages == 0 && left.mappings == 0 && left.spaces == 0 && left.events == 0 && left.gates == 0;
  }

  World world;
  std::map<Address, Held> held;
  std::uint64_t ids = 0;
  std::uint64_t values = 0;
};

}  // namespace

TEST(a_pool_that_is_full_spills_and_goes_on) {
  Program program;
  std::vector<Address> blocks;
  for (int i = 0; i < 16; ++i) {
    blocks.push_back(program.get());
    REQUIRE(blocks.back() != 0 && program.use(blocks.back()));
  }
  CHECK(program.right());
  const PoolStats stats = program.world.stats();
  CHECK(stats.live == 16 * kBlock && stats.reserved.current <= kCapacity);
  CHECK(stats.spilled >= 16 * kBlock - kCapacity && stats.spilled == stats.spilled_live);
  CHECK(stats.host == stats.spilled && stats.spill.spilled_bytes >= stats.spilled);
  CHECK(stats.rungs[static_cast<int>(Rung::spill)] > 0);
  // The oldest went first, and the youngest is on the device.
  CHECK(program.where(blocks[0]) == Location::host && program.where(blocks[15]) == Location::device);
  // Work on both sides.
  for (const Address address : blocks) CHECK(program.use(address));
  CHECK(program.right());
  CHECK(program.ends());
}

TEST(without_spill_nothing_changes) {
  Program program(PoolConfig{});
  for (int i = 0; i < 8; ++i) CHECK(program.get() != 0);
  CHECK(program.get() == 0 && program.world.stats().host == 0);
  CHECK(!program.spill(program.held.begin()->first));
  CHECK(program.world.device->calls("gate_close") == 0 && program.ends());
}

TEST(freed_memory_brings_pages_back) {
  Program program;
  std::vector<Address> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(program.get());
  CHECK(program.world.stats().spilled >= 4 * kBlock);
  std::uint64_t returned = 0;
  // Not while memory is scarce.
  CHECK(program.world.pool->bring_back(kGiB, &returned).ok() && returned == 0);
  for (int i = 6; i < 12; ++i) CHECK(program.drop(blocks[static_cast<std::size_t>(i)]));
  CHECK(program.right());
  // A fence tells that what was freed is not in use.
  CHECK(program.world.pool->bring_back(kBlock, &returned).ok() && program.world.device->run_all());
  // Bounded by what the caller allows, and a margin stays free.
  CHECK(program.world.pool->bring_back(kBlock, &returned).ok() && returned > 0 && returned <= kBlock);
  for (int i = 0; i < 8; ++i) CHECK(program.world.pool->bring_back(kBlock, &returned).ok());
  CHECK(returned == 0 && program.world.stats().spilled == 0);
  for (int i = 0; i < 6; ++i) {
    CHECK(program.where(blocks[static_cast<std::size_t>(i)]) == Location::device);
    CHECK(program.use(blocks[static_cast<std::size_t>(i)]));
  }
  CHECK(program.right() && program.ends());
}

TEST(pages_that_should_have_gone_last_return_first) {
  Program program;
  const Address first = program.get(), last = program.get(), other = program.get();
  program.world.pool->steer_spill({{first, SpillWish::first}, {last, SpillWish::last}});
  std::uint64_t moved = 0;
  for (const Address address : {last, other, first}) CHECK(program.use(address) && program.spill(address));
  for (const Address address : {last, other, first}) {
    CHECK(program.where(address) == Location::host);
    CHECK(program.world.pool->bring_back(kBlock, &moved).ok() && moved == kBlock);
    CHECK(program.where(address) == Location::device);
  }
  CHECK(program.right() && program.ends());
}

TEST(pages_return_to_memory_that_is_still_in_use_if_the_caller_waits) {
  Program program;
  std::vector<Address> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(program.get());
  for (int i = 6; i < 12; ++i) {
    CHECK(program.use(blocks[static_cast<std::size_t>(i)]));
    CHECK(program.drop(blocks[static_cast<std::size_t>(i)]));
  }
  std::uint64_t returned = 0;
  const std::uint64_t there = program.world.stats().spilled;
  CHECK(there != 0 && program.world.pool->bring_back(kGiB, &returned).ok() && returned == 0);
  CHECK(program.world.pool->bring_back(kGiB, &returned, true).ok() && returned == there);
  CHECK(program.right() && program.ends());
}

TEST(a_block_can_be_spilled_and_fetched_by_hand) {
  Program program;
  const Address a = program.get();
  CHECK(program.use(a));
  std::uint64_t moved = 0, spilled = 0;
  CHECK(program.spill(a, &moved) && moved >= kBlock && program.where(a) == Location::host);
  CHECK(program.world.pool->spilled(a + kUnit, &spilled).ok() && spilled == kBlock);
  CHECK(program.spill(a, &moved) && moved == 0);
  CHECK(program.use(a) && program.right());
  CHECK(program.prefetch(a) && program.where(a) == Location::device);
  CHECK(program.world.pool->spilled(a, &spilled).ok() && spilled == 0);
  CHECK(program.use(a) && program.right());
  // The host page is kept for the next time.
  const std::uint64_t created = program.world.device->calls("host_page_create");
  CHECK(program.world.stats().host >= kBlock && program.spill(a));
  CHECK(program.world.device->calls("host_page_create") == created);
  CHECK(!program.spill(a + kGiB) && !program.prefetch(12345) && program.right());
  CHECK(program.ends());
}

TEST(host_pages_are_created_ahead_of_need) {
  Program program;
  Pool& pool = *program.world.pool;
  ModelBackend& device = *program.world.device;
  std::uint64_t created = 1;
  CHECK(pool.create_ahead(kGiB, kGiB, &created).ok() && created == 0);  // there is nothing that could go
  for (int i = 0; i < 8; ++i) CHECK(program.get() != 0);
  CHECK(pool.create_ahead(3 * kBlock, kBlock, &created).ok() && created == kBlock);
  CHECK(pool.create_ahead(3 * kBlock, kGiB, &created).ok() && created == 2 * kBlock);
  CHECK(pool.create_ahead(3 * kBlock, kGiB, &created).ok() && created == 0);
  CHECK(program.world.stats().host == 3 * kBlock && program.world.stats().spilled == 0);
  const std::uint64_t calls = device.calls("host_page_create");
  for (int i = 0; i < 3; ++i) CHECK(program.get() != 0);
  CHECK(program.world.stats().spilled == 3 * kBlock && device.calls("host_page_create") == calls);
  // What was taken is replaced, and never more than all that can go.
  CHECK(pool.create_ahead(kGiB, kGiB, &created).ok() && created == kCapacity);
  CHECK(program.right() && pool.trim(0, true).ok() && program.world.stats().host == 3 * kBlock);
  CHECK(program.ends());
}

TEST(host_pages_ahead_stay_within_the_budget) {
  Program program(spilling(2 * kBlock));
  Pool& pool = *program.world.pool;
  for (int i = 0; i < 4; ++i) CHECK(program.get() != 0);
  std::uint64_t created = 0;
  CHECK(pool.create_ahead(kGiB, kGiB, &created).ok() && created == 2 * kBlock);
  // Pages of other sizes take their place if those are needed.
  std::vector<Address> small;
  for (int i = 0; i < 4; ++i) small.push_back(program.get(kSlotBytes));
  for (const Address address : small) CHECK(program.spill(address));
  CHECK(program.world.stats().spilled == 4 * kSlotBytes && program.world.stats().host <= 2 * kBlock);
  CHECK(program.right() && program.ends());
}

TEST(a_thread_that_takes_one_turn_after_the_other_lets_others_in) {
  TurnMutex mutex;
  std::atomic<int> turns{0};
  std::atomic<bool> done{false};
  std::thread busy([&] {
    while (!done) {
      const Turn turn(mutex);
      ++turns;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  int waited = 0;
  constexpr int kRounds = 20;
  for (int i = 0; i < kRounds; ++i) {
    for (const int before = turns; turns < before + 2;) std::this_thread::yield();
    const int before = turns;
    const Turn turn(mutex);
    CHECK(turn.ours());
    waited += turns - before;
  }
  done = true;
  busy.join();
  CHECK(waited < 20 * kRounds);
}

TEST(a_turn_that_is_late_is_told_from_one_that_would_never_come) {
  TurnMutex mutex;
  const Turn turn(mutex);
  const Turn own(mutex), bounded(mutex, 0.01);
  CHECK(!own.ours() && !own.late() && !bounded.ours() && !bounded.late());
  std::thread([&] {
    const Turn other(mutex, 0.01);
    CHECK(!other.ours() && other.late());
  }).join();
}

TEST(others_have_a_part_of_the_budget) {
  Program program(spilling(3 * kBlock));
  Pool& pool = *program.world.pool;
  for (int i = 0; i < 8; ++i) CHECK(program.get() != 0);
  std::uint64_t created = 0;
  CHECK(pool.create_ahead(3 * kBlock, kGiB, &created).ok() && created == 3 * kBlock);
  CHECK(pool.take_host_bytes(3 * kBlock + 1).code == Code::out_of_memory);
  CHECK(pool.take_host_bytes(kBlock + 1).ok());  // spare pages make room
  CHECK(program.world.stats().host < 2 * kBlock);
  CHECK(pool.take_host_bytes(kBlock).ok() && program.world.stats().host < kBlock);
  CHECK(program.get() == 0);  // what is left is too little for a page
  pool.give_host_bytes(kBlock + 1);
  CHECK(program.get() == 0);  // it is kept for the next time
  CHECK(pool.release_host_bytes().ok());
  CHECK(program.get() != 0 && program.get() != 0 && program.world.stats().spilled == 2 * kBlock);
  CHECK(pool.take_host_bytes(1).code == Code::out_of_memory && program.get() == 0);
  CHECK(pool.create_ahead(kGiB, kGiB, &created).ok() && created == 0);
  pool.give_host_bytes(kBlock);
  CHECK(pool.take_host_bytes(kBlock).ok());
  pool.give_host_bytes(kGiB);  // more than was taken
  CHECK(pool.release_host_bytes().ok());
  CHECK(program.get() != 0 && program.right() && program.ends());
  CHECK(pool.take_host_bytes(1).code == Code::closed);
}

TEST(creating_host_pages_ahead_may_fail) {
  ModelOptions options = stamps();
  options.host_bytes = 2 * kBlock;
  Program program(spilling(), options);
  Pool& pool = *program.world.pool;
  for (int i = 0; i < 4; ++i) CHECK(program.get() != 0);
  std::uint64_t created = 0;
  CHECK(pool.create_ahead(4 * kBlock, kGiB, &created).code == Code::out_of_memory && created == 2 * kBlock);
  CHECK(program.world.good() && program.world.stats().host == 2 * kBlock);
  CHECK(program.world.device->fail("host_page_create", 1, {Code::failed, 2, "host_page_create"}));
  CHECK(!pool.create_ahead(4 * kBlock, kGiB, &created).ok() && created == 0);
  CHECK(program.right() && program.ends() && pool.create_ahead(kGiB, kGiB, &created).code == Code::closed);
}

TEST(freed_host_pages_are_not_given_to_requests) {
  Program program;
  const Address a = program.get();
  CHECK(program.spill(a) && program.drop(a));
  const Address b = program.get();
  CHECK(program.where(b) == Location::device && program.world.stats().spilled == 0);
  // Nor what is free beside a live block on a host page.
  Address small = 0;
  CHECK(program.world.pool->allocate(kMiB, 0, 0, 0, &small).ok());
  std::uint64_t moved = 0;
  CHECK(program.world.pool->spill(small, &moved).ok() && program.where(small) == Location::host);
  Address next = 0;
  CHECK(program.world.pool->allocate(kMiB, 0, 0, 0, &next).ok() && program.where(next) == Location::device);
  // Nor a block that a cache would have kept.
  CHECK(program.world.pool->free_slow(small).ok());
  Address again = 0;
  CHECK(program.world.pool->allocate(kMiB, 0, 0, 0, &again).ok() && program.where(again) == Location::device);
  CHECK(program.right());
  CHECK(program.world.pool->free_slow(next).ok() && program.world.pool->free_slow(again).ok());
  CHECK(program.ends());
}

TEST(blocks_that_returned_are_cached_again) {
  Program program;
  Address a = 0;
  std::uint64_t moved = 0;
  Pool& pool = *program.world.pool;
  CHECK(pool.allocate(100 * kKiB, 0, 0, 0, &a).ok() && pool.free_slow(a).ok());
  CHECK(pool.allocate(100 * kKiB, 0, 0, 0, &a).ok());
  CHECK(pool.spill(a, &moved).ok() && moved != 0 && pool.prefetch(a, &moved).ok() && moved != 0);
  CHECK(pool.free_slow(a).ok() && pool.stats().cached_blocks == 1);
  CHECK(pool.allocate(100 * kKiB, 0, 0, 0, &a).ok() && pool.spill(a, &moved).ok() && moved != 0);
  CHECK(pool.free_slow(a).ok() && pool.stats().cached_blocks == 0);
  CHECK(program.right() && program.ends());
}

TEST(wishes_steer_what_goes) {
  Program program;
  program.world.pool->steer_spill([](std::uint32_t tag) {
    return tag == 1 ? SpillWish::first : tag == 2 ? SpillWish::never : SpillWish::none;
  });
  const Address never = program.get(kBlock, 0, 2);
  const Address old = program.get();
  std::vector<Address> others;
  for (int i = 0; i < 5; ++i) others.push_back(program.get());
  const Address first = program.get(kBlock, 0, 1);
  CHECK(program.get() != 0);
  CHECK(program.where(first) == Location::host && program.where(old) == Location::device);
  for (int i = 0; i < 6; ++i) CHECK(program.get() != 0);
  CHECK(program.where(old) == Location::host && program.where(never) == Location::device);
  std::uint64_t moved = 1;
  CHECK(program.world.pool->spill(never, &moved).ok() && moved == 0);
  CHECK(program.right() && program.ends());
}

// A round replaces each block by a new one, as decoding does with caches that grow by copies. Then the oldest
// block is freed next, and it does not help to move it.
TEST(memory_that_is_replaced_again_and_again_moves_little) {
  PoolConfig config = spilling();
  Program program(config, stamps(), 128 * kMiB);
  std::vector<Address> blocks;
  for (int i = 0; i < 36; ++i) blocks.push_back(program.get());  // 32 fit
  std::uint64_t before = 0;
  for (int round = 0; round < 16; ++round) {
    for (Address& block : blocks) {
      const Address next = program.get();
      REQUIRE(next != 0 && program.use(block) && program.use(next) && program.drop(block));
      block = next;
    }
    CHECK(program.right());
    if (round == 11) before = program.world.stats().spill.spilled_bytes;
  }
  const std::uint64_t moved = (program.world.stats().spill.spilled_bytes - before) / 4;
  CHECK(moved <= 3 * 5 * kBlock);  // in a round; 5 blocks are lacking
  CHECK(program.right() && program.ends());
}

// A block of this age goes, and is freed after `more` allocations. Whether the youngest go first then.
bool learns(SpillOrder& order, std::uint32_t age, std::uint32_t more) {
  SpillCandidate gone;
  gone.bytes = kBlock;
  gone.age = age;
  gone.serial = 1000;
  order.note(gone);
  const auto learn = [&](std::uint32_t passed, bool live) {
    order.learn([&](StreamNumber) { return gone.serial + age + passed; },
                [&](Index, std::uint32_t serial) { return serial == gone.serial && live; }, kBlock);
  };
  if (more > 1) learn(more - 1, true);
  learn(more, false);
  return order.youngest_first();
}

TEST(the_order_depends_on_how_long_memory_stays) {
  SpillOrder order;
  for (const std::uint32_t more : {50, 100, 1000}) CHECK(!learns(order, 100, more));
  CHECK(learns(order, 100, 10));
  // Each block lives for 110 allocations.
  std::vector<SpillCandidate> pages(4);
  const std::uint64_t ages[] = {300, 90, 20, 2};
  for (std::size_t i = 0; i < 4; ++i) pages[i].age = ages[i];
  order.sort(pages);
  const std::uint64_t sorted[] = {20, 90, 300, 2};
  for (std::size_t i = 0; i < 4; ++i) CHECK(pages[i].age == sorted[i]);
  // The youngest stay, as expected; then they are freed soon.
  CHECK(learns(order, 20, 90));
  CHECK(!learns(order, 20, 5));
  order.sort(pages);
  CHECK(pages[0].age == 300 && pages[3].age == 2);
}

TEST(a_policy_can_be_replaced) {
  Program program;
  program.world.pool->set_spill_policy([](std::vector<SpillCandidate>& all) {
    std::sort(all.begin(), all.end(),
              [](const SpillCandidate& a, const SpillCandidate& b) { return a.age < b.age; });
  });
  std::vector<Address> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(program.get());
  CHECK(program.get() != 0);
  CHECK(program.where(blocks[7]) == Location::host && program.where(blocks[0]) == Location::device);
  CHECK(program.right() && program.ends());
}

TEST(host_memory_that_runs_out_is_out_of_memory_and_nothing_is_lost) {
  for (const bool by_budget : {true, false}) {
    ModelOptions options = stamps();
    if (!by_budget) options.host_bytes = 2 * kBlock;
    Program program(spilling(by_budget ? 2 * kBlock : kGiB), options);
    for (int i = 0; i < 10; ++i) CHECK(program.get() != 0);
    OutOfMemoryReport report;
    Address address = 0;
    const Status status = program.world.pool->allocate(kBlock, 0, 0, 0, &address, &report);
    CHECK(status.code == Code::out_of_memory && address == 0);
    CHECK(report.spill_limit == (by_budget ? 2 * kBlock : kGiB) && report.host == 2 * kBlock);
    CHECK(report.spilled == 2 * kBlock && report.live == 8 * kBlock);
    CHECK(program.right() && program.ends());
  }
}

TEST(a_request_that_could_not_be_served_moves_nothing) {
  Program program;
  for (int i = 0; i < 4; ++i) CHECK(program.get() != 0);
  CHECK(program.get(2 * kCapacity) == 0 && program.world.stats().spill.spills == 0);
  CHECK(program.right() && program.ends());
}

TEST(what_the_device_still_has_is_not_spilled_for) {
  Program program;
  const Address a = program.get(kCapacity - 2 * kBlock);
  CHECK(a != 0 && program.get(4 * kBlock) != 0);
  CHECK(program.world.stats().spilled == 2 * kBlock && program.world.reserved() == kCapacity);
  CHECK(program.right() && program.ends());
}

TEST(what_must_not_spill_stays) {
  Program program;
  Pool& pool = *program.world.pool;
  ModelBackend& device = *program.world.device;
  std::uint64_t moved = 1;
  // Another library's stream may be used at any time.
  const StreamHandle foreign = program.world.foreign();
  Address alien = 0, recorded = 0, shared = 0, graph = 0;
  CHECK(pool.allocate(kBlock, foreign, 0, 0, &alien).ok());
  CHECK(pool.spill(alien, &moved).ok() && moved == 0);
  CHECK(pool.allocate(kBlock, 0, 0, 0, &recorded).ok() && pool.record_stream(recorded, foreign).ok());
  CHECK(pool.spill(recorded, &moved).ok() && moved == 0);
  // Other processes have its pages mapped.
  SharedBlock name;
  CHECK(pool.allocate(kBlock, 0, 0, 0, &shared).ok() && pool.share(shared, &name).ok());
  CHECK(pool.spill(shared, &moved).ok() && moved == 0);
  // A graph owns it; and during a capture nothing moves.
  const StreamHandle captured = program.world.stream();
  const Address other = program.get();
  std::uint64_t id = 0;
  CHECK(device.capture_begin(captured).ok() &&
        pool.allocate_slow(kBlock, captured, 0, 0, &graph, nullptr).ok());
  CHECK(pool.spill(other, &moved).code == Code::capturing && moved == 0);
  CHECK(device.capture_end(captured, &id).ok());
  CHECK(pool.spill(graph, &moved).ok() && moved == 0);
  CHECK(pool.spill(other, &moved).ok() && moved != 0);
  CHECK(program.right());
  CHECK(device.graph_destroy(id).ok() && pool.free_slow(graph).ok());
  for (const Address address : {alien, recorded, shared}) CHECK(pool.free_slow(address).ok());
  CHECK(program.world.gone(foreign) && program.ends());
}

TEST(shared_memory_returns_first) {
  Program program;
  const Address a = program.get();
  SharedBlock name;
  CHECK(program.spill(a) && program.world.pool->share(a, &name).ok());
  CHECK(program.where(a) == Location::device && program.right() && program.ends());
}

TEST(suspend_and_spill_work_on_the_same_blocks) {
  Program program;
  PoolConfig plain;
  plain.pages = false;
  const auto store = std::make_shared<Pool>(std::make_shared<ModelBackend>(kGiB), plain);
  const Address a = program.get(), b = program.get();
  std::uint64_t given = 0, moved = 1;
  CHECK(program.spill(a) && program.use(b) && program.right());
  CHECK(program.world.pool->suspend(nullptr, true, store, &given, nullptr).ok() && given >= kBlock);
  CHECK(program.world.reserved() == 0);
  CHECK(program.world.pool->spill(a, &moved).ok() && moved == 0);
  CHECK(program.world.pool->prefetch(a, &moved).ok() && moved == 0);
  CHECK(program.world.pool->resume(nullptr, &given, nullptr).ok());
  CHECK(program.where(a) == Location::host && program.where(b) == Location::device);
  CHECK(program.world.device->stamp(a) == program.held[a].stamp);  // its contents were never copied
  CHECK(program.prefetch(a) && program.where(a) == Location::device && program.world.good());
  program.held[b].stamp = program.world.device->stamp(b);  // went through a store without contents
  CHECK(program.right() && program.ends());
}

TEST(a_stream_that_does_not_arrive_is_let_go) {
  Program program(spilling(), stamps(Schedule::manual));
  const Address a = program.get();
  CHECK(program.right());
  const StreamHandle stuck = program.world.stream();
  // It waits for something that never happens: work behind a gate of this thread.
  GateHandle gate = 0;
  CHECK(program.world.device->gate_close(stuck, &gate).ok());
  CHECK(program.world.device->work(stuck, 99).ok());
  std::uint64_t moved = 1;
  const Status status = program.world.pool->spill(a, &moved);
  CHECK(status.code == Code::not_ready && moved == 0 && program.where(a) == Location::device);
  CHECK(program.world.device->counts().gates == 1 && program.world.stats().spill.late == 1);
  CHECK(program.use(a) && program.world.good());
  program.world.device->gate_open(gate);
  CHECK(program.right() && program.spill(a) && program.where(a) == Location::host);
  CHECK(program.right() && program.ends());
}

TEST(blocks_freed_in_the_middle_of_a_swap_become_free) {
  for (const bool back : {false, true}) {
    Program program(spilling(), stamps(Schedule::manual));
    Pool& pool = *program.world.pool;
    const Address a = program.get(), b = program.get();
    if (back) CHECK(program.spill(a));
    CHECK(program.use(a) && program.use(b));
    // A function that runs while the swap waits for the streams.
    bool freed = false;
    Address taken = 0;
    program.held.erase(a);
    CHECK(program.world.device
              ->launch(0,
                       [&] {
                         freed = pool.free_slow(a).ok();
                         (void)pool.allocate(kBlock, 0, kSlotBytes, 0, &taken);
                       })
              .ok());
    std::uint64_t moved = 1;
    CHECK((back ? pool.prefetch(a, &moved) : pool.spill(a, &moved)).ok() && freed);
    CHECK(taken != 0 && program.where(taken) == Location::device);
    CHECK(program.world.stats().spilled == 0 && program.right());
    CHECK(pool.free_slow(taken).ok() && program.ends());
  }
}

TEST(work_queued_in_the_middle_of_a_swap_is_held) {
  for (const bool back : {false, true}) {
    Program program(spilling(), stamps(Schedule::manual));
    const Address a = program.get();
    if (back) CHECK(program.spill(a));
    bool used = false;
    CHECK(program.world.device->launch(0, [&] { used = program.use(a) && program.use(a); }).ok());
    CHECK(back ? program.prefetch(a) : program.spill(a));
    CHECK(used && program.use(a) && program.right() && program.ends());
  }
}

TEST(a_stream_that_leaves_passes_its_host_pages_on) {
  Program program;
  const StreamHandle stream = program.world.stream();
  const Address a = program.get(kBlock, stream), b = program.get(kBlock, stream);
  CHECK(program.spill(a) && program.spill(b) && program.drop(b));
  CHECK(program.world.pool->retire_stream(stream).ok() && program.world.device->run_all());
  CHECK(program.world.pool->coalesce().ok() && program.world.device->stream_destroy(stream).ok());
  CHECK(program.world.good() && program.where(a) == Location::host);
  program.held[a].stream = 0;
  CHECK(program.use(a) && program.prefetch(a) && program.right() && program.ends());
}

TEST(zeroed_memory_is_zeroed_on_both_sides) {
  PoolConfig config = spilling();
  config.zero_on_free = true;
  Program program(config);
  const Address a = program.get();
  CHECK(program.use(a) && program.spill(a) && program.drop(a) && program.world.device->run_all());
  CHECK(program.world.pool->coalesce().ok() && program.world.device->run_all());
  CHECK(program.world.good() && program.ends());
}

namespace {

// A fixed program that meets every step of a swap, in both directions. It goes on after whatever fails.
bool run_fixed(Program& program) {
  std::vector<Address> blocks;
  for (int i = 0; i < 11; ++i) {
    const StreamHandle stream = static_cast<StreamHandle>(i % 3);
    if (const Address address = program.get(i % 4 == 3 ? kSlotBytes : kBlock, stream, i % 2))
      blocks.push_back(address);
    if (!blocks.empty()) (void)program.use(blocks[blocks.size() / 2]);
    if (!program.world.good()) return false;
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) (void)program.drop(blocks[i]);
  std::uint64_t returned = 0;
  (void)program.world.pool->bring_back(3 * kBlock, &returned);
  for (std::size_t i = 1; i < blocks.size(); i += 2) {
    (void)program.use(blocks[i]);
    (void)(i % 4 == 1 ? program.spill(blocks[i]) : program.prefetch(blocks[i]));
    (void)program.use(blocks[i]);
    if (!program.world.good()) return false;
  }
  std::uint64_t moved = 0;
  (void)program.world.pool->park([](std::uint32_t tag) { return tag == 1; }, &moved);
  for (const auto& [address, block] : program.held) (void)program.use(address);
  (void)program.world.pool->unpark(nullptr, &moved);
  (void)program.world.pool->trim(0, false);
  return program.world.good();
}

}  // namespace

TEST(every_call_of_a_swap_fails_in_turn) {
  for (const Code code : {Code::out_of_memory, Code::failed})
    for (const int times : {1, 2}) {
      std::uint64_t calls = 0;
      {
        Program program;
        CHECK(run_fixed(program));
        calls = program.world.device->total_calls();
        CHECK(program.right() && program.ends());
      }
      std::uint64_t wrong = 0;
      for (std::uint64_t n = 1; n <= calls; ++n) {
        Program program;
        for (int i = 0; i < times; ++i)
          program.world.device->fail_any(n + static_cast<std::uint64_t>(i), {code, 2, ""});
        const bool good = run_fixed(program);
        program.world.device->clear_failures();
        if (!good || !program.right() || !program.ends()) {
          if (wrong++ == 0)
            std::printf("     call %llu of %llu, code %d, %d times\n", static_cast<unsigned long long>(n),
                        static_cast<unsigned long long>(calls), static_cast<int>(code), times);
        }
      }
      CHECK(wrong == 0);
    }
}

TEST(every_interleaving_of_swaps_and_stream_operations) {
  constexpr int kActions = 8;
  constexpr int kLength = 6;
  std::uint64_t total = 1;
  for (int i = 0; i < kLength; ++i) total *= kActions;
  const std::uint64_t step = vram::testing::sampling() * 2 - 1;
  std::uint64_t wrong = 0;
  for (std::uint64_t n = 0; n < total && wrong == 0; n += step) {
    Program program(spilling(), stamps(Schedule::manual), 8 * kMiB);
    const Address a = program.get(kSlotBytes, 1), b = program.get(kSlotBytes, 2);
    bool good = a != 0 && b != 0;
    std::uint64_t rest = n;
    for (int i = 0; i < kLength && good; ++i, rest /= kActions) {
      switch (rest % kActions) {
        case 0:
          good = program.use(a);
          break;
        case 1:
          good = program.use(b);
          break;
        case 2:
          (void)program.world.device->step(1);
          break;
        case 3:
          (void)program.world.device->step(2);
          break;
        case 4:
          good = program.spill(a);
          break;
        case 5:
          good = program.spill(b);
          break;
        case 6:
          good = program.prefetch(a);
          break;
        default:  // inside the next swap
          good = program.world.device->launch(1, [&] { (void)program.use(b); }).ok();
      }
    }
    if (good && program.right()) continue;
    ++wrong;
    std::printf("     sequence %llu\n", static_cast<unsigned long long>(n));
  }
  CHECK(wrong == 0);
}

TEST(random_programs_keep_their_contents) {
  constexpr int kSteps = 400;
  for (std::uint64_t seed = 1; seed <= 200 / vram::testing::kSlowdown; ++seed) {
    std::uint64_t state = seed * 0x9e3779b97f4a7c15;
    const auto below = [&](std::uint64_t n) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return state % n;
    };
    const Schedule schedule = seed % 2 == 0 ? Schedule::manual : Schedule::lag;
    ModelOptions options = stamps(schedule);
    if (seed % 5 == 0) options.host_bytes = 16 * kMiB;
    PoolConfig config = spilling(seed % 3 == 0 ? 24 * kMiB : kGiB);
    if (seed % 7 == 0) config.limit = kCapacity - 2 * kMiB;
    if (seed % 4 == 0) config.cross_stream = CrossStream::wait;
    Program program(config, options);
    bool good = true;
    for (int i = 0; i < kSteps && good; ++i) {
      const std::uint64_t dice = below(100);
      const Address address = program.any_held(below);
      const StreamHandle stream = below(3);
      if (dice < 30) {
        (void)program.get(kSlotBytes * (1 + below(5)), stream, static_cast<std::uint32_t>(below(3)));
      } else if (dice < 55 && address != 0) {
        good = program.use(address);
      } else if (dice < 70 && address != 0) {
        good = program.drop(address);
      } else if (dice < 78 && address != 0) {
        std::uint64_t moved = 0;
        (void)program.world.pool->spill(address, &moved);
      } else if (dice < 86 && address != 0) {
        std::uint64_t moved = 0;
        (void)program.world.pool->prefetch(address, &moved);
      } else if (dice < 90) {
        std::uint64_t returned = 0;
        good = program.world.pool->bring_back(8 * kMiB, &returned).ok();
        if (dice % 2 == 0) (void)program.world.pool->create_ahead(12 * kMiB, 4 * kMiB, &returned);
      } else if (dice < 93 && address != 0) {
        good = program.world.pool->record_stream(address, stream).ok();
      } else if (dice < 95) {
        good = program.world.pool->trim(below(kCapacity), below(2) == 0).ok();
      } else {
        if (schedule == Schedule::lag) program.world.device->advance(static_cast<double>(below(150)));
        (void)program.world.device->step(stream);
      }
      good = good && program.world.good() && (i % 20 != 0 || program.right());
    }
    if (!good || !program.right() || !program.ends()) {
      std::printf("     seed %llu\n", static_cast<unsigned long long>(seed));
      CHECK(false);
      return;
    }
  }
}

// Two swaps and six operations of two streams, in every order. What is queued in between, also by a function
// on a stream while a swap waits for it, finds its contents.
TEST(every_order_of_two_swaps_and_six_stream_operations) {
  constexpr std::uint64_t kOperations = 8;
  std::uint64_t orders = 1;
  for (std::uint64_t i = 2; i <= kOperations; ++i) orders *= i;
  enum class Swaps { there_and_back, two_blocks, across };
  const std::uint64_t step = vram::testing::sampling() * 2 - 1;
  std::uint64_t wrong = 0;
  for (const Swaps swaps : {Swaps::there_and_back, Swaps::two_blocks, Swaps::across})
    for (std::uint64_t n = 0; n < orders && wrong == 0; n += step) {
      Program program(spilling(), stamps(Schedule::manual), 8 * kMiB);
      ModelBackend& device = *program.world.device;
      const Address a = program.get(kSlotBytes, 1), b = program.get(kSlotBytes, 2);
      bool good = a != 0 && b != 0 && (swaps != Swaps::across || program.spill(b));
      EventHandle event = 0;
      good = good && device.event_create(&event).ok();
      std::vector<int> left = {0, 1, 2, 3, 4, 5, 6, 7};
      std::uint64_t rest = n;
      for (std::uint64_t i = kOperations; i > 0 && good; --i) {
        const auto at = left.begin() + static_cast<std::ptrdiff_t>(rest % i);
        rest /= i;
        switch (*at) {
          case 0:
            good = program.use(a);
            break;
          case 1:
            good = program.use(b);
            break;
          case 2:  // the other stream uses it behind an event, which the pool does not know
            good = device.event_record(event, 1).ok() && device.stream_wait(2, event).ok();
            program.held[a].stream = 2;
            good = good && program.use(a);
            break;
          case 3:  // while a swap waits for the stream
            good = device.launch(1, [&] { (void)program.use(b); }).ok();
            break;
          case 4:
            (void)device.step(1);
            break;
          case 5:
            (void)device.step(2);
            break;
          case 6:
            good = program.spill(a);
            break;
          default:
            good = swaps == Swaps::there_and_back ? program.prefetch(a)
                   : swaps == Swaps::two_blocks   ? program.spill(b)
                                                  : program.prefetch(b);
        }
        left.erase(at);
      }
      good = good && program.right() && device.event_destroy(event).ok();
      if (good && program.ends()) continue;
      std::printf("     swaps %d, order %llu\n", static_cast<int>(swaps), static_cast<unsigned long long>(n));
      ++wrong;
    }
  CHECK(wrong == 0);
}

namespace {

bool is_first(std::uint32_t tag) { return tag == 1; }

}  // namespace

TEST(a_tag_can_be_parked_on_the_host) {
  Program program;
  Pool& pool = *program.world.pool;
  const Address a = program.get(kBlock, 0, 1), b = program.get(kBlock, 0, 2), c = program.get(kBlock, 1, 1);
  CHECK(program.use(a) && program.use(b) && program.use(c));
  std::uint64_t moved = 0, returned = 0;
  CHECK(pool.park(is_first, &moved).ok() && moved == 2 * kBlock);
  CHECK(program.where(a) == Location::host && program.where(c) == Location::host);
  CHECK(program.where(b) == Location::device && program.world.stats().parked == 2 * kBlock);
  // It works where it is, and stays there although the device has room.
  CHECK(program.use(a) && program.use(c) && program.right());
  for (int i = 0; i < 3; ++i) CHECK(pool.bring_back(kGiB, &returned).ok() && returned == 0);
  CHECK(pool.park(is_first, &moved).ok() && moved == 0);
  // By hand, a block comes back alone.
  CHECK(program.prefetch(c) && program.where(c) == Location::device && program.where(a) == Location::host);
  CHECK(pool.unpark([](std::uint32_t tag) { return tag == 2; }, &moved).ok() && moved == 0);
  CHECK(pool.unpark(is_first, &moved).ok() && moved == kBlock && program.where(a) == Location::device);
  CHECK(program.world.stats().parked == 0 && program.use(a) && program.right());
  // A host page that was parked once is an ordinary one the next time.
  CHECK(program.spill(a) && program.world.stats().parked == 0);
  CHECK(pool.bring_back(kGiB, &returned).ok() && returned == kBlock);
  // All of them.
  CHECK(pool.park(nullptr, &moved).ok() && moved == 3 * kBlock);
  CHECK(pool.unpark(nullptr, &moved).ok() && moved == 3 * kBlock && program.right() && program.ends());
}

TEST(a_page_with_other_blocks_is_not_parked) {
  Program program;
  Pool& pool = *program.world.pool;
  Address mine = 0, other = 0;
  std::uint64_t moved = 1;
  CHECK(pool.allocate(100 * kKiB, 0, 0, 1, &mine).ok() && pool.allocate(100 * kKiB, 0, 0, 2, &other).ok());
  CHECK(pool.park(is_first, &moved).ok() && moved == 0 && program.where(mine) == Location::device);
  CHECK(pool.free_slow(other).ok() && pool.park(is_first, &moved).ok() && moved != 0);
  CHECK(program.where(mine) == Location::host);
  CHECK(pool.free_slow(mine).ok() && program.world.stats().parked == 0 && program.right() && program.ends());
}

TEST(a_tag_that_cannot_be_parked_stays) {
  ModelOptions options = stamps();
  options.host_bytes = kBlock;
  Program program(spilling(), options);
  Pool& pool = *program.world.pool;
  const Address a = program.get(kBlock, 0, 1), b = program.get(kBlock, 0, 1);
  std::uint64_t moved = 1;
  CHECK(pool.park(is_first, &moved).code == Code::out_of_memory && moved == 0);
  CHECK(program.where(a) == Location::device && program.where(b) == Location::device);
  CHECK(program.world.stats().parked == 0 && program.right());
  // On the way back, what fits moves, and the rest works where it is.
  CHECK(program.drop(b) && pool.park(is_first, &moved).ok() && moved == kBlock);
  std::vector<Address> filling;
  for (std::uint64_t i = 0; i < kCapacity / kBlock; ++i) filling.push_back(program.get());
  CHECK(pool.unpark(is_first, &moved).code == Code::out_of_memory && moved == 0);
  CHECK(program.use(a) && program.right() && program.where(a) == Location::host);
  CHECK(program.drop(filling[0]) && program.right());
  (void)pool.unpark(is_first, &moved);  // records a fence behind the free
  CHECK(program.world.device->run_all() && pool.unpark(is_first, &moved).ok());
  CHECK(program.where(a) == Location::device && program.right() && program.ends());
}

TEST(a_stream_that_does_not_arrive_leaves_a_tag_where_it_is) {
  Program program(spilling(), stamps(Schedule::manual));
  Pool& pool = *program.world.pool;
  const Address a = program.get(kBlock, 0, 1);
  const StreamHandle stuck = program.world.stream();
  GateHandle gate = 0;
  CHECK(program.right() && program.world.device->gate_close(stuck, &gate).ok());
  CHECK(program.world.device->work(stuck, 99).ok());
  std::uint64_t moved = 1;
  CHECK(pool.park(is_first, &moved).code == Code::not_ready && moved == 0);
  CHECK(program.where(a) == Location::device && program.world.stats().parked == 0);
  program.world.device->gate_open(gate);
  CHECK(program.right() && pool.park(is_first, &moved).ok() && moved == kBlock);
  CHECK(program.right() && program.ends());
}

TEST(parked_memory_can_be_suspended_and_resumed) {
  Program program;
  Pool& pool = *program.world.pool;
  const Address a = program.get(kBlock, 0, 1);
  std::uint64_t moved = 0, given = 0;
  CHECK(pool.park(is_first, &moved).ok() && program.right());
  CHECK(pool.suspend(is_first, false, nullptr, &given, nullptr).ok());
  CHECK(pool.unpark(is_first, &moved).ok() && moved == 0);  // not while it is suspended
  CHECK(pool.resume(is_first, &given, nullptr).ok() && program.where(a) == Location::host);
  CHECK(pool.unpark(is_first, &moved).ok() && moved == kBlock && program.right() && program.ends());
}

TEST(the_journal_says_what_moved) {
  Program program;
  Pool& pool = *program.world.pool;
  CHECK(pool.start_journal(1000).ok());
  const Address a = program.get(3 * kBlock, 0, 1);
  CHECK(program.spill(a) && program.prefetch(a));
  std::vector<JournalEntry> entries;
  std::uint64_t dropped = 0;
  pool.journal(entries, &dropped);
  std::erase_if(entries, [](const JournalEntry& each) {
    return each.action != Action::spilled && each.action != Action::returned;
  });
  REQUIRE(entries.size() == 2 && dropped == 0);
  for (const JournalEntry& entry : entries)
    CHECK(entry.address == a && entry.bytes == 3 * kBlock && entry.tag == 1);
  CHECK(entries[0].action == Action::spilled && entries[1].action == Action::returned);
  CHECK(program.right() && program.ends());
}

TEST(growable_buffers_stay_beside_memory_that_spills) {
  Program program;
  Pool& pool = *program.world.pool;
  Address growing = 0;
  CHECK(pool.growable_open(kCapacity / 2, 0, &growing).ok());
  std::vector<Address> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(program.get());
  // Its growth makes other memory spill, and never its own.
  for (std::uint64_t size = kBlock; size <= kCapacity / 2; size += kBlock) {
    CHECK(pool.growable_resize(growing, size, 0, 0).ok());
    CHECK(program.where(growing + size - kSlotBytes) == Location::device && program.world.good());
  }
  CHECK(program.world.stats().spilled >= 2 * kBlock);
  std::uint64_t moved = 0;
  CHECK(pool.park(nullptr, &moved).ok() && program.where(growing) == Location::device);
  CHECK(program.right() && pool.growable_close(growing).ok() && program.ends());
}

TEST(the_child_of_a_fork_has_no_part_in_it) {
  Program program;
  const Address a = program.get();
  CHECK(program.spill(a));
  CHECK(vram::testing::holds_in_child([&] {
    std::uint64_t moved = 0;
    return program.world.pool->spill(a, &moved).code == Code::closed &&
           program.world.pool->prefetch(a, &moved).code == Code::closed &&
           program.world.pool->bring_back(kGiB, &moved).code == Code::closed &&
           program.world.pool->create_ahead(kGiB, kGiB, &moved).code == Code::closed &&
           program.world.pool->close().ok();
  }));
  CHECK(program.use(a) && program.right() && program.ends());
}

// ---- captures -------------------------------------------------------------------------------------------

namespace {

constexpr HeapId kGraphs{0, 7};

// A program that captures into one heap on a stream, beside memory of its own.
struct Capturing : Program {
  explicit Capturing(const PoolConfig& config = spilling(), std::uint64_t capacity = kCapacity)
      : Program(config, stamps(), capacity), stream(world.stream()) {}

  bool begin() {
    return world.pool->heap_begin(kGraphs, [this](StreamHandle handle) { return handle == stream; }).ok() &&
           world.device->capture_begin(stream).ok();
  }
  bool end(std::uint64_t* graph) {
    ++uses;
    return world.device->capture_end(stream, graph).ok() && world.pool->heap_end(kGraphs).ok();
  }
  // Memory that the captured work fills and uses; what a launch leaves there is known.
  Address capture(std::uint64_t bytes = kBlock) {
    const Address address = get(bytes, stream);
    if (address == 0) return 0;
    CHECK(use(address));
    of_graph[address] = held.extract(address).mapped();
    return address;
  }
  bool launch(std::uint64_t graph) { return world.device->graph_launch(graph, stream).ok(); }
  bool launched_right(Address address) {
    const Held& block = of_graph.at(address);
    for (std::uint64_t at = 0; at < block.bytes; at += kSlotBytes)
      if (world.device->stamp(address + at) != block.stamp) return false;
    return true;
  }
  bool release(std::uint64_t graph) {
    for (const auto& [address, block] : of_graph) CHECK(world.pool->free_slow(address).ok());
    of_graph.clear();
    for (; uses != 0; --uses) CHECK(world.pool->heap_release(kGraphs).ok());
    return world.device->graph_destroy(graph).ok();
  }

  const StreamHandle stream;
  std::map<Address, Held> of_graph;
  int uses = 0;
};

}  // namespace

TEST(a_capture_gets_host_memory_at_once_and_device_memory_when_it_ends) {
  Capturing program;
  std::vector<Address> eager;
  for (int i = 0; i < 7; ++i) REQUIRE(eager.emplace_back(program.get()) != 0);
  REQUIRE(program.begin());
  std::vector<Address> captured;
  for (int i = 0; i < 4; ++i) REQUIRE(captured.emplace_back(program.capture()) != 0);
  CHECK(program.where(captured[0]) == Location::device && program.where(captured[3]) == Location::host);
  CHECK(program.world.stats().spilled == 3 * kBlock && program.world.stats().reserved.current <= kCapacity);
  // Nothing moved, and nothing was refused.
  CHECK(program.world.device->calls("gate_close") == 0 && program.world.device->refused_in_capture() == 0);
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph));
  for (const Address address : captured) CHECK(program.where(address) == Location::device);
  CHECK(program.where(eager[0]) == Location::host);  // it made room
  for (int i = 0; i < 3; ++i) {
    REQUIRE(program.launch(graph));
    for (const Address address : eager) CHECK(program.use(address));
    CHECK(program.right());
    for (const Address address : captured) CHECK(program.launched_right(address));
  }
  CHECK(program.release(graph) && program.ends());
}

TEST(a_capture_uses_what_it_frees_also_in_host_memory) {
  Capturing program;
  for (int i = 0; i < 8; ++i) REQUIRE(program.get() != 0);
  REQUIRE(program.begin());
  const Address first = program.get(kBlock, program.stream);
  REQUIRE(first != 0 && program.where(first) == Location::host);
  const std::uint64_t host = program.world.stats().host;
  REQUIRE(program.drop(first));
  CHECK(program.world.pool->trim(0, false).ok());  // a graph keeps what it used
  CHECK(program.world.stats().host == host);
  const Address again = program.capture(kBlock);
  CHECK(again == first && program.world.stats().host == host);
  // In pieces, and at other addresses.
  REQUIRE(program.world.pool->free_slow(again).ok());
  program.of_graph.clear();
  const Address large = program.capture(kBlock + kSlotBytes);
  REQUIRE(large != 0);
  CHECK(program.world.stats().host == host + kSlotBytes);
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph) && program.where(large) == Location::device);
  CHECK(program.where(first) == Location::device);  // a page has the same memory at all its addresses
  REQUIRE(program.launch(graph));
  CHECK(program.right() && program.launched_right(large));
  CHECK(program.release(graph) && program.ends());
}

TEST(what_a_graph_has_in_host_memory_stays_if_nothing_can_make_room) {
  Capturing program;
  program.world.pool->steer_spill([](std::uint32_t) { return SpillWish::never; });
  for (int i = 0; i < 7; ++i) REQUIRE(program.get() != 0);
  REQUIRE(program.begin());
  const Address on_device = program.capture(), on_host = program.capture();
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph));
  CHECK(program.where(on_device) == Location::device && program.where(on_host) == Location::host);
  CHECK(program.world.stats().parked == 0 && program.world.stats().spilled == kBlock);
  // Nothing tells when a graph is launched, so it does not move later either.
  REQUIRE(program.drop(program.held.begin()->first));
  std::uint64_t returned = 0;
  CHECK(program.world.pool->bring_back(kGiB, &returned).ok() && returned == 0);
  CHECK(!program.prefetch(on_host) || program.where(on_host) == Location::host);
  std::uint64_t second = 0;
  REQUIRE(program.begin() && program.end(&second));
  CHECK(program.where(on_host) == Location::host);
  REQUIRE(program.launch(graph) && program.right() && program.launched_right(on_host));
  // When the graph has gone, it is memory like any other.
  for (const auto& [address, block] : program.of_graph) program.held[address] = block;
  program.of_graph.clear();
  REQUIRE(program.release(graph) && program.world.device->graph_destroy(second).ok());
  CHECK(program.world.pool->coalesce().ok() && program.world.pool->bring_back(kGiB, &returned, true).ok());
  program.world.pool->steer_spill([](std::uint32_t) { return SpillWish::none; });
  CHECK(program.right() && program.ends());
}

TEST(device_memory_that_a_capture_could_not_take_serves_others) {
  constexpr std::uint64_t kElsewhere = 4 * kSlotBytes;
  Capturing program;
  PageHandle elsewhere = 0;  // of another process
  REQUIRE(program.world.device->page_create(kElsewhere, &elsewhere).ok());
  while (program.world.stats().reserved.current + kElsewhere < kCapacity) REQUIRE(program.get() != 0);
  const std::uint64_t reserved = program.world.stats().reserved.current;
  REQUIRE(program.begin());
  const Address captured = program.capture();
  REQUIRE(captured != 0 && program.where(captured) == Location::host);
  REQUIRE(program.world.device->page_release(elsewhere, kElsewhere).ok());
  REQUIRE(program.world.device->fail("gate_close", 1, {Code::failed, 2, "gate_close"}));
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph) && program.where(captured) == Location::host);
  CHECK(program.world.pool->trim(0, false).ok() && program.world.stats().reserved.current == reserved);
  REQUIRE(program.launch(graph) && program.right() && program.launched_right(captured));
  CHECK(program.release(graph) && program.ends());
}

TEST(a_capture_that_gets_no_memory_is_out_of_memory_and_not_broken) {
  Capturing program(spilling(2 * kBlock));
  for (int i = 0; i < 8; ++i) REQUIRE(program.get() != 0);
  REQUIRE(program.begin());
  REQUIRE(program.capture() != 0 && program.capture() != 0);
  Address none = 0;
  OutOfMemoryReport report;
  const Status status = program.world.pool->allocate(kBlock, program.stream, 0, 0, &none, &report);
  CHECK(status.code == Code::out_of_memory && report.spill.code == Code::out_of_memory);
  CHECK(std::string_view(report.spill.call) == "spill");
  CHECK(program.world.device->refused_in_capture() == 0);
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph) && program.launch(graph) && program.right());
  CHECK(program.release(graph) && program.ends());
}

TEST(a_capture_without_a_heap_keeps_its_host_memory_until_the_graph_is_gone) {
  Program program;
  const StreamHandle stream = program.world.stream();
  for (int i = 0; i < 8; ++i) REQUIRE(program.get() != 0);
  REQUIRE(program.world.device->capture_begin(stream).ok());
  const Address captured = program.get(kBlock, stream);
  REQUIRE(captured != 0 && program.where(captured) == Location::host);
  REQUIRE(program.drop(captured));
  std::uint64_t graph = 0;
  REQUIRE(program.world.device->capture_end(stream, &graph).ok());
  CHECK(program.world.device->graph_launch(graph, stream).ok() && program.right());
  CHECK(program.world.stats().host == kBlock && program.get() != 0);  // others get other memory
  CHECK(program.world.device->graph_launch(graph, stream).ok() && program.right());
  CHECK(program.world.device->graph_destroy(graph).ok() && program.ends());
}

TEST(memory_that_two_threads_capture_into_stays_where_it_is) {
  Capturing program;
  for (int i = 0; i < 8; ++i) REQUIRE(program.get() != 0);
  REQUIRE(program.begin());
  const Address captured = program.capture();
  // The other thread may launch its graph, which has the same memory, as soon as its capture has ended.
  std::thread([&] {
    CHECK(program.world.pool->heap_begin(kGraphs, [](StreamHandle) { return false; }).ok());
  }).join();
  std::uint64_t graph = 0;
  REQUIRE(program.end(&graph) && program.where(captured) == Location::host);
  REQUIRE(program.world.pool->heap_end(kGraphs).ok() && program.where(captured) == Location::host);
  ++program.uses;
  REQUIRE(program.launch(graph) && program.right() && program.launched_right(captured));
  CHECK(program.release(graph) && program.ends());
}

// The driver refuses any call while pages are lent, replaced and taken back.
TEST(every_call_of_a_program_that_captures_fails_in_turn) {
  const auto run = [](Capturing& program) {
    for (int i = 0; i < 7; ++i) (void)program.get();
    if (!program.begin()) return false;
    const Address passing = program.capture(2 * kBlock);
    for (int i = 0; i < 2; ++i) (void)program.capture(i == 0 ? kSlotBytes : kBlock);
    if (passing != 0) {
      program.of_graph.erase(passing);
      CHECK(program.world.pool->free_slow(passing).ok());
      (void)program.capture(kBlock + kSlotBytes);
    }
    std::uint64_t graph = 0;
    if (!program.end(&graph)) return false;
    for (const auto& [address, block] : program.held) (void)program.use(address);
    program.world.device->clear_failures();
    bool good = program.launch(graph) && program.right();
    for (const auto& [address, block] : program.of_graph) good = good && program.launched_right(address);
    return program.release(graph) && good;
  };
  Capturing whole;
  CHECK(run(whole));
  const std::uint64_t calls = whole.world.device->total_calls();
  CHECK(whole.ends());
  for (const Code code : {Code::out_of_memory, Code::failed})
    for (const std::uint64_t times : {1, 2})
      for (std::uint64_t n = 1; n <= calls; ++n) {
        Capturing program;
        for (std::uint64_t i = 0; i < times; ++i) program.world.device->fail_any(n + i, {code, 2, ""});
        const bool good = run(program);
        program.world.device->clear_failures();
        if (good && program.right() && program.ends()) continue;
        std::printf("     call %llu of %llu, code %d, %d times\n", static_cast<unsigned long long>(n),
                    static_cast<unsigned long long>(calls), static_cast<int>(code), static_cast<int>(times));
        CHECK(false);
      }
}

// Eager work, captures into one heap, and launches in the order of the captures, as graphs that share memory
// need it. Launches leave known contents, and memory that moves loses none.
TEST(random_programs_that_capture_keep_their_contents) {
  constexpr int kSteps = 120;
  constexpr std::size_t kMostGraphs = 4;
  std::uint64_t lent = 0;
  for (std::uint64_t seed = 1; seed <= 60 / vram::testing::kSlowdown; ++seed) {
    std::uint64_t state = seed * 0x9e3779b97f4a7c15;
    const auto below = [&](std::uint64_t n) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return state % n;
    };
    PoolConfig config = spilling(seed % 3 == 0 ? 16 * kMiB : kGiB);
    if (seed % 4 == 0) config.cross_stream = CrossStream::wait;
    Capturing program(config);
    std::vector<std::uint64_t> graphs;
    const auto captured = [&] {
      if (!program.begin()) return false;
      std::vector<Address> passing;
      for (std::uint64_t left = 1 + below(5); left != 0; --left) {
        const Address address = program.get(kSlotBytes * (1 + below(3)), program.stream);
        if (address == 0) continue;
        CHECK(program.use(address));
        lent += program.where(address) == Location::host;
        if (below(2) == 0) {
          passing.push_back(address);
        } else {
          program.of_graph[address] = program.held.extract(address).mapped();
        }
        if (!passing.empty() && below(2) == 0) {
          CHECK(program.drop(passing.back()));
          passing.pop_back();
        }
      }
      for (const Address address : passing) CHECK(program.drop(address));
      return program.end(&graphs.emplace_back()) && program.launch(graphs.back());
    };
    bool good = true;
    for (int i = 0; i < kSteps && good; ++i) {
      const std::uint64_t dice = below(100);
      const Address address = program.any_held(below);
      std::uint64_t moved = 0;
      if (dice < 35) {
        (void)program.get(kSlotBytes * (1 + below(5)), below(3));
      } else if (dice < 50 && address != 0) {
        good = program.use(address);
      } else if (dice < 62 && address != 0) {
        good = program.drop(address);
      } else if (dice < 72 && graphs.size() < kMostGraphs) {
        good = captured();
      } else if (dice < 84 && !graphs.empty()) {
        for (const std::uint64_t graph : graphs) good = good && program.launch(graph);
      } else if (dice < 88) {
        good = program.world.pool->bring_back(8 * kMiB, &moved).ok();
      } else if (dice < 91 && address != 0) {
        (void)program.world.pool->spill(address, &moved);
      } else if (dice < 94) {
        good = program.world.pool->trim(0, below(2) == 0).ok();
      } else if (dice < 96 && !graphs.empty()) {
        for (const std::uint64_t graph : graphs) good = good && program.release(graph);
        graphs.clear();
      }
      good = good && program.world.good();
      if (i % 10 != 0 || !good) continue;
      good = program.right();
      for (const auto& [of_graph, block] : program.of_graph) good = good && program.launched_right(of_graph);
    }
    for (const std::uint64_t graph : graphs) good = good && program.release(graph);
    if (!good || !program.right() || !program.ends()) {
      std::printf("     seed %llu\n", static_cast<unsigned long long>(seed));
      CHECK(false);
      return;
    }
  }
  CHECK(lent > 0);
}

TEST_MAIN()
