// Suspend and resume: the pages of live blocks go back to the device while their addresses stay theirs, and
// come back. How a page goes and comes is in pages.cpp, what is kept of the contents in contents.hpp.
//
// One suspend or resume runs at a time (turn_). The mutex is held for the pool's state only: waits and copies
// go without it, and the pool serves on. What the operation works on stands still meanwhile: its pages are
// set aside, and a suspended block that is freed is put into late_ until the end.
#include <algorithm>
#include <utility>

#include "base/waits.hpp"
#include "pool/pool.hpp"

namespace vram {

namespace {

// Copied, and kept in host memory, in pieces of at most this. Large enough for full bandwidth; small enough
// that pages go back, and come, while other pieces are being copied.
constexpr std::uint64_t kPieceBytes = 64 * kMiB;
// Copies take turns on these, so that one begins while another ends.
constexpr std::size_t kCopyStreams = 2;
// Pages given back at a time with the mutex held.
constexpr std::size_t kBatch = 32;

}  // namespace

// Bytes of a suspended block and where they are kept.
struct Pool::Saved {
  Address address = 0;
  std::uint64_t bytes = 0;
  Address host = 0;
  EventHandle event = 0;  // passes when the copy is done

  // Neighbours become one, and that is cut into pieces. pre: in order of their addresses.
  static std::vector<Saved> in_pieces(std::vector<Saved> ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Saved& a, const Saved& b) { return a.address < b.address; });
    std::vector<Saved> whole;
    for (const Saved& each : ranges) {
      const bool follows = !whole.empty() && whole.back().address + whole.back().bytes == each.address &&
                           (each.host == 0 || whole.back().host + whole.back().bytes == each.host);
      if (follows) {
        whole.back().bytes += each.bytes;
      } else {
        whole.push_back(each);
      }
    }
    std::vector<Saved> pieces;
    for (const Saved& each : whole)
      for (std::uint64_t at = 0; at < each.bytes; at += kPieceBytes)
        pieces.push_back(
            {each.address + at, std::min(kPieceBytes, each.bytes - at), each.host == 0 ? 0 : each.host + at});
    return pieces;
  }
};

// Copies on streams of the pool's own, which are made when first needed and kept, as are the events.
class Pool::Copies {
 public:
  explicit Copies(Pool& pool)
      : backend_(*pool.backend_), streams_(pool.copy_streams_), events_(pool.copy_events_) {}

  // `event`, if given, marks the end of the copy.
  Status queue(Address to, Address from, std::uint64_t bytes, EventHandle* event = nullptr) {
    if (next_ == streams_.size()) {
      StreamHandle made = 0;
      if (Status status = backend_.stream_create(&made); !status.ok()) return status;
      streams_.push_back(made);
    }
    const StreamHandle stream = streams_[next_];
    next_ = (next_ + 1) % kCopyStreams;
    used_ = true;
    if (Status status = backend_.copy(to, from, bytes, stream); !status.ok() || event == nullptr)
      return status;
    if (events_.empty())
      if (Status status = backend_.event_create(&events_.emplace_back()); !status.ok()) {
        events_.pop_back();
        return status;
      }
    *event = events_.back();
    events_.pop_back();
    return backend_.event_record(*event, stream);
  }
  void give_back(EventHandle event) { events_.push_back(event); }

  // Waits for all of them.
  Status wait() {
    Status status;
    for (StreamHandle stream : streams_)
      if (used_ && status.ok()) status = backend_.stream_synchronize(stream);
    return status.ok() ? status : backend_.synchronize();
  }

 private:
  // They wait for nothing but each other, so a wait for them ends soon. What they read and write may not be
  // touched before that.
  const InterruptScope quiet_{nullptr};
  Backend& backend_;
  std::vector<StreamHandle>& streams_;
  std::vector<EventHandle>& events_;
  std::size_t next_ = 0;
  bool used_ = false;
};

// Bytes of blocks in use whose pages have gone.
std::uint64_t Pool::suspended_live() const {
  std::uint64_t bytes = 0;
  if (placement_.stock().suspended_bytes() == 0) return bytes;
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    const Block& block = placement_.space().blocks()[i];
    if (block.is(BlockState::none) || block.is(BlockState::free)) continue;
    placement_.stock().each_page(block, [&](Index page, Units from, Units to) {
      if (placement_.stock().pages()[page].handle == 0) bytes += std::uint64_t{to - from} * kUnit;
    });
  }
  return bytes;
}

void Pool::forget_contents(const Block& block) {
  std::vector<KeptPiece> unused;
  contents_.drop(placement_.space().address_of(block), bytes_of(block), unused);
  for (const KeptPiece& piece : unused) piece.give_back();
}

// Zeroes what a freed block has of memory.
Status Pool::fill_resident(const Block& block, StreamHandle stream) {
  const Address address = placement_.space().address_of(block);
  if (placement_.stock().suspended_bytes() == 0 && !operating_)
    return fill_zeros(address, bytes_of(block), stream);
  Status first;
  placement_.stock().each_page(block, [&](Index page, Units from, Units to) {
    if (placement_.stock().pages()[page].suspended) return;
    const Status status = fill_zeros(address + std::uint64_t{from - block.offset} * kUnit,
                                     std::uint64_t{to - from} * kUnit, stream);
    if (first.ok()) first = status;
  });
  return first;
}

// A suspended block was freed. It may be under the hands of suspend or resume, which sees to it at its end;
// else all its uses had ended when it was suspended, and only memory that it still has may be left to be
// zeroed.
void Pool::let_go_suspended(Index i) {
  if (operating_) {
    late_.push_back(i);
    return;
  }
  Block& block = placement_.space().blocks()[i];
  forget_contents(block);
  uses_.erase(i);
  block.used_elsewhere = false;
  bool zero = false;
  if (zero_on_free_.load(std::memory_order_relaxed))
    placement_.stock().each_page(
        block, [&](Index page, Units, Units) { zero = zero || !placement_.stock().pages()[page].suspended; });
  if (zero) {
    make_pending(i);
  } else {
    placement_.put(i, 0);
  }
}

// Ends the operation under way: what was freed meanwhile goes where freed blocks go.
void Pool::end_operation() {
  operating_ = false;
  std::vector<Index> late;
  late.swap(late_);
  for (Index i : late) {
    Block& block = placement_.space().blocks()[i];
    forget_contents(block);
    const bool used = std::exchange(block.used_elsewhere, false);
    if (used || zero_on_free_.load(std::memory_order_relaxed)) {
      make_pending(i);
    } else {
      give_home(i, true);
    }
  }
  if (leaving_ != 0) complete_passed();
  note_reserved(streams_[0]);
  verify();
}

// ---- suspend --------------------------------------------------------------------------------------------

Status Pool::suspend(const Wanted& wanted, bool keep, const std::shared_ptr<Allocator>& store,
                     std::uint64_t* given, OutOfMemoryReport* short_of) {
  *given = 0;
  if (keep && store == nullptr) return {Code::invalid, 0, "store"};
  if (closed()) return {Code::closed, 0, "suspend"};
  if (!placement_.paged()) return {Code::unsupported, 0, "suspend"};
  Turn turn(*this);
  if (!turn.ours()) return {Code::invalid, 0, "suspend"};
  std::unique_lock lock(mutex_);
  if (closed()) return {Code::closed, 0, "suspend"};
  const bool all = !wanted;
  const std::uint64_t before = placement_.stock().suspended_bytes();
  operating_ = true;
  const std::vector<Index> blocks = mark_suspended(wanted, keep);
  Status status = wait_for_suspended(all, lock);
  if (status.ok() && zero_on_free_.load(std::memory_order_relaxed)) {
    complete_passed();  // and begins to be zeroed
    status = wait_for_suspended(all, lock);
  }
  const std::uint64_t idle = placement_.reserved_bytes();
  if (status.ok()) status = give_idle_back();
  *given = idle - placement_.reserved_bytes();
  if (status.ok()) status = give_pages(pages_to_give(all, store != nullptr), store, lock, short_of);
  if (status.ok()) {
    *given += placement_.stock().suspended_bytes() - before;
  } else {
    (void)bring(blocks, all, lock, nullptr);
  }
  end_operation();
  return status;
}

// From here on nobody uses the blocks anew; returns those that were not suspended before.
std::vector<Index> Pool::mark_suspended(const Wanted& wanted, bool keep) {
  std::vector<Index> marked;
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::live)) continue;
    StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
    std::lock_guard guard(owner.lock);
    // It may have been freed into the owner's cache meanwhile; owners change under the mutex only.
    if (!block.is(BlockState::live) || (wanted && !wanted(block.tag))) continue;
    if (placement_.space().growing(block)) continue;  // growable buffers give pages back themselves
    block.set(BlockState::suspended);
    block.keep = keep;
    ++suspended_blocks_;
    marked.push_back(i);
  }
  return marked;
}

// Waits for the work of every stream that may use suspended blocks, or did use free memory beside them. A
// graph may have been launched anywhere, and other libraries' streams cannot be asked, so that their memory
// takes the whole device.
Status Pool::wait_for_suspended(bool all, std::unique_lock<std::mutex>& lock) {
  drain_all();
  std::vector<bool> asked(streams_.size(), all);
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    const Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    asked[block.owner.load(std::memory_order_relaxed)] = true;
    asked[placement_.space().segments()[block.segment].stream] = true;
    if (const auto uses = uses_.find(i); uses != uses_.end())
      for (std::uint16_t number : uses->second) asked[number] = true;
  }
  bool device = false;
  for (std::uint32_t n = 0; n < asked.size(); ++n) {
    StreamState& stream = streams_[static_cast<std::uint16_t>(n)];
    if (stream.retired || (!asked[n] && stream.waiting.empty())) continue;
    device = device || stream.capture != 0 || stream.foreign;
    if (stream.foreign) continue;
    if (backend_->capturing(stream.handle)) return {Code::capturing, 0, "suspend"};
    if (Status status = wait_for_stream(stream, lock); !status.ok()) return status;
  }
  return device ? wait_for_device(lock) : Status{};
}

Status Pool::give_idle_back() {
  complete_passed();
  drain_all();
  const Status status = placement_.trim(0, finished_, false);
  note_reserved(streams_[0]);
  return status;
}

// The pages on which nothing lies but suspended blocks, and free memory that has no work left. With a graph
// of which no block stays in use goes what it has freed inside. Without a store those stay that have contents
// to be kept.
std::vector<Index> Pool::pages_to_give(bool all, bool keep) const {
  const Slab<Page>& pages = placement_.stock().pages();
  std::vector<bool> goes(pages.end());
  std::vector<bool> stays(pages.end());
  std::vector<bool> has_suspended(streams_.size(), all);
  std::vector<bool> has_live(streams_.size());
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    const Block& block = placement_.space().blocks()[i];
    if (block.is(BlockState::none)) continue;
    const std::uint16_t home = placement_.space().segments()[block.segment].stream;
    const StreamState& stream = streams_[home];
    const Address address = placement_.space().address_of(block);
    const bool suspended = block.is(BlockState::suspended);
    if (block.is(BlockState::free)) {
      const Tick tick = stream.last != 0 ? std::min(block.tick, stream.last) : block.tick;
      if (stream.retired || stream.capture != 0 || tick <= stream.passed) continue;
    } else {
      (suspended ? has_suspended : has_live)[home] = true;
    }
    placement_.stock().each_page(block, [&](Index page, Units from, Units to) {
      bool needed = !suspended;
      if (suspended && block.keep && !keep)
        contents_.each_missing(address + std::uint64_t{from - block.offset} * kUnit,
                               std::uint64_t{to - from} * kUnit,
                               [&](Address, std::uint64_t) { needed = true; });
      (needed ? stays : goes)[page] = true;
    });
  }
  std::vector<Index> result;
  for (Index p = 1; p < pages.end(); ++p) {
    const Page& page = pages[p];
    if (page.handle == 0) continue;
    if (page.holder == 0 && streams_[page.owner].capture != 0 && has_suspended[page.owner])
      goes[p] = all || !has_live[page.owner];
    if (goes[p] && !stays[p]) result.push_back(p);
  }
  std::sort(result.begin(), result.end(), [&](Index a, Index b) {
    return placement_.stock().address_of(a) < placement_.stock().address_of(b);
  });
  return result;
}

// What suspended blocks want kept of the pages and have not kept yet.
std::vector<Pool::Saved> Pool::contents_to_save(const std::vector<Index>& pages) const {
  std::vector<bool> goes(placement_.stock().pages().end());
  for (Index page : pages) goes[page] = true;
  std::vector<Saved> ranges;
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    const Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::suspended) || !block.keep) continue;
    const Address address = placement_.space().address_of(block);
    placement_.stock().each_page(block, [&](Index page, Units from, Units to) {
      if (goes[page])
        contents_.each_missing(address + std::uint64_t{from - block.offset} * kUnit,
                               std::uint64_t{to - from} * kUnit,
                               [&](Address at, std::uint64_t bytes) { ranges.push_back({at, bytes}); });
    });
  }
  return Saved::in_pieces(std::move(ranges));
}

// Copies what is to be kept and gives each page back as soon as its contents are safe.
Status Pool::give_pages(const std::vector<Index>& pages, const std::shared_ptr<Allocator>& store,
                        std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of) {
  std::vector<Saved> pieces;
  if (store != nullptr) pieces = contents_to_save(pages);
  for (Index page : pages)
    if (!placement_.stock().pages()[page].suspended) placement_.stock().set_aside(page);
  Status status;
  Copies copies(*this);
  std::size_t safe = 0;
  lock.unlock();
  // Host memory may have to be locked first, which takes long; what there is of it is copied to meanwhile.
  for (Saved& piece : pieces) {
    if (status.ok()) status = store->allocate_slow(piece.bytes, 0, 0, 0, &piece.host, short_of);
    if (status.ok()) status = copies.queue(piece.host, piece.address, piece.bytes, &piece.event);
  }
  lock.lock();
  for (std::size_t i = 0; i < pages.size() && status.ok(); ++i) {
    const Address end =
        placement_.stock().address_of(pages[i]) + placement_.stock().pages()[pages[i]].bytes();
    for (; safe < pieces.size() && pieces[safe].address < end && status.ok(); ++safe) {
      lock.unlock();
      status = backend_->event_synchronize(pieces[safe].event);
      lock.lock();
      if (!status.ok()) break;
      contents_.add(pieces[safe].address, {store, pieces[safe].host, pieces[safe].bytes});
    }
    const bool graph = streams_[placement_.stock().pages()[pages[i]].owner].capture != 0;
    if (status.ok()) status = placement_.stock().evict(pages[i], graph);
    if (i % kBatch == kBatch - 1) {
      lock.unlock();
      lock.lock();
    }
  }
  if (status.ok()) {
    placement_.stock().fuse(pages);
  } else {
    lock.unlock();
    const bool ended = copies.wait().ok();
    // Host memory that a copy may still write into is better lost than given to someone else.
    for (std::size_t i = safe; i < pieces.size() && ended; ++i)
      if (pieces[i].host != 0) (void)store->free_slow(pieces[i].host);
    lock.lock();
    for (Index page : pages)
      if (ended && placement_.stock().resident(page)) placement_.stock().reinstate(page);
  }
  for (const Saved& piece : pieces)
    if (piece.event != 0) copies.give_back(piece.event);
  note_reserved(streams_[0]);
  return status;
}

// ---- resume ---------------------------------------------------------------------------------------------

Status Pool::resume(const Wanted& wanted, std::uint64_t* taken, OutOfMemoryReport* report) {
  *taken = 0;
  if (closed()) return {Code::closed, 0, "resume"};
  Turn turn(*this);
  if (!turn.ours()) return {Code::invalid, 0, "resume"};
  std::unique_lock lock(mutex_);
  if (closed()) return {Code::closed, 0, "resume"};
  std::vector<Index> blocks;
  for (Index i = 1; i < placement_.space().blocks().end(); ++i) {
    const Block& block = placement_.space().blocks()[i];
    if (block.is(BlockState::suspended) && (!wanted || wanted(block.tag))) blocks.push_back(i);
  }
  const std::uint64_t before = placement_.stock().suspended_bytes();
  operating_ = true;
  const Status status = bring(blocks, !wanted, lock, report);
  if (status.ok()) *taken = before - placement_.stock().suspended_bytes();
  end_operation();
  return status;
}

// The suspended pages under the blocks, and what their graphs have freed inside; for all, of every graph.
std::vector<Index> Pool::pages_to_bring(const std::vector<Index>& blocks, bool all) const {
  const Slab<Page>& pages = placement_.stock().pages();
  std::vector<bool> comes(pages.end());
  std::vector<bool> graphs(streams_.size(), all);
  for (Index i : blocks) {
    const Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    graphs[placement_.space().segments()[block.segment].stream] = true;
    placement_.stock().each_page(block,
                                 [&](Index page, Units, Units) { comes[page] = pages[page].suspended; });
  }
  std::vector<Index> result;
  for (Index p = 1; p < pages.end(); ++p)
    if (comes[p] || (pages[p].suspended && pages[p].holder == 0 && graphs[pages[p].owner]))
      result.push_back(p);
  std::sort(result.begin(), result.end(), [&](Index a, Index b) {
    return placement_.stock().address_of(a) < placement_.stock().address_of(b);
  });
  return result;
}

std::vector<Pool::Saved> Pool::contents_to_bring(const std::vector<Index>& blocks) const {
  std::vector<Saved> ranges;
  for (Index i : blocks) {
    const Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    contents_.each(
        placement_.space().address_of(block), bytes_of(block),
        [&](Address at, Address host, std::uint64_t bytes) { ranges.push_back({at, bytes, host}); });
  }
  return Saved::in_pieces(std::move(ranges));
}

// Memory for one page, within the limit. Where there is none, what lies idle in the pool goes back first, as
// soon as its work has finished.
Status Pool::bring_page(Index page, std::unique_lock<std::mutex>& lock) {
  for (bool tried : {false, true}) {
    const Page& which = placement_.stock().pages()[page];
    Status status{Code::out_of_memory, 0, "page_create"};
    if (which.handle != 0 || which.bytes() <= budget()) status = placement_.stock().restore(page);
    if (tried || status.code != Code::out_of_memory) return status;
    Status idle = settle(lock);
    if (idle.ok()) idle = give_idle_back();
    if (!idle.ok()) return idle;
  }
  return {};
}

// Backs the blocks' pages one after another, and copies what was kept as soon as its pages are there.
Status Pool::bring(const std::vector<Index>& blocks, bool all, std::unique_lock<std::mutex>& lock,
                   OutOfMemoryReport* report) {
  const std::vector<Index> pages = pages_to_bring(blocks, all);
  const std::vector<Saved> pieces = contents_to_bring(blocks);
  Copies copies(*this);
  Status status;
  for (Index i : blocks)
    if (contents_.lost(placement_.space().address_of(placement_.space().blocks()[i]),
                       bytes_of(placement_.space().blocks()[i])))
      return {Code::closed, 0, "store"};
  std::uint64_t needed = 0;
  for (Index page : pages)
    needed += placement_.stock().pages()[page].handle == 0 ? placement_.stock().pages()[page].bytes() : 0;
  std::size_t brought = 0;
  std::size_t queued = 0;
  while (status.ok() && (brought < pages.size() || queued < pieces.size())) {
    for (std::uint64_t bytes = 0; brought < pages.size() && bytes < kPieceBytes && status.ok(); ++brought) {
      status = bring_page(pages[brought], lock);
      bytes += placement_.stock().pages()[pages[brought]].bytes();
    }
    const Address up_to =
        brought < pages.size() ? placement_.stock().address_of(pages[brought]) : ~Address{0};
    lock.unlock();
    for (; queued < pieces.size() && status.ok(); ++queued) {
      const Saved& piece = pieces[queued];
      if (piece.address + piece.bytes > up_to) break;
      status = copies.queue(piece.address, piece.host, piece.bytes);
    }
    lock.lock();
  }
  lock.unlock();
  const Status waited = copies.wait();
  lock.lock();
  if (status.ok()) status = waited;
  if (!status.ok()) {
    for (std::size_t i = 0; i < brought && waited.ok(); ++i)
      (void)placement_.stock().evict(pages[i],
                                     streams_[placement_.stock().pages()[pages[i]].owner].capture != 0);
    note_reserved(streams_[0]);
    if (status.code == Code::out_of_memory && report != nullptr) *report = explain(needed, streams_[0]);
    return status;
  }
  for (Index page : pages) placement_.stock().reinstate(page);
  for (Index i : blocks) {
    Block& block = placement_.space().blocks()[i];
    StreamState& owner = streams_[block.owner.load(std::memory_order_relaxed)];
    std::lock_guard guard(owner.lock);
    if (!block.is(BlockState::suspended)) continue;
    block.set(BlockState::live);
    --suspended_blocks_;
  }
  for (Index i : blocks) {
    const Block& block = placement_.space().blocks()[i];
    if (!block.is(BlockState::moving)) forget_contents(block);
  }
  note_reserved(streams_[0]);
  return {};
}

}  // namespace vram
