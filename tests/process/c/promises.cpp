// A C++ program over vram.h: handles under unique_ptr, a std::pmr resource over a pool, vectors in an arena.
// tests/process/test_c.py builds it against the installed package.
#include <vram.h>

#include <cstdio>
#include <memory>
#include <memory_resource>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void require(vram_status status) {
  if (status == VRAM_OUT_OF_MEMORY) throw std::bad_alloc();
  if (status != VRAM_OK) throw std::runtime_error(vram_last_error());
}

template <class Handle, vram_status (*end)(Handle*)>
struct End {
  void operator()(Handle* handle) const { (void)end(handle); }
};
using Device = std::unique_ptr<vram_device, End<vram_device, vram_device_close>>;
using Pool = std::unique_ptr<vram_pool, End<vram_pool, vram_pool_destroy>>;
using Arena = std::unique_ptr<vram_arena, End<vram_arena, vram_arena_destroy>>;

template <class Owner, class Make>
Owner make(Make call) {
  typename Owner::pointer handle = nullptr;
  require(call(&handle));
  return Owner(handle);
}

class PoolResource : public std::pmr::memory_resource {
 public:
  explicit PoolResource(vram_pool* pool) : pool_(pool) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t align) override {
    void* memory = nullptr;
    require(vram_pool_allocate_aligned(pool_, bytes, align, nullptr, &memory));
    return memory;
  }
  void do_deallocate(void* memory, std::size_t, std::size_t) override {
    require(vram_pool_free(pool_, memory));
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
  vram_pool* pool_;
};

class ArenaResource : public std::pmr::memory_resource {
 public:
  explicit ArenaResource(vram_arena* arena) : arena_(arena) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t align) override {
    void* memory = nullptr;
    require(vram_arena_allocate(arena_, bytes, align, &memory));
    return memory;
  }
  void do_deallocate(void*, std::size_t, std::size_t) override {}
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
  vram_arena* arena_;
};

long sum_of(std::pmr::memory_resource& resource, int count) {
  std::pmr::vector<long> numbers(&resource);
  for (int i = 0; i < count; ++i) numbers.push_back(i);
  return std::accumulate(numbers.begin(), numbers.end(), 0L);
}

}  // namespace

int main() {
  const Device device = make<Device>([](vram_device** out) { return vram_device_open("host", out); });
  const Pool pool = make<Pool>([&](vram_pool** out) { return vram_pool_create(device.get(), nullptr, out); });
  const Arena arena =
      make<Arena>([&](vram_arena** out) { return vram_arena_create(pool.get(), nullptr, out); });
  PoolResource from_pool(pool.get());
  ArenaResource from_arena(arena.get());
  long sum = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      if (sum_of(from_pool, 10000) != 49995000L) std::abort();
    });
  for (int iteration = 0; iteration < 3; ++iteration) {
    sum += sum_of(from_arena, 10000);
    require(vram_arena_reset(arena.get(), 0));
  }
  for (std::thread& thread : threads) thread.join();
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  require(vram_pool_get_stats(pool.get(), &stats));
  bool refused = false;
  try {
    sum_of(from_arena, 0);
    void* memory = nullptr;
    require(vram_pool_allocate(pool.get(), ~std::size_t{0}, nullptr, &memory));
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  std::printf("sum %ld, %d chunks live, %s\n", sum, static_cast<int>(stats.allocations),
              refused ? "too large is bad_alloc" : "too large was served");
  return sum == 3 * 49995000L && refused ? 0 : 1;
}
