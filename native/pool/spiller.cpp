// Choosing pages, moving their contents, and what happens when a step fails.
#include "pool/spiller.hpp"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "placement/room.hpp"
#include "pool/gates.hpp"

namespace vram {

namespace {

// More than what is needed goes at a time, so that the streams are held less often: at most this much, and at
// most this share of what the pool holds.
constexpr std::uint64_t kBatchBytes = 64 * kMiB;
constexpr std::uint64_t kBatchShare = 32;
// Pages return only if this share of the pool's memory stays free, so that the next requests do not send them
// back at once.
constexpr std::uint64_t kMarginShare = 16;
// What has gone teaches the order after this share of what the pool holds.
constexpr std::uint64_t kLearnShare = 4;
// Pages exchanged at a time with the mutex held.
constexpr std::size_t kBatch = 8;

// Repeats a call without which memory would be lost, if the driver refuses it.
template <typename Call>
Status insist(Call call) {
  constexpr int kTries = 3;
  Status status = call();
  for (int i = 1; i < kTries && !status.ok(); ++i) status = call();
  return status;
}

}  // namespace

// ---- one swap -------------------------------------------------------------------------------------------

// Pages that are set aside while their contents move. The destructor puts back what was not exchanged. Made
// and destroyed with the mutex held.
class Spiller::Swap {
 public:
  Swap(Spiller& spiller, std::size_t most, std::unique_lock<std::mutex>& lock) : s_(spiller), lock_(lock) {
    moves_.reserve(most);
    s_.lives_.keep_leaving(true);
  }
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;
  ~Swap() {
    if (!lock_.owns_lock()) lock_.lock();
    for (const Move& move : moves_) end(move);
    s_.lives_.keep_leaving(false);
    try {
      s_.lives_.complete_leaving();
      s_.log_.note_reserved(s_.streams_[0]);
      s_.verify();
    } catch (const std::bad_alloc&) {
      // Later calls let the streams leave.
    }
  }

  // pre: the page is held and not set aside.
  void add(Index page) {
    PageStock& stock = s_.stock();
    moves_.push_back({page, 0, stock.address_of(page), stock.pages()[page].bytes(), false});
    stock.set_aside(page);
    stock.begin_move(page);
  }
  // pre: `to` is set aside.
  void pair(std::size_t i, Index to) {
    moves_[i].to = to;
    s_.stock().begin_move(to);
  }
  const std::vector<Move>& moves() const { return moves_; }
  double seconds() const { return seconds_; }  // that it held the streams

  // pre: all are paired. Returns with the mutex.
  Status run(bool to_host);

 private:
  void end(const Move& move) {
    // What a copy may still use stays set aside.
    for (const Index page : {move.from, move.to})
      if (page != 0 && !lost_) s_.stock().end_move(page);
  }
  Status lend_addresses();
  void take_addresses();
  Status copy(Gates& gates, Copies& copies, bool to_host);
  Status exchange();

  Spiller& s_;
  std::unique_lock<std::mutex>& lock_;
  std::vector<Move> moves_;
  double seconds_ = 0;
  bool lost_ = false;  // the device does not say whether the copies have ended
  // Where the device pages of a return are mapped meanwhile, one behind the other; the first `lent_` are.
  Address addresses_ = 0;
  std::uint64_t bytes_ = 0;
  std::size_t lent_ = 0;
};

// Maps the device pages of a return, so that contents can be copied there before the exchange.
Status Spiller::Swap::lend_addresses() {
  bytes_ = 0;
  for (const Move& move : moves_) bytes_ += move.bytes;
  Status status = s_.backend_->space_reserve(bytes_, &addresses_);
  Address at = addresses_;
  for (std::size_t i = 0; i < moves_.size() && status.ok(); ++i, at += moves_[i - 1].bytes) {
    status = s_.backend_->map(at, moves_[i].bytes, s_.stock().pages()[moves_[i].to].handle);
    lent_ += status.ok();
  }
  return status.ok() ? s_.backend_->set_access(addresses_, bytes_) : status;
}

// A page that cannot be unmapped there stays set aside.
void Spiller::Swap::take_addresses() {
  if (addresses_ == 0 || lost_) return;
  Address at = addresses_;
  Status status;
  for (std::size_t i = 0; i < lent_ && status.ok(); ++i, at += moves_[i - 1].bytes)
    status = insist([&] { return s_.backend_->unmap(at, moves_[i].bytes); });
  if (status.ok()) status = insist([&] { return s_.backend_->space_release(addresses_, bytes_); });
  lost_ = !status.ok();
  addresses_ = 0;
  lent_ = 0;
}

Status Spiller::Swap::copy(Gates& gates, Copies& copies, bool to_host) {
  Status status = gates.queue([&] {
    Status queued;
    Address lent = addresses_;
    for (std::size_t i = 0; i < moves_.size() && queued.ok(); ++i, lent += moves_[i - 1].bytes) {
      const Move& move = moves_[i];
      const Address host = s_.stock().pages()[to_host ? move.to : move.from].copies;
      queued = to_host ? copies.queue(host, move.address, move.bytes) : copies.queue(lent, host, move.bytes);
    }
    return queued;
  });
  const Status waited = insist([&] { return copies.wait(); });
  lost_ = !waited.ok();
  return status.ok() ? waited : status;
}

// Blocks may have been freed meanwhile; their pages are left alone.
Status Spiller::Swap::exchange() {
  PageStock& stock = s_.stock();
  Status status;
  for (std::size_t i = 0; i < moves_.size() && status.ok(); ++i) {
    Move& move = moves_[i];
    const bool lent = stock.pages()[move.from].lent;
    if (stock.pages()[move.from].holder == 0 && !lent) continue;
    status = lent ? stock.replace(move.from, move.to) : stock.exchange(move.from, move.to);
    move.exchanged = status.ok();
    if (i % kBatch == kBatch - 1) {
      lock_.unlock();
      lock_.lock();
    }
  }
  return status;
}

Status Spiller::Swap::run(bool to_host) {
  using Clock = std::chrono::steady_clock;
  lock_.unlock();
  Status status;
  Clock::time_point held;
  try {
    Copies copies(*s_.backend_, s_.state_.copy_streams, 0);
    status = copies.make_streams();
    if (status.ok() && !to_host) status = lend_addresses();
    Gates gates(*s_.backend_, s_.state_.copy_streams.streams, s_.config_.spill_patience);
    bool opened = status.ok();  // by the opener: once more
    while (opened) {
      status = gates.close();
      if (held == Clock::time_point()) held = Clock::now();
      if (!status.ok()) break;
      status = copy(gates, copies, to_host);
      opened = status.code == Code::not_ready;
    }
    lock_.lock();
    if (status.ok()) status = exchange();
    lock_.unlock();
    gates.open();
    take_addresses();
  } catch (const std::bad_alloc&) {
    status = {Code::out_of_memory, 0, kHostPage};
    take_addresses();
  }
  if (!lock_.owns_lock()) lock_.lock();
  if (held != Clock::time_point()) seconds_ = std::chrono::duration<double>(Clock::now() - held).count();
  s_.counts_.seconds += seconds_;
  s_.counts_.late += status.code == Code::not_ready || status.code == Code::deadlock;
  s_.counts_.failures += status.code == Code::failed;
  return status;
}

// ---- which pages ----------------------------------------------------------------------------------------

// Whether the pages under a block must stay on the device.
bool Spiller::stays(Index i) const {
  const Block& block = blocks()[i];
  const auto foreign = [this](StreamNumber number) {
    return streams_[number].foreign && !streams_[number].retired();
  };
  if (block.is(BlockState::suspended) || block.is(BlockState::moving)) return true;
  if (space().growing(block) || shares_.shared(i) || foreign(block.owned_by())) return true;
  if (block.is(BlockState::pending)) {
    const std::vector<Use>* const uses = pending_.awaited_by(i);
    return uses == nullptr ||
           std::any_of(uses->begin(), uses->end(), [&](const Use& use) { return foreign(use.stream); });
  }
  const std::vector<StreamNumber>* const uses = pending_.uses_of(i);
  return uses != nullptr && std::any_of(uses->begin(), uses->end(), foreign);
}

// The wish for the allocation counts before that for its tag.
SpillWish Spiller::wish_of(Index i) const {
  // Where the host writes the zeros, no gate holds them back.
  if (blocks()[i].unzeroed.load(std::memory_order_acquire)) return SpillWish::never;
  const auto found = wishes_.find(space().address_of(blocks()[i]));
  if (found != wishes_.end()) return found->second;
  return wish_ ? wish_(blocks()[i].tag) : SpillWish::none;
}

// The pages that may go; if `only` is given, those under this block.
std::vector<SpillCandidate> Spiller::candidates(Index only) const {
  const Slab<Page>& pages = stock().pages();
  std::vector<SpillCandidate> by_page(pages.end());
  std::vector<bool> fixed(pages.end());
  for (Index p = 1; p < pages.end(); ++p) {
    const Page& page = pages[p];
    fixed[p] = page.handle == 0 || page.holder == 0 || page.blocked() || streams_[page.owner].apart();
  }
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (block.is(BlockState::none) || block.is(BlockState::free) || space().segment(block).plain) continue;
    StreamState& owner = owner_of(block);
    const bool stay = stays(i);
    std::lock_guard guard(owner.lock);
    const bool live = block.is(BlockState::live);
    const SpillWish wish = live ? wish_of(i) : SpillWish::none;
    const std::uint32_t age = static_cast<std::uint32_t>(owner.slow_serial + owner.hits) - block.serial;
    stock().each_page(block, [&](Index page, Units, Units) {
      if (stay || wish == SpillWish::never) fixed[page] = true;
      SpillCandidate& candidate = by_page[page];
      if (!live || (only != 0 && only != i && candidate.page == 0)) return;
      const bool seen = std::exchange(candidate.page, page) != 0;
      if (!seen || age < candidate.age) {
        candidate.age = age;
        candidate.block = i;
        candidate.serial = block.serial;
        candidate.counts_on = owner.number;
      }
      candidate.first = wish == SpillWish::first && (!seen || candidate.first);
      candidate.last = candidate.last || wish == SpillWish::last;
      candidate.block_bytes = std::max(candidate.block_bytes, bytes_of(block));
    });
  }
  std::vector<SpillCandidate> result;
  for (Index p = 1; p < pages.end(); ++p) {
    if (by_page[p].page == 0 || fixed[p]) continue;
    by_page[p].bytes = pages[p].bytes();
    by_page[p].stream = pages[p].owner;
    result.push_back(by_page[p]);
  }
  return result;
}

// Pages on the host that may return: those that should have gone last come first, then those of the youngest
// blocks. If `only` is given, those under this block.
std::vector<Index> Spiller::spilled_pages(Index only) const {
  const Slab<Page>& pages = stock().pages();
  const auto rank = [](SpillWish wish) {
    return wish == SpillWish::last ? 0 : wish == SpillWish::first ? 2 : 1;
  };
  std::vector<std::pair<int, std::uint64_t>> order(pages.end(), {rank(SpillWish::first), ~std::uint64_t{0}});
  std::vector<bool> wanted(pages.end());
  std::vector<bool> fixed(pages.end());
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (block.is(BlockState::none) || block.is(BlockState::free) || space().segment(block).plain) continue;
    const bool stay = stays(i);
    StreamState& owner = owner_of(block);
    std::lock_guard guard(owner.lock);
    const int wish = rank(block.is(BlockState::live) ? wish_of(i) : SpillWish::first);
    const std::uint32_t age = static_cast<std::uint32_t>(owner.slow_serial + owner.hits) - block.serial;
    stock().each_page(block, [&](Index page, Units, Units) {
      if (!pages[page].spilled() || pages[page].suspended || pages[page].lent) return;
      order[page] = std::min(order[page], {wish, age});
      if (only == 0 || only == i) wanted[page] = true;
      if (stay) fixed[page] = true;
    });
  }
  std::vector<Index> result;
  for (Index p = 1; p < pages.end(); ++p)
    if (wanted[p] && !fixed[p]) result.push_back(p);
  std::stable_sort(result.begin(), result.end(), [&](Index a, Index b) { return order[a] < order[b]; });
  return result;
}

std::uint64_t Spiller::spilled_bytes(const Block& block, Units from, Units to) const {
  std::uint64_t bytes = 0;
  stock().each_page(block, [&](Index page, Units first, Units past) {
    first = std::max(first, from);
    past = std::min(past, to);
    bytes += stock().pages()[page].host && first < past ? bytes_of(past - first) : 0;
  });
  return bytes;
}

Status Spiller::spilled(Address address, std::uint64_t* bytes, std::uint64_t size) const {
  *bytes = 0;
  std::unique_lock<std::mutex> lock;
  if (Status status = enter("spilled", &lock); !status.ok()) return status;
  const Index block = space().containing(address);
  if (block == 0 || !blocks()[block].allocated()) return {Code::invalid, 0, "spilled"};
  if (size == 0) {
    *bytes = spilled_bytes(blocks()[block]);
    return {};
  }
  const std::uint64_t from = address - space().address_of(blocks()[block]);
  const std::uint64_t past = from + std::min(size, bytes_of(blocks()[block]) - from);
  const auto unit = [&](std::uint64_t at) { return blocks()[block].offset + static_cast<Units>(at / kUnit); };
  *bytes = std::min(size, spilled_bytes(blocks()[block], unit(from), unit(past + kUnit - 1)));
  return {};
}

// ---- to the host ----------------------------------------------------------------------------------------

// A host page, set aside: a spare one, or a new one within the budget.
Status Spiller::get_host_page(int size, std::unique_lock<std::mutex>& lock, Index* out) {
  if (Status status = stock().take_spare(size, finished_, out); !status.ok() || *out != 0) return status;
  const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
  const std::uint64_t most = budget();
  if (bytes > most) return {Code::out_of_memory, 0, kBudget};
  if (Status status = stock().release_spare(most - bytes, finished_); !status.ok()) return status;
  return create_host_page(size, lock, out);
}

// A new host page within the budget, set aside.
Status Spiller::create_host_page(int size, std::unique_lock<std::mutex>& lock, Index* out) {
  const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
  const auto fits = [&] { return stock().host_bytes() + bytes <= budget() && stock().has_room_for_page(); };
  if (!fits()) return {Code::out_of_memory, 0, kBudget};
  PageHandle handle = 0;
  Address copies = 0;
  lock.unlock();
  Status status = backend_->host_page_create(bytes, &handle, &copies);
  lock.lock();
  if (status.code == Code::out_of_memory) status.call = kHostPage;
  if (!status.ok()) return status;
  if (!fits()) {
    (void)backend_->host_page_release(handle, bytes, copies);
    return {Code::out_of_memory, 0, kBudget};
  }
  *out = stock().add_host(handle, bytes, copies);
  return status;
}

// The bytes of each size among the pages that would go if so many were needed now.
Spiller::SpareBytes Spiller::next_sizes(std::uint64_t bytes) const {
  std::vector<SpillCandidate> next = candidates(0);
  order_.sort(next);
  (void)choose(bytes, bytes, next);
  SpareBytes sizes{};
  for (const SpillCandidate& each : next) sizes[stock().pages()[each.page].size] += each.bytes;
  return sizes;
}

Status Spiller::create_ahead(std::uint64_t spare, std::uint64_t most, std::uint64_t* created) {
  *created = 0;
  std::optional<SpareBytes> wanted;
  for (;;) {
    if (closed()) return {Code::closed, 0, "spill"};
    const Turn turn(state_.turn);
    std::unique_lock<std::mutex> lock;
    if (!turn.ours()) return {Code::deadlock, 0, "spill"};
    if (Status status = begin("spill", lock); !status.ok()) return status;
    constexpr std::uint64_t kSmallest = kPageSlots[0] * kSlotBytes;
    if (spare < kSmallest || stock().spare_bytes() > spare - kSmallest || *created + kSmallest > most ||
        stock().host_bytes() + kSmallest > budget())
      return {};
    if (!wanted) wanted = next_sizes(std::min(spare, budget()));
    const auto lacking = [&](int size) {
      const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
      return stock().spare_bytes(size) + bytes <= (*wanted)[size] && stock().spare_bytes() + bytes <= spare &&
             *created + bytes <= most && stock().host_bytes() + bytes <= budget();
    };
    int size = kPageSizes - 1;
    while (size >= 0 && !lacking(size)) --size;
    if (size < 0) return {};
    Index page = 0;
    if (Status status = create_host_page(size, lock, &page); !status.ok()) return status;
    stock().reinstate(page);
    *created += stock().pages()[page].bytes();
    log_.note_reserved(streams_[0]);
    verify();
  }
}

Status Spiller::take_host_bytes(std::uint64_t bytes) {
  const Status none{Code::out_of_memory, 0, kBudget};
  std::unique_lock<std::mutex> lock;
  if (Status status = begin("spill", lock); !status.ok()) return status;
  const std::uint64_t used = used_by_others_.load(std::memory_order_relaxed);
  if (bytes > config_.spill - std::min(config_.spill, used)) return none;
  if (used + bytes > counts_.taken_bytes) {
    const std::uint64_t most = config_.spill - used - bytes;
    if (stock().host_bytes() - stock().spare_bytes() > most) return none;
    if (Status status = stock().release_spare(most, finished_); !status.ok()) return status;
    verify();
    if (stock().host_bytes() > most) return none;
    counts_.taken_bytes = used + bytes;
  }
  used_by_others_.fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

void Spiller::give_host_bytes(std::uint64_t bytes) {
  std::uint64_t used = used_by_others_.load(std::memory_order_relaxed);
  while (
      !used_by_others_.compare_exchange_weak(used, used - std::min(used, bytes), std::memory_order_relaxed)) {
  }
}

Status Spiller::release_host_bytes() {
  std::unique_lock<std::mutex> lock;
  if (Status status = begin("spill", lock); !status.ok()) return status;
  counts_.taken_bytes = used_by_others_.load(std::memory_order_relaxed);
  return {};
}

// What is in use now, or what the driver refuses, is released when it is needed.
void Spiller::keep_budget() {
  if (stock().host_bytes() <= budget()) return;
  lives_.complete();
  caches_.drain_all();
  stock().settle();
  (void)stock().release_spare(budget(), finished_);
}

std::uint64_t Spiller::left() const {
  return budget() - std::min(budget(), stock().host_bytes() - stock().spare_bytes());
}

// No cache takes the blocks of a page on the host when they are freed, so that no request gets them.
void Spiller::mark_blocks(Index page) {
  each_block_on(stock().pages()[page], [&](Index b, Units) {
    Block& block = blocks()[b];
    std::lock_guard guard(owner_of(block).lock);
    // A cached block may become live before it is drained.
    if (block.is(BlockState::live) || block.is(BlockState::cached)) block.used_elsewhere = true;
  });
}

void Spiller::unmark_blocks(Index page) {
  each_block_on(stock().pages()[page], [&](Index b, Units) {
    Block& block = blocks()[b];
    if (pending_.uses_of(b) != nullptr || shares_.shared(b) || space().growing(block)) return;
    if (block.is(BlockState::free) || spilled_bytes(block) != 0) return;
    std::lock_guard guard(owner_of(block).lock);
    if (block.is(BlockState::live)) block.used_elsewhere = false;
  });
}

// Moves the victims to host pages; all or none, unless the device fails. Their device pages go to the taker.
Status Spiller::to_host(const std::vector<SpillCandidate>& victims, const StreamState* taker,
                        std::unique_lock<std::mutex>& lock, std::uint64_t* moved) {
  *moved = 0;
  if (victims.empty()) return {};
  std::vector<Index> exchanged;
  exchanged.reserve(victims.size());
  Status status;
  {
    Swap swap(*this, victims.size(), lock);
    for (const SpillCandidate& victim : victims) swap.add(victim.page);
    for (std::size_t i = 0; i < victims.size() && status.ok(); ++i) {
      Index host = 0;
      status = get_host_page(stock().pages()[victims[i].page].size, lock, &host);
      if (!status.ok()) break;
      stock().set_parked(host, false);
      swap.pair(i, host);
    }
    if (status.ok()) status = swap.run(true);
    for (const Move& move : swap.moves()) {
      if (!move.exchanged) continue;
      *moved += move.bytes;
      exchanged.push_back(move.from);
      if (stock().pages()[move.to].holder != 0) mark_blocks(move.to);
    }
    note_moves(swap.moves(), swap.seconds(), Action::spilled);
  }
  for (const Index page : exchanged)
    if (taker != nullptr && stock().pages()[page].free()) stock().transfer(page, taker->number, 0);
  if (*moved != 0) ++counts_.spills;
  counts_.spilled_bytes += *moved;
  caches_.drain_all();  // blocks of these pages that were freed before
  return status;
}

// Keeps those candidates that go, in their order: until they have `wished` bytes, without pages that are too
// large for the host memory that is left. Returns how many of them have `bytes`; 0: all of them have less.
std::size_t Spiller::choose(std::uint64_t bytes, std::uint64_t wished,
                            std::vector<SpillCandidate>& candidates) const {
  std::uint64_t left = this->left();
  std::uint64_t sum = 0;
  std::size_t count = 0;
  std::size_t enough = 0;
  for (const SpillCandidate& each : std::vector(candidates)) {
    if (sum >= std::max(bytes, wished)) break;
    if (each.bytes > left) continue;
    candidates[count++] = each;
    left -= each.bytes;
    sum += each.bytes;
    if (enough == 0 && sum >= bytes) enough = count;
  }
  candidates.resize(count);
  return enough;
}

void Spiller::learn() {
  const auto now = [this](StreamNumber number) {
    StreamState& stream = streams_[number];
    std::lock_guard guard(stream.lock);
    return static_cast<std::uint32_t>(stream.slow_serial + stream.hits);
  };
  const auto live = [this](Index i, std::uint32_t serial) {
    const Block& block = blocks()[i];
    if (block.is(BlockState::none)) return false;
    std::lock_guard guard(owner_of(block).lock);
    return block.is(BlockState::live) && block.serial == serial;
  };
  order_.learn(now, live, placement_.reserved_bytes() / kLearnShare);
}

Status Spiller::make_room(std::uint64_t bytes, std::uint64_t wished, const StreamState* taker,
                          std::unique_lock<std::mutex>& lock) {
  if (config_.spill == 0 || !backend_->info().host_pages) return {Code::unsupported, 0, "spill"};
  const std::function<void(std::uint64_t, std::uint64_t)> hook = hook_;
  const double patience = config_.spill_patience;
  lock.unlock();
  if (hook) hook(bytes, 0);
  if (hook && interrupted()) {
    lock.lock();
    return {Code::interrupted, 0, "spill"};
  }
  std::uint64_t moved = 0;
  const Status status = move_out(bytes, wished, taker, patience, lock, &moved);
  if (hook && moved != 0 && !std::exchange(hook_knows_, true)) {
    lock.unlock();
    hook(bytes, moved);
    lock.lock();
  }
  return status;
}

// pre: the lock is not held; it is held afterwards.
Status Spiller::move_out(std::uint64_t bytes, std::uint64_t wished, const StreamState* taker, double patience,
                         std::unique_lock<std::mutex>& lock, std::uint64_t* moved) {
  const Turn turn(state_.turn, patience);
  lock.lock();
  if (turn.late()) return {Code::not_ready, 0, kTurn};
  if (!turn.ours()) return {Code::deadlock, 0, "spill"};
  if (closed()) return {Code::closed, 0, "spill"};
  std::vector<SpillCandidate> all = candidates(0);
  std::uint64_t movable = 0;
  for (const SpillCandidate& each : all) movable += each.bytes;
  learn();
  if (policy_) {
    policy_(all);
  } else {
    order_.sort(all);
  }
  wished = std::max(wished, std::min(kBatchBytes, placement_.reserved_bytes() / kBatchShare));
  std::vector<SpillCandidate> victims = all;
  std::size_t enough = choose(bytes, wished, victims);
  if (enough == 0) {
    // Small pages may have left no host memory for large ones: the other way round, all of it is used.
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    victims.swap(all);
    enough = choose(bytes, 0, victims);
  }
  if (enough == 0) return {Code::out_of_memory, 0, movable < bytes ? kNothing : kBudget};
  for (const std::size_t some : {victims.size(), enough}) {
    victims.resize(std::min(victims.size(), some));
    const Status status = to_host(victims, taker, lock, moved);
    if (status.ok())
      for (const SpillCandidate& each : victims) order_.note(each);
    // With less host memory than wished, what is needed goes.
    if (status.code != Code::out_of_memory || some == enough) return status;
  }
  return {};
}

// ---- to the device --------------------------------------------------------------------------------------

// Free device memory of the pool, and what it may still reserve.
std::uint64_t Spiller::room() const {
  std::uint64_t free_bytes = 0, total = 0;
  const bool known = backend_->memory_info(&free_bytes, &total).ok();
  std::uint64_t idle = 0;
  stock().free_owners().each([&](StreamNumber number) {
    if (!streams_[number].apart()) idle += stock().free_bytes(number);
    return false;
  });
  return idle + (known ? std::min(free_bytes, state_.budget()) : 0);
}

// A free device page, set aside: one whose last use has completed, or a new one.
Status Spiller::get_device_page(int size, StreamNumber stream, Index* out) {
  *out = 0;
  stock().free_owners().each([&](StreamNumber number) {
    const Index page = stock().oldest(number, size);
    if (page == 0 || streams_[number].apart() || !finished_(number, stock().pages()[page].tick)) return false;
    *out = page;
    return true;
  });
  const std::uint64_t bytes = kPageSlots[size] * kSlotBytes;
  Status status;
  for (const bool released : {false, true}) {
    if (*out != 0) break;
    status = {Code::out_of_memory, 0, kLimit};
    if (bytes <= state_.budget()) status = stock().create_free(size, stream, out);
    if (status.code != Code::out_of_memory || released) break;
    // Pages of other sizes make room for one of this size.
    const std::uint64_t reserved = placement_.reserved_bytes();
    const std::uint64_t lacking = bytes - std::min(bytes, state_.budget());
    const std::uint64_t less = std::max(lacking, std::min(bytes, reserved));
    if (const Status freed =
            placement_.release_free(reserved - std::min(reserved, less), finished_, kMostAsked, false);
        !freed.ok())
      return freed;
  }
  if (*out != 0) stock().set_aside(*out);
  return *out != 0 ? Status{} : status;
}

// As many as there are device pages for. out_of_memory: not all.
Status Spiller::to_device(const std::vector<Index>& which, std::unique_lock<std::mutex>& lock,
                          std::uint64_t* moved) {
  *moved = 0;
  if (which.empty()) return {};
  Status status;
  Status lacking;
  {
    Swap swap(*this, which.size(), lock);
    for (const Index page : which) {
      Index device = 0;
      const Page& host = stock().pages()[page];
      // A graph would keep a new page even if the swap fails.
      lacking = get_device_page(host.size, host.lent ? StreamNumber{0} : host.owner, &device);
      if (!lacking.ok()) break;
      swap.add(page);
      swap.pair(swap.moves().size() - 1, device);
    }
    if (!swap.moves().empty()) status = swap.run(false);
    for (const Move& move : swap.moves()) {
      if (!move.exchanged) continue;
      *moved += move.bytes;
      if (stock().pages()[move.to].holder != 0) unmark_blocks(move.to);
    }
    note_moves(swap.moves(), swap.seconds(), Action::returned);
  }
  if (*moved != 0) ++counts_.returns;
  counts_.returned_bytes += *moved;
  return status.ok() ? lacking : status;
}

Status Spiller::bring_back(std::uint64_t most, std::uint64_t* returned, bool wait) {
  *returned = 0;
  if (closed()) return {Code::closed, 0, "spill"};
  const Turn turn(state_.turn);
  std::unique_lock<std::mutex> lock;
  if (!turn.ours()) return {Code::deadlock, 0, "spill"};
  if (Status status = enter("spill", &lock); !status.ok()) return status;
  if (stock().spilled_bytes() == 0) return {};
  if (wait)
    if (Status status = lives_.wait_until_idle(lock); !status.ok()) return status;
  lives_.complete();
  caches_.drain_all();
  const std::uint64_t all = config_.limit != 0 ? std::min(config_.limit, backend_->info().total_bytes)
                                               : backend_->info().total_bytes;
  const std::uint64_t margin = all / kMarginShare;
  const std::uint64_t there = room();
  std::uint64_t left = std::min(most, there - std::min(there, margin));
  std::vector<Index> pages = spilled_pages(0);
  std::erase_if(pages, [&](Index page) { return stock().pages()[page].parked; });
  std::size_t count = 0;
  for (; count < pages.size() && stock().pages()[pages[count]].bytes() <= left; ++count)
    left -= stock().pages()[pages[count]].bytes();
  pages.resize(count);
  const Status status = to_device(pages, lock, returned);
  return status.code == Code::out_of_memory ? Status{} : status;
}

// ---- captures -------------------------------------------------------------------------------------------

// The index into kPageSlots of the next page to lend: a spare one, or what a new device page would have.
int Spiller::size_to_lend(std::uint64_t bytes, std::uint64_t request) const {
  if (request == 0) return 0;
  const std::uint64_t largest = kPageSlots[kPageSizes - 1];
  const auto slots = static_cast<Slot>(std::min(bytes / kSlotBytes, largest));
  const int created = stock().size_to_create(slots, request);
  for (int size = kPageSizes - 1; size > created; --size)
    if (kPageSlots[size] <= slots && stock().spare_bytes(size) != 0) return size;
  return created;
}

Status Spiller::lend(std::uint64_t bytes, std::uint64_t request, const StreamState& taker,
                     std::unique_lock<std::mutex>& lock) {
  if (!backend_->info().host_pages) return {Code::unsupported, 0, "spill"};
  const double patience = config_.spill_patience;
  lock.unlock();
  const Turn turn(state_.turn, patience);
  lock.lock();
  if (turn.late()) return {Code::not_ready, 0, kTurn};
  if (!turn.ours()) return {Code::deadlock, 0, "spill"};
  if (closed()) return {Code::closed, 0, "spill"};
  if (bytes > left()) return {Code::out_of_memory, 0, kBudget};
  std::vector<Index> pages;
  pages.reserve(bytes / kSlotBytes);
  stock().make_room_for(taker.number);
  Status status;
  for (std::uint64_t lacking = bytes; lacking != 0 && status.ok();) {
    Index page = 0;
    status = get_host_page(size_to_lend(lacking, request), lock, &page);
    if (!status.ok()) break;
    pages.push_back(page);
    lacking -= std::min(lacking, stock().pages()[page].bytes());
  }
  for (const Index page : pages) {
    if (status.ok())
      stock().lend(page, taker.number);
    else
      stock().reinstate(page);
  }
  return status;
}

// What is lent to them and may get device memory.
std::vector<Index> Spiller::unsettled(const std::vector<StreamNumber>& states) const {
  std::vector<Index> result;
  for (const StreamNumber number : states)
    for (const Index page : stock().lent_to(number)) {
      if (stock().pages()[page].mappings == 0)
        stock().end_loan(page);  // never used
      else if (!stock().pages()[page].parked)
        result.push_back(page);
    }
  return result;
}

// Moves what there are device pages for. Returns how many bytes are left.
std::uint64_t Spiller::replace_lent(const std::vector<StreamNumber>& states,
                                    std::unique_lock<std::mutex>& lock) {
  const double patience = config_.spill_patience;
  lock.unlock();
  const Turn turn(state_.turn, patience);
  lock.lock();
  if (!turn.ours() || closed()) return 0;
  std::uint64_t moved = 0, left = 0;
  const Status status = to_device(unsettled(states), lock, &moved);
  for (const Index page : unsettled(states)) left += stock().pages()[page].bytes();
  return status.code == Code::out_of_memory ? left : 0;
}

void Spiller::settle(const std::vector<StreamNumber>& states, bool movable) {
  std::unique_lock<std::mutex> lock;
  if (!enter("heap_end", &lock).ok() || unsettled(states).empty()) return;
  for (std::uint64_t before = ~std::uint64_t{0}; movable;) {
    const std::uint64_t left = replace_lent(states, lock);
    if (left == 0 || left == before) break;
    before = left;
    Status status{Code::out_of_memory, 0, kNothing};
    for (std::uint64_t bytes = left; bytes != 0 && status.code == Code::out_of_memory;
         bytes = bytes / 2 / kSlotBytes * kSlotBytes)
      status = make_room(bytes, 0, nullptr, lock);
    if (!status.ok()) break;
  }
  if (closed()) return;
  for (const Index page : unsettled(states)) stock().set_parked(page, true);
  verify();
}

// ---- by hand --------------------------------------------------------------------------------------------

Status Spiller::begin(const char* call, std::unique_lock<std::mutex>& lock) const {
  if (Status status = enter(call, &lock); !status.ok()) return status;
  if (!placement_.paged() || !backend_->info().host_pages) return {Code::unsupported, 0, call};
  return {};
}

Status Spiller::spill(Address address, std::uint64_t* moved) {
  *moved = 0;
  if (closed()) return {Code::closed, 0, "spill"};
  const Turn turn(state_.turn);
  std::unique_lock<std::mutex> lock;
  if (!turn.ours()) return {Code::deadlock, 0, "spill"};
  if (Status status = begin("spill", lock); !status.ok()) return status;
  const Index block = space().containing(address);
  if (block == 0 || !blocks()[block].allocated()) return {Code::invalid, 0, "spill"};
  if (config_.spill == 0) return {Code::unsupported, 0, "spill"};
  return by_hand(
      [&](std::uint64_t* more) {
        const Index now = space().containing(address);
        const bool there = now != 0 && blocks()[now].allocated();
        return there ? to_host(candidates(now), nullptr, lock, more) : Status{};
      },
      lock, moved);
}

Status Spiller::prefetch(Address address, std::uint64_t* moved) {
  *moved = 0;
  if (closed()) return {Code::closed, 0, "prefetch"};
  const Turn turn(state_.turn);
  std::unique_lock<std::mutex> lock;
  if (!turn.ours()) return {Code::deadlock, 0, "prefetch"};
  if (Status status = begin("prefetch", lock); !status.ok()) return status;
  const Index block = space().containing(address);
  if (block == 0 || !blocks()[block].allocated()) return {Code::invalid, 0, "prefetch"};
  return by_hand(
      [&](std::uint64_t* more) {
        const Index now = space().containing(address);
        const bool there = now != 0 && blocks()[now].allocated();
        return there ? to_device(spilled_pages(now), lock, more) : Status{};
      },
      lock, moved);
}

// Whether queued work still uses blocks or pages that are free otherwise.
bool Spiller::freed_in_use() const {
  if (pending_.blocks_waiting() != 0) return true;
  const Slab<Page>& pages = stock().pages();
  for (Index p = 1; p < pages.end(); ++p) {
    const Page& page = pages[p];
    const bool used = page.handle != 0 && page.holder == 0 && page.mappings != 0;
    if (used && !streams_[page.owner].apart() && !finished_(page.owner, page.tick)) return true;
  }
  return false;
}

Status Spiller::by_hand(const std::function<Status(std::uint64_t*)>& move, std::unique_lock<std::mutex>& lock,
                        std::uint64_t* moved) {
  caches_.drain_all();
  lives_.complete();
  const Status status = move(moved);
  if (status.code != Code::out_of_memory || !freed_in_use()) return status;
  if (Status idle = lives_.wait_until_idle(lock); !idle.ok()) return idle;
  std::uint64_t more = 0;
  const Status again = move(&more);
  *moved += more;
  return again;
}

void Spiller::around(std::function<void(std::uint64_t, std::uint64_t)> hook) {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return;
  hook_.swap(hook);
  hook_knows_ = false;
}

void Spiller::steer(std::function<SpillWish(std::uint32_t)> wish) {
  std::unique_lock<std::mutex> lock;
  if (look(&lock)) wish_.swap(wish);
}

void Spiller::steer_allocations(std::unordered_map<Address, SpillWish> wishes) {
  std::unique_lock<std::mutex> lock;
  if (look(&lock)) wishes_.swap(wishes);
}

void Spiller::set_policy(SpillPolicy policy) {
  std::unique_lock<std::mutex> lock;
  if (look(&lock)) policy_.swap(policy);
}

}  // namespace vram
