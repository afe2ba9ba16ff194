// Host pages and gates, the same promises on the model, on the host and on a GPU if there is one; then what
// only the model can show: prices, stamps, refusals and every call failing.
#include <atomic>
#include <cstring>
#include <thread>

#include "backends/cuda.hpp"
#include "backends/driver_costs.hpp"
#include "backends/host.hpp"
#include "backends/model.hpp"
#include "pool/gates.hpp"
#include "testing.hpp"

using namespace vram;
using Location = ModelBackend::Location;

namespace {

constexpr double kSoon = 5.0;  // seconds, for what must happen

ModelOptions stamped(Schedule schedule = Schedule::manual) {
  ModelOptions options;
  options.schedule = schedule;
  options.stamps = true;
  return options;
}

// A promise on every backend that runs here.
template <class Promise>
void everywhere(Promise promise) {
  HostBackend host(kGiB);
  promise(host);
  ModelBackend manual(kGiB, stamped());
  promise(manual);
  ModelBackend lag(kGiB, stamped(Schedule::lag));
  promise(lag);
  if (CudaBackend::device_count(nullptr) == 0) return;
  CudaBackend cuda(0);
  if (cuda.info().host_pages) promise(cuda);
}

// CUDA's driver does not look whether a handle is still in use.
bool finds_misuse(const Backend& device) { return dynamic_cast<const CudaBackend*>(&device) == nullptr; }

struct Space {
  explicit Space(Backend& on, std::uint64_t length = 64 * kMiB) : device(on), bytes(length) {
    CHECK(device.space_reserve(bytes, &base).ok());
  }
  ~Space() { CHECK(device.space_release(base, bytes).ok()); }
  Backend& device;
  std::uint64_t bytes;
  Address base = 0;
};

bool show(Backend& device, Address at, std::uint64_t bytes, PageHandle page) {
  return device.map(at, bytes, page).ok() && device.set_access(at, bytes).ok();
}

}  // namespace

TEST(a_host_page_takes_a_device_pages_place) {
  everywhere([](Backend& device) {
    CHECK(device.info().host_pages);
    for (const Slot slots : kPageSlots) {
      const std::uint64_t bytes = slots * kSlotBytes;
      const Space space(device, bytes);
      std::uint64_t free_before = 0, free_after = 0, total = 0;
      PageHandle page = 0, host = 0;
      Address copies = 0;
      CHECK(device.page_create(bytes, &page).ok() && show(device, space.base, bytes, page));
      CHECK(device.fill(space.base, 7, bytes, 0).ok());
      CHECK(device.memory_info(&free_before, &total).ok());
      CHECK(device.host_page_create(bytes, &host, &copies).ok() && copies != 0);
      CHECK(device.memory_info(&free_after, &total).ok() && free_after == free_before);
      CHECK(device.copy(copies, space.base, bytes, 0).ok() && device.stream_synchronize(0).ok());
      CHECK(device.unmap(space.base, bytes).ok() && show(device, space.base, bytes, host));
      if (device.info().host_accessible) {
        const auto* const there = reinterpret_cast<const unsigned char*>(space.base);
        CHECK(there[0] == 7 && there[bytes - 1] == 7);
        CHECK(device.fill(space.base, 9, 1, 0).ok() && device.stream_synchronize(0).ok());
        CHECK(*reinterpret_cast<const unsigned char*>(copies) == 9);  // the same memory
      }
      if (finds_misuse(device))
        CHECK(device.host_page_release(host, bytes, copies).code == Code::invalid);  // mapped
      CHECK(device.unmap(space.base, bytes).ok());
      if (finds_misuse(device)) {
        CHECK(device.page_release(host, bytes).code == Code::invalid);  // not a device page
        CHECK(device.host_page_release(page, bytes, copies).code == Code::invalid);
      }
      CHECK(device.host_page_release(host, bytes, copies).ok() && device.page_release(page, bytes).ok());
      if (finds_misuse(device)) CHECK(device.host_page_release(host, bytes, copies).code == Code::invalid);
    }
    PageHandle host = 0;
    Address copies = 0;
    CHECK(device.host_page_create(3 * kMiB, &host, &copies).code == Code::invalid);
  });
}

TEST(a_gate_holds_what_is_queued_behind_it) {
  everywhere([](Backend& device) {
    std::atomic<int> before{0}, behind{0}, elsewhere{0};
    StreamHandle stream = 0, other = 0;
    CHECK(device.stream_create(&stream).ok() && device.stream_create(&other).ok());
    CHECK(device.launch(stream, [&] { ++before; }).ok());
    GateHandle gate = 0;
    CHECK(device.gate_close(stream, &gate).ok());
    CHECK(device.launch(stream, [&] { ++behind; }).ok() && device.launch(other, [&] { ++elsewhere; }).ok());
    CHECK(device.gate_wait(gate, kSoon).ok() && before == 1);
    CHECK(device.stream_synchronize(other).ok() && elsewhere == 1 && behind == 0);
    CHECK(device.stream_query(stream).code == Code::not_ready);
    device.gate_open(gate);
    CHECK(device.stream_synchronize(stream).ok() && behind == 1);
    if (finds_misuse(device)) {
      CHECK(device.gate_wait(gate, 0).code == Code::invalid);
      device.gate_open(gate);  // has no effect
    }
    CHECK(device.stream_destroy(stream).ok() && device.stream_destroy(other).ok());
    CHECK(device.gate_close(stream, &gate).code == Code::invalid);
  });
}

TEST(an_event_behind_a_gate_holds_those_who_wait_for_it) {
  everywhere([](Backend& device) {
    std::atomic<int> behind{0};
    StreamHandle stream = 0, other = 0;
    EventHandle event = 0;
    GateHandle gate = 0;
    CHECK(device.stream_create(&stream).ok() && device.stream_create(&other).ok());
    CHECK(device.event_create(&event).ok() && device.gate_close(stream, &gate).ok());
    CHECK(device.launch(stream, [] {}).ok() && device.event_record(event, stream).ok());
    CHECK(device.stream_wait(other, event).ok() && device.launch(other, [&] { ++behind; }).ok());
    CHECK(device.gate_wait(gate, kSoon).ok() && behind == 0);
    CHECK(device.event_query(event).code == Code::not_ready);
    device.gate_open(gate);
    CHECK(device.stream_synchronize(other).ok() && behind == 1 && device.event_query(event).ok());
    CHECK(device.event_destroy(event).ok());
    CHECK(device.stream_destroy(stream).ok() && device.stream_destroy(other).ok());
  });
}

TEST(what_waits_for_work_that_a_gate_delayed_can_be_waited_for) {
  everywhere([](Backend& device) {
    StreamHandle waits = 0, delayed = 0, other = 0;
    EventHandle event = 0;
    CHECK(device.stream_create(&waits).ok() && device.stream_create(&delayed).ok());
    CHECK(device.stream_create(&other).ok() && device.event_create(&event).ok());
    for (const bool by_gate : {true, false}) {
      GateHandle gate = 0;
      CHECK(device.gate_close(delayed, &gate).ok() && device.gate_wait(gate, kSoon).ok());
      CHECK(device.launch(delayed, [] {}).ok() && device.event_record(event, delayed).ok());
      CHECK(device.stream_wait(waits, event).ok());
      CHECK(device.launch(other, [] {}).ok() && device.stream_synchronize(other).ok());  // time passes
      device.gate_open(gate);
      if (by_gate) {
        CHECK(device.gate_close(waits, &gate).ok() && device.gate_wait(gate, kSoon).ok());
        device.gate_open(gate);
      }
      CHECK(device.stream_synchronize(waits).ok() && device.event_query(event).ok());
    }
    CHECK(device.event_destroy(event).ok());
    for (const StreamHandle stream : {waits, delayed, other}) CHECK(device.stream_destroy(stream).ok());
  });
}

TEST(a_gate_can_be_opened_before_the_stream_arrives) {
  everywhere([](Backend& device) {
    std::atomic<bool> go{false};
    std::atomic<int> behind{0};
    const bool real = device.info().host_accessible;
    CHECK(device
              .launch(0,
                      [&] {
                        while (real && !go) std::this_thread::yield();
                      })
              .ok());
    GateHandle gate = 0;
    CHECK(device.gate_close(0, &gate).ok() && device.launch(0, [&] { ++behind; }).ok());
    if (real) CHECK(device.gate_wait(gate, 0.01).code == Code::not_ready);
    device.gate_open(gate);
    go = true;
    CHECK(device.synchronize().ok() && behind == 1);
  });
}

TEST(every_lasting_stream_is_listed) {
  everywhere([](Backend& device) {
    StreamHandle stream = 0;
    CHECK(device.held_streams() == std::vector<StreamHandle>{0});
    CHECK(device.stream_create(&stream).ok() && device.held_streams().size() == 2);
    CHECK(device.stream_destroy(stream).ok() && device.held_streams().size() == 1);
  });
  ModelBackend model(kGiB);
  StreamHandle foreign = 0;
  CHECK(model.foreign_create(&foreign).ok() && model.held_streams().size() == 1);
  CHECK(model.stream_adopt(foreign).ok());
  CHECK((model.held_streams() == std::vector<StreamHandle>{0, foreign}));
}

namespace {

// A device on which queueing waits, as a driver does while another thread is in a call that waits for the
// gates, for as many times as told.
class Waiting : public ModelBackend {
 public:
  explicit Waiting(int times) : ModelBackend(kGiB, options()), times_(times) {}
  Status gates_close(const std::vector<StreamHandle>& except,
                     const std::function<void(GateHandle)>& closed) override {
    const Status status = ModelBackend::gates_close(except, closed);
    while (times_ > 0 && counts().gates > 0) std::this_thread::yield();
    --times_;
    return status;
  }

 private:
  static ModelOptions options() {
    ModelOptions options;
    options.release_waits = true;
    return options;
  }
  int times_;
};

}  // namespace

TEST(gates_are_opened_if_closing_them_waits_for_another_thread) {
  for (const int times : {0, 1, 3}) {
    Waiting device(times);
    const std::vector<StreamHandle> none;
    Gates gates(device, none, kSoon);
    CHECK(gates.close().ok() && device.counts().gates == 1);
    CHECK(gates.queue([] { return Status{}; }).ok() && device.counts().gates == 1);
    // Work that cannot be queued before the gates are open.
    const Status queued = gates.queue([&] {
      while (device.counts().gates > 0) std::this_thread::yield();
      return Status{};
    });
    CHECK(queued.code == Code::not_ready && device.counts().gates == 0);
    CHECK(gates.close().ok() && device.counts().gates == 1);
    gates.open();
    CHECK(device.counts().gates == 0);
  }
  Waiting device(1000);
  const std::vector<StreamHandle> none;
  Gates gates(device, none, 0.05);
  CHECK(gates.close().code == Code::not_ready && device.counts().gates == 0);
}

TEST(a_wait_behind_another_threads_gate_ends_when_it_opens) {
  everywhere([](Backend& device) {
    std::atomic<int> behind{0};
    GateHandle gate = 0;
    CHECK(device.gate_close(0, &gate).ok() && device.launch(0, [&] { ++behind; }).ok());
    std::thread waiting([&] { CHECK(device.stream_synchronize(0).ok() && behind == 1); });
    std::thread all([&] { CHECK(device.synchronize().ok() && behind == 1); });
    CHECK(device.gate_wait(gate, kSoon).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(behind == 0);
    device.gate_open(gate);
    waiting.join();
    all.join();
  });
}

TEST(the_thread_of_a_stream_does_not_wait_for_its_own_arrival) {
  HostBackend host(kGiB);
  Status status;
  CHECK(host.launch(0,
                    [&] {
                      GateHandle gate = 0;
                      CHECK(host.gate_close(0, &gate).ok());
                      status = host.gate_wait(gate, kSoon);
                      host.gate_open(gate);
                    })
            .ok());
  CHECK(host.synchronize().ok() && status.code == Code::deadlock);
}

TEST(the_model_knows_where_memory_is_and_what_work_left_there) {
  ModelBackend model(kGiB, stamped());
  const Space space(model);
  PageHandle page = 0, host = 0;
  Address copies = 0;
  CHECK(model.location(space.base) == Location::none);
  CHECK(model.page_create(kSlotBytes, &page).ok() && show(model, space.base, kSlotBytes, page));
  CHECK(model.location(space.base) == Location::device && model.stamp(space.base) == 0);
  CHECK(model.work(0, 5, space.base, kUnit).ok() && model.run_all());
  const std::uint64_t left = ModelBackend::stamped(0, 5);
  CHECK(model.stamp(space.base) == left);
  CHECK(model.host_page_create(kSlotBytes, &host, &copies).ok() && model.stamp(copies) == 0);
  // Work that is queued may be unmapped only behind a gate at which its stream has arrived.
  GateHandle gate = 0;
  CHECK(model.work(0, 6, space.base, kUnit).ok() && model.gate_close(0, &gate).ok());
  CHECK(model.work(0, 7, space.base, kUnit).ok());
  CHECK(model.unmap(space.base, kSlotBytes).code == Code::invalid);
  CHECK(model.gate_wait(gate, kSoon).ok());
  StreamHandle side = 0;
  CHECK(model.stream_create(&side).ok());
  CHECK(model.copy(copies, space.base, kSlotBytes, side).ok() && model.stream_synchronize(side).ok());
  CHECK(model.unmap(space.base, kSlotBytes).ok() && show(model, space.base, kSlotBytes, host));
  CHECK(model.location(space.base) == Location::host);
  model.gate_open(gate);
  CHECK(model.run_all() &&
        model.stamp(space.base) == ModelBackend::stamped(ModelBackend::stamped(left, 6), 7));
  CHECK(model.faults() == 0);
  // Work that runs where nothing is mapped is a fault.
  CHECK(model.gate_close(0, &gate).ok() && model.work(0, 8, space.base, kUnit).ok());
  CHECK(model.gate_wait(gate, kSoon).ok() && model.unmap(space.base, kSlotBytes).ok());
  model.gate_open(gate);
  CHECK(model.run_all() && model.faults() == 1);
  CHECK(model.host_page_release(host, kSlotBytes, copies).ok() && model.page_release(page, kSlotBytes).ok());
  std::string why;
  CHECK(model.check(&why) && model.counts().pages == 0 && model.counts().gates == 0);
}

TEST(the_models_host_memory_is_bounded_and_priced) {
  ModelOptions options;
  options.host_bytes = 4 * kMiB;
  ModelBackend model(kGiB, options);
  PageHandle pages[3] = {};
  Address copies[3] = {};
  const double before = model.driver_us();
  for (int i = 0; i < 2; ++i) CHECK(model.host_page_create(kSlotBytes, &pages[i], &copies[i]).ok());
  CHECK(model.driver_us() - before == 2 * prices::host_page(kSlotBytes).create);
  CHECK(model.host_page_create(kSlotBytes, &pages[2], &copies[2]).code == Code::out_of_memory);
  CHECK(model.counts().host_pages == 2 && model.counts().host_bytes == 4 * kMiB);
  CHECK(model.host_page_release(pages[0], kSlotBytes, copies[0]).ok());
  CHECK(model.host_page_create(kSlotBytes, &pages[2], &copies[2]).ok());
  options.host_pages = false;
  ModelBackend without(kGiB, options);
  CHECK(!without.info().host_pages);
  CHECK(without.host_page_create(kSlotBytes, pages, copies).code == Code::unsupported);
  GateHandle gate = 0;
  CHECK(without.gate_close(0, &gate).code == Code::unsupported);
}

TEST(every_call_can_be_made_to_fail) {
  ModelBackend model(kGiB);
  PageHandle page = 0;
  Address copies = 0;
  GateHandle gate = 0;
  const Status failure{Code::failed, 5, ""};
  for (const char* call : {"host_page_create", "host_page_release", "gate_close", "gate_wait"})
    CHECK(model.fail(call, 1, failure));
  CHECK(model.host_page_create(kSlotBytes, &page, &copies).code == Code::failed);
  CHECK(model.host_page_create(kSlotBytes, &page, &copies).ok());
  CHECK(model.host_page_release(page, kSlotBytes, copies).code == Code::failed);
  CHECK(model.host_page_release(page, kSlotBytes, copies).ok());
  CHECK(model.gate_close(0, &gate).code == Code::failed && model.counts().gates == 0);
  CHECK(model.gate_close(0, &gate).ok() && model.gate_wait(gate, 1).code == Code::failed);
  CHECK(model.gate_wait(gate, 1).ok());
  model.gate_open(gate);
  CHECK(model.counts().gates == 0 && model.run_all());
}

TEST(a_captured_stream_cannot_be_held) {
  ModelBackend model(kGiB);
  StreamHandle stream = 0;
  GateHandle gate = 0;
  std::uint64_t graph = 0;
  CHECK(model.stream_create(&stream).ok() && model.capture_begin(stream).ok());
  CHECK(model.gate_close(stream, &gate).code == Code::capturing);
  CHECK(model.capture_end(stream, &graph).ok() && model.graph_destroy(graph).ok());
  CHECK(model.gate_close(stream, &gate).ok());
  model.gate_open(gate);
}

TEST_MAIN()
