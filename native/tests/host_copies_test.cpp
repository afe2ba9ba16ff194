// Parallel copies of host memory: every byte and no other, from several callers at once, in stream order,
// after a fork.
#include "base/host_copies.hpp"

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "backends/host.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::holds_in_child;

namespace {

constexpr std::uint64_t kMost = 5 * kMiB;
constexpr char kUntouched = 0x55;

std::vector<char> numbered(std::uint64_t bytes) {
  std::vector<char> made(bytes);
  for (std::uint64_t at = 0; at < bytes; ++at) made[at] = static_cast<char>(at * 31 + at / 255);
  return made;
}

Address address_of(const char* place) { return reinterpret_cast<Address>(place); }

TEST(every_byte_and_no_other) {
  const std::vector<char> from = numbered(kMost + 64);
  std::vector<char> to(kMost + 256);
  for (const unsigned threads : {1u, 2u, 5u}) {
    HostCopies copies(threads);
    CHECK(copies.threads() == threads);
    for (const std::uint64_t offset : {0, 1, 15, 63, 64, 65}) {
      for (const std::uint64_t bytes :
           {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{64}, std::uint64_t{1000},
            512 * kKiB, 512 * kKiB + 1, 3 * kMiB - 7}) {
        std::memset(to.data(), kUntouched, to.size());
        copies.copy(address_of(to.data() + 64 + offset), address_of(from.data() + 3), bytes);
        CHECK(std::memcmp(to.data() + 64 + offset, from.data() + 3, bytes) == 0);
        CHECK(to[63 + offset] == kUntouched && to[64 + offset + bytes] == kUntouched);
      }
    }
  }
}

TEST(several_callers_at_once) {
  HostCopies copies(3);
  const std::vector<char> from = numbered(kMost);
  std::vector<std::vector<char>> targets(4, std::vector<char>(kMost));
  std::vector<std::thread> callers;
  for (auto& to : targets) {
    callers.emplace_back([&] {
      for (int round = 0; round < 10; ++round) {
        std::memset(to.data(), kUntouched, to.size());
        copies.copy(address_of(to.data()), address_of(from.data()), kMost);
        if (to != from) std::abort();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& to : targets) CHECK(to == from);
}

TEST(in_the_order_of_a_stream) {
  HostBackend host;
  StreamHandle stream = 0;
  CHECK(host.stream_create(&stream).ok());
  auto copies = std::make_shared<HostCopies>(3);
  const std::vector<char> from = numbered(kMost);
  std::vector<char> middle(kMost), to(kMost);
  const auto queue = [&](std::vector<char>& target, const std::vector<char>& source) {
    return host.launch(stream, [copies, a = address_of(target.data()), b = address_of(source.data())] {
      copies->copy(a, b, kMost);
    });
  };
  CHECK(queue(middle, from).ok());
  CHECK(queue(to, middle).ok());
  copies.reset();  // the last copy ends its threads
  CHECK(host.stream_synchronize(stream).ok());
  CHECK(to == from);
  CHECK(host.stream_destroy(stream).ok());
}

TEST(the_child_of_a_fork_copies_alone) {
  auto copies = std::make_unique<HostCopies>(4);
  const std::vector<char> from = numbered(kMost);
  std::vector<char> to(kMost);
  copies->copy(address_of(to.data()), address_of(from.data()), kMost);  // the threads run
  CHECK(holds_in_child([&] {
    std::memset(to.data(), 0, to.size());
    copies->copy(address_of(to.data()), address_of(from.data()), kMost);
    const bool same = to == from;
    copies.reset();
    return same;
  }));
}

}  // namespace

TEST_MAIN()
