// Waits that ask: they end with the first answer that is one, or when the thread's wait is to be abandoned.
#include "base/waits.hpp"

#include "testing.hpp"

using namespace vram;

namespace {

int asks_left = 0;
bool stop_after_a_few() { return --asks_left == 0; }

}  // namespace

TEST(a_wait_ends_with_the_first_answer) {
  for (const Code code : {Code::ok, Code::failed, Code::closed}) {
    int asked = 0;
    const Status status =
        wait_by_asking([&] { return Status{++asked < 100 ? Code::not_ready : code, asked, "ask"}; });
    CHECK(status.code == code && asked == 100 && status.native == 100);
  }
}

TEST(a_wait_that_may_be_interrupted_asks_whether_it_is) {
  asks_left = 3;
  const InterruptScope scope(stop_after_a_few);
  CHECK(interruptible());
  const Status status = wait_by_asking([] { return Status{Code::not_ready, 0, "ask"}; });
  CHECK(status.code == Code::interrupted && asks_left == 0);
}

TEST(a_thread_that_no_signal_reaches_leaves_the_waiting_to_the_device) {
  const InterruptScope scope(stop_after_a_few, false);
  CHECK(!interruptible());
  asks_left = 1;
  CHECK(interrupted());  // callbacks of the call itself may still end it
  {
    const InterruptScope inner(stop_after_a_few);
    CHECK(interruptible());
  }
  CHECK(!interruptible());
}

TEST_MAIN()
