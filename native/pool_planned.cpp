// The pool's part in planned steps: where requests and frees meet the plan, how regions come and go, and when
// a slot's memory is safe. What is planned and which slot is whose is planned.cpp.
#include "pool.hpp"

namespace vram {

// ---- allocation and free
// -----------------------------------------------------------------------------------

// The next allocation of the plan, without the mutex. Everything else takes the long way.
bool Pool::try_planned(std::uint64_t size, StreamHandle handle, std::uint32_t tag, Address* out) {
  if (size > kMaxRequest || slow_frees_.load(std::memory_order_relaxed)) return false;
  handle = backend_->canonical(handle);
  Planned& steps = *planned_.load(std::memory_order_acquire);
  const Units units = units_of(size);
  if (!steps.serve({units, size, handle, tag}, out)) return false;
  if (zero_on_allocate_.load(std::memory_order_relaxed)) [[unlikely]]
    if (!zero_new(*out, std::uint64_t{units} * kUnit, handle).ok()) {
      take_back(*out);
      return false;
    }
  return true;
}

// Captured work keeps its memory, and what is zeroed when it is freed is not handed from slot to slot.
bool Pool::planned_serves(StreamHandle handle) const {
  return planned_steps_ != nullptr && planned_steps_->open() &&
         !slow_frees_.load(std::memory_order_relaxed) && heap_for(handle) == nullptr;
}

bool Pool::serve_planned(Request& request, Address* out, std::uint32_t* entry) {
  const Planned::Request asked{request.want.units, request.size, request.stream->handle, request.tag};
  bool may_order = true;
  while (true) {
    const Planned::Choice choice = planned_steps_->choose(asked, may_order, out, entry);
    if (choice != Planned::Choice::order) return choice == Planned::Choice::slot;
    may_order = order_behind(*request.stream, planned_steps_->uses());
    if (may_order) planned_steps_->ordered();
  }
}

// Makes later work of the stream come after the uses, unless they have finished; never waits. Where the host
// writes out of stream order, they must have finished.
bool Pool::order_behind(StreamState& stream, const std::vector<Use>& uses) {
  const bool by_waiting = !backend_->info().host_writes;
  for (const Use& use : uses) {
    StreamState& user = streams_[use.stream];
    if (!ordered(stream, user, use.tick, false) && !(by_waiting && ordered(stream, user, use.tick, true)))
      return false;
  }
  return true;
}

// With the mutex. False: not a slot.
bool Pool::free_planned(Address address) {
  if (planned_steps_ == nullptr) return false;
  const std::vector<std::uint16_t>* const users = planned_steps_->users(address);
  if (users == nullptr) {
    (void)planned_steps_->free(address);  // notes the end of what the pool served
    return false;
  }
  std::vector<Use> uses;
  for (std::uint16_t number : *users) {
    StreamState& user = streams_[number];
    if (user.retired) continue;
    uses.push_back({number, user.owe()});
    (void)fences_.record(user);  // where it fails, it is recorded later, when somebody asks
  }
  std::vector<Planned::Block> gone;
  planned_steps_->free_slot(address, std::move(uses), &gone);
  give_back_regions(gone);
  return true;
}

// ---- regions
// -----------------------------------------------------------------------------------------------

// A region's block, one unit longer: so no slot begins where the block does, and a pointer says which it is.
// The callbacks of the program are not asked: there is another way to serve.
bool Pool::take_region(const Planned::Wanted& wanted, std::uint32_t tag, std::unique_lock<std::mutex>& lock) {
  StreamState* const stream = streams_.find(wanted.stream);
  if (stream == nullptr || stream->gone() || heap_for(wanted.stream) != nullptr ||
      backend_->capturing(wanted.stream) || slow_frees_.load(std::memory_order_relaxed))
    return false;
  const Units units = wanted.units + 1;
  Request request{std::uint64_t{units} * kUnit,
                  {stream->number, segments_.band_of(units), units, kUnit},
                  tag,
                  stream,
                  &lock,
                  {}};
  if (!segments_.paged()) {
    // Segments of the steps before would stay beside the region.
    complete_passed();
    drain_all();
    (void)segments_.trim(0, finished_, false);
    note_reserved(*stream);
  }
  for (const Step& step : ladder_) {
    if (step.rung == Rung::callbacks) continue;
    const Index block = (this->*step.serve)(request);
    if (block != 0) {
      ++rungs_[static_cast<int>(step.rung)];
      const Address address = hand_out(block, request);
      if (planned_steps_->found(wanted.stream, address)) return true;
      give_back_regions({{address, {}}});  // the stream went while a rung waited
      return false;
    }
    if (!request.error.ok()) return false;
  }
  return false;
}

void Pool::give_back_regions(const std::vector<Planned::Block>& gone) {
  for (const Planned::Block& each : gone) {
    const Index i = segments_.find(each.address);
    bool busy = false;
    if (slow_frees_.load(std::memory_order_relaxed)) (void)zero(each.address, &busy);
    {
      Block& block = segments_.blocks()[i];
      StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
      std::lock_guard guard(owner.lock);
      block.used_elsewhere = !each.uses.empty();
    }
    bool suspended = false;  // never: a plan's memory stays (Pool::stays)
    (void)claim_for_free(each.address, &suspended);
    if (each.uses.empty() && !busy) {
      give_home(i, true);
    } else {
      uses_[i] = each.uses;
      make_pending(i);
    }
  }
  if (!gone.empty()) set_gate();
}

// True if there were any.
bool Pool::give_up_regions() {
  if (planned_steps_ == nullptr) return false;
  std::vector<Planned::Block> gone;
  planned_steps_->give_up_idle(&gone);
  give_back_regions(gone);
  return !gone.empty();
}

// ---- steps
// -------------------------------------------------------------------------------------------------

Status Pool::planned_begin(double time_limit, std::uint32_t tag) {
  {
    std::unique_lock<std::mutex> lock;
    if (Status status = enter("planned", &lock); !status.ok()) return status;
    if (planned_steps_ == nullptr) planned_steps_ = std::make_unique<Planned>();
    planned_.store(planned_steps_.get(), std::memory_order_release);
    planning_ = true;
    set_gate();
  }
  Planned& steps = *planned_steps_;
  if (Status status = steps.claim(); !status.ok()) return status;
  try {
    (void)steps.make_plan(time_limit);
    std::unique_lock<std::mutex> lock;
    if (Status status = enter("planned", &lock); !status.ok()) return status;
    std::vector<Planned::Block> gone;
    steps.install(&gone);
    give_back_regions(gone);
    for (const Planned::Wanted& wanted : steps.wanted()) {
      (void)take_region(wanted, tag, lock);  // without it the pool serves in its place
      if (closed()) return {Code::closed, 0, "planned"};
    }
    set_gate();
    verify();
    steps.start();
  } catch (...) {
    steps.abandon();
    throw;
  }
  return {};
}

Status Pool::planned_end() {
  if (closed()) return {};
  Planned* const steps = planned_.load(std::memory_order_acquire);
  if (steps == nullptr) return {Code::invalid, 0, Planned::kNotOpen};
  return steps->end();
}

Status Pool::planned_close() {
  std::unique_lock<std::mutex> lock;
  if (!enter("planned", &lock).ok() || planned_steps_ == nullptr) return {};
  if (Status status = planned_steps_->claim(); !status.ok()) return {Code::invalid, 0, Planned::kCloseInside};
  std::vector<Planned::Block> gone;
  planned_steps_->reset(&gone);
  planning_ = false;
  give_back_regions(gone);
  set_gate();
  verify();
  return {};
}

PlannedReport Pool::planned_report() const {
  const Planned* const steps = planned_.load(std::memory_order_acquire);
  return steps == nullptr || inherited() ? PlannedReport{} : steps->report();
}

std::vector<PlannedLayout> Pool::planned_layouts() const {
  const Planned* const steps = planned_.load(std::memory_order_acquire);
  return steps == nullptr || inherited() ? std::vector<PlannedLayout>{} : steps->layouts();
}

}  // namespace vram
