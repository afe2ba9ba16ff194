// What the C interface adds to an allocation: pairs of allocate and free through vram.h, of the pool below it
// and of malloc, and an allocation of an arena, on the host device. `--json` prints one object for machines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.hpp"
#include "vram.h"

namespace {

using namespace vram;

constexpr int kRepeats = 15;  // the least counts: the others were disturbed
constexpr int kCalls = 20000;

void require(bool good) {
  if (good) return;
  std::fprintf(stderr, "%s\n", vram_last_error());
  std::exit(1);
}

template <class Call>
double ns_of(Call call) {
  double least = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begun = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begun;
    least = std::min(least, took.count() / kCalls);
  }
  return least;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  constexpr std::size_t kBytes = 4096;
  vram_device* device = nullptr;
  vram_pool* pool = nullptr;
  vram_arena* arena = nullptr;
  require(vram_device_open("host", &device) == VRAM_OK);
  require(vram_pool_create(device, nullptr, &pool) == VRAM_OK);
  require(vram_arena_create(pool, nullptr, &arena) == VRAM_OK);
  Pool& core = *c::pools.find(pool)->pool;
  const struct {
    const char* name;
    double ns;
  } rows[] = {
      {"malloc, free", ns_of([](int) {
         void* volatile memory = std::malloc(kBytes);
         std::free(memory);
       })},
      {"the core's pool", ns_of([&](int) {
         Address address = 0;
         require(core.allocate(kBytes, 0, 0, 0, &address).ok() && core.free(address).ok());
       })},
      {"vram_pool_allocate, vram_pool_free", ns_of([&](int) {
         void* memory = nullptr;
         require(vram_pool_allocate(pool, kBytes, nullptr, &memory) == VRAM_OK);
         require(vram_pool_free(pool, memory) == VRAM_OK);
       })},
      {"vram_arena_allocate", ns_of([&](int i) {
         void* memory = nullptr;
         require(vram_arena_allocate(arena, kBytes, 0, &memory) == VRAM_OK);
         if (i % 1000 == 999) require(vram_arena_reset(arena, 0) == VRAM_OK);
       })},
  };
  std::printf(json ? "{" : "%-36s %10s\n", "4 KiB", "ns");
  for (const auto& row : rows)
    std::printf(json ? "%s\"%s\": %.1f" : "%s%-36s %10.1f\n", json && &row != rows ? ", " : "", row.name,
                row.ns);
  if (json) std::printf("}\n");
  return 0;
}
