// Closing gates on all streams without waiting forever.
#include "pool/gates.hpp"

namespace vram {

namespace {

constexpr double kFirstWait = 0.02;
// Queueing takes microseconds, unless it waits for a call of another thread.
constexpr double kQueueSeconds = 0.02;

}  // namespace

// ---- opener ---------------------------------------------------------------------------------------------

Opener::~Opener() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Opener::arm(double seconds) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_quietly([this] { run(); });
  if (!thread_.joinable()) return false;
  due_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  armed_ = true;
  fired_ = false;
  changed_.notify_all();
  return true;
}

bool Opener::disarm() {
  const std::lock_guard lock(mutex_);
  armed_ = false;
  return !fired_;
}

void Opener::run() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (!armed_) {
      changed_.wait(lock);
    } else if (Clock::now() < due_) {
      changed_.wait_until(lock, due_);
    } else {
      armed_ = false;
      fired_ = true;
      open_();
    }
  }
}

// ---- gates ----------------------------------------------------------------------------------------------

Status Gates::close() {
  if (!turn_.owns_lock()) {
    if (!lock_within(backend_.gates_turn(), left_)) return {Code::not_ready, 0, "gate_close"};
    turn_ = std::unique_lock(backend_.gates_turn(), std::adopt_lock);
  }
  Status status{Code::not_ready, 0, "gate_wait"};
  for (double wait = kFirstWait; status.code == Code::not_ready && left_ > 0; wait *= 2) {
    let_go();
    wait = std::min(wait, left_);
    left_ -= wait;
    status = try_close(wait);
  }
  if (!status.ok()) open();
  return status;
}

Status Gates::try_close(double seconds) {
  const auto span = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const Clock::time_point end = Clock::now() + span;
  {
    const std::lock_guard lock(mutex_);
    letting_go_ = false;
  }
  Status status =
      queue([this] { return backend_.gates_close(except_, [this](GateHandle gate) { add(gate); }); });
  for (std::size_t i = 0; i < closed_.size() && status.ok(); ++i) {
    const std::chrono::duration<double> left = end - Clock::now();
    status = backend_.gate_wait(closed_[i], std::max(0.0, left.count()));
  }
  return status;
}

Status Gates::queue(const std::function<Status()>& call) {
  if (!backend_.info().release_waits) return call();
  if (!opener_.arm(kQueueSeconds)) return {Code::out_of_memory, 0, "gate_close"};
  const Status status = call();
  return opener_.disarm() ? status : Status{Code::not_ready, 0, "gate_close"};
}

void Gates::add(GateHandle gate) {
  {
    const std::lock_guard lock(mutex_);
    if (!letting_go_) return closed_.push_back(gate);
  }
  backend_.gate_open(gate);
}

// Without the mutex: a device that closes gates may hold a lock of its own when it calls add().
void Gates::let_go() {
  std::vector<GateHandle> gates;
  {
    const std::lock_guard lock(mutex_);
    letting_go_ = true;
    gates.swap(closed_);
  }
  for (const GateHandle gate : gates) backend_.gate_open(gate);
}

}  // namespace vram
