#include "base/waits.hpp"

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <thread>
#include <utility>

namespace vram {

namespace {

thread_local Interrupt current = nullptr;
thread_local bool current_waits = false;

}  // namespace

InterruptScope::InterruptScope(Interrupt ask, bool at_any_time)
    : before_(std::exchange(current, ask)),
      waits_before_(std::exchange(current_waits, ask != nullptr && at_any_time)) {}
InterruptScope::~InterruptScope() {
  current = before_;
  current_waits = waits_before_;
}

bool interruptible() { return current_waits; }

bool interrupted() {
  if (current == nullptr) return false;
  const Interrupt ask = current;
  const InterruptScope quiet(nullptr);
  return ask();
}

std::thread start_quietly(std::function<void()> work) {
  sigset_t all, before;
  std::thread started;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    started = std::thread(std::move(work));
  } catch (const std::exception&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void run_elsewhere(std::function<void()> work) {
  if (std::thread started = start_quietly(std::move(work)); started.joinable()) started.detach();
}

}  // namespace vram
