// Slabs: indices are unique and used again, and elements of different groups lie on different system pages.
#include "base/slab.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "testing.hpp"

using namespace vram;

namespace {

struct Item {
  std::uint64_t words[8] = {};
};
constexpr std::size_t kPerPage = 4096 / sizeof(Item);

std::size_t page_of(const GroupedSlab<Item>& slab, Index i) {
  return reinterpret_cast<std::uintptr_t>(&slab[i]) / 4096;
}

}  // namespace

TEST(groups_share_no_page_while_there_is_room) {
  GroupedSlab<Item> slab(64 * kPerPage);
  std::mt19937 random(1);
  std::map<std::uint16_t, std::vector<Index>> held;
  std::map<std::size_t, std::uint16_t> group_of_page;
  for (int step = 0; step < 20'000; ++step) {
    const auto group = static_cast<std::uint16_t>(random() % 5 * 13'000);
    std::vector<Index>& mine = held[group];
    if (mine.size() < 4 * kPerPage && random() % 3 != 0) {
      const Index i = slab.add(group);
      CHECK(i != 0 && i < slab.end() && std::find(mine.begin(), mine.end(), i) == mine.end());
      CHECK(group_of_page.try_emplace(page_of(slab, i), group).first->second == group);
      mine.push_back(i);
    } else if (!mine.empty()) {
      std::swap(mine[random() % mine.size()], mine.back());
      slab.drop(mine.back());
      mine.pop_back();
    }
  }
}

TEST(what_one_group_does_not_use_serves_others_when_there_is_no_room) {
  constexpr std::size_t kCapacity = 4 * kPerPage;
  GroupedSlab<Item> slab(kCapacity);
  std::set<Index> held;
  for (std::uint16_t group = 0; group < 4; ++group) held.insert(slab.add(group));  // a page each
  while (slab.has_room()) CHECK(held.insert(slab.add(3)).second);
  CHECK(held.size() == kCapacity - 1 && held.count(0) == 0 && slab.add(7) == 0);
  for (const Index i : held) slab.drop(i);
  CHECK(slab.size() == 0);
  std::set<Index> again;
  while (slab.has_room()) again.insert(slab.add(9));
  CHECK(again == held);
}

TEST(an_element_is_new_when_its_index_is_used_again) {
  GroupedSlab<Item> slab(kPerPage);
  const Index first = slab.add(2);
  slab[first].words[3] = 7;
  slab.drop(first);
  CHECK(slab.add(2) == first && slab[first].words[3] == 0);
}

TEST_MAIN()
