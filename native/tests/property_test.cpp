// Random programs on a watched device: whatever they do, no byte is allocated twice at a time, every
// use is ordered before the next owner of its memory, and the pool's own invariants hold after each step.
#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::Random;
using vram::testing::Watched;

namespace {

struct Setting {
  const char* name;
  std::uint64_t capacity;
  PoolConfig config;
  ModelOptions device;
  std::uint64_t largest;    // bytes of a request
  std::size_t most_blocks;  // live at a time
  int steps;
  int check_every;
};

// Sizes where allocators go wrong: nothing, one byte, the edges of units, bands, slots and pages.
std::uint64_t nasty_size(Random& random, std::uint64_t largest) {
  static const std::vector<std::uint64_t> kEdges = {0,
                                                    1,
                                                    511,
                                                    512,
                                                    513,
                                                    1024,
                                                    64 * kKiB,
                                                    kMiB - 1,
                                                    kMiB,
                                                    kMiB + 1,
                                                    2 * kMiB - 1,
                                                    2 * kMiB,
                                                    2 * kMiB + 1,
                                                    8 * kMiB,
                                                    8 * kMiB + 512,
                                                    20 * kMiB,
                                                    32 * kMiB - 512,
                                                    32 * kMiB,
                                                    33 * kMiB,
                                                    128 * kMiB,
                                                    300 * kMiB};
  for (;;) {
    std::uint64_t size = random.of(kEdges);
    if (random.chance(40)) size = random.below(std::uint64_t{1} << random.below(29));
    if (size <= largest) return size;
  }
}

class Program {
 public:
  Program(const Setting& setting, std::uint64_t seed)
      : setting_(setting), random_(seed), world_(setting.capacity, setting.config, setting.device) {
    for (int i = 0; i < 2; ++i) add_stream();
  }

  bool run(std::string* why) {
    for (int step = 0; step < setting_.steps; ++step) {
      if (!act(why)) return told(why, step);
      if (!world_.oracle->faults.empty()) {
        *why = world_.oracle->faults.front();
        return told(why, step);
      }
      if (step % setting_.check_every == 0 && !world_.good(why)) return told(why, step);
    }
    return finish(why);
  }

 private:
  static bool told(std::string* why, int step) {
    *why += " (step " + std::to_string(step) + ")";
    return false;
  }
  void add_stream() {
    StreamHandle stream = 0;
    if (world_.device->stream_create(&stream).ok()) streams_.push_back(stream);
  }

  bool act(std::string* why) {
    auto& held = world_.held;
    const std::uint64_t dice = random_.below(1000);
    const StreamHandle stream = random_.of(streams_);
    const bool full = held.size() >= setting_.most_blocks;
    if (dice < 400 && !full) return allocate(stream, why);
    if (dice < 620 || full) {
      if (held.empty()) return true;
      const std::size_t i = random_.chance(50) ? held.size() - 1 : random_.below(held.size());
      return fine(world_.free(i), "free", why);
    }
    if (dice < 720) {
      if (!held.empty()) world_.use(alive(random_.below(held.size())));
    } else if (dice < 800) {
      if (held.empty()) return true;
      const std::size_t i = alive(random_.below(held.size()));
      return fine(world_.use_on(i, stream, random_.below(Watched::bytes_of(held[i].size))), "record_stream",
                  why);
    } else if (dice < 930) {
      move_device(stream);
    } else if (dice < 950) {
      return fine(world_.pool->coalesce(), "coalesce", why);
    } else if (dice < 965) {
      const std::uint64_t keep = random_.chance(50) ? 0 : random_.below(setting_.capacity);
      return fine(world_.pool->trim(keep, random_.chance(30)), "trim", why);
    } else if (dice < 980) {
      if (streams_.size() < 6) add_stream();
    } else if (dice < 990) {
      return retire(why);
    } else {
      const std::uint64_t limit =
          random_.chance(50) ? 0 : setting_.capacity / 2 + random_.below(setting_.capacity);
      return fine(world_.pool->set_limit(limit), "limit", why);
    }
    return true;
  }

  bool allocate(StreamHandle stream, std::string* why) {
    const std::uint64_t align = random_.chance(10) ? std::uint64_t{1} << random_.below(24) : 0;
    const std::uint64_t reserved = world_.pool->stats().reserved.current;
    const Status status = world_.allocate(nasty_size(random_, setting_.largest), stream, align);
    const std::uint64_t limit = world_.pool->config().limit;
    const std::uint64_t grown = world_.pool->stats().reserved.current;
    if (limit != 0 && grown > std::max(limit, reserved)) {
      *why = "grown beyond the limit";
      return false;
    }
    return status.code == Code::out_of_memory || fine(status, "allocate", why);
  }
  // The block's own stream may be gone; such a block is not used any more.
  std::size_t alive(std::size_t i) {
    auto& held = world_.held;
    const auto gone = [&](StreamHandle s) {
      return std::find(streams_.begin(), streams_.end(), s) == streams_.end();
    };
    for (std::size_t k = 0; k < held.size() && gone(held[i].stream); ++k) i = (i + 1) % held.size();
    if (gone(held[i].stream)) {
      (void)world_.allocate(512, 0);
      i = held.size() - 1;
    }
    return i;
  }
  void move_device(StreamHandle stream) {
    if (setting_.device.schedule == Schedule::lag)
      return world_.device->advance(static_cast<double>(random_.below(3000)));
    for (std::uint64_t n = random_.below(6); n > 0; --n) world_.device->step(stream);
  }
  bool retire(std::string* why) {
    if (streams_.size() <= 1) return true;
    const std::size_t i = 1 + random_.below(streams_.size() - 1);
    const StreamHandle stream = streams_[i];
    streams_.erase(streams_.begin() + static_cast<std::ptrdiff_t>(i));
    if (random_.chance(50)) (void)world_.oracle->stream_synchronize(stream);
    return fine(world_.retire(stream), "retire_stream", why);
  }
  static bool fine(Status status, const char* what, std::string* why) {
    if (status.ok()) return true;
    *why = std::string(what) + " answers " + std::to_string(static_cast<int>(status.code)) + " from " +
           status.call;
    return false;
  }

  // Everything is freed and trimmed: not a byte is lost, and the device has its memory back.
  bool finish(std::string* why) {
    while (!world_.held.empty())
      if (!fine(world_.free(world_.held.size() - 1), "free", why)) return false;
    if (!fine(world_.pool->trim(0, true), "trim", why) || !world_.good(why)) return false;
    const PoolStats stats = world_.pool->stats();
    const ModelCounts counts = world_.device->counts();
    if (stats.reserved.current != 0 || stats.live != 0 || stats.pending_blocks != 0 ||
        counts.page_bytes != 0 || counts.plain_bytes != 0) {
      *why = "memory is lost";
      return false;
    }
    if (!fine(world_.pool->close(), "close", why)) return false;
    const ModelCounts after = world_.device->counts();
    if (after.spaces + after.mappings + after.events != 0) *why = "close leaves something behind";
    return why->empty();
  }

  const Setting& setting_;
  Random random_;
  Watched world_;
  std::vector<StreamHandle> streams_{0};
};

// VRAM_SEED moves all seeds, for a longer search than the checks have time for.
void try_seeds(Setting setting, std::uint64_t seeds) {
  const char* const moved = std::getenv("VRAM_SEED");
  const std::uint64_t first = moved != nullptr ? std::strtoull(moved, nullptr, 10) : 1;
  const std::uint64_t sampling = vram::testing::sampling();
  if (seeds < sampling) setting.steps = setting.steps * static_cast<int>(seeds) / static_cast<int>(sampling);
  seeds = std::max<std::uint64_t>(1, seeds / sampling);
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    std::string why;
    if (Program(setting, seed).run(&why)) continue;
    std::printf("%s, seed %llu: %s\n", setting.name, static_cast<unsigned long long>(seed), why.c_str());
    ++vram::testing::failures;
    return;
  }
}

PoolConfig with(CrossStream cross_stream, bool pages = true) {
  PoolConfig config;
  config.cross_stream = cross_stream;
  config.pages = pages;
  return config;
}
ModelOptions on(Schedule schedule) {
  ModelOptions options;
  options.schedule = schedule;
  options.lag_us = 1000;
  return options;
}

}  // namespace

// Little memory, so that the late rungs serve; small and large blocks; checked after every step.
TEST(tiny_devices_keep_every_promise) {
  for (const CrossStream cross : {CrossStream::ready, CrossStream::wait, CrossStream::never})
    for (const bool pages : {true, false})
      for (const Schedule schedule : {Schedule::manual, Schedule::lag})
        try_seeds({pages ? "tiny, pages" : "tiny, plain", 24 * kMiB, with(cross, pages), on(schedule),
                   9 * kMiB, 24, 1500, 1},
                  6);
}

TEST(small_blocks_on_few_pages_keep_every_promise) {
  for (const CrossStream cross : {CrossStream::ready, CrossStream::wait})
    for (const bool pages : {true, false})
      try_seeds({"small", 6 * kMiB, with(cross, pages), on(Schedule::manual), kMiB, 60, 2500, 1}, 6);
}

TEST(middling_devices_keep_every_promise) {
  for (const CrossStream cross : {CrossStream::ready, CrossStream::wait, CrossStream::never})
    for (const Schedule schedule : {Schedule::manual, Schedule::lag})
      try_seeds({"middling", 768 * kMiB, with(cross), on(schedule), 300 * kMiB, 60, 3000, 20}, 4);
}

TEST(long_runs_keep_every_promise) {
  for (const bool pages : {true, false})
    try_seeds(
        {"long", 4 * kGiB, with(CrossStream::ready, pages), on(Schedule::lag), 300 * kMiB, 400, 15000, 100},
        2);
}

TEST(zeroing_is_ordered_like_any_other_use) {
  PoolConfig config = with(CrossStream::wait);
  config.zero_on_allocate = config.zero_on_free = true;
  for (const bool pages : {true, false}) {
    config.pages = pages;
    try_seeds({"zeroing", 24 * kMiB, config, on(Schedule::manual), 9 * kMiB, 24, 1500, 1}, 4);
  }
}

TEST(a_cache_of_few_blocks_and_small_release_threshold_keep_every_promise) {
  PoolConfig config = with(CrossStream::ready);
  config.stream_cache = 3;
  config.release_threshold = 4 * kMiB;
  config.best_fit = false;
  try_seeds({"few cached", 64 * kMiB, config, on(Schedule::lag), 33 * kMiB, 30, 3000, 5}, 4);
}

TEST_MAIN()
