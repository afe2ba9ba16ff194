// Copies between devices: contents arrive through a relay in whole and odd sizes, from several threads at
// once; a failure of any call leaves a relay that works; linked models share their time and refuse what is
// not opened.
#include "backends/transfers.hpp"

#include <cstring>
#include <thread>
#include <vector>

#include "backends/host.hpp"
#include "backends/model.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

constexpr std::uint64_t kSize = 3 * Relay::kChunkBytes + 12345;

ModelOptions numbered(int number) {
  ModelOptions options;
  options.base = (Address{1} << 47) * static_cast<Address>(1 + number);
  options.lag_us = 5;
  options.host_gb_per_s = 50;
  return options;
}

unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

// Real memory on two devices whose streams cannot wait for each other.
struct Hosts {
  std::shared_ptr<HostBackend> from = std::make_shared<HostBackend>(0);
  std::shared_ptr<HostBackend> to = std::make_shared<HostBackend>(0);
  std::uint64_t room = round_up(kSize, kSlotBytes);
  Address source = 0;
  Address target = 0;
  Hosts() {
    CHECK(from->reserve(room, &source).ok());
    CHECK(to->reserve(room, &target).ok());
    for (std::uint64_t i = 0; i < kSize; ++i)
      bytes_at(source)[i] = static_cast<unsigned char>(i * 7 + i / 4096);
  }
  ~Hosts() {
    CHECK(from->synchronize().ok() && to->synchronize().ok());
    CHECK(from->release(source, room).ok() && to->release(target, room).ok());
  }
};

TEST(a_relay_carries_contents_of_any_size) {
  Hosts hosts;
  Relay relay(*hosts.from, hosts.to);
  for (const std::uint64_t bytes : {std::uint64_t{1}, Relay::kChunkBytes - 1, Relay::kChunkBytes,
                                    Relay::kChunkBytes + 1, 2 * Relay::kChunkBytes, kSize}) {
    std::memset(bytes_at(hosts.target), 0xee, kSize);
    CHECK(relay.copy({*hosts.to, hosts.target, 0}, {*hosts.from, hosts.source, 0}, bytes).ok());
    CHECK(hosts.to->stream_synchronize(0).ok());
    CHECK(std::memcmp(bytes_at(hosts.target), bytes_at(hosts.source), bytes) == 0);
    CHECK(bytes == kSize || bytes_at(hosts.target)[bytes] == 0xee);
  }
}

TEST(several_threads_share_a_relay) {
  Hosts hosts;
  Relays relays;
  constexpr int kThreads = 4;
  const std::uint64_t part = kSize / kThreads;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      StreamHandle there = 0;
      StreamHandle here = 0;
      CHECK(hosts.from->stream_create(&there).ok() && hosts.to->stream_create(&here).ok());
      const Address offset = part * static_cast<Address>(i);
      for (int round = 0; round < 20; ++round)
        CHECK(copy_between({*hosts.to, hosts.target + offset, here},
                           {*hosts.from, hosts.source + offset, there}, true, part,
                           relays.to(*hosts.from, hosts.to).get())
                  .ok());
      CHECK(hosts.to->stream_synchronize(here).ok());
      CHECK(hosts.from->stream_destroy(there).ok() && hosts.to->stream_destroy(here).ok());
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(std::memcmp(bytes_at(hosts.target), bytes_at(hosts.source), part * kThreads) == 0);
  relays.clear();
}

// Each call of either side fails once; afterwards the relay works, and only its own events are left.
TEST(a_relay_survives_the_failure_of_any_call) {
  for (const bool linked : {true, false})
    for (const int side : {0, 1}) {
      std::uint64_t failures = 0;
      for (std::uint64_t nth = 1;; ++nth) {
        const auto from = std::make_shared<ModelBackend>(kGiB, numbered(0));
        const auto to = std::make_shared<ModelBackend>(kGiB, numbered(1));
        if (linked) CHECK(from->link(*to, 100, false).ok());
        Address source = 0;
        Address target = 0;
        const std::uint64_t room = round_up(kSize, kSlotBytes);
        CHECK(from->reserve(room, &source).ok() && to->reserve(room, &target).ok());
        ModelBackend& failing = side == 0 ? *from : *to;
        std::uint64_t made = 0;
        {
          Relay relay(*from, to);
          const std::uint64_t before = failing.total_calls();
          failing.fail_any(nth, {Code::failed, 700, ""});
          const Status status = relay.copy({*to, target, 0}, {*from, source, 0}, kSize);
          made = failing.total_calls() - before;
          failing.clear_failures();
          failures += status.ok() ? 0 : 1;
          CHECK(status.ok() == (made < nth));
          CHECK(relay.copy({*to, target, 0}, {*from, source, 0}, kSize).ok());
          CHECK(from->synchronize().ok() && to->synchronize().ok());
        }
        CHECK(from->counts().events == 0 && to->counts().events == 0);
        CHECK(from->release(source, room).ok() && to->release(target, room).ok());
        CHECK(from->check(nullptr) && to->check(nullptr));
        if (made < nth) break;
      }
      CHECK(failures >= 8);
    }
}

TEST(a_direct_copy_is_ordered_on_both_devices) {
  ModelBackend here(kGiB, numbered(0));
  ModelBackend there(kGiB, numbered(1));
  CHECK(!copies_directly(here, there));
  CHECK(here.link(there, 100, true).ok());
  CHECK(copies_directly(here, there) && copies_directly(there, here));
  Address source = 0;
  Address target = 0;
  CHECK(there.reserve(kSlotBytes, &source).ok() && here.reserve(kSlotBytes, &target).ok());
  there.set_lag(1000);
  CHECK(there.work(0, 1, source, kSlotBytes).ok());
  CHECK(copy_between({here, target, 0}, {there, source, 0}, true, kSlotBytes, nullptr).ok());
  const double copied = 1000 + static_cast<double>(kSlotBytes) / 100e3;
  CHECK(here.stream_synchronize(0).ok());
  CHECK(here.now() >= copied && there.now() == here.now());
  CHECK(there.stream_query(0).ok());
  CHECK(there.release(source, kSlotBytes).ok() && here.release(target, kSlotBytes).ok());
  CHECK(here.counts().events == 0 && there.counts().events == 0);
}

TEST(models_are_linked_only_where_their_time_can_be_one) {
  ModelBackend one(kGiB, numbered(0));
  ModelBackend two(kGiB, numbered(1));
  ModelBackend three(kGiB, numbered(2));
  ModelBackend four(kGiB, numbered(3));
  ModelBackend same(kGiB, numbered(0));
  ModelOptions stepped = numbered(4);
  stepped.schedule = Schedule::manual;
  ModelBackend manual(kGiB, stepped);
  CHECK(one.link(one, 1, true).code == Code::invalid);
  CHECK(one.link(same, 1, true).code == Code::invalid);
  CHECK(one.link(manual, 1, true).code == Code::invalid);
  CHECK(one.work(0, 1).ok());
  CHECK(one.link(two, 1, true).code == Code::invalid);
  CHECK(one.run_all());
  two.set_time(500);
  CHECK(one.link(two, 1, true).ok());
  CHECK(one.now() == 500);
  CHECK(three.link(two, 1, true).ok());
  CHECK(three.link(one, 1, false).ok());
  CHECK(three.can_access(two) && !three.can_access(one));
  CHECK(one.set_schedule(Schedule::manual).code == Code::invalid);
  four.advance(100);
  CHECK(four.now() == 100 && one.now() == 500);
}

TEST(memory_of_a_linked_model_must_be_opened) {
  ModelBackend owner(kGiB, numbered(0));
  ModelBackend user(kGiB, numbered(1));
  owner.set_number(0);
  user.set_number(1);
  CHECK(owner.link(user, 100, true).ok());
  Address plain = 0;
  Address space = 0;
  PageHandle page = 0;
  CHECK(owner.reserve(kSlotBytes, &plain).ok() && owner.space_reserve(kSlotBytes, &space).ok());
  CHECK(owner.page_create(kSlotBytes, &page).ok() && owner.map(space, kSlotBytes, page).ok());
  CHECK(owner.set_access(space, kSlotBytes).ok());
  for (const Address address : {plain, space})
    CHECK(user.fill(address, 0, kSlotBytes, 0).code == Code::invalid);
  CHECK(user.open_plain(owner).ok());
  CHECK(user.fill(plain, 0, kSlotBytes, 0).ok());
  CHECK(user.fill(space, 0, kSlotBytes, 0).code == Code::invalid);
  CHECK(owner.add_peer(1).ok() && owner.set_access(space, kSlotBytes).ok());
  CHECK(user.fill(space, 0, kSlotBytes, 0).ok());
  CHECK(user.synchronize().ok());
  CHECK(owner.unmap(space, kSlotBytes).ok());
  CHECK(user.fill(space, 0, kSlotBytes, 0).code == Code::invalid);
  CHECK(owner.page_release(page, kSlotBytes).ok() && owner.space_release(space, kSlotBytes).ok());
  CHECK(owner.release(plain, kSlotBytes).ok());
}

}  // namespace

TEST_MAIN()
