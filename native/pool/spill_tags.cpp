// Spilling by tag: moving everything under some tags to the host by hand, where it stays; and what every swap
// moved, for the journal and the statistics. See spiller.hpp.
#include <algorithm>
#include <new>

#include "pool/spiller.hpp"
#include "pool/turn.hpp"

namespace vram {

// The pages under live blocks with wanted tags; or with others.
std::vector<bool> Spiller::pages_of(const Wanted& wanted, bool others) const {
  std::vector<bool> found(stock().pages().end());
  for (Index i = 1; i < blocks().end(); ++i) {
    const Block& block = blocks()[i];
    if (!block.allocated()) continue;
    std::lock_guard guard(owner_of(block).lock);
    if (!block.allocated() || (!wanted || wanted(block.tag)) == others) continue;
    stock().each_page(block, [&](Index page, Units, Units) { found[page] = true; });
  }
  return found;
}

Status Spiller::park(const Wanted& wanted, std::uint64_t* moved) {
  *moved = 0;
  if (closed()) return {Code::closed, 0, "spill"};
  const Turn turn(state_.turn);
  std::unique_lock<std::mutex> lock;
  if (!turn.ours()) return {Code::deadlock, 0, "spill"};
  if (Status status = begin("spill", lock); !status.ok()) return status;
  if (config_.spill == 0) return {Code::unsupported, 0, "spill"};
  const Status status = by_hand(
      [&](std::uint64_t* more) {
        std::vector<SpillCandidate> victims = candidates(0);
        const std::vector<bool> others = pages_of(wanted, true);
        std::erase_if(victims, [&](const SpillCandidate& each) { return others[each.page]; });
        return to_host(victims, nullptr, lock, more);
      },
      lock, moved);
  if (!status.ok()) return status;
  const std::vector<bool> ours = pages_of(wanted, false);
  const std::vector<bool> others = pages_of(wanted, true);
  for (Index page = 1; page < ours.size(); ++page)
    if (ours[page] && !others[page] && stock().pages()[page].spilled() && !stock().pages()[page].lent)
      stock().set_parked(page, true);
  return {};
}

Status Spiller::unpark(const Wanted& wanted, std::uint64_t* moved) {
  *moved = 0;
  if (closed()) return {Code::closed, 0, "prefetch"};
  const Turn turn(state_.turn);
  std::unique_lock<std::mutex> lock;
  if (!turn.ours()) return {Code::deadlock, 0, "prefetch"};
  if (Status status = begin("prefetch", lock); !status.ok()) return status;
  return by_hand(
      [&](std::uint64_t* more) {
        const std::vector<bool> ours = pages_of(wanted, false);
        std::vector<Index> pages = spilled_pages(0);
        std::erase_if(pages, [&](Index page) { return !ours[page] || !stock().pages()[page].parked; });
        return to_device(pages, lock, more);
      },
      lock, moved);
}

std::uint64_t Spiller::parked_bytes() const {
  std::uint64_t bytes = 0;
  const Slab<Page>& pages = stock().pages();
  for (Index page = 1; page < pages.end() && stock().spilled_bytes() != 0; ++page)
    if (pages[page].spilled() && pages[page].parked && !pages[page].lent) bytes += pages[page].bytes();
  return bytes;
}

// Counts what moved by label, and notes one event for each live block, with its bytes on the pages that
// moved. If the host has no memory for the list, some are missing in both.
void Spiller::note_moves(const std::vector<Move>& moves, double seconds, Action action) {
  try {
    std::uint64_t all = 0;
    std::vector<std::pair<Index, std::uint64_t>> moved;
    for (const Move& move : moves) {
      if (!move.exchanged) continue;
      const Page& page = stock().pages()[move.to];
      if (page.holder == 0) continue;
      each_block_on(page, [&](Index b, Units units) {
        if (!blocks()[b].allocated()) return;
        moved.emplace_back(b, bytes_of(units));
        all += bytes_of(units);
      });
    }
    std::sort(moved.begin(), moved.end());
    for (std::size_t i = 0; i < moved.size();) {
      const Index b = moved[i].first;
      std::uint64_t bytes = 0;
      for (; i < moved.size() && moved[i].first == b; ++i) bytes += moved[i].second;
      const Block& block = blocks()[b];
      StreamState& owner = owner_of(block);
      std::lock_guard guard(owner.lock);
      if (!block.allocated()) continue;
      SpillOfLabel& label = moved_[block.tag];
      (action == Action::spilled ? label.moved_out_bytes : label.moved_back_bytes) += bytes;
      label.seconds += seconds * static_cast<double>(bytes) / static_cast<double>(all);
      log_.note(owner, action, space().address_of(block), bytes, block.tag, block.serial);
    }
  } catch (const std::bad_alloc&) {
  }
}

std::unordered_map<std::uint32_t, SpillOfLabel> Spiller::by_label() const {
  std::unique_lock<std::mutex> lock;
  if (!look(&lock)) return {};
  std::unordered_map<std::uint32_t, SpillOfLabel> result = moved_;
  const Slab<Page>& pages = stock().pages();
  for (Index i = 1; i < pages.end() && stock().spilled_bytes() != 0; ++i) {
    if (!pages[i].spilled()) continue;
    each_block_on(pages[i], [&](Index b, Units units) {
      const Block& block = blocks()[b];
      std::lock_guard guard(owner_of(block).lock);
      if (block.allocated()) result[block.tag].bytes += bytes_of(units);
    });
  }
  return result;
}

}  // namespace vram
