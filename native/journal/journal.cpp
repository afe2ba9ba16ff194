// Tapes: chunks circulate between the streams that fill them and the recorder that empties them.
#include "journal/journal.hpp"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace vram {

bool JournalChunks::take(JournalChunk* out) {
  std::lock_guard lock(mutex_);
  if (!spare_.empty()) {
    *out = std::move(spare_.back());
    spare_.pop_back();
    return true;
  }
  if (left_ == 0) return false;
  try {
    out->reserve(entries_);
  } catch (const std::bad_alloc&) {
    return false;
  }
  --left_;
  return true;
}

void JournalChunks::give_back(JournalChunk&& chunk) {
  chunk.clear();
  std::lock_guard lock(mutex_);
  spare_.push_back(std::move(chunk));
}

JournalTape::JournalTape(std::uint32_t keep) : keep_(keep) {
  const std::size_t entries = std::min<std::size_t>(keep, kChunkEntries);
  chunks_ = std::make_shared<JournalChunks>(std::uint64_t{keep} + entries, entries);
}

// Continues with an empty chunk.
bool JournalTape::turn() {
  const bool enough = keep_ != 0 && full_.size() * last_.capacity() >= keep_;
  JournalChunk next;
  if (!enough && chunks_->take(&next)) {
    if (last_.capacity() != 0) full_.push_back(std::move(last_));
    last_ = std::move(next);
    return true;
  }
  if (keep_ == 0 || full_.empty()) return false;
  std::swap(last_, full_[oldest_]);
  oldest_ = (oldest_ + 1) % full_.size();
  dropped_ += last_.size();
  last_.clear();
  return true;
}

std::uint64_t JournalTape::surplus() const {
  std::uint64_t here = last_.size();
  for (const JournalChunk& chunk : full_) here += chunk.size();
  return keep_ != 0 && here > keep_ ? here - keep_ : 0;
}

void JournalTape::copy_to(std::vector<JournalEntry>& out) const {
  std::uint64_t skipped = surplus();
  const auto append = [&](const JournalChunk& chunk) {
    const std::uint64_t first = std::min<std::uint64_t>(skipped, chunk.size());
    out.insert(out.end(), chunk.begin() + static_cast<std::ptrdiff_t>(first), chunk.end());
    skipped -= first;
  };
  for (std::size_t i = 0; i < full_.size(); ++i) append(full_[(oldest_ + i) % full_.size()]);
  append(last_);
}

std::uint64_t Recording::merge(std::vector<JournalTape::Taken>& taken, std::uint64_t complete,
                               std::vector<JournalEntry>& out) {
  const auto earlier = [](const JournalEntry& a, const JournalEntry& b) { return a.sequence < b.sequence; };
  const auto at = [&out](std::size_t i) { return out.begin() + static_cast<std::ptrdiff_t>(i); };
  // A tape is in order by itself, so that there are about as many runs as tapes.
  std::vector<std::size_t> runs{out.size()};
  out.insert(out.end(), early_.begin(), early_.end());
  std::uint64_t dropped = 0;
  const auto append = [&](JournalChunk& chunk) {
    if (chunk.empty()) return;
    const std::size_t middle = out.size();
    out.insert(out.end(), chunk.begin(), chunk.end());
    chunks_->give_back(std::move(chunk));
    if (middle > runs.back() && earlier(out[middle], out[middle - 1])) runs.push_back(middle);
  };
  for (JournalTape::Taken& tape : taken) {
    for (JournalChunk& chunk : tape.full) append(chunk);
    append(tape.last);
    dropped += tape.dropped;
  }
  while (runs.size() > 1) {
    std::vector<std::size_t> merged;
    for (std::size_t i = 0; i < runs.size(); i += 2) {
      merged.push_back(runs[i]);
      if (i + 1 == runs.size()) break;
      const std::size_t end = i + 2 < runs.size() ? runs[i + 2] : out.size();
      std::inplace_merge(at(runs[i]), at(runs[i + 1]), at(end), earlier);
    }
    runs.swap(merged);
  }
  JournalEntry bound;
  bound.sequence = complete;
  const auto beyond = std::lower_bound(at(runs[0]), out.end(), bound, earlier);
  early_.assign(beyond, out.end());
  out.erase(beyond, out.end());
  return dropped;
}

}  // namespace vram
