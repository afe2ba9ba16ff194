// The host backend keeps the contract with real memory and real threads: aliasing, stream order,
// waits across streams, destruction under load, forks.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backends/host.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::holds_in_child;

namespace {

constexpr std::uint64_t kPage = kSlotBytes;
constexpr std::uint64_t kBigPage = 16 * kSlotBytes;

// A door that launched work waits at until the test opens it.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// Volatile: the compiler must not assume that two addresses are two memories.
volatile char* bytes_at(Address address) { return reinterpret_cast<volatile char*>(address); }

Code code(Status status) { return status.code; }

struct Mapped {
  Address address = 0;
  PageHandle page = 0;
};

// A page mapped with access at the start of a new space of that size.
Mapped mapped_page(HostBackend& host, std::uint64_t bytes) {
  Mapped made;
  CHECK(host.space_reserve(bytes, &made.address).ok());
  CHECK(host.page_create(bytes, &made.page).ok());
  CHECK(host.map(made.address, bytes, made.page).ok());
  CHECK(host.set_access(made.address, bytes).ok());
  return made;
}

void unmake(HostBackend& host, Mapped made, std::uint64_t bytes) {
  CHECK(host.unmap(made.address, bytes).ok());
  CHECK(host.page_release(made.page, bytes).ok());
  CHECK(host.space_release(made.address, bytes).ok());
}

}  // namespace

TEST(plain_memory_is_usable_and_counted) {
  HostBackend host(8 * kPage);
  Address address = 0;
  REQUIRE(host.reserve(2 * kPage, &address).ok());
  CHECK(address % kUnit == 0);
  bytes_at(address)[2 * kPage - 1] = 7;
  std::uint64_t free_bytes = 0, total_bytes = 0;
  CHECK(host.memory_info(&free_bytes, &total_bytes).ok());
  CHECK(total_bytes == 8 * kPage && free_bytes == 6 * kPage);
  CHECK(code(host.release(address, kPage)) == Code::invalid);
  CHECK(code(host.release(address + kPage, kPage)) == Code::invalid);
  CHECK(host.release(address, 2 * kPage).ok());
  CHECK(code(host.release(address, 2 * kPage)) == Code::invalid);
}

TEST(capacity_bounds_plain_memory_and_pages_together) {
  HostBackend host(4 * kPage);
  Address address = 0, other = 0;
  PageHandle page = 0;
  CHECK(code(host.reserve(5 * kPage, &address)) == Code::out_of_memory);
  CHECK(code(host.reserve(~std::uint64_t{0} / kPage * kPage, &address)) == Code::out_of_memory);
  CHECK(code(host.reserve(0, &address)) == Code::invalid);
  CHECK(code(host.reserve(kPage + 1, &address)) == Code::invalid);
  REQUIRE(host.reserve(3 * kPage, &address).ok());
  REQUIRE(host.page_create(kPage, &page).ok());
  CHECK(code(host.reserve(kPage, &other)) == Code::out_of_memory);
  CHECK(code(host.page_create(kPage, &page)) == Code::out_of_memory);
  CHECK(host.release(address, 3 * kPage).ok());
  CHECK(host.page_release(page, kPage).ok());
}

TEST(default_capacity_is_the_machines_memory) {
  HostBackend host;
  CHECK(host.info().total_bytes > 64 * kMiB);
  CHECK(host.info().name == "host" && host.info().host_accessible && host.info().pages);
}

TEST(one_page_at_two_addresses_is_one_memory) {
  HostBackend host;
  Address space = 0;
  PageHandle page = 0;
  REQUIRE(host.space_reserve(8 * kPage, &space).ok());
  CHECK(space % kSlotBytes == 0);
  REQUIRE(host.page_create(kPage, &page).ok());
  REQUIRE(host.map(space, kPage, page).ok());
  REQUIRE(host.map(space + 5 * kPage, kPage, page).ok());
  REQUIRE(host.set_access(space, kPage).ok());
  REQUIRE(host.set_access(space + 5 * kPage, kPage).ok());
  bytes_at(space)[12345] = 42;
  CHECK(bytes_at(space + 5 * kPage)[12345] == 42);
  CHECK(code(host.page_release(page, kPage)) == Code::invalid);
  CHECK(host.unmap(space, kPage).ok());
  CHECK(bytes_at(space + 5 * kPage)[12345] == 42);
  CHECK(code(host.space_release(space, 8 * kPage)) == Code::invalid);
  CHECK(host.unmap(space + 5 * kPage, kPage).ok());
  CHECK(host.page_release(page, kPage).ok());
  CHECK(host.space_release(space, 8 * kPage).ok());
  CHECK(host.check(nullptr));
}

TEST(a_page_keeps_its_bytes_when_it_moves_and_loses_them_when_released) {
  HostBackend host;
  Mapped made = mapped_page(host, kPage);
  std::memset(reinterpret_cast<void*>(made.address), 9, kPage);
  CHECK(host.unmap(made.address, kPage).ok());
  CHECK(host.map(made.address, kPage, made.page).ok());
  CHECK(host.set_access(made.address, kPage).ok());
  CHECK(bytes_at(made.address)[kPage - 1] == 9);
  unmake(host, made, kPage);
  made = mapped_page(host, kPage);
  CHECK(bytes_at(made.address)[kPage - 1] == 0);
  unmake(host, made, kPage);
}

TEST(map_calls_check_their_preconditions) {
  HostBackend host;
  Address space = 0;
  PageHandle small = 0, big = 0;
  REQUIRE(host.space_reserve(32 * kPage, &space).ok());
  REQUIRE(host.page_create(kPage, &small).ok());
  REQUIRE(host.page_create(kBigPage, &big).ok());
  CHECK(code(host.page_create(3 * kPage, &small)) == Code::invalid);
  CHECK(code(host.map(space + 1, kPage, small)) == Code::invalid);
  CHECK(code(host.map(space, 2 * kPage, small)) == Code::invalid);
  CHECK(code(host.map(space, kPage, small + 1)) == Code::invalid);
  CHECK(code(host.map(space + 17 * kPage, kBigPage, big)) == Code::invalid);
  CHECK(code(host.map(space - kPage, kPage, small)) == Code::invalid);
  REQUIRE(host.map(space + kPage, kBigPage, big).ok());
  CHECK(code(host.map(space + 3 * kPage, kPage, small)) == Code::invalid);
  CHECK(code(host.set_access(space, 2 * kPage)) == Code::invalid);
  CHECK(code(host.set_access(space + kPage, 8 * kPage)) == Code::invalid);
  REQUIRE(host.map(space, kPage, small).ok());
  CHECK(host.set_access(space, kPage + kBigPage).ok());
  CHECK(code(host.unmap(space + 2 * kPage, kPage)) == Code::invalid);
  CHECK(code(host.unmap(space + kPage, kPage)) == Code::invalid);
  CHECK(host.unmap(space + kPage, kBigPage).ok());
  CHECK(host.unmap(space, kPage).ok());
  CHECK(code(host.unmap(space, kPage)) == Code::invalid);
  CHECK(host.page_release(big, kBigPage).ok());
  CHECK(host.page_release(small, kPage).ok());
  CHECK(code(host.page_release(small, kPage)) == Code::invalid);
  CHECK(host.space_release(space, 32 * kPage).ok());
  CHECK(host.check(nullptr));
}

TEST(work_needs_access_to_what_it_touches) {
  HostBackend host;
  Address space = 0;
  PageHandle page = 0;
  REQUIRE(host.space_reserve(2 * kPage, &space).ok());
  REQUIRE(host.page_create(kPage, &page).ok());
  CHECK(code(host.fill(space, 1, 16, 0)) == Code::invalid);
  REQUIRE(host.map(space, kPage, page).ok());
  CHECK(code(host.fill(space, 1, 16, 0)) == Code::invalid);
  REQUIRE(host.set_access(space, kPage).ok());
  CHECK(host.fill(space, 1, 16, 0).ok());
  CHECK(code(host.fill(space + kPage - 8, 1, 16, 0)) == Code::invalid);
  CHECK(code(host.copy(0, space, 16, 0)) == Code::invalid);
  CHECK(host.copy(0, 0, 0, 0).ok());
  CHECK(host.stream_synchronize(0).ok());
  CHECK(bytes_at(space)[15] == 1 && bytes_at(space)[16] == 0);
}

TEST(a_stream_runs_its_work_in_order) {
  HostBackend host;
  StreamHandle stream = 0;
  REQUIRE(host.stream_create(&stream).ok());
  CHECK(stream != 0);
  std::vector<int> order;
  for (int index = 0; index < 1000; ++index) {
    CHECK(host.launch(stream, [&order, index] { order.push_back(index); }).ok());
  }
  CHECK(host.stream_synchronize(stream).ok());
  REQUIRE(order.size() == 1000);
  for (int index = 0; index < 1000; ++index) CHECK(order[static_cast<std::size_t>(index)] == index);
}

TEST(two_streams_overlap) {
  HostBackend host;
  StreamHandle one = 0, two = 0;
  REQUIRE(host.stream_create(&one).ok() && host.stream_create(&two).ok());
  Gate first_is_running, second_is_running;
  CHECK(host.launch(one, [&] { first_is_running.open(), second_is_running.pass(); }).ok());
  CHECK(host.launch(two, [&] { second_is_running.open(), first_is_running.pass(); }).ok());
  CHECK(host.stream_synchronize(one).ok());
  CHECK(host.stream_synchronize(two).ok());
}

TEST(calls_return_before_the_work_is_done) {
  HostBackend host;
  Address address = 0;
  REQUIRE(host.reserve(kPage, &address).ok());
  Gate gate;
  EventHandle event = 0;
  REQUIRE(host.event_create(&event).ok());
  CHECK(host.event_query(event).ok());
  CHECK(host.stream_query(0).ok());
  CHECK(host.launch(0, [&] { gate.pass(); }).ok());
  CHECK(host.fill(address, 5, kPage, 0).ok());
  CHECK(host.event_record(event, 0).ok());
  CHECK(code(host.event_query(event)) == Code::not_ready);
  CHECK(code(host.stream_query(0)) == Code::not_ready);
  CHECK(bytes_at(address)[0] == 0);
  gate.open();
  CHECK(host.event_synchronize(event).ok());
  CHECK(host.event_query(event).ok());
  CHECK(bytes_at(address)[kPage - 1] == 5);
  CHECK(host.event_destroy(event).ok());
  CHECK(code(host.event_destroy(event)) == Code::invalid);
  CHECK(code(host.event_query(event)) == Code::invalid);
}

TEST(a_stream_waits_for_the_mark_at_the_time_of_the_call) {
  HostBackend host;
  StreamHandle producer = 0, consumer = 0;
  EventHandle event = 0;
  REQUIRE(host.stream_create(&producer).ok() && host.stream_create(&consumer).ok());
  REQUIRE(host.event_create(&event).ok());
  CHECK(host.stream_wait(consumer, event).ok());
  Gate first, second;
  std::atomic<int> produced{0}, seen{-1};
  CHECK(host.launch(producer, [&] { first.pass(), produced = 1; }).ok());
  CHECK(host.event_record(event, producer).ok());
  CHECK(host.stream_wait(consumer, event).ok());
  CHECK(host.launch(consumer, [&] { seen = produced.load(); }).ok());
  // Moving the mark afterwards, behind work that does not end yet, does not change that wait.
  CHECK(host.launch(producer, [&] { second.pass(); }).ok());
  CHECK(host.event_record(event, producer).ok());
  CHECK(code(host.stream_query(consumer)) == Code::not_ready);
  CHECK(seen == -1);
  first.open();
  CHECK(host.stream_synchronize(consumer).ok());
  CHECK(seen == 1);
  CHECK(code(host.event_query(event)) == Code::not_ready);
  second.open();
  CHECK(host.event_synchronize(event).ok());
}

TEST(an_event_may_be_destroyed_while_pending) {
  HostBackend host;
  StreamHandle stream = 0;
  REQUIRE(host.stream_create(&stream).ok());
  Gate gate;
  EventHandle event = 0;
  REQUIRE(host.event_create(&event).ok());
  bool done = false;
  CHECK(host.launch(0, [&] { gate.pass(), done = true; }).ok());
  CHECK(host.event_record(event, 0).ok());
  CHECK(host.stream_wait(stream, event).ok());
  CHECK(host.event_destroy(event).ok());
  bool seen = false;
  CHECK(host.launch(stream, [&] { seen = done; }).ok());
  gate.open();
  CHECK(host.stream_synchronize(stream).ok());
  CHECK(seen);
}

TEST(stream_handles_grow_and_are_checked) {
  HostBackend host;
  StreamHandle one = 0, two = 0;
  REQUIRE(host.stream_create(&one).ok());
  CHECK(host.stream_destroy(one).ok());
  REQUIRE(host.stream_create(&two).ok());
  CHECK(two == one + 1);
  CHECK(code(host.stream_destroy(one)) == Code::invalid);
  CHECK(code(host.stream_destroy(0)) == Code::invalid);
  CHECK(code(host.stream_synchronize(one)) == Code::invalid);
  CHECK(code(host.launch(one, [] {})) == Code::invalid);
  CHECK(code(host.launch(two, nullptr)) == Code::invalid);
  EventHandle event = 0;
  REQUIRE(host.event_create(&event).ok());
  CHECK(code(host.event_record(event, one)) == Code::invalid);
  CHECK(code(host.stream_wait(one, event)) == Code::invalid);
  CHECK(code(host.stream_wait(two, event + 1)) == Code::invalid);
}

TEST(a_destroyed_stream_finishes_its_work) {
  HostBackend host;
  StreamHandle stream = 0;
  EventHandle event = 0;
  REQUIRE(host.stream_create(&stream).ok() && host.event_create(&event).ok());
  Gate gate;
  int done = 0;
  CHECK(host.launch(stream, [&] { gate.pass(); }).ok());
  for (int index = 0; index < 10; ++index) CHECK(host.launch(stream, [&] { ++done; }).ok());
  CHECK(host.event_record(event, stream).ok());
  CHECK(host.stream_destroy(stream).ok());
  CHECK(code(host.event_query(event)) == Code::not_ready);
  gate.open();
  CHECK(host.event_synchronize(event).ok());
  CHECK(done == 10);
  CHECK(host.synchronize().ok());
}

TEST(waiting_for_ones_own_stream_is_refused) {
  HostBackend host;
  Code stream_code = Code::ok, event_code = Code::ok;
  EventHandle event = 0;
  REQUIRE(host.event_create(&event).ok());
  CHECK(host.launch(0,
                    [&] {
                      stream_code = host.stream_synchronize(0).code;
                      (void)host.event_record(event, 0);
                      event_code = host.event_synchronize(event).code;
                    })
            .ok());
  CHECK(host.stream_synchronize(0).ok());
  CHECK(stream_code == Code::deadlock && event_code == Code::deadlock);
}

TEST(what_work_throws_does_not_stop_the_stream) {
  HostBackend host;
  bool after = false;
  CHECK(host.launch(0, [] { throw std::runtime_error("lost"); }).ok());
  CHECK(host.launch(0, [] { throw 3; }).ok());
  CHECK(host.launch(0, [&] { after = true; }).ok());
  CHECK(host.stream_synchronize(0).ok());
  CHECK(after);
}

TEST(what_work_holds_is_gone_when_a_wait_returns) {
  HostBackend host;
  auto held = std::make_shared<int>(1);
  for (int round = 0; round < 100; ++round) {
    CHECK(host.launch(0, [held] { (void)held; }).ok());
    CHECK(host.stream_synchronize(0).ok());
    CHECK(held.use_count() == 1);
  }
}

TEST(destruction_lets_streams_that_wait_for_each_other_finish) {
  std::atomic<int> done{0};
  {
    HostBackend host;
    StreamHandle one = 0, two = 0;
    EventHandle event = 0;
    REQUIRE(host.stream_create(&one).ok() && host.stream_create(&two).ok() && host.event_create(&event).ok());
    for (int round = 0; round < 200; ++round) {
      const StreamHandle from = round % 2 == 0 ? one : two, to = round % 2 == 0 ? two : one;
      CHECK(host.launch(from, [&] { ++done; }).ok());
      CHECK(host.event_record(event, from).ok());
      CHECK(host.stream_wait(to, event).ok());
    }
    CHECK(host.launch(two, [&] { ++done; }).ok());
    CHECK(host.stream_destroy(two).ok());
  }
  CHECK(done == 201);
}

TEST(calls_may_come_from_many_threads) {
  HostBackend host;
  std::atomic<std::uint64_t> ran{0};
  const auto client = [&] {
    StreamHandle stream = 0;
    EventHandle event = 0;
    Address address = 0;
    CHECK(host.stream_create(&stream).ok() && host.event_create(&event).ok());
    for (int round = 0; round < 100; ++round) {
      CHECK(host.reserve(kPage, &address).ok());
      CHECK(host.fill(address, 1, 4096, stream).ok());
      CHECK(host.launch(stream, [&] { ++ran; }).ok());
      CHECK(host.event_record(event, stream).ok());
      CHECK(host.stream_wait(0, event).ok());
      CHECK(host.event_synchronize(event).ok());
      CHECK(host.release(address, kPage).ok());
    }
    CHECK(host.stream_destroy(stream).ok() && host.event_destroy(event).ok());
  };
  std::vector<std::thread> clients;
  for (int index = 0; index < 4; ++index) clients.emplace_back(client);
  for (std::thread& thread : clients) thread.join();
  CHECK(host.synchronize().ok());
  CHECK(ran == 400);
  CHECK(host.check(nullptr));
}

#if !defined(__SANITIZE_THREAD__)  // the child of a threaded process may not start threads there
TEST(a_forks_child_finds_the_device_closed_and_may_make_its_own) {
  auto host = std::make_unique<HostBackend>();
  Gate gate;
  Address address = 0;
  REQUIRE(host->reserve(kPage, &address).ok());
  CHECK(host->launch(0, [&] { gate.pass(); }).ok());
  CHECK(holds_in_child([&] {
    StreamHandle stream = 0;
    const bool closed = code(host->stream_synchronize(0)) == Code::closed &&
                        code(host->release(address, kPage)) == Code::closed &&
                        code(host->stream_create(&stream)) == Code::closed;
    host.reset();
    HostBackend own;
    bool ran = false;
    const bool works = own.launch(0, [&] { ran = true; }).ok() && own.stream_synchronize(0).ok() && ran;
    return closed && works;
  }));
  gate.open();
  CHECK(host->stream_synchronize(0).ok());
}
#endif

TEST_MAIN()
