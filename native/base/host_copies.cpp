// A copy is split into pieces that the crew and the caller take in turn. See host_copies.hpp.
#include "base/host_copies.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/waits.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace vram {

namespace {

// Large enough that taking a piece costs nothing compared with copying it, small enough that all threads
// finish together.
constexpr std::uint64_t kPieceBytes = 512 * kKiB;
// More threads than this are limited by the memory itself.
constexpr unsigned kMaxThreads = 16;

// One processor is left to the program.
unsigned useful_threads() { return std::clamp(std::thread::hardware_concurrency(), 2u, kMaxThreads + 1) - 1; }

// A device reads the data next, not this processor: where the processor supports it, writes bypass the
// caches, which also avoids reading the target first.
void copy_piece(char* to, const char* from, std::uint64_t bytes) {
#if defined(__x86_64__)
  constexpr std::uint64_t kLine = 64;
  const std::uint64_t head = std::min(bytes, (kLine - reinterpret_cast<Address>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::uint64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i first = _mm_loadu_si128(source);
    const __m128i second = _mm_loadu_si128(source + 1);
    const __m128i third = _mm_loadu_si128(source + 2);
    const __m128i fourth = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, first);
    _mm_stream_si128(target + 1, second);
    _mm_stream_si128(target + 2, third);
    _mm_stream_si128(target + 3, fourth);
  }
  _mm_sfence();
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

// One copy: pieces are taken by incrementing `next`; the copy has completed when `left` is 0.
struct Copy {
  char* to;
  const char* from;
  std::uint64_t bytes;
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::uint64_t> left;

  Copy(Address target, Address source, std::uint64_t size)
      : to(reinterpret_cast<char*>(target)),
        from(reinterpret_cast<const char*>(source)),
        bytes(size),
        left(ceil_pieces(size)) {}
  static std::uint64_t ceil_pieces(std::uint64_t size) { return (size + kPieceBytes - 1) / kPieceBytes; }

  // Copies pieces until none is left to take.
  void work() {
    for (std::uint64_t at = 0; (at = next.fetch_add(kPieceBytes)) < bytes;) {
      copy_piece(to + at, from + at, std::min(kPieceBytes, bytes - at));
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_all();
    }
  }
  void wait() {
    for (std::uint64_t now = left; now != 0; now = left) left.wait(now);
  }
};

}  // namespace

// Leaked in the child of a fork: its threads do not exist there, and its locks may be held forever.
struct HostCopies::Crew {
  std::mutex mutex;  // guards everything below
  std::condition_variable changed;
  std::deque<std::shared_ptr<Copy>> copies;  // with remaining pieces, oldest first
  std::vector<std::thread> threads;
  bool closing = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closing || !copies.empty(); });
      if (copies.empty()) return;
      const std::shared_ptr<Copy> mine = copies.front();
      lock.unlock();
      mine->work();
      lock.lock();
      std::erase(copies, mine);
    }
  }
  // If no thread can be started, the caller copies alone.
  void start(unsigned wanted) {
    threads.reserve(wanted);
    while (threads.size() < wanted) {
      std::thread started = start_quietly([this] { run(); });
      if (!started.joinable()) return;
      threads.push_back(std::move(started));
    }
  }
};

HostCopies::HostCopies(unsigned threads)
    : threads_(threads != 0 ? threads : useful_threads()),
      process_(getpid()),
      crew_(std::make_unique<Crew>()) {}

HostCopies::~HostCopies() {
  if (inherited()) {
    (void)crew_.release();
    return;
  }
  {
    const std::lock_guard lock(crew_->mutex);
    crew_->closing = true;
    crew_->changed.notify_all();
  }
  for (std::thread& thread : crew_->threads) thread.join();
}

bool HostCopies::inherited() const { return getpid() != process_; }

void HostCopies::copy(Address to, Address from, std::uint64_t bytes) {
  if (bytes <= kPieceBytes || threads_ == 1 || inherited()) {
    if (bytes != 0) copy_piece(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes);
    return;
  }
  const auto mine = std::make_shared<Copy>(to, from, bytes);
  {
    const std::lock_guard lock(crew_->mutex);
    crew_->start(threads_ - 1);
    crew_->copies.push_back(mine);
    crew_->changed.notify_all();
  }
  mine->work();
  mine->wait();
}

}  // namespace vram
