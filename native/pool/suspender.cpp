// Suspending and resuming blocks.
#include "pool/suspender.hpp"

#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "placement/room.hpp"
#include "pool/copies.hpp"

namespace vram {

namespace {

// Contents are copied, and kept in host memory, in pieces of at most this size: large enough for full
// bandwidth, small enough that pages are evicted and restored while other pieces are copied.
constexpr std::uint64_t kPieceBytes = 64 * kMiB;
// Pages evicted at a time with the mutex held.
constexpr std::size_t kBatch = 32;

}  // namespace

// Bytes of a suspended block and where they are kept.
struct Suspender::Saved {
  Address address = 0;
  std::uint64_t bytes = 0;
  Address host = 0;
  EventHandle event = 0;  // passes when the copy is done

  // Neighbours become one range, which is split into pieces. pre: in order of their addresses.
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

// Stores that are not closed while it exists, because copies use their memory.
class Suspender::OpenStores {
 public:
  // False: the store is closed, or about to be.
  bool keep(const std::shared_ptr<Allocator>& store) {
    return !accesses_.try_emplace(store, *store).first->second.refused();
  }

 private:
  std::map<std::shared_ptr<Allocator>, Allocator::Access> accesses_;
};

void Suspender::forget_contents(const Block& block) {
  Contents::Pieces unused;
  state_.contents.drop(space().address_of(block), bytes_of(block), unused);
  for (const auto& [host, piece] : unused) piece.memory.release();
}

void Suspender::make_room() {
  if (state_.suspended_blocks == 0) return;
  vram::make_room(late_, late_.size() + 1);
  state_.contents.make_room(1);
}

// If an operation is in progress, it sees to the block at its end. Otherwise all uses of the block had
// completed when it was suspended, and only memory that it still has may have to be zeroed.
void Suspender::free(Index i) {
  if (operating_) {
    late_.push_back(i);
    return;
  }
  Block& block = blocks()[i];
  forget_contents(block);
  pending_.forget_uses(i);
  block.used_elsewhere = false;
  bool zero = false;
  if (zeroing_.on_free())
    stock().each_page(block,
                      [&](Index page, Units, Units) { zero = zero || !stock().pages()[page].suspended; });
  if (zero) {
    pending_.make_pending(i);
  } else {
    placement_.put(i, 0);
  }
}

// A suspend or resume in progress. While it exists, what it works on does not change. The destructor undoes
// a suspend that was not committed, performs the frees of suspended blocks made meanwhile, and lets streams
// leave again. Made and destroyed with the mutex held.
class Suspender::Operation {
 public:
  Operation(Suspender& suspender, std::unique_lock<std::mutex>& lock) : suspender_(suspender), lock_(lock) {
    suspender_.operating_ = true;
    suspender_.lives_.keep_leaving(true);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (!lock_.owns_lock()) lock_.lock();
    if (undo_) undo();
    end();
  }
  // The blocks that are added to the list, at most so many, are live again at the end, unless commit() is
  // called.
  std::vector<Index>& suspends(bool all, std::size_t most) {
    blocks_.reserve(most);
    all_ = all;
    undo_ = true;
    return blocks_;
  }
  void commit() { undo_ = false; }

 private:
  // If the host has no memory for it, the blocks stay suspended.
  void undo() {
    try {
      (void)suspender_.restore(blocks_, all_, lock_, nullptr);
    } catch (const std::bad_alloc&) {
      if (!lock_.owns_lock()) lock_.lock();
    }
  }
  void end() {
    Suspender& s = suspender_;
    s.operating_ = false;
    s.lives_.keep_leaving(false);
    s.perform_late();
    try {
      s.lives_.complete_leaving();
      s.log_.note_reserved(s.streams_[0]);
      s.verify();
    } catch (const std::bad_alloc&) {
      // Later calls let the streams leave.
    }
  }

  Suspender& suspender_;
  std::unique_lock<std::mutex>& lock_;
  std::vector<Index> blocks_;
  bool all_ = false;
  bool undo_ = false;
};

// Performs the frees that an operation delayed. If the host has no memory for one, it is performed after the
// next operation.
void Suspender::perform_late() noexcept {
  try {
    for (; !late_.empty(); late_.pop_back()) {
      const Index i = late_.back();
      Block& block = blocks()[i];
      pending_.make_room(i);
      forget_contents(block);
      const bool used = std::exchange(block.used_elsewhere, false);
      if (used || zeroing_.on_free()) {
        pending_.make_pending(i);
      } else {
        pending_.return_home(i, true);
      }
    }
  } catch (const std::bad_alloc&) {
  }
}

Status Suspender::suspend(const Wanted& wanted, bool keep, const std::shared_ptr<Allocator>& store,
                          std::uint64_t* given, OutOfMemoryReport* short_of) {
  *given = 0;
  if (keep && store == nullptr) return {Code::invalid, 0, "store"};
  if (closed()) return {Code::closed, 0, "suspend"};
  if (!placement_.paged()) return {Code::unsupported, 0, "suspend"};
  const Turn turn(state_.turn);
  if (!turn.ours()) return {Code::invalid, 0, "suspend"};
  std::unique_lock lock(state_.mutex);
  if (closed()) return {Code::closed, 0, "suspend"};
  const bool all = !wanted;
  const std::uint64_t before = stock().suspended_bytes();
  Operation operation(*this, lock);
  mark_suspended(wanted, keep, operation.suspends(all, blocks().size()));
  if (Status status = wait_for_suspended(all, lock); !status.ok()) return status;
  if (zeroing_.on_free()) {
    lives_.complete();  // begins to zero freed blocks
    if (Status status = wait_for_suspended(all, lock); !status.ok()) return status;
  }
  const std::uint64_t reserved = placement_.reserved_bytes();
  const Status idle = release_idle();
  *given = reserved - placement_.reserved_bytes();
  if (!idle.ok()) return idle;
  if (Status status = evict_pages(pages_to_evict(all, store != nullptr), store, lock, short_of); !status.ok())
    return status;
  *given += stock().suspended_bytes() - before;
  operation.commit();
  return {};
}

// From here on the blocks are not used again; `marked` gets those that were not suspended before.
void Suspender::mark_suspended(const Wanted& wanted, bool keep, std::vector<Index>& marked) {
  for (Index i = 1; i < blocks().end(); ++i) {
    Block& block = blocks()[i];
    if (!block.is(BlockState::live)) continue;
    StreamState& owner = owner_of(block);
    std::lock_guard guard(owner.lock);
    // It may have been freed into the owner's cache meanwhile; owners change under the mutex only.
    if (!block.is(BlockState::live) || (wanted && !wanted(block.tag))) continue;
    if (block.unzeroed.load(std::memory_order_acquire)) continue;  // its allocation has not returned yet
    if (space().growing(block)) continue;        // growable buffers give pages back themselves
    if (space().segment(block).plain) continue;  // only pages can be suspended
    if (shares_.shared(i)) continue;             // other processes have its pages mapped
    block.set(BlockState::suspended);
    block.keep = keep;
    ++state_.suspended_blocks;
    marked.push_back(i);
  }
}

// Waits for the work of every stream that may use suspended blocks, or that used free memory beside them. A
// graph may have been launched on any stream, and other libraries' streams cannot be queried, so for their
// memory it waits for the whole device.
Status Suspender::wait_for_suspended(bool all, std::unique_lock<std::mutex>& lock) {
  caches_.drain_all();
  std::vector<bool> asked(streams_.size(), all);
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    asked[block.owned_by()] = true;
    asked[space().segments()[block.segment].stream] = true;
    if (const std::vector<StreamNumber>* uses = pending_.uses_of(i))
      for (StreamNumber number : *uses) asked[number] = true;
  }
  bool device = false;
  for (std::uint32_t n = 0; n < asked.size(); ++n) {
    StreamState& stream = streams_[static_cast<StreamNumber>(n)];
    if (stream.retired() || (!asked[n] && stream.waiting.empty())) continue;
    device = device || stream.capture != 0 || stream.foreign;
    if (stream.foreign) continue;
    if (backend_->capturing(stream.handle)) return {Code::capturing, 0, "suspend"};
    if (Status status = lives_.wait_for_stream(stream, lock); !status.ok()) return status;
  }
  return device ? lives_.wait_for_device(lock) : Status{};
}

Status Suspender::release_idle() {
  lives_.complete();
  caches_.drain_all();
  const Status status = placement_.trim(0, finished_, false);
  log_.note_reserved(streams_[0]);
  return status;
}

// The pages that have only suspended blocks, and free memory without work left. If no block of a graph stays
// in use, this includes what the graph has freed. Without a store, pages with contents to be kept stay.
std::vector<Index> Suspender::pages_to_evict(bool all, bool keep) const {
  const Slab<Page>& pages = stock().pages();
  std::vector<bool> goes(pages.end());
  std::vector<bool> stays(pages.end());
  std::vector<bool> has_suspended(streams_.size(), all);
  std::vector<bool> has_live(streams_.size());
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (block.is(BlockState::none)) continue;
    const StreamNumber home = space().segments()[block.segment].stream;
    const StreamState& stream = streams_[home];
    const Address address = space().address_of(block);
    const bool suspended = block.is(BlockState::suspended);
    if (block.is(BlockState::free)) {
      const Tick tick = stream.ended() ? std::min(block.tick, stream.last) : block.tick;
      if (stream.retired() || stream.capture != 0 || tick <= stream.passed) continue;
    } else {
      (suspended ? has_suspended : has_live)[home] = true;
    }
    stock().each_page(block, [&](Index page, Units from, Units to) {
      bool needed = !suspended;
      if (suspended && block.keep && !keep)
        state_.contents.each_missing(address + bytes_of(from - block.offset), bytes_of(to - from),
                                     [&](Address, std::uint64_t) { needed = true; });
      (needed ? stays : goes)[page] = true;
    });
  }
  std::vector<Index> result;
  for (Index p = 1; p < pages.end(); ++p) {
    const Page& page = pages[p];
    if (page.handle == 0 || page.host) continue;  // contents on host pages take no device memory
    if (page.holder == 0 && streams_[page.owner].capture != 0 && has_suspended[page.owner])
      goes[p] = all || !has_live[page.owner];
    if (goes[p] && !stays[p]) result.push_back(p);
  }
  std::sort(result.begin(), result.end(),
            [&](Index a, Index b) { return stock().address_of(a) < stock().address_of(b); });
  return result;
}

// What suspended blocks want kept of the pages and have not kept yet.
std::vector<Suspender::Saved> Suspender::contents_to_save(const std::vector<Index>& pages) const {
  std::vector<bool> goes(stock().pages().end());
  for (Index page : pages) goes[page] = true;
  std::vector<Saved> ranges;
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (!block.is(BlockState::suspended) || !block.keep) continue;
    const Address address = space().address_of(block);
    stock().each_page(block, [&](Index page, Units from, Units to) {
      if (goes[page])
        state_.contents.each_missing(address + bytes_of(from - block.offset), bytes_of(to - from),
                                     [&](Address at, std::uint64_t bytes) { ranges.push_back({at, bytes}); });
    });
  }
  return Saved::in_pieces(std::move(ranges));
}

// Copies what is to be kept and evicts each page as soon as its contents are safe. The store stays open
// meanwhile.
Status Suspender::evict_pages(const std::vector<Index>& pages, const std::shared_ptr<Allocator>& store,
                              std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of) {
  OpenStores stores;
  std::vector<Saved> pieces;
  if (store != nullptr) pieces = contents_to_save(pages);
  if (!pieces.empty() && !stores.keep(store)) return {Code::closed, 0, "store"};
  Copies copies(*backend_, state_.copy_streams, pieces.size());
  for (Index page : pages)
    if (!stock().pages()[page].suspended) stock().set_aside(page);
  std::size_t safe = 0;
  const auto recycle = [&] {
    for (const Saved& piece : pieces)
      if (piece.event != 0) copies.recycle(piece.event);
    log_.note_reserved(streams_[0]);
  };
  const auto undo = [&] {
    if (lock.owns_lock()) lock.unlock();
    const bool ended = wait_for(copies).ok();
    // Host memory that a copy may still write into must not be reused, so it is leaked instead.
    for (std::size_t i = safe; i < pieces.size() && ended; ++i)
      if (pieces[i].host != 0) KeptPiece{store, pieces[i].host, pieces[i].bytes}.release();
    lock.lock();
    for (Index page : pages)
      if (ended && stock().resident(page)) stock().reinstate(page);
    recycle();
  };
  Status status;
  try {
    status = save_and_evict(pages, pieces, copies, store, &safe, lock, short_of);
  } catch (const std::bad_alloc&) {
    undo();
    throw;
  }
  if (!status.ok()) {
    undo();
    return status;
  }
  stock().fuse(pages);
  recycle();
  return status;
}

// *safe: pieces whose contents are kept.
Status Suspender::save_and_evict(const std::vector<Index>& pages, std::vector<Saved>& pieces, Copies& copies,
                                 const std::shared_ptr<Allocator>& store, std::size_t* safe,
                                 std::unique_lock<std::mutex>& lock, OutOfMemoryReport* short_of) {
  Status status;
  lock.unlock();
  // Host memory may have to be locked first, which takes long; what there is of it is copied to meanwhile.
  for (Saved& piece : pieces) {
    if (status.ok()) status = store->allocate_slow(piece.bytes, 0, 0, 0, &piece.host, short_of);
    if (status.ok()) status = copies.queue(piece.host, piece.address, piece.bytes, &piece.event);
  }
  lock.lock();
  for (std::size_t i = 0; i < pages.size() && status.ok(); ++i) {
    const Address end = stock().address_of(pages[i]) + stock().pages()[pages[i]].bytes();
    for (; *safe < pieces.size() && pieces[*safe].address < end; ++*safe) {
      const Saved& piece = pieces[*safe];
      lock.unlock();
      status = backend_->event_synchronize(piece.event);
      lock.lock();
      if (!status.ok()) return status;
      state_.contents.add(piece.address, {store, piece.host, piece.bytes});
    }
    status = stock().evict(pages[i], is_graphs(pages[i]));
    if (i % kBatch == kBatch - 1) {
      lock.unlock();
      lock.lock();
    }
  }
  return status;
}

Status Suspender::resume(const Wanted& wanted, std::uint64_t* taken, OutOfMemoryReport* report) {
  *taken = 0;
  if (closed()) return {Code::closed, 0, "resume"};
  const Turn turn(state_.turn);
  if (!turn.ours()) return {Code::invalid, 0, "resume"};
  std::unique_lock lock(state_.mutex);
  if (closed()) return {Code::closed, 0, "resume"};
  std::vector<Index> resumed;
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (block.is(BlockState::suspended) && (!wanted || wanted(block.tag))) resumed.push_back(i);
  }
  const std::uint64_t before = stock().suspended_bytes();
  const Operation operation(*this, lock);
  const Status status = restore(resumed, !wanted, lock, report);
  if (status.ok()) *taken = before - stock().suspended_bytes();
  return status;
}

// The suspended pages under the blocks, and what their graphs have freed inside; for all, of every graph.
std::vector<Index> Suspender::pages_to_restore(const std::vector<Index>& which, bool all) const {
  const Slab<Page>& pages = stock().pages();
  std::vector<bool> comes(pages.end());
  std::vector<bool> graphs(streams_.size(), all);
  for (Index i : which) {
    const Block& block = blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    graphs[space().segments()[block.segment].stream] = true;
    stock().each_page(block, [&](Index page, Units, Units) { comes[page] = pages[page].suspended; });
  }
  std::vector<Index> result;
  for (Index p = 1; p < pages.end(); ++p)
    if (comes[p] || (pages[p].suspended && pages[p].holder == 0 && graphs[pages[p].owner]))
      result.push_back(p);
  std::sort(result.begin(), result.end(),
            [&](Index a, Index b) { return stock().address_of(a) < stock().address_of(b); });
  return result;
}

std::vector<Suspender::Saved> Suspender::contents_to_restore(const std::vector<Index>& which) const {
  std::vector<Saved> ranges;
  for (Index i : which) {
    const Block& block = blocks()[i];
    if (!block.is(BlockState::suspended)) continue;
    state_.contents.each(
        space().address_of(block), bytes_of(block),
        [&](Address at, Address host, std::uint64_t bytes) { ranges.push_back({at, bytes, host}); });
  }
  return Saved::in_pieces(std::move(ranges));
}

// Memory for one page, within the limit. If there is none, idle memory of the pool is released first.
Status Suspender::restore_page(Index page, std::unique_lock<std::mutex>& lock) {
  for (bool tried : {false, true}) {
    const Page& which = stock().pages()[page];
    Status status{Code::out_of_memory, 0, "page_create"};
    if (which.handle != 0 || which.bytes() <= ladder_.budget()) status = stock().restore(page);
    if (tried || status.code != Code::out_of_memory) return status;
    Status idle = lives_.wait_until_idle(lock);
    if (idle.ok()) idle = release_idle();
    if (!idle.ok()) return idle;
  }
  return {};
}

// If a stream refuses to be waited for, by a wait for the device.
Status Suspender::wait_for(Copies& copies) {
  const Status status = copies.wait();
  return status.ok() ? status : backend_->synchronize();
}

// Backs the blocks' pages one after another, and copies what was kept as soon as its pages are there.
Status Suspender::restore(const std::vector<Index>& which, bool all, std::unique_lock<std::mutex>& lock,
                          OutOfMemoryReport* report) {
  const std::vector<Index> pages = pages_to_restore(which, all);
  const std::vector<Saved> pieces = contents_to_restore(which);
  state_.contents.make_room(which.size());
  Copies copies(*backend_, state_.copy_streams, 0);
  OpenStores stores;
  bool lost = false;
  for (Index i : which)
    state_.contents.each_store(space().address_of(blocks()[i]), bytes_of(blocks()[i]),
                               [&](const auto& store) { lost = lost || !stores.keep(store); });
  if (lost) return {Code::closed, 0, "store"};
  std::uint64_t needed = 0;
  for (Index page : pages) needed += stock().pages()[page].handle == 0 ? stock().pages()[page].bytes() : 0;
  std::size_t brought = 0;
  const auto undo = [&](bool copied) {
    for (std::size_t i = 0; i < brought && copied; ++i) (void)stock().evict(pages[i], is_graphs(pages[i]));
    log_.note_reserved(streams_[0]);
  };
  Status status;
  try {
    status = bring_back(pages, pieces, copies, &brought, lock);
  } catch (const std::bad_alloc&) {
    if (lock.owns_lock()) lock.unlock();
    const bool copied = wait_for(copies).ok();
    lock.lock();
    undo(copied);
    throw;
  }
  lock.unlock();
  const Status waited = wait_for(copies);
  lock.lock();
  if (status.ok()) status = waited;
  if (!status.ok()) {
    undo(waited.ok());
    if (status.code == Code::out_of_memory && report != nullptr)
      *report = report_.explain(needed, streams_[0]);
    return status;
  }
  for (Index page : pages) stock().reinstate(page);
  make_live(which);
  log_.note_reserved(streams_[0]);
  return {};
}

// *brought: pages that have their memory again.
Status Suspender::bring_back(const std::vector<Index>& pages, const std::vector<Saved>& pieces,
                             Copies& copies, std::size_t* brought, std::unique_lock<std::mutex>& lock) {
  Status status;
  std::size_t queued = 0;
  while (status.ok() && (*brought < pages.size() || queued < pieces.size())) {
    for (std::uint64_t bytes = 0; *brought < pages.size() && bytes < kPieceBytes && status.ok(); ++*brought) {
      status = restore_page(pages[*brought], lock);
      bytes += stock().pages()[pages[*brought]].bytes();
    }
    const Address up_to = *brought < pages.size() ? stock().address_of(pages[*brought]) : ~Address{0};
    lock.unlock();
    for (; queued < pieces.size() && status.ok(); ++queued) {
      const Saved& piece = pieces[queued];
      if (piece.address + piece.bytes > up_to) break;
      status = copies.queue(piece.address, piece.host, piece.bytes);
    }
    lock.lock();
  }
  return status;
}

// Blocks that were freed meanwhile are in state moving (late_) and stay so.
void Suspender::make_live(const std::vector<Index>& which) {
  for (Index i : which) {
    Block& block = blocks()[i];
    std::lock_guard guard(owner_of(block).lock);
    if (!block.is(BlockState::suspended)) continue;
    block.set(BlockState::live);
    --state_.suspended_blocks;
  }
  for (Index i : which)
    if (const Block& block = blocks()[i]; !block.is(BlockState::moving)) forget_contents(block);
}

// A graph's pages keep all their mappings.
bool Suspender::is_graphs(Index page) const { return streams_[stock().pages()[page].owner].capture != 0; }

Status Suspender::close() {
  const Status first = state_.copy_streams.close(*backend_);
  Contents::Pieces unused;
  state_.contents.drop_all(unused);
  for (const auto& [host, piece] : unused) piece.memory.release();
  state_.suspended_blocks = 0;
  return first;
}

}  // namespace vram
