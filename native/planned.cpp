#include "planned.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "planner.hpp"

namespace vram {

namespace {

constexpr std::uint32_t kAhead = 16;               // planned allocations that a step may leave out in one go
constexpr std::uint32_t kScan = 4096;              // with those left to the pool in between
constexpr std::uint32_t kMostRecorded = 1u << 22;  // allocations of a step; a longer one is not planned
constexpr std::uint32_t kLongestPatience = 64;     // steps
// What has become known of lifetimes since the last plan is worth another above this part of the peak.
constexpr std::uint64_t kWorthPart = 1000;

}  // namespace

// ---- the table of live allocations ------------------------------------------------------------------------

Planned::Live* Planned::Table::find(Address address) {
  const std::size_t mask = places_.size() - 1;
  for (std::size_t at = home(address); places_[at].address != 0; at = (at + 1) & mask)
    if (places_[at].address == address) return &places_[at];
  return nullptr;
}

void Planned::Table::add(const Live& live) {
  if (2 * (count_ + 1) > places_.size()) {
    std::vector<Live> old(2 * places_.size());
    old.swap(places_);
    ++bits_;
    count_ = 0;
    for (const Live& each : old)
      if (each.address != 0) add(each);
  }
  const std::size_t mask = places_.size() - 1;
  std::size_t at = home(live.address);
  while (places_[at].address != 0) at = (at + 1) & mask;
  places_[at] = live;
  ++count_;
}

// Moves up what would not be found any more behind the hole.
void Planned::Table::remove(Live* live) {
  const std::size_t mask = places_.size() - 1;
  std::size_t hole = static_cast<std::size_t>(live - places_.data());
  for (std::size_t at = (hole + 1) & mask; places_[at].address != 0; at = (at + 1) & mask) {
    if (((at - home(places_[at].address)) & mask) < ((at - hole) & mask)) continue;
    places_[hole] = places_[at];
    hole = at;
  }
  places_[hole].address = 0;
  --count_;
}

template <typename Keep>
void Planned::Table::retain(Keep keep) {
  std::vector<Address> gone;
  each([&](const Live& live) {
    if (!keep(live)) gone.push_back(live.address);
  });
  for (Address address : gone) remove(find(address));
}

// ---- serving
// ------------------------------------------------------------------------------------------------

bool Planned::serve(const Request& request, Address* out) {
  std::lock_guard guard(lock_);
  if (!open_.load(std::memory_order_relaxed) || cursor_ >= entries_.size()) return false;
  const Entry& entry = entries_[cursor_];
  if (entry.units != request.units || entry.stream != request.stream) return false;
  if (entry.region == nullptr || entry.region->base == 0) return false;
  advance(cursor_);
  if (!entry.region->blocked.empty() && blocked(entry, false)) return false;
  hand_out(cursor_, request, out);
  return true;
}

Planned::Choice Planned::choose(const Request& request, bool may_order, Address* out, std::uint32_t* number) {
  std::lock_guard guard(lock_);
  *number = kNone;
  if (entries_.empty()) return Choice::pool;
  const std::uint32_t found = *number = match(request);
  if (found == kNone) {
    ++counts_.fallbacks;
    ++differences_;
    return Choice::pool;
  }
  Entry& entry = entries_[found];
  if (entry.region == nullptr || entry.region->base == 0) {
    cursor_ = found + 1;
    ++(entry.region == nullptr ? counts_.left : counts_.refused);
    return Choice::pool;
  }
  advance(found);
  if (blocked(entry, true)) {
    if (may_order && !blocks_to_order_.empty()) return Choice::order;
    cursor_ = found + 1;
    ++counts_.fallbacks;
    ++differences_;
    return Choice::pool;
  }
  hand_out(found, request, out);
  return Choice::slot;
}

// The entry that a request is, kNone if it is none of the next.
std::uint32_t Planned::match(const Request& request) const {
  std::uint32_t left_out = 0;
  for (std::uint32_t i = cursor_; i < entries_.size() && i - cursor_ < kScan; ++i) {
    const Entry& entry = entries_[i];
    if (entry.units == request.units && entry.stream == request.stream) return i;
    if (entry.region != nullptr && ++left_out > kAhead) break;
  }
  return kNone;
}

// What should be free by the moment `to` and is not, is late. So every live slot of the plan that is not late
// shares a moment with the entry `to`, and by the plan no byte.
void Planned::advance(std::uint32_t to) {
  for (; reached_ <= to && reached_ < due_.size(); ++reached_)
    for (std::uint32_t e = due_[reached_]; e != kNone; e = entries_[e].next_due) {
      Entry& entry = entries_[e];
      if (entry.state != Entry::State::live) continue;
      entry.state = Entry::State::late;
      entry.region->blocked.push_back({entry.offset, entry.offset + entry.units, e, {}});
    }
}

// Whether the memory of an entry is not free. Where only uses elsewhere stand in the way, `gather` collects
// them.
bool Planned::blocked(const Entry& entry, bool gather) {
  bool any = false, late = false;
  if (gather) uses_to_order_.clear();
  if (gather) blocks_to_order_.clear();
  for (const Blocked& each : entry.region->blocked) {
    if (each.end <= entry.offset || entry.offset + entry.units <= each.offset) continue;
    any = true;
    late |= each.entry != kNone;
    if (!gather) return true;
    blocks_to_order_.emplace_back(entry.region, each.offset);
    uses_to_order_.insert(uses_to_order_.end(), each.uses.begin(), each.uses.end());
  }
  if (late) blocks_to_order_.clear();
  return any;
}

void Planned::ordered() {
  std::lock_guard guard(lock_);
  for (const auto& [region, offset] : blocks_to_order_)
    std::erase_if(region->blocked, [offset = offset](const Blocked& each) {
      return each.entry == kNone && each.offset == offset;
    });
  blocks_to_order_.clear();
}

void Planned::hand_out(std::uint32_t number, const Request& request, Address* out) {
  Entry& entry = entries_[number];
  *out = entry.region->base + std::uint64_t{entry.offset} * kUnit;
  table_.add(
      {*out, request.size, entry.region, number, step_, log(request), request.tag, entry.units, false});
  entry.state = Entry::State::live;
  ++entry.region->live;
  ++counts_.hits;
  cursor_ = number + 1;
  count_in(entry.units, true);
}

void Planned::note(const Request& request, Address address, std::uint32_t entry) {
  std::lock_guard guard(lock_);
  if (!open_.load(std::memory_order_relaxed)) return;
  // An address that was freed past us, by the end of a heap for example, is forgotten.
  if (Live* const old = table_.find(address)) {
    count_out(old->units, false);
    table_.remove(old);
  }
  table_.add({address, request.size, nullptr, entry, step_, log(request), request.tag, request.units, false});
  count_in(request.units, false);
}

std::uint32_t Planned::log(const Request& request) {
  if (record_.size() >= kMostRecorded) {
    overflown_ = true;
    return kNone;
  }
  record_.push_back({request.stream, request.units});
  return static_cast<std::uint32_t>(record_.size() - 1);
}

void Planned::count_in(Units units, bool in_region) {
  live_ += units;
  most_live_ = std::max(most_live_, live_);
  if (in_region) return;
  beside_ += units;
  most_beside_ = std::max(most_beside_, beside_);
}

void Planned::count_out(Units units, bool in_region) {
  live_ -= units;
  if (!in_region) beside_ -= units;
}

// ---- frees
// --------------------------------------------------------------------------------------------------

Planned::Freed Planned::free(Address address) {
  std::lock_guard guard(lock_);
  Live* const live = table_.find(address);
  if (live == nullptr) {
    const auto is = [&](const Region& region) { return region.base != 0 && region.base - kUnit == address; };
    return std::any_of(regions_.begin(), regions_.end(), is) ? Freed::slow : Freed::elsewhere;
  }
  if (live->region == nullptr) {
    note_free(*live);
    table_.remove(live);
    return Freed::elsewhere;
  }
  if (live->used_elsewhere || live->region->dropped) return Freed::slow;
  remove_slot(live, {});
  return Freed::done;
}

// The moment goes into the record of the step that allocated it, if that was this one or the one before.
void Planned::note_free(const Live& live) {
  const auto moment = static_cast<std::uint32_t>(record_.size());
  if (live.step == step_ && live.index < record_.size()) record_[live.index].freed = moment;
  const bool unplanned = live.region == nullptr && live.step == step_ && live.entry < entries_.size();
  if (unplanned && !entries_[live.entry].known) missed_ += live.units;
  if (live.step + 1 == step_ && live.index < previous_.size()) previous_[live.index].freed_next = moment;
  count_out(live.units, live.region != nullptr);
}

void Planned::remove_slot(Live* live, std::vector<Use> uses) {
  note_free(*live);
  Region& region = *live->region;
  --region.live;
  if (!region.dropped) {
    Entry& entry = entries_[live->entry];
    if (entry.state == Entry::State::late)
      std::erase_if(region.blocked, [&](const Blocked& each) { return each.entry == live->entry; });
    entry.state = Entry::State::free;
  }
  if (!uses.empty()) {
    const auto offset = static_cast<Units>((live->address - region.base) / kUnit);
    region.blocked.push_back({offset, offset + live->units, kNone, std::move(uses)});
  }
  table_.remove(live);
}

// By its beginning, or by any byte of a slot.
const Planned::Live* Planned::holder(Address address) const {
  const Live* const known = table_.find(address);
  if (known != nullptr) return known->region != nullptr ? known : nullptr;
  const auto within = [&](const Region& region) {
    return region.base != 0 && address >= region.base &&
           address - region.base < std::uint64_t{region.units} * kUnit;
  };
  if (std::none_of(regions_.begin(), regions_.end(), within)) return nullptr;
  const Live* found = nullptr;
  table_.each([&](const Live& live) {
    if (live.region != nullptr && address >= live.address &&
        address - live.address < std::uint64_t{live.units} * kUnit)
      found = &live;
  });
  return found;
}

bool Planned::find(Address address, bool inside, BlockInfo* out) const {
  std::lock_guard guard(lock_);
  const Live* const live = inside ? holder(address) : table_.find(address);
  if (live == nullptr || live->region == nullptr) return false;
  *out = {live->address,
          std::uint64_t{live->units} * kUnit,
          live->requested,
          BlockState::live,
          live->region->stream,
          live->tag,
          0};
  return true;
}

bool Planned::use(Address address, std::uint16_t stream, bool own, StreamHandle handle) {
  std::lock_guard guard(lock_);
  Live* const live = const_cast<Live*>(holder(address));
  if (live == nullptr) return false;
  if (own && live->region->stream == handle) return true;
  std::vector<std::uint16_t>& users = users_[live->address];
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
  live->used_elsewhere = true;
  return true;
}

const std::vector<std::uint16_t>* Planned::users(Address address) const {
  static const std::vector<std::uint16_t> kNobody;
  std::lock_guard guard(lock_);
  const Live* const live = table_.find(address);
  if (live == nullptr || live->region == nullptr) return nullptr;
  const auto found = users_.find(address);
  return found == users_.end() ? &kNobody : &found->second;
}

void Planned::free_slot(Address address, std::vector<Use> uses, std::vector<Block>* gone) {
  std::lock_guard guard(lock_);
  Live* const live = table_.find(address);
  if (live == nullptr) return;  // another thread was faster: it freed twice
  Region* const region = live->region;
  users_.erase(address);
  remove_slot(live, std::move(uses));
  if (!region->dropped || region->live != 0) return;
  release(*region, gone);
  regions_.remove_if([&](const Region& each) { return &each == region; });
}

bool Planned::is_region(Address address) const {
  std::lock_guard guard(lock_);
  return std::any_of(regions_.begin(), regions_.end(), [&](const Region& region) {
    return region.base != 0 && region.base - kUnit == address;
  });
}

bool Planned::holds_regions() const {
  std::lock_guard guard(lock_);
  return std::any_of(regions_.begin(), regions_.end(), [](const Region& region) { return region.base != 0; });
}

// ---- regions
// --------------------------------------------------------------------------------------------------

// Its block goes back to the pool, behind the uses that nobody was ordered behind.
void Planned::release(Region& region, std::vector<Block>* gone) {
  if (region.base == 0) return;
  Block block{region.base - kUnit, {}};
  for (const Blocked& each : region.blocked)
    for (const Use& use : each.uses)
      if (std::find(block.uses.begin(), block.uses.end(), use.stream) == block.uses.end())
        block.uses.push_back(use.stream);
  gone->push_back(std::move(block));
  region.blocked.clear();
  region.base = 0;
}

// What lives in it stays; the last of that gives it back.
void Planned::drop(Region& region, std::vector<Block>* gone) {
  region.dropped = true;
  std::erase_if(region.blocked, [](const Blocked& each) { return each.entry != kNone; });
  if (region.live == 0) release(region, gone);
}

void Planned::forget_stream(StreamHandle stream, std::vector<Block>* gone) {
  std::lock_guard guard(lock_);
  for (Region& region : regions_) {
    if (region.stream != stream || region.dropped) continue;
    for (Entry& entry : entries_)
      if (entry.region == &region) entry.region = nullptr, entry.state = Entry::State::free;
    drop(region, gone);
  }
  regions_.remove_if([](const Region& region) { return region.dropped && region.live == 0; });
}

void Planned::give_up_idle(std::vector<Block>* gone) {
  std::lock_guard guard(lock_);
  for (Region& region : regions_)
    if (region.live == 0) release(region, gone);
}

std::vector<Planned::Wanted> Planned::wanted() const {
  std::lock_guard guard(lock_);
  std::vector<Wanted> all;
  for (const Region& region : regions_)
    if (!region.dropped && region.base == 0) all.push_back({region.stream, region.units});
  return all;
}

bool Planned::found(StreamHandle stream, Address block) {
  std::lock_guard guard(lock_);
  const auto wanted = [&](const Region& region) {
    return region.stream == stream && !region.dropped && region.base == 0;
  };
  const auto region = std::find_if(regions_.begin(), regions_.end(), wanted);
  if (region == regions_.end()) return false;
  region->base = block + kUnit;
  return true;
}

// ---- steps
// ----------------------------------------------------------------------------------------------------

Status Planned::claim() {
  if (claimed_.exchange(true)) return {Code::invalid, 0, kOpenAlready};
  return {};
}

void Planned::start() {
  std::lock_guard guard(lock_);
  owner_ = std::this_thread::get_id();
  ++step_;
  previous_same_ = same_;
  previous_.swap(record_);
  record_.clear();
  record_.reserve(previous_.size() + previous_.size() / 8);
  overflown_ = same_ = false;
  differences_ = missed_ = 0;
  cursor_ = reached_ = 0;
  // What is older than the last step teaches nothing more.
  table_.retain([&](const Live& live) {
    const bool keep = live.region != nullptr || live.step + 1 >= step_;
    if (!keep) count_out(live.units, false);
    return keep;
  });
  most_live_ = live_;
  most_beside_ = beside_;
  open_.store(true, std::memory_order_release);
}

Status Planned::end() {
  std::lock_guard guard(lock_);
  if (!open_.load(std::memory_order_relaxed)) return {Code::invalid, 0, kNotOpen};
  if (owner_ != std::this_thread::get_id()) return {Code::invalid, 0, kOtherThread};
  open_.store(false, std::memory_order_release);
  same_ = differences_ == 0 && !overflown_ && record_.size() == entries_.size();
  ++counts_.steps;
  claimed_.store(false);
  return {};
}

void Planned::reset(std::vector<Block>* gone) {
  std::lock_guard guard(lock_);
  open_.store(false, std::memory_order_release);
  claimed_.store(false);
  for (Region& region : regions_)
    if (!region.dropped) drop(region, gone);
  regions_.remove_if([](const Region& region) { return region.live == 0; });
  table_.retain([&](const Live& live) {
    if (live.region == nullptr) count_out(live.units, false);
    return live.region != nullptr;
  });
  record_.clear();
  previous_.clear();
  entries_.clear();
  due_.clear();
  layouts_.clear();
  same_ = previous_same_ = false;
  waited_ = 0;
  patience_ = 1;
  counts_ = {};
  most_live_ = live_;
  most_beside_ = beside_;
}

// ---- planning
// -------------------------------------------------------------------------------------------------

// The last step is planned if there is no plan, if it differed from it, or if so much of what was left to the
// pool has turned out to end in time that it is worth it. Where step after step differs, each plan is waited
// for twice as long as the one before.
bool Planned::plan_is_due() {
  if (record_.empty() || overflown_) return false;
  if (entries_.empty()) return true;
  if (differences_ == 0 && !worth(missed_)) {
    waited_ = 0;
    patience_ = 1;
    return same_ && worth(newly_known());
  }
  if (++waited_ < patience_) return false;
  waited_ = 0;
  patience_ = std::min(2 * patience_, kLongestPatience);
  return true;
}

// Units of those left to the pool whose lifetime is known by now.
std::uint64_t Planned::newly_known() const {
  std::uint64_t units = 0;
  for (std::uint32_t i = 0; i < entries_.size(); ++i)
    if (!entries_[i].known && end_of(i) != kNone) units += entries_[i].units;
  return units;
}

bool Planned::worth(std::uint64_t units) const {
  std::uint64_t planned = 0;
  for (const PlannedLayout& layout : layouts_) planned += layout.peak / kUnit;
  return units * kWorthPart > planned;
}

// When the allocation of the last step ends: a moment of that step, or so much behind its end in the next, as
// the one before it did. kNone: not known, or not before its like is allocated again.
std::uint32_t Planned::end_of(std::uint32_t index) const {
  const auto moments = static_cast<std::uint32_t>(record_.size());
  if (record_[index].freed != kNone) return record_[index].freed;
  if (!same_ || !previous_same_ || previous_[index].freed_next > index) return kNone;
  return moments + previous_[index].freed_next;
}

struct Planned::Span {
  std::uint32_t entry;
  std::uint32_t first;
  std::uint32_t end;  // beyond the step's last moment: it goes on from the next one's first
};

bool Planned::make_plan(double time_limit) {
  std::vector<std::pair<StreamHandle, std::vector<Span>>> streams;
  auto draft = std::make_unique<Draft>();
  std::uint32_t moments = 0;
  {
    std::lock_guard guard(lock_);
    draft_.reset();
    advance(static_cast<std::uint32_t>(due_.size()));  // the end of the last step
    if (!plan_is_due()) return false;
    moments = static_cast<std::uint32_t>(record_.size());
    draft->entries.resize(moments);
    draft->due.assign(moments + 1, kNone);
    for (std::uint32_t i = 0; i < moments; ++i) {
      draft->entries[i].stream = record_[i].stream;
      draft->entries[i].units = record_[i].units;
      const std::uint32_t end = end_of(i);
      draft->entries[i].known = end != kNone;
      if (end == kNone) continue;
      auto place = std::find_if(streams.begin(), streams.end(),
                                [&](const auto& each) { return each.first == record_[i].stream; });
      if (place == streams.end()) place = streams.insert(place, {record_[i].stream, {}});
      place->second.push_back({i, i, end});
    }
  }
  for (const auto& [stream, spans] : streams)
    draft_stream(stream, spans, moments, time_limit / static_cast<double>(streams.size()), draft.get());
  std::lock_guard guard(lock_);
  draft_ = std::move(draft);
  return true;
}

// Steps follow each other, so lifetimes lie on a circle; it is cut open where the least is live, and what
// lives there is left to the pool.
void Planned::draft_stream(StreamHandle stream, const std::vector<Span>& spans, std::uint32_t moments,
                           double time_limit, Draft* draft) {
  std::vector<std::int64_t> change(moments + 1);
  const auto add = [&](std::uint32_t from, std::uint32_t to, std::int64_t units) {
    if (from >= to) return;
    change[from] += units;
    change[to] -= units;
  };
  for (const Span& span : spans) {
    const std::int64_t units = draft->entries[span.entry].units;
    add(span.first + 1, std::min(span.end, moments), units);
    if (span.end > moments) add(0, span.end - moments, units);
  }
  std::uint32_t cut = 0;
  std::int64_t live = 0, least = change[0];
  for (std::uint32_t moment = 0; moment < moments; ++moment) {
    live += change[moment];
    if (live >= least) continue;
    least = live;
    cut = moment;
  }
  PlannedLayout layout;
  std::vector<PlanBuffer> buffers;
  std::vector<const Span*> taken;
  for (const Span& span : spans) {
    if ((span.first < cut && cut < span.end) || cut + moments < span.end) continue;
    const std::int64_t lower = (span.first + moments - cut) % moments;
    const std::uint64_t bytes = std::uint64_t{draft->entries[span.entry].units} * kUnit;
    buffers.push_back({lower, lower + (span.end - span.first), bytes});
    taken.push_back(&span);
  }
  if (taken.empty()) return;
  PlanResult result = plan(buffers, {kUnit, 0, time_limit, 0});
  if (result.peak + kUnit > kMaxRequest) return;
  Region& region = draft->regions.emplace_back();
  region.stream = stream;
  region.units = static_cast<Units>(result.peak / kUnit);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    Entry& entry = draft->entries[taken[i]->entry];
    entry.region = &region;
    entry.offset = static_cast<Units>(result.offsets[i] / kUnit);
    std::uint32_t& first = draft->due[taken[i]->end > moments ? taken[i]->end - moments : taken[i]->end];
    entry.next_due = std::exchange(first, taken[i]->entry);
    layout.lower.push_back(buffers[i].lower);
    layout.upper.push_back(buffers[i].upper);
    layout.size.push_back(buffers[i].size);
    layout.index.push_back(taken[i]->entry);
  }
  layout.stream = stream;
  layout.offset = std::move(result.offsets);
  layout.peak = result.peak;
  layout.lower_bound = result.lower_bound;
  layout.method = std::move(result.method);
  layout.proven = result.proven;
  layout.seconds = result.seconds;
  draft->layouts.push_back(std::move(layout));
}

void Planned::install(std::vector<Block>* gone) {
  std::lock_guard guard(lock_);
  if (draft_ == nullptr) return;
  for (Region& region : regions_)
    if (!region.dropped) drop(region, gone);
  regions_.remove_if([](const Region& region) { return region.live == 0; });
  entries_ = std::move(draft_->entries);
  due_ = std::move(draft_->due);
  layouts_ = std::move(draft_->layouts);
  regions_.splice(regions_.end(), draft_->regions);
  draft_.reset();
  // The record is the plan, so what is learned of its lifetimes in the next step counts.
  same_ = true;
  ++counts_.plans;
}

// ---- looking
// --------------------------------------------------------------------------------------------------

PlannedReport Planned::report() const {
  std::lock_guard guard(lock_);
  PlannedReport report = counts_;
  for (const Region& region : regions_)
    if (region.base != 0) report.planned_bytes += (std::uint64_t{region.units} + 1) * kUnit;
  report.lower_bound = most_live_ * kUnit;
  report.peak = report.planned_bytes + most_beside_ * kUnit;
  return report;
}

std::vector<PlannedLayout> Planned::layouts() const {
  std::lock_guard guard(lock_);
  return layouts_;
}

bool Planned::check(std::string* why) const {
  std::lock_guard guard(lock_);
  const auto wrong = [&](const char* what) {
    if (why != nullptr) *why = what;
    return false;
  };
  std::uint64_t live = 0, beside = 0;
  std::vector<const Live*> slots;
  std::size_t used = 0;
  table_.each([&](const Live& each) {
    live += each.units;
    if (each.region == nullptr) beside += each.units;
    if (each.region != nullptr) slots.push_back(&each);
    used += each.used_elsewhere;
  });
  if (live != live_ || beside != beside_) return wrong("planned: bytes of live allocations");
  if (used != users_.size()) return wrong("planned: uses on other streams");
  std::sort(slots.begin(), slots.end(), [](auto* a, auto* b) { return a->address < b->address; });
  std::unordered_map<const Region*, std::uint32_t> counts;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Live& slot = *slots[i];
    const Address end = slot.address + std::uint64_t{slot.units} * kUnit;
    if (slot.address < slot.region->base ||
        end > slot.region->base + std::uint64_t{slot.region->units} * kUnit)
      return wrong("planned: a slot lies outside its region");
    if (i + 1 < slots.size() && end > slots[i + 1]->address) return wrong("planned: live slots overlap");
    if (!slot.region->dropped && entries_[slot.entry].state == Entry::State::free)
      return wrong("planned: a live slot counts as free");
    ++counts[slot.region];
  }
  for (const Region& region : regions_) {
    if (region.live != counts[&region]) return wrong("planned: the number of live slots");
    if (region.base == 0 && (region.live != 0 || !region.blocked.empty()))
      return wrong("planned: a region without memory is in use");
    for (const Blocked& each : region.blocked) {
      const bool late = each.entry != kNone;
      if (late && (region.dropped || entries_[each.entry].state != Entry::State::late))
        return wrong("planned: a slot counts as late and is not");
      if (late != each.uses.empty()) return wrong("planned: a slot is blocked by nothing");
    }
  }
  return true;
}

}  // namespace vram
