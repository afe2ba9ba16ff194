// Planned steps from several threads at once: slots never overlap, every byte of the device comes back.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "backends/model.hpp"
#include "pool.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

struct World {
  std::shared_ptr<ModelBackend> device = std::make_shared<ModelBackend>(kGiB);
  Pool pool{device, PoolConfig{}};
  std::string why;
  ~World() {
    CHECK(pool.check(&why));
    CHECK(pool.close().ok());
  }
};

void chain(Pool& pool, StreamHandle stream, int count) {
  std::vector<Address> held;
  for (int i = 0; i < count; ++i) {
    Address address = 0;
    CHECK(pool.allocate((1 + i % 7) * 300 * kKiB, stream, 0, 0, &address).ok());
    held.push_back(address);
    if (held.size() > 3) {
      CHECK(pool.free(held.front()).ok());
      held.erase(held.begin());
    }
  }
  for (Address address : held) CHECK(pool.free(address).ok());
}

}  // namespace

TEST(a_repeated_step_is_served_from_its_plan) {
  World world;
  for (int step = 0; step < 5; ++step) {
    REQUIRE(world.pool.planned_begin(0.1, 0).ok());
    chain(world.pool, 0, 40);
    REQUIRE(world.pool.planned_end().ok());
    CHECK(world.pool.check(&world.why));
  }
  const PlannedReport report = world.pool.planned_report();
  CHECK(report.hits == 4 * 40 && report.fallbacks == 0 && report.plans == 1);
  CHECK(world.pool.planned_close().ok() && world.pool.live_bytes() == 0);
}

TEST(threads_share_a_step) {
  World world;
  StreamHandle streams[3] = {};
  for (StreamHandle& stream : streams) REQUIRE(world.device->stream_create(&stream).ok());
  for (int step = 0; step < 20; ++step) {
    REQUIRE(world.pool.planned_begin(0.01, 0).ok());
    std::vector<std::thread> threads;
    for (StreamHandle stream : streams) threads.emplace_back([&, stream] { chain(world.pool, stream, 60); });
    for (std::thread& thread : threads) thread.join();
    REQUIRE(world.pool.planned_end().ok());
    CHECK(world.pool.check(&world.why));
  }
  CHECK(world.pool.planned_report().hits > 0);
  CHECK(world.pool.planned_close().ok() && world.pool.live_bytes() == 0);
}

TEST(frees_come_from_other_threads_between_and_inside_steps) {
  World world;
  std::atomic<Address> handed{0};
  std::atomic<bool> over{false};
  std::thread freeing([&] {
    while (!over.load() || handed.load() != 0)
      if (const Address address = handed.exchange(0)) CHECK(world.pool.free(address).ok());
  });
  for (int step = 0; step < 200; ++step) {
    REQUIRE(world.pool.planned_begin(0.001, 0).ok());
    for (int i = 0; i < 10; ++i) {
      Address address = 0;
      REQUIRE(world.pool.allocate(kMiB, 0, 0, 0, &address).ok());
      if (const Address old = handed.exchange(address)) CHECK(world.pool.free(old).ok());
    }
    REQUIRE(world.pool.planned_end().ok());
  }
  over.store(true);
  freeing.join();
  CHECK(world.pool.planned_close().ok() && world.pool.live_bytes() == 0);
}

TEST_MAIN()
