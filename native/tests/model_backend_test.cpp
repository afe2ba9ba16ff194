// The model backend keeps the contract on addresses alone: both schedules, failures on demand,
// prices, and accounts that a test can audit.
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backends/model.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::manual;

namespace {

constexpr std::uint64_t kPage = kSlotBytes;
constexpr std::uint64_t kBigPage = 16 * kSlotBytes;
using Ids = std::vector<std::uint64_t>;

Code code(Status status) { return status.code; }
bool near(double a, double b) { return std::fabs(a - b) < 1e-6; }

}  // namespace

TEST(addresses_are_deterministic_disjoint_and_reused) {
  ModelBackend one(kGiB), two(kGiB);
  Address first = 0, second = 0, space = 0, again = 0;
  REQUIRE(one.reserve(kPage, &first).ok() && one.reserve(3 * kPage, &second).ok());
  REQUIRE(one.space_reserve(kGiB, &space).ok());
  CHECK(first % kSlotBytes == 0 && second >= first + kPage && space >= second + 3 * kPage);
  CHECK(two.reserve(kPage, &again).ok());
  CHECK(again == first);
  CHECK(one.release(second, 3 * kPage).ok());
  CHECK(one.reserve(3 * kPage, &again).ok());
  CHECK(again == second);
}

TEST(long_runs_stay_inside_48_bits) {
  ModelBackend model(141 * kGiB);
  Address address = 0, highest = 0;
  for (std::uint64_t round = 0; round < 200000; ++round) {
    const std::uint64_t bytes = (round * 7919 % 70000 + 1) * kPage;
    REQUIRE(model.reserve(bytes, &address).ok());
    REQUIRE(model.release(address, bytes).ok());
    highest = std::max(highest, address + bytes);
  }
  CHECK(highest < std::uint64_t{1} << 48);
  CHECK(model.check(nullptr));
}

TEST(capacity_and_page_preconditions_hold) {
  ModelBackend model(20 * kPage);
  Address space = 0, plain = 0;
  PageHandle small = 0, big = 0, none = 0;
  REQUIRE(model.space_reserve(64 * kPage, &space).ok());
  REQUIRE(model.page_create(kPage, &small).ok() && model.page_create(kBigPage, &big).ok());
  CHECK(code(model.page_create(4 * kPage, &none)) == Code::out_of_memory);
  CHECK(code(model.page_create(2 * kPage, &none)) == Code::invalid);
  CHECK(code(model.reserve(4 * kPage, &plain)) == Code::out_of_memory);
  CHECK(model.reserve(3 * kPage, &plain).ok());
  REQUIRE(model.map(space, kPage, small).ok() && model.map(space + kPage, kBigPage, big).ok());
  CHECK(code(model.map(space, kPage, small)) == Code::invalid);
  CHECK(code(model.map(space + 4 * kPage, kPage, small)) == Code::invalid);
  CHECK(model.map(space + 40 * kPage, kPage, small).ok());
  CHECK(code(model.set_access(space, 18 * kPage)) == Code::invalid);
  CHECK(code(model.set_access(space, 3 * kPage)) == Code::invalid);
  CHECK(model.set_access(space, 17 * kPage).ok());
  CHECK(code(model.unmap(space + 2 * kPage, kPage)) == Code::invalid);
  CHECK(code(model.unmap(space + kPage, kPage)) == Code::invalid);
  CHECK(code(model.page_release(small, kPage)) == Code::invalid);
  CHECK(model.unmap(space, kPage).ok());
  CHECK(code(model.page_release(small, kPage)) == Code::invalid);
  CHECK(model.unmap(space + 40 * kPage, kPage).ok());
  CHECK(code(model.page_release(small, kBigPage)) == Code::invalid);
  CHECK(model.page_release(small, kPage).ok());
  CHECK(code(model.page_release(small, kPage)) == Code::invalid);
  CHECK(code(model.space_release(space, 64 * kPage)) == Code::invalid);
  CHECK(model.counts().pages == 1 && model.counts().mappings == 1 && model.counts().plain_ranges == 1);
  CHECK(model.unmap(space + kPage, kBigPage).ok() && model.page_release(big, kBigPage).ok());
  CHECK(code(model.space_release(space, 32 * kPage)) == Code::invalid);
  CHECK(model.space_release(space, 64 * kPage).ok() && model.release(plain, 3 * kPage).ok());
  const ModelCounts left = model.counts();
  CHECK(left.plain_ranges + left.spaces + left.pages + left.mappings + left.events + left.queued == 0);
  CHECK(left.streams == 1);
  std::string why;
  CHECK(model.check(&why));
}

TEST(without_pages_the_page_calls_are_unsupported) {
  ModelOptions options;
  options.pages = false;
  ModelBackend model(kGiB, options);
  Address space = 0;
  PageHandle page = 0;
  CHECK(!model.info().pages);
  CHECK(code(model.space_reserve(kPage, &space)) == Code::unsupported);
  CHECK(code(model.page_create(kPage, &page)) == Code::unsupported);
}

TEST(unknown_streams_and_events_are_invalid) {
  ModelBackend model(kGiB);
  EventHandle event = 0;
  StreamHandle stream = 0;
  REQUIRE(model.event_create(&event).ok() && model.stream_create(&stream).ok());
  CHECK(model.stream_destroy(stream).ok() && model.event_destroy(event).ok());
  CHECK(code(model.stream_destroy(stream)) == Code::invalid);
  CHECK(code(model.stream_destroy(0)) == Code::invalid);
  CHECK(code(model.stream_query(stream)) == Code::invalid);
  CHECK(code(model.stream_query(77)) == Code::invalid);
  CHECK(code(model.event_destroy(event)) == Code::invalid);
  CHECK(code(model.event_record(event, 0)) == Code::invalid);
  CHECK(code(model.event_query(event)) == Code::invalid);
  CHECK(code(model.event_synchronize(event)) == Code::invalid);
  CHECK(code(model.stream_wait(0, event)) == Code::invalid);
  CHECK(code(model.launch(stream, [] {})) == Code::invalid);
  EventHandle next = 0;
  CHECK(model.event_create(&next).ok() && next != event);
}

// ---- the lag schedule -----------------------------------------------------------------------------

TEST(an_event_passes_one_lag_after_it_was_recorded) {
  ModelBackend model(kGiB);
  EventHandle event = 0;
  REQUIRE(model.event_create(&event).ok());
  CHECK(model.event_query(event).ok());
  model.set_time(100.0);
  CHECK(model.event_record(event, 0).ok());
  CHECK(code(model.event_query(event)) == Code::not_ready);
  model.advance(4999.0);
  CHECK(code(model.event_query(event)) == Code::not_ready);
  CHECK(code(model.stream_query(0)) == Code::not_ready);
  model.advance(1.0);
  CHECK(model.event_query(event).ok() && model.stream_query(0).ok());
  model.set_time(50.0);
  CHECK(near(model.now(), 5100.0));
}

TEST(a_wait_delays_what_is_queued_behind_it) {
  ModelBackend model(kGiB);
  EventHandle first = 0, second = 0;
  StreamHandle stream = 0;
  REQUIRE(model.event_create(&first).ok() && model.event_create(&second).ok());
  REQUIRE(model.stream_create(&stream).ok());
  model.set_lag(1000.0);
  CHECK(model.event_record(first, 0).ok());
  model.set_lag(10.0);
  CHECK(model.stream_wait(stream, first).ok());
  CHECK(model.event_record(second, stream).ok());
  model.advance(500.0);
  CHECK(code(model.event_query(second)) == Code::not_ready);
  CHECK(model.event_synchronize(second).ok());
  CHECK(near(model.now(), 1000.0));
  CHECK(model.host_waits() == 1 && near(model.host_wait_us(), 500.0));
  CHECK(model.event_synchronize(first).ok());
  CHECK(model.host_waits() == 1);
}

TEST(lagging_work_runs_in_the_order_it_finishes) {
  ModelBackend model(kGiB);
  StreamHandle stream = 0;
  REQUIRE(model.stream_create(&stream).ok());
  int launched_at = 0;
  CHECK(model.work(stream, 1).ok());
  model.advance(1.0);
  CHECK(model.work(0, 2).ok());
  CHECK(model.work(stream, 3).ok());
  CHECK(model.launch(0, [&] { launched_at = static_cast<int>(model.now()); }).ok());
  model.advance(4999.0);
  CHECK(model.executed() == Ids{1});
  CHECK(model.stream_synchronize(0).ok());
  CHECK((model.executed() == Ids{1, 2, 3, ModelBackend::kFirstOwnId}));
  CHECK(launched_at == 5001);
  CHECK(model.run_all() && model.check(nullptr));
}

TEST(what_queued_work_touches_cannot_be_taken_away) {
  ModelBackend model(kGiB);
  Address plain = 0, space = 0;
  PageHandle page = 0;
  REQUIRE(model.reserve(kPage, &plain).ok() && model.space_reserve(4 * kPage, &space).ok());
  REQUIRE(model.page_create(kPage, &page).ok() && model.map(space, kPage, page).ok());
  CHECK(code(model.work(0, 1, space, 100)) == Code::invalid);
  CHECK(code(model.fill(space, 0, 100, 0)) == Code::invalid);
  CHECK(model.set_access(space, kPage).ok());
  CHECK(model.work(0, 1, space + 100, 100).ok());
  CHECK(model.copy(plain + 512, 4096, 512, 0).ok());
  CHECK(code(model.unmap(space, kPage)) == Code::invalid);
  CHECK(code(model.release(plain, kPage)) == Code::invalid);
  CHECK(model.stream_synchronize(0).ok());
  CHECK(model.unmap(space, kPage).ok() && model.release(plain, kPage).ok());
}

// ---- the manual schedule --------------------------------------------------------------------------

TEST(nothing_happens_until_it_is_stepped) {
  ModelBackend model(kGiB, manual());
  EventHandle event = 0;
  bool ran = false;
  REQUIRE(model.event_create(&event).ok());
  CHECK(model.launch(0, [&] { ran = true; }).ok());
  CHECK(model.event_record(event, 0).ok());
  model.advance(1e9);
  CHECK(!ran && code(model.event_query(event)) == Code::not_ready);
  CHECK(model.step(0) && ran);
  CHECK(code(model.event_query(event)) == Code::not_ready);
  CHECK(model.step(0) && model.event_query(event).ok() && model.stream_query(0).ok());
  CHECK(!model.step(0) && !model.step(99));
}

TEST(a_blocked_wait_holds_its_stream_only) {
  ModelBackend model(kGiB, manual());
  StreamHandle stream = 0;
  EventHandle event = 0;
  REQUIRE(model.stream_create(&stream).ok() && model.event_create(&event).ok());
  CHECK(model.stream_wait(stream, event).ok());
  CHECK(model.work(0, 1).ok() && model.event_record(event, 0).ok());
  CHECK(model.stream_wait(stream, event).ok() && model.work(stream, 2).ok());
  // The wait has captured the mark: recording again behind more work does not move it.
  CHECK(model.work(0, 3).ok() && model.event_record(event, 0).ok());
  CHECK(model.event_destroy(event).ok());
  CHECK(!model.step(stream));
  CHECK(model.step(0) && !model.step(stream));
  CHECK(model.step(0) && model.step(stream) && model.step(stream));
  CHECK((model.executed() == Ids{1, 2}));
  CHECK(model.run_all());
  CHECK((model.executed() == Ids{1, 2, 3}));
  CHECK(model.check(nullptr));
}

TEST(synchronize_runs_what_it_needs_in_turn) {
  ModelBackend model(kGiB, manual());
  StreamHandle stream = 0;
  EventHandle event = 0;
  REQUIRE(model.stream_create(&stream).ok() && model.event_create(&event).ok());
  CHECK(model.work(stream, 1).ok() && model.work(stream, 2).ok() && model.event_record(event, stream).ok());
  CHECK(model.stream_wait(0, event).ok() && model.work(0, 3).ok() && model.work(0, 4).ok());
  CHECK(model.event_synchronize(event).ok());
  CHECK((model.executed() == Ids{1, 2}));
  CHECK(model.stream_synchronize(0).ok());
  CHECK((model.executed() == Ids{1, 2, 3, 4}));
  CHECK(model.host_waits() == 2);
}

TEST(a_launched_function_cannot_wait_for_itself) {
  ModelBackend model(kGiB, manual());
  Code inner = Code::ok;
  CHECK(model.launch(0, [&] { inner = code(model.stream_synchronize(0)); }).ok());
  CHECK(model.stream_synchronize(0).ok());
  CHECK(inner == Code::deadlock);
  CHECK(model.launch(0, [] { throw std::runtime_error("lost"); }).ok());
  CHECK(model.run_all());
}

TEST(a_destroyed_streams_work_is_still_stepped) {
  ModelBackend model(kGiB, manual());
  StreamHandle stream = 0;
  EventHandle event = 0;
  REQUIRE(model.stream_create(&stream).ok() && model.event_create(&event).ok());
  CHECK(model.work(stream, 1).ok() && model.event_record(event, stream).ok());
  CHECK(model.stream_destroy(stream).ok());
  CHECK(code(model.event_query(event)) == Code::not_ready);
  CHECK(model.step(stream) && model.step(stream) && model.event_query(event).ok());
  CHECK(model.counts().streams == 1 && model.counts().queued == 0);
}

TEST(the_schedule_changes_only_when_all_is_done) {
  ModelBackend model(kGiB);
  EventHandle event = 0;
  REQUIRE(model.event_create(&event).ok());
  CHECK(model.event_record(event, 0).ok());
  CHECK(code(model.set_schedule(Schedule::manual)) == Code::invalid);
  CHECK(model.event_synchronize(event).ok());
  CHECK(model.set_schedule(Schedule::manual).ok());
  CHECK(model.event_query(event).ok());
  CHECK(model.event_record(event, 0).ok());
  CHECK(code(model.set_schedule(Schedule::lag)) == Code::invalid);
  CHECK(model.run_all() && model.set_schedule(Schedule::lag).ok());
  CHECK(model.event_query(event).ok() && model.stream_query(0).ok());
}

// ---- failures, counts and prices --------------------------------------------------------------------

TEST(the_nth_call_fails_once_and_changes_nothing) {
  ModelBackend model(kGiB);
  PageHandle page = 0;
  CHECK(model.page_create(kPage, &page).ok());
  CHECK(model.fail("page_create", 2, {Code::failed, 700, ""}));
  CHECK(!model.fail("page_make", 1, {Code::failed, 0, ""}));
  CHECK(model.page_create(kPage, &page).ok());
  const PageHandle before = page;
  const Status status = model.page_create(kPage, &page);
  CHECK(status.code == Code::failed && status.native == 700);
  CHECK(std::string(status.call) == "page_create");
  CHECK(page == before && model.counts().pages == 2);
  CHECK(model.page_create(kPage, &page).ok());
  CHECK(model.calls("page_create") == 4 && model.total_calls() == 4 && model.memory_calls() == 4);
}

TEST(every_call_can_be_made_to_fail) {
  const auto session = [](ModelBackend& model) {
    Address space = 0, plain = 0;
    PageHandle page = 0;
    StreamHandle stream = 0;
    EventHandle event = 0;
    std::uint64_t free_bytes = 0, total_bytes = 0;
    std::uint64_t failed = 0;
    const auto count = [&failed](Status status) { failed += status.code == Code::failed ? 1 : 0; };
    count(model.memory_info(&free_bytes, &total_bytes));
    count(model.reserve(kPage, &plain));
    count(model.space_reserve(kPage, &space));
    count(model.page_create(kPage, &page));
    count(model.map(space, kPage, page));
    count(model.set_access(space, kPage));
    count(model.stream_create(&stream));
    count(model.event_create(&event));
    count(model.launch(stream, [] {}));
    count(model.copy(plain, 4096, 16, stream));
    count(model.fill(plain, 0, 16, stream));
    count(model.event_record(event, stream));
    count(model.stream_wait(0, event));
    count(model.event_query(event));
    count(model.event_synchronize(event));
    count(model.stream_query(stream));
    count(model.stream_synchronize(stream));
    count(model.stream_destroy(stream));
    count(model.event_destroy(event));
    count(model.unmap(space, kPage));
    count(model.page_release(page, kPage));
    count(model.space_release(space, kPage));
    count(model.release(plain, kPage));
    return failed;
  };
  ModelBackend clean(kGiB);
  CHECK(session(clean) == 0);
  const std::uint64_t calls = clean.total_calls();
  CHECK(calls == 23);
  for (std::uint64_t nth = 1; nth <= calls; ++nth) {
    ModelBackend model(kGiB);
    model.fail_any(nth, {Code::failed, 1, ""});
    CHECK(session(model) == 1);
    CHECK(model.check(nullptr));
  }
}

TEST(prices_follow_the_table) {
  ModelBackend model(16 * kGiB);
  Address space = 0, plain = 0;
  PageHandle small = 0, middle = 0, big = 0;
  EventHandle event = 0;
  double paid = 0;
  const auto price = [&] {
    const double delta = model.driver_us() - paid;
    paid = model.driver_us();
    return delta;
  };
  REQUIRE(model.space_reserve(kGiB, &space).ok());
  CHECK(near(price(), 29.0));
  REQUIRE(model.page_create(kPage, &small).ok());
  CHECK(near(price(), 11.0));
  REQUIRE(model.page_create(4 * kPage, &middle).ok());
  CHECK(near(price(), 10.2));
  REQUIRE(model.page_create(kBigPage, &big).ok());
  CHECK(near(price(), 9.4));
  REQUIRE(model.map(space, kPage, small).ok() && model.map(space + kPage, kBigPage, big).ok());
  CHECK(near(price(), 2.6));
  REQUIRE(model.set_access(space, 17 * kPage).ok());
  CHECK(near(price(), 55.5));
  REQUIRE(model.reserve(kPage, &plain).ok() && model.release(plain, kPage).ok());
  CHECK(near(price(), 86.0));
  REQUIRE(model.reserve(288 * kMiB, &plain).ok() && model.release(plain, 288 * kMiB).ok());
  CHECK(near(price(), (156.0 + 429.0) / 2));
  REQUIRE(model.reserve(8 * kGiB, &plain).ok());
  CHECK(price() > 0.6 * 6000);
  const double memory = model.memory_us();
  REQUIRE(model.event_create(&event).ok() && model.event_record(event, 0).ok());
  CHECK(near(price(), 0.72) && near(model.memory_us(), memory));
}

TEST(calls_may_come_from_many_threads) {
  ModelBackend model(kGiB);
  const auto client = [&model] {
    for (int round = 0; round < 2000; ++round) {
      EventHandle event = 0;
      Address address = 0;
      CHECK(model.event_create(&event).ok() && model.event_record(event, 0).ok());
      CHECK(model.reserve(kPage, &address).ok());
      CHECK(model.launch(0, [] {}).ok());
      CHECK(model.event_synchronize(event).ok() && model.event_destroy(event).ok());
      CHECK(model.release(address, kPage).ok());
    }
  };
  std::vector<std::thread> clients;
  for (int index = 0; index < 3; ++index) clients.emplace_back(client);
  for (std::thread& thread : clients) thread.join();
  CHECK(model.run_all() && model.check(nullptr));
  CHECK(model.counts().events == 0 && model.counts().plain_ranges == 0);
}

TEST_MAIN()
